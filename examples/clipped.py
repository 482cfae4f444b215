"""Clipped averaging: no client moves the server further than S (McMahan et al., ICLR 2018)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods.api import (
    Client,
    Fold,
    LocalTraining,
    Mean,
    Method,
    Presets,
    Server,
    Submodel,
    Update,
    Weighting,
    Weights,
    World,
    prefix,
    within,
)


@dataclass(frozen=True)
class Clipped(Method):
    """Clients train the first channels of every axis, and the server clips their changes.

    `fold` is the paper's FlatClip. The plan, local training and the mean over the clients that
    held a position are HeteroFL's.
    """

    local: LocalTraining = fq.methods.HeteroFL().local
    weighting: Weighting = "uniform"
    # S, the largest norm of a client's change. A very large value gives HeteroFL.
    clip: float = 1.0
    paper = "McMahan et al. 2018"
    presets: ClassVar[Presets] = {"tight": {"clip": 0.1}}

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, clip="(0, inf)")

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(self.fit(client.budget, world))]

    def fold(self, server: Server, world: World) -> Fold:
        fold = FlatClip(
            world.family.cutter,
            self.weighting,
            self.server_optimizer,
            plain=frozenset(world.family.statistics),
            clip=self.clip,
            before=server.weights,
        )
        return fold.begin(server)


@dataclass
class FlatClip(Mean):
    """A mean of changes Δ · min(1, S / ‖Δ‖), with ‖Δ‖ over all the weights that a client sent."""

    clip: float = 1.0
    before: Weights = field(default_factory=dict)  # The server's weights before the round.

    def add(self, update: Update) -> None:
        stacked = [{name: w[None] for name, w in sent.weights.items()} for sent in update.sent]
        self.add_stack([update], stacked)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        submodels = [sent.submodel for sent in updates[0].sent]
        pairs = zip(submodels, stacked, strict=True)
        super().add_stack(updates, [self.clipped(submodel, state) for submodel, state in pairs])

    def clipped(self, submodel: Submodel, state: Weights) -> Weights:
        """Clip the changes of clients that sent the same positions.

        Args:
            submodel: The positions that arrived.
            state: Weights (client, *weight), by name.
        """
        names = [name for name in state if name not in self.plain]  # Not statistics of norms.
        before = self.cutter.gather(self.before, submodel, names)
        change = {name: state[name] - before[name] for name in names}
        squares = [delta.flatten(1).square().sum(1) for delta in change.values()]
        length = torch.stack(squares).sum(0).sqrt()  # (client,)
        scale = (self.clip / length).clamp(max=1)
        clipped = {
            name: before[name] + _by_client(scale, delta) * delta for name, delta in change.items()
        }
        return {**state, **clipped}


def _by_client(scale: Tensor, like: Tensor) -> Tensor:
    """Return (client, 1, 1, …) for a tensor (client, *weight)."""
    return scale.reshape(-1, *[1] * (like.dim() - 1))


def net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    """Two of twenty clients have a broken camera: what it sees is a hundred times too bright."""
    data = fq.data.digits().partition(20)
    inputs, broken = data.inputs.clone(), torch.cat([data.parts[0], data.parts[1]])
    inputs[broken] *= 100
    data = replace(data, inputs=inputs)
    family = fq.trace(net, data.example)
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], num_clients=20, cohort=10)
    local = replace(Clipped().local, optimizer=fq.optimizers.SGD(lr=0.1), batch_size=16)
    for method in (fq.methods.HeteroFL(local=local), Clipped(local=local)):
        run = fq.run(method, family, data, fleet, rounds=20, evaluation=fq.Evaluation(every=0))
        texts = "  ".join(f"{share}: {accuracy:.1%}" for share, accuracy in run.accuracy.items())
        print(f"{type(method).__name__:<8}  {texts}")


if __name__ == "__main__":
    main()
