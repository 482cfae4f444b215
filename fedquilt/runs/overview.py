"""Summary of a run for `print` and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquilt.display import Overview, shortened
from fedquilt.round.labels import labels_by_share
from fedquilt.runs.summaries import figure_text, share_label
from fedquilt.units import amount, size

if TYPE_CHECKING:
    from fedquilt.round.optional_steps import OptionalSteps
    from fedquilt.runs.run import Run

_MAX_METRICS = 4  # Columns of metrics
_MAX_LABELED = 64  # Different budgets of a fleet, above which shares are shown as numbers


def overview_of(run: Run) -> Overview:
    """Return what a run consists of, its metrics in the last evaluation, and what it has cost."""
    world, rounds = run.world, run.server.round
    title = (
        f"{method_title(run.method)} on {run.data.name} with {world.family.title}: "
        f"{rounds:,} {'round' if rounds == 1 else 'rounds'}, seed {world.seed}"
    )
    if not run.records:
        return Overview(title, notes=("No round is recorded.",))

    head, rows = _figures(run)
    shown, notes = shortened(rows, "shares")
    records = run.records
    down, up = (sum(record.bytes_down for record in records), sum(r.bytes_up for r in records))
    macs = sum(record.macs for record in records)
    seconds = sum(record.seconds for record in records)
    notes.append(f"{size(down)} down, {size(up)} up, {amount(macs)} MACs, {seconds:.3g} s")
    if not rows:
        notes.append("No round was evaluated.")
    if run.folder is not None:
        notes.append(f"folder {run.folder}")
    return Overview(title, head, shown, notes)


def method_title(method: OptionalSteps) -> str:
    """Return the name of a method's class, and the one of the method that it trains with."""
    name = type(method).__name__
    return (
        name if method.inner_method is None else f"{name} over {method_title(method.inner_method)}"
    )


def labels_of_run(run: Run) -> dict[str, str]:
    """Return the names that the method gives shares, by share as text.

    It is empty for a fleet of many different budgets, because each of them takes time.
    """
    kinds = run.fleet.kinds
    if len(kinds) > _MAX_LABELED:
        return {}
    return labels_by_share(run.method, kinds, run.world, run.evaluation.shares)


def _figures(run: Run) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table with metrics by share, the widest share first.

    Metrics by domain are left out.
    """
    grades, task = run.grades, run.world.task
    names = list(dict.fromkeys([grades.main, *(m for m in grades.metrics if "/" not in m)]))
    names = [name for name in names if grades.metrics.get(name)][:_MAX_METRICS]
    shares = dict.fromkeys(share for name in names for share in grades.metrics[name])
    labels = labels_of_run(run)

    rows = []
    for share in sorted(shares, key=float, reverse=True):
        figures = [
            figure_text(grades.metrics[name].get(share), task.metric_of(name).is_rate)
            for name in names
        ]
        rows.append([share_label(share, labels), *figures])
    return ["share", *names], rows
