"""Fed-ET (Cho et al. 2022): the consensus of clients, and one step of the server."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedquilt as fq
from fedquilt.methods import FedDF, FedET
from fedquilt.methods.fedet import ConsensusLoss, consensus, consensus_weights
from fedquilt.round.learning import learn
from fedquilt.round.teachers import EACH
from fedquilt.round.training.server import ServerTraining
from tests.papers.distilling import (
    LOCAL,
    NUM_PUBLIC,
    ONE_STEP,
    SILENT,
    SIZES,
    folded,
    in_scope,
    merged_server,
    plain_outputs,
    received,
    start,
    value_of,
)

# Nets A, B and C. On the first sample C dissents with a small variance, on the second nobody does.
LOGITS = torch.tensor(
    [
        [[3.0, 0.0, 0.0], [0.0, 6.0, 0.0]],
        [[6.0, 0.0, 0.0], [0.0, 3.0, 0.0]],
        [[0.0, 0.0, 1.5], [1.0, 2.0, 0.0]],
    ],
    dtype=torch.float64,
)


# The variance of (a, 0, 0) is a²·2/9, and that of (1, 2, 0) is 2/3.
VARIANCES = [[2.0, 8.0, 0.5], [8.0, 2.0, 2 / 3]]


def test_consensus_weights_are_the_shares_of_the_variances_over_classes():
    found = consensus_weights(LOGITS)
    assert found.shape == (3, 2, 1)
    for sample, variances in enumerate(VARIANCES):
        expected = [one / sum(variances) for one in variances]
        assert found[:, sample, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_consensus_is_the_label_of_the_weighted_logits_and_the_mix_of_those_that_dissent():
    rows = consensus(LOGITS)
    assert rows.shape == (2, 2, 3)
    label, dissent = rows.unbind(1)
    # Σ α·s of the first sample: (2·3 + 8·6, 0, 0.5·1.5) / 10.5. Of the second the class 1 wins.
    assert label.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    total = 2 + math.exp(1.5)
    assert dissent[0].tolist() == pytest.approx(
        [1 / total, 1 / total, math.exp(1.5) / total], abs=1e-12
    )
    assert dissent[1].tolist() == [0.0, 0.0, 0.0]


def test_several_nets_that_dissent_are_mixed_by_their_variances():
    logits = torch.tensor(
        [[[0.0, 9.0, 0.0]], [[3.0, 0.0, 0.0]], [[0.0, 0.0, 1.5]]], dtype=torch.float64
    )
    label, dissent = consensus(logits, temperature=2.0).unbind(1)
    assert label.tolist() == [[0.0, 1.0, 0.0]]
    mixed = [2.0 / 2.5 * 3.0, 0.0, 0.5 / 2.5 * 1.5]
    powers = [math.exp(z / 2) for z in mixed]
    assert dissent[0].tolist() == pytest.approx([one / sum(powers) for one in powers], abs=1e-12)


def test_a_net_with_a_large_variance_outvotes_two_others():
    """A plain vote would give class 0."""
    logits = torch.tensor(
        [[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]], [[0.0, 8.0, 0.0]]], dtype=torch.float64
    )
    label, dissent = consensus(logits).unbind(1)
    assert label.tolist() == [[0.0, 1.0, 0.0]]
    assert float(dissent[0, 0]) > float(dissent[0, 1])


def test_nets_without_an_opinion_have_a_consensus_of_finite_numbers():
    rows = consensus(torch.zeros(3, 2, 3, dtype=torch.float64))
    assert bool(rows.isfinite().all())
    assert rows[:, 1].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("weight", "temperature"), [(0.05, 1.0), (0.7, 2.0), (0.0, 1.0)])
def test_the_consensus_loss_is_cross_entropy_plus_lambda_kl(weight, temperature, perceptron):
    rows = consensus(LOGITS, temperature)
    student = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -0.5]], dtype=torch.float64)
    log_q = [[z - math.log(sum(map(math.exp, row))) for z in row] for row in student.tolist()]
    agreement = -(log_q[0][0] + log_q[1][1]) / 2
    cooled = [z / temperature for z in student[0].tolist()]
    log_cooled = [z - math.log(sum(map(math.exp, cooled))) for z in cooled]
    powers = [math.exp(z / temperature) for z in (0.0, 0.0, 1.5)]
    p = [one / sum(powers) for one in powers]
    forward = sum(a * (math.log(a) - b) for a, b in zip(p, log_cooled, strict=True))
    reverse = sum(math.exp(b) * (b - math.log(a)) for a, b in zip(p, log_cooled, strict=True))
    assert abs(forward - reverse) > 1e-3
    objective = ConsensusLoss(weight, temperature)
    found = value_of(objective, perceptron, torch.zeros(2, 4, dtype=torch.float64), rows, student)
    assert found == pytest.approx(agreement + weight * forward / 2, abs=1e-12)


def test_one_step_of_fedets_server_is_one_of_sgd_on_the_consensus_loss(perceptron, make_data):
    method = FedET(local=LOCAL, prototypes=(0.5, 0.25), diversity=0.3, server_training=ONE_STEP)
    run = start(method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC))
    updates = received(run, (0.5, 0.25, 0.5))
    merged = folded(run, updates)
    logits = torch.stack(
        [plain_outputs(perceptron, update, run.world.public) for update in updates]
    )
    torch.testing.assert_close(merged.outputs[EACH], logits, rtol=0, atol=1e-12)
    label, dissent = consensus(logits).unbind(1)
    server = merged_server(run, merged)
    after, learnt = learn(run.federation, server, merged, run.engine)
    assert learnt.steps == 1
    rows, held = ONE_STEP.split(NUM_PUBLIC, run.world.seed)

    def loss(module: torch.nn.Module, chosen: Tensor) -> Tensor:
        log_q = module(run.world.public[chosen]).log_softmax(1)
        diversity = (
            (torch.xlogy(dissent[chosen], dissent[chosen]) - dissent[chosen] * log_q).sum(1).mean()
        )
        return F.nll_loss(log_q, label[chosen].argmax(1)) + 0.3 * diversity

    net = method.server_net(run.world)
    module = perceptron.assemble(net, in_scope(server.weights, net.scope))
    before = loss(module, held).item()
    loss(module, rows).backward()
    expected = {
        name: value.detach() - 0.1 * value.grad for name, value in module.named_parameters()
    }
    assert loss(perceptron.assemble(net, expected), held).item() < before
    torch.testing.assert_close(in_scope(after.weights, net.scope), expected, rtol=0, atol=1e-12)


def test_the_representation_is_sent_back_if_shapes_match(perceptron, make_data, play):
    """Prototypes of another width keep their own, and every net keeps its own output layer."""
    data, how = (
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        ServerTraining(steps=4, check_every=2),
    )
    settings = {"local": LOCAL, "prototypes": (1.0, 0.5)}
    options = {"shares": (1.0, 0.5), "rounds": 1}
    run = play(FedET(**settings, server_training=how), perceptron, data, **options)
    means = play(
        FedDF(**settings, server_training=SILENT), perceptron, data, **options
    ).server.weights
    weights = run.server.weights
    for name in ("first.weight", "first.bias"):
        assert torch.equal(weights["share1/" + name], weights["server/" + name])
        assert not torch.equal(weights["share1/" + name], means["share1/" + name])
    for name in ("last.weight", "last.bias"):
        assert not torch.equal(weights["share1/" + name], weights["server/" + name])
        assert torch.equal(weights["share1/" + name], means["share1/" + name])
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        assert torch.equal(weights["share0.5/" + name], means["share0.5/" + name])


def test_a_device_gets_the_servers_net_if_it_can_run_it(perceptron, make_data, play):
    run = play(
        FedET(local=LOCAL, prototypes=(0.5, 0.25), server_training=ONE_STEP),
        perceptron,
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        shares=(0.5, 0.25),
        rounds=1,
    )
    scopes = {
        share: [
            net.scope for net in run.method.deploy(run.server, fq.Budget(share=share), run.world)
        ]
        for share in (1.0, 0.5, 0.3)
    }
    assert scopes == {1.0: ["server/"], 0.5: ["share0.5/"], 0.3: ["share0.25/"]}
