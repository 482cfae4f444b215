"""Quilts of small runs: the positions that methods train, asserted on the data that is drawn."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

import pytest

import fedquilt as fq
from fedquilt.axes import Positions
from fedquilt.errors import FedquiltError
from fedquilt.family.cut import prefix
from fedquilt.report.quilt import MAX_COLUMNS, StateReadError, quilt_of
from fedquilt.round import Record
from fedquilt.round.engine import Attendance
from tests.growing import growing
from tests.unit.report.conftest import record

ROUNDS = 8


@pytest.fixture
def prepared(perceptron, make_data):
    """Return a function that prepares a run of a method. No run is trained."""

    def prepare(method, shares=(0.5,), clients=2, cohort=2, **options):
        data = make_data(perceptron, (4,) * clients)
        fleet = fq.Fleet.of(shares, clients, cohort)
        return fq.prepare(method, perceptron, data, fleet, "sequential", **options)

    return prepare


def trained(quilt, axis):
    """Return the trained positions of every round, from the cells that are drawn."""
    columns = {}
    for cell in quilt.cells(axis):
        columns.setdefault(cell["first"], set()).update(range(cell["start"], cell["stop"]))
    return columns


def records(count=ROUNDS, **more):
    return [record(round, **more) for round in range(1, count + 1)]


def test_the_quilt_of_heterofl_is_a_prefix(prepared):
    quilt = quilt_of(prepared(fq.methods.HeteroFL()), records())
    (axis,) = quilt.axes
    half = set(range(axis.size // 2))
    assert trained(quilt, axis.name) == dict.fromkeys(range(1, ROUNDS + 1), half)


def test_the_quilt_of_fedrolex_is_a_diagonal_that_wraps(prepared):
    quilt = quilt_of(prepared(fq.methods.FedRolex()), records())
    (axis,) = quilt.axes
    assert axis.size <= ROUNDS, "the window must wrap within the rounds"
    width = axis.size // 2
    assert trained(quilt, axis.name) == {
        round: {(round - 1 + offset) % axis.size for offset in range(width)}
        for round in range(1, ROUNDS + 1)
    }


def test_random_cuts_differ_between_rounds_and_have_the_right_width(prepared):
    quilt = quilt_of(prepared(fq.methods.FedDropout(), clients=1, cohort=1), records())
    (axis,) = quilt.axes
    columns = trained(quilt, axis.name)
    assert {len(positions) for positions in columns.values()} == {axis.size // 2}
    assert len({tuple(sorted(positions)) for positions in columns.values()}) > 1


def test_base_nets_of_split_mix_have_parts_of_their_own(prepared):
    run = prepared(fq.methods.SplitMix(base=0.5), (0.5,), 2, 1)
    quilt = quilt_of(run, records())
    (axis,) = quilt.axes
    bases = {frozenset(positions) for positions in trained(quilt, axis.name).values()}
    half = axis.size // 2
    assert bases == {frozenset(range(half)), frozenset(range(half, axis.size))}


def test_counts_and_smallest_budget_of_a_cell(prepared):
    run = prepared(fq.methods.HeteroFL(), (1.0, 0.5))
    quilt = quilt_of(run, records(1))
    (axis,) = quilt.axes
    cells = {cell["start"]: cell for cell in quilt.cells(axis.name)}
    assert cells[0]["times"] == 2.0
    assert cells[0]["smallest"] == "share 0.5"
    assert cells[axis.size // 2]["times"] == 1.0
    assert cells[axis.size // 2]["smallest"] == "share 1"
    assert len(cells) == 2  # Positions with equal counts are one cell.
    assert quilt.times(axis.name) == [2] * (axis.size // 2) + [1] * (axis.size // 2)


def test_the_drawn_counts_are_those_of_a_trained_run(perceptron, make_data, play):
    """The round loop and the quilt call the same plans."""
    run = play(fq.methods.FedRolex(), perceptron, make_data(perceptron, (4, 4)), (0.5,), rounds=4)
    quilt = quilt_of(run, run.records)
    (axis,) = quilt.axes
    assert sum(quilt.times(axis.name)) == 4 * 2 * axis.size // 2


def test_late_refused_and_missing_updates_do_not_count(prepared):
    run = prepared(fq.methods.FedAvg(), (1.0,))
    asked = Attendance((0, 1), {}, {}, {1: "NaN"}, wire_down=1, wire_up=1)
    logged = [
        record(1, late=(0,)),
        record(2, late=(0, 1)),
        record(3, attendance=asked),
        record(4, attendance=Attendance((0, 1), {0: "?"}, {1: "?"}, {}, wire_down=1, wire_up=1)),
        record(5, missing=1),  # It is not known who.
    ]
    quilt = quilt_of(run, logged)
    (axis,) = quilt.axes
    assert {cell["first"]: cell["times"] for cell in quilt.cells(axis.name)} == {1: 1.0, 3: 1.0}
    assert quilt.omitted == (5,)
    assert [row["lost"] for row in quilt.lost] == [0.5, 1.0, 0.5, 1.0]


def test_positions_that_a_link_lost_do_not_count(prepared):
    link = fq.Link(fq.links.ColumnLoss(0.5))
    quilt = quilt_of(prepared(fq.methods.FedAvg(), (1.0,), link=link), records())
    (axis,) = quilt.axes
    share = sum(quilt.times(axis.name)) / (2 * ROUNDS * axis.size)
    assert 0 < share < 1
    assert quilt.arrived.sum() < quilt.planned.sum()


def test_many_rounds_are_drawn_in_bounded_columns(prepared):
    run = prepared(fq.methods.FedRolex(), clients=1, cohort=1)
    quilt = quilt_of(run, records(3 * MAX_COLUMNS))
    (axis,) = quilt.axes
    assert quilt.is_binned
    cells = quilt.cells(axis.name, all_rounds=True)
    assert len({cell["first"] for cell in cells}) == MAX_COLUMNS
    total = sum(
        cell["times"] * (cell["last"] - cell["first"] + 1) * (cell["stop"] - cell["start"])
        for cell in cells
    )
    assert total == pytest.approx(sum(quilt.times(axis.name)), rel=1e-2)
    assert {cell["last"] for cell in quilt.cells(axis.name)} == set(range(1, MAX_COLUMNS + 1))


@dataclass(frozen=True)
class ByWeight(fq.methods.Method):
    """Clients train the channels with the largest weights."""

    def plan(self, server, client, world):
        rows = server.weights["first.weight"].abs().sum(1)
        member = prefix(self.fit(client.budget, world))
        (axis,) = member.index
        kept = rows.topk(len(member.index[axis])).indices.tolist()
        index = fq.axes.Index({axis: Positions.chosen(sorted(kept))})
        return [replace(member, index=index)]


def test_positions_of_a_plan_that_reads_weights_are_recorded(prepared, monkeypatch):
    run = prepared(ByWeight(), clients=4, cohort=2)
    plans = []
    monkeypatch.setattr(ByWeight, "plan", planning(ByWeight.plan, plans))
    run.train(3)
    recorded = [Record.from_dict(json.loads(json.dumps(item.to_dict()))) for item in run.records]
    assert [item.plans for item in recorded] == [item.plans for item in run.records]
    quilt = quilt_of(prepared(ByWeight(), clients=4, cohort=2), recorded)
    (axis,) = quilt.axes
    expected = {}
    for round, submodel in plans[:6]:
        expected.setdefault(round + 1, set()).update(submodel.index[axis.name])
    assert trained(quilt, axis.name) == expected
    assert quilt.recorded

    # A plan that is too long is left out, and the quilt says so.
    monkeypatch.setattr("fedquilt.round.observed_state.MAX_PLAN_BYTES", 10)
    run.train(4)
    assert set(run.records[-1].plans.values()) == {()}
    quilt = quilt_of(run, run.records)
    assert quilt.unrecorded == 2
    assert sorted(trained(quilt, axis.name)) == [1, 2, 3]


def test_recorded_plans_that_do_not_fit_the_model_are_refused(prepared):
    run = prepared(ByWeight())
    run.train(1)
    (axis,) = run.records[0].plans[0][0].index
    for index in ({"none": [[0, 1]]}, {axis: [[0, 99]]}, {axis: [[5, 10**30]]}):
        plain = json.loads(json.dumps(run.records[0].to_dict()))
        for plan in plain["plans"].values():
            plan[0]["index"] = index
        with pytest.raises(FedquiltError):
            quilt_of(run, [Record.from_dict(plain)])


def planning(plan, seen):
    """Return a plan that notes its results with their round."""

    def noting(self, server, client, world):
        submodels = plan(self, server, client, world)
        seen.extend((server.round, submodel) for submodel in submodels)
        return submodels

    return noting


def test_plans_that_do_not_read_the_state_are_not_recorded(prepared):
    run = prepared(fq.methods.FedRolex(), clients=4, cohort=2)
    run.train(2)
    assert [item.plans for item in run.records] == [None, None]
    assert "plans" not in run.records[0].to_dict()


def test_a_plan_that_reads_weights_and_was_not_recorded_has_no_quilt(prepared):
    run = prepared(ByWeight())
    with pytest.raises(StateReadError, match="ByWeight depends on the weights"):
        quilt_of(run, records(1))


def test_the_size_of_a_growing_model_is_that_of_its_stages(make_data):
    family = growing()
    data = make_data(family, (4, 4))
    fleet = fq.Fleet.of((1.0,), 2, 2)
    method = fq.methods.ProgFed(stages=3).settled(6)
    quilt = quilt_of(fq.prepare(method, family, data, fleet, "sequential"), records(6))
    sizes = [row["params"] for row in quilt.growth]
    assert quilt.grows
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    assert sizes[-1] == family.member(family.whole).count


def test_the_size_of_other_models_stays(prepared):
    assert not quilt_of(prepared(fq.methods.HeteroFL(), (1.0, 0.5), 4, 1), records()).grows
