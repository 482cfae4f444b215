"""States that clients keep between rounds, in memory up to a limit and on disk beyond it.

The least recently used states are moved to disk, and a checkpoint saves only those that changed. On
disk a state is a blob in a log. Logs of a checkpoint (packs) are never changed after they are
written. States that changed since then and exceed the limit are in a temporary log (the spill). The
spill has no file name and the system removes it when the process ends, so that it is never mistaken
for saved state.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import torch

from fedquilt.errors import RecordError
from fedquilt.runs.client_state_logs import (
    Key,
    Log,
    Pack,
    Spill,
    decode_for,
    encode,
    entry_name,
    state_size,
)
from fedquilt.storage.files import Blob, Written, header, settled, write
from fedquilt.storage.tensor_files import Bytes
from fedquilt.terms import ClientState

DEFAULT_LIMIT = 2 << 30  # Bytes of client states that are kept in memory by default

FULL_PACK_BYTES = 64 << 20  # Bytes at which a pack is full


class ClientStates(MutableMapping[Key, ClientState]):
    """A server's client states. Iteration is in order of client and scope, also after resuming."""

    def __init__(
        self,
        limit: int = DEFAULT_LIMIT,
        device: torch.device = torch.device("cpu"),
        spill_in: Path | None = None,
    ) -> None:
        self.limit = limit
        self.spill_in = spill_in  # Folder of the spill. None: the system's temporary folder
        self._device = device
        self._reset()

    def _reset(self) -> None:
        self._held: OrderedDict[Key, ClientState] = OrderedDict()  # Least recently used first
        self._bytes = 0  # Bytes of the states in memory
        self._where: dict[Key, Log] = {}  # Logs of the states whose current value is on disk
        self._changed: dict[Key, None] = {}  # States that changed since the last checkpoint
        self._gone: set[Key] = set()  # Deleted states, which the next pack must record
        self._packs: list[Pack] = []  # Packs of the last checkpoint, oldest first
        self._spill: Spill | None = None

    # --- a mapping -------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> ClientState:
        memory = self._held.get(key)
        if memory is not None:
            self._held.move_to_end(key)
        elif key in self:
            memory = decode_for(key, self._where[key].read(key), self._device)
            self._hold(key, memory)
        # States are moved to disk on look-up and not on assignment. Assignment then cannot fail,
        # so that either all states of a round are updated or none. A checkpoint in between writes
        # the changed states anyway.
        self._make_room()
        if memory is None:
            raise KeyError(key)
        return memory

    def __setitem__(self, key: Key, memory: ClientState) -> None:
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
        return (
            f"ClientStates of {len(self)} ({len(self._held)} held, {self._bytes:,} bytes of "
            f"{self.limit:,})"
        )

    def snapshot(self) -> MutableMapping[Key, ClientState]:
        """Return all current states. Tensors are shared, because they are never changed in-place.

        If some states are only on disk, they are not read, and any access to the result raises an
        error.
        """
        if any(key not in self._held and key not in self._gone for key in self._where):
            return NotKept()
        return {key: memory for key, memory in self._held.items() if key not in self._gone}

    # --- the bound -------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Return the approximate bytes of the states in memory."""
        return self._bytes

    def _hold(self, key: Key, memory: ClientState) -> None:
        self._held[key] = memory
        self._bytes += state_size(memory)

    def _forget(self, key: Key) -> None:
        if key in self._held:
            self._bytes -= state_size(self._held.pop(key))
        if key in self._where:
            self._where.pop(key).forget(key)

    def _make_room(self) -> None:
        while self._bytes > self.limit and len(self._held) > 1:  # The last one is in use.
            key, memory = next(iter(self._held.items()))
            if key not in self._where:
                if self._spill is None:
                    self._spill = Spill(self.spill_in)
                self._spill.put(key, encode(memory))
                self._where[key] = self._spill
            del self._held[key]
            self._bytes -= state_size(memory)

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, path: Path) -> Draft:
        """Write the states that changed since the last checkpoint as a new pack.

        `saved` must be called once the whole checkpoint is written. More than `LARGE` bytes make
        several packs, whose names are `path` with a number. Some older packs are copied into the
        new one and thereby dropped. The copied bytes are bounded by the bytes that changed, now or
        earlier.
        """
        kept_packs = self._worth_keeping(path.parent)
        copied = [pack for pack in self._packs if pack not in kept_packs]
        sources: dict[Key, Log] = {key: pack for pack in copied for key in pack.entries}
        sizes = {key: log.entries[key][1] for key, log in sources.items()}
        blobs: dict[Key, Blob] = {}
        for key in self._changed:
            if key in self._gone:
                sizes[key] = 0  # A size of 0 marks a deleted state in a pack.
            elif key in self._where:
                sources[key] = self._where[key]
                sizes[key] = sources[key].entries[key][1]
            else:
                blobs[key] = blob = encode(self._held[key])
                sizes[key] = blob.size
        if not kept_packs:  # No older pack has the deleted states.
            sizes = {key: size for key, size in sizes.items() if size}

        def chunks(part: Mapping[Key, int]) -> Iterator[Bytes]:
            for key, size in part.items():
                if key in blobs:
                    yield from blobs[key].chunks()
                elif size:
                    yield sources[key].read(key)

        packs = []
        for number, part in enumerate(_pack_parts(sizes)):
            head = header(
                {entry_name(key): ("U8", (size,), size) for key, size in part.items()}, None
            )
            file = path.with_stem(f"{path.stem}-{number}") if number else path
            pack = Pack(file, write(file, chain([head], chunks(part))))
            pack.lay_out(part, len(head))
            packs.append(pack)
        return Draft(kept_packs, packs)

    def _worth_keeping(self, folder: Path) -> list[Pack]:
        """Return the packs that a checkpoint in a folder keeps without copying them.

        Two kinds of packs are copied. (1) Packs that are mostly outdated, so that disk use stays
        within about twice the current states. The copied bytes are bounded by the bytes that
        changed, or by `LARGE`. (2) The newest packs, as long as they are no larger than what is
        written anyway. Packs then grow geometrically, so that there are few of them.
        """
        size = self._size_of_changes()
        kept_packs, room = [], max(size, FULL_PACK_BYTES)
        for pack in self._packs:
            is_in_folder = pack.path.parent == folder
            if (
                is_in_folder
                and pack.entries
                and (2 * pack.live >= pack.written.size or pack.live > room)
            ):
                kept_packs.append(pack)
            else:
                size += pack.live
                room -= pack.live
        while size and kept_packs and kept_packs[-1].live <= min(size, FULL_PACK_BYTES // 2):
            size += kept_packs.pop().live
        return kept_packs

    def _size_of_changes(self) -> int:
        return sum(
            self._where[key].entries[key][1] if key in self._where else state_size(self._held[key])
            for key in self._changed
            if key not in self._gone
        )

    def saved(self, draft: Draft) -> None:
        """Record that a draft is part of a checkpoint, so that no state counts as changed."""
        self._packs = draft.packs
        if not draft.kept:  # The new packs have all states.
            self._where.clear()
            self._gone.clear()
        for pack in draft.new:
            self._where.update(dict.fromkeys(pack.entries, pack))
        self._changed.clear()
        self._spill = None

    def open(self, folder: Path, packs: Sequence[Written]) -> None:
        """Restore the states of a checkpoint.

        Args:
            folder: Folder of the packs.
            packs: Packs that were found intact, oldest first.
        """
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


def copied(memory: Mapping[Key, ClientState], device: torch.device) -> ClientStates:
    """Return a copy of client states. Tensors are shared."""
    states = ClientStates(device=device)
    states.update(memory)
    return states


class NotKept(MutableMapping[Key, ClientState]):
    """States of an earlier round that were not kept. Any access raises an error."""

    def __getitem__(self, key: Key) -> ClientState:
        raise self._error

    def __setitem__(self, key: Key, memory: ClientState) -> None:
        raise self._error

    def __delitem__(self, key: Key) -> None:
        raise self._error

    def __iter__(self) -> Iterator[Key]:
        raise self._error

    def __len__(self) -> int:
        raise self._error

    @property
    def _error(self) -> RecordError:
        return RecordError(
            "what clients remembered in an earlier round was asked for; it was more than "
            "memory_limit allows to hold, and was not kept. A run with a folder (out=DIR) keeps it "
            "on disk."
        )


@dataclass(frozen=True)
class Draft:
    """The packs of a checkpoint that is being written."""

    kept: list[Pack]  # Packs of the last checkpoint that this one lists, too
    new: list[Pack]  # Packs that were written for this checkpoint

    @property
    def packs(self) -> list[Pack]:
        """Return all packs of the checkpoint, oldest first."""
        return [*self.kept, *self.new]


def _settled(memory: ClientState) -> ClientState:
    weights = settled(memory.weights)
    slots = {slot: settled(values) for slot, values in memory.slots.items()}
    return replace(memory, weights=weights, slots=slots, extras=settled(memory.extras))


def _pack_parts(sizes: Mapping[Key, int]) -> Iterator[dict[Key, int]]:
    """Divide blobs into packs, by key and size. All packs but the last are full."""
    part: dict[Key, int] = {}
    total = 0
    for key, size in sizes.items():
        part[key] = size
        total += size
        if total >= FULL_PACK_BYTES:
            yield part
            part, total = {}, 0
    if part:
        yield part
