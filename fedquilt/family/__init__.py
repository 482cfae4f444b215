"""Smaller networks of any width and variant, made from an nn.Module.

tracing/       find the axes of a module: `trace`
family         `Family`: all members of a traced module
traced_model   the base of `Family`: the module, its axes, and its weights by what they are for
member         `Member`: one network, with the names of its weights, its net and its cost
layout         the result of tracing as plain values, JSON and back
origin         how a family was made: its factory, and the arguments of `trace`
fitting        the largest member within a budget
cost           multiply-adds, parameters and memory of a member
cut            sub-models: cut out of a state, and written back
rows           the rows of one weight that a cut keeps
scores         scores of channels, from the weights
build          members as modules without data
assembly       members as modules with weights
net            a member as a pure function of its weights
normalization  norm layers in such a net
randomness     random numbers in such a net
grouped        many equal nets as one, with grouped kernels
faithful       a check that a net computes what its module does
probes         properties of a model that only running it shows
norms          norm policies: what happens to the norms of a model
dual           norms whose robustness can be chosen: dual and conditioned ones
scaled         the layers that HeteroFL's scaler divides
recurrent      recurrent layers, on few time steps
variants       several ways to run one module
stages         stages of a growing model: requests, plans and errors
staged         the classes of modules that run in stages
heads          temporary heads of stages
union, nets    several traced models as one family
ensemble       several nets as one module, with the mean of their logits
"""

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
