"""Families: one module, its axes, and every smaller network that can be cut from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedquilt.axes import Index
from fedquilt.display import Overview
from fedquilt.errors import TraceError
from fedquilt.errors.once import Once
from fedquilt.family import probes
from fedquilt.family.assembly import assemble, tensors_of
from fedquilt.family.build import build
from fedquilt.family.cost import Cost, TrainingStep
from fedquilt.family.fitting import Fitter
from fedquilt.family.layout import Layout
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.family.nets import Nets
from fedquilt.family.origin import JoinedTracings, Tracing, as_factory, make_module, make_net
from fedquilt.family.overview import overview_of
from fedquilt.family.traced_model import TracedModel
from fedquilt.family.variants import JOIN, VariantSource
from fedquilt.hardware.torch_internals import BatchNormBase
from fedquilt.terms import WHOLE, Arch, Budget, Submodel, Weights

Rounding = Literal["floor", "ceil"]  # Rounding of a share of an axis to whole channels
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class Family(TracedModel):
    """All networks that can be cut from one module. `fedquilt.trace` makes a family.

    `axes` shows the axes of the model. `fit` returns the largest member within a budget, `cost` the
    cost of a member, and `module` a member as a plain module. Training does not change a family:
    weights are in the server's state, which starts as `init` returns it.

    Members are described by an `Arch`: a width for every axis, and a variant. `member` returns the
    member of an `Arch`, with the names of its weights, its net and its cost.

    Attributes:
        layout: Axes of the module, and the dimensions of its weights as expressions of axes.
        example_inputs: Inputs that the module was traced with.
        variant: Variant of the members that `whole` and `fit` return. `at` chooses another one.
        trains: Parts whose weights these members train. (): all parts.
    """

    variant: str = WHOLE
    trains: tuple[str, ...] = ()
    _base: Family | None = None  # The family that `at` was called on. It caches the members.
    # None: it was not traced in this process, but read from a file or received
    _traced: Tracing | JoinedTracings | None = None

    @property
    def tracing(self) -> Tracing | JoinedTracings | None:
        """Return the arguments that the family was traced with.

        It is None for a family from a file, and for one of `seeded`, `bare` or `alone`.
        """
        return self._traced

    @override
    def _overview(self) -> Overview:
        return overview_of(self)

    # --- what running the model shows ------------------------------------------------------------

    @property
    def num_outputs(self) -> int:
        """Return the size of the output's class dimension, also for a model without class axis.

        It may be 1.
        """
        if "class" in self.layout.axes:
            return self.layout.axes["class"].size
        return self.output_shape[1]

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Return the shape of the whole model's output for the example: (sample, class, …).

        Raises:
            TraceError: The model does not run on the example, or its output has one dimension only.
        """
        return probes.output_shape(self)

    def depends_on_batch(self, mode: Pass) -> bool:
        """Return True if a sample's output depends on the other samples of the batch.

        It does if a batch norm uses the statistics of the batch in a pass of this `mode`, or if the
        forward itself mixes samples.
        """
        if self.layout.nets:
            return any(self.alone(variant).depends_on_batch(mode) for variant in self.variants)
        norms = [layer for layer in self._module.modules() if isinstance(layer, BatchNormBase)]
        if any(mode.statistics != "stored" or layer.running_mean is None for layer in norms):
            return True
        return self._mixes_samples

    @cached_property
    def _mixes_samples(self) -> bool:
        return probes.mixes_samples(self)

    def check_stateless(self) -> None:
        """Refuse a net whose forward keeps state between calls.

        Such state would reach other clients, or be lost between rounds. Norm statistics are
        allowed, because they are sent. State that does not influence the output may be lost, with a
        warning.

        Raises:
            TraceError: The same batch gives another output the second time.
        """
        if self.layout.nets:
            for variant in self.variants:
                self.alone(variant).check_stateless()
            return
        buffers, differs = self._hidden_state
        if differs:
            evidence = "it keeps something outside of its weights"
            if buffers:
                evidence = f"it writes into {', '.join(buffers)}"
            raise TraceError(
                f"{self.title} returns another output for the same batch the second time: "
                f"{evidence}. A net that many clients train must be a function of its weights. "
                "Remove what it keeps, such as the vectors of a spectral norm or a counter that "
                "its output depends on."
            )
        if buffers:
            names = ", ".join(buffers)
            _log.warning("%s: what its forward writes into %s is not kept.", self.title, names)

    @cached_property
    def _hidden_state(self) -> tuple[list[str], bool]:
        """Return the names of constant buffers that a forward writes to, and a flag.

        The flag is True if a second forward on the same batch has another output.
        """
        buffer_names = {*self.constants, *self.carried}
        return probes.find_hidden_state(self._module, self.example_inputs, buffer_names)

    @cached_property
    def class_rows(self) -> bool:
        """Return True if a client may send only the output rows of its own classes.

        It is `has_class_rows` for the family's variant.
        """
        return self.has_class_rows(self.variant)

    def has_class_rows(self, variant: str) -> bool:
        """Return True if a client may send only the output rows of its own classes.

        `variant` names the net of a union that the client trains. It has no effect on other models.
        The client may not if a tied embedding has the class axis, because a token that is only read
        trains its row too. Tied weights of other nets of a union do not matter.
        """
        if "class" not in self.layout.axes:
            return False
        names = set(self.layout.weights(variant)) if self.layout.nets else set(self.layout.dims)
        tied = set(self.layout.ties.values()) & names
        return not any("class" in self.layout.axes_of(name) for name in tied)

    # --- members ---------------------------------------------------------------------------------

    @cached_property
    def whole(self) -> Arch:
        """Return the widths of the member that has all channels, in the family's variant."""
        return self.fitter.arch(1.0, "floor")

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants, the whole model first."""
        return tuple(self.layout.variants) or (WHOLE,)

    def at(self, variant: str, trains: tuple[str, ...] = ()) -> Family:
        """Return the family whose members run a variant, and train only the named parts of it.

        Equal calls return the same family, and all of them share the members' caches.

        Args:
            variant: One of `variants`, or several joined (`fedquilt.family.variants.joined`). The
                first net of a union may also be named by its own name.
            trains: Names of parts. (): all weights of the variant are trained.

        Raises:
            SubmodelError: There is no such variant. Parts are not checked here.
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

        Each request is traced at most once. Later calls return the same family.

        Args:
            stages: Stages as in `fedquilt.with_stages`. None: the stages that the family has, or
                else those that the model declares. For a model that declares none, up to four are
                found.

        Raises:
            TraceError: The family is a union, or cannot be traced again in this process.
        """
        if self.layout.nets:
            raise TraceError(
                f"stages of a union of {', '.join(map(repr, self.layout.nets))} were asked for; a "
                "model grows by stages of its own. One of the models alone would work: "
                "fq.trace(module, example)."
            )
        if stages is None and len(self.variants) > 1:
            return self
        from fedquilt.family.tracing.trace import trace_stages  # It imports this file.

        # A list has no hash.
        key = stages if stages is None or isinstance(stages, (int, str)) else tuple(stages)
        family = self._staged.get(key)
        if family is None:
            family = self._staged[key] = trace_stages(self, stages)
        return family

    @cached_property
    def _staged(self) -> dict[object, Family]:
        return {}

    @cached_property
    def _views(self) -> dict[tuple[str, tuple[str, ...]], Family]:
        return {}

    def alone(self, variant: str) -> Family:
        """Return the family of one net of a union, which `variant` names. It is cached.

        Weights and axes have the names that they have in the net's own module. The family must be
        a union.
        """
        base = self._base or self
        variant = base.layout.known_as(variant)
        family = base._alone.get(variant)
        if family is None:
            assert isinstance(base._module, Nets), "only a union has nets"
            factory = partial(make_net, base._factory, variant)
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
        """Return the largest member within a budget.

        A member keeps the same share of every axis. Larger budgets give members that contain the
        smaller ones.

        Args:
            budget: Limits that hold together. With a share alone, the member has this share.
            rounding: Rounding of a share of an axis to whole channels, "floor" or "ceil". At least
                one channel is kept, or two where the model fails with one (`Axis.least`).
            step: Training step that a limit on memory is about. None: it is about inference.
            variant: Variant of the member, as in `at`. None: that of this family.

        Returns:
            The widths of the member. `family.member(arch)` is the member itself.

        Raises:
            BudgetError: Even the smallest member exceeds the limit on macs, params or memory. The
                message has its costs.

        Example:
            >>> import fedquilt as fq
            >>> import torch
            >>> from torch import nn
            >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> family = fq.trace(net, torch.zeros(5, 4))
            >>> family.fit(fq.Budget(share=0.5)).sizes
            {'layer.0': 4}
            >>> arch = family.fit(fq.Budget(params=40))
            >>> arch.sizes, family.count(arch)
            ({'layer.0': 5}, 37)
            >>> family.fit(fq.Budget(params=5))  # doctest: +ELLIPSIS
            Traceback (most recent call last):
              ...
            fedquilt.errors.BudgetError: no member fits the budget params 5: the smallest has 9 ...
        """
        if variant is not None:
            return self.at(variant, self.trains).fit(budget, rounding, step)
        return self.fitter.arch(self.share(budget, rounding, step), rounding)

    @cached_property
    def fitter(self) -> Fitter:
        """Return the object that finds members within budgets, and caches the results."""
        return Fitter(self)

    def share(
        self, budget: Budget, rounding: Rounding = "floor", step: TrainingStep | None = None
    ) -> float:
        """Return the largest share of every axis that a budget allows, in (0, 1].

        A budget of a share alone allows that share.

        Args:
            budget: Limits that hold together.
            rounding: Rounding of a share of an axis to whole channels.
            step: Training step that a limit on memory is about. None: it is about inference.

        Raises:
            BudgetError: Even the smallest member exceeds a limit.
        """
        return self.fitter.share(budget, rounding, step)

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
            A phrase for each exceeded limit: "params: 100 allowed, 612 needed". It is empty if
            there is none.
        """
        return self.fitter.excess(tuple(map(self.member, nets)), budget, step)

    def width(self, member: Arch | Submodel | Member) -> float:
        """Return the largest share of channels that a dimension of a member keeps.

        Only dimensions that can be cut count. It is 1 if there are none.
        """
        return self.fitter.width(member)

    def member(self, member: Arch | Submodel | Member) -> Member:
        """Return the member of these widths, or of a sub-model, whose positions do not matter.

        Members are cached. A `Member` is returned as it is.
        """
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
        """Return the family's logger, which logs each warning once for all members."""
        return Once(_log)

    @cached_property
    def _members(self) -> dict[Arch, Member]:
        return {}

    def part(self, submodel: Submodel, share: float) -> Submodel:
        """Return the part of `submodel` that has `share` of every axis of the whole model.

        It has the first channels in the sub-model's order. On an axis of which `submodel` has fewer
        channels than that, the part has all of them.
        """
        nested, index = self.member(submodel).nested(share), submodel.index
        inner = {
            axis: index[axis].take(positions) if axis in index else positions
            for axis, positions in nested.index.items()
        }
        return Submodel(nested.arch, Index({**index, **inner}), submodel.scope)

    def count(self, member: Arch | Submodel | Member) -> int:
        """Return the number of entries of all parameters of a member."""
        return self.member(member).count

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
        names = (*self.trainable, *self.statistics, *self.carried)
        state = tensors_of(make_module(self._factory, seed), names)
        return {
            name: value.to(device, dtype if value.is_floating_point() else None)
            for name, value in state.items()
        }

    def seeded(self, seed: int) -> Family:
        """Return the family whose `init` returns the weights of this seed for every seed.

        Other machines then need neither the function that makes the module nor its files. The new
        family cannot be traced again.
        """
        if self._base is not None:
            return self._base.seeded(seed).at(self.variant, self.trains)
        return replace(self, _factory=as_factory(make_module(self._factory, seed)), _traced=None)

    def bare(self) -> Family:
        """Return the family without weights: its module is on the meta device.

        This is enough to build modules for given weights.
        """
        variant = JOIN.join(self.variants) if self.layout.nets else WHOLE
        module = build(self._module, self.layout, {}, variant)
        return Family(module, self.layout, self.example_inputs, as_factory(module))

    def module(self, member: Arch | Submodel | Member, state: Weights | None = None) -> nn.Module:
        """Return a member as a plain nn.Module, with weights cut from a whole state.

        Args:
            member: A sub-model with its positions. A member has the first channels of every axis.
            state: The whole state, by scope and name. None: the initial one of seed 0. Weights that
                it lacks are those of the traced module.
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
            shared: True: the module shares memory with `weights`. False: it has copies of them.
            extract: True: of a module with variants, only the member's variant is returned. False:
                the result still has the methods of `Variants`. Other modules are not affected.
        """
        return assemble(self, submodel, weights, shared, extract)

    def built(self, member: Member) -> nn.Module:
        """Return a new module of a member, with empty weights on the meta device."""
        return build(self._module, self.layout, member.sizes, member.arch.variant)

    def check(self, submodel: Submodel, client: str) -> None:
        """Refuse positions that the family does not have.

        Args:
            submodel: The member and its positions.
            client: Name of the client, for messages.

        Raises:
            SubmodelError: An axis is unknown, or has other positions than the member needs.
        """
        self.layout.check_positions(submodel, client)

    # --- on disk ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the layout to `path` as JSON, without weights. An existing file is replaced.

        Another machine can then train members without tracing.
        """
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
            example_inputs: Inputs of the module's forward: one tensor, or a tuple.

        Raises:
            FormatError: The file is not a layout. It is not compared with the module.
        """
        inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
        layout = Layout.from_json(Path(path).read_text())
        if isinstance(module, VariantSource):
            module = module.resolve(inputs, layout.class_dim)
        factory = as_factory(module)
        return Family(make_module(factory), layout, inputs, factory)
