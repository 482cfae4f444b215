"""Learners: all that a client does in one round, as a value."""

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
from fedquilt.precision import Precision
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.filters import All, Filter, Nothing
from fedquilt.round.training.local import Local
from fedquilt.round.training.objectives import Objective, TaskLoss
from fedquilt.round.training.optimizers import OptimiserState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.public import num_drawn
from fedquilt.round.training.regions import Everywhere, Region, masks_of
from fedquilt.round.training.state import MethodState
from fedquilt.tasks import Classification, Task
from fedquilt.terms import Submodel

if TYPE_CHECKING:
    from fedquilt.family.member import Member

Freeze = Literal["update", "gradient"]


@dataclass(frozen=True)
class Phase:
    """One update of a batch: what is minimised, and which positions it may move."""

    objective: Objective = TaskLoss()
    moves: Region = Everywhere()
    # Elsewhere the update is withheld, or only the gradient: then momentum and decay move what should stay.
    freeze: Freeze = "update"


@dataclass(frozen=True)
class Learner:
    """All a client does in one round; rebuilt on the client from the job and the configuration alone."""

    phases: tuple[Phase, ...]  # of a batch; where they are drawn, those of the first
    local: Local
    lr: float
    send: Filter = All()  # Weights that the client uploads
    receive: Filter | None = None  # Weights that the client downloads; None: those that it uploads
    keep: Filter = Nothing()
    # Weights of a net that is the client's own, such as a private net. They stay on the client: it keeps them between
    # rounds, and neither sends nor receives them. A client without them has the initial ones.
    private: Filter = Nothing()
    # Private weights are downloaded by a client that has none yet, which is charged. False: it draws them from the seed
    installs: bool = False
    keep_slots: bool = False
    class_rows: bool = (
        False  # of weights with a class axis, send only the rows of classes the client holds
    )
    times: int = 1  # that the client counts in the merge; 1 has no effect
    counts_steps: bool = False  # the client remembers its optimizer steps over all rounds, which the merge weights by
    paced: bool = False  # FedNova: report the effective step count
    mu: float = 0.0  # the proximal weight, which changes that count
    state: MethodState = MethodState()  # Slots and extras of the method on the client
    before: tuple[
        ClientPass, ...
    ] = ()  # Passes over samples before the first step, with the received weights
    after: tuple[
        ClientPass, ...
    ] = ()  # Passes over samples after the last step, with the trained weights
    taught: bool = (
        False  # objectives ask for the logits that the client's net gave before the batch
    )
    taught_by: str = ""  # Variant that gave these logits; empty: the client's own net
    # Name of an extra with a row for every public sample that it is about (`PublicRows`). Batches are then of these
    # samples, and objectives see the rows of a batch as `View.taught`. Empty: batches are of the client's own samples.
    teacher: str = ""
    teacher_draw: int = (
        0  # Public samples that are drawn for each round, which the rows are about; 0: all
    )
    lesson: Learner | None = (
        None  # Training on public samples, with a `teacher`, before that on the client's own
    )
    max_batches: int = 0  # Most batches of a round; 0: all of its epochs
    task: Task = Classification()  # whose loss the objectives wrap: that of the world
    # Share of the client's net, which the scaler divides by. Learners that differ in it alone are equal, so that
    # clients of unequal shares and equal members still train as one stack, each with its own share.
    share: float = field(default=1.0, compare=False)

    def __post_init__(self) -> None:
        if self.state or self.passes:
            self._check_names()

    def _check_names(self) -> None:
        """Refuse slots that the optimizer has, and passes with the same name."""
        wrong = {}
        if taken := set(self.state.slots) & set(self.local.optimiser.slots):
            wrong["state"] = (
                f"the slot {min(taken)!r} was asked for, which the local optimizer has; another name would work."
            )
        names = [one.name for one in self.passes]
        if repeated := sorted(name for name in set(names) if names.count(name) > 1):
            wrong["before and after"] = (
                f"two passes named {repeated[0]!r} were asked for; passes with unequal names would work."
            )
        refuse(self, wrong)

    @property
    def passes(self) -> tuple[ClientPass, ...]:
        """Return the passes over samples that are not steps."""
        return (*self.before, *self.after)

    @property
    def num_slots(self) -> int:
        """Return how many slots a client has while it trains, of its optimizer and of the method."""
        return len(self.local.optimiser.slots) + len(self.state.slots)

    def slotted(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights that the method's slots belong to: trained ones that travel both ways."""
        if not self.state:
            return ()
        shared = {*self.sent(member)} & {*self.received(member)}
        return tuple(name for name in member.trainable if name in shared)

    @property
    def drawn(self) -> bool:
        """Return True if phases differ between steps."""
        return type(self).phases_at is not Learner.phases_at

    def phases_at(self, step: int) -> tuple[Phase, ...]:
        """The phases of one batch; learners that draw them do so by round and step, so that clients stack."""
        return self.phases

    def possible_phases(self, member: Member) -> tuple[Phase, ...]:
        """Return phases among which are those of the largest step of any round, as far as memory goes."""
        return self.phases

    def moves(self, steps: int) -> int:
        """Return the optimizer steps of a number of batches. Every batch has the same number of phases."""
        return steps * len(self.phases)

    def nets(self, member: Member) -> tuple[Member, ...]:
        """Return the nets that a batch of the round may run, each once."""
        return nets_of(self.phases, member)

    def activation_sets(self, member: Member) -> int:
        """Return how many sets of activations of one net are in memory at once, at most."""
        passes = [one for phase in self.phases for one in phase.objective.passes(member)]
        return max((one.saved for one in passes), default=1)

    def changes_samples(self, member: Member) -> bool:
        """Return True if nets run on other samples than the batch's, such as attacked ones."""
        return not all(
            one.on_batch for phase in self.phases for one in phase.objective.passes(member)
        )

    def training_step(self, member: Member, precision: Precision) -> TrainingStep:
        """Describe the largest step as far as memory depends on it.

        Phases run one after another. The description is an upper bound for each: it has the most runs of the
        client's own net, the most runs of all nets, and every nested net of any phase. Nested nets of a phase without
        the client's own are counted as if they had its size. Logits of a teacher are small, and not counted.

        Args:
            member: The client's net. Nets nested in it are described by their shares.
            precision: Precision of the run.
        """
        phases = self.possible_phases(member)
        passes, runs = 1, 1
        nested = Counter[float]()
        for phase in phases:
            nets = [one.net for one in phase.objective.passes(member) for _ in range(one.saved)]
            shares = [net.share for net in nets if net.share is not None] if member in nets else []
            # A pair of nets has the activations of both, so that one run of each is one run of the pair.
            pairs = Counter(
                net.arch.variant for net in nets if net.share is None and net.is_part_of(member)
            )
            surplus = pairs.total() - max(pairs.values(), default=0)
            passes = max(passes, len(nets) - len(shares) - surplus)
            runs = max(runs, len(nets) - surplus)
            nested |= Counter(shares)
        most = None if runs - passes >= nested.total() else runs - passes
        local = self.local
        copies = frozenset[str]().union(*(phase.objective.copies for phase in phases))
        slots = self.num_slots + len(copies)
        # A last batch that is not full may be joined to the one before it.
        batch_size = 2 * local.batch_size - 1 if local.last_batch == "merge" else local.batch_size
        return TrainingStep(batch_size, slots, precision, passes, tuple(nested.elements()), most)

    @property
    def timeless(self) -> Self:
        """Without what changes from round to round: what has been recorded of one round serves the next."""
        return replace(self, lr=0.0, lesson=None, max_batches=0)

    def moved(self, member: Member) -> tuple[str, ...]:
        """The weights that training changes, and the statistics it tracks."""
        return _moved_names(self.local.norm, member)

    def names(self, member: Member) -> tuple[str, ...]:
        """The weights a client holds while it trains: what changes, and what is carried along."""
        return _held_names(self.local.norm, member)

    def sent(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights that travel to the server."""
        names = _sent_names(self.send, self.local.norm, member)
        return _without(names, self.private, member) if self.private != Nothing() else names

    def received(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights that travel to the client, and of constants that are cut with them.

        Weights that the member does not train are among them.
        """
        chosen = self.send if self.receive is None else self.receive
        whole = member.unfrozen
        names = (*_shared_names(chosen, self.local.norm, whole), *whole.carried)
        return _without(names, self.private, whole) if self.private != Nothing() else names

    def kept(self, member: Member) -> tuple[str, ...]:
        """The weights that stay on the client for its next round."""
        return _kept_names(self.keep, self.private, self.local.norm, member)

    def installed(self, member: Member) -> tuple[str, ...]:
        """Return the names of the weights that a client downloads when it has none of them yet."""
        return _private_names(self.private, self.local.norm, member) if self.installs else ()

    def teaching_net(self, member: Member) -> Member:
        """Return the net whose logits before a batch objectives see, if the learner sets `taught`."""
        return member.at(self.taught_by) if self.taught_by else member

    def upload(self, member: Member, submodel: Submodel, held: Tensor) -> Submodel:
        """Return the positions that are sent."""
        rows = {}
        if self.class_rows and member.class_rows:
            rows["class"] = Positions.chosen(held.nonzero().flatten().tolist())
        return replace(submodel, index=Index({**submodel.index, **rows}))

    def masks(
        self, member: Member, phase: Phase, device: torch.device
    ) -> Mapping[str, Tensor | bool]:
        """Return, by weight, a mask of the positions that a phase may change. It is computed once."""
        return masks_of(member, phase.moves, device)

    def pace(self, steps: int) -> float:
        """FedNova's a_i, for methods that ask; 1 for the others."""
        return self.local.optimiser.pace(steps, self.lr, self.mu) if self.paced else 1.0

    def macs(self, member: Member, sizes: Sequence[int]) -> int:
        """Multiply-adds of training on batches of these sizes; a backward pass costs two forward ones."""
        if not self.drawn:
            return sum(sizes) * self._macs(member, self.phases)
        return sum(
            size * self._macs(member, self.phases_at(step)) for step, size in enumerate(sizes)
        )

    def lesson_macs(self, member: Member, public: int) -> int:
        """Return the multiply-adds of the lesson, given the number of public samples."""
        if self.lesson is None:
            return 0
        count = num_drawn(self.lesson.teacher_draw, public)
        return self.lesson.macs(
            member, [len(rows) for rows in itinerary(count, self.lesson.local, 0)]
        )

    def pass_macs(self, member: Member, own: int, public: int) -> int:
        """Return the multiply-adds of the passes that are not steps.

        Args:
            member: The client's net.
            own: Number of the client's samples.
            public: Number of public samples.
        """
        return sum(
            one.macs(member) * (num_drawn(one.draw, public) if one.public else own)
            for one in self.passes
        )

    def _macs(self, member: Member, phases: tuple[Phase, ...]) -> int:
        teaching = self.teaching_net(member).running.macs if self.taught else 0
        return teaching + sum(
            one.macs for phase in phases for one in phase.objective.passes(member)
        )

    def start_slots(self, weights: State, member: Member) -> OptimiserState:
        """Empty optimiser slots."""
        return {
            slot: {name: torch.zeros_like(weights[name]) for name in member.trainable}
            for slot in self.local.optimiser.slots
        }


def nets_of(phases: Sequence[Phase], member: Member) -> tuple[Member, ...]:
    """Return the nets that phases run, each once."""
    return tuple(dict.fromkeys(net for phase in phases for net in phase.objective.nets(member)))


# Names are asked for several times per client and round. They depend on few values, so that each is found once.


@lru_cache(maxsize=256)
def _moved_names(norm: NormPolicy, member: Member) -> tuple[str, ...]:
    return (*member.trainable, *(member.statistics if norm.tracks else ()))


@lru_cache(maxsize=256)
def _held_names(norm: NormPolicy, member: Member) -> tuple[str, ...]:
    moved = _moved_names(norm, member)
    whole = member.unfrozen
    return tuple(dict.fromkeys((*moved, *_moved_names(norm, whole), *whole.carried)))


@lru_cache(maxsize=256)
def _sent_names(chosen: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    """Return what a filter would send of a member that trains all its weights, without those that this one does not."""
    frozen = {*member.frozen}
    return tuple(
        name for name in _shared_names(chosen, norm, member.unfrozen) if name not in frozen
    )


@lru_cache(maxsize=256)
def _shared_names(chosen: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    """Return the names of a filter's weights that may leave a client or reach it, in the order of `Learner.names`."""
    names = chosen.names(member) - norm.kept(member)
    return tuple(name for name in (*_moved_names(norm, member), *member.carried) if name in names)


@lru_cache(maxsize=256)
def _without(names: tuple[str, ...], private: Filter, member: Member) -> tuple[str, ...]:
    """Return names without those that a filter chooses of a member."""
    own = private.names(member)
    return tuple(name for name in names if name not in own)


@lru_cache(maxsize=256)
def _private_names(private: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    own = private.names(member)
    return tuple(name for name in _held_names(norm, member) if name in own)


@lru_cache(maxsize=256)
def _kept_names(keep: Filter, private: Filter, norm: NormPolicy, member: Member) -> tuple[str, ...]:
    whole = member.unfrozen
    names = keep.names(whole) | norm.kept(whole) | private.names(whole)
    return tuple(name for name in _held_names(norm, member) if name in names)
