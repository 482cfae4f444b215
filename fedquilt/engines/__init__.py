"""Engines, which train a cohort one by one, stacked, or on the workers of a cluster."""

from fedquilt.engines.ray.engine import Ray
from fedquilt.engines.sequential import Sequential
from fedquilt.engines.simulation import Simulation
from fedquilt.engines.vectorized.engine import Vectorized

ENGINES: dict[str, type[Simulation]] = {
    "sequential": Sequential,
    "vectorized": Vectorized,
    "ray": Ray,
}

__all__ = ["ENGINES", "Ray", "Sequential", "Simulation", "Vectorized"]
