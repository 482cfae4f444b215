"""Ranking of a method's candidate nets before they are tested or deployed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedquilt.round.federation import Federation
from fedquilt.terms import Server, Submodels

if TYPE_CHECKING:
    from fedquilt.round.engine import Engine
from fedquilt.round.deployed import ready
from fedquilt.round.eval_jobs import EvalJob, SampleSet, joined

# Number of training samples that rank a method's candidates if there is no validation set.
MAX_RANKING_SAMPLES = 2000


RANKING_BATCH_SIZE = 100


def ranked(federation: Federation, server: Server, engine: Engine) -> Server:
    """Return the state that is tested and deployed, after the method has ranked its candidates.

    `Method.candidates` names nets, `scored` scores them, and `Method.ranked` returns the new state.
    Without candidates the state is returned unchanged.

    Args:
        federation: World, method and link.
        server: State to rank.
        engine: Engine that has the samples.
    """
    method = federation.method
    world = federation.world
    candidates = method.candidates(server, world)
    if not candidates:
        return server
    return method.ranked(server, scored(federation, server, candidates, engine), world)


def scored(
    federation: Federation, server: Server, candidates: Submodels, engine: Engine
) -> list[float]:
    """Return a score for each candidate: the task's main figure, negated if lower is better.

    So a higher score is always better. It is measured on all validation samples. If clients hold
    back none, it is measured on at most 2000 training samples.

    Args:
        federation: World, method and link.
        server: State that the candidates are cut from.
        candidates: Sub-models to score.
        engine: Engine that has the samples.

    Returns:
        Scores in the order of `candidates`.
    """
    world = federation.world
    weights = ready(federation, server, candidates, engine, RANKING_BATCH_SIZE)
    on: SampleSet = "validation" if engine.has_validation else "training"
    limit = None if engine.has_validation else MAX_RANKING_SAMPLES
    tests = [
        EvalJob(net.scope, (net,), joined((net,), weights), on=on, limit=limit)
        for net in candidates
    ]
    scores = engine.evaluate(federation, tests, RANKING_BATCH_SIZE)
    sign = 1.0 if world.task.main.higher_is_better else -1.0
    return [sign * score.main(world.task) for score in scores]
