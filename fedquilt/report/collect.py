"""Runs and studies as reports see them: read from folders, with a description of all damage."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquilt.errors import ConfigError, FedquiltError, RecordError
from fedquilt.names import nearest
from fedquilt.round import Record
from fedquilt.runs.folder_files import read_log
from fedquilt.runs.round_log import rounds_text
from fedquilt.runs.summary_file import read_summary
from fedquilt.studies.comparison import Comparison
from fedquilt.studies.frames import metric_names
from fedquilt.studies.plan import STUDY_FILE, Plan
from fedquilt.studies.report import comparison
from fedquilt.studies.result import Result
from fedquilt.studies.stored import read_stored
from fedquilt.studies.study import Study
from fedquilt.studies.table import Table
from fedquilt.tasks.metrics.registry import kind_of

_FILES = ("config.toml", "rounds.jsonl", "rounds.jsonl.gz", "summary.json")
MAX_LISTED = 10  # Runs below a folder that an error lists


@dataclass(frozen=True)
class RunFolder:
    """The run in a folder, as far as its files can be read."""

    path: Path  # Folder of the run
    result: Result  # Its row, seed, summary and records
    config: str = ""  # Text of config.toml. Empty: there is none
    finished: bool = False  # True: it has a summary
    problems: tuple[str, ...] = ()  # Files and lines that are missing or damaged, in words

    @property
    def records(self) -> Sequence[Record]:
        """Return the intact records, oldest first."""
        return self.result.records

    @property
    def settings(self) -> Mapping[str, Any]:
        """Return the settings in config.toml as plain tables. Empty: they cannot be read."""
        try:
            return tomllib.loads(self.config)
        except (ValueError, RecursionError):
            return {}


@dataclass(frozen=True)
class Collection:
    """All that a report shows: runs, and the plan of their study if they belong to one."""

    runs: tuple[RunFolder, ...]
    plan: Plan | None = None  # Plan of the study. None: there is no study
    tables: tuple[Table, ...] = ()  # Tables that compare the runs. Empty: there is one run
    notes: tuple[str, ...] = ()  # Sentences on what is missing

    # Metric that the report shows. Empty: nothing was evaluated.
    metric: str = ""
    title: str = field(default="")

    @property
    def results(self) -> list[Result]:
        """Return the results of all runs, in order."""
        return [run.result for run in self.runs]

    @property
    def is_single(self) -> bool:
        """Return True if the report is of one run."""
        return len(self.runs) == 1 and self.plan is None


def collect(folders: Sequence[Path], metric: str = "") -> Collection:
    """Read run folders, or the folder of a study.

    Args:
        folders: Folders of runs, or of one study, or of both.
        metric: Name of the metric to show. Empty: the main one.

    Raises:
        ConfigError: A folder has no run, the runs cannot be compared, or no run has the metric.
        RecordError: A file in a folder is a link or a special file.
    """
    if not folders:
        raise ConfigError("a report was asked for without a folder; name a run or a study.")
    runs: list[RunFolder] = []
    notes: list[str] = []
    plans: list[Plan] = []
    for folder in map(Path, folders):
        if (folder / STUDY_FILE).is_file():
            plan, study_runs, study_notes = _read_study(folder)
            plans.append(plan)
            runs += study_runs
            notes += study_notes
        else:
            runs.append(read_run(folder))
    runs = _distinct(runs)
    title = ", ".join(Path(folder).resolve().name for folder in folders)
    if len(runs) == 1 and not plans:
        title = f"{runs[0].result.entry}, seed {runs[0].result.seed}"
    if not runs:
        return Collection((), plans[0], (), tuple(notes), "", title)
    shown = _shown_metric(runs, metric)
    plan_of_all = plans[0] if len(plans) == len(folders) == 1 else None
    tables: list[Table] = []
    if len(runs) > 1 or plan_of_all is not None:
        tables, table_notes = _compared(runs, plan_of_all, metric)
        notes += table_notes
    return Collection(tuple(runs), plan_of_all, tuple(tables), tuple(notes), shown, title)


def read_run(folder: Path, entry: str = "", seed: int | None = None) -> RunFolder:
    """Read the run in a folder. Damaged files and lines are described and break nothing.

    Args:
        folder: Folder of the run, or of a stored result.
        entry: Name of its row. Empty: the name of its method.
        seed: Its random seed, if it is known. None: the seed in its files.

    Raises:
        ConfigError: There is no run in the folder.
        RecordError: A file of it is a link or a special file.
    """
    if not any((folder / name).is_file() for name in _FILES):
        raise ConfigError(f"a report of {folder} was asked for; {_found_instead(folder)}")
    problems: list[str] = []
    config = _config_of(folder, problems)
    summary = _summary_of(folder, problems)
    records = _records_of(folder, problems)
    settings = RunFolder(folder, Result("", 0, {}), config).settings
    description = {**_described(settings, records), **(summary or {})}
    if summary is not None and records and records[-1].round != summary.get("rounds"):
        problems.append(
            f"summary.json was written after round {summary.get('rounds')}, and the last intact "
            f"record is of round {records[-1].round}."
        )
    if seed is None:
        seed = description["seed"] if type(description["seed"]) is int else 0
    result = Result(entry or str(description["method"]), seed, description, tuple(records))
    return RunFolder(folder, result, config, summary is not None, tuple(problems))


def _found_instead(folder: Path) -> str:
    """Return what is in a folder without a run, and what would work."""
    if not folder.exists():
        return "there is no such folder."
    if not folder.is_dir():
        return "it is a file. Name the folder of a run (--out of `fedquilt run`) or of a study."
    below = sorted(
        file.parent.relative_to(folder).as_posix()
        for pattern in ("*/config.toml", "*/*/config.toml")
        for file in folder.glob(pattern)
    )
    if not below:
        return "there is no run in it. Name the folder of a run (--out of `fedquilt run`)."
    more = ", …" if len(below) > MAX_LISTED else ""
    return f"there is no run in it, but in folders below it: {', '.join(below[:MAX_LISTED])}{more}."


def _config_of(folder: Path, problems: list[str]) -> str:
    """Return the text of config.toml. If it cannot be read, a problem is added."""
    try:
        return (folder / "config.toml").read_text()
    except FileNotFoundError:
        problems.append("config.toml is missing, so that the settings are not known.")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"config.toml cannot be read: {error}.")
    return ""


def _summary_of(folder: Path, problems: list[str]) -> dict[str, Any] | None:
    """Return the content of summary.json. None: it is missing or damaged."""
    try:
        return read_summary(folder)
    except RecordError as error:
        problems.append(str(error))
        return None


def _records_of(folder: Path, problems: list[str]) -> list[Record]:
    """Return the intact records of a folder. All others are described in `problems`."""
    if (folder / "rounds.jsonl.gz").is_file() and not (folder / "rounds.jsonl").exists():
        try:
            return list(read_stored(folder).records)
        except RecordError as error:
            problems.append(str(error))
            return []
    if not (folder / "rounds.jsonl").exists():
        problems.append("rounds.jsonl is missing, so that there are no records of rounds.")
        return []
    try:
        log = read_log(folder)
    except RecordError as error:
        problems.append(str(error))
        return []
    problems += [f"rounds.jsonl, {damage}." for damage in log.damage]
    if log.records and (missing := log.missing(log.records[-1].round)):
        problems.append(f"rounds.jsonl has no intact line of {rounds_text(missing)}.")
    return log.records


def _described(settings: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return what a summary would say of a run that is not finished, as far as it is known.

    Args:
        settings: Settings of the run. Empty: they are not known.
        records: Its intact records.
    """
    described: dict[str, Any] = {
        "method": _name_of(settings.get("method"), "run"),
        "seed": settings.get("seed", 0),
        "rounds": records[-1].round if records else 0,
        "bytes_down": sum(record.bytes_down for record in records),
        "bytes_up": sum(record.bytes_up for record in records),
        "seconds": sum(record.seconds for record in records),
    }
    link_seconds = [record.link_seconds for record in records if record.link_seconds is not None]
    if link_seconds:
        described["link_seconds"] = sum(link_seconds)
    if data := _name_of(settings.get("data"), ""):
        described["data"] = data
    graded = [record.grades for record in records if record.grades.main]
    if graded:
        kind = kind_of(graded[-1].main)
        described |= {"main": graded[-1].main, "metrics": graded[-1].metrics}
        described["percent"] = kind is None or kind.is_rate
        described["higher_is_better"] = kind is None or kind.higher_is_better
    return described


def _name_of(setting: object, default: str) -> str:
    """Return the name in a setting that is a name or a table with a name."""
    name = setting.get("name") if isinstance(setting, Mapping) else setting
    return name if isinstance(name, str) else default


def _read_study(folder: Path) -> tuple[Plan, list[RunFolder], list[str]]:
    """Return the plan of a study, its final runs that have begun, and notes on the others."""
    plan = Plan.read(folder)
    notes: list[str] = []
    chosen: Mapping[str, Any] = {}
    try:
        chosen = Study.read(folder).chosen
    except FedquiltError as error:  # A damaged run must not hide the others.
        notes.append(str(error))
    untuned = {entry.name for entry in plan.entries if entry.grid and entry.name not in chosen}
    notes += [f"{name} has no runs yet, because its tuning is not finished." for name in untuned]
    runs = []
    for planned in plan.final_runs(chosen):
        path = folder / planned.folder
        if planned.entry in untuned:
            continue
        if not any((path / name).is_file() for name in _FILES):
            notes.append(f"{planned.entry}, seed {planned.seed}: the run has not begun.")
            continue
        runs.append(read_run(path, planned.entry, planned.seed))
    return plan, runs, notes


def _distinct(runs: Iterable[RunFolder]) -> list[RunFolder]:
    """Return runs whose row and seed together are distinct.

    Runs that share both get the path of their folder as the name of the row.
    """
    listed = list(runs)
    keys = [(run.result.entry, run.result.seed) for run in listed]
    return [
        run
        if keys.count(key) == 1
        else replace(run, result=replace(run.result, entry=f"{run.result.entry} ({run.path})"))
        for run, key in zip(listed, keys, strict=True)
    ]


def _shown_metric(runs: Sequence[RunFolder], metric: str) -> str:
    """Return the name of the metric to show: the one that was asked for, or the main one.

    Raises:
        ConfigError: No run has recorded the metric that was asked for.
    """
    names = dict.fromkeys(
        name
        for run in runs
        for name in (
            *metric_names(run.result),
            *(name for record in run.records for name in record.grades.metrics),
        )
    )
    if not metric:
        return runs[0].result.main if names else ""
    if metric not in names:
        raise ConfigError(
            f"the metric {metric!r} was asked for; no run has recorded it."
            f"{nearest(metric, names) if names else ' Nothing was evaluated.'}"
        )
    return metric


def _compared(
    runs: Sequence[RunFolder], plan: Plan | None, metric: str
) -> tuple[list[Table], list[str]]:
    """Return the tables that compare runs, and notes if there are none.

    Args:
        runs: Runs of all rows.
        plan: Plan of the study. None: there is no study.
        metric: Name of the metric. Empty: the main one.

    Raises:
        ConfigError: The runs cannot be compared.
    """
    results = [run.result for run in runs if run.result.metric(metric)]
    if not results:
        return [], ["No run has evaluated a round yet, so that there is nothing to compare."]
    Comparison.of([run.result for run in runs], (), metric, None, "")
    return comparison(results, seeds=plan.seeds if plan else (), metric=metric), []
