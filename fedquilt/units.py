"""Numbers with units: reading them from text, and showing them in tables."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

_FACTORS = {
    "": 1.0,
    "k": 1e3,
    "m": 1e6,
    "g": 1e9,
    "t": 1e12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_QUANTITY = re.compile(r"([0-9.]+(?:e[+-]?[0-9]+)?)\s*([kmgt]?i?)(b?)", re.IGNORECASE)


def quantity(text: str, name: str) -> float | None:
    """Parse a number that may have a unit, such as 2GB, 512 MiB, 76M or 1.5e6.

    The result is None if the text is not such a number.

    Args:
        text: The number as it was written.
        name: Bound of a budget that the number is for. Only `memory` may be in bytes, and a `share`
            has no unit.
    """
    match = _QUANTITY.fullmatch(text.strip())
    if not match:
        return None
    digits, prefix, byte = match[1], match[2].lower(), match[3]
    if prefix not in _FACTORS or (byte and name != "memory") or (prefix and name == "share"):
        return None
    try:
        return float(digits) * _FACTORS[prefix]
    except ValueError:  # Such as 1.2.3
        return None


def how_to_write(name: str) -> str:
    """Return examples of how to write the bound `name` of a budget, for an error message."""
    return {"share": "0.25", "memory": "2GB, 512MiB or 2e9"}.get(name, "76M, 1.5G or 2e6")


def size(count: float) -> str:
    """Return bytes with a decimal unit and three digits, such as `4.02 MB`."""
    value, prefix = _scaled(count)
    return f"{value:.3g} {prefix}B"


def amount(count: float) -> str:
    """Return a count with a decimal suffix and three digits, such as `28M`."""
    value, prefix = _scaled(count)
    return f"{value:.3g}{prefix}"


def sides(size: Sequence[int]) -> str:
    """Return the size of an image or a volume as text, such as `28×28`."""
    return "×".join(map(str, size))


def _scaled(count: float) -> tuple[float, str]:
    leads = ["", "k", "M", "G", "T"]
    count = min(count, sys.float_info.max)  # Records may hold whole numbers beyond all floats.
    while count >= 1000 and len(leads) > 1:
        count /= 1000
        leads.pop(0)
    return count, leads[0]
