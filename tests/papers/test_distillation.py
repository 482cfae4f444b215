"""Distillation at the server: its training on public samples, and teachers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import DSFL, FedAvg, FedDF, FedET, HeteroFL
from fedquilt.round.learning import learn
from fedquilt.round.teachers import EACH, OUTPUTS, Teachers
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Payload, Submodel
from tests.papers.distilling import (
    LOCAL,
    MACS,
    NUM_PUBLIC,
    PLAIN,
    SILENT,
    SIZES,
    expected_in,
    folded,
    in_scope,
    kl,
    merged_server,
    received,
    start,
    stepped,
)

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
    narrow = perceptron.cutter.narrow(payload.weights, payload.submodel.positions, part.positions)
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
    narrow = perceptron.cutter.narrow(payload.weights, payload.submodel.positions, part.positions)
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
