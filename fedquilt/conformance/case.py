"""The small federation that methods are checked on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import torch
from torch import nn

from fedquilt.conformance.failures import NotApplicableError
from fedquilt.data import FederatedData, Pool, digits
from fedquilt.engines.simulation import Simulation
from fedquilt.family import Family
from fedquilt.family.dual import conditioned, dual
from fedquilt.family.tracing.trace import trace
from fedquilt.methods import FedAvg, Method
from fedquilt.models import PreResNet
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.federation import World
from fedquilt.runs.prepare import prepare
from fedquilt.runs.run import Run
from fedquilt.runs.start import run
from fedquilt.terms import Budget, Client, Server

NUM_CLIENTS = 6
COHORT = 4  # Number of clients that take part in a round
SAMPLES_PER_CLIENT = 8
TEST_SAMPLES = 120  # Number of test samples in all
TEST_BATCH = 40  # Number of samples in a batch of an evaluation
ROUNDS = 3


@cache
def small_data() -> FederatedData:
    """Return digits for six clients: 48 training samples, 120 for tests and 8 public ones.

    Training samples are sorted by class before they are divided, so that a client has few classes.
    Every client has 8 training and 20 test samples.
    """
    pool = digits()
    count = NUM_CLIENTS * SAMPLES_PER_CLIENT
    order = torch.argsort(pool.targets[:count], stable=True)
    few = Pool.of(
        (pool.inputs[order], pool.targets[order]),
        (pool.test_inputs[:TEST_SAMPLES], pool.test_targets[:TEST_SAMPLES]),
        public=pool.inputs[count : count + SAMPLES_PER_CLIENT],
        num_classes=pool.num_classes,
        name="digits",
        scale=pool.scale,
    )
    parts = torch.arange(count).chunk(NUM_CLIENTS)
    test_parts = torch.arange(TEST_SAMPLES).chunk(NUM_CLIENTS)
    return few.with_parts(parts, test_parts)


@cache  # Tracing it takes longer than most checks.
def small_family(norms: Literal["single", "dual", "conditioned"]) -> Family:
    """Return a residual net of 5,090 parameters, with the norms that adversarial training needs.

    Args:
        norms: "single": plain batch norms. "dual": separate norms for adversarial samples.
            "conditioned": norms that depend on a robustness.
    """
    data = small_data()

    def module() -> nn.Module:
        net = PreResNet((1, 1), data.num_classes, 1, widths=(8, 16))
        if norms == "single":
            return net
        return dual(net) if norms == "dual" else conditioned(net)

    return trace(module, data.example)


@dataclass(frozen=True, eq=False)
class Case:
    """A method on a small federation: digits, a residual net with batch norm, and unequal clients.

    Every client holds samples of few classes, and four of six clients take part in a round. A
    method may ask for other nets and budgets (`Method.trial`).
    """

    method: Method  # Method that is checked, with shortened local training

    @property
    def data(self) -> FederatedData:
        """Return the samples of six clients."""
        return small_data()

    @property
    def family(self) -> Family:
        """Return the net whose sub-models clients train, before the method adapts it."""
        return self._trial[0]

    @property
    def budgets(self) -> tuple[Budget, ...]:
        """Return the budgets, which are assigned to clients in turn."""
        return self._trial[1]

    @cached_property
    def _trial(self) -> tuple[Family, tuple[Budget, ...]]:
        adversarial = self.method.local.adversarial
        if adversarial is None:
            return self.method.trial(small_family("single"))
        return self.method.trial(small_family("conditioned" if adversarial.draws else "dual"))

    @cached_property
    def fleet(self) -> Fleet:
        """Return six devices, of which four are sampled in a round."""
        return Fleet.of(self.budgets, NUM_CLIENTS, COHORT)

    @cached_property
    def world(self) -> World:
        """Return the world that a method sees, in float64.

        It is prepared with FedAvg, so that errors of the method are found by the checks. The method
        itself only adapts the family (`Method.adapt`).
        """
        family = self.method.adapt(self.family)
        return prepare(
            FedAvg(), family, self.data, self.fleet, "sequential", precision="fp64"
        ).world

    @cached_property
    def settled(self) -> Method:
        """Return the method as a run uses it, with values that depend on the rounds fixed."""
        return self.method.settled(ROUNDS)

    @cached_property
    def server(self) -> Server:
        """Return the state before the first round."""
        return self.settled.init(self.world)

    @cached_property
    def clients(self) -> list[Client]:
        """Return one client of every budget, numbered in the order of `budgets`."""
        return [Client(id, budget, SAMPLES_PER_CLIENT) for id, budget in enumerate(self.budgets)]

    def run(
        self, engine: str | Simulation = "sequential", rounds: int = ROUNDS, **options: Any
    ) -> Run:
        """Train in float64, and evaluate after the last round.

        Args:
            engine: Name of an engine, or an engine.
            rounds: Number of rounds.
            **options: Further arguments of `fedquilt.run`.
        """
        options.setdefault("evaluation", Evaluation(every=0, batch_size=TEST_BATCH))
        return run(
            self.method,
            self.family,
            self.data,
            self.fleet,
            engine,
            rounds,
            precision="fp64",
            **options,
        )

    @cached_property
    def outcome(self) -> Run | Exception:
        """Return a run on `sequential`, or the exception that it raised. It is computed once."""
        try:
            return self.run()
        except Exception as error:
            return error

    @property
    def reference(self) -> Run:
        """Return the run with which other runs are compared.

        Raises:
            NotApplicableError: The run failed, which the check "run" reports.
        """
        if isinstance(self.outcome, Exception):
            raise NotApplicableError("it needs a run that succeeds; the check 'run' has the reason")
        return self.outcome
