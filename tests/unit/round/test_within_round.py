"""Learning rates over the steps of a round: by hand, against torch's schedulers, and on every
engine.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.engines import Vectorized
from fedquilt.errors import ConfigError
from fedquilt.family.cut import prefix
from fedquilt.methods import METHODS, FedAvg, FedDF, FedRolex
from fedquilt.round.students import teaching
from fedquilt.round.training.batches import itinerary, num_batches
from fedquilt.round.training.distillation import Imitation
from fedquilt.round.training.server import ServerTraining
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Client, Job
from tests.conftest import assert_same, with_local

RAGGED = (7, 4, 9, 5, 8, 4)  # With batches of 4 and three epochs: 6, 3, 6, 3, 6 and 3 steps
UNEQUAL = (7, 12, 5)  # With batches of 4 and three epochs: 6, 9 and 3 steps
SHAPE = fq.schedules.WithinRound(warmup_share=0.4, shape="cosine", final=0.1)
SGD = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)


# --- the equation -------------------------------------------------------------------------------


def test_ten_steps_with_a_warm_up_of_three():
    """(j + 1)/4 for j < 3, then 0.1 + 0.9·d(t) with t = 0, 1/7, …, 6/7."""
    rising = [0.25, 0.5, 0.75]
    cosine = fq.schedules.WithinRound(warmup_steps=3, shape="cosine", final=0.1)
    falling = [0.1 + 0.9 * (1 + math.cos(math.pi * t / 7)) / 2 for t in range(7)]
    assert cosine.factors(10) == pytest.approx([*rising, *falling], abs=1e-15)
    assert cosine.factors(10)[3] == 1
    linear = fq.schedules.WithinRound(warmup_steps=3, shape="linear", final=0.3)
    assert linear.factors(10) == pytest.approx(
        [*rising, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4], abs=1e-15
    )
    assert fq.schedules.WithinRound(warmup_steps=3).factors(10) == [*rising, *[1.0] * 7]


def test_a_cosine_without_warm_up_is_torchs():
    weight = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.2)
    found = []
    for _ in range(8):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert fq.schedules.WithinRound(shape="cosine", final=0.2).factors(8) == pytest.approx(
        found, abs=1e-12
    )


@pytest.mark.parametrize(
    ("share", "steps", "warmup"),
    [(0.3, 10, 3), (0.29, 100, 29), (0.1, 3, 0), (0.9, 3, 2), (0.9, 1, 0), (0.5, 0, 0)],
)
def test_a_share_is_the_nearest_number_of_steps_and_leaves_one(share, steps, warmup):
    assert fq.schedules.WithinRound(warmup_share=share).num_warmup(steps) == warmup


def test_the_rate_of_a_step_is_that_of_the_round_times_the_factor(perceptron):
    method = FedAvg(
        local=fq.LocalTraining(
            optimizer=fq.optimizers.SGD(lr=0.4),
            schedule=fq.schedules.Steps((1,), 0.5),
            within_round=SHAPE,
        )
    )
    client = Client(0, fq.Budget(share=1.0), 4)
    learner = method.learner(
        Job(client, prefix(perceptron.whole), 1), fq.methods.api.World(perceptron)
    )
    rates = [learner.rate(step, 5) for step in range(5)]
    assert rates == pytest.approx([0.2 * factor for factor in SHAPE.factors(5)])
    assert learner.mean_rate(5) == pytest.approx(sum(rates) / 5)


@pytest.mark.parametrize("last_batch", ["keep", "drop", "merge"])
def test_the_number_of_batches_is_that_of_the_itinerary(last_batch):
    local = fq.LocalTraining(batch_size=4, epochs=3, last_batch=last_batch)
    for size in range(1, 14):
        assert num_batches(size, local) == len(itinerary(size, local, 0))


# --- the weights --------------------------------------------------------------------------------


def torch_loop(run: fq.Run, make, rounds: int) -> dict[str, torch.Tensor]:
    """Return the weights of one client that a plain loop with torch.optim and LambdaLR trains."""
    family, method = run.world.family, run.method
    model = family.module(family.whole, method.init(run.world).weights).double()
    for round in range(rounds):
        job = Job(Client(0, fq.Budget(share=1.0), run.data.size(0)), prefix(family.whole), round)
        learner = method.learner(job, run.world)
        batches = run.engine.batches(job, learner)
        optimizer = make(model.parameters(), learner.lr)
        factors = learner.local.within_round.factors(len(batches))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [*factors, 0.0].__getitem__)
        for rows in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model(run.data.inputs[rows]), run.data.targets[rows]
            ).backward()
            optimizer.step()
            scheduler.step()
    return {name: value.detach() for name, value in model.named_parameters()}


OPTIMIZERS = {
    "momentum": (SGD, lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9, weight_decay=1e-3)),
    "adamw": (fq.optimizers.AdamW(lr=0.05), torch.optim.AdamW),
}


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_are_those_of_torch_optim_with_lambda_lr(name, engine, perceptron, play, make_data):
    optimizer, make = OPTIMIZERS[name]
    within_round = fq.schedules.WithinRound(warmup_steps=3, shape="cosine", final=0.05)
    local = fq.LocalTraining(
        optimizer=optimizer,
        schedule=fq.schedules.Steps((1,), 0.5),
        within_round=within_round,
        batch_size=4,
        epochs=2,
    )
    run = play(FedAvg(local=local), perceptron, make_data(perceptron, (20,)), engine=engine)
    found = {name: run.server.weights[name] for name in perceptron.trainable}
    torch.testing.assert_close(found, torch_loop(run, make, 2), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "optimizer",
    [
        fq.optimizers.SGD(lr=0.1),
        fq.optimizers.Adam(lr=0.1, weight_decay=0.2),
        fq.optimizers.AdamW(lr=0.1, weight_decay=0.2),
    ],
)
def test_a_stack_with_a_rate_for_each_client_moves_each_with_its_own(optimizer):
    seeded = torch.Generator().manual_seed(1)

    def drawn():
        return {
            n: torch.randn(3, *shape, dtype=torch.float64, generator=seeded)
            for n, shape in shapes.items()
        }

    shapes = {"matrix": (2, 4), "vector": (5,), "number": ()}
    weights, grads = drawn(), drawn()
    slots = {
        slot: {name: value.square() for name, value in drawn().items()} for slot in optimizer.slots
    }
    rates = [0.1, 0.02, 0.3]
    stack = optimizer.update(weights, slots, grads, torch.tensor(rates, dtype=torch.float64), 4)
    for client, rate in enumerate(rates):
        own_slots = {
            slot: {name: value[client] for name, value in values.items()}
            for slot, values in slots.items()
        }
        own, own_grads = (
            {name: value[client] for name, value in values.items()} for values in (weights, grads)
        )
        moved, after = optimizer.update(own, own_slots, own_grads, rate, 4)
        for name in shapes:
            torch.testing.assert_close(stack[0][name][client], moved[name], rtol=0, atol=1e-15)
            for slot in slots:
                assert torch.equal(stack[1][slot][name][client], after[slot][name])


# --- engines ------------------------------------------------------------------------------------


# Proximal terms, effective step counts, variates, phases that are drawn, lessons on public samples,
# stages that grow.
NAMES = [
    "fedprox",
    "fednova",
    "scaffold",
    pytest.param("fedrescue", marks=pytest.mark.slow),
    "dsfl",
    "progfed",
]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("record", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_methods_give_the_same_numbers_on_both_engines(name, record, residual, play, make_data):
    """Clients of one stack have unequal numbers of steps."""
    method = with_local(METHODS[name](), batch_size=4, epochs=3, optimizer=SGD, within_round=SHAPE)
    data = make_data(residual, UNEQUAL, labels=2)
    engine = Vectorized(data, precision="fp64", record=record)
    shares = (1.0, 0.5)
    assert_same(play(method, residual, data, shares), play(method, residual, data, shares, engine))


@pytest.mark.parametrize(
    "optimizer",
    [SGD, fq.optimizers.Adam(lr=0.01, weight_decay=1e-3), fq.optimizers.AdamW(lr=0.01)],
    ids=["sgd", "adam", "adamw"],
)
@pytest.mark.parametrize("record", [True, pytest.param(None, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("layout", ["grouped", "stack"])
def test_optimizers_give_the_same_numbers_in_every_layout(
    layout, record, optimizer, perceptron, play, make_data
):
    method = with_local(FedAvg(), batch_size=4, epochs=3, optimizer=optimizer, within_round=SHAPE)
    data = make_data(perceptron, UNEQUAL)
    engine = Vectorized(data, precision="fp64", record=record, layout=layout)
    assert_same(play(method, perceptron, data), play(method, perceptron, data, engine=engine))


def test_rates_continue_if_steps_are_put_onto_the_device_in_chunks(
    perceptron, play, make_data, monkeypatch
):
    monkeypatch.setattr("fedquilt.engines.vectorized.group_tensors.CHUNK_STEPS", 4)
    method = with_local(FedAvg(), batch_size=4, epochs=3, within_round=SHAPE)
    data = make_data(perceptron, UNEQUAL)
    assert_same(play(method, perceptron, data), play(method, perceptron, data, engine="vectorized"))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("name", ["fednova", "scaffold", "heterofl"])
def test_neutral_values_change_no_bit(name, engine, residual, play, make_data):
    data = make_data(residual, RAGGED)
    runs = [
        play(
            with_local(METHODS[name](), batch_size=4, epochs=3, **changes),
            residual,
            data,
            engine=engine,
        )
        for changes in (
            {},
            {"within_round": fq.schedules.WithinRound(warmup_share=1e-9)},
            {"within_round": fq.schedules.WithinRound(shape="cosine", final=1.0)},
        )
    ]
    for other in runs[1:]:
        assert_same(runs[0], other, atol=0)


def test_a_schedule_changes_the_weights(perceptron, play, make_data):
    data = make_data(perceptron, RAGGED)
    plain, warm, falling = (
        play(with_local(FedAvg(), batch_size=4, within_round=within_round), perceptron, data)
        for within_round in (
            fq.schedules.WithinRound(),
            fq.schedules.WithinRound(warmup_share=0.5),
            fq.schedules.WithinRound(shape="linear"),
        )
    )
    name = perceptron.trainable[0]
    weights = [run.server.weights[name] for run in (plain, warm, falling)]
    assert not torch.allclose(weights[0], weights[1])
    assert not torch.allclose(weights[0], weights[2])


def test_a_resumed_run_is_the_one_that_was_not_interrupted(residual, play, make_data, tmp_path):
    local = fq.LocalTraining(
        batch_size=4,
        epochs=3,
        optimizer=fq.optimizers.AdamW(lr=0.01),
        within_round=SHAPE,
        keep_optimizer=True,
    )
    method, data = FedRolex(local=local), make_data(residual, RAGGED)
    options = {"engine": "vectorized", "evaluation": fq.Evaluation()}
    whole = play(method, residual, data, rounds=3, **options)
    play(method, residual, data, rounds=1, out=tmp_path / "run", **options)
    again = play(method, residual, data, rounds=3, out=tmp_path / "run", resume=True, **options)
    assert_same(whole, again, atol=0)
    other = replace(method, local=replace(local, within_round=fq.schedules.WithinRound()))
    with pytest.raises(ConfigError, match=r"within_round"):
        play(other, residual, data, rounds=4, out=tmp_path / "run", resume=True, **options)


def test_students_of_a_server_keep_their_own_schedule(perceptron):
    """Local settings of clients do not reach the server's training, which has
    `server_training.schedule`.
    """
    method = FedDF(local=fq.LocalTraining(within_round=SHAPE))
    lesson = teaching(
        method,
        (),
        torch.zeros(20, 3),
        Imitation(),
        ServerTraining(),
        fq.methods.api.World(perceptron),
    )
    assert lesson.method.local.within_round.is_constant


# --- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": -1}, r"warmup_steps = -1 was asked for; it must lie in \[0, inf\)"),
        (
            {"warmup_steps": 2.5},
            r"warmup_steps = 2\.5 was asked for; it must be a whole number of steps",
        ),
        ({"warmup_share": -0.1}, r"warmup_share = -0\.1 was asked for; it must lie in \[0, 1\)"),
        ({"warmup_share": 1.0}, r"warmup_share = 1\.0 was asked for; it must lie in \[0, 1\)"),
        (
            {"warmup_steps": 3, "warmup_share": 0.1},
            r"warmup_share = 0\.1 was asked for beside warmup_steps = 3",
        ),
        (
            {"shape": "cosine", "final": -0.1},
            r"final = -0\.1 was asked for; it must lie in \[0, 1\]",
        ),
        ({"shape": "cosine", "final": 1.5}, r"final = 1\.5 was asked for; it must lie in \[0, 1\]"),
        (
            {"final": 0.1},
            r"final = 0\.1 was asked for with shape = 'constant', which does not fall",
        ),
        (
            {"shape": "cosin"},
            r"shape = 'cosin' was asked for; it may be 'constant', 'cosine', 'linear'",
        ),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=rf"WithinRound: .*{message}"):
        fq.schedules.WithinRound(**changes)


def test_another_kind_of_schedule_is_refused():
    with pytest.raises(
        ConfigError,
        match=r"within_round = Cosine\(rounds=3\) was asked for; fq\.schedules\.WithinRound",
    ):
        fq.LocalTraining(within_round=fq.schedules.Cosine(3))


def test_a_warm_up_as_long_as_the_shortest_round_of_a_client_is_refused(
    perceptron, play, make_data
):
    data = make_data(perceptron, (9, 5, 12))  # Steps: 2 (a tail of one is joined), 1 (likewise), 3
    method = with_local(
        FedAvg(), batch_size=4, epochs=2, within_round=fq.schedules.WithinRound(warmup_steps=2)
    )
    message = (
        r"warmup_steps = 2 was asked for; client 1 takes 2 steps in a round \(samples: 5, "
        r"batch_size: 4, epochs: 2\), "
        r"and one of them must follow the warm-up\. At most 1 would work, or warmup_share = 0\.1"
    )
    with pytest.raises(ConfigError, match=message):
        play(method, perceptron, data)
    assert (
        play(
            with_local(method, within_round=fq.schedules.WithinRound(warmup_steps=1)),
            perceptron,
            data,
        ).server.round
        == 2
    )


def test_the_schedule_is_set_in_files_and_on_the_command_line(tmp_path, monkeypatch, capsys):
    text = """
    model = "mlp"
    data = "digits"
    method.name = "fedavg"
    method.local.within_round = { warmup_steps = 3, shape = "cosine", final = 0.1 }
    """
    local = Experiment.of(tomllib.loads(text)).method.local
    assert local.within_round == fq.schedules.WithinRound(3, shape="cosine", final=0.1)

    monkeypatch.chdir(tmp_path)
    short = ["run", "--method", "fedavg", "--rounds", "1", "--cohort", "2", "--out", "run"]
    settings = [
        "--set",
        "method.local.within_round.warmup_share=0.2",
        "--set",
        "method.local.within_round.shape=linear",
    ]
    assert main([*short, *settings]) == 0
    assert "(within a round warm-up of 20 %, linear to 0)" in capsys.readouterr().out
    stored = tomllib.loads((tmp_path / "run" / "config.toml").read_text())
    assert fq.schedules.WithinRound(
        **stored["method"]["local"]["within_round"]
    ) == fq.schedules.WithinRound(0, 0.2, "linear")
    assert main([*short, "--set", "method.local.within_round.shape=sine"]) == 2
    assert "method.local.within_round.shape" in capsys.readouterr().err
