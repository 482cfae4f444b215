"""Norms whose robustness is chosen when a net is used, and not when it is trained.

A `DualNorm` has two norms, one for clean samples and one for noised ones, and mixes their outputs
(Split-Mix, section 4.3; the norms are those of Xie & Yuille 2020). A `ConditionedNorm` is one norm
followed by a scale and a shift. A small net computes both from the requested robustness (OAT, Wang
et al. 2020).
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
from torch.nn.modules.lazy import LazyModuleMixin
from typing_extensions import override

from fedquilt.errors import ConfigError
from fedquilt.hardware.torch_internals import NormBase

NORMS = (NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
HOW_TO = (
    "Train the dual model: fq.trace(fq.dual(module), …) in Python, --set model.dual=true on "
    "the command line."
)
HOW_TO_CONDITION = (
    "Train the conditioned model: fq.trace(fq.conditioned(module), …) in Python, --set "
    "model.conditioned=true on the command line."
)


class Adjustable(nn.Module):
    """A layer that depends on λ, its `robustness`: one number, or one for each sample."""

    robustness: float | Tensor

    def __init__(self) -> None:
        super().__init__()
        self.robustness = 0.0

    @property
    def eps(self) -> float:
        """Return nan, which keeps torch's fused transformer layers off.

        They compare it before they read the weights of a single norm.
        """
        return float("nan")

    @override
    def extra_repr(self) -> str:
        return f"robustness={self.robustness}"


class DualNorm(Adjustable):
    """DBN (equation 2): (1 − λ)·clean(x) + λ·noised(x). At 0 and 1 only one norm runs."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.clean, self.noised = norm, copy.deepcopy(norm)

    @override
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
    """FiLM after a norm: (1 + scale(λ))·norm(x) + shift(λ).

    Scale and shift are nets of two layers, whose outputs start at zero. Their input is cos(π·k·λ)
    for the first `codes` whole numbers k, the discrete cosine code.
    """

    def __init__(self, norm: nn.Module, codes: int) -> None:
        super().__init__()
        weight = next(iter((*norm.parameters(), *norm.buffers())))
        if weight.dim() != 1:
            raise ConfigError(
                f"a conditioned norm was asked for; {type(norm).__name__} normalizes "
                f"{weight.dim()} dimensions at once. Norms over channels fit."
            )
        self.norm, self.codes = norm, codes
        # True: channels are in the last dimension
        self.last = isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
        self.scale, self.shift = (_perceptron(codes, len(weight)) for _ in range(2))

    @override
    def forward(self, input: Tensor) -> Tensor:
        levels = self.robustness  # (sample,) or (1,)
        if not isinstance(levels, Tensor):
            levels = torch.full((1,), levels, dtype=input.dtype, device=input.device)
        harmonics = torch.arange(self.codes, dtype=input.dtype, device=input.device)
        code = torch.cos(math.pi * levels.unsqueeze(1) * harmonics)  # (sample or 1, code)
        ones = (1,) * (input.dim() - 2)
        shape = (len(code), *ones, -1) if self.last else (len(code), -1, *ones)
        scale, shift = self.scale(code).reshape(shape), self.shift(code).reshape(shape)
        output: Tensor = (1 + scale) * self.norm(input) + shift
        return output


def _perceptron(codes: int, channels: int) -> nn.Sequential:
    """Return a net of two layers, (sample, code) → (sample, channel), whose outputs start at zero.

    Args:
        codes: Number of inputs.
        channels: Number of hidden units, and of outputs.
    """
    layers = nn.Sequential(
        nn.Linear(codes, channels), nn.LeakyReLU(), nn.Linear(channels, channels)
    )
    for value in layers[2].parameters():
        nn.init.zeros_(value)
    return layers


# --- modules made of them -----------------------------------------------------------------------


@overload
def dual(module: nn.Module) -> nn.Module: ...
@overload
def dual(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]: ...
def dual(module: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return a copy of a module in which every norm is a `DualNorm`.

    A dual norm has one norm for clean samples and one for noised ones (Split-Mix, section 4.3).
    Both start as copies of the module's norm, so that the new module computes what the old one
    does. Trace it with `fedquilt.trace`, and train it with adversarial samples. `set_robustness`
    chooses between the norms of a deployed model.

    Args:
        module: The module, which does not change. If it is a function that makes a module, a
            function is returned.

    Raises:
        ConfigError: The module has no norm with weights or statistics.

    Example:
        >>> import fedquilt as fq
        >>> from torch import nn
        >>> net = fq.dual(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        >>> type(net[1]).__name__, net[1].noised.num_features
        ('DualNorm', 8)
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
    """Return a copy of a module in which every norm is a `ConditionedNorm`.

    A conditioned norm is followed by a scale and a shift that depend on the requested robustness λ
    (OAT, Wang et al. 2020). Both start without effect, so that the new module computes what the old
    one does until it is trained. Trace it with `fedquilt.trace`. `set_robustness` chooses λ of a
    deployed model.

    Args:
        module: The module, which does not change. If it is a function that makes a module, a
            function is returned.
        codes: Length of the cosine code of λ, from which scale and shift are computed.

    Raises:
        ConfigError: The module has no norm with weights or statistics, or one that normalizes
            several dimensions at once.

    Example:
        >>> import fedquilt as fq
        >>> from torch import nn
        >>> net = fq.conditioned(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)), codes=16)
        >>> net[1].scale[0]
        Linear(in_features=16, out_features=8, bias=True)
    """
    make = partial(ConditionedNorm, codes=codes)
    return _with(module, make) if isinstance(module, nn.Module) else partial(_made, module, make)


def _made(factory: Callable[[], nn.Module], make: Callable[[nn.Module], Adjustable]) -> nn.Module:
    return _with(factory(), make)


def _with(module: nn.Module, make: Callable[[nn.Module], Adjustable]) -> nn.Module:
    """Return a copy of a module with `make(norm)` in place of every norm, at any depth.

    A module that is a norm itself is replaced as a whole. A norm with several names stays one
    layer.

    Raises:
        ConfigError: The module has no norm with weights or statistics.
    """
    copied = copy.deepcopy(module)
    if _adjusts(copied):
        return make(copied)
    replacements: dict[nn.Module, Adjustable] = {}  # A norm with two names stays one layer.
    for layer in list(copied.modules()):
        if isinstance(layer, Adjustable):
            continue
        for name, inner in layer._modules.items():  # unlike named_children, all names of a layer
            if inner is not None and _adjusts(inner):
                replacements[inner] = layer._modules[name] = replacements.get(inner) or make(inner)
    if not is_adjustable(copied):
        raise ConfigError(
            f"norms to adjust were asked for in {type(module).__name__}; it has no norm layer with "
            "weights or statistics. Batch, group, layer, instance and RMS norms fit."
        )
    return copied


def _adjusts(layer: nn.Module) -> bool:
    """Return True if a layer is a norm with weights or statistics, and no lazy module."""
    if not isinstance(layer, NORMS) or isinstance(layer, LazyModuleMixin):
        return False
    return any(True for _ in (*layer.parameters(), *layer.buffers()))


# --- which of them a net uses -------------------------------------------------------------------


def adjustables(module: nn.Module) -> Iterator[Adjustable]:
    """Iterate over the layers of a module that depend on the robustness λ, at any depth."""
    return (layer for layer in module.modules() if isinstance(layer, Adjustable))


def is_adjustable(module: nn.Module, kind: type[Adjustable] = Adjustable) -> bool:
    """Return True if a module has adjustable layers of the class `kind`. By default all count."""
    return any(isinstance(layer, kind) for layer in adjustables(module))


def set_robustness(module: nn.Module, robustness: float) -> nn.Module:
    """Set the robustness λ for all later forward passes of a module.

    It is in [0, 1]: 0 is the clean net, 1 the noised one. The module is changed in place, and
    returned.

    Raises:
        ConfigError: λ is no number in [0, 1], or the module has no dual or conditioned norms.
    """
    if not isinstance(robustness, Real) or not 0 <= robustness <= 1:
        shown = repr(robustness)
        if isinstance(robustness, Tensor):
            shown = f"a tensor {tuple(robustness.shape)}"
        raise ConfigError(
            f"a robustness of {shown} was asked for; it must lie in [0, 1]: one number for all "
            "samples, since one for each is not supported here."
        )
    if not is_adjustable(module):
        raise ConfigError(
            f"a robustness of {robustness:g} was asked for; {type(module).__name__} has no dual "
            f"norms to choose between. {HOW_TO}"
        )
    for layer in adjustables(module):
        layer.robustness = float(robustness)
    return module
