"""Cost of a growing model, counted without training it.

The plans, learners and link of a prepared run are called round by round, as the engines call them.
The bytes and multiply-adds are therefore those in the records of the trained run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any

from fedquilt.engines.client_inputs import classes_present
from fedquilt.errors import ConfigError
from fedquilt.methods.progfed import ProgFed
from fedquilt.methods.progfed_stages import num_stages
from fedquilt.round.client import receive, untrained_upload
from fedquilt.round.engine import Outcome, Spent
from fedquilt.round.link import PERFECT
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.learner import Learner
from fedquilt.runs.per_client import planned_jobs
from fedquilt.runs.run import Run
from fedquilt.terms import WHOLE, Job, Payload, Submodel


def growth(run: Run, rounds: int) -> dict[str, Any]:
    """Return the cost of a model that grows, and the part of the cost that growing saves.

    It is compared with the inner method of ProgFed, which trains the whole model in every round.
    Rounds of warm-up that come on top of the others (`extra_warmup`) count for the growing model
    alone.

    Args:
        run: A prepared run of ProgFed.
        rounds: Number of rounds that are counted.

    Returns:
        `bytes_down`, `bytes_up`, `macs`: sums over all rounds and clients for the growing model.
        `whole`: the same numbers for the whole model.
        `saved`: 1 minus the ratio of the two, for `bytes` (both ways), `bytes_down`, `bytes_up` and
        `macs`.
        `upload_ratio`: bytes up over the run's link divided by those of the whole model without a
        codec, for the `whole` model and the `growing` one.
        `blocks`, `heads`, `params`: parameters of E_s, of G_s and of the nets of all stages, by
        stage. The last stage is the whole model and is also listed as `whole`.
        `first_share`: parameters of the first stage divided by those of the whole model.

    Raises:
        ConfigError: The method does not grow, or it sends state besides weights.
    """
    method = run.method
    if not isinstance(method, ProgFed):
        raise ConfigError(
            f"the measure 'growth' was asked for with {type(method).__name__}; it is of ProgFed "
            "alone."
        )
    stages = num_stages(run.world.family)
    added = method.warm_rounds * (stages - 1) if method.extra_warmup else 0
    grown_cost = total_cost(run, rounds)
    inner = replace(run.federation, method=method.over)
    whole_cost = total_cost(replace(run, federation=inner), rounds - added)
    uncoded_cost = whole_cost
    if run.link.coder:
        uncoded_cost = total_cost(
            replace(run, federation=replace(inner, link=PERFECT)), rounds - added
        )

    return {
        **_named(grown_cost),
        "whole": _named(whole_cost),
        "saved": {
            "bytes": 1 - (grown_cost.down + grown_cost.up) / (whole_cost.down + whole_cost.up),
            "bytes_down": 1 - grown_cost.down / whole_cost.down,
            "bytes_up": 1 - grown_cost.up / whole_cost.up,
            "macs": 1 - grown_cost.macs / whole_cost.macs,
        },
        "upload_ratio": {
            "whole": whole_cost.up / uncoded_cost.up,
            "growing": grown_cost.up / uncoded_cost.up,
        },
        **_parameters(run, stages),
    }


def total_cost(run: Run, rounds: int) -> Spent:
    """Return the bytes and multiply-adds of some rounds, as the trained run would record them.

    They are sums over all clients and rounds. Nothing is trained. Uploads that miss the deadline of
    the link do not count.

    Args:
        run: A prepared run, of any method whose clients send weights alone.
        rounds: Number of rounds that are counted, from the first one on.

    Raises:
        ConfigError: Clients send state besides weights.
    """
    count = _Count(run)
    down = up = macs = 0
    clock, wire_factor = run.link.clock, run.method.wire_factor
    jobs = planned_jobs(replace(run, server=replace(run.server, round=rounds)))
    for _, cohort in groupby(jobs, key=lambda job: job.round):
        outcome = Outcome()
        for job in cohort:
            outcome.charge(job.client.id, *count.of(job))
        late = clock.late(outcome.costs, wire_factor) if clock else {}
        total = outcome.total
        down += total.down
        up += total.up - sum(outcome.costs[client].up for client in late)
        macs += total.macs
    return Spent(down * wire_factor, up * wire_factor, macs)


class _Count:
    """Costs of jobs. Each is computed once, because most rounds repeat an earlier one."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.costs: dict[tuple[int, Submodel, Learner], Spent] = {}
        self.traffic: dict[tuple[Submodel, Submodel], tuple[int, int]] = {}

    def of(self, job: Job) -> Spent:
        """Return the bytes down, the bytes up and the multiply-adds of one client's job.

        Costs are cached by client, sub-model and learner. Over a link that may lose weights nothing
        is cached, because the bytes differ between jobs.

        Raises:
            ConfigError: The client sends state besides weights.
        """
        learner = self.run.method.learner(job, self.run.world)
        if learner.state:
            raise ConfigError(
                f"bytes and multiply-adds of {type(self.run.method).__name__} were to be counted, "
                "whose clients send state besides weights; a method that sends weights alone "
                "would work."
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
        uploaded = learner.upload(
            member, job.submodel, classes_present(run.world, run.data, client)
        )
        key = job.submodel, uploaded
        if key not in self.traffic:
            self.traffic[key] = self._bytes(job, learner, uploaded)

        sizes = [len(batch) for batch in itinerary(run.data.size(client), learner.local, key=0)]
        macs = learner.macs(member, sizes)
        macs += learner.pass_macs(member, run.data.size(client), run.world.num_public)
        return Spent(*self.traffic[key], macs)

    def _bytes(self, job: Job, learner: Learner, wanted: Submodel) -> tuple[int, int]:
        """Return the bytes down and up of a job, as if training left the initial weights unchanged.

        Args:
            job: Client, round and sub-model.
            learner: Local training of the job, which decides which weights travel.
            wanted: Sub-model that the client sends back.
        """
        federation, family = self.run.federation, self.run.world.family
        member = family.member(job.submodel)
        names = learner.received(member)
        payload = Payload(
            job.submodel, family.cutter.gather(federation.initial, job.submodel, names)
        )
        start = receive(federation, job, learner, payload, None, federation.initial)
        return start.bytes, untrained_upload(federation, job, learner, wanted, start)


def _named(cost: Spent) -> dict[str, int]:
    return {"bytes_down": cost.down, "bytes_up": cost.up, "macs": cost.macs}


def _parameters(run: Run, stages: int) -> dict[str, Mapping[str, int] | float]:
    """Return the numbers of parameters by stage, as the last entries of `growth`.

    Keys of `blocks`, `heads` and `params` are the numbers of stages from "1" on, as text. `blocks`
    and `heads` count one stage alone, and `params` the net that has grown up to it.

    Args:
        run: A prepared run of ProgFed.
        stages: Number of stages.
    """
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
    """Return the number of trainable parameters of a part of the model at full width.

    Args:
        run: A prepared run.
        part: Name of the part in the family's layout, such as "stage1" or "head1".
    """
    family = run.world.family
    layout = family.layout
    names = [name for name in layout.parts[part] if name in family.trainable]
    return sum(math.prod(layout.shape(name, layout.sizes)) for name in names)
