"""`Run`: train, deploy and share engines, and errors in a round."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError, DivergenceError, FedquiltError, TrainingError
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, FedRolex, HeteroFL, LocalOnly
from fedquilt.round.client import send
from fedquilt.terms import Job, Payload
from tests.conftest import LOCAL, assert_same, assert_same_grades, with_local
from tests.unit.runs.nets import Theirs


def test_a_users_own_module_federates_in_under_fifteen_lines():
    family = fq.trace(Theirs, torch.zeros(2, 1, 8, 8))
    data = fq.data.digits().partition(10)
    fleet = fq.Fleet.of(shares=(1.0, 0.5, 0.25), num_clients=10, cohort=5)
    method = fq.methods.FedRolex(
        local=fq.LocalTraining(epochs=2, optimizer=fq.optimizers.SGD(lr=0.1))
    )
    run = fq.run(method, family, data, fleet, rounds=8, evaluation=fq.Evaluation(every=0))
    model = run.deploy(fq.Budget(share=0.5))
    assert model(data.test_inputs).shape == (len(data.test_inputs), 10)
    assert run.accuracy["1.0"] > 0.3  # of ten classes: it has learnt something
    assert run.records[-1].loss < run.records[0].loss


@pytest.mark.parametrize(
    "method", [FedAvg(), HeteroFL(), FedRolex(), LocalOnly()], ids=lambda m: type(m).__name__
)
def test_deploy_gives_a_plain_module(method, theirs, play, make_data):
    run = play(method, theirs, make_data(theirs, (6, 6)), (1.0, 0.5))
    model = run.deploy(fq.Budget(share=0.5), client=1 if method.personal else None)
    assert type(model) is Theirs
    assert not model.training
    kinds = {type(layer).__module__.split(".")[0] for layer in model.modules()}
    assert "fedquilt" not in kinds
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert not any("forward" in vars(layer) or layer._forward_hooks for layer in model.modules())
    assert model.conv.out_channels == model.norm.num_features == 4
    model.load_state_dict(model.state_dict())
    first = model(run.data.test_inputs).sum()
    first.backward()  # trainable as it is
    assert model.conv.weight.grad is not None


def test_results_on_clients_are_deployed_by_client(theirs, play, make_data):
    """Without a client, nothing was trained.

    With one, norm statistics are those of its own samples.
    """
    data = make_data(theirs, (6, 9))
    run = play(with_local(LocalOnly(), norm="post"), theirs, data)
    with pytest.raises(ConfigError, match=r"LocalOnly leaves its result on the clients.*client=0"):
        run.deploy(fq.Budget(share=1.0))
    with pytest.raises(ConfigError, match="client 2 was asked for; the fleet has 2, from 0 on"):
        run.deploy(fq.Budget(share=1.0), client=2)
    first, second = (run.deploy(fq.Budget(share=1.0), client=client) for client in (0, 1))
    first.norm.momentum = None  # a cumulative mean over one batch is that batch's
    own = theirs.module(theirs.whole).double()
    own.load_state_dict(first.state_dict())
    own.norm.reset_running_stats()
    own.norm.momentum = None
    own.train()(run.data.samples(run.data.parts[0]))
    torch.testing.assert_close(own.norm.running_mean, first.norm.running_mean)
    assert not torch.allclose(first.norm.running_mean, second.norm.running_mean)
    # the budget asked for, not the client's
    assert run.deploy(fq.Budget(share=0.5), client=0).conv.out_channels == 4


@pytest.mark.parametrize("engine", LOCAL)
def test_an_evaluation_that_fails_leaves_the_run(engine, theirs, play, make_data):
    data = make_data(theirs, (6, 6))
    # channels it cannot take
    broken = replace(data, test_inputs=data.test_inputs.repeat(1, 2, 1, 1))
    with pytest.raises(TrainingError, match="the evaluation failed: ") as e:
        play(FedAvg(), theirs, broken, engine=engine)
    assert e.value.run.server.round == 1  # two were asked for, and the last is evaluated


@pytest.mark.parametrize("norm", ["tracked", "post"])
@pytest.mark.parametrize("engine", LOCAL)
def test_a_deployed_module_scores_what_the_engine_reported(engine, norm, theirs, play, make_data):
    method = with_local(HeteroFL(), norm=norm, batch_size=4)
    run = play(method, theirs, make_data(theirs, (9, 7)), (1.0, 0.5), engine=engine)
    data = run.data
    for share in (1.0, 0.5):
        model = run.deploy(fq.Budget(share=share))
        hits = (model(data.test_inputs).argmax(1) == data.test_targets).double().mean()
        assert run.accuracy[str(share)] == pytest.approx(float(hits), abs=1e-12)


def test_a_deployed_modules_outputs_are_the_engines(theirs, play, make_data):
    run = play(
        with_local(HeteroFL(), norm="tracked"), theirs, make_data(theirs, (9, 7)), (1.0, 0.5)
    )
    world, inputs = run.world, run.data.test_inputs
    (submodel,) = run.method.deploy(run.server, fq.Budget(share=0.5), world)
    weights = theirs.cutter.gather(run.server.weights, submodel, tuple(run.server.weights))
    outputs, _ = theirs.member(submodel.arch).net(
        weights, inputs, fq.family.Pass(statistics="stored")
    )
    torch.testing.assert_close(
        run.deploy(fq.Budget(share=0.5))(inputs).detach(), outputs, rtol=0, atol=1e-12
    )


def test_deploying_does_not_disturb_the_run(theirs, play, make_data):
    run = play(FedAvg(), theirs, make_data(theirs, (6, 6)))
    before = {name: weight.clone() for name, weight in run.server.weights.items()}
    model = run.deploy(fq.Budget(share=1.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert all(torch.equal(run.server.weights[name], before[name]) for name in before)


class Exploding:
    """A schedule whose learning rate is far too large after the first round."""

    def __call__(self, round: int) -> float:
        return 1.0 if round == 0 else 1e200


class Infinite:
    """A schedule with an infinite learning rate."""

    def __call__(self, round: int) -> float:
        return float("inf")


@pytest.mark.parametrize("engine", LOCAL)
def test_a_loss_that_is_not_a_number_names_client_and_round_and_keeps_the_last_good_state(
    engine, theirs, play, make_data
):
    data = make_data(theirs, (6, 6))
    method = with_local(FedAvg(), batch_size=2, norm="tracked")
    good = play(method, theirs, data, engine=engine, rounds=1)
    bad = with_local(method, schedule=Exploding())
    message = r"client [01] \(budget share 1\) had a loss of \S+ in round 2, step \d"
    with pytest.raises(DivergenceError, match=message) as e:
        play(bad, theirs, data, engine=engine, rounds=3)
    left = e.value.run
    assert left.server.round == 1
    assert len(left.records) == 1
    for name, weight in good.server.weights.items():
        assert torch.equal(left.server.weights[name], weight)
    assert type(left.deploy(fq.Budget(share=1.0))) is Theirs  # and it can be used


@pytest.mark.parametrize("engine", LOCAL)
def test_weights_that_are_not_finite_are_refused_even_if_the_loss_is_finite(
    engine, theirs, play, make_data
):
    """There is one step.

    The loss is measured before it, so that only the weights show its effect.
    """
    method = with_local(FedAvg(), optimizer=fq.optimizers.SGD(momentum=0.0), schedule=Infinite())
    with pytest.raises(
        DivergenceError,
        match=r"client \d .* weights that are not finite in round 1; they were refused",
    ):
        play(method, theirs, make_data(theirs, (4, 4)), engine=engine)


@pytest.mark.parametrize("engine", LOCAL)
def test_unusable_samples_are_named_as_the_cause_of_a_divergence(engine, theirs, play, make_data):
    data = make_data(theirs, (4, 5))
    inputs, targets = data.inputs.clone(), data.targets.clone()
    inputs[[5, 7], 0, 3, 2] = torch.tensor([torch.nan, torch.inf], dtype=torch.float64)
    targets[4:] = -100
    kept = "; the server's state is that of the round before"
    with pytest.raises(
        TrainingError, match=f"client 1 .* 2 of its 5 samples hold values that are not finite{kept}"
    ):
        play(FedAvg(), theirs, replace(data, inputs=inputs), engine=engine)
    with pytest.raises(
        TrainingError, match=f"client 1 .* It has no target that counts: all are -100{kept}"
    ):
        play(FedAvg(), theirs, replace(data, targets=targets), engine=engine)


class Picky(nn.Module):
    """A net that fails on some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 3:
            raise ValueError("three is too many")
        return self.last(torch.relu(self.first(x)))


@pytest.mark.parametrize("engine", LOCAL)
def test_an_error_of_a_users_module_names_client_round_and_stage(engine, play, make_data):
    family = fq.trace(Picky, torch.zeros(2, 4))
    with pytest.raises(
        TrainingError,
        match=r"client 1 .* failed in round 1 while training: ValueError: three is too many",
    ) as e:
        play(FedAvg(), family, make_data(family, (4, 3)), engine=engine)
    assert isinstance(e.value.__cause__, ValueError)
    assert e.value.run.server.round == 0
    assert isinstance(e.value, FedquiltError)


def test_a_share_may_be_named_without_a_budget(theirs, play, make_data, tmp_path):
    run = play(HeteroFL(), theirs, make_data(theirs, (4, 4)), rounds=1)
    half = run.deploy(share=0.5).state_dict()
    asked = run.deploy(fq.Budget(share=0.5)).state_dict()
    assert half.keys() == asked.keys()
    assert all(torch.equal(half[name], asked[name]) for name in half)
    whole = sum(weight.numel() for weight in run.deploy().parameters())
    assert run.export(tmp_path / "whole.safetensors").params == whole
    assert run.export(tmp_path / "half.safetensors", share=0.5).share == 0.5
    with pytest.raises(
        ConfigError, match=r"deploy was given share=0.5 and a budget \(share 1\); one of them"
    ):
        run.deploy(fq.Budget(share=1.0), share=0.5)


def test_local_settings_are_changed_by_name():
    method = HeteroFL().with_local(lr=0.2, epochs=3)
    assert method.local == replace(HeteroFL().local, optimizer=fq.optimizers.SGD(lr=0.2), epochs=3)
    adam = HeteroFL().with_local(optimizer=fq.optimizers.Adam(beta1=0.5), lr=0.2)
    assert adam.local.optimizer == fq.optimizers.Adam(lr=0.2, beta1=0.5)
    with pytest.raises(
        ConfigError, match=r"local training has no setting 'epoch'. Did you mean 'epochs'\?"
    ):
        HeteroFL().with_local(epoch=3)
    with pytest.raises(
        ConfigError,
        match=r"lr = '0.1' was asked for, which is text; it must be a number in \(0, inf\)",
    ):
        HeteroFL().with_local(lr="0.1")


def test_a_net_larger_than_the_budget_is_not_deployed(theirs, play, make_data):
    run = play(fq.methods.FedBN(), theirs, make_data(theirs, (6, 6)))
    with pytest.raises(
        BudgetError,
        match=r"FedBN trains one common net, of [\d,]+ parameters; the budget share 0.25",
    ):
        run.deploy(fq.Budget(share=0.25), client=0)


def test_runs_may_share_an_engine_and_its_captured_graphs(perceptron, make_data):
    one, other = make_data(perceptron, (9, 8, 7)), make_data(perceptron, (5, 6, 4))
    fleet, method = fq.Fleet.of([1, 1 / 2], 3, 3), fq.methods.HeteroFL()
    first = fq.prepare(method, perceptron, one, fleet, precision="fp64")
    first.engine.record = True  # on a CPU a unit plays its steps as they come
    first.train(2)
    units = [id(unit) for units in first.engine.groups.idle.values() for unit in units]
    again = fq.prepare(method, perceptron, first.data, fleet, first.engine).train(2)
    assert [id(unit) for units in again.engine.groups.idle.values() for unit in units] == units
    assert_same(first, again, atol=0)
    moved = fq.prepare(method, perceptron, other, fleet, first.engine).train(2)
    assert not {id(unit) for units in moved.engine.groups.idle.values() for unit in units} & set(
        units
    )
    assert_same(fq.run(method, perceptron, other, fleet, rounds=2, precision="fp64"), moved)


def test_a_run_whose_engine_another_has_used_keeps_its_data_and_seed(residual, make_data):
    one, other = make_data(residual, (9, 8, 7)), make_data(residual, (5, 6, 4))
    fleet, method = fq.Fleet.of([1, 1 / 2], 3, 3), fq.methods.HeteroFL()
    first = fq.run(method, residual, one, fleet, rounds=1, precision="fp64")
    before = first.deploy(fq.Budget(share=0.5)).state_dict()
    fq.run(method, residual, other, fleet, first.engine, rounds=1, seed=7)
    torch.testing.assert_close(
        first.deploy(fq.Budget(share=0.5)).state_dict(), before, rtol=0, atol=0
    )
    assert_same(
        fq.run(method, residual, one, fleet, rounds=2, precision="fp64"), first.train(2), atol=0
    )


@pytest.mark.parametrize("engine", LOCAL)
def test_an_engine_serves_another_family_with_its_options(
    engine, perceptron, residual, make_data, play
):
    fleet, method = fq.Fleet.of([1], 2, 2), fq.methods.FedAvg()
    first = fq.prepare(
        method, perceptron, make_data(perceptron, (5, 6)), fleet, engine, precision="fp64"
    ).train(1)
    data, never = make_data(residual, (5, 6)), fq.Evaluation(every=0)
    run = fq.prepare(method, residual, data, fleet, first.engine, evaluation=never).train(2)
    assert run.world.precision == "fp64"
    torch.testing.assert_close(
        dict(run.server.weights),
        dict(play(method, residual, data, engine=engine).server.weights),
        rtol=0,
        atol=0,
    )


def test_samples_of_clients_outside_of_the_fleet_are_not_used(residual, make_data):
    """Norm statistics are measured over the fleet's own samples."""
    data, how = make_data(residual, (5, 6, 7)), fq.Evaluation(every=0)
    fleet = fq.Fleet.of((1.0, 0.5), 2, 2)
    alone = fq.FederatedData.of(
        (data.inputs[:11], data.targets[:11]),
        (data.test_inputs, data.test_targets),
        data.parts[:2],
        data.test_parts[:2],
    )
    runs = [
        fq.run(HeteroFL(), residual, some, fleet, "sequential", 1, evaluation=how)
        for some in (data, alone)
    ]
    assert runs[0].data.num_clients == 2
    assert_same_grades(runs[0].records[-1], runs[1].records[-1])
    for name, value in runs[0].deploy(fq.Budget(share=1.0)).state_dict().items():
        assert torch.equal(value, runs[1].deploy(fq.Budget(share=1.0)).state_dict()[name]), name


@pytest.mark.parametrize("engine", LOCAL)
def test_logits_may_be_more_precise_than_the_weights(engine, make_data, perceptron):
    class Precise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x))).double()

    family, data = fq.trace(Precise, torch.rand(2, 4)), make_data(perceptron, (6, 6))
    run = fq.run(FedAvg(), family, data, fq.Fleet.of((1.0,), 2, 2), engine, 1)
    assert all(value.dtype == torch.float32 for value in run.server.weights.values())


@pytest.mark.parametrize("engine", LOCAL)
def test_statistics_that_are_no_numbers_are_refused_too(engine, residual, make_data):
    data = make_data(residual, (8, 8, 8))
    inputs = data.inputs.float()
    inputs[data.parts[1]] *= 1e25
    method, fleet = with_local(FedAvg(), batch_size=4, norm="tracked"), fq.Fleet.of((1.0,), 3, 3)
    with pytest.raises(
        TrainingError, match=r"client 1 .* sent weights that are not finite in round 1"
    ):
        fq.run(method, residual, replace(data, inputs=inputs), fleet, engine, 2)


def test_weights_that_a_codec_returns_must_be_finite(perceptron, make_data):
    """A range larger than the largest number cannot be divided into steps."""
    fleet, link = fq.Fleet.of((1.0,), 1, 1), fq.Link(codec=fq.links.Codec(bits=8))
    run = fq.prepare(FedAvg(), perceptron, make_data(perceptron, (4,)), fleet, link=link)
    job = Job(fleet.client(0, 0, 0, 4), prefix(perceptron.whole), 0)
    wide = {name: torch.full_like(value, 2e38) for name, value in run.server.weights.items()}
    wide["last.bias"][0] = -2e38
    with pytest.raises(
        TrainingError, match=r"client 0 .* sent weights that are not finite in round 1"
    ):
        send(
            run.federation,
            job,
            Payload(job.submodel, wide),
            run.server.weights,
            None,
            run.federation.initial,
        )


def test_samples_that_are_not_finite_are_not_reported_as_a_lack_of_memory(perceptron, make_data):
    data = make_data(perceptron, (6, 6))
    data.inputs[0] = torch.nan
    family = fq.trace(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), data.example)
    with pytest.raises(TrainingError, match=r"nan|not finite|numbers"):
        fq.run(FedAvg(), family, data, fq.Fleet.of((1.0,), 2, 2), rounds=1)


def test_local_settings_that_are_not_named_are_unchanged():
    method = HeteroFL().with_local(epochs=2)
    assert method.local == replace(HeteroFL().local, epochs=2)
    assert method.local.scaler
