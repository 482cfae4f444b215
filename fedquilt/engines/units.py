"""Clients that train in lockstep on tensors that stay where they are, so that a step can be recorded once and replayed.

On a GPU a client's step is hundreds of kernels of a few microseconds: launching them one by one costs more than running
them. A unit records its step as a CUDA graph and replays it, on a stream of its own, so that unequal units overlap.
A unit knows nothing of rounds: it is loaded with whoever trains next. Cohorts may change from round to round, and
nothing is recorded again as long as their sizes have been seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.devices import onto
from fedquilt.errors import FedquiltError
from fedquilt.family.laid import LayoutError, agrees
from fedquilt.round.cut import prefix
from fedquilt.round.local import Batch, Learner, Phase, State, augment, gradient, laid_gradient, move, train_pass
from fedquilt.terms import Arch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedquilt.engines.vectorised import Stack, Vectorised

# So many streams are fed at once. CUDA starts with 8, which makes unequal units wait for each other: 4.8 ms a step
# instead of 3.6 for ten clients of five sizes on an H200. It is read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# One net on a stream of its own, nets side by side in the channels, or stacked by vmap.
Layout = Literal["alone", "laid", "stack"]
_CHUNK = 64  # steps whose batches are on the device at once


class CaptureError(FedquiltError):
    """A step that cannot be recorded."""


@dataclass(frozen=True)
class Shape:
    """What units have in common that can stand in for each other."""

    arch: Arch
    learner: Learner
    count: int
    layout: Layout

    @staticmethod
    def of(arch: Arch, learner: Learner, count: int, layout: Layout) -> Shape:
        return Shape(arch, replace(learner, lr=0.0), count, layout)  # rates change over rounds: they are loaded


class Unit:
    """`count` clients of one member: `load`, `play` step by step, `unload`."""

    def __init__(self, engine: Vectorised, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        world, family, learner = engine.world, engine.world.family, shape.learner
        device, count = world.device, shape.count
        self._masks = [learner.masks(family, shape.arch, phase, device) for phase in learner.phases]
        _check_capturable(learner, self._masks)
        self._net = family.laid(shape.arch, count) if shape.layout == "laid" else None
        fresh = family.cutter.gather(engine.initial, prefix(shape.arch), learner.names(family))
        self.state = {name: self._place(value) for name, value in fresh.items()}
        self.slots = {
            slot: {name: torch.zeros_like(self.state[name]) for name in family.trainable}
            for slot in learner.local.optimiser.slots
        }
        self.received = {name: value.clone() for name, value in self.state.items()}
        self.rows = torch.zeros(_CHUNK, count, learner.local.batch_size, dtype=torch.int64, device=device)
        self.active = torch.ones(_CHUNK, count, dtype=torch.bool, device=device)
        self.losses = torch.zeros(_CHUNK, count, dtype=world.dtype, device=device)
        self.held = torch.ones(count, family.num_classes, dtype=torch.bool, device=device)
        self.keys = torch.zeros(count, dtype=torch.int64, device=device)
        self.noise = torch.zeros(_CHUNK, count, dtype=torch.int64, device=device)  # the keys of every step
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step within the chunk
        self.age = torch.zeros((), dtype=torch.float32, device=device)  # optimiser steps taken
        on_gpu = device.type == "cuda"
        # The fused kernels read a rate in float32 on a GPU, too coarse for float64.
        fine = world.dtype == torch.float64 or not on_gpu
        self._fused = not (on_gpu and fine) or learner.local.optimiser.ages
        self.lr = torch.zeros((), dtype=torch.float32 if on_gpu and self._fused else torch.float64, device=device)
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.ragged = False  # whether some client has no full batch in some step of the chunk
        self._graphs: dict[bool, torch.cuda.CUDAGraph] = {}
        if self._net is not None:
            self._compare()

    def _place(self, value: Tensor) -> Tensor:
        """A weight of every client; alone, convolutions have their channels last, as the fast kernels want them."""
        placed = value.expand(self.shape.count, *value.shape).clone(memory_format=torch.contiguous_format)
        if self._channels_last and value.dim() == 4:
            placed = placed[0].contiguous(memory_format=torch.channels_last).unsqueeze(0)
        return placed

    @property
    def _channels_last(self) -> bool:
        return self.shape.layout == "alone" and self.engine.world.device.type == "cuda"

    def _compare(self) -> None:
        """Side by side and stacked must give the same logits: a forward may treat channels in ways no layer shows."""
        assert self._net is not None
        family, mode = self.engine.world.family, train_pass(self.shape.learner.local)
        if mode.statistics != "batch":
            raise LayoutError("its norms keep statistics")
        some = torch.arange(self.rows[0].numel(), device=self.rows.device) % len(self.engine.data.targets)
        inputs, net = self.engine.data.samples(some.view(self.rows.shape[1:])), family.net(self.shape.arch)
        shaken = {
            name: value + 0.1 * noise.uniform(noise.fold_in(self.keys[0], place), value.shape, value.dtype)
            for place, (name, value) in enumerate(self.state.items())
        }  # no two clients alike
        with torch.no_grad(), exact():
            laid = self._net(shaken, inputs, family.layout.class_dim, mode.scaler)
            stacked = vmap(lambda weights, x: net(weights, x, mode, self.keys[0])[0])(shaken, inputs)
        if not agrees(laid, stacked):
            raise LayoutError("side by side its nets give other logits than one by one")

    # --- a round ---------------------------------------------------------------------------------------------------

    def load(self, stack: Stack) -> None:
        """Take over what the clients of a stack start from; from here on its tensors are the unit's own."""
        self._stack = stack
        rewrite(self.state, stack.state)
        rewrite(self.received, self.state)  # laid out alike, which is one launch
        for slot, values in self.slots.items():
            if stack.slots is None:
                torch._foreach_zero_(list(values.values()))
            else:
                rewrite(values, stack.slots[slot])
        self.held.copy_(stack.held)
        self.keys.copy_(stack.keys)
        self.age.fill_(stack.ages[0])
        self.lr.fill_(stack.learner.lr)
        stack.state, stack.slots, stack.received = self.state, self.slots, self.received
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def play(self, step: int) -> None:
        """Everyone's batch of one step: those of full size as recorded, tails as they come."""
        if step >= len(self._stack.losses):
            return
        with self._on_stream():
            if step % _CHUNK == 0:
                self._fill(step)
            size = self.shape.learner.local.batch_size
            groups = self._stack.groups(step)
            whole = next((group for group in groups if self._stack.sizes[group[0]][step] == size), [])
            everyone = len(whole) == self.shape.count
            if whole and (everyone or self._masking):
                self._replay(masked=not everyone)
            else:
                whole = []
                self.at += 1
                self.age += len(self.shape.learner.phases)
            for clients in groups:
                if clients is not whole:
                    self.engine.step(self._stack, step, clients)
                    self._take_back()

    @property
    def _masking(self) -> bool:
        """Whether clients without a batch take part and are put back: a launch less, but no work less."""
        return self.stream is not None or bool(self.engine.record)

    def _fill(self, step: int) -> None:
        """Put the batches of the next steps onto the device."""
        stack, size = self._stack, self.shape.learner.local.batch_size
        self._report(step)
        steps = range(step, min(step + _CHUNK, len(stack.losses)))
        rows = torch.zeros(_CHUNK, self.shape.count, size, dtype=torch.int64)
        active = torch.zeros(_CHUNK, self.shape.count, dtype=torch.bool)
        for client, own in enumerate(stack.batches):
            full = [place for place, length in enumerate(stack.sizes[client][step : steps.stop]) if length == size]
            if full:
                rows[full, client] = torch.stack([own[step + place] for place in full])
                active[full, client] = True
        if not self._masking:  # where not everyone has a full batch, steps are taken as they come
            active &= active.all(1, keepdim=True)
        device = self.at.device
        self.rows.copy_(onto(device, rows))
        self.active.copy_(onto(device, active))
        self.ragged = not bool(active[: len(steps)].all())
        self.noise.copy_(noise.fold_in(self.keys, torch.arange(step, step + _CHUNK, device=device)[:, None]))
        self.at.zero_()

    def _report(self, step: int) -> None:
        """Hand the losses of the last chunk to the stack, which has those of tails already."""
        if step:
            first = (step - 1) // _CHUNK * _CHUNK
            told, own = self._stack.losses[first:step], self.losses[: step - first]
            told.copy_(torch.where(self.active[: step - first], own, told) if self.ragged else own)

    def unload(self) -> None:
        """The stack has what its clients learnt, in tensors that are the unit's until the next load."""
        with self._on_stream():
            self._report(len(self._stack.losses))
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _take_back(self) -> None:
        """After a step that was not recorded: its results into the tensors that stay."""
        rewrite(self.state, self._stack.state)
        for slot, values in (self._stack.slots or {}).items():
            rewrite(self.slots[slot], values)
        self._stack.state, self._stack.slots = self.state, self.slots

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    # --- a step ----------------------------------------------------------------------------------------------------

    def record(self, masked: bool = False) -> None:
        """Capture a step. Its warm-up trains on whatever the tensors hold: load afterwards."""
        if self.stream is None or masked in self._graphs:
            return
        self._graphs[masked] = recorded(lambda: self._step(masked), self.stream)

    def _replay(self, masked: bool) -> None:
        if self.stream is None:
            self._step(masked)
        else:
            self._graphs[masked].replay()

    def replay_alone(self) -> None:
        """One step of whatever the tensors hold."""
        with self._on_stream():
            self._replay(masked=False)

    def _step(self, masked: bool) -> None:
        learner = self.shape.learner
        rows = self.rows.index_select(0, self.at)[0]
        inputs, targets = self.engine.data.samples(rows), self.engine.data.targets[rows]
        keys = self.noise.index_select(0, self.at)[0]
        old = masked or len(learner.phases) > 1
        before = {name: value.clone() for name, value in self.state.items()} if old else self.state
        kept = (
            {slot: {n: v.clone() for n, v in values.items()} for slot, values in self.slots.items()} if masked else {}
        )
        losses = self.losses[0]
        for phase, masks in zip(learner.phases, self._masks, strict=True):
            self.age += 1
            grads, (losses, seen) = self._gradients(phase, before, inputs, targets, keys)
            self._move(grads, masks)
            rewrite(self.state, seen)
        if masked:  # who has no batch in this step stays as it was
            who = self.active.index_select(0, self.at)[0]
            _restore(self.state, before, who)
            for slot, values in self.slots.items():
                _restore(values, kept[slot], who)
        self.losses.index_copy_(0, self.at, losses.to(self.losses.dtype).unsqueeze(0))
        self.at += 1

    def _gradients(
        self, phase: Phase, before: State, inputs: Tensor, targets: Tensor, keys: Tensor
    ) -> tuple[State, tuple[Tensor, State]]:
        learner, family, arch = self.shape.learner, self.engine.world.family, self.shape.arch
        if self.shape.layout == "alone":
            state, received, before = ({n: v[0] for n, v in s.items()} for s in (self.state, self.received, before))
            seen = augment(inputs[0], learner.local, keys[0])
            if self._channels_last and seen.dim() == 4:
                seen = seen.contiguous(memory_format=torch.channels_last)
            batch = Batch(seen, targets[0], self.held[0], keys[0])
            grads, (loss, stats) = gradient(learner, family, arch, phase, state, received, before, batch)
            lead = ({n: v.unsqueeze(0) for n, v in found.items()} for found in (grads, stats))
            return next(lead), (loss.unsqueeze(0), next(lead))
        if self._net is not None:
            seen = vmap(lambda x, key: augment(x, learner.local, key))(inputs, keys)
            batch = Batch(seen, targets, self.held, keys)
            return laid_gradient(learner, family, arch, phase, self._net, self.state, self.received, before, batch)
        stacked = self.engine.gradients(learner, arch, phase)
        found: tuple[State, tuple[Tensor, State]] = stacked(
            self.state, self.received, before, inputs, targets, self.held, keys
        )
        return found

    def _move(self, grads: State, masks: Mapping[str, Tensor | bool]) -> None:
        """In place where everything moves, else as the truth does it."""
        learner, names = self.shape.learner, list(grads)
        if self._fused and all(mask is True for mask in masks.values()):
            weights = [self.state[name] for name in names]
            slots = {slot: [values[name] for name in names] for slot, values in self.slots.items()}
            alike = [_laid_out_as(grads[name], self.state[name]) for name in names]
            learner.local.optimiser.update_(weights, slots, alike, self.lr, self.age)
            return
        state, moved = move(learner, self.state, self.slots, grads, masks, 0, self.lr)
        rewrite(self.state, state)
        for slot, values in moved.items():
            rewrite(self.slots[slot], values)


def _check_capturable(learner: Learner, masks: list[Mapping[str, Tensor | bool]]) -> None:
    """Refuse learners whose steps differ from each other in more than their numbers."""
    if type(learner).phases_at is not Learner.phases_at:
        raise CaptureError("its phases change from step to step")
    partly = any(mask is not True for own in masks for mask in own.values())
    if learner.local.optimiser.ages and partly:
        raise CaptureError(f"{type(learner.local.optimiser).__name__} counts steps, and some positions do not move")


def recorded(action: Callable[[], None], stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """An action on tensors that stay where they are, as a graph. It is carried out a few times on the way."""
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(3):  # kernels are chosen and work space is taken before the recording
                action()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            action()
    except RuntimeError as error:
        raise CaptureError(str(error).splitlines()[0]) from error
    torch.cuda.synchronize()
    return graph


@contextmanager
def exact() -> Iterator[None]:
    """Full products, whatever precision is set."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def rewrite(own: State, new: Mapping[str, Tensor]) -> None:
    """Put new values into tensors that stay where they are."""
    names = [name for name in new if new[name] is not own[name]]
    alike = [name for name in names if new[name].stride() == own[name].stride()]
    if alike:  # those that are laid out alike are copied by one launch, but only if all of them are
        torch._foreach_copy_([own[name] for name in alike], [new[name] for name in alike])
    for name in names:
        if new[name].stride() != own[name].stride():
            own[name].copy_(new[name])


def _restore(own: State, before: State, who: Tensor) -> None:
    """Put back what those had that are not among `who`."""
    for name, value in own.items():
        value.copy_(torch.where(who.view([-1] + [1] * (value.dim() - 1)), value, before[name]))


def _laid_out_as(grad: Tensor, weight: Tensor) -> Tensor:
    """A fused update walks through memory: gradient and weight must lie there alike."""
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)


def replay_time(units: list[Unit], times: int = 10) -> float:
    """Seconds a recorded step of all units takes when they overlap."""
    taken = 0.0
    for _ in ("warm up", "measure"):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            for unit in units:
                unit.replay_alone()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - began) / times
        for unit in units:
            unit.at.zero_()
    return taken
