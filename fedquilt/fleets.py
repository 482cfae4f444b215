"""What devices can hold: the papers' fleets by name, and fleets of real devices from a CSV file."""

from __future__ import annotations

import csv
import logging
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
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

Which = NDArray[np.int32]  # of each client, the place of its budget among the kinds
Deal = tuple[tuple[Budget, ...], Which]

FIVE_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)

_FEW = "[1, 10000]"  # kinds of budgets: every one has a member of its own
_DIVISOR = re.compile(r"([0-9]{1,9})(?:/([0-9]{1,9}))?", re.ASCII)


class Budgets(ABC):
    """Deals budgets to any number of clients."""

    @abstractmethod
    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        """The different budgets, and which of them each client has."""

    def for_family(self, family: Family) -> Budgets:
        """Return the budgets for a family. Only those that depend on the model differ from this object."""
        return self


# --- three ways to deal -----------------------------------------------------------------------------------------


def in_turn(kinds: Sequence[Budget | float], num_clients: int) -> Deal:
    """One of each after another, again and again: equal numbers of clients, spread over all of them."""
    budgets = _budgets(kinds)
    if not budgets:
        raise ConfigError("a fleet needs at least one share or budget to deal; none was given.")
    return budgets, (np.arange(num_clients) % len(budgets)).astype(np.int32)


def in_groups(kinds: Sequence[Budget | float], num_clients: int) -> Deal:
    """Neighbours share a budget: client k of K has number floor(G·k/K) of G."""
    clients = np.arange(num_clients, dtype=np.int64)
    return _budgets(kinds), (len(kinds) * clients // max(1, num_clients)).astype(np.int32)


def in_portions(
    kinds: Sequence[Budget | float], portions: Sequence[float], num_clients: int
) -> Deal:
    """Neighbours share a budget, in groups of the given proportions, which need not sum to one."""
    for kind, portion in zip(kinds, portions, strict=True):
        if not 0 <= portion <= 1e15:
            raise ConfigError(
                f"a portion of {portion} of the clients was asked for {kind}; it lies in [0, 1e15]."
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
            f"a fleet of {kinds!r} was asked for; a list of shares in (0, 1] or of budgets fits, such as [1, 0.5]."
        ) from error


# --- the papers' fleets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Uniform(Budgets):
    """As many clients of each share, dealt in turn: HeteroFL's and FedRolex's default of five shares."""

    shares: tuple[float, ...] = FIVE_SHARES

    def __post_init__(self) -> None:
        within(self, shares="(0, 1]")

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        return in_turn(self.shares, num_clients)


@dataclass(frozen=True)
class Income(Budgets):
    """Shares as household incomes are spread in the USA, the many small ones last (FedRolex, Figure 7)."""

    portions: tuple[float, ...] = (0.06, 0.10, 0.11, 0.18, 0.55)  # of 1, 1/2, 1/4, 1/8 and 1/16

    def __post_init__(self) -> None:
        within(self, portions="[0, inf)")
        if len(self.portions) != len(FIVE_SHARES):
            raise ConfigError(
                f"the income fleet was given {len(self.portions)} portions; it needs one for each of its "
                "shares, 1, 1/2, 1/4, 1/8 and 1/16."
            )

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        warn_of_portions(self.portions)
        return in_portions(FIVE_SHARES, self.portions, num_clients)


@dataclass(frozen=True)
class TwoLevel(Budgets):
    """A part `rho` of the clients is large, the others are small (FedRolex, Figure 3)."""

    rho: float = 0.5  # 1: all are large, 0: all are small
    large: float = 1.0
    small: float = 1 / 16

    def __post_init__(self) -> None:
        within(self, rho="[0, 1]", large="(0, 1]", small="(0, 1]")

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        return in_portions((self.large, self.small), (self.rho, 1 - self.rho), num_clients)


@dataclass(frozen=True)
class Quarters(Budgets):
    """Quarters of 1/8, 1/4, 1/2 and 1 (Split-Mix, section 3).

    Shares ascend over the clients, so that whole domains are poor where clients are ordered by domain: Figure 6, and
    the released code. Descending, client k of K has (1/2)^floor(4k/K), which is how the paper's formula must be read:
    its ceiling would leave a group without a base net.
    """

    ascending: bool = True

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        shares = (1 / 8, 1 / 4, 1 / 2, 1.0)
        return in_groups(shares if self.ascending else shares[::-1], num_clients)


@dataclass(frozen=True)
class Groups(Budgets):
    """Equal groups named by what their share divides: "8-4-2-1" is 1/8, 1/4, 1/2, 1 (Split-Mix, Figure 11a).

    A part may be a fraction: "4-2-4/3-1" has a group of 3/4. The paper varies 8-4-2-1 to 8-4-4-1, 8-2-2-1, 8-2-1-1
    and 8-1-1-1.
    """

    divisors: str = "8-4-2-1"

    def __post_init__(self) -> None:
        self._shares()  # refuses what has none

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        return in_groups(self._shares(), num_clients)

    def _shares(self) -> tuple[float, ...]:
        found = [_DIVISOR.fullmatch(part.strip()) for part in self.divisors.split("-")]
        shares = tuple(int(part[2] or 1) / int(part[1]) for part in found if part and int(part[1]))
        if len(shares) < len(found) or not all(0 < share <= 1 for share in shares):
            raise ConfigError(
                f"groups {self.divisors!r} were asked for; write what each group's share divides, joined by '-': "
                "'8-4-2-1' is 1/8, 1/4, 1/2 and 1, and '4/3' is 3/4. Each must be 1 or above."
            )
        return shares


@dataclass(frozen=True)
class Step(Budgets):
    """Equal groups whose shares ascend in steps: 1/4 to 1, or with step 1/8 to 1/2 (Split-Mix, Figure 11b)."""

    step: float = 0.25
    groups: int = 4

    def __post_init__(self) -> None:
        within(self, step="(0, 1]", groups=_FEW)
        if self.step * self.groups > 1:
            raise ConfigError(
                f"{self.groups} groups in steps of {self.step} were asked for; the last would have a share of "
                f"{self.step * self.groups:g}, and shares lie in (0, 1]."
            )

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        return in_groups([self.step * group for group in range(1, self.groups + 1)], num_clients)


@dataclass(frozen=True)
class LogNormal(Budgets):
    """Log-normal capacities, each rounded down to one of `bins` shares, ascending (Split-Mix, appendix A.5).

    The paper says that they concentrate around 0.45: the mean of what its released code draws from (`ln0.5_0.4`), which
    is the default here. Capacities below the smallest share are left out, and those above 1 count as 1.
    """

    sigma: float = 0.5  # of the capacity's logarithm
    scale: float = 0.4  # the median capacity
    bins: int = 8

    def __post_init__(self) -> None:
        within(self, sigma="(0, inf)", scale="(0, inf)", bins=_FEW)
        if not self._below(1 / self.bins) < 1:
            raise ConfigError(
                f"sigma = {self.sigma} and scale = {self.scale} leave no capacity above 1/{self.bins}."
            )

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        shares = [place / self.bins for place in range(1, self.bins + 1)]
        below = [self._below(share) for share in shares]
        # Of K clients in order of capacity, the first floor(K · P(capacity < share)) are below a share.
        reach = [int(num_clients * (part - below[0]) / (1 - below[0])) for part in below[1:]]
        return _budgets(shares), np.searchsorted(
            reach, np.arange(num_clients), side="right"
        ).astype(np.int32)

    def _below(self, share: float) -> float:
        return 0.5 * (1 + math.erf(math.log(share / self.scale) / (self.sigma * math.sqrt(2))))


@dataclass(frozen=True)
class Clusters(Budgets):
    """Every client draws its share from a set (FedResCuE, section 5.1): four, or {0.2, 0.35, 0.5, 0.75, 1}."""

    shares: tuple[float, ...] = (0.25, 0.5, 0.75, 1.0)

    def __post_init__(self) -> None:
        within(self, shares="(0, 1]")

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        kinds, _ = in_turn(self.shares, 0)
        drawn = noise.bits(torch.tensor(noise.key(seed, 24)), num_clients) % len(kinds)
        return kinds, drawn.numpy().astype(np.int32)


@dataclass(frozen=True)
class FlopLimited(Budgets):
    """Bounds on the multiply-adds of a sample, in even levels around a mean (RaFL, section 4.4).

    The paper gives mean limits (Table 3: 48.01 and 79.70 million for its ResNet, 13.57 and 15.49 for its MobileNet) and
    that one model for all would use 75 % of them: the weakest client has 75 % of the mean, which is `spread` 0.25.
    How limits lie between is not said; here they are even, dealt in turn.
    """

    mean: float = 79.7e6
    spread: float = 0.25
    levels: int = 5

    def __post_init__(self) -> None:
        within(self, mean="(0, 1e18]", spread="[0, 1)", levels=_FEW)

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        low, high = self.mean * (1 - self.spread), self.mean * (1 + self.spread)
        limits = np.linspace(low, high, self.levels) if self.levels > 1 else [self.mean]
        return in_turn([Budget(macs=float(limit)) for limit in limits], num_clients)


@dataclass(frozen=True)
class ByNet(Budgets):
    """As many clients for each net of a union, dealt in turn. A client's budget is the multiply-adds of its net.

    It is the default of runs with several models, because nets of different architectures have no common share. With
    `pairs` a client trains the first net and one of the others, and its budget is the multiply-adds of both.
    """

    pairs: bool = False  # Budgets are those of the first net together with one of the others

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        raise ConfigError(
            "the fleet by_net was asked for without a model, on which its budgets depend. Python has them as a list: "
            "fq.Fleet.of(fq.fleets.net_budgets(family), num_clients)."
        )

    def for_family(self, family: Family) -> Budgets:
        return _InTurn(net_budgets(family, self.pairs))


@dataclass(frozen=True)
class _InTurn(Budgets):
    """Given budgets, dealt in turn."""

    kinds: tuple[Budget, ...]

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        return in_turn(self.kinds, num_clients)


def net_budgets(family: Family, pairs: bool = False) -> tuple[Budget, ...]:
    """Return a budget for each net of a union, its multiply-adds, the largest first. Other families have one net.

    Args:
        family: A union, or a family of one net.
        pairs: True: budgets are those of the first net together with one of the others.
    """
    variants = family.variants
    if pairs and len(variants) > 1:
        variants = tuple(joined(variants[0], variant) for variant in variants[1:])
    macs = {family.member(family.at(variant).whole).macs for variant in variants}
    return tuple(Budget(macs=count) for count in sorted(macs, reverse=True))


# --- real devices -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FromCsv(Budgets):
    """Real devices from a CSV file, one kind per row. A bound on memory is on the training step.

    A row has `count` (1 if there is no such column) and one or more of the bounds `share`, `macs`, `params`, `memory`;
    `name` is for the reader. Other columns are refused.

    For as many clients as the file counts devices, each row has exactly its count; for others, the same proportions.
    """

    file: File

    def deal(self, num_clients: int, seed: int = 0) -> Deal:
        kinds, counts = zip(*self._devices(), strict=True)
        return in_portions(kinds, counts, num_clients)

    @property
    def num_devices(self) -> int:
        """How many devices the file counts."""
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
        where = f"{self.file}, line {line}" + (f" ({row['name']})" if row.get("name") else "")
        count = row.get("count") or "1"
        if not count.isascii() or not count.isdigit():
            raise ConfigError(
                f"{where}: a count of {count!r} was found; it is a whole number of devices, 0 or above."
            )
        bounds = {name: self._bound(row[name], name, where) for name in _BOUNDS if row.get(name)}
        try:
            return Budget(**bounds), int(count)
        except BudgetError as error:
            raise ConfigError(f"{where}: {error}") from error

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
    """The rows of a table with a header, each with its line number; columns nobody knows are refused."""
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
            f"{file!r} was given for {what}: {'; '.join(problems)}. Columns of such a file: {listed}."
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
    "csv": FromCsv,
}
