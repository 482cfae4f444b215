"""Files that survive a kill: written whole or not at all; tensors in the safetensors format, bit for bit.

The format is written here and not by the safetensors package because a file is streamed (what it holds need not fit
into memory twice), keeps the order of its tensors, and may hold tensors that share memory. Any reader of the format
reads it; fedquilt's own is `tensor_files`.
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
from fedquilt.tensor_files import DTYPES, NOTE, SEAL, Bytes, sealing
from fedquilt.terms import Extras, Slots, Weights

TEMPORARY = ".tmp"  # how the name of a file ends that is not yet whole

Shapes = Mapping[
    str, tuple[str, tuple[int, ...], int]
]  # (dtype, shape, bytes) of tensors by name, in their order

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Written:
    """A file as it should be found again."""

    name: str
    size: int
    sha256: str

    def damage(self, folder: Path) -> str:
        """What is wrong with the file now; nothing, if it is as it was written."""
        path = folder / self.name
        try:
            if (size := path.stat().st_size) != self.size:
                return f"{self.name} has {size:,} bytes instead of {self.size:,}"
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            return f"{self.name} cannot be read: {why(error)}"
        return (
            ""
            if found == self.sha256
            else f"{self.name} is not what was written: its checksum differs"
        )


def write(path: Path, chunks: Iterable[Bytes]) -> Written:
    """Write a file that is there whole or not at all, whenever the power goes; until then the old one stays."""
    if (
        path.exists() and not path.is_file()
    ):  # as root one would put a file in the place of /dev/null
        raise FileExistsError(errno.EEXIST, "what is there is no file")
    temporary = path.with_name(path.name + TEMPORARY)
    refuse_special(temporary)
    temporary.unlink(missing_ok=True)  # A kill may have left one.
    size, digest = 0, hashlib.sha256()
    try:
        with temporary.open(
            "xb"
        ) as file:  # "x": a link that somebody makes meanwhile is not followed
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
    """Write a text file whole or not at all, and make the folders above it.

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

    A link would lead a reader or a writer out of the folder. A FIFO would let a reader wait forever.

    Raises:
        FileExistsError: As above. A path that does not exist is accepted.
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
    """Make a folder and those above it, and sync the folder above each new one, so that a power cut loses none."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for one in reversed(missing):
        sync_folder(one.parent)


def why(error: OSError) -> str:
    """What the system says went wrong."""
    return error.strerror or str(error)


def sync_folder(folder: Path) -> None:
    """A rename is on disk when the folder is."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# --- tensors ----------------------------------------------------------------------------------------------------


def settled(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as they would be read back: contiguous, each in memory of its own.

    What is kept between rounds is kept like this, because the last bits of a product depend on strides and alignment:
    else a resumed run would drift from one that was not interrupted. It also holds on to no larger tensor.
    """
    found = {name: value.detach() for name, value in weights.items()}
    loose = [
        name
        for name, value in found.items()
        if not value.is_contiguous() or value.untyped_storage().nbytes() != value.nbytes
    ]
    if loose:
        own = [
            torch.empty_like(found[name], memory_format=torch.contiguous_format) for name in loose
        ]
        torch._foreach_copy_(own, [found[name] for name in loose])  # one launch for all of them
        found.update(zip(loose, own, strict=True))
    return found


@dataclass(frozen=True)
class Blob:
    """Tensors on their way into a file."""

    head: bytes
    tensors: tuple[Tensor, ...]

    @staticmethod
    def of(tensors: Mapping[str, Tensor], note: Any) -> Blob:
        """`note` is whatever else JSON can say."""
        return Blob(header(_shapes(tensors), note), tuple(tensors.values()))

    @staticmethod
    def sealed(tensors: Mapping[str, Tensor], note: Mapping[str, Any]) -> Blob:
        """Return tensors whose note has a checksum of all that is in the file, so that any change is noticed."""
        shapes = _shapes(tensors)
        note = json.loads(json.dumps(note))  # as it will be read, with lists in place of tuples
        digest = sealing(_described(shapes), note)
        values = Blob(b"", tuple(tensors.values()))
        for chunk in values.chunks():
            digest.update(chunk)
        return Blob(header(shapes, {**note, SEAL: digest.hexdigest()}), values.tensors)

    @staticmethod
    def of_state(weights: Weights, slots: Slots, extras: Extras, **note: Any) -> Blob:
        """Return the weights, slots and extras of a server or of a client."""
        tensors = {f"weights/{name}": value for name, value in weights.items()}
        for slot, values in slots.items():
            tensors |= {f"slots/{slot}/{name}": value for name, value in values.items()}
        tensors |= {f"extras/{name}": value for name, value in extras.items()}
        return Blob.of(tensors, {**note, "slots": list(slots)})

    @property
    def size(self) -> int:
        return len(self.head) + sum(tensor.nbytes for tensor in self.tensors)

    def chunks(self) -> Iterator[Bytes]:
        yield self.head
        for tensor in self.tensors:
            yield tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _shapes(tensors: Mapping[str, Tensor]) -> Shapes:
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _NAMES)
            raise RecordError(
                f"{name} is {tensor.dtype}, which safetensors cannot hold; it can hold {known}."
            )
    return {
        name: (_NAMES[tensor.dtype], tuple(tensor.shape), tensor.nbytes)
        for name, tensor in tensors.items()
    }


def header(shapes: Shapes, note: Any) -> bytes:
    """Return how a safetensors file begins whose tensors follow in the order of `shapes`."""
    text = json.dumps({"__metadata__": {NOTE: json.dumps(note)}, **_described(shapes)}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _described(shapes: Shapes) -> dict[str, Any]:
    """Return the entries of a header."""
    entries: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape, size) in shapes.items():
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return entries
