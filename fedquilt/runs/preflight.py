"""Checks of a federation before its first round.

Without them, a task, a budget, a net or an objective that does not fit would fail in the round that
needs it first, which may be days later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from fedquilt import noise
from fedquilt.data import FederatedData
from fedquilt.engines.data_checks import check_public
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.hardware.generators import Draws, random_state
from fedquilt.methods import Method
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.budgets import check_budgets, learner_of, planned
from fedquilt.round.deployed import members_by_share
from fedquilt.round.engine import Engine
from fedquilt.round.eval_jobs import compared_passes
from fedquilt.round.federation import Federation, World
from fedquilt.round.training.augmentation import check_augmentation
from fedquilt.round.training.batches import num_batches
from fedquilt.round.training.check import check_objectives, has_own_objective
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.step import Batch
from fedquilt.runs.overview import method_title
from fedquilt.tasks import Task, check_task, is_own
from fedquilt.terms import Arch, Budget, Client, Job, Server

_log = logging.getLogger("fedquilt.runs")

# Largest number of budgets that are checked before a run. Fitting one takes a moment, and a fleet
# of real devices may have thousands. The nets of a union are few and fitted quickly.
MAX_UNION_BUDGETS = 1_024  # For unions
MAX_BUDGETS = 64  # For other families


def check_run_task(federation: Federation, engine: Simulation) -> None:
    """Refuse a task that the method or the engine does not support.

    A user's task is tried out on two samples, and refused if its loss or metrics are malformed.

    Args:
        federation: World, method and link. The world has the task.
        engine: Engine of the run, which has the samples.

    Raises:
        ConfigError: The task is refused.
    """
    task, method, world = federation.world.task, federation.method, federation.world
    method.check_task(task)
    if not engine.outputs_may_leave:
        task.refuse_collected(f"the engine {type(engine).__name__}")
    if not is_own(task):
        return
    member = world.family.member(world.family.whole)
    state = world.family.init(world.seed, engine.device, world.dtype)
    rows = torch.arange(2, device=engine.device) % len(engine.data.targets)  # (2,)
    with torch.no_grad(), engine.computing():
        outputs, _ = member.net(
            state, engine.data.samples(rows), Pass(train=False, statistics="batch")
        )
    # Noise is added, because a net that predicts its targets exactly would have no gradient, as a
    # loss without gradients has none.
    noisy_outputs = outputs + 0.1 * noise.uniform(
        torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=outputs.device),
        outputs.shape,
        outputs.dtype,
    )
    check_task(
        task,
        noisy_outputs.movedim(member.class_dim, 1),
        engine.data.targets[rows],
        engine.data.name,
    )


def check_public_samples(federation: Federation, engine: Simulation) -> None:
    """Refuse public samples that do not fit, or are too few for the method or its norms.

    Args:
        federation: World, method and link. The world has the public samples.
        engine: Engine of the run, which has the data.
    """
    method, world = federation.method, federation.world
    check_public(method_title(method), method.needs_public, world, engine.data)
    if world.family.statistics:
        federation.method.local.norm.check_public(world.num_public)


def check_fleet(federation: Federation, server: Server, fleet: Fleet, engine: Engine) -> None:
    """Refuse a budget with which nothing can be trained, and name its client.

    Without this check, a run would fail only when the client is sampled, which may be days later.
    Plans that draw from a global random generator, and models that cannot be cut, cause warnings.

    Args:
        federation: World, method and link.
        server: State before the first round.
        fleet: Devices, of whose budgets the first `MAX_BUDGETS` are checked.
        engine: Engine of the run.

    Raises:
        BudgetError: Some budget cannot be used.
    """
    method, world = federation.method, federation.world
    partial_budgets = [
        budget for budget in fleet.kinds if budget.share is not None and budget.share < 1
    ]
    if partial_budgets and not world.family.whole.widths:
        notes = " ".join(world.family.layout.notes)
        _log.warning(
            "nothing of the model can be cut: devices train the whole of it, also for %s. %s",
            partial_budgets[0],
            notes,
        )
    draws = Draws()
    for budget in fleet.kinds[:MAX_BUDGETS]:
        first = fleet.first(budget)
        client = Client(first, budget, engine.size(first))
        for state in _turns(federation, server):
            try:
                fitted = method.fit(budget, world)
                with draws.watched():
                    plan = planned(method, state, client, world)
            except BudgetError as error:
                raise BudgetError(f"client {client.id}: {error}") from error
            check_budgets(method, [Job(client, submodel, state.round) for submodel in plan], world)
        if not method.ignores_budgets:
            _warn_of_single_channels(budget, fitted, world)
    for library in draws.names:
        _log.warning(
            "%s.plan draws from %s's global generator. Its plans differ between repeated, resumed "
            "and distributed runs. fedquilt.noise draws by keys such as noise.key(world.seed, "
            "server.round, client.id).",
            type(method).__name__,
            library,
        )


def _warn_of_single_channels(budget: Budget, fitted: Arch, world: World) -> None:
    """Warn if a budget's share is less than one channel on some axes, where one is trained.

    Args:
        budget: Budget of a client. One without a share causes no warning.
        fitted: Architecture that fits the budget.
        world: World, whose family has the full sizes of the axes.
    """
    if budget.share is None:
        return
    full_sizes = world.family.whole.sizes
    narrow = [
        axis
        for axis, width in fitted.widths
        if width == 1 and full_sizes.get(axis, 1) > 1 and budget.share * full_sizes[axis] < 1
    ]
    if narrow:
        _log.warning(
            "a share of %g is less than one channel on %d of %d axes, such as %r with %d channels. "
            "One channel is trained there.",
            budget.share,
            len(narrow),
            len(fitted.widths),
            narrow[0],
            full_sizes[narrow[0]],
        )


def _turns(federation: Federation, server: Server) -> list[Server]:
    """Return the server's state with the number of every round in which plans change.

    Weights are those of `server` in all of them.

    Args:
        federation: World, method and link.
        server: State before the first round.
    """
    return [replace(server, round=round) for round in federation.method.turns(federation.world)]


def check_nets(
    federation: Federation, server: Server, fleet: Fleet, engine: Simulation, evaluation: Evaluation
) -> None:
    """Refuse nets that differ from the user's model, and objectives that fail.

    Args:
        federation: World, method and link.
        server: State before the first round.
        fleet: Devices, whose budgets decide the nets.
        engine: Engine of the run, which has the samples.
        evaluation: Shares that are evaluated.
    """
    method = federation.method
    modes = compared_passes(method.local, method.local.norm)
    trained = list(_trained(federation, server, fleet, engine))
    _warn_of_idle_nets(federation, server, fleet, engine)
    for member, learner in trained:
        member.check_net(modes)
        _check_samples(engine.data, learner)
        _check_warmup(engine.data, learner)
    _check_objectives(federation, engine, trained)
    nested = (net for member, learner in trained for net in learner.nets(member))
    for member in dict.fromkeys((*nested, *_evaluated(federation, server, fleet, evaluation))):
        member.check_net(modes)


def _trained(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine
) -> Iterator[tuple[Member, Learner]]:
    """Yield the members that clients train in the course of the run, each with its learner.

    The first `MAX_BUDGETS` different budgets of the fleet are tried, each with its first client, in
    every round in which plans change. A member may come several times.

    Args:
        federation: World, method and link.
        server: State before the first round.
        fleet: Devices and their budgets.
        engine: Engine of the run, which has the clients' numbers of samples.

    Raises:
        ConfigError: A learner does not fit the run's task.
    """
    method, world = federation.method, federation.world
    for budget in fleet.kinds[:MAX_BUDGETS]:
        first = fleet.first(budget)
        client = Client(first, budget, engine.size(first))
        for state in _turns(federation, server):
            for submodel in planned(method, state, client, world):
                learner = learner_of(method, Job(client, submodel, state.round), world)
                _check_learner(method, learner, world)
                yield world.family.member(submodel), learner


def _warn_of_idle_nets(
    federation: Federation, server: Server, fleet: Fleet, engine: Engine
) -> None:
    """Warn if no client trains some net of a union.

    The first clients are examined, and the first client of each budget. The first net is left out,
    because it may be the server's. Nothing is done for a family that is no union.

    Args:
        federation: World, method and link.
        server: State before the first round.
        fleet: Devices and their budgets.
        engine: Engine of the run, which has the clients' numbers of samples.
    """
    method, world = federation.method, federation.world
    layout = world.family.layout
    if not layout.nets:
        return
    busy = set[str]()
    first = [fleet.first(budget) for budget in fleet.kinds[:MAX_UNION_BUDGETS]]
    for id in dict.fromkeys([*range(min(MAX_BUDGETS, fleet.num_clients)), *first]):
        client = fleet.client(id, 0, world.seed, engine.size(id))
        for state in _turns(federation, server):
            for submodel in planned(method, state, client, world):
                busy.update(layout.net_names(submodel.arch.variant))
    if idle := [net for net in layout.nets[1:] if net not in busy]:
        _log.warning(
            "%s lets no client train %s of the union's nets %s. FedDF, DS-FL and Fed-ET give every "
            "client the largest net that fits its budget.",
            type(method).__name__,
            ", ".join(map(repr, idle)),
            ", ".join(map(repr, layout.nets)),
        )


def _evaluated(
    federation: Federation, server: Server, fleet: Fleet, evaluation: Evaluation
) -> Iterator[Member]:
    """Yield the members that are evaluated for the first `MAX_BUDGETS` budgets of a fleet.

    A member may come several times.

    Args:
        federation: World, method and link.
        server: State before the first round.
        fleet: Devices and their budgets.
        evaluation: Settings that may name further shares.
    """
    method, world = federation.method, federation.world
    for nets in members_by_share(
        method, server, fleet.kinds[:MAX_BUDGETS], world, evaluation.shares
    ).values():
        yield from (world.family.member(net) for net in nets)


def _check_samples(data: FederatedData, learner: Learner) -> None:
    """Refuse crops, flips and intensities that do not fit the samples or their targets.

    Args:
        data: Samples, of which the first two are examined.
        learner: Learner with the settings of augmentation.
    """
    rows = torch.arange(2, device=data.targets.device) % len(data.targets)
    check_augmentation(data.samples(rows), data.targets[rows], learner.local, learner.task)


def _check_warmup(data: FederatedData, learner: Learner) -> None:
    """Refuse a warm-up that lasts for all steps of the client with the fewest samples.

    Clients without samples are ignored.

    Args:
        data: Samples of all clients.
        learner: Learner with the schedule of a round. Without a warm-up, nothing is checked.

    Raises:
        ConfigError: The warm-up is too long. The message names the client.
    """
    local = learner.local
    if not local.within_round.warmup_steps:
        return
    sizes = data.parts.sizes
    if not bool(sizes.any()):
        return
    size = int(sizes[sizes > 0].min())
    steps = num_batches(size, local)
    if local.within_round.warmup_steps >= steps:
        client = int((sizes == size).nonzero()[0])
        raise ConfigError(
            f"local.within_round.warmup_steps = {local.within_round.warmup_steps} was asked for; "
            f"client {client} takes {steps} step{'s'[: steps != 1]} in a round (samples: {size}, "
            f"batch_size: {local.batch_size}, epochs: {local.epochs}), and one of them must follow "
            f"the warm-up. At most {steps - 1} would work, or warmup_share = 0.1, which is a share "
            "of each client's own steps."
        )


def _check_objectives(
    federation: Federation, engine: Simulation, trained: Sequence[tuple[Member, Learner]]
) -> None:
    """Run the user's objectives on two samples, once for each pair of member and learner.

    Objectives that are part of fedquilt are not checked. Weights are the initial ones.

    Args:
        federation: World, method and link.
        engine: Engine of the run, which has the samples.
        trained: Members that clients train, each with its learner. Pairs may be repeated.
    """
    world, data = federation.world, engine.data
    tried: list[tuple[Member, Learner]] = []  # A user's objective may not be hashable.
    for member, learner in trained:
        if not has_own_objective(learner) or (member, learner.timeless) in tried:
            continue
        tried.append((member, learner.timeless))
        rows = torch.arange(2, device=engine.device) % len(data.targets)  # (2,)
        weights = world.family.init(world.seed, engine.device, world.dtype)
        state = world.family.cutter.gather(weights, member.prefix, learner.names(member))
        has_class = torch.ones(world.family.num_outputs, dtype=torch.bool, device=engine.device)
        key = torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=engine.device)
        share = torch.tensor(learner.share, dtype=world.dtype, device=engine.device)
        batch = Batch(data.samples(rows), data.targets[rows], has_class, key, share)
        with random_state(0), engine.computing():
            check_objectives(learner, member, state, batch, type(federation.method).__name__)


def _check_learner(method: Method, learner: Learner, world: World) -> None:
    """Refuse a learner that has another task, or distils with a task that cannot.

    Args:
        method: Method that made the learner, for the message.
        learner: The learner.
        world: World, which has the run's task.

    Raises:
        ConfigError: The learner is refused.
    """
    task = world.task
    if learner.task != task:
        raise ConfigError(
            f"{type(method).__name__}.learner returned a learner for {learner.task}; the run's "
            f"task is {task}. Begin with super().learner(job, world), or pass task=world.task."
        )
    if learner.taught and type(task).divergences is Task.divergences:
        nothing = torch.zeros(world.family.output_shape)
        # It raises an error that names what is missing.
        task.divergences(nothing, nothing, nothing)
