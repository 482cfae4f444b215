"""Names of results: the keys of records, and what tables and logs show instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedquilt.terms import Budget
from fedquilt.units import amount, size

if TYPE_CHECKING:
    from fedquilt.round.federation import World
    from fedquilt.round.method import Method


def share_label(method: Method, budget: Budget, world: World) -> str:
    """Return the key of a client's budget in records, such as "0.5", as `Method.key` names it.

    It is usually the share that the client can train.

    Args:
        method: The method that names keys.
        budget: Budget of the client.
        world: What the method may look at.
    """
    return method.key(budget, world)


def share_key(share: float, budget: Budget) -> str:
    """Return a share as a key of records, such as "0.5".

    The share is rounded to four decimals, unless it is exactly the share that the budget names.

    Args:
        share: Share that a client can train.
        budget: Budget of the client.
    """
    return str(float(share if share == budget.share else round(share, 4)))


def tested_budgets(method: Method, budgets: Sequence[Budget]) -> Sequence[Budget]:
    """Return the budgets of a fleet that are tested one by one.

    The result is empty if all devices get the same net, because then the whole model is tested.

    Args:
        method: Method of the run.
        budgets: Budgets of the fleet.
    """
    return () if method.serves_one_net else budgets


def short_share(key: str) -> str:
    """Return the key of a share as tables show it, such as `0.5`, or `1` for "1.0"."""
    return f"{float(key):g}"


def bounds_label(budget: Budget) -> str:
    """Return the bounds of a budget with their units, such as `28M MACs, 8 MB`.

    They are the bounds on parameters, multiply-adds and memory, in this order. The text is empty if
    the budget has only a share.
    """
    bounds = {
        "params": budget.params is not None and f"{amount(budget.params)} parameters",
        "macs": budget.macs is not None and f"{amount(budget.macs)} MACs",
        "memory": budget.memory is not None and size(budget.memory),
    }
    return ", ".join(bound for bound in bounds.values() if bound)


def budgets_by_share(
    method: Method, budgets: Sequence[Budget], world: World
) -> dict[str, tuple[Budget, ...]]:
    """Group the budgets of a fleet by their key in records, in the order of the fleet.

    Args:
        method: The method that names keys.
        budgets: Different budgets of the fleet.
        world: What the method may look at.
    """
    budgets_by_key: dict[str, tuple[Budget, ...]] = {}
    for budget in budgets:
        key = share_label(method, budget, world)
        budgets_by_key[key] = (*budgets_by_key.get(key, ()), budget)
    return budgets_by_key


def labels_by_share(
    method: Method, budgets: Sequence[Budget], world: World, shares: Sequence[float] = ()
) -> dict[str, str]:
    """Return the names that tables and logs show, by the key of a record.

    Budgets with one key are named together. Keys whose name is just the share are left out. Names
    that would be equal get the share behind them.

    Args:
        method: The method that names them.
        budgets: Budgets of the fleet.
        world: What the method may look at.
        shares: Further shares that are evaluated. The whole model is always included.
    """
    labels_by_key: dict[str, list[str]] = {}
    for budget in (*budgets, *(Budget(share=share) for share in (1.0, *shares))):
        labels = labels_by_key.setdefault(share_label(method, budget, world), [])
        label = method.label(budget, world)
        if label not in labels:
            labels.append(label)
    joined = {key: " | ".join(labels) for key, labels in labels_by_key.items()}
    names = list(joined.values())
    # Different bounds may be equal once rounded. Then the share is added to tell them apart.
    distinct = {
        key: label if names.count(label) == 1 else f"{label} ({short_share(key)})"
        for key, label in joined.items()
    }
    return {key: label for key, label in distinct.items() if label != short_share(key)}
