"""FedDF: the server distils all received nets into one net per size (Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from fedquilt.methods.prototypes import Prototypes
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold, Weighting
from fedquilt.round.method import Presets
from fedquilt.round.students import teaching
from fedquilt.round.teachers import OUTPUTS, Teachers
from fedquilt.round.training.distillation import Imitation
from fedquilt.round.training.server import ServerTraining, TrainServer
from fedquilt.terms import Extras, Server


@dataclass(frozen=True)
class FedDF(Prototypes):
    """One student per prototype learns from the mean of the logits of all received nets.

    S_t are the received nets of all prototypes, and S_t^p those of prototype p. A round of
    prototype p is, over batches d of public samples:

        x_0 = Σ_{k in S_t^p} n_k x_k / Σ n_k                       (the mean of its own group)
        x_j = x_{j-1} − η ∂ KL(σ(1/|S_t| Σ_{k in S_t} f(x_k, d)) ‖ σ(f(x_{j-1}, d))) / ∂x

    σ is the softmax at temperature 1. With no server steps and one prototype, FedDF is FedAvg.

    The preset `paper` has the settings of the released code (epfml/federated-learning-public-code,
    README and `noise_knowledge_transfer.py`): Adam with learning rate 0.001, batches of 128, and at
    most 10,000 steps with a cosine schedule. Every 100 steps the net is evaluated on labelled
    validation samples. Training stops after 1,000 steps without progress and keeps the best
    evaluated state. Teacher, loss and one step were compared with the released functions on random
    batches, and agree to 1e-15. The text of the paper was not available, so that its settings and
    algorithm numbers are not verified.

    Differences from the released code:

    - By default the server takes at most 100 steps, and has no labels. Progress is then measured by
      the agreement with the teacher. The presets `labels` and `paper` use labels of clients.
    - The learning rate follows the cosine in stairs, one for every evaluation. The released code
      lowers it at each step.
    - The state before the first step is one of the evaluated states. The released code leaves it
      out unless `return_best_model_on_val` is set.
    - Gradients are not clipped. The released code clips their norm at 5.
    - The released default `update_student_scheme=avg_losses` averages the losses to all teachers.
      The commands of its README, and this method, average the logits (`avg_logits`).
    """

    weighting: Weighting = "data"  # Weights of the clients in the mean of each prototype.
    paper = "Lin et al. 2020"
    presets: ClassVar[Presets] = {
        "labels": {"server_training": ServerTraining(stop_by="labels")},
        "paper": {
            "server_training": ServerTraining(
                steps=10_000, check_every=100, patience=10, stop_by="labels", schedule="cosine"
            )
        },
    }

    @override
    def fold(self, server: Server, world: World) -> Fold:
        """Return a fold that averages each group of prototypes.

        If the server trains, it also adds up the logits of all received nets on the public samples.

        Args:
            server: State before the round.
            world: Family, task and random seed.
        """
        mean = super().fold(server, world)
        return Teachers(mean, world, server, self.statistics) if self.needs_public else mean

    @override
    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if OUTPUTS not in outputs:  # No client has sent a net.
            return server
        lesson = teaching(
            self, self.nets(world), outputs[OUTPUTS], Imitation(), self.server_training, world
        )
        return train(server, lesson)
