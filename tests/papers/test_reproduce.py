"""`fedquilt reproduce PAPER/TABLE --scale smoke`: every preset runs, without data, and ends with
its table.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from fedquilt.studies.papers import papers, presets, read_preset

# These two run in `make test`, all others in `make test-all`.
QUICK = (
    "fedrolex/table7",
    "fedrescue/table3",
)


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
        (["fedrolx"], "Did you mean 'fedrolex'?"),
        (["fedrolex"], "fedquilt data prepare cifar10"),
        (["ground", "--rows", "FedAvgM", "Nothing"], "'Nothing' were asked for; none of ground/"),
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


def test_the_name_of_a_paper_runs_all_of_its_tables(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["reproduce", "ground", "--rows", "local training", "--scale", "smoke", "--out", "all"]
    assert main([*asked, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)
    assert len(tables) == len(papers()["ground"]) == 5
    for table in tables:
        assert {row for row, *_ in table["rows"]} == {"local training"}
    folders = {path.name for path in Path("all").iterdir()}
    assert {f"ground/{name}" for name in folders} == set(papers()["ground"])
    # Rows that only some tables have leave out the others.
    asked = ["reproduce", "fedrolex", "--rows", "FedRolex, 512", "--scale", "smoke", "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["title"].startswith("fedrolex/coverage")
