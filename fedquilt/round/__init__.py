"""One federated round, in the order the data flows: clients → cut → link → local → merge → serve."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedquilt.errors import DivergenceError
from fedquilt.files import settled
from fedquilt.round.budgets import planned
from fedquilt.round.client import are_finite, memory_of
from fedquilt.round.clients import Fleet
from fedquilt.round.learning import learn
from fedquilt.round.merge import Merged
from fedquilt.round.serve import Evaluation, Grades, grade
from fedquilt.terms import Job, Memory, Server

if TYPE_CHECKING:
    from torch import Tensor

    from fedquilt.methods import Method
    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import Federation

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One round, as `rounds.jsonl` has it."""

    round: int
    seconds: float
    clients: int
    bytes_down: int
    bytes_up: int
    macs: int
    loss: float | None  # None: nobody was there to take part
    stacks: int = 0  # how many groups of clients were trained as one; not written down
    grades: Grades = field(default_factory=Grades)
    link_seconds: float | None = (
        None  # what the slowest client would take; None: the link has no clock
    )
    missing: int = 0  # Clients of the cohort that did not answer.
    server_seconds: float | None = (
        None  # Time of the server's own training; None: it does not learn
    )
    server_macs: int = 0  # Multiply-adds of the server, of its teachers' outputs and its training
    server_steps: int = 0  # Optimizer steps of all nets that the server trained
    bytes_first: int = 0  # Bytes of `bytes_down` that clients get once, such as their private nets

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `accuracy`, `metrics` and `main` only when the round was evaluated.

        `main` names the metric that tables, targets and trackers use. `accuracy` is empty where the task has none.
        """
        record = {
            name: value for name, value in vars(self).items() if name not in ("grades", "stacks")
        }
        if self.link_seconds is None:
            del record["link_seconds"]
        for name in ("missing", "bytes_first"):
            if not record[name]:
                del record[name]
        if self.server_seconds is None:
            for name in ("server_seconds", "server_macs", "server_steps"):
                del record[name]
        if self.grades.main:
            grades = self.grades
            record |= {"accuracy": grades.accuracy, "metrics": grades.metrics, "main": grades.main}
        return record

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Record:
        """Return the record that `to_dict` wrote. Earlier versions had accuracy beside the other metrics alone."""
        rest = {
            name: value
            for name, value in plain.items()
            if name not in ("accuracy", "metrics", "main")
        }
        if "accuracy" not in plain:
            return Record(**rest)
        metrics = (
            plain["metrics"]
            if "main" in plain
            else {"accuracy": plain["accuracy"], **plain["metrics"]}
        )
        return Record(**rest, grades=Grades(plain.get("main", "accuracy"), metrics))


@dataclass(frozen=True)
class Played:
    """A round that succeeded and does not count yet."""

    server: Server  # its memories are those of the round before
    memory: Mapping[tuple[int, str], Memory]  # those that changed
    record: Record


def play(
    federation: Federation,
    server: Server,
    fleet: Fleet,
    engine: Engine,
    rounds: int,
    evaluation: Evaluation,
) -> Played:
    """Run the next of `rounds` rounds. Nothing that was handed in changes."""
    began, world, method = time.perf_counter(), federation.world, federation.method
    cohort = [
        fleet.client(id, server.round, world.seed, engine.size(id), place)
        for place, id in enumerate(fleet.cohort(server.round, world.seed, engine.online()))
    ]
    jobs = [
        Job(c, submodel, server.round)
        for c in cohort
        for submodel in planned(method, server, c, world)
    ]
    if method.keeps_nets:
        for job in jobs:
            method.resumed(job, memory_of(server, job), world)
    fold = method.fold(server, world)
    outcome = engine.train(federation, server, jobs, fold)
    for client, why in outcome.missing.items():
        _log.warning("client %d did not answer in round %d: %s", client, server.round + 1, why)
    merged = Merged(*fold.finish(server))
    _check_merged(method, server, merged)
    after = replace(
        server,
        round=server.round + 1,
        weights=settled(merged.weights),
        slots={slot: settled(values) for slot, values in merged.slots.items()},
        extras=settled(merged.extras),
    )
    after, learnt = learn(federation, after, merged, engine)
    grades = Grades()
    if evaluation.due(after.round, rounds):
        remembered = replace(after, memory=ChainMap(outcome.memory, server.memory))
        grades = grade(federation, remembered, fleet, engine, evaluation)
    total, copies, clock = outcome.total, method.copies, federation.link.clock
    record = Record(
        round=after.round,
        seconds=time.perf_counter() - began,
        clients=len(cohort),
        missing=len(outcome.missing),
        bytes_down=total.down * copies,
        bytes_up=total.up * copies,
        bytes_first=total.first * copies,
        macs=total.macs,
        loss=sum(outcome.losses) / len(outcome.losses) if outcome.losses else None,
        stacks=outcome.stacks,
        grades=grades,
        link_seconds=clock.slowest(outcome.costs, copies) if clock else None,
        server_seconds=learnt.seconds if learnt.macs else None,
        server_macs=learnt.macs,
        server_steps=learnt.steps,
    )
    return Played(after, outcome.memory, record)


def _check_merged(method: Method, server: Server, merged: Merged) -> None:
    """Refuse a merge whose result is not finite, because the updates were: engines check them before they are folded.

    Without this check the clients of the next round would be blamed. Buffers may be infinite from the beginning, as
    masks are.
    """
    pairs = [(server.weights, merged.weights)]
    pairs += [(server.slots.get(slot, {}), values) for slot, values in merged.slots.items()]
    for before, after in pairs:
        if are_finite(after.values()):
            continue
        wrong = [
            name
            for name, value in after.items()
            if not are_finite([value]) and _was_finite(before, name)
        ]
        if wrong:
            raise DivergenceError(
                f"the fold of {type(method).__name__} gave values that are not finite in round {server.round + 1}, "
                f"although all updates of clients are finite: {', '.join(wrong[:3])}{', …' if len(wrong) > 3 else ''}. "
                "The server's state is that of the round before. A smaller learning rate of the server (method.server) "
                "may help, or a correction of the fold."
            )


def _was_finite(before: Mapping[str, Tensor], name: str) -> bool:
    return name not in before or are_finite([before[name]])


__all__ = ["Evaluation", "Fleet", "Grades", "Played", "Record", "play"]
