"""The engine `auto`: time a short round with each engine, and use the fastest on this machine.

The engine that was found is written into `config.toml`, so that the run can be repeated. Two runs
with the same settings may use different engines, and then differ in their last digits.
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
from fedquilt.round import Evaluation, run_round

if TYPE_CHECKING:
    from fedquilt.runs.experiment import Experiment, Ground
    from fedquilt.runs.machine import Machine

_log = logging.getLogger(__name__)

BATCHES = 3  # Number of batches that a client trains on in a short round
_START = 15.0  # Seconds that a local Ray cluster may take to start
_WORTH = 10  # Ray is tried if the run takes at least this many times `_START`.


def quickest(experiment: Experiment, ground: Ground) -> Machine:
    """Choose the fastest engine on this machine, by a short round with each.

    Command line and files use this for `engine.name = "auto"`. In a short round, clients train on
    their first `BATCHES` batches only. The engine `ray` is tried only if the run is long enough.

    Args:
        experiment: Settings of the run. Device and threads that it names are kept.
        ground: Data, model and devices of the run.

    Returns:
        The machine settings of the experiment, with name, threads and workers of the fastest
        engine.
    """
    size = BATCHES * experiment.method.local.batch_size
    short = replace(
        ground, data=replace(ground.data, parts=ground.data.parts.head(size)), engines={}
    )
    fraction = len(short.data.parts.order) / max(1, len(ground.data.parts.order))
    seconds: dict[Machine, float] = {}
    for machine in _candidates(experiment.engine):
        if (
            machine.name == "ray"
            and min(seconds.values()) / fraction * experiment.rounds < _WORTH * _START
        ):
            continue
        seconds[machine] = _seconds(replace(experiment, engine=machine), short)
        _log.info("a short round with %s took %.2f s", _described(machine), seconds[machine])
    best = min(seconds, key=lambda machine: seconds[machine])
    _log.info("the run is trained with %s", _described(best))
    return best


def _candidates(requested: Machine) -> Iterator[Machine]:
    """Yield machine settings for the engines to try.

    On a CPU these are `vectorized` on one thread and on all, and `ray` with one thread per process.
    On another device it is `vectorized` alone. A number of threads that was asked for is kept.

    Args:
        requested: Machine settings that were asked for, whose engine is `auto`.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    vectorized = replace(requested, name="vectorized")
    if requested.device != "cpu":
        yield vectorized
        return
    for threads in (requested.threads,) if requested.threads else sorted({1, cores}):
        yield replace(vectorized, threads=threads)
    try:
        Ray.check()
    except ConfigError:
        return
    if cores > 1:
        yield replace(requested, name="ray", threads=1, workers=requested.workers or cores)


def _seconds(experiment: Experiment, short: Ground) -> float:
    """Train two rounds, and return the seconds of the second, because the first one is a warm-up.

    Both are the last round of the run. A model that grows is complete only then, and most of its
    time is spent there.

    Args:
        experiment: Settings of the run, with the engine that is timed.
        short: Data, model and devices, with few samples per client.
    """
    run, seconds = experiment.prepare(short), 0.0
    server = replace(run.server, round=experiment.rounds - 1)
    for _ in range(2):
        began = time.perf_counter()
        run_round(
            run.federation,
            server,
            run.fleet,
            run.engine,
            experiment.rounds + 1,
            Evaluation(every=0),
        )
        seconds = time.perf_counter() - began
    return seconds


def _described(machine: Machine) -> str:
    """Describe how an engine uses the machine: by its processes, its threads or its device."""
    if machine.name == "ray":
        return f"{machine.workers} processes"
    if not machine.threads:
        return machine.device
    return "1 thread" if machine.threads == 1 else f"{machine.threads} threads"
