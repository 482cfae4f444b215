"""The contract of an engine, which trains, evaluates and calibrates clients.

Only the engine can reach the samples of clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fedquilt.errors import BudgetError
from fedquilt.terms import Budget, ClientState, Job, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.fleets.fleet import Fleet
    from fedquilt.round.eval_jobs import EvalJob
    from fedquilt.round.federation import Federation, World
    from fedquilt.round.fold import Fold
    from fedquilt.round.scores import Score


# Takes nets and a number of samples, and returns each net's gradient of the mean loss over that
# many pooled training samples, by the weight's name.
Gradients = Callable[[Sequence[Submodel], int], list[dict[str, Tensor]]]


FATES = ("missing", "failed", "refused", "late")  # What may become of a request besides a reply


class Spent(NamedTuple):
    """Costs of a client's round: bytes both ways, and multiply-adds."""

    down: int = 0  # Bytes that the client received
    up: int = 0  # Bytes that arrived from the client
    macs: int = 0  # Multiply-adds of its training
    first: int = 0  # Bytes of `down` that the client gets once, such as its private net


@dataclass(frozen=True)
class RosterChange:
    """A device that takes part with a new budget or other samples from a round on."""

    client: int  # Number of its client
    budget: Budget
    size: int  # Training samples
    is_new: bool  # True: it joined in this round. False: it returned with other facts

    def to_dict(self) -> dict[str, Any]:
        """Return the change as values that JSON can hold."""
        budget, size = self.budget.bounds, self.size
        return {"client": self.client, "budget": budget, "size": size, "joined": self.is_new}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> RosterChange:
        """Return the change that `to_dict` wrote.

        Raises:
            ValueError: The budget is none.
        """
        try:
            budget = Budget(**plain["budget"])
        except BudgetError as error:
            raise ValueError(str(error)) from error
        return RosterChange(int(plain["client"]), budget, int(plain["size"]), bool(plain["joined"]))


@dataclass(frozen=True)
class Attendance:
    """Devices that were asked in a round of a deployment, and the fate of their replies."""

    asked: tuple[int, ...]  # Clients that got a request
    missing: Mapping[int, str]  # Clients without a reply, and the reason
    failed: Mapping[int, str]  # Clients whose device could not train, and its reason
    refused: Mapping[int, str]  # Clients whose reply was refused, and the reason
    anew: tuple[int, ...] = ()  # Clients that had lost their state and started anew
    wire_down: int = 0  # Bytes of all requests, with notes and headers
    wire_up: int = 0  # Bytes of all replies, with notes and headers
    # Clients whose reply came after the deadline, or not before the round closed, and the reason
    late: Mapping[int, str] = field(default_factory=dict)
    arrivals: tuple[
        RosterChange, ...
    ] = ()  # Devices that joined or have other facts from this round on

    @property
    def replied(self) -> tuple[int, ...]:
        """Return the clients that were asked and whose reply was used, in ascending order."""
        return tuple(sorted({*self.asked} - {*self.absent}))

    @property
    def absent(self) -> tuple[int, ...]:
        """Return the clients without a usable reply, in ascending order.

        Their reply is missing or late, says that the device failed, or was refused.
        """
        return tuple(sorted({**self.missing, **self.failed, **self.refused, **self.late}))

    def to_dict(self) -> dict[str, Any]:
        """Return the attendance as values that JSON can hold. Keys are texts."""
        reasons = {
            name: {str(client): reason for client, reason in getattr(self, name).items()}
            for name in FATES
        }
        lists: dict[str, Any] = {"asked": list(self.asked), "anew": list(self.anew)}
        if self.arrivals:
            lists["arrivals"] = [arrival.to_dict() for arrival in self.arrivals]
        return {**lists, **reasons, "wire_down": self.wire_down, "wire_up": self.wire_up}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Attendance:
        """Return the attendance that `to_dict` wrote.

        Earlier versions wrote no `late`. Rounds without arrivals have no `arrivals`.
        """
        missing, failed, refused, late = (
            {int(client): str(reason) for client, reason in plain.get(name, {}).items()}
            for name in FATES
        )
        return Attendance(
            tuple(map(int, plain["asked"])),
            missing,
            failed,
            refused,
            tuple(map(int, plain["anew"])),
            int(plain["wire_down"]),
            int(plain["wire_up"]),
            late,
            tuple(map(RosterChange.from_dict, plain.get("arrivals", ()))),
        )


@dataclass(frozen=True)
class EvaluationReport:
    """Devices that were asked to evaluate nets, and nets that could not be evaluated."""

    attendance: Attendance  # Devices that were asked, and the fate of their replies
    # Keys of nets that were not tested, because no device could measure their norm statistics
    uncalibrated: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as values that JSON can hold."""
        return {**self.attendance.to_dict(), "uncalibrated": list(self.uncalibrated)}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> EvaluationReport:
        """Return the report that `to_dict` wrote."""
        uncalibrated = tuple(map(str, plain["uncalibrated"]))
        return EvaluationReport(Attendance.from_dict(plain), uncalibrated)


@dataclass
class Outcome:
    """Client states, losses, costs and missing clients of one round of training."""

    # Client states that changed, by client and scope.
    memory: dict[tuple[int, str], ClientState] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)  # Mean training loss of each job.
    costs: dict[int, Spent] = field(default_factory=dict)  # By client.
    stacks: int = 0  # Number of groups of clients that were trained as one.
    missing: dict[int, str] = field(default_factory=dict)  # Clients that did not reply, and why.
    # Replies of real devices. None: the engine simulates clients.
    attendance: Attendance | None = None
    # Clients that missed the deadline, and the seconds that each takes at least. Engines leave it
    # empty.
    late: dict[int, float] = field(default_factory=dict)

    def charge(self, client: int, down: int, up: int, macs: int, first: int = 0) -> None:
        """Add the costs of a job to those of its client, in-place.

        Args:
            client: Number of the client.
            down: Bytes that it was sent.
            up: Bytes that arrived from it.
            macs: Multiply-adds of its training.
            first: Bytes of `down` that it gets only once.
        """
        new = Spent(down, up, macs, first)
        earlier = self.costs.get(client, Spent())
        self.costs[client] = Spent(
            *(old_cost + new_cost for old_cost, new_cost in zip(earlier, new, strict=True))
        )

    @property
    def total(self) -> Spent:
        """Return the sum of all clients' costs. It is zero if no client took part."""
        return Spent(*(sum(column) for column in zip(*self.costs.values(), strict=True)))

    def join(self, other: Outcome) -> None:
        """Add the outcome `other` of further clients of the same cohort to this one, in-place.

        Attendance and late clients are not joined, because engines that split a cohort have none.
        """
        self.memory.update(other.memory)
        self.losses += other.losses
        self.missing.update(other.missing)
        for client, cost in other.costs.items():
            self.charge(client, *cost)
        self.stacks += other.stacks


class Engine(ABC):
    """Base class of what trains and tests the clients of federations.

    The constructor takes samples and options. An engine keeps no state of a federation that a
    result depends on, because every call gets the whole federation. So several runs may use one
    engine, in any order.
    """

    device: torch.device  # Where the server's state is kept.
    # True: the engine may return outputs for single samples, which some metrics need.
    outputs_may_leave: ClassVar[bool] = False
    # True: `Server.memory` has the weights that clients keep. False: they are on devices, which add
    # them to the tests that need them.
    has_client_states: ClassVar[bool] = True
    # True: clients join and change their budgets while a run goes on. Then fleet and partition are
    # state of the run, and may be others when it is resumed.
    has_roster: ClassVar[bool] = False

    @abstractmethod
    def train(
        self, federation: Federation, server: Server, jobs: Sequence[Job], fold: Fold
    ) -> Outcome:
        """Train jobs on their clients, and add the resulting updates to the fold.

        Args:
            federation: World, method and link.
            server: State that the round starts from. It is not changed.
            jobs: Jobs of the round.
            fold: Fold that collects updates. It is changed in-place.

        Returns:
            The new client states, losses and costs, and the clients that did not reply.
        """

    def foreseen(
        self, federation: Federation, server: Server, jobs: Sequence[Job]
    ) -> dict[int, Spent]:
        """Return the costs of jobs by client, as far as they are known before training.

        Downloads and multiply-adds are exact. Uploads may turn out longer, but not shorter. An
        engine that knows nothing about a client leaves it out. If the client is late, that is found
        after it has trained.

        Args:
            federation: World, method and link.
            server: State that the round starts from.
            jobs: Jobs of the round.
        """
        return {}

    @abstractmethod
    def evaluate(
        self,
        federation: Federation,
        eval_jobs: Sequence[EvalJob],
        batch_size: int,
        by_domain: bool = False,
    ) -> list[Score]:
        """Test networks, each on the samples that its job names.

        Args:
            federation: World, method and link.
            eval_jobs: Tests to run.
            batch_size: Samples that are run together.
            by_domain: True: scores of each domain are returned too, in `Score.domains`.

        Returns:
            One score for each test, in the order of `eval_jobs`.
        """

    @abstractmethod
    def calibrate(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        client: int | None = None,
    ) -> list[dict[str, Tensor]]:
        """Measure the norm statistics of networks over training samples.

        Args:
            federation: World, method and link.
            nets: Sub-models and their weights. The weights are not changed.
            batch_size: Statistics are means over batches of this size.
            client: Client whose samples are used. None: the pooled samples of all clients.

        Returns:
            Norm statistics by name for each net, in the order of `nets`. They are empty for a net
            that nobody can measure.
        """

    @abstractmethod
    def pooled_gradients(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        samples: int,
    ) -> list[dict[str, Tensor]]:
        """Return the gradient of each network's mean loss over pooled training samples.

        The loss is the task's, without what a method adds to it. Nets run as in training, so that
        norms which use the statistics of the batch use those of batches of `batch_size`.

        Args:
            federation: Family, task and norm policy.
            nets: Sub-models and their weights.
            batch_size: Samples that are run together.
            samples: Most samples to use. They are the same for all nets, and for all calls with one
                seed.

        Returns:
            For each net, a tensor for every weight that it trains, by name.
        """

    @abstractmethod
    def on_public(self, world: World) -> Engine:
        """Return an engine whose only client has all public samples of `world`.

        The server trains its own nets with it.
        """

    @abstractmethod
    def size(self, client: int) -> int:
        """Return the number of training samples of a client."""

    @property
    @abstractmethod
    def tests_by_client(self) -> bool:
        """Return True if clients have test samples of their own."""

    @property
    @abstractmethod
    def has_validation(self) -> bool:
        """Return True if clients hold back some of their training samples for validation."""

    def evaluating(self, server: Server, fleet: Fleet, max_clients: int) -> Engine:
        """Return the engine that evaluates a state, which is this one by default.

        An engine whose clients are devices returns one that knows which devices it may ask.

        Args:
            server: State that is evaluated, with what the server remembers of clients.
            fleet: Clients and their budgets.
            max_clients: Most clients that are asked for one test.
        """
        return self

    @property
    def evaluation_report(self) -> EvaluationReport | None:
        """Return the devices that took part in the evaluations so far. None: none was asked."""
        return None

    def online(self) -> Sequence[int] | None:
        """Return the clients that can be reached now, in ascending order. None: all clients."""
        return None

    def counts(self, outcome: Outcome) -> bool:
        """Return True if the round of an outcome counts, and False if another cohort is asked.

        Simulated clients always reply, so that every round counts.
        """
        return True

    @property
    def settings(self) -> Mapping[str, bool | int | float | str]:
        """Return the options of the engine that change a result's last digits, by name.

        Checkpoints store them. By default there are none.
        """
        return {}
