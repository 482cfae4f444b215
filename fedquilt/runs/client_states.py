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
from fedquilt.storage.files import Blob, Written, compact, header, write
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
        """Forget all states and packs. Files on disk stay."""
        self._in_memory: OrderedDict[Key, ClientState] = OrderedDict()  # Least recently used first
        self._bytes = 0  # Bytes of the states in memory
        self._on_disk: dict[Key, Log] = {}  # Logs of the states whose current value is on disk
        self._changed: dict[Key, None] = {}  # States that changed since the last checkpoint
        self._deleted: set[Key] = set()  # Deleted states, which the next pack must record
        self._packs: list[Pack] = []  # Packs of the last checkpoint, oldest first
        self._spill: Spill | None = None

    # --- a mapping -------------------------------------------------------------------------------

    def __getitem__(self, key: Key) -> ClientState:
        state = self._in_memory.get(key)
        if state is not None:
            self._in_memory.move_to_end(key)
        elif key in self:
            state = decode_for(key, self._on_disk[key].read(key), self._device)
            self._hold(key, state)
        # States are moved to disk on look-up and not on assignment. Assignment then cannot fail,
        # so that either all states of a round are updated or none. A checkpoint in between writes
        # the changed states anyway.
        self._make_room()
        if state is None:
            raise KeyError(key)
        return state

    def __setitem__(self, key: Key, state: ClientState) -> None:
        self._forget(key)
        self._deleted.discard(key)
        self._changed[key] = None
        self._hold(key, _compact(state))

    def __delitem__(self, key: Key) -> None:
        if key not in self:
            raise KeyError(key)
        self._forget(key)
        self._deleted.add(key)
        self._changed[key] = None

    def __contains__(self, key: object) -> bool:
        return key not in self._deleted and (key in self._in_memory or key in self._on_disk)

    def __iter__(self) -> Iterator[Key]:
        return iter(sorted((self._in_memory.keys() | self._on_disk.keys()) - self._deleted))

    def __len__(self) -> int:
        return len((self._in_memory.keys() | self._on_disk.keys()) - self._deleted)

    def __bool__(self) -> bool:
        return any(
            key not in self._deleted for keys in (self._in_memory, self._on_disk) for key in keys
        )

    def __repr__(self) -> str:
        return (
            f"ClientStates of {len(self)} ({len(self._in_memory)} in memory, {self._bytes:,} bytes "
            f"of {self.limit:,})"
        )

    def snapshot(self) -> MutableMapping[Key, ClientState]:
        """Return all current states. Tensors are shared, because they are never changed in-place.

        If some states are only on disk, they are not read, and any access to the result raises an
        error.
        """
        if any(key not in self._in_memory and key not in self._deleted for key in self._on_disk):
            return NotKept()
        return {key: state for key, state in self._in_memory.items() if key not in self._deleted}

    # --- the bound -------------------------------------------------------------------------------

    @property
    def bytes(self) -> int:
        """Return the approximate bytes of the states in memory."""
        return self._bytes

    def _hold(self, key: Key, state: ClientState) -> None:
        self._in_memory[key] = state
        self._bytes += state_size(state)

    def _forget(self, key: Key) -> None:
        if key in self._in_memory:
            self._bytes -= state_size(self._in_memory.pop(key))
        if key in self._on_disk:
            self._on_disk.pop(key).forget(key)

    def _make_room(self) -> None:
        """Move the least recently used states to disk until the others are within the limit.

        The most recently used state stays, whatever its size. A state that disk already has
        unchanged is only dropped from memory.
        """
        while self._bytes > self.limit and len(self._in_memory) > 1:  # The last one is in use.
            key, state = next(iter(self._in_memory.items()))
            if key not in self._on_disk:
                if self._spill is None:
                    self._spill = Spill(self.spill_in)
                self._spill.put(key, encode(state))
                self._on_disk[key] = self._spill
            del self._in_memory[key]
            self._bytes -= state_size(state)

    # --- checkpoints -----------------------------------------------------------------------------

    def save(self, path: Path) -> Draft:
        """Write the states that changed since the last checkpoint into new packs.

        The first pack is the file `path`. A full pack (`FULL_PACK_BYTES`) is followed by another
        one, with a number in its name. States in older packs that are small or mostly outdated are
        copied into the new packs (`_worth_keeping`). This object does not delete the files of such
        packs.

        Returns:
            All packs of the new checkpoint. Once its other files are written too, pass this draft
            to `saved`. Until then the states still count as changed.
        """
        kept_packs = self._worth_keeping(path.parent)
        repacked = [pack for pack in self._packs if pack not in kept_packs]
        sources: dict[Key, Log] = {key: pack for pack in repacked for key in pack.entries}
        sizes = {key: log.entries[key][1] for key, log in sources.items()}
        blobs: dict[Key, Blob] = {}
        for key in self._changed:
            if key in self._deleted:
                sizes[key] = 0  # A size of 0 marks a deleted state in a pack.
            elif key in self._on_disk:
                sources[key] = self._on_disk[key]
                sizes[key] = sources[key].entries[key][1]
            else:
                blobs[key] = blob = encode(self._in_memory[key])
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

        Three kinds of packs are copied. (1) Packs in other folders. (2) Packs that are mostly
        outdated, so that disk use stays within about twice the current states. Their copied bytes
        are bounded by the bytes that changed, or by `FULL_PACK_BYTES` if these are fewer. (3) The
        newest packs, as long as they are no larger than what is written anyway. Packs then grow
        geometrically, so that there are few of them.
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
        """Return the bytes of the states that changed since the last checkpoint.

        Deleted states do not count. For states in memory the number is approximate.
        """
        return sum(
            self._on_disk[key].entries[key][1]
            if key in self._on_disk
            else state_size(self._in_memory[key])
            for key in self._changed
            if key not in self._deleted
        )

    def saved(self, draft: Draft) -> None:
        """Record that a checkpoint was completed, so that no state counts as changed.

        The spill is dropped, because the packs now have its states.

        Args:
            draft: Result of `save` for this checkpoint.
        """
        self._packs = draft.packs
        if not draft.kept:  # The new packs have all states.
            self._on_disk.clear()
            self._deleted.clear()
        for pack in draft.new:
            self._on_disk.update(dict.fromkeys(pack.entries, pack))
        self._changed.clear()
        self._spill = None

    def open(self, folder: Path, packs: Sequence[Written]) -> None:
        """Replace all states of this object by those of a checkpoint.

        Only the headers of the packs are read. A state is read when it is looked up.

        Args:
            folder: Folder of the packs.
            packs: Packs that were found intact, oldest first. Later ones take precedence.
        """
        self._reset()
        for written in packs:
            pack = Pack(folder / written.name, written)
            pack.read_entries()
            for key, (_, size) in pack.entries.items():
                if key in self._on_disk:
                    self._on_disk[key].forget(key)
                self._on_disk[key] = pack
                (self._deleted.discard if size else self._deleted.add)(key)
            self._packs.append(pack)


def copied(states: Mapping[Key, ClientState], device: torch.device) -> ClientStates:
    """Return client states in a new object with the default memory limit. Tensors are shared.

    Args:
        states: Client states by client and scope. Those on disk are read.
        device: Device for states that the copy later reads from disk.
    """
    copy = ClientStates(device=device)
    copy.update(states)
    return copy


class NotKept(MutableMapping[Key, ClientState]):
    """States of an earlier round that were not kept. Any access raises an error."""

    def __getitem__(self, key: Key) -> ClientState:
        raise self._error

    def __setitem__(self, key: Key, state: ClientState) -> None:
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
            "client states of an earlier round were asked for; they exceeded client_state_memory, "
            "and were not kept. A run with a folder (out=DIR) keeps them on disk."
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


def _compact(state: ClientState) -> ClientState:
    weights = compact(state.weights)
    slots = {slot: compact(values) for slot, values in state.slots.items()}
    return replace(state, weights=weights, slots=slots, extras=compact(state.extras))


def _pack_parts(sizes: Mapping[Key, int]) -> Iterator[dict[Key, int]]:
    """Divide blobs into packs, in their order. A pack ends with the blob at which it is full.

    Args:
        sizes: Bytes of each blob, by client and scope.

    Returns:
        An iterator over the packs, each as bytes by key. Nothing is yielded without blobs.
    """
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
