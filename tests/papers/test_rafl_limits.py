"""Costs of RaFL's pairs of nets, and the limits of devices."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, RaFL
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.terms import WHOLE, Client, Job
from tests.pairs import (
    SIZES,
    limits,
    normed_pairs,
    pair,
    perceptrons,
    plain_pairs,
)
from tests.papers.pairs_of_nets import (
    LOCAL,
    a_batch,
    pair_state,
    pair_world,
    some_data,
    start,
)


@pytest.mark.parametrize("method", [RaFL(), RaFL(order="in_turn"), RaFL.preset("released")])
def test_multiply_adds_of_a_step_are_those_that_torch_counts(method):
    """The first layer of a net needs no gradient of its inputs, which the rule of three forward
    passes counts.
    """
    family = plain_pairs()
    member = family.member(pair(family, "big"))
    world = fq.prepare(
        FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4), precision="fp64"
    ).world
    learner = method.learner(Job(Client(0, fq.Budget(share=1.0)), prefix(member.arch), 0), world)
    state = pair_state(family)
    nets = {variant: member.at(variant) for variant in ("big", WHOLE)}
    inputs, targets = a_batch(4)
    batch = Batch(
        inputs,
        targets,
        torch.ones(3, dtype=torch.bool),
        torch.tensor(0),
        taught=torch.zeros(4, 3).double(),
    )
    with FlopCounterMode(display=False) as counter:
        for phase in learner.phases:
            gradient(learner, member, phase.objective, state, Received(state), batch)
    # Samples, inputs and hidden channels of each first layer
    skipped = sum(4 * 4 * hidden for hidden in (8, 3))
    # The teacher's run before the batch is not in the phases
    extra = 4 * nets["big"].macs if learner.taught else 0
    assert counter.get_total_flops() // 2 + skipped + extra == learner.macs(member, [4])


def test_memory_of_a_step_is_that_of_both_nets():
    family = normed_pairs()
    world = fq.prepare(FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4)).world
    step = RaFL().training_step(world)
    both = family.member(pair(family, "big"))
    alone = [family.member(family.at(name).whole) for name in (WHOLE, "big")]
    assert both.training_memory(step) == sum(member.training_memory(step) for member in alone)


@pytest.fixture
def world():
    return pair_world()


def test_a_client_has_the_largest_private_net_with_which_the_pair_is_within_all_limits(world):
    family, method = world.family, RaFL()
    small, big = (
        family.cost(pair(family, name), method.training_step(world)) for name in ("small", "big")
    )
    for bound in ("macs", "params", "memory"):
        enough, less = (fq.Budget(**{bound: getattr(big, bound) - missing}) for missing in (0, 1))
        assert method.fit(enough, world) == pair(family, "big")
        assert method.fit(less, world) == pair(family, "small")
    mixed = fq.Budget(macs=big.macs, params=small.params)
    assert method.fit(mixed, world) == pair(family, "small")
    assert method.fit(fq.Budget(share=1.0), world) == pair(family, "big")


def test_a_limit_of_the_private_net_alone_is_the_papers_account(world):
    family = world.family
    macs = family.cost(family.at("big").whole).macs
    assert RaFL(limit="private").fit(fq.Budget(macs=macs), world) == pair(family, "big")
    assert RaFL().fit(fq.Budget(macs=macs), world) == pair(family, "small")


def test_limits_that_no_pair_meets_name_the_smallest(world):
    with pytest.raises(
        BudgetError,
        match=(
            r"no pair of nets is within the budget macs 3: "
            r"the smallest pair of nets \(small\) has"
        ),
    ):
        RaFL().fit(fq.Budget(macs=3), world)


def test_shares_below_one_are_refused_with_what_would_work(world, make_data):
    with pytest.raises(
        BudgetError, match=r"a share of 0.5 was asked for; RaFL .* Budget\(macs=28e6\)"
    ):
        RaFL().fit(fq.Budget(share=0.5), world)
    with pytest.raises(BudgetError, match=r"client 1: a share of 0.5"):
        start(RaFL(), world.family, make_data(world.family, SIZES), budgets=[1.0, 0.5])


def test_one_architecture_is_refused(perceptron, make_data):
    with pytest.raises(ConfigError, match="which is one architecture; it needs a knowledge net"):
        start(RaFL(), perceptron, make_data(perceptron, SIZES), budgets=[1.0])


def test_norms_that_stay_on_clients_are_refused():
    with pytest.raises(ConfigError, match="The knowledge net travels with all of its weights"):
        RaFL(local=fq.LocalTraining(norm="per_client-all"))


def test_eight_architectures_make_eight_groups(make_data):
    hidden = {f"net{count}": count for count in range(4, 12)}
    family = perceptrons(**hidden)
    data = make_data(family, [4] * 16)
    fleet = fq.Fleet.of(limits(family, *hidden), 16, 16)
    run = fq.run(
        RaFL(local=LOCAL), family, data, fleet, "vectorized", 1, evaluation=fq.Evaluation(every=0)
    )
    assert run.records[0].stacks == 8
