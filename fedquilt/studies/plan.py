"""Plan of a study: its runs, their folders, and the content of `study.toml`.

DIR/
├── study.toml                     the request, written before the first run begins
├── compare.json                   the numbers of the tables, written by `fedquilt compare`
├── lock                           held by the process that runs the study
├── ENTRY/
│   ├── seed0/ seed1/ …            one run per seed (`records.py`)
│   ├── tuning/POINT-seed0/ …      runs on the validation part, one per point of the grid
│   └── tuned.json                 figures of all points, and the point that was chosen
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquilt.config.toml import Settings, assign, parse_path, read_toml
from fedquilt.errors import ConfigError
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import check_folder
from fedquilt.runs.overlay import overlay
from fedquilt.studies.differences import entry_differences, value_differences
from fedquilt.studies.entries import (
    Entry,
    PlannedRun,
    Point,
    at_point,
    num_rounds,
    point_name,
    value_name,
)
from fedquilt.studies.measures import TRAINING, measure_problems
from fedquilt.studies.statistics import check_alike

MAX_RUNS = 1_000  # More runs than this are started only if they are confirmed.
STUDY_FILE = "study.toml"
COMPARISON_FILE = "compare.json"
# Files in the folder of every study, beside the folders of its entries.
_FILES = (
    STUDY_FILE,
    COMPARISON_FILE,
    "lock",
)
_CHECK = "# checksum of all above: "  # Start of the last line of a study's file
_log = logging.getLogger("fedquilt")


@dataclass(frozen=True)
class Plan:
    """Request for a study: its rows, their seeds, and how a grid is tuned.

    Attributes:
        entries: Rows, each with a name of its own.
        seeds: Random seeds of the final runs of every entry.
        validation: Share of every client's training samples on which a grid is tuned.
        tuning_seeds: Number of seeds with which a grid is tuned. The first ones are used.
        tuning: Settings that tuning runs have instead, such as fewer rounds.
        measure: As in `PlannedRun`.
    """

    entries: tuple[Entry, ...]
    seeds: tuple[int, ...] = (0,)
    validation: float = 0.1
    tuning_seeds: int = 1
    tuning: Settings = field(default_factory=dict)
    measure: str = TRAINING

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ConfigError("\n  ".join(["a study was asked for that cannot be run:", *problems]))

    def _problems(self) -> Iterator[str]:
        yield from self._problems_of_names()
        wrong_seeds = [
            seed for seed in self.seeds if type(seed) is not int or not 0 <= seed < 2**63
        ]
        if not self.seeds:
            yield "it has no seeds; give at least one."
        elif wrong_seeds:
            yield f"the seed {wrong_seeds[0]!r} was given; whole numbers from 0 on fit."
        elif len(set(self.seeds)) < len(self.seeds):
            yield f"the seeds {' '.join(map(str, self.seeds))} repeat one; give each once."
        if not 0 < self.validation < 1:
            yield (
                f"validation = {self.validation} was given; a share of the training samples in "
                "(0, 1) fits."
            )
        if not 1 <= self.tuning_seeds <= len(self.seeds):
            yield (
                f"tuning with {self.tuning_seeds} seeds was asked for; there are {len(self.seeds)}."
            )
        yield from measure_problems(self.measure)
        if not isinstance(self.tuning, Mapping):
            yield f"tuning = {self.tuning!r} was given; a table of settings fits."
        for entry in self.entries:
            if not isinstance(entry.settings, Mapping):
                yield f"{entry.name}: {entry.settings!r} was given; a table of settings fits."
            elif type(num_rounds(entry.settings)) is not int:
                yield (
                    f"{entry.name}: rounds = {entry.settings['rounds']!r} was given; a whole "
                    "number fits."
                )
            for path, values in entry.grid.items():
                for problem in _problems_of_values(path, values):
                    yield f"{entry.name}: the grid over {path} {problem}"

    def _problems_of_names(self) -> Iterator[str]:
        names = [entry.name for entry in self.entries]
        if not names:
            yield "it has no entries; name at least one method or file."
        for name in dict.fromkeys(name for name in names if names.count(name) > 1):
            yield (
                f"{name} is given {names.count(name)} times; give each entry once, or another name."
            )
        folders = [entry.folder.casefold() for entry in self.entries]
        for entry in self.entries:
            if folders.count(entry.folder.casefold()) > 1 and names.count(entry.name) == 1:
                yield (
                    f"the name {entry.name!r} gives the same folder as another one; give it "
                    "another name."
                )
            if entry.folder.casefold() in _FILES:
                yield (
                    f"the name {entry.name!r} is that of a file of every study; give it another "
                    "name."
                )

    @property
    def num_runs(self) -> int:
        """Return the number of runs: final runs of all entries and seeds, and all tuning runs."""
        tuning = sum(
            math.prod(map(len, entry.grid.values())) for entry in self.entries if entry.grid
        )
        return tuning * self.tuning_seeds + len(self.entries) * len(self.seeds)

    def check(self, confirmed: bool = False) -> None:
        """Refuse more than `MAX_RUNS` runs, and settings of entries that do not resolve.

        One final run and all points of the grid are checked for each entry. Nothing is trained.

        Args:
            confirmed: True: any number of runs is accepted.

        Raises:
            ConfigError: There are too many runs, or settings have problems, which are listed by
                entry.
        """
        if self.num_runs > MAX_RUNS and not confirmed:
            raise ConfigError(
                f"a study of {self.num_runs:,} runs was asked for; more than {MAX_RUNS:,} are "
                "started only with --yes (in Python: confirmed=True)."
            )
        problems: dict[str, list[str]] = {}  # Names of entries by their common problem.
        for entry in self.entries:
            first_point = next(iter(entry.points), {})
            tuning = self._tuning_runs(entry)[: math.prod(map(len, entry.grid.values()))]
            for run in (self._final(entry, self.seeds[0], first_point), *tuning):
                try:
                    Experiment.of(run.settings)
                except ConfigError as error:
                    problems.setdefault(str(error), []).append(entry.name)
                    break  # The other points would repeat the problem.
        if problems:
            raise ConfigError(
                "\n".join(f"{'; '.join(names)}: {problem}" for problem, names in problems.items())
            )

    def check_comparable(self) -> None:
        """Refuse entries with different data or tasks, because their figures cannot be compared.

        A task that is not named follows from the data, and is therefore that of the other entries.

        Raises:
            ConfigError: Entries differ. The message lists them by data or task.
        """
        data: dict[str, list[str]] = {}
        tasks: dict[str, list[str]] = {}
        for entry in self.entries:
            experiment = self._final(entry, self.seeds[0], {}).experiment
            options = json.dumps(experiment.data.options, default=str, sort_keys=True)
            data.setdefault(
                f"{experiment.data.name} {options.replace('{}', '')}".strip(), []
            ).append(entry.name)
            if experiment.task is not None:
                tasks.setdefault(repr(experiment.task), []).append(entry.name)
        check_alike({"data": data, "task": tasks})

    @property
    def tuning_runs(self) -> list[PlannedRun]:
        """Return the runs on the validation part, for all points of the grids and the tuning seeds.

        They are ordered by entry, then by seed, then by point. Entries without a grid have none.
        """
        return [run for entry in self.entries for run in self._tuning_runs(entry)]

    def final_runs(self, chosen: Mapping[str, Point]) -> list[PlannedRun]:
        """Return the runs of all seeds, seed by seed, because entries of one seed share their data.

        Args:
            chosen: Chosen point of the grid by the name of the entry. Entries that are missing here
                run with their own settings.
        """
        return [
            self._final(entry, seed, chosen.get(entry.name, {}))
            for seed in self.seeds
            for entry in self.entries
        ]

    def _final(self, entry: Entry, seed: int, point: Point) -> PlannedRun:
        settings = at_point(entry.settings, point)
        settings["seed"] = seed
        return PlannedRun(
            entry.name, seed, settings, f"{entry.folder}/seed{seed}", point, measure=self.measure
        )

    def _tuning_runs(self, entry: Entry) -> list[PlannedRun]:
        if not entry.grid:
            return []
        runs = []
        for seed in self.seeds[: self.tuning_seeds]:
            for point in entry.points:
                settings = self._on_validation(
                    at_point(overlay(entry.settings, self.tuning), point)
                )
                settings["seed"] = seed
                folder = f"{entry.folder}/tuning/{point_name(point)}-seed{seed}"
                runs.append(PlannedRun(entry.name, seed, settings, folder, point, "tuning"))
        return runs

    def _on_validation(self, settings: Settings) -> Settings:
        """Change settings in-place so that a run is evaluated on the validation part alone.

        It is evaluated once, at the end, unless the settings ask for more. A validation share in
        the settings is kept. The same settings are returned.
        """
        data = settings.get("data", {})
        # A setting of 0 is kept, because it means that the data has a validation part of its own.
        if not (isinstance(data, Mapping) and "validation" in data):
            assign(settings, ["data", "validation"], self.validation)
        evaluation = settings.get("evaluation", {})
        if not (isinstance(evaluation, Mapping) and "every" in evaluation):
            assign(settings, ["evaluation", "every"], 0)
        return assign(settings, ["evaluation", "on"], "validation")

    # --- the file --------------------------------------------------------------------------------

    def to_toml(self) -> str:
        """Return the text of `study.toml`, from which `Plan.read` makes an equal plan.

        Seeds in the settings of entries are left out. The last line is a checksum.
        """
        import tomli_w

        entries = [
            {
                "name": entry.name,
                "grid": {path: list(values) for path, values in entry.grid.items()},
            }
            | {"settings": {key: value for key, value in entry.settings.items() if key != "seed"}}
            for entry in self.entries
        ]
        plain = {
            "seeds": list(self.seeds),
            "validation": self.validation,
            "tuning_seeds": self.tuning_seeds,
            "measure": self.measure,
            "tuning": self.tuning,
            "entries": entries,
        }
        text = tomli_w.dumps(plain)
        return f"{text}\n{_CHECK}{_file_checksum(text)}\n"

    @staticmethod
    def read(folder: Path) -> Plan:
        """Return the plan in a study's folder.

        A warning is logged if the file was changed after it had been written.

        Raises:
            ConfigError: There is no `study.toml`, or it is not what a study wrote.
        """
        file = folder / STUDY_FILE
        if not file.is_file():
            raise ConfigError(f"the study in {folder} was asked for; {_found_instead(folder)}")
        check_folder(folder)
        plain = read_toml(file)
        text, _, check = file.read_text().partition(f"\n{_CHECK}")
        if check and check.strip() != _file_checksum(text):
            _log.warning(
                "%s is not as it was written: it was edited, or it is damaged. What it says now "
                "counts.",
                file,
            )
        try:
            entries = [
                Entry(
                    table["name"],
                    table["settings"],
                    {path: tuple(values) for path, values in table["grid"].items()},
                )
                for table in plain["entries"]
            ]
            return Plan(
                tuple(entries),
                tuple(plain["seeds"]),
                plain["validation"],
                plain["tuning_seeds"],
                plain["tuning"],
                plain["measure"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file} is not what a study wrote: {type(error).__name__} {error}."
            ) from error
        except ConfigError as error:
            raise ConfigError(f"{file} is not what a study wrote: {error}") from error

    def check_extends(self, other: Plan, folder: Path) -> None:
        """Refuse a folder in which an entry of the same name has other settings.

        Other seeds and other entries are accepted, because finished runs are not repeated. More
        rounds are accepted too, because finished runs are resumed. If both plans have grids, their
        validation share, tuning settings and tuning seeds must agree.

        Args:
            other: The plan of the study in the folder.
            folder: The folder, for the message.

        Raises:
            ConfigError: Settings, tuning or the measure differ. All differences are listed.
        """
        lines = []
        earlier = {entry.name: entry for entry in other.entries}
        for entry in self.entries:
            if entry.name in earlier:
                lines += [
                    f"{entry.name}: {line}"
                    for line in entry_differences(entry, earlier[entry.name])
                ]
        if self.has_grid and other.has_grid:
            lines += value_differences(self._tuning_choices, other._tuning_choices)
        lines += value_differences({"measure": self.measure}, {"measure": other.measure})
        if lines:
            listed = "\n  ".join(lines)
            raise ConfigError(
                f"the folder {folder} was asked for; the study there has other settings:\n  "
                f"{listed}\n"
                "  Ask for what it was, or name another folder."
            )

    def extending(self, other: Plan) -> Plan:
        """Return this plan with the entries and seeds of another one that it leaves out.

        An entry that both plans have is taken from this plan. The result is written to
        `study.toml`. Without the other plan's entries and seeds, runs with other settings could
        later replace those that are in the folder.

        Args:
            other: A plan that `check_extends` accepts.
        """
        entries = {entry.name: entry for entry in (*other.entries, *self.entries)}
        tuned = self if self.has_grid else other
        return replace(
            self,
            entries=tuple(entries.values()),
            seeds=tuple(dict.fromkeys((*other.seeds, *self.seeds))),
            validation=tuned.validation,
            tuning_seeds=tuned.tuning_seeds,
            tuning=tuned.tuning,
        )

    @property
    def has_grid(self) -> bool:
        """Return True if at least one entry has a grid to tune."""
        return any(entry.grid for entry in self.entries)

    @property
    def _tuning_choices(self) -> dict[str, Any]:
        """Return the validation share, tuning settings and tuning seeds by name.

        Besides settings and grid, the choice of a point depends on nothing else.
        """
        return {
            "validation": self.validation,
            "tuning": self.tuning,
            "seeds of tuning": self.seeds[: self.tuning_seeds],
        }


def _found_instead(folder: Path) -> str:
    """Return the end of a message: the content of the folder in place of a study, and a remedy."""
    if folder.is_file():
        return "this is a file. Name the folder that --out named."
    if not folder.is_dir():
        return "there is no such folder."
    if (folder / "config.toml").is_file():
        return "a single run is in it. Name the folder of the whole study, which has a study.toml."
    return f"there is no study in it.{runs_outside_a_study(folder)}"


def runs_outside_a_study(folder: Path) -> str:
    """Return a sentence about runs in a folder that belong to no study. Empty: there are none.

    Only runs directly below the folder are found. Earlier versions of `compare` wrote one run into
    DIR/METHOD.
    """
    names = sorted(file.parent.name for file in folder.glob("*/rounds.jsonl"))
    if not names:
        return ""
    command = shlex.join(["fedquilt", "run", "--resume", str(folder / names[0])])
    return (
        f" It has the runs {', '.join(names)}, which an earlier version or `fedquilt run` wrote. "
        f"Continue each with {command}, or name another folder for a study."
    )


def _file_checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _problems_of_values(path: str, values: Sequence[Any]) -> Iterator[str]:
    """Yield the problems of one path of a grid, each as the end of a sentence.

    Args:
        path: Dotted path of the setting.
        values: Values that are to be tried.
    """
    names = [value_name(value).casefold() for value in values]
    if not parse_path(path):
        yield "was asked for; write a path as in method.local.optimizer.lr."
    if parse_path(path) == ["seed"]:
        yield "was asked for; seeds are not tuned. Name them as the seeds of the study."
    if parse_path(path) in (["data"], ["data", "name"]) or parse_path(path)[:1] == ["task"]:
        yield (
            "was asked for; figures on other data or of another task cannot be compared. Make each "
            "one a study."
        )
    if not values:
        yield "has no values."
    elif len(set(names)) < len(names):
        yield "repeats a value, or has two that differ in type or in capital letters alone."
