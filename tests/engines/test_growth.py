"""ProgFed over other methods: every engine agrees, and clients keep their state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.family.net import Pass
from fedquilt.fleets.availability import Trace
from fedquilt.methods import METHODS, FedAvg, FedRolex, HeteroFL, ProgFed, SplitMix
from fedquilt.round.federation import World
from tests.conftest import LOCAL, assert_same, with_local
from tests.engines.test_client_groups import LAYOUTS, played
from tests.growing import EXAMPLE, SIZES, ThreeBlocks, growing, moved, parts

OTHERS = sorted(set(LOCAL) - {"sequential"})
SHARES = (1.0, 0.5)
SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
INNER = {
    "fedavg": FedAvg(weighting="uniform"),
    "fedprox": METHODS["fedprox"](mu=0.5),
    "fednova": METHODS["fednova"](),
    "fedbn": METHODS["fedbn"](),
    "scaffold": METHODS["scaffold"](),
    "heterofl": HeteroFL(),
    "fedrolex": FedRolex(),
    "fedrescue": METHODS["fedrescue"](),
    "splitmix": SplitMix(base=0.25),
}
FOUR_BITS = fq.Link(codec=fq.links.Codec(bits=4, feedback=True, down=True))


def grown(name: str, **changes) -> ProgFed:
    """Return ProgFed over a method, with two rounds per stage. Stages 2 and 3 begin with a warm-up
    round.
    """
    inner = with_local(INNER[name], **{"batch_size": 4, "optimizer": SHARP, **changes})
    return ProgFed(over=inner, stage_rounds=2, warmup=1)


def both(play, make_data, method, **options):
    """Compare the sequential run with that of every other engine, over six rounds."""
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


@pytest.mark.parametrize(
    "link", [fq.Link.preset("lossy-mild"), FOUR_BITS], ids=["lossy-mild", "four bits"]
)
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_progfed_over_a_link_gives_the_same_numbers_on_every_engine(name, link, play, make_data):
    truth, others = both(play, make_data, grown(name), link=link)
    for other in others:
        assert_same(truth, other)


def quick(*chosen: tuple[str, str], names: list[str], settings: list[str]) -> list[Any]:
    """Return all pairs of a name and a setting, those that were not chosen marked as slow."""
    pairs = [(name, setting) for name in names for setting in settings]
    return [pytest.param(*pair, marks=() if pair in chosen else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(
    ("name", "norm"),
    quick(
        ("fedavg", "tracked"),
        ("fedrolex", "per_client-all"),
        names=["fedavg", "fedrolex", "splitmix"],
        settings=["tracked", "per_client", "post-own", "per_client-all"],
    ),
)
def test_norms_of_a_growing_model_give_the_same_numbers_on_every_engine(
    name, norm, play, make_data
):
    truth, others = both(play, make_data, grown(name, norm=norm))
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize(
    "optimizer", [SHARP, fq.optimizers.Adam(lr=0.01, weight_decay=1e-3)], ids=["sgd", "adam"]
)
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_kept_optimizers_of_a_growing_model_give_the_same_numbers_on_every_engine(
    name, optimizer, play, make_data
):
    fleet = fq.Fleet.of(SHARES, 4, 3)
    truth, others = both(
        play, make_data, grown(name, optimizer=optimizer, keep_optimizer=True), fleet=fleet
    )
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize(
    ("name", "strategy"),
    quick(
        ("fedrolex", "mixed"),
        ("fedavg", "layerwise"),
        names=["fedavg", "fedrolex"],
        settings=["end_to_end", "layerwise", "partial", "mixed", "random"],
    ),
)
def test_strategies_give_the_same_numbers_on_every_engine(strategy, name, play, make_data):
    method = replace(grown(name, norm="tracked"), strategy=strategy)
    truth, others = both(play, make_data, method)
    for other in others:
        assert_same(truth, other)


def test_the_net_of_a_frozen_member_is_built_inside_of_a_gradient():
    """A worker of a cluster builds nets when it trains them, which no check did before."""
    family = fq.trace(fq.with_stages(ThreeBlocks), EXAMPLE)
    member = family.member(family.at("stage2", ("stage2", "head2")).whole)
    weights = family.init(0)
    rest = {
        name: weights[name]
        for name in member.names
        if name in weights and name not in member.trainable
    }

    def loss(moving):
        outputs, _ = member.net(
            {**moving, **rest}, torch.ones_like(EXAMPLE), Pass(train=True, statistics="batch")
        )
        return outputs.square().sum()

    grads = torch.func.grad(loss)({name: weights[name] for name in member.trainable})
    assert parts(grads) == {"E2", "G2"}


# --- what clients keep --------------------------------------------------------------------------


def started(make_data, method: ProgFed, engine: str, shares=(1.0,), **options) -> fq.Run:
    """Return a run of six rounds that has not begun. Without a fleet, all four clients train."""
    family = growing()
    fleet = options.pop("fleet", None) or fq.Fleet.of(shares, 4, 4)
    how = fq.Evaluation(every=0)
    data = make_data(family, SIZES, labels=2)
    return fq.prepare(
        method.settled(6), family, data, fleet, engine, precision="fp64", evaluation=how, **options
    )


@pytest.mark.parametrize("engine", LOCAL)
def test_a_client_that_missed_a_stage_finds_the_values_that_it_kept(engine, make_data, tmp_path):
    """Client 0 trains in the first and the third stage. It returns with its first momentum."""
    trace = tmp_path / "trace.csv"
    trace.write_text("client,start,end\n0,0,2\n0,4,6\n1,0,\n2,0,\n3,0,\n")
    fleet = fq.Fleet.of((1.0,), 4, 4, availability=Trace(str(trace)))
    method = grown("fedavg", keep_optimizer=True, norm="per_client")
    run = started(make_data, method, engine, fleet=fleet)
    kept = run.train(2).server.memory[0, ""]
    assert parts(kept.slots["momentum"]) == {"E1", "G1"}
    assert parts(kept.weights) == {"E1"}  # norm statistics
    assert run.train(4).server.memory[0, ""] is kept
    assert parts(run.server.memory[1, ""].slots["momentum"]) == {"E1", "G1", "E2", "G2"}

    warm = run.train(5).server.memory[0, ""]  # E_3 and G_3 alone are trained
    assert parts(warm.slots["momentum"]) == {"E1", "G1", "E3", "G3"}
    assert moved(kept.slots["momentum"], warm.slots["momentum"]) == set()
    assert parts(warm.weights) == {"E1", "E2", "E3"}
    assert moved(kept.weights, warm.weights) == set()
    assert warm.steps == kept.steps + 2

    last = run.train(6).server.memory[0, ""]
    assert parts(last.slots["momentum"]) == {"E1", "G1", "E2", "E3", "G3"}
    assert moved(warm.slots["momentum"], last.slots["momentum"]) == {"E1", "E3", "G3"}
    assert moved(warm.weights, last.weights) == {"E1", "E2", "E3"}


@pytest.mark.parametrize("engine", LOCAL)
def test_error_feedback_survives_growth_and_warm_up(engine, make_data):
    """The codec's error of a frozen block stays unchanged until the block is sent again."""
    run = started(make_data, grown("fedavg"), engine, link=FOUR_BITS)
    before = run.train(2).server.memory[0, ""].slots
    warm = run.train(3).server.memory[0, ""].slots
    assert parts(before["residual"]) == {"E1", "G1"}
    assert all(value.any() for name, value in before["residual"].items() if name.endswith("weight"))
    assert moved(before["residual"], warm["residual"]) == set()
    assert parts(name for name, value in warm["residual"].items() if value.any()) == {
        "E1",
        "G1",
        "E2",
        "G2",
    }
    after = run.train(4).server.memory[0, ""].slots
    assert moved(warm["residual"], after["residual"]) == {"E1", "E2", "G2"}
    assert parts(after["received"]) == {"E1", "G1", "E2", "G2"}


@pytest.mark.parametrize("engine", LOCAL)
def test_moving_windows_keep_values_at_other_positions(engine, make_data):
    """FedRolex's window of half the channels moves by one in every round."""
    method = grown("fedrolex", keep_optimizer=True)
    run = started(make_data, method, engine, shares=(0.5,))
    cutter = run.world.family.cutter
    memories = [run.train(round).server.memory[0, ""] for round in range(1, 7)]
    for round, (old, new) in enumerate(pairwise(memories), start=1):
        client = run.fleet.client(0, round, 0, SIZES[0])
        (submodel,) = run.method.plan(replace(run.server, round=round), client, run.world)
        member = run.world.family.member(submodel)
        for name, value in old.slots["momentum"].items():
            same = {name: value}
            expected = cutter.overlay(
                {name: new.slots["momentum"][name].clone()},
                new.submodel.positions,
                same,
                old.submodel.positions,
            )
            if name in member.trainable:  # Positions inside of the window were trained again.
                here = cutter.narrow(
                    {name: new.slots["momentum"][name]}, new.submodel.positions, submodel.positions
                )
                expected = cutter.overlay(
                    expected, new.submodel.positions, here, submodel.positions
                )
            assert torch.equal(new.slots["momentum"][name], expected[name])
        assert set(member.trainable) <= set(new.slots["momentum"])
    assert parts(memories[-1].slots["momentum"]) == {"E1", "G1", "E2", "G2", "E3", "G3"}


# --- layouts, stacks and budgets ----------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["fedavg", "fedrescue"])
def test_every_layout_gives_the_same_numbers_through_growth_and_warm_up(
    name, layout, play, make_data
):
    family = growing()
    method, data = grown(name), make_data(family, SIZES)
    truth = play(method, family, data, shares=SHARES, rounds=6)
    assert_same(truth, played(method, family, data, layout, rounds=6, shares=SHARES))


def test_equal_clients_are_one_stack_in_every_stage(play, make_data):
    family = growing()
    run = play(grown("fedavg"), family, make_data(family, SIZES), engine="vectorized", rounds=6)
    assert [record.stacks for record in run.records] == [1] * 6


@pytest.mark.parametrize("kind", ["macs", "params", "memory"])
def test_bounds_hold_in_every_stage(kind, play, make_data):
    """A device that cannot hold the whole model trains more channels in early stages than in late
    ones.
    """
    family = growing()
    method = grown("heterofl")
    whole = family.cost(family.whole, method.training_step(World(family, precision="fp64")))
    bound = {"macs": whole.macs, "params": whole.params, "memory": whole.memory}[kind] / 2
    fleet = fq.Fleet.of((fq.Budget(**{kind: bound}),), 4, 4)
    run = play(method, family, make_data(family, SIZES), fleet=fleet, rounds=6)
    widths = []
    for round in (0, 5):
        client = run.fleet.client(0, round, 0, SIZES[0])
        (submodel,) = run.method.plan(replace(run.server, round=round), client, run.world)
        widths.append(submodel.arch.sizes["first.conv"])
    assert widths[0] == 4 > widths[1]
