"""Assignment of a round's jobs to stacks, and of stacks to waves that train at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from fedquilt.round.training.learner import Learner
from fedquilt.terms import Arch, Job

if TYPE_CHECKING:
    from fedquilt.engines.vectorized.engine import Vectorized


# Jobs that can be stacked, by architecture, local training and age of the optimizer.
JobsByKind = Mapping[tuple[Arch, Learner, int], list[Job]]
Wave = list[tuple[Learner, list[Job]]]  # Stacks that train at the same time

MIN_MEAN_GROUP = 4  # Least mean number of clients in groups with equal numbers of samples


def waves(engine: Vectorized, jobs_by_kind: JobsByKind) -> Iterator[Wave]:
    """Yield waves, which are lists of stacks that are trained at the same time.

    A CPU trains one stack at a time, a GPU as many as fit into memory. Clients that take the most
    memory come first.

    Args:
        engine: Engine that has the memory, the device and the client groups.
        jobs_by_kind: Jobs that can be stacked, by architecture, local training and optimizer age.
    """
    wave: Wave = []
    free_bytes = 0
    client_bytes = {
        (arch, learner, age): _training_bytes(engine, arch, learner)
        for arch, learner, age in jobs_by_kind
    }
    # The largest take longest, so that they begin.
    for kind in sorted(jobs_by_kind, key=lambda kind: -client_bytes[kind]):
        arch, learner, _ = kind
        max_clients = max(1, engine.memory // client_bytes[kind])
        for stack_jobs in _split(engine, arch, learner, jobs_by_kind[kind], max_clients):
            stack_bytes = len(stack_jobs) * client_bytes[kind]
            if wave and (engine.device.type != "cuda" or stack_bytes > free_bytes):
                yield wave
                wave = []
            free_bytes = (free_bytes if wave else engine.memory) - stack_bytes
            wave.append((learner, stack_jobs))
    if wave:
        yield wave


def _training_bytes(engine: Vectorized, arch: Arch, learner: Learner) -> int:
    """Return the estimated bytes that one client takes in training.

    Args:
        engine: Engine that has the family.
        arch: Architecture of the client's member.
        learner: Local training, which gives batch size and optimizer slots.
    """
    activation_sets = learner.activation_sets(engine.world.family.member(arch))
    samples = learner.local.batch_size * activation_sets
    return engine.client_bytes(arch, samples, learner.num_slots)


def _split(
    engine: Vectorized, arch: Arch, learner: Learner, jobs: list[Job], max_clients: int
) -> Iterator[list[Job]]:
    """Yield the jobs of one member as stacks of at most `max_clients` clients.

    If steps are captured, stacks have 1, 2, 4, 8 … clients. If the fastest layout is "alone", every
    stack has one client.

    Args:
        engine: Engine that has the client groups.
        arch: Architecture of the member.
        learner: Local training of all clients.
        jobs: Jobs that can be stacked.
        max_clients: Number of clients that fit into memory.
    """
    for remaining in _by_samples(engine, jobs):
        while remaining:
            size = min(len(remaining), max_clients)
            # Groups have 1, 2, 4, 8 … clients. Cohorts change from round to round, and every
            # number of clients would need a capture of its own.
            if engine.captures_steps:
                size = 1 << size.bit_length() - 1
            if engine.groups.layout_for(arch, learner, size) == "alone":
                size = 1
            yield remaining[:size]
            remaining = remaining[size:]


def _by_samples(engine: Vectorized, jobs: list[Job]) -> list[list[Job]]:
    """Group clients by their number of samples if this gives few groups.

    Their last batches then have equal sizes and can be captured. With many groups, all clients are
    returned as one group in ascending order of their samples. A captured step lasts as long for
    every client as for the largest one. If steps are not captured, all clients are one group in
    their present order.
    """
    if not engine.captures_steps:
        return [jobs]
    by_size = sorted(jobs, key=lambda job: job.client.size)
    groups = [list(group) for _, group in groupby(by_size, key=lambda job: job.client.size)]
    return groups if MIN_MEAN_GROUP * len(groups) <= len(jobs) else [by_size]
