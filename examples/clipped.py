"""Clipped averaging: no client moves the server further than S (McMahan et al., ICLR 2018), here on unequal devices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.checks import within
from fedquilt.family.cut import prefix
from fedquilt.methods import HeteroFL, Method
from fedquilt.methods.heterofl import PARTIAL
from fedquilt.round.merge import Fold, Mean, Merged, Weighting
from fedquilt.terms import Weights


@dataclass(frozen=True)
class Clipped(Method):
    """Clients train the first channels of every axis; the server shortens what comes back before it takes the mean.

    `fold` is the paper's FlatClip; the plan, local training and the mean over those who held a position are HeteroFL's.
    """

    local: fq.Local = PARTIAL
    weighting: Weighting = "uniform"
    clip: float = 1.0  # S, the longest a client's change may be; very large values give HeteroFL
    paper = "McMahan et al. 2018"

    def __post_init__(self) -> None:
        within(self, clip="(0, inf)")

    def plan(self, server: fq.Server, client: fq.Client, world: fq.World) -> list[fq.Submodel]:
        return [prefix(self.fit(client.budget, world))]

    def fold(self, server: fq.Server, world: fq.World) -> Fold:
        mean = Mean(world.family.cutter, self.weighting, self.server).begin(server)
        return FlatClip(mean, server, world.family.trainable, self.clip)


@dataclass
class FlatClip:
    """A mean of changes Δ · min(1, S / ‖Δ‖), with ‖Δ‖ over all the weights a client sent."""

    mean: Mean
    server: fq.Server
    trainable: tuple[str, ...]
    clip: float

    def add(self, update: fq.Update) -> None:
        """One client is a stack of one."""
        self.add_stack([update], [{name: w[None] for name, w in sent.weights.items()} for sent in update.sent])

    def add_stack(self, updates: Sequence[fq.Update], stacked: Sequence[Weights]) -> None:
        payloads = updates[0].sent
        clipped = [self._clip(sent.submodel, state) for sent, state in zip(payloads, stacked, strict=True)]
        self.mean.add_stack(updates, clipped)

    def _clip(self, submodel: fq.Submodel, state: Weights) -> Weights:
        names = [name for name in state if name in self.trainable]
        before = self.mean.cutter.gather(self.server.weights, submodel, names)
        change = {name: state[name] - before[name] for name in names}  # (client, *weight)
        length = torch.stack([one.flatten(1).square().sum(1) for one in change.values()]).sum(0).sqrt()  # (client,)
        scale = (self.clip / length).clamp(max=1)
        shortened = {name: before[name] + _by_client(scale, one) * one for name, one in change.items()}
        return {**state, **shortened}

    def join(self, other: Self) -> None:
        self.mean.join(other.mean)

    def finish(self, server: fq.Server) -> Merged:
        return self.mean.finish(server)


def _by_client(scale: Tensor, like: Tensor) -> Tensor:
    """(client,) → (client, 1, 1 …)"""
    return scale.reshape(-1, *[1] * (like.dim() - 1))


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    """Two of twenty clients have a broken camera: what it sees is a hundred times too bright."""
    data = fq.data.digits().deal(20)
    inputs, broken = data.inputs.clone(), torch.cat([data.parts[0], data.parts[1]])
    inputs[broken] *= 100
    data = replace(data, inputs=inputs)
    family = fq.trace(net, data.example)
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], num_clients=20, sample=10)
    local = replace(PARTIAL, optimiser=fq.SGD(lr=0.1), batch_size=16)
    for method in (HeteroFL(local=local), Clipped(local=local)):
        run = fq.run(method, family, data, fleet, rounds=20, evaluation=fq.Evaluation(every=0))
        told = "  ".join(f"{share}: {accuracy:.1%}" for share, accuracy in run.accuracy.items())
        print(f"{type(method).__name__:<8}  {told}")


if __name__ == "__main__":
    main()
