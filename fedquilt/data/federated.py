"""A federated data set: one pool of samples, and who holds which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import DataError

Array = Tensor | np.ndarray


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Training samples held by clients, and test samples for everyone."""

    inputs: Tensor
    targets: Tensor
    parts: Sequence[Tensor]  # the positions of each client's samples
    test_inputs: Tensor
    test_targets: Tensor
    test_parts: Sequence[Tensor] | None = None  # each client's own part of the test set
    num_classes: int = 0
    name: str = "data"

    @staticmethod
    def of(
        train: tuple[Array, Array],
        test: tuple[Array, Array],
        parts: Sequence[Array],
        test_parts: Sequence[Array] | None = None,
        name: str = "data",
    ) -> FederatedData:
        """Check and wrap arrays or tensors: `train` and `test` are (inputs, targets), `parts` positions a client."""
        (x, y), (tx, ty) = (tuple(map(torch.as_tensor, pair)) for pair in (train, test))
        for what, inputs, targets in (("training", x, y), ("test", tx, ty)):
            if len(inputs) != len(targets):
                raise DataError(
                    f"the {what} set has {len(inputs)} inputs and {len(targets)} targets; they must pair up."
                )
            if not len(inputs):
                raise DataError(f"the {what} set is empty; it needs at least one sample.")
            if targets.is_floating_point():
                raise DataError(f"the {what} targets are {targets.dtype}; classes are whole numbers (int64).")
        if x.shape[1:] != tx.shape[1:]:
            raise DataError(f"training inputs have shape {tuple(x.shape[1:])} and test inputs {tuple(tx.shape[1:])}.")
        clients = [torch.as_tensor(part, dtype=torch.int64) for part in parts]
        if not clients:
            raise DataError("no client was given any data: `parts` is empty.")
        for client, part in enumerate(clients):
            if not len(part):
                raise DataError(f"client {client} has no data. Leave it out, or give it at least one sample.")
            if (outside := part[(part < 0) | (part >= len(x))]).numel():
                raise DataError(f"client {client} holds sample {int(outside[0])}; the training set has {len(x)}.")
        own = None if test_parts is None else [torch.as_tensor(part, dtype=torch.int64) for part in test_parts]
        if own is not None and len(own) != len(clients):
            raise DataError(f"there are {len(clients)} clients but test parts for {len(own)}.")
        classes = int(max(y.max(), ty.max())) + 1
        return FederatedData(x, y.long(), clients, tx, ty.long(), own, classes, name)

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    def samples(self, rows: Tensor) -> Tensor:
        return self.inputs[rows]

    def test_samples(self, rows: Tensor) -> Tensor:
        return self.test_inputs[rows]

    def size(self, client: int) -> int:
        return len(self.parts[client])

    def held(self, client: int, num_classes: int) -> Tensor:
        """(class,) True where the client has samples of the class."""
        targets = self.targets[self.parts[client].to(self.targets.device)]
        mask = torch.zeros(num_classes, dtype=torch.bool, device=targets.device)
        return mask.index_fill_(0, targets[targets >= 0].flatten(), True)

    def to(self, device: torch.device, dtype: torch.dtype) -> FederatedData:
        """The pool on another device; samples that are numbers take the dtype, tokens stay whole."""

        def moved(inputs: Tensor) -> Tensor:
            return inputs.to(device, dtype if inputs.is_floating_point() else inputs.dtype)

        return replace(
            self,
            inputs=moved(self.inputs),
            targets=self.targets.to(device),
            test_inputs=moved(self.test_inputs),
            test_targets=self.test_targets.to(device),
        )
