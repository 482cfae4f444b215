"""Draw docs/windows.png: the channels of a layer that clients train in each round.

    python tools/windows.py

The channels are those of each method's own `plan`, for one layer of 32 channels and one client each
of the shares 1/2, 1/4 and 1/8.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.round.federation import World
from fedquilt.round.method import Method
from fedquilt.terms import Client, Server

FIGURE = Path(__file__).parents[1] / "docs" / "windows.png"
CHANNELS = 32
ROUNDS = 48
SHARES = (1 / 2, 1 / 4, 1 / 8)
METHODS = {
    "HeteroFL": fq.methods.HeteroFL(),
    "Federated Dropout": fq.methods.FedDropout(),
    "FedRolex": fq.methods.FedRolex(),
}
DOTS_PER_INCH = 110


def training_counts(method: Method, rounds: int = ROUNDS) -> Tensor:
    """Return the number of clients that train each channel in each round.

    Args:
        method: Method whose plans are counted.
        rounds: Number of rounds.

    Returns:
        Counts (channel, round), of one client for each of `SHARES`.
    """
    net = nn.Sequential(nn.Linear(1, CHANNELS), nn.ReLU(), nn.Linear(CHANNELS, 2))
    family = fq.trace(net, torch.zeros(2, 1))
    world = World(family, num_clients=len(SHARES))
    numbered = {**family.init(), "0.bias": torch.arange(float(CHANNELS))}
    clients = [Client(id, fq.Budget(share=share), 1) for id, share in enumerate(SHARES)]

    counts = torch.zeros(CHANNELS, rounds)
    for number in range(rounds):
        server = Server(number, numbered)
        for client in clients:
            (submodel,) = method.plan(server, client, world)
            # The bias has the number of its channel, so that a cut returns the channels.
            channels = family.cutter.gather(numbered, submodel, ["0.bias"])["0.bias"]
            counts[channels.long(), number] += 1
    return counts


def draw(path: Path = FIGURE) -> None:
    """Draw one panel per method.

    Args:
        path: File that is written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap

    colors = ListedColormap(["#f4f1ea", "#b9d3d8", "#5b9aa8", "#1d4e5f"])
    figure, panels = pyplot.subplots(
        1, len(METHODS), figsize=(9.2, 2.9), sharey=True, layout="constrained"
    )
    for panel, (name, method) in zip(panels, METHODS.items(), strict=True):
        counts = training_counts(method)
        image = panel.imshow(
            counts, cmap=colors, vmin=-0.5, vmax=3.5, origin="lower", aspect="auto"
        )
        untrained = int((counts.sum(1) == 0).sum())
        panel.set_title(f"{name}\n{untrained} of {CHANNELS} channels never trained", fontsize=10)
        panel.set_xlabel("round")
    panels[0].set_ylabel("channel of a layer")
    bar = figure.colorbar(image, ax=panels, ticks=range(len(SHARES) + 1))
    bar.set_label("clients that train it")
    figure.savefig(path, dpi=DOTS_PER_INCH)
    pyplot.close(figure)


if __name__ == "__main__":
    draw()
