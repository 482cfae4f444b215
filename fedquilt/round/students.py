"""Students: nets of the server that train on public samples, as clients train on their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from fedquilt.round.federation import World
from fedquilt.round.method import Method
from fedquilt.round.training.distillation import Imitation
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Objective
from fedquilt.round.training.public import POSITIONS
from fedquilt.round.training.server import TEACHER, ServerTraining, Teaching
from fedquilt.round.training.state import MethodState
from fedquilt.terms import Job, Submodel


@dataclass(frozen=True)
class Students(Method):
    """Nets that train on public samples with a teacher's rows as targets.

    It is not a method that users choose. Another method builds it with `teaching`.
    """

    objective: Objective = Imitation()  # Loss of a batch of public samples
    batches: int = 1  # Steps between two comparisons with the teacher
    rate_factor: float = 1.0  # Factor of the learning rate in these steps
    ignores_budgets = True

    @override
    def learner(self, job: Job, world: World) -> Learner:
        return Learner(
            (Phase(self.objective),),
            self.local,
            self.local.optimizer.lr * self.rate_factor,
            keep_slots=True,
            state=MethodState(extras_down=(TEACHER, TEACHER + POSITIONS)),
            teacher=TEACHER,
            max_batches=self.batches,
            task=world.task,
        )


def teaching(
    method: Method,
    students: Sequence[Submodel],
    teacher: Tensor,
    objective: Objective,
    how: ServerTraining,
    world: World,
    positions: Tensor | None = None,
) -> Teaching:
    """Return the students, targets and settings of the server's training in one round.

    Args:
        method: Method of the run. Students have its norm policy.
        students: Nets of the server's state that learn, each with a scope of its own.
        teacher: (row, …) Rows that the objective sees as `View.taught`.
        objective: Loss of a batch of public samples.
        how: Optimizer, number of steps, and when to stop.
        world: World with public samples.
        positions: (row,) Positions of the public samples that the rows are about. None: all.
    """
    num_samples = len(how.split(len(teacher), world.seed)[0])
    size = min(how.batch_size, num_samples)
    local = LocalTraining(
        optimizer=how.optimizer,
        batch_size=size,
        epochs=max(1, math.ceil(how.steps_per_check / max(1, num_samples // size))),
        last_batch="drop",
        norm=method.local.norm,
    )
    learners = Students(
        local=local, weighting="uniform", objective=objective, batches=how.steps_per_check
    )
    return Teaching(tuple(students), teacher, learners, how, positions)
