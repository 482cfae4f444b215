"""`fedquilt reproduce PAPER/TABLE --scale smoke`: every preset runs, without data, and ends with its table."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from fedquilt.cli import main
from fedquilt.studies.papers import presets, read_preset

ROOT = Path(__file__).parents[2]
QUICK = (
    "fedrolex/table7",
    "fedrescue/table3",
)  # These two run in `make test`, all others in `make test-all`.


@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in presets()],
)
def test_a_preset_runs_at_the_smoke_scale(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDQUILT_DATA", str(tmp_path / "nothing"))
    assert main(["reproduce", name, "--scale", "smoke", "--store", "results", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert table["head"] == ["row", "column", "paper", "measured", "difference"]
    preset = read_preset(name)
    rows = {row for row, *_ in table["rows"]}
    assert rows == {row.name for row in preset.rows}
    measured = {row for row, _, _, value, _ in table["rows"] if value != "–"}
    assert measured == rows, f"no number was measured for {sorted(rows - measured)}"
    assert any("mean nothing" in note for note in table["notes"])
    stored = list((tmp_path / "results" / name.partition("/")[0]).iterdir())
    assert len(stored) == len(preset.rows) * len(preset.seeds_at("smoke"))
    capsys.readouterr()
    assert main(["reproduce", name, "--scale", "smoke", "--json"]) == 0  # from what is on disk
    assert json.loads(capsys.readouterr().out)["rows"] == table["rows"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["fedrolex/tabel3"], "Did you mean 'fedrolex/table3'?"),
        (["fedrolex"], "name one of its tables"),
        (
            ["fedrolex/table3", "--scale", "tiny"],
            "the scale 'tiny' of fedrolex/table3 was asked for",
        ),
        (
            ["fedrolex/table3", "--rows", "FedProx"],
            "the row 'FedProx' of fedrolex/table3 was asked for",
        ),
        (["fedrolex/table3"], "fedquilt data prepare cifar10"),
        (["fedrolex/table6", "--scale", "smoke", "--set", "method.shft=2"], "method.shft"),
        (
            ["fedrolex/table6", "--scale", "smoke", "--jobs", "0"],
            "--jobs 0 was asked for; at least one is needed.",
        ),
        (
            ["fedrolex/table6", "--scale", "smoke", "--store", "file"],
            "--store file was asked for; a file is there.",
        ),
        (
            ["fedrolex/table6", "--scale", "smoke", "--out", "file"],
            "the folder file was asked for; a file is there.",
        ),
    ],
)
def test_what_cannot_be_reproduced_is_one_clear_error(args, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    (tmp_path / "file").write_text("")
    assert main(["reproduce", *args]) == 2
    assert said in capsys.readouterr().err


def test_rows_seeds_and_settings_can_be_chosen(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["--rows", "fedrolex, 10", "--seeds", "4", "5", "--set", "rounds=1", "--out", "mine"]
    assert (
        main(["reproduce", "fedrolex/table6", "--scale", "smoke", *asked, "--format", "markdown"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert next(line for line in lines if line.startswith("| FedRolex")).startswith(
        "| FedRolex, 10 % | global accuracy |"
    )
    assert not any("HeteroFL" in line for line in lines)
    assert "Settings that --set changed in all rows: rounds=1." in lines
    folders = sorted(path.name for path in Path("mine").glob("FedRolex*/seed*"))
    assert folders == ["seed4", "seed5"]
    assert "rounds = 1" in next(Path("mine").glob("FedRolex*/seed4/config.toml")).read_text()


@pytest.mark.slow
def test_a_wheel_brings_the_presets(tmp_path):
    """It is built, installed into an environment of its own, and runs a preset far from the checkout."""
    source = tmp_path / "source"
    shutil.copytree(
        ROOT / "fedquilt", source / "fedquilt", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip"]
    build = [
        *pip,
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(source),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("fedquilt-*.whl")
    # The dependencies are those of this environment; only the package comes from the wheel.
    venv.create(tmp_path / "env", with_pip=False, system_site_packages=False, symlinks=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env" / "lib").glob("python*/site-packages")
    install = [*pip, "install", "-q", "--no-deps", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True, timeout=300)
    others = [path for path in sys.path if path.endswith("site-packages")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *others])}
    command = [
        str(python),
        "-m",
        "fedquilt",
        "reproduce",
        "fedrolex/table7",
        "--scale",
        "smoke",
        "--json",
    ]
    found = subprocess.run(
        command,
        check=True,
        timeout=300,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert json.loads(found.stdout)["rows"]
    where = [str(python), "-c", "import fedquilt; print(fedquilt.__file__)"]
    home = subprocess.run(
        where, check=True, cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert home.startswith(str(site))
