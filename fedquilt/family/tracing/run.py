"""The record of one run of a module: tensors, ATen calls, and executions of modules."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn

from fedquilt.family.tracing.atoms import Dim, plain
from fedquilt.hardware.torch_internals import OpOverload, tree_leaves
from fedquilt.terms import WHOLE


@dataclass(eq=False)
class Value:
    """A tensor of the run: its shape, and what is known about its dimensions."""

    shape: tuple[int, ...]  # Shape in the whole model
    dims: tuple[Dim, ...] = ()  # Dimensions as products of atoms. (): plain sizes
    weight: str | None = None  # Name of the weight that it is. None: it is none
    number: int = 0  # Position in the order of first appearance
    is_mask: bool = False  # True: its entries are booleans, so that it indexes all its dimensions
    # Dimensions of numbers in a call: "groups", or ("start", dim) of a slice
    marks: dict[object, Dim] = field(default_factory=dict)
    described: bool = True  # True: a rule has described its dimensions
    constant: bool = False  # True: it depends on no input, no weight and no random number
    read: bool = False  # True: an operation or the caller has read it

    def __post_init__(self) -> None:
        self.dims = self.dims or tuple(plain(n) for n in self.shape)


@dataclass(eq=False)
class AtenCall:
    """One ATen operation of the run."""

    op: OpOverload  # The operation
    args: tuple[Any, ...]  # Arguments, with Values in place of tensors
    kwargs: dict[str, Any]  # Keyword arguments, with Values in place of tensors
    outs: tuple[Value, ...]  # Tensors that it returns
    layer: str  # Name of the innermost module that was running
    where: str  # File and line in the user's code
    constant: bool = False  # True: it depends on no input, no weight and no random number

    @property
    def inputs(self) -> list[Value]:
        """Return the Values among the arguments in order, also from lists and keyword arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Value)]

    def __str__(self) -> str:
        return f"{self.op.overloadpacket.__name__} in {layer_name(self.layer)} ({self.where})"


def layer_name(path: str) -> str:
    """Return a module's name as it is written in messages.

    An empty path is the module that was traced.
    """
    return f"layer {path!r}" if path else "the module itself"


@dataclass(eq=False)
class Visit:
    """One execution of a module within a run."""

    path: str  # Name of the module
    start: int  # Number of operations before it
    inputs: Any  # (args, kwargs) with Values in place of tensors, and None for all else
    within: Visit | None  # Execution of the module around it. None: there is none.
    stop: int = 0  # Number of operations before its end
    output: Any = None  # Output with Values in place of tensors, and None for all else


@dataclass
class RecordedRun:
    """The record of one run of a module."""

    calls: list[AtenCall]  # ATen calls in order
    output: Any  # Output with Values in place of tensors
    reads: list[str]  # Lines in which Python read the value of a constant
    train: bool  # True: the module ran in training mode
    variant: str = WHOLE  # Variant that ran
    # Executions of modules, in the order in which they end
    visits: list[Visit] = field(default_factory=list)

    @property
    def weights(self) -> tuple[str, ...]:
        """Return the names of the weights that the run computes with, in the order of first use."""
        uses = (value.weight for call in self.calls for value in call.inputs)
        return tuple(
            dict.fromkeys([name for name in (*uses, self.output.weight) if name is not None])
        )


class Observer(AbstractContextManager[Any], Protocol):
    """A context that observes a run at the level of Python."""

    def attach(self, module: nn.Module, value: Callable[[Tensor], Value]) -> None:
        """Prepare for a run.

        Args:
            module: The module that will run.
            value: Returns the Value of a tensor of the run.
        """


class RunError(Exception):
    """A module failed during a run. The error has the calls before it, the layer and the line."""

    def __init__(self, calls: list[AtenCall], layer: str, where: str) -> None:
        super().__init__(layer, where)
        self.calls, self.layer, self.where = calls, layer, where
