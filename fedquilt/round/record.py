"""The record of a round, which is a line of `rounds.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedquilt.round.engine import Attendance, EvaluationReport
from fedquilt.round.scores import Grades
from fedquilt.terms import Submodel


@dataclass(frozen=True)
class Record:
    """Figures of one round, as a line of `rounds.jsonl` has them."""

    round: int  # Number of the round, counted from 1
    seconds: float  # Wall-clock time of the round, with its evaluation
    clients: int  # Clients in the cohort
    bytes_down: int  # Bytes that arrived at clients
    bytes_up: int  # Bytes that arrived at the server
    macs: int  # Multiply-adds of the clients' training
    loss: float | None  # Mean training loss. None: no client took part
    stacks: int = 0  # Number of groups of clients that were trained as one. Not written to the file
    grades: Grades = field(default_factory=Grades)  # Metrics, if the round was evaluated
    # Simulated time of the slowest client. None: the link has no clock
    link_seconds: float | None = None
    missing: int = 0  # Clients of the cohort that did not reply
    # Time of the server's own training. None: the server does not train
    server_seconds: float | None = None
    server_macs: int = 0  # Multiply-adds of the server, of its teachers' outputs and its training
    server_steps: int = 0  # Optimizer steps of all nets that the server trained
    bytes_first: int = 0  # Bytes of `bytes_down` that clients get once, such as their private nets
    # Clients whose update came after the deadline. None: the link has no deadline
    late: tuple[int, ...] | None = None
    # Requests to devices and what became of them. None: clients are simulated
    attendance: Attendance | None = None
    # Sub-models that clients trained, by client. (): they are too long to record. None: plans do
    # not depend on the server's state, so that a report computes them again
    plans: Mapping[int, tuple[Submodel, ...]] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain values, which JSON can hold.

        `accuracy`, `metrics` and `main` are present only if the round was evaluated. `validation`
        is present if validation samples were tested in addition to the test set. `main` names the
        metric that tables, targets and trackers use. `accuracy` is empty if the task has none.
        `evaluated_by` is present if devices have evaluated.

        Figures that do not apply are left out, such as `link_seconds` without a clock or
        `server_macs` of a server that does not train. `late` is a count, and `late_clients` has the
        numbers. `plans` has the sub-models of clients as `Submodel.to_dict` writes them. `stacks`
        is never included.
        """
        record = {
            name: value
            for name, value in vars(self).items()
            if name not in ("grades", "stacks", "late", "attendance", "plans")
        }
        if self.link_seconds is None:
            del record["link_seconds"]
        if self.late is not None:
            record |= {"late": len(self.late), "late_clients": list(self.late)}
        if self.attendance is not None:
            record["attendance"] = self.attendance.to_dict()
        if self.plans is not None:
            record["plans"] = {
                str(client): [submodel.to_dict() for submodel in submodels]
                for client, submodels in self.plans.items()
            }
        for name in ("missing", "bytes_first"):
            if not record[name]:
                del record[name]
        if self.server_seconds is None:
            for name in ("server_seconds", "server_macs", "server_steps"):
                del record[name]
        if self.grades.main:
            grades = self.grades
            record |= {"accuracy": grades.accuracy, "metrics": grades.metrics, "main": grades.main}
            record |= {"validation": grades.validation} if grades.validation else {}
            record |= {"evaluated_by": grades.report.to_dict()} if grades.report else {}
        return record

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> Record:
        """Return the record that `to_dict` wrote.

        Records of earlier versions have `accuracy` next to `metrics`, not in it. They are read too.
        """
        grade_keys = ("accuracy", "metrics", "main", "validation", "late_clients", "evaluated_by")
        values = {name: value for name, value in plain.items() if name not in grade_keys}
        if "late" in plain:
            values["late"] = tuple(plain["late_clients"])
        if "attendance" in plain:
            values["attendance"] = Attendance.from_dict(plain["attendance"])
        if "plans" in plain:
            values["plans"] = {
                int(client): tuple(map(Submodel.from_dict, submodels))
                for client, submodels in plain["plans"].items()
            }
        if "accuracy" not in plain:
            return Record(**values)
        metrics = plain["metrics"]
        if "main" not in plain:
            metrics = {"accuracy": plain["accuracy"], **metrics}
        report = None
        if "evaluated_by" in plain:
            report = EvaluationReport.from_dict(plain["evaluated_by"])
        main, validation = plain.get("main", "accuracy"), plain.get("validation", {})
        return Record(**values, grades=Grades(main, metrics, validation, report))
