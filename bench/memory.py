"""Memory of one training step: what budgets predict, and what PyTorch allocates on a GPU.

    python bench/memory.py

Ten members of the PreResNet-18 of the papers, on images of 32×32 pixels. Predicted is what
`family.cost` estimates. Measured is the peak of `torch.cuda.max_memory_allocated` during the second
step, less what was allocated before the weights were made (the workspaces of matrix products). It
is measured in two ways:

    in place   the member as a module, torch.autograd and torch.optim, as a device would train it
    engine     the step of the engine `sequential`, which holds old and new weights at once
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from measure import NUM_CLASSES, machine

import fedquilt as fq
from fedquilt import noise
from fedquilt.family.cut import prefix
from fedquilt.hardware.precision import Precision, computing
from fedquilt.methods import HeteroFL
from fedquilt.models import MODELS
from fedquilt.round.federation import World
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, StepSettings, clipped, gradient, move
from fedquilt.terms import Arch, Client, Job

DEVICE = torch.device("cuda")
SGD, ADAM = fq.optimizers.SGD(lr=0.01, momentum=0.9), fq.optimizers.Adam()


@dataclass(frozen=True)
class Case:
    """One row: which member is trained, and how."""

    share: float
    optimizer: fq.optimizers.SGD | fq.optimizers.Adam
    precision: Precision
    batch_size: int


CASES = (
    Case(1.0, SGD, "fp32", 10),
    Case(1.0, SGD, "fp32", 128),
    Case(1.0, ADAM, "fp32", 128),
    Case(1.0, SGD, "bf16", 128),
    Case(1.0, ADAM, "bf16", 10),
    Case(0.5, SGD, "fp32", 128),
    Case(0.5, ADAM, "fp32", 10),
    Case(0.5, ADAM, "bf16", 128),
    Case(0.125, SGD, "fp32", 128),
    Case(0.125, ADAM, "bf16", 10),
)


def peak(make: Callable[[], Callable[[], None]]) -> int:
    """Return the peak of the second of two steps, in bytes above what was allocated before."""
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    step = make()
    step()  # chooses algorithms, and makes optimizer slots
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def random_batch(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.rand(case.batch_size, 3, 32, 32, device=DEVICE)
    return inputs, torch.randint(NUM_CLASSES, (case.batch_size,), device=DEVICE)


def in_place(family: fq.Family, arch: Arch, case: Case) -> Callable[[], None]:
    """Return a step of the member as a module, whose weights and slots change in place."""
    module = family.module(arch).to(DEVICE).train()
    inputs, targets = random_batch(case)
    own = case.optimizer
    optimizer: torch.optim.Optimizer
    if isinstance(own, fq.optimizers.SGD):
        optimizer = torch.optim.SGD(module.parameters(), own.lr, own.momentum, fused=True)
    else:
        optimizer = torch.optim.Adam(module.parameters(), own.lr, fused=True)

    def step() -> None:
        with computing(case.precision, DEVICE):
            F.cross_entropy(module(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def engine(family: fq.Family, arch: Arch, case: Case) -> Callable[[], None]:
    """Return one step as the engine `sequential` takes it."""
    world = World(family, precision=case.precision)
    method = method_of(case)
    learner = method.learner(Job(Client(0, fq.Budget(share=case.share)), prefix(arch), 0), world)
    initial = family.init(0, DEVICE)
    received = family.cutter.gather(initial, prefix(arch), learner.names(family.member(arch)))
    received = {name: value.clone() for name, value in received.items()}
    start = Received(received)
    state, slots = received, learner.start_slots(received, family.member(arch))
    held = torch.ones(NUM_CLASSES, dtype=torch.bool, device=DEVICE)
    batch = Batch(*random_batch(case), held, torch.tensor(noise.key(0), device=DEVICE))

    def step() -> None:
        nonlocal state, slots
        with computing(case.precision, DEVICE):
            for phase in learner.phases:
                grads, (_, seen) = gradient(
                    learner, family.member(arch), phase.objective, state, start, batch
                )
                grads = clipped(grads, case.optimizer.clip)
                masks = learner.masks(family.member(arch), phase, DEVICE)
                state, slots = move(learner, phase, state, slots, grads, masks, StepSettings(0))
                state = {**state, **seen}

    return step


def method_of(case: Case) -> HeteroFL:
    return HeteroFL().with_local(optimizer=case.optimizer, batch_size=case.batch_size)


def main() -> None:
    if not torch.cuda.is_available():
        print(
            "bench/memory.py compares predicted memory with what CUDA allocates; torch sees no GPU "
            "here."
        )
        return
    print(machine())
    family = fq.trace(MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    # workspaces of products stay allocated, and are no part of a member's memory
    for precision in (
        "fp32",
        "bf16",
    ):
        with computing(precision, DEVICE):
            F.cross_entropy(
                torch.nn.Linear(8, 8).to(DEVICE)(torch.rand(8, 8, device=DEVICE)),
                torch.arange(8).to(DEVICE),
            )
    print(
        f"{torch.cuda.memory_allocated() / 1e6:.1f} MB were allocated before, and are subtracted."
    )
    print(
        "| share | optimizer | precision | batch | predicted MB | in place MB | ratio | engine MB "
        "| ratio |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in CASES:
        world = World(family, precision=case.precision)
        arch = family.fit(fq.Budget(share=case.share))
        predicted = family.cost(arch, method_of(case).training_step(world)).memory
        found = [peak(lambda: make(family, arch, case)) for make in (in_place, engine)]  # noqa: B023  called at once
        cells = [f"{bytes / 1e6:,.1f} | {predicted / bytes:.2f}" for bytes in found]
        optimizer = type(case.optimizer).__name__
        start = (
            f"| {case.share:g} | {optimizer} | {case.precision} | {case.batch_size} | "
            f"{predicted / 1e6:,.1f} |"
        )
        print(f"{start} {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
