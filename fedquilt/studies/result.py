"""One run of a study as statistics and tables see it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedquilt.round import Grades, Record
from fedquilt.runs.summaries import figures_of, in_percent, main_of, prefers_higher
from fedquilt.tasks.metrics.registry import kind_of


@dataclass(frozen=True)
class Result:
    """One run: the row it belongs to, its seed, its summary and its rounds.

    Attributes:
        entry: Name of the study's row, such as "fedrolex".
        seed: Random seed of the run.
        summary: Content of `summary.json`.
        records: One record per round, oldest first. Empty: nothing was trained.
    """

    entry: str
    seed: int
    summary: Mapping[str, Any]
    records: Sequence[Record] = field(default=(), repr=False)

    @property
    def main(self) -> str:
        """Return the name of the task's main metric, such as `accuracy`."""
        return main_of(self.summary)

    @property
    def higher_is_better(self) -> bool:
        """Return True if the main figure is better when it is higher."""
        return prefers_higher(self.summary)

    @property
    def diverged(self) -> int | None:
        """Return the round in which the loss was no longer a number; None: it always was one."""
        return self.summary.get("diverged")

    @property
    def macs(self) -> int | None:
        """Return the multiply-adds of all clients in all rounds; None: there are no records."""
        if not self.records:
            return None
        return sum(record.macs for record in self.records)

    def metric(self, name: str = "") -> Mapping[str, float]:
        """Return a metric of the last evaluated round by share. Empty: the run does not have it.

        Without a name the main metric is returned.
        """
        return figures_of(self.summary, name)

    def prefers_higher(self, metric: str = "") -> bool:
        """Return True if a metric is better when it is higher.

        Without a name the main metric is meant. `local_NAME` and `NAME/DOMAIN` are like NAME. Names
        that are not in `METRICS`, such as `robust`, are like the main metric.
        """
        kind = kind_of(metric) if metric else None
        if kind is None or self._is_main(metric):
            return self.higher_is_better
        return kind.higher_is_better

    def is_in_percent(self, metric: str = "") -> bool:
        """Return True if a metric is a rate, which tables show in percent.

        Without a name the main metric is meant. Names are read as in `prefers_higher`.
        """
        kind = kind_of(metric) if metric else None
        if kind is None or self._is_main(metric):
            return in_percent(self.summary)
        return kind.is_rate

    def _is_main(self, metric: str) -> bool:
        return metric.partition("/")[0].removeprefix("local_") == self.main

    @cached_property
    def best(self) -> tuple[int, Grades] | None:
        """Return the evaluated round with the widest model's best main figure, and its metrics.

        Released codes choose the checkpoint that they report in this way, on the test set. The
        first of equal rounds counts. None: nothing was evaluated, or no figure is a number.
        """
        graded = [record for record in self.records if record.grades.figures]
        if not graded:
            return None
        widest = max(graded[-1].grades.figures, key=float)
        sign = 1.0 if self.higher_is_better else -1.0

        best: Record | None = None
        highest = -math.inf
        for record in graded:
            figure = sign * record.grades.figures.get(widest, math.nan)
            if figure > highest:  # False if the figure is not a number
                best = record
                highest = figure
        return None if best is None else (best.round, best.grades)

    @property
    def best_figure(self) -> float | None:
        """Return the widest model's main figure in the round of `best`; None if `best` is None."""
        if self.best is None:
            return None
        figures = self.best[1].figures
        return figures[max(figures, key=float)]
