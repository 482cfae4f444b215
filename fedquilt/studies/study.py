"""A study: plan it, tune it, run it, and read it again."""

from __future__ import annotations

import json
import math
import operator
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from fedquilt.config.toml import Settings
from fedquilt.config.writing import write as plain_settings
from fedquilt.display import Overview, Readable
from fedquilt.errors import ConfigError, RecordError, TrainingError
from fedquilt.runs.demo import defaults
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.lock import locked
from fedquilt.runs.settings_file import read_settings
from fedquilt.runs.summaries import figure_text
from fedquilt.runs.trust import check_study_code, remember_code
from fedquilt.storage.files import write_text
from fedquilt.studies.entries import Entry, PlannedRun, Point
from fedquilt.studies.execute import Grounds, Watch, execute, finished, warnings_shown_once
from fedquilt.studies.frames import frame
from fedquilt.studies.overview import overview_of
from fedquilt.studies.plain_values import to_json
from fedquilt.studies.plan import STUDY_FILE, Plan, runs_outside_a_study
from fedquilt.studies.plot import study_chart
from fedquilt.studies.report import comparison
from fedquilt.studies.result import Result
from fedquilt.studies.table import Table

if TYPE_CHECKING:
    import altair
    import pandas as pd

TUNED_FILE = "tuned.json"


@dataclass(frozen=True)
class Trial:
    """One point of a grid: its main figure on the validation part, for the widest model.

    Attributes:
        point: Values by the path of their setting.
        figures: Main figure by seed. NaN: the run diverged.
    """

    point: Point
    figures: Mapping[int, float]

    @property
    def mean(self) -> float:
        """Return the mean over the seeds. NaN: a run diverged."""
        return sum(self.figures.values()) / len(self.figures)


@dataclass(frozen=True, repr=False)
class Study(Readable):
    """Runs of several entries and seeds, and the tuning of their settings.

    Attributes:
        plan: Plan of the study.
        results: One result per final run that is finished.
        chosen: Point of the grid by entry, for entries that have a grid.
        trials: Figures of all points by entry.
        path: Folder of the study. None: it was not written.
    """

    plan: Plan
    results: tuple[Result, ...] = field(repr=False)
    chosen: Mapping[str, Point] = field(default_factory=dict)
    trials: Mapping[str, tuple[Trial, ...]] = field(default_factory=dict, repr=False)
    path: Path | None = None

    @override
    def _overview(self) -> Overview:
        return overview_of(self)

    def plot(self, metric: str = "", share: float | None = None) -> altair.LayerChart:
        """Return an Altair chart of a metric over rounds, with one line for each entry.

        Lines are means over seeds, and bands are the mean ± the sample deviation.

        Args:
            metric: Name of a metric. Empty: the task's main one.
            share: Share of the model that was evaluated. None: the widest one that all entries
                have.

        Raises:
            ConfigError: Altair is not installed (the extra `report` has it), no run is finished,
                runs cannot be compared, or none has the metric or share.
        """
        return study_chart(self.results, metric, share)

    def tables(
        self, metric: str = "", target: float | None = None, baseline: str = ""
    ) -> list[Table]:
        """Return the tables that compare the entries, and a table of the tuning if there was one.

        Args:
            metric: Name of a metric. Empty: the task's main one.
            target: Value of the metric for which rounds and bytes are shown. None: no such columns.
            baseline: Name of an entry. Further tables have the cost to reach percentages of its
                best figure. Empty: no such tables.
        """
        tables = comparison(
            self.results, seeds=self.plan.seeds, metric=metric, target=target, baseline=baseline
        )
        return [*tables, *self._tuning_tables()]

    def to_json(
        self, metric: str = "", target: float | None = None, baseline: str = ""
    ) -> dict[str, Any]:
        """Return all numbers of the tables as plain values.

        `tuned` has the chosen point and all trials by entry. It is left out if nothing was tuned.

        Args:
            metric: Name of a metric. Empty: the task's main one.
            target: Value of the metric for which rounds and bytes are included. None: they are not.
            baseline: Name of an entry, to whose best figure costs refer. Empty: no such costs.
        """
        numbers = to_json(
            self.results, seeds=self.plan.seeds, metric=metric, target=target, baseline=baseline
        )
        tuned = {
            name: {
                "chosen": dict(self.chosen[name]),
                "trials": [_plain_trial(trial) for trial in trials],
            }
            for name, trials in self.trials.items()
        }
        return {**numbers, **({"tuned": tuned} if tuned else {})}

    def frame(self, by_round: bool = False) -> pd.DataFrame:
        """Return a pandas DataFrame with one line per entry, seed and share.

        Figures are those of the last evaluated round. `fedquilt.studies.frames` lists the columns.

        Args:
            by_round: True: one line per entry, seed, round and share, with the figures of the
                round.
        """
        return frame(self.results, by_round)

    def _tuning_tables(self) -> list[Table]:
        if not self.trials:
            return []
        main = self.results[0].main if self.results else "figure"
        is_rate = bool(self.results) and self.results[0].is_in_percent(main)
        rows = []
        for name, trials in self.trials.items():
            for trial in trials:
                shown = "diverged" if math.isnan(trial.mean) else figure_text(trial.mean, is_rate)
                rows.append(
                    [
                        name,
                        _point_text(trial.point),
                        shown,
                        "yes" if trial.point == self.chosen[name] else "",
                    ]
                )
        note = (
            f"Tuned on {100 * self.plan.validation:g} % of every client's training samples, which "
            "these runs held back. The test set was not used."
        )
        return [Table("tuning", ["entry", "setting", f"validation {main}", "chosen"], rows, [note])]

    @staticmethod
    def read(folder: str | Path) -> Study:
        """Return the study in a folder with the runs that are finished. Nothing is trained.

        An entry whose tuning is not finished has no results, because its point is not chosen yet.
        """
        path = Path(folder)
        plan = Plan.read(path)
        runs: dict[str, list[tuple[PlannedRun, Result | None]]] = {
            entry.name: [] for entry in plan.entries
        }
        for run in plan.tuning_runs:
            runs[run.entry].append((run, finished(run, path / run.folder)))
        points: dict[str, Point] = {}
        trials: dict[str, tuple[Trial, ...]] = {}
        for entry in plan.entries:
            tuning = [(run, result) for run, result in runs[entry.name] if result]
            if entry.grid and len(tuning) == len(runs[entry.name]):
                points[entry.name], trials[entry.name] = _choose(entry, tuning)
        untuned = {entry.name for entry in plan.entries if entry.grid and entry.name not in points}
        final = [run for run in plan.final_runs(points) if run.entry not in untuned]
        results = [finished(run, path / run.folder) for run in final]
        return Study(plan, tuple(result for result in results if result), points, trials, path)


def run_plan(
    plan: Plan,
    folder: str | Path | None = None,
    jobs: int = 1,
    watch: Watch | None = None,
    confirmed: bool = False,
    grounds: Grounds | None = None,
) -> Study:
    """Tune the grids of a study, execute its final runs, and return the study.

    Runs that are finished in the folder are read and not repeated.

    Args:
        plan: Plan of the study.
        folder: Folder of the study. None: nothing is kept.
        jobs: Number of runs at the same time, in processes of their own.
        watch: Receives the progress. None: nothing does.
        confirmed: True: more than `MAX_RUNS` runs are accepted.
        grounds: Data and model that were prepared before. None: there are none.
    """
    if jobs < 1:
        raise ConfigError(f"{jobs} jobs were asked for; at least one is needed.")
    plan.check(confirmed)
    with ExitStack() as stack:
        stack.enter_context(warnings_shown_once())
        path = None if folder is None else Path(folder)
        if path is not None:
            _check_folder(plan, path)
            stack.enter_context(locked(path))
            _announce(plan, path)
        workspace = path
        if workspace is None and jobs > 1:  # Processes exchange their results through a folder.
            workspace = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="fedquilt-study-"))
            )
        points, trials = _tuned(plan, workspace, jobs, watch)
        results = execute(plan.final_runs(points), workspace, jobs, watch, grounds)
    return Study(plan, tuple(results), points, trials, path)


def check_comparable(plan: Plan, folder: Path | None) -> None:
    """Refuse entries with different data or tasks, by a `ConfigError`.

    Entries of a study that is already in the folder are included. Their settings must not change.

    Args:
        plan: Plan of the study.
        folder: Folder of the study, which need not exist. None: nothing is kept.
    """
    plan.check_comparable()
    if folder is not None and (folder / STUDY_FILE).exists():
        stored = Plan.read(folder)
        plan.check_extends(stored, folder)
        plan.extending(stored).check_comparable()


def _check_folder(plan: Plan, folder: Path) -> None:
    """Refuse a file, and a folder that holds a run or a study with other settings.

    An empty or missing folder is accepted, and so is a study that the plan continues or extends.
    """
    if folder.is_file():
        raise ConfigError(
            f"the folder {folder} was asked for; a file is there. Name another folder for the "
            "study."
        )
    if (folder / STUDY_FILE).exists():
        plan.check_extends(Plan.read(folder), folder)
    elif (folder / "config.toml").exists():
        raise ConfigError(
            f"the folder {folder} was asked for; a run is there. Name another folder for the study."
        )
    elif hint := runs_outside_a_study(folder):
        raise ConfigError(f"the folder {folder} was asked for; there is no study in it.{hint}")


def _announce(plan: Plan, folder: Path) -> None:
    """Write `study.toml` before the first run begins.

    Entries and seeds that the file has already are kept. Code that settings name is added to the
    user's list of trusted code.
    """
    if (folder / STUDY_FILE).exists():
        stored = Plan.read(folder)
        # Another process may have written the file before this one had the lock.
        plan.check_extends(stored, folder)
        plan = plan.extending(stored)
    write_text(folder / STUDY_FILE, plan.to_toml())
    # Code of stored entries was compared with the list when the study was opened.
    remember_code(entry.settings for entry in plan.entries)


def _tuned(
    plan: Plan, folder: Path | None, jobs: int, watch: Watch | None
) -> tuple[dict[str, Point], dict[str, tuple[Trial, ...]]]:
    """Execute all points of the grids on the validation part, and choose one for each entry.

    With a folder, `tuned.json` is written into each entry's folder.

    Args:
        plan: Plan of the study.
        folder: Folder of the study. None: nothing is written.
        jobs: Number of processes at the same time.
        watch: Receives the progress. None: nothing does.

    Returns:
        The best point and all trials, both by entry. Entries without a grid are left out.
    """
    runs = plan.tuning_runs
    results = execute(runs, folder, jobs, watch)
    chosen: dict[str, Point] = {}
    trials: dict[str, tuple[Trial, ...]] = {}
    for entry in plan.entries:
        if not entry.grid:
            continue
        pairs = [
            (run, result)
            for run, result in zip(runs, results, strict=True)
            if run.entry == entry.name
        ]
        chosen[entry.name], trials[entry.name] = _choose(entry, pairs)
        if folder is not None:
            _write_choice(entry, chosen[entry.name], trials[entry.name], folder / entry.folder)
    return chosen, trials


def _write_choice(entry: Entry, chosen: Point, trials: Sequence[Trial], folder: Path) -> None:
    """Write `tuned.json`, with the chosen point and the figures of all points.

    With more rounds tuning may choose another point. Final runs that began with the earlier point
    cannot be resumed with it.

    Args:
        entry: Entry that was tuned.
        chosen: Point that was chosen.
        trials: Figures of all points.
        folder: Folder of the entry.

    Raises:
        ConfigError: The final runs in the folder have another point.
    """
    file = folder / TUNED_FILE
    if file.exists() and any(folder.glob("seed*")):
        earlier = _read_choice(file)
        if earlier != chosen:
            raise ConfigError(
                f"{entry.name}: tuning chose {_point_text(chosen)}; the runs in {folder} have "
                f"{_point_text(earlier)}. Name another folder for these settings."
            )
    tuned = {"chosen": chosen, "trials": [_plain_trial(trial) for trial in trials]}
    write_text(file, json.dumps(tuned, indent=2) + "\n")


def _read_choice(file: Path) -> Point:
    try:
        point: Point = json.loads(file.read_text())["chosen"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {error}.") from error
    if not isinstance(point, dict):
        raise RecordError(f"{file} is damaged: chosen is {str(point)[:40]!r}, and a table fits.")
    return point


def _point_text(point: Point) -> str:
    return ", ".join(f"{path} = {value}" for path, value in point.items())


def _choose(
    entry: Entry, runs: Sequence[tuple[PlannedRun, Result]]
) -> tuple[Point, tuple[Trial, ...]]:
    """Return the point with the best mean figure, the first of equal ones, and all trials.

    The figure is the task's main one, of the widest model, in the last evaluated round. A point
    with which a run diverged is never chosen. If all diverged, a `TrainingError` is raised.

    Args:
        entry: Entry whose grid is tuned.
        runs: All tuning runs of this entry, with their results.
    """
    trials = []
    for point in entry.points:
        figures = {run.seed: _widest_figure(result) for run, result in runs if run.point == point}
        trials.append(Trial(point, figures))
    candidates = [trial for trial in trials if not math.isnan(trial.mean)]
    if not candidates:
        raise TrainingError(
            f"{entry.name}: every point of the grid over {', '.join(entry.grid)} diverged. Try "
            "smaller rates."
        )
    sign = 1.0 if runs[0][1].higher_is_better else -1.0
    best = max(candidates, key=lambda trial: sign * trial.mean)
    return best.point, tuple(trials)


def _widest_figure(result: Result) -> float:
    figures = result.metric()
    if result.diverged is not None or not figures:
        return math.nan
    figure = figures[max(figures, key=float)]
    return figure if math.isfinite(figure) else math.nan


def _plain_trial(trial: Trial) -> dict[str, Any]:
    figures = {
        str(seed): None if math.isnan(figure) else figure for seed, figure in trial.figures.items()
    }
    return {"point": dict(trial.point), "figures": figures}


def study(  # noqa: PLR0913  # The keywords are the user's interface.
    entries: Mapping[str, Experiment | Settings] | Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    grid: Mapping[str, Sequence[Any]] | None = None,
    validation: float = 0.1,
    tuning_seeds: int = 1,
    tuning: Settings | None = None,
    out: str | Path | None = None,
    jobs: int = 1,
    watch: Watch | None = None,
    confirmed: bool = False,
    trust: bool = False,
) -> Study:
    """Run every entry with every seed, and return a `Study` with tables and a DataFrame.

    With `out` each run has a folder inside, and a call that was interrupted continues where it
    stopped. Finished runs are not repeated, so that entries and seeds can be added.

    Args:
        entries: Experiments, or settings as `config.toml` has them, by name. Or names of methods
            (with their defaults on the bundled digits) and TOML files.
        seeds: Random seeds. They replace the seed of an experiment.
        grid: Values to try, by the path of a setting (`method.local.optimizer.lr`). The best point
            of each entry, on the validation part, is then run with all seeds. None: no tuning.
        validation: Share of every client's training samples that tuning runs hold back.
        tuning_seeds: Number of the seeds with which a grid is tuned.
        tuning: Settings that tuning runs have instead, such as `{"rounds": 10}`.
        out: Folder of the study. None: nothing is kept.
        jobs: Number of runs at the same time, each in a process of its own.
        watch: Receives the progress. None: nothing does.
        confirmed: True: more than 1,000 runs are accepted.
        trust: True: run code that the folder or a TOML file of a run names, and add it to the
            user's list of trusted code. False: refuse code that is not in the list.

    Example:
        >>> import fedquilt as fq
        >>> settings = {"data": "diabetes", "rounds": 1, "fleet": {"clients": 4}}
        >>> comparison = fq.study(
        ...     {name: {**settings, "method": name} for name in ("fedavg", "heterofl")},
        ...     seeds=(0, 1),
        ... )
        >>> [(result.entry, result.seed) for result in comparison.results]
        [('fedavg', 0), ('heterofl', 0), ('fedavg', 1), ('heterofl', 1)]
    """
    if out is not None:
        check_study_code(out, trust)
    named = (
        entries
        if isinstance(entries, Mapping)
        else {name: _settings_of(name, trust) for name in _names(entries)}
    )
    values = {
        path: _listed(choices, f"the values of {path}") for path, choices in (grid or {}).items()
    }
    rows = []
    for name, entry in named.items():
        if not isinstance(entry, (Experiment, Mapping)):
            raise ConfigError(
                f"study({{{name!r}: {entry!r}}}) was called; an Experiment or a table of settings "
                "fits."
            )
        plain = plain_settings(entry) if isinstance(entry, Experiment) else dict(entry)
        rows.append(
            Entry(name, {key: value for key, value in plain.items() if key != "seed"}, values)
        )
    plan = Plan(tuple(rows), _whole_seeds(seeds), validation, tuning_seeds, dict(tuning or {}))
    check_comparable(plan, None if out is None else Path(out))
    return run_plan(plan, out, jobs, watch, confirmed)


def _names(entries: Sequence[str]) -> Sequence[str]:
    if isinstance(entries, str):
        raise ConfigError(
            f"study({entries!r}) was called; a list of names or a mapping fits: "
            f"study([{entries!r}])."
        )
    names = _listed(entries, "the entries")
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(
                f"study([{name!r}]) was called; names of methods and TOML files fit, or a mapping."
            )
        if names.count(name) > 1:
            raise ConfigError(f"study({list(names)}) was called; give {name!r} once.")
    return names


def _listed(values: Iterable[Any], description: str) -> tuple[Any, ...]:
    """Return several values as a tuple. A text or a single value is a `ConfigError`.

    Args:
        values: Values that the user gave to `study`.
        description: Name of the argument, for the message.
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise ConfigError(f"study was called with {values!r} as {description}; a list fits.")
    return tuple(values)


def _whole_seeds(seeds: Iterable[int]) -> tuple[int, ...]:
    """Return seeds as Python integers. NumPy's integers are converted.

    Values that are not whole numbers, or not in a list, are a `ConfigError`.
    """
    try:
        return tuple(operator.index(seed) for seed in _listed(seeds, "seeds"))
    except TypeError as error:
        raise ConfigError(
            f"study was called with the seeds {seeds!r}; whole numbers fit."
        ) from error


def _settings_of(name: str, trust: bool) -> Settings:
    return read_settings(name, trust) if name.endswith(".toml") else defaults(name)
