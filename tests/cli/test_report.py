"""`fedquilt report`: the page and the images that it writes, and requests that it refuses."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from fedquilt.cli.main import main

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
SHORT = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1", "--model", "mlp"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a run and a study, which tests do not change."""
    root = tmp_path_factory.mktemp("report")
    assert main(["run", "--method", "fedrolex", *SHORT, "--out", str(root / "run")]) == 0
    study = ["compare", "heterofl", "fedrolex", *SHORT, "--seeds", "0", "1"]
    assert main([*study, "--out", str(root / "study")]) == 0
    return root


def test_a_run_becomes_one_page(folders, tmp_path, capsys):
    capsys.readouterr()
    out = tmp_path / "new" / "run.html"
    assert main(["report", str(folders / "run"), "--out", str(out), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {"format": "html", "files": [str(out)], "bytes": out.stat().st_size}
    page = out.read_text()
    assert out.stat().st_size < 6_000_000
    for heading in ("Quilt", "Clients", "Participation", "Costs", "Settings"):
        assert f"<h2>{heading}</h2>" in page
    assert "http://" not in page.split("<script>")[0]
    assert "There is no quilt" not in page


def test_a_study_becomes_one_page(folders, tmp_path, capsys):
    out = tmp_path / "study.html"
    assert main(["report", str(folders / "study"), "--out", str(out)]) == 0
    assert str(out) in capsys.readouterr().out
    page = out.read_text()
    assert "over 2 seeds" in page
    assert 'data-figure="quilt-1"' in page
    assert "pareto-params" in page


def test_charts_become_images(folders, tmp_path, capsys):
    begins = {"png": b"\x89PNG", "svg": b"<svg", "pdf": b"%PDF"}
    for form, begin in begins.items():
        out = tmp_path / form
        command = ["report", str(folders / "run"), "--format", form, "--out", str(out)]
        assert main(command) == 0
        files = {path.name: path.read_bytes() for path in out.iterdir()}
        assert {f"curves-round.{form}", f"curves-bytes.{form}", f"fleet.{form}"} <= files.keys()
        assert len([name for name in files if name.startswith("quilt-")]) == 2  # Hidden layers
        assert f"growth.{form}" not in files
        assert all(content.startswith(begin) for content in files.values())
    assert main(command) == 2
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0


def test_bad_requests_are_one_error_each(folders, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.html").write_text("mine")
    run = str(folders / "run")
    requests = {
        (str(tmp_path / "none"),): "there is no such folder",
        (str(tmp_path),): "there is no run in it",
        (run, "--metric", "accurcy"): "no run has recorded it. Did you mean",
        (run, "--out", "there.html"): "--force to replace it",
        (run, "--out", "."): "it is a folder",
        (run, "--format", "png"): "without a folder",
        (run, "--format", "png", "--out", "there.html"): "it is a file",
    }
    for words, message in requests.items():
        capsys.readouterr()
        assert main(["report", *words]) == 2, words
        error = capsys.readouterr().err
        assert message in error, error
        assert error.startswith("ConfigError: ")
    assert (tmp_path / "there.html").read_text() == "mine"
    assert not (tmp_path / "report.html").exists()


def test_damaged_runs_of_a_study_hide_nothing_else(folders, tmp_path):
    study = tmp_path / "study"
    shutil.copytree(folders / "study", study)
    (study / "heterofl" / "seed0" / "summary.json").write_text("{")
    log = study / "fedrolex" / "seed1" / "rounds.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    out = tmp_path / "page.html"
    assert main(["report", str(study), "--out", str(out)]) == 0
    page = out.read_text()
    assert "summary.json is damaged" in page
    assert "it was not written to its end" in page
    assert 'data-figure="curves"' in page


def test_code_of_a_folder_is_not_run_without_trust(folders, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(folders / "run", folder)
    shutil.rmtree(folder / "checkpoint")
    (folder / "evil.py").write_text("raise SystemExit('it was run')\n")
    config = folder / "config.toml"
    config.write_text(
        config.read_text().replace('name = "mlp"', f'name = "{folder / "evil.py"}:net"')
    )
    out = tmp_path / "page.html"
    assert main(["report", str(folder), "--out", str(out)]) == 0
    assert "There is no quilt" in out.read_text()
    assert "evil.py" in out.read_text()


WITHOUT = """
import sys
sys.modules["altair"] = None
from fedquilt.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_without_the_extra_the_command_says_what_to_install(folders):
    command = [sys.executable, "-c", WITHOUT, "report", str(folders / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "altair" in done.stderr
    assert "[report]" in done.stderr


def test_other_commands_do_not_import_altair():
    code = (
        "import sys, fedquilt, fedquilt.cli.main as m; m.main(['list', 'methods']); "
        "sys.exit('altair' in sys.modules or 'vl_convert' in sys.modules)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
