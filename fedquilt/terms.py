"""The nouns of fedquilt: frozen values that the steps of a round exchange."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

from torch import Tensor

from fedquilt.axes import Index, Positions
from fedquilt.checks import whole
from fedquilt.errors import BudgetError, FormatError
from fedquilt.units import how_to_write, quantity

Weights = Mapping[str, Tensor]
# State that belongs to weights: "momentum" → one tensor for every trainable weight.
Slots = Mapping[str, Weights]
WHOLE = "whole"  # Name of the variant that is the model itself.
_KIND_OF_WHOLE = "width"  # Name of that variant in files, for compatibility with older ones.
# State of a method that does not belong to weights: named tensors of any shape.
Extras = Mapping[str, Tensor]


@dataclass(frozen=True)
class Arch:
    """A member of a family, given by the width of each axis and its variant.

    Equal members are trained as one stack.
    """

    widths: tuple[tuple[str, int], ...]  # Width of each axis, by name
    variant: str = WHOLE  # Name of the variant: a selection of weights, and how they are run
    # Parts whose weights it trains. Other weights are received and not changed. (): all parts
    trains: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """Return the width of each axis, by name."""
        return dict(self.widths)


@dataclass(frozen=True)
class Submodel:
    """A member of a family, and the positions of the whole model that it has."""

    arch: Arch  # The member
    index: Index = Index()  # Positions by axis. Axes that are left out have the first positions
    scope: str = ""  # Prefix of the weights' names, if one state has several nets

    @property
    def unrestricted(self) -> Index:
        """Return the positions on those axes of the member that the index leaves out.

        On such an axis the state under this scope has only the member's channels. They are the
        first positions, as many as the member is wide. It is empty if the index has all axes.
        """
        return Index(
            {
                axis: Positions.prefix(width)
                for axis, width in self.arch.widths
                if axis not in self.index
            }
        )

    @property
    def positions(self) -> Index:
        """Return the positions on all axes of the member: `index` and `unrestricted` together."""
        unrestricted = self.unrestricted
        return Index({**unrestricted, **self.index}) if unrestricted else self.index

    def to_dict(self) -> dict[str, Any]:
        """Return the sub-model as values that JSON can hold. `from_dict` reads them."""
        return {
            "widths": [list(width) for width in self.arch.widths],
            "kind": _KIND_OF_WHOLE if self.arch.variant == WHOLE else self.arch.variant,
            **({"trains": list(self.arch.trains)} if self.arch.trains else {}),
            "index": {
                axis: [list(run) for run in positions.runs]
                for axis, positions in self.index.items()
            },
            "scope": self.scope,
        }

    @staticmethod
    def from_dict(note: Mapping[str, Any]) -> Submodel:
        """Return the sub-model that `to_dict` described.

        Only the types of the values are checked. No family is known here, so that axes and
        positions are not compared with a model's.

        Args:
            note: Values of `to_dict`, which may have been received from outside.

        Raises:
            FormatError: The note is no such description.
        """
        _check_note(note)
        widths = tuple((axis, width) for axis, width in note["widths"])
        variant = WHOLE if note["kind"] == _KIND_OF_WHOLE else note["kind"]
        arch = Arch(widths, variant, tuple(note.get("trains", ())))
        index = {
            axis: Positions(tuple((start, stop) for start, stop in runs))
            for axis, runs in note["index"].items()
        }
        return Submodel(arch, Index(index), note["scope"])


def _check_note(note: object) -> None:
    """Raise a FormatError if a value does not have the keys and types of `Submodel.to_dict`."""
    if not isinstance(note, Mapping) or not {"widths", "kind", "index", "scope"} <= note.keys():
        raise FormatError("a sub-model has no widths, kind, index and scope")
    widths, index, trains = note["widths"], note["index"], note.get("trains", [])
    if not _is_pairs(widths) or not all(
        isinstance(axis, str) and whole(width) for axis, width in widths
    ):
        raise FormatError("the widths of a sub-model are not pairs of an axis and a whole number")
    if not isinstance(index, Mapping) or not all(_is_runs(runs) for runs in index.values()):
        raise FormatError("the index of a sub-model does not have runs of positions by axis")
    if not isinstance(trains, list) or not all(isinstance(part, str) for part in trains):
        raise FormatError("the parts that a sub-model trains are not names")
    if not isinstance(note["kind"], str) or not isinstance(note["scope"], str):
        raise FormatError("the kind or the scope of a sub-model is not text")


def _is_runs(runs: Any) -> bool:
    return _is_pairs(runs) and all(whole(start) and whole(stop, start) for start, stop in runs)


def _is_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    )


def in_slots(slots: Slots) -> list[Tensor]:
    """Return the tensors of all slots as one list, slot after slot."""
    return [value for values in slots.values() for value in values.values()]


Submodels = tuple[Submodel, ...]  # Nets whose logits are averaged. Most methods deploy one net.


@dataclass(frozen=True, init=False)
class Budget:
    """The limits of a device: a share of every axis, or bounds on costs.

    If there are several bounds, all of them apply, and at least one is needed. `Family.fit` returns
    the largest member within a budget.

    The meaning of `memory` depends on the use. A client of a fleet trains, so that its bound is on
    a training step of the method: weights, gradients, optimizer slots and saved activations of a
    batch, in the precision of the run. In `deploy` and `export` the bound is on inference: float32
    weights and the largest activations of one sample.

    Args:
        share: Share of the channels of every axis, in (0, 1]. 1 is the whole model. At least one
            channel is always kept, or two if the model fails with one. None: no bound.
        macs: Multiply-adds of one sample's forward pass, as a number or a text such as "28M". None:
            no bound.
        params: Number of parameters, as a number or a text such as "11.2M". None: no bound.
        memory: Bytes in training or at inference, as a number or a text such as "1.5MB". None: no
            bound.

    Raises:
        BudgetError: No bound is set, or one is not a number above 0.

    Example:
        >>> import fedquilt as fq
        >>> fq.Budget(share=0.5)
        Budget(share=0.5, macs=None, params=None, memory=None)
        >>> fq.Budget(macs="28M", memory="1.5MB")
        Budget(share=None, macs=28000000.0, params=None, memory=1500000.0)
        >>> fq.Budget(memory="2MB") == fq.Budget(memory=2e6)
        True
    """

    share: float | None = None
    macs: float | None = None
    params: float | None = None
    memory: float | None = None

    def __init__(
        self,
        share: float | None = None,
        macs: float | str | None = None,
        params: float | str | None = None,
        memory: float | str | None = None,
    ) -> None:
        bounds = {
            "share": share,
            "macs": _number(macs, "macs"),
            "params": _number(params, "params"),
            "memory": _number(memory, "memory"),
        }
        for name, value in bounds.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        bounds = self.bounds
        if not bounds:
            raise BudgetError(
                "a budget needs at least one of share=, macs=, params=, memory=; none was given."
            )
        for name, value in bounds.items():
            if not isinstance(value, Real) or isinstance(value, bool) or not float(value) > 0:
                raise BudgetError(
                    f"a budget of {name}={value!r} was asked for; it must be a number above 0."
                )
        if self.share is not None and self.share > 1:
            raise BudgetError(
                f"a share of {self.share} was asked for; shares lie in (0, 1], and 1 is the whole "
                "model."
            )

    def __str__(self) -> str:
        return " ".join(f"{name} {value:g}" for name, value in self.bounds.items())

    @property
    def bounds(self) -> dict[str, float]:
        """Return the bounds that are not None, by name: share, macs, params and memory."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def without_memory(self, share: float) -> Budget:
        """Return the budget without its bound on memory, and with this share as its share."""
        return replace(self, memory=None, share=share)

    def both(self, other: Budget) -> Budget:
        """Return the budget that keeps the bounds of this budget and of `other`.

        Of a bound that both have, the smaller value counts.
        """
        values_by_name = {
            name: [value for value in (own_value, getattr(other, name)) if value]
            for name, own_value in vars(self).items()
        }
        return Budget(**{name: min(values) for name, values in values_by_name.items() if values})


def _number(bound: float | str | None, name: str) -> float | None:
    """Return the bound of a budget as a number. A text such as "28M" is parsed.

    Args:
        bound: The bound. If it is not a text, it is returned unchanged and unchecked.
        name: Name of the bound, which decides the units that are allowed.

    Raises:
        BudgetError: It is a text that is not a number with such a unit.
    """
    if not isinstance(bound, str):
        return bound
    value = quantity(bound, name)
    if value is None:
        raise BudgetError(
            f"a budget of {name}={bound!r} was asked for; write it like {how_to_write(name)}."
        )
    return value


@dataclass(frozen=True)
class Client:
    """A device with its budget and number of samples. The samples themselves never leave it."""

    id: int  # Number of the client, from 0
    budget: Budget  # Its limits in this round
    size: int = 0  # Number of training samples
    # Number of clients sampled before this one since round 0. Split-Mix uses it as the position in
    # a cycle shared by all clients.
    turn: int = 0


@dataclass(frozen=True)
class Job:
    """A client, the sub-model that it trains, and the round. A job has no tensors."""

    client: Client  # Client that trains
    submodel: Submodel  # Positions of the whole model that it trains
    round: int  # Number of the round, counted from 0


@dataclass(frozen=True)
class Payload:
    """Tensors that server and clients send. A lossy link makes the index smaller."""

    submodel: Submodel  # Positions of all tensors
    weights: Weights  # Weights by the family's names, without the scope
    slots: Slots = field(default_factory=dict)  # State of the method, cut as the weights are
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut
    coded_extras: tuple[str, ...] = ()  # Extras that a codec codes. Others are sent uncoded
    # Weights that a client gets once, such as its private net. They are neither lost nor coded. A
    # device cannot train without them, so that it requests them until all have arrived.
    first: Weights = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors, uncoded: weights, slots, extras and `first`."""
        return self.first_bytes + sum(
            value.nbytes
            for value in (*self.weights.values(), *in_slots(self.slots), *self.extras.values())
        )

    @property
    def first_bytes(self) -> int:
        """Return the bytes of the weights that the client gets once."""
        return sum(value.nbytes for value in self.first.values())


@dataclass(frozen=True)
class Update:
    """Result of one job, as it arrived at the server."""

    job: Job  # Client, sub-model and round
    sent: tuple[Payload, ...]  # One payload, or none if all of it got lost
    steps: int  # Optimizer steps of the client in all rounds if it counts them, else in this round
    effective_steps: float = 1.0  # Effective number of local steps (FedNova's a_i)
    times: int = 1  # Factor of the client's weight in the merge. 1 has no effect

    @property
    def extras(self) -> Extras:
        """Return the extras that arrived from the client. They are empty if all got lost."""
        return self.sent[0].extras if self.sent else {}


@dataclass(frozen=True)
class ClientState:
    """Values that a client keeps between two rounds, by global position."""

    submodel: Submodel  # Positions of all tensors. They may be of several rounds
    weights: Weights  # Weights that it keeps, by name
    slots: Slots = field(default_factory=dict)  # State by slot and name, cut as the weights are
    steps: int = 0  # Optimizer steps over all rounds, if the slots or the merge depend on them
    round: int = -1  # Round in which it trained last, counted from 0. -1: unknown
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut


@dataclass(frozen=True)
class Server:
    """The complete state of a federation. A checkpoint stores it."""

    round: int  # Number of finished rounds
    weights: Weights  # Weights and norm statistics, by scope and name
    # Client states, by client and scope
    memory: MutableMapping[tuple[int, str], ClientState] = field(default_factory=dict)
    # Slots of the server's optimizer and of the method, by scope and name
    slots: Slots = field(default_factory=dict)
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut

    @property
    def scopes(self) -> set[str]:
        """Return the scopes of all nets in the state, which are the prefixes of names up to "/".

        A single net has the scope "".
        """
        return {name[: name.rfind("/") + 1] for name in self.weights}

    def last(self, client: int) -> int:
        """Return the round in which a client trained last, from its states.

        If it has none, the last finished round is returned. A client may have trained nets of
        several scopes, each with a state of its own.
        """
        states = [self.memory.get((client, scope)) for scope in {"", *self.scopes}]
        latest = max((state.round for state in states if state), default=-1)
        return latest if latest >= 0 else max(0, self.round - 1)
