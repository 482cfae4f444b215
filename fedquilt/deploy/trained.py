"""The state of a run that deployment needs."""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt.data import FederatedData
from fedquilt.engines.simulation import Simulation
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.engine import Engine
from fedquilt.round.evaluate import Evaluation
from fedquilt.round.federation import Federation, World
from fedquilt.round.link import Link
from fedquilt.round.method import Method
from fedquilt.terms import Server


@dataclass
class TrainedRun:
    """A federation, the state of its server, and the samples that norms are measured on.

    `Run` derives from it and adds training. Deployment and export need no more than this.

    Args:
        federation: World, method and link.
        fleet: Devices, whose budgets and client states decide what they are given.
        engine: Engine that holds the samples, and measures norms and accuracy.
        evaluation: Samples and classes that a model is evaluated on.
        server: Weights and client states after the last round.
        absent: Reason why there are no samples, for a run that was reopened without its data.
            Empty: the samples are available.
    """

    federation: Federation
    fleet: Fleet
    engine: Simulation
    evaluation: Evaluation
    server: Server
    absent: str = ""

    @property
    def method(self) -> Method:
        """Return the method of the federation."""
        return self.federation.method

    @property
    def world(self) -> World:
        """Return what methods see: family, task, seed, number of rounds and public samples."""
        return self.federation.world

    @property
    def link(self) -> Link:
        """Return the link between server and clients."""
        return self.federation.link

    @property
    def evaluator(self) -> Engine:
        """Return the engine that evaluates the state of the run, on devices if there are any."""
        return self.engine.evaluating(self.server, self.fleet, self.evaluation.clients)

    @property
    def data(self) -> FederatedData:
        """Return the samples of all clients, on the engine's device.

        Its test set has the samples that models are evaluated on, which may be validation samples.
        """
        return self.engine.data
