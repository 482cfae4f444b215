"""Small whole runs against the records they once left: numbers that should not change do not.

`pytest tests/golden --update-golden` writes what is found; the difference is for a reviewer to read.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.methods import METHODS, Method
from fedquilt.models import tiny_resnet

HERE = Path(__file__).parent
CLOSE = {"rel": 1e-6, "abs": 1e-9}  # last digits differ between machines, and training makes a little more of them


def net() -> nn.Module:
    """The demo's residual net with weights from our own hash: torch's generators round differently on other CPUs."""
    module = tiny_resnet(num_classes=10)
    with torch.no_grad():
        for place, (name, weight) in enumerate(module.named_parameters()):
            if weight.dim() > 1:
                drawn = noise.uniform(torch.tensor(noise.key(place)), weight.shape, torch.float64)
                weight.copy_((2 * drawn - 1) / weight[0].numel() ** 0.5)
            elif name.endswith("linear.bias"):
                weight.zero_()
    return module


def played(method: Method) -> fq.Run:
    data = fq.data.digits().deal(10, fq.data.Labels(3), seed=1)
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), 10, 4)
    learning = replace(method.local, optimiser=fq.SGD(lr=0.1), batch_size=16)
    return fq.run(
        replace(method, local=learning),
        fq.trace(net, data.example),
        data,
        fleet,
        "sequential",
        rounds=3,
        seed=1,
        precision="fp64",
    )


def story(run: fq.Run) -> dict[str, Any]:
    """The records without seconds, and of every weight its mean and its length."""
    rounds = [{key: value for key, value in record.items() if key != "seconds"} for record in run.history]
    weights = {name: [float(w.mean()), float(torch.linalg.vector_norm(w))] for name, w in run.server.weights.items()}
    return {"rounds": rounds, "weights": weights}


def differences(found: Any, stored: Any, path: str = "") -> list[str]:
    """Where two stories part, by path; numbers may differ in their last digits, whole numbers and the rest may not."""
    if isinstance(found, dict) and isinstance(stored, dict):
        apart = [f"{path}.{key}: only {'here' if key in found else 'there'}" for key in found.keys() ^ stored.keys()]
        return apart + [
            line for key in found if key in stored for line in differences(found[key], stored[key], f"{path}.{key}")
        ]
    if isinstance(found, list) and isinstance(stored, list) and len(found) == len(stored):
        places = enumerate(zip(found, stored, strict=True))
        return [line for place, pair in places for line in differences(*pair, f"{path}[{place}]")]
    same = found == pytest.approx(stored, **CLOSE) if isinstance(stored, float) else found == stored
    return [] if same else [f"{path}: {found} here, {stored} there"]


@pytest.mark.parametrize("method", ["fedavg", "heterofl", "fedrolex"])
def test_the_run_is_the_one_that_is_stored(method: str, request: pytest.FixtureRequest) -> None:
    found, file = story(played(METHODS[method]())), HERE / f"{method}.json"
    assert found["rounds"][-1]["accuracy"]["1.0"] > 0.2  # it has begun to learn, so that it depends on everything
    if request.config.getoption("--update-golden"):
        file.write_text(json.dumps(found, indent=1) + "\n")
    assert file.exists(), f"{file} is not there yet; --update-golden writes it"
    apart = differences(found, json.loads(file.read_text()))
    assert not apart, "\n".join(["--update-golden accepts what is here:", *apart])


def test_differences_are_found() -> None:
    one = {"rounds": [{"loss": 1.0, "clients": 4}], "weights": {"a": [0.5, 2.0]}}
    assert differences({**one, "weights": {"a": [0.5, 2.0 + 1e-7]}}, one) == []
    assert differences({**one, "weights": {"a": [0.5, 2.0 + 1e-5]}}, one) == [".weights.a[1]: 2.00001 here, 2.0 there"]
    assert differences({**one, "rounds": []}, one) == [f".rounds: [] here, {one['rounds']} there"]
    assert differences({"rounds": one["rounds"]}, one) == [".weights: only there"]
    other = {"rounds": [{"loss": 1.0, "clients": 5}], "weights": one["weights"]}
    assert differences(other, one) == [".rounds[0].clients: 5 here, 4 there"]
