"""State of a method: slots and extras that travel and stay, and passes that are not steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.family.cut import prefix
from fedquilt.methods import HeteroFL
from fedquilt.round.fold import Fold
from fedquilt.round.link import Transmission
from fedquilt.round.merge import ExtrasMean, Mean, RunningSum, Stateful, as_weights
from fedquilt.round.server_optimizers import ServerMomentum
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.passes import (
    LogitsPass,
    LossPass,
)
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.round.training.view import View
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorFile, read_state
from fedquilt.terms import Client, Job, Payload, Server, Update
from tests.conftest import assert_same
from tests.engines.test_links import LINKS
from tests.unit.round.stateful import CPU, ENGINES, LOCAL, RAGGED, SHARES, Everything, Stating
from tests.unit.round.test_passes import (
    Passing,
    results,
)


@pytest.mark.parametrize("link", [fq.Link(), *LINKS.values()], ids=["perfect", *LINKS])
@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=pytest.mark.slow if name == "ray" else ()) for name in ENGINES],
)
def test_state_of_all_kinds_is_the_same_on_every_engine(
    engine, link, perceptron, public_data, play
):
    fleet = fq.Fleet.of(SHARES, 6, 4, dynamic=True)
    runs = [
        play(Stating(), perceptron, public_data, fleet=fleet, engine=one, link=link, rounds=3)
        for one in ("sequential", ENGINES[engine](public_data))
    ]
    assert_same(*runs)
    assert all({"own"} <= memory.slots.keys() for memory in runs[0].server.memory.values())
    assert float(runs[0].server.extras["table"].abs().max()) > 0


def test_state_is_counted_in_bytes_both_ways(perceptron, public_data, play):
    fleet = fq.Fleet.of((1.0,), 6, 6)
    plain = play(HeteroFL(local=LOCAL), perceptron, public_data, fleet=fleet, rounds=1).records[0]
    record = play(Stating(), perceptron, public_data, fleet=fleet, rounds=1).records[0]
    extras = 6 * 9 * 8  # clients, numbers, bytes
    assert (record.bytes_down, record.bytes_up) == (
        2 * plain.bytes_down + extras,
        2 * plain.bytes_up + extras,
    )


def test_passes_are_counted_in_macs(perceptron, public_data, play):
    fleet = fq.Fleet.of((1.0,), 6, 6)
    plain = play(HeteroFL(local=LOCAL), perceptron, public_data, fleet=fleet, rounds=1).records[0]
    record = play(Stating(), perceptron, public_data, fleet=fleet, rounds=1).records[0]
    macs = perceptron.member(perceptron.whole).macs
    assert record.macs - plain.macs == macs * (2 * sum(RAGGED) + 6 * 5)


@pytest.mark.parametrize("link", ["perfect", "everything"])
def test_state_of_all_kinds_survives_a_stop(link, perceptron, public_data, tmp_path):
    def federate(name: str, rounds: int) -> fq.Run:
        return fq.run(
            Stating(),
            perceptron,
            public_data,
            fq.Fleet.of(SHARES, 6, 4, dynamic=True),
            rounds=rounds,
            precision="fp64",
            link=LINKS.get(link, fq.Link()),
            out=tmp_path / name,
            resume=True,
            client_state_memory=1000,
        )

    for rounds in (1, 3):
        stopped = federate("stopped", rounds)
    assert_same(federate("whole", 3), stopped, atol=0)
    assert set(fq.load_state(tmp_path / "stopped").extras) == {"table"}


def test_files_without_extras_are_read():
    blob = Blob.of({"weights/a": torch.ones(2)}, {"round": 3, "slots": []})
    data = b"".join(bytes(chunk) for chunk in blob.chunks())
    state = read_state(TensorFile.of(data, "a state"), CPU)
    assert (list(state.weights), state.slots, state.extras) == (["a"], {}, {})


# --- what a link does to it ---------------------------------------------------------------------


def trip_of(family: fq.Family, share: float = 1.0) -> Transmission:
    submodel = prefix(family.fit(fq.Budget(share=share)))
    return Transmission(
        fq.methods.api.World(family),
        Job(Client(0, fq.Budget(share=share), 1), submodel, 0),
        up=True,
    )


def sent(family: fq.Family, trip: Transmission, **more: Any) -> Payload:
    weights = family.cutter.gather(family.init(), trip.job.submodel, family.trainable)
    slots = {"control": {name: value + 1 for name, value in weights.items()}}
    return Payload(trip.job.submodel, weights, slots, {"table": torch.arange(5.0)}, **more)


class Half(fq.links.ColumnLoss):
    """A link that loses all columns but some."""

    arrive = 2

    def arrived(self, trip: Transmission, count: int) -> int:
        return self.arrive


class Lost(Half):
    arrive = 0


def test_slots_lose_the_columns_of_their_weights_and_extras_arrive_whole(perceptron):
    trip = trip_of(perceptron)
    payload = sent(perceptron, trip)
    arrival = fq.Link(loss=Half(0.1, granularity=0.25)).up(payload, trip)
    arrived = arrival.payload
    assert arrived is not None
    assert arrived.submodel != payload.submodel
    for name, value in arrived.slots["control"].items():
        assert torch.equal(value, arrived.weights[name] + 1)
    assert torch.equal(arrived.extras["table"], payload.extras["table"])
    assert arrival.bytes == 2 * sum(value.nbytes for value in arrived.weights.values()) + 5 * 4


def test_extras_are_lost_with_the_first_column(perceptron):
    trip = trip_of(perceptron)
    arrival = fq.Link(loss=Lost(0.1)).up(sent(perceptron, trip), trip)
    assert (arrival.payload, arrival.bytes) == (None, 0)
    alone = Payload(trip.job.submodel, {}, extras={"table": torch.ones(3)})
    assert fq.Link(loss=Lost(0.1)).up(alone, trip).payload is None


def test_slots_are_coded_against_zero_and_extras_on_request(perceptron):
    trip = trip_of(perceptron)
    link = fq.Link(codec=fq.links.Codec(bits=8, feedback=True))
    known = dict(sent(perceptron, trip).weights)
    plain, asked = (
        link.up(sent(perceptron, trip, coded_extras=coded), trip, known)
        for coded in ((), ("table",))
    )
    assert plain.payload is not None
    assert asked.payload is not None
    for name, value in sent(perceptron, trip).slots["control"].items():
        step = float(value.max() - value.min()) / 255
        torch.testing.assert_close(
            plain.payload.slots["control"][name], value, rtol=0, atol=step + 1e-6
        )
    assert torch.equal(plain.payload.extras["table"], torch.arange(5.0))
    torch.testing.assert_close(
        asked.payload.extras["table"], torch.arange(5.0), rtol=0, atol=4 / 255 + 1e-6
    )
    # five bytes and two bounds, instead of float32
    assert plain.bytes - asked.bytes == 5 * 4 - (5 + 8)


def test_messages_of_one_payload_draw_unequal_random_numbers(perceptron):
    trip = trip_of(perceptron)
    weights = {"first.weight": torch.linspace(0, 1, 24).view(6, 4)}
    payload = Payload(trip.job.submodel, weights, {"a": weights, "b": weights})
    arrived = (
        fq.Link(codec=fq.links.Codec(bits=2))
        .up(payload, trip, {"first.weight": torch.zeros(6, 4)})
        .payload
    )
    assert arrived is not None
    found = [arrived.weights, arrived.slots["a"], arrived.slots["b"]]
    assert len({tuple(one["first.weight"].flatten().tolist()) for one in found}) == 3


def test_sparse_slots_are_scaled_up_although_the_codec_feeds_errors_back(perceptron):
    """They are coded without feedback, so that their mean is right."""
    trip = trip_of(perceptron)
    ones = {"first.weight": torch.ones(6, 4)}
    payload = Payload(trip.job.submodel, ones, {"a": ones})
    arrived = fq.Link(codec=fq.links.Codec(keep=0.5, feedback=True)).up(payload, trip, {}).payload
    assert arrived is not None
    assert float(arrived.slots["a"]["first.weight"].sum()) == pytest.approx(24)


# --- folds --------------------------------------------------------------------------------------


def updates(family: fq.Family) -> tuple[Server, list[Update]]:
    whole = {
        name: torch.zeros_like(value) for name, value in family.init(dtype=torch.float64).items()
    }
    server = Server(
        0, whole, slots={"a": whole}, extras={"table": torch.zeros(2), "still": torch.ones(1)}
    )
    found = []
    for client in range(3):
        net = prefix(family.fit(fq.Budget(share=0.5)))
        cut = family.cutter.gather(whole, net, family.trainable)
        weights = {name: value + client for name, value in cut.items()}
        slots = {"a": {name: value + 10.0**client for name, value in cut.items()}}
        payload = Payload(net, weights, slots, {"table": torch.tensor([1.0, client])})
        found.append(
            Update(Job(Client(client, fq.Budget(share=0.5), client + 1), net, 0), (payload,), 1)
        )
    return server, found


def stateful(family: fq.Family, server: Server) -> Stateful:
    slot = RunningSum(family.cutter, scale=0.5).begin(as_weights(server, "a"))
    return Stateful(
        Mean(family.cutter).begin(server), {"a": slot}, ExtrasMean(family.cutter, "data")
    )


def test_slots_are_summed_and_extras_averaged(perceptron):
    server, found = updates(perceptron)
    fold = stateful(perceptron, server)
    for update in found:
        fold.add(update)
    merged = fold.finish(server)
    bias = merged.slots["a"]["first.bias"]
    assert torch.equal(bias, torch.tensor([55.5] * 3 + [0.0] * 3, dtype=torch.float64))
    assert torch.equal(
        merged.weights["first.bias"], torch.tensor([1.0] * 3 + [0.0] * 3, dtype=torch.float64)
    )
    torch.testing.assert_close(
        merged.extras["table"], torch.tensor([1.0, (0 * 1 + 1 * 2 + 2 * 3) / 6])
    )
    assert torch.equal(merged.extras["still"], torch.ones(1))


def test_stacks_and_partial_folds_give_the_same(perceptron):
    server, found = updates(perceptron)
    one, stacked, first, second = (stateful(perceptron, server) for _ in range(4))
    for update in found:
        one.add(update)
    names = found[0].sent[0].weights
    stacked.add_stack(
        found, [{name: torch.stack([u.sent[0].weights[name] for u in found]) for name in names}]
    )
    first.add(found[0])
    for update in found[1:]:
        second.add(update)
    first.join(second)
    expected = one.finish(server)
    for other in (stacked, first):
        torch.testing.assert_close(
            tuple(map(dict, other.finish(server)[:3])), tuple(map(dict, expected[:3]))
        )


def test_the_state_is_unchanged_if_nothing_arrives(perceptron):
    server, found = updates(perceptron)
    fold = stateful(perceptron, server)
    fold.add(replace(found[0], sent=()))
    merged = fold.finish(server)
    assert all(
        torch.equal(value, server.slots["a"][name]) for name, value in merged.slots["a"].items()
    )
    assert merged.extras == dict(server.extras)


def test_a_fold_of_a_slot_that_the_server_does_not_have_is_refused(perceptron):
    server, _ = updates(perceptron)
    with pytest.raises(
        ConfigError, match=r"the slot 'b' was asked for; the server has \['a'\]. Method.init"
    ):
        as_weights(server, "b")


def test_a_slot_of_the_servers_optimizer_is_refused(perceptron):
    server, _ = updates(perceptron)
    mean = Mean(perceptron.cutter, optimizer=ServerMomentum()).begin(server)
    with pytest.raises(
        ConfigError, match="'momentum', which the server's optimizer ServerMomentum has"
    ):
        Stateful(mean, {"momentum": RunningSum(perceptron.cutter)})


# --- one by one ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Branching(Everything):
    """State that depends on a value by a branch, which vmap cannot follow."""

    def finish(self, trained: Trained) -> Left:
        left = super().finish(trained)
        if float(trained.weights["first.bias"].sum()) > 0:
            return replace(left, kept_extras={"rounds": -left.kept_extras["rounds"]})
        return left


@dataclass(frozen=True)
class BranchingPass(LossPass):
    """A pass with a branch."""

    def __call__(self, view: View) -> dict[str, torch.Tensor]:
        loss = self.objective(view)
        return {"loss": loss if float(loss) > 1 else 2 * loss}


@dataclass(frozen=True)
class BranchingMethod(Stating):
    """A method with a pass that cannot be stacked."""

    def learner(self, job: Job, world: fq.methods.api.World) -> Learner:
        return replace(super().learner(job, world), after=(BranchingPass(name="later"),))


@pytest.mark.parametrize(
    "method", [Stating(state=Branching()), BranchingMethod()], ids=["state", "pass"]
)
def test_clients_that_cannot_be_stacked_run_one_by_one(
    method, perceptron, public_data, play, caplog
):
    runs = [
        play(method, perceptron, public_data, engine=engine)
        for engine in ("sequential", "vectorized")
    ]
    assert_same(*runs)
    assert "clients with equal nets are trained one after another" in caplog.text


def test_clients_whose_extras_have_unequal_shapes_are_finished_one_by_one(
    perceptron, play, make_data
):
    """Extras that a client keeps may depend on its data, such as logits of all its samples."""

    @dataclass(frozen=True)
    class Own(LogitsPass):
        @property
        def public(self) -> bool:
            return False

    method = Passing(before=(Own(),))
    data = make_data(perceptron, RAGGED)
    runs = [
        play(method, perceptron, data, engine=engine) for engine in ("sequential", "vectorized")
    ]
    assert_same(*runs)
    assert [len(results(runs[0], client)["logits/logits"]) for client in range(6)] == list(RAGGED)


# --- bad input ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bad(Everything):
    """State that is wrong in one way."""

    how: str = ""

    def finish(self, trained: Trained) -> Left:
        left = super().finish(trained)
        own, table = left.kept["own"], left.sent_extras["table"]
        name = "first.bias"
        match self.how:
            case "unknown slot":
                return replace(left, sent={**left.sent, "other": own})
            case "missing slot":
                return replace(left, kept={})
            case "missing weight":
                return replace(left, kept={"own": {name: own[name]}})
            case "shape":
                return replace(left, sent={"sum": {**left.sent["sum"], name: own[name][:1]}})
            case "unknown extra":
                return replace(left, sent_extras={"other": table})
            case "not finite":
                return replace(left, sent={"sum": {**left.sent["sum"], name: own[name] / 0}})
            case "extra not finite":
                return replace(left, sent_extras={"table": table / 0})
        raise AssertionError(self.how)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("unknown slot", r"sends the slots \['other', 'sum'\]; its learner declares \['sum'\]"),
        ("missing slot", r"keeps the slots \[\]; its learner declares \['own'\]"),
        ("missing weight", r"keeps the slot 'own', in which \['first.weight', .* is missing"),
        (
            "shape",
            r"'first.bias' has the shape \(1,\); the shape of the weight that it belongs to, "
            r"\(6,\), would work",
        ),
        ("unknown extra", r"sends the extras \['other'\]; its learner declares \['table'\]"),
        ("not finite", "left state of its method that is not finite in round 1; it was refused"),
        ("extra not finite", "left state of its method that is not finite"),
    ],
)
def test_wrong_state_is_refused(how, message, engine, perceptron, public_data, play):
    with pytest.raises(TrainingError, match=rf"client \d \(budget share 1\).*{message}"):
        play(Stating(state=Bad(how=how)), perceptron, public_data, engine=engine, rounds=1)


@pytest.mark.parametrize(("kind", "name"), [("slots", "sum"), ("extras", "table")])
def test_state_that_the_server_does_not_have_is_refused(kind, name, perceptron, public_data, play):
    @dataclass(frozen=True)
    class Forgetful(Stating):
        def init(self, world: fq.methods.api.World) -> Server:
            return replace(super().init(world), **{kind: {}})

        def fold(self, server: Server, world: fq.methods.api.World) -> Fold:
            return Mean(world.family.cutter).begin(server)

    with pytest.raises(
        TrainingError,
        match=rf"client 0 .* was to receive the {kind} \['{name}'\] in round 1; .*Method.init",
    ):
        play(Forgetful(), perceptron, public_data, rounds=1)


def test_names_that_others_have_are_refused():
    with pytest.raises(ConfigError, match=r"slots_kept = \['a'\] is among slots_down as well"):
        MethodState(slots_down=("a",), slots_kept=("a",))
    with pytest.raises(ConfigError, match=r"\['residual'\] was asked for, which links have"):
        MethodState(slots_kept=("residual",))
    with pytest.raises(ConfigError, match=r"coded_extras = \['b'\] does not travel"):
        MethodState(extras_kept=("b",), coded_extras=("b",))
    with pytest.raises(
        ConfigError, match="the slot 'momentum' was asked for, which the local optimizer has"
    ):
        Learner((Phase(),), LOCAL, 0.1, state=MethodState(slots_kept=("momentum",)))
    with pytest.raises(ConfigError, match="two passes named 'loss' were asked for"):
        Learner((Phase(),), LOCAL, 0.1, before=(LossPass(),), after=(LossPass(),))


def test_a_pass_over_public_samples_that_are_not_there_is_refused(perceptron, play, make_data):
    with pytest.raises(
        ConfigError, match="Stating was asked for, whose pass 'logits' runs on public samples"
    ):
        play(Stating(), perceptron, make_data(perceptron, RAGGED, public=0), rounds=1)
