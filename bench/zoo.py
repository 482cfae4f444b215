"""Ten of timm's models whose norm layers are activations too, cut at a half and federated.

    pip install -e '.[cli,zoo]' -c constraints.txt
    python bench/zoo.py [--models gernet_s skresnet18] [--size 64] [--rounds 1]

timm needs torchvision. PyPI builds that for CUDA, so that beside a CPU build of torch its compiled
operators cannot be loaded. No model here uses them. They are declared, so that it can be imported.

The models use timm's `BatchNormAct2d`, a subclass of `nn.BatchNorm2d` that ends in an activation. A
difference is the largest one between the logits of a member at a half as a net, which clients
train, and as a module, as a part of the largest logit, in float64: in training and in evaluation
before the run, and of the deployed module after it.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from measure import NUM_CLASSES, images, machine
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import Pool
from fedquilt.deploy.deploy import deployed
from fedquilt.family import Pass
from fedquilt.family.cut import prefix
from fedquilt.methods import HeteroFL

MODELS = (
    "cspresnet50",
    "dpn68",
    "ese_vovnet19b_dw",
    "gcresnext26ts",
    "gernet_s",
    "mobilenetv4_conv_small",
    "mobilevitv2_050",
    "resnetv2_50",
    "skresnet18",
    "tf_mixnet_s",
)
CLIENTS, IMAGES = 2, 8  # of each client, in batches of half of them


def import_timm() -> Any:
    """Import timm, also where torchvision has no compiled operators."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        for name in ("nms", "qnms"):
            torch.library.define(f"torchvision::{name}", signature)
    import timm

    return timm


def relative(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference as a part of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


def before(family: fq.Family, inputs: Tensor) -> float:
    """Compare a half as a net and as a module, in training and in evaluation, as it starts."""
    half = prefix(family.fit(fq.Budget(share=0.5)))
    state = family.init(dtype=torch.float64)
    weights = family.cutter.gather(state, half, list(state))
    module, net = family.module(half, state), family.member(half.arch).net
    differences = []
    for train, mode in ((False, Pass(statistics="stored")), (True, Pass(train=True))):
        with torch.no_grad():
            expected = module.train(train)(inputs)
            differences.append(relative(net(weights, inputs, mode, torch.tensor(1))[0], expected))
    return max(differences)


def after(run: fq.Run, inputs: Tensor) -> float:
    """Compare the half that a device is handed with the net on the same weights."""
    found = deployed(run, fq.Budget(share=0.5))
    ((net,), (state,)) = found.nets, found.states
    with torch.no_grad():
        expected = found.module()(inputs)
        logits = found.family.member(net.arch).net(state, inputs, Pass(statistics="stored"))[0]
    return relative(logits, expected)


def row(timm: Any, name: str, size: int, rounds: int) -> str:
    """Trace, cut, compare and federate one model."""
    began = time.perf_counter()

    def make() -> nn.Module:
        module: nn.Module = timm.create_model(name, num_classes=NUM_CLASSES)
        return module

    pool = Pool.of(images(CLIENTS * IMAGES, 3, size, size), images(IMAGES, 3, size, size))
    data = pool.partition(CLIENTS)
    family = fq.trace(make, data.example)
    whole, half = (family.count(family.fit(fq.Budget(share=share))) for share in (1.0, 0.5))
    inputs = data.example.double()
    first = before(family, inputs)

    method = HeteroFL().with_local(batch_size=IMAGES // 2, epochs=1)
    fleet = fq.Fleet.of([1, 1 / 2], CLIENTS, CLIENTS)
    run = fq.run(method, family, data, fleet, rounds=rounds, precision="fp64")
    last = after(run, inputs)
    seconds = time.perf_counter() - began
    removed = 100 * (1 - half / whole)
    return f"| {name} | {whole:,} | {removed:.1f} % | {first:.1g} | {last:.1g} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--size", type=int, default=64, help="pixels of an image's side")
    parser.add_argument("--rounds", type=int, default=1)
    asked = parser.parse_args()
    timm = import_timm()
    print(machine())
    print("| model | parameters | removed at 1/2 | difference before | after | seconds |")
    print("|---|---:|---:|---:|---:|---:|")
    for name in asked.models:
        print(row(timm, name, asked.size, asked.rounds), flush=True)


if __name__ == "__main__":
    main()
