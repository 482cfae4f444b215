"""Partitions: ways to divide a pool of samples among clients, in training and in testing.

Each partition is a frozen dataclass whose fields are its options. The result depends on the pool,
the number of clients and the random seed alone. Every client gets training samples. Where it makes
sense, a client's test samples have the distribution of its training samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.checks import whole, within
from fedquilt.data.parts import Parts
from fedquilt.errors import DataError

if TYPE_CHECKING:
    from fedquilt.data.pool import Pool

# Limit on random shares that are drawn before a partition is given up. It is tried again at least
# 3 and at most 100 times.
_DRAWS = 10_000_000
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Partition:
    """Base class of all partitions."""

    # Fraction of its training samples that each client keeps, at least one sample
    fraction: float = field(default=1.0, kw_only=True)
    # Largest number of training samples that a client keeps. None: no limit
    max_size: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        within(self, fraction="(0, 1]")
        if self.max_size is not None:
            within(self, max_size="[1, inf)")

    def split(
        self, pool: Pool, num_clients: int | None, seed: int = 0
    ) -> tuple[Parts, Parts | None]:
        """Return the positions of each client's training samples and test samples.

        Training parts are then reduced at random to `fraction` and `max_size`, test parts are not.

        Args:
            pool: Samples to divide.
            num_clients: Number of clients. None: as many as the data has of its own.
            seed: Random seed.

        Returns:
            Parts of the training set, and of the test set. None: clients have no test samples.
        """
        if num_clients is not None and not whole(num_clients, 1):
            raise DataError(
                f"{num_clients!r} clients were asked for; {pool.name} can be partitioned among a "
                "whole number of them, one or more."
            )
        parts, test_parts = self._divide(pool, num_clients, seed)
        return parts.thinned(
            self.fraction, noise.key(seed, noise.Stream.THINNING), self.max_size
        ), test_parts

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        """Return training and test parts, before `fraction` and `max_size` reduce the former.

        A subclass overrides this or `split`. Arguments and result are those of `split`.
        """
        raise DataError(
            f"{pool.name} was to be partitioned by {type(self).__name__}; it does not say how. A "
            "method `split` that returns training and test parts would work."
        )

    def _number(self, pool: Pool, num_clients: int | None) -> int:
        """Return `num_clients`. None, or more clients than training samples, is a DataError."""
        if num_clients is None:
            raise DataError(
                f"{type(self).__name__} partitions {pool.name} among a number of clients; none "
                "was asked for."
            )
        if num_clients > len(pool.targets):
            raise DataError(
                f"{num_clients} clients were asked for; {pool.name} has {len(pool.targets)} "
                "samples, which can serve that many at most."
            )
        return num_clients

    def _labels(self, pool: Pool) -> tuple[Tensor, Tensor]:
        """Return the class of each training sample and of each test sample, both (sample,).

        Raises:
            DataError: Targets are not one class per sample.
        """
        if not pool.has_classes or pool.targets.dim() > 1:
            kind = str(pool.targets.dtype).removeprefix("torch.")
            raise DataError(
                f"{type(self).__name__} partitions by class; a target of {pool.name} has shape "
                f"{tuple(pool.targets.shape[1:])} and is {kind}. It needs one class for each "
                "sample, as a whole number. Iid, Quantity, Natural and Domains do without classes."
            )
        return pool.targets, pool.test_targets


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle samples and divide them into parts whose sizes differ by at most one sample."""

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients = self._number(pool, num_clients)
        counts = len(pool.targets), len(pool.test_targets)
        parts, test_parts = (
            Parts.split(
                noise.order(noise.key(seed, noise.Stream.SAMPLE_ORDER), count),
                _evenly(count, clients),
            )
            for count in counts
        )
        return parts, test_parts


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Divide each class in random proportions from a Dirichlet distribution with `alpha`.

    This is the partition of Yurochkin et al. (2019) and Hsu et al. (2019). Proportions are drawn
    again until every client has `min_size` samples.

    With `equal`, all clients have the same number of samples, as in the federated CIFAR-100 of
    Reddi et al. (2021). Every client draws its proportions of classes from Dirichlet(alpha).
    Clients take their samples in random order. When a class runs out, the other classes replace it
    in a client's proportions. The last clients therefore depend on the samples that are left.
    """

    alpha: float = 0.5  # Concentration. Small values give each class to few clients
    # Smallest number of samples of a client. Batch norm cannot train on a single sample. With
    # `equal` it has no effect
    min_size: int = 2
    equal: bool = False  # Give all clients the same number of samples. A remainder is left out

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, alpha="(0, inf)", min_size="[1, inf)")

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients, (labels, test_labels) = self._number(pool, num_clients), self._labels(pool)
        parts = (
            self._equal(labels, clients, seed)
            if self.equal
            else self._by_class(pool, labels, clients, seed)
        )
        return parts, _alike(parts, labels, test_labels, seed)

    def _by_class(self, pool: Pool, labels: Tensor, clients: int, seed: int) -> Parts:
        classes = list(_mixed(labels, seed))
        order = torch.cat([samples for _, samples in classes])
        best, attempts = -1, max(3, min(100, _DRAWS // (clients * len(classes))))
        for attempt in range(attempts):
            owner = []
            for label, samples in classes:
                shares = noise.dirichlet(
                    torch.tensor(noise.key(seed, noise.Stream.DIRICHLET_CLIENTS, attempt, label)),
                    clients,
                    self.alpha,
                )
                owner.append(_owners(shares.cumsum(0), len(samples)))
            parts = Parts.owned(torch.cat(owner), clients, order)
            if (smallest := int(parts.sizes.min())) >= self.min_size:
                return parts
            best = max(best, smallest)
        raise DataError(
            f"Dirichlet(alpha={self.alpha}) was asked to partition {pool.name} among {clients} "
            f"clients with at least {self.min_size} samples each; in {attempts} draws the poorest "
            f"had {best} at best. A larger alpha, fewer clients or a smaller min_size would fit. "
            "With equal = true all have the same number."
        )

    def _equal(self, labels: Tensor, clients: int, seed: int) -> Parts:
        """Return training parts of equal size, with random proportions of classes for each client.

        `labels` has the class of each sample. In a random order, clients take samples that no other
        client has. The remainder of samples / clients is assigned to nobody.
        """
        classes = [samples for _, samples in _mixed(labels, seed)]
        available = torch.tensor([len(samples) for samples in classes])
        remaining = available
        size = int(available.sum()) // clients
        parts = [_NONE] * clients
        for client in noise.order(noise.key(seed, noise.Stream.DIRICHLET_ORDER), clients).tolist():
            shares = noise.dirichlet(
                torch.tensor(noise.key(seed, noise.Stream.DIRICHLET_CLASSES, client)),
                len(classes),
                self.alpha,
            )
            counts = _filled(shares, size, remaining)
            firsts = available - remaining
            pieces = [
                samples[first : first + count]
                for samples, first, count in zip(
                    classes, firsts.tolist(), counts.tolist(), strict=True
                )
            ]
            parts[client] = torch.cat(pieces)
            remaining = remaining - counts
        return Parts.split(torch.cat(parts), torch.full((clients,), size))


@dataclass(frozen=True)
class Labels(Partition):
    """Give each client samples of `labels` classes, in training and in testing (HeteroFL).

    Each class is cut into equal shards, one for each client that holds the class.
    """

    labels: int = 2  # Number of classes of each client

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, labels="[1, inf)")

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients, (labels, test_labels) = self._number(pool, num_clients), self._labels(pool)
        classes = torch.bincount(labels[labels >= 0]).nonzero().flatten()  # Classes with samples.
        if self.labels > len(classes):
            raise DataError(
                f"{self.labels} labels a client were asked for; {pool.name} has {len(classes)} "
                "classes."
            )
        takers = self._takers(clients, len(classes), seed)
        codes, test_codes = _renumbered(labels, classes), _renumbered(test_labels, classes)
        for label, samples, sharers in zip(classes.tolist(), _grouped(codes), takers, strict=True):
            if len(samples) < len(sharers):
                raise DataError(
                    f"class {label} has {len(samples)} samples for {len(sharers)} clients that "
                    "hold it. Fewer clients, or fewer labels a client, would fit."
                )
        return _shared(codes, takers, clients, seed), _shared(test_codes, takers, clients, seed)

    def _takers(self, clients: int, classes: int, seed: int) -> list[Tensor]:
        """Return a list with one tensor for each class: the clients that hold it.

        Clients take different classes from a queue. It is filled with random orders of all classes,
        so that all classes are taken equally often. A client holds `self.labels` classes.
        """
        classes_of_clients: list[list[int]] = []
        queue: list[int] = []
        for client in range(clients):
            classes_of_client: list[int] = []
            while len(classes_of_client) < self.labels:
                fresh = next((label for label in queue if label not in classes_of_client), None)
                if fresh is None:
                    queue += noise.order(
                        noise.key(
                            seed,
                            noise.Stream.CLIENT_CLASSES,
                            client,
                            len(classes_of_client),
                            len(queue),
                        ),
                        classes,
                    ).tolist()
                    continue
                classes_of_client.append(fresh)
                queue.remove(fresh)
            classes_of_clients.append(classes_of_client)
        return [
            draws // self.labels
            for draws in _grouped(torch.tensor(classes_of_clients).flatten(), classes)
        ]


@dataclass(frozen=True)
class Quantity(Partition):
    """Give clients different numbers of samples with the same distribution of classes.

    Sizes are proportional to log-normal random numbers (`sigma`), or to a draw from
    Dirichlet(`alpha`).
    """

    law: Literal["lognormal", "dirichlet"] = "lognormal"  # Distribution of the sizes
    sigma: float = 1.0  # Scale parameter of the log-normal distribution. 0 gives equal sizes
    alpha: float = 1.0  # Concentration of the Dirichlet distribution
    min_size: int = 1  # Smallest number of samples of a client

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, sigma="[0, inf)", alpha="(0, inf)", min_size="[1, inf)")

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients, count = self._number(pool, num_clients), len(pool.targets)
        if clients * self.min_size > count:
            raise DataError(
                f"{clients} clients with at least {self.min_size} samples each were asked for; "
                f"{pool.name} has {count}. {count // self.min_size} clients or min_size = "
                f"{count // clients} would fit."
            )
        word = torch.tensor(noise.key(seed, noise.Stream.QUANTITIES))
        if self.law == "lognormal":
            shares = torch.softmax(self.sigma * noise.normal(word, (clients,), torch.float64), 0)
        else:
            shares = noise.dirichlet(word, clients, self.alpha)
        spare = count - clients * self.min_size  # Samples left when all have min_size.
        sizes = self.min_size + torch.bincount(_owners(shares.cumsum(0), spare), minlength=clients)
        parts = Parts.split(noise.order(noise.key(seed, noise.Stream.SAMPLE_ORDER), count), sizes)
        single_class, test_class = (
            torch.zeros(len(targets), dtype=torch.int64)
            for targets in (pool.targets, pool.test_targets)
        )
        return parts, _alike(parts, single_class, test_class, seed)


@dataclass(frozen=True)
class Natural(Partition):
    """Make each user of the data a client.

    If there are fewer clients than users, users are drawn at random, and samples of the others are
    left out.
    """

    min_size: int = 1  # Smallest number of samples. Users with fewer samples are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, min_size="[1, inf)")

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        if pool.clients is None:
            raise DataError(
                f"{pool.name} does not have the client of each sample, by which Natural "
                "partitions. Array files say it in `client_train`; Iid, Dirichlet, Labels and "
                "Quantity do without."
            )
        users = (torch.bincount(pool.clients) >= self.min_size).nonzero().flatten()
        count = len(users) if num_clients is None else num_clients
        if count > len(users) or not count:
            raise DataError(
                f"{num_clients or 'all'} clients were asked for; {pool.name} has {len(users)} "
                f"users with at least {self.min_size} samples. Iid() and others partition it "
                "among any number."
            )
        chosen_users = (
            users[noise.order(noise.key(seed, noise.Stream.USERS), len(users))[:count]]
            .sort()
            .values
        )
        return Parts.owned(_renumbered(pool.clients, chosen_users), count), _own_tests(
            pool.test_clients, chosen_users
        )


@dataclass(frozen=True)
class Domains(Partition):
    """Give each client samples of one domain.

    Clients with neighbouring numbers share a domain. Ten clients over five domains are two per
    domain, each with half of it.
    """

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        if pool.domains is None:
            raise DataError(
                f"{pool.name} does not have the domain of each sample, by which Domains "
                "partitions. Array files say it in `domain_train`; Iid, Dirichlet, Labels and "
                "Quantity do without."
            )
        homes = torch.bincount(pool.domains).nonzero().flatten()  # Domains with samples.
        clients = len(homes) if num_clients is None else self._number(pool, num_clients)
        if clients < len(homes):
            raise DataError(
                f"{clients} clients were asked for; the {len(homes)} domains of {pool.name} need "
                "one each."
            )
        takers = torch.arange(clients).tensor_split(len(homes))
        codes = _renumbered(pool.domains, homes)
        for home, samples, sharers in zip(homes.tolist(), _grouped(codes), takers, strict=True):
            if len(samples) < len(sharers):
                raise DataError(
                    f"domain {_called(pool, home)} has {len(samples)} samples for {len(sharers)} "
                    "clients. Fewer clients would fit."
                )
        tests = None if pool.test_domains is None else _renumbered(pool.test_domains, homes)
        return _shared(codes, takers, clients, seed), None if tests is None else _shared(
            tests, takers, clients, seed
        )


@dataclass(frozen=True)
class Flwr(Partition):
    """Use a partitioner of flwr-datasets that divides rows, by the name of its class.

    The partitioner gets the columns `label`, `client` and `domain`, as far as the data has them.
    Its random numbers come from its own NumPy generator, which gets our random seed.
    """

    partitioner: str = "InnerDirichletPartitioner"  # Name of the class in flwr_datasets.partitioner
    # Arguments of the class. They replace our num_partitions, partition_by and seed
    options: dict[str, Any] = field(default_factory=dict)

    def _divide(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        from fedquilt.data.sources.hub import deal_by_flower

        parts = deal_by_flower(self.partitioner, self.options, pool, num_clients, seed)
        if not pool.has_classes or pool.targets.dim() > 1:
            return parts, None
        return parts, _alike(parts, pool.targets, pool.test_targets, seed)


PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet": Dirichlet,
    "labels": Labels,
    "quantity": Quantity,
    "natural": Natural,
    "domains": Domains,
    "flwr": Flwr,
}


# --- the pieces they share ----------------------------------------------------------------------


def _evenly(count: int, shares: int) -> Tensor:
    """Return `shares` sizes with sum `count` that differ by at most one, the larger ones first."""
    return torch.full((shares,), count // shares) + (torch.arange(shares) < count % shares)


def _grouped(codes: Tensor, groups: int = 0) -> list[Tensor]:
    """Return for each code 0, 1, … the positions in `codes` that have it, in ascending order.

    Negative codes are left out. At least `groups` tensors are returned, which may be empty.
    """
    ranked = torch.argsort(codes, stable=True)[int((codes < 0).sum()) :]
    counts = torch.bincount(codes[codes >= 0], minlength=groups)
    return list(torch.tensor_split(ranked, counts.cumsum(0)[:-1])) if len(counts) else []


def _mixed(codes: Tensor, seed: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each code that occurs, with the shuffled positions of its samples, in order of codes.

    `codes` (sample,) has the class or domain of each sample. Negative codes are left out.
    """
    for code, samples in enumerate(_grouped(codes)):
        if len(samples):
            yield (
                code,
                samples[noise.order(noise.key(seed, noise.Stream.GROUP_ORDER, code), len(samples))],
            )


def _shared(codes: Tensor, takers: Sequence[Tensor], clients: int, seed: int) -> Parts:
    """Divide the shuffled samples of each group equally among the clients that take the group.

    Args:
        codes: (sample,) Group of each sample. Negative: none.
        takers: Clients that get a shard of each group, by group. A group without any is unused.
        clients: Number of clients.
        seed: Random seed of the order of samples.
    """
    order, owner = [_NONE], [_NONE]
    for code, samples in _mixed(codes, seed):
        if len(sharers := takers[code]):
            order.append(samples)
            owner.append(sharers.repeat_interleave(_evenly(len(samples), len(sharers))))
    return Parts.owned(torch.cat(owner), clients, torch.cat(order))


def _owners(cumulated: Tensor, count: int) -> Tensor:
    """Return the client of each of `count` consecutive samples, (sample,), by cumulative shares.

    Sample j belongs to the client whose interval of the shares contains (j + ½) / count.
    `cumulated` (client,) ascends. Its last value, the sum of the shares, need not be 1.
    """
    quantiles = (torch.arange(count, dtype=torch.float64) + 0.5) / count * cumulated[-1]
    return torch.searchsorted(cumulated, quantiles, right=True).clamp(max=len(cumulated) - 1)


def _filled(shares: Tensor, size: int, available: Tensor) -> Tensor:
    """Return the number of samples of each class that a client takes, (class,) with sum `size`.

    A class that runs out is replaced by the other classes, in proportion to their shares.

    Args:
        shares: (class,) Proportions of the classes.
        size: Number of samples, at most the sum of `available`.
        available: (class,) Number of samples that are left of each class.
    """
    counts = torch.zeros_like(available)
    while (missing := size - int(counts.sum())) > 0:
        room = available - counts
        # A class with a tiny share is used only when all other classes have run out.
        weights = torch.where(room > 0, shares.clamp(min=1e-12), 0.0)
        requests = torch.bincount(_owners(weights.cumsum(0), missing), minlength=len(shares))
        counts = counts + torch.minimum(requests, room)
    return counts


def _alike(parts: Parts, labels: Tensor, test_labels: Tensor, seed: int) -> Parts:
    """Divide the test samples so that each client has the classes of its training samples.

    The test samples of a class are shuffled, and divided in proportion to the clients' numbers of
    training samples of that class. Classes without training samples are unused.

    Args:
        parts: Parts of the training set.
        labels: (sample,) Class of each training sample.
        test_labels: (sample,) Class of each test sample.
        seed: Random seed of the order of test samples.
    """
    owners, rows_by_class = parts.owners, dict(enumerate(_grouped(labels[parts.order])))
    order, owner = [_NONE], [_NONE]
    for label, samples in _mixed(test_labels, seed):
        if len(rows := rows_by_class.get(label, _NONE)):
            counts = torch.bincount(owners[rows], minlength=len(parts))
            order.append(samples)
            owner.append(_owners(counts.cumsum(0).double(), len(samples)))
    return Parts.owned(torch.cat(owner), len(parts), torch.cat(order))


def _renumbered(codes: Tensor, chosen: Tensor) -> Tensor:
    """Return the index of each code in `chosen`, −1 for codes that are negative or not in it."""
    indices = torch.full((int(max(codes.max(), chosen.max())) + 1,), -1)
    indices[chosen] = torch.arange(len(chosen))
    return torch.where(codes >= 0, indices[codes.clamp(min=0)], -1)


def _own_tests(codes: Tensor | None, users: Tensor) -> Parts | None:
    """Return the test samples of each user, in the order of `users`. None: no user has any.

    `codes` (sample,) has the user of each test sample. None: unknown. The result is None too if
    the users of the test set are not those of the training set.
    """
    if codes is None or not bool((owner := _renumbered(codes, users)).ge(0).any()):
        return None
    return Parts.owned(owner, len(users))


def _called(pool: Pool, domain: int) -> str:
    return repr(pool.domain_names[domain]) if domain < len(pool.domain_names) else str(domain)
