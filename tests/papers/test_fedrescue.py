"""FedResCuE (Zhu et al., ICML 2022): equations 1 to 3, algorithms 1 and 3 to 6; links have a file
of their own.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fedquilt as fq
from fedquilt.methods import FedResCuE, FedRush, FedSeq, FedSlim, FjORD
from fedquilt.methods.nested import TABLE_17
from fedquilt.round.federation import World
from fedquilt.round.training.distillation import Distilled
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Summed, TaskLoss
from fedquilt.round.training.regions import Between, Everywhere
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, StepSettings, gradient, move, teach
from fedquilt.terms import Job, Server
from tests.conftest import with_local

SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2)
SIXTHS = {"smallest": 1 / 6, "granularity": 1 / 6}  # the perceptron has six hidden units
NESTED = (FedResCuE, FedSeq, FedRush, FedSlim, FjORD)
CPU = torch.device("cpu")


def learner(method, family, share=1.0, round=0, client=0, seed=0):
    client, world = fq.methods.api.Client(client, fq.Budget(share=share), 4), World(family, seed)
    return method.learner(Job(client, method.plan(Server(0, {}), client, world)[0], round), world)


# --- what is drawn ------------------------------------------------------------------------------


def test_table_17():
    """P has 19 ratios for CIFAR-10 (A.4.1) and eighths for Digits."""
    assert len(FedResCuE().ratios) == 19
    assert FedResCuE().ratios[:2] == (0.1, 0.15)
    assert FedResCuE.preset("fedrescue-digits").ratios == tuple(place / 8 for place in range(1, 9))
    assert TABLE_17.optimizer == fq.optimizers.SGD(
        lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4
    )
    assert (TABLE_17.batch_size, TABLE_17.epochs, TABLE_17.norm.name) == (32, 1, "batch")
    assert (FedResCuE().samples, FedResCuE().weighting) == (4, "uniform")


@pytest.mark.parametrize("kind", NESTED)
def test_line_4_draws_distinct_ratios_below_the_clients_own_in_order(kind, residual):
    method = kind()
    for share in (1.0, 0.5, 0.25):
        own = learner(method, residual, share)
        for step in range(20):
            drawn = nested_shares(residual, own.phases_at(step))
            drawn = list(dict.fromkeys(drawn))
            assert drawn == sorted(drawn)
            assert set(drawn) <= {ratio for ratio in method.ratios if ratio < share}
            below = sum(ratio < share for ratio in method.ratios)
            # S = 4 ends in the client's own
            assert len(drawn) == min(below, 4 if kind in (FedSlim, FjORD) else 3)


def test_ratios_are_drawn_by_round_and_step_and_not_by_client(residual):
    own = learner(FedResCuE(), residual)
    assert own == learner(FedResCuE(), residual, client=7)
    steps = [own.phases_at(step) for step in range(30)]
    assert len(set(steps)) > 20
    assert own.phases_at(3) != learner(FedResCuE(), residual, round=1).phases_at(3)
    # what is recorded serves every round
    assert own.timeless == learner(FedResCuE(), residual, round=1).timeless
    counts = Counter(
        share for step in range(2000) for share in nested_shares(residual, own.phases_at(step))
    )
    assert set(counts) == set(FedResCuE().ratios[:-1])
    assert all(abs(count - 2000 * 3 / 18) < 5 * (2000 * 3 / 18) ** 0.5 for count in counts.values())


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_algorithm_1_has_its_phases_in_order(alpha, residual):
    for step in range(5):
        *inner, rest, last = learner(FedResCuE(alpha=alpha), residual).phases_at(step)
        before = 0.0
        for phase in inner:
            (share,) = nested_shares(residual, (phase,))
            # equation 3
            assert phase.objective == Summed((TaskLoss(share), Distilled(share, alpha)))
            assert phase.moves == Between(before, share)  # equation 2
            before = share
        assert rest == Phase(TaskLoss(), Between(before, 1.0))  # no KL at ratio 1
        assert last == Phase(TaskLoss(), Everywhere())  # line 10


def test_s_0_and_s_1(residual):
    assert learner(FedResCuE(samples=0), residual).phases_at(4) == (Phase(),)
    assert learner(FedResCuE(samples=1), residual).phases_at(4) == (Phase(), Phase())


# --- equations ----------------------------------------------------------------------------------


def batch_of(count: int, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=generator, dtype=torch.float64)
    return Batch(
        x,
        torch.randint(3, (count,), generator=generator),
        torch.ones(3, dtype=torch.bool),
        torch.tensor(0),
    )


def nested_shares(family, phases):
    """The shares of the nested nets that phases run, one after another."""
    whole = family.member(family.whole)
    nets = [net for phase in phases for net in phase.objective.nets(whole)]
    return [net.share for net in nets if net != whole]


def doubles(family, seed=0):
    return {name: value.double() for name, value in family.init(seed).items()}


def logits_of(weights: dict[str, Tensor], x: Tensor, units: int = 6) -> Tensor:
    """The perceptron's first hidden units, in plain torch."""
    hidden = F.relu(x @ weights["first.weight"][:units].T + weights["first.bias"][:units])
    return hidden @ weights["last.weight"][:, :units].T + weights["last.bias"]


def test_equation_3_by_hand(perceptron):
    """L(f(x; θ×p), y) + KL[f(x; θ̄) ‖ f(x; θ×p)], with the teacher constant."""
    state, teacher, batch = doubles(perceptron), doubles(perceptron, 5), batch_of(5)
    local = TABLE_17
    taught = replace(
        batch, taught=teach(perceptron.member(perceptron.whole), local, teacher, batch)
    )
    own = learner(FedResCuE(**SIXTHS), perceptron)
    objective = Summed((TaskLoss(0.5), Distilled(0.5)))
    grads, (loss, _) = gradient(
        own, perceptron.member(perceptron.whole), objective, state, Received(state), taught
    )
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    student = logits_of(leaves, batch.inputs, 3)
    expected = F.cross_entropy(student, batch.targets) + F.kl_div(
        F.log_softmax(student, 1),
        logits_of(teacher, batch.inputs).softmax(1),
        reduction="batchmean",
    )
    expected.backward()
    assert float(loss) == pytest.approx(expected.item(), abs=1e-12)
    for name, leaf in leaves.items():
        torch.testing.assert_close(grads[name], leaf.grad, rtol=0, atol=1e-12)


def test_the_kl_term_vanishes_at_ratio_1(perceptron):
    """Its value and its gradient: a net teaches itself nothing."""
    state, batch = doubles(perceptron), batch_of(5)
    taught = replace(
        batch, taught=teach(perceptron.member(perceptron.whole), TABLE_17, state, batch)
    )
    own = learner(FedResCuE(**SIXTHS), perceptron)
    grads, (loss, _) = gradient(
        own, perceptron.member(perceptron.whole), Distilled(1.0), state, Received(state), taught
    )
    assert float(loss) == pytest.approx(0, abs=1e-15)
    assert all(float(value.abs().max()) < 1e-15 for value in grads.values())
    whole = perceptron.member(perceptron.whole)
    for phases in (learner(FedResCuE(), perceptron).phases_at(step) for step in range(5)):
        assert all(p.objective == TaskLoss() for p in phases if whole in p.objective.nets(whole))


def test_padding_does_not_count_in_the_kl_term(language):
    state = doubles(language)
    tokens = torch.randint(7, (3, 5), generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, -100, -100, -100], [1, 2, 3, 4, 5], [-100] * 5])
    held = torch.ones(language.num_classes, dtype=torch.bool)
    batch = Batch(tokens, targets, held, torch.tensor(0))
    own = learner(FedResCuE(), language)
    losses = []
    for other in (0.0, 3.0):  # whatever the teacher says there
        taught = teach(language.member(language.whole), TABLE_17, doubles(language, 4), batch)
        taught = (
            taught
            + other * (targets == -100)[:, None] * torch.arange(language.num_classes)[None, :, None]
        )
        objective, given = Distilled(0.5), replace(batch, taught=taught)
        losses.append(
            gradient(
                own, language.member(language.whole), objective, state, Received(state), given
            )[1][0]
        )
    torch.testing.assert_close(losses[0], losses[1], rtol=0, atol=1e-13)


@pytest.mark.parametrize("freeze", ["update", "gradient"])
def test_equation_2_freezes_what_earlier_nets_have_learnt(freeze, perceptron):
    """With momentum and decay on: bit for bit, weights and momentum. Masked gradients alone would
    let both move.
    """
    own = learner(with_local(FedResCuE(freeze=freeze, **SIXTHS), optimizer=SHARP), perceptron)
    state, slots = doubles(perceptron), None
    slots = {"momentum": {name: torch.full_like(value, 0.1) for name, value in state.items()}}
    batch = batch_of(6)
    batch = replace(
        batch, taught=teach(perceptron.member(perceptron.whole), own.local, state, batch)
    )
    for phase in own.phases_at(0)[:-1]:
        grads, _ = gradient(
            own, perceptron.member(perceptron.whole), phase.objective, state, Received(state), batch
        )
        masks = own.masks(perceptron.member(perceptron.whole), phase, CPU)
        moved, after = move(own, phase, state, slots, grads, masks, StepSettings(0))
        frozen = {
            name: ~(mask if isinstance(mask, Tensor) else torch.tensor(mask))
            for name, mask in masks.items()
        }
        same = [
            torch.equal(moved[n][where], state[n][where])
            for n, where in frozen.items()
            if where.any()
        ]
        same += [
            torch.equal(after["momentum"][n][where], slots["momentum"][n][where])
            for n, where in frozen.items()
            if where.any()
        ]
        assert all(same) if freeze == "update" else not any(same)
        state, slots = moved, after


@dataclass(frozen=True)
class OuterOnly(FedResCuE):
    """Only weights outside of the inner half learn."""

    def learner(self, job, world):
        own = super().learner(job, world)
        return Learner((Phase(TaskLoss(), Between(0.5, 1.0)),), own.local, own.lr)


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack", "sequential"])
def test_frozen_weights_are_bit_identical_on_every_engine(layout, residual, make_data):
    method, data = (
        with_local(OuterOnly(), optimizer=SHARP, batch_size=4),
        make_data(residual, (8, 8)),
    )
    fleet = fq.Fleet.of((1.0,), 2, 2)
    engine = "sequential" if layout == "sequential" else "vectorized"
    run = fq.prepare(
        method, residual, data, fleet, engine, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    first = dict(run.server.weights)
    if engine == "vectorized":
        run.engine.record, run.engine.layout = True, layout
    run.train(1)
    for name in residual.trainable:
        moves = Between(0.5, 1.0).mask(residual.member(residual.whole), name)
        assert torch.equal(run.server.weights[name][~moves], first[name][~moves])
        if moves.any():
            assert not torch.equal(run.server.weights[name][moves], first[name][moves])


# --- whole algorithms in plain torch ------------------------------------------------------------


def by_hand(algorithm: str, weights, x, y, ratios: tuple[int, ...], lr: float):
    """One batch of an algorithm of the paper with plain SGD on the perceptron; ratios in hidden
    units.
    """
    theta = {name: value.clone() for name, value in weights.items()}
    teacher = logits_of(theta, x).softmax(1)

    def grads(units: int, labels: bool, distil: bool) -> dict[str, Tensor]:
        leaves = {name: value.clone().requires_grad_() for name, value in theta.items()}
        student = logits_of(leaves, x, units)
        loss = F.cross_entropy(student, y) if labels else student.new_zeros(())
        if distil:
            loss = loss + F.kl_div(F.log_softmax(student, 1), teacher, reduction="batchmean")
        loss.backward()
        return {name: leaf.grad for name, leaf in leaves.items()}

    def inside(units: int) -> dict[str, Tensor]:
        masks = {name: torch.zeros_like(value) for name, value in theta.items()}
        masks["first.weight"][:units] = masks["first.bias"][:units] = 1
        masks["last.weight"][:, :units] = 1
        masks["last.bias"][:] = bool(units)
        return masks

    if algorithm in ("fedslim", "fjord"):
        total = grads(6, True, False)
        for units in ratios:
            for name, value in grads(units, algorithm == "fjord", True).items():
                total[name] += value
        return {name: value - lr * total[name] for name, value in theta.items()}
    before = 0
    for units in (*ratios, 6):
        distil = units < 6 and algorithm != "fedseq"
        g, wide, narrow = (
            grads(units, True, distil),
            inside(units),
            inside(0 if algorithm == "fedrush" else before),
        )
        theta = {
            name: value - lr * g[name] * (wide[name] - narrow[name])
            for name, value in theta.items()
        }
        before = units
    g = grads(6, True, False)
    return {name: value - lr * g[name] for name, value in theta.items()}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    "kind", [FedResCuE, FedSeq, FedRush, FedSlim, FjORD], ids=lambda kind: kind.__name__.lower()
)
def test_a_round_is_the_algorithm_of_the_paper(kind, engine, perceptron, play, make_data):
    """Algorithms 1, 5, 6, 3 and 4: two batches of one client."""
    optimizer = fq.optimizers.SGD(lr=0.1, momentum=0.0)
    method = kind(local=fq.LocalTraining(optimizer=optimizer, batch_size=4), samples=3, **SIXTHS)
    data = make_data(perceptron, (8,))
    run = play(method, perceptron, data, engine=engine, rounds=1)
    own, theta = learner(method, perceptron), doubles(perceptron)
    job = Job(
        fq.methods.api.Client(0, fq.Budget(share=1.0), 8), fq.family.cut.prefix(perceptron.whole), 0
    )
    for step, rows in enumerate(run.engine.batches(job, own)):
        shares = nested_shares(perceptron, own.phases_at(step))
        units = tuple(round(6 * share) for share in dict.fromkeys(shares))
        assert len(units) == (3 if kind in (FedSlim, FjORD) else 2)
        theta = by_hand(
            kind.__name__.lower(), theta, data.inputs[rows], data.targets[rows], units, 0.1
        )
    for name, value in theta.items():
        torch.testing.assert_close(run.server.weights[name], value, rtol=0, atol=1e-12)


def test_what_a_batch_costs(residual):
    """The teacher's forward pass, and three times every net that is trained."""
    macs = {
        s: residual.cost(residual.member(residual.whole).nested(s).arch).macs
        for s in FedResCuE().ratios
    }
    own = learner(FedResCuE(), residual)
    expected = 0
    for step, size in enumerate((4, 3)):
        drawn = nested_shares(residual, own.phases_at(step))
        expected += size * (macs[1.0] + 3 * (sum(macs[s] for s in drawn) + 2 * macs[1.0]))
    assert own.macs(residual.member(residual.whole), (4, 3)) == expected
