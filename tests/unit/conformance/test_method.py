"""Checks of methods: those of the package pass, and every check fails for some method."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from fedquilt.conformance.checks import CHECKS
from fedquilt.conformance.method import Finding, check_method
from fedquilt.hardware.generators import random_state
from fedquilt.methods import METHODS, FedAvg
from fedquilt.methods.api import (
    AdversarialTraining,
    Arch,
    Budget,
    Client,
    Fold,
    Job,
    Learner,
    LocalTraining,
    Mean,
    Method,
    Phase,
    Server,
    Submodel,
    Submodels,
    Update,
    Weights,
    World,
    Wrapping,
    prefix,
    windows,
)

QUICK = ("fedbn", "fedrolex")


def finding(method: Method, check: str) -> Finding:
    (found,) = check_method(method, [check])
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in METHODS],
)
def test_methods_of_the_package_pass(name):
    found = check_method(METHODS[name]())
    assert [one.check for one in found] == list(CHECKS)
    assert [(one.check, one.detail) for one in found if one.status == "failed"] == []
    skipped = {one.check for one in found if one.status == "skipped"}
    assert skipped == ({"budgets"} if METHODS[name]().ignores_budgets else set())


def test_a_method_that_grows_models_is_checked_in_every_stage():
    found = check_method(METHODS["progfed"](), ["learner"])
    # four clients, two stages
    assert [(one.status, one.detail) for one in found] == [
        ("passed", "8 learners are hashable values, and equal when asked again")
    ]


@pytest.mark.slow
def test_a_method_that_attacks_is_checked_on_a_net_with_norms_in_pairs():
    found = check_method(
        METHODS["heterofl"](local=LocalTraining(adversarial=AdversarialTraining()))
    )
    assert [(one.check, one.detail) for one in found if one.status != "passed"] == []


# --- methods with one mistake each --------------------------------------------------------------


def whole_window(arch: Arch, start: int, world: World) -> Submodel:
    return windows(arch, dict.fromkeys(arch.sizes, start), world.family.layout.sizes)


@dataclass(frozen=True)
class TooLarge(Method):
    """A method that plans the whole model for every client."""

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [prefix(world.family.whole)]


@dataclass(frozen=True)
class Unreproducible(Method):
    """A method that draws windows from Python's global generator."""

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return [whole_window(self.fit(client.budget, world), random.randrange(1000), world)]


@dataclass(frozen=True)
class NoSuchPositions(Method):
    """A method that plans positions that an axis does not have."""

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        arch = self.fit(client.budget, world)
        return [windows(arch, dict.fromkeys(arch.sizes, 5), dict.fromkeys(arch.sizes, 10**6))]


@dataclass(frozen=True)
class Listed(Wrapping):
    factors: Sequence[float] = ()

    def __call__(self, view):
        return self.objective(view)


@dataclass(frozen=True)
class Unhashable(Method):
    """A method with a list in its learner."""

    def learner(self, job: Job, world: World) -> Learner:
        base = super().learner(job, world)
        return replace(base, phases=(Phase(Listed(base.phases[0].objective, [1.0, 2.0])),))


@dataclass(frozen=True)
class Moody(Method):
    """A method that draws a learning rate which no device could draw again."""

    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), lr=0.01 + 0.01 * float(torch.rand(())))


class WithoutJoin(Mean):
    def join(self, other):
        raise NotImplementedError("the order of clients matters")


class ForgetfulJoin(Mean):
    def join(self, other):
        """Ignore the other fold."""


class DoubledAlone(Mean):
    """A method that counts clients twice if they arrive one by one, so that results depend on the
    engine.
    """

    def add(self, update: Update) -> None:
        super().add(replace(update, times=2 if update.job.client.id % 2 else 1))


class AllMustArrive(Mean):
    """A method that expects every position that was asked for."""

    def _check(self, updates: Sequence[Update]) -> None:
        if any(sent.submodel != update.job.submodel for update in updates for sent in update.sent):
            raise ValueError("positions are missing")

    def add(self, update: Update) -> None:
        self._check([update])
        super().add(update)

    def add_stack(self, updates: Sequence[Update], stacked: Sequence[Weights]) -> None:
        self._check(updates)
        super().add_stack(updates, stacked)


@dataclass(frozen=True)
class Folding(Method):
    """A method with its own fold, which subclasses name."""

    kind: ClassVar[type[Mean]] = Mean

    def fold(self, server: Server, world: World) -> Fold:
        return self.kind(world.family.cutter).begin(server)


@dataclass(frozen=True)
class Unjoinable(Folding):
    kind = WithoutJoin


@dataclass(frozen=True)
class Forgetful(Folding):
    kind = ForgetfulJoin


@dataclass(frozen=True)
class Uneven(Folding):
    kind = DoubledAlone


@dataclass(frozen=True)
class Trusting(Folding):
    kind = AllMustArrive


@dataclass(frozen=True)
class OwnSlotsOnly(Method):
    """A method that expects no further slots in client states, although a codec with feedback adds
    one.
    """

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        if any(memory.slots for memory in server.memory.values()):
            raise ValueError("who wrote these slots?")
        return super().plan(server, client, world)


@dataclass(frozen=True)
class CountsItself(Method):
    """A method with a counter outside of the server's state, which a checkpoint does not have."""

    calls: ClassVar[list[int]] = []

    def init(self, world: World) -> Server:
        self.calls.clear()
        return super().init(world)

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        self.calls.append(1)
        return [whole_window(self.fit(client.budget, world), len(self.calls), world)]


@dataclass(frozen=True)
class Unwritable(Method):
    """A method with a setting that no file can hold."""

    transform: Callable[[float], float] = abs


@dataclass(frozen=True)
class Doubling(Method):
    """A method that changes a setting whenever an instance is created."""

    factor: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "factor", 2 * self.factor)


@dataclass(frozen=True)
class NeverSettled(Method):
    factor: float = 1.0

    def settled(self, rounds: int) -> NeverSettled:
        return replace(self, factor=self.factor / rounds)


@dataclass(frozen=True)
class Generous(Method):
    """A method that deploys the whole model to every device."""

    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        return (prefix(world.family.whole),)


@dataclass(frozen=True)
class Pair(Method):
    """A method that deploys two nets where one is allowed."""

    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        net = prefix(world.family.fit(budget))
        return (net, net)


@dataclass(frozen=True)
class Changing(Method):
    """A method that deploys other channels in every call."""

    calls: ClassVar[list[int]] = []

    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        self.calls.append(1)
        return (whole_window(world.family.fit(budget), len(self.calls), world),)


@dataclass(frozen=True)
class Idle(Method):
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        return []


BROKEN = [
    (
        Unwritable(transform=lambda x: x),
        "settings",
        "Unwritable.transform: a function cannot be written to a file",
    ),
    (Doubling(), "settings", "factor is 8.0 when it is read back from a config.toml, and was 4.0"),
    (NeverSettled(), "settings", "settled(3) of a method that is settled changes it"),
    (
        TooLarge(),
        "budgets",
        "TooLarge planned more for client 1 in round 1 than its budget (share 0.5) allows",
    ),
    (Unreproducible(), "plan", "when it was called again. It may depend on its arguments alone"),
    (NoSuchPositions(), "plan", "Any 8 distinct positions from 0 fit"),
    (Unhashable(), "learner", "cannot be hashed (unhashable type: 'list')"),
    (Moody(), "learner", "It may depend on the job and the world alone"),
    (Idle(), "run", "Idle.plan returned nothing to train"),
    (Uneven(), "engines", "sequential and vectorized differ by"),
    (Unjoinable(), "join", "the fold WithoutJoin cannot take another's partial result"),
    (Forgetful(), "join", "one fold and two joined folds differ by"),
    (
        Unreproducible(),
        "determinism",
        "a run and the same run with another global random state differ by",
    ),
    (
        CountsItself(),
        "resume",
        "a run and the same run stopped after round 1 and resumed differ by",
    ),
    (Trusting(), "lossy link", "ValueError: positions are missing"),
    (OwnSlotsOnly(), "coded link", "ValueError: who wrote these slots?"),
    (Generous(), "deploy", "the budget share 0.5 allows less"),
    (Changing(), "deploy", "Both come from deploy, which may depend on its arguments alone"),
    (Pair(), "export", "Pair trains 2 nets"),
]


@pytest.mark.parametrize(
    ("method", "check", "reason"),
    BROKEN,
    ids=[f"{check}-{type(method).__name__}" for method, check, _ in BROKEN],
)
def test_a_mistake_is_found(method, check, reason):
    found = finding(method, check)
    assert found.status == "failed"
    assert reason in found.detail


def test_every_check_can_fail():
    assert {check for _, check, _ in BROKEN} == set(CHECKS)


@pytest.mark.slow
def test_one_mistake_fails_no_other_checks():
    """A method with one mistake passes all other checks, so that a reader sees which one it is."""
    others = [check for check in CHECKS if check != "join"]
    assert {one.status for one in check_method(Forgetful(), others)} == {"passed"}


def test_checks_that_need_a_run_are_skipped_if_it_fails():
    found = {one.check: one for one in check_method(Idle(), ["run", "engines", "resume", "export"])}
    assert found.pop("run").status == "failed"
    assert {one.status for one in found.values()} == {"skipped"}
    assert "the check 'run' has the reason" in found["resume"].detail


def test_a_method_that_ignores_budgets_is_not_asked_to_keep_them():
    found = finding(FedAvg(), "budgets")
    assert (found.status, found.detail) == (
        "skipped",
        "the method ignores budgets on purpose (ignores_budgets = True)",
    )


def test_global_random_states_are_restored():
    before = random.getstate(), torch.get_rng_state()
    with random_state(3):
        random.random()
        torch.rand(1)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


def test_checks_are_announced_before_they_begin():
    names: list[str] = []
    check_method(Method(), ["settings", "learner"], names.append)
    assert names == ["settings", "learner"]
