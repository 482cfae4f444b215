"""Who holds what: ways to deal a pool of samples to clients, in training and in testing alike.

Each is a frozen dataclass; its fields are its options. A deal depends on the seed alone, no client goes without
training samples, and a client's part of the test set is like its part of the training set, where that makes sense.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
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
    from fedquilt.data.federated import Pool

_DRAWS = 10_000_000  # shares that are drawn at most before a deal is given up; at least a few times, at most a hundred
_NONE = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class Partition(ABC):
    """A way to deal. `fraction` is what each client keeps of its training samples, at least one."""

    fraction: float = field(default=1.0, kw_only=True)
    max_size: int | None = field(
        default=None, kw_only=True
    )  # training samples a client keeps at most; None: all

    def __post_init__(self) -> None:
        within(self, fraction="(0, 1]")
        if self.max_size is not None:
            within(self, max_size="[1, inf)")

    def deal(
        self, pool: Pool, num_clients: int | None, seed: int = 0
    ) -> tuple[Parts, Parts | None]:
        """Each client's positions in the training set and in the test set."""
        if num_clients is not None and not whole(num_clients, 1):
            raise DataError(
                f"{num_clients!r} clients were asked for; {pool.name} can be dealt to a whole number of them, one "
                "or more."
            )
        parts, test_parts = self._deal(pool, num_clients, seed)
        return parts.thinned(self.fraction, noise.key(seed, 16), self.max_size), test_parts

    @abstractmethod
    def _deal(
        self, pool: Pool, num_clients: int | None, seed: int
    ) -> tuple[Parts, Parts | None]: ...

    def _number(self, pool: Pool, num_clients: int | None) -> int:
        """How many clients to deal to, for those who have to be told."""
        if num_clients is None:
            raise DataError(
                f"{type(self).__name__} deals {pool.name} to a number of clients; none was asked for."
            )
        if num_clients > len(pool.targets):
            raise DataError(
                f"{num_clients} clients were asked for; {pool.name} has {len(pool.targets)} samples, which can serve "
                "that many at most."
            )
        return num_clients

    def _labels(self, pool: Pool) -> tuple[Tensor, Tensor]:
        """Return the class of each sample, for partitions by class."""
        if not pool.has_classes or pool.targets.dim() > 1:
            kind = str(pool.targets.dtype).removeprefix("torch.")
            raise DataError(
                f"{type(self).__name__} deals by class; a target of {pool.name} has shape "
                f"{tuple(pool.targets.shape[1:])} and is {kind}. It needs one class for each sample, as a whole "
                "number. Iid, Quantity, Natural and Domains do without classes."
            )
        return pool.targets, pool.test_targets


@dataclass(frozen=True)
class Iid(Partition):
    """Shuffle and deal: equal shares, up to one sample."""

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients = self._number(pool, num_clients)
        counts = len(pool.targets), len(pool.test_targets)
        parts, test_parts = (
            Parts.split(noise.order(noise.key(seed, 11), count), _evenly(count, clients))
            for count in counts
        )
        return parts, test_parts


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Each class is shared out in proportions drawn from Dirichlet(alpha) (Yurochkin et al. 2019; Hsu et al. 2019).

    A small alpha gives a class to few clients. Drawn again until every client has `min_size` samples.

    With `equal`, every client draws its proportions of classes from Dirichlet(alpha), and all have the
    same number of samples, as in the federated CIFAR-100 of Reddi et al. (2021). Clients take their
    samples in random order. When a class runs out, others take its place in the proportions of the
    client, so that the last clients depend on what the others left.
    """

    alpha: float = 0.5
    # Samples that every client has at least. Two, because batch norm cannot train on one. With `equal` it has no effect
    min_size: int = 2
    equal: bool = False  # Give all clients the same number of samples; a remainder is left out

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, alpha="(0, inf)", min_size="[1, inf)")

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
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
                    torch.tensor(noise.key(seed, 41, attempt, label)), clients, self.alpha
                )
                owner.append(_owners(shares.cumsum(0), len(samples)))
            parts = Parts.owned(torch.cat(owner), clients, order)
            if (least := int(parts.sizes.min())) >= self.min_size:
                return parts
            best = max(best, least)
        raise DataError(
            f"Dirichlet(alpha={self.alpha}) was asked to deal {pool.name} to {clients} clients with at least "
            f"{self.min_size} samples each; in {attempts} draws the poorest had {best} at best. A larger alpha, fewer "
            "clients or a smaller min_size would fit. With equal = true all have the same number."
        )

    def _equal(self, labels: Tensor, clients: int, seed: int) -> Parts:
        """Return parts of equal size, in which every client has proportions of classes of its own."""
        classes = [samples for _, samples in _mixed(labels, seed)]
        available = torch.tensor([len(samples) for samples in classes])
        left = available
        size = int(available.sum()) // clients
        parts = [_NONE] * clients
        for client in noise.order(noise.key(seed, 46), clients).tolist():
            shares = noise.dirichlet(
                torch.tensor(noise.key(seed, 47, client)), len(classes), self.alpha
            )
            counts = _filled(shares, size, left)
            firsts = available - left
            taken = [
                samples[first : first + count]
                for samples, first, count in zip(
                    classes, firsts.tolist(), counts.tolist(), strict=True
                )
            ]
            parts[client] = torch.cat(taken)
            left = left - counts
        return Parts.split(torch.cat(parts), torch.full((clients,), size))


@dataclass(frozen=True)
class Labels(Partition):
    """`labels` classes a client, the test set split alike (HeteroFL): each class is cut into equal shards and dealt."""

    labels: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, labels="[1, inf)")

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients, (labels, test_labels) = self._number(pool, num_clients), self._labels(pool)
        classes = torch.bincount(labels[labels >= 0]).nonzero().flatten()  # those there are
        if self.labels > len(classes):
            raise DataError(
                f"{self.labels} labels a client were asked for; {pool.name} has {len(classes)} classes."
            )
        takers = self._takers(clients, len(classes), seed)
        codes, test_codes = _renumbered(labels, classes), _renumbered(test_labels, classes)
        for label, samples, sharers in zip(classes.tolist(), _grouped(codes), takers, strict=True):
            if len(samples) < len(sharers):
                raise DataError(
                    f"class {label} has {len(samples)} samples for {len(sharers)} clients that hold it. Fewer clients, "
                    "or fewer labels a client, would fit."
                )
        return _shared(codes, takers, clients, seed), _shared(test_codes, takers, clients, seed)

    def _takers(self, clients: int, classes: int, seed: int) -> list[Tensor]:
        """Who holds each class: all draw different ones from decks of all classes, so that each is drawn as often."""
        hands: list[list[int]] = []
        deck: list[int] = []
        for client in range(clients):
            hand: list[int] = []
            while len(hand) < self.labels:
                fresh = next((label for label in deck if label not in hand), None)
                if fresh is None:
                    deck += noise.order(
                        noise.key(seed, 12, client, len(hand), len(deck)), classes
                    ).tolist()
                    continue
                hand.append(fresh)
                deck.remove(fresh)
            hands.append(hand)
        return [place // self.labels for place in _grouped(torch.tensor(hands).flatten(), classes)]


@dataclass(frozen=True)
class Quantity(Partition):
    """Classes alike, sizes unlike: proportional to log-normal draws (`sigma`) or to one of Dirichlet(`alpha`)."""

    law: Literal["lognormal", "dirichlet"] = "lognormal"
    sigma: float = 1.0  # of the log-normal; 0 gives equal shares
    alpha: float = 1.0  # of the Dirichlet
    min_size: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, sigma="[0, inf)", alpha="(0, inf)", min_size="[1, inf)")

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        clients, count = self._number(pool, num_clients), len(pool.targets)
        if clients * self.min_size > count:
            raise DataError(
                f"{clients} clients with at least {self.min_size} samples each were asked for; {pool.name} has "
                f"{count}. {count // self.min_size} clients or min_size = {count // clients} would fit."
            )
        word = torch.tensor(noise.key(seed, 42))
        if self.law == "lognormal":
            shares = torch.softmax(self.sigma * noise.normal(word, (clients,), torch.float64), 0)
        else:
            shares = noise.dirichlet(word, clients, self.alpha)
        spare = count - clients * self.min_size  # what is left once everybody has the least
        sizes = self.min_size + torch.bincount(_owners(shares.cumsum(0), spare), minlength=clients)
        parts = Parts.split(noise.order(noise.key(seed, 11), count), sizes)
        one_class, test_class = (
            torch.zeros(len(some), dtype=torch.int64) for some in (pool.targets, pool.test_targets)
        )
        return parts, _alike(parts, one_class, test_class, seed)


@dataclass(frozen=True)
class Natural(Partition):
    """The data's own users. Fewer clients than there are users get a draw of them; the others' samples are left out."""

    min_size: int = 1  # users with fewer samples are left out

    def __post_init__(self) -> None:
        super().__post_init__()
        within(self, min_size="[1, inf)")

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        if pool.clients is None:
            raise DataError(
                f"{pool.name} does not say whose each sample is, which Natural deals by. Array files say it in "
                "`client_train`; Iid, Dirichlet, Labels and Quantity do without."
            )
        users = (torch.bincount(pool.clients) >= self.min_size).nonzero().flatten()
        count = len(users) if num_clients is None else num_clients
        if count > len(users) or not count:
            raise DataError(
                f"{num_clients or 'all'} clients were asked for; {pool.name} has {len(users)} users with at least "
                f"{self.min_size} samples. Iid() and others deal it to any number."
            )
        drawn = users[noise.order(noise.key(seed, 43), len(users))[:count]].sort().values
        return Parts.owned(_renumbered(pool.clients, drawn), count), _own_tests(
            pool.test_clients, drawn
        )


@dataclass(frozen=True)
class Domains(Partition):
    """Whole domains to neighbouring clients: ten clients over five domains are two a domain, each with half of it."""

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        if pool.domains is None:
            raise DataError(
                f"{pool.name} does not say where each sample comes from, which Domains deals by. Array files say it in "
                "`domain_train`; Iid, Dirichlet, Labels and Quantity do without."
            )
        homes = torch.bincount(pool.domains).nonzero().flatten()  # those there are
        clients = len(homes) if num_clients is None else self._number(pool, num_clients)
        if clients < len(homes):
            raise DataError(
                f"{clients} clients were asked for; the {len(homes)} domains of {pool.name} need one each."
            )
        takers = torch.arange(clients).tensor_split(len(homes))
        places = _renumbered(pool.domains, homes)
        for home, samples, sharers in zip(homes.tolist(), _grouped(places), takers, strict=True):
            if len(samples) < len(sharers):
                raise DataError(
                    f"domain {_called(pool, home)} has {len(samples)} samples for {len(sharers)} clients. Fewer "
                    "clients would fit."
                )
        tests = None if pool.test_domains is None else _renumbered(pool.test_domains, homes)
        return _shared(places, takers, clients, seed), None if tests is None else _shared(
            tests, takers, clients, seed
        )


@dataclass(frozen=True)
class Flwr(Partition):
    """Any partitioner of flwr-datasets that deals rows, by its class's name and options.

    It sees the columns `label`, `client` and `domain`, as far as the data has them. What it draws comes from its own
    NumPy generator, seeded by ours.
    """

    partitioner: str = "InnerDirichletPartitioner"
    options: dict[str, Any] = field(default_factory=dict)

    def _deal(self, pool: Pool, num_clients: int | None, seed: int) -> tuple[Parts, Parts | None]:
        from fedquilt.data.huggingface import deal_by_flower

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


# --- the pieces they share --------------------------------------------------------------------------------------


def _evenly(count: int, shares: int) -> Tensor:
    """Sizes that differ by one at most, the larger ones first."""
    return torch.full((shares,), count // shares) + (torch.arange(shares) < count % shares)


def _grouped(codes: Tensor, groups: int = 0) -> list[Tensor]:
    """The places of each code, in order; negative codes belong to no group."""
    ranked = torch.argsort(codes, stable=True)[int((codes < 0).sum()) :]
    counts = torch.bincount(codes[codes >= 0], minlength=groups)
    return list(torch.tensor_split(ranked, counts.cumsum(0)[:-1])) if len(counts) else []


def _mixed(codes: Tensor, seed: int) -> Iterator[tuple[int, Tensor]]:
    """The samples of each group that has any, mixed."""
    for code, samples in enumerate(_grouped(codes)):
        if len(samples):
            yield code, samples[noise.order(noise.key(seed, 13, code), len(samples))]


def _shared(codes: Tensor, takers: Sequence[Tensor], clients: int, seed: int) -> Parts:
    """The samples of each group, in equal shards to those who take from it."""
    order, owner = [_NONE], [_NONE]
    for code, samples in _mixed(codes, seed):
        if len(sharers := takers[code]):
            order.append(samples)
            owner.append(sharers.repeat_interleave(_evenly(len(samples), len(sharers))))
    return Parts.owned(torch.cat(owner), clients, torch.cat(order))


def _owners(cumulated: Tensor, count: int) -> Tensor:
    """Who gets each of `count` samples in a row, by cumulated shares: sample j goes where (j + ½) / count falls."""
    at = (torch.arange(count, dtype=torch.float64) + 0.5) / count * cumulated[-1]
    return torch.searchsorted(cumulated, at, right=True).clamp(max=len(cumulated) - 1)


def _filled(shares: Tensor, size: int, available: Tensor) -> Tensor:
    """Return (class,) how many samples of each class a client takes, `size` in all.

    Args:
        shares: (class,) Proportions that the client asks for.
        size: Number of samples, at most those that are there.
        available: (class,) Samples that are left of each class.
    """
    counts = torch.zeros_like(available)
    while (missing := size - int(counts.sum())) > 0:
        room = available - counts
        # A class of a very small share is taken from only when no other class is left.
        wanted = torch.where(room > 0, shares.clamp(min=1e-12), 0.0)
        asked = torch.bincount(_owners(wanted.cumsum(0), missing), minlength=len(shares))
        counts = counts + torch.minimum(asked, room)
    return counts


def _alike(parts: Parts, labels: Tensor, test_labels: Tensor, seed: int) -> Parts:
    """The test samples of each class, shared out as those of the training set are."""
    owners, held = parts.owners, dict(enumerate(_grouped(labels[parts.order])))
    order, owner = [_NONE], [_NONE]
    for label, samples in _mixed(test_labels, seed):
        if len(rows := held.get(label, _NONE)):
            counts = torch.bincount(owners[rows], minlength=len(parts))
            order.append(samples)
            owner.append(_owners(counts.cumsum(0).double(), len(samples)))
    return Parts.owned(torch.cat(owner), len(parts), torch.cat(order))


def _renumbered(codes: Tensor, chosen: Tensor) -> Tensor:
    """The place of each code among the chosen ones, −1 where it is none of them."""
    places = torch.full((int(max(codes.max(), chosen.max())) + 1,), -1)
    places[chosen] = torch.arange(len(chosen))
    return torch.where(codes >= 0, places[codes.clamp(min=0)], -1)


def _own_tests(codes: Tensor | None, users: Tensor) -> Parts | None:
    """The users' own test samples; None where none of them has any, as when the test set has users of its own."""
    if codes is None or not bool((owner := _renumbered(codes, users)).ge(0).any()):
        return None
    return Parts.owned(owner, len(users))


def _called(pool: Pool, domain: int) -> str:
    return repr(pool.domain_names[domain]) if domain < len(pool.domain_names) else str(domain)
