"""The steps of one client in order, and clients that an engine reports as missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

import pytest
import torch

import fedquilt as fq
from fedquilt.data.scale import Scale
from fedquilt.engines import Sequential
from fedquilt.errors import ConfigError
from fedquilt.fleets.availability import Trace
from fedquilt.fleets.presets import Uniform
from fedquilt.methods import FedRolex
from fedquilt.round import run_round

PACKAGE = Path(fq.__file__).parent
STEPS = {
    "receive": "client.py",
    "train_client": "sequential.py",
    "send": "client.py",
    "remember": "client.py",
}


def entered(action: Callable[[], object]) -> list[tuple[str, str]]:
    """Return (file relative to the package, function) of every call into it, in order."""
    calls: list[tuple[str, str]] = []

    def profile(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and PACKAGE in path.parents:
            calls.append((str(path.relative_to(PACKAGE)), frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def test_a_round_enters_the_steps_of_each_client_once_and_in_order(residual, make_data):
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), 3, 3)
    run = fq.prepare(FedRolex(), residual, make_data(residual, (6, 7, 8)), fleet, "sequential")
    never = fq.Evaluation(every=0)
    calls = entered(lambda: run_round(run.federation, run.server, fleet, run.engine, 2, never))

    steps = [name for file, name in calls if STEPS.get(name) == Path(file).name]
    assert steps == [*STEPS] * 3

    plans = [place for place, (_, name) in enumerate(calls) if name == "plan"]
    (finish,) = [
        place
        for place, (file, name) in enumerate(calls)
        if (file, name) == ("round/merge.py", "finish")
    ]
    between = {file for file, _ in calls[plans[-1] : finish]}
    assert "round/client.py" in between
    assert not [
        file
        for file in between
        if file.startswith(("config", "experiment", "settings", "cli", "loop"))
    ]


class Dropping(Sequential):
    """An engine whose clients with odd numbers never reply."""

    def _train(self, server, jobs, fold, outcome):
        super()._train(server, [job for job in jobs if job.client.id % 2 == 0], fold, outcome)
        outcome.missing.update(
            {job.client.id: "its battery is empty" for job in jobs if job.client.id % 2}
        )


def test_clients_that_do_not_reply_are_counted_and_named(perceptron, make_data, caplog):
    data, fleet = make_data(perceptron, (5, 6, 7, 8)), fq.Fleet.of((1.0,), 4, 4)
    method = fq.methods.FedAvg(weighting="uniform")
    engine = Dropping(data, precision="fp64")
    run = fq.prepare(
        method, perceptron, data, fleet, engine, evaluation=fq.Evaluation(every=0)
    ).train(1)
    record = run.history[0]
    assert (record["clients"], record["missing"]) == (4, 2)
    assert "client 3 did not reply in round 1: its battery is empty" in caplog.text
    assert run.records[0] == type(run.records[0]).from_dict(
        record | {"stacks": run.records[0].stacks}
    )

    class Few(Sequential):
        def online(self) -> Sequence[int]:
            return [0, 2]

    there = fq.prepare(
        method, perceptron, data, fleet, Few(data, precision="fp64"), evaluation=run.evaluation
    ).train(1)
    assert there.history[0]["clients"] == 2
    assert "missing" not in there.history[0]
    for name, weight in run.server.weights.items():
        torch.testing.assert_close(weight, there.server.weights[name], rtol=0, atol=1e-12)


@pytest.mark.parametrize("unknown", [4, -1])
def test_an_unknown_client_that_is_online_is_refused(unknown):
    fleet = fq.Fleet.of((1.0,), 4, 4)
    message = (
        f"Engine.online reported client {unknown}, .* the fleet has 4 clients, which are "
        "numbered from 0 to 3"
    )
    with pytest.raises(ConfigError, match=message):
        fleet.draw_cohort(0, 0, sorted([0, 2, unknown]))


def test_a_cohort_is_drawn_from_clients_that_are_online_and_available(tmp_path):
    fleet = fq.Fleet.of(Uniform((1.0,)), 20, 3)
    drawn = [fleet.draw_cohort(round, 0, [1, 5, 8, 13]) for round in range(30)]
    assert all(len(cohort) == 3 and cohort == sorted(cohort) for cohort in drawn)
    assert {client for cohort in drawn for client in cohort} == {1, 5, 8, 13}
    assert fleet.draw_cohort(0, 0, [7]) == [7]
    assert fleet.draw_cohort(0, 0, []) == []
    assert fleet.draw_cohort(4, 0, list(range(20))) == fleet.draw_cohort(4, 0)

    file = tmp_path / "trace.csv"
    file.write_text("client,start,end\n1,0,2\n5,1,3\n")
    traced = fq.Fleet.of(Uniform((1.0,)), 20, 3, availability=Trace(str(file)))
    assert [traced.draw_cohort(round, 0, [1, 5, 8]) for round in range(3)] == [[1], [1, 5], [5]]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_runs_share_an_engine_in_any_order(engine, residual, make_data):
    """Every call names its federation, so that nothing is left of another run's."""
    data, fleet = make_data(residual, (6, 7, 8)), fq.Fleet.of((1.0, 0.5), 3, 3)
    never = fq.Evaluation(every=0)
    options = {"precision": "fp64", "evaluation": never}
    first = fq.prepare(FedRolex(), residual, data, fleet, engine, seed=1, **options)
    lossy = fq.Link(loss=fq.links.ColumnLoss(0.3))
    second = fq.prepare(
        fq.methods.FedAvg(), residual, data, fleet, first.engine, 2, evaluation=never, link=lossy
    )
    assert second.engine is first.engine
    for round in (1, 2):
        first.train(round)
        second.train(round)
    alone = (
        fq.prepare(FedRolex(), residual, data, fleet, engine, seed=1, **options).train(2),
        fq.prepare(
            fq.methods.FedAvg(), residual, data, fleet, engine, seed=2, link=lossy, **options
        ).train(2),
    )
    for run, other in zip((first, second), alone, strict=True):
        torch.testing.assert_close(
            dict(run.server.weights), dict(other.server.weights), rtol=0, atol=0
        )


def test_an_engine_is_not_reused_for_data_that_differs_in_anything(residual, make_data):
    """Samples at the same place may have another scale, domains or public samples."""
    data, fleet = make_data(residual, (6, 7, 8)), fq.Fleet.of((1.0,), 3, 3)
    run = fq.prepare(FedRolex(), residual, data, fleet, "vectorized", precision="fp64")
    assert fq.prepare(FedRolex(), residual, data, fleet, run.engine).engine is run.engine
    assert fq.prepare(FedRolex(), residual, run.data, fleet, run.engine).engine is run.engine
    scale = Scale(torch.full((1, 1, 1), 0.5), torch.full((1, 1, 1), 2.0))
    others = [
        replace(run.data, scale=scale),
        replace(run.data, test_domains=torch.arange(24) % 2),
        replace(run.data, public=run.data.inputs[:4]),
        replace(run.data, parts=run.data.parts.head(3)),
        replace(run.data, num_classes=3),
    ]
    for other in others:
        assert run.engine.with_data(other) is not run.engine
    again = fq.prepare(FedRolex(), residual, replace(data, scale=scale), fleet, run.engine).train(1)
    fresh = fq.prepare(
        FedRolex(), residual, replace(data, scale=scale), fleet, precision="fp64"
    ).train(1)
    torch.testing.assert_close(
        dict(again.server.weights), dict(fresh.server.weights), rtol=0, atol=0
    )


def test_an_engine_refuses_every_federation_that_does_not_fit_it(residual, make_data):
    data, fleet = make_data(residual, (6, 7)), fq.Fleet.of((1.0,), 2, 2)
    run = fq.prepare(FedRolex(), residual, data, fleet, "sequential").train(1)
    double = fq.methods.api.Federation(fq.methods.api.World(residual, precision="fp64"), FedRolex())
    attacking = FedRolex().with_local(adversarial=fq.attacks.AdversarialTraining())
    for federation, said in (
        (double, "a federation in fp64"),
        (fq.methods.api.Federation(run.world, attacking), "attack"),
    ):
        for _ in range(2):
            with pytest.raises(fq.errors.FedquiltError, match=said):
                run.engine.begin(federation)
    with pytest.raises(
        fq.errors.ConfigError, match=r"was given the class Sequential as the engine; a name"
    ):
        fq.prepare(FedRolex(), residual, data, fleet, Sequential)


def test_no_module_outside_engines_assigns_to_an_engine():
    """Options are given to its constructor, and `config` asks no engine for its class."""
    for file in PACKAGE.rglob("*.py"):
        if "engines" in file.relative_to(PACKAGE).parts:
            continue
        text = file.read_text()
        assert "setattr(run.engine" not in text, file
        assert not [
            line
            for line in text.splitlines()
            if line.strip().startswith(("run.engine.", "engine.")) and " = " in line
        ], file
    assert "isinstance(run.engine" not in (PACKAGE / "runs" / "experiment.py").read_text()
