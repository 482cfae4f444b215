"""Run a table of a paper as a study, and store its results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.round import Record
from fedquilt.runs.overlay import assign_all
from fedquilt.studies.entries import Entry, PlannedRun
from fedquilt.studies.execute import Display, Watch
from fedquilt.studies.papers import FULL, Preset, Row
from fedquilt.studies.plan import STUDY_FILE, Plan
from fedquilt.studies.result import Result
from fedquilt.studies.stored import store, stored_name

Assignment = tuple[Sequence[str], Any]  # The keys of a setting, and its value.


def plan_of(
    preset: Preset,
    scale: str = FULL,
    *,
    data_folder: Path,
    seeds: Sequence[int] = (),
    rows: Sequence[str] = (),
    assignments: Sequence[Assignment] = (),
) -> Plan:
    """Return the study that reproduces a table of a paper. Nothing is run.

    Args:
        preset: The table, with the settings of its rows.
        scale: Name of one of its scales.
        data_folder: Folder that has the data files and supernets of the chosen rows.
        seeds: Random seeds. Empty: those of the scale.
        rows: Texts that the names of rows contain, ignoring case. A text that is a complete name
            chooses this row alone. Empty: all rows.
        assignments: Settings that replace those of the table in every row. Empty: none.

    Raises:
        ConfigError: There is no such scale, or one of the texts is in no row's name.
        DataError: A file that a chosen row needs is missing.
    """
    part = replace(preset, rows=tuple(chosen_rows(preset, rows)))
    grid = preset.grid_at(scale)
    entries = []
    for name, settings in part.rows_at(scale, data_folder):
        entries.append(Entry(name, assign_all(settings, assignments), grid))
    return Plan(
        tuple(entries),
        tuple(seeds) or preset.seeds_at(scale),
        tuning=preset.tuning_at(scale),
        measure=preset.measure,
    )


def chosen_rows(preset: Preset, texts: Sequence[str]) -> list[Row]:
    """Return the rows whose name contains one of the texts, ignoring case, in the table's order.

    Without a text all rows are returned. A text that is the complete name of a row selects that row
    alone. Without this rule "FedAvg, LQ-8" could not be run without "FedAvg, LQ-8 + SP-25".

    Raises:
        ConfigError: One of the texts is in no row's name.
    """
    if not texts:
        return list(preset.rows)
    names = [row.name for row in preset.rows]
    matching_names: set[str] = set()
    for text in texts:
        matches = _matches(names, text)
        if not matches:
            raise ConfigError(
                f"the row {text!r} of {preset.name} was asked for; no row has it in its "
                f"name.{nearest(text, names)}"
            )
        matching_names.update(matches)
    return [row for row in preset.rows if row.name in matching_names]


def presets_with_rows(presets: Sequence[Preset], texts: Sequence[str]) -> list[Preset]:
    """Return the tables in which every text selects a row. One table is returned as it is.

    Args:
        presets: Tables that a user asked for by the name of their paper, or one table.
        texts: Texts that `chosen_rows` reads. Empty: all tables are returned.

    Raises:
        ConfigError: There are several tables, and none of them has all the rows.
    """
    if len(presets) == 1:
        return list(presets)
    selected = [
        preset
        for preset in presets
        if all(_matches([row.name for row in preset.rows], text) for text in texts)
    ]
    if not selected:
        listed = ", ".join(preset.name for preset in presets)
        raise ConfigError(
            f"the rows {', '.join(map(repr, texts))} were asked for; none of {listed} has all of "
            "them."
        )
    return selected


def check_rows_in(preset: Preset, folder: Path) -> None:
    """Refuse the folder of a study that has entries which are no rows of a table.

    Args:
        preset: The table.
        folder: Folder of the study, which need not exist.

    Raises:
        ConfigError: The study in the folder has other entries.
    """
    if not (folder / STUDY_FILE).is_file():
        return
    names = [row.name for row in preset.rows]
    unknown_names = [entry.name for entry in Plan.read(folder).entries if entry.name not in names]
    if unknown_names:
        raise ConfigError(
            f"the folder {folder} was asked for; it has a study of {'; '.join(unknown_names)}, "
            f"which {preset.name} does not have as rows. Name another folder."
        )


def _matches(names: Sequence[str], text: str) -> list[str]:
    """Return the names that a text selects, ignoring case.

    Names that equal the text are returned alone. Else these are all names that contain it. Empty:
    none does.
    """
    folded = text.casefold()
    equal = [name for name in names if name.casefold() == folded]
    return equal or [name for name in names if folded in name.casefold()]


@dataclass(frozen=True)
class Storing(Watch):
    """A `Watch` that stores every final run as soon as it has ended.

    A study of many hours may be stopped, or lose its machine. Finished runs are then stored
    already.

    Attributes:
        watch: Watch that receives the same calls.
        preset: Table that the study reproduces.
        scale: Name of the scale.
        study: Folder of the study.
        target: Folder of stored results, such as `results`.
        about: Entries of "about" in every `summary.json`, such as the command.
        folders: Folders that were written, or that had the run already.
    """

    watch: Watch
    preset: Preset
    scale: str
    study: Path
    target: Path
    about: Mapping[str, Any]
    folders: list[Path] = field(default_factory=list)

    @override
    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        return self.watch.begin(planned, display)

    @override
    def end(self, planned: PlannedRun, result: Result) -> None:
        self.watch.end(planned, result)
        if planned.stage != "final":
            return
        paper, table = _paper_and_table(self.preset.name)
        name = stored_name(table, result.entry, "" if self.scale == FULL else self.scale)
        folder = self.target / paper / f"{name}-seed{result.seed}"
        origin = {
            "table": self.preset.name,
            "row": result.entry,
            "scale": self.scale,
            "tuned": dict(planned.point),
        }
        store(result, self.study / planned.folder, folder, {**self.about, **origin})
        self.folders.append(folder)


def _paper_and_table(name: str) -> tuple[str, str]:
    """Return the paper and the table in the name of a preset, which is PAPER/TABLE.

    For the path of a user's file they are its folder's name and its stem. Without a folder the
    paper is `own`.
    """
    folder, _, table = name.removesuffix(".toml").rpartition("/")
    return stored_name(Path(folder).name) or "own", table
