"""The loop of every run, from Python and the command line: train, record, track, summarize."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fedquilt.runs.tracking import Tracking, tracked

if TYPE_CHECKING:
    from fedquilt.round import Record
    from fedquilt.runs.folder import Folder
    from fedquilt.runs.run import Run

Watch = Callable[["Record"], None]


def complete(
    run: Run,
    rounds: int,
    *,
    folder: Folder | None = None,
    trackers: Sequence[Tracking] = (),
    settings: Mapping[str, Any] | None = None,
    watch: Watch | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Train a run until it has completed a number of rounds.

    Args:
        run: A prepared or resumed run.
        rounds: Total number of rounds.
        folder: Folder that records and checkpoints are written to after every round. None: nothing
            is written.
        trackers: Trackers that log the records as well. Empty: none.
        settings: Settings of the run that trackers show. None: they show none.
        watch: Function that is called with the record of every round, after it has been written.
            None: no function is called.
        names: Entries of the summary that replace those of the run. None: none is replaced.
    """
    path = folder.path if folder else None
    with tracked(trackers, run, dict(settings or {}), path) as log:
        watchers = [log]
        if folder:
            watchers.append(folder.watch(run))
        if watch:
            watchers.append(watch)

        def after(record: Record) -> None:
            for watcher in watchers:
                watcher(record)

        run.train(rounds, after)
    if folder:
        folder.finish({**run.summary, **(names or {})})
