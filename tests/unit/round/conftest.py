"""Fixtures of the tests of rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.round.stateful import RAGGED


@pytest.fixture
def public_data(perceptron, make_data):
    """Samples of six clients, and five public ones."""
    public = torch.randn(5, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return replace(make_data(perceptron, RAGGED), public=public)
