"""Norms in pairs: one for clean samples, one for noised ones, and between them how robust a net shall be.

What a net is good at (standard accuracy, or accuracy under attack) is then a number that is chosen when it is used, not
when it is trained (Split-Mix, section 4.3; the norms are those of Xie & Yuille 2020).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import overload

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from fedquilt.errors import ConfigError

NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class DualNorm(nn.Module):
    """DBN (equation 2): (1 − λ)·clean(x) + λ·noised(x), λ being `robustness`; at 0 and 1 only the one norm runs."""

    robustness: float

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.clean, self.noised = norm, copy.deepcopy(norm)
        self.robustness = 0.0

    def forward(self, x: Tensor) -> Tensor:
        if self.robustness == 0:
            return self.clean(x)  # type: ignore[no-any-return]
        if self.robustness == 1:
            return self.noised(x)  # type: ignore[no-any-return]
        mixed: Tensor = (1 - self.robustness) * self.clean(x) + self.robustness * self.noised(x)
        return mixed

    @property
    def eps(self) -> float:
        """torch's fused transformer layers compare it before they reach for one norm's weights: nan keeps them off."""
        return float("nan")

    def extra_repr(self) -> str:
        return f"robustness={self.robustness:g}"


@overload
def dual(module: nn.Module) -> nn.Module: ...
@overload
def dual(module: Callable[[], nn.Module]) -> Callable[[], nn.Module]: ...
def dual(module: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """A copy of a module in which every norm is a `DualNorm` whose two norms start equal; or of what a function makes.

    It computes what the module did, and goes through `fq.trace` as any other.
    """
    if not isinstance(module, nn.Module):
        return partial(_made, module)
    made = copy.deepcopy(module)
    pairs: dict[nn.Module, DualNorm] = {}  # a norm that stands in two places is one pair there
    if _splits(made):
        return DualNorm(made)
    for layer in list(made.modules()):
        if isinstance(layer, DualNorm):
            continue
        for name, inner in layer._modules.items():  # unlike named_children, all names of a layer
            if inner is not None and _splits(inner):
                pairs[inner] = layer._modules[name] = pairs.get(inner) or DualNorm(inner)
    if not has_dual(made):
        raise ConfigError(
            f"dual norms were asked for {type(module).__name__}; it has no norm layer with weights or statistics to "
            "keep two of. Batch, group, layer, instance and RMS norms fit; digits_cnn_norm is digits_cnn with more."
        )
    return made


def _made(factory: Callable[[], nn.Module]) -> nn.Module:
    return dual(factory())


def _splits(layer: nn.Module) -> bool:
    """Whether two of a layer could differ."""
    if not isinstance(layer, NORMS) or isinstance(layer, LazyModuleMixin):
        return False
    return any(True for _ in (*layer.parameters(), *layer.buffers()))


def dual_norms(module: nn.Module) -> Iterator[DualNorm]:
    """The pairs in a module."""
    return (layer for layer in module.modules() if isinstance(layer, DualNorm))


def has_dual(module: nn.Module) -> bool:
    return next(dual_norms(module), None) is not None


def set_robustness(module: nn.Module, robustness: float) -> nn.Module:
    """Choose λ for all that a module computes from now on: 0 is the clean net, 1 the noised one. Nothing is rebuilt."""
    if not 0 <= robustness <= 1:
        raise ConfigError(f"a robustness of {robustness} was asked for; it must lie in [0, 1].")
    if not has_dual(module):
        raise ConfigError(
            f"a robustness of {robustness:g} was asked for; {type(module).__name__} has no dual norms to choose "
            f"between. {HOW_TO}"
        )
    for layer in dual_norms(module):
        layer.robustness = float(robustness)
    return module


HOW_TO = "Train the dual model: fq.trace(fq.dual(module), …) in Python, --set model.dual=true on the command line."
