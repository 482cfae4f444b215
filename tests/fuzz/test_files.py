"""Hundreds of broken volumes and masks: each is read, or refused in words; none ends in a stack
trace.

Mutations come from a seed, so that a failure can be repeated: its number is in the message.
"""

from __future__ import annotations

import gzip
import random
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image

from fedquilt.data import npz
from fedquilt.data.sources import masks
from fedquilt.data.sources.nifti import read_volume
from fedquilt.errors import FedquiltError

COUNT = 400
HEADER = 352  # Bytes of a NIfTI-1 header, in which most mutations fall.


def broken(content: bytes, rng: random.Random, first: int) -> bytes:
    """Return the content with bytes changed, cut off or added."""
    values = bytearray(content)
    kind = rng.choice(["change", "change", "change", "cut", "add"])
    if kind == "cut":
        return bytes(values[: rng.randrange(len(values))])
    if kind == "add":
        return bytes(values) + rng.randbytes(rng.randrange(1, 50))
    for _ in range(rng.randint(1, 6)):
        end = first if rng.random() < 0.8 else len(values)
        values[rng.randrange(end)] = rng.choice([0, 1, 127, 128, 255, rng.randrange(256)])
    return bytes(values)


@pytest.mark.parametrize("version", [1, 2])
def test_broken_volumes_are_read_or_refused(tmp_path: Path, version: int) -> None:
    kind = nibabel.Nifti1Image if version == 1 else nibabel.Nifti2Image
    whole = kind(np.arange(60, dtype=np.int16).reshape(3, 4, 5), np.eye(4)).to_bytes()
    rng = random.Random(version)
    refused: list[str] = []
    for number in range(COUNT):
        content = broken(whole, rng, HEADER if version == 1 else 540)
        packed = number % 4 == 0
        file = tmp_path / f"{number}.nii{'.gz' if packed else ''}"
        file.write_bytes(gzip.compress(content) if packed else content)
        try:
            volume = read_volume(file, canonical=number % 2 == 0)
        except FedquiltError as error:
            refused.append(str(error))
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error}")
        else:
            assert volume.values.ndim == 4, number
            assert np.isfinite(volume.values).all(), number
    assert COUNT // 10 < len(refused) < COUNT
    assert all(str(tmp_path) in message for message in refused)


def test_broken_masks_are_read_or_refused(tmp_path: Path) -> None:
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
    rng = random.Random(0)
    values = np.arange(48, dtype=np.uint8).reshape(6, 8)
    for number in range(5):
        Image.fromarray(values).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(values % 3).save(tmp_path / "masks" / f"{number}.png")
    target = tmp_path / "masks" / "3.png"
    whole = target.read_bytes()
    refused: list[str] = []
    for number in range(COUNT // 4):
        target.write_bytes(broken(whole, rng, len(whole)))
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow warns of chunks that it can do without.
                masks(str(tmp_path))
        except FedquiltError as error:
            refused.append(str(error))
        except Exception as error:
            pytest.fail(f"mutation {number}: {type(error).__name__}: {error}")
    assert refused
    assert all("3.png" in message for message in refused)


def test_broken_arrays_with_masks_are_read_or_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    refused = 0
    for number in range(COUNT // 4):
        sides = rng.integers(2, 4, rng.integers(1, 4))
        least = rng.choice([0, 1, 1, 1])
        arrays = {
            "x": rng.integers(0, 200, (6, *sides)).astype(rng.choice(["u1", "i2", "f4"])),
            "y": rng.integers(0, 3, (rng.choice([6, 6, 6, 5]), *sides)).astype(
                rng.choice(["u1", "i8", "f4"])
            ),
            "shapes": rng.integers(least, sides + 1, (6, len(sides))).astype(
                rng.choice(["u1", "i8", "f8"])
            ),
        }
        np.savez(tmp_path / "x.npz", **arrays)
        how = rng.choice(["auto", "sample", "none"])
        try:
            pool = npz(str(tmp_path / "x.npz"), multiple_of=int(rng.integers(0, 9)), normalize=how)
        except FedquiltError:
            refused += 1
        except Exception as error:
            pytest.fail(f"arrays {number}: {type(error).__name__}: {error}")
        else:
            assert pool.inputs.shape[2:] == pool.targets.shape[1:]
    assert COUNT // 8 < refused < COUNT // 4 - 10
