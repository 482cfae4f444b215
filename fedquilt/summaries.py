"""Numbers of a run's summary as tables show them: names of shares, figures, domains and sizes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fedquilt.units import size

Summary = Mapping[str, Any]  # content of summary.json
Labels = Mapping[str, str]  # names of shares whose name is not the number itself

UNDER_ATTACK = ("standard", "robust")  # metrics of nets whose robustness was asked for
NOTHING = "–"  # shown where there is no number


def main_of(summary: Summary) -> str:
    """Return the name of the main metric. Summaries of early versions have accuracy alone."""
    main: str = summary.get("main", "accuracy")
    return main


def in_percent(summary: Summary) -> bool:
    """Return True if the main figure is shown in percent."""
    return bool(summary.get("percent", True))


def prefers_higher(summary: Summary) -> bool:
    """Return True if the main figure is better when it is higher."""
    return bool(summary.get("higher_is_better", True))


def labels_of(summary: Summary) -> Labels:
    """Return the names of shares whose name is not the number itself."""
    labels: Labels = summary.get("labels", {})
    return labels


def share_label(share: str, labels: Labels) -> str:
    """Return the name that the method gave a share, or the number."""
    return labels.get(share) or f"{float(share):g}"


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
    lead = f"{metric or main_of(summary)}/"
    metrics = summary.get("metrics", {})
    return {name.removeprefix(lead): metrics[name] for name in metrics if name.startswith(lead)}


def members_of(summary: Summary) -> dict[str, dict[str, int]]:
    """Return what a device of each share holds, by the share's label.

    This need not be a share of the parameters, because embeddings are held whole.
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
    """Return the figures of nets that clients keep, as text by limit and metric. Empty: clients keep none.

    These metrics have other keys than the shares of the server's model, such as multiply-adds.
    """
    shares = set(figures_of(summary))
    labels, percent = labels_of(summary), in_percent(summary)
    rows: dict[str, dict[str, str]] = {}
    for metric, figures in summary.get("metrics", {}).items():
        if shares.isdisjoint(figures):
            for key, figure in figures.items():
                row = rows.setdefault(share_label(key, labels), {})
                row[metric.replace("_", " ")] = figure_text(figure, percent)
    return rows


def utilisation_text(summary: Summary) -> str:
    """Return how much of the devices' limits their own nets use. Empty: no limits of multiply-adds are known."""
    if "utilisation" not in summary:
        return ""
    used = f"{summary['utilisation']:.1%} of the limits' multiply-adds are used by the clients' own nets"
    common = summary.get("common_utilisation")
    beside = (
        ""
        if common is None
        else f", {common:.1%} if all had the largest net that fits every device"
    )
    over = summary.get("over_limit", 0)
    return used + beside + (f"; {over} devices exceed their limits" if over else "")


def figure_text(figure: float | None, percent: bool) -> str:
    """Return a figure in percent with one decimal, or with four significant digits."""
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
    """Return a target with its unit: `60%`, or `rmse 0.25` where it is not a rate."""
    return f"{100 * target:g}%" if percent else f"{metric} {target:g}"


def milestone_text(milestone: Mapping[str, Any] | None) -> str:
    """Return the rounds, bytes and seconds that a target took.

    Where the link has a clock, seconds are those of the link and not of the simulation.
    """
    if milestone is None:
        return NOTHING
    rounds = f"{milestone['round']} round{'s'[: milestone['round'] != 1]}"
    seconds = f"{milestone['seconds']:.1f} s"
    if milestone["link_seconds"] is not None:
        seconds = f"{milestone['link_seconds']:,.1f} s over the link"
    return f"{rounds}, {size(milestone['bytes'])}, {seconds}"
