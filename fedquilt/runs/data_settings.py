"""Settings of data: a data set, file or folder by its name, and its partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from typing_extensions import override

from fedquilt.checks import within
from fedquilt.config.choice import Choice
from fedquilt.config.schema import label
from fedquilt.data import Domains, FederatedData, Natural, Partition, Pool, source
from fedquilt.errors import ConfigError
from fedquilt.names import find, is_reference

DEFAULT_CLIENTS = 20  # Number of clients if neither the settings nor the data define it


@dataclass(frozen=True)
class Source(Choice):
    """Data by the name of a data set, file or folder, with its options and its partition."""

    # How samples are divided among clients. None: by the clients that the data names, else evenly
    partition: Partition | None = None
    partition_seed: int | None = None  # Random seed of the partition. None: that of the run
    # Share of every client's training samples that is held back for validation. 0: none
    validation: float = 0.0
    # Bytes that files of data or initial weights may take in memory. 0: half of the free memory
    max_bytes: int = 0

    noun: ClassVar[str] = "data set"
    offers: ClassVar[frozenset[str]] = frozenset({"max_bytes"})

    @classmethod
    @override
    def find(cls, name: str) -> Callable[..., Any]:
        factory: Callable[..., Any] = (
            find({}, name, cls.noun) if is_reference(name) else source(name)
        )
        return factory

    def __post_init__(self) -> None:
        within(self, validation="[0, 1)", max_bytes="[0, inf)")
        if self.partition_seed is not None:
            within(self, partition_seed="[0, 9223372036854775807]")

    def federate(
        self, num_clients: int | None, seed: int
    ) -> tuple[FederatedData, Partition | None]:
        """Load the data and partition it among clients.

        Validation samples are held back afterwards, from the part of each client.

        Args:
            num_clients: Number of clients. None: that of the data, or `DEFAULT_CLIENTS`.
            seed: Random seed of the partition, unless `partition_seed` is set.

        Returns:
            The data, and its partition. The partition is None if a user's function has already made
            it.
        """
        data, partition = self._partitioned(num_clients, seed)
        return data.with_validation(self.validation), partition

    def _partitioned(
        self, num_clients: int | None, seed: int
    ) -> tuple[FederatedData, Partition | None]:
        """Load the data and partition it, unless a user's function has done so.

        Args:
            num_clients: Number of clients. None or 0: that of the data, or `DEFAULT_CLIENTS`.
            seed: Random seed of the partition, unless `partition_seed` is set.

        Returns:
            The data without validation samples, and its partition. The partition is None if the
            user's function returned partitioned data.

        Raises:
            ConfigError: A partition is set, and the data is partitioned already.
        """
        pool = self.make(Pool, {"max_bytes": self.max_bytes})
        if isinstance(pool, FederatedData):
            if self.partition is not None:
                raise ConfigError(
                    f"data.partition = {label(type(self.partition))!r} was asked for; {self.name} "
                    "returned data that is partitioned already. Return a Pool to let it be "
                    "partitioned."
                )
            return pool, None
        partition = self.partition or pool.usual
        # These partitions define the number of clients.
        has_own_clients = isinstance(partition, (Natural, Domains))
        seed = seed if self.partition_seed is None else self.partition_seed
        if not num_clients and not has_own_clients:
            num_clients = DEFAULT_CLIENTS
        return pool.partition(num_clients or None, partition, seed), partition
