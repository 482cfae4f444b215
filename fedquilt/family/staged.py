"""Modules that run in stages: the user's class, with temporary heads and a choice of stage."""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import new_class
from typing import TYPE_CHECKING, Any, SupportsIndex, cast

import torch
from torch import Tensor, nn

from fedquilt.errors import ExportError, TraceError
from fedquilt.family.build import blueprint
from fedquilt.family.heads import Head
from fedquilt.family.variants import Variants
from fedquilt.terms import WHOLE

if TYPE_CHECKING:
    from fedquilt.family.tracing.run import RecordedRun

HEADS = "stage_heads"  # Name of the child that holds the temporary heads
PLAN = "_stage_plan"  # Name of the attribute that holds the plan
CHOSEN = "_chosen_variant"  # Name of the attribute that holds the chosen variant
RESERVED = (HEADS, PLAN, CHOSEN, "choose", "extract", "variants", "variant_parts", "exportable")

# Classes of modules in stages, by mixin and the user's class
_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}


def stage_name(stage: int) -> str:
    """Return the name of the variant that runs the blocks 1 to `stage`, such as "stage2"."""
    return f"stage{stage}"


@dataclass(frozen=True)
class Stage:
    """A stage before the last: E_1..E_s and G_s.

    Args:
        end: Name of the module whose output ends E_s. Empty if the module runs its stages itself.
        head: Plan of the temporary head. None if the module runs its stages itself.
        uses: Names of the module's own weights and buffers that the stage uses.
        chain: Names of modules that compute the stage one after another, if `forward` does nothing
            else.
        between: Description of what `forward` computes between modules, if there is no chain.
    """

    end: str
    head: Head | None
    uses: frozenset[str]
    chain: tuple[str, ...] = ()
    between: str = ""


@dataclass(frozen=True)
class StagePlan:
    """A plan of how a module grows.

    Args:
        stages: The stages before the last.
        last_end: Name of the module that ends E_S. Empty if the module runs its stages itself.
    """

    stages: tuple[Stage, ...]
    last_end: str = ""

    def apply(self, module: nn.Module) -> nn.Module:
        """Return a module in these stages that shares the weights of `module`.

        The module does not change. Heads are drawn from torch's global generator.

        Raises:
            TraceError: The module has an attribute whose name stages need.
        """
        clashes = [name for name in RESERVED if hasattr(module, name)]
        if clashes:
            raise TraceError(
                f"with_stages was asked to grow {type(module).__name__}, which has an attribute "
                f"{clashes[0]!r} already. "
                f"Stages need that name. Rename it; reserved are {', '.join(RESERVED)}."
            )
        kind = CutStages if self.last_end else OwnStages
        grown = _as(staged_class(kind, type(module)), blueprint(module, lambda _, weight: weight))
        setattr(grown, PLAN, self)
        setattr(grown, CHOSEN, WHOLE)
        heads = {
            stage_name(s): stage.head.make()
            for s, stage in enumerate(self.stages, 1)
            if stage.head is not None
        }
        if heads:
            reference = next(
                (weight for weight in module.parameters() if weight.is_floating_point()),
                torch.empty(0),
            )
            grown.add_module(
                HEADS,
                nn.ModuleDict(heads).to(reference.device, reference.dtype).train(module.training),
            )
        return grown


class Grown(Variants):
    """Base of the mixins for modules in stages.

    A mixin comes before the user's class among the bases.
    """

    _stage_plan: StagePlan
    _chosen_variant: str

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of the stages before the last, which is the whole model."""
        return tuple(stage_name(s) for s in range(1, len(self._stage_plan.stages) + 1))

    def choose(self, variant: str) -> None:
        """Make `forward` run this stage from now on. `WHOLE` is the whole model."""
        assert variant in (WHOLE, *self.variants), f"{variant!r} is none of {self.variants}"
        self._chosen_variant = variant

    def extract(self) -> nn.Module:
        """Return the chosen stage as a plain module that has only its own weights.

        The whole model is a module of the user's class, which has the layers of this one. An
        earlier stage is this module without the weights of the other stages, so that its weights
        keep their names. This module is changed in place, and must not be used afterwards.
        """
        module = cast(nn.Module, self)
        stage = self._stage
        if stage is None:
            module._modules.pop(HEADS, None)
            delattr(module, PLAN)
            delattr(module, CHOSEN)
            return _as(user_class(type(module)), module)
        self._drop_others(stage)
        return module

    def exportable(self) -> nn.Module:
        """Return the chosen stage as a module that torch.export can record.

        No exception ends its forward. A stage that ends inside of the user's forward becomes an
        nn.Sequential of the same layers and its head. In all other cases it is this module.

        Raises:
            ExportError: `forward` does more than call modules in turn until the stage ends.
        """
        module = cast(nn.Module, self)
        stage = self._stage
        if stage is None or not stage.end:
            return module
        if not stage.chain:
            raise ExportError(
                f"{self._chosen_variant} of {type(module).__name__} was asked for as a program; it "
                f"ends inside of the forward, behind {stage.end!r}, and is no chain of modules: "
                f"{stage.between}. safetensors takes every stage, and the whole model can be "
                "recorded once it has grown."
            )
        layers = [module.get_submodule(path) for path in stage.chain]
        return nn.Sequential(*layers, self._head).train(module.training)

    def variant_parts(self, runs: Mapping[str, RecordedRun]) -> dict[str, tuple[str, ...]]:
        """Return the weights of E_1..E_S as "stage1".., and those of G_1..G_S as "head1"...

        A weight that several stages use belongs to the first of them. The model's own weights that
        no stage uses are "headS". A module that runs its stages itself has no separate heads.

        Args:
            runs: A recorded run of every variant.
        """
        module = cast(nn.Module, self)
        named = (*dict(module.named_parameters()), *dict(module.named_buffers()))
        count = len(self._stage_plan.stages) + 1
        parts: dict[str, tuple[str, ...]] = {}
        unassigned = [name for name in named if not name.startswith(f"{HEADS}.")]
        for s in range(1, count + 1):
            used = self._used(s, runs)
            parts[stage_name(s)] = tuple(name for name in unassigned if name in used)
            unassigned = [name for name in unassigned if name not in used]
        for s in range(1, count):
            parts[f"head{s}"] = tuple(
                name for name in named if name.startswith(f"{HEADS}.{stage_name(s)}.")
            )
        parts[f"head{count}"] = tuple(unassigned)
        return parts

    def _used(self, stage: int, runs: Mapping[str, RecordedRun]) -> set[str]:
        """Return the names of the weights and buffers that E_1..E_s read.

        Args:
            stage: Number s of the last block, counted from 1.
            runs: A recorded run of every variant.
        """
        if stage <= len(self._stage_plan.stages):
            calls = runs[stage_name(stage)].calls
        else:
            run = runs[WHOLE]
            end = self._stage_plan.last_end
            stop = next((visit.stop for visit in run.visits if visit.path == end), len(run.calls))
            calls = run.calls[: stop if end else len(run.calls)]
        return {value.weight for call in calls for value in call.inputs if value.weight is not None}

    @property
    def _stage(self) -> Stage | None:
        """Return the chosen stage, or None for the whole model."""
        if self._chosen_variant == WHOLE:
            return None
        return self._stage_plan.stages[self.variants.index(self._chosen_variant)]

    @property
    def _head(self) -> nn.Module:
        """Return the temporary head of the chosen stage, which must not be the whole model."""
        return cast(nn.ModuleDict, cast(nn.Module, self)._modules[HEADS])[self._chosen_variant]

    def _drop_others(self, stage: Stage) -> None:
        """Set weights and buffers to None that a stage does not use, and drop the other heads.

        The module is changed in place. `stage` must be the chosen one. Buffers of a layer stay if
        the stage uses any tensor of that layer.
        """
        module = cast(nn.Module, self)
        if HEADS in module._modules:
            module._modules[HEADS] = nn.ModuleDict({self._chosen_variant: self._head})
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        uses = {id(tensor) for name, tensor in named.items() if name in stage.uses}
        for path, layer in module.named_modules():
            if path == HEADS or path.startswith(f"{HEADS}."):
                continue
            # No run reads the batch counters of norms. They are kept with a norm that is used.
            is_used = any(
                id(tensor) in uses for tensor in (*_own(layer._parameters), *_own(layer._buffers))
            )
            for key, weight in layer._parameters.items():
                if weight is not None and id(weight) not in uses:
                    layer._parameters[key] = None
            for key, buffer in layer._buffers.items():
                if buffer is not None and id(buffer) not in uses and not is_used:
                    layer._buffers[key] = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        """Pickle and copy by the user's class, because the class in stages is in no file."""
        reduced = super().__reduce_ex__(protocol)
        assert isinstance(reduced, tuple)
        if reduced[0] is not getattr(copyreg, "__newobj__"):  # noqa: B009  # its stub leaves it out
            return reduced
        kind, *args = reduced[1]
        mixin = next(base for base in kind.__mro__ if base in (CutStages, OwnStages))
        return (_new, (mixin, user_class(kind), *args), *reduced[2:])


class CutStages(Grown):
    """A module whose forward stops where a stage ends. Then the stage's head runs."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen stage, or the whole model."""
        module = cast(nn.Module, self)
        forward: Callable[..., Any] = super().forward  # type: ignore[misc]
        # The user's forward may run all children in turn, as nn.Sequential does. Heads must not be
        # among them.
        heads = module._modules.pop(HEADS, None)
        try:
            stage = self._stage
            if stage is None:
                return forward(*args, **kwargs)
            features = _features(module.get_submodule(stage.end), forward, args, kwargs)
        finally:
            if heads is not None:
                module._modules[HEADS] = heads
        return self._head(features)


class OwnStages(Grown):
    """A module that runs its stages itself, by its method `forward_stage(stage, *inputs)`."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen stage, or the whole model."""
        if self._chosen_variant == WHOLE:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        stage = self.variants.index(self._chosen_variant) + 1
        return cast(Any, self).forward_stage(stage, *args, **kwargs)


class StageEnd(Exception):  # noqa: N818  # it is no error
    """An exception that carries the features out of a forward which stops where a stage ends."""

    def __init__(self, layer: nn.Module, features: Any) -> None:
        super().__init__()
        self.layer = layer
        self.features = features


def _stop(layer: nn.Module, _: Any, output: Any) -> None:
    """Raise a `StageEnd` with the output of a layer, as a forward hook that stops the forward."""
    raise StageEnd(layer, output)


def _features(
    layer: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor:
    """Run a forward until a layer inside of it ends, and return the output of that layer.

    The hook is registered for this call alone, so that it runs after all others. An earlier hook,
    such as the scaler's, may change the output.

    Args:
        layer: Layer that ends the stage.
        forward: Forward of the user's class.
        args: Arguments of the forward.
        kwargs: Keyword arguments of the forward.

    Raises:
        TraceError: The forward ended without running the layer.
    """
    handle = layer.register_forward_hook(_stop)
    try:
        forward(*args, **kwargs)
    except StageEnd as end:
        if end.layer is not layer:
            raise
        features: Tensor = end.features
        return features
    finally:
        handle.remove()
    raise TraceError(
        f"a stage ends behind a {type(layer).__name__} that did not run this time. End it at a "
        "module that always runs."
    )


def _own(tensors: Mapping[str, Tensor | None]) -> list[Tensor]:
    """Return the tensors of a layer's `_parameters` or `_buffers` that are not None."""
    return [tensor for tensor in tensors.values() if tensor is not None]


def staged_class(mixin: type[Grown], kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules in stages for a user's class, which is one of its bases.

    It has the name of the user's class. Equal arguments give the same class.

    Args:
        mixin: First base: `CutStages` or `OwnStages`.
        kind: The user's class, the second base.
    """
    if (mixin, kind) not in _CLASSES:
        names = {
            "__module__": kind.__module__,
            "__qualname__": kind.__qualname__,
            "__doc__": kind.__doc__,
        }
        staged = new_class(kind.__name__, (mixin, kind), exec_body=lambda body: body.update(names))
        _CLASSES[mixin, kind] = cast(type[nn.Module], staged)
    return _CLASSES[mixin, kind]


def user_class(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the user's class that `staged_class` made a class in stages from."""
    return cast(type[nn.Module], kind.__bases__[1])


def _as(kind: type[nn.Module], module: nn.Module) -> nn.Module:
    """Return an object of class `kind` that shares all attributes and layers with a module.

    A change of one is a change of the other. Python refuses `module.__class__ = kind` for classes
    with two bases.
    """
    converted = object.__new__(kind)
    converted.__dict__ = module.__dict__
    return converted


def _new(mixin: type[Grown], kind: type[nn.Module], *args: Any) -> nn.Module:
    """Return a module in stages without attributes, which unpickling and copying fill.

    Args:
        mixin: `CutStages` or `OwnStages`.
        kind: The user's class.
        *args: Arguments of the class's `__new__`.
    """
    staged = staged_class(mixin, kind)
    return cast(nn.Module, cast(Any, staged).__new__(staged, *args))
