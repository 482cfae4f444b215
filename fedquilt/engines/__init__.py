"""How a cohort is trained: one client after another, stacked, or on the workers of a cluster."""

from fedquilt.engines.engine import Engine, Outcome
from fedquilt.engines.ray import Ray
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.vectorised import Vectorised

ENGINES: dict[str, type[Engine]] = {"sequential": Sequential, "vectorised": Vectorised, "ray": Ray}

__all__ = ["ENGINES", "Engine", "Outcome", "Ray", "Sequential", "Vectorised"]
