"""The origin of a family: the function that makes its module, and the arguments of `trace`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from fedquilt.errors import TraceError
from fedquilt.family.nets import Nets
from fedquilt.family.variants import VariantSource

# Kinds of the parameters *args and **kwargs
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclass(frozen=True, eq=False)
class Tracing:
    """The arguments of `trace` besides the example. They allow tracing again with other stages."""

    # The module or the function that was traced, without stages
    source: nn.Module | Callable[[], nn.Module] | VariantSource
    options: Mapping[str, Any]  # Keyword arguments of `trace`
    # True: the module was traced with variants, such as stages, that `source` does not have
    has_variants: bool = False


@dataclass(frozen=True, eq=False)
class JoinedTracings:
    """The arguments that the nets of a union were traced with, by the names of the nets."""

    nets: Mapping[str, Tracing | JoinedTracings | None]  # None: the net was not traced here


def as_factory(module: nn.Module | Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Return a function without arguments that makes a module.

    For a module, the function returns the module itself, so that every seed starts from its
    weights. A function is returned as it is, and makes a new module for each seed.

    Raises:
        TraceError: The object is neither a module nor a function without arguments.
    """
    if isinstance(module, nn.Module):
        return partial(_itself, module)
    _check_factory(module)
    return module


def _check_factory(factory: object) -> None:
    """Refuse an object that cannot be called without arguments, by a TraceError.

    Functions without a signature are accepted.
    """
    if not callable(factory):
        raise TraceError(
            f"{type(factory).__name__} {factory!r} was given to be traced; a module is needed, or "
            "a function without arguments that makes one."
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
            f"{', '.join(needed)}. A function without arguments would work: lambda: "
            f"{name}({', '.join(f'{argument}=…' for argument in needed)})."
        )


def make_module(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Return the module that a function makes after torch's generator was set to a seed.

    The generator's state is restored afterwards. Families trace the module of seed 0. Weights that
    are neither trained nor cut are that module's in every run and process.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return factory()


def _itself(module: nn.Module) -> nn.Module:
    return module


def make_net(factory: Callable[[], nn.Module], variant: str) -> nn.Module:
    """Make all nets of a union by its factory, and return the one that `variant` names."""
    nets = factory()
    assert isinstance(nets, Nets), "the factory of a union makes its nets"
    return nets.net(variant)
