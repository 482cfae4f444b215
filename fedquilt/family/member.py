"""Members: single networks of a family, with their weights' names, nets, costs and nested nets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from operator import add
from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedquilt.axes import Index
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
from fedquilt.family.grouped import GroupedNet
from fedquilt.family.net import Net, Pass
from fedquilt.family.scaled import Scaled
from fedquilt.family.variants import members_of
from fedquilt.hardware.torch_internals import outside_functorch
from fedquilt.terms import Arch, Budget, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.family.family import Family


@dataclass
class _Known:
    """Cached results that members with equal channels share."""

    net: Net | None = None
    inference: int | None = None
    counts: dict[int, Count] = field(default_factory=dict)  # Counts by batch size
    costs: dict[TrainingStep, Cost] = field(default_factory=dict)
    # Modes in which net and module compute the same
    compared: set[Pass] = field(default_factory=set)


@dataclass(frozen=True)
class Member:
    """One network of a family. Get it from `family.member`, which caches its net and its costs.

    Names of weights are properties of the member and not of the family. A variant has some of the
    family's weights, and a member may train only some of those (`Arch.trains`). Weights that it has
    and does not train are carried: it receives them, and neither changes them nor sends them back.

    A net nested in a member is a member too. It keeps its share, so that nets nested at unequal
    shares differ even if they have the same channels. The scaler divides their outputs by the
    share.
    """

    family: Family  # Family that the member belongs to
    arch: Arch  # Widths, variant and trained parts
    # Share of the whole model, for a net nested in a larger member. None: it is not nested.
    share: float | None = None

    # --- names and shapes of its weights ---------------------------------------------------------

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Return the names of all weights that the variant has, constants included."""
        return self.family.layout.weights(self.arch.variant)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the parameters that the member trains."""
        return tuple(name for name in self.family.trainable if name in self._changing)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Return the names of the running statistics of those norms that the member trains."""
        return tuple(name for name in self.family.statistics if name in self._changing)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Return the names of the weights that the member receives and does not change.

        They are frozen weights, and constants that are cut.
        """
        names = set(self.names)
        return (*self.frozen, *(name for name in self.family.carried if name in names))

    @cached_property
    def frozen(self) -> tuple[str, ...]:
        """Return the names of the member's weights and statistics that only other members train.

        It is empty if the member trains all parts.
        """
        unchanged = set(self.names) - self._changing
        return tuple(
            name for name in (*self.family.trainable, *self.family.statistics) if name in unchanged
        )

    @property
    def unfrozen(self) -> Member:
        """Return the member of the same widths and variant that trains all parts."""
        return self.family.member(replace(self.arch, trains=())) if self.arch.trains else self

    @cached_property
    def _changing(self) -> frozenset[str]:
        """Return the names of all weights of the variant that are in the trained parts.

        Without trained parts, all weights count.

        Raises:
            SubmodelError: The model has no such part.
        """
        names = frozenset(self.names)
        if not self.arch.trains:
            return names
        if unknown := [part for part in self.arch.trains if part not in self.parts]:
            raise SubmodelError(
                f"a member that trains {unknown[0]!r} was asked for; the model has the parts "
                f"{', '.join(self.parts)}."
            )
        return names & {name for part in self.arch.trains for name in self.parts[part]}

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return copies of the weights that are neither trained, statistics nor cut, by name.

        For a net of a union, they are its own.
        """
        buffers = self.family.constants
        if not self.family.layout.nets:
            return buffers
        return {name: buffers[name] for name in self.names if name in buffers}

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the weights of each named part, such as `norm`, in the whole family.

        Weights that this member's variant does not have are included.
        """
        return self.family.parts

    @property
    def class_rows(self) -> bool:
        """Return True if a client may send only the output rows of its own classes.

        See `Family.has_class_rows`.
        """
        return self.family.has_class_rows(self.arch.variant)

    @property
    def class_dim(self) -> int:
        """Return the dimension of the net's output that has the classes, or the numbers."""
        return self.family.layout.class_dim

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis of the family in this member, by name.

        Axes that are never cut have their full size.
        """
        return self.family.layout.sizes | self.arch.sizes

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape that the weight with this name has in this member."""
        return self.family.layout.shape(name, self.sizes)

    @property
    def prefix(self) -> Submodel:
        """Return the sub-model of the first channels of every axis."""
        return prefix(self.arch)

    @property
    def index(self) -> Index:
        """Return the positions of the first channels of every axis."""
        return self.prefix.index

    # --- nets nested in it -----------------------------------------------------------------------

    def nested(self, share: float) -> Member:
        """Return the net within this one that has `share` of every axis of the whole model.

        It has the first channels of this member's order, and all of them on an axis of which this
        member has fewer. Nets are cached.
        """
        cached = self._nested.get(share)
        if cached is None:
            inner = self.family.at(self.arch.variant).fit(Budget(share=share)).sizes
            widths = tuple((axis, min(width, inner[axis])) for axis, width in self.arch.widths)
            arch = replace(self.arch, widths=widths)
            cached = self._nested[share] = Member(self.family, arch, share)
        return cached

    @cached_property
    def _nested(self) -> dict[float, Member]:
        return {}

    def at(self, variant: str) -> Member:
        """Return the member of the same widths that runs another variant and trains all of it.

        A net of a union has only its own axes. Axes that this member does not have are whole.
        """
        layout = self.family.layout
        if not layout.nets:
            return self.family.member(Arch(self.arch.widths, variant))
        target = self.family.at(variant).whole
        widths = tuple((axis, self.arch.sizes.get(axis, width)) for axis, width in target.widths)
        return self.family.member(Arch(widths, target.variant))

    @cached_property
    def nets(self) -> tuple[Member, ...]:
        """Return the nets of a union that the member combines, each as a member.

        It is empty if the member has one net.

        Nets of a union share no weights, so that a device with several pays for each. Variants of
        one module share weights. They cost what the first of them costs, which is the one that
        runs.
        """
        variants = members_of(self.arch.variant)
        if not self.family.layout.nets or len(variants) < 2:
            return ()
        return tuple(
            self.family.member(replace(self.at(variant).arch, trains=self.arch.trains))
            for variant in variants
        )

    @property
    def running(self) -> Member:
        """Return the member that `net` runs. Of several nets of a union, it is the first."""
        return self.nets[0] if self.nets else self

    def is_part_of(self, other: Member) -> bool:
        """Return True if `other` combines several nets of a union, one of which is this.

        Variant and widths are compared, and not the parts that are trained.
        """
        key = self.arch.variant, self.arch.widths
        return any((net.arch.variant, net.arch.widths) == key for net in other.nets)

    def narrowed(self, weights: Weights, inner: Member, lead: int = 0) -> dict[str, Tensor]:
        """Cut the weights of a nested net from this member's. The result is differentiable.

        Args:
            weights: This member's tensors, by name.
            inner: A net nested in this member.
            lead: Number of dimensions in front of the weights' own, such as one for clients.
        """
        return self.family.cutter.narrow(weights, self.index, inner.index, lead)

    # --- networks --------------------------------------------------------------------------------

    @property
    def net(self) -> Net:
        """Return the member as a pure function of its weights. It is made once."""
        if self._known.net is None:
            with outside_functorch():
                self._known.net = Net(self._built(), self.constants, self._scaled)
        return self._known.net

    def grouped(self, count: int) -> GroupedNet:
        """Return a new net that runs `count` clients of this member, side by side in the channels.

        Raises:
            GroupingError: Its layers do not allow that.
        """
        return GroupedNet(self._built(), count, self._scaled)

    def module(self, state: Weights | None = None) -> nn.Module:
        """Return the member as a plain nn.Module, with weights cut from a whole state.

        It has the first channels of every axis. None stands for the initial state of seed 0.
        """
        return self.family.module(self, state)

    def check_net(self, modes: Sequence[Pass]) -> None:
        """Refuse a member whose net, which clients train, differs from its module.

        Each member is compared once in each of `modes`, such as the pass of a training step.

        Raises:
            TraceError: They differ, or the net fails where the module does not.
        """
        unchecked = [mode for mode in modes if mode not in self._known.compared]
        if unchecked:
            check_net(self, unchecked)
            self._known.compared.update(unchecked)

    def _built(self) -> nn.Module:
        """Return a new module of the member, with empty weights on the meta device."""
        return self.family.built(self)

    @property
    def _scaled(self) -> Scaled:
        """Return the names of layers and weights that the scaler divides.

        They are those whose outputs have fewer channels than in the whole model.
        """
        full_sizes = self.family.layout.sizes
        cut = {axis for axis, width in self.arch.widths if width < full_sizes[axis]}
        scaled = Scaled.of(self.family.holding(self.arch.variant), self.family.layout, cut)
        names = set(self.names)
        return replace(scaled, weights=tuple(name for name in scaled.weights if name in names))

    # --- cost ------------------------------------------------------------------------------------

    def cost(self, step: TrainingStep = TrainingStep()) -> Cost:
        """Return multiply-adds, parameters, bytes, and the memory for training and inference.

        Args:
            step: Training step whose memory is counted. The default is a batch of 32 with momentum.
        """
        cost = self._known.costs.get(step)
        if cost is None:
            cost = self._known.costs[step] = Cost(
                macs=self._counted(step.batch_size).macs,
                params=self.count,
                bytes=self.weight_bytes,
                memory=self.training_memory(step),
                activations=self.inference_activations,
            )
        return cost

    @property
    def macs(self) -> int:
        """Return the multiply-adds of one sample's forward pass, counted on the default batch."""
        return self._counted(TrainingStep().batch_size).macs

    @property
    def trained_macs(self) -> int:
        """Return the multiply-adds of a forward pass that a backward pass visits.

        A backward pass ends at the first weight that is trained. Earlier operations cost only a
        forward pass.
        """
        return self._counted(TrainingStep().batch_size).trained_macs if self.frozen else self.macs

    @cached_property
    def count(self) -> int:
        """Return the number of entries of all parameters, frozen ones included, tied ones once."""
        return sum(math.prod(self.shape(name)) for name in self._parameters)

    @cached_property
    def weight_bytes(self) -> int:
        """Return the bytes of the parameters in float32, the type in which a run keeps them."""
        weights = self._parameters
        return sum(
            math.prod(self.shape(name)) * float32_size(weight) for name, weight in weights.items()
        )

    @property
    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the traced module that the member has, by name."""
        names = set(self.names)
        return {name: weight for name, weight in self.family.parameters.items() if name in names}

    def activations(self, batch_size: int) -> int:
        """Return about how many bytes a training step on `batch_size` samples saves, in float32.

        They are assumed to grow linearly with the batch, so that one count serves all batch sizes.
        Engines use it for planning.
        """
        usual = TrainingStep().batch_size
        return self._counted(usual).saved * batch_size // usual

    def training_memory(self, step: TrainingStep) -> int:
        """Return the bytes that a training step needs, with nested nets and several passes."""
        saved = self._counted(step.batch_size).saved
        return step.memory(
            self.weight_bytes, [saved] * step.passes + self._nested_activations(step)
        )

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
        """Return the bytes that each nested net of a step saves for a batch, widest first.

        Nets as wide as the member are left out of the list. Of the narrower ones, the widest
        `step.most` are listed, or all if it is None.
        """
        nets = [self.nested(share) for share in sorted(step.nested, reverse=True)]
        narrower = [net for net in nets if net.arch != self.arch][: step.most]
        return [net._counted(step.batch_size).saved for net in narrower]

    def _counted(self, batch_size: int) -> Count:
        """Return the counts of operations and saved bytes for a batch size. They are cached.

        Of a member of several nets of a union, the nets' counts are added.
        """
        counted = self._known.counts.get(batch_size)
        if counted is None and self.nets:
            counted = self._known.counts[batch_size] = reduce(
                add, (net._counted(batch_size) for net in self.nets)
            )
        if counted is None:
            module = self._built().float()
            frozen = set(self.frozen)
            for name, weight in module.named_parameters():
                weight.requires_grad_(name not in frozen and weight.requires_grad)
            counted = measure(module, self.family.example_inputs, batch_size, self.constants)
            self._known.counts[batch_size] = counted
        return counted

    @cached_property
    def _known(self) -> _Known:
        """Return the cached results, which nested nets share with the member of equal widths."""
        return _Known() if self.share is None else self.family.member(self.arch)._known
