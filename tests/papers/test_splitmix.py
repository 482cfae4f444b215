"""Split-Mix (Hong et al., ICLR 2022): algorithms 1 to 3, Table 1's parameters, Figure 8's
embedding.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError
from fedquilt.family.cut import windows
from fedquilt.family.ensemble import Ensemble
from fedquilt.methods import FedAvg, SplitMix
from fedquilt.round.federation import World
from fedquilt.terms import Budget, Client, Job, Server
from tests.conftest import LOCAL, Perceptron, with_local

QUARTER = {"base": 0.25}
SHARES = (1.0, 0.5, 0.25)


def scopes(method, family, share, turn=0, id=0, round=0, seed=0):
    client = Client(id, Budget(share=share), 4, turn)
    return [net.scope for net in method.plan(Server(round, {}), client, World(family, seed))]


# --- algorithm 2 --------------------------------------------------------------------------------


@pytest.mark.parametrize(("base", "count"), [(0.125, 8), (1 / 3, 3), (0.1, 10), (0.3, 3), (1.0, 1)])
def test_there_are_as_many_base_nets_as_fit_into_one(base, count):
    assert SplitMix(base=base).count == count


def test_draws_depend_on_seed_client_and_round(residual):
    """The cycle depends on the seed alone, the other base nets also on client and round."""
    method = SplitMix(**QUARTER)
    cycles = {
        tuple(scopes(method, residual, 0.25, turn, seed=seed)[0] for turn in range(4))
        for seed in range(10)
    }
    assert len(cycles) > 1
    for others in ({"id": place} for place in range(10)), ({"round": place} for place in range(10)):
        assert len({tuple(scopes(method, residual, 0.5, **own)) for own in others}) > 1


def test_all_rows_of_the_output_are_averaged_though_the_loss_is_masked(residual):
    method, world = SplitMix.preset("cifar10"), World(residual)
    client = Client(0, Budget(share=1.0), 4)
    job = Job(client, method.plan(Server(0, {}), client, world)[0], 0)
    assert method.local.masked
    assert not method.learner(job, world).class_rows


def test_a_client_trains_floor_of_its_share_over_the_base(residual):
    for share, count in ((1.0, 4), (0.75, 3), (0.5, 2), (0.25, 1), (0.49, 1)):
        found = scopes(SplitMix(**QUARTER), residual, share)
        assert len(found) == len(set(found)) == count


def test_the_first_comes_from_a_shuffled_cycle_that_all_clients_share(residual):
    """Over every cycle each base net comes first once, whoever is asked; the order changes from
    cycle to cycle.
    """
    method = SplitMix(**QUARTER)
    found = [scopes(method, residual, 0.25, turn, id=turn % 7)[0] for turn in range(40)]
    cycles = [tuple(found[start : start + 4]) for start in range(0, 40, 4)]
    assert all(set(cycle) == {f"base{place}/" for place in range(4)} for cycle in cycles)
    assert len(set(cycles)) > 3


def test_every_base_net_is_trained_as_often_as_the_others(residual):
    """Also by clients that train two of four: the second is drawn from the rest."""
    method = SplitMix(**QUARTER)
    found = Counter(
        scope
        for turn in range(2000)
        for scope in scopes(method, residual, 0.5, turn, turn % 10, turn // 10)
    )
    assert set(found) == {f"base{place}/" for place in range(4)}
    assert all(abs(count - 1000) < 5 * 500**0.5 for count in found.values())


def test_the_clients_of_a_cohort_share_the_cycle(residual, make_data):
    """`turn` counts who was asked before, over all rounds."""
    data = make_data(residual, (4,) * 6)
    run = fq.prepare(
        with_local(SplitMix(**QUARTER), batch_size=4), residual, data, fq.Fleet.of((0.25,), 6, 2)
    )
    asked = []
    plan = run.method.plan

    class Spy(SplitMix):
        def plan(self, server, client, world):
            asked.append((client.turn, plan(server, client, world)[0].scope))
            return plan(server, client, world)

    run.federation = replace(run.federation, method=Spy(local=run.method.local, **QUARTER))
    run.train(4)
    turns = dict(asked)
    for start in (0, 4):
        assert {turns[turn] for turn in range(start, start + 4)} == {
            f"base{place}/" for place in range(4)
        }


# --- algorithms 1 and 3 -------------------------------------------------------------------------


@pytest.mark.parametrize("engine", LOCAL)
def test_base_nets_never_mix_their_weights(engine, residual, make_data, play):
    """A round changes the nets that were trained and no other, each to the data-weighted mean of
    its own.
    """
    method = with_local(SplitMix(**QUARTER), batch_size=4, scaler=False)
    data, fleet = make_data(residual, (4, 8)), fq.Fleet.of((0.25,), 2, 2)
    run = fq.prepare(
        method, residual, data, fleet, engine, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    before = dict(run.server.weights)
    planned = [
        method.plan(run.server, Client(id, Budget(share=0.25), 4, id), run.world)[0]
        for id in (0, 1)
    ]
    assert planned[0].scope != planned[1].scope
    after = run.train(1).server.weights
    for name, value in before.items():
        trained = (
            name.startswith(tuple(net.scope for net in planned))
            and name.split("/")[1] in residual.trainable
        )
        assert torch.equal(after[name], value) != trained


def test_all_nets_of_all_clients_are_one_stack(residual, make_data, play):
    data = make_data(residual, (4, 4, 4))
    run = play(with_local(SplitMix(**QUARTER), batch_size=4), residual, data, SHARES, "vectorized")
    assert [record.stacks for record in run.records] == [1, 1]  # four, two and one net


@pytest.mark.parametrize("engine", LOCAL)
def test_the_masked_embedding_in_one_big_net_gives_the_same_update(engine, make_data, play):
    """Figure 8 (c): base nets as diagonal blocks of the whole net, every other entry zero, the
    biases of the output
    aside: summed logits of a blocked net are the sum of the base nets' logits.
    """
    perceptron = fq.trace(Perceptron(), torch.zeros(2, 4))
    method = SplitMix(
        local=fq.LocalTraining(batch_size=8, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0)),
        base=0.5,
    )
    world = World(perceptron, precision="fp64")
    server, whole = method.init(world), Server(0, FedAvg().init(world).weights)
    member = perceptron.fit(Budget(share=0.5))
    for place in range(2):
        piece = windows(
            member, {axis: place * width for axis, width in member.widths}, perceptron.layout.sizes
        )
        block = perceptron.cutter.gather(whole.weights, piece, perceptron.trainable)
        for name, value in block.items():
            assert torch.equal(server.weights[f"base{place}/{name}"], value)
    data = make_data(perceptron, (8,))
    run = play(method, perceptron, data, (1.0,), engine, rounds=1)
    # by hand: each block on its own loss over the same batch
    for place in range(2):
        net = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3)).double()
        names = ("first.weight", "first.bias", "last.weight", "last.bias")
        with torch.no_grad():
            for leaf, name in zip(net.parameters(), names, strict=True):
                leaf.copy_(server.weights[f"base{place}/{name}"])
        nn.functional.cross_entropy(net(data.inputs), data.targets).backward()
        for leaf, name in zip(net.parameters(), names, strict=True):
            torch.testing.assert_close(
                run.server.weights[f"base{place}/{name}"],
                leaf.detach() - 0.1 * leaf.grad,
                rtol=0,
                atol=1e-12,
            )


def test_line_11_mixes_by_the_mean_of_the_logits(residual, make_data, play):
    run = play(
        with_local(SplitMix(**QUARTER), batch_size=4, norm="post"),
        residual,
        make_data(residual, (8,) * 3),
        SHARES,
    )
    inputs = torch.randn(5, 1, 6, 6, dtype=torch.float64)
    wide, half, narrow = (run.deploy(Budget(share=share)) for share in SHARES)
    assert isinstance(wide, Ensemble)
    assert [len(list(one.nets)) for one in (wide, half)] == [4, 2]
    assert not isinstance(narrow, Ensemble)
    by_hand = torch.stack([net(inputs) for net in wide.nets]).mean(0)
    torch.testing.assert_close(wide(inputs), by_hand, rtol=0, atol=0)
    torch.testing.assert_close(half.nets[0](inputs), narrow(inputs), rtol=0, atol=0)
    assert not wide.training


@pytest.mark.parametrize("norm", ["batch", "tracked", "post", "per_client"])
@pytest.mark.parametrize("engine", LOCAL)
def test_evaluation_mixes_alike(engine, norm, residual, make_data, play):
    """Accuracy by share is that of the mixed logits."""
    method = with_local(SplitMix(**QUARTER), batch_size=4, norm=norm, scaler=False)
    how = fq.Evaluation(batch_size=24)
    run = play(method, residual, make_data(residual, (8,) * 3), SHARES, engine, evaluation=how)
    assert list(run.accuracy) == ["1.0", "0.5", "0.25"]
    if norm in ("tracked", "post"):
        data = run.data
        for share in SHARES:
            model = run.deploy(Budget(share=share))
            hits = (model(data.test_inputs).argmax(1) == data.test_targets).double().mean()
            assert run.accuracy[str(share)] == pytest.approx(float(hits), abs=1e-9)


# --- initial weights ----------------------------------------------------------------------------


def _digits_like() -> nn.Module:
    """Convolutions, a hidden linear layer and biases everywhere, as the Digits CNN has them."""
    first = (nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    second = (nn.Conv2d(16, 32, 3), nn.Flatten(1), nn.Linear(32 * 16, 64), nn.ReLU())
    return nn.Sequential(*first, *second, nn.Linear(64, 10))


def _fan_in(weight: Tensor) -> int:
    return weight[0].numel()


@pytest.mark.parametrize("rescaled", [True, False])
def test_weights_and_biases_start_in_the_range_of_the_whole_nets_fan_in_or_of_their_own(rescaled):
    """Section 4.2. torch draws both from ±1/√fan-in; the input layer's fan-in is not cut."""
    family = fq.trace(_digits_like, torch.zeros(2, 3, 8, 8))
    whole = family.init(0)
    method = SplitMix(rescale_init=rescaled, base=0.25)
    drawn = [method.initial(World(family, seed)) for seed in range(20)]
    for layer in ("0", "3", "5", "7"):
        base = drawn[0][f"base1/{layer}.weight"]
        bound = _fan_in(whole[f"{layer}.weight"] if rescaled else base) ** -0.5
        for name in (f"{layer}.weight", f"{layer}.bias"):
            scoped = [f"base{place}/{name}" for place in range(4)]
            values = torch.cat([one[key].flatten() for one in drawn for key in scoped])
            assert float(values.abs().max()) <= bound * (1 + 1e-6)
            assert float(values.abs().max()) > 0.97 * bound
    assert _fan_in(whole["3.weight"]) == 4 * _fan_in(drawn[0]["base1/3.weight"])


@pytest.mark.parametrize("rescaled", [True, False])
def test_base_nets_start_independent_of_each_other(rescaled, language):
    """Biases too, and weights on axes that are fixed or have fewer channels than base nets."""
    for family in (fq.trace(_digits_like, torch.zeros(2, 3, 8, 8), fixed=["0"]), language):
        first = SplitMix(rescale_init=rescaled, base=0.125).initial(World(family))
        for name in set(family.trainable) - set(family.parts["norm"]):
            values = [first[f"base{place}/{name}"] for place in range(8)]
            assert len({tuple(value.flatten().tolist()) for value in values}) == 8, name


def test_a_module_that_brings_its_weights_is_cut_into_windows():
    """It cannot be drawn anew: base nets share what is not cut."""
    module = _digits_like()
    family = fq.trace(module, torch.zeros(2, 3, 8, 8))
    first = SplitMix(base=0.25).initial(World(family))
    for place in range(4):
        own = module[3].weight.detach()[8 * place : 8 * place + 8, 4 * place : 4 * place + 4]
        assert torch.equal(first[f"base{place}/3.weight"], own)
        assert torch.equal(first[f"base{place}/7.bias"], module[7].bias.detach())


def test_weights_with_a_range_independent_of_width_are_not_rescaled(language):
    """Norms, embeddings, and parameters of which nobody knows how they were drawn."""
    plain = SplitMix(rescale_init=False, base=0.25).initial(World(language))
    rescaled = SplitMix(rescale_init=True, base=0.25).initial(World(language))
    assert language.embeddings
    for name in (*language.embeddings, *language.parts["norm"], "position"):
        for place in range(4):
            assert torch.equal(plain[f"base{place}/{name}"], rescaled[f"base{place}/{name}"])


# --- sizes --------------------------------------------------------------------------------------


def params(family, share, base=0.125):
    world, method = World(family), SplitMix(base=base)
    return (
        sum(
            family.count(net.arch)
            for net in method.deploy(Server(0, {}), Budget(share=share), world)
        )
        / 1e6
    )


def test_table_1_parameters_of_cifar_10():
    """M of ×1/8, ×1/4, ×1/2, ×1: whole nets, as SHeteroFL has them, 0.2, 0.7, 2.8 and 11.2; mixes
    of base nets
    0.2, 0.4, 0.7 and 1.4.
    """
    family = fq.trace(fq.models.MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    shares = (0.125, 0.25, 0.5, 1.0)
    nets = [family.count(family.fit(Budget(share=share))) / 1e6 for share in shares]
    assert [round(count, 1) for count in nets] == [0.2, 0.7, 2.8, 11.2]
    assert [round(params(family, share), 1) for share in shares] == [0.2, 0.4, 0.7, 1.4]


def test_table_1_parameters_of_digits():
    family = fq.trace(fq.models.MODELS["digits_cnn_norm"].factory, torch.zeros(2, 3, 28, 28))
    shares = (0.125, 0.25, 0.5, 1.0)
    nets = [family.count(family.fit(Budget(share=share))) / 1e6 for share in shares]
    assert [round(count, 1) for count in nets] == [0.2, 0.9, 3.6, 14.2]
    assert [round(params(family, share), 1) for share in shares] == [0.2, 0.4, 0.9, 1.8]


def test_budgets_that_are_no_shares_bound_the_sum_of_the_nets(residual):
    method, world = SplitMix(**QUARTER), World(residual)
    one = residual.cost(residual.fit(Budget(share=0.25)))
    for budget, count in (
        (Budget(params=2.5 * one.params), 2),
        (Budget(macs=3 * one.macs), 3),
        (Budget(memory=100 * one.memory), 4),
        (Budget(share=0.5, params=1.9 * one.params), 1),
    ):
        assert method.affordable(budget, world) == count
    with pytest.raises(
        BudgetError, match=r"share 0\.2 was given; Split-Mix's base nets have a share of 0\.25"
    ):
        method.affordable(Budget(share=0.2), world)


@pytest.mark.parametrize(
    "budget", [Budget(share=0.1), Budget(params=70), Budget(share=0.2, macs=2000)], ids=str
)
def test_a_budget_that_is_too_small_is_refused_with_a_base_that_fits(budget, residual):
    """The message names the fleet, because its default budgets have shares down to 1/16."""
    with pytest.raises(BudgetError, match=r"SplitMix\(base=.*fleet \(fleet\.budgets\)") as caught:
        SplitMix(base=0.5).affordable(budget, World(residual))
    base = float(str(caught.value).split("method.base = ")[1].split()[0])
    assert SplitMix(base=base).affordable(budget, World(residual)) == 1


def test_settings_of_the_paper():
    """A.2: 400 rounds of cosine decay on Digits, five local epochs on CIFAR-10."""
    digits, cifar = SplitMix.preset("digits"), SplitMix.preset("cifar10")
    assert digits.lr(0) == 0.1
    assert digits.lr(400) == pytest.approx(0)
    assert [cifar.lr(at) for at in (0, 150, 250)] == pytest.approx([0.01, 0.001, 0.0001])
    assert (cifar.local.epochs, cifar.local.batch_size, cifar.local.masked) == (5, 128, "client")
    for method in (digits, cifar):
        assert method.local.optimizer == replace(
            method.local.optimizer, momentum=0.9, weight_decay=5e-4
        )
        assert (method.local.scaler, method.local.norm.name, method.rescale_init) == (
            True,
            "batch",
            True,
        )


@pytest.mark.parametrize("engine", LOCAL)
def test_line_9_sorts_base_nets_by_their_accuracy(engine, residual, make_data, play):
    """Only as they are handed out: training goes on as if they were not."""
    data = make_data(residual, (8,) * 3)
    methods = [
        with_local(SplitMix(sort=sort, **QUARTER), batch_size=4, norm="post")
        for sort in (False, True)
    ]
    plain, ordered = (play(method, residual, data, SHARES, engine, rounds=2) for method in methods)
    assert all(
        torch.equal(plain.server.weights[name], value)
        for name, value in ordered.server.weights.items()
    )
    found, rows = [], data.parts.order

    def accuracy(net):
        return float((net(data.inputs[rows]).argmax(1) == data.targets[rows]).double().mean())

    found = [accuracy(net) for net in ordered.deploy(Budget(share=1.0)).nets]
    assert found == sorted(found, reverse=True)
    unsorted = [accuracy(net) for net in plain.deploy(Budget(share=1.0)).nets]
    assert sorted(unsorted) == pytest.approx(sorted(found))
    assert len(set(found)) > 1


def test_a_sample_that_is_left_over_is_sorted_by_with_those_before_it(make_data, play):
    """A norm of one value a channel has no statistics, and base nets are sorted by a hundred
    samples at once.
    """
    layers = (nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    family = fq.trace(nn.Sequential(*layers), torch.zeros(2, 6))
    data, methods = (
        make_data(family, (51, 50)),
        [SplitMix(sort=sort, **QUARTER) for sort in (False, True)],
    )
    plain, ordered = (play(method, family, data, rounds=1) for method in methods)
    # of all base nets, whatever their order
    assert plain.accuracy["1.0"] == ordered.accuracy["1.0"]
