"""Tests of nets as an engine gets them: the nets, how they run, and the samples to test on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.family.net import Pass
from fedquilt.family.norms import NormPolicy
from fedquilt.round.federation import World
from fedquilt.round.training.attacks import PGD, by_sample
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.step import train_pass
from fedquilt.terms import Submodel, Submodels, Weights

if TYPE_CHECKING:
    from fedquilt.family import Family


SampleSet = Literal["test", "training", "validation"]  # Sets of samples that engines have.
# Origin of the weights of a tested net. server: all come from the server. client: the net as a
# client holds it after a download, with what it keeps. memory: a net that a client keeps.
WeightsFrom = Literal["server", "client", "memory"]


@dataclass(frozen=True)
class EvalJob:
    """A test of one network, or of several whose logits are averaged, on a named set of samples.

    It names samples and does not hold them, because only an engine can reach them.
    """

    label: str  # Key of the result, such as a share.
    nets: Submodels  # Nets to test. Logits of several are averaged.
    weights: Weights  # Already cut, by scope and name.
    # Client whose own test samples are used, if clients have some. None: all test samples.
    client: int | None = None
    own_classes: bool = False  # True: only the classes that the client holds count.
    absent: float = -torch.inf  # Logit of the classes that the client lacks.
    robustness: float = 0.0  # Mixing weight of dual norms, from 0 (clean) to 1 (robust).
    attack: PGD | None = None  # Attack on the samples. None: they stay unchanged.
    # Set of samples to test on. If no client is named, training and validation samples are those of
    # all clients, mixed.
    on: SampleSet = "test"
    limit: int | None = None  # Most samples to test on. None: all of the set.
    # Origin of the weights. If clients keep state on devices, `weights` has only what the server
    # sends, and the device adds the rest.
    source: WeightsFrom = "server"


@dataclass(frozen=True)
class EvalSpec:
    """Nets without their positions, the mode in which they run, and an attack on their samples."""

    nets: Submodels  # Nets to run, without positions.
    mode: Pass  # How they run.
    attack: PGD | None = None  # Attack on the samples. None: they stay unchanged.
    training: bool = False  # True: rows are those of the training set, not of the test set.

    def inputs(
        self,
        world: World,
        weights: Weights,
        inputs: Tensor,
        targets: Tensor,
        start_noise: Tensor | None,
    ) -> Tensor:
        """Return the samples as the nets see them: unchanged, or attacked.

        The attack maximizes the loss of the nets' mean logits. All classes are attacked, also those
        that a test hides, because a sample of a hidden class counts as wrong anyway.

        Args:
            world: Family and task.
            weights: Weights of the nets, by scope and name.
            inputs: (sample, …) Samples.
            targets: (sample, …) Their targets.
            start_noise: Starting point of the attack (`drawn`). None: there is no attack.
        """
        if self.attack is None:
            return inputs
        assert start_noise is not None, "an attack starts somewhere"
        mode = self.mode
        if mode.statistics == "measure":
            mode = replace(mode, statistics="batch")

        def loss(x: Tensor) -> Tensor:
            return world.task.mean_loss(mixed(world.family, self.nets, weights, x, mode), targets)

        return self.attack(loss, inputs, start_noise)

    def logits(
        self,
        world: World,
        weights: Weights,
        inputs: Tensor,
        targets: Tensor,
        start_noise: Tensor | None,
    ) -> Tensor:
        """Return the mean of the nets' logits, with classes in dimension 1.

        The function is pure and may be vmapped.

        Args:
            world: Family and task.
            weights: Weights of the nets, by scope and name.
            inputs: (sample, …) Samples.
            targets: (sample, …) Their targets, which an attack needs.
            start_noise: Starting point of the attack (`drawn`). None: there is no attack.
        """
        net_inputs = self.inputs(world, weights, inputs, targets, start_noise)
        return mixed(world.family, self.nets, weights, net_inputs, self.mode)

    def statistics(
        self,
        world: World,
        weights: Weights,
        inputs: Tensor,
        targets: Tensor,
        start_noise: Tensor | None,
    ) -> dict[str, Tensor]:
        """Return the norm statistics that a net measures on its samples, by name.

        The spec has one net only. The samples are attacked first if the spec has an attack. The
        function is pure and may be vmapped.

        Args:
            world: Family and task.
            weights: Weights of the net, by name.
            inputs: (sample, …) Samples.
            targets: (sample, …) Their targets, which an attack needs.
            start_noise: Starting point of the attack (`drawn`). None: there is no attack.
        """
        net_inputs = self.inputs(world, weights, inputs, targets, start_noise)
        return world.family.member(self.nets[0]).net(weights, net_inputs, self.mode)[1]

    def drawn(self, seed: int, rows: Tensor, like: Tensor) -> Tensor | None:
        """Draw the random starting point of an attack, or return None if there is no attack.

        The numbers are in [0, 1). They depend on the seed and the row of a sample, not on its
        batch.

        Args:
            seed: Random seed of the run.
            rows: (sample,) Rows of the samples in their set.
            like: (sample, …) Inputs, whose shape, type and device are used.
        """
        if self.attack is None:
            return None
        return by_sample(noise.key(noise.Stream.TEST_ATTACK, seed), rows, like)


def compared_passes(local: LocalTraining, norm: NormPolicy) -> tuple[Pass, Pass]:
    """Return how nets run in training, and how they run when deployed.

    In both modes a net must give the same outputs as its module. The scaler of training is left
    out.

    Args:
        local: Settings of local training, whose norm policy gives the statistics in training.
        norm: Norm policy that gives the deployed mode.
    """
    return Pass(train=True, statistics=train_pass(local).statistics), norm.evaluation_pass


def mixed(family: Family, nets: Submodels, weights: Weights, inputs: Tensor, mode: Pass) -> Tensor:
    """Return the mean of the nets' logits (Split-Mix, algorithm 1, line 11).

    Classes are in dimension 1. The function is pure and may be vmapped.

    Args:
        family: Family of the nets.
        nets: Sub-models, each with a scope of its own.
        weights: Their weights, by scope and name.
        inputs: (sample, …) Samples.
        mode: How the nets run.
    """
    logits = []
    for net in nets:
        net_weights = {
            name.removeprefix(net.scope): value
            for name, value in weights.items()
            if name.startswith(net.scope)
        }
        logits.append(
            family.member(net).net(net_weights, inputs, mode)[0].movedim(family.layout.class_dim, 1)
        )
    return logits[0] if len(logits) == 1 else torch.stack(logits).mean(0)


def joined(nets: Submodels, weights: Mapping[Submodel, Weights]) -> dict[str, Tensor]:
    """Return the weights of several nets in one dictionary, by scope and name.

    Args:
        nets: Sub-models, each with a scope of its own.
        weights: Weights of each sub-model, by name without scope. Others than `nets` are ignored.
    """
    return {net.scope + name: value for net in nets for name, value in weights[net].items()}
