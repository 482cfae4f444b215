"""What the clients remember: held up to a bound, the least recently used on disk, and only changes are saved anew.

On disk a memory is a blob in a log. Logs of a checkpoint (packs) are never changed once written; the log of what
changed since and found no room (the spill) is a file without a name, which the system removes however the run ends:
it cannot be taken for saved state.
"""

from __future__ import annotations

import json
import os
import tempfile
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import BinaryIO
from weakref import finalize

import torch

from fedquilt.errors import RecordError
from fedquilt.files import Blob, Written, header, settled, why, write
from fedquilt.names import said
from fedquilt.tensor_files import MAX_NOTE_DEPTH, Bytes, TensorFile, bounded_json, read_state
from fedquilt.terms import Memory, Submodel, in_slots

Key = tuple[int, str]  # client and scope

LIMIT = 2 << 30  # bytes of memories held
LARGE = 64 << 20  # bytes of a pack: one that has as many is full
_TENSOR = 512  # about what a tensor takes besides its numbers
_SLACK = 64 << 20  # bytes of a spill that may be dead before it is written anew


class Memories(MutableMapping[Key, Memory]):
    """A server's memories. Iterates in order of client and scope, so that a resumed run sees the same order."""

    def __init__(
        self,
        limit: int = LIMIT,
        device: torch.device = torch.device("cpu"),
        spill_in: Path | None = None,
    ) -> None:
        self.limit = limit
        self.spill_in = spill_in  # None: the system's folder for temporary files
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._held: OrderedDict[Key, Memory] = OrderedDict()  # the least recently used first
        self._bytes = 0  # of those held
        self._where: dict[Key, Log] = {}  # of those on disk as they are now
        self._changed: dict[Key, None] = {}  # since the last checkpoint
        self._gone: set[Key] = set()  # deleted, which packs must be told
        self._packs: list[Pack] = []  # of the last checkpoint, the oldest first
        self._spill: Spill | None = None

    # --- a mapping ---------------------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> Memory:
        memory = self._held.get(key)
        if memory is not None:
            self._held.move_to_end(key)
        elif key in self:
            memory = _decoded(key, self._where[key].read(key), self._device)
            self._hold(key, memory)
        # Making room waits for a look-up: setting cannot fail, so a round's memories move on all or none, and a
        # checkpoint in between makes it free.
        self._make_room()
        if memory is None:
            raise KeyError(key)
        return memory

    def __setitem__(self, key: Key, memory: Memory) -> None:
        self._forget(key)
        self._gone.discard(key)
        self._changed[key] = None
        self._hold(key, _settled(memory))

    def __delitem__(self, key: Key) -> None:
        if key not in self:
            raise KeyError(key)
        self._forget(key)
        self._gone.add(key)
        self._changed[key] = None

    def __contains__(self, key: object) -> bool:
        return key not in self._gone and (key in self._held or key in self._where)

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted((self._held.keys() | self._where.keys()) - self._gone))

    def __len__(self) -> int:
        return len((self._held.keys() | self._where.keys()) - self._gone)

    def __bool__(self) -> bool:
        return any(key not in self._gone for keys in (self._held, self._where) for key in keys)

    def __repr__(self) -> str:
        return f"Memories of {len(self)} ({len(self._held)} held, {self._bytes:,} bytes of {self.limit:,})"

    # --- the bound ---------------------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """About what the memories that are held take."""
        return self._bytes

    def _hold(self, key: Key, memory: Memory) -> None:
        self._held[key] = memory
        self._bytes += _size(memory)

    def _forget(self, key: Key) -> None:
        if key in self._held:
            self._bytes -= _size(self._held.pop(key))
        if key in self._where:
            self._where.pop(key).forget(key)

    def _make_room(self) -> None:
        while self._bytes > self.limit and len(self._held) > 1:  # whoever asked last is served
            key, memory = next(iter(self._held.items()))
            if key not in self._where:
                if self._spill is None:
                    self._spill = Spill(self.spill_in)
                self._spill.put(key, encode(memory))
                self._where[key] = self._spill
            del self._held[key]
            self._bytes -= _size(memory)

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, path: Path) -> Draft:
        """Write what changed since the last checkpoint as a pack; `saved` makes it count, once all else is written.

        Of more than `LARGE` bytes it makes several, `path` with a number. Some older packs are copied along and thereby
        dropped; what is copied is paid for by what changed, now or before.
        """
        kept = self._worth_keeping(path.parent)
        copied = [pack for pack in self._packs if pack not in kept]
        sources: dict[Key, Log] = {key: pack for pack in copied for key in pack.entries}
        sizes = {key: log.entries[key][1] for key, log in sources.items()}
        blobs: dict[Key, Blob] = {}
        for key in self._changed:
            if key in self._gone:
                sizes[key] = 0  # how a pack says that a memory is gone
            elif key in self._where:
                sources[key] = self._where[key]
                sizes[key] = sources[key].entries[key][1]
            else:
                blobs[key] = blob = encode(self._held[key])
                sizes[key] = blob.size
        if not kept:  # nothing older is left that would have to be told
            sizes = {key: size for key, size in sizes.items() if size}

        def chunks(part: Mapping[Key, int]) -> Iterator[Bytes]:
            for key, size in part.items():
                if key in blobs:
                    yield from blobs[key].chunks()
                elif size:
                    yield sources[key].read(key)

        packs = []
        for place, part in enumerate(_parts(sizes)):
            head = header({_name(key): ("U8", (size,), size) for key, size in part.items()}, None)
            file = path.with_stem(f"{path.stem}-{place}") if place else path
            pack = Pack(file, write(file, chain([head], chunks(part))))
            pack.lay_out(part, len(head))
            packs.append(pack)
        return Draft(kept, packs)

    def _worth_keeping(self, folder: Path) -> list[Pack]:
        """The packs that a checkpoint in a folder need not copy.

        Copied are packs that are mostly outdated, so that disk use stays within about twice what is alive, but at a
        time no more than what changed or a large one; and the newest, while they are no larger than what is written
        anyway, so that packs grow geometrically and there are few.
        """
        size = self._size_of_changes()
        kept, room = [], max(size, LARGE)
        for pack in self._packs:
            mine = pack.path.parent == folder
            if mine and pack.entries and (2 * pack.live >= pack.written.size or pack.live > room):
                kept.append(pack)
            else:
                size += pack.live
                room -= pack.live
        while size and kept and kept[-1].live <= min(size, LARGE // 2):
            size += kept.pop().live
        return kept

    def _size_of_changes(self) -> int:
        return sum(
            self._where[key].entries[key][1] if key in self._where else _size(self._held[key])
            for key in self._changed
            if key not in self._gone
        )

    def saved(self, draft: Draft) -> None:
        """The draft is part of a checkpoint: all memories are as it has them."""
        self._packs = draft.packs
        if not draft.kept:  # then what the new packs do not have is nowhere
            self._where.clear()
            self._gone.clear()
        for pack in draft.new:
            self._where.update(dict.fromkeys(pack.entries, pack))
        self._changed.clear()
        self._spill = None

    def open(self, folder: Path, packs: Sequence[Written]) -> None:
        """Be as a checkpoint was: `packs`, the oldest first, already found to be intact."""
        self._reset()
        for written in packs:
            pack = Pack(folder / written.name, written)
            pack.read_entries()
            for key, (_, size) in pack.entries.items():
                if key in self._where:
                    self._where[key].forget(key)
                self._where[key] = pack
                (self._gone.discard if size else self._gone.add)(key)
            self._packs.append(pack)


@dataclass(frozen=True)
class Draft:
    """Packs for a checkpoint that is being written."""

    kept: list[Pack]
    new: list[Pack]

    @property
    def packs(self) -> list[Pack]:
        return [*self.kept, *self.new]


# --- on disk ----------------------------------------------------------------------------------------------------


class Log(ABC):
    """Blobs one behind another in a file; `entries` are those that are still current."""

    def __init__(self) -> None:
        self.entries: dict[Key, tuple[int, int]] = {}  # where it begins, and its size
        self.live = 0  # bytes of them

    def enter(self, key: Key, at: int, size: int) -> None:
        self.entries[key] = at, size
        self.live += size

    def forget(self, key: Key) -> None:
        self.live -= self.entries.pop(key)[1]

    @abstractmethod
    def read(self, key: Key) -> bytearray: ...

    def _read(self, file: BinaryIO, key: Key) -> bytearray:
        at, size = self.entries[key]
        data = bytearray(size)
        file.seek(at)
        if file.readinto(data) != size:  # type: ignore[attr-defined]
            raise RecordError(
                f"the memory of client {key[0]} was cut short on disk: {size:,} bytes were expected."
            )
        return data


class Pack(Log):
    """Memories as a checkpoint has them: a safetensors file of bytes by client, each a safetensors file itself."""

    def __init__(self, path: Path, written: Written) -> None:
        super().__init__()
        self.path = path
        self.written = written

    def lay_out(self, sizes: Mapping[Key, int], begin: int) -> None:
        """Enter blobs that follow one another."""
        for key, size in sizes.items():
            self.enter(key, begin, size)
            begin += size

    def read_entries(self) -> None:
        """Enter what the file's header says."""
        with self.path.open("rb") as stream:
            file = TensorFile(stream, os.fstat(stream.fileno()).st_size, str(self.path))
        for name, entry in file.entries.items():
            self.enter(_key(name), entry.offset, entry.size)

    def read(self, key: Key) -> bytearray:
        # Opened for each: a run may have more packs than a process may have files.
        try:
            with self.path.open("rb") as file:
                return self._read(file, key)
        except OSError as error:
            raise RecordError(
                f"the memory of client {key[0]} is in {self.path}, which cannot be read: {why(error)}."
            ) from error


class Spill(Log):
    """Memories that changed since the last checkpoint and found no room."""

    def __init__(self, folder: Path | None) -> None:
        super().__init__()
        self._folder = folder
        self._end = 0
        with self._blame():
            self._file = self._new()

    def _new(self) -> BinaryIO:
        file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 (it lives as long as the log)
        finalize(self, file.close)
        return file

    def put(self, key: Key, blob: Blob) -> None:
        with self._blame():
            if self._end > 2 * self.live + _SLACK:
                self._rewrite()
            self._file.seek(self._end)
            for chunk in blob.chunks():
                self._file.write(chunk)
            self._file.flush()
        self.enter(key, self._end, blob.size)
        self._end += blob.size

    def read(self, key: Key) -> bytearray:
        with self._blame():
            return self._read(self._file, key)

    def _rewrite(self) -> None:
        """Memories come and go; what is dead must not fill the disk."""
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
        try:
            yield
        except OSError as error:
            raise RecordError(
                "the clients' memories outgrew their bound, and what is beyond cannot be kept in "
                f"{self._folder or tempfile.gettempdir()}: {why(error)}. Free some space there, or raise the bound."
            ) from error


# --- one memory -------------------------------------------------------------------------------------------------


def encode(memory: Memory) -> Blob:
    """A memory as bytes, without loss."""
    submodel = json.dumps(memory.submodel.to_dict())
    note = {"submodel": submodel, "steps": memory.steps, "round": memory.round}
    return Blob.of_state(memory.weights, memory.slots, memory.extras, **note)


def decode(data: bytearray, device: torch.device) -> Memory:
    """What `encode` wrote."""
    state = read_state(TensorFile.of(data, "the memory of a client"), device)
    submodel, steps = state.note.get("submodel"), state.note.get("steps")
    last = state.note.get("round", -1)  # Earlier versions did not write it.
    if not isinstance(submodel, str) or not isinstance(steps, int) or not isinstance(last, int):
        raise RecordError(
            "the memory of a client does not say of which sub-model it is, and after how many steps."
        )
    return Memory(_submodel(submodel), state.weights, state.slots, steps, last, state.extras)


def _decoded(key: Key, data: bytearray, device: torch.device) -> Memory:
    """Return a memory that was read from disk.

    Raises:
        RecordError: The bytes are no memory. The message names the client.
    """
    try:
        return decode(data, device)
    except RecordError as error:
        raise RecordError(
            f"the memory of client {key[0]} on disk is not what was written: {error}"
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
            f"the memory of client {key[0]} on disk is not what was written: {said(error)}."
        ) from error


@lru_cache(maxsize=1024)  # clients that hold the same positions hold the same object
def _submodel(text: str) -> Submodel:
    return Submodel.from_dict(bounded_json(text.encode(), MAX_NOTE_DEPTH))


def _settled(memory: Memory) -> Memory:
    weights = settled(memory.weights)
    slots = {slot: settled(values) for slot, values in memory.slots.items()}
    return replace(memory, weights=weights, slots=slots, extras=settled(memory.extras))


def _size(memory: Memory) -> int:
    tensors = [*memory.weights.values(), *in_slots(memory.slots), *memory.extras.values()]
    return sum(tensor.nbytes + _TENSOR for tensor in tensors)


def _parts(sizes: Mapping[Key, int]) -> Iterator[dict[Key, int]]:
    """The blobs of each pack; all but the last are full."""
    part: dict[Key, int] = {}
    total = 0
    for key, size in sizes.items():
        part[key] = size
        total += size
        if total >= LARGE:
            yield part
            part, total = {}, 0
    if part:
        yield part


def _name(key: Key) -> str:
    return f"{key[0]}:{key[1]}"


def _key(name: str) -> Key:
    client, _, scope = name.partition(":")
    if not (client.isascii() and client.isdecimal()):
        raise RecordError(f"a memory of client {client!r} was found; clients are whole numbers.")
    return int(client), scope
