"""The engine of a device, which trains one client from what a request brought."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fedquilt.engines.sequential import Sequential
from fedquilt.errors import TrainingError
from fedquilt.round.budgets import check_budgets
from fedquilt.round.federation import Federation
from fedquilt.round.fold import Merged
from fedquilt.round.training.learner import Learner
from fedquilt.terms import Job, Payload, Server, Update, Weights


@dataclass
class OnDevice(Sequential):
    """Engine that trains one client from what a request brought."""

    # Weights that the client gets once, by the scope of the job
    first: Mapping[str, Weights] = field(default_factory=dict)
    # Shapes of the server's extras, by name
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    deadline: float = math.inf  # Seconds that the device has, counted from `start`
    start: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.extra_shapes = {name: torch.Size(shape) for name, shape in self.shapes.items()}

    def payload(self, server: Server, job: Job, learner: Learner) -> Payload:
        """Return a payload without values, because those that arrived are in the device's link.

        It has only the weights that the client gets once.

        Args:
            server: It is not used.
            job: What the client is asked to train.
            learner: It is not used.
        """
        return Payload(job.submodel, {}, first=self.first[job.submodel.scope])

    def before_batch(self, job: Job, step: int, num_batches: int) -> None:
        """Stop the client if its deadline has passed, because the server no longer waits for it.

        Args:
            job: Client, round and sub-model.
            step: Number of the batch, from 0.
            num_batches: Batches of the client in this round.

        Raises:
            TrainingError: The deadline has passed.
        """
        if time.monotonic() - self.start > self.deadline:
            raise TrainingError(
                f"the server allows {self.deadline:g} s for round {job.round + 1}; they passed "
                f"after {step} of {num_batches} batches. A longer --deadline on the server would "
                "work, or a smaller --budget on the device."
            )

    def _begin_round(self, federation: Federation, server: Server, jobs: Sequence[Job]) -> None:
        """Begin a round, and check its jobs.

        The scopes of the server are not checked, because a device does not know them.

        Args:
            federation: World, method and link.
            server: It is not used.
            jobs: Jobs of the client.

        Raises:
            SubmodelError: Positions of a job do not fit the model.
            BudgetError: The jobs exceed the client's budget.
        """
        self.begin(federation)
        for job in jobs:
            self.world.family.check(job.submodel, f"client {job.client.id}")
        check_budgets(self.method, jobs, self.world)


class Collector:
    """Stands in for a fold on a device: it keeps the updates of the client's jobs."""

    def __init__(self) -> None:
        self.updates: list[Update] = []

    def add(self, update: Update) -> None:
        """Keep an update, to be sent to the server."""
        self.updates.append(update)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        """Raise AssertionError, because a device trains its jobs one after another."""
        raise AssertionError("a device trains its jobs one after another")

    def join(self, other: Collector) -> None:
        """Append the updates of another collector."""
        self.updates += other.updates

    def finish(self, server: Server) -> Merged:
        """Raise AssertionError, because only the server merges."""
        raise AssertionError("a device does not merge")
