"""The device's side of a deployment: settings of its owner, and the replies to all messages."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from fedquilt.data import FederatedData
from fedquilt.deployment.device import Device
from fedquilt.deployment.enrolment import Enrolment, ServerFacts
from fedquilt.deployment.problems import DeviceProblem
from fedquilt.deployment.roster import check_name, read_budget
from fedquilt.deployment.terms import permitted
from fedquilt.errors import BudgetError, ConfigError, FedquiltError, FormatError
from fedquilt.family import Family
from fedquilt.hardware.device import device_of
from fedquilt.names import said
from fedquilt.round.wire import Message, Reply, Request
from fedquilt.round.wire_evaluation import EvalReply, EvalRequest
from fedquilt.runs.data_settings import Source
from fedquilt.storage.files import why, write, write_text
from fedquilt.storage.tensor_files import bounded_json
from fedquilt.terms import Budget

SETTINGS = "device.json"  # Name of the file in the state folder of a device
SERVER_FACTS = "server.json"  # The server's description, with which a stored net is exported


@dataclass(frozen=True)
class DeviceSettings:
    """Decisions of a device's owner at `fedquilt join`."""

    name: str  # Name of the device, which the server learns
    data: str  # Name, file or folder of the samples
    budget: Budget  # What the device can train, which the server learns
    state: Path  # Folder for the state between rounds
    model: str | None = None  # Model of the owner, such as mine.py:net. None: the server's
    device: str = "cpu"  # Where tensors are trained
    threads: int = 1  # CPU threads of training
    # Code of the owner that the server's settings may name, such as /home/me/mine.py:Mine
    allowed: tuple[str, ...] = ()

    def save(self) -> Path:
        """Write the settings to the state folder, and return the path of the file."""
        plain = {
            "name": self.name,
            "data": self.data,
            "budget": self.budget.bounds,
            "state": str(self.state),
            "model": self.model,
            "device": self.device,
            "threads": self.threads,
            "allowed": list(self.allowed),
        }
        path = self.state / SETTINGS
        write_text(path, json.dumps(plain, indent=1) + "\n")
        return path

    @staticmethod
    def load(path: Path) -> DeviceSettings:
        """Read the settings that `save` wrote.

        Raises:
            ConfigError: The file cannot be read, or has other contents.
        """
        try:
            plain = bounded_json(path.read_bytes(), 4)
            name, data = plain["name"], plain["data"]
            model, device, threads = plain["model"], plain["device"], plain["threads"]
            check_name(name)
            budget = read_budget(plain["budget"])
            state = Path(plain["state"])
            allowed = tuple(map(str, plain["allowed"]))
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {why(error)}.") from error
        except (FormatError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} has no settings of a device: {error}.") from error
        return DeviceSettings(name, data, budget, state, model, device, threads, allowed)


def check_budget(family: Family, budget: Budget) -> None:
    """Refuse a budget that holds no net of a family, not even the smallest.

    Raises:
        BudgetError: It has the costs of the smallest member.
    """
    problem: BudgetError | None = None
    for variant in family.variants:
        try:
            family.fit(budget, variant=variant)
            return
        except BudgetError as error:
            problem = error
    assert problem is not None, "a family has at least one variant"
    raise BudgetError(
        f"the budget {budget} of this device holds nothing of the server's model: {problem} A "
        "larger --budget on the device would work, or a smaller model on the server."
    )


class DeviceHost:
    """Replies to the messages of a server with one device, which is built at the first message.

    Args:
        settings: What the owner decided.
        data: Samples of the device. None: they are loaded as the settings say.
    """

    def __init__(self, settings: DeviceSettings, data: FederatedData | None = None) -> None:
        self.settings = settings
        self._data = data
        self._devices: dict[bytes, Device] = {}  # By the server's description

    @property
    def data(self) -> FederatedData:
        """Return the samples of the device, all of which belong to one client."""
        if self._data is None:
            self._data = Source(self.settings.data).federate(1, 0)[0]
        return self._data

    def enrol(self, about: bytes) -> Message:
        """Introduce the device, after its model and samples were compared with the server's.

        Args:
            about: The server's description (`About.to_bytes`).
        """
        settings = self.settings
        reason = ""
        try:
            check_budget(self.device(about).family, settings.budget)
            enrolment = Enrolment(settings.name, settings.budget, self.data.size(0))
        except FedquiltError as error:
            reason = str(error)
        except Exception as error:  # A model of the user may raise anything.
            reason = said(error)
        if reason:
            enrolment = Enrolment(settings.name, None, failed=reason)
        DeviceProblem.report(
            settings.state, DeviceProblem(reason, is_final=True) if reason else None
        )
        return Message(enrolment.to_bytes())

    def answer(self, about: bytes, message: Message) -> Message:
        """Train what a request asks for, and return the reply. A failure is a reply, too.

        Args:
            about: The server's description (`About.to_bytes`).
            message: A request.
        """
        digest = message.digest
        run, round, base = "", 0, -1
        try:
            request = Request.read(message)
            run, round, base = request.run, request.round, request.base
            self._check(request)
            answer = self.device(about).answer(message)
        except FedquiltError as error:
            answer = Reply(run, round, base, digest, failed=str(error)).message()
        except Exception as error:
            answer = Reply(run, round, base, digest, failed=said(error)).message()
        reason = Reply.read(answer).failed
        DeviceProblem.report(self.settings.state, DeviceProblem(reason) if reason else None)
        return answer

    def evaluate(self, about: bytes, message: Message) -> Message:
        """Evaluate what a request asks for, and return sums. A failure is a reply, too.

        Args:
            about: The server's description (`About.to_bytes`).
            message: A request to evaluate.
        """
        digest = message.digest
        run, round, base = "", 0, -1
        try:
            request = EvalRequest.read(message)
            run, round, base = request.run, request.round, request.base
            is_own = any(task.source != "server" for task in request.tasks)
            self._check(request, is_own)
            device = self.device(about)
            if is_own:
                write(self.settings.state / SERVER_FACTS, [about])
            return device.evaluate(message)
        except FedquiltError as error:
            reason = str(error)
        except Exception as error:
            reason = said(error)
        return EvalReply(run, round, base, digest, failed=reason).message()

    def _check(self, request: Request | EvalRequest, is_own: bool = False) -> None:
        """Refuse a request that names code, or another budget than the owner's.

        Args:
            request: A request.
            is_own: True: nets of the device are tested. They have the budget with which it trained
                them, which may be an earlier one.
        """
        permitted(request.settings, self.settings.allowed)
        if not is_own and request.client.budget != self.settings.budget:
            raise ConfigError(
                f"the server has the budget {request.client.budget} for this device; its "
                f"owner allows {self.settings.budget}. The server has to enrol it again."
            )

    def device(self, about: bytes) -> Device:
        """Return the device for a server, which is built at the first call.

        Args:
            about: The server's description (`ServerFacts.to_bytes`).
        """
        if about not in self._devices:
            description = ServerFacts.read(about)
            data = description.fitted(self.data)
            torch.set_num_threads(self.settings.threads)
            settings = self.settings
            family = description.family(data, settings.model, settings.allowed)
            device = Device(
                data,
                family,
                settings.state / "rounds",
                device_of(settings.device),
                settings.allowed,
            )
            # Another description is another run or another model: only the last one is kept.
            self._devices = {about: device}
        return self._devices[about]
