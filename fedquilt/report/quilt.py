"""The quilt: positions that clients trained in each round, computed from the settings of a run.

Records do not have them, because cohorts and plans follow from the settings and the random seed:
`draw_cohort` and `plan` are called again. Records have what does not follow: who did not reply, and
whose update came too late. These updates do not count. What a link lost follows from the seed, and
does not count either.

A plan that depends on the state of the server cannot be computed again. Its positions are in the
records. In records of earlier versions they are not, and the report says so: the plan gets a state
that raises an error when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NoReturn

import numpy as np

from fedquilt.display.thinning import Row, bins
from fedquilt.errors import ConfigError, RecordError
from fedquilt.round import Record
from fedquilt.round.labels import labels_by_share, short_share
from fedquilt.runs.per_client import arrived
from fedquilt.runs.run import Run
from fedquilt.terms import Budget, Job, Server, Submodel

MAX_AXES = 6  # Axes that a report offers, those with most positions
MAX_COLUMNS = 100  # Columns of a quilt: rounds, or equal parts of all rounds
MAX_ROWS = 64  # Cells of a column: positions with equal counts, or equal parts of an axis


class StateReadError(ConfigError):
    """A plan depends on the state of the server, which is not known after the run."""


@dataclass(frozen=True)
class QuiltAxis:
    """An axis of the quilt, with room for the channels of all nets that are trained beside others.

    The base nets of Split-Mix have no common positions. Each has a part of the axis of its own.
    """

    name: str
    size: int  # Number of positions of all nets
    offsets: Mapping[str, int]  # First position of each net, by its scope


@dataclass(frozen=True)
class Quilt:
    """Counts of updates that counted, by axis, column, budget and position.

    A column is a round, or several rounds in a row if there are more than `MAX_COLUMNS`.
    """

    axes: tuple[QuiltAxis, ...]  # Axes that are cut, those with most positions first
    budgets: tuple[str, ...]  # Names of budgets, from the smallest on
    rounds: tuple[int, ...]  # Numbers of the rounds that are counted, from 1
    # Counts by axis, in columns that cover all rounds: (column, budget, position)
    counts: Mapping[str, np.ndarray] = field(repr=False)
    # Counts by axis of each of the first `MAX_COLUMNS` rounds: (round, budget, position)
    first: Mapping[str, np.ndarray] = field(repr=False)
    planned: np.ndarray = field(repr=False)  # Positions that were planned, by round
    arrived: np.ndarray = field(repr=False)  # Positions whose update arrived, by round
    # Parameters of the whole model at the stage of growth of each round. 0: it is not known
    params: np.ndarray = field(repr=False)
    omitted: tuple[int, ...] = ()  # Rounds of which the records do not say who replied
    recorded: bool = False  # True: positions are from the records and not computed
    unrecorded: int = 0  # Plans that were too long for a record, and are not counted

    def times(self, axis: str) -> list[int]:
        """Return how often each position of an axis was trained, over all rounds."""
        totals: list[int] = self.counts[axis].sum((0, 1)).tolist()
        return totals

    def has_equal_parts(self, axis: str) -> bool:
        """Return True if some column of an axis has too many different cells to draw all."""
        tables = self.counts[axis], self.first[axis]
        return any(len(_changes(column)) >= MAX_ROWS for table in tables for column in table)

    @property
    def is_binned(self) -> bool:
        """Return True if a column of the quilt of all rounds has several rounds."""
        return len(self.rounds) > MAX_COLUMNS

    def cells(self, axis: str, all_rounds: bool = False) -> list[Row]:
        """Return the trained cells of an axis, as `charts.quilt` draws them.

        Neighbouring positions with equal counts are one cell. Columns with more than `MAX_ROWS`
        such cells are cut into equal parts instead. A cell has the mean number of clients a round
        that trained one of its positions, and the smallest budget of them.

        Args:
            axis: Name of the axis.
            all_rounds: True: columns cover all rounds. False: columns are the first rounds.
        """
        counts = (self.counts if all_rounds else self.first)[axis]
        columns = bins(len(self.rounds), MAX_COLUMNS)
        if not all_rounds:
            columns = [(index, index + 1) for index in range(len(counts))]
        rows: list[Row] = []
        for column, (begin, end) in zip(counts, columns, strict=True):
            for start, stop in _parts(column):
                by_budget = column[:, start:stop].sum(1)
                if not by_budget.any():
                    continue
                area = (end - begin) * (stop - start)
                rows.append(
                    {
                        "first": self.rounds[begin],
                        "last": self.rounds[end - 1],
                        "start": start,
                        "stop": stop,
                        "times": round(float(by_budget.sum()) / area, 3),
                        "smallest": self.budgets[int(by_budget.nonzero()[0][0])],
                    }
                )
        return rows

    @cached_property
    def lost(self) -> list[Row]:
        """Return the part of all planned positions that did not arrive, by round."""
        rows: list[Row] = []
        for begin, end in bins(len(self.rounds), MAX_COLUMNS):
            planned, arrived = (
                int(self.planned[begin:end].sum()),
                int(self.arrived[begin:end].sum()),
            )
            rows.append(
                {
                    "first": self.rounds[begin],
                    "last": self.rounds[end - 1],
                    "planned": planned,
                    "arrived": arrived,
                    "lost": 1 - arrived / planned if planned else 0.0,
                }
            )
        return rows

    @cached_property
    def growth(self) -> list[Row]:
        """Return the parameters of the whole model at its stage of growth, by round."""
        return [
            {
                "first": self.rounds[begin],
                "last": self.rounds[end - 1],
                "params": int(self.params[begin:end].max()),
            }
            for begin, end in bins(len(self.rounds), MAX_COLUMNS)
        ]

    @property
    def grows(self) -> bool:
        """Return True if the model has different sizes in different rounds, as in ProgFed."""
        return len(set(self.params[self.params > 0].tolist())) > 1


class _Unreadable(MutableMapping[Any, Any]):
    """A part of the server's state that is not known. Reading it is a `StateReadError`."""

    def __init__(self, method: str, part: str) -> None:
        self.method = method
        self.part = part

    def _refuse(self, *_: object) -> NoReturn:
        raise StateReadError(
            f"the plan of {self.method} depends on the {self.part} of the server's state, which "
            "records do not have."
        )

    __getitem__ = __setitem__ = __delitem__ = __iter__ = __len__ = _refuse


def stateless(server: Server, round: int, method: str) -> Server:
    """Return a server's state that has a round alone. Reading anything else is an error.

    Args:
        server: State of a prepared run.
        round: Number of finished rounds.
        method: Name of the method, for messages.
    """
    return replace(
        server,
        round=round,
        weights=_Unreadable(method, "weights"),
        slots=_Unreadable(method, "slots"),
        extras=_Unreadable(method, "extras"),
        memory=_Unreadable(method, "memory of clients"),
    )


def trained_jobs(run: Run, record: Record) -> Iterator[tuple[Job, Submodel | None]]:
    """Yield the jobs of a round, each with the sub-model that arrived and counted.

    It is None if the update was late, missing, failed or refused, or if the link lost all of it.

    Args:
        run: A prepared run.
        record: Record of the round, which has the clients that did not reply.

    Raises:
        StateReadError: The plan depends on the state of the server, and is not in the record.
        RecordError: The plan in the record does not fit the model.
    """
    world, fleet, method = run.world, run.fleet, run.method
    round = record.round - 1
    server = stateless(run.server, round, type(method).__name__)
    absent = {*(record.late or ())}
    if record.attendance is None:
        ids = fleet.draw_cohort(round, world.seed)
    else:
        ids = sorted(record.attendance.asked)
        absent |= {*record.attendance.absent}
    for place, id in enumerate(ids):
        if not 0 <= id < fleet.num_clients:
            continue
        client = fleet.client(id, round, world.seed, run.data.size(id), place)
        submodels: Sequence[Submodel]
        if record.plans is None:
            submodels = method.plan(server, client, world)
        else:
            submodels = record.plans.get(id, ())
            for submodel in submodels:
                _check_recorded(submodel, world.family.layout.sizes, record.round)
        for submodel in submodels:
            job = Job(client, submodel, round)
            reached = arrived(run, job) if id not in absent else []
            yield job, reached[0] if reached else None


def _check_recorded(submodel: Submodel, sizes: Mapping[str, int], round: int) -> None:
    """Refuse positions of a record that the model does not have.

    Only the ends of runs are compared, because damaged records may have runs of any length.

    Args:
        submodel: Sub-model in the record.
        sizes: Number of positions of every axis.
        round: Number of the round.

    Raises:
        RecordError: An axis is unknown, or a run is not on it.
    """
    for axis, positions in submodel.index.items():
        size = sizes.get(axis, 0)
        if not all(0 <= start < stop <= size for start, stop in positions.runs):
            raise RecordError(
                f"the record of round {round} has positions on axis {axis!r} that the model lacks; "
                f"it has {size} there."
            )


def quilt_of(run: Run, records: Sequence[Record]) -> Quilt:
    """Return the quilt of a run.

    Args:
        run: The prepared run, before or after training.
        records: Records of its rounds.

    Raises:
        StateReadError: The plan of the method depends on the state of the server.
    """
    # A simulated round whose clients are missing does not tell which.
    known = [record for record in records if not record.missing or record.attendance is not None]
    omitted = tuple(record.round for record in records if record not in known)
    axes = _axes(run, known)
    budgets = budget_names(run)
    names = tuple(dict.fromkeys(budgets.values()))
    num_columns = min(len(known), MAX_COLUMNS)
    counts, first = (
        {axis.name: np.zeros((num_columns, len(names), axis.size), dtype=np.int64) for axis in axes}
        for _ in range(2)
    )
    planned, arrivals, params = (np.zeros(len(known), dtype=np.int64) for _ in range(3))
    finder = _PositionFinder(run, axes)
    for column, (begin, end) in enumerate(bins(len(known), MAX_COLUMNS)):
        for index in range(begin, end):
            targets = [(counts, column), (first, index)][: 2 if index < num_columns else 1]
            for job, reached in trained_jobs(run, known[index]):
                planned[index] += _num_positions(job.submodel)
                params[index] = max(params[index], finder.params(job.submodel))
                if reached is None:
                    continue
                arrivals[index] += _num_positions(reached)
                budget = names.index(budgets[job.client.budget])
                for axis, start, stop in finder.runs(reached, job.submodel):
                    for table, row in targets:
                        table[axis][row, budget, start:stop] += 1
    rounds = tuple(record.round for record in known)
    recorded = [record for record in known if record.plans is not None]
    unrecorded = sum(list((record.plans or {}).values()).count(()) for record in recorded)
    return Quilt(
        axes,
        names,
        rounds,
        counts,
        first,
        planned,
        arrivals,
        params,
        omitted,
        bool(recorded),
        unrecorded,
    )


def _parts(column: np.ndarray) -> list[tuple[int, int]]:
    """Return the ranges of positions that are drawn as one cell.

    Args:
        column: (budget, position) Counts of one column.
    """
    size = column.shape[1]
    changes = _changes(column)
    if len(changes) >= MAX_ROWS:
        return bins(size, MAX_ROWS)
    return list(pairwise([0, *changes, size]))


def _changes(column: np.ndarray) -> list[int]:
    """Return the positions whose counts differ from those of the position before.

    Args:
        column: (budget, position) Counts of one column.
    """
    positions = (column[:, 1:] != column[:, :-1]).any(0).nonzero()[0] + 1
    return [int(position) for position in positions]


class _PositionFinder:
    """Finds the positions of sub-models by axis. What depends on a member is computed once."""

    def __init__(self, run: Run, axes: Sequence[QuiltAxis]) -> None:
        self.family = run.world.family
        self.axes = axes
        self.trained: dict[Any, frozenset[str]] = {}
        self.sizes: dict[str, int] = {}

    def params(self, submodel: Submodel) -> int:
        """Return the parameters of the whole model at the stage that a sub-model belongs to.

        Nets of a union are no stages of each other. The result is 0 for them.
        """
        variant = submodel.arch.variant
        if self.family.layout.nets:
            return 0
        if variant not in self.sizes:
            self.sizes[variant] = self.family.member(self.family.at(variant).whole).count
        return self.sizes[variant]

    def runs(self, reached: Submodel, planned: Submodel) -> Iterator[tuple[str, int, int]]:
        """Yield the axis, start and stop of all runs of positions that arrived.

        Args:
            reached: Sub-model at the positions that arrived.
            planned: Sub-model that was trained.
        """
        held = {**planned.unrestricted, **reached.index}
        for axis in self.axes:
            if axis.name in held and axis.name in self._trained_axes(planned):
                offset = axis.offsets.get(planned.scope, 0)
                for start, stop in held[axis.name].runs:
                    yield axis.name, offset + start, offset + stop

    def _trained_axes(self, submodel: Submodel) -> frozenset[str]:
        """Return the axes of all weights that a sub-model trains."""
        if submodel.arch not in self.trained:
            member = self.family.member(submodel.arch)
            layout = self.family.layout
            names = (layout.axes_of(name) for name in member.trainable)
            self.trained[submodel.arch] = frozenset().union(*names)
        return self.trained[submodel.arch]


def _num_positions(submodel: Submodel) -> int:
    return sum(len(positions) for positions in submodel.positions.values())


def _axes(run: Run, records: Sequence[Record]) -> tuple[QuiltAxis, ...]:
    """Return the axes of a quilt, those with most positions first.

    Args:
        run: A prepared run.
        records: Records, of which the first ones show which nets are trained beside others.
    """
    scopes: dict[str, Mapping[str, int]] = {}
    if scoped := sorted(run.server.scopes - {""}, key=_scope_order):
        for record in records:
            for job, _ in trained_jobs(run, replace(record, late=None, attendance=None)):
                scopes.setdefault(job.submodel.scope, job.submodel.arch.sizes)
            if len(scopes) == len(scoped):
                break
    axes = []
    for axis in run.world.family.layout.axes.values():
        if axis.fixed:
            continue
        size = axis.size
        offsets: dict[str, int] = {}
        if scopes:
            size = 0
            for scope in scoped:
                offsets[scope] = size
                size += scopes.get(scope, {}).get(axis.name, 0)
        if size:
            axes.append(QuiltAxis(axis.name, size, offsets))
    axes.sort(key=lambda axis: -axis.size)
    return tuple(axes[:MAX_AXES])


def _scope_order(scope: str) -> tuple[str, int]:
    digits = "".join(character for character in scope if character.isdecimal())
    return scope.rstrip("0123456789/"), int(digits or 0)


def budget_names(run: Run) -> dict[Budget, str]:
    """Return the names of all budgets of a fleet, from the smallest on.

    Budgets that allow the same share have one name.
    """
    labels = labels_by_share(run.method, run.fleet.kinds, run.world)
    names = {
        budget: labels.get(key) or f"share {short_share(key)}"
        for key, budgets in sorted(run.devices.items(), key=lambda item: float(item[0]))
        for budget in budgets
    }
    return names
