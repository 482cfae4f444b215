"""RaFL (Yu et al. 2022): equations 2 to 7, algorithms 1 and 2, limits, and what is reported."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.cut import prefix
from fedquilt.family.variants import joined, members_of
from fedquilt.methods import FedAvg, RaFL
from fedquilt.methods.rafl import Softened
from fedquilt.round.teachers import OUTPUTS
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.mutual import Mutual
from fedquilt.round.training.objectives import TaskLoss
from fedquilt.round.training.server import ServerTraining
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.round.training.view import View
from fedquilt.terms import WHOLE, Client, Job, Payload, Update
from tests.conftest import Perceptron
from tests.pairs import (
    SIZES,
    limits,
    normed_pairs,
    of_net,
    pair,
    perceptrons,
    plain_pairs,
    trained_pairs,
)

SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-2)
LOCAL = fq.LocalTraining(batch_size=4, epochs=2, optimizer=SHARP)
ONE_STEP = ServerTraining(
    fq.optimizers.SGD(lr=0.1, momentum=0.0), batch_size=16, steps=1, held_back=0.3
)
NUM_PUBLIC = 10
PAIR = ("big", WHOLE)


def start(
    method: fq.Method, family: fq.Family, data: fq.FederatedData, budgets=None, **options
) -> fq.Run:
    """Return a run of all clients in float64 on the sequential engine that has not begun."""
    fleet = fq.Fleet.of(budgets or limits(family), data.num_clients, data.num_clients)
    options = {"precision": "fp64", "evaluation": fq.Evaluation(every=0), **options}
    return fq.prepare(method, family, data, fleet, "sequential", **options)


def kl(first: Tensor, second: Tensor) -> Tensor:
    """Return the mean over samples of Σ p·log(p / q), for logits (equation 3)."""
    p, q = first.softmax(1), second.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


def modules(family: fq.Family, state: dict[str, Tensor], *names: str) -> list[Perceptron]:
    """Return nets of a union as plain modules."""
    return [family.module(prefix(family.at(name).whole), state).double() for name in names]


def a_batch(count: int = 5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(count, 4, generator=generator).double(), torch.randint(
        3, (count,), generator=generator
    )


def gradients_of(
    objective: Mutual, family: fq.Family, state: dict[str, Tensor], taught: Tensor | None = None
):
    """Return the loss and the gradient of one batch for the pair of the knowledge net and `big`."""
    member = family.member(pair(family, "big"))
    method = RaFL(local=LOCAL)
    world = fq.prepare(
        FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4), precision="fp64"
    ).world
    learner = method.learner(Job(Client(0, fq.Budget(share=1.0)), prefix(member.arch), 0), world)
    inputs, targets = a_batch()
    batch = Batch(inputs, targets, torch.ones(3, dtype=torch.bool), torch.tensor(0), taught=taught)
    grads, (loss, _) = gradient(learner, member, objective, state, Received(state), batch)
    return loss, grads


def some_data(family: fq.Family) -> fq.FederatedData:
    from tests.conftest import _make_data

    return _make_data(family, SIZES, public=NUM_PUBLIC)


def pair_state(family: fq.Family) -> dict[str, Tensor]:
    """Return the initial weights of the pair, moved so that no two nets agree."""
    names = family.member(pair(family, "big")).names
    return {
        name: 2 * value
        for name, value in family.init(1, dtype=torch.float64).items()
        if name in names
    }


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


# --- costs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [RaFL(), RaFL(order="in_turn"), RaFL.preset("released")])
def test_multiply_adds_of_a_step_are_those_that_torch_counts(method):
    """The first layer of a net needs no gradient of its inputs, which the rule of three forward
    passes counts.
    """
    family = plain_pairs()
    member = family.member(pair(family, "big"))
    world = fq.prepare(
        FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4), precision="fp64"
    ).world
    learner = method.learner(Job(Client(0, fq.Budget(share=1.0)), prefix(member.arch), 0), world)
    state = pair_state(family)
    nets = {variant: member.at(variant) for variant in ("big", WHOLE)}
    inputs, targets = a_batch(4)
    batch = Batch(
        inputs,
        targets,
        torch.ones(3, dtype=torch.bool),
        torch.tensor(0),
        taught=torch.zeros(4, 3).double(),
    )
    with FlopCounterMode(display=False) as counter:
        for phase in learner.phases:
            gradient(learner, member, phase.objective, state, Received(state), batch)
    # Samples, inputs and hidden channels of each first layer
    skipped = sum(4 * 4 * hidden for hidden in (8, 3))
    # The teacher's run before the batch is not in the phases
    extra = 4 * nets["big"].macs if learner.taught else 0
    assert counter.get_total_flops() // 2 + skipped + extra == learner.macs(member, [4])


def test_memory_of_a_step_is_that_of_both_nets():
    family = normed_pairs()
    world = fq.prepare(FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4)).world
    step = RaFL().training_step(world)
    both = family.member(pair(family, "big"))
    alone = [family.member(family.at(name).whole) for name in (WHOLE, "big")]
    assert both.training_memory(step) == sum(member.training_memory(step) for member in alone)


# --- limits -------------------------------------------------------------------------------------


@pytest.fixture
def world():
    family = plain_pairs()
    return fq.prepare(
        FedAvg(), family, some_data(family), fq.Fleet.of([1.0], 4, 4), precision="fp64"
    ).world


def test_a_client_has_the_largest_private_net_with_which_the_pair_is_within_all_limits(world):
    family, method = world.family, RaFL()
    small, big = (
        family.cost(pair(family, name), method.training_step(world)) for name in ("small", "big")
    )
    for bound in ("macs", "params", "memory"):
        enough, less = (fq.Budget(**{bound: getattr(big, bound) - missing}) for missing in (0, 1))
        assert method.fit(enough, world) == pair(family, "big")
        assert method.fit(less, world) == pair(family, "small")
    mixed = fq.Budget(macs=big.macs, params=small.params)
    assert method.fit(mixed, world) == pair(family, "small")
    assert method.fit(fq.Budget(share=1.0), world) == pair(family, "big")


def test_a_limit_of_the_private_net_alone_is_the_papers_account(world):
    family = world.family
    macs = family.cost(family.at("big").whole).macs
    assert RaFL(limit="private").fit(fq.Budget(macs=macs), world) == pair(family, "big")
    assert RaFL().fit(fq.Budget(macs=macs), world) == pair(family, "small")


def test_limits_that_no_pair_meets_name_the_smallest(world):
    with pytest.raises(
        BudgetError,
        match=(
            r"no pair of nets is within the budget macs 3: "
            r"the smallest pair of nets \(small\) has"
        ),
    ):
        RaFL().fit(fq.Budget(macs=3), world)


def test_shares_below_one_are_refused_with_what_would_work(world, make_data):
    with pytest.raises(
        BudgetError, match=r"a share of 0.5 was asked for; RaFL .* Budget\(macs=28e6\)"
    ):
        RaFL().fit(fq.Budget(share=0.5), world)
    with pytest.raises(BudgetError, match=r"client 1: a share of 0.5"):
        start(RaFL(), world.family, make_data(world.family, SIZES), budgets=[1.0, 0.5])


def test_one_architecture_is_refused(perceptron, make_data):
    with pytest.raises(ConfigError, match="which is one architecture; it needs a knowledge net"):
        start(RaFL(), perceptron, make_data(perceptron, SIZES), budgets=[1.0])


def test_norms_that_stay_on_clients_are_refused():
    with pytest.raises(ConfigError, match="The knowledge net travels with all of its weights"):
        RaFL(local=fq.LocalTraining(norm="per_client-all"))


def test_eight_architectures_make_eight_groups(make_data):
    hidden = {f"net{count}": count for count in range(4, 12)}
    family = perceptrons(**hidden)
    data = make_data(family, [4] * 16)
    fleet = fq.Fleet.of(limits(family, *hidden), 16, 16)
    run = fq.run(
        RaFL(local=LOCAL), family, data, fleet, "vectorized", 1, evaluation=fq.Evaluation(every=0)
    )
    assert run.records[0].stacks == 8


# --- what is reported ---------------------------------------------------------------------------


def test_what_is_reported_by_limit_is_what_plain_modules_give(make_data):
    family = plain_pairs()
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES)).train(2)
    inputs, targets = run.data.test_samples(torch.arange(24)), run.data.test_targets

    def accuracy(module: Perceptron, rows: Tensor) -> float:
        with torch.no_grad():
            return float((module(inputs[rows]).argmax(1) == targets[rows]).double().mean())

    everything = torch.arange(24)
    (knowledge,) = modules(family, dict(run.server.weights), WHOLE)
    assert run.accuracy == {"1.0": pytest.approx(accuracy(knowledge, everything))}
    for name, clients in (("small", (0, 2)), ("big", (1, 3))):
        key = str(float(family.cost(family.at(name).whole).macs))
        nets = [
            modules(family, dict(run.server.memory[client, ""].weights), name, WHOLE)
            for client in clients
        ]
        own = [run.data.test_parts[client] for client in clients]
        means = {
            "private_accuracy": [accuracy(private, everything) for private, _ in nets],
            "client_knowledge_accuracy": [accuracy(knowledge, everything) for _, knowledge in nets],
            "local_private_accuracy": [
                accuracy(net[0], rows) for net, rows in zip(nets, own, strict=True)
            ],
            "local_client_knowledge_accuracy": [
                accuracy(net[1], rows) for net, rows in zip(nets, own, strict=True)
            ],
        }
        for metric, values in means.items():
            assert run.metrics[metric][key] == pytest.approx(sum(values) / 2), metric
    labels = run.summary["labels"]
    assert [labels[key] for key in run.metrics["private_accuracy"]] == ["56 MACs", "77 MACs"]


def test_a_sample_of_many_clients_is_tested(make_data):
    family = plain_pairs()
    run = start(
        RaFL(local=LOCAL),
        family,
        make_data(family, SIZES),
        evaluation=fq.Evaluation(every=0, clients=1),
    )
    assert len(run.train(1).metrics["private_accuracy"]) == 1


def test_the_summary_has_utilisation_and_the_real_cost_of_pairs(make_data):
    """Two devices with a limit of 60 multiply-adds and two of 100: the nets have 35 and 56, the
    knowledge net 21.
    """
    family = plain_pairs()
    budgets = [fq.Budget(macs=60), fq.Budget(macs=100)]
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES), budgets=budgets)
    summary = run.summary
    assert (summary["utilisation"], summary["common_utilisation"]) == (91 / 160, 70 / 160)
    assert (summary["pair_macs"], summary["over_limit"]) == ((56 + 77) / 2, 0)
    paper = start(
        RaFL(local=LOCAL, limit="private"), family, make_data(family, SIZES), budgets=budgets
    )
    assert (paper.summary["utilisation"], paper.summary["common_utilisation"]) == (
        112 / 160,
        112 / 160,
    )
    assert (paper.summary["pair_macs"], paper.summary["over_limit"]) == (77, 2)
    assert "2 of 4 devices cannot hold the net that they train" in paper.note


def test_labels_are_limits_with_their_units(world):
    assert RaFL().label(fq.Budget(macs=28e6), world) == "28M MACs"


def test_first_downloads_are_charged_once_and_reported_separately(make_data):
    family = trained_pairs()
    run = start(RaFL(local=LOCAL, transfer=True), family, make_data(family, SIZES)).train(2)
    knowledge = 8 * family.count(family.at(WHOLE).whole)
    private = 8 * sum(2 * family.count(family.at(name).whole) for name in ("small", "big"))
    first, second = run.records
    assert (first.bytes_down, first.bytes_up, first.bytes_first) == (
        4 * knowledge + private,
        4 * knowledge,
        private,
    )
    assert (second.bytes_down, second.bytes_up, second.bytes_first) == (
        4 * knowledge,
        4 * knowledge,
        0,
    )
    assert run.summary["bytes_first"] == private
    assert "bytes_first" not in second.to_dict()


@pytest.mark.parametrize(
    ("family", "transfer", "warns"),
    [(plain_pairs, False, 0), (trained_pairs, False, 1), (trained_pairs, True, 0)],
)
def test_weights_that_devices_cannot_draw_give_a_warning(
    family, transfer, warns, make_data, caplog
):
    with caplog.at_level(logging.WARNING, "fedquilt"):
        start(RaFL(transfer=transfer), family(), make_data(family(), SIZES))
    assert (
        sum(
            "has the same weights for every seed" in record.getMessage()
            for record in caplog.records
        )
        == warns
    )


# --- client states ------------------------------------------------------------------------------


def test_the_servers_state_has_the_knowledge_net_alone(make_data):
    run = start(RaFL(), plain_pairs(), make_data(plain_pairs(), SIZES))
    assert all(name.startswith("knowledge.") for name in run.server.weights)


def test_without_the_knowledge_net_clients_keep_the_private_net_alone(make_data):
    family = plain_pairs()
    run, other = (
        start(RaFL(local=LOCAL, keep_knowledge=keeps), family, make_data(family, SIZES)).train(2)
        for keeps in (False, True)
    )
    for (client, _), memory in run.server.memory.items():
        name = ("small", "big")[client % 2]
        assert all(weight.startswith(f"{name}.") for weight in memory.weights)
    assert "client_knowledge_accuracy" not in run.metrics
    for name, value in run.server.weights.items():
        assert torch.equal(value, other.server.weights[name])


def test_a_state_of_another_architecture_is_kept_and_a_new_one_started(make_data, caplog):
    """The limits of all clients change after the first round, and change back after the second."""
    family = plain_pairs()
    data = make_data(family, SIZES)
    run = start(RaFL(local=LOCAL), family, data, budgets=limits(family, "small")).train(1)
    before = of_net(dict(run.server.memory[1, ""].weights), "small")
    small, wide = run.fleet, fq.Fleet.of(limits(family, "big"), 4, 4)
    run.fleet = wide
    with caplog.at_level(logging.WARNING, "fedquilt"):
        run.train(2)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if "has the private net 'small'" in record.getMessage()
    ]
    assert len(warnings) == 4
    assert "and 'big' is planned for it in round 2. It keeps the old net" in warnings[1]
    kept = run.server.memory[1, ""].weights
    assert all(
        torch.equal(value, of_net(dict(kept), "small")[name]) for name, value in before.items()
    )
    assert of_net(dict(kept), "big")
    (private,) = run.method.own(run.server, wide.client(1, 1, 0, 4), run.world)
    assert private.arch.variant == "big"

    caplog.clear()
    run.fleet = small
    run.train(3)
    after = of_net(dict(run.server.memory[1, ""].weights), "small")
    # It was trained on.
    assert not any(torch.equal(value, after[name]) for name, value in before.items())
    assert not caplog.records


def test_deleting_one_clients_state_affects_that_client_only(make_data):
    family = plain_pairs()
    data = make_data(family, SIZES)
    # Equal knowledge nets at the start of the second round, so that clients differ by their own
    # states alone.
    run, other = (start(RaFL(local=LOCAL), family, data).train(1) for _ in range(2))
    del other.server.memory[2, ""]
    run.train(2)
    other.train(2)
    for client in range(4):
        mine, theirs = (one.server.memory[client, ""].weights for one in (run, other))
        same = all(torch.equal(value, theirs[name]) for name, value in mine.items())
        assert same == (client != 2)


@pytest.mark.parametrize("norm", ["batch", "tracked", "post"])
def test_a_clients_private_net_is_deployed_as_the_users_module(norm, make_data):
    family = normed_pairs()
    run = start(RaFL(local=replace(LOCAL, norm=norm)), family, make_data(family, SIZES)).train(1)
    module = run.deploy(fq.Budget(share=1.0), client=3)
    state = module.state_dict()
    assert type(module).__name__ == "Convolution"
    assert module.conv.out_channels == 4
    kept = of_net(dict(run.server.memory[3, ""].weights), "big")
    assert torch.equal(state["conv.weight"], kept["conv.weight"])
    if norm == "tracked":
        assert torch.equal(state["norm.running_mean"], kept["norm.running_mean"])
    knowledge = run.deploy(fq.Budget(share=1.0))
    assert torch.equal(knowledge.conv.weight, run.server.weights["knowledge.conv.weight"])
    with pytest.raises(BudgetError):
        run.deploy(fq.Budget(params=10), client=3)


def test_a_pair_is_one_job_whose_learner_sends_the_knowledge_net(world):
    family, method = world.family, RaFL()
    client = Client(0, fq.Budget(share=1.0), 4)
    (submodel,) = method.plan(method.init(world), client, world)
    assert submodel.arch.variant == joined(WHOLE, "big")
    learner, member = method.learner(Job(client, submodel, 0), world), family.member(submodel)
    assert learner.sent(member) == learner.received(member)
    assert all(name.startswith("knowledge.") for name in learner.sent(member))
    assert all(
        name.startswith("big.") for name in set(learner.kept(member)) - set(learner.sent(member))
    )
    assert learner.installed(member) == ()
    assert all(
        name.startswith("big.")
        for name in RaFL(transfer=True).learner(Job(client, submodel, 0), world).installed(member)
    )


@pytest.mark.parametrize("client", [None, 3])
def test_a_clients_private_net_is_exported(client, make_data, tmp_path):
    """Without a client the knowledge net is written."""
    from safetensors.torch import load_file

    family = plain_pairs()
    run = start(RaFL(local=LOCAL), family, make_data(family, SIZES)).train(1)
    run.export(tmp_path / "net.safetensors", fq.Budget(share=1.0), client=client)
    written = load_file(tmp_path / "net.safetensors")
    state = run.server.weights if client is None else run.server.memory[client, ""].weights
    expected = of_net(dict(state), "knowledge" if client is None else "big")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(written[name].double(), value.double(), rtol=0, atol=1e-6)
