"""The server's side of a deployment: the run in a folder, trained on devices.

`fedquilt serve` writes a request (`deployment.json`) and starts a ServerApp, which calls `train`.
It waits for the devices, asks them to introduce themselves, writes the settings of the run with
their budgets, and trains. If it died, another call resumes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from fedquilt.config.toml import read_toml
from fedquilt.config.writing import write as write_settings
from fedquilt.deployment.enrolment import Enrolment, ServerFacts, refuse_searched
from fedquilt.deployment.grid import GridCourier
from fedquilt.deployment.roster import ROSTER, Roster, RosterEntry
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.engines.flower.evaluation import SamplesName, ServerSamples
from fedquilt.errors import FedquiltError, RecordError
from fedquilt.fleets.presets import Given
from fedquilt.names import said
from fedquilt.round import Evaluation
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.experiment import MAX_SINGLE_THREAD_MACS, Experiment, Ground
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import holds_a_run
from fedquilt.runs.loop import complete
from fedquilt.runs.model_settings import Model
from fedquilt.runs.prepare import prepare
from fedquilt.runs.run import Run
from fedquilt.storage.files import make_folder, write_text

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
WORKPLACE = "deployment"  # Folder beside the run's files
REQUEST = "request.json"  # What `serve` asked for
STATUS = "status.json"  # What the ServerApp does
SETTINGS = "settings.toml"  # Settings before the devices were known
WAIT_SECONDS = 2.0  # Time between two looks at who is online


@dataclass(frozen=True)
class ServeRequest:
    """Request of `fedquilt serve`, in a file that the ServerApp reads."""

    run_id: str  # Identity of the run, which is the same after a resume
    num_clients: int  # Devices to wait for
    deadline: float  # Seconds that devices have in a round
    least: int = 1  # Devices that have to be online before a round begins
    keys: tuple[str, ...] = ()  # Public keys in the order of clients. Empty: by the device's name
    # Samples of the server that evaluation uses. Devices use theirs for the rest
    samples: SamplesName = "both"

    def save(self, folder: Path) -> None:
        """Write the request to the folder of a run."""
        plain = {
            "run_id": self.run_id,
            "num_clients": self.num_clients,
            "deadline": self.deadline,
            "least": self.least,
            "keys": list(self.keys),
            "samples": self.samples,
        }
        write_text(folder / WORKPLACE / REQUEST, json.dumps(plain, indent=1) + "\n")

    @staticmethod
    def load(folder: Path) -> ServeRequest:
        """Read the request in the folder of a run.

        Raises:
            RecordError: There is none, or it is damaged.
        """
        path = folder / WORKPLACE / REQUEST
        try:
            plain = json.loads(path.read_text())
            samples = plain.get("samples", "both")  # Earlier versions used all samples.
            if samples not in get_args(SamplesName):
                raise ValueError(f"its samples are {samples!r}")
            return ServeRequest(
                str(plain["run_id"]),
                int(plain["num_clients"]),
                float(plain["deadline"]),
                int(plain["least"]),
                tuple(map(str, plain["keys"])),
                samples,
            )
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(f"{path} is damaged: {said(error)}") from error

    @staticmethod
    def new_id() -> str:
        """Return the identity of a new run."""
        return secrets.token_hex(8)


@dataclass(frozen=True)
class Status:
    """State of the ServerApp, which `fedquilt serve` shows."""

    state: str  # "waiting", "training", "finished" or "failed"
    text: str = ""  # Details for people
    kind: str = ""  # Class of the error, if it failed
    process: int = field(default_factory=os.getpid)  # Process of the ServerApp

    def save(self, folder: Path) -> None:
        """Write the status to the folder of a run."""
        plain = {
            "state": self.state,
            "text": self.text,
            "kind": self.kind,
            "process": self.process,
        }
        write_text(folder / WORKPLACE / STATUS, json.dumps(plain) + "\n")

    @staticmethod
    def load(folder: Path) -> Status | None:
        """Return the status in the folder of a run. None: there is none yet."""
        try:
            plain = json.loads((folder / WORKPLACE / STATUS).read_text())
            return Status(
                str(plain["state"]), str(plain["text"]), str(plain["kind"]), int(plain["process"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


@dataclass
class DeviceEngine(Flower):
    """Engine whose clients are the devices of a roster.

    Args:
        sizes: Training samples of each client, as its device stated them.
        least: Devices that have to be online before a round begins.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    least: int = 1

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """Return nothing, because numbers do not depend on deadlines and addresses."""
        return {}

    def size(self, client: int) -> int:
        """Return the number of training samples on a client's device."""
        return self.sizes[client]

    def online(self) -> Sequence[int]:
        """Return the clients that can be reached, once there are enough of them."""
        clients = self.reached.online()
        has_reported = False
        while len(clients) < self.least:
            if not has_reported:
                _log.warning(
                    "%d devices are online; the next round begins with %d.",
                    len(clients),
                    self.least,
                )
                has_reported = True
            time.sleep(WAIT_SECONDS)
            clients = self.reached.online()
        return clients


def train(folder: Path, grid: Grid) -> None:
    """Train the run in a folder on the devices of a grid. What fails is written to the status.

    Args:
        folder: Folder of the run, with the request of `fedquilt serve`.
        grid: Flower's grid.
    """
    try:
        _train(folder, grid)
    except BaseException as error:
        text = str(error) if isinstance(error, FedquiltError) else said(error)
        Status("failed", text, type(error).__name__).save(folder)
        raise
    Status("finished").save(folder)


def _train(folder: Path, grid: Grid) -> None:
    request = ServeRequest.load(folder)
    is_new = not holds_a_run(folder)
    config = folder / (f"{WORKPLACE}/{SETTINGS}" if is_new else "config.toml")
    experiment = Experiment.of(read_toml(config), file=str(config))
    roster = Roster.load(folder / ROSTER)
    courier = GridCourier(grid, roster)
    # The server's samples give the shape, the classes and the normalisation. They are divided among
    # clients for `fedquilt clients`.
    data = experiment.data.federate(request.num_clients, experiment.seed)
    models = experiment.models or (Model.usual(data[0]),)
    refuse_searched(models)
    family = experiment.trace(data[0])
    facts = ServerFacts.of(
        request.run_id,
        models,
        data[0],
        family,
        experiment.task,
        experiment.method.clients_need_public,
    )
    courier.about = facts.to_bytes()
    enrol(folder, courier, request)
    budgets = Given(tuple(entry.budget for entry in roster))
    fleet = replace(experiment.fleet, clients=len(roster), budgets=budgets)
    experiment = replace(experiment, fleet=fleet, checkpoint=Checkpointing(rounds=1))
    ground = experiment.ground(data, family)
    run = prepared(experiment, ground, courier, request)
    experiment = settled(experiment, run, ground)
    if is_new:
        opened = Folder.create(folder, experiment.to_toml(), experiment.checkpoint)
    else:
        opened = Folder.resume(folder, experiment.checkpoint)
    with opened:
        if not is_new:
            opened.load(run)
        Status("training", f"{len(roster)} devices").save(folder)
        complete(
            run,
            experiment.rounds,
            folder=opened,
            trackers=experiment.trackers,
            settings=write_settings(experiment),
            names={**experiment.names, "engine": "flower"},
        )


def enrol(folder: Path, courier: GridCourier, request: ServeRequest) -> None:
    """Wait for the devices, and write those that can take part to the roster.

    There is no time limit. The status file of the run says which devices are ready, and why others
    cannot take part. A run that is resumed waits for devices of its roster only.

    Args:
        folder: Folder of the run.
        courier: Carries messages. Its roster is filled.
        request: What `fedquilt serve` asked for.
    """
    roster = courier.roster
    introduced: dict[str, Enrolment] = {}
    refused: dict[str, str] = {}  # Reasons by public key
    shown = ""
    while True:
        nodes = courier.nodes()
        keys = [key for key in nodes if key not in introduced]
        if request.keys:
            keys = [key for key in keys if key in request.keys]
        for key, enrolment in courier.enrol(keys).items() if keys else ():
            entry = roster.by_key(key)
            if enrolment.failed:
                refused[key] = f"{enrolment.name} cannot take part: {enrolment.failed}"
            elif entry is not None and entry.is_struck_off:
                refused[key] = f"{enrolment.name} was struck off"
            elif entry is not None and (reason := changed(entry, enrolment)):
                refused[key] = reason
            else:
                introduced[key] = enrolment
                refused.pop(key, None)
        known = {entry.key for entry in roster}
        ready = introduced.keys() if not known else introduced.keys() & known
        text = f"{len(ready)} of {request.num_clients} devices are ready"
        text = ". ".join([text, *sorted(refused.values())])
        if text != shown:
            Status("waiting", text).save(folder)
            shown = text
        if len(ready) >= (request.least if known else request.num_clients):
            break
        time.sleep(WAIT_SECONDS)
    if known := {entry.key for entry in roster}:  # A resumed run has the same clients.
        introduced = {key: value for key, value in introduced.items() if key in known}
    order = {key: number for number, key in enumerate(request.keys)}
    ranked = sorted(introduced, key=lambda key: (order.get(key, 0), introduced[key].name, key))
    for key in ranked[: request.num_clients]:
        enrolment = introduced[key]
        assert enrolment.budget is not None
        roster.enrol(key, enrolment.name, enrolment.budget, enrolment.size)
    roster.save(folder / ROSTER)


def changed(entry: RosterEntry, enrolment: Enrolment) -> str:
    """Return why a device cannot continue its run. Empty: it has the same samples and budget.

    Args:
        entry: The device as the run has begun.
        enrolment: What it states now.
    """
    if (entry.budget, entry.size) == (enrolment.budget, enrolment.size):
        return ""
    return (
        f"client {entry.client} ({entry.name}) has returned with {enrolment.size} samples and the "
        f"budget {enrolment.budget}; the run has begun with {entry.size} and {entry.budget}. The "
        "same would work on the device, or a new run on the server"
    )


def prepared(
    experiment: Experiment, ground: Ground, courier: GridCourier, request: ServeRequest
) -> Run:
    """Return a run on devices that has not begun.

    Args:
        experiment: All settings, with the budgets of the devices.
        ground: Data, model and fleet of the server.
        courier: Carries messages to devices.
        request: What `fedquilt serve` asked for.
    """
    is_small = ground.family.member(ground.family.whole).macs < MAX_SINGLE_THREAD_MACS
    usual = 1 if is_small else torch.get_num_threads()
    torch.set_num_threads(experiment.engine.threads or usual)
    engine = DeviceEngine(
        ground.data,
        ground.data.inputs.device,
        experiment.engine.precision,
        courier=courier,
        run_id=request.run_id,
        terms=Terms.of,
        deadline=request.deadline,
        sizes={entry.client: entry.size for entry in courier.roster},
        least=request.least,
        server_samples=ServerSamples.of(request.samples),
    )
    evaluation = experiment.evaluation or Evaluation(every=math.ceil(experiment.rounds / 10))
    run = prepare(
        experiment.method.settled(experiment.rounds),
        ground.family,
        ground.data,
        ground.fleet,
        engine,
        experiment.seed,
        evaluation=evaluation,
        client_state_memory=experiment.engine.client_state_memory,
        link=experiment.link,
        task=experiment.task,
    )
    run.settled_for = experiment.rounds
    return run


def settled(experiment: Experiment, run: Run, ground: Ground) -> Experiment:
    """Return the settings that `config.toml` has, from which `load_run` rebuilds the run.

    Args:
        experiment: Settings of the deployment.
        run: The prepared run.
        ground: Data, model and fleet of the server.
    """
    return replace(
        experiment,
        method=run.method,
        model=ground.model,
        task=run.world.task,
        data=replace(experiment.data, partition=ground.partition),
        engine=replace(experiment.engine, name="sequential", threads=torch.get_num_threads()),
        evaluation=run.evaluation,
    )


def write_request(folder: Path, experiment: Experiment, request: ServeRequest) -> None:
    """Write settings and request of a new run to its folder.

    Args:
        folder: Folder of the run.
        experiment: Settings before the devices are known.
        request: What `fedquilt serve` asked for.
    """
    make_folder(folder / WORKPLACE)
    write_text(folder / WORKPLACE / SETTINGS, experiment.to_toml())
    request.save(folder)
