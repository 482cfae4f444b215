"""Limits of devices, and the choice of those for which members are searched."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.errors import BudgetError, ConfigError
from fedquilt.supernet import limits as module
from fedquilt.supernet.limits import Limits, choose_levels, choose_limits, limits_of, utilization
from fedquilt.terms import Budget


def used(values: list[float], counts: list[int], chosen: list[int]) -> float:
    """Sum over devices of the highest chosen level within their own."""
    return sum(
        count * max(values[place] for place in chosen if values[place] <= value)
        for value, count in zip(values, counts, strict=True)
    )


@given(
    values=st.lists(st.integers(1, 100), min_size=1, max_size=7, unique=True),
    counts=st.lists(st.integers(0, 5), min_size=7, max_size=7),
    num_levels=st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_no_other_choice_of_levels_uses_more(
    values: list[int], counts: list[int], num_levels: int
) -> None:
    levels = sorted(map(float, values))
    counts = counts[: len(levels)]
    chosen = choose_levels(levels, counts, num_levels)
    assert chosen[0] == 0
    assert len(chosen) <= num_levels
    others = [
        [0, *more]
        for size in range(num_levels)
        for more in combinations(range(1, len(levels)), size)
    ]
    assert used(levels, counts, chosen) == max(used(levels, counts, other) for other in others)


def test_a_fleet_with_many_limits_is_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    levels = [float(level) for level in range(100, 1100)]
    best = used(levels, [1] * 1000, choose_levels(levels, [1] * 1000, 8))
    monkeypatch.setattr(module, "MAX_LEVELS", 50)
    chosen = choose_levels(levels, [1] * 1000, 8)
    assert chosen[0] == 0
    assert len(chosen) == 8
    assert used(levels, [1] * 1000, chosen) > 0.99 * best


def test_limits_that_cannot_be_ordered_are_chosen_one_by_one() -> None:
    fast = Limits(macs=100, params=10)
    large = Limits(macs=50, params=40)
    # A member within 60 multiply-adds and 10 parameters fits nobody but the first.
    counts = {fast: 5, large: 3}
    capacity = {fast: 60.0, large: 50.0, Limits(macs=50, params=10): 40.0}
    chosen = choose_limits(counts, capacity.__getitem__, 3)
    assert chosen == (Limits(macs=50, params=10), large, fast)
    assert choose_limits(counts, capacity.__getitem__, 2) == (Limits(macs=50, params=10), fast)
    assert choose_limits(counts, capacity.__getitem__, 1) == (Limits(macs=50, params=10),)


@pytest.mark.parametrize(
    ("mean_limit", "mean_capacity", "percent"),
    [(48.01, 47.52, 99), (79.70, 74.35, 93), (13.57, 13.07, 96), (15.49, 13.96, 90)],
)
def test_utilization_of_table_3(mean_limit: float, mean_capacity: float, percent: int) -> None:
    assert round(100 * utilization([mean_capacity], [mean_limit])) == percent


def test_utilization_is_a_ratio_of_means() -> None:
    assert utilization([10, 30], [20, 60]) == pytest.approx(0.5)


def test_budgets_become_limits() -> None:
    counts = limits_of({Budget(macs=5.0): 2, Budget(params=7.0, memory=8.0): 1})
    assert counts == {Limits(macs=5.0): 2, Limits(params=7.0, memory=8.0): 1}


def test_a_share_is_no_limit_of_a_supernet() -> None:
    with pytest.raises(BudgetError, match=r"share 0\.5.*flop_limited"):
        Limits.of(Budget(share=0.5))


def test_limits_need_a_positive_number() -> None:
    with pytest.raises(BudgetError, match="none was given"):
        Limits()
    with pytest.raises(ConfigError, match="above 0"):
        Limits(macs=-1)


def test_tighter_limits_are_within_looser_ones() -> None:
    tight = Limits(macs=1, params=2, milliseconds=3)
    assert tight.is_within(Limits(macs=1))
    assert not Limits(macs=1).is_within(tight)
    assert Limits(macs=1).tightest(Limits(macs=4, memory=5)) == Limits(macs=1, memory=5)
