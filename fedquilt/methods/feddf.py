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
    """Algorithms 1 and 3: one student per prototype learns from the mean of the logits of all received nets.

    A round of prototype p with the received nets S_t (of all prototypes) and its own S_t^p:

        x_0 = Σ_{k in S_t^p} n_k x_k / Σ n_k                       (the mean of its own group)
        x_j = x_{j-1} − η ∂ KL(σ(1/|S_t| Σ_{k in S_t} f(x_k, d)) ‖ σ(f(x_{j-1}, d))) / ∂x

    over batches d of public samples, at temperature 1. σ is the softmax. Without a step of the server and with one
    prototype it is FedAvg.

    The paper trains the students with Adam at 0.001, in batches of 128, for at most 10,000 steps, over which a cosine
    lowers the rate; here the rate is constant within a round. It stops after 1,000 steps without progress on labelled
    validation samples. A server has no labels, so that here progress is measured by the agreement with the teacher. The
    preset `labels` uses labels of clients, as the paper does.
    """

    weighting: Weighting = "data"  # What a client counts by in the mean of its group
    paper = "Lin et al. 2020"
    presets: ClassVar[Presets] = {
        "labels": {"server_training": ServerTraining(stop_by="labels")},
        "paper": {"server_training": ServerTraining(steps=10_000, check_every=100, patience=10, stop_by="labels")},
    }

    def fold(self, server: Server, world: World) -> Fold:
        """Average each group, and sum the logits of all nets on the public samples as they arrive."""
        mean = super().fold(server, world)
        return Teachers(mean, world, server, self.statistics) if self.needs_public else mean

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if OUTPUTS not in outputs:  # Nobody has answered.
            return server
        lesson = teaching(self, self.nets(world), outputs[OUTPUTS], Imitation(), self.server_training, world)
        return train(server, lesson)
