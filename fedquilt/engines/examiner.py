"""Tests of many nets and their norm statistics, in few passes: one large batch, a stack, or recorded and replayed."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt.devices import channels_last
from fedquilt.engines.exams import Exam
from fedquilt.engines.sweep import Look, Sweep, by_turns
from fedquilt.engines.units import CaptureError, fails_alone, stacked
from fedquilt.errors import first_line
from fedquilt.round.federation import World
from fedquilt.round.serve import Kind, Score, mean_statistics, right
from fedquilt.round.training.batches import batched
from fedquilt.round.training.optimizers import State
from fedquilt.terms import Arch, Mix, Weights

if TYPE_CHECKING:
    from fedquilt.engines.vectorised import Vectorised

_log = logging.getLogger(__name__)
# Bytes that are worked on at once on a CPU: with more, the system hands out and takes back pages for every operation.
_AT_ONCE = 64 << 20
_SMALLEST = 16  # samples tested at once
_SWEPT = 4  # batches from which on recording a pass pays
Swept = tuple[Hashable, Sweep]


class Examiner:
    """Tests nets, and measures their norms, for the engine that trains them."""

    def __init__(self, engine: Vectorised) -> None:
        self.engine = engine
        self.forget()

    @property
    def world(self) -> World:
        return self.engine.world

    def forget(self) -> None:
        """Drop what was recorded, because the family or the place of the samples has changed."""
        self.sweeps: dict[Hashable, list[Sweep]] = {}
        self.unswept: set[Hashable] = set()  # what cannot be recorded

    def evaluate(self, exams: Sequence[Exam], batch_size: int) -> list[Score]:
        """Exams of equal member are batched: same weights as more samples, different weights as a stack.

        Where steps are recorded, whole batches of a long exam are too.
        """
        totals = torch.zeros(len(exams), 2, dtype=torch.int64, device=self.engine.device)
        work: dict[tuple[Kind, int, float | None], list[tuple[int, Tensor]]] = {}
        swept: dict[Hashable, tuple[int, Swept]] = {}  # by net: its exams take turns on one recording
        for place, exam in enumerate(exams):
            kind = exam.kind(self.engine.method.local.norm)
            size = self._exam_size(kind, batch_size)
            batches = batched(exam.samples.to(self.engine.device), size)
            if exam.held is None:
                net = id(exam.weights), kind
                if net in swept:
                    before, sweep = swept.pop(net)
                    totals[before] += self._end(sweep)["right"]
                begun, batches = self._sweep(kind, exam.weights, batches)
                if begun:
                    swept[net] = place, begun
            for rows in batches:
                absent = None if exam.held is None else exam.absent
                work.setdefault((kind, len(rows), absent), []).append((place, rows))
        by_turns(sweep for _, (_, sweep) in swept.values())
        for (kind, size, absent), some in work.items():
            most = self._batches_at_once(self._widest(kind.nets), size)
            for first in range(0, len(some), most):
                now = some[first : first + most]
                totals.index_add_(
                    0,
                    torch.tensor([place for place, _ in now], device=self.engine.device),
                    self._right(kind, [exams[place] for place, _ in now], [rows for _, rows in now], absent),
                )
        for place, sweep in swept.values():
            totals[place] += self._end(sweep)["right"]
        return [Score(exam.label, hits, n) for exam, (hits, n) in zip(exams, totals.tolist(), strict=True)]

    def _right(self, kind: Kind, exams: list[Exam], rows: list[Tensor], absent: float | None) -> Tensor:
        """Count right predictions and targets of exams of one kind, each on a batch of its own.

        `absent` is the logit of classes that a client lacks; None if the exams count all classes.
        """
        masked = absent is not None
        count_right = right if absent is None else partial(right, absent=absent)

        def run(weights: Weights, inputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
            drawn = kind.drawn(self.world.seed, rows, inputs)
            return kind.logits(self.world.family, weights, inputs, targets, drawn)

        def one(weights: Weights, inputs: Tensor, targets: Tensor, rows: Tensor, held: Tensor | None) -> Tensor:
            return count_right(run(weights, inputs, targets, rows), targets, held)

        # Nothing to stack, and plain kernels are faster; or it cannot be.
        if len(exams) == 1 or any(net.arch in self.engine.single for net in kind.nets):
            with torch.no_grad():
                scores = [
                    one(exam.weights, *self.engine.samples(kind, own), own, exam.held)
                    for exam, own in zip(exams, rows, strict=True)
                ]
            return torch.stack(scores)
        shared = all(exam.weights is exams[0].weights for exam in exams)
        index = torch.stack(rows)
        held = torch.stack([exam.held for exam in exams if exam.held is not None]) if masked else None
        inputs, targets = self.engine.samples(kind, index)
        if shared and not self._mixes(kind):  # nobody depends on who else is there: one large batch
            with torch.no_grad():
                flat = index.flatten()
                together = run(exams[0].weights, inputs.flatten(0, 1), targets.flatten(0, 1), flat)
                logits = together.reshape(*index.shape, *together.shape[1:])
                return vmap(count_right, in_dims=(0, 0, 0 if masked else None))(logits, targets, held)
        weights = exams[0].weights if shared else stacked([exam.weights for exam in exams])
        with torch.no_grad():
            mapped = vmap(one, in_dims=(None if shared else 0, 0, 0, 0, 0 if masked else None))
            try:
                return mapped(weights, inputs, targets, index, held)
            except Exception as error:
                if fails_alone(error):
                    raise
                for net in kind.nets:
                    self.engine.set_apart(net.arch, first_line(error))
                return self._right(kind, exams, rows, absent)

    def calibrate(self, nets: Sequence[tuple[Kind, Weights]], batches: list[Tensor]) -> list[dict[str, Tensor]]:
        """The norm statistics of each net over the batches."""
        swept = [self._sweep(kind, weights, batches) for kind, weights in nets]
        by_turns(begun[1] for begun, _ in swept if begun)
        found = []
        for (kind, weights), (sweep, rest) in zip(nets, swept, strict=True):
            measured = self._measured(kind, weights, rest)
            if sweep:
                measured.append(self._end(sweep))
            found.append(mean_statistics(measured, len(batches)))
        return found

    def _measured(self, kind: Kind, weights: Weights, batches: list[Tensor]) -> list[State]:
        """The norm statistics of each batch."""
        arch = kind.nets[0].arch
        by_size: dict[int, list[Tensor]] = {}
        for rows in batches:
            by_size.setdefault(len(rows), []).append(rows)

        def one(inputs: Tensor, targets: Tensor, rows: Tensor) -> dict[str, Tensor]:
            drawn = kind.drawn(self.world.seed, rows, inputs)
            return kind.statistics(self.world.family, weights, inputs, targets, drawn)

        def together(now: list[Tensor]) -> list[State]:
            index = torch.stack(now)
            some = vmap(one)(*self.engine.samples(kind, index), index)
            return [{name: value[place] for name, value in some.items()} for place in range(len(now))]

        measured: list[State] = []
        for size, alike in by_size.items():
            most = self._batches_at_once(arch, size)
            for first in range(0, len(alike), most):
                now = alike[first : first + most]
                with torch.no_grad():
                    if most > 1 and arch not in self.engine.single:
                        try:
                            measured += together(now)
                            continue
                        except Exception as error:
                            if fails_alone(error):
                                raise
                            self.engine.set_apart(arch, first_line(error))
                    measured += [one(*self.engine.samples(kind, rows), rows) for rows in now]
        return measured

    # --- recorded passes ----------------------------------------------------------------------------------------

    def _sweep(self, kind: Kind, weights: Weights, batches: list[Tensor]) -> tuple[Swept | None, list[Tensor]]:
        """Begin a recorded sweep over those batches that are of full size, if that pays; and the other batches."""
        size = len(batches[0]) if batches else 0
        whole = [rows for rows in batches if len(rows) == size]
        # A recorded attack has the seed in it.
        key = kind, size, tuple(weights), self.world.seed
        if not self.engine.recorded or len(whole) < _SWEPT or key in self.unswept:
            return None, batches
        if self.engine.need(self._widest(kind.nets), size, 0) > self.engine.memory:
            return None, batches
        idle = self.sweeps.setdefault(key, [])
        try:
            sweep = idle.pop() if idle else Sweep(self._look(kind), weights, size, self.engine.device)
        except CaptureError as error:
            self.unswept.add(key)
            _log.warning("the evaluation of a member cannot be recorded: %s", error)
            return None, batches
        sweep.begin(weights, whole)
        return (key, sweep), [rows for rows in batches if len(rows) != size]

    def _end(self, swept: Swept) -> State:
        key, sweep = swept
        self.sweeps[key].append(sweep)
        return sweep.end()

    def _look(self, kind: Kind) -> Look:
        """What a sweep sees in a batch: norm statistics of training samples, or right answers on test samples."""
        engine, family, seed = self.engine, self.world.family, self.world.seed

        def measured(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(kind, rows)
            inputs = channels_last(stored)
            return kind.statistics(family, weights, inputs, targets, kind.drawn(seed, rows, inputs))

        def tested(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(kind, rows)
            inputs = channels_last(stored)
            logits = kind.logits(family, weights, inputs, targets, kind.drawn(seed, rows, inputs))
            return {"right": right(logits, targets, None)}

        return measured if kind.mode.statistics == "measure" else tested

    # --- how much at once --------------------------------------------------------------------------------------

    def _widest(self, nets: Mix) -> Arch:
        """Of several nets, which run one after another, the one that needs most."""
        return max((net.arch for net in nets), key=self.world.family.count)

    def _batches_at_once(self, arch: Arch, batch_size: int) -> int:
        """How many batches of a member are tested at once: on a CPU few."""
        if self.engine.device.type == "cuda":
            return max(1, self.engine.memory // self.engine.need(arch, batch_size, 0))
        return max(1, _AT_ONCE // self._activations(arch, batch_size))

    def _exam_size(self, kind: Kind, batch_size: int) -> int:
        """The batches a test is cut into: on a CPU smaller ones, where nothing depends on who is tested together."""
        if self.engine.device.type == "cuda" or self._mixes(kind):
            return batch_size
        arch = self._widest(kind.nets)
        return min(batch_size, max(_SMALLEST, _AT_ONCE * _SMALLEST // self._activations(arch, _SMALLEST)))

    def _mixes(self, kind: Kind) -> bool:
        """Whether an answer may depend on who else is tested: also on stored statistics, if some norm stores none."""
        return kind.mode.statistics == "batch" or self.world.family.mixes(kind.mode)

    def _activations(self, arch: Arch, batch_size: int) -> int:
        """The bytes of what a training step keeps for its way back."""
        return max(1, self.world.family.member(arch).activations(batch_size) * self.world.dtype.itemsize // 4)
