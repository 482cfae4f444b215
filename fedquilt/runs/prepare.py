"""`fedquilt.prepare`: build a run from its parts, and refuse parts that do not fit together."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from fedquilt.checks import check_kinds
from fedquilt.data import FederatedData, Pool
from fedquilt.engines import ENGINES
from fedquilt.engines.options import EngineOptions
from fedquilt.engines.simulation import Simulation, check_inputs
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
from fedquilt.runs.run import Given, Run
from fedquilt.tasks import Task, find_task, infer
from fedquilt.terms import Server

_log = logging.getLogger("fedquilt.runs")


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
    client_state_memory: int = DEFAULT_LIMIT,
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
            f"the fleet has {fleet.num_clients} clients, but {data.name} is dealt to "
            f"{data.num_clients}. Deal it to as many as the fleet has."
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
    task = task_of(task, family, data)
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
    check_run_task(federation, engine)
    check_public_samples(federation, engine)
    check_fleet(federation, server, fleet, engine)
    check_nets(federation, server, fleet, engine, evaluation)
    memory = ClientStates(client_state_memory, engine.device)
    memory.update(server.memory)
    return Run(
        federation, fleet, engine, evaluation, replace(server, memory=memory), given=given_parts
    )


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
                "reports Dice. To name the task classification leaves this message out.",
                data.name,
            )
        return inferred
    if isinstance(task, str):
        return find_task(task).settled(shape)
    check_argument("run", task, Task, "fq.tasks.Regression()")
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
