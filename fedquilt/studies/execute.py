"""Run the planned runs of a study: those that are there are read, interrupted ones are resumed, the rest begins.

In one process, runs of one seed share their data and what an engine has recorded. With several
jobs each run has a process of its own (`workers.py`), and its numbers are the same.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from fedquilt.config import Experiment, Ground, read_toml
from fedquilt.errors import ConfigError, DivergenceError, RecordError
from fedquilt.experiment import Run
from fedquilt.files import why, write
from fedquilt.loop import complete
from fedquilt.records import Folder, holds_a_run, read
from fedquilt.round import Record
from fedquilt.round.labels import labels_by_share
from fedquilt.round.serve import grade
from fedquilt.settings import write as plain_settings
from fedquilt.studies.plan import PlannedRun
from fedquilt.studies.result import Result


@dataclass(frozen=True)
class Display:
    """What is needed to show the progress of one run.

    Attributes:
        rounds: Number of rounds in all.
        done: Rounds that are behind it, where it resumes.
        percent: True if the main figure is shown in percent.
        labels: Names of shares whose name is not the number.
    """

    rounds: int
    done: int = 0
    percent: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(run: Run, rounds: int) -> Display:
        labels = labels_by_share(run.method, run.fleet.kinds, run.world, run.evaluation.shares)
        return Display(rounds, run.server.round, run.world.task.main.is_rate, labels)


_COSTS = ("seconds", "bytes_down", "bytes_up", "link_seconds")  # numbers of a summary, each of which may be missing


class Watch(Protocol):
    """Told about the progress of a study. With several jobs it is called from several threads."""

    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        """Return a function that is called with every record of a run that begins or resumes."""

    def end(self, planned: PlannedRun, result: Result) -> None:
        """Take note of a run that is over, or was there already."""


class Unwatched:
    """A `Watch` that does nothing."""

    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        return lambda record: None

    def end(self, planned: PlannedRun, result: Result) -> None:
        return None


@dataclass
class Grounds:
    """Data, model and devices of the last run, which the next one uses again if its settings are the same."""

    _last: list[tuple[Experiment, Ground]] = field(default_factory=list)

    def of(self, experiment: Experiment) -> Ground:
        """Return the ground of an experiment. One is kept at a time, because data may be large."""
        for other, ground in self._last:
            if _same_ground(experiment, other):
                return ground
        self._last = []  # Free the old data before the new data is loaded.
        ground = experiment.ground()
        self._last = [(experiment, ground)]
        return ground


def _same_ground(one: Experiment, other: Experiment) -> bool:
    names = ("data", "model", "task", "fleet", "seed", "init")
    machines = (one.engine.device, one.engine.precision), (other.engine.device, other.engine.precision)
    return machines[0] == machines[1] and all(getattr(one, name) == getattr(other, name) for name in names)


def execute(
    runs: Sequence[PlannedRun],
    folder: Path | None,
    jobs: int = 1,
    watch: Watch | None = None,
    grounds: Grounds | None = None,
) -> list[Result]:
    """Run what is not there yet, and return the results in the order of the runs.

    Args:
        runs: Planned runs.
        folder: Folder of the study. None: nothing is written, and there is one job.
        jobs: Number of processes that run at the same time. 1: all run in this process.
        watch: Told about the progress.
        grounds: Data and model that were made before, if there are some.
    """
    watch = watch or Unwatched()
    found: dict[int, Result] = {}
    for place, planned in enumerate(runs):
        if folder and (result := finished(planned, folder / planned.folder)):
            found[place] = result
            watch.end(planned, result)
    rest = [(place, planned) for place, planned in enumerate(runs) if place not in found]
    if jobs > 1 and len(rest) > 1:
        from fedquilt.studies.workers import execute_in_processes

        assert folder is not None, "several jobs exchange their results through the study's folder"
        execute_in_processes([planned for _, planned in rest], folder, jobs, watch)
        for place, planned in rest:
            result = finished(planned, folder / planned.folder)
            assert result is not None, "a process that ended well has written its summary"
            found[place] = result
        return [found[place] for place in range(len(runs))]
    grounds = grounds or Grounds()
    for place, planned in rest:
        path = folder / planned.folder if folder else None
        found[place] = perform(planned, path, grounds, watch)
        watch.end(planned, found[place])
    return [found[place] for place in range(len(runs))]


def finished(planned: PlannedRun, path: Path) -> Result | None:
    """Return the result in a run's folder, if the run is over.

    Settings are not resolved, so that a study of many runs is read in little time.
    """
    summary = read_summary(path)
    if summary is None:
        return None
    if planned.measure == "training" and not ("metrics" in summary or "accuracy" in summary):
        raise RecordError(f"{path / 'summary.json'} is damaged: it has no metrics. Delete it to finish the run again.")
    is_short = summary.get("rounds", 0) < planned.rounds
    if is_short and "diverged" not in summary:
        return None
    records = _all_records(path, summary) if planned.measure == "training" else []
    return Result(planned.entry, planned.seed, summary, tuple(records))


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return how the run in a folder ended; None if it has not.

    Raises:
        RecordError: The file is there and is not what a run wrote.
    """
    file = path / "summary.json"
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read: {error}.") from error
    try:
        summary = json.loads(text)
    except ValueError as error:
        raise RecordError(f"{file} is damaged: {error}. Delete it to finish the run again.") from error
    wrong = _wrong_in(summary) if isinstance(summary, dict) else "it holds no object"
    if wrong:
        raise RecordError(f"{file} is damaged: {wrong}. Delete it to finish the run again.")
    return dict(summary)


def _wrong_in(summary: Mapping[str, Any]) -> str:
    """Return what a run would not have written into its summary; empty if nothing is wrong."""
    rounds = summary.get("rounds", 0)
    if type(rounds) is not int:
        return f"rounds = {rounds!r} was found; a whole number fits"
    metrics = summary.get("metrics", {})
    if not isinstance(metrics, Mapping):
        return f"metrics = {metrics!r} was found; a table fits"
    if "accuracy" in summary:
        metrics = {**metrics, "accuracy": summary["accuracy"]}
    for name, figures in metrics.items():
        if not isinstance(figures, Mapping) or not all(_is_number(figure) for figure in figures.values()):
            return f"{name} = {figures!r} was found; a number for each share fits"
    costs = [key for key in _COSTS if key in summary and not _is_number(summary[key])]
    return f"{costs[0]} = {summary[costs[0]]!r} was found; a number fits" if costs else ""


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _all_records(path: Path, summary: Mapping[str, Any]) -> list[Record]:
    """Return the records of a finished run. Without all of them its costs would be wrong."""
    remedy = f"Delete the folder {path} to train this run again."
    try:
        records = read(path)
    except RecordError as error:
        raise RecordError(f"{error} {remedy}") from error
    last = records[-1].round if records else 0
    if last < summary.get("rounds", 0):
        raise RecordError(
            f"{path / 'rounds.jsonl'} is damaged: its last round is {last}, and that of summary.json "
            f"{summary['rounds']}. {remedy}"
        )
    return records


def perform(planned: PlannedRun, path: Path | None, grounds: Grounds, watch: Watch) -> Result:
    """Train one run to its end, from its last checkpoint where there is one.

    A run whose loss is no longer a number counts with the state before that round, and its
    summary names the round as `diverged`.
    """
    if planned.measure != "training":
        with torch_settings_restored():
            return _measured(planned, path, grounds)
    with ExitStack() as stack:
        stack.enter_context(torch_settings_restored())
        experiment, run, folder = _opened(planned, path, grounds, stack)
        try:
            complete(
                run,
                experiment.rounds,
                folder=folder,
                path=path,
                trackers=experiment.tracking,
                settings=plain_settings(experiment),
                watch=watch.begin(planned, Display.of(run, experiment.rounds)),
                names=experiment.names,
            )
            summary = {**run.summary, **experiment.names}
        except DivergenceError:
            summary = {**run.summary, **experiment.names, **_diverged(run)}
            if folder:
                folder.finish(summary)
    return Result(planned.entry, planned.seed, summary, tuple(run.records))


@contextmanager
def torch_settings_restored() -> Iterator[None]:
    """Restore the number of threads, and whether algorithms are deterministic, when the block is over.

    A run sets both for the whole process, and leaves them where its settings do. Without this a large
    model would be trained with one thread after a small one, and with several in a process of its own.
    Their last digits would differ.
    """
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic)


@contextmanager
def warnings_shown_once() -> Iterator[None]:
    """Log a warning about a run once in the block, although every seed has the same one."""
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_first = message not in shown
        shown.add(message)
        return is_first

    logger = logging.getLogger("fedquilt.experiment")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _diverged(run: Run) -> dict[str, Any]:
    """Return the entries of a summary for a run that diverged: figures of its last state, and the round."""
    grades = run.grades
    if not run.records or not run.records[-1].grades.main:
        grades = grade(run.federation, run.server, run.fleet, run.engine, run.evaluation)
    return {"accuracy": grades.accuracy, "metrics": grades.metrics, "diverged": run.server.round + 1}


def _opened(
    planned: PlannedRun, path: Path | None, grounds: Grounds, stack: ExitStack
) -> tuple[Experiment, Run, Folder | None]:
    """Return the experiment, the run and its folder, which are new or as an earlier process left them."""
    experiment = planned.experiment
    if path is None:
        ground = grounds.of(experiment)
        run = experiment.prepare(ground)
        return experiment.settled(run, ground), run, None
    if not holds_a_run(path):
        ground = grounds.of(experiment)
        run = experiment.prepare(ground)
        settled = experiment.settled(run, ground)
        folder = stack.enter_context(Folder.create(path, settled.to_toml(), settled.checkpoint))
        return settled, run, folder
    config = path / "config.toml"
    there = Experiment.of(read_toml(config), file=str(config))
    settled = replace(there, rounds=experiment.rounds)
    folder = stack.enter_context(Folder.resume(path, settled.checkpoint))
    run = settled.prepare(grounds.of(settled))
    done = folder.load(run)
    if done > settled.rounds:
        raise ConfigError(f"{settled.rounds} rounds were asked for; the run in {path} has {done} behind it.")
    if settled != there:
        write_file(config, settled.to_toml())
    return settled, run, folder


def _measured(planned: PlannedRun, path: Path | None, grounds: Grounds) -> Result:
    """Return what a measure finds about a run that is prepared and not trained."""
    from fedquilt.studies.measures import MEASURES

    experiment = planned.experiment
    ground = grounds.of(experiment)
    run = experiment.prepare(ground)
    found = MEASURES[planned.measure](run, experiment.rounds)
    known = {"seed": planned.seed, "rounds": experiment.rounds, "measure": planned.measure}
    summary = {**experiment.names, **known, **found}
    if path is not None:
        write_file(path / "config.toml", experiment.settled(run, ground).to_toml())
        write_file(path / "summary.json", json.dumps(summary, indent=2) + "\n")
    return Result(planned.entry, planned.seed, summary)


def write_file(path: Path, text: str) -> None:
    """Write a file whole or not at all, and the folders above it.

    Raises:
        RecordError: It could not be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, [text.encode()])
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error
