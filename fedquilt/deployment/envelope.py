"""Messages as records of Flower: byte arrays of at most 128 KiB each.

Flower drops an upload 180 s after its last finished array, and it does not divide bytes in its
other records. So all bytes travel as arrays of bounded size. A node sends two arrays at the same
time, and sends one again if the reply takes longer than 30 s. With arrays of 1 MiB a link of
40 kB/s never got one through (`slow link` of bench/faults.py). With 128 KiB, 9 kB/s are enough.

Flower stores equal arrays once. The files of a message are apart from its note, so that the file of
a cut is stored once for all clients that train the same positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from fedquilt.errors import FormatError
from fedquilt.round.wire import MAX_JOBS, Message

if TYPE_CHECKING:
    from flwr.app import ArrayRecord, RecordDict

CHUNK_BYTES = 1 << 17  # Largest array
MAX_CHUNKS = 1 << 17  # Most arrays of one part, 16 GiB
MAX_ABOUT_BYTES = 1 << 20
_BYTES = "fedquilt.bytes"  # Name of the serialisation. Arrays are bytes as they are.
_ABOUT, _NOTE, _FILE = "about", "note", "file-"


def chunks(data: bytes) -> Iterator[bytes]:
    """Yield bytes in pieces of at most `CHUNK_BYTES`. Empty bytes are one empty piece."""
    for start in range(0, max(len(data), 1), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def pack(message: Message, about: bytes = b"") -> RecordDict:
    """Return a message as records of Flower.

    Args:
        message: Note and files.
        about: What a device has to know besides the message, as JSON. Empty: nothing.
    """
    from flwr.app import RecordDict

    parts = {_ABOUT: about, _NOTE: message.note}
    parts |= {f"{_FILE}{number}": file for number, file in enumerate(message.files)}
    return RecordDict({name: _record(data) for name, data in parts.items()})


def unpack(records: RecordDict) -> tuple[Message, bytes]:
    """Return the message in records of Flower, and what is known besides it.

    Raises:
        FormatError: The records are not those of a message.
    """
    num_files = len(records) - 2
    names = [_ABOUT, _NOTE, *(f"{_FILE}{number}" for number in range(num_files))]
    if not 0 <= num_files <= MAX_JOBS or set(records) != set(names):
        raise FormatError("its records are not a note and files")
    parts = [_joined(records[name]) for name in names]
    if len(parts[0]) > MAX_ABOUT_BYTES:
        raise FormatError(f"its description has more than {MAX_ABOUT_BYTES:,} bytes")
    return Message(parts[1], tuple(parts[2:])), parts[0]


def _record(data: bytes) -> ArrayRecord:
    from flwr.app import Array, ArrayRecord

    arrays = {
        str(number): Array(dtype="uint8", shape=(len(piece),), stype=_BYTES, data=piece)
        for number, piece in enumerate(chunks(data))
    }
    return ArrayRecord(arrays)


def _joined(record: object) -> bytes:
    """Return the bytes of a record, whose arrays have the names 0, 1, 2, …."""
    from flwr.app import ArrayRecord

    if not isinstance(record, ArrayRecord) or not 1 <= len(record) <= MAX_CHUNKS:
        raise FormatError("a record does not consist of arrays")
    pieces = []
    for number in range(len(record)):
        array = record.get(str(number))
        if array is None or array.stype != _BYTES or len(array.data) > CHUNK_BYTES:
            raise FormatError("a record has an array that is no piece of a message")
        pieces.append(bytes(array.data))
    return b"".join(pieces)
