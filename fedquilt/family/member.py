"""Members: one network of a family, with its weights' names, its net, its cost and the nets nested in it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedquilt.axes import Index
from fedquilt.devices import untransformed
from fedquilt.errors import SubmodelError
from fedquilt.family.cost import (
    Cost,
    Count,
    TrainingStep,
    float32_size,
    inference_activations,
    measure,
)
from fedquilt.family.cut import prefix
from fedquilt.family.faithful import check_net
from fedquilt.family.laid import LaidNet
from fedquilt.family.net import Net, Pass
from fedquilt.family.scaled import Scaled
from fedquilt.family.variants import members_of
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
    compared: set[Pass] = field(
        default_factory=set
    )  # modes in which net and module were found to agree


@dataclass(frozen=True)
class Member:
    """One network of a family. Get it from `family.member`, which caches its net and its costs.

    Names of weights are asked of the member and not of the family, because a variant has some of the
    family's weights, and a member may train some of them alone (`Arch.trains`). Weights that it has
    and does not train are carried: it receives them, and neither changes them nor sends them back.

    A net nested in a member is a member too. It remembers its share, so that nets nested at unequal
    shares differ even if they have the same channels: the scaler divides their outputs by the share.
    """

    family: Family
    arch: Arch
    share: float | None = (
        None  # of the whole model, for a net nested in a larger member; None: not nested
    )

    # --- names and shapes of its weights -------------------------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all weights that its variant has, constants included."""
        return self.family.layout.weights(self.arch.variant)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the weights that training moves."""
        return tuple(name for name in self.family.trainable if name in self._changing)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Return the names of the norms' running statistics that training moves."""
        return tuple(name for name in self.family.statistics if name in self._changing)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Return the names of what it receives and does not change: frozen weights, and constants that are cut."""
        own = set(self.names)
        return (*self.frozen, *(name for name in self.family.carried if name in own))

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Return the names of the weights and statistics that other members train and this one does not."""
        own = set(self.names) - self._changing
        return tuple(
            name for name in (*self.family.trainable, *self.family.statistics) if name in own
        )

    @property
    def unfrozen(self) -> Member:
        """Return the member that trains all weights that this one has."""
        return self.family.member(replace(self.arch, trains=())) if self.arch.trains else self

    @cached_property
    def _changing(self) -> frozenset[str]:
        """Return the names of its variant's weights, or of those in the parts that it trains."""
        own = frozenset(self.names)
        if not self.arch.trains:
            return own
        if unknown := [part for part in self.arch.trains if part not in self.parts]:
            raise SubmodelError(
                f"a member that trains {unknown[0]!r} was asked for; the model has the parts {', '.join(self.parts)}."
            )
        return own & {name for part in self.arch.trains for name in self.parts[part]}

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return the buffers that are neither statistics nor cut, by name."""
        found = self.family.constants
        return (
            {name: found[name] for name in self.names if name in found}
            if self.family.layout.nets
            else found
        )

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the weights of each named part, such as `norm`."""
        return self.family.parts

    @property
    def class_rows(self) -> bool:
        """Return True if a client may send the output rows of its own classes alone."""
        return self.family.has_class_rows(self.arch.variant)

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
            inner = self.family.at(self.arch.variant).fit(Budget(share=share)).sizes
            widths = tuple((axis, min(width, inner[axis])) for axis, width in self.arch.widths)
            arch = replace(self.arch, widths=widths)
            known = self._nested[share] = Member(self.family, arch, share)
        return known

    @cached_property
    def _nested(self) -> dict[float, Member]:
        return {}

    def at(self, variant: str) -> Member:
        """Return the member of the same widths that runs another variant and trains all of it.

        A net of a union has its own axes alone. Those that this member does not have are whole.
        """
        layout = self.family.layout
        if not layout.nets:
            return self.family.member(Arch(self.arch.widths, variant))
        there = self.family.at(variant).whole
        widths = tuple((axis, self.arch.sizes.get(axis, width)) for axis, width in there.widths)
        return self.family.member(Arch(widths, there.variant))

    @cached_property
    def nets(self) -> tuple[Member, ...]:
        """Return the nets of a union that it has together, each as a member; () if it has one net.

        Nets of a union share no weights, so that a device that holds several pays for each. Variants of one
        module share weights, and cost what the first of them costs, which is run.
        """
        variants = members_of(self.arch.variant)
        if not self.family.layout.nets or len(variants) < 2:
            return ()
        return tuple(
            self.family.member(replace(self.at(one).arch, trains=self.arch.trains))
            for one in variants
        )

    @property
    def running(self) -> Member:
        """Return the net that `net` runs: of several nets of a union the first, else this member."""
        return self.nets[0] if self.nets else self

    def is_part_of(self, other: Member) -> bool:
        """Return True if this is one of several nets of a union that another member has together."""
        mine = self.arch.variant, self.arch.widths
        return any((one.arch.variant, one.arch.widths) == mine for one in other.nets)

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
        return self.family.built(self)

    @property
    def _scaled(self) -> Scaled:
        """Return the layers whose outputs are cut, which the scaler divides."""
        whole = self.family.layout.sizes
        cut = {axis for axis, width in self.arch.widths if width < whole[axis]}
        found = Scaled.of(self.family.held(self.arch.variant), self.family.layout, cut)
        own = set(self.names)
        return replace(found, weights=tuple(name for name in found.weights if name in own))

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

    @property
    def trained_macs(self) -> int:
        """Return the multiply-adds of a forward pass that a backward pass goes through.

        A backward pass ends at the first weight that is trained. What only feeds it costs a forward pass alone.
        """
        return self._counted(TrainingStep().batch_size).trained_macs if self.frozen else self.macs

    @cached_property
    def count(self) -> int:
        """Return the number of its parameters."""
        return sum(math.prod(self.shape(name)) for name in self._parameters)

    @cached_property
    def weight_bytes(self) -> int:
        """Return the bytes of its parameters in float32, in which a run keeps them."""
        weights = self._parameters
        return sum(
            math.prod(self.shape(name)) * float32_size(weight) for name, weight in weights.items()
        )

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        own = set(self.names)
        return {name: weight for name, weight in self.family.parameters.items() if name in own}

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
        if self._known.inference is None and self.nets:  # They run one after another.
            self._known.inference = max(net.inference_activations for net in self.nets)
        if self._known.inference is None:
            module = self._built().float()
            self._known.inference = inference_activations(
                module, self.family.example_inputs, self.constants
            )
        return self._known.inference

    def _nested_activations(self, step: TrainingStep) -> list[int]:
        """Return what nested nets of a step save; those as wide as the member are not run."""
        nets = [self.nested(share) for share in sorted(step.nested, reverse=True)]
        narrower = [net for net in nets if net.arch != self.arch][: step.most]
        return [net._counted(step.batch_size).saved for net in narrower]

    def _counted(self, batch_size: int) -> Count:
        known = self._known.counts.get(batch_size)
        if known is None and self.nets:
            known = self._known.counts[batch_size] = reduce(
                add, (net._counted(batch_size) for net in self.nets)
            )
        if known is None:
            module = self._built().float()
            frozen = set(self.frozen)
            for name, weight in module.named_parameters():
                weight.requires_grad_(name not in frozen and weight.requires_grad)
            known = measure(module, self.family.example_inputs, batch_size, self.constants)
            self._known.counts[batch_size] = known
        return known

    @cached_property
    def _known(self) -> _Known:
        return _Known() if self.share is None else self.family.member(self.arch)._known
