"""A small federation that may be killed at any moment: `python -m tests.resume.federation METHOD
DIR ROUNDS`.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

import fedquilt as fq
from fedquilt.fleets.presets import net_budgets
from fedquilt.methods import DSFL, FedBN, FedDF, FedET, FedRolex, ProgFed, RaFL
from fedquilt.models import PreResNet
from fedquilt.round.server_optimizers import ServerMomentum
from fedquilt.round.training.server import ServerTraining


@dataclass(frozen=True)
class Keeping(FedBN):
    """FedBN whose clients also keep their momentum."""

    def learner(self, job, world):
        return replace(super().learner(job, world), keep_slots=True)


LOCAL = fq.LocalTraining(batch_size=8)
SHARES = (1.0, 0.5, 0.25)
FEW_STEPS = ServerTraining(batch_size=4, steps=4, check_every=2)
METHODS = {
    "fedavg": fq.methods.FedAvg(local=LOCAL, server_optimizer=ServerMomentum()),
    "heterofl": fq.methods.HeteroFL(local=LOCAL),
    "updates": fq.methods.FedRolex(local=LOCAL, weighting="updates"),
    "fedbn": fq.methods.FedBN(local=replace(LOCAL, norm="per_client")),
    "keeping": Keeping(local=replace(LOCAL, norm="per_client")),
    "lossy": fq.methods.FedRolex(local=LOCAL),
    "deadline": fq.methods.FedRolex(local=replace(LOCAL, keep_optimizer=True)),
    # Three stages of two, two and more rounds, the first of the second and third a warm-up.
    "growing": ProgFed(
        FedRolex(local=replace(LOCAL, keep_optimizer=True, norm="per_client")),
        stages=("stages.0.0", "stages.0.1", "stages.1"),
        stage_rounds=2,
        warmup=1,
        rounds=25,
    ),
    "scaffold": fq.methods.Scaffold(
        local=replace(LOCAL, optimizer=fq.optimizers.SGD(momentum=0.0))
    ),
    "feddf": FedDF(local=LOCAL, prototypes=SHARES, server_training=FEW_STEPS),
    "dsfl": DSFL(local=LOCAL, prototypes=SHARES, server_training=FEW_STEPS, samples=12),
    "fedet": FedET(local=LOCAL, prototypes=SHARES[1:], server_training=FEW_STEPS),
    "rafl": RaFL(
        local=replace(LOCAL, keep_optimizer=True),
        distil=True,
        server_training=FEW_STEPS,
        transfer=True,
    ),
}
CODEC = fq.links.Codec(bits=4, keep=0.5, feedback=True, down=True)
LINKS = {
    "lossy": fq.Link(fq.links.ColumnLoss(0.1, 0.3), CODEC, fq.links.Clock()),
    "deadline": fq.Link(codec=CODEC, clock=fq.links.Clock(down=1e6, up=(1e5, 1e4), deadline=0.3)),
}


@cache
def _family(width: int = 8) -> fq.Family:
    return fq.trace(
        lambda: PreResNet((1, 1), 4, 1, widths=(width, 2 * width)), torch.zeros(2, 1, 6, 6)
    )


@cache
def _pairs() -> fq.Family:
    """Return a union of a knowledge net and two private nets."""
    return fq.union({"knowledge": _family(2), "small": _family(3), "big": _family(4)})


def federate(method: str, out: Path, rounds: int) -> None:
    """Train twelve clients of three sizes, four a round, with a checkpoint every round and client
    states that do not all fit into memory.
    """
    torch.set_num_threads(1)
    draw = torch.Generator().manual_seed(1)
    x, y = torch.randn(144, 1, 6, 6, generator=draw), torch.randint(4, (144,), generator=draw)
    data = fq.FederatedData.of((x, y), (x[:40], y[:40]), list(torch.arange(144).split(12)))
    data = replace(data, public=x[:20])
    pairs = METHODS[method].trains_pairs
    family = _pairs() if pairs else _family()
    fq.run(
        METHODS[method],
        family,
        data,
        fq.Fleet.of(net_budgets(family, pairs=True) if pairs else SHARES, 12, 4),
        rounds=rounds,
        evaluation=fq.Evaluation(every=3),
        out=out,
        resume=True,
        checkpoint=fq.Checkpointing(rounds=1),
        client_state_memory=50_000,
        link=LINKS.get(method, fq.Link()),
    )


if __name__ == "__main__":
    federate(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
