"""Folds merge the updates of clients into the next server state.

A fold is a stream. `add` takes one update, or a stack of them, and does not keep it, so that a
cohort need not fit in memory. `join` adds the partial sums of another worker. `finish` returns the
new weights, slots and extras.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.axes import Index
from fedquilt.errors import ConfigError
from fedquilt.family.cut import Cutter, Tally
from fedquilt.hardware.device import to_device_async
from fedquilt.hardware.torch_internals import foreach_add_
from fedquilt.round.fold import (
    Fold,
    Merged,
    Weighting,
    client_weight,
)
from fedquilt.round.server_optimizers import (
    Plain,
    ServerOptimizer,
)
from fedquilt.tensors import Flat
from fedquilt.terms import Extras, Payload, Server, Submodel, Update, Weights

# --- server optimizers: an option of the mean ---------------------------------------------------


# --- folds --------------------------------------------------------------------------------------


MAX_SHARED_SIZE = 1 << 16  # Entries of a weight. On a CPU, larger weights are merged one by one.


class MergePiece(NamedTuple):
    """Weights whose sums are one vector, and which are merged at once.

    On a GPU all weights of a scope are one piece, because every operation is a kernel launch,
    however small its tensors are. On a CPU a large weight is a piece of its own. A merge then
    allocates less than the 32 MB up to which glibc reuses memory (`keep_pages`), and its temporary
    tensors are as small as one weight. With one vector of 44 MB, as a PreResNet-18 needs, the
    system would have to provide and clear all pages in every merge. Small weights share a piece,
    because the calls cost more than the arithmetic. The test
    `test_large_weights_are_merged_alone_on_a_cpu` checks the sizes.
    """

    scope: str  # Prefix of the weights' names in the state. Empty for most methods.
    is_measured: bool  # Norm statistics are averaged apart from the weights that were learnt.
    name: str  # Name of a large weight on a CPU. Empty for a piece of many weights.


@dataclass
class Mean(Fold):
    """Weighted mean, at each position, over the clients that held the position.

    Positions that no client held keep their value. With `paced`, each client's change is divided by
    its effective step count a_i, and the sum is scaled by the mean of these counts (FedNova). With
    a_i = 1 for all clients, that is the plain mean.
    """

    cutter: Cutter  # It knows which positions of the server's weights a sub-model has.
    weighting: Weighting = "uniform"  # Weights of clients. `client_weight` explains them.
    optimizer: ServerOptimizer = Plain()  # Optimizer that steps towards the mean.
    paced: bool = False  # True: changes are divided by effective step counts.
    # Names of norm statistics. They are measured and not trained, so that neither `paced` nor
    # `optimizer` applies to them.
    plain: frozenset[str] = frozenset()
    # Σ (p/a)·w over the clients that held a position. For norm statistics Σ p·w.
    _sums: dict[MergePiece, Flat] = field(default_factory=dict)
    # Positions, names and three sums (p/a, p, p·a) for each distinct cut. This takes much less
    # memory than a tensor of counts.
    _held: dict[tuple[Submodel, Index, frozenset[str]], list[float]] = field(default_factory=dict)
    _old: Weights = field(default_factory=dict)

    def begin(self, server: Server) -> Self:
        """Start a mean over updates of `server`, and return this fold itself.

        The server's weights are stored, because they have the shapes of all weights.
        """
        self._old = server.weights
        return self

    @override
    def add(self, update: Update) -> None:
        weight = client_weight(update, self.weighting, self.cutter)
        effective_steps = update.effective_steps if self.paced else 1.0
        home = update.job.submodel.unrestricted
        for payload in update.sent:
            for piece, parts in self._pieces(payload.submodel.scope, payload.weights).items():
                scale = weight if piece.is_measured else weight / effective_steps
                self._add(piece, payload.submodel, home, parts, scale)
            self._count(payload.submodel, home, payload.weights, weight, effective_steps)

    @override
    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        weights = [client_weight(update, self.weighting, self.cutter) for update in updates]
        paces = [update.effective_steps if self.paced else 1.0 for update in updates]
        ratios = [
            weight / effective_steps for weight, effective_steps in zip(weights, paces, strict=True)
        ]
        for payload_index, state in enumerate(stacked):
            submodel = updates[0].sent[payload_index].submodel
            home = updates[0].job.submodel.unrestricted
            for piece, parts in self._pieces(submodel.scope, state).items():
                scales = weights if piece.is_measured else ratios
                if len(updates) == 1:  # There is nothing to sum.
                    self._add(
                        piece,
                        submodel,
                        home,
                        {name: value[0] for name, value in parts.items()},
                        scales[0],
                    )
                    continue
                example = next(iter(parts.values()))
                row = to_device_async(example.device, torch.tensor(scales, dtype=example.dtype))
                summed = {name: torch.tensordot(row, value, 1) for name, value in parts.items()}
                self._add(piece, submodel, home, summed, 1.0)
            for weight, effective_steps in zip(weights, paces, strict=True):
                self._count(submodel, home, state, weight, effective_steps)

    def _pieces(self, scope: str, weights: Weights) -> dict[MergePiece, dict[str, Tensor]]:
        """Group the weights of a scope by the piece that each of them belongs to.

        Norm statistics are apart from weights that were learnt. A large weight on a CPU is alone.

        Args:
            scope: Scope of the net.
            weights: Weights of a cut, by name without scope. Sizes are those of the whole weights.
        """
        pieces: dict[MergePiece, dict[str, Tensor]] = {}
        for name, value in weights.items():
            full_weight = self._old[scope + name]
            is_alone = full_weight.numel() > MAX_SHARED_SIZE and not self.cutter.is_flat(
                full_weight
            )
            piece = MergePiece(scope, name in self.plain, name if is_alone else "")
            pieces.setdefault(piece, {})[name] = value
        return pieces

    def _add(
        self, piece: MergePiece, submodel: Submodel, home: Index, parts: Weights, scale: float
    ) -> None:
        if piece not in self._sums and all(
            self.cutter.keeps(name, submodel.index, home) for name in parts
        ):
            first = Flat.of(parts)  # The first update need not be added to zeros.
            self._sums[piece] = first if scale == 1.0 else first.same(first.vector.mul_(scale))
            return
        self.cutter.add(self._room(piece, parts), submodel, parts, scale, home)

    def _room(self, piece: MergePiece, names: Iterable[str]) -> Flat:
        """Return the sums of a piece, to which updates are added in-place.

        Weights of the piece that nobody has sent before are added to it as zeros, in the server's
        shape.

        Args:
            piece: The piece. It is created if it has no sums yet.
            names: Names of the weights that are needed, without the scope.
        """
        sums = self._sums.get(piece)
        parts = sums.parts if sums is not None else {}
        new = {
            name: torch.zeros_like(self._old[piece.scope + name])
            for name in names
            if name not in parts
        }
        if sums is None or new:
            sums = self._sums[piece] = Flat.of(parts | new)
        return sums

    def _count(
        self,
        submodel: Submodel,
        home: Index,
        weights: Weights,
        weight: float,
        effective_steps: float,
    ) -> None:
        counts = self._held.setdefault((submodel, home, frozenset(weights)), [0.0, 0.0, 0.0])
        for index, value in enumerate((weight / effective_steps, weight, weight * effective_steps)):
            counts[index] += value

    @override
    def join(self, other: Self) -> None:
        for key, other_sums in other._sums.items():
            for piece, parts in self._pieces(key.scope, other_sums.parts).items():
                own_sums = self._room(piece, parts)
                foreach_add_([own_sums.parts[name] for name in parts], list(parts.values()))
        for cut, sums in other._held.items():
            counts = self._held.setdefault(cut, [0.0, 0.0, 0.0])
            for index, value in enumerate(sums):
                counts[index] += value

    @override
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
            if not isinstance(self.optimizer, Plain) and not piece.is_measured:
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
        """Apply the server's optimizer to one piece, and return the new weights as a vector.

        Positions that no client held keep their slots. Their new weights have no meaning, and the
        caller restores them.

        Args:
            scope: Scope of the piece.
            sums: Sums of the piece, for its names and shapes.
            old: (value,) Weights before the round.
            mean: (value,) Mean of the clients.
            touched: (value,) True where some client held the position. None: everywhere.
            slots: Slots of the optimizer, by slot, scope and name. They are updated in-place.
        """
        old_slots = {}
        for slot in self.optimizer.slots:
            server_slots = slots.setdefault(slot, {})
            empty = sums.same(torch.zeros_like(old)).parts
            old_slots[slot] = Flat.of(
                {name: server_slots.get(scope + name, zeros) for name, zeros in empty.items()}
            ).vector
        step, new_slots = self.optimizer.step(mean - old, old_slots)
        for slot, value in new_slots.items():
            slot_values = sums.same(
                value if touched is None else torch.where(touched, value, old_slots[slot])
            )
            slots[slot] |= {scope + name: part for name, part in slot_values.parts.items()}
        return old + step

    def _tally(self, scope: str, sums: Flat, column: int) -> Tally:
        """Sum one of the three weights of clients at each position of a piece that they held.

        Args:
            scope: Scope of the piece.
            sums: Sums of the piece, for its names and shapes.
            column: Which weight is summed: `_RATIO` for p/a, `_WEIGHT` for p, or `_PACED` for p·a.
        """
        cuts = [
            (submodel, home, [name for name in sums.shapes if name in names], values[column])
            for (submodel, home, names), values in self._held.items()
            if submodel.scope == scope
        ]
        return self.cutter.tally(sums, cuts)


@dataclass
class RunningSum(Mean):
    """Scaled old value plus the scaled sum of the values that clients sent, at each position.

    Positions that no client held keep their scaled old value.
    """

    scale: float = 1.0  # Factor of the sum
    old_scale: float = 1.0  # Factor of the old value. 1: it stays

    @override
    def finish(self, server: Server) -> Merged:
        weights = dict(server.weights)
        if self.old_scale != 1:
            weights = {name: self.old_scale * value for name, value in weights.items()}
        for piece, sums in self._sums.items():
            new = sums.same(sums.read(weights, piece.scope) + self.scale * sums.vector)
            weights |= {piece.scope + name: part for name, part in new.parts.items()}
        return Merged(weights, server.slots, server.extras)


@dataclass
class Stateful(Fold):
    """A fold for the weights, and one for each slot and extra that clients send.

    A slot has a tensor for every weight, so that any fold of weights can merge it. That fold gets
    the slot instead of the weights. Extras are averaged as whole tensors.

        change = Sum(cutter, scale=1 / num_clients).begin(as_weights(server, "control"))
        fold = Stateful(mean, {"control": change})
    """

    weights: Fold  # Fold of the weights.
    slots: Mapping[str, Fold] = field(default_factory=dict)  # Fold of each slot, by its name.
    extras: ExtrasMean | None = None  # None: the server's extras do not change.

    def __post_init__(self) -> None:
        optimizer = self.weights.optimizer if isinstance(self.weights, Mean) else Plain()
        if clash := set(optimizer.slots) & set(self.slots):
            raise ConfigError(
                f"a fold was asked for with the slot {min(clash)!r}, which the server's optimizer "
                f"{type(optimizer).__name__} has; another name would work."
            )

    @override
    def add(self, update: Update) -> None:
        self.weights.add(update)
        for slot, fold in self.slots.items():
            fold.add(_of_slot(update, slot))
        if self.extras is not None:
            self.extras.add(update)

    @override
    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        self.weights.add_stack(updates, stacked)
        for slot, fold in self.slots.items():
            slot_updates = [_of_slot(update, slot) for update in updates]
            sent = zip(*(update.sent for update in slot_updates), strict=True)
            fold.add_stack(
                slot_updates,
                [_stacked([payload.weights for payload in payloads]) for payloads in sent],
            )
        if self.extras is not None:
            for update in updates:
                self.extras.add(update)

    @override
    def join(self, other: Self) -> None:
        self.weights.join(other.weights)
        for slot, fold in self.slots.items():
            fold.join(other.slots[slot])
        if self.extras is not None and other.extras is not None:
            self.extras.join(other.extras)

    @override
    def finish(self, server: Server) -> Merged:
        merged = self.weights.finish(server)
        slots = dict(merged.slots)
        for slot, fold in self.slots.items():
            slots[slot] = fold.finish(as_weights(server, slot)).weights
        extras = merged.extras if self.extras is None else self.extras.finish(server)
        return Merged(merged.weights, slots, extras)


@dataclass
class ExtrasMean:
    """Weighted mean of each extra over the clients that sent it.

    An extra that no client sent does not change.
    """

    cutter: Cutter  # It counts kernels for `weighting`.
    weighting: Weighting = "uniform"  # Weights of clients. `client_weight` explains them.
    _sums: dict[str, tuple[Tensor, float]] = field(default_factory=dict)  # Σ p·value and Σ p

    def add(self, update: Update) -> None:
        """Add the extras of one update to the sums, with the client's weight."""
        weight = client_weight(update, self.weighting, self.cutter)
        for name, value in update.extras.items():
            self._add(name, weight * value, weight)

    def _add(self, name: str, value: Tensor, weight: float) -> None:
        total, count = self._sums.get(name, (torch.zeros_like(value), 0.0))
        self._sums[name] = total + value, count + weight

    def join(self, other: Self) -> None:
        """Add the partial sums of another worker, which `other` holds."""
        for name, (value, weight) in other._sums.items():
            self._add(name, value, weight)

    def finish(self, server: Server) -> Extras:
        """Return all extras of `server` by name, with means for those that clients sent."""
        return {
            **server.extras,
            **{name: total / count for name, (total, count) in self._sums.items()},
        }


def as_weights(server: Server, slot: str) -> Server:
    """Return the state `server` with a slot in place of the weights, for the fold of the slot.

    Raises:
        ConfigError: The server has no slot of this name.
    """
    if slot not in server.slots:
        raise ConfigError(
            f"a fold of the slot {slot!r} was asked for; the server has {sorted(server.slots)}. "
            "Method.init has to give the server a first value."
        )
    return replace(server, weights=server.slots[slot])


def _of_slot(update: Update, slot: str) -> Update:
    """Return a copy of an update whose payloads have the tensors of a slot as their weights.

    Payloads without the slot have no weights.
    """
    sent = tuple(Payload(payload.submodel, payload.slots.get(slot, {})) for payload in update.sent)
    return replace(update, sent=sent)


def _stacked(states: Sequence[Weights]) -> dict[str, Tensor]:
    """Stack the tensors of several clients by name, with the clients in dimension 0.

    All clients have the same names and shapes.
    """
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


_RATIO, _WEIGHT, _PACED = range(3)  # Indices of the sums in `Mean._held`: p/a, p and p·a.
