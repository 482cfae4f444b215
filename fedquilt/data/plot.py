"""Who holds what, drawn: clients × classes (or domains) as blocks for a terminal, or as a figure in a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt.data.federated import FederatedData
from fedquilt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

By = Literal["class", "domain"]

_BLOCKS = " ▁▂▃▄▅▆▇█"
_COLUMNS = 64  # as many groups a line has room for; more are joined
_BAR = 24
_STACKED = 20  # groups that can be told apart by colour; more become a heat map


def counts(data: FederatedData, by: By = "class", clients: int | None = None) -> Tensor:
    """(client, group) how many samples of each class or domain the first clients hold."""
    parts = data.parts
    first = len(parts) if clients is None else min(clients, len(parts))
    rows = parts.order[: int(parts.offsets[first])]
    owners = torch.repeat_interleave(torch.arange(first), parts.sizes[:first])
    codes, groups = _codes(data, by)
    own = codes[rows].reshape(
        len(rows), -1
    )  # a target may be a sequence; each of its entries counts
    held = (owners[:, None] * groups + own)[own >= 0]
    return torch.bincount(held, minlength=first * groups).reshape(first, groups)


def blocks(data: FederatedData, by: By = "class", clients: int = 20) -> str:
    """Text: a line a client, with its size and a column a group, as tall as the group's share of the client's samples.

    Of many clients the first are drawn, and the sizes of all are summed up.
    """
    shown = _joined(counts(data, by, clients), _COLUMNS)
    sizes = data.parts.sizes
    shares = shown / shown.sum(1, keepdim=True).clamp(min=1)
    heights = (shares / shares.max().clamp(min=1e-9) * (len(_BLOCKS) - 1)).ceil().long()
    label, number = len(str(len(shown) - 1)), len(f"{int(sizes.max()):,}")
    lines = [
        f"{data.name}: {data.num_clients:,} clients, {int(sizes.sum()):,} samples, {_legend(data, by, shown)}"
    ]
    for client, row in enumerate(heights.tolist()):
        size = int(sizes[client])
        bar = "█" * max(1, round(_BAR * size / int(sizes[: len(shown)].max())))
        drawn = "".join(_BLOCKS[height] for height in row)
        lines.append(f"{client:>{label}}  {size:>{number},}  {drawn}  {bar}")
    if data.num_clients > len(shown):
        low, middle, high = (int(size) for size in (sizes.min(), sizes.median(), sizes.max()))
        lines.append(
            f"… and {data.num_clients - len(shown):,} more; samples a client: {low} to {high}, median {middle}"
        )
    return "\n".join(lines)


def figure(data: FederatedData, path: str | Path, by: By = "class", clients: int = 100) -> Path:
    """A figure of the first clients, written as PNG, SVG or PDF by the name's ending: stacked bars, or a heat map."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a figure needs matplotlib: pip install 'fedquilt[plot]'.") from error
    target = Path(path)
    if target.suffix not in (".png", ".svg", ".pdf"):
        raise ConfigError(
            f"a figure {target.name!r} was asked for; a name that ends in .png, .svg or .pdf would fit."
        )
    held = counts(data, by, clients)
    drawing = Figure(figsize=(9, 1.2 + 0.16 * max(10, len(held))), layout="constrained")
    axes = drawing.subplots()
    if held.shape[1] <= _STACKED:
        _stack(axes, held, _names(data, by))
        axes.set_xlabel("samples")
    else:
        shares = held / held.sum(1, keepdim=True).clamp(min=1)
        drawn = axes.imshow(shares.numpy(), aspect="auto", interpolation="nearest")
        drawing.colorbar(drawn, label="share of the client's samples")
        axes.set_xlabel(by)
    more = (
        f" (the first {len(held):,} of {data.num_clients:,} clients)"
        if data.num_clients > len(held)
        else ""
    )
    axes.set_title(f"{data.name}: who holds what{more}")
    axes.set_ylabel("client")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The same data gives the same file: no date, no random ids.
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


def _stack(axes: Axes, held: Tensor, names: list[str]) -> None:
    from matplotlib import colormaps

    colours: Any = colormaps["tab20"]
    left, places = torch.zeros(len(held)), range(len(held))
    for group, name in enumerate(names):
        own = held[:, group]
        axes.barh(
            places, own.tolist(), left=left.tolist(), height=0.9, color=colours(group), label=name
        )
        left = left + own
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize="small")


def _codes(data: FederatedData, by: By) -> tuple[Tensor, int]:
    if by == "class":
        if not data.has_classes:
            raise DataError(
                f"{data.name} was asked for by class; its targets are not classes ({data.targets.dtype}). Data with "
                "domains can be drawn by domain."
            )
        return data.targets.cpu(), data.num_classes
    if data.domains is None:
        raise DataError(
            f"{data.name} does not say where its samples come from; it can be drawn by class."
        )
    return data.domains, int(data.domains.max()) + 1


def _names(data: FederatedData, by: By) -> list[str]:
    known = data.class_names if by == "class" else data.domain_names
    return [
        known[group] if group < len(known) else str(group) for group in range(_codes(data, by)[1])
    ]


def _joined(held: Tensor, most: int) -> Tensor:
    """Neighbouring groups together, until there are few enough."""
    width = -(-held.shape[1] // most)
    pad = -held.shape[1] % width
    return torch.nn.functional.pad(held, (0, pad)).reshape(len(held), -1, width).sum(2)


def _legend(data: FederatedData, by: By, shown: Tensor) -> str:
    groups = _codes(data, by)[1]
    nouns = {"class": "classes", "domain": "domains"}
    if groups > shown.shape[1]:
        return f"{groups:,} {nouns[by]}, {-(-groups // shown.shape[1])} a column"
    names = _names(data, by)
    short = ", ".join(names) if len(", ".join(names)) <= 60 else f"{names[0]} … {names[-1]}"
    return f"{groups} {nouns[by]} ({short})"
