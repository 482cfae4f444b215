"""DS-FL: clients exchange predictions on public samples instead of weights (Itahara et al., IEEE TMC 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.checks import within
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.methods.prototypes import Prototypes
from fedquilt.methods.students import teaching
from fedquilt.round.federation import World
from fedquilt.round.merge import ExtrasMean, Fold, Stateful
from fedquilt.round.training.filters import All, Nothing
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import SoftLabels
from fedquilt.round.training.passes import LogitsPass
from fedquilt.round.training.server import TrainServer
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.tasks import Task
from fedquilt.terms import Extras, Job, Server, Update

PREDICTIONS = "predictions"  # (public sample, class, …) Probabilities, of a client or of all together.


def sharpened(mean: Tensor, temperature: float) -> Tensor:
    """Return softmax(p̄ / T) over the classes: entropy reduction aggregation (ERA).

    Args:
        mean: (sample, class, …) Mean of the clients' probabilities.
        temperature: T. Below 1 the result has less entropy than the mean where the mean is not uniform.
    """
    return (mean / temperature).softmax(1)


@dataclass(frozen=True)
class Predictions(MethodState):
    """The global predictions, which clients receive, and their own, which they send."""

    extras_down: tuple[str, ...] = (PREDICTIONS,)
    extras_up: tuple[str, ...] = (PREDICTIONS,)

    def finish(self, trained: Trained) -> Left:
        return Left(sent_extras={PREDICTIONS: trained.passes["logits"]["logits"].softmax(1)})


@dataclass
class PredictionsMean(ExtrasMean):
    """Mean of the clients' predictions, sharpened if there is a temperature."""

    temperature: float | None = None  # Temperature of the sharpened mean. None: the mean as it is
    shape: tuple[int, ...] = ()  # Shape that predictions must have

    def add(self, update: Update) -> None:
        sent = update.extras.get(PREDICTIONS)
        if sent is not None and tuple(sent.shape) != self.shape:
            raise TrainingError(
                f"client {update.job.client.id} sent predictions of shape {tuple(sent.shape)} in round "
                f"{update.job.round + 1}; a row for each public sample, {self.shape}, was asked for. They were refused."
            )
        super().add(update)

    def finish(self, server: Server) -> Extras:
        found = super().finish(server)
        if PREDICTIONS not in self._sums or self.temperature is None:  # Nobody has answered, or as it is.
            return found
        return {**found, PREDICTIONS: sharpened(found[PREDICTIONS], self.temperature)}


@dataclass(frozen=True)
class DSFL(Prototypes):
    """Nets stay on clients. What travels is a row of class probabilities for every public sample.

    A round of a client:

    1. It receives the global predictions of the round before, and distils them: cross-entropy on the public samples.
    2. It trains on its own samples.
    3. It predicts the public samples, and sends the probabilities.

    The server averages the predictions and sharpens the mean, softmax(p̄ / T) with T = 0.1 (ERA). It also distils them
    into nets of its own, one per prototype, which is what a device gets that has no net yet.

    The paper broadcasts the new predictions at the end of a round, when all clients distil them. Here a client gets
    them when it takes part again, which is the same for its next training. The paper draws 1,000 public samples in
    every round; here all of them are used.
    """

    temperature: float = 0.1  # T of the sharpened mean. A large one makes predictions uniform
    sharpen: bool = True  # Sharpen the mean; False is the paper's simple aggregation
    public_epochs: int = 1  # Epochs over the public samples in which a client distils; 0: it does not
    coded: bool = False  # A link with a codec codes predictions too
    paper = "Itahara et al. 2023"

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, temperature="(0, inf)", public_epochs="[0, inf)")

    @property
    def needs_public(self) -> bool:
        return True

    @property
    def note(self) -> str:
        return "clients keep their nets; results are those of the server's nets, which learn from predictions"

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        needs_classes(self, task)

    def init(self, world: World) -> Server:
        """Return the state before the first round. Predictions of zeros teach nothing."""
        shape = predictions_shape(world)
        server = super().init(world)
        return replace(server, extras={PREDICTIONS: torch.zeros(shape, dtype=world.dtype)})

    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        state = Predictions(coded_extras=(PREDICTIONS,) if self.coded else ())
        lesson = None
        if self.public_epochs and job.round:
            plain = replace(self.local, epochs=self.public_epochs, crop=0, flip=False, flip_axes=(), intensity=None)
            phase = Phase(SoftLabels())
            lesson = Learner((phase,), plain, self.lr(job.round), teacher=PREDICTIONS, task=world.task)
        private = replace(base, send=Nothing(), keep=All(), class_rows=False)
        return replace(private, state=state, after=(LogitsPass(),), lesson=lesson)

    def fold(self, server: Server, world: World) -> Fold:
        mean = super().fold(server, world)
        temperature = self.temperature if self.sharpen else None
        predictions = PredictionsMean(world.family.cutter, temperature=temperature, shape=predictions_shape(world))
        return Stateful(mean, extras=predictions)

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        predictions = server.extras[PREDICTIONS]
        if not bool(predictions.any()):  # Nobody has answered so far.
            return server
        return train(server, teaching(self, self.nets(world), predictions, SoftLabels(), self.server_training, world))


def predictions_shape(world: World) -> tuple[int, ...]:
    """Return the shape of predictions: (public sample, class, …)."""
    return (world.num_public, *world.family.output_shape[1:])


def needs_classes(method: Prototypes, task: Task) -> None:
    """Refuse a task whose targets are not classes."""
    if not task.has_classes:
        raise ConfigError(
            f"{type(method).__name__} was asked for, which exchanges probabilities of classes; "
            f"{type(task).__name__} has no classes. FedDF works for every task that can be distilled."
        )
