"""Hundreds of broken model files: each is refused in words, or answers as the intact one does.

Mutations come from a seed, so that a failure can be repeated: its number is in the message.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.errors import FedquiltError
from fedquilt.methods import SplitMix
from fedquilt.runs.initial_weights import load_weights
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorFile
from tests.unit.deploy.test_export import net

COUNT = 500
FEW = 60  # in `make test`
VALUES: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3,
    0.5,
    1e300,
    10**12,
    2**64,
    "",
    "x",
    "0.weight",
    [],
    [[]],
    {},
    [-1],
    {"a": 1},
]


def quick_and_whole(few: int, count: int) -> list[Any]:
    return [few, pytest.param(count, marks=pytest.mark.slow)]


def mutated(whole: bytes, rng: random.Random) -> bytes:
    """Return a file with bytes changed, cut off, added or moved, mostly in the header."""
    values = bytearray(whole)
    begin = 8 + int.from_bytes(whole[:8], "little")
    kind = rng.choice(["change", "change", "change", "digit", "cut", "add", "remove", "length"])
    place = rng.randrange(begin if rng.random() < 0.7 else len(values))
    if kind == "cut":
        return bytes(values[:place])
    if kind == "add":
        return bytes(values[:place] + rng.randbytes(rng.randrange(1, 20)) + values[place:])
    if kind == "remove":
        return bytes(values[:place] + values[place + rng.randrange(1, 20) :])
    if kind == "length":
        return rng.choice([0, begin - 9, begin, 2**32, 2**63]).to_bytes(8, "little") + whole[8:]
    if kind == "digit":
        digits = [at for at in range(begin) if chr(values[at]).isdecimal()]
        values[rng.choice(digits)] = ord(str(rng.randrange(10)))
        return bytes(values)
    for _ in range(rng.randint(1, 4)):
        values[rng.randrange(begin if rng.random() < 0.7 else len(values))] = rng.randrange(256)
    return bytes(values)


def poisoned(tensors: dict[str, Tensor], note: dict[str, Any], rng: random.Random) -> bytes:
    """Return a file with the right checksum in which one value of the note or one tensor is
    another.
    """
    note, tensors = json.loads(json.dumps(note)), dict(tensors)
    raw = json.loads(note["layout"])
    if rng.random() < 0.2:
        name = rng.choice(list(tensors))
        tensors[rng.choice([name, "more", f"{name}x"])] = rng.choice(
            [torch.ones(3), torch.full((4,), torch.nan)]
        )
        tensors.pop(rng.choice(list(tensors)))
    else:
        holder: Any = rng.choice([note, raw])
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            if not keys:
                break
            key = rng.choice(keys)
            if not isinstance(holder[key], (dict, list)) or rng.random() < 0.3:
                holder[key] = rng.choice(VALUES)
                break
            holder = holder[key]
    if isinstance(note.get("layout"), str):
        note["layout"] = json.dumps(raw)
    return b"".join(bytes(chunk) for chunk in Blob.sealed(tensors, note).chunks())


@pytest.fixture
def written(play, make_data, tmp_path) -> Path:
    family = fq.trace(net, torch.zeros(2, 1, 4, 4))
    run = play(SplitMix(base=0.5), family, make_data(family, (9, 8)), rounds=1)
    run.export(tmp_path / "model.safetensors", fq.Budget(share=0.5))
    run.customizable((1, 0.5)).float().save(tmp_path / "sizes.safetensors")
    return tmp_path


@pytest.mark.parametrize("name", ["model", "sizes"])
@pytest.mark.parametrize("count", quick_and_whole(FEW // 2, COUNT // 2))
def test_broken_models_are_refused_or_answer_alike(written, name, count):
    whole = (written / f"{name}.safetensors").read_bytes()
    inputs = torch.linspace(-1, 1, 32).reshape(2, 1, 4, 4)
    with torch.no_grad():
        intact = fq.load_model(written / f"{name}.safetensors", net)(inputs)
    file = written / "broken.safetensors"
    refused = 0
    for number in range(count):
        file.write_bytes(mutated(whole, random.Random(number)))
        try:
            model = fq.load_model(file, net)
        except FedquiltError as error:
            refused += "broken.safetensors" in str(error)
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
        else:
            with torch.no_grad():
                assert torch.equal(model(inputs), intact), number
    assert refused > 0.9 * count


@pytest.mark.parametrize("name", ["model", "sizes"])
@pytest.mark.parametrize("count", quick_and_whole(FEW // 2, COUNT))
def test_hostile_models_are_loaded_or_refused(written, name, count):
    with TensorFile.open(written / f"{name}.safetensors") as file:
        note, tensors = file.note, file.tensors(torch.device("cpu"), sealed=True)
    refused = 0
    for number in range(count):
        (written / "hostile.safetensors").write_bytes(
            poisoned(tensors, note, random.Random(number))
        )
        try:
            fq.load_model(written / "hostile.safetensors", net)
        except FedquiltError:
            refused += 1
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
    assert count / 3 < refused < count


@pytest.mark.parametrize("count", quick_and_whole(100, 600))
def test_broken_initial_weights_are_refused_or_the_same(tmp_path, count):
    intact = net().state_dict()
    whole = b"".join(bytes(chunk) for chunk in Blob.sealed(intact, {"by": "us"}).chunks())
    file = tmp_path / "init.safetensors"
    refused = 0
    for number in range(count):
        file.write_bytes(mutated(whole, random.Random(number)))
        module = net()
        try:
            load_weights(module, str(file))
        except FedquiltError as error:
            refused += "init.safetensors" in str(error)
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}")
        else:
            assert all(
                torch.equal(value, intact[name]) for name, value in module.state_dict().items()
            ), number
    assert 0.8 * count < refused < count
