"""What this machine can hold and how fast it trains: measured, and turned into a budget."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.family import Family
from fedquilt.family.cost import TrainingStep
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.fleets import FIVE_SHARES
from fedquilt.methods import Method
from fedquilt.precision import DTYPES, Precision, computing
from fedquilt.round.federation import World
from fedquilt.round.training.local import Local
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient, move
from fedquilt.terms import Arch, Budget, Client, Job


@dataclass(frozen=True)
class Target:
    """What a device should manage."""

    samples: int = 500  # that it holds
    epoch_seconds: float = 60.0  # to go through them once
    memory: float = 0.5  # part of what is free that training may take
    batch_size: int = 32

    def __post_init__(self) -> None:
        within(
            self,
            samples="[1, inf)",
            epoch_seconds="(0, inf)",
            memory="(0, 1]",
            batch_size="[1, inf)",
        )


@dataclass(frozen=True)
class MemberSummary:
    """One network of a family, as one talks about it."""

    share: float
    params: int
    macs: int  # a sample, forward
    memory: int  # bytes of a training step in the precision of the probe


@dataclass(frozen=True)
class Probe:
    """A machine, measured with a family of models, and the budget it is proposed."""

    device: str
    precision: Precision
    cores: int
    memory: int  # bytes free
    target: Target
    measured: MemberSummary  # what was trained to measure
    samples_per_second: float  # of training it
    macs_per_second: (
        float  # the same in multiply-adds as budgets count them: a sample's forward pass
    )
    budget: Budget
    member: MemberSummary  # what the budget gives

    def to_dict(self) -> dict[str, Any]:
        """Plain values; of the budget, the bounds it has."""
        bounds = {name: value for name, value in vars(self.budget).items() if value is not None}
        return asdict(self) | {"budget": bounds}


def probe(
    family: Family,
    device: str = "cpu",
    target: Target = Target(),
    seconds: float = 2.0,
    precision: Precision = "fp32",
) -> Probe:
    """Train members of a family for about so many seconds, and propose what this machine should be asked for."""
    free = free_memory(device)
    allowed = free * target.memory
    step = TrainingStep(target.batch_size, precision=precision)  # with momentum, as it is measured
    with computing(precision, torch.device(device)):
        measured, rate = _throughput(family, device, allowed, target, seconds, step)
    macs = max(1, measured.macs)  # a family of look-ups alone has none
    # A target is a bound on multiply-adds: what the machine does in an epoch's time, shared by the samples.
    budget = Budget(macs=macs * rate * target.epoch_seconds / target.samples, memory=allowed)
    try:
        member = described(family, family.fit(budget, step=step), step)
    except BudgetError as error:
        raise BudgetError(
            f"{target.samples} samples in {target.epoch_seconds:g} s were asked of this machine ({device}); it trains "
            f"{macs * rate:,.0f} multiply-adds a second. {error} More seconds or fewer samples would help."
        ) from error
    return Probe(
        device=device,
        precision=precision,
        cores=len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count() or 1,
        memory=free,
        target=target,
        measured=measured,
        samples_per_second=rate,
        macs_per_second=macs * rate,
        budget=budget,
        member=member,
    )


# --- memory -----------------------------------------------------------------------------------------------------


def free_memory(device: str = "cpu", root: Path = Path("/")) -> int:
    """Bytes that a training could take: of the GPU, or of the machine within the limits set for this process."""
    if torch.device(device).type == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError(
                f"{device} was to be measured; torch sees no GPU here. cpu would work."
            )
        return int(torch.cuda.mem_get_info(torch.device(device))[0])
    found = [_system_memory(root), _container_memory(root)]
    known = [value for value in found if value is not None]
    if not known:
        raise ConfigError(
            "the free memory of this machine could not be found out. Install psutil, which knows how."
        )
    return min(known)


def _system_memory(root: Path) -> int | None:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    except OSError:
        pass  # not Linux
    try:
        import psutil
    except ImportError:
        return None
    return int(psutil.virtual_memory().available)


def _container_memory(root: Path) -> int | None:
    """What is left of a control group's limit: a container may have far less than the machine it runs on."""
    groups = root / "sys/fs/cgroup"
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (groups / limit).read_text().strip(), (groups / used).read_text().strip()
        except OSError:
            continue
        if most.isdigit():  # else it is "max": no limit
            return max(0, int(most) - int(now))
    return None


# --- speed ------------------------------------------------------------------------------------------------------


def _throughput(
    family: Family, device: str, memory: float, target: Target, seconds: float, step: TrainingStep
) -> tuple[MemberSummary, float]:
    """A member and how many samples a second it trains on: the largest of five shares that time and target allow.

    A machine does more multiply-adds a second in a larger member. What is measured here is no larger than what will be
    proposed, so the proposal errs on the safe side.
    """
    budgets = [Budget(share=share, memory=memory) for share in sorted(FIVE_SHARES)]
    ladder = dict.fromkeys(family.fit(budget, step=step) for budget in budgets)
    until, batches = time.perf_counter() + seconds, math.ceil(target.samples / target.batch_size)
    took, growth, measured = 0.0, 0.0, None
    for arch in ladder:
        if measured and time.perf_counter() + 2 * (took + 4 * growth) > until:
            break  # four times the work of the one before, if every layer is twice as wide
        train = _training_step(
            family, arch, torch.device(device), DTYPES[step.precision], target.batch_size
        )
        train()  # warm
        began = time.perf_counter()
        train()
        before, took = took, time.perf_counter() - began
        growth = max(0.0, took - before) if measured else 0.0
        if measured and took * batches > target.epoch_seconds:
            break
        measured = (arch, train)
    assert measured
    arch, train = measured
    steps, began = 0, time.perf_counter()
    while not steps or time.perf_counter() < until:
        train()
        steps += 1
    rate = steps * target.batch_size / (time.perf_counter() - began)
    return described(family, arch, step), rate


def _training_step(
    family: Family, arch: Arch, where: torch.device, dtype: torch.dtype, batch_size: int
) -> Callable[[], None]:
    """One real local step, again and again: a batch, its gradient, momentum."""
    world, member = World(family), family.member(arch)

    def here(value: Tensor) -> Tensor:
        return value.to(where, dtype if value.is_floating_point() else value.dtype)

    method = Method(local=Local(batch_size=batch_size))
    learner = method.learner(Job(Client(0, Budget(share=1.0)), member.prefix, 0), world)
    weights = family.cutter.gather(family.init(0), member.prefix, learner.names(member))
    state = {name: here(value) for name, value in weights.items()}
    slots = learner.start_slots(state, member)
    example = family.example_inputs[0]
    inputs = here(example[torch.arange(batch_size) % len(example)])
    targets = _targets(member, state, inputs)
    held = torch.ones(family.num_outputs, dtype=torch.bool, device=where)
    batch = Batch(inputs, targets, held, torch.tensor(noise.key(0), device=where))

    def step() -> None:
        nonlocal state, slots
        for phase in learner.phases_at(0):
            grads, _ = gradient(learner, member, phase.objective, state, Received(state), batch)
            state, slots = move(
                learner, phase, state, slots, grads, learner.masks(member, phase, where), 0
            )
        if where.type == "cuda":
            torch.cuda.synchronize(where)

    return step


def _targets(member: Member, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Classes in the shape the model answers in: one a sample, a token or a pixel."""
    with torch.no_grad():
        logits, _ = member.net(state, inputs, Pass(train=False, statistics="batch"))
    shape = logits.movedim(member.class_dim, 1)[:, 0].shape
    drawn = (
        noise.uniform(torch.tensor(noise.key(1)), shape, torch.float64) * member.family.num_outputs
    )
    return drawn.long().to(inputs.device)


def described(family: Family, arch: Arch, step: TrainingStep = TrainingStep()) -> MemberSummary:
    """A member by its share and what it costs."""
    cost = family.cost(arch, step)
    return MemberSummary(_share(family, arch), cost.params, cost.macs, cost.memory)


def _share(family: Family, arch: Arch) -> float:
    """The smallest share at which some axis gains a channel and that gives the member."""
    sizes = {axis.size for axis in family.layout.axes.values() if not axis.fixed}
    shares = sorted({kept / size for size in sizes for kept in range(1, size + 1)} or {1.0})
    wanted = family.count(arch)
    return shares[
        bisect_left(shares, wanted, key=lambda share: family.count(family.fit(Budget(share=share))))
    ]
