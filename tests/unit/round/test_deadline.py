"""Deadlines of rounds: who is late by hand, what is recorded of them, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import pytest
import torch

import fedquilt as fq
from fedquilt.config.reading import read
from fedquilt.config.tables import Problem
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAdam, FedAvg, FedNova, HeteroFL
from fedquilt.round import Record
from fedquilt.round.link import BaseCodec
from fedquilt.round.link.coding import check_codec
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.round_log import encoded, parse
from fedquilt.runs.tracking import scalars
from fedquilt.studies.growth import total_cost
from tests.conftest import assert_same

SIZES = (5, 7, 9)
# of the perceptron in fp64, and of its training on one sample
BITS, MACS = (
    8 * 8 * 51,
    3 * (4 * 6 + 6 * 3),
)
CLOCK = fq.links.Clock(down=(1e3, 2e3, 4e3), up=5e2, latency=0.25, compute=(1e3, 5e2, 5e2))
# Seconds of each client: two latencies, download, upload and training.
SECONDS = tuple(
    0.5 + BITS / down + BITS / 5e2 + size * MACS / rate
    for down, size, rate in zip((1e3, 2e3, 4e3), SIZES, (1e3, 5e2, 5e2), strict=True)
)


def until(deadline: float | None) -> fq.Link:
    return fq.Link(clock=replace(CLOCK, deadline=deadline))


def test_the_hand_computed_times_decide_who_is_late(perceptron, make_data, play):
    """Clients take 10.9, 10.4 and 10.1 s. One that needs exactly the time until the deadline is not
    late.
    """
    assert list(SECONDS) == pytest.approx([10.922, 10.424, 10.112], abs=1e-3)
    data = make_data(perceptron, SIZES)
    cases = {11.0: (), SECONDS[0]: (), 10.5: (0,), SECONDS[1]: (0,), 10.2: (0, 1), 5.0: (0, 1, 2)}
    for deadline, late in cases.items():
        run = play(FedAvg(), perceptron, data, link=until(deadline), rounds=1)
        [record] = run.records
        assert record.late == late
        assert record.clients == 3
        assert record.link_seconds == pytest.approx(deadline if late else SECONDS[0])
        assert record.bytes_down == 3 * BITS // 8  # Late clients downloaded the model, and trained.
        assert record.macs == sum(SIZES) * MACS
        assert record.bytes_up == (3 - len(late)) * BITS // 8
        assert (run.history[0]["late"], run.history[0]["late_clients"]) == (len(late), list(late))
        assert run.summary["late"] == len(late)
        assert run.summary["link_seconds"] == record.link_seconds


def test_bytes_that_are_charged_twice_take_twice_the_time(perceptron, make_data, play):
    """FedNova's clients are charged for 3,264 bits each way twice."""
    run = play(FedNova(), perceptron, make_data(perceptron, SIZES), link=until(12.0), rounds=1)
    assert run.records[0].late == (0, 1, 2)
    doubled = [
        seconds + BITS / down + BITS / 5e2
        for seconds, down in zip(SECONDS, CLOCK.down, strict=True)
    ]
    run = play(
        FedNova(), perceptron, make_data(perceptron, SIZES), link=until(doubled[2]), rounds=1
    )
    assert run.records[0].late == (0, 1)


def test_nets_of_a_client_add_up(residual, make_data, play):
    """Split-Mix: two base nets of a client take longer than one, and both are dropped if they are
    late together.
    """
    method = fq.methods.SplitMix(base=0.5).with_local(batch_size=4)
    data = make_data(residual, (8, 8))
    slow = fq.Link(clock=fq.links.Clock(down=1e6, up=1e5))
    both, one = (
        play(method, residual, data, (share,), link=slow, rounds=1).records[0]
        for share in (1.0, 0.5)
    )
    assert both.link_seconds > one.link_seconds
    between = replace(slow.clock, deadline=(both.link_seconds + one.link_seconds) / 2)
    run = play(method, residual, data, (1.0, 0.5), link=fq.Link(clock=between), rounds=1)
    assert run.records[0].late == (0,)
    assert run.records[0].bytes_up == one.bytes_up // 2


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_round_of_late_clients_changes_nothing_and_warns_once(
    engine, perceptron, make_data, play, tmp_path, caplog
):
    """Moments of the server's optimizer stay, too. After a resume there is no second warning."""
    data, out = make_data(perceptron, SIZES), tmp_path / "run"
    options = {"engine": engine, "out": out, "resume": True}
    with caplog.at_level(logging.WARNING):
        run = play(FedAdam(), perceptron, data, link=until(5.0), rounds=2, **options)
        start = fq.prepare(FedAdam(), perceptron, data, run.fleet, engine, precision="fp64").server
        assert all(
            torch.equal(run.server.weights[name], weight) for name, weight in start.weights.items()
        )
        assert all(not values for values in run.server.slots.values())
        assert not run.server.memory
        message = (
            "all 3 clients of round 1 missed the deadline of 5 s, so that the model stays as it "
            "was. The fastest "
        )
        assert (
            message + "takes at least 10.1 s; a later deadline (link.clock.deadline) would let"
            in caplog.text
        )
        play(FedAdam(), perceptron, data, link=until(5.0), rounds=3, **options)
    assert caplog.text.count("missed the deadline") == 1
    records = parse((out / "rounds.jsonl").read_bytes()).records
    assert [(one.late, one.loss, one.bytes_up, one.link_seconds) for one in records] == [
        ((0, 1, 2), None, 0, 5.0)
    ] * 3


def test_a_run_with_late_clients_resumes(perceptron, make_data, play, tmp_path):
    """Clients that were never late keep their momentum, and the others have none."""
    data, method = make_data(perceptron, SIZES), FedAvg(local=fq.LocalTraining(keep_optimizer=True))
    link = until(SECONDS[1])
    every = {"link": link, "evaluation": fq.Evaluation(every=1)}
    whole = play(method, perceptron, data, rounds=4, **every)
    assert [record.late for record in whole.records] == [(0,)] * 4
    assert {client for client, _ in whole.server.memory} == {1, 2}
    for rounds in (1, 3, 4):
        stopped = play(
            method, perceptron, data, rounds=rounds, out=tmp_path / "run", resume=True, **every
        )
    assert_same(whole, stopped, atol=0)
    with pytest.raises(ConfigError, match=r"link\.clock\.deadline: 10\.424 there, 11\.0 here"):
        play(
            method, perceptron, data, link=until(11.0), rounds=5, out=tmp_path / "run", resume=True
        )


# --- records ------------------------------------------------------------------------------------


def test_without_a_deadline_records_do_not_mention_late_clients(perceptron, make_data, play):
    run = play(FedAvg(), perceptron, make_data(perceptron, SIZES), link=until(None), rounds=1)
    assert run.records[0].late is None
    assert not {"late", "late_clients"} & {*run.history[0], *run.summary, *scalars(run.records[0])}
    assert "late" not in run.per_client().to_dict()["clients"][0]


def test_records_of_late_clients_are_read_again():
    record = Record(1, 0.5, 3, 10, 0, 7, None, link_seconds=5.0, late=(0, 2))
    line, _ = encoded(record, "")
    [again] = parse(line).records
    assert again == record
    assert scalars(record)["late"] == 2
    damaged = {**record.to_dict(), "late_clients": ["a"]}
    assert parse(encoded(Record.from_dict(damaged), "")[0]).damage == ("line 1: late is ('a',)",)


def test_late_clients_are_counted_by_client(perceptron, make_data, play):
    """The work of late clients does not count. The two others reach half of the hidden channels."""
    data = make_data(perceptron, SIZES)
    shares = (1.0, 0.5, 0.5)
    plain, timed = (
        play(HeteroFL(), perceptron, data, shares, link=until(seconds)) for seconds in (None, 10.0)
    )
    assert [record.late for record in timed.records] == [(0,), (0,)]
    found = timed.per_client()
    assert [device.late for device in found.devices] == [2, 0, 0]
    assert found.to_dict()["spread"]["late"]["mean"] == pytest.approx(2 / 3)
    narrow = 3 * 4 + 3 + 3 * 3 + 3
    assert found.trained == {"": pytest.approx(narrow / 51)}
    assert plain.per_client().trained == {"": 1.0}


@pytest.mark.parametrize("deadline", [None, 10.5, 5.0])
def test_costs_foreseen_before_training_are_those_recorded(deadline, perceptron, make_data, play):
    data = make_data(perceptron, SIZES)
    run = play(FedAvg(), perceptron, data, link=until(deadline), rounds=2)
    spent = total_cost(run, 2)
    assert spent.down == sum(record.bytes_down for record in run.records)
    assert spent.up == sum(record.bytes_up for record in run.records)
    assert spent.macs == sum(record.macs for record in run.records)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("deadline", "message"),
    [
        (0.0, r"Clock: deadline = 0\.0 was asked for; it must lie in \(0, inf\)"),
        (-1.0, r"deadline = -1\.0 was asked for"),
        (float("nan"), r"deadline = nan was asked for"),
        (float("inf"), r"deadline = inf was asked for"),
        ("5", r"deadline = '5' was asked for, which is text; it must be a number"),
        (
            0.4,
            r"deadline = 0\.4 was asked for; two latencies take at least 0\.5 s, so that every "
            r"update would be late",
        ),
    ],
)
def test_impossible_deadlines_are_refused(deadline, message):
    with pytest.raises(ConfigError, match=message):
        replace(CLOCK, deadline=deadline)


def test_a_misplaced_deadline_is_refused_with_the_right_place():
    problems: list[Problem] = []
    read(fq.Link, {"deadline": 5.0}, "link", problems)
    (problem,) = problems
    assert problem.path == "link.deadline"
    assert problem.text.startswith("link has no such key.")
    assert problem.text.endswith("link.clock.deadline would work.")


def test_the_deadline_is_read_from_a_file_and_written_again():
    plain = {"method": "fedavg", "model": "tiny_resnet", "data": "digits"}
    experiment = Experiment.of({**plain, "link": {"clock": {"deadline": 5}}})
    assert experiment.link.deadline == 5.0
    assert "deadline = 5" in experiment.to_toml()
    assert "deadline" not in Experiment.of({**plain, "link": "mobile"}).to_toml()
    none = Experiment.of({**plain, "link": {"name": "mobile", "clock": {"deadline": "none"}}})
    assert none.link == fq.Link.preset("mobile")


def test_the_text_of_a_clock_has_its_deadline():
    assert str(until(12.5)).endswith("0.25 s each way, updates dropped after 12.5 s")


# --- codecs -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sparse(BaseCodec):
    """Send the values that are not zero. It claims that its messages are equally long."""

    has_fixed_length: bool = True

    def encode(self, change, spec, keys):
        places = change.nonzero().flatten()
        return torch.cat([places.int().view(torch.uint8), change[places].view(torch.uint8)])

    def decode(self, message, spec):
        count = len(message) // (4 + spec.dtype.itemsize)
        places = message[: 4 * count].clone().view(torch.int32).long()
        values = message[4 * count :].clone().view(spec.dtype)
        return values.new_zeros(spec.count).index_copy_(0, places, values)


def test_a_codec_that_claims_a_fixed_length_must_have_one(perceptron):
    world = fq.methods.api.World(perceptron)
    check_codec(Sparse(has_fixed_length=False), world, lossy=False)
    with pytest.raises(
        ConfigError,
        match=r"its has_fixed_length is True, .* 408 bytes .* of zero has 0; .* = False",
    ):
        check_codec(Sparse(), world, lossy=False)
    for codec in (fq.links.Codec(4), fq.links.Codec(keep=0.3), fq.links.Codec(8, 0.5, rotate=True)):
        check_codec(codec, world, lossy=True)
        assert fq.Link(codec=codec).has_fixed_length
    assert not fq.Link(codec=Sparse(False)).has_fixed_length
