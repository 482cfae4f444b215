"""Results of runs, probes, exports and checks, as tables and lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from fedquilt.cli.show import say, show_table
from fedquilt.runs.summaries import (
    NOTHING,
    UNDER_ATTACK,
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
    from fedquilt.conformance.method import Finding
    from fedquilt.deploy.export import Exported
    from fedquilt.runs.per_client import PerClient
    from fedquilt.runs.probe import Probe


def show_result(console: Console, summary: Mapping[str, Any]) -> None:
    """Print the result of a run.

    It has a table of the shares with its note, tables of domains, robustness and clients' own nets,
    and the totals of bytes and seconds. Tables without rows are left out.

    Args:
        console: Console for the tables.
        summary: Content of summary.json, perhaps with the key "reached" for a target.
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
        f"{duration}; {size(down)} to the clients, {size(up)} "
        f"back{link_text}{late_text}{server_text}"
    )


def show_probe(console: Console, measurement: Probe) -> None:
    """Print the speed and memory of a device, and the budget that is proposed for it.

    A table has the size of the member that was measured, and of the one that the budget allows.
    """
    members = {"measured": measurement.measured, "proposed": measurement.member}
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
    target = measurement.target
    say(
        console,
        f"{measurement.device}: {measurement.cores} cores, {size(measurement.memory)} free; in "
        f"{measurement.precision} it trains {measurement.samples_per_second:,.0f} samples a "
        f"second of what was measured, {measurement.macs_per_second:.3g} multiply-adds a second",
    )
    say(
        console,
        f"proposed: {measurement.budget}, with which {target.samples} samples take at most "
        f"{target.epoch_seconds:g} s an epoch and {target.memory:.0%} of the memory",
    )


def show_export(console: Console, exported: Sequence[Exported]) -> None:
    """Print a row for each exported model, and the file's name, size and format.

    It also prints the largest difference between the file's outputs and torch's.
    """
    rows = {
        f"{model.share:g}": {
            "parameters": model.params,
            "MACs a sample": model.macs,
            "memory to run": size(model.memory),
        }
        for model in exported
    }
    show_table(console, "share", rows)
    first = exported[0]
    max_difference = max(model.max_difference for model in exported)
    nets = max(model.nets for model in exported)
    upto = "up to " if len(exported) > 1 else ""
    averaged = f"{upto}{nets} nets whose logits are averaged; " if nets > 1 else ""
    say(
        console,
        f"{first.file}: {first.format}, {size(first.bytes)}; {averaged}norms: "
        f"{first.norms}{_robustness(first)}; read back, its outputs for {first.compared} differ "
        f"from torch's by at most {max_difference:.2g}",
    )


def _robustness(exported: Exported) -> str:
    if exported.robustness is None:
        return ""
    reason = ""
    if exported.robustness_by_default:
        reason = " (the clean net, as none was asked for: --robustness)"
    return f", robustness {exported.robustness:g}{reason}"


def _names(group: PerClient) -> str:
    """Return the labels of the clients' sizes in a group, each once, joined by " | "."""
    return " | ".join(dict.fromkeys(device.label for device in group.devices))


def show_clients(console: Console, per_client: PerClient) -> None:
    """Print a table of clients by share, and one by domain if there are domains.

    A row is a group of clients. Cells are means over its clients, with deviations where they
    differ.
    """

    def row(group: PerClient) -> dict[str, Any]:
        return {
            "clients": len(group.devices),
            f"{per_client.main}, own size": _main_spread(group, "main_own_size"),
            f"{per_client.main}, whole model": _main_spread(group, "main_whole_model"),
            "MACs a batch": _spread(group, "macs"),
            "parameters a round": _spread(group, "params"),
            **(
                {"rounds late": _spread(group, "late", digits=".1f")}
                if per_client.has_deadline
                else {}
            ),
        }

    show_table(
        console, "share", {_names(group): row(group) for group in per_client.by("share").values()}
    )
    trained = per_client.trained  # Share of the parameters that each domain has trained.
    if set(trained) <= {""}:
        percent = 100 * trained.get("", 0.0)
        say(console, f"{percent:.1f} % of the parameters were trained by a client")
        return
    rows = {}
    for domain, group in per_client.by("domain").items():
        rows[domain] = {**row(group), "ever trained": f"{100 * trained.get(domain, 0.0):.1f} %"}
    show_table(console, "domain", rows)


def _main_spread(group: PerClient, attribute: str) -> str:
    """Return mean and deviation of the main figure over a group of clients, as text.

    The deviation is left out if it is 0. A mean that is NaN gives a dash.

    Args:
        group: Clients.
        attribute: Name of the figure: "main_own_size" or "main_whole_model".
    """
    if group.percent:
        return _spread(group, attribute, 100, " %")
    mean, deviation = group.spread(attribute)
    if math.isnan(mean):
        return "–"
    return f"{mean:.4g}" + (f" ± {deviation:.2g}" if deviation else "")


def _spread(
    group: PerClient, attribute: str, scale: float = 1.0, unit: str = "", digits: str = ""
) -> str:
    mean, deviation = (scale * value for value in group.spread(attribute))
    if math.isnan(mean):  # No client has a number.
        return "–"
    digits = digits or (".1f" if unit else ",.0f")
    return f"{mean:{digits}}{unit}" + (f" ± {deviation:{digits}}" if deviation else "")


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
