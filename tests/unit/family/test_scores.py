"""Scores of channels, worked out by hand and compared with what a cut without a position lacks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.axes import Axis, Index, Positions, parse
from fedquilt.errors import ConfigError, SubmodelError
from fedquilt.family.cut import highest
from fedquilt.family.family import Family
from fedquilt.family.layout import Layout
from fedquilt.family.member import Member
from fedquilt.family.rows import inside
from fedquilt.family.scores import channel_scores
from tests.conftest import Perceptron


def whole(family: Family) -> Member:
    return family.member(family.whole)


def hidden_axis(family: Family) -> str:
    (axis,) = family.whole.sizes
    return axis


class Residual(nn.Module):
    """A linear layer inside a residual sum, so that its weight has one axis twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 2, bias=False)
        self.inner = nn.Linear(2, 2, bias=False)
        self.last = nn.Linear(2, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + self.inner(x))


class Flattened(nn.Module):
    """A convolution whose channels are flattened with four pixels each: "class (c 4)"."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1, bias=False)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.conv(x).flatten(1))


def test_a_position_counts_with_the_norm_of_its_slice_of_every_weight():
    family = fq.trace(lambda: Perceptron(2), torch.zeros(2, 4))
    weights = {
        "first.weight": torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, -1.0, 0.0]]),
        "first.bias": torch.tensor([-2.0, 0.5]),
        "last.weight": torch.tensor([[6.0, 2.0], [8.0, 1.0], [0.0, -2.0]]),
        "last.bias": torch.zeros(3),
    }
    axis = hidden_axis(family)
    two = channel_scores(whole(family), weights)
    assert two[axis].tolist() == [5 + 2 + 10, 1 + 0.5 + 3]
    one = channel_scores(whole(family), weights, norm=1)
    assert one[axis].tolist() == [7 + 2 + 14, 1 + 0.5 + 5]
    assert one["class"].tolist() == [8, 9, 2]
    assert set(two) == set(family.layout.axes)


def test_an_entry_counts_once_where_a_weight_has_the_axis_twice():
    family = fq.trace(Residual, torch.zeros(2, 3))
    axis = hidden_axis(family)
    assert family.axes["inner.weight"] == f"{axis} {axis}"
    weights = {
        "first.weight": torch.zeros(2, 3),
        "inner.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        "last.weight": torch.zeros(3, 2),
    }
    assert channel_scores(whole(family), weights, norm=1)[axis].tolist() == [1 + 2 + 3, 2 + 3 + 4]
    assert channel_scores(whole(family), weights)[axis].tolist() == pytest.approx(
        [14**0.5, 29**0.5]
    )


def test_a_channel_has_all_pixels_that_are_flattened_with_it():
    family = fq.trace(Flattened, torch.zeros(2, 1, 2, 2))
    weights = {
        "conv.weight": torch.zeros(2, 1, 1, 1),
        "last.weight": torch.tensor([[1.0, 2, 3, 4, 10, 20, 30, 40]] + 2 * [8 * [0.0]]),
    }
    assert channel_scores(whole(family), weights, norm=1)[hidden_axis(family)].tolist() == [10, 100]


def test_groups_and_channels_inside_them_are_scored_separately():
    module = nn.Module()
    module.w = nn.Parameter(torch.tensor([1.0, 2, 3, 10, 20, 30]))  # (group, channel) = 2 × 3
    axes = {"g": Axis("g", 2, inner=("c",)), "c": Axis("c", 3)}
    family = Family(module, Layout(axes, {"w": parse("(g c)")}), (), nn.Module)
    scores = channel_scores(whole(family), dict(module.named_parameters()), norm=1)
    assert {axis: found.tolist() for axis, found in scores.items()} == {
        "g": [6, 60],
        "c": [11, 22, 33],
    }


def test_an_axis_twice_in_one_product_counts_an_entry_once():
    module = nn.Module()
    # positions (0, 0), (0, 1), (1, 0), (1, 1)
    module.w = nn.Parameter(torch.tensor([1.0, 2, 3, 4]))
    family = Family(module, Layout({"a": Axis("a", 2)}, {"w": parse("(a a)")}), (), nn.Module)
    scores = channel_scores(whole(family), dict(module.named_parameters()), norm=1)
    assert scores["a"].tolist() == [6, 9]


@pytest.mark.parametrize("family", ["perceptron", "residual", "language"], indirect=True)
def test_a_score_is_the_size_of_what_a_cut_without_the_position_lacks(family):
    member = whole(family)
    weights = family.init(3, dtype=torch.float64)
    scores = channel_scores(member, weights)
    for axis, size in family.whole.widths:
        for position in range(size):
            rest = Index({axis: Positions.chosen(p for p in range(size) if p != position)})
            expected = sum(
                weights[name][~inside(family.cutter.rows(name, rest), member.shape(name))].norm()
                for name in family.trainable
            )
            assert float(scores[axis][position]) == pytest.approx(float(expected), abs=1e-12)


def test_statistics_and_other_scopes_do_not_count(residual):
    weights = residual.init(0, dtype=torch.float64)
    scores = channel_scores(whole(residual), weights)
    changed = {name: value + 5 * (name in residual.statistics) for name, value in weights.items()}
    scoped = {f"1/{name}": value for name, value in changed.items()}
    found = channel_scores(
        whole(residual), {**scoped, **dict.fromkeys(weights, torch.ones(1))}, scope="1/"
    )
    torch.testing.assert_close(found, scores)


def test_a_tied_weight_counts_once(language):
    tied = set(language.layout.ties)
    weights = language.init(0, dtype=torch.float64)
    assert not tied & set(weights)
    scores = channel_scores(whole(language), weights)
    aliases = {alias: weights[name] for alias, name in language.layout.ties.items()}
    torch.testing.assert_close(channel_scores(whole(language), {**weights, **aliases}), scores)


def test_a_smaller_member_has_scores_for_its_own_positions(residual):
    member = residual.member(residual.fit(fq.Budget(share=0.5)))
    weights = residual.cutter.gather(residual.init(0), member.prefix, residual.trainable)
    scores = channel_scores(member, weights)
    assert {axis: len(scores[axis]) for axis in member.arch.sizes} == member.arch.sizes


def test_another_norm_is_refused(perceptron):
    with pytest.raises(ConfigError, match="norm=3; 1 and 2 are known"):
        channel_scores(whole(perceptron), perceptron.init(), norm=3)


# --- the positions with the highest scores ------------------------------------------------------


def test_the_highest_positions_are_ascending_and_ties_go_to_the_first():
    arch = fq.methods.api.Arch((("a", 2), ("b", 3)))
    scores = {"a": torch.tensor([1.0, 9.0, 2.0, 7.0]), "b": torch.tensor([5.0, 4.0, 5.0, 5.0, 5.0])}
    submodel = highest(arch, scores)
    assert {axis: list(kept) for axis, kept in submodel.index.items()} == {
        "a": [1, 3],
        "b": [0, 2, 3],
    }
    assert submodel.arch == arch


@pytest.mark.parametrize(
    ("scores", "message"),
    [
        ({}, "2 highest positions of axis 'a' were asked for; none were found"),
        ({"a": torch.zeros(1)}, r"scores of shape \(1,\) were found"),
        ({"a": torch.tensor([0.0, torch.nan, 1.0])}, "some scores are not numbers"),
    ],
)
def test_scores_that_do_not_fit_are_refused(scores, message):
    with pytest.raises(SubmodelError, match=message):
        highest(fq.methods.api.Arch((("a", 2),)), scores)
