"""The papers' fleets by name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import override

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.family.variants import joined
from fedquilt.fleets.budgets import (
    BudgetAssignment,
    Budgets,
    as_budgets,
    in_groups,
    in_portions,
    in_turn,
    warn_of_portions,
)
from fedquilt.fleets.from_csv import FromCsv
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.family import Family


FIVE_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
_FEW = "[1, 10000]"  # Allowed numbers of different budgets. Each has a member of its own.
_DIVISOR = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,9}))?", re.ASCII)


@dataclass(frozen=True)
class Uniform(Budgets):
    """Equally many clients of each share, assigned cyclically.

    The five default shares are those of HeteroFL and FedRolex.
    """

    shares: tuple[float, ...] = FIVE_SHARES  # Shares that are assigned cyclically to clients.

    def __post_init__(self) -> None:
        within(self, shares="(0, 1]")

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        return in_turn(self.shares, num_clients)


@dataclass(frozen=True)
class Income(Budgets):
    """Shares distributed as household incomes in the USA, largest first (FedRolex, Figure 7)."""

    # Portions of the clients that have the shares 1, 1/2, 1/4, 1/8 and 1/16.
    portions: tuple[float, ...] = (0.06, 0.10, 0.11, 0.18, 0.55)

    def __post_init__(self) -> None:
        within(self, portions="[0, inf)")
        if len(self.portions) != len(FIVE_SHARES):
            raise ConfigError(
                f"the income fleet was given {len(self.portions)} portions; it needs one for each "
                "of its shares, 1, 1/2, 1/4, 1/8 and 1/16."
            )

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        warn_of_portions(self.portions)
        return in_portions(FIVE_SHARES, self.portions, num_clients)


@dataclass(frozen=True)
class TwoLevel(Budgets):
    """A portion `rho` of the clients is large, the others are small (FedRolex, Figure 3)."""

    rho: float = 0.5  # Portion of large clients. 1: all are large. 0: all are small.
    large: float = 1.0  # Share of large clients.
    small: float = 1 / 16  # Share of small clients.

    def __post_init__(self) -> None:
        within(self, rho="[0, 1]", large="(0, 1]", small="(0, 1]")

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        return in_portions((self.large, self.small), (self.rho, 1 - self.rho), num_clients)


@dataclass(frozen=True)
class Quarters(Budgets):
    """Four equal groups of clients with shares 1/8, 1/4, 1/2 and 1 (Split-Mix, section 3).

    Shares ascend over the clients. If clients are ordered by domain, whole domains then have small
    shares, as in Figure 6 and the released code. In descending order client k of K has the share
    (1/2)^floor(4k/K). The paper's formula has a ceiling there, which would leave a group without a
    base net, so it is read as a floor.
    """

    ascending: bool = True  # True: the last clients have share 1. False: the first ones have it.

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        shares = (1 / 8, 1 / 4, 1 / 2, 1.0)
        return in_groups(shares if self.ascending else shares[::-1], num_clients)


@dataclass(frozen=True)
class Groups(Budgets):
    """Equal groups of clients, written as the divisors of their shares (Split-Mix, Figure 11a).

    "8-4-2-1" are the shares 1/8, 1/4, 1/2 and 1. A divisor may be a fraction: "4-2-4/3-1" has a
    group with share 3/4. The paper compares 8-4-2-1 with 8-4-4-1, 8-2-2-1, 8-2-1-1 and 8-1-1-1.
    """

    divisors: str = "8-4-2-1"  # Divisors of the groups' shares, joined by "-".

    def __post_init__(self) -> None:
        self._shares()  # Raises an error if a divisor is not valid.

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        return in_groups(self._shares(), num_clients)

    def _shares(self) -> tuple[float, ...]:
        matches = [_DIVISOR.fullmatch(part.strip()) for part in self.divisors.split("-")]
        shares = tuple(
            int(part[2] or 1) / int(part[1]) for part in matches if part and int(part[1])
        )
        if len(shares) < len(matches) or not all(0 < share <= 1 for share in shares):
            raise ConfigError(
                f"groups {self.divisors!r} were asked for; write what each group's share divides, "
                "joined by '-': '8-4-2-1' is 1/8, 1/4, 1/2 and 1, and '4/3' is 3/4. Each must be "
                "1 or above."
            )
        return shares


@dataclass(frozen=True)
class Step(Budgets):
    """Equal groups of clients whose shares ascend in equal steps (Split-Mix, Figure 11b).

    Four groups have shares from 1/4 to 1, or from 1/8 to 1/2 with a step of 1/8.
    """

    step: float = 0.25  # Difference between the shares of neighbouring groups, and smallest share.
    groups: int = 4  # Number of groups.

    def __post_init__(self) -> None:
        within(self, step="(0, 1]", groups=_FEW)
        if self.step * self.groups > 1:
            raise ConfigError(
                f"{self.groups} groups in steps of {self.step} were asked for; the last would "
                f"have a share of {self.step * self.groups:g}, and shares lie in (0, 1]."
            )

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        return in_groups([self.step * group for group in range(1, self.groups + 1)], num_clients)


@dataclass(frozen=True)
class LogNormal(Budgets):
    """Log-normal capacities, rounded down to one of `bins` shares (Split-Mix, appendix A.5).

    Shares ascend over the clients. The default is the distribution `ln0.5_0.4` of the released
    code, whose mean is 0.45 as in the paper. Capacities below the smallest share are left out, and
    those above 1 count as 1.
    """

    sigma: float = 0.5  # Standard deviation of the capacity's logarithm.
    scale: float = 0.4  # Median capacity, as a share of the model.
    bins: int = 8  # Number of shares: 1/bins, 2/bins, …, 1.

    def __post_init__(self) -> None:
        within(self, sigma="(0, inf)", scale="(0, inf)", bins=_FEW)
        if not self._below(1 / self.bins) < 1:
            raise ConfigError(
                f"sigma = {self.sigma} and scale = {self.scale} leave no capacity above "
                f"1/{self.bins}."
            )

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        shares = [step / self.bins for step in range(1, self.bins + 1)]
        below = [self._below(share) for share in shares]
        # With K clients in order of capacity, the first floor(K · P(capacity < share)) have less
        # than a share.
        reach = [int(num_clients * (part - below[0]) / (1 - below[0])) for part in below[1:]]
        return as_budgets(shares), np.searchsorted(
            reach, np.arange(num_clients), side="right"
        ).astype(np.int32)

    def _below(self, share: float) -> float:
        return 0.5 * (1 + math.erf(math.log(share / self.scale) / (self.sigma * math.sqrt(2))))


@dataclass(frozen=True)
class Clusters(Budgets):
    """Every client draws its share from a set at random (FedResCuE, section 5.1).

    The paper also uses the set {0.2, 0.35, 0.5, 0.75, 1}.
    """

    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)  # Shares from which each client draws one.

    def __post_init__(self) -> None:
        within(self, shares="(0, 1]")

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        kinds, _ = in_turn(self.shares, 0)
        positions = noise.bits(
            torch.tensor(noise.key(seed, noise.Stream.ASSIGNED_SHARES)), num_clients
        ) % len(kinds)
        return kinds, positions.numpy().astype(np.int32)


@dataclass(frozen=True)
class FlopLimited(Budgets):
    """Limits on the multiply-adds of a sample, in even levels around a mean (RaFL, section 4.4).

    Table 3 of the paper has the mean limits: 48.01 and 79.70 million for its ResNet, 13.57 and
    15.49 million for its MobileNet. One model for all would use 75 % of the mean limit. The weakest
    client thus has 75 % of the mean, which is `spread` 0.25. The paper does not state the limits in
    between. Here they are evenly spaced, and assigned cyclically.
    """

    mean: float = 79.7e6  # Mean limit, in multiply-adds of one sample's forward pass.
    spread: float = 0.25  # Largest deviation from the mean, as a share of it. 0: all are equal.
    levels: int = 5  # Number of different limits.

    def __post_init__(self) -> None:
        within(self, mean="(0, 1e18]", spread="[0, 1)", levels=_FEW)

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        low, high = self.mean * (1 - self.spread), self.mean * (1 + self.spread)
        limits = np.linspace(low, high, self.levels) if self.levels > 1 else [self.mean]
        return in_turn([Budget(macs=float(limit)) for limit in limits], num_clients)


@dataclass(frozen=True)
class ByNet(Budgets):
    """Equally many clients for each net of a union, assigned cyclically.

    A client's budget is the multiply-adds of its net. This is the default for runs with several
    models, because nets of different architectures have no common share. With `pairs` a client
    trains the first net and one of the others, and its budget is the multiply-adds of both.
    """

    pairs: bool = False  # True: a budget allows the first net together with one of the others.

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        raise ConfigError(
            "the fleet by_net was asked for without a model, on which its budgets depend. Python "
            "has them as a list: fq.Fleet.of(fq.fleets.net_budgets(family), num_clients)."
        )

    @override
    def for_family(self, family: Family) -> Budgets:
        return Given(net_budgets(family, self.pairs))


@dataclass(frozen=True)
class Given(Budgets):
    """Budgets that the user lists, assigned cyclically or in portions.

    With portions, neighbouring clients have the same budget.
    """

    kinds: tuple[Budget, ...]  # Budgets, as tables with bounds: share, macs, params, memory.
    # Portion of the clients that has each budget. Empty: budgets are assigned cyclically.
    portions: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.portions and len(self.portions) != len(self.kinds):
            raise ConfigError(
                f"the given fleet has {len(self.kinds)} budgets and {len(self.portions)} "
                "portions; it needs a portion for each of them, or none."
            )

    @override
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        if not self.portions:
            return in_turn(self.kinds, num_clients)
        warn_of_portions(self.portions)
        return in_portions(self.kinds, self.portions, num_clients)


def net_budgets(family: Family, pairs: bool = False) -> tuple[Budget, ...]:
    """Return a budget for each net of a union, the largest first.

    A budget is a bound on multiply-adds that allows the net. Nets with equally many multiply-adds
    share a budget. A family that is no union has one net.

    Args:
        family: A union, or a family of one net.
        pairs: True: a budget allows the first net together with one of the others.
    """
    variants = family.variants
    if pairs and len(variants) > 1:
        variants = tuple(joined(variants[0], variant) for variant in variants[1:])
    macs = {family.member(family.at(variant).whole).macs for variant in variants}
    return tuple(Budget(macs=count) for count in sorted(macs, reverse=True))


FLEETS: dict[str, type[Budgets]] = {
    "uniform": Uniform,
    "income": Income,
    "two_level": TwoLevel,
    "quarters": Quarters,
    "groups": Groups,
    "step": Step,
    "lognormal": LogNormal,
    "clusters": Clusters,
    "flop_limited": FlopLimited,
    "by_net": ByNet,
    "given": Given,
    "csv": FromCsv,
}
