"""Variants of a module: several ways to run it, each with some of its weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import SubmodelError
from fedquilt.family.net import Pass
from fedquilt.family.variants import Variants, joined
from fedquilt.terms import WHOLE, Arch, Submodel


class TwoHeads(Variants, nn.Module):
    """A body with a head of its own, and a second head behind its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)
        self.early = nn.Linear(8, 3)
        self.chosen = WHOLE

    @property
    def variants(self) -> tuple[str, ...]:
        return ("early",)

    def choose(self, variant: str) -> None:
        self.chosen = variant

    def extract(self) -> nn.Module:
        unused = ("second", "head") if self.chosen == "early" else ("early",)
        for name in unused:
            setattr(self, name, None)
        return self

    def exportable(self) -> nn.Module:
        return self

    def variant_parts(self, runs: object) -> dict[str, tuple[str, ...]]:
        return {"early": ("early.weight", "early.bias")}

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x)).relu()
        if self.chosen == "early":
            return self.early(x)
        return self.head(self.second(x).relu())


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(TwoHeads, torch.randn(4, 6))


def weights_of(*layers: str) -> set[str]:
    return {f"{layer}.{leaf}" for layer in layers for leaf in ("weight", "bias")}


STATISTICS = {"norm.running_mean", "norm.running_var"}


def test_each_variant_has_the_weights_that_its_run_uses(family):
    assert family.variants == (WHOLE, "early")
    assert (
        set(family.layout.variants[WHOLE])
        == weights_of("first", "norm", "second", "head") | STATISTICS
    )
    assert set(family.layout.variants["early"]) == weights_of("first", "norm", "early") | STATISTICS


def test_axes_are_common_to_all_variants(family):
    first, early = family.axes["first.weight"].split()[0], family.axes["early.weight"].split()[1]
    assert first == early
    assert (
        family.axes["early.weight"].split()[0] == family.axes["head.weight"].split()[0] == "class"
    )


def test_a_member_has_names_cost_and_net_of_its_variant(family):
    early = family.member(family.at("early").whole)
    assert set(early.trainable) == weights_of("first", "norm", "early")
    assert early.count == 6 * 8 + 8 + 16 + 8 * 3 + 3
    assert early.macs == 6 * 8 + 8 * 3
    assert family.member(family.whole).macs == 6 * 8 + 8 * 4 + 4 * 3


def test_widths_cut_every_variant(family):
    half = family.member(family.at("early").fit(fq.Budget(share=0.5)))
    assert half.shape("first.weight") == (4, 6)
    assert half.shape("early.weight") == (3, 4)
    state = family.init(0)
    module = half.module(state).eval()
    x = torch.randn(5, 6)
    hidden = (x @ state["first.weight"][:4].T + state["first.bias"][:4]) / (1 + 1e-5) ** 0.5
    by_hand = hidden.relu() @ state["early.weight"][:, :4].T + state["early.bias"]
    assert torch.allclose(module(x), by_hand, atol=1e-6)


def test_a_member_that_trains_a_part_carries_the_others(family):
    member = family.member(family.at("early", ("early",)).whole)
    assert set(member.trainable) == weights_of("early")
    assert member.statistics == ()
    assert set(member.frozen) == weights_of("first", "norm") | STATISTICS
    assert set(member.carried) == set(member.frozen)
    assert member.macs == 6 * 8 + 8 * 3
    assert member.trained_macs == 8 * 3


def test_joined_variants_have_the_weights_of_both_and_run_the_first(family):
    both = family.member(Arch(family.whole.widths, joined(WHOLE, "early")))
    assert set(both.trainable) == weights_of("first", "norm", "second", "head", "early")
    assert both.macs == family.member(family.whole).macs
    assert both.at("early") is family.member(family.at("early").whole)


def test_all_views_of_a_family_return_the_same_members(family):
    view = family.at("early")
    assert view is family.at("early") is family.at(WHOLE).at("early")
    assert view.at(WHOLE) is family
    assert view.member(family.whole) is family.member(family.whole)
    assert view.whole == replace(family.whole, variant="early")


def test_an_unknown_variant_or_part_is_refused(family):
    with pytest.raises(
        SubmodelError, match="'late' was asked for; the model was traced with 'whole', 'early'"
    ):
        family.at("late")
    member = family.member(family.at("early", ("body",)).whole)
    with pytest.raises(
        SubmodelError, match="trains 'body' was asked for; the model has the parts norm, early"
    ):
        _ = member.trainable


def test_a_layout_is_read_as_it_was_written(family):
    again = type(family.layout).from_json(family.layout.to_json())
    assert again == family.layout
    assert again.fingerprint == family.layout.fingerprint


def test_a_submodel_is_read_as_it_was_written(family):
    for arch in (family.whole, family.at("early").whole, family.at("early", ("early",)).whole):
        assert Submodel.from_dict(Submodel(arch).to_dict()) == Submodel(arch)


def test_a_net_computes_what_the_module_of_its_variant_does(family):
    for variant in family.variants:
        half = family.member(family.at(variant).fit(fq.Budget(share=0.5)))
        half.check_net([Pass(train=True), Pass(statistics="stored")])
