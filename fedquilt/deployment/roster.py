"""The roster: which device is which client, by its public key, with its budget and size.

It is state of a deployment. A device that returns keeps its number, so that its state on disk and
the server's records agree. A device that joins later gets the next number. Every entry has the
rounds from which on its budgets and sizes hold, so that the fleet of every round is known.
"""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fedquilt.checks import whole
from fedquilt.errors import BudgetError, ConfigError, FormatError, RecordError
from fedquilt.fleets.fleet import Change, Devices
from fedquilt.fleets.presets import Given
from fedquilt.round.engine import RosterChange
from fedquilt.storage.files import refuse_special, why, write_text
from fedquilt.storage.tensor_files import bounded_json
from fedquilt.terms import Budget

ROSTER = "roster.json"  # Name of the file in the folder of a run
VERSION = 2
MAX_BYTES = 16 << 20  # Largest file. An entry has about 400 bytes.
MAX_NAME = 100  # Characters of a device's name
MAX_SIZE = 2**40  # Most training samples of a device
MAX_ROUND = 2**40
_BOUNDS = {"share", "macs", "params", "memory"}


@dataclass(frozen=True)
class DeviceFacts:
    """Budget and size of a device from a round on."""

    round: int  # First round in which they hold, from 0
    budget: Budget
    size: int  # Training samples

    def to_dict(self) -> dict[str, Any]:
        """Return the facts as plain values."""
        return {"round": self.round, "budget": self.budget.bounds, "size": self.size}

    @staticmethod
    def from_dict(plain: Any) -> DeviceFacts:
        """Read the facts that `to_dict` wrote.

        Raises:
            FormatError: A value is missing, unknown or of another kind.
        """
        if not isinstance(plain, dict) or plain.keys() != {"round", "budget", "size"}:
            raise FormatError("facts do not have exactly the keys round, budget, size")
        round, budget, size = plain["round"], plain["budget"], plain["size"]
        if not whole(round) or round > MAX_ROUND or not whole(size, 1) or size > MAX_SIZE:
            raise FormatError("a round or a size is out of range")
        if not isinstance(budget, dict):
            raise FormatError("a budget is no dict")
        return DeviceFacts(round, read_budget(budget), size)


@dataclass(frozen=True)
class RosterEntry:
    """One device."""

    client: int  # Number of the client, from 0
    key: str  # Public key in the OpenSSH format, without a comment
    name: str  # Name that the device's owner chose
    since: str  # When the device joined first, in UTC
    history: tuple[DeviceFacts, ...]  # Its budgets and sizes in the order of rounds, at least one
    is_struck_off: bool = False  # True: the device is not asked any more

    @property
    def budget(self) -> Budget:
        """Return the budget that the device has now."""
        return self.history[-1].budget

    @property
    def size(self) -> int:
        """Return the number of training samples that the device has now."""
        return self.history[-1].size

    @property
    def first_round(self) -> int:
        """Return the first round, from 0, in which the device could be asked."""
        return self.history[0].round

    def to_dict(self) -> dict[str, Any]:
        """Return the entry as plain values."""
        return {
            "client": self.client,
            "key": self.key,
            "name": self.name,
            "since": self.since,
            "history": [facts.to_dict() for facts in self.history],
            "struck_off": self.is_struck_off,
        }

    @staticmethod
    def from_dict(plain: Any) -> RosterEntry:
        """Read an entry.

        Raises:
            FormatError: A value is missing, unknown or of another kind.
        """
        kinds = {"client": int, "key": str, "name": str, "since": str, "history": list}
        kinds["struck_off"] = bool
        if not isinstance(plain, dict) or plain.keys() != kinds.keys():
            raise FormatError(f"an entry does not have exactly the keys {', '.join(kinds)}")
        for key, kind in kinds.items():
            if type(plain[key]) is not kind:
                raise FormatError(f"{key} of an entry is no {kind.__name__}")
        if plain["client"] < 0:
            raise FormatError("the client of an entry is out of range")
        if not plain["key"].startswith("ecdsa-sha2-nistp384 ") or len(plain["key"]) > 400:
            raise FormatError(f"the key of client {plain['client']} is no public key on P-384")
        check_name(plain["name"])
        history = tuple(map(DeviceFacts.from_dict, plain["history"]))
        rounds = [facts.round for facts in history]
        if not rounds or rounds != sorted(set(rounds)):
            raise FormatError(f"the history of client {plain['client']} does not ascend")
        return RosterEntry(
            plain["client"],
            plain["key"],
            plain["name"],
            plain["since"],
            history,
            plain["struck_off"],
        )


@dataclass
class Roster:
    """All devices of a deployment, by client number."""

    entries: dict[int, RosterEntry] = field(default_factory=dict)

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self.entries[client] for client in sorted(self.entries))

    def __len__(self) -> int:
        return len(self.entries)

    def by_key(self, key: str) -> RosterEntry | None:
        """Return the entry of a public key. None: it is unknown."""
        return next((entry for entry in self if entry.key == key), None)

    def enrol(self, key: str, name: str, budget: Budget, size: int, round: int = 0) -> RosterEntry:
        """Add a device, or update the name, budget and size of one that returns.

        Args:
            key: Public key in the OpenSSH format.
            name: Name of the device.
            budget: What the device can train.
            size: Training samples of the device.
            round: First round in which this holds, from 0. It is a later one if a device has joined
                in a later one, because clients are numbered in the order in which they join.

        Raises:
            ConfigError: The device was struck off.
        """
        entry = self.by_key(key)
        firsts = [other.first_round for other in self if entry in (None, other)]
        round = max([round, *firsts])
        facts = DeviceFacts(round, budget, size)
        if entry is None:
            since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
            client = max(self.entries, default=-1) + 1
            entry = RosterEntry(client, key, name, since, (facts,))
        elif entry.is_struck_off:
            raise ConfigError(
                f"{name} asked to join as client {entry.client}; that device was struck off."
            )
        elif (entry.budget, entry.size) == (budget, size):
            entry = replace(entry, name=name)
        else:
            # A round that did not count is repeated with the newest facts.
            earlier = tuple(facts for facts in entry.history if facts.round < round)
            entry = replace(entry, name=name, history=(*earlier, facts))
        entry = RosterEntry.from_dict(json.loads(json.dumps(entry.to_dict())))  # The strict checks
        self.entries[entry.client] = entry
        return entry

    def devices(self, settings: Devices) -> Devices:
        """Return settings of the fleet with the budgets that devices have had in each round.

        Args:
            settings: Settings of the run, whose cohort and availability are kept. Its budgets and
                redraws of budgets are not, because each device has one of its own.
        """
        first = [entry for entry in self if entry.first_round == 0]
        changes = tuple(
            Change(facts.round, entry.client, facts.budget)
            for entry in self
            for facts in entry.history
            if facts.round
        )
        budgets = Given(tuple(entry.history[0].budget for entry in first))
        return replace(
            settings, clients=len(first), budgets=budgets, dynamic=False, changes=changes
        )

    def arrivals(self) -> dict[int, list[RosterChange]]:
        """Return the devices that joined or changed after the beginning, by round from 0."""
        arrivals: dict[int, list[RosterChange]] = {}
        for entry in self:
            for facts in entry.history:
                if facts.round:
                    is_new = facts.round == entry.first_round
                    arrival = RosterChange(entry.client, facts.budget, facts.size, is_new)
                    arrivals.setdefault(facts.round, []).append(arrival)
        return arrivals

    def strike_off(self, client: int) -> None:
        """Mark a device as one that is not asked any more. Its number is not used again."""
        if client not in self.entries:
            raise ConfigError(
                f"client {client} was to be struck off; the roster has {len(self)} clients."
            )
        self.entries[client] = replace(self.entries[client], is_struck_off=True)

    def save(self, path: Path) -> None:
        """Write the roster atomically.

        Raises:
            RecordError: The file could not be written.
        """
        plain = {"version": VERSION, "devices": [entry.to_dict() for entry in self]}
        write_text(path, json.dumps(plain, indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Roster:
        """Read a roster. A file that does not exist gives an empty one.

        Raises:
            RecordError: The file cannot be read, or is no roster.
        """
        try:
            refuse_special(path)
            if not path.exists():
                return Roster()
            if path.stat().st_size > MAX_BYTES:
                raise RecordError(f"{path} has more than {MAX_BYTES:,} bytes.")
            return Roster.read(path.read_bytes())
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {why(error)}.") from error
        except FormatError as error:
            raise RecordError(f"{path} cannot be read: {error}.") from error

    @staticmethod
    def read(text: bytes) -> Roster:
        """Read the text of a roster.

        Raises:
            FormatError: It is no roster, or a client or key occurs twice.
        """
        plain = bounded_json(text, 7)
        if not isinstance(plain, dict) or plain.keys() != {"version", "devices"}:
            raise FormatError("it does not have exactly the keys version and devices")
        if plain["version"] != VERSION or not isinstance(plain["devices"], list):
            raise FormatError(f"it is no roster of version {VERSION}")
        entries = [RosterEntry.from_dict(entry) for entry in plain["devices"]]
        by_client = {entry.client: entry for entry in entries}
        if len(by_client) < len(entries) or len({entry.key for entry in entries}) < len(entries):
            raise FormatError("a client or a key occurs twice")
        return Roster(by_client)


def read_budget(bounds: Mapping[str, Any]) -> Budget:
    """Return a budget from its bounds.

    Raises:
        FormatError: A bound is unknown, or no number above 0.
    """
    if not bounds or not bounds.keys() <= _BOUNDS or not all(map(_is_number, bounds.values())):
        raise FormatError(f"a budget is no table of {', '.join(sorted(_BOUNDS))}")
    try:
        return Budget(**bounds)
    except BudgetError as error:
        raise FormatError(f"a budget cannot be read: {error}") from error


def check_name(name: str) -> None:
    """Refuse a name that could not be printed on one line.

    Raises:
        FormatError: It is empty, too long, or has characters that are not printed.
    """
    if not 0 < len(name) <= MAX_NAME or not name.isprintable():
        raise FormatError(f"a name of 1 to {MAX_NAME} printable characters is needed")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
