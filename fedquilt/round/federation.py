"""The settings of a federation: the world that methods see, the method, and the link."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.family.cut import HeldWeights
from fedquilt.hardware.precision import DTYPES, Precision
from fedquilt.round.link import PERFECT, Link
from fedquilt.tasks import Classification, Task
from fedquilt.terms import Weights

if TYPE_CHECKING:
    from fedquilt.family import Family
    from fedquilt.round.method import Method


@dataclass(frozen=True)
class World:
    """Settings that server and devices share: family, seed, precision, task and public samples.

    Where tensors are kept is not part of it, because each machine decides that for itself.
    """

    family: Family  # All members that can be cut from the model.
    seed: int = 0  # Random seed of the run.
    precision: Precision = "fp32"  # Precision of products.
    public: Tensor | None = None  # (sample, …) Inputs without targets that all have. None: none.
    task: Task = Classification()  # Loss, metrics and what targets are.
    num_clients: int = 0  # Clients of the fleet. 0: unknown, as on a machine without a fleet.
    # First round of every client that joined later, from 0. Empty: all were there from round 0.
    joined: tuple[int, ...] = ()

    def clients_in(self, round: int) -> int:
        """Return the number of clients of the fleet in a round, from 0."""
        return self.num_clients - sum(first > round for first in self.joined)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of weights, and of sums over them, for the precision of the run."""
        return DTYPES[self.precision]

    @property
    def num_public(self) -> int:
        """Return the number of public samples, or 0 if the world has none."""
        return 0 if self.public is None else len(self.public)


@dataclass(frozen=True, eq=False)
class Federation:
    """The settings that an engine is given with every call: world, method and link.

    Args:
        world: What the method may look at.
        method: How the federation learns.
        link: How payloads travel between server and clients.
        received: Initial weights that came from the server. A worker or device has them from there,
            because it may lack the code that draws them. None: the method draws them.
    """

    world: World
    method: Method
    link: Link = PERFECT
    received: Weights | None = field(default=None, repr=False)

    @cached_property
    def initial(self) -> Weights:
        """Return all weights before the first round, by scope and name, on the CPU.

        They are cached. They are those that came from the server (`received`), or else the method
        draws them.
        """
        return self.method.initial(self.world) if self.received is None else self.received

    def initial_on(self, device: torch.device) -> Weights:
        """Return all weights before the first round on a device, by scope and name.

        They are copied to each device once, and must not be modified.
        """
        if device not in self._placed:
            initial = self.initial
            placed: Weights = {name: value.to(device) for name, value in initial.items()}
            if isinstance(initial, HeldWeights):
                placed = HeldWeights(placed, initial.positions)
            self._placed[device] = placed
        return self._placed[device]

    @cached_property
    def _placed(self) -> dict[torch.device, Weights]:
        return {}
