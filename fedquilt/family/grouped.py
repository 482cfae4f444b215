"""Many equal nets as one: clients side by side in the channel dimension, with grouped kernels.

`vmap` keeps clients in a dimension of their own, and moves it between kernels. Here activations are
(batch, client · channel, …) throughout. A convolution has one group per client, a norm has more
channels, and nothing is moved.

This needs layers that have such a kernel, and forwards that treat channels as channels. The type of
a layer shows the first. The second is tested by running both versions and comparing them
(`agrees`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from typing_extensions import override

from fedquilt.errors import FedquiltError
from fedquilt.family.dual import ConditionedNorm, adjustables
from fedquilt.family.net import is_stock
from fedquilt.family.randomness import SeededRandomness
from fedquilt.family.scaled import Scaled
from fedquilt.hardware.torch_internals import BatchNormBase, ConvNd, DropoutNd


class GroupingError(FedquiltError):
    """An error for a net whose clients cannot be placed side by side."""


class Undrawn(SeededRandomness):
    """A context that refuses a forward which draws random numbers.

    Each client draws its own random numbers by its key, which a grouped net cannot do.
    """

    def __init__(self) -> None:
        super().__init__(None)

    @override
    def next_key(self) -> Tensor:
        raise GroupingError("its forward draws random numbers, which are each client's own")


class GroupedNet:
    """`count` nets of one member. Weights, inputs and logits have a first dimension for clients."""

    def __init__(self, module: nn.Module, count: int, scaled: Scaled = Scaled()) -> None:
        """Make a grouped net from a module, which belongs to the net afterwards.

        Args:
            module: The member's module. Its layers are patched.
            count: Number of clients.
            scaled: Layers whose outputs the scaler divides.
        """
        self.module, self.count = module.train(), count
        self._shares: Tensor | None = None
        self._adjustables = tuple(adjustables(module))
        for name, layer in module.named_modules():
            forward = _grouped_forward(layer, count)
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
        """Run the net in training mode, on the statistics of the batch.

        Args:
            weights: Weights by name, each (client, …).
            inputs: (client, batch, channel, …)
            class_dim: Dimension of one client's output that has the classes. Only 1 is supported.
            shares: (client,), shares by which the scaler divides hidden outputs. None has no
                effect.
            robustness: Robustness of adjustable norms. 0 is the clean net.

        Returns:
            Logits (client, batch, class, …).

        Raises:
            GroupingError: The output does not have the classes in dimension 1.
        """
        self._shares = shares
        for layer in self._adjustables:
            layer.robustness = robustness
        # Inputs are always copied, because the net may begin with an in-place operation.
        flat = inputs.transpose(0, 1).clone(memory_format=torch.contiguous_format).flatten(1, 2)
        outputs: Tensor = functional_call(self.module, dict(weights), (flat,), strict=False)
        self._shares = None
        if class_dim != 1 or outputs.shape[0] != inputs.shape[1] or outputs.shape[1] % self.count:
            raise GroupingError(
                f"its output of shape {tuple(outputs.shape)} does not hold the classes in "
                "dimension 1"
            )
        return outputs.reshape(len(outputs), self.count, -1, *outputs.shape[2:]).transpose(0, 1)

    def _rescale(self, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
        """Divide each client's outputs by its share, as a forward hook of a layer.

        `outputs` is (batch, client · channel, …). Without shares it is returned as it is.
        """
        if self._shares is None:
            return outputs
        channels = outputs.shape[1] // self.count
        divisors = self._shares.to(outputs.dtype)[:, None].expand(-1, channels).reshape(1, -1)
        return outputs / divisors.reshape([1, -1] + [1] * (outputs.dim() - 2))


def _grouped_forward(layer: nn.Module, count: int) -> Callable[[Tensor], Tensor] | None:
    """Return a layer's forward for clients side by side. None: its own forward works.

    Args:
        layer: The layer, which does not change. Its weights get a first dimension for clients.
        count: Number of clients.

    Raises:
        GroupingError: The layer has no grouped kernel.
    """
    if isinstance(layer, (ConvNd, BatchNormBase, nn.GroupNorm, nn.Linear)) and not is_stock(layer):
        raise GroupingError(
            f"a {type(layer).__name__} may compute more than the layer it is derived from"
        )
    match layer:
        case nn.Conv1d() | nn.Conv2d() | nn.Conv3d() if layer.padding_mode == "zeros":
            return partial(_conv, layer, count)
        case nn.ConvTranspose1d() | nn.ConvTranspose2d() | nn.ConvTranspose3d():
            return partial(_conv_transpose, layer, count)
        case ConditionedNorm():
            raise GroupingError(
                "it has norms that are conditioned on a number, each client's by its own net"
            )
        case nn.SyncBatchNorm():
            raise GroupingError("it has a SyncBatchNorm")
        case BatchNormBase():
            return partial(_batch_norm, layer)
        case nn.GroupNorm():
            return partial(_group_norm, layer, count)
        case nn.Linear():
            return partial(_linear, layer, count)
        case nn.AdaptiveAvgPool2d() if is_stock(layer) and layer.output_size in (1, (1, 1)):
            return _mean
        case DropoutNd() if layer.p:
            raise GroupingError(
                f"it has a {type(layer).__name__}, whose noise is each client's own"
            )
    if (
        next(layer.parameters(recurse=False), None) is not None
        or next(layer.buffers(recurse=False), None) is not None
    ):
        raise GroupingError(f"a {type(layer).__name__} has no grouped kernel")
    return None


def _joined(weight: Tensor | None) -> Tensor | None:
    """Return a weight (client, channel, …) as (client · channel, …). None stays None."""
    return None if weight is None else weight.flatten(0, 1)


_Kernels = Mapping[type[nn.Module], Callable[..., Tensor]]
_CONV: _Kernels = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_TRANSPOSED: _Kernels = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}


def _of(table: _Kernels, layer: nn.Module) -> Callable[..., Tensor]:
    """Return the function that a table has for a layer's class or base class. It must have one."""
    return next(function for kind, function in table.items() if isinstance(layer, kind))


def _conv(layer: Any, count: int, x: Tensor) -> Tensor:
    function, weight, bias = _of(_CONV, layer), layer.weight.flatten(0, 1), _joined(layer.bias)
    return function(
        x, weight, bias, layer.stride, layer.padding, layer.dilation, layer.groups * count
    )


def _conv_transpose(layer: Any, count: int, x: Tensor) -> Tensor:
    function = _of(_TRANSPOSED, layer)
    weight, bias = layer.weight.flatten(0, 1), _joined(layer.bias)
    groups = layer.groups * count
    return function(
        x, weight, bias, layer.stride, layer.padding, layer.output_padding, groups, layer.dilation
    )


def _batch_norm(layer: BatchNormBase, x: Tensor) -> Tensor:
    return F.batch_norm(
        x, None, None, _joined(layer.weight), _joined(layer.bias), True, 0.0, layer.eps
    )


def _group_norm(layer: nn.GroupNorm, count: int, x: Tensor) -> Tensor:
    return F.group_norm(
        x, layer.num_groups * count, _joined(layer.weight), _joined(layer.bias), layer.eps
    )


def _linear(layer: nn.Linear, count: int, x: Tensor) -> Tensor:
    if x.dim() != 2:
        raise GroupingError("a Linear sees more than (batch, feature)")
    by_client = x.reshape(len(x), count, -1).transpose(0, 1)  # (client, batch, feature)
    product: Tensor = by_client @ layer.weight.transpose(1, 2)
    if layer.bias is not None:
        product = product + layer.bias.unsqueeze(1)
    return product.transpose(0, 1).flatten(1)


def _mean(x: Tensor) -> Tensor:
    return x.mean((-2, -1), keepdim=True)


def agrees(logits: Tensor, expected: Tensor) -> bool:
    """Return True if logits from two computations are equal, up to the rounding of many sums.

    They may differ by a thousandth of the largest absolute value of `expected`.
    """
    logits, expected = logits.double(), expected.double()
    largest = expected.abs().max().clamp(min=1e-6)
    return bool((logits - expected).abs().max() <= 1e-3 * largest)


__all__ = ["GroupedNet", "GroupingError", "Undrawn", "agrees"]
