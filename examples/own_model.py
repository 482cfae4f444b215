"""A module of one's own, federated among clients that hold all, half or a quarter of it.

Nothing in the module knows of fedquilt. Two branches and a concatenation show what tracing is for:
each branch is cut on its own, and the classifier's inputs follow.
"""

import torch
from torch import Tensor, nn

import fedquilt as fq


class TwoScales(nn.Module):
    """A fine and a coarse look at a digit, side by side."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.fine = nn.Sequential(
            nn.Conv2d(1, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.coarse = nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2), nn.GroupNorm(4, 16), nn.ReLU()
        )
        self.out = nn.Linear((24 + 16) * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.cat([self.fine(x), self.coarse(x)], dim=1).flatten(1))
        return logits


def main() -> None:
    data = fq.data.digits().partition(20)
    family = fq.trace(TwoScales, data.example)
    print("out.weight is", family.axes["out.weight"])
    fleet = fq.Fleet.of([1, 1 / 2, 1 / 4], num_clients=20, cohort=10)
    run = fq.run(fq.methods.HeteroFL(), family, data, fleet, rounds=20)
    for budget in fleet.kinds:
        model = run.deploy(budget)
        right = model(data.test_inputs).argmax(1) == data.test_targets
        size = sum(weight.numel() for weight in model.parameters())
        print(f"{budget}: {size:,} parameters, {right.float().mean():.1%}")


if __name__ == "__main__":
    main()
