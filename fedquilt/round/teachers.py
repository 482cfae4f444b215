"""Teachers: outputs of the clients' trained nets on the public samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.hardware.precision import computing
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Merged
from fedquilt.round.training.batches import batched
from fedquilt.terms import Server, Update, Weights

Combined = Literal["mean", "maximum"]  # How the outputs of several teachers become one.
OUTPUTS = "outputs"  # (public sample, class, …) Mean or maximum of the outputs of all teachers.
EACH = "each"  # (teacher, public sample, class, …) Output of every teacher.
MAX_OUTPUT_BATCH = 1000  # Most public samples in a batch.
MAX_OUTPUT_BYTES = 1 << 30  # Most bytes of the whole model's activations for a batch.


def output_batch(world: World) -> int:
    """Return the batch size with which nets of the server run on public samples.

    It is at most 1000, at least 2, and such that activations of the whole model take at most 1 GiB.
    Norms without stored statistics use those of such a batch. The size is the same for all nets of
    a family.
    """
    family = world.family
    nets = family.variants if family.layout.nets else (family.variant,)
    saved = max(1, *(family.member(family.at(net).whole).activations(1) for net in nets))
    return max(2, min(MAX_OUTPUT_BATCH, MAX_OUTPUT_BYTES // saved))


def net_outputs(
    world: World, member: Member, state: Weights, mode: Pass, samples: Tensor
) -> Tensor:
    """Return a net's outputs (sample, class, …), without gradients, in the run's precision.

    Args:
        world: Precision and type of weights.
        member: The net.
        state: Its weights, and norm statistics where the mode reads stored ones.
        mode: How it runs.
        samples: (sample, …) Inputs as the model sees them.
    """
    with torch.no_grad(), computing(world.precision, samples.device):
        # Batches are copied, because a net may change its input in-place.
        parts = [
            member.net(state, batch.clone(), mode)[0]
            for batch in batched(samples, output_batch(world))
        ]
        return torch.cat([part.movedim(member.class_dim, 1) for part in parts]).to(world.dtype)


@dataclass
class Teachers(Fold):
    """A fold of weights that also runs every uploaded net on the public samples.

    Outputs are summed as updates arrive, so that memory does not grow with the cohort. With `each`,
    the outputs of every net are kept, and memory grows with the number of nets. Positions that a
    link lost, and rows of classes that a client does not send, have the server's values.

    `Merged.outputs` has the result: `outputs`, the mean or maximum over all nets, or `each`.
    """

    weights: Fold  # Fold of the weights
    world: World  # Family, precision and public samples
    server: Server  # State that the clients started from
    # Statistics that norms use: tracked ones, or those of a batch
    statistics: Literal["stored", "batch"] = "batch"
    each: bool = False  # Keep the outputs of every net
    combined: Combined = "mean"  # Mean of all nets' outputs, or the elementwise maximum
    # Variant of the uploaded nets that is run. None: the variant that clients trained
    variant: str | None = None
    _sum: Tensor | None = None
    _count: int = 0
    _outputs: list[Tensor] = field(default_factory=list)
    _macs: int = 0

    @override
    def add(self, update: Update) -> None:
        self.weights.add(update)
        self._ask(update)

    @override
    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        self.weights.add_stack(updates, stacked)
        for update in updates:
            self._ask(update)

    @override
    def join(self, other: Self) -> None:
        self.weights.join(other.weights)
        if other._sum is not None:
            self._combine(other._sum)
        self._count += other._count
        self._outputs += other._outputs
        self._macs += other._macs

    @override
    def finish(self, server: Server) -> Merged:
        merged = self.weights.finish(server)
        outputs = {}
        if self._sum is not None:
            outputs[OUTPUTS] = self._sum / self._count if self.combined == "mean" else self._sum
        if self._outputs:
            outputs[EACH] = torch.stack(self._outputs)
        return merged._replace(outputs=outputs, macs=self._macs)

    def _ask(self, update: Update) -> None:
        """Run an uploaded net on the public samples, and add its outputs to the sum or the list.

        A net that got lost is skipped. Weights that did not arrive are the server's.
        """
        public = self.world.public
        if not update.sent or public is None:
            return
        submodel, (payload,) = update.job.submodel, update.sent
        member = self.world.family.member(submodel)
        cutter = self.world.family.cutter
        if self.variant is not None:
            member = member.at(self.variant)
        names = [name for name in member.names if submodel.scope + name in self.server.weights]
        server_weights = cutter.gather(self.server.weights, submodel, names)
        state = cutter.overlay(
            server_weights, submodel.positions, payload.weights, payload.submodel.positions
        )
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
        """Add outputs (public sample, class, …) to the sum, or update the elementwise maximum.

        The first outputs are stored as they are.
        """
        if self._sum is None:
            self._sum = outputs
        elif self.combined == "mean":
            self._sum = self._sum + outputs
        else:
            self._sum = torch.maximum(self._sum, outputs)
