"""Settings of training on the server, and the students and targets of one round."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, Self

from torch import Tensor

from fedquilt import noise
from fedquilt.checks import one_of, within
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.schedules import Decay, WithinRound
from fedquilt.terms import Server, Submodel

if TYPE_CHECKING:
    from fedquilt.round.students import Students

StopBy = Literal["agreement", "labels"]  # Measure of the server's progress.
MIN_PUBLIC = 4  # Public samples that a server needs: two to train on, and two that it holds back.
TEACHER = "teacher"  # Extra that students receive: the teacher's rows.


@dataclass(frozen=True)
class ServerTraining:
    """Settings with which the server trains its nets on public samples.

    Training stops early, and keeps the best weights. These may be the weights before the first
    step. A net is compared with its teacher on public samples that are held back, because the
    server has no labels.
    """

    # Optimizer of the server's nets. Its state is reset in every round
    optimizer: SGD | Adam | AdamW = Adam(lr=1e-3)
    batch_size: int = 128  # Public samples in a step
    # Most steps of a net in a round. 0: the server does not train, and needs no public samples
    steps: int = 100
    check_every: int = 20  # Steps between two comparisons with the teacher
    patience: int = 2  # Comparisons without progress after which a net stops
    # Share of the public samples on which nets are compared with the teacher
    held_back: float = 0.1
    # Measure of progress. agreement: a smaller loss on held-back public samples. labels: a better
    # score on samples of clients with their labels, which a real server does not have.
    stop_by: StopBy = "agreement"
    # Learning rate within a round. constant: the optimizer's. cosine: it falls to 0 over `steps` on
    # half a cosine. linear: it falls to 0 on a line. It is lowered at every comparison.
    schedule: Decay = "constant"

    def __post_init__(self) -> None:
        within(
            self,
            batch_size="[2, inf)",
            steps="[0, inf)",
            check_every="[1, inf)",
            patience="[1, inf)",
            held_back="(0, 0.5]",
        )
        one_of(self, stop_by=StopBy, schedule=Decay)

    @property
    def steps_per_check(self) -> int:
        """Return the steps between two comparisons of a net with its teacher.

        They are `check_every`, or `steps` if that is less.
        """
        return min(self.check_every, self.steps)

    def shortened(self) -> Self:
        """Return settings with at most four steps of four samples, for tests.

        The optimizer is SGD, because Adam amplifies rounding errors.
        """
        return replace(
            self,
            optimizer=SGD(lr=0.05),
            batch_size=4,
            check_every=2,
            steps=min(4, self.steps),
        )

    def rate_factor(self, check: int) -> float:
        """Return the factor of the learning rate in the steps before a comparison.

        It is the factor of a client's step (`WithinRound`), where j is the number of steps taken
        before the first of them and K is `steps`.

        Args:
            check: Number of comparisons since the first step of the round, from 0.
        """
        return WithinRound(shape=self.schedule)(check * self.steps_per_check, self.steps)

    def split(self, num_samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return the positions of public samples to train on, and of those that are held back.

        Both are in ascending order, and the draw is random. It is the same in every round of a run.
        At least two samples are held back, because norms need more than one.

        Args:
            num_samples: Number of public samples.
            seed: Random seed of the run.
        """
        order = noise.order(noise.key(noise.Stream.SERVER_SPLIT, seed), num_samples)
        count = max(2, round(num_samples * self.held_back))
        return order[count:].sort().values, order[:count].sort().values


@dataclass(frozen=True, eq=False)
class Teaching:
    """Students, targets and settings of the server's training in one round.

    Args:
        students: Nets of the server's state that learn. Each has a scope of its own.
        teacher: (row, …) Rows that the objective sees as `View.taught`.
        method: Method with which students train, as clients that hold the public samples.
        how: Number of steps, and when to stop.
        positions: (row,) Positions of the public samples that the rows are about. None: all.
    """

    students: tuple[Submodel, ...]
    teacher: Tensor
    method: Students
    how: ServerTraining
    positions: Tensor | None = None


TrainServer = Callable[[Server, Teaching], Server]  # Returns a state whose students are trained.
