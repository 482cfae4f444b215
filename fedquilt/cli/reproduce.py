"""`fedquilt reproduce`: tables or figures of a paper, with the paper's and the measured numbers."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.cli.options import (
    Assignments,
    Flag,
    PaperTable,
    Place,
    Precision,
    Rows,
    Scale,
    Seeds,
    TableFormat,
    Text,
    Whole,
)
from fedquilt.cli.output import output
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.studies.papers import Preset
    from fedquilt.studies.plan import Plan
    from fedquilt.studies.table import Table


@dataclass(frozen=True)
class _PlannedTable:
    """A table, the study that reproduces it, and the folder of the study."""

    preset: Preset
    plan: Plan
    folder: Path


@dataclass(frozen=True)
class ReproduceRequest:
    """Run a table or figure of a paper, and compare the measured numbers with the paper's.

    `fedquilt list papers` lists all tables. The name of a paper runs all of its tables. The same
    command again resumes interrupted runs and does not repeat finished ones. --scale smoke needs
    no data and takes seconds for a table. It shows that everything runs, and its numbers mean
    nothing.
    """

    # a name of `fedquilt list papers`, such as fedrolex/table3; a paper, such as ground, for all of
    # its tables; or a TOML file of your own
    table: PaperTable
    # full: the settings of the paper; short: fewer rounds; smoke: seconds, on generated images
    scale: Scale = "full"
    # run only the rows whose names contain one of these texts; a whole name means that row alone
    rows: Rows = ()
    seeds: Seeds = ()  # random seeds; those of the table if not given
    # a setting of all rows by its path, such as method.local.batch_size=50; may be repeated
    assign: Assignments = ()
    data_folder: Place = None  # folder of data files; if not given that of FEDQUILT_DATA, else data
    device: Text = None  # device to train on, such as cpu, cuda or cuda:1
    # precision of matrix products on the device; with fp64 everything is computed in it
    precision: Precision = None
    # folder of the study, or of the studies if there are several tables; runs/PAPER-TABLE-SCALE if
    # not given
    out: Place = None
    jobs: Whole = None  # runs at the same time, each in a process of its own; 1 if not given
    store: Place = None  # also store results without weights in this folder, such as results
    format: TableFormat = "text"  # format of the table on standard output
    json: Flag = False  # print the table as JSON on standard output, and nothing else there
    yes: Flag = False  # accept more than 1,000 runs
    # run the code that the study's folder names, and add it to your list of trusted code
    trust: Flag = False

    def __call__(self) -> None:
        """Run the rows of one or more tables, and print them with the paper's numbers."""
        with output(self.json or self.format != "text") as (console, stdout):
            from fedquilt.cli.show import print_json, show_text_table

            self._check_request()
            studies = self._planned()  # All are planned before the first one runs.
            tables = []
            for study in studies:
                table = self._run(study, console)
                tables.append(table)
                if self.json or self.format == "json":
                    continue
                if self.format == "text":
                    show_text_table(console, table)
                else:
                    print(table.render(self.format), file=stdout)
            if self.json or self.format == "json":
                plain = [table.plain for table in tables]
                print_json(plain[0] if len(plain) == 1 else plain, stdout)

    def _planned(self) -> list[_PlannedTable]:
        """Return the study of each table that was asked for. Nothing is run.

        Of several tables, those in which a text of `--rows` names no row are left out.

        Raises:
            ConfigError: There is no such table, scale or row, or a folder has another study.
            DataError: A data file that a row needs is missing.
        """
        from fedquilt.config.toml import parse_assignment
        from fedquilt.runs.trust import check_study_code
        from fedquilt.studies.papers import data_folder, read_preset, tables_named
        from fedquilt.studies.reproduce import check_rows_in, plan_of, presets_with_rows

        names = (self.table,) if self.table.endswith(".toml") else tables_named(self.table)
        assignments = [parse_assignment(text) for text in self.assign]
        for key, value in {"device": self.device, "precision": self.precision}.items():
            if value is not None:
                assignments.append((["engine", key], value))
        studies = []
        for preset in presets_with_rows([read_preset(name) for name in names], self.rows):
            plan = plan_of(
                preset,
                self.scale,
                data_folder=data_folder(self.data_folder),
                seeds=self.seeds,
                rows=self.rows,
                assignments=assignments,
            )
            folder = self.out or Path("runs") / f"{_folder_name(preset.name)}-{self.scale}"
            if self.out and len(names) > 1:
                folder = self.out / preset.name.partition("/")[2]
            check_rows_in(preset, folder)
            check_study_code(folder, self.trust)
            studies.append(_PlannedTable(preset, plan, folder))
        return studies

    def _run(self, study: _PlannedTable, console: Console) -> Table:
        """Run the rows of one table with progress on the console, and return its numbers."""
        from fedquilt.cli.show import say
        from fedquilt.cli.study import StudyRequest, run_study
        from fedquilt.studies.published import comparison_table
        from fedquilt.studies.reproduce import Storing, chosen_rows

        preset, plan, folder = study.preset, study.plan, study.folder
        seeds = f"seed{'s'[: len(plan.seeds) != 1]} {', '.join(map(str, plan.seeds))}"
        runs = "1 run" if plan.num_runs == 1 else f"{plan.num_runs} runs"
        say(console, f"{preset.title}\n{runs} at scale {self.scale} into {folder}; {seeds}")
        command = f"fedquilt {shlex.join(sys.argv[1:])}"
        stored: list[Path] = []
        wrap = None
        if self.store:
            wrap = partial(
                Storing,
                preset=preset,
                scale=self.scale,
                study=folder,
                target=self.store,
                about={"command": command},
                folders=stored,
            )
        request = StudyRequest(plan, folder, command, self.jobs or 1, self.yes)
        results = run_study(request, console, wrap=wrap).results
        if self.store:
            say(console, f"{len(stored)} results are stored in {self.store}")
        part = replace(preset, rows=tuple(chosen_rows(preset, self.rows)))
        table = comparison_table(part, results, self.scale)
        if self.assign:
            changed = f"Settings that --set changed in all rows: {'; '.join(self.assign)}."
            table = replace(table, notes=[changed, *table.notes])
        return table

    def _check_request(self) -> None:
        """Raise a ConfigError for options that would fail only after the last run.

        These are `--jobs` below 1, and a folder for `--store` that is a file.
        """
        if self.jobs is not None and self.jobs < 1:
            raise ConfigError(f"--jobs {self.jobs} was asked for; at least one is needed.")
        if self.store is not None and self.store.is_file():
            raise ConfigError(
                f"--store {self.store} was asked for; a file is there. Name a folder."
            )


def _folder_name(table: str) -> str:
    """Return the default name of a study's folder for a table, by its name or .toml file."""
    from fedquilt.studies.entries import folder_name

    return folder_name(table.removesuffix(".toml").replace("/", "-"))
