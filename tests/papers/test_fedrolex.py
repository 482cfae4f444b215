"""FedRolex (Alam et al., NeurIPS 2022): one test an equation or claim."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import FedRolex, HeteroFL
from fedquilt.methods.fedrolex import rounds_to_cover_random, rounds_to_cover_rolling
from fedquilt.models import preresnet18
from fedquilt.round.federation import World
from fedquilt.round.fold import client_weight
from fedquilt.round.merge import Mean
from fedquilt.terms import Job, Payload, Server, Update
from tests.conftest import with_local

FIVE = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)


class FiveNodes(nn.Module):
    """Figure 1's layer of five nodes a, b, c, d, e."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 5, bias=False)
        self.out = nn.Linear(5, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.layer(x)))


@pytest.fixture(scope="module")
def five_nodes() -> fq.Family:
    return fq.trace(FiveNodes, torch.zeros(2, 1))


def plan(method, family, share: float, round: int) -> fq.methods.api.Submodel:
    client = fq.methods.api.Client(0, fq.Budget(share=share), 1)
    (submodel,) = method.plan(Server(round, {}), client, World(family))
    return submodel


def nodes(method, family, share: float, round: int) -> str:
    (kept,) = plan(method, family, share, round).index.values()
    return "".join("abcde"[position] for position in kept)


# --- section 3.2: what is extracted -------------------------------------------------------------


def equation_4(round: int, share: float, size: int) -> set[int]:
    start, count = round % size, math.floor(share * size)
    if start + count <= size:
        return set(range(start, start + count))
    return set(range(start, size)) | set(range(start + count - size))


@pytest.mark.parametrize("share", [1.0, 0.75, 0.5, 0.25])
def test_equation_4(share, residual):
    sizes = residual.layout.sizes
    assert {sizes[axis] for axis, _ in residual.whole.widths} == {4, 8}
    for round in (0, 1, 3, 5, 7, 8, 100):
        for axis, kept in plan(FedRolex(), residual, share, round).index.items():
            assert set(kept) == equation_4(round, share, sizes[axis])


def test_figure_1_three_rounds_of_two_clients(five_nodes):
    large, small = FedRolex(), FedRolex(offset=2)
    found = [
        (nodes(large, five_nodes, 0.8, round), nodes(small, five_nodes, 0.6, round))
        for round in range(3)
    ]
    assert found == [("abcd", "cde"), ("bcde", "dea"), ("cdea", "eab")]


def test_figure_1_a_and_b_from_the_large_e_from_the_small_c_and_d_averaged(five_nodes):
    world = World(five_nodes)
    old = Server(0, {name: torch.zeros_like(value) for name, value in five_nodes.init().items()})
    fold = FedRolex().fold(old, world)
    for id, (offset, share, value) in enumerate([(0, 0.8, 1.0), (2, 0.6, 3.0)]):
        submodel = plan(FedRolex(offset=offset), five_nodes, share, 0)
        cut = five_nodes.cutter.gather(old.weights, submodel, five_nodes.trainable)
        sent = Payload(
            submodel, {name: torch.full_like(weight, value) for name, weight in cut.items()}
        )
        fold.add(
            Update(
                Job(fq.methods.api.Client(id, fq.Budget(share=share), 1), submodel, 0),
                (sent,),
                steps=1,
            )
        )
    weights = fold.finish(old)[0]
    assert weights["layer.weight"].flatten().tolist() == [1, 1, 2, 2, 3]
    assert weights["out.weight"].tolist() == [[1, 1, 2, 2, 3]] * 2


@pytest.mark.parametrize("share", [0.75, 0.5, 0.25])
def test_every_channel_is_trained_equally_often(share, residual):
    """Over K rounds each of an axis' K channels is met floor(share·K) times."""
    sizes = residual.layout.sizes
    rounds = math.lcm(*(sizes[axis] for axis, _ in residual.whole.widths))
    met: dict[str, Counter[int]] = {}
    for round in range(rounds):
        for axis, kept in plan(FedRolex(), residual, share, round).index.items():
            met.setdefault(axis, Counter()).update(kept)
    for axis, counts in met.items():
        assert set(counts) == set(range(sizes[axis]))
        assert set(counts.values()) == {math.floor(share * sizes[axis]) * rounds // sizes[axis]}


def test_skips_stay_aligned_because_an_axis_has_one_window(residual):
    """Every weight that carries an axis is cut at the same positions: the cut net is the net
    without the others.
    """
    submodel = plan(FedRolex(), residual, 0.5, round=3)
    stem = submodel.index["stages.0.0"]
    state = residual.init(1)
    cut = residual.cutter.gather(state, submodel, ["stages.0.0.weight", "stages.0.1.body.4.weight"])
    assert torch.equal(cut["stages.0.0.weight"], state["stages.0.0.weight"][list(stem)])
    inner = submodel.index["stages.0.1.body.0"]
    assert torch.equal(
        cut["stages.0.1.body.4.weight"],
        state["stages.0.1.body.4.weight"][list(stem)][:, list(inner)],
    )


def test_the_released_code_rolls_backwards_and_takes_the_ceiling(five_nodes):
    released = FedRolex.preset("released-settings")
    assert released.shift == -1
    assert [nodes(released, five_nodes, 0.5, round) for round in range(3)] == ["abc", "eab", "dea"]
    assert nodes(FedRolex(), five_nodes, 0.5, 0) == "ab"


def test_a_transformers_cut_is_inside_each_head(language):
    """Heads stay whole in number; query and key share their window."""
    submodel = plan(FedRolex(), language, 0.5, round=1)
    (heads,) = {axis for axis in language.layout.axes if axis.endswith("heads")}
    assert heads not in submodel.index
    weights = language.cutter.gather(language.init(), submodel, ["blocks.0.attention.0.query.bias"])
    bias = language.init()["blocks.0.attention.0.query.bias"]
    # two of four, in both heads
    assert torch.equal(weights["blocks.0.attention.0.query.bias"], bias[[1, 2, 5, 6]])
    dims = {
        kind: language.axes[f"blocks.0.attention.0.{kind}.bias"]
        for kind in ("query", "key", "value")
    }
    assert dims["query"] == dims["key"] != dims["value"]


# --- section 3.2 and appendix A.2: how it is aggregated -----------------------------------------


def test_equation_10(residual, make_data, play):
    """One round of three clients, merged by a loop over every parameter."""
    method = with_local(FedRolex(), masked="", batch_size=4)
    data, shares = make_data(residual, (5, 6, 7)), (1.0, 0.5, 0.25)
    run = play(method, residual, data, shares, rounds=2)
    before = play(method, residual, data, shares, rounds=1)
    totals = {name: torch.zeros_like(weight) for name, weight in run.server.weights.items()}
    counts = {name: torch.zeros_like(weight) for name, weight in run.server.weights.items()}
    for id in range(3):
        client = run.fleet.client(id, 1, 0, data.size(id))
        submodel = method.plan(before.server, client, run.world)[0]
        alone = method.fold(before.server, run.world)
        run.engine.train(run.federation, before.server, [Job(client, submodel, 1)], alone)
        trained = alone.finish(before.server)[0]
        for name, weight in trained.items():
            mask = torch.ones([], dtype=torch.bool)
            for dim, rows in enumerate(residual.layout.positions(name, submodel.index)):
                row = torch.zeros(weight.shape[dim], dtype=torch.bool)
                row[list(rows)] = True
                mask = mask[..., None] & row
            totals[name] += torch.where(mask, weight, 0.0)
            counts[name] += mask
    for name, old in before.server.weights.items():
        expected = torch.where(counts[name] > 0, totals[name] / counts[name].clamp(min=1), old)
        torch.testing.assert_close(run.server.weights[name], expected, rtol=0, atol=1e-12)


def test_parameters_no_client_updated_stay_as_they_were(five_nodes, make_data, play):
    data = make_data(five_nodes, (4, 4))
    run = play(with_local(FedRolex(), masked=""), five_nodes, data, (0.4,), rounds=1)
    fresh = {name: value.double() for name, value in five_nodes.init(0).items()}
    assert torch.equal(run.server.weights["layer.weight"][2:], fresh["layer.weight"][2:])
    assert torch.equal(run.server.weights["out.weight"][:, 2:], fresh["out.weight"][:, 2:])
    assert not torch.equal(run.server.weights["out.weight"][:, :2], fresh["out.weight"][:, :2])


def test_no_client_weighting_by_default():
    assert FedRolex().weighting == "uniform"


@pytest.mark.parametrize(
    ("weighting", "expected"),
    # A linear layer of 5 nodes and 2 classes: 5 + 2 kernels; at 3 nodes 3 + 2.
    [
        ("uniform", (1, 1)),
        ("data", (10, 20)),
        ("model", (7, 5)),
        ("updates", (3, 4)),
        ("both", (21, 20)),
    ],
)
def test_appendix_a3_weightings(weighting, expected, five_nodes):
    found = []
    for share, size, steps in ((1.0, 10, 3), (0.6, 20, 4)):
        submodel = plan(FedRolex(), five_nodes, share, 0)
        sent = Payload(
            submodel, five_nodes.cutter.gather(five_nodes.init(), submodel, five_nodes.trainable)
        )
        found.append(
            client_weight(
                Update(
                    Job(fq.methods.api.Client(0, fq.Budget(share=1.0), size), submodel, 0),
                    (sent,),
                    steps,
                ),
                weighting,
                five_nodes.cutter,
            )
        )
    assert tuple(found) == expected
    assert isinstance(FedRolex(weighting=weighting).fold(Server(0, {}), World(five_nodes)), Mean)


# --- section 4.4: a server model larger than any client's ---------------------------------------


@pytest.mark.parametrize("gamma", [2, 4])
def test_a_server_larger_than_any_client_is_trained_in_all_channels(
    gamma, residual, make_data, play
):
    data = make_data(residual, (4, 4))
    runs = {
        kind: play(
            with_local(kind(), masked="", batch_size=4), residual, data, (1 / gamma,), rounds=8
        )
        for kind in (FedRolex, HeteroFL)
    }
    fresh = {name: value.double() for name, value in residual.init(0).items()}
    name = "stages.1.0.body.4.weight"  # eight outputs, eight inputs
    moved = {
        kind: (run.server.weights[name] != fresh[name]).flatten(2).any(2)
        for kind, run in runs.items()
    }
    assert moved[FedRolex].any(1).all()
    assert moved[FedRolex].any(0).all()
    kept = 8 // gamma
    assert int(moved[HeteroFL].sum()) == kept * kept
    assert moved[HeteroFL][:kept, :kept].all()


# --- appendix A.1: coverage ---------------------------------------------------------------------


@pytest.mark.parametrize("indices", [1, 2, 5, 16, 100])
def test_lemma_1_random_choice_takes_i_times_the_harmonic_number(indices):
    harmonic = sum(1 / k for k in range(1, indices + 1))
    assert rounds_to_cover_random(indices) == pytest.approx(indices * harmonic, abs=1e-6)


@pytest.mark.parametrize(("indices", "times"), [(2, 2), (5, 2), (4, 3)])
def test_lemma_2_against_monte_carlo(indices, times):
    draw, trials, found = random.Random(0), 4000, []
    for _ in range(trials):
        counts, rounds = [0] * indices, 0
        while min(counts) < times:
            counts[draw.randrange(indices)] += 1
            rounds += 1
        found.append(rounds)
    mean = sum(found) / trials
    error = (sum((x - mean) ** 2 for x in found) / trials / trials) ** 0.5
    assert rounds_to_cover_random(indices, times) == pytest.approx(mean, abs=4 * error)


def test_lemma_2_by_hand_for_one_and_two_indices():
    assert rounds_to_cover_random(1, 3) == pytest.approx(3, abs=1e-6)
    # Two of each of two faces: 2 tosses settle nothing; E = 4 + P(no 2-2 after 4) · 2 + … = 5.5.
    assert rounds_to_cover_random(2, 2) == pytest.approx(5.5, abs=1e-6)


@pytest.mark.parametrize("times", [1, 2, 5])
def test_rolling_needs_the_fewest_rounds_possible(times):
    for indices in (2, 5, 50):
        assert rounds_to_cover_rolling(indices, times) == indices * times
        assert rounds_to_cover_random(indices, times) > indices * times


def test_groups_move_on_when_the_channels_inside_them_have_come_round():
    """Four groups of two channels, an eighth of them at a time: in lockstep half of the pairs would
    never meet.
    """
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=4), nn.Flatten(), nn.Linear(8, 3)
    )
    family = fq.trace(net, torch.zeros(2, 3, 1, 1))
    seen = []
    for round in range(8):
        index = plan(FedRolex(), family, 1 / 8, round).index
        groups, inside = (next(iter(index[f"layer.0.{kind}"])) for kind in ("groups", "inside"))
        seen.append((groups, inside))
    assert seen == [(round // 2, round % 2) for round in range(8)]


# --- appendix A.4: overlap ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "overlap", "step"),
    [
        (0.8, 1.0, 1),  # FedRolex itself
        (0.8, 0.0, 1 + 4),
        (0.8, 0.5, 1 + 2),
        # 0.5 · 0.8 · 5 = 2, though the member has floor(2.5) = 2 nodes and 2 · 0.8 < 2
        (
            0.5,
            0.2,
            1 + 2,
        ),
        (0.6, 0.0, 1 + 3),  # 0.6 · 5 is 3 and not 2.999…
        (0.2, 0.5, 1),
    ],
)
def test_overlap_advances_by_one_and_the_floor_of_what_does_not_overlap(
    share, overlap, step, five_nodes
):
    method = FedRolex(overlap=overlap)
    for round in (0, 1, 2, 7):
        (kept,) = plan(method, five_nodes, share, round).index.values()
        assert next(iter(kept)) == (round * step) % 5


# --- appendix A.6: costs ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table_7() -> list[fq.family.Cost]:
    family = fq.trace(preresnet18, torch.zeros(2, 3, 32, 32))
    return [family.cost(family.fit(fq.Budget(share=share))) for share in FIVE]


def printed(numbers) -> list[float]:
    """Millions to six digits, as the paper rounded before it took its means."""
    return [float(f"{number / 1e6:.6g}") for number in numbers]


def test_table_7_parameters(table_7):
    counts = [cost.params for cost in table_7]
    assert counts[0] == 11_172_170
    assert counts[-1] == 44_510
    assert sum(counts) / 5 == 2_978_118
    assert printed(counts)[0] == 11.1722
    assert printed(counts)[-1] == 0.04451
    assert sum(printed(counts)) / 5 == pytest.approx(2.9781232, abs=1e-9)


def test_table_7_model_size(table_7):
    megabytes = [cost.bytes / 2**20 for cost in table_7]
    assert [round(megabytes[0], 2), round(sum(megabytes) / 5, 2), round(megabytes[-1], 2)] == [
        42.62,
        11.36,
        0.17,
    ]


def test_table_7_flops(table_7):
    """The paper counts our multiply-adds, four operations a normalized element, and the linear
    layer once more.
    """
    assert table_7[0].macs == 555_422_720
    # Of the 17 norms five see 64 channels of 32×32, and four each 128 of 16×16, 256 of 8×8, 512 of
    # 4×4.
    elements = 5 * 64 * 32**2 + 4 * 128 * 16**2 + 4 * 256 * 8**2 + 4 * 512 * 4**2
    flops = [
        cost.macs + share * (4 * elements + 512 * 10)
        for cost, share in zip(table_7, FIVE, strict=True)
    ]
    assert printed(flops)[0] == 557.656
    assert printed(flops)[-1] == 2.41318
    assert sum(printed(flops)) / 5 == pytest.approx(149.048384, abs=1e-9)


def test_the_papers_setting_is_a_preset():
    local = FedRolex.preset("paper").local
    assert (local.optimizer.lr, local.optimizer.momentum, local.optimizer.weight_decay) == (
        2e-4,
        0.9,
        5e-4,
    )
    assert (local.batch_size, local.epochs, local.crop, local.masked, local.norm.name) == (
        10,
        1,
        4,
        "client",
        "post",
    )
    assert [local.schedule(round) for round in (0, 799, 800, 1500)] == pytest.approx(
        [1, 1, 0.1, 0.01]
    )


@pytest.mark.parametrize("round", [1, 4, 9])
def test_a_device_gets_the_window_that_was_trained_last(round, residual):
    method, world = FedRolex(), World(residual)
    trained = plan(method, residual, 0.5, round - 1)
    assert method.deploy(Server(round, {}), fq.Budget(share=0.5), world) == (trained,)


def test_position_sets_never_depend_on_data(residual):
    """Table 1: compatible with secure aggregation; a plan knows the client's budget and the round,
    no more.
    """
    submodels = {
        FedRolex().plan(
            Server(3, {}),
            fq.methods.api.Client(id, fq.Budget(share=0.5), size),
            World(residual, seed=seed),
        )[0]
        for id, size, seed in ((0, 1, 0), (7, 100, 1), (9, 5, 2))
    }
    assert len(submodels) == 1


def test_many_meetings_need_not_overflow():
    """Lemma 2 for m = 500: each of ten indices is met 500 times after about 10 · (500 + a few
    deviations) rounds.
    """
    expected = rounds_to_cover_random(10, 500)
    assert 10 * 500 < expected < 10 * (500 + 3 * math.sqrt(500))


def test_a_server_larger_than_any_client_is_evaluated_whole(residual, make_data, play):
    """Figure 4 reports the server's model, which no client holds."""
    run = play(FedRolex(), residual, make_data(residual, (4, 4)), shares=(0.5,))
    assert set(run.accuracy) == {"0.5", "1.0"}


# --- appendix A.3: weighting by updates ---------------------------------------------------------


def by_hand(run: fq.Run, rounds: int, method: FedRolex) -> dict[str, Tensor]:
    """The mean of each cohort by all optimizer steps a client ever took; with `both`, times its
    kernels.
    """
    engine, world = run.engine, run.world
    server, taken = method.init(world), Counter()
    for played in range(rounds):
        sums = {name: torch.zeros_like(weight) for name, weight in server.weights.items()}
        counts = {name: torch.zeros_like(weight) for name, weight in server.weights.items()}
        for id in run.fleet.draw_cohort(played, 0):
            client = run.fleet.client(id, played, 0, engine.data.size(id))
            (submodel,) = method.plan(server, client, world)
            job, taken[id] = Job(client, submodel, played), taken[id] + math.ceil(client.size / 4)
            fold = method.fold(server, world)
            engine.train(run.federation, server, [job], fold)
            alone, weight = fold.finish(server)[0], taken[id]
            if method.weighting == "both":
                weight *= world.family.cutter.kernels(submodel.arch)
            for name in sums:
                rows = torch.meshgrid(
                    *(p.tensor for p in world.family.layout.positions(name, submodel.index)),
                    indexing="ij",
                )
                sums[name][rows] += weight * alone[name][rows]
                counts[name][rows] += weight
        weights = {
            n: torch.where(counts[n] > 0, sums[n] / counts[n], old)
            for n, old in server.weights.items()
        }
        server = Server(played + 1, weights)
    return dict(server.weights)


@pytest.mark.parametrize("weighting", ["updates", "both"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_updates_are_a_clients_optimizer_steps_over_all_rounds(
    weighting, engine, five_nodes, make_data, play
):
    """Two of four clients train one to three batches per round, so that their totals differ."""
    method = with_local(FedRolex(weighting=weighting), batch_size=4, masked="")
    data, fleet = make_data(five_nodes, (4, 8, 12, 4)), fq.Fleet.of((1.0, 0.6), 4, 2)
    run = play(method, five_nodes, data, fleet=fleet, engine=engine, rounds=3)
    cohorts = Counter(id for played in range(3) for id in fleet.draw_cohort(played, 0))
    assert max(cohorts.values()) > 1  # somebody came twice
    assert {id: memory.steps for (id, _), memory in run.server.memory.items()} == {
        id: times * math.ceil(data.size(id) / 4) for id, times in cohorts.items()
    }
    # a number each, no more
    assert not any(memory.weights or memory.slots for memory in run.server.memory.values())
    for name, weight in by_hand(run, 3, method).items():
        torch.testing.assert_close(run.server.weights[name], weight, rtol=0, atol=1e-12)


def test_steps_are_remembered_only_if_a_merge_weights_by_them(five_nodes, make_data, play):
    assert not play(FedRolex(), five_nodes, make_data(five_nodes, (4, 8))).server.memory
