"""Logs of client states on disk: packs of a checkpoint, and the spill of a running process.

A client state is a blob, the bytes of a safetensors file. A log has blobs one behind another.
"""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

import torch
from typing_extensions import override

from fedquilt.errors import RecordError
from fedquilt.names import said
from fedquilt.storage.files import Blob, Written, why
from fedquilt.storage.tensor_files import MAX_NOTE_DEPTH, TensorFile, bounded_json, read_state
from fedquilt.terms import ClientState, Submodel, in_slots

Key = tuple[int, str]  # Client and scope

TENSOR_OVERHEAD = 512  # Approximate bytes of a tensor besides its values
MAX_OUTDATED_BYTES = 64 << 20  # Bytes of outdated blobs in a spill before it is rewritten


class Log(ABC):
    """Blobs one behind another in a file. `entries` has those that are still current."""

    def __init__(self) -> None:
        self.entries: dict[Key, tuple[int, int]] = {}  # Offset and size in bytes
        self.live = 0  # Bytes of all current entries

    def enter(self, key: Key, offset: int, size: int) -> None:
        """Add the entry of a blob.

        Args:
            key: Client and scope.
            offset: Byte of the file at which the blob begins.
            size: Bytes of the blob.
        """
        self.entries[key] = offset, size
        self.live += size

    def forget(self, key: Key) -> None:
        """Remove the entry of an outdated blob, and subtract its bytes from `live`.

        The file is not changed.
        """
        self.live -= self.entries.pop(key)[1]

    @abstractmethod
    def read(self, key: Key) -> bytearray:
        """Return the bytes of the current blob of a client and scope."""

    def _read(self, file: BinaryIO, key: Key) -> bytearray:
        """Return the bytes of a blob from an open file.

        Args:
            file: File of this log.
            key: Client and scope of the blob, which must have an entry.

        Raises:
            RecordError: The file ends within the blob.
        """
        offset, size = self.entries[key]
        data = bytearray(size)
        file.seek(offset)
        if file.readinto(data) != size:  # type: ignore[attr-defined]
            raise RecordError(
                f"the state of client {key[0]} was cut short on disk: {size:,} bytes were expected."
            )
        return data


class Pack(Log):
    """Client states of a checkpoint: a safetensors file whose entries are safetensors files."""

    def __init__(self, path: Path, written: Written) -> None:
        super().__init__()
        self.path = path
        self.written = written

    def lay_out(self, sizes: Mapping[Key, int], begin: int) -> None:
        """Add entries for blobs that follow one another.

        Args:
            sizes: Bytes of each blob, in order.
            begin: Offset of the first blob.
        """
        for key, size in sizes.items():
            self.enter(key, begin, size)
            begin += size

    def read_entries(self) -> None:
        """Add the entries that the header of the file lists. The blobs are not read."""
        with self.path.open("rb") as stream:
            file = TensorFile(stream, os.fstat(stream.fileno()).st_size, str(self.path))
        for name, entry in file.entries.items():
            self.enter(_key_of(name), entry.offset, entry.size)

    @override
    def read(self, key: Key) -> bytearray:
        # The file is opened for each read, because a run may have more packs than a process may
        # have open files.
        try:
            with self.path.open("rb") as file:
                return self._read(file, key)
        except OSError as error:
            raise RecordError(
                f"the state of client {key[0]} is in {self.path}, which cannot be read: "
                f"{why(error)}."
            ) from error


class Spill(Log):
    """Client states that changed since the last checkpoint and exceed the memory limit."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._end = 0
        with self._blame():
            self._file = self._new()

    def _new(self) -> BinaryIO:
        # The file is open as long as the log exists.
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
        finalize(self, file.close)
        return file

    def put(self, key: Key, blob: Blob) -> None:
        """Append a blob to the file, and enter it under its key.

        If outdated blobs take much space, the file is rewritten without them first.

        Args:
            key: Client and scope, which must have no entry.
            blob: Encoded state of the client.
        """
        with self._blame():
            if self._end > 2 * self.live + MAX_OUTDATED_BYTES:
                self._rewrite()
            self._file.seek(self._end)
            for chunk in blob.chunks():
                self._file.write(chunk)
            self._file.flush()
        self.enter(key, self._end, blob.size)
        self._end += blob.size

    @override
    def read(self, key: Key) -> bytearray:
        with self._blame():
            return self._read(self._file, key)

    def _rewrite(self) -> None:
        """Copy the current blobs into a new file, so that outdated ones do not fill the disk.

        The new file replaces the old one, and all offsets in `entries` change.
        """
        fresh, entries, end = self._new(), {}, 0
        for key, (_, size) in self.entries.items():
            fresh.write(self.read(key))
            entries[key] = end, size
            end += size
        fresh.flush()
        self._file.close()
        self._file, self.entries, self._end = fresh, entries, end

    @contextmanager
    def _blame(self) -> Iterator[None]:
        """Turn an OSError inside the block into a RecordError that names the spill's folder."""
        try:
            yield
        except OSError as error:
            raise RecordError(
                "client states exceed client_state_memory, and the rest cannot be kept in "
                f"{self._folder or tempfile.gettempdir()}: {why(error)}. Free space there, or "
                "raise client_state_memory."
            ) from error


def encode(state: ClientState) -> Blob:
    """Return a client state as a blob, without loss. Its tensors are shared, not copied."""
    submodel = json.dumps(state.submodel.to_dict())
    note = {"submodel": submodel, "steps": state.steps, "round": state.round}
    return Blob.of_state(state.weights, state.slots, state.extras, **note)


def decode(data: bytearray, device: torch.device) -> ClientState:
    """Return the client state that `encode` wrote.

    Args:
        data: Bytes of the state.
        device: Device for the tensors.

    Raises:
        RecordError: The bytes are not those of a client state. Other exceptions are possible too.
    """
    state = read_state(TensorFile.of(data, "the state of a client"), device)
    submodel, steps = state.note.get("submodel"), state.note.get("steps")
    last = state.note.get("round", -1)  # Earlier versions did not write it.
    if not isinstance(submodel, str) or not isinstance(steps, int) or not isinstance(last, int):
        raise RecordError(
            "the state of a client does not name its sub-model and its number of steps."
        )
    return ClientState(_submodel(submodel), state.weights, state.slots, steps, last, state.extras)


def decode_for(key: Key, data: bytearray, device: torch.device) -> ClientState:
    """Return a client state that was read from disk.

    Args:
        key: Client and scope, for the message.
        data: Bytes of the state.
        device: Device for the tensors.

    Raises:
        RecordError: The bytes are not a client state. The message names the client.
    """
    try:
        return decode(data, device)
    except RecordError as error:
        raise RecordError(
            f"the state of client {key[0]} on disk is not what was written: {error}"
        ) from error
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RuntimeError,
    ) as error:
        raise RecordError(
            f"the state of client {key[0]} on disk is not what was written: {said(error)}."
        ) from error


@lru_cache(maxsize=1024)  # Clients with the same positions share one object.
def _submodel(text: str) -> Submodel:
    return Submodel.from_dict(bounded_json(text.encode(), MAX_NOTE_DEPTH))


def state_size(state: ClientState) -> int:
    """Return the approximate bytes that a client state takes in memory."""
    tensors = [*state.weights.values(), *in_slots(state.slots), *state.extras.values()]
    return sum(tensor.nbytes + TENSOR_OVERHEAD for tensor in tensors)


def entry_name(key: Key) -> str:
    """Return the name of a client state in a pack, such as `3:` for client 3 without a scope."""
    return f"{key[0]}:{key[1]}"


def _key_of(name: str) -> Key:
    client, _, scope = name.partition(":")
    if not (client.isascii() and client.isdecimal()):
        raise RecordError(f"a state of client {client!r} was found; clients are whole numbers.")
    return int(client), scope
