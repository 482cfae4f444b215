"""Output of the commands: bars and frames on a terminal, plain text elsewhere."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console

from fedquilt.runs.summaries import (
    NOTHING,
    UNDER_ATTACK,
    Labels,
    domains_of,
    figures_of,
    figures_row,
    in_percent,
    kept_nets_of,
    labels_of,
    main_of,
    members_of,
    milestone_text,
    share_label,
    target_text,
    utilization_text,
)
from fedquilt.units import size

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from fedquilt.conformance.method import Finding
    from fedquilt.deploy.export import Exported
    from fedquilt.round import Record
    from fedquilt.runs.per_client import PerClient
    from fedquilt.runs.probe import Probe
    from fedquilt.studies import table as studies

Watch = Callable[["Record"], None]
# Returns a few words on a round (from 0), such as the stage of a growing model. Empty: none.
Status = Callable[[int], str]
# Arguments: number of finished rounds, labels of shares, True if the main figure is shown in
# percent, and the function for words on rounds.
Begin = Callable[[int, Labels, bool, Status], Watch]


def console_for(for_json: bool = False) -> Console:
    """Return a console on standard output.

    Args:
        for_json: True: standard output is for JSON alone. The console is on standard error, and is
            quiet unless that is a terminal.
    """
    return Console(
        stderr=for_json, quiet=for_json and not sys.stderr.isatty(), highlight=False, emoji=False
    )


def say(console: Console, text: str) -> None:
    """Print a line unchanged, without markup and without breaking it at the terminal's width."""
    console.print(text, markup=False, soft_wrap=True)


def print_json(value: object, file: TextIO | None = None) -> None:
    """Print a value as JSON, with null in place of NaN and infinite numbers."""
    print(json.dumps(_numbers(value), indent=2, allow_nan=False), file=file or sys.stdout)


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# --- while it runs ------------------------------------------------------------------------------


@contextmanager
def progress(console: Console, rounds: int) -> Iterator[Begin]:
    """Show a bar with rate and time left on a terminal, or a line for each evaluated round.

    It yields a function that starts the bar. That function returns another one, to be called after
    each round.
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


def round_bars(console: Console) -> Progress:
    """Return bars with rounds, rate, time left and figures."""
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
    lead: str,
    rounds: int,
    labels: Labels,
    percent: bool,
    record: Record,
    status: Status = _no_status,
) -> None:
    """Print a line for an evaluated round, and nothing for other rounds.

    Args:
        console: Console for the line.
        lead: Text at the beginning of the line, such as the name of the run.
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
            f"{lead}round {count}{stage}  loss {loss}  {figures_line(record, labels, percent)}",
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


# --- when it is over ----------------------------------------------------------------------------


def show_result(console: Console, summary: Mapping[str, Any]) -> None:
    """Show the result of a run.

    It has a table of the shares with its note, tables of domains, robustness and clients' own nets,
    and the totals of bytes and seconds.
    """
    labels = labels_of(summary)
    percent = in_percent(summary)
    shares = figures_of(summary)
    columns = {main_of(summary): figures_row(shares, shares, labels, percent)}
    if "reached" in summary:
        reached = summary["reached"].items()
        columns[_to(summary)] = {
            share_label(share, labels): milestone_text(cost) for share, cost in reached
        }
    rows = {
        share: {**{title: cells.get(share, NOTHING) for title, cells in columns.items()}, **member}
        for share, member in members_of(summary).items()
    }
    show_table(console, "share", rows)
    if note := summary.get("note"):
        say(console, f"{summary['method']}: {note}")

    metrics = summary["metrics"].items()
    attacked = {
        name: figures for name, figures in metrics if name.partition("/")[0] in UNDER_ATTACK
    }
    for title, by_name in (("domain", domains_of(summary)), ("metric", attacked)):
        if by_name:
            say(console, "")
            lines = {
                name: figures_row(figures, shares, labels, percent)
                for name, figures in by_name.items()
            }
            show_table(console, title, lines)
            say(console, "")
    if own_nets := kept_nets_of(summary):
        say(console, "")
        show_table(console, "limit", own_nets)
        if used := utilization_text(summary):
            say(console, used)
        say(console, "")
    say(console, _totals(summary))


def _to(summary: Mapping[str, Any]) -> str:
    return f"to {target_text(summary['target'], main_of(summary), in_percent(summary))}"


def _totals(summary: Mapping[str, Any]) -> str:
    down, up, seconds, rounds = (
        summary[key] for key in ("bytes_down", "bytes_up", "seconds", "rounds")
    )
    link_text = (
        f", {summary['link_seconds']:,.1f} s over the link" if "link_seconds" in summary else ""
    )
    late_text = (
        f", {summary['late']:,} late update{'s'[: summary['late'] != 1]} dropped"
        if "late" in summary
        else ""
    )
    server_text = (
        f"; the server trained for {summary['server_seconds']:.1f} s"
        if "server_seconds" in summary
        else ""
    )
    duration = f"{rounds} round{'s'[: rounds != 1]} in {seconds:.1f} s"
    return (
        f"{duration}; {size(down)} to the clients, {size(up)} back"
        f"{link_text}{late_text}{server_text}"
    )


def show_probe(console: Console, found: Probe) -> None:
    """Show the speed and memory of a device, and the budget that is proposed for it."""
    members = {"measured": found.measured, "proposed": found.member}
    rows = {
        name: {
            "share": f"{member.share:.3g}",
            "parameters": member.params,
            "MACs a sample": member.macs,
            "memory to train": size(member.memory),
        }
        for name, member in members.items()
    }
    show_table(console, "member", rows)
    target = found.target
    say(
        console,
        f"{found.device}: {found.cores} cores, {size(found.memory)} free; in {found.precision} it "
        "trains "
        f"{found.samples_per_second:,.0f} samples a second of what was measured, "
        f"{found.macs_per_second:.3g} "
        "multiply-adds a second",
    )
    say(
        console,
        f"proposed: {found.budget}, with which {target.samples} samples take at most "
        f"{target.epoch_seconds:g} s an "
        f"epoch and {target.memory:.0%} of the memory",
    )


def show_export(console: Console, found: Sequence[Exported]) -> None:
    """Show the sizes of exported models, and how far their outputs differ from torch's."""
    rows = {
        f"{model.share:g}": {
            "parameters": model.params,
            "MACs a sample": model.macs,
            "memory to run": size(model.memory),
        }
        for model in found
    }
    show_table(console, "share", rows)
    first, max_difference, nets = (
        found[0],
        max(model.max_difference for model in found),
        max(model.nets for model in found),
    )
    upto = "up to " if len(found) > 1 else ""
    averaged = f"{upto}{nets} nets whose logits are averaged; " if nets > 1 else ""
    say(
        console,
        f"{first.file}: {first.format}, {size(first.bytes)}; {averaged}norms: "
        f"{first.norms}{_robustness(first)}; read "
        f"back, its answers to {first.compared} differ from torch's by at most "
        f"{max_difference:.2g}",
    )


def _robustness(found: Exported) -> str:
    if found.robustness is None:
        return ""
    reason = (
        " (the clean net, as none was asked for: --robustness)"
        if found.robustness_by_default
        else ""
    )
    return f", robustness {found.robustness:g}{reason}"


def _names(group: PerClient) -> str:
    """Return the names of the sizes of a group of clients with equal shares."""
    return " | ".join(dict.fromkeys(device.label for device in group.devices))


def show_clients(console: Console, found: PerClient) -> None:
    """Show a table of clients by share, and one by domain if there are domains.

    Cells are means, with deviations where clients differ.
    """

    def row(group: PerClient) -> dict[str, Any]:
        return {
            "clients": len(group.devices),
            f"{found.main}, own size": _main_spread(group, "main_own_size"),
            f"{found.main}, whole model": _main_spread(group, "main_whole_model"),
            "MACs a batch": _spread(group, "macs"),
            "parameters a round": _spread(group, "params"),
            **({"rounds late": _spread(group, "late", digits=".1f")} if found.has_deadline else {}),
        }

    show_table(
        console, "share", {_names(group): row(group) for group in found.by("share").values()}
    )
    if set(found.trained) <= {""}:
        say(
            console,
            f"{100 * found.trained.get('', 0.0):.1f} % of the parameters were trained by somebody",
        )
        return
    show_table(
        console,
        "domain",
        {
            domain: {**row(group), "ever trained": f"{100 * found.trained.get(domain, 0.0):.1f} %"}
            for domain, group in found.by("domain").items()
        },
    )


def _main_spread(group: PerClient, of: str) -> str:
    """Return mean and deviation of the main figure."""
    if group.percent:
        return _spread(group, of, 100, " %")
    mean, deviation = group.spread(of)
    if math.isnan(mean):
        return "–"
    return f"{mean:.4g}" + (f" ± {deviation:.2g}" if deviation else "")


def _spread(group: PerClient, of: str, scale: float = 1.0, unit: str = "", digits: str = "") -> str:
    mean, deviation = (scale * value for value in group.spread(of))
    if math.isnan(mean):  # No client has a number.
        return "–"
    digits = digits or (".1f" if unit else ",.0f")
    return f"{mean:{digits}}{unit}" + (f" ± {deviation:{digits}}" if deviation else "")


# --- checks of a method -------------------------------------------------------------------------


@contextmanager
def check_progress(console: Console, count: int) -> Iterator[Callable[[str], None]]:
    """Show a bar with the name of the running check on a terminal, and nothing elsewhere."""
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


def show_findings(console: Console, method: str, findings: Sequence[Finding]) -> None:
    """Show a row for each check of a method, and how many passed, failed and were skipped.

    Args:
        console: Console for the table.
        method: Name of the method.
        findings: Result of each check.
    """
    rows = {
        finding.check: {"result": finding.status, "finding": " ".join(finding.detail.split())}
        for finding in findings
    }
    show_table(console, "check", rows)
    counts = Counter(finding.status for finding in findings)
    totals = ", ".join(f"{counts[status]} {status}" for status in ("passed", "failed", "skipped"))
    say(console, f"{method}: {totals} in {sum(finding.seconds for finding in findings):.1f} s")


# --- tables -------------------------------------------------------------------------------------


def show_table(console: Console, name: str, entries: Mapping[str, Mapping[str, Any]]) -> None:
    """Show entries as rows of a table, framed on a terminal and aligned by spaces elsewhere.

    Columns whose values are tables or lists are left out. JSON output has them.

    Args:
        console: Console for the table.
        name: Title of the first column, which has the names of the entries.
        entries: Cells of each row by the title of their column. All rows have the same columns.
    """
    if not entries:
        say(console, f"{name}: none")
        return
    columns = [
        key
        for key, value in next(iter(entries.values())).items()
        if not isinstance(value, (dict, list))
    ]
    rows = [[key, *(_cell(entry[column]) for column in columns)] for key, entry in entries.items()]
    right = [
        False,
        *(all(_cell(entry[c])[:1].isdecimal() for entry in entries.values()) for c in columns),
    ]
    if console.is_terminal:
        from rich import box
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.ROUNDED)
        for title, number in zip((name, *columns), right, strict=True):
            table.add_column(title, justify="right" if number else "left")
        for row in rows:
            table.add_row(*map(Text, row))  # Text, so that brackets are not read as markup.
        console.print(table)
        return
    rows.insert(0, [name, *columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        say(
            console,
            "  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells).rstrip(),
        )


def show_text_table(console: Console, table: studies.Table) -> None:
    """Show a table of a study: framed on a terminal, else aligned by spaces."""
    if not console.is_terminal:
        say(console, table.text)
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    framed = Table(box=box.ROUNDED, title=Text(table.title), title_justify="left")
    for index, (title, is_number) in enumerate(zip(table.head, table.right_aligned, strict=True)):
        is_name = index == 0  # Cells of numbers are broken into lines before a name is cut off.
        framed.add_column(Text(title), justify="right" if is_number else "left", no_wrap=is_name)
    for row in table.cells:
        framed.add_row(*(Text(cell.starred, style="bold" if cell.is_best else "") for cell in row))
    console.print(framed)
    for note in table.notes:
        say(console, note)


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
