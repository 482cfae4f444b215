"""Deployed models: within the budget for every method, with norms by a named policy."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedquilt as fq
from fedquilt.deploy.deploy import deployed, total_share
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import DSFL, FedAvg, FedBN, HeteroFL, LocalOnly, SplitMix
from tests.conftest import CUTTING, few_server_steps, with_local

ALL = [few_server_steps(kind()) for kind in CUTTING.values()]


@pytest.fixture(scope="module")
def family() -> fq.Family:
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 16, 4),
        )

    return fq.trace(net, torch.zeros(2, 1, 4, 4))


def macs(model: torch.nn.Module) -> int:
    with FlopCounterMode(display=False) as flops:
        model(torch.zeros(2, 1, 4, 4, dtype=torch.float64))
    return flops.get_total_flops() // 4


@pytest.mark.parametrize("method", ALL, ids=lambda method: type(method).__name__)
def test_every_method_stays_within_every_kind_of_budget(method, family, play, make_data):
    run = play(method, family, make_data(family, (6, 6)), (1.0, 0.5), rounds=1)
    cost, client = family.cost(family.fit(fq.Budget(share=0.5))), 0 if method.personal else None
    whole = isinstance(method, FedBN)  # each client's own, and none of them smaller
    cost = family.cost(family.whole) if whole else cost
    budgets = [
        fq.Budget(share=1.0 if whole else 0.5),
        fq.Budget(params=cost.params + 1),
        fq.Budget(macs=cost.macs + 1),
        fq.Budget(memory=cost.inference + 1),
        fq.Budget(share=1.0, params=cost.params),
    ]
    for budget in budgets:
        found = deployed(run, budget, client)
        model = run.deploy(budget, client)
        count = sum(weight.numel() for weight in model.parameters())
        assert count == found.cost.params <= (budget.params or float("inf"))
        assert macs(model) == found.cost.macs <= (budget.macs or float("inf"))
        assert found.cost.inference <= (budget.memory or float("inf"))
        if isinstance(method, SplitMix):  # biases of several nets add up to more than one's
            # and activations are needed once
            assert 0.25 <= found.share <= (0.75 if budget.memory else 0.5)
        else:
            assert found.share == (1.0 if whole else 0.5)
        one_by_one = torch.cat([model(sample[None]) for sample in run.data.test_inputs])
        # no sample sees another
        torch.testing.assert_close(one_by_one, model(run.data.test_inputs))


@pytest.mark.parametrize("share", [0.01, 0.5])
def test_a_share_below_one_channel_is_exceeded_with_a_warning(
    share, family, play, make_data, caplog
):
    run = play(HeteroFL(), family, make_data(family, (6, 6)), (1.0, 0.5), rounds=1)
    run.deploy(fq.Budget(share=share))
    told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    if share == 0.5:
        assert not told
    else:
        assert told[0].startswith(
            "a share of 0.01 was asked for; what is deployed has 0.125: every axis keeps at least"
        )


@pytest.mark.parametrize("method", [HeteroFL(), SplitMix(base=0.25)], ids=["heterofl", "splitmix"])
@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_share_of_groups_is_that_of_their_channels(
    method, share, play, make_data, caplog, tmp_path
):
    """Of four groups of eight channels all are kept, with fewer channels in each."""
    groups = fq.trace(_grouped, torch.zeros(2, 1, 8, 8))
    run = play(method, groups, make_data(groups, (4, 4)), (1.0, 0.5), rounds=1)
    found = run.export(tmp_path / "net.safetensors", fq.Budget(share=share))
    assert found.share == share
    assert not caplog.text


def _grouped() -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, 2, 1),
        torch.nn.GroupNorm(4, 32),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    )


def test_a_quarter_of_the_bundled_unet_is_a_quarter():
    model = fq.models.MODELS["unet2d"]
    family = fq.trace(model.factory, model.example())
    assert total_share(family, (prefix(family.fit(fq.Budget(share=0.25))),)) == 0.25


def test_a_method_that_hands_out_too_much_is_refused(family, play, make_data):
    @dataclass(frozen=True)
    class Generous(FedAvg):
        def deploy(self, server, budget, world):
            return (prefix(world.family.whole),)

    run = play(Generous(), family, make_data(family, (6, 6)), rounds=1)
    for budget, why in (
        (fq.Budget(share=0.5), "share 0.5: 4 channels of axis 'layer.0' allowed, 8 needed"),
        (fq.Budget(params=100), "params: 100 allowed, 612 needed"),
        (fq.Budget(macs=100), "macs: 100 allowed, 1,664 needed"),
        (fq.Budget(memory=2500), "memory of inference: 2,500 allowed, 3,"),
    ):
        with pytest.raises(
            BudgetError, match=f"Generous trains a net, of 612 parameters; the budget .*: {why}"
        ):
            run.deploy(budget)


def test_norms_by_name(family, play, make_data):
    data = make_data(family, (6, 6))
    run = play(with_local(HeteroFL(), norm="tracked"), family, data)
    tracked, post, batch = (
        run.deploy(fq.Budget(share=0.5), norms=norms) for norms in ("tracked", "post", "batch")
    )
    assert torch.equal(run.deploy(fq.Budget(share=0.5))[1].running_mean, tracked[1].running_mean)
    assert torch.equal(tracked[1].running_mean, run.server.weights["1.running_mean"][:4])
    assert not torch.allclose(tracked[1].running_mean, post[1].running_mean)
    assert batch[1].running_mean is None
    inputs = run.data.test_inputs
    # by the batch, though in evaluation
    torch.testing.assert_close(batch(inputs), post.train()(inputs))
    assert not torch.allclose(batch(inputs)[:4], batch(inputs[:4]))


def test_norms_are_measured_over_given_samples(family, play, make_data):
    run = play(HeteroFL(), family, make_data(family, (6, 6)))
    samples = torch.randn(20, 1, 4, 4) + 3
    model = run.deploy(fq.Budget(share=0.5), samples=samples)
    array = run.deploy(fq.Budget(share=0.5), samples=samples.numpy())
    assert torch.equal(array[1].running_mean, model[1].running_mean)
    own = model[0](samples.double())
    torch.testing.assert_close(model[1].running_mean, own.mean((0, 2, 3)))
    with pytest.raises(
        ConfigError, match=r"samples of shape \(20, 3, 4, 4\); the model takes two or more of shape"
    ):
        run.deploy(fq.Budget(share=0.5), samples=torch.zeros(20, 3, 4, 4))


def test_norms_that_cannot_be_had_are_refused(family, play, make_data):
    data = make_data(family, (6, 6))
    run = play(HeteroFL(), family, data)
    with pytest.raises(
        ConfigError, match="norms='tracked' was asked for; HeteroFL trained with norm = 'post'"
    ):
        run.deploy(fq.Budget(share=0.5), norms="tracked")
    with pytest.raises(
        ConfigError,
        match=r"norms='per_client' was asked for.*client=… of a run whose norms are local",
    ):
        run.deploy(fq.Budget(share=0.5), norms="per_client")
    with pytest.raises(
        ConfigError, match="norms='none' was asked for; it may be 'batch', 'tracked'"
    ):
        run.deploy(fq.Budget(share=0.5), norms="none")
    own = play(FedBN(), family, data)
    kept, fresh = (
        own.deploy(fq.Budget(share=1.0), client=1, norms=norms) for norms in (None, "post")
    )
    assert torch.equal(kept[1].running_mean, own.server.memory[1, ""].weights["1.running_mean"])
    assert not torch.allclose(kept[1].running_mean, fresh[1].running_mean)


def test_without_data_only_norms_that_need_none_are_deployed(family, play, make_data):
    run = play(HeteroFL(), family, make_data(family, (6, 6)))
    run.absent = "there is no such folder."
    with pytest.raises(
        ConfigError, match=r"which cannot be had: there is no such folder\.\n  Give samples"
    ):
        run.deploy(fq.Budget(share=0.5))
    assert run.deploy(fq.Budget(share=0.5), norms="batch")[1].running_mean is None
    assert (
        run.deploy(fq.Budget(share=0.5), samples=torch.randn(9, 1, 4, 4))[1].running_mean
        is not None
    )


def test_nets_that_are_averaged_add_up(family, play, make_data):
    run = play(SplitMix(base=0.25), family, make_data(family, (6, 6)), rounds=1)
    found = deployed(run, fq.Budget(share=0.75))
    one = family.cost(found.nets[0])
    assert len(found.nets) == 3
    assert found.share == 0.75
    assert (found.cost.macs, found.cost.memory) == (3 * one.macs, 3 * one.memory)
    assert found.cost.inference == 3 * one.bytes + one.activations  # they run one after another
    assert deployed(run, fq.Budget(params=2.5 * one.params)).share == 0.5


def test_a_clients_result_is_deployed_for_other_budgets_too(family, play, make_data):
    run = play(LocalOnly(), family, make_data(family, (6, 6)))
    half = run.deploy(fq.Budget(share=0.5), client=1)
    assert torch.equal(half[0].weight, run.server.memory[1, ""].weights["0.weight"][:4])


class Shifted(torch.nn.Module):
    """Begins with an operation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first, self.last = (
            torch.nn.BatchNorm1d(4),
            torch.nn.Linear(4, 8),
            torch.nn.Linear(8, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.first(self.norm(x.mul_(2)))))


def test_nets_that_change_their_input_in_place_get_copies(play, make_data, tmp_path):
    family = fq.trace(Shifted, torch.rand(2, 4))
    run = play(
        SplitMix(base=0.5, local=fq.LocalTraining(norm="post")),
        family,
        make_data(family, (6, 6)),
        rounds=0,
    )
    module, x = run.deploy(fq.Budget(share=1.0)), torch.rand(5, 4, dtype=torch.float64)
    seen = x.clone()
    assert torch.equal(module(x), torch.stack([net(seen.clone()) for net in module.nets]).mean(0))
    assert torch.equal(x, seen)
    run.deploy(fq.Budget(share=1.0), samples=x)
    assert torch.equal(x, seen)
    assert run.export(tmp_path / "model.safetensors", fq.Budget(share=0.5)).max_difference == 0


def test_a_client_that_is_none_is_refused(family, play, make_data):
    run = play(LocalOnly(), family, make_data(family, (6, 6)))
    for client in (2, -1, 0.5):
        with pytest.raises(ConfigError, match=f"client {client} was asked for; the fleet has 2"):
            run.deploy(fq.Budget(share=1.0), client=client)
    with pytest.raises(ConfigError, match="client=0 in Python, --client 0 on the command line"):
        run.deploy(fq.Budget(share=1.0))


def test_a_budget_above_a_clients_gives_its_own_size_and_a_warning(family, play, make_data, caplog):
    run = play(
        with_local(LocalOnly(), batch_size=4), family, make_data(family, (6, 6)), (1.0, 0.25)
    )
    run.deploy(fq.Budget(share=1.0), client=0)
    assert not caplog.text
    run.deploy(fq.Budget(share=1.0), client=1)
    assert (
        "a share 1 was asked for; client 1 holds a share 0.25, and has no more to give."
        in caplog.text
    )


def test_a_client_whose_budget_changes_keeps_its_trained_weights(family, make_data, caplog):
    """Not what it could hold in a round without it."""
    fleet, method = (
        fq.Fleet.of((1.0, 0.25), 4, 1, dynamic=True),
        with_local(LocalOnly(), batch_size=4),
    )
    run = fq.run(
        method,
        family,
        make_data(family, (6,) * 4),
        fleet,
        "sequential",
        6,
        evaluation=fq.Evaluation(every=0),
    )
    for client in {fleet.draw_cohort(round, 0)[0] for round in range(6)}:
        last = max(round for round in range(6) if fleet.draw_cohort(round, 0)[0] == client)
        held = fleet.budget(client, last, 0)
        caplog.clear()
        module = run.deploy(fq.Budget(share=1.0), client=client)
        assert module[0].out_channels == family.fit(held).widths[0][1]
        assert bool(caplog.text) == (held.share < 1)


def test_a_client_whose_budget_changes_keeps_the_prototype_that_it_trained_last(family, make_data):
    """ClientStates of prototypes have scopes. The budget is that of the round in which the client
    trained last.
    """
    fleet = fq.Fleet.of((1.0, 0.25), 4, 1, dynamic=True)
    method = few_server_steps(with_local(DSFL(prototypes=(1.0, 0.25)), batch_size=4))
    run = fq.run(
        method,
        family,
        make_data(family, (6,) * 4),
        fleet,
        "sequential",
        6,
        evaluation=fq.Evaluation(every=0),
    )
    is_other_than_last = set()
    for client in {fleet.draw_cohort(round, 0)[0] for round in range(6)}:
        last = max(round for round in range(6) if fleet.draw_cohort(round, 0)[0] == client)
        assert run.server.last(client) == last
        share = fleet.budget(client, last, 0).share
        is_other_than_last.add(share != fleet.budget(client, 5, 0).share)
        module = run.deploy(fq.Budget(share=1.0), client=client)
        assert torch.equal(
            module[0].weight, run.server.memory[client, f"share{share:g}/"].weights["0.weight"]
        )
    assert True in is_other_than_last


def test_methods_that_ignore_budgets_give_whole_nets_without_a_warning(
    family, play, make_data, caplog
):
    run = play(with_local(FedBN(), batch_size=4), family, make_data(family, (6, 6)), (1.0, 0.5))
    caplog.clear()  # training said how many devices cannot hold the net
    run.deploy(fq.Budget(share=1.0), client=1)
    assert not caplog.text


def test_nets_are_deployed_in_inference_mode_too(family, play, make_data):
    run = play(with_local(HeteroFL(), batch_size=4), family, make_data(family, (6, 6)))
    with torch.inference_mode():
        run.deploy(fq.Budget(share=0.25), norms="post", samples=torch.rand(4, 1, 4, 4))
