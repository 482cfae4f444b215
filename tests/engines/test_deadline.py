"""Deadlines on every engine: a late client counts as absent. Float64, three rounds, 1e-9."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch

import fedquilt as fq
from fedquilt.engines import Sequential
from fedquilt.methods import METHODS, RaFL
from fedquilt.round.link import BaseCodec
from fedquilt.terms import Job
from tests.conftest import (
    CUTTING,
    LOCAL,
    assert_same,
    assert_same_grades,
    assert_same_state,
    with_local,
)
from tests.pairs import limits, plain_pairs

RAGGED = (7, 4, 9, 5, 8, 4)
SHARES = (1.0, 0.5, 0.25)
SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
CLOCK = fq.links.Clock(down=(2e5, 1e5, 3e5), up=1e5, latency=0.01, compute=(1e6, 5e5))
LOSSY = fq.links.ColumnLoss((0.1, 0.3), 0.4)
LINKS = {
    "clock": fq.Link(clock=CLOCK),
    "everything": fq.Link(LOSSY, fq.links.Codec(bits=8, keep=0.5, feedback=True, down=True), CLOCK),
}


@dataclass(frozen=True)
class Threshold(BaseCodec):
    """Codec that sends the values that changed by more than a bound, with their positions.

    Its messages differ in length.
    """

    bound: float = 0.02
    feedback: bool = False

    def encode(self, change, spec, keys):
        places = (change.abs() > self.bound).nonzero().flatten()
        return torch.cat([places.int().view(torch.uint8), change[places].view(torch.uint8)])

    def decode(self, message, spec):
        count = len(message) // (4 + spec.dtype.itemsize)
        places = message[: 4 * count].clone().view(torch.int32).long()
        values = message[4 * count :].clone().view(spec.dtype)
        return values.new_zeros(spec.count).index_copy_(0, places, values)


def noted(kind: type) -> type:
    """Return an engine that records the costs of clients and the jobs that it receives."""

    class Noted(kind):
        def __post_init__(self):
            super().__post_init__()
            self.costs, self.trained = {}, []

        def train(self, federation, server, jobs, fold):
            outcome = super().train(federation, server, jobs, fold)
            self.costs[server.round] = outcome.costs
            self.trained.append((server.round, sorted({job.client.id for job in jobs})))
            return outcome

    return Noted


def without(kind: type, late: set[tuple[int, int]]) -> type:
    """Return an engine in which some clients of some rounds are absent."""

    class Without(kind):
        def train(self, federation, server, jobs: Sequence[Job], fold):
            there = [job for job in jobs if (job.round, job.client.id) not in late]
            return super().train(federation, server, there, fold)

    return Without


def late_of(run: fq.Run) -> set[tuple[int, int]]:
    return {(record.round - 1, id) for record in run.records for id in record.late}


def with_deadline(link: fq.Link, deadline: float) -> fq.Link:
    return replace(link, clock=replace(link.clock, deadline=deadline))


class Case:
    """Runs of one method over one link. Half of the first round's clients miss the deadline."""

    def __init__(self, method, family, data, fleet, link, play, engines=tuple(LOCAL)):
        self.parts, self.fleet, self.play = (method, family, data), fleet, play
        first = noted(Sequential)(data, precision="fp64")
        self.run(first, link, rounds=1)
        times = sorted(link.clock.times(first.costs[0], method.wire_factor).values())
        middle = len(times) // 2
        self.plain, self.link = link, with_deadline(link, (times[middle - 1] + times[middle]) / 2)
        self.runs = {name: self.run(name, self.link) for name in engines}

    def run(self, engine, link, rounds=3):
        return self.play(*self.parts, fleet=self.fleet, engine=engine, link=link, rounds=rounds)

    def check(self) -> None:
        """Check that late clients are the same on every engine, and count as absent."""
        truth, *others = self.runs.values()
        assert 0 < len(truth.records[0].late) < truth.records[0].clients
        for other in others:
            assert_same(truth, other)
            assert [one.link_seconds for one in other.records] == [
                one.link_seconds for one in truth.records
            ]
        for name, run in self.runs.items():
            if name not in LOCAL:
                continue
            engine = without(LOCAL[name], late_of(run))(self.parts[2], precision="fp64")
            absent = self.run(engine, self.plain)
            assert_same_state(run, absent)
            for mine, theirs in zip(run.records, absent.records, strict=True):
                assert (mine.bytes_up, mine.clients) == (theirs.bytes_up, theirs.clients)
                assert mine.bytes_down > theirs.bytes_down or not mine.late or not mine.bytes_down
                assert mine.macs > theirs.macs or not mine.late
                assert mine.loss == pytest.approx(theirs.loss, abs=1e-9)
                assert mine.link_seconds == (
                    self.link.deadline if mine.late else theirs.link_seconds
                )
                assert_same_grades(mine, theirs)


@pytest.fixture
def case(residual, make_data, play):
    def case(name: str, link: fq.Link, family: fq.Family = residual, **options) -> Case:
        method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP).settled(3)
        data = make_data(family, RAGGED, labels=2)
        return Case(
            method, family, data, fq.Fleet.of(SHARES, 6, 5, dynamic=True), link, play, **options
        )

    return case


QUICK = (("splitmix", "clock"), ("scaffold", "everything"))  # Several nets, and state on clients.


@pytest.mark.parametrize(
    ("name", "link"),
    [
        pytest.param(name, link, marks=() if (name, link) in QUICK else pytest.mark.slow)
        for name in CUTTING
        for link in LINKS
    ],
)
def test_a_late_client_counts_as_absent(name, link, case):
    case(name, LINKS[link]).check()


@pytest.mark.slow
@pytest.mark.parametrize("transfer", [False, True], ids=["drawn", "downloaded once"])
def test_a_late_client_has_no_private_net_yet(transfer, make_data, play):
    """A net that is downloaded once is downloaded again by a client that was late."""
    family = plain_pairs()
    method = RaFL(local=fq.LocalTraining(batch_size=4, optimizer=SHARP), transfer=transfer)
    data, fleet = make_data(family, RAGGED, labels=2, public=13), fq.Fleet.of(limits(family), 6, 6)
    case = Case(method, family, data, fleet, LINKS["clock"], play)
    case.check()
    run = case.runs["sequential"]
    assert {client for client, _ in run.server.memory} == set(range(6)) - set(run.records[0].late)
    assert [record.bytes_first > 0 for record in run.records] == [transfer] * 3


def test_a_client_whose_message_is_too_long_is_found_after_it_has_trained(case):
    """The round is then trained again without it, also if an engine sums updates of a stack."""
    link = fq.Link(codec=Threshold(), clock=replace(CLOCK, down=1e12, compute=0.0))
    long = case("heterofl", link)
    long.check()
    engine = noted(Sequential)(long.parts[2], precision="fp64")
    run = long.run(engine, long.link)
    cohort = run.fleet.draw_cohort(0, 0)
    on_time = sorted(set(cohort) - set(run.records[0].late))
    assert [clients for round, clients in engine.trained if round == 0] == [cohort, on_time]


@pytest.mark.parametrize("link", LINKS)
def test_clients_that_are_known_to_be_late_are_not_trained(link, case):
    known = case("fedrolex", LINKS[link], engines=("sequential",))
    engine = noted(Sequential)(known.parts[2], precision="fp64")
    run = known.run(engine, known.link)
    for round, record in enumerate(run.records):
        on_time = sorted(set(run.fleet.draw_cohort(round, 0)) - set(record.late))
        assert [clients for when, clients in engine.trained if when == round] == [on_time]


@pytest.mark.parametrize(
    ("name", "link"),
    [("splitmix", "clock"), ("scaffold", "everything"), ("fedbn", "clock"), ("fednova", "clock")],
)
def test_costs_are_foreseen_exactly(name, link, residual, make_data, play):
    """In the second round, a codec sends changes against what clients received in the first."""
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data = make_data(residual, RAGGED, labels=2)
    fleet = fq.Fleet.of(SHARES, 6, 5, dynamic=True)

    class Foreseeing(Sequential):
        def train(self, federation, server, jobs, fold):
            foreseen = self.foreseen(federation, server, jobs)
            outcome = super().train(federation, server, jobs, fold)
            assert foreseen == outcome.costs
            return outcome

    run = play(
        method,
        residual,
        data,
        fleet=fleet,
        engine=Foreseeing(data, precision="fp64"),
        link=LINKS[link],
    )
    assert run.records[1].bytes_up > 0


@pytest.mark.parametrize("name", ["fedrolex", pytest.param("splitmix", marks=pytest.mark.slow)])
@pytest.mark.parametrize("engine", LOCAL)
def test_a_deadline_that_nobody_misses_changes_nothing(engine, name, residual, make_data, play):
    """Bit for bit, over a link that loses and codes."""
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data, fleet = make_data(residual, RAGGED, labels=2), fq.Fleet.of(SHARES, 6, 5, dynamic=True)
    plain, timed = (
        play(
            method,
            residual,
            data,
            fleet=fleet,
            engine=engine,
            link=link,
            evaluation=fq.Evaluation(every=1),
        )
        for link in (LINKS["everything"], with_deadline(LINKS["everything"], 1e6))
    )
    assert_same_state(plain, timed, atol=0)
    for record, other in zip(plain.history, timed.history, strict=True):
        assert other.pop("late") == 0
        assert other.pop("late_clients") == []
        assert {**record, "seconds": 0} == {**other, "seconds": 0}
