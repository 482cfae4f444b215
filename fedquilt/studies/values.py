"""Numbers that columns of tables show, written as text: a path into a run's summary, and a unit.

    accuracy 1.0 %               accuracy of share 1.0 in the last evaluated round
    metrics accuracy/svhn 0.5 %  any entry of the summary, by its keys
    metrics rmse 1.0 number      the same for an error, which is not a percentage
    best accuracy 1.0 %          the same in the best evaluated round (`Result.best`)
    at 500 accuracy 1.0 %        the same in round 500
    within 2e9 accuracy 1.0 %    the same in the last evaluated round that had sent at most 2·10^9
                                 bytes, both ways and all rounds before it included
    rounds_to 0.55 0.5 count     first evaluated round in which share 0.5 has a main figure of 0.55
    bytes_to 0.55 0.5 GB         bytes both ways until then
    macs_to 0.55 0.5 T           multiply-adds of all clients until then
    seconds_to 0.55 0.5 s        seconds until then, evaluations included
    gigabytes number             bytes of all rounds, both ways, in units of 10^9
    gigabytes_per_round number   the same as a mean over rounds
    mean metrics NAME %          mean over all entries of a metric, such as nets of different limits
    training_macs T              multiply-adds of all clients in all rounds
    round_seconds 1 250 number   median seconds of rounds 1 to 250, evaluations included

Presets of papers and pages of results use the same text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.round import Grades
from fedquilt.runs.milestones import milestones
from fedquilt.studies.result import Result

# The factor by which a number is multiplied, and the decimals that are shown.
UNITS = {
    "%": (100.0, 1),
    "GB": (1e-9, 1),
    "MB": (1e-6, 1),
    "MiB": (2.0**-20, 2),
    "GiB": (2.0**-30, 3),
    "s": (1.0, 0),
    "M": (1e-6, 2),
    "T": (1e-12, 1),
    "count": (1.0, 0),
    "number": (1.0, 3),  # For errors and losses.
    "%2": (100.0, 2),  # Percent with two decimals, for counts.
}
_ROUND_SECONDS = "round_seconds"  # First key of the median seconds of a range of rounds.
_MEAN = "mean"  # First key of a mean over all entries of a table.
_COSTS = {
    "rounds_to": "round",
    "bytes_to": "bytes",
    "macs_to": "macs",
    "seconds_to": "seconds",
}


@dataclass(frozen=True)
class TableValue:
    """A number of a run, and the unit it is shown in.

    Attributes:
        path: Keys, as in the examples at the top of this file.
        unit: A key of `UNITS`.
    """

    path: tuple[str, ...]
    unit: str

    @staticmethod
    def parse(text: str) -> TableValue:
        """Return the value that a text such as `accuracy 1.0 %` describes: keys and then a unit.

        Raises:
            ConfigError: The unit is unknown, or the keys do not have the form that their first one
                needs.
        """
        *path, unit = text.split() or [""]
        if unit not in UNITS or not path:
            raise ConfigError(
                f"the value {text!r} was asked for; it ends with a unit after the keys of a "
                f"summary, as in 'accuracy 1.0 %'.{nearest(unit, UNITS)}"
            )
        if path[0] in _COSTS and (len(path) != 3 or not all(map(_is_number, path[1:]))):
            raise ConfigError(
                f"the value {text!r} was asked for; write '{path[0]} TARGET SHARE UNIT', as in "
                f"'{path[0]} 0.55 0.5 {unit}'."
            )
        if path[0] == "at" and (len(path) < 3 or not path[1].isdecimal()):
            raise ConfigError(
                f"the value {text!r} was asked for; write 'at ROUND KEYS UNIT', as in 'at 500 "
                "accuracy 1.0 %'."
            )
        if path[0] == "within" and (len(path) < 3 or not _is_number(path[1])):
            raise ConfigError(
                f"the value {text!r} was asked for; write 'within BYTES KEYS UNIT', as in 'within "
                "2e9 accuracy 1.0 %'."
            )
        if path[0] == _ROUND_SECONDS and not _is_range(path[1:]):
            raise ConfigError(
                f"the value {text!r} was asked for; write '{_ROUND_SECONDS} FIRST LAST UNIT' with "
                f"rounds from 1 on, as in '{_ROUND_SECONDS} 1 250 number'."
            )
        return TableValue(tuple(path), unit)

    @property
    def factor(self) -> float:
        """Return the factor by which a number is multiplied to show it, such as 100 for percent."""
        return UNITS[self.unit][0]

    @property
    def is_cost(self) -> bool:
        """Return True if the value is a cost until a target, which a run may never reach."""
        return self.path[0] in _COSTS

    @property
    def depends_on_round(self) -> bool:
        """Return True if only runs that reach some round or target have the value.

        These are values that begin with `at`, `within`, `round_seconds`, or a key of `_COSTS` such
        as `bytes_to`.
        """
        return self.is_cost or self.path[0] in ("at", "within", _ROUND_SECONDS)

    def of(self, result: Result) -> float | Mapping[str, float] | None:
        """Return the number of a run, before its unit is applied. None: the run has no such number.

        A cost over clients is a mapping with `mean` and `deviation` instead of one number.
        """
        first, *keys = self.path
        if first in _COSTS:
            target = float(keys[0])
            share = str(float(keys[1]))
            by_share = milestones(result.records, target, higher_is_better=result.higher_is_better)
            reached = by_share.get(share)
            return None if reached is None else getattr(reached, _COSTS[first])
        # Without records the summary may have its own `best`, as early stored results do.
        if first == "best" and result.best is not None:
            number, grades = result.best
            return _number(_tables(grades) | {"round": number}, keys)
        if first == "at":
            records = [record for record in result.records if record.round == int(keys[0])]
            return _number(_tables(records[0].grades), keys[1:]) if records else None
        if first == "within":
            last = _last_grades_within(result, float(keys[0]))
            return None if last is None else _number(_tables(last), keys[1:])
        if first == _ROUND_SECONDS:
            start, end = map(int, keys)
            seconds = [record.seconds for record in result.records[start - 1 : end]]
            return median(seconds) if len(seconds) == end - start + 1 else None
        totals = {
            "gigabytes": _gigabytes(result),
            "gigabytes_per_round": _gigabytes_per_round(result),
            "training_macs": result.macs,
        }
        return _number({**result.summary, **totals}, self.path)

    def shown(self, number: float) -> str:
        """Return a number multiplied by the unit's factor, with the unit's decimals, as text.

        The name of the unit is not included: 0.6 in % gives `60.0`.
        """
        factor, decimals = UNITS[self.unit]
        return f"{factor * number:,.{decimals}f}"


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_range(keys: Sequence[str]) -> bool:
    """Return True if two keys are a first round, from 1 on, and a last round."""
    return len(keys) == 2 and all(map(str.isdecimal, keys)) and 1 <= int(keys[0]) <= int(keys[1])


def _tables(grades: Grades) -> dict[str, Any]:
    """Return the metrics of one evaluation as a summary has them, by name and then by share.

    Each metric is found under its name, and again under `metrics`.
    """
    return {**grades.metrics, "metrics": grades.metrics}


def _last_grades_within(result: Result, num_bytes: float) -> Grades | None:
    """Return the metrics of the last evaluated round up to which at most `num_bytes` were sent.

    Bytes count in both directions. None: no round was evaluated before more was sent.
    """
    sent = 0
    last = None
    for record in result.records:
        sent += record.bytes_down + record.bytes_up
        if sent > num_bytes:
            break
        if record.grades.figures:
            last = record.grades
    return last


def _gigabytes(result: Result) -> float:
    sent = result.summary.get("bytes_down", 0) + result.summary.get("bytes_up", 0)
    return float(sent) / 1e9


def _gigabytes_per_round(result: Result) -> float | None:
    rounds = result.summary.get("rounds", 0)
    return _gigabytes(result) / rounds if rounds else None


def _number(table: Any, path: Sequence[str]) -> float | Mapping[str, float] | None:
    """Return the number at a path of keys in nested tables. None: there is no number.

    A table with `mean` and `deviation` is returned as it is. If the first key is `mean`, the result
    is the mean of all numbers in the table that the other keys lead to.

    Args:
        table: Nested mappings, such as a summary.
        path: Keys from the outside to the inside.
    """
    if path and path[0] == _MEAN:
        return _mean(table, path[1:])
    for key in path:
        if not isinstance(table, Mapping) or key not in table:
            return None
        table = table[key]
    is_spread = isinstance(table, Mapping) and {"mean", "deviation"} <= table.keys()
    is_number = isinstance(table, (int, float)) and not isinstance(table, bool)
    return table if is_number or is_spread else None


def _mean(table: Any, path: Sequence[str]) -> float | None:
    """Return the mean of the numbers directly in the table at a path of keys.

    Other entries are left out. None: there is no such table, or it has no numbers.

    Args:
        table: Nested mappings, such as a summary.
        path: Keys from the outside to the inside.
    """
    for key in path:
        table = table.get(key) if isinstance(table, Mapping) else None
    numbers = [] if not isinstance(table, Mapping) else [_number(table, [key]) for key in table]
    plain = [number for number in numbers if isinstance(number, (int, float))]
    return sum(plain) / len(plain) if plain else None
