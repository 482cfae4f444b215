"""Accepted replies of a round: in memory up to a bound, and beyond it in a temporary file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fedquilt.engines.flower.validation import Accepted
from fedquilt.errors import RecordError
from fedquilt.round.wire import Message
from fedquilt.storage.files import why

MAX_HELD_BYTES = 256 << 20  # Bytes of accepted tensors that stay in memory


@dataclass(frozen=True)
class StoredMessage:
    """Place of a message in the temporary file."""

    start: int  # Position of its first byte
    lengths: tuple[int, ...]  # Bytes of the note and of each file


@dataclass
class ReplyStore:
    """Replies that were accepted, by client, until the round closes and they are folded.

    A reply that would exceed the bound is written to a file as the bytes that arrived. The file has
    no name, so that the system removes it with the process.

    Args:
        max_bytes: Bytes of tensors that stay in memory.
        folder: Folder of the temporary file. None: that of the system.
    """

    max_bytes: int = MAX_HELD_BYTES
    folder: Path | None = None
    held_bytes: int = 0  # Bytes of the tensors in memory
    _in_memory: dict[int, Accepted] = field(default_factory=dict)
    _on_disk: dict[int, StoredMessage] = field(default_factory=dict)
    _file: IO[bytes] | None = None

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._on_disk)

    def __contains__(self, client: int) -> bool:
        return client in self._in_memory or client in self._on_disk

    def __iter__(self) -> Iterator[int]:
        return iter((*self._in_memory, *self._on_disk))

    @property
    def num_on_disk(self) -> int:
        """Return the number of replies in the temporary file."""
        return len(self._on_disk)

    def put(self, client: int, accepted: Accepted, message: Message) -> None:
        """Store the accepted reply of a client.

        Args:
            client: Number of the client.
            accepted: Result of reading the reply.
            message: The reply, which is read again if it does not stay in memory.

        Raises:
            RecordError: The temporary file cannot be written.
        """
        if self.held_bytes + accepted.bytes <= self.max_bytes:
            self._in_memory[client] = accepted
            self.held_bytes += accepted.bytes
            return
        parts = (message.note, *message.files)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self.folder)  # noqa: SIM115
            start = self._file.seek(0, os.SEEK_END)
            for part in parts:
                self._file.write(part)
            self._file.flush()
        except OSError as error:
            raise RecordError(
                f"the reply of client {client} could not be written to a temporary file in "
                f"{self.folder or tempfile.gettempdir()}: {why(error)}. The server's state is that "
                "of the round before; the run can be resumed from it once there is space."
            ) from error
        self._on_disk[client] = StoredMessage(start, tuple(map(len, parts)))

    def get(self, client: int) -> Accepted | Message:
        """Return the accepted reply of a client, or its message if that was on disk."""
        if client in self._in_memory:
            return self._in_memory[client]
        stored = self._on_disk[client]
        assert self._file is not None, "a stored message has a file"
        self._file.seek(stored.start)
        note, *files = (self._file.read(length) for length in stored.lengths)
        return Message(note, tuple(files))

    def remove(self, client: int) -> None:
        """Drop the reply of a client. Its bytes on disk stay until the round is over."""
        accepted = self._in_memory.pop(client, None)
        if accepted is not None:
            self.held_bytes -= accepted.bytes
        self._on_disk.pop(client, None)

    def close(self) -> None:
        """Remove the temporary file."""
        if self._file is not None:
            self._file.close()
            self._file = None
