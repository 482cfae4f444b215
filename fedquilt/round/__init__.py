"""One federated round, in the order in which the data flows: `run_round` is the whole loop.

Contracts, and what they are given:

- `federation.py`: the world that methods see, and the federation that engines get.
- `method.py`, `optional_steps.py`: the base class of methods.
- `engine.py`: the base class of engines, which train and test clients.
- `fold.py`: the contract of a fold, and the weights of clients.

Steps of a round:

- `budgets.py`: plans of a method, compared with the budgets of clients.
- `observed_state.py`: plans that depend on the server's state, for the record.
- `client.py`, `client_state.py`, `client_checks.py`: what a client receives, sends and keeps.
- `link/`: losses, codecs and the clock of messages between server and clients.
- `training/`: what a client minimizes, and one step of it.
- `deadline.py`: clients that are too late.
- `merge.py`, `server_optimizers.py`: folds, and steps of the server towards their result.
- `learning.py`, `teachers.py`, `students.py`: training of the server on public samples.
- `evaluate.py`: the evaluation, made of `deployed.py` (nets to test), `ranking.py`,
  `norm_statistics.py`, `eval_jobs.py` (tests as engines get them) and `scores.py` (results).
- `labels.py`, `record.py`: names of results, and the record of a round.
"""

from __future__ import annotations

import logging
import time
from collections import ChainMap
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fedquilt.errors import DivergenceError, TrainingError
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.budgets import planned
from fedquilt.round.client_checks import are_finite
from fedquilt.round.client_state import memory_of
from fedquilt.round.deadline import round_seconds, train_until_deadline
from fedquilt.round.evaluate import Evaluation, evaluate
from fedquilt.round.fold import Merged, merged_of
from fedquilt.round.learning import learn
from fedquilt.round.observed_state import ObservedState, recorded_plans
from fedquilt.round.record import Record
from fedquilt.round.scores import Grades
from fedquilt.storage.files import compact
from fedquilt.terms import ClientState, Job, Server

if TYPE_CHECKING:
    from torch import Tensor

    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import Federation
    from fedquilt.round.method import Method

_log = logging.getLogger(__name__)
MAX_ATTEMPTS = 10  # Cohorts that are asked in one round, if too few clients reply


@dataclass(frozen=True)
class RoundResult:
    """Result of a round that succeeded but is not yet committed to the run."""

    server: Server  # New state, still with the client states of the round before.
    memory: Mapping[tuple[int, str], ClientState]  # New client states, by client and scope.
    record: Record  # Figures of the round.
    late: Mapping[int, float]  # By client that missed the deadline, the least seconds it takes.


def run_round(
    federation: Federation,
    server: Server,
    fleet: Fleet,
    engine: Engine,
    rounds: int,
    evaluation: Evaluation,
) -> RoundResult:
    """Run the next round. No argument is modified.

    If too few clients reply, other cohorts are asked, up to `MAX_ATTEMPTS` in all. Simulated
    clients always reply.

    Args:
        federation: World, method and link.
        server: State that the round starts from.
        fleet: Clients, their budgets and their sampling, in every round.
        engine: Engine that trains and tests clients.
        rounds: Number of rounds of the run. The last one is always evaluated.
        evaluation: Settings of the evaluation.

    Raises:
        TrainingError: Too few clients replied in every cohort.
        DivergenceError: The merge gave values that are not finite.
    """
    began = time.perf_counter()
    world = federation.world
    method = federation.method
    fleet = fleet.at(server.round)

    observed = ObservedState(server)
    for attempt in range(MAX_ATTEMPTS):
        # Draw the cohort, and plan what each client trains.
        ids = fleet.draw_cohort(server.round, world.seed, engine.online(), attempt)
        cohort = [
            fleet.client(id, server.round, world.seed, engine.size(id), position)
            for position, id in enumerate(ids)
        ]
        jobs = [
            Job(client, submodel, server.round)
            for client in cohort
            for submodel in planned(method, observed.server, client, world)
        ]
        if method.keeps_nets:
            for job in jobs:
                method.resumed(job, memory_of(server, job), world)

        # Train.
        outcome, fold = train_until_deadline(federation, server, jobs, engine)
        for client_id, reason in outcome.missing.items():
            _log.warning(
                "client %d did not reply in round %d: %s", client_id, server.round + 1, reason
            )
        if engine.counts(outcome):
            break
    else:
        raise TrainingError(
            f"too few of the clients of round {server.round + 1} have replied, in each of "
            f"{MAX_ATTEMPTS} cohorts. The server's state is that of the round before."
        )

    # Merge the updates.
    merged = merged_of(method, fold, server)
    _check_merged(method, server, merged)
    new_server = replace(
        server,
        round=server.round + 1,
        weights=compact(merged.weights),
        slots={slot: compact(values) for slot, values in merged.slots.items()},
        extras=compact(merged.extras),
    )
    new_server, learnt = learn(federation, new_server, merged, engine)

    # Evaluate the new state with the new client states.
    grades = Grades()
    if evaluation.due(new_server.round, rounds):
        remembered = replace(new_server, memory=ChainMap(outcome.memory, server.memory))
        grades = evaluate(federation, remembered, fleet, engine, evaluation)

    total = outcome.total
    wire_factor = method.wire_factor
    record = Record(
        round=new_server.round,
        seconds=time.perf_counter() - began,
        clients=len(cohort),
        missing=len(outcome.missing),
        bytes_down=total.down * wire_factor,
        bytes_up=total.up * wire_factor,
        bytes_first=total.first * wire_factor,
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
        plans=recorded_plans(jobs) if observed.was_read else None,
    )
    return RoundResult(new_server, outcome.memory, record, outcome.late)


def _check_merged(method: Method, server: Server, merged: Merged) -> None:
    """Refuse a merge whose weights or slots are not finite, although all updates are.

    Engines have checked that all updates are finite, so that the fold is to blame. Without this
    check the clients of the next round would be blamed. Values that were infinite before the merge
    are allowed, because buffers such as masks may be infinite.

    Args:
        method: Method of the run, for the message.
        server: State before the merge.
        merged: Result of the fold.

    Raises:
        DivergenceError: Names the method and the first infinite weights.
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
                f"{server.round + 1}, although all updates of clients are finite: "
                f"{', '.join(infinite_names[:3])}{', …' if len(infinite_names) > 3 else ''}. The "
                "server's state is that of the round before. A smaller learning rate of the server "
                "(method.server_optimizer) may help, or a correction of the fold."
            )


def _was_finite(old: Mapping[str, Tensor], name: str) -> bool:
    return name not in old or are_finite([old[name]])


__all__ = ["Evaluation", "Fleet", "Grades", "Record", "RoundResult", "run_round"]
