"""Parcels: values on their way to another process, where what that process has is named instead of sent.

A partial fold holds the family's cutter and the server's weights besides its sums; only the sums travel. Tensors go
beside the pickle as plain arrays, which Ray's object store hands out without copying, and arrive in memory of their
own, because the last bits of a product depend on alignment.
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


@dataclass(frozen=True)
class Parcel:
    """A packed value: all but its tensors, and those."""

    rest: bytes
    tensors: list[np.ndarray] = field(default_factory=list)


def pack(value: Any, known: Mapping[str, object]) -> Parcel:
    """Pack a value; objects in it that the other side knows go by their name."""
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")
    for module in own_modules():
        cloudpickle.register_pickle_by_value(module)
    file = io.BytesIO()
    packer = _packer()(file)
    packer.names = {id(one): name for name, one in known.items()}
    packer.tensors, packer.places = [], {}
    packer.dump(value)
    return Parcel(file.getvalue(), packer.tensors)


def unpack(parcel: Parcel, known: Mapping[str, object], device: torch.device) -> Any:
    """What was packed. What was on a GPU there is on this side's own device."""
    return _Unpacker(parcel, known, device).load()


@cache
def _packer() -> type[Any]:
    cloudpickle: Any = importlib.import_module("ray.cloudpickle")

    class Packer(cloudpickle.CloudPickler):  # type: ignore[misc]  # Ray is imported when it is asked for
        names: dict[int, str]
        tensors: list[np.ndarray]
        places: dict[
            int, tuple[Tensor, int]
        ]  # the tensors are kept: else their ids could be another's

        def persistent_id(self, value: Any) -> Any:
            if id(value) in self.names:
                return self.names[id(value)]
            if type(value) is not Tensor or value.requires_grad or value.layout != torch.strided:
                return None
            if id(value) not in self.places:
                self.places[id(value)] = value, len(self.tensors)
                self.tensors.append(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            return self.places[id(value)][1], value.dtype, tuple(value.shape), value.is_cpu

    return Packer


class _Unpacker(pickle.Unpickler):
    def __init__(self, parcel: Parcel, known: Mapping[str, object], device: torch.device) -> None:
        super().__init__(io.BytesIO(parcel.rest))
        self._parcel, self._known, self._device = parcel, known, device
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, name: Any) -> Any:
        if isinstance(name, str):
            return self._known[name]
        place, dtype, shape, on_cpu = name
        if place not in self._made:
            made = torch.empty(shape, dtype=dtype)
            np.copyto(made.reshape(-1).view(torch.uint8).numpy(), self._parcel.tensors[place])
            self._made[place] = made if on_cpu else made.to(self._device)
        return self._made[place]
