"""Units, step by step on the CPU where nothing can be recorded: in place, side by side or stacked, the same numbers."""

from __future__ import annotations

import pytest

import fedquilt as fq
from fedquilt.methods import METHODS, HeteroFL
from fedquilt.round.local import Adam
from tests.conftest import assert_same, with_local
from tests.engines.test_parity import RAGGED, SHARES

LAYOUTS = ("alone", "laid", "stack")


def played(method, family, data, layout, rounds=2, shares=SHARES, **settings):
    fleet = fq.Fleet.of(shares, data.num_clients, data.num_clients)
    how = fq.Evaluation(every=0)
    run = fq.prepare(method, family, data, fleet, "vectorised", precision="fp64", evaluation=how)
    run.engine.record, run.engine.layout = True, layout
    for name, value in settings.items():
        setattr(run.engine, name, value)
    return run.train(rounds)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_the_same_numbers_in_every_layout(name, layout, residual, make_data, play):
    method, data = with_local(METHODS[name](), batch_size=4, epochs=2), make_data(residual, RAGGED)
    assert_same(play(method, residual, data, shares=SHARES), played(method, residual, data, layout))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"optimiser": fq.SGD(lr=0.1, momentum=0.9, nesterov=True, decay=1e-3, clip=0.5)},
        {"optimiser": fq.SGD(lr=0.1, momentum=0.0)},
        {"optimiser": Adam(lr=0.01, decay=1e-3), "norm": "tracked"},
        {"crop": 1, "flip": True, "scaler": True},
    ],
)
def test_every_setting(changes, layout, residual, make_data, play):
    method, data = with_local(HeteroFL(), batch_size=3, **changes), make_data(residual, RAGGED)
    assert_same(play(method, residual, data, shares=SHARES), played(method, residual, data, layout))
