"""Rules of a deployment's rounds: when a round begins, closes and counts, and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt.errors import ConfigError

MAX_DEADLINE = 7 * 24 * 3600.0  # Seconds


@dataclass(frozen=True)
class RoundRules:
    """Rules that hold for every round. They may change when a run is resumed."""

    deadline: float = 600.0  # Seconds that devices have in a round
    # Devices that have to be online before a round begins, and valid replies with which it counts
    least: int = 1
    enough: int = 0  # Valid replies after which a round closes. 0: it waits for all
    # Largest root mean square of the change of one weight. Replies above it are refused
    max_rms: float = math.inf
    # Replies are refused whose change exceeds this multiple of the round's median, by the root mean
    # square over all weights
    max_rms_ratio: float = math.inf

    def check(self, num_clients: int, prefix: str = "--") -> RoundRules:
        """Return the rules themselves if a run can follow them.

        Args:
            num_clients: Number of devices of the run.
            prefix: Text before the names of settings in messages.

        Raises:
            ConfigError: A number is out of its range, or `enough` is below `least`.
        """
        ranges = {
            "deadline": (1 <= self.deadline <= MAX_DEADLINE, "1 s to a week would work"),
            "least": (
                1 <= self.least <= num_clients,
                f"there are {num_clients} clients, so that 1 to {num_clients} would work",
            ),
            "enough": (
                self.enough == 0 or self.least <= self.enough <= num_clients,
                f"a round counts with at least {self.least} replies and there are {num_clients} "
                f"clients, so that {self.least} to {num_clients} would work, or 0 to wait for all",
            ),
            "max_rms": (self.max_rms > 0, "numbers above 0 would work"),
            "max_rms_ratio": (self.max_rms_ratio > 1, "numbers above 1 would work"),
        }
        for name, (is_valid, advice) in ranges.items():
            if not is_valid:
                shown = name.replace("_", "-") if prefix == "--" else name
                raise ConfigError(
                    f"{prefix}{shown} {getattr(self, name):g} was asked for; {advice}."
                )
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the rules as plain values. None stands for an infinite bound."""
        return {name: None if rule == math.inf else rule for name, rule in vars(self).items()}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> RoundRules:
        """Read the rules that `to_dict` wrote. Rules that are missing have their defaults.

        Args:
            plain: Plain values by name. Other names are ignored.

        Raises:
            ValueError: A value is no number.
            TypeError: A value is neither a number nor a text.
        """
        rules: dict[str, Any] = {}
        for name, default in vars(RoundRules()).items():
            if name in plain:
                value = plain[name]
                rules[name] = math.inf if value is None else type(default)(value)
        return RoundRules(**rules)
