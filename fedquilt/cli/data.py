"""The command `fedquilt data prepare`: public data sets as .npz files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from fedquilt.cli.options import Flag, Place, Whole
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.data.prepare import Prepared
    from fedquilt.data.prepare.download import Watch

_quiet = {"help_behavior_hint": ""}
Action = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="prepare", **_quiet)]
DataNames = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME…", **_quiet)
]
Origin = Annotated[str | None, tyro.conf.arg(name="from", metavar="DIR|URL", **_quiet)]


@dataclass(frozen=True)
class DataRequest:
    """Download public data sets, check their sums, and write .npz files: `data prepare cifar10`.

    Names: cifar10, cifar100, mnist_writers (MNIST by writer), digits5 (MNIST, SVHN, USPS, SYN-like
    digits and MNIST-M), syn (SYN-like digits alone, drawn without a download). docs/data.md has
    their sources and terms.
    """

    action: Action  # action: prepare
    names: DataNames = ()  # data sets to prepare
    out: Place = None  # folder for NAME.npz and downloads; else that of FEDQUILT_DATA, else data
    origin: Origin = None  # folder or URL that has the published files; if not given public hosts
    force: Flag = False  # overwrite existing files
    per_domain: Whole = None  # training images per domain of digits5 and syn, 2,000 if not given
    seed: Whole = None  # random seed for choosing images of digits5 and drawing SYN; 0 if not given
    fonts: Place = None  # folder of fonts for SYN; if not given those of matplotlib and Pillow
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Download and convert the data sets, and print what was written."""
        from fedquilt.cli.show import console_for, print_json
        from fedquilt.data.prepare import Recipe, prepare
        from fedquilt.studies.papers import data_folder

        if self.action != "prepare":
            raise ConfigError(
                f"data {self.action} was asked for; `fedquilt data prepare NAME…` fits."
            )
        options = {"per_domain": self.per_domain, "seed": self.seed}
        recipe = Recipe(
            fonts=self.fonts,
            **{name: value for name, value in options.items() if value is not None},
        )
        console = console_for(self.json)
        with _progress(console) as watch:
            files = prepare(
                self.names, data_folder(self.out), self.origin or "", self.force, recipe, watch
            )
        if self.json:
            print_json({file.data_set.name: file.to_dict() for file in files})
        else:
            _show(console, files)


@contextmanager
def _progress(console: Console) -> Iterator[Watch]:
    """Show a bar for each step on a terminal, or a line when a step begins elsewhere.

    It yields a function that is called with the step's name, how much is done, and how much there
    is (0: unknown).
    """
    from fedquilt.cli.show import say

    if not console.is_terminal:

        def by_line(step: str, done: int, total: int) -> None:
            if done == 0:
                say(console, step)

        yield by_line
        return

    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        tasks = {}

        def watch(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total or None)

        yield watch


def _show(console: Console, files: list[Prepared]) -> None:
    """Print a table with a row for each file, and each data set's terms of use.

    Downloads without a published checksum are named below it.
    """
    from fedquilt.cli.show import say, show_table
    from fedquilt.units import size

    rows = {
        file.data_set.name: {
            "file": str(file.path),
            "training": file.shapes["x_train"][0],
            "test": file.shapes["x_test"][0],
            "shape": " × ".join(map(str, file.shapes["x_train"][1:])),
            "size": size(file.bytes),
        }
        for file in files
    }
    show_table(console, "data", rows)
    for file in files:
        say(console, f"{file.data_set.name}: {file.data_set.title}. Terms: {file.data_set.terms}.")
        for source in file.files:
            if not source.is_checked:
                say(
                    console,
                    f"{source.path} could not be checked, as no sum is published. Its SHA-256 is "
                    f"{source.sha256}.",
                )
