"""Who got what out of a federation: by client and by domain (Split-Mix, Figures 5 and 6)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.deploy import check_client
from fedquilt.engines.simulation import classes_held
from fedquilt.errors import ConfigError
from fedquilt.family.cut import inside
from fedquilt.names import known
from fedquilt.round.labels import share_label
from fedquilt.round.link import Trip
from fedquilt.round.serve import (
    EvalJob,
    Score,
    arranged,
    given,
    joined,
    own_exam,
    ready,
    trained_within,
)
from fedquilt.tasks import Task
from fedquilt.terms import Budget, Client, Job, Submodel

if TYPE_CHECKING:
    from fedquilt.experiment import Run
    from fedquilt.family import Family


@dataclass(frozen=True)
class Device:
    """One client: what a round costs it, and what it has of the result."""

    client: int
    share: str  # of the model that it can hold
    domain: str  # where most of its samples come from; "": the data has no domains
    macs: int  # multiply-adds of one training batch
    # Numbers that travel in a round, to it and back, over a perfect link. Of extras, those that the server has count.
    params: int
    accuracy_own_size: (
        float | None
    )  # of what its budget gets, on its own test part; None: it has none
    accuracy_whole_model: (
        float | None
    )  # of the widest model on the same; None: also where results live on clients
    label: str = ""  # Name of its size in tables: the share, or the bounds of its budget
    main_own_size: float | None = (
        None  # The task's main figure of what its budget gets. None: it has no test part
    )
    main_whole_model: float | None = (
        None  # The same of the widest model. None: also where results live on clients
    )


@dataclass(frozen=True)
class Clientwise:
    """All clients of a fleet, or those asked for."""

    devices: tuple[Device, ...]
    trained: dict[str, float]  # by domain: the part of all parameters that arrived from its clients
    main: str = "accuracy"  # Name of the task's main figure
    percent: bool = True  # The main figure is a rate

    def spread(self, of: str) -> tuple[float, float]:
        """Return mean and deviation over clients of one number, such as `main_own_size` or `macs`."""
        known({one: one for one in _SPREAD}, of, "number of a client")
        values = [value for device in self.devices if (value := getattr(device, of)) is not None]
        return (
            (statistics.fmean(values), statistics.pstdev(values))
            if values
            else (float("nan"), float("nan"))
        )

    def by(self, what: Literal["share", "domain"]) -> dict[str, Clientwise]:
        """Those that can hold the same, widest first, or that are of one domain."""
        groups: dict[str, list[Device]] = {}
        known({"share": "", "domain": ""}, what, "group of clients")
        for device in self.devices:
            groups.setdefault(getattr(device, what), []).append(device)
        keys = sorted(groups, key=float, reverse=True) if what == "share" else sorted(groups)
        return {key: replace(self, devices=tuple(groups[key])) for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        spreads = {
            of: dict(zip(("mean", "deviation"), self.spread(of), strict=True)) for of in _SPREAD
        }
        return {
            "clients": [asdict(device) for device in self.devices],
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
_Cut = tuple[Submodel, Index]  # what arrived, and what its positions count within
_Figures = tuple[float | None, float | None]  # of its own size, and of the whole model


def clientwise(run: Run, clients: Iterable[int] | None = None, evaluate: bool = True) -> Clientwise:
    """Return the costs and the main figures of clients.

    Args:
        run: A run, trained or only prepared.
        clients: Numbers of clients. None: all of them.
        evaluate: False: costs alone, and no main figures.
    """
    if not isinstance(clients, Iterable | None):
        raise ConfigError(
            f"clientwise was given {clients!r} where a list of clients belongs, such as [0, 3]."
        )
    chosen = list(range(run.fleet.num_clients)) if clients is None else list(clients)
    for id in chosen:
        check_client(run, id)
    when = [run.server.last(id) if run.method.personal else run.server.round for id in chosen]
    devices = [
        run.fleet.client(id, round, run.world.seed, run.data.size(id))
        for id, round in zip(chosen, when, strict=True)
    ]
    main = run.world.task.main
    scores: list[_Figures] = _figures(run, devices) if evaluate else [(None, None)] * len(devices)
    found = tuple(_device(run, client, own) for client, own in zip(devices, scores, strict=True))
    return Clientwise(found, ever_trained(run), main.name, main.is_rate)


def _device(run: Run, client: Client, figures: _Figures) -> Device:
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
    params *= method.copies
    share, label = share_label(method, client.budget, world), method.label(client.budget, world)
    accuracies = figures if world.task.main.name == "accuracy" else (None, None)
    return Device(
        client.id, share, domain_of(run, client.id), macs, params, *accuracies, label, *figures
    )


def _classes(run: Run, client: Client) -> Tensor:
    """Return (class,) True where a client has samples of the class."""
    return classes_held(run.world, run.data, client.id)


def _entries(family: Family, submodel: Submodel, names: Iterable[str]) -> int:
    """How many a sub-model has of the named weights."""
    sizes = family.layout.sizes | {axis: len(kept) for axis, kept in submodel.held.items()}
    return sum(math.prod(family.layout.shape(name, sizes)) for name in names)


def _figures(run: Run, clients: list[Client]) -> list[_Figures]:
    """On each client's own part of the test set; where results live on clients, each has its own and no whole one."""
    method, world, engine, size = run.method, run.world, run.engine, run.evaluation.batch_size
    federation = run.federation
    if not engine.tests_by_client:
        return [(None, None)] * len(clients)
    server = arranged(federation, run.server, engine)
    if method.personal:
        own = [own_exam(federation, server, client, engine, run.evaluation) for client in clients]
        return [
            (_figure(score, world.task), None) for score in engine.evaluate(federation, own, size)
        ]
    whole = given(method, server, Budget(share=1.0), world)
    budgets = [trained_within(method, client.budget, world) for client in clients]
    sized = [given(method, server, budget, world) for budget in budgets]
    submodels = list(dict.fromkeys(net for nets in (*sized, whole) for net in nets))
    weights = ready(federation, server, submodels, engine, size)
    # Each once: a client that can hold the whole model has one figure.
    pairs = dict.fromkeys(
        (kind, c.id) for c, nets in zip(clients, sized, strict=True) for kind in (nets, whole)
    )
    exams = [EvalJob("", nets, joined(nets, weights), id) for nets, id in pairs]
    found = [_figure(score, world.task) for score in engine.evaluate(federation, exams, size)]
    scores = dict(zip(pairs, found, strict=True))
    return [
        (scores[nets, c.id], scores[whole, c.id]) for c, nets in zip(clients, sized, strict=True)
    ]


def _figure(score: Score, task: Task) -> float | None:
    """Return the main figure; None where it is not defined, as without samples."""
    value = score.main(task)
    return None if math.isnan(value) else value


def domain_of(run: Run, client: int) -> str:
    """Where most of a client's samples come from."""
    data = run.data
    if data.domains is None:
        return ""
    code = int(data.domains[data.parts[client].to(data.domains.device)].mode().values)
    return data.domain_names[code] if code < len(data.domain_names) else str(code)


def ever_trained(run: Run) -> dict[str, float]:
    """By domain, the part of all parameters that clients of it have trained in the rounds so far (Figure 6).

    What a link lost on the way to the server does not count. Nothing is trained for this: who took part, what they were
    planned and what arrived is known from the seed.
    """
    held: dict[str, dict[_Cut, None]] = {}
    for job in planned_jobs(run):
        arrived = ((one, job.submodel.home) for one in _arrived(run, job))
        held.setdefault(domain_of(run, job.client.id), {}).update(dict.fromkeys(arrived))
    family = run.world.family
    names = [name for name in run.server.weights if name[name.rfind("/") + 1 :] in family.trainable]
    total = sum(run.server.weights[name].numel() for name in names)
    return {domain: _covered(run, list(own), names) / total for domain, own in sorted(held.items())}


def planned_jobs(run: Run) -> Iterator[Job]:
    """Yield the training jobs of every client of every cohort in the rounds so far."""
    fleet, world = run.fleet, run.world
    for played in range(run.server.round):
        server = replace(run.server, round=played)
        for place, id in enumerate(fleet.cohort(played, world.seed)):
            client = fleet.client(id, played, world.seed, run.data.size(id), place)
            for submodel in run.method.plan(server, client, world):
                yield Job(client, submodel, played)


def _arrived(run: Run, job: Job) -> list[Submodel]:
    """What the server got of what a client trained; of a client that sends nothing, what it trained for itself."""
    world = run.world
    if not run.link.lossy:
        return [job.submodel]
    learner, member = run.method.learner(job, world), world.family.member(job.submodel)
    if not learner.sent(member):
        return [job.submodel]
    # Output rows of classes that a client lacks count with the rest, as they do where nothing is lost.
    reached = run.link.reach(job.submodel, Trip(world, job, up=True))
    return [] if reached is None else [reached]


def _covered(run: Run, submodels: list[_Cut], names: list[str]) -> int:
    """Return how many entries some of the sub-models train."""
    family, count = run.world.family, 0
    for name in names:
        cut = name.rfind("/") + 1
        scope, weight = name[:cut], name[cut:]
        whole = torch.zeros(run.server.weights[name].shape, dtype=torch.bool)
        for submodel, home in submodels:
            if submodel.scope == scope and weight in family.member(submodel).trainable:
                whole |= inside(family.cutter.rows(weight, submodel.index, home), whole.shape)
        count += int(whole.sum())
    return count
