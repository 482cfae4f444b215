"""One federated round, in the order the data flows: clients → cut → link → local → merge → serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fedquilt.round.clients import Fleet
from fedquilt.round.serve import Evaluation, Grades, grade
from fedquilt.terms import Job, Server

if TYPE_CHECKING:
    from fedquilt.engines import Engine
    from fedquilt.methods import Method


@dataclass(frozen=True)
class Record:
    """One round, as `rounds.jsonl` has it."""

    round: int
    seconds: float
    clients: int
    bytes_down: int
    bytes_up: int
    macs: int
    loss: float
    stacks: int
    grades: Grades = field(default_factory=Grades)

    def to_dict(self) -> dict[str, Any]:
        """Plain values; `accuracy` and `metrics` only when the round was evaluated."""
        record = {name: value for name, value in vars(self).items() if name not in ("grades", "stacks")}
        if self.grades.accuracy:
            record |= {"accuracy": self.grades.accuracy, "metrics": self.grades.metrics}
        return record


def federate(
    method: Method, server: Server, fleet: Fleet, engine: Engine, rounds: int, evaluation: Evaluation
) -> Iterator[tuple[Server, Record]]:
    """Play rounds until the server has `rounds` behind it; yields the state after each."""
    world = engine.world
    while server.round < rounds:
        began = time.perf_counter()
        cohort = [
            fleet.client(id, server.round, world.seed, engine.data.size(id))
            for id in fleet.cohort(server.round, world.seed)
        ]
        jobs = [Job(c, submodel, server.round) for c in cohort for submodel in method.plan(server, c, world)]
        fold = method.fold(server, world)
        outcome = engine.train(method, server, jobs, fold)
        weights, slots = fold.finish(server)
        # Memories move on in place, once the round has succeeded: a copy would cost with the population.
        memory = server.memory
        memory.update(outcome.memory)
        server = replace(server, round=server.round + 1, weights=weights, slots=slots, memory=memory)
        due = evaluation.due(server.round, rounds)
        grades = grade(method, server, fleet, engine, evaluation) if due else Grades()
        yield (
            server,
            Record(
                round=server.round,
                seconds=time.perf_counter() - began,
                clients=len(cohort),
                bytes_down=outcome.bytes_down * method.copies,
                bytes_up=outcome.bytes_up * method.copies,
                macs=outcome.macs,
                loss=sum(outcome.losses) / max(1, len(outcome.losses)),
                stacks=outcome.stacks,
                grades=grades,
            ),
        )


__all__ = ["Evaluation", "Fleet", "Grades", "Record", "federate"]
