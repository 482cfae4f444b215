"""Numbers with their units, as people read them in tables."""

from __future__ import annotations

from collections.abc import Sequence


def size(count: float) -> str:
    """Return bytes with a decimal unit and three digits: `4.02 MB`."""
    value, lead = _scaled(count)
    return f"{value:.3g} {lead}B"


def amount(count: float) -> str:
    """Return a count with a decimal suffix and three digits: `28M`."""
    value, lead = _scaled(count)
    return f"{value:.3g}{lead}"


def sides(size: Sequence[int]) -> str:
    """Return the size of an image or a volume: `28×28`."""
    return "×".join(map(str, size))


def _scaled(count: float) -> tuple[float, str]:
    leads = ["", "k", "M", "G", "T"]
    while count >= 1000 and len(leads) > 1:
        count /= 1000
        leads.pop(0)
    return count, leads[0]
