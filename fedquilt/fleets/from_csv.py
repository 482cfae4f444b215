"""Fleets of real devices, and other tables, from CSV files."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from typing_extensions import override

from fedquilt.checks import File
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.fleets.budgets import BudgetAssignment, Budgets, in_portions
from fedquilt.terms import Budget
from fedquilt.units import how_to_write, quantity


@dataclass(frozen=True)
class FromCsv(Budgets):
    """Real devices from a CSV file, one kind per row.

    A row has `count` (1 if there is no such column) and one or more of the bounds `share`, `macs`,
    `params` and `memory`. A bound on memory limits the training step. `name` is for the reader.
    Other columns are refused.

    If the fleet has as many clients as the file has devices, each row gets exactly its count. Else
    the proportions are kept.
    """

    file: File  # CSV file with one kind of device per row.

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        kinds, counts = zip(*self._devices(), strict=True)
        return in_portions(kinds, counts, num_clients)

    @property
    def num_devices(self) -> int:
        """Return the number of devices in the file, the sum of its counts."""
        return sum(count for _, count in self._devices())

    @property
    def counts(self) -> dict[Budget, int]:
        """Return the number of devices with each budget, as the file counts them.

        Rows with equal budgets are added up. Rows with the count 0 are left out.
        """
        counts: dict[Budget, int] = {}
        for budget, count in self._devices():
            if count:
                counts[budget] = counts.get(budget, 0) + count
        return counts

    def _devices(self) -> list[tuple[Budget, int]]:
        rows = read_csv(self.file, "devices", needs=(), knows=("name", "count", *_BOUNDS))
        return [self._device(line, row) for line, row in rows]

    def _device(self, line: int, row: dict[str, str]) -> tuple[Budget, int]:
        location = f"{self.file}, line {line}" + (f" ({row['name']})" if row.get("name") else "")
        count = row.get("count") or "1"
        if not count.isascii() or not count.isdigit():
            raise ConfigError(
                f"{location}: a count of {count!r} was found; it is a whole number of devices, "
                "0 or above."
            )
        bounds = {name: self._bound(row[name], name, location) for name in _BOUNDS if row.get(name)}
        try:
            return Budget(**bounds), int(count)
        except BudgetError as error:
            raise ConfigError(f"{location}: {error}") from error

    @staticmethod
    def _bound(text: str, name: str, location: str) -> float:
        value = quantity(text, name)
        if value is None:
            raise ConfigError(
                f"{location}: {name} = {text!r} was found; write it like {how_to_write(name)}."
            )
        return value


_BOUNDS = tuple(field.name for field in fields(Budget))
# Words in names of columns that describe a link.
_LINKS = ("link", "speed", "band", "latency", "upload", "download", "mbps")


def read_csv(
    file: str, content: str, needs: Sequence[str], knows: Sequence[str]
) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV table with a header, and refuse unknown columns.

    Args:
        file: Path of the file.
        content: Description of its content for messages, such as "devices".
        needs: Columns that must be there.
        knows: Columns that may be there.

    Returns:
        Line number and values of each row, by column.

    Raises:
        ConfigError: The file cannot be read, or its columns or rows are not valid.
    """
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened, skipinitialspace=True)
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            _check_columns(file, content, names, needs, knows)
            reader.fieldnames = names
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"the {content} were asked for from {file!r}; it could not be read: {error}."
        ) from error
    for line, row in rows:
        if None in row or None in row.values():
            raise ConfigError(
                f"{file}, line {line}: it does not have {len(names)} values as the header has."
            )
    if not rows:
        raise ConfigError(f"{file!r} was given for {content}; it has a header and no rows.")
    return [(line, {name: value.strip() for name, value in row.items()}) for line, row in rows]


def _check_columns(
    file: str, content: str, names: Sequence[str], needs: Sequence[str], knows: Sequence[str]
) -> None:
    problems = [f"column {name!r} is missing" for name in needs if name not in names]
    problems += [
        f"column {name!r} is there twice" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    for name in names:
        if name not in knows:
            hint = ""
            if any(word in name for word in _LINKS):
                hint = "; the settings' table link.clock has the speed of links, leave it out"
            problems.append(f"column {name!r} is not known{hint}")
    if problems:
        listed = ", ".join(knows)
        raise ConfigError(
            f"{file!r} was given for {content}: {'; '.join(problems)}. Columns of such a file: "
            f"{listed}."
        )
