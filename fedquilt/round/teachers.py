"""Teachers: what the nets that came back say about the public samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor

from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.precision import computing
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Merged
from fedquilt.round.training.batches import batched
from fedquilt.terms import Server, Update, Weights

Combined = Literal["mean", "maximum"]
OUTPUTS = "outputs"  # (public sample, class, …) Mean or maximum of the outputs of all teachers.
EACH = "each"  # (teacher, public sample, class, …) Output of every teacher.
MAX_OUTPUT_BATCH = 1000  # Public samples that a net sees at once, at most.
MAX_OUTPUT_BYTES = 1 << 30  # Activations of the whole model for these samples, at most.


def output_batch(world: World) -> int:
    """Return how many public samples a net of the server sees at once.

    Norms without statistics use those of such a batch. The number is the same for all nets of a family.
    """
    family = world.family
    nets = family.variants if family.layout.nets else (family.variant,)
    saved = max(1, *(family.member(family.at(net).whole).activations(1) for net in nets))
    return max(2, min(MAX_OUTPUT_BATCH, MAX_OUTPUT_BYTES // saved))


def net_outputs(
    world: World, member: Member, state: Weights, mode: Pass, samples: Tensor
) -> Tensor:
    """Return a net's outputs (sample, class, …) on samples, without gradients and in the precision of the run.

    Args:
        world: Precision and type of weights.
        member: The net.
        state: Its weights, and norm statistics where the mode reads stored ones.
        mode: How it runs.
        samples: (sample, …) Inputs as the model sees them.
    """
    with torch.no_grad(), computing(world.precision, samples.device):
        # Copies, because a net may begin with an operation in place.
        parts = [
            member.net(state, some.clone(), mode)[0]
            for some in batched(samples, output_batch(world))
        ]
        return torch.cat([part.movedim(member.class_dim, 1) for part in parts]).to(world.dtype)


@dataclass
class Teachers:
    """A fold of the weights that also runs every net that came back on the public samples.

    Outputs are summed as updates arrive, so that memory does not grow with the cohort. With `each`,
    the outputs of every net are kept, which takes as much memory as there are nets. Positions of a
    net that a link lost, and rows of classes that a client does not send, are the server's.

    `Merged.outputs` has the result: `outputs`, the mean or maximum over all nets, or `each`.
    """

    weights: Fold  # Fold of the weights
    world: World
    server: Server  # State that the clients started from
    statistics: Literal["stored", "batch"] = (
        "batch"  # What norms use: tracked statistics, or those of a batch
    )
    each: bool = False  # Keep the outputs of every net
    combined: Combined = (
        "mean"  # How outputs of all nets become one; maximum: the largest at every position
    )
    variant: str | None = (
        None  # Variant of the nets that came back which runs; None: the net that clients trained
    )
    _sum: Tensor | None = None
    _count: int = 0
    _outputs: list[Tensor] = field(default_factory=list)
    _macs: int = 0

    def add(self, update: Update) -> None:
        self.weights.add(update)
        self._ask(update)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        self.weights.add_stack(updates, stacked)
        for update in updates:
            self._ask(update)

    def join(self, other: Self) -> None:
        self.weights.join(other.weights)
        if other._sum is not None:
            self._combine(other._sum)
        self._count += other._count
        self._outputs += other._outputs
        self._macs += other._macs

    def finish(self, server: Server) -> Merged:
        merged = self.weights.finish(server)
        outputs = {}
        if self._sum is not None:
            outputs[OUTPUTS] = self._sum / self._count if self.combined == "mean" else self._sum
        if self._outputs:
            outputs[EACH] = torch.stack(self._outputs)
        return merged._replace(outputs=outputs, macs=self._macs)

    def _ask(self, update: Update) -> None:
        """Run a net that came back on the public samples. A net that got lost says nothing."""
        public = self.world.public
        if not update.sent or public is None:
            return
        submodel, (payload,) = update.job.submodel, update.sent
        member, cutter = self.world.family.member(submodel), self.world.family.cutter
        if self.variant is not None:
            member = member.at(self.variant)
        names = [name for name in member.names if submodel.scope + name in self.server.weights]
        own = cutter.gather(self.server.weights, submodel, names)
        state = cutter.overlay(own, submodel.held, payload.weights, payload.submodel.held)
        mode = Pass(train=False, statistics=self.statistics)
        outputs = net_outputs(
            self.world, member, state, mode, public.to(next(iter(state.values())).device)
        )
        self._macs += member.macs * len(public)
        if self.each:
            self._outputs.append(outputs)
            return
        self._combine(outputs)
        self._count += 1

    def _combine(self, outputs: Tensor) -> None:
        """Add outputs to those of the nets before, or take the larger ones."""
        if self._sum is None:
            self._sum = outputs
        elif self.combined == "mean":
            self._sum = self._sum + outputs
        else:
            self._sum = torch.maximum(self._sum, outputs)
