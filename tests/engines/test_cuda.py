"""Engines on CUDA give the numbers of the sequential engine on the CPU: float64, two rounds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.methods import METHODS
from fedquilt.models import PreResNet
from fedquilt.round.link import ChangeSpec
from fedquilt.terms import ClientState, Server
from tests.conftest import CUTTING, LOCAL, assert_same, with_local
from tests.engines.test_links import LINKS
from tests.engines.test_parity import RAGGED, SHARES
from tests.engines.test_rafl import METHODS as PAIRS
from tests.engines.test_rafl import NUM_PUBLIC
from tests.pairs import limits, normed_pairs
from tests.unit.family.test_faithful import small_net

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def on_cpu(run: fq.Run) -> fq.Run:
    """Return the run with its state on the CPU, for comparison."""

    def home(state: ClientState | Server) -> Any:
        slots = {
            slot: {n: v.cpu() for n, v in values.items()} for slot, values in state.slots.items()
        }
        weights, extras = (
            {n: v.cpu() for n, v in own.items()} for own in (state.weights, state.extras)
        )
        return replace(state, weights=weights, slots=slots, extras=extras)

    memory = {key: home(value) for key, value in run.server.memory.items()}
    return replace(run, server=replace(home(run.server), memory=memory))


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_every_method_gives_the_same_numbers_on_cuda(name, family, engine, play, make_data):
    method = with_local(
        METHODS[name](),
        batch_size=4,
        optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
    )
    data = make_data(family, (7, 4, 9, 5, 8, 4), labels=2)
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), 6, cohort=5, dynamic=True)
    truth = play(method, family, data, engine="sequential", fleet=fleet)
    other = play(method, family, data, engine=engine, fleet=fleet, device="cuda")
    assert all(weight.is_cuda for weight in other.server.weights.values())
    assert_same(truth, on_cpu(other), atol=1e-8)


@pytest.mark.parametrize("link", [fq.Link(), *LINKS.values()], ids=["perfect", *LINKS])
@pytest.mark.parametrize("engine", LOCAL)
def test_passes_and_variates_give_the_same_numbers_on_cuda(engine, link, residual, play, make_data):
    """In SCAFFOLD's option I, the gradient at the received weights becomes a slot."""
    method = with_local(
        METHODS["scaffold"](option="I"), batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1)
    )
    data, fleet = (
        make_data(residual, (7, 4, 9, 5, 8, 4), labels=2),
        fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True),
    )
    truth = play(method, residual, data, engine="sequential", fleet=fleet, link=link)
    other = play(method, residual, data, engine=engine, fleet=fleet, link=link, device="cuda")
    assert all(value.is_cuda for value in other.server.slots["control"].values())
    assert_same(truth, on_cpu(other), atol=1e-8)


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("name", CUTTING)
@pytest.mark.parametrize("link", LINKS)
def test_every_method_gives_the_same_numbers_over_links_on_cuda(
    name, link, engine, residual, play, make_data
):
    method = with_local(
        METHODS[name](),
        batch_size=4,
        optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
    )
    data, fleet = (
        make_data(residual, (7, 4, 9, 5, 8, 4), labels=2),
        fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True),
    )
    truth = play(method, residual, data, engine="sequential", fleet=fleet, link=LINKS[link])
    other = play(
        method, residual, data, engine=engine, fleet=fleet, link=LINKS[link], device="cuda"
    )
    assert_same(truth, on_cpu(other), atol=1e-8)


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("norm", ["batch", "tracked", "post"])
def test_user_defined_norms_give_the_same_numbers_on_cuda(norm, engine, play, make_data):
    """Subclasses run their own forward, also where a step is captured as a CUDA graph."""
    family = fq.trace(small_net, torch.zeros(2, 1, 4, 4))
    method = with_local(METHODS["heterofl"](), batch_size=4, norm=norm)
    data = make_data(family, (8, 8, 8, 8))
    truth, other = (
        play(method, family, data, (1.0, 0.5), name, device=device)
        for name, device in (("sequential", "cpu"), (engine, "cuda"))
    )
    assert_same(truth, on_cpu(other), atol=1e-8)


def test_codecs_give_the_same_bytes_on_cuda():
    change = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
    shapes = {"one": torch.Size([300, 200]), "two": torch.Size([]), "three": torch.Size([39_999])}
    specs = [ChangeSpec(shapes, change.dtype, torch.device(name)) for name in ("cpu", "cuda:0")]
    plain = (
        fq.links.Codec(8),
        fq.links.Codec(2),
        fq.links.Codec(keep=0.1),
        fq.links.Codec(4, 0.25),
    )
    rotating = (fq.links.Codec(8, rotate=True), fq.links.Codec(4, 0.25, rotate=True))
    for codec in plain + rotating:
        here, there = (codec.encode(change.to(spec.device), spec, (3, 5)) for spec in specs)
        assert torch.equal(there.cpu(), here)
        assert torch.equal(codec.decode(there, specs[1]).cpu(), codec.decode(here, specs[0]))


def test_single_precision_on_cuda_is_close_to_the_cpu(residual, make_data):
    data = make_data(residual, (16,) * 4)
    fleet = fq.Fleet.of((1.0, 0.5), 4, cohort=4)
    method = with_local(METHODS["fedrolex"](), batch_size=8)
    runs = [
        fq.run(method, residual, data, fleet, rounds=1, device=device) for device in ("cpu", "cuda")
    ]
    for name, weight in runs[0].server.weights.items():
        difference = (weight - runs[1].server.weights[name].cpu()).norm() / weight.norm().clamp(
            min=1e-6
        )
        assert float(difference) < 1e-4, name


# --- captured steps -----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
@pytest.mark.parametrize("name", CUTTING)
def test_captured_steps_give_the_numbers_of_the_sequential_engine(
    name, layout, residual, make_data, play, monkeypatch
):
    """Every method in every layout, with ragged clients, against `sequential` on a CPU.

    Last batches are captured at once. In the tests above they are rare, so that they run
    uncaptured.
    """
    monkeypatch.setattr("fedquilt.engines.vectorized.groups.MIN_UNUSUAL_STEPS", 0)
    method, data = with_local(METHODS[name](), batch_size=4, epochs=2), make_data(residual, RAGGED)
    truth = play(method, residual, data, shares=SHARES)
    fleet, how = fq.Fleet.of(SHARES, data.num_clients, data.num_clients), fq.Evaluation(every=0)
    run = fq.prepare(method.settled(2), residual, data, fleet, "vectorized", 0, "cuda", "fp64", how)
    run.engine.layout = layout
    assert_same(truth, on_cpu(run.train(2)), atol=1e-8)


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
@pytest.mark.parametrize(
    "optimizer",
    [fq.optimizers.SGD(lr=0.1, momentum=0.9), fq.optimizers.AdamW(lr=0.01)],
    ids=["sgd", "adamw"],
)
@pytest.mark.parametrize("name", ["heterofl", "fedrescue", "scaffold"])
def test_captured_steps_read_the_learning_rate_of_their_step(
    name, optimizer, layout, residual, make_data, play, monkeypatch
):
    """One graph is replayed for steps whose rates differ, by step and by client."""
    if name == "fedrescue" and optimizer.ages:
        pytest.skip(
            "an optimizer that counts steps is not recorded where only parts of the net move"
        )
    monkeypatch.setattr("fedquilt.engines.vectorized.groups.MIN_UNUSUAL_STEPS", 0)
    within_round = fq.schedules.WithinRound(warmup_share=0.4, shape="cosine", final=0.1)
    method = with_local(
        METHODS[name](), batch_size=4, epochs=3, optimizer=optimizer, within_round=within_round
    )
    data = make_data(residual, RAGGED)
    truth = play(method, residual, data, shares=SHARES)
    fleet, how = fq.Fleet.of(SHARES, data.num_clients, data.num_clients), fq.Evaluation(every=0)
    run = fq.prepare(method.settled(2), residual, data, fleet, "vectorized", 0, "cuda", "fp64", how)
    run.engine.layout = layout
    assert_same(truth, on_cpu(run.train(2)), atol=1e-8)


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
@pytest.mark.parametrize(
    ("transform", "norm", "search"),
    [
        (fq.dual, "post", "training"),
        (fq.dual, "tracked", "training"),
        (fq.dual, "tracked", "evaluation"),
        (fq.conditioned, "post", "training"),
    ],
)
def test_captured_attacks_give_the_numbers_of_the_sequential_engine(
    transform, norm, search, layout, make_data, play
):
    """Samples are attacked in training, evaluation and calibration. Such nets are stacked."""
    family = fq.trace(
        transform(lambda: PreResNet((1, 1), 4, 1, widths=(4, 8))), torch.zeros(2, 1, 6, 6)
    )
    weight = 0.5 if transform is fq.dual else (0.0, 0.4, 1.0)
    method = METHODS["splitmix"](local=fq.LocalTraining(batch_size=4, norm=norm), base=0.25)
    method = with_local(method, adversarial=fq.attacks.AdversarialTraining(weight, search=search))
    data = make_data(family, RAGGED, tests=48)
    data = replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())
    fleet, how = (
        fq.Fleet.of(SHARES, 6, 6),
        fq.Evaluation(every=0, robustness=(0, 0.5, 1), batch_size=2),
    )
    truth = play(method, family, data, fleet=fleet, evaluation=how)
    run = fq.prepare(method, family, data, fleet, "vectorized", 0, "cuda", "fp64", how)
    run.engine.layout = layout
    assert_same(truth, on_cpu(run.train(2)), atol=1e-8)
    assert not run.engine.evaluator.uncapturable


@pytest.mark.parametrize("layout", ["alone", "grouped", "stack"])
@pytest.mark.parametrize("name", ["heterofl", "sheterofl", "fjord"])
def test_captured_steps_read_the_shares_of_the_loaded_clients(
    name, layout, perceptron, make_data, play
):
    """Clients of three shares train one member in turn. A graph must not keep the first client's
    share.
    """
    method, data = (
        with_local(METHODS[name](), batch_size=4, scaler=True),
        make_data(perceptron, [8] * 6),
    )
    fleet, how = fq.Fleet.of((0.5, 0.55, 0.6), 6, 2), fq.Evaluation(every=0)
    truth = play(method, perceptron, data, fleet=fleet, rounds=4)
    run = fq.prepare(method, perceptron, data, fleet, "vectorized", 0, "cuda", "fp64", how)
    run.engine.layout = layout
    assert_same(truth, on_cpu(run.train(4)), atol=1e-8)


def test_captured_and_uncaptured_steps_agree_and_graphs_are_reused(residual, make_data):
    """Cohorts change from round to round, and a captured group is loaded with the next clients."""
    data, fleet = make_data(residual, [8] * 12), fq.Fleet.of(SHARES, 12, 6)
    runs = []
    for record in (True, False):
        method = with_local(METHODS["fedrolex"](), batch_size=4)
        run = fq.prepare(
            method, residual, data, fleet, "vectorized", 0, "cuda", "fp64", fq.Evaluation(every=0)
        )
        run.engine.record, run.engine.layout = record, "grouped"
        runs.append(run.train(4))
    assert_same(on_cpu(runs[0]), on_cpu(runs[1]), atol=1e-8)
    engine = runs[0].engine
    runs[0].train(30)
    sizes = {(shape.arch, shape.count) for shape in engine.groups.idle}
    # one group for each member and size, not one for each round
    assert sum(map(len, engine.groups.idle.values())) == len(sizes) <= 3 * 4


def test_one_round_in_float32_is_within_1e_4_of_the_cpu(residual, make_data):
    data = make_data(residual, RAGGED)
    runs = [
        fq.run(
            METHODS["heterofl"](),
            residual,
            data,
            fq.Fleet.of(SHARES, 6, 6),
            engine,
            1,
            device=device,
        )
        for engine, device in (("sequential", "cpu"), ("vectorized", "cuda"))
    ]
    for name, weight in runs[0].server.weights.items():
        other = runs[1].server.weights[name].cpu()
        assert float((weight - other).norm()) <= 1e-4 * float(weight.norm()) + 1e-7, name


@pytest.mark.parametrize("layout", ["alone", "laid", "stack"])
@pytest.mark.parametrize("norm", ["batch", "tracked"])
@pytest.mark.parametrize("name", ["a", "b", "in turn", "released"])
def test_captured_steps_of_pairs_give_the_numbers_of_the_sequential_engine(
    name, norm, layout, make_data, play, monkeypatch, caplog
):
    """RaFL's clients train two nets, and their steps are captured as those of one net."""
    monkeypatch.setattr("fedquilt.engines.vectorized.groups.MIN_UNUSUAL_STEPS", 0)
    family, method = normed_pairs(), with_local(PAIRS[name], norm=norm)
    data = make_data(family, RAGGED, labels=2, public=NUM_PUBLIC)
    fleet, how = fq.Fleet.of(limits(family), 6, 6), fq.Evaluation(every=0)
    truth = play(method, family, data, fleet=fleet)
    run = fq.prepare(method.settled(2), family, data, fleet, "vectorized", 0, "cuda", "fp64", how)
    run.engine.layout = layout
    with caplog.at_level("WARNING"):
        assert_same(truth, on_cpu(run.train(2)), atol=1e-8)
    assert not caplog.messages


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["fedrescue", "fjord", "heterofl"])
def test_nets_of_real_widths_are_captured_in_every_precision(name, precision, make_data, caplog):
    """Unlike float64 kernels, cuDNN's fast kernels need weights that are aligned to 16 bytes."""
    family = fq.trace(lambda: PreResNet((1, 1), widths=(24, 40)), torch.zeros(2, 3, 16, 16))
    method = with_local(METHODS[name](), batch_size=8)
    data, fleet = make_data(family, (16, 16, 16)), fq.Fleet.of((1.0,), 3, 3)
    none, runs = fq.Evaluation(every=0), []
    with caplog.at_level("WARNING"):
        for device, how in (("cpu", "fp32"), ("cuda", precision)):
            runs.append(
                fq.run(
                    method,
                    family,
                    data,
                    fleet,
                    rounds=1,
                    device=device,
                    precision=how,
                    evaluation=none,
                )
            )
    assert not caplog.messages
    # A CPU whose products round their factors to tf32 is 4 % away in FedResCuE, of bf16 6 %.
    near = {"fp32": 1e-3, "tf32": 6e-2, "bf16": 1e-1}[precision]
    whole = [
        torch.cat([run.server.weights[n].cpu().reshape(-1) for n in family.trainable])
        for run in runs
    ]
    start = torch.cat([family.init(0)[n].reshape(-1) for n in family.trainable])
    assert float((whole[0] - whole[1]).norm()) < near * float((whole[0] - start).norm())


@pytest.mark.parametrize("name", ["fedrolex", "fedrescue", "splitmix", "fedbn"])
def test_a_resumed_run_on_cuda_equals_one_that_was_not_interrupted(
    name, residual, make_data, tmp_path
):
    data, fleet = make_data(residual, RAGGED), fq.Fleet.of(SHARES, 6, 4)
    method = with_local(METHODS[name](), batch_size=4)
    settings = {"device": "cuda", "precision": "fp64", "evaluation": fq.Evaluation(every=2)}
    whole = fq.run(method, residual, data, fleet, rounds=4, **settings)
    fq.run(method, residual, data, fleet, rounds=2, out=tmp_path / "run", **settings)
    again = fq.run(
        method, residual, data, fleet, rounds=4, out=tmp_path / "run", resume=True, **settings
    )
    assert again.server.round == 4
    assert_same(on_cpu(whole), on_cpu(again), atol=1e-8)
