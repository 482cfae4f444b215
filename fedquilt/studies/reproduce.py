"""Run a table of a paper as a study, and store its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedquilt.config import assign_all
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.studies.papers import FULL, Preset, Row
from fedquilt.studies.plan import STUDY_FILE, Entry, Plan
from fedquilt.studies.stored import store, stored_name
from fedquilt.studies.study import Study

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
    """Return the study that reproduces a table.

    Args:
        preset: The table.
        scale: Name of one of its scales.
        data_folder: Folder of the data files.
        seeds: Random seeds. Empty: those of the scale.
        rows: Texts that the names of rows contain. Empty: all rows.
        assignments: Settings of all rows, which replace those of the table.

    Raises:
        ConfigError: No row has a name that contains one of the texts.
        DataError: A data file is missing.
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
    """Return the rows whose name contains one of the texts, ignoring case. Without a text: all rows.

    A text that is the whole name of a row means that row alone. Otherwise "FedAvg, LQ-8" could not
    be run without "FedAvg, LQ-8 + SP-25".
    """
    if not texts:
        return list(preset.rows)
    names = [row.name for row in preset.rows]
    chosen: set[str] = set()
    for text in texts:
        matches = _matches(names, text)
        if not matches:
            raise ConfigError(
                f"the row {text!r} of {preset.name} was asked for; no row has it in its name.{nearest(text, names)}"
            )
        chosen.update(matches)
    return [row for row in preset.rows if row.name in chosen]


def check_rows_in(preset: Preset, folder: Path) -> None:
    """Refuse the folder of a study that has entries which are no rows of a table.

    Args:
        preset: The table.
        folder: Folder of the study, which need not exist.
    """
    if not (folder / STUDY_FILE).is_file():
        return
    names = [row.name for row in preset.rows]
    others = [entry.name for entry in Plan.read(folder).entries if entry.name not in names]
    if others:
        raise ConfigError(
            f"the folder {folder} was asked for; it has a study of {'; '.join(others)}, which {preset.name} does not "
            "have as rows. Name another folder."
        )


def _matches(names: Sequence[str], text: str) -> list[str]:
    """Return the name that equals a text, ignoring case, or else all names that contain it."""
    wanted = text.casefold()
    equal = [name for name in names if name.casefold() == wanted]
    return equal or [name for name in names if wanted in name.casefold()]


def store_study(study: Study, preset: Preset, scale: str, folder: Path, about: Mapping[str, Any]) -> list[Path]:
    """Store every run of a study, and return the folders.

    Args:
        study: A study with a folder.
        preset: The table that it reproduces.
        scale: Name of the scale.
        folder: Folder of stored results, such as `results`.
        about: Entries of "about" in every `summary.json`, such as the command.
    """
    assert study.path is not None, "only a study with a folder can be stored"
    paper, table = _paper_and_table(preset.name)
    folders = []
    runs = {(run.entry, run.seed): run for run in study.plan.final_runs(study.chosen)}
    for result in study.results:
        planned = runs[result.entry, result.seed]
        name = stored_name(table, result.entry, "" if scale == FULL else scale)
        target = folder / paper / f"{name}-seed{result.seed}"
        origin = {"table": preset.name, "row": result.entry, "scale": scale, "tuned": dict(planned.point)}
        store(result, study.path / planned.folder, target, {**about, **origin})
        folders.append(target)
    return folders


def _paper_and_table(name: str) -> tuple[str, str]:
    """Return the paper and the table of a preset's name. For a user's file: its folder and its stem."""
    folder, _, table = name.removesuffix(".toml").rpartition("/")
    return stored_name(Path(folder).name) or "own", table
