"""Layouts: the results of tracing, as plain values that can be written to JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, ValuesView
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from fedquilt.axes import (
    Axis,
    Dims,
    Expr,
    Positions,
    axes_in,
    parse,
    positions_of,
    renamed,
    size_of,
    write,
)
from fedquilt.checks import whole
from fedquilt.errors import FormatError, SubmodelError
from fedquilt.family.variants import joined, members_of
from fedquilt.storage.tensor_files import MAX_DIMS, bounded_json
from fedquilt.terms import WHOLE, Submodel

CLASS = "class"  # Axis of the classes, which all nets of a union share
MAX_DEPTH = 4  # Levels of nested JSON in a layout
MAX_AXIS_SIZE = 2**24  # Channels of an axis in a layout that was received
MAX_PARENTHESES = 100  # Parentheses in the dimensions of one weight


@dataclass(frozen=True)
class Layout:
    """The axes of a module, and the dimensions of its weights as expressions of axes."""

    axes: Mapping[str, Axis]  # Axes by name
    # Dimensions of every parameter and buffer as expressions of axes, by its first name
    dims: Mapping[str, Dims]
    # First name of a tied weight, by its other names
    ties: Mapping[str, str] = field(default_factory=dict)
    # Size that an attribute holds, by its path, such as "blocks.0.attn.head_dim"
    attributes: Mapping[str, Expr] = field(default_factory=dict)
    # Names of weights by part: "norm", and the user's parts
    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # Names of the weights of each variant. {}: WHOLE is the only one.
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    class_dim: int = 1  # Dimension of the output that has the classes
    notes: tuple[str, ...] = ()  # What tracing pinned or assumed, for the log
    nets: tuple[str, ...] = ()  # Names of a union's nets, the whole model first. (): no union.

    @property
    def sizes(self) -> dict[str, int]:
        """Return the size of every axis in the whole model."""
        return {name: axis.size for name, axis in self.axes.items()}

    def check_positions(self, submodel: Submodel, client: str) -> None:
        """Refuse positions that the axes do not have.

        Args:
            submodel: The member and its positions.
            client: Name of the client, for messages.

        Raises:
            SubmodelError: An axis is unknown, or has other positions than the member needs.
        """
        widths = submodel.arch.sizes
        for name, positions in submodel.index.items():
            axis = self.axes.get(name)
            if axis is None:
                raise SubmodelError(
                    f"{client} was planned positions on axis {name!r}; axes here: "
                    f"{', '.join(widths)}."
                )
            if problem := _describe_problem(positions, axis.size):
                raise SubmodelError(
                    f"{client} was planned {len(positions)} channels {problem} on axis {name!r}, "
                    f"which has {axis.size}. Any {axis.size} distinct positions from 0 fit."
                )
            if not len(positions) or (name in widths and len(positions) != widths[name]):
                raise SubmodelError(
                    f"{client} was planned {len(positions)} channels on axis {name!r}, but its "
                    f"member has {widths.get(name, axis.size)}. Index and member must agree."
                )

    def weights(self, variant: str) -> tuple[str, ...]:
        """Return the names of the weights that a variant has, or several joined variants together.

        They include buffers, and are in the order of `dims`.

        Raises:
            SubmodelError: There is no such variant.
        """
        if not self.variants and variant == WHOLE:
            return tuple(self.dims)
        names: set[str] = set()
        for name in members_of(self.known_as(variant)):
            if name not in self.variants:
                choices = ", ".join(map(repr, self.variants or (WHOLE,)))
                raise SubmodelError(
                    f"the variant {name!r} was asked for; the model was traced with {choices}."
                )
            names.update(self.variants[name])
        return tuple(name for name in self.dims if name in names)

    def known_as(self, variant: str) -> str:
        """Return the name of a variant with the first net of a union called `WHOLE`.

        A caller may have named that net by its own name, also within a joined name. Without a union
        the name is returned as it is.
        """
        if not self.nets:
            return variant
        return joined(*(WHOLE if name == self.nets[0] else name for name in members_of(variant)))

    def net_names(self, variant: str) -> tuple[str, ...]:
        """Return the names of a union's nets that a variant has, which may be a joined one.

        The net called `WHOLE` is returned by its own name. It is for unions only.
        """
        return tuple(self.nets[0] if name == WHOLE else name for name in members_of(variant))

    def axes_at(self, variant: str) -> dict[str, Axis]:
        """Return the axes of a variant's members, by name.

        All variants of a module have all axes. A net of a union has its own, and the class axis.
        """
        if not self.nets:
            return dict(self.axes)
        leads = tuple(f"{net}." for net in self.net_names(self.known_as(variant)))
        return {
            name: axis
            for name, axis in self.axes.items()
            if name == CLASS or name.startswith(leads)
        }

    def restricted(self, variant: str) -> Layout:
        """Return the layout of one variant alone, as if its module had no other variant.

        Weights and axes of one net of a union have the names that they have in the net's own
        module.
        """
        own_names = set(self.weights(variant))
        if self.nets:
            return self._of_net(variant)
        parts = {
            part: tuple(name for name in names if name in own_names)
            for part, names in self.parts.items()
        }
        return replace(
            self,
            dims={name: dims for name, dims in self.dims.items() if name in own_names},
            ties={alias: name for alias, name in self.ties.items() if name in own_names},
            parts={part: names for part, names in parts.items() if names},
            variants={},
        )

    def _of_net(self, variant: str) -> Layout:
        """Return the layout of the net of a union that `variant` names, without the net's prefix.

        Names of weights, axes, attributes and parts are those that the net was traced with.
        """
        (net,) = self.net_names(self.known_as(variant))
        prefix = f"{net}."
        names = {axis: axis.removeprefix(prefix) for axis in self.axes_at(variant)}

        def own(names_of_weights: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                name.removeprefix(prefix) for name in names_of_weights if name.startswith(prefix)
            )

        axes = {
            name: replace(
                self.axes[axis],
                name=name,
                inner=tuple(names[inner_axis] for inner_axis in self.axes[axis].inner),
            )
            for axis, name in names.items()
        }
        carried = {axis for name in self.weights(variant) for axis in self.axes_of(name)}
        parts = {
            part: own(weights) for part, weights in self.parts.items() if part not in self.nets
        }
        return Layout(
            axes={name: axis for name, axis in axes.items() if name != CLASS or CLASS in carried},
            dims={
                name.removeprefix(prefix): renamed(self.dims[name], names)
                for name in self.weights(variant)
            },
            ties={
                own((alias,))[0]: own((name,))[0]
                for alias, name in self.ties.items()
                if alias.startswith(prefix)
            },
            attributes={
                path.removeprefix(prefix): renamed((size,), names)[0]
                for path, size in self.attributes.items()
                if path.startswith(prefix)
            },
            parts={part: weights for part, weights in parts.items() if weights or part == "norm"},
            class_dim=self.class_dim,
            notes=tuple(
                note.removeprefix(f"{net}: ") for note in self.notes if note.startswith(f"{net}: ")
            ),
        )

    def shape(self, name: str, widths: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape of a weight, for axes of these widths. Fixed axes are needed too."""
        return tuple(size_of(dim, widths) for dim in self.dims[name])

    def axes_of(self, name: str) -> frozenset[str]:
        """Return the names of the axes in a weight's dimensions."""
        return frozenset(axis for dim in self.dims[name] for axis in axes_in(dim))

    def positions(self, name: str, index: Mapping[str, Positions]) -> tuple[Positions, ...]:
        """Return the rows of each dimension of a weight that a cut keeps.

        Args:
            name: Name of the weight.
            index: Kept positions by axis. Other axes are kept completely.
        """
        sizes = self.sizes
        return tuple(positions_of(dim, index, sizes) for dim in self.dims[name])

    def to_json(self) -> str:
        """Return the layout as JSON."""
        # A model without variants is written without that key, so that fingerprints from before
        # there were variants stay valid.
        variants = {name: list(weights) for name, weights in self.variants.items()}
        return json.dumps(
            {
                "axes": [asdict(axis) for axis in self.axes.values()],
                "dims": {name: write(dims) for name, dims in self.dims.items()},
                "ties": dict(self.ties),
                "attributes": {name: write((expr,)) for name, expr in self.attributes.items()},
                "parts": {name: list(weights) for name, weights in self.parts.items()},
                **({"variants": variants} if variants else {}),
                **({"nets": list(self.nets)} if self.nets else {}),
                "class_dim": self.class_dim,
                "notes": list(self.notes),
            },
            indent=1,
        )

    @staticmethod
    def from_json(text: str) -> Layout:
        """Return the layout that `to_json` wrote.

        Raises:
            FormatError: The text is not a layout.
        """
        try:
            raw = bounded_json(text.encode(), MAX_DEPTH)
        except UnicodeEncodeError as error:
            raise FormatError("the layout has characters that are no text") from error
        _check_tables(raw)
        axes = [_axis(axis) for axis in raw["axes"]]
        layout = Layout(
            axes={axis.name: axis for axis in axes},
            dims={name: _dims(name, dims) for name, dims in raw["dims"].items()},
            ties=raw["ties"],
            attributes={
                name: _dims(name, expr, count=1)[0] for name, expr in raw["attributes"].items()
            },
            parts={name: tuple(weights) for name, weights in raw["parts"].items()},
            variants={name: tuple(weights) for name, weights in raw.get("variants", {}).items()},
            class_dim=raw["class_dim"],
            notes=tuple(raw["notes"]),
            nets=tuple(raw.get("nets", ())),
        )
        _check_names(layout)
        return layout

    @property
    def fingerprint(self) -> str:
        """Return a hash of the whole layout but its notes, as 16 hexadecimal digits.

        A server and a device compare it, and so does a run that resumes. Notes are left out,
        because they name lines of the user's files.
        """
        return hashlib.sha256(replace(self, notes=()).to_json().encode()).hexdigest()[:16]


# --- layouts from outside -----------------------------------------------------------------------


def _check_tables(raw: Any) -> None:
    """Refuse decoded JSON that does not have the tables and lists of a layout, by a FormatError.

    Keys and types are checked. Axes and dimensions are read later.
    """
    needed = {"axes", "dims", "ties", "attributes", "parts", "class_dim", "notes"}
    if not isinstance(raw, dict) or not needed <= raw.keys() <= needed | {"variants", "nets"}:
        raise FormatError(
            f"the layout does not have {', '.join(sorted(needed))}, and variants and nets at most"
        )
    for key in ("dims", "ties", "attributes"):
        if not isinstance(raw[key], dict) or not _is_texts(raw[key].values()):
            raise FormatError(f"{key} of the layout are no JSON object of strings")
    for key in ("parts", "variants"):
        table = raw.get(key, {})
        if not isinstance(table, dict) or not all(_is_texts(names) for names in table.values()):
            raise FormatError(f"{key} of the layout are no JSON object of lists of names")
    for key in ("notes", "nets"):
        if not _is_texts(raw.get(key, [])):
            raise FormatError(f"{key} of the layout are no list of strings")
    if not isinstance(raw["axes"], list):
        raise FormatError("axes of the layout are no list")
    if not whole(raw["class_dim"]) or raw["class_dim"] > MAX_DIMS:
        raise FormatError(f"class_dim of the layout is no whole number up to {MAX_DIMS}")


def _is_texts(values: object) -> bool:
    """Return True if a value is a list of strings, or the values of a dictionary of strings."""
    return isinstance(values, (list, ValuesView)) and all(
        isinstance(value, str) for value in values
    )


def _axis(raw: Any) -> Axis:
    """Return the axis that decoded JSON describes, or refuse it by a FormatError."""
    keys = {field.name for field in fields(Axis)}
    if not isinstance(raw, dict) or not {"name", "size"} <= raw.keys() <= keys:
        raise FormatError(
            f"an axis of the layout has no name or no size, or more than {', '.join(sorted(keys))}"
        )
    inner = raw.get("inner", [])
    flags = [raw.get("fixed", False), raw.get("coupled", False)]
    if (
        not isinstance(raw["name"], str)
        or not _is_texts(inner)
        or not all(isinstance(flag, bool) for flag in flags)
    ):
        raise FormatError(
            "an axis of the layout has a name, an inner, a fixed or a coupled of another type"
        )
    size, smallest = raw["size"], raw.get("least", 1)
    if not whole(size, 1) or size > MAX_AXIS_SIZE or not whole(smallest, 1) or smallest > size:
        raise FormatError(
            f"the axis {raw['name']!r} of the layout has no size from 1 to {MAX_AXIS_SIZE:,}, or "
            "no least"
        )
    return Axis(**{**raw, "inner": tuple(inner)})


def _dims(name: str, text: str, count: int | None = None) -> Dims:
    """Read the dimensions of a weight, or the size of an attribute.

    Parentheses are counted first, because `parse` recurses into them.

    Args:
        name: Name of the weight or attribute, for messages.
        text: Dimensions as `write` wrote them.
        count: Number of dimensions that is needed. None: any number up to `MAX_DIMS`.

    Raises:
        FormatError: The text is malformed, or has another number of dimensions.
    """
    if text.count("(") > MAX_PARENTHESES:
        raise FormatError(f"the dimensions of {name} have more than {MAX_PARENTHESES} parentheses")
    try:
        dims = parse(text)
    except ValueError as error:
        raise FormatError(f"the dimensions of {name} cannot be read: {error}") from error
    if len(dims) > MAX_DIMS or (count is not None and len(dims) != count):
        raise FormatError(f"{name} has {len(dims)} dimensions")
    return dims


def _check_names(layout: Layout) -> None:
    """Refuse a layout that names axes or weights which it does not list, by a FormatError.

    They may be named by dimensions, attributes, inner axes, ties, parts and variants.
    """
    expressions = [(name, dim) for name, dims in layout.dims.items() for dim in dims]
    for name, expr in (*expressions, *layout.attributes.items()):
        if unknown := [axis for axis in axes_in(expr) if axis not in layout.axes]:
            raise FormatError(f"{name} has the axis {unknown[0]!r}, which the layout does not list")
    inner = [
        (axis.name, name)
        for axis in layout.axes.values()
        for name in axis.inner
        if name not in layout.axes
    ]
    if inner:
        raise FormatError(
            f"the axis {inner[0][0]!r} has the inner axis {inner[0][1]!r}, which the layout does "
            "not list"
        )
    weights = [*layout.ties.values()]
    for names in (*layout.parts.values(), *layout.variants.values()):
        weights += names
    if unknown := [name for name in weights if name not in layout.dims]:
        raise FormatError(
            f"the layout has a tie, part or variant with the weight {unknown[0]!r}, which it does "
            "not list"
        )


def _describe_problem(positions: Positions, size: int) -> str:
    """Describe a repeated position, or one outside of an axis of this size, for a message.

    It is "" if all positions are distinct and inside.
    """
    counts = Counter(positions)
    if not counts or max(counts.values()) == 1:
        outside = [position for position in counts if not 0 <= position < size]
        return f"with position {max(outside, key=abs)}" if outside else ""
    (repeated, times), *_ = counts.most_common(1)
    return f"with position {repeated} {times} times"
