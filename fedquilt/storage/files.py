"""Files that survive a kill, because they are written completely or not at all.

Tensors are written in the safetensors format, bit for bit. The safetensors package is not used for
this, for three reasons. A file is streamed, so that its contents need not fit into memory twice. It
keeps the order of its tensors. It may hold tensors that share memory. Any reader of the format can
read it; fedquilt's own reader is `tensor_files`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import RecordError
from fedquilt.hardware.torch_internals import foreach_copy_
from fedquilt.storage.tensor_files import DTYPES, NOTE, SEAL, Bytes, sealing
from fedquilt.terms import Extras, Slots, Weights

TEMPORARY = ".tmp"  # Suffix of a file that is being written

# (dtype, shape, bytes) of tensors by name, in the order of the file.
Shapes = Mapping[str, tuple[str, tuple[int, ...], int]]

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """Name, size and checksum of a written file, to detect damage later."""

    name: str  # File name without its folder
    size: int  # Bytes of the file
    sha256: str  # Checksum in hexadecimal digits

    def damage(self, folder: Path) -> str:
        """Return a description of the file's damage, or an empty string if it is intact.

        Size and checksum are compared. A file that cannot be read counts as damaged.

        Args:
            folder: Folder that has the file.
        """
        path = folder / self.name
        try:
            if (size := path.stat().st_size) != self.size:
                return f"{self.name} has {size:,} bytes instead of {self.size:,}"
            with path.open("rb") as file:
                checksum = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{self.name} cannot be read: {why(error)}"
        if checksum != self.sha256:
            return f"{self.name} is not what was written: its checksum differs"
        return ""


def write(path: Path, chunks: Iterable[Bytes]) -> Written:
    """Write a file atomically, so that even a power cut leaves either the old or the new file.

    Args:
        path: File to write. An existing plain file is replaced.
        chunks: Contents of the file, in order.

    Returns:
        Name, size and checksum of the file.

    Raises:
        OSError: The file cannot be written, or the path is not a plain file.
    """
    # Without this check, root could replace /dev/null by a file.
    if path.exists() and not path.is_file():
        raise FileExistsError(errno.EEXIST, "the path is not a plain file")
    temporary = path.with_name(path.name + TEMPORARY)
    refuse_special(temporary)
    temporary.unlink(missing_ok=True)  # A killed process may have left one.
    size, digest = 0, hashlib.sha256()
    try:
        # "x" does not follow a link that another process creates meanwhile.
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return Written(path.name, size, digest.hexdigest())


def write_text(path: Path, text: str) -> None:
    """Write a text file in UTF-8 atomically, and create the folders above it.

    Raises:
        RecordError: The file could not be written.
    """
    try:
        make_folder(path.parent)
        write(path, [text.encode()])
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def refuse_special(path: Path) -> None:
    """Refuse a path that is a symbolic link, a FIFO, a socket or a device.

    A link would lead a reader or a writer out of the folder. A FIFO would block a reader forever.

    Raises:
        FileExistsError: The path is special. A path that does not exist is accepted.
    """
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(mode):
        raise FileExistsError(
            errno.EEXIST, f"{path.name} is a symbolic link, which is not followed", str(path)
        )
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise FileExistsError(errno.EEXIST, f"{path.name} is no plain file", str(path))


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents. A folder that exists stays as it is.

    The parent of each new folder is synced, so that a power cut loses none.
    """
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for new_folder in reversed(missing):
        sync_folder(new_folder.parent)


def why(error: OSError) -> str:
    """Return the reason that the system gives for an error, without number and file name."""
    return error.strerror or str(error)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that a rename in it survives a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- tensors ------------------------------------------------------------------------------------


def compact(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as they would be read back from a file: contiguous, each in its own memory.

    Tensors that are so already are detached and share their memory with `weights`. The others are
    copied. Tensors that are kept between rounds are stored like this, because the last bits of a
    product depend on strides and alignment. Without it, a resumed run would drift from one that was
    not interrupted. The result also keeps no larger tensor alive.
    """
    tensors = {name: value.detach() for name, value in weights.items()}
    loose = [
        name
        for name, value in tensors.items()
        if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes
    ]
    if loose:
        copies = [
            torch.empty_like(tensors[name], memory_format=torch.contiguous_format) for name in loose
        ]
        foreach_copy_(copies, [tensors[name] for name in loose])  # One launch copies all
        tensors.update(zip(loose, copies, strict=True))
    return tensors


@dataclass(frozen=True)
class Blob:
    """Tensors that are ready to be written to a file."""

    head: bytes  # Header of the file
    tensors: tuple[Tensor, ...]  # Tensors in the order of the header

    @staticmethod
    def of(tensors: Mapping[str, Tensor], note: Any) -> Blob:
        """Return a blob of tensors with a note in its header. Tensors are not copied.

        Args:
            tensors: Tensors by name, in the order of the file.
            note: Any other value that JSON can represent.
        """
        return Blob(header(_shapes(tensors), note), tuple(tensors.values()))

    @staticmethod
    def sealed(tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> Blob:
        """Return a blob whose note has a checksum of all contents, so that any change is detected.

        Args:
            tensors: Tensors by name, in the order of the file.
            note: Further entries of the note.
        """
        shapes = _shapes(tensors)
        note = json.loads(json.dumps(note))  # As it will be read back, with lists for tuples
        digest = sealing(_described(shapes), note)
        values = Blob(b"", tuple(tensors.values()))
        for chunk in values.chunks():
            digest.update(chunk)
        return Blob(header(shapes, {**note, SEAL: digest.hexdigest()}), values.tensors)

    @staticmethod
    def of_state(weights: Weights, slots: Slots, extras: Extras, **note: Any) -> Blob:
        """Return a blob of the state of a server or of a client, which `read_state` reads back.

        Args:
            weights: Weights by name.
            slots: Tensors by slot and weight name.
            extras: State of the method that is not cut, by name.
            note: Further entries of the note.
        """
        tensors = {f"weights/{name}": value for name, value in weights.items()}
        for slot, values in slots.items():
            tensors |= {f"slots/{slot}/{name}": value for name, value in values.items()}
        tensors |= {f"extras/{name}": value for name, value in extras.items()}
        return Blob.of(tensors, {**note, "slots": list(slots)})

    @property
    def size(self) -> int:
        """Return the number of bytes of the file."""
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)

    def chunks(self) -> Iterator[Bytes]:
        """Yield the contents of the file in order."""
        yield self.head
        for tensor in self.tensors:
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    """Return dtype, shape and number of bytes of every tensor, by name.

    Raises:
        RecordError: A tensor has a dtype that the safetensors format lacks.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise RecordError(
                f"{name} is {tensor.dtype}, which safetensors cannot hold; it can hold {supported}."
            )
    return {
        name: (_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }


def header(shapes: Shapes, note: Any) -> bytes:
    """Return the header of a safetensors file with its length in front, padded to 8 bytes.

    Args:
        shapes: Tensors, in the order in which their data follows.
        note: Value that is stored as JSON in the metadata.
    """
    text = json.dumps({"__metadata__": {NOTE: json.dumps(note)}, **_described(shapes)}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _described(shapes: Shapes) -> dict[str, Any]:
    """Return the entries of a header as JSON values: dtype, shape and offsets of each tensor."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, size) in shapes.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return entries
