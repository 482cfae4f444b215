"""Pictures of true and predicted masks of a segmentation, from the newest checkpoint of a run.

The folder of a run has no samples. They are taken from the data that its settings name, and the
masks are predicted by the nets that a device of each budget would get.
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedquilt.display.curves import COLORS
from fedquilt.display.thinning import Row
from fedquilt.errors import ConfigError
from fedquilt.report import charts, sentences
from fedquilt.report.collect import RunFolder
from fedquilt.report.figure import Figure
from fedquilt.report.quilt import budget_names
from fedquilt.runs.load import load_run
from fedquilt.runs.run import Run
from fedquilt.tasks import Segmentation

MAX_SAMPLES = 4  # Test samples that are drawn, the first ones that have a foreground
MAX_NETS = 4  # Budgets whose nets predict, the largest ones
SEARCHED = 64  # Test samples among which those with a foreground are looked for
SIDE = 96  # Pixels of a picture. Larger samples are thinned, and smaller ones enlarged
OPACITY = 0.55  # Of the classes above the image
INPUT, TRUTH = "image", "true mask"


@dataclass(frozen=True)
class Masks:
    """Test samples with their true masks and the masks that nets predict, one slice of each.

    Attributes:
        images: (sample, height, width) Brightness in [0, 1].
        truth: (sample, height, width) Classes.
        predicted: Classes (sample, height, width) by the name of the budget, the largest first.
        foreground: Smallest class that is drawn.
        num_classes: Number of classes. Larger values in `truth` do not count.
    """

    images: np.ndarray
    truth: np.ndarray
    predicted: dict[str, np.ndarray]
    foreground: int
    num_classes: int

    def agreement(self, name: str) -> list[float]:
        """Return the part of the foreground pixels of each sample that have the right class.

        Pixels count that are foreground in the true or in the predicted mask. Without such pixels
        the part is 1.

        Args:
            name: Name of the budget.
        """
        guess = self.predicted[name]
        counted = (self.truth >= 0) & (self.truth < self.num_classes)
        relevant = counted & ((self.truth >= self.foreground) | (guess >= self.foreground))
        right = (relevant & (self.truth == guess)).sum((1, 2))
        total = relevant.sum((1, 2))
        return [float(r / t) if t else 1.0 for r, t in zip(right, total, strict=True)]


def masks_of(folder: RunFolder, run: Run, trust: bool = False) -> Masks | None:
    """Return masks of test samples that the nets of a run predict. None: it is no segmentation.

    Args:
        folder: Folder of the run.
        run: The prepared run.
        trust: True: run code that its settings name.

    Raises:
        FedquiltError: There is no checkpoint, or no data, or nets cannot be deployed.
    """
    task = run.world.task
    if not isinstance(task, Segmentation):
        return None
    trained = load_run(folder.path, trust=trust)
    if trained.absent:
        raise ConfigError(f"its data is not available: {trained.absent}")
    data = trained.data
    foreground = 0 if task.background else 1
    targets = data.test_targets[:SEARCHED].cpu()
    is_drawn = (targets >= foreground) & (targets < data.num_classes)
    chosen = is_drawn.flatten(1).any(1).nonzero()[:MAX_SAMPLES, 0]
    if not len(chosen):
        raise ConfigError(f"none of the first {len(targets)} test samples has a foreground.")
    inputs = data.test_samples(chosen).cpu()
    places = [_fullest(mask) for mask in is_drawn[chosen]]
    names: dict[str, np.ndarray] = {}
    for budget, name in reversed(budget_names(trained).items()):
        if name in names or len(names) == MAX_NETS:
            continue
        model = trained.deploy(budget).cpu()
        with torch.no_grad():
            classes = torch.cat([model(sample[None]).argmax(1) for sample in inputs])
        names[name] = _slices(classes, places)
    channels = inputs.float().mean(1)
    return Masks(
        _brightness(_slices(channels, places)),
        _slices(targets[chosen], places),
        names,
        foreground,
        data.num_classes,
    )


def _fullest(is_drawn: Tensor) -> int:
    """Return the place along the first side of a volume with most foreground. 0 for an image."""
    return int(is_drawn.flatten(1).sum(1).argmax()) if is_drawn.dim() > 2 else 0


def _slices(values: Tensor, places: Sequence[int]) -> np.ndarray:
    """Return one slice (sample, height, width) of each sample, thinned to at most `SIDE` pixels."""
    flat = values
    if values.dim() > 3:
        flat = torch.stack([volume[place] for volume, place in zip(values, places, strict=True)])
    step = -(-max(flat.shape[1:]) // SIDE)
    return np.asarray(flat[:, ::step, ::step])


def _brightness(images: np.ndarray) -> np.ndarray:
    """Return images (sample, height, width) whose smallest value is 0 and whose largest is 1."""
    finite = np.nan_to_num(images.astype(np.float64))
    low = finite.min((1, 2), keepdims=True)
    high = finite.max((1, 2), keepdims=True)
    result: np.ndarray = (finite - low) / np.maximum(high - low, 1e-12)
    return result


def mask_figure(masks: Masks, title: str = "Masks", name: str = "masks") -> Figure:
    """Return the figure of masks: a row for each sample, and a column for each net.

    Args:
        masks: True and predicted masks.
        title: Heading above the figure.
        name: Name of the figure.
    """
    columns: dict[str, np.ndarray | None] = {INPUT: None, TRUTH: masks.truth, **masks.predicted}
    pictures: list[Row] = []
    for column, classes in columns.items():
        for sample, image in enumerate(masks.images):
            mask = None if classes is None else classes[sample]
            picture = _painted(image, mask, masks)
            pictures.append({"sample": sample, "column": column, "url": _address(picture)})
    agreement = {name: masks.agreement(name) for name in masks.predicted}
    rows: list[Row] = [
        {"sample": sample, "net": net, "agreement": part}
        for net, parts in agreement.items()
        for sample, part in enumerate(parts)
    ]
    sentence = sentences.of_masks({net: sum(p) / len(p) for net, p in agreement.items()})
    notes = (
        "Agreement is the part of the pixels in a true or predicted foreground that are right.",
    )
    chart = charts.pictures(pictures, list(columns), len(masks.images))
    return Figure(name, title, sentence, {(): chart}, (), rows, notes)


def _painted(image: np.ndarray, classes: np.ndarray | None, masks: Masks) -> np.ndarray:
    """Return an image (height, width, 3) in bytes with the colours of classes above it.

    Args:
        image: (height, width) Brightness.
        classes: (height, width) Classes. None: the image alone.
        masks: The classes that are drawn.
    """
    colored = np.repeat(255 * image[:, :, None], 3, axis=2)
    if classes is not None:
        for number in range(masks.foreground, masks.num_classes):
            color = COLORS[(number + 1 - masks.foreground) % len(COLORS)]
            paint = [int(color[place : place + 2], 16) for place in (1, 3, 5)]
            where = classes == number
            colored[where] = (1 - OPACITY) * colored[where] + OPACITY * np.array(paint)
    factor = max(1, SIDE // max(image.shape))
    return colored.round().astype(np.uint8).repeat(factor, 0).repeat(factor, 1)


def _address(image: np.ndarray) -> str:
    """Return a PNG file of an image (height, width, 3) as an address that has the file inside."""
    height, width, _ = image.shape
    lines = b"".join(b"\0" + line.tobytes() for line in image)  # 0: a line is stored as it is
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits of red, green and blue
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b""))
    file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, content) for kind, content in parts)
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
