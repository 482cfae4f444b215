"""Measures that train nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import (
    FedAvg,
    FedDropout,
    FedNova,
    FedRolex,
    HeteroFL,
    ProgFed,
    RaFL,
    Scaffold,
    SplitMix,
)
from fedquilt.studies.measures import MEASURES
from tests.growing import growing
from tests.pairs import limits as pair_limits
from tests.pairs import plain_pairs


def small_net() -> nn.Module:
    """5 → 8 → 3: a member of w hidden units has 9·w + 3 parameters and 8·w multiply-adds."""
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def net():
    return fq.trace(small_net, torch.zeros(2, 5))


def prepared(method, family, make_data, shares, sizes=(6, 6), **more):
    fleet = fq.Fleet.of(shares, len(sizes), len(sizes))
    return fq.prepare(method, family, make_data(family, sizes), fleet, seed=0, **more)


def test_a_rolling_window_is_even_by_channel_and_not_by_entry(make_data):
    """After one turn of eight rounds: all channels alike, but those half an axis apart are never
    held together.
    """
    layers = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 3)
    family = fq.trace(lambda: nn.Sequential(*layers), torch.zeros(2, 1, 6, 6))
    rolling, random = (
        MEASURES["coverage"](prepared(method, family, make_data, (0.5,)), 8)
        for method in (FedRolex(), FedDropout())
    )
    assert rolling["weight"] == "1.weight"
    assert rolling["channel"] == {"least": 8, "mean": 8.0, "deviation": 0.0}
    assert random["channel"]["mean"] == 8
    assert random["channel"]["deviation"] > 0
    assert rolling["entry"]["least"] == 0
    assert rolling["entry"]["mean"] == random["entry"]["mean"] == 4
    assert rolling["entry"]["deviation"] > random["entry"]["deviation"]


def test_a_net_without_convolutions_has_no_coverage(net, make_data):
    with pytest.raises(ConfigError, match="it counts channels of a convolution"):
        MEASURES["coverage"](prepared(HeteroFL(), net, make_data, (0.5,)), 2)


def test_sizes_are_those_of_deployed_and_trained_models(net, make_data):
    found = MEASURES["sizes"](prepared(HeteroFL(), net, make_data, (1.0, 0.5)), 0)
    assert found["params"] == {"1.0": 75, "0.5": 39}
    assert found["macs"] == {"1.0": 64, "0.5": 32}
    assert found["clients"] == {"params": 57.0, "macs": 48.0, "bytes": 228.0}


def test_shares_that_are_evaluated_have_sizes_too(net, make_data):
    evaluation = fq.Evaluation(shares=(0.25,))
    found = MEASURES["sizes"](prepared(FedAvg(), net, make_data, (1.0,), evaluation=evaluation), 0)
    assert found["params"] == {"1.0": 75, "0.25": 21}


def test_a_mixture_has_the_sum_of_its_nets(net, make_data):
    """Four nets of two hidden units each in place of one of eight; a client of share 1/2 trains
    two.
    """
    method = SplitMix(base=0.25)
    found = MEASURES["sizes"](prepared(method, net, make_data, (1.0, 0.5)), 0)
    assert found["params"] == {"1.0": 4 * 21, "0.5": 2 * 21}
    assert found["macs"] == {"1.0": 4 * 16, "0.5": 2 * 16}
    assert found["clients"]["params"] == 3 * 21


def test_costs_of_clients_and_weights_trained_by_domains(net, make_data):
    """The client of share 1/2 has the first half of the hidden units, and so has its domain."""
    run = prepared(HeteroFL().with_local(masked="", batch_size=4), net, make_data, (1.0, 0.5))
    homes = torch.ones(len(run.data.targets), dtype=torch.int64)
    homes[run.data.parts[0]] = 0
    run.engine.data = replace(run.data, domains=homes, domain_names=("near", "far"))
    found = MEASURES["clients"](run, 2)
    assert found["params"] == {"mean": 2 * (75 + 39) / 2, "deviation": 75 - 39}  # both ways
    assert found["trained"] == {"near": 1.0, "far": 39 / 75}
    assert found["macs"]["mean"] == sum(device.macs for device in run.per_client().devices) / 2
    assert run.server.round == 0


def test_measures_of_a_model_that_grows(make_data):
    """Three stages of two rounds each. The last convolution is trained in the last stage alone."""
    family = growing()
    method = ProgFed(over=HeteroFL().with_local(masked=""), stage_rounds=2).settled(6)
    run = prepared(method, family, make_data, (1.0, 0.5))
    whole = family.count(family.whole)
    sizes = [MEASURES["sizes"](run, rounds) for rounds in (1, 6)]
    assert [found["params"]["1.0"] for found in sizes] == [
        family.count(family.at("stage1").whole),
        whole,
    ]
    covered = MEASURES["coverage"](run, 6)
    assert covered["weight"] == "third.conv.weight"
    # three of six channels in share 1/2
    assert covered["channel"] == {
        "least": 2,
        "mean": 3.0,
        "deviation": 1.0,
    }
    with pytest.raises(ConfigError, match=r"no client trains third\.conv\.weight in 4 rounds"):
        MEASURES["coverage"](run, 4)


@pytest.mark.parametrize(("rounds", "stages"), [(2, 1), (3, 2), (6, 3)])
def test_trained_weights_of_a_growing_model_are_counted(rounds, stages, make_data):
    """Blocks and heads of later stages have not been trained. Round 3 is a warm-up, which trains
    the new ones alone.
    """
    family = growing()
    method = ProgFed(over=FedAvg(), stage_rounds=2, warmup=1).settled(6)
    run = prepared(method, family, make_data, (1.0,))
    sizes = {name: run.server.weights[name].numel() for name in family.trainable}
    parts = [f"{kind}{stage}" for kind in ("stage", "head") for stage in range(1, stages + 1)]
    trained = sum(sizes.get(name, 0) for part in parts for name in family.parts[part])
    assert MEASURES["clients"](run, rounds)["trained"] == {"": trained / sum(sizes.values())}


# --- bytes and limits ---------------------------------------------------------------------------


def test_traffic_is_that_of_the_records(net, make_data):
    """Two clients of 6 samples get and send 75 parameters of 4 bytes, in each of three rounds."""
    run = prepared(FedAvg(), net, make_data, (1.0,))
    found = MEASURES["traffic"](run, 3)
    assert found == {
        "bytes_down": 1800,
        "bytes_up": 1800,
        "round_bytes": 1200,
        "params": 75,
        "macs": 64,
    }
    run.train(3)
    assert found["bytes_down"] == sum(record.bytes_down for record in run.records)
    assert (
        MEASURES["traffic"](prepared(FedNova(), net, make_data, (1.0,)), 1)["round_bytes"] == 2400
    )


def test_traffic_of_pairs_is_that_of_the_knowledge_net(make_data):
    family = plain_pairs()
    run = prepared(RaFL(), family, make_data, pair_limits(family))
    found = MEASURES["traffic"](run, 1)
    run.train(1)
    assert found["round_bytes"] == run.records[0].bytes_down + run.records[0].bytes_up
    assert found["params"] == family.member(family.whole).count


def test_traffic_refuses_methods_that_send_more_than_weights(net, make_data):
    with pytest.raises(ConfigError, match="whose clients send state besides weights"):
        MEASURES["traffic"](prepared(Scaffold(), net, make_data, (1.0,)), 1)


def test_limits_are_means_over_devices(make_data):
    family = plain_pairs()
    budgets = pair_limits(family)
    found = MEASURES["limits"](prepared(RaFL(limit="private"), family, make_data, budgets), 1)
    assert found["limit"] == pytest.approx(sum(budget.macs for budget in budgets) / len(budgets))
    assert found["used"] / found["limit"] == pytest.approx(found["utilisation"])
    assert 0 < found["common_utilisation"] <= found["utilisation"] <= 1
    assert found["nets"] >= 1


def test_limits_need_nets_that_clients_keep(net, make_data):
    with pytest.raises(ConfigError, match="the measure 'limits' was asked for with FedAvg"):
        MEASURES["limits"](prepared(FedAvg(), net, make_data, (1.0,)), 1)
