"""DS-FL (Itahara et al. 2023): predictions that travel, and nets that stay on clients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedquilt as fq
from fedquilt.methods import DSFL
from fedquilt.methods.dsfl import PREDICTIONS, sharpened
from fedquilt.round.link import Arrival, Transmission
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.distillation import SoftLabels
from fedquilt.round.training.public import drawn_positions
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Job, Payload
from tests.papers.distilling import (
    LOCAL,
    MACS,
    NUM_PUBLIC,
    SIZES,
    entropy,
    in_scope,
    start,
    value_of,
)


def dsfl(**settings) -> DSFL:
    how = {
        "local": LOCAL,
        "prototypes": (1.0, 0.5),
        "server_training": ServerTraining(steps=4, check_every=2),
    }
    return DSFL(**{**how, **settings})


def test_sharpening_is_a_softmax_of_the_mean_over_t():
    mean = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]], dtype=torch.float64)
    found = sharpened(mean, 0.1)
    for row, probabilities in zip(mean.tolist(), found.tolist(), strict=True):
        powers = [math.exp(p / 0.1) for p in row]
        assert probabilities == pytest.approx([power / sum(powers) for power in powers], abs=1e-12)
    assert bool((entropy(found) < entropy(mean)).all())
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(sharpened(uniform, 0.1), uniform, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharpen", [True, False])
def test_the_global_predictions_are_the_sharpened_mean_of_the_clients_probabilities(
    sharpen, perceptron, make_data, play
):
    """Clients count alike, whatever their number of samples."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = play(dsfl(sharpen=sharpen), perceptron, data, shares=(1.0, 0.5), rounds=1)
    assert len(run.server.memory) == 4
    probabilities = []
    for memory in run.server.memory.values():
        with torch.no_grad():
            logits = perceptron.assemble(memory.submodel, memory.weights)(run.world.public)
        probabilities.append(logits.softmax(1))
    mean = torch.stack(probabilities).mean(0)
    expected = (mean / 0.1).softmax(1) if sharpen else mean
    found = run.server.extras[PREDICTIONS]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if sharpen:
        assert bool((entropy(found) < entropy(mean)).all())


def test_soft_labels_are_a_cross_entropy_and_a_row_of_zeros_has_no_effect(perceptron):
    logits = torch.tensor([[1.0, -1.0, 0.5], [3.0, 2.0, 1.0]], dtype=torch.float64)
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 0.0]], dtype=torch.float64)
    total = sum(math.exp(z) for z in (1.0, -1.0, 0.5))
    by_hand = -sum(
        p * math.log(math.exp(z) / total)
        for p, z in zip((0.7, 0.2, 0.1), (1.0, -1.0, 0.5), strict=True)
    )
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    assert value_of(SoftLabels(), perceptron, inputs, rows, logits) == pytest.approx(
        by_hand / 2, abs=1e-12
    )
    moved = torch.cat([logits[:1], -5 * logits[1:]])
    assert value_of(SoftLabels(), perceptron, inputs, rows, moved) == pytest.approx(
        by_hand / 2, abs=1e-12
    )


@pytest.mark.parametrize("samples", [0, 6], ids=["all", "drawn"])
def test_a_client_distils_the_global_predictions_before_it_trains_on_its_own_samples(
    samples, perceptron, make_data
):
    """Two rounds of one client in plain torch. In the first there is nothing to distil."""
    method = dsfl(prototypes=(1.0,), public_epochs=2, samples=samples)
    run = start(method, perceptron, make_data(perceptron, (9,), public=NUM_PUBLIC), (1.0,)).train(1)
    (memory,) = run.server.memory.values()
    rows = run.server.extras[PREDICTIONS]
    module = perceptron.assemble(memory.submodel, memory.weights)
    drawn = drawn_positions(run.world.seed, 0, samples, NUM_PUBLIC)
    assert len(drawn) == len(rows) == (samples or NUM_PUBLIC)
    public = run.world.public[drawn]
    with torch.no_grad():
        torch.testing.assert_close(
            rows, sharpened(module(public).softmax(1), 0.1), rtol=0, atol=1e-12
        )

    client = run.fleet.client(0, 1, run.world.seed, 9, 0)
    (net,) = method.plan(run.server, client, run.world)
    job = Job(client, net, 1)
    learner = method.learner(job, run.world)
    assert method.learner(replace(job, round=0), run.world).lesson is None

    def step(loss: Tensor) -> None:
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in module.parameters():
                weight -= 0.1 * weight.grad

    batches = itinerary(len(drawn), learner.lesson.local, run.engine.keys(job)[0])
    assert sorted(torch.cat(batches).tolist()) == sorted(2 * list(range(len(drawn))))
    for batch in batches:
        step(-(rows[batch] * module(public[batch]).log_softmax(1)).sum(1).mean())
    for batch in run.engine.batches(job, learner):
        step(F.cross_entropy(module(run.data.inputs[batch]), run.data.targets[batch]))
    run = run.train(2)
    assert run.server.round == 2
    (after,) = run.server.memory.values()
    expected = {name: value.detach() for name, value in module.named_parameters()}
    torch.testing.assert_close(dict(after.weights), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("samples", [0, 6])
def test_lessons_and_predictions_are_counted_in_macs(samples, perceptron, make_data, play):
    """A step costs three forward passes of each sample, and a prediction one."""
    method = dsfl(prototypes=(1.0,), public_epochs=2, samples=samples)
    run = play(method, perceptron, make_data(perceptron, (9,), public=NUM_PUBLIC))
    training, drawn = 3 * 9 * MACS[1.0], samples or NUM_PUBLIC
    predicting, lesson = drawn * MACS[1.0], 3 * 2 * drawn * MACS[1.0]
    assert [record.macs for record in run.records] == [
        training + predicting,
        training + predicting + lesson,
    ]


def test_every_round_draws_different_public_samples():
    draws = [drawn_positions(3, round, 6, NUM_PUBLIC).tolist() for round in range(5)]
    assert all(sorted(set(draw)) == draw and len(draw) == 6 for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 1
    assert draws[0] == drawn_positions(3, 0, 6, NUM_PUBLIC).tolist()
    for draw in (0, NUM_PUBLIC, 1000):
        assert drawn_positions(3, 0, draw, NUM_PUBLIC).tolist() == list(range(NUM_PUBLIC))


@dataclass(frozen=True)
class Recording(fq.Link):
    """A link without loss that remembers all payloads, with True for those to the server."""

    payloads: list[tuple[bool, Payload]] = field(default_factory=list, compare=False)

    def _carry(self, payload: Payload, trip: Transmission, *others) -> Arrival:
        self.payloads.append((trip.up, payload))
        return super()._carry(payload, trip, *others)


@pytest.mark.parametrize("family", ["perceptron", "residual"], indirect=True)
def test_nets_of_dsfl_stay_on_clients(family, make_data, play):
    link = Recording()
    data = make_data(family, SIZES, public=NUM_PUBLIC)
    play(dsfl(), family, data, shares=(1.0, 0.5), rounds=3, link=link)
    assert [up for up, _ in link.payloads].count(True) == 3 * 4
    assert [up for up, _ in link.payloads].count(False) == 3 * 4
    for _, payload in link.payloads:
        assert dict(payload.weights) == {}
        assert dict(payload.slots) == {}
        assert set(payload.extras) == {PREDICTIONS}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_of_dsfl_continues_from_its_own_net_bit_for_bit(engine, perceptron, make_data):
    """From the second round on the rate is too small to move a weight, so that a net that started
    from anything but
    its own state would differ from it.
    """
    method = dsfl(local=replace(LOCAL, schedule=fq.schedules.Steps((1,), 1e-300)))
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = start(method, perceptron, data, engine=engine, link=(link := Recording())).train(1)
    server_nets = {key: in_scope(run.server.weights, key[1]) for key in run.server.memory}
    kept = {
        key: {n: v.clone() for n, v in memory.weights.items()}
        for key, memory in run.server.memory.items()
    }
    assert sorted(client for client, _ in kept) == [0, 1, 2, 3]
    for (
        key,
        weights,
    ) in kept.items():  # A state of its own: neither the server's nor another client's
        assert not any(
            torch.equal(value, server_nets[key][name]) for name, value in weights.items()
        )
        for other, theirs in kept.items():
            assert (
                other == key
                or other[1] != key[1]
                or not torch.equal(weights["last.bias"], theirs["last.bias"])
            )

    run = run.train(3)
    assert run.server.round == 3
    for key, memory in run.server.memory.items():
        for name, value in memory.weights.items():
            assert torch.equal(value, kept[key][name])
    for _, payload in link.payloads:
        assert not payload.weights
        assert not payload.slots


def test_a_net_of_dsfl_can_be_deployed_from_its_client(perceptron, make_data):
    run = start(dsfl(), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)).train(2)
    for (client, _), memory in run.server.memory.items():
        module = run.deploy(fq.Budget(share=1.0), client=client)
        torch.testing.assert_close(
            module.state_dict(), dict(memory.weights), rtol=0, atol=0, check_dtype=False
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_predictions_cost_rows_times_classes_times_four_bytes_each_way(
    engine, perceptron, make_data, play
):
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    options = {"shares": (1.0, 0.5), "rounds": 3, "precision": "fp32", "engine": engine}
    for record in play(dsfl(), perceptron, data, **options).records:
        assert record.bytes_down == record.bytes_up == len(SIZES) * NUM_PUBLIC * 3 * 4
    for record in play(dsfl(samples=6), perceptron, data, **options).records:
        assert record.bytes_up == len(SIZES) * 6 * 3 * 4
        # The round of the draw is a number of 8 bytes.
        assert record.bytes_down == len(SIZES) * (6 * 3 * 4 + 8)
