"""Folders of images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedquilt.data import Domains, images, source
from fedquilt.errors import DataError


def paint(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (4, 6)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path)


def test_folders_are_classes(tmp_path):
    for place in range(6):
        paint(tmp_path / "train" / "cat" / f"{place}.png", (place, 0, 0))
        paint(tmp_path / "train" / "dog" / "deep" / ".." / f"{place}.jpg", (0, 0, 200))
    paint(tmp_path / "test" / "dog" / "a.JPEG", (0, 0, 200))
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    pool = source(str(tmp_path))(normalize="none")
    assert pool.class_names == ("cat", "dog")
    assert pool.inputs.shape == (12, 3, 6, 4)
    assert pool.inputs.dtype == torch.uint8
    assert torch.bincount(pool.targets).tolist() == [6, 6]
    assert pool.inputs[:6, 0, 0, 0].tolist() == list(range(6))
    assert pool.test_targets.tolist() == [1]
    assert pool.num_classes == 2


def test_without_train_and_test_a_fifth_is_held_out(tmp_path):
    for place in range(10):
        paint(tmp_path / "ab"[place % 2] / f"{place}.png", (place, place, place))
    pool = images(str(tmp_path), gray=True, size=3)
    assert pool.inputs.shape == (8, 1, 3, 3)
    assert len(pool.test_targets) == 2
    both = torch.cat([pool.inputs, pool.test_inputs])[:, 0, 0, 0]
    assert torch.equal(both % 2, torch.cat([pool.targets, pool.test_targets]))


def test_a_level_of_folders_may_be_domains(tmp_path):
    for home, red in (("photo", 10), ("sketch", 20)):
        for label in ("cat", "dog"):
            for place in range(3):
                paint(tmp_path / "train" / home / label / f"{place}.png", (red, 0, 0))
            paint(tmp_path / "test" / home / label / "a.png", (red, 0, 0))
    data = images(str(tmp_path), domains=True, normalize="none").partition(partition=Domains())
    assert (data.class_names, data.domain_names) == (("cat", "dog"), ("photo", "sketch"))
    assert [data.inputs[part, 0].unique().tolist() for part in data.parts] == [[10], [20]]
    assert [data.test_inputs[part, 0].unique().tolist() for part in data.test_parts] == [[10], [20]]


def test_bytes_are_those_of_the_file(tmp_path):
    picture = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    for place in range(5):
        (tmp_path / "a").mkdir(exist_ok=True)
        Image.fromarray(picture).save(tmp_path / "a" / f"{place}.png")
    assert torch.equal(images(str(tmp_path)).inputs[0], torch.tensor(picture).permute(2, 0, 1))


def test_other_folders_than_folders_of_images_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"has no images \(\.bmp, .*CLASS/one\.png would fit"):
        images(str(tmp_path))
    paint(tmp_path / "loose.png", (0, 0, 0))
    with pytest.raises(DataError, match=r"loose\.png is in no folder .*CLASS/loose\.png would fit"):
        images(str(tmp_path))
    (tmp_path / "loose.png").unlink()
    paint(tmp_path / "a" / "1.png", (0, 0, 0))
    with pytest.raises(DataError, match=r"1\.png is in no folder .*DOMAIN/CLASS/1\.png would fit"):
        images(str(tmp_path), domains=True)
    paint(tmp_path / "a" / "2.png", (0, 0, 0), (9, 9))
    with pytest.raises(
        DataError, match=r"2\.png has 9×9 pixels and .*1\.png 6×4; size=4 makes all of them alike"
    ):
        images(str(tmp_path))


def test_a_file_that_breaks_off_is_named(tmp_path):
    paint(tmp_path / "a" / "1.png", (0, 0, 0))
    whole = (tmp_path / "a" / "1.png").read_bytes()
    (tmp_path / "a" / "2.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"2\.png cannot be read as an image"):
        images(str(tmp_path))
