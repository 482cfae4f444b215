"""Count what a growing model costs, without training it.

The plans, the learners and the link of a prepared run are asked, round by round, as the engines ask
them. So the bytes and the multiply-adds are those that the records of the trained run have.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fedquilt.clientwise import planned_jobs
from fedquilt.engines.simulation import classes_held
from fedquilt.errors import ConfigError
from fedquilt.experiment import Run
from fedquilt.methods.progfed import ProgFed, num_stages
from fedquilt.round.client import receive, send, upload_of
from fedquilt.round.engine import Spent
from fedquilt.round.link import PERFECT
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.state import Left
from fedquilt.terms import WHOLE, Job, Payload, Submodel


def growth(run: Run, rounds: int) -> dict[str, Any]:
    """Return what a model that grows costs, and the part of it that growing saves.

    It is compared with the inner method of ProgFed, which trains the whole model in every round. Rounds
    of warm-up that come on top of the others (`extra_warmup`) are rounds of the growing model alone.

    Args:
        run: A prepared run of ProgFed.
        rounds: Number of rounds that are counted.

    Returns:
        `bytes_down`, `bytes_up`, `macs`: sums over all rounds and clients, of the growing model.
        `whole`: the same numbers of the whole model.
        `saved`: 1 minus the ratio of the two, for `bytes` (both ways), `bytes_down`, `bytes_up` and `macs`.
        `upload_ratio`: bytes up over the run's link, as a part of those of the whole model without a
            codec, for the `whole` model and the `growing` one.
        `blocks`, `heads`, `params`: parameters of E_s, of G_s and of the nets of all stages, by stage; of
            the last one, which is the whole model, as `whole` too.
        `first_share`: parameters of the first stage as a part of the whole model's.

    Raises:
        ConfigError: The method does not grow, or it sends state besides weights.
    """
    method = run.method
    if not isinstance(method, ProgFed):
        raise ConfigError(
            f"the measure 'growth' was asked for with {type(method).__name__}; it is of ProgFed alone."
        )
    stages = num_stages(run.world.family)
    added = method.warm_rounds * (stages - 1) if method.extra_warmup else 0
    grown = total_cost(run, rounds)
    inner = replace(run.federation, method=method.over)
    whole = total_cost(replace(run, federation=inner), rounds - added)
    plain = whole
    if run.link.coder:
        plain = total_cost(replace(run, federation=replace(inner, link=PERFECT)), rounds - added)

    return {
        **_named(grown),
        "whole": _named(whole),
        "saved": {
            "bytes": 1 - (grown.down + grown.up) / (whole.down + whole.up),
            "bytes_down": 1 - grown.down / whole.down,
            "bytes_up": 1 - grown.up / whole.up,
            "macs": 1 - grown.macs / whole.macs,
        },
        "upload_ratio": {"whole": whole.up / plain.up, "growing": grown.up / plain.up},
        **_parameters(run, stages),
    }


def total_cost(run: Run, rounds: int) -> Spent:
    """Return the bytes and multiply-adds of a number of rounds, as the records of the trained run have them.

    Args:
        run: A prepared run, of any method whose clients send weights alone.
        rounds: Number of rounds that are counted.
    """
    count = _Count(run)
    down = up = macs = 0
    for job in planned_jobs(replace(run, server=replace(run.server, round=rounds))):
        cost = count.of(job)
        down += cost.down
        up += cost.up
        macs += cost.macs
    copies = run.method.copies
    return Spent(down * copies, up * copies, macs)


class _Count:
    """The costs of jobs, each found once: most rounds repeat an earlier one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.costs: dict[tuple[int, Submodel, Learner], Spent] = {}
        self.traffic: dict[tuple[Submodel, Submodel], tuple[int, int]] = {}

    def of(self, job: Job) -> Spent:
        """Return the cost of one job. Over a link that may lose weights every job has its own."""
        learner = self.run.method.learner(job, self.run.world)
        if learner.state:
            raise ConfigError(
                f"bytes and multiply-adds of {type(self.run.method).__name__} were to be counted, whose clients send "
                "state besides weights; a method that sends weights alone would work."
            )
        if self.run.link.lossy:
            self.costs.clear()
            self.traffic.clear()
        key = job.client.id, job.submodel, learner
        if key not in self.costs:
            self.costs[key] = self._cost(job, learner)
        return self.costs[key]

    def _cost(self, job: Job, learner: Learner) -> Spent:
        run, client = self.run, job.client.id
        member = run.world.family.member(job.submodel)
        wanted = learner.upload(member, job.submodel, classes_held(run.world, run.data, client))
        key = job.submodel, wanted
        if key not in self.traffic:
            self.traffic[key] = self._bytes(job, learner, wanted)

        sizes = [len(batch) for batch in itinerary(run.data.size(client), learner.local, key=0)]
        macs = learner.macs(member, sizes)
        macs += learner.pass_macs(member, run.data.size(client), run.world.num_public)
        return Spent(*self.traffic[key], macs)

    def _bytes(self, job: Job, learner: Learner, wanted: Submodel) -> tuple[int, int]:
        """Return the bytes down and up of a job whose training changes nothing."""
        federation, family = self.run.federation, self.run.world.family
        member = family.member(job.submodel)
        names = learner.received(member)
        payload = Payload(
            job.submodel, family.cutter.gather(federation.initial, job.submodel, names)
        )
        start = receive(federation, job, learner, payload, None, federation.initial)
        own = {name: start.state[name] for name in learner.sent(member)}
        narrowed = family.cutter.narrow(own, job.submodel.held, wanted.held)
        upload = upload_of(federation, job, learner, wanted, narrowed, Left())
        return start.bytes, send(
            federation, job, upload, start.known, None, federation.initial
        ).bytes


def _named(cost: Spent) -> dict[str, int]:
    return {"bytes_down": cost.down, "bytes_up": cost.up, "macs": cost.macs}


def _parameters(run: Run, stages: int) -> dict[str, Mapping[str, int] | float]:
    """Return the parameters of blocks, heads and nets by stage."""
    family = run.world.family
    blocks, heads, params = {}, {}, {}
    for stage in range(1, stages + 1):
        variant = WHOLE if stage == stages else f"stage{stage}"
        blocks[str(stage)] = _count(run, f"stage{stage}")
        heads[str(stage)] = _count(run, f"head{stage}")
        params[str(stage)] = family.member(family.at(variant).whole).count
    params[WHOLE] = params[str(stages)]
    return {
        "blocks": blocks,
        "heads": heads,
        "params": params,
        "first_share": params["1"] / params[WHOLE],
    }


def _count(run: Run, part: str) -> int:
    """Return the number of parameters of a part of the model."""
    family = run.world.family
    layout = family.layout
    names = [name for name in layout.parts[part] if name in family.trainable]
    return sum(math.prod(layout.shape(name, layout.sizes)) for name in names)
