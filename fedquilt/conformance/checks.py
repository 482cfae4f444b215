"""Checks that the author of a method runs before others use it.

Each check is a function that takes a small federation and returns a sentence about its result. It
raises `CheckError` if the method fails, and `NotApplicableError` if the check does not apply. Any
other exception counts as a failure of the method too.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from fedquilt.conformance.case import (
    COHORT,
    NUM_CLIENTS,
    ROUNDS,
    SAMPLES_PER_CLIENT,
    TEST_BATCH,
    TEST_SAMPLES,
    Case,
)
from fedquilt.conformance.compare import TOLERANCE, check_same
from fedquilt.conformance.failures import CheckError, NotApplicableError, message_of
from fedquilt.engines.sequential import Sequential
from fedquilt.hardware.generators import random_state
from fedquilt.names import said
from fedquilt.round import Record
from fedquilt.round.budgets import check_budgets, planned
from fedquilt.round.deployed import deployed_nets, ready
from fedquilt.round.engine import Outcome
from fedquilt.round.eval_jobs import joined, mixed
from fedquilt.round.fold import Fold
from fedquilt.round.labels import share_label, tested_budgets
from fedquilt.round.link import Codec, Link
from fedquilt.round.ranking import ranked
from fedquilt.round.training.learner import Learner
from fedquilt.runs.data_settings import Source
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.model_settings import Model
from fedquilt.runs.run import Run
from fedquilt.terms import Budget, Client, Job, Server, Submodel


class StoppedError(Exception):
    """A run was stopped on purpose, to be resumed."""


@dataclass
class Joining(Sequential):
    """Engine that trains two groups of clients with one fold each, and joins the folds."""

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        middle = len(jobs) // 2
        for group in (jobs[:middle], jobs[middle:]):
            partial = self.method.fold(server, self.world)
            super()._train(server, group, partial, outcome)
            fold.join(partial)


def check_settings(case: Case) -> str:
    """Check that a config.toml preserves all settings, and that `settled` is idempotent."""
    import tomllib

    experiment = Experiment(method=case.method, model=Model("tiny_resnet"), data=Source("digits"))
    text = experiment.to_toml()
    again = Experiment.of(tomllib.loads(text)).method
    for field in fields(case.method):
        written, read = getattr(case.method, field.name), getattr(again, field.name)
        if read != written:
            raise CheckError(
                f"{field.name} is {read!r} when it is read back from a config.toml, and was "
                f"{written!r}; a resumed run would be another one."
            )

    if case.settled.settled(ROUNDS) != case.settled:
        raise CheckError(
            f"settled({ROUNDS}) of a method that is settled changes it, so that a resumed run is "
            "another one."
        )
    return f"{len(fields(case.method))} fields are read back as they were written"


def check_plan(case: Case) -> str:
    """Check that plans are sub-models of the family, and depend on nothing but their arguments.

    Every plan is made twice, with different states of the global random generators.
    """
    plans = 0
    for client in case.clients:
        for round in range(ROUNDS):
            server = replace(case.server, round=round)
            with random_state(1):
                first = planned(case.settled, server, client, case.world)
            with random_state(2):
                second = planned(case.settled, server, client, case.world)
            if first != second:
                raise CheckError(
                    f"plan returned {_positions(first)} for client {client.id} in round "
                    f"{round + 1}, and {_positions(second)} when it was called again. It may "
                    "depend on its arguments alone; for random choices use noise.key(world.seed, "
                    "server.round, …)."
                )
            for submodel in first:
                case.world.family.check(submodel, f"client {client.id} (budget {client.budget})")
            plans += 1
    return f"{plans} plans are sub-models of the family, and equal when asked again"


def check_budgets_kept(case: Case) -> str:
    """Check that no plan costs more than the budget of its client.

    Besides the budgets of the federation, bounds on parameters, multiply-adds and memory are tried.
    The check does not apply to methods that ignore budgets.
    """
    if case.method.ignores_budgets:
        raise NotApplicableError("the method ignores budgets on purpose (ignores_budgets = True)")
    family = case.world.family
    middle = family.member(case.settled.fit(case.budgets[1], case.world))
    cost = middle.cost(case.settled.training_step(case.world))
    budgets = [
        *case.budgets,
        Budget(params=cost.params),
        Budget(macs=cost.macs),
        Budget(memory=cost.memory),
    ]
    for id, budget in enumerate(budgets):
        client = Client(id, budget, SAMPLES_PER_CLIENT)
        for round in range(ROUNDS):
            server = replace(case.server, round=round)
            plan = planned(case.settled, server, client, case.world)
            check_budgets(
                case.settled, [Job(client, submodel, round) for submodel in plan], case.world
            )
    return f"plans keep within {len(budgets)} budgets of shares, params, macs and memory"


def check_learner(case: Case) -> str:
    """Check that a learner is a value that depends on the job and the world alone."""
    learners = 0
    for job in _jobs(case):
        with random_state(1):
            first = case.settled.learner(job, case.world)
        with random_state(2):
            second = case.settled.learner(copy.deepcopy(job), case.world)
        _check_value(first)
        if first != second or hash(first) != hash(second):
            raise CheckError(
                f"learner returned {first} for client {job.client.id}, and {second} when it was "
                "called again. It may depend on the job and the world alone, because every device "
                "builds its own."
            )
        learners += 1
    return f"{learners} learners are hashable values, and equal when asked again"


def _jobs(case: Case) -> Iterator[Job]:
    """Yield the jobs of every client in every round in which plans change, one for each net."""
    for round in case.settled.turns(case.world):
        server = replace(case.server, round=round)
        for client in case.clients:
            for submodel in planned(case.settled, server, client, case.world):
                yield Job(client, submodel, round)


def _check_value(learner: Learner) -> None:
    """Refuse a result of `Method.learner` that engines cannot group clients by.

    Raises:
        CheckError: It is no `Learner`, or cannot be hashed.
    """
    if not isinstance(learner, Learner):
        raise CheckError(f"learner returned a {type(learner).__name__}; it must return a Learner.")
    try:
        hash(learner)
    except TypeError as error:
        raise CheckError(
            f"the learner {type(learner).__name__} cannot be hashed ({error}). Engines group "
            "clients by it: its fields and its objectives must be frozen dataclasses, tuples, "
            "numbers or text."
        ) from error


def check_run(case: Case) -> str:
    """Check that a run of the small federation on the engine `sequential` raises no exception."""
    run = case.outcome
    if isinstance(run, Exception):
        raise CheckError(message_of(run)) from run
    return f"{run.server.round} rounds of {COHORT} clients succeed"


def check_engines(case: Case) -> str:
    """Check that training clients together gives the numbers of training them one after another.

    The runs are those of the engines `vectorized` and `sequential`.
    """
    check_same(case.reference, case.run("vectorized"), "sequential", "vectorized")
    return f"sequential and vectorized agree to {TOLERANCE:g}"


def check_join(case: Case) -> str:
    """Check that two folds, each of half a cohort, give the result of one fold when joined.

    The engine `ray` joins folds of its workers in this way.
    """
    reference = case.reference
    try:
        joined = case.run(Joining(case.data, precision="fp64"))
    except (AttributeError, NotImplementedError, TypeError) as error:
        fold = type(case.settled.fold(reference.server, case.world)).__name__
        raise CheckError(
            f"the fold {fold} cannot take another's partial result: {said(error)}"
        ) from error
    check_same(reference, joined, "one fold", "two joined folds")
    return f"two folds that are joined give what one gives, to {TOLERANCE:g}"


def check_determinism(case: Case) -> str:
    """Check that a run is the same to the last bit whatever the global random state is."""
    reference = case.reference
    with random_state(7):
        again = case.run()
    check_same(reference, again, "a run", "the same run with another global random state", 0.0)
    return "two runs with unequal global random states are equal to the last bit"


def check_resume(case: Case) -> str:
    """Check that a run that was stopped after its first round ends as one that was not."""
    reference = case.reference

    def stop(record: Record) -> None:
        raise StoppedError

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with suppress(StoppedError):
            case.run(out=out, watch=stop)
        resumed = case.run(out=out, resume=True)
    check_same(reference, resumed, "a run", "the same run stopped after round 1 and resumed")
    return "a run that is stopped after round 1 and resumed ends with the same state"


def check_lossy_link(case: Case) -> str:
    """Check that the method runs, equally on two engines, if parts of what is sent are lost."""
    return _run_over(case, Link.preset("lossy-mild"), "a link that loses columns")


def check_coded_link(case: Case) -> str:
    """Check that the method runs, equally on two engines, over a codec of four bits.

    The codec has error feedback.
    """
    return _run_over(case, Link(codec=Codec(bits=4, feedback=True)), "a link of four bits")


def _run_over(case: Case, link: Link, description: str) -> str:
    """Run a method over a link on `sequential` and on `vectorized`, and compare the results.

    Args:
        case: The small federation.
        link: Link between server and clients.
        description: Link in words, for the result.

    Returns:
        Sentence on the result.

    Raises:
        CheckError: The results of the engines differ.
    """
    first = case.run(link=link)
    check_same(first, case.run("vectorized", link=link), "sequential", "vectorized")
    return f"runs over {description}; sequential and vectorized agree to {TOLERANCE:g}"


def check_deploy(case: Case) -> str:
    """Check that deployed nets give the outputs and the accuracy of the nets that were evaluated.

    Deployment fails for a net beyond its budget. For methods whose clients have nets of their own,
    it only checks that these can be deployed.
    """
    run = case.reference
    full_budget = Budget(share=1.0)
    if case.method.personal:
        for client in range(NUM_CLIENTS):
            last_budget = run.fleet.budget(client, run.server.last(client), run.world.seed)
            run.deploy(full_budget if case.method.ignores_budgets else last_budget, client=client)
        return f"the nets of {NUM_CLIENTS} clients are deployed"

    if case.method.keeps_nets:
        for client in range(NUM_CLIENTS):
            run.deploy(full_budget, client=client)
    kinds = () if case.method.ignores_budgets else tested_budgets(case.method, run.fleet.kinds)
    budgets = kinds or (full_budget,)
    for budget in budgets:
        module = run.deploy(budget, norms=case.method.local.norm)
        outputs = _outputs(module, run)
        distance = float((outputs - _outputs(_evaluated(run, budget), run)).abs().max())
        accuracy = float((outputs.argmax(1) == run.data.test_targets).double().mean())
        evaluated = run.accuracy[share_label(run.method, budget, run.world)]
        if distance > TOLERANCE or abs(accuracy - evaluated) > TOLERANCE:
            raise CheckError(
                f"the net that is deployed for {budget} has an accuracy of {accuracy:.2%}, and the "
                f"one that was evaluated {evaluated:.2%}; outputs differ by {distance:.2g}. Both "
                "come from deploy, which may depend on its arguments alone."
            )
    return (
        f"deployed nets give the outputs of the evaluated ones (number of budgets: {len(budgets)})"
    )


def _outputs(net: Callable[[Tensor], Tensor], run: Run) -> Tensor:
    """Return the outputs (sample, class) of a net on all test samples of a run.

    Batches are those of the run's evaluation, because norms may depend on them.
    """
    rows = torch.arange(len(run.data.test_targets)).chunk(TEST_SAMPLES // TEST_BATCH)
    with torch.no_grad():
        return torch.cat([net(run.data.test_samples(batch)) for batch in rows])


def _evaluated(run: Run, budget: Budget) -> Callable[[Tensor], Tensor]:
    """Return a function that runs the nets of a budget as an evaluation does.

    It takes inputs (sample, …) and returns the averaged outputs of all nets that a device runs.

    Args:
        run: A finished run.
        budget: Budget of the device.
    """
    federation, world = run.federation, run.world
    server = ranked(federation, run.server, run.engine)
    nets = deployed_nets(run.method, server, budget, world)
    weights = joined(nets, ready(federation, server, nets, run.engine, run.evaluation.batch_size))
    mode = run.method.local.norm.evaluation_pass
    return lambda inputs: mixed(world.family, nets, weights, inputs, mode)


def check_export(case: Case) -> str:
    """Check that an exported file gives the outputs of the deployed net."""
    run = case.reference
    client = 0 if case.method.personal else None
    with tempfile.TemporaryDirectory() as folder:
        exported = run.export(Path(folder) / "model.safetensors", Budget(share=1.0), client=client)
    return (
        f"a safetensors file is read back; outputs differ by at most {exported.max_difference:.1g}"
    )


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "settings": check_settings,
    "plan": check_plan,
    "budgets": check_budgets_kept,
    "learner": check_learner,
    "run": check_run,
    "engines": check_engines,
    "join": check_join,
    "determinism": check_determinism,
    "resume": check_resume,
    "lossy link": check_lossy_link,
    "coded link": check_coded_link,
    "deploy": check_deploy,
    "export": check_export,
}


def _positions(plan: Sequence[Submodel]) -> str:
    """Describe a plan for a message, by the first positions of one axis of its first sub-model."""
    if not plan or not plan[0].index:
        return "no positions"
    axis, positions = next(iter(plan[0].index.items()))
    return f"positions {list(positions)[:6]} of axis {axis!r}"
