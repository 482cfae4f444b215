"""What tracing finds out about a module, as plain values that can be written to JSON and read on another machine."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fedquilt.axes import Axis, Dims, Expr, Positions, parse, positions_of, size_of, write


@dataclass(frozen=True)
class Layout:
    """The axes of a module and where each of its weights carries them."""

    axes: Mapping[str, Axis]
    dims: Mapping[str, Dims]  # every parameter and buffer, by its first name: its dimensions as expressions of axes
    ties: Mapping[str, str] = field(default_factory=dict)  # a tied weight's other names → its first name
    attributes: Mapping[str, Expr] = field(default_factory=dict)  # "blocks.0.attn.head_dim" → the size it holds
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # "norm", and the user's own → weight names
    class_dim: int = 1  # which dimension of the output are the classes
    notes: tuple[str, ...] = ()  # what tracing pinned or assumed, for the log

    @property
    def sizes(self) -> dict[str, int]:
        return {name: axis.size for name, axis in self.axes.items()}

    def shape(self, name: str, widths: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of one weight when the axes have these widths."""
        return tuple(size_of(dim, widths) for dim in self.dims[name])

    def positions(self, name: str, index: Mapping[str, Positions]) -> tuple[Positions, ...]:
        """The rows of each dimension of one weight that a cut keeps."""
        sizes = self.sizes
        return tuple(positions_of(dim, index, sizes) for dim in self.dims[name])

    def to_json(self) -> str:
        return json.dumps(
            {
                "axes": [asdict(axis) for axis in self.axes.values()],
                "dims": {name: write(dims) for name, dims in self.dims.items()},
                "ties": dict(self.ties),
                "attributes": {name: write((expr,)) for name, expr in self.attributes.items()},
                "parts": {name: list(weights) for name, weights in self.parts.items()},
                "class_dim": self.class_dim,
                "notes": list(self.notes),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Layout:
        raw: dict[str, Any] = json.loads(text)
        axes = [Axis(**{**axis, "inner": tuple(axis["inner"])}) for axis in raw["axes"]]
        return Layout(
            axes={axis.name: axis for axis in axes},
            dims={name: parse(dims) for name, dims in raw["dims"].items()},
            ties=raw["ties"],
            attributes={name: parse(expr)[0] for name, expr in raw["attributes"].items()},
            parts={name: tuple(weights) for name, weights in raw["parts"].items()},
            class_dim=raw["class_dim"],
            notes=tuple(raw["notes"]),
        )

    @property
    def fingerprint(self) -> str:
        """Return a hash of the axes, by which a server and a device, or a run that resumes, compare them.

        Notes are left out, because they name lines of the user's files.
        """
        return hashlib.sha256(replace(self, notes=()).to_json().encode()).hexdigest()[:16]
