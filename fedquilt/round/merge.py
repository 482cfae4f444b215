"""Folds: how what came back becomes the next server state.

A fold is a stream: `add` takes one update (or a stack of them) and forgets it, so that a cohort need not fit in memory;
`join` adds the partial sums of another worker; `finish` gives the new weights, slots and extras.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.checks import within
from fedquilt.devices import onto
from fedquilt.errors import ConfigError
from fedquilt.family.cut import Cutter, Tally
from fedquilt.tensors import Flat
from fedquilt.terms import Extras, Payload, Server, Slots, Submodel, Update, Weights

Weighting = Literal["uniform", "data", "model", "updates", "both"]


def client_weight(update: Update, weighting: Weighting, cutter: Cutter) -> float:
    """Return p_m of equation 10: how much a client counts where it counts (FedRolex, appendices A.2 and A.3).

    By `model` it counts as many times as its net has kernels, by `updates` as many times as it has taken an optimizer
    step in all rounds so far, by `both` the product.
    """
    kernels = cutter.kernels(update.job.submodel.arch) if weighting in ("model", "both") else 1
    match weighting:
        case "uniform":
            weight = 1
        case "data":
            weight = update.job.client.size
        case "model":
            weight = kernels
        case "updates":
            weight = update.steps
        case "both":
            weight = kernels * update.steps
    return float(update.times * weight)


# --- server optimisers: an option of the mean -------------------------------------------------------------------


class ServerOptimiser(Protocol):
    """Turns the mean's change from the old weights into the step the server takes."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def step(
        self, change: Tensor, slots: Mapping[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]: ...


@dataclass(frozen=True)
class Plain:
    """Take the mean as it is."""

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return change, {}


@dataclass(frozen=True)
class ServerMomentum:
    """FedAvgM (Hsu et al. 2019); lr 1 and momentum 0 give the mean."""

    lr: float = 1.0  # of the mean's change
    momentum: float = 0.9  # what is kept of the last step

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", momentum="[0, 1)")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("momentum",)

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        velocity = self.momentum * slots["momentum"] + change
        return self.lr * velocity, {"momentum": velocity}


@dataclass(frozen=True)
class ServerAdam:
    """FedAdam (Reddi et al. 2021, algorithm 2), without bias correction as published."""

    lr: float = 0.01  # of the step
    beta1: float = 0.9  # what is kept of the mean change
    beta2: float = 0.99  # what is kept of the mean square
    tau: float = 1e-3  # added to its root: how adaptive the steps are

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", beta1="[0, 1)", beta2="[0, 1)", tau="(0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * change
        square = self.beta2 * slots["square"] + (1 - self.beta2) * change.square()
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}


@dataclass(frozen=True)
class ServerYogi:
    """FedYogi (Reddi et al. 2021, algorithm 2).

        m ← β1 m + (1 − β1) Δ
        v ← v − (1 − β2) Δ² sign(v − Δ²)
        x ← x + η m / (√v + τ)

    Δ is the change from the server's weights to the mean. The mean square v decreases by at most (1 − β2) Δ² in a
    step, so that it falls more slowly than in `ServerAdam`. The paper starts v at τ² or more. Here m and v start at 0,
    as in `ServerAdam`, without bias correction.
    """

    lr: float = 0.01  # Learning rate η of the server
    beta1: float = 0.9  # Share of the mean change that is kept
    beta2: float = 0.99  # One minus the rate at which the mean square changes
    tau: float = (
        1e-3  # Added to the root of the mean square; a larger one makes steps less adaptive
    )

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", beta1="[0, 1)", beta2="[0, 1)", tau="(0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * change
        squared = change.square()
        square = slots["square"] - (1 - self.beta2) * squared * torch.sign(
            slots["square"] - squared
        )
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}


@dataclass(frozen=True)
class ServerStep:
    """Go a part of the way to the mean, or beyond it; lr 1 gives the mean."""

    lr: float = 1.0  # of the mean's change

    @property
    def slots(self) -> tuple[str, ...]:
        return ()

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return self.lr * change, {}


# --- folds ------------------------------------------------------------------------------------------------------


class Fold(Protocol):
    def add(self, update: Update) -> None:
        """Take one update."""

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        """Take many updates that sent the same positions; `stacked` has one state a payload, clients leading."""

    def join(self, other: Self) -> None:
        """Take another worker's partial result."""

    def finish(self, server: Server) -> Merged:
        """Return the new weights, slots and extras of the server."""


class Merged(NamedTuple):
    """The server's tensors after a round."""

    weights: Weights
    slots: Slots = MappingProxyType({})  # By slot, scope and name.
    extras: Extras = MappingProxyType({})
    outputs: Extras = MappingProxyType(
        {}
    )  # Outputs of teachers on public samples, which are no part of the state
    macs: int = 0  # Multiply-adds that the server spent on them


MAX_SHARED_SIZE = 1 << 16  # entries; on a CPU, larger weights are merged one by one


class Piece(NamedTuple):
    """Weights whose sums are one vector, and which are merged at once.

    On a GPU they are all weights of a scope, because every operation there is a launch, however
    small its tensors. On a CPU a large weight is a piece of its own: what a merge allocates then
    stays below the 32 MB up to which glibc reuses memory (`keep_pages`), and its temporary tensors
    are as small as one weight. In one vector of 44 MB, as a PreResNet-18 needs, the system has to
    provide and clear every page anew in every merge. Small weights share a piece, because calls
    cost more than their arithmetic.
    """

    scope: str
    is_measured: bool  # Norm statistics are averaged apart from the weights that were learnt.
    name: str  # Name of a large weight on a CPU. Empty for a piece of many weights.


@dataclass
class Mean:
    """Per position, the weighted mean over the clients that held it; untouched positions keep their value.

    With `paced`, each client's change is first divided by its effective step count and the result scaled by their
    mean (FedNova): with a_i = 1 for all, that is the plain mean.
    """

    cutter: Cutter
    weighting: Weighting = "uniform"
    optimiser: ServerOptimiser = Plain()
    paced: bool = False
    plain: frozenset[str] = (
        frozenset()
    )  # norm statistics: measured, not stepped, so neither pace nor optimiser applies
    # Σ (p/a)·w over the clients that held a position; Σ p·w of what was measured.
    _sums: dict[Piece, Flat] = field(default_factory=dict)
    # Who held what is kept as positions, names and three sums (p/a, p, p·a), not as tensors.
    _held: dict[tuple[Submodel, Index, frozenset[str]], list[float]] = field(default_factory=dict)
    _old: Weights = field(default_factory=dict)

    def begin(self, server: Server) -> Self:
        """An empty mean over a server's state."""
        self._old = server.weights
        return self

    def add(self, update: Update) -> None:
        weight, pace = (
            client_weight(update, self.weighting, self.cutter),
            update.pace if self.paced else 1.0,
        )
        home = update.job.submodel.home
        for payload in update.sent:
            for piece, parts in self._pieces(payload.submodel.scope, payload.weights).items():
                scale = weight if piece.is_measured else weight / pace
                self._add(piece, payload.submodel, home, parts, scale)
            self._count(payload.submodel, home, payload.weights, weight, pace)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        weights = [client_weight(update, self.weighting, self.cutter) for update in updates]
        paces = [update.pace if self.paced else 1.0 for update in updates]
        ratios = [weight / pace for weight, pace in zip(weights, paces, strict=True)]
        for place, state in enumerate(stacked):
            submodel, home = updates[0].sent[place].submodel, updates[0].job.submodel.home
            for piece, parts in self._pieces(submodel.scope, state).items():
                scales = weights if piece.is_measured else ratios
                if len(updates) == 1:  # nothing to sum
                    self._add(
                        piece,
                        submodel,
                        home,
                        {name: value[0] for name, value in parts.items()},
                        scales[0],
                    )
                    continue
                like = next(iter(parts.values()))
                row = onto(like.device, torch.tensor(scales, dtype=like.dtype))
                summed = {name: torch.tensordot(row, value, 1) for name, value in parts.items()}
                self._add(piece, submodel, home, summed, 1.0)
            for weight, pace in zip(weights, paces, strict=True):
                self._count(submodel, home, state, weight, pace)

    def _pieces(self, scope: str, weights: Weights) -> dict[Piece, dict[str, Tensor]]:
        """Group the weights of a scope by the piece that each of them belongs to."""
        pieces: dict[Piece, dict[str, Tensor]] = {}
        for name, value in weights.items():
            whole = self._old[scope + name]
            is_alone = whole.numel() > MAX_SHARED_SIZE and not self.cutter.is_flat(whole)
            piece = Piece(scope, name in self.plain, name if is_alone else "")
            pieces.setdefault(piece, {})[name] = value
        return pieces

    def _add(
        self, piece: Piece, submodel: Submodel, home: Index, parts: Weights, scale: float
    ) -> None:
        if piece not in self._sums and all(
            self.cutter.keeps(name, submodel.index, home) for name in parts
        ):
            first = Flat.of(parts)  # the first of many need not be added to zeros
            self._sums[piece] = first if scale == 1.0 else first.same(first.vector.mul_(scale))
            return
        self.cutter.add(self._room(piece, parts), submodel, parts, scale, home)

    def _room(self, piece: Piece, names: Iterable[str]) -> Flat:
        """Return the sums of a piece, with zeros for weights that nobody has sent before."""
        sums = self._sums.get(piece)
        known = sums.parts if sums is not None else {}
        new = {
            name: torch.zeros_like(self._old[piece.scope + name])
            for name in names
            if name not in known
        }
        if sums is None or new:
            sums = self._sums[piece] = Flat.of(known | new)
        return sums

    def _count(
        self, submodel: Submodel, home: Index, weights: Weights, weight: float, pace: float
    ) -> None:
        held = self._held.setdefault((submodel, home, frozenset(weights)), [0.0, 0.0, 0.0])
        for place, value in enumerate((weight / pace, weight, weight * pace)):
            held[place] += value

    def join(self, other: Self) -> None:
        for key, theirs in other._sums.items():
            for piece, parts in self._pieces(key.scope, theirs.parts).items():
                mine = self._room(piece, parts)
                torch._foreach_add_([mine.parts[name] for name in parts], list(parts.values()))
        for cut, sums in other._held.items():
            held = self._held.setdefault(cut, [0.0, 0.0, 0.0])
            for place, value in enumerate(sums):
                held[place] += value

    def finish(self, server: Server) -> Merged:
        weights = dict(server.weights)
        slots = {slot: dict(values) for slot, values in server.slots.items()}
        for piece, sums in self._sums.items():
            scope = piece.scope
            old = sums.read(server.weights, scope)
            tally = self._tally(scope, sums, _WEIGHT)
            counts = tally.values
            if self.paced and not piece.is_measured:  # w + (Σp·a / Σp) · Σ(p/a)(w_i − w) / Σp
                change = sums.vector - self._tally(scope, sums, _RATIO).values * old
                mean = old + self._tally(scope, sums, _PACED).values / counts * change / counts
            else:
                mean = sums.vector / counts

            touched = None
            if not tally.complete and isinstance(counts, Tensor):
                touched = counts > 0
            if not isinstance(self.optimiser, Plain) and not piece.is_measured:
                mean = self._step(scope, sums, old, mean, touched, slots)
            merged = mean if touched is None else torch.where(touched, mean, old)
            weights |= {scope + name: part for name, part in sums.same(merged).parts.items()}
        return Merged(weights, slots, server.extras)

    def _step(
        self,
        scope: str,
        sums: Flat,
        old: Tensor,
        mean: Tensor,
        touched: Tensor | None,
        slots: dict[str, dict[str, Tensor]],
    ) -> Tensor:
        """Let the server's optimiser step towards the mean; untouched positions keep their slots."""
        own = {}
        for slot in self.optimiser.slots:
            held = slots.setdefault(slot, {})
            empty = sums.same(torch.zeros_like(old)).parts
            own[slot] = Flat.of(
                {name: held.get(scope + name, zeros) for name, zeros in empty.items()}
            ).vector
        step, after = self.optimiser.step(mean - old, own)
        for slot, value in after.items():
            kept = sums.same(value if touched is None else torch.where(touched, value, own[slot]))
            slots[slot] |= {scope + name: part for name, part in kept.parts.items()}
        return old + step

    def _tally(self, scope: str, sums: Flat, place: int) -> Tally:
        """Add up how much the clients count that held each position of a piece."""
        held = [
            (submodel, home, [name for name in sums.shapes if name in names], values[place])
            for (submodel, home, names), values in self._held.items()
            if submodel.scope == scope
        ]
        return self.cutter.tally(sums, held)


@dataclass
class Sum(Mean):
    """Per position, the old value plus the scaled sum of what clients sent; untouched positions keep their value."""

    scale: float = 1.0  # Factor of the sum

    def finish(self, server: Server) -> Merged:
        weights = dict(server.weights)
        for piece, sums in self._sums.items():
            new = sums.same(sums.read(server.weights, piece.scope) + self.scale * sums.vector)
            weights |= {piece.scope + name: part for name, part in new.parts.items()}
        return Merged(weights, server.slots, server.extras)


@dataclass
class Stateful:
    """A fold for the weights, and one for each slot and extra that clients send.

    A slot has a tensor for every weight, so that any fold of weights serves it: it is given the slot
    in the place of the weights. Extras are averaged as whole tensors.

        change = Sum(cutter, scale=1 / num_clients).begin(as_weights(server, "control"))
        fold = Stateful(mean, {"control": change})
    """

    weights: Fold
    slots: Mapping[str, Fold] = field(default_factory=dict)
    extras: ExtrasMean | None = None  # None: extras of the server stay as they are

    def __post_init__(self) -> None:
        optimiser = self.weights.optimiser if isinstance(self.weights, Mean) else Plain()
        if taken := set(optimiser.slots) & set(self.slots):
            raise ConfigError(
                f"a fold was asked for with the slot {min(taken)!r}, which the server's optimizer "
                f"{type(optimiser).__name__} has; another name would work."
            )

    def add(self, update: Update) -> None:
        self.weights.add(update)
        for slot, fold in self.slots.items():
            fold.add(_of_slot(update, slot))
        if self.extras is not None:
            self.extras.add(update)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        self.weights.add_stack(updates, stacked)
        for slot, fold in self.slots.items():
            own = [_of_slot(update, slot) for update in updates]
            sent = zip(*(update.sent for update in own), strict=True)
            fold.add_stack(
                own, [_stacked([payload.weights for payload in payloads]) for payloads in sent]
            )
        if self.extras is not None:
            for update in updates:
                self.extras.add(update)

    def join(self, other: Self) -> None:
        self.weights.join(other.weights)
        for slot, fold in self.slots.items():
            fold.join(other.slots[slot])
        if self.extras is not None and other.extras is not None:
            self.extras.join(other.extras)

    def finish(self, server: Server) -> Merged:
        merged = self.weights.finish(server)
        slots = dict(merged.slots)
        for slot, fold in self.slots.items():
            slots[slot] = fold.finish(as_weights(server, slot)).weights
        extras = merged.extras if self.extras is None else self.extras.finish(server)
        return Merged(merged.weights, slots, extras)


@dataclass
class ExtrasMean:
    """Weighted mean of each extra over the clients that sent it. One that nobody sent stays as it is."""

    cutter: Cutter
    weighting: Weighting = "uniform"
    _sums: dict[str, tuple[Tensor, float]] = field(default_factory=dict)  # Σ p·value and Σ p

    def add(self, update: Update) -> None:
        weight = client_weight(update, self.weighting, self.cutter)
        for name, value in update.extras.items():
            self._add(name, weight * value, weight)

    def _add(self, name: str, value: Tensor, weight: float) -> None:
        total, count = self._sums.get(name, (torch.zeros_like(value), 0.0))
        self._sums[name] = total + value, count + weight

    def join(self, other: Self) -> None:
        for name, (value, weight) in other._sums.items():
            self._add(name, value, weight)

    def finish(self, server: Server) -> Extras:
        """Return the server's new extras."""
        return {
            **server.extras,
            **{name: total / count for name, (total, count) in self._sums.items()},
        }


def as_weights(server: Server, slot: str) -> Server:
    """Return a state that has a slot in the place of the weights, for the fold of the slot."""
    if slot not in server.slots:
        raise ConfigError(
            f"a fold of the slot {slot!r} was asked for; the server has {sorted(server.slots)}. Method.init has to "
            "give the server a first value."
        )
    return replace(server, weights=server.slots[slot])


def _of_slot(update: Update, slot: str) -> Update:
    """Return an update that has a slot in the place of the weights."""
    sent = tuple(Payload(payload.submodel, payload.slots.get(slot, {})) for payload in update.sent)
    return replace(update, sent=sent)


def _stacked(states: Sequence[Weights]) -> dict[str, Tensor]:
    """Return the tensors of several clients with the clients in front."""
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


_RATIO, _WEIGHT, _PACED = range(3)  # what `Mean._held` adds up: p/a, p and p·a
