"""Devices whose replies get lost, come twice or belong to earlier rounds, and servers that die.

Every schedule of faults ends with the weights and device states of a sequential run in which the
same clients are absent in the same rounds, reconstructed from the records of the server alone. In
some schedules devices join later, or return with other budgets.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.deployment.device import Device
from fedquilt.deployment.in_process import InProcess
from fedquilt.deployment.replay import Replay, attendances_of, changes_of
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.fleets import Change
from fedquilt.methods import FedAvg, FedBN, FedRolex, Scaffold, SplitMix
from fedquilt.round.engine import RosterChange
from fedquilt.round.wire import Message
from tests.conftest import with_local
from tests.deployed import (
    assert_same_states,
    assert_same_training,
    deployed,
    device_states,
    devices_of,
)

ROUNDS = 10
CLIENTS = 4
SHARES = (1.0, 0.5)
METHODS = {
    "fedrolex": FedRolex(),
    "fedavg, kept momentum": FedAvg(),
    "fedbn": FedBN(),
    "scaffold": Scaffold(),
    "splitmix": SplitMix(base=0.5),
}
LINKS = {
    "perfect": fq.Link(),
    "lossy": fq.Link(loss=fq.links.ColumnLoss(0.2, 0.3)),
    "coded": fq.Link(codec=fq.links.Codec(bits=4, feedback=True, down=True)),
}


class ServerDiedError(Exception):
    """The server process ended before it had saved the round."""


@dataclass(frozen=True)
class Population:
    """Clients of a schedule: how many there are in round 0, and what changes later."""

    first: int
    changes: tuple[Change, ...]

    @staticmethod
    def drawn(dice: random.Random) -> Population:
        """Draw the rounds in which devices join or return with other budgets."""
        first = dice.choice([2, 3, CLIENTS, CLIENTS])
        rounds = sorted(dice.choices(range(1, ROUNDS), k=CLIENTS - first))
        joins = [
            Change(round, client, fq.Budget(share=dice.choice(SHARES)))
            for client, round in enumerate(rounds, first)
        ]
        since = dict.fromkeys(range(first), 0) | {join.client: join.round for join in joins}
        others = []
        for _ in range(dice.choice([0, 0, 1, 3])):
            client = dice.randrange(CLIENTS)
            if since[client] + 1 < ROUNDS:
                round = dice.randrange(since[client] + 1, ROUNDS)
                others.append(Change(round, client, fq.Budget(share=dice.choice(SHARES))))
        return Population(first, (*joins, *others))

    def fleet(self, round: int) -> fq.Fleet:
        """Return the fleet that a server knows before a round, from 0."""
        fleet = fq.Fleet.of(SHARES, self.first, 1.0)
        return fleet.changed([change for change in self.changes if change.round <= round], 1.0)

    def arrivals(self) -> dict[int, list[RosterChange]]:
        """Return what records list, by round from 0."""
        arrivals: dict[int, list[RosterChange]] = {}
        known = set(range(self.first))
        for change in self.changes:
            arrival = RosterChange(change.client, change.budget, 0, change.client not in known)
            known.add(change.client)
            arrivals.setdefault(change.round, []).append(arrival)
        return arrivals


@dataclass
class Faulty(InProcess):
    """Courier whose replies are lost, doubled, stale, damaged or out of order, by a seed."""

    dice: random.Random = field(default_factory=random.Random)
    folder: Path | None = None
    family: fq.Family | None = None
    old: dict[int, list[Message]] = field(default_factory=dict)  # Earlier replies, by client
    asked: list[str] = field(default_factory=list)  # Digests of requests that reached a device
    forgot: set[int] = field(default_factory=set)  # Clients that ever lost their state
    num_forgotten: int = 0  # How often that happened
    known: int = CLIENTS  # Clients that have joined so far

    def online(self) -> list[int]:
        """Return the clients that have joined."""
        return list(range(self.known))

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        deliveries: list[CourierReply] = []
        for client, request in requests.items():
            deliveries += self._one(client, request)
        self.dice.shuffle(deliveries)
        yield from deliveries
        if self.dice.random() < 0.1:
            raise ServerDiedError

    def _one(self, client: int, request: Message) -> list[CourierReply]:
        fault = self.dice.choices(
            [
                "none",
                "lost",
                "offline",
                "twice",
                "stale",
                "damaged",
                "restart",
                "forget",
                "asked twice",
            ],
            [8, 2, 1, 1, 1, 1, 1, 1, 1],
        )[0]
        if fault == "offline":
            return [CourierReply(client, None, "offline")]
        if fault == "restart":
            self._restart(client)
        if fault == "forget":
            self.devices[client].forget()
            self.forgot.add(client)
            self.num_forgotten += 1
        self.asked.append(request.digest)
        reply = self.devices[client].answer(request)
        if fault == "asked twice":
            self.asked.append(request.digest)
            assert self.devices[client].answer(request) == reply
        earlier = self.old.setdefault(client, [])
        arriving = {
            "lost": [],
            "twice": [reply, reply],
            "stale": [*earlier[-1:], reply],
            "damaged": [self._damaged(reply)],
        }.get(fault, [reply])
        earlier.append(reply)
        return [CourierReply(client, message) for message in arriving] or [
            CourierReply(client, None, "lost")
        ]

    def _restart(self, client: int) -> None:
        """End the device's process: only its folder stays."""
        device = self.devices[client]
        assert device.folder is not None
        new = Device(device.data, device.family, device.folder)
        new.trained = device.trained
        self.devices = {**self.devices, client: new}

    def _damaged(self, reply: Message) -> Message:
        """Flip a byte of the header or of the note."""
        note = bytearray(reply.note)
        note[self.dice.randrange(len(note))] ^= 1 << self.dice.randrange(7)
        return Message(bytes(note), reply.files)


def run_schedule(seed: int, family, data, play, tmp_path) -> tuple[fq.Run, fq.Run, Faulty]:
    """Return a run with faults, and the sequential run with the same clients absent."""
    dice = random.Random(seed)
    name = dice.choice(list(METHODS))
    link = LINKS[dice.choice(list(LINKS))]
    method = with_local(
        METHODS[name], batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9)
    )
    if "momentum" in name:
        method = method.with_local(keep_optimizer=True)
    options = {"shares": SHARES, "link": link, "evaluation": fq.Evaluation(every=0)}
    start = play(method, family, data, rounds=1, **options)
    courier = Faulty(devices_of(family, data, tmp_path / str(seed)), dice=dice)
    population = Population.drawn(dice)
    engine = deployed(start, family, data, courier, arrivals=population.arrivals())
    settings = {
        "evaluation": fq.Evaluation(every=0),
        "link": link,
        "precision": "fp64",
    }
    run = fq.prepare(method, family, data, population.fleet(0), engine, **settings)
    while run.server.round < ROUNDS:
        # Devices that have joined or changed are in the fleet from the next round on. The run is
        # prepared again, as a server does.
        fleet = population.fleet(run.server.round)
        courier.known = fleet.num_clients
        if fleet.num_clients != run.fleet.num_clients or fleet.since != run.fleet.since:
            grown = fq.prepare(method, family, data, fleet, engine, **settings)
            grown.server, grown.records = run.server, run.records
            run = grown
        next_change = min(
            [change.round for change in population.changes if change.round > run.server.round],
            default=ROUNDS,
        )
        try:
            run.train(next_change)
        except ServerDiedError:
            continue
    replay = Replay(data, precision="fp64", attendances=attendances_of(run.records))
    fleet = fq.Fleet.of(SHARES, population.first, 1.0).changed(changes_of(run.records), 1.0)
    truth = fq.prepare(method, family, data, fleet, replay, **settings)
    truth.train(ROUNDS)
    return truth, run, courier


def check_schedule(seed, family, make_data, play, tmp_path):
    data = make_data(family, (7, 4, 9, 5), public=0)
    truth, run, courier = run_schedule(seed, family, data, play, tmp_path)
    assert_same_training(truth, run)
    states = device_states(courier, run, courier.forgot)
    # A device that forgot, and has trained since without its round counting, starts anew next time.
    present = {client for client, _ in states}
    expected = {key: state for key, state in truth.server.memory.items() if key[0] in present}
    assert set(range(CLIENTS)) - present <= courier.forgot | set(range(CLIENTS)) - {
        client for client, _ in truth.server.memory
    }
    assert_same_states(expected, states)
    trained = sum(device.trained for device in courier.devices.values())
    # Nothing asked twice is trained twice, except by a device that has forgotten.
    assert trained <= len(set(courier.asked)) + courier.num_forgotten


@pytest.mark.parametrize("seed", range(12))
def test_faults_cost_the_rounds_of_their_clients_and_nothing_else(
    seed, perceptron, make_data, play, tmp_path
):
    check_schedule(seed, perceptron, make_data, play, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_a_thousand_schedules_of_faults(first, perceptron, make_data, play, tmp_path):
    for seed in range(first, first + 100):
        check_schedule(seed, perceptron, make_data, play, tmp_path)


# --- rounds that close ----------------------------------------------------------------------------


def prepared(family, data, play, faults=None, **options):
    start = play(FedAvg(), family, data, rounds=1)
    engine = deployed(start, family, data, faults=faults, **options)
    fleet = fq.Fleet.of((1.0,), CLIENTS, 2)
    settings = {"evaluation": fq.Evaluation(every=0), "precision": "fp64"}
    return fq.prepare(FedAvg(), family, data, fleet, engine, **settings)


def test_a_round_closes_when_enough_devices_have_replied(perceptron, make_data, play):
    data = make_data(perceptron, (7, 4, 9, 5), public=0)
    run = prepared(perceptron, data, play, enough=1).train(1)
    attendance = run.records[0].attendance
    assert len(attendance.asked) == 2
    assert len(attendance.replied) == 1
    assert list(attendance.late.values()) == ["the round closed with 1 replies before it replied"]


def test_another_cohort_is_asked_if_too_few_devices_reply(perceptron, make_data, play):
    data = make_data(perceptron, (7, 4, 9, 5), public=0)
    fleet = fq.Fleet.of((1.0,), CLIENTS, 2)
    first = set(fleet.draw_cohort(0, 0))
    others = [set(fleet.draw_cohort(0, 0, None, attempt)) for attempt in range(1, 10)]
    assert any(cohort.isdisjoint(first) for cohort in others)

    run = prepared(
        perceptron,
        data,
        play,
        faults=lambda client, reply: [None] if client in first else [reply],
        least=2,
    ).train(1)
    assert set(run.records[0].attendance.replied).isdisjoint(first)


def test_a_round_in_which_nobody_replies_fails_and_changes_nothing(perceptron, make_data, play):
    data = make_data(perceptron, (7, 4, 9, 5), public=0)
    run = prepared(perceptron, data, play, faults=lambda client, reply: [None])
    with pytest.raises(fq.errors.TrainingError, match="too few of the clients of round 1"):
        run.train(1)
    assert run.server.round == 0


def test_code_that_a_server_names_runs_only_if_the_owner_named_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("raise SystemExit('it was imported')\n")
    plain = {"method": {"name": "mine.py:Mine"}}
    with pytest.raises(fq.errors.ConfigError, match=r"names the code 'mine.py:Mine'; the owner"):
        Terms.read(plain)
    (tmp_path / "mine.py").write_text(
        "from fedquilt.methods.api import Method\nclass Mine(Method):\n    pass\n"
    )
    assert type(Terms.read(plain, ["mine.py:Mine"]).method).__name__ == "Mine"
