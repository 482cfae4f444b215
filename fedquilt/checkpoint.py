"""Checkpoints: the server's whole state on disk, from which a run goes on as if it had not been interrupted.

    checkpoint/
    ├── 00000012.json                 the manifest, written last: what belongs to round 12, with a checksum of each
    ├── 00000012.safetensors          the server's weights, slots and extras
    └── memory-00000012.safetensors   the client memories that changed since the checkpoint before; manifests list
                                      the packs that together hold all of them

A checkpoint is its manifest: files nobody lists are leftovers of a kill. Randomness has no state to save: every draw is
a hash of the seed and the round, which the manifest has.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fedquilt.checks import within
from fedquilt.errors import RecordError
from fedquilt.files import TEMPORARY, Blob, Written, make_folder, why, write
from fedquilt.memory import Memories
from fedquilt.names import said
from fedquilt.tensor_files import NO_LIMIT, TensorFile, read_state
from fedquilt.terms import Server

FORMAT = 1
MAX_ROUND = 2**63 - 1

_FILE_NAME = re.compile(r"(memory-)?[0-9]{8,}(-[0-9]+)?\.safetensors", re.ASCII)
# Raised by readers of tensors and memories if a file with the right checksum holds something else than was written.
_MALFORMED = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    RecordError,
)

_log = logging.getLogger("fedquilt")


@dataclass(frozen=True)
class Checkpointing:
    """When a run's state is saved; it always is at the end, on ctrl-C and when a round fails."""

    rounds: int = 0  # every so many rounds; 0: by time alone
    seconds: float = 60.0  # and when the last one is so long ago, less often if that took over 5 % of the time; 0: never
    keep: int = 2  # how many are kept, at least; the others are there in case the newest is damaged

    def __post_init__(self) -> None:
        within(self, rounds="[0, inf)", seconds="[0, inf)", keep="[2, inf)")

    def due(self, rounds: int, seconds: float, cost: float) -> bool:
        """Whether to save, so many rounds and seconds after the last time, which took `cost` seconds."""
        by_time = self.seconds > 0 and seconds >= max(self.seconds, 20 * cost)
        return by_time or (self.rounds > 0 and rounds >= self.rounds)


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint consists of."""

    round: int
    server: Written
    memory: tuple[Written, ...]  # the oldest first: later packs overrule earlier ones
    about: Mapping[str, Any]  # what else its writer wants back

    @property
    def name(self) -> str:
        return f"{self.round:08}.json"

    @property
    def files(self) -> set[str]:
        return {self.name, self.server.name, *(pack.name for pack in self.memory)}

    def to_json(self) -> str:
        plain = {"format": FORMAT, **asdict(self)}
        return json.dumps({**plain, "sha256": _digest(plain)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Read a manifest. A checksum does not show who wrote it, so that every value is checked.

        Raises:
            ValueError: What is wrong with it.
        """
        try:
            plain = json.loads(text)
            is_intact = isinstance(plain, dict) and plain.pop("sha256", None) == _digest(plain)
        except RecursionError as error:
            raise ValueError("its values are nested too deeply") from error
        if not is_intact:
            raise ValueError("its checksum differs")
        if plain.pop("format", None) != FORMAT:
            raise ValueError(
                f"it has another format than {FORMAT}; another version of fedquilt wrote it"
            )
        if plain.keys() != {"round", "server", "memory", "about"}:
            raise ValueError(f"it has the keys {', '.join(sorted(plain))}")
        round, packs, about = plain["round"], plain["memory"], plain["about"]
        if type(round) is not int or not 0 <= round <= MAX_ROUND:
            raise ValueError(f"its round is {str(round)[:40]!r}")
        if not isinstance(packs, list) or not isinstance(about, dict):
            raise ValueError("memory is no list, or about is no object")
        return Manifest(
            round, _listed_file(plain["server"]), tuple(map(_listed_file, packs)), about
        )


def _listed_file(plain: Any) -> Written:
    """Return a file that a manifest lists.

    Raises:
        ValueError: The entry is malformed, or the name could be that of a file outside of the folder.
    """
    if not isinstance(plain, dict) or plain.keys() != {"name", "size", "sha256"}:
        raise ValueError("a file has other keys than name, size and sha256")
    name, size, sha256 = plain["name"], plain["size"], plain["sha256"]
    if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
        raise ValueError(f"a file is called {str(name)[:80]!r}, which no file of a checkpoint is")
    if type(size) is not int or not isinstance(sha256, str):
        raise ValueError(f"size or checksum of {name} are malformed")
    return Written(name, size, sha256)


def _digest(plain: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class Checkpoints:
    """The checkpoints of one run, in a folder that is theirs alone."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._intact: list[Manifest] = []  # those known to be good, the newest last

    @property
    def exist(self) -> bool:
        return any(self.folder.glob("*.json"))

    @property
    def newest(self) -> int | None:
        """The round of the newest one that is known to be good."""
        return self._intact[-1].round if self._intact else None

    def save(self, server: Server, about: Mapping[str, Any]) -> None:
        """Save a state; costs with the model and with the memories that changed, not with all there are."""
        assert isinstance(server.memory, Memories)
        name = f"{server.round:08}"
        try:
            make_folder(self.folder)
            draft = server.memory.save(self.folder / f"memory-{name}.safetensors")
            written = write(
                self.folder / f"{name}.safetensors",
                Blob.of_state(
                    server.weights, server.slots, server.extras, round=server.round
                ).chunks(),
            )
            manifest = Manifest(
                server.round, written, tuple(pack.written for pack in draft.packs), about
            )
            write(self.folder / manifest.name, [manifest.to_json().encode()])
        except OSError as error:
            if self._intact:
                self._prune()  # what was written of it is in the way of those who make room
            left = (
                f"the one of round {self.newest} is intact"
                if self._intact
                else "there is none from before"
            )
            raise RecordError(
                f"the checkpoint of round {server.round} could not be written to {self.folder}: {why(error)}; {left}."
            ) from error
        server.memory.saved(draft)
        self._intact.append(manifest)
        self._prune()

    def _prune(self) -> None:
        """Remove what no checkpoint that is kept refers to: old ones, damaged ones, leftovers of a kill."""
        del self._intact[: -self.keep]
        listed = set().union(*(manifest.files for manifest in self._intact))
        for path in self.folder.iterdir():
            if path.name not in listed and path.suffix in (".json", ".safetensors", TEMPORARY):
                with suppress(OSError):  # it is only in the way
                    path.unlink()

    def load(
        self,
        memory: Memories,
        device: torch.device,
        check: Callable[[Manifest, Server], str] = lambda manifest, server: "",
    ) -> tuple[Server, Manifest] | None:
        """Return the newest state that is intact, with its memories opened in `memory`; None if none was ever saved.

        Args:
            memory: Receives the memories.
            device: Where the tensors are put.
            check: Returns further damage of a checkpoint in words. Empty: there is none.

        Raises:
            RecordError: No checkpoint is intact. The message has what is wrong with each.
        """
        damaged: list[str] = []
        for path in self._manifests:
            manifest, damage = self._examine(path)
            if manifest is not None and not damage:
                server, damage = self._open(manifest, memory, device)
                damage = damage or check(manifest, server)
            if manifest is None or damage:
                damaged.append(f"{path.stem}: {damage}")
                continue
            for line in damaged:
                _log.warning("Checkpoint %s. Going on from round %d instead.", line, manifest.round)
            self._intact = [manifest]
            return server, manifest
        if damaged:
            raise RecordError(
                f"no checkpoint in {self.folder} is intact:\n  " + "\n  ".join(damaged)
            )
        return None

    @property
    def damage(self) -> list[str]:
        """Return what is wrong with each checkpoint that is damaged."""
        examined = {path.stem: self._examine(path)[1] for path in self._manifests}
        return [f"{name}: {damage}" for name, damage in examined.items() if damage]

    @property
    def unlisted(self) -> list[str]:
        """Return the files that no intact manifest lists. A manifest that is gone leaves some."""
        examined = [self._examine(path)[0] for path in self._manifests]
        listed = set().union(*(manifest.files for manifest in examined if manifest is not None))
        return sorted(
            path.name for path in self.folder.glob("*.safetensors") if path.name not in listed
        )

    @property
    def _manifests(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"), reverse=True)

    def _examine(self, path: Path) -> tuple[Manifest | None, str]:
        """Return a manifest, and what is wrong with it or with its files."""
        try:
            manifest = Manifest.from_json(path.read_text())
        except OSError as error:
            return None, f"{path.name} cannot be read: {why(error)}"
        except ValueError as error:
            return None, f"{path.name} is not what was written: {error}"
        if path.name != manifest.name:
            return (
                None,
                f"{path.name} is not what was written: it is the manifest of round {manifest.round}",
            )
        found = (written.damage(self.folder) for written in (manifest.server, *manifest.memory))
        return manifest, next(filter(None, found), "")

    def _open(
        self, manifest: Manifest, memory: Memories, device: torch.device
    ) -> tuple[Server, str]:
        """Return the state of a checkpoint, and what is wrong with the content of its files."""
        server = Server(manifest.round, {}, memory)
        try:
            with TensorFile.open(self.folder / manifest.server.name, NO_LIMIT) as file:
                state = read_state(file, device)
            memory.open(self.folder, manifest.memory)
        except OSError as error:
            return server, f"its files cannot be read: {why(error)}"
        except RecordError as error:
            return server, str(error).removesuffix(".")
        except _MALFORMED as error:
            return server, f"its files hold something else than was written: {said(error)}"
        return replace(server, weights=state.weights, slots=state.slots, extras=state.extras), ""
