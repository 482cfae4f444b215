"""Who takes part: devices, their budgets, and the cohort of a round."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.terms import Budget, Client

FIVE_SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)


@dataclass(frozen=True)
class Fleet:
    """All devices, by the budget of each, and how many take part in a round."""

    budgets: tuple[Budget, ...]
    sample: int
    dynamic: tuple[Budget, ...] = ()  # if given, budgets are redrawn from these every round

    def __post_init__(self) -> None:
        if not 1 <= self.sample <= len(self.budgets):
            raise ConfigError(f"a cohort of {self.sample} was asked for; the fleet has {len(self.budgets)} clients.")

    @staticmethod
    def of(shares: Sequence[float], num_clients: int, sample: int | None = None, dynamic: bool = False) -> Fleet:
        """Equal numbers of clients of each share, dealt in turn; the cohort is a tenth unless `sample` says."""
        kinds = tuple(Budget(share=share) for share in shares)
        dealt = tuple(kinds[client % len(kinds)] for client in range(num_clients))
        return Fleet(dealt, _cohort(sample, num_clients), kinds if dynamic else ())

    @staticmethod
    def mixed(portions: Mapping[float, float], num_clients: int, sample: int | None = None) -> Fleet:
        """Clients in given proportions: `{1.0: 0.2, 0.5: 0.4, 0.25: 0.4}`."""
        bounds, total = [], 0.0
        for share, portion in portions.items():
            total += portion
            bounds.append((total, Budget(share=share)))
        dealt = tuple(
            next((budget for bound, budget in bounds if (client + 0.5) / num_clients * total <= bound), bounds[-1][1])
            for client in range(num_clients)
        )
        return Fleet(dealt, _cohort(sample, num_clients))

    @property
    def num_clients(self) -> int:
        return len(self.budgets)

    @property
    def kinds(self) -> tuple[Budget, ...]:
        """The different budgets, in order of first appearance."""
        return tuple(dict.fromkeys(self.dynamic or self.budgets))

    def budget(self, client: int, round: int, seed: int) -> Budget:
        if not self.dynamic:
            return self.budgets[client]
        return self.dynamic[noise.key(seed, 21, client, round) % len(self.dynamic)]

    def cohort(self, round: int, seed: int) -> list[int]:
        """The clients of one round; the cost of drawing them grows with the cohort, not with the fleet."""
        return sorted(random.Random(noise.key(seed, 22, round)).sample(range(self.num_clients), self.sample))

    def client(self, id: int, round: int, seed: int, size: int) -> Client:
        return Client(id, self.budget(id, round, seed), size)


def _cohort(sample: int | None, num_clients: int) -> int:
    return max(1, num_clients // 10) if sample is None else sample
