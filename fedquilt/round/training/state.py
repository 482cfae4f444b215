"""State of a method on clients: tensors that they receive, keep and send besides the weights.

There are two kinds of state. A *slot* has a tensor for every weight that clients both receive and
send. It is cut, lost and coded like that weight. An *extra* is a named tensor of any shape, which
arrives completely or not at all.
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
    """Values that do not change while a client trains, as a tuple that vmap can handle."""

    weights: State  # Weights that the round started from.
    # Slots of the method: those that were received, and the client's own.
    slots: dict[str, State] = {}  # noqa: RUF012 (nobody writes to it, and vmap wants a dict)


@dataclass(frozen=True)
class Trained:
    """Weights, slots and results of passes of a client after its last step.

    Args:
        received: Weights that it started from.
        weights: Weights after the last step, by the same names.
        slots: Slots that it started from, the server's and its own. A position that was neither
            received nor remembered is zero.
        extras: Extras that it received or kept. One that never arrived is absent.
        steps: () Optimizer steps of this round.
        lr: () Mean learning rate of these steps, so that `steps * lr` is the sum of their learning
            rates.
        passes: Results of the learner's passes, by the name of the pass.
    """

    received: Weights
    weights: Weights
    slots: Slots
    extras: Extras
    steps: Tensor
    lr: Tensor
    passes: Mapping[str, Weights]


@dataclass(frozen=True)
class Left:
    """Slots and extras that a client keeps and sends after its training."""

    kept: Slots = field(default_factory=dict)  # Slots that it keeps between rounds.
    sent: Slots = field(default_factory=dict)  # Slots that it sends.
    kept_extras: Extras = field(default_factory=dict)  # Extras that it keeps between rounds.
    sent_extras: Extras = field(default_factory=dict)  # Extras that it sends.

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors that the client keeps or sends, of slots and extras."""
        extras = (*self.kept_extras.values(), *self.sent_extras.values())
        return [*in_slots(self.kept), *in_slots(self.sent), *extras]


@dataclass(frozen=True)
class MethodState:
    """Names of the slots and extras that a method has on clients, and how they change.

    By default there are none. A subclass gives other defaults to the fields and overrides `finish`.
    Names of slots that clients keep must differ from those that they receive, because objectives
    see both in `View.slots`.
    """

    slots_down: tuple[str, ...] = ()  # Slots of the server that clients receive
    slots_kept: tuple[str, ...] = ()  # Slots that clients keep between rounds
    slots_up: tuple[str, ...] = ()  # Slots that clients send
    extras_down: tuple[str, ...] = ()  # Extras of the server that clients receive
    extras_kept: tuple[str, ...] = ()  # Extras that clients keep between rounds
    extras_up: tuple[str, ...] = ()  # Extras that clients send
    coded_extras: tuple[str, ...] = ()  # Extras that a codec codes. Others are sent uncoded

    def __post_init__(self) -> None:
        problems = {}
        for kind in ("slots", "extras"):
            down = getattr(self, f"{kind}_down")
            kept_names = getattr(self, f"{kind}_kept")
            if shared := set(down) & set(kept_names):
                problems[f"{kind}_kept"] = (
                    f"{sorted(shared)} is among {kind}_down as well; a client cannot tell the "
                    "server's from its own. Another name would work."
                )
        if clash := {*self.slots_down, *self.slots_kept} & set(LINK_SLOTS):
            problems["slots"] = (
                f"{sorted(clash)} was asked for, which links have; another name would work."
            )
        sent_names = {*self.extras_down, *self.extras_up}
        if unknown := set(self.coded_extras) - sent_names:
            problems["coded_extras"] = (
                f"{sorted(unknown)} does not travel; those that do are {sorted(sent_names)}."
            )
        refuse(self, problems)

    def __bool__(self) -> bool:
        """Return True if the method has any state on clients."""
        return self._is_used

    @cached_property
    def _is_used(self) -> bool:
        return any(getattr(self, setting.name) for setting in fields(MethodState))

    @property
    def slots(self) -> tuple[str, ...]:
        """Return the names of the slots of a client in training, received and kept ones."""
        return (*self.slots_down, *self.slots_kept)

    def finish(self, trained: Trained) -> Left:
        """Return the state that a client keeps and sends. It is called once, after the last step.

        By default there is none. The function must be pure, without branches on values, because an
        engine may run it for many clients at once (`torch.func.vmap`).

        Args:
            trained: Weights, slots and extras of the client after its last step.
        """
        return Left()
