"""Distillation with input that does not fit: public samples, prototypes, tasks, budgets and
predictions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.data import Pool
from fedquilt.data.scale import Scale
from fedquilt.errors import BudgetError, ConfigError, DataError, DivergenceError, TrainingError
from fedquilt.methods import DSFL, FedAvg, FedDF, FedET
from fedquilt.methods.api import (
    OUTPUTS,
    Extras,
    FromTeacher,
    Server,
    TrainServer,
    View,
    World,
    teaching,
)
from fedquilt.methods.dsfl import PREDICTIONS
from fedquilt.round.link import BaseCodec, ChangeSpec
from fedquilt.round.link.coding import Keys
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Client, Job, Payload, Update

KINDS = (FedDF, DSFL, FedET)
SIZES = (7, 4, 9)
LOCAL = fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1))
FEW_STEPS = ServerTraining(batch_size=4, steps=4, check_every=2)


def start(
    method: fq.Method, family: fq.Family, data: fq.FederatedData, shares=(1.0, 0.5), **options
) -> fq.Run:
    fleet = fq.Fleet.of(shares, data.num_clients, data.num_clients)
    return fq.prepare(method, family, data, fleet, **options)


# --- public samples -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_missing_public_samples_are_reported(kind, perceptron, make_data):
    message = (
        rf"{kind.__name__} was asked for, which needs at least 4 public samples without labels; "
        r"data has none\. "
        r"data\.public = 0\.2 in a file, .*pool\.with_public\(0\.2\) in Python"
    )
    with pytest.raises(ConfigError, match=message):
        start(kind(), perceptron, make_data(perceptron, SIZES, public=0))


@pytest.mark.parametrize("kind", KINDS)
def test_three_public_samples_are_too_few(kind, perceptron, make_data):
    """Two are held back, and then one is left to train on, of which norms have no statistics."""
    with pytest.raises(
        ConfigError, match="needs at least 4 public samples without labels; data has 3"
    ):
        start(kind(), perceptron, make_data(perceptron, SIZES, public=3))


@pytest.mark.parametrize("kind", KINDS)
def test_four_public_samples_are_enough(kind, perceptron, make_data):
    method = kind(local=LOCAL, server_training=FEW_STEPS)
    run = start(method, perceptron, make_data(perceptron, SIZES, public=4)).train(2)
    assert run.server.round == 2


@pytest.mark.parametrize("kind", KINDS)
def test_four_public_samples_are_enough_for_a_net_with_norms(kind, make_data):
    """A norm over a batch of one sample would have one value in each channel."""
    family = fq.trace(Normed, torch.zeros(2, 4))
    method = kind(local=LOCAL, server_training=FEW_STEPS)
    run = start(method, family, make_data(family, (8, 8), public=4)).train(1)
    assert all(bool(weight.isfinite().all()) for weight in run.server.weights.values())


class Normed(nn.Module):
    """Two linear layers with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


@pytest.mark.parametrize("kind", [*KINDS, FedAvg])
def test_public_samples_of_another_shape_are_refused(kind, perceptron, make_data):
    data = replace(make_data(perceptron, SIZES), public=torch.randn(8, 5, dtype=torch.float64))
    message = (
        r"data has public samples of shape \(5,\); the model was traced with \(4,\)\. "
        r"Samples of that shape"
    )
    with pytest.raises(DataError, match=message):
        start(kind(), perceptron, data)


@pytest.mark.parametrize("kind", KINDS)
def test_public_samples_of_another_type_are_refused(kind, perceptron, language, make_data):
    whole = replace(make_data(perceptron, SIZES), public=torch.ones(8, 4, dtype=torch.int64))
    with pytest.raises(
        DataError, match=r"data has public samples of torch\.int64; the model takes torch\.float32"
    ):
        start(kind(), perceptron, whole)
    real = replace(make_data(language, SIZES), public=torch.zeros(8, 5))
    with pytest.raises(
        DataError, match=r"data has public samples of torch\.float\d+; the model takes torch\.int64"
    ):
        start(kind(), language, real)


@pytest.mark.parametrize("factor", [255.0, 1e-3])
@pytest.mark.parametrize("kind", KINDS)
def test_public_samples_of_another_scale_are_refused(kind, factor, perceptron, make_data):
    data = make_data(perceptron, SIZES)
    message = r"public samples of data have a mean absolute value of .*same scale"
    with pytest.raises(DataError, match=message):
        start(kind(), perceptron, replace(data, public=factor * data.public))


@pytest.mark.parametrize("factor", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_public_samples_that_are_not_finite_are_refused(kind, factor, perceptron, make_data):
    data = make_data(perceptron, SIZES)
    public = data.public.clone()
    public[-1, 0] = factor
    message = r"data has public samples with values that are not finite\. Samples without NaN"
    with pytest.raises(DataError, match=message):
        start(kind(), perceptron, replace(data, public=public))


def test_public_images_from_0_to_1_among_normalised_bytes_are_refused():
    """Their normalised values are all near −mean / deviation: as large as those of clients."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (80, 1, 4, 4), dtype=torch.uint8, generator=generator)
    scale = Scale.of(images, "channel")
    pool = Pool.of(
        (images, torch.arange(80) % 3), public=images[:20].float() / 255, scale=scale, name="data"
    )
    assert pool.public_samples.abs().mean() > 0.5
    family = fq.trace(lambda: nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), pool.example)
    message = r"public samples of data have a standard deviation of 0\.00\d+, .*same scale"
    with pytest.raises(DataError, match=message):
        start(FedDF(), family, pool.partition(4))
    stored_alike = replace(pool, public=images[:20])
    start(FedDF(), family, stored_alike.partition(4))


def test_public_samples_that_nobody_needs_may_have_any_scale(perceptron, make_data):
    data = make_data(perceptron, SIZES)
    start(FedAvg(), perceptron, replace(data, public=255 * data.public))


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("norm", ["per_client", "per_client-all"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_stay_on_clients_are_refused(kind, norm):
    message = (
        rf"local\.norm = '{norm}' was asked for, under which norms stay on clients.*'batch', "
        r"'tracked' or 'post'"
    )
    with pytest.raises(ConfigError, match=message):
        kind(local=replace(LOCAL, norm=norm))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prototypes", [(), (0.5, 0.5), (1.0, 0.0), (1.5,), (-0.5, 1.0)])
def test_prototypes_that_are_none_equal_or_out_of_range_are_refused(kind, prototypes):
    with pytest.raises(
        ConfigError,
        match=r"prototypes = \[.*\] was asked for; different shares in \(0, 1\] would work",
    ):
        kind(prototypes=prototypes)


def test_prototypes_are_sorted_with_the_widest_first():
    assert FedDF(prototypes=[0.25, 1, 0.5]).prototypes == (1.0, 0.5, 0.25)


@pytest.mark.parametrize("kind", KINDS)
def test_a_budget_below_the_smallest_prototype_is_refused_before_the_first_round(
    kind, perceptron, make_data
):
    message = (
        r"the budget share 0\.25 was given, which holds a share of 0\.25; the smallest prototype "
        r"of "
        rf"{kind.__name__} has 0\.5\. A smaller one would work: method\.prototypes = \[1\.0, 0\.5, "
        r"0\.25\]"
    )
    with pytest.raises(BudgetError, match=message):
        start(
            kind(prototypes=(1.0, 0.5)),
            perceptron,
            make_data(perceptron, SIZES),
            shares=(1.0, 0.25),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, r"temperature = 0\.0 was asked for; it must lie in \(0, inf\)"),
        ({"public_epochs": -1}, r"public_epochs = -1 was asked for; it must lie in \[0, inf\)"),
    ],
)
def test_settings_of_dsfl_outside_of_their_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        DSFL(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"server_share": 0.0}, r"server_share = 0\.0 was asked for; it must lie in \(0, 1\]"),
        ({"diversity": -0.1}, r"diversity = -0\.1 was asked for; it must lie in \[0, inf\)"),
        ({"temperature": 0.0}, r"temperature = 0\.0 was asked for; it must lie in \(0, inf\)"),
    ],
)
def test_settings_of_fedet_outside_of_their_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        FedET(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 1}, r"batch_size = 1 was asked for; it must lie in \[2, inf\)"),
        ({"steps": -1}, r"steps = -1 was asked for; it must lie in \[0, inf\)"),
        ({"check_every": 0}, r"check_every = 0 was asked for; it must lie in \[1, inf\)"),
        ({"patience": 0}, r"patience = 0 was asked for; it must lie in \[1, inf\)"),
        ({"held_back": 0.0}, r"held_back = 0\.0 was asked for; it must lie in \(0, 0\.5\]"),
        ({"held_back": 0.6}, r"held_back = 0\.6 was asked for; it must lie in \(0, 0\.5\]"),
        ({"stop_by": "votes"}, r"stop_by = 'votes' was asked for"),
        (
            {"schedule": "step"},
            r"schedule = 'step' was asked for; it may be 'constant', 'cosine', 'linear'",
        ),
    ],
)
def test_settings_of_the_servers_training_outside_of_their_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        ServerTraining(**changes)


# --- tasks --------------------------------------------------------------------------------------


@pytest.fixture
def numbers():
    """A net with two outputs, and real numbers as targets."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(64, 2, generator=generator, dtype=torch.float64)
    parts = [range(8), range(8, 16)]
    pool = fq.data.Pool.of((x[:16], y[:16]), (x[16:24], y[16:24]), public=x[24:])
    family = fq.trace(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(2, 4)
    )
    return family, pool.with_parts(parts)


@pytest.mark.parametrize("kind", [DSFL, FedET])
def test_methods_that_exchange_probabilities_refuse_regression(kind, numbers):
    message = (
        rf"{kind.__name__} was asked for, which exchanges probabilities of classes; Regression has "
        r"no classes\. "
        "FedDF works"
    )
    with pytest.raises(ConfigError, match=message):
        start(kind(), *numbers)


def test_feddf_distils_the_mean_of_real_outputs_by_the_squared_error(numbers):
    """One step of the server, by hand."""
    family, data = numbers
    how = ServerTraining(
        fq.optimizers.SGD(lr=0.05, momentum=0.0), batch_size=32, steps=1, held_back=0.4
    )
    settings = {"local": replace(LOCAL, epochs=4), "prototypes": (1.0, 0.5)}
    options = {"engine": "sequential", "precision": "fp64"}
    still, learnt = (
        start(FedDF(**settings, server_training=one), family, data, **options).train(1)
        for one in (ServerTraining(steps=0), how)
    )
    assert set(learnt.metrics) >= {"rmse", "mae"}
    assert learnt.records[0].server_steps == 2
    # Each of the two clients is alone in its group, so that the teacher is the mean of both nets.
    modules = {}
    for net in learnt.method.nets(learnt.world):
        own = {
            name.removeprefix(net.scope): v
            for name, v in still.server.weights.items()
            if name.startswith(net.scope)
        }
        modules[net.scope] = family.assemble(net, own)
    public = learnt.world.public
    with torch.no_grad():
        teacher = torch.stack([module(public) for module in modules.values()]).mean(0)
    rows, held = how.split(len(public), learnt.world.seed)
    for scope, module in modules.items():
        before = (module(public[held]) - teacher[held]).square().mean().item()
        (module(public[rows]) - teacher[rows]).square().mean().backward()
        with torch.no_grad():
            for weight in module.parameters():
                weight -= 0.05 * weight.grad
            assert (module(public[held]) - teacher[held]).square().mean().item() < before
        for name, value in module.named_parameters():
            torch.testing.assert_close(
                learnt.server.weights[scope + name], value.detach(), rtol=0, atol=1e-12
            )


# --- predictions --------------------------------------------------------------------------------


@pytest.fixture
def dsfl(perceptron, make_data) -> fq.Run:
    method = DSFL(local=LOCAL, server_training=FEW_STEPS)
    return start(method, perceptron, make_data(perceptron, SIZES, public=6), precision="fp64")


def sent(run: fq.Run, predictions: Tensor) -> Update:
    net = run.method.prototype(0.5, run.world)
    job = Job(Client(1, fq.Budget(share=0.5), 4), net, 2)
    return Update(job, (Payload(net, {}, extras={PREDICTIONS: predictions}),), steps=1)


@pytest.mark.parametrize("shape", [(5, 3), (6, 4), (6,), (6, 3, 1)])
def test_predictions_of_another_shape_are_refused(shape, dsfl):
    fold = dsfl.method.fold(dsfl.server, dsfl.world)
    message = (
        rf"client 1 sent predictions of shape \({', '.join(map(str, shape))},?\) in round 3; "
        r".*\(6, 3\).* refused"
    )
    with pytest.raises(TrainingError, match=message):
        fold.add(sent(dsfl, torch.zeros(shape, dtype=torch.float64)))
    assert not dsfl.server.extras[PREDICTIONS].any()


class Exploding(nn.Module):
    """A net whose outputs are not finite on public samples, which are large, once it has been
    trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x))) + torch.where(
            x.sum(1, keepdim=True) > 5, float("inf"), 0.0
        )


def test_predictions_that_are_not_finite_are_refused(make_data):
    family = fq.trace(Exploding, torch.zeros(2, 4))
    data = make_data(family, SIZES, public=6)
    public = data.public.clone().clamp(-1, 1)
    public[0] = 2.0
    data = replace(data, inputs=data.inputs.clamp(-1, 1), public=public)
    run = start(DSFL(local=LOCAL, server_training=FEW_STEPS), family, data)
    with pytest.raises((TrainingError, DivergenceError), match="not finite"):
        run.train(1)
    assert run.server.round == 0


@pytest.mark.parametrize("kind", [FedDF, FedET])
def test_outputs_of_teachers_that_are_not_finite_are_refused_without_blaming_a_client(
    kind, make_data
):
    """The server has no budget, and its training is a part of round 1."""
    family = fq.trace(Exploding, torch.zeros(2, 4))
    data = make_data(family, SIZES, public=6)
    public = data.public.clone().clamp(-1, 1)
    public[:3] = 2.0
    data = replace(data, inputs=data.inputs.clamp(-1, 1), public=public)
    run = start(kind(local=LOCAL, server_training=FEW_STEPS), family, data)
    with pytest.raises((TrainingError, DivergenceError)) as caught:
        run.train(1)
    assert "server" in str(caught.value).split(";")[0]
    assert "client 0" not in str(caught.value)
    assert "round 1048577" not in str(caught.value)
    assert run.server.round == 0


# --- codecs and losses that fail ----------------------------------------------------------------


@dataclass(frozen=True)
class WeightsAlone(BaseCodec):
    """A codec that sends all values, and fails for predictions."""

    failing: int = 0  # Number of values for which it fails.
    feedback: bool = False
    down: bool = False

    def encode(self, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
        if len(change) == self.failing:
            raise RuntimeError("only weights of nets can be coded")
        return change.clone().view(torch.uint8)

    def decode(self, message: Tensor, spec: ChangeSpec) -> Tensor:
        return message.clone().view(spec.dtype)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_codec_that_cannot_carry_predictions_is_named(engine, perceptron, make_data):
    data = make_data(perceptron, SIZES, public=10)
    link = fq.Link(codec=WeightsAlone(failing=10 * 3))
    how = {"local": LOCAL, "server_training": FEW_STEPS}
    run = start(DSFL(coded=True, **how), perceptron, data, link=link, engine=engine)
    message = (
        r"client 0 .* failed in round 1 while sending: .*WeightsAlone was asked to code the extra "
        r"'predictions' of the method, and failed: RuntimeError: only weights.*coded = False"
    )
    with pytest.raises(TrainingError, match=message):
        run.train(1)
    assert run.server.round == 0
    plain = start(DSFL(coded=False, **how), perceptron, data, link=link, engine=engine)
    assert plain.train(1).server.round == 1


@dataclass(frozen=True)
class OfEachSample(FromTeacher):
    """A loss that is not averaged."""

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        return (logits - rows).square().sum(1)


@dataclass(frozen=True)
class OfTwoClasses(FromTeacher):
    """A loss for another number of classes."""

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        return (logits[:, :2] - rows).square().mean()


@dataclass(frozen=True)
class OwnLoss(FedDF):
    """FedDF with another loss."""

    objective: FromTeacher = OfEachSample()

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        rows, nets = outputs[OUTPUTS], self.nets(world)
        return train(
            server, teaching(self, nets, rows, self.objective, self.server_training, world)
        )


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("objective", "reason"),
    [
        (OfEachSample(), r"ValueError: the loss of a batch has the shape \(2,\)\. Its loss is Of"),
        (OfTwoClasses(), r"RuntimeError: The size of tensor .*Its loss is OfTwoClasses"),
    ],
)
def test_a_loss_that_cannot_carry_predictions_is_named(
    objective, reason, engine, perceptron, make_data
):
    data = make_data(perceptron, SIZES, public=10)
    method = OwnLoss(objective=objective, local=LOCAL, server_training=FEW_STEPS)
    run = start(method, perceptron, data, engine=engine)
    message = f"the server's training on public samples failed in round 1: {reason}"
    with pytest.raises(TrainingError, match=message) as caught:
        run.train(1)
    assert "client 0" not in str(caught.value)
    assert run.server.round == 0
