"""Checkpoints: the complete state of the server on disk, from which a run is resumed exactly.

    checkpoint/
    ├── 00000012.json                 manifest of round 12, written last: its files and checksums
    ├── 00000012.safetensors          the server's weights, slots and extras
    └── memory-00000012.safetensors   client states that changed since the previous checkpoint

A manifest lists all packs of client states that are needed. The newest checkpoints are kept, and
the one of the best round on validation samples that they name (`best.py`). Files that no manifest
lists are left over from a killed process. Random generators have no state to save, because every
random number is a hash of the seed and the round, which are known.
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
from fedquilt.names import said
from fedquilt.runs.client_states import ClientStates
from fedquilt.storage.files import TEMPORARY, Blob, Written, make_folder, why, write
from fedquilt.storage.tensor_files import NO_LIMIT, TensorFile, read_state
from fedquilt.terms import Server

FORMAT = 1
MAX_ROUND = 2**63 - 1

_FILE_NAME = re.compile(r"(memory-)?[0-9]{8,}(-[0-9]+)?\.safetensors", re.ASCII)
# Errors of readers of tensors and client states if the content of a file is malformed although its
# checksum is right.
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
    """Settings of when to save a checkpoint.

    A checkpoint is saved when one of the two limits is reached. The end of a run, ctrl-C, a failed
    round and a new best round on validation samples always save one. A run that is killed loses the
    rounds since its last checkpoint, and computes the same ones again when it is resumed.

    Example:
        >>> import fedquilt as fq
        >>> every_round = fq.Checkpointing(rounds=1)
        >>> every_round.due(rounds=1, seconds=0.1, cost=0.01)
        True
        >>> fq.Checkpointing().due(rounds=1, seconds=0.1, cost=0.01)  # By default every minute
        False
    """

    rounds: int = 0  # Rounds between checkpoints. 0: only `seconds` decides
    # Seconds between checkpoints, at least 20 times what saving takes. 0: only `rounds` decides
    seconds: float = 60.0
    keep: int = 2  # Number of checkpoints that are kept, in case the newest one is damaged

    def __post_init__(self) -> None:
        within(self, rounds="[0, inf)", seconds="[0, inf)", keep="[2, inf)")

    def due(self, rounds: int, seconds: float, cost: float) -> bool:
        """Return True if a checkpoint should be saved now.

        Args:
            rounds: Number of rounds since the last checkpoint.
            seconds: Seconds since the last checkpoint.
            cost: Seconds that saving the last checkpoint took.
        """
        by_time = self.seconds > 0 and seconds >= max(self.seconds, 20 * cost)
        return by_time or (self.rounds > 0 and rounds >= self.rounds)


@dataclass(frozen=True)
class Manifest:
    """The list of files of a checkpoint, with their checksums."""

    round: int  # Number of completed rounds
    server: Written  # File of the server's weights, slots and extras
    # Packs of client states, oldest first. Later ones take precedence
    memory: tuple[Written, ...]
    about: Mapping[str, Any]  # Further values that the writer needs when it resumes

    @property
    def name(self) -> str:
        """Return the file name of the manifest."""
        return f"{self.round:08}.json"

    @property
    def best(self) -> int | None:
        """Return the best round on validation samples that `about` names. None: there is none.

        The checkpoint of that round is kept beside the newest ones.
        """
        best = self.about.get("best")
        round = best.get("round") if isinstance(best, Mapping) else None
        return round if type(round) is int and 0 <= round <= self.round else None

    @property
    def files(self) -> set[str]:
        """Return the names of all files of the checkpoint, including the manifest."""
        return {self.name, self.server.name, *(pack.name for pack in self.memory)}

    def to_json(self) -> str:
        """Return the text of the manifest file: all fields, the format and a checksum over both."""
        plain = {"format": FORMAT, **asdict(self)}
        return json.dumps({**plain, "sha256": _digest(plain)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Manifest:
        """Read a manifest. Every value is checked, because a checksum does not show who wrote it.

        Raises:
            ValueError: The manifest is malformed. The message has the reason.
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
        round, packs, description = plain["round"], plain["memory"], plain["about"]
        if type(round) is not int or not 0 <= round <= MAX_ROUND:
            raise ValueError(f"its round is {str(round)[:40]!r}")
        if not isinstance(packs, list) or not isinstance(description, dict):
            raise ValueError("memory is no list, or about is no object")
        return Manifest(
            round, _listed_file(plain["server"]), tuple(map(_listed_file, packs)), description
        )


def _listed_file(plain: Any) -> Written:
    """Return name, size and checksum of a file that a manifest lists. The file is not read.

    Args:
        plain: Entry of the manifest, from JSON.

    Raises:
        ValueError: The entry is malformed, or its name could refer to a file outside of the folder.
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
    """The checkpoints of one run, in a folder that has nothing else."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        self.folder = folder
        self.keep = keep
        self._intact: list[Manifest] = []  # Manifests known to be intact, newest last
        self._older: dict[int, Manifest] = {}  # Manifests of best rounds that `_intact` names

    @property
    def exist(self) -> bool:
        """Return True if the folder has at least one manifest."""
        return any(self.folder.glob("*.json"))

    @property
    def newest(self) -> int | None:
        """Return the round of the newest checkpoint that was saved or loaded. None: none was."""
        return self._intact[-1].round if self._intact else None

    @property
    def newest_about(self) -> Mapping[str, Any]:
        """Return `about` of the newest readable manifest. Its files are not examined.

        The result is empty if no manifest can be read.
        """
        for path in self._manifests:
            try:
                return Manifest.from_json(path.read_text()).about
            except (OSError, ValueError):
                continue
        return {}

    @property
    def rounds(self) -> list[int]:
        """Return the rounds that have a manifest, intact or not, in ascending order."""
        return sorted(int(path.stem) for path in self._manifests if path.stem.isdecimal())

    def save(self, server: Server, about: Mapping[str, Any]) -> None:
        """Write a checkpoint of a state, and remove files that are not needed any more.

        The bytes written depend on the size of the model and of those client states that changed,
        and not on the number of clients. If writing fails, earlier checkpoints stay intact.

        Args:
            server: State to save.
            about: Further values for the manifest, as JSON can hold them.

        Raises:
            RecordError: The files cannot be written.
        """
        assert isinstance(server.memory, ClientStates)
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
                self._prune()  # Remove the incomplete files, which take up space.
            remaining = "there is no earlier one"
            if self._intact:
                remaining = f"the one of round {self.newest} is intact"
            raise RecordError(
                f"the checkpoint of round {server.round} could not be written to {self.folder}: "
                f"{why(error)}; {remaining}."
            ) from error
        server.memory.saved(draft)
        self._intact.append(manifest)
        self._prune()

    def _prune(self) -> None:
        """Remove files that no kept checkpoint lists: old, damaged and incomplete ones.

        The newest `keep` checkpoints are kept, and the best rounds that they name.
        """
        manifests = {**self._older, **{manifest.round: manifest for manifest in self._intact}}
        del self._intact[: -self.keep]
        best_rounds = {manifest.best for manifest in self._intact} - {
            manifest.round for manifest in self._intact
        }
        self._older = {
            round: manifest for round, manifest in manifests.items() if round in best_rounds
        }
        listed = set().union(
            *(manifest.files for manifest in (*self._intact, *self._older.values()))
        )
        for path in self.folder.iterdir():
            if path.name not in listed and path.suffix in (".json", ".safetensors", TEMPORARY):
                with suppress(OSError):  # A file that stays does no harm.
                    path.unlink()

    def load(
        self,
        client_states: ClientStates,
        device: torch.device,
        check: Callable[[Manifest, Server], str] = lambda manifest, server: "",
    ) -> tuple[Server, Manifest] | None:
        """Return the newest intact state, with its client states opened in `client_states`.

        Args:
            client_states: Object that receives the client states.
            device: Device of the tensors.
            check: Function that returns further damage of a checkpoint in words. Empty: there is
                none.

        Returns:
            None if no checkpoint was ever saved.

        Raises:
            RecordError: No checkpoint is intact. The message lists what is wrong with each.
        """
        damaged: list[str] = []
        for path in self._manifests:
            manifest, damage = self._examine(path)
            if manifest is not None and not damage:
                server, damage = self._open(manifest, client_states, device)
                damage = damage or check(manifest, server)
            if manifest is None or damage:
                damaged.append(f"{path.stem}: {damage}")
                continue
            for line in damaged:
                _log.warning("Checkpoint %s. Resuming from round %d instead.", line, manifest.round)
            self._intact = [manifest]
            self._older = self._best_of(manifest)
            return server, manifest
        if damaged:
            raise RecordError(
                f"no checkpoint in {self.folder} is intact:\n  " + "\n  ".join(damaged)
            )
        return None

    def _best_of(self, manifest: Manifest) -> dict[int, Manifest]:
        """Return the manifest of the best round that another manifest names, by round.

        Its files are not read. The result is empty if there is no other round, or its manifest is
        damaged.
        """
        if manifest.best is None or manifest.best == manifest.round:
            return {}
        try:
            return {
                manifest.best: Manifest.from_json(
                    (self.folder / f"{manifest.best:08}.json").read_text()
                )
            }
        except (OSError, ValueError):  # `load_round` reports the damage.
            return {}

    def load_round(
        self, round: int, client_states: ClientStates, device: torch.device
    ) -> tuple[Server, Manifest]:
        """Return the state of one round, with its client states opened in `client_states`.

        Args:
            round: Number of the round.
            client_states: Object that receives the client states.
            device: Device of the tensors.

        Raises:
            RecordError: There is no checkpoint of this round, or it is damaged.
        """
        manifest, damage = self._examine(self.folder / f"{round:08}.json")
        if manifest is not None and not damage:
            server, damage = self._open(manifest, client_states, device)
        if manifest is None or damage:
            raise RecordError(
                f"the state after round {round} was asked for; its checkpoint is damaged: {damage}."
            )
        return server, manifest

    @property
    def damage(self) -> list[str]:
        """Return a description of the damage for each damaged checkpoint, newest first.

        All files are read, to compare their checksums.
        """
        examined = {path.stem: self._examine(path)[1] for path in self._manifests}
        return [f"{name}: {damage}" for name, damage in examined.items() if damage]

    @property
    def unlisted(self) -> list[str]:
        """Return the sorted names of tensor files that no readable manifest lists.

        The manifest that listed such a file was lost or is damaged.
        """
        examined = [self._examine(path)[0] for path in self._manifests]
        listed = set().union(*(manifest.files for manifest in examined if manifest is not None))
        return sorted(
            path.name for path in self.folder.glob("*.safetensors") if path.name not in listed
        )

    @property
    def _manifests(self) -> list[Path]:
        return sorted(self.folder.glob("*.json"), reverse=True)

    def _examine(self, path: Path) -> tuple[Manifest | None, str]:
        """Read a manifest, and compare sizes and checksums of the files that it lists.

        Args:
            path: File of the manifest.

        Returns:
            The manifest, or None if it cannot be read itself. A description of the first damage to
            it or to its files, which is empty if there is none.
        """
        try:
            manifest = Manifest.from_json(path.read_text())
        except OSError as error:
            return None, f"{path.name} cannot be read: {why(error)}"
        except ValueError as error:
            return None, f"{path.name} is not what was written: {error}"
        if path.name != manifest.name:
            return (
                None,
                f"{path.name} is not what was written: it is the manifest of round "
                f"{manifest.round}",
            )
        damages = (written.damage(self.folder) for written in (manifest.server, *manifest.memory))
        return manifest, next(filter(None, damages), "")

    def _open(
        self, manifest: Manifest, client_states: ClientStates, device: torch.device
    ) -> tuple[Server, str]:
        """Load the state of a checkpoint whose files have the right checksums.

        Args:
            manifest: Manifest of the checkpoint.
            client_states: Object that receives the client states.
            device: Device of the tensors.

        Returns:
            The state, and a description of damage to the content of its files. The description is
            empty if there is none. If there is damage, the state has no weights.
        """
        server = Server(manifest.round, {}, client_states)
        try:
            with TensorFile.open(self.folder / manifest.server.name, NO_LIMIT) as file:
                state = read_state(file, device)
            client_states.open(self.folder, manifest.memory)
        except OSError as error:
            return server, f"its files cannot be read: {why(error)}"
        except RecordError as error:
            return server, str(error).removesuffix(".")
        except _MALFORMED as error:
            return server, f"its files hold something else than was written: {said(error)}"
        return replace(server, weights=state.weights, slots=state.slots, extras=state.extras), ""
