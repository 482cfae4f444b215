"""ProgFed (Wang et al., ICML 2022): algorithm 1 line by line, what its strategies move, and what it
reduces to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import METHODS, FedAvg, FedRolex, HeteroFL, ProgFed
from fedquilt.round.link import Link
from fedquilt.round.training.schedules import Cosine, Steps
from tests.conftest import LOCAL, assert_same, start_of, with_local
from tests.growing import EXAMPLE, SIZES, ThreeBlocks, growing, moved, part_of, parts, plain

PLAIN = fq.optimizers.SGD(lr=0.1, momentum=0.0)
SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-2)
ADAM = fq.optimizers.Adam(lr=0.01, weight_decay=1e-2)
STAGES = (1, 1, 2, 2, 3, 3)  # The stage of each round of `prepared`
WARM = (False, False, True, False, True, False)


def method(over: fq.Method = FedAvg(weighting="uniform"), **changes) -> ProgFed:
    """Return ProgFed with two rounds for each of three stages; the first after growing is a
    warm-up.
    """
    local = {
        "batch_size": 4,
        "optimizer": changes.pop("optimizer", SHARP),
        **changes.pop("local", {}),
    }
    return ProgFed(**{"over": with_local(over, **local), "stage_rounds": 2, "warmup": 1, **changes})


def prepared(
    make_data, asked: ProgFed | None = None, engine: str = "sequential", **options
) -> fq.Run:
    """Return a run of six rounds that has not begun, of four clients that are all asked in every
    round.
    """
    family = growing()
    data = make_data(family, SIZES)
    fleet = options.pop("fleet", None) or fq.Fleet.of((1.0,), 4, 4)
    how = fq.Evaluation(every=0)
    chosen = (asked or method()).settled(6)
    return fq.prepare(
        chosen, family, data, fleet, engine, precision="fp64", evaluation=how, **options
    )


def job_of(run: fq.Run, client: int, round: int) -> fq.methods.api.Job:
    server = replace(run.server, round=round)
    device = run.fleet.client(client, round, 0, SIZES[client])
    (submodel,) = run.method.plan(server, device, run.world)
    return fq.methods.api.Job(device, submodel, round)


# --- algorithm 1 --------------------------------------------------------------------------------


class ByHand(nn.Module):
    """The blocks and heads of the net, run by the paper's equation 2."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        net = ThreeBlocks().double()
        self.blocks = nn.ModuleList([net.first, net.second, net.third])
        self.heads = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), net.out]).double()
        self.load(weights)

    def forward(self, x: Tensor, stage: int) -> Tensor:
        for block in self.blocks[:stage]:
            x = block(x)
        return self.heads[stage - 1](x.mean((2, 3)))

    def named(self) -> dict[str, Tensor]:
        """Return the weights by the names that they have in the server's state."""
        found = {}
        for place, (block, head) in enumerate(
            (("first", "stage1"), ("second", "stage2"), ("third", ""))
        ):
            found |= {
                f"{block}.{name}": value for name, value in self.blocks[place].named_parameters()
            }
            own = f"stage_heads.{head}.linear" if head else "out"
            found |= {
                f"{own}.{name}": value for name, value in self.heads[place].named_parameters()
            }
        return found

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in self.named().items():
                value.copy_(weights[name])

    def train_parts(self, wanted: set[str]) -> None:
        for name, value in self.named().items():
            value.requires_grad_(part_of(name) in wanted)
            value.grad = None


@pytest.mark.parametrize("kept", [False, True], ids=["fresh momentum", "kept momentum"])
@pytest.mark.parametrize("engine", LOCAL)
def test_algorithm_1_is_what_torch_computes_by_hand(engine, kept, make_data):
    """Six rounds with growth (lines 4 to 8), warm-up (12, 13), local steps (15 to 17) and the mean
    (20).
    """
    run = prepared(make_data, method(local={"keep_optimizer": kept}), engine)
    state = {name: value.clone() for name, value in run.server.weights.items()}
    clients = [ByHand(state) for _ in SIZES]
    optimizers = [
        torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-2) for net in clients
    ]
    for round, (stage, warm) in enumerate(zip(STAGES, WARM, strict=True)):
        blocks = {f"E{place}" for place in range(1, stage + 1)}
        new = {f"E{stage}", f"G{stage}"}
        total = dict.fromkeys(state, 0.0)
        for client, net in enumerate(clients):
            net.load(state)
            net.train_parts(new if warm else blocks | new)
            optimizer = optimizers[client]
            if not kept:
                optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9, weight_decay=1e-2)
            job = job_of(run, client, round)
            for rows in run.engine.batches(job, run.method.learner(job, run.world)):
                optimizer.zero_grad()
                F.cross_entropy(
                    net(run.data.inputs[rows], stage), run.data.targets[rows]
                ).backward()
                optimizer.step()
            total = {name: total[name] + value.detach() for name, value in net.named().items()}
        state = {name: value / len(clients) for name, value in total.items()}
        run.train(round + 1)
        for name, value in state.items():
            torch.testing.assert_close(
                run.server.weights[name], value, rtol=0, atol=1e-10, msg=f"{name}, {round}"
            )


@pytest.mark.parametrize("engine", LOCAL)
def test_lines_5_and_6_shared_blocks_are_bit_identical_across_growth(engine, make_data):
    """Growing changes nothing in the state: new blocks and heads are those of the start, old heads
    stay behind.
    """
    run = prepared(make_data, method(warmup=0), engine)
    start = {name: value.clone() for name, value in run.server.weights.items()}
    run.train(2)
    grown = dict(run.server.weights)
    assert moved(start, grown) == {"E1", "G1"}
    received = start_of(run, job_of(run, 0, 2)).state
    for name, value in received.items():
        assert torch.equal(value, (grown if part_of(name) == "E1" else start)[name])
    run.train(4)
    assert moved(start, run.server.weights) == {"E1", "G1", "E2", "G2"}
    assert moved(grown, run.server.weights) == {"E1", "E2", "G2"}


@pytest.mark.parametrize("optimizer", [SHARP, ADAM], ids=["momentum and decay", "adam"])
@pytest.mark.parametrize("engine", LOCAL)
def test_line_13_frozen_weights_and_their_optimizer_state_do_not_change(
    engine, optimizer, make_data
):
    run = prepared(make_data, method(optimizer=optimizer, local={"keep_optimizer": True}), engine)
    for before in (2, 4):  # rounds that are over when a warm-up begins
        run.train(before)
        weights = dict(run.server.weights)
        slots = {key: memory.slots for key, memory in run.server.memory.items()}
        run.train(before + 1)
        stage = STAGES[before]
        assert moved(weights, run.server.weights) == {f"E{stage}", f"G{stage}"}
        for key, memory in run.server.memory.items():
            assert set(memory.slots) == set(optimizer.slots)
            for slot, values in memory.slots.items():
                old = slots[key][slot]
                assert moved(old, values) == set()
                assert parts(set(values) - set(old)) == {f"E{stage}", f"G{stage}"}
                assert all(
                    value.any()
                    for name, value in values.items()
                    if name not in old and "conv.bias" not in name
                )


@pytest.mark.parametrize("engine", LOCAL)
def test_line_13_frozen_norm_statistics_do_not_change(engine, make_data):
    run = prepared(make_data, method(local={"norm": "tracked"}), engine).train(2)
    weights = dict(run.server.weights)
    run.train(3)
    assert moved(weights, run.server.weights) == {"E2", "G2"}
    changed = {
        name for name, value in weights.items() if not torch.equal(value, run.server.weights[name])
    }
    assert "second.norm.running_mean" in changed


def test_line_20_every_client_counts_alike(make_data):
    """One client has nine samples and one has four; the default method does not weight by that."""
    assert ProgFed().over == FedAvg(weighting="uniform")
    run = prepared(make_data, method(optimizer=PLAIN, warmup=0))
    trained = []
    for client in range(4):
        job = job_of(run, client, 0)
        learner = run.method.learner(job, run.world)
        trained.append(
            run.engine.train_client(
                job, learner, start_of(run, job), run.engine.batches(job, learner)
            )[0]
        )
    run.train(1)
    for name in trained[0]:
        mean = sum(state[name] for state in trained) / 4
        torch.testing.assert_close(run.server.weights[name], mean, rtol=0, atol=1e-12)


# --- T_s ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rounds", "stages", "changes", "expected"),
    [
        (2000, 4, {}, (250, 250, 250, 1250)),
        (1500, 3, {}, (250, 250, 1000)),
        (100, 4, {}, (12, 12, 12, 64)),
        (100, 4, {"stage_rounds": 25}, (25, 25, 25, 25)),
        (10, 3, {"stage_rounds": (2, 3)}, (2, 3, 5)),
        (10, 3, {"stage_rounds": [2, 3, 5]}, (2, 3, 5)),
        (3000, 4, {"warmup": 25}, (375, 375, 375, 1875)),
        (3075, 4, {"warmup": 25, "extra_warmup": True}, (375, 400, 400, 1900)),
        (14, 3, {"warmup": 2, "extra_warmup": True, "stage_rounds": (2, 3)}, (2, 5, 7)),
        (12, 3, {"warmup": 5, "extra_warmup": True, "strategy": "partial"}, (2, 2, 8)),
        (7, 1, {}, (7,)),
        (3, 3, {}, (1, 1, 1)),
    ],
)
def test_the_rounds_of_the_stages_add_up_to_those_of_the_run(rounds, stages, changes, expected):
    """T_s = T/2S for s < S; warm-up rounds are inside of T_s unless they are added."""
    settled = ProgFed(**changes).settled(rounds)
    assert settled.lengths(stages) == expected
    assert sum(expected) == rounds
    found = [settled.moment(round, stages).stage for round in range(rounds)]
    assert found == [stage for stage, length in enumerate(expected, start=1) for _ in range(length)]


def test_warm_up_rounds_are_the_first_of_each_stage_but_the_first():
    settled = ProgFed(stage_rounds=3, warmup=2).settled(9)
    assert [settled.moment(round, 3).warm for round in range(9)] == [False] * 3 + [
        True,
        True,
        False,
    ] * 2
    outside = ProgFed(stage_rounds=3, warmup=2, extra_warmup=True).settled(13)
    assert [outside.moment(round, 3).warm for round in range(13)] == [False] * 3 + [
        True,
        True,
        False,
        False,
        False,
    ] * 2


def test_a_run_that_is_continued_for_longer_grows_in_the_same_rounds(tmp_path, make_data, play):
    settled = ProgFed().settled(12)
    assert settled.rounds == 12
    assert settled.settled(100) == settled
    assert settled.lengths(3) == (2, 2, 8)
    assert [settled.moment(round, 3).stage for round in (1, 2, 4, 11, 99)] == [1, 2, 3, 3, 3]

    family = growing()
    data = make_data(family, SIZES)
    asked = with_local(ProgFed(stage_rounds=(1, 1)), batch_size=4)
    options = {"out": tmp_path / "run", "resume": True}
    play(asked, family, data, rounds=3, **options)
    longer = play(asked, family, data, rounds=5, **options)
    assert longer.method.rounds == 3
    assert [record.bytes_up for record in longer.records][2:] == [longer.records[2].bytes_up] * 3


# --- learning rates -----------------------------------------------------------------------------


def rates(asked: ProgFed, rounds: int) -> list[float]:
    """Return the learning rate of every round in units of the initial one."""
    settled = asked.settled(rounds)
    return [settled.lr(settled.moment(round, 3).round) / settled.lr(0) for round in range(rounds)]


HALVED = with_local(FedAvg(weighting="uniform"), schedule=Steps((1, 2), 0.5))


def test_the_schedule_runs_through_without_restart():
    assert rates(ProgFed(HALVED, stage_rounds=2, warmup=1), 6) == [1, 0.5, 0.25, 0.25, 0.25, 0.25]


def test_the_schedule_restarts_with_every_stage_on_request():
    asked = ProgFed(HALVED, stage_rounds=(2, 3), warmup=1, restart=True)
    assert rates(asked, 8) == [1, 0.5, 1, 0.5, 0.25, 1, 0.5, 0.25]


def test_warm_up_outside_of_the_budget_has_the_initial_rate_and_does_not_age_the_schedule():
    """The released code has a warm-up at the initial rate before T_s rounds of the schedule."""
    steps = with_local(FedAvg(weighting="uniform"), schedule=Steps((1, 2, 3, 4, 5), 0.5))
    asked = ProgFed(steps, stage_rounds=2, warmup=2, extra_warmup=True)
    assert rates(asked, 10) == [1, 0.5, 1, 1, 0.25, 0.125, 1, 1, 0.0625, 0.03125]


def test_warm_up_outside_of_the_budget_with_restart():
    asked = ProgFed(HALVED, stage_rounds=2, warmup=2, extra_warmup=True, restart=True)
    assert rates(asked, 10) == [1, 0.5, 1, 1, 1, 0.5, 1, 1, 1, 0.5]


def test_clients_step_with_the_rate_of_their_round(make_data):
    asked = method(over=HALVED, optimizer=PLAIN, restart=True)
    run = prepared(make_data, asked)
    found = [run.method.learner(job_of(run, 0, round), run.world).lr for round in range(6)]
    assert found == pytest.approx([0.1, 0.05] * 3)


def test_the_released_preset_is_that_of_the_code():
    released = ProgFed.preset("released")
    local = released.over.local
    assert local.optimizer == fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-4)
    assert local.schedule == Cosine(3000)
    assert local.keep_optimizer
    assert (released.over.weighting, released.warmup, released.extra_warmup, released.restart) == (
        "uniform",
        25,
        True,
        False,
    )


# --- reductions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize(
    "inner",
    [FedAvg(weighting="uniform"), HeteroFL(), FedRolex()],
    ids=lambda inner: type(inner).__name__,
)
def test_with_one_stage_it_is_the_method_itself(inner, engine, residual, play, make_data):
    inner = with_local(inner, batch_size=4, optimizer=SHARP)
    data = make_data(residual, SIZES, labels=2)
    options = {"shares": (1.0, 0.5), "engine": engine, "evaluation": fq.Evaluation(per_client=True)}
    alone = play(inner, residual, data, **options)
    grown = play(ProgFed(inner, stages=1), residual, data, **options)
    assert_same(alone, grown, atol=0.0)


@pytest.mark.parametrize("engine", LOCAL)
def test_end_to_end_is_the_method_itself(engine, play, make_data):
    inner = with_local(HeteroFL(), batch_size=4, optimizer=SHARP)
    data = make_data(growing(), SIZES, labels=2)
    options = {"shares": (1.0, 0.5), "engine": engine, "rounds": 3}
    alone = play(inner, plain(), data, **options)
    grown = play(ProgFed(inner, strategy="end_to_end"), growing(), data, **options)
    for name, value in alone.server.weights.items():
        assert torch.equal(value, grown.server.weights[name])
    assert [one.bytes_up for one in alone.records] == [one.bytes_up for one in grown.records]
    assert alone.accuracy == grown.accuracy


def test_the_whole_model_starts_with_the_weights_that_it_has_without_stages():
    for seed in (0, 3):
        without, grown = plain().init(seed), growing().init(seed)
        assert set(grown) - set(without) == {
            f"stage_heads.stage{stage}.linear.{kind}"
            for stage in (1, 2)
            for kind in ("weight", "bias")
        }
        assert all(torch.equal(grown[name], value) for name, value in without.items())


# --- what travels -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recorded(Link):
    """A perfect link that remembers the names of what went over it in each round."""

    received: dict[int, set[str]] = field(default_factory=dict)
    sent: dict[int, set[str]] = field(default_factory=dict)

    def down(self, payload, trip, *known):
        self.received.setdefault(trip.job.round, set()).update(payload.weights)
        return super().down(payload, trip, *known)

    def up(self, payload, trip, *known):
        self.sent.setdefault(trip.job.round, set()).update(payload.weights)
        return super().up(payload, trip, *known)


WHOLE_STAGES = [{"E1", "G1"}] * 2 + [{"E1", "E2", "G2"}] * 2 + [{"E1", "E2", "E3", "G3"}] * 2


@pytest.mark.parametrize("norm", ["batch", "tracked"])
@pytest.mark.parametrize("engine", LOCAL)
def test_a_stage_neither_receives_nor_sends_a_later_block(engine, norm, make_data):
    """In a warm-up all are received, and only the new block and head are sent."""
    link = Recorded()
    run = prepared(make_data, method(local={"norm": norm}), engine, link=link).train(6)
    family = run.world.family
    travelling = {*family.trainable, *(family.statistics if norm == "tracked" else ())}
    for round, stage in enumerate(STAGES):
        own = {name for name in travelling if part_of(name) in WHOLE_STAGES[round]}
        new = {name for name in own if part_of(name) in (f"E{stage}", f"G{stage}")}
        assert link.received[round] == own
        assert link.sent[round] == (new if WARM[round] else own)
        assert run.records[round].bytes_down == 4 * sum(
            8 * run.server.weights[name].numel() for name in own
        )


@pytest.mark.parametrize("engine", LOCAL)
def test_a_stage_does_not_read_a_later_block(engine, make_data):
    """Later blocks and heads may hold anything. NaN would reach every number that is computed from
    it.
    """
    run = prepared(make_data, method(warmup=0), engine)
    for round, stage in ((0, 1), (2, 2)):
        run.train(round)
        later = [f"{letter}{place}" for letter in "EG" for place in range(stage + 1, 4)]
        weights = {
            name: v * torch.nan if part_of(name) in later else v
            for name, v in run.server.weights.items()
        }
        spoilt = replace(run.server, weights=weights)
        kept = run.server
        run.server = spoilt
        run.train(round + 1)
        for name, value in run.server.weights.items():
            assert bool(value.isfinite().all()) == (part_of(name) not in later)
        run.server = replace(kept, round=round)
        run.records.pop()


# --- costs --------------------------------------------------------------------------------------

# Multiply-adds of a sample's forward pass: outputs × inputs × 9 × 16 positions, or outputs × inputs
CONV1, CONV2, CONV3, HEAD, OUT = 4 * 1 * 9 * 16, 4 * 4 * 9 * 16, 6 * 4 * 9 * 16, 4 * 4, 4 * 6


@pytest.mark.parametrize(
    ("round", "forward", "through", "first"),
    [
        (0, CONV1 + HEAD, CONV1 + HEAD, CONV1),
        (2, CONV1 + CONV2 + HEAD, CONV2 + HEAD, CONV2),
        (3, CONV1 + CONV2 + HEAD, CONV1 + CONV2 + HEAD, CONV1),
        (4, CONV1 + CONV2 + CONV3 + OUT, CONV3 + OUT, CONV3),
        (5, CONV1 + CONV2 + CONV3 + OUT, CONV1 + CONV2 + CONV3 + OUT, CONV1),
    ],
    ids=["stage 1", "warm-up of 2", "stage 2", "warm-up of 3", "stage 3"],
)
def test_a_real_step_costs_what_is_counted(round, forward, through, first, make_data):
    """A backward pass costs two forward ones, except that the first layer needs no gradient of its
    inputs.

    So in a warm-up there is none through the blocks that only feed the new one, and none of their
    weights.
    """
    run = prepared(make_data)
    job = job_of(run, 1, round)  # which has one batch of four samples
    learner = run.method.learner(job, run.world)
    member = run.world.family.member(job.submodel)
    assert (member.macs, member.trained_macs) == (forward, through)
    assert learner.macs(member, [4]) == 4 * (forward + 2 * through)
    start = start_of(run, job)
    (batch,) = run.engine.batches(job, learner)
    with FlopCounterMode(display=False) as counter:
        run.engine.train_client(job, learner, start, [batch])
    assert counter.get_total_flops() == 2 * 4 * (forward + 2 * through - first)


# --- Table 5 ------------------------------------------------------------------------------------

ALL = {"E1", "E2", "E3", "G3"}


@pytest.mark.parametrize(
    ("strategy", "trained", "run_by_clients"),
    [
        (
            "progressive",
            [{"E1", "G1"}, {"E1", "E2", "G2"}, ALL],
            [{"E1", "G1"}, {"E1", "E2", "G2"}, ALL],
        ),
        ("end_to_end", [ALL] * 3, [ALL] * 3),
        ("layerwise", [{"E1", "G3"}, {"E2", "G3"}, {"E3", "G3"}], [ALL] * 3),
        ("partial", [{"E1", "G3"}, {"E1", "E2", "G3"}, ALL], [ALL] * 3),
        (
            "mixed",
            [{"E1", "G1", "G3"}, {"E1", "E2", "G2", "G3"}, ALL],
            [ALL | {"G1"}, ALL | {"G2"}, ALL],
        ),
    ],
)
def test_table_5_the_weights_that_a_strategy_moves(strategy, trained, run_by_clients, make_data):
    link = Recorded()
    run = prepared(
        make_data, method(strategy=strategy, warmup=0, local={"norm": "tracked"}), link=link
    )
    for round, stage in enumerate(STAGES):
        before = dict(run.server.weights)
        run.train(round + 1)
        assert moved(before, run.server.weights) == trained[stage - 1]
        assert parts(link.sent[round]) == trained[stage - 1]
        assert parts(link.received[round]) == run_by_clients[stage - 1]


def test_table_5_random_draws_a_stage_each_round_until_the_whole_model_is_trained(make_data):
    asked = method(strategy="random", warmup=0, stage_rounds=(10, 10)).settled(24)
    family = growing()
    data = make_data(family, (4,))
    fleet = fq.Fleet.of((1.0,), 1, 1)
    how = fq.Evaluation(every=0)
    run = fq.prepare(asked, family, data, fleet, "sequential", precision="fp64", evaluation=how)
    # All stages are checked before the first round.
    assert {asked.variant(round, run.world)[0] for round in asked.turns(run.world)} == {
        "stage1",
        "stage2",
        "whole",
    }
    stages = [{"E1", "G1"}, {"E1", "E2", "G2"}, ALL]
    drawn = []
    for round in range(24):
        before = dict(run.server.weights)
        run.train(round + 1)
        drawn.append(moved(before, run.server.weights))
        shown = asked.status(round, run.world)
        assert shown == f"stage {1 + stages.index(drawn[-1])} of 3"
    assert all(found in stages for found in drawn)
    assert all(stage in drawn[:20] for stage in stages)
    assert drawn[:20] != sorted(drawn[:20], key=stages.index)
    assert drawn[20:] == [ALL] * 4


def test_end_to_end_shows_no_stages(make_data):
    run = prepared(make_data, method(strategy="end_to_end", warmup=0))
    assert [run.method.status(round, run.world) for round in (0, 5)] == ["", ""]


def test_table_5_mixed_adds_the_losses_of_both_heads(make_data):
    run = prepared(make_data, method(strategy="mixed", warmup=0, optimizer=PLAIN))
    job = job_of(run, 1, 0)
    learner = run.method.learner(job, run.world)
    (rows,) = run.engine.batches(job, learner)
    trained = run.engine.train_client(job, learner, start_of(run, job), [rows])[0]
    net = ByHand(run.server.weights)
    inputs, targets = run.data.inputs[rows], run.data.targets[rows]
    (F.cross_entropy(net(inputs, 1), targets) + F.cross_entropy(net(inputs, 3), targets)).backward()
    for name, value in net.named().items():
        if part_of(name) in ("E1", "G1", "G3"):
            torch.testing.assert_close(
                trained[name], (value - 0.1 * value.grad).detach(), rtol=0, atol=1e-12
            )


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rounds", "message"),
    [
        ({"stage_rounds": 3}, 6, "with 6 rounds, of which 6 are for the first 2 of 3 stages"),
        ({}, 2, "with 2 rounds, of which 2 are for the first 2 of 3 stages"),
        ({"stage_rounds": (2, 0)}, 6, "at least one is needed for each stage"),
        ({"stage_rounds": (2, 2, 2, 2)}, 8, r"\[2, 2, 2, 2\], rounds of 4 stages; the model has 3"),
        ({"stage_rounds": (2, 2, 3)}, 8, r"\[2, 2, 3\], which are 7 rounds; the run has 8"),
        (
            {"stage_rounds": 2, "warmup": 2},
            6,
            "warmup = 2, and a stage has 2 rounds.*Up to 1 would work",
        ),
        (
            {"stage_rounds": 2, "warmup": 3, "extra_warmup": True},
            10,
            "of which 10 are .* and warm-up.*shorter warmup",
        ),
    ],
)
def test_rounds_that_do_not_fit_the_stages_are_refused(changes, rounds, message, play, make_data):
    with pytest.raises(ConfigError, match=message):
        play(ProgFed(**changes), growing(), make_data(growing(), SIZES), rounds=rounds)


@pytest.mark.parametrize("over", [HeteroFL, "heterofl", None])
def test_progfed_needs_an_inner_method(over):
    with pytest.raises(ConfigError, match=r"over = .* was asked for; a method is needed"):
        ProgFed(over=over)


def test_one_name_is_no_growth(play, make_data):
    with pytest.raises(ConfigError, match="one name makes one stage, which is the whole module"):
        play(ProgFed(stages=["first"]), plain(), make_data(plain(), SIZES), rounds=4)


def test_a_model_grows_once():
    with pytest.raises(
        ConfigError, match=r"ProgFed was asked for over ProgFed.*Any other method would work"
    ):
        ProgFed(over=ProgFed())


def test_a_method_that_trains_pairs_of_nets_cannot_grow(play, make_data):
    """Neither one model nor a union of nets would work, so that the error names neither."""
    asked = ProgFed(over=METHODS["rafl"](), rounds=4)
    other = fq.trace(ThreeBlocks, EXAMPLE)
    for family in (growing(), fq.union({"knowledge": plain(), "private": other})):
        with pytest.raises(
            ConfigError,
            match=r"ProgFed was asked for over RaFL, whose clients train pairs.*cannot grow\. Any "
            r"other method would work over one model, and RaFL works by itself",
        ):
            play(asked, family, make_data(plain(), SIZES), rounds=4)


def test_a_missing_public_set_is_reported_by_both_methods(play, make_data):
    asked = ProgFed(over=METHODS["feddf"](), stage_rounds=1)
    data = replace(make_data(growing(), SIZES), public=None)
    with pytest.raises(ConfigError, match="ProgFed over FedDF was asked for, which needs at least"):
        play(asked, growing(), data, rounds=4)


def test_a_resume_with_other_stages_is_refused(tmp_path, play, make_data):
    data = make_data(growing(), SIZES)
    options = {"out": tmp_path / "run", "resume": True, "rounds": 6}
    play(method(), growing(), data, **options)
    for other, message in (
        (method(warmup=0), "method.warmup: 1 there, 0 here"),
        (method(stage_rounds=(1, 2)), r"method.stage_rounds.*: .* there"),
        (method(strategy="partial"), "method.strategy: progressive there, partial here"),
        (method(over=HeteroFL()), "method.over: FedAvg there, HeteroFL here"),
    ):
        with pytest.raises(ConfigError, match=message) as caught:
            play(other, growing(), data, **options)
        assert "Ask for what it was, or name another folder." in str(caught.value)
    two = fq.trace(fq.with_stages(ThreeBlocks, ["first", "third"]), torch.zeros(2, 1, 4, 4))
    with pytest.raises(ConfigError, match=r"model: \w+ there, \w+ here"):
        play(method(stage_rounds=4), two, data, **options)


def test_nested_nets_cannot_have_two_losses(play, make_data):
    inner = METHODS["fedrescue"]()
    with pytest.raises(
        ConfigError,
        match=r"strategy = 'mixed' over FedResCuE.*another strategy or a method without",
    ):
        play(method(over=inner, strategy="mixed"), growing(), make_data(growing(), SIZES), rounds=6)


def test_a_method_without_rounds_is_refused_with_a_remedy(make_data):
    with pytest.raises(
        ConfigError, match=r"without a number of rounds.*method.settled\(rounds\) gives it"
    ):
        fq.prepare(method(), growing(), make_data(growing(), SIZES), fq.Fleet.of((1.0,), 4, 4))
