"""Random functions of torch, replaced by functions that draw from `fedquilt.noise`.

torch's generators depend on what ran before. Numbers from `fedquilt.noise` depend only on a key and
on the order of the draws within a pass, so that every engine draws the same for a client
(`tests/engines/test_parity.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fedquilt import noise
from fedquilt.errors import TrainingError
from fedquilt.family.normalization import FUNCTIONAL_NORMS


class SeededRandomness(TorchFunctionMode):
    """A context in which a module's random numbers are drawn from a key instead of by torch.

    Args:
        key: Random key. None: drawing is an error.
        norms: Returns the outputs of a functional norm, from the function, its arguments and its
            keyword arguments. If it returns None, torch computes them. None has no effect.
    """

    def __init__(
        self, key: Tensor | None, norms: Callable[..., Tensor | None] | None = None
    ) -> None:
        super().__init__()
        self.replaced = False  # True once a function was replaced
        self._key = key
        self._norms = norms
        self._num_draws = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._norms is not None and func in FUNCTIONAL_NORMS:
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
        """Return True if the context has no key, so that no random numbers may be drawn."""
        return self._key is None

    def next_key(self) -> Tensor:
        """Return the key of the next draw. It depends on the context's key and on earlier draws.

        Raises:
            TrainingError: The context has no key.
        """
        if self._key is None:
            raise TrainingError(
                "a layer draws random numbers outside of training, where no key is given. "
                "Draw them only while `self.training`, as nn.Dropout does."
            )
        self._num_draws += 1
        return noise.fold_in(self._key, self._num_draws)


def _dropout(
    rng: SeededRandomness,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return _drop(rng, input, p, training, input.shape)


def _dropout_channels(
    rng: SeededRandomness,
    input: Tensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> Tensor:
    return _drop(rng, input, p, training, input.shape[:2] + (1,) * (input.dim() - 2))


def _drop(
    rng: SeededRandomness,
    input: Tensor,
    p: float,
    training: bool,
    shape: torch.Size | tuple[int, ...],
) -> Tensor:
    """Set entries to 0 with probability `p`, and divide all others by 1 - p.

    Args:
        rng: Context that draws the random numbers.
        input: The input, which does not change.
        p: Probability. 0 has no effect and draws nothing.
        training: False: the input is returned as it is, and nothing is drawn.
        shape: Shape of the mask, which broadcasts to the input's. Entries that share a number of
            the mask are dropped together.
    """
    if not training or p == 0:
        return input
    if p == 1:
        return input * 0
    # The draw is the same for every precision.
    mask = noise.uniform(rng.next_key(), shape, torch.float32) >= p
    return input * mask / (1 - p)


def _attention(  # noqa: PLR0913  The signature is torch's.
    rng: SeededRandomness,
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
    if scale is None:
        scale = 1 / math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-2, -1) * scale  # (…, head, query, key)
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    attended = scores.softmax(-1)
    return _drop(rng, attended, dropout_p, dropout_p > 0, attended.shape) @ value


def pool_layer(layer: nn.AdaptiveAvgPool2d, input: Tensor) -> Tensor:
    """Run a pooling layer on `input` as `_pool` does, which takes a mean to pool to one value."""
    return _pool(None, input, layer.output_size)


def _pool(rng: SeededRandomness | None, input: Tensor, output_size: Any) -> Tensor:
    """Run `F.adaptive_avg_pool2d`, but compute pooling to one value as a mean.

    For one value torch changes the strides of its result in place, which stacks of clients do not
    support. `rng` has no effect. It is there because all replacements of functions get it.
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


def _multi_head(rng: SeededRandomness, *args: Any, **kwargs: Any) -> Any:
    with rng:
        return _transparent_mha(*args, **kwargs)


def _rand(rng: SeededRandomness, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return noise.uniform(rng.next_key(), _shape(size), dtype or torch.get_default_dtype())


def _randn(rng: SeededRandomness, *size: Any, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return noise.normal(rng.next_key(), _shape(size), dtype or torch.get_default_dtype())


def _rand_like(rng: SeededRandomness, input: Tensor, **_: Any) -> Tensor:
    return noise.uniform(rng.next_key(), input.shape, input.dtype)


def _randn_like(rng: SeededRandomness, input: Tensor, **_: Any) -> Tensor:
    return noise.normal(rng.next_key(), input.shape, input.dtype)


def _bernoulli(rng: SeededRandomness, input: Tensor, p: float | None = None, **_: Any) -> Tensor:
    uniform = noise.uniform(rng.next_key(), input.shape, torch.float32)
    return (uniform < (input if p is None else p)).to(input.dtype)


def _bernoulli_in_place(
    rng: SeededRandomness, input: Tensor, p: float | Tensor = 0.5, **_: Any
) -> Tensor:
    bits = (noise.uniform(rng.next_key(), input.shape, torch.float32) < p).to(input.dtype)
    try:
        return input.copy_(bits)
    except RuntimeError:  # A shared buffer has no room for each client's noise.
        if input.is_floating_point():
            # The returned tensor is right. Code that reads the buffer instead gets nan.
            input.fill_(torch.nan)
        return bits


def _shape(size: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple(size[0]) if len(size) == 1 and not isinstance(size[0], int) else size


def _refuse(name: str, function: Any) -> Callable[..., Any]:
    """Return a replacement for a random function, which raises a TrainingError in training.

    Outside of training, where the context has no key, the replacement calls the function.

    Args:
        name: Name of the function, for the message.
        function: The function.
    """

    def refused(rng: SeededRandomness, *args: Any, **kwargs: Any) -> Any:
        if rng.silent:  # Outside of training these functions draw nothing.
            return function(*args, **kwargs)
        raise TrainingError(
            f"the module calls {name}, whose random numbers would differ between engines. "
            "Use nn.Dropout, torch.rand, torch.randn or torch.bernoulli instead."
        )

    return refused


def _layered(name: str, function: Any) -> Callable[..., Any]:
    """Return a replacement for a recurrent function of torch that runs layer by layer.

    One call for all layers would draw the dropout between them by torch. Without dropout the
    replacement calls the function once. With dropout, it raises a TrainingError for packed
    sequences.

    Args:
        name: Name of the function, for messages.
        function: The function, such as torch.lstm.
    """

    def layered(rng: SeededRandomness, *args: Any) -> Any:
        # A packed sequence has its batch sizes as second argument, so that all others move by one.
        packed = not isinstance(args[3], bool)
        biases, count, dropout, train = args[3 + packed : 7 + packed]
        if not (train and dropout and count > 1):
            return function(*args)
        rng.replaced = True
        if packed:
            return _refuse(f"{name} on packed sequences, with dropout between layers", function)(
                rng, *args
            )
        value, state, weights, *_, bidirectional, batch_first = args
        states = state if isinstance(state, (tuple, list)) else [state]  # An LSTM has two.
        per_layer = len(weights) // count
        final_states = []
        for layer in range(count):
            chunks = [full_state.chunk(count)[layer] for full_state in states]
            start = chunks if len(chunks) > 1 else chunks[0]
            layer_weights = weights[layer * per_layer : (layer + 1) * per_layer]
            value = _drop(rng, value, dropout, layer > 0, value.shape)
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
