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
    """The first evaluated round that reached a target, and the cost up to and including it."""

    round: int  # Number of the round
    bytes: int  # Bytes sent to all clients and back
    macs: int  # Multiply-adds of all clients
    seconds: float  # Seconds that the rounds took on this machine, including evaluation
    link_seconds: float | None = None  # Simulated seconds over the link. None: it has no clock


def milestones(
    records: Iterable[Record], target: float, metric: str = "", higher_is_better: bool = True
) -> dict[str, Milestone | None]:
    """Return for each share when a metric first reached a target. None: it never did.

    A target counts as reached in the first evaluated round whose metric reaches it. Rounds between
    evaluations are not considered.

    Args:
        records: Records of all rounds so far.
        target: Value of the metric that is to be reached.
        metric: Name of a metric (`accuracy`, `accuracy/svhn`, `rmse`). Empty: the main one of the
            records.
        higher_is_better: True: values of at least `target` reach it. False: values of at most
            `target` do.
    """
    first_reached: dict[str, Milestone | None] = {}
    metric_names: dict[str, None] = {}  # Names of all metrics in the records, in order
    num_bytes = 0
    macs = 0
    seconds = 0.0
    link_seconds = None
    for record in records:
        num_bytes += record.bytes_down + record.bytes_up
        macs += record.macs
        seconds += record.seconds
        if record.link_seconds is not None:
            link_seconds = (link_seconds or 0.0) + record.link_seconds
        metric_names |= dict.fromkeys(record.grades.metrics)
        for share, value in record.grades.metrics.get(metric or record.grades.main, {}).items():
            first_reached.setdefault(share, None)
            if first_reached[share] is None and (
                value >= target if higher_is_better else value <= target
            ):
                first_reached[share] = Milestone(
                    record.round, num_bytes, macs, seconds, link_seconds
                )
    if metric and metric_names and metric not in metric_names:
        raise ConfigError(
            f"the metric {metric!r} was asked for; the records have {', '.join(metric_names)}."
        )
    return first_reached


def reached(
    records: Iterable[Record],
    target: float,
    share: float = 1.0,
    metric: str = "",
    higher_is_better: bool = True,
) -> Milestone | None:
    """Return when a metric of one share first reached a target.

    Args:
        records: Records of all rounds so far.
        target: Value of the metric that is to be reached.
        share: Share of the model.
        metric: Name of a metric. Empty: the main one of the records.
        higher_is_better: True: values of at least `target` reach it. False: values of at most
            `target` do.

    Returns:
        None if the target was never reached, or nothing has been evaluated yet.
    """
    listed = list(records)
    by_share = milestones(listed, target, metric, higher_is_better)
    if by_share and str(float(share)) not in by_share:
        name = metric or next(record.grades.main for record in listed if record.grades.main)
        raise ConfigError(
            f"the share {share} was asked for; the records have {name} at {', '.join(by_share)}."
        )
    return by_share.get(str(float(share)))


def check_target(target: float, metric: str = "", is_rate: bool = False) -> None:
    """Refuse a target that a metric cannot reach, such as a percentage for a rate.

    Args:
        target: Value of the metric.
        metric: Name of the metric, for the message. Empty: it is not known yet.
        is_rate: True if the metric is between 0 and 1.
    """
    if is_rate and not 0 < target <= 1:
        raise ConfigError(
            f"a target of {target:g} was asked for; {metric} is in (0, 1]: for 60 %, ask for 0.6."
        )
    if not math.isfinite(target):
        raise ConfigError(
            f"a target of {target:g} was asked for; a finite number fits, such as 0.6."
        )
