"""Samples that are partitioned among clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.data.convert import (
    IGNORED,
    Samples,
)
from fedquilt.data.parts import Array, Parts
from fedquilt.data.pool import Pool
from fedquilt.display import Overview
from fedquilt.errors import ConfigError, DataError


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData(Pool):
    """Training samples that are partitioned among clients, and test samples.

    `Pool.partition` makes it, or `FederatedData.of` if you know the samples of each client. It has
    the attributes of `Pool` too.

    Attributes:
        parts: Positions of each client's training samples.
        test_parts: Positions of each client's own test samples, which may be empty. None: no
            client has any.
        validation_parts: Positions of the training samples that each client holds back for
            validation. None: clients hold back nothing.

    Example:
        >>> import torch
        >>> import fedquilt as fq
        >>> inputs, targets = torch.zeros(6, 4), torch.tensor([0, 1, 0, 1, 0, 1])
        >>> data = fq.FederatedData.of((inputs, targets), (inputs, targets), [[0, 1, 2, 3], [4, 5]])
        >>> data.num_clients, data.size(0)
        (2, 4)
    """

    parts: Parts
    test_parts: Parts | None = None
    validation_parts: Parts | None = None

    @staticmethod
    def of(  # type: ignore[override]  # a pool needs no parts
        train: Samples,
        test: Samples,
        parts: Sequence[Sequence[int] | Array],
        test_parts: Sequence[Sequence[int] | Array] | None = None,
        name: str = "data",
    ) -> FederatedData:
        """Check arrays or tensors, and return them with the positions of each client's samples.

        Args:
            train: (inputs, targets), or a torch Dataset of such pairs.
            test: The same for the test set. It is required here.
            parts: Positions of each client's training samples, or a boolean mask for each client.
            test_parts: The same for test samples. None: clients have no test samples of their own.
            name: Name of the data for tables and messages.
        """
        if test is None:  # Holding out a fifth would change which samples are at the positions.
            raise DataError(
                f"{name}: parts were given and no test set. Give (inputs, targets) to test on; or "
                "say whose each sample is, Pool.of(train, clients=owners).partition(), and a "
                "fifth of every client's is held out."
            )
        return Pool.of(train, test, name=name).with_parts(parts, test_parts)

    def __repr__(self) -> str:
        validation = ""
        if self.validation_parts is not None:
            validation = (
                f", which hold back {len(self.validation_parts.order):,} training samples "
                "for validation"
            )
        clients = f"partitioned among {self.num_clients:,} clients{validation}"
        return f"FederatedData({self._description()}; {clients})"

    @override
    def _overview(self) -> Overview:
        from fedquilt.data.overview import federated_overview  # It imports this module.

        return federated_overview(self, self._description())

    @property
    @override
    def is_partitioned(self) -> bool:
        return True

    @override
    def with_domains(self, names: Sequence[str]) -> Self:
        raise DataError(
            f"domains {', '.join(names)} were asked for; {self.name} is partitioned already, so "
            "that its parts would name other samples. Choose domains before."
        )

    @property
    def num_clients(self) -> int:
        """Return the number of clients."""
        return len(self.parts)

    def size(self, client: int) -> int:
        """Return the number of a client's training samples, without validation samples."""
        return len(self.parts[client])

    def among(self, count: int) -> Self:
        """Return the data of the first `count` clients alone. Nothing is partitioned again.

        Samples of other clients stay in the arrays, unused. The common test set stays whole.

        Args:
            count: Number of clients. At or above `num_clients` it has no effect.
        """
        if count >= self.num_clients:
            return self
        tests = None if self.test_parts is None else self.test_parts.first(count)
        validation = None if self.validation_parts is None else self.validation_parts.first(count)
        return replace(
            self, parts=self.parts.first(count), test_parts=tests, validation_parts=validation
        )

    def with_validation(self, share: float) -> Self:
        """Return the data with a share of every client's training samples held back for validation.

        Clients do not train on these samples, and norms are not measured on them. A client with two
        or more samples holds back at least one and trains on at least one. A client with a single
        sample trains on it and holds back nothing. The draw does not
        depend on the seed of a run, so that all settings of a grid are compared on equal samples.

        Args:
            share: Share in [0, 1). 0 changes nothing.

        Raises:
            ConfigError: The share is outside of [0, 1).
            DataError: Samples are held back already, no client has two samples, or a sample is
                listed twice, so that it could be trained on although it is held back.
        """
        request = f"validation = {share} was asked for"
        if not 0 <= share < 1:
            raise ConfigError(
                f"{request}; it is a share of every client's training samples, in [0, 1)."
            )
        if share == 0:
            return self
        if self.validation_parts is not None:
            count = len(self.validation_parts.order)
            raise DataError(
                f"{request}; clients of {self.name} hold back {count:,} samples already. 0 keeps "
                "those."
            )
        sizes = self.parts.sizes
        if int(sizes.max()) < 2:
            raise DataError(
                f"{request}; every client of {self.name} has a single sample, which it needs for "
                "training. Fewer clients have more samples each."
            )
        self._check_unshared(request)
        rounded = (sizes.double() * share).round().long()
        counts = rounded.clamp(min=1).minimum(sizes - 1)
        validation, training = self.parts.divided(
            counts, noise.key(noise.NO_SEED, noise.Stream.VALIDATION_SPLIT)
        )
        held_back = replace(self, parts=training, validation_parts=validation)
        return held_back.remembering(self.origin and self.origin.with_validation(share))

    def _check_unshared(self, request: str) -> None:
        """Refuse training parts that list a sample twice, for one client or for two.

        Args:
            request: Beginning of the message, which says what the user asked for.

        Raises:
            DataError: A sample is listed twice.
        """
        ordered = self.parts.order.sort().values
        shared = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(shared):
            owners = self.parts.owners[self.parts.order == shared[0]].tolist()
            raise DataError(
                f"{request}; sample {int(shared[0])} of {self.name} is listed twice, for clients "
                f"{owners[0]} and {owners[1]}. It could be trained on and held back. Give every "
                "sample to one client, and once."
            )

    def on_validation(self) -> Self:
        """Return the same data with the pooled validation samples in place of the test set.

        Each client's test part is the samples that it holds back. So every evaluation is on
        validation samples, and the test set is not in the result. Training samples stay. Repeated
        calls return the same object, so that engines recognise samples that they already hold.

        Raises:
            ConfigError: Clients hold back nothing.
        """
        return self._on_validation

    @cached_property
    def _on_validation(self) -> Self:
        if self.validation_parts is None:
            raise ConfigError(
                'validation samples were asked for (evaluation.on = "validation"); clients of '
                f"{self.name} hold back none. data.validation = 0.1 in a file, "
                "data.with_validation(0.1) in Python, holds back a tenth of every client's "
                "training samples."
            )
        # Validation samples keep the order of the training set (by domain, or mixed), because a
        # test set usually has the same order.
        rows, ranked = self.validation_parts.order.sort(stable=True)
        positions = torch.empty_like(ranked)
        positions[ranked] = torch.arange(len(ranked))

        def at_rows(values: Tensor) -> Tensor:
            return values[rows.to(values.device)]

        return replace(
            self,
            test_inputs=at_rows(self.inputs),
            test_targets=at_rows(self.targets),
            test_clients=None if self.clients is None else at_rows(self.clients),
            test_domains=None if self.domains is None else at_rows(self.domains),
            test_parts=Parts(positions, self.validation_parts.offsets),
        )

    def classes_present(self, client: int, num_classes: int) -> Tensor:
        """Return a mask of the classes that occur among a client's training samples.

        Args:
            client: Number of the client.
            num_classes: Length of the result. Targets at or above it, and below 0, are left out.

        Returns:
            (class,) True where the client has samples of the class.

        Raises:
            DataError: Targets are not classes.
        """
        if not self.has_classes:
            raise DataError(
                f"{self.name} was asked which classes client {client} holds; it has "
                f"{self._target_description()}. Masked losses and class rows need one class for "
                "each target, as whole numbers."
            )
        targets = self.targets[self.parts[client].to(self.targets.device)]
        mask = torch.zeros(num_classes, dtype=torch.bool, device=targets.device)
        # Targets at or above num_classes, such as 255, are ignored. The task has checked that
        # no others are out of range.
        present = targets[(targets >= 0) & (targets < num_classes)]
        return mask.index_fill_(0, present, True)

    def flaw(self, client: int) -> str:
        """Return a sentence on why no model can learn from a client's training samples.

        The reasons are inputs that are not finite, and targets that are all ignored (−100). The
        result is empty if there is no such reason. It is called after the training of the client
        has failed.
        """
        rows = self.parts[client].to(self.targets.device)
        if bad := int((~self.inputs[rows].isfinite()).reshape(len(rows), -1).any(1).sum()):
            return f"{bad} of its {len(rows)} samples hold values that are not finite"
        counted = bool((self.targets[rows] != IGNORED).any())
        return "" if counted else f"It has no target that counts: all are {IGNORED}"
