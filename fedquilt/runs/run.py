"""`fedquilt.run`: train one federation. `Run`: evaluate, deploy, export and save the result."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from fedquilt import noise
from fedquilt.checks import check_kinds, whole
from fedquilt.data import FederatedData, Pool
from fedquilt.data.parts import Array
from fedquilt.deploy.customizable import CustomizableModel, customizable
from fedquilt.deploy.deploy import deployed
from fedquilt.deploy.trained import Trained
from fedquilt.engines import ENGINES
from fedquilt.engines.data_checks import check_inputs, check_public
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.errors.faults import enough_memory
from fedquilt.family import Family
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.family.norms import NormPolicy
from fedquilt.hardware.device import device_of
from fedquilt.hardware.generators import Draws, random_state
from fedquilt.hardware.precision import DTYPES, Precision
from fedquilt.methods import Method
from fedquilt.names import known
from fedquilt.round import Evaluation, Fleet, Grades, Record, RoundResult, run_round
from fedquilt.round.budgets import check_budgets, learner_of, planned, too_small
from fedquilt.round.deployed import members_by_share
from fedquilt.round.engine import Engine
from fedquilt.round.eval_jobs import compared_passes
from fedquilt.round.federation import Federation, World
from fedquilt.round.labels import budgets_by_share
from fedquilt.round.link import PERFECT, Link
from fedquilt.round.training.augmentation import check_augmentation
from fedquilt.round.training.batches import num_batches
from fedquilt.round.training.check import check_objectives, has_own_objective
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.step import Batch
from fedquilt.runs.best import Best, mean_figure, validation_figures
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import LIMIT, ClientStates, NotKept, copied
from fedquilt.runs.folder import (
    Folder,
    fingerprint,
    holds_a_run,
    rounds_planned,
    run_settings,
    saved_rounds,
    state_after,
    summarize,
    undisturbed,
)
from fedquilt.runs.loop import complete
from fedquilt.runs.milestones import Milestone, check_target, reached
from fedquilt.runs.per_client import PerClient, per_client
from fedquilt.runs.tracking import Tracking
from fedquilt.tasks import Task, check_task, find_task, infer, is_own
from fedquilt.terms import Arch, Budget, Client, Job, Server

if TYPE_CHECKING:
    from fedquilt.data.origin import Origin
    from fedquilt.deploy.export import Exported
    from fedquilt.runs.experiment import Experiment

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """Model and data as they were passed to a run, from which they may be made again."""

    family: Family  # Family before the method adapted it
    origin: Origin | None  # Description of how the data was made. None: it is not known


@dataclass
class Run(Trained):
    """A federation and its state. `train` continues from the last completed round."""

    records: list[Record] = field(default_factory=list)
    # Number of rounds that the method was settled for. None: it was not settled
    settled_for: int | None = None
    given: Given | None = None  # Model and data as they were passed. None: they are not known
    # Settings that the run was prepared from. None: it was started in Python
    settings: Experiment | None = None
    # Best round so far on validation samples. None: no round was evaluated on any
    best: Best | None = None
    folder: Path | None = None  # Folder that has its checkpoints. None: there is none

    def __post_init__(self) -> None:
        self._has_warned = False  # True once devices that cannot hold the net were reported

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the records of all rounds so far, as plain values."""
        return [record.to_dict() for record in self.records]

    @property
    def accuracy(self) -> dict[str, float]:
        """Return accuracy in the last evaluation, by share. Empty: the task has no accuracy."""
        return self.grades.accuracy

    @property
    def devices(self) -> dict[str, tuple[Budget, ...]]:
        """Return the budgets of the fleet by the keys of `accuracy` and `metrics`.

        A key is the share of the model that a budget allows, so that several budgets may have the
        same key. Methods that serve one net to all devices, such as FedAvg, are evaluated at fewer
        keys.
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
        """Return the summary of the run so far, as `summary.json` has it."""
        return summarize(self)

    @cached_property
    def _too_small(self) -> str:
        """Return a sentence on how many devices cannot hold the net. Empty: all can.

        Every distinct budget takes a plan, and every client may have its own budget. It is
        therefore computed only when it is needed, and not to prepare, reopen or export a run.
        """
        count = too_small(self.method, self.server, self.fleet, self.engine, self.world)
        return (
            f"{count} of {self.fleet.num_clients} devices cannot hold the net that they train"
            if count
            else ""
        )

    @property
    def note(self) -> str:
        """Return remarks that readers of the results need.

        These are the method's note, the number of devices that are too small, and the kind of
        samples if they are not test samples.
        """
        samples = (
            "" if self.evaluation.on == "test" else f"evaluated on {self.evaluation.on} samples"
        )
        return "; ".join(part for part in (self.method.note, self._too_small, samples) if part)

    def reached(self, target: float, share: float = 1.0, metric: str = "") -> Milestone | None:
        """Return when a metric of a share first reached a target, and the cost until then.

        Args:
            target: Value of the metric. Larger or smaller values reach it too, whichever are
                better.
            share: Share of the model.
            metric: Name of a metric of the records, such as `accuracy/svhn`. Empty: the task's main
                one.

        Returns:
            None if the target has not been reached.
        """
        task = self.world.task
        name = metric or task.main.name
        check_target(target, name, task.metric_of(name).is_rate)
        return reached(self.records, target, share, name, task.metric_of(name).higher_is_better)

    def train(self, rounds: int, watch: Callable[[Record], None] | None = None) -> Run:
        """Train until the run has completed a number of rounds.

        If a round fails, or ctrl-C stops it, the state is that of the last completed round.

        Args:
            rounds: Total number of rounds.
            watch: Function that is called with the record of every round. None: none is.
        """
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
                result = run_round(
                    self.federation, self.server, self.fleet, self.engine, rounds, self.evaluation
                )
            with undisturbed():
                # Client states are updated in-place after the round has succeeded, because the cost
                # of a copy would grow with the population.
                self.server.memory.update(result.memory)
                self.server = result.server
                self.records.append(result.record)
                self._warn_if_all_late(result)
                self._keep_if_best(result.record)
                if watch:
                    watch(result.record)
        return self

    def _warn_if_all_late(self, played: RoundResult) -> None:
        """Warn the first time that every client of a round missed the deadline."""
        if not _is_all_late(played.record) or any(map(_is_all_late, self.records[:-1])):
            return
        _log.warning(
            "all %d clients of round %d missed the deadline of %g s, so that the model stays as it "
            "was. The fastest "
            "takes at least %.3g s; a later deadline (link.clock.deadline) would let it take part. "
            "Later rounds of "
            "this kind are recorded without a warning.",
            len(played.late),
            played.record.round,
            self.link.deadline,
            min(played.late.values()),
        )

    def _keep_if_best(self, record: Record) -> None:
        """Keep the state of the round that has just ended if it is the best so far."""
        figures = validation_figures(record.grades, self.evaluation)
        if not figures:
            return
        value = mean_figure(figures, self._fleet_shares)
        sign = 1.0 if self.world.task.main.higher_is_better else -1.0
        if self.best is None or sign * value > sign * self.best.value:
            memory = self.server.memory
            assert isinstance(memory, ClientStates)
            # A folder that watches the run writes the state to disk and drops this one.
            state = replace(self.server, memory=memory.snapshot())
            self.best = Best(record.round, value, figures, state)

    @cached_property
    def _fleet_shares(self) -> frozenset[str]:
        return frozenset(self.devices)

    def at(self, round: int | str) -> Run:
        """Return the run as it was after a round, to deploy from.

        Args:
            round: Number of a round whose state is available: the last one, the best one, and those
                that have a checkpoint in the run's folder. "best": the round with the best main
                figure on validation samples.

        Raises:
            ConfigError: There is no such state. The message lists the available rounds.
            RecordError: Its checkpoint is damaged.
        """
        number = self._number_of(round)
        if number == self.server.round:
            return self
        best = self.best if self.best and self.best.round <= number else None
        records = [record for record in self.records if record.round <= number]
        return replace(self, server=self._state_after(number), records=records, best=best)

    def _number_of(self, round: int | str) -> int:
        """Return the number of a round that was asked for by its number or as the best."""
        if round != "best":
            if isinstance(round, str):
                raise ConfigError(
                    f"the state of round {round!r} was asked for; 'best' fits, or "
                    f"{self._rounds_there}."
                )
            return _whole("round", round)
        if self.best is not None:
            return self.best.round
        main = self.world.task.main
        request = f'round="best" was asked for, that of the best {main.name} on validation samples'
        if not self.engine.has_validation:
            raise ConfigError(
                f"{request}; clients of {self.data.name} hold back none. data.with_validation(0.1) "
                "in Python, "
                "data.validation = 0.1 in a file, holds back a tenth of every client's training "
                "samples before a run. "
                f"Without them {self._rounds_there} can be deployed."
            )
        reason = (
            "no round has been tested on them yet"
            if self.evaluation.best
            else "evaluation.best is off"
        )
        raise ConfigError(
            f"{request}; {reason}, so that no state was kept. {self._rounds_there} can be deployed."
        )

    @property
    def _rounds_there(self) -> str:
        """List the rounds whose state is available, in words."""
        saved = saved_rounds(self.folder) if self.folder else []
        best = [self.best.round] if self.best else []
        rounds = sorted({self.server.round, *saved, *best})
        return f"{'round' if len(rounds) == 1 else 'rounds'} {', '.join(map(str, rounds))}"

    def _state_after(self, round: int) -> Server:
        """Return the state after an earlier round."""
        best = self.best
        if best is not None and best.round == round and best.server is not None:
            memory = best.server.memory
            states = memory if isinstance(memory, NotKept) else copied(memory, self.engine.device)
            return replace(best.server, memory=states)
        folder = best.folder if best is not None and best.round == round else self.folder
        if folder is None or round not in saved_rounds(folder):
            hint = "" if self.folder else " A run with a folder (out=DIR) keeps checkpoints."
            raise ConfigError(
                f"the state after round {round} was asked for; it was not kept. "
                f"{self._rounds_there} can be "
                f"deployed.{hint}"
            )
        return state_after(folder, round, self)

    def per_client(self, clients: Sequence[int] | None = None) -> PerClient:
        """Return costs and results of clients, and the share of parameters trained by each domain.

        Args:
            clients: Numbers of clients. None: all of them, which is slow for a large fleet.
        """
        return per_client(self, clients)

    def save(self, path: str | Path) -> None:
        """Write the run into a new folder.

        `fedquilt.load` reads its weights, and `fedquilt.run` can resume it.
        """
        # A resumed run settles its method for this number again, however many rounds were trained.
        rounds = self.server.round if self.settled_for is None else self.settled_for
        with Folder.create(path, config_text(self, rounds)) as folder:
            copy = replace(self)  # This run continues without the folder.
            folder.watch(copy)
            folder.finish(copy.summary)

    def deploy(
        self,
        budget: Budget | None = None,
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
        robustness: float | None = None,
        share: float | None = None,
        round: int | Literal["best"] | None = None,
    ) -> nn.Module:
        """Return a plain nn.Module within the budget, with trained weights and the statistics of
        its norms.

        Args:
            budget: Budget of the device. The module costs no more. None: the whole model, or
                `share` of it.
            client: Client whose own result is deployed. None: the server's.
            norms: Norm policy, or its name, which decides what the norms normalize by. `batch`: the
                batch. `tracked`: statistics tracked in training. `per_client` and `per_client-all`:
                those that the client kept. `post`: measured over the training samples of all
                clients, or of `client`. `post-own`: measured over the samples of `client`.
                `post-public`: measured over the public samples. None: those that training stored,
                or `post`. Affine weights are always those that were trained.
            samples: Inputs on which statistics are measured instead. No effect if the policy does
                not measure.
            robustness: Robustness of dual norms, from 0 (clean, the default) to 1.
                `fq.set_robustness` changes it.
            share: Share of the model in (0, 1], in place of `budget`.
            round: Round whose weights are deployed, as `at` takes it. "best": the best one on
                validation samples. None: the last one.
        """
        device_budget = _budget("deploy", budget, share)
        run = self if round is None else self.at(round)
        return deployed(run, device_budget, client, norms, samples).module(robustness)

    def export(
        self,
        file: str | Path,
        budget: Budget | None = None,
        *,
        share: float | None = None,
        round: int | Literal["best"] | None = None,
        **how: Any,
    ) -> Exported:
        """Write the result of `deploy` as ONNX, .pt2 or safetensors, after comparing it with torch.

        Args:
            file: File that is written. Its ending is the format, unless `format` names one.
            budget: Budget of the device. None: the whole model, or `share` of it.
            share: Share of the model in (0, 1], in place of `budget`.
            round: Round whose state is written, or "best", as in `deploy`. None: the last one.
            **how: Options of `fedquilt.deploy.export.export`, such as `client` and `norms`.
        """
        from fedquilt.deploy.export import export

        run = self if round is None else self.at(round)
        return export(run, file, _budget("export", budget, share), **how)

    def customizable(
        self,
        shares: Iterable[float] = (1.0, 0.5, 0.25, 0.125),
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
        round: int | Literal["best"] | None = None,
    ) -> CustomizableModel:
        """Return one module for several shares that holds the weights once.

        `model.set(share=0.5)` switches the share while the model is in use.

        Args:
            shares: Shares of the model in (0, 1]. The first one is set.
            client: Client whose own result is deployed. None: the server's.
            norms: Norm policy or its name, as in `deploy`.
            samples: Inputs on which norm statistics are measured, as in `deploy`.
            round: Round whose weights are deployed, or "best", as in `deploy`. None: the last one.
        """
        return customizable(
            self if round is None else self.at(round), shares, client, norms, samples
        )


def _is_all_late(record: Record) -> bool:
    """Return True if some clients missed the deadline and none took part."""
    return bool(record.late) and record.loss is None


def run(
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorized",
    rounds: int = 10,
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    watch: Callable[[Record], None] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint: Checkpointing = Checkpointing(),
    client_state_memory: int = LIMIT,
    trackers: Sequence[Tracking] = (),
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """Train a family on a fleet's data, and return the finished run.

    The command line can open the folder `out` if all parts can be made again by their names
    (docs/runs.md). An error that is raised in a round has the run, with its last good state, as
    `error.run`.

    Args:
        method: Method of federated learning, with its settings.
        family: Model, as `fq.trace` returns it.
        data: Samples of the clients.
        fleet: Clients and their budgets.
        engine: Name of an engine, or an engine, such as that of another run.
        rounds: Total number of rounds.
        seed: Random seed of the run.
        device: Device that clients are trained on, as torch names it.
        precision: Precision of training.
        evaluation: When and how to evaluate. None: the defaults of `Evaluation`.
        watch: Function that is called with the record of every round. None: none is.
        out: Folder that the run is recorded in. None: it is not recorded.
        resume: Continue from the checkpoint in `out`. No effect if the folder has no run.
        checkpoint: Settings of when to save a checkpoint.
        client_state_memory: Bytes of client states kept in memory. Further states are kept on disk.
        trackers: Trackers that log the records: TensorBoard, Weights & Biases, MLflow
            (`tracking.py`).
        link: Link between server and clients, such as `fq.Link.preset("lossy-mild")`. The default
            loses nothing.
        task: Loss and metrics, such as `fq.tasks.Regression(loss="huber")`, or a name of `fedquilt
            list tasks`. None: it is inferred from the targets and the model's output.
    """
    rounds = _whole("rounds", rounds)
    for tracker in trackers:
        tracker.check()
    _check_kind("run", method, Method, "fq.methods.FedAvg()")
    is_resumed = resume and out is not None and holds_a_run(Path(out))
    settled_for = rounds_planned(Path(out), rounds) if out and is_resumed else rounds
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
        client_state_memory,
        link,
        task,
    )
    prepared.settled_for = settled_for
    try:
        with ExitStack() as stack:
            folder = None
            if out is not None:
                folder = stack.enter_context(
                    Folder.resume(out, checkpoint)
                    if is_resumed
                    else Folder.create(
                        out, config_text(prepared, rounds, checkpoint, trackers), checkpoint
                    )
                )
                if is_resumed:
                    folder.load(prepared)
                    folder.extend(rounds)
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
        error.run = prepared  # type: ignore[attr-defined]  # The trained state is not lost.
        raise


def config_text(
    run: Run,
    rounds: int,
    checkpoint: Checkpointing = Checkpointing(),
    trackers: Sequence[Tracking] = (),
) -> str:
    """Return the text of config.toml for a run, from which the command line can open it.

    Args:
        run: A prepared run.
        rounds: Total number of rounds.
        checkpoint: Settings of when to save a checkpoint.
        trackers: Trackers that log the records, besides the run's folder.
    """
    from fedquilt.runs.recipe import described  # It imports this module.

    return described(run, rounds, checkpoint, trackers)


def _settings(run: Run, rounds: int) -> dict[str, Any]:
    """Return a description of a run from Python, with all settings of its method."""
    method = {name: value for name, value in fingerprint(run).items() if name.startswith("method.")}
    return {**run_settings(run, rounds), **method}


@enough_memory("setting up the run")
def prepare(
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorized",
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    client_state_memory: int = LIMIT,
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """Return a run that has not begun.

    The method is used as it is. `run` settles it for its number of rounds first. For methods that
    depend on that number, pass `method.settled(rounds)`.

    Args:
        method: Method of federated learning, with its settings.
        family: Model, as `fq.trace` returns it.
        data: Samples of the clients.
        fleet: Clients and their budgets.
        engine: Name of an engine, or an engine, such as that of another run. The device and
            precision of a given engine apply, and its captured graphs are used again for the same
            family and samples.
        seed: Random seed of the run.
        device: Device that clients are trained on, as torch names it.
        precision: Precision of training.
        evaluation: When and how to evaluate. None: the defaults of `Evaluation`.
        client_state_memory: Bytes of client states kept in memory. Further states are kept on disk.
        link: Link between server and clients. The default loses nothing.
        task: Loss and metrics, or the name of a task. None: it is inferred from all training
            targets and the model's output.
    """
    _check_kind("run", method, Method, "fq.methods.FedAvg()")
    check_kinds(method)
    _check_kind("run", family, Family, "fq.trace(module, data.example)")
    _check_kind("run", data, FederatedData, "pool.partition(20)")
    _check_kind("run", fleet, Fleet, "fq.Fleet.of([1, 1/2], num_clients=20)")
    _check_kind("run", link, Link, 'fq.Link.preset("lossy-mild")')
    seed = _whole("seed", seed)
    link.check(fleet.num_clients)
    if fleet.num_clients > data.num_clients:
        raise ConfigError(
            f"the fleet has {fleet.num_clients} clients, but {data.name} is dealt to "
            f"{data.num_clients}. "
            "Deal it to as many as the fleet has."
        )
    evaluation = evaluation or Evaluation()
    given_parts = Given(family, data.origin)
    family = method.adapt(family)
    data = evaluation.samples(data.among(fleet.num_clients))
    family.check_stateless()
    check_inputs(family, data)
    if isinstance(engine, Simulation):
        engine = engine.with_data(data)
    elif not isinstance(engine, str):
        finding = (
            f"the class {engine.__name__}"
            if isinstance(engine, type)
            else f"a {type(engine).__name__}"
        )
        raise ConfigError(
            f"run was given {finding} as the engine; a name that `fedquilt list engines` shows "
            "would work, or an instance of a class derived from fedquilt.engines.Simulation."
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
    server = method.init(world)
    if not isinstance(server, Server):
        finding = "nothing" if server is None else f"a {type(server).__name__}"
        raise ConfigError(
            f"{type(method).__name__}.init returned {finding}; a Server is needed: "
            "super().init(world)."
        )
    server = placed(server, engine.device)
    engine.begin(federation)
    _check_task(federation, engine)
    _check_public(federation, engine)
    _check_budgets(federation, server, fleet, engine)
    _check_nets(federation, server, fleet, engine, evaluation)
    memory = ClientStates(client_state_memory, engine.device)
    memory.update(server.memory)
    return Run(
        federation, fleet, engine, evaluation, replace(server, memory=memory), given=given_parts
    )


def found_task(task: Task | str | None, family: Family, data: Pool) -> Task:
    """Return the task that was asked for, or infer it from the targets and the model's output.

    Args:
        task: A task, its name, or None to infer it.
        family: Family of the model.
        data: Samples with their targets.
    """
    shape = family.output_shape
    if task is None:
        inferred = infer(data.targets, shape, name=data.name)
        if inferred.has_classes and data.targets.dim() > 2:
            _log.warning(
                "the targets of %s are masks, and no task was named: pixels are classified, and "
                "accuracy is reported. The task segmentation trains by cross-entropy and Dice and "
                "reports Dice. To name the task classification leaves this message out.",
                data.name,
            )
        return inferred
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
            "the model has %d outputs, and %s has %d classes. No sample has a class for the other "
            "outputs.",
            family.num_outputs,
            data.name,
            num_classes,
        )


def _check_task(federation: Federation, engine: Simulation) -> None:
    """Refuse a task that the method or the engine does not support.

    A user's task is tried out on two samples, and refused if its loss or metrics are malformed.

    Raises:
        ConfigError: The task is refused.
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
    # Noise is added, because a net that predicts its targets exactly would have no gradient, as a
    # loss without gradients has none.
    noisy_outputs = outputs + 0.1 * noise.uniform(
        torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=outputs.device),
        outputs.shape,
        outputs.dtype,
    )
    check_task(
        task,
        noisy_outputs.movedim(member.class_dim, 1),
        engine.data.targets[rows],
        engine.data.name,
    )


def _check_public(federation: Federation, engine: Simulation) -> None:
    """Refuse public samples that do not fit, or are too few for the method or its norms."""
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
            slot: {name: value.to(device) for name, value in values.items()}
            for slot, values in server.slots.items()
        },
        extras={name: value.to(device) for name, value in server.extras.items()},
    )


# Largest number of budgets that are checked before a run. Fitting one takes a moment, and a fleet
# of real devices may have thousands. The nets of a union are few and fitted quickly.
_MANY = 1_024  # For unions
_FEW = 64  # For other families


def _check_budgets(federation: Federation, server: Server, fleet: Fleet, engine: Engine) -> None:
    """Refuse a budget with which nothing can be trained, and name its client.

    Without this check, a run would fail only when the client is sampled, which may be days later.
    """
    method, world = federation.method, federation.world
    partial_budgets = [
        budget for budget in fleet.kinds if budget.share is not None and budget.share < 1
    ]
    if partial_budgets and not world.family.whole.widths:
        notes = " ".join(world.family.layout.notes)
        _log.warning(
            "nothing of the model can be cut: devices train the whole of it, also for %s. %s",
            partial_budgets[0],
            notes,
        )
    draws = Draws()
    for budget in fleet.kinds[:_FEW]:
        first = fleet.first(budget)
        client = Client(first, budget, engine.size(first))
        for state in _turns(federation, server):
            try:
                fitted = method.fit(budget, world)
                with draws.watched():
                    plan = planned(method, state, client, world)
            except BudgetError as error:
                raise BudgetError(f"client {client.id}: {error}") from error
            check_budgets(method, [Job(client, submodel, state.round) for submodel in plan], world)
        if not method.ignores_budgets:
            _warn_of_single_channels(budget, fitted, world)
    for library in draws.names:
        _log.warning(
            "%s.plan draws from %s's global generator. Its plans differ between repeated, resumed "
            "and distributed "
            "runs. fedquilt.noise draws by keys such as noise.key(world.seed, server.round, "
            "client.id).",
            type(method).__name__,
            library,
        )


def _warn_of_single_channels(budget: Budget, fitted: Arch, world: World) -> None:
    """Warn if a share is less than one channel on some axes, where one is trained."""
    if budget.share is None:
        return
    full_sizes = world.family.whole.sizes
    narrow = [
        axis
        for axis, width in fitted.widths
        if width == 1 and full_sizes.get(axis, 1) > 1 and budget.share * full_sizes[axis] < 1
    ]
    if narrow:
        _log.warning(
            "a share of %g is less than one channel on %d of %d axes, such as %r with %d channels. "
            "One channel is "
            "trained there.",
            budget.share,
            len(narrow),
            len(fitted.widths),
            narrow[0],
            full_sizes[narrow[0]],
        )


def _turns(federation: Federation, server: Server) -> list[Server]:
    """Return the state at the beginning of every round in which plans change."""
    return [replace(server, round=round) for round in federation.method.turns(federation.world)]


def _check_nets(
    federation: Federation, server: Server, fleet: Fleet, engine: Simulation, evaluation: Evaluation
) -> None:
    """Refuse nets that differ from the user's model, and objectives that fail."""
    method = federation.method
    modes = compared_passes(method.local, method.local.norm)
    trained = list(_trained(federation, server, fleet, engine))
    _warn_of_idle_nets(federation, server, fleet, engine)
    for member, learner in trained:
        member.check_net(modes)
        _check_samples(engine.data, learner)
        _check_warmup(engine.data, learner)
    _check_objectives(federation, engine, trained)
    nested = (net for member, learner in trained for net in learner.nets(member))
    for member in dict.fromkeys((*nested, *_tested(federation, server, fleet, evaluation))):
        member.check_net(modes)


def _trained(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine
) -> Iterator[tuple[Member, Learner]]:
    """Yield the members that clients of the first budgets train, each with its learner."""
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
    """Warn if no client trains some net of a union.

    The first clients are examined, and the first client of each budget. The first net is left out,
    because it may be the server's.
    """
    method, world = federation.method, federation.world
    layout = world.family.layout
    if not layout.nets:
        return
    busy = set[str]()
    first = [fleet.first(budget) for budget in fleet.kinds[:_MANY]]
    for id in dict.fromkeys([*range(min(_FEW, fleet.num_clients)), *first]):
        client = fleet.client(id, 0, world.seed, engine.size(id))
        for state in _turns(federation, server):
            for submodel in planned(method, state, client, world):
                busy.update(layout.net_names(submodel.arch.variant))
    if idle := [net for net in layout.nets[1:] if net not in busy]:
        _log.warning(
            "%s lets no client train %s of the union's nets %s. FedDF, DS-FL and Fed-ET give every "
            "client the "
            "largest net that fits its budget.",
            type(method).__name__,
            ", ".join(map(repr, idle)),
            ", ".join(map(repr, layout.nets)),
        )


def _tested(
    federation: Federation, server: Server, fleet: Fleet, evaluation: Evaluation
) -> Iterator[Member]:
    """Yield the members that are evaluated for the first budgets."""
    method, world = federation.method, federation.world
    for nets in members_by_share(
        method, server, fleet.kinds[:_FEW], world, evaluation.shares
    ).values():
        yield from (world.family.member(net) for net in nets)


def _check_samples(data: FederatedData, learner: Learner) -> None:
    """Refuse crops, flips and intensities that do not fit the samples or their targets."""
    rows = torch.arange(2, device=data.targets.device) % len(data.targets)
    check_augmentation(data.samples(rows), data.targets[rows], learner.local, learner.task)


def _check_warmup(data: FederatedData, learner: Learner) -> None:
    """Refuse a warm-up that lasts for all steps of the client with the fewest samples."""
    local = learner.local
    if not local.within_round.warmup_steps:
        return
    sizes = data.parts.sizes
    if not bool(sizes.any()):
        return
    size = int(sizes[sizes > 0].min())
    steps = num_batches(size, local)
    if local.within_round.warmup_steps >= steps:
        client = int((sizes == size).nonzero()[0])
        raise ConfigError(
            f"local.within_round.warmup_steps = {local.within_round.warmup_steps} was asked for; "
            f"client {client} takes "
            f"{steps} step{'s'[: steps != 1]} in a round (samples: {size}, batch_size: "
            f"{local.batch_size}, epochs: "
            f"{local.epochs}), and one of them must follow the warm-up. At most {steps - 1} would "
            "work, or "
            "warmup_share = 0.1, which is a share of each client's own steps."
        )


def _check_objectives(
    federation: Federation, engine: Simulation, trained: Sequence[tuple[Member, Learner]]
) -> None:
    """Run the user's objectives on two samples, once for each pair of member and learner.

    Objectives that are part of fedquilt are not checked.
    """
    world, data = federation.world, engine.data
    tried: list[tuple[Member, Learner]] = []  # A user's objective may not be hashable.
    for member, learner in trained:
        if not has_own_objective(learner) or (member, learner.timeless) in tried:
            continue
        tried.append((member, learner.timeless))
        rows = torch.arange(2, device=engine.device) % len(data.targets)
        weights = world.family.init(world.seed, engine.device, world.dtype)
        state = world.family.cutter.gather(weights, member.prefix, learner.names(member))
        has_class = torch.ones(world.family.num_outputs, dtype=torch.bool, device=engine.device)
        key = torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=engine.device)
        share = torch.tensor(learner.share, dtype=world.dtype, device=engine.device)
        batch = Batch(data.samples(rows), data.targets[rows], has_class, key, share)
        with random_state(0), engine.computing():
            check_objectives(learner, member, state, batch, type(federation.method).__name__)


def _check_learner(method: Method, learner: Learner, world: World) -> None:
    """Refuse a learner that has another task, or distils with a task that cannot."""
    task = world.task
    if learner.task != task:
        raise ConfigError(
            f"{type(method).__name__}.learner returned a learner for {learner.task}; the run's "
            f"task is {task}. Begin "
            "with super().learner(job, world), or pass task=world.task."
        )
    if learner.taught and type(task).divergences is Task.divergences:
        nothing = torch.zeros(world.family.output_shape)
        # It raises an error that names what is missing.
        task.divergences(nothing, nothing, nothing)


def _budget(who: str, budget: Budget | None, share: float | None) -> Budget:
    """Return the budget that was asked for directly or by its share. Default: the whole model."""
    if budget is None:
        return Budget(share=1.0 if share is None else share)
    _check_kind(who, budget, Budget, "fq.Budget(share=0.25)")
    if share is not None:
        raise ConfigError(
            f"{who} was given share={share} and a budget ({budget}); one of them says how large it "
            "is."
        )
    return budget


def _whole(what: str, given: int) -> int:
    """Return a number of rounds or a seed as a Python int, which files and torch need."""
    if not whole(given) or given >= 1 << 63:
        raise ConfigError(
            f"{what} = {given!r} was asked for; whole numbers from 0 on fit, below 2**63."
        )
    return int(given)


def _check_kind(who: str, given: object, kind: type, fits: str) -> None:
    """Refuse an argument of the wrong type, such as a class, and name an example that fits."""
    if not isinstance(given, kind):
        description = (
            f"the class {given.__name__}"
            if isinstance(given, type)
            else f"{type(given).__name__} {str(given)[:40]!r}"
        )
        raise ConfigError(
            f"{who} was given {description} where a {kind.__name__} belongs, such as {fits}."
        )
