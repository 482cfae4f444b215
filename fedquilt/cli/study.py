"""Studies on the command line: progress while they run, and tables when they are over."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from typing_extensions import override

from fedquilt.cli.progress import Shown, round_bars, say_round, watch_bar
from fedquilt.cli.run_loop import Interrupted, settings_lines, title_of, values_of
from fedquilt.cli.show import print_json, say, show_text_table
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.summaries import UNDER_ATTACK
from fedquilt.storage.files import write_text
from fedquilt.studies.entries import PlannedRun
from fedquilt.studies.execute import Display, Grounds, Watch, finished, torch_settings_restored
from fedquilt.studies.plan import COMPARISON_FILE, Plan
from fedquilt.studies.result import Result
from fedquilt.studies.statistics import check_alike
from fedquilt.studies.study import Study, run_plan
from fedquilt.studies.table import render

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

    from fedquilt.round import Record
    from fedquilt.tasks import Task


def prepared(
    plan: Plan,
    sources: Mapping[str, str],
    folder: Path | None,
    console: Console,
    target: float | None = None,
    metric: str = "",
) -> Grounds:
    """Prepare a run of every entry before the first one begins, and show their settings.

    A budget that holds nothing, or a method that does not fit the task, is therefore an error
    before anything is trained.

    Args:
        plan: Plan of the study.
        sources: Source of the settings of each entry: a file, the demo or defaults.
        folder: Folder of the study. Entries whose first run is finished are not prepared. None:
            nothing is kept.
        console: Console that shows the settings.
        target: Value of the main metric that should be reached. None: there is none.
        metric: Metric to compare. Empty: the main one.

    Returns:
        Data and models that were loaded, which the runs use again.
    """
    from fedquilt.runs.milestones import check_target

    grounds = Grounds()
    first = {run.entry: run for run in reversed(plan.final_runs({}))}
    lines: list[tuple[str, str, str]] = []
    title = ""
    tasks: dict[str, list[str]] = {}
    for planned in (first[entry.name] for entry in plan.entries):
        if folder and finished(planned, folder / planned.folder):
            continue
        experiment = planned.experiment
        with torch_settings_restored():
            run = experiment.prepare(grounds.of(experiment))
        task = run.world.task
        tasks.setdefault(repr(task), []).append(planned.entry)
        if target is not None:
            check_target(target, task.main.name, task.main.is_rate)
        _check_metric(metric, task)
        seed = None if len(plan.seeds) > 1 else planned.seed
        lines.append((planned.entry, sources[planned.entry], values_of(experiment, run, seed)))
        title = title_of(", ".join(entry.name for entry in plan.entries), experiment, run)
    check_alike({"task": tasks})
    if lines:
        say(console, "\n".join([*settings_lines(lines), title]))
    if lines and (len(plan.seeds) > 1 or plan.tuning_runs):
        tuned = f", {len(plan.tuning_runs)} of them to tune" if plan.tuning_runs else ""
        say(
            console,
            f"{plan.num_runs} runs{tuned}; seed{'s'[: len(plan.seeds) != 1]} "
            f"{', '.join(map(str, plan.seeds))}",
        )
    return grounds


def _check_metric(metric: str, task: Task) -> None:
    """Raise a ConfigError for a metric that the task does not have.

    Metrics of domains and under attack are accepted with their suffix, as in NAME/DOMAIN. An empty
    name, which is the main metric, is accepted.
    """
    names = [measured.name for measured in task.measured]
    derived = (f"local_{task.main.name}", *UNDER_ATTACK)
    if metric and metric.partition("/")[0] not in (*names, *derived):
        raise ConfigError(
            f"--metric {metric} was asked for; no run records it.{nearest(metric, names)}"
        )


@dataclass(frozen=True)
class StudyRequest:
    """Request of a command for a study."""

    plan: Plan  # Plan of the study.
    folder: Path | None  # Folder of the study. None: nothing is kept.
    command: str  # Command that resumes the study, for the message if it is interrupted.
    jobs: int = 1  # Number of runs at the same time.
    confirmed: bool = False  # True: more than `MAX_RUNS` runs are accepted.


def run_study(
    request: StudyRequest,
    console: Console,
    grounds: Grounds | None = None,
    wrap: Callable[[Watch], Watch] | None = None,
) -> Study:
    """Run a study with its progress on the console, and return its results.

    Args:
        request: Plan and folder of the study, and how it is run.
        console: Console that shows the progress.
        grounds: Data and model that were prepared before. None: there are none.
        wrap: Returns the watch of the study, given the one that shows the progress. None: that one.

    Raises:
        Interrupted: The user pressed ctrl-C. The message says how to continue.
    """
    plan, folder = request.plan, request.folder
    with StudyProgress(console, plan) as progress:
        watch = wrap(progress) if wrap else progress
        try:
            return run_plan(plan, folder, request.jobs, watch, request.confirmed, grounds)
        except KeyboardInterrupt as error:
            state = f"The study was stopped with {progress.done} of {plan.num_runs} runs finished."
            if folder is None:
                raise Interrupted(
                    f"{state} Nothing of it is kept; with --out DIR it could be resumed."
                ) from error
            raise Interrupted(f"{state} Continue with: {request.command}") from error


class StudyProgress(Watch):
    """Progress of a study: bars on a terminal, and elsewhere a line per evaluation.

    One bar is for all runs, and one for each that is running.
    """

    def __init__(self, console: Console, plan: Plan) -> None:
        self.done = 0
        self._console = console
        self._lock = threading.Lock()
        self._total = plan.num_runs
        self._is_single = len(plan.seeds) == 1 and not plan.tuning_runs
        runs = [*plan.tuning_runs, *plan.final_runs({})]
        self._name_width = max(len(self._name(run)) for run in runs)
        self._bars = round_bars(console) if console.is_terminal else None
        self._all: TaskID | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: set[str] = set()  # Folders of runs that have begun.
        self._there = 0  # Runs that were finished before and are not reported yet.

    def _name(self, planned: PlannedRun) -> str:
        return planned.entry if self._is_single else planned.title

    def __enter__(self) -> StudyProgress:
        if self._bars is not None:
            self._bars.start()
            self._all = self._bars.add_task("runs", total=self._total, rate="", figures="")
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    @override
    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        name = self._name(planned)
        self._begun.add(planned.folder)
        shown = Shown(display.labels, display.percent)
        if self._bars is None:
            self._say_there()
            prefix = f"{name:<{self._name_width}}  "

            def by_line(record: Record) -> None:
                with self._lock:
                    say_round(self._console, prefix, display.rounds, shown, record)

            return by_line
        bars = self._bars
        task = bars.add_task(
            name, total=display.rounds, completed=display.done, rate="", figures=""
        )
        self._tasks[planned.folder] = task
        return watch_bar(bars, task, display.done, shown)

    def _say_there(self) -> None:
        with self._lock:
            if self._there:
                say(
                    self._console,
                    f"{self._there} of {self._total} runs are there and are not repeated",
                )
            self._there = 0

    @override
    def end(self, planned: PlannedRun, result: Result) -> None:
        with self._lock:
            self.done += 1
            self._there += planned.folder not in self._begun
            if result.diverged is not None:
                say(self._console, f"{self._name(planned)} diverged in round {result.diverged}")
        if self._bars is not None and self._all is not None:
            self._bars.update(self._all, completed=self.done)
            task = self._tasks.pop(planned.folder, None)
            if task is not None:
                self._bars.refresh()  # Without this the bar of a short run would never be drawn.
                self._bars.remove_task(task)


def show_study(
    study: Study,
    format: str,
    console: Console,
    stdout: TextIO,
    *,
    metric: str = "",
    target: float | None = None,
    baseline: str = "",
) -> None:
    """Print the tables of a study, and write their numbers as JSON into its folder.

    Args:
        study: A study that was run.
        format: "text", "markdown", "latex", "csv" or "json".
        console: Console for text.
        stdout: Stream for the other formats.
        metric: As in `Study.tables`.
        target: As in `Study.tables`.
        baseline: As in `Study.tables`.
    """
    numbers = study.to_json(metric, target, baseline)
    if study.path is not None:
        write_text(study.path / COMPARISON_FILE, json.dumps(numbers, indent=2) + "\n")
    if format == "json":
        print_json(numbers, stdout)
        return
    tables = study.tables(metric, target, baseline)
    if format != "text":
        print(render(tables, format), file=stdout)
        return
    for index, table in enumerate(tables):
        if index:
            say(console, "")
        show_text_table(console, table)
