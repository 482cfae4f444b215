"""FedDF (Lin et al. 2020): teacher, students, one step of the server, and its reductions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import FedAvg, FedDF
from fedquilt.round.learning import learn
from fedquilt.round.teachers import OUTPUTS
from fedquilt.round.training.distillation import Imitation
from fedquilt.round.training.server import ServerTraining
from tests.papers.distilling import (
    LOCAL,
    NUM_PUBLIC,
    ONE_STEP,
    SILENT,
    SIZES,
    expected_in,
    folded,
    in_scope,
    kl,
    merged_server,
    plain_outputs,
    received,
    start,
    stepped,
    value_of,
)


def test_feddfs_teacher_is_the_mean_of_the_logits_of_all_received_nets(perceptron, make_data):
    """Every net counts once, whatever its prototype and its number of samples."""
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run)
    logits = torch.stack(
        [plain_outputs(perceptron, update, run.world.public) for update in updates]
    )
    outputs = folded(run, updates).outputs[OUTPUTS]
    assert outputs.shape == (NUM_PUBLIC, 3)
    torch.testing.assert_close(outputs, logits.mean(0), rtol=0, atol=1e-12)

    by_data = torch.tensordot(torch.tensor([8.0, 4.0, 12.0]).double() / 24, logits, 1)
    by_prototype = (logits[0] + logits[1:].mean(0)) / 2
    assert not any(torch.allclose(outputs, other, atol=1e-2) for other in (by_data, by_prototype))


@pytest.mark.parametrize(("norm", "training"), [("batch", True), ("tracked", False)])
def test_norms_of_teachers_use_the_batch_unless_statistics_are_tracked(
    norm, training, residual, make_data
):
    method = FedDF(local=replace(LOCAL, norm=norm), prototypes=(1.0, 0.5))
    run = start(method, residual, make_data(residual, SIZES, public=NUM_PUBLIC))
    (update, *_) = received(run)
    (payload,) = update.sent
    own = in_scope(run.server.weights, "share1/")
    module = residual.assemble(payload.submodel, own | dict(payload.weights)).train(training)
    with torch.no_grad():
        expected = module(run.world.public)
    torch.testing.assert_close(folded(run, [update]).outputs[OUTPUTS], expected, rtol=0, atol=1e-9)


def test_a_student_starts_from_the_data_weighted_mean_of_its_own_group(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run)
    whole, small, other = (dict(update.sent[0].weights) for update in updates)
    weights = folded(run, updates).weights
    for name, value in whole.items():
        torch.testing.assert_close(weights["share1/" + name], value, rtol=0, atol=1e-12)
        mean = (4 * small[name] + 12 * other[name]) / 16
        torch.testing.assert_close(weights["share0.5/" + name], mean, rtol=0, atol=1e-12)


def test_a_student_minimises_kl_of_the_teacher_to_the_student_and_not_the_reverse(
    perceptron, make_data
):
    teacher = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]).double()
    student = torch.tensor([[0.0, 1.0, 0.0], [-2.0, 1.0, 0.5]]).double()
    forward = reverse = 0.0
    for row, own in zip(teacher.tolist(), student.tolist(), strict=True):
        p, q = ([math.exp(z) / sum(map(math.exp, logits)) for z in logits] for logits in (row, own))
        forward += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 2
        reverse += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)) / 2
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    assert value_of(Imitation(), perceptron, inputs, teacher, student) == pytest.approx(
        forward, abs=1e-12
    )
    assert abs(forward - reverse) > 0.1


def test_one_step_of_the_server_is_one_of_sgd_on_kl(perceptron, make_data):
    method = FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=ONE_STEP)
    run = start(method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC))
    merged = folded(run, received(run))
    server, teacher = merged_server(run, merged), merged.outputs[OUTPUTS]
    after, learnt = learn(run.federation, server, merged, run.engine)
    rows, held = ONE_STEP.split(NUM_PUBLIC, run.world.seed)
    assert (len(rows), len(held)) == (7, 3)
    assert sorted([*rows.tolist(), *held.tolist()]) == list(range(NUM_PUBLIC))
    assert learnt.steps == 2  # One of each prototype
    for net in method.nets(run.world):
        expected = stepped(run, net, server.weights, rows, teacher, lr=0.1)
        before, now = (
            in_scope(weights, net.scope) for weights in (server.weights, expected_in(net, expected))
        )
        losses = [
            kl(teacher[held], perceptron.assemble(net, own)(run.world.public[held])).item()
            for own in (before, now)
        ]
        assert losses[1] < losses[0]  # So that the step is kept
        torch.testing.assert_close(in_scope(after.weights, net.scope), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["perceptron", "residual"], indirect=True)
def test_feddf_with_one_prototype_and_no_step_is_fedavg(family, make_data, play):
    """It then needs no public samples either."""
    data = make_data(family, SIZES, public=0)
    plain = play(FedAvg(local=LOCAL), family, data)
    run = play(FedDF(local=LOCAL, prototypes=(1.0,), server_training=SILENT), family, data)
    assert run.server.weights.keys() == {"share1/" + name for name in plain.server.weights}
    for name, value in plain.server.weights.items():
        assert torch.equal(run.server.weights["share1/" + name], value)
    for own, other in zip(run.records, plain.records, strict=True):
        assert (own.bytes_down, own.bytes_up, own.macs, own.loss) == (
            other.bytes_down,
            other.bytes_up,
            other.macs,
            other.loss,
        )


@pytest.mark.parametrize(
    "optimizer", [fq.optimizers.SGD(lr=0.5), fq.optimizers.Adam(lr=0.01)], ids=["sgd", "adam"]
)
def test_a_student_whose_teacher_is_itself_does_not_move(optimizer, perceptron, make_data, play):
    """With one client the mean of a group is the client's net, and so is the teacher."""
    data = make_data(perceptron, (9,), public=NUM_PUBLIC)
    how = ServerTraining(optimizer, batch_size=4, steps=12, check_every=3)
    runs = [
        play(FedDF(local=LOCAL, prototypes=(1.0,), server_training=one), perceptron, data)
        for one in (SILENT, how)
    ]
    assert runs[1].records[0].server_steps > 0
    still, learnt = (dict(run.server.weights) for run in runs)
    torch.testing.assert_close(learnt, still, rtol=0, atol=1e-9)
