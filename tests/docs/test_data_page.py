"""docs/data.md: blocks that need no file of the reader run as written, and tables are complete."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedquilt.cli.main import main
from fedquilt.data import DATA, PARTITIONS, text
from fedquilt.data.prepare import DATA_SETS, syn
from fedquilt.data.sources import masks, npz
from tests.conftest import shortened

PAGE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_first_lines_partition_the_digits():
    names: dict[str, object] = {}
    exec(compile(blocks("python")[0], "data.md", "exec"), names)
    assert names["data"].num_clients == 20


def test_the_lines_on_validation_samples_evaluate_on_them():
    names: dict[str, object] = {}
    code = next(block for block in blocks("python") if "with_validation" in block)
    exec(compile(code, "data.md", "exec"), names)
    run = names["run"]
    assert len(run.data.test_targets) == len(names["data"].validation_parts.order) == 280
    assert set(run.accuracy) == {"1.0"}


def test_commands_on_bundled_data_run_as_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [
        line for block in blocks("sh") for line in block.splitlines() if line.startswith("fedquilt")
    ]
    ready = [
        line for line in lines if not re.search(r"hub:|\.npz |--data scans |prepare (?!syn)", line)
    ]
    assert len(ready) >= 4
    for line in ready:
        words = shlex.split(line, comments=True)[1:]
        short = ["--rounds", "1", "--cohort", "1", "--epochs", "1"] if words[0] == "run" else []
        assert main(shortened(words, short)) == 0, line
    assert (tmp_path / "partition.svg").exists()
    assert (tmp_path / "syn.npz").exists()
    assert "▅" in capsys.readouterr().out


def test_the_command_on_a_folder_of_masks_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for place in range(6):
        mask = np.zeros((20, 18), np.uint8)
        mask[place : place + 9, 4:12] = 255
        for kind, values in (("images", mask // 2), ("masks", mask)):
            (tmp_path / "scans" / kind).mkdir(parents=True, exist_ok=True)
            Image.fromarray(values).save(tmp_path / "scans" / kind / f"{place}.png")
    (line,) = (
        line for block in blocks("sh") for line in block.splitlines() if "--data scans " in line
    )
    short = ["--rounds", "1", "--cohort", "1", "--set", "model.width=8"]
    assert main(shortened(shlex.split(line)[1:], short)) == 0


def test_the_drawing_is_what_the_command_prints(capsys):
    command = next(
        line for block in blocks("sh") for line in block.splitlines() if "--plot" in line
    )
    assert main(shlex.split(command, comments=True)[1:]) == 0
    drawn = [line.rstrip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert "\n".join(drawn) in PAGE


def test_the_tables_are_complete():
    for name, kind in PARTITIONS.items():
        row = re.search(rf"^\| `{name}` \| `{kind.__name__}\((.*?)\)` \|", PAGE, re.MULTILINE)
        assert row, name
        for option in re.findall(r"(\w+)=", row[1]):
            assert option in {field.name for field in fields(kind)}
    for name in DATA:
        assert re.search(rf"`{name.replace('-', '_')}\(", PAGE), name
    section = PAGE.split("### Text")[1].split("### ")[0]
    options = re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)
    assert options == [name for name in signature(text).parameters if name != "path"]
    assert {"normalize", "mean", "std", "channels", "public", "multiple_of"} <= set(
        signature(npz).parameters
    )
    rows = PAGE.split("| option of `masks` |")[1].split("\n\n")[0]
    listed = [
        name for row in rows.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])
    ]
    assert listed == [name for name in signature(masks).parameters if name != "path"]


def test_the_tables_of_prepared_data_are_those_of_the_code():
    section = PAGE.split("## Preparing public data")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(DATA_SETS)
    asked = re.findall(r"^fedquilt data prepare ([a-z0-9_ ]+?) --", section, re.MULTILINE)
    assert set(" ".join(asked).split()) <= set(DATA_SETS)
    assert "it was not run against the public hosts" in " ".join(section.split())
    ranges = {
        "number of digits": f"{syn.NUM_DIGITS[0]} to {syn.NUM_DIGITS[1]}",
        "font size": f"{syn.FONT_SIZE[0]} to {syn.FONT_SIZE[1]} pixels",
        "rotation about the middle": f"−{-syn.TENTHS_OF_DEGREES[0] / 10} to "
        f"{syn.TENTHS_OF_DEGREES[1] / 10} degrees",
        "shift to the right, shift down": f"−{-syn.SHIFT[0]} to {syn.SHIFT[1]} pixels",
        "radius of the Gaussian blur": f"{syn.BLUR_TENTHS[0] / 10} to "
        f"{syn.BLUR_TENTHS[1] / 10} pixels",
        "background colour, then stroke colour": "0 to 255 per channel; both again until the "
        f"channels' absolute differences sum to {syn.MIN_CONTRAST} or more",
    }
    for quantity, shown in ranges.items():
        assert f"| {quantity} | {shown}" in section
    assert (
        f"canvas of {syn.CANVAS} × {syn.CANVAS} pixels and reduced to {syn.SIDE} × {syn.SIDE}"
        in " ".join(section.split())
    )


@pytest.mark.parametrize("name", ["cifar10", "digits5", "mnist_writers", "shakespeare"])
def test_the_real_sets_have_a_command_each(name):
    assert re.search(rf"^fedquilt run --data {name}\.npz ", PAGE, re.MULTILINE)
