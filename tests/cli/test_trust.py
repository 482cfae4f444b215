"""Commands that open the folder of another user run code that it names only if it is trusted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt import names
from fedquilt.cli.main import main
from fedquilt.runs.trust import trusted_file

CODE = """
from pathlib import Path
import torch
from torch import nn
import fedquilt as fq
Path("imported").touch()

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))

def data():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 8, 8, generator=generator), torch.arange(60) % 3
    return fq.data.Pool.of((x, y), (x, y)).partition(6)
"""
NAMED = ["--model", "mine.py:net", "--data", "mine.py:data", "--rounds", "1", "--cohort", "2"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run and a study that its user started."""
    folder = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        (folder / "mine.py").write_text(CODE)
        assert main(["run", *NAMED, "--method", "fedavg", "--out", "run"]) == 0
        assert main(["compare", "fedavg", *NAMED, "--out", "study"]) == 0
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, which is somebody else's: the list of its user stays behind."""
    copy = tmp_path / "copy"
    shutil.copytree(made, copy, ignore=shutil.ignore_patterns("config", "imported", "__pycache__"))
    monkeypatch.chdir(copy)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    names._read.cache_clear()
    return copy


COMMANDS = [
    ["run", "--resume", "run"],
    ["run", "run/config.toml"],
    ["compare", "--resume", "study"],
    ["compare", "fedavg", "--config", "run/config.toml"],
    ["compare", "run/config.toml"],
    ["compare", "fedavg", *NAMED, "--seeds", "1", "--out", "study"],
    ["export", "run", "--out", "model.safetensors"],
    ["clients", "run"],
    ["list", "data", "--plot", "--config", "run/config.toml"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_code_of_a_folder_from_elsewhere_is_not_run(
    folder: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 2
    told = capsys.readouterr().err
    assert "names code that you have not trusted. Nothing of it was run:" in told
    assert f"{folder}/mine.py:net is not in your list." in told
    assert not (folder / "imported").exists()
    assert not trusted_file().exists()

    assert main([*command, "--trust"]) == 0
    names._read.cache_clear()
    assert f"{folder}/mine.py:net\n" in trusted_file().read_text()


def test_python_refuses_untrusted_code_too(folder: Path) -> None:
    with pytest.raises(fq.errors.ConfigError, match=r"mine\.py:net is not in your list"):
        fq.load_run("run")
    with pytest.raises(fq.errors.ConfigError, match=r"mine\.py:net is not in your list"):
        fq.study(["run/config.toml"])
    with pytest.raises(fq.errors.ConfigError, match=r"mine\.py:net is not in your list"):
        fq.study(["fedavg"], out="study")
    assert not (folder / "imported").exists()
    fq.load_state("run")  # weights alone need no code
    assert fq.load_run("run", trust=True).server.round == 1
    assert fq.load_run("run").server.round == 1


def test_the_user_who_starts_a_run_can_open_it_until_its_code_changes(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(made)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(made / "config"))
    assert main(["clients", "run"]) == 0
    assert main(["compare", "--resume", "study"]) == 0
    (made / "mine.py").write_text(CODE + "\n")
    assert main(["clients", "run"]) == 2
    assert f"{made}/mine.py:net has changed since you trusted it." in capsys.readouterr().err
    (made / "mine.py").write_text(CODE)


def test_a_file_that_is_no_runs_is_the_users_own(folder: Path) -> None:
    shutil.copy("run/config.toml", "mine.toml")
    assert main(["run", "mine.toml", "--out", "again"]) == 0
    assert main(["clients", "again"]) == 0
