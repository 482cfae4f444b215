"""Links that break: a payload is sent column by column, and what comes after the first failure is lost.

FedResCuE (Zhu et al., ICML 2022), section 3.3 and appendix A.3.4. What arrives is a payload with a smaller index.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedquilt import noise
from fedquilt.checks import outside, refuse, within
from fedquilt.round.link.dealt import Dealt, check_dealt, dealt, empty, shown, take_lists
from fedquilt.round.link.trip import Trip
from fedquilt.terms import Submodel

if TYPE_CHECKING:
    from fedquilt.family.member import Member

_DRAW = 1


@dataclass(frozen=True)
class Loss(ABC):
    """The rate at which a column fails, which ends the transmission.

    A column is a part of the *whole* model's width, whatever the client holds.
    """

    granularity: float = field(default=0.125, kw_only=True)  # of the whole model's width, a column

    def __post_init__(self) -> None:
        within(self, granularity="[0.001, 1]")

    @abstractmethod
    def rates(self, client: int, seed: int) -> tuple[float, float]:
        """Between which bounds the error rate of each of a client's columns is drawn."""

    @property
    def loses(self) -> bool:
        """Whether anything can get lost."""
        return True

    def check(self, num_clients: int) -> None:  # noqa: B027 (some have nothing to say)
        """Refuse what does not fit so many clients."""

    def reach(self, submodel: Submodel, trip: Trip) -> Submodel | None:
        """What of a payload arrives: its first columns, in its own order; None if the first one failed.

        Weights that no width cuts (the output's bias) come with the first column.
        """
        family = trip.world.family
        count = self.count(family.member(submodel))
        arrived = self.arrived(trip, count)
        if arrived == count:
            return submodel
        return family.part(submodel, arrived * self.granularity) if arrived else None

    def count(self, member: Member) -> int:
        """How many columns a member has; the last may be narrower."""
        count = 1
        while member.nested(min(1.0, count * self.granularity)).arch != member.arch:
            count += 1
        return count

    def arrived(self, trip: Trip, count: int) -> int:
        """How many of `count` columns arrive: er is taken for each, and sending stops at the first ε < er."""
        low, high = self.rates(trip.job.client.id, trip.world.seed)
        where, luck = noise.uniform(torch.tensor(trip.key(_DRAW)), (2, count), torch.float64)
        failed = (luck < low + (high - low) * where).nonzero()
        return int(failed[0]) if len(failed) else count


@dataclass(frozen=True)
class Columns(Loss):
    """Columns that fail with an error rate: constant, a client's own, or drawn anew for every column.

    The first column that fails ends the transmission. At rates of 0.1 to 0.2, 48 % of eight columns are lost.
    """

    rate: Dealt = 0.1  # for all, or a list that is dealt to clients in turn; 0 loses nothing
    upto: float | None = (
        None  # every column's rate is drawn between `rate` and this; None: it is `rate`
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        take_lists(self, "rate")
        wrong = outside(self, rate="[0, 1]") | empty(self, "rate")
        if self.upto is not None:
            wrong |= outside(self, upto="[0, 1]")
            most = max(self.rate, default=0.0) if isinstance(self.rate, tuple) else self.rate
            if not wrong and self.upto < most:
                wrong["upto"] = (
                    f"{self.upto} was asked for; it must be at least the rate, {most}, since every column's rate is "
                    "drawn between the two. Set upto too, or upto to none, which leaves every column the rate."
                )
        refuse(self, wrong)

    def __str__(self) -> str:
        drawn = "" if self.upto is None else f" to {self.upto:g}"
        return (
            f"columns that fail, and end the transmission, at a rate of {shown(self.rate)}{drawn}"
        )

    @property
    def loses(self) -> bool:
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        return any(rates) or bool(self.upto)

    def check(self, num_clients: int) -> None:
        check_dealt(self, num_clients, "rate")

    def rates(self, client: int, seed: int) -> tuple[float, float]:
        low = dealt(self.rate, client)
        return low, low if self.upto is None else self.upto
