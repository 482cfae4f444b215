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

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from fedquilt.family.dual import adjustables
from fedquilt.family.nets import Nets
from fedquilt.family.normalization import (
    PassState,
    in_float32,
    norm_arguments,
    run_functional_norm,
    run_norm_layer,
    run_own_forward,
    weight_prefix,
)
from fedquilt.family.randomness import SeededRandomness, pool_layer
from fedquilt.family.scaled import Scaled
from fedquilt.hardware.torch_internals import (
    NormBase,
    in_place_version,
    is_functorch_wrapped,
    outside_functorch,
    unwrapped,
)

Statistics = Literal["batch", "stored", "track", "measure"]


@dataclass(frozen=True)
class Pass:
    """Options of a forward pass: training mode, norm statistics and rescaling."""

    train: bool = False  # True: training mode, in which dropout is active
    # "stored": normalize by stored statistics. All others normalize by the batch. "track" also
    # returns new running values, and "measure" returns the statistics of the batch.
    statistics: Statistics = "batch"
    # HeteroFL's scaler: in training, divide the outputs of cut hidden layers by the client's share
    scaler: bool = False
    robustness: float = 0.0  # Robustness of adjustable norms: 0 is the clean net, 1 the noised one


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
        self._state = PassState(Pass())
        self._adjustables = tuple(adjustables(module))
        # Values of `mode.train` with which no function needs to be replaced
        self._plain: set[bool] = set()
        # Values of `mode.train` with which the module does not change its inputs
        self._reading: set[bool] = set()
        self._norms: dict[str, NormBase] = {}  # Layers whose statistics are inputs and outputs
        self._counters: list[str] = []  # Batch counters of norms that keep their own forward
        for name, layer in module.named_modules():
            if isinstance(layer, NormBase):
                self._norms[name] = layer
            if isinstance(layer, NormBase) and not is_stock(layer):
                layer.forward = partial(run_own_forward, layer.forward, layer, name, self._state)
                if layer.num_batches_tracked is not None:
                    self._counters.append(f"{weight_prefix(name)}num_batches_tracked")
                continue
            if isinstance(layer, (NormBase, nn.LayerNorm, nn.GroupNorm)):
                layer.register_forward_pre_hook(in_float32, with_kwargs=True)
            if isinstance(layer, NormBase):
                layer.forward = partial(run_norm_layer, layer, name, self._state)
            elif isinstance(layer, nn.AdaptiveAvgPool2d) and is_stock(layer):
                layer.forward = partial(pool_layer, layer)  # type: ignore[method-assign]
            if name in scaled.layers:
                layer.register_forward_hook(partial(_rescale, self._state))

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
        self._state.mode, self._state.statistics, self._state.share = mode, {}, share
        self._state.calls = Counter()
        values = {**self._constants_for(weights), **weights, **self._fresh_counters()}
        if self._leads is not None:
            values = {name: value for name, value in values.items() if name.startswith(self._leads)}
        if self._state.scales:
            values |= {name: _divided(values[name], share) for name in self._scaled.weights}
        # An in-place operation would change the caller's inputs, and torch.func refuses it. A copy
        # may change.
        copied = mode.train not in self._reading
        inputs = inputs.clone() if copied else inputs
        if mode.train in self._plain:
            outputs = functional_call(self.module, values, (inputs,), strict=False)
        else:
            with SeededRandomness(key, self._functional_norm) as rng:
                outputs = functional_call(self.module, values, (inputs,), strict=False)
            # Watching every operation costs a millisecond. A traced net always runs the same
            # operations, so that one pass shows if any is replaced.
            if not rng.replaced:
                self._plain.add(mode.train)
        if copied and not is_changed(inputs):
            self._reading.add(mode.train)
        statistics, self._state.statistics = self._state.statistics, {}
        self._state.share = 1.0  # A net must not keep a caller's tensors alive.
        if condition is not None:
            for layer in self._adjustables:
                layer.robustness = mode.robustness
        return outputs, statistics

    def _fresh_counters(self) -> dict[str, Tensor]:
        """Return new batch counters of 0 by name, for norms that keep their own forward.

        torch.func refuses to change the module's in place.
        """
        return {name: torch.zeros((), dtype=torch.long) for name in self._counters}

    def _functional_norm(
        self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Tensor | None:
        """Run a functional norm by the options of the pass, if it got a layer's statistics.

        None is returned if its running mean is no tensor of a norm layer.

        Args:
            function: One of `FUNCTIONAL_NORMS`, which the forward calls.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        arguments = norm_arguments(function, args, kwargs)
        for name, layer in self._norms.items():
            if (
                arguments["running_mean"] is not None
                and arguments["running_mean"] is layer.running_mean
            ):
                return run_functional_norm(arguments, layer, name, self._state)
        return None

    def _constants_for(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the net's constants, by name, on the device and in the dtype of the weights.

        The first weight of real numbers counts. Integers keep their dtype. Results are cached.
        """
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


def is_changed(value: Tensor) -> bool:
    """Return True if a tensor may have been changed in place since it was made.

    For a stack of clients, only the innermost tensor counts changes.
    """
    while is_functorch_wrapped(value):
        value = unwrapped(value)
    return value.is_inference() or in_place_version(value) > 0  # Inference tensors have no version.


def _rescale(state: PassState, layer: nn.Module, inputs: Any, outputs: Tensor) -> Tensor:
    return _divided(outputs, state.share) if state.scales else outputs


def _divided(value: Tensor, share: float | Tensor) -> Tensor:
    return value / (share.to(value.dtype) if isinstance(share, Tensor) else share)
