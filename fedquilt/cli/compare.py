"""`fedquilt compare`: several methods, seeds and settings on the same data, in one table."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.cli.options import (
    File,
    Flag,
    Grid,
    Methods,
    Options,
    Place,
    Real,
    Seeds,
    TableFormat,
    Text,
    Whole,
)
from fedquilt.cli.output import output
from fedquilt.errors import ConfigError
from fedquilt.names import nearest

if TYPE_CHECKING:
    from fedquilt.config.toml import Settings
    from fedquilt.studies.plan import Plan

_GOES_WITH_RESUME = ("jobs", "baseline", "metric", "format", "yes", "trust")


@dataclass(frozen=True)
class CompareRequest(Options):
    """Train several methods on the same data, model and devices, and show them in one table.

    With --seeds every method is trained with every seed, and the table has means and sample
    deviations. With --grid the settings of each method are tuned first, on samples that every
    client holds back, and never on the test set. The best ones are then trained with all seeds.
    With --out each run has a folder of its own inside. The same command again resumes interrupted
    runs and does not repeat finished ones.
    """

    # names of `fedquilt list methods`, file.py:factory, or TOML files of whole experiments
    methods: Methods = ()
    # continue the study in this folder; METHOD… chooses entries, --rounds trains longer
    resume: Place = None
    # settings of all methods; if not given the demo's, or with --model or --data the defaults
    config: File = None
    # random seeds that every method is trained with, such as 0 1 2; if not given that of --seed
    seeds: Seeds = ()
    # values of a setting to try, such as method.local.optimizer.lr=0.01,0.1; may be given again
    grid: Grid = ()
    # share of every client's training samples that a grid is tuned on; 0.1 if not given
    validation: Real = None
    tuning_seeds: Whole = None  # number of the seeds that a grid is tuned with; 1 if not given
    tuning_rounds: Whole = None  # rounds of tuning runs; those of the other runs if not given
    jobs: Whole = None  # runs at the same time, each in a process of its own; 1 if not given
    # one of the methods: also show the cost of reaching percentages of its best figure
    baseline: Text = None
    metric: Text = None  # the metric to compare; the task's main one if not given
    format: TableFormat = "text"  # format of the tables on standard output
    yes: Flag = False  # accept more than 1,000 runs

    def __call__(self) -> None:
        """Run or resume the study, and print its tables."""
        self.check_target()
        with output(self.json or self.format != "text") as (console, stdout):
            from fedquilt.cli.study import StudyRequest, prepared, run_study, show_study
            from fedquilt.runs.trust import check_study_code

            folder = self.resume or self.out
            if self.resume:
                self.check_resume(*_GOES_WITH_RESUME)
            if folder:
                check_study_code(folder, self.trust)
            plan, sources = self._resumed(self.resume) if self.resume else self._planned()
            self._check_request(plan)
            grounds = prepared(plan, sources, folder, console, self.target, self.metric or "")
            command = shlex.join(
                ["fedquilt", "compare", *self._entries_resumed, "--resume", str(folder)]
            )
            request = StudyRequest(plan, folder, command, self.jobs or 1, self.yes)
            study = run_study(request, console, grounds)
            show_study(
                study,
                "json" if self.json else self.format,
                console,
                stdout,
                metric=self.metric or "",
                target=self.target,
                baseline=self.baseline or "",
            )

    @property
    def _entries_resumed(self) -> tuple[str, ...]:
        """Return the names of entries given beside --resume. Empty: all entries, or a new study."""
        return self.methods if self.resume else ()

    def _check_request(self, plan: Plan) -> None:
        names = [entry.name for entry in plan.entries]
        if self.baseline is not None and self.baseline not in names:
            raise ConfigError(
                f"--baseline {self.baseline} was asked for; it is not "
                f"compared.{nearest(self.baseline, names)}"
            )
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"--jobs {self.jobs} was asked for; at least one is needed.")

    def _resumed(self, folder: Path) -> tuple[Plan, dict[str, str]]:
        """Return the plan of the study in a folder, and the source of each entry's settings.

        It has the entries that the command names, or all of them. `--rounds` changes their number
        of rounds in the plan. The study's file stays as it is.
        """
        from fedquilt.config.toml import assign
        from fedquilt.studies.entries import find_entry
        from fedquilt.studies.plan import STUDY_FILE, Plan

        plan = Plan.read(folder)
        names = [entry.name for entry in plan.entries]
        for name in self.methods:
            find_entry(names, f"{name}:", f"compare --resume {folder}")
        entries = [
            entry for entry in plan.entries if not self.methods or entry.name in self.methods
        ]
        if self.rounds is not None:
            for entry in entries:
                assign(entry.settings, ["rounds"], self.rounds)
        sources = {entry.name: str(folder / STUDY_FILE) for entry in entries}
        part = replace(plan, entries=tuple(entries))
        part.check_comparable()
        return part, sources

    def _planned(self) -> tuple[Plan, dict[str, str]]:
        """Return the plan of a new study, and the source of each entry's settings by its name.

        All problems of settings are reported together, and entries are checked for comparability.

        Raises:
            ConfigError: Methods are missing or repeated, or settings are invalid.
        """
        from fedquilt.runs.experiment import Experiment
        from fedquilt.studies.entries import Entry
        from fedquilt.studies.plan import Plan
        from fedquilt.studies.study import check_comparable

        if not self.methods:
            raise ConfigError(
                "compare was asked for without methods; name them, as in compare fedavg heterofl."
            )
        if len(set(self.methods)) < len(self.methods):
            listed = " ".join(self.methods)
            raise ConfigError(
                f"compare {listed} was asked for; name each method once, as in compare fedavg "
                "heterofl."
            )
        if self.seeds and self.seed is not None:
            raise ConfigError("--seed and --seeds were asked for; one of them fits.")
        named = {_entry_name(method, self.methods): method for method in self.methods}
        requests = {name: self._request_of(name, list(named)) for name in named}
        entries = []
        sources = {}
        problems: dict[str, list[str]] = {}  # Names of entries by their common problem.
        seeds = set()
        for name, method in named.items():
            request, grid = requests[name]
            is_file = method.endswith(".toml")
            config, method_name = (method, None) if is_file else (self.config, method)
            try:
                settings, flags = request.settings(config, method_name, self.methods)
                seeds.add(Experiment.of(settings, flags, config or "").seed)
            except ConfigError as error:
                problems.setdefault(str(error), []).append(name)
                continue
            entries.append(
                Entry(name, {key: value for key, value in settings.items() if key != "seed"}, grid)
            )
            sources[name] = request.source(config, method_name)
        if problems:
            raise ConfigError(
                "\n".join(f"{'; '.join(names)}: {problem}" for problem, names in problems.items())
            )
        if not self.seeds and len(seeds) > 1:
            raise ConfigError(
                f"compare {' '.join(self.methods)} was asked for; these have the seeds "
                f"{sorted(seeds)}. Name the seeds of all with --seeds."
            )
        tuning: Settings = {} if self.tuning_rounds is None else {"rounds": self.tuning_rounds}
        options: dict[str, Any] = {"validation": self.validation, "tuning_seeds": self.tuning_seeds}
        options = {key: value for key, value in options.items() if value is not None}
        plan = Plan(tuple(entries), self.seeds or tuple(seeds), tuning=tuning, **options)
        if (tuning or options) and not plan.has_grid:
            names = [f"--{key.replace('_', '-')}" for key in options] + ["--tuning-rounds"] * bool(
                tuning
            )
            raise ConfigError(
                f"{', '.join(names)} was asked for without --grid, which alone is tuned."
            )
        plan.check(self.yes)
        check_comparable(plan, self.out)
        return plan, sources

    def _request_of(
        self, name: str, names: list[str]
    ) -> tuple[CompareRequest, dict[str, tuple[Any, ...]]]:
        """Return a copy of the request for one entry, and the entry's grid.

        The copy has those `--set` that name the entry, or no entry at all. The same holds for
        `--grid`.

        Args:
            name: Name of the entry.
            names: Names of all entries.

        Returns:
            The request, and the values of each setting in the grid, by path.
        """
        from fedquilt.config.toml import parse_grid
        from fedquilt.studies.entries import find_entry

        assignments = []
        grid = {}
        for text in self.assign:
            entry, assignment = find_entry(names, text, "--set")
            if entry in ("", name):
                assignments.append(assignment)
        for text in self.grid:
            entry, assignment = find_entry(names, text, "--grid")
            if entry in ("", name):
                path, values = parse_grid(assignment)
                grid[path] = values
        return replace(self, assign=tuple(assignments)), grid


def _entry_name(method: str, methods: tuple[str, ...]) -> str:
    """Return the name of a method in tables.

    A .toml file has its stem as name, or its path if another entry has the same name. Other
    methods keep their name.

    Args:
        method: Name of a method, or path of a .toml file.
        methods: All methods of the study, including this one.
    """
    if not method.endswith(".toml"):
        return method
    stem = Path(method).stem
    other_names = [
        Path(other_method).stem if other_method.endswith(".toml") else other_method
        for other_method in methods
        if other_method != method
    ]
    return method if stem in other_names else stem
