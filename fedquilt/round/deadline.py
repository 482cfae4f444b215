"""The deadline of a round: the update of a client that takes longer is dropped.

The clock of the link adds up the time of a client's download, training and upload. For most links
and methods, the length of an upload does not depend on what was learnt. Late clients are then known
before training, and they are not trained.

If the length of an upload depends on what was learnt, a late client is found after it has trained.
Its update is already in the fold, and some engines have summed it with others. The round is
therefore trained again without that client. This gives the same numbers for all other clients,
because a client's random numbers do not depend on who else takes part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fedquilt.round.engine import Outcome, Spent
from fedquilt.round.update_checks import checked_fold

if TYPE_CHECKING:
    from fedquilt.round.engine import Engine
    from fedquilt.round.federation import Federation
    from fedquilt.round.fold import Fold
    from fedquilt.terms import Job, Server


def train_until_deadline(
    federation: Federation, server: Server, jobs: Sequence[Job], engine: Engine
) -> tuple[Outcome, Fold]:
    """Train the jobs of a round, and drop the clients that are late.

    A late client leaves no memory, no loss and no update. What it received and computed is charged,
    and no upload. Without a deadline all jobs are trained. If a client turns out to be late after
    training, the round is trained again without it.

    Args:
        federation: World, method and link.
        server: State that the round starts from.
        jobs: Jobs of all clients of the round.
        engine: Engine of the run.

    Returns:
        Client states, losses and costs of the round, and the fold of the updates that came in time.
    """
    late: dict[int, float] = {}
    spent: dict[int, Spent] = {}
    if federation.link.deadline is not None:
        spent = engine.foreseen(federation, server, jobs)
        late = _late(federation, spent)

    while True:
        on_time = [job for job in jobs if job.client.id not in late]
        fold = checked_fold(federation, server, on_time)
        outcome = engine.train(federation, server, on_time, fold)
        newly_late = _late(federation, outcome.costs)
        if not newly_late:
            break
        late |= newly_late
        spent |= outcome.costs

    for client in late:
        down, _, macs, first = spent[client]
        outcome.charge(client, down, 0, macs, first)
    outcome.late = late
    return outcome, fold


def round_seconds(federation: Federation, outcome: Outcome) -> float | None:
    """Return the simulated seconds of a round, or None if the link has no clock.

    The server waits for the slowest client. If some client is late, it waits until the deadline.

    Args:
        federation: World, method and link.
        outcome: Costs of the clients, and those that are late.
    """
    link = federation.link
    if link.clock is None:
        return None
    if outcome.late:
        return link.deadline
    return link.clock.slowest(outcome.costs, federation.method.wire_factor)


def _late(federation: Federation, costs: Mapping[int, Spent]) -> dict[int, float]:
    clock = federation.link.clock
    return {} if clock is None else clock.late(costs, federation.method.wire_factor)
