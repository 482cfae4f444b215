"""RaFL (Yu et al. 2022): equations 2 to 7, and algorithms 1 and 2."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.family.variants import members_of
from fedquilt.methods import FedAvg, RaFL
from fedquilt.methods.rafl import Softened
from fedquilt.round.teachers import OUTPUTS
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.mutual import Mutual
from fedquilt.round.training.objectives import TaskLoss
from fedquilt.round.training.view import View
from fedquilt.terms import WHOLE, Client, Job, Payload, Update
from tests.pairs import (
    SIZES,
    pair,
    perceptrons,
    plain_pairs,
)
from tests.papers.pairs_of_nets import (
    LOCAL,
    NUM_PUBLIC,
    ONE_STEP,
    PAIR,
    a_batch,
    gradients_of,
    kl,
    modules,
    pair_state,
    start,
)

# --- equations 2 to 5 ---------------------------------------------------------------------------


def test_equations_2_and_3_by_hand():
    """Two samples of three classes. KL(p ‖ q) and KL(q ‖ p) differ, so that swapped arguments would
    be noticed.
    """
    family = perceptrons(big=4)
    member = family.member(pair(family, "big"))
    p = torch.tensor([[0.5, 0.25, 0.25], [0.6, 0.3, 0.1]], dtype=torch.float64)
    k = torch.tensor([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6]], dtype=torch.float64)
    targets = torch.tensor([0, 1])
    known = {member.at("big"): p.log(), member.at(WHOLE): k.log()}
    inputs, weights = torch.zeros(2, 4).double(), family.init(0, dtype=torch.float64)
    mode = LOCAL.norm.training_pass(False)
    held, key = torch.ones(3, dtype=torch.bool), torch.tensor(0)

    def value(learns: str) -> float:
        view = View(
            member, weights, inputs, targets, held, weights, mode, key, logits_by_net=dict(known)
        )
        return float(Mutual(TaskLoss(), PAIR, learns=(learns,))(view))

    cross_entropy_p, cross_entropy_k = (
        -(math.log(0.5) + math.log(0.3)) / 2,
        -(math.log(0.1) + math.log(0.2)) / 2,
    )
    k_to_p = 0.1 * math.log(0.2) + 0.8 * math.log(3.2) + 0.1 * math.log(0.4)
    k_to_p += 0.2 * math.log(1 / 3) + 0.2 * math.log(2 / 3) + 0.6 * math.log(6)
    p_to_k = 0.5 * math.log(5) + 0.25 * math.log(0.3125) + 0.25 * math.log(2.5)
    p_to_k += 0.6 * math.log(3) + 0.3 * math.log(1.5) + 0.1 * math.log(1 / 6)
    assert abs(k_to_p - p_to_k) > 0.1
    assert value("big") == pytest.approx(cross_entropy_p + k_to_p / 2, abs=1e-12)
    assert value(WHOLE) == pytest.approx(cross_entropy_k + p_to_k / 2, abs=1e-12)


def test_divergences_of_unequal_nets_differ_by_direction():
    one, other = torch.tensor([[2.0, 0.0, 0.0]]).double(), torch.tensor([[0.0, 1.0, -1.0]]).double()
    assert abs(float(kl(one, other) - kl(other, one))) > 0.05


def test_one_backward_pass_gives_the_gradients_of_equations_4_and_5_on_separate_nets():
    """Each loss treats the other net's output as a constant, so that no weight has a part of the
    other loss.
    """
    family = plain_pairs()
    state = pair_state(family)
    loss, grads = gradients_of(Mutual(TaskLoss(), PAIR), family, state)
    private, knowledge = modules(family, state, "big", WHOLE)
    inputs, targets = a_batch()
    p, k = private(inputs), knowledge(inputs)
    of_private = F.cross_entropy(p, targets) + kl(k.detach(), p)
    of_knowledge = F.cross_entropy(k, targets) + kl(p.detach(), k)
    torch.testing.assert_close(loss, (of_private + of_knowledge).detach(), rtol=0, atol=1e-12)
    for net, module, own in (("big", private, of_private), ("knowledge", knowledge, of_knowledge)):
        expected = torch.autograd.grad(own, list(module.parameters()))
        for (name, _), value in zip(module.named_parameters(), expected, strict=True):
            torch.testing.assert_close(grads[f"{net}.{name}"], value, rtol=0, atol=1e-12)
    assert abs(float((kl(p, k) - kl(k, p)).detach())) > 1e-3


@pytest.mark.parametrize("learns", ["big", WHOLE])
def test_a_net_that_learns_alone_leaves_the_other_ones_gradient_at_zero(learns):
    family = plain_pairs()
    state = pair_state(family)
    _, grads = gradients_of(Mutual(TaskLoss(), PAIR, learns=(learns,)), family, state)
    _, both = gradients_of(Mutual(TaskLoss(), PAIR), family, state)
    own = "big." if learns == "big" else "knowledge."
    for name, value in grads.items():
        expected = both[name] if name.startswith(own) else torch.zeros_like(value)
        torch.testing.assert_close(value, expected, rtol=0, atol=1e-12)


def test_without_detaching_both_nets_have_the_gradient_of_the_sum_of_both_losses():
    family = plain_pairs()
    state = pair_state(family)
    _, grads = gradients_of(
        Mutual(TaskLoss(), PAIR, distance="logits", detach=False), family, state
    )
    private, knowledge = modules(family, state, "big", WHOLE)
    inputs, targets = a_batch()
    p, k = private(inputs), knowledge(inputs)
    loss = F.cross_entropy(p, targets) + F.cross_entropy(k, targets) + 2 * F.mse_loss(p, k)
    loss.backward()
    for net, module in (("big", private), ("knowledge", knowledge)):
        for name, weight in module.named_parameters():
            torch.testing.assert_close(grads[f"{net}.{name}"], weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("distance", ["divergence", "logits"])
def test_without_weight_each_net_has_the_gradient_of_its_cross_entropy(distance):
    family = plain_pairs()
    state = pair_state(family)
    _, grads = gradients_of(Mutual(TaskLoss(), PAIR, distance=distance, weight=0.0), family, state)
    inputs, targets = a_batch()
    for net, module in zip(("big", "knowledge"), modules(family, state, "big", WHOLE), strict=True):
        F.cross_entropy(module(inputs), targets).backward()
        for name, weight in module.named_parameters():
            torch.testing.assert_close(grads[f"{net}.{name}"], weight.grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize("distance", ["divergence", "logits"])
def test_the_weight_scales_what_nets_learn_from_each_other(distance):
    family = plain_pairs()
    state = pair_state(family)
    weights = (0.0, 1.0, 3.0)
    objectives = [Mutual(TaskLoss(), PAIR, distance=distance, weight=weight) for weight in weights]
    none, once, thrice = (gradients_of(objective, family, state)[1] for objective in objectives)
    for name, alone in none.items():
        torch.testing.assert_close(
            thrice[name] - alone, 3 * (once[name] - alone), rtol=0, atol=1e-12
        )


@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_without_weight_the_knowledge_net_is_that_of_fedavg(order, make_data):
    """Clients train the private nets alone, and the mean of their knowledge nets is FedAvg's."""
    family = plain_pairs()
    data = make_data(family, SIZES)
    run = start(RaFL(local=LOCAL, order=order, mutual_weight=0.0), family, data).train(2)
    plain = start(FedAvg(local=LOCAL, weighting="data"), family, data, [1.0]).train(2)
    for name, value in run.server.weights.items():
        torch.testing.assert_close(value, plain.server.weights[name], rtol=0, atol=1e-12)


# --- local training against plain loops ---------------------------------------------------------


def stepped(run: fq.Run, job: Job, order: str) -> dict[str, Tensor]:
    """Train a client's two nets with two optimizers of torch, and return the weights of both."""
    family = run.world.family
    name = members_of(job.submodel.arch.variant)[1]
    nets = modules(family, dict(run.federation.initial), name, WHOLE)
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2}
    optimizers = [torch.optim.SGD(net.parameters(), **settings) for net in nets]
    rows = run.data.parts[job.client.id]
    for batch in itinerary(len(rows), run.method.local, run.engine.keys(job)[0]):
        inputs, targets = run.data.samples(rows[batch]), run.data.targets[rows[batch]]
        if order == "together":
            p, k = (net(inputs) for net in nets)
            losses = [
                F.cross_entropy(p, targets) + kl(k.detach(), p),
                F.cross_entropy(k, targets) + kl(p.detach(), k),
            ]
            for optimizer, loss in zip(optimizers, losses, strict=True):
                optimizer.zero_grad()
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            continue
        for net, teacher, optimizer in zip(nets, reversed(nets), optimizers, strict=True):
            optimizer.zero_grad()
            outputs = net(inputs)
            (F.cross_entropy(outputs, targets) + kl(teacher(inputs).detach(), outputs)).backward()
            optimizer.step()
    private, knowledge = (dict(net.named_parameters()) for net in nets)
    found = {f"{name}.{key}": value.detach() for key, value in private.items()}
    return found | {f"knowledge.{key}": value.detach() for key, value in knowledge.items()}


@pytest.mark.parametrize("order", ["together", "in_turn"])
def test_a_round_equals_plain_loops_with_momentum_and_weight_decay(order, make_data):
    """Algorithm 1 for every client and equation 6 at the server, on the plain modules."""
    family = plain_pairs()
    method = RaFL(local=LOCAL, order=order)
    run = start(method, family, make_data(family, SIZES))
    jobs = [
        Job(client, submodel, 0)
        for client in (run.fleet.client(one, 0, 0, SIZES[one]) for one in range(4))
        for submodel in method.plan(run.server, client, run.world)
    ]
    expected = [stepped(run, job, order) for job in jobs]
    run.train(1)
    for name, value in run.server.weights.items():
        mean = sum(size * own[name] for size, own in zip(SIZES, expected, strict=True)) / sum(SIZES)
        torch.testing.assert_close(value, mean, rtol=0, atol=1e-12)
    for job, own in zip(jobs, expected, strict=True):
        kept = run.server.memory[job.client.id, ""].weights
        assert kept.keys() == own.keys()
        for name, value in own.items():
            torch.testing.assert_close(kept[name], value, rtol=0, atol=1e-12)


def test_in_turn_differs_from_together(make_data):
    family = plain_pairs()
    weights = []
    for order in ("together", "in_turn"):
        run = start(RaFL(local=LOCAL, order=order), family, make_data(family, SIZES)).train(1)
        weights.append(run.server.weights["knowledge.first.weight"])
    assert not torch.allclose(*weights)


def test_the_released_steps_are_those_of_a_loop_that_lets_gradients_accumulate(make_data):
    """The private net steps first. The knowledge net has the gradients of both squared errors."""
    family = plain_pairs()
    local = replace(LOCAL, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.0))
    method = RaFL.preset("released", local=local)
    data = make_data(family, SIZES)
    run = start(method, family, data)
    client = run.fleet.client(2, 0, 0, SIZES[2])
    (submodel,) = method.plan(run.server, client, run.world)
    job = Job(client, submodel, 0)
    name = members_of(submodel.arch.variant)[1]
    nets = modules(family, dict(run.federation.initial), name, WHOLE)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    rows = run.data.parts[2]
    for batch in itinerary(len(rows), local, run.engine.keys(job)[0]):
        inputs, targets = run.data.samples(rows[batch]), run.data.targets[rows[batch]]
        for optimizer in optimizers:
            optimizer.zero_grad()
        for net, other, optimizer in zip(nets, reversed(nets), optimizers, strict=True):
            loss = F.mse_loss(net(inputs), other(inputs)) + F.cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
    run.train(1)
    kept = run.server.memory[2, ""].weights
    for net, module in ((name, nets[0]), ("knowledge", nets[1])):
        for key, value in module.named_parameters():
            torch.testing.assert_close(kept[f"{net}.{key}"], value.detach(), rtol=0, atol=1e-12)


# --- equations 6 and 7 --------------------------------------------------------------------------


def received(run: fq.Run) -> list[Update]:
    """Return updates of three clients whose knowledge nets differ from the server's by noise."""
    generator = torch.Generator().manual_seed(11)
    updates = []
    for id, size in enumerate((8, 4, 12)):
        client = Client(id, run.fleet.budget(id, 0, 0), size)
        (submodel,) = run.method.plan(run.server, client, run.world)
        noisy = {
            name: value + torch.randn(value.shape, generator=generator).double()
            for name, value in run.server.weights.items()
        }
        updates.append(Update(Job(client, submodel, 0), (Payload(submodel, noisy),), steps=1))
    return updates


@pytest.mark.parametrize("combined", ["mean", "maximum"])
def test_equation_7_and_the_ensemble_by_hand(combined, make_data):
    """The teacher is the mean of logits, every net once, or their maximum. The server takes one
    step from the mean.
    """
    family = plain_pairs()
    method = RaFL(local=LOCAL, distil=True, server_training=ONE_STEP, ensemble=combined)
    run = start(method, family, make_data(family, SIZES, public=NUM_PUBLIC))
    updates = received(run)
    fold = method.fold(run.server, run.world)
    for update in updates:
        fold.add(update)
    merged = fold.finish(run.server)

    names = run.server.weights
    average = {
        n: sum(u.job.client.size * u.sent[0].weights[n] for u in updates) / 24 for n in names
    }
    for name, value in average.items():
        torch.testing.assert_close(merged.weights[name], value, rtol=0, atol=1e-12)
    with torch.no_grad():
        logits = torch.stack(
            [modules(family, u.sent[0].weights, WHOLE)[0](run.world.public) for u in updates]
        )
    teacher = logits.mean(0) if combined == "mean" else logits.max(0).values
    torch.testing.assert_close(merged.outputs[OUTPUTS], teacher, rtol=0, atol=1e-12)
    knowledge = run.world.family.member(family.at(WHOLE).whole)
    assert merged.macs == 3 * knowledge.macs * NUM_PUBLIC

    from fedquilt.round.learning import learn

    server = replace(run.server, round=1, weights=merged.weights)
    after, learnt = learn(run.federation, server, merged, run.engine)
    rows, held = ONE_STEP.split(NUM_PUBLIC, 0)
    (student,) = modules(family, average, WHOLE)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    before = kl(teacher[held], student(run.world.public[held])).detach()
    kl(teacher[rows], student(run.world.public[rows])).backward()
    optimizer.step()
    better = bool(kl(teacher[held], student(run.world.public[held])).detach() < before)
    for name, value in student.named_parameters():
        expected = value.detach() if better else average[f"knowledge.{name}"]
        torch.testing.assert_close(after.weights[f"knowledge.{name}"], expected, rtol=0, atol=1e-12)
    assert learnt.steps == 1


def test_without_public_data_the_server_takes_the_plain_average(make_data):
    """Equation 6 is FedAvg of the knowledge nets, and public samples that nobody asks for change
    nothing.
    """
    family = plain_pairs()
    runs = [
        start(RaFL(local=LOCAL), family, make_data(family, SIZES, public=public)).train(2)
        for public in (0, NUM_PUBLIC)
    ]
    for name, value in runs[0].server.weights.items():
        assert torch.equal(value, runs[1].server.weights[name])
    assert all(record.server_seconds is None for record in runs[1].records)
    silent = RaFL(local=LOCAL, distil=True, server_training=replace(ONE_STEP, steps=0))
    assert not silent.needs_public


def test_distillation_without_public_samples_is_refused(make_data):
    family = plain_pairs()
    with pytest.raises(
        ConfigError, match="RaFL was asked for, which needs at least 4 public samples"
    ):
        start(RaFL(distil=True), family, make_data(family, SIZES, public=0))


def test_the_released_loss_of_the_server_has_the_gradient_of_its_own_formula():
    """nn.KLDivLoss is given the teacher's probabilities, which are no logarithms, and the student's
    as the target.
    """
    generator = torch.Generator().manual_seed(2)
    student = torch.randn(5, 3, generator=generator).double().requires_grad_()
    teacher = torch.randn(5, 3, generator=generator).double()
    mine = Softened().loss(None, student, teacher)
    softened = F.softmax(F.softmax(teacher, 1) / 20, 1)
    theirs = 400 * F.kl_div(softened, F.softmax(student / 20, 1), reduction="sum") / student.numel()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    gradients = [
        torch.autograd.grad(loss, student, retain_graph=True)[0] for loss in (mine, theirs)
    ]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-12)
