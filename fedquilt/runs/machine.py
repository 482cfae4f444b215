"""Settings of the engine, the device and the precision."""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt.checks import outside, refuse
from fedquilt.data import FederatedData
from fedquilt.engines import ENGINES
from fedquilt.engines.options import CHUNKS, EngineOptions
from fedquilt.engines.simulation import Simulation
from fedquilt.hardware.device import device_of
from fedquilt.hardware.precision import Precision, unfit
from fedquilt.names import nearest
from fedquilt.runs.client_states import DEFAULT_LIMIT

AUTO = "auto"  # Name of the fastest engine, which short trials find (`auto.py`)


@dataclass(frozen=True)
class Machine:
    """Options of the engine, the device and the precision."""

    # Name of the engine. "auto": the fastest one on this machine, found by short trials
    name: str = "vectorized"
    device: str = "cpu"  # Device that clients are trained on, as torch names it
    # Precision of training. tf32 and bf16 apply to products, and weights and sums stay fp32
    precision: Precision = "fp32"
    # Bytes that clients trained at the same time may take. 0: 256 MiB, or half of a GPU's free
    # memory
    memory: int = 0
    # Bytes of client states that are kept in memory. Further states are kept on disk
    client_state_memory: int = DEFAULT_LIMIT
    deterministic: bool = False  # Make repeated runs on CUDA bit-identical, which is slower
    threads: int = 0  # CPU threads. 0: one for small models, else torch's default
    # Worker processes of `ray`, each with `threads` threads. 0: one per GPU, or as many as fit the
    # CPUs
    workers: int = 0
    # Address of a Ray cluster. Empty: that of RAY_ADDRESS, else a local one is started for the run
    address: str = ""
    # Chunks into which `ray` divides the jobs of a round. The last digits of results depend on this
    # number, and not on the number of workers
    chunks: int = CHUNKS

    def __post_init__(self) -> None:
        problems = outside(
            self,
            memory="[0, inf)",
            client_state_memory="[0, inf)",
            threads="[0, 1024]",
            workers="[0, inf)",
            chunks="[1, inf)",
        )
        if self.name == "flower":
            problems["name"] = (
                "'flower' was asked for; it trains on real devices, and `fedquilt serve` with the "
                "same settings starts it. In a simulation one of these would work: "
                f"{', '.join((*ENGINES, AUTO))}."
            )
        elif self.name not in (*ENGINES, AUTO):
            engine_names = (*ENGINES, AUTO)
            problems["name"] = (
                f"{self.name!r} was asked for; there is no such "
                f"engine.{nearest(self.name, engine_names)}"
            )
        if why := unfit(self.precision, self.device):
            problems["precision"] = why
        refuse(self, problems)

    def create(self, data: FederatedData) -> Simulation:
        """Return a new engine of the named kind, with those of these options that it takes.

        Args:
            data: Samples of all clients.
        """
        options = EngineOptions(
            device_of(self.device),
            self.precision,
            self.memory,
            self.workers,
            self.address,
            self.chunks,
        )
        return ENGINES[self.name].create(data, options)
