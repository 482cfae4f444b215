"""The server's side of a deployment: the run in a folder, trained on devices.

`fedquilt serve` writes a request (`deployment.json`) and starts a ServerApp, which calls `train`.
It waits for the devices, asks them to introduce themselves, writes the settings of the run with
their budgets, and trains. If it died, another call resumes. If a device joins or returns with other
facts, the run is prepared again with another fleet and resumed from its last round.
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
from typing import TYPE_CHECKING, ClassVar, get_args

import torch

from fedquilt.config.toml import read_toml
from fedquilt.config.writing import write as write_settings
from fedquilt.deployment.enrolment import Enrolment, ServerFacts, refuse_searched
from fedquilt.deployment.grid import ENROL_SECONDS, GridCourier
from fedquilt.deployment.registrar import Registrar, RosterChangedError
from fedquilt.deployment.roster import ROSTER, Roster
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.engines.flower.evaluation import SamplesName, ServerSamples
from fedquilt.errors import FedquiltError, RecordError
from fedquilt.names import said
from fedquilt.round import Evaluation
from fedquilt.round.engine import Outcome
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.experiment import MAX_SINGLE_THREAD_MACS, Experiment, Ground
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import holds_a_run, saved_rounds
from fedquilt.runs.loop import complete
from fedquilt.runs.model_settings import Model
from fedquilt.runs.prepare import prepare
from fedquilt.runs.run import Run
from fedquilt.storage.files import make_folder, write_text

if TYPE_CHECKING:
    from flwr.serverapp import Grid

    from fedquilt.family import Family

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
    rules: RoundRules = RoundRules()
    keys: tuple[str, ...] = ()  # Public keys in the order of clients. Empty: by the device's name
    # Samples of the server that evaluation uses. Devices use theirs for the rest
    samples: SamplesName = "both"

    def save(self, folder: Path) -> None:
        """Write the request to the folder of a run."""
        plain = {
            "run_id": self.run_id,
            "num_clients": self.num_clients,
            "rules": self.rules.to_dict(),
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
                RoundRules.from_dict(plain["rules"]),
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
        registrar: It asks devices that are new or return. None: clients stay as they are.
        roster: Devices of the run.
    """

    sizes: Mapping[int, int] = field(default_factory=dict)
    least: int = 1
    registrar: Registrar | None = None
    roster: Roster = field(default_factory=Roster)

    has_roster: ClassVar[bool] = True

    @property
    def settings(self) -> dict[str, bool | int | float | str]:
        """Return nothing, because numbers do not depend on deadlines and addresses."""
        return {}

    def size(self, client: int) -> int:
        """Return the number of training samples on a client's device."""
        return self.sizes[client]

    def online(self) -> Sequence[int]:
        """Return the clients that can be reached, once there are enough of them.

        Raises:
            RosterChangedError: Devices have joined or returned with other facts.
        """
        has_reported = False
        while True:
            if self.registrar is not None:
                self.registrar.look()
                if self.registrar.changes(self.roster):
                    raise RosterChangedError
            clients = self.reached.online()
            if len(clients) >= self.least:
                return clients
            if not has_reported:
                _log.warning(
                    "%d devices are online; the next round begins with %d.",
                    len(clients),
                    self.least,
                )
                has_reported = True
            time.sleep(WAIT_SECONDS)

    def counts(self, outcome: Outcome) -> bool:
        """Return True if at least `least` devices have sent a usable reply.

        Devices that have failed are asked again who they are, because a device that has returned
        with another budget refuses the earlier one.
        """
        if self.registrar is not None and outcome.attendance is not None:
            for client in outcome.attendance.failed:
                self.registrar.ask_again(self.roster.entries[client].key)
        return super().counts(outcome)


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
    config = folder / "config.toml" if holds_a_run(folder) else folder / WORKPLACE / SETTINGS
    experiment = Experiment.of(read_toml(config), file=str(config))
    experiment = replace(experiment, checkpoint=Checkpointing(rounds=1))
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
    registrar = Registrar(courier, lambda: ServeRequest.load(folder).keys)
    enrol(folder, registrar, roster, request)
    deployment = Deployment(folder, experiment, request, courier, registrar, family)
    while not deployment.train():
        pass  # Devices have joined or returned with other facts.


@dataclass
class Deployment:
    """A run on devices, whose fleet changes between rounds.

    Args:
        folder: Folder of the run.
        experiment: Settings of the run. The fleet is that of the roster.
        request: What `fedquilt serve` asked for.
        courier: Carries messages. It has the roster.
        registrar: Has what devices say about themselves.
        family: The traced models.
    """

    folder: Path
    experiment: Experiment
    request: ServeRequest
    courier: GridCourier
    registrar: Registrar
    family: Family

    def train(self) -> bool:
        """Train until the run is finished. Return False if devices have joined or changed."""
        is_new = not holds_a_run(self.folder)
        run, experiment, text = self._admit(max(saved_rounds(self.folder), default=0))
        self.courier.roster.save(self.folder / ROSTER)
        settings = experiment.to_toml()
        if is_new:
            opened = Folder.create(self.folder, settings, experiment.checkpoint)
        else:
            opened = Folder.resume(self.folder, experiment.checkpoint)
        try:
            with opened:
                if not is_new:
                    opened.load(run)
                    opened.rewrite(settings)
                Status("training", text).save(self.folder)
                complete(
                    run,
                    experiment.rounds,
                    folder=opened,
                    trackers=experiment.trackers,
                    settings=write_settings(experiment),
                    names={**experiment.names, "engine": "flower"},
                )
        except RosterChangedError:
            return False
        return True

    def _admit(self, round: int) -> tuple[Run, Experiment, str]:
        """Return the run with all devices that can take part, its settings, and what happened.

        A device that joins or has changed is refused if the run cannot be prepared with it, for
        example because settings of the link name as many clients as the run has begun with.

        Args:
            round: Next round, from 0, in which devices take part with what they say now.
        """
        roster = self.courier.roster
        changes = self.registrar.changes(roster)
        texts = []
        admitted: tuple[Run, Experiment] | None = None
        for key, enrolment in in_order(changes, ServeRequest.load(self.folder).keys).items():
            assert enrolment.budget is not None
            earlier = dict(roster.entries)
            is_new = roster.by_key(key) is None
            try:
                entry = roster.enrol(key, enrolment.name, enrolment.budget, enrolment.size, round)
                admitted = self._prepare()
            except FedquiltError as error:
                roster.entries = earlier
                reason = f"{enrolment.name} cannot take part in this run: {error}"
                self.registrar.refuse(key, reason)
                texts.append(reason)
            else:
                happened = "joined as" if is_new else "returned as"
                texts.append(
                    f"{entry.name} {happened} client {entry.client}, with {entry.size} samples and "
                    f"the budget {entry.budget}, from round {entry.history[-1].round + 1}"
                )
        for text in texts:
            _log.info("%s", text)
        run, experiment = admitted or self._prepare()
        return run, experiment, ". ".join(texts)

    def _prepare(self) -> tuple[Run, Experiment]:
        """Return a run with the fleet of the roster that has not begun, and its settings."""
        roster = self.courier.roster
        experiment = replace(self.experiment, fleet=roster.devices(self.experiment.fleet))
        data = experiment.data.federate(experiment.fleet.total, experiment.seed)
        ground = experiment.ground(data, self.family)
        run = prepared(experiment, ground, self.courier, self.request, self.registrar)
        return run, settled(experiment, run, ground)


def enrol(folder: Path, registrar: Registrar, roster: Roster, request: ServeRequest) -> None:
    """Wait until enough devices have introduced themselves, and fill an empty roster with them.

    There is no time limit. The status file of the run says which devices are ready, and why others
    cannot take part. A run that is resumed waits for as many as it needs for a round.

    Args:
        folder: Folder of the run.
        registrar: It asks devices.
        roster: Devices of the run. Empty: it is new.
        request: What `fedquilt serve` asked for.
    """
    is_new = len(roster) == 0
    shown = ""
    while True:
        registrar.look(ENROL_SECONDS)
        registrar.changes(roster)  # It refuses devices that were struck off.
        ready = registrar.introduced
        text = f"{len(ready)} of {request.num_clients} devices are ready"
        text = ". ".join([text, *sorted(registrar.refused.values())])
        if text != shown:
            Status("waiting", text).save(folder)
            shown = text
        if len(ready) >= (request.num_clients if is_new else request.rules.least):
            break
        time.sleep(WAIT_SECONDS)
    if is_new:
        for key, enrolment in in_order(ready, request.keys).items():
            assert enrolment.budget is not None
            roster.enrol(key, enrolment.name, enrolment.budget, enrolment.size)
        roster.save(folder / ROSTER)


def in_order(introduced: Mapping[str, Enrolment], keys: Sequence[str]) -> dict[str, Enrolment]:
    """Return devices in the order in which they get numbers.

    Devices whose key is in `keys` come first, in that order. The others follow by name.

    Args:
        introduced: What devices say, by public key.
        keys: Public keys in the order of clients.
    """
    order = {key: number for number, key in enumerate(keys)}
    ranked = sorted(
        introduced, key=lambda key: (order.get(key, len(order)), introduced[key].name, key)
    )
    return {key: introduced[key] for key in ranked}


def prepared(
    experiment: Experiment,
    ground: Ground,
    courier: GridCourier,
    request: ServeRequest,
    registrar: Registrar | None = None,
) -> Run:
    """Return a run on devices that has not begun.

    Args:
        experiment: All settings, with the budgets of the devices.
        ground: Data, model and fleet of the server.
        courier: Carries messages to devices.
        request: What `fedquilt serve` asked for.
        registrar: It asks devices that are new or return. None: clients stay as they are.
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
        deadline=request.rules.deadline,
        enough=request.rules.enough,
        max_rms=request.rules.max_rms,
        max_rms_ratio=request.rules.max_rms_ratio,
        sizes={entry.client: entry.size for entry in courier.roster},
        least=request.rules.least,
        server_samples=ServerSamples.of(request.samples),
        arrivals=courier.roster.arrivals(),
        registrar=registrar,
        roster=courier.roster,
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
