"""The cost of a round grows with its cohort, not with the population. Lookups are counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.data.parts import Parts
from fedquilt.errors import ConfigError
from fedquilt.fleets.availability import Diurnal, Trace
from fedquilt.methods import METHODS, FedAvg, FedBN, HeteroFL
from tests.conftest import CUTTING, LOCAL, few_server_steps

COHORT = ASKED = 5


class Counted(Sequence[Any]):
    """A sequence that records which clients were looked up. Iterating looks up all of them."""

    def __init__(self, values: Sequence[Any]) -> None:
        self.values, self.touched = values, []

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, client: int) -> Any:
        if client < len(self):
            self.touched.append(client)
        return self.values[client]


class CountedParts(Counted):
    """The same for the parts of clients. `order` looks up all clients at once."""

    values: Parts

    @property
    def order(self) -> Tensor:
        self.touched += range(len(self))
        return self.values.order

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} of all clients was asked for")


def touches(
    method, family, make_data, engine: str, num_clients: int, available: Any = None
) -> Iterator[list[int]]:
    """Yield the clients that were looked up in each of three rounds, all evaluated."""
    data = make_data(family, (2,) * num_clients, tests=num_clients)
    fleet = fq.Fleet.of((1.0, 0.5), num_clients, COHORT, availability=available)
    looks = fq.Evaluation(clients=ASKED)
    parts, tests = CountedParts(data.parts), CountedParts(data.test_parts)
    counted = replace(data, parts=parts, test_parts=tests)
    run = fq.prepare(method, family, counted, fleet, engine, precision="fp64", evaluation=looks)
    assert isinstance(run.note, str)  # counts the devices that are too small, once for a run
    object.__setattr__(fleet, "which", which := Counted(fleet.which))
    for round in range(1, 4):
        for seen in (parts, tests, which):
            seen.touched.clear()
        run.train(round)
        yield parts.touched + tests.touched + which.touched


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("method", [FedAvg(), FedBN()], ids=lambda method: type(method).__name__)
@pytest.mark.parametrize("available", [None, Diurnal()], ids=["always", "diurnal"])
def test_a_round_looks_up_its_cohort_and_evaluated_clients_alone(
    residual, make_data, engine, method, available
):
    for num_clients in (60, 600):
        for touched in touches(method, residual, make_data, engine, num_clients, available):
            assert 0 < len(set(touched)) <= COHORT + ASKED


@pytest.mark.parametrize("engine", LOCAL)
def test_a_round_looks_up_as_often_in_a_large_population(residual, make_data, engine):
    few, many = (
        [len(touched) for touched in touches(FedBN(), residual, make_data, engine, size)]
        for size in (60, 600)
    )
    assert max(few) == max(many)  # in a small one some are known from the round before


@pytest.mark.parametrize("engine", LOCAL)
def test_norms_are_calibrated_on_samples_that_were_gathered_once(residual, make_data, engine):
    first, *others = touches(HeteroFL(), residual, make_data, engine, 60)
    assert set(first) == set(range(60))
    assert all(len(set(touched)) <= COHORT + ASKED for touched in others)


def test_calibration_takes_a_fixed_draw_of_very_many_samples(residual, make_data, monkeypatch):
    monkeypatch.setattr("fedquilt.engines.client_inputs.MAX_CALIBRATION_SAMPLES", 7)
    data, fleet = make_data(residual, (4,) * 5), fq.Fleet.of((1.0,), 5)
    run, again = (fq.prepare(HeteroFL(), residual, data, fleet, engine) for engine in LOCAL)
    assert len(set(run.engine.pooled.tolist())) == 7
    assert torch.equal(run.engine.pooled, again.engine.pooled)


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize("name", CUTTING)
def test_a_round_without_clients_changes_nothing_and_is_recorded(
    perceptron, play, make_data, tmp_path, name, engine
):
    file = tmp_path / "trace.csv"
    file.write_text("client,start,end\n0,0,1\n1,2,3\n")
    fleet = fq.Fleet.of((1.0, 0.5), 3, 2, availability=Trace(str(file)))
    data, method = make_data(perceptron, (5, 6, 4)), few_server_steps(METHODS[name]())
    before = play(method, perceptron, data, fleet=fleet, engine=engine, rounds=1)
    run = play(method, perceptron, data, fleet=fleet, engine=engine, rounds=2)
    torch.testing.assert_close(
        dict(run.server.weights), dict(before.server.weights), rtol=0, atol=0
    )
    assert run.server.memory.keys() == before.server.memory.keys()
    empty = run.records[1]
    assert (empty.clients, empty.bytes_down, empty.bytes_up, empty.macs, empty.loss) == (
        0,
        0,
        0,
        0,
        None,
    )
    with pytest.raises(
        ConfigError, match=r"4 rounds were asked for; in .* no client is available after 3 of them"
    ):
        run.train(4)
    assert len(run.records) == 2  # said before it begins, not days later
    run.train(3)
    assert run.records[2].clients == 1
    assert run.records[2].loss > 0
