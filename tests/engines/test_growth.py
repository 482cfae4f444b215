"""ProgFed over other methods: equal on every engine across growth and warm-up, and what clients keep survives both."""

from __future__ import annotations

from dataclasses import replace

import pytest

import fedquilt as fq
from fedquilt.methods import METHODS, FedAvg, FedRolex, HeteroFL, ProgFed, SplitMix
from tests.conftest import LOCAL, assert_same, with_local
from tests.growing import SIZES, growing

OTHERS = sorted(set(LOCAL) - {"sequential"})
SHARES = (1.0, 0.5)
SHARP = fq.SGD(lr=0.1, momentum=0.9, decay=1e-3)
INNER = {
    "fedavg": FedAvg(weighting="uniform"),
    "fedprox": METHODS["fedprox"](mu=0.5),
    "fednova": METHODS["fednova"](),
    "fedbn": METHODS["fedbn"](),
    "scaffold": METHODS["scaffold"](),
    "heterofl": HeteroFL(),
    "fedrolex": FedRolex(),
    "fedrescue": METHODS["fedrescue"](),
    "splitmix": SplitMix(base=0.5),
}
FOUR_BITS = fq.Link(codec=fq.Codec(bits=4, feedback=True, down=True))


def grown(name: str, **changes) -> ProgFed:
    """Return ProgFed over a method: two rounds of each stage, the first of stages 2 and 3 is a warm-up."""
    inner = with_local(INNER[name], **{"batch_size": 4, "optimiser": SHARP, **changes})
    return ProgFed(over=inner, stage_rounds=2, warmup=1)


def both(play, make_data, method, **options):
    """The sequential run, and that of every other engine, over six rounds."""
    family = growing()
    data = make_data(family, SIZES, labels=2)
    fleet = fq.Fleet.of(SHARES, 4, 4)
    asked = {"rounds": 6, "fleet": fleet, **options}
    truth = play(method, family, data, engine="sequential", **asked)
    return truth, [play(method, family, data, engine=name, **asked) for name in OTHERS]


@pytest.mark.parametrize("name", INNER)
def test_progfed_over_each_method_gives_the_same_numbers_on_every_engine(name, play, make_data):
    method = grown(name)
    truth, others = both(play, make_data, method, evaluation=fq.Evaluation(every=2, batch_size=10))
    assert [truth.method.status(round, truth.world) for round in range(6)] == [
        "stage 1 of 3",
        "stage 1 of 3",
        "stage 2 of 3, warm-up",
        "stage 2 of 3",
        "stage 3 of 3, warm-up",
        "stage 3 of 3",
    ]
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("link", [fq.Link.preset("lossy-mild"), FOUR_BITS], ids=["lossy-mild", "four bits"])
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_progfed_over_a_link_gives_the_same_numbers_on_every_engine(name, link, play, make_data):
    truth, others = both(play, make_data, grown(name), link=link)
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("norm", ["tracked", "local", "post-own", "local-all"])
@pytest.mark.parametrize("name", ["fedavg", "fedrolex", "splitmix"])
def test_norms_of_a_growing_model_give_the_same_numbers_on_every_engine(name, norm, play, make_data):
    truth, others = both(play, make_data, grown(name, norm=norm))
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("optimiser", [SHARP, fq.Adam(lr=0.01, decay=1e-3)], ids=["sgd", "adam"])
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_kept_optimizers_of_a_growing_model_give_the_same_numbers_on_every_engine(name, optimiser, play, make_data):
    fleet = fq.Fleet.of(SHARES, 4, 3)
    truth, others = both(play, make_data, grown(name, optimiser=optimiser, keep_optimizer=True), fleet=fleet)
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("strategy", ["end_to_end", "layerwise", "partial", "mixed", "random"])
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_strategies_give_the_same_numbers_on_every_engine(strategy, name, play, make_data):
    method = replace(grown(name, norm="tracked"), strategy=strategy)
    truth, others = both(play, make_data, method)
    for other in others:
        assert_same(truth, other)
