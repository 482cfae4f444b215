"""Search within limits: on the space `tiny`, whose 400 nets can all be looked at, and on the large
spaces.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cost import TrainingStep, measure
from fedquilt.supernet import SPACES, Config
from fedquilt.supernet.genome import Genome
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.predictor import Floats
from fedquilt.supernet.search import Search, SearchOptions

QUICK = SearchOptions(population=8, generations=2)
TINY = SPACES["tiny"]()
METER = Meter(TINY)


@cache
def all_costs() -> list[tuple[Config, int, int, int]]:
    genome = Genome(TINY)
    configs = [genome.config(genes) for genes in genome]
    return [(config, *TINY.cost(config), int(METER.value(config, "memory"))) for config in configs]


def uneven(configs: Sequence[Config]) -> Floats:
    """Score as a trained supernet might: mostly by cost, with preferences that cost does not
    explain.
    """
    rows = []
    for config in configs:
        kernels = sum((-1) ** place * kernel for place, kernel in enumerate(config.kernels))
        rows.append(
            0.5
            + 0.03 * np.log(TINY.cost(config).macs)
            + 0.004 * kernels
            - 0.01 * config.expansions[0]
        )
    return np.asarray(rows)


class Watched:
    """A score that notes what it was asked for."""

    def __init__(self) -> None:
        self.configs: list[Config] = []

    def __call__(self, configs: Sequence[Config]) -> Floats:
        self.configs += configs
        return uneven(configs)


WATCHED = Search(METER, Watched(), QUICK)


# --- configurations as whole numbers ------------------------------------------------------------


def test_every_net_is_one_tuple_of_genes() -> None:
    genome = Genome(TINY)
    found = list(genome)
    assert len(found) == len(set(found)) == TINY.num_configs
    configs = {genome.config(genes) for genes in found}
    assert len(configs) == TINY.num_configs
    assert all(TINY.canonical(config) == config for config in configs)


def test_larger_genes_cost_more() -> None:
    genome = Genome(TINY)
    for genes in list(genome)[::7]:
        cost = TINY.cost(genome.config(genes))
        for place in genome.larger(genes):
            assert TINY.cost(genome.config(genome.moved(genes, place, 1))).macs > cost.macs


# --- limits -------------------------------------------------------------------------------------


def check_limits(macs: float, params: float | None, memory: float | None) -> None:
    limits = Limits(macs=macs, params=params, memory=memory)
    fitting = [row for row in all_costs() if _fits(row, limits)]
    score = WATCHED.score
    assert isinstance(score, Watched)
    score.configs.clear()
    search = WATCHED
    if not fitting:
        with pytest.raises(BudgetError, match="smallest member has"):
            search.best(limits)
        return
    found = search.best(limits)
    assert not METER.exceeded(found.config, limits)
    assert found.config in score.configs
    most = max(row[1] for row in fitting)
    least = 0.9 * (macs if most >= 0.9 * macs else most)
    for config in score.configs:
        assert least <= TINY.cost(config).macs <= macs
        assert not METER.exceeded(config, limits)


def _fits(row: tuple[Config, int, int, int], limits: Limits) -> bool:
    values = dict(zip(("macs", "params", "memory"), row[1:], strict=True))
    return all(values[name] <= limit for name, limit in limits.given.items())


LIMITS = {
    "macs": st.floats(3e4, 4e5),
    "params": st.none() | st.floats(1.5e3, 1e4),
    "memory": st.none() | st.floats(1e6, 4.5e6),
}


@given(**LIMITS)
@settings(max_examples=25, deadline=None)
def test_only_members_close_below_the_limit_are_scored(
    macs: float, params: float | None, memory: float | None
) -> None:
    check_limits(macs, params, memory)


@pytest.mark.slow
@given(**LIMITS)
@settings(max_examples=1000, deadline=None)
def test_only_members_close_below_a_thousand_limits_are_scored(
    macs: float, params: float | None, memory: float | None
) -> None:
    check_limits(macs, params, memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "mobilenetv3", "mobilenetv2"])
def test_large_spaces_have_members_close_below_every_limit(name: str) -> None:
    space = SPACES[name]()
    search = Search(Meter(space), options=QUICK)
    low, high = (space.cost(config).macs for config in (space.smallest, space.largest))
    for limit in np.linspace(low, high, 60):
        found = search.best(Limits(macs=float(limit)))
        assert 0.9 * limit <= found.costs.macs <= limit


def test_a_limit_above_the_largest_member_gives_the_largest() -> None:
    found = Search(METER, options=QUICK).best(Limits(macs=1e9))
    assert found.config == TINY.largest


def test_impossible_limits_name_the_smallest_member() -> None:
    cost = TINY.cost(TINY.smallest)
    with pytest.raises(
        BudgetError, match=r"macs 1000.*smallest member has 53\.3k.*exceeds macs 1000"
    ) as error:
        Search(METER).best(Limits(macs=1000, params=1e9))
    assert "params" not in str(error.value).split("exceeds")[1]
    assert cost.macs == 53312


def test_memory_is_that_of_the_traced_member() -> None:
    step = TrainingStep(batch_size=8, slots=2)
    meter = Meter(TINY, step)
    config = TINY.sample(torch.Generator().manual_seed(0))
    family = fq.trace(TINY.member(config), torch.zeros(1, 1, 8, 8))
    cost = family.cost(family.whole, step)
    costs = meter.costs(config)
    assert (costs.macs, costs.params, costs.memory) == (cost.macs, cost.params, cost.memory)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet50", "mobilenetv3", "mobilenetv2"])
def test_memory_of_large_spaces_is_that_of_a_recorded_training_step(name: str) -> None:
    space = SPACES[name]()
    meter = Meter(space)
    generator = torch.Generator().manual_seed(0)
    for config in [space.sample(generator) for _ in range(3)]:
        count = measure(space.member(config), (torch.zeros(1, 3, 32, 32),), 32, {})
        assert meter.costs(config).memory == TrainingStep().memory(
            4 * space.cost(config).params, [count.saved]
        )


# --- the best member ----------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_evolution_finds_the_best_score_or_one_within_a_percent(share: float) -> None:
    limits = Limits(macs=share * TINY.cost(TINY.largest).macs)
    best = Search(METER, uneven, SearchOptions(strategy="exhaustive")).best(limits)
    found = Search(METER, uneven, SearchOptions(generations=15)).best(limits)
    assert best.score >= found.score >= 0.99 * best.score
    assert best.scored >= found.scored


def test_without_a_score_the_member_with_most_multiply_adds_is_found() -> None:
    limits = Limits(macs=1.5e5)
    found = Search(METER, options=SearchOptions(generations=5)).best(limits)
    assert found.costs.macs == max(row[1] for row in all_costs() if row[1] <= 1.5e5)


def test_equal_seeds_find_equal_members_and_leave_global_generators_alone() -> None:
    limits = Limits(macs=1.6e5)
    state = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    first, second = (Search(METER, uneven, replace(QUICK, seed=3)).best(limits) for _ in range(2))
    assert first == second
    assert np.random.get_state()[1].tolist() == state  # type: ignore[index, union-attr]


def test_progress_is_reported_after_every_generation() -> None:
    reports: list[tuple[int, int]] = []
    Search(METER, uneven, QUICK).best(
        Limits(macs=1.6e5), lambda done, total: reports.append((done, total))
    )
    assert reports == [(1, 2), (2, 2)]


def test_random_rejection_stays_within_its_tolerance() -> None:
    options = SearchOptions(strategy="random", tolerance=0.05)
    for share in (0.35, 0.5, 0.7):
        limit = share * TINY.cost(TINY.largest).macs
        found = Search(METER, options=options).best(Limits(macs=limit))
        assert 0.95 * limit <= found.costs.macs <= limit


def test_random_rejection_that_never_meets_a_limit_still_keeps_it() -> None:
    options = SearchOptions(strategy="random", tolerance=0.01, draws=1)
    limit = float(TINY.cost(TINY.smallest).macs)
    assert Search(METER, options=options).best(Limits(macs=limit)).config == TINY.smallest


def test_large_spaces_are_not_enumerated() -> None:
    search = Search(Meter(SPACES["mobilenetv3"]()), options=SearchOptions(strategy="exhaustive"))
    with pytest.raises(ConfigError, match="exhaustive search of mobilenetv3"):
        search.best(Limits(macs=10e6))


def test_the_best_members_come_first_and_differ() -> None:
    limits = Limits(macs=1.6e5)
    search = Search(METER, uneven, SearchOptions(generations=5))
    members = search.top(limits, 5)
    scores = [found.score for found in members]
    assert scores == sorted(scores, reverse=True)
    assert len({found.config for found in members}) == 5
    assert members[0] == search.best(limits)
    draws = Search(METER, uneven, SearchOptions(strategy="random")).top(limits, 5)
    assert len({found.config for found in draws}) == 5
    assert all(0.95 * 1.6e5 <= found.costs.macs <= 1.6e5 for found in draws)


def test_the_most_accurate_of_the_verified_members_is_chosen() -> None:
    limits = Limits(macs=1.6e5)
    measured: list[Config] = []

    def measure(config: Config) -> float:
        measured.append(config)
        return -float(uneven([config])[0])  # the opposite of the score

    options = SearchOptions(strategy="exhaustive", verified=5)
    search = Search(METER, uneven, options, measure)
    members = search.top(limits, 5)
    assert not measured
    best = search.best(limits)
    assert measured == [found.config for found in members]
    assert best == replace(members[4], accuracy=-members[4].score)


@pytest.mark.parametrize(
    "options", [SearchOptions("exhaustive", verified=0), SearchOptions("random", verified=5)]
)
def test_nothing_is_verified_without_a_number_or_a_score(options: SearchOptions) -> None:
    def measure(config: Config) -> float:
        raise AssertionError("nothing was to be measured")

    limits = Limits(macs=1.6e5)
    assert Search(METER, uneven, options, measure).best(limits) == Search(
        METER, uneven, options
    ).best(limits)


def test_unknown_strategies_are_refused() -> None:
    with pytest.raises(ConfigError, match="'guess' was asked for"):
        SearchOptions(strategy="guess")  # type: ignore[arg-type]


def test_without_pygad_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pygad", None)
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[search\]"):
        Search(METER, options=QUICK).best(Limits(macs=1e5))
    assert (
        Search(METER, options=replace(QUICK, strategy="random")).best(Limits(macs=1e5)).costs.macs
        <= 1e5
    )


def test_sampled_members_are_different_and_spread_over_multiply_adds() -> None:
    search = Search(METER)
    configs = search.sample(100, seed=1)
    assert len(set(configs)) == 100
    low, high = (TINY.cost(config).macs for config in (TINY.smallest, TINY.largest))
    places = [(TINY.cost(config).macs - low) / (high - low) for config in configs]
    assert min(places) < 0.15
    assert max(places) > 0.8
    assert configs == search.sample(100, seed=1)
