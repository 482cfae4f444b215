"""Measurement of a machine's memory and training speed, from which a budget is proposed."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import within
from fedquilt.errors import BudgetError
from fedquilt.family import Family
from fedquilt.family.cost import TrainingStep
from fedquilt.family.member import Member
from fedquilt.family.net import Pass
from fedquilt.fleets.presets import FIVE_SHARES
from fedquilt.hardware.precision import DTYPES, Precision, computing
from fedquilt.hardware.process import free_memory
from fedquilt.methods import Method
from fedquilt.round.federation import World
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, StepSettings, gradient, move
from fedquilt.terms import Arch, Budget, Client, Job


@dataclass(frozen=True)
class Target:
    """Work that a device should be able to do."""

    samples: int = 500  # Number of training samples on the device
    epoch_seconds: float = 60.0  # Seconds that one epoch may take
    memory: float = 0.5  # Share of the free memory that training may take
    batch_size: int = 32  # Number of samples in a batch

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
    """A member of a family by its share and its costs."""

    share: float  # Share of the model in (0, 1]
    params: int  # Number of parameters
    macs: int  # Multiply-adds of the forward pass of one sample
    memory: int  # Bytes of a training step in the precision of the probe


@dataclass(frozen=True)
class Probe:
    """Measurements of a machine with a family of models, and the proposed budget."""

    device: str  # Device that was measured, as torch names it
    precision: Precision  # Precision of training
    cores: int  # Number of CPU cores that the process may use
    memory: int  # Bytes of free memory
    target: Target  # Work that the budget is for
    measured: MemberSummary  # Member that was trained for the measurement
    samples_per_second: float  # Training speed of that member
    # Training speed in multiply-adds as budgets count them: those of the forward pass of a sample
    macs_per_second: float
    budget: Budget  # Proposed budget
    member: MemberSummary  # Member that fits the budget

    def to_dict(self) -> dict[str, Any]:
        """Return plain values. Bounds that the budget does not have are left out."""
        bounds = {name: value for name, value in vars(self.budget).items() if value is not None}
        return asdict(self) | {"budget": bounds}


def probe(
    family: Family,
    device: str = "cpu",
    target: Target = Target(),
    seconds: float = 2.0,
    precision: Precision = "fp32",
) -> Probe:
    """Train members of a family for some seconds, and propose a budget for this machine.

    Args:
        family: Family of models.
        device: Device to measure, as torch names it.
        target: Samples, time and memory that the budget is for.
        seconds: Approximate duration of the measurement.
        precision: Precision of training.

    Raises:
        BudgetError: No member of the family reaches the target.
    """
    free = free_memory(device)
    allowed = free * target.memory
    # It counts momentum, with which members are trained here.
    step = TrainingStep(target.batch_size, precision=precision)
    with computing(precision, torch.device(device)):
        measured, rate = _throughput(family, device, allowed, target, seconds, step)
    macs = max(1, measured.macs)  # A family of embeddings alone has none.
    # The bound on multiply-adds is what the machine computes in an epoch's time, per sample.
    budget = Budget(macs=macs * rate * target.epoch_seconds / target.samples, memory=allowed)
    try:
        member = described(family, family.fit(budget, step=step), step)
    except BudgetError as error:
        raise BudgetError(
            f"{target.samples} samples in {target.epoch_seconds:g} s were asked of this machine "
            f"({device}); it trains {macs * rate:,.0f} multiply-adds a second. {error} More "
            "seconds or fewer samples would help."
        ) from error
    return Probe(
        device=device,
        precision=precision,
        cores=_num_cores(),
        memory=free,
        target=target,
        measured=measured,
        samples_per_second=rate,
        macs_per_second=macs * rate,
        budget=budget,
        member=member,
    )


def _num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


# --- speed --------------------------------------------------------------------------------------


def _throughput(
    family: Family, device: str, memory: float, target: Target, seconds: float, step: TrainingStep
) -> tuple[MemberSummary, float]:
    """Return a member, and the number of samples per second that it trains on.

    It is the largest of five shares that time and target allow. A machine computes more
    multiply-adds per second in a larger member. The measured member is no larger than the proposed
    one, so that the proposal is on the safe side.

    Args:
        family: Family of models.
        device: Device to measure, as torch names it.
        memory: Bytes that a training step may take.
        target: Samples, time and batch size.
        seconds: Approximate duration of the measurement.
        step: Training step whose memory is counted.
    """
    budgets = [Budget(share=share, memory=memory) for share in sorted(FIVE_SHARES)]
    ladder = dict.fromkeys(family.fit(budget, step=step) for budget in budgets)
    deadline, batches = time.perf_counter() + seconds, math.ceil(target.samples / target.batch_size)
    took, growth, measured = 0.0, 0.0, None
    for arch in ladder:
        if measured and time.perf_counter() + 2 * (took + 4 * growth) > deadline:
            break  # Twice the width is about four times the work.
        train = _training_step(
            family, arch, torch.device(device), DTYPES[step.precision], target.batch_size
        )
        train()  # Warm-up
        began = time.perf_counter()
        train()
        previous, took = took, time.perf_counter() - began
        growth = max(0.0, took - previous) if measured else 0.0
        if measured and took * batches > target.epoch_seconds:
            break
        measured = (arch, train)
    assert measured
    arch, train = measured
    steps, began = 0, time.perf_counter()
    while not steps or time.perf_counter() < deadline:
        train()
        steps += 1
    rate = steps * target.batch_size / (time.perf_counter() - began)
    return described(family, arch, step), rate


def _training_step(
    family: Family, arch: Arch, device: torch.device, dtype: torch.dtype, batch_size: int
) -> Callable[[], None]:
    """Return a function that performs one local training step with momentum on a random batch.

    Each call continues from the weights of the previous one. On a GPU it waits until the step is
    done.

    Args:
        family: Family of models.
        arch: Architecture of the member that is trained.
        device: Device of the tensors.
        dtype: Dtype of weights and of inputs that are floating-point numbers.
        batch_size: Samples in the batch, which repeats the example inputs if there are too few.
    """
    world, member = World(family), family.member(arch)

    def here(value: Tensor) -> Tensor:
        return value.to(device, dtype if value.is_floating_point() else value.dtype)

    method = Method(local=LocalTraining(batch_size=batch_size))
    learner = method.learner(Job(Client(0, Budget(share=1.0)), member.prefix, 0), world)
    weights = family.cutter.gather(family.init(0), member.prefix, learner.names(member))
    state = {name: here(value) for name, value in weights.items()}
    slots = learner.start_slots(state, member)
    example = family.example_inputs[0]
    inputs = here(example[torch.arange(batch_size) % len(example)])
    targets = _targets(member, state, inputs)
    has_class = torch.ones(family.num_outputs, dtype=torch.bool, device=device)
    batch = Batch(
        inputs, targets, has_class, torch.tensor(noise.key(noise.Stream.TRIAL_BATCH), device=device)
    )

    def step() -> None:
        nonlocal state, slots
        for phase in learner.phases_at(0):
            grads, _ = gradient(learner, member, phase.objective, state, Received(state), batch)
            state, slots = move(
                learner,
                phase,
                state,
                slots,
                grads,
                learner.masks(member, phase, device),
                StepSettings(0),
            )
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return step


def _targets(member: Member, state: dict[str, Tensor], inputs: Tensor) -> Tensor:
    """Return random classes in the shape of the output: one per sample, token or pixel.

    Args:
        member: Member that is run once, to learn the shape of its output.
        state: Its weights by name.
        inputs: Batch of inputs, (sample, …).
    """
    with torch.no_grad():
        logits, _ = member.net(state, inputs, Pass(train=False, statistics="batch"))
    # (sample, class, …) without the classes: (sample, …)
    shape = logits.movedim(member.class_dim, 1)[:, 0].shape
    classes = (
        noise.uniform(torch.tensor(noise.key(noise.Stream.TRIAL_CLASSES)), shape, torch.float64)
        * member.family.num_outputs
    )
    return classes.long().to(inputs.device)


def described(family: Family, arch: Arch, step: TrainingStep = TrainingStep()) -> MemberSummary:
    """Return a member's share and costs.

    Args:
        family: Family of the member.
        arch: Architecture of the member.
        step: Training step whose memory is counted.
    """
    cost = family.cost(arch, step)
    return MemberSummary(_share(family, arch), cost.params, cost.macs, cost.memory)


def _share(family: Family, arch: Arch) -> float:
    """Return the smallest share that gives a member with as many parameters as this one.

    Only shares at which some axis gains a channel are candidates.

    Args:
        family: Family of the member.
        arch: Architecture of the member, which some share must give.
    """
    sizes = {axis.size for axis in family.layout.axes.values() if not axis.fixed}
    shares = sorted({width / size for size in sizes for width in range(1, size + 1)} or {1.0})
    num_params = family.count(arch)
    return shares[
        bisect_left(
            shares, num_params, key=lambda share: family.count(family.fit(Budget(share=share)))
        )
    ]
