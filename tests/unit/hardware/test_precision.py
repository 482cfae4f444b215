"""Precision of products."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedquilt.hardware.precision import computing


def test_products_in_bf16_follow_parameters_that_change_within_the_block():
    """torch would cache the rounded parameter, and steps of an optimizer would have no effect."""
    weight = nn.Parameter(torch.ones(2, 2))
    with computing("bf16", torch.device("cpu")):
        before = F.linear(torch.ones(1, 2), weight)
        with torch.no_grad():
            weight.mul_(3)
        after = F.linear(torch.ones(1, 2), weight)
    assert before.dtype == after.dtype == torch.bfloat16
    assert before.tolist() == [[2, 2]]
    assert after.tolist() == [[6, 6]]


@pytest.mark.parametrize("search", [True, False])
def test_cudnn_searches_within_the_block_only_if_asked(search):
    before = torch.backends.cudnn.benchmark
    with computing("fp32", torch.device("cpu"), search=search):
        assert torch.backends.cudnn.benchmark is search
    assert torch.backends.cudnn.benchmark is before
