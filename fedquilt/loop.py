"""One loop for every run, from Python and from the command line: train, record, track, and write the summary."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedquilt.tracking import Tracking, tracked

if TYPE_CHECKING:
    from pathlib import Path

    from fedquilt.experiment import Run
    from fedquilt.records import Folder
    from fedquilt.round import Record

Watch = Callable[["Record"], None]


def complete(
    run: Run,
    rounds: int,
    *,
    folder: Folder | None = None,
    path: Path | None = None,
    trackers: Sequence[Tracking] = (),
    settings: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Train a run until `rounds` are behind it.

    Args:
        run: A prepared or resumed run.
        rounds: Number of rounds in all.
        folder: Where its records and checkpoints are written after every round. None: nowhere.
        path: Path of the folder, which is passed to trackers.
        trackers: Trackers that log the records as well.
        settings: What trackers are told about the run.
        watch: Called with the record of every round, after it has been written.
        names: Entries of the summary that replace those of the run.
    """
    with tracked(trackers, run, dict(settings or {}), path) as log:
        watchers = [log, *([folder.watch(run)] if folder else []), *([watch] if watch else [])]

        def after(record: Record) -> None:
            for one in watchers:
                one(record)

        run.train(rounds, after)
    if folder:
        folder.finish({**run.summary, **(names or {})})
