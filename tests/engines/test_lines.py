"""Weights of a client in one row: views of it, and nested nets that are cut from it."""

from __future__ import annotations

import pytest
import torch

import fedquilt as fq
from fedquilt.engines.vectorized.lines import Lines
from fedquilt.family.cut import prefix

KINDS = pytest.mark.parametrize("channels_last", [False, True])
CLIENTS = pytest.mark.parametrize("clients", [1, 3])


def some(family, clients, seed=0):
    """Return random weights of several clients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: family.layout.shape(name, family.layout.sizes) for name in family.trainable}
    return {
        name: torch.randn(clients, *shape, generator=generator) for name, shape in shapes.items()
    }


@KINDS
@CLIENTS
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_views_of_lines_are_the_weights(family, clients, channels_last):
    weights = some(family, clients)
    lines = Lines({name: value.shape[1:] for name, value in weights.items()}, channels_last)
    line = lines.join(weights)
    assert line.shape == (clients, len(lines))
    views = lines.views(line)
    assert int((line != 0).sum()) == clients * family.count(family.whole) < line.numel()
    # Where cuDNN's fast kernels can load them: from multiples of 16 bytes, also in half precision.
    assert all(
        view[client].storage_offset() % 8 == 0
        for view in views.values()
        for client in range(clients)
    )
    assert all(torch.equal(views[name], value) for name, value in weights.items())
    for value in views.values():
        value.add_(1)
    assert torch.equal(line, lines.join({name: value + 1 for name, value in weights.items()}))
    if channels_last:
        assert all(
            view[0].is_contiguous(memory_format=torch.channels_last)
            for view in views.values()
            if view.dim() == 5
        )


@KINDS
@CLIENTS
@pytest.mark.parametrize("share", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_a_nested_net_is_cut_and_added_back_at_its_positions(family, clients, share, channels_last):
    weights, held = some(family, clients), prefix(family.whole).index
    inner = family.member(family.whole).nested(share)
    lines = Lines({name: value.shape[1:] for name, value in weights.items()}, channels_last)
    nested = lines.nested(family.cutter, held, inner.index)
    cut = nested.lines.views(nested.cut(lines.join(weights)))
    wanted = family.cutter.narrow(weights, held, inner.index, lead=1)
    assert all(torch.equal(cut[name], value) for name, value in wanted.items())
    outer = torch.zeros(clients, len(lines))
    for _ in range(2):
        nested.add(outer, nested.lines.join(wanted))
    found = family.cutter.narrow(lines.views(outer), held, inner.index, lead=1)
    assert all(torch.equal(found[name], 2 * value) for name, value in wanted.items())
    assert int((outer[0] != 0).sum()) == family.count(inner.arch) < len(lines)


def test_positions_of_unused_nested_nets_are_dropped(residual, make_data):
    """Positions take as much memory as a net's weights. Client groups share them while in use."""
    fleet = fq.Fleet.of((1.0,), 2, 2)
    method = fq.methods.FedResCuE(local=fq.LocalTraining(batch_size=4))
    run = fq.prepare(
        method, residual, make_data(residual, (4, 4)), fleet, evaluation=fq.Evaluation(every=0)
    ).train(3)
    engine = run.engine
    assert engine.line_cache.nested
    engine.groups.idle.clear()
    assert not engine.line_cache.nested
