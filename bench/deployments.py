"""A deployment on this machine, as users start it: TLS, node keys, a gate, and three devices.

Benchmarks and tests use it. All processes are started here, and are killed, paused and ended by
their id. Whatever these have started is found by their parents, never by name on the machine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from namespaces import Namespaces
from proxy import Proxy

import fedquilt as fq
from fedquilt.config.toml import read_toml
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.processes import Process, environment, free_port
from fedquilt.deployment.replay import Replay, attendances_of, changes_of, unaccounted
from fedquilt.errors import FedquiltError
from fedquilt.round import Record
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.load import load_run

SHARES = (1.0, 0.5, 0.25)
TOLERANCE = 1e-9
SECONDS = 240.0  # Longest wait for a change. A deployment of three rounds takes 45 s on two cores.
LOOK_SECONDS = 0.1
SETTINGS = """
rounds = {rounds}
[method]
name = "{method}"
{settings}
local = {{ batch_size = 10, epochs = {epochs}, optimizer = {optimizer} }}
{model}
[data]
name = "{data}"
partition = "iid"
[fleet]
cohort = 1.0
clients = {clients}
budgets = {{ name = "uniform", shares = [{shares}] }}
[engine]
name = "sequential"
precision = "fp64"
[evaluation]
every = {every}
{more}
"""
# Words in the command line of processes that `serve` and `join` start, by their name here.
CHILDREN = {
    "superlink": "flower-superlink",
    "superexec": "flower-superexec",
    "serverapp": "flwr-serverapp",
    "supernode": "flower-supernode",
    "worker": "fedquilt.deployment.worker",
    "clientapp": "flwr-clientapp",
}


class DeploymentError(Exception):
    """A deployment did not do what was awaited."""


@dataclass(frozen=True)
class Plan:
    """What a deployment trains."""

    rounds: int = 3
    epochs: int = 1  # 60 take about a second at share 1, so that a round can be caught in the act
    # Settings of the optimizer. Errors of rounding grow with the number of steps. With momentum
    # they exceed 1e-9 after two rounds of 450 steps, with a rate of 0.01 after ten, and with 0.0005
    # after twenty.
    optimizer: str = '{ name = "sgd", lr = 0.00002 }'
    shares: Sequence[float] = SHARES
    method: str = "fedrolex"
    settings: str = ""  # Further settings of the method
    models: Sequence[str] = ('name = "tiny_resnet"',)  # Settings of each model
    shape: tuple[int, ...] = (1, 8, 8)
    samples: int = 30  # Of each device
    every: int = 0  # Rounds between two evaluations. 0: none
    public: int = 0  # Samples without targets that the server and all devices have
    more: str = ""  # Further settings, such as a link

    def write(self, folder: Path) -> None:
        """Write settings, the server's samples and those of the devices."""
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(0)
        count, clients = len(self.shares) * self.samples, len(self.shares)
        inputs = generator.integers(0, 256, (count + 30, *self.shape)).astype(np.uint8)
        targets = generator.integers(0, 5, count + 30)
        tests = {"x_test": inputs[count:], "y_test": targets[count:]}
        if self.public:
            shape = (self.public, *self.shape)
            tests["public"] = generator.integers(0, 256, shape).astype(np.uint8)
        np.savez(folder / "server.npz", x_train=inputs[:count], y_train=targets[:count], **tests)
        header = "[model]" if len(self.models) == 1 else "[[model]]"
        text = SETTINGS.format(
            rounds=self.rounds,
            epochs=self.epochs,
            method=self.method,
            settings=self.settings,
            optimizer=self.optimizer,
            model="\n".join(f"{header}\n{model}" for model in self.models),
            data=folder / "server.npz",
            clients=clients,
            shares=", ".join(map(str, self.shares)),
            every=self.every,
            more=self.more,
        )
        (folder / "config.toml").write_text(text)
        data, _ = self.experiment(folder).data.federate(clients, 0)
        for client, rows in enumerate(data.parts):
            part = {"x_train": data.inputs[rows].numpy(), "y_train": data.targets[rows].numpy()}
            np.savez(folder / f"device-{client}.npz", **part, **tests)

    @staticmethod
    def experiment(folder: Path) -> Experiment:
        """Return the settings in a folder."""
        return Experiment.of(read_toml(folder / "config.toml"))


def stat(process: int) -> tuple[int, str, int] | None:
    """Return parent, state and start time of a process. None: there is none."""
    try:
        words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(words[1]), words[0], int(words[19])


def descendants(ancestors: Sequence[int]) -> list[int]:
    """Return the processes that these have started, directly or not."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (found := stat(int(entry.name))) and found[1] != "Z":
            children.setdefault(found[0], []).append(int(entry.name))
    result: list[int] = []
    waiting = list(ancestors)
    while waiting:
        below = children.get(waiting.pop(), [])
        result += below
        waiting += below
    return result


def words_of(process: int) -> str:
    """Return the command line of a process."""
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


@dataclass
class Deployment:
    """A server and its devices, each a process of the command line.

    Args:
        folder: Folder for everything.
        plan: What is trained.
        deadline: Seconds that devices have in a round.
        options: Further arguments of `fedquilt serve`.
        isolation: How devices run their tasks.
        has_links: True: a proxy is between each device and the gate.
        spaces: Network namespaces of the devices. None: all are on loopback.
    """

    folder: Path
    plan: Plan = field(default_factory=Plan)
    deadline: float = 120.0
    options: Sequence[object] = ()
    isolation: str = "process"
    has_links: bool = False
    spaces: Namespaces | None = None
    processes: dict[str, Process] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)  # Start times of processes, by their id

    def __post_init__(self) -> None:
        self.port = free_port()
        self.out = self.folder / "run"
        self.links: dict[int, Proxy] = {}

    @property
    def experiment(self) -> Experiment:
        """Return the settings that the deployment trains."""
        return Plan.experiment(self.folder)

    # --- start and end --------------------------------------------------------------------------

    def __enter__(self) -> Deployment:
        if not (self.folder / "config.toml").exists():
            self.plan.write(self.folder)
        if not (self.folder / "keys").exists():
            hosts = [] if self.spaces is None else [self.spaces.server]
            make_keys(self.folder / "keys", len(self.plan.shares), hosts)
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    def start(self) -> Deployment:
        """Start the server and all devices."""
        self.serve()
        for client in range(len(self.plan.shares)):
            self.join(client)
        return self

    def command(
        self, name: str, *arguments: object, prefix: Sequence[str] = (), **env: str
    ) -> Process:
        """Return a process of the command line, which is not started.

        Args:
            name: Name of the process, which its log has too.
            *arguments: Arguments of `fedquilt`.
            prefix: Program and arguments that start it, such as faketime.
            **env: Further variables of its environment.
        """
        words = [*prefix, sys.executable, "-m", "fedquilt", *map(str, arguments)]
        surroundings = environment(self.folder / "home") | env
        return Process(name, words, surroundings, self.folder / f"{name}.txt")

    def begin(self, process: Process) -> Process:
        """Start a process that ends with the deployment."""
        process.start()
        self.processes[process.name] = process
        self.note_processes()
        return process

    def serve(self) -> Process:
        """Start the server, and wait until devices can join."""
        arguments = ["serve", self.folder / "config.toml", "--out", self.out]
        arguments += ["--keys", self.folder / "keys", "--port", self.port]
        arguments += ["--deadline", self.deadline, *self.options]
        if self.spaces is not None:
            arguments += ["--host", self.spaces.server]
        process = self.command("serve", *arguments)
        begun = self.said("serve").count("devices join with")
        self.begin(process)
        self.wait(
            lambda: self.said("serve").count("devices join with") > begun,
            "the server accepts devices",
        )
        return process

    def join(
        self, client: int, *options: object, prefix: Sequence[str] = (), **env: str
    ) -> Process:
        """Start a device. Further arguments come after those of a usual one."""
        keys = KeyFolder(self.folder / "keys")
        port = self.port
        if self.has_links:
            link = self.links.setdefault(client, Proxy(self.port))
            port = link.port
        host = "localhost"
        if self.spaces is not None:
            host = self.spaces.server
            prefix = (*self.spaces.prefix(client), *prefix)
        arguments = ["join", "--superlink", f"{host}:{port}"]
        arguments += ["--data", self.folder / f"device-{client}.npz"]
        arguments += ["--budget", f"share={self.plan.shares[client]}"]
        arguments += ["--state", self.state_of(client), "--name", f"device {client}"]
        arguments += ["--key", keys.device_key(client + 1), "--ca", keys.ca]
        arguments += ["--isolation", self.isolation, *options]
        return self.begin(self.command(f"join-{client}", *arguments, prefix=prefix, **env))

    def end(self) -> None:
        """End all processes: devices first, then the server, then whatever they have left."""
        self.note_processes()
        for name in sorted(self.processes):  # join-0, …, serve
            process = self.processes[name]
            if process.is_running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.process.pid, signal.SIGCONT)
            process.stop()
        for link in self.links.values():
            link.close()
        for process_id, began in self._seen.items():
            if (found := stat(process_id)) and found[2] == began:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)

    @property
    def leftovers(self) -> list[str]:
        """Return the command lines of processes that outlived the deployment."""
        return [
            words_of(process_id)
            for process_id, began in self._seen.items()
            if (found := stat(process_id)) and found[2] == began and found[1] != "Z"
        ]

    # --- processes ------------------------------------------------------------------------------

    def note_processes(self) -> list[int]:
        """Remember all processes that belong to the deployment, and return their ids."""
        roots = [process.process.pid for process in self.processes.values() if process.process]
        for process_id in (found := [*roots, *descendants(roots)]):
            if facts := stat(process_id):
                self._seen.setdefault(process_id, facts[2])
        return found

    def pid(self, name: str, client: int | None = None) -> int | None:
        """Return the id of a process. None: it does not run.

        Args:
            name: serve, superlink, superexec, serverapp, join, supernode, worker or clientapp.
            client: Number of the device, for its processes.
        """
        owner = "serve" if client is None else f"join-{client}"
        process = self.processes.get(owner)
        if process is None or process.process is None or not process.is_running:
            return None
        if name in ("serve", "join"):
            return process.process.pid
        self.note_processes()
        word = CHILDREN[name]
        for process_id in descendants([process.process.pid]):
            if word in words_of(process_id):
                return process_id
        return None

    def send(self, signal_number: int, name: str, client: int | None = None) -> int:
        """Send a signal to a process by its id, and return the id.

        Raises:
            DeploymentError: It does not run.
        """
        process_id = self.pid(name, client)
        if process_id is None:
            raise DeploymentError(f"{name} of {client} does not run")
        os.kill(process_id, signal_number)
        return process_id

    def kill(self, name: str, client: int | None = None) -> None:
        """Kill a process (SIGKILL), and wait until it is gone."""
        process_id = self.send(signal.SIGKILL, name, client)
        owner = self.processes["serve" if client is None else f"join-{client}"]
        if name in ("serve", "join"):
            assert owner.process is not None
            owner.process.wait()
        self.wait(lambda: (found := stat(process_id)) is None or found[1] == "Z", f"{name} is gone")

    # --- waiting --------------------------------------------------------------------------------

    def said(self, name: str) -> str:
        """Return all that a command has printed."""
        path = self.folder / f"{name}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def wait(self, condition: Callable[[], object], what: str, seconds: float = SECONDS) -> float:
        """Wait for a condition, and return how long it took.

        Raises:
            DeploymentError: It was in vain. The message has the last words of all commands.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                tails = [
                    f"{name}: {process.tail[-1500:]}" for name, process in self.processes.items()
                ]
                raise DeploymentError(
                    f"after {seconds:.0f} s it is not so that {what}\n" + "\n".join(tails)
                )
            time.sleep(LOOK_SECONDS)
        return time.monotonic() - began

    @property
    def records(self) -> list[Record]:
        """Return the records of all rounds so far."""
        try:
            return read_records(self.out)
        except FedquiltError:
            return []

    @property
    def num_rounds(self) -> int:
        """Return the number of rounds that counted."""
        return len(self.records)

    def wait_for_round(self, number: int, seconds: float = SECONDS) -> float:
        """Wait until as many rounds have counted, and return how long it took."""

        def has_come() -> bool:
            serve = self.processes["serve"]
            if not serve.is_running and self.num_rounds < number:
                raise DeploymentError(f"serve ended: {serve.tail}")
            return self.num_rounds >= number

        return self.wait(has_come, f"round {number} counts", seconds)

    def state_of(self, client: int) -> Path:
        """Return the state folder of a device."""
        return self.folder / f"state-{client}"

    def node_log(self, client: int) -> str:
        """Return what the SuperNode of a device has printed."""
        path = self.state_of(client) / "flower" / "supernode.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def num_requests(self, client: int) -> int:
        """Return how many messages to train a device has received completely."""
        messages = self.node_log(client).split("Receiving: train message")[1:]
        return sum("Received successfully" in message for message in messages)

    def wait_for_request(self, client: int, seconds: float = SECONDS) -> None:
        """Wait until a device has received its next request, which it then trains."""
        before = self.num_requests(client)
        self.wait(lambda: self.num_requests(client) > before, f"device {client} is asked", seconds)

    def finish(self, seconds: float = SECONDS) -> None:
        """Wait until the server has ended, which has to be a success."""
        serve = self.processes["serve"]
        self.wait(lambda: not serve.is_running, "serve has ended", seconds)
        if serve.status:
            raise DeploymentError(f"serve ended with status {serve.status}: {serve.tail}")

    # --- comparison -----------------------------------------------------------------------------

    def check(self) -> fq.Run:
        """Compare the model with a replay from the records, and check that these are complete.

        Returns:
            The replay, whose records have the same figures.
        """
        run = load_run(self.out)
        records = list(run.records)
        for record in records:
            assert record.attendance is not None
            wrong = unaccounted(record.attendance)
            assert not wrong, f"round {record.round} does not account for {wrong}"
        truth = replay(self.folder, records)
        torch.testing.assert_close(
            dict(run.server.weights), dict(truth.server.weights), rtol=0, atol=TOLERANCE
        )
        for mine, theirs in zip(truth.records, records, strict=True):
            assert (mine.bytes_down, mine.bytes_up) == (theirs.bytes_down, theirs.bytes_up)
            assert mine.macs == theirs.macs
            assert (mine.loss is None) == (theirs.loss is None)
            assert abs((mine.loss or 0) - (theirs.loss or 0)) < TOLERANCE
        return truth


def replay(folder: Path, records: Sequence[Record]) -> fq.Run:
    """Return a sequential run in which the clients that the records name are absent.

    Clients join and change their budgets in the rounds that the records name.
    """
    experiment = Plan.experiment(folder)
    devices = experiment.fleet
    changes = changes_of(records)
    assert devices.clients is not None
    first = min([devices.clients, *(c.client for c in changes if _joins(records, c.client))])
    fleet = replace(devices, clients=first, changes=tuple(changes))
    run = replace(experiment, fleet=fleet).prepare()
    engine = run.engine
    run.engine = Replay(
        engine.data, engine.device, engine.precision, attendances=attendances_of(records)
    )
    run.train(len(records))
    return run


def _joins(records: Sequence[Record], client: int) -> bool:
    """Return True if a client has joined after the first round."""
    arrivals = (a for found in attendances_of(records).values() for a in found.arrivals)
    return any(arrival.is_new and arrival.client == client for arrival in arrivals)
