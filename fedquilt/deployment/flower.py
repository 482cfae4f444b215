"""A ServerApp and a ClientApp for Flower users: `flwr run` on any SuperLink, and in simulation.

An app folder has a `pyproject.toml` with the settings of the run in `[tool.flwr.app.config]`, and
two modules that call `server_app` and `client_app`. `examples/flower_app` is one. Whoever submits
such an app runs code on the nodes, as with every app of Flower. `fedquilt join` is for devices
whose owners do not want that.
"""

from __future__ import annotations

import json
import logging
import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.config.toml import parse_assignment, read_toml
from fedquilt.data import FederatedData, Partition
from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.envelope import pack
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.in_process import own_data
from fedquilt.deployment.joining import parse_budget
from fedquilt.deployment.keys import check_installed
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import (
    REQUEST,
    SETTINGS,
    WORKPLACE,
    ServeRequest,
    Status,
    train,
    write_request,
)
from fedquilt.deployment.simulated import (
    NUM_PARTITIONS,
    PARTITION,
    QUERY,
    KeyedGrid,
    state_partition,
)
from fedquilt.deployment.worker import reply_to
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import is_reference
from fedquilt.round import Fleet
from fedquilt.round.wire import Message
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import holds_a_run, read_records

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

_log = logging.getLogger(__name__)
DEVICES = "devices"  # Folder with the states of nodes that name no other, below `WORKPLACE`
LOOK_SECONDS = 0.5  # Time between two looks at the run
MAX_HOSTS = 32  # Nodes whose samples one process keeps in memory
NODE_SETTINGS = ("name", "data", "budget", "state", "device", "threads")

UserConfig = Mapping[str, bool | int | float | str]  # Flower's run-config and node-config
DataLoader = Callable[["Context"], FederatedData]
_HOSTS: OrderedDict[str, DeviceHost] = OrderedDict()  # Nodes of this process, by their context


@dataclass(frozen=True)
class AppSettings:
    """Settings of an app, from `[tool.flwr.app.config]`."""

    out: Path  # Folder of the run on the server
    experiment: Experiment  # Method, model, data and the other settings of `fedquilt run`
    rules: RoundRules = RoundRules()  # Deadline of rounds, and the other rules of `fedquilt serve`

    @staticmethod
    def read(config: UserConfig) -> AppSettings:
        """Read Flower's run-config, whose keys are dotted: `method.local.batch_size`.

        Flower's values have no lists. A text that begins with a bracket is read as a list.

        Args:
            config: Run-config of a context.

        Raises:
            ConfigError: A setting is unknown or missing, or its value cannot be used.
        """
        settings: dict[str, Any] = {}
        for path, value in config.items():
            *tables, key = path.split(".")
            table = settings
            for name in tables:
                table = table.setdefault(name, {})
            table[key] = value
            if isinstance(value, str) and value.startswith("["):
                table[key] = parse_assignment(f"value={value}")[1]
        out = Path(str(settings.pop("out", ""))).expanduser()
        rules = _rules(settings)
        if not out.is_absolute():
            raise ConfigError(
                f"out = {str(out)!r} was asked for in the app's config; an absolute path or one "
                "that begins with ~ would work, because Flower runs apps in a folder of its own."
            )
        experiment = Experiment.of(settings, file="the app's config")
        num_clients = experiment.fleet.clients
        if num_clients is None:
            raise ConfigError(
                "the app's config has no fleet.clients; it is the number of nodes to wait for."
            )
        return AppSettings(out, experiment, rules.check(num_clients, "the app's config: "))

    @property
    def num_clients(self) -> int:
        """Return the number of nodes to wait for."""
        assert self.experiment.fleet.clients is not None
        return self.experiment.fleet.clients

    def begin(self) -> None:
        """Write the request of a new run to its folder, unless it has begun.

        Raises:
            ConfigError: The folder has another run.
        """
        if (self.out / WORKPLACE / REQUEST).exists():
            file = self.out / WORKPLACE / SETTINGS
            stored = Experiment.of(read_toml(file), file=str(file))
            if stored.to_toml() != self.experiment.to_toml():
                raise ConfigError(
                    f"out = {str(self.out)!r} was asked for in the app's config; a run with other "
                    "settings is there. Another folder begins a new run."
                )
            request = ServeRequest.load(self.out)
            request = ServeRequest(request.run_id, self.num_clients, self.rules)
            request.save(self.out)
            return
        if holds_a_run(self.out):
            raise ConfigError(
                f"out = {str(self.out)!r} was asked for in the app's config; a run is there that "
                "was not deployed. Another folder would work."
            )
        request = ServeRequest(ServeRequest.new_id(), self.num_clients, self.rules)
        write_request(self.out, self.experiment, request)


def server_app() -> ServerApp:
    """Return a ServerApp that trains the run of an app's config, or resumes it.

    The folder `out` is the folder of a run, as `fedquilt serve` writes it.
    """
    check_installed()
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(_serve)
    return app


def client_app(data: DataLoader | None = None) -> ClientApp:
    """Return a ClientApp that trains what the ServerApp asks for.

    A node's samples are those that its node-config names (`data`). Without it, they are the
    partition `partition-id` of `num-partitions` of the app's data, as in Flower's simulation.

    Args:
        data: Returns the samples of a node from its context, as data with one client. None: see
            above.
    """
    check_installed()
    from flwr.clientapp import ClientApp

    def reply(message: FlowerMessage, context: Context) -> FlowerMessage:
        return _reply(message, context, data)

    app = ClientApp()
    app.query()(reply)
    app.train()(reply)
    app.evaluate()(reply)
    app.query(QUERY)(state_partition)
    return app


def _serve(grid: Grid, context: Context) -> None:
    settings = AppSettings.read(context.run_config)
    settings.begin()
    _log.info("The folder of the run is %s.", settings.out)
    with _reported(settings):
        train(settings.out, KeyedGrid(grid))


@contextmanager
def _reported(settings: AppSettings) -> Iterator[None]:
    """Log what the run waits for, and its rounds, from another thread."""
    stopped = threading.Event()
    reporter = threading.Thread(target=_report, args=(settings, stopped), daemon=True)
    reporter.start()
    try:
        yield
    finally:
        stopped.set()
        reporter.join()


def _report(settings: AppSettings, stopped: threading.Event) -> None:
    """Log new states and rounds of a run until it has stopped."""
    log = logging.getLogger("flwr").info  # Flower shows its own log to whoever submitted the app.
    shown, num_rounds = "", 0
    is_last = False
    while not is_last:
        is_last = stopped.wait(LOOK_SECONDS)
        status = Status.load(settings.out)
        text = "" if status is None else f"{status.state}: {status.text}".rstrip(": ")
        if text and text != shown:
            log("fedquilt is %s", text)
            shown = text
        records = read_records(settings.out) if holds_a_run(settings.out) else []
        for record in records[num_rounds:]:
            loss = "no loss" if record.loss is None else f"loss {record.loss:.4f}"
            log("round %d of %d: %s", record.round, settings.experiment.rounds, loss)
        num_rounds = len(records)


def _reply(message: FlowerMessage, context: Context, data: DataLoader | None) -> FlowerMessage:
    """Reply to a message of the ServerApp. A node that cannot take part says why.

    Args:
        message: Message of Flower.
        context: Context of the node.
        data: Returns the samples of a node. None: the node-config names them.
    """
    try:
        host = _host(context, data)
    except FedquiltError as error:
        return _refusal(message, context, str(error))
    return reply_to(message, host)


def _refusal(message: FlowerMessage, context: Context, reason: str) -> FlowerMessage:
    """Return the reply of a node whose settings cannot be used.

    Args:
        message: Message of Flower.
        context: Context of the node.
        reason: Why the node cannot take part.
    """
    from flwr.app import Error
    from flwr.app import Message as FlowerMessage

    if message.metadata.message_type != "query":
        return FlowerMessage(Error(code=2, reason=reason), reply_to=message)
    enrolment = Enrolment(f"node {context.node_id}", None, failed=reason)
    return FlowerMessage(pack(Message(enrolment.to_bytes())), reply_to=message)


def _host(context: Context, data: DataLoader | None) -> DeviceHost:
    """Return the device of a node. A process of Flower's simulation works for many nodes.

    Args:
        context: Context of the node.
        data: Returns the samples of a node. None: the node-config names them.
    """
    config = json.dumps(dict(context.run_config), sort_keys=True)
    node = json.dumps(dict(context.node_config), sort_keys=True)
    identity = f"{context.node_id} {node} {config}"
    if identity not in _HOSTS:
        _HOSTS[identity] = _new_host(context, config, data)
        if len(_HOSTS) > MAX_HOSTS:
            _HOSTS.popitem(last=False)
    _HOSTS.move_to_end(identity)
    return _HOSTS[identity]


def _new_host(context: Context, config: str, data: DataLoader | None) -> DeviceHost:
    """Build the device of a node. The app's config has what its node-config does not state.

    Args:
        context: Context of the node.
        config: The app's config as JSON.
        data: Returns the samples of a node. None: the node-config names them.

    Raises:
        ConfigError: The node has no samples or no budget, or settings that are unknown.
    """
    node = context.node_config
    settings = AppSettings.read(context.run_config)
    names = (*NODE_SETTINGS, PARTITION, NUM_PARTITIONS)
    if unknown := sorted(node.keys() - {*names}):
        raise ConfigError(
            f"the node-config has {', '.join(unknown)}; known are {', '.join(names)}. They are set "
            "on the node (flower-supernode --node-config)."
        )
    partition = _partition(node)
    samples = None
    if data is not None:
        samples = data(context)
    elif "data" not in node:
        number, count = _required(partition)
        samples = own_data(_partitioned(config, count)[0], number)
    name = str(node.get("name", f"node {context.node_id}"))
    if "name" not in node and partition is not None:
        number, count = partition
        name = f"partition {number:0{len(str(count - 1))}d}"  # Names in order are numbers in order.
    if "budget" in node:
        budget = parse_budget(str(node["budget"]))
    else:
        number, count = _required(partition)
        budget = _fleet(config, count).budget(number, 0, settings.experiment.seed)
    folder = settings.out / WORKPLACE / DEVICES / name.replace(" ", "-").replace("/", "-")
    device = DeviceSettings(
        name,
        str(node.get("data", settings.experiment.data.name)),
        budget,
        Path(str(node.get("state", folder))).expanduser(),
        _code(settings.experiment),
        str(node.get("device", "cpu")),
        int(_number(dict(node), "threads", 1)),
    )
    return DeviceHost(device, samples)


def _partition(node: UserConfig) -> tuple[int, int] | None:
    """Return a node's partition and the number of partitions. None: its node-config has none."""
    if PARTITION not in node and NUM_PARTITIONS not in node:
        return None
    number, count = node.get(PARTITION), node.get(NUM_PARTITIONS)
    if not isinstance(number, int) or not isinstance(count, int) or not 0 <= number < count:
        raise ConfigError(
            f"the node-config has {PARTITION} {number!r} and {NUM_PARTITIONS} {count!r}; integers "
            f"would work, such as {PARTITION}=0 {NUM_PARTITIONS}=3."
        )
    return number, count


def _required(partition: tuple[int, int] | None) -> tuple[int, int]:
    """Return a partition.

    Raises:
        ConfigError: There is none.
    """
    if partition is None:
        raise ConfigError(
            f"the node-config has no {PARTITION} and {NUM_PARTITIONS}, and not both data and "
            "budget. One of them would work on the node: flower-supernode --node-config "
            '\'data="mine.npz" budget="share=0.5"\'.'
        )
    return partition


@lru_cache(maxsize=1)
def _partitioned(config: str, count: int) -> tuple[FederatedData, Partition | None]:
    """Return the data of an app and its partition, which all nodes of a process share.

    Args:
        config: The app's config as JSON.
        count: Number of partitions.
    """
    experiment = AppSettings.read(json.loads(config)).experiment
    return experiment.data.federate(count, experiment.seed)


@lru_cache(maxsize=1)
def _fleet(config: str, count: int) -> Fleet:
    """Return the fleet of an app. Some budgets depend on the model, which is traced for them.

    Args:
        config: The app's config as JSON.
        count: Number of partitions.
    """
    experiment = AppSettings.read(json.loads(config)).experiment
    return experiment.ground(_partitioned(config, count)).fleet


def _code(experiment: Experiment) -> str | None:
    """Return the model that the app's config names, if it is code of the app."""
    names = [model.name for model in experiment.models if is_reference(model.name)]
    return names[0] if len(experiment.models) == 1 and names else None


def _rules(settings: dict[str, Any]) -> RoundRules:
    """Remove the rules of rounds from settings, and return them.

    Raises:
        ConfigError: A rule is no finite number above 0.
    """
    names = [rule.name for rule in fields(RoundRules) if rule.name in settings]
    return RoundRules.from_dict({name: _number(settings, name, 0.0) for name in names})


def _number(settings: dict[str, Any], key: str, default: float) -> float:
    """Remove a finite number above 0 from settings, and return it.

    Args:
        settings: Settings by name.
        key: Name of the number.
        default: Value if there is none.

    Raises:
        ConfigError: It is no number, infinite, NaN, or not above 0.
    """
    value = settings.pop(key, default)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"{key} = {value!r} was asked for; a number above 0 would work.")
    return float(value)
