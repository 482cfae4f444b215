"""When a run first was as good as asked for: the rounds, bytes and seconds to an accuracy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from fedquilt.round import Record


@dataclass(frozen=True)
class Milestone:
    """The first evaluated round that reached a target, and what it took to get there, that round included."""

    round: int
    bytes: int  # to all clients and back
    seconds: float  # that the rounds took here, evaluations included
    link_seconds: float | None = None  # that they would take over the link; None: it has no clock


def milestones(records: Iterable[Record], target: float, metric: str = "accuracy") -> dict[str, Milestone | None]:
    """When each share first had a metric (`accuracy`, `accuracy/svhn`) of at least `target`; None: never.

    Between evaluations nothing is known: a target counts as reached in the first round that was evaluated and has it.
    """
    check_target(target)
    found: dict[str, Milestone | None] = {}
    known: dict[str, None] = {}  # metrics there are
    sent, seconds, over = 0, 0.0, None
    for record in records:
        sent += record.bytes_down + record.bytes_up
        seconds += record.seconds
        if record.link_seconds is not None:
            over = (over or 0.0) + record.link_seconds
        grades = {"accuracy": record.grades.accuracy, **record.grades.metrics} if record.grades.accuracy else {}
        known |= dict.fromkeys(grades)
        for share, value in grades.get(metric, {}).items():
            found.setdefault(share, None)
            if found[share] is None and value >= target:
                found[share] = Milestone(record.round, sent, seconds, over)
    if known and metric not in known:
        raise ConfigError(f"the metric {metric!r} was asked for; the records have {', '.join(known)}.")
    return found


def reached(records: Iterable[Record], target: float, share: float = 1.0, metric: str = "accuracy") -> Milestone | None:
    """When one share first had a metric of at least `target`; None: never, or nothing was evaluated yet."""
    found = milestones(records, target, metric)
    if found and str(float(share)) not in found:
        raise ConfigError(f"the share {share} was asked for; the records have {metric} at {', '.join(found)}.")
    return found.get(str(float(share)))


def check_target(target: float) -> None:
    """Refuse what no accuracy can be: percent."""
    if not 0 < target <= 1:
        raise ConfigError(f"a target of {target:g} was asked for; accuracies lie in (0, 1]: for 60 % say 0.6.")
