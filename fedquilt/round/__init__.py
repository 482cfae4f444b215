"""One federated round, in the order of the data: clients → cut → link → local → merge → serve."""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedquilt.errors import DivergenceError
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.budgets import planned
from fedquilt.round.client import are_finite, memory_of
from fedquilt.round.deadline import round_seconds, train_until_deadline
from fedquilt.round.engine import Attendance
from fedquilt.round.evaluate import Evaluation, Grades, grade
from fedquilt.round.learning import learn
from fedquilt.round.merge import Merged, merged_of
from fedquilt.storage.files import settled
from fedquilt.terms import ClientState, Job, Server

if TYPE_CHECKING:
    from torch import Tensor

    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import Federation
    from fedquilt.round.method import Method

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """Figures of one round, as a line of `rounds.jsonl` has them."""

    round: int  # Number of the round, counted from 1
    seconds: float  # Wall-clock time of the round, with its evaluation
    clients: int  # Clients in the cohort
    bytes_down: int  # Bytes that arrived at clients
    bytes_up: int  # Bytes that arrived at the server
    macs: int  # Multiply-adds of the clients' training
    loss: float | None  # Mean training loss. None: no client took part
    stacks: int = 0  # Number of groups of clients that were trained as one. Not written to the file
    grades: Grades = field(default_factory=Grades)  # Metrics, if the round was evaluated
    # Simulated time of the slowest client. None: the link has no clock
    link_seconds: float | None = None
    missing: int = 0  # Clients of the cohort that did not reply
    # Time of the server's own training. None: the server does not train
    server_seconds: float | None = None
    server_macs: int = 0  # Multiply-adds of the server, of its teachers' outputs and its training
    server_steps: int = 0  # Optimizer steps of all nets that the server trained
    bytes_first: int = 0  # Bytes of `bytes_down` that clients get once, such as their private nets
    # Clients whose update came after the deadline. None: the link has no deadline
    late: tuple[int, ...] | None = None
    # Requests to devices and what became of them. None: clients are simulated
    attendance: Attendance | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values.

        `accuracy`, `metrics` and `main` are present only if the round was evaluated. `validation`
        is present if validation samples were tested in addition to the test set. `main` names the
        metric that tables, targets and trackers use. `accuracy` is empty if the task has none.
        """
        record = {
            name: value
            for name, value in vars(self).items()
            if name not in ("grades", "stacks", "late", "attendance")
        }
        if self.link_seconds is None:
            del record["link_seconds"]
        if self.late is not None:
            record |= {"late": len(self.late), "late_clients": list(self.late)}
        if self.attendance is not None:
            record["attendance"] = self.attendance.to_dict()
        for name in ("missing", "bytes_first"):
            if not record[name]:
                del record[name]
        if self.server_seconds is None:
            for name in ("server_seconds", "server_macs", "server_steps"):
                del record[name]
        if self.grades.main:
            grades = self.grades
            record |= {"accuracy": grades.accuracy, "metrics": grades.metrics, "main": grades.main}
            record |= {"validation": grades.validation} if grades.validation else {}
        return record

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Record:
        """Return the record that `to_dict` wrote.

        Records of earlier versions have `accuracy` next to `metrics`, not in it. They are read too.
        """
        grade_keys = ("accuracy", "metrics", "main", "validation", "late_clients")
        values = {name: value for name, value in plain.items() if name not in grade_keys}
        if "late" in plain:
            values["late"] = tuple(plain["late_clients"])
        if "attendance" in plain:
            values["attendance"] = Attendance.from_dict(plain["attendance"])
        if "accuracy" not in plain:
            return Record(**values)
        metrics = (
            plain["metrics"]
            if "main" in plain
            else {"accuracy": plain["accuracy"], **plain["metrics"]}
        )
        return Record(
            **values,
            grades=Grades(plain.get("main", "accuracy"), metrics, plain.get("validation", {})),
        )


@dataclass(frozen=True)
class RoundResult:
    """Result of a round that succeeded but is not yet committed to the run."""

    server: Server  # New state, still with the memories of the round before.
    memory: Mapping[tuple[int, str], ClientState]  # Memories that changed, by client and scope.
    record: Record
    late: Mapping[int, float]  # Least seconds that each client takes that missed the deadline.


def run_round(
    federation: Federation,
    server: Server,
    fleet: Fleet,
    engine: Engine,
    rounds: int,
    evaluation: Evaluation,
) -> RoundResult:
    """Run the next round. No argument is modified.

    Args:
        federation: World, method and link.
        server: State that the round starts from.
        fleet: Clients, their budgets and their sampling.
        engine: Engine that trains and tests clients.
        rounds: Number of rounds of the run. The last one is always evaluated.
        evaluation: Settings of the evaluation.
    """
    began, world, method = time.perf_counter(), federation.world, federation.method
    cohort = [
        fleet.client(id, server.round, world.seed, engine.size(id), position)
        for position, id in enumerate(fleet.draw_cohort(server.round, world.seed, engine.online()))
    ]
    jobs = [
        Job(c, submodel, server.round)
        for c in cohort
        for submodel in planned(method, server, c, world)
    ]
    if method.keeps_nets:
        for job in jobs:
            method.resumed(job, memory_of(server, job), world)
    outcome, fold = train_until_deadline(federation, server, jobs, engine)
    for client, why in outcome.missing.items():
        _log.warning("client %d did not answer in round %d: %s", client, server.round + 1, why)
    merged = merged_of(method, fold, server)
    _check_merged(method, server, merged)
    new_server = replace(
        server,
        round=server.round + 1,
        weights=settled(merged.weights),
        slots={slot: settled(values) for slot, values in merged.slots.items()},
        extras=settled(merged.extras),
    )
    new_server, learnt = learn(federation, new_server, merged, engine)
    grades = Grades()
    if evaluation.due(new_server.round, rounds):
        remembered = replace(new_server, memory=ChainMap(outcome.memory, server.memory))
        grades = grade(federation, remembered, fleet, engine, evaluation)
    total, copies = outcome.total, method.copies
    record = Record(
        round=new_server.round,
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
        link_seconds=round_seconds(federation, outcome),
        server_seconds=learnt.seconds if learnt.macs else None,
        server_macs=learnt.macs,
        server_steps=learnt.steps,
        late=None if federation.link.deadline is None else tuple(sorted(outcome.late)),
        attendance=outcome.attendance,
    )
    return RoundResult(new_server, outcome.memory, record, outcome.late)


def _check_merged(method: Method, server: Server, merged: Merged) -> None:
    """Refuse a merge whose result is not finite.

    Engines have checked that all updates are finite, so that the fold is to blame. Without this
    check the clients of the next round would be blamed. Values that were infinite before the merge
    are allowed, because buffers such as masks may be infinite.
    """
    pairs = [(server.weights, merged.weights)]
    pairs += [(server.slots.get(slot, {}), values) for slot, values in merged.slots.items()]
    for old, new in pairs:
        if are_finite(new.values()):
            continue
        infinite_names = [
            name
            for name, value in new.items()
            if not are_finite([value]) and _was_finite(old, name)
        ]
        if infinite_names:
            raise DivergenceError(
                f"the fold of {type(method).__name__} gave values that are not finite in round "
                f"{server.round + 1}, "
                "although all updates of clients are finite: "
                f"{', '.join(infinite_names[:3])}{', …' if len(infinite_names) > 3 else ''}. "
                "The server's state is that of the round before. A smaller learning rate of the "
                "server "
                "(method.server_optimizer) may help, or a correction of the fold."
            )


def _was_finite(before: Mapping[str, Tensor], name: str) -> bool:
    return name not in before or are_finite([before[name]])


__all__ = ["Evaluation", "Fleet", "Grades", "Record", "RoundResult", "run_round"]
