"""Evaluation on a device: it tests nets on its own samples, and sends sums.

Versions of the device's state are read and never changed, so that every request can be repeated.
The net that a device tests as its own is stored beside them, from where it can be exported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor

from fedquilt.data import FederatedData
from fedquilt.data.parts import Parts
from fedquilt.deployment.states import DeviceStates, Version
from fedquilt.deployment.terms import Terms
from fedquilt.engines.sequential import Sequential
from fedquilt.errors import ConfigError, FedquiltError, FormatError
from fedquilt.family.cut import HeldWeights
from fedquilt.hardware.precision import Precision
from fedquilt.names import said
from fedquilt.round.budgets import learner_of
from fedquilt.round.device import initial_needs
from fedquilt.round.eval_jobs import EvalJob
from fedquilt.round.federation import Federation, World
from fedquilt.round.link import PERFECT
from fedquilt.round.own_tests import kept_weights, own_weights
from fedquilt.round.training.batches import batched
from fedquilt.round.wire import Message
from fedquilt.round.wire_evaluation import (
    EvalReply,
    EvalRequest,
    EvalTask,
    ExpectedTensor,
    TaskWeights,
    net_tensors,
    read_weights,
)
from fedquilt.storage.files import Blob
from fedquilt.terms import Job, Server, Weights

if TYPE_CHECKING:
    from fedquilt.deployment.device import Device

Sums = tuple[int, Weights]  # Samples or batches, and sums by name


def precision_of(name: str) -> Precision:
    """Return the precision that a request names.

    Raises:
        FormatError: The name is not known.
    """
    names: tuple[Precision, ...] = get_args(Precision)
    for precision in names:
        if precision == name:
            return precision
    raise FormatError(f"the request has the precision {name[:20]!r}; known are {', '.join(names)}")


def data_of_client(data: FederatedData, client: int) -> FederatedData:
    """Return a device's samples as those of the client with number `client`.

    All other clients have no samples. There are no test samples by client, because all are the
    device's own, and no validation samples.
    """
    count = len(data.targets)
    sizes = torch.zeros(client + 1, dtype=torch.int64)
    sizes[client] = count
    return replace(
        data,
        parts=Parts.split(torch.arange(count), sizes),
        test_parts=None,
        validation_parts=None,
    )


@dataclass
class DeviceEvaluation:
    """Answers requests to evaluate nets with the samples and the state of a device."""

    device: Device

    def answer(self, message: Message, states_of: Callable[[str], DeviceStates]) -> Message:
        """Evaluate what a request asks for, and return sums.

        A failure is not raised, but is a reply with a reason.

        Args:
            message: Request of the server, as bytes.
            states_of: Function that returns the device's state in a run, by the run's identity.
        """
        digest = message.digest
        try:
            request = EvalRequest.read(message)
        except FedquiltError as error:
            return EvalReply("", 0, -1, digest, failed=str(error)).message()
        try:
            results = self._results(request, message, states_of(request.run))
        except FedquiltError as error:
            reason = str(error)
        except Exception as error:  # A model or method of the user may raise anything.
            reason = said(error)
        else:
            counts = tuple(count for count, _ in results)
            reply = EvalReply(request.run, request.round, request.base, digest, counts)
            return reply.message([sums for _, sums in results])
        failed = EvalReply(request.run, request.round, request.base, digest, failed=reason)
        return failed.message()

    def _results(self, request: EvalRequest, message: Message, states: DeviceStates) -> list[Sums]:
        """Return the count and the sums of each task.

        Args:
            request: The request.
            message: The same as bytes, with the weights.
            states: Versions of the device's state in the run. They do not change.

        Raises:
            FedquiltError: The request does not fit the device's model, samples or state, or the
                deadline has passed.
        """
        end = time.monotonic() + request.deadline
        terms = Terms.read(request.settings, self.device.allowed)
        family = self.device.adapted_family(request.fingerprint, terms)
        data = data_of_client(self.device.data, request.client.id)
        if request.client.size != len(data.targets):
            raise ConfigError(
                f"the server expects {request.client.size} samples; the device has "
                f"{len(data.targets)}."
            )
        base = None
        if request.base >= 0 and any(task.source != "server" for task in request.tasks):
            base = states.load(request.base)
            if base is None:
                raise FormatError(f"the state of round {request.base + 1} is lost")
        precision = precision_of(request.precision)
        engine = Sequential(data, self.device.device, precision)
        public = engine.data.public_samples
        world = World(family, request.seed, precision, public, terms.task, request.num_clients)
        results = []
        has_stored = states.is_in_memory  # Only the first of the device's own nets is stored.
        for task in request.tasks:
            if time.monotonic() > end:
                raise FormatError(f"the deadline of {request.deadline:g} s has passed")
            title = f"file {task.file + 1} of the request"
            bench = _Bench(request, terms, world, engine, base)
            results.append(bench.result(task, message.files[task.file], title))
            if task.source != "server" and not has_stored:
                states.store_own_net(bench.own_net(task, message.files[task.file], title))
                has_stored = True
        return results


@dataclass(frozen=True)
class _Bench:
    """All that the tasks of one request share."""

    request: EvalRequest
    terms: Terms
    world: World
    engine: Sequential
    base: Version | None  # State of the device after its last round that counted

    def result(self, task: EvalTask, file: bytes, title: str) -> Sums:
        """Return the count and the sums of one task.

        Args:
            task: The task.
            file: Weights that the server sent for it.
            title: Name of the file for messages.
        """
        sent = self._sent(task, file, title)
        federation = self._federation(task, sent)
        if task.calibrates:
            return self._statistics(task, sent.weights, federation)
        weights = self._weights(task, sent, federation)
        return self._score(task, weights, federation)

    def own_net(self, task: EvalTask, file: bytes, title: str) -> Blob:
        """Return the nets of a task with all their weights, for an export on the device.

        Args:
            task: The task.
            file: Weights that the server sent for it.
            title: Name of the file for messages.
        """
        sent = self._sent(task, file, title)
        weights = self._weights(task, sent, self._federation(task, sent))
        tensors = {
            f"{number}/{name.removeprefix(net.scope)}": value
            for number, net in enumerate(task.nets)
            for name, value in weights.items()
            if name.startswith(net.scope)
        }
        request = self.request
        note = {
            "nets": [net.to_dict() for net in task.nets],
            "round": request.round,
            "client": request.client.id,
            "settings": dict(request.settings),
            "seed": request.seed,
            "precision": request.precision,
            "batch_size": request.batch_size,
        }
        return Blob.sealed(tensors, note)

    def _sent(self, task: EvalTask, file: bytes, title: str) -> TaskWeights:
        """Read the weights that the server sent for a task, and move them to the device's place.

        Args:
            task: The task.
            file: Weights that the server sent for it.
            title: Name of the file for messages.
        """
        expected, initial = self._expected(task)
        sent = read_weights(file, expected, initial, title)
        return TaskWeights(self._placed(sent.weights), self._placed(sent.initial))

    def _placed(self, weights: Weights) -> dict[str, Tensor]:
        return {name: value.to(self.engine.device) for name, value in weights.items()}

    def _expected(
        self, task: EvalTask
    ) -> tuple[dict[str, ExpectedTensor], dict[str, ExpectedTensor]]:
        """Return the weights that a task's file must have, and its initial weights."""
        world, family = self.world, self.world.family
        weights: dict[str, ExpectedTensor] = {}
        initial: dict[str, ExpectedTensor] = {}
        if task.source == "memory":
            return weights, initial
        near = Federation(world, self.terms.method, PERFECT)
        for net in task.nets:
            family.check(net, "the server")
            member = family.member(net)
            if task.source == "server":
                weights |= net_tensors(world, net, member.names, family.statistics)
                continue
            job = Job(self.request.client, net, self.request.round)
            learner = learner_of(self.terms.method, job, world)
            weights |= net_tensors(world, net, learner.received(member))
            if task.has_initial:
                initial |= net_tensors(world, net, initial_needs(near, job, learner))
        return weights, initial

    def _federation(self, task: EvalTask, sent: TaskWeights) -> Federation:
        """Return the federation with the initial weights that the device has."""
        stored = self.base.initial if self.base else HeldWeights({}, {})
        positions = dict(stored.positions)
        initial = dict(stored)
        if task.has_initial:
            initial |= sent.initial
            positions |= {net.scope: net.positions for net in task.nets}
        received = HeldWeights(initial, positions)
        return Federation(self.world, self.terms.method, self.terms.link, received)

    def _weights(
        self, task: EvalTask, sent: TaskWeights, federation: Federation
    ) -> dict[str, Tensor]:
        """Return all weights of a task's nets, by scope and name.

        They are the weights of the request (source "server"), those that the device has kept
        (source "memory"), or those that the client receives in training, completed with what the
        device has kept (source "client").

        Args:
            task: The task.
            sent: What the server sent.
            federation: World and method, with the initial weights of the device.
        """
        request = self.request
        if task.source == "server":
            return dict(sent.weights)
        states = self.base.states if self.base else {}
        if task.source == "memory":
            if "" not in states:
                raise FormatError("the device keeps no net")
            (net,) = task.nets
            return kept_weights(
                federation, states[""], net, request.client.id, self.engine, request.batch_size
            )
        memory = {(request.client.id, scope): state for scope, state in states.items()}
        positions = {net.scope: net.positions for net in task.nets}
        server = Server(request.round, HeldWeights(sent.weights, positions), memory)
        jobs = [Job(request.client, net, request.round) for net in task.nets]
        return own_weights(federation, server, jobs, self.engine, request.batch_size)

    def _score(self, task: EvalTask, weights: dict[str, Tensor], federation: Federation) -> Sums:
        """Test nets on the device's samples, and return their number and the sums of metrics.

        Args:
            task: The task.
            weights: Weights of its nets, by scope and name.
            federation: World and method.
        """
        eval_job = EvalJob(
            "",
            task.nets,
            weights,
            self.request.client.id,
            task.own_classes,
            task.absent,
            task.robustness,
            task.attack,
            task.on,
            task.limit,
        )
        self.engine.begin(federation)
        count = len(self.engine.eval_samples(eval_job).samples)
        if not count:
            return 0, {}
        (score,) = self.engine.evaluate(federation, [eval_job], self.request.batch_size)
        return count, score.sums

    def _statistics(self, task: EvalTask, weights: Weights, federation: Federation) -> Sums:
        """Measure a net's norm statistics, and return the number of batches and their sums.

        Args:
            task: The task.
            weights: Weights of its net, by scope and name.
            federation: World and method.
        """
        self.engine.begin(federation)
        batches = batched(self.engine.pooled, self.request.batch_size)
        if not batches or len(batches[0]) < 2:  # One sample has no variance.
            return 0, {}
        (net,) = task.nets
        plain = {name.removeprefix(net.scope): value for name, value in weights.items()}
        (statistics,) = self.engine.calibrate(federation, [(net, plain)], self.request.batch_size)
        return len(batches), {name: value * len(batches) for name, value in statistics.items()}
