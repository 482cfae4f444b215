"""One run of a study as statistics and tables see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from fedquilt.round import Grades, Record


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
        """Return the name of the main metric. Summaries of early versions have accuracy alone."""
        main: str = self.summary.get("main", "accuracy")
        return main

    @property
    def higher_is_better(self) -> bool:
        return bool(self.summary.get("higher_is_better", True))

    @property
    def diverged(self) -> int | None:
        """Return the round in which the loss was no longer a number; None: it always was one."""
        return self.summary.get("diverged")

    def metric(self, name: str = "") -> Mapping[str, float]:
        """Return a metric of the last evaluated round by share; the main one if no name is given."""
        metrics = self.summary.get("metrics", {})
        found: Mapping[str, float] = metrics.get(name or self.main, {})
        if not found and (name or self.main) == "accuracy":
            found = self.summary.get("accuracy", {})
        return found

    @cached_property
    def best(self) -> tuple[int, Grades] | None:
        """Return the evaluated round in which the widest model has its best main figure, and its metrics.

        Released codes choose the checkpoint that they report in this way, on the test set. None:
        nothing was evaluated.
        """
        graded = [record for record in self.records if record.grades.figures]
        if not graded:
            return None
        widest = max(graded[-1].grades.figures, key=float)
        sign = 1.0 if self.higher_is_better else -1.0
        best = max(graded, key=lambda record: sign * record.grades.figures.get(widest, -sign * float("inf")))
        return best.round, best.grades
