"""Evaluation on devices, which send sums, against the sequential engine: fp64, 1e-9."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.deployment.in_process import InProcess
from fedquilt.engines.flower.evaluation import ServerSamples
from fedquilt.engines.sequential import Sequential
from fedquilt.errors import ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import METHODS, FedAvg, HeteroFL
from fedquilt.round.evaluate import evaluate
from fedquilt.round.norm_statistics import mean_statistics, measured
from fedquilt.round.record import Record
from fedquilt.round.wire import Message
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorFile
from tests.conftest import with_local
from tests.deployed import deployed, devices_of
from tests.engines.test_links import SHARP

SIZES = (8, 12, 8, 16)  # Multiples of the batch size, so that all batches are full
NOTHING = ServerSamples(test=False, calibration=False)
EVERY = fq.Evaluation(every=1, batch_size=4)
PERSONAL = ("fedbn", "local")


def local(name: str, **changes):
    return with_local(METHODS[name](), batch_size=4, optimizer=SHARP, **changes)


def played(method, family, data, play, samples=NOTHING, courier=None, **options):
    """Return a sequential run, and the same run whose devices evaluate."""
    options.setdefault("evaluation", EVERY)
    truth = play(method, family, data, **options)
    engine = deployed(truth, family, data, courier, server_samples=samples)
    other = play(method, family, data, engine=engine, **options)
    return truth, other


def assert_same_metrics(truth, other):
    for mine, theirs in zip(truth.records, other.records, strict=True):
        assert mine.grades.metrics
        for name, expected in mine.grades.metrics.items():
            assert theirs.grades.metrics[name] == pytest.approx(expected, abs=1e-9), name


# --- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PERSONAL, "fedavg", "dsfl"])
def test_devices_score_as_the_sequential_engine_does(name, residual, play, make_data):
    data = make_data(residual, SIZES, labels=3, tests=32)
    truth, other = played(local(name), residual, data, play, ServerSamples(test=False))
    assert_same_metrics(truth, other)
    assert other.records[-1].grades.report.attendance.replied == (0, 1, 2, 3)


@pytest.mark.parametrize("norm", ["per_client", "post-own", "per_client-all"])
def test_norms_of_clients_are_used_on_their_devices(norm, residual, play, make_data):
    data = make_data(residual, SIZES, labels=3, tests=32)
    method = local("fedavg", norm=norm)
    truth, other = played(method, residual, data, play)
    assert_same_metrics(truth, other)


def test_nets_of_clients_that_never_trained_are_tested_as_well(residual, play, make_data):
    data = make_data(residual, SIZES, labels=3, tests=32)
    fleet = fq.Fleet.of((1.0, 0.5), 4, cohort=1)
    for name in PERSONAL:
        truth, other = played(local(name), residual, data, play, fleet=fleet)
        assert_same_metrics(truth, other)
        assert len(other.records[-1].grades.report.attendance.replied) == 4


def test_clients_are_tested_although_the_server_has_samples(residual, play, make_data):
    data = make_data(residual, SIZES, labels=3, tests=32)
    truth, other = played(local("fedbn"), residual, data, play, ServerSamples())
    assert_same_metrics(truth, other)


def test_the_server_tests_its_nets_on_its_own_samples(residual, play, make_data):
    data = make_data(residual, SIZES, labels=3, tests=32)
    evaluation = replace(EVERY, per_client=False)
    truth, other = played(
        local("heterofl"), residual, data, play, ServerSamples(), evaluation=evaluation
    )
    assert_same_metrics(truth, other)
    assert other.records[-1].grades.report is None


def test_norm_statistics_of_devices_are_those_of_their_pooled_batches(residual, play, make_data):
    data = make_data(residual, SIZES, tests=32)
    run = play(HeteroFL(), residual, data, rounds=1)
    engine = deployed(run, residual, data, server_samples=NOTHING)
    net = prefix(residual.whole)
    weights = {name: run.server.weights[name] for name in run.server.weights}
    evaluator = engine.evaluating(run.server, run.fleet, 100)
    (statistics,) = evaluator.calibrate(run.federation, [(net, weights)], batch_size=4)

    pooled = [
        Sequential(device.data, precision="fp64") for device in engine.courier.devices.values()
    ]
    inputs = []
    for client in pooled:
        client.begin(run.federation)
        inputs.append(client.data.samples(client.pooled))
    expected = measured(residual, net, weights, torch.cat(inputs), 4)
    assert set(statistics) == set(expected) == set(residual.statistics)
    torch.testing.assert_close(statistics, expected, rtol=0, atol=1e-9)


def test_every_batch_counts_once_whatever_the_size_of_a_device(residual, play, make_data):
    data = make_data(residual, (5, 9, 3, 16), tests=32)
    run = play(HeteroFL(), residual, data, rounds=1)
    engine = deployed(run, residual, data, server_samples=NOTHING)
    net, weights = prefix(residual.whole), dict(run.server.weights)
    evaluator = engine.evaluating(run.server, run.fleet, 100)
    (statistics,) = evaluator.calibrate(run.federation, [(net, weights)], batch_size=4)
    sums, total = [], 0
    for client, batches in zip(range(4), (1, 2, 1, 4), strict=True):
        single = Sequential(engine.courier.devices[client].data, precision="fp64")
        (means,) = single.calibrate(run.federation, [(net, weights)], 4)
        sums.append({name: value * batches for name, value in means.items()})
        total += batches
    torch.testing.assert_close(statistics, mean_statistics(sums, total), rtol=0, atol=1e-9)


def test_an_attack_and_hidden_classes_travel_with_the_test(residual, play, make_data):
    data = make_data(residual, SIZES, labels=2, tests=32)
    attack = fq.attacks.PGD(eps=0.0, steps=2, low=-9.0, high=9.0)
    evaluation = replace(EVERY, robustness=(0.5,), attack=attack, absent="zero")
    method = local("heterofl", masked="client")
    truth, other = played(
        method, residual, data, play, ServerSamples(test=False), evaluation=evaluation
    )
    assert {"standard", "robust", "local_accuracy"} <= set(truth.metrics)
    assert_same_metrics(truth, other)


# --- who takes part -------------------------------------------------------------------------------


def trained(name, family, data, play, samples=NOTHING, rounds=1, shares=(1.0,), folder=None):
    """Return a sequential run, the same run on devices that was not evaluated yet, its courier."""
    fleet = fq.Fleet.of(shares, 4, cohort=4)
    method = local(name) if isinstance(name, str) else name
    truth = play(method, family, data, rounds=rounds, fleet=fleet, evaluation=EVERY)
    courier = InProcess(devices_of(family, data, folder))
    engine = deployed(truth, family, data, courier, server_samples=samples)
    settings = {"evaluation": fq.Evaluation(every=0), "precision": "fp64"}
    run = fq.prepare(method, family, data, fleet, engine, **settings)
    run.train(rounds)
    return truth, run, courier


def graded(run, **changes):
    how = replace(EVERY, **changes)
    return evaluate(run.federation, run.server, run.fleet, run.engine, how)


@pytest.fixture
def data(residual, make_data):
    return make_data(residual, SIZES, labels=3, tests=32)


def test_a_device_that_is_offline_is_left_out(residual, play, data):
    truth, run, courier = trained("fedbn", residual, data, play)
    courier.offline = {2}
    grades = graded(run)
    attendance = grades.report.attendance
    assert attendance.replied == (0, 1, 3)
    assert attendance.missing == {2: "the device is offline"}
    own = [device.accuracy_own_size for device in truth.per_client([0, 1, 3]).devices]
    assert grades.accuracy["1.0"] == pytest.approx(sum(own) / 3, abs=1e-9)


def test_a_device_whose_reply_is_lost_is_not_asked_again(residual, play, data):
    _, run, courier = trained("heterofl", residual, data, play)
    asked = []

    def lost(client, reply):
        asked.append(client)
        return [None] if client == 1 else [reply]

    courier.evaluation_faults = lost
    attendance = graded(run).report.attendance
    assert attendance.missing == {1: "the reply got lost"}
    assert asked.count(1) == 1
    assert asked.count(0) > 1


def test_without_any_device_nothing_is_scored_and_nothing_raises(residual, play, data):
    for name in ("fedbn", "heterofl"):
        _, run, courier = trained(name, residual, data, play)
        courier.offline = {0, 1, 2, 3}
        grades = graded(run)
        assert not grades.figures
        assert not grades.report or not grades.report.attendance.replied


def test_a_net_is_tested_by_the_devices_that_can_hold_it(residual, play, data):
    _, run, courier = trained("heterofl", residual, data, play, shares=(1.0, 0.5))
    asked: dict[int, list[str]] = {}

    def seen(client, reply):
        asked.setdefault(client, []).append(json.loads(reply.note)["counts"])
        return [reply]

    courier.evaluation_faults = seen
    grades = graded(run, per_client=False)
    assert set(grades.accuracy) == {"1.0", "0.5"}
    assert {client: len(counts[-1]) for client, counts in asked.items()} == {0: 2, 1: 1, 2: 2, 3: 1}


def test_a_net_that_nobody_can_calibrate_is_reported(residual, play, data, caplog):
    method = local("heterofl", norm="post")
    _, run, _ = trained(method, residual, data, play, shares=(0.5,))
    grades = graded(run)
    assert grades.report.uncalibrated == ("1.0",)
    assert set(grades.accuracy) == {"0.5"}
    graded(run)
    assert caplog.text.count("no device could measure the norm statistics") == 1
    record = replace(run.records[-1], grades=grades)
    assert Record.from_dict(json.loads(json.dumps(record.to_dict()))).grades == grades


def test_norms_that_nobody_can_measure_are_not_deployed(residual, play, data):
    method = local("heterofl", norm="post")
    _, run, courier = trained(method, residual, data, play)
    assert run.deploy(share=1.0)
    courier.offline = {0, 1, 2, 3}
    with pytest.raises(ConfigError, match="no device could measure the norm statistics"):
        run.deploy(share=1.0)


def test_a_metric_that_needs_outputs_is_refused(residual, play, data):
    task = fq.tasks.Classification(metrics=("accuracy", "auroc"))
    truth = play(FedAvg(), residual, data, rounds=1)
    for samples, method in ((NOTHING, FedAvg()), (ServerSamples(), local("fedbn"))):
        engine = deployed(truth, residual, data, server_samples=samples)
        with pytest.raises(ConfigError, match="does not let outputs leave a device"):
            play(method, residual, data, engine=engine, task=task)
    engine = deployed(truth, residual, data, server_samples=ServerSamples())
    assert "auroc" in play(FedAvg(), residual, data, engine=engine, task=task).metrics


def test_gradients_over_training_samples_need_a_server_with_samples(residual, play, data):
    _, run, _ = trained("heterofl", residual, data, play)
    evaluator = run.engine.evaluating(run.server, run.fleet, 100)
    with pytest.raises(ConfigError, match="devices do not send gradients"):
        evaluator.pooled_gradients(run.federation, [], 4, 8)


# --- state ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*PERSONAL, "scaffold"])
def test_an_evaluation_does_not_change_the_state_of_a_device(name, residual, play, data, tmp_path):
    _, run, _ = trained(name, residual, data, play, rounds=2, folder=tmp_path)

    def files():
        return {path: path.read_bytes() for path in tmp_path.rglob("round-*.safetensors")}

    before = files()
    assert len(before) == 8  # Two versions on each of four devices
    first = graded(run)
    assert graded(run).metrics == first.metrics
    assert files() == before


def test_a_device_evaluates_the_version_that_counted(residual, play, data):
    _, run, _ = trained("fedbn", residual, data, play)
    server, memory = run.server, dict(run.server.memory)
    expected = graded(run).metrics
    run.train(2)
    assert graded(run).metrics != expected
    run.server = replace(server, memory=memory)  # The second round did not count.
    assert graded(run).metrics == expected


def test_a_device_that_lost_its_state_says_so(residual, play, data):
    _, run, courier = trained("fedbn", residual, data, play)
    courier.devices[3].forget()
    attendance = graded(run).report.attendance
    assert attendance.failed == {3: "the state of round 1 is lost"}
    assert attendance.replied == (0, 1, 2)


# --- hostile replies ------------------------------------------------------------------------------


def forged(reply, note=None, tensors=None):
    """Return a reply with other values and a right checksum, as a hostile device would send it."""
    plain = {key: value for key, value in json.loads(reply.note).items() if key != "sha256"}
    plain |= (note or (lambda values: {}))(plain)
    values = TensorFile.of(reply.files[0], "reply").tensors(torch.device("cpu"))
    changed = values if tensors is None else tensors(values)
    return Message.of(plain, (b"".join(Blob.of(changed, None).chunks()),))


def changed(key, change):
    """Return a function that changes the tensors of a reply whose name ends with `key`."""

    def change_all(values):
        return {
            name: change(value.clone()) if name.endswith(key) else value
            for name, value in values.items()
        }

    return change_all


def counts(change):
    """Return a function that changes every count of a reply's note."""
    return lambda values: {"counts": [change(count) for count in values["counts"]]}


TENSORS = {
    "more correct than samples": (
        changed("accuracy", lambda v: torch.tensor([9, 8])),
        "9 hits of 8",
    ),
    "more targets than samples": (changed("accuracy", lambda v: v + 10_000), "0 to 8 would fit"),
    "negative": (changed("accuracy", lambda v: v - 10_000), "would fit"),
    "nan": (changed("loss", lambda v: v * math.nan), "not finite"),
    "infinite": (changed("loss", lambda v: v + math.inf), "not finite"),
    "huge": (changed("loss", lambda v: v + 1e40), "above 1e"),
    "foreign name": (lambda v: {**v, "0/outputs": torch.zeros(8, 4)}, "does not have"),
    "missing": (lambda v: {}, "it lacks"),
    "type": (changed("accuracy", lambda v: v.double()), "would fit"),
    "shape": (changed("loss", lambda v: torch.zeros(1 << 20, dtype=v.dtype)), "would fit"),
}
NOTES = {
    "too few counts": (lambda v: {"counts": v["counts"][1:]}, "counts and"),
    "count of nothing": (counts(lambda count: 0), "does not have"),
    "negative count": (counts(lambda count: -1), "whole numbers"),
    "huge count": (counts(lambda count: 1 << 60), "whole numbers"),
    "other round": (lambda v: {"round": 7}, "belongs to"),
    "other run": (lambda v: {"run": "other"}, "belongs to"),
    "other request": (lambda v: {"request": "0" * 64}, "belongs to"),
    "kind": (lambda v: {"kind": "reply"}, "it is no evaluation reply"),
}
HOSTILE = {
    **{name: ({"tensors": change}, reason) for name, (change, reason) in TENSORS.items()},
    **{name: ({"note": change}, reason) for name, (change, reason) in NOTES.items()},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_sums_are_refused_and_cost_nobody_else(name, residual, play, data):
    changes, reason = HOSTILE[name]
    truth, run, courier = trained("fedbn", residual, data, play)
    courier.evaluation_faults = lambda client, reply: [
        forged(reply, **changes) if client == 1 else reply
    ]
    grades = graded(run)
    attendance = grades.report.attendance
    assert attendance.replied == (0, 2, 3)
    assert set(attendance.refused) == {1}
    assert reason in attendance.refused[1]
    own = [device.accuracy_own_size for device in truth.per_client([0, 2, 3]).devices]
    assert grades.accuracy["1.0"] == pytest.approx(sum(own) / 3, abs=1e-9)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tensors": changed("running_var", lambda v: -v - 1)}, "variances below 0"),
        ({"tensors": changed("running_mean", lambda v: v * math.nan)}, "not finite"),
        ({"tensors": lambda v: {**v, "0/first.weight": torch.zeros(4)}}, "does not have"),
        ({"note": counts(lambda count: count + 1)}, "follow from the"),
    ],
)
def test_hostile_norm_statistics_are_refused(changes, reason, residual, play, data):
    _, run, courier = trained("heterofl", residual, data, play)
    courier.evaluation_faults = lambda client, reply: [
        forged(reply, **changes) if client == 1 else reply
    ]
    evaluator = run.engine.evaluating(run.server, run.fleet, 100)
    net = prefix(residual.whole)
    (statistics,) = evaluator.calibrate(run.federation, [(net, run.server.weights)], 4)
    attendance = evaluator.evaluation_report.attendance
    assert reason in attendance.refused[1]
    assert attendance.replied == (0, 2, 3)
    assert all(value.isfinite().all() for value in statistics.values())


def test_fuzzed_replies_are_never_accepted_and_never_raise(perceptron, play, make_data):
    data = make_data(perceptron, SIZES, labels=3, tests=32)
    _, run, courier = trained("heterofl", perceptron, data, play)
    draw = random.Random(3)

    def flipped(client, reply):
        note, file = bytearray(reply.note), bytearray(reply.files[0])
        part = note if draw.random() < 0.5 else file
        part[draw.randrange(len(part))] ^= 1 << draw.randrange(8)
        return [Message(bytes(note), (bytes(file),))]

    courier.evaluation_faults = flipped
    for _ in range(50):
        assert not graded(run).report.attendance.replied


def test_a_device_refuses_a_request_that_does_not_fit(residual, play, data):
    _, run, courier = trained("fedbn", residual, data, play)
    requests = []
    original = courier.devices[0].evaluate
    courier.devices[0].evaluate = lambda request: requests.append(request) or original(request)
    graded(run)
    request = requests[0]

    def answered(note=None, files=None):
        plain = {key: value for key, value in json.loads(request.note).items() if key != "sha256"}
        plain |= note or {}
        message = Message.of(plain, request.files if files is None else files)
        return json.loads(original(message).note)["failed"]

    task = json.loads(request.note)["tasks"][0]
    assert answered() == ""
    assert "names a file" in answered({"tasks": [{**task, "file": 5}]})
    assert "unknown weights" in answered({"tasks": [{**task, "source": "disk"}]})
    assert "the axes" in answered({"fingerprint": "other"})
    assert "expects 99 samples" in answered(
        {"client": {**json.loads(request.note)["client"], "size": 99}}
    )
    assert "precision" in answered({"precision": "fp4"})
    assert "is lost" in answered({"base": 5})
    assert "names the code" in answered({"settings": {"method": {"name": "mine.py:Mine"}}})
    empty = b"".join(Blob.of({}, None).chunks())
    assert "it lacks" in answered(files=(empty,))
    foreign = b"".join(Blob.of({"weights/else": torch.zeros(3)}, None).chunks())
    assert "does not have" in answered(files=(foreign,))
    assert "deadline" in answered({"deadline": -1.0})
