"""Evaluation of a federation: metrics at every size, on all data or on a client's own, with norms made ready."""

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
from fedquilt.precision import computing
from fedquilt.round.attack import PGD, by_sample
from fedquilt.round.client import own_state
from fedquilt.round.clients import Fleet
from fedquilt.round.federation import Federation, World
from fedquilt.round.labels import share_label, tested_budgets
from fedquilt.round.training.batches import batched
from fedquilt.round.training.local import Local
from fedquilt.round.training.step import train_pass
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Client, Job, Memory, Mix, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.data import FederatedData
    from fedquilt.family import Family
    from fedquilt.methods import Method
    from fedquilt.round.engine import Engine, Gradients

Absent = Literal["hidden", "zero"]
EvaluatedOn = Literal["test", "validation"]
SampleSet = Literal["test", "training", "validation"]
_RANKING = 2000  # Training samples by which a method's candidates are ranked where there is no validation set.
_RANKING_BATCH = 100
Domain = tuple[int, str]  # The number of a domain, and its name.


@dataclass(frozen=True)
class EvalJob:
    """A network to be tested, or several whose logits are averaged, and the samples that are meant.

    It names samples and does not hold them, because an engine alone can reach them.
    """

    label: str
    nets: Mix
    weights: Weights  # Already cut, by scope and name.
    client: int | None = (
        None  # The client whose own test samples are meant, if clients have some. None: all.
    )
    own_classes: bool = False  # Only the classes that the client holds count.
    absent: float = -torch.inf  # Logit of the classes that the client lacks.
    robustness: float = 0.0  # Of dual norms.
    attack: PGD | None = None  # On the samples.
    on: SampleSet = "test"  # Set of samples to test on. Those of training and validation are of all clients, mixed.
    limit: int | None = None  # Most samples to test on. None: all of the set.


@dataclass(frozen=True)
class Kind:
    """Some nets without their positions, how they run, and what is done to the samples before."""

    nets: Mix
    mode: Pass
    attack: PGD | None = None
    training: bool = False  # Positions are in the training set, and not in the test set.

    def inputs(
        self, world: World, weights: Weights, inputs: Tensor, targets: Tensor, drawn: Tensor | None
    ) -> Tensor:
        """The samples as the nets see them: as they are, or as they are worst for the nets together.

        All classes are attacked, also those that an exam hides: a sample of a hidden class is lost anyway.
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
        """The mean of the nets' logits, classes in dimension 1. Pure: may be vmapped."""
        seen = self.inputs(world, weights, inputs, targets, drawn)
        return mixed(world.family, self.nets, weights, seen, self.mode)

    def statistics(
        self, world: World, weights: Weights, inputs: Tensor, targets: Tensor, drawn: Tensor | None
    ) -> dict[str, Tensor]:
        """The norm statistics that the one net sees. Pure: may be vmapped."""
        seen = self.inputs(world, weights, inputs, targets, drawn)
        return world.family.member(self.nets[0]).net(weights, seen, self.mode)[1]

    def drawn(self, seed: int, rows: Tensor, like: Tensor) -> Tensor | None:
        """What an attack on samples at positions starts from."""
        return None if self.attack is None else by_sample(noise.key(47, seed), rows, like)


@dataclass(frozen=True)
class Score:
    """The result of a test: sums of which metrics are made, and outputs for metrics that need all of them.

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
        """Return every metric by name, the main one first. NaN: it is not defined for these samples."""
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
        for name, own in other.sums.items():
            sums[name] = sums[name] + own if name in sums else own
        return Score(
            self.label,
            sums,
            _joined(self.outputs, other.outputs),
            _joined(self.targets, other.targets),
        )


def compared_passes(local: Local, norm: NormPolicy) -> tuple[Pass, Pass]:
    """Return how nets run in training and once deployed, where they must equal their modules."""
    return Pass(train=True, statistics=train_pass(local).statistics), norm.evaluation_pass


def _joined(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    parts = [part for part in (first, second) if part is not None]
    return torch.cat(parts) if parts else None


def mixed(family: Family, nets: Mix, weights: Weights, inputs: Tensor, mode: Pass) -> Tensor:
    """The mean of the nets' logits (Split-Mix, algorithm 1, line 11), classes in dimension 1. Pure: may be vmapped."""
    found = []
    for net in nets:
        own = {
            name.removeprefix(net.scope): value
            for name, value in weights.items()
            if name.startswith(net.scope)
        }
        found.append(
            family.member(net).net(own, inputs, mode)[0].movedim(family.layout.class_dim, 1)
        )
    return found[0] if len(found) == 1 else torch.stack(found).mean(0)


def means_by_label(scores: Iterable[Score], task: Task) -> dict[str, dict[str, float]]:
    """Return every metric by label: the mean over the exams that carry it, each client counting once.

    An exam for which a metric is not defined, such as one without samples, is left out of its mean.
    """
    found: dict[str, dict[str, list[float]]] = {metric.name: {} for metric in task.measured}
    for score in scores:
        for metric, value in score.figures(task).items():
            if not math.isnan(value):
                found[metric].setdefault(score.label, []).append(value)
    return {
        metric: {label: sum(values) / len(values) for label, values in by_label.items()}
        for metric, by_label in found.items()
    }


def main_by_label(scores: Iterable[Score], task: Task) -> dict[str, float]:
    """Return the main figure by label."""
    return means_by_label(scores, task)[task.main.name]


def mean_statistics(measured: Sequence[Weights], count: int) -> dict[str, Tensor]:
    """Norm statistics as the plain mean over batches: torch's cumulative average, HeteroFL's static norm.

    `measured` are those of single batches, or sums over some of them; `count` is the number of batches.
    """
    return {
        name: torch.stack([one[name] for one in measured]).sum(0) / count for name in measured[0]
    }


def both_statistics(clean: Weights, noised: Weights) -> dict[str, Tensor]:
    """Statistics of norms that saw one kind of samples, and the mean of those that saw both."""
    return {
        **noised,
        **{name: (v + noised[name]) / 2 if name in noised else v for name, v in clean.items()},
    }


@dataclass(frozen=True)
class Evaluation:
    """When and on what a run is evaluated.

    `local_accuracy` is the mean over clients of the widest model's accuracy on the client's own test samples. Where the
    loss is masked by client, it is among the client's classes alone. The codes released with HeteroFL and FedRolex set
    the logits of other classes to 0 instead, and predict among all: `absent="zero"` gives their number, which is lower
    or equal where clients are tested on classes that they hold.
    Tasks whose main figure is not accuracy have that figure in its place, such as `local_rmse`.
    """

    every: int = 1  # rounds; the last round is always evaluated, 0: only that one
    batch_size: int = (
        50  # norm statistics are means over batches of so many; a CPU is fastest with about so many
    )
    clients: int = 100  # at most so many clients take part where a metric is a mean over clients
    local: bool = True  # also test the widest model on each client's own part of the test set, if there are parts
    absent: Absent = "hidden"  # Classes that a client lacks, in its own test: never predicted, or with a logit of zero
    domains: bool = (
        True  # also tell the main figure on each domain of the test set, if it has domains
    )
    shares: tuple[float, ...] = ()  # tested besides those that devices hold
    robustness: tuple[
        float, ...
    ] = ()  # also tell the main figure, standard and under attack, with dual norms so mixed
    attack: PGD = PGD()  # that nets are tested under, where their robustness is asked for
    on: EvaluatedOn = (
        "test"  # Samples of all evaluations: the test set, or what data.validation holds back
    )

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
        """Return data whose test set is what this evaluates on.

        Raises:
            ConfigError: Validation samples are to be evaluated on, and clients hold back none.
        """
        return data if self.on == "test" else data.on_validation()

    def due(self, round: int, rounds: int) -> bool:
        return round == rounds or bool(self.every and round % self.every == 0)


@dataclass(frozen=True)
class Grades:
    """Every metric by name and then by share, and the name of the main one. Without a name nothing was evaluated."""

    main: str = ""
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)

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
    """Test what a device of each budget would get, and add the method's own figures of the server's state.

    Figures are of the whole model. One that is not finite is left out, because JSON cannot hold it.
    """
    method, world = federation.method, federation.world
    grades = _tested(federation, server, fleet, engine, how)
    if method.keeps_nets:
        grades.metrics.update(_kept_by_clients(federation, server, fleet, engine, how))
    whole = share_label(method, Budget(share=1.0), world)
    for name, value in method.figures(
        server, world, gradients_at(federation, server, engine, how)
    ).items():
        if math.isfinite(value):
            grades.metrics[name] = {whole: value}
    return grades


def _kept_by_clients(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> dict[str, dict[str, float]]:
    """Test the nets that clients keep, on all test samples and on their own, and return metrics by budget."""
    task = federation.world.task
    found: dict[str, list[Score]] = {}
    for some in _few(_remembering(federation, fleet, server, engine, how)):
        exams = [
            exam for client in some for exam in _kept_exams(federation, server, client, engine, how)
        ]
        scores = engine.evaluate(federation, [exam for _, exam in exams], how.batch_size)
        for (metric, _), score in zip(exams, scores, strict=True):
            found.setdefault(metric, []).append(score)
    return {metric: main_by_label(scores, task) for metric, scores in found.items()}


def _remembering(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """Draw clients among those that remember something, each as it was when it trained last."""
    seed = federation.world.seed
    pool = sorted({client for client, scope in server.memory if not scope})
    count = min(how.clients, len(pool))
    drawn = (
        [pool[place] for place in noise.choose(noise.key(seed, 23), count, len(pool))]
        if pool
        else []
    )
    return [
        fleet.client(client, server.last(client), seed, engine.size(client)) for client in drawn
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
        if how.local and engine.tests_by_client:
            own = replace(exam, client=client.id, own_classes=own_classes, absent=how.logit)
            yield f"local_{name}_{main}", own


def _remembered(
    federation: Federation, net: Submodel, memory: Memory, device: torch.device
) -> dict[str, Tensor]:
    """Return a net's weights as a client remembers them, else the initial ones."""
    cutter, initial = federation.world.family.cutter, federation.initial_on(device)
    names = [name for name in federation.world.family.member(net).names if name in initial]
    first = cutter.gather(initial, net, names)
    return cutter.overlay(first, net.held, memory.weights, memory.submodel.held)


def gradients_at(
    federation: Federation, server: Server, engine: Engine, how: Evaluation
) -> Gradients:
    """Return the function that a method asks for gradients at the server's state."""

    def gradients(nets: Sequence[Submodel], samples: int) -> list[dict[str, Tensor]]:
        cuts = _cut(federation, server, nets)
        return engine.pooled_gradients(
            federation, [(net, cuts[net]) for net in nets], how.batch_size, samples
        )

    return gradients


def _tested(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine, how: Evaluation
) -> Grades:
    """Test what a device of each budget would get: from the server, or, where results live on clients, theirs."""
    method, world, task = federation.method, federation.world, federation.world.task
    server = arranged(federation, server, engine)
    if method.personal:
        scores: list[Score] = []
        under: dict[str, list[Score]] = {}
        for some in _few(_asked(federation, fleet, server, engine, how)):
            own = [own_exam(federation, server, client, engine, how) for client in some]
            scores += engine.evaluate(federation, own, how.batch_size, how.domains)
            for metric, attacked in _under_attack(federation, engine, how, own).items():
                under.setdefault(metric, []).extend(attacked)
        grades = _grades(scores, task)
        grades.metrics.update(
            {metric: main_by_label(attacked, task) for metric, attacked in under.items()}
        )
        return grades
    members = members_by_share(method, server, fleet.kinds, world, how.shares)
    submodels = list(dict.fromkeys(net for nets in members.values() for net in nets))
    weights = ready(federation, server, submodels, engine, how.batch_size)
    exams = [EvalJob(label, nets, joined(nets, weights)) for label, nets in members.items()]
    grades = _grades(engine.evaluate(federation, exams, how.batch_size, how.domains), task)
    if how.local and engine.tests_by_client:
        widest = max(exams, key=lambda exam: sum(world.family.count(net.arch) for net in exam.nets))
        asked = _asked(federation, fleet, server, engine, how)
        by_client = _by_client([widest], asked, federation, engine, how)
        local = engine.evaluate(federation, by_client, how.batch_size)
        grades.metrics[f"local_{task.main.name}"] = main_by_label(local, task)
    if how.robustness:
        asked = _asked(federation, fleet, server, engine, how)
        under = _under_attack(
            federation, engine, how, _by_client(exams, asked, federation, engine, how)
        )
        grades.metrics.update(
            {metric: main_by_label(attacked, task) for metric, attacked in under.items()}
        )
    return grades


def arranged(federation: Federation, server: Server, engine: Engine) -> Server:
    """Return the state as it is tested and handed out: with nets in the order of their scores, if a method asks.

    Scores are those on all validation samples where clients hold some back, else on a number of training samples.
    """
    method, world = federation.method, federation.world
    candidates = method.candidates(server, world)
    if not candidates:
        return server
    return method.arranged(server, scored(federation, server, candidates, engine), world)


def scored(federation: Federation, server: Server, candidates: Mix, engine: Engine) -> list[float]:
    """Return a score for each of some nets, the task's main figure, negative where lower is better.

    It is measured on all validation samples where clients hold some back, else on a number of training samples.
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


def _grades(scores: Sequence[Score], task: Task) -> Grades:
    """Return every metric, and the main one on every domain as a metric of its own: `accuracy/mnist`."""
    by_domain: dict[Domain, list[Score]] = {}
    for score in scores:
        for domain, own in score.domains.items():
            by_domain.setdefault(domain, []).append(own)
    main = task.main.name
    found = means_by_label(scores, task)
    found |= {
        f"{main}/{domain[1]}": main_by_label(by_domain[domain], task)
        for domain in sorted(by_domain)
    }
    return Grades(main, {metric: values for metric, values in found.items() if values})


def _by_client(
    exams: Sequence[EvalJob],
    clients: Sequence[Client],
    federation: Federation,
    engine: Engine,
    how: Evaluation,
) -> list[EvalJob]:
    """Return tests on each client's own test samples. Where there are none, the tests stay as they are."""
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
    """The main figure of the same nets, standard and robust, at every robustness they can be told to have.

    `standard/0.2` and `robust/0.2`; nets with single norms have one of each, `standard` and `robust`.
    """
    chosen = [(f"/{float(one)}", float(one)) for one in how.robustness]
    if not federation.world.family.adjustable:
        chosen = [("", 0.0)][: len(chosen)]
    kinds = {
        f"{metric}{suffix}": (robustness, attack)
        for suffix, robustness in chosen
        for metric, attack in (("standard", None), ("robust", how.attack))
    }
    asked = [
        replace(exam, robustness=one, attack=attack)
        for one, attack in kinds.values()
        for exam in exams
    ]
    scores = engine.evaluate(federation, asked, how.batch_size) if asked else []
    return {
        metric: scores[place * len(exams) : (place + 1) * len(exams)]
        for place, metric in enumerate(kinds)
    }


def joined(nets: Mix, weights: Mapping[Submodel, Weights]) -> dict[str, Tensor]:
    """The weights of several nets, by scope and name."""
    return {net.scope + name: value for net in nets for name, value in weights[net].items()}


def given(method: Method, server: Server, budget: Budget, world: World) -> Mix:
    """The nets a method gives a device, which are a tuple even where there is one."""
    nets = method.deploy(server, budget, world)
    if not isinstance(nets, tuple):
        raise ConfigError(
            f"{type(method).__name__}.deploy returned a {type(nets).__name__} for the budget {budget}; a tuple of "
            "sub-models fits, whose logits are averaged: (submodel,)."
        )
    return nets


def owned(method: Method, server: Server, client: Client, world: World) -> Mix:
    """Return the nets that are a client's, where results live on clients.

    Raises:
        SubmodelError: There are none, as the plan of a method that skips clients gives where it leaves out this one.
    """
    nets = method.own(server, client, world)
    if not nets:
        name = type(method).__name__
        raise SubmodelError(
            f"{name}.own returned no net for client {client.id} (budget {client.budget}), which is tested with its own "
            f"nets. {name}.plan skips it; override `own` to return what the client has."
        )
    return nets


def trained_within(method: Method, budget: Budget, world: World) -> Budget:
    """Return a fleet's budget with the share that a client can train in place of its memory.

    `Method.deploy` takes a bound on memory for one on inference. A client is tested with nothing wider
    than what it trains, because nobody may have trained the rest.
    """
    return method.without_memory(budget, world, trains=True) if budget.memory else budget


def members_by_share(
    method: Method,
    server: Server,
    budgets: Sequence[Budget],
    world: World,
    shares: Sequence[float] = (),
) -> dict[str, Mix]:
    """What a device of each budget gets, widest first; and of other shares that are asked for.

    The whole model is among them even where no device holds it: a server's may be larger than any client's.
    """
    found: dict[str, Mix] = {}
    asked = () if method.personal else (Budget(share=share) for share in (1.0, *shares))
    for kind in (*tested_budgets(method, budgets), *asked):
        budget = trained_within(method, kind, world)
        own = Client(0, budget)
        nets = (
            owned(method, server, own, world)
            if method.personal
            else given(method, server, budget, world)
        )
        found.setdefault(share_label(method, kind, world), nets)
    return dict(sorted(found.items(), key=lambda item: -float(item[0])))


def ready(
    federation: Federation,
    server: Server,
    submodels: Sequence[Submodel],
    engine: Engine,
    batch_size: int,
) -> dict[Submodel, dict[str, Tensor]]:
    """Sub-models' weights as they are tested or deployed: cut, and their norms re-estimated if the policy says so."""
    method, family = federation.method, federation.world.family
    cuts = _cut(federation, server, submodels)
    if method.local.norm.measures and family.statistics:
        found = measured_statistics(federation, list(cuts.items()), engine, batch_size)
        for own, statistics in zip(cuts.values(), found, strict=True):
            own |= statistics
    return cuts


def _cut(
    federation: Federation, server: Server, submodels: Sequence[Submodel]
) -> dict[Submodel, dict[str, Tensor]]:
    """Return sub-models' weights and norm statistics, as far as the server's state has them."""
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
    """A net's norm statistics over samples as the model sees them: the mean over batches."""
    example, samples = family.example_inputs[0], torch.as_tensor(samples)
    if samples.shape[1:] != example.shape[1:] or len(samples) < 2:
        raise ConfigError(
            f"norms were to be measured over samples of shape {tuple(samples.shape)}; the model takes two or more of "
            f"shape {tuple(example.shape[1:])}."
        )
    like = next(value for value in state.values() if value.is_floating_point())
    inputs = samples.to(like.device, like.dtype if samples.is_floating_point() else samples.dtype)

    def seen(robustness: float) -> dict[str, Tensor]:
        mode = Pass(statistics="measure", robustness=robustness)
        with torch.no_grad():  # copies: a net may begin with an operation in place
            found = [
                family.member(net).net(state, some.clone(), mode)[1]
                for some in batched(inputs, batch_size)
            ]
        return mean_statistics(found, len(found))

    # Without labels nothing can be attacked: both kinds of norms see the samples as they are.
    return both_statistics(seen(0.0), seen(1.0)) if family.adjustable else seen(0.0)


def _asked(
    federation: Federation, fleet: Fleet, server: Server, engine: Engine, how: Evaluation
) -> list[Client]:
    """The clients that are tested on their own samples: all of a small fleet, a draw of a large one.

    Where results live on clients, the draw is among those that have one: most of a large fleet have never trained.
    """
    personal, seed = federation.method.personal, federation.world.seed
    count = min(how.clients, fleet.num_clients)
    trained = (
        sorted({client for client, _ in server.memory})
        if personal and count < fleet.num_clients
        else []
    )
    pool: Sequence[int] = trained if len(trained) >= count else range(fleet.num_clients)
    drawn = [pool[place] for place in noise.choose(noise.key(seed, 23), count, len(pool))]
    # A budget may change from round to round; what a client has of its own it has from the last.
    when = {client: server.last(client) if personal else server.round for client in drawn}
    return [
        fleet.client(client, round, seed, engine.size(client)) for client, round in when.items()
    ]


def _few(clients: list[Client], count: int = 16) -> Iterator[list[Client]]:
    """So many at once that they stack, so few that their nets fit in memory."""
    for first in range(0, len(clients), count):
        yield clients[first : first + count]


def own_exam(
    federation: Federation, server: Server, client: Client, engine: Engine, how: Evaluation
) -> EvalJob:
    """Return a test of what a client holds now, on its own test samples, or on all where clients have none."""
    method, world = federation.method, federation.world
    nets = owned(method, server, client, world)
    jobs = [Job(client, net, server.round) for net in nets]
    states = {job.submodel: own_state(federation, server, job, engine.device) for job in jobs}
    if method.local.norm.measures and world.family.statistics:
        found = measured_statistics(
            federation, list(states.items()), engine, how.batch_size, client.id
        )
        states = {
            net: {**state, **own} for (net, state), own in zip(states.items(), found, strict=True)
        }
    label, own_classes = share_label(method, client.budget, world), _among_own_classes(federation)
    return EvalJob(label, nets, joined(nets, states), client.id, own_classes, how.logit)


def _among_own_classes(federation: Federation) -> bool:
    """Return True if clients train among their own classes only, so that they are tested among them."""
    return federation.method.local.masked == "client" and federation.world.task.has_classes
