"""Families: one module, its axes, and every smaller network that can be cut from it."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedquilt.axes import Axis, Index, Positions, axes_in, write
from fedquilt.errors import BudgetError, SubmodelError, TraceError
from fedquilt.errors.faults import enough_memory
from fedquilt.errors.once import Once
from fedquilt.family.build import build
from fedquilt.family.cost import Cost, TrainingStep
from fedquilt.family.cut import Cutter
from fedquilt.family.dual import ConditionedNorm, DualNorm, is_adjustable
from fedquilt.family.faithful import answer, plain, unlike
from fedquilt.family.fitting import Need, last_within, remember
from fedquilt.family.grouped import agrees
from fedquilt.family.layout import Layout
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.family.nets import Nets
from fedquilt.family.stages import StageSource, usual_stages, with_stages
from fedquilt.family.tracing.tracer import trace_layout
from fedquilt.family.variants import JOIN, Variants, VariantSource, joined, members_of
from fedquilt.names import said
from fedquilt.terms import WHOLE, Arch, Budget, Submodel, Weights

Rounding = Literal["floor", "ceil"]
_WHOLE_NUMBERS = (
    "Whole numbers are taken for tokens, which an embedding looks up, from 0 to one less than its "
    "size. For features "
    "give real numbers, such as inputs.astype('float32')."
)
# Kinds of the parameters *args and **kwargs
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
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

    A module brings its own initial weights. A function that makes a module is called again for
    every random seed. Stages (`fedquilt.with_stages`) become variants of the family.

    Args:
        module: The module, a function without arguments that makes one, or a module with stages.
        example_inputs: Inputs of the module's forward: one tensor, or a tuple for several
            arguments.
        fixed: Names of axes, layers or weights that are never cut. () has no effect.
        parts: Groups of weights by name, as lists of layers or weights: `{"head": ["fc"]}`. None
            has no effect.
        heads: "inside": attention is cut inside each head. "whole": whole heads are cut.
        class_dim: Dimension of the output that has the classes. None: it is guessed from the
            inputs.

    Returns:
        The family of all members that can be cut from the module.

    Raises:
        TraceError: The module cannot be traced, or does not return one tensor.

    Example:
        >>> import torch, fedquilt as fq
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> family = fq.trace(net, torch.randn(5, 4))
        >>> family.axes["2.weight"]
        'class layer.0'
    """
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    factory = _maker(
        module.resolve(inputs, class_dim) if isinstance(module, VariantSource) else module
    )
    model = make_module(factory)
    if not isinstance(model, nn.Module):
        raise TraceError(
            f"the function to be traced returned a {type(model).__name__}; an nn.Module is needed."
        )
    if slashed := [
        name
        for name in (*dict(model.named_parameters()), *dict(model.named_buffers()))
        if "/" in name
    ]:
        raise TraceError(
            f"{type(model).__name__} has a weight named {slashed[0]!r}; in a federation's state "
            "'/' stands between a "
            "net and its weights. Name the layer without it."
        )
    layout = trace_layout(model, inputs, fixed=fixed, parts=parts, heads=heads, class_dim=class_dim)
    for note in layout.notes:
        _log.info("%s: %s", type(model).__name__, note)
    options = {"fixed": fixed, "parts": parts, "heads": heads, "class_dim": class_dim}
    source = module.module if isinstance(module, StageSource) else module
    return Family(
        model,
        layout,
        inputs,
        factory,
        _traced=Tracing(source, options, isinstance(module, VariantSource)),
    )


@dataclass(frozen=True, eq=False)
class Tracing:
    """The arguments of `trace` besides the example. They allow tracing again with other stages."""

    source: nn.Module | Callable[[], nn.Module] | VariantSource
    options: Mapping[str, Any]
    # True: the module was traced with variants, such as stages, that `source` does not have
    has_variants: bool = False


@dataclass(frozen=True, eq=False)
class JoinedTracings:
    """The arguments that the nets of a union were traced with, by the names of the nets."""

    nets: Mapping[str, Tracing | JoinedTracings | None]


@dataclass(frozen=True, eq=False)
class Family:
    """All networks that can be cut from one module.

    `variant` and `trains` are those of the members that `whole` and `fit` return. `at` returns the
    family with other values. It has the same weights, axes and members.
    """

    _module: nn.Module
    layout: Layout
    example_inputs: tuple[Any, ...]
    _factory: Callable[[], nn.Module]
    variant: str = WHOLE
    trains: tuple[str, ...] = ()
    _base: Family | None = None  # The family that `at` was called on. It caches the members.
    # None: it was not traced in this process, but read from a file or received
    _traced: Tracing | JoinedTracings | None = None

    # --- what there is ---------------------------------------------------------------------------

    @property
    def tracing(self) -> Tracing | JoinedTracings | None:
        """Return the arguments that the family was traced with. None: it was not traced here."""
        return self._traced

    @property
    def axes(self) -> dict[str, str]:
        """Return each weight's dimensions as text: `"conv2.weight": "c2 c1 3 3"`."""
        return {name: write(dims) for name, dims in self.layout.dims.items()}

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the weights of each named part, such as `norm`."""
        return self.layout.parts

    @property
    def num_classes(self) -> int:
        """Return the number of classes.

        Raises:
            TraceError: The class dimension of the output is not the output of one layer.
        """
        if "class" not in self.layout.axes:
            raise TraceError(
                f"{self.title} has no class axis: dimension {self.layout.class_dim} of its output "
                "is "
                "not one layer's outputs. Name the dimension that is: class_dim=…"
            )
        return self.layout.axes["class"].size

    @property
    def num_outputs(self) -> int:
        """Return the size of the output's class dimension. It may be 1, and needs no axis."""
        return (
            self.layout.axes["class"].size if "class" in self.layout.axes else self.output_shape[1]
        )

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole model's output for the example: (sample, class, …).

        Raises:
            TraceError: The model does not run on the example, or its output has one dimension only.
        """
        example = self.example_inputs[0].detach()
        state = {
            name: plain(value)
            for name, value in _state(self._module, tuple(self.layout.dims)).items()
        }
        try:
            with torch.no_grad():
                outputs, _ = self.member(self.whole).net(
                    state, plain(example), Pass(statistics="stored")
                )
        except (RuntimeError, TypeError, LookupError) as error:
            hint = "" if example.is_floating_point() else f" {_WHOLE_NUMBERS}"
            kind = str(example.dtype).removeprefix("torch.")
            raise TraceError(
                f"{self.title} does not run on the example of shape {tuple(example.shape)}, "
                f"{kind}: {said(error)}."
                f"{hint}"
            ) from error
        if outputs.dim() < 2:
            raise TraceError(
                f"{self.title} has an output of shape {tuple(outputs.shape)}; (sample, outputs) is "
                "needed, also where there is one output for each sample. Leave out the squeeze "
                "behind the last layer."
            )
        return tuple(outputs.movedim(self.layout.class_dim, 1).shape)

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the weights that training changes."""
        names = {name for name, weight in self._module.named_parameters() if weight.requires_grad}
        return tuple(name for name in self.layout.dims if name in names)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Return the names of the norms' running statistics."""
        learnt = dict(self._module.named_parameters())
        return tuple(name for name in self.layout.parts.get("norm", ()) if name not in learnt)

    @cached_property
    def embeddings(self) -> frozenset[str]:
        """Return the names of embedding weights, whose rows are looked up instead of multiplied."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        paths = [path for path, layer in self._module.named_modules() if isinstance(layer, kinds)]
        return frozenset(self._first(f"{path}.weight" if path else "weight") for path in paths)

    def depends_on_batch(self, mode: Pass) -> bool:
        """Return True if a sample's output depends on the other samples of the batch.

        It does if a batch norm uses the statistics of the batch, or if the forward itself mixes
        samples.
        """
        if self.layout.nets:
            return any(self.alone(variant).depends_on_batch(mode) for variant in self.variants)
        norms = [layer for layer in self._module.modules() if isinstance(layer, _BatchNorm)]
        return (
            any(mode.statistics != "stored" or layer.running_mean is None for layer in norms)
            or self._mingles
        )

    @cached_property
    def _mingles(self) -> bool:
        """Return True if the forward mixes samples in a way that its layers do not show.

        It is tested by replacing the other sample of a batch. If the test fails, the result is
        True, because evaluating batches as they are is correct for every net.
        """
        try:
            state = {
                name: plain(value)
                for name, value in _state(self._module, tuple(self.layout.dims)).items()
            }
            rows, mode = plain(self.example_inputs[0].detach()), Pass(statistics="stored")
            sample = rows[:1]
            other_samples = [row for row in rows[1:].unsqueeze(1) if not torch.equal(row, sample)]
            # Samples that are larger and smaller are both needed, because a ReLU may hide one of
            # them. A model may refuse tokens that are not from its data.
            if sample.is_floating_point() or not other_samples:
                other_samples += unlike(sample)
            with torch.no_grad():
                alone, *mixed = (
                    self.member(self.whole).net(state, torch.cat([sample, beside]), mode)[0][:1]
                    for beside in (sample, *other_samples)
                )
            return not all(agrees(logits, alone) for logits in mixed)
        except Exception:  # A user's forward may raise anything.
            return True

    def check_stateless(self) -> None:
        """Refuse a net whose forward keeps state between calls.

        Such state would reach other clients, or be lost between rounds. Norm statistics are
        allowed, because they are sent. State that does not influence the output may be lost, with a
        warning.
        """
        if self.layout.nets:
            for variant in self.variants:
                self.alone(variant).check_stateless()
            return
        written, differs = self._remembers
        if differs:
            evidence = (
                f"it writes into {', '.join(written)}"
                if written
                else "it keeps something outside of its weights"
            )
            raise TraceError(
                f"{type(self._module).__name__} answers the same batch otherwise when it is asked "
                f"again: {evidence}. A net "
                "that is trained by many must be a function of its weights; without that (spectral "
                "norm's vectors, a "
                "counter that its answer depends on) it can be."
            )
        if written:
            name = type(self._module).__name__
            _log.warning(
                "%s: what its forward writes into %s is not kept.", name, ", ".join(written)
            )

    @cached_property
    def _remembers(self) -> tuple[list[str], bool]:
        """Return the buffers that a forward in training writes to, and True if a second one
        differs.
        """
        try:
            inputs = tuple(
                plain(torch.cat([x, x])) if isinstance(x, Tensor) else x
                for x in self.example_inputs
            )
            module = copy.deepcopy(self._module).float().cpu().train()
            buffer_names = {*self.constants, *self.carried}
            old_buffers = {
                name: value.clone()
                for name, value in module.named_buffers()
                if name in buffer_names
            }
            first, second = (answer(module, inputs) for _ in range(2))
            new_buffers = dict(module.named_buffers())
            written = [
                name for name, value in old_buffers.items() if not _same(value, new_buffers[name])
            ]
            return written, not _same(first, second, 0.0 if written else 1e-4)
        except Exception:  # A user's forward may raise anything. Training reports the cause.
            return [], False

    @property
    def title(self) -> str:
        """Return the name of the module's class, or of the classes of a union's nets."""
        if isinstance(self._module, Nets):
            return " + ".join(type(net).__name__ for net in self._module.children())
        return type(self._module).__name__

    @cached_property
    def dual(self) -> bool:
        """Return True if the norms come in pairs, one for clean and one for noised samples."""
        return is_adjustable(self._module, DualNorm)

    @cached_property
    def conditioned(self) -> bool:
        """Return True if the norms are conditioned on the requested robustness."""
        return is_adjustable(self._module, ConditionedNorm)

    @property
    def adjustable(self) -> bool:
        """Return True if the robustness can be chosen after training."""
        return self.dual or self.conditioned

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Return the names of frozen weights and buffers that have axes.

        They are never trained, but must be cut with the trained weights.
        """
        moving = {*self.trainable, *self.statistics}
        return tuple(
            name for name in self.layout.dims if name not in moving and self._cut_axes(name)
        )

    @cached_property
    def class_rows(self) -> bool:
        """Return True if a client may send only the output rows of its own classes."""
        return self.has_class_rows(self.variant)

    def has_class_rows(self, variant: str) -> bool:
        """Return True if a client may send only the output rows of its own classes.

        It may not if a tied embedding has the class axis, because a token that is only read trains
        its row too. Tied weights of other nets of a union do not matter.
        """
        names = set(self.layout.weights(variant)) if self.layout.nets else set(self.layout.dims)
        tied = set(self.layout.ties.values()) & names
        return "class" in self.layout.axes and not any(
            "class" in self.layout.axes_of(name) for name in tied
        )

    @cached_property
    def cutter(self) -> Cutter:
        """Return the object that cuts sub-models out of whole states."""
        names = self.layout.weights if self.layout.nets else None
        return Cutter(self.layout.dims, self.layout.sizes, names=names)

    def _cut_axes(self, name: str) -> set[str]:
        """Return the axes of a weight that can be cut."""
        axes = {axis for dim in self.layout.dims[name] for axis in axes_in(dim)}
        return {axis for axis in axes if not self.layout.axes[axis].fixed}

    # --- members ---------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Arch:
        """Return the member of full width."""
        return self._arch(1.0, "floor")

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants, the whole model first."""
        return tuple(self.layout.variants) or (WHOLE,)

    def at(self, variant: str, trains: tuple[str, ...] = ()) -> Family:
        """Return the family whose members run a variant, and train only the named parts of it.

        Args:
            variant: One of `variants`, or several joined (`fedquilt.family.variants.joined`). The
                first net of a union may also be named by its own name.
            trains: Names of parts. (): all weights of the variant are trained.
        """
        base = self._base or self
        variant = self.layout.known_as(variant)
        if (variant, trains) == (base.variant, base.trains):
            return base
        view = base._views.get((variant, trains))
        if view is None:
            self.layout.weights(variant)
            view = replace(base, variant=variant, trains=trains, _base=base)
            base._views[variant, trains] = view
        return view

    def staged(self, stages: int | str | Sequence[str] | None = None) -> Family:
        """Return the family with the stages of a growing model among its variants.

        It is traced once for each request.

        Args:
            stages: Stages as in `fedquilt.with_stages`. None: the stages that the family has, or
                else those that the model declares. For a model that declares none, up to four are
                found.
        """
        if self.layout.nets:
            raise TraceError(
                f"stages of a union of {', '.join(map(repr, self.layout.nets))} were asked for; a "
                "model grows by "
                "stages of its own. One of the models alone would work: fq.trace(module, example)."
            )
        if stages is None and len(self.variants) > 1:
            return self
        if not isinstance(self._traced, Tracing) or isinstance(self._traced.source, VariantSource):
            present = (
                f"the variants {', '.join(self.variants)}" if len(self.variants) > 1 else "none"
            )
            raise TraceError(
                f"stages of {self.title} were asked for; it has {present}, and cannot be traced "
                "again here. "
                "fq.trace(fq.with_stages(module, stages=…), example) gives it stages."
            )
        # A list has no hash.
        key = stages if stages is None or isinstance(stages, (int, str)) else tuple(stages)
        family = self._staged.get(key)
        if family is None:
            requested = (
                usual_stages(self._module, self.example_inputs) if stages is None else stages
            )
            source = with_stages(self._traced.source, requested)
            family = self._staged[key] = trace(source, self.example_inputs, **self._traced.options)
        return family

    @cached_property
    def _staged(self) -> dict[object, Family]:
        return {}

    @cached_property
    def _views(self) -> dict[tuple[str, tuple[str, ...]], Family]:
        return {}

    def alone(self, variant: str) -> Family:
        """Return the family of one net of a union.

        Weights and axes have the names that they have in the net's own module.
        """
        base = self._base or self
        variant = base.layout.known_as(variant)
        family = base._alone.get(variant)
        if family is None:
            assert isinstance(base._module, Nets), "only a union has nets"
            factory = partial(_net_of, base._factory, variant)
            layout = base.layout.restricted(variant)
            family = Family(base._module.net(variant), layout, base.example_inputs, factory)
            base._alone[variant] = family
        return family

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
        """Return the largest member within a budget. It keeps the same share of every axis.

        At least `Axis.least` channels of each axis are kept.

        Args:
            budget: Limits that hold together.
            rounding: Rounding of a share of an axis to whole channels.
            step: Training step that a limit on memory is about. None: it is about inference.
            variant: Variant of the member, as in `at`. None: that of this family.

        Raises:
            BudgetError: Not even `Axis.least` channels of every axis are within macs, params or
                memory.

        Example:
            >>> import torch, fedquilt as fq
            >>> from torch import nn
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> family = fq.trace(net, torch.randn(5, 4))
            >>> family.fit(fq.Budget(params=40)).sizes
            {'layer.0': 5}
        """
        if variant is not None:
            return self.at(variant, self.trains).fit(budget, rounding, step)
        return self._arch(self.share(budget, rounding, step), rounding)

    def share(
        self, budget: Budget, rounding: Rounding = "floor", step: TrainingStep | None = None
    ) -> float:
        """Return the share of every axis that a budget allows.

        Args:
            budget: Limits that hold together.
            rounding: Rounding of a share of an axis to whole channels.
            step: Training step that a limit on memory is about. None: it is about inference.
        """
        if budget.macs is budget.params is budget.memory is None:
            assert budget.share is not None
            return budget.share
        key = budget, rounding, step if budget.memory else None
        fitted = self._fitted.get(key)
        if fitted is None:
            fitted = remember(self._fitted, key, self._search(*key))
        return fitted

    @cached_property
    def _fitted(self) -> dict[tuple[Budget, Rounding, TrainingStep | None], float]:
        return {}

    def _search(self, budget: Budget, rounding: Rounding, step: TrainingStep | None) -> float:
        """Return the largest share within a budget.

        Only shares at which some axis gains a channel are tried. Costs grow with the share.
        """
        limit = budget.share or 1.0
        shares = sorted({share for share in self._steps if share <= limit} or {limit})

        def member(place: int) -> Member:
            return self.member(self._arch(shares[place], rounding))

        count = len(shares)
        for bound in ("params", "macs", "memory"):
            limit_of_bound = getattr(budget, bound)
            if limit_of_bound is not None:
                count = 1 + last_within(self._need(bound, member, step), limit_of_bound, count)
        if count == 0:
            cost = self.cost(self._arch(shares[0], rounding), step or TrainingStep())
            needs = (
                f"trains in {cost.memory:,} bytes" if step else f"runs in {cost.inference:,} bytes"
            )
            raise BudgetError(
                f"no member fits the budget {budget}: the smallest has {cost.params:,} parameters, "
                f"{cost.macs:,} "
                f"multiply-adds a sample and {needs}{_batches(step)}."
            )
        return shares[count - 1]

    def _need(self, bound: str, member: Callable[[int], Member], step: TrainingStep | None) -> Need:
        """Return how much of one limit members need, and numbers to estimate it from.

        Activations grow with the channels.
        """

        def needed(one: Member) -> int:
            return self._needed(bound, (one,), step)

        if bound == "params":
            return Need(member, needed, exact=needed, gauge=lambda one: 0)
        if bound == "macs":
            return Need(member, needed, exact=lambda one: 0, gauge=lambda one: one.count)
        exact_part = (
            (lambda one: step.memory(one.weight_bytes, []))
            if step
            else (lambda one: one.weight_bytes)
        )
        return Need(
            member, needed, exact=exact_part, gauge=lambda one: sum(one.arch.sizes.values())
        )

    @cached_property
    def _steps(self) -> set[float]:
        """Return the shares at which some member gains a channel.

        If one channel of each group, or one whole group, is too much, members shrink by single
        channels of the product.
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
        """Return the limits of a budget that a device's nets exceed together, and by how much.

        A share allows the number of channels that `fit` rounds up to in every dimension. The
        channels of the smallest member are always allowed for each net.

        Args:
            nets: Members that a device has at once. With a step, it trains them at once.
            budget: The device's limits.
            step: Training step that a limit on memory is about. None: it is about inference.

        Returns:
            A phrase for each exceeded limit: "params: 100 allowed, 612 needed". Empty if there is
                none.
        """
        key = tuple(map(self.member, nets)), budget, step if budget.memory else None
        phrases = self._excess.get(key)
        if phrases is None:
            phrases = remember(
                self._excess, key, (*self._widths_over(*key[:2]), *self._costs_over(*key))
            )
        return phrases

    @cached_property
    def _excess(
        self,
    ) -> dict[tuple[tuple[Member, ...], Budget, TrainingStep | None], tuple[str, ...]]:
        return {}

    def _widths_over(self, nets: tuple[Member, ...], budget: Budget) -> list[str]:
        """Return a phrase for the first dimension that exceeds the share of a budget."""
        if budget.share is None:
            return []
        channels_of_nets = [self._channels(net) for net in nets]
        variants = (
            members_of(JOIN.join(net.arch.variant for net in nets))
            if self.layout.nets
            else (self.variant,)
        )
        together = self.at(joined(*variants))
        allowed = self._channels(together._arch(budget.share, "ceil"))
        smallest = self._channels(together._arch(0.0, "floor"))
        for dim, limit in allowed.items():
            counts = [widths[dim] for widths in channels_of_nets if dim in widths]
            needed = sum(counts)
            if needed > max(limit, len(counts) * smallest[dim]):
                axis = " × ".join(map(repr, dim))
                return [
                    f"share {budget.share:g}: {limit} channels of axis {axis} allowed, "
                    f"{needed} needed"
                ]
        return []

    def _costs_over(
        self, nets: tuple[Member, ...], budget: Budget, step: TrainingStep | None
    ) -> list[str]:
        """Return a phrase for each of params, macs and memory that nets exceed."""
        phrases, bounds = [], {name: getattr(budget, name) for name in ("params", "macs", "memory")}
        for name, limit in bounds.items():
            if limit is None:
                continue
            needed = self._needed(name, nets, step)
            if needed > limit:
                kind = (
                    ""
                    if name != "memory"
                    else f" of training{_batches(step)}"
                    if step
                    else " of inference"
                )
                phrases.append(f"{name}{kind}: {limit:,.10g} allowed, {needed:,} needed")
        return phrases

    def _needed(self, bound: str, members: tuple[Member, ...], step: TrainingStep | None) -> int:
        """Return how much nets need of one limit. To count another one may take a run."""
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
        channels = self._channels(member)
        sizes = self.layout.sizes
        return max(
            (channels[dim] / math.prod(sizes[axis] for axis in dim) for dim in channels),
            default=1.0,
        )

    def _channels(self, member: Arch | Submodel | Member) -> dict[tuple[str, ...], int]:
        """Return the channels that a member keeps of every dimension that can be cut.

        A dimension is one axis, or the product of two: groups, and the channels inside each. Of
        these, one may stay whole while the other is cut, so that neither alone shows the member's
        width.
        """
        resolved = self.member(member)
        dims = self.at(resolved.arch.variant)._dimensions if self.layout.nets else self._dimensions
        return {dim: math.prod(resolved.sizes[axis] for axis in dim) for dim in dims}

    @cached_property
    def _dimensions(self) -> tuple[tuple[str, ...], ...]:
        """Return the dimensions that can be cut, as tuples of axes."""
        axes = self.layout.axes_at(self.variant)
        grouped = [(name, inner) for name, axis in axes.items() for inner in axis.inner]
        paired = {axis for dim in grouped for axis in dim}
        dims = [*grouped, *((name,) for name in axes if name not in paired)]
        return tuple(dim for dim in dims if not all(axes[name].fixed for name in dim))

    @cached_property
    def _free(self) -> list[Axis]:
        """Return the axes that can be cut."""
        return [axis for axis in self.layout.axes_at(self.variant).values() if not axis.fixed]

    def _arch(self, share: float, rounding: Rounding) -> Arch:
        """Return the widths of the member with a share of every axis."""

        def target(size: int) -> int:
            # 0.29 * 100 is 28.999…: the product is rounded before it is floored.
            exact = round(share * size, 9)
            return max(1, math.floor(exact) if rounding == "floor" else math.ceil(exact))

        widths = {axis.name: target(axis.size) for axis in self._free}
        for groups in self._free:
            if not groups.inner:
                continue
            inner_sizes = {
                name: self.layout.axes[name].size for name in groups.inner if name in widths
            }
            if not inner_sizes:
                continue
            # Of groups and the channels inside them, the finer one is cut first, then the other.
            # Keeping the most channels at each share would not give nested members: of 8 groups of
            # 2, it keeps 8 of 1 at a half and 5 of 2 above it.
            smallest = min(inner_sizes.values())
            # all groups, with fewer channels
            if groups.size < smallest and round(share * smallest, 9) >= 1:
                widths[groups.name] = groups.size
                widths |= {name: target(size) for name, size in inner_sizes.items()}
                continue
            if groups.size < smallest:  # one channel of the smallest in each
                num_groups, max_widths = (
                    min(groups.size, target(groups.size * smallest)),
                    {n: v // smallest for n, v in inner_sizes.items()},
                )
            else:  # whole ones
                num_groups, max_widths = target(groups.size), inner_sizes
            widths[groups.name] = num_groups
            for name, size in inner_sizes.items():
                widths[name] = (
                    max_widths[name]
                    if num_groups > 1
                    else min(max_widths[name], target(groups.size * size))
                )
        arch_widths = tuple(
            (name, max(width, self.layout.axes[name].least)) for name, width in widths.items()
        )
        return Arch(arch_widths, self.variant, self.trains)

    def member(self, member: Arch | Submodel | Member) -> Member:
        """Return a member by its widths, or the member of a sub-model. Members are cached."""
        if isinstance(member, Member):
            return member
        if self._base is not None:  # Members compare by their family.
            return self._base.member(member)
        arch = member.arch if isinstance(member, Submodel) else member
        cached = self._members.get(arch)
        if cached is None:
            cached = self._members[arch] = Member(self, arch)
        return cached

    @cached_property
    def once(self) -> Once:
        """Return a logger that logs a warning once, even if several members give it."""
        return Once(_log)

    @cached_property
    def _members(self) -> dict[Arch, Member]:
        return {}

    def part(self, submodel: Submodel, share: float) -> Submodel:
        """Return the part of a sub-model that has `share` of the whole model.

        It has the first channels in the sub-model's order.
        """
        nested, index = self.member(submodel).nested(share), submodel.index
        inner = {
            axis: index[axis].take(positions) if axis in index else positions
            for axis, positions in nested.index.items()
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

    # --- weights and networks --------------------------------------------------------------------

    def init(
        self, seed: int = 0, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return all weights at the start of training, with norm statistics and carried constants.

        Args:
            seed: Random seed.
            device: Device of the weights. None: the module's.
            dtype: Type of real numbers. Integers keep their type. None: the module's.
        """
        state = _state(
            make_module(self._factory, seed), (*self.trainable, *self.statistics, *self.carried)
        )
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in state.items()
        }

    def seeded(self, seed: int) -> Family:
        """Return the family that has one seed's weights for every seed.

        Other machines then need neither the function that makes the module nor its files.
        """
        if self._base is not None:
            return self._base.seeded(seed).at(self.variant, self.trains)
        return replace(self, _factory=_maker(make_module(self._factory, seed)), _traced=None)

    def bare(self) -> Family:
        """Return the family without weights, which is enough to build modules for given weights."""
        module = build(
            self._module, self.layout, {}, JOIN.join(self.variants) if self.layout.nets else WHOLE
        )
        return Family(module, self.layout, self.example_inputs, _maker(module))

    def module(self, member: Arch | Submodel | Member, state: Weights | None = None) -> nn.Module:
        """Return a member as a plain nn.Module, with weights cut from a whole state.

        Args:
            member: A member, or a sub-model with its positions.
            state: The whole state. None: the initial one.
        """
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
            weights: Its weights by name. Missing ones are cut from the traced module.
            shared: True: the module shares the weights. False: it has copies.
            extract: True: the result is a module of the user's class. False: a module with variants
                stays one.
        """
        member = self.member(submodel)
        module = self.built(member)
        # Constants, and statistics that were not measured yet, are those of the traced module.
        missing = [name for name in member.names if name not in weights]
        brought = self.cutter.gather(
            _state(self._module, missing), replace(submodel, scope=""), missing
        )
        reference = next((value for value in weights.values() if value.is_floating_point()), None)
        brought = {name: _beside(value, reference) for name, value in brought.items()}
        owner = dict(module.named_modules(remove_duplicate=False))
        aliases: dict[str, list[str]] = {}
        for alias, name in self.layout.ties.items():
            aliases.setdefault(name, []).append(alias)
        for name in member.names:
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
        """Return the traced module with the layers of a variant, or a union with its nets alone."""
        return self._module.holding(variant) if isinstance(self._module, Variants) else self._module

    def brought(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return weights and buffers of the traced module."""
        return _state(self._module, names)

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return the buffers that are neither statistics nor cut."""
        moving = {*self.trainable, *self.statistics, *self.carried}
        return _state(self._module, tuple(name for name in self.layout.dims if name not in moving))

    def _first(self, name: str) -> str:
        """Return the first name of a weight, which may be tied."""
        return self.layout.ties.get(name, name)

    def check(self, submodel: Submodel, who: str) -> None:
        """Refuse positions that the family does not have. `who` names the client in messages."""
        widths = submodel.arch.sizes
        for axis, positions in submodel.index.items():
            axis_found = self.layout.axes.get(axis)
            if axis_found is None:
                raise SubmodelError(
                    f"{who} was planned positions on axis {axis!r}; axes here: {', '.join(widths)}."
                )
            if problem := _wrong_positions(positions, axis_found.size):
                raise SubmodelError(
                    f"{who} was planned {len(positions)} channels {problem} on axis {axis!r}, "
                    f"which has {axis_found.size}. "
                    f"Any {axis_found.size} distinct positions from 0 fit."
                )
            if not len(positions) or (axis in widths and len(positions) != widths[axis]):
                raise SubmodelError(
                    f"{who} was planned {len(positions)} channels on axis {axis!r}, but its member "
                    "has "
                    f"{widths.get(axis, axis_found.size)}. Index and member must agree."
                )

    # --- on disk ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the layout to a file, so that another machine can train members without tracing."""
        Path(path).write_text(self.layout.to_json())

    @staticmethod
    def load(
        path: str | Path,
        module: nn.Module | Callable[[], nn.Module] | VariantSource,
        example_inputs: Any,
    ) -> Family:
        """Return a family from a file. The module's code is needed, but it is not traced.

        Args:
            path: File that `save` wrote.
            module: The module that was traced, or a function that makes it.
            example_inputs: Inputs of the module's forward.
        """
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
    """Return a function that makes a module.

    A module makes itself, so that every seed starts from its weights. A function makes a new module
    for each seed.
    """
    if isinstance(module, nn.Module):
        return partial(_itself, module)
    _check_factory(module)
    return module


def _check_factory(factory: object) -> None:
    """Refuse an object that is neither a module nor a function without arguments."""
    if not callable(factory):
        raise TraceError(
            f"{type(factory).__name__} {factory!r} was given to be traced; a module is needed, or "
            "a function without "
            "arguments that makes one."
        )
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # Some built-in functions have no signature.
        return
    needed = [
        argument.name
        for argument in parameters
        if argument.default is argument.empty and argument.kind not in _VARIABLE
    ]
    if needed:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise TraceError(
            f"{name} was given to be traced, which needs the argument{'s'[: len(needed) > 1]} "
            f"{', '.join(needed)}. A "
            "function without arguments would work: lambda: "
            f"{name}({', '.join(f'{argument}=…' for argument in needed)})."
        )


def make_module(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return the module that a function makes with a random seed.

    Weights that are neither trained nor cut are those of seed 0, in every run and process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _wrong_positions(positions: Positions, size: int) -> str:
    """Describe what is wrong with positions on an axis of a size. "" if nothing is."""
    counts = Counter(positions)
    if not counts or max(counts.values()) == 1:
        outside = [position for position in counts if not 0 <= position < size]
        return f"with position {max(outside, key=abs)}" if outside else ""
    (repeated, times), *_ = counts.most_common(1)
    return f"with position {repeated} {times} times"


def _same(one: Tensor, other: Tensor, rounding: float = 0.0) -> bool:
    """Return True if two tensors are equal up to rounding, relative to their values.

    Sums on several threads may differ by rounding.
    """
    return torch.allclose(one.float(), other.float(), rounding, rounding / 100, equal_nan=True)


def _itself(module: nn.Module) -> nn.Module:
    return module


def _net_of(factory: Callable[[], nn.Module], variant: str) -> nn.Module:
    """Make the nets of a union, and return one of them."""
    nets = factory()
    assert isinstance(nets, Nets), "the factory of a union makes its nets"
    return nets.net(variant)


def _beside(value: Tensor, like: Tensor | None) -> Tensor:
    """Move a tensor to the device and dtype of another one.

    Tensors without data have nothing to move.
    """
    if like is None or value.is_meta:
        return value
    return value.to(like.device, like.dtype if value.is_floating_point() else value.dtype)


def _state(module: nn.Module, names: Sequence[str]) -> dict[str, Tensor]:
    """Return copies of weights and buffers by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensors[name].detach().clone() for name in names}


def _assign(
    owner: Mapping[str, nn.Module], name: str, value: Tensor, aliases: Sequence[str]
) -> None:
    """Put a tensor in place of an empty one of the structural copy, under all its names."""
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
