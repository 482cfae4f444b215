"""The nouns: frozen values that the round passes from hand to hand. Nothing here computes."""

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
Slots = Mapping[
    str, Weights
]  # State by position: "momentum" → one tensor for every trainable weight
WHOLE = "whole"  # Name of the variant that is the model itself
_KIND_OF_WHOLE = "width"  # What files have had for the whole model since before there were variants
Extras = Mapping[
    str, Tensor
]  # State of a method that belongs to no position: named tensors of any shape


@dataclass(frozen=True)
class Arch:
    """One member of a family by the width of each axis and its variant. Equal members are trained as one stack."""

    widths: tuple[tuple[str, int], ...]
    variant: str = WHOLE  # Which of the family's weights it has, and how they are run
    # Parts whose weights it trains; (): all. It receives the other weights, and does not change them.
    trains: tuple[str, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.widths)


@dataclass(frozen=True)
class Submodel:
    """Which positions of which axes a client holds; `scope` prefixes the names when one state holds several nets."""

    arch: Arch
    index: Index = Index()
    scope: str = ""

    @property
    def home(self) -> Index:
        """The axes that the index leaves out: of these the state under its scope has the member's channels alone."""
        return Index(
            {
                axis: Positions.prefix(width)
                for axis, width in self.arch.widths
                if axis not in self.index
            }
        )

    @property
    def held(self) -> Index:
        """The positions on all of the member's axes, whether the index names them or not."""
        home = self.home
        return Index({**home, **self.index}) if home else self.index

    def to_dict(self) -> dict[str, Any]:
        """In values that JSON has."""
        return {
            "widths": [list(width) for width in self.arch.widths],
            "kind": _KIND_OF_WHOLE if self.arch.variant == WHOLE else self.arch.variant,
            **({"trains": list(self.arch.trains)} if self.arch.trains else {}),
            "index": {axis: [list(run) for run in kept.runs] for axis, kept in self.index.items()},
            "scope": self.scope,
        }

    @staticmethod
    def from_dict(note: Mapping[str, Any]) -> Submodel:
        """Return the sub-model that `to_dict` described.

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
    """Refuse what is no description of a sub-model, before anything is made from it."""
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
    """Return the tensors of all slots."""
    return [value for values in slots.values() for value in values.values()]


Mix = tuple[Submodel, ...]  # nets whose logits are averaged; most methods give a device one


@dataclass(frozen=True, init=False)
class Budget:
    """The network that a device can hold: a share of every axis, or bounds on what the network costs.

    Several bounds hold together. `memory` means the memory of what the device is asked to do.
    A client of a fleet trains, so its bound is on the training step of the method that runs:
    weights, gradients, optimizer slots and saved activations of a batch, in the precision of the
    run. In `deploy` and `export` the bound is on inference: float32 weights and the largest
    activations of one sample.

    Args:
        share: Part of the channels of every axis, in (0, 1]. At least one channel is always kept, two where the
            model fails with one.
        macs: Multiply-adds of one sample's forward pass.
        params: Number of parameters.
        memory: Bytes, in training or at inference.

    `macs`, `params` and `memory` may be texts with a unit, which become numbers.

    >>> Budget(macs="28M", memory="1.5MB")
    Budget(share=None, macs=28000000.0, params=None, memory=1500000.0)
    >>> Budget(memory="2MB") == Budget(memory=2e6)
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
        }
        bounds["memory"] = _number(memory, "memory")
        for name, value in bounds.items():
            object.__setattr__(self, name, value)
        self._check()

    def _check(self) -> None:
        given = self.bounds
        if not given:
            raise BudgetError(
                "a budget needs at least one of share=, macs=, params=, memory=; none was given."
            )
        for name, value in given.items():
            if not isinstance(value, Real) or not float(value) > 0:
                raise BudgetError(
                    f"a budget of {name}={value!r} was asked for; it must be a number above 0."
                )
        if self.share is not None and self.share > 1:
            raise BudgetError(
                f"a share of {self.share} was asked for; shares lie in (0, 1], and 1 is the whole model."
            )

    def __str__(self) -> str:
        return " ".join(f"{name} {value:g}" for name, value in self.bounds.items())

    @property
    def bounds(self) -> dict[str, float]:
        """Return the bounds that there are, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}

    def without_memory(self, share: float) -> Budget:
        """Return the budget with a share in the place of its bound on memory."""
        return replace(self, memory=None, share=share)

    def both(self, other: Budget) -> Budget:
        """What keeps within either: of each bound the tighter one."""
        found = {
            name: [value for value in (own, getattr(other, name)) if value]
            for name, own in vars(self).items()
        }
        return Budget(**{name: min(values) for name, values in found.items() if values})


def _number(bound: float | str | None, name: str) -> float | None:
    """Return the bound of a budget as a number.

    Raises:
        BudgetError: It is a text without a meaning.
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
    """A device: what it can hold and how many samples it has. The samples themselves never leave it."""

    id: int
    budget: Budget
    size: int = 0
    turn: int = (
        0  # how many were asked before it, over all rounds: where a cycle that all share stands
    )


@dataclass(frozen=True)
class Job:
    """What one client is asked to train in one round; it names positions and owns no tensors."""

    client: Client
    submodel: Submodel
    round: int


@dataclass(frozen=True)
class Payload:
    """What travels. After a lossy link its index is smaller, and nothing else differs."""

    submodel: Submodel
    weights: Weights  # by the family's names, without the scope
    slots: Slots = field(default_factory=dict)  # State of the method, cut as the weights are
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut
    coded_extras: tuple[
        str, ...
    ] = ()  # Extras that a link with a codec codes; it sends the others as they are
    # Weights that a client gets once, such as its private net. They are neither lost nor coded, because a device that
    # lacks a part of its net cannot begin: it asks until all of them have arrived.
    first: Weights = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Return the bytes of all tensors, uncoded."""
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
    """What came back from one job."""

    job: Job
    sent: tuple[Payload, ...]  # one payload, or none if all of it got lost
    steps: int  # optimizer steps of the client: of all rounds so far where it counts them, else of this one
    pace: float = 1.0  # effective local steps (FedNova's a_i)
    metrics: Mapping[str, float] = field(default_factory=dict)
    times: int = 1  # that the client counts in the merge

    @property
    def extras(self) -> Extras:
        """Return the whole tensors that arrived from the client."""
        return self.sent[0].extras if self.sent else {}


@dataclass(frozen=True)
class Memory:
    """What a client keeps between rounds, by global position."""

    submodel: Submodel
    weights: Weights
    slots: Slots = field(default_factory=dict)
    steps: int = 0  # optimizer steps over all rounds, where the slots or the merge depend on them
    round: int = -1  # in which it trained last; -1: nobody wrote it down
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut


@dataclass(frozen=True)
class Server:
    """The whole state of a federation; saving it is a checkpoint."""

    round: int
    weights: Weights
    memory: MutableMapping[tuple[int, str], Memory] = field(
        default_factory=dict
    )  # by client and scope
    slots: Slots = field(
        default_factory=dict
    )  # of the server's optimizer and of the method, by scope and name
    extras: Extras = field(default_factory=dict)  # State of the method that is not cut

    def last(self, client: int) -> int:
        """The round in which a client trained last, as far as it remembers; else the last one of all."""
        memory = self.memory.get((client, ""))
        return memory.round if memory and memory.round >= 0 else max(0, self.round - 1)
