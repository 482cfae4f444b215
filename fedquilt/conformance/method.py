"""Checks that the author of a method runs before others use it.

Each check is a function that takes a small federation and returns a sentence about its result. It
raises `CheckError` if the method fails, and `NotApplicableError` if the check does not apply. Any
other exception counts as a failure of the method too.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedquilt.data import FederatedData, Pool, digits
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import FedquiltError
from fedquilt.family import Family
from fedquilt.family.dual import conditioned, dual
from fedquilt.family.family import trace
from fedquilt.hardware.generators import random_state
from fedquilt.methods import FedAvg, Method
from fedquilt.models import PreResNet
from fedquilt.names import said
from fedquilt.round import Evaluation, Fleet, Record
from fedquilt.round.budgets import check_budgets, planned
from fedquilt.round.engine import Outcome
from fedquilt.round.evaluate import given, joined, mixed, ranked, ready
from fedquilt.round.federation import World
from fedquilt.round.labels import share_label, tested_budgets
from fedquilt.round.link import Codec, Link
from fedquilt.round.merge import Fold
from fedquilt.round.training.learner import Learner
from fedquilt.runs.experiment import Experiment, Model, Source
from fedquilt.runs.run import Run, prepare, run
from fedquilt.terms import Budget, Client, Job, Server, Submodel

TOLERANCE = 1e-9  # Largest difference between two runs in float64 that count as equal.
NUM_CLIENTS = 6
COHORT = 4
SAMPLES_PER_CLIENT = 8
TEST_SAMPLES = 120
TEST_BATCH = 40
ROUNDS = 3
Status = Literal["passed", "failed", "skipped"]


class CheckError(Exception):
    """The method does not do what a check asks."""


class NotApplicableError(Exception):
    """A check does not apply to the method."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str
    status: Status
    detail: str
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `fedquilt check --json` prints them."""
        return asdict(self)


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


# --- the federation that methods are checked on -------------------------------------------------


@cache
def small_data() -> FederatedData:
    """Return digits for six clients: 48 training samples by class, 120 for tests, 8 public."""
    pool = digits()
    count = NUM_CLIENTS * SAMPLES_PER_CLIENT
    order = torch.argsort(pool.targets[:count], stable=True)
    few = Pool.of(
        (pool.inputs[order], pool.targets[order]),
        (pool.test_inputs[:TEST_SAMPLES], pool.test_targets[:TEST_SAMPLES]),
        public=pool.inputs[count : count + SAMPLES_PER_CLIENT],
        num_classes=pool.num_classes,
        name="digits",
        scale=pool.scale,
    )
    parts = torch.arange(count).chunk(NUM_CLIENTS)
    test_parts = torch.arange(TEST_SAMPLES).chunk(NUM_CLIENTS)
    return few.with_parts(parts, test_parts)


@cache  # Tracing it takes longer than most checks.
def small_family(norms: Literal["single", "dual", "conditioned"]) -> Family:
    """Return a residual net of 5,090 parameters, with the norms that adversarial training needs."""
    data = small_data()

    def module() -> nn.Module:
        net = PreResNet((1, 1), data.num_classes, 1, widths=(8, 16))
        if norms == "single":
            return net
        return dual(net) if norms == "dual" else conditioned(net)

    return trace(module, data.example)


@dataclass(frozen=True, eq=False)
class Case:
    """A method on a small federation: digits, a residual net with batch norm, and unequal clients.

    Every client holds samples of few classes, and four of six clients take part in a round. A
    method may ask for other nets and budgets (`Method.trial`).
    """

    method: Method

    @property
    def data(self) -> FederatedData:
        return small_data()

    @property
    def family(self) -> Family:
        return self._trial[0]

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return the budgets, which are assigned to clients in turn."""
        return self._trial[1]

    @cached_property
    def _trial(self) -> tuple[Family, tuple[Budget, ...]]:
        adversarial = self.method.local.adversarial
        if adversarial is None:
            return self.method.trial(small_family("single"))
        return self.method.trial(small_family("conditioned" if adversarial.draws else "dual"))

    @cached_property
    def fleet(self) -> Fleet:
        return Fleet.of(self.budgets, NUM_CLIENTS, COHORT)

    @cached_property
    def world(self) -> World:
        """Return the world that a method sees. Only the family depends on it (`Method.adapt`)."""
        family = self.method.adapt(self.family)
        return prepare(
            FedAvg(), family, self.data, self.fleet, "sequential", precision="fp64"
        ).world

    @cached_property
    def settled(self) -> Method:
        """Return the method as a run uses it, with values that depend on the rounds fixed."""
        return self.method.settled(ROUNDS)

    @cached_property
    def server(self) -> Server:
        """Return the state before the first round."""
        return self.settled.init(self.world)

    @cached_property
    def clients(self) -> list[Client]:
        """Return one client of every budget."""
        return [Client(id, budget, SAMPLES_PER_CLIENT) for id, budget in enumerate(self.budgets)]

    def run(
        self, engine: str | Simulation = "sequential", rounds: int = ROUNDS, **options: Any
    ) -> Run:
        """Train in float64, and evaluate after the last round.

        Args:
            engine: Name of an engine, or an engine.
            rounds: Number of rounds.
            **options: Further arguments of `fedquilt.run`.
        """
        options.setdefault("evaluation", Evaluation(every=0, batch_size=TEST_BATCH))
        return run(
            self.method,
            self.family,
            self.data,
            self.fleet,
            engine,
            rounds,
            precision="fp64",
            **options,
        )

    @cached_property
    def outcome(self) -> Run | Exception:
        """Return a run on `sequential`, or the exception that it raised."""
        try:
            return self.run()
        except Exception as error:
            return error

    @property
    def reference(self) -> Run:
        """Return the run with which other runs are compared.

        Raises:
            NotApplicableError: The run failed, which the check "run" reports.
        """
        if isinstance(self.outcome, Exception):
            raise NotApplicableError(
                "it needs a run that succeeds; the check 'run' says why there is none"
            )
        return self.outcome


# --- the checks ---------------------------------------------------------------------------------


def check_settings(case: Case) -> str:
    """Check that settings survive a config.toml, and that `settled` may be called twice."""
    import tomllib

    experiment = Experiment(method=case.method, model=Model("tiny_resnet"), data=Source("digits"))
    text = experiment.to_toml()
    again = Experiment.of(tomllib.loads(text)).method
    for field in fields(case.method):
        written, read = getattr(case.method, field.name), getattr(again, field.name)
        if read != written:
            raise CheckError(
                f"{field.name} is {read!r} when it is read back from a config.toml, and was "
                f"{written!r}; a resumed run "
                "would be another one."
            )

    if case.settled.settled(ROUNDS) != case.settled:
        raise CheckError(
            f"settled({ROUNDS}) of a method that is settled changes it, so that a resumed run is "
            "another one."
        )
    return f"{len(fields(case.method))} fields are read back as they were written"


def check_plan(case: Case) -> str:
    """Check that plans are sub-models of the family, and depend on nothing but their arguments."""
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
                    f"{round + 1}, and "
                    f"{_positions(second)} when it was called again. It may depend on its "
                    "arguments "
                    "alone; for random choices use noise.key(world.seed, server.round, …)."
                )
            for submodel in first:
                case.world.family.check(submodel, f"client {client.id} (budget {client.budget})")
            plans += 1
    return f"{plans} plans are sub-models of the family, and equal when asked again"


def check_budgets_kept(case: Case) -> str:
    """Check that no plan costs more than the budget of its client."""
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
                "called again. It may depend on the job and the world alone, because every "
                "device builds its own."
            )
        learners += 1
    return f"{learners} learners are hashable values, and equal when asked again"


def _jobs(case: Case) -> Iterator[Job]:
    """Yield a job of every client for every round in which plans change."""
    for round in case.settled.turns(case.world):
        server = replace(case.server, round=round)
        for client in case.clients:
            for submodel in planned(case.settled, server, client, case.world):
                yield Job(client, submodel, round)


def _check_value(learner: Learner) -> None:
    """Refuse a learner that engines cannot group clients by."""
    if not isinstance(learner, Learner):
        raise CheckError(f"learner returned a {type(learner).__name__}; it must return a Learner.")
    try:
        hash(learner)
    except TypeError as error:
        raise CheckError(
            f"the learner {type(learner).__name__} cannot be hashed ({error}). Engines group "
            "clients by it: "
            "its fields and its objectives must be frozen dataclasses, tuples, numbers or text."
        ) from error


def check_run(case: Case) -> str:
    """Check that a run succeeds."""
    run = case.outcome
    if isinstance(run, Exception):
        raise CheckError(_told(run)) from run
    return f"{run.server.round} rounds of {COHORT} clients succeed"


def check_engines(case: Case) -> str:
    """Check that training clients together gives the numbers of training them one after another."""
    _check_same(case.reference, case.run("vectorized"), "sequential", "vectorized")
    return f"sequential and vectorized agree to {TOLERANCE:g}"


def check_join(case: Case) -> str:
    """Check that folds of parts of a cohort can be joined, as the engine `ray` does."""
    reference = case.reference
    try:
        joined = case.run(Joining(case.data, precision="fp64"))
    except (AttributeError, NotImplementedError, TypeError) as error:
        fold = type(case.settled.fold(reference.server, case.world)).__name__
        raise CheckError(
            f"the fold {fold} cannot take another's partial result: {said(error)}"
        ) from error
    _check_same(reference, joined, "one fold", "two joined folds")
    return f"two folds that are joined give what one gives, to {TOLERANCE:g}"


def check_determinism(case: Case) -> str:
    """Check that a run is the same whatever the global random state is."""
    reference = case.reference
    with random_state(7):
        again = case.run()
    _check_same(reference, again, "a run", "the same run with another global random state", 0.0)
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
    _check_same(reference, resumed, "a run", "the same run stopped after round 1 and resumed")
    return "a run that is stopped after round 1 and resumed ends with the same state"


def check_lossy_link(case: Case) -> str:
    """Check that the method runs if some of what is sent does not arrive."""
    return _over(case, Link.preset("lossy-mild"), "a link that loses columns")


def check_coded_link(case: Case) -> str:
    """Check that the method runs if changes are coded with four bits and error feedback."""
    return _over(case, Link(codec=Codec(bits=4, feedback=True)), "a link of four bits")


def _over(case: Case, link: Link, what: str) -> str:
    first = case.run(link=link)
    _check_same(first, case.run("vectorized", link=link), "sequential", "vectorized")
    return f"runs over {what}; sequential and vectorized agree to {TOLERANCE:g}"


def check_deploy(case: Case) -> str:
    """Check that deployed nets are within budgets, and are those that the run evaluated."""
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
                "one that was "
                f"evaluated {evaluated:.2%}; outputs differ by {distance:.2g}. Both come from "
                "deploy, which may "
                "depend on its arguments alone."
            )
    return (
        f"deployed nets give the outputs of the evaluated ones (number of budgets: {len(budgets)})"
    )


def _outputs(net: Callable[[Tensor], Tensor], run: Run) -> Tensor:
    """Run a net on the test samples in the batches of the run's evaluation."""
    rows = torch.arange(len(run.data.test_targets)).chunk(TEST_SAMPLES // TEST_BATCH)
    with torch.no_grad():
        return torch.cat([net(run.data.test_samples(batch)) for batch in rows])


def _evaluated(run: Run, budget: Budget) -> Callable[[Tensor], Tensor]:
    """Return the nets of a budget as an evaluation runs them."""
    federation, world = run.federation, run.world
    server = ranked(federation, run.server, run.engine)
    nets = given(run.method, server, budget, world)
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


def check_method(
    method: Method,
    checks: Sequence[str] = tuple(CHECKS),
    watch: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Check a method on a small federation. It takes some seconds on one core.

    Clients train for one epoch with batches of 4 (`Method.shortened`), whatever the method's own
    local settings say, so that the checks are quick. Everything else is as the method has it.

    Args:
        method: An instance, with the settings that are to be checked.
        checks: Names of `CHECKS`.
        watch: Called with the name of every check before it begins.

    Returns:
        A finding for each check, in their order.
    """
    case = Case(method.shortened())
    findings = []
    with _quiet():
        for name in checks:
            if watch:
                watch(name)
            began = time.perf_counter()
            status, detail = _asked(CHECKS[name], case)
            findings.append(Finding(name, status, detail, time.perf_counter() - began))
    return findings


def _asked(check: Callable[[Case], str], case: Case) -> tuple[Status, str]:
    """Run a check. Whatever a method raises is a finding, because it may be anybody's code."""
    try:
        return "passed", check(case)
    except NotApplicableError as reason:
        return "skipped", str(reason)
    except CheckError as reason:
        return "failed", str(reason)
    except Exception as error:
        return "failed", _told(error)


def _told(error: BaseException) -> str:
    """Return the message of an error. It names the type of errors that are not fedquilt's."""
    return str(error) if isinstance(error, FedquiltError) else said(error)


# --- comparing runs -----------------------------------------------------------------------------


def _check_same(
    one: Run, other: Run, first: str, second: str, tolerance: float = TOLERANCE
) -> None:
    """Refuse two runs whose final states or records differ.

    Args:
        one: A run.
        other: Another run with the same number of rounds.
        first: Name of the first run in messages.
        second: Name of the second run in messages.
        tolerance: Largest difference that counts as equal. 0 compares to the last bit.
    """
    names = f"{first} and {second}"
    state, other_state = (dict(_tensors(run.server, "")) for run in (one, other))
    if unmatched := sorted(state.keys() ^ other_state.keys()):
        raise CheckError(
            f"{names} keep unequal tensors: only one of them has {', '.join(unmatched[:3])}."
        )
    for name, value in state.items():
        _check_tensors(value, other_state[name], f"{names} differ", name, tolerance)

    for record, other_record in zip(one.records, other.records, strict=True):
        figures, other_figures = (
            dict(_figures(compared.to_dict(), "")) for compared in (record, other_record)
        )
        for name in (*figures, *other_figures):
            pair = figures.get(name), other_figures.get(name)
            if not _is_close(*pair, tolerance):
                values = f"{pair[0]} and {pair[1]}"
                raise CheckError(f"{names} have unequal {name} in round {record.round}: {values}.")


def _check_tensors(one: Tensor, other: Tensor, told: str, name: str, tolerance: float) -> None:
    if one.shape != other.shape:
        raise CheckError(
            f"{told} in the shape of {name}: {tuple(one.shape)} and {tuple(other.shape)}."
        )
    distance = float((one.double() - other.double()).abs().max()) if one.numel() else 0.0
    if not distance <= tolerance:  # This also refuses NaN.
        raise CheckError(
            f"{told} by {distance:.2g} in {name}; at most {tolerance:g} counts as equal."
        )


def _is_close(one: float | None, other: float | None, tolerance: float) -> bool:
    """Return True if two figures are equal up to a tolerance. None: a run lacks the figure."""
    if one is None or other is None:
        return one is other
    return one == other or abs(one - other) <= tolerance


def _figures(value: object, path: str) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a record with their names, except seconds, which always differ."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            if key not in ("seconds", "server_seconds"):
                yield from _figures(part, f"{path} {key}".strip())
    elif isinstance(value, (int, float)):
        yield path, value


def _tensors(value: object, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors of a server's state with their names."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from _tensors(part, f"{path} {key}".strip())
    elif is_dataclass(value) and not isinstance(value, Submodel):
        for field in fields(value):
            yield from _tensors(getattr(value, field.name), f"{path} {field.name}".strip())


def _positions(plan: Sequence[Submodel]) -> str:
    """Describe a plan by the positions of its first axis."""
    if not plan or not plan[0].index:
        return "no positions"
    axis, positions = next(iter(plan[0].index.items()))
    return f"positions {list(positions)[:6]} of axis {axis!r}"


# --- surroundings -------------------------------------------------------------------------------


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of the runs, which are about the small federation of the checks."""
    logger = logging.getLogger("fedquilt")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
