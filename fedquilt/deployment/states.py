"""Versions of a device's state, which agree with the rounds that counted at the server.

A round counts once the server has saved it. The device cannot know that, because its reply may get
lost. So it keeps two versions of its state: the one that a round starts from (the base) and the one
that the round leaves. The next request names the base that counts, and the device discards the
other. A version also has the reply, so that the same request is answered again without training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import FormatError, RecordError
from fedquilt.family.cut import HeldWeights
from fedquilt.round.wire import Message
from fedquilt.storage.files import Blob, make_folder, why, write
from fedquilt.storage.tensor_files import NO_LIMIT, TensorFile
from fedquilt.terms import ClientState, Submodel

CPU = torch.device("cpu")
OWN_NET = "own.safetensors"  # The net that the device tested last as its own, for export
MAX_VERSIONS = 2  # The base of the last round, and what that round left


@dataclass(frozen=True)
class Version:
    """The state of a device after a round, and its reply."""

    round: int  # Counted from 0
    request: str  # Digest of the request
    reply: Message
    states: Mapping[str, ClientState] = field(default_factory=dict)  # By scope
    # Initial weights that the device received, and their positions by scope
    initial: HeldWeights = field(default_factory=lambda: HeldWeights({}, {}))
    positions: Mapping[str, Submodel] = field(default_factory=dict)  # Of the initial weights

    def blob(self) -> Blob:
        """Return the version as a safetensors file with a checksum, for `read`."""
        tensors: dict[str, Tensor] = {"reply/note": _bytes(self.reply.note)}
        for number, file in enumerate(self.reply.files):
            tensors[f"reply/{number}"] = _bytes(file)
        tensors |= {f"initial/{name}": value for name, value in self.initial.items()}
        notes = []
        for number, (scope, state) in enumerate(self.states.items()):
            tensors |= {f"{number}/weights/{name}": value for name, value in state.weights.items()}
            for slot, values in state.slots.items():
                tensors |= {
                    f"{number}/slots/{slot}/{name}": value for name, value in values.items()
                }
            tensors |= {f"{number}/extras/{name}": value for name, value in state.extras.items()}
            notes.append(
                {
                    "scope": scope,
                    "submodel": state.submodel.to_dict(),
                    "slots": list(state.slots),
                    "steps": state.steps,
                    "round": state.round,
                }
            )
        note = {
            "round": self.round,
            "request": self.request,
            "files": len(self.reply.files),
            "states": notes,
            "positions": [
                [scope, submodel.to_dict()] for scope, submodel in self.positions.items()
            ],
        }
        return Blob.sealed(tensors, note)

    @staticmethod
    def read(file: TensorFile) -> Version:
        """Read a version from a file that `blob` gave. Tensors are on the CPU.

        Raises:
            RecordError: The file is damaged, or is no version.
        """
        tensors = file.tensors(CPU, sealed=True)
        note = file.note
        try:
            return _version(note, tensors)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise FormatError(f"{file.title} is no state of a device: {error}") from error


def _version(note: Any, tensors: Mapping[str, Tensor]) -> Version:
    states = {}
    for number, entry in enumerate(note["states"]):
        slots: dict[str, dict[str, Tensor]] = {slot: {} for slot in entry["slots"]}
        for slot, values in slots.items():
            values.update(_below(tensors, f"{number}/slots/{slot}/"))
        states[entry["scope"]] = ClientState(
            Submodel.from_dict(entry["submodel"]),
            dict(_below(tensors, f"{number}/weights/")),
            slots,
            entry["steps"],
            entry["round"],
            dict(_below(tensors, f"{number}/extras/")),
        )
    files = tuple(tensors[f"reply/{number}"].numpy().tobytes() for number in range(note["files"]))
    reply = Message(tensors["reply/note"].numpy().tobytes(), files)
    positions = {scope: Submodel.from_dict(plain) for scope, plain in note["positions"]}
    held = {scope: submodel.positions for scope, submodel in positions.items()}
    initial = HeldWeights(dict(_below(tensors, "initial/")), held)
    return Version(note["round"], note["request"], reply, states, initial, positions)


def _below(tensors: Mapping[str, Tensor], prefix: str) -> Iterator[tuple[str, Tensor]]:
    for path, value in tensors.items():
        if path.startswith(prefix):
            yield path.removeprefix(prefix), value


def _bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )


class DeviceStates:
    """Versions of a device's state for one run, in a folder or in memory."""

    def __init__(self, folder: Path | None = None) -> None:
        """Open the versions of a run.

        Args:
            folder: Folder of the run on the device. None: versions are kept in memory and end with
                the process.
        """
        self._folder = folder
        self._memory: dict[int, Blob] = {}
        if folder is not None:
            make_folder(folder)

    @property
    def is_in_memory(self) -> bool:
        """Return True if versions end with the process."""
        return self._folder is None

    @property
    def rounds(self) -> list[int]:
        """Return the rounds, counted from 0, of which there is a version, in ascending order."""
        if self._folder is None:
            return sorted(self._memory)
        names = (
            path.stem.removeprefix("round-") for path in self._folder.glob("round-*.safetensors")
        )
        return sorted(int(name) for name in names if name.isdigit())

    def load(self, round: int) -> Version | None:
        """Return the version of a round, counted from 0, or None if it is absent or damaged."""
        if round not in self.rounds:
            return None
        try:
            if self._folder is None:
                data = b"".join(bytes(chunk) for chunk in self._memory[round].chunks())
                return Version.read(TensorFile.of(data, f"the state of round {round + 1}"))
            with TensorFile.open(self._path(round), NO_LIMIT) as file:
                return Version.read(file)
        except RecordError:
            return None

    def save(self, version: Version, base: int) -> None:
        """Save the state that a round leaves, and delete all other versions except the base.

        Args:
            version: State after the round.
            base: Round that it started from. -1: none.

        Raises:
            RecordError: It could not be written. All other versions are still there.
        """
        if self._folder is None:
            self._memory[version.round] = version.blob()
        else:
            try:
                write(self._path(version.round), version.blob().chunks())
            except OSError as error:
                raise RecordError(
                    f"the state of round {version.round + 1} could not be written to "
                    f"{self._folder} on the device: {why(error)}. The state of earlier rounds is "
                    "kept, and the next round can count once there is room."
                ) from error
        self.keep({base, version.round})

    def store_own_net(self, blob: Blob) -> None:
        """Write the net that the device tested as its own to the folder. It is no version."""
        assert self._folder is not None, "states in memory have no folder"
        write(self._folder / OWN_NET, blob.chunks())

    def keep(self, rounds: set[int]) -> None:
        """Delete the versions of all rounds that are not in `rounds`."""
        for round in self.rounds:
            if round in rounds:
                continue
            if self._folder is None:
                del self._memory[round]
            else:
                self._path(round).unlink(missing_ok=True)

    def _path(self, round: int) -> Path:
        assert self._folder is not None
        return self._folder / f"round-{round}.safetensors"
