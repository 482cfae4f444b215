"""Variants: several ways to run one module, each with some of its weights.

A training stage of a growing model is a variant: the first blocks of the module and a temporary
head. One of several architectures in a federation is a variant too, and so is a pair of nets. All
variants of a module are in one state, and a weight that two variants use is the same weight. Widths
are independent of variants: an axis is cut in every variant that has it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from fedquilt.terms import WHOLE

if TYPE_CHECKING:
    from fedquilt.family.tracing.run import RecordedRun

JOIN = "+"  # Separator between the names of variants that a member combines


class Variants(ABC):
    """A mixin for modules that run in several ways.

    `forward` runs the variant that was chosen last. At first this is the whole model. A copy
    (`copy.deepcopy`) has its own choice.
    """

    @property
    @abstractmethod
    def variants(self) -> tuple[str, ...]:
        """Return the names of all variants besides `WHOLE`, always in the same order."""

    @abstractmethod
    def choose(self, variant: str) -> None:
        """Make `forward` run this variant from now on: `WHOLE`, or one of `variants`."""

    @abstractmethod
    def extract(self) -> nn.Module:
        """Return the chosen variant as a plain module that has only its own weights.

        The whole model is a module of the user's class. The result has the layers of this module,
        which must not be used afterwards.
        """

    @abstractmethod
    def exportable(self) -> nn.Module:
        """Return the chosen variant as a module that torch.export can record.

        Raises:
            ExportError: It cannot be recorded. The message gives the reason.
        """

    def holding(self, variant: str) -> nn.Module:
        """Return a module that has at least the layers of a variant, and shares them with this one.

        Members are built from it. By default it is this module.
        """
        return cast(nn.Module, self)

    def variant_parts(self, runs: Mapping[str, RecordedRun]) -> dict[str, tuple[str, ...]]:
        """Return groups of weights, each of which a member may train alone.

        Keys are the names of the groups, and values the names of their weights. By default there
        are none.

        Args:
            runs: A recorded run of every variant, `WHOLE` included.
        """
        return {}


class VariantSource(ABC):
    """A module whose variants depend on the example, such as stages found by running it."""

    @abstractmethod
    def resolve(
        self, example_inputs: tuple[Any, ...], class_dim: int | None = None
    ) -> nn.Module | Callable[[], nn.Module]:
        """Return the module with variants, or a function that makes one, for `trace`.

        Args:
            example_inputs: Inputs of the module.
            class_dim: Dimension of its output that has the classes. None: `trace` guesses it.
        """


def choose(module: nn.Module, variant: str) -> None:
    """Make a module run a variant from now on. Of several joined variants, it runs the first.

    A module without variants accepts only `WHOLE`, which has no effect on it.
    """
    first = members_of(variant)[0]
    if isinstance(module, Variants):
        module.choose(first)
    else:
        assert first == WHOLE, (
            f"{type(module).__name__} has no variants, and {variant!r} was asked for"
        )


def joined(*variants: str) -> str:
    """Return the name of the variant that has the weights of all `variants` and runs the first.

    Names that are repeated count once. A single name is returned as it is.
    """
    return JOIN.join(dict.fromkeys(variants))


def members_of(variant: str) -> tuple[str, ...]:
    """Return the names of the variants that `variant` joins. A single name gives itself."""
    return tuple(variant.split(JOIN))


def names_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of a module's variants, the whole model first."""
    return (WHOLE, *(module.variants if isinstance(module, Variants) else ()))
