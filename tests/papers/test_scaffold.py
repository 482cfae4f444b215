"""SCAFFOLD (Karimireddy et al., ICML 2020): algorithm 1, line by line, and what it claims."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.errors import ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, Scaffold
from fedquilt.methods.scaffold import CLIENT_CONTROL, CONTROL, ControlVariates, Corrected
from fedquilt.round.server_optimizers import ServerMomentum
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.objectives import Wrapping
from fedquilt.round.training.state import Left, Received, Trained
from fedquilt.round.training.step import Batch, gradient
from fedquilt.round.training.view import View
from fedquilt.terms import Client, Job, Payload, Update
from tests.conftest import assert_same
from tests.engines.test_links import LINKS

RAGGED = (7, 4, 9, 5, 8, 4)
SHARES = (1.0, 0.5, 0.25)
PLAIN = fq.optimizers.SGD(lr=0.1, momentum=0.0)
LOCAL = fq.LocalTraining(batch_size=4, epochs=2, optimizer=PLAIN)
ENGINES = {
    "sequential": lambda data: "sequential",
    "vectorized": lambda data: "vectorized",
    **{
        f"recorded-{layout}": lambda data, layout=layout: Vectorized(
            data, precision="fp64", record=True, layout=layout
        )
        for layout in ("alone", "grouped", "stack")
    },
    "ray": lambda data: "ray",
}
EVERY_ENGINE = [
    pytest.param(name, marks=pytest.mark.slow if name == "ray" else ()) for name in ENGINES
]


def filled(value: float) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([value], dtype=torch.float64)}


# --- the update rules, by hand ------------------------------------------------------------------


def trained(**passes) -> Trained:
    """Return a client with x = 1, y = 0.4, c = 0.5, c_i = 0.2 after K = 3 steps at η = 0.1."""
    slots = {CONTROL: filled(0.5), CLIENT_CONTROL: filled(0.2)}
    steps, lr = (torch.tensor(value, dtype=torch.float64) for value in (3.0, 0.1))
    return Trained(filled(1.0), filled(0.4), slots, {}, steps, lr, passes)


def test_line_12_option_2_is_c_i_less_c_plus_the_mean_gradient():
    left = ControlVariates().finish(trained())
    assert float(left.kept[CLIENT_CONTROL]["w"]) == pytest.approx(0.2 - 0.5 + 0.6 / 0.3)
    assert float(left.sent[CONTROL]["w"]) == pytest.approx(1.7 - 0.2)


def test_line_12_option_1_is_the_gradient_at_the_received_weights():
    left = ControlVariates(option="I").finish(trained(gradient=filled(3.0)))
    assert float(left.kept[CLIENT_CONTROL]["w"]) == 3.0
    assert float(left.sent[CONTROL]["w"]) == pytest.approx(2.8)


def test_line_10_adds_c_less_c_i_to_every_gradient_and_nothing_to_the_loss(perceptron):
    member = perceptron.member(perceptron.whole)
    world = fq.methods.api.World(perceptron, precision="fp64", num_clients=2)
    method = Scaffold(local=LOCAL)
    learner = method.learner(Job(Client(0, fq.Budget(share=1.0), 4), member.prefix, 0), world)
    (phase,) = learner.phases
    assert isinstance(phase.objective, Corrected)
    state = perceptron.init(0, dtype=torch.float64)
    control = {name: torch.full_like(value, 0.5) for name, value in state.items()}
    own = {name: torch.full_like(value, 0.2) for name, value in state.items()}
    batch = Batch(
        torch.ones(4, 4, dtype=torch.float64),
        torch.tensor([0, 1, 2, 0]),
        torch.ones(3, dtype=torch.bool),
        torch.tensor(0),
    )
    received = Received(state, {CONTROL: control, CLIENT_CONTROL: own})
    plain, (loss, _) = gradient(learner, member, phase.objective.objective, state, received, batch)
    corrected, (same_loss, _) = gradient(learner, member, phase.objective, state, received, batch)
    assert float(loss) == float(same_loss)
    for name, value in plain.items():
        torch.testing.assert_close(corrected[name], value + 0.3, rtol=0, atol=1e-15)


def test_lines_16_and_17_step_to_the_mean_and_add_the_changes_divided_by_the_fleet(perceptron):
    method, world = (
        Scaffold(server_lr=0.5),
        fq.methods.api.World(perceptron, precision="fp64", num_clients=10),
    )
    server = method.init(world)
    server = replace(
        server,
        slots={CONTROL: {n: torch.full_like(v, 2.0) for n, v in server.slots[CONTROL].items()}},
    )
    fold, net = method.fold(server, world), prefix(perceptron.whole)
    for client, (moved, change, size) in enumerate([(1.0, 0.3, 4), (3.0, 0.7, 12)]):
        weights = {name: value + moved for name, value in server.weights.items()}
        slots = {CONTROL: {name: torch.full_like(value, change) for name, value in weights.items()}}
        job = Job(Client(client, fq.Budget(share=1.0), size), net, 0)
        fold.add(Update(job, (Payload(net, weights, slots),), steps=1))
    merged = fold.finish(server)
    for name, value in server.weights.items():  # uniform weights, whatever the sizes
        torch.testing.assert_close(merged.weights[name], value + 0.5 * 2.0, rtol=0, atol=1e-12)
        expected = torch.full_like(value, 2.0 + 1.0 / 10)
        torch.testing.assert_close(merged.slots[CONTROL][name], expected, rtol=0, atol=1e-12)


# --- a plain loop -------------------------------------------------------------------------------


def plain_scaffold(run: fq.Run, method: Scaffold, rounds: int):
    """Algorithm 1 in plain torch, for clients with the whole net. Returns x, c and all c_i."""
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    names = ["first.weight", "first.bias", "last.weight", "last.bias"]
    data, eta = run.data, method.local.optimizer.lr

    def gradients(weights, rows):
        with torch.no_grad():
            for parameter, weight in zip(net.parameters(), weights, strict=True):
                parameter.copy_(weight)
        net.zero_grad()
        nn.functional.cross_entropy(net(data.inputs[rows]), data.targets[rows]).backward()
        return [parameter.grad.clone() for parameter in net.parameters()]

    start = method.init(run.world).weights
    x = [start[name].clone() for name in names]
    c = [torch.zeros_like(value) for value in x]
    c_i = {client: [torch.zeros_like(value) for value in x] for client in range(data.num_clients)}
    for round in range(rounds):
        cohort = run.fleet.draw_cohort(round, run.world.seed)
        moved, changed = [], []
        for client in cohort:
            job = Job(
                Client(client, fq.Budget(share=1.0), data.size(client)),
                prefix(run.world.family.whole),
                round,
            )
            y, own = list(x), c_i[client]
            batches = run.engine.batches(job, method.learner(job, run.world))
            factors = method.local.within_round.factors(len(batches))
            rates = [eta * method.local.schedule(round) * factor for factor in factors]
            for rows, lr in zip(batches, rates, strict=True):
                steps = zip(y, gradients(y, rows), own, c, strict=True)
                y = [
                    w - lr * (g + method.local.optimizer.weight_decay * w - mine + all)
                    for w, g, mine, all in steps
                ]
            if method.option == "I":
                new = gradients(x, data.parts[client])
            else:
                mean = [(old - w) / sum(rates) for old, w in zip(x, y, strict=True)]
                new = [mine - all + g for mine, all, g in zip(own, c, mean, strict=True)]
            moved.append([w - old for w, old in zip(y, x, strict=True)])
            changed.append([n - mine for n, mine in zip(new, own, strict=True)])
            c_i[client] = new
        x = [w + method.server_lr * sum(d) / len(cohort) for w, *d in zip(x, *moved, strict=True)]
        c = [w + sum(d) / data.num_clients for w, *d in zip(c, *changed, strict=True)]
    return [dict(zip(names, values, strict=True)) for values in (x, c)], c_i, names


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("engine", EVERY_ENGINE)
@pytest.mark.parametrize(
    "within_round",
    [fq.schedules.WithinRound(), fq.schedules.WithinRound(warmup_share=0.5, shape="linear")],
    ids=str,
)
def test_six_rounds_with_partial_participation_are_those_of_a_plain_loop(
    within_round, engine, option, perceptron, make_data
):
    """With a schedule within the round, K·η is the sum of a client's learning rates."""
    local = replace(
        LOCAL,
        optimizer=replace(PLAIN, weight_decay=1e-2),
        schedule=fq.schedules.Cosine(6),
        within_round=within_round,
    )
    method = Scaffold(local=local, option=option, server_lr=0.8)
    data = make_data(perceptron, RAGGED, labels=2)
    fleet = fq.Fleet.of((1.0,), 6, 3)
    how = fq.Evaluation(every=0)
    run = fq.prepare(
        method, perceptron, data, fleet, ENGINES[engine](data), precision="fp64", evaluation=how
    )
    run = run.train(6)
    (x, c), c_i, names = plain_scaffold(run, method, 6)
    torch.testing.assert_close(dict(run.server.weights), x, rtol=0, atol=1e-9)
    torch.testing.assert_close(dict(run.server.slots[CONTROL]), c, rtol=0, atol=1e-9)
    took_part = {
        client for round in range(6) for client in fleet.draw_cohort(round, run.world.seed)
    }
    assert {client for client, _ in run.server.memory} == took_part
    for client in took_part:
        own = run.server.memory[client, ""].slots[CLIENT_CONTROL]
        torch.testing.assert_close(
            dict(own), dict(zip(names, c_i[client], strict=True)), rtol=0, atol=1e-9
        )
    assert max(float(value.abs().max()) for value in c.values()) > 1e-3


# --- reductions and claims ----------------------------------------------------------------------


@dataclass(frozen=True)
class Held(ControlVariates):
    """Variates that stay zero."""

    def finish(self, trained: Trained) -> Left:
        zeros = {
            name: torch.zeros_like(value) for name, value in trained.slots[CLIENT_CONTROL].items()
        }
        return Left({CLIENT_CONTROL: zeros}, {CONTROL: zeros})


@dataclass(frozen=True)
class HeldScaffold(Scaffold):
    def learner(self, job: Job, world: fq.methods.api.World) -> Learner:
        return replace(super().learner(job, world), state=Held())


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_variates_that_stay_zero_give_fedavg_with_uniform_weights(
    engine, residual, play, make_data
):
    data = make_data(residual, RAGGED, labels=2)
    held = play(HeldScaffold(local=LOCAL), residual, data, engine=engine, rounds=3)
    plain = play(FedAvg(local=LOCAL, weighting="uniform"), residual, data, engine=engine, rounds=3)
    torch.testing.assert_close(
        dict(held.server.weights), dict(plain.server.weights), rtol=0, atol=1e-12
    )
    assert [record.loss for record in held.records] == pytest.approx(
        [record.loss for record in plain.records]
    )
    moving = play(Scaffold(local=LOCAL), residual, data, engine=engine, rounds=3)
    name = residual.trainable[0]
    assert not torch.allclose(moving.server.weights[name], plain.server.weights[name])


@dataclass(frozen=True)
class Quadratic(Wrapping):
    """a/2 · ‖w − b‖², with a and b in the client's samples."""

    def __call__(self, view: View) -> torch.Tensor:
        curvature, optimum = view.inputs[0, 0], view.inputs[0, 1]
        return (
            0.5 * curvature * (view.weights["weight"] - optimum).square().sum()
            + 0.0 * view.logits().sum()
        )


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_two_quadratic_clients_reach_the_common_optimum_and_fedavg_does_not(engine, option, play):
    """Section 3 of the paper: with several local steps FedAvg stops elsewhere."""
    curvature, optimum = torch.tensor([1.0, 4.0]), torch.tensor([-1.0, 2.0])
    inputs = torch.stack([curvature, optimum], 1).repeat_interleave(8, 0).double()
    targets = torch.zeros(16, dtype=torch.int64)
    data = fq.FederatedData.of(
        (inputs, targets), (inputs, targets), [torch.arange(8), torch.arange(8, 16)]
    )
    family = fq.trace(lambda: nn.Linear(2, 3, bias=False), inputs[:2].float())
    local = fq.LocalTraining(batch_size=1, optimizer=PLAIN, objective=Quadratic())
    common = float((curvature * optimum).sum() / curvature.sum())
    corrected = play(Scaffold(local=local, option=option), family, data, engine=engine, rounds=60)
    plain = play(FedAvg(local=local), family, data, engine=engine, rounds=60)
    for weight in corrected.server.weights.values():
        torch.testing.assert_close(weight, torch.full_like(weight, common), rtol=0, atol=1e-6)
    for weight in plain.server.weights.values():
        assert float((weight - common).abs().min()) > 0.1


# --- sub-models ---------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_variates_of_sub_models_are_cut_by_position(engine, perceptron, play, make_data):
    data = make_data(perceptron, (8, 8, 8))
    run = play(Scaffold(local=LOCAL), perceptron, data, SHARES, engine=engine, rounds=1)
    widths = [perceptron.fit(fq.Budget(share=share)).sizes for share in SHARES]
    (axis,) = widths[0]
    total = torch.zeros(6, dtype=torch.float64)
    for client, width in enumerate(widths):
        own = run.server.memory[client, ""].slots[CLIENT_CONTROL]["first.bias"]
        assert own.shape == (width[axis],)
        total[: width[axis]] += own / 3  # c_i⁺ − 0, divided by the fleet
    torch.testing.assert_close(run.server.slots[CONTROL]["first.bias"], total, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_position_that_a_client_does_not_hold_keeps_its_variate(
    engine, perceptron, play, make_data
):
    """With changing budgets a client holds unequal positions from round to round."""
    data, kept = make_data(perceptron, RAGGED), 0
    fleet = fq.Fleet.of(SHARES, 6, 6, dynamic=True)
    run = play(Scaffold(local=LOCAL), perceptron, data, fleet=fleet, engine=engine, rounds=1)
    before = {
        key: memory.slots[CLIENT_CONTROL]["first.bias"].clone()
        for key, memory in run.server.memory.items()
    }
    run = run.train(2)
    (axis,) = perceptron.whole.sizes
    for (client, scope), old in before.items():
        width = perceptron.fit(fleet.client(client, 1, run.world.seed, 1).budget).sizes[axis]
        new = run.server.memory[client, scope].slots[CLIENT_CONTROL]["first.bias"]
        assert len(new) == max(len(old), width)
        assert torch.equal(new[width : len(old)], old[width:])
        assert not torch.equal(new[: min(width, len(old))], old[: min(width, len(old))])
        kept += len(old) > width
    assert kept  # some client held less than before


# --- what it costs, and links -------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_both_vectors_are_charged_both_ways_and_option_1_for_its_pass(
    engine, perceptron, play, make_data
):
    data = make_data(perceptron, RAGGED)
    plain = play(FedAvg(local=LOCAL), perceptron, data, engine=engine).records[0]
    second = play(Scaffold(local=LOCAL), perceptron, data, engine=engine).records[0]
    first = play(Scaffold(local=LOCAL, option="I"), perceptron, data, engine=engine).records[0]
    assert Scaffold.wire_factor == 1
    assert (second.bytes_down, second.bytes_up) == (2 * plain.bytes_down, 2 * plain.bytes_up)
    assert (first.bytes_down, first.bytes_up) == (second.bytes_down, second.bytes_up)
    assert second.macs == plain.macs
    assert first.macs - second.macs == 3 * perceptron.member(perceptron.whole).macs * sum(RAGGED)


def test_a_client_is_charged_for_the_memory_of_both_variates(residual):
    step = Scaffold(local=LOCAL).training_step(fq.methods.api.World(residual))
    assert step.slots == FedAvg(local=LOCAL).training_step(fq.methods.api.World(residual)).slots + 2


FOUR_BITS = fq.Link(codec=fq.links.Codec(bits=4, feedback=True))


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize(
    "link", [fq.Link.preset("lossy-mild"), FOUR_BITS, LINKS["everything"]], ids=str
)
def test_lossy_and_coded_links_give_the_same_numbers_on_every_engine(
    link, option, residual, play, make_data
):
    data, method = make_data(residual, RAGGED, labels=2), Scaffold(local=LOCAL, option=option)
    fleet = fq.Fleet.of(SHARES, 6, 4, dynamic=True)
    runs = [
        play(method, residual, data, fleet=fleet, engine=engine, link=link, rounds=3)
        for engine in ("sequential", "vectorized")
    ]
    assert_same(*runs)
    assert max(float(value.abs().max()) for value in runs[0].server.slots[CONTROL].values()) > 1e-3


def test_four_bits_are_charged_for_weights_and_variates(perceptron, play, make_data):
    data = make_data(perceptron, (8,))
    record = play(Scaffold(local=LOCAL), perceptron, data, link=FOUR_BITS, rounds=1).records[0]
    plain = play(FedAvg(local=LOCAL), perceptron, data, link=FOUR_BITS, rounds=1).records[0]
    assert record.bytes_up == 2 * plain.bytes_up
    assert record.bytes_down == 2 * 51 * 8


def test_what_a_lossy_link_loses_of_c_is_what_the_client_received_before(
    perceptron, play, make_data
):
    """Lost positions of c come from the memory of the client, which keeps them for that."""
    link = fq.Link(loss=fq.links.ColumnLoss(0.5, granularity=0.25))
    data = make_data(perceptron, (8, 8))
    run = play(Scaffold(local=LOCAL), perceptron, data, link=link, rounds=4)
    for memory in run.server.memory.values():
        assert {CONTROL, CLIENT_CONTROL} <= memory.slots.keys()
    lossless = play(Scaffold(local=LOCAL), perceptron, data, rounds=4)
    assert all(CONTROL not in memory.slots for memory in lossless.server.memory.values())


# --- resuming -----------------------------------------------------------------------------------


@pytest.mark.parametrize("link", [fq.Link(), LINKS["everything"]], ids=["perfect", "everything"])
def test_a_stopped_and_resumed_run_is_the_same(link, residual, make_data, tmp_path):
    data = make_data(residual, RAGGED, labels=2)
    fleet = fq.Fleet.of(SHARES, 6, 4, dynamic=True)

    def federate(name, rounds):
        return fq.run(
            Scaffold(local=LOCAL),
            residual,
            data,
            fleet,
            rounds=rounds,
            precision="fp64",
            link=link,
            out=tmp_path / name,
            resume=True,
        )

    for rounds in (1, 3, 4):
        stopped = federate("stopped", rounds)
    assert_same(federate("whole", 4), stopped, atol=0)


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        fq.optimizers.SGD(lr=0.1),
        fq.optimizers.SGD(lr=0.1, momentum=0.0, clip=1.0),
        fq.optimizers.Adam(),
    ],
    ids=["momentum", "clip", "Adam"],
)
def test_optimizers_whose_steps_are_no_gradients_are_refused(optimizer):
    with pytest.raises(
        ConfigError, match=r"Scaffold: local.optimizer = .*SGD\(momentum=0, clip=0\) works"
    ):
        Scaffold(local=fq.LocalTraining(optimizer=optimizer))


def test_a_step_size_beside_a_server_optimizer_is_refused():
    with pytest.raises(
        ConfigError, match=r"server_lr = 0.5 was asked for beside server_optimizer = ServerMomentum"
    ):
        Scaffold(server_lr=0.5, server_optimizer=ServerMomentum())
    Scaffold(server_optimizer=ServerMomentum())


def test_a_world_without_a_fleet_is_refused(perceptron):
    method, world = Scaffold(), fq.methods.api.World(perceptron)
    with pytest.raises(ConfigError, match=r"World\(…, num_clients=100\) works"):
        method.fold(method.init(world), world)


def test_an_unknown_option_is_refused():
    with pytest.raises(ConfigError, match="option = 'III' was asked for; it may be 'I', 'II'"):
        Scaffold(option="III")


def test_weights_that_stay_on_clients_have_no_variates(residual, play, make_data):
    """A correction by −c_i alone would hold personal weights where they are."""
    method = Scaffold(local=replace(LOCAL, norm="per_client-all"))
    run = play(method, residual, make_data(residual, RAGGED), rounds=2)
    norms = set(residual.parts["norm"]) & set(residual.trainable)
    own = run.server.memory[0, ""].slots[CLIENT_CONTROL]
    assert norms
    assert set(own) == set(residual.trainable) - norms
