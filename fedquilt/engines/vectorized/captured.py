"""Captured forward passes of a member over many batches of one size.

They are used for evaluation and for norm statistics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.engines.vectorized.cuda_graph import capture
from fedquilt.engines.vectorized.stacking import rewrite
from fedquilt.hardware.device import channels_last
from fedquilt.hardware.torch_internals import foreach_add_, foreach_zero_
from fedquilt.round.training.optimizers import State

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedquilt.terms import Weights

CHUNK_BATCHES = 256  # Number of batches whose sample positions are on the device at once

# Function of weights and sample positions that returns the results for one batch, by name.
PassFunction = Callable[["Weights", Tensor], State]


class CapturedPass:
    """Forward pass over batches whose results are summed.

    A caller uses `begin`, then `replay` for every batch, then `end`, which returns the sums. Like a
    client group, a pass keeps its tensors, knows nothing of rounds, and has its own stream.

    Passes of unequal members overlap if their batches are replayed in turns. A stream accepts only
    a few replays in advance and then blocks its caller.

    Args:
        function: Function of weights and sample positions that is captured.
        weights: Weights, whose shapes are used. `begin` replaces the values.
        size: Samples in each batch.
        device: Device on which the pass runs.
    """

    def __init__(
        self, function: PassFunction, weights: Weights, size: int, device: torch.device
    ) -> None:
        self._function, self._graph = function, None
        self._weights = {name: channels_last(value.clone()) for name, value in weights.items()}
        self._rows = torch.zeros(CHUNK_BATCHES, size, dtype=torch.int64, device=device)
        self._chunk_batch = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._sums: State = {}
        self._batches = torch.zeros(0, size, dtype=torch.int64, device=device)
        self._num_replayed = 0
        self._wait_for_launched()
        with self._on_stream():
            self._sums = {name: torch.zeros_like(value) for name, value in self._results().items()}
        if self._stream is not None:
            self._graph = capture(self._step, self._stream)

    def begin(self, weights: Weights, batches: list[Tensor]) -> None:
        """Load weights and the positions of batches, and reset the sums to zero.

        Args:
            weights: Weights with the names and shapes of those at construction. They are copied.
            batches: Positions of each batch's samples, (sample,) on the device. All have the pass's
                size.
        """
        rewrite(self._weights, weights)
        self._batches, self._num_replayed = torch.stack(batches), 0
        self._wait_for_launched()
        if self._stream is not None:
            # Without this, the memory could be reused before the stream has read it.
            self._batches.record_stream(self._stream)
        with self._on_stream():
            foreach_zero_(list(self._sums.values()))

    def replay(self) -> bool:
        """Run the next batch. Return False if there is none."""
        if self._num_replayed == len(self._batches):
            return False
        with self._on_stream():
            if self._num_replayed % CHUNK_BATCHES == 0:
                chunk = self._batches[self._num_replayed : self._num_replayed + CHUNK_BATCHES]
                self._rows[: len(chunk)] = chunk
                self._chunk_batch.zero_()
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()
        self._num_replayed += 1
        return True

    def end(self) -> State:
        """Return the sums over all batches, after running those that remain.

        The tensors belong to the pass and are valid until it begins again.
        """
        while self.replay():
            pass
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._sums

    def _step(self) -> None:
        """Add the results of the current batch to the sums, and advance by one batch."""
        results = self._results()
        foreach_add_(list(self._sums.values()), [results[name] for name in self._sums])
        self._chunk_batch += 1

    def _results(self) -> State:
        """Return the results of the current batch by name. `_chunk_batch` says which one it is."""
        with torch.no_grad():
            return self._function(self._weights, self._rows.index_select(0, self._chunk_batch)[0])

    def _wait_for_launched(self) -> None:
        """Let the pass's stream wait for all work that has been launched so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _on_stream(self) -> AbstractContextManager[object]:
        """Return a context in which kernels are launched on the pass's stream."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def by_turns(passes: Iterable[CapturedPass]) -> None:
    """Run all remaining batches of several passes in turns, so that the passes overlap."""
    running = list(passes)
    while running:
        running = [captured for captured in running if captured.replay()]
