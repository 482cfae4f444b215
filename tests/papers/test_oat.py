"""Once-for-all adversarial training (Wang et al., NeurIPS 2020), FedAvg's way: λ drawn by sample,
FiLM after norms.
"""

from __future__ import annotations

import tomllib
from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.family.dual import ConditionedNorm, adjustables
from fedquilt.family.net import Pass
from fedquilt.methods import FedAvg, HeteroFL
from fedquilt.models import PreResNet
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Budget
from tests.conftest import LOCAL, assert_same, with_local
from tests.papers.test_splitmix_robust import NETS, by_hand, shaken

LAMBDAS = (0.0, 0.1, 0.2, 0.3, 0.4, 1.0)  # the paper's
OAT = fq.attacks.AdversarialTraining(LAMBDAS)


def _net() -> nn.Module:
    return PreResNet((1, 1), 4, 1, widths=(4, 8))


@cache
def _family() -> fq.Family:
    return fq.trace(fq.conditioned(_net, codes=8), torch.zeros(2, 1, 6, 6))


@pytest.fixture
def conditioned() -> fq.Family:
    return _family()


def images(make_data, family, sizes):
    data = make_data(family, sizes)
    return replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())


@pytest.mark.parametrize("kind", NETS)
def test_a_conditioned_net_starts_as_the_net_it_was(kind):
    x, module = torch.rand(4, 1, 6, 6), NETS[kind]().eval()
    made = fq.conditioned(module).eval()
    for robustness in (0, 0.3, 1):
        torch.testing.assert_close(fq.set_robustness(made, robustness)(x), module(x))
    moved = shaken(made)
    outputs = [fq.set_robustness(moved, robustness)(x) for robustness in (0, 1)]
    assert not torch.allclose(*outputs, atol=1e-3)


def test_every_sample_may_have_a_different_robustness(conditioned):
    """A row of a mixed batch is that of a batch at its λ."""
    for share in (1.0, 0.5):
        member = conditioned.fit(Budget(share=share))
        module = shaken(conditioned.module(member)).eval()
        weights = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        x, chosen = torch.rand(3, 1, 6, 6), torch.tensor([0.0, 0.4, 1.0])
        net = conditioned.member(member).net
        rows, _ = net(weights, x, Pass(statistics="stored"), condition=chosen)
        for place, robustness in enumerate(chosen.tolist()):
            torch.testing.assert_close(rows[place], fq.set_robustness(module, robustness)(x)[place])
        assert not any(
            isinstance(layer.robustness, torch.Tensor) for layer in adjustables(net.module)
        )


def test_conditioning_nets_are_cut_with_the_channels_they_scale(conditioned):
    axes = conditioned.axes
    layers = [name.removesuffix(".norm.weight") for name in axes if name.endswith(".norm.weight")]
    assert layers
    for layer in layers:
        for leaf in ("scale", "shift"):
            channels, hidden = axes[f"{layer}.{leaf}.2.weight"].split()
            assert channels == axes[f"{layer}.norm.weight"]
            assert axes[f"{layer}.{leaf}.0.weight"] == f"{hidden} 8"
    assert conditioned.conditioned
    assert not conditioned.dual


def test_the_loss_by_hand(conditioned, make_data):
    """(1 − λ)·CE(x | λ) + λ·CE(x + δ | λ), sample by sample; δ found through the net that is told
    λ.
    """
    local = LocalTraining(adversarial=OAT)
    learner = Learner((Phase(local.build_objective()),), local, 0.1)
    state = {name: value.double() for name, value in conditioned.init(0).items()}
    data, key = images(make_data, conditioned, (12,)), torch.tensor(5)
    batch = Batch(data.inputs, data.targets, torch.ones(4, dtype=torch.bool), key)
    moved = {
        name: value + 0.1 * noise.uniform(key + len(name), value.shape, value.dtype)
        for name, value in state.items()
    }
    grads, (loss, _) = gradient(
        learner,
        conditioned.member(conditioned.whole),
        local.build_objective(),
        moved,
        Received(moved),
        batch,
    )
    net = conditioned.module(conditioned.whole).double().train()
    net.load_state_dict(moved, strict=False)
    for layer in net.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.track_running_stats = False
    chosen = OAT.draw(noise.fold_in(key, -4), data.inputs)
    assert set(chosen.tolist()) <= set(LAMBDAS)
    for layer in adjustables(net):
        layer.robustness = chosen
    drawn = noise.uniform(noise.fold_in(key, -3), data.inputs.shape, data.inputs.dtype)
    attacked = by_hand(
        lambda x: F.cross_entropy(net(x), data.targets), data.inputs, drawn, fq.attacks.PGD()
    )
    clean, noised = (
        F.cross_entropy(net(x), data.targets, reduction="none") for x in (data.inputs, attacked)
    )
    expected = ((1 - chosen) * clean + chosen * noised).mean()
    torch.testing.assert_close(loss, expected.detach(), rtol=0, atol=1e-12)
    expected.backward()
    for name, leaf in net.named_parameters():
        torch.testing.assert_close(grads[name], leaf.grad, rtol=0, atol=1e-10)


def test_all_weights_are_drawn_as_often():
    like = torch.zeros(60_000, 1)
    drawn = OAT.draw(torch.tensor(3), like)
    for weight in LAMBDAS:
        assert float((drawn == torch.tensor(weight)).double().mean()) == pytest.approx(
            1 / 6, abs=0.01
        )


@pytest.mark.parametrize(
    "method",
    [
        pytest.param(FedAvg(), marks=pytest.mark.slow),
        with_local(HeteroFL(), norm="post"),
        pytest.param(with_local(HeteroFL(), norm="tracked"), marks=pytest.mark.slow),
    ],
    ids=("batch", "post", "tracked"),
)
def test_every_layout_gives_the_same_numbers(method, conditioned, make_data, play):
    method = with_local(method, batch_size=4, adversarial=OAT)
    data, fleet = images(make_data, conditioned, (7, 4, 9, 5)), fq.Fleet.of((1.0, 0.5), 4, 4)
    how = fq.Evaluation(every=0, robustness=(0, 0.4), batch_size=10, clients=2)
    truth = play(method, conditioned, data, fleet=fleet, evaluation=how, rounds=1)
    assert {"standard/0.0", "robust/0.4"} <= set(truth.records[-1].grades.metrics)
    for layout in ("auto", "stack", "alone"):
        run = fq.prepare(
            method, conditioned, data, fleet, "vectorized", precision="fp64", evaluation=how
        )
        run.engine.layout = layout
        assert_same(truth, run.train(1))


@pytest.mark.parametrize("engine", LOCAL)
def test_plain_training_of_a_conditioned_net_is_the_same_on_every_engine(
    engine, conditioned, make_data, play
):
    data = images(make_data, conditioned, (8, 8))
    method = with_local(FedAvg(), batch_size=4)
    assert_same(play(method, conditioned, data), play(method, conditioned, data, engine=engine))


def test_the_robustness_of_a_deployed_net_is_set(conditioned, make_data, play):
    method = with_local(
        FedAvg(), batch_size=4, adversarial=OAT, optimizer=fq.optimizers.SGD(lr=0.5)
    )
    run = play(method, conditioned, images(make_data, conditioned, (8, 8)))
    x = torch.rand(5, 1, 6, 6, dtype=torch.float64)
    module = run.deploy(Budget(share=0.5), robustness=1.0)
    assert not torch.allclose(module(x), fq.set_robustness(module, 0)(x))
    assert any(isinstance(layer, ConditionedNorm) for layer in module.modules())


def test_what_does_not_fit_is_refused(residual, conditioned):
    method = with_local(FedAvg(), adversarial=OAT)
    with pytest.raises(
        ConfigError, match=r"draw a weight for every sample.*model\.conditioned=true"
    ):
        method.init(World(residual))
    assert method.init(World(conditioned)).round == 0
    with pytest.raises(ConfigError, match="normalizes 3 dimensions at once"):
        fq.conditioned(nn.LayerNorm((1, 6, 6)))
    with pytest.raises(ConfigError, match="no weights to draw from"):
        fq.attacks.AdversarialTraining(())
    settings = {
        "method": {"name": "fedavg", "local": {"adversarial": {"weight": [0, 0.5, 1]}}},
        "model": {"name": "tiny_resnet", "conditioned": True},
        "data": "digits",
    }
    asked = Experiment.of(settings)
    assert asked.method.local.adversarial == fq.attacks.AdversarialTraining((0.0, 0.5, 1.0))
    assert Experiment.of(tomllib.loads(asked.to_toml())) == asked
    data, _ = asked.data.federate(2, 0)
    assert asked.model.trace(data).conditioned
    with pytest.raises(ConfigError, match="with dual and with conditioned norms"):
        Experiment.of(
            {**settings, "model": {"name": "tiny_resnet", "conditioned": True, "dual": True}}
        )
