"""Rows of a study and their runs: settings, points of a grid, and names of folders."""

from __future__ import annotations

import copy
import itertools
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedquilt.config.toml import Settings, parse_path
from fedquilt.errors import ConfigError
from fedquilt.names import nearest
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import assign_all
from fedquilt.studies.measures import TRAINING

MAX_FOLDER_BYTES = 80
Point = Mapping[str, Any]  # Values of a grid by the path of their setting.
Stage = Literal["final", "tuning"]


@dataclass(frozen=True)
class Entry:
    """One row of a study: a name, and the settings that its runs share.

    Attributes:
        name: Name of the row in tables, such as "fedrolex".
        settings: Tables of plain values as `config.toml` has them. A seed in them is replaced.
        grid: Values to try, by the path of the setting. Empty: nothing is tuned.
    """

    name: str
    settings: Settings
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Return the name of the row's folder inside the folder of the study."""
        return folder_name(self.name)

    @property
    def points(self) -> list[Point]:
        """Return all combinations of the grid's values, each as values by path.

        The values of the last path vary fastest. An empty grid gives one empty point.
        """
        paths = list(self.grid)
        return [
            dict(zip(paths, values, strict=True))
            for values in itertools.product(*self.grid.values())
        ]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a study.

    Attributes:
        entry: Name of the row.
        seed: Random seed.
        settings: All settings, the seed and the point of the grid included.
        folder: Folder of the run, relative to that of the study.
        point: Point of the grid. Empty: the entry has no grid.
        stage: "tuning" runs are evaluated on the validation part, "final" ones on the test set.
        measure: "training", or a name of `MEASURES`, which train nothing.
    """

    entry: str
    seed: int
    settings: Settings
    folder: str
    point: Point = field(default_factory=dict)
    stage: Stage = "final"
    measure: str = TRAINING

    @property
    def title(self) -> str:
        """Return the name of the run in progress lines.

        Examples are `fedrolex, seed 0` for a final run and `fedrolex, lr 0.1, tuning` for a tuning
        run.
        """
        if self.stage == "final":
            return f"{self.entry}, seed {self.seed}"
        tuned = ", ".join(f"{_last_key(path)} {value}" for path, value in self.point.items())
        return f"{self.entry}, {tuned}, tuning"

    @property
    def rounds(self) -> int:
        """Return the planned number of rounds, without resolving the settings."""
        return num_rounds(self.settings)

    @property
    def experiment(self) -> Experiment:
        """Return the experiment that the settings describe. Invalid ones are a `ConfigError`."""
        return Experiment.of(self.settings)


def at_point(settings: Settings, point: Point) -> Settings:
    """Return a deep copy of settings in which the values of a point are set at their paths."""
    assignments = [(parse_path(path), value) for path, value in point.items()]
    return assign_all(copy.deepcopy(settings), assignments)


def find_entry(entries: Sequence[str], text: str, flag: str) -> tuple[str, str]:
    """Split `ENTRY:A.B=V` into the entry and `A.B=V`. Without an entry the first part is empty.

    Args:
        entries: Names of all entries.
        text: Value of a flag.
        flag: Name of the flag, for the message.

    Raises:
        ConfigError: The text names an entry that does not exist.
    """
    path, equals, value = text.partition("=")
    name, colon, setting = path.rpartition(":")
    if not colon:
        return "", text
    if name not in entries:
        raise ConfigError(
            f"{flag} {text} was asked for; there is no entry {name!r}.{nearest(name, entries)}"
        )
    return name, f"{setting}{equals}{value}"


def folder_name(name: str) -> str:
    """Return a name as that of a folder, of at most `MAX_FOLDER_BYTES` bytes.

    Letters, digits, dots, hyphens and underscores stay, and other characters become underscores. A
    longer name is cut, and a checksum of the whole name is appended.
    """
    plain = re.sub(r"[^\w.-]+", "_", name).strip("_.") or "entry"
    if len(plain.encode()) <= MAX_FOLDER_BYTES:
        return plain
    return f"{plain.encode()[:71].decode(errors='ignore')}-{_checksum(name)}"


def point_name(point: Point) -> str:
    """Return the name of a point's folder, such as `lr0.1-momentum0.9`.

    It joins the last key of each path with its value.
    """
    return folder_name(
        "-".join(f"{_last_key(path)}{value_name(value)}" for path, value in point.items())
    )


def value_name(value: Any) -> str:
    """Return a value as part of a folder's name.

    Characters that do not fit become underscores, and a checksum is appended then. Different values
    of one type get different texts.
    """
    text = str(value)
    plain = re.sub(r"[^\w.-]+", "_", text).strip("_")
    if plain == text:
        return plain
    return f"{plain}_{_checksum(json.dumps(value, default=str))}".lstrip("_")


def _checksum(text: str) -> str:
    """Return the CRC-32 of a text as eight hexadecimal digits, to tell names of folders apart."""
    return f"{zlib.crc32(text.encode()):08x}"


def _last_key(path: str) -> str:
    return parse_path(path)[-1]


def num_rounds(settings: Settings) -> int:
    """Return the number of rounds in settings, or the default number if they have none."""
    rounds: int = settings.get("rounds", Experiment.rounds)
    return rounds
