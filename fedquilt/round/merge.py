"""Folds: how what came back becomes the next server state.

A fold is a stream: `add` takes one update (or a stack of them) and forgets it, so that a cohort need not fit in memory;
`join` adds the partial sums of another worker; `finish` gives the new weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch
from torch import Tensor

from fedquilt.checks import within
from fedquilt.round.cut import Cutter, Rows, add_at, blocks, is_blocky, is_whole
from fedquilt.terms import Server, Slots, Submodel, Update, Weights

Weighting = Literal["uniform", "data", "model", "updates", "both"]


def client_weight(update: Update, weighting: Weighting, cutter: Cutter) -> float:
    """p_m of equation 10 (FedRolex, appendices A.2 and A.3): how much a client counts where it counts."""
    match weighting:
        case "uniform":
            return 1.0
        case "data":
            return float(update.job.client.size)
        case "model":
            return float(cutter.kernels(update.job.submodel.arch))
        case "updates":
            return float(update.steps)
        case "both":
            return float(cutter.kernels(update.job.submodel.arch) * update.steps)


# --- server optimisers: an option of the mean -------------------------------------------------------------------


class ServerOptimiser(Protocol):
    """Turns the mean's change from the old weights into the step the server takes."""

    @property
    def slots(self) -> tuple[str, ...]: ...

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]: ...


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

    lr: float = 1.0
    momentum: float = 0.9

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

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        within(self, lr="(0, inf)", beta1="[0, 1)", beta2="[0, 1)", tau="(0, inf)")

    @property
    def slots(self) -> tuple[str, ...]:
        return ("mean", "square")

    def step(self, change: Tensor, slots: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * change
        square = self.beta2 * slots["square"] + (1 - self.beta2) * change.square()
        return self.lr * mean / (square.sqrt() + self.tau), {"mean": mean, "square": square}


# --- folds ------------------------------------------------------------------------------------------------------


class Fold(Protocol):
    def add(self, update: Update) -> None:
        """Take one update."""

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        """Take many updates that sent the same positions; `stacked` has one state a payload, clients leading."""

    def join(self, other: Self) -> None:
        """Take another worker's partial result."""

    def finish(self, server: Server) -> tuple[Weights, Slots]:
        """The new weights and the server optimiser's slots."""


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
    plain: frozenset[str] = frozenset()  # norm statistics: measured, not stepped, so neither pace nor optimiser applies
    _sums: dict[str, Tensor] = field(default_factory=dict)  # Σ (p/a)·w where somebody held it
    # Who held what is kept as positions and three sums (p/a, p, p·a), not as tensors.
    _held: dict[tuple[Submodel, tuple[str, ...]], list[float]] = field(default_factory=dict)
    _shapes: dict[str, Tensor] = field(default_factory=dict)

    def begin(self, server: Server) -> Self:
        """An empty mean over a server's state."""
        self._shapes = dict(server.weights)
        return self

    def add(self, update: Update) -> None:
        weight, pace = client_weight(update, self.weighting, self.cutter), update.pace if self.paced else 1.0
        for payload in update.sent:
            measured = {name: part for name, part in payload.weights.items() if name in self.plain}
            self._add(payload.submodel, measured, weight)
            learnt = {name: part for name, part in payload.weights.items() if name not in self.plain}
            self._add(payload.submodel, learnt, weight / pace)
            self._count(payload.submodel, payload.weights, weight, pace)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        weights = [client_weight(update, self.weighting, self.cutter) for update in updates]
        paces = [update.pace if self.paced else 1.0 for update in updates]
        ratios = [weight / pace for weight, pace in zip(weights, paces, strict=True)]
        for place, state in enumerate(stacked):
            submodel = updates[0].sent[place].submodel
            like = next(iter(state.values()), torch.empty(0))
            scales, plain = like.new_tensor(ratios), like.new_tensor(weights)
            summed = {
                name: torch.tensordot(plain if name in self.plain else scales, value, 1)
                for name, value in state.items()
            }
            self._add(submodel, summed, 1.0)
            for weight, pace in zip(weights, paces, strict=True):
                self._count(submodel, state, weight, pace)

    def _add(self, submodel: Submodel, parts: Weights, scale: float) -> None:
        """Add scaled parts of weights, all in one call."""
        sums, added = [], []
        for name, part in parts.items():
            full, cut = submodel.scope + name, self.cutter.rows(name, submodel.index)
            if full not in self._sums:
                if is_whole(cut):  # the first of many need not be added to zeros
                    self._sums[full] = part * scale
                    continue
                self._sums[full] = torch.zeros_like(self._shapes[full])
            if is_blocky(cut):
                for there, here in blocks(cut):
                    sums.append(self._sums[full][there])
                    added.append(part[here])
            else:
                add_at(self._sums[full], cut, part, scale)
        if sums:
            torch._foreach_add_(sums, added, alpha=scale)

    def _count(self, submodel: Submodel, weights: Weights, weight: float, pace: float) -> None:
        held = self._held.setdefault((submodel, tuple(weights)), [0.0, 0.0, 0.0])
        for place, value in enumerate((weight / pace, weight, weight * pace)):
            held[place] += value

    def join(self, other: Self) -> None:
        for name, total in other._sums.items():
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        for cut, values in other._held.items():
            mine = self._held.setdefault(cut, [0.0, 0.0, 0.0])
            for place, value in enumerate(values):
                mine[place] += value

    def finish(self, server: Server) -> tuple[Weights, Slots]:
        weights = dict(server.weights)
        slots = {slot: dict(values) for slot, values in server.slots.items()}
        for name, total in self._sums.items():
            old, counts = server.weights[name], self._counts(name, _WEIGHT)
            measured = name.rpartition("/")[2] in self.plain  # "base3/bn.running_mean" without its scope
            if self.paced and not measured:  # w + (Σp·a / Σp) · Σ(p/a)(w_i − w) / Σp
                change = total - self._counts(name, _RATIO) * old
                mean = old + self._counts(name, _PACED) / counts * change / counts
            else:
                mean = total / counts
            touched = counts > 0 if isinstance(counts, Tensor) and not self._covered(name) else None
            if self.optimiser.slots and not measured:
                mean = self._step(name, old, mean, touched, slots)
            weights[name] = mean if touched is None else torch.where(touched, mean, old)
        return weights, slots

    def _step(
        self, name: str, old: Tensor, mean: Tensor, touched: Tensor | None, slots: dict[str, dict[str, Tensor]]
    ) -> Tensor:
        """Let the server's optimiser step towards the mean; untouched positions keep their slots."""
        own = {s: slots.setdefault(s, {}).setdefault(name, torch.zeros_like(old)) for s in self.optimiser.slots}
        step, after = self.optimiser.step(mean - old, own)
        for slot, value in after.items():
            slots[slot][name] = value if touched is None else torch.where(touched, value, own[slot])
        return old + step

    def _holders(self, name: str) -> Iterator[tuple[Rows, list[float]]]:
        for (submodel, names), values in self._held.items():
            own = name.removeprefix(submodel.scope)
            if name.startswith(submodel.scope) and own in names:
                yield self.cutter.rows(own, submodel.index), values

    def _covered(self, name: str) -> bool:
        """Whether some client held all of a weight."""
        return any(is_whole(cut) for cut, _ in self._holders(name))

    def _counts(self, name: str, place: int) -> Tensor | float:
        """How much every position of a weight was held: one number if all held all of it."""
        holders = list(self._holders(name))
        everywhere = sum(values[place] for cut, values in holders if is_whole(cut))
        parts = [(cut, values[place]) for cut, values in holders if not is_whole(cut)]
        if not parts:
            return everywhere
        counts = torch.full_like(self._shapes[name], everywhere)
        for cut, value in parts:
            add_at(counts, cut, value)
        return counts


_RATIO, _WEIGHT, _PACED = range(3)  # what `Mean._held` adds up: p/a, p and p·a
