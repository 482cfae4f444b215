"""Evaluation of a federation: metrics of every model size, on all data or on a client's own.

Norm statistics are re-estimated before a test if the norm policy asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.deployed import cut_nets, members_by_share, ready
from fedquilt.round.eval_jobs import EvalJob, joined
from fedquilt.round.federation import Federation
from fedquilt.round.labels import share_label
from fedquilt.round.own_tests import is_among_own_classes, own_test, tests_of_kept_nets
from fedquilt.round.ranking import ranked
from fedquilt.round.scores import (
    Grades,
    Score,
    grades_of,
    main_by_label,
)
from fedquilt.round.training.attacks import PGD
from fedquilt.terms import Budget, Client, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.round.engine import Engine, Gradients

Absent = Literal["hidden", "zero"]  # Treatment of classes that a client lacks.
EvaluatedOn = Literal["test", "validation"]  # Samples of all evaluations.


@dataclass(frozen=True)
class Evaluation:
    """Rounds, samples and metrics of a run's evaluation.

    By default every round is evaluated. The model of each budget is tested on all test samples, and
    the widest model also on each client's own test samples.

    `local_accuracy` is the accuracy of the widest model on a client's own test samples, averaged
    over clients. If the loss is masked by client, only the client's classes can be predicted. The
    code released with HeteroFL and FedRolex sets the logits of other classes to 0 instead, and
    predicts among all classes. `absent="zero"` gives their number. It is lower or equal if clients
    are tested on classes that they hold. Tasks whose main figure is not accuracy report that figure
    instead, such as `local_rmse`.

    Example:
        >>> import fedquilt as fq
        >>> evaluation = fq.Evaluation(every=10, shares=(0.1,))
        >>> [round for round in range(1, 26) if evaluation.due(round, rounds=25)]
        [10, 20, 25]
    """

    # Rounds from one evaluation to the next. The last round is always evaluated. 0: only the last
    every: int = 1
    batch_size: int = 50  # Samples per batch. Norm statistics are means over batches of this size
    clients: int = 100  # Most clients that a mean over clients is computed from
    # Also test the widest model on each client's own test samples, if clients have some
    per_client: bool = True
    # Also test nets that clients keep on each client's own training samples. Without such nets it
    # has no effect
    training: bool = False
    # Treatment of classes that a client lacks in its own test: never predicted, or a logit of zero
    absent: Absent = "hidden"
    # Also report the main metric on each domain of the test set, if it has any
    domains: bool = True
    shares: tuple[float, ...] = ()  # Shares to test besides those of the fleet's budgets
    # Mixing weights of dual norms (0 clean, 1 robust) at which nets are tested with and without an
    # attack. Empty: nets are not attacked
    robustness: tuple[float, ...] = ()
    attack: PGD = PGD()  # Attack under which nets are tested, if `robustness` is not empty
    # Samples of all evaluations: the test set, or the samples that data.validation holds back
    on: EvaluatedOn = "test"
    # Keep the state of the best round on validation samples, if data.validation holds some back
    best: bool = True

    def __post_init__(self) -> None:
        one_of(self, absent=Absent, on=EvaluatedOn)
        within(
            self,
            every="[0, inf)",
            batch_size="[1, inf)",
            clients="[1, inf)",
            shares="(0, 1]",
            robustness="[0, 1]",
        )

    @property
    def logit(self) -> float:
        """Return the logit of classes that a client lacks: 0, or −∞ if they are hidden."""
        return 0.0 if self.absent == "zero" else -torch.inf

    def samples(self, data: FederatedData) -> FederatedData:
        """Return data whose test set has the samples that this evaluation tests on.

        This is `data` itself if the test set is evaluated. Else the samples that clients hold back
        for validation replace the test set.

        Raises:
            ConfigError: Validation samples are to be evaluated on, and clients hold back none.
        """
        return data if self.on == "test" else data.on_validation()

    def validates(self, engine: Engine) -> bool:
        """Return True if `engine` tests nets on validation samples in addition to the test set."""
        return self.best and self.on == "test" and engine.has_validation

    def due(self, round: int, rounds: int) -> bool:
        """Return True if round number `round`, counted from 1, of `rounds` is to be evaluated."""
        return round == rounds or bool(self.every and round % self.every == 0)


def evaluate(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test the model that each budget would get, and add the method's own figures.

    The method's figures (`Method.figures`) are stored under the key of the whole model. Such a
    figure is left out if it is not finite, because JSON cannot hold it. If clients keep nets of
    their own, these are tested too.

    Args:
        federation: World, method and link.
        server: State to test, with the client states.
        fleet: Clients and their budgets.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    method = federation.method
    world = federation.world
    engine = engine.evaluating(server, fleet, how.clients)
    grades = _tested(federation, server, fleet, engine, how)
    if method.keeps_nets:
        grades.metrics.update(_kept_by_clients(federation, server, fleet, engine, how))
    full_label = share_label(method, Budget(share=1.0), world)
    for name, value in method.figures(
        server, world, gradients_at(federation, server, engine, how)
    ).items():
        if math.isfinite(value):
            grades.metrics[name] = {full_label: value}
    return replace(grades, report=engine.evaluation_report)


def _kept_by_clients(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> dict[str, dict[str, float]]:
    """Test the nets that clients keep, on all test samples and on each client's own.

    They are also tested on each client's training samples if `how.training` is set.

    At most `how.clients` clients are tested, among those with a memory.

    Args:
        federation: World, method and link.
        server: State of the server, with the client states.
        fleet: Clients and their budgets.
        engine: Engine that has the samples.
        how: Settings of the evaluation.

    Returns:
        The main figure, averaged over clients, by metric name and then by the key of the budget.
    """
    task = federation.world.task
    scores_by_metric: dict[str, list[Score]] = {}
    for clients in _in_batches(_clients_with_memory(federation, fleet, server, engine, how)):
        tests = [
            test
            for client in clients
            for test in tests_of_kept_nets(federation, server, client, engine, how)
        ]
        scores = engine.evaluate(federation, [test for _, test in tests], how.batch_size)
        for (metric, _), score in zip(tests, scores, strict=True):
            scores_by_metric.setdefault(metric, []).append(score)
    return {metric: main_by_label(scores, task) for metric, scores in scores_by_metric.items()}


def _clients_with_memory(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """Draw at most `how.clients` clients among those with a memory of a net without scope.

    They are in ascending order, and the draw depends on the random seed of the run. Each client has
    the budget of the last round in which it trained.

    Args:
        federation: World, method and link.
        fleet: Clients and their budgets.
        server: State of the server, with the client states.
        engine: Engine that has the numbers of samples.
        how: Settings of the evaluation.
    """
    seed = federation.world.seed
    pool = sorted({client for client, scope in server.memory if not scope})
    clients = _drawn(pool, min(how.clients, len(pool)), seed)
    return [
        fleet.client(client, server.last(client), seed, engine.size(client)) for client in clients
    ]


def gradients_at(
    federation: Federation, server: Server, engine: Engine, how: Evaluation
) -> Gradients:
    """Return a function that computes gradients at the server's state, for methods to call.

    The function takes nets and a number of samples (`Gradients`). It returns the gradient of each
    net's mean loss over that many pooled training samples, by name.

    Args:
        federation: World, method and link.
        server: State at which gradients are computed.
        engine: Engine that has the samples.
        how: Settings of the evaluation. Its batch size is used.
    """

    def gradients(nets: Sequence[Submodel], samples: int) -> list[dict[str, Tensor]]:
        cuts = cut_nets(federation, server, nets)
        return engine.pooled_gradients(
            federation, [(net, cuts[net]) for net in nets], how.batch_size, samples
        )

    return gradients


def _tested(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test the model that each budget would get from the server, on all test samples.

    The widest model is also tested on the samples of single clients, and models are attacked, if
    `how` says so. If a method is personal, the clients' own models are tested instead.

    Args:
        federation: World, method and link.
        server: State to test. Its candidates are ranked first, if the method has any.
        fleet: Clients and their budgets.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    server = ranked(federation, server, engine)
    if federation.method.personal:
        return _tested_personal(federation, server, fleet, engine, how)

    method = federation.method
    world = federation.world
    task = world.task
    members = members_by_share(method, server, fleet.kinds, world, how.shares)
    submodels = list(dict.fromkeys(net for nets in members.values() for net in nets))
    weights = ready(federation, server, submodels, engine, how.batch_size)
    tests = [EvalJob(label, nets, joined(nets, weights)) for label, nets in members.items()]
    scores = engine.evaluate(federation, tests, how.batch_size, how.domains)
    grades = grades_of(scores, task, _on_validation(federation, tests, engine, how))

    if how.per_client and engine.tests_by_client:
        widest = max(tests, key=lambda test: sum(world.family.count(net.arch) for net in test.nets))
        clients = _tested_clients(federation, fleet, server, engine, how)
        by_client = _by_client([widest], clients, federation, engine, how)
        local = engine.evaluate(federation, by_client, how.batch_size)
        grades.metrics[f"local_{task.main.name}"] = main_by_label(local, task)

    if how.robustness:
        clients = _tested_clients(federation, fleet, server, engine, how)
        by_client = _by_client(tests, clients, federation, engine, how)
        attacked_scores = _under_attack(federation, engine, how, by_client)
        grades.metrics.update(
            {metric: main_by_label(attacked, task) for metric, attacked in attacked_scores.items()}
        )
    return grades


def _tested_personal(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test the clients' own models of a personal method, and average over clients with one budget.

    At most `how.clients` clients are tested, 16 at a time because each has weights of its own.

    Args:
        federation: World, method and link.
        server: State that clients download from, with the client states.
        fleet: Clients and their budgets.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    task = federation.world.task
    scores: list[Score] = []
    validated: list[Score] = []
    attacked_scores: dict[str, list[Score]] = {}
    for batch in _in_batches(_tested_clients(federation, fleet, server, engine, how)):
        own_tests = [own_test(federation, server, client, engine, how) for client in batch]
        scores += engine.evaluate(federation, own_tests, how.batch_size, how.domains)
        validated += _on_validation(federation, own_tests, engine, how)
        for metric, attacked in _under_attack(federation, engine, how, own_tests).items():
            attacked_scores.setdefault(metric, []).extend(attacked)
    grades = grades_of(scores, task, validated)
    grades.metrics.update(
        {metric: main_by_label(attacked, task) for metric, attacked in attacked_scores.items()}
    )
    return grades


def _on_validation(
    federation: Federation, tests: Sequence[EvalJob], engine: Engine, how: Evaluation
) -> list[Score]:
    """Repeat tests on validation samples, if these select the best round.

    Args:
        federation: World, method and link.
        tests: Tests on other samples. They do not change.
        engine: Engine that has the samples.
        how: Settings of the evaluation.

    Returns:
        One score for each test. Empty: `how` or the engine has no validation besides the test set.
    """
    if not how.validates(engine):
        return []
    return engine.evaluate(
        federation, [replace(test, on="validation") for test in tests], how.batch_size
    )


def _by_client(
    tests: Sequence[EvalJob],
    clients: Sequence[Client],
    federation: Federation,
    engine: Engine,
    how: Evaluation,
) -> list[EvalJob]:
    """Return a copy of each test for each client's own test samples, test after test.

    If clients have no test samples of their own, the tests are returned unchanged.

    Args:
        tests: Tests on all test samples.
        clients: Clients whose samples are tested on.
        federation: It says whether only a client's own classes count.
        engine: Engine that has the samples.
        how: Settings of the evaluation, with the logit of absent classes.
    """
    if not engine.tests_by_client:
        return list(tests)
    own_classes = is_among_own_classes(federation)
    return [
        replace(test, client=client.id, own_classes=own_classes, absent=how.logit)
        for test in tests
        for client in clients
    ]


def _under_attack(
    federation: Federation, engine: Engine, how: Evaluation, tests: Sequence[EvalJob]
) -> dict[str, list[Score]]:
    """Test the same nets with and without an attack, at every robustness setting.

    Keys of the result are `standard/0.2` and `robust/0.2` for a robustness of 0.2. Nets without
    dual norms have a single setting, and the keys are `standard` and `robust`. The result is empty
    if `how.robustness` is.

    Args:
        federation: World, method and link.
        engine: Engine that has the samples.
        how: Settings of the evaluation, with the attack.
        tests: Tests without an attack. They do not change.

    Returns:
        Scores by key, one for each test in the order of `tests`.
    """
    levels = [
        (f"/{float(robustness_level)}", float(robustness_level))
        for robustness_level in how.robustness
    ]
    if not federation.world.family.adjustable:
        levels = [("", 0.0)][: len(levels)]
    kinds = {
        f"{metric}{suffix}": (robustness, attack)
        for suffix, robustness in levels
        for metric, attack in (("standard", None), ("robust", how.attack))
    }
    attacked_tests = [
        replace(test, robustness=robustness_level, attack=attack)
        for robustness_level, attack in kinds.values()
        for test in tests
    ]
    scores = engine.evaluate(federation, attacked_tests, how.batch_size) if attacked_tests else []
    return {
        metric: scores[index * len(tests) : (index + 1) * len(tests)]
        for index, metric in enumerate(kinds)
    }


def _tested_clients(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """Return the clients that are tested on their own samples, at most `how.clients` drawn ones.

    For a personal method they are drawn among clients that have trained, because most clients of a
    large fleet never have. If too few have trained, they are drawn among all. Each has its budget
    of the current round, or for a personal method of the last round in which it trained.

    Args:
        federation: World, method and link.
        fleet: Clients and their budgets.
        server: State of the server, with the client states.
        engine: Engine that has the numbers of samples.
        how: Settings of the evaluation.
    """
    personal = federation.method.personal
    seed = federation.world.seed
    count = min(how.clients, fleet.num_clients)
    pool: Sequence[int] = range(fleet.num_clients)
    if personal and count < fleet.num_clients:
        trained = sorted({client for client, _ in server.memory})
        pool = trained if len(trained) >= count else pool
    clients = _drawn(pool, count, seed)
    # A budget may change from round to round. A personal model has the budget of the round in which
    # its client trained last.
    rounds = {client: server.last(client) if personal else server.round for client in clients}
    return [
        fleet.client(client, round, seed, engine.size(client)) for client, round in rounds.items()
    ]


def _drawn(pool: Sequence[int], count: int, seed: int) -> list[int]:
    """Draw the clients that are tested, in the order of the pool.

    Args:
        pool: Clients to draw from.
        count: Number of clients to draw.
        seed: Random seed of the run.
    """
    positions = noise.choose(noise.key(seed, noise.Stream.TESTED_CLIENTS), count, len(pool))
    return [pool[position] for position in positions]


def _in_batches(clients: list[Client], count: int = 16) -> Iterator[list[Client]]:
    """Yield clients in order, in batches of at most `count` that are tested at once.

    Larger batches stack better, and smaller ones need less memory.
    """
    for first in range(0, len(clients), count):
        yield clients[first : first + count]
