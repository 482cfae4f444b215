"""A device: it answers requests of a server with its own samples and its own state."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from fedquilt.data import FederatedData
from fedquilt.deployment.device_engine import Collector, OnDevice
from fedquilt.deployment.device_evaluation import DeviceEvaluation, data_of_client, precision_of
from fedquilt.deployment.device_family import check_layouts, emptied
from fedquilt.deployment.states import DeviceStates, Version
from fedquilt.deployment.terms import Terms
from fedquilt.errors import ConfigError, FedquiltError, FormatError
from fedquilt.family import Family, Layout
from fedquilt.family.cut import HeldWeights
from fedquilt.hardware.precision import DTYPES
from fedquilt.names import said
from fedquilt.round.budgets import learner_of
from fedquilt.round.client import first_names
from fedquilt.round.device import (
    columns_of,
    device_link,
    download_outline,
    initial_needs,
    reach_of,
)
from fedquilt.round.federation import Federation, World
from fedquilt.round.link import Outline, Packet, Transmission
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.wire import (
    Expected,
    JobResult,
    Message,
    ReceivedFile,
    Reply,
    Request,
    packet_file,
    read_packet,
)
from fedquilt.terms import ClientState, Job, Server, Submodel, Update, Weights


class Device:
    """One client of a federation, with samples that never leave it.

    Args:
        data: Samples of the device. All training samples are its own.
        family: The model, traced or built from the code that the device has.
        folder: Folder for the state between rounds. None: it is kept in memory.
        device: Where tensors are trained.
        allowed: References to code, such as "mine.py:Mine", that a server may name.
    """

    def __init__(
        self,
        data: FederatedData,
        family: Family,
        folder: Path | None = None,
        device: torch.device | None = None,
        allowed: Collection[str] = (),
    ) -> None:
        self.data, self.family, self.folder = data, family, folder
        self.device = device or torch.device("cpu")
        self.allowed = tuple(allowed)
        self.trained = 0  # Requests that were trained, and not answered from a stored reply
        self._states: dict[str, DeviceStates] = {}
        self._families: dict[str, Family] = {}  # By fingerprint, as methods adapt them
        self._evaluation = DeviceEvaluation(self)

    def answer(self, message: Message) -> Message:
        """Train what a request asks for, and return the reply.

        A request that was answered before gets the same reply without training. A failure is not
        raised, but is a reply with a reason.

        Args:
            message: Request of the server, as bytes.
        """
        start = time.monotonic()
        digest = message.digest
        try:
            request = Request.read(message)
        except FedquiltError as error:
            return Reply("", 0, -1, digest, failed=str(error)).message()
        try:
            states = self._states_of(request.run)
            version = states.load(request.round)
            if version is not None and version.request == digest:
                return version.reply
            return self._trained(request, message, digest, states, start)
        except FedquiltError as error:
            reason = str(error)
        except Exception as error:  # A model or method of the user may raise anything.
            reason = said(error)
        failed = Reply(request.run, request.round, request.base, digest, failed=reason)
        return failed.message()

    def evaluate(self, message: Message) -> Message:
        """Evaluate what a request asks for, and return sums. The state does not change.

        A failure is not raised, but is a reply with a reason.

        Args:
            message: Request of the server, as bytes.
        """
        return self._evaluation.answer(message, self._states_of)

    def forget(self) -> None:
        """Delete the state of all runs that this object has opened, as if the device were new."""
        for states in self._states.values():
            states.keep(set())
        self._states.clear()

    def _states_of(self, run: str) -> DeviceStates:
        if run not in self._states:
            if not run.isalnum():
                raise FormatError(
                    f"the run {run[:40]!r} has characters other than letters and digits"
                )
            self._states[run] = DeviceStates(None if self.folder is None else self.folder / run)
        return self._states[run]

    def _trained(
        self,
        request: Request,
        message: Message,
        digest: str,
        states: DeviceStates,
        start: float,
    ) -> Message:
        """Train a request from the version that it names, save the result, and return the reply.

        If the device no longer has that version, the reply says so and nothing is trained. An error
        leaves all versions as they are.

        Args:
            request: The request.
            message: The same as bytes, with the tensors.
            digest: Digest of the message.
            states: Versions of the device's state in this run. After training, there are the base
                and the new one.
            start: When the request arrived, by `time.monotonic`.
        """
        base = states.load(request.base) if request.base >= 0 else None
        if request.base >= 0 and base is None:
            reason = f"the state of round {request.base + 1} is lost"
            lost = Reply(request.run, request.round, request.base, digest, failed=reason, anew=True)
            return lost.message()
        federation, jobs, engine, initial = self._prepared(request, message, base, start)
        memory = {
            (request.client.id, scope): state
            for scope, state in (base.states if base else {}).items()
        }
        server = Server(request.round, {}, memory)
        collector = Collector()
        outcome = engine.train(federation, server, jobs, collector)
        self.trained += 1

        reply = self._reply(request, digest, federation, engine, collector.updates, outcome.losses)
        files = tuple(
            packet_file(federation.link.uploads[job.submodel.scope])  # type: ignore[attr-defined]
            for job in jobs
        )
        answer = reply.message(files)
        kept_states = {**(base.states if base else {})}
        kept_states |= {scope: state for (_, scope), state in outcome.memory.items()}
        positions, weights = initial
        positions_by_scope = {scope: submodel.positions for scope, submodel in positions.items()}
        version = Version(
            request.round,
            digest,
            answer,
            kept_states,
            HeldWeights(weights, positions_by_scope),
            positions,
        )
        states.save(version, request.base)
        return answer

    def _prepared(
        self, request: Request, message: Message, base: Version | None, start: float
    ) -> tuple[
        Federation, list[Job], OnDevice, tuple[dict[str, Submodel], dict[str, torch.Tensor]]
    ]:
        """Rebuild the federation of a request, and read the packets of its jobs.

        Args:
            request: The request.
            message: The same as bytes, with the tensors.
            base: State that the round starts from. None: the device starts anew.
            start: When the request arrived, by `time.monotonic`.

        Returns:
            The federation, with the device's end of the link. The jobs. The engine that trains
            them. All initial weights that the device has received: positions by scope, and weights
            by scope and name.

        Raises:
            FedquiltError: The request does not fit the device's model, samples or allowed code.
        """
        if len(message.files) != len(request.submodels):
            raise FormatError(
                f"the request has {len(request.submodels)} jobs and {len(message.files)} files"
            )
        terms = Terms.read(request.settings, self.allowed)
        family = self.adapted_family(request.fingerprint, terms, request.layout)
        data = data_of_client(self.data, request.client.id)
        precision = precision_of(request.precision)
        public = data.to(self.device, DTYPES[precision]).public_samples
        world = World(
            family,
            request.seed,
            precision,
            public,
            terms.task,
            request.num_clients,
        )
        federation = Federation(world, terms.method, terms.link)
        jobs = [Job(request.client, submodel, request.round) for submodel in request.submodels]
        if request.client.size != data.size(request.client.id):
            raise ConfigError(
                f"the server expects {request.client.size} samples; the device has "
                f"{data.size(request.client.id)}."
            )

        arrived: dict[str, tuple[Packet | None, Outline]] = {}
        first: dict[str, Weights] = {}
        positions = dict(base.positions) if base else {}
        weights = dict(base.initial) if base else {}
        for number, job in enumerate(jobs):
            scope = job.submodel.scope
            learner = learner_of(terms.method, job, world)
            state = base.states.get(scope) if base else None
            received, outline = self._read(
                request, message, number, federation, job, learner, state
            )
            arrived[scope] = received.packet, outline
            first[scope] = received.first
            if (submodel := request.initial[number]) is not None:
                positions[scope] = submodel
                weights |= {scope + name: value for name, value in received.initial.items()}
        positions_by_scope = {scope: submodel.positions for scope, submodel in positions.items()}
        link = device_link(terms.link, arrived)
        federation = Federation(world, terms.method, link, HeldWeights(weights, positions_by_scope))
        engine = OnDevice(
            data,
            self.device,
            precision,
            first=first,
            shapes=request.extra_shapes,
            deadline=request.deadline,
            start=start,
        )
        return federation, jobs, engine, (positions, weights)

    def adapted_family(self, fingerprint: str, terms: Terms, layout: str = "") -> Family:
        """Return the device's model as a method adapts it. It is cached by fingerprint.

        Its weights are on the meta device, so that memory follows the member that is trained.

        Args:
            fingerprint: Fingerprint of the server's model.
            terms: Method of the request.
            layout: Layout of the server's model as JSON, at first contact. Empty: only the
                fingerprint is compared.

        Raises:
            ConfigError: The models differ.
        """
        if fingerprint not in self._families:
            family = emptied(terms.method.adapt(self.family))
            if layout:
                check_layouts(Layout.from_json(layout), family.layout, self.family.title)
            if family.layout.fingerprint != fingerprint:
                raise ConfigError(
                    f"the server's model has the axes {fingerprint[:80]}; the device's model "
                    f"has {family.layout.fingerprint}. The same model would work on both sides."
                )
            self._families[fingerprint] = family
        return self._families[fingerprint]

    def _read(
        self,
        request: Request,
        message: Message,
        number: int,
        federation: Federation,
        job: Job,
        learner: Learner,
        state: ClientState | None,
    ) -> tuple[ReceivedFile, Outline]:
        """Read the tensors of one job, and return them with the outline of the download.

        The file is compared with what follows from the job.

        Args:
            request: The request.
            message: The same as bytes, with a file for each job.
            number: Number of the job in the request, from 0.
            federation: World, method and link.
            job: The job.
            learner: How the client trains it.
            state: What the client kept of this net from earlier rounds. None: nothing.
        """
        world = federation.world
        transmission = Transmission(world, job)
        extras = {name: torch.Size(shape) for name, shape in request.extra_shapes.items()}
        outline = download_outline(federation, job, learner, extras)
        reach = reach_of(federation.link, job.submodel, request.columns[number], transmission)
        trainable = {*world.family.trainable}
        trainable_names = {name for name in outline.weights if name in trainable}
        submodel = request.initial[number]
        initial = None
        if submodel is not None:
            initial = submodel, initial_needs(federation, job, learner)
        expected = Expected(
            outline,
            reach,
            transmission,
            federation.link,
            frozenset(trainable_names) if federation.link.tracks else frozenset(),
            first_names(federation, job, learner, state) if learner.installs else (),
            initial,
        )
        return read_packet(
            message.files[number], expected, f"job {number + 1} of the request"
        ), outline

    def _reply(
        self,
        request: Request,
        digest: str,
        federation: Federation,
        engine: OnDevice,
        updates: Sequence[Update],
        losses: Sequence[float],
    ) -> Reply:
        """Return the report on a request: results of its jobs, number of samples, and classes.

        Args:
            request: The request.
            digest: Digest of the request, by which the server assigns the reply.
            federation: World, method and link. The link has the packets of the uploads.
            engine: Engine that trained the jobs.
            updates: Update of each job.
            losses: Mean training loss of each job.
        """
        world = federation.world
        mask = engine.classes_present(request.client.id)
        results = []
        for update, loss in zip(updates, losses, strict=True):
            job = update.job
            learner = learner_of(federation.method, job, world)
            batches = itinerary(request.client.size, learner.local, 0)
            count = min(len(batches), learner.max_batches or len(batches))
            member = world.family.member(job.submodel)
            transmission = Transmission(world, job, up=True)
            upload = learner.upload(member, job.submodel, mask)
            packet = federation.link.uploads[job.submodel.scope]  # type: ignore[attr-defined]
            columns = 0 if packet is None else columns_of(federation.link, upload, transmission)
            extras = update.extras
            results.append(
                JobResult(
                    columns,
                    update.steps,
                    count,
                    loss,
                    {name: tuple(value.shape) for name, value in extras.items()},
                )
            )
        classes = tuple(mask.nonzero().flatten().tolist()) if world.task.has_classes else None
        return Reply(
            request.run,
            request.round,
            request.base,
            digest,
            tuple(results),
            request.client.size,
            classes,
        )
