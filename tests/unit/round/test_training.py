"""Local training compared with plain torch: objectives, regions, filters and whole rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.family import Pass
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg
from fedquilt.round.federation import World
from fedquilt.round.training.filters import All, Nothing, PartWeights
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import MaskedCrossEntropy, Proximal, Summed, TaskLoss
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.regions import Between, Everywhere, Part
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, StepSettings, gradient, move, train_pass
from fedquilt.terms import Arch, Job
from tests.conftest import with_local
from tests.unit.round.one_client import (
    CPU,
    batch_of,
    doubles,
    learner_of,
    take_steps,
    view_of,
)
from tests.unit.round.test_optimizers import (
    TORCH,
)

# --- objectives ---------------------------------------------------------------------------------


def test_cross_entropy_ignores_padding(perceptron):
    state, batch = doubles(perceptron), batch_of(4)
    padded = replace(batch, targets=torch.tensor([0, -100, 2, -100]))
    rows = torch.tensor([0, 2])
    few = replace(batch, inputs=batch.inputs[rows], targets=padded.targets[rows])
    assert float(TaskLoss()(view_of(perceptron, state, padded))) == pytest.approx(
        float(TaskLoss()(view_of(perceptron, state, few))), abs=1e-14
    )


@pytest.mark.parametrize("by", ["client", "batch"])
def test_masked_cross_entropy_sets_absent_logits_to_zero(by, perceptron):
    held = torch.tensor([True, False, True])
    batch = replace(batch_of(5, held=held), targets=torch.tensor([2, 2, 2, 2, 2]))
    state = doubles(perceptron)
    logits = perceptron.module(perceptron.whole, state)(batch.inputs).detach()
    present = [True, False, True] if by == "client" else [False, False, True]
    by_hand = 0.0
    for row in logits.tolist():
        kept = [value if here else 0.0 for value, here in zip(row, present, strict=True)]
        by_hand += math.log(sum(map(math.exp, kept))) - kept[2]
    found = MaskedCrossEntropy(by=by)(view_of(perceptron, state, batch))
    assert float(found) == pytest.approx(by_hand / 5, abs=1e-12)


def test_masked_logits_have_no_gradient(perceptron):
    held = torch.tensor([True, False, True])
    batch = replace(batch_of(5, held=held), targets=torch.tensor([0, 2, 2, 0, 2]))
    state = doubles(perceptron)
    phase = Phase(MaskedCrossEntropy())
    grads, _ = gradient(
        learner_of(),
        perceptron.member(perceptron.whole),
        phase.objective,
        state,
        Received(state),
        batch,
    )
    assert float(grads["last.weight"][1].abs().sum()) == float(grads["last.bias"][1]) == 0
    assert float(grads["last.weight"][0].abs().sum()) > 0


def test_the_proximal_gradient_pulls_back(perceptron):
    state, received, batch = doubles(perceptron, 1), doubles(perceptron, 2), batch_of(5)
    args = (state, Received(received), batch)
    plain, _ = gradient(learner_of(), perceptron.member(perceptron.whole), TaskLoss(), *args)
    pulled, (loss, _) = gradient(
        learner_of(), perceptron.member(perceptron.whole), Proximal(TaskLoss(), 0.3), *args
    )
    drift = 0.0
    for name in plain:
        torch.testing.assert_close(
            pulled[name], plain[name] + 0.3 * (state[name] - received[name]), rtol=0, atol=1e-14
        )
        drift += float((state[name] - received[name]).square().sum())
    own = float(TaskLoss()(view_of(perceptron, state, batch)))
    assert float(loss) == pytest.approx(own + 0.15 * drift, abs=1e-12)


def test_the_proximal_term_counts_what_is_trained_and_nothing_else(residual):
    """Tracked norm statistics drift too, but they are no weights."""
    state = doubles(residual)
    shifted = {name: value + (name in residual.statistics) for name, value in state.items()}
    inputs = torch.randn(
        4, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    batch = Batch(
        inputs, torch.tensor([0, 1, 2, 3]), torch.ones(4, dtype=torch.bool), torch.tensor(0)
    )
    view = view_of(residual, shifted, batch, received=state)
    assert float(Proximal(TaskLoss(), 2.0)(view)) == pytest.approx(
        float(TaskLoss()(view)), abs=1e-14
    )


def test_summed_objectives_sum_their_gradients(perceptron):
    state, batch = doubles(perceptron), batch_of(5)
    objectives = (TaskLoss(), TaskLoss(share=0.5))
    args = (state, Received(state), batch)
    one, other, both = (
        gradient(learner_of(), perceptron.member(perceptron.whole), objective, *args)[0]
        for objective in (*objectives, Summed(objectives))
    )
    for name in both:
        torch.testing.assert_close(both[name], one[name] + other[name], rtol=0, atol=1e-14)
    whole = perceptron.member(perceptron.whole)
    assert Summed(objectives).nets(whole) == (whole, whole.nested(0.5))


def test_a_nested_net_is_the_first_channels_of_a_member(perceptron):
    state, batch = doubles(perceptron), batch_of(5)
    half = perceptron.member(perceptron.whole).nested(0.5)
    found = view_of(perceptron, state, batch).logits(half)
    half = perceptron.module(perceptron.fit(fq.Budget(share=0.5)), state)
    torch.testing.assert_close(found, half(batch.inputs).detach(), rtol=0, atol=1e-14)


# --- what may move ------------------------------------------------------------------------------


def test_between_masks_by_hand(perceptron):
    masks = {
        n: Between(0.5, 1.0).mask(perceptron.member(perceptron.whole), n)
        for n in perceptron.trainable
    }
    outer = torch.tensor([False] * 3 + [True] * 3)
    assert torch.equal(masks["first.weight"], outer[:, None].expand(6, 4))
    assert torch.equal(masks["first.bias"], outer)
    assert torch.equal(masks["last.weight"], outer.expand(3, 6))
    # every nested net has it
    assert torch.equal(masks["last.bias"], torch.zeros(3, dtype=torch.bool))
    third = Between(0.0, 1 / 3).mask(perceptron.member(perceptron.whole), "first.bias")
    assert third.tolist() == [True, True, False, False, False, False]


def test_differences_of_nested_shares_part_the_whole(residual):
    shares = (0.0, 0.25, 0.5, 1.0)
    for name in residual.trainable:
        total = sum(
            Between(inner, outer).mask(residual.member(residual.whole), name).int()
            for inner, outer in pairwise(shares)
        )
        assert torch.equal(total, torch.ones_like(total)), name


def test_between_counts_shares_of_the_whole_model_in_a_narrow_member(perceptron):
    half = perceptron.fit(fq.Budget(share=0.5))
    mask = Between(1 / 3, 1.0).mask(perceptron.member(half), "first.bias")
    assert mask.tolist() == [False, False, True]


def test_part_is_by_the_layouts_parts(residual):
    norm, rest = Part("norm"), Part("norm", other=True)
    for name in residual.trainable:
        assert norm.mask(residual.member(residual.whole), name) == (name in residual.parts["norm"])
        assert rest.mask(residual.member(residual.whole), name) != norm.mask(
            residual.member(residual.whole), name
        )
    assert Everywhere().mask(residual.member(residual.whole), "head.linear.bias") is True


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        SGD(lr=0.1, momentum=0.0, weight_decay=0.1),
        Adam(lr=0.1, weight_decay=0.1),
        AdamW(lr=0.1, weight_decay=0.1),
    ],
    ids=["sgd", "plain", "adam", "adamw"],
)
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_phase_leaves_what_it_may_not_move_bit_for_bit(optimizer, share, perceptron):
    """Weights and slots both: with momentum or decay, a masked gradient would still move them."""
    arch = perceptron.fit(fq.Budget(share=share))
    state = perceptron.cutter.gather(
        doubles(perceptron), fq.methods.api.Submodel(arch, _prefix(arch)), perceptron.trainable
    )
    learner = learner_of(optimizer=optimizer)
    # slots that are not zero
    state, slots = take_steps(perceptron, learner, state, [batch_of(4, 9)], arch)
    phase = Phase(TaskLoss(), Between(1 / 3, 1.0))
    grads, _ = gradient(
        learner, perceptron.member(arch), phase.objective, state, Received(state), batch_of(4, 1)
    )
    masks = learner.masks(perceptron.member(arch), phase, CPU)
    moved, after = move(learner, phase, state, slots, grads, masks, StepSettings(1))
    for name in perceptron.trainable:
        frozen = ~masks[name]
        assert torch.equal(moved[name][frozen], state[name][frozen])
        assert not (moved[name] == state[name])[masks[name]].any()
        for slot in optimizer.slots:
            assert torch.equal(after[slot][name][frozen], slots[slot][name][frozen])
            if name != "last.bias":
                assert not torch.equal(after[slot][name], slots[slot][name])


def _prefix(arch: Arch):
    from fedquilt.family.cut import prefix

    return prefix(arch).index


def test_a_weight_that_may_not_move_at_all_is_not_touched(residual):
    learner, state = (
        learner_of(optimizer=SGD(lr=0.1, momentum=0.9, weight_decay=0.1)),
        doubles(residual),
    )
    slots = learner.start_slots(state, residual.member(residual.whole))
    grads = {name: torch.ones_like(state[name]) for name in residual.trainable}
    masks = learner.masks(residual.member(residual.whole), Phase(moves=Part("norm")), CPU)
    moved, after = move(learner, Phase(), state, slots, grads, masks, StepSettings(0))
    for name in residual.trainable:
        assert torch.equal(moved[name], state[name]) != (name in residual.parts["norm"])
        assert torch.equal(after["momentum"][name], slots["momentum"][name]) != (
            name in residual.parts["norm"]
        )


def test_a_phase_that_may_move_nothing_moves_nothing(perceptron):
    """A part the model does not have: a net without norms, say."""
    for optimizer in (SGD(), Adam(), AdamW()):
        learner, state = learner_of(optimizer=optimizer), doubles(perceptron)
        slots = learner.start_slots(state, perceptron.member(perceptron.whole))
        grads = {name: torch.ones_like(state[name]) for name in perceptron.trainable}
        moved, after = move(
            learner, Phase(), state, slots, grads, dict.fromkeys(grads, False), StepSettings(0)
        )
        assert all(moved[name] is state[name] for name in state)
        assert all(after[slot][name] is slots[slot][name] for slot in slots for name in grads)


# --- what is sent and kept ----------------------------------------------------------------------


def test_filters_by_part(residual):
    norms, everything = set(residual.parts["norm"]), {*residual.trainable, *residual.statistics}
    assert All().names(residual.member(residual.whole)) == everything
    assert Nothing().names(residual.member(residual.whole)) == set()
    assert PartWeights(("norm",)).names(residual.member(residual.whole)) == norms
    assert (
        PartWeights(("norm",), other=True).names(residual.member(residual.whole))
        == everything - norms
    )
    assert PartWeights(("no such part",)).names(residual.member(residual.whole)) == set()


@pytest.mark.parametrize(
    ("norm", "held", "sent", "kept"),
    [("batch", 0, 0, 0), ("post", 0, 0, 0), ("tracked", 10, 10, 0), ("per_client", 10, 0, 10)],
)
def test_norm_statistics_travel_as_the_policy_says(norm, held, sent, kept, residual):
    learner, statistics = learner_of(norm=norm), set(residual.statistics)
    assert len(statistics) == 10  # five norms, mean and variance
    assert len(statistics & set(learner.names(residual.member(residual.whole)))) == held
    assert len(statistics & set(learner.sent(residual.member(residual.whole)))) == sent
    assert len(statistics & set(learner.kept(residual.member(residual.whole)))) == kept
    assert set(residual.trainable) <= set(learner.sent(residual.member(residual.whole)))


def test_class_rows_restrict_what_is_sent(perceptron):
    held = torch.tensor([True, False, True])
    submodel = fq.methods.api.Submodel(perceptron.whole, _prefix(perceptron.whole))
    sent = replace(learner_of(), class_rows=True).upload(
        perceptron.member(perceptron.whole), submodel, held
    )
    assert list(sent.index["class"]) == [0, 2]
    assert {axis: p for axis, p in sent.index.items() if axis != "class"} == dict(submodel.index)
    plain = learner_of().upload(perceptron.member(perceptron.whole), submodel, held)
    assert plain == submodel


def test_a_training_step_is_three_forward_passes(perceptron):
    learner = learner_of(Phase(Summed((TaskLoss(), TaskLoss(0.5)))))
    whole, half = 4 * 6 + 6 * 3, 4 * 3 + 3 * 3
    assert learner_of().macs(perceptron.member(perceptron.whole), [2, 5]) == 7 * 3 * whole
    assert learner.macs(perceptron.member(perceptron.whole), [1]) == 3 * (whole + half)


# --- whole rounds against plain torch -----------------------------------------------------------


def torch_rounds(run: fq.Run, family: fq.Family, make, rounds: int, fresh: bool) -> nn.Module:
    """The same client, batches and initial weights in a plain training loop; `fresh` makes an
    optimizer a round.
    """
    state = doubles(family, run.world.seed)
    model = family.module(family.whole, state).train()
    optimizer = make(model.parameters())
    client = run.fleet.client(0, 0, 0, run.data.size(0))
    for round in range(rounds):
        if fresh:
            optimizer = make(model.parameters())
        job = Job(client, run.method.plan(run.server, client, run.world)[0], round)
        for rows in run.engine.batches(job, run.method.learner(job, run.world)):
            optimizer.zero_grad()
            F.cross_entropy(model(run.data.inputs[rows]), run.data.targets[rows]).backward()
            optimizer.step()
    return model


@dataclass(frozen=True)
class Keeping(FedAvg):
    """FedAvg whose clients keep their optimizer's slots."""

    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), keep_slots=True)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("optimizer", "make"),
    [TORCH["decay"], TORCH["all"], TORCH["adam"]],
    ids=["decay", "nesterov", "adam"],
)
@pytest.mark.parametrize("keep", [True, False])
def test_one_clients_rounds_are_a_torch_training_loop(
    engine, optimizer, make, keep, residual, play, make_data
):
    """Weights, tracked norm statistics and, where slots are kept, one long run of torch.optim."""
    method = with_local(
        Keeping() if keep else FedAvg(), optimizer=optimizer, batch_size=4, epochs=2, norm="tracked"
    )
    run = play(method, residual, make_data(residual, [11]), engine=engine, rounds=3)
    model = torch_rounds(run, residual, make, rounds=3, fresh=not keep)
    expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert {*residual.trainable, *residual.statistics} == set(run.server.weights)
    for name, weight in run.server.weights.items():
        torch.testing.assert_close(weight, expected[name].detach(), rtol=0, atol=1e-9)


def test_the_scaler_works_in_training_only(residual):
    half = residual.fit(fq.Budget(share=0.5))
    net, state = residual.member(half).net, doubles(residual)
    cut = residual.cutter.gather(state, fq.methods.api.Submodel(half, _prefix(half)), tuple(state))
    inputs = torch.randn(
        3, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    assert train_pass(LocalTraining(scaler=True)) == Pass(
        train=True, statistics="batch", scaler=True
    )
    plain = net(cut, inputs, Pass(train=True))[0]
    tested = net(cut, inputs, Pass(train=False, scaler=True), share=0.5)[0]
    scaled = net(cut, inputs, Pass(train=True, scaler=True), share=0.5)[0]
    torch.testing.assert_close(plain, tested, rtol=0, atol=1e-14)
    assert not torch.allclose(plain, scaled)


def test_noise_of_dropout_changes_with_every_step(language):
    state = doubles(language)
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    net, mode = language.member(language.whole).net, Pass(train=True)
    one, again, other = (net(state, tokens, mode, torch.tensor(noise.key(k)))[0] for k in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fq.optimizers.SGD(lr=-1), r"lr = -1 was asked for; it must lie in \(0, inf\)"),
        (lambda: fq.optimizers.SGD(lr=float("nan")), "lr = nan"),
        (lambda: fq.optimizers.SGD(momentum=2, weight_decay=-1), "momentum = 2.*decay = -1"),
        (lambda: fq.optimizers.SGD(momentum=0, nesterov=True), "Nesterov steps without momentum"),
        (
            lambda: fq.optimizers.Adam(beta2=1.5),
            r"beta2 = 1.5 was asked for; it must lie in \[0, 1\)",
        ),
        (lambda: fq.schedules.Cosine(0), "rounds = 0"),
        (lambda: fq.LocalTraining(epochs=0, batch_size=0), "epochs = 0.*batch_size = 0"),
        (
            lambda: fq.LocalTraining(norm="foo"),
            "norm = 'foo' was asked for; it may be 'batch', 'tracked', 'per_client', 'post'",
        ),
        (lambda: fq.LocalTraining(last_batch="foo"), "last_batch = 'foo'"),
        (lambda: fq.LocalTraining(masked="foo"), "masked = 'foo'"),
        (lambda: fq.methods.FedRolex(overlap=1.5), "overlap = 1.5"),
        (lambda: fq.methods.FedProx(mu=-1.0), "mu = -1"),
        (
            lambda: fq.methods.FedAvg(weighting="size"),
            "weighting = 'size' was asked for; it may be 'uniform', 'data'",
        ),
    ],
)
def test_impossible_settings_are_refused_at_construction(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_tied_embedding_sends_the_rows_of_tokens_that_were_only_read():
    options = {"max_length": 5, "width": 8, "depth": 1, "heads": 2, "head_dim": 4, "hidden": 12}
    tokens, held = torch.zeros(2, 5, dtype=torch.int64), torch.arange(11) < 3
    for tied, rows in ((True, 11), (False, 3)):
        family = fq.trace(
            lambda tied=tied: fq.models.TransformerLM(11, **options, tied=tied), tokens
        )
        learner = Learner((Phase(),), fq.LocalTraining(), 0.1, class_rows=True)
        upload = learner.upload(family.member(family.whole), prefix(family.whole), held)
        assert len(upload.index.get("class", range(11))) == rows
