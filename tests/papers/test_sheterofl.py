"""SHeteroFL (Hong et al., ICLR 2022): slimmable local training of every affordable width."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fedquilt as fq
from fedquilt.methods import SHeteroFL
from fedquilt.round.federation import World
from fedquilt.terms import Job, Server
from tests.conftest import assert_same, with_local

LR = 0.1
ONE_STEP = fq.LocalTraining(batch_size=8, optimizer=fq.optimizers.SGD(lr=LR, momentum=0.0))
WIDTHS = (1.0, 0.5, 1 / 3)  # six, three and two hidden units


def learner(method, family, share):
    client, world = fq.methods.api.Client(0, fq.Budget(share=share), 4), World(family)
    return method.learner(Job(client, method.plan(Server(0, {}), client, world)[0], 0), world)


def test_a_client_trains_its_own_width_and_every_prototype_below(perceptron):
    method = SHeteroFL(widths=WIDTHS)
    for share, below in {1.0: (0.5, 1 / 3), 0.5: (1 / 3,), 1 / 3: ()}.items():
        own = perceptron.member(perceptron.fit(fq.Budget(share=share)))
        nets = learner(method, perceptron, share).phases[0].objective.nets(own)
        assert nets == (own, *(own.nested(width) for width in below))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("share", WIDTHS)
def test_a_step_is_on_the_summed_gradients_of_the_widths(
    share, engine, perceptron, play, make_data
):
    data = make_data(perceptron, (6,))
    run = play(
        SHeteroFL(local=ONE_STEP, widths=WIDTHS),
        perceptron,
        data,
        (share,),
        engine=engine,
        rounds=1,
    )
    fresh = {name: value.double() for name, value in perceptron.init(0).items()}
    expected = {name: value.clone() for name, value in fresh.items()}
    # each width as a net of its own, in plain torch
    for width in (w for w in WIDTHS if w <= share):
        kept = round(6 * width)
        model = perceptron.module(perceptron.fit(fq.Budget(share=width)), fresh)
        F.cross_entropy(model(data.inputs), data.targets).backward()
        expected["first.weight"][:kept] -= LR * model.first.weight.grad
        expected["first.bias"][:kept] -= LR * model.first.bias.grad
        expected["last.weight"][:, :kept] -= LR * model.last.weight.grad
        expected["last.bias"] -= LR * model.last.bias.grad
    for name in fresh:
        torch.testing.assert_close(run.server.weights[name], expected[name], rtol=0, atol=1e-12)


def merged(method, perceptron, data, play, engine, shares=(1.0, 1 / 3)):
    """Two clients of the whole net and a part of it: what the server made of it, and what each
    trained.
    """
    run = play(method, perceptron, data, shares, engine=engine, rounds=1)
    alone = []
    for id in range(2):
        client = run.fleet.client(id, 0, 0, data.size(id))
        start = method.init(run.world)
        fold = method.fold(start, run.world)
        job = Job(client, method.plan(start, client, run.world)[0], 0)
        run.engine.train(run.federation, start, [job], fold)
        alone.append(fold.finish(start)[0]["first.bias"])
    return run.server.weights["first.bias"], *alone


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_counts_once_for_each_position(engine, perceptron, play, make_data):
    method = SHeteroFL(local=ONE_STEP, widths=WIDTHS)
    found, large, small = merged(method, perceptron, make_data(perceptron, (6, 5)), play, engine)
    torch.testing.assert_close(found[:2], (large[:2] + small[:2]) / 2, rtol=0, atol=1e-14)
    torch.testing.assert_close(found[2:], large[2:], rtol=0, atol=1e-14)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_released_code_counts_a_clients_widest_net_once_a_width(
    engine, perceptron, play, make_data
):
    """Wherever it has a position: 6 samples × 3 widths against 5 × 2."""
    method = SHeteroFL.preset("released", local=ONE_STEP, widths=WIDTHS)
    found, large, small = merged(
        method, perceptron, make_data(perceptron, (6, 5)), play, engine, (1.0, 0.5)
    )
    expected = (6 * 3 * large[:3] + 5 * 2 * small[:3]) / (6 * 3 + 5 * 2)
    torch.testing.assert_close(found[:3], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(found[3:], large[3:], rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "link",
    [fq.Link(), fq.Link(loss=fq.links.ColumnLoss(0.4)), fq.Link(codec=fq.links.Codec(bits=8))],
)
def test_weights_counted_once_per_width_are_sent_once(link, perceptron, play, make_data):
    data, sent = make_data(perceptron, (6, 5)), []
    for preset in ({}, {"count_widths": True}):
        method = SHeteroFL(local=ONE_STEP, widths=WIDTHS, **preset)
        runs = [
            play(method, perceptron, data, engine=name, link=link)
            for name in ("sequential", "vectorized")
        ]
        assert_same(*runs)
        sent.append([(record.bytes_down, record.bytes_up) for record in runs[0].records])
    assert sent[0] == sent[1]


def test_masked_training_masks_every_width(perceptron):
    masked = learner(with_local(SHeteroFL(widths=WIDTHS), masked="client"), perceptron, 1.0)
    assert [objective.by for objective in masked.phases[0].objective.objectives] == ["client"] * 3
    assert masked.class_rows
