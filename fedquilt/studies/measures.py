"""Measures that train nothing: numbers that follow from the settings and the random seed of a run.

A measure is a function of a prepared run and a number of rounds. It returns a table like
`summary.json`, so that columns of tables read it in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedquilt.axes import Positions
from fedquilt.errors import ConfigError
from fedquilt.family import Family
from fedquilt.names import nearest
from fedquilt.runs.per_client import per_client, planned_jobs
from fedquilt.runs.run import Run
from fedquilt.studies.growth import growth, total_cost
from fedquilt.terms import Budget, Submodel

TRAINING = "training"  # The measure that trains and evaluates. All others are in `MEASURES`.
BYTES_OF_FLOAT32 = 4
Measure = Callable[[Run, int], Mapping[str, Any]]


def clients(run: Run, rounds: int) -> dict[str, Any]:
    """Return the costs of clients in a round, and the part of the model that each domain trains.

    The plans of the rounds are followed without training. Deviations are population deviations.

    Args:
        run: A run that was prepared and not trained.
        rounds: Number of rounds after which the trained part of the model is counted.

    Returns:
        `macs`: multiply-adds of one training batch, as `mean` and `deviation` over clients.
        `params`: numbers that travel in a round, to a client and back, likewise.
        `trained`: the part of all parameters that clients of a domain have ever trained, by domain.
    """
    report = per_client(_after(run, rounds), evaluate=False)
    spreads = {name: report.spread(name) for name in ("macs", "params")}
    costs = {
        name: {"mean": mean, "deviation": deviation} for name, (mean, deviation) in spreads.items()
    }
    return {**costs, "trained": report.trained}


def coverage(run: Run, rounds: int) -> dict[str, Any]:
    """Count how often clients train each channel and entry of the last convolution.

    All clients of all rounds count. Nothing is trained. An entry of a weight counts if the client
    has both its input and its output channel.

    Args:
        run: A run that was prepared and not trained.
        rounds: Number of rounds that are counted.

    Returns:
        `weight`: name of the last trainable weight with four dimensions.
        `channel`, `entry`: the smallest count (`least`), and `mean` and `deviation` over all output
        channels or all entries.

    Raises:
        ConfigError: The model has no convolution, or no client trains it.
    """
    family = run.world.family
    weight = _last_convolution(family)
    sizes = family.layout.shape(weight, family.layout.sizes)[:2]
    outputs = []  # One row per sub-model, with 1 where it has the channel.
    inputs = []
    for job in planned_jobs(_after(run, rounds)):
        if weight not in family.member(job.submodel).trainable:
            continue
        positions = family.cutter.rows(weight, job.submodel.index)
        outputs.append(_indicator(positions[0], sizes[0]))
        inputs.append(_indicator(positions[1], sizes[1]))
    if not outputs:
        raise ConfigError(
            f"the measure 'coverage' was asked for; no client trains {weight} in {rounds} rounds."
        )
    has_output = torch.stack(outputs)  # (sub-model, output channel)
    has_input = torch.stack(inputs)  # (sub-model, input channel)
    counts = {"channel": has_output.sum(0), "entry": has_output.T @ has_input}
    return {"weight": weight, **{name: _evenness(count) for name, count in counts.items()}}


def sizes(run: Run, rounds: int) -> dict[str, Any]:
    """Return parameters and multiply-adds of the models that the method deploys and trains.

    A mixture of several nets counts as the sum of them. Multiply-adds are those of one sample.

    Args:
        run: A run that was prepared and not trained.
        rounds: Number of rounds after which the model is deployed. A model that grows is larger
            later.

    Returns:
        `params`, `macs`: sizes of the deployed model by share, for the shares of the fleet and
        those that are evaluated besides.
        `clients`: `params`, `macs` and `bytes` (float32) of what a client trains in the first
        round, as means over all clients.
    """
    world, fleet = run.world, run.fleet
    shares = {budget.share for budget in fleet.kinds if budget.share is not None}
    deployed = {}
    for share in sorted(shares | set(run.evaluation.shares), reverse=True):
        nets = run.method.deploy(_after(run, rounds).server, Budget(share=share), world)
        deployed[str(float(share))] = _cost(world.family, nets)
    trained = []
    for id in range(fleet.num_clients):
        client = fleet.client(id, 0, world.seed, run.data.size(id))
        trained.append(_cost(world.family, run.method.plan(run.server, client, world)))
    params = sum(cost[0] for cost in trained) / len(trained)
    macs = sum(cost[1] for cost in trained) / len(trained)
    return {
        "params": {share: cost[0] for share, cost in deployed.items()},
        "macs": {share: cost[1] for share, cost in deployed.items()},
        "clients": {"params": params, "macs": macs, "bytes": BYTES_OF_FLOAT32 * params},
    }


def traffic(run: Run, rounds: int) -> dict[str, Any]:
    """Return the bytes that travel in a round, counted from the plans and payloads of some rounds.

    Nothing is trained. Payloads are built from the initial weights and coded by the run's link.

    Args:
        run: A prepared run, of any method whose clients send weights alone.
        rounds: Number of rounds that are counted.

    Returns:
        `bytes_down`, `bytes_up`: sums over all rounds and clients.
        `round_bytes`: mean over rounds of the bytes of all clients, both ways.
        `params`, `macs`: parameters and multiply-adds per sample of the model that is deployed at
        share 1.

    Raises:
        ConfigError: The method sends state besides weights.
    """
    spent = total_cost(run, rounds)
    nets = run.method.deploy(run.server, Budget(share=1.0), run.world)
    params, macs = _cost(run.world.family, nets)
    return {
        "bytes_down": spent.down,
        "bytes_up": spent.up,
        "round_bytes": (spent.down + spent.up) / rounds,
        "params": params,
        "macs": macs,
    }


def limits(run: Run, rounds: int) -> dict[str, Any]:
    """Return the part of the devices' limits on multiply-adds that their own nets use.

    Devices without such a limit are left out.

    Args:
        run: A prepared run of a method whose clients keep nets of their own, such as RaFL.
        rounds: Has no effect, because limits do not change.

    Returns:
        `limit`, `used`: limits and the nets that devices keep, as means over devices in
        multiply-adds per sample.
        `utilisation`: `used` divided by `limit`.
        `common_utilisation`: the same if all devices had the largest net that fits every device.
        `nets`: number of different nets.
        All other entries of `Method.account` are included.

    Raises:
        ConfigError: The method does not report this, or no device has a limit on multiply-adds.
    """
    counts = run.fleet.counts
    account = run.method.account(counts, run.world)
    if "utilisation" not in account:
        raise ConfigError(
            f"the measure 'limits' was asked for with {type(run.method).__name__}; it needs a "
            "method whose clients keep nets of their own, such as RaFL, and limits on "
            "multiply-adds."
        )
    limited = {budget: count for budget, count in counts.items() if budget.macs}
    limit = sum((budget.macs or 0.0) * count for budget, count in limited.items()) / sum(
        limited.values()
    )
    return {
        **account,
        "limit": limit,
        "used": limit * account["utilisation"],
        "nets": len({run.method.key(budget, run.world) for budget in limited}),
    }


MEASURES: dict[str, Measure] = {
    "clients": clients,
    "coverage": coverage,
    "growth": growth,
    "limits": limits,
    "sizes": sizes,
    "traffic": traffic,
}


def measure_problems(measure: str) -> list[str]:
    """Return a list with one sentence if a measure is unknown, and else an empty list.

    Known measures are `TRAINING` and the names of `MEASURES`. The sentence suggests the nearest
    one.
    """
    names = (TRAINING, *MEASURES)
    return (
        [] if measure in names else [f"there is no measure {measure!r}.{nearest(measure, names)}"]
    )


def _after(run: Run, rounds: int) -> Run:
    """Return a copy of the run whose server is at round `rounds`. Its weights are unchanged."""
    return replace(run, server=replace(run.server, round=rounds))


def _last_convolution(family: Family) -> str:
    full_model = family.member(family.whole)
    weights = [name for name in full_model.trainable if len(family.layout.dims[name]) == 4]
    if not weights:
        raise ConfigError(
            "the measure 'coverage' was asked for; it counts channels of a convolution."
        )
    return weights[-1]


def _indicator(positions: Positions | None, size: int) -> Tensor:
    """Return a vector of `size` numbers, with 1 at the positions and 0 elsewhere.

    If `positions` is None, the axis is not cut, and all numbers are 1.
    """
    if positions is None:
        return torch.ones(size)
    indicator = torch.zeros(size)
    indicator[positions.tensor] = 1
    return indicator


def _evenness(counts: Tensor) -> dict[str, float]:
    """Return the smallest count, the mean and the population standard deviation of all counts.

    They are called `least`, `mean` and `deviation`. `counts` may have any shape.
    """
    exact = counts.double()
    return {
        "least": int(counts.min()),
        "mean": float(exact.mean()),
        "deviation": float(exact.std(correction=0)),
    }


def _cost(family: Family, nets: Iterable[Submodel]) -> tuple[int, int]:
    """Return the parameters and the multiply-adds per sample, each summed over all `nets`.

    Weights that several nets share count once for each net.
    """
    costs = [family.cost(net) for net in nets]
    return sum(cost.params for cost in costs), sum(cost.macs for cost in costs)
