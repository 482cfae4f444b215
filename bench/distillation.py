"""Seconds of a round in which the server learns, and of its training against a plain loop.

    python bench/distillation.py [--model tiny_resnet] [--clients 10] [--public 512] [--steps 40]
    [--device cpu]

Prints the median seconds of a round of FedDF, DS-FL and Fed-ET, those of the server's training in
it, and the ratio of the round to one of HeteroFL (the baseline) with the same clients. A second
table has FedDF's server alone: as many steps of the same nets on batches of the same size, as a
plain PyTorch loop over modules (the baseline) and as fedquilt trains them. Images are random, and
nothing is evaluated.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from measure import machine
from torch.nn import functional as F

import fedquilt as fq
from fedquilt.methods import DSFL, FedDF, FedET, HeteroFL, Method
from fedquilt.methods.api import ServerTraining
from fedquilt.models import MODELS
from fedquilt.round import Record

SHARES = (1.0, 0.5, 0.25)


def records(
    method: Method, family: fq.Family, data: fq.FederatedData, asked: argparse.Namespace
) -> list[Record]:
    """Train and return the record of every round but the first, in which steps are recorded."""
    fleet = fq.Fleet.of(SHARES, data.num_clients, cohort=data.num_clients)
    run = fq.run(
        method,
        family,
        data,
        fleet,
        rounds=asked.rounds + 1,
        device=asked.device,
        precision=asked.precision,
        evaluation=fq.Evaluation(every=0),
    )
    return run.records[1:]


def plain_loop(family: fq.Family, public: torch.Tensor, how: ServerTraining, device: str) -> float:
    """Return the seconds that a plain loop takes to distil one net of each share for all steps."""
    public = public.to(device)
    rows = torch.randn(len(public), family.num_classes, device=device)
    nets = [
        family.module(family.fit(fq.Budget(share=share))).to(device).train() for share in SHARES
    ]
    order = torch.Generator().manual_seed(0)
    began = time.perf_counter()
    for net in nets:
        optimizer = torch.optim.Adam(net.parameters(), lr=how.optimizer.lr)
        for _ in range(how.steps):
            chosen = torch.randperm(len(public), generator=order)[: how.batch_size].to(device)
            optimizer.zero_grad()
            student = net(public[chosen]).log_softmax(1)
            F.kl_div(student, rows[chosen].softmax(1), reduction="batchmean").backward()
            optimizer.step()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="tiny_resnet")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--samples", type=int, default=64, help="samples of a client")
    parser.add_argument("--public", type=int, default=512, help="public samples")
    parser.add_argument("--batch-size", type=int, default=16, help="batch size of clients")
    parser.add_argument(
        "--steps", type=int, default=40, help="steps of every net of the server in a round"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    asked = parser.parse_args()
    print(machine())

    spec, count = MODELS[asked.model], asked.clients * asked.samples
    inputs = torch.randn(
        count + asked.public, *spec.input_shape, generator=torch.Generator().manual_seed(0)
    )
    own, public = inputs[:count], inputs[count:]
    targets = torch.arange(count) % 10
    pool = fq.data.Pool.of((own, targets), (own[:10], targets[:10]), public=public)
    data = pool.with_parts(torch.arange(count).split(asked.samples))
    family = fq.trace(spec.factory, data.example)

    # With this patience no net stops early, so that all methods take as many steps.
    how = ServerTraining(steps=asked.steps, check_every=asked.steps, patience=asked.steps)
    methods: list[Method] = [
        HeteroFL(),
        FedDF(prototypes=SHARES, server_training=how),
        DSFL(prototypes=SHARES, server_training=how),
        FedET(prototypes=SHARES[1:], server_training=how),
    ]
    print(
        f"{asked.model}, {asked.clients} clients of {asked.samples} samples, {asked.public} public "
        "samples"
    )
    print(f"{'':<24}{'seconds':>10}{'ratio':>8}{'server':>10}{'steps':>8}")
    baseline = server = 0.0
    for method in methods:
        found = records(method.with_local(batch_size=asked.batch_size), family, data, asked)
        seconds = median(record.seconds for record in found)
        own_seconds = median(record.server_seconds or 0.0 for record in found)
        baseline = baseline or seconds
        if isinstance(method, FedDF):
            server = own_seconds
        name = f"{type(method).__name__}{' (baseline)' if method is methods[0] else ''}"
        ratio = seconds / baseline
        print(
            f"{name:<24}{seconds:>10.3f}{ratio:>8.2f}{own_seconds:>10.3f}{found[-1].server_steps:>8}"
        )

    loops = [plain_loop(family, public, how, asked.device) for _ in range(3)]
    print(f"\n{'FedDF, the server alone':<24}{'seconds':>10}{'ratio':>8}")
    print(f"{'plain loop (baseline)':<24}{median(loops):>10.3f}{1:>8.2f}")
    print(f"{'fedquilt':<24}{server:>10.3f}{server / median(loops):>8.2f}")


if __name__ == "__main__":
    main()
