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

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.engines.vectorized.cuda_graph import WARMUP_RUNS, capture, unsearched
from fedquilt.engines.vectorized.group_step import GroupStep
from fedquilt.engines.vectorized.group_tensors import Shape
from fedquilt.engines.vectorized.layout_check import check_grouped
from fedquilt.engines.vectorized.stack import Stack
from fedquilt.engines.vectorized.stacked_step import train_step
from fedquilt.engines.vectorized.stacking import rewrite
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.torch_internals import (
    foreach_zero_,
)

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


# Number of steps of an unusual batch size that a group runs without capture. A capture takes about
# as long as so many steps, because the step runs up to three times for it.
MIN_UNUSUAL_STEPS = 4


class ClientGroup(GroupStep):
    """Clients of one member that train together on static tensors.

    A caller uses `load`, then `run_step` for every step, then `unload`.

    Args:
        engine: Engine that the group belongs to.
        shape: Member, learner, number of clients and layout of the group.

    Raises:
        CaptureError: Steps of the learner cannot be captured.
        GroupingError: The layout is "grouped", and the nets cannot be computed side by side.
    """

    def __init__(self, engine: Vectorized, shape: Shape) -> None:
        super().__init__(engine, shape)
        device, on_gpu = engine.device, engine.device.type == "cuda"
        # Learner of the loaded clients. Phases that are drawn at random depend on its round.
        self._learner = shape.learner
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.ragged = False  # True if a client has no captured batch in some step of the chunk
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._unusual: Counter[int] = Counter()  # Number of steps of each unusual batch size
        self._pool = torch.cuda.graph_pool_handle() if on_gpu else None
        if self.net is not None:
            check_grouped(self, self.net)

    # --- a round ---------------------------------------------------------------------------------

    def load(self, stack: Stack) -> None:
        """Copy the starting state of a stack's clients into the group's static tensors.

        Afterwards the stack refers to the group's tensors.
        """
        self._stack, self._learner = stack, stack.learner
        rewrite(self.state, stack.state)
        # Both have the same memory layout, so that one launch is enough.
        rewrite(self.received.weights, self.state)
        for slot, values in self.received.slots.items():
            rewrite(values, stack.received.slots[slot])
        for slot, values in self.slots.items():
            if stack.slots is None:
                foreach_zero_(list(values.values()))
            else:
                rewrite(values, stack.slots[slot])
        self.class_masks.copy_(stack.class_masks)
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

        A captured step trains all clients of the group, also those that have no batch of this size.
        Their weights and slots are restored afterwards. Without that, they would train on stale
        batches (`test_every_method_gives_the_same_numbers_in_every_layout`, with `record=True`).

        Args:
            step: Step within the round.
        """
        if step >= len(self._stack.losses):
            return
        with self._on_stream():
            if step % self.chunk_steps == 0:
                self._fill(step)
            size = self._sizes[step % self.chunk_steps]
            if size:
                # Where sizes vary, searching for the fastest kernels takes longer than it saves.
                is_usual = size == self.shape.learner.local.batch_size
                with nullcontext() if is_usual else unsearched():
                    self._replay(
                        step, size, masked=self._stack.sizes_at(step) != [size] * self.shape.count
                    )
            else:
                self.chunk_step += 1
                self.age += len(self.shape.learner.phases)
            for clients in self._stack.groups(step):
                if self._stack.sizes[clients[0]][step] != size:
                    # These steps have many combinations of batch size and number of clients.
                    with unsearched():
                        train_step(self.engine, self._stack, step, clients)
                    self._take_back()

    def _size(self, step: int) -> int:
        """Return the batch size that the captured graph handles in a step, or 0 for none.

        It is the full batch size, or the size of a last batch that all clients share if it occurs
        often.
        """
        full, sizes = self.shape.learner.local.batch_size, self._stack.sizes_at(step)
        if sizes == [sizes[0]] * self.shape.count:
            return sizes[0] if sizes[0] == full or self._is_usual(sizes[0]) else 0
        return full if self._masking and full in sizes else 0

    def _is_usual(self, size: int) -> bool:
        """Return True if capturing steps of this batch size pays off.

        Every size is captured anew. On a GPU each call counts as one step, and the result is True
        after `MIN_UNUSUAL_STEPS` of them. On a CPU it is always True.
        """
        if self.stream is None:
            return True
        self._unusual[size] += 1
        return self._unusual[size] > MIN_UNUSUAL_STEPS

    def num_unusual_steps(self, sizes: Collection[int]) -> int:
        """Return how many steps of some unusual batch sizes the group has run on a GPU.

        Args:
            sizes: The batch sizes. The usual size has no effect.
        """
        return sum(self._unusual[size] for size in sizes)

    @property
    def _masking(self) -> bool:
        """Return True if clients without a batch take part in a step and are restored afterwards.

        This saves kernel launches but no computation.
        """
        return self.stream is not None or bool(self.engine.record)

    def _fill(self, step: int) -> None:
        """Prepare the next `chunk_steps` steps of the round, beginning with `step`.

        Batch positions, learning rates and random keys are copied into the static tensors. The
        losses of the previous chunk are copied to the stack before.
        """
        stack = self._stack
        self._report(step)
        steps = range(step, min(step + self.chunk_steps, len(stack.losses)))
        self._sizes = [self._size(later_step) for later_step in steps]
        rows = torch.zeros(self.rows.shape, dtype=torch.int64)  # (step, client, sample)
        active = torch.zeros(self.active.shape, dtype=torch.bool)  # (step, client)
        for client, batches in enumerate(stack.batches):
            client_sizes = stack.sizes[client][step : steps.stop]
            for length in dict.fromkeys(self._sizes):
                offsets = [
                    offset
                    for offset, size in enumerate(client_sizes)
                    if size == length == self._sizes[offset]
                ]
                if offsets:
                    rows[offsets, client, :length] = torch.stack(
                        [batches[step + offset] for offset in offsets]
                    )
                    active[offsets, client] = True
        device = self.chunk_step.device
        self.rows.copy_(to_device_async(device, rows))
        self.active.copy_(to_device_async(device, active))
        self.ragged = not bool(active[: len(steps)].all())
        if not self._learner.local.within_round.is_constant:
            self.rates.copy_(to_device_async(device, self._rates_of(steps)))
        chunk = torch.arange(step, step + self.chunk_steps, device=device)[:, None]
        self.noise.copy_(noise.fold_in(self.keys, chunk))
        self.chunk_step.zero_()

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
        """Copy the losses of the chunk that ends before a step to the stack.

        The stack already has the losses of steps that ran without capture, and these are kept.

        Args:
            step: First step after the chunk. 0 has no effect.
        """
        if step:
            first = (step - 1) // self.chunk_steps * self.chunk_steps
            stack_losses, group_losses = self._stack.losses[first:step], self.losses[: step - first]
            if self.ragged:
                group_losses = torch.where(self.active[: step - first], group_losses, stack_losses)
            stack_losses.copy_(group_losses)

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
        """Return a context in which kernels are launched on the group's stream."""
        return torch.cuda.stream(self.stream) if self.stream is not None else nullcontext()

    # --- captured steps --------------------------------------------------------------------------

    def capture_step(self, masked: bool = False) -> None:
        """Capture a step of full batches, or its first parts if its phases are drawn at random.

        On a CPU, nothing is captured.

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
        """Return the graph of an action, and capture it on the first call for its key.

        Before a capture the action may run a few times to warm up. All tensors that it changes
        (`_tensors`) are restored afterwards.

        Args:
            key: Key under which the graph is stored.
            action: Part of a step, which works on the group's static tensors.
        """
        if key not in self._graphs:
            assert self.stream is not None
            changed_tensors = [*self._tensors()]
            old_values = [value.clone() for value in changed_tensors]
            # Kernels are known if a group of equal shape has captured this action. Workspace is
            # allocated if this group has captured anything.
            unknown = [(self.shape, key) not in self.engine.groups.warm, not self._graphs]
            warmup_runs = WARMUP_RUNS if all(unknown) else int(any(unknown))
            self._graphs[key] = capture(action, self.stream, self._pool, warmup_runs)
            self.engine.groups.warm.add((self.shape, key))
            for value, old in zip(changed_tensors, old_values, strict=True):
                value.copy_(old)
            self.stream.wait_stream(torch.cuda.current_stream())
        return self._graphs[key]

    def _tensors(self) -> Iterator[Tensor]:
        """Yield every tensor that a step changes."""
        yield from self.state.values()
        for values in self.slots.values():
            yield from values.values()
        yield from (self.losses, self.chunk_step, self.age)
        if self._buffers is not None:
            yield from self._buffers.tensors()

    def _replay(self, step: int, size: int, masked: bool) -> None:
        """Run one step: replay what is captured, and call everything else.

        On a GPU, parts that are not captured yet are captured first.

        Args:
            step: Step within the round, which decides on random phases.
            size: Samples in each client's batch.
            masked: True if some clients have no batch of this size. They are restored afterwards.
        """
        for key, action in self._actions(self._learner.phases_at(step), size, masked):
            if key is None or self.stream is None:
                action()
            else:
                self._captured(key, action).replay()

    def replay_alone(self) -> None:
        """Run one step of full batches on the current contents of the static tensors."""
        with self._on_stream():
            self._replay(0, self.shape.learner.local.batch_size, masked=False)


def replay_time(groups: list[ClientGroup], times: int = 10) -> float:
    """Return the seconds that a captured step of all groups takes when they overlap.

    Args:
        groups: Client groups whose step is captured.
        times: Number of replays over which the time is averaged.
    """
    seconds = 0.0
    for _ in ("warm up", "measure"):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            for group in groups:
                group.replay_alone()
        torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / times
        for group in groups:
            group.chunk_step.zero_()
    return seconds
