"""Tests of many nets and their norm statistics, in few passes: one large batch, a stack, or recorded and replayed."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
from fedquilt.round.serve import Kind, Score, mean_statistics
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


@dataclass(frozen=True)
class Part:
    """One batch of an exam."""

    place: int  # The exam's place among all.
    number: int  # The batch's place in the exam.
    rows: Tensor  # Positions of its samples, on the device.
    kept: Tensor | None = (
        None  # (sample,) True for samples whose outputs are kept. None: no metric needs them.
    )


@dataclass
class Totals:
    """Sums of the metrics of exams, on the device, and the outputs that were kept, on the CPU."""

    count: int  # Exams.
    sums: State = field(default_factory=dict)  # (exam, …) by metric.
    kept: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(
        default_factory=dict
    )  # By exam and batch.

    def add(self, places: Sequence[int], sums: Mapping[str, Tensor]) -> None:
        """Add the sums (batch, …) of batches of exams at these places, which ascend.

        Batches of one exam are summed first, so that no two entries are added to one place at the same
        time. On a GPU the order of such additions changes from run to run, and with it the last digit.
        """
        lengths = {place: len(list(same)) for place, same in groupby(places)}
        device = next(iter(sums.values())).device if sums else None
        index = torch.tensor(list(lengths), device=device)
        for name, value in sums.items():
            if name not in self.sums:
                self.sums[name] = value.new_zeros(self.count, *value.shape[1:])
            if len(lengths) < len(places):
                value = torch.stack(
                    [some.sum(0) for some in value.split_with_sizes(list(lengths.values()))]
                )
            self.sums[name].index_add_(0, index, value)

    def keep(self, part: Part, outputs: Tensor, targets: Tensor) -> None:
        """Keep the outputs of one batch, as far as they are asked for."""
        assert part.kept is not None, "a metric that needs outputs has said of which samples"
        chosen = outputs.cpu()[part.kept], targets.cpu()[part.kept]
        self.kept.setdefault(part.place, {})[part.number] = chosen

    def scores(self, exams: Sequence[Exam]) -> list[Score]:
        """Return the score of every exam."""
        sums = {name: value.cpu() for name, value in self.sums.items()}
        found = []
        for place, exam in enumerate(exams):
            own = {name: value[place] for name, value in sums.items()}
            batches = [
                pair
                for _, pair in sorted(self.kept.get(place, {}).items(), key=lambda item: item[0])
            ]
            outputs = torch.cat([one for one, _ in batches]) if batches else None
            targets = torch.cat([one for _, one in batches]) if batches else None
            found.append(Score(exam.label, own, outputs, targets))
        return found


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
        task, totals = self.world.task, Totals(len(exams))
        work: dict[tuple[Kind, int, float | None], list[Part]] = {}
        swept: dict[
            Hashable, tuple[int, Swept]
        ] = {}  # by net: its exams take turns on one recording
        for place, exam in enumerate(exams):
            kind = exam.kind(self.engine.method.local.norm)
            size = self._exam_size(kind, batch_size)
            batches = batched(exam.samples.to(self.engine.device), size)
            if exam.held is None and not task.collected:  # a recording has sums alone
                net = id(exam.weights), kind
                if net in swept:
                    before, sweep = swept.pop(net)
                    totals.add([before], _lead(self._end(sweep)))
                begun, batches = self._sweep(kind, exam.weights, batches)
                if begun:
                    swept[net] = place, begun
            kept = batched(exam.kept(task), size) if task.collected else [None] * len(batches)
            absent = None if exam.held is None else exam.absent
            for number, (rows, chosen) in enumerate(zip(batches, kept, strict=True)):
                work.setdefault((kind, len(rows), absent), []).append(
                    Part(place, number, rows, chosen)
                )
        by_turns(sweep for _, (_, sweep) in swept.values())
        for (kind, size, absent), some in work.items():
            most = self._batches_at_once(self._widest(kind.nets), size)
            for first in range(0, len(some), most):
                now = some[first : first + most]
                self._test(kind, exams, now, absent, totals)
        for place, sweep in swept.values():
            totals.add([place], _lead(self._end(sweep)))
        return totals.scores(exams)

    def _test(
        self,
        kind: Kind,
        all_exams: Sequence[Exam],
        parts: list[Part],
        absent: float | None,
        totals: Totals,
    ) -> None:
        """Test batches of exams of one kind, and add what was found to the totals.

        Args:
            kind: What is run, the same for all of the batches.
            all_exams: Exams, by place.
            parts: Batches of equal size.
            absent: Output that replaces those of classes that a client lacks. None: all classes count.
            totals: Sums and outputs so far.
        """
        exams, rows = [all_exams[part.place] for part in parts], [part.rows for part in parts]
        sums, outputs, targets = self._tested(kind, exams, rows, absent)
        totals.add([part.place for part in parts], sums)
        if outputs is not None:
            for part, own, own_targets in zip(parts, outputs, targets, strict=True):
                totals.keep(part, own, own_targets)

    def _tested(
        self, kind: Kind, exams: list[Exam], rows: list[Tensor], absent: float | None
    ) -> tuple[State, Tensor | None, Tensor]:
        """Return sums (batch, …) by metric; outputs (batch, sample, class, …) if a metric needs them; and targets."""
        masked, task = absent is not None, self.world.task
        hidden = -torch.inf if absent is None else absent

        def run(weights: Weights, inputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
            drawn = kind.drawn(self.world.seed, rows, inputs)
            return kind.logits(self.world, weights, inputs, targets, drawn)

        def measure(outputs: Tensor, targets: Tensor, held: Tensor | None) -> State:
            return task.sums(outputs, targets, held, hidden)

        def one(
            weights: Weights, inputs: Tensor, targets: Tensor, rows: Tensor, held: Tensor | None
        ) -> tuple[State, State]:
            outputs = run(weights, inputs, targets, rows)
            return measure(outputs, targets, held), {"outputs": outputs} if task.collected else {}

        # Nothing to stack, and plain kernels are faster; or it cannot be.
        if len(exams) == 1 or any(net.arch in self.engine.single for net in kind.nets):
            found, all_targets = [], []
            with torch.no_grad():
                for exam, own in zip(exams, rows, strict=True):
                    inputs, targets = self.engine.samples(kind, own)
                    found.append(one(exam.weights, inputs, targets, own, exam.held))
                    all_targets.append(targets)
            sums = {name: torch.stack([own[name] for own, _ in found]) for name in found[0][0]}
            kept = [own["outputs"] for _, own in found if own]
            return sums, torch.stack(kept) if kept else None, torch.stack(all_targets)
        shared = all(exam.weights is exams[0].weights for exam in exams)
        index = torch.stack(rows)
        held = (
            torch.stack([exam.held for exam in exams if exam.held is not None]) if masked else None
        )
        inputs, targets = self.engine.samples(kind, index)
        if shared and not self._mixes(kind):  # nobody depends on who else is there: one large batch
            with torch.no_grad():
                flat = index.flatten()
                together = run(exams[0].weights, inputs.flatten(0, 1), targets.flatten(0, 1), flat)
                outputs = together.reshape(*index.shape, *together.shape[1:])
                sums = vmap(measure, in_dims=(0, 0, 0 if masked else None))(outputs, targets, held)
                return sums, outputs if task.collected else None, targets
        weights = exams[0].weights if shared else stacked([exam.weights for exam in exams])
        with torch.no_grad():
            mapped = vmap(one, in_dims=(None if shared else 0, 0, 0, 0, 0 if masked else None))
            try:
                sums, kept_outputs = mapped(weights, inputs, targets, index, held)
                return sums, kept_outputs.get("outputs"), targets
            except Exception as error:
                if fails_alone(error):
                    raise
                for net in kind.nets:
                    self.engine.set_apart(net.arch, first_line(error))
                return self._tested(kind, exams, rows, absent)

    def calibrate(
        self, nets: Sequence[tuple[Kind, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
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
            return kind.statistics(self.world, weights, inputs, targets, drawn)

        def together(now: list[Tensor]) -> list[State]:
            index = torch.stack(now)
            some = vmap(one)(*self.engine.samples(kind, index), index)
            return [
                {name: value[place] for name, value in some.items()} for place in range(len(now))
            ]

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

    def _sweep(
        self, kind: Kind, weights: Weights, batches: list[Tensor]
    ) -> tuple[Swept | None, list[Tensor]]:
        """Begin a recorded sweep over those batches that are of full size, if that pays; and the other batches."""
        size = len(batches[0]) if batches else 0
        whole = [rows for rows in batches if len(rows) == size]
        # A recorded attack has the seed in it.
        key = kind, size, tuple(weights), self.world.seed, self.world.task
        if not self.engine.recorded or len(whole) < _SWEPT or key in self.unswept:
            return None, batches
        if self.engine.need(self._widest(kind.nets), size, 0) > self.engine.memory:
            return None, batches
        idle = self.sweeps.setdefault(key, [])
        try:
            sweep = (
                idle.pop() if idle else Sweep(self._look(kind), weights, size, self.engine.device)
            )
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
        """Return what a sweep measures in a batch: norm statistics, or sums of metrics."""
        engine, world, seed = self.engine, self.world, self.world.seed

        def measured(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(kind, rows)
            inputs = channels_last(stored)
            return kind.statistics(world, weights, inputs, targets, kind.drawn(seed, rows, inputs))

        def tested(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(kind, rows)
            inputs = channels_last(stored)
            logits = kind.logits(world, weights, inputs, targets, kind.drawn(seed, rows, inputs))
            return world.task.sums(logits, targets)

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
        return min(
            batch_size, max(_SMALLEST, _AT_ONCE * _SMALLEST // self._activations(arch, _SMALLEST))
        )

    def _mixes(self, kind: Kind) -> bool:
        """Whether an answer may depend on who else is tested: also on stored statistics, if some norm stores none."""
        return kind.mode.statistics == "batch" or self.world.family.mixes(kind.mode)

    def _activations(self, arch: Arch, batch_size: int) -> int:
        """The bytes of what a training step keeps for its way back."""
        return max(
            1,
            self.world.family.member(arch).activations(batch_size) * self.world.dtype.itemsize // 4,
        )


def _lead(sums: Mapping[str, Tensor]) -> State:
    """Return the sums of one exam as those of one batch."""
    return {name: value.unsqueeze(0) for name, value in sums.items()}
