"""Objectives: losses of one batch, and what they cost.

An objective states the nets that it runs, how often it runs them, and which copies of the weights
it reads. Multiply-adds, memory estimates and the plans of engines follow from that alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.names import find, said
from fedquilt.round.training.view import View

if TYPE_CHECKING:
    from fedquilt.family.member import Member

RECEIVED = "received"  # Name of the copy of the weights that the round started from.


@dataclass(frozen=True)
class Passes:
    """Number of times that one step of an objective runs a net, and what it keeps in memory."""

    net: Member  # Net that is run.
    forward: int = 1  # Forward passes.
    backward: int = 1  # Backward passes to the weights. Each costs two forward passes.
    to_samples: int = 0  # Backward passes to the samples only. Each costs one forward pass.
    saved: int = 1  # Sets of activations that are in memory at once.
    # True: the net runs on the unchanged batch by `View.logits`. Objectives of a sum share the run.
    on_batch: bool = True

    @property
    def macs(self) -> int:
        """Return the multiply-adds of all these passes for one sample."""
        net = self.net.running
        through = (self.forward + self.to_samples) * net.macs
        return through + 2 * self.backward * net.trained_macs

    def repeated(self, count: int) -> Passes:
        """Return the passes over `count` changed copies of the batch, all in memory at once.

        All numbers of passes are multiplied by `count`.
        """
        return replace(
            self,
            forward=count * self.forward,
            backward=count * self.backward,
            to_samples=count * self.to_samples,
            saved=count * self.saved,
            on_batch=False,
        )

    def searched(self, count: int) -> Passes:
        """Return the passes of an attack of `count` steps with this objective.

        Backward passes are to the samples only, and no activations stay in memory.
        """
        back = self.backward + self.to_samples
        return Passes(self.net, count * self.forward, 0, count * back, saved=0, on_batch=False)


class Objective(ABC):
    """Base class of losses of one batch.

    Subclasses are frozen dataclasses, so that objectives with the same settings compare equal. An
    objective that wraps another one derives from `Wrapping`.
    """

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """Return the loss, a scalar. `view` has the batch, and runs the nets on it."""

    @abstractmethod
    def nets(self, member: Member) -> tuple[Member, ...]:
        """Return the nets that it runs: the client's own (`member`), or nets nested in it.

        Each net is listed once.
        """

    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return how often a step runs each net of `member`, from which costs are computed.

        By default that is once forward and once backward.
        """
        return tuple(Passes(net) for net in self.nets(member))

    @property
    def copies(self) -> frozenset[str]:
        """Return the names of further copies of the weights that it reads, such as `received`."""
        return frozenset()

    @property
    def terms(self) -> tuple[Objective, ...]:
        """Return the terms of a sum, whose gradients can be computed one after another and added.

        An objective that is no sum is its own only term.
        """
        return (self,)

    @property
    def reads_its_nets_alone(self) -> bool:
        """Return True if the loss depends on the outputs of its nets only.

        If phases are drawn, the vectorized engine can then take the gradient of a nested net with
        respect to that net's weights only, and `View.member` is that net. A penalty on the client's
        weights has gradients elsewhere too, so that it must return False. False is always correct,
        but slower.
        """
        return False


@dataclass(frozen=True)
class TaskLoss(Objective):
    """The task's mean loss, such as cross-entropy."""

    share: float | None = None  # Share of the nested net that is run. None: the client's own net

    reads_its_nets_alone = True

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return (net_at(member, self.share),)

    @override
    def __call__(self, view: View) -> Tensor:
        return view.loss(view.logits(net_at(view.member, self.share)))


@dataclass(frozen=True)
class MaskedCrossEntropy(Objective):
    """Cross-entropy with the logits of absent classes set to 0 (HeteroFL).

    Classes are absent from the client, as in HeteroFL, or from the batch, as in Split-Mix's
    released code. For tasks without classes this is the task's loss. `Method.check_task` refuses
    such tasks unless the mask is the method's default.
    """

    by: Literal["client", "batch"] = "client"  # Samples whose classes count as present
    share: float | None = None  # Share of the nested net that is run. None: the client's own net

    reads_its_nets_alone = True

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return (net_at(member, self.share),)

    @override
    def __call__(self, view: View) -> Tensor:
        logits = view.logits(net_at(view.member, self.share))
        if not view.task.has_classes:
            return view.loss(logits)
        if self.by == "client":
            present = view.classes_present
        else:
            classes = torch.arange(logits.shape[1], device=logits.device)
            present = (view.targets.reshape(-1, 1) == classes).any(0)
        present = present.reshape([1, -1] + [1] * (logits.dim() - 2))
        return view.loss(torch.where(present, logits, 0.0))


@dataclass(frozen=True)
class Wrapping(Objective):
    """An objective that changes another one, such as by a penalty or a factor.

    By default it has the costs of the other one. `LocalTraining(objective=…)`, or
    `objective = "file.py:Class"` in a file's `[method.local]`, puts a wrapper around the loss of
    every client. That loss already includes attacked samples:

        @dataclass(frozen=True)
        class Tempered(Wrapping):
            power: float = 2.0  # Power of the loss

            def __call__(self, view):
                return self.objective(view) ** self.power

    A subclass that runs further nets, or the other objective more than once, overrides `nets` and
    `passes`. A subclass that reads other copies of the weights overrides `copies`. Wrappers may be
    nested. Local training puts the loss into the innermost one.
    """

    # Objective that is wrapped. It is not a key in settings, because local training sets it.
    objective: Objective = field(default=TaskLoss(), metadata={"setting": False})

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return self.objective.nets(member)

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        return self.objective.passes(member)

    @property
    @override
    def copies(self) -> frozenset[str]:
        return self.objective.copies


@dataclass(frozen=True)
class Proximal(Wrapping):
    """The wrapped objective plus mu/2 · ‖w − w_received‖² (FedProx)."""

    mu: float = 0.01  # Weight of the proximal term. 0 has no effect; the default is that of FedProx

    def __post_init__(self) -> None:
        within(self, mu="[0, inf)")

    @property
    @override
    def copies(self) -> frozenset[str]:
        return self.objective.copies | ({RECEIVED} if self.mu else frozenset())

    @override
    def __call__(self, view: View) -> Tensor:
        loss = self.objective(view)
        if not self.mu:
            return loss
        drift = sum(
            (view.weights[name] - view.received[name]).square().sum()
            for name in view.member.trainable
        )
        return loss + 0.5 * self.mu * drift


@dataclass(frozen=True)
class Summed(Objective):
    """Sum of several objectives, as slimmable training (Yu et al. 2018) has over widths."""

    objectives: tuple[Objective, ...]  # Terms of the sum, each with factor 1

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        return tuple(
            dict.fromkeys(net for objective in self.objectives for net in objective.nets(member))
        )

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return the passes of all terms for `member`.

        A net that several terms run on the unchanged batch runs once.
        """
        return together(
            net_passes for objective in self.objectives for net_passes in objective.passes(member)
        )

    @property
    @override
    def copies(self) -> frozenset[str]:
        return frozenset[str]().union(*(objective.copies for objective in self.objectives))

    @property
    @override
    def terms(self) -> tuple[Objective, ...]:
        return tuple(term for objective in self.objectives for term in objective.terms)

    @property
    @override
    def reads_its_nets_alone(self) -> bool:
        return all(objective.reads_its_nets_alone for objective in self.objectives)

    @override
    def __call__(self, view: View) -> Tensor:
        return torch.stack([objective(view) for objective in self.objectives]).sum()


def together(passes: Iterable[Passes]) -> tuple[Passes, ...]:
    """Join the passes of objectives that share a view.

    Equal passes on the unchanged batch are listed once, because objectives share the run. All
    others are kept.
    """
    listed = list(passes)
    shared = dict.fromkeys(net_passes for net_passes in listed if net_passes.on_batch)
    return (*shared, *(net_passes for net_passes in listed if not net_passes.on_batch))


def apart(objective: Objective, member: Member) -> tuple[Objective, ...]:
    """Return the terms of an objective, with those that run the same nets joined into one sum.

    Their gradients can be taken one after another and added.

    Args:
        objective: Objective, which may be a sum.
        member: The client's net.
    """
    by_nets: dict[tuple[Member, ...], list[Objective]] = {}
    for term in objective.terms:
        by_nets.setdefault(term.nets(member), []).append(term)
    return tuple(_sum(terms) for terms in by_nets.values())


def _sum(terms: Sequence[Objective]) -> Objective:
    return terms[0] if len(terms) == 1 else Summed(tuple(terms))


def net_at(member: Member, share: float | None) -> Member:
    """Return a client's own net (`share` None), or the one nested in it at a share.

    The share is one of the whole model, not of the client's net.
    """
    return member if share is None else member.nested(share)


# Wrappers that settings can name.
OBJECTIVES: dict[str, type[Wrapping]] = {"proximal": Proximal}


def resolve_wrapper(value: object) -> Wrapping:
    """Return a wrapper, given the wrapper itself, its name, or `file.py:Class`.

    Raises:
        ConfigError: It is not a wrapper, or it already has an innermost objective, which the loss
            would replace.
    """
    if isinstance(value, str):
        kind = find(OBJECTIVES, value, "objective")
        try:
            wrapper = kind()
        except Exception as error:  # A user's class may raise anything.
            raise ConfigError(
                f"{value!r} was called for a Wrapping and failed: {said(error)}"
            ) from error
        return resolve_wrapper(wrapper)
    if not isinstance(value, Wrapping):
        text = f"the class {value.__name__}" if isinstance(value, type) else f"{value!r}"
        names = ", ".join(map(repr, OBJECTIVES))
        raise ConfigError(
            f"{text} was asked for; an instance of a class derived from Wrapping fits, such as "
            f"Proximal(mu=0.1), or its name: {names}, or 'file.py:Class'. Another objective is "
            "chosen in `Method.learner`."
        )
    innermost = wrapped_chain(value)[-1].objective
    if innermost != TaskLoss():
        raise ConfigError(
            f"{type(value).__name__} was asked for around {innermost}; local training puts the "
            "loss there, which the other settings choose. Leave `objective` out of the innermost "
            "wrapper."
        )
    return value


def wrapped_chain(outermost: Wrapping) -> list[Wrapping]:
    """Return a wrapper and the wrappers inside it, the outermost first.

    The objective inside the innermost wrapper is not included.
    """
    chain = [outermost]
    while isinstance(chain[-1].objective, Wrapping):
        chain.append(chain[-1].objective)
    return chain


def around(wrapper: Wrapping, loss: Objective) -> Objective:
    """Return a copy of nested wrappers with a loss in the innermost one.

    Args:
        wrapper: The outermost wrapper. It is not changed.
        loss: Objective that the innermost wrapper gets in place of its own.
    """
    for layer in reversed(wrapped_chain(wrapper)):
        loss = replace(layer, objective=loss)
    return loss
