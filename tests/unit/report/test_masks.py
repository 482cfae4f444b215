"""Pictures of masks: which pixels are painted, what agrees, and reasons why there are none."""

from __future__ import annotations

import base64
import re
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from fedquilt.cli.main import main
from fedquilt.report.collect import collect
from fedquilt.report.figures import mask_sections
from fedquilt.report.masks import Masks, _slices, mask_figure

PAGE = (Path(__file__).parents[3] / "docs" / "segmentation.md").read_text()
FILES = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def masks(truth, guess, num_classes=2, foreground=1):
    """Return masks of one image of two by two pixels."""
    shaped = [np.array([values]).reshape(1, 2, 2) for values in (truth, guess)]
    return Masks(np.zeros((1, 2, 2)), shaped[0], {"share 1": shaped[1]}, foreground, num_classes)


@pytest.mark.parametrize(
    ("truth", "guess", "agreement"),
    [
        ((0, 1, 1, 0), (0, 1, 0, 0), 1 / 2),  # One of two true pixels
        ((0, 1, 0, 0), (1, 1, 0, 0), 1 / 2),  # One pixel too many
        ((0, 0, 0, 0), (0, 0, 0, 0), 1.0),  # No foreground at all
        ((255, 1, 0, 0), (1, 1, 0, 0), 1.0),  # A pixel that does not count
    ],
)
def test_agreement_counts_the_pixels_of_both_foregrounds(truth, guess, agreement):
    assert masks(truth, guess).agreement("share 1") == [agreement]


def decoded(address):
    """Return the pixels (height, width, 3) of a PNG file in an address."""
    file = base64.b64decode(address.removeprefix("data:image/png;base64,"))
    assert file.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", file[16:24])
    (length,) = struct.unpack(">I", file[33:37])
    lines = np.frombuffer(zlib.decompress(file[41 : 41 + length]), np.uint8)
    return lines.reshape(height, 1 + 3 * width)[:, 1:].reshape(height, width, 3)


def test_pictures_have_the_colours_of_classes():
    figure = mask_figure(masks((0, 1, 0, 0), (0, 0, 0, 0)))
    rows = {row["column"]: row["url"] for row in figure.charts[()].to_dict()["data"]["values"]}
    assert list(rows) == ["image", "true mask", "share 1"]
    truth, guess = decoded(rows["true mask"]), decoded(rows["share 1"])
    assert truth.shape == (96, 96, 3)
    assert not guess.any()
    assert not truth[48:].any()
    assert truth[:48, 48:].any(2).all()
    assert figure.rows == [{"sample": 0, "net": "share 1", "agreement": 0.0}]
    assert "0.0%" in figure.sentence


def test_volumes_are_cut_and_large_slices_thinned():
    import torch

    volumes = torch.arange(3).reshape(1, 3, 1, 1).expand(1, 3, 200, 100)
    assert _slices(volumes, [2]).shape == (1, 67, 34)
    assert (_slices(volumes, [2]) == 2).all()


def test_a_report_of_a_segmentation_has_masks_or_says_why_not(tmp_path, monkeypatch):
    for name, content in FILES.findall(PAGE):
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "shapes.toml", "--rounds", "1", "--out", "run"]) == 0
    (run,) = collect([Path("run")]).runs
    (section,) = mask_sections({"Masks": run}, trust=False)
    (figure,) = section.figures
    nets = {row["net"] for row in figure.rows}
    assert nets == {"share 1", "share 0.5", "share 0.25"}
    assert len(figure.charts[()].to_dict()["data"]["values"]) == 4 * (2 + len(nets))

    shutil.rmtree("run/checkpoint")
    (section,) = mask_sections({"Masks": run}, trust=False)
    assert not section.figures
    assert "There are no masks of heterofl" in section.notes[0]


def test_other_tasks_have_no_section(tmp_path):
    short = ["--rounds", "1", "--clients", "2", "--cohort", "1", "--epochs", "1", "--model", "mlp"]
    assert main(["run", *short, "--out", str(tmp_path / "run")]) == 0
    assert mask_sections({"Masks": collect([tmp_path / "run"]).runs[0]}, trust=False) == []
