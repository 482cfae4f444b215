"""Sums of metrics and stored outputs of several evaluations, batch by batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor

from fedquilt.engines.samples import EvalSamples
from fedquilt.round.scores import Score
from fedquilt.round.training.optimizers import State


@dataclass(frozen=True)
class ScorePart:
    """Batch of an evaluation."""

    evaluation_index: int  # Position of the evaluation in the list of evaluations.
    number: int  # Position of the batch in the evaluation.
    rows: Tensor  # (sample,) Positions of the batch's samples, on the device.
    # (sample,) True for samples whose outputs are stored. None: no metric needs them.
    stored_mask: Tensor | None = None


@dataclass
class Totals:
    """Sums of metrics on the device, and stored outputs on the CPU, for several evaluations."""

    count: int  # Number of evaluations.
    sums: State = field(default_factory=dict)  # Sums (evaluation, …) by metric.
    # Outputs and targets, by evaluation and batch.
    stored: dict[int, dict[int, tuple[Tensor, Tensor]]] = field(default_factory=dict)

    def add(self, evaluation_indices: Sequence[int], sums: Mapping[str, Tensor]) -> None:
        """Add the sums of some batches to those of their evaluations.

        Batches of one evaluation are summed first, so that no two values are added to one entry at
        the same time. On a GPU, the order of such additions changes from run to run, and the last
        digit with it.

        Args:
            evaluation_indices: Position of the evaluation for every batch, in ascending order.
            sums: Sums (batch, …) by metric.
        """
        # Number of batches of every evaluation.
        lengths = {
            position: len(list(batches)) for position, batches in groupby(evaluation_indices)
        }
        device = next(iter(sums.values())).device if sums else None
        index = torch.tensor(list(lengths), device=device)
        for name, value in sums.items():
            if name not in self.sums:
                self.sums[name] = value.new_zeros(self.count, *value.shape[1:])
            if len(lengths) < len(evaluation_indices):
                batch_sums = value.split_with_sizes(list(lengths.values()))
                value = torch.stack([evaluation_sums.sum(0) for evaluation_sums in batch_sums])
            self.sums[name].index_add_(0, index, value)

    def store(self, part: ScorePart, outputs: Tensor, targets: Tensor) -> None:
        """Store the outputs and targets of one batch, for the samples that metrics need.

        Args:
            part: Batch, with its mask of samples to store.
            outputs: Outputs (sample, class, …).
            targets: Targets (sample, …).
        """
        assert part.stored_mask is not None, "a metric that needs outputs has said of which samples"
        batch = outputs.cpu()[part.stored_mask], targets.cpu()[part.stored_mask]
        self.stored.setdefault(part.evaluation_index, {})[part.number] = batch

    def scores(self, evaluations: Sequence[EvalSamples]) -> list[Score]:
        """Return the score of every evaluation, with its sums and stored outputs.

        Stored outputs are in the order of the evaluation's batches, on the CPU.

        Args:
            evaluations: Evaluations, in the order of their positions in `sums` and `stored`.
        """
        sums = {name: value.cpu() for name, value in self.sums.items()}
        scores = []
        for number, evaluation in enumerate(evaluations):
            evaluation_sums = {name: value[number] for name, value in sums.items()}
            by_batch = self.stored.get(number, {})
            batches = [by_batch[batch] for batch in sorted(by_batch)]
            outputs = targets = None
            if batches:
                outputs = torch.cat([batch_outputs for batch_outputs, _ in batches])
                targets = torch.cat([batch_targets for _, batch_targets in batches])
            scores.append(Score(evaluation.label, evaluation_sums, outputs, targets))
        return scores
