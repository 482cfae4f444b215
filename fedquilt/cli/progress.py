"""Progress of rounds and checks: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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


def _no_status(round: int) -> str:
    return ""


@dataclass(frozen=True)
class Shown:
    """Contents of a run's progress lines besides rounds and the training loss."""

    labels: Labels = field(default_factory=dict)  # Names of shares whose name is not the number
    percent: bool = True  # True: the main figure is shown in percent.
    status: Status = _no_status  # Words on a round
    figures: tuple[str, ...] = ()  # Names of the method's own figures (`Method.figure_names`)


Begin = Callable[[int, Shown], Watch]  # Arguments: number of finished rounds, and what is shown.


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

        def by_line(done: int, shown: Shown) -> Watch:
            return partial(say_round, console, "", rounds, shown)

        yield by_line
        return
    with round_bars(console) as bars:
        task = bars.add_task("round", False, rounds, rate="", figures="")

        def begin(done: int, shown: Shown) -> Watch:
            bars.start_task(task)
            bars.update(task, completed=done, description=_described(shown, done))
            return watch_bar(bars, task, done, shown, names_rounds=True)

        yield begin


def _described(shown: Shown, round: int) -> str:
    words = shown.status(round)
    return f"round ({words})" if words else "round"


def watch_bar(
    bars: Progress, task: TaskID, done: int, shown: Shown, names_rounds: bool = False
) -> Watch:
    """Return a function that moves the bar of a run, to be called after each round.

    Args:
        bars: The bars.
        task: The bar of the run.
        done: Rounds that were finished before the run was resumed. 0: it is new.
        shown: What the bar shows.
        names_rounds: True: the name of the bar has the words on the round that runs. False: it
            stays as it is.
    """
    began = time.perf_counter()

    def watch(record: Record) -> None:
        rate = (record.round - done) / (time.perf_counter() - began)
        bars.update(task, completed=record.round, rate=f"{rate:.1f} rounds/s")
        if names_rounds:
            bars.update(task, description=_described(shown, record.round))
        if record.grades.main:
            bars.update(task, figures=figures_line(record, shown))

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


def say_round(console: Console, prefix: str, rounds: int, shown: Shown, record: Record) -> None:
    """Print a line for an evaluated round, and nothing for other rounds.

    Args:
        console: Console for the line.
        prefix: Text at the beginning of the line, such as the name of the run.
        rounds: Number of rounds in all.
        shown: What the line shows.
        record: Record of the round.
    """
    if record.grades.main:
        words = shown.status(record.round - 1)
        stage = f" ({words})" if words else ""
        count = f"{record.round:>{len(str(rounds))}}/{rounds}"
        loss = NOTHING if record.loss is None else f"{record.loss:.3f}"  # No client took part.
        say(
            console,
            f"{prefix}round {count}{stage}  loss {loss}  {figures_line(record, shown)}",
        )


def figures_line(record: Record, shown: Shown) -> str:
    """Return the main figure of each share in one line, and the method's own figures behind it.

    Accuracy is not named, because every number is a percentage. A figure of the method that was not
    finite has a dash.

    Args:
        record: Record of an evaluated round.
        shown: What the line shows.
    """
    prefix = "" if record.grades.main == "accuracy" else f"{record.grades.main}  "
    figures = record.grades.figures
    row = figures_row(figures, figures, shown.labels, shown.percent)
    texts = [f"{label}: {text}" for label, text in row.items()]
    for name in shown.figures:
        (value,) = record.grades.metrics.get(name, {"": None}).values()
        texts.append(f"{name}: {NOTHING if value is None else f'{value:.3g}'}")
    return prefix + "  ".join(texts)


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
