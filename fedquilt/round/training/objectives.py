"""Objectives: losses of one batch, and what they cost.

An objective states the nets that it runs, how often it runs them, and which copies of the weights
it reads. Multiply-adds, memory estimates and the plans of engines follow from that alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.errors import ConfigError
from fedquilt.family.net import Pass
from fedquilt.names import find, said
from fedquilt.round.attack import AdversarialTraining
from fedquilt.round.training.optimizers import State
from fedquilt.tasks import Classification, Task
from fedquilt.terms import Slots, Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member

_LOT = -4  # Random stream of the per-sample weights.
_START = (
    -3
)  # Random stream of an attack. Augmentation has -1, -2, -5 and -6, layers those from 1 on.
RECEIVED = "received"  # the copy of the weights that the round started from


@dataclass
class View:
    """One batch of one client as an objective sees it."""

    member: Member  # the client's own net
    weights: State
    inputs: Tensor
    targets: Tensor
    held: Tensor  # (class,) True where the client has samples of the class
    received: Weights  # what this round started from
    mode: Pass
    key: Tensor
    taught: Tensor | None = (
        None  # Logits of the client's net before this batch. None unless the learner sets `taught`.
    )
    known: dict[Member, Tensor] = field(default_factory=dict)  # logits of nets that have been run
    seen: State = field(default_factory=dict)  # norm statistics, of the widest net run
    condition: Tensor | None = None  # a robustness for each sample, instead of the pass's
    importance: Tensor | None = None  # what each sample's loss is multiplied by
    share: float | Tensor = 1.0  # of the client's net, which the scaler divides by
    slots: Slots = field(
        default_factory=dict
    )  # State of the method: slots received, and the client's own
    task: Task = Classification()  # whose loss objectives wrap

    def logits(self, net: Member | None = None) -> Tensor:
        """Run a net on the batch; objectives of a sum that ask for the same net share the run.

        Args:
            net: The client's own net, or one nested in it. None: the client's own.

        Returns:
            The logits (sample, class, …).
        """
        net = self.member if net is None else net
        if net not in self.known:
            self.known[net] = self._run(net).movedim(net.class_dim, 1)
        return self.known[net]

    def through(self, robustness: float, **changes: Any) -> View:
        """Return a view that runs the norms of a robustness, with other inputs or weights if given."""
        return replace(
            self, mode=replace(self.mode, robustness=robustness), known={}, seen={}, **changes
        )

    def _run(self, net: Member) -> Tensor:
        if net == self.member or (
            net.share is None and set(net.arch.widths) <= set(self.member.arch.widths)
        ):
            # The client's own net, another variant of it, or one net of a pair, which has its own axes alone.
            # A norm that several run keeps what it saw last.
            logits, seen = net.net(
                self.weights, self.inputs, self.mode, self.key, self.condition, self.share
            )
            self.seen |= {
                name: value for name, value in seen.items() if name in self.member.statistics
            }
            return logits
        narrowed = self.member.narrowed(self.weights, net)
        share = 1.0 if net.share is None else net.share
        return net.net(narrowed, self.inputs, self.mode, self.key, self.condition, share)[0]

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the task's mean loss of outputs (sample, class, …), with the samples' importance."""
        return self.task.mean_loss(outputs, self.targets, self.importance)


@dataclass(frozen=True)
class Passes:
    """Number of times that one step of an objective runs a net, and what it keeps in memory."""

    net: Member
    forward: int = 1
    backward: int = 1  # to the weights; each costs as much as two forward passes
    to_samples: int = (
        0  # backward passes to the samples alone; each costs as much as one forward pass
    )
    saved: int = 1  # sets of activations that are in memory at once
    on_batch: bool = True  # the net runs on the batch as it is, by `View.logits`; objectives of a sum share that run

    @property
    def macs(self) -> int:
        """Return the multiply-adds for one sample."""
        net = self.net.running
        through = (self.forward + self.to_samples) * net.macs
        return through + 2 * self.backward * net.trained_macs

    def repeated(self, count: int) -> Passes:
        """Return the passes over `count` batches that are made of this one, and all in memory at once."""
        return replace(
            self,
            forward=count * self.forward,
            backward=count * self.backward,
            to_samples=count * self.to_samples,
            saved=count * self.saved,
            on_batch=False,
        )

    def searched(self, count: int) -> Passes:
        """Return the passes of `count` steps of an attack, which go back to the samples and keep nothing."""
        back = self.backward + self.to_samples
        return Passes(self.net, count * self.forward, 0, count * back, saved=0, on_batch=False)


class Objective(ABC):
    """A loss of one batch. Subclasses are frozen dataclasses, so that equal objectives compare equal.

    An objective that wraps another derives from `Wrapping`, which states what the other one states.
    """

    @abstractmethod
    def __call__(self, view: View) -> Tensor:
        """Return the loss, a scalar."""

    @abstractmethod
    def nets(self, member: Member) -> tuple[Member, ...]:
        """Return the nets that it runs, each once: the client's own (`member`), or nets nested in it."""

    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return how often it runs each net. By default that is one forward and one backward pass over the batch."""
        return tuple(Passes(net) for net in self.nets(member))

    @property
    def copies(self) -> frozenset[str]:
        """Return the names of the copies of the weights that it reads besides those it trains."""
        return frozenset()

    @property
    def terms(self) -> tuple[Objective, ...]:
        """Return objectives whose sum it is, so that their gradients can be taken one after another."""
        return (self,)

    @property
    def reads_its_nets_alone(self) -> bool:
        """Return True if the loss depends on the outputs of its nets alone, and not on other weights of the client.

        Where phases are drawn, the vectorised engine then takes the gradient of an objective with one nested net with
        respect to that net's weights, and `View.member` is that net. A penalty on the client's weights has a gradient
        elsewhere too. False is always right, and slower.
        """
        return False


@dataclass(frozen=True)
class TaskLoss(Objective):
    """The task's mean loss, such as cross-entropy. `share` runs the nested net of that share of the whole model."""

    share: float | None = None

    reads_its_nets_alone = True

    def nets(self, member: Member) -> tuple[Member, ...]:
        return (_net(member, self.share),)

    def __call__(self, view: View) -> Tensor:
        return view.loss(view.logits(_net(view.member, self.share)))


@dataclass(frozen=True)
class MaskedCrossEntropy(Objective):
    """Cross-entropy with the logits of absent classes set to 0 (HeteroFL).

    Absent from the client, as HeteroFL has it, or from the batch, as Split-Mix's released code has it.
    Where targets are not classes nothing is absent, and it is the task's loss. `Method.check_task`
    refuses other tasks unless the mask is the method's own default.
    """

    by: Literal["client", "batch"] = "client"
    share: float | None = None

    reads_its_nets_alone = True

    def nets(self, member: Member) -> tuple[Member, ...]:
        return (_net(member, self.share),)

    def __call__(self, view: View) -> Tensor:
        logits = view.logits(_net(view.member, self.share))
        if not view.task.has_classes:
            return view.loss(logits)
        if self.by == "client":
            present = view.held
        else:
            classes = torch.arange(logits.shape[1], device=logits.device)
            present = (view.targets.reshape(-1, 1) == classes).any(0)
        present = present.reshape([1, -1] + [1] * (logits.dim() - 2))
        return view.loss(torch.where(present, logits, 0.0))


@dataclass(frozen=True)
class Wrapping(Objective):
    """An objective that changes another one, such as by a penalty or a factor; it costs what the other one costs.

    `Local(objective=…)` and `objective = "file.py:Class"` in a file's `[method.local]` put one around
    the loss of every client, after attacks on the samples are in it:

        @dataclass(frozen=True)
        class Tempered(Wrapping):
            power: float = 2.0  # Power of the loss

            def __call__(self, view):
                return self.objective(view) ** self.power

    A subclass that runs nets of its own, or the other objective more than once, overrides `nets` and
    `passes`. One that reads other copies of the weights overrides `copies`. Wrappers may be inside each
    other: local training puts the loss into the innermost one.
    """

    # What is wrapped. In settings it is no key, because local training fills it in.
    objective: Objective = field(default=TaskLoss(), metadata={"setting": False})

    def nets(self, member: Member) -> tuple[Member, ...]:
        return self.objective.nets(member)

    def passes(self, member: Member) -> tuple[Passes, ...]:
        return self.objective.passes(member)

    @property
    def copies(self) -> frozenset[str]:
        return self.objective.copies


@dataclass(frozen=True)
class Proximal(Wrapping):
    """Another objective plus mu/2 · ‖w − w_received‖² (FedProx)."""

    mu: float = 0.01  # Weight of the proximal term. 0 has no effect; the default is that of FedProx

    def __post_init__(self) -> None:
        within(self, mu="[0, inf)")

    @property
    def copies(self) -> frozenset[str]:
        return self.objective.copies | ({RECEIVED} if self.mu else frozenset())

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
class Adversarial(Wrapping):
    """Equation 1 of Split-Mix: (1 − λn)·L(x) + λn·L(x + δ), δ found by an attack.

    Clean samples go through a net's clean norms; attack and attacked samples go through the noised ones (algorithm 4).
    With single norms it is adversarial training as Madry et al. (2018) have it. Where every sample draws a λn of its
    own the net is told it, for both samples and the attack (OAT).
    """

    how: AdversarialTraining = AdversarialTraining()
    raised: Objective = TaskLoss()  # what δ raises, on the same nets (algorithm 4, line 10)

    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return the passes over clean and attacked samples, and those of the attack."""
        kinds = self._clean + self._noised
        trained = tuple(one.repeated(kinds) for one in self.objective.passes(member))
        if not self._noised:
            return trained
        steps = self.how.attack.steps
        return (*trained, *(one.searched(steps) for one in self.raised.passes(member)))

    @property
    def copies(self) -> frozenset[str]:
        return self.objective.copies | self.raised.copies

    @property
    def reads_its_nets_alone(self) -> bool:
        return self.objective.reads_its_nets_alone and self.raised.reads_its_nets_alone

    def __call__(self, view: View) -> Tensor:
        weight: float | Tensor = self.how.all[0]
        if self.how.draws:
            weight = self.how.draw(noise.fold_in(view.key, _LOT), view.inputs)
            view = replace(view, condition=weight)
        losses = []
        if self._clean:
            clean = view.through(0.0)
            losses.append(self._weighted(clean, 1 - weight))
            view.seen.update(clean.seen)
        if self._noised:
            noised = view.through(
                1.0, weights={**view.weights, **view.seen}, inputs=self._attacked(view)
            )
            losses.append(self._weighted(noised, weight))
            view.seen.update(noised.seen)
        return torch.stack(losses).sum()

    def _weighted(self, view: View, weight: float | Tensor) -> Tensor:
        """The objective with one weight for the batch, or one for each sample."""
        if not isinstance(weight, Tensor):
            return weight * self.objective(view)
        view.importance = weight
        return self.objective(view)

    @property
    def _clean(self) -> bool:
        return any(weight < 1 for weight in self.how.all)

    @property
    def _noised(self) -> bool:
        return any(weight > 0 for weight in self.how.all)

    def _attacked(self, view: View) -> Tensor:
        """The worst samples found for the weights as they are: no gradient goes through the search."""
        drawn = noise.uniform(noise.fold_in(view.key, _START), view.inputs.shape, view.inputs.dtype)
        now = {**view.weights, **view.seen}  # single norms have seen the clean samples already
        still = view.through(1.0, weights={name: value.detach() for name, value in now.items()})
        still.mode = self._searching(still.mode)

        def loss(inputs: Tensor) -> Tensor:
            return self.raised(still.through(1.0, inputs=inputs))

        return self.how.attack(loss, view.inputs, drawn)

    def _searching(self, mode: Pass) -> Pass:
        """Return how nets run while an attack is searched. Nothing seen there is tracked."""
        if self.how.search == "training":
            return replace(mode, statistics="batch")
        tracked = mode.statistics == "track"
        return replace(mode, train=False, statistics="stored" if tracked else "batch")


@dataclass(frozen=True)
class Distilled(Objective):
    """weight · KL(teacher ‖ nested net); the teacher is the client's own net before this batch (FedResCuE).

    What takes the place of KL where targets are not classes, the task says (`Task.divergences`).
    """

    share: float
    weight: float = 1.0

    reads_its_nets_alone = True

    def nets(self, member: Member) -> tuple[Member, ...]:
        return (_net(member, self.share),)

    def __call__(self, view: View) -> Tensor:
        assert view.taught is not None, (
            "a learner with `taught` has the logits from before the batch"
        )
        logits = view.logits(_net(view.member, self.share))
        divergences = view.task.divergences(logits, view.taught, view.targets)
        # Where nothing counts the sum is 0, and so is the mean.
        return self.weight * divergences.sum() / view.task.counted(view.targets).sum().clamp(min=1)


@dataclass(frozen=True)
class FromTeacher(Objective):
    """A loss of the client's net on public samples, given the teacher's rows for them (`View.taught`)."""

    reads_its_nets_alone = True

    def nets(self, member: Member) -> tuple[Member, ...]:
        return (member,)

    def __call__(self, view: View) -> Tensor:
        assert view.taught is not None, "a learner with a `teacher` has its rows"
        return self.loss(view, view.logits(), view.taught)

    @abstractmethod
    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar.

        Args:
            view: The batch.
            logits: (sample, class, …) of the net.
            rows: (sample, …) of the teacher.
        """


@dataclass(frozen=True)
class Imitation(FromTeacher):
    """KL(teacher ‖ net) of logits at temperature 1, where the teacher's rows are logits (FedDF).

    Where targets are not classes, the task says how far outputs are from a teacher's (`Task.divergences`):
    the squared error for a regression with that loss.
    """

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        divergences = view.task.divergences(logits, rows, view.targets)
        return divergences.sum() / view.task.counted(view.targets).sum().clamp(min=1)


@dataclass(frozen=True)
class SoftLabels(FromTeacher):
    """Cross-entropy −Σ p·log q, where the teacher's rows p are probabilities over classes (DS-FL).

    A row of zeros has no effect.
    """

    def loss(self, view: View, logits: Tensor, rows: Tensor) -> Tensor:
        return -(rows * logits.log_softmax(1)).sum(1).mean()


@dataclass(frozen=True)
class Summed(Objective):
    """Several objectives, one gradient: slimmable training (Yu et al. 2018) sums over the widths."""

    objectives: tuple[Objective, ...]

    def nets(self, member: Member) -> tuple[Member, ...]:
        return tuple(
            dict.fromkeys(net for objective in self.objectives for net in objective.nets(member))
        )

    def passes(self, member: Member) -> tuple[Passes, ...]:
        """Return the passes of all; a net that several run on the batch is run once."""
        return together(one for objective in self.objectives for one in objective.passes(member))

    @property
    def copies(self) -> frozenset[str]:
        return frozenset[str]().union(*(objective.copies for objective in self.objectives))

    @property
    def terms(self) -> tuple[Objective, ...]:
        return tuple(term for objective in self.objectives for term in objective.terms)

    @property
    def reads_its_nets_alone(self) -> bool:
        return all(objective.reads_its_nets_alone for objective in self.objectives)

    def __call__(self, view: View) -> Tensor:
        return torch.stack([objective(view) for objective in self.objectives]).sum()


def together(passes: Iterable[Passes]) -> tuple[Passes, ...]:
    """Return the passes of objectives that are evaluated on one view, with shared runs listed once."""
    listed = list(passes)
    shared = dict.fromkeys(one for one in listed if one.on_batch)
    return (*shared, *(one for one in listed if not one.on_batch))


def apart(objective: Objective, member: Member) -> tuple[Objective, ...]:
    """Return the terms of a sum, with those that run the same nets joined.

    Their gradients can be taken one after another and added.
    """
    by_nets: dict[tuple[Member, ...], list[Objective]] = {}
    for term in objective.terms:
        by_nets.setdefault(term.nets(member), []).append(term)
    return tuple(_sum(terms) for terms in by_nets.values())


def _sum(terms: Sequence[Objective]) -> Objective:
    return terms[0] if len(terms) == 1 else Summed(tuple(terms))


def _net(member: Member, share: float | None) -> Member:
    """Return a client's own net, or the one nested in it at a share of the whole model."""
    return member if share is None else member.nested(share)


OBJECTIVES: dict[str, type[Wrapping]] = {
    "proximal": Proximal
}  # that settings can put around the loss


def found_wrapper(given: object) -> Wrapping:
    """Return a wrapper by its name or as `file.py:Class`; a wrapper is returned as it is.

    Raises:
        ConfigError: It is no wrapper, or the innermost objective in it would be replaced by the loss.
    """
    if isinstance(given, str):
        kind = find(OBJECTIVES, given, "objective")
        try:
            made = kind()
        except Exception as error:  # a class of the user's own may raise anything
            raise ConfigError(
                f"{given!r} was called for a Wrapping and failed: {said(error)}"
            ) from error
        return found_wrapper(made)
    if not isinstance(given, Wrapping):
        found = f"the class {given.__name__}" if isinstance(given, type) else f"{given!r}"
        names = ", ".join(map(repr, OBJECTIVES))
        raise ConfigError(
            f"{found} was asked for; an instance of a class derived from Wrapping fits, such as Proximal(mu=0.1), "
            f"or its name: {names}, or 'file.py:Class'. Another objective is chosen in `Method.learner`."
        )
    innermost = wrapped_chain(given)[-1].objective
    if innermost != TaskLoss():
        raise ConfigError(
            f"{type(given).__name__} was asked for around {innermost}; local training puts the loss there, which the "
            "other settings choose. Leave `objective` out of the innermost wrapper."
        )
    return given


def wrapped_chain(outermost: Wrapping) -> list[Wrapping]:
    """Return wrappers inside each other, the outermost first."""
    chain = [outermost]
    while isinstance(chain[-1].objective, Wrapping):
        chain.append(chain[-1].objective)
    return chain


def around(wrapper: Wrapping, loss: Objective) -> Objective:
    """Return a wrapper with the loss inside of its innermost wrapper."""
    for one in reversed(wrapped_chain(wrapper)):
        loss = replace(one, objective=loss)
    return loss
