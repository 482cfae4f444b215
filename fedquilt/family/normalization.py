"""Norm layers whose statistics are inputs and outputs of a pass.

torch's norm layers read and write their running statistics in place. Under `vmap` that would mix
the statistics of clients, so that here they are arguments and results. Layers of torch's classes
get another forward. In a user's subclass the functional norms that it calls are replaced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedquilt.errors import TrainingError
from fedquilt.hardware.torch_internals import (
    InstanceNormBase,
    NormBase,
    is_functorch_wrapped,
    is_vmapped,
    unwrapped,
)

if TYPE_CHECKING:
    from fedquilt.family.net import Pass


@dataclass
class PassState:
    """State that the patched layers read while their net runs."""

    mode: Pass  # Options of the pass
    statistics: dict[str, Tensor] = field(default_factory=dict)  # Results of this pass, by name
    calls: Counter[str] = field(default_factory=Counter)  # Calls of each norm in this pass
    share: float | Tensor = 1.0  # Share that the scaler divides by

    @property
    def scales(self) -> bool:
        """Return True if the scaler divides outputs in this pass."""
        return self.mode.train and self.mode.scaler


def in_float32(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert bf16 arguments of a norm layer to float32 where it could not use them.

    It is a forward pre-hook with keyword arguments, and returns the new arguments.

    Args:
        layer: The layer.
        args: Arguments of its forward.
        kwargs: Keyword arguments of its forward.
    """
    return tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}


def _widened(value: Any) -> Any:
    """Convert a bf16 tensor to float32 if it is on a CPU or belongs to a stack of clients.

    All other values are returned as they are.

    Autocast passes bf16 inputs to batch norms, and on a CPU to all norms. Stacks of clients cannot
    mix them with float32 weights.
    """
    narrow = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if narrow and (value.is_cpu or is_stacked(value)) else value


@dataclass(frozen=True)
class _NormCall:
    """One call of a norm: the layer's name, and its arguments besides the inputs."""

    name: str
    mean: Tensor | None  # (channel,), stored mean. None: the layer stores no statistics
    var: Tensor | None  # (channel,), stored variance
    weight: Tensor | None  # (channel,), scale after the norm
    bias: Tensor | None  # (channel,), shift after the norm
    momentum: float | None  # Weight of the batch in new running values. None: cumulative mean
    eps: float
    alone: bool  # True: each sample is normalized by itself (instance norm)
    live: bool  # True: the layer is in training mode, and uses the batch's statistics


def run_norm_layer(layer: NormBase, name: str, state: PassState, input: Tensor) -> Tensor:
    """Run a norm layer of one of torch's classes, with the statistics that the pass asks for.

    The layer itself does not change. `state.mode` says which statistics are used, and new ones are
    written to `state.statistics` under the layer's name.

    Args:
        layer: The layer, with its weights and stored statistics.
        name: Name of the layer in its net.
        state: Options and results of the pass.
        input: (sample, channel, …)
    """
    statistics, affine = (layer.running_mean, layer.running_var), (layer.weight, layer.bias)
    alone = isinstance(layer, InstanceNormBase)
    norm = _NormCall(name, *statistics, *affine, layer.momentum, layer.eps, alone, layer.training)
    return _normalized(input, norm, state)


def run_own_forward(
    forward: Callable[..., Any],
    layer: NormBase,
    name: str,
    state: PassState,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run the forward of a user's norm class. Functional norms in it follow the pass's options.

    Args:
        forward: Forward of the user's class, bound to the layer.
        layer: The layer.
        name: Name of the layer in its net.
        state: State of the pass, which takes new statistics.
        *args: Arguments of the forward.
        **kwargs: Keyword arguments of the forward.

    Raises:
        TrainingError: The forward calls no functional norm, so that no statistics can be chosen.
    """
    mean = layer.running_mean
    uses_batch = mean is not None and state.mode.statistics != "stored"
    with _Within(layer, name, state) as within:
        try:
            outputs = forward(*args, **kwargs)
        except RuntimeError as error:
            # The policy stores no statistics, and meta tensors cannot be computed with.
            if uses_batch and not within.called and mean is not None and mean.is_meta:
                raise _by_hand(layer, name) from error
            raise
    if uses_batch and not within.called:
        raise _by_hand(layer, name)
    return outputs


def _by_hand(layer: NormBase, name: str) -> TrainingError:
    """Return the error for a user's norm layer whose forward calls no functional norm.

    Args:
        layer: The layer.
        name: Name of the layer in its net.
    """
    return TrainingError(
        f"norm layer {name!r} is a {type(layer).__name__}, whose forward normalizes by hand, so "
        "that no norm policy can choose its statistics. Let it call super().forward, F.batch_norm "
        "or F.instance_norm, or give it track_running_stats=False."
    )


class _Within(TorchFunctionMode):
    """A context in which all functional norms belong to one layer.

    The layer may have converted its statistics, so that they are not recognized by identity.
    """

    def __init__(self, layer: NormBase, name: str, state: PassState) -> None:
        super().__init__()
        self.called = False
        self._layer, self._name, self._state = layer, name, state

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in FUNCTIONAL_NORMS:
            return func(*args, **(kwargs or {}))
        self.called = True
        return run_functional_norm(
            norm_arguments(func, args, kwargs or {}), self._layer, self._name, self._state
        )


_PARAMETERS = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)
_PARAMETERS_OF_ATEN = (
    "input",
    "weight",
    "bias",
    "running_mean",
    "running_var",
    "training",
    "momentum",
    "eps",
)
FUNCTIONAL_NORMS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _PARAMETERS,
    F.instance_norm: _PARAMETERS,
    torch.batch_norm: _PARAMETERS_OF_ATEN,
    torch.instance_norm: _PARAMETERS_OF_ATEN,
}


def norm_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a functional norm by name, with defaults for those left out.

    `alone` is added, which is True for an instance norm. `training` is True if the function uses
    the statistics of its input, whatever the function calls that argument.

    Args:
        function: One of `FUNCTIONAL_NORMS`.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
    """
    alone = function in (F.instance_norm, torch.instance_norm)
    affine = {"weight": None, "bias": None}
    defaults = {
        "running_mean": None,
        "running_var": None,
        **affine,
        "training": alone,
        "momentum": 0.1,
        "eps": 1e-5,
    }
    arguments = {
        **defaults,
        **dict(zip(FUNCTIONAL_NORMS[function], args, strict=False)),
        **kwargs,
        "alone": alone,
    }
    return {**arguments, "training": arguments.get("use_input_stats", arguments["training"])}


def run_functional_norm(
    arguments: Mapping[str, Any], layer: NormBase, name: str, state: PassState
) -> Tensor:
    """Run a functional norm on a layer's statistics by the options of the pass.

    The stored statistics do not change. New ones are added to `state.statistics`.

    Args:
        arguments: Arguments of the function, as `norm_arguments` returns them.
        layer: The layer that the statistics belong to.
        name: Name of the layer in its net.
        state: State of the pass, which takes new statistics.
    """
    statistics = arguments["running_mean"], arguments["running_var"]
    affine = arguments["weight"], arguments["bias"]
    momentum = None if layer.momentum is None else arguments["momentum"]
    norm = _NormCall(
        name,
        *statistics,
        *affine,
        momentum,
        arguments["eps"],
        arguments["alone"],
        arguments["training"],
    )
    return _normalized(_widened(arguments["input"]), norm, state)


def _normalized(inputs: Tensor, norm: _NormCall, state: PassState) -> Tensor:
    """Return the outputs of a norm, by the options of the pass.

    Stored statistics are used if the pass asks for them, or if the norm is frozen in training. All
    other passes use the batch's. If they track or measure statistics, these are added to `state`.

    Args:
        inputs: (sample, channel, …)
        norm: The norm's statistics, weights and settings.
        state: State of the pass, which takes new statistics.

    Raises:
        TrainingError: The norm is frozen, and no statistics are stored.
    """
    if norm.mean is not None:
        frozen = state.mode.train and not norm.live
        if frozen and norm.mean.is_meta:
            raise TrainingError(
                f"norm layer {norm.name!r} is frozen: it normalizes by stored statistics in "
                "training too, and the norm policy stores none. Use 'tracked' or 'per_client' "
                "(local.norm), or let it train."
            )
        if frozen or state.mode.statistics == "stored":
            arguments = (norm.weight, norm.bias, norm.mean, norm.var)
            return torch.native_batch_norm(inputs, *arguments, False, 0.0, norm.eps)[0]
        if state.mode.statistics in ("track", "measure"):
            outputs, mean, var = _measured(inputs, norm)
            _store_statistics(mean, var, norm, state)
            return outputs
    if norm.alone:
        return _each_by_itself(inputs, norm)
    return _by_batch(inputs, norm.weight, norm.bias, norm.eps)


def _store_statistics(mean: Tensor, var: Tensor, norm: _NormCall, state: PassState) -> None:
    """Add new statistics of a norm to the state of the pass.

    A pass that tracks gets running values: stored and new ones, mixed by the norm's momentum. A
    pass that measures gets the mean over all calls of this norm in the pass.

    Args:
        mean: (channel,) Mean of this call's inputs.
        var: (channel,) Unbiased variance of this call's inputs.
        norm: The norm, with its stored statistics.
        state: State of the pass, which is changed.

    Raises:
        TrainingError: Running values are asked for, and the norm has no momentum.
    """
    state.calls[norm.name] += 1
    tracks = state.mode.statistics == "track"
    if tracks and norm.momentum is None:
        raise TrainingError(
            f"norm layer {norm.name!r} averages its statistics cumulatively (momentum=None), which "
            "clients cannot continue from round to round. Give it a momentum, or use the norm "
            "policy 'post'."
        )
    momentum = norm.momentum if tracks else 1 / state.calls[norm.name]
    assert momentum is not None
    for kind, stored, new in (("mean", norm.mean, mean), ("var", norm.var, var)):
        key = f"{weight_prefix(norm.name)}running_{kind}"
        # A layer that is called twice continues from its first call.
        old = state.statistics.get(key, stored if tracks else None)
        state.statistics[key] = new if old is None else (1 - momentum) * old + momentum * new


def weight_prefix(name: str) -> str:
    """Return the prefix of the names of a layer's weights: the layer's name and a dot.

    It is "" for the module itself, whose name is empty.
    """
    return f"{name}." if name else ""


def _measured(inputs: Tensor, norm: _NormCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return a norm's outputs, and the mean and the unbiased variance (channel,) of its inputs.

    The norm uses the batch's statistics. For an instance norm, mean and variance are those of each
    sample, averaged over samples. Mean and variance have no gradients.

    Raises:
        ValueError: A batch norm gets one value per channel only.
    """
    if norm.alone:
        var, mean = torch.var_mean(inputs.detach(), list(range(2, inputs.dim())), correction=1)
        return _each_by_itself(inputs, norm), mean.mean(0), var.mean(0)
    count = inputs.numel() // inputs.shape[1]
    if count == 1:
        raise _too_few(inputs)
    # The kernel returns both. A second pass over the inputs would take longer than the layer.
    results = torch.native_batch_norm(
        inputs, norm.weight, norm.bias, None, None, True, 0.0, norm.eps
    )
    mean, scale = results[1].detach(), results[2].detach()
    return results[0], mean, (scale**-2 - norm.eps).clamp(min=0) * (count / (count - 1))


def _each_by_itself(inputs: Tensor, norm: _NormCall) -> Tensor:
    """Compute an instance norm of inputs (sample, channel, …), with the norm's weight and bias.

    It is computed as a batch norm of one sample that has the channels of all samples.
    """
    normalized = _by_batch(inputs.flatten(0, 1).unsqueeze(0), None, None, norm.eps).reshape(
        inputs.shape
    )
    weight, bias = (
        None if v is None else v.reshape([-1] + [1] * (inputs.dim() - 2))
        for v in (norm.weight, norm.bias)
    )
    return normalized if weight is None or bias is None else normalized * weight + bias


def _by_batch(inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute a batch norm on the batch's statistics.

    F.batch_norm needs memory formats, which stacks of clients do not have.

    Args:
        inputs: (sample, channel, …)
        weight: (channel,), scale after the norm. None: 1.
        bias: (channel,), shift after the norm. None: 0.
        eps: Number that is added to the variance.

    Raises:
        ValueError: There is one value per channel only.
    """
    if inputs.numel() == inputs.shape[1]:
        raise _too_few(inputs)
    if inputs.is_cuda and not is_stacked(inputs):
        return F.batch_norm(inputs, None, None, weight, bias, True, 0.0, eps)  # cuDNN is faster.
    return torch.native_batch_norm(inputs, weight, bias, None, None, True, 0.0, eps)[0]


def _too_few(inputs: Tensor) -> ValueError:
    """Return the error of a batch norm with one value per channel, and say what would work."""
    return ValueError(
        f"a norm needs more than one value a channel, got an input of shape {tuple(inputs.shape)}. "
        "Give every client two samples or more (Dirichlet(min_size=2)), leave out clients with "
        "one, use a batch size above 1, or use nn.GroupNorm or nn.LayerNorm in place of batch norm"
    )


def is_stacked(value: Tensor) -> bool:
    """Return True if a tensor is one client's view of a stack of clients under vmap."""
    while is_functorch_wrapped(value):
        if is_vmapped(value):
            return True
        value = unwrapped(value)
    return False
