"""Members: one network of a family, with its weights' names, its net, its cost and the nets nested in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedquilt.axes import Index
from fedquilt.devices import untransformed
from fedquilt.family.build import build
from fedquilt.family.cost import Cost, Count, TrainingStep, float32_size, inference_activations, measure
from fedquilt.family.cut import prefix
from fedquilt.family.faithful import check_net
from fedquilt.family.laid import LaidNet
from fedquilt.family.net import Net, Pass
from fedquilt.family.scaled import Scaled
from fedquilt.terms import Arch, Budget, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family.family import Family


@dataclass
class _Known:
    """Results that members of equal channels share, because they take a run or a build to find."""

    net: Net | None = None
    inference: int | None = None
    counts: dict[int, Count] = field(default_factory=dict)  # by batch size
    costs: dict[TrainingStep, Cost] = field(default_factory=dict)
    compared: set[Pass] = field(default_factory=set)  # modes in which net and module were found to agree


@dataclass(frozen=True)
class Member:
    """One network of a family. Get it from `family.member`, which caches its net and its costs.

    Names of weights are asked of the member and not of the family, because a member may have fewer
    weights than the family or other ones. Members of width alone have all of them.

    A net nested in a member is a member too. It remembers its share, so that nets nested at unequal
    shares differ even if they have the same channels: the scaler divides their outputs by the share.
    """

    family: Family
    arch: Arch
    share: float | None = None  # of the whole model, for a net nested in a larger member; None: not nested

    # --- names and shapes of its weights -------------------------------------------------------------------------

    @property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the weights that training moves."""
        return self.family.trainable

    @property
    def statistics(self) -> tuple[str, ...]:
        """Return the names of the norms' running statistics."""
        return self.family.statistics

    @property
    def carried(self) -> tuple[str, ...]:
        """Return the names of what is never trained but cut with the rest."""
        return self.family.carried

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return the buffers that are neither statistics nor cut, by name."""
        return self.family.constants

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the weights of each named part, such as `norm`."""
        return self.family.parts

    @property
    def class_rows(self) -> bool:
        """Return True if a client may send the output rows of its own classes alone."""
        return self.family.class_rows

    @property
    def class_dim(self) -> int:
        """Return the dimension of the net's output that the classes are in."""
        return self.family.layout.class_dim

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis, those included that are never cut."""
        return self.family.layout.sizes | self.arch.sizes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return self.family.layout.shape(name, self.sizes)

    @property
    def prefix(self) -> Submodel:
        """Return the sub-model of the first channels of every axis."""
        return prefix(self.arch)

    @property
    def index(self) -> Index:
        """Return the positions of the first channels of every axis."""
        return self.prefix.index

    # --- nets nested in it -----------------------------------------------------------------------------------------

    def nested(self, share: float) -> Member:
        """Return the net within this one that has `share` of the whole model: the first channels of its order."""
        known = self._nested.get(share)
        if known is None:
            inner = self.family.fit(Budget(share=share)).sizes
            arch = Arch(tuple((axis, min(width, inner[axis])) for axis, width in self.arch.widths), self.arch.kind)
            known = self._nested[share] = Member(self.family, arch, share)
        return known

    @cached_property
    def _nested(self) -> dict[float, Member]:
        return {}

    def narrowed(self, weights: Weights, inner: Member, lead: int = 0) -> dict[str, Tensor]:
        """Cut the weights of a nested net from this member's.

        Args:
            weights: This member's tensors, by name.
            inner: A net nested in this member.
            lead: Dimensions in front of the weights' own, such as one for clients.
        """
        return self.family.cutter.narrow(weights, self.index, inner.index, lead)

    # --- networks --------------------------------------------------------------------------------------------------

    @property
    def net(self) -> Net:
        """Return the member as a pure function of its weights."""
        if self._known.net is None:
            with untransformed():
                self._known.net = Net(self._built(), self.constants, self._scaled)
        return self._known.net

    def laid(self, count: int) -> LaidNet:
        """Return a number of the member's nets side by side in the channels.

        Raises:
            LayoutError: Its layers do not allow that.
        """
        return LaidNet(self._built(), count, self._scaled)

    def module(self, state: Weights | None = None) -> nn.Module:
        """Return the member as a plain nn.Module with weights cut from a whole state; None: the initial one."""
        return self.family.module(self, state)

    def check_net(self, modes: Sequence[Pass]) -> None:
        """Refuse a member whose net, which clients train, is another network than its module.

        Each member is compared once in each mode.
        """
        new = [mode for mode in modes if mode not in self._known.compared]
        if new:
            check_net(self, new)
            self._known.compared.update(new)

    def _built(self) -> nn.Module:
        return build(self.family._module, self.family.layout, self.sizes)

    @property
    def _scaled(self) -> Scaled:
        """Return the layers whose outputs are cut, which the scaler divides."""
        whole = self.family.layout.sizes
        cut = {axis for axis, width in self.arch.widths if width < whole[axis]}
        return Scaled.of(self.family._module, self.family.layout, cut)

    # --- cost ------------------------------------------------------------------------------------------------------

    def cost(self, step: TrainingStep = TrainingStep()) -> Cost:
        """Return multiply-adds, parameters, bytes, and memory to train and to run it.

        Args:
            step: The step whose memory is meant. The default is a batch of 32 with momentum.
        """
        known = self._known.costs.get(step)
        if known is None:
            known = self._known.costs[step] = Cost(
                macs=self._counted(step.batch_size).macs,
                params=self.count,
                bytes=self.weight_bytes,
                memory=self.training_memory(step),
                activations=self.inference_activations,
            )
        return known

    @property
    def macs(self) -> int:
        """Return the multiply-adds of one sample's forward pass, as `cost` has them by default."""
        return self._counted(TrainingStep().batch_size).macs

    @cached_property
    def count(self) -> int:
        """Return the number of its parameters."""
        return sum(math.prod(self.shape(name)) for name in self.family.parameters)

    @cached_property
    def weight_bytes(self) -> int:
        """Return the bytes of its parameters in float32, in which a run keeps them."""
        weights = self.family.parameters
        return sum(math.prod(self.shape(name)) * float32_size(weight) for name, weight in weights.items())

    def activations(self, batch_size: int) -> int:
        """Return about how many bytes a training step on a batch saves, in float32.

        They are taken to grow with the batch, so that one count serves all batch sizes. Engines plan by it.
        """
        usual = TrainingStep().batch_size
        return self._counted(usual).saved * batch_size // usual

    def training_memory(self, step: TrainingStep) -> int:
        """Return the bytes of a training step."""
        own = self._counted(step.batch_size).saved
        return step.memory(self.weight_bytes, [own] * step.passes + self._nested_activations(step))

    @property
    def inference_activations(self) -> int:
        """Return the bytes that one sample's forward pass needs at once, besides the parameters."""
        if self._known.inference is None:
            module = self._built().float()
            self._known.inference = inference_activations(module, self.family.example_inputs, self.constants)
        return self._known.inference

    def _nested_activations(self, step: TrainingStep) -> list[int]:
        """Return what nested nets of a step save; those as wide as the member are not run."""
        nets = [self.nested(share) for share in sorted(step.nested, reverse=True)]
        narrower = [net for net in nets if net.arch != self.arch][: step.most]
        return [net._counted(step.batch_size).saved for net in narrower]

    def _counted(self, batch_size: int) -> Count:
        known = self._known.counts.get(batch_size)
        if known is None:
            known = measure(self._built().float(), self.family.example_inputs, batch_size, self.constants)
            self._known.counts[batch_size] = known
        return known

    @cached_property
    def _known(self) -> _Known:
        return _Known() if self.share is None else self.family.member(self.arch)._known
