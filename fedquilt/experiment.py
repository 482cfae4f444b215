"""`fedquilt.run`: one federation from its parts, and what one does with it afterwards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fedquilt import noise
from fedquilt.checkpoint import Checkpointing
from fedquilt.checks import whole
from fedquilt.clientwise import Clientwise, clientwise
from fedquilt.customise import CustomisableModel, customisable
from fedquilt.data import FederatedData, Pool
from fedquilt.data.parts import Array
from fedquilt.deploy import deployed
from fedquilt.devices import device_of
from fedquilt.engines import ENGINES
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.simulation import Simulation, check_inputs, check_public
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family import Family
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.family.norms import NormPolicy
from fedquilt.faults import enough_memory
from fedquilt.generators import random_state
from fedquilt.loop import complete
from fedquilt.memory import LIMIT, Memories
from fedquilt.methods import Method
from fedquilt.milestones import Milestone, check_target, reached
from fedquilt.names import known
from fedquilt.precision import DTYPES, Precision
from fedquilt.records import (
    Folder,
    describe,
    holds_a_run,
    identity,
    portrait,
    rounds_planned,
    summarise,
    undisturbed,
)
from fedquilt.round import Evaluation, Fleet, Grades, Record, play
from fedquilt.round.budgets import check_budgets, learner_of, planned, too_small
from fedquilt.round.engine import Engine
from fedquilt.round.federation import Federation, World
from fedquilt.round.labels import budgets_by_share
from fedquilt.round.link import PERFECT, Link
from fedquilt.round.serve import compared_passes, members_by_share
from fedquilt.round.training.augmentation import check_augmentation
from fedquilt.round.training.check import check_objectives, has_own_objective
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.step import Batch
from fedquilt.tasks import Task, check_task, find_task, infer, is_own
from fedquilt.terms import Arch, Budget, Client, Job, Server
from fedquilt.tracking import Tracking

if TYPE_CHECKING:
    from fedquilt.export import Exported

_log = logging.getLogger(__name__)


@dataclass
class Run:
    """A federation and its state; `train` goes on from where it stands."""

    federation: Federation
    fleet: Fleet
    engine: Simulation
    evaluation: Evaluation
    server: Server
    records: list[Record] = field(default_factory=list)
    absent: str = ""  # why there is no data, of a run that was reopened without
    settled_for: int | None = (
        None  # Rounds that the method was settled for. None: it was used as it was given.
    )

    def __post_init__(self) -> None:
        self._has_warned = False  # of devices that cannot hold the net

    @property
    def method(self) -> Method:
        return self.federation.method

    @property
    def world(self) -> World:
        return self.federation.world

    @property
    def link(self) -> Link:
        return self.federation.link

    @property
    def data(self) -> FederatedData:
        """Return the samples of all clients, on the engine's device. The test set is what is evaluated on."""
        return self.engine.data

    @property
    def history(self) -> list[dict[str, Any]]:
        """The records of all rounds so far, as plain values."""
        return [record.to_dict() for record in self.records]

    @property
    def accuracy(self) -> dict[str, float]:
        """Return accuracy in the last evaluation, by share; empty where the task has none."""
        return self.grades.accuracy

    @property
    def devices(self) -> dict[str, tuple[Budget, ...]]:
        """Return the budgets of the fleet as they were given, by the keys of `accuracy` and `metrics`.

        A key is the share of the model that a budget allows, so that several budgets may have one. Methods that serve
        one net to all devices, such as FedAvg, are evaluated at fewer keys than there are here.
        """
        return budgets_by_share(self.method, self.fleet.kinds, self.world)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Return every metric in the last evaluation, by name and then by share."""
        return self.grades.metrics

    @property
    def grades(self) -> Grades:
        """Return the last evaluation."""
        return next(
            (record.grades for record in reversed(self.records) if record.grades.main), Grades()
        )

    @property
    def summary(self) -> dict[str, Any]:
        """How the run stands, in one object, as `summary.json` has it."""
        return summarise(self)

    @cached_property
    def _too_small(self) -> str:
        """Say how many devices cannot hold the net.

        Every distinct budget takes a plan, and a fleet may have one for each client, so that preparing, reopening and
        exporting a run do not wait for it.
        """
        count = too_small(self.method, self.server, self.fleet, self.engine, self.world)
        return (
            f"{count} of {self.fleet.num_clients} devices cannot hold the net that they train"
            if count
            else ""
        )

    @property
    def note(self) -> str:
        """Return what readers of the results must know.

        These are the method's note, how many devices are too small, and if no test sample was seen.
        """
        samples = (
            "" if self.evaluation.on == "test" else f"evaluated on {self.evaluation.on} samples"
        )
        return "; ".join(part for part in (self.method.note, self._too_small, samples) if part)

    def reached(self, target: float, share: float = 1.0, metric: str = "") -> Milestone | None:
        """Return when a share first had so good a metric, and what that took; None: never so far.

        Args:
            target: Value of the metric: at least this, or at most, as is better for the metric.
            share: Share of the model.
            metric: Name of a metric of the records, such as `accuracy/svhn`. Empty: the task's main one.
        """
        task = self.world.task
        name = metric or task.main.name
        check_target(target, name, task.metric_of(name).is_rate)
        return reached(self.records, target, share, name, task.metric_of(name).higher_is_better)

    def train(self, rounds: int, watch: Callable[[Record], None] | None = None) -> Run:
        """Play until `rounds` are behind it. If a round fails, or ctrl-C stops it, it is as if it had not begun."""
        if self.absent:
            raise ConfigError(
                f"a run was to be trained to round {rounds}; its data cannot be had: {self.absent}"
            )
        rounds = _whole("rounds", rounds)
        self.fleet.check(rounds)
        if self.server.round < rounds and not self._has_warned and self._too_small:
            self._has_warned = True
            _log.warning("%s ignores budgets: %s.", type(self.method).__name__, self._too_small)
        while self.server.round < rounds:
            with enough_memory(f"playing round {self.server.round + 1}"):
                played = play(
                    self.federation, self.server, self.fleet, self.engine, rounds, self.evaluation
                )
            with undisturbed():
                # Memories move on in place, once the round has succeeded: a copy would cost with the population.
                self.server.memory.update(played.memory)
                self.server = played.server
                self.records.append(played.record)
                if watch:
                    watch(played.record)
        return self

    def clientwise(self, clients: Sequence[int] | None = None) -> Clientwise:
        """What every client spent and got, and what each domain had trained; of many clients ask for some."""
        return clientwise(self, clients)

    def save(self, path: str | Path) -> None:
        """Write the run into a folder of its own; `fedquilt.load` has its weights, and `fedquilt.run` can go on."""
        # A run that resumes settles its method for these rounds again, however many were trained.
        rounds = self.server.round if self.settled_for is None else self.settled_for
        with Folder.create(path, describe(self, rounds)) as folder:
            folder.watch(self)
            folder.finish(self.summary)

    def deploy(
        self,
        budget: Budget | None = None,
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
        robustness: float | None = None,
        share: float | None = None,
    ) -> nn.Module:
        """Return a plain nn.Module within the budget, with trained weights and the statistics of its norms.

        Args:
            budget: Budget of the device. The module costs no more. None: the whole model, or `share` of it.
            client: Client whose own result is deployed. None: the server's.
            norms: Norm policy, or its name, which decides what the norms normalize by. `batch`: the batch. `tracked`:
                statistics tracked in training. `local` and `local-all`: those that the client kept. `post`: measured
                over the training samples of all clients, or of `client`. `post-own`: measured over the samples of
                `client`. `post-public`: measured over the public samples. None: those that training left, or `post`.
                Affine weights are always those that were trained.
            samples: Inputs on which statistics are measured instead. They count where the policy measures.
            robustness: Robustness of dual norms, from 0 (clean, the default) to 1. `fq.set_robustness` changes it.
            share: Share of the model in (0, 1], in place of `budget`.
        """
        asked = _budget("deploy", budget, share)
        return deployed(self, asked, client, norms, samples).module(robustness)

    def export(
        self,
        file: str | Path,
        budget: Budget | None = None,
        *,
        share: float | None = None,
        **how: Any,
    ) -> Exported:
        """Write what `deploy` gives as ONNX, .pt2 or safetensors, compared with torch.

        Args:
            file: File that is written. Its ending is the format, unless `format` names one.
            budget: Budget of the device. None: the whole model, or `share` of it.
            share: Share of the model in (0, 1], in place of `budget`.
            **how: Options of `fedquilt.export.export`.
        """
        from fedquilt.export import export

        return export(self, file, _budget("export", budget, share), **how)

    def customisable(
        self,
        shares: Iterable[float] = (1.0, 0.5, 0.25, 0.125),
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
    ) -> CustomisableModel:
        """One module for all of these shares that holds weights once: `model.set(share=0.5)` while it is in use."""
        return customisable(self, shares, client, norms, samples)


def run(
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorised",
    rounds: int = 10,
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    watch: Callable[[Record], None] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpointing: Checkpointing = Checkpointing(),
    memory_limit: int = LIMIT,
    trackers: Sequence[Tracking] = (),
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """Train a family on a fleet's data and return the finished run. `watch` is called after every round.

    A `task` has the loss and the metrics: fq.tasks.Regression(loss="huber"), or a name of `fedquilt list tasks`. If
    none is given it is found from the targets and the model's output.
    What travels goes over `link`: fq.Link(loss=…, codec=…, clock=…), or fq.Link.preset("lossy-mild").

    With `out` the run is recorded in that folder, and with `resume` it goes on from what is there, if anything is.
    Its numbers go to `trackers` as well: TensorBoard, Weights & Biases, MLflow (`tracking.py`).
    An error raised by a round carries the run, with the last good state, as `error.run`.
    """
    rounds = _whole("rounds", rounds)
    for one in trackers:
        one.check()
    _check_kind("run", method, Method, "fq.methods.FedAvg()")
    goes_on = resume and out is not None and holds_a_run(Path(out))
    settled_for = rounds_planned(Path(out), rounds) if out and goes_on else rounds
    method = method.settled(settled_for)
    prepared = prepare(
        method,
        family,
        data,
        fleet,
        engine,
        seed,
        device,
        precision,
        evaluation,
        memory_limit,
        link,
        task,
    )
    prepared.settled_for = settled_for
    try:
        with ExitStack() as stack:
            folder = None
            if out is not None:
                folder = stack.enter_context(
                    Folder.resume(out, checkpointing)
                    if goes_on
                    else Folder.create(out, describe(prepared, rounds), checkpointing)
                )
                if goes_on:
                    folder.load(prepared)
            complete(
                prepared,
                rounds,
                folder=folder,
                path=Path(out) if out else None,
                trackers=trackers,
                settings=_settings(prepared, rounds) if trackers else {},
                watch=watch,
            )
        return prepared
    except Exception as error:
        error.run = prepared  # type: ignore[attr-defined]  # not only ours: what was learnt must not be lost
        raise


def _settings(run: Run, rounds: int) -> dict[str, Any]:
    """What is known of a run that was put together in Python, its method's settings one by one."""
    method = {name: value for name, value in identity(run).items() if name.startswith("method.")}
    return {**portrait(run, rounds), **method}


@enough_memory("setting up the run")
def prepare(
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorised",
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    memory_limit: int = LIMIT,
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """A run that has not begun. Client memories beyond `memory_limit` bytes are kept on disk.

    Without a `task` it is found from all training targets and the model's output.

    The method is used as it is given. `run` settles it for its number of rounds first; here `method.settled(rounds)`
    does that, for methods that depend on the number of rounds.

    An engine may be given instead of its name, such as that of another run. Its device and precision count then, and
    what it has recorded is used where it is of the same family and the same samples.
    """
    _check_kind("run", method, Method, "fq.methods.FedAvg()")
    _check_kind("run", family, Family, "fq.trace(module, data.example)")
    _check_kind("run", data, FederatedData, "pool.deal(20)")
    _check_kind("run", fleet, Fleet, "fq.Fleet.of([1, 1/2], num_clients=20)")
    _check_kind("run", link, Link, 'fq.Link.preset("lossy-mild")')
    seed = _whole("seed", seed)
    link.check(fleet.num_clients)
    if fleet.num_clients > data.num_clients:
        raise ConfigError(
            f"the fleet has {fleet.num_clients} clients, but {data.name} is dealt to {data.num_clients}. "
            "Deal it to as many as the fleet has."
        )
    evaluation = evaluation or Evaluation()
    family = method.adapt(family)
    data = evaluation.samples(data.among(fleet.num_clients))
    family.check_forgets()
    check_inputs(family, data)
    if isinstance(engine, Simulation):
        engine = engine.with_data(data)
    elif not isinstance(engine, str):
        found = (
            f"the class {engine.__name__}"
            if isinstance(engine, type)
            else f"a {type(engine).__name__}"
        )
        raise ConfigError(
            f"run was given {found} as the engine; a name that `fedquilt list engines` shows would work, or an "
            "instance of a class derived from fedquilt.engines.Simulation."
        )
    else:
        known(DTYPES, precision, "precision")
        options = EngineOptions(device_of(device), precision)
        engine = known(ENGINES, engine, "engine").create(data, options)
    task = found_task(task, family, data)
    _warn_of_outputs(task, family, data)
    world = World(
        family, seed, engine.precision, engine.data.public_samples, task, fleet.num_clients
    )
    federation = Federation(world, method, link)
    link.check_codec(world, engine.device)
    server = placed(method.init(world), engine.device)
    engine.begin(federation)
    _check_task(federation, engine)
    _check_public(federation, engine)
    _check_budgets(federation, server, fleet, engine)
    _check_nets(federation, server, fleet, engine, evaluation)
    memory = Memories(memory_limit, engine.device)
    memory.update(server.memory)
    return Run(federation, fleet, engine, evaluation, replace(server, memory=memory))


def found_task(task: Task | str | None, family: Family, data: Pool) -> Task:
    """Return the task that was asked for, or the one that fits all training targets and the model's output.

    Args:
        task: A task, its name, or None if none was asked for.
        family: Family of the model.
        data: Samples with their targets.
    """
    shape = family.output_shape
    if task is None:
        found = infer(data.targets, shape, name=data.name)
        if found.has_classes and data.targets.dim() > 2:
            _log.warning(
                "the targets of %s are masks, and no task was named: pixels are classified, and "
                "accuracy is reported. The task segmentation trains by cross-entropy and Dice and "
                "reports Dice. To name the task classification leaves this message out.",
                data.name,
            )
        return found
    if isinstance(task, str):
        return find_task(task).settled(shape)
    _check_kind("run", task, Task, "fq.tasks.Regression()")
    return task.settled(shape)


def _warn_of_outputs(task: Task, family: Family, data: Pool) -> None:
    """Warn if the model has outputs for classes that the data does not have."""
    if not (task.has_classes and data.num_classes):
        return
    num_classes = task.num_outputs(data.targets, data.num_classes)
    if family.num_outputs > num_classes:
        _log.warning(
            "the model has %d outputs, and %s has %d classes. No sample has a class for the other outputs.",
            family.num_outputs,
            data.name,
            num_classes,
        )


def _check_task(federation: Federation, engine: Simulation) -> None:
    """Refuse a task that the method or the engine cannot have, or whose loss or metrics are not what they should be.

    Raises:
        ConfigError: As above. Tasks and metrics that are part of fedquilt are not tried out.
    """
    task, method, world = federation.world.task, federation.method, federation.world
    method.check_task(task)
    if not engine.outputs_may_leave:
        task.refuse_collected(f"the engine {type(engine).__name__}")
    if not is_own(task):
        return
    member = world.family.member(world.family.whole)
    state = world.family.init(world.seed, engine.device, world.dtype)
    rows = torch.arange(2, device=engine.device) % len(engine.data.targets)
    with torch.no_grad(), engine.computing():
        outputs, _ = member.net(
            state, engine.data.samples(rows), Pass(train=False, statistics="batch")
        )
    # A net that predicts its targets exactly would have no gradient, and look like a loss without one.
    shaken = outputs + 0.1 * noise.uniform(
        torch.tensor(noise.key(0), device=outputs.device), outputs.shape, outputs.dtype
    )
    check_task(
        task, shaken.movedim(member.class_dim, 1), engine.data.targets[rows], engine.data.name
    )


def _check_public(federation: Federation, engine: Simulation) -> None:
    """Refuse public samples that do not fit, and methods and norm policies that need more than there are."""
    method, world = federation.method, federation.world
    check_public(type(method).__name__, method.needs_public, world, engine.data)
    if world.family.statistics:
        federation.method.local.norm.check_public(world.num_public)


def placed(server: Server, device: torch.device) -> Server:
    """Return a state with its tensors on a device."""
    return replace(
        server,
        weights={name: value.to(device) for name, value in server.weights.items()},
        slots={
            slot: {name: value.to(device) for name, value in own.items()}
            for slot, own in server.slots.items()
        },
        extras={name: value.to(device) for name, value in server.extras.items()},
    )


_MANY = 1_024  # budgets of a union, whose nets are few and fitted quickly
_FEW = 64  # budgets; fitting one takes a moment, and a fleet of real devices may have thousands


def _check_budgets(federation: Federation, server: Server, fleet: Fleet, engine: Engine) -> None:
    """Say now, and whose it is, if a budget holds nothing to train: its client may be drawn on the third day."""
    method, world = federation.method, federation.world
    less = [budget for budget in fleet.kinds if budget.share is not None and budget.share < 1]
    if less and not world.family.whole.widths:
        notes = " ".join(world.family.layout.notes)
        _log.warning(
            "nothing of the model can be cut: devices train the whole of it, also for %s. %s",
            less[0],
            notes,
        )
    draws_from_torch = False
    for budget in fleet.kinds[:_FEW]:
        first = fleet.first(budget)
        client = Client(first, budget, engine.size(first))
        for state in _turns(federation, server):
            try:
                fitted = method.fit(budget, world)
                before = torch.get_rng_state()
                plan = planned(method, state, client, world)
            except BudgetError as error:
                raise BudgetError(f"client {client.id}: {error}") from error
            draws_from_torch |= not torch.equal(torch.get_rng_state(), before)
            check_budgets(method, [Job(client, submodel, state.round) for submodel in plan], world)
        if not method.ignores_budgets:
            _warn_of_single_channels(budget, fitted, world)
    if draws_from_torch:
        _log.warning(
            "%s.plan draws from torch's global generator. Its plans differ between repeated, resumed and distributed "
            "runs. fedquilt.noise draws by keys such as noise.key(world.seed, server.round, client.id).",
            type(method).__name__,
        )


def _warn_of_single_channels(budget: Budget, fitted: Arch, world: World) -> None:
    """Warn if a share is less than one channel of some axes, so that one channel is trained there."""
    if budget.share is None:
        return
    whole = world.family.whole.sizes
    narrow = [
        axis
        for axis, width in fitted.widths
        if width == 1 and whole.get(axis, 1) > 1 and budget.share * whole[axis] < 1
    ]
    if narrow:
        _log.warning(
            "a share of %g is less than one channel on %d of %d axes, such as %r with %d channels. One channel is "
            "trained there.",
            budget.share,
            len(narrow),
            len(fitted.widths),
            narrow[0],
            whole[narrow[0]],
        )


def _turns(federation: Federation, server: Server) -> list[Server]:
    """Return the state at the beginning of every round in which plans change."""
    return [replace(server, round=round) for round in federation.method.turns(federation.world)]


def _check_nets(
    federation: Federation, server: Server, fleet: Fleet, engine: Simulation, evaluation: Evaluation
) -> None:
    """Refuse a model of which clients would train another network than the user wrote, and objectives that fail."""
    method = federation.method
    modes = compared_passes(method.local, method.local.norm)
    trained = list(_trained(federation, server, fleet, engine))
    _warn_of_idle_nets(federation, server, fleet, engine)
    for member, learner in trained:
        member.check_net(modes)
        _check_samples(engine.data, learner)
    _check_objectives(federation, engine, trained)
    nested = (net for member, learner in trained for net in learner.nets(member))
    for member in dict.fromkeys((*nested, *_tested(federation, server, fleet, evaluation))):
        member.check_net(modes)


def _trained(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine
) -> Iterator[tuple[Member, Learner]]:
    """Yield the members that clients of the first budgets train, each with how it is trained."""
    method, world = federation.method, federation.world
    for budget in fleet.kinds[:_FEW]:
        first = fleet.first(budget)
        client = Client(first, budget, engine.size(first))
        for state in _turns(federation, server):
            for submodel in planned(method, state, client, world):
                learner = learner_of(method, Job(client, submodel, state.round), world)
                _check_learner(method, learner, world)
                yield world.family.member(submodel), learner


def _warn_of_idle_nets(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine
) -> None:
    """Warn if no client trains some net of a union: the first clients, and the first of each budget.

    The first net may be the server's.
    """
    method, world = federation.method, federation.world
    layout = world.family.layout
    if not layout.nets:
        return
    busy = set[str]()
    first = [fleet.first(budget) for budget in fleet.kinds[:_MANY]]
    for place in dict.fromkeys([*range(min(_FEW, fleet.num_clients)), *first]):
        client = fleet.client(place, 0, world.seed, engine.size(place))
        for state in _turns(federation, server):
            for submodel in planned(method, state, client, world):
                busy.update(layout.net_names(submodel.arch.variant))
    if idle := [net for net in layout.nets[1:] if net not in busy]:
        _log.warning(
            "%s lets no client train %s of the union's nets %s. FedDF, DS-FL and Fed-ET give every client the "
            "largest net that fits its budget.",
            type(method).__name__,
            ", ".join(map(repr, idle)),
            ", ".join(map(repr, layout.nets)),
        )


def _tested(
    federation: Federation, server: Server, fleet: Fleet, evaluation: Evaluation
) -> Iterator[Member]:
    """Yield the members that are tested for the first budgets."""
    method, world = federation.method, federation.world
    for nets in members_by_share(
        method, server, fleet.kinds[:_FEW], world, evaluation.shares
    ).values():
        yield from (world.family.member(net) for net in nets)


def _check_samples(data: FederatedData, learner: Learner) -> None:
    """Refuse crops, flips and intensities that do not fit the samples or their targets."""
    rows = torch.arange(2, device=data.targets.device) % len(data.targets)
    check_augmentation(data.samples(rows), data.targets[rows], learner.local, learner.task)


def _check_objectives(
    federation: Federation, engine: Simulation, trained: Sequence[tuple[Member, Learner]]
) -> None:
    """Try the user's objectives on two samples, once for each member and way to train it.

    Objectives that are part of fedquilt are not tried out.
    """
    world, data = federation.world, engine.data
    tried: list[tuple[Member, Learner]] = []  # No set, because a user's objective may have no hash
    for member, learner in trained:
        if not has_own_objective(learner) or (member, learner.timeless) in tried:
            continue
        tried.append((member, learner.timeless))
        rows = torch.arange(2, device=engine.device) % len(data.targets)
        whole = world.family.init(world.seed, engine.device, world.dtype)
        state = world.family.cutter.gather(whole, member.prefix, learner.names(member))
        held = torch.ones(world.family.num_outputs, dtype=torch.bool, device=engine.device)
        key = torch.tensor(noise.key(0), device=engine.device)
        share = torch.tensor(learner.share, dtype=world.dtype, device=engine.device)
        batch = Batch(data.samples(rows), data.targets[rows], held, key, share)
        with random_state(0), engine.computing():
            check_objectives(learner, member, state, batch, type(federation.method).__name__)


def _check_learner(method: Method, learner: Learner, world: World) -> None:
    """Refuse a learner that has another loss than the run, and one that distils what the task cannot."""
    task = world.task
    if learner.task != task:
        raise ConfigError(
            f"{type(method).__name__}.learner returned a learner for {learner.task}; the run's task is {task}. Begin "
            "with super().learner(job, world), or pass task=world.task."
        )
    if learner.taught and type(task).divergences is Task.divergences:
        nothing = torch.zeros(world.family.output_shape)
        task.divergences(nothing, nothing, nothing)  # which says what is missing


def _budget(who: str, budget: Budget | None, share: float | None) -> Budget:
    """Return the budget that was asked for, by itself or by its share. Neither: the whole model."""
    if budget is None:
        return Budget(share=1.0 if share is None else share)
    _check_kind(who, budget, Budget, "fq.Budget(share=0.25)")
    if share is not None:
        raise ConfigError(
            f"{who} was given share={share} and a budget ({budget}); one of them says how large it is."
        )
    return budget


def _whole(what: str, given: int) -> int:
    """A number of rounds or a seed as Python's own: files and torch take no other."""
    if not whole(given) or given >= 1 << 63:
        raise ConfigError(
            f"{what} = {given!r} was asked for; whole numbers from 0 on fit, below 2**63."
        )
    return int(given)


def _check_kind(who: str, given: object, kind: type, fits: str) -> None:
    """Say what an argument should have been: a class for its instance, a module for its family, a pool for its deal."""
    if not isinstance(given, kind):
        found = (
            f"the class {given.__name__}"
            if isinstance(given, type)
            else f"{type(given).__name__} {str(given)[:40]!r}"
        )
        raise ConfigError(
            f"{who} was given {found} where a {kind.__name__} belongs, such as {fits}."
        )
