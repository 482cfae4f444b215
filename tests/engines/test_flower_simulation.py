"""The app of `examples/flower_app` in Flower's own simulation, which pins a version of Ray."""

from __future__ import annotations

import pytest

pytest.importorskip("flwr")
from bench.flower_simulation import MAX_DIFFERENCE, difference, simulate, why_not


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
def test_flowers_simulation_gives_the_weights_of_sequential(tmp_path):
    assert difference(simulate(tmp_path, rounds=2)) <= MAX_DIFFERENCE
