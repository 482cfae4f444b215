"""A device in one process: deadlines, full disks, code of its owner, and runs side by side."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.deployment.device_engine import OnDevice
from fedquilt.deployment.enrolment import Enrolment, ServerFacts
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.in_process import InProcess, own_data
from fedquilt.deployment.problems import DeviceProblem, ProblemLog
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.errors import ConfigError
from fedquilt.names import find
from fedquilt.round.wire import Message, Reply
from fedquilt.runs.model_settings import Model
from tests.deployed import assert_same_training

SHARES = (1.0, 0.5)
CODE = """
from dataclasses import dataclass
from torch import nn
import fedquilt as fq

@dataclass(frozen=True)
class Mine(fq.methods.FedRolex):
    '''FedRolex that moves on by more channels.'''
    shift: int = 3

@dataclass(frozen=True)
class Smooth(fq.tasks.Classification):
    '''Classification with smoothed labels.'''
    label_smoothing: float = 0.1

def net(num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, num_classes))
"""


@pytest.fixture
def data() -> fq.FederatedData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, 8, 8, generator=generator)
    targets = torch.arange(40) % 4
    return fq.data.Pool.of((inputs, targets), (inputs[:8], targets[:8])).partition(2)


@dataclass
class Hosted:
    """A device that a courier asks, with the description that accompanies every message."""

    host: DeviceHost
    about: bytes

    def answer(self, message: Message) -> Message:
        return self.host.answer(self.about, message)

    def evaluate(self, message: Message) -> Message:
        return self.host.evaluate(self.about, message)


class Deployment:
    """A server and two devices in one process. Only bytes pass between them."""

    def __init__(self, data, folder: Path, model: Model = Model("mlp"), **settings) -> None:
        self.data, self.model, self.folder = data, model, folder
        self.family = model.trace(data)
        self.about = ServerFacts.of("run1", [model], data, self.family).to_bytes()
        self.hosts = [
            DeviceHost(
                DeviceSettings(
                    f"device-{client}",
                    "unused",
                    fq.Budget(share=share),
                    folder / str(client),
                    **settings,
                ),
                own_data(data, client),
            )
            for client, share in enumerate(SHARES)
        ]
        for host in self.hosts:
            host.settings.state.mkdir(parents=True, exist_ok=True)

    def train(self, method, rounds: int = 2, run: str = "run1", **options) -> fq.Run:
        """Train on the devices. Failures are in the records."""
        engine_options = {name: options.pop(name) for name in ("deadline",) if name in options}
        devices = {client: Hosted(host, self.about) for client, host in enumerate(self.hosts)}
        engine = Flower(
            self.data,
            precision="fp64",
            courier=InProcess(devices),
            run_id=run,
            terms=Terms.of,
            least=0,
            **engine_options,
        )
        return self.run(method, engine, rounds, **options)

    def run(self, method, engine="sequential", rounds: int = 2, **options) -> fq.Run:
        fleet = fq.Fleet.of(SHARES, 2, 2)
        evaluation = fq.Evaluation(every=0)
        return fq.run(
            method,
            self.family,
            self.data,
            fleet,
            engine,
            rounds,
            evaluation=evaluation,
            precision="fp64",
            **options,
        )


def versions(folder: Path) -> dict[str, bytes]:
    """Return the contents of all versions of states below a folder, by their path."""
    files = sorted(set(folder.rglob("*.safetensors")) - set(folder.rglob("own.safetensors")))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


# --- deadlines ----------------------------------------------------------------------------------


def test_a_device_stops_between_batches_at_the_deadline(data, tmp_path, monkeypatch):
    clock = iter(range(1000))  # Every look at the clock takes a second.
    monkeypatch.setattr("fedquilt.deployment.device_engine.time.monotonic", lambda: next(clock))
    steps = []
    before_batch = OnDevice.before_batch

    def noted(self, job, step, num_batches):
        before_batch(self, job, step, num_batches)
        steps.append(step)

    monkeypatch.setattr(OnDevice, "before_batch", noted)
    deployment = Deployment(data, tmp_path)
    local = replace(fq.methods.HeteroFL().local, batch_size=2)
    method = replace(fq.methods.HeteroFL(), local=local)
    run = deployment.train(method, rounds=1, deadline=4)
    attendance = run.records[0].attendance
    assert {*attendance.failed} == {0, 1}
    for reason in attendance.failed.values():
        assert "the server allows 4 s for round 1; they passed after" in reason
        assert "of 10 batches" in reason
    assert 2 <= len(steps) < 2 * 10
    assert versions(tmp_path) == {}


def test_a_deadline_leaves_the_state_of_earlier_rounds(data, tmp_path, monkeypatch):
    deployment = Deployment(data, tmp_path)
    run = deployment.train(fq.methods.FedBN(), rounds=2)
    before = versions(tmp_path)
    assert len(before) == 4
    before_batch = OnDevice.before_batch

    def late(self, job, step, num_batches):
        before_batch(replace(self, deadline=0.0), job, step, num_batches)

    monkeypatch.setattr(OnDevice, "before_batch", late)
    record = run.train(3).records[-1]
    assert {*record.attendance.failed} == {0, 1}
    assert versions(tmp_path) == before


# --- full disks ---------------------------------------------------------------------------------


def test_a_state_that_cannot_be_written_costs_the_round_and_nothing_else(
    data, tmp_path, monkeypatch
):
    deployment = Deployment(data, tmp_path)
    truth = deployment.run(fq.methods.FedBN(), rounds=3)
    run = deployment.train(fq.methods.FedBN(), rounds=2)
    before = versions(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fedquilt.storage.files.os.fsync", full)
        record = run.train(3).records[-1]
    for reason in record.attendance.failed.values():
        assert "could not be written" in reason
        assert "No space left on device" in reason
    assert versions(tmp_path) == before
    assert not list(tmp_path.rglob("*.tmp"))
    again = deployment.train(fq.methods.FedBN(), rounds=3, run="run2")
    assert_same_training(truth, again)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_state_folder_that_is_read_only_is_a_reason(data, tmp_path):
    deployment = Deployment(data, tmp_path)
    (tmp_path / "0").chmod(0o500)
    run = deployment.train(fq.methods.HeteroFL(), rounds=1)
    (tmp_path / "0").chmod(0o700)
    assert "Permission denied" in run.records[0].attendance.failed[0]


def test_runs_have_states_side_by_side(data, tmp_path):
    deployment = Deployment(data, tmp_path)
    deployment.train(fq.methods.FedBN(), rounds=2, run="run1")
    first = versions(tmp_path)
    deployment.train(fq.methods.FedBN(), rounds=1, run="run2")
    both = versions(tmp_path)
    assert {path: both[path] for path in first} == first
    assert any("run2" in path for path in both)


# --- code of the owner --------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path) -> tuple[Path, Path]:
    """Return the same code in a folder of the server and in one of the devices."""
    paths = tmp_path / "server" / "mine.py", tmp_path / "device" / "mine.py"
    for path in paths:
        path.parent.mkdir()
        path.write_text(CODE)
    return paths


def test_a_method_task_and_model_of_an_owners_file_train(data, tmp_path, files):
    on_server, on_device = files
    allowed = tuple(f"{on_device}:{name}" for name in ("Mine", "Smooth", "net"))
    model = Model(f"{on_server}:net")
    deployment = Deployment(data, tmp_path / "states", model, allowed=allowed)
    enrolment = Enrolment.read(deployment.hosts[0].enrol(deployment.about).note)
    assert enrolment == Enrolment("device-0", fq.Budget(share=1.0), 20)
    method = find({}, f"{on_server}:Mine", "method")()
    task = find({}, f"{on_server}:Smooth", "task")()
    truth = deployment.run(method, task=task)
    other = deployment.train(method, task=task)
    assert not any(record.attendance.failed for record in other.records)
    assert_same_training(truth, other)


@pytest.mark.parametrize("allowed", [(), ("net",), ("net", "Other")])
def test_code_that_the_owner_did_not_name_is_refused_with_the_flag(data, tmp_path, files, allowed):
    on_server, on_device = files
    names = tuple(f"{on_device}:{name}" for name in allowed)
    deployment = Deployment(data, tmp_path / "states", Model("mlp"), allowed=names)
    method = find({}, f"{on_server}:Mine", "method")()
    on_device.write_text("raise RuntimeError('it was imported')")
    run = deployment.train(method, rounds=1)
    for reason in run.records[0].attendance.failed.values():
        assert reason.startswith("the server names the code")
        assert "fedquilt join --allow mine.py:Mine on the device would work" in reason


def test_a_model_of_a_file_is_refused_without_allow(data, tmp_path, files):
    deployment = Deployment(data, tmp_path / "states", Model(f"{files[0]}:net"))
    enrolment = Enrolment.read(deployment.hosts[0].enrol(deployment.about).note)
    assert "--allow mine.py:net on the device would work" in enrolment.failed


# --- what `join` reports ------------------------------------------------------------------------


def test_a_budget_that_holds_nothing_is_final(data, tmp_path):
    deployment = Deployment(data, tmp_path)
    settings = replace(deployment.hosts[0].settings, budget=fq.Budget(params=5))
    host = DeviceHost(settings, own_data(data, 0))
    enrolment = Enrolment.read(host.enrol(deployment.about).note)
    assert "holds nothing of the server's model" in enrolment.failed
    assert DeviceProblem.load(settings.state) == DeviceProblem(enrolment.failed, is_final=True)
    deployment.hosts[0].enrol(deployment.about)
    assert DeviceProblem.load(settings.state) is None


def test_a_problem_is_reported_once_and_again_when_it_is_over(data, tmp_path):
    deployment = Deployment(data, tmp_path)
    host = deployment.hosts[0]
    log = ProblemLog("phone", host.settings.state)
    assert log.changed() == ("", None)
    host.answer(deployment.about, Message(b"{}"))
    line, problem = log.changed()
    assert line == f"phone could not do what the server asked for: {problem.text}"
    assert log.changed() == ("", problem)
    assert Reply.read(host.answer(deployment.about, Message(b"{}"))).failed == problem.text
    assert log.changed() == ("", problem)
    deployment.train(fq.methods.HeteroFL(), rounds=1)
    assert log.changed() == ("phone works again.", None)


def test_a_problem_of_an_earlier_join_is_not_shown(tmp_path):
    DeviceProblem.report(tmp_path, DeviceProblem("old"))
    assert ProblemLog("phone", tmp_path).changed() == ("", None)


def test_settings_with_allowed_code_survive_writing_and_reading(tmp_path):
    budget = fq.Budget(share=0.5)
    settings = DeviceSettings("phone", "a.npz", budget, tmp_path, allowed=("/a/mine.py:Mine",))
    path = settings.save()
    assert DeviceSettings.load(path) == settings
    plain = json.loads(path.read_text())
    path.write_text(json.dumps({**plain, "allowed": 7}))
    with pytest.raises(ConfigError, match="no settings of a device"):
        DeviceSettings.load(path)
