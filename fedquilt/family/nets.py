"""A module of several nets that share no weights, of which one runs. Unions are built on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fedquilt.family.variants import Variants, members_of
from fedquilt.terms import WHOLE


class Nets(nn.Module, Variants):
    """Nets by name. The first is the whole model, and the others are its variants.

    Args:
        nets: Modules by name. Their weights have the name in front: `small.conv1.weight`.
        first: Name of the net that is the whole model. None: the first of `nets`.
    """

    def __init__(self, nets: Mapping[str, nn.Module], first: str | None = None) -> None:
        super().__init__()
        for name, net in nets.items():
            self.add_module(name, net)
        self._first = next(iter(nets)) if first is None else first
        self._chosen = self._first

    @property
    def variants(self) -> tuple[str, ...]:
        """Return the names of all nets but the first."""
        return tuple(name for name in self._modules if name != self._first)

    @property
    def lead(self) -> tuple[str, ...]:
        """Return the prefix of the weights' names for each net: its name and a dot."""
        return tuple(f"{name}." for name in self._modules)

    def net(self, variant: str) -> nn.Module:
        """Return the user's module that a variant names: `WHOLE`, or the name of a net."""
        return self.get_submodule(self._first if variant == WHOLE else variant)

    def choose(self, variant: str) -> None:
        """Make `forward` run the net that `variant` names from now on."""
        self._chosen = self._first if variant == WHOLE else variant
        assert self._chosen in self._modules, f"{variant!r} is none of {', '.join(self._modules)}"

    def holding(self, variant: str) -> Nets:
        """Return a module that has only the nets of a variant, so that no other net is copied.

        The nets are shared with this module. Of several joined variants, the first runs.
        """
        names = [self._first if name == WHOLE else name for name in members_of(variant)]
        subset = Nets(
            {name: self.get_submodule(name) for name in self._modules if name in names}, self._first
        )
        subset._chosen = names[0]
        return subset.train(self.training)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen net."""
        return self.get_submodule(self._chosen)(*args, **kwargs)

    def extract(self) -> nn.Module:
        """Return the chosen net. It is the user's module, and its weights have the user's names."""
        return self.get_submodule(self._chosen)

    def exportable(self) -> nn.Module:
        """Return the chosen net, which torch.export can record as it is."""
        return self.extract()
