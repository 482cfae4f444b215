"""Parts that do not fit together are refused before the first round, or give a warning."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError, DataError, TraceError
from fedquilt.methods import FedAvg, FedDropout, FedRolex, HeteroFL, SplitMix
from tests.conftest import assert_same
from tests.unit.runs.nets import Theirs


def test_an_unusable_budget_is_refused_before_the_first_round_and_names_its_client(
    theirs, make_data
):
    fleet = fq.Fleet.of([fq.Budget(share=1.0), fq.Budget(params=3)], 4, 1)
    with pytest.raises(BudgetError, match="client 1: no member fits the budget params 3"):
        fq.prepare(FedAvg(), theirs, make_data(theirs, (4, 4, 4, 4)), fleet)


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_impossible_shares_are_refused(share):
    with pytest.raises(BudgetError, match=str(share)):
        fq.Fleet.of((1.0, share), 4)


def test_a_budget_that_no_member_fits_is_refused_before_training(theirs, make_data):
    fleet = fq.Fleet.of([fq.Budget(params=3)], 2, 2)
    with pytest.raises(BudgetError, match="no member fits the budget params 3"):
        fq.run(HeteroFL(), theirs, make_data(theirs, (4, 4)), fleet, rounds=1)


def test_a_client_without_data_is_named():
    x, y = torch.zeros(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(DataError, match="client 2 has no data"):
        fq.FederatedData.of((x, y), (x, y), [[0], [1, 2, 3], []])


def test_more_clients_than_parts_of_the_data_are_refused(theirs, make_data):
    with pytest.raises(
        ConfigError, match="the fleet has 5 clients, but data is partitioned among 2"
    ):
        fq.run(FedAvg(), theirs, make_data(theirs, (4, 4)), fq.Fleet.of((1.0,), 5))


def test_a_module_that_returns_a_tuple_is_refused_by_name():
    class Pair(Theirs):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return super().forward(x), x

    with pytest.raises(TraceError, match=r"tuple|one tensor"):
        fq.trace(Pair, torch.zeros(2, 1, 8, 8))


def partition(inputs: Tensor, targets: Tensor) -> fq.FederatedData:
    return fq.FederatedData.of((inputs, targets), (inputs, targets), [list(range(len(inputs)))])


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (
            torch.zeros(4, 1, 9, 8),
            torch.zeros(4, dtype=torch.int64),
            r"traced with inputs of shape \(1, 8, 8\)",
        ),
        (torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64), r"data has \(8,\)"),
        (
            torch.zeros(4, 1, 8, 8, dtype=torch.int32),
            torch.zeros(4, dtype=torch.int64),
            r"data has torch\.int64",
        ),
        (
            torch.zeros(4, 1, 8, 8),
            torch.full((4,), 10),
            "a target is 10; the output has 10 classes",
        ),
        (torch.zeros(4, 1, 8, 8), torch.zeros(4), "no task fits both"),
    ],
)
def test_data_that_does_not_fit_the_model_is_refused(inputs, targets, message, theirs):
    with pytest.raises(DataError, match=message):
        fq.prepare(FedAvg(), theirs, partition(inputs, targets), fq.Fleet.of((1.0,), 1))


def test_an_unknown_engine_gets_the_nearest_name(theirs, make_data):
    with pytest.raises(
        ConfigError, match=r"no engine named 'vectorised'\. It is called 'vectorized' now"
    ):
        fq.run(
            FedAvg(), theirs, make_data(theirs, (4,)), fq.Fleet.of((1.0,), 1), engine="vectorised"
        )


def test_an_unknown_preset_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"FedRolex has no preset 'relased'; known: paper, .*released-settings"
    ):
        FedRolex.preset("relased")


@pytest.mark.parametrize("wrong", [1.5, -1, "3", None, True])
def test_rounds_and_seeds_are_whole_numbers(wrong, theirs, play, make_data, tmp_path):
    data = make_data(theirs, (4, 4))
    for name in ("rounds", "seed"):
        with pytest.raises(
            ConfigError, match=rf"{name} = {wrong!r} was asked for; whole numbers from 0 on fit"
        ):
            play(FedAvg(), theirs, data, **{name: wrong}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    run = play(FedAvg(), theirs, data, rounds=0)
    with pytest.raises(
        ConfigError, match=rf"rounds = {wrong!r} was asked for; whole numbers from 0 on fit"
    ):
        run.train(wrong)


def test_seeds_beyond_what_torch_takes_are_refused(theirs, play, make_data):
    with pytest.raises(ConfigError, match=rf"seed = {1 << 80} was asked for; .* below 2\*\*63"):
        play(FedAvg(), theirs, make_data(theirs, (4, 4)), rounds=1, seed=1 << 80)


def test_rounds_and_seeds_of_numpy_are_python_s(theirs, play, make_data, tmp_path):
    data = make_data(theirs, (4, 4))
    run = play(FedAvg(), theirs, data, rounds=np.int64(1), seed=np.uint8(3), out=tmp_path / "run")
    assert_same(run, play(FedAvg(), theirs, data, rounds=1, seed=3), atol=0)


@pytest.mark.parametrize(
    ("slip", "message"),
    [
        (
            {"method": "fedavg"},
            r"run was given str 'fedavg' where a Method belongs, such as fq.methods.FedAvg\(\)",
        ),
        ({"method": FedAvg}, "run was given the class FedAvg where a Method belongs"),
        ({"family": Theirs()}, "run was given Theirs .* where a Family belongs, such as fq.trace"),
        ({"fleet": 3}, "run was given int '3' where a Fleet belongs"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused_with_an_example(slip, message, theirs, make_data):
    right = {
        "method": FedAvg(),
        "family": theirs,
        "data": make_data(theirs, (4, 4)),
        "fleet": fq.Fleet.of((1.0,), 2, 2),
    }
    with pytest.raises(ConfigError, match=message):
        fq.run(**right | slip)


def test_a_pool_must_be_partitioned_and_a_share_is_no_budget(theirs, play, make_data):
    data = make_data(theirs, (4, 4))
    with pytest.raises(
        ConfigError, match=r"Pool .* where a FederatedData belongs, such as pool.partition"
    ):
        fq.run(
            FedAvg(),
            theirs,
            fq.data.Pool.of((data.inputs, data.targets)),
            fq.Fleet.of((1.0,), 2, 2),
        )
    with pytest.raises(ConfigError, match=r"deploy was given float '0.25' where a Budget belongs"):
        play(FedAvg(), theirs, data).deploy(0.25)


def test_dual_norms_without_attacks_give_a_warning(make_data, caplog):
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    family, fleet = fq.trace(fq.dual(net), torch.rand(2, 4)), fq.Fleet.of((1.0,), 2, 2)
    data = make_data(family, (6, 6))
    data = replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())
    fq.prepare(
        FedAvg(local=fq.LocalTraining(adversarial=fq.attacks.AdversarialTraining())),
        family,
        data,
        fleet,
    )
    assert not caplog.text
    fq.prepare(FedAvg(), family, data, fleet)
    assert "FedAvg attacks nothing in training" in caplog.text


def test_a_budget_that_holds_no_base_net_is_refused_before_the_first_round(residual, make_data):
    fleet = fq.Fleet.mixed({0.5: 0.95, 0.1: 0.05}, 20, 1)
    with pytest.raises(BudgetError, match=r"client 19: the budget share 0\.1 was given"):
        fq.prepare(SplitMix(base=0.25), residual, make_data(residual, (4,) * 20), fleet)


def test_a_name_with_a_slash_is_refused():
    net = nn.Sequential()
    net.add_module("enc/1", nn.Linear(4, 3))
    with pytest.raises(
        TraceError, match=r"has a weight named 'enc/1.weight'; .* Name the layer without it"
    ):
        fq.trace(net, torch.zeros(2, 4))


@pytest.mark.parametrize("samples", [torch.float64, torch.float16])
@pytest.mark.parametrize("weights", [torch.float32, torch.float64, torch.bfloat16])
def test_samples_and_modules_of_any_precision_are_cast(samples, weights, perceptron, make_data):
    def net():
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).to(weights)

    data = make_data(perceptron, (6, 6))
    data = replace(data, inputs=data.inputs.to(samples), test_inputs=data.test_inputs.to(samples))
    run = fq.run(
        HeteroFL(), fq.trace(net, data.example), data, fq.Fleet.of((1.0, 0.5), 2, 2), rounds=1
    )
    assert run.accuracy
    assert (
        run.deploy(fq.Budget(share=0.5))(run.data.test_samples(torch.arange(3))).dtype
        == torch.float32
    )


def test_outputs_without_a_class_give_a_warning(caplog):
    samples = (torch.zeros(6, 4), torch.tensor([0, 1, 2, 0, 1, 2]))
    data = fq.FederatedData.of(samples, samples, [[0, 1, 2], [3, 4, 5]], name="mine")
    for outputs in (3, 5):
        assert not caplog.text
        family = fq.trace(lambda outputs=outputs: nn.Linear(4, outputs), torch.zeros(2, 4))
        fq.prepare(FedAvg(), family, data, fq.Fleet.of((1.0,), 2, 2))
    assert "the model has 5 outputs, and mine has 3 classes." in caplog.text


def test_a_share_of_less_than_one_channel_gives_a_warning(perceptron, make_data, caplog):
    data = make_data(perceptron, (6, 6))
    for shares in ((1.0, 0.5), (1.0, 0.0001)):
        assert "less than one channel" not in caplog.text
        fq.prepare(HeteroFL(), perceptron, data, fq.Fleet.of(shares, 2, 2))
    assert "a share of 0.0001 is less than one channel on " in caplog.text


@dataclass(frozen=True)
class Drawing(HeteroFL):
    """HeteroFL whose plan draws from a global generator, though it does not use the number."""

    draw: Callable[[], object] = random.random

    def plan(self, server, client, world):
        self.draw()
        return super().plan(server, client, world)


def test_a_plan_that_draws_from_a_global_generator_gives_a_warning(perceptron, make_data, caplog):
    data = make_data(perceptron, (6, 6))
    draws = {"torch": lambda: torch.rand(1), "NumPy": np.random.random, "Python": random.random}
    for method in (HeteroFL(), FedRolex(), SplitMix(), FedDropout()):
        fq.prepare(method, perceptron, data, fq.Fleet.of((1.0, 0.5), 2, 2))
    assert "global generator" not in caplog.text
    for library, draw in draws.items():
        fq.prepare(Drawing(draw=draw), perceptron, data, fq.Fleet.of((1.0, 0.5), 2, 2))
        assert f"Drawing.plan draws from {library}'s global generator." in caplog.text


@dataclass(frozen=True)
class Tempered(HeteroFL):
    temperature: float = 1.0
    steps: int = 1


def test_fields_of_another_type_are_refused(perceptron, make_data):
    data, fleet = make_data(perceptron, (6, 6)), fq.Fleet.of((1.0,), 2, 2)
    fq.prepare(Tempered(temperature=2, steps=np.int64(3)), perceptron, data, fleet)
    message = (
        r"Tempered: temperature = 'hot' was asked for; it must be a number. steps = 1.5 .* a "
        r"whole number"
    )
    with pytest.raises(ConfigError, match=message):
        fq.prepare(Tempered(temperature="hot", steps=1.5), perceptron, data, fleet)


def test_a_method_that_returns_no_state_is_refused(perceptron, make_data):
    class Stateless(FedAvg):
        def init(self, world):
            return None

    with pytest.raises(ConfigError, match=r"Stateless\.init returned nothing; a Server is needed"):
        fq.prepare(
            Stateless(), perceptron, make_data(perceptron, (6, 6)), fq.Fleet.of((1.0,), 2, 2)
        )


def test_a_model_that_cannot_be_cut_gives_a_warning_for_small_devices(make_data, caplog):
    family = fq.trace(lambda: nn.Linear(4, 3), torch.zeros(2, 4))
    data = make_data(family, (6, 6))
    fq.prepare(HeteroFL(), family, data, fq.Fleet.of((1.0,), 2, 2))
    assert not caplog.text
    fq.prepare(HeteroFL(), family, data, fq.Fleet.of((1.0, 0.25), 2, 2))
    assert (
        "nothing of the model can be cut: devices train the whole of it, also for share 0.25"
        in caplog.text
    )


def test_plans_are_checked_with_the_real_clients(perceptron, make_data):
    class Scarce(FedAvg):
        ignores_budgets = True

        def plan(self, server, client, world):
            assert client.size == 6
            return super().plan(server, client, world)

    fq.prepare(Scarce(), perceptron, make_data(perceptron, (6, 6)), fq.Fleet.of((1.0, 0.5), 2, 2))


def test_a_users_own_warnings_are_shown_once(perceptron, make_data):
    class Warns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("mine", stacklevel=1)
            return self.last(torch.relu(self.first(x)))

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        family = fq.trace(Warns, torch.rand(2, 4))
        shown.clear()
        fq.run(FedAvg(), family, make_data(perceptron, (6, 6)), fq.Fleet.of((1.0,), 2, 2), rounds=4)
    assert len([one for one in shown if str(one.message) == "mine"]) <= 2
