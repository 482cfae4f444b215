"""Engines, which train a cohort one by one, stacked, or on the workers of a cluster.

- `sequential.py`: the reference, one client after another
- `vectorized/`: clients of equal shape trained together
- `ray/`: the workers of a Ray cluster
- `simulation.py`: base class of engines that hold the samples of all clients
- `client_inputs.py`: what the training of a client starts from
- `data_checks.py`: checks that data fits the model, the task and the method
- `samples.py`: evaluations on samples at known positions
- `options.py`: options of engines
"""

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
