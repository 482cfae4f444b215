"""Evaluation where the data is: on the server's samples, and on devices, which send sums.

Nets of the server are tested on the server's samples if it has any. Else every device that is
online and can hold a net tests it on its own samples, and the server adds up the sums. Nets of
clients are always tested on their devices. Norm statistics follow the same rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.engines.client_inputs import MAX_CALIBRATION_SAMPLES
from fedquilt.engines.flower.evaluation_exchange import EvalExchange, Work
from fedquilt.errors import ConfigError
from fedquilt.round.budgets import learner_of
from fedquilt.round.device import initial_needs, initial_positions
from fedquilt.round.engine import Engine, EvaluationReport, Outcome
from fedquilt.round.eval_jobs import EvalJob
from fedquilt.round.link import PERFECT
from fedquilt.round.scores import Score
from fedquilt.round.training.batches import batched
from fedquilt.round.wire_evaluation import EvalTask, ExpectedTensor, TaskWeights, net_tensors
from fedquilt.terms import Client, Job, Server, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.engines.flower.engine import Flower
    from fedquilt.fleets.fleet import Fleet
    from fedquilt.round.federation import Federation, World
    from fedquilt.round.fold import Fold


# Samples of the server that are used: test samples, training samples for norm statistics, or both
SamplesName = Literal["both", "test", "calibration", "none"]


@dataclass(frozen=True)
class ServerSamples:
    """Samples that the server of a deployment has for itself."""

    test: bool = True  # Test samples. False: devices test the server's nets on theirs
    # Training samples, on which norm statistics are measured. False: devices measure them
    calibration: bool = True

    @staticmethod
    def of(name: SamplesName) -> ServerSamples:
        """Return the samples that a value of `fedquilt serve --samples` means."""
        return ServerSamples(name in ("both", "test"), name in ("both", "calibration"))


@dataclass(eq=False)
class OnDevices(Engine):
    """Engine that evaluates one state of a deployment, on the server and on devices.

    Args:
        flower: Engine of the deployment.
        server: State that is evaluated.
        fleet: Clients and their budgets.
        max_clients: Most clients that are asked for one test.
    """

    flower: Flower
    server: Server
    fleet: Fleet
    max_clients: int
    uncalibrated: dict[str, None] = field(default_factory=dict)  # Keys of tests that were left out

    has_client_states: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.device = self.flower.device
        self.exchange = EvalExchange(self.flower, self.server, self.fleet)

    @cached_property
    def _online(self) -> list[int]:
        return sorted(self.flower.reached.online())

    @property
    def evaluation_report(self) -> EvaluationReport | None:
        """Return the devices that took part so far. None: none was asked, and no net left out."""
        exchange = self.exchange
        if not exchange.asked and not exchange.missing and not self.uncalibrated:
            return None
        return EvaluationReport(exchange.attendance, tuple(self.uncalibrated))

    # --- the contract ----------------------------------------------------------------------------

    def train(
        self, federation: Federation, server: Server, jobs: Sequence[Job], fold: Fold
    ) -> Outcome:
        """Train jobs with the engine of the deployment.

        Args:
            federation: World, method and link.
            server: State that the round starts from.
            jobs: Jobs of the round.
            fold: Fold that collects updates.
        """
        return self.flower.train(federation, server, jobs, fold)

    def evaluate(
        self,
        federation: Federation,
        eval_jobs: Sequence[EvalJob],
        batch_size: int,
        by_domain: bool = False,
    ) -> list[Score]:
        """Return the score of every evaluation, of the server's samples or of the devices'.

        A score is empty if no device could test the nets. Nets whose norm statistics nobody could
        measure are not tested. Only the server's samples have domains.

        Args:
            federation: World, method and link.
            eval_jobs: Evaluations to run.
            batch_size: Samples in a batch.
            by_domain: Also return the scores of each domain of the server's test samples.
        """
        self.flower.begin(federation)
        scores = [Score(eval_job.label) for eval_job in eval_jobs]
        testable = [
            n for n, eval_job in enumerate(eval_jobs) if self._is_calibrated(federation, eval_job)
        ]
        on_server = [number for number in testable if self._is_on_server(eval_jobs[number])]
        server_jobs = [eval_jobs[number] for number in on_server]
        if server_jobs:
            server_scores = self.flower.evaluate(federation, server_jobs, batch_size, by_domain)
            for number, score in zip(on_server, server_scores, strict=True):
                scores[number] = score

        work: dict[int, list[Work]] = {}
        for number in sorted({*testable} - {*on_server}):
            for client in self._testers(federation, eval_jobs[number]):
                work.setdefault(client.id, []).append(
                    self._test(federation, client, number, eval_jobs[number])
                )
        results = self.exchange.ask(federation, work, batch_size)
        for number, _ in sorted(results):
            scores[number] = Score(eval_jobs[number].label)
        for number, client_id in sorted(results):
            sums = results[number, client_id].sums
            scores[number] = scores[number] + Score(eval_jobs[number].label, sums)
        return scores

    def calibrate(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        client: int | None = None,
    ) -> list[dict[str, Tensor]]:
        """Measure the norm statistics of networks, on the server's samples or on devices.

        Devices send sums over their batches, so that every batch of every device counts once.

        Args:
            federation: World, method and link.
            nets: Sub-models and their weights.
            batch_size: Samples in a batch.
            client: Client whose samples are used. None: those of the server, or else of all.

        Returns:
            Statistics by name, for each network. They are empty if no device can measure them.
        """
        self.flower.begin(federation)
        if client is None and self.flower.server_samples.calibration:
            return self.flower.calibrate(federation, nets, batch_size)
        work: dict[int, list[Work]] = {}
        for number, (net, weights) in enumerate(nets):
            eval_job = EvalJob("", (net,), {net.scope + n: v for n, v in weights.items()}, client)
            for tester in self._testers(federation, eval_job):
                work.setdefault(tester.id, []).append(
                    self._measurement(federation, tester, number, eval_job, batch_size)
                )
        results = self.exchange.ask(federation, work, batch_size)
        statistics: list[dict[str, Tensor]] = []
        for number in range(len(nets)):
            of_net = [results[key] for key in sorted(results) if key[0] == number]
            total = sum(result.count for result in of_net)
            measured = [result.sums for result in of_net if result.count]
            statistics.append(
                {
                    name: torch.stack([sums[name] for sums in measured]).sum(0).to(self.device)
                    / total
                    for name in (measured[0] if measured else ())
                }
            )
        return statistics

    def pooled_gradients(
        self,
        federation: Federation,
        nets: Sequence[tuple[Submodel, Weights]],
        batch_size: int,
        samples: int,
    ) -> list[dict[str, Tensor]]:
        """Return the mean gradient of each network over training samples of the server.

        Args:
            federation: World, method and link.
            nets: Sub-models and their weights.
            batch_size: Samples in a batch.
            samples: Number of samples.

        Raises:
            ConfigError: The server has no training samples.
        """
        if not self.flower.server_samples.calibration:
            raise ConfigError(
                f"{type(federation.method).__name__} asks for gradients over training samples; "
                "the server has none, and devices do not send gradients. A server with training "
                "samples would work, or a method without such figures (alignment = 0)."
            )
        return self.flower.pooled_gradients(federation, nets, batch_size, samples)

    def on_public(self, world: World) -> Engine:
        """Return an engine of this process whose only client has all public samples."""
        return self.flower.on_public(world)

    def size(self, client: int) -> int:
        """Return the number of training samples of a client."""
        return self.flower.size(client)

    @property
    def tests_by_client(self) -> bool:
        """Return True, because devices have test samples. One without any counts in no mean."""
        return True

    @property
    def has_validation(self) -> bool:
        """Return True if the server has test samples, and holds back validation samples."""
        return self.flower.server_samples.test and self.flower.has_validation

    # --- who does what ---------------------------------------------------------------------------

    def _is_on_server(self, eval_job: EvalJob) -> bool:
        """Return True if the server has the nets and the samples of a test."""
        if eval_job.source != "server" or eval_job.client is not None:
            return False
        samples = self.flower.server_samples
        return samples.calibration if eval_job.on == "training" else samples.test

    def _is_calibrated(self, federation: Federation, eval_job: EvalJob) -> bool:
        """Return True unless a test lacks norm statistics, which is logged and reported.

        Devices complete the weights of clients' nets themselves.
        """
        family = federation.world.family
        if eval_job.source != "server" or not federation.method.local.norm.stores:
            return True
        lacking = [
            net
            for net in eval_job.nets
            for name in family.member(net).names
            if name in {*family.statistics} and net.scope + name not in eval_job.weights
        ]
        if not lacking:
            return True
        self.uncalibrated[eval_job.label] = None
        self.flower.once.warning(
            eval_job.label,
            "no device could measure the norm statistics of the net of size %s, so that it is not "
            "tested. A device that is online and can hold it is needed, or samples on the server.",
            eval_job.label,
            kind=eval_job.label,
        )
        return False

    def _testers(self, federation: Federation, eval_job: EvalJob) -> list[Client]:
        """Return the clients whose devices test the nets: the one that is named, or all that can.

        Devices that are offline, did not answer before, or cannot hold the nets are left out. There
        are no validation samples on devices.
        """
        if eval_job.on == "validation":
            return []
        seed = federation.world.seed
        if eval_job.client is not None and eval_job.client not in self._online:
            self.exchange.missing.setdefault(eval_job.client, "the device is offline")
        absent = self.exchange.absent
        if eval_job.client is not None:
            candidates = [] if eval_job.client in absent else [eval_job.client]
        else:
            online = self._online
            count = min(self.max_clients, len(online))
            positions = noise.choose(
                noise.key(seed, noise.Stream.TESTED_CLIENTS), count, len(online)
            )
            candidates = [online[p] for p in positions if online[p] not in absent]
        is_personal = eval_job.source != "server"
        clients = [
            self.fleet.client(
                number,
                self.server.last(number) if is_personal else self.server.round,
                seed,
                self.size(number),
            )
            for number in candidates
        ]
        if is_personal or federation.method.ignores_budgets:
            return clients
        family = federation.world.family
        return [client for client in clients if not family.excess(eval_job.nets, client.budget)]

    # --- work ------------------------------------------------------------------------------------

    def _test(self, federation: Federation, client: Client, number: int, eval_job: EvalJob) -> Work:
        """Return the test of nets on one device.

        Args:
            federation: World, method and link.
            client: Client whose device tests.
            number: Number of the test.
            eval_job: The test.
        """
        initial: dict[str, Tensor] = {}
        if eval_job.source == "client":
            for net in eval_job.nets:
                initial |= self._initial(federation, Job(client, net, self.server.round))
        task = EvalTask(
            eval_job.nets,
            0,
            False,
            eval_job.source,
            bool(initial),
            eval_job.own_classes,
            eval_job.absent,
            eval_job.robustness,
            eval_job.attack,
            eval_job.on,
            eval_job.limit,
        )
        count = None
        if eval_job.on == "training":
            limit = MAX_CALIBRATION_SAMPLES if eval_job.limit is None else eval_job.limit
            count = min(client.size, limit, MAX_CALIBRATION_SAMPLES)
        weights = TaskWeights(eval_job.weights, initial)
        return Work(number, task, weights, _metric_sums(federation.world), count)

    def _initial(self, federation: Federation, job: Job) -> dict[str, Tensor]:
        """Return the initial weights of a client's net that its device lacks, by scope and name."""
        learner = learner_of(federation.method, job, federation.world)
        without_loss = _over_perfect_link(federation)
        names = initial_needs(without_loss, job, learner)
        memory = self.server.memory.get((job.client.id, job.submodel.scope))
        if memory is not None and memory.round >= 0:
            wanted = initial_positions(federation, job, memory)
            if wanted.index == memory.submodel.index:
                return {}
        cutter = federation.world.family.cutter
        cut = cutter.gather(federation.initial_on(self.device), job.submodel, names)
        return {job.submodel.scope + name: value for name, value in cut.items()}

    def _measurement(
        self,
        federation: Federation,
        client: Client,
        number: int,
        eval_job: EvalJob,
        batch_size: int,
    ) -> Work:
        """Return the measurement of a net's norm statistics on one device.

        Args:
            federation: World, method and link.
            client: Client whose device measures.
            number: Number of the net.
            eval_job: The net and its weights.
            batch_size: Samples in a batch.
        """
        (net,) = eval_job.nets
        names = [
            name
            for name in federation.world.family.member(net).names
            if name in {*federation.world.family.statistics}
        ]
        tensors = net_tensors(federation.world, net, names)
        expected = {name.removeprefix(net.scope): tensor for name, tensor in tensors.items()}
        samples = torch.arange(min(client.size, MAX_CALIBRATION_SAMPLES))
        count = len(batched(samples, batch_size)) if len(samples) > 1 else 0
        task = EvalTask(eval_job.nets, 0, calibrates=True, on="training")
        return Work(number, task, TaskWeights(eval_job.weights), expected, count)


def _over_perfect_link(federation: Federation) -> Federation:
    """Return a federation whose link loses nothing, as tests of clients' nets assume."""
    return replace(federation, link=PERFECT)


def _metric_sums(world: World) -> dict[str, ExpectedTensor]:
    """Return the sums of a test, by the name of the metric, as the task computes them."""
    shape = (1, *world.family.output_shape[1:])
    outputs = torch.zeros(shape, dtype=world.dtype)
    sums = world.task.sums(outputs, world.task.blank_targets(shape))
    return {name: ExpectedTensor(tuple(value.shape), value.dtype) for name, value in sums.items()}
