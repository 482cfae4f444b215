"""Cost of a run until it first reached a target: rounds, bytes, multiply-adds and seconds."""

from __future__ import annotations

import math
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
    macs: int  # multiply-adds of all clients
    seconds: float  # that the rounds took here, evaluations included
    link_seconds: float | None = None  # that they would take over the link; None: it has no clock


def milestones(
    records: Iterable[Record], target: float, metric: str = "", higher_is_better: bool = True
) -> dict[str, Milestone | None]:
    """Return when each share first had a metric as good as a target; None: never.

    Between evaluations nothing is known: a target counts as reached in the first round that was evaluated and has it.

    Args:
        records: Records of all rounds so far.
        target: Value of the metric that is to be reached.
        metric: Name of a metric (`accuracy`, `accuracy/svhn`, `rmse`). Empty: the main one of the records.
        higher_is_better: True: at least `target` reaches it. False: at most `target` does.
    """
    found: dict[str, Milestone | None] = {}
    known: dict[str, None] = {}  # metrics there are
    sent = 0
    macs = 0
    seconds = 0.0
    over = None
    for record in records:
        sent += record.bytes_down + record.bytes_up
        macs += record.macs
        seconds += record.seconds
        if record.link_seconds is not None:
            over = (over or 0.0) + record.link_seconds
        known |= dict.fromkeys(record.grades.metrics)
        for share, value in record.grades.metrics.get(metric or record.grades.main, {}).items():
            found.setdefault(share, None)
            if found[share] is None and (value >= target if higher_is_better else value <= target):
                found[share] = Milestone(record.round, sent, macs, seconds, over)
    if metric and known and metric not in known:
        raise ConfigError(
            f"the metric {metric!r} was asked for; the records have {', '.join(known)}."
        )
    return found


def reached(
    records: Iterable[Record],
    target: float,
    share: float = 1.0,
    metric: str = "",
    higher_is_better: bool = True,
) -> Milestone | None:
    """Return when one share first was as good as a target; None: never, or nothing was evaluated yet.

    Arguments are those of `milestones`, and the share of the model.
    """
    listed = list(records)
    found = milestones(listed, target, metric, higher_is_better)
    if found and str(float(share)) not in found:
        name = metric or next(record.grades.main for record in listed if record.grades.main)
        raise ConfigError(
            f"the share {share} was asked for; the records have {name} at {', '.join(found)}."
        )
    return found.get(str(float(share)))


def check_target(target: float, metric: str = "", is_rate: bool = False) -> None:
    """Refuse a target that a metric cannot have: percent, where it is a rate.

    Args:
        target: Value of the metric.
        metric: Its name, for the message. Empty: it is not known yet.
        is_rate: True if the metric lies between 0 and 1.
    """
    if is_rate and not 0 < target <= 1:
        raise ConfigError(
            f"a target of {target:g} was asked for; {metric} lies in (0, 1]: for 60 % say 0.6."
        )
    if not math.isfinite(target):
        raise ConfigError(
            f"a target of {target:g} was asked for; a finite number fits, such as 0.6."
        )
