"""Devices that join a run which has begun, and devices that return with other budgets or samples.

The ServerApp's own loop trains on devices in this process. A courier takes the place of Flower's
grid, and only bytes pass. The truth is a sequential run whose fleet changes in the same rounds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.data import FederatedData
from fedquilt.deployment import server
from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.in_process import own_data
from fedquilt.deployment.replay import Replay, attendances_of, changes_of
from fedquilt.deployment.roster import ROSTER, Roster
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import REQUEST, WORKPLACE, ServeRequest, Status, write_request
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.errors import TrainingError
from fedquilt.round.wire import Message
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.load import load_run
from fedquilt.runs.per_client import ever_trained, planned_jobs
from fedquilt.terms import Budget

KEYS = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(4)]
TOLERANCE = 1e-9


@dataclass
class HostCourier:
    """Courier to devices of this process, which are recognised by their keys.

    Args:
        roster: Numbers of clients by key.
        hosts: Devices that are online, by key.
        before_round: Called before a round with its number, from 0. It may change `hosts`.
    """

    roster: Roster
    hosts: dict[str, DeviceHost]
    before_round: Callable[[HostCourier, int], None] = lambda courier, round: None
    about: bytes = b""
    folder: Path = Path()
    forms: dict[str, int] = field(default_factory=dict)  # How often a device has come back

    def sessions(self) -> dict[str, str]:
        """Return the sessions of devices that are online."""
        has_begun = (self.folder / "rounds.jsonl").exists()
        self.before_round(self, len(read_records(self.folder)) if has_begun else 0)
        return {key: str(self.forms.get(key, 0)) for key in self.hosts}

    def enrol(self, keys: Sequence[str]) -> dict[str, Enrolment]:
        """Return what devices say about themselves."""
        return {key: Enrolment.read(self.hosts[key].enrol(self.about).note) for key in keys}

    def online(self) -> Sequence[int]:
        """Return the clients that are online."""
        return [entry.client for entry in self.roster if entry.key in self.hosts]

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Let every device train."""
        for client, request in requests.items():
            host = self.hosts[self.roster.entries[client].key]
            yield CourierReply(client, host.answer(self.about, request))

    def evaluate(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Let every device evaluate."""
        for client, request in requests.items():
            host = self.hosts[self.roster.entries[client].key]
            yield CourierReply(client, host.evaluate(self.about, request))

    def back(self, number: int, host: DeviceHost) -> None:
        """Let a device come, or come back with other settings."""
        self.hosts[KEYS[number]] = host
        self.forms[KEYS[number]] = self.forms.get(KEYS[number], 0) + 1


@dataclass
class Scene:
    """A run in a folder, and the samples of four devices."""

    folder: Path
    settings: dict[str, Any]
    data: FederatedData

    @property
    def out(self) -> Path:
        """Return the folder of the run."""
        return self.folder / "run"

    def host(self, number: int, share: float, data: FederatedData | None = None) -> DeviceHost:
        """Return a device with a share, whose state is in a folder of its own."""
        state = self.folder / f"state-{number}"
        settings = DeviceSettings(f"device {number}", "own", Budget(share=share), state)
        return DeviceHost(settings, own_data(data or self.data, number))

    def begin(
        self, num_clients: int, keys: Sequence[str] = (), rules: RoundRules = RoundRules(60.0)
    ) -> None:
        """Write the request of a new run."""
        request = ServeRequest("run1", num_clients, rules, keys=tuple(keys))
        write_request(self.out, Experiment.of(self.settings), request)

    def serve(
        self,
        monkeypatch: pytest.MonkeyPatch,
        hosts: Mapping[int, DeviceHost],
        before_round: Callable[[HostCourier, int], None] = lambda courier, round: None,
    ) -> HostCourier:
        """Train the run as a ServerApp does, and return the courier."""
        couriers = []

        def courier_of(grid: object, roster: Roster) -> HostCourier:
            named = {KEYS[number]: host for number, host in hosts.items()}
            couriers.append(HostCourier(roster, named, before_round, folder=self.out))
            return couriers[-1]

        monkeypatch.setattr(server, "GridCourier", courier_of)
        monkeypatch.setattr(server, "WAIT_SECONDS", 0.01)
        server.train(self.out, None)  # type: ignore[arg-type]
        return couriers[-1]

    def truth(self, shares: Sequence[float], num_rounds: int, **options: Any) -> fq.Run:
        """Return a sequential run with the fleet and the absences that the records name."""
        records = read_records(self.out)
        experiment = Experiment.of(self.settings)
        fleet = fq.Fleet.of(list(shares), len(shares), 1.0).changed(changes_of(records), 1.0)
        family = experiment.trace(self.data)
        engine = Replay(self.data, precision="fp64", attendances=attendances_of(records))
        run = fq.prepare(
            experiment.method,
            family,
            options.get("data", self.data),
            fleet,
            engine,
            evaluation=experiment.evaluation,
            precision="fp64",
        )
        return run.train(num_rounds)

    def check(self, truth: fq.Run, compares_grades: bool = True) -> fq.Run:
        """Compare the run in the folder with its truth, and return it."""
        found = load_run(self.out)
        for name in ("weights", "slots", "extras"):
            mine, theirs = getattr(truth.server, name), getattr(found.server, name)
            torch.testing.assert_close(dict(mine), dict(theirs), rtol=0, atol=TOLERANCE)
        for mine, theirs in zip(truth.records, found.records, strict=True):
            assert (mine.bytes_down, mine.bytes_up, mine.macs, mine.clients) == (
                *(theirs.bytes_down, theirs.bytes_up, theirs.macs, theirs.clients),
            )
            assert mine.loss == pytest.approx(theirs.loss, abs=TOLERANCE)
            if compares_grades:
                assert mine.grades.metrics.keys() == theirs.grades.metrics.keys()
        return found


@pytest.fixture
def make_scene(tmp_path):
    def make(method: str = "fedrolex", rounds: int = 4, every: int = 1, **more: Any) -> Scene:
        generator = np.random.default_rng(0)
        inputs = generator.integers(0, 256, (52, 1, 4, 4)).astype(np.uint8)
        targets = generator.integers(0, 3, 52)
        targets[:3] = range(3)
        np.savez(
            tmp_path / "server.npz",
            x_train=inputs[:40],
            y_train=targets[:40],
            x_test=inputs[40:],
            y_test=targets[40:],
        )
        momentum = 0.0 if method == "scaffold" else 0.9
        local = {"batch_size": 4, "optimizer": {"name": "sgd", "lr": 0.1, "momentum": momentum}}
        settings = {
            "method": {"name": method, "local": local},
            "model": {"name": "mlp", "hidden": [8]},
            "data": {"name": str(tmp_path / "server.npz"), "partition": "iid"},
            "fleet": {"cohort": 1.0},
            "engine": {"name": "sequential", "precision": "fp64"},
            "evaluation": {"every": every},
            "rounds": rounds,
            **more,
        }
        data, _ = Experiment.of(settings).data.federate(4, 0)
        return Scene(tmp_path, settings, data)

    return make


def test_a_device_that_joins_after_round_one_takes_part_from_then_on(make_scene, monkeypatch):
    scene = make_scene()
    scene.begin(2)
    third = scene.host(2, 0.25)

    def join(courier: HostCourier, round: int) -> None:
        if round == 1 and KEYS[2] not in courier.hosts:
            courier.back(2, third)

    courier = scene.serve(
        monkeypatch, {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}, before_round=join
    )
    found = scene.check(scene.truth((1.0, 0.5), 4))
    attendances = [record.attendance for record in found.records]
    assert [a.asked for a in attendances if a] == [(0, 1), (0, 1, 2), (0, 1, 2), (0, 1, 2)]
    assert [len(a.arrivals) for a in attendances if a] == [0, 1, 0, 0]
    line = json.loads((scene.out / "rounds.jsonl").read_text().splitlines()[1])
    arrival = {"client": 2, "budget": {"share": 0.25}, "size": 10, "joined": True}
    assert line["attendance"]["arrivals"] == [arrival]

    entry = Roster.load(scene.out / ROSTER).entries[2]
    assert (entry.key, entry.first_round, entry.size) == (KEYS[2], 1, 10)
    assert courier.roster.entries[2].since
    assert found.fleet.num_clients == 3
    assert [figures.client for figures in found.per_client().devices] == [0, 1, 2]
    assert found.server.memory.keys() == {(0, ""), (1, ""), (2, "")}


@pytest.mark.parametrize("method", ["fedrolex", "fedavg", "scaffold", "fedbn", "splitmix"])
@pytest.mark.parametrize("share", [0.25, 1.0])
def test_a_device_that_returns_with_another_budget_goes_on_with_it(
    method, share, make_scene, monkeypatch
):
    scene = make_scene(method)
    scene.begin(2)
    other = scene.host(1, share)

    def change(courier: HostCourier, round: int) -> None:
        if round == 2 and courier.hosts[KEYS[1]] is not other:
            courier.back(1, other)

    scene.serve(monkeypatch, {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}, change)
    found = scene.check(scene.truth((1.0, 0.5), 4))
    assert [len(record.attendance.absent) for record in found.records] == [0, 0, 0, 0]
    history = Roster.load(scene.out / ROSTER).entries[1].history
    assert [(facts.round, facts.budget.share) for facts in history] == [(0, 0.5), (2, share)]


def test_a_device_whose_budget_changed_unseen_loses_one_round(make_scene, monkeypatch):
    scene = make_scene()
    scene.begin(2)
    other = scene.host(1, 0.25)

    def change(courier: HostCourier, round: int) -> None:
        if round == 1:
            courier.hosts[KEYS[1]] = other  # In the same session.

    scene.serve(monkeypatch, {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}, change)
    found = scene.check(scene.truth((1.0, 0.5), 4))
    assert [len(record.attendance.failed) for record in found.records] == [0, 1, 0, 0]
    assert "its owner allows" in found.records[1].attendance.failed[1]
    trained = {(job.round, job.client.id) for job in planned_jobs(found)}
    assert trained == {(round, client) for round in range(4) for client in (0, 1)}
    assert ever_trained(found) == {"": pytest.approx(1.0)}


def test_a_device_that_returns_with_other_samples_trains_on_them(make_scene, monkeypatch):
    scene = make_scene(every=0)
    scene.begin(2)
    rows = [part[:6] if client == 1 else part for client, part in enumerate(scene.data.parts)]
    smaller = replace(scene.data, parts=type(scene.data.parts).of(rows))
    other = scene.host(1, 0.5, smaller)

    def change(courier: HostCourier, round: int) -> None:
        if round == 2 and courier.hosts[KEYS[1]] is not other:
            courier.back(1, other)

    scene.serve(monkeypatch, {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}, change)
    truth = scene.truth((1.0, 0.5), 2)
    truth.engine = Replay(
        smaller.among(2),
        precision="fp64",
        attendances=attendances_of(read_records(scene.out)),
        _next_round=2,
    )
    found = scene.check(truth.train(4), compares_grades=False)
    assert found.records[2].attendance.arrivals[0].size == 6


def test_a_run_that_is_resumed_with_more_keys_takes_more_devices(make_scene, monkeypatch):
    scene = make_scene()
    scene.begin(2, KEYS[:2])
    hosts = {number: scene.host(number, share) for number, share in enumerate((1.0, 0.5, 0.25))}

    class KilledError(Exception):
        pass

    def kill(courier: HostCourier, round: int) -> None:
        if round == 2:
            raise KilledError

    with pytest.raises(KilledError):
        scene.serve(monkeypatch, hosts, kill)  # The third key is not registered yet.
    assert len(Roster.load(scene.out / ROSTER)) == 2
    request = ServeRequest.load(scene.out)
    replace(request, keys=tuple(KEYS[:3])).save(scene.out)
    scene.serve(monkeypatch, hosts)
    found = scene.check(scene.truth((1.0, 0.5), 4))
    assert [record.attendance.asked for record in found.records] == [
        *((0, 1), (0, 1), (0, 1, 2), (0, 1, 2))
    ]


def test_a_server_that_dies_after_a_device_has_joined_repeats_the_round(make_scene, monkeypatch):
    scene = make_scene()
    scene.begin(2)
    third = scene.host(2, 0.25)
    hosts = {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}

    class KilledError(Exception):
        pass

    def join_and_die(courier: HostCourier, round: int) -> None:
        if round == 1 and len(courier.roster) == 3:
            raise KilledError
        if round == 1:
            courier.hosts.setdefault(KEYS[2], third)

    with pytest.raises(KilledError):
        scene.serve(monkeypatch, hosts, join_and_die)
    # It has returned with yet another budget when the server is back.
    other = scene.host(2, 0.5)
    scene.serve(monkeypatch, {**hosts, 2: other})
    found = scene.check(scene.truth((1.0, 0.5), 4))
    assert [arrival.budget.share for arrival in found.records[1].attendance.arrivals] == [0.5]


def test_a_device_with_which_the_run_cannot_be_prepared_is_refused(make_scene, monkeypatch):
    link = {"clock": {"down": [1e6, 2e6], "up": 1e6}}
    scene = make_scene(link=link, every=0)
    scene.begin(2)
    third = scene.host(2, 0.25)
    said: list[str] = []

    def join(courier: HostCourier, round: int) -> None:
        courier.hosts.setdefault(KEYS[2], third) if round == 1 else None
        status = Status.load(scene.out)
        said.append("" if status is None else status.text)

    scene.serve(monkeypatch, {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}, join)
    assert len(Roster.load(scene.out / ROSTER)) == 2
    assert any("device 2 cannot take part in this run" in text for text in said)
    assert [record.attendance.asked for record in read_records(scene.out)] == [(0, 1)] * 4


def test_a_resume_with_another_method_is_refused_though_the_fleet_may_change(
    make_scene, monkeypatch
):
    scene = make_scene(rounds=1)
    scene.begin(2)
    hosts = {0: scene.host(0, 1.0), 1: scene.host(1, 0.5)}
    scene.serve(monkeypatch, hosts)
    text = (scene.out / "config.toml").read_text()
    (scene.out / "config.toml").write_text(text.replace("shift = 1", "shift = 2"))
    assert (scene.out / WORKPLACE / REQUEST).exists()
    with pytest.raises(fq.errors.ConfigError, match="shift: 1 there, 2 here"):
        scene.serve(monkeypatch, hosts)


def test_a_round_closes_once_enough_devices_have_replied(make_scene, monkeypatch):
    scene = make_scene(rounds=2)
    scene.begin(3, rules=RoundRules(60.0, least=1, enough=2))
    scene.serve(monkeypatch, {number: scene.host(number, 1.0) for number in range(3)})
    for record in read_records(scene.out):
        assert record.attendance is not None
        assert len(record.attendance.asked) == 3
        assert len(record.attendance.replied) == 2
    scene.check(scene.truth([1.0] * 3, 2))


def test_changes_above_the_servers_bound_are_refused(make_scene, monkeypatch):
    scene = make_scene(rounds=2)
    scene.begin(2, rules=RoundRules(60.0, max_rms=1e-9))
    hosts = {number: scene.host(number, 1.0) for number in range(2)}
    with pytest.raises(TrainingError, match="too few of the clients of round 1 have replied"):
        scene.serve(monkeypatch, hosts)
