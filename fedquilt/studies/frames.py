"""Numbers of runs as flat rows, and as pandas DataFrames."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError
from fedquilt.studies.result import Result

if TYPE_CHECKING:
    import pandas


def rows(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return one flat row for each entry, seed and share, with the figures of the last evaluation.

    Columns are `entry`, `seed`, `share`, every metric by its name, the run's totals (`rounds`,
    `bytes_down`, `bytes_up`, `macs`, `seconds`) and the size of a device of the share
    (`parameters`, `macs_per_sample`). None: the run has no such number.
    """
    runs = list(results)
    metrics = dict.fromkeys(name for result in runs for name in metric_names(result))
    flat: list[dict[str, Any]] = []
    for result in runs:
        summary = result.summary
        members = summary.get("members", {})
        shares = dict.fromkeys(s for name in metric_names(result) for s in result.metric(name))
        for share in shares | dict.fromkeys(members):
            flat.append(
                {
                    "entry": result.entry,
                    "seed": result.seed,
                    "share": float(share),
                    **{name: result.metric(name).get(share) for name in metrics},
                    "rounds": summary.get("rounds"),
                    "bytes_down": summary.get("bytes_down"),
                    "bytes_up": summary.get("bytes_up"),
                    "macs": result.macs,
                    "seconds": summary.get("seconds"),
                    "parameters": members.get(share, {}).get("params"),
                    "macs_per_sample": members.get(share, {}).get("macs"),
                }
            )
    return flat


def rounds(results: Iterable[Result]) -> list[dict[str, Any]]:
    """Return one flat row for each entry, seed, round and share.

    Columns are `entry`, `seed`, `round`, `share`, every metric by its name, and the round's own
    `train_loss`, `clients`, `bytes_down`, `bytes_up`, `macs` and `seconds`. A round that was not
    evaluated has one row with None as share and metrics.
    """
    runs = list(results)
    metrics = dict.fromkeys(
        name for result in runs for record in result.records for name in record.grades.metrics
    )
    flat: list[dict[str, Any]] = []
    for result in runs:
        for record in result.records:
            figures = record.grades.metrics
            shares = list(dict.fromkeys(s for by_share in figures.values() for s in by_share))
            for share in shares or [""]:
                flat.append(
                    {
                        "entry": result.entry,
                        "seed": result.seed,
                        "round": record.round,
                        "share": float(share) if share else None,
                        **{name: figures.get(name, {}).get(share) for name in metrics},
                        "train_loss": record.loss,
                        "clients": record.clients,
                        "bytes_down": record.bytes_down,
                        "bytes_up": record.bytes_up,
                        "macs": record.macs,
                        "seconds": record.seconds,
                    }
                )
    return flat


def frame(results: Iterable[Result], by_round: bool = False) -> pandas.DataFrame:
    """Return `rows` as a pandas DataFrame, or `rounds` if `by_round` is True.

    Raises:
        ConfigError: pandas is not installed.
    """
    name = "rounds" if by_round else "rows"
    try:
        import pandas
    except ImportError as error:
        raise ConfigError(
            "a data frame was asked for; it needs pandas, which is not installed: pip install "
            f"pandas. fedquilt.studies.frames.{name} returns the same as a list of dictionaries."
        ) from error
    return pandas.DataFrame(rounds(results) if by_round else rows(results))


def metric_names(result: Result) -> list[str]:
    """Return the metrics of the last evaluated round that have figures, the main one first."""
    names = dict.fromkeys([result.main, "accuracy", *result.summary.get("metrics", {})])
    return [name for name in names if result.metric(name)]
