"""Budgets of devices: the papers' fleets by name, and fleets of real devices from a CSV file."""

from __future__ import annotations

import csv
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedquilt import noise
from fedquilt.checks import File, within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.variants import joined
from fedquilt.terms import Budget
from fedquilt.units import how_to_write, quantity

if TYPE_CHECKING:
    from fedquilt.family import Family

_log = logging.getLogger(__name__)

Which = NDArray[np.int32]  # (client,) Index of each client's budget among the different budgets.
BudgetAssignment = tuple[tuple[Budget, ...], Which]

FIVE_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

_FEW = "[1, 10000]"  # Allowed numbers of different budgets. Each has a member of its own.
_DIVISOR = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,9}))?", re.ASCII)


class Budgets(ABC):
    """A rule that assigns budgets to any number of clients."""

    @abstractmethod
    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        """Return the different budgets, and the index of each client's budget among them.

        Args:
            num_clients: Number of clients.
            seed: Random seed, for fleets with random budgets. Other fleets ignore it.
        """

    def for_family(self, family: Family) -> Budgets:
        """Return the budgets for a family. Rules that do not depend on the model return `self`."""
        return self


# --- three ways to assign budgets ---------------------------------------------------------------


def in_turn(kinds: Sequence[Budget | float], num_clients: int) -> BudgetAssignment:
    """Assign budgets cyclically, so that each has equally many clients, spread over the fleet.

    Args:
        kinds: Different budgets, or shares in (0, 1].
        num_clients: Number of clients.
    """
    budgets = _budgets(kinds)
    if not budgets:
        raise ConfigError("a fleet needs at least one share or budget to deal; none was given.")
    return budgets, (np.arange(num_clients) % len(budgets)).astype(np.int32)


def in_groups(kinds: Sequence[Budget | float], num_clients: int) -> BudgetAssignment:
    """Assign budgets to equal groups of neighbouring clients.

    Client k of K has budget floor(G·k/K) of G.

    Args:
        kinds: Different budgets, or shares in (0, 1].
        num_clients: Number of clients.
    """
    clients = np.arange(num_clients, dtype=np.int64)
    return _budgets(kinds), (len(kinds) * clients // max(1, num_clients)).astype(np.int32)


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
                f"a portion of {portion!r} of the clients was asked for {kind}; it lies in [0, "
                "1e15]."
            )
    bounds = np.cumsum(np.asarray(portions, dtype=np.float64))
    if not len(bounds) or not bounds[-1] > 0:
        raise ConfigError(
            "a fleet needs at least one budget with a portion above 0; none was given."
        )
    middles = (np.arange(num_clients) + 0.5) / max(1, num_clients) * bounds[-1]
    return _budgets(kinds), np.searchsorted(bounds, middles).astype(np.int32)


def warn_of_portions(portions: Sequence[float]) -> None:
    """Warn if portions of the clients do not sum to 1."""
    total = sum(portions)
    if not math.isclose(total, 1, rel_tol=1e-6):
        _log.warning(
            "the portions of the fleet's budgets sum to %g, not to 1. Each is divided by this sum.",
            total,
        )


def _budgets(kinds: Sequence[Budget | float]) -> tuple[Budget, ...]:
    try:
        return tuple(
            kind if isinstance(kind, Budget) else Budget(share=float(kind)) for kind in kinds
        )
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a fleet of {kinds!r} was asked for; a list of shares in (0, 1] or of budgets fits, "
            "such as [1, 0.5]."
        ) from error


# --- the papers' fleets -------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniform(Budgets):
    """Equally many clients of each share, assigned cyclically.

    The five default shares are those of HeteroFL and FedRolex.
    """

    shares: tuple[float, ...] = FIVE_SHARES  # Shares that are assigned cyclically to clients.

    def __post_init__(self) -> None:
        within(self, shares="(0, 1]")

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
                "of its "
                "shares, 1, 1/2, 1/4, 1/8 and 1/16."
            )

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
                "joined by '-': "
                "'8-4-2-1' is 1/8, 1/4, 1/2 and 1, and '4/3' is 3/4. Each must be 1 or above."
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
                f"{self.groups} groups in steps of {self.step} were asked for; the last would have "
                "a share of "
                f"{self.step * self.groups:g}, and shares lie in (0, 1]."
            )

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

    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        shares = [step / self.bins for step in range(1, self.bins + 1)]
        below = [self._below(share) for share in shares]
        # With K clients in order of capacity, the first floor(K · P(capacity < share)) have less
        # than a share.
        reach = [int(num_clients * (part - below[0]) / (1 - below[0])) for part in below[1:]]
        return _budgets(shares), np.searchsorted(
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

    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        raise ConfigError(
            "the fleet by_net was asked for without a model, on which its budgets depend. Python "
            "has them as a list: "
            "fq.Fleet.of(fq.fleets.net_budgets(family), num_clients)."
        )

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
                f"the given fleet has {len(self.kinds)} budgets and {len(self.portions)} portions; "
                "it needs a portion "
                "for each of them, or none."
            )

    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        if not self.portions:
            return in_turn(self.kinds, num_clients)
        warn_of_portions(self.portions)
        return in_portions(self.kinds, self.portions, num_clients)


def net_budgets(family: Family, pairs: bool = False) -> tuple[Budget, ...]:
    """Return a budget for each net of a union, the largest first.

    A budget is a bound on multiply-adds that allows the net. A family that is no union has one net.

    Args:
        family: A union, or a family of one net.
        pairs: True: a budget allows the first net together with one of the others.
    """
    variants = family.variants
    if pairs and len(variants) > 1:
        variants = tuple(joined(variants[0], variant) for variant in variants[1:])
    macs = {family.member(family.at(variant).whole).macs for variant in variants}
    return tuple(Budget(macs=count) for count in sorted(macs, reverse=True))


# --- real devices -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromCsv(Budgets):
    """Real devices from a CSV file, one kind per row.

    A row has `count` (1 if there is no such column) and one or more of the bounds `share`, `macs`,
    `params` and `memory`. A bound on memory limits the training step. `name` is for the reader.
    Other columns are refused.

    If the fleet has as many clients as the file has devices, each row gets exactly its count. Else
    the proportions are kept.
    """

    file: File  # CSV file with one kind of device per row.

    def assign(self, num_clients: int, seed: int = 0) -> BudgetAssignment:
        kinds, counts = zip(*self._devices(), strict=True)
        return in_portions(kinds, counts, num_clients)

    @property
    def num_devices(self) -> int:
        """Return the number of devices in the file, the sum of its counts."""
        return sum(count for _, count in self._devices())

    @property
    def counts(self) -> dict[Budget, int]:
        """Return the number of devices with each budget, as the file counts them."""
        counts: dict[Budget, int] = {}
        for budget, count in self._devices():
            if count:
                counts[budget] = counts.get(budget, 0) + count
        return counts

    def _devices(self) -> list[tuple[Budget, int]]:
        rows = read_csv(self.file, "devices", needs=(), knows=("name", "count", *_BOUNDS))
        return [self._device(line, row) for line, row in rows]

    def _device(self, line: int, row: dict[str, str]) -> tuple[Budget, int]:
        location = f"{self.file}, line {line}" + (f" ({row['name']})" if row.get("name") else "")
        count = row.get("count") or "1"
        if not count.isascii() or not count.isdigit():
            raise ConfigError(
                f"{location}: a count of {count!r} was found; it is a whole number of devices, "
                "0 or above."
            )
        bounds = {name: self._bound(row[name], name, location) for name in _BOUNDS if row.get(name)}
        try:
            return Budget(**bounds), int(count)
        except BudgetError as error:
            raise ConfigError(f"{location}: {error}") from error

    @staticmethod
    def _bound(text: str, name: str, where: str) -> float:
        value = quantity(text, name)
        if value is None:
            raise ConfigError(
                f"{where}: {name} = {text!r} was found; write it like {how_to_write(name)}."
            )
        return value


_BOUNDS = tuple(field.name for field in fields(Budget))
_LINKS = ("link", "speed", "band", "latency", "upload", "download", "mbps")


def read_csv(
    file: str, what: str, needs: Sequence[str], knows: Sequence[str]
) -> list[tuple[int, dict[str, str]]]:
    """Read a CSV table with a header, and refuse unknown columns.

    Args:
        file: Path of the file.
        what: Description of its content for messages, such as "devices".
        needs: Columns that must be there.
        knows: Columns that may be there.

    Returns:
        Line number and values of each row, by column.

    Raises:
        ConfigError: The file cannot be read, or its columns or rows are not valid.
    """
    try:
        with Path(file).open(newline="", encoding="utf-8-sig") as opened:
            reader = csv.DictReader(opened, skipinitialspace=True)
            names = [name.strip().lower() for name in reader.fieldnames or ()]
            _check_columns(file, what, names, needs, knows)
            reader.fieldnames = names
            rows = [(reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            f"the {what} were asked for from {file!r}; it could not be read: {error}."
        ) from error
    for line, row in rows:
        if None in row or None in row.values():
            raise ConfigError(
                f"{file}, line {line}: it does not have {len(names)} values as the header has."
            )
    if not rows:
        raise ConfigError(f"{file!r} was given for {what}; it has a header and no rows.")
    return [(line, {name: value.strip() for name, value in row.items()}) for line, row in rows]


def _check_columns(
    file: str, what: str, found: Sequence[str], needs: Sequence[str], knows: Sequence[str]
) -> None:
    problems = [f"column {name!r} is missing" for name in needs if name not in found]
    problems += [
        f"column {name!r} is there twice" for name in dict.fromkeys(found) if found.count(name) > 1
    ]
    for name in found:
        if name not in knows:
            of_links = any(word in name for word in _LINKS)
            hint = (
                "; how fast links are is said by the settings' table link.clock, leave it out"
                if of_links
                else ""
            )
            problems.append(f"column {name!r} is not known{hint}")
    if problems:
        listed = ", ".join(knows)
        raise ConfigError(
            f"{file!r} was given for {what}: {'; '.join(problems)}. Columns of such a file: "
            f"{listed}."
        )


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
