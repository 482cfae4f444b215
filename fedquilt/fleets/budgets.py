"""Rules that assign budgets to clients, and the three ways in which they do so."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fedquilt.errors import ConfigError
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.family import Family

_log = logging.getLogger(__name__)
Which = NDArray[np.int32]  # (client,) Index of each client's budget among the different budgets.
BudgetAssignment = tuple[tuple[Budget, ...], Which]


class Budgets(ABC):
    """A rule that assigns budgets to any number of clients."""

    @abstractmethod
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        """Return the different budgets, and each client's index among them, (client,).

        Args:
            num_clients: Number of clients.
            seed: Random seed, for fleets with random budgets. Other fleets ignore it.
        """

    def for_family(self, family: Family) -> Budgets:
        """Return the rule for a family. Rules that do not depend on the model return `self`."""
        return self


def in_turn(kinds: Sequence[Budget | float], num_clients: int) -> BudgetAssignment:
    """Assign budgets cyclically, so that each has equally many clients, spread over the fleet.

    Client k has budget k mod G of G.

    Args:
        kinds: Different budgets, or shares in (0, 1].
        num_clients: Number of clients.

    Raises:
        ConfigError: There are no budgets.
    """
    budgets = as_budgets(kinds)
    if not budgets:
        raise ConfigError("a fleet needs at least one share or budget to assign; none was given.")
    return budgets, (np.arange(num_clients) % len(budgets)).astype(np.int32)


def in_groups(kinds: Sequence[Budget | float], num_clients: int) -> BudgetAssignment:
    """Assign budgets to equal groups of neighbouring clients.

    Client k of K has budget floor(G·k/K) of G.

    Args:
        kinds: Different budgets, or shares in (0, 1].
        num_clients: Number of clients.
    """
    clients = np.arange(num_clients, dtype=np.int64)
    return as_budgets(kinds), (len(kinds) * clients // max(1, num_clients)).astype(np.int32)


def in_portions(
    kinds: Sequence[Budget | float], portions: Sequence[float], num_clients: int
) -> BudgetAssignment:
    """Assign budgets to groups of neighbouring clients, in given proportions.

    Args:
        kinds: Different budgets, or shares in (0, 1].
        portions: Portion of the clients with each budget. Only the proportions matter.
        num_clients: Number of clients.
    """
    for kind, portion in zip(kinds, portions, strict=True):
        if not isinstance(portion, Real) or not 0 <= portion <= 1e15:
            raise ConfigError(
                f"a portion of {portion!r} of the clients was asked for {kind}; it must be in [0, "
                "1e15]."
            )
    bounds = np.cumsum(np.asarray(portions, dtype=np.float64))
    if not len(bounds) or not bounds[-1] > 0:
        raise ConfigError(
            "a fleet needs at least one budget with a portion above 0; none was given."
        )
    middles = (np.arange(num_clients) + 0.5) / max(1, num_clients) * bounds[-1]
    return as_budgets(kinds), np.searchsorted(bounds, middles).astype(np.int32)


def warn_of_portions(portions: Sequence[float]) -> None:
    """Log a warning if portions of the clients do not sum to 1. They are used as proportions."""
    total = sum(portions)
    if not math.isclose(total, 1, rel_tol=1e-6):
        _log.warning(
            "the portions of the fleet's budgets sum to %g, not to 1. Each is divided by this sum.",
            total,
        )


# --- the papers' fleets -------------------------------------------------------------------------


# --- real devices -------------------------------------------------------------------------------


def as_budgets(kinds: Sequence[Budget | float]) -> tuple[Budget, ...]:
    """Return budgets in their order, where a number becomes a budget of that share.

    Raises:
        ConfigError: An entry is neither a budget nor a number.
    """
    try:
        return tuple(
            kind if isinstance(kind, Budget) else Budget(share=float(kind)) for kind in kinds
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a fleet of {kinds!r} was asked for; a list of shares in (0, 1] or of budgets fits, "
            "such as [1, 0.5]."
        ) from error
