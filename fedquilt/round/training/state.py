"""State of a method on clients: what they receive, keep and send beside the weights.

State is of two kinds. A *slot* has a tensor for every weight that travels both ways. It is cut, lost and coded with
that weight. An *extra* is a named tensor of any shape, which arrives whole or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from fedquilt.checks import refuse
from fedquilt.terms import Extras, Slots, Weights, in_slots

if TYPE_CHECKING:
    from fedquilt.round.training.optimizers import State

LINK_SLOTS = ("residual", "received")  # Slots that clients keep because of a link with a codec.


class Received(NamedTuple):
    """Values that do not change while a client trains. It is a tuple so that vmap can look inside."""

    weights: State  # Weights that the round started from.
    # Slots of the method: those that were received, and the client's own.
    slots: dict[str, State] = {}  # noqa: RUF012 (nobody writes to it, and vmap wants a dict)


@dataclass(frozen=True)
class Trained:
    """Weights, slots and results of passes of a client after its last step.

    Args:
        received: Weights that it started from.
        weights: Weights after the last step, by the same names.
        slots: Slots that it started from, the server's and its own. A position that neither was received nor is
            remembered is zero.
        extras: Extras that it received or kept. One that never arrived is absent.
        steps: () Optimizer steps of this round.
        lr: Learning rate of this round.
        passes: Results of the learner's passes, by the name of the pass.
    """

    received: Weights
    weights: Weights
    slots: Slots
    extras: Extras
    steps: Tensor
    lr: float
    passes: Mapping[str, Weights]


@dataclass(frozen=True)
class Left:
    """Slots and extras that a client keeps and sends after its training."""

    kept: Slots = field(default_factory=dict)
    sent: Slots = field(default_factory=dict)
    kept_extras: Extras = field(default_factory=dict)
    sent_extras: Extras = field(default_factory=dict)

    @property
    def tensors(self) -> list[Tensor]:
        """Return all of its tensors."""
        whole = (*self.kept_extras.values(), *self.sent_extras.values())
        return [*in_slots(self.kept), *in_slots(self.sent), *whole]


@dataclass(frozen=True)
class MethodState:
    """Names of the slots and extras that a method has on clients, and how they change. As it is, there are none.

    A subclass gives other defaults to the fields and overrides `finish`. Names of slots that clients keep must differ
    from those that they receive, because objectives see both in `View.slots`.
    """

    slots_down: tuple[str, ...] = ()  # Slots of the server that clients receive
    slots_kept: tuple[str, ...] = ()  # Slots that clients keep between rounds
    slots_up: tuple[str, ...] = ()  # Slots that clients send
    extras_down: tuple[str, ...] = ()  # Extras of the server that clients receive
    extras_kept: tuple[str, ...] = ()  # Extras that clients keep between rounds
    extras_up: tuple[str, ...] = ()  # Extras that clients send
    coded_extras: tuple[
        str, ...
    ] = ()  # Extras that a link with a codec codes; it sends the others as they are

    def __post_init__(self) -> None:
        wrong = {}
        for kind in ("slots", "extras"):
            down, kept = getattr(self, f"{kind}_down"), getattr(self, f"{kind}_kept")
            if both := set(down) & set(kept):
                wrong[f"{kind}_kept"] = (
                    f"{sorted(both)} is among {kind}_down as well; a client cannot tell the server's from its own. "
                    "Another name would work."
                )
        if taken := {*self.slots_down, *self.slots_kept} & set(LINK_SLOTS):
            wrong["slots"] = (
                f"{sorted(taken)} was asked for, which links have; another name would work."
            )
        known = {*self.extras_down, *self.extras_up}
        if unknown := set(self.coded_extras) - known:
            wrong["coded_extras"] = (
                f"{sorted(unknown)} does not travel; those that do are {sorted(known)}."
            )
        refuse(self, wrong)

    def __bool__(self) -> bool:
        """Return True if the method has any state on clients."""
        return self._is_used

    @cached_property
    def _is_used(self) -> bool:
        return any(getattr(self, one.name) for one in fields(MethodState))

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the slots that a client has while it trains."""
        return (*self.slots_down, *self.slots_kept)

    def finish(self, trained: Trained) -> Left:
        """Return what a client keeps and sends. It is called once, after the last step.

        The function must be pure, without branches on values, because an engine may run it for many clients at once
        (`torch.func.vmap`).
        """
        return Left()
