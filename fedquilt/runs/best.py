"""The best round of a run so far on validation samples. Its state is kept beside the newest one.

One state is kept for all shares, because a fleet of real devices may have thousands of shares. The
value of a round is the main figure on validation samples, averaged over the shares of the fleet. If
several rounds are equally good, the earliest is the best.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.terms import Server

if TYPE_CHECKING:
    from fedquilt.round import Evaluation, Grades


@dataclass(frozen=True, eq=False)
class Best:
    """The best round so far, and the location of its state."""

    round: int  # Number of the round
    value: float  # Mean of the figures over the shares of the fleet
    figures: Mapping[str, float]  # Main figure on validation samples, by share
    server: Server | None = None  # State of the round. None: it is in a checkpoint of `folder`
    folder: Path | None = None  # Folder that has its checkpoint. None: no folder has it

    def to_dict(self) -> dict[str, Any]:
        """Return round, value and figures as plain values, for checkpoints and summaries."""
        return {"round": self.round, "value": self.value, "figures": dict(self.figures)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any] | None, folder: Path) -> Best | None:
        """Return the best round that a checkpoint names, or None if it names none.

        Args:
            plain: Values of `to_dict`. None: the checkpoint names no best round.
            folder: Folder of the run, which has the checkpoint of the best round.
        """
        if plain is None:
            return None
        return Best(plain["round"], plain["value"], plain["figures"], folder=folder)


def validation_figures(grades: Grades, evaluation: Evaluation) -> dict[str, float]:
    """Return the main figure on validation samples by share. Empty: it was not evaluated.

    Args:
        grades: Results of one evaluation. Figures that are not finite are left out.
        evaluation: Settings of the evaluation. The result is empty if `best` is off.
    """
    if not evaluation.best:
        return {}
    figures = grades.figures if evaluation.on == "validation" else grades.validation
    return {share: value for share, value in figures.items() if math.isfinite(value)}


def mean_figure(figures: Mapping[str, float], shares: Collection[str]) -> float:
    """Return the mean of figures over the shares of a fleet.

    A method that serves one net to all devices is evaluated at other shares than those of the
    fleet. In this case the mean is over all figures.

    Args:
        figures: Figures by share. At least one is needed.
        shares: Shares of the fleet, which need not all have a figure.
    """
    values = [value for share, value in figures.items() if share in shares] or list(
        figures.values()
    )
    return math.fsum(values) / len(values)


def problem_in_best(plain: Any, newest: int) -> str:
    """Return an error in a checkpoint's entry about its best round. Empty: there is none.

    Args:
        plain: Entry of the checkpoint.
        newest: Round of the checkpoint.
    """
    if not isinstance(plain, dict) or plain.keys() != {"round", "value", "figures"}:
        return "about.best has other keys than round, value and figures"
    if type(plain["round"]) is not int or not 0 <= plain["round"] <= newest:
        return f"about.best.round = {str(plain['round'])[:40]}, and 0 to {newest} fit"
    figures = plain["figures"]
    if not isinstance(figures, dict) or not all(
        map(_is_finite, (plain["value"], *figures.values()))
    ):
        return "about.best has figures that are no numbers"
    return ""


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
