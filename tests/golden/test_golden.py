"""Compare small whole runs with the records that are stored, so that numbers do not change
unnoticed.

`pytest tests/golden -m '' --update-golden` writes records that are missing or have changed. The
difference is for a reviewer to read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import fedquilt as fq
from tests.golden.cases import FOLDERS, QUICK, RUNS, SAME_RUNS

HERE = Path(__file__).parent
# last digits differ between machines, and training makes a little more of them
CLOSE = {
    "rel": 1e-6,
    "abs": 1e-9,
}
# One bit in the low bytes of a few hundred floats moves the mean of all bytes by up to 4e-4.
BYTES_CLOSE = {"rel": 2e-3, "abs": 0.0}


def story(run: fq.Run) -> dict[str, Any]:
    """Return the records without seconds, and mean and norm of every weight and of what clients
    keep.
    """
    times = ("seconds", "server_seconds")
    rounds = [
        {key: value for key, value in record.items() if key not in times} for record in run.history
    ]
    weights = {name: moments([value]) for name, value in run.server.weights.items()}
    found: dict[str, Any] = {"rounds": rounds, "weights": weights}
    if run.server.slots:
        slots = run.server.slots.items()
        found["slots"] = {slot: moments(values.values()) for slot, values in slots}
    if run.server.memory:
        memories = sorted(run.server.memory.items())
        found["memory"] = {
            f"{client} {scope}".strip(): kept(memory) for (client, scope), memory in memories
        }
    return found


def kept(memory: Any) -> dict[str, Any]:
    """Return the steps that a client has taken, and mean and norm of its own weights and of each
    slot.
    """
    slots = {slot: moments(values.values()) for slot, values in memory.slots.items()}
    return {"steps": memory.steps, "weights": moments(memory.weights.values()), "slots": slots}


def moments(tensors: Any) -> list[float]:
    """Return the mean and the norm over all values of some tensors."""
    values = [tensor.detach().double().flatten() for tensor in tensors]
    if not values:
        return [0.0, 0.0]
    vector = torch.cat(values)
    return [float(vector.mean()), float(torch.linalg.vector_norm(vector))]


def contents(folder: Path) -> dict[str, Any]:
    """Describe the files below a folder: tensors with shape, mean and norm, and the keys of JSON
    objects.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): content(path) for path in files}


def content(path: Path) -> dict[str, Any]:
    match path.suffix:
        case ".safetensors":
            with safe_open(path, "pt") as file:
                tensors = {name: described(file.get_tensor(name)) for name in sorted(file.keys())}
                return {
                    "tensors": tensors,
                    "metadata": dict.fromkeys(sorted(file.metadata() or {})),
                }
        case ".json":
            return keys(json.loads(path.read_text()))
        case ".jsonl":
            lines = path.read_text().splitlines()
            return {
                str(number): dict.fromkeys(json.loads(line)) for number, line in enumerate(lines)
            }
    return {}


class ByteMoment(float):
    """The mean or norm of bytes of floats, whose low bits depend on the processor."""


def described(tensor: Tensor) -> dict[str, Any]:
    """Describe a tensor by its shape, mean and norm. Client states are stored as bytes."""
    values: list[float] = moments([tensor])
    if tensor.dtype == torch.uint8:
        values = [ByteMoment(value) for value in values]
    return {"shape": list(tensor.shape), "moments": values}


def keys(value: Any, depth: int = 2) -> Any:
    """Return the names of a JSON object's fields, and of the fields of objects in it, without
    values.
    """
    if not isinstance(value, Mapping) or not depth:
        return None
    return {name: keys(inner, depth - 1) for name, inner in value.items()}


def differences(found: Any, stored: Any, path: str = "") -> list[str]:
    """List where a record differs from the stored one, by path.

    Numbers may differ in their last digits; whole numbers and all else must be equal. Keys that
    only the new record has are ignored, because later versions write more.
    """
    if isinstance(found, dict) and isinstance(stored, dict):
        missing = [f"{path}.{key}: only there" for key in stored if key not in found]
        shared = [key for key in stored if key in found]
        return missing + [
            line for key in shared for line in differences(found[key], stored[key], f"{path}.{key}")
        ]
    if isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        places = enumerate(zip(found, stored, strict=True))
        return [line for place, pair in places for line in differences(*pair, f"{path}[{place}]")]
    close = BYTES_CLOSE if isinstance(found, ByteMoment) else CLOSE
    same = found == pytest.approx(stored, **close) if isinstance(stored, float) else found == stored
    return [] if same else [f"{path}: {found} here, {stored} there"]


def check(name: str, found: dict[str, Any], request: pytest.FixtureRequest) -> None:
    """Compare a record with the stored one; with --update-golden, store it first if it differs."""
    file = HERE / f"{name}.json"
    if request.config.getoption("--update-golden") and (
        not file.exists() or differences(found, stored(name))
    ):
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert file.exists(), f"{file} is not there yet; --update-golden writes it"
    apart = differences(found, stored(name))
    assert not apart, "\n".join(["--update-golden accepts what is here:", *apart])


def stored(name: str) -> Any:
    return json.loads((HERE / f"{name}.json").read_text())


def quick_or_slow(names: Any) -> list[Any]:
    """Mark all records as slow but those that `make test` runs."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", quick_or_slow(RUNS))
def test_the_run_is_the_one_that_is_stored(name: str, request: pytest.FixtureRequest) -> None:
    check(name, story(RUNS[name].play()), request)


@pytest.mark.parametrize("name", quick_or_slow(FOLDERS))
def test_the_files_are_those_that_are_stored(
    name: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    FOLDERS[name](tmp_path)
    check(name, contents(tmp_path), request)


def test_every_record_has_a_run_and_every_quick_one_exists() -> None:
    assert {file.stem for file in HERE.glob("*.json")} == {*RUNS, *FOLDERS}
    assert set(QUICK) <= {*RUNS, *FOLDERS}


def test_every_stored_run_learns() -> None:
    """A run that stands still would not show that a setting has changed."""
    for name in RUNS:
        rounds = stored(name)["rounds"]
        assert all(record["loss"] is not None for record in rounds), name
        # Records that are older than tasks have accuracy, and do not name the main figure.
        figures = [
            record["metrics"][record["main"]] if "main" in record else record["accuracy"]
            for record in rounds
        ]
        assert len({json.dumps(figure) for figure in figures}) == len(rounds), name
        if rounds[0].get("main") == "rmse":
            assert figures[-1]["1.0"] < figures[0]["1.0"], name
        else:
            assert max(max(figure.values()) for figure in figures) > 0.15, name


def test_no_two_stored_runs_are_the_same() -> None:
    """Each setting changes weights of the server or of clients, so that its record covers it."""
    trained = {
        name: norms([stored(name).get(key) for key in ("weights", "memory")]) for name in RUNS
    }
    equal = {pair for pair in combinations(RUNS, 2) if trained[pair[0]] == trained[pair[1]]}
    assert equal == SAME_RUNS


def norms(value: Any) -> list[str]:
    """Return the norms below a part of a record, to six digits."""
    match value:
        case [float(), float() as norm]:
            return [f"{norm:.6g}"]
        case dict():
            return [line for inner in value.values() for line in norms(inner)]
        case list():
            return [line for inner in value for line in norms(inner)]
    return []


def test_differences_are_found() -> None:
    one = {"rounds": [{"loss": 1.0, "clients": 4}], "weights": {"a": [0.5, 2.0]}}
    assert differences({**one, "weights": {"a": [0.5, 2.0 + 1e-7]}}, one) == []
    assert differences({**one, "weights": {"a": [0.5, 2.0 + 1e-5]}}, one) == [
        ".weights.a[1]: 2.00001 here, 2.0 there"
    ]
    assert differences({**one, "rounds": []}, one) == [f".rounds: [] here, {one['rounds']} there"]
    assert differences({"rounds": one["rounds"]}, one) == [".weights: only there"]
    other = {"rounds": [{"loss": 1.0, "clients": 5}], "weights": one["weights"]}
    assert differences(other, one) == [".rounds[0].clients: 5 here, 4 there"]
    assert differences({"rounds": [{"loss": 1.0}], "weights": {}}, one) == [
        ".rounds[0].clients: only there",
        ".weights.a: only there",
    ]


def test_keys_that_the_stored_record_does_not_have_are_ignored() -> None:
    one = {"rounds": [{"loss": 1.0}], "weights": {"a": [0.5, 2.0]}}
    more = {
        "rounds": [{"loss": 1.0, "main": "accuracy"}],
        "weights": {**one["weights"], "b": [1.0, 1.0]},
        "slots": {},
    }
    assert differences(more, one) == []
