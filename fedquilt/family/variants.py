"""Variants: several ways to run one module, each with some of its weights.

A training stage of a growing model is a variant: the first blocks of the module and a temporary head. So
is one of several architectures in a federation, or a pair of nets. All variants of a module are in one
state, and a weight that two variants run is the same weight. Widths are independent of variants: an axis
is cut in every variant that carries it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fedquilt.terms import WHOLE

if TYPE_CHECKING:
    from fedquilt.family.record import Run

JOIN = "+"  # Between the names of variants that a member has together


class Variants(ABC):
    """A mixin for modules that run in several ways.

    `forward` runs the variant that was chosen last, at first the whole model. A structural copy
    (`copy.deepcopy`) has a choice of its own.
    """

    @property
    @abstractmethod
    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants besides `WHOLE`, in an order that is always the same."""

    @abstractmethod
    def choose(self, variant: str) -> None:
        """Let `forward` run this variant from now on."""

    @abstractmethod
    def extract(self) -> nn.Module:
        """Return the chosen variant as a plain module, with no weights but its own.

        The whole model is a module of the class that the user wrote. The result has the layers of this module, which
        must not be used afterwards.
        """

    @abstractmethod
    def exportable(self) -> nn.Module:
        """Return the chosen variant as a module that torch.export can record.

        Raises:
            ExportError: It cannot be recorded, for the reason in the message.
        """

    def holding(self, variant: str) -> nn.Module:
        """Return a module that has at least the layers of a variant, and shares them with this one.

        Members are built from it. By default it is this module.
        """
        return cast(nn.Module, self)

    def variant_parts(self, runs: Mapping[str, Run]) -> dict[str, tuple[str, ...]]:
        """Return groups of weights by name, which a member may train alone.

        Args:
            runs: A recorded run of every variant, `WHOLE` included.
        """
        return {}


class VariantSource(ABC):
    """A module whose variants depend on the example, such as stages that are to be found by running it."""

    @abstractmethod
    def resolve(
        self, example_inputs: tuple[Any, ...], class_dim: int | None = None
    ) -> nn.Module | Callable[[], nn.Module]:
        """Return the module with variants, or a function that makes one, as `trace` takes them.

        Args:
            example_inputs: Inputs of the module.
            class_dim: Dimension of its output that the classes are in; None: as `trace` guesses it.
        """


def choose(module: nn.Module, variant: str) -> None:
    """Let a module run a variant. Of several that are joined, it runs the first."""
    first = members_of(variant)[0]
    if isinstance(module, Variants):
        module.choose(first)
    else:
        assert first == WHOLE, (
            f"{type(module).__name__} has no variants, and {variant!r} was asked for"
        )


def joined(*variants: str) -> str:
    """Return the variant that has the weights of all of them and runs the first."""
    return JOIN.join(dict.fromkeys(variants))


def members_of(variant: str) -> tuple[str, ...]:
    """Return the variants that were joined."""
    return tuple(variant.split(JOIN))


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's variants, the whole model first."""
    return (WHOLE, *(module.variants if isinstance(module, Variants) else ()))
