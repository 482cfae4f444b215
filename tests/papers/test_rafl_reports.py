"""Figures that RaFL reports, and the nets that its clients keep."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.errors import BudgetError
from fedquilt.family.variants import joined
from fedquilt.methods import RaFL
from fedquilt.terms import WHOLE, Client, Job
from tests.conftest import Perceptron
from tests.pairs import (
    SIZES,
    limits,
    normed_pairs,
    of_net,
    plain_pairs,
    trained_pairs,
)
from tests.papers.pairs_of_nets import (
    LOCAL,
    modules,
    pair_world,
    start,
)


@pytest.fixture
def world():
    return pair_world()


def test_what_is_reported_by_limit_is_what_plain_modules_give(make_data):
    family = plain_pairs()
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES)).train(2)
    inputs, targets = run.data.test_samples(torch.arange(24)), run.data.test_targets

    def accuracy(module: Perceptron, rows: Tensor) -> float:
        with torch.no_grad():
            return float((module(inputs[rows]).argmax(1) == targets[rows]).double().mean())

    everything = torch.arange(24)
    (knowledge,) = modules(family, dict(run.server.weights), WHOLE)
    assert run.accuracy == {"1.0": pytest.approx(accuracy(knowledge, everything))}
    for name, clients in (("small", (0, 2)), ("big", (1, 3))):
        key = str(float(family.cost(family.at(name).whole).macs))
        nets = [
            modules(family, dict(run.server.memory[client, ""].weights), name, WHOLE)
            for client in clients
        ]
        own = [run.data.test_parts[client] for client in clients]
        means = {
            "private_accuracy": [accuracy(private, everything) for private, _ in nets],
            "client_knowledge_accuracy": [accuracy(knowledge, everything) for _, knowledge in nets],
            "local_private_accuracy": [
                accuracy(net[0], rows) for net, rows in zip(nets, own, strict=True)
            ],
            "local_client_knowledge_accuracy": [
                accuracy(net[1], rows) for net, rows in zip(nets, own, strict=True)
            ],
        }
        for metric, values in means.items():
            assert run.metrics[metric][key] == pytest.approx(sum(values) / 2), metric
    labels = run.summary["labels"]
    assert [labels[key] for key in run.metrics["private_accuracy"]] == ["56 MACs", "77 MACs"]


def test_nets_that_clients_keep_are_tested_on_their_own_training_samples(make_data):
    """The basis of Figure 3. Clients 0 and 2 have the small net, 1 and 3 the big one."""
    family = plain_pairs()
    how = fq.Evaluation(every=0, training=True)
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES), evaluation=how).train(2)
    for name, clients in (("small", (0, 2)), ("big", (1, 3))):
        key = str(float(family.cost(family.at(name).whole).macs))
        means = {"training_private_accuracy": 0.0, "training_client_knowledge_accuracy": 0.0}
        for client in clients:
            nets = modules(family, dict(run.server.memory[client, ""].weights), name, WHOLE)
            rows = run.data.parts[client]
            inputs, targets = run.data.samples(rows), run.data.targets[rows]
            for metric, net in zip(means, nets, strict=True):
                with torch.no_grad():
                    predicted = net(inputs).argmax(1)
                means[metric] += float((predicted == targets).double().mean()) / 2
        for metric, mean in means.items():
            assert run.metrics[metric][key] == pytest.approx(mean), metric


def test_training_samples_are_tested_on_only_if_asked(make_data):
    family = plain_pairs()
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES)).train(1)
    assert not any(metric.startswith("training_") for metric in run.metrics)


def test_a_sample_of_many_clients_is_tested(make_data):
    family = plain_pairs()
    run = start(
        RaFL(local=LOCAL),
        family,
        make_data(family, SIZES),
        evaluation=fq.Evaluation(every=0, clients=1),
    )
    assert len(run.train(1).metrics["private_accuracy"]) == 1


def test_the_summary_has_utilisation_and_the_real_cost_of_pairs(make_data):
    """Two devices with a limit of 60 multiply-adds and two of 100: the nets have 35 and 56, the
    knowledge net 21.
    """
    family = plain_pairs()
    budgets = [fq.Budget(macs=60), fq.Budget(macs=100)]
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES), budgets=budgets)
    summary = run.summary
    assert (summary["utilisation"], summary["common_utilisation"]) == (91 / 160, 70 / 160)
    assert (summary["pair_macs"], summary["over_limit"]) == ((56 + 77) / 2, 0)
    paper = start(
        RaFL(local=LOCAL, limit="private"), family, make_data(family, SIZES), budgets=budgets
    )
    assert (paper.summary["utilisation"], paper.summary["common_utilisation"]) == (
        112 / 160,
        112 / 160,
    )
    assert (paper.summary["pair_macs"], paper.summary["over_limit"]) == (77, 2)
    assert "2 of 4 devices cannot hold the net that they train" in paper.note


def test_labels_are_limits_with_their_units(world):
    assert RaFL().label(fq.Budget(macs=28e6), world) == "28M MACs"


def test_first_downloads_are_charged_once_and_reported_separately(make_data):
    family = trained_pairs()
    run = start(RaFL(local=LOCAL, transfer=True), family, make_data(family, SIZES)).train(2)
    knowledge = 8 * family.count(family.at(WHOLE).whole)
    private = 8 * sum(2 * family.count(family.at(name).whole) for name in ("small", "big"))
    first, second = run.records
    assert (first.bytes_down, first.bytes_up, first.bytes_first) == (
        4 * knowledge + private,
        4 * knowledge,
        private,
    )
    assert (second.bytes_down, second.bytes_up, second.bytes_first) == (
        4 * knowledge,
        4 * knowledge,
        0,
    )
    assert run.summary["bytes_first"] == private
    assert "bytes_first" not in second.to_dict()


@pytest.mark.parametrize(
    ("family", "transfer", "warns"),
    [(plain_pairs, False, 0), (trained_pairs, False, 1), (trained_pairs, True, 0)],
)
def test_weights_that_devices_cannot_draw_give_a_warning(
    family, transfer, warns, make_data, caplog
):
    with caplog.at_level(logging.WARNING, "fedquilt"):
        start(RaFL(transfer=transfer), family(), make_data(family(), SIZES))
    assert (
        sum(
            "has the same weights for every seed" in record.getMessage()
            for record in caplog.records
        )
        == warns
    )


def test_the_servers_state_has_the_knowledge_net_alone(make_data):
    run = start(RaFL(), plain_pairs(), make_data(plain_pairs(), SIZES))
    assert all(name.startswith("knowledge.") for name in run.server.weights)


def test_without_the_knowledge_net_clients_keep_the_private_net_alone(make_data):
    family = plain_pairs()
    run, other = (
        start(RaFL(local=LOCAL, keep_knowledge=keeps), family, make_data(family, SIZES)).train(2)
        for keeps in (False, True)
    )
    for (client, _), memory in run.server.memory.items():
        name = ("small", "big")[client % 2]
        assert all(weight.startswith(f"{name}.") for weight in memory.weights)
    assert "client_knowledge_accuracy" not in run.metrics
    for name, value in run.server.weights.items():
        assert torch.equal(value, other.server.weights[name])


def test_a_state_of_another_architecture_is_kept_and_a_new_one_started(make_data, caplog):
    """The limits of all clients change after the first round, and change back after the second."""
    family = plain_pairs()
    data = make_data(family, SIZES)
    run = start(RaFL(local=LOCAL), family, data, budgets=limits(family, "small")).train(1)
    before = of_net(dict(run.server.memory[1, ""].weights), "small")
    small, wide = run.fleet, fq.Fleet.of(limits(family, "big"), 4, 4)
    run.fleet = wide
    with caplog.at_level(logging.WARNING, "fedquilt"):
        run.train(2)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "has the private net 'small'" in record.getMessage()
    ]
    assert len(warnings) == 4
    assert "and 'big' is planned for it in round 2. It keeps the old net" in warnings[1]
    kept = run.server.memory[1, ""].weights
    assert all(
        torch.equal(value, of_net(dict(kept), "small")[name]) for name, value in before.items()
    )
    assert of_net(dict(kept), "big")
    (private,) = run.method.client_submodels(run.server, wide.client(1, 1, 0, 4), run.world)
    assert private.arch.variant == "big"

    caplog.clear()
    run.fleet = small
    run.train(3)
    after = of_net(dict(run.server.memory[1, ""].weights), "small")
    # It was trained on.
    assert not any(torch.equal(value, after[name]) for name, value in before.items())
    assert not caplog.records


def test_deleting_one_clients_state_affects_that_client_only(make_data):
    family = plain_pairs()
    data = make_data(family, SIZES)
    # Equal knowledge nets at the start of the second round, so that clients differ by their own
    # states alone.
    run, other = (start(RaFL(local=LOCAL), family, data).train(1) for _ in range(2))
    del other.server.memory[2, ""]
    run.train(2)
    other.train(2)
    for client in range(4):
        mine, theirs = (one.server.memory[client, ""].weights for one in (run, other))
        same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert same == (client != 2)


@pytest.mark.parametrize("norm", ["batch", "tracked", "post"])
def test_a_clients_private_net_is_deployed_as_the_users_module(norm, make_data):
    family = normed_pairs()
    run = start(RaFL(local=replace(LOCAL, norm=norm)), family, make_data(family, SIZES)).train(1)
    module = run.deploy(fq.Budget(share=1.0), client=3)
    state = module.state_dict()
    assert type(module).__name__ == "Convolution"
    assert module.conv.out_channels == 4
    kept = of_net(dict(run.server.memory[3, ""].weights), "big")
    assert torch.equal(state["conv.weight"], kept["conv.weight"])
    if norm == "tracked":
        assert torch.equal(state["norm.running_mean"], kept["norm.running_mean"])
    knowledge = run.deploy(fq.Budget(share=1.0))
    assert torch.equal(knowledge.conv.weight, run.server.weights["knowledge.conv.weight"])
    with pytest.raises(BudgetError):
        run.deploy(fq.Budget(params=10), client=3)


def test_a_pair_is_one_job_whose_learner_sends_the_knowledge_net(world):
    family, method = world.family, RaFL()
    client = Client(0, fq.Budget(share=1.0), 4)
    (submodel,) = method.plan(method.init(world), client, world)
    assert submodel.arch.variant == joined(WHOLE, "big")
    learner, member = method.learner(Job(client, submodel, 0), world), family.member(submodel)
    assert learner.sent(member) == learner.received(member)
    assert all(name.startswith("knowledge.") for name in learner.sent(member))
    assert all(
        name.startswith("big.") for name in set(learner.kept(member)) - set(learner.sent(member))
    )
    assert learner.installed(member) == ()
    assert all(
        name.startswith("big.")
        for name in RaFL(transfer=True).learner(Job(client, submodel, 0), world).installed(member)
    )


@pytest.mark.parametrize("client", [None, 3])
def test_a_clients_private_net_is_exported(client, make_data, tmp_path):
    """Without a client the knowledge net is written."""
    from safetensors.torch import load_file

    family = plain_pairs()
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES)).train(1)
    run.export(tmp_path / "net.safetensors", fq.Budget(share=1.0), client=client)
    written = load_file(tmp_path / "net.safetensors")
    state = run.server.weights if client is None else run.server.memory[client, ""].weights
    expected = of_net(dict(state), "knowledge" if client is None else "big")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(written[name].double(), value.double(), rtol=0, atol=1e-6)
