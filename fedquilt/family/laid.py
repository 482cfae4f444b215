"""Many equal nets as one: clients laid side by side in the channel dimension, their layers as grouped kernels.

`vmap` keeps clients in a dimension of their own and moves it about between kernels. Here activations are
(batch, client · channel, …) throughout: a convolution has one group a client, a norm simply more channels, and nothing
is moved. Only layers that have such a kernel can be laid, and only forwards that treat channels as channels; the first
is known from the layer's type, the second is found out by running both and comparing (`agrees`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.dropout import _DropoutNd

from fedquilt.errors import FedquiltError
from fedquilt.family.dual import ConditionedNorm, adjustables
from fedquilt.family.net import Drawn, is_stock
from fedquilt.family.scaled import Scaled


class LayoutError(FedquiltError):
    """A net whose clients cannot be laid side by side."""


class Undrawn(Drawn):
    """Within this context a forward that draws random numbers is refused: they are each client's own, by its key."""

    def __init__(self) -> None:
        super().__init__(None)

    def site(self) -> Tensor:
        raise LayoutError("its forward draws random numbers, which are each client's own")


class LaidNet:
    """`count` nets of one member: weights have the clients in front, inputs and logits too."""

    def __init__(self, module: nn.Module, count: int, scaled: Scaled = Scaled()) -> None:
        """`module` becomes this net's own. `scaled`: layers whose outputs the scaler divides."""
        self.module, self.count = module.train(), count
        self._shares: Tensor | None = None
        self._adjustables = tuple(adjustables(module))
        for name, layer in module.named_modules():
            forward = _laid(layer, count)
            if forward is not None:
                layer.forward = forward
            if name in scaled.layers:
                layer.register_forward_hook(self._rescale)

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        inputs: Tensor,
        class_dim: int,
        shares: Tensor | None = None,
        robustness: float = 0.0,
    ) -> Tensor:
        """Logits (client, batch, class, …) of inputs (client, batch, channel, …), on batch statistics.

        With `shares` (client,) the scaler divides each client's hidden outputs by its own.
        """
        self._shares = shares
        for layer in self._adjustables:
            layer.robustness = robustness
        # A copy always, not only where flattening needs one: the net may begin with an operation in place.
        flat = inputs.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1, 2)
        outputs: Tensor = functional_call(self.module, dict(weights), (flat,), strict=False)
        self._shares = None
        if class_dim != 1 or outputs.shape[0] != inputs.shape[1] or outputs.shape[1] % self.count:
            raise LayoutError(
                f"its output of shape {tuple(outputs.shape)} does not hold the classes in dimension 1"
            )
        return outputs.reshape(len(outputs), self.count, -1, *outputs.shape[2:]).transpose(0, 1)

    def _rescale(self, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        if self._shares is None:
            return outputs
        channels = outputs.shape[1] // self.count
        divisors = self._shares.to(outputs.dtype)[:, None].expand(-1, channels).reshape(1, -1)
        return outputs / divisors.reshape([1, -1] + [1] * (outputs.dim() - 2))


def _laid(layer: nn.Module, count: int) -> Callable[[Tensor], Tensor] | None:
    """A layer's forward over clients laid side by side; None where its own will do."""
    if isinstance(layer, (_ConvNd, _BatchNorm, nn.GroupNorm, nn.Linear)) and not is_stock(layer):
        raise LayoutError(
            f"a {type(layer).__name__} may compute more than the layer it is derived from"
        )
    match layer:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if layer.padding_mode == "zeros":
            return partial(_conv, layer, count)
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            return partial(_conv_transpose, layer, count)
        case ConditionedNorm():
            raise LayoutError(
                "it has norms that are conditioned on a number, each client's by its own net"
            )
        case nn.SyncBatchNorm():
            raise LayoutError("it has a SyncBatchNorm")
        case _BatchNorm():
            return partial(_batch_norm, layer)
        case nn.GroupNorm():
            return partial(_group_norm, layer, count)
        case nn.Linear():
            return partial(_linear, layer, count)
        case nn.AdaptiveAvgPool2d() if is_stock(layer) and layer.output_size in (1, (1, 1)):
            return _mean
        case _DropoutNd() if layer.p:
            raise LayoutError(f"it has a {type(layer).__name__}, whose noise is each client's own")
    if (
        next(layer.parameters(recurse=False), None) is not None
        or next(layer.buffers(recurse=False), None) is not None
    ):
        raise LayoutError(f"a {type(layer).__name__} has no grouped kernel")
    return None


def _joined(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.flatten(0, 1)


_Kernels = Mapping[type[nn.Module], Callable[..., Tensor]]
_CONV: _Kernels = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_TRANSPOSED: _Kernels = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def _of(table: _Kernels, layer: nn.Module) -> Callable[..., Tensor]:
    return next(function for kind, function in table.items() if isinstance(layer, kind))


def _conv(layer: Any, count: int, x: Tensor) -> Tensor:
    function, weight, bias = _of(_CONV, layer), layer.weight.flatten(0, 1), _joined(layer.bias)
    return function(
        x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups * count
    )


def _conv_transpose(layer: Any, count: int, x: Tensor) -> Tensor:
    function, weight, bias = (
        _of(_TRANSPOSED, layer),
        layer.weight.flatten(0, 1),
        _joined(layer.bias),
    )
    groups = layer.groups * count
    return function(
        x, weight, bias, layer.stride, layer.padding, layer.output_padding, groups, layer.dilation
    )


def _batch_norm(layer: _BatchNorm, x: Tensor) -> Tensor:
    return F.batch_norm(
        x, None, None, _joined(layer.weight), _joined(layer.bias), True, 0.0, layer.eps
    )


def _group_norm(layer: nn.GroupNorm, count: int, x: Tensor) -> Tensor:
    return F.group_norm(
        x, layer.num_groups * count, _joined(layer.weight), _joined(layer.bias), layer.eps
    )


def _linear(layer: nn.Linear, count: int, x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise LayoutError("a Linear sees more than (batch, feature)")
    apart = x.reshape(len(x), count, -1).transpose(0, 1)  # (client, batch, feature)
    product: Tensor = apart @ layer.weight.transpose(1, 2)
    if layer.bias is not None:
        product = product + layer.bias.unsqueeze(1)
    return product.transpose(0, 1).flatten(1)


def _mean(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


def agrees(one: Tensor, other: Tensor) -> bool:
    """Whether two ways to compute logits give the same, up to the rounding of many sums."""
    one, other = one.double(), other.double()
    return bool((one - other).abs().max() <= 1e-3 * other.abs().max().clamp(min=1e-6))


__all__ = ["LaidNet", "LayoutError", "Undrawn", "agrees"]
