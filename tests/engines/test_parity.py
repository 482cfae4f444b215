"""Every method on the vectorized engine against the sequential one: float64, two rounds, 1e-9.

Tests also check how many stacks a round has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.family.norms import NORM_POLICIES
from fedquilt.methods import (
    METHODS,
    FedAvg,
    FedDropout,
    FedRolex,
    HeteroFL,
    LocalOnly,
    SplitMix,
    api,
)
from fedquilt.models import TransformerLM
from fedquilt.round.federation import World
from fedquilt.round.ranking import ranked
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import (
    MaskedCrossEntropy,
    Proximal,
    TaskLoss,
    Wrapping,
    together,
)
from fedquilt.round.training.regions import Between
from fedquilt.round.training.view import View
from fedquilt.terms import Job, Server
from tests.conftest import (
    CUTTING,
    LOCAL,
    QUICK_METHODS,
    assert_same,
    assert_same_grades,
    with_local,
)

OTHERS = sorted(set(LOCAL) - {"sequential"})
RAGGED = (7, 4, 9, 5, 8, 4)  # with batches of 4: tails of 3, 0, 1 (joined), 1 (joined), 0, 0
SHARES = (1.0, 0.5, 0.25)
SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)


def both(play, method, family, data, **options):
    """Compare the sequential run with that of every other engine."""
    truth = play(method, family, data, engine="sequential", **options)
    return truth, [play(method, family, data, engine=name, **options) for name in OTHERS]


@pytest.mark.parametrize("name", QUICK_METHODS)
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_every_method_gives_the_same_numbers_on_every_engine(name, family, play, make_data):
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data = make_data(family, RAGGED, labels=2)
    fleet = fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True)
    truth, others = both(
        play,
        method,
        family,
        data,
        fleet=fleet,
        evaluation=fq.Evaluation(per_client=True, batch_size=10),
    )
    assert truth.server.round == 2
    moved = [
        not torch.equal(w, method.init(truth.world).weights[n])
        for n, w in truth.server.weights.items()
    ]
    assert any(moved) or truth.method.personal  # what is compared is not the initial state
    for other in others:
        assert_same(truth, other)
        assert all(r.stacks <= 5 for r in other.records)


@pytest.mark.parametrize("on", ["test", "validation"])
@pytest.mark.parametrize("norm", ["batch", "post"])
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_base_nets_sorted_by_validation_are_the_same_on_every_engine(
    family, norm, on, play, make_data
):
    """Every share is evaluated with the same nets. One client has a single sample."""
    data = make_data(family, (7, 4, 9, 5, 1, 4), labels=2).with_validation(0.3)
    method = with_local(SplitMix(base=0.25, sort=True), batch_size=4, optimizer=SHARP, norm=norm)
    how = fq.Evaluation(per_client=True, batch_size=10, on=on)
    truth, others = both(play, method, family, data, shares=SHARES, evaluation=how)
    arranged_truth = ranked(truth.federation, truth.server, truth.engine)
    for other in others:
        assert_same(truth, other)
        theirs = ranked(other.federation, other.server, other.engine)
        torch.testing.assert_close(
            dict(theirs.weights), dict(arranged_truth.weights), rtol=0, atol=1e-9
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": fq.optimizers.Adam(lr=0.01, weight_decay=1e-3)},
        {"optimizer": fq.optimizers.AdamW(lr=0.01)},
        {"optimizer": fq.optimizers.SGD(lr=0.1, momentum=0.9, nesterov=True, clip=0.5)},
        {"epochs": 2, "last_batch": "drop"},
        {"last_batch": "merge"},
        {"crop": 2, "flip": True},
        {"norm": "tracked"},
        {"norm": "per_client"},
        {"masked": "batch"},
        {"schedule": fq.schedules.Steps((1,), 0.1)},
        {
            "epochs": 2,
            "within_round": fq.schedules.WithinRound(warmup_share=0.4, shape="cosine", final=0.1),
        },
    ],
    ids="-".join,
)
def test_every_local_setting_gives_the_same_numbers_on_every_engine(
    changes, residual, play, make_data
):
    method = with_local(FedRolex(), **{"batch_size": 4, "optimizer": SHARP, **changes})
    truth, others = both(
        play, method, residual, make_data(residual, RAGGED, labels=2), shares=SHARES
    )
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize(
    "method",
    [
        FedRolex(overlap=0.5),
        FedRolex(offset=3, shift=2),
        FedRolex.preset("released-settings"),
        FedDropout.preset("released-settings"),
        HeteroFL.preset("released"),
        METHODS["sheterofl"].preset("released"),
        METHODS["fedprox"](mu=0.5),
        METHODS["fednova"](mu=0.5),
        FedAvg(share=0.5, server_optimizer=api.ServerMomentum()),
        HeteroFL(server_optimizer=api.ServerAdam(), weighting="both"),
    ],
    ids=repr,
)
def test_every_variant_gives_the_same_numbers_on_every_engine(method, residual, play, make_data):
    method = with_local(method, batch_size=4)
    truth, others = both(
        play, method, residual, make_data(residual, RAGGED, labels=3), shares=SHARES
    )
    for other in others:
        assert_same(truth, other)


def test_tied_weights_stay_tied_on_every_engine(play, make_data):
    """The embedding is also the output layer, so that the class axis is the vocabulary's."""
    options = {
        "max_length": 5,
        "width": 8,
        "depth": 1,
        "heads": 2,
        "head_dim": 4,
        "hidden": 12,
        "tied": True,
    }
    family = fq.trace(lambda: TransformerLM(11, **options), torch.zeros(2, 5, dtype=torch.int64))
    data = make_data(family, RAGGED, labels=3)
    truth, others = both(play, with_local(FedRolex(), batch_size=4), family, data, shares=SHARES)
    assert "head.weight" not in truth.server.weights
    for run in (truth, *others):
        assert_same(truth, run)
        model = run.deploy(fq.Budget(share=0.5))
        assert model.head.weight is model.token.weight


# --- learners of several phases, and slots that are kept ----------------------------------------


@dataclass(frozen=True)
class TwoPhases(HeteroFL):
    """A method that first trains the inner half of a net, and then the rest.

    The first phase has the loss of the nested net, the second that of the whole net. Momentum is
    kept.
    """

    def learner(self, job: Job, world: World) -> Learner:
        phases = (
            Phase(TaskLoss(share=0.5), Between(0, 0.5)),
            Phase(MaskedCrossEntropy(), Between(0.5, 1.0)),
        )
        return replace(super().learner(job, world), phases=phases, keep_slots=True)


@pytest.mark.parametrize("optimizer", [SHARP, fq.optimizers.Adam(lr=0.01)], ids=["sgd", "adam"])
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_two_phases_and_kept_slots_give_the_same_numbers(optimizer, family, play, make_data):
    method = with_local(TwoPhases(), batch_size=4, optimizer=optimizer)
    truth, others = both(play, method, family, make_data(family, RAGGED), shares=SHARES, rounds=3)
    assert any(memory.slots for memory in truth.server.memory.values())
    # rounds, batches of 7 samples by 4, phases
    assert truth.server.memory[0, ""].steps == 3 * 2 * 2
    for other in others:
        assert_same(truth, other)


# --- stacks -------------------------------------------------------------------------------------


def test_equal_clients_are_one_stack_whatever_their_data(residual, play, make_data):
    run = play(FedAvg(), residual, make_data(residual, RAGGED), engine="vectorized")
    assert [record.stacks for record in run.records] == [1, 1]
    assert [r.stacks for r in play(FedAvg(), residual, make_data(residual, RAGGED)).records] == [
        6,
        6,
    ]


@pytest.mark.parametrize(
    "method", [HeteroFL(), FedRolex(), FedDropout(), METHODS["sheterofl"](), METHODS["local"]()]
)
def test_each_member_is_one_stack(method, residual, play, make_data):
    run = play(method, residual, make_data(residual, RAGGED, labels=2), SHARES, engine="vectorized")
    assert [record.stacks for record in run.records] == [3, 3]


def test_a_memory_bound_splits_stacks_and_keeps_the_numbers(residual, make_data):
    method, data = with_local(HeteroFL(), batch_size=4), make_data(residual, RAGGED)
    fleet, how = fq.Fleet.of((1.0,), 6, 6), fq.Evaluation(batch_size=8)
    runs = []
    cost = residual.cost(residual.whole, fq.methods.api.TrainingStep(4, 1))
    # float64; old and new weights and momentum, and what was received
    one = 2 * (cost.memory + 3 * cost.bytes)
    for memory in (1 << 30, 2 * one, 1):
        run = fq.prepare(
            method, residual, data, fleet, "vectorized", precision="fp64", evaluation=how
        )
        run.engine.memory = memory
        runs.append(run.train(2))
    assert [run.records[0].stacks for run in runs] == [1, 3, 6]
    for run in runs[1:]:
        assert_same(runs[0], run)


def test_learners_of_equal_clients_are_equal_and_hashable(residual):
    world = World(residual)
    for method in [cls() for cls in CUTTING.values()]:
        server = method.init(world)
        jobs = [
            Job(client, method.plan(server, client, world)[0], 0)
            for client in (
                fq.methods.api.Client(id, fq.Budget(share=0.5), size)
                for id, size in ((0, 5), (1, 9))
            )
        ]
        one, other = (method.learner(job, world) for job in jobs)
        assert one == other
        assert hash(one) == hash(other)
        assert one is not other
    assert (
        Phase(moves=Between(0, 0.5))
        == Phase(moves=Between(0, 0.5))
        != Phase(moves=Between(0, 0.25))
    )


@pytest.mark.parametrize("norm", ["post-own", "per_client-all"])
@pytest.mark.parametrize(
    "method",
    [HeteroFL(), FedRolex(shift=2), SplitMix(base=0.25)],
    ids=lambda method: type(method).__name__,
)
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_norms_of_each_client_give_the_same_numbers_on_every_engine(
    method, norm, family, play, make_data
):
    method = with_local(method, batch_size=4, optimizer=SHARP, norm=norm)
    fleet = fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True)
    how = fq.Evaluation(batch_size=3)
    truth, others = both(
        play, method, family, make_data(family, RAGGED), fleet=fleet, evaluation=how, rounds=3
    )
    assert bool(truth.server.memory) == (norm == "per_client-all")
    for other in others:
        assert_same(truth, other)


# --- evaluation and calibration -----------------------------------------------------------------


@pytest.mark.parametrize("norm", NORM_POLICIES)
def test_evaluation_is_the_same_on_every_engine(norm, residual, play, make_data):
    method = with_local(HeteroFL(), batch_size=4, norm=norm)
    how = fq.Evaluation(batch_size=7, per_client=True)  # 24 test samples: a tail of 3
    data = replace(make_data(residual, RAGGED), test_domains=torch.arange(24) % 5 // 3)  # 15 and 9
    data = replace(data, public=torch.randn(8, 1, 6, 6, generator=torch.Generator().manual_seed(1)))
    truth, others = both(play, method, residual, data, shares=SHARES, evaluation=how)
    assert set(truth.accuracy) == {"1.0", "0.5", "0.25"}
    assert set(truth.summary["metrics"]) >= {"accuracy/0", "accuracy/1"}
    for other in others:
        for mine, theirs in zip(other.records, truth.records, strict=True):
            assert_same_grades(mine, theirs)


def test_calibration_is_the_same_on_every_engine(residual, make_data):
    data, statistics = make_data(residual, RAGGED), []
    weights = {name: value.double() for name, value in residual.init(3).items()}
    (submodel,) = FedRolex().deploy(Server(6, {}), fq.Budget(share=0.5), World(residual))
    for kind in LOCAL.values():
        engine = kind(data, precision="fp64")
        cut = residual.cutter.gather(weights, submodel, residual.trainable)
        federation = fq.methods.api.Federation(World(residual, precision="fp64"), FedRolex())
        statistics.extend(engine.calibrate(federation, [(submodel, cut)], batch_size=9))
    assert statistics[0].keys() == set(residual.statistics)
    for other in statistics[1:]:
        torch.testing.assert_close(dict(other), statistics[0], rtol=0, atol=1e-12)


# --- objectives of a user where phases are drawn ------------------------------------------------


@dataclass(frozen=True)
class Penalized(Wrapping):
    """Another objective plus a penalty on all weights, also those outside of a nested net."""

    def __call__(self, view: View) -> Tensor:
        return self.objective(view) + 0.1 * sum(
            view.weights[name].square().sum() for name in view.member.trainable
        )


@dataclass(frozen=True)
class WithHalf(Wrapping):
    """Another objective plus the loss of the nested net of half the model."""

    def nets(self, member):
        return tuple(dict.fromkeys((*self.objective.nets(member), member.nested(0.5))))

    def passes(self, member):
        return together((*self.objective.passes(member), *TaskLoss(0.5).passes(member)))

    def __call__(self, view: View) -> Tensor:
        return self.objective(view) + 0.5 * view.loss(view.logits(view.member.nested(0.5)))


@pytest.mark.parametrize(
    "objective",
    [Proximal(mu=0.5), Penalized(), WithHalf(), Penalized(Proximal(mu=0.5))],
    ids=["proximal", "penalty", "second net", "penalty and proximal"],
)
@pytest.mark.parametrize("name", ["fjord", "fedrescue", "sheterofl"])
def test_objectives_that_read_more_than_a_nested_net_give_the_same_numbers(
    name, objective, perceptron, make_data, play
):
    """The gradient of a penalty is not zero outside of the nested net whose loss it is added to.

    FedResCuE does not move weights there, but their gradients count where the norm of the gradient
    is bounded.
    """
    optimizer = fq.optimizers.SGD(lr=0.1, momentum=0.9, clip=0.5)
    method = with_local(
        METHODS[name](), batch_size=4, epochs=2, optimizer=optimizer, objective=objective
    )
    truth, others = both(play, method, perceptron, make_data(perceptron, RAGGED), shares=(1.0, 0.5))
    plain = play(
        with_local(method, objective=None),
        perceptron,
        make_data(perceptron, RAGGED),
        shares=(1.0, 0.5),
    )
    assert not torch.equal(
        truth.server.weights["first.weight"], plain.server.weights["first.weight"]
    )
    for other in others:
        assert_same(truth, other)


# --- what clients keep, by global position ------------------------------------------------------


@pytest.mark.parametrize("engine", LOCAL)
def test_a_window_that_returns_finds_the_values_that_the_client_kept(
    engine, residual, make_data, play
):
    """Positions outside of the window keep their values. The window has half of all channels."""
    method = with_local(FedRolex(shift=4, weighting="data"), batch_size=4, norm="per_client")
    data = make_data(residual, (8,))
    family = residual
    runs = [
        play(method, family, data, shares=(0.5,), engine=engine, rounds=rounds) for rounds in (1, 2)
    ]
    once, twice = (run.server.memory[0, ""] for run in runs)
    eight = [
        axis
        for axis, size in family.layout.sizes.items()
        if size == 8 and axis in once.submodel.index
    ]
    assert eight
    for axis in eight:
        assert list(once.submodel.index[axis]) == [0, 1, 2, 3]
        assert list(twice.submodel.index[axis]) == list(range(8))
    again = family.cutter.narrow(twice.weights, twice.submodel.index, once.submodel.index)
    for name, before in once.weights.items():
        dims = family.layout.dims[name]
        # axes of four channels were trained again in the second round
        if all(dim in eight for dim in dims):
            assert torch.equal(again[name], before)


@pytest.mark.parametrize("engine", LOCAL)
def test_cuts_of_an_earlier_state_are_not_reused(engine, residual, make_data):
    """A run may be set back to an earlier state. Cuts of the later state must not be used."""
    run = fq.prepare(
        with_local(HeteroFL(), norm="per_client"),
        residual,
        make_data(residual, (6, 6)),
        fq.Fleet.of((1.0, 0.5), 2, 2),
        engine,
        precision="fp64",
    )
    first = run.server
    weights = dict(run.train(1).server.weights)
    run.deploy(fq.Budget(share=0.5), client=1)
    run.server = type(first)(first.round, first.weights)
    again = run.train(1).server.weights
    for name, value in weights.items():
        assert torch.equal(again[name], value)


def test_the_age_of_momentum_does_not_split_a_stack(residual, make_data):
    """Clients that trained a different number of steps stack, unless the optimizer counts them."""
    data = make_data(residual, (4, 8, 8))
    for optimizer, stacks in ((fq.optimizers.SGD(), 1), (fq.optimizers.Adam(), 2)):
        run = fq.prepare(
            with_local(TwoPhases(), optimizer=optimizer, batch_size=4),
            residual,
            data,
            fq.Fleet.of((1.0,), 3, 3),
            "vectorized",
            precision="fp64",
        )
        assert [record.stacks for record in run.train(2).records] == [1, stacks]


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("method", [HeteroFL(), METHODS["fedbn"](), METHODS["splitmix"](base=0.25)])
def test_runs_of_several_seeds_share_an_engine(method, engine, residual, make_data, play):
    """Initial weights, batches, cohorts and random draws are those of each run's seed."""
    data, fleet, how = (
        make_data(residual, RAGGED),
        fq.Fleet.of(SHARES, 6, 3),
        fq.Evaluation(every=0),
    )
    method = with_local(method, batch_size=4)
    first = fq.prepare(
        method, residual, data, fleet, engine, precision="fp64", evaluation=how
    ).train(2)
    again = fq.prepare(method, residual, data, fleet, first.engine, seed=3, evaluation=how).train(2)
    own = fq.prepare(
        method, residual, data, fleet, engine, seed=3, precision="fp64", evaluation=how
    ).train(2)
    assert_same(own, again, atol=0.0)


def test_clients_that_send_nothing_are_stacked_whatever_their_classes(residual, make_data, play):
    """Clients with the same classes are sent together, also if they send no weights."""
    method, data = (
        with_local(LocalOnly(), batch_size=4, masked="client"),
        make_data(residual, (8, 8, 8)),
    )
    targets = torch.arange(24) % 4
    targets[16:] = 3  # the last client's
    truth, others = both(play, method, residual, replace(data, targets=targets))
    for other in others:
        assert_same(truth, other)


def test_the_whole_model_is_always_evaluated(residual, make_data, play):
    """Results are listed from the widest net, by share of channels also for other budgets."""
    quarter = residual.count(residual.fit(fq.Budget(share=0.25)))
    fleet = fq.Fleet.of([fq.Budget(params=quarter), fq.Budget(share=0.5)], 2, 2)
    run = play(HeteroFL(), residual, make_data(residual, (6, 6)), fleet=fleet)
    assert list(run.accuracy) == ["1.0", "0.5", "0.25"]
