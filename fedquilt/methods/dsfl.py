"""DS-FL: clients exchange predictions on public samples, not weights (Itahara et al., TMC 2023)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import within
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.methods.prototypes import Prototypes
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Merged, Weighting
from fedquilt.round.merge import ExtrasMean, Stateful
from fedquilt.round.students import teaching
from fedquilt.round.teachers import OUTPUTS
from fedquilt.round.training.distillation import SoftLabels
from fedquilt.round.training.filters import All, Nothing
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.passes import LogitsPass
from fedquilt.round.training.public import ROUND, drawn_positions, num_drawn
from fedquilt.round.training.server import TrainServer
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.tasks import Task
from fedquilt.terms import Extras, Job, Server, Update

PREDICTED_BATCHES = 4  # Training batches that form one batch of predictions.
# Key of the probabilities of one client, or of their mean: (public sample, class, …).
PREDICTIONS = "predictions"


def sharpened(mean: Tensor, temperature: float) -> Tensor:
    """Return softmax(p̄ / T) over the classes: entropy reduction aggregation (ERA).

    Args:
        mean: (sample, class, …) Mean of the clients' probabilities.
        temperature: T. The smaller T, the less entropy the result has. A uniform mean stays
            uniform.
    """
    return (mean / temperature).softmax(1)


@dataclass(frozen=True)
class Predictions(MethodState):
    """State of a client: it receives the global predictions and sends its own."""

    extras_down: tuple[str, ...] = (PREDICTIONS,)
    extras_up: tuple[str, ...] = (PREDICTIONS,)

    @override
    def finish(self, trained: Trained) -> Left:
        return Left(sent_extras={PREDICTIONS: trained.passes["logits"]["logits"].softmax(1)})


def drawn_state(draw: int, coded: bool) -> Predictions:
    """Return the client state that says which predictions travel between server and clients.

    Args:
        draw: Public samples that are drawn for each round. Clients then also receive the round that
            the predictions belong to. 0: all samples are used, and no round is sent.
        coded: True if a link with a codec also encodes the predictions.
    """
    down = (PREDICTIONS, PREDICTIONS + ROUND) if draw else (PREDICTIONS,)
    return Predictions(extras_down=down, coded_extras=(PREDICTIONS,) if coded else ())


@dataclass
class PredictionsMean(ExtrasMean):
    """Mean of the clients' predictions, which is sharpened if a temperature is set."""

    temperature: float | None = None  # Temperature of the sharpened mean. None: no sharpening.
    shape: tuple[int, ...] = ()  # Shape that the predictions of a client must have.

    @override
    def add(self, update: Update) -> None:
        sent = update.extras.get(PREDICTIONS)
        if sent is not None and tuple(sent.shape) != self.shape:
            raise TrainingError(
                f"client {update.job.client.id} sent predictions of shape {tuple(sent.shape)} in "
                f"round {update.job.round + 1}; a row for each public sample, {self.shape}, was "
                "asked for. They were refused."
            )
        super().add(update)

    @override
    def finish(self, server: Server) -> Extras:
        extras = super().finish(server)
        if not self.has_predictions or self.temperature is None:
            return extras
        return {**extras, PREDICTIONS: sharpened(extras[PREDICTIONS], self.temperature)}

    @property
    def has_predictions(self) -> bool:
        """Return True if at least one client has sent predictions."""
        return PREDICTIONS in self._sums


@dataclass
class PredictionsFold(Stateful):
    """A fold of predictions.

    `Merged.outputs` has the global predictions if a client has sent any in this round.
    """

    extras: PredictionsMean | None = None

    @override
    def finish(self, server: Server) -> Merged:
        merged = super().finish(server)
        if self.extras is None or not self.extras.has_predictions:
            return merged
        extras = dict(merged.extras)
        if PREDICTIONS + ROUND in extras:
            extras[PREDICTIONS + ROUND] = torch.full_like(extras[PREDICTIONS + ROUND], server.round)
        return merged._replace(extras=extras, outputs={OUTPUTS: extras[PREDICTIONS]})


@dataclass(frozen=True)
class DSFL(Prototypes):
    """Clients keep their nets, and exchange class probabilities of every public sample.

    A round of a client:

    1. It receives the global predictions of the previous round, and distils them with
       cross-entropy on the public samples.
    2. It trains on its own samples.
    3. It predicts the public samples, and sends the probabilities.

    The server averages the predictions and sharpens the mean, softmax(p̄ / T) with T = 0.1 (ERA).
    It also distils them into nets of its own, one per prototype. Devices that have no net yet get
    one of these.

    The order of steps, the uniform mean of probabilities, T = 0.1 and 1,000 public samples per
    round are those of the DS-FL baseline in kitsuyaazuma/SCARLET, which shares an author with the
    paper. That code distils for five epochs with KL, whose gradient is that of the cross-entropy;
    `public_epochs` is 1 here. Its aggregation and that of AIJack were run on random predictions,
    and agree with `sharpened` to 1e-15. No code of the paper itself was found, and its text was not
    available, so that these settings are not verified against the paper.

    In AIJack all clients distil at the end of a round. For a client that takes part in every round
    both orders are equivalent. Here a client receives only the latest predictions when it takes
    part again. Server and clients draw the public samples of a round from the random seed, so that
    only the number of the round is sent with the predictions.
    """

    # Weights of the clients in the mean of predictions. uniform: all clients count equally.
    weighting: Weighting = "uniform"
    temperature: float = 0.1  # T of the sharpened mean. A large T makes predictions uniform.
    samples: int = 1000  # Public samples that are drawn for each round. 0: all.
    # Sharpen the mean of predictions (ERA). False: use the mean itself, simple aggregation (SA).
    sharpen: bool = True
    # Epochs in which a client distils on the public samples. 0: clients do not distil.
    public_epochs: int = 1
    coded: bool = False  # True if a link with a codec also encodes the predictions.
    paper = "Itahara et al. 2023"

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, temperature="(0, inf)", public_epochs="[0, inf)", samples="[0, inf)")

    @property
    @override
    def needs_public(self) -> bool:
        return True

    @property
    @override
    def clients_need_public(self) -> bool:
        return True

    @property
    @override
    def note(self) -> str:
        return (
            "clients keep their nets; results are those of the server's nets, which learn from "
            "predictions"
        )

    @override
    def check_task(self, task: Task) -> None:
        super().check_task(task)
        needs_classes(self, task)

    @override
    def init(self, world: World) -> Server:
        """Return the state before the first round. Its predictions are zeros and have no effect."""
        extras = {PREDICTIONS: torch.zeros(self.shape(world), dtype=world.dtype)}
        if self.draw(world):
            extras[PREDICTIONS + ROUND] = torch.tensor(-1)
        return replace(super().init(world), extras=extras)

    def draw(self, world: World) -> int:
        """Return the number of public samples of the world drawn for each round, or 0 for all."""
        return self.samples if self.samples < world.num_public else 0

    def shape(self, world: World) -> tuple[int, ...]:
        """Return the shape of predictions in this world: (drawn public sample, class, …)."""
        return (num_drawn(self.samples, world.num_public), *world.family.output_shape[1:])

    @override
    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        draw = self.draw(world)
        lesson = None
        if self.public_epochs and job.round:
            plain = replace(
                self.local,
                epochs=self.public_epochs,
                crop=0,
                flip=False,
                flip_axes=(),
                intensity=None,
            )
            phase = Phase(SoftLabels())
            lesson = Learner((phase,), plain, self.lr(job.round), task=world.task)
            lesson = replace(lesson, teacher=PREDICTIONS, teacher_draw=draw)
        private = replace(base, send=Nothing(), keep=All(), class_rows=False)
        # Training keeps the activations of all layers. Inference keeps those of two layers, so that
        # larger batches fit into memory.
        predict = LogitsPass(samples=draw, size=PREDICTED_BATCHES * self.local.batch_size)
        return replace(
            private, state=drawn_state(draw, self.coded), after=(predict,), lesson=lesson
        )

    @override
    def fold(self, server: Server, world: World) -> Fold:
        mean = super().fold(server, world)
        temperature = self.temperature if self.sharpen else None
        shape = self.shape(world)
        predictions = PredictionsMean(
            world.family.cutter, self.weighting, temperature=temperature, shape=shape
        )
        return PredictionsFold(mean, extras=predictions)

    @override
    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if OUTPUTS not in outputs:  # No client has sent predictions.
            return server
        rows = outputs[OUTPUTS]
        how = self.server_training
        positions = drawn_positions(
            world.seed, server.round - 1, self.draw(world), world.num_public
        )
        return train(
            server, teaching(self, self.nets(world), rows, SoftLabels(), how, world, positions)
        )


def needs_classes(method: Prototypes, task: Task) -> None:
    """Refuse a task whose targets are not classes.

    Args:
        method: Method that exchanges probabilities of classes, for the message.
        task: Task of the run.

    Raises:
        ConfigError: The task has no classes.
    """
    if not task.has_classes:
        raise ConfigError(
            f"{type(method).__name__} was asked for, which exchanges probabilities of classes; "
            f"{type(task).__name__} has no classes. FedDF works for every task that can be "
            "distilled."
        )
