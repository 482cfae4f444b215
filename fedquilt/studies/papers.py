"""Presets of papers: a table or figure as the settings of its rows, with the paper's numbers.

`fedquilt/papers/README.md` describes the format of the files. Settings are laid over one another in
this order, and the last one counts: `[settings]`, the parts of a row, the row's own settings, the
settings of a scale, the parts of a scale.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from fedquilt.config.resolve import resolved
from fedquilt.config.toml import Settings, assign, parse_toml
from fedquilt.errors import ConfigError, DataError, FedquiltError
from fedquilt.names import nearest
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import overlay
from fedquilt.storage.files import why
from fedquilt.studies.entries import at_point
from fedquilt.studies.measures import TRAINING, measure_problems
from fedquilt.studies.values import TableValue

SMOKE = "smoke"  # Scale that needs no data
SMOKE_NOTE = (
    "Generated images and a few rounds: it shows that everything runs, and its numbers "
    "mean nothing."
)
FULL = "full"  # Scale of the paper, which every preset has
DATA_VARIABLE = "FEDQUILT_DATA"  # Environment variable with the folder of data files
DATA_FOLDER = "data"  # Folder of data files if the variable is not set
_SUPERNET = ("model", "supernet")  # Keys of the setting that names a supernet file.
_NUMBER = re.compile(r"[-−]?[\d,]*\.?\d+")

# --- the parts of a preset -----------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One column of a table: its title, and the number of a run that it shows."""

    title: str  # Title of the column.
    value: str  # Text that `fedquilt.studies.values` reads, such as "accuracy 1.0 %"

    @cached_property
    def parsed(self) -> TableValue:
        """Return `value` as a `TableValue`, which has a path of keys and a unit."""
        return TableValue.parse(self.value)


@dataclass(frozen=True)
class Row:
    """One row of a table: its settings, and the paper's numbers.

    Attributes:
        name: Name of the row, which no other row has.
        paper: Paper's number for each column as printed, such as "69.44 ± 1.50", or "" if it has
            none. A file may leave out the list if the paper has no number at all.
        parts: Names of `Preset.parts` that are laid over the common settings, in this order.
        settings: Settings that are laid over the parts.
    """

    name: str
    paper: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PresetScale:
    """Size of an experiment: settings that are laid over those of every row, and the seeds.

    Attributes:
        note: One sentence on the differences from the paper.
        seeds: Random seeds. Empty: those of the preset.
        settings: Settings that are laid over every row.
        parts: Settings that are laid over the rows with a part, by the name of that part.
        grid: Values in place of those of the preset's grid. Empty: the preset's.
        tuning: Settings that are laid over the preset's settings of tuning runs.
    """

    note: str = ""
    seeds: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Preset:
    """A table or figure of a paper.

    Attributes:
        title: Title in the paper, in one line.
        columns: Numbers of a run that the table has.
        rows: One experiment each.
        scales: Scales by name. `full`, the paper's, exists even if the file does not name it.
        seeds: Random seeds of each row.
        data: Names of data sets. Each is a file NAME.npz in the data folder.
        notes: Differences from the paper, one sentence each.
        measure: "training", or a name of `MEASURES`, which train nothing.
        settings: Settings of all rows, as config.toml has them, without a seed.
        parts: Settings that rows lay over the common ones, by name.
        grid: Values that are tried for a setting, by its path. Empty: nothing is tuned.
        tuning: Settings that are laid over a row for its tuning runs.
        name: PAPER/TABLE, or the path of a file.
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    scales: Mapping[str, PresetScale]
    seeds: tuple[int, ...] = (0,)
    data: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    measure: str = TRAINING
    settings: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tuning: Mapping[str, Any] = field(default_factory=dict)
    name: str = field(default="", metadata={"setting": False})

    def scale(self, name: str) -> PresetScale:
        """Return the scale of this name. A name that the preset lacks is a `ConfigError`."""
        if name in self.scales:
            return self.scales[name]
        raise ConfigError(
            f"the scale {name!r} of {self.name} was asked for; it has none of that "
            f"name.{nearest(name, self.scales)}"
        )

    def seeds_at(self, scale: str) -> tuple[int, ...]:
        """Return the random seeds of each row: the scale's own, or else the preset's."""
        return self.scale(scale).seeds or self.seeds

    def grid_at(self, scale: str) -> dict[str, tuple[Any, ...]]:
        """Return the values to try for each tuned setting, by its path. Empty: nothing is tuned.

        Values of the scale named `scale` replace the preset's values for the same path.
        """
        return {**self.grid, **self.scale(scale).grid}

    def tuning_at(self, scale: str) -> Settings:
        """Return the settings that are laid over each row for its tuning runs.

        They are the preset's, with those of the scale named `scale` merged into them.
        """
        return overlay(dict(self.tuning), dict(self.scale(scale).tuning))

    def rows_at(self, scale: str, folder: str | Path | None = None) -> list[tuple[str, Settings]]:
        """Return the name and the complete settings of each row, without a seed.

        Args:
            scale: Name of a scale.
            folder: Folder with the data and supernet files, whose paths replace their names in the
                settings. None: the names stay as they are.

        Raises:
            ConfigError: There is no such scale.
            DataError: A row needs a data or supernet file that is not in the folder.
        """
        rows = [(row.name, self._settings_of(row, self.scale(scale))) for row in self.rows]
        if folder is None:
            return rows
        return [(name, self._located(settings, Path(folder))) for name, settings in rows]

    def _settings_of(self, row: Row, scale: PresetScale) -> Settings:
        """Return new settings of a row at a scale, merged in the order at the top of this file."""
        layers = [self.settings, *(self.parts[part] for part in row.parts), row.settings]
        layers += [
            scale.settings,
            *(scale.parts[part] for part in row.parts if part in scale.parts),
        ]
        settings: Settings = {}
        for layer in layers:
            settings = overlay(settings, dict(layer))
        return settings

    def _located(self, settings: Settings, folder: Path) -> Settings:
        """Replace names of data and supernet files by paths in `folder`, and return the settings.

        They are changed in-place. Data files that `data` does not list stay as they are. A missing
        file is a `DataError`.
        """
        for keys, file in _data_files(settings):
            name = file.removesuffix(".npz")
            if name not in self.data:
                continue
            if not (folder / file).is_file():
                raise missing_data(name, folder, self.name)
            settings = assign(settings, keys, str(folder / file))
        file = _supernet_file(settings)
        if file:
            if not (folder / file).is_file():
                images = f"{self.data[0]}.npz" if self.data else "public.npz"
                raise missing_supernet(
                    file, settings["model"].get("space", ""), images, folder, self.name
                )
            settings = assign(settings, _SUPERNET, str(folder / file))
        return settings


# --- finding and reading ------------------------------------------------------------------------


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of data files, which need not exist.

    Args:
        folder: Folder that the user named. None or empty: that of the environment variable
            FEDQUILT_DATA, or `data` if it is not set.
    """
    return Path(folder or os.environ.get(DATA_VARIABLE) or DATA_FOLDER)


def missing_data(name: str, folder: Path, preset: str) -> DataError:
    """Return the error for a data set that a preset needs and that is not in the data folder.

    Args:
        name: Name of the data set.
        folder: Folder in which its file was looked for.
        preset: Name of the table.
    """
    from fedquilt.data.prepare import missing_message

    return DataError(
        f"{preset} was asked for: {missing_message(name, folder)} --data-folder or the "
        f"environment variable {DATA_VARIABLE} names another folder."
    )


def missing_supernet(file: str, space: str, images: str, folder: Path, preset: str) -> DataError:
    """Return the error for a supernet file that a row needs and that is not in the data folder.

    Args:
        file: Name of the file.
        space: Search space of the supernet. Empty: it is not known.
        images: File in the same folder whose public images a supernet can be trained on.
        folder: Folder in which the file was looked for.
        preset: Name of the table.
    """
    files = ["--data", str(folder / images), "--out", str(folder / file)]
    arguments = [space or "SPACE", *files]
    command = shlex.join(["fedquilt", "supernet", "train", *arguments])
    return DataError(
        f"{preset} was asked for: the supernet {folder / file} is needed; there is no such file. "
        f"`{command}` makes one from public images. --rows runs the rows that need none, and "
        f"--data-folder or {DATA_VARIABLE} names another folder."
    )


def presets() -> tuple[str, ...]:
    """Return the names of all built-in tables and figures, as PAPER/TABLE in alphabetical order."""
    return tuple(_files())


def papers() -> dict[str, tuple[str, ...]]:
    """Return the names of the built-in tables and figures, as PAPER/TABLE, by paper."""
    tables: dict[str, tuple[str, ...]] = {}
    for name in presets():
        paper = name.partition("/")[0]
        tables[paper] = (*tables.get(paper, ()), name)
    return tables


def read_preset(name: str) -> Preset:
    """Read a preset by its name PAPER/TABLE, or from a user's file.

    Args:
        name: Name of `presets()`, or the path of a TOML file.

    Raises:
        ConfigError: There is no such table, or its file has problems, which are all listed.
    """
    preset = parsed_preset(name)
    problems = list(_problems(preset))
    if problems:
        count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  ".join([f"{count} in {name}:", *problems]))
    return preset


def parsed_preset(name: str) -> Preset:
    """Read a preset quickly, without checking the settings of its rows.

    Missing defaults are filled in: empty paper numbers, the scale `full`, and the note of `smoke`.

    Args:
        name: Name of `presets()`, or the path of a file that ends with `.toml`.

    Raises:
        ConfigError: There is no such table, or its file cannot be read or has unknown keys.
    """
    file = Path(name) if name.endswith(".toml") else _file(name)
    try:
        text = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"{name} was asked for; it cannot be read: {why(error)}.") from error
    preset = resolved(Preset, parse_toml(text, name), {}, name)
    nothing = ("",) * len(preset.columns)
    rows = tuple(replace(row, paper=row.paper or nothing) for row in preset.rows)
    scales = {**preset.scales, FULL: preset.scales.get(FULL, PresetScale())}
    if SMOKE in scales:
        scales[SMOKE] = replace(scales[SMOKE], note=scales[SMOKE].note or SMOKE_NOTE)
    return replace(preset, name=name, rows=rows, scales=scales)


def tables_named(name: str) -> tuple[str, ...]:
    """Return the built-in tables that a name selects: one table, or all tables of a paper.

    Raises:
        ConfigError: No paper, table or figure has this name. The message suggests the nearest one.
    """
    tables = papers()
    if name in tables:
        return tables[name]
    if name in presets():
        return (name,)
    close = get_close_matches(name, (*tables, *presets()), n=1)
    meant = f" Did you mean {close[0]!r}?" if close else ""
    paper = name.partition("/")[0]
    listed = ", ".join(tables.get(paper, tables))
    raise ConfigError(
        f"there is no paper, table or figure named {name!r}.{meant} Known: {listed}. `fedquilt "
        "list papers` shows all."
    )


def _file(name: str) -> Traversable:
    if name in papers():
        listed = ", ".join(papers()[name])
        raise ConfigError(f"the paper {name!r} was asked for; name one of its tables: {listed}.")
    (table,) = tables_named(name)
    return _files()[table]


def _files() -> dict[str, Traversable]:
    """Return the TOML files of all built-in presets by PAPER/TABLE, sorted by name."""
    folders = [entry for entry in files("fedquilt.papers").iterdir() if entry.is_dir()]
    by_name = {
        f"{folder.name}/{entry.name.removesuffix('.toml')}": entry
        for folder in folders
        for entry in folder.iterdir()
        if entry.name.endswith(".toml")
    }
    return dict(sorted(by_name.items()))


def paper_number(text: str) -> float | None:
    """Return the number at the beginning of a paper's text: 69.44 for "69.44 ± 1.50".

    None: the text does not begin with a number.
    """
    match = _NUMBER.match(text)
    return float(match[0].replace(",", "").replace("−", "-")) if match else None


# --- checking -----------------------------------------------------------------------------------


def _problems(preset: Preset) -> Iterator[str]:
    """Yield every problem of a preset as text, with its position in the file.

    Settings of rows are checked only if names, numbers and lists have no problem.
    """
    shape = list(_problems_of_shape(preset))
    yield from shape
    if not shape:
        yield from _problems_of_settings(preset)


def _problems_of_shape(preset: Preset) -> Iterator[str]:
    """Yield a text for each problem outside of the settings of rows.

    These are empty lists, repeated names, an unknown measure, invalid columns, missing parts, a
    missing smoke scale, and seeds within settings.
    """
    for key, values in (
        ("columns", preset.columns),
        ("rows", preset.rows),
        ("seeds", preset.seeds),
    ):
        if not values:
            yield f"{key}: an empty list was found; at least one is needed."
    yield from (f"measure: {problem}" for problem in measure_problems(preset.measure))
    if SMOKE not in preset.scales:
        yield f"scales: there is no {SMOKE!r}, which tests run without data."
    for index, column in enumerate(preset.columns):
        try:
            TableValue.parse(column.value)
        except ConfigError as error:
            yield f"columns[{index}].value: {error}"
    lists: tuple[tuple[str, Sequence[object]], ...] = (
        ("columns", [column.title for column in preset.columns]),
        ("rows", [row.name for row in preset.rows]),
        ("data", preset.data),
        ("seeds", preset.seeds),
    )
    for key, names in lists:
        repeated = [entry for entry in dict.fromkeys(names) if list(names).count(entry) > 1]
        yield from (f"{key}: {entry!r} is there more than once." for entry in repeated)
    for index, row in enumerate(preset.rows):
        yield from _problems_of_row(preset, row, f"rows[{index}]")
    yield from _problems_of_scales(preset)
    for position, settings in _all_settings(preset):
        if "seed" in settings:
            yield f"{position}.seed: settings of a preset have no seed; name it in `seeds`."


def _problems_of_scales(preset: Preset) -> Iterator[str]:
    """Yield a text for each part or grid path of a scale that the preset does not have."""
    for name, scale in preset.scales.items():
        for part in scale.parts:
            if part not in preset.parts:
                hint = nearest(part, preset.parts)
                yield f"scales.{name}.parts: there is no part {part!r}.{hint}"
        for path in scale.grid:
            if path not in preset.grid:
                hint = nearest(path, preset.grid)
                yield f"scales.{name}.grid: {path!r} is not in the grid.{hint}"


def _all_settings(preset: Preset) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every table of settings in a preset, each behind its path in the preset's file."""
    yield "settings", preset.settings
    yield "tuning", preset.tuning
    yield from ((f"parts.{name}", part) for name, part in preset.parts.items())
    yield from ((f"rows[{index}].settings", row.settings) for index, row in enumerate(preset.rows))
    for name, scale in preset.scales.items():
        yield f"scales.{name}.settings", scale.settings
        yield f"scales.{name}.tuning", scale.tuning
        yield from ((f"scales.{name}.parts.{part}", table) for part, table in scale.parts.items())


def _problems_of_row(preset: Preset, row: Row, position: str) -> Iterator[str]:
    for part in row.parts:
        if part not in preset.parts:
            yield f"{position}.parts: there is no part {part!r}.{nearest(part, preset.parts)}"
    if len(row.paper) != len(preset.columns):
        yield (
            f"{position}.paper: {len(row.paper)} texts were found for {len(preset.columns)} "
            "columns; "
            'one for each is needed, "" where the paper has no number.'
        )
    for text in row.paper:
        if text and paper_number(text) is None:
            yield (
                f'{position}.paper: {text!r} was found; a number such as "69.44 ± 1.50", or "", '
                "would fit."
            )


def _problems_of_settings(preset: Preset) -> Iterator[str]:
    """Yield the problems of the settings of all rows at all scales, each problem once as text.

    A problem is reported for the first scale and row that has it.
    """
    reported = set()
    for scale in preset.scales:
        for name, settings in preset.rows_at(scale):
            for problem in _problems_of_experiment(preset, settings, scale):
                if problem not in reported:
                    reported.add(problem)
                    yield f"row {name!r} at scale {scale!r}: {problem}"


def _problems_of_experiment(preset: Preset, settings: Settings, scale: str) -> Iterator[str]:
    for _, file in _data_files(settings):
        if file.removesuffix(".npz") not in preset.data:
            yield (
                f"the data file {file!r} is not in "
                f"`data`.{nearest(file.removesuffix('.npz'), preset.data)}"
            )
        elif scale == SMOKE:
            yield (
                f"the data file {file!r} is needed; a smoke run needs no files, as "
                "data.name = 'generated'."
            )
    supernet = _supernet_file(settings)
    if supernet and scale == SMOKE:
        yield (
            f"the supernet file {supernet!r} is needed; a smoke run needs no files, as "
            "model.supernet = ''."
        )
    checked = _without_files(settings)
    variants = [checked]
    tuning = preset.tuning_at(scale)
    if tuning:
        variants.append(overlay(checked, tuning))
    for path, values in preset.grid_at(scale).items():
        variants += [at_point(checked, {path: value}) for value in values]
    for variant in variants:
        try:
            Experiment.of(variant)
        except FedquiltError as error:
            yield str(error).replace("\n", "\n  ")


def _data_files(settings: Settings) -> list[tuple[list[str], str]]:
    """Return the names of .npz files under `data`, each behind the keys that lead to it.

    Keys are ["data", "name"] or ["data", "path"]. The list is empty if the data is not a file.
    """
    data = settings.get("data")
    if isinstance(data, str):
        data = {"name": data}
    if not isinstance(data, Mapping):
        return []
    return [
        (["data", key], value)
        for key in ("name", "path")
        if isinstance(value := data.get(key), str) and value.endswith(".npz")
    ]


def _supernet_file(settings: Settings) -> str:
    """Return the supernet file that settings name under `model`; empty if they name none."""
    model = settings.get("model")
    file = model.get("supernet", "") if isinstance(model, Mapping) else ""
    return file if isinstance(file, str) else ""


def _without_files(settings: Settings) -> Settings:
    """Return a copy of settings that `Experiment.of` can check without the files.

    The supernet becomes empty, and a data file becomes the data `npz` in the current folder.
    """
    settings = overlay(settings, {})
    if _supernet_file(settings):
        settings = assign(settings, _SUPERNET, "")
    for keys, _ in _data_files(settings):
        if keys[-1] == "name":
            settings = assign(settings, keys, "npz")
        settings = assign(settings, ["data", "path"], os.curdir)
    return settings
