"""Replay of a deployment from its records: the same clients are absent in the same rounds.

A deployment ends with the model of a sequential run in which the clients that did not reply are
absent, and in which clients join and change their budgets in the same rounds (`changes_of`). The
replay shows it, wherever all samples are in one process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedquilt.engines.sequential import Sequential
from fedquilt.fleets import Change
from fedquilt.round import Record
from fedquilt.round.engine import Attendance, Outcome
from fedquilt.round.fold import Fold
from fedquilt.terms import Job, Server


@dataclass
class Replay(Sequential):
    """Sequential engine that asks the clients of a deployment, and leaves out those that were away.

    Args:
        attendances: What became of the requests of each round, by round from 0.
    """

    attendances: Mapping[int, Attendance] = field(default_factory=dict)
    _next_round: int = field(default=0, repr=False)

    def online(self) -> Sequence[int] | None:
        """Return the clients that the deployment asked in this round."""
        attendance = self.attendances.get(self._next_round)
        return None if attendance is None else sorted(attendance.asked)

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        if self._is_public:  # The server trains, not a client.
            super()._train(server, jobs, fold, outcome)
            return
        attendance = self.attendances[server.round]
        absent, anew = set(attendance.absent), set(attendance.anew) - set(attendance.absent)
        memory = {key: state for key, state in server.memory.items() if key[0] not in anew}
        for key in [key for key in server.memory if key[0] in anew]:
            del server.memory[key]  # The device had lost its state, so it is a new client.
        outcome.missing |= dict.fromkeys(absent, "absent")
        present = [job for job in jobs if job.client.id not in absent]
        super()._train(replace(server, memory=memory), present, fold, outcome)
        self._next_round = server.round + 1


def attendances_of(records: Sequence[Record]) -> dict[int, Attendance]:
    """Return what became of the requests of each round, by round from 0.

    Args:
        records: Records of a deployment.
    """
    return {
        record.round - 1: record.attendance for record in records if record.attendance is not None
    }


def changes_of(records: Sequence[Record]) -> list[Change]:
    """Return the clients that joined and the budgets that changed, for the fleet of a replay.

    Args:
        records: Records of a deployment.
    """
    return [
        Change(round, arrival.client, arrival.budget)
        for round, attendance in attendances_of(records).items()
        for arrival in attendance.arrivals
    ]


def unaccounted(attendance: Attendance) -> set[int]:
    """Return the clients that are counted twice, or whose request is not accounted for.

    Every client that was asked has replied, is missing, has failed, was refused or was late, and
    nobody else has.

    Args:
        attendance: What became of the requests of a round.
    """
    groups = [attendance.missing, attendance.failed, attendance.refused, attendance.late]
    wrong = {client for group in groups for client in group if client not in attendance.asked}
    for client in attendance.asked:
        times = sum(client in group for group in groups)
        if times != (0 if client in attendance.replied else 1):
            wrong.add(client)
    if len(set(attendance.asked)) != len(attendance.asked):
        wrong |= {client for client in attendance.asked if attendance.asked.count(client) > 1}
    return wrong
