"""The contract of an engine: train, evaluate and calibrate clients whose samples only the engine can reach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedquilt.terms import Job, Memory, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import Federation, World
    from fedquilt.round.merge import Fold
    from fedquilt.round.serve import EvalJob, Score


# Takes nets and a number of samples, and returns each net's gradient of the mean loss over that many
# pooled training samples, by the weight's name.
Gradients = Callable[[Sequence[Submodel], int], list[dict[str, Tensor]]]


class Spent(NamedTuple):
    """Costs of a client's round: bytes both ways, and multiply-adds."""

    down: int = 0
    up: int = 0
    macs: int = 0
    first: int = 0  # Bytes of `down` that the client gets once, such as its private net


@dataclass
class Outcome:
    """Memories, losses, costs and missing clients of one round of training."""

    memory: dict[tuple[int, str], Memory] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    costs: dict[int, Spent] = field(default_factory=dict)  # By client.
    stacks: int = 0  # Number of groups of clients that were trained as one.
    missing: dict[int, str] = field(default_factory=dict)  # Clients that did not answer, and why.

    def charge(self, client: int, down: int, up: int, macs: int, first: int = 0) -> None:
        """Count what a client was sent, what arrived from it, and the multiply-adds of its training."""
        new = Spent(down, up, macs, first)
        before = self.costs.get(client, Spent())
        self.costs[client] = Spent(*(one + other for one, other in zip(before, new, strict=True)))

    @property
    def total(self) -> Spent:
        """Return what all clients took together."""
        return Spent(*(sum(column) for column in zip(*self.costs.values(), strict=True)))

    def join(self, other: Outcome) -> None:
        """Take what other clients of the cohort left behind."""
        self.memory.update(other.memory)
        self.losses += other.losses
        self.missing.update(other.missing)
        for client, cost in other.costs.items():
            self.charge(client, *cost)
        self.stacks += other.stacks


class Engine(ABC):
    """Trains and tests the clients of federations. Samples and options are given to its constructor.

    An engine keeps nothing of a federation that a result depends on: every call is given all of it. So several runs may
    use one engine, in any order.
    """

    device: torch.device  # Where the server's state is kept.
    # True: outputs for single samples may be kept beside the sums of metrics, as some metrics need them.
    outputs_may_leave: ClassVar[bool] = False

    @abstractmethod
    def train(
        self, federation: Federation, server: Server, jobs: Sequence[Job], fold: Fold
    ) -> Outcome:
        """Send jobs to their clients, and add what comes back to the fold."""

    @abstractmethod
    def evaluate(
        self,
        federation: Federation,
        exams: Sequence[EvalJob],
        batch_size: int,
        by_domain: bool = False,
    ) -> list[Score]:
        """Test networks, each on the samples that it names."""

    @abstractmethod
    def calibrate(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        client: int | None = None,
    ) -> list[dict[str, Tensor]]:
        """Measure the norm statistics of networks over the pooled training samples, or over one client's."""

    @abstractmethod
    def pooled_gradients(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        samples: int,
    ) -> list[dict[str, Tensor]]:
        """Return the gradient of each network's mean loss over pooled training samples.

        The loss is the task's, without what a method adds to it. Nets run as in training, so that norms
        which use the statistics of the batch use those of batches of `batch_size`.

        Args:
            federation: Family, task and norm policy.
            nets: Sub-models and their weights.
            batch_size: Samples that are run together.
            samples: Most samples to use. They are the same for all nets, and for all calls with one seed.

        Returns:
            For each net, a tensor for every weight that it trains, by name.
        """

    @abstractmethod
    def on_public(self, world: World) -> Engine:
        """Return an engine with which the server trains on the public samples of a world."""

    @abstractmethod
    def size(self, client: int) -> int:
        """Return how many training samples a client has."""

    @property
    @abstractmethod
    def tests_by_client(self) -> bool:
        """Return True if clients have test samples of their own."""

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Return True if clients hold back training samples for validation."""

    def online(self) -> Sequence[int] | None:
        """Return the clients that can be reached now, in ascending order. None: all of the fleet."""
        return None

    @property
    def settings(self) -> Mapping[str, bool | int | float | str]:
        """Return the options that the last digits of a result depend on. A checkpoint has them."""
        return {}
