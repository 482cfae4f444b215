"""Budgets are a promise: what clients train costs no more, and a plan that does is refused before
it is trained.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import BudgetError, SubmodelError
from fedquilt.family.cut import prefix
from fedquilt.family.fitting import Fitter
from fedquilt.methods import (
    METHODS,
    FedAvg,
    FedBN,
    FedProx,
    FjORD,
    HeteroFL,
    LocalOnly,
    Method,
    ProgFed,
    SHeteroFL,
    SplitMix,
)
from fedquilt.round.budgets import check_budgets, planned
from fedquilt.round.deployed import members_by_share
from fedquilt.round.federation import World
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import TaskLoss, Wrapping, together
from fedquilt.terms import Client, Job, Server
from tests.conftest import CUTTING, LOCAL, with_local
from tests.growing import growing

SERVER = Server(0, {})
FITTING = {name: kind for name, kind in CUTTING.items() if not kind().ignores_budgets}


# --- memory is that of the step that a client runs ----------------------------------------------


def test_steps_by_method(residual):
    world = World(residual, precision="bf16")
    assert HeteroFL().training_step(world) == fq.methods.api.TrainingStep(32, 1, "bf16")
    adam = with_local(HeteroFL(), optimizer=fq.optimizers.Adam(), batch_size=7, last_batch="merge")
    assert adam.training_step(World(residual)) == fq.methods.api.TrainingStep(13, 2)
    # momentum, and the weights that were received
    assert FedProx(mu=0.1).training_step(World(residual)).slots == 2
    assert SHeteroFL().training_step(World(residual)).nested == (0.5, 0.25, 0.125)
    fjord = FjORD(samples=2, smallest=0.25, granularity=0.25).training_step(World(residual))
    assert (fjord.passes, fjord.nested, fjord.most) == (1, (0.25, 0.5, 0.75), 2)
    rescue = METHODS["fedrescue"]().training_step(World(residual))
    # its phases run one after another, the own net's needs most
    assert (rescue.passes, rescue.nested) == (
        1,
        (),
    )


def test_attacked_samples_have_separate_activations(residual):
    def local(weight: float) -> fq.LocalTraining:
        return fq.LocalTraining(adversarial=fq.attacks.AdversarialTraining(weight))

    both, attacked = (
        HeteroFL(local=local(weight)).training_step(World(residual)) for weight in (0.5, 1.0)
    )
    assert (both.passes, attacked.passes) == (2, 1)
    nets = SHeteroFL(local=local(0.5), widths=(1.0, 0.5)).training_step(World(residual))
    assert (nets.passes, nets.nested) == (2, (0.5, 0.5))


@dataclass(frozen=True)
class WithNet(Wrapping):
    """Another objective plus the loss of a net: the client's own, or a nested one."""

    share: float | None = None

    def nets(self, member):
        return tuple(one.net for one in self.passes(member))

    def passes(self, member):
        return together((*self.objective.passes(member), *TaskLoss(self.share).passes(member)))

    def __call__(self, view):
        return self.objective(view) + TaskLoss(self.share)(view)


@pytest.mark.parametrize("name", ["fjord", "fedrescue", "fedslim"])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [None, 0.5, 0.3])
def test_memory_of_a_wrapper_counts_in_every_draw(name, count, share, residual):
    """The step that a method describes needs no less than any phase of any draw."""
    method = METHODS[name](
        samples=count,
        smallest=0.25,
        granularity=0.25,
        local=fq.LocalTraining(objective=WithNet(share=share)),
    )
    world, member = World(residual), residual.member(residual.whole)
    learner = method.learner(
        Job(Client(0, fq.Budget(share=1.0), 8), prefix(residual.whole), 0), world
    )
    memory = member.training_memory(method.training_step(world))
    needed = []
    for draw in combinations(learner.ratios, min(learner.count, 3)):
        for phase in learner.phases_of(draw):
            step = Learner((phase,), learner.local, 0.1).training_step(member, "fp32")
            needed.append(member.training_memory(step))
    assert memory >= max(needed)
    # a net that always runs beside the client's own may be counted as one of the widest
    if share is None:
        assert memory == max(needed)


@pytest.mark.parametrize("name", FITTING)
@pytest.mark.parametrize(
    "changes",
    [{"batch_size": 8}, {"batch_size": 200}, {"optimizer": fq.optimizers.Adam()}],
    ids=["small batches", "large batches", "Adam"],
)
def test_plans_keep_memory_for_the_batch_and_the_optimizer(name, changes, residual):
    method, world = with_local(FITTING[name](), **changes), World(residual)
    step, whole = (
        method.training_step(world),
        residual.cost(residual.whole, method.training_step(world)).memory,
    )
    for part in (0.6, 0.9, 1.0):
        budget = fq.Budget(memory=part * whole)
        plan = planned(method, SERVER, Client(0, budget), world)
        assert sum(residual.cost(net, step).memory for net in plan) <= budget.memory
        check_budgets(method, [Job(Client(0, budget), net, 0) for net in plan], world)
    # Their clients train nets that are narrower than the whole.
    if name not in (
        "splitmix",
        "fedet",
    ):
        assert plan[0].arch == residual.whole


def test_the_budget_that_a_batch_of_200_exceeded():
    net = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(576, 10))
    family = fq.trace(net, torch.zeros(2, 1, 8, 8))
    budget, method = fq.Budget(memory=4e5), with_local(HeteroFL(), batch_size=200)
    assert (
        family.cost(family.whole).memory
        < budget.memory
        < family.cost(family.whole, fq.methods.api.TrainingStep(200)).memory
    )
    member = method.fit(budget, World(family))
    assert member != family.whole
    assert family.cost(member, fq.methods.api.TrainingStep(200)).memory <= budget.memory
    halves = method.fit(budget, World(family, precision="bf16"))
    assert family.count(member) < family.count(halves)
    assert family.fit(budget) == family.whole  # to run it, there is room


def test_a_fleets_memory_is_for_training_and_a_deployed_nets_for_inference(
    residual, play, make_data
):
    method = with_local(HeteroFL(), batch_size=4)
    world = World(residual, precision="fp64")
    memory = residual.cost(residual.fit(fq.Budget(share=0.5)), method.training_step(world)).memory
    fleet = fq.Fleet.of([fq.Budget(memory=memory)], 2, 2)
    run = play(method, residual, make_data(residual, (6, 6)), fleet=fleet)
    assert list(run.accuracy) == ["1.0", "0.5"]  # what clients train, and the whole model
    count = sum(weight.numel() for weight in run.deploy(fleet.kinds[0]).parameters())
    assert count == residual.count(residual.whole)
    assert run.per_client().devices[0].share == "0.5"
    own = play(
        with_local(LocalOnly(), batch_size=4), residual, make_data(residual, (6, 6)), fleet=fleet
    )
    kept = sum(weight.numel() for weight in own.deploy(fleet.kinds[0], client=0).parameters())
    assert kept == residual.count(residual.fit(fq.Budget(share=0.5)))  # it has trained no more


def test_base_nets_that_are_trained_at_once_share_a_memory(residual):
    method, world = SplitMix(base=0.25), World(residual)
    one = residual.cost(residual.fit(fq.Budget(share=0.25)), method.training_step(world))
    for memory, training, inference in (
        (2.5 * one.memory, 2, 4),
        (2 * one.bytes + one.activations, 0, 2),
        (2 * one.bytes + one.activations - 1, 0, 1),
    ):
        budget = fq.Budget(memory=memory)
        assert len(method.deploy(SERVER, budget, world)) == inference
        if training:
            assert len(planned(method, SERVER, Client(0, budget), world)) == training
        else:
            with pytest.raises(
                BudgetError,
                match=r"no member fits the budget .* trains in [\d,]+ bytes with batches",
            ):
                planned(method, SERVER, Client(0, budget), world)


def test_a_client_is_tested_with_as_many_base_nets_as_it_trains(perceptron):
    method, world = SplitMix(base=1 / 6), World(perceptron)
    one = perceptron.cost(perceptron.fit(fq.Budget(share=1 / 6)), method.training_step(world))
    budget = fq.Budget(memory=3 * one.memory)
    assert len(planned(method, SERVER, Client(0, budget), world)) == 3
    members = members_by_share(method, SERVER, [budget], world)
    assert {share: len(nets) for share, nets in members.items()} == {"1.0": 6, "0.5": 3}


def test_a_clients_base_nets_are_deployed_as_many_as_its_memory_runs(play, make_data):
    family = fq.trace(
        nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2)),
        torch.zeros(2, 2),
    )
    run = play(SplitMix(base=0.25), family, make_data(family, (6,)), rounds=1)
    one = family.cost(family.fit(fq.Budget(share=0.25)))
    for count in (1, 3, 4):  # one net as wide as three would not fit
        budget = fq.Budget(memory=count * one.bytes + one.activations)
        module = run.deploy(budget, client=0)
        assert sum(weight.numel() for weight in module.parameters()) == count * one.params


# --- plans that exceed a budget -----------------------------------------------------------------


@dataclass(frozen=True)
class Greedy(Method):
    """Plans some members for every client, whatever it can hold."""

    shares: tuple[float, ...] = (1.0,)

    def plan(self, server, client, world):
        members = [world.family.fit(fq.Budget(share=share)) for share in self.shares]
        return [replace(prefix(member), scope=f"{place}/") for place, member in enumerate(members)]

    def initial(self, world):
        whole = super().initial(world)
        return {
            f"{place}/{name}": value
            for place in range(len(self.shares))
            for name, value in whole.items()
        }


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize(
    ("budget", "why"),
    [
        (fq.Budget(share=0.5), "share 0.5: 3 channels of axis 'first' allowed, 6 needed"),
        (fq.Budget(params=40), "params: 40 allowed, 51 needed"),
        (fq.Budget(macs=30), "macs: 30 allowed, 42 needed"),
        (
            fq.Budget(memory=1000),
            "memory of training with batches of 32: 1,000 allowed, 1,892 needed",
        ),
        (
            fq.Budget(share=0.1, params=20),
            "share 0.1: 1 channels .*; params: 20 allowed, 51 needed",
        ),
    ],
    ids=str,
)
def test_a_plan_beyond_the_budget_is_refused(engine, budget, why, perceptron, make_data):
    """The whole perceptron has 51 parameters and takes 42 multiply-adds."""
    fleet = fq.Fleet.of([fq.Budget(share=1.0), budget], 2, 2)
    message = (
        rf"Greedy planned more for client 1 in round 1 than its budget \({budget}\) allows: "
        rf"{why}.*self\.fit"
    )
    with pytest.raises(BudgetError, match=message):
        fq.run(Greedy(), perceptron, make_data(perceptron, (6, 6)), fleet, engine, 1)


@pytest.mark.parametrize("engine", LOCAL)
def test_every_engine_compares_what_it_is_given(engine, perceptron, make_data):
    fleet = fq.Fleet.of([1.0], 1, 1)
    run = fq.prepare(HeteroFL(), perceptron, make_data(perceptron, (6,)), fleet, engine)
    job = Job(Client(0, fq.Budget(share=0.5), 6), prefix(perceptron.whole), 4)
    with pytest.raises(BudgetError, match="HeteroFL planned more for client 0 in round 5"):
        run.engine.train(run.federation, run.server, [job], run.method.fold(run.server, run.world))


def test_nets_of_a_client_count_together(perceptron):
    world = World(perceptron)

    def check(shares, budget):
        method, client = Greedy(shares=shares), Client(0, budget)
        check_budgets(
            method, [Job(client, net, 0) for net in planned(method, SERVER, client, world)], world
        )

    check((0.5, 0.5), fq.Budget(share=1.0))
    check((0.5,), fq.Budget(share=0.45))  # ceil(0.45 · 6) = 3
    check((0.1, 0.1, 0.1), fq.Budget(share=0.1))  # one channel of each net is always allowed
    for shares, budget in (((0.5, 0.5), fq.Budget(share=0.8)), ((0.4, 0.1), fq.Budget(share=0.1))):
        with pytest.raises(BudgetError, match="channels of axis 'first' allowed"):
            check(shares, budget)
    half = perceptron.count(perceptron.fit(fq.Budget(share=0.5)))
    check((0.5, 0.5), fq.Budget(params=2 * half))
    with pytest.raises(BudgetError, match=rf"params: {2 * half - 1} allowed, {2 * half} needed"):
        check((0.5, 0.5), fq.Budget(params=2 * half - 1))


def test_groups_are_compared_by_the_product_with_what_is_inside():
    net = nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.Flatten(), nn.Linear(512, 10)
    )
    family = fq.trace(net, torch.zeros(2, 1, 8, 8))
    for rounding in ("floor", "ceil"):
        for share in (0.01, 0.03, 0.1, 0.25, 0.3, 0.5, 0.9, 1.0):
            assert (
                family.excess(
                    [family.fit(fq.Budget(share=share), rounding)], fq.Budget(share=share)
                )
                == ()
            )
    assert family.excess([family.whole], fq.Budget(share=0.25)) == (
        "share 0.25: 8 channels of axis 'layer.0.groups' × 'layer.0.inside' allowed, 32 needed",
    )


def test_every_net_may_have_the_least_width_of_an_axis():
    class Squeezed(nn.Module):
        def forward(self, x):
            return x.squeeze()

    net = nn.Sequential(nn.Conv2d(1, 8, 1), nn.AdaptiveAvgPool2d(1), Squeezed(), nn.Linear(8, 3))
    family = fq.trace(net, torch.zeros(2, 1, 4, 4))
    smallest = family.fit(fq.Budget(share=1 / 8))
    assert smallest.sizes == {"layer.0": 2}  # of one channel, squeeze would drop the dimension
    assert family.excess([smallest] * 4, fq.Budget(share=0.5)) == ()


def test_a_plan_is_compared_once_for_each_budget(perceptron, make_data, monkeypatch):
    compared = []
    original = Fitter._widths_over
    monkeypatch.setattr(
        Fitter, "_widths_over", lambda *args: compared.append(args) or original(*args)
    )
    family = fq.trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 4))
    fleet = fq.Fleet.of([1.0, 0.5], 40, 40)
    fq.run(
        HeteroFL(),
        family,
        make_data(perceptron, (2,) * 40),
        fleet,
        rounds=3,
        evaluation=fq.Evaluation(every=0),
    )
    assert len(compared) == 2


# --- methods that ignore budgets, or leave clients out ------------------------------------------


@pytest.mark.parametrize(
    "method", [FedAvg(), FedBN(), FedAvg(share=0.5)], ids=["fedavg", "fedbn", "half"]
)
def test_a_method_that_ignores_budgets_reports_the_number_of_devices(
    method, perceptron, play, make_data, caplog
):
    run = play(method, perceptron, make_data(perceptron, (6,) * 5), (1.0, 0.5, 0.2), rounds=2)
    small = 1 if getattr(method, "share", 1.0) < 1 else 3
    note = f"{small} of 5 devices cannot hold the net that they train"
    assert [r.getMessage() for r in caplog.records] == [
        f"{type(method).__name__} ignores budgets: {note}."
    ]
    assert run.summary["note"].startswith("every client trains share")
    assert run.summary["note"].endswith(note)


def test_devices_are_counted_and_reported_once_even_if_a_run_is_trained_twice(
    perceptron, make_data, caplog
):
    counted = []

    class Counted(FedAvg):
        ignores_budgets = True

        def plan(self, server, client, world):
            counted.append(client.budget)
            return super().plan(server, client, world)

    fleet = fq.Fleet.of([1.0, *(0.2 + 0.001 * place for place in range(99))], 100, 1)
    run = fq.prepare(Counted(), perceptron, make_data(perceptron, (2,) * 100), fleet)
    # a run is ready without a look at every budget of the population
    assert len(set(counted)) == 64
    for rounds in (1, 2, 3):
        run.train(rounds)
    note = "99 of 100 devices cannot hold the net that they train"
    assert [record.getMessage() for record in caplog.records] == [
        f"Counted ignores budgets: {note}."
    ]
    assert run.note.endswith(note)


def test_devices_are_counted_that_cannot_hold_a_model_once_it_has_grown(make_data):
    family = growing()
    first = family.cost(family.at("stage1").whole).params
    assert first < family.cost(family.whole).params
    fleet = fq.Fleet.of([fq.Budget(share=1.0), fq.Budget(params=first)], 4, 2)
    run = fq.prepare(ProgFed(stage_rounds=2).settled(6), family, make_data(family, (2,) * 4), fleet)
    assert run.note.endswith("2 of 4 devices cannot hold the net that they train")


def test_no_note_is_written_if_every_device_holds_the_net(perceptron, play, make_data, caplog):
    run = play(FedAvg(), perceptron, make_data(perceptron, (6,) * 3), rounds=1)
    assert not caplog.text
    assert run.summary["note"] == FedAvg().note


def test_which_methods_ignore_budgets():
    ignoring = [name for name, kind in METHODS.items() if kind().ignores_budgets]
    assert ignoring == [
        "fedavg",
        "fedavgm",
        "fedadam",
        "fedyogi",
        "fedprox",
        "fednova",
        "fedbn",
        "progfed",
    ]
    assert not METHODS["progfed"](over=METHODS["heterofl"]()).ignores_budgets

    class Own(FedAvg):
        def plan(self, server, client, world):
            return [prefix(world.family.whole)]

    class Says(Own):
        ignores_budgets = True

    assert (Own.ignores_budgets, Says.ignores_budgets) == (False, True)


def test_a_method_without_a_plan_keeps_budgets(perceptron):
    class Plain(Method):
        pass

    (net,) = planned(Plain(), SERVER, Client(0, fq.Budget(share=0.5)), World(perceptron))
    assert net.arch.sizes == {"first": 3}


def test_an_empty_plan_is_refused_unless_the_method_skips_clients(perceptron, play, make_data):
    class Idle(Method):
        def plan(self, server, client, world):
            return [] if client.id else super().plan(server, client, world)

    class Skipping(Idle):
        skips_clients = True

    data = make_data(perceptron, (6, 6))
    with pytest.raises(
        SubmodelError,
        match=r"Idle.plan returned nothing to train for client 1 .*skips_clients = True",
    ):
        play(Idle(), perceptron, data, (1.0, 0.5))
    run = play(Skipping(), perceptron, data, (1.0, 0.5))
    assert run.records[-1].loss > 0


def test_a_skipped_client_has_no_own_net_to_test(perceptron, play, make_data):
    class Personal(LocalOnly):
        skips_clients = True

        def plan(self, server, client, world):
            return [] if client.id else super().plan(server, client, world)

    data = make_data(perceptron, (6, 6))
    with pytest.raises(
        SubmodelError,
        match=r"Personal.client_submodels returned no net for client 1 .*override `client_sub",
    ):
        play(Personal(), perceptron, data, (1.0, 1.0))


@pytest.mark.parametrize(
    ("bare", "found"),
    [
        (lambda family: prefix(family.whole), "a Submodel for client 0"),
        (lambda family: [family.whole], "a list of Arch for client 0"),
        (lambda family: None, "a NoneType for client 0"),
    ],
    ids=["submodel", "arch", "nothing"],
)
def test_a_plan_that_is_no_list_of_submodels_is_refused(bare, found, perceptron, play, make_data):
    class Bare(Method):
        def plan(self, server, client, world):
            return bare(world.family)

    with pytest.raises(
        SubmodelError, match=rf"Bare.plan returned {found} .* must return a list of sub-models"
    ):
        play(Bare(), perceptron, make_data(perceptron, (6,)))
