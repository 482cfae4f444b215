"""FedDF, DS-FL and Fed-ET on every engine: float64, three rounds, 1e-9; over links, and with coded
predictions.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.methods import DSFL, METHODS, FedDF, FedET
from fedquilt.methods.dsfl import PREDICTIONS
from fedquilt.methods.prototypes import Prototypes
from fedquilt.round.training.server import ServerTraining
from tests.conftest import assert_same
from tests.engines.test_links import LINKS, LOSSY

RAGGED = (7, 4, 9, 5, 8, 4)  # with batches of 4: tails of 3, 0, 1 (joined), 1 (joined), 0, 0
SHARES = (1.0, 0.5, 0.25)
NUM_PUBLIC = 13  # One is held back, and batches of 4 are dropped or joined at the end
LOCAL = fq.LocalTraining(
    batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
)
FEW_STEPS = ServerTraining(fq.optimizers.SGD(lr=0.05), batch_size=5, steps=6, check_every=3)
KINDS = ("feddf", "dsfl", "fedet")
ENGINES = {
    "vectorized": lambda data: "vectorized",
    **{
        f"recorded-{layout}": lambda data, layout=layout: Vectorized(
            data, precision="fp64", record=True, layout=layout
        )
        for layout in ("alone", "grouped", "stack")
    },
    "ray": lambda data: "ray",
}
QUICK = ("vectorized",)  # The others run in `make test-all`.
FEW_ENGINES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in ENGINES
]


def distilling(name: str, **settings) -> Prototypes:
    prototypes = (0.5, 0.25) if name == "fedet" else SHARES
    usual = {"local": LOCAL, "prototypes": prototypes, "server_training": FEW_STEPS}
    return METHODS[name](**{**usual, **settings})


@pytest.fixture
def compare(make_data, play):
    """Play three rounds on the sequential engine and on another, and compare them."""

    def compare(
        method: fq.Method, family: fq.Family, engine: str = "vectorized", **options
    ) -> fq.Run:
        data = make_data(family, RAGGED, labels=2, public=NUM_PUBLIC)
        fleet = fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True)
        options = {"fleet": fleet, "rounds": 3, **options}
        truth, other = (
            play(method, family, data, engine=one, **options)
            for one in ("sequential", ENGINES[engine](data))
        )
        assert_same(truth, other)
        for mine, theirs in zip(truth.records, other.records, strict=True):
            assert (mine.server_macs, mine.server_steps) == (
                theirs.server_macs,
                theirs.server_steps,
            )
            assert mine.link_seconds == theirs.link_seconds
        return truth

    return compare


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("engine", FEW_ENGINES)
@pytest.mark.parametrize(
    "family", ["residual", pytest.param("language", marks=pytest.mark.slow)], indirect=True
)
def test_three_rounds_are_the_same_on_every_engine(name, engine, family, compare):
    """Clients of DS-FL learn from predictions from the second round on."""
    method = distilling(name)
    run = compare(method, family, engine)
    before = method.init(run.world)
    moved = {
        n for n, weight in run.server.weights.items() if not torch.equal(weight, before.weights[n])
    }
    scopes = {net.scope for net in method.nets(run.world)} | (
        {"server/"} if name == "fedet" else set()
    )
    if name == "dsfl":
        assert float(run.server.extras[PREDICTIONS].sum()) > 0
    assert {scope for scope in scopes if any(n.startswith(scope) for n in moved)} == scopes


@pytest.mark.parametrize("link", ["perfect", "everything"])
@pytest.mark.parametrize("engine", FEW_ENGINES)
def test_public_samples_drawn_for_each_round_are_the_same_on_every_engine(
    engine, link, residual, compare
):
    compare(
        distilling("dsfl", samples=7), residual, engine, link=LINKS.get(link, fq.Link()), rounds=4
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        ServerTraining(fq.optimizers.Adam(lr=0.01), batch_size=4, steps=6, check_every=2),
        ServerTraining(
            fq.optimizers.SGD(lr=0.05), batch_size=128, steps=4, check_every=2, stop_by="labels"
        ),
        ServerTraining(
            fq.optimizers.SGD(lr=0.05),
            batch_size=5,
            steps=7,
            check_every=2,
            patience=9,
            schedule="cosine",
        ),
    ],
    ids=["adam", "labels", "cosine"],
)
def test_every_way_to_train_the_server_is_the_same_on_every_engine(name, how, residual, compare):
    compare(distilling(name, server_training=how), residual)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "tracked"},
        {"norm": "post"},
        {"masked": "client"},
        {"crop": 1, "flip": True, "epochs": 2},
    ],
    ids=["tracked", "post", "masked", "augmented"],
)
def test_local_settings_give_the_same_numbers_on_every_engine(name, changes, residual, compare):
    compare(distilling(name).with_local(**changes), residual)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("engine", FEW_ENGINES)
@pytest.mark.parametrize(
    "link",
    [
        "everything",
        *(pytest.param(link, marks=pytest.mark.slow) for link in ("lossy-mild", "lossy")),
    ],
)
def test_links_that_lose_packets_give_the_same_numbers_on_every_engine(
    name, engine, link, residual, compare
):
    """Predictions get lost as a whole, in both directions."""
    compare(distilling(name), residual, engine, link=LINKS.get(link) or fq.Link.preset(link))


@pytest.mark.parametrize("engine", FEW_ENGINES)
def test_a_client_whose_predictions_were_lost_trains_on_its_own_samples_alone(
    engine, perceptron, compare
):
    """Nine of ten columns get lost, so that most payloads do."""
    compare(
        distilling("dsfl"),
        perceptron,
        engine,
        link=fq.Link(loss=fq.links.ColumnLoss(0.9)),
        rounds=4,
    )


CODECS = {
    "eight bits": fq.links.Codec(bits=8),
    "both ways": fq.links.Codec(bits=8, down=True),
    "half": fq.links.Codec(bits=4, keep=0.5),
}


@pytest.mark.parametrize("codec", CODECS)
def test_coded_predictions_are_the_same_on_every_engine_and_smaller(codec, perceptron, compare):
    link = fq.Link(codec=CODECS[codec])
    coded, plain = (
        compare(distilling("dsfl", coded=one), perceptron, link=link) for one in (True, False)
    )
    for mine, theirs in zip(coded.records, plain.records, strict=True):
        # Clients, rows, classes, float64
        assert theirs.bytes_up == theirs.bytes_down == 5 * NUM_PUBLIC * 3 * 8
        assert mine.bytes_up < theirs.bytes_up / 2
        assert (mine.bytes_down < theirs.bytes_down) == CODECS[codec].down
    assert not torch.equal(coded.server.extras[PREDICTIONS], plain.server.extras[PREDICTIONS])


def test_coded_predictions_over_a_link_that_loses_are_the_same_on_every_engine(perceptron, compare):
    link = fq.Link(loss=LOSSY, codec=fq.links.Codec(bits=8, down=True))
    compare(distilling("dsfl", coded=True), perceptron, link=link)


@pytest.mark.slow
@pytest.mark.parametrize("method", [FedDF(), DSFL(), FedET()], ids=KINDS)
def test_default_settings_run_on_both_engines(method, perceptron, make_data, play):
    """In float32, with Adam and five prototypes. Two of them have one hidden channel each."""
    data = make_data(perceptron, RAGGED, public=NUM_PUBLIC)
    for engine in ("sequential", "vectorized"):
        run = play(method, perceptron, data, SHARES, engine, precision="fp32")
        assert all(bool(weight.isfinite().all()) for weight in run.server.weights.values())
        assert set(run.accuracy) == {"1.0", "0.5", "0.25"}


@pytest.mark.parametrize("name", KINDS)
def test_runs_of_two_seeds_share_an_engine(name, perceptron, make_data):
    """Public samples that the server trains on are those of the seed."""
    data, fleet = make_data(perceptron, RAGGED, public=NUM_PUBLIC), fq.Fleet.of(SHARES, 6, 4)
    options = {"precision": "fp64", "evaluation": fq.Evaluation(every=0)}
    method = distilling(name)
    first = fq.prepare(method, perceptron, data, fleet, "vectorized", **options).train(2)
    again = fq.prepare(method, perceptron, data, fleet, first.engine, seed=3, **options).train(2)
    own = fq.prepare(method, perceptron, data, fleet, "vectorized", seed=3, **options).train(2)
    assert_same(own, again, atol=0)
    other = replace(data, public=-data.public)
    moved = fq.prepare(method, perceptron, other, fleet, first.engine, seed=3, **options).train(2)
    alone = fq.prepare(method, perceptron, other, fleet, "vectorized", seed=3, **options).train(2)
    assert_same(alone, moved, atol=0)


def test_a_lesson_trains_the_whole_stack_if_one_by_one_would_be_its_fastest_layout(
    make_data, residual
):
    """Clients are stacked by the layout of their own steps. A lesson may prefer another."""
    data = make_data(residual, (8,) * 6, labels=2, public=NUM_PUBLIC)
    method = distilling("dsfl", prototypes=(0.5,))
    options = {"fleet": fq.Fleet.of((0.5,), 6, 6), "precision": "fp64"}
    truth = fq.prepare(method, residual, data, engine="sequential", **options).train(3)

    engine = Vectorized(data, precision="fp64", record=True, layout="stack")
    run = fq.prepare(method, residual, data, engine=engine, **options)
    public = run.engine.on_public(run.world)
    public.layout = "alone"
    run.train(3)

    assert_same(truth, run)
    lessons = {shape for shape in public.groups.idle if shape.learner.teacher == PREDICTIONS}
    assert {(shape.count > 1, shape.layout) for shape in lessons} == {(True, "grouped")}
    assert not public.groups.refused
