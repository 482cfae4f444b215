"""Distillation at the server: FedDF (Lin et al. 2020), DS-FL (Itahara et al. 2023) and Fed-ET (Cho
et al. 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import DSFL, FedAvg, FedDF, FedET, HeteroFL
from fedquilt.methods.dsfl import PREDICTIONS, sharpened
from fedquilt.methods.fedet import ConsensusLoss, consensus, consensus_weights
from fedquilt.round.fold import Merged
from fedquilt.round.learning import learn
from fedquilt.round.link import Arrival, Transmission
from fedquilt.round.teachers import EACH, OUTPUTS, Teachers
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.distillation import Imitation, SoftLabels
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.public import drawn_positions
from fedquilt.round.training.server import ServerTraining
from fedquilt.round.training.view import View
from fedquilt.terms import Client, Job, Payload, Server, Submodel, Update
from tests.conftest import Perceptron

SIZES = (7, 4, 9, 5)
NUM_PUBLIC = 10
PLAIN = fq.optimizers.SGD(lr=0.1, momentum=0.0)
LOCAL = fq.LocalTraining(batch_size=4, optimizer=PLAIN)
SILENT = ServerTraining(steps=0)
ONE_STEP = ServerTraining(PLAIN, batch_size=16, steps=1, held_back=0.3)
MACS = {1.0: 4 * 6 + 6 * 3, 0.5: 4 * 3 + 3 * 3}  # Of the perceptron with 6 and 3 hidden channels


def start(
    method: fq.Method,
    family: fq.Family,
    data: fq.FederatedData,
    shares=(1.0, 0.5),
    engine: str = "sequential",
    **options,
) -> fq.Run:
    """Return a run of all clients in float64 that has not begun, by default on the sequential
    engine.
    """
    fleet = fq.Fleet.of(shares, data.num_clients, data.num_clients)
    options = {"precision": "fp64", "evaluation": fq.Evaluation(every=0), **options}
    return fq.prepare(method, family, data, fleet, engine, **options)


def received(run: fq.Run, shares=(1.0, 0.5, 0.5), sizes=(8, 4, 12)) -> list[Update]:
    """Return updates of clients whose nets differ from the server's by noise."""
    generator = torch.Generator().manual_seed(11)
    updates = []
    for client, (share, size) in enumerate(zip(shares, sizes, strict=True)):
        net = run.method.prototype(share, run.world)
        names = run.world.family.member(net).trainable
        server = {name: run.server.weights[net.scope + name] for name in names}
        noisy = {
            n: v + torch.randn(v.shape, generator=generator, dtype=v.dtype)
            for n, v in server.items()
        }
        job = Job(Client(client, fq.Budget(share=share), size), net, 0)
        updates.append(Update(job, (Payload(net, noisy),), steps=1))
    return updates


def plain_outputs(family: fq.Family, update: Update, inputs: Tensor) -> Tensor:
    """Run a received net as a plain module."""
    (payload,) = update.sent
    with torch.no_grad():
        return family.assemble(payload.submodel, payload.weights)(inputs)


def folded(run: fq.Run, updates: list[Update]) -> Merged:
    fold = run.method.fold(run.server, run.world)
    for update in updates:
        fold.add(update)
    return fold.finish(run.server)


def merged_server(run: fq.Run, merged: Merged) -> Server:
    """Return the state after the merge, before the server learns."""
    return replace(run.server, round=run.server.round + 1, weights=merged.weights)


def in_scope(weights, scope: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(scope): value for name, value in weights.items() if name.startswith(scope)
    }


def kl(teacher: Tensor, student: Tensor) -> Tensor:
    """Return the mean over samples of Σ p·(log p − log q), for logits."""
    p, q = teacher.softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def entropy(probabilities: Tensor) -> Tensor:
    return -(probabilities * probabilities.log()).sum(1)


def value_of(
    objective: Objective, family: fq.Family, inputs: Tensor, rows: Tensor, logits: Tensor
) -> float:
    """Return the loss of a batch for logits that are given instead of computed."""
    member = family.member(family.whole)
    weights = family.init(0, dtype=torch.float64)
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    held, key = torch.ones(3, dtype=torch.bool), torch.tensor(0)
    mode = LOCAL.norm.training_pass(False)
    view = View(
        member, weights, inputs, targets, held, weights, mode, key, rows, logits_by_net={member: logits}
    )
    return float(objective(view))


# --- FedDF --------------------------------------------------------------------------------------


def test_feddfs_teacher_is_the_mean_of_the_logits_of_all_received_nets(perceptron, make_data):
    """Every net counts once, whatever its prototype and its number of samples."""
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run)
    logits = torch.stack(
        [plain_outputs(perceptron, update, run.world.public) for update in updates]
    )
    outputs = folded(run, updates).outputs[OUTPUTS]
    assert outputs.shape == (NUM_PUBLIC, 3)
    torch.testing.assert_close(outputs, logits.mean(0), rtol=0, atol=1e-12)

    by_data = torch.tensordot(torch.tensor([8.0, 4.0, 12.0]).double() / 24, logits, 1)
    by_prototype = (logits[0] + logits[1:].mean(0)) / 2
    assert not any(torch.allclose(outputs, other, atol=1e-2) for other in (by_data, by_prototype))


@pytest.mark.parametrize(("norm", "training"), [("batch", True), ("tracked", False)])
def test_norms_of_teachers_use_the_batch_unless_statistics_are_tracked(
    norm, training, residual, make_data
):
    method = FedDF(local=replace(LOCAL, norm=norm), prototypes=(1.0, 0.5))
    run = start(method, residual, make_data(residual, SIZES, public=NUM_PUBLIC))
    (update, *_) = received(run)
    (payload,) = update.sent
    own = in_scope(run.server.weights, "share1/")
    module = residual.assemble(payload.submodel, own | dict(payload.weights)).train(training)
    with torch.no_grad():
        expected = module(run.world.public)
    torch.testing.assert_close(folded(run, [update]).outputs[OUTPUTS], expected, rtol=0, atol=1e-9)


def test_a_student_starts_from_the_data_weighted_mean_of_its_own_group(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run)
    whole, small, other = (dict(update.sent[0].weights) for update in updates)
    weights = folded(run, updates).weights
    for name, value in whole.items():
        torch.testing.assert_close(weights["share1/" + name], value, rtol=0, atol=1e-12)
        mean = (4 * small[name] + 12 * other[name]) / 16
        torch.testing.assert_close(weights["share0.5/" + name], mean, rtol=0, atol=1e-12)


def test_a_student_minimises_kl_of_the_teacher_to_the_student_and_not_the_reverse(
    perceptron, make_data
):
    teacher = torch.tensor([[2.0, 0.0, -1.0], [0.5, 0.5, 3.0]]).double()
    student = torch.tensor([[0.0, 1.0, 0.0], [-2.0, 1.0, 0.5]]).double()
    forward = reverse = 0.0
    for row, own in zip(teacher.tolist(), student.tolist(), strict=True):
        p, q = ([math.exp(z) / sum(map(math.exp, logits)) for z in logits] for logits in (row, own))
        forward += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True)) / 2
        reverse += sum(b * math.log(b / a) for a, b in zip(p, q, strict=True)) / 2
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    assert value_of(Imitation(), perceptron, inputs, teacher, student) == pytest.approx(
        forward, abs=1e-12
    )
    assert abs(forward - reverse) > 0.1


def stepped(
    run: fq.Run, net: Submodel, weights, rows: Tensor, teacher: Tensor, lr: float
) -> dict[str, Tensor]:
    """Take one step of SGD on KL(teacher ‖ net) over some public samples, in plain torch."""
    module = run.world.family.assemble(net, in_scope(weights, net.scope))
    kl(teacher[rows], module(run.world.public[rows])).backward()
    return {name: value.detach() - lr * value.grad for name, value in module.named_parameters()}


def test_one_step_of_the_server_is_one_of_sgd_on_kl(perceptron, make_data):
    method = FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=ONE_STEP)
    run = start(method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC))
    merged = folded(run, received(run))
    server, teacher = merged_server(run, merged), merged.outputs[OUTPUTS]
    after, learnt = learn(run.federation, server, merged, run.engine)
    rows, held = ONE_STEP.split(NUM_PUBLIC, run.world.seed)
    assert (len(rows), len(held)) == (7, 3)
    assert sorted([*rows.tolist(), *held.tolist()]) == list(range(NUM_PUBLIC))
    assert learnt.steps == 2  # One of each prototype
    for net in method.nets(run.world):
        expected = stepped(run, net, server.weights, rows, teacher, lr=0.1)
        before, now = (
            in_scope(weights, net.scope) for weights in (server.weights, expected_in(net, expected))
        )
        losses = [
            kl(teacher[held], perceptron.assemble(net, own)(run.world.public[held])).item()
            for own in (before, now)
        ]
        assert losses[1] < losses[0]  # So that the step is kept
        torch.testing.assert_close(in_scope(after.weights, net.scope), expected, rtol=0, atol=1e-12)


def expected_in(net: Submodel, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {net.scope + name: value for name, value in weights.items()}


# --- reductions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["perceptron", "residual"], indirect=True)
def test_feddf_with_one_prototype_and_no_step_is_fedavg(family, make_data, play):
    """It then needs no public samples either."""
    data = make_data(family, SIZES, public=0)
    plain = play(FedAvg(local=LOCAL), family, data)
    run = play(FedDF(local=LOCAL, prototypes=(1.0,), server_training=SILENT), family, data)
    assert run.server.weights.keys() == {"share1/" + name for name in plain.server.weights}
    for name, value in plain.server.weights.items():
        assert torch.equal(run.server.weights["share1/" + name], value)
    for own, other in zip(run.records, plain.records, strict=True):
        assert (own.bytes_down, own.bytes_up, own.macs, own.loss) == (
            other.bytes_down,
            other.bytes_up,
            other.macs,
            other.loss,
        )


@pytest.mark.parametrize(
    "optimizer", [fq.optimizers.SGD(lr=0.5), fq.optimizers.Adam(lr=0.01)], ids=["sgd", "adam"]
)
def test_a_student_whose_teacher_is_itself_does_not_move(optimizer, perceptron, make_data, play):
    """With one client the mean of a group is the client's net, and so is the teacher."""
    data = make_data(perceptron, (9,), public=NUM_PUBLIC)
    how = ServerTraining(optimizer, batch_size=4, steps=12, check_every=3)
    runs = [
        play(FedDF(local=LOCAL, prototypes=(1.0,), server_training=one), perceptron, data)
        for one in (SILENT, how)
    ]
    assert runs[1].records[0].server_steps > 0
    still, learnt = (dict(run.server.weights) for run in runs)
    torch.testing.assert_close(learnt, still, rtol=0, atol=1e-9)


# --- the server's training ----------------------------------------------------------------------

HUGE = fq.optimizers.SGD(lr=1e3, momentum=0.0)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_weights_stay_those_before_the_first_step_if_no_step_is_better(
    engine, perceptron, make_data, play
):
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    options = {"shares": (1.0, 0.5), "engine": engine, "rounds": 1}
    methods = [
        FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=how)
        for how in (SILENT, ServerTraining(HUGE, steps=6, check_every=2))
    ]
    still, learnt = (play(method, perceptron, data, **options) for method in methods)
    for name, value in still.server.weights.items():
        assert torch.equal(learnt.server.weights[name], value)


def test_the_best_of_several_states_is_kept(perceptron, make_data):
    """A step that helps is followed by steps that do not."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    how = ServerTraining(
        fq.optimizers.SGD(lr=2.0, momentum=0.9), batch_size=16, steps=20, check_every=1, patience=20
    )
    method = FedDF(local=LOCAL, prototypes=(1.0,), server_training=how)
    run = start(method, perceptron, data, (1.0,))
    merged = folded(run, received(run, (1.0,) * 3))
    server, teacher = merged_server(run, merged), merged.outputs[OUTPUTS]
    after, learnt = learn(run.federation, server, merged, run.engine)
    assert learnt.steps == 20
    rows, held = how.split(NUM_PUBLIC, run.world.seed)
    (net,) = method.nets(run.world)
    weights, momentum = in_scope(server.weights, net.scope), {}
    losses, states = [], []
    for _ in range(21):
        module = perceptron.assemble(net, weights)
        states.append(weights)
        losses.append(kl(teacher[held], module(run.world.public[held])).item())
        kl(teacher[rows], module(run.world.public[rows])).backward()
        momentum = {
            n: 0.9 * momentum.get(n, 0.0) + value.grad for n, value in module.named_parameters()
        }
        weights = {n: value.detach() - 2.0 * momentum[n] for n, value in module.named_parameters()}
    best = min(range(21), key=losses.__getitem__)
    assert 0 < best < 20
    torch.testing.assert_close(in_scope(after.weights, net.scope), states[best], rtol=0, atol=1e-9)


@pytest.mark.parametrize("patience", [1, 2])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_student_stops_after_a_number_of_comparisons_without_progress(
    engine, patience, perceptron, make_data, play
):
    how = ServerTraining(HUGE, steps=30, check_every=3, patience=patience)
    method = FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=how)
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = play(method, perceptron, data, shares=(1.0, 0.5), engine=engine)
    assert [record.server_steps for record in run.records] == [2 * 3 * patience] * 2


def test_a_student_that_makes_progress_takes_all_steps(perceptron, make_data, play):
    how = ServerTraining(fq.optimizers.SGD(lr=0.01), batch_size=16, steps=12, check_every=4)
    method = FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=how)
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = play(method, perceptron, data, shares=(1.0, 0.5), rounds=1)
    assert run.records[0].server_steps == 2 * 12


def test_a_cosine_lowers_the_servers_rate_at_every_comparison():
    """The factor is (1 + cos(π·j / steps)) / 2 with j = 0, 3, 6, 9 of 12 steps: cos(π/4) is √½ and
    cos(π/2) is 0.
    """
    how = ServerTraining(steps=12, check_every=3, schedule="cosine")
    half = math.sqrt(0.5)
    expected = [1.0, (1 + half) / 2, 0.5, (1 - half) / 2]
    assert [how.rate_factor(check) for check in range(4)] == pytest.approx(expected, abs=1e-12)
    assert [replace(how, schedule="constant").rate_factor(check) for check in range(4)] == [1.0] * 4
    linear = replace(how, schedule="linear")
    assert [linear.rate_factor(check) for check in range(4)] == pytest.approx(
        [1.0, 0.75, 0.5, 0.25]
    )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_steps_of_the_server_have_the_rates_of_the_cosine(engine, perceptron, make_data):
    """Four steps of SGD at 0.1 times 1, 1, ½, ½, compared after every second."""
    how = ServerTraining(
        PLAIN, batch_size=16, steps=4, check_every=2, held_back=0.3, schedule="cosine"
    )
    method = FedDF(local=LOCAL, prototypes=(1.0,), server_training=how)
    run = start(
        method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC), (1.0,), engine=engine
    )
    merged = folded(run, received(run, (1.0,) * 3))
    server, teacher = merged_server(run, merged), merged.outputs[OUTPUTS]
    after, learnt = learn(run.federation, server, merged, run.engine)
    assert learnt.steps == 4
    rows, held = how.split(NUM_PUBLIC, run.world.seed)
    (net,) = method.nets(run.world)
    weights, losses = dict(server.weights), []
    for lr in (0.1, 0.1, 0.05, 0.05):
        weights = expected_in(net, stepped(run, net, weights, rows, teacher, lr))
        own = perceptron.assemble(net, in_scope(weights, net.scope))
        losses.append(kl(teacher[held], own(run.world.public[held])).item())
    assert losses[3] < losses[1]  # So that the last state is kept
    expected = in_scope(weights, net.scope)
    torch.testing.assert_close(in_scope(after.weights, net.scope), expected, rtol=0, atol=1e-12)


def test_the_preset_paper_of_feddf_has_the_settings_of_the_released_commands():
    """total_n_server_pseudo_batches 10000, eval_batches_freq 100, early_stopping_server_batches
    1000, a cosine.
    """
    how = FedDF.preset("paper").server_training
    assert (how.steps, how.check_every, how.patience * how.check_every) == (10_000, 100, 1_000)
    assert (how.optimizer, how.batch_size) == (fq.optimizers.Adam(lr=1e-3), 128)
    assert (how.stop_by, how.schedule) == ("labels", "cosine")


@pytest.mark.parametrize(("steps", "every"), [(5, 2), (7, 3), (3, 20)])
def test_a_student_never_takes_more_steps_than_it_may(steps, every, perceptron, make_data, play):
    how = ServerTraining(
        fq.optimizers.SGD(lr=0.01), batch_size=16, steps=steps, check_every=every, patience=100
    )
    method = FedDF(local=LOCAL, prototypes=(1.0,), server_training=how)
    run = play(method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC), rounds=1)
    assert run.records[0].server_steps <= steps


@pytest.mark.parametrize("kind", [DSFL, FedET])
def test_a_server_without_steps_keeps_its_nets(kind, perceptron, make_data, play):
    """Clients go on to exchange predictions, and Fed-ET's representation is as it was drawn."""
    method = kind(local=LOCAL, prototypes=(0.5, 0.25), server_training=SILENT)
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = play(method, perceptron, data, shares=(0.5, 0.25))
    before = method.init(run.world).weights
    scopes = ("server/",) if kind is FedET else ("share0.5/", "share0.25/")
    for scope in scopes:
        torch.testing.assert_close(
            in_scope(run.server.weights, scope), in_scope(before, scope), rtol=0, atol=0
        )
    assert [record.server_steps for record in run.records] == [0, 0]


def test_labels_of_clients_decide_where_the_preset_says_so(perceptron, make_data, play):
    """Steps towards the teacher that do not raise the accuracy on clients' samples are undone."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    how = ServerTraining(HUGE, steps=4, check_every=2, stop_by="labels")
    assert FedDF.preset("labels").server_training.stop_by == "labels"
    options = {"local": LOCAL, "prototypes": (1.0,)}
    still = play(FedDF(**options, server_training=SILENT), perceptron, data, rounds=1)
    learnt = play(FedDF(**options, server_training=how), perceptron, data, rounds=1)
    inputs, targets = data.inputs, data.targets

    def accuracy(run: fq.Run) -> float:
        module = perceptron.assemble(
            Submodel(perceptron.whole), in_scope(run.server.weights, "share1/")
        )
        return float((module(inputs).argmax(1) == targets).double().mean())

    assert accuracy(learnt) >= accuracy(still)
    assert learnt.records[0].server_steps == 4


def test_server_macs_are_those_of_teachers_training_and_comparisons(perceptron, make_data, play):
    """A step costs three forward passes of each sample. Students are compared before the first step
    too.
    """
    how = ServerTraining(
        fq.optimizers.SGD(lr=0.01), batch_size=4, steps=6, check_every=2, patience=10
    )
    method = FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=how)
    run = play(
        method,
        perceptron,
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        shares=(1.0, 0.5),
        rounds=1,
    )
    (record,) = run.records
    clients = [
        run.fleet.client(id, 0, run.world.seed, size, id).budget.share
        for id, size in enumerate(SIZES)
    ]
    teachers = sum(MACS[share] for share in clients) * NUM_PUBLIC
    both = sum(MACS.values())
    training = 3 * both * 6 * 4  # Steps of 4 samples
    comparisons = both * 4 * 2  # Four of two held-back samples
    assert record.server_macs == teachers + training + comparisons
    assert record.server_steps == 2 * 6
    plain = play(
        FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=SILENT),
        perceptron,
        run.data,
        (1.0, 0.5),
    )
    assert record.macs == plain.records[0].macs  # Those of clients are counted apart.


LEARNING_KEYS = {"server_seconds", "server_macs", "server_steps"}


@pytest.mark.parametrize("kind", [FedDF, DSFL, FedET])
def test_records_have_the_costs_of_a_server_that_learns(kind, perceptron, make_data, play):
    prototypes = (0.5, 0.25) if kind is FedET else (1.0, 0.5)
    method = kind(
        local=LOCAL, prototypes=prototypes, server_training=ServerTraining(steps=4, check_every=2)
    )
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    (record,) = play(method, perceptron, data, shares=(1.0, 0.5), rounds=1).records
    written = record.to_dict()
    assert written.keys() >= LEARNING_KEYS
    assert 0 < written["server_seconds"] < record.seconds
    assert written["server_steps"] == 4 * (1 if kind is FedET else 2)
    assert type(record).from_dict(written) == replace(record, stacks=0)


@pytest.mark.parametrize(
    "method", [FedAvg(local=LOCAL), HeteroFL(local=LOCAL), FedDF(server_training=SILENT)]
)
def test_records_of_a_server_that_does_not_learn_are_without_these_keys(
    method, perceptron, make_data, play
):
    (record,) = play(method, perceptron, make_data(perceptron, SIZES), rounds=1).records
    assert not record.to_dict().keys() & LEARNING_KEYS


# --- teachers -----------------------------------------------------------------------------------


def test_positions_of_a_teacher_that_a_link_lost_are_the_servers(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0,)),
        perceptron,
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        (1.0,),
    )
    (update,) = received(run, (1.0,), (8,))
    (payload,) = update.sent
    part = perceptron.part(payload.submodel, 0.5)
    narrow = perceptron.cutter.narrow(payload.weights, payload.submodel.held, part.held)
    arrived = replace(update, sent=(Payload(part, narrow),))
    own, theirs = in_scope(run.server.weights, "share1/"), payload.weights
    filled = {
        "first.weight": torch.cat([theirs["first.weight"][:3], own["first.weight"][3:]]),
        "first.bias": torch.cat([theirs["first.bias"][:3], own["first.bias"][3:]]),
        "last.weight": torch.cat([theirs["last.weight"][:, :3], own["last.weight"][:, 3:]], 1),
        "last.bias": theirs["last.bias"],
    }
    with torch.no_grad():
        expected = perceptron.assemble(payload.submodel, filled)(run.world.public)
    torch.testing.assert_close(
        folded(run, [arrived]).outputs[OUTPUTS], expected, rtol=0, atol=1e-12
    )


def test_rows_of_classes_that_a_client_does_not_send_are_the_servers(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0,)),
        perceptron,
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        (1.0,),
    )
    (update,) = received(run, (1.0,), (8,))
    (payload,) = update.sent
    learner = FedDF(local=replace(LOCAL, masked="client")).learner(update.job, run.world)
    member = perceptron.member(payload.submodel)
    part = learner.upload(member, payload.submodel, torch.tensor([True, False, True]))
    narrow = perceptron.cutter.narrow(payload.weights, payload.submodel.held, part.held)
    arrived = replace(update, sent=(Payload(part, narrow),))
    filled = {name: value.clone() for name, value in payload.weights.items()}
    for name in ("last.weight", "last.bias"):
        filled[name][1] = run.server.weights["share1/" + name][1]
    with torch.no_grad():
        expected = perceptron.assemble(payload.submodel, filled)(run.world.public)
    torch.testing.assert_close(
        folded(run, [arrived]).outputs[OUTPUTS], expected, rtol=0, atol=1e-12
    )


def test_a_net_that_got_lost_does_not_teach(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    first, second, third = received(run)
    merged = folded(run, [first, replace(second, sent=()), third])
    both = folded(run, [first, third])
    torch.testing.assert_close(merged.outputs[OUTPUTS], both.outputs[OUTPUTS], rtol=0, atol=0)
    assert merged.macs == both.macs
    nothing = folded(run, [replace(one, sent=()) for one in (first, second)])
    assert (dict(nothing.outputs), nothing.macs) == ({}, 0)
    after, learnt = learn(run.federation, merged_server(run, nothing), nothing, run.engine)
    assert (learnt.steps, learnt.macs) == (0, 0)
    assert dict(after.weights) == dict(run.server.weights)


@pytest.mark.parametrize("kind", [FedDF, FedET])
def test_two_partial_folds_joined_are_one_fold_over_all_updates(kind, perceptron, make_data):
    run = start(
        kind(prototypes=(0.5, 0.25)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run, (0.5, 0.25, 0.5, 0.25, 0.5), (8, 4, 12, 3, 1))
    whole = folded(run, updates)
    folds = [run.method.fold(run.server, run.world) for _ in range(3)]
    for fold, some in zip(folds, (updates[:2], [], updates[2:]), strict=True):
        assert isinstance(fold, Teachers)
        for update in some:
            fold.add(update)
    first, *others = folds
    for other in others:
        first.join(other)
    joined = first.finish(run.server)
    torch.testing.assert_close(dict(joined.weights), dict(whole.weights), rtol=0, atol=1e-9)
    assert joined.outputs.keys() == whole.outputs.keys() == {OUTPUTS if kind is FedDF else EACH}
    torch.testing.assert_close(dict(joined.outputs), dict(whole.outputs), rtol=0, atol=1e-9)
    assert joined.macs == whole.macs


def test_a_stack_of_updates_is_the_same_as_one_after_another(perceptron, make_data):
    run = start(
        FedDF(prototypes=(1.0, 0.5)), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)
    )
    updates = received(run, (0.5, 0.5, 0.5))
    fold = run.method.fold(run.server, run.world)
    names = updates[0].sent[0].weights
    fold.add_stack(
        updates,
        [{name: torch.stack([one.sent[0].weights[name] for one in updates]) for name in names}],
    )
    stacked, whole = fold.finish(run.server), folded(run, updates)
    torch.testing.assert_close(dict(stacked.weights), dict(whole.weights), rtol=0, atol=1e-9)
    torch.testing.assert_close(dict(stacked.outputs), dict(whole.outputs), rtol=0, atol=1e-9)


# --- DS-FL --------------------------------------------------------------------------------------


def dsfl(**settings) -> DSFL:
    how = {
        "local": LOCAL,
        "prototypes": (1.0, 0.5),
        "server_training": ServerTraining(steps=4, check_every=2),
    }
    return DSFL(**{**how, **settings})


def test_sharpening_is_a_softmax_of_the_mean_over_t():
    mean = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]], dtype=torch.float64)
    found = sharpened(mean, 0.1)
    for row, probabilities in zip(mean.tolist(), found.tolist(), strict=True):
        powers = [math.exp(p / 0.1) for p in row]
        assert probabilities == pytest.approx([power / sum(powers) for power in powers], abs=1e-12)
    assert bool((entropy(found) < entropy(mean)).all())
    uniform = torch.full((1, 3), 1 / 3, dtype=torch.float64)
    torch.testing.assert_close(sharpened(uniform, 0.1), uniform, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sharpen", [True, False])
def test_the_global_predictions_are_the_sharpened_mean_of_the_clients_probabilities(
    sharpen, perceptron, make_data, play
):
    """Clients count alike, whatever their number of samples."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = play(dsfl(sharpen=sharpen), perceptron, data, shares=(1.0, 0.5), rounds=1)
    assert len(run.server.memory) == 4
    probabilities = []
    for memory in run.server.memory.values():
        with torch.no_grad():
            logits = perceptron.assemble(memory.submodel, memory.weights)(run.world.public)
        probabilities.append(logits.softmax(1))
    mean = torch.stack(probabilities).mean(0)
    expected = (mean / 0.1).softmax(1) if sharpen else mean
    found = run.server.extras[PREDICTIONS]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    if sharpen:
        assert bool((entropy(found) < entropy(mean)).all())


def test_soft_labels_are_a_cross_entropy_and_a_row_of_zeros_has_no_effect(perceptron):
    logits = torch.tensor([[1.0, -1.0, 0.5], [3.0, 2.0, 1.0]], dtype=torch.float64)
    rows = torch.tensor([[0.7, 0.2, 0.1], [0.0, 0.0, 0.0]], dtype=torch.float64)
    total = sum(math.exp(z) for z in (1.0, -1.0, 0.5))
    by_hand = -sum(
        p * math.log(math.exp(z) / total)
        for p, z in zip((0.7, 0.2, 0.1), (1.0, -1.0, 0.5), strict=True)
    )
    inputs = torch.zeros(2, 4, dtype=torch.float64)
    assert value_of(SoftLabels(), perceptron, inputs, rows, logits) == pytest.approx(
        by_hand / 2, abs=1e-12
    )
    moved = torch.cat([logits[:1], -5 * logits[1:]])
    assert value_of(SoftLabels(), perceptron, inputs, rows, moved) == pytest.approx(
        by_hand / 2, abs=1e-12
    )


@pytest.mark.parametrize("samples", [0, 6], ids=["all", "drawn"])
def test_a_client_distils_the_global_predictions_before_it_trains_on_its_own_samples(
    samples, perceptron, make_data
):
    """Two rounds of one client in plain torch. In the first there is nothing to distil."""
    method = dsfl(prototypes=(1.0,), public_epochs=2, samples=samples)
    run = start(method, perceptron, make_data(perceptron, (9,), public=NUM_PUBLIC), (1.0,)).train(1)
    (memory,) = run.server.memory.values()
    rows = run.server.extras[PREDICTIONS]
    module = perceptron.assemble(memory.submodel, memory.weights)
    drawn = drawn_positions(run.world.seed, 0, samples, NUM_PUBLIC)
    assert len(drawn) == len(rows) == (samples or NUM_PUBLIC)
    public = run.world.public[drawn]
    with torch.no_grad():
        torch.testing.assert_close(
            rows, sharpened(module(public).softmax(1), 0.1), rtol=0, atol=1e-12
        )

    client = run.fleet.client(0, 1, run.world.seed, 9, 0)
    (net,) = method.plan(run.server, client, run.world)
    job = Job(client, net, 1)
    learner = method.learner(job, run.world)
    assert method.learner(replace(job, round=0), run.world).lesson is None

    def step(loss: Tensor) -> None:
        module.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in module.parameters():
                weight -= 0.1 * weight.grad

    batches = itinerary(len(drawn), learner.lesson.local, run.engine.keys(job)[0])
    assert sorted(torch.cat(batches).tolist()) == sorted(2 * list(range(len(drawn))))
    for batch in batches:
        step(-(rows[batch] * module(public[batch]).log_softmax(1)).sum(1).mean())
    for batch in run.engine.batches(job, learner):
        step(F.cross_entropy(module(run.data.inputs[batch]), run.data.targets[batch]))
    run = run.train(2)
    assert run.server.round == 2
    (after,) = run.server.memory.values()
    expected = {name: value.detach() for name, value in module.named_parameters()}
    torch.testing.assert_close(dict(after.weights), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("samples", [0, 6])
def test_lessons_and_predictions_are_counted_in_macs(samples, perceptron, make_data, play):
    """A step costs three forward passes of each sample, and a prediction one."""
    method = dsfl(prototypes=(1.0,), public_epochs=2, samples=samples)
    run = play(method, perceptron, make_data(perceptron, (9,), public=NUM_PUBLIC))
    training, drawn = 3 * 9 * MACS[1.0], samples or NUM_PUBLIC
    predicting, lesson = drawn * MACS[1.0], 3 * 2 * drawn * MACS[1.0]
    assert [record.macs for record in run.records] == [
        training + predicting,
        training + predicting + lesson,
    ]


def test_every_round_draws_different_public_samples():
    draws = [drawn_positions(3, round, 6, NUM_PUBLIC).tolist() for round in range(5)]
    assert all(sorted(set(draw)) == draw and len(draw) == 6 for draw in draws)
    assert len({tuple(draw) for draw in draws}) > 1
    assert draws[0] == drawn_positions(3, 0, 6, NUM_PUBLIC).tolist()
    for draw in (0, NUM_PUBLIC, 1000):
        assert drawn_positions(3, 0, draw, NUM_PUBLIC).tolist() == list(range(NUM_PUBLIC))


@dataclass(frozen=True)
class Recording(fq.Link):
    """A link without loss that remembers all payloads, with True for those to the server."""

    payloads: list[tuple[bool, Payload]] = field(default_factory=list, compare=False)

    def _carry(self, payload: Payload, trip: Transmission, *others) -> Arrival:
        self.payloads.append((trip.up, payload))
        return super()._carry(payload, trip, *others)


@pytest.mark.parametrize("family", ["perceptron", "residual"], indirect=True)
def test_nets_of_dsfl_stay_on_clients(family, make_data, play):
    link = Recording()
    data = make_data(family, SIZES, public=NUM_PUBLIC)
    play(dsfl(), family, data, shares=(1.0, 0.5), rounds=3, link=link)
    assert [up for up, _ in link.payloads].count(True) == 3 * 4
    assert [up for up, _ in link.payloads].count(False) == 3 * 4
    for _, payload in link.payloads:
        assert dict(payload.weights) == {}
        assert dict(payload.slots) == {}
        assert set(payload.extras) == {PREDICTIONS}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_client_of_dsfl_continues_from_its_own_net_bit_for_bit(engine, perceptron, make_data):
    """From the second round on the rate is too small to move a weight, so that a net that started
    from anything but
    its own state would differ from it.
    """
    method = dsfl(local=replace(LOCAL, schedule=fq.schedules.Steps((1,), 1e-300)))
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    run = start(method, perceptron, data, engine=engine, link=(link := Recording())).train(1)
    server_nets = {key: in_scope(run.server.weights, key[1]) for key in run.server.memory}
    kept = {
        key: {n: v.clone() for n, v in memory.weights.items()}
        for key, memory in run.server.memory.items()
    }
    assert sorted(client for client, _ in kept) == [0, 1, 2, 3]
    for (
        key,
        weights,
    ) in kept.items():  # A state of its own: neither the server's nor another client's
        assert not any(
            torch.equal(value, server_nets[key][name]) for name, value in weights.items()
        )
        for other, theirs in kept.items():
            assert (
                other == key
                or other[1] != key[1]
                or not torch.equal(weights["last.bias"], theirs["last.bias"])
            )

    run = run.train(3)
    assert run.server.round == 3
    for key, memory in run.server.memory.items():
        for name, value in memory.weights.items():
            assert torch.equal(value, kept[key][name])
    for _, payload in link.payloads:
        assert not payload.weights
        assert not payload.slots


def test_a_net_of_dsfl_can_be_deployed_from_its_client(perceptron, make_data):
    run = start(dsfl(), perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC)).train(2)
    for (client, _), memory in run.server.memory.items():
        module = run.deploy(fq.Budget(share=1.0), client=client)
        torch.testing.assert_close(
            module.state_dict(), dict(memory.weights), rtol=0, atol=0, check_dtype=False
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_predictions_cost_rows_times_classes_times_four_bytes_each_way(
    engine, perceptron, make_data, play
):
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    options = {"shares": (1.0, 0.5), "rounds": 3, "precision": "fp32", "engine": engine}
    for record in play(dsfl(), perceptron, data, **options).records:
        assert record.bytes_down == record.bytes_up == len(SIZES) * NUM_PUBLIC * 3 * 4
    for record in play(dsfl(samples=6), perceptron, data, **options).records:
        assert record.bytes_up == len(SIZES) * 6 * 3 * 4
        # The round of the draw is a number of 8 bytes.
        assert record.bytes_down == len(SIZES) * (6 * 3 * 4 + 8)


# --- Fed-ET -------------------------------------------------------------------------------------

# Nets A, B and C. On the first sample C dissents with a small variance, on the second nobody does.
LOGITS = torch.tensor(
    [
        [[3.0, 0.0, 0.0], [0.0, 6.0, 0.0]],
        [[6.0, 0.0, 0.0], [0.0, 3.0, 0.0]],
        [[0.0, 0.0, 1.5], [1.0, 2.0, 0.0]],
    ],
    dtype=torch.float64,
)
# The variance of (a, 0, 0) is a²·2/9, and that of (1, 2, 0) is 2/3.
VARIANCES = [[2.0, 8.0, 0.5], [8.0, 2.0, 2 / 3]]


def test_consensus_weights_are_the_shares_of_the_variances_over_classes():
    found = consensus_weights(LOGITS)
    assert found.shape == (3, 2, 1)
    for sample, variances in enumerate(VARIANCES):
        expected = [one / sum(variances) for one in variances]
        assert found[:, sample, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_the_consensus_is_the_label_of_the_weighted_logits_and_the_mix_of_those_that_dissent():
    rows = consensus(LOGITS)
    assert rows.shape == (2, 2, 3)
    label, dissent = rows.unbind(1)
    # Σ α·s of the first sample: (2·3 + 8·6, 0, 0.5·1.5) / 10.5. Of the second the class 1 wins.
    assert label.tolist() == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    total = 2 + math.exp(1.5)
    assert dissent[0].tolist() == pytest.approx(
        [1 / total, 1 / total, math.exp(1.5) / total], abs=1e-12
    )
    assert dissent[1].tolist() == [0.0, 0.0, 0.0]


def test_several_nets_that_dissent_are_mixed_by_their_variances():
    logits = torch.tensor(
        [[[0.0, 9.0, 0.0]], [[3.0, 0.0, 0.0]], [[0.0, 0.0, 1.5]]], dtype=torch.float64
    )
    label, dissent = consensus(logits, temperature=2.0).unbind(1)
    assert label.tolist() == [[0.0, 1.0, 0.0]]
    mixed = [2.0 / 2.5 * 3.0, 0.0, 0.5 / 2.5 * 1.5]
    powers = [math.exp(z / 2) for z in mixed]
    assert dissent[0].tolist() == pytest.approx([one / sum(powers) for one in powers], abs=1e-12)


def test_a_net_with_a_large_variance_outvotes_two_others():
    """A plain vote would give class 0."""
    logits = torch.tensor(
        [[[1.0, 0.0, 0.0]], [[1.0, 0.0, 0.0]], [[0.0, 8.0, 0.0]]], dtype=torch.float64
    )
    label, dissent = consensus(logits).unbind(1)
    assert label.tolist() == [[0.0, 1.0, 0.0]]
    assert float(dissent[0, 0]) > float(dissent[0, 1])


def test_nets_without_an_opinion_have_a_consensus_of_finite_numbers():
    rows = consensus(torch.zeros(3, 2, 3, dtype=torch.float64))
    assert bool(rows.isfinite().all())
    assert rows[:, 1].tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize(("weight", "temperature"), [(0.05, 1.0), (0.7, 2.0), (0.0, 1.0)])
def test_the_consensus_loss_is_cross_entropy_plus_lambda_kl(weight, temperature, perceptron):
    rows = consensus(LOGITS, temperature)
    student = torch.tensor([[0.5, -1.0, 2.0], [1.0, 0.0, -0.5]], dtype=torch.float64)
    log_q = [[z - math.log(sum(map(math.exp, row))) for z in row] for row in student.tolist()]
    agreement = -(log_q[0][0] + log_q[1][1]) / 2
    cooled = [z / temperature for z in student[0].tolist()]
    log_cooled = [z - math.log(sum(map(math.exp, cooled))) for z in cooled]
    powers = [math.exp(z / temperature) for z in (0.0, 0.0, 1.5)]
    p = [one / sum(powers) for one in powers]
    forward = sum(a * (math.log(a) - b) for a, b in zip(p, log_cooled, strict=True))
    reverse = sum(math.exp(b) * (b - math.log(a)) for a, b in zip(p, log_cooled, strict=True))
    assert abs(forward - reverse) > 1e-3
    objective = ConsensusLoss(weight, temperature)
    found = value_of(objective, perceptron, torch.zeros(2, 4, dtype=torch.float64), rows, student)
    assert found == pytest.approx(agreement + weight * forward / 2, abs=1e-12)


def test_one_step_of_fedets_server_is_one_of_sgd_on_the_consensus_loss(perceptron, make_data):
    method = FedET(local=LOCAL, prototypes=(0.5, 0.25), diversity=0.3, server_training=ONE_STEP)
    run = start(method, perceptron, make_data(perceptron, SIZES, public=NUM_PUBLIC))
    updates = received(run, (0.5, 0.25, 0.5))
    merged = folded(run, updates)
    logits = torch.stack(
        [plain_outputs(perceptron, update, run.world.public) for update in updates]
    )
    torch.testing.assert_close(merged.outputs[EACH], logits, rtol=0, atol=1e-12)
    label, dissent = consensus(logits).unbind(1)
    server = merged_server(run, merged)
    after, learnt = learn(run.federation, server, merged, run.engine)
    assert learnt.steps == 1
    rows, held = ONE_STEP.split(NUM_PUBLIC, run.world.seed)

    def loss(module: torch.nn.Module, chosen: Tensor) -> Tensor:
        log_q = module(run.world.public[chosen]).log_softmax(1)
        diversity = (
            (torch.xlogy(dissent[chosen], dissent[chosen]) - dissent[chosen] * log_q).sum(1).mean()
        )
        return F.nll_loss(log_q, label[chosen].argmax(1)) + 0.3 * diversity

    net = method.server_net(run.world)
    module = perceptron.assemble(net, in_scope(server.weights, net.scope))
    before = loss(module, held).item()
    loss(module, rows).backward()
    expected = {
        name: value.detach() - 0.1 * value.grad for name, value in module.named_parameters()
    }
    assert loss(perceptron.assemble(net, expected), held).item() < before
    torch.testing.assert_close(in_scope(after.weights, net.scope), expected, rtol=0, atol=1e-12)


def test_the_representation_is_sent_back_if_shapes_match(perceptron, make_data, play):
    """Prototypes of another width keep their own, and every net keeps its own output layer."""
    data, how = (
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        ServerTraining(steps=4, check_every=2),
    )
    settings = {"local": LOCAL, "prototypes": (1.0, 0.5)}
    options = {"shares": (1.0, 0.5), "rounds": 1}
    run = play(FedET(**settings, server_training=how), perceptron, data, **options)
    means = play(
        FedDF(**settings, server_training=SILENT), perceptron, data, **options
    ).server.weights
    weights = run.server.weights
    for name in ("first.weight", "first.bias"):
        assert torch.equal(weights["share1/" + name], weights["server/" + name])
        assert not torch.equal(weights["share1/" + name], means["share1/" + name])
    for name in ("last.weight", "last.bias"):
        assert not torch.equal(weights["share1/" + name], weights["server/" + name])
        assert torch.equal(weights["share1/" + name], means["share1/" + name])
    for name in ("first.weight", "first.bias", "last.weight", "last.bias"):
        assert torch.equal(weights["share0.5/" + name], means["share0.5/" + name])


def test_a_device_gets_the_servers_net_if_it_can_run_it(perceptron, make_data, play):
    run = play(
        FedET(local=LOCAL, prototypes=(0.5, 0.25), server_training=ONE_STEP),
        perceptron,
        make_data(perceptron, SIZES, public=NUM_PUBLIC),
        shares=(0.5, 0.25),
        rounds=1,
    )
    scopes = {
        share: [
            net.scope for net in run.method.deploy(run.server, fq.Budget(share=share), run.world)
        ]
        for share in (1.0, 0.5, 0.3)
    }
    assert scopes == {1.0: ["server/"], 0.5: ["share0.5/"], 0.3: ["share0.25/"]}


# --- initial weights ----------------------------------------------------------------------------


def test_every_prototype_is_drawn_by_itself_and_the_first_with_the_seed_of_the_run(perceptron):
    world = fq.methods.api.World(perceptron, seed=3, precision="fp64")
    server = FedET(prototypes=(1.0, 0.5)).init(world)
    whole = perceptron.init(3, dtype=torch.float64)
    assert set(server.weights) == {
        scope + name for scope in ("share1/", "share0.5/", "server/") for name in whole
    }
    for name, value in whole.items():
        assert torch.equal(server.weights["share1/" + name], value)
        assert not torch.equal(server.weights["server/" + name], value)
    cut = perceptron.cutter.gather(whole, prefix(perceptron.fit(fq.Budget(share=0.5))), list(whole))
    small = in_scope(server.weights, "share0.5/")
    for name, value in cut.items():
        assert small[name].shape == value.shape
        assert not torch.allclose(small[name], value)
    # The last layer has 3 inputs instead of 6, so that its range is √2 times as wide.
    assert 6**-0.5 < float(small["last.weight"].abs().max()) <= 3**-0.5


# --- several architectures ----------------------------------------------------------------------


class Deep(nn.Module):
    """Three linear layers: 4 inputs, 5 and 7 hidden, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


@pytest.fixture
def union(perceptron: fq.Family) -> fq.Family:
    """Return a union of two architectures with 76 and 42 multiply-adds, the larger first."""
    return fq.union({"deep": fq.trace(Deep, torch.zeros(2, 4)), "flat": perceptron})


BY_NET = (fq.Budget(macs=76), fq.Budget(macs=42))


def of_nets(run: fq.Run, places=(0, 1, 1), sizes=(8, 4, 12)) -> list[Update]:
    """Return updates of clients whose nets differ from the server's by noise, each of one
    architecture.
    """
    generator = torch.Generator().manual_seed(11)
    updates = []
    for client, (place, size) in enumerate(zip(places, sizes, strict=True)):
        net = run.method.nets(run.world)[place]
        server = {
            name: run.server.weights[net.scope + name]
            for name in run.world.family.member(net).trainable
        }
        noisy = {
            n: v + torch.randn(v.shape, generator=generator, dtype=v.dtype)
            for n, v in server.items()
        }
        job = Job(Client(client, BY_NET[place], size), net, 0)
        updates.append(Update(job, (Payload(net, noisy),), steps=1))
    return updates


def test_feddfs_teacher_is_the_mean_over_nets_of_all_architectures(union, make_data):
    run = start(FedDF(), union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
    updates = of_nets(run)
    first, second, third = (plain_outputs(union, update, run.world.public) for update in updates)
    merged = folded(run, updates)
    torch.testing.assert_close(
        merged.outputs[OUTPUTS], (first + second + third) / 3, rtol=0, atol=1e-12
    )
    deep, flat, other = (dict(update.sent[0].weights) for update in updates)
    for name, value in deep.items():
        torch.testing.assert_close(merged.weights["deep/" + name], value, rtol=0, atol=1e-12)
    for name, value in flat.items():
        mean = (4 * value + 12 * other[name]) / 16
        torch.testing.assert_close(merged.weights["flat/" + name], mean, rtol=0, atol=1e-12)


def test_a_client_trains_the_largest_net_that_its_budget_holds(union, make_data):
    run = start(FedDF(), union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)

    def net_of(budget: fq.Budget) -> str:
        (net,) = run.method.plan(run.server, Client(0, budget, 4), run.world)
        return net.scope

    deep, flat = (
        union.cost(union.at(net).whole, run.method.training_step(run.world))
        for net in ("deep", "flat")
    )
    assert (deep.macs, flat.macs) == (76, 42)
    assert [net_of(fq.Budget(macs=macs)) for macs in (76, 75, 42)] == ["deep/", "flat/", "flat/"]
    assert [net_of(fq.Budget(params=count)) for count in (deep.params, deep.params - 1)] == [
        "deep/",
        "flat/",
    ]
    assert [net_of(fq.Budget(memory=size)) for size in (deep.memory, deep.memory - 1)] == [
        "deep/",
        "flat/",
    ]
    assert net_of(fq.Budget(share=1.0)) == "deep/"
    with pytest.raises(
        BudgetError,
        match=r"holds none of the nets deep, flat. The smallest is 'flat': macs: 41 allowed",
    ):
        net_of(fq.Budget(macs=41))
    with pytest.raises(
        BudgetError,
        match=r"a share of 0.5 was given .* no common share. Bounds on macs, params or memory",
    ):
        net_of(fq.Budget(share=0.5))


def test_feddf_on_a_union_of_one_net_without_a_step_is_fedavg(perceptron, make_data, play):
    """One prototype, whose mean is weighted by data, and no server that learns."""
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    averaged = play(FedAvg(local=LOCAL), perceptron, data)
    distilled = play(
        FedDF(local=LOCAL, server_training=SILENT), fq.union({"flat": perceptron}), data
    )
    for name, weight in averaged.server.weights.items():
        torch.testing.assert_close(
            distilled.server.weights[f"flat/flat.{name}"], weight, rtol=0, atol=1e-12
        )
    assert distilled.accuracy == averaged.accuracy


def test_feddf_on_a_union_of_two_widths_is_feddf_of_two_prototypes(perceptron, make_data):
    """The nets of a union may be widths of one model, which are its prototypes without a union."""
    narrow = fq.trace(lambda: Perceptron(3), torch.zeros(2, 4))
    union = fq.union({"wide": perceptron, "narrow": narrow})
    data = make_data(perceptron, SIZES, public=NUM_PUBLIC)
    runs = []
    for family, shares in (
        (perceptron, (1.0, 0.5)),
        (union, (fq.Budget(macs=MACS[1.0]), fq.Budget(macs=MACS[0.5]))),
    ):
        run = start(
            FedDF(local=LOCAL, prototypes=(1.0, 0.5), server_training=ONE_STEP),
            family,
            data,
            shares,
        )
        runs.append(run)
    names = {"share1/": "wide/wide.", "share0.5/": "narrow/narrow."}
    same = {}
    for scope, other in names.items():
        same |= {
            other + name: value for name, value in in_scope(runs[0].server.weights, scope).items()
        }
    runs[1].server = replace(runs[1].server, weights=same)
    for run in runs:
        run.train(2)
    for scope, other in names.items():
        for name, value in in_scope(runs[0].server.weights, scope).items():
            torch.testing.assert_close(
                runs[1].server.weights[other + name], value, rtol=0, atol=1e-12
            )


def test_fed_ets_server_trains_the_first_net_and_clients_the_others(union, make_data):
    method = FedET(local=LOCAL, server_training=ONE_STEP)
    run = start(method, union, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
    assert [net.scope for net in method.nets(run.world)] == ["flat/"]
    assert {name.split("/")[0] for name in run.server.weights} == {"server", "flat"}
    before = dict(run.server.weights)
    run.train(1)
    moved = {
        name.split("/")[0]
        for name, value in run.server.weights.items()
        if not torch.equal(value, before[name])
    }
    assert moved == {"server", "flat"}
    assert run.accuracy.keys() == {"1.0", str(round(42 / 76, 4))}
    assert type(run.deploy(BY_NET[0])) is Deep
    assert type(run.deploy(BY_NET[1])) is Perceptron


@pytest.mark.parametrize(
    ("order", "message"),
    [(("flat", "deep"), "'deep' has more multiply-adds"), (("flat",), "no other")],
)
def test_fed_et_refuses_a_union_whose_first_net_is_not_the_largest_of_several(
    order, message, union, make_data
):
    nets = {
        "deep": fq.trace(Deep, torch.zeros(2, 4)),
        "flat": fq.trace(Perceptron, torch.zeros(2, 4)),
    }
    other = fq.union({name: nets[name] for name in order})
    with pytest.raises(
        ConfigError, match=f"{message}.* A union of two or more nets, the largest first, would work"
    ):
        start(FedET(), other, make_data(union, SIZES, public=NUM_PUBLIC), BY_NET)
