"""Regression and several labels for each sample: federated beside a plain, centralised training
loop.

    python examples/tasks.py

Both train the same model on the same training samples with the same optimizer. The loop makes
`epochs` passes over all of them. `docs/tasks.md` has what it prints.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.models import MLP, tiny_resnet
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.tasks import MultiLabel, Regression, Task


@dataclass(frozen=True)
class Problem:
    """A data set, the model for it, and how the model is trained in one place."""

    data: Callable[[], fq.data.Pool]
    model: Callable[[], nn.Module]
    loss: Callable[[Tensor, Tensor], Tensor]
    task: Task  # For its metrics.
    epochs: int  # Passes over the training samples in one place.
    lr: float
    clip: float  # Longest gradient. 0: any.


PROBLEMS = {
    "diabetes": Problem(
        fq.data.diabetes,
        lambda: MLP(1, 10),
        lambda outputs, targets: F.mse_loss(outputs.flatten(), targets),
        Regression(),
        epochs=2,  # More overfit the 354 samples: after 5 the RMSE is 0.80, after 40 it is 0.92.
        lr=0.05,
        clip=1.0,
    ),
    "digits-labels": Problem(
        fq.data.digits_labels,
        lambda: tiny_resnet(num_classes=3),
        lambda outputs, targets: F.binary_cross_entropy_with_logits(outputs, targets.float()),
        MultiLabel(),
        epochs=40,
        lr=0.1,
        clip=0.0,
    ),
}


def centralized(problem: Problem, epochs: int) -> dict[str, float]:
    """Train in one place for some epochs, and return the metrics on the test samples."""
    pool = problem.data()
    torch.manual_seed(0)
    model = problem.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=problem.lr, momentum=0.9)
    for _ in range(epochs):
        for rows in torch.randperm(len(pool.targets)).split(16):
            optimizer.zero_grad()
            problem.loss(model(pool.inputs[rows]), pool.targets[rows]).backward()
            if problem.clip:
                nn.utils.clip_grad_norm_(model.parameters(), problem.clip)
            optimizer.step()

    model.eval()
    with torch.no_grad():
        outputs = model(pool.test_inputs)
    task = problem.task
    return {
        **task.values(task.sums(outputs, pool.test_targets)),
        **task.collected_values(outputs, pool.test_targets),
    }


def federated(name: str, rounds: int) -> dict[str, dict[str, float]]:
    """Train as `fedquilt run --data NAME` does, and return every metric by share."""
    experiment = Experiment.of({**demo(data=name), "rounds": rounds, "evaluation": {"every": 0}})
    return experiment.prepare().train(rounds).metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    for name, problem in PROBLEMS.items():
        central = centralized(problem, min(problem.epochs, 2 * rounds))
        found = federated(name, rounds)
        print(
            f"{name:<18} centralised  "
            f"{'  '.join(f'share {share:<5}' for share in found[problem.task.main.name])}"
        )
        for metric in problem.task.measured:
            values = "  ".join(f"{value:11.3f}" for value in found[metric.name].values())
            print(f"{metric.name:<18} {central[metric.name]:11.3f}  {values}")


if __name__ == "__main__":
    main()
