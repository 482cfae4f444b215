"""The registry of rules, by the name of an ATen operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedquilt.family.tracing.atoms import Dim, Facts
from fedquilt.family.tracing.run import AtenCall
from fedquilt.hardware.torch_internals import OpOverloadPacket, qualified_name

aten: Any = torch.ops.aten
Dims = tuple[Dim, ...]
# A rule returns the dimensions (`Dims`) of the output, or a list of them for several outputs.
Rule = Callable[[AtenCall, Facts], Any]
RULES: dict[str, Rule] = {}  # Rules by the qualified name of their operation


def rule(*packets: OpOverloadPacket) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule for operations, with all overloads.

    `find_rule` also uses it for their in-place versions.

    Args:
        packets: ATen operations, such as `aten.add`.
    """

    def register(function: Rule) -> Rule:
        RULES.update({qualified_name(packet): function for packet in packets})
        return function

    return register
