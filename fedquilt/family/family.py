"""A family: one module, its axes, and every smaller network that can be cut from it."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.axes import Axis, Index, axes_in, write
from fedquilt.errors import BudgetError, SubmodelError, TraceError
from fedquilt.family.build import build
from fedquilt.family.cost import Cost, TrainingStep
from fedquilt.family.cut import Cutter
from fedquilt.family.dual import ConditionedNorm, DualNorm, is_adjustable
from fedquilt.family.faithful import answer, plain, unlike
from fedquilt.family.laid import agrees
from fedquilt.family.layout import Layout
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.family.nets import Nets
from fedquilt.family.stages import StageSource, usual_stages, with_stages
from fedquilt.family.tracer import trace_layout
from fedquilt.family.variants import JOIN, Variants, VariantSource, joined, members_of
from fedquilt.faults import enough_memory
from fedquilt.terms import WHOLE, Arch, Budget, Submodel, Weights

Rounding = Literal["floor", "ceil"]
_log = logging.getLogger(__name__)


@enough_memory("tracing the model")
def trace(
    module: nn.Module | Callable[[], nn.Module] | VariantSource,
    example_inputs: Tensor | tuple[Any, ...],
    *,
    fixed: Sequence[str] = (),
    parts: Mapping[str, Sequence[str]] | None = None,
    heads: Literal["inside", "whole"] = "inside",
    class_dim: int | None = None,
) -> Family:
    """Find the axes of any feed-forward module by running it once, symbolically, on an example.

    A module brings its own initial weights. A function that makes one is called anew for every seed. Stages
    (`fedquilt.with_stages`) are variants of the family.
    `fixed` names axes or layers that are never cut; `parts` names groups of weights (`{"head": ["fc"]}`).
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    factory = _maker(
        module.resolve(inputs, class_dim) if isinstance(module, VariantSource) else module
    )
    model = make_module(factory)
    if slashed := [
        name
        for name in (*dict(model.named_parameters()), *dict(model.named_buffers()))
        if "/" in name
    ]:
        raise TraceError(
            f"{type(model).__name__} has a weight named {slashed[0]!r}; in a federation's state '/' stands between a "
            "net and its weights. Name the layer without it."
        )
    layout = trace_layout(model, inputs, fixed=fixed, parts=parts, heads=heads, class_dim=class_dim)
    for note in layout.notes:
        _log.info("%s: %s", type(model).__name__, note)
    options = {"fixed": fixed, "parts": parts, "heads": heads, "class_dim": class_dim}
    source = module.module if isinstance(module, StageSource) else module
    return Family(model, layout, inputs, factory, _traced=Tracing(source, options))


@dataclass(frozen=True, eq=False)
class Tracing:
    """What `trace` was given besides the example, by which a family can be traced again with other stages."""

    source: nn.Module | Callable[[], nn.Module] | VariantSource
    options: Mapping[str, Any]


@dataclass(frozen=True, eq=False)
class Family:
    """Every network that can be cut from one module.

    `variant` and `trains` are those of the members that `whole` and `fit` return. `at` gives the family with
    others; weights, axes and members are the same.
    """

    _module: nn.Module
    layout: Layout
    example_inputs: tuple[Any, ...]
    _factory: Callable[[], nn.Module]
    variant: str = WHOLE
    trains: tuple[str, ...] = ()
    _base: Family | None = None  # The family that `at` was called on, which holds the members
    _traced: Tracing | None = (
        None  # None: it was not traced here, but read from a file or sent by another machine
    )

    # --- what there is -----------------------------------------------------------------------------------------

    @property
    def axes(self) -> dict[str, str]:
        """Each weight's dimensions, as one reads them: `"conv2.weight": "c2 c1 3 3"`."""
        return {name: write(dims) for name, dims in self.layout.dims.items()}

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        return self.layout.parts

    @property
    def num_classes(self) -> int:
        if "class" not in self.layout.axes:
            raise TraceError(
                f"{self.title} has no class axis: dimension {self.layout.class_dim} of its output is "
                "not one layer's outputs. Name the dimension that is: class_dim=…"
            )
        return self.layout.axes["class"].size

    @property
    def num_outputs(self) -> int:
        """Return the size of the output's class dimension. It may be 1, and needs no axis of its own."""
        return (
            self.layout.axes["class"].size if "class" in self.layout.axes else self.output_shape[1]
        )

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole model's output for the example: (sample, class, …).

        Raises:
            TraceError: The output has one dimension, so that it has no place for classes.
        """
        state = {
            name: plain(value)
            for name, value in _state(self._module, tuple(self.layout.dims)).items()
        }
        with torch.no_grad():
            outputs, _ = self.member(self.whole).net(
                state, plain(self.example_inputs[0].detach()), Pass(statistics="stored")
            )
        if outputs.dim() < 2:
            raise TraceError(
                f"{self.title} has an output of shape {tuple(outputs.shape)}; (sample, outputs) is "
                "needed, also where there is one output for each sample. Leave out the squeeze behind the last layer."
            )
        return tuple(outputs.movedim(self.layout.class_dim, 1).shape)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Names of the weights that training moves."""
        names = {name for name, weight in self._module.named_parameters() if weight.requires_grad}
        return tuple(name for name in self.layout.dims if name in names)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Names of the norms' running statistics."""
        learnt = dict(self._module.named_parameters())
        return tuple(name for name in self.layout.parts.get("norm", ()) if name not in learnt)

    @cached_property
    def embeddings(self) -> frozenset[str]:
        """Names of the weights whose rows are looked up instead of multiplied with."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        paths = [path for path, layer in self._module.named_modules() if isinstance(layer, kinds)]
        return frozenset(self._first(f"{path}.weight" if path else "weight") for path in paths)

    def mixes(self, mode: Pass) -> bool:
        """Whether an output depends on who else is in the batch: some batch norm has no statistics but the batch's."""
        if self.layout.nets:
            return any(self.alone(variant).mixes(mode) for variant in self.variants)
        norms = [layer for layer in self._module.modules() if isinstance(layer, _BatchNorm)]
        return (
            any(mode.statistics != "stored" or layer.running_mean is None for layer in norms)
            or self._mingles
        )

    @cached_property
    def _mingles(self) -> bool:
        """Whether its forward mixes the batch in ways no layer shows: a sample's answer changes with another sample."""
        try:
            state = {
                name: plain(value)
                for name, value in _state(self._module, tuple(self.layout.dims)).items()
            }
            rows, mode = plain(self.example_inputs[0].detach()), Pass(statistics="stored")
            sample = rows[:1]
            others = [row for row in rows[1:].unsqueeze(1) if not torch.equal(row, sample)]
            # Samples on either side are needed too, because a ReLU may hide one. Made-up tokens may be refused.
            if sample.is_floating_point() or not others:
                others += unlike(sample)
            with torch.no_grad():
                alone, *mixed = (
                    self.member(self.whole).net(state, torch.cat([sample, beside]), mode)[0][:1]
                    for beside in (sample, *others)
                )
            return not all(agrees(logits, alone) for logits in mixed)
        except (
            Exception
        ):  # a forward may be anybody's; batches as they were asked for are right for every net
            return True

    def check_forgets(self) -> None:
        """Refuse a net whose forward remembers: what it keeps would reach other clients, or be lost between rounds.

        Norm statistics are no such memory, they travel; what nothing depends on may be lost.
        """
        if self.layout.nets:
            for variant in self.variants:
                self.alone(variant).check_forgets()
            return
        written, differs = self._remembers
        if differs:
            kept = (
                f"it writes into {', '.join(written)}"
                if written
                else "it keeps something outside of its weights"
            )
            raise TraceError(
                f"{type(self._module).__name__} answers the same batch otherwise when it is asked again: {kept}. A net "
                "that is trained by many must be a function of its weights; without that (spectral norm's vectors, a "
                "counter that its answer depends on) it can be."
            )
        if written:
            name = type(self._module).__name__
            _log.warning(
                "%s: what its forward writes into %s is not kept.", name, ", ".join(written)
            )

    @cached_property
    def _remembers(self) -> tuple[list[str], bool]:
        """The buffers that a forward in training writes into, and whether a second one answers otherwise."""
        try:
            inputs = tuple(
                plain(torch.cat([x, x])) if isinstance(x, Tensor) else x
                for x in self.example_inputs
            )
            module = copy.deepcopy(self._module).float().cpu().train()
            own = {*self.constants, *self.carried}
            before = {name: value.clone() for name, value in module.named_buffers() if name in own}
            first, second = (answer(module, inputs) for _ in range(2))
            after = dict(module.named_buffers())
            written = [name for name, value in before.items() if not _same(value, after[name])]
            return written, not _same(first, second, 0.0 if written else 1e-4)
        except Exception:  # a forward may be anybody's, and training tells what is wrong with it
            return [], False

    @property
    def title(self) -> str:
        """The name of the module's class, or those of a union's nets."""
        if isinstance(self._module, Nets):
            return " + ".join(type(net).__name__ for net in self._module.children())
        return type(self._module).__name__

    @cached_property
    def dual(self) -> bool:
        """Whether its norms come in pairs, a clean and a noised one."""
        return is_adjustable(self._module, DualNorm)

    @cached_property
    def conditioned(self) -> bool:
        """Whether its norms are conditioned on the robustness asked for."""
        return is_adjustable(self._module, ConditionedNorm)

    @property
    def adjustable(self) -> bool:
        """Whether it can be told how robust to be."""
        return self.dual or self.conditioned

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Names of what is never trained but must be cut with the rest: frozen weights and buffers that carry axes."""
        moving = {*self.trainable, *self.statistics}
        return tuple(
            name for name in self.layout.dims if name not in moving and self._cut_axes(name)
        )

    @cached_property
    def class_rows(self) -> bool:
        """Whether a client may send the output rows of its own classes alone."""
        return self.has_class_rows(self.variant)

    def has_class_rows(self, variant: str) -> bool:
        """Return True if a client may send the output rows of its own classes alone.

        It may not where a tied embedding carries the classes: a token that is only read still trains its row. Tied
        weights of other nets of a union do not matter.
        """
        own = set(self.layout.weights(variant)) if self.layout.nets else set(self.layout.dims)
        tied = set(self.layout.ties.values()) & own
        return "class" in self.layout.axes and not any(
            "class" in self.layout.axes_of(name) for name in tied
        )

    @cached_property
    def cutter(self) -> Cutter:
        names = self.layout.weights if self.layout.nets else None
        return Cutter(self.layout.dims, self.layout.sizes, names=names)

    def _cut_axes(self, name: str) -> set[str]:
        found = {axis for dim in self.layout.dims[name] for axis in axes_in(dim)}
        return {axis for axis in found if not self.layout.axes[axis].fixed}

    # --- members -----------------------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Arch:
        """The full-width member."""
        return self._arch(1.0, "floor")

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants, the whole model first."""
        return tuple(self.layout.variants) or (WHOLE,)

    def at(self, variant: str, trains: tuple[str, ...] = ()) -> Family:
        """Return the family whose members run a variant, and train the named parts of it alone.

        Args:
            variant: One of `variants`, or several joined (`fedquilt.family.variants.joined`). The first net of a
                union may be asked for by its name.
            trains: Names of parts; (): all weights of the variant.
        """
        base = self._base or self
        variant = self.layout.known_as(variant)
        if (variant, trains) == (base.variant, base.trains):
            return base
        known = base._views.get((variant, trains))
        if known is None:
            self.layout.weights(variant)
            known = replace(base, variant=variant, trains=trains, _base=base)
            base._views[variant, trains] = known
        return known

    def staged(self, stages: int | str | Sequence[str] | None = None) -> Family:
        """Return the family with the stages of a growing model among its variants. It is traced once for each request.

        Args:
            stages: As `fedquilt.with_stages` takes them. None: the stages that the family has, else those that the
                model declares. For a model that declares none, up to four are found.
        """
        if self.layout.nets:
            raise TraceError(
                f"stages of a union of {', '.join(map(repr, self.layout.nets))} were asked for; a model grows by "
                "stages of its own. One of the models alone would work: fq.trace(module, example)."
            )
        if stages is None and len(self.variants) > 1:
            return self
        if self._traced is None or isinstance(self._traced.source, VariantSource):
            present = (
                f"the variants {', '.join(self.variants)}" if len(self.variants) > 1 else "none"
            )
            raise TraceError(
                f"stages of {self.title} were asked for; it has {present}, and cannot be traced again here. "
                "fq.trace(fq.with_stages(module, stages=…), example) gives it stages."
            )
        key = (
            stages if stages is None or isinstance(stages, (int, str)) else tuple(stages)
        )  # A list has no hash.
        known = self._staged.get(key)
        if known is None:
            found = usual_stages(self._module, self.example_inputs) if stages is None else stages
            source = with_stages(self._traced.source, found)
            known = self._staged[key] = trace(source, self.example_inputs, **self._traced.options)
        return known

    @cached_property
    def _staged(self) -> dict[object, Family]:
        return {}

    @cached_property
    def _views(self) -> dict[tuple[str, tuple[str, ...]], Family]:
        return {}

    def alone(self, variant: str) -> Family:
        """Return the family of one net of a union, with the names of weights and axes that the net's module has."""
        base = self._base or self
        variant = base.layout.known_as(variant)
        known = base._alone.get(variant)
        if known is None:
            assert isinstance(base._module, Nets), "only a union has nets"
            factory = partial(_net_of, base._factory, variant)
            layout = base.layout.restricted(variant)
            known = Family(base._module.net(variant), layout, base.example_inputs, factory)
            base._alone[variant] = known
        return known

    @cached_property
    def _alone(self) -> dict[str, Family]:
        return {}

    def fit(
        self,
        budget: Budget,
        rounding: Rounding = "floor",
        step: TrainingStep | None = None,
        variant: str | None = None,
    ) -> Arch:
        """Return the largest member within a budget: one share for all axes, at least `Axis.least` channels of each.

        Args:
            budget: Bounds that hold together.
            rounding: Of a share of an axis, to whole channels.
            step: The training step that a bound on memory is on. None: it is on inference.
            variant: Variant of the member, as `at` takes it. None: that of this family.

        Raises:
            BudgetError: Not even `Axis.least` channels of every axis are within macs, params or memory.
        """
        if variant is not None:
            return self.at(variant, self.trains).fit(budget, rounding, step)
        return self._arch(self.share(budget, rounding, step), rounding)

    def share(
        self, budget: Budget, rounding: Rounding = "floor", step: TrainingStep | None = None
    ) -> float:
        """Return the share of every axis that a budget allows; the arguments are those of `fit`."""
        if budget.macs is budget.params is budget.memory is None:
            assert budget.share is not None
            return budget.share
        key = budget, rounding, step if budget.memory else None
        known = self._fitted.get(key)
        if known is None:
            known = self._fitted[key] = self._search(*key)
        return known

    @cached_property
    def _fitted(self) -> dict[tuple[Budget, Rounding, TrainingStep | None], float]:
        return {}

    def _search(self, budget: Budget, rounding: Rounding, step: TrainingStep | None) -> float:
        """Bisect the shares at which some axis gains a channel: costs only grow with the share."""
        limit = budget.share or 1.0
        shares = sorted({share for share in self._steps if share <= limit} or {limit})

        def fits(share: float) -> bool:
            return not self._costs_over((self.member(self._arch(share, rounding)),), budget, step)

        low, high = -1, len(shares)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(shares[middle]) else (low, middle)
        if low < 0:
            cost = self.cost(self._arch(shares[0], rounding), step or TrainingStep())
            needs = (
                f"trains in {cost.memory:,} bytes" if step else f"runs in {cost.inference:,} bytes"
            )
            raise BudgetError(
                f"no member fits the budget {budget}: the smallest has {cost.params:,} parameters, {cost.macs:,} "
                f"multiply-adds a sample and {needs}{_batches(step)}."
            )
        return shares[low]

    @cached_property
    def _steps(self) -> set[float]:
        """Shares at which some member gains a channel.

        Where one channel of each group is too much, or one whole group, members still shrink by
        single channels of the product.
        """
        shares = {k / axis.size for axis in self._free for k in range(1, axis.size + 1)}
        for groups in self._free:
            for inner in (axis for axis in self._free if axis.name in groups.inner):
                few = range(1, min(groups.size, inner.size))
                shares.update(k / (groups.size * inner.size) for k in few)
        return shares

    def excess(
        self,
        nets: Sequence[Arch | Submodel | Member],
        budget: Budget,
        step: TrainingStep | None = None,
    ) -> tuple[str, ...]:
        """Return the bounds of a budget that a device's nets exceed together, and by how much.

        A share allows as many channels of every dimension as `fit` rounds up to, and always those of
        the smallest member for each net.

        Args:
            nets: Members that are held at once; with a step, trained at once.
            budget: The device's bounds.
            step: The training step that a bound on memory is on. None: it is on inference.

        Returns:
            A phrase for each bound: "params: 100 allowed, 612 needed". Empty if all are kept.
        """
        key = tuple(map(self.member, nets)), budget, step if budget.memory else None
        known = self._excess.get(key)
        if known is None:
            known = self._excess[key] = (*self._widths_over(*key[:2]), *self._costs_over(*key))
        return known

    @cached_property
    def _excess(
        self,
    ) -> dict[tuple[tuple[Member, ...], Budget, TrainingStep | None], tuple[str, ...]]:
        return {}

    def _widths_over(self, nets: tuple[Member, ...], budget: Budget) -> list[str]:
        if budget.share is None:
            return []
        found = [self._channels(net) for net in nets]
        variants = (
            members_of(JOIN.join(net.arch.variant for net in nets))
            if self.layout.nets
            else (self.variant,)
        )
        together = self.at(joined(*variants))
        allowed = self._channels(together._arch(budget.share, "ceil"))
        smallest = self._channels(together._arch(0.0, "floor"))
        for dim, most in allowed.items():
            own = [widths[dim] for widths in found if dim in widths]
            kept = sum(own)
            if kept > max(most, len(own) * smallest[dim]):
                axis = " × ".join(map(repr, dim))
                return [
                    f"share {budget.share:g}: {most} channels of axis {axis} allowed, {kept} needed"
                ]
        return []

    def _costs_over(
        self, nets: tuple[Member, ...], budget: Budget, step: TrainingStep | None
    ) -> list[str]:
        over, bounds = [], {name: getattr(budget, name) for name in ("params", "macs", "memory")}
        for name, most in bounds.items():
            if most is None:
                continue
            needed = self._needed(name, nets, step)
            if needed > most:
                kind = (
                    ""
                    if name != "memory"
                    else f" of training{_batches(step)}"
                    if step
                    else " of inference"
                )
                over.append(f"{name}{kind}: {most:,.10g} allowed, {needed:,} needed")
        return over

    def _needed(self, bound: str, members: tuple[Member, ...], step: TrainingStep | None) -> int:
        """Return what nets need of one bound; the others, which take a run each, are not counted."""
        if bound == "params":
            return sum(member.count for member in members)
        if bound == "macs":
            return sum(member.macs for member in members)
        if step:
            return sum(member.training_memory(step) for member in members)
        weights = sum(member.weight_bytes for member in members)
        return weights + max(member.inference_activations for member in members)

    def width(self, member: Arch | Submodel | Member) -> float:
        """Return the share of its channels that the widest dimension of a member keeps."""
        kept = self._channels(member)
        sizes = self.layout.sizes
        return max(
            (kept[dim] / math.prod(sizes[axis] for axis in dim) for dim in kept), default=1.0
        )

    def _channels(self, member: Arch | Submodel | Member) -> dict[tuple[str, ...], int]:
        """Return the channels that a member keeps of every dimension that can be cut.

        A dimension is one axis, or the product of two: groups, and the channels inside each. Of
        these one may stay whole while the other is cut, so that neither says how much is left.
        """
        own = self.member(member)
        dims = self.at(own.arch.variant)._dimensions if self.layout.nets else self._dimensions
        return {dim: math.prod(own.sizes[axis] for axis in dim) for dim in dims}

    @cached_property
    def _dimensions(self) -> tuple[tuple[str, ...], ...]:
        axes = self.layout.axes_at(self.variant)
        grouped = [(name, inner) for name, axis in axes.items() for inner in axis.inner]
        inside = {axis for dim in grouped for axis in dim}
        dims = [*grouped, *((name,) for name in axes if name not in inside)]
        return tuple(dim for dim in dims if not all(axes[name].fixed for name in dim))

    @cached_property
    def _free(self) -> list[Axis]:
        return [axis for axis in self.layout.axes_at(self.variant).values() if not axis.fixed]

    def _arch(self, share: float, rounding: Rounding) -> Arch:
        def target(size: int) -> int:
            # 0.29 * 100 is 28.999…: the product is rounded before it is floored.
            exact = round(share * size, 9)
            return max(1, math.floor(exact) if rounding == "floor" else math.ceil(exact))

        widths = {axis.name: target(axis.size) for axis in self._free}
        for groups in self._free:
            if not groups.inner:
                continue
            inside = {name: self.layout.axes[name].size for name in groups.inner if name in widths}
            if not inside:
                continue
            # The finer of the two is cut first, the other where that is used up. Not what holds most channels at each
            # share: of 8 groups of 2, that is 8 of 1 at a half and 5 of 2 above it, and one is not within the other.
            least = min(inside.values())
            if (
                groups.size < least and round(share * least, 9) >= 1
            ):  # all groups, with fewer channels
                widths[groups.name] = groups.size
                widths |= {name: target(size) for name, size in inside.items()}
                continue
            if groups.size < least:  # one channel of the smallest in each
                kept, most = (
                    min(groups.size, target(groups.size * least)),
                    {n: v // least for n, v in inside.items()},
                )
            else:  # whole ones
                kept, most = target(groups.size), inside
            widths[groups.name] = kept
            for name, size in inside.items():
                widths[name] = (
                    most[name] if kept > 1 else min(most[name], target(groups.size * size))
                )
        found = tuple(
            (name, max(width, self.layout.axes[name].least)) for name, width in widths.items()
        )
        return Arch(found, self.variant, self.trains)

    def member(self, member: Arch | Submodel | Member) -> Member:
        """Return a member by its widths, or that of a sub-model; what is found out about it is kept."""
        if isinstance(member, Member):
            return member
        if self._base is not None:  # Members compare by their family, so that there is one of each.
            return self._base.member(member)
        arch = member.arch if isinstance(member, Submodel) else member
        known = self._members.get(arch)
        if known is None:
            known = self._members[arch] = Member(self, arch)
        return known

    @cached_property
    def _members(self) -> dict[Arch, Member]:
        return {}

    def part(self, submodel: Submodel, share: float) -> Submodel:
        """Of any positions, those of `share` of the whole model: the first channels in the sub-model's own order."""
        nested, index = self.member(submodel).nested(share), submodel.index
        inner = {
            axis: index[axis].take(kept) if axis in index else kept
            for axis, kept in nested.index.items()
        }
        return Submodel(nested.arch, Index({**index, **inner}), submodel.scope)

    def count(self, member: Arch | Submodel | Member) -> int:
        """Return the number of a member's parameters."""
        return self.member(member).count

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the traced module by name, tied ones once."""
        return {
            name: weight
            for name, weight in self._module.named_parameters()
            if name in self.layout.dims
        }

    def cost(self, member: Arch | Submodel | Member, step: TrainingStep = TrainingStep()) -> Cost:
        """Return a member's multiply-adds, parameters, bytes, and memory to train and to run it.

        Args:
            member: A member, or a sub-model of its shape.
            step: The step whose memory is meant. The default is a batch of 32 with momentum.
        """
        return self.member(member).cost(step)

    # --- weights and networks ----------------------------------------------------------------------------------

    def init(
        self, seed: int = 0, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """All weights as training starts from them, norm statistics and carried constants included.

        On a device and in a type if asked for; whole numbers stay whole.
        """
        state = _state(
            make_module(self._factory, seed), (*self.trainable, *self.statistics, *self.carried)
        )
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in state.items()
        }

    def seeded(self, seed: int) -> Family:
        """The family with one seed's weights for every seed: other machines need neither the factory nor its files."""
        if self._base is not None:
            return self._base.seeded(seed).at(self.variant, self.trains)
        return replace(self, _factory=_maker(make_module(self._factory, seed)), _traced=None)

    def bare(self) -> Family:
        """The family without weights: enough to put modules around weights that are somewhere else."""
        module = build(
            self._module, self.layout, {}, JOIN.join(self.variants) if self.layout.nets else WHOLE
        )
        return Family(module, self.layout, self.example_inputs, _maker(module))

    def module(self, member: Arch | Submodel | Member, state: Weights | None = None) -> nn.Module:
        """A member as a plain nn.Module with weights cut from a whole state (the initial one if none is given)."""
        submodel = member if isinstance(member, Submodel) else self.member(member).prefix
        state = self.init() if state is None else state
        names = [name for name in self.member(submodel).names if submodel.scope + name in state]
        weights = self.cutter.gather(state, submodel, names)
        return self.assemble(submodel, weights)

    def assemble(
        self, submodel: Submodel, weights: Weights, shared: bool = False, extract: bool = True
    ) -> nn.Module:
        """Return a member as a plain nn.Module with weights that are already cut.

        Args:
            submodel: The member and its positions.
            weights: Its weights by name.
            shared: True: the module shares the weights. False: it owns a copy.
            extract: True: it is a module of the user's class. False: a module with variants stays one.
        """
        own = self.member(submodel)
        module = self.built(own)
        # constants, and statistics nobody measured yet, are as the module brought them
        missing = [name for name in own.names if name not in weights]
        brought = self.cutter.gather(
            _state(self._module, missing), replace(submodel, scope=""), missing
        )
        like = next((value for value in weights.values() if value.is_floating_point()), None)
        brought = {name: _beside(value, like) for name, value in brought.items()}
        owner = dict(module.named_modules(remove_duplicate=False))
        aliases: dict[str, list[str]] = {}
        for alias, name in self.layout.ties.items():
            aliases.setdefault(name, []).append(alias)
        for name in own.names:
            value = weights[name] if name in weights else brought[name]
            _assign(
                owner,
                name,
                value.detach() if shared else value.detach().clone(),
                aliases.get(name, ()),
            )
        for layer in module.modules():
            counter = getattr(layer, "num_batches_tracked", None)
            if isinstance(counter, Tensor):
                layer.num_batches_tracked = torch.zeros((), dtype=counter.dtype)
        return module.extract() if extract and isinstance(module, Variants) else module

    def built(self, member: Member) -> nn.Module:
        """Return the module of a member, with empty weights on the meta device."""
        return build(self._module, self.layout, member.sizes, member.arch.variant)

    def held(self, variant: str) -> nn.Module:
        """Return the traced module with the layers of a variant, of a union with its nets alone."""
        return self._module.holding(variant) if isinstance(self._module, Variants) else self._module

    def brought(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return weights and buffers as the traced module has them."""
        return _state(self._module, names)

    @property
    def constants(self) -> dict[str, Tensor]:
        """What stays as it is in the module: buffers that are neither statistics nor cut."""
        moving = {*self.trainable, *self.statistics, *self.carried}
        return _state(self._module, tuple(name for name in self.layout.dims if name not in moving))

    def _first(self, name: str) -> str:
        return self.layout.ties.get(name, name)

    def check(self, submodel: Submodel, who: str) -> None:
        """Refuse positions that the family does not have; `who` planned them."""
        widths = submodel.arch.sizes
        for axis, positions in submodel.index.items():
            known = self.layout.axes.get(axis)
            if known is None:
                raise SubmodelError(
                    f"{who} was planned positions on axis {axis!r}; axes here: {', '.join(widths)}."
                )
            if len(positions) != len(set(positions)) or positions.stop > known.size:
                raise SubmodelError(
                    f"{who} was planned {len(positions)} channels up to position {positions.stop - 1} on axis "
                    f"{axis!r}, which has {known.size}. Any {known.size} distinct positions from 0 fit."
                )
            if not len(positions) or (axis in widths and len(positions) != widths[axis]):
                raise SubmodelError(
                    f"{who} was planned {len(positions)} channels on axis {axis!r}, but its member has "
                    f"{widths.get(axis, known.size)}. Index and member must agree."
                )

    # --- on disk -----------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write what tracing found, so that another machine can train members without tracing."""
        Path(path).write_text(self.layout.to_json())

    @staticmethod
    def load(
        path: str | Path,
        module: nn.Module | Callable[[], nn.Module] | VariantSource,
        example_inputs: Any,
    ) -> Family:
        """Read a traced family; the module's code is still needed, tracing is not."""
        inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        layout = Layout.from_json(Path(path).read_text())
        factory = _maker(
            module.resolve(inputs, layout.class_dim)
            if isinstance(module, VariantSource)
            else module
        )
        return Family(make_module(factory), layout, inputs, factory)


def _batches(step: TrainingStep | None) -> str:
    return f" with batches of {step.batch_size}" if step else ""


def _maker(module: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A module makes itself, so that its own weights are every seed's start; a function makes a new one a seed."""
    return partial(_itself, module) if isinstance(module, nn.Module) else module


def make_module(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """What a function makes of a seed. What is neither trained nor cut has that of 0, in every run and process."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _same(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    """Whether two tensors are equal, up to a part of them; sums on many threads may differ by rounding."""
    return torch.allclose(one.float(), other.float(), rounding, rounding / 100, equal_nan=True)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _net_of(factory: Callable[[], nn.Module], variant: str) -> nn.Module:
    """Make the nets of a union, and return one of them."""
    nets = factory()
    assert isinstance(nets, Nets), "the factory of a union makes its nets"
    return nets.net(variant)


def _beside(value: Tensor, like: Tensor | None) -> Tensor:
    """Where another tensor is, and as precise; what a bare family brought has nothing to move."""
    if like is None or value.is_meta:
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def _state(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: held[name].detach().clone() for name in names}


def _assign(
    owner: Mapping[str, nn.Module], name: str, value: Tensor, aliases: Sequence[str]
) -> None:
    """Put a real tensor where the structural copy has an empty one, under all its names."""
    path, _, leaf = name.rpartition(".")
    old = getattr(owner[path], leaf)
    new = (
        nn.Parameter(value, requires_grad=old.requires_grad)
        if isinstance(old, nn.Parameter)
        else value
    )
    for each in (name, *aliases):
        path, _, leaf = each.rpartition(".")
        setattr(owner[path], leaf, new)
