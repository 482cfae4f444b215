"""The engine `auto`: which way to train is fastest on this machine, found by playing a short round in each.

What is found is written into `config.toml`, so that the run can be repeated; two runs that are asked for alike may be
played in different ways, and differ in their last digits.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fedquilt.engines import Ray
from fedquilt.errors import ConfigError
from fedquilt.round import Evaluation, play

if TYPE_CHECKING:
    from fedquilt.config import Experiment, Ground, Machine

_log = logging.getLogger(__name__)

BATCHES = 3  # that a client has in a short round
_START = 15.0  # seconds a local Ray cluster may take to come up
_WORTH = 10  # times that long a run must be for processes to be tried


def quickest(experiment: Experiment, ground: Ground) -> Machine:
    """Choose the fastest engine on this machine by a short round with each; for the command line and files."""
    size = BATCHES * experiment.method.local.batch_size
    short = replace(
        ground, data=replace(ground.data, parts=ground.data.parts.head(size)), engines={}
    )
    part = len(short.data.parts.order) / max(1, len(ground.data.parts.order))
    taken: dict[Machine, float] = {}
    for machine in _ways(experiment.engine):
        if (
            machine.name == "ray"
            and min(taken.values()) / part * experiment.rounds < _WORTH * _START
        ):
            continue
        taken[machine] = _seconds(replace(experiment, engine=machine), short)
        _log.info("a short round with %s took %.2f s", _said(machine), taken[machine])
    best = min(taken, key=lambda machine: taken[machine])
    _log.info("the run is played with %s", _said(best))
    return best


def _ways(asked: Machine) -> Iterator[Machine]:
    """Stacks on one thread or on all, and processes of one thread each; threads that were asked for stay."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    own = replace(asked, name="vectorised")
    if asked.device != "cpu":
        yield own
        return
    for threads in (asked.threads,) if asked.threads else sorted({1, cores}):
        yield replace(own, threads=threads)
    try:
        Ray.check()
    except ConfigError:
        return
    if cores > 1:
        yield replace(asked, name="ray", threads=1, workers=asked.workers or cores)


def _seconds(experiment: Experiment, short: Ground) -> float:
    """Return what the second of two rounds takes, because the first makes everything ready.

    Both are the last round of the run. A model that grows is whole only then, and most of its time is spent there.
    """
    run, seconds = experiment.prepare(short), 0.0
    server = replace(run.server, round=experiment.rounds - 1)
    for _ in range(2):
        began = time.perf_counter()
        play(
            run.federation,
            server,
            run.fleet,
            run.engine,
            experiment.rounds + 1,
            Evaluation(every=0),
        )
        seconds = time.perf_counter() - began
    return seconds


def _said(machine: Machine) -> str:
    if machine.name == "ray":
        return f"{machine.workers} processes"
    return (
        f"{machine.threads} thread{'s' if machine.threads != 1 else ''}"
        if machine.threads
        else machine.device
    )
