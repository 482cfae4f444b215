"""Trace a module, name its axes, fit a budget, count the cost."""

from fedquilt.axes import Axis, Index, Positions, parse, write
from fedquilt.family.cost import Cost
from fedquilt.family.family import Family
from fedquilt.family.layout import Layout
from fedquilt.family.member import Member
from fedquilt.family.net import Net, Pass
from fedquilt.family.tracing.trace import trace

__all__ = [
    "Axis",
    "Cost",
    "Family",
    "Index",
    "Layout",
    "Member",
    "Net",
    "Pass",
    "Positions",
    "parse",
    "trace",
    "write",
]
