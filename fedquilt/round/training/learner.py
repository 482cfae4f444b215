"""Learners describe all that a client does in one round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, Self

import torch
from torch import Tensor

from fedquilt.axes import Index, Positions
from fedquilt.checks import refuse
from fedquilt.family.cost import TrainingStep
from fedquilt.family.norms import NormPolicy
from fedquilt.hardware.precision import Precision
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.filters import All, Filter, Nothing
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import Objective, TaskLoss
from fedquilt.round.training.optimizers import OptimizerState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.public import num_drawn
from fedquilt.round.training.regions import Everywhere, Region, masks_of
from fedquilt.round.training.state import MethodState
from fedquilt.tasks import Classification, Task
from fedquilt.terms import Submodel

if TYPE_CHECKING:
    from fedquilt.family.member import Member

Freeze = Literal["update", "gradient"]  # How weights are frozen. `Phase` explains it.


@dataclass(frozen=True)
class Phase:
    """One optimizer step on a batch: an objective, and the positions that the step may change."""

    objective: Objective = TaskLoss()  # Loss that is minimized.
    moves: Region = Everywhere()  # Positions that may change.
    # How other positions are frozen. "update": they do not change. "gradient": their gradient is
    # zero, but momentum and weight decay still change them.
    freeze: Freeze = "update"


@dataclass(frozen=True)
class Learner:
    """Description of all that a client does in one round.

    A client builds it from the job and the settings of the run alone.
    """

    phases: tuple[Phase, ...]  # Phases of a batch. If they are drawn, those of the first batch
    local: LocalTraining  # Settings of local training
    lr: float  # Learning rate of the round. `rate` returns that of a batch
    send: Filter = All()  # Weights that the client uploads
    receive: Filter | None = None  # Weights that the client downloads; None: those that it uploads
    keep: Filter = Nothing()  # Weights that the client keeps between rounds
    # Weights of a client's private net. The client keeps them between rounds, and neither sends nor
    # receives them. Before its first round it has the initial ones.
    private: Filter = Nothing()
    # Download private weights once, which costs bytes. False: the client draws them from the seed
    installs: bool = False
    keep_slots: bool = False  # Keep the optimizer's slots between rounds
    class_rows: bool = False  # Send only the output rows of classes that the client holds
    times: int = 1  # Factor of the client's weight in the merge. 1 has no effect
    # Count the client's optimizer steps over all rounds, for a merge that weights by them
    counts_steps: bool = False
    paced: bool = False  # Report the effective step count (FedNova)
    mu: float = 0.0  # Weight of the proximal term, which changes the effective step count
    state: MethodState = MethodState()  # Slots and extras of the method on the client
    # Passes over samples before the first step, with the received weights
    before: tuple[ClientPass, ...] = ()
    # Passes over samples after the last step, with the trained weights
    after: tuple[ClientPass, ...] = ()
    # Objectives see the logits of the client's net before the batch, as `View.taught`
    taught: bool = False
    taught_by: str = ""  # Variant that gave these logits; empty: the client's own net
    # Name of an extra with a row for every public sample that it is about (`PublicRows`). Batches
    # are then of these samples, and objectives see the rows of a batch as `View.taught`. Empty:
    # batches are of the client's own samples.
    teacher: str = ""
    # Number of public samples that are drawn for each round, one per row of `teacher`. 0: all
    teacher_draw: int = 0
    # Training on public samples with a `teacher`, before that on the client's own samples
    lesson: Learner | None = None
    max_batches: int = 0  # Most batches of a round; 0: all of its epochs
    task: Task = Classification()  # Task of the run, whose loss objectives use
    # Share of the client's net, which the scaler divides by. It is ignored in comparisons, so that
    # clients with equal members and different shares still train as one stack (the test
    # `test_clients_of_one_member_are_one_stack_whatever_their_shares`).
    share: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        if self.state or self.passes:
            self._check_names()

    def _check_names(self) -> None:
        """Refuse slots that are named as the optimizer's, and passes with the same name.

        Raises:
            ConfigError: Lists all such names.
        """
        problems = {}
        if clash := set(self.state.slots) & set(self.local.optimizer.slots):
            problems["state"] = (
                f"the slot {min(clash)!r} was asked for, which the local optimizer has; another "
                "name would work."
            )
        names = [client_pass.name for client_pass in self.passes]
        if repeated := sorted(name for name in set(names) if names.count(name) > 1):
            problems["before and after"] = (
                f"two passes named {repeated[0]!r} were asked for; passes with unequal names would "
                "work."
            )
        refuse(self, problems)

    @property
    def passes(self) -> tuple[ClientPass, ...]:
        """Return all passes over samples that are no optimizer steps, `before` and `after`."""
        return (*self.before, *self.after)

    @property
    def num_slots(self) -> int:
        """Return the number of slots per weight in training: those of optimizer and method."""
        return len(self.local.optimizer.slots) + len(self.state.slots)

    def slotted(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights of `member` that have slots of the method.

        These are trained weights that the client both receives and sends.
        """
        if not self.state:
            return ()
        shared = {*self.sent(member)} & {*self.received(member)}
        return tuple(name for name in member.trainable if name in shared)

    @property
    def drawn(self) -> bool:
        """Return True if phases may differ between batches, because `phases_at` is overridden."""
        return type(self).phases_at is not Learner.phases_at

    def phases_at(self, step: int) -> tuple[Phase, ...]:
        """Return the phases of the batch number `step` of a round, counted from 0.

        By default they are the same for all batches. A learner may draw them from the round and the
        step. They must not depend on the client, so that clients can be stacked.
        """
        return self.phases

    def possible_phases(self, member: Member) -> tuple[Phase, ...]:
        """Return phases that include the one of any round with the most memory for `member`.

        Memory is estimated from them. By default they are `phases`.
        """
        return self.phases

    def moves(self, steps: int) -> int:
        """Return the optimizer steps of `steps` batches: one step per phase of each batch."""
        return steps * len(self.phases)

    def nets(self, member: Member) -> tuple[Member, ...]:
        """Return the nets that the objectives of all phases run, each once.

        They are `member` itself, the client's net, or nets nested in it.
        """
        return nets_of(self.phases, member)

    def activation_sets(self, member: Member) -> int:
        """Return the most sets of activations of one net of `member` that are in memory at once.

        It is 1 if a net runs once on a batch, and more for clean and attacked samples.
        """
        passes = [
            net_passes for phase in self.phases for net_passes in phase.objective.passes(member)
        ]
        return max((net_passes.saved for net_passes in passes), default=1)

    def changes_samples(self, member: Member) -> bool:
        """Return True if nets of `member` run on other samples than the batch's.

        Attacked samples are an example.
        """
        return not all(
            net_passes.on_batch
            for phase in self.phases
            for net_passes in phase.objective.passes(member)
        )

    def training_step(self, member: Member, precision: Precision) -> TrainingStep:
        """Return the quantities of a step that memory depends on, for the largest step of a round.

        Phases run one after another. The description is an upper bound for each: it has the most
        runs of the client's own net, the most runs of all nets, and every nested net of any phase.
        Nested nets of a phase without the client's own are counted as if they had its size. Logits
        of a teacher are small, and not counted.

        Args:
            member: The client's net. Nets nested in it are described by their shares.
            precision: Precision of the run.
        """
        phases = self.possible_phases(member)
        passes, runs = 1, 1
        nested = Counter[float]()
        for phase in phases:
            nets = [
                net_passes.net
                for net_passes in phase.objective.passes(member)
                for _ in range(net_passes.saved)
            ]
            shares = [net.share for net in nets if net.share is not None] if member in nets else []
            # The activations of a pair of nets are those of both. So one run of each net counts as
            # one run of the pair.
            pairs = Counter(
                net.arch.variant for net in nets if net.share is None and net.is_part_of(member)
            )
            surplus = pairs.total() - max(pairs.values(), default=0)
            passes = max(passes, len(nets) - len(shares) - surplus)
            runs = max(runs, len(nets) - surplus)
            nested |= Counter(shares)
        max_nested = None if runs - passes >= nested.total() else runs - passes
        local = self.local
        copies = frozenset[str]().union(*(phase.objective.copies for phase in phases))
        slots = self.num_slots + len(copies)
        # A last batch that is not full may be merged with the one before it.
        batch_size = 2 * local.batch_size - 1 if local.last_batch == "merge" else local.batch_size
        return TrainingStep(
            batch_size, slots, precision, passes, tuple(nested.elements()), max_nested
        )

    @property
    def timeless(self) -> Self:
        """Return the learner without the fields that change from round to round.

        It is a key under which steps captured in one round are found in the next.
        """
        return replace(self, lr=0.0, lesson=None, max_batches=0)

    def moved(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights of `member` that training changes.

        Norm statistics are included if the norm policy tracks them.
        """
        return _moved_names(self.local.norm, member)

    def names(self, member: Member) -> tuple[str, ...]:
        """Return the names of all tensors of `member` that a client holds.

        These are trained and frozen weights, norm statistics that the policy tracks, and constants.
        """
        return _held_names(self.local.norm, member)

    def sent(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights of `member` that a client sends to the server.

        Frozen and private weights, and those that the norm policy keeps local, are left out.
        """
        names = _sent_names(self.send, self.local.norm, member)
        return _without(names, self.private, member) if self.private != Nothing() else names

    def received(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights that a client receives, and of constants cut with them.

        Weights that `member` does not train are included. Private weights, and those that the norm
        policy keeps local, are left out.
        """
        selection = self.send if self.receive is None else self.receive
        unfrozen = member.unfrozen
        names = (*_shared_names(selection, self.local.norm, unfrozen), *unfrozen.carried)
        return _without(names, self.private, unfrozen) if self.private != Nothing() else names

    def kept(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights of `member` that a client keeps for its next round.

        These are weights that `keep` or `private` selects, and those that the norm policy keeps
        local.
        """
        return _kept_names(self.keep, self.private, self.local.norm, member)

    def installed(self, member: Member) -> tuple[str, ...]:
        """Return the names of the private weights of `member` that a client downloads once.

        It downloads them when it has none of them yet. The result is empty unless `installs` is
        set.
        """
        return _private_names(self.private, self.local.norm, member) if self.installs else ()

    def teaching_net(self, member: Member) -> Member:
        """Return the net of `member` whose logits objectives see as `View.taught`.

        It is `member` itself unless `taught_by` names a variant. It has an effect only if `taught`
        is set.
        """
        return member.at(self.taught_by) if self.taught_by else member

    def upload(self, member: Member, submodel: Submodel, classes_present: Tensor) -> Submodel:
        """Return the positions that a client sends.

        They are those that it holds. If `class_rows` is set, output rows of classes without samples
        are left out.

        Args:
            member: The client's net.
            submodel: Positions that the client holds.
            classes_present: (class,) True where the client has samples of the class.
        """
        rows = {}
        if self.class_rows and member.class_rows:
            rows["class"] = Positions.chosen(classes_present.nonzero().flatten().tolist())
        return replace(submodel, index=Index({**submodel.index, **rows}))

    def masks(
        self, member: Member, phase: Phase, device: torch.device
    ) -> Mapping[str, Tensor | bool]:
        """Return, by weight, a mask of the positions that a phase may change. Masks are cached.

        A mask is True (all positions), False (none), or a boolean tensor of the weight's shape.

        Args:
            member: The client's net.
            phase: Phase of a batch.
            device: Device of the masks.
        """
        return masks_of(member, phase.moves, device)

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate of a batch: the round's rate times `local.within_round`.

        Args:
            step: Number of the client's batches before this one in the round.
            steps: Number of the client's batches in the round.
        """
        return self.lr * self.local.within_round(step, steps)

    def mean_rate(self, steps: int) -> float:
        """Return the mean learning rate over the `steps` batches of a round, or `lr` if 0."""
        factors = self.local.within_round.factors(steps)
        return self.lr * (sum(factors) / steps) if steps else self.lr

    def effective_steps(self, steps: int) -> float:
        """Return FedNova's ‖a_i‖₁ for a round of `steps` batches, or 1 if `paced` is not set."""
        if not self.paced:
            return 1.0
        return self.local.optimizer.effective_steps(
            self.local.within_round.factors(steps), self.lr, self.mu
        )

    def macs(self, member: Member, sizes: Sequence[int]) -> int:
        """Return the multiply-adds of training `member` on batches of these sizes.

        A backward pass costs as much as two forward passes.
        """
        if not self.drawn:
            return sum(sizes) * self._macs(member, self.phases)
        return sum(
            size * self._macs(member, self.phases_at(step)) for step, size in enumerate(sizes)
        )

    def lesson_macs(self, member: Member, public: int) -> int:
        """Return the multiply-adds of the lesson on public samples, or 0 if there is none.

        Args:
            member: Net that the client trains.
            public: Number of public samples.
        """
        if self.lesson is None:
            return 0
        count = num_drawn(self.lesson.teacher_draw, public)
        return self.lesson.macs(
            member, [len(rows) for rows in itinerary(count, self.lesson.local, 0)]
        )

    def pass_macs(self, member: Member, num_own: int, num_public: int) -> int:
        """Return the multiply-adds of the passes before and after training.

        Args:
            member: The client's net.
            num_own: Number of the client's samples.
            num_public: Number of public samples.
        """
        return sum(
            client_pass.macs(member)
            * (num_drawn(client_pass.draw, num_public) if client_pass.public else num_own)
            for client_pass in self.passes
        )

    def _macs(self, member: Member, phases: tuple[Phase, ...]) -> int:
        teaching = self.teaching_net(member).running.macs if self.taught else 0
        return teaching + sum(
            net_passes.macs for phase in phases for net_passes in phase.objective.passes(member)
        )

    def start_slots(self, weights: State, member: Member) -> OptimizerState:
        """Return optimizer slots filled with zeros, by slot and name of the trained weight.

        Args:
            weights: Weights by name, whose shapes, dtype and device the slots have.
            member: Net that is trained.
        """
        return {
            slot: {name: torch.zeros_like(weights[name]) for name in member.trainable}
            for slot in self.local.optimizer.slots
        }


def nets_of(phases: Sequence[Phase], member: Member) -> tuple[Member, ...]:
    """Return the nets that objectives of phases run, each once: `member` or nets nested in it."""
    return tuple(dict.fromkeys(net for phase in phases for net in phase.objective.nets(member)))


# Names are needed several times per client and round. They depend on few values, so that results
# are cached.


@lru_cache(maxsize=256)
def _moved_names(norm: NormPolicy, member: Member) -> tuple[str, ...]:
    return (*member.trainable, *(member.statistics if norm.tracks else ()))


@lru_cache(maxsize=256)
def _held_names(norm: NormPolicy, member: Member) -> tuple[str, ...]:
    moved = _moved_names(norm, member)
    unfrozen = member.unfrozen
    return tuple(dict.fromkeys((*moved, *_moved_names(norm, unfrozen), *unfrozen.carried)))


@lru_cache(maxsize=256)
def _sent_names(selection: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    """Return the names of a member's weights that a filter selects for sending.

    Weights that are frozen in `member`, and those that the norm policy keeps local, are left out.
    """
    frozen = {*member.frozen}
    return tuple(
        name for name in _shared_names(selection, norm, member.unfrozen) if name not in frozen
    )


@lru_cache(maxsize=256)
def _shared_names(selection: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    """Return the names of a member's weights that a filter selects, as `Learner.names` orders them.

    Those that the norm policy keeps local are left out.
    """
    names = selection.names(member) - norm.kept(member)
    return tuple(name for name in (*_moved_names(norm, member), *member.carried) if name in names)


@lru_cache(maxsize=256)
def _without(names: tuple[str, ...], private: Filter, member: Member) -> tuple[str, ...]:
    """Return `names` in order, without those of `member` that the filter `private` selects."""
    private_names = private.names(member)
    return tuple(name for name in names if name not in private_names)


@lru_cache(maxsize=256)
def _private_names(private: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    selected = private.names(member)
    return tuple(name for name in _held_names(norm, member) if name in selected)


@lru_cache(maxsize=256)
def _kept_names(keep: Filter, private: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    unfrozen = member.unfrozen
    names = keep.names(unfrozen) | norm.kept(unfrozen) | private.names(unfrozen)
    return tuple(name for name in _held_names(norm, member) if name in names)
