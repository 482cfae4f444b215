"""docs/unions.md: its Python and its file run, and its comments are what is printed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedquilt.cli.main import main
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "unions.md").read_text()
QUICK = [
    "--rounds",
    "1",
    "--clients",
    "4",
    "--cohort",
    "2",
    "--set",
    "method.server_training.steps=2",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_python_runs_and_prints_what_its_comments_say(capsys: pytest.CaptureFixture[str]) -> None:
    source = "\n".join(blocks("python"))
    exec(compile(source, "unions.md", "exec"), {})
    printed = capsys.readouterr().out
    for comment in re.findall(r"^print\(.*\)\s+# (.*)$", source, re.MULTILINE):
        assert comment in printed
    assert "Small ['conv.bias', 'conv.weight', 'last.bias', 'last.weight']" in printed


@pytest.mark.parametrize("command", [line for block in blocks("sh") for line in block.splitlines()])
def test_commands_run(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    (tmp_path / "architectures.toml").write_text(blocks("toml file=architectures.toml")[0])
    monkeypatch.chdir(tmp_path)
    assert main(shortened(shlex.split(command)[1:], QUICK)) == 0
    assert "tiny_resnet + mlp" in capsys.readouterr().out
