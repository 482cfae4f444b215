"""Pictures of predicted masks when a run has spent some of the baseline's bytes (ProgFed, Figure
17).

    python examples/progfed_masks.py train masks.npz --data-folder data --device cuda
    python examples/progfed_masks.py draw masks.npz masks.png

`train` trains every row of the preset progfed/table3-hippocampus and stores slices of predicted
masks as arrays. `draw` needs matplotlib, and no data and no GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.round import Record
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.overlay import overlay
from fedquilt.studies.growth import total_cost
from fedquilt.studies.papers import data_folder, read_preset

PRESET = "progfed/table3-hippocampus"
BUDGETS = (0.0018, 0.094, 0.364)  # Parts of the baseline's bytes, both ways, as in Figure 17


def train(
    scale: str, folder: Path, device: str, precision: str, seed: int, volumes: int
) -> dict[str, np.ndarray]:
    """Train every row of the preset and return slices of its masks.

    Args:
        scale: Scale of the preset. "smoke" needs no data.
        folder: Folder of data files.
        device: Device to train on, as torch names it.
        precision: Precision of products.
        seed: Random seed.
        volumes: Number of test volumes, the first ones, of which slices are kept.

    Returns:
        `names` of the rows; `parts` of the baseline's bytes, the last one being all rounds;
        `inputs` and `truth` (volume, height, width); `masks` (row, part, volume, height, width), −1
        where not even one round fits; `rounds` and `spent` (row, part), the rounds trained by then
        and the bytes as a part of the baseline's.
    """
    rows = read_preset(PRESET).rows_at(scale, folder)
    machine = {"engine": {"device": device, "precision": precision}, "seed": seed}
    experiments = {name: Experiment.of(overlay(settings, machine)) for name, settings in rows}
    baseline = next(iter(experiments.values()))
    cost = total_cost(baseline.prepare(), baseline.rounds)
    whole = cost.down + cost.up

    results = []
    for name, experiment in experiments.items():
        print(name, flush=True)
        results.append(_trained(experiment, whole, volumes))
    masks, rounds, spent = (np.stack(values) for values in zip(*results, strict=True))
    run = baseline.prepare()
    chosen = torch.arange(volumes)
    targets = run.data.test_targets[chosen].cpu()
    places = _fullest(targets)
    images = run.data.test_samples(chosen).cpu()[:, 0]
    return {
        "names": np.array(list(experiments)),
        "parts": np.array([*BUDGETS, 1.0]),
        "inputs": _slices(images, places).numpy(),
        "truth": _slices(targets, places).numpy(),
        "masks": masks,
        "rounds": rounds,
        "spent": spent,
    }


def _trained(
    experiment: Experiment, whole: int, volumes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Train a run and return its masks, rounds and bytes at the last round within each budget."""
    run = experiment.prepare()
    inputs = run.data.test_samples(torch.arange(volumes))
    places = _fullest(run.data.test_targets[:volumes].cpu())
    budgets = [*BUDGETS, float("inf")]
    masks = np.full((len(budgets), volumes, *inputs.shape[3:]), -1, np.int8)
    rounds = np.zeros(len(budgets), np.int64)
    spent = np.zeros(len(budgets))
    total = 0

    def watch(record: Record) -> None:
        nonlocal total
        total += record.bytes_down + record.bytes_up
        fitting = [place for place, part in enumerate(budgets) if total <= part * whole]
        if len(fitting) == 1 and run.server.round < experiment.rounds:
            return  # Only the end is still to come.
        predicted = _slices(_predicted(run.deploy(fq.Budget(share=1.0)), inputs), places)
        for place in fitting:
            masks[place] = predicted.numpy()
            rounds[place] = run.server.round
            spent[place] = total / whole

    run.train(experiment.rounds, watch)
    return masks, rounds, spent


def _predicted(model: nn.Module, inputs: Tensor) -> Tensor:
    """Return the classes (volume, *size) that a model predicts, one volume at a time."""
    model.to(inputs.device)
    with torch.no_grad():
        return torch.cat([model(volume[None]).argmax(1).cpu() for volume in inputs])


def _fullest(masks: Tensor) -> list[int]:
    """Return the position along the first side at which each mask (volume, *size) has most
    foreground.
    """
    return (masks > 0).flatten(2).sum(2).argmax(1).tolist()


def _slices(volumes: Tensor, places: Sequence[int]) -> Tensor:
    """Return (volume, height, width), the slice of each volume at its place."""
    return torch.stack([volume[place] for volume, place in zip(volumes, places, strict=True)])


def draw(arrays: dict[str, np.ndarray], file: Path, volume: int = 0) -> None:
    """Draw one slice with the masks of all rows and budgets, and the true one.

    Args:
        arrays: What `train` returned.
        file: Picture to write, such as masks.png.
        volume: Number of the volume among those that were kept.
    """
    from matplotlib.figure import Figure

    names, parts = arrays["names"], arrays["parts"]
    figure = Figure(figsize=(2.2 * (len(parts) + 1), 2.4 * len(names)), layout="constrained")
    axes = figure.subplots(len(names), len(parts) + 1, squeeze=False)
    for row, name in enumerate(names):
        truth = arrays["truth"][volume]
        pictures = [(f"{name}\ntrue mask", truth)]
        for column, part in enumerate(parts):
            label = f"{100 * part:g} %, round {arrays['rounds'][row, column]}"
            if column == len(parts) - 1:
                label = f"end: {100 * arrays['spent'][row, column]:.1f} %"
            pictures.append((label, arrays["masks"][row, column, volume]))
        for axis, (title, mask) in zip(axes[row], pictures, strict=True):
            axis.set_title(title, fontsize=8)
            axis.axis("off")
            if mask.min() == -1:
                axis.text(
                    0.5, 0.5, "no round\nwithin this budget", ha="center", va="center", fontsize=8
                )
                continue
            axis.imshow(arrays["inputs"][volume], cmap="gray")
            axis.imshow(
                np.ma.masked_less(mask, 1),
                cmap="autumn",
                alpha=0.6,
                vmin=1,
                vmax=2,
                interpolation="nearest",
            )
    figure.savefig(file, dpi=150)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `train` or `draw` from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train")
    training.add_argument("arrays", type=Path)
    training.add_argument("--scale", default="full")
    training.add_argument("--data-folder", default=None)
    training.add_argument("--device", default="cpu")
    training.add_argument("--precision", default="fp32")
    training.add_argument("--seed", type=int, default=0)
    training.add_argument("--volumes", type=int, default=2)
    drawing = commands.add_parser("draw")
    drawing.add_argument("arrays", type=Path)
    drawing.add_argument("picture", type=Path)
    drawing.add_argument("--volume", type=int, default=0)
    chosen = parser.parse_args(arguments)
    if chosen.command == "draw":
        with np.load(chosen.arrays) as file:
            draw(dict(file), chosen.picture, chosen.volume)
        return
    folder = data_folder(chosen.data_folder)
    arrays = train(
        chosen.scale, folder, chosen.device, chosen.precision, chosen.seed, chosen.volumes
    )
    np.savez_compressed(chosen.arrays, **arrays)


if __name__ == "__main__":
    main()
