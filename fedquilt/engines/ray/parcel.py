"""Parcels: values that are sent to another process.

Objects that the other process already has are sent by name. For example, a partial fold holds the
family's cutter and the server's weights besides its sums, but only the sums are sent.

Tensors are sent beside the pickle as plain arrays, which Ray's object store shares without copying.
They are copied into new memory on arrival, because the last bits of a product depend on alignment.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedquilt.names import own_modules
from fedquilt.round.federation import Federation
from fedquilt.terms import Server


@dataclass(frozen=True)
class Parcel:
    """Packed value: a pickle without tensors, and the tensors as arrays."""

    pickled: bytes  # Pickle of the value without its tensors
    tensors: list[np.ndarray] = field(default_factory=list)  # Bytes of each tensor


def pack(value: Any, shared: Mapping[str, object]) -> Parcel:
    """Pack a value for another process.

    Modules of the user are packed by value, so that the other process need not have them.

    Args:
        value: Value to pack.
        shared: Objects that the other process has, by name. They are sent as their names.
    """
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    for module in own_modules():
        cloudpickle.register_pickle_by_value(module)
    file = io.BytesIO()
    packer = _packer()(file)
    packer.names = {id(shared_object): name for name, shared_object in shared.items()}
    packer.tensors, packer.numbers_by_id = [], {}
    packer.dump(value)
    return Parcel(file.getvalue(), packer.tensors)


def unpack(parcel: Parcel, shared: Mapping[str, object], device: torch.device) -> Any:
    """Return the value that was packed into a parcel.

    Args:
        parcel: Packed value.
        shared: Objects of this process by the names that were used in `pack`.
        device: Device for tensors that were on a GPU. Tensors of a CPU stay on the CPU.
    """
    return _Unpacker(parcel, shared, device).load()


@cache
def _packer() -> type[Any]:
    """Return the class of the pickler, which is a subclass of a class of Ray."""
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    # The base class has no type, because Ray is imported only when it is asked for.
    class Packer(cloudpickle.CloudPickler):  # type: ignore[misc]
        names: dict[int, str]
        tensors: list[np.ndarray]
        # Tensors and their numbers by id. Tensors are kept alive, so that no id is reused.
        numbers_by_id: dict[int, tuple[Tensor, int]]

        def persistent_id(self, value: Any) -> Any:
            if id(value) in self.names:
                return self.names[id(value)]
            if type(value) is not Tensor or value.requires_grad or value.layout != torch.strided:
                return None
            if id(value) not in self.numbers_by_id:
                self.numbers_by_id[id(value)] = value, len(self.tensors)
                self.tensors.append(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            return self.numbers_by_id[id(value)][1], value.dtype, tuple(value.shape), value.is_cpu

    return Packer


class _Unpacker(pickle.Unpickler):
    """Unpickler that resolves the names of shared objects and the numbers of tensors."""

    def __init__(self, parcel: Parcel, shared: Mapping[str, object], device: torch.device) -> None:
        super().__init__(io.BytesIO(parcel.pickled))
        self._parcel, self._shared, self._device = parcel, shared, device
        self._tensors: dict[int, Tensor] = {}

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, str):
            return self._shared[name]
        number, dtype, shape, on_cpu = name
        if number not in self._tensors:
            tensor = torch.empty(shape, dtype=dtype)
            np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), self._parcel.tensors[number])
            self._tensors[number] = tensor if on_cpu else tensor.to(self._device)
        return self._tensors[number]


def shared_objects(federation: Federation) -> dict[str, object]:
    """Return the objects that both the driver and the workers have, by name.

    They are the federation and its parts. `pack` and `unpack` replace them by their names.
    """
    world, family = federation.world, federation.world.family
    return {
        "federation": federation,
        "method": federation.method,
        "world": world,
        "family": family,
        "cutter": family.cutter,
        "layout": family.layout,
    }


def round_objects(federation: Federation, server: Server) -> dict[str, object]:
    """Return objects that both sides have once a round has begun, by name.

    They include the server's weights, so that a fold which holds them does not send them back.
    """
    weights = {f"weight {name}": value for name, value in server.weights.items()}
    for slot, values in server.slots.items():
        weights |= {f"slot {slot} {name}": value for name, value in values.items()}
    return {**shared_objects(federation), "server": server, **weights}
