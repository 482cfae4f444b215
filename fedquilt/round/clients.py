"""Who takes part: devices, their budgets, and the cohort of a round."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedquilt import noise
from fedquilt.checks import missing, outside, refuse, whole
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.fleets import (
    FIVE_SHARES,
    FLEETS,
    Budgets,
    Deal,
    Uniform,
    Which,
    in_portions,
    in_turn,
    warn_of_portions,
)
from fedquilt.names import known
from fedquilt.round.availability import AVAILABILITY, Availability, Diurnal, Presence, Trace
from fedquilt.terms import Budget, Client

if TYPE_CHECKING:
    from fedquilt.family import Family


@dataclass(frozen=True, eq=False)
class Fleet:
    """All devices, by the budget of each, and how many take part in a round.

    It is two arrays however many there are, and nothing a round asks of it costs more than the cohort.
    """

    kinds: tuple[
        Budget, ...
    ]  # the different budgets; those nobody has are left out, in order of first appearance
    which: Which  # of each client, the place of its budget among the kinds
    sample: int
    dynamic: bool = False  # every round, every client has the budget of one drawn from all of them
    presence: Presence | None = None  # None: everybody can always be reached

    def __post_init__(self) -> None:
        if not 1 <= self.sample <= self.num_clients:
            raise ConfigError(
                f"a cohort of {self.sample} was asked for; the fleet has {self.num_clients} clients."
            )
        places, first = np.unique(self.which, return_index=True)
        met: dict[Budget, int] = {}
        renamed = np.zeros(len(self.kinds), dtype=np.int32)
        for place in places[np.argsort(first)].tolist():
            renamed[place] = met.setdefault(self.kinds[place], len(met))
        object.__setattr__(self, "kinds", tuple(met))
        object.__setattr__(self, "which", renamed[self.which])

    @staticmethod
    def of(
        shares: Budgets | Sequence[float | Budget],
        num_clients: int,
        sample: int | float = 0.1,
        dynamic: bool = False,
        available: Availability | None = None,
        seed: int = 0,
    ) -> Fleet:
        """Clients of some shares or budgets, dealt in turn, or of a preset such as `fleets.Income()`.

        `sample` is the size of a cohort: a number of clients, or, as a float up to 1.0, a part of all.
        """
        _check_count(num_clients)
        dealt = (
            shares.deal(num_clients, seed)
            if isinstance(shares, Budgets)
            else in_turn(shares, num_clients)
        )
        return _fleet(dealt, sample, dynamic, available, seed)

    @staticmethod
    def mixed(
        portions: Mapping[float | Budget, float],
        num_clients: int,
        sample: int | float = 0.1,
        dynamic: bool = False,
        available: Availability | None = None,
        seed: int = 0,
    ) -> Fleet:
        """Clients in given proportions, neighbours alike: `{1.0: 0.2, 0.5: 0.4, 0.25: 0.4}`."""
        _check_count(num_clients)
        dealt = in_portions(list(portions), list(portions.values()), num_clients)
        warn_of_portions(list(portions.values()))
        return _fleet(dealt, sample, dynamic, available, seed)

    @property
    def num_clients(self) -> int:
        return len(self.which)

    @property
    def counts(self) -> dict[Budget, int]:
        """How many clients have each budget."""
        return dict(
            zip(
                self.kinds, np.bincount(self.which, minlength=len(self.kinds)).tolist(), strict=True
            )
        )

    def first(self, budget: Budget) -> int:
        """The first client with a budget."""
        return int(np.argmax(self.which == self.kinds.index(budget)))

    def budget(self, client: int, round: int, seed: int) -> Budget:
        """What a client can hold in a round. Dynamic budgets keep the fleet's proportions."""
        like = noise.key(seed, 21, client, round) % self.num_clients if self.dynamic else client
        return self.kinds[int(self.which[like])]

    def check(self, rounds: int) -> None:
        """Refuse to play so many rounds if from one of them on nobody would ever be there again."""
        last = self.presence.last if self.presence else None
        if self.presence and last is not None and rounds > last:
            raise ConfigError(
                f"{rounds} rounds were asked for; in {self.presence.name} nobody is there after {last} of them. "
                f"Play {last}, leave an end empty, or set a period."
            )

    def cohort(self, round: int, seed: int, online: Sequence[int] | None = None) -> list[int]:
        """Draw the clients of one round: `sample` of those that are there, all if they are fewer, or none.

        Args:
            round: The round, from 0.
            seed: Random seed of the run.
            online: Clients that can be reached, in ascending order. None: all.

        Returns:
            Clients in ascending order.

        Raises:
            ConfigError: A client that can be reached is not in the fleet.
        """
        word = noise.key(seed, 22, round)
        if online is not None:
            self._check_online(online)
            there = online if self.presence is None else self.presence.among(round, online)
            places = noise.choose(word, min(self.sample, len(there)), len(there))
            return [there[place] for place in places]
        if self.presence is None:
            return noise.choose(word, self.sample, self.num_clients)
        return self.presence.draw(round, self.sample, word)

    def _check_online(self, online: Sequence[int]) -> None:
        unknown = [id for id in online if not 0 <= id < self.num_clients]
        if unknown:
            raise ConfigError(
                f"Engine.online reported client {unknown[0]}, of {len(online)} that can be reached; the fleet has "
                f"{self.num_clients} clients, which are numbered from 0 to {self.num_clients - 1}."
            )

    def client(self, id: int, round: int, seed: int, size: int, place: int = 0) -> Client:
        """One of them as it is in a round, at a place of its cohort."""
        before = (
            round * self.sample
            if self.presence is None
            else self.presence.before(round, self.sample)
        )
        return Client(id, self.budget(id, round, seed), size, before + place)


@dataclass(frozen=True)
class Devices:
    """A fleet as settings: how many clients, how many of them a round, what they can hold, when they are there."""

    clients: int | None = None  # None: as many as the data has
    sample: int | float = (
        0.1  # a cohort: a number of clients, or, as a float up to 1.0, a part of all
    )
    budgets: Budgets | dict[str, float] = Uniform()  # a preset, or portions by share
    dynamic: bool = False  # budgets are redrawn every round, in the same proportions
    available: Trace | Diurnal | str = ""  # a trace's file or a pattern; nothing: everybody, always

    def __post_init__(self) -> None:
        bounds = {"sample": "(0, 1]" if isinstance(self.sample, float) else "[1, inf)"}
        wrong = outside(self, **bounds, **({} if self.clients is None else {"clients": "[1, inf)"}))
        for name in () if isinstance(self.budgets, Budgets) else self.budgets:
            try:
                _share(name)
            except ConfigError as error:
                wrong["budgets"] = str(error)
        if (
            isinstance(self.available, str)
            and self.available.endswith(".csv")
            and missing(self.available)
        ):
            wrong["available"] = missing(self.available)
        refuse(self, wrong)

    def fleet(self, num_clients: int, seed: int = 0, family: Family | None = None) -> Fleet:
        """Return the fleet for data that is dealt to clients.

        Args:
            num_clients: Clients that the data is dealt to.
            seed: Seed of random budgets.
            family: Family of the model, on which some budgets depend. None: there is no model yet.
        """
        count = num_clients if self.clients is None else self.clients
        if count > num_clients:
            raise ConfigError(
                f"{count} clients were asked for; the data is dealt to {num_clients}."
            )
        budgets, available = self.budgets, self._availability()
        if isinstance(budgets, Budgets):
            budgets = budgets.for_family(family) if family is not None else budgets
            return Fleet.of(budgets, count, self.sample, self.dynamic, available, seed)
        portions: dict[float | Budget, float] = {
            _share(name): portion for name, portion in budgets.items()
        }
        return Fleet.mixed(portions, count, self.sample, self.dynamic, available, seed)

    def _availability(self) -> Availability | None:
        if not isinstance(self.available, str):
            return self.available
        if not self.available:
            return None
        if self.available.endswith(".csv"):
            return Trace(self.available)
        return known({"diurnal": Diurnal}, self.available, "pattern of availability or .csv file")()


def _share(name: str) -> float:
    try:
        return Budget(share=float(name)).share or 0.0
    except (ValueError, BudgetError) as error:
        raise ConfigError(
            f"budgets of a share of {name!r} were asked for; shares lie in (0, 1], as in {{ '1' = 0.2, '0.5' = 0.8 }}."
        ) from error


def _check_count(num_clients: int) -> None:
    if not whole(num_clients, 1):
        raise ConfigError(
            f"a fleet of {num_clients!r} clients was asked for; whole numbers from 1 on fit."
        )


def _fleet(
    dealt: Deal, sample: int | float, dynamic: bool, available: Availability | None, seed: int
) -> Fleet:
    kinds, which = dealt
    presence = available.presence(len(which), seed) if available else None
    return Fleet(kinds, which, cohort_size(sample, len(which)), dynamic, presence)


def cohort_size(sample: int | float, num_clients: int) -> int:
    """How many clients a cohort has: 10 is ten of them, 0.1 a tenth (at least one), 1 one of them, 1.0 all."""
    if isinstance(sample, int | np.integer):
        return int(sample)
    if not 0 < sample <= 1:
        raise ConfigError(
            f"a cohort of {sample} was asked for; write a number of clients, or a part of all in (0, 1], such as 0.1."
        )
    return max(1, round(sample * num_clients))


__all__ = [
    "AVAILABILITY",
    "FIVE_SHARES",
    "FLEETS",
    "Budgets",
    "Devices",
    "Diurnal",
    "Fleet",
    "Trace",
    "cohort_size",
]
