"""Run the planned runs of a study.

Finished runs are read, interrupted ones are resumed, and the others begin. In one process, runs of
one seed share their data and what an engine has recorded. With several jobs each run has a process
of its own (`workers.py`), and its numbers are the same.
"""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from typing_extensions import override

from fedquilt.config.writing import write as plain_settings
from fedquilt.errors import ConfigError, DivergenceError, RecordError
from fedquilt.round import Record
from fedquilt.round.evaluate import evaluate
from fedquilt.round.labels import labels_by_share
from fedquilt.runs.experiment import Experiment, Ground
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import holds_a_run, read_records
from fedquilt.runs.loop import complete
from fedquilt.runs.model_settings import SearchTerms
from fedquilt.runs.round_log import gaps, rounds_text
from fedquilt.runs.run import Run
from fedquilt.runs.settings_file import read_settings
from fedquilt.runs.summary_file import read_summary, summary_text
from fedquilt.runs.trust import remember_code
from fedquilt.storage.files import write_text
from fedquilt.studies.entries import PlannedRun
from fedquilt.studies.measures import MEASURES, TRAINING
from fedquilt.studies.result import Result

_log = logging.getLogger("fedquilt")


@dataclass(frozen=True)
class Display:
    """Facts about one run that a display of its progress needs.

    Attributes:
        rounds: Number of rounds in all.
        done: Rounds that were finished before the run was resumed. 0: it is new.
        percent: True if the main figure is shown in percent.
        labels: Names of shares whose name is not the number.
    """

    rounds: int
    done: int = 0
    percent: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)

    @staticmethod
    def of(run: Run, rounds: int) -> Display:
        """Return the facts about a prepared run.

        Args:
            run: The run. Rounds that its server has finished count as done.
            rounds: Number of rounds in all, finished ones included.
        """
        labels = labels_by_share(run.method, run.fleet.kinds, run.world, run.evaluation.shares)
        return Display(rounds, run.server.round, run.world.task.main.is_rate, labels)


class Watch(Protocol):
    """Observer of a study's progress. With several jobs it is called from several threads."""

    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        """Return a function that receives the records of a run, one after each round.

        This method is called once for each run that begins or resumes.

        Args:
            planned: The run.
            display: Facts for a display of its progress.
        """

    def end(self, planned: PlannedRun, result: Result) -> None:
        """Receive the result of a run that has finished, or that was finished before.

        Args:
            planned: The run.
            result: Its summary and records.
        """


class Unwatched(Watch):
    """A `Watch` that does nothing."""

    @override
    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        return lambda record: None

    @override
    def end(self, planned: PlannedRun, result: Result) -> None:
        return None


@dataclass
class Grounds:
    """Data, model and devices of the last run, which the next run reuses if its settings agree."""

    # The last experiment and its ground. Empty: there was none yet.
    _last: list[tuple[Experiment, Ground]] = field(default_factory=list)

    def of(self, experiment: Experiment) -> Ground:
        """Return the ground of an experiment: the last one if it fits, or a newly loaded one.

        One ground is kept at a time, because data may be large.
        """
        for last_experiment, ground in self._last:
            if _same_ground(experiment, last_experiment):
                return ground
        self._last = []  # Free the old data before the new data is loaded.
        ground = experiment.ground()
        self._last = [(experiment, ground)]
        return ground


def _same_ground(first: Experiment, second: Experiment) -> bool:
    """Return True if two experiments can share their data, model and devices.

    Their seed, task, initial weights, computing device and precision must be equal too. Searched
    models also need equal settings of the search, which depend on the method.
    """
    names = ("data", "model", "task", "fleet", "seed", "init")
    if any(getattr(first, name) != getattr(second, name) for name in names):
        return False
    if any(
        getattr(first.engine, name) != getattr(second.engine, name)
        for name in ("device", "precision")
    ):
        return False
    if not any(model.is_searched for model in first.models):
        return True
    terms = [
        SearchTerms.of(experiment.method, experiment.engine.precision)
        for experiment in (first, second)
    ]
    return terms[0] == terms[1]


def execute(
    runs: Sequence[PlannedRun],
    folder: Path | None,
    jobs: int = 1,
    watch: Watch | None = None,
    grounds: Grounds | None = None,
) -> list[Result]:
    """Execute all runs that are not finished yet, and return the results in the order of the runs.

    Args:
        runs: Planned runs.
        folder: Folder of the study. None: nothing is written, and there is one job.
        jobs: Number of processes that run at the same time. 1: all run in this process.
        watch: Receives the progress. None: nothing does.
        grounds: Data and model that were prepared before. None: there are none.
    """
    watch = watch or Unwatched()
    results: dict[int, Result] = {}
    for index, planned in enumerate(runs):
        if folder and (result := finished(planned, folder / planned.folder)):
            results[index] = result
            watch.end(planned, result)

    pending = [(index, planned) for index, planned in enumerate(runs) if index not in results]
    if jobs > 1 and len(pending) > 1:
        from fedquilt.studies.workers import execute_in_processes

        assert folder is not None, "several jobs exchange their results through the study's folder"
        execute_in_processes([planned for _, planned in pending], folder, jobs, watch)
        for index, planned in pending:
            result = finished(planned, folder / planned.folder)
            assert result is not None, "a process that ended well has written its summary"
            results[index] = result
    else:
        grounds = grounds or Grounds()
        for index, planned in pending:
            path = folder / planned.folder if folder else None
            results[index] = perform(planned, path, grounds, watch)
            watch.end(planned, results[index])
    return [results[index] for index in range(len(runs))]


def finished(planned: PlannedRun, path: Path) -> Result | None:
    """Return the result in a run's folder. None: the run is not finished.

    It is not finished if there is no summary, or if the summary has fewer rounds than planned. A
    diverged run is finished. Settings are not resolved, so that a study of many runs is read
    quickly.

    Args:
        planned: The run.
        path: Folder of the run, which need not exist.

    Raises:
        RecordError: The summary or the records are damaged.
    """
    summary = read_summary(path)
    if summary is None:
        return None
    if planned.measure == TRAINING and not ("metrics" in summary or "accuracy" in summary):
        raise RecordError(
            f"{path / 'summary.json'} is damaged: it has no metrics. Delete it to finish the run "
            "again."
        )
    is_short = summary.get("rounds", 0) < planned.rounds
    if is_short and "diverged" not in summary:
        return None
    records = _all_records(path, summary) if planned.measure == TRAINING else []
    return Result(planned.entry, planned.seed, summary, tuple(records))


def _all_records(path: Path, summary: Mapping[str, Any]) -> list[Record]:
    """Return the records of a finished run. Missing rounds in between are logged as a warning.

    Args:
        path: Folder of the run.
        summary: Content of its summary.json.

    Raises:
        RecordError: Records cannot be read, or end before the last round. Costs would be wrong.
    """
    remedy = f"Delete the folder {path} to train this run again."
    try:
        records = read_records(path)
    except RecordError as error:
        raise RecordError(f"{error} {remedy}") from error
    last = records[-1].round if records else 0
    if last < summary.get("rounds", 0):
        raise RecordError(
            f"{path / 'rounds.jsonl'} is damaged: its last round is {last}, and that of "
            f"summary.json {summary['rounds']}. {remedy}"
        )
    if missing := gaps(records, last):
        _log.warning(
            "%s has no record of %s. Costs leave them out.",
            path / "rounds.jsonl",
            rounds_text(missing),
        )
    return records


def perform(planned: PlannedRun, path: Path | None, grounds: Grounds, watch: Watch) -> Result:
    """Train one run to its end, from its last checkpoint where there is one, and return its result.

    If the measure is not `TRAINING`, the measure is computed instead, without training. If the loss
    is no longer a number, the state before that round counts, and the summary names the round as
    `diverged`.

    Args:
        planned: The run.
        path: Folder of the run. None: nothing is written.
        grounds: Data and model of the run before, which are reused or replaced.
        watch: Receives the records.
    """
    if planned.measure != TRAINING:
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
                trackers=experiment.trackers,
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
    """Restore torch's number of threads and its determinism flag at the end of the block.

    A run sets both for the whole process and does not restore them. Without this a large model
    would be trained with one thread after a small one, and with several in a process of its own.
    The last digits of both results would differ.
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
    """Log each distinct message of `fedquilt.runs` once in the block.

    Without this, runs that differ in their seed would repeat the same warning.
    """
    shown: set[str] = set()

    def is_new(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_first = message not in shown
        shown.add(message)
        return is_first

    logger = logging.getLogger("fedquilt.runs")
    logger.addFilter(is_new)
    try:
        yield
    finally:
        logger.removeFilter(is_new)


def _diverged(run: Run) -> dict[str, Any]:
    """Return summary entries of a diverged run: figures of its last state, and the failed round.

    The state is that before the failed round. It is evaluated here unless its own round was
    evaluated.
    """
    grades = run.grades
    if not run.records or not run.records[-1].grades.main:
        grades = evaluate(run.federation, run.server, run.fleet, run.engine, run.evaluation)
    return {
        "accuracy": grades.accuracy,
        "metrics": grades.metrics,
        "diverged": run.server.round + 1,
    }


def _opened(
    planned: PlannedRun, path: Path | None, grounds: Grounds, stack: ExitStack
) -> tuple[Experiment, Run, Folder | None]:
    """Return the experiment, the run and its folder, new or as an earlier process left them.

    A stored run keeps its stored settings, except for the number of rounds, which is updated in its
    `config.toml`.

    Args:
        planned: The run.
        path: Folder of the run. None: nothing is written, and the returned folder is None.
        grounds: Data and model of the run before, which are reused or replaced.
        stack: Closes the folder at its end.

    Raises:
        ConfigError: The stored run has more rounds than planned.
    """
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
    stored = Experiment.of(read_settings(config, recorded=True), file=str(config))
    settled = replace(stored, rounds=experiment.rounds)
    folder = stack.enter_context(Folder.resume(path, settled.checkpoint))
    run = settled.prepare(grounds.of(settled))
    done = folder.load(run)
    if done > settled.rounds:
        raise ConfigError(
            f"{settled.rounds} rounds were asked for; the run in {path} has {done} behind it."
        )
    if settled != stored:
        write_text(config, settled.to_toml())
    return settled, run, folder


def _measured(planned: PlannedRun, path: Path | None, grounds: Grounds) -> Result:
    """Return the numbers of a measure for a run that is prepared and not trained.

    Args:
        planned: The run, with the name of its measure.
        path: Folder for `config.toml` and `summary.json`. None: nothing is written.
        grounds: Data and model of the run before, which are reused or replaced.
    """
    experiment = planned.experiment
    ground = grounds.of(experiment)
    run = experiment.prepare(ground)
    numbers = MEASURES[planned.measure](run, experiment.rounds)
    request = {"seed": planned.seed, "rounds": experiment.rounds, "measure": planned.measure}
    summary = {**experiment.names, **request, **numbers}
    if path is not None:
        config = experiment.settled(run, ground).to_toml()
        write_text(path / "config.toml", config)
        remember_code([tomllib.loads(config)])
        write_text(path / "summary.json", summary_text(summary, config.encode()))
    return Result(planned.entry, planned.seed, summary)
