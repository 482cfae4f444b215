"""Descriptions of a run as plain values: its summary, and settings of a run from Python."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fedquilt.names import registered
from fedquilt.round.deployed import members_by_share
from fedquilt.round.labels import labels_by_share
from fedquilt.runs.fingerprint import evaluated_on, fingerprint
from fedquilt.runs.round_log import gaps
from fedquilt.tasks import TASKS
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.runs.run import Run


def run_settings(run: Run, rounds: int) -> dict[str, Any]:
    """Return a description of a run from Python, as plain values.

    It describes the parts of the run in words, so that the run cannot be rebuilt from it.

    Args:
        run: The run.
        rounds: Total number of rounds, which the run need not have completed.
    """
    world, identity = run.world, fingerprint(run)
    return {
        "rounds": rounds,
        "seed": world.seed,
        "engine": type(run.engine).__name__.lower(),
        "device": str(run.engine.device),
        "precision": world.precision,
        "link": str(run.link),
        "method": repr(run.method),
        "task": repr(world.task),
        "fleet": f"{run.fleet.num_clients} clients, {run.fleet.cohort} a round",
        "data": run.data.name,
        **evaluated_on(run),
        "model": world.family.title,
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
        "fedquilt": __version__,
    }


def describe(run: Run, rounds: int, missing: Sequence[str]) -> str:
    """Return the text of config.toml for a run of a script whose settings cannot be written.

    It describes the run, but cannot repeat it.

    Args:
        run: The run.
        rounds: Total number of rounds.
        missing: Reasons why some parts have no settings.
    """
    table = {**run_settings(run, rounds), "missing": list(missing)}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
    return "# A run from Python; its script repeats it.\n[python]\n" + "\n".join(lines) + "\n"


def summarize(run: Run) -> dict[str, Any]:
    """Return the summary of a run, as summary.json has it."""
    from fedquilt.engines import ENGINES
    from fedquilt.methods import METHODS

    family = run.world.family
    members = members_by_share(
        run.method, run.server, run.fleet.kinds, run.world, run.evaluation.shares
    )
    labels = labels_by_share(run.method, run.fleet.kinds, run.world, run.evaluation.shares)
    nets = {share: [family.member(net) for net in mix] for share, mix in members.items()}
    last, task = run.grades, run.world.task
    first = sum(record.bytes_first for record in run.records)
    link_seconds = [
        record.link_seconds for record in run.records if record.link_seconds is not None
    ]
    late = [len(record.late) for record in run.records if record.late is not None]
    missing = gaps(run.records, run.server.round)
    return {
        "method": registered(METHODS, run.method),
        "model": family.title,
        "data": run.data.name,
        **evaluated_on(run),
        "engine": registered(ENGINES, run.engine),
        "precision": run.world.precision,
        "seed": run.world.seed,
        "rounds": run.server.round,
        **({"missing_rounds": missing} if missing else {}),
        "seconds": sum(record.seconds for record in run.records),
        "bytes_down": sum(record.bytes_down for record in run.records),
        "bytes_up": sum(record.bytes_up for record in run.records),
        **({"link_seconds": sum(link_seconds)} if link_seconds else {}),
        **({"late": sum(late)} if late else {}),
        **_server_costs(run),
        **({"bytes_first": first} if first else {}),
        **run.method.account(run.fleet.counts, run.world),
        "accuracy": last.accuracy,
        "metrics": last.metrics,
        **({"best": run.best.to_dict()} if run.best else {}),
        "task": registered(TASKS, task),
        "main": task.main.name,
        "higher_is_better": task.main.higher_is_better,
        "percent": task.main.is_rate,
        "members": {
            share: {
                "params": sum(net.count for net in members_of_share),
                "macs": sum(net.macs for net in members_of_share),
            }
            for share, members_of_share in nets.items()
        },
        **({"labels": labels} if labels else {}),
        "devices": {
            share: [budget.bounds for budget in budgets] for share, budgets in run.devices.items()
        },
        "note": run.note,
        "fedquilt": __version__,
    }


def _server_costs(run: Run) -> dict[str, Any]:
    """Return seconds, multiply-adds and steps of the server's own training, summed over all rounds.

    The result is empty if the server does not train.
    """
    learnt = [record for record in run.records if record.server_seconds is not None]
    if not learnt:
        return {}
    return {
        "server_seconds": sum(record.server_seconds or 0.0 for record in learnt),
        "server_macs": sum(record.server_macs for record in learnt),
        "server_steps": sum(record.server_steps for record in learnt),
    }
