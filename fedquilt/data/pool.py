"""Samples that belong to no client yet."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt import noise
from fedquilt.data.convert import (
    Samples,
    check_samples,
    count_classes,
    input_tensor,
    number_groups,
    number_named_targets,
    read_samples,
    tensor_pair,
    warn_of_nan,
)
from fedquilt.data.holdout import held_out
from fedquilt.data.partitions import Iid, Natural, Partition
from fedquilt.data.parts import Array, Parts
from fedquilt.data.scale import Scale
from fedquilt.display import Overview, Readable
from fedquilt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedquilt.data.federated import FederatedData
    from fedquilt.data.origin import Origin


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Set:
    """Training or test set, while a pool is made of it."""

    inputs: Tensor  # (sample, …)
    targets: Tensor  # (sample, …)
    clients: Tensor | None  # (sample,) None: unknown.
    domains: Tensor | None  # (sample,) None: unknown.

    def check(self, name: str, set_name: str) -> None:
        """Refuse inputs, targets, clients and domains that do not fit each other, by a DataError.

        Both arguments are for messages: `name` of the data, and "training" or "test".
        """
        groups = {"clients": self.clients, "domains": self.domains}
        check_samples(name, set_name, self.inputs, self.targets, groups)

    def with_test_set(self, name: str) -> tuple[_Set, _Set]:
        """Return four fifths of the samples for training, and one fifth for testing.

        Each client is split by itself, or each domain if clients are unknown. `name` is for
        messages.
        """
        groups = self.domains if self.clients is None else self.clients
        training_rows, test_rows = held_out(len(self.inputs), groups, name)
        return self._at(training_rows), self._at(test_rows)

    def _at(self, rows: Tensor) -> _Set:
        clients = None if self.clients is None else self.clients[rows]
        domains = None if self.domains is None else self.domains[rows]
        return _Set(self.inputs[rows], self.targets[rows], clients, domains)


def _check_alike(train: _Set, test: _Set, name: str) -> None:
    """Refuse training and test samples of different shape or dtype. Their numbers may differ."""
    shapes = [(tuple(s.inputs.shape[1:]), tuple(s.targets.shape[1:])) for s in (train, test)]
    if shapes[0] != shapes[1]:
        raise DataError(
            f"{name}: training samples have shape {shapes[0][0]} (targets {shapes[0][1]}) and test "
            f"samples {shapes[1][0]} ({shapes[1][1]}); they must be alike."
        )
    for noun, tensor, test_tensor in (
        ("inputs", train.inputs, test.inputs),
        ("targets", train.targets, test.targets),
    ):
        if tensor.dtype != test_tensor.dtype:
            raise DataError(
                f"{name}: training {noun} are {tensor.dtype} and test {noun} {test_tensor.dtype}; "
                "they must be alike."
            )


@dataclass(frozen=True, eq=False)
class Pool(Readable):
    """Training and test samples that belong to no client yet, with facts about each sample.

    `Pool.of` makes a pool from arrays, and data sources such as `fq.data.digits` from files.
    `partition` assigns the training samples to clients.

    Attributes:
        inputs: (sample, …) Training inputs: bytes (images), real numbers, or int64 (tokens).
        targets: (sample, …) Training targets: classes (int64), one boolean per label
            (multi-label), or real numbers.
        test_inputs: (sample, …) Test inputs, of the same type as `inputs`.
        test_targets: (sample, …) Test targets, of the same type as `targets`.
        clients: (sample,) Client that each training sample comes from. None: unknown.
        test_clients: (sample,) The same for test samples.
        domains: (sample,) Domain that each training sample comes from. None: unknown.
        test_domains: (sample,) The same for test samples.
        public: (sample, …) Inputs without targets that all clients have. None: there are none.
        name: Name of the data in tables and messages.
        num_classes: Number of classes. 0: targets are not classes.
        class_names: Names of classes by number. For text: the vocabulary. Empty: no names.
        domain_names: Names of domains by number. Empty: no names.
        scale: Normalisation of inputs for a model. None: a model gets the stored values.

    Example:
        >>> import torch
        >>> import fedquilt as fq
        >>> images = torch.zeros(100, 1, 8, 8)
        >>> labels = torch.arange(100) % 10
        >>> pool = fq.data.Pool.of((images[:80], labels[:80]), (images[80:], labels[80:]))
        >>> pool
        Pool(data: 80 training and 20 test samples of (1, 8, 8), 10 classes)
        >>> pool.partition(4).size(0)
        20
    """

    inputs: Tensor
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    clients: Tensor | None = None
    test_clients: Tensor | None = None
    domains: Tensor | None = None
    test_domains: Tensor | None = None
    public: Tensor | None = None
    name: str = "data"
    num_classes: int = 0
    class_names: tuple[str, ...] = ()
    domain_names: tuple[str, ...] = ()
    scale: Scale | None = None

    @staticmethod
    def of(  # noqa: PLR0913  # The keywords are the user's interface.
        train: Samples,
        test: Samples | None = None,
        *,
        clients: Array | Sequence[str] | None = None,
        test_clients: Array | Sequence[str] | None = None,
        domains: Array | Sequence[str] | None = None,
        test_domains: Array | Sequence[str] | None = None,
        public: Array | None = None,
        name: str = "data",
        num_classes: int = 0,
        class_names: tuple[str, ...] = (),
        domain_names: tuple[str, ...] = (),
        scale: Scale | None = None,
    ) -> Pool:
        """Check arrays or tensors and wrap them as a pool.

        Integer targets are classes, and real targets are for regression. Targets that are names
        become classes. A row of booleans for each sample says which labels it has (multi-label).

        Args:
            train: (inputs, targets), or a torch Dataset of such pairs, which is read once into
                arrays.
            test: The same for the test set. None: a fifth of the samples is held out, of every
                client if there are clients, else of every domain, else of all samples.
            clients: (sample,) Client of each training sample: numbers from 0 on, or names. None:
                unknown.
            test_clients: (sample,) The same for test samples.
            domains: (sample,) Domain of each training sample: numbers from 0 on, or names. None:
                unknown.
            test_domains: (sample,) The same for test samples.
            public: Inputs that all clients have, without targets. None: there are none.
            name: Name of the data for tables and messages.
            num_classes: Number of classes. 0: one more than the largest target.
            class_names: Names of classes by number. Empty: if targets are names, these in sorted
                order.
            domain_names: Names of domains by number. Empty: those in `domains`, if it has names.
            scale: Normalisation of the inputs. None: bytes are divided by 255, and other inputs
                stay.

        Raises:
            DataError: Arrays do not fit each other, or hold values that are not accepted.
        """
        train = read_samples(train, name, "training")
        if test is None:
            test_clients = test_domains = None
        else:
            test = read_samples(test, name, "test")
        train, test, class_names = number_named_targets(train, test, class_names, name)
        client_codes, test_client_codes, _ = number_groups(
            clients, test_clients, f"{name}: clients"
        )
        domain_codes, test_domain_codes, names_found = number_groups(
            domains, test_domains, f"{name}: domains"
        )
        training_set = _Set(*tensor_pair(train, name, "training"), client_codes, domain_codes)
        training_set.check(name, "training")
        if test is None:
            training_set, test_set = training_set.with_test_set(name)
        else:
            test_pair = tensor_pair(test, name, "test")
            test_set = _Set(*test_pair, test_client_codes, test_domain_codes)
            test_set.check(name, "test")
        _check_alike(training_set, test_set, name)
        warn_of_nan(test_set.inputs, name)
        is_bytes = training_set.inputs.dtype == torch.uint8
        return Pool(
            inputs=training_set.inputs,
            targets=training_set.targets,
            test_inputs=test_set.inputs,
            test_targets=test_set.targets,
            clients=training_set.clients,
            test_clients=test_set.clients,
            domains=training_set.domains,
            test_domains=test_set.domains,
            public=None if public is None else input_tensor(public, name),
            name=name,
            num_classes=count_classes(name, training_set.targets, test_set.targets, num_classes),
            class_names=class_names,
            domain_names=domain_names or names_found,
            scale=scale or (Scale.of(training_set.inputs, "none") if is_bytes else None),
        )

    @property
    def origin(self) -> Origin | None:
        """Return the function and arguments that made the samples. None: unknown or outdated."""
        return vars(self).get("_origin")

    def remembering(self, origin: Origin | None) -> Self:
        """Remember how the samples were made, and return this object.

        The origin is not a dataclass field, so that a copy with other samples
        (`dataclasses.replace`) does not have it.
        """
        vars(self)["_origin"] = origin
        return self

    @property
    def is_partitioned(self) -> bool:
        """Return True if every client's samples are known, as in `FederatedData`."""
        return False

    @property
    def has_classes(self) -> bool:
        """Return True if targets are classes, by which samples can be partitioned and counted."""
        return self.num_classes > 0

    @property
    def has_masks(self) -> bool:
        """Return True if targets are masks, which have a class for every pixel or voxel."""
        return (
            self.has_classes
            and self.targets.dim() > 2
            and self.targets.shape[1:] == self.inputs.shape[2:]
        )

    @property
    def num_outputs(self) -> int:
        """Return the number of outputs that a model needs for each sample or position.

        It is the number of classes, or else the number of columns of the targets.
        """
        columns = 1 if self.targets.dim() == 1 else self.targets.shape[1]
        return self.num_classes or columns

    @property
    def usual(self) -> Partition:
        """Return the default partition: by the clients of the data if it has any, else IID."""
        return Iid() if self.clients is None else Natural()

    def partition(
        self, num_clients: int | None = None, partition: Partition | None = None, seed: int = 0
    ) -> FederatedData:
        """Return the pool with the positions of each client's samples.

        Samples are not copied. Test samples are assigned too if the kind of partition does so.

        Args:
            num_clients: Number of clients. None: as many as the data has of its own.
            partition: Kind of partition. None: by the clients of the data if it has any, else IID.
            seed: Random seed of the partition.
        """
        if not isinstance(partition, Partition | None):
            raise DataError(
                f"{self.name} was to be partitioned by {partition!r}; a partition fits, such as "
                "pool.partition(20, fq.data.Iid(), seed=0)."
            )
        partition = partition or self.usual
        federated = self.with_parts(*partition.split(self, num_clients, seed))
        # If the source has partitioned its data, a settings file cannot name another partition.
        can_name_partition = not self.is_partitioned or (self.origin and self.origin.partition)
        origin = self.origin if can_name_partition else None
        return federated.remembering(
            origin and origin.partitioned(partition, federated.num_clients, seed)
        )

    def with_parts(
        self,
        parts: Sequence[Sequence[int] | Array],
        test_parts: Sequence[Sequence[int] | Array] | None = None,
    ) -> FederatedData:
        """Return the pool together with the positions of each client's samples, which are checked.

        Every client needs a training sample. Samples in several parts are allowed, with a warning.

        Args:
            parts: Positions of each client's training samples, or a boolean mask for each client.
            test_parts: The same for test samples. None: clients have no test samples of their own.

        Raises:
            DataError: A client has no training sample, a position is outside of the pool, or the
                numbers of clients differ.
        """
        # The subclass is imported here, because its module needs this one.
        from fedquilt.data.federated import FederatedData

        train_parts = Parts.of(parts, len(self.targets))
        if not len(train_parts):
            raise DataError("no client was given any data: `parts` is empty.")
        _check_parts(train_parts, len(self.targets), "training")
        if len(empty := (train_parts.sizes == 0).nonzero()):
            raise DataError(
                f"client {int(empty[0])} has no data. Leave it out, or give it at least one sample."
            )
        _warn_of_repeats(train_parts, len(self.targets), self.name)
        tests = None if test_parts is None else Parts.of(test_parts, len(self.test_targets))
        if tests is not None:
            if len(tests) != len(train_parts):
                raise DataError(
                    f"there are {len(train_parts)} clients but test parts for {len(tests)}."
                )
            _check_parts(tests, len(self.test_targets), "test")
        values = {field.name: getattr(self, field.name) for field in fields(Pool)}
        return FederatedData(**values, parts=train_parts, test_parts=tests)

    def with_public(self, share: float) -> Self:
        """Return a pool in which a random share of the training samples is public, without targets.

        Clients no longer train on these samples. Public samples that the pool had are replaced. The
        draw depends on the number of samples alone.

        Args:
            share: Share of the training samples, in [0, 1). 0 has no effect.
        """
        if share == 0:
            return self
        if not 0 < share < 1:
            raise ConfigError(
                f"public = {share} was asked for; it is a share of the training samples, in [0, 1)."
            )
        order = noise.order(noise.key(noise.NO_SEED, noise.Stream.PUBLIC_SPLIT), len(self.targets))
        count = round(share * len(order))
        public, remaining = order[:count], order[count:]
        return replace(
            self,
            inputs=self.inputs[remaining],
            targets=self.targets[remaining],
            clients=None if self.clients is None else self.clients[remaining],
            domains=None if self.domains is None else self.domains[remaining],
            public=self.inputs[public],
        )

    def with_domains(self, names: Sequence[str]) -> Self:
        """Return a pool with the training and test samples of the domains `names` alone.

        Domains are numbered anew in the order of `names`. Samples keep their order and clients
        their numbers. All public samples stay, because they have no domain.

        Raises:
            DataError: A name is unknown or repeated, or samples have no domains.
        """
        if self.domains is None or self.test_domains is None:
            lacking = "samples" if self.domains is None else "test samples"
            raise DataError(
                f"domains {', '.join(names)} were asked for; {lacking} of {self.name} have no "
                "domains."
            )
        if len(set(names)) < len(names):
            raise DataError(
                f"domains {', '.join(names)} of {self.name} were asked for; name each of them once."
            )
        if missing := [name for name in names if name not in self.domain_names]:
            listed = ", ".join(self.domain_names) or "none"
            raise DataError(
                f"domain {missing[0]!r} was asked for; {self.name} has these by name: {listed}."
            )
        codes = torch.tensor([self.domain_names.index(name) for name in names])
        rows, domains = (self.domains[:, None] == codes).nonzero().unbind(1)
        test_rows, test_domains = (self.test_domains[:, None] == codes).nonzero().unbind(1)
        if not len(rows) or not len(test_rows):
            lacking = "training" if not len(rows) else "test"
            raise DataError(
                f"domains {', '.join(names)} were asked for; {self.name} has no {lacking} samples "
                "of them."
            )
        return replace(
            self,
            inputs=self.inputs[rows],
            targets=self.targets[rows],
            clients=None if self.clients is None else self.clients[rows],
            domains=domains,
            test_inputs=self.test_inputs[test_rows],
            test_targets=self.test_targets[test_rows],
            test_clients=None if self.test_clients is None else self.test_clients[test_rows],
            test_domains=test_domains,
            domain_names=tuple(names),
        )

    def __repr__(self) -> str:
        return f"Pool({self._description()})"

    @override
    def _overview(self) -> Overview:
        public = () if self.public is None else (("public samples", f"{len(self.public):,}"),)
        return Overview(self._description(), rows=public)

    def _description(self) -> str:
        """Return one line for the repr: name, sizes, shape of a sample, targets and domains."""
        sizes = f"{len(self.targets):,} training and {len(self.test_targets):,} test samples"
        parts = [f"{sizes} of {tuple(self.inputs.shape[1:])}", self._target_description()]
        all_domains = [codes for codes in (self.domains, self.test_domains) if codes is not None]
        if names := ", ".join(self.domain_names):
            parts.append(f"domains {names}")
        elif all_domains:
            parts.append(f"{max(int(codes.max()) for codes in all_domains) + 1} domains")
        return f"{self.name}: {', '.join(parts)}"

    def _target_description(self) -> str:
        """Return a few words about the targets, such as "10 classes" or "masks with 3 classes"."""
        if self.has_masks:
            return f"masks with {self.num_classes} classes"
        if self.has_classes:
            return f"{self.num_classes} classes"
        if self.targets.dtype == torch.bool:
            return f"{self.num_outputs} labels"
        columns = tuple(self.targets.shape[1:])
        return f"real targets of {columns}" if columns else "a real target each"

    # --- samples for a model ---------------------------------------------------------------------

    @property
    def example(self) -> Tensor:
        """Return the first two training samples, normalised as a model gets them, to trace a model.

        There is only one if the pool has only one.
        """
        return self.samples(torch.arange(min(2, len(self.inputs))))

    def samples(self, rows: Tensor) -> Tensor:
        """Return the training inputs at the positions `rows` (sample,), normalised for a model."""
        return self._seen(self.inputs[rows])

    def test_samples(self, rows: Tensor) -> Tensor:
        """Return the test inputs at the positions `rows` (sample,), normalised for a model."""
        return self._seen(self.test_inputs[rows])

    @property
    def public_samples(self) -> Tensor | None:
        """Return the public inputs, normalised for a model. None: there are none."""
        return None if self.public is None else self._seen(self.public)

    def _seen(self, stored: Tensor) -> Tensor:
        return stored if self.scale is None else self.scale(stored)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Return the pool with inputs, targets, public inputs and normalisation on a device.

        Real numbers are converted to `dtype`. Bytes, tokens and classes keep their type. The
        numbers of clients and domains stay on their device.
        """

        def moved(values: Tensor) -> Tensor:
            return values.to(device, dtype if values.is_floating_point() else values.dtype)

        return replace(
            self,
            inputs=moved(self.inputs),
            targets=moved(self.targets),
            test_inputs=moved(self.test_inputs),
            test_targets=moved(self.test_targets),
            public=None if self.public is None else moved(self.public),
            scale=None if self.scale is None else self.scale.to(device, dtype),
        )


def _check_parts(parts: Parts, count: int, set_name: str) -> None:
    outside = ((parts.order < 0) | (parts.order >= count)).nonzero()
    if len(outside):
        first = int(outside[0])
        client = int(torch.searchsorted(parts.offsets, first, right=True)) - 1
        raise DataError(
            f"client {client} holds sample {int(parts.order[first])}; the {set_name} set has "
            f"{count}."
        )


def _warn_of_repeats(parts: Parts, count: int, name: str) -> None:
    """Log a warning if training samples are listed more than once, for one client or for several.

    Args:
        parts: Parts of the training set.
        count: Number of training samples in the pool.
        name: Name of the data for the message.
    """
    times = torch.bincount(parts.order, minlength=count)
    repeated = (times > 1).nonzero().flatten()
    if not len(repeated):
        return
    owners = parts.owners[parts.order == repeated[0]].tolist()
    _log.warning(
        "%d of the %d training samples of %s are listed more than once, and are trained on as "
        "often. Sample %d is listed for clients %s.",
        len(repeated),
        count,
        name,
        int(repeated[0]),
        ", ".join(map(str, owners)),
    )
