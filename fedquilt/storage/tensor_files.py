"""Strict reader of safetensors files, through which every tensor from outside is read.

Checkpoints, initial weights (`--init`), exported models and supernets are read here and nowhere
else. The header alone decides if a file is accepted. Names, dtypes, shapes and offsets are checked
against each other and against the length of the file. Memory for tensors is allocated only after
that. Every byte of the data belongs to exactly one tensor, so that no value is uninitialised and
none is hidden.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, FormatError, RecordError

Bytes = bytes | bytearray | memoryview

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NOTE = "fedquilt"  # Key of the metadata under which fedquilt stores its note, as JSON
SEAL = "sha256"  # Key of the note under which a sealed file stores its checksum

# Limit of the safetensors package. The stored states of 300,000 clients fit.
MAX_HEADER_BYTES = 100_000_000
MAX_HEADER_DEPTH = 3  # Nested brackets in a header: {name: {"shape": […]}}
MAX_NOTE_DEPTH = 16  # Nested brackets in a note
MAX_NAME_LENGTH = 1_024  # Characters in the name of a tensor
NO_LIMIT = 2**63  # Value of max_bytes for files that a run wrote itself
MAX_DIMS = 64  # Dimensions of a tensor, which is torch's own limit

_STRING = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


# --- JSON ---------------------------------------------------------------------------------------


def bounded_json(text: bytes, max_depth: int) -> Any:
    """Parse JSON of bounded depth in which no key occurs twice.

    The depth is counted before parsing, because the parser of the standard library recurses.

    Args:
        text: JSON, encoded as UTF-8.
        max_depth: Most nested brackets.

    Raises:
        FormatError: The text is no such JSON.
    """
    depth = 0
    for bracket in _STRING.sub(b"", text).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > max_depth:
            raise FormatError(f"it nests deeper than {max_depth} levels")
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except UnicodeDecodeError as error:
        raise FormatError(f"byte {error.start} is not UTF-8") from error
    except ValueError as error:  # JSONDecodeError, or a number of more than 4,300 digits
        raise FormatError(f"it is no JSON ({error})") from error


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object as a dictionary.

    Args:
        pairs: Keys and values of the object, in order.

    Raises:
        FormatError: A key occurs twice.
    """
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise FormatError(
            f"the key {next(key for key in table if keys.count(key) > 1)!r} occurs twice"
        )
    return table


# --- headers ------------------------------------------------------------------------------------


class TensorEntry(NamedTuple):
    """Tensor as a checked header describes it."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # Byte of the file at which the tensor's data begins
    size: int  # Number of bytes of the tensor's data


@dataclass(frozen=True)
class Header:
    """Checked header of a safetensors file."""

    described: Mapping[str, Any]  # Entries as JSON values
    entries: Mapping[str, TensorEntry]  # Checked entries, in the file's order
    metadata: Mapping[str, str]  # Free-form metadata of the file
    data: int  # Byte of the file at which data begins

    @property
    def note(self) -> Any:
        """Return the note that fedquilt writes into the metadata.

        Raises:
            FormatError: There is none, or it is no JSON.
        """
        if NOTE not in self.metadata:
            raise FormatError("fedquilt did not write it: its metadata has no note")
        try:
            return bounded_json(self.metadata[NOTE].encode(), MAX_NOTE_DEPTH)
        except (FormatError, UnicodeEncodeError) as error:
            raise FormatError(f"its note cannot be read: {error}") from error


def read_header(stream: BinaryIO, total: int) -> Header:
    """Read and check the header of a safetensors file.

    Args:
        stream: File at its beginning. It is left at the beginning of the data.
        total: Number of bytes in the whole file.

    Raises:
        FormatError: The header contradicts itself or the length of the file.
    """
    length = int.from_bytes(stream.read(8), "little")
    if total < 8 or length > min(MAX_HEADER_BYTES, total - 8):
        raise FormatError(
            f"its header should have {length:,} bytes, and the file has {total:,} in all"
        )
    try:
        described = bounded_json(stream.read(length), MAX_HEADER_DEPTH)
    except FormatError as error:
        raise FormatError(f"its header cannot be read: {error}") from error
    if not isinstance(described, dict):
        raise FormatError(f"its header is a {type(described).__name__} and no JSON object")
    metadata = described.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise FormatError("its metadata is no JSON object of strings")

    begin = 8 + length
    entries = {name: _entry(name, entry, begin) for name, entry in described.items()}
    end = begin
    for name, entry in sorted(entries.items(), key=lambda pair: (pair[1].offset, pair[1].size)):
        if entry.offset != end:
            kind = (
                "overlaps the tensor before it" if entry.offset < end else "leaves a gap before it"
            )
            raise FormatError(
                f"the data of {name} {kind}: it begins at byte {entry.offset - begin:,} of the data"
            )
        end += entry.size
    if end != total:
        raise FormatError(
            f"its tensors need {end - begin:,} bytes of data, and the file has {total - begin:,}"
        )
    return Header(described, entries, metadata, begin)


def _entry(name: str, entry: Any, begin: int) -> TensorEntry:
    """Check one entry of a header, and return it with its offset in the file.

    Args:
        name: Name of the tensor.
        entry: JSON value of the entry.
        begin: Byte of the file at which data begins.

    Raises:
        FormatError: The entry is malformed, or its shape and offsets contradict each other.
    """
    if not name or len(name) > MAX_NAME_LENGTH or not name.isprintable():
        raise FormatError(
            f"{name[:50]!r} is no name of a tensor: 1 to {MAX_NAME_LENGTH} printable characters fit"
        )
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"the entry of {name} does not have dtype, shape and data_offsets alone")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise FormatError(
            f"{name} has the dtype {str(dtype)[:20]!r}; known are {', '.join(DTYPES)}"
        )
    if not _is_sizes(shape) or len(shape) > MAX_DIMS:
        raise FormatError(f"{name} has no shape: at most {MAX_DIMS} whole numbers from 0 on fit")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise FormatError(
            f"{name} has no data_offsets: a begin and an end that is not before it fit"
        )
    needed = math.prod(shape) * DTYPES[dtype].itemsize
    if needed != offsets[1] - offsets[0]:
        raise FormatError(
            f"{name} is {dtype} of shape {shape}, and its data_offsets {offsets} have another size"
        )
    return TensorEntry(DTYPES[dtype], tuple(shape), begin + offsets[0], needed)


def _is_sizes(value: object) -> bool:
    """Return True if a value is a list of non-negative 64-bit integers. Booleans do not count."""
    return isinstance(value, list) and all(
        type(size) is int and 0 <= size < 2**63 for size in value
    )


def sealing(described: Mapping[str, Any], note: Mapping[str, Any]) -> Any:
    """Return a hash of header entries and note, which the caller updates with the data.

    Args:
        described: Entries of the header, as JSON values.
        note: Note without its checksum.
    """
    return hashlib.sha256(json.dumps([described, note], sort_keys=True).encode())


# --- files --------------------------------------------------------------------------------------


class TensorFile:
    """Safetensors file whose header is checked and whose tensors have not been read yet.

    All its errors are `RecordError`s that begin with its title.
    """

    def __init__(self, stream: BinaryIO, total: int, title: str) -> None:
        """Read the header of a file.

        Args:
            stream: File at its beginning.
            total: Number of bytes in the whole file.
            title: Name of the file, which errors begin with.

        Raises:
            RecordError: The header is malformed, or contradicts the length of the file.
        """
        self._stream = stream
        self.title = title
        with self._blame():
            self.header = read_header(stream, total)

    @staticmethod
    def of(data: Bytes, title: str) -> TensorFile:
        """Return a file whose contents are in memory.

        Args:
            data: Contents of the file.
            title: Name of the file, which errors begin with.

        Raises:
            RecordError: The header is malformed, or contradicts the length of the data.
        """
        return TensorFile(io.BytesIO(data), len(data), title)

    @staticmethod
    @contextmanager
    def open(path: str | Path, max_bytes: int = 0) -> Iterator[TensorFile]:
        """Open a file on disk.

        Args:
            path: File to read.
            max_bytes: Bytes that the contents may take in memory. 0: half of the free memory.

        Raises:
            RecordError: It cannot be read, is no regular file, is too large, or its header is
                wrong.
        """
        try:
            status = Path(path).stat()
            if not stat.S_ISREG(status.st_mode):
                raise RecordError(f"{path} cannot be read: it is no regular file.")
            if problem := too_large(status.st_size, max_bytes):
                raise RecordError(f"{path} is not read: {problem}")
            stream = Path(path).open("rb")  # noqa: SIM115 (it is closed below)
        except OSError as error:
            raise RecordError(f"{path} cannot be read: {error.strerror or error}.") from error
        except ValueError as error:  # There is a NUL in the name.
            raise RecordError(f"{str(path)!r} cannot be read: {error}.") from error
        with stream:
            yield TensorFile(stream, status.st_size, str(path))

    @property
    def entries(self) -> Mapping[str, TensorEntry]:
        """Return the tensors as the header describes them, by name."""
        return self.header.entries

    @property
    def note(self) -> Any:
        """Return the note that fedquilt wrote, without the checksum of a sealed file."""
        with self._blame():
            note = self.header.note
        return (
            {key: value for key, value in note.items() if key != SEAL}
            if isinstance(note, dict)
            else note
        )

    @property
    def is_sealed(self) -> bool:
        """Return True if the file has a checksum.

        Files that other programs wrote have none.
        """
        with self._blame():
            return NOTE in self.header.metadata and self._seal is not None

    @property
    def _seal(self) -> object:
        """Return the checksum in the note, or None if there is none."""
        note = self.header.note
        return note.get(SEAL) if isinstance(note, dict) else None

    def tensors(self, device: torch.device, sealed: bool = False) -> dict[str, Tensor]:
        """Read all tensors, each into its own memory. It can be called once.

        Args:
            device: Device for the tensors.
            sealed: Compare the checksum in the note, which files of `Blob.sealed` have.

        Returns:
            Tensors by name, in the order of the header.

        Raises:
            RecordError: The file was cut short meanwhile, its checksum differs, or a bool is
                neither 0 nor 1.
        """
        with self._blame():
            digest = sealing(self.header.described, self.note) if sealed else None
            tensors = {}
            for name, entry in sorted(self.entries.items(), key=lambda pair: pair[1].offset):
                tensor = torch.empty(entry.shape, dtype=entry.dtype)
                raw = tensor.reshape(-1).view(torch.uint8)
                view = raw.numpy().data
                if entry.size:
                    num_bytes = self._stream.readinto(view)  # type: ignore[attr-defined]
                    if num_bytes != entry.size:
                        raise FormatError(f"it ends within {name}")
                if entry.dtype == torch.bool and entry.size and int(raw.max()) > 1:
                    raise FormatError(f"{name} is BOOL, and has bytes other than 0 and 1")
                if digest:
                    digest.update(view)
                tensors[name] = tensor.to(device)
            if digest and digest.hexdigest() != self._seal:
                raise FormatError(
                    "it is damaged, because its checksum differs from the one that was written"
                )
        return {name: tensors[name] for name in self.entries}

    @contextmanager
    def _blame(self) -> Iterator[None]:
        """Turn a FormatError inside the block into a RecordError that names the file."""
        try:
            yield
        except FormatError as error:
            raise RecordError(f"{self.title} cannot be read as safetensors: {error}.") from error


def check_finite(tensors: Mapping[str, Tensor], title: str) -> None:
    """Refuse tensors with values that are not finite.

    Args:
        tensors: Tensors by name.
        title: Name of the file for messages.

    Raises:
        RecordError: A value is NaN or infinite.
    """
    for name, tensor in tensors.items():
        if not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor  # float8 has no isfinite
        if not bool(wide.isfinite().all()):
            count = int((~wide.isfinite()).sum())
            raise RecordError(
                f"{title}: {count:,} of {tensor.numel():,} values of {name} are NaN or infinite. "
                "Train or export it again, or read it with allow_nan=True."
            )


# --- states -------------------------------------------------------------------------------------


class State(NamedTuple):
    """State of a server or of a client, as `Blob.of_state` takes it."""

    weights: dict[str, Tensor]
    slots: dict[str, dict[str, Tensor]]
    extras: dict[str, Tensor]
    note: dict[str, Any]


def read_state(file: TensorFile, device: torch.device) -> State:
    """Read a file that `Blob.of_state` wrote. Files of earlier versions have no extras.

    Args:
        file: File whose header is checked.
        device: Device for the tensors.

    Raises:
        RecordError: The file has tensors that are no part of a state.
    """
    note = file.note
    slots: dict[str, dict[str, Tensor]] = {}
    names = note.get("slots") if isinstance(note, dict) else None
    if isinstance(names, list) and all(isinstance(slot, str) for slot in names):
        slots = {slot: {} for slot in names}
    else:
        raise RecordError(f"{file.title} has no state of a run in it: its note lists no slots.")
    state = State({}, slots, {}, note)
    for path, value in file.tensors(device).items():
        kind, _, name = path.partition("/")
        slot, _, slotted = name.partition("/")
        if kind == "weights":
            state.weights[name] = value
        elif kind == "extras":
            state.extras[name] = value
        elif kind == "slots" and slot in slots:
            slots[slot][slotted] = value
        else:
            raise RecordError(
                f"{file.title} has a tensor {path!r}, which is no weight, slot or extra."
            )
    return state


# --- memory -------------------------------------------------------------------------------------


def memory_limit(max_bytes: int = 0) -> int:
    """Return the number of bytes that the contents of files may take in memory.

    Args:
        max_bytes: Limit that the user has set. 0: half of the free memory, or no limit
            if that cannot be determined.
    """
    from fedquilt.hardware.process import free_memory

    if max_bytes:
        return max_bytes
    try:
        return free_memory() // 2
    except ConfigError:
        return NO_LIMIT


def too_large(size: int, max_bytes: int = 0) -> str:
    """Return the reason why contents do not fit into memory, or an empty string if they do.

    Args:
        size: Bytes that the contents of a file take in memory.
        max_bytes: Bytes that they may take. 0: half of the free memory.
    """
    limit = memory_limit(max_bytes)
    if size <= limit:
        return ""
    bound = "max_bytes allows" if max_bytes else "half of the free memory is"
    return (
        f"it takes {size:,} bytes in memory, and {bound} {limit:,}. --max-bytes {size} "
        f"(max_bytes={size} in Python) reads it."
    )
