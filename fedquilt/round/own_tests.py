"""Tests of the nets that clients have: those that they hold after a download, or keep for good.

An engine that simulates clients has their states, and gets tests with all weights. Real devices
keep their states to themselves. Their tests have only the weights that the server sends, and the
device adds the rest with the same functions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt.round.budgets import learner_of
from fedquilt.round.client import own_state
from fedquilt.round.client_state import memory_of, names_kept
from fedquilt.round.deployed import client_nets
from fedquilt.round.eval_jobs import EvalJob, joined
from fedquilt.round.federation import Federation
from fedquilt.round.labels import share_label
from fedquilt.round.norm_statistics import measured_statistics
from fedquilt.terms import Client, ClientState, Job, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.round.engine import Engine
    from fedquilt.round.evaluate import Evaluation


def own_test(
    federation: Federation, server: Server, client: Client, engine: Engine, how: Evaluation
) -> EvalJob:
    """Return a test of the model that a client holds now.

    It uses the client's own test samples, or all test samples if clients have none of their own.

    Args:
        federation: World, method and link.
        server: State that the client downloads from.
        client: Client to test.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    nets = client_nets(federation.method, server, client, federation.world)
    jobs = [Job(client, net, server.round) for net in nets]
    if engine.has_client_states:
        weights = own_weights(federation, server, jobs, engine, how.batch_size)
    else:
        weights = sent_weights(federation, server, jobs)
    label = share_label(federation.method, client.budget, federation.world)
    own_classes = is_among_own_classes(federation)
    return EvalJob(label, nets, weights, client.id, own_classes, how.logit, source="client")


def own_weights(
    federation: Federation, server: Server, jobs: Sequence[Job], engine: Engine, batch_size: int
) -> dict[str, Tensor]:
    """Return the weights of a client's nets as it holds them after a download, by scope and name.

    Norm statistics are measured on the client's samples if the norm policy says so.

    Args:
        federation: World, method and link.
        server: State that the client downloads from. It has the client's memory.
        jobs: The nets of one client.
        engine: Engine that has the client's samples.
        batch_size: Norm statistics are means over batches of this size.
    """
    states = {job.submodel: own_state(federation, server, job, engine.device) for job in jobs}
    if _measures(federation):
        net_statistics = measured_statistics(
            federation, list(states.items()), engine, batch_size, jobs[0].client.id
        )
        states = {
            net: {**state, **statistics}
            for (net, state), statistics in zip(states.items(), net_statistics, strict=True)
        }
    return joined(tuple(states), states)


def sent_weights(federation: Federation, server: Server, jobs: Sequence[Job]) -> dict[str, Tensor]:
    """Return the weights of nets that a client receives from the server, by scope and name.

    Args:
        federation: World, method and link.
        server: State to cut from.
        jobs: The nets of one client.
    """
    family = federation.world.family
    cuts = {}
    for job in jobs:
        learner = learner_of(federation.method, job, federation.world)
        names = learner.received(family.member(job.submodel))
        cuts[job.submodel] = family.cutter.gather(server.weights, job.submodel, names)
    return joined(tuple(cuts), cuts)


def tests_of_kept_nets(
    federation: Federation, server: Server, client: Client, engine: Engine, how: Evaluation
) -> Iterator[tuple[str, EvalJob]]:
    """Yield tests of the nets that a client keeps, each with the name of its metric.

    A net named `private` gives `private_accuracy` on all test samples. If clients have test samples
    of their own, `local_private_accuracy` on those follows. If `how.training` is set,
    `training_private_accuracy` is that on the client's training samples, of which at most 65,536
    are used. The first is not possible for nets on real devices, because neither they nor the
    samples leave them.

    Args:
        federation: World, method and link.
        server: State with the client's memory.
        client: Client whose nets are tested.
        engine: Engine that has the samples.
        how: Settings of the evaluation.
    """
    method = federation.method
    world = federation.world
    main = world.task.main.name
    memory = server.memory[client.id, ""]
    label = share_label(method, client.budget, world)
    own_classes = is_among_own_classes(federation)
    known = memory if engine.has_client_states else _with_names(federation, memory, client)
    for name, net in method.kept_nets(known, world).items():
        weights: dict[str, Tensor] = {}
        if engine.has_client_states:
            weights = kept_weights(federation, memory, net, client.id, engine, how.batch_size)
        test = EvalJob(label, (net,), weights, source="memory")
        if engine.has_client_states:
            yield f"{name}_{main}", test
        if how.per_client and engine.tests_by_client:
            client_test = replace(test, client=client.id, own_classes=own_classes, absent=how.logit)
            yield f"local_{name}_{main}", client_test
        if how.training:
            training_test = replace(test, client=client.id, on="training")
            yield f"training_{name}_{main}", training_test


def _with_names(federation: Federation, memory: ClientState, client: Client) -> ClientState:
    """Return a memory with the names of the weights that a device keeps, without their values.

    Args:
        federation: World, method and link.
        memory: What the server remembers of the device, which has no weights.
        client: The client.
    """
    job = Job(client, memory.submodel, memory.round)
    learner = learner_of(federation.method, job, federation.world)
    member = federation.world.family.member(memory.submodel)
    empty = torch.empty(0, device="meta")
    return replace(memory, weights=dict.fromkeys(names_kept(federation, learner, member), empty))


def kept_weights(
    federation: Federation,
    memory: ClientState,
    net: Submodel,
    client: int,
    engine: Engine,
    batch_size: int,
) -> dict[str, Tensor]:
    """Return the weights of a net that a client keeps, by name.

    They are those of the client's memory, else the initial ones. Norm statistics are measured on
    the client's samples if the norm policy says so.

    Args:
        federation: World, method and link.
        memory: What the client kept from earlier rounds.
        net: Sub-model whose positions the result has.
        client: Number of the client.
        engine: Engine that has the client's samples.
        batch_size: Norm statistics are means over batches of this size.
    """
    cutter = federation.world.family.cutter
    initial = federation.initial_on(engine.device)
    names = [name for name in federation.world.family.member(net).names if name in initial]
    first = cutter.gather(initial, net, names)
    state = cutter.overlay(first, net.positions, memory.weights, memory.submodel.positions)
    if _measures(federation):
        (statistics,) = measured_statistics(federation, [(net, state)], engine, batch_size, client)
        state |= statistics
    return state


def is_on_device(federation: Federation, server: Server, job: Job) -> bool:
    """Return True if the weights that a client keeps of a net are on its device alone.

    The server of a deployment remembers that the client trained, and has none of its weights.

    Args:
        federation: World, method and link.
        server: State of the server, with the client states.
        job: The client and its net.
    """
    memory = memory_of(server, job)
    if memory is None or memory.weights:
        return False
    learner = learner_of(federation.method, job, federation.world)
    member = federation.world.family.member(job.submodel)
    return bool(names_kept(federation, learner, member))


def _measures(federation: Federation) -> bool:
    """Return True if norm statistics are measured before a test."""
    return federation.method.local.norm.measures and bool(federation.world.family.statistics)


def is_among_own_classes(federation: Federation) -> bool:
    """Return True if a client is tested on the classes that it holds only, as it is trained.

    That is so if the loss is masked by client, and the task has classes.
    """
    return federation.method.local.masked == "client" and federation.world.task.has_classes
