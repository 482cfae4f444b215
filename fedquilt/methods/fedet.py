"""Fed-ET: small nets on clients teach a larger net on the server (Cho et al., IJCAI 2022)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.family import Family
from fedquilt.methods.dsfl import needs_classes
from fedquilt.methods.prototypes import Prototypes, architectures, drawn, largest
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold
from fedquilt.round.students import teaching
from fedquilt.round.teachers import EACH, Teachers
from fedquilt.round.training.distillation import FromTeacher
from fedquilt.round.training.server import TrainServer
from fedquilt.round.training.view import View
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Extras, Server, Submodel, Submodels

_log = logging.getLogger(__name__)
_SERVER = "server/"  # Scope of the server's net in the state.


def consensus_weights(logits: Tensor) -> Tensor:
    """Return α_i(x) = Var(s_i(x)) / Σ_l Var(s_l(x)), the weight of each net for each sample.

    A net whose logits vary more over the classes is more confident.

    Args:
        logits: (net, sample, class, …) s_i(x). The variance is taken over the classes.

    Returns:
        (net, sample, 1, …) Weights that sum to 1 over the nets.
    """
    variance = logits.var(2, correction=0, keepdim=True)
    return variance / variance.sum(0).clamp(min=torch.finfo(logits.dtype).tiny)


def consensus(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the consensus label of the nets, and the mean output of the nets that dissent.

    The consensus label is argmax Σ_i α_i(x) s_i(x). A net dissents if its own label is a different
    one. The logits of dissenting nets are averaged with the weights α_i, which are divided by their
    sum over these nets.

    Args:
        logits: (net, sample, class, …) s_i(x) of all received nets.
        temperature: Temperature of the probabilities of dissenting nets.

    Returns:
        (sample, 2, class, …) The consensus label as a one-hot row, and the probabilities of the
        dissenting nets, which are zeros if no net dissents.
    """
    weights = consensus_weights(logits)
    label = (weights * logits).sum(0).argmax(1, keepdim=True)
    dissents = logits.argmax(2, keepdim=True) != label
    dissenting_weights = weights * dissents
    total = dissenting_weights.sum(0)
    mixed = (dissenting_weights * logits).sum(0) / torch.where(total > 0, total, 1.0)
    probabilities = torch.where(total > 0, (mixed / temperature).softmax(1), 0.0)
    label_rows = torch.zeros_like(probabilities).scatter(1, label, 1.0)
    return torch.stack([label_rows, probabilities], 1)


@dataclass(frozen=True)
class ConsensusLoss(FromTeacher):
    """Loss CE(consensus label, net) + λ · KL(dissenting nets ‖ net), averaged over samples."""

    weight: float = 0.05  # Weight λ of the KL term. 0 ignores dissenting nets.
    temperature: float = 1.0  # Temperature of the KL term.

    @override
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        label, dissent = rows.unbind(1)
        agreement = -(label * logits.log_softmax(1)).sum(1).mean()
        cooled = (logits / self.temperature).log_softmax(1)
        diversity = (torch.xlogy(dissent, dissent) - dissent * cooled).sum(1).mean()
        return agreement + self.weight * diversity


@dataclass(frozen=True)
class FedET(Prototypes):
    """The server trains a net larger than any client's on the consensus of all received nets.

    1. Clients train prototypes. The server averages those of each size.
    2. Every received net gives logits s_i(x) for the public samples. Their consensus is weighted by
       the variance of the logits, α_i(x) = Var(s_i(x)) / Σ Var(s_l(x)), and gives a label for every
       sample.
    3. The server's net is trained on CE(label) + λ·KL(s_div ‖ s), where s_div is the mean of the
       nets that dissent.
    4. The representation of the server's net is all weights without the class axis. It replaces the
       weights of prototypes that have the same shape. Prototypes of other widths keep theirs.

    On a union the server's net is the first one, which has to be the largest. Clients train the
    other nets, and keep their representations, because nets of different architectures have no
    layers in common.

    The outputs of all nets of a round are held at once: nets × public samples × classes × 4 bytes.

    No code of the authors was found, and the text of the paper was not available, so that formulas
    and λ = 0.05 are not verified against it. They were compared with the independent implementation
    in Yoruko-Tang/FedProphet, run on random nets. Labels are equal, probabilities of dissenters
    agree to 1e-7, and losses to 1e-8. That code adds 1e-6 to sums of variances.

    Differences of that implementation:

    - Where no net dissents, it draws the net towards uniform probabilities. Here such samples have
      no KL term.
    - Before the server trains, its representation layer becomes the mean of that layer over all
      received nets. The layer has one size in all of them. Widths of one model have no such layer,
      so that this step is left out here.
    - The server takes 128 steps of SGD with momentum 0.9. Here it is Adam with at most 100 steps
      (`server_training`).
    - The temperature is always 1.
    """

    # Shares of the whole model that clients train. The server's net is larger.
    prototypes: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    server_share: float = 1.0  # Share of the whole model that the server's net has.
    diversity: float = 0.05  # Weight λ of the nets that dissent from the consensus. 0 ignores them.
    temperature: float = 1.0  # Temperature of the KL term for the nets that dissent.
    paper = "Cho et al. 2022"
    demo: ClassVar[Mapping[str, Any]] = {
        "prototypes": [0.5, 0.25],
        "server_training": {"steps": 40},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, server_share="(0, 1]", diversity="[0, inf)", temperature="(0, inf)")

    @property
    @override
    def needs_public(self) -> bool:
        return True

    @override
    def check_task(self, task: Task) -> None:
        super().check_task(task)
        needs_classes(self, task)

    @override
    def adapt(self, family: Family) -> Family:
        """Return the family unchanged, or refuse a union whose first net is not the largest.

        A union of one net is refused too.
        """
        names = [family.layout.net_names(net.arch.variant)[0] for net in architectures(family)]
        if names and (len(names) == 1 or names[0] != family.layout.nets[0]):
            reason = (
                "there is no other" if len(names) == 1 else f"{names[0]!r} has more multiply-adds"
            )
            raise ConfigError(
                f"FedET was asked for on a union of {', '.join(family.layout.nets)}. The server "
                f"trains its first net, {family.layout.nets[0]!r}, and clients train smaller ones; "
                f"{reason}. A union of two or more nets, the largest first, would work."
            )
        return family

    @override
    def nets(self, world: World) -> tuple[Submodel, ...]:
        """Return the prototypes. On a union these are all nets except the first."""
        prototypes = super().nets(world)
        return prototypes[1:] if world.family.layout.nets else prototypes

    @override
    def net_for(self, budget: Budget, world: World, step: TrainingStep | None = None) -> Submodel:
        """Return the largest net of a union that a device can hold, the server's net included.

        Args:
            budget: Budget of the device.
            world: World with a union.
            step: Training step whose memory is bounded. None: memory bounds inference.
        """
        return largest((self.server_net(world), *self.nets(world)), budget, world, step)

    def server_net(self, world: World) -> Submodel:
        """Return the net of the family in `world` that the server trains, in a scope of its own.

        On a union it is the first net. Else it has `server_share` of every axis.
        """
        if world.family.layout.nets:
            return Submodel(world.family.whole, Index(), _SERVER)
        return Submodel(world.family.fit(Budget(share=self.server_share)), Index(), _SERVER)

    @override
    def initial(self, world: World) -> dict[str, Tensor]:
        net = self.server_net(world)
        if world.family.layout.nets:
            union = world.family.init(world.seed, dtype=world.dtype)
            names = (name for name in world.family.member(net).names if name in union)
            return super().initial(world) | {net.scope + name: union[name] for name in names}
        server_weights = drawn(net.arch, noise.key(noise.Stream.FEDET_INITIAL, world.seed), world)
        return super().initial(world) | {
            net.scope + name: value for name, value in server_weights.items()
        }

    @override
    def fold(self, server: Server, world: World) -> Fold:
        return Teachers(super().fold(server, world), world, server, self.statistics, each=True)

    @override
    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if EACH not in outputs:  # No client has sent a net.
            return server
        logits = outputs[EACH]
        if server.round == 1:
            _log.info(
                "Fed-ET holds the outputs of %d nets at once: %d bytes", len(logits), logits.nbytes
            )
        objective = ConsensusLoss(self.diversity, self.temperature)
        rows = consensus(logits, self.temperature)
        net = self.server_net(world)
        trained_server = train(
            server, teaching(self, (net,), rows, objective, self.server_training, world)
        )
        return replace(
            trained_server,
            weights={**trained_server.weights, **self._transferred(trained_server, world)},
        )

    def _transferred(self, server: Server, world: World) -> dict[str, Tensor]:
        """Return new weights of the prototypes, copied from the server's net after its training.

        These are all trainable weights whose shapes are equal in both nets, besides those of the
        output layer. On a union there are none.

        Args:
            server: State after the training of the server's net.
            world: Family, task and random seed.
        """
        layout = world.family.layout
        net = self.server_net(world)
        transferred: dict[str, Tensor] = {}
        if layout.nets:
            return transferred
        for prototype in self.nets(world):
            for name in world.family.member(prototype).trainable:
                weight = server.weights[net.scope + name]
                is_output = "class" in layout.axes_of(name)
                if not is_output and weight.shape == server.weights[prototype.scope + name].shape:
                    transferred[prototype.scope + name] = weight.clone()
        return transferred

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the server's net if the device can run it, else the largest fitting prototype."""
        if world.family.layout.nets:
            return (self.net_for(budget, world),)
        if self.runnable_share(budget, world) >= self.server_share - 1e-9:
            return (self.server_net(world),)
        return super().deploy(server, budget, world)
