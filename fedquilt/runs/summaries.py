"""Text for tables from a run's summary: names of shares, figures, domains and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.units import size

Summary = Mapping[str, Any]  # Content of summary.json
Labels = Mapping[str, str]  # Names of shares that differ from the number

UNDER_ATTACK = ("standard", "robust")  # Metrics of an evaluation under attack
NOTHING = "–"  # Text in place of a number that is missing


def main_of(summary: Summary) -> str:
    """Return the name of the main metric. Summaries of early versions have accuracy alone."""
    main: str = summary.get("main", "accuracy")
    return main


def in_percent(summary: Summary) -> bool:
    """Return True if the main figure is shown in percent, which is the default."""
    return bool(summary.get("percent", True))


def prefers_higher(summary: Summary) -> bool:
    """Return True if higher values of the main figure are better, which is the default."""
    return bool(summary.get("higher_is_better", True))


def labels_of(summary: Summary) -> Labels:
    """Return the names that the method gave shares, by share as text. Empty: it gave none."""
    labels: Labels = summary.get("labels", {})
    return labels


def share_label(share: str, labels: Labels) -> str:
    """Return the name that the method gave a share, or the number of the share, as in "0.5".

    Text that is not a number and has no name is returned unchanged.

    Args:
        share: Share as text, a key of a summary's figures.
        labels: Names of shares, by share as text.
    """
    try:
        return labels.get(share) or f"{float(share):g}"
    except ValueError:
        return share


def figures_of(summary: Summary, metric: str = "") -> dict[str, float]:
    """Return a metric of the last evaluated round by share.

    Summaries of early versions have accuracy beside the other metrics.

    Args:
        summary: Content of `summary.json`.
        metric: Name of a metric. Empty: the main one.
    """
    name = metric or main_of(summary)
    figures: dict[str, float] = summary.get("metrics", {}).get(name, {})
    if not figures and name == "accuracy":
        figures = summary.get("accuracy", {})
    return figures


def domains_of(summary: Summary, metric: str = "") -> dict[str, dict[str, float]]:
    """Return a metric by domain, and then by share. Empty: there are no domains.

    Args:
        summary: Content of `summary.json`.
        metric: Name of a metric. Empty: the main one.
    """
    prefix = f"{metric or main_of(summary)}/"
    metrics = summary.get("metrics", {})
    return {name.removeprefix(prefix): metrics[name] for name in metrics if name.startswith(prefix)}


def members_of(summary: Summary) -> dict[str, dict[str, int]]:
    """Return parameters and multiply-adds of the member that a device of each share holds.

    Keys are the labels of shares. Inner keys are column titles of a table. The share of parameters
    may differ, because embeddings are never cut.
    """
    labels = labels_of(summary)
    return {
        share_label(share, labels): {
            "parameters": member["params"],
            "MACs a sample": member["macs"],
        }
        for share, member in summary.get("members", {}).items()
    }


def kept_nets_of(summary: Summary) -> dict[str, dict[str, str]]:
    """Return the figures of nets that clients keep, as text by limit and metric.

    These metrics have other keys than the shares of the server's model, such as multiply-adds. The
    result is empty if clients keep no nets.
    """
    shares = set(figures_of(summary))
    labels, percent = labels_of(summary), in_percent(summary)
    client_metrics = {
        name: values
        for name, values in summary.get("metrics", {}).items()
        if values and shares.isdisjoint(values)
    }
    rows: dict[str, dict[str, str]] = {}
    for metric, figures in client_metrics.items():
        for key, figure in figures.items():
            row = rows.setdefault(
                share_label(key, labels),
                {name.replace("_", " "): NOTHING for name in client_metrics},
            )
            row[metric.replace("_", " ")] = figure_text(figure, percent)
    return rows


def utilization_text(summary: Summary) -> str:
    """Return a text on the part of the devices' limits that their own nets use.

    It also has the same figure for one net that fits all devices, and the devices that exceed
    limits. The text is empty if the summary has no such figures.
    """
    if "utilisation" not in summary:
        return ""
    usage = (
        f"{summary['utilisation']:.1%} of the limits' multiply-adds are used by the clients' own "
        "nets"
    )
    common = summary.get("common_utilisation")
    comparison = ""
    if common is not None:
        comparison = f", {common:.1%} if all had the largest net that fits every device"
    num_over = summary.get("over_limit", 0)
    return usage + comparison + (f"; {num_over} devices exceed their limits" if num_over else "")


def figure_text(figure: float | None, percent: bool) -> str:
    """Return a figure in percent with one decimal, or with four significant digits.

    Args:
        figure: The number, which is a fraction if it is shown in percent. None: a dash is returned.
        percent: True: percent. False: four significant digits.
    """
    if figure is None:
        return NOTHING
    return f"{figure:.1%}" if percent else f"{figure:.4g}"


def figures_row(
    figures: Mapping[str, float], shares: Iterable[str], labels: Labels, percent: bool
) -> dict[str, str]:
    """Return figures as text with a column for each share.

    Args:
        figures: Numbers by share.
        shares: Shares that the table has, in its order.
        labels: Names of shares.
        percent: True if the figures are shown in percent.
    """
    return {
        share_label(share, labels): figure_text(figures.get(share), percent) for share in shares
    }


def target_text(target: float, metric: str, percent: bool) -> str:
    """Return a target with its unit, such as `60%` for a rate, or `rmse 0.25`.

    Args:
        target: Value of the metric.
        metric: Name of the metric, which is shown if it is not a rate.
        percent: True if the metric is a rate, which is shown in percent.
    """
    return f"{100 * target:g}%" if percent else f"{metric} {target:g}"


def milestone_text(milestone: Mapping[str, Any] | None) -> str:
    """Return the rounds, bytes and seconds until a target was reached, as text.

    If the link has a clock, seconds are those of the link and not of the simulation.

    Args:
        milestone: Fields of a `Milestone`. None: the target was not reached, and a dash is
            returned.
    """
    if milestone is None:
        return NOTHING
    rounds = f"{milestone['round']} round{'s'[: milestone['round'] != 1]}"
    seconds = f"{milestone['seconds']:.1f} s"
    if milestone["link_seconds"] is not None:
        seconds = f"{milestone['link_seconds']:,.1f} s over the link"
    return f"{rounds}, {size(milestone['bytes'])}, {seconds}"
