"""Checks that no client is asked to train more than its budget allows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from fedquilt.errors import BudgetError, ConfigError, SubmodelError
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Budget, Client, Job, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.family.cost import TrainingStep
    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import World
    from fedquilt.round.method import Method


def planned(method: Method, server: Server, client: Client, world: World) -> list[Submodel]:
    """Return a method's plan for a client, after a check that it is a list of sub-models.

    Args:
        method: Its `plan` is called.
        server: State at the start of the round.
        client: Client to plan for.
        world: What the method may look at.

    Raises:
        SubmodelError: The plan is something else, or empty although the method does not skip
            clients.
    """
    name = type(method).__name__
    plan = method.plan(server, client, world)
    whom = f"for client {client.id} (budget {client.budget}) in round {server.round + 1}"
    if not isinstance(plan, Sequence) or not all(isinstance(item, Submodel) for item in plan):
        kinds = {type(item).__name__: None for item in plan} if isinstance(plan, Sequence) else {}
        kind = f"{type(plan).__name__}{' of ' + ', '.join(kinds) if kinds else ''}"
        raise SubmodelError(
            f"{name}.plan returned a {kind} {whom}; it must return a list of sub-models: "
            "[submodel]."
        )
    if not plan and not method.skips_clients:
        raise SubmodelError(
            f"{name}.plan returned nothing to train {whom}. A method that leaves out clients on "
            "purpose sets skips_clients = True in its class."
        )
    return list(plan)


def learner_of(method: Method, job: Job, world: World) -> Learner:
    """Return the learner with which a method trains a job.

    Args:
        method: Its `learner` is called.
        job: Client, sub-model and round.
        world: What the method may look at.

    Raises:
        ConfigError: The method returned something else than a Learner.
    """
    learner = method.learner(job, world)
    if not isinstance(learner, Learner):
        name = type(method).__name__
        raise ConfigError(
            f"{name}.learner returned "
            f"{'nothing' if learner is None else f'a {type(learner).__name__}'} for client "
            f"{job.client.id} (budget {job.client.budget}) in round {job.round + 1}; it must "
            "return a Learner, such as super().learner(job, world)."
        )
    return learner


def check_budgets(method: Method, jobs: Sequence[Job], world: World) -> None:
    """Refuse jobs that cost more than their clients' budgets allow.

    The jobs of a client count together. The family caches the comparison of members with a budget,
    so that its cost grows with the cohort and not with the population.

    Args:
        method: Method that planned the jobs.
        jobs: Jobs of one round.
        world: Family and settings that costs depend on.

    Raises:
        BudgetError: Names the method, the client, the bound, what it allows and what the jobs need.
    """
    if method.ignores_budgets:
        return
    step = _step(method, [job.client.budget for job in jobs], world)
    nets: dict[Client, list[Submodel]] = {}
    for job in jobs:
        nets.setdefault(job.client, []).append(job.submodel)
    for client, submodels in nets.items():
        if excess := world.family.excess(submodels, client.budget, step):
            raise BudgetError(
                f"{type(method).__name__} planned more for client {client.id} in round "
                f"{jobs[0].round + 1} than its budget ({client.budget}) allows: "
                f"{'; '.join(excess)}. self.fit(client.budget, world) gives the largest member "
                "that it can train; a method that ignores budgets on purpose sets ignores_budgets "
                "= True in its class."
            )


def too_small(method: Method, server: Server, fleet: Fleet, engine: Engine, world: World) -> int:
    """Count the devices of a fleet for which a method plans more than their budget allows.

    The result is 0 unless the method ignores budgets, because plans of others are refused. A device
    counts if its plan in any round of the method's schedule exceeds its budget.

    Args:
        method: Method that plans.
        server: State to plan from.
        fleet: Devices and their budgets.
        engine: Engine that has the samples. All devices are planned with the size of client 0.
        world: What the method may look at.
    """
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
    """Return the method's training step, which gives its memory, if any budget bounds memory.

    Else the result is None, because finding the step would need a learner for nothing.

    Args:
        method: Method whose local step is described.
        budgets: Budgets of the clients.
        world: What the method may look at.
    """
    return method.training_step(world) if any(budget.memory for budget in budgets) else None
