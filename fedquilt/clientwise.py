"""Who got what out of a federation: by client and by domain (Split-Mix, Figures 5 and 6)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt.round.serve import Exam, joined, members_by_share, own_exam, ready, share_label
from fedquilt.terms import Client, Job, Server, Submodel

if TYPE_CHECKING:
    from fedquilt.experiment import Run


@dataclass(frozen=True)
class Device:
    """One client: what a round costs it, and what it has of the result."""

    client: int
    share: str  # of the model that it can hold
    domain: str  # where most of its samples come from; "": the data has no domains
    macs: int  # multiply-adds of one training batch
    params: int  # sent to it in a round, and back
    accuracy: float | None  # of the widest model on its own test part; None: it has none


@dataclass(frozen=True)
class Clientwise:
    """All clients of a fleet, or those asked for."""

    devices: tuple[Device, ...]
    trained: dict[str, float]  # by domain: the part of all parameters that its clients ever trained

    def spread(self, of: str) -> tuple[float, float]:
        """Mean and deviation over clients of `accuracy`, `macs` or `params`."""
        values = [value for device in self.devices if (value := getattr(device, of)) is not None]
        return (statistics.fmean(values), statistics.pstdev(values)) if values else (float("nan"), float("nan"))

    def by(self, what: Literal["share", "domain"]) -> dict[str, Clientwise]:
        """Those that can hold the same, widest first, or that are of one domain."""
        groups: dict[str, list[Device]] = {}
        for device in self.devices:
            groups.setdefault(getattr(device, what), []).append(device)
        keys = sorted(groups, key=float, reverse=True) if what == "share" else sorted(groups)
        return {key: Clientwise(tuple(groups[key]), self.trained) for key in keys}

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        spreads = {of: dict(zip(("mean", "deviation"), self.spread(of), strict=True)) for of in _SPREAD}
        return {"clients": [asdict(device) for device in self.devices], "spread": spreads, "trained": self.trained}


_SPREAD = ("accuracy", "macs", "params")


def clientwise(run: Run, clients: Iterable[int] | None = None) -> Clientwise:
    """What clients got: all of them, or some."""
    chosen = list(range(run.fleet.num_clients)) if clients is None else list(clients)
    devices = [run.fleet.client(id, run.server.round, run.engine.world.seed, run.engine.data.size(id)) for id in chosen]
    scores = _accuracies(run, devices)
    found = tuple(_device(run, client, scores.get(client.id)) for client in devices)
    return Clientwise(found, ever_trained(run))


def _device(run: Run, client: Client, accuracy: float | None) -> Device:
    world, method = run.engine.world, run.method
    macs = params = 0
    for submodel in method.plan(run.server, client, world):
        learner = method.learner(Job(client, submodel, run.server.round), world)
        macs += learner.macs(world.family, submodel.arch, [learner.local.batch_size])
        params += world.family.count(submodel.arch)
    return Device(client.id, share_label(client.budget, world), domain_of(run, client.id), macs, params, accuracy)


def _accuracies(run: Run, clients: list[Client]) -> dict[int, float]:
    """Of the widest model, on each client's own part of the test set; where results live on clients, of theirs."""
    method, engine, size = run.method, run.engine, run.evaluation.batch_size
    server = method.arranged(run.server, engine)
    parts = engine.data.test_parts
    if parts is None:
        return {}
    if method.personal:
        exams = [own_exam(method, server, client, engine, size) for client in clients]
    else:
        nets = next(iter(members_by_share(method, server, run.fleet, engine.world).values()))  # the widest comes first
        weights = joined(nets, ready(method, server, nets, engine, size))
        exams = [Exam("", nets, weights, parts[client.id]) for client in clients]
    scores = engine.evaluate(method, exams, size)
    return {client.id: score.accuracy for client, score in zip(clients, scores, strict=True) if score.count}


def domain_of(run: Run, client: int) -> str:
    """Where most of a client's samples come from."""
    data = run.engine.data
    if data.domains is None:
        return ""
    code = int(data.domains[data.parts[client].to(data.domains.device)].mode().values)
    return data.domain_names[code] if code < len(data.domain_names) else str(code)


def ever_trained(run: Run) -> dict[str, float]:
    """By domain, the part of all parameters that clients of it have been handed in the rounds so far (Figure 6).

    Nothing is trained: who took part, and what they were planned, is known from the seed.
    """
    held: dict[str, dict[Submodel, None]] = {}
    for client, submodels in _planned(run):
        held.setdefault(domain_of(run, client.id), {}).update(dict.fromkeys(submodels))
    family = run.engine.world.family
    names = [name for name in run.server.weights if name[name.rfind("/") + 1 :] in family.trainable]
    total = sum(run.server.weights[name].numel() for name in names)
    return {domain: _covered(run, list(own), names) / total for domain, own in sorted(held.items())}


def _planned(run: Run) -> Iterator[tuple[Client, list[Submodel]]]:
    fleet, world = run.fleet, run.engine.world
    for played in range(run.server.round):
        server = Server(played, run.server.weights)
        for place, id in enumerate(fleet.cohort(played, world.seed)):
            client = fleet.client(id, played, world.seed, run.engine.data.size(id), place)
            yield client, run.method.plan(server, client, world)


def _covered(run: Run, submodels: list[Submodel], names: list[str]) -> int:
    """How many entries some of the sub-models have."""
    family, count = run.engine.world.family, 0
    for name in names:
        cut = name.rfind("/") + 1
        scope, weight = name[:cut], name[cut:]
        whole = torch.zeros(run.server.weights[name].shape, dtype=torch.bool)
        for submodel in submodels:
            if submodel.scope == scope:
                _mark(
                    whole,
                    [None if kept is None else kept.tensor for kept in family.cutter.rows(weight, submodel.index)],
                )
        count += int(whole.sum())
    return count


def _mark(whole: Tensor, kept: list[Tensor | None]) -> None:
    inside = torch.ones_like(whole)
    for dim, rows in enumerate(kept):
        if rows is not None:
            row = torch.zeros(whole.shape[dim], dtype=torch.bool).index_fill_(0, rows, True)
            inside &= row.reshape([-1 if d == dim else 1 for d in range(whole.dim())])
    whole |= inside
