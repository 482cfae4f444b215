"""Nets that a method gives to devices, and their weights as they are tested or deployed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from fedquilt.errors import ConfigError, SubmodelError
from fedquilt.round.federation import Federation, World
from fedquilt.round.labels import share_label, tested_budgets
from fedquilt.terms import Budget, Client, Server, Submodel, Submodels

if TYPE_CHECKING:
    from fedquilt.round.engine import Engine
    from fedquilt.round.method import Method
from fedquilt.round.norm_statistics import measured_statistics


def deployed_nets(method: Method, server: Server, budget: Budget, world: World) -> Submodels:
    """Return the tuple of nets that a method deploys to a device.

    Args:
        method: Its `deploy` is called.
        server: State that the nets are cut from.
        budget: Budget of the device.
        world: What the method may look at.

    Raises:
        ConfigError: `deploy` returned something else than a tuple.
    """
    nets = method.deploy(server, budget, world)
    if not isinstance(nets, tuple):
        raise ConfigError(
            f"{type(method).__name__}.deploy returned a {type(nets).__name__} for the budget "
            f"{budget}; a tuple of sub-models fits, whose logits are averaged: (submodel,)."
        )
    return nets


def client_nets(method: Method, server: Server, client: Client, world: World) -> Submodels:
    """Return a client's own nets, for a personal method.

    Args:
        method: Its `client_submodels` is called.
        server: State that the nets are cut from.
        client: Client whose nets are returned.
        world: What the method may look at.

    Raises:
        SubmodelError: The client has no net, because the plan of the method skips it.
    """
    nets = method.client_submodels(server, client, world)
    if not nets:
        name = type(method).__name__
        raise SubmodelError(
            f"{name}.client_submodels returned no net for client {client.id} (budget "
            f"{client.budget}), which is tested with its own nets. {name}.plan skips it; override "
            "`client_submodels` to return what the client has."
        )
    return nets


def trained_within(method: Method, budget: Budget, world: World) -> Budget:
    """Return a budget whose bound on memory is replaced by the share that a client can train.

    `Method.deploy` reads a bound on memory as one on inference, which needs less than training. A
    client is not tested with a wider net than it trains, because nobody may have trained the rest.

    Args:
        method: The method that trains.
        budget: Budget of the fleet. It is returned unchanged if it does not bound memory.
        world: What the method may look at.
    """
    return method.without_memory(budget, world, trains=True) if budget.memory else budget


def members_by_share(
    method: Method,
    server: Server,
    budgets: Sequence[Budget],
    world: World,
    shares: Sequence[float] = (),
) -> dict[str, Submodels]:
    """Return the nets that each budget gets, by the key of the budget in records, widest first.

    The key is usually the share that the budget can train. If budgets share a key, the nets of the
    first one are returned. The whole model is included even if no device holds it, because the
    server's model may be larger than that of any client. A personal method has the nets of client 0
    instead, for each budget.

    Args:
        method: The method that deploys.
        server: State that nets are cut from.
        budgets: Budgets of the fleet.
        world: What the method may look at.
        shares: Further shares. They have no effect if the method is personal.
    """
    nets_by_label: dict[str, Submodels] = {}
    extra_budgets = () if method.personal else (Budget(share=share) for share in (1.0, *shares))
    for kind in (*tested_budgets(method, budgets), *extra_budgets):
        budget = trained_within(method, kind, world)
        if method.personal:
            nets = client_nets(method, server, Client(0, budget), world)
        else:
            nets = deployed_nets(method, server, budget, world)
        nets_by_label.setdefault(share_label(method, kind, world), nets)
    return dict(sorted(nets_by_label.items(), key=lambda item: -float(item[0])))


def ready(
    federation: Federation,
    server: Server,
    submodels: Sequence[Submodel],
    engine: Engine,
    batch_size: int,
) -> dict[Submodel, dict[str, Tensor]]:
    """Return the weights of sub-models as they are tested or deployed, by sub-model and name.

    They are cut from the server's state. Norm statistics are re-estimated on samples if the norm
    policy says so, and the model has any.

    Args:
        federation: World, method and link.
        server: State to cut from.
        submodels: Sub-models to cut.
        engine: Engine that has the samples.
        batch_size: Norm statistics are means over batches of this size.
    """
    method = federation.method
    family = federation.world.family
    cuts = cut_nets(federation, server, submodels)
    if method.local.norm.measures and family.statistics:
        net_statistics = measured_statistics(federation, list(cuts.items()), engine, batch_size)
        for weights, statistics in zip(cuts.values(), net_statistics, strict=True):
            weights |= statistics
    return cuts


def cut_nets(
    federation: Federation, server: Server, submodels: Sequence[Submodel]
) -> dict[Submodel, dict[str, Tensor]]:
    """Return the weights and norm statistics of sub-models, by sub-model and by name without scope.

    Names that the server's state lacks, such as statistics that are not tracked, are left out.

    Args:
        federation: World, method and link.
        server: State to cut from.
        submodels: Sub-models to cut.
    """
    family = federation.world.family
    cuts = {}
    for submodel in submodels:
        names = [
            name
            for name in family.member(submodel).names
            if submodel.scope + name in server.weights
        ]
        cuts[submodel] = family.cutter.gather(server.weights, submodel, names)
    return cuts
