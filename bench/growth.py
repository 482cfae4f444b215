"""Seconds of a round in every stage of a growing model, against rounds of the whole model.

    python bench/growth.py [--model resnet18] [--clients 4] [--rounds 4] [--device cpu] [--precision
    fp32]

The baseline is FedAvg on the whole model, with the same clients and batches, in the same run of the
script. Prints the median seconds of a round in each stage and in a round of its warm-up, and their
ratio to the baseline, beside the ratio of the multiply-adds that the records have. Images are
random, and nothing is evaluated.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
from measure import machine

import fedquilt as fq
from fedquilt.methods import FedAvg, Method, ProgFed
from fedquilt.models import MODELS
from fedquilt.round import Record


def records(
    method: Method,
    family: fq.Family,
    data: fq.FederatedData,
    rounds: int,
    asked: argparse.Namespace,
) -> list[Record]:
    """Train and return the record of every round."""
    fleet = fq.Fleet.of((1.0,), data.num_clients, cohort=data.num_clients)
    run = fq.run(
        method,
        family,
        data,
        fleet,
        rounds=rounds,
        device=asked.device,
        precision=asked.precision,
        evaluation=fq.Evaluation(every=0),
    )
    return run.records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--samples", type=int, default=64, help="samples of a client")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument(
        "--rounds", type=int, default=4, help="rounds of a stage, and as many of its warm-up"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="fp32")
    asked = parser.parse_args()
    print(machine())

    spec = MODELS[asked.model]
    count = asked.clients * asked.samples
    inputs = torch.randn(count, *spec.input_shape, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(count) % 10
    parts = list(torch.arange(count).split(asked.samples))
    data = fq.FederatedData.of((inputs, targets), (inputs[:10], targets[:10]), parts)
    family = fq.trace(spec.factory, data.example).staged()
    num_stages = len(family.variants)

    inner = FedAvg(weighting="uniform").with_local(batch_size=asked.batch_size)
    whole = records(inner, family, data, asked.rounds, asked)
    baseline = median(record.seconds for record in whole[1:])
    print(
        f"{asked.model}, {asked.clients} clients of {asked.samples} samples, batches of "
        f"{asked.batch_size}"
    )
    print(f"{'':<20}{'seconds':>10}{'ratio':>8}{'multiply-adds':>16}")
    print(f"{'FedAvg (baseline)':<20}{baseline:>10.3f}{1:>8.2f}{1:>16.2f}")

    each = 2 * asked.rounds
    method = ProgFed(over=inner, stage_rounds=each, warmup=asked.rounds)
    grown = records(method, family, data, each * num_stages, asked)
    for stage in range(num_stages):
        first = each * stage
        phases = {"": grown[first + asked.rounds : first + each]}
        if stage:
            phases = {", warm-up": grown[first : first + asked.rounds], **phases}
        for name, rounds in phases.items():
            seconds = median(record.seconds for record in rounds[1:])
            macs = rounds[-1].macs / whole[-1].macs
            print(
                f"{f'stage {stage + 1}{name}':<20}{seconds:>10.3f}{seconds / baseline:>8.2f}"
                f"{macs:>16.2f}"
            )


if __name__ == "__main__":
    main()
