"""FedDF: the server distils the mean of all received nets into one net per size (Lin et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedquilt.methods.method import Presets
from fedquilt.methods.prototypes import Prototypes
from fedquilt.methods.students import teaching
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold, Weighting
from fedquilt.round.teachers import OUTPUTS, Teachers
from fedquilt.round.training.objectives import Imitation
from fedquilt.round.training.server import ServerTraining, TrainServer
from fedquilt.terms import Extras, Server


@dataclass(frozen=True)
class FedDF(Prototypes):
    """One student per prototype learns from the mean of the logits of all received nets.

    A round of prototype p with the received nets S_t (of all prototypes) and its own S_t^p:

        x_0 = Σ_{k in S_t^p} n_k x_k / Σ n_k                       (the mean of its own group)
        x_j = x_{j-1} − η ∂ KL(σ(1/|S_t| Σ_{k in S_t} f(x_k, d)) ‖ σ(f(x_{j-1}, d))) / ∂x

    over batches d of public samples, at temperature 1. σ is the softmax. Without a step of the server and with one
    prototype it is FedAvg.

    The settings are those of the released code (epfml/federated-learning-public-code, README and
    `noise_knowledge_transfer.py`): Adam at 0.001, batches of 128, at most 10,000 steps, over which a cosine lowers the
    rate, and a check every 100 steps on labelled validation samples. It stops after 1,000 steps without progress and
    keeps the best of the checked states. The preset `paper` has these settings. Teacher, loss and one step were
    compared with the released functions on random batches, and agree to 1e-15. The text of the paper was not available
    to check its settings against, nor its numbers of algorithms.

    What is different here:

    - By default a server takes at most 100 steps, and has no labels: progress is measured by the agreement with the
      teacher. The presets `labels` and `paper` use labels of clients.
    - The cosine is followed in stairs, one for every comparison. The released code lowers the rate at each step.
    - The state before the first step is one of those compared. The released code leaves it out unless
      `return_best_model_on_val` is set.
    - Gradients are not clipped. The released code clips their norm at 5.
    - The released default `update_student_scheme=avg_losses` averages the losses to all teachers. The commands of its
      README, and this method, average the logits (`avg_logits`).
    """

    weighting: Weighting = "data"  # What a client counts by in the mean of its group
    paper = "Lin et al. 2020"
    presets: ClassVar[Presets] = {
        "labels": {"server_training": ServerTraining(stop_by="labels")},
        "paper": {
            "server_training": ServerTraining(
                steps=10_000, check_every=100, patience=10, stop_by="labels", schedule="cosine"
            )
        },
    }

    def fold(self, server: Server, world: World) -> Fold:
        """Average each group, and sum the logits of all nets on the public samples as they arrive."""
        mean = super().fold(server, world)
        return Teachers(mean, world, server, self.statistics) if self.needs_public else mean

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if OUTPUTS not in outputs:  # Nobody has answered.
            return server
        lesson = teaching(
            self, self.nets(world), outputs[OUTPUTS], Imitation(), self.server_training, world
        )
        return train(server, lesson)
