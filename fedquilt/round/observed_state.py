"""Plans that depend on the state of the server, which records keep.

The plans of most methods follow from the settings, the random seed and the round, so that a report
computes them again. A plan that reads weights, slots, extras or memories cannot be computed again,
because records have no state. It is detected by a state that notices when it is read, and its
positions become part of the record.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import TypeVar

from fedquilt.terms import Job, Server, Submodel

MAX_PLAN_BYTES = 10_000  # Largest plan of a client and round that a record keeps, as JSON
Key = TypeVar("Key")
Value = TypeVar("Value")


class ObservedState:
    """A server's state that notices whether anything but its round is read."""

    def __init__(self, server: Server) -> None:
        self.was_read = False
        self.server = replace(
            server,
            weights=_Observed(server.weights, self),
            slots=_Observed(server.slots, self),
            extras=_Observed(server.extras, self),
            memory=_ObservedMemory(server.memory, self),
        )


class _Observed(Mapping[Key, Value]):
    """A part of the state that reports every access to its owner."""

    def __init__(self, content: Mapping[Key, Value], owner: ObservedState) -> None:
        self._content = content
        self._owner = owner

    def __getitem__(self, key: Key) -> Value:
        self._owner.was_read = True
        return self._content[key]

    def __iter__(self) -> Iterator[Key]:
        self._owner.was_read = True
        return iter(self._content)

    def __len__(self) -> int:
        self._owner.was_read = True
        return len(self._content)


class _ObservedMemory(_Observed[Key, Value], MutableMapping[Key, Value]):
    """The memories of clients. A plan that changes them changes the state itself."""

    _content: MutableMapping[Key, Value]

    def __setitem__(self, key: Key, value: Value) -> None:
        self._content[key] = value

    def __delitem__(self, key: Key) -> None:
        del self._content[key]


def recorded_plans(jobs: Sequence[Job]) -> dict[int, tuple[Submodel, ...]]:
    """Return the sub-models of each client. A plan of more than `MAX_PLAN_BYTES` is left empty.

    Positions are written as runs of neighbours.

    Args:
        jobs: Jobs of a round.
    """
    plans: dict[int, tuple[Submodel, ...]] = {}
    for job in jobs:
        plans[job.client.id] = (*plans.get(job.client.id, ()), job.submodel)
    return {
        client: submodels if _num_bytes(submodels) <= MAX_PLAN_BYTES else ()
        for client, submodels in plans.items()
    }


def _num_bytes(submodels: Sequence[Submodel]) -> int:
    return len(json.dumps([submodel.to_dict() for submodel in submodels]))
