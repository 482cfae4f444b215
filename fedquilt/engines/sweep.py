"""A member's forward pass over many batches of one size, recorded once and replayed: for tests and norm statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.devices import channels_last
from fedquilt.engines.units import recorded, rewrite
from fedquilt.round.training.optimizers import State

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from fedquilt.terms import Weights

_CHUNK = 256  # batches whose samples are named on the device at once

Look = Callable[
    ["Weights", Tensor], State
]  # what is looked at in one batch of samples, given by their positions


class Sweep:
    """Sums what `look` sees over batches: `begin`, `play` batch by batch, `end` has the sums.

    Like a unit it keeps its tensors, knows nothing of rounds, and has a stream of its own: sweeps of unequal members
    overlap, if they are played by turns: a stream takes a few replays ahead, and then makes its caller wait.
    """

    def __init__(self, look: Look, weights: Weights, size: int, device: torch.device) -> None:
        self._look, self._graph = look, None
        self._weights = {name: channels_last(value.clone()) for name, value in weights.items()}
        self._rows = torch.zeros(_CHUNK, size, dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sums: State = {}
        self._batches = torch.zeros(0, size, dtype=torch.int64, device=device)
        self._played = 0
        self._follow()
        with self._on_stream():
            self._sums = {name: torch.zeros_like(value) for name, value in self._see().items()}
        if self._stream is not None:
            self._graph = recorded(self._step, self._stream)

    def begin(self, weights: Weights, batches: list[Tensor]) -> None:
        """Get ready to look at batches of equal size."""
        rewrite(self._weights, weights)
        self._batches, self._played = torch.stack(batches), 0
        self._follow()
        if self._stream is not None:
            self._batches.record_stream(
                self._stream
            )  # else its memory may be another's before it has been read
        with self._on_stream():
            torch._foreach_zero_(list(self._sums.values()))

    def play(self) -> bool:
        """Look at the next batch; False: there is none."""
        if self._played == len(self._batches):
            return False
        with self._on_stream():
            if self._played % _CHUNK == 0:
                some = self._batches[self._played : self._played + _CHUNK]
                self._rows[: len(some)] = some
                self._at.zero_()
            self._step() if self._graph is None else self._graph.replay()
        self._played += 1
        return True

    def end(self) -> State:
        """The sums, of all batches; they are the sweep's own until it begins again."""
        while self.play():
            pass
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        return self._sums

    def _step(self) -> None:
        seen = self._see()
        torch._foreach_add_(list(self._sums.values()), [seen[name] for name in self._sums])
        self._at += 1

    def _see(self) -> State:
        with torch.no_grad():
            return self._look(self._weights, self._rows.index_select(0, self._at)[0])

    def _follow(self) -> None:
        """What comes next on the sweep's stream sees what has been asked for until now."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def _on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()


def by_turns(sweeps: Iterable[Sweep]) -> None:
    """Play sweeps to their ends, side by side."""
    playing = list(sweeps)
    while playing:
        playing = [sweep for sweep in playing if sweep.play()]
