"""Losses and metrics of tasks in a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from fedquilt.engines.vectorized.cuda_graph import capture
from fedquilt.tasks import Classification, MultiLabel, NextToken, Regression, Segmentation, Task

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

WEIGHTED = Classification(
    label_smoothing=0.1,
    class_weights=(1.0, 2.0, 3.0),
    metrics=("accuracy", "top2", "f1", "micro_f1", "perplexity", "loss"),
)
MASKED = Segmentation(
    class_weights=(1.0, 2.0, 3.0), metrics=("dice", "iou_1", "pooled_dice", "loss")
)
MASKS = torch.tensor([[[0, 1, 2, -100], [2, 2, 1, 0]]]).reshape(1, 2, 2, 1, 2)
TOKENS = torch.tensor([[[0, 1, 2, -100], [2, 2, 1, 0]]])
EXAMPLES: list[tuple[Task, tuple[int, ...], Tensor]] = [
    (WEIGHTED, (1, 4, 3), torch.tensor([[0, 2, 1, -100]])),
    (NextToken(), (1, 2, 3, 4), TOKENS),
    (Regression("huber"), (1, 4, 2), torch.linspace(-1, 1, 8).reshape(1, 4, 2)),
    (Regression(), (1, 4, 1), torch.linspace(-1, 1, 4)[None]),
    (MASKED, (1, 2, 3, 2, 1, 2), MASKS),
    (Segmentation(loss="dice", background=True), (1, 2, 3, 2, 2), MASKS.squeeze(3)),
    (MultiLabel(), (1, 4, 2), torch.arange(8).reshape(1, 4, 2) % 3 == 0),
]


@pytest.mark.parametrize(("task", "shape", "targets"), EXAMPLES)
def test_tasks_are_captured_and_replayed(task, shape, targets):
    weights = torch.linspace(0.5, 2, shape[1], device="cuda")

    def run(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
            return task.mean_loss(outputs, targets, weights)

        return (
            vmap(grad(task.mean_loss))(outputs, targets),
            vmap(grad(weighted))(outputs, targets),
            vmap(task.divergences)(outputs, outputs * 2, targets),
            vmap(task.sums)(outputs, targets),
        )

    generator = torch.Generator("cuda").manual_seed(0)
    targets = targets.cuda()
    outputs = torch.zeros(shape, device="cuda")
    results = []
    graph = capture(lambda: results.append(run(outputs, targets)), torch.cuda.Stream())
    replayed = results[-1]  # The calls before it were those that warm up.

    for _ in range(2):
        outputs.copy_(torch.randn(shape, generator=generator, device="cuda"))
        graph.replay()
        torch.testing.assert_close(replayed, run(outputs, targets))
        on_cpu = run_on_cpu(task, outputs, targets)
        torch.testing.assert_close({name: sums.cpu() for name, sums in replayed[3].items()}, on_cpu)


def run_on_cpu(task: Task, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
    return vmap(task.sums)(outputs.cpu(), targets.cpu())
