"""The round loop: records with numbers computed by hand, lossy links, and client states."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

import fedquilt as fq
from fedquilt.axes import Index, Positions
from fedquilt.errors import SubmodelError, TrainingError
from fedquilt.methods import FedAvg, FedRolex, HeteroFL, LocalOnly
from fedquilt.round.federation import World
from fedquilt.round.link import PERFECT, Arrival, Link, Transmission
from fedquilt.terms import Server
from tests.conftest import LOCAL, assert_same, start_of, with_local


@pytest.mark.parametrize("engine", LOCAL)
def test_a_record_counts_bytes_clients_and_multiply_adds(engine, perceptron, play, make_data):
    method = fq.methods.HeteroFL(local=fq.LocalTraining(batch_size=4, epochs=2))
    data = make_data(perceptron, (5, 7))
    run = play(
        method, perceptron, data, (1.0, 0.5), engine=engine, evaluation=fq.Evaluation(every=2)
    )
    first, second = run.records
    whole, half = 4 * 6 + 6 + 6 * 3 + 3, 4 * 3 + 3 + 3 * 3 + 3
    assert first.clients == 2
    assert first.bytes_down == first.bytes_up == 8 * (whole + half)
    # epochs, forward + backward, samples
    assert first.macs == 2 * 3 * (5 * (4 * 6 + 6 * 3) + 7 * (4 * 3 + 3 * 3))
    assert (first.round, second.round) == (1, 2)
    assert not first.grades.accuracy
    assert set(second.grades.accuracy) == {"1.0", "0.5"}
    plain = [set(record.to_dict()) for record in run.records]
    base = {"round", "seconds", "clients", "bytes_down", "bytes_up", "macs", "loss"}
    assert plain == [base, base | {"accuracy", "metrics", "main"}]
    assert run.history == [record.to_dict() for record in run.records]


def test_the_loss_is_the_mean_of_the_clients_mean_losses(perceptron, play, make_data):
    """With a learning rate of almost nothing, it is the initial net's loss on each client's
    batches.
    """
    method = FedAvg(
        local=fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=1e-12, momentum=0.0))
    )
    run = play(method, perceptron, make_data(perceptron, (8, 4)), rounds=1)
    model = perceptron.module(perceptron.whole, run.server.weights)
    data = run.data
    losses = torch.nn.functional.cross_entropy(
        model(data.inputs), data.targets, reduction="none"
    ).detach()
    assert run.records[0].loss == pytest.approx(
        float(losses[:8].mean() + losses[8:].mean()) / 2, abs=1e-9
    )


def test_training_continues_from_the_last_round(residual, make_data, play):
    data, fleet = make_data(residual, (5, 6, 4)), fq.Fleet.of((1.0, 0.5), 3, 2, dynamic=True)
    method = with_local(FedRolex(), batch_size=4, norm="per_client")
    at_once = play(method, residual, data, fleet=fleet, rounds=3)
    in_parts = play(
        method, residual, data, fleet=fleet, rounds=1, evaluation=fq.Evaluation(every=0)
    )
    in_parts.train(3)
    in_parts.records[0] = replace(in_parts.records[0], grades=at_once.records[0].grades)
    assert_same(at_once, in_parts, atol=0)
    assert [record.round for record in in_parts.records] == [1, 2, 3]


def test_the_seed_decides(residual, make_data, play):
    data = make_data(residual, (5, 6))
    one, again, other = (play(FedAvg(), residual, data, seed=seed) for seed in (0, 0, 1))
    assert_same(one, again, atol=0)
    with pytest.raises(AssertionError):
        assert_same(one, other)


def test_watching_sees_every_round(perceptron, make_data, play):
    seen = []
    run = play(FedAvg(), perceptron, make_data(perceptron, (4,)), watch=seen.append)
    assert seen == run.records


# --- plans that do not fit ----------------------------------------------------------------------


@dataclass(frozen=True)
class Planned(FedAvg):
    """Hands every client these positions of the axis `first`."""

    positions: Positions = Positions.prefix(6)

    def plan(self, server, client, world):
        (submodel,) = super().plan(server, client, world)
        return [replace(submodel, index=Index({"first": self.positions}))]


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        (
            Positions.prefix(80),
            r"client 0 \(budget share 1\) was planned 80 channels .* 'first', which has 6",
        ),
        (
            Positions(((0, 3), (0, 3))),
            "6 channels with position 0 2 times on axis 'first', which has 6. Any 6 distinct",
        ),
        (Positions(((-1, 5),)), "6 channels with position -1 on axis 'first'"),
        (Positions.prefix(3), "its member has 6"),
    ],
)
@pytest.mark.parametrize("engine", LOCAL)
def test_a_plan_that_does_not_fit_names_client_and_axis(
    engine, positions, message, perceptron, play, make_data
):
    with pytest.raises(SubmodelError, match=message):
        play(Planned(positions=positions), perceptron, make_data(perceptron, (4,)), engine=engine)


def test_a_plan_for_a_scope_that_the_state_lacks_is_refused(perceptron, make_data, play):
    class Elsewhere(FedAvg):
        def plan(self, server, client, world):
            return [
                replace(submodel, scope="twin/") for submodel in super().plan(server, client, world)
            ]

    with pytest.raises(
        SubmodelError, match="was planned a net of the scope 'twin/'; the server's state has ''"
    ):
        play(Elsewhere(), perceptron, make_data(perceptron, (4,)))


def test_a_plan_on_an_axis_the_family_does_not_have_lists_those_it_has(perceptron):
    submodel = fq.methods.api.Submodel(perceptron.whole, Index({"nowhere": Positions.prefix(1)}))
    with pytest.raises(
        SubmodelError, match=r"client 3 was planned positions on axis 'nowhere'; axes here: first"
    ):
        perceptron.check(submodel, "client 3")


# --- links --------------------------------------------------------------------------------------


def test_a_perfect_link_changes_nothing_and_counts_bytes(perceptron):
    submodel = fq.methods.api.Submodel(perceptron.whole)
    payload = fq.methods.api.Payload(
        submodel, {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.float64)}
    )
    trip = Transmission(
        World(perceptron),
        fq.methods.api.Job(fq.methods.api.Client(0, fq.Budget(share=1.0), 1), submodel, 0),
    )
    for way in (PERFECT.down, PERFECT.up):
        arrival = way(payload, trip)
        assert arrival.payload is payload
        assert arrival.bytes == 12 * 4 + 2 * 8


@dataclass(frozen=True)
class Tailless(Link):
    """Loses the last kept channels of the axis `first`: so many on the way down, so many on the way
    up.
    """

    cutter: object = None
    lost_down: int = 0
    lost_up: int = 0

    def down(self, payload, trip, *known):
        return Arrival(
            self._cut(payload, self.lost_down if trip.job.client.id == 0 else 0), payload.bytes
        )

    def up(self, payload, trip, *known):
        return Arrival(
            self._cut(payload, self.lost_up if trip.job.client.id == 0 else 0), payload.bytes
        )

    def _cut(self, payload, lost):
        if not lost:
            return payload
        kept = payload.submodel.index["first"]
        index = Index(
            {**payload.submodel.index, "first": kept.take(Positions.prefix(len(kept) - lost))}
        )
        weights = self.cutter.narrow(payload.weights, payload.submodel.index, index)
        return fq.methods.api.Payload(replace(payload.submodel, index=index), weights)


def with_link(method, family, data, engine, rounds=1, **lost) -> fq.Run:
    fleet = fq.Fleet.of((1.0,), data.num_clients, data.num_clients)
    link = Tailless(cutter=family.cutter, **lost)
    how = fq.Evaluation(every=0)
    return fq.prepare(
        method, family, data, fleet, engine, precision="fp64", evaluation=how, link=link
    ).train(rounds)


@pytest.mark.parametrize("engine", LOCAL)
def test_lost_updates_do_not_count(engine, perceptron, make_data):
    method, data = fq.methods.HeteroFL(local=fq.LocalTraining()), make_data(perceptron, (5, 5))
    whole, lossy = (with_link(method, perceptron, data, engine, lost_up=lost) for lost in (0, 2))
    bias, lost = whole.server.weights["first.bias"], lossy.server.weights["first.bias"]
    torch.testing.assert_close(lost[:4], bias[:4], rtol=0, atol=1e-14)
    # The last two are client 1's alone: twice the mean, less what client 0 had trained there.
    client = whole.fleet.client(0, 0, 0, 5)
    start = method.init(whole.world)
    fold = method.fold(start, whole.world)
    perfect = replace(whole.federation, link=PERFECT)
    whole.engine.train(
        perfect,
        start,
        [fq.methods.api.Job(client, method.plan(start, client, whole.world)[0], 0)],
        fold,
    )
    own = fold.finish(start)[0]["first.bias"]
    torch.testing.assert_close(lost[4:], 2 * bias[4:] - own[4:], rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", LOCAL)
def test_lost_values_are_taken_from_memory_or_the_initial_weights(engine, perceptron, make_data):
    """With nothing in memory the missing tail starts from the initial weights, as if it had never
    been trained.
    """
    method = with_local(FedAvg(), optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
    data = make_data(perceptron, (5, 5))
    run = with_link(method, perceptron, data, engine, rounds=2, lost_down=2)
    job = fq.methods.api.Job(
        run.fleet.client(0, 2, 0, 5), method.plan(run.server, None, run.world)[0], 2
    )
    start = start_of(run, job)
    fresh = method.init(run.world).weights
    assert torch.equal(start.state["first.bias"][:4], run.server.weights["first.bias"][:4])
    assert torch.equal(start.state["first.bias"][4:], fresh["first.bias"][4:])
    assert torch.equal(start.state["last.weight"][:, 4:], fresh["last.weight"][:, 4:])
    assert not torch.equal(run.server.weights["first.bias"][4:], fresh["first.bias"][4:])


@pytest.mark.parametrize("engine", sorted(set(LOCAL) - {"sequential"}))
@pytest.mark.parametrize(
    "method",
    [FedAvg(), HeteroFL(), LocalOnly(), FedRolex(local=fq.LocalTraining(norm="per_client"))],
)
def test_engines_agree_on_lossy_links(engine, method, perceptron, make_data):
    data = make_data(perceptron, (5, 7, 5), labels=2)
    runs = [
        with_link(method, perceptron, data, e, 2, lost_down=1, lost_up=2)
        for e in ("sequential", engine)
    ]
    assert_same(*runs)


# --- memories -----------------------------------------------------------------------------------


def test_windows_without_overlap_do_not_share_memories(residual, play, make_data):
    """A rolling window with norms of its own: positions it never held start from the beginning."""
    method = FedRolex(shift=2, local=fq.LocalTraining(batch_size=4, norm="per_client"))
    runs = [
        play(method, residual, make_data(residual, (5, 5)), (0.5,), engine=e, rounds=3)
        for e in LOCAL
    ]
    for run in runs[1:]:
        assert_same(runs[0], run)


def test_a_failed_round_changes_nothing(perceptron, make_data):
    method = with_local(
        LocalOnly(), optimizer=fq.optimizers.SGD(lr=1e200, momentum=0.0), batch_size=2
    )
    data, fleet = make_data(perceptron, (6, 6)), fq.Fleet.of((1.0,), 2, 2)
    for engine in LOCAL:
        run = fq.prepare(method, perceptron, data, fleet, engine, precision="fp64")
        before: Server = run.server
        with pytest.raises(TrainingError):
            run.train(1)
        assert run.server is before
        assert not run.server.memory
        assert not run.records
