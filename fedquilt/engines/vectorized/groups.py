"""Client groups, which train in lockstep on static tensors and replay captured steps.

On a GPU, a client's step consists of hundreds of kernels of a few microseconds each. Launching them
one by one costs more than running them. A group therefore captures its step as a CUDA graph and
replays it. Each group has its own stream, so that groups of unequal members overlap.

A group knows nothing of rounds: it is loaded with the clients that train next. The cohort may
change from round to round, and no new capture is needed as long as the batch sizes have occurred
before.

Where the phases of a step are drawn at random, the parts of a step are captured instead of the
step. Each part is captured when it is first needed. The number of captures thus grows with the
number of nets, not with the number of their combinations.
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
from fedquilt.engines.vectorized.lines import Inner, Lines
from fedquilt.errors import FedquiltError, first_line
from fedquilt.errors.faults import is_out_of_memory
from fedquilt.family.grouped import GroupingError, Undrawn, agrees
from fedquilt.family.member import Member
from fedquilt.hardware.device import channels_last, to_device_async
from fedquilt.hardware.torch_internals import foreach_add_, foreach_copy_, foreach_zero_
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Objective, apart
from fedquilt.round.training.optimizers import State
from fedquilt.round.training.regions import Everywhere
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, laid_gradient, train_pass
from fedquilt.terms import Arch, Weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedquilt.engines.vectorized.engine import Stack, Vectorized

# Number of streams that the GPU serves at once. CUDA's default of 8 makes unequal groups wait for
# each other: a step of ten clients of five sizes on an H200 takes 4.8 ms instead of 3.6 ms. CUDA
# reads the variable when it starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

# "alone": each client has its own stream. "laid": nets are computed side by side, as groups of
# grouped convolutions. "stack": nets are stacked by vmap.
Layout = Literal["alone", "laid", "stack"]
_WARM = 3  # Number of runs of an action before it is captured
_CHUNK = 64  # Number of steps whose batch positions are on the device at once
_SCARCE = 4  # The allocator cache is emptied if less than 1/4 of GPU memory is free
_LINE = ""  # Name of the tensor that joins all trainable weights of a group
_RARE = 32  # Number of steps of an unusual batch size before that size is captured


class CaptureError(FedquiltError):
    """Error for a step that cannot be captured as a CUDA graph."""


@dataclass(frozen=True)
class Shape:
    """Properties that two client groups must share to be interchangeable."""

    arch: Arch
    learner: Learner
    count: int
    layout: Layout

    @staticmethod
    def of(arch: Arch, learner: Learner, count: int, layout: Layout) -> Shape:
        """Return the shape of a client group.

        It leaves out the learner's settings that change between rounds, because they are loaded
        with the clients.

        Args:
            arch: Architecture of the member that the clients train.
            learner: Local training of the clients.
            count: Number of clients in the group.
            layout: Layout in which their nets are computed.
        """
        return Shape(arch, learner.timeless, count, layout)


class ClientGroup:
    """Clients of one member that train together on static tensors.

    A caller uses `load`, then `run_step` for every step, then `unload`.
    """

    def __init__(self, engine: Vectorized, shape: Shape) -> None:
        self.engine, self.shape = engine, shape
        world, family, learner = engine.world, engine.world.family, shape.learner
        self.member = member = family.member(shape.arch)
        device, count = engine.device, shape.count
        _check_capturable(learner)
        self._net = member.grouped(count) if shape.layout == "laid" else None
        fresh = family.cutter.gather(engine.template, member.prefix, learner.names(member))
        self.state = {name: self._place(value) for name, value in fresh.items()}
        self.slots = {
            slot: {name: torch.zeros_like(self.state[name]) for name in member.trainable}
            for slot in learner.local.optimizer.slots
        }
        # Weights and slots that the optimizer moves. Where phases move only some positions, these
        # are the joined rows that the weights are views of.
        self._moving = {name: self.state[name] for name in member.trainable}, self.slots
        self._lines = Lines(
            {name: fresh[name].shape for name in member.trainable}, self._channels_last
        )
        if learner.drawn or any(
            not isinstance(phase.moves, Everywhere) for phase in learner.phases
        ):
            self._line_up()
        slotted = learner.slotted(member)
        # State slots of the method, which objectives read.
        own_slots = {
            slot: {n: torch.zeros_like(self.state[n]) for n in slotted}
            for slot in learner.state.slots
        }
        self.received = Received(
            {name: value.clone() for name, value in self.state.items()}, own_slots
        )
        # A short last batch may be joined to the one before
        max_batch = 2 * learner.local.batch_size
        self.rows = torch.zeros(_CHUNK, count, max_batch, dtype=torch.int64, device=device)
        self.active = torch.ones(_CHUNK, count, dtype=torch.bool, device=device)
        self.losses = torch.zeros(_CHUNK, count, dtype=world.dtype, device=device)
        self.held = torch.ones(count, family.num_outputs, dtype=torch.bool, device=device)
        self.keys = torch.zeros(count, dtype=torch.int64, device=device)
        self.shares = torch.ones(count, dtype=world.dtype, device=device)
        # Teacher's outputs for all public samples, (client, sample, …).
        self.tables: Tensor | None = None
        if learner.teacher:
            self.tables = torch.zeros(
                count, *engine.table_shape(learner), dtype=world.dtype, device=device
            )
        # Random keys of every step, (step, client).
        self.noise = torch.zeros(_CHUNK, count, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)  # Step within the chunk
        self.age = torch.zeros((), dtype=torch.float32, device=device)  # Optimizer steps taken
        on_gpu = device.type == "cuda"
        # On a GPU the fused kernels read the learning rate in float32, too coarse for float64.
        fine = world.dtype == torch.float64 or not on_gpu
        self._fused = not (on_gpu and fine) or learner.local.optimizer.ages
        # Learning rates that a captured step reads, (step, client).
        rate_type = torch.float32 if on_gpu and self._fused else torch.float64
        self.rates = torch.zeros(_CHUNK, count, dtype=rate_type, device=device)
        # True if learning rates may differ between clients.
        self._own_rates = count > 1 and not learner.local.within_round.is_constant
        # Learner of the loaded clients. Phases that are drawn at random depend on its round.
        self._learner = learner
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.ragged = False  # True if a client has no captured batch in some step of the chunk
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        self._masks = (
            {} if learner.drawn else {phase: self._mask(phase) for phase in learner.phases}
        )
        self._hand = StepBuffers.empty(self) if learner.drawn else None
        if self._net is not None:
            self._compare()

    def _place(self, value: Tensor) -> Tensor:
        """Copy a weight for every client of the group.

        A client that trains alone on a GPU has convolutions in channels-last layout, which fast
        kernels need.
        """
        placed = value.expand(self.shape.count, *value.shape).clone(
            memory_format=torch.contiguous_format
        )
        return channels_last(placed[0]).unsqueeze(0) if self._channels_last else placed

    def _line_up(self) -> None:
        """Store weights and optimizer slots in one row per client, and make them views of it."""
        line = self._lines.join(self.state)
        slots = {slot: torch.zeros_like(line) for slot in self.slots}
        self._moving = (
            {_LINE: line},
            {slot: {_LINE: slot_line} for slot, slot_line in slots.items()},
        )
        self.state |= self._lines.views(line)
        self.slots = {slot: self._lines.views(slot_line) for slot, slot_line in slots.items()}

    @property
    def _channels_last(self) -> bool:
        return self.shape.layout == "alone" and self.engine.device.type == "cuda"

    def _compare(self) -> None:
        """Refuse the layout "laid" if its logits differ from those of stacked nets.

        A forward pass may treat channels in ways that cannot be read off the layers.

        Raises:
            GroupingError: The nets cannot be computed side by side.
        """
        assert self._net is not None
        member, mode = self.member, train_pass(self.shape.learner.local)
        if mode.statistics != "batch":
            raise GroupingError("its norms keep statistics")
        if self.shape.learner.changes_samples(member):
            raise GroupingError("its samples are attacked, which takes nets one by one")
        count, size = self.shape.count, self.shape.learner.local.batch_size
        positions = torch.arange(count * size, device=self.rows.device) % len(
            self.engine.data.targets
        )
        inputs, net = self.engine.data.samples(positions.view(count, size)), member.net
        # Weights differ between clients
        shaken = {
            name: value
            + 0.1 * noise.uniform(noise.fold_in(self.keys[0], number), value.shape, value.dtype)
            for number, (name, value) in enumerate(self.state.items())
        }
        shares = torch.linspace(0.5, 1.0, count, dtype=self.shares.dtype, device=self.shares.device)
        try:
            with torch.no_grad(), exact():
                stacked = vmap(
                    lambda weights, x, share: net(weights, x, mode, self.keys[0], share=share)[0]
                )(shaken, inputs, shares)
                with Undrawn():
                    grouped = self._net(
                        shaken, inputs, member.class_dim, shares if mode.scaler else None
                    )
                leaks = self._leaks(shaken, inputs)
        except FedquiltError:
            raise
        except Exception as error:  # A user's forward pass may raise anything
            raise GroupingError(
                f"its nets do not run both stacked and side by side: {first_line(error)}"
            ) from error
        if not agrees(grouped, stacked):
            raise GroupingError("side by side its nets give other logits than one by one")
        if leaks:
            raise GroupingError("side by side its nets see each other")

    def _leaks(self, state: State, inputs: Tensor) -> bool:
        """Return True if any client's logits depend on another client's samples.

        Even a tiny dependence counts, because it may grow in training.
        """
        assert self._net is not None
        if not inputs.is_floating_point():
            return False
        with torch.enable_grad():
            tracked_inputs = inputs.detach().requires_grad_()
            other_logits = self._net(state, tracked_inputs, self.member.class_dim)[1:]
            if not other_logits.requires_grad:
                return False
            (slope,) = torch.autograd.grad(other_logits.sum(), tracked_inputs, allow_unused=True)
        return slope is not None and bool(slope[0].any())

    # --- a round ---------------------------------------------------------------------------------

    def load(self, stack: Stack) -> None:
        """Copy the starting state of a stack's clients into the group's static tensors.

        Afterwards the stack refers to the group's tensors.
        """
        self._stack, self._learner = stack, stack.learner
        rewrite(self.state, stack.state)
        # Equal memory layout, so that one launch is enough
        rewrite(self.received.weights, self.state)
        for slot, values in self.received.slots.items():
            rewrite(values, stack.received.slots[slot])
        for slot, values in self.slots.items():
            if stack.slots is None:
                foreach_zero_(list(values.values()))
            else:
                rewrite(values, stack.slots[slot])
        self.held.copy_(stack.held)
        self.keys.copy_(stack.keys)
        self.shares.copy_(stack.shares)
        if self.tables is not None:
            for table, extras in zip(self.tables, stack.extras, strict=True):
                table.copy_(self.engine.teacher_rows(stack.learner, extras).table)
        self.age.fill_(stack.ages[0])
        self.rates.fill_(stack.learner.lr)
        stack.state, stack.slots, stack.received = self.state, self.slots, self.received
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    def run_step(self, step: int) -> None:
        """Train all clients on their batches of one step.

        Batches of the usual size run as a captured graph. Smaller last batches run without capture.
        """
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
                    # These steps have many combinations of batch size and number of clients.
                    with _unsearched():
                        self.engine.step(self._stack, step, clients)
                    self._take_back()

    def _size(self, step: int) -> int:
        """Return the batch size that the captured graph handles in a step, or 0 for none.

        It is the full batch size, or the size of a last batch that all clients share if it occurs
        often.
        """
        full, sizes = self.shape.learner.local.batch_size, self._stack.sizes_at(step)
        if sizes == [sizes[0]] * self.shape.count:
            return sizes[0] if sizes[0] == full or self._usual(sizes[0]) else 0
        return full if self._masking and full in sizes else 0

    def _usual(self, size: int) -> bool:
        """Return True if capturing steps of this batch size pays off.

        Every size needs its own kernels, and searching for the fastest ones takes time.
        """
        if self.stream is None:
            return True
        self.engine.tails[self.shape, size] += 1
        return self.engine.tails[self.shape, size] > _RARE

    @property
    def _masking(self) -> bool:
        """Return True if clients without a batch take part in a step and are restored afterwards.

        This saves kernel launches but no computation.
        """
        return self.stream is not None or bool(self.engine.record)

    def _fill(self, step: int) -> None:
        """Copy the batch positions of the next `_CHUNK` steps to the device."""
        stack = self._stack
        self._report(step)
        steps = range(step, min(step + _CHUNK, len(stack.losses)))
        self._sizes = [self._size(later_step) for later_step in steps]
        rows = torch.zeros(self.rows.shape, dtype=torch.int64)
        active = torch.zeros(self.active.shape, dtype=torch.bool)
        for client, batches in enumerate(stack.batches):
            own_sizes = stack.sizes[client][step : steps.stop]
            for length in dict.fromkeys(self._sizes):
                offsets = [
                    p
                    for p, own_size in enumerate(own_sizes)
                    if own_size == length == self._sizes[p]
                ]
                if offsets:
                    rows[offsets, client, :length] = torch.stack(
                        [batches[step + offset] for offset in offsets]
                    )
                    active[offsets, client] = True
        device = self.at.device
        self.rows.copy_(to_device_async(device, rows))
        self.active.copy_(to_device_async(device, active))
        self.ragged = not bool(active[: len(steps)].all())
        if not self._learner.local.within_round.is_constant:
            self.rates.copy_(to_device_async(device, self._rates_of(steps)))
        self.noise.copy_(
            noise.fold_in(self.keys, torch.arange(step, step + _CHUNK, device=device)[:, None])
        )
        self.at.zero_()

    def _rates_of(self, steps: range) -> Tensor:
        """Return the learning rates of the next steps, (step, client).

        A client without a batch has rate 0.
        """
        rates = torch.zeros(self.rates.shape, dtype=torch.float64)
        for client, batches in enumerate(self._stack.batches):
            client_rates = [
                self._learner.rate(step, len(batches)) for step in steps if step < len(batches)
            ]
            rates[: len(client_rates), client] = torch.tensor(client_rates, dtype=torch.float64)
        return rates

    def _report(self, step: int) -> None:
        """Copy the losses of the last chunk to the stack.

        The stack already has the losses of steps that ran without capture.
        """
        if step:
            first = (step - 1) // _CHUNK * _CHUNK
            stack_losses, group_losses = self._stack.losses[first:step], self.losses[: step - first]
            stack_losses.copy_(
                torch.where(self.active[: step - first], group_losses, stack_losses)
                if self.ragged
                else group_losses
            )

    def unload(self) -> None:
        """Copy the remaining losses to the stack and wait for the group's stream.

        The stack's weights and slots are the group's tensors, which are valid until the next
        `load`.
        """
        with self._on_stream():
            self._report(len(self._stack.losses))
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _take_back(self) -> None:
        """Copy the results of a step that ran without capture into the static tensors."""
        rewrite(self.state, self._stack.state)
        for slot, values in (self._stack.slots or {}).items():
            rewrite(self.slots[slot], values)
        self._stack.state, self._stack.slots = self.state, self.slots

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    # --- a step ----------------------------------------------------------------------------------

    def record(self, masked: bool = False) -> None:
        """Capture a step of full batches, or its first parts if its phases are drawn at random.

        Args:
            masked: Capture a step that restores clients without a batch.
        """
        if self.stream is not None:
            full = self.shape.learner.local.batch_size
            for key, action in self._actions(self.shape.learner.phases, full, masked):
                if key is None:
                    action()
                else:
                    self._captured(key, action)

    def _captured(self, key: Hashable, action: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Return the graph of an action, and capture it on the first call.

        The action runs during the capture, so that all tensors that it changes are restored
        afterwards.
        """
        if key not in self._graphs:
            assert self.stream is not None
            changed_tensors = [*self._tensors()]
            old_values = [value.clone() for value in changed_tensors]
            # Kernels are known if a group of equal shape has captured this action. Workspace is
            # allocated if this group has captured anything.
            unknown = [(self.shape, key) not in self.engine.warm, not self._graphs]
            warm = _WARM if all(unknown) else int(any(unknown))
            self._graphs[key] = recorded(action, self.stream, self._pool, warm)
            self.engine.warm.add((self.shape, key))
            for value, old in zip(changed_tensors, old_values, strict=True):
                value.copy_(old)
            self.stream.wait_stream(torch.cuda.current_stream())
        return self._graphs[key]

    def _tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that a step changes."""
        yield from self.state.values()
        for values in self.slots.values():
            yield from values.values()
        yield from (self.losses, self.at, self.age)
        if self._hand is not None:
            yield from self._hand.tensors()

    def _replay(self, step: int, size: int, masked: bool) -> None:
        """Run one step: replay what is captured, and call everything else."""
        for key, action in self._actions(self._learner.phases_at(step), size, masked):
            if key is None or self.stream is None:
                action()
            else:
                self._captured(key, action).replay()

    def replay_alone(self) -> None:
        """Run one step on the current contents of the static tensors."""
        with self._on_stream():
            self._replay(0, self.shape.learner.local.batch_size, masked=False)

    def _actions(
        self, phases: tuple[Phase, ...], size: int, masked: bool
    ) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Yield the parts of a step, each with the key under which its graph is stored.

        A part with the key None is never captured.
        """
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
            moves_all = isinstance(phase.moves, Everywhere)
            moved = ("move", moves_all or phase.freeze)
            yield moved, lambda p=phase, w=moves_all: self._play_hand(hand, p, w)  # type: ignore[misc]
        yield ("close", masked), lambda: self._close(hand.losses, hand.before, hand.kept, masked)

    # --- a step whose phases are always the same -------------------------------------------------

    def _step(self, size: int, masked: bool) -> None:
        """Run one step whose phases are the same in every step."""
        learner = self.shape.learner
        batch = self._batch(size)
        old_state = {name: value.clone() for name, value in self.state.items()} if masked else {}
        old_slots = {
            slot: {n: v.clone() for n, v in values.items()}
            for slot, values in self.slots.items()
            if masked
        }
        losses = self.losses[0]
        for phase in learner.phases:
            grads, (losses, buffers) = self._gradients(
                phase.objective, batch, self.member, self.state, self.received
            )
            if _LINE in self._moving[0]:
                grads = {_LINE: self._lines.join(grads)}
            self._move(self.engine.clipped(learner, grads), phase, self._masks[phase])
            rewrite(self.state, buffers)
        self._close(losses, old_state, old_slots, masked)

    def _batch(self, size: int) -> Batch:
        """Return the batches of all clients in the current step, each with `size` samples."""
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
        """Store the losses of a step, and restore clients that had no batch in it."""
        if masked:  # Clients without a batch in this step keep their state
            has_batch = self.active.index_select(0, self.at)[0]
            _put_back(self.state, before, has_batch)
            for slot, values in self.slots.items():
                _put_back(values, kept[slot], has_batch)
        self.losses.index_copy_(0, self.at, losses.to(self.losses.dtype).unsqueeze(0))
        self.at += 1

    # --- a step whose phases are drawn at random: parts that communicate through buffers ---------

    def _deal(self, hand: StepBuffers, batch: Batch, masked: bool) -> None:
        """Copy the current batch into its buffer, and if `masked`, save the old state."""
        for buffer, new in zip(
            _tensors_of(batch), _tensors_of(self._batch(batch.targets.shape[1])), strict=True
        ):
            buffer.copy_(new)
        if masked:
            rewrite(hand.before, self.state)
            for slot, values in self.slots.items():
                rewrite(hand.kept[slot], values)

    def _add(
        self, hand: StepBuffers, batch: Batch, objective: Objective, nested: Inner | None
    ) -> None:
        """Add the gradient of one objective to the sum over the objectives of its phase.

        The gradient of a nested net is added only at the positions of that net.
        """
        member = self.member
        if nested is None:
            grads, (losses, buffers) = self._gradients(
                objective, batch, member, self.state, self.received
            )
            sums = hand.views  # Tensors of equal strides are added by one launch
            foreach_add_(
                list(sums.values()),
                [_laid_out_as(grads[name], gradient_sum) for name, gradient_sum in sums.items()],
            )
        else:
            (inner,) = objective.nets(member)
            own_member = member.family.member(inner.arch)  # The nested net as a member of its own
            other_tensors = {
                name: value for name, value in self.state.items() if name not in nested.lines.shapes
            }
            other_tensors = member.narrowed(other_tensors, inner, lead=1)
            received = Received(
                member.narrowed(self.received.weights, inner, lead=1),
                {
                    slot: member.narrowed(values, inner, lead=1)
                    for slot, values in self.received.slots.items()
                },
            )
            nested_weights = nested.lines.views(nested.cut(self._moving[0][_LINE]))
            with _unsearched():
                grads, (losses, buffers) = self._gradients(
                    objective, batch, own_member, {**other_tensors, **nested_weights}, received
                )
            nested.add(hand.grads, nested.lines.join(grads))
        hand.sums += losses
        rewrite(self.state, buffers)

    def _load_mask(self, hand: StepBuffers, phase: Phase) -> None:
        """Copy the mask of a phase into its buffer."""
        hand.mask.copy_(self.engine.region(self.member, phase.moves, self._lines))

    def _play_hand(self, hand: StepBuffers, phase: Phase, whole: bool) -> None:
        """Move the weights by the summed gradients of a phase, and reset the sums."""
        grads = self.engine.clipped(self.shape.learner, {_LINE: hand.grads})
        self._move(grads, phase, None if whole else hand.mask)
        hand.grads.zero_()
        hand.losses.copy_(hand.sums)
        hand.sums.zero_()

    # --- parts of both kinds of step -------------------------------------------------------------

    def _taught(self, batch: Batch) -> Tensor:
        """Return the teacher's outputs for a batch of every client."""
        learner, member = self.shape.learner, self.member
        if self._net is not None and not learner.taught_by:
            with torch.no_grad():
                shares = self.shares if learner.local.scaler else None
                return self._net(self.state, batch.inputs, member.class_dim, shares)
        return self.engine.taught(learner, member, self.state, batch)

    def _gradients(
        self, objective: Objective, batch: Batch, member: Member, state: State, received: Received
    ) -> tuple[State, tuple[Tensor, State]]:
        """Return gradients, losses and new buffers of all clients, in the group's layout."""
        learner = self.shape.learner
        if self._net is not None and member == self.member:
            return laid_gradient(learner, member, objective, self._net, state, received, batch)
        return self.engine.gradients(learner, member, objective, state, received, batch)

    def _mask(self, phase: Phase) -> Tensor | None:
        """Return a mask, True where a phase may move weights. None: it may everywhere."""
        if isinstance(phase.moves, Everywhere):
            return None
        return self.engine.region(self.member, phase.moves, self._lines)

    def _move(self, grads: State, phase: Phase, mask: Tensor | None) -> None:
        """Take one optimizer step in-place.

        Entries that the mask excludes are restored bit by bit.
        """
        self.age += 1
        optimizer, (weights, slots) = self.shape.learner.local.optimizer, self._moving
        if mask is not None and phase.freeze == "gradient":
            grads, mask = {name: value * mask for name, value in grads.items()}, None
        moving_tensors = [
            value for values in (weights, *slots.values()) for value in values.values()
        ]
        old_values = [] if mask is None else [value.clone() for value in moving_tensors]
        rates = self.rates.index_select(0, self.at)[0]
        if self._fused:
            matching_grads = [_laid_out_as(grads[name], weight) for name, weight in weights.items()]
            listed = {slot: list(values.values()) for slot, values in slots.items()}
            self._update_(list(weights.values()), listed, matching_grads, rates)
        else:
            lr = rates if self._own_rates else rates[0]
            moved, new_slots = optimizer.update(weights, slots, grads, lr, 0)
            rewrite(weights, moved)
            for slot, values in new_slots.items():
                rewrite(slots[slot], values)
        if mask is not None:
            for value, old in zip(moving_tensors, old_values, strict=True):
                torch.where(mask, value, old, out=value)

    def _update_(
        self,
        weights: list[Tensor],
        slots: Mapping[str, list[Tensor]],
        grads: list[Tensor],
        rates: Tensor,
    ) -> None:
        """Move all clients by one fused optimizer step.

        The fused kernels take a single learning rate, so that clients with unequal rates are moved
        one by one.
        """
        update_ = self.shape.learner.local.optimizer.update_
        if not self._own_rates:
            update_(weights, slots, grads, rates[0], self.age)
            return
        for client, rate in enumerate(rates):
            own_slots = {
                slot: [value[client] for value in values] for slot, values in slots.items()
            }
            own_grads = [grad[client] for grad in grads]
            update_([weight[client] for weight in weights], own_slots, own_grads, rate, self.age)


@dataclass
class StepBuffers:
    """Static buffers through which the separately captured parts of a step exchange data.

    They hold the batch, gradients, losses and masks of a step whose phases are drawn at random.
    """

    batches: dict[int, Batch]  # By batch size
    nested: dict[Member, Inner]  # Nested nets that have been drawn so far
    grads: Tensor  # (client, entry) Gradients, summed over the objectives of a phase
    views: State  # Views of `grads`, by weight name
    sums: Tensor  # (client,) Losses, summed over the objectives of a phase
    losses: Tensor  # (client,) Losses of the last phase
    mask: Tensor  # (1, entry) True where the phase may move
    before: State  # Weights before the step, to restore clients without a batch
    kept: dict[str, State]  # Optimizer slots before the step, for the same purpose

    @staticmethod
    def empty(unit: ClientGroup) -> StepBuffers:
        """Return buffers of zeros with the shapes of a client group."""
        grads = torch.zeros_like(unit._moving[0][_LINE])
        return StepBuffers(
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

    def nested_for(self, unit: ClientGroup, objective: Objective) -> Inner | None:
        """Return the nested net of an objective that runs only this net and reads no other weights.

        Its gradient is then taken with respect to that net's weights alone. The net is kept in the
        same memory, because captured steps read it there.

        Returns:
            The nested net, or None if the objective needs more than one net or the member
                itself.
        """
        nets = objective.nets(unit.member)
        if len(nets) != 1 or nets[0] == unit.member or not objective.reads_its_nets_alone:
            return None
        net = nets[0]
        if net not in self.nested:
            self.nested[net] = unit.engine.nested(unit.member, net, unit._lines)
        return self.nested[net]

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of the buffers."""
        for batch in self.batches.values():
            yield from _tensors_of(batch)
        yield from (self.grads, self.sums, self.losses, self.mask)
        yield from self.before.values()
        for values in self.kept.values():
            yield from values.values()


def _tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch that are not None."""
    values = (batch.inputs, batch.targets, batch.held, batch.key, batch.share, batch.taught)
    return [value for value in values if value is not None]


def _check_capturable(learner: Learner) -> None:
    """Refuse learners whose optimizer would have to count steps for every position."""
    partly = any(not isinstance(phase.moves, Everywhere) for phase in learner.phases)
    if learner.local.optimizer.ages and partly:
        raise CaptureError(
            f"{type(learner.local.optimizer).__name__} counts steps, and some positions do not move"
        )


def recorded(
    action: Callable[[], None], stream: torch.cuda.Stream, pool: Any = None, warm: int = _WARM
) -> torch.cuda.CUDAGraph:
    """Capture an action on static tensors as a CUDA graph.

    The action runs `warm` times before the capture.

    Args:
        action: Function without arguments that launches kernels.
        stream: Stream on which the action is captured.
        pool: Memory pool of the graph. Graphs may share one if they never run at the same time.
            None: a new pool.
        warm: Number of runs before the capture, in which kernels are chosen and workspace is
            allocated.

    Raises:
        CaptureError: The action cannot be captured.
    """
    stream.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(stream):
            for _ in range(warm):  # Kernels are chosen and workspace is allocated here
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
    """Empty torch's CUDA cache if little GPU memory is free.

    A graph cannot use the workspace of other graphs. Emptying the cache is slow, so it is done only
    if needed.
    """
    free, total = torch.cuda.mem_get_info()
    if _SCARCE * free < total:
        torch.cuda.empty_cache()


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable garbage collection.

    Destroying a graph while another one is captured would invalidate the capture.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _unsearched() -> Iterator[None]:
    """Let cuDNN choose kernels by heuristics instead of benchmarks.

    With many different shapes, benchmarking takes longer than it saves.
    """
    was_benchmarking = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = was_benchmarking


@contextmanager
def exact() -> Iterator[None]:
    """Compute products in full precision, whatever precision is set."""
    old_settings = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.autocast("cuda", enabled=False), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = old_settings


def stacked(states: Sequence[Weights]) -> State:
    """Stack the states of clients along a new first dimension.

    Clients that received the same tensors share them as an expanded view until they are changed.
    """
    first, stack = states[0], {}
    for name, value in first.items():
        values = [state[name] for state in states]
        same = all(candidate is value for candidate in values)
        stack[name] = value.expand(len(values), *value.shape) if same else torch.stack(values)
    return stack


def fails_alone(error: Exception) -> bool:
    """Return True if an error of a stack would or should also occur with one client at a time.

    A module that draws its own random numbers would run one by one, but differently in every run.
    Nobody would notice, so its error is raised.
    """
    return (
        isinstance(error, FedquiltError)
        or is_out_of_memory(error)
        or "vmap: called random" in str(error)
    )


def rewrite(own: State, new: Mapping[str, Tensor]) -> None:
    """Copy the values of `new` into the static tensors `own`."""
    names = [name for name in new if new[name] is not own[name]]
    matching_names = [name for name in names if new[name].stride() == own[name].stride()]
    # One launch copies all tensors of equal strides, provided that every pair matches.
    if matching_names:
        foreach_copy_(
            [own[name] for name in matching_names], [new[name] for name in matching_names]
        )
    for name in names:
        if new[name].stride() != own[name].stride():
            own[name].copy_(new[name])


def _put_back(own: State, before: State, who: Tensor) -> None:
    """Restore the values `before` for all clients that are False in `who`, (client,)."""
    for name, value in own.items():
        value.copy_(torch.where(who.view([-1] + [1] * (value.dim() - 1)), value, before[name]))


def _laid_out_as(grad: Tensor, weight: Tensor) -> Tensor:
    """Return a gradient with the strides of its weight.

    A fused optimizer step walks through memory, so that both need the same memory layout.
    """
    return grad if grad.stride() == weight.stride() else torch.empty_like(weight).copy_(grad)


def replay_time(units: list[ClientGroup], times: int = 10) -> float:
    """Return the seconds that a captured step of all groups takes when they overlap.

    Args:
        units: Client groups whose step is captured.
        times: Number of replays over which the time is averaged.
    """
    seconds = 0.0
    for _ in ("warm up", "measure"):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            for unit in units:
                unit.replay_alone()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / times
        for unit in units:
            unit.at.zero_()
    return seconds
