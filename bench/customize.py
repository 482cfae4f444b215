"""Switching a deployed model's size: setting a share of one that shares its weights, against
loading a file a switch.

    python bench/customize.py [--model preresnet18] [--batch 1]

Prints, for nested nets (HeteroFL) and base nets whose logits are averaged (Split-Mix), ms of a
switch and of a forward pass at every share, and the bytes that are resident. `load` reads a file's
weights into a module that is there already, `load_model` makes the module too. Weights are
untrained: nothing here depends on them.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from measure import NUM_CLASSES, images, machine
from safetensors.torch import load_file

import fedquilt as fq
from fedquilt.deploy.customizable import resident_bytes

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8)
METHODS = {
    "nested (HeteroFL)": fq.methods.HeteroFL(),
    "base nets (Split-Mix)": fq.methods.SplitMix(),
}


def milliseconds(repeats: int, *works: Callable[[], object]) -> list[float]:
    """Medians of several works that take turns: the machine may be another's for a while."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(repeats + 1):
        for work, own in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            if turn:  # the first warms up
                own.append(time.perf_counter() - began)
    return [1000 * statistics.median(own) for own in times]


def switches(model: fq.CustomizableModel, one: float, other: float, count: int = 1000) -> None:
    for _ in range(count // 2):
        model.set(share=other)
        model.set(share=one)


def reload(module: torch.nn.Module, file: Path) -> None:
    """The plain way with the least to do: a module of the right size is there, and only its weights
    are read.
    """
    module.load_state_dict(load_file(file), strict=False)  # counters of batches are not among them


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="preresnet18")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    spec = fq.models.MODELS[asked.model]

    def module() -> torch.nn.Module:
        return spec.factory(num_classes=NUM_CLASSES)

    data = fq.data.Pool.of(
        images(64, *spec.input_shape), images(32, *spec.input_shape, seed=1)
    ).partition(2)
    family = fq.trace(module, data.example)
    inputs = data.test_samples(torch.arange(asked.batch) % 32)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for name, method in METHODS.items():
            run = fq.prepare(method, family, data, fq.Fleet.of(SHARES, 2, 1))
            model = run.customizable(SHARES)
            print(
                f"{name:<22}{'set':>11}{'load':>11}{'load_model':>12}{'load / set':>14}"
                f"{'forward':>11}{'alone':>10}{'differ by':>11}"
            )
            separate = []
            for share in SHARES:
                file = Path(folder) / f"{share}-{type(method).__name__}.safetensors"
                run.export(file, fq.Budget(share=share))
                alone = fq.load_model(file, module).requires_grad_(False)
                separate.append(alone)
                other = next(one for one in SHARES if one != share)
                # A clock sees microseconds only of many.
                works = partial(switches, model, share, other), partial(reload, alone, file)
                thousand, load, whole = milliseconds(
                    asked.repeats, *works, partial(fq.load_model, file, family._module)
                )
                forward, plain = milliseconds(
                    asked.repeats, partial(model.set(share), inputs), partial(alone, inputs)
                )
                there, worst = thousand / 1000, float((model(inputs) - alone(inputs)).abs().max())
                print(
                    f"{share:<22g}{there:>8.4f} ms{load:>8.1f} ms{whole:>9.1f} "
                    f"ms{load / there:>8,.0f} times"
                    f"{forward:>8.2f} ms{plain:>7.2f} ms{worst:>11.0e}"
                )
            ours, theirs = model.resident_bytes, resident_bytes(separate)
            widest = resident_bytes(separate[:1])
            print(
                f"resident: {ours / 1e6:.2f} MB for all shares; {theirs / 1e6:.2f} MB as separate "
                "modules "
                f"({theirs / ours:.2f} times), {widest / 1e6:.2f} MB the widest alone\n"
            )
    print(f"{asked.model}, batches of {asked.batch}; {machine()}")


if __name__ == "__main__":
    main()
