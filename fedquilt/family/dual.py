"""Norms that can be told how robust a net shall be, when it is used and not when it is trained.

A `DualNorm` is two norms, one for clean samples and one for noised ones, and mixes what they give (Split-Mix, section
4.3; the norms are those of Xie & Yuille 2020). A `ConditionedNorm` is one norm followed by a scale and a shift that a
small net makes of the number asked for (OAT, Wang et al. 2020).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Real
from typing import overload

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from fedquilt.errors import ConfigError

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
HOW_TO = "Train the dual model: fq.trace(fq.dual(module), …) in Python, --set model.dual=true on the command line."
HOW_TO_CONDITION = (
    "Train the conditioned model: fq.trace(fq.conditioned(module), …) in Python, --set model.conditioned=true on the "
    "command line."
)


class Adjustable(nn.Module):
    """A layer that looks at λ, its `robustness`: a number for all samples, or one for each of the batch."""

    robustness: float | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.robustness = 0.0

    @property
    def eps(self) -> float:
        """torch's fused transformer layers compare it before they reach for one norm's weights: nan keeps them off."""
        return float("nan")

    def extra_repr(self) -> str:
        return f"robustness={self.robustness}"


class DualNorm(Adjustable):
    """DBN (equation 2): (1 − λ)·clean(x) + λ·noised(x); at 0 and 1 only the one norm runs."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.clean, self.noised = norm, copy.deepcopy(norm)

    def forward(self, input: Tensor) -> Tensor:
        share = self.robustness
        if isinstance(share, Tensor):
            share = share.reshape(-1, *[1] * (input.dim() - 1))
        elif share == 0:
            return self.clean(input)  # type: ignore[no-any-return]
        elif share == 1:
            return self.noised(input)  # type: ignore[no-any-return]
        mixed: Tensor = (1 - share) * self.clean(input) + share * self.noised(input)
        return mixed


class ConditionedNorm(Adjustable):
    """FiLM after a norm: (1 + scale(λ))·norm(x) + shift(λ), both by a net of two layers that starts at zero.

    λ is read as cos(π·k·λ) for the first `codes` whole numbers k, the discrete cosine code.
    """

    def __init__(self, norm: nn.Module, codes: int) -> None:
        super().__init__()
        weight = next(iter((*norm.parameters(), *norm.buffers())))
        if weight.dim() != 1:
            raise ConfigError(
                f"a conditioned norm was asked for; {type(norm).__name__} normalises {weight.dim()} dimensions at "
                "once. Norms over channels fit."
            )
        self.norm, self.codes = norm, codes
        self.last = isinstance(norm, (nn.LayerNorm, nn.RMSNorm))  # where the channels are
        self.scale, self.shift = (_perceptron(codes, len(weight)) for _ in range(2))

    def forward(self, input: Tensor) -> Tensor:
        chosen = self.robustness
        one_each = (
            chosen
            if isinstance(chosen, Tensor)
            else torch.full((1,), chosen, dtype=input.dtype, device=input.device)
        )
        harmonics = torch.arange(self.codes, dtype=input.dtype, device=input.device)
        code = torch.cos(math.pi * one_each.unsqueeze(1) * harmonics)  # (sample or 1, code)
        between = (1,) * (input.dim() - 2)
        scale, shift = (
            found.reshape(len(code), *between, -1)
            if self.last
            else found.reshape(len(code), -1, *between)
            for found in (self.scale(code), self.shift(code))
        )
        made: Tensor = (1 + scale) * self.norm(input) + shift
        return made


def _perceptron(codes: int, channels: int) -> nn.Sequential:
    made = nn.Sequential(nn.Linear(codes, channels), nn.LeakyReLU(), nn.Linear(channels, channels))
    for value in made[2].parameters():
        nn.init.zeros_(value)
    return made


# --- modules made of them -----------------------------------------------------------------------------------------


@overload
def dual(module: nn.Module) -> nn.Module: ...
@overload
def dual(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]: ...
def dual(module: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """A copy of a module in which every norm is a `DualNorm` whose two norms start equal; or of what a function makes.

    It computes what the module did, and goes through `fq.trace` as any other.
    """
    if not isinstance(module, nn.Module):
        return partial(_made, module, DualNorm)
    return _with(module, DualNorm)


@overload
def conditioned(module: nn.Module, codes: int = ...) -> nn.Module: ...
@overload
def conditioned(module: Callable[[], nn.Module], codes: int = ...) -> Callable[[], nn.Module]: ...
def conditioned(
    module: nn.Module | Callable[[], nn.Module], codes: int = 128
) -> nn.Module | Callable[[], nn.Module]:
    """A copy of a module in which every norm is a `ConditionedNorm`; or of what a function makes.

    It computes what the module did until it is trained, and goes through `fq.trace` as any other.
    """
    make = partial(ConditionedNorm, codes=codes)
    return _with(module, make) if isinstance(module, nn.Module) else partial(_made, module, make)


def _made(factory: Callable[[], nn.Module], make: Callable[[nn.Module], Adjustable]) -> nn.Module:
    return _with(factory(), make)


def _with(module: nn.Module, make: Callable[[nn.Module], Adjustable]) -> nn.Module:
    """A copy with another layer in place of every norm."""
    copied = copy.deepcopy(module)
    if _adjusts(copied):
        return make(copied)
    found: dict[nn.Module, Adjustable] = {}  # a norm that stands in two places is one layer there
    for layer in list(copied.modules()):
        if isinstance(layer, Adjustable):
            continue
        for name, inner in layer._modules.items():  # unlike named_children, all names of a layer
            if inner is not None and _adjusts(inner):
                found[inner] = layer._modules[name] = found.get(inner) or make(inner)
    if not is_adjustable(copied):
        raise ConfigError(
            f"norms to adjust were asked for in {type(module).__name__}; it has no norm layer with weights or "
            "statistics. Batch, group, layer, instance and RMS norms fit."
        )
    return copied


def _adjusts(layer: nn.Module) -> bool:
    """Whether two of a layer could differ."""
    if not isinstance(layer, NORMS) or isinstance(layer, LazyModuleMixin):
        return False
    return any(True for _ in (*layer.parameters(), *layer.buffers()))


# --- which of them a net uses -------------------------------------------------------------------------------------


def adjustables(module: nn.Module) -> Iterator[Adjustable]:
    """The layers in a module that look at λ."""
    return (layer for layer in module.modules() if isinstance(layer, Adjustable))


def is_adjustable(module: nn.Module, kind: type[Adjustable] = Adjustable) -> bool:
    return any(isinstance(layer, kind) for layer in adjustables(module))


def set_robustness(module: nn.Module, robustness: float) -> nn.Module:
    """Choose λ for all that a module computes from now on: 0 is the clean net, 1 the noised one. Nothing is rebuilt."""
    if not isinstance(robustness, Real) or not 0 <= robustness <= 1:
        what = (
            f"a tensor {tuple(robustness.shape)}"
            if isinstance(robustness, Tensor)
            else repr(robustness)
        )
        raise ConfigError(
            f"a robustness of {what} was asked for; it must lie in [0, 1]: one number for all samples, since one for "
            "each is not supported here."
        )
    if not is_adjustable(module):
        raise ConfigError(
            f"a robustness of {robustness:g} was asked for; {type(module).__name__} has no dual norms to choose "
            f"between. {HOW_TO}"
        )
    for layer in adjustables(module):
        layer.robustness = float(robustness)
    return module
