"""Training cohorts on one GPU: recorded units against a good eager loop, both measured in this run.

    python bench/gpu.py [--only a,b,c,d,e] [--precision tf32]

The baseline is one client after another with module and fused SGD built once, data on the device and the same
precision. Needs torch and numpy alone. Medians, warm; milliseconds beside every ratio.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

import fedquilt as fq
from fedquilt.engines.units import replay_time
from fedquilt.engines.vectorised import Vectorised
from fedquilt.methods import HeteroFL, Method
from fedquilt.round.local import SGD, Local
from fedquilt.terms import Client, Job, World

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
IMAGES, BATCH = 500, 10
OPTIMISER = SGD(lr=0.02, momentum=0.9, decay=5e-4)
DEVICE = torch.device("cuda")


def images(clients: int) -> fq.FederatedData:
    """Random CIFAR-like images, two labels a client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * IMAGES, 3, 32, 32, generator=generator)
    y = (torch.arange(clients).repeat_interleave(IMAGES) + torch.randint(0, 2, (len(x),), generator=generator)) % 10
    parts = list(torch.arange(len(x)).split(IMAGES))
    return fq.FederatedData.of((x, y), (x[:1000], y[:1000]), parts)


def eager(family: fq.Family, shares: Sequence[float], data: fq.FederatedData, precision: str) -> float:
    """Milliseconds of one step of every client, one after another."""
    tf32 = precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = True
    x, y = data.inputs.to(DEVICE), data.targets.to(DEVICE)
    nets = [_batch_norms(family.module(family.fit(fq.Budget(share=share)))).to(DEVICE).train() for share in shares]
    settings = {"lr": OPTIMISER.lr, "momentum": OPTIMISER.momentum, "weight_decay": OPTIMISER.decay}
    optimisers = [torch.optim.SGD(net.parameters(), fused=True, **settings) for net in nets]
    rows = [torch.arange(client * IMAGES, client * IMAGES + BATCH, device=DEVICE) for client in range(len(nets))]

    def step() -> None:
        for net, optimiser, own in zip(nets, optimisers, rows, strict=True):
            optimiser.zero_grad(set_to_none=True)
            with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(net(x[own]), y[own])
            loss.backward()
            optimiser.step()

    return _median(step, 10)


def _batch_norms(net: nn.Module) -> nn.Module:
    """As ours: batch statistics, nothing tracked."""
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats, layer.running_mean, layer.running_var = False, None, None
    return net


def _median(step: Callable[[], None], times: int) -> float:
    """Milliseconds, warm."""
    taken = []
    for count in range(times + 3):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        torch.cuda.synchronize()
        if count >= 3:
            taken.append(1e3 * (time.perf_counter() - began))
    return statistics.median(taken)


def ours(
    family: fq.Family, shares: Sequence[float], data: fq.FederatedData, precision: str, method: Method
) -> tuple[float, float]:
    """Milliseconds of one recorded step of the whole cohort, and of a step's part of a whole round's training."""
    engine = Vectorised(World(family, 0, DEVICE), data, precision=precision, memory=60 << 30)
    server = method.init(engine.world)
    clients = [Client(id, fq.Budget(share=share), IMAGES) for id, share in enumerate(shares)]
    jobs = [Job(client, method.plan(server, client, engine.world)[0], 0) for client in clients]

    def round() -> None:
        engine.train(method, server, jobs, method.fold(server, engine.world))

    began = time.perf_counter()
    round()
    print(f"    first round {time.perf_counter() - began:.1f} s", flush=True)
    whole = _median(round, 5) / (IMAGES // BATCH)
    units = [unit for units in engine._idle.values() for unit in units]
    used = [unit for unit in units if getattr(unit, "_stack", None) is not None]
    for unit in used:
        unit.at.zero_()
    layouts = ", ".join(f"{unit.shape.count} {unit.shape.layout}" for unit in used)
    print(f"    units: {layouts}; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    return 1e3 * replay_time(used, 40), whole


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="a,b")
    parser.add_argument("--precision", default="tf32,bf16")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}")
    family = fq.trace(fq.models.MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    method = HeteroFL(local=Local(optimiser=OPTIMISER, batch_size=BATCH))
    cohorts = {
        "a10": [share for share in SHARES for _ in range(2)],
        "a50": [share for share in SHARES for _ in range(10)],
        "b": [1 / 8] * 40,
    }
    for precision in asked.precision.split(","):
        for name, shares in cohorts.items():
            if name[0] not in asked.only:
                continue
            data = images(len(shares))
            base = eager(family, shares, data, precision)
            step, whole = ours(family, shares, data, precision, method)
            print(
                f"({name}) {len(shares)} clients, {precision}: eager {base:.1f} ms, recorded step {step:.2f} ms "
                f"({base / step:.1f} times), in a whole round's training {whole:.2f} ms ({base / whole:.1f} times)",
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
