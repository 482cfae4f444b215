"""Run a copy of a module on tensors without data, under a recorder."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedquilt.errors import TraceError
from fedquilt.family.build import blueprint
from fedquilt.family.dual import adjustables
from fedquilt.family.tracing.atoms import Dim
from fedquilt.family.tracing.recorder import Recorder, call_module, line_of, tensors_in
from fedquilt.family.tracing.run import Observer, RecordedRun, RunError, Value
from fedquilt.family.variants import choose
from fedquilt.hardware.torch_internals import (
    FAKE_TENSOR_LOGGER,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    is_onednn_enabled,
    set_onednn_enabled,
    tree_map,
)
from fedquilt.terms import WHOLE


@contextmanager
def _plain_backends(grad: bool) -> Iterator[None]:
    """Switch off fused kernels within the block, because they hide the products that are traced.

    The log of failed fake operations is silenced too. All settings are restored afterwards.

    Args:
        grad: True: autograd records the operations. False: they run in inference mode.
    """
    had_fastpath, had_onednn = (
        torch.backends.mha.get_fastpath_enabled(),
        is_onednn_enabled(),
    )
    log = logging.getLogger(FAKE_TENSOR_LOGGER)
    # A member that does not run is a result, and nothing to log.
    was_disabled, log.disabled = (log.disabled, True)
    torch.backends.mha.set_fastpath_enabled(False)
    set_onednn_enabled(False)
    try:
        # In inference mode torch does not decompose linear, matmul and layer_norm, whatever the
        # strides are.
        with (
            sdpa_kernel(SDPBackend.MATH),
            torch.inference_mode(not grad),
            torch.set_grad_enabled(grad),
        ):
            yield
    finally:
        log.disabled = was_disabled
        torch.backends.mha.set_fastpath_enabled(had_fastpath)
        set_onednn_enabled(had_onednn)


@contextmanager
def _same_seeds() -> Iterator[None]:
    """Seed the generators of Python, NumPy and torch identically for every traced run.

    Some modules draw the layers that they skip in training. The user's generators are restored
    afterwards.
    """
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        random.seed(0)
        np.random.seed(0)
        torch.default_generator.manual_seed(0)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)


def rehearse(module: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Run a copy of a module on the example itself, in evaluation mode on the CPU.

    Tables that forward caches outside of the module then have real values, which a run on tensors
    without data would not give. The output is dropped.

    The copy shares the parameters. Modules without data are not run. If the copy fails, nothing is
    raised, because tracing reports what is wrong.
    """
    tensors = [*module.parameters(), *module.buffers(), *tensors_in(inputs)]
    if any(tensor.is_meta for tensor in tensors):
        return

    def real(_: str, weight: Tensor) -> Tensor:
        if isinstance(weight, nn.Parameter):
            return nn.Parameter(weight.detach().cpu(), weight.requires_grad)
        return weight.detach().cpu().clone()

    copied = tree_map(
        lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, inputs
    )
    with _same_seeds(), torch.inference_mode(False), torch.no_grad(), suppress(Exception):
        blueprint(module, real).eval()(*copied)


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that is recorded.

    Args:
        is_recorded: Returns True for operations that are recorded as they are. Others are
            decomposed.
        weights: Dimensions of the weights, by name. All other weights have plain sizes.
        observer: Context that observes the run. None: there is none.
        constants: Buffers whose values Python may read, by name. All members must have the same.
        train: True: the module runs in training mode.
        grad: True: autograd saves what a backward pass would need. Single random numbers are then
            not known, so that no layer is skipped by chance.
        variant: Variant that runs. None: the one that was chosen last.
    """

    is_recorded: Callable[[OpOverload], bool]
    weights: Mapping[str, tuple[Dim, ...]] = field(default_factory=dict)
    observer: Observer | None = None
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    train: bool = False
    grad: bool = False
    variant: str | None = None


def record(module: nn.Module, inputs: tuple[Any, ...], options: RunOptions) -> RecordedRun:
    """Run a copy of a module on tensors without data and record its calls.

    Args:
        module: The module, which does not change.
        inputs: Example inputs, of which shapes and types are used.
        options: Mode of the run, and what is known about weights and operations.

    Raises:
        RunError: The module fails.
        TraceError: The module keeps a result where it outlives the run.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    recorder = Recorder(options.is_recorded, options.train and not options.grad)
    try:
        run = _run(recorder, mode, module, inputs, options)
    except RunError as failure:
        _forget_frames(failure)
        recorder.close(mode)
        raise
    outliving = recorder.close(mode)
    if outliving:
        raise TraceError(
            f"{type(module).__name__} keeps what it computes where it outlives the module: the "
            f"result of {outliving[0]}. A later call would find a tensor without data there. Keep "
            "it in an attribute of the module, or return it."
        )
    return run


def _forget_frames(error: BaseException | None) -> None:
    """Drop the frames of an exception and its causes, whose variables hold tensors of the run."""
    visited: list[BaseException] = []  # An error may be its own cause (`raise error from error`).
    while error is not None and error not in visited:
        visited.append(error)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _run(
    recorder: Recorder,
    mode: FakeTensorMode,
    module: nn.Module,
    inputs: tuple[Any, ...],
    options: RunOptions,
) -> RecordedRun:
    """Run a copy of a module under a recorder, and return the record.

    Args:
        recorder: Records the calls of the run.
        mode: Context in which the tensors without data are made.
        module: The module, which does not change.
        inputs: Example inputs, of which shapes and types are used.
        options: Mode of the run, and what is known about weights and operations.

    Raises:
        RunError: The module fails. The error has the calls before it.
    """

    def fake(tensor: Tensor) -> Tensor:
        meta = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        return FakeTensor(mode, meta, torch.device("cpu"))

    def make(name: str, weight: Tensor) -> Tensor:
        tensor = fake(weight).requires_grad_(options.grad and weight.requires_grad)
        recorder.name(tensor, Value(tuple(tensor.shape), options.weights.get(name, ()), name))
        if name in options.constants:
            recorder.constants[id(tensor)] = options.constants[name].detach().cpu().clone()
        return tensor

    module = blueprint(module, make)
    if options.variant is not None:
        choose(module, options.variant)
    for layer in adjustables(module):
        layer.robustness = 0.5  # Both norms of a dual norm run, so that both are recorded.

    def enter(path: str) -> Callable[..., None]:
        return lambda _, args, kwargs: recorder.enter(path, (args, kwargs))

    for path, layer in module.named_modules():
        layer.register_forward_pre_hook(enter(path), prepend=True, with_kwargs=True)
        # Hooks that always run see no output when the layer raised.
        layer.register_forward_hook(lambda _, __, output: recorder.leave(output), always_call=True)
    module.train(options.train)
    fake_inputs = tree_map(lambda leaf: fake(leaf) if isinstance(leaf, Tensor) else leaf, inputs)
    with ExitStack() as stack:
        stack.enter_context(_plain_backends(options.grad))
        stack.enter_context(_same_seeds())
        stack.enter_context(mode)
        stack.enter_context(recorder)
        if options.observer is not None:
            options.observer.attach(module, recorder.value)
            stack.enter_context(options.observer)
        try:
            output = call_module(module, fake_inputs)
        except Exception as error:
            raise RunError(recorder.calls, recorder.failed or "", line_of(error)) from error
    return RecordedRun(
        recorder.calls,
        recorder.read_values(output),
        recorder.reads,
        options.train,
        options.variant or WHOLE,
        recorder.visits,
    )
