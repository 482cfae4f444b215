"""Plots of the samples that each client holds, by class or by domain.

They are text for a terminal, or a figure in a file.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt.data.federated import FederatedData
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

By = Literal["class", "domain"]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64  # Groups that fit into a line. Neighbouring groups are joined if there are more.
_BAR = 24  # Characters of the longest bar.
_STACKED = 20  # Groups that can be distinguished by colour. More are shown as a heat map.


def counts(data: FederatedData, by: By = "class", clients: int | None = None) -> Tensor:
    """Count the training samples of each class or domain that each client holds.

    Args:
        data: Partitioned data.
        by: "class" or "domain".
        clients: Number of clients, of which the first are counted. None: all.

    Returns:
        (client, group) Number of samples. If targets are sequences, all their entries count.
        Negative targets, which are padding, do not count.
    """
    parts = data.parts
    first = len(parts) if clients is None else min(clients, len(parts))
    rows = parts.order[: int(parts.offsets[first])]
    owners = torch.repeat_interleave(torch.arange(first), parts.sizes[:first])
    codes, groups = _codes(data, by)
    groups_of_rows = codes[rows].reshape(len(rows), -1)  # A target may be a sequence of classes.
    cells = (owners[:, None] * groups + groups_of_rows)[groups_of_rows >= 0]
    return torch.bincount(cells, minlength=first * groups).reshape(first, groups)


def blocks(data: FederatedData, by: By = "class", clients: int = 20) -> str:
    """Return a plot of the partition as text: a heading, then a line for each of the first clients.

    A line has the client's number of samples, a block for each class or domain, and a bar for the
    number of samples. The height of a block is the group's share of the client's samples. If there
    are further clients, a last line has the range of all sizes.

    Args:
        data: Partitioned data.
        by: "class" or "domain".
        clients: Largest number of clients that are shown.
    """
    shown = _joined(counts(data, by, clients), _COLUMNS)
    sizes = data.parts.sizes
    shares = shown / shown.sum(1, keepdim=True).clamp(min=1)
    heights = (shares / shares.max().clamp(min=1e-9) * (len(_BLOCKS) - 1)).ceil().long()
    label, number = len(str(len(shown) - 1)), len(f"{int(sizes.max()):,}")
    lines = [
        f"{data.name}: {data.num_clients:,} clients, {int(sizes.sum()):,} samples, "
        f"{_legend(data, by, shown)}"
    ]
    for client, row in enumerate(heights.tolist()):
        size = int(sizes[client])
        bar = "█" * max(1, round(_BAR * size / int(sizes[: len(shown)].max())))
        columns = "".join(_BLOCKS[height] for height in row)
        lines.append(f"{client:>{label}}  {size:>{number},}  {columns}  {bar}")
    if data.num_clients > len(shown):
        low, middle, high = (int(size) for size in (sizes.min(), sizes.median(), sizes.max()))
        lines.append(
            f"… and {data.num_clients - len(shown):,} more; samples a client: {low} to {high}, "
            f"median {middle}"
        )
    return "\n".join(lines)


def figure(data: FederatedData, path: str | Path, by: By = "class", clients: int = 100) -> Path:
    """Write a figure of the first clients' classes or domains, and return its path.

    It has stacked bars, or a heat map if there are many groups. Missing folders are made.

    Args:
        data: Partitioned data.
        path: File to write. Its name ends in .png, .svg or .pdf.
        by: "class" or "domain".
        clients: Largest number of clients that are shown.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            f"a figure needs matplotlib, which is not installed: {how_to_install('plot')}."
        ) from error
    target = Path(path)
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            f"a figure {target.name!r} was asked for; a name that ends in .png, .svg or .pdf would "
            "fit."
        )
    cells = counts(data, by, clients)
    drawing = Figure(figsize=(9, 1.2 + 0.16 * max(10, len(cells))), layout="constrained")
    axes = drawing.subplots()
    if cells.shape[1] <= _STACKED:
        _stack(axes, cells, _names(data, by))
        axes.set_xlabel("samples")
    else:
        shares = cells / cells.sum(1, keepdim=True).clamp(min=1)
        heat_map = axes.imshow(shares.numpy(), aspect="auto", interpolation="nearest")
        drawing.colorbar(heat_map, label="share of the client's samples")
        axes.set_xlabel(by)
    subset = (
        f" (the first {len(cells):,} of {data.num_clients:,} clients)"
        if data.num_clients > len(cells)
        else ""
    )
    axes.set_title(f"{data.name}: who holds what{subset}")
    axes.set_ylabel("client")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Without a date, the same data gives the same file.
        drawing.savefig(
            target,
            dpi=120,
            metadata={} if target.suffix == ".png" else {_DATE[target.suffix]: None},
        )
    except OSError as error:
        raise ConfigError(
            f"the figure {target} was asked for; it cannot be written: {error.strerror}."
        ) from error
    return target


_DATE = {".svg": "Date", ".pdf": "CreationDate"}


def _stack(axes: Axes, counts: Tensor, names: list[str]) -> None:
    from matplotlib import colormaps

    colors: Any = colormaps["tab20"]
    starts, rows = torch.zeros(len(counts)), range(len(counts))
    for group, name in enumerate(names):
        sizes = counts[:, group]
        axes.barh(
            rows, sizes.tolist(), left=starts.tolist(), height=0.9, color=colors(group), label=name
        )
        starts = starts + sizes
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")


def _codes(data: FederatedData, by: By) -> tuple[Tensor, int]:
    """Return the class or domain of each training sample, and the number of classes or domains.

    Raises:
        DataError: Targets are not classes, or samples have no domains.
    """
    if by == "class":
        if not data.has_classes:
            raise DataError(
                f"{data.name} was asked for by class; its targets are not classes "
                f"({data.targets.dtype}). Data with domains can be drawn by domain."
            )
        return data.targets.cpu(), data.num_classes
    if data.domains is None:
        raise DataError(
            f"{data.name} does not have the domain of each sample; it can be drawn by class."
        )
    return data.domains, int(data.domains.max()) + 1


def _names(data: FederatedData, by: By) -> list[str]:
    names = data.class_names if by == "class" else data.domain_names
    return [
        names[group] if group < len(names) else str(group) for group in range(_codes(data, by)[1])
    ]


def _joined(counts: Tensor, max_columns: int) -> Tensor:
    """Sum neighbouring columns in sets of equal size, so that at most `max_columns` remain.

    Args:
        counts: (client, group) Number of samples of each class or domain.
        max_columns: Largest number of columns. At or above the number of groups it has no effect.

    Returns:
        (client, column) The sums. The last one may be of fewer groups.
    """
    width = -(-counts.shape[1] // max_columns)
    pad = -counts.shape[1] % width
    return torch.nn.functional.pad(counts, (0, pad)).reshape(len(counts), -1, width).sum(2)


def _legend(data: FederatedData, by: By, shown: Tensor) -> str:
    """Return a text such as "10 classes (0, 1, …)" that explains the columns of the text plot.

    If columns were joined, it says how many groups a column has. Long lists of names are
    shortened to the first and the last one.

    Args:
        data: Partitioned data.
        by: "class" or "domain".
        shown: (client, column) Counts that are plotted.
    """
    groups = _codes(data, by)[1]
    nouns = {"class": "classes", "domain": "domains"}
    if groups > shown.shape[1]:
        return f"{groups:,} {nouns[by]}, {-(-groups // shown.shape[1])} a column"
    names = _names(data, by)
    short = ", ".join(names) if len(", ".join(names)) <= 60 else f"{names[0]} … {names[-1]}"
    return f"{groups} {nouns[by]} ({short})"
