"""A member as a pure function of its weights, without hidden state.

A module keeps two kinds of hidden state, and a `Net` removes both. Norm statistics become inputs
and outputs. Random numbers (dropout, attention dropout, `torch.rand` in a forward) come from
`fedquilt.noise`. They depend on the caller's key and on the order of the draws, so that every
engine draws the same.

The forward of torch's own norm layers is replaced, because that is fast. A subclass keeps its
forward, since it may add an activation or a conversion. There the functional call (`F.batch_norm`)
is replaced, which `super().forward` calls too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode

from fedquilt import noise
from fedquilt.errors import TrainingError
from fedquilt.family.dual import adjustables
from fedquilt.family.nets import Nets
from fedquilt.family.scaled import Scaled
from fedquilt.hardware.torch_internals import (
    is_functorch_wrapped,
    is_vmapped,
    outside_functorch,
    unwrapped,
)

Statistics = Literal["batch", "stored", "track", "measure"]


@dataclass(frozen=True)
class Pass:
    """Options of a forward pass: training mode, norm statistics and rescaling."""

    train: bool = False
    # "stored": normalize by stored statistics. All others normalize by the batch. "track" also
    # returns new running values, and "measure" returns the statistics of the batch.
    statistics: Statistics = "batch"
    # HeteroFL's scaler: in training, divide the outputs of cut hidden layers by the client's share
    scaler: bool = False
    robustness: float = 0.0  # Robustness of adjustable norms: 0 is the clean net, 1 the noised one


@dataclass
class _Now:
    """State that the patched layers read while their net runs."""

    mode: Pass = field(default_factory=Pass)
    seen: dict[str, Tensor] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)  # Calls of each norm in this pass
    share: float | Tensor = 1.0  # Share that the scaler divides by

    @property
    def scales(self) -> bool:
        """Return True if the scaler divides outputs in this pass."""
        return self.mode.train and self.mode.scaler


class Net:
    """A member of a family as a function of its weights.

    `net(weights, inputs)` returns outputs and the norm statistics of the pass.
    """

    def __init__(
        self, module: nn.Module, constants: Mapping[str, Tensor], scaled: Scaled = Scaled()
    ) -> None:
        """Make a net from a module, which belongs to the net afterwards.

        Args:
            module: The member's module. Its layers are patched.
            constants: Buffers that are no statistics, by name.
            scaled: Layers whose outputs the scaler divides.
        """
        self.module = module
        self._scaled = scaled
        self._constants = dict(constants)
        # Prefixes of names. Weights of other nets of a union are ignored.
        self._leads = module.lead if isinstance(module, Nets) else None
        self._moved: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
        self._now = _Now()
        self._adjustables = tuple(adjustables(module))
        # Values of `mode.train` with which no function needs to be replaced
        self._plain: set[bool] = set()
        # Values of `mode.train` with which the module does not change its inputs
        self._reading: set[bool] = set()
        self._norms: dict[str, _NormBase] = {}  # Layers whose statistics are inputs and outputs
        self._counters: list[str] = []  # Batch counters of norms that keep their own forward
        for name, layer in module.named_modules():
            if isinstance(layer, _NormBase):
                self._norms[name] = layer
            if isinstance(layer, _NormBase) and not is_stock(layer):
                layer.forward = partial(_own_norm, layer.forward, layer, name, self._now)
                if layer.num_batches_tracked is not None:
                    self._counters.append(f"{_prefix(name)}num_batches_tracked")
                continue
            if isinstance(layer, (_NormBase, nn.LayerNorm, nn.GroupNorm)):
                layer.register_forward_pre_hook(_in_float32, with_kwargs=True)
            if isinstance(layer, _NormBase):
                layer.forward = partial(_norm, layer, name, self._now)
            elif isinstance(layer, nn.AdaptiveAvgPool2d) and is_stock(layer):
                layer.forward = partial(_pool_layer, layer)  # type: ignore[method-assign]
            if name in scaled.layers:
                layer.register_forward_hook(partial(_rescale, self._now))

    def __call__(
        self,
        weights: Mapping[str, Tensor],
        inputs: Tensor,
        mode: Pass = Pass(),
        key: Tensor | None = None,
        condition: Tensor | None = None,
        share: float | Tensor = 1.0,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run the net.

        Args:
            weights: Weights and stored statistics, by name.
            inputs: (sample, …)
            mode: Options of the pass.
            key: Random key in training, one number for each client. None: nothing may be drawn.
            condition: (sample,), a robustness for each sample. None: that of the pass for all.
            share: Share that the scaler divides by, if the pass asks for it. 1 has no effect.

        Returns:
            Outputs, and the norm statistics by name if the pass tracks or measures them.
        """
        self.module.train(mode.train)
        for layer in self._adjustables:
            layer.robustness = mode.robustness if condition is None else condition
        self._now.mode, self._now.seen, self._now.share = mode, {}, share
        self._now.calls = Counter()
        values = {**self._constants_for(weights), **weights, **self._fresh_counters()}
        if self._leads is not None:
            values = {name: value for name, value in values.items() if name.startswith(self._leads)}
        if self._now.scales:
            values |= {name: _divided(values[name], share) for name in self._scaled.weights}
        # An in-place operation would change the caller's inputs, and torch.func refuses it. A copy
        # may change.
        copied = mode.train not in self._reading
        inputs = inputs.clone() if copied else inputs
        if mode.train in self._plain:
            outputs = functional_call(self.module, values, (inputs,), strict=False)
        else:
            with SeededRandomness(key, self._functional_norm) as drawn:
                outputs = functional_call(self.module, values, (inputs,), strict=False)
            # Watching every operation costs a millisecond. A traced net always runs the same
            # operations, so that one pass shows if any is replaced.
            if not drawn.replaced:
                self._plain.add(mode.train)
        if copied and not _is_changed(inputs):
            self._reading.add(mode.train)
        seen, self._now.seen = self._now.seen, {}
        self._now.share = 1.0  # A net must not keep a caller's tensors alive.
        if condition is not None:
            for layer in self._adjustables:
                layer.robustness = mode.robustness
        return outputs, seen

    def _fresh_counters(self) -> dict[str, Tensor]:
        """Return new batch counters, since torch.func refuses to change the module's in place."""
        return {name: torch.zeros((), dtype=torch.long) for name in self._counters}

    def _functional_norm(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Run a functional norm by the options of the pass, if it got a layer's statistics.

        None is returned if it did not.
        """
        arguments = _arguments(function, args, kwargs)
        for name, layer in self._norms.items():
            if (
                arguments["running_mean"] is not None
                and arguments["running_mean"] is layer.running_mean
            ):
                return _functional(arguments, layer, name, self._now)
        return None

    def _constants_for(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the constants on the device and in the dtype of the weights."""
        reference = next((value for value in weights.values() if value.is_floating_point()), None)
        if reference is None:
            return self._constants
        moved = self._moved.get((reference.device, reference.dtype))
        if moved is None:
            with outside_functorch():
                moved = {
                    name: value.to(
                        reference.device,
                        reference.dtype if value.is_floating_point() else value.dtype,
                    )
                    for name, value in self._constants.items()
                }
            self._moved[reference.device, reference.dtype] = moved
        return moved


# Methods that a user's subclass may have without changing what torch's class computes
_HARMLESS_METHODS = ("__init__", "__repr__", "extra_repr", "reset_parameters")


def is_stock(layer: nn.Module) -> bool:
    """Return True if a layer computes what torch's class does.

    It must be of that class, or of a subclass that adds no more than a constructor.
    """
    if "forward" in vars(layer):
        return False
    for kind in type(layer).__mro__:
        if kind.__module__ == parametrize.__name__:  # The class of a parametrized layer
            continue
        if kind.__module__.startswith("torch.nn."):
            return True
        for name, value in vars(kind).items():
            is_method = isinstance(value, (FunctionType, property, classmethod, staticmethod))
            if is_method and name not in _HARMLESS_METHODS:
                return False
    return False


def _in_float32(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Convert the arguments of a layer from bf16 where that is needed."""
    return tuple(map(_widened, args)), {name: _widened(value) for name, value in kwargs.items()}


def _widened(value: Any) -> Any:
    """Convert bf16 values to float32 if a norm could not use them.

    Autocast passes bf16 inputs to batch norms, and on a CPU to all norms. Stacks of clients cannot
    mix them with float32 weights.
    """
    narrow = isinstance(value, Tensor) and value.dtype == torch.bfloat16
    return value.float() if narrow and (value.is_cpu or _is_stacked(value)) else value


@dataclass(frozen=True)
class _Norm:
    """One call of a norm: the layer's name, and its arguments besides the inputs."""

    name: str
    mean: Tensor | None
    var: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    momentum: float | None
    eps: float
    alone: bool  # True: each sample is normalized by itself (instance norm).
    live: bool  # True: the layer is in training mode, and uses the batch's statistics.


def _norm(layer: _NormBase, name: str, now: _Now, input: Tensor) -> Tensor:
    """Run a norm layer of one of torch's classes."""
    statistics, affine = (layer.running_mean, layer.running_var), (layer.weight, layer.bias)
    alone = isinstance(layer, _InstanceNorm)
    norm = _Norm(name, *statistics, *affine, layer.momentum, layer.eps, alone, layer.training)
    return _normalized(input, norm, now)


def _own_norm(
    forward: Callable[..., Any], layer: _NormBase, name: str, now: _Now, *args: Any, **kwargs: Any
) -> Any:
    """Run the forward of a user's norm class. Functional norms in it follow the pass's options."""
    mean = layer.running_mean
    uses_batch = mean is not None and now.mode.statistics != "stored"
    with _Within(layer, name, now) as within:
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


def _by_hand(layer: _NormBase, name: str) -> TrainingError:
    """Return the error for a norm layer that calls no functional norm."""
    return TrainingError(
        f"norm layer {name!r} is a {type(layer).__name__}, whose forward normalizes by hand, so "
        "that "
        "no norm policy can choose its statistics. Let it call super().forward, F.batch_norm or "
        "F.instance_norm, or give it track_running_stats=False."
    )


class _Within(TorchFunctionMode):
    """A context in which all functional norms belong to one layer.

    The layer may have converted its statistics, so that they are not recognized by identity.
    """

    def __init__(self, layer: _NormBase, name: str, now: _Now) -> None:
        super().__init__()
        self.called = False
        self._layer, self._name, self._now = layer, name, now

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func not in _FUNCTIONAL:
            return func(*args, **(kwargs or {}))
        self.called = True
        return _functional(_arguments(func, args, kwargs or {}), self._layer, self._name, self._now)


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
_FUNCTIONAL: dict[Any, tuple[str, ...]] = {
    F.batch_norm: _PARAMETERS,
    F.instance_norm: _PARAMETERS,
    torch.batch_norm: _PARAMETERS_OF_ATEN,
    torch.instance_norm: _PARAMETERS_OF_ATEN,
}


def _arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a functional norm by name. `alone` is True for an instance norm."""
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
        **dict(zip(_FUNCTIONAL[function], args, strict=False)),
        **kwargs,
        "alone": alone,
    }
    return {**arguments, "training": arguments.get("use_input_stats", arguments["training"])}


def _functional(given: Mapping[str, Any], layer: _NormBase, name: str, now: _Now) -> Tensor:
    """Run a functional norm on a layer's statistics by the options of the pass."""
    statistics, affine = (
        (given["running_mean"], given["running_var"]),
        (given["weight"], given["bias"]),
    )
    momentum = None if layer.momentum is None else given["momentum"]
    norm = _Norm(
        name, *statistics, *affine, momentum, given["eps"], given["alone"], given["training"]
    )
    return _normalized(_widened(given["input"]), norm, now)


def _normalized(inputs: Tensor, norm: _Norm, now: _Now) -> Tensor:
    """Run a norm whose statistics are inputs, or are measured and returned."""
    if norm.mean is not None:
        frozen = now.mode.train and not norm.live
        if frozen and norm.mean.is_meta:
            raise TrainingError(
                f"norm layer {norm.name!r} is frozen: it normalizes by stored statistics in "
                "training "
                "too, and the norm policy stores none. Use 'tracked' or 'local' (local.norm), or "
                "let it "
                "train."
            )
        if frozen or now.mode.statistics == "stored":
            arguments = (norm.weight, norm.bias, norm.mean, norm.var)
            return torch.native_batch_norm(inputs, *arguments, False, 0.0, norm.eps)[0]
        if now.mode.statistics in ("track", "measure"):
            outputs, mean, var = _measured(inputs, norm)
            _hand_back(mean, var, norm, now)
            return outputs
    return (
        _each_by_itself(inputs, norm)
        if norm.alone
        else _by_batch(inputs, norm.weight, norm.bias, norm.eps)
    )


def _hand_back(mean: Tensor, var: Tensor, norm: _Norm, now: _Now) -> None:
    """Store new running values, or the mean over the pass's calls of what a norm measured."""
    now.calls[norm.name] += 1
    tracks = now.mode.statistics == "track"
    if tracks and norm.momentum is None:
        raise TrainingError(
            f"norm layer {norm.name!r} averages its statistics cumulatively (momentum=None), which "
            "clients "
            "cannot go on with from round to round. Give it a momentum, or use the norm policy "
            "'post'."
        )
    momentum = norm.momentum if tracks else 1 / now.calls[norm.name]
    assert momentum is not None
    for kind, stored, new in (("mean", norm.mean, mean), ("var", norm.var, var)):
        key = f"{_prefix(norm.name)}running_{kind}"
        # A layer that is called twice continues from its first call.
        old = now.seen.get(key, stored if tracks else None)
        now.seen[key] = new if old is None else (1 - momentum) * old + momentum * new


def _prefix(name: str) -> str:
    return f"{name}." if name else ""


def _measured(inputs: Tensor, norm: _Norm) -> tuple[Tensor, Tensor, Tensor]:
    """Return a norm's outputs, and the mean and the unbiased variance of its inputs."""
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


def _each_by_itself(inputs: Tensor, norm: _Norm) -> Tensor:
    """Compute an instance norm, as a batch norm of one sample with the channels of all samples."""
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
    """
    if inputs.numel() == inputs.shape[1]:
        raise _too_few(inputs)
    if inputs.is_cuda and not _is_stacked(inputs):
        return F.batch_norm(inputs, None, None, weight, bias, True, 0.0, eps)  # cuDNN is faster.
    return torch.native_batch_norm(inputs, weight, bias, None, None, True, 0.0, eps)[0]


def _too_few(inputs: Tensor) -> ValueError:
    """Return the error of a batch norm with one value per channel, and say what would work."""
    return ValueError(
        f"a norm needs more than one value a channel, got an input of shape {tuple(inputs.shape)}. "
        "Give every client "
        "two samples or more (Dirichlet(min_size=2)), leave out clients with one, use a batch size "
        "above 1, or use "
        "nn.GroupNorm or nn.LayerNorm in place of batch norm"
    )


def _is_stacked(value: Tensor) -> bool:
    """Return True if a tensor is one client's view of a stack of clients under vmap."""
    while is_functorch_wrapped(value):
        if is_vmapped(value):
            return True
        value = unwrapped(value)
    return False


def _is_changed(value: Tensor) -> bool:
    """Return True if a tensor may have been changed in place since it was made.

    For a stack of clients, only the innermost tensor counts changes.
    """
    while is_functorch_wrapped(value):
        value = unwrapped(value)
    return value.is_inference() or value._version > 0  # Inference tensors have no version.


def _rescale(now: _Now, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    return _divided(outputs, now.share) if now.scales else outputs


def _divided(value: Tensor, share: float | Tensor) -> Tensor:
    return value / (share.to(value.dtype) if isinstance(share, Tensor) else share)


class SeededRandomness(TorchFunctionMode):
    """A context in which a module's random numbers are drawn from `key` instead of by torch.

    `norms` returns the outputs of functional norms. If it returns None, torch computes them.
    """

    def __init__(
        self, key: Tensor | None, norms: Callable[..., Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.replaced = False
        self._key = key
        self._norms = norms
        self._site = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._norms is not None and func in _FUNCTIONAL:
            normalized = self._norms(func, args, kwargs or {})
            if normalized is not None:
                self.replaced = True
                return normalized
        replacement = _REPLACED.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        self.replaced = self.replaced or func not in _LAYERED
        return replacement(self, *args, **(kwargs or {}))

    @property
    def silent(self) -> bool:
        """Return True if no random numbers may be drawn."""
        return self._key is None

    def site(self) -> Tensor:
        """Return a new key for the next draw."""
        if self._key is None:
            raise TrainingError(
                "a layer draws random numbers outside of training, where no key is given. "
                "Draw them only while `self.training`, as nn.Dropout does."
            )
        self._site += 1
        return noise.fold_in(self._key, self._site)


def _dropout(
    drawn: SeededRandomness,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return _dropped(drawn, input, p, training, input.shape)


def _dropout_channels(
    drawn: SeededRandomness,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return _dropped(drawn, input, p, training, input.shape[:2] + (1,) * (input.dim() - 2))


def _dropped(
    drawn: SeededRandomness,
    input: Tensor,
    p: float,
    training: bool,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0
    # The draw is the same for every precision.
    mask = noise.uniform(drawn.site(), shape, torch.float32) >= p
    return input * mask / (1 - p)


def _attention(
    drawn: SeededRandomness,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute scaled_dot_product_attention without torch's fused kernels.

    These neither work on stacks of clients nor draw from `fedquilt.noise`.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = (
        query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    )
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None:
        scores = (
            scores.masked_fill(~attn_mask, -torch.inf)
            if attn_mask.dtype == torch.bool
            else scores + attn_mask
        )
    attended = scores.softmax(-1)
    return _dropped(drawn, attended, dropout_p, dropout_p > 0, attended.shape) @ value


def _pool_layer(layer: nn.AdaptiveAvgPool2d, input: Tensor) -> Tensor:
    return _pool(None, input, layer.output_size)


def _pool(drawn: SeededRandomness | None, input: Tensor, output_size: Any) -> Tensor:
    """Pool adaptively. Pooling to one value is computed as a mean.

    torch changes the strides of its result in place, which stacks of clients do not support.
    """
    if output_size in (1, (1, 1), [1, 1]):
        return input.mean((-2, -1), keepdim=True)
    return F.adaptive_avg_pool2d(input, output_size)


# torch's own code, except that it does not pass itself to the mode as one opaque call. The
# attention and the dropout inside it therefore reach the replacements in this file.
_transparent_mha = FunctionType(
    F.multi_head_attention_forward.__code__,
    {**vars(F), "has_torch_function": lambda *_: False},
    argdefs=F.multi_head_attention_forward.__defaults__,
)
_transparent_mha.__kwdefaults__ = F.multi_head_attention_forward.__kwdefaults__


def _multi_head(drawn: SeededRandomness, *args: Any, **kwargs: Any) -> Any:
    with drawn:
        return _transparent_mha(*args, **kwargs)


def _rand(
    drawn: SeededRandomness, *size: Any, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return noise.uniform(drawn.site(), _shape(size), dtype or torch.get_default_dtype())


def _randn(
    drawn: SeededRandomness, *size: Any, dtype: torch.dtype | None = None, **_: Any
) -> Tensor:
    return noise.normal(drawn.site(), _shape(size), dtype or torch.get_default_dtype())


def _rand_like(drawn: SeededRandomness, input: Tensor, **_: Any) -> Tensor:
    return noise.uniform(drawn.site(), input.shape, input.dtype)


def _randn_like(drawn: SeededRandomness, input: Tensor, **_: Any) -> Tensor:
    return noise.normal(drawn.site(), input.shape, input.dtype)


def _bernoulli(drawn: SeededRandomness, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    drawn_uniform = noise.uniform(drawn.site(), input.shape, torch.float32)
    return (drawn_uniform < (input if p is None else p)).to(input.dtype)


def _bernoulli_in_place(
    drawn: SeededRandomness, input: Tensor, p: float | Tensor = 0.5, **_: Any
) -> Tensor:
    drawn_bits = (noise.uniform(drawn.site(), input.shape, torch.float32) < p).to(input.dtype)
    try:
        return input.copy_(drawn_bits)
    except RuntimeError:  # A shared buffer has no room for each client's noise.
        if input.is_floating_point():
            # The returned tensor is right. Code that reads the buffer instead gets nan.
            input.fill_(torch.nan)
        return drawn_bits


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _refuse(name: str, function: Any) -> Callable[..., Any]:
    """Return a replacement that refuses a random function in training."""

    def refused(drawn: SeededRandomness, *args: Any, **kwargs: Any) -> Any:
        if drawn.silent:  # Outside of training these functions draw nothing.
            return function(*args, **kwargs)
        raise TrainingError(
            f"the module calls {name}, whose random numbers would differ between engines. "
            "Use nn.Dropout, torch.rand, torch.randn or torch.bernoulli instead."
        )

    return refused


def _layered(name: str, function: Any) -> Callable[..., Any]:
    """Return a replacement for a recurrent function of torch that runs layer by layer.

    One call for all layers would draw the dropout between them by torch.
    """

    def layered(drawn: SeededRandomness, *args: Any) -> Any:
        # A packed sequence has its batch sizes as second argument, so that all others move by one.
        packed = not isinstance(args[3], bool)
        biases, count, dropout, train = args[3 + packed : 7 + packed]
        if not (train and dropout and count > 1):
            return function(*args)
        drawn.replaced = True
        if packed:
            return _refuse(f"{name} on packed sequences, with dropout between layers", function)(
                drawn, *args
            )
        value, state, weights, *_, bidirectional, batch_first = args
        states = state if isinstance(state, (tuple, list)) else [state]  # An LSTM has two.
        per_layer, final_states = len(weights) // count, []
        for layer in range(count):
            chunks = [full_state.chunk(count)[layer] for full_state in states]
            start, layer_weights = (
                chunks if len(chunks) > 1 else chunks[0],
                weights[layer * per_layer : (layer + 1) * per_layer],
            )
            value = _dropped(drawn, value, dropout, layer > 0, value.shape)
            value, *ends = function(
                value, start, layer_weights, biases, 1, 0.0, train, bidirectional, batch_first
            )
            final_states.append(ends)
        return value, *map(torch.cat, zip(*final_states, strict=True))

    return layered


# These functions set `replaced` themselves.
_LAYERED: dict[Any, Callable[..., Any]] = {
    torch.lstm: _layered("torch.lstm", torch.lstm),
    torch.gru: _layered("torch.gru", torch.gru),
    torch.rnn_tanh: _layered("torch.rnn_tanh", torch.rnn_tanh),
    torch.rnn_relu: _layered("torch.rnn_relu", torch.rnn_relu),
}
_REPLACED: dict[Any, Callable[..., Any]] = {
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.dropout1d: _dropout_channels,
    F.dropout2d: _dropout_channels,
    F.dropout3d: _dropout_channels,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head,
    F.adaptive_avg_pool2d: _pool,
    torch.rand: _rand,
    torch.randn: _randn,
    torch.rand_like: _rand_like,
    torch.randn_like: _randn_like,
    torch.bernoulli: _bernoulli,
    torch.Tensor.bernoulli: _bernoulli,
    torch.Tensor.bernoulli_: _bernoulli_in_place,
    **_LAYERED,
    **{
        function: _refuse(name, function)
        for name, function in {
            "F.alpha_dropout": F.alpha_dropout,
            "F.feature_alpha_dropout": F.feature_alpha_dropout,
            "F.rrelu": F.rrelu,
            "F.gumbel_softmax": F.gumbel_softmax,
            "F.fractional_max_pool2d": F.fractional_max_pool2d,
            "F.fractional_max_pool3d": F.fractional_max_pool3d,
            "torch.randint": torch.randint,
            "torch.randint_like": torch.randint_like,
            "torch.randperm": torch.randperm,
            "torch.multinomial": torch.multinomial,
            "torch.normal": torch.normal,
            "torch.poisson": torch.poisson,
            "Tensor.uniform_": torch.Tensor.uniform_,
            "Tensor.normal_": torch.Tensor.normal_,
            "Tensor.random_": torch.Tensor.random_,
            "Tensor.exponential_": torch.Tensor.exponential_,
            "Tensor.log_normal_": torch.Tensor.log_normal_,
            "Tensor.cauchy_": torch.Tensor.cauchy_,
            "Tensor.geometric_": torch.Tensor.geometric_,
        }.items()
    },
}
