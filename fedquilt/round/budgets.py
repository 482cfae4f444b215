"""Budgets are a promise: no client trains more than its budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedquilt.errors import BudgetError, ConfigError, SubmodelError
from fedquilt.round.clients import Fleet
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Budget, Client, Job, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.family.cost import TrainingStep
    from fedquilt.methods import Method
    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import World


def planned(method: Method, server: Server, client: Client, world: World) -> list[Submodel]:
    """Return a method's plan for a client, refused if it is not a list of sub-models.

    Raises:
        SubmodelError: It is something else, or empty though the method does not skip clients.
    """
    name, plan = type(method).__name__, method.plan(server, client, world)
    who = f"for client {client.id} (budget {client.budget}) in round {server.round + 1}"
    if not isinstance(plan, Sequence) or not all(isinstance(one, Submodel) for one in plan):
        kinds = {type(one).__name__: None for one in plan} if isinstance(plan, Sequence) else {}
        found = f"{type(plan).__name__}{' of ' + ', '.join(kinds) if kinds else ''}"
        raise SubmodelError(
            f"{name}.plan returned a {found} {who}; it must return a list of sub-models: [submodel]."
        )
    if not plan and not method.skips_clients:
        raise SubmodelError(
            f"{name}.plan returned nothing to train {who}. A method that leaves out clients on purpose sets "
            "skips_clients = True in its class."
        )
    return list(plan)


def learner_of(method: Method, job: Job, world: World) -> Learner:
    """Return how a method trains a job, refused if it is no learner.

    Raises:
        ConfigError: It is something else.
    """
    learner = method.learner(job, world)
    if not isinstance(learner, Learner):
        name = type(method).__name__
        raise ConfigError(
            f"{name}.learner returned {'nothing' if learner is None else f'a {type(learner).__name__}'} for client "
            f"{job.client.id} (budget {job.client.budget}) in round {job.round + 1}; it must return a Learner, such as "
            "super().learner(job, world)."
        )
    return learner


def check_budgets(method: Method, jobs: Sequence[Job], world: World) -> None:
    """Refuse jobs that cost more than their clients' budgets allow.

    The jobs of a client count together. Every distinct combination of members and budget is compared
    once for a family, so that a round costs with its cohort and not with the population.

    Raises:
        BudgetError: Names the method, the client, the bound, what it allows and what the jobs need.
    """
    if method.ignores_budgets:
        return
    step = _step(method, [job.client.budget for job in jobs], world)
    nets: dict[Client, list[Submodel]] = {}
    for job in jobs:
        nets.setdefault(job.client, []).append(job.submodel)
    for client, own in nets.items():
        if over := world.family.excess(own, client.budget, step):
            raise BudgetError(
                f"{type(method).__name__} planned more for client {client.id} in round {jobs[0].round + 1} than its "
                f"budget ({client.budget}) allows: {'; '.join(over)}. self.fit(client.budget, world) gives the largest "
                "member that it can train; a method that ignores budgets on purpose sets ignores_budgets = True in "
                "its class."
            )


def too_small(method: Method, server: Server, fleet: Fleet, engine: Engine, world: World) -> int:
    """Count the devices that cannot hold what a method that ignores budgets plans for them in some round."""
    if not method.ignores_budgets:
        return 0
    size = engine.size(0)
    step = _step(method, fleet.kinds, world)
    states = [replace(server, round=round) for round in method.turns(world)]
    total = 0
    for budget, count in fleet.counts.items():
        plans = (method.plan(state, Client(0, budget, size), world) for state in states)
        if any(world.family.excess(nets, budget, step) for nets in plans):
            total += count
    return total


def _step(method: Method, budgets: Sequence[Budget], world: World) -> TrainingStep | None:
    """Return the method's step where some budget bounds memory; it takes a learner to find."""
    return method.training_step(world) if any(budget.memory for budget in budgets) else None
