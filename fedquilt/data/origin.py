"""Origin of samples: the function that made a pool, its arguments, and the partition.

A pool from a data source remembers its origin, so that a run's folder can say how to make the same
data again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from fedquilt.data.partitions import Partition
from fedquilt.data.pool import Pool

Arguments = ParamSpec("Arguments")
Made = TypeVar("Made", bound=Pool)


@dataclass(frozen=True)
class Origin:
    """Function and arguments that made samples, and their partition among clients."""

    factory: Callable[..., Pool]  # Function that makes the pool
    options: Mapping[str, Any]  # Arguments of the factory, by name
    partition: Partition | None = None  # None: the samples are as the factory returned them
    # Number of clients of the partition. 0: the samples are as the factory returned them
    num_clients: int = 0
    seed: int = 0  # Seed of the partition
    validation: float = 0.0  # Share of every client's training samples that is held back

    def partitioned(self, partition: Partition, num_clients: int, seed: int) -> Origin:
        """Return a copy of this record that names the partition of the samples among clients.

        No samples are touched. The copy has no validation share.

        Args:
            partition: Kind of partition.
            num_clients: Number of clients.
            seed: Random seed of the partition.
        """
        return replace(
            self, partition=partition, num_clients=num_clients, seed=seed, validation=0.0
        )

    def with_validation(self, share: float) -> Origin:
        """Return a copy of this record that names the share of samples held back for validation.

        No samples are touched.

        Args:
            share: Share of every client's training samples, in [0, 1).
        """
        return replace(self, validation=share)


def remembered(factory: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """Decorate a function that returns a pool, so that the pool remembers how it was made.

    The pool's `origin` then has the decorated function and the arguments of the call, by name.
    Results that are not a `Pool` are returned unchanged.
    """
    signature = inspect.signature(factory)

    @wraps(factory)
    def make(*args: Arguments.args, **options: Arguments.kwargs) -> Made:
        pool = factory(*args, **options)
        if isinstance(pool, Pool):  # Any other result is refused by the caller.
            pool.remembering(Origin(make, signature.bind(*args, **options).arguments))
        return pool

    return make
