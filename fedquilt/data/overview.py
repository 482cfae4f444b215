"""Summary of samples and of their partition, with a picture for notebooks."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from fedquilt.data.plot import By, counts
from fedquilt.display import Overview

if TYPE_CHECKING:
    from torch import Tensor

    from fedquilt.data.federated import FederatedData

_MAX_CLIENTS = 20  # Clients in the picture
_MAX_GROUPS = 64  # Classes or domains of a picture. With more of them there is none.
_CELL = 12  # Pixels of the side of a cell


def federated_overview(data: FederatedData, title: str) -> Overview:
    """Return the number of clients, the range of their samples, and a picture of their classes.

    Args:
        data: Partitioned data.
        title: Line above the table.
    """
    rows = [
        ("clients", f"{data.num_clients:,}"),
        ("training samples of a client", _range(data.parts.sizes)),
    ]
    if data.validation_parts is not None:
        rows.append(("held back for validation", _range(data.validation_parts.sizes)))
    if data.test_parts is not None:
        rows.append(("test samples of a client", _range(data.test_parts.sizes)))
    return Overview(title, rows=rows, picture=_picture(data))


def _range(sizes: Tensor) -> str:
    """Return the smallest, largest and median number of samples as text."""
    low, middle, high = int(sizes.min()), int(sizes.median()), int(sizes.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}, median {middle:,}"


def _picture(data: FederatedData) -> str:
    """Return an SVG with a row for each of the first clients and a column for each class or domain.

    The darker a cell, the larger the group's share of the client's samples. It is empty if targets
    are not classes, or if there are too many of them.
    """
    if data.domains is None and not data.has_classes:
        return ""
    by: By = "class" if data.domains is None else "domain"
    cells = counts(data, by, _MAX_CLIENTS)
    num_clients, num_groups = cells.shape
    if num_groups > _MAX_GROUPS:
        return ""
    shares = (cells / cells.sum(1, keepdim=True).clamp(min=1)).tolist()
    boxes = [
        f'<rect x="{group * _CELL}" y="{client * _CELL}" width="{_CELL - 1}" '
        f'height="{_CELL - 1}" fill="#1f6fb4" fill-opacity="{share:.2f}"/>'
        for client, row in enumerate(shares)
        for group, share in enumerate(row)
        if share
    ]
    width, height = num_groups * _CELL, num_clients * _CELL
    label = f"Samples of the first {num_clients} clients (rows) by {by} (columns)"
    return (
        f'<svg role="img" aria-label="{escape(label)}" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}"><title>{escape(label)}</title>{"".join(boxes)}</svg>'
    )
