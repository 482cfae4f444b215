"""How a cohort is trained: one client after another, or stacked."""

from fedquilt.engines.engine import Engine, Outcome
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised}

__all__ = ["ENGINES", "Engine", "Outcome", "Sequential", "Vectorised"]
