"""docs/architectures.md: its commands and its Python run as written."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from fedquilt.cli.main import main
from fedquilt.supernet import SPACES, Supernet, TinySpace, check_space, save_supernet

PAGE = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the page's files, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("devices.csv").write_text(blocks("csv")[0])
    Path("mine.py").write_text(
        next(block for block in blocks("python") if block.startswith("# mine.py"))
    )
    images = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 1), dtype=np.uint8)
    np.savez("public.npz", x_train=images, y_train=np.arange(40) % 10)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("place", range(1, len(blocks("sh"))))
def test_commands_run_as_written(
    place: int, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    block = blocks("sh")[place]
    if "tiny.safetensors" in block and "supernet train" not in block:
        save_supernet(Supernet(TinySpace(num_classes=4)), "tiny.safetensors")
    for line in block.splitlines():
        assert main(shlex.split(line, comments=True)[1:]) == 0
    assert capsys.readouterr().out


def test_python_runs_as_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in blocks("python"):
        exec(compile(block, "architectures.md", "exec", dont_inherit=True), names)
    lines = capsys.readouterr().out.splitlines()
    assert "with 3 members" in lines[0]
    assert lines[1].startswith("net2")
    assert lines[2].startswith("knowledge ")


def test_the_pages_space_keeps_the_rules(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(compile(Path("mine.py").read_text(), "mine.py", "exec", dont_inherit=True), names)
    check_space(names["Slim"]())  # type: ignore[operator]


def test_the_table_of_spaces_is_complete() -> None:
    listed = re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE)
    assert listed == list(SPACES)
