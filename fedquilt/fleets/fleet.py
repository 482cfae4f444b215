"""Fleets: devices, their budgets, and the cohort of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import missing, outside, refuse, whole
from fedquilt.display import Overview, Readable, shortened
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.fleets.availability import AVAILABILITY, Availability, Diurnal, Presence, Trace
from fedquilt.fleets.budgets import (
    Budgets,
    Which,
    in_portions,
    in_turn,
)
from fedquilt.fleets.changes import Change, changed_in, cohort_size
from fedquilt.fleets.presets import FIVE_SHARES, FLEETS, Given, Uniform
from fedquilt.names import known
from fedquilt.terms import Budget, Client
from fedquilt.units import amount, size

if TYPE_CHECKING:
    from fedquilt.family import Family


@dataclass(frozen=True, eq=False, repr=False)
class Fleet(Readable):
    """All devices with their budgets, and the number of clients that take part in a round.

    `Fleet.of` makes a fleet from shares or budgets, and `Fleet.mixed` from portions of the clients.
    A fleet of any size is stored as two arrays, so that millions of clients take little memory.

    Clients may join later, and budgets may change (`changed`). Then every fact is a function of the
    round: `at` returns the fleet of a round, and all attributes are those of the last one.

    Attributes:
        kinds: Different budgets, in the order in which clients have them. Unused budgets are left
            out.
        which: (client,) Index of each client's budget in `kinds`.
        cohort: Number of clients that take part in a round.
        dynamic: True: in every round, each client has the budget of a random client.
        presence: Rounds in which clients are available. None: always.
        since: First round of this fleet, from 0. 0: it has been the same from the beginning.
        before: Fleet of the rounds before `since`. None: there are no such rounds.

    Example:
        >>> import fedquilt as fq
        >>> fleet = fq.Fleet.of([1.0, 0.5, 0.25], num_clients=6, cohort=2)
        >>> [fleet.budget(client, round=0, seed=0).share for client in range(6)]
        [1.0, 0.5, 0.25, 1.0, 0.5, 0.25]
        >>> len(fleet.draw_cohort(round=0, seed=0))
        2
    """

    kinds: tuple[Budget, ...]
    which: Which
    cohort: int
    dynamic: bool = False
    presence: Presence | None = None
    since: int = 0
    before: Fleet | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.cohort <= self.num_clients:
            raise ConfigError(
                f"a cohort of {self.cohort} was asked for; the fleet has {self.num_clients} "
                "clients."
            )
        used, first_clients = np.unique(self.which, return_index=True)
        new_indices: dict[Budget, int] = {}
        index_by_kind = np.zeros(len(self.kinds), dtype=np.int32)
        for kind in used[np.argsort(first_clients)].tolist():
            index_by_kind[kind] = new_indices.setdefault(self.kinds[kind], len(new_indices))
        object.__setattr__(self, "kinds", tuple(new_indices))
        object.__setattr__(self, "which", index_by_kind[self.which])

    @override
    def _overview(self) -> Overview:
        title = f"{self.num_clients:,} clients, {self.cohort:,} a round, "
        title += "1 budget" if len(self.kinds) == 1 else f"{len(self.kinds):,} budgets"
        counts = self.counts.items()
        rows, notes = shortened(
            [(_bounds_text(kind), f"{count:,}") for kind, count in counts], "budgets"
        )
        if self.dynamic:
            notes.append("In every round, each client has the budget of a random client.")
        if self.presence is not None:
            notes.append(f"Clients come and go by {self.presence.name}.")
        if self.before is not None:
            notes.append(f"Clients or budgets changed before round {self.since + 1}.")
        return Overview(title, ("budget", "clients"), rows, notes)

    @staticmethod
    def of(
        shares: Budgets | Sequence[float | Budget],
        num_clients: int,
        cohort: int | float = 0.1,
        dynamic: bool = False,
        availability: Availability | None = None,
        seed: int = 0,
    ) -> Fleet:
        """Return a fleet with budgets that are assigned cyclically, or by a preset.

        Args:
            shares: Shares in (0, 1] or budgets to assign cyclically, or a preset such as
                `fleets.Income()`.
            num_clients: Number of clients.
            cohort: Clients per round: a number (int), or a part of all (float in (0, 1]). 1.0 is
                all clients.
            dynamic: True redraws the budget of every client each round, in the same proportions.
            availability: Rounds in which clients are available. None: always.
            seed: Random seed of random budgets and of availability.
        """
        if isinstance(shares, Mapping):
            raise ConfigError(
                f"Fleet.of was given the portions {dict(shares)}; it gives every share to as many "
                "clients. Fleet.mixed takes portions."
            )
        budgets = shares if isinstance(shares, Budgets) else Given(in_turn(shares, 0)[0])
        return _assigned(budgets, num_clients, cohort, dynamic, availability, seed)

    @staticmethod
    def mixed(
        portions: Mapping[float | Budget, float],
        num_clients: int,
        cohort: int | float = 0.1,
        dynamic: bool = False,
        availability: Availability | None = None,
        seed: int = 0,
    ) -> Fleet:
        """Return a fleet in given proportions, in which neighbouring clients have the same budget.

        Args:
            portions: Portion of clients by share or budget: `{1.0: 0.2, 0.5: 0.4, 0.25: 0.4}`.
            num_clients: Number of clients.
            cohort: Clients per round: a number (int), or a part of all (float in (0, 1]). 1.0 is
                all clients.
            dynamic: True redraws the budget of every client each round, in the same proportions.
            availability: Rounds in which clients are available. None: always.
            seed: Random seed of availability.
        """
        # Portions are checked for no clients first, so that messages have them as they were given.
        kinds, _ = in_portions(list(portions), list(portions.values()), 0)
        budgets = Given(kinds, tuple(map(float, portions.values())))
        return _assigned(budgets, num_clients, cohort, dynamic, availability, seed)

    @property
    def settings(self) -> Devices | None:
        """Return settings that recreate this fleet. None: it was created from its fields directly.

        Raises:
            ConfigError: The availability is a class of the user's, which no settings file can hold.
        """
        first = self.at(0)
        if "_made_from" not in vars(first):
            return None
        budgets, availability, seed = vars(first)["_made_from"]
        if not isinstance(availability, Trace | Diurnal | None):
            raise ConfigError(
                f"clients come and go by {type(availability).__name__}; files have Trace and "
                "Diurnal."
            )
        return Devices(
            first.num_clients,
            vars(self).get("_cohort", self.cohort),
            _plainly(budgets),
            self.dynamic,
            availability or "",
            int(seed),
            vars(self).get("_changes", ()),
        )

    def _remembering(self, budgets: Budgets, availability: Availability | None, seed: int) -> Fleet:
        """Store on this fleet the arguments that it was created from, for `settings`. Return it.

        They are not a dataclass field, so that `dataclasses.replace` does not copy them to a fleet
        with other budgets.
        """
        vars(self)["_made_from"] = budgets, availability, seed
        return self

    def changed(self, changes: Sequence[Change], cohort: int | float | None = None) -> Fleet:
        """Return this fleet with clients that join, or with other budgets, from given rounds on.

        Earlier rounds stay as they are, with the same cohorts and budgets.

        Args:
            changes: Changes in any order. Clients that join have the next numbers in the order of
                their rounds. Empty: this fleet is returned.
            cohort: Clients per round: a number (int), or a part of all clients of the round (float
                in (0, 1]). None: the number of this fleet.

        Raises:
            ConfigError: A number is left out, a change is older than earlier ones, or it is not
                known when clients that join are available.

        Example:
            >>> import fedquilt as fq
            >>> fleet = fq.Fleet.of([1.0, 0.5], num_clients=2, cohort=1.0)
            >>> later = fq.fleets.Change(round=3, client=2, budget=fq.Budget(share=0.25))
            >>> fleet = fleet.changed([later], cohort=1.0)
            >>> [len(fleet.draw_cohort(round, seed=0)) for round in (2, 3)]
            [2, 3]
        """
        cohort = self.cohort if cohort is None else cohort
        fleet = self
        for round in sorted({change.round for change in changes}):
            budgets = {change.client: change.budget for change in changes if change.round == round}
            fleet = changed_in(fleet, round, budgets, cohort)
        if changes:
            vars(fleet)["_changes"] = (*vars(self).get("_changes", ()), *changes)
            vars(fleet)["_cohort"] = cohort
        return fleet

    def at(self, round: int) -> Fleet:
        """Return the fleet as it is in a round, from 0. It is this one unless it changed later."""
        fleet = self
        while fleet.before is not None and round < fleet.since:
            fleet = fleet.before
        return fleet

    @property
    def joined(self) -> tuple[int, ...]:
        """Return the first round of every client that joined later, in ascending order."""
        if self.before is None:
            return ()
        return self.before.joined + (self.since,) * (self.num_clients - self.before.num_clients)

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.which)

    @property
    def counts(self) -> dict[Budget, int]:
        """Return the number of clients with each budget, by budget, in the order of `kinds`.

        If budgets are dynamic, it is the expected number in a round.
        """
        counts = np.bincount(self.which, minlength=len(self.kinds)).tolist()
        return dict(zip(self.kinds, counts, strict=True))

    def first(self, budget: Budget) -> int:
        """Return the lowest number of a client with a budget, which must be one of the fleet's.

        Redraws of dynamic budgets are not considered.
        """
        return int(np.argmax(self.which == self.kinds.index(budget)))

    def budget(self, client: int, round: int, seed: int) -> Budget:
        """Return the budget of a client in a round. Dynamic budgets keep the fleet's proportions.

        Args:
            client: Client, from 0.
            round: Round, from 0. It has no effect unless budgets are dynamic.
            seed: Random seed of the run. It has no effect unless budgets are dynamic.
        """
        fleet = self.at(round)
        if self.dynamic:
            client = noise.key(seed, noise.Stream.DYNAMIC_BUDGET, client, round) % fleet.num_clients
        return fleet.kinds[int(fleet.which[client])]

    def check(self, rounds: int) -> None:
        """Raise a ConfigError if the run has rounds after the last one with an available client.

        Args:
            rounds: Number of rounds of the run.
        """
        last = self.presence.last if self.presence else None
        if self.presence and last is not None and rounds > last:
            raise ConfigError(
                f"{rounds} rounds were asked for; in {self.presence.name} no client is available "
                f"after {last} of them. Ask for {last} rounds, leave an end empty, or set a "
                "period."
            )

    def draw_cohort(
        self, round: int, seed: int, online: Sequence[int] | None = None, attempt: int = 0
    ) -> list[int]:
        """Draw the clients of one round from those that are available.

        If fewer than `cohort` are available, all of them are returned. There may be none.

        Args:
            round: Round, from 0.
            seed: Random seed of the run.
            online: Clients that can be reached, in ascending order. None: all.
            attempt: Number of cohorts of this round whose replies were too few to count. 0: none.

        Returns:
            Clients in ascending order.

        Raises:
            ConfigError: A client that can be reached is not in the fleet.
        """
        return self.at(round)._draw(round, seed, online, attempt)

    def _draw(self, round: int, seed: int, online: Sequence[int] | None, attempt: int) -> list[int]:
        """Draw the clients of one round from this fleet. Arguments are those of `draw_cohort`."""
        words = (round, attempt) if attempt else (round,)
        key = noise.key(seed, noise.Stream.COHORT, *words)
        if online is not None:
            self._check_online(online)
            reachable = online if self.presence is None else self.presence.among(round, online)
            positions = noise.choose(key, min(self.cohort, len(reachable)), len(reachable))
            return [reachable[position] for position in positions]
        if self.presence is None:
            return noise.choose(key, self.cohort, self.num_clients)
        return self.presence.draw(round, self.cohort, key)

    def _check_online(self, online: Sequence[int]) -> None:
        unknown = [id for id in online if not 0 <= id < self.num_clients]
        if unknown:
            raise ConfigError(
                f"Engine.online reported client {unknown[0]}, of {len(online)} that can be "
                f"reached; the fleet has {self.num_clients} clients, which are numbered from 0 to "
                f"{self.num_clients - 1}."
            )

    def client(self, id: int, round: int, seed: int, size: int, place: int = 0) -> Client:
        """Return a client with its budget in a round, and with its place among all drawn clients.

        Args:
            id: Number of the client, from 0.
            round: Round, from 0.
            seed: Random seed of the run.
            size: Number of its training samples.
            place: Position of the client in the cohort of the round.
        """
        turn = self.at(round)._num_drawn(round) + place
        return Client(id, self.budget(id, round, seed), size, turn)

    def _num_drawn(self, round: int) -> int:
        """Return the number of clients that were drawn in all rounds before a round."""
        earlier = 0 if self.before is None else self.before._num_drawn(self.since)
        if self.presence is None:
            return earlier + (round - self.since) * self.cohort
        before = self.presence.before
        return earlier + before(round, self.cohort) - before(self.since, self.cohort)


@dataclass(frozen=True)
class Devices:
    """Settings of a fleet: number of clients, size of a cohort, budgets and availability."""

    clients: int | None = None  # Number of clients. None: as many as the data is partitioned into.
    # Clients that take part in a round: a number, or a part of all as a float in (0, 1].
    cohort: int | float = 0.1
    budgets: Budgets | dict[str, float] = Uniform()  # Preset of budgets, or portions by share.
    dynamic: bool = False  # Redraw the clients' budgets every round, in the same proportions.
    # CSV file or daily pattern with the availability of clients. Empty: all are always available.
    availability: Trace | Diurnal | str = ""
    seed: int | None = None  # Random seed of budgets and availability. None: that of the run.
    # Clients that join later, and budgets that change. `clients` is then the number in round 0.
    changes: tuple[Change, ...] = ()

    def __post_init__(self) -> None:
        bounds = {"cohort": "(0, 1]" if isinstance(self.cohort, float) else "[1, inf)"}
        bounds |= {} if self.clients is None else {"clients": "[1, inf)"}
        bounds |= {} if self.seed is None else {"seed": "[0, 9223372036854775807]"}
        problems = outside(self, **bounds)
        for name in () if isinstance(self.budgets, Budgets) else self.budgets:
            try:
                _share(name)
            except ConfigError as error:
                problems["budgets"] = str(error)
        if (
            isinstance(self.availability, str)
            and self.availability.endswith(".csv")
            and missing(self.availability)
        ):
            problems["availability"] = missing(self.availability)
        if self.changes and self.clients is None:
            problems["changes"] = "they need `clients`, the number of clients in round 0."
        refuse(self, problems)

    @property
    def total(self) -> int | None:
        """Return the number of clients that ever take part. None: the data decides."""
        if self.clients is None:
            return None
        return max([self.clients, *(change.client + 1 for change in self.changes)])

    def fleet(self, num_clients: int, seed: int = 0, family: Family | None = None) -> Fleet:
        """Return the fleet of these settings for data that is partitioned over clients.

        Args:
            num_clients: Number of clients that the data is partitioned over.
            seed: Random seed of the run. It has no effect if the settings have a seed.
            family: Family of the model, on which some budgets depend. None: there is no model yet.

        Raises:
            ConfigError: The settings ask for more clients than the data has.
        """
        count = num_clients if self.clients is None else self.clients
        if (total := self.total or count) > num_clients:
            raise ConfigError(
                f"{total} clients were asked for; the data is partitioned among {num_clients}."
            )
        seed = seed if self.seed is None else self.seed
        budgets, availability = self.budgets, self._availability()
        if isinstance(budgets, Budgets):
            budgets = budgets.for_family(family) if family is not None else budgets
            fleet = Fleet.of(budgets, count, self.cohort, self.dynamic, availability, seed)
            return fleet.changed(self.changes, self.cohort)
        portions: dict[float | Budget, float] = {
            _share(name): portion for name, portion in budgets.items()
        }
        fleet = Fleet.mixed(portions, count, self.cohort, self.dynamic, availability, seed)
        return fleet.changed(self.changes, self.cohort)

    def _availability(self) -> Availability | None:
        if not isinstance(self.availability, str):
            return self.availability
        if not self.availability:
            return None
        if self.availability.endswith(".csv"):
            return Trace(self.availability)
        return known(
            {"diurnal": Diurnal}, self.availability, "pattern of availability or .csv file"
        )()


def _bounds_text(budget: Budget) -> str:
    """Return the bounds of a budget with units, such as "share 0.5, macs 28M"."""
    shown = {"share": "{:g}".format, "memory": size}
    bounds = budget.bounds.items()
    return ", ".join(f"{name} {shown.get(name, amount)(value)}" for name, value in bounds)


def _plainly(budgets: Budgets) -> Budgets | dict[str, float]:
    """Return budgets in the simplest form that a settings file can hold.

    Listed budgets that are shares alone become a list of shares, or a table of portions by share.
    Other budgets are returned unchanged.
    """
    if not isinstance(budgets, Given) or any(
        kind != Budget(share=kind.share or 1.0) for kind in budgets.kinds
    ):
        return budgets
    shares = [float(kind.share or 1.0) for kind in budgets.kinds]
    if not budgets.portions:
        return Uniform(tuple(shares))
    if len(set(shares)) < len(shares):
        return budgets
    return {repr(share): portion for share, portion in zip(shares, budgets.portions, strict=True)}


def _share(name: str) -> float:
    try:
        return Budget(share=float(name)).share or 0.0
    except (ValueError, BudgetError) as error:
        raise ConfigError(
            f"budgets of a share of {name!r} were asked for; shares lie in (0, 1], as in {{ '1' = "
            f"0.2, '0.5' = 0.8 }}."
        ) from error


def _assigned(
    budgets: Budgets,
    num_clients: int,
    cohort: int | float,
    dynamic: bool,
    availability: Availability | None,
    seed: int,
) -> Fleet:
    """Return a fleet whose budgets a rule assigns. Arguments are those of `Fleet.of`.

    Args:
        budgets: Rule that assigns budgets.
        num_clients: Number of clients.
        cohort: Clients per round: a number (int), or a part of all (float in (0, 1]).
        dynamic: True redraws the budget of every client each round, in the same proportions.
        availability: Rounds in which clients are available. None: always.
        seed: Random seed of random budgets and of availability.

    Raises:
        ConfigError: The number of clients is no whole number from 1 on.
    """
    if not whole(num_clients, 1):
        raise ConfigError(
            f"a fleet of {num_clients!r} clients was asked for; whole numbers from 1 on fit."
        )
    kinds, which = budgets.assign(num_clients, seed)
    presence = availability.presence(len(which), seed) if availability else None
    fleet = Fleet(kinds, which, cohort_size(cohort, len(which)), dynamic, presence)
    return fleet._remembering(budgets, availability, seed)


__all__ = [
    "AVAILABILITY",
    "FIVE_SHARES",
    "FLEETS",
    "Budgets",
    "Change",
    "Devices",
    "Diurnal",
    "Fleet",
    "Trace",
    "cohort_size",
]
