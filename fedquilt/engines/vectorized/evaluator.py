"""Evaluation and norm statistics of many nets in few forward passes.

Batches are joined into one large batch, stacked by vmap, or run by a captured pass. On a GPU cuDNN
searches for the fastest kernels only for captured passes. The sizes of other batches vary, and
searching anew for each size would take longer than it saves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.func import vmap

from fedquilt.engines.samples import EvalSamples
from fedquilt.engines.vectorized.captured import CapturedPass, PassFunction, by_turns
from fedquilt.engines.vectorized.cuda_graph import CaptureError, unsearched
from fedquilt.engines.vectorized.failures import fails_alone
from fedquilt.engines.vectorized.stacking import add_lead, stacked
from fedquilt.engines.vectorized.totals import ScorePart, Totals
from fedquilt.errors import first_line
from fedquilt.hardware.device import channels_last
from fedquilt.round.eval_jobs import EvalSpec
from fedquilt.round.federation import World
from fedquilt.round.norm_statistics import mean_statistics
from fedquilt.round.scores import Score
from fedquilt.round.training.batches import batched
from fedquilt.round.training.optimizers import State
from fedquilt.terms import Arch, Submodels, Weights

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized

# Bytes of activations that are computed at once on a CPU. With more, the system allocates and frees
# pages for every operation.
CPU_ACTIVATION_BYTES = 64 << 20
MIN_SAMPLES = 16  # Least number of samples that are evaluated at once
MIN_CAPTURED_BATCHES = 4  # Least number of full batches for which a captured pass pays off
KeyedPass = tuple[Hashable, CapturedPass]  # Captured pass, with the key of its EvalSpec
# Sums (batch, …) by metric; outputs (batch, sample, class, …) if a metric needs them, or None; and
# targets (batch, sample, …).
Results = tuple[State, Tensor | None, Tensor]


class Evaluator:
    """Evaluation and norm statistics for the engine that trains the nets.

    Args:
        engine: Engine that has the samples and the family.
    """

    def __init__(self, engine: Vectorized) -> None:
        self.engine = engine
        self.forget()

    @property
    def world(self) -> World:
        """Return the world of the federation of the call in progress."""
        return self.engine.world

    def forget(self) -> None:
        """Drop captured passes, because the family or the address of the samples has changed."""
        self.idle_passes: dict[Hashable, list[CapturedPass]] = {}  # Captured passes by key
        self.uncapturable: set[Hashable] = set()  # Keys of passes that cannot be captured

    def evaluate(self, evaluations: Sequence[EvalSamples], batch_size: int) -> list[Score]:
        """Return the score of every evaluation.

        Evaluations of equal members run together. Those with the same weights form a larger batch,
        those with different weights a stack. Where steps are captured, full batches of a long
        evaluation are captured too.

        Args:
            evaluations: Evaluations to run.
            batch_size: Most samples in a batch. A CPU may use fewer if this does not change the
                outputs.
        """
        task, totals = self.world.task, Totals(len(evaluations))
        work: dict[tuple[EvalSpec, int, float | None], list[ScorePart]] = {}
        # Captured passes by net. Evaluations of one net take turns on one captured pass.
        running: dict[Hashable, tuple[int, KeyedPass]] = {}
        for position, evaluation in enumerate(evaluations):
            spec = evaluation.spec(self.engine.method.local.norm)
            size = self._batch_size(spec, batch_size)
            batches = batched(evaluation.samples.to(self.engine.device), size)
            # A captured pass gives only sums.
            if evaluation.class_mask is None and not task.collected:
                net = id(evaluation.weights), spec
                if net in running:
                    previous, captured = running.pop(net)
                    totals.add([previous], add_lead(self._end_pass(captured)))
                begun, batches = self._begin_pass(spec, evaluation.weights, batches)
                if begun:
                    running[net] = position, begun
            masks = (
                batched(evaluation.stored_mask(task), size)
                if task.collected
                else [None] * len(batches)
            )
            absent = None if evaluation.class_mask is None else evaluation.absent
            for number, (rows, mask) in enumerate(zip(batches, masks, strict=True)):
                work.setdefault((spec, len(rows), absent), []).append(
                    ScorePart(position, number, rows, mask)
                )
        by_turns(captured for _, (_, captured) in running.values())
        for (spec, size, absent), parts in work.items():
            max_batches = self._batches_at_once(self._widest(spec.nets), size)
            for first in range(0, len(parts), max_batches):
                chunk = parts[first : first + max_batches]
                self._run_batches(spec, evaluations, chunk, absent, totals)
        for position, captured in running.values():
            totals.add([position], add_lead(self._end_pass(captured)))
        return totals.scores(evaluations)

    def _run_batches(
        self,
        spec: EvalSpec,
        all_evaluations: Sequence[EvalSamples],
        parts: list[ScorePart],
        absent: float | None,
        totals: Totals,
    ) -> None:
        """Run batches of evaluations of one spec, and add the results to the totals.

        Args:
            spec: Forward pass, the same for all of the batches.
            all_evaluations: All evaluations.
            parts: Batches of equal size.
            absent: Output that replaces those of classes that a client lacks. None: all classes
                count.
            totals: Sums and outputs so far.
        """
        evaluations, rows = (
            [all_evaluations[part.evaluation_index] for part in parts],
            [part.rows for part in parts],
        )
        with unsearched():
            sums, outputs, targets = self._results(spec, evaluations, rows, absent)
        totals.add([part.evaluation_index for part in parts], sums)
        if outputs is not None:
            for part, batch_outputs, batch_targets in zip(parts, outputs, targets, strict=True):
                totals.store(part, batch_outputs, batch_targets)

    def _results(
        self,
        spec: EvalSpec,
        evaluations: list[EvalSamples],
        rows: list[Tensor],
        absent: float | None,
    ) -> Results:
        """Return the results of batches of equal size, in the order of the batches.

        Batches of one net are joined if outputs do not depend on the batch. All others are stacked
        by vmap. If vmap fails, the members are marked as unstackable, and the batches run one by
        one.

        Args:
            spec: Forward pass, the same for all of the batches.
            evaluations: Evaluation of each batch.
            rows: Positions of each batch's samples.
            absent: Output that replaces those of classes that a client lacks. None: all classes
                count.
        """
        hidden = -torch.inf if absent is None else absent
        # A single batch is faster without vmap, and some nets cannot be stacked.
        if len(evaluations) == 1 or any(net.arch in self.engine.unstackable for net in spec.nets):
            return self._one_by_one(spec, evaluations, rows, hidden)
        shares_weights = all(
            evaluation.weights is evaluations[0].weights for evaluation in evaluations
        )
        class_masks = None
        if absent is not None:
            class_masks = torch.stack(
                [
                    evaluation.class_mask
                    for evaluation in evaluations
                    if evaluation.class_mask is not None
                ]
            )
        # Outputs do not depend on other samples, so that one large batch gives the same outputs.
        if shares_weights and not self._depends_on_batch(spec):
            return self._joined(
                spec, evaluations[0].weights, torch.stack(rows), class_masks, hidden
            )
        weights, weights_dim = evaluations[0].weights, None
        if not shares_weights:
            weights, weights_dim = stacked([evaluation.weights for evaluation in evaluations]), 0
        index = torch.stack(rows)
        inputs, targets = self.engine.samples(spec, index)
        masks_dim = None if class_masks is None else 0
        run = partial(self._run_batch, spec, hidden)
        mapped = vmap(run, in_dims=(weights_dim, 0, 0, 0, masks_dim))
        try:
            with torch.no_grad():
                sums, outputs_by_name = mapped(weights, inputs, targets, index, class_masks)
        except Exception as error:
            if fails_alone(error):
                raise
            for net in spec.nets:
                self.engine.set_apart(net.arch, first_line(error))
            return self._results(spec, evaluations, rows, absent)
        return sums, outputs_by_name.get("outputs"), targets

    def _one_by_one(
        self, spec: EvalSpec, evaluations: list[EvalSamples], rows: list[Tensor], hidden: float
    ) -> Results:
        """Return the results of batches that are run one after another, without vmap.

        Args:
            spec: Forward pass, the same for all of the batches.
            evaluations: Evaluation of each batch, with its weights and class mask.
            rows: Positions of each batch's samples, (sample,). All batches have the same size.
            hidden: Output that replaces those of classes that a client lacks.
        """
        batch_results, all_targets = [], []
        with torch.no_grad():
            for evaluation, batch_rows in zip(evaluations, rows, strict=True):
                inputs, targets = self.engine.samples(spec, batch_rows)
                batch_results.append(
                    self._run_batch(
                        spec,
                        hidden,
                        evaluation.weights,
                        inputs,
                        targets,
                        batch_rows,
                        evaluation.class_mask,
                    )
                )
                all_targets.append(targets)
        sums = {
            name: torch.stack([batch_sums[name] for batch_sums, _ in batch_results])
            for name in batch_results[0][0]
        }
        outputs = [by_name["outputs"] for _, by_name in batch_results if by_name]
        return sums, torch.stack(outputs) if outputs else None, torch.stack(all_targets)

    def _joined(
        self,
        spec: EvalSpec,
        weights: Weights,
        index: Tensor,
        class_masks: Tensor | None,
        hidden: float,
    ) -> Results:
        """Return the results of batches of one net that are run as one large batch.

        Sums are still computed for each batch.

        Args:
            spec: Forward pass, the same for all of the batches.
            weights: Weights of the net.
            index: Positions of samples, (batch, sample).
            class_masks: Classes that count, (batch, class). None: all of them.
            hidden: Output that replaces those of classes that a client lacks.
        """
        task = self.world.task

        def measure(outputs: Tensor, targets: Tensor, class_mask: Tensor | None) -> State:
            return task.sums(outputs, targets, class_mask, hidden)

        inputs, targets = self.engine.samples(spec, index)
        with torch.no_grad():
            together = self._logits(
                spec, weights, inputs.flatten(0, 1), targets.flatten(0, 1), index.flatten()
            )
            outputs = together.reshape(*index.shape, *together.shape[1:])
            masks_dim = None if class_masks is None else 0
            sums = vmap(measure, in_dims=(0, 0, masks_dim))(outputs, targets, class_masks)
        return sums, outputs if task.collected else None, targets

    def _run_batch(
        self,
        spec: EvalSpec,
        hidden: float,
        weights: Weights,
        inputs: Tensor,
        targets: Tensor,
        rows: Tensor,
        class_mask: Tensor | None,
    ) -> tuple[State, State]:
        """Return the sums of metrics of one batch, and its outputs if a metric needs them.

        Args:
            spec: Forward pass.
            hidden: Output that replaces those of classes that a client lacks.
            weights: Weights of the net, or of all nets whose outputs are averaged.
            inputs: Samples, (sample, …).
            targets: Targets, (sample, …).
            rows: Positions of the samples, (sample,), from which an attack's random start follows.
            class_mask: True for classes that count, (class,). None: all of them.

        Returns:
            Sums by metric, and {"outputs": outputs}, which is empty if no metric needs them.
        """
        outputs = self._logits(spec, weights, inputs, targets, rows)
        sums = self.world.task.sums(outputs, targets, class_mask, hidden)
        return sums, {"outputs": outputs} if self.world.task.collected else {}

    def _logits(
        self, spec: EvalSpec, weights: Weights, inputs: Tensor, targets: Tensor, rows: Tensor
    ) -> Tensor:
        """Return the outputs of one batch, (sample, class, …).

        Samples are attacked first if `spec` has an attack.

        Args:
            spec: Forward pass, with its attack.
            weights: Weights of the net, or of all nets whose outputs are averaged.
            inputs: Clean samples, (sample, …).
            targets: Targets, which an attack needs, (sample, …).
            rows: Positions of the samples, (sample,), from which an attack's random start follows.
        """
        attack_start = spec.drawn(self.world.seed, rows, inputs)
        return spec.logits(self.world, weights, inputs, targets, attack_start)

    def calibrate(
        self, nets: Sequence[tuple[EvalSpec, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        """Return the norm statistics of each net over the batches.

        Args:
            nets: Forward pass and weights of each net.
            batches: Positions of samples in the training set.
        """
        begun = [self._begin_pass(spec, weights, batches) for spec, weights in nets]
        by_turns(captured[1] for captured, _ in begun if captured)
        statistics = []
        for (spec, weights), (captured, other_batches) in zip(nets, begun, strict=True):
            with unsearched():
                measured = self._measured(spec, weights, other_batches)
            if captured:
                measured.append(self._end_pass(captured))
            statistics.append(mean_statistics(measured, len(batches)))
        return statistics

    def _measured(self, spec: EvalSpec, weights: Weights, batches: list[Tensor]) -> list[State]:
        """Return the norm statistics of each batch, without a captured pass.

        Batches of equal size are stacked by vmap, as many as fit into memory. The result is ordered
        by batch size, not as `batches`.

        Args:
            spec: Forward pass of one net that measures statistics.
            weights: Weights of the net.
            batches: Positions of each batch's samples in the training set, (sample,).
        """
        arch = spec.nets[0].arch
        by_size: dict[int, list[Tensor]] = {}
        for rows in batches:
            by_size.setdefault(len(rows), []).append(rows)

        def measure(inputs: Tensor, targets: Tensor, rows: Tensor) -> dict[str, Tensor]:
            attack_start = spec.drawn(self.world.seed, rows, inputs)
            return spec.statistics(self.world, weights, inputs, targets, attack_start)

        def measure_stacked(chunk: list[Tensor]) -> list[State]:
            index = torch.stack(chunk)
            statistics = vmap(measure)(*self.engine.samples(spec, index), index)
            return [
                {name: value[number] for name, value in statistics.items()}
                for number in range(len(chunk))
            ]

        measured: list[State] = []
        for size, same_size in by_size.items():
            max_batches = self._batches_at_once(arch, size)
            for first in range(0, len(same_size), max_batches):
                chunk = same_size[first : first + max_batches]
                with torch.no_grad():
                    if max_batches > 1 and arch not in self.engine.unstackable:
                        try:
                            measured += measure_stacked(chunk)
                            continue
                        except Exception as error:
                            if fails_alone(error):
                                raise
                            self.engine.set_apart(arch, first_line(error))
                    measured += [measure(*self.engine.samples(spec, rows), rows) for rows in chunk]
        return measured

    # --- captured passes -------------------------------------------------------------------------

    def _begin_pass(
        self, spec: EvalSpec, weights: Weights, batches: list[Tensor]
    ) -> tuple[KeyedPass | None, list[Tensor]]:
        """Begin a captured pass over the batches that are as large as the first, if that pays off.

        It pays off for `MIN_CAPTURED_BATCHES` or more. An idle pass with the same `spec` is reused.

        Args:
            spec: Forward pass.
            weights: Weights of the net.
            batches: Positions of each batch's samples, (sample,).

        Returns:
            The captured pass with its key, or None; and the batches that it does not cover.
        """
        size = len(batches[0]) if batches else 0
        full_batches = [rows for rows in batches if len(rows) == size]
        # The seed is part of the key, because a captured attack has it as a constant.
        key = spec, size, tuple(weights), self.world.seed, self.world.task
        if (
            not self.engine.captures_steps
            or len(full_batches) < MIN_CAPTURED_BATCHES
            or key in self.uncapturable
        ):
            return None, batches
        if self.engine.client_bytes(self._widest(spec.nets), size, 0) > self.engine.memory:
            return None, batches
        idle = self.idle_passes.setdefault(key, [])
        try:
            if idle:
                captured = idle.pop()
            else:
                function = self._pass_function(spec)
                captured = CapturedPass(function, weights, size, self.engine.device)
        except CaptureError as error:
            self.uncapturable.add(key)
            self.engine.once.warning(
                str(error), "the evaluation of nets cannot be captured: %s", error
            )
            return None, batches
        captured.begin(weights, full_batches)
        return (key, captured), [rows for rows in batches if len(rows) != size]

    def _end_pass(self, keyed: KeyedPass) -> State:
        """Return the sums of a captured pass over all its batches, and list the pass as idle.

        Batches that remain are run first. The sums are of norm statistics or of metrics, as
        `_pass_function` chose. They are not copied: the next pass with the same key overwrites
        them.
        """
        key, captured = keyed
        self.idle_passes[key].append(captured)
        return captured.end()

    def _pass_function(self, spec: EvalSpec) -> PassFunction:
        """Return the function that a captured pass runs: norm statistics, or sums of metrics."""
        engine, world, seed = self.engine, self.world, self.world.seed

        def measured(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(spec, rows)
            inputs = channels_last(stored)
            return spec.statistics(world, weights, inputs, targets, spec.drawn(seed, rows, inputs))

        def tested(weights: Weights, rows: Tensor) -> State:
            stored, targets = engine.samples(spec, rows)
            inputs = channels_last(stored)
            logits = spec.logits(world, weights, inputs, targets, spec.drawn(seed, rows, inputs))
            return world.task.sums(logits, targets)

        return measured if spec.mode.statistics == "measure" else tested

    # --- how much at once ------------------------------------------------------------------------

    def _widest(self, nets: Submodels) -> Arch:
        """Return the architecture of the net that has the most parameters.

        Nets run one after another, so that the largest one decides on memory.
        """
        return max((net.arch for net in nets), key=self.world.family.count)

    def _batches_at_once(self, arch: Arch, batch_size: int) -> int:
        """Return the number of batches of a member that run at once, at least 1.

        On a GPU they must fit into the engine's memory. On a CPU their activations must fit into
        `CPU_ACTIVATION_BYTES`.
        """
        if self.engine.device.type == "cuda":
            return max(1, self.engine.memory // self.engine.client_bytes(arch, batch_size, 0))
        return max(1, CPU_ACTIVATION_BYTES // self._activations(arch, batch_size))

    def _batch_size(self, spec: EvalSpec, batch_size: int) -> int:
        """Return the batch size of an evaluation, at most `batch_size`.

        A CPU uses smaller batches, of at least `MIN_SAMPLES`, where outputs do not depend on the
        other samples of a batch.
        """
        if self.engine.device.type == "cuda" or self._depends_on_batch(spec):
            return batch_size
        arch = self._widest(spec.nets)
        return min(
            batch_size,
            max(
                MIN_SAMPLES,
                CPU_ACTIVATION_BYTES * MIN_SAMPLES // self._activations(arch, MIN_SAMPLES),
            ),
        )

    def _depends_on_batch(self, spec: EvalSpec) -> bool:
        """Return True if outputs may depend on the other samples of a batch.

        This can also happen with stored statistics, if some norm stores none.
        """
        return spec.mode.statistics == "batch" or self.world.family.depends_on_batch(spec.mode)

    def _activations(self, arch: Arch, batch_size: int) -> int:
        """Return the bytes of activations that a training step keeps for its backward pass.

        Args:
            arch: Architecture of the member.
            batch_size: Samples in the batch.
        """
        return max(
            1,
            self.world.family.member(arch).activations(batch_size) * self.world.dtype.itemsize // 4,
        )
