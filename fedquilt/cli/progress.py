"""Progress of rounds and checks: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console

from fedquilt.cli.show import say
from fedquilt.runs.summaries import (
    NOTHING,
    Labels,
    figures_row,
)

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fedquilt.round import Record


Watch = Callable[["Record"], None]
# Returns a few words on a round (from 0), such as the stage of a growing model. Empty: none.
Status = Callable[[int], str]
# Arguments: number of finished rounds, labels of shares, True if the main figure is shown in
# percent, and the function for words on rounds.
Begin = Callable[[int, Labels, bool, Status], Watch]


@contextmanager
def progress(console: Console, rounds: int) -> Iterator[Begin]:
    """Show a bar with rate and time left on a terminal, or a line for each evaluated round.

    It yields a function that starts the bar. That function returns another one, to be called after
    each round with its record.

    Args:
        console: Console for the bar or the lines.
        rounds: Number of rounds in all.
    """
    if not console.is_terminal:

        def by_line(done: int, labels: Labels, percent: bool, status: Status) -> Watch:
            return partial(say_round, console, "", rounds, labels, percent, status=status)

        yield by_line
        return
    with round_bars(console) as bars:
        task = bars.add_task("round", False, rounds, rate="", figures="")

        def begin(done: int, labels: Labels, percent: bool, status: Status) -> Watch:
            bars.start_task(task)
            bars.update(task, completed=done, description=_described(status, done))
            return watch_bar(bars, task, done, labels, percent, status)

        yield begin


def _described(status: Status, round: int) -> str:
    words = status(round)
    return f"round ({words})" if words else "round"


def _no_status(round: int) -> str:
    return ""


def watch_bar(
    bars: Progress,
    task: TaskID,
    done: int,
    labels: Labels,
    percent: bool,
    status: Status | None = None,
) -> Watch:
    """Return a function that moves the bar of a run, to be called after each round.

    Args:
        bars: The bars.
        task: The bar of the run.
        done: Rounds that were finished before the run was resumed. 0: it is new.
        labels: Names of shares whose name is not the number.
        percent: True if the main figure is shown in percent.
        status: Words on the round that runs. None: the name of the bar stays as it is.
    """
    began = time.perf_counter()

    def watch(record: Record) -> None:
        rate = (record.round - done) / (time.perf_counter() - began)
        bars.update(task, completed=record.round, rate=f"{rate:.1f} rounds/s")
        if status:
            bars.update(task, description=_described(status, record.round))
        if record.grades.main:
            bars.update(task, figures=figures_line(record, labels, percent))

    return watch


def counted_bars(console: Console, *texts: str, transient: bool = False) -> Progress:
    """Return bars with a description, counts and the time left.

    Args:
        console: Terminal that shows them.
        *texts: Templates of further columns, such as "{task.fields[figures]}".
        transient: True: the bars disappear at the end.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        *map(TextColumn, texts),
        console=console,
        transient=transient,
    )


def round_bars(console: Console) -> Progress:
    """Return an empty set of progress bars with rounds, rate, time left and figures.

    Every bar needs the fields `rate` and `figures`. Bars disappear at the end.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    return Progress(
        TextColumn("{task.description}"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
        transient=True,
    )


def say_round(
    console: Console,
    prefix: str,
    rounds: int,
    labels: Labels,
    percent: bool,
    record: Record,
    status: Status = _no_status,
) -> None:
    """Print a line for an evaluated round, and nothing for other rounds.

    Args:
        console: Console for the line.
        prefix: Text at the beginning of the line, such as the name of the run.
        rounds: Number of rounds in all.
        labels: Names of shares whose name is not the number.
        percent: True if the main figure is shown in percent.
        record: Record of the round.
        status: Words on a round, from 0.
    """
    if record.grades.main:
        words = status(record.round - 1)
        stage = f" ({words})" if words else ""
        count = f"{record.round:>{len(str(rounds))}}/{rounds}"
        loss = NOTHING if record.loss is None else f"{record.loss:.3f}"  # No client took part.
        say(
            console,
            f"{prefix}round {count}{stage}  loss {loss}  {figures_line(record, labels, percent)}",
        )


def figures_line(record: Record, labels: Labels, percent: bool) -> str:
    """Return the main figure of each share in one line.

    Accuracy is not named, because every number is a percentage.

    Args:
        record: Record of an evaluated round.
        labels: Names of shares whose name is not the number.
        percent: True if the figures are shown in percent.
    """
    prefix = "" if record.grades.main == "accuracy" else f"{record.grades.main}  "
    figures = record.grades.figures
    row = figures_row(figures, figures, labels, percent)
    return prefix + "  ".join(f"{label}: {text}" for label, text in row.items())


@contextmanager
def check_progress(console: Console, count: int) -> Iterator[Callable[[str], None]]:
    """Show a bar with the name of the running check on a terminal, and nothing elsewhere.

    It yields a function that is called with a check's name when the check begins. `count` is the
    number of checks.
    """
    if not console.is_terminal:
        yield lambda name: None
        return

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=count)
        begun = 0

        def watch(name: str) -> None:
            nonlocal begun
            bar.update(task, completed=begun, description=name)
            begun += 1

        yield watch
