"""A thousand broken .npz files, and broken text and images: each is refused in words, or is read as
the intact one.

Mutations come from a seed, so that a failure can be repeated: its number is in the message.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedquilt.data import Pool, images, source, text
from fedquilt.errors import FedquiltError

COUNT = 1_000
FEW = 150  # in `make test`


def quick_and_whole(few: int, count: int) -> list[Any]:
    return [few, pytest.param(count, marks=pytest.mark.slow)]


def broken(whole: bytes, rng: random.Random) -> bytes:
    """Return a file with bytes changed, cut off, added, removed or set to zero. The ends are
    changed most.
    """
    values = bytearray(whole)
    place = rng.choice(
        [rng.randrange(len(values)), rng.randrange(200), len(values) - 1 - rng.randrange(400)]
    )
    place = min(max(place, 0), len(values) - 1)
    match rng.choice(
        ["change", "change", "change", "flip", "flip", "zeros", "cut", "add", "remove"]
    ):
        case "change":
            for _ in range(rng.randint(1, 4)):
                values[min(place + rng.randrange(30), len(values) - 1)] = rng.choice(
                    [0, 1, 127, 255, rng.randrange(256)]
                )
        case "flip":
            values[place] ^= 1 << rng.randrange(8)
        case "zeros":
            values[place : place + 16] = bytes(len(values[place : place + 16]))
        case "cut":
            del values[place:]
        case "add":
            values[place:place] = rng.randbytes(rng.randint(1, 20))
        case "remove":
            del values[place : place + rng.randint(1, 20)]
    return bytes(values)


def assert_alike(found: Pool, intact: Pool, number: int) -> None:
    for name in ("inputs", "targets", "test_inputs", "test_targets", "clients"):
        one, other = getattr(found, name), getattr(intact, name)
        assert (one is None) == (other is None), f"mutation {number}: {name}"
        assert one is None or torch.equal(one, other), f"mutation {number}: {name}"
    assert found.class_names == intact.class_names, number


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("count", quick_and_whole(FEW // 2, COUNT // 2))
def test_broken_arrays_are_refused_or_the_same(tmp_path: Path, save, count) -> None:
    file = tmp_path / "x.npz"
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(20, 6)).astype(np.float32), "y_train": np.arange(20) % 3}
    save(file, **arrays, client_train=np.arange(20) // 5, classes=np.array(["ant", "bee", "cat"]))
    whole, intact = file.read_bytes(), source(str(file))()
    refused = 0
    for number in range(count):
        file.write_bytes(broken(whole, random.Random(number)))
        try:
            pool = source(str(file))()
        except FedquiltError as error:
            refused += "x.npz" in str(error)
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
        else:
            assert_alike(pool, intact, number)
    assert count / 3 < refused < count


@pytest.mark.parametrize("count", quick_and_whole(FEW // 3, COUNT // 2))
def test_broken_text_arrays_are_refused_or_the_same(tmp_path: Path, count) -> None:
    file = tmp_path / "x.npz"
    words = np.frombuffer(b"to be or not\nto be\nis the\nquestion we\nask of all\n" * 4, np.uint8)
    np.savez(file, text=words, start=np.array([0, 96]), users=np.array(["ann", "bob"]))
    whole, intact = file.read_bytes(), text(str(file))
    for number in range(count):
        file.write_bytes(broken(whole, random.Random(number)))
        try:
            pool = text(str(file))
        except FedquiltError:
            continue
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
        assert_alike(pool, intact, number)


@pytest.mark.parametrize("name", ["x.json", "x.txt"])
@pytest.mark.parametrize("count", quick_and_whole(FEW // 3, COUNT // 2))
def test_broken_text_is_read_or_refused(tmp_path: Path, name, count) -> None:
    file = tmp_path / name
    whole = (
        b'{"ann": ["to be or not", "to be", "is", "the"], '
        b'"bob": ["question", "we", "ask", "of all"]}\n'
    )
    for number in range(count):
        file.write_bytes(broken(whole, random.Random(number)))
        try:
            text(str(file))
        except FedquiltError:
            continue
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp"])
@pytest.mark.parametrize("count", quick_and_whole(FEW // 5, COUNT // 4))
@pytest.mark.filterwarnings("ignore")  # Pillow warns of metadata that it can do without.
def test_broken_images_are_read_or_refused(tmp_path: Path, suffix, count) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    for kind in ("ant", "bee"):
        (tmp_path / kind).mkdir()
        for number in range(3):
            Image.fromarray(pixels).save(tmp_path / kind / f"{number}.{suffix}")
    file = tmp_path / "bee" / f"1.{suffix}"
    whole = file.read_bytes()
    messages: list[str] = []
    for number in range(count):
        file.write_bytes(broken(whole, random.Random(number)))
        try:
            images(str(tmp_path))
        except FedquiltError as error:
            messages.append(str(error))
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
    assert messages
    assert all(f"1.{suffix}" in message for message in messages)
