"""Statistics by client and by domain (Split-Mix, Figures 5 and 6)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import (
    METHODS,
    FedAvg,
    FedRolex,
    HeteroFL,
    LocalOnly,
    ProgFed,
    SHeteroFL,
    SplitMix,
)
from fedquilt.methods.prototypes import Prototypes
from fedquilt.runs import per_client as per_client
from fedquilt.runs.per_client import DeviceFigures, PerClient
from tests.conftest import CUTTING, with_local
from tests.growing import BLOCKS, HEADS, growing

SHARES = (1.0, 0.5, 0.25)


def with_domains(data: fq.FederatedData) -> fq.FederatedData:
    """Return data in which the first client has one domain, and the others have another."""
    homes = torch.ones(len(data.targets), dtype=torch.int64)
    homes[data.parts[0]] = 0
    return replace(data, domains=homes, domain_names=("near", "far"))


@pytest.mark.parametrize("name", CUTTING)
def test_every_method_has_results_by_client(name, residual, make_data, play):
    # A model that grows does so later.
    method = with_local(METHODS[name](), batch_size=4).settled(8)
    run = play(method, residual, make_data(residual, (8,) * 3), SHARES, rounds=1)
    found = run.per_client()
    assert [device.client for device in found.devices] == [0, 1, 2]
    assert [device.share for device in found.devices] == ["1.0", "0.5", "0.25"]
    assert all(0 <= device.accuracy_own_size <= 1 for device in found.devices)
    assert all(
        (device.accuracy_whole_model is None) == run.method.personal for device in found.devices
    )
    assert [0 < part <= 1 for part in found.trained.values()] == [True]
    assert list(found.by("share")) == ["1.0", "0.5", "0.25"]  # the richest first
    assert [device.client for device in run.per_client([2]).devices] == [2]
    assert found.to_dict()["spread"]["macs"]["mean"] > 0


def test_accuracy_is_that_of_a_clients_own_size_and_of_the_whole_model(residual, make_data, play):
    """A device cannot use the whole model, so that the accuracy of its own size is listed too."""
    data = make_data(residual, (8,) * 3, tests=60)
    run = play(with_local(HeteroFL(), batch_size=4), residual, data, SHARES)
    found = run.per_client()
    for device, share in zip(found.devices, SHARES, strict=True):
        rows = data.test_parts[device.client]
        for accuracy, size in (
            (device.accuracy_own_size, share),
            (device.accuracy_whole_model, 1.0),
        ):
            answers = run.deploy(fq.Budget(share=size))(data.test_samples(rows)).argmax(1)
            assert accuracy == float((answers == data.test_targets[rows]).double().mean())
    assert found.devices[0].accuracy_own_size == found.devices[0].accuracy_whole_model
    assert any(device.accuracy_own_size != device.accuracy_whole_model for device in found.devices)
    assert (
        found.to_dict()["spread"]["accuracy_own_size"]["mean"]
        == found.spread("accuracy_own_size")[0]
    )
    assert "accuracy" not in found.to_dict()["clients"][0]


def test_a_spread_is_the_mean_and_the_deviation_of_all():
    devices = [
        DeviceFigures(id, "1.0", "", 0, params, None, None) for id, params in enumerate((1, 3))
    ]
    assert PerClient(tuple(devices), {}).spread("params") == (2.0, 1.0)


def test_unknown_clients_groups_and_numbers_are_refused(residual, make_data, play):
    run = play(FedAvg(), residual, make_data(residual, (8,) * 3), rounds=1)
    for wrong in (99, 3, -1, "a", 1.5):
        with pytest.raises(
            ConfigError, match=f"client {wrong} was asked for; the fleet has 3, from 0 on"
        ):
            run.per_client([0, wrong])
    with pytest.raises(ConfigError, match="per_client was given 2 where a list of clients belongs"):
        run.per_client(2)
    found = run.per_client([0])
    with pytest.raises(
        ConfigError, match=r"no group of clients named 'foo'\. Known: share, domain"
    ):
        found.by("foo")
    with pytest.raises(
        ConfigError,
        match=r"no number of a client named 'share'\. Known: accuracy_own_size, .*params",
    ):
        found.spread("share")


def test_sorted_base_nets_are_tested_in_their_order(residual, make_data, play):
    data = make_data(residual, (8,) * 4, tests=60)
    run = play(
        with_local(SplitMix(base=0.25, sort=True), batch_size=4, norm="post"),
        residual,
        data,
        (0.25,),
    )
    for device in run.per_client().devices:
        rows = data.test_parts[device.client]
        answers = run.deploy(fq.Budget(share=0.25))(data.test_samples(rows)).argmax(1)
        assert device.accuracy_own_size == float(
            (answers == data.test_targets[rows]).double().mean()
        )


def test_positions_in_the_cycle_are_taken_into_account(residual, make_data, play):
    """Two clients of one round take two base nets of four, one after the other."""
    run = play(SplitMix(base=0.25), residual, make_data(residual, (8, 8)), (0.25,), rounds=1)
    assert run.per_client().trained == {"": 0.5}


def test_costs_are_those_of_the_trained_sub_model(residual, make_data, play):
    """Figure 5: multiply-adds of a batch, and parameters of a round. Split-Mix's are a fraction of
    HeteroFL's.
    """
    data, methods = make_data(residual, (8,) * 3), (HeteroFL(), SplitMix(base=0.25))
    runs = [
        play(with_local(method, batch_size=4, masked=""), residual, data, SHARES)
        for method in methods
    ]
    hetero, mixed = (run.per_client() for run in runs)
    for device, share in zip(hetero.devices, SHARES, strict=True):
        cost = residual.cost(residual.fit(fq.Budget(share=share)))
        # there and back
        assert (device.params, device.macs) == (
            2 * cost.params,
            4 * 3 * cost.macs,
        )
    one = residual.count(residual.fit(fq.Budget(share=0.25)))
    assert [device.params for device in mixed.devices] == [2 * 4 * one, 2 * 2 * one, 2 * one]
    assert mixed.spread("params")[0] < hetero.spread("params")[0]
    assert mixed.spread("macs")[1] < hetero.spread("macs")[1]


@pytest.mark.parametrize("norm", ["batch", "tracked", "per_client"])
@pytest.mark.parametrize("name", CUTTING)
def test_parameters_are_counted_as_bytes_are(name, norm, residual, make_data, play):
    """Everything that a method sends counts: norm statistics, rows of classes, several uploads and
    copies.
    """
    if norm == "per_client" and issubclass(METHODS[name], Prototypes):
        pytest.skip("its server needs all weights")
    data = make_data(residual, (8,) * 3, labels=2)
    method = with_local(METHODS[name](), batch_size=4, norm=norm, masked="client").settled(8)
    run = play(method, residual, data, SHARES, rounds=1)
    [record], devices = run.records, run.per_client().devices
    # in fp64
    assert sum(device.params for device in devices) * 8 == record.bytes_down + record.bytes_up


def test_shares_of_parameters_that_each_domain_trained(residual, make_data, play):
    """Figure 6: with small devices only, HeteroFL never trains the remaining weights.

    A rolling window and base nets reach all of them.
    """
    data = with_domains(make_data(residual, (8, 8, 8)))
    shares = (1.0, 0.25, 0.25)

    def trained(method, rounds=8):
        return (
            play(with_local(method, batch_size=4), residual, data, shares, rounds=rounds)
            .per_client()
            .trained
        )

    assert trained(FedAvg()) == {"near": 1.0, "far": 1.0}
    hetero = trained(HeteroFL(), 2)
    quarter, whole = (residual.count(residual.fit(fq.Budget(share=share))) for share in (0.25, 1.0))
    assert hetero == {"near": 1.0, "far": quarter / whole}
    assert hetero["far"] < trained(FedRolex())["far"] <= 1.0
    assert trained(SplitMix(base=0.25)) == {"near": 1.0, "far": 1.0}


@pytest.mark.parametrize("name", ["fedavg", "sheterofl", "splitmix"])
@pytest.mark.parametrize("rounds", [1, 3])
def test_updates_that_a_link_lost_do_not_count_as_trained(
    name, rounds, perceptron, make_data, play
):
    """With weight decay, exactly the weights that arrived have changed, so that they can be
    counted.
    """
    method = {
        "fedavg": FedAvg(),
        "sheterofl": SHeteroFL(count_widths=True),
        "splitmix": SplitMix(base=0.25),
    }[name]
    method = with_local(method, optimizer=fq.optimizers.SGD(lr=0.1, weight_decay=0.1), batch_size=4)
    link = fq.Link(loss=fq.links.ColumnLoss(0.4))
    run = play(method, perceptron, make_data(perceptron, (8, 8)), rounds=rounds, link=link)
    first = method.init(run.world).weights
    moved = sum(int((value != first[name]).sum()) for name, value in run.server.weights.items())
    total = sum(value.numel() for value in first.values())
    assert run.per_client().trained == {"": moved / total}
    assert rounds > 1 or moved < total


def test_rows_of_classes_that_a_client_lacks_count_over_every_link(residual, make_data, play):
    """A lossy link that loses nothing in this run gives the numbers of a perfect one."""
    method, data = (
        with_local(HeteroFL(), batch_size=4, masked="client"),
        make_data(residual, (8,), labels=2),
    )
    for link in (fq.Link(), fq.Link(loss=fq.links.ColumnLoss(0.0, 1e-12))):
        assert play(method, residual, data, (1.0,), link=link).per_client().trained == {"": 1.0}


@dataclass(frozen=True)
class Stated(FedAvg):
    """A method whose plans depend on an extra and a slot of the server."""

    def init(self, world):
        server = super().init(world)
        return replace(server, slots={"seen": server.weights}, extras={"sizes": torch.ones(2)})

    def plan(self, server, client, world):
        assert set(server.slots["seen"]) == set(server.weights)
        return super().plan(server, client, world)[: int(server.extras["sizes"][client.id])]


def test_plans_see_the_state_of_their_method(residual, make_data, play):
    run = play(with_local(Stated(), batch_size=4), residual, make_data(residual, (8, 8)))
    assert run.per_client().trained == {"": 1.0}


@pytest.mark.parametrize(("rounds", "blocks"), [(1, 1), (2, 2), (3, 3)])
def test_weights_of_the_stages_of_a_growing_model_count_as_trained(rounds, blocks, make_data, play):
    method = with_local(ProgFed(stage_rounds=1, rounds=4), batch_size=4)
    run = play(method, growing(), make_data(growing(), (8,)), (1.0,), rounds=rounds)
    sizes = {name: run.server.weights[name].numel() for name in growing().trainable}
    begun = (*BLOCKS[:blocks], *HEADS[:blocks])
    expected = sum(size for name, size in sizes.items() if name.startswith(begun))
    assert run.per_client().trained == {"": pytest.approx(expected / sum(sizes.values()))}


def test_classes_are_not_counted_where_they_do_not_matter(residual, make_data, play, monkeypatch):
    """Counting the targets of every client in every round would take long."""
    link = fq.Link(loss=fq.links.ColumnLoss(0.0, 1e-12))
    run = play(with_local(FedAvg(), batch_size=4), residual, make_data(residual, (8,)), link=link)
    monkeypatch.setattr(per_client, "classes_present", None)
    assert per_client.ever_trained(run) == {"": 1.0}


def test_weights_that_are_never_sent_are_not_lost(residual, make_data, play):
    link = fq.Link(loss=fq.links.ColumnLoss(1.0))
    data, whole = make_data(residual, (8, 8)), {"": 1.0}
    assert (
        play(with_local(LocalOnly(), batch_size=4), residual, data, link=link).per_client().trained
        == whole
    )
    assert play(
        with_local(FedAvg(), batch_size=4), residual, data, link=link
    ).per_client().trained == {"": 0.0}


def test_domains_have_names_or_are_left_out(residual, make_data, play):
    data = make_data(residual, (8, 8))
    run = play(with_local(FedAvg(), batch_size=4), residual, data, rounds=1)
    assert {device.domain for device in run.per_client().devices} == {""}
    assert set(run.per_client().trained) == {""}
    run = play(with_local(FedAvg(), batch_size=4), residual, with_domains(data), rounds=1)
    assert [device.domain for device in run.per_client().devices] == ["near", "far"]
    nameless = replace(with_domains(data), domain_names=())
    run = play(with_local(FedAvg(), batch_size=4), residual, nameless, rounds=1)
    assert [device.domain for device in run.per_client().devices] == ["0", "1"]


def test_a_clients_domain_is_that_of_most_of_its_samples(residual, make_data, play):
    data = make_data(residual, (8,))
    homes = torch.zeros(len(data.targets), dtype=torch.int64)
    homes[data.parts[0][:2]] = 1
    data = replace(data, domains=homes, domain_names=("near", "far"))
    run = play(with_local(FedAvg(), batch_size=4), residual, data, rounds=1)
    assert [device.domain for device in run.per_client().devices] == ["near"]
