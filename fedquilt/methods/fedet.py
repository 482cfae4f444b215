"""Fed-ET: small nets on clients teach a larger net on the server (Cho et al., IJCAI 2022)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.axes import Index
from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep
from fedquilt.family.family import Family
from fedquilt.methods.dsfl import needs_classes
from fedquilt.methods.prototypes import Prototypes, architectures, drawn, largest
from fedquilt.methods.students import teaching
from fedquilt.round.federation import World
from fedquilt.round.merge import Fold
from fedquilt.round.teachers import EACH, Teachers
from fedquilt.round.training.objectives import FromTeacher, View
from fedquilt.round.training.server import TrainServer
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Extras, Mix, Server, Submodel

_log = logging.getLogger(__name__)
_SERVER = "server/"  # Scope of the server's net.
_INITIAL = 50  # Random stream of the initial weights of the server's net.


def consensus_weights(logits: Tensor) -> Tensor:
    """Return α_i(x) = Var(s_i(x)) / Σ_l Var(s_l(x)), the weight of each net for each sample.

    A net whose logits vary more is more confident.

    Args:
        logits: (net, sample, class, …) s_i(x). The variance is that over the classes.

    Returns:
        (net, sample, 1, …), which add up to 1 over the nets.
    """
    variance = logits.var(2, correction=0, keepdim=True)
    return variance / variance.sum(0).clamp(min=torch.finfo(logits.dtype).tiny)


def consensus(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return what the nets agree on, and what those say that dissent.

    The consensus label is argmax Σ_i α_i(x) s_i(x). Nets dissent whose own label is another. Their logits are added up
    with the weights α_i, which are divided by their sum over the nets that dissent.

    Args:
        logits: (net, sample, class, …) s_i(x) of all received nets.
        temperature: Temperature of the probabilities of those that dissent.

    Returns:
        (sample, 2, class, …): the consensus label as a row of zeros and a one, and the probabilities of those that
        dissent, zeros where nobody does.
    """
    weights = consensus_weights(logits)
    label = (weights * logits).sum(0).argmax(1, keepdim=True)
    dissents = logits.argmax(2, keepdim=True) != label
    own = weights * dissents
    total = own.sum(0)
    mixed = (own * logits).sum(0) / torch.where(total > 0, total, 1.0)
    probabilities = torch.where(total > 0, (mixed / temperature).softmax(1), 0.0)
    chosen = torch.zeros_like(probabilities).scatter(1, label, 1.0)
    return torch.stack([chosen, probabilities], 1)


@dataclass(frozen=True)
class ConsensusLoss(FromTeacher):
    """CE(consensus label, net) + λ · KL(those that dissent ‖ net), the mean over samples."""

    weight: float = 0.05  # λ
    temperature: float = 1.0  # Of the second term

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        label, dissent = rows.unbind(1)
        agreement = -(label * logits.log_softmax(1)).sum(1).mean()
        cooled = (logits / self.temperature).log_softmax(1)
        diversity = (torch.xlogy(dissent, dissent) - dissent * cooled).sum(1).mean()
        return agreement + self.weight * diversity


@dataclass(frozen=True)
class FedET(Prototypes):
    """The server trains a net larger than any client's on the consensus of all received nets.

    1. Clients train prototypes; the server averages those of each size.
    2. Every received net gives logits s_i(x) for the public samples. Their consensus is weighted by the variance of the
       logits, α_i(x) = Var(s_i(x)) / Σ Var(s_l(x)), and gives a label for every sample.
    3. The server's net is trained on CE(label) + λ·KL(s_div ‖ s), where s_div is the mean of the nets that dissent.
    4. Its representation, all weights without the class axis, replaces that of the prototypes whose weights have the
       same shape. Prototypes of other widths keep their own.

    On a union the server's net is the first one, which has to be the largest, and clients train the others. They keep
    their representations, because nets of different architectures have no layers in common.

    The outputs of all nets of a round are held at once: nets × public samples × classes × 4 bytes.

    No code of the authors was found, and the text of the paper was not available, so that formulas and λ = 0.05 are
    not verified against it. They were compared with the independent implementation in Yoruko-Tang/FedProphet, run on
    random nets. Labels are equal, probabilities of dissenters agree to 1e-7, and losses to 1e-8. That code adds 1e-6
    to sums of variances.

    What is different there:

    - Where nobody dissents, it draws the net towards uniform probabilities. Here such samples have no second term.
    - Before the server trains, its representation layer becomes the mean of that layer over all received nets. The
      layer has one size in all of them. Widths of one model have no such layer, so that this step is left out here.
    - The server takes 128 steps of SGD with momentum 0.9. Here it is Adam with at most 100 steps (`server_training`).
    - The temperature is always 1.
    """

    # Shares of the whole model that clients train. The server's net is larger
    prototypes: tuple[float, ...] = (0.5, 0.25, 0.125, 0.0625)
    server_share: float = 1.0  # Share of the whole model that the server's net has
    diversity: float = 0.05  # λ, weight of the nets that dissent. 0: they are ignored
    temperature: float = 1.0  # Of the term of the nets that dissent
    paper = "Cho et al. 2022"
    demo: ClassVar[Mapping[str, Any]] = {
        "prototypes": [0.5, 0.25],
        "server_training": {"steps": 40},
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, server_share="(0, 1]", diversity="[0, inf)", temperature="(0, inf)")

    @property
    def needs_public(self) -> bool:
        return True

    def check_task(self, task: Task) -> None:
        super().check_task(task)
        needs_classes(self, task)

    def adapt(self, family: Family) -> Family:
        """Refuse a union whose first net is not the largest."""
        names = [family.layout.net_names(net.arch.variant)[0] for net in architectures(family)]
        if names and (len(names) == 1 or names[0] != family.layout.nets[0]):
            found = (
                "there is no other" if len(names) == 1 else f"{names[0]!r} has more multiply-adds"
            )
            raise ConfigError(
                f"FedET was asked for on a union of {', '.join(family.layout.nets)}. The server trains its first net, "
                f"{family.layout.nets[0]!r}, and clients train smaller ones; {found}. A union of two or more nets, the "
                "largest first, would work."
            )
        return family

    def nets(self, world: World) -> tuple[Submodel, ...]:
        """Return the prototypes. On a union they are all nets but the first."""
        prototypes = super().nets(world)
        return prototypes[1:] if world.family.layout.nets else prototypes

    def net_for(self, budget: Budget, world: World, step: TrainingStep | None = None) -> Submodel:
        """Return the server's net if a device of a union can hold it, else the largest prototype that it can."""
        return largest((self.server_net(world), *self.nets(world)), budget, world, step)

    def server_net(self, world: World) -> Submodel:
        """Return the server's own net."""
        if world.family.layout.nets:
            return Submodel(world.family.whole, Index(), _SERVER)
        return Submodel(world.family.fit(Budget(share=self.server_share)), Index(), _SERVER)

    def initial(self, world: World) -> dict[str, Tensor]:
        net = self.server_net(world)
        if world.family.layout.nets:
            union = world.family.init(world.seed, dtype=world.dtype)
            names = (name for name in world.family.member(net).names if name in union)
            return super().initial(world) | {net.scope + name: union[name] for name in names}
        own = drawn(net.arch, noise.key(_INITIAL, world.seed), world)
        return super().initial(world) | {net.scope + name: value for name, value in own.items()}

    def fold(self, server: Server, world: World) -> Fold:
        return Teachers(super().fold(server, world), world, server, self.statistics, each=True)

    def learn(self, server: Server, outputs: Extras, world: World, train: TrainServer) -> Server:
        if EACH not in outputs:  # Nobody has answered.
            return server
        logits = outputs[EACH]
        if server.round == 1:
            _log.info(
                "Fed-ET holds the outputs of %d nets at once: %d bytes", len(logits), logits.nbytes
            )
        objective = ConsensusLoss(self.diversity, self.temperature)
        rows = consensus(logits, self.temperature)
        net = self.server_net(world)
        after = train(server, teaching(self, (net,), rows, objective, self.server_training, world))
        return replace(after, weights={**after.weights, **self._transferred(after, world)})

    def _transferred(self, server: Server, world: World) -> dict[str, Tensor]:
        """Return the weights of prototypes that take over the representation of the server's net."""
        layout, net = world.family.layout, self.server_net(world)
        found: dict[str, Tensor] = {}
        if layout.nets:
            return found
        for prototype in self.nets(world):
            for name in world.family.member(prototype).trainable:
                weight = server.weights[net.scope + name]
                is_output = "class" in layout.axes_of(name)
                if not is_output and weight.shape == server.weights[prototype.scope + name].shape:
                    found[prototype.scope + name] = weight.clone()
        return found

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """Return the server's net if the device can run it, else the largest prototype that it can."""
        if world.family.layout.nets:
            return (self.net_for(budget, world),)
        if self.runnable_share(budget, world) >= self.server_share - 1e-9:
            return (self.server_net(world),)
        return super().deploy(server, budget, world)
