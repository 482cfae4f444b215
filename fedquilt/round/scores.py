"""Results of tests: sums of one test, means over tests, and the metrics of a round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedquilt.round.engine import EvaluationReport
from fedquilt.tasks import Task

Domain = tuple[int, str]  # The number of a domain, and its name.


@dataclass(frozen=True)
class Score:
    """The result of a test: sums that give metrics, and outputs for metrics that need all of them.

    Args:
        label: Label of the test.
        sums: Sums by the name of their metric, as `Task.sums` has them, on the CPU.
        outputs: (sample, class, …) Outputs that were kept, on the CPU. None: no metric needs them.
        targets: (sample, …) Their targets.
        domains: Scores of the domains that it consists of, if that was asked for.
    """

    label: str
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    targets: Tensor | None = None
    domains: Mapping[Domain, Score] = field(default_factory=dict)

    def figures(self, task: Task) -> dict[str, float]:
        """Return every metric of `task` by name, the main one first.

        A metric that is not defined for these samples is NaN.
        """
        values = task.values(self.sums)
        if self.outputs is not None and self.targets is not None:
            rows = task.kept_positions(len(self.outputs))
            values |= task.collected_values(self.outputs[rows], self.targets[rows])
        return {metric.name: values.get(metric.name, math.nan) for metric in task.measured}

    def main(self, task: Task) -> float:
        """Return the main metric of `task`, or NaN if it is not defined for these samples."""
        return self.figures(task)[task.main.name]

    def __add__(self, other: Score) -> Score:
        sums = dict(self.sums)
        for name, metric_sums in other.sums.items():
            sums[name] = sums[name] + metric_sums if name in sums else metric_sums
        return Score(
            self.label,
            sums,
            _joined(self.outputs, other.outputs),
            _joined(self.targets, other.targets),
        )


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    parts = [part for part in (first, second) if part is not None]
    return torch.cat(parts) if parts else None


def means_by_label(scores: Iterable[Score], task: Task) -> dict[str, dict[str, float]]:
    """Return the mean of every metric over the tests with the same label, by metric and label.

    Each test counts once, whatever its number of samples. A test for which a metric is not defined,
    such as one without samples, is left out of its mean.

    Args:
        scores: Results of tests, such as one for each client.
        task: Task whose metrics are computed.
    """
    values_by_metric: dict[str, dict[str, list[float]]] = {
        metric.name: {} for metric in task.measured
    }
    for score in scores:
        for metric, value in score.figures(task).items():
            if not math.isnan(value):
                values_by_metric[metric].setdefault(score.label, []).append(value)
    return {
        metric: {label: sum(values) / len(values) for label, values in by_label.items()}
        for metric, by_label in values_by_metric.items()
    }


def main_by_label(scores: Iterable[Score], task: Task) -> dict[str, float]:
    """Return the mean of the task's main metric over the tests with the same label, by label.

    Args:
        scores: Results of tests, such as one for each client.
        task: Task whose main metric is computed.
    """
    return means_by_label(scores, task)[task.main.name]


@dataclass(frozen=True)
class Grades:
    """Every metric of an evaluation by name and share, and the name of the main one."""

    main: str = ""  # Name of the task's main metric. Empty: nothing was evaluated.
    # Values by the name of a metric, and then by the label of a share.
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # Main figure by share on validation samples. Empty if clients hold back none, or if all figures
    # are those of validation samples.
    validation: dict[str, float] = field(default_factory=dict)
    report: EvaluationReport | None = None  # Devices that took part. None: none was asked

    @property
    def accuracy(self) -> dict[str, float]:
        """Return accuracy by the key of a share. It is empty if the task has no accuracy."""
        return self.metrics.get("accuracy", {})

    @property
    def figures(self) -> dict[str, float]:
        """Return the main metric by the key of a share. It is empty if nothing was evaluated."""
        return self.metrics.get(self.main, {})


def grades_of(scores: Sequence[Score], task: Task, validated: Sequence[Score]) -> Grades:
    """Return every metric, and the main one for every domain, such as `accuracy/mnist`.

    A figure is the mean over the tests with the same label. The label of a test is its key in
    records, usually a share such as "0.5". Metrics without any value are left out.

    Args:
        scores: Results on the samples that records report. They give `Grades.metrics`.
        task: Task whose metrics are computed.
        validated: Results of the same tests on validation samples. They give only
            `Grades.validation`, which has the main metric by label if it is finite. May be empty.
    """
    by_domain: dict[Domain, list[Score]] = {}
    for score in scores:
        for domain, domain_score in score.domains.items():
            by_domain.setdefault(domain, []).append(domain_score)
    main = task.main.name
    metrics = means_by_label(scores, task)
    metrics |= {
        f"{main}/{domain[1]}": main_by_label(by_domain[domain], task)
        for domain in sorted(by_domain)
    }
    validation = {
        label: value
        for label, value in main_by_label(validated, task).items()
        if math.isfinite(value)
    }
    return Grades(
        main, {metric: values for metric, values in metrics.items() if values}, validation
    )
