"""SYN-like digits: drawn from a seed, balanced, with every random quantity in its range."""

from __future__ import annotations

import shutil
from pathlib import Path

import matplotlib
import numpy as np
import pytest

from fedquilt.data import npz
from fedquilt.data.prepare import Recipe, prepare
from fedquilt.data.prepare.syn import CANVAS, DEJAVU, DigitDraws, _font, _written, synthesised
from fedquilt.errors import ConfigError, DataError

FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"


def drawn(count: int = 20, split: str = "train", seed: int = 0, fonts: Path | None = None):
    return synthesised(count, split, seed, fonts, lambda what, done, total: None)


def test_the_same_seed_draws_the_same_bytes():
    images, digits = drawn()
    again, _ = drawn()
    assert np.array_equal(images, again)
    assert (images.shape, images.dtype) == ((20, 28, 28, 3), np.uint8)
    assert digits.tolist() == [*range(10), *range(10)]
    assert np.array_equal(drawn(10)[0], images[:10])  # an image depends on its own number alone
    assert not np.array_equal(drawn(seed=1)[0], images)
    assert not np.array_equal(drawn(split="test")[0], images)


def test_images_differ_and_show_two_colours():
    images, _ = drawn(40)
    assert len({image.tobytes() for image in images}) == 40
    contrast = images.reshape(40, -1, 3).astype(int).max(1) - images.reshape(40, -1, 3).min(1)
    assert int(contrast.sum(1).min()) > 50  # blurred, but seen


@pytest.mark.parametrize(("text", "labeled"), [("273", 1), ("73", 0), ("27", 1), ("722", 0)])
def test_the_labelled_digit_is_in_the_middle(text, labeled):
    font = _font(FONTS / "DejaVuSansMono.ttf", 60)
    alone = np.asarray(_written("7", 0, font)).astype(int)
    beside = np.asarray(_written(text, labeled, font)).astype(int)
    rows, columns = alone.nonzero()
    assert abs(rows.min() + rows.max() - CANVAS + 1) <= 2
    assert abs(columns.min() + columns.max() - CANVAS + 1) <= 2
    middle = np.s_[:, columns.min() : columns.max() + 1]
    assert np.abs(alone[middle] - beside[middle]).max() <= 1
    assert beside.sum() > alone.sum()


def test_every_font_draws_every_digit():
    for file in (*(FONTS / name for name in DEJAVU), None):
        shapes = [np.asarray(_written(digit, 0, _font(file, 60))) for digit in "0123456789"]
        assert len({shape.tobytes() for shape in shapes}) == 10


def test_draws_are_in_their_range():
    draws = DigitDraws(7)
    found = {draws.between(-2, 3) for _ in range(200)}
    assert found == set(range(-2, 4))


def test_a_set_of_its_own(tmp_path):
    (found,) = prepare(["syn"], tmp_path, recipe=Recipe(per_domain=20))
    assert not found.files
    assert "not the published SYN" in found.data_set.title
    pool = npz(str(found.path))
    assert (len(pool.targets), len(pool.test_targets)) == (20, 10)
    assert pool.inputs.shape[1:] == (3, 28, 28)
    assert np.array_equal(drawn()[0], pool.inputs.permute(0, 2, 3, 1).numpy())


def test_fonts_of_a_folder(tmp_path):
    shutil.copy(FONTS / DEJAVU[0], tmp_path / "one.ttf")
    images, _ = drawn(fonts=tmp_path)
    assert not np.array_equal(images, drawn()[0])
    (tmp_path / "two.otf").write_text("no font")
    with pytest.raises(DataError, match=r"two\.otf cannot be read as a font"):
        drawn(fonts=tmp_path)
    (tmp_path / "two.otf").unlink()
    shutil.copy(FONTS / "STIXSizFiveSymReg.ttf", tmp_path / "two.ttf")
    with pytest.raises(DataError, match=r"two\.ttf has no shapes for the ten digits"):
        drawn(fonts=tmp_path)


def test_folders_without_fonts(tmp_path):
    with pytest.raises(ConfigError, match=r"there are no \.ttf or \.otf files in it"):
        drawn(fonts=tmp_path)
    with pytest.raises(ConfigError, match="there is no such folder"):
        drawn(fonts=tmp_path / "none")
