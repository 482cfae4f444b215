"""A traced module with its axes: its classes, and the names of its weights by what they are for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from typing_extensions import override

from fedquilt.axes import axes_in, write
from fedquilt.display import Overview, Readable
from fedquilt.errors import TraceError
from fedquilt.family.assembly import tensors_of
from fedquilt.family.cut import Cutter
from fedquilt.family.dual import ConditionedNorm, DualNorm, is_adjustable
from fedquilt.family.layout import Layout
from fedquilt.family.nets import Nets
from fedquilt.family.variants import Variants


class AxesByWeight(dict[str, str], Readable):
    """The dimensions of each weight as text, by its name. `print` shows it as a table."""

    __repr__ = dict.__repr__

    @override
    def _overview(self) -> Overview:
        return Overview("", rows=list(self.items()))


@dataclass(frozen=True, eq=False, repr=False)
class TracedModel(Readable):
    """A module and its axes. `Family` adds the members.

    Attributes:
        layout: Axes of the module, and the dimensions of its weights as expressions of axes.
        example_inputs: Inputs that the module was traced with.
    """

    _module: nn.Module  # The traced module, with initial weights
    layout: Layout
    example_inputs: tuple[Any, ...]
    _factory: Callable[[], nn.Module]  # Makes the module again, for another random seed

    @property
    def title(self) -> str:
        """Return the name of the module's class, or of the classes of a union's nets."""
        if isinstance(self._module, Nets):
            return " + ".join(type(net).__name__ for net in self._module.children())
        return type(self._module).__name__

    @property
    def traced_module(self) -> nn.Module:
        """Return the module that was traced. It must not be changed."""
        return self._module

    @property
    def axes(self) -> AxesByWeight:
        """Return each weight's dimensions as text: `"conv2.weight": "c2 c1 3 3"`.

        It is a dictionary, which `print` and notebooks show as a table.
        """
        return AxesByWeight({name: write(dims) for name, dims in self.layout.dims.items()})

    @property
    def parts(self) -> Mapping[str, tuple[str, ...]]:
        """Return the names of the weights of each named part, such as `norm`."""
        return self.layout.parts

    @property
    def num_classes(self) -> int:
        """Return the number of classes.

        Raises:
            TraceError: The class dimension of the output is not the output of one layer.
        """
        if "class" not in self.layout.axes:
            raise TraceError(
                f"{self.title} has no class axis: dimension {self.layout.class_dim} of its output "
                "is not one layer's outputs. Name the dimension that is: class_dim=…"
            )
        return self.layout.axes["class"].size

    @cached_property
    def cutter(self) -> Cutter:
        """Return the object that cuts sub-models out of whole states."""
        names = self.layout.weights if self.layout.nets else None
        return Cutter(self.layout.dims, self.layout.sizes, names=names)

    # --- weights by what they are for -------------------------------------------------------------

    @cached_property
    def trainable(self) -> tuple[str, ...]:
        """Return the names of the parameters that require gradients, tied ones once.

        Running statistics of norms are not among them.
        """
        names = {name for name, weight in self._module.named_parameters() if weight.requires_grad}
        return tuple(name for name in self.layout.dims if name in names)

    @cached_property
    def statistics(self) -> tuple[str, ...]:
        """Return the names of the norms' running statistics."""
        parameters = dict(self._module.named_parameters())
        return tuple(name for name in self.layout.parts.get("norm", ()) if name not in parameters)

    @cached_property
    def carried(self) -> tuple[str, ...]:
        """Return the names of frozen weights and constant buffers that have axes which can be cut.

        They are never trained, but must be cut with the trained weights.
        """
        moving = {*self.trainable, *self.statistics}
        return tuple(
            name for name in self.layout.dims if name not in moving and self._cut_axes(name)
        )

    @property
    def constants(self) -> dict[str, Tensor]:
        """Return copies of the weights that are neither trained, statistics nor cut, by name.

        They are buffers, and frozen parameters without axes that can be cut.
        """
        moving = {*self.trainable, *self.statistics, *self.carried}
        return self.traced_state([name for name in self.layout.dims if name not in moving])

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the traced module by name, tied ones once."""
        return {
            name: weight
            for name, weight in self._module.named_parameters()
            if name in self.layout.dims
        }

    @cached_property
    def embeddings(self) -> frozenset[str]:
        """Return the names of embedding weights, whose rows are looked up instead of multiplied."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        paths = [path for path, layer in self._module.named_modules() if isinstance(layer, kinds)]
        names = [f"{path}.weight" if path else "weight" for path in paths]
        return frozenset(self.layout.ties.get(name, name) for name in names)

    def _cut_axes(self, name: str) -> set[str]:
        """Return the names of a weight's axes that are not fixed."""
        axes = {axis for dim in self.layout.dims[name] for axis in axes_in(dim)}
        return {axis for axis in axes if not self.layout.axes[axis].fixed}

    def traced_state(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Return copies of the weights and buffers of the traced module that `names` lists.

        Args:
            names: Names as the layout has them. Each must be a weight or a buffer of the module.
        """
        return tensors_of(self._module, names)

    def holding(self, variant: str) -> nn.Module:
        """Return a module that has the layers of a variant, shared with the traced module.

        Of a union it has only the variant's nets. For all others it is the traced module itself.
        """
        return self._module.holding(variant) if isinstance(self._module, Variants) else self._module

    # --- norms whose robustness can be chosen ----------------------------------------------------

    @cached_property
    def dual(self) -> bool:
        """Return True if the norms come in pairs, one for clean and one for noised samples."""
        return is_adjustable(self._module, DualNorm)

    @cached_property
    def conditioned(self) -> bool:
        """Return True if the norms are conditioned on the requested robustness."""
        return is_adjustable(self._module, ConditionedNorm)

    @property
    def adjustable(self) -> bool:
        """Return True if the robustness can be chosen after training."""
        return self.dual or self.conditioned
