"""Links that lose columns: the first column that fails ends a transmission.

A payload is sent column by column, and all columns from the first failure on are lost. What arrives
is a payload with a smaller index. This is the model of FedResCuE (Zhu et al., ICML 2022), section
3.3 and appendix A.3.4.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import outside, refuse, within
from fedquilt.round.link.per_client import (
    PerClient,
    as_text,
    check_lengths,
    convert_lists,
    empty_lists,
    value_of,
)
from fedquilt.round.link.transmission import LOSS, Transmission
from fedquilt.terms import Submodel

if TYPE_CHECKING:
    from fedquilt.family.member import Member


@dataclass(frozen=True)
class Loss(ABC):
    """Base class of losses: columns fail at some rate, and a failure ends the transmission.

    A column is a fraction of the *whole* model's width, whatever share the client holds.
    """

    # Width of a column as a fraction of the whole model's width
    granularity: float = field(default=0.125, kw_only=True)

    def __post_init__(self) -> None:
        within(self, granularity="[0.001, 1]")

    @abstractmethod
    def rates(self, client: int, seed: int) -> tuple[float, float]:
        """Return the bounds between which the error rate of a client's columns is drawn.

        Args:
            client: Number of the client.
            seed: Random seed of the run, for bounds that are drawn themselves.
        """

    @property
    def loses(self) -> bool:
        """Return True if values may get lost, and False if everything arrives for sure."""
        return True

    def check(self, num_clients: int) -> None:  # noqa: B027 (some have nothing to say)
        """Raise a ConfigError if the length of a list does not divide `num_clients`.

        By default nothing is checked.
        """

    def reach(self, submodel: Submodel, transmission: Transmission) -> Submodel | None:
        """Return the part of `submodel` that arrives, or None if the first column fails.

        Random numbers are those of the `transmission`.

        It consists of the first columns in the sub-model's own order. Weights that no width cuts,
        such as the output's bias, are sent with the first column.
        """
        family = transmission.world.family
        count = self.count(family.member(submodel))
        arrived = self.arrived(transmission, count)
        if arrived == count:
            return submodel
        return family.part(submodel, arrived * self.granularity) if arrived else None

    def count(self, member: Member) -> int:
        """Return the number of columns of a member.

        A column is `granularity` of the whole model's width. The last column may be narrower.
        """
        count = 1
        while member.nested(min(1.0, count * self.granularity)).arch != member.arch:
            count += 1
        return count

    def arrived(self, transmission: Transmission, count: int) -> int:
        """Return how many of the `count` columns of a transmission arrive before the first failure.

        For each column an error rate er, between the bounds of `rates`, and a number ε are drawn.
        Sending stops at the first ε < er. The result is the same whenever it is called for this
        transmission.
        """
        low, high = self.rates(transmission.job.client.id, transmission.world.seed)
        fraction, sample = noise.uniform(
            torch.tensor(transmission.key(LOSS)), (2, count), torch.float64
        )
        failed = (sample < low + (high - low) * fraction).nonzero()
        return int(failed[0]) if len(failed) else count


@dataclass(frozen=True)
class ColumnLoss(Loss):
    """Columns that fail at an error rate: constant, per client, or drawn for every column.

    The first column that fails ends the transmission. At rates of 0.1 to 0.2, 48 % of eight columns
    are lost.
    """

    # Error rate of a column, or a list of rates that is assigned to clients in turn. 0: no losses
    rate: PerClient = 0.1
    # Upper bound of a column's rate, which is drawn between `rate` and this. None: it is `rate`
    upto: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        convert_lists(self, "rate")
        problems = outside(self, rate="[0, 1]") | empty_lists(self, "rate")
        if self.upto is not None:
            problems |= outside(self, upto="[0, 1]")
            rate = max(self.rate, default=0.0) if isinstance(self.rate, tuple) else self.rate
            if not problems and self.upto < rate:
                problems["upto"] = (
                    f"{self.upto} was asked for; it must be at least the rate, {rate}, since every "
                    "column's rate is drawn between the two. Set upto too, or upto to none, which "
                    "leaves every column the rate."
                )
        refuse(self, problems)

    def __str__(self) -> str:
        upper = "" if self.upto is None else f" to {self.upto:g}"
        return (
            f"columns that fail, and end the transmission, at a rate of {as_text(self.rate)}{upper}"
        )

    @property
    @override
    def loses(self) -> bool:
        rates = self.rate if isinstance(self.rate, tuple) else (self.rate,)
        return any(rates) or bool(self.upto)

    @override
    def check(self, num_clients: int) -> None:
        check_lengths(self, num_clients, "rate")

    @override
    def rates(self, client: int, seed: int) -> tuple[float, float]:
        low = value_of(self.rate, client)
        return low, low if self.upto is None else self.upto
