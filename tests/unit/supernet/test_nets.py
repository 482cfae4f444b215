"""Knowledge net and private nets for a fleet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.supernet import SPACES
from fedquilt.supernet.elastic import Supernet
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.nets import searched_nets
from fedquilt.supernet.search import SearchOptions
from fedquilt.terms import Budget

TINY = SPACES["tiny"]()
QUICK = SearchOptions(population=8, generations=2)
FLEET = {Budget(macs=2.0e5): 10, Budget(macs=2.4e5): 10, Budget(macs=3.0e5): 10}


def test_pairs_are_within_the_limits() -> None:
    searched = searched_nets(TINY, FLEET, options=QUICK)
    assert next(iter(searched.nets)) == "knowledge"
    assert searched.knowledge.costs.macs <= 1.0e5
    assert list(searched.private) == list(searched.nets)[1:]
    sums = sorted(
        found.costs.macs + searched.knowledge.costs.macs for found in searched.private.values()
    )
    for total, budget in zip(sums, FLEET, strict=True):
        assert 0.9 * (budget.macs or 0) <= total <= (budget.macs or 0)
    assert searched.utilization.share == pytest.approx(sum(sums) / 7.4e5)


def test_the_papers_account_limits_the_private_net_alone() -> None:
    searched = searched_nets(TINY, FLEET, knowledge_macs=9e4, account="private", options=QUICK)
    macs = sorted(found.costs.macs for found in searched.private.values())
    assert all(
        0.9 * limit <= used <= limit for used, limit in zip(macs[:2], (2.0e5, 2.4e5), strict=True)
    )
    assert searched.knowledge.costs.macs <= 9e4


def test_names_are_valid_and_nets_can_be_traced() -> None:
    searched = searched_nets(TINY, FLEET, num_members=1, options=QUICK)
    name, found = next(iter(searched.private.items()))
    assert name.startswith("net")
    assert "." not in name
    family = fq.trace(searched.nets[name], torch.zeros(1, 1, 8, 8))
    assert family.cost(family.whole).macs == found.costs.macs
    first, second = family.init(0), family.init(1)
    assert any(not torch.equal(first[weight], second[weight]) for weight in first)


def test_nets_of_a_supernet_have_its_weights_and_the_federations_classes() -> None:
    supernet = Supernet(TINY.with_classes(4), seed=0)
    searched = searched_nets(TINY, FLEET, num_members=1, supernet=supernet, options=QUICK)
    for found, net in zip(
        [searched.knowledge, *searched.private.values()], searched.nets.values(), strict=True
    ):
        assert isinstance(net, nn.Module)
        weights = supernet.weights(found.config)
        for name, value in net.state_dict().items():
            if not name.startswith("head.classifier"):
                assert torch.equal(value, weights[name])
        assert net.eval()(torch.zeros(1, 1, 8, 8)).shape == (1, 10)


def test_private_nets_may_start_fresh_beside_a_pretrained_knowledge_net() -> None:
    searched = searched_nets(
        TINY, FLEET, num_members=1, supernet=Supernet(TINY), private_weights=False, options=QUICK
    )
    knowledge, private = searched.nets.values()
    assert isinstance(knowledge, nn.Module)
    assert not isinstance(private, nn.Module)
    assert isinstance(private(), nn.Module)


def test_a_supernet_of_another_space_is_refused() -> None:
    with pytest.raises(ConfigError, match="supernet of the same space"):
        searched_nets(TINY, FLEET, supernet=Supernet(replace(TINY, image_size=16)), options=QUICK)


def test_limits_that_leave_no_room_for_a_pair_are_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"pair of nets within macs 60000.*smallest member has 53\.3k"
    ):
        searched_nets(TINY, {Budget(macs=6e4): 1}, options=QUICK)
    message = r"knowledge net alone has .*The smallest member has 53\.3k .* twice as much\. Larger"
    with pytest.raises(BudgetError, match=message):
        searched_nets(TINY, {Limits(macs=1e5): 1}, knowledge_macs=2e5, options=QUICK)
    message = r"knowledge net alone has .*smaller knowledge_macs would work, .* which has 53\.3k "
    with pytest.raises(BudgetError, match=message):
        searched_nets(TINY, {Limits(macs=1.2e5): 1}, knowledge_macs=2e5, options=QUICK)
