"""Members: names of weights, nets, costs and the nets nested in them."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.family import Member
from fedquilt.family.cut import prefix
from fedquilt.family.net import Pass


def test_a_family_caches_its_members(perceptron):
    half = perceptron.fit(fq.Budget(share=0.5))
    member = perceptron.member(half)
    assert (
        perceptron.member(half)
        is perceptron.member(prefix(half))
        is perceptron.member(member)
        is member
    )
    assert member == Member(perceptron, half)
    assert hash(member) == hash(Member(perceptron, half))
    other = fq.trace(perceptron._factory, perceptron.example_inputs)
    assert other.member(half) != member  # families are compared by identity


def test_a_member_has_names_and_shapes_of_its_weights(residual):
    member = residual.member(residual.fit(fq.Budget(share=0.5)))
    assert (member.trainable, member.statistics, member.carried) == (
        residual.trainable,
        residual.statistics,
        residual.carried,
    )
    module = member.module()
    shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters()}
    assert {name: member.shape(name) for name in member.trainable} == shapes
    assert (
        member.count
        == sum(weight.numel() for weight in module.parameters())
        == residual.count(member)
    )
    assert member.weight_bytes == 4 * member.count
    assert member.prefix == prefix(member.arch)


def test_families_accept_members_sub_models_and_widths(residual):
    arch = residual.fit(fq.Budget(share=0.5))
    for one in (arch, prefix(arch), residual.member(arch)):
        assert residual.cost(one) is residual.member(arch).cost()
        assert residual.count(one) == residual.member(arch).count
        assert residual.width(one) == 0.5
        assert residual.excess([one], fq.Budget(params=1))
        state = residual.module(one).state_dict()
        torch.testing.assert_close(state, residual.member(arch).module().state_dict())


def test_nets_nested_at_unequal_shares_differ_though_their_channels_are_the_same(perceptron):
    """Of six hidden units, 0.2 and 0.3 are one: the scaler divides by the share, and a batch runs
    both.
    """
    whole = perceptron.member(perceptron.whole)
    fifth, third = whole.nested(0.2), whole.nested(0.3)
    assert fifth.arch == third.arch
    assert fifth != third
    assert whole.nested(0.2) is fifth
    assert whole.nested(1.0).arch == whole.arch
    assert whole.nested(1.0) != whole
    # what takes long is found once
    assert fifth.net is third.net is perceptron.member(fifth.arch).net
    assert fifth.cost() is third.cost()


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_nested_net_is_cut_from_its_members_weights(share, perceptron):
    whole = perceptron.member(perceptron.whole)
    inner = whole.nested(share)
    state = perceptron.init(0)
    inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    found, _ = inner.net(whole.narrowed(state, inner), inputs, Pass(statistics="stored"))
    torch.testing.assert_close(found, inner.module(state)(inputs))
