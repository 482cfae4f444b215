"""Fleets that change: clients that join a run that has begun, and budgets that change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.fleets.availability import Presence
    from fedquilt.fleets.fleet import Fleet


@dataclass(frozen=True)
class Change:
    """A client that joins a run that has begun, or that has another budget from a round on."""

    round: int  # First round in which it holds, from 0.
    client: int  # Number of the client, from 0. The next number that is not used joins.
    budget: Budget  # Its budget from this round on, as a table with bounds.

    def __post_init__(self) -> None:
        within(self, round="[0, inf)", client="[0, inf)")


def changed_in(
    fleet: Fleet, round: int, budgets: Mapping[int, Budget], cohort: int | float
) -> Fleet:
    """Return a fleet with clients that join and with other budgets from one round on.

    Args:
        fleet: Fleet until then.
        round: First round of the changes, from 0.
        budgets: Budget of every client that joins or changes, by its number.
        cohort: Clients per round: a number (int), or a part of all (float in (0, 1]).

    Raises:
        ConfigError: A number is left out, the fleet has changed in a later round, or it is not
            known when clients that join are available.
    """
    if round < fleet.since:
        raise ConfigError(
            f"a change in round {round + 1} was asked for; the fleet has already changed in round "
            f"{fleet.since + 1}. Changes fit in the order of their rounds."
        )
    count = max([fleet.num_clients, *(client + 1 for client in budgets)])
    gaps = set(range(fleet.num_clients, count)) - budgets.keys()
    if gaps:
        raise ConfigError(
            f"client {count - 1} was to join in round {round + 1}; the fleet has "
            f"{fleet.num_clients} clients until then. Clients that join have the next numbers, so "
            f"that {min(gaps)} would fit."
        )
    kinds = list(dict.fromkeys([*fleet.kinds, *budgets.values()]))
    which = np.resize(fleet.which, count)
    for client, budget in budgets.items():
        which[client] = kinds.index(budget)
    is_first = round == 0  # No round has had the fleet as it was.
    changed = replace(
        fleet,
        kinds=tuple(kinds),
        which=which,
        cohort=cohort_size(cohort, count),
        presence=_presence(fleet, count),
        since=round,
        before=None if is_first else fleet,
    )
    if is_first:
        vars(changed).update({k: v for k, v in vars(fleet).items() if k == "_made_from"})
    return changed


def _presence(fleet: Fleet, count: int) -> Presence | None:
    """Return the availability of a fleet that has grown. None: clients are always available.

    Args:
        fleet: Fleet before it has grown.
        count: New number of clients.

    Raises:
        ConfigError: It is not known how the availability was made.
    """
    if fleet.presence is None or count == fleet.num_clients:
        return fleet.presence
    origin = vars(fleet.at(0)).get("_made_from")
    if origin is None:
        raise ConfigError(
            f"client {fleet.num_clients} was to join; it is not known when it is available. A "
            "fleet from fq.Fleet.of(…, availability=…) would work."
        )
    _, availability, seed = origin
    presence: Presence = availability.presence(count, seed)
    return presence


def cohort_size(cohort: int | float, num_clients: int) -> int:
    """Return the number of clients in a cohort.

    Args:
        cohort: A number of clients (int), or a part of all (float in (0, 1], at least one client).
            1 is one client, and 1.0 is all clients.
        num_clients: Number of clients in the fleet.
    """
    if isinstance(cohort, int | np.integer):
        return int(cohort)
    if not 0 < cohort <= 1:
        raise ConfigError(
            f"a cohort of {cohort} was asked for; write a number of clients, or a part of all in "
            "(0, 1], such as 0.1."
        )
    return max(1, round(cohort * num_clients))
