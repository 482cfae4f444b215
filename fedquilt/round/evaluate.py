"""Evaluation of a federation: metrics of every model size, on all data or on a client's own.

Norm statistics are re-estimated before a test if the norm policy asks for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.data.parts import Array
from fedquilt.errors import ConfigError, SubmodelError
from fedquilt.family.net import Pass
from fedquilt.family.norms import NormPolicy
from fedquilt.fleets.fleet import Fleet
from fedquilt.hardware.precision import computing
from fedquilt.round.client import own_state
from fedquilt.round.federation import Federation, World
from fedquilt.round.labels import share_label, tested_budgets
from fedquilt.round.training.attacks import PGD, by_sample
from fedquilt.round.training.batches import batched
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.step import train_pass
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Client, ClientState, Job, Server, Submodel, Submodels, Weights

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.family import Family
    from fedquilt.round.engine import Engine, Gradients
    from fedquilt.round.method import Method

Absent = Literal["hidden", "zero"]
EvaluatedOn = Literal["test", "validation"]
SampleSet = Literal["test", "training", "validation"]
# Number of training samples that rank a method's candidates if there is no validation set.
_RANKING = 2000
_RANKING_BATCH = 100
Domain = tuple[int, str]  # The number of a domain, and its name.


@dataclass(frozen=True)
class EvalJob:
    """A test of one network, or of several whose logits are averaged, on a named set of samples.

    It names samples and does not hold them, because only an engine can reach them.
    """

    label: str  # Key of the result, such as a share.
    nets: Submodels
    weights: Weights  # Already cut, by scope and name.
    # Client whose own test samples are used, if clients have some. None: all test samples.
    client: int | None = None
    own_classes: bool = False  # True: only the classes that the client holds count.
    absent: float = -torch.inf  # Logit of the classes that the client lacks.
    robustness: float = 0.0  # Mixing weight of dual norms, from 0 (clean) to 1 (robust).
    attack: PGD | None = None  # Attack on the samples. None: they stay unchanged.
    # Set of samples to test on. Training samples are those of all clients, mixed. So are validation
    # samples if no client is named.
    on: SampleSet = "test"
    limit: int | None = None  # Most samples to test on. None: all of the set.


@dataclass(frozen=True)
class EvalSpec:
    """Nets without their positions, the mode in which they run, and an attack on their samples."""

    nets: Submodels
    mode: Pass
    attack: PGD | None = None
    training: bool = False  # True: rows are those of the training set, not of the test set.

    def inputs(
        self, world: World, weights: Weights, inputs: Tensor, targets: Tensor, drawn: Tensor | None
    ) -> Tensor:
        """Return the samples as the nets see them: unchanged, or attacked.

        The attack maximizes the loss of the nets' mean logits. All classes are attacked, also those
        that a test hides, because a sample of a hidden class counts as wrong anyway.

        Args:
            world: Family and task.
            weights: Weights of the nets, by scope and name.
            inputs: (sample, …) Samples.
            targets: (sample, …) Their targets.
            drawn: Starting point of the attack (`drawn`). None: there is no attack.
        """
        if self.attack is None:
            return inputs
        assert drawn is not None, "an attack starts somewhere"
        mode = (
            replace(self.mode, statistics="batch")
            if self.mode.statistics == "measure"
            else self.mode
        )

        def loss(x: Tensor) -> Tensor:
            return world.task.mean_loss(mixed(world.family, self.nets, weights, x, mode), targets)

        return self.attack(loss, inputs, drawn)

    def logits(
        self, world: World, weights: Weights, inputs: Tensor, targets: Tensor, drawn: Tensor | None
    ) -> Tensor:
        """Return the mean of the nets' logits, with classes in dimension 1.

        The function is pure and may be vmapped. Arguments are those of `inputs`.
        """
        net_inputs = self.inputs(world, weights, inputs, targets, drawn)
        return mixed(world.family, self.nets, weights, net_inputs, self.mode)

    def statistics(
        self, world: World, weights: Weights, inputs: Tensor, targets: Tensor, drawn: Tensor | None
    ) -> dict[str, Tensor]:
        """Return the norm statistics that the only net sees.

        The function is pure and may be vmapped. Arguments are those of `inputs`.
        """
        net_inputs = self.inputs(world, weights, inputs, targets, drawn)
        return world.family.member(self.nets[0]).net(weights, net_inputs, self.mode)[1]

    def drawn(self, seed: int, rows: Tensor, like: Tensor) -> Tensor | None:
        """Draw the starting point of an attack, or return None if there is no attack.

        Args:
            seed: Random seed of the run.
            rows: (sample,) Rows of the samples in their set.
            like: Inputs, whose shape, type and device are used.
        """
        return None if self.attack is None else by_sample(noise.key(47, seed), rows, like)


@dataclass(frozen=True)
class Score:
    """The result of a test: sums that give metrics, and outputs for metrics that need all of them.

    Args:
        label: Label of the test.
        sums: Sums by the name of their metric, as `Task.sums` has them, on the CPU.
        outputs: (sample, class, …) Outputs that were kept, on the CPU. None: no metric needs them.
        targets: (sample, …) Their targets.
        domains: Scores of the domains that it consists of, if that was asked for.
    """

    label: str
    sums: Mapping[str, Tensor] = field(default_factory=dict)
    outputs: Tensor | None = None
    targets: Tensor | None = None
    domains: Mapping[Domain, Score] = field(default_factory=dict)

    def figures(self, task: Task) -> dict[str, float]:
        """Return every metric by name, the main one first.

        A metric that is not defined for these samples is NaN.
        """
        values = task.values(self.sums)
        if self.outputs is not None and self.targets is not None:
            rows = task.kept_positions(len(self.outputs))
            values |= task.collected_values(self.outputs[rows], self.targets[rows])
        return {metric.name: values.get(metric.name, math.nan) for metric in task.measured}

    def main(self, task: Task) -> float:
        """Return the main figure."""
        return self.figures(task)[task.main.name]

    def __add__(self, other: Score) -> Score:
        sums = dict(self.sums)
        for name, metric_sums in other.sums.items():
            sums[name] = sums[name] + metric_sums if name in sums else metric_sums
        return Score(
            self.label,
            sums,
            _joined(self.outputs, other.outputs),
            _joined(self.targets, other.targets),
        )


def compared_passes(local: LocalTraining, norm: NormPolicy) -> tuple[Pass, Pass]:
    """Return the two passes, training and deployed, in which a net must equal its module."""
    return Pass(train=True, statistics=train_pass(local).statistics), norm.evaluation_pass


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    parts = [part for part in (first, second) if part is not None]
    return torch.cat(parts) if parts else None


def mixed(family: Family, nets: Submodels, weights: Weights, inputs: Tensor, mode: Pass) -> Tensor:
    """Return the mean of the nets' logits (Split-Mix, algorithm 1, line 11).

    Classes are in dimension 1. The function is pure and may be vmapped.

    Args:
        family: Family of the nets.
        nets: Sub-models, each with a scope of its own.
        weights: Their weights, by scope and name.
        inputs: (sample, …) Samples.
        mode: How the nets run.
    """
    logits = []
    for net in nets:
        net_weights = {
            name.removeprefix(net.scope): value
            for name, value in weights.items()
            if name.startswith(net.scope)
        }
        logits.append(
            family.member(net).net(net_weights, inputs, mode)[0].movedim(family.layout.class_dim, 1)
        )
    return logits[0] if len(logits) == 1 else torch.stack(logits).mean(0)


def means_by_label(scores: Iterable[Score], task: Task) -> dict[str, dict[str, float]]:
    """Return the mean of every metric over the tests with the same label, by metric and label.

    Each client counts once. A test for which a metric is not defined, such as one without samples,
    is left out of its mean.
    """
    values_by_metric: dict[str, dict[str, list[float]]] = {
        metric.name: {} for metric in task.measured
    }
    for score in scores:
        for metric, value in score.figures(task).items():
            if not math.isnan(value):
                values_by_metric[metric].setdefault(score.label, []).append(value)
    return {
        metric: {label: sum(values) / len(values) for label, values in by_label.items()}
        for metric, by_label in values_by_metric.items()
    }


def main_by_label(scores: Iterable[Score], task: Task) -> dict[str, float]:
    """Return the main figure by label."""
    return means_by_label(scores, task)[task.main.name]


def mean_statistics(measured: Sequence[Weights], count: int) -> dict[str, Tensor]:
    """Return the mean of norm statistics over batches, which HeteroFL calls the static norm.

    It equals torch's cumulative average (`momentum=None`).

    Args:
        measured: Statistics of single batches, or sums over several batches, by name.
        count: Number of batches.
    """
    return {
        name: torch.stack([statistics[name] for statistics in measured]).sum(0) / count
        for name in measured[0]
    }


def both_statistics(clean: Weights, noised: Weights) -> dict[str, Tensor]:
    """Merge two sets of norm statistics. Norms that are in both sets get their mean."""
    return {
        **noised,
        **{name: (v + noised[name]) / 2 if name in noised else v for name, v in clean.items()},
    }


@dataclass(frozen=True)
class Evaluation:
    """Rounds, samples and metrics of a run's evaluation.

    `local_accuracy` is the accuracy of the widest model on a client's own test samples, averaged
    over clients. If the loss is masked by client, only the client's classes can be predicted. The
    code released with HeteroFL and FedRolex sets the logits of other classes to 0 instead, and
    predicts among all classes. `absent="zero"` gives their number. It is lower or equal if clients
    are tested on classes that they hold. Tasks whose main figure is not accuracy report that figure
    instead, such as `local_rmse`.
    """

    # Rounds from one evaluation to the next. The last round is always evaluated. 0: only the last
    every: int = 1
    batch_size: int = 50  # Samples per batch. Norm statistics are means over batches of this size
    clients: int = 100  # Most clients that a mean over clients is computed from
    # Also test the widest model on each client's own test samples, if clients have some
    per_client: bool = True
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
        """Return the logit of classes that a client lacks."""
        return 0.0 if self.absent == "zero" else -torch.inf

    def samples(self, data: FederatedData) -> FederatedData:
        """Return data whose test set has the samples of this evaluation.

        Raises:
            ConfigError: Validation samples are to be evaluated on, and clients hold back none.
        """
        return data if self.on == "test" else data.on_validation()

    def validates(self, engine: Engine) -> bool:
        """Return True if nets are tested on validation samples in addition to the test set."""
        return self.best and self.on == "test" and engine.has_validation

    def due(self, round: int, rounds: int) -> bool:
        """Return True if round number `round`, counted from 1, of `rounds` is to be evaluated."""
        return round == rounds or bool(self.every and round % self.every == 0)


@dataclass(frozen=True)
class Grades:
    """Every metric by name and then by share, and the name of the main one.

    An empty name means that nothing was evaluated.
    """

    main: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)
    # Main figure by share on validation samples. Empty if clients hold back none, or if all figures
    # are those of validation samples.
    validation: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> dict[str, float]:
        """Return accuracy by share; empty where the task has none."""
        return self.metrics.get("accuracy", {})

    @property
    def figures(self) -> dict[str, float]:
        """Return the main figure by share."""
        return self.metrics.get(self.main, {})


def grade(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test the model that each budget would get, and add the method's own figures.

    The method's figures describe the whole model. A figure that is not finite is left out, because
    JSON cannot hold it.

    Args:
        federation: World, method and link.
        server: State to test.
        fleet: Clients and their budgets.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    method, world = federation.method, federation.world
    grades = _tested(federation, server, fleet, engine, how)
    if method.keeps_nets:
        grades.metrics.update(_kept_by_clients(federation, server, fleet, engine, how))
    full_label = share_label(method, Budget(share=1.0), world)
    for name, value in method.figures(
        server, world, gradients_at(federation, server, engine, how)
    ).items():
        if math.isfinite(value):
            grades.metrics[name] = {full_label: value}
    return grades


def _kept_by_clients(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> dict[str, dict[str, float]]:
    """Test the nets that clients keep, on all test samples and on their own.

    Returns:
        The main figure by metric name, and then by the label of the budget.
    """
    task = federation.world.task
    scores_by_metric: dict[str, list[Score]] = {}
    for clients in _few(_remembering(federation, fleet, server, engine, how)):
        exams = [
            exam
            for client in clients
            for exam in _kept_exams(federation, server, client, engine, how)
        ]
        scores = engine.evaluate(federation, [exam for _, exam in exams], how.batch_size)
        for (metric, _), score in zip(exams, scores, strict=True):
            scores_by_metric.setdefault(metric, []).append(score)
    return {metric: main_by_label(scores, task) for metric, scores in scores_by_metric.items()}


def _remembering(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """Draw clients among those with a memory, each with its budget in the last round it trained."""
    seed = federation.world.seed
    pool = sorted({client for client, scope in server.memory if not scope})
    count = min(how.clients, len(pool))
    clients = (
        [pool[position] for position in noise.choose(noise.key(seed, 23), count, len(pool))]
        if pool
        else []
    )
    return [
        fleet.client(client, server.last(client), seed, engine.size(client)) for client in clients
    ]


def _kept_exams(
    federation: Federation, server: Server, client: Client, engine: Engine, how: Evaluation
) -> Iterator[tuple[str, EvalJob]]:
    """Yield tests of the nets that a client keeps, each with the name of its metric."""
    method, world = federation.method, federation.world
    main, memory = world.task.main.name, server.memory[client.id, ""]
    label, own_classes = share_label(method, client.budget, world), _among_own_classes(federation)
    for name, net in method.kept_nets(memory, world).items():
        state = _remembered(federation, net, memory, engine.device)
        if method.local.norm.measures and world.family.statistics:
            (statistics,) = measured_statistics(
                federation, [(net, state)], engine, how.batch_size, client.id
            )
            state |= statistics
        exam = EvalJob(label, (net,), state)
        yield f"{name}_{main}", exam
        if how.per_client and engine.tests_by_client:
            client_exam = replace(exam, client=client.id, own_classes=own_classes, absent=how.logit)
            yield f"local_{name}_{main}", client_exam


def _remembered(
    federation: Federation, net: Submodel, memory: ClientState, device: torch.device
) -> dict[str, Tensor]:
    """Return a net's weights from a client's memory, with initial weights where it has none."""
    cutter, initial = federation.world.family.cutter, federation.initial_on(device)
    names = [name for name in federation.world.family.member(net).names if name in initial]
    first = cutter.gather(initial, net, names)
    return cutter.overlay(first, net.held, memory.weights, memory.submodel.held)


def gradients_at(
    federation: Federation, server: Server, engine: Engine, how: Evaluation
) -> Gradients:
    """Return a function that computes gradients at the server's state, for methods to call.

    Args:
        federation: World, method and link.
        server: State at which gradients are computed.
        engine: Engine that has the samples.
        how: Settings of the evaluation. Its batch size is used.
    """

    def gradients(nets: Sequence[Submodel], samples: int) -> list[dict[str, Tensor]]:
        cuts = _cut(federation, server, nets)
        return engine.pooled_gradients(
            federation, [(net, cuts[net]) for net in nets], how.batch_size, samples
        )

    return gradients


def _tested(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test the model that each budget would get from the server.

    If a method is personal, the clients' own models are tested instead.
    """
    method, world, task = federation.method, federation.world, federation.world.task
    server = ranked(federation, server, engine)
    if method.personal:
        scores: list[Score] = []
        validated: list[Score] = []
        attacked_scores: dict[str, list[Score]] = {}
        for batch in _few(_asked(federation, fleet, server, engine, how)):
            own_exams = [own_exam(federation, server, client, engine, how) for client in batch]
            scores += engine.evaluate(federation, own_exams, how.batch_size, how.domains)
            validated += _on_validation(federation, own_exams, engine, how)
            for metric, attacked in _under_attack(federation, engine, how, own_exams).items():
                attacked_scores.setdefault(metric, []).extend(attacked)
        grades = _grades(scores, task, validated)
        grades.metrics.update(
            {metric: main_by_label(attacked, task) for metric, attacked in attacked_scores.items()}
        )
        return grades
    members = members_by_share(method, server, fleet.kinds, world, how.shares)
    submodels = list(dict.fromkeys(net for nets in members.values() for net in nets))
    weights = ready(federation, server, submodels, engine, how.batch_size)
    exams = [EvalJob(label, nets, joined(nets, weights)) for label, nets in members.items()]
    scores = engine.evaluate(federation, exams, how.batch_size, how.domains)
    grades = _grades(scores, task, _on_validation(federation, exams, engine, how))
    if how.per_client and engine.tests_by_client:
        widest = max(exams, key=lambda exam: sum(world.family.count(net.arch) for net in exam.nets))
        clients = _asked(federation, fleet, server, engine, how)
        by_client = _by_client([widest], clients, federation, engine, how)
        local = engine.evaluate(federation, by_client, how.batch_size)
        grades.metrics[f"local_{task.main.name}"] = main_by_label(local, task)
    if how.robustness:
        clients = _asked(federation, fleet, server, engine, how)
        attacked_scores = _under_attack(
            federation, engine, how, _by_client(exams, clients, federation, engine, how)
        )
        grades.metrics.update(
            {metric: main_by_label(attacked, task) for metric, attacked in attacked_scores.items()}
        )
    return grades


def _on_validation(
    federation: Federation, exams: Sequence[EvalJob], engine: Engine, how: Evaluation
) -> list[Score]:
    """Test the same nets on validation samples, if these select the best round."""
    if not how.validates(engine):
        return []
    return engine.evaluate(
        federation, [replace(exam, on="validation") for exam in exams], how.batch_size
    )


def ranked(federation: Federation, server: Server, engine: Engine) -> Server:
    """Return the state with its nets ordered by score, if the method ranks candidates.

    This is the state that is tested and deployed. `scored` describes the scores.

    Args:
        federation: World, method and link.
        server: State to rank.
        engine: Engine that has the samples.
    """
    method, world = federation.method, federation.world
    candidates = method.candidates(server, world)
    if not candidates:
        return server
    return method.ranked(server, scored(federation, server, candidates, engine), world)


def scored(
    federation: Federation, server: Server, candidates: Submodels, engine: Engine
) -> list[float]:
    """Return a score for each candidate: the task's main figure, negated if lower is better.

    It is measured on all validation samples. If clients hold back none, it is measured on a fixed
    number of training samples.

    Args:
        federation: World, method and link.
        server: State that the candidates are cut from.
        candidates: Sub-models to score.
        engine: Engine that has the samples.
    """
    world = federation.world
    weights = ready(federation, server, candidates, engine, _RANKING_BATCH)
    on: SampleSet = "validation" if engine.has_validation else "training"
    limit = None if engine.has_validation else _RANKING
    exams = [
        EvalJob(net.scope, (net,), joined((net,), weights), on=on, limit=limit)
        for net in candidates
    ]
    scores = engine.evaluate(federation, exams, _RANKING_BATCH)
    sign = 1.0 if world.task.main.higher_is_better else -1.0
    return [sign * score.main(world.task) for score in scores]


def _grades(scores: Sequence[Score], task: Task, validated: Sequence[Score]) -> Grades:
    """Return every metric, and the main one for every domain, such as `accuracy/mnist`.

    Args:
        scores: Results that are reported in records.
        task: Task whose metrics are computed.
        validated: Additional results on validation samples. May be empty.
    """
    by_domain: dict[Domain, list[Score]] = {}
    for score in scores:
        for domain, domain_score in score.domains.items():
            by_domain.setdefault(domain, []).append(domain_score)
    main = task.main.name
    metrics = means_by_label(scores, task)
    metrics |= {
        f"{main}/{domain[1]}": main_by_label(by_domain[domain], task)
        for domain in sorted(by_domain)
    }
    validation = {
        label: value
        for label, value in main_by_label(validated, task).items()
        if math.isfinite(value)
    }
    return Grades(
        main, {metric: values for metric, values in metrics.items() if values}, validation
    )


def _by_client(
    exams: Sequence[EvalJob],
    clients: Sequence[Client],
    federation: Federation,
    engine: Engine,
    how: Evaluation,
) -> list[EvalJob]:
    """Return a copy of each test for each client's own test samples.

    If clients have no test samples of their own, the tests are returned unchanged.
    """
    if not engine.tests_by_client:
        return list(exams)
    own_classes = _among_own_classes(federation)
    return [
        replace(exam, client=client.id, own_classes=own_classes, absent=how.logit)
        for exam in exams
        for client in clients
    ]


def _under_attack(
    federation: Federation, engine: Engine, how: Evaluation, exams: Sequence[EvalJob]
) -> dict[str, list[Score]]:
    """Test the same nets with and without an attack, at every robustness setting.

    Keys of the result are `standard/0.2` and `robust/0.2` for a robustness of 0.2. Nets without
    dual norms have a single setting, and the keys are `standard` and `robust`.
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
    attacked_exams = [
        replace(exam, robustness=robustness_level, attack=attack)
        for robustness_level, attack in kinds.values()
        for exam in exams
    ]
    scores = engine.evaluate(federation, attacked_exams, how.batch_size) if attacked_exams else []
    return {
        metric: scores[index * len(exams) : (index + 1) * len(exams)]
        for index, metric in enumerate(kinds)
    }


def joined(nets: Submodels, weights: Mapping[Submodel, Weights]) -> dict[str, Tensor]:
    """Return the weights of several nets in one dictionary, by scope and name."""
    return {net.scope + name: value for net in nets for name, value in weights[net].items()}


def given(method: Method, server: Server, budget: Budget, world: World) -> Submodels:
    """Return the tuple of nets that a method deploys to a device.

    Args:
        method: Its `deploy` is called.
        server: State that the nets are cut from.
        budget: Budget of the device.
        world: What the method may look at.

    Raises:
        ConfigError: `deploy` returned something else than a tuple.
    """
    nets = method.deploy(server, budget, world)
    if not isinstance(nets, tuple):
        raise ConfigError(
            f"{type(method).__name__}.deploy returned a {type(nets).__name__} for the budget "
            f"{budget}; a tuple of "
            "sub-models fits, whose logits are averaged: (submodel,)."
        )
    return nets


def owned(method: Method, server: Server, client: Client, world: World) -> Submodels:
    """Return a client's own nets, for a personal method.

    Args:
        method: Its `own` is called.
        server: State that the nets are cut from.
        client: Client whose nets are returned.
        world: What the method may look at.

    Raises:
        SubmodelError: The client has no net, because the plan of the method skips it.
    """
    nets = method.own(server, client, world)
    if not nets:
        name = type(method).__name__
        raise SubmodelError(
            f"{name}.own returned no net for client {client.id} (budget {client.budget}), which is "
            "tested with its own "
            f"nets. {name}.plan skips it; override `own` to return what the client has."
        )
    return nets


def trained_within(method: Method, budget: Budget, world: World) -> Budget:
    """Return a budget whose bound on memory is replaced by the share that a client can train.

    `Method.deploy` reads a bound on memory as one on inference, which needs less than training. A
    client is not tested with a wider net than it trains, because nobody may have trained the rest.

    Args:
        method: The method that trains.
        budget: Budget of the fleet. It is returned unchanged if it does not bound memory.
        world: What the method may look at.
    """
    return method.without_memory(budget, world, trains=True) if budget.memory else budget


def members_by_share(
    method: Method,
    server: Server,
    budgets: Sequence[Budget],
    world: World,
    shares: Sequence[float] = (),
) -> dict[str, Submodels]:
    """Return the nets that each budget gets, by the label of the share, widest first.

    The whole model is included even if no device holds it, because the server's model may be larger
    than that of any client.

    Args:
        method: The method that deploys.
        server: State that nets are cut from.
        budgets: Budgets of the fleet.
        world: What the method may look at.
        shares: Further shares. They have no effect if the method is personal.
    """
    nets_by_label: dict[str, Submodels] = {}
    extra_budgets = () if method.personal else (Budget(share=share) for share in (1.0, *shares))
    for kind in (*tested_budgets(method, budgets), *extra_budgets):
        budget = trained_within(method, kind, world)
        client = Client(0, budget)
        nets = (
            owned(method, server, client, world)
            if method.personal
            else given(method, server, budget, world)
        )
        nets_by_label.setdefault(share_label(method, kind, world), nets)
    return dict(sorted(nets_by_label.items(), key=lambda item: -float(item[0])))


def ready(
    federation: Federation,
    server: Server,
    submodels: Sequence[Submodel],
    engine: Engine,
    batch_size: int,
) -> dict[Submodel, dict[str, Tensor]]:
    """Return sub-models' weights as they are tested or deployed.

    They are cut from the server's state. Norm statistics are re-estimated if the norm policy says
    so.

    Args:
        federation: World, method and link.
        server: State to cut from.
        submodels: Sub-models to cut.
        engine: Engine that has the samples.
        batch_size: Norm statistics are means over batches of this size.
    """
    method, family = federation.method, federation.world.family
    cuts = _cut(federation, server, submodels)
    if method.local.norm.measures and family.statistics:
        net_statistics = measured_statistics(federation, list(cuts.items()), engine, batch_size)
        for weights, statistics in zip(cuts.values(), net_statistics, strict=True):
            weights |= statistics
    return cuts


def _cut(
    federation: Federation, server: Server, submodels: Sequence[Submodel]
) -> dict[Submodel, dict[str, Tensor]]:
    """Return those weights and norm statistics of sub-models that the server's state has."""
    family = federation.world.family
    cuts = {}
    for submodel in submodels:
        names = [
            name
            for name in family.member(submodel).names
            if submodel.scope + name in server.weights
        ]
        cuts[submodel] = family.cutter.gather(server.weights, submodel, names)
    return cuts


def measured_statistics(
    federation: Federation,
    nets: Sequence[tuple[Submodel, Weights]],
    engine: Engine,
    batch_size: int,
    client: int | None = None,
) -> list[dict[str, Tensor]]:
    """Measure the norm statistics of nets on the samples that the method's norm policy names.

    Args:
        federation: Its method's norm policy measures statistics.
        nets: Sub-models and their weights.
        engine: It has the samples of clients.
        batch_size: Statistics are means over batches of this size.
        client: The client whose training samples are meant. None: those of all clients.
    """
    world = federation.world
    if not federation.method.local.norm.needs_public:
        return engine.calibrate(federation, nets, batch_size, client)
    assert world.public is not None, (
        "a policy that needs public samples was refused where there are none"
    )
    with computing(world.precision, engine.device):
        return [
            measured(world.family, net, weights, world.public, batch_size) for net, weights in nets
        ]


def measured(
    family: Family, net: Submodel, state: Weights, samples: Array, batch_size: int
) -> dict[str, Tensor]:
    """Return a net's norm statistics over samples, as the mean over batches.

    Args:
        family: Family of the net.
        net: Sub-model.
        state: Its weights, by name.
        samples: (sample, …) Two or more inputs of the model.
        batch_size: Samples per batch.
    """
    example, samples = family.example_inputs[0], torch.as_tensor(samples)
    if samples.shape[1:] != example.shape[1:] or len(samples) < 2:
        raise ConfigError(
            f"norms were to be measured over samples of shape {tuple(samples.shape)}; the model "
            "takes two or more of "
            f"shape {tuple(example.shape[1:])}."
        )
    weight = next(value for value in state.values() if value.is_floating_point())
    inputs = samples.to(
        weight.device, weight.dtype if samples.is_floating_point() else samples.dtype
    )

    def seen(robustness: float) -> dict[str, Tensor]:
        mode = Pass(statistics="measure", robustness=robustness)
        with torch.no_grad():  # Batches are copied, because a net may change its input in-place.
            batch_statistics = [
                family.member(net).net(state, batch.clone(), mode)[1]
                for batch in batched(inputs, batch_size)
            ]
        return mean_statistics(batch_statistics, len(batch_statistics))

    # Public samples have no labels, so that they cannot be attacked. Clean and robust norms see the
    # same samples.
    return both_statistics(seen(0.0), seen(1.0)) if family.adjustable else seen(0.0)


def _asked(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """Return the clients that are tested on their own samples, at most `how.clients` drawn ones.

    For a personal method they are drawn among clients that have trained, because most clients of a
    large fleet never have.
    """
    personal, seed = federation.method.personal, federation.world.seed
    count = min(how.clients, fleet.num_clients)
    trained = (
        sorted({client for client, _ in server.memory})
        if personal and count < fleet.num_clients
        else []
    )
    pool: Sequence[int] = trained if len(trained) >= count else range(fleet.num_clients)
    clients = [pool[position] for position in noise.choose(noise.key(seed, 23), count, len(pool))]
    # A budget may change from round to round. A personal model has the budget of the round in which
    # its client trained last.
    rounds = {client: server.last(client) if personal else server.round for client in clients}
    return [
        fleet.client(client, round, seed, engine.size(client)) for client, round in rounds.items()
    ]


def _few(clients: list[Client], count: int = 16) -> Iterator[list[Client]]:
    """Yield clients in batches: large enough to stack, small enough to fit in memory."""
    for first in range(0, len(clients), count):
        yield clients[first : first + count]


def own_exam(
    federation: Federation, server: Server, client: Client, engine: Engine, how: Evaluation
) -> EvalJob:
    """Return a test of the model that a client holds now.

    It uses the client's own test samples, or all test samples if clients have none of their own.

    Args:
        federation: World, method and link.
        server: State that the client downloads from.
        client: Client to test.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    method, world = federation.method, federation.world
    nets = owned(method, server, client, world)
    jobs = [Job(client, net, server.round) for net in nets]
    states = {job.submodel: own_state(federation, server, job, engine.device) for job in jobs}
    if method.local.norm.measures and world.family.statistics:
        net_statistics = measured_statistics(
            federation, list(states.items()), engine, how.batch_size, client.id
        )
        states = {
            net: {**state, **statistics}
            for (net, state), statistics in zip(states.items(), net_statistics, strict=True)
        }
    label, own_classes = share_label(method, client.budget, world), _among_own_classes(federation)
    return EvalJob(label, nets, joined(nets, states), client.id, own_classes, how.logit)


def _among_own_classes(federation: Federation) -> bool:
    """Return True if clients train, and are therefore tested, on their own classes only."""
    return federation.method.local.masked == "client" and federation.world.task.has_classes
