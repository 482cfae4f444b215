"""A client's step on the CPU, alone, grouped and stacked: what `vectorized` chooses from.

    python bench/layouts.py [--threads 1] [--width 64]

PreResNet-18 on 32×32 images, batches of 10, shares 1 … 1/16; the layouts take turns, and the least
of three is printed.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import torch
from measure import SHARES, images, machine

import fedquilt as fq
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.engines.vectorized.group_tensors import GroupLayout, Shape
from fedquilt.engines.vectorized.groups import ClientGroup
from fedquilt.hardware.process import keep_pages
from fedquilt.methods import HeteroFL
from fedquilt.round.federation import World
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD
from fedquilt.terms import Client, Job

LAYOUTS: tuple[GroupLayout, ...] = ("alone", "grouped", "stack")
SAMPLES = 100


def client_groups(
    engine: Vectorized, share: float, count: int, layout: GroupLayout
) -> list[ClientGroup]:
    """Return groups that together train `count` clients of a share."""
    method, client = (
        HeteroFL(local=LocalTraining(optimizer=SGD(lr=0.01, momentum=0.9), batch_size=10)),
        Client(0, fq.Budget(share=share), SAMPLES),
    )
    submodel = method.plan(method.init(engine.world), client, engine.world)[0]
    learner = method.learner(Job(client, submodel, 0), engine.world)
    each = 1 if layout == "alone" else count
    return [
        ClientGroup(engine, Shape.of(submodel.arch, learner, each, layout))
        for _ in range(count // each)
    ]


def step(groups: list[ClientGroup]) -> float:
    """Return the CPU seconds of one step of all groups."""
    began = time.process_time()
    for group in groups:
        group.replay_alone()
        group.chunk_step.zero_()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--width", type=int, default=64, help="channels of the first stage")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    keep_pages()
    widths = [asked.width << stage for stage in range(4)]
    family = fq.trace(
        partial(fq.models.MODELS["preresnet18"].factory, widths=widths), torch.zeros(2, 3, 32, 32)
    )
    inputs, targets = images(SAMPLES, 3, 32, 32)
    data = fq.FederatedData.of((inputs, targets), (inputs, targets), [range(SAMPLES)])
    engine = Vectorized(data)
    engine.begin(fq.methods.api.Federation(World(family), HeteroFL()))
    print(
        f"{'share':>8}{'clients':>9}"
        + "".join(f"{layout:>9}" for layout in LAYOUTS)
        + "   ms of CPU a client"
    )
    for share in SHARES:
        for count in (2, 8):
            ready = {layout: client_groups(engine, share, count, layout) for layout in LAYOUTS}
            taken = [{layout: step(some) for layout, some in ready.items()} for _ in range(4)][1:]
            least = [1e3 * min(one[layout] for one in taken) / count for layout in LAYOUTS]
            print(f"{share:>8}{count:>9}" + "".join(f"{ms:>9.1f}" for ms in least), flush=True)
    print(machine())


if __name__ == "__main__":
    main()
