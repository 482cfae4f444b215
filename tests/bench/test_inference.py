"""The benchmark of inference times builds the nets that presets search, and times all of them."""

from __future__ import annotations

import pytest
import torch

from bench import inference
from bench.measure import images
from fedquilt.data import Pool
from fedquilt.studies.papers import parsed_preset


@pytest.mark.parametrize("preset", inference.PRESETS)
def test_nets_are_those_that_the_preset_searches(preset: str) -> None:
    """At the scale `smoke`, whose space is searched in a moment."""
    pool = Pool.of(images(64, 3, 8, 8), images(32, 3, 8, 8, seed=1))
    settings = dict(parsed_preset(preset).rows_at("smoke"))[inference.PRESETS[preset]]
    nets = inference.searched(pool, settings)
    assert next(iter(nets)) == "knowledge"
    assert nets["knowledge"].macs <= settings["model"]["knowledge_macs"]
    assert 1 <= len(nets) - 1 <= settings["model"]["num_members"]
    for net in nets.values():
        assert sum(weight.numel() for weight in net.module.parameters()) == net.params


def test_ratios_are_medians_over_turns() -> None:
    fast, slow = inference.Timed([1.0, 2.0, 4.0]), inference.Timed([3.0, 4.0, 4.0])
    assert fast.median == 2.0
    assert slow.ratio(fast) == 2.0


def test_a_line_for_each_net(capsys: pytest.CaptureFixture[str]) -> None:
    pool = Pool.of(images(64, *inference.SHAPE), images(32, *inference.SHAPE, seed=1))
    nets = {name: inference.baseline(model, pool) for name, model in inference.BASELINES.items()}
    assert [round(net.macs / 1e6, 1) for net in nets.values()] == [37.0, 74.8]
    assert [net.layers for net in nets.values()] == [21, 37]
    inference.report(nets, inference.timed(nets, torch.zeros(1, *inference.SHAPE), repeats=1))
    _, first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("ResNet-18")
    assert "1.00" in first
    assert second.startswith("ResNet-34")
    assert "1.00" in second
