"""Names of results: the keys of records, and what tables and logs show instead of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedquilt.terms import Budget
from fedquilt.units import amount, size

if TYPE_CHECKING:
    from fedquilt.methods import Method
    from fedquilt.round.federation import World


def share_label(method: Method, budget: Budget, world: World) -> str:
    """Return the key of a client's budget in records: the share that it can train, or what the method says."""
    return method.key(budget, world)


def share_key(share: float, budget: Budget) -> str:
    """Return the key of a share: with four decimals, unless it is that of the budget itself."""
    return str(float(share if share == budget.share else round(share, 4)))


def tested_budgets(method: Method, budgets: Sequence[Budget]) -> Sequence[Budget]:
    """Return the budgets of a fleet for which the server may have nets of their own."""
    return () if method.serves_one_net else budgets


def short_share(key: str) -> str:
    """Return the key of a record as tables show it: `0.5`, or `1` for the whole model."""
    return f"{float(key):g}"


def bounds_label(budget: Budget) -> str:
    """Return the bounds of a budget with their units, such as `28M MACs, 8 MB`. Empty if it has a share alone."""
    bounds = {
        "params": budget.params is not None and f"{amount(budget.params)} parameters",
        "macs": budget.macs is not None and f"{amount(budget.macs)} MACs",
        "memory": budget.memory is not None and size(budget.memory),
    }
    return ", ".join(bound for bound in bounds.values() if bound)


def budgets_by_share(
    method: Method, budgets: Sequence[Budget], world: World
) -> dict[str, tuple[Budget, ...]]:
    """Return the budgets of a fleet by the key of their results in records, in the order of the fleet.

    Args:
        method: The method that names keys.
        budgets: Different budgets of the fleet.
        world: What the method may look at.
    """
    found: dict[str, tuple[Budget, ...]] = {}
    for budget in budgets:
        key = share_label(method, budget, world)
        found[key] = (*found.get(key, ()), budget)
    return found


def labels_by_share(
    method: Method, budgets: Sequence[Budget], world: World, shares: Sequence[float] = ()
) -> dict[str, str]:
    """Return how tables and logs name the keys of records, for keys whose name is not the share itself.

    Args:
        method: The method that names them.
        budgets: Budgets of the fleet. Those with one key are named together.
        world: What the method may look at.
        shares: Further shares that are evaluated.
    """
    found: dict[str, list[str]] = {}
    for budget in (*budgets, *(Budget(share=share) for share in (1.0, *shares))):
        labels = found.setdefault(share_label(method, budget, world), [])
        label = method.label(budget, world)
        if label not in labels:
            labels.append(label)
    joined = {key: " | ".join(labels) for key, labels in found.items()}
    names = list(joined.values())
    # Rounded bounds of unequal budgets may read alike: their shares tell them apart.
    distinct = {
        key: label if names.count(label) == 1 else f"{label} ({short_share(key)})"
        for key, label in joined.items()
    }
    return {key: label for key, label in distinct.items() if label != short_share(key)}
