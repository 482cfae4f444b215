"""How a cohort is trained: one client after another, stacked, or on the workers of a cluster."""

from fedquilt.engines.ray import Ray
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation
from fedquilt.engines.vectorised import Vectorised

ENGINES: dict[str, type[Simulation]] = {
    "sequential": Sequential,
    "vectorised": Vectorised,
    "ray": Ray,
}

__all__ = ["ENGINES", "Ray", "Sequential", "Simulation", "Vectorised"]
