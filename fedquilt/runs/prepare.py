"""`fedquilt.prepare`: build a run from its parts, and refuse parts that do not fit together."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from fedquilt.checks import check_kinds
from fedquilt.data import FederatedData, Pool
from fedquilt.engines import ENGINES
from fedquilt.engines.data_checks import check_inputs
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import ConfigError
from fedquilt.errors.faults import enough_memory
from fedquilt.family import Family
from fedquilt.hardware.device import device_of
from fedquilt.hardware.precision import DTYPES, Precision
from fedquilt.methods import Method
from fedquilt.names import known
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.federation import Federation, World
from fedquilt.round.link import PERFECT, Link
from fedquilt.runs.arguments import check_argument, whole_number
from fedquilt.runs.client_states import DEFAULT_LIMIT, ClientStates
from fedquilt.runs.preflight import check_fleet, check_nets, check_public_samples, check_run_task
from fedquilt.runs.run import Run, RunOrigin
from fedquilt.tasks import Task, find_task, infer
from fedquilt.terms import Server

_log = logging.getLogger("fedquilt.runs")


@enough_memory("setting up the run")
def prepare(  # noqa: PLR0913
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorized",
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    client_state_memory: int = DEFAULT_LIMIT,
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """Build a run from its parts without training it.

    All parts are checked here, so that mistakes are reported before the first round. `Run.train`
    then trains any number of rounds.

    The method is used as it is, while `run` first calls `method.settled(rounds)`. For a method that
    depends on the number of rounds, pass `method.settled(rounds)` here.

    Args:
        method: Method of federated learning with its settings, such as `fq.methods.HeteroFL()`.
        family: Model whose sub-models are trained, as `fq.trace` returns it.
        data: Samples, partitioned among at least as many clients as the fleet has.
        fleet: Clients, their budgets, and how many of them are sampled in a round.
        engine: Name of an engine (`fedquilt list engines`), or an engine object. The engine of
            another run on the same family and samples keeps its captured CUDA graphs.
        seed: Random seed of initial weights, cohorts and batches, from 0 to 2**63 - 1.
        device: Device that clients are trained on, as torch names it. No effect if `engine` is an
            object.
        precision: Precision of training: `fp32`, `fp64`, `tf32` or `bf16`. No effect if `engine` is
            an object.
        evaluation: When and how to evaluate. None: the defaults of `Evaluation`.
        client_state_memory: Bytes of client states that are kept in memory. Further states are kept
            on disk. No effect for methods whose clients keep no state.
        link: Link between server and clients. The default loses nothing, encodes nothing and takes
            no time.
        task: Loss and metrics, or the name of a task. None: the task is inferred from all training
            targets and the model's output.

    Returns:
        The run before its first round.

    Raises:
        ConfigError: Some parts do not fit together.
        BudgetError: No sub-model fits the budget of some client.
    """
    check_argument("run", method, Method, "fq.methods.FedAvg()")
    check_kinds(method)
    check_argument("run", family, Family, "fq.trace(module, data.example)")
    check_argument("run", data, FederatedData, "pool.partition(20)")
    check_argument("run", fleet, Fleet, "fq.Fleet.of([1, 1/2], num_clients=20)")
    check_argument("run", link, Link, 'fq.Link.preset("lossy-mild")')
    seed = whole_number("seed", seed)
    link.check(fleet.num_clients)
    if fleet.num_clients > data.num_clients:
        raise ConfigError(
            f"the fleet has {fleet.num_clients} clients, but {data.name} is partitioned among "
            f"{data.num_clients}. Partition it among as many clients as the fleet has."
        )
    evaluation = evaluation or Evaluation()
    origin = RunOrigin(family, data.origin)

    family = method.adapt(family)
    data = evaluation.samples(data.among(fleet.num_clients))
    family.check_stateless()
    check_inputs(family, data)
    simulation = _engine_of(engine, data, device, precision)
    task = task_of(task, family, data)
    _warn_of_outputs(task, family, data)

    public = simulation.data.public_samples
    world = World(family, seed, simulation.precision, public, task, fleet.num_clients, fleet.joined)
    federation = Federation(world, method, link)
    link.check_codec(world, simulation.device)
    server = placed(_initial_server(federation), simulation.device)
    simulation.begin(federation)
    check_run_task(federation, simulation)
    check_public_samples(federation, simulation)
    check_fleet(federation, server, fleet, simulation)
    check_nets(federation, server, fleet, simulation, evaluation)

    memory = ClientStates(client_state_memory, simulation.device)
    memory.update(server.memory)
    server = replace(server, memory=memory)
    return Run(federation, fleet, simulation, evaluation, server, origin=origin)


def _engine_of(
    engine: str | Simulation, data: FederatedData, device: str, precision: Precision
) -> Simulation:
    """Return an engine for the data, created by its name or taken over from another run.

    Args:
        engine: Name of an engine, or an engine, of which a copy for the data is returned.
        data: Samples of all clients.
        device: Device as torch names it. No effect if `engine` is an object.
        precision: Precision of training. No effect if `engine` is an object.

    Raises:
        ConfigError: The engine, the device or the precision is unknown.
    """
    if isinstance(engine, Simulation):
        return engine.with_data(data)
    if not isinstance(engine, str):
        finding = f"a {type(engine).__name__}"
        if isinstance(engine, type):
            finding = f"the class {engine.__name__}"
        raise ConfigError(
            f"run was given {finding} as the engine; a name that `fedquilt list engines` shows "
            "would work, or an instance of a class derived from fedquilt.engines.Simulation."
        )
    known(DTYPES, precision, "precision")
    options = EngineOptions(device_of(device), precision)
    return known(ENGINES, engine, "engine").create(data, options)


def _initial_server(federation: Federation) -> Server:
    """Return the server's state before the first round, as the method creates it.

    Raises:
        ConfigError: `Method.init` of a user's method returned something else.
    """
    method = federation.method
    server = method.init(federation.world)
    if not isinstance(server, Server):
        finding = "nothing" if server is None else f"a {type(server).__name__}"
        raise ConfigError(
            f"{type(method).__name__}.init returned {finding}; a Server is needed: "
            "super().init(world)."
        )
    return server


def task_of(task: Task | str | None, family: Family, data: Pool) -> Task:
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
                "reports Dice. Name the task classification to suppress this message.",
                data.name,
            )
        return inferred
    if isinstance(task, str):
        return find_task(task).settled(shape)
    check_argument("run", task, Task, "fq.tasks.Regression()")
    return task.settled(shape)


def _warn_of_outputs(task: Task, family: Family, data: Pool) -> None:
    """Warn if the model has outputs for classes that the data does not have.

    Args:
        task: Task of the run. One without classes causes no warning.
        family: Family of the model.
        data: Samples with their targets.
    """
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


def placed(server: Server, device: torch.device) -> Server:
    """Return a server's state with weights, slots and extras on a device. Client states stay."""
    return replace(
        server,
        weights={name: value.to(device) for name, value in server.weights.items()},
        slots={
            slot: {name: value.to(device) for name, value in values.items()}
            for slot, values in server.slots.items()
        },
        extras={name: value.to(device) for name, value in server.extras.items()},
    )
