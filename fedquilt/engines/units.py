"""Clients that train in lockstep on tensors that stay where they are, so that a step can be recorded once and replayed.

On a GPU a client's step is hundreds of kernels of a few microseconds: launching them one by one costs more than running
them. A unit records its step as a CUDA graph and replays it, on a stream of its own, so that unequal units overlap.
A unit knows nothing of rounds: it is loaded with whoever trains next. Cohorts may change from round to round, and
nothing is recorded again as long as their sizes have been seen. Where the phases of a step are drawn, its parts are
recorded instead of the whole, each when it is first needed: nets, not combinations of them.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.devices import channels_last, onto
from fedquilt.engines.lines import Inner, Lines
from fedquilt.errors import FedquiltError, first_line
from fedquilt.family.laid import LayoutError, Undrawn, agrees
from fedquilt.family.member import Member
from fedquilt.faults import is_out_of_memory
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Objective, apart
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.regions import Everywhere
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, laid_gradient, train_pass
from fedquilt.terms import Arch, Weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedquilt.engines.vectorised import Stack, Vectorised

# So many streams are fed at once. CUDA starts with 8, which makes unequal units wait for each other: 4.8 ms a step
# instead of 3.6 for ten clients of five sizes on an H200. It is read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# One net on a stream of its own, nets side by side in the channels, or stacked by vmap.
Layout = Literal["alone", "laid", "stack"]
_WARM = 3  # times an action is carried out before it is recorded
_CHUNK = 64  # steps whose batches are on the device at once
_SCARCE = 4  # of a card's memory less than such a part is free
_LINE = ""  # the name of all weights of a unit that are moved as one
_RARE = 32  # times a tail of one size is taken as it comes before it is recorded


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
        return Shape(arch, learner.timeless, count, layout)  # what changes over rounds is loaded


class Unit:
    """`count` clients of one member: `load`, `play` step by step, `unload`."""

    def __init__(self, engine: Vectorised, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        world, family, learner = engine.world, engine.world.family, shape.learner
        self.member = member = family.member(shape.arch)
        device, count = engine.device, shape.count
        _check_capturable(learner)
        self._net = member.laid(count) if shape.layout == "laid" else None
        fresh = family.cutter.gather(engine.template, member.prefix, learner.names(member))
        self.state = {name: self._place(value) for name, value in fresh.items()}
        self.slots = {
            slot: {name: torch.zeros_like(self.state[name]) for name in member.trainable}
            for slot in learner.local.optimiser.slots
        }
        # What the optimiser moves: every weight, or, where phases move parts, the lines that the weights are views of.
        self._moving = {name: self.state[name] for name in member.trainable}, self.slots
        self._lines = Lines(
            {name: fresh[name].shape for name in member.trainable}, self._channels_last
        )
        if learner.drawn or any(
            not isinstance(phase.moves, Everywhere) for phase in learner.phases
        ):
            self._line_up()
        slotted = learner.slotted(member)
        # Slots of the method, which objectives read.
        own_slots = {
            slot: {n: torch.zeros_like(self.state[n]) for n in slotted}
            for slot in learner.state.slots
        }
        self.received = Received(
            {name: value.clone() for name, value in self.state.items()}, own_slots
        )
        most = 2 * learner.local.batch_size  # a short tail may be joined to the batch before
        self.rows = torch.zeros(_CHUNK, count, most, dtype=torch.int64, device=device)
        self.active = torch.ones(_CHUNK, count, dtype=torch.bool, device=device)
        self.losses = torch.zeros(_CHUNK, count, dtype=world.dtype, device=device)
        self.held = torch.ones(count, family.num_outputs, dtype=torch.bool, device=device)
        self.keys = torch.zeros(count, dtype=torch.int64, device=device)
        self.shares = torch.ones(count, dtype=world.dtype, device=device)
        # Of every client, the teacher's rows for all public samples.
        self.tables: Tensor | None = None
        if learner.teacher:
            self.tables = torch.zeros(
                count, *engine.table_shape(learner), dtype=world.dtype, device=device
            )
        self.noise = torch.zeros(
            _CHUNK, count, dtype=torch.int64, device=device
        )  # the keys of every step
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # the step within the chunk
        self.age = torch.zeros((), dtype=torch.float32, device=device)  # optimiser steps taken
        on_gpu = device.type == "cuda"
        # The fused kernels read a rate in float32 on a GPU, too coarse for float64.
        fine = world.dtype == torch.float64 or not on_gpu
        self._fused = not (on_gpu and fine) or learner.local.optimiser.ages
        self.lr = torch.zeros(
            (), dtype=torch.float32 if on_gpu and self._fused else torch.float64, device=device
        )
        self._learner = learner  # of those who train; its phases are drawn by their round
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.ragged = False  # whether some client has no full batch in some step of the chunk
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._masks = (
            {} if learner.drawn else {phase: self._mask(phase) for phase in learner.phases}
        )
        self._hand = _Hand.empty(self) if learner.drawn else None
        if self._net is not None:
            self._compare()

    def _place(self, value: Tensor) -> Tensor:
        """A weight of every client; alone, convolutions have their channels last, as the fast kernels want them."""
        placed = value.expand(self.shape.count, *value.shape).clone(
            memory_format=torch.contiguous_format
        )
        return channels_last(placed[0]).unsqueeze(0) if self._channels_last else placed

    def _line_up(self) -> None:
        line = self._lines.join(self.state)
        slots = {slot: torch.zeros_like(line) for slot in self.slots}
        self._moving = {_LINE: line}, {slot: {_LINE: own} for slot, own in slots.items()}
        self.state |= self._lines.views(line)
        self.slots = {slot: self._lines.views(own) for slot, own in slots.items()}

    @property
    def _channels_last(self) -> bool:
        return self.shape.layout == "alone" and self.engine.device.type == "cuda"

    def _compare(self) -> None:
        """Side by side and stacked must give the same logits: a forward may treat channels in ways no layer shows."""
        assert self._net is not None
        member, mode = self.member, train_pass(self.shape.learner.local)
        if mode.statistics != "batch":
            raise LayoutError("its norms keep statistics")
        if self.shape.learner.changes_samples(member):
            raise LayoutError("its samples are attacked, which takes nets one by one")
        count, size = self.shape.count, self.shape.learner.local.batch_size
        some = torch.arange(count * size, device=self.rows.device) % len(self.engine.data.targets)
        inputs, net = self.engine.data.samples(some.view(count, size)), member.net
        shaken = {
            name: value
            + 0.1 * noise.uniform(noise.fold_in(self.keys[0], place), value.shape, value.dtype)
            for place, (name, value) in enumerate(self.state.items())
        }  # no two clients alike
        shares = torch.linspace(0.5, 1.0, count, dtype=self.shares.dtype, device=self.shares.device)
        try:
            with torch.no_grad(), exact():
                stacked = vmap(
                    lambda weights, x, share: net(weights, x, mode, self.keys[0], share=share)[0]
                )(shaken, inputs, shares)
                with Undrawn():
                    laid = self._net(
                        shaken, inputs, member.class_dim, shares if mode.scaler else None
                    )
                leaks = self._leaks(shaken, inputs)
        except FedquiltError:
            raise
        except Exception as error:  # a forward may be anybody's
            raise LayoutError(
                f"its nets do not run both stacked and side by side: {first_line(error)}"
            ) from error
        if not agrees(laid, stacked):
            raise LayoutError("side by side its nets give other logits than one by one")
        if leaks:
            raise LayoutError("side by side its nets see each other")

    def _leaks(self, state: State, inputs: Tensor) -> bool:
        """Whether some logits depend on another client's samples at all, be it ever so little: what leaks may grow."""
        assert self._net is not None
        if not inputs.is_floating_point():
            return False
        with torch.enable_grad():
            seen = inputs.detach().requires_grad_()
            others = self._net(state, seen, self.member.class_dim)[1:]
            if not others.requires_grad:
                return False
            (slope,) = torch.autograd.grad(others.sum(), seen, allow_unused=True)
        return slope is not None and bool(slope[0].any())

    # --- a round ---------------------------------------------------------------------------------------------------

    def load(self, stack: Stack) -> None:
        """Take over what the clients of a stack start from; from here on its tensors are the unit's own."""
        self._stack, self._learner = stack, stack.learner
        rewrite(self.state, stack.state)
        rewrite(self.received.weights, self.state)  # laid out alike, which is one launch
        for slot, values in self.received.slots.items():
            rewrite(values, stack.received.slots[slot])
        for slot, values in self.slots.items():
            if stack.slots is None:
                torch._foreach_zero_(list(values.values()))
            else:
                rewrite(values, stack.slots[slot])
        self.held.copy_(stack.held)
        self.keys.copy_(stack.keys)
        self.shares.copy_(stack.shares)
        if self.tables is not None:
            for table, extras in zip(self.tables, stack.extras, strict=True):
                table.copy_(self.engine.teacher_rows(stack.learner, extras).table)
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
            size = self._sizes[step % _CHUNK]
            if size:
                self._replay(
                    step, size, masked=self._stack.sizes_at(step) != [size] * self.shape.count
                )
            else:
                self.at += 1
                self.age += len(self.shape.learner.phases)
            for clients in self._stack.groups(step):
                if self._stack.sizes[clients[0]][step] != size:
                    with (
                        _unsearched()
                    ):  # of as many sizes as there are tails, and numbers of clients that have them
                        self.engine.step(self._stack, step, clients)
                    self._take_back()

    def _size(self, step: int) -> int:
        """Of the batches that are played as recorded: full ones, or everyone's tail if it is a usual one; 0: none."""
        full, found = self.shape.learner.local.batch_size, self._stack.sizes_at(step)
        if found == [found[0]] * self.shape.count:
            return found[0] if found[0] == full or self._usual(found[0]) else 0
        return full if self._masking and full in found else 0

    def _usual(self, size: int) -> bool:
        """Whether recording steps of this size pays: every size needs kernels of its own, which are searched for."""
        if self.stream is None:
            return True
        self.engine.tails[self.shape, size] += 1
        return self.engine.tails[self.shape, size] > _RARE

    @property
    def _masking(self) -> bool:
        """Whether clients without a batch take part and are put back: a launch less, but no work less."""
        return self.stream is not None or bool(self.engine.record)

    def _fill(self, step: int) -> None:
        """Put the batches of the next steps onto the device."""
        stack = self._stack
        self._report(step)
        steps = range(step, min(step + _CHUNK, len(stack.losses)))
        self._sizes = [self._size(at) for at in steps]
        rows = torch.zeros(self.rows.shape, dtype=torch.int64)
        active = torch.zeros(self.active.shape, dtype=torch.bool)
        for client, own in enumerate(stack.batches):
            own_sizes = stack.sizes[client][step : steps.stop]
            for length in dict.fromkeys(self._sizes):
                places = [
                    p
                    for p, own_size in enumerate(own_sizes)
                    if own_size == length == self._sizes[p]
                ]
                if places:
                    rows[places, client, :length] = torch.stack(
                        [own[step + place] for place in places]
                    )
                    active[places, client] = True
        device = self.at.device
        self.rows.copy_(onto(device, rows))
        self.active.copy_(onto(device, active))
        self.ragged = not bool(active[: len(steps)].all())
        self.noise.copy_(
            noise.fold_in(self.keys, torch.arange(step, step + _CHUNK, device=device)[:, None])
        )
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
        """Capture a step; of one whose phases are drawn, the parts it begins with."""
        if self.stream is not None:
            full = self.shape.learner.local.batch_size
            for key, action in self._actions(self.shape.learner.phases, full, masked):
                if key is None:
                    action()
                else:
                    self._captured(key, action)

    def _captured(self, key: Hashable, action: Callable[[], None]) -> torch.cuda.CUDAGraph:
        if key not in self._graphs:
            assert self.stream is not None
            own = [*self._tensors()]
            before = [value.clone() for value in own]
            # Kernels have been found if its like has recorded this; work space, if this unit has recorded anything.
            unknown = [(self.shape, key) not in self.engine.warm, not self._graphs]
            warm = _WARM if all(unknown) else int(any(unknown))
            self._graphs[key] = recorded(action, self.stream, self._pool, warm)
            self.engine.warm.add((self.shape, key))
            for value, old in zip(own, before, strict=True):
                value.copy_(old)
            self.stream.wait_stream(torch.cuda.current_stream())
        return self._graphs[key]

    def _tensors(self) -> Iterator[Tensor]:
        """What a step changes."""
        yield from self.state.values()
        for values in self.slots.values():
            yield from values.values()
        yield from (self.losses, self.at, self.age)
        if self._hand is not None:
            yield from self._hand.tensors()

    def _replay(self, step: int, size: int, masked: bool) -> None:
        for key, action in self._actions(self._learner.phases_at(step), size, masked):
            if key is None or self.stream is None:
                action()
            else:
                self._captured(key, action).replay()

    def replay_alone(self) -> None:
        """One step of whatever the tensors hold."""
        with self._on_stream():
            self._replay(0, self.shape.learner.local.batch_size, masked=False)

    def _actions(
        self, phases: tuple[Phase, ...], size: int, masked: bool
    ) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """What a step consists of, each with the name it is recorded under; without one it is only done."""
        hand = self._hand
        if hand is None:
            yield (size, masked), lambda: self._step(size, masked)
            return
        if size not in hand.batches:
            hand.batches[size] = Batch(*(value.clone() for value in _tensors_of(self._batch(size))))
        batch = hand.batches[size]
        yield ("open", size, masked), lambda: self._deal(hand, batch, masked)
        for phase in phases:
            for objective in apart(phase.objective, self.member):
                nested = hand.nested_for(self, objective)
                yield (objective, size), lambda o=objective, n=nested: self._add(hand, batch, o, n)  # type: ignore[misc]
            if not isinstance(phase.moves, Everywhere):
                yield None, lambda phase=phase: self._load_mask(hand, phase)  # type: ignore[misc]
            whole = isinstance(phase.moves, Everywhere)
            yield (
                ("move", whole or phase.freeze),
                lambda p=phase, w=whole: self._play_hand(hand, p, w),
            )  # type: ignore[misc]
        yield ("close", masked), lambda: self._close(hand.losses, hand.before, hand.kept, masked)

    # --- a step whose phases are always the same -------------------------------------------------------------------

    def _step(self, size: int, masked: bool) -> None:
        learner = self.shape.learner
        batch = self._batch(size)
        before = {name: value.clone() for name, value in self.state.items()} if masked else {}
        kept = {
            slot: {n: v.clone() for n, v in values.items()}
            for slot, values in self.slots.items()
            if masked
        }
        losses = self.losses[0]
        for phase in learner.phases:
            grads, (losses, seen) = self._gradients(
                phase.objective, batch, self.member, self.state, self.received
            )
            if _LINE in self._moving[0]:
                grads = {_LINE: self._lines.join(grads)}
            self._move(self.engine.clipped(learner, grads), phase, self._masks[phase])
            rewrite(self.state, seen)
        self._close(losses, before, kept, masked)

    def _batch(self, size: int) -> Batch:
        """Everyone's batch of this step, of so many samples."""
        learner = self.shape.learner
        rows, keys = (
            self.rows.index_select(0, self.at)[0, :, :size],
            self.noise.index_select(0, self.at)[0],
        )
        stored = self.engine.data.samples(rows), self.engine.data.targets[rows]
        inputs, targets = self.engine.augmented(learner, *stored, keys)
        if self._channels_last:
            inputs = channels_last(inputs[0]).unsqueeze(0)
        batch = Batch(inputs, targets, self.held, keys, self.shares)
        if self.tables is not None:
            everyone = torch.arange(self.shape.count, device=rows.device)[:, None]
            return replace(batch, taught=self.tables[everyone, rows])
        return replace(batch, taught=self._taught(batch)) if learner.taught else batch

    def _close(
        self, losses: Tensor, before: State, kept: Mapping[str, State], masked: bool
    ) -> None:
        if masked:  # who has no batch in this step stays as it was
            who = self.active.index_select(0, self.at)[0]
            _put_back(self.state, before, who)
            for slot, values in self.slots.items():
                _put_back(values, kept[slot], who)
        self.losses.index_copy_(0, self.at, losses.to(self.losses.dtype).unsqueeze(0))
        self.at += 1

    # --- a step whose phases are drawn: parts that hand each other what they found -----------------------------------

    def _deal(self, hand: _Hand, batch: Batch, masked: bool) -> None:
        """The batch, and what there was before it."""
        for own, new in zip(
            _tensors_of(batch), _tensors_of(self._batch(batch.targets.shape[1])), strict=True
        ):
            own.copy_(new)
        if masked:
            rewrite(hand.before, self.state)
            for slot, values in self.slots.items():
                rewrite(hand.kept[slot], values)

    def _add(self, hand: _Hand, batch: Batch, objective: Objective, nested: Inner | None) -> None:
        """One objective's gradient to those of its phase; of a nested net, only where that net is."""
        member = self.member
        if nested is None:
            grads, (losses, seen) = self._gradients(
                objective, batch, member, self.state, self.received
            )
            sums = hand.views  # what is laid out alike is added by one launch
            torch._foreach_add_(
                list(sums.values()), [_laid_out_as(grads[name], own) for name, own in sums.items()]
            )
        else:
            (inner,) = objective.nets(member)
            own_member = member.family.member(inner.arch)  # by itself it is a client's whole net
            rest = {
                name: value for name, value in self.state.items() if name not in nested.lines.shapes
            }
            rest = member.narrowed(rest, inner, lead=1)
            received = Received(
                member.narrowed(self.received.weights, inner, lead=1),
                {
                    slot: member.narrowed(values, inner, lead=1)
                    for slot, values in self.received.slots.items()
                },
            )
            own = nested.lines.views(nested.cut(self._moving[0][_LINE]))
            with _unsearched():
                grads, (losses, seen) = self._gradients(
                    objective, batch, own_member, {**rest, **own}, received
                )
            nested.add(hand.grads, nested.lines.join(grads))
        hand.sums += losses
        rewrite(self.state, seen)

    def _load_mask(self, hand: _Hand, phase: Phase) -> None:
        hand.mask.copy_(self.engine.region(self.member, phase.moves, self._lines))

    def _play_hand(self, hand: _Hand, phase: Phase, whole: bool) -> None:
        grads = self.engine.clipped(self.shape.learner, {_LINE: hand.grads})
        self._move(grads, phase, None if whole else hand.mask)
        hand.grads.zero_()
        hand.losses.copy_(hand.sums)
        hand.sums.zero_()

    # --- what both are made of -------------------------------------------------------------------------------------

    def _taught(self, batch: Batch) -> Tensor:
        learner, member = self.shape.learner, self.member
        if self._net is not None and not learner.taught_by:
            with torch.no_grad():
                shares = self.shares if learner.local.scaler else None
                return self._net(self.state, batch.inputs, member.class_dim, shares)
        return self.engine.taught(learner, member, self.state, batch)

    def _gradients(
        self, objective: Objective, batch: Batch, member: Member, state: State, received: Received
    ) -> tuple[State, tuple[Tensor, State]]:
        learner = self.shape.learner
        if self._net is not None and member == self.member:
            return laid_gradient(learner, member, objective, self._net, state, received, batch)
        return self.engine.gradients(learner, member, objective, state, received, batch)

    def _mask(self, phase: Phase) -> Tensor | None:
        """True where a phase may move; None: everywhere."""
        if isinstance(phase.moves, Everywhere):
            return None
        return self.engine.region(self.member, phase.moves, self._lines)

    def _move(self, grads: State, phase: Phase, mask: Tensor | None) -> None:
        """One step of the optimiser, in place; what a mask keeps in its place is put back, bit by bit."""
        self.age += 1
        optimiser, (weights, slots) = self.shape.learner.local.optimiser, self._moving
        if mask is not None and phase.freeze == "gradient":
            grads, mask = {name: value * mask for name, value in grads.items()}, None
        own = [value for values in (weights, *slots.values()) for value in values.values()]
        before = [] if mask is None else [value.clone() for value in own]
        if self._fused:
            alike = [_laid_out_as(grads[name], weight) for name, weight in weights.items()]
            listed = {slot: list(values.values()) for slot, values in slots.items()}
            optimiser.update_(list(weights.values()), listed, alike, self.lr, self.age)
        else:
            moved, kept = optimiser.update(weights, slots, grads, self.lr, 0)
            rewrite(weights, moved)
            for slot, values in kept.items():
                rewrite(slots[slot], values)
        if mask is not None:
            for value, old in zip(own, before, strict=True):
                torch.where(mask, value, old, out=value)


@dataclass
class _Hand:
    """What the parts of a drawn step hand each other, in tensors that stay where they are."""

    batches: dict[int, Batch]  # of each size
    nested: dict[Member, Inner]  # nets that have been drawn
    grads: Tensor  # (client, entry) summed over the objectives of a phase
    views: State  # of it
    sums: Tensor  # (client,) of their losses
    losses: Tensor  # (client,) of the last phase
    mask: Tensor  # (1, entry) True where the phase may move
    before: State  # the weights this batch started from, for those who sit it out
    kept: dict[str, State]

    @staticmethod
    def empty(unit: Unit) -> _Hand:
        grads = torch.zeros_like(unit._moving[0][_LINE])
        return _Hand(
            {},
            {},
            grads,
            unit._lines.views(grads),
            torch.zeros_like(unit.losses[0]),
            torch.zeros_like(unit.losses[0]),
            torch.zeros_like(grads[:1], dtype=torch.bool),
            {name: value.clone() for name, value in unit.state.items()},
            {
                slot: {n: v.clone() for n, v in values.items()}
                for slot, values in unit.slots.items()
            },
        )

    def nested_for(self, unit: Unit, objective: Objective) -> Inner | None:
        """Return the nested net of an objective that runs no other and reads no other weights; else None.

        Its gradient is then taken with respect to that net's weights alone. The net stays where it is, because
        recorded steps read it there.
        """
        nets = objective.nets(unit.member)
        if len(nets) != 1 or nets[0] == unit.member or not objective.reads_its_nets_alone:
            return None
        net = nets[0]
        if net not in self.nested:
            self.nested[net] = unit.engine.nested(unit.member, net, unit._lines)
        return self.nested[net]

    def tensors(self) -> Iterator[Tensor]:
        for batch in self.batches.values():
            yield from _tensors_of(batch)
        yield from (self.grads, self.sums, self.losses, self.mask)
        yield from self.before.values()
        for values in self.kept.values():
            yield from values.values()


def _tensors_of(batch: Batch) -> list[Tensor]:
    found = (batch.inputs, batch.targets, batch.held, batch.key, batch.share, batch.taught)
    return [value for value in found if value is not None]


def _check_capturable(learner: Learner) -> None:
    """Refuse learners whose optimiser would have to count steps for every position."""
    partly = any(not isinstance(phase.moves, Everywhere) for phase in learner.phases)
    if learner.local.optimiser.ages and partly:
        raise CaptureError(
            f"{type(learner.local.optimiser).__name__} counts steps, and some positions do not move"
        )


def recorded(
    action: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None, warm: int = _WARM
) -> torch.cuda.CUDAGraph:
    """An action on tensors that stay where they are, as a graph. It is carried out a few times on the way.

    Graphs that are never replayed at the same time may share a pool of memory to work in.
    """
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm):  # kernels are chosen and work space is taken before the recording
                action()
        torch.cuda.synchronize()
        _make_room()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream), _uncollected():
            graph.capture_begin(pool)
            try:
                action()
            finally:
                graph.capture_end()
    except RuntimeError as error:
        raise CaptureError(str(error).splitlines()[0]) from error
    torch.cuda.synchronize()
    return graph


def _make_room() -> None:
    """Work space of other graphs cannot be used by this one; handing it back takes long, and is done if need be."""
    free, total = torch.cuda.mem_get_info()
    if _SCARCE * free < total:
        torch.cuda.empty_cache()


@contextmanager
def _uncollected() -> Iterator[None]:
    """No garbage is collected: a graph that is destroyed while another one is captured spoils it."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextmanager
def _unsearched() -> Iterator[None]:
    """cuDNN takes the kernels it thinks best: where shapes are many, searching for the fastest takes longer."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


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


def stacked(states: Sequence[Weights]) -> State:
    """One state with the clients in front; clients that got the same tensors share them until they move."""
    first, whole = states[0], {}
    for name, value in first.items():
        values = [state[name] for state in states]
        same = all(other is value for other in values)
        whole[name] = value.expand(len(values), *value.shape) if same else torch.stack(values)
    return whole


def fails_alone(error: Exception) -> bool:
    """Whether what failed in a stack fails one by one, too, or should.

    What draws its own noise would run, and nobody would notice that it draws otherwise every time.
    """
    return (
        isinstance(error, FedquiltError)
        or is_out_of_memory(error)
        or "vmap: called random" in str(error)
    )


def rewrite(own: State, new: Mapping[str, Tensor]) -> None:
    """Put new values into tensors that stay where they are."""
    names = [name for name in new if new[name] is not own[name]]
    alike = [name for name in names if new[name].stride() == own[name].stride()]
    if alike:  # those that are laid out alike are copied by one launch, but only if all of them are
        torch._foreach_copy_([own[name] for name in alike], [new[name] for name in alike])
    for name in names:
        if new[name].stride() != own[name].stride():
            own[name].copy_(new[name])


def _put_back(own: State, before: State, who: Tensor) -> None:
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
