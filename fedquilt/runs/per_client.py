"""Costs and results of a federation by client and by domain (Split-Mix, Figures 5 and 6)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.deploy.deploy import check_client
from fedquilt.engines.client_inputs import classes_present
from fedquilt.errors import ConfigError
from fedquilt.family.rows import inside
from fedquilt.names import known
from fedquilt.round.deployed import client_nets, deployed_nets, ready, trained_within
from fedquilt.round.eval_jobs import EvalJob, joined
from fedquilt.round.labels import share_label
from fedquilt.round.link import Transmission
from fedquilt.round.own_tests import is_on_device, own_test
from fedquilt.round.ranking import ranked
from fedquilt.round.scores import Score
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Client, Job, Submodel

if TYPE_CHECKING:
    from fedquilt.family import Family
    from fedquilt.runs.run import Run


@dataclass(frozen=True)
class DeviceFigures:
    """One client: the cost of a round for it, and its results."""

    client: int  # Number of the client
    share: str  # Share of the model that the client can hold
    domain: str  # Domain of most of its samples. Empty: the data has no domains
    macs: int  # Multiply-adds of one training batch
    # Numbers that are sent to it and back in a round over a perfect link. Extras count if the
    # server has them
    params: int
    # Accuracy of the net for its budget, on its own test samples. None: it has none
    accuracy_own_size: float | None
    # Accuracy of the widest net on the same samples. None: no samples, or results are per client
    accuracy_whole_model: float | None
    label: str = ""  # Name of its size in tables: the share, or the bounds of its budget
    # The task's main figure of the net for its budget. None: it has no test samples
    main_own_size: float | None = None
    # The task's main figure of the widest net. None: no test samples, or results are per client
    main_whole_model: float | None = None
    late: int | None = None  # Rounds in which it missed the deadline. None: there is no deadline


@dataclass(frozen=True)
class PerClient:
    """Costs and results of all clients of a fleet, or of those asked for."""

    devices: tuple[DeviceFigures, ...]  # Costs and results of each client
    trained: dict[str, float]  # Share of all parameters that arrived from clients of each domain
    main: str = "accuracy"  # Name of the task's main figure
    percent: bool = True  # True if the main figure is a rate

    @property
    def has_deadline(self) -> bool:
        """Return True if rounds of the run have a deadline, whether or not a client missed it."""
        return any(device.late is not None for device in self.devices)

    def spread(self, field_name: str) -> tuple[float, float]:
        """Return mean and standard deviation over clients of one number, such as `macs`.

        The deviation is that of the population. Clients without the number are left out. Both are
        NaN if no client has it.

        Args:
            field_name: Name of a field of `DeviceFigures` with costs or results.
        """
        known({name: name for name in (*_SPREAD, "late")}, field_name, "number of a client")
        all_values = [getattr(device, field_name) for device in self.devices]
        values = [value for value in all_values if value is not None]
        if not values:
            return math.nan, math.nan
        return statistics.fmean(values), statistics.pstdev(values)

    def by(self, group: Literal["share", "domain"]) -> dict[str, PerClient]:
        """Group clients by the share that they can hold, widest first, or by domain.

        Each group has all values of this object except the other clients. `trained` thus still
        lists all domains.

        Args:
            group: Field of `DeviceFigures` whose values are the keys of the result.
        """
        groups: dict[str, list[DeviceFigures]] = {}
        known({"share": "", "domain": ""}, group, "group of clients")
        for device in self.devices:
            groups.setdefault(getattr(device, group), []).append(device)
        keys = sorted(groups, key=float, reverse=True) if group == "share" else sorted(groups)
        return {key: replace(self, devices=tuple(groups[key])) for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, with mean and deviation over clients of every number."""
        names = (*_SPREAD, "late") if self.has_deadline else _SPREAD
        spreads = {
            name: dict(zip(("mean", "deviation"), self.spread(name), strict=True)) for name in names
        }
        clients = [asdict(device) for device in self.devices]
        if not self.has_deadline:
            for client in clients:
                del client["late"]
        return {
            "clients": clients,
            "spread": spreads,
            "trained": self.trained,
            "main": self.main,
        }


_SPREAD = (
    "accuracy_own_size",
    "accuracy_whole_model",
    "main_own_size",
    "main_whole_model",
    "macs",
    "params",
)
_Cut = tuple[Submodel, Index]  # Sub-model that arrived, and the index that its positions refer to
_Figures = tuple[float | None, float | None]  # Main figures of its own size and of the whole model


def per_client(run: Run, clients: Iterable[int] | None = None, evaluate: bool = True) -> PerClient:
    """Return the costs and the main figures of clients.

    Args:
        run: A run, trained or only prepared.
        clients: Numbers of clients. None: all of them.
        evaluate: False: costs only, without evaluation.
    """
    if not isinstance(clients, Iterable | None):
        raise ConfigError(
            f"per_client was given {clients!r} where a list of clients belongs, such as [0, 3]."
        )
    ids = list(range(run.fleet.num_clients)) if clients is None else list(clients)
    for id in ids:
        check_client(run, id)
    rounds = [run.server.last(id) if run.method.personal else run.server.round for id in ids]
    devices = [
        run.fleet.client(id, round, run.world.seed, run.data.size(id))
        for id, round in zip(ids, rounds, strict=True)
    ]
    main = run.world.task.main
    scores: list[_Figures] = _figures(run, devices) if evaluate else [(None, None)] * len(devices)
    results = tuple(
        _device(run, client, figures) for client, figures in zip(devices, scores, strict=True)
    )
    if run.link.deadline is not None:
        late = Counter(id for _, id in _late(run))
        results = tuple(replace(device, late=late[device.client]) for device in results)
    return PerClient(results, ever_trained(run), main.name, main.is_rate)


def _device(run: Run, client: Client, figures: _Figures) -> DeviceFigures:
    """Return the costs of a client's current round beside its results. Nothing is trained.

    Args:
        run: The run, whose state decides the client's plan.
        client: Client with its budget.
        figures: Main figures of its own size and of the whole model. None: not evaluated.
    """
    world, method = run.world, run.method
    macs = params = 0
    for submodel in method.plan(run.server, client, world):
        learner = method.learner(Job(client, submodel, run.server.round), world)
        member = world.family.member(submodel)
        macs += learner.macs(member, [learner.local.batch_size])
        upload = learner.upload(member, submodel, _classes(run, client))
        state, slotted = learner.state, learner.slotted(member)
        params += _entries(world.family, submodel, learner.received(member))
        params += _entries(world.family, submodel, slotted) * len(state.slots_down)
        params += _entries(world.family, upload, learner.sent(member))
        params += _entries(world.family, upload, slotted) * len(state.slots_up)
        extras = [run.server.extras.get(name) for name in (*state.extras_down, *state.extras_up)]
        params += sum(value.numel() for value in extras if value is not None)
    params *= method.wire_factor
    share, label = share_label(method, client.budget, world), method.label(client.budget, world)
    accuracies = figures if world.task.main.name == "accuracy" else (None, None)
    return DeviceFigures(
        client.id, share, domain_of(run, client.id), macs, params, *accuracies, label, *figures
    )


def _classes(run: Run, client: Client) -> Tensor:
    """Return a mask (class,) that is True for classes of which a client has samples."""
    return classes_present(run.world, run.data, client.id)


def _entries(family: Family, submodel: Submodel, names: Iterable[str]) -> int:
    """Return the number of entries that the named weights have together in a sub-model.

    Args:
        family: Family of the sub-model.
        submodel: Sub-model whose positions give the size of every axis.
        names: Names of weights.
    """
    sizes = family.layout.sizes | {
        axis: len(positions) for axis, positions in submodel.positions.items()
    }
    return sum(math.prod(family.layout.shape(name, sizes)) for name in names)


def _figures(run: Run, clients: list[Client]) -> list[_Figures]:
    """Return the main figures of clients, each on its own test samples, in the order of `clients`.

    A pair has the figure of the net for the client's budget and that of the widest net. If every
    client has its own net, there is no figure of a widest net. All figures are None if the engine
    cannot test by client, or if the nets of clients are on devices that cannot be asked.

    Args:
        run: The run.
        clients: Clients with their budgets.
    """
    method, world, size = run.method, run.world, run.evaluation.batch_size
    federation = run.federation
    engine = run.evaluator
    if not engine.tests_by_client:
        return [(None, None)] * len(clients)
    server = ranked(federation, run.server, engine)
    if method.personal:
        if engine.has_client_states and any(_is_on_device(run, client) for client in clients):
            return [(None, None)] * len(clients)
        jobs = [own_test(federation, server, client, engine, run.evaluation) for client in clients]
        return [
            (_figure(score, world.task), None) for score in engine.evaluate(federation, jobs, size)
        ]
    widest = deployed_nets(method, server, Budget(share=1.0), world)
    budgets = [trained_within(method, client.budget, world) for client in clients]
    sized = [deployed_nets(method, server, budget, world) for budget in budgets]
    submodels = list(dict.fromkeys(net for nets in (*sized, widest) for net in nets))
    weights = ready(federation, server, submodels, engine, size)
    # Every pair is evaluated once. A client that can hold the whole model has one figure.
    pairs = dict.fromkeys(
        (kind, c.id) for c, nets in zip(clients, sized, strict=True) for kind in (nets, widest)
    )
    eval_jobs = [EvalJob("", nets, joined(nets, weights), id) for nets, id in pairs]
    figures = [_figure(score, world.task) for score in engine.evaluate(federation, eval_jobs, size)]
    scores = dict(zip(pairs, figures, strict=True))
    return [
        (scores[nets, c.id], scores[widest, c.id]) for c, nets in zip(clients, sized, strict=True)
    ]


def _is_on_device(run: Run, client: Client) -> bool:
    """Return True if a client's own nets are on its device, so that they cannot be tested here."""
    nets = client_nets(run.method, run.server, client, run.world)
    jobs = [Job(client, net, run.server.round) for net in nets]
    return any(is_on_device(run.federation, run.server, job) for job in jobs)


def _figure(score: Score, task: Task) -> float | None:
    """Return a score's main figure for a task. None: it is not defined, as without samples."""
    value = score.main(task)
    return None if math.isnan(value) else value


def domain_of(run: Run, client: int) -> str:
    """Return the name of the domain of most training samples of a client.

    A domain without a name is given by its number. The result is empty if the data has no domains.

    Args:
        run: The run, which has the data.
        client: Number of the client.
    """
    data = run.data
    if data.domains is None:
        return ""
    code = int(data.domains[data.parts[client].to(data.domains.device)].mode().values)
    return data.domain_names[code] if code < len(data.domain_names) else str(code)


def ever_trained(run: Run) -> dict[str, float]:
    """Return by domain the share of all parameters that its clients have trained so far (Figure 6).

    Updates that a link lost, or that missed the deadline of a round, do not count. Nothing is
    trained for this. Cohorts, plans and losses of the link follow from the seed, and late clients
    are in the records.
    """
    cuts_by_domain: dict[str, dict[_Cut, None]] = {}
    absent = _late(run) | _absent(run)
    for job in planned_jobs(run):
        if (job.round, job.client.id) in absent:
            continue
        received = ((submodel, job.submodel.unrestricted) for submodel in arrived(run, job))
        cuts_by_domain.setdefault(domain_of(run, job.client.id), {}).update(dict.fromkeys(received))
    family = run.world.family
    names = [name for name in run.server.weights if name[name.rfind("/") + 1 :] in family.trainable]
    total = sum(run.server.weights[name].numel() for name in names)
    return {
        domain: _covered(run, list(cuts), names) / total
        for domain, cuts in sorted(cuts_by_domain.items())
    }


def _late(run: Run) -> set[tuple[int, int]]:
    """Return all pairs of a round, counted from 0, and a client that missed the deadline in it."""
    return {(record.round - 1, id) for record in run.records for id in record.late or ()}


def _absent(run: Run) -> set[tuple[int, int]]:
    """Return all pairs of a round, counted from 0, and a device whose reply was not used in it."""
    return {
        (record.round - 1, id)
        for record in run.records
        if record.attendance is not None
        for id in record.attendance.absent
    }


def planned_jobs(run: Run) -> Iterator[Job]:
    """Yield the training jobs of every client of every cohort in the rounds so far.

    They are computed again from the random seed, except that the devices of a deployment are those
    that were asked. Clients whose updates were lost or late are included.
    """
    fleet, world = run.fleet, run.world
    attendances = {record.round - 1: record.attendance for record in run.records}
    for round in range(run.server.round):
        server = replace(run.server, round=round)
        attendance = attendances.get(round)
        if attendance is None:
            cohort = fleet.draw_cohort(round, world.seed)
        else:
            cohort = sorted(attendance.asked)
        for position, id in enumerate(cohort):
            client = fleet.client(id, round, world.seed, run.data.size(id), position)
            for submodel in run.method.plan(server, client, world):
                yield Job(client, submodel, round)


def arrived(run: Run, job: Job) -> list[Submodel]:
    """Return the sub-model of a job at the positions that the server received.

    The list has one sub-model, or none if the link lost all of it. If a client sends nothing on
    purpose, it is the sub-model that the client trained for itself.

    Args:
        run: The run, which has the link.
        job: Client, sub-model and round.
    """
    world = run.world
    if not run.link.lossy:
        return [job.submodel]
    learner, member = run.method.learner(job, world), world.family.member(job.submodel)
    if not learner.sent(member):
        return [job.submodel]
    # Output rows of classes that a client lacks count as well, as they do over a lossless link.
    reached = run.link.reach(job.submodel, Transmission(world, job, up=True))
    return [] if reached is None else [reached]


def _covered(run: Run, submodels: list[_Cut], names: list[str]) -> int:
    """Return the number of entries of the server's weights that at least one sub-model trains.

    Args:
        run: The run, which has the family and the server's weights.
        submodels: Sub-models that arrived, each with the index that its positions refer to.
        names: Names of the weights to count, with their scopes.
    """
    family, count = run.world.family, 0
    for name in names:
        cut = name.rfind("/") + 1
        scope, weight = name[:cut], name[cut:]
        is_trained = torch.zeros(run.server.weights[name].shape, dtype=torch.bool)
        for submodel, home in submodels:
            if submodel.scope == scope and weight in family.member(submodel).trainable:
                is_trained |= inside(
                    family.cutter.rows(weight, submodel.index, home), is_trained.shape
                )
        count += int(is_trained.sum())
    return count
