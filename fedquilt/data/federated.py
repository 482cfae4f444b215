"""Samples before and after they are partitioned among clients.

A `Pool` holds samples that belong to no client yet. `FederatedData` is a pool together with the
samples that each client holds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from fedquilt import noise
from fedquilt.data.datasets import arrays_of
from fedquilt.data.partitions import Iid, Natural, Partition
from fedquilt.data.parts import Array, Parts
from fedquilt.errors import ConfigError, DataError

if TYPE_CHECKING:
    from fedquilt.data.origin import Origin

Samples = tuple[Array, Array] | Dataset[Any]  # (inputs, targets), or a Dataset of such pairs
IGNORED = -100  # Target of padding, which counts neither in the loss nor in the accuracy.
MAX_CLASSES = 2**20  # Limit on classes. Larger targets are taken for something else than labels.
Normalise = Literal["auto", "channel", "none"]

_ONE = "one array or tensor of all samples is wanted"
_JOIN = (
    "If there is one array for each client, join the arrays of all clients (numpy.concatenate), "
    "and list each client's rows in `parts`."
)
_VALIDATION_SITE = 17  # Part of the key of the random numbers that choose validation samples.
_CHUNK = 1024  # Samples that are converted to float64 at a time to measure statistics.
_CHUNK_VALUES = 2**24  # Values converted at a time at most, for large images and volumes.
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Scale:
    """Normalisation of stored samples for a model: (x − mean) / std in each channel.

    It is applied to batches, so that images stay bytes in memory. Bytes take a quarter of the
    memory of float32.
    """

    mean: Tensor  # Mean in stored units, in a shape that broadcasts: (channel, 1, 1).
    std: Tensor  # Standard deviation, in the same shape.

    @staticmethod
    def of(
        inputs: Tensor,
        normalize: Normalise = "auto",
        mean: Sequence[float] = (),
        std: Sequence[float] = (),
        counted: Tensor | None = None,
    ) -> Scale | None:
        """Return the normalisation of inputs. None: a model gets the stored values.

        Mean and standard deviation are those that are given, or else those of the inputs. Given
        numbers refer to values from 0 to 1 where inputs are bytes.

        Args:
            inputs: (sample, channel, …) Stored samples.
            normalize: Kind of normalisation. docs/data.md has a table.
            mean: Mean of each channel. Empty: measured.
            std: Standard deviation of each channel, together with `mean`.
            counted: (sample, …) False at positions that are not measured, because they are padding.
                None: all positions are measured.
        """
        unit = 255.0 if inputs.dtype == torch.uint8 else 1.0
        if bool(mean) != bool(std):
            raise ConfigError("mean and std go together; only one of them was given.")
        if not mean and (normalize == "none" or (normalize == "auto" and unit == 1)):
            return None if unit == 1 else Scale(torch.zeros(1), torch.full((1,), unit))
        if unit == 1 and not inputs.is_floating_point():
            raise ConfigError(
                f"normalize was asked for inputs of {inputs.dtype}; only bytes and real numbers "
                "have it."
            )
        channels = inputs.shape[1] if inputs.dim() > 1 else 1
        if mean and not ({len(mean), len(std)} <= {1, channels}):
            raise ConfigError(
                f"{len(mean)} means and {len(std)} stds were given; a sample has {channels} "
                "channels."
            )
        if mean:
            centre, spread = unit * torch.tensor(mean), unit * torch.tensor(std)
        else:
            centre, spread = _moments(inputs, counted)
        if not bool((spread > 0).all()):
            raise ConfigError(f"std = {tuple(std)} was asked for; every one must be above 0.")
        shape = (-1, *[1] * (inputs.dim() - 2)) if inputs.dim() > 1 else (1,)
        return Scale(centre.float().reshape(shape), spread.float().reshape(shape))

    def __call__(self, stored: Tensor) -> Tensor:
        return (stored.to(self.mean.dtype) - self.mean) / self.std

    def to(self, device: torch.device, dtype: torch.dtype) -> Scale:
        return Scale(self.mean.to(device, dtype), self.std.to(device, dtype))


def _moments(inputs: Tensor, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every channel.

    The standard deviation of a constant channel is 1, so that dividing by it has no effect.

    Args:
        inputs: (sample, channel, …)
        counted: (sample, …) False at positions that are left out. None: all positions count.
    """
    total, square = torch.zeros(2, inputs.shape[1] if inputs.dim() > 1 else 1, dtype=torch.float64)
    step = max(1, min(_CHUNK, _CHUNK_VALUES // max(1, inputs[:1].numel())))
    for start in range(0, len(inputs), step):
        chunk = inputs[start : start + step]
        values = chunk.double().reshape(len(chunk), len(total), -1)
        if counted is not None:
            values = values * counted[start : start + step].reshape(len(chunk), 1, -1)
        total += values.sum((0, 2))
        square += values.square().sum((0, 2))
    count = inputs.numel() / len(total) if counted is None else max(1, int(counted.sum()))
    mean = total / count
    std = (square / count - mean.square()).clamp(min=0).sqrt()
    return mean, torch.where(std > 0, std, 1.0)


@dataclass(frozen=True, eq=False)
class Pool:
    """Training and test samples that belong to no client yet, with facts about each sample."""

    inputs: Tensor  # (sample, …) Bytes (images), real numbers, or int64 (tokens).
    # (sample, …) Classes (int64), one boolean per label (multi-label), or real numbers.
    targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor
    clients: Tensor | None = None  # (sample,) User that each sample comes from.
    test_clients: Tensor | None = None
    domains: Tensor | None = None  # (sample,) Domain that each sample comes from.
    test_domains: Tensor | None = None
    public: Tensor | None = None  # Samples without targets that all clients have.
    name: str = "data"
    num_classes: int = 0  # Number of classes. 0: targets are not classes.
    class_names: tuple[str, ...] = ()  # Names of classes. For text: the vocabulary.
    domain_names: tuple[str, ...] = ()
    scale: Scale | None = None

    @staticmethod
    def of(
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
        train = _read(train, name, "training")
        test = None if test is None else _read(test, name, "test")
        train, test, class_names = _without_names(train, test, class_names, name)
        x, y = _pair(train, name, "training")
        owners, test_owners, _ = _codes(
            clients, None if test is None else test_clients, f"{name}: clients"
        )
        homes, test_homes, found_names = _codes(
            domains, None if test is None else test_domains, f"{name}: domains"
        )
        _check(name, "training", x, y, {"clients": owners, "domains": homes})
        if test is None:
            kept_rows, held_rows = held_out(len(x), owners if owners is not None else homes, name)
            tx, ty, x, y = x[held_rows], y[held_rows], x[kept_rows], y[kept_rows]
            test_owners, owners = (
                (None, None) if owners is None else (owners[held_rows], owners[kept_rows])
            )
            test_homes, homes = (
                (None, None) if homes is None else (homes[held_rows], homes[kept_rows])
            )
        else:
            tx, ty = _pair(test, name, "test")
            _check(name, "test", tx, ty, {"clients": test_owners, "domains": test_homes})
        if x.shape[1:] != tx.shape[1:] or y.shape[1:] != ty.shape[1:]:
            train_shapes, test_shapes = (
                (tuple(i.shape[1:]), tuple(t.shape[1:])) for i, t in ((x, y), (tx, ty))
            )
            raise DataError(
                f"{name}: training samples have shape {train_shapes[0]} (targets "
                f"{train_shapes[1]}) and test samples {test_shapes[0]} ({test_shapes[1]}); they "
                "must be alike."
            )
        if x.dtype != tx.dtype:
            raise DataError(
                f"{name}: training inputs are {x.dtype} and test inputs {tx.dtype}; they must be "
                "alike."
            )
        if y.dtype != ty.dtype:
            raise DataError(
                f"{name}: training targets are {y.dtype} and test targets {ty.dtype}; they must be "
                "alike."
            )
        _warn_of_nan(tx, name)
        num_classes = _num_classes(name, y, ty, num_classes)
        return Pool(
            x,
            y,
            tx,
            ty,
            owners,
            test_owners,
            homes,
            test_homes,
            None if public is None else _inputs(public, name),
            name,
            num_classes,
            class_names,
            domain_names or found_names,
            scale or (Scale.of(x, "none") if x.dtype == torch.uint8 else None),
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
        """Partition the samples among clients.

        Args:
            num_clients: Number of clients. None: as many as the data has of its own.
            partition: Kind of partition. None: by the clients of the data if it has any, else IID.
            seed: Random seed of the partition.
        """
        if not isinstance(partition, Partition | None):
            raise DataError(
                f"{self.name} was to be dealt by {partition!r}; a partition fits, such as "
                "pool.partition(20, fq.data.Iid(), seed=0)."
            )
        partition = partition or self.usual
        dealt = self.dealt(*partition.split(self, num_clients, seed))
        # If the source has partitioned its data, a settings file cannot name another partition.
        is_undealt = not isinstance(self, FederatedData) or (self.origin and self.origin.partition)
        origin = self.origin if is_undealt else None
        return dealt.remembering(origin and origin.dealt(partition, dealt.num_clients, seed))

    def dealt(
        self,
        parts: Sequence[Sequence[int] | Array],
        test_parts: Sequence[Sequence[int] | Array] | None = None,
    ) -> FederatedData:
        """Return the pool together with the positions of each client's samples, which are checked.

        Args:
            parts: Positions of each client's training samples, or a boolean mask for each client.
            test_parts: The same for test samples. None: clients have no test samples of their own.
        """
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
        """Make a share of the training samples public, without their targets.

        Clients no longer train on these samples.

        Args:
            share: Share of the training samples, in [0, 1). 0 has no effect.
        """
        if share == 0:
            return self
        if not 0 < share < 1:
            raise ConfigError(
                f"public = {share} was asked for; it is a share of the training samples, in [0, 1)."
            )
        order = noise.order(noise.key(0, 15), len(self.targets))
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
        """Keep the training and test samples of some domains, numbered in the order of `names`.

        Samples keep their order and clients their numbers. All public samples stay, because they
        have no domain.

        Raises:
            DataError: A name is unknown or repeated, samples have no domains, or the data is
                partitioned already, so that its parts would name other samples.
        """
        if isinstance(self, FederatedData):
            raise DataError(
                f"domains {', '.join(names)} were asked for; {self.name} is dealt already. Choose "
                "them before."
            )
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
        return f"Pool({self._told()})"

    def _told(self) -> str:
        """Return one line about the samples. A repr with all values would be of no use."""
        sizes = f"{len(self.targets):,} training and {len(self.test_targets):,} test samples"
        parts = [f"{sizes} of {tuple(self.inputs.shape[1:])}", self._targets_told()]
        all_domains = [codes for codes in (self.domains, self.test_domains) if codes is not None]
        if names := ", ".join(self.domain_names):
            parts.append(f"domains {names}")
        elif all_domains:
            parts.append(f"{max(int(codes.max()) for codes in all_domains) + 1} domains")
        return f"{self.name}: {', '.join(parts)}"

    def _targets_told(self) -> str:
        """Return a few words about the targets."""
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
        """Return two samples as a model gets them, with which it can be traced."""
        return self.samples(torch.arange(min(2, len(self.inputs))))

    def samples(self, rows: Tensor) -> Tensor:
        """Return the training samples at some positions as a model gets them."""
        return self._seen(self.inputs[rows])

    def test_samples(self, rows: Tensor) -> Tensor:
        """Return the test samples at some positions as a model gets them."""
        return self._seen(self.test_inputs[rows])

    @property
    def public_samples(self) -> Tensor | None:
        """Return the public samples as a model gets them. None: there are none."""
        return None if self.public is None else self._seen(self.public)

    def _seen(self, stored: Tensor) -> Tensor:
        return stored if self.scale is None else self.scale(stored)

    def to(self, device: torch.device, dtype: torch.dtype) -> Self:
        """Move samples to a device.

        Real numbers are converted to `dtype`. Bytes, tokens and classes keep their type.
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


@dataclass(frozen=True, eq=False, kw_only=True)
class FederatedData(Pool):
    """Training samples that are partitioned among clients, and test samples."""

    parts: Parts  # Positions of each client's training samples.
    # Positions of each client's own test samples, which may be empty. None: no client has any.
    test_parts: Parts | None = None
    # Positions of the training samples that each client holds back for validation. None: clients
    # hold back nothing.
    validation_parts: Parts | None = None

    @staticmethod
    def of(  # type: ignore[override]  # a pool needs no parts
        train: Samples,
        test: Samples,
        parts: Sequence[Sequence[int] | Array],
        test_parts: Sequence[Sequence[int] | Array] | None = None,
        name: str = "data",
    ) -> FederatedData:
        """Check arrays or tensors and wrap them with the samples of each client.

        Args:
            train: (inputs, targets), or a torch Dataset of such pairs.
            test: The same for the test set.
            parts: Positions of each client's training samples, or a boolean mask for each client.
            test_parts: The same for test samples. None: clients have no test samples of their own.
            name: Name of the data for tables and messages.
        """
        if test is None:  # Holding out a fifth would change which samples are at the positions.
            raise DataError(
                f"{name}: parts were given and no test set. Give (inputs, targets) to test on; or "
                "say whose each "
                "sample is, Pool.of(train, clients=owners).partition(), and a fifth of every "
                "client's is held out."
            )
        return Pool.of(train, test, name=name).dealt(parts, test_parts)

    def __repr__(self) -> str:
        validation = ""
        if self.validation_parts is not None:
            validation = (
                f", which hold back {len(self.validation_parts.order):,} training samples "
                "for validation"
            )
        return f"FederatedData({self._told()}; dealt to {self.num_clients:,} clients{validation})"

    @property
    def num_clients(self) -> int:
        return len(self.parts)

    def size(self, client: int) -> int:
        return len(self.parts[client])

    def among(self, count: int) -> Self:
        """Return the data of the first clients alone. Samples of other clients are not used.

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
        """Hold back a share of every client's training samples for validation.

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
                "training. Fewer clients "
                "have more samples each."
            )
        self._check_unshared(request)
        rounded = (sizes.double() * share).round().long()
        counts = rounded.clamp(min=1).minimum(sizes - 1)
        validation, training = self.parts.divided(counts, noise.key(0, _VALIDATION_SITE))
        held_back = replace(self, parts=training, validation_parts=validation)
        return held_back.remembering(self.origin and self.origin.with_validation(share))

    def _check_unshared(self, asked: str) -> None:
        """Refuse parts that list a sample twice."""
        ordered = self.parts.order.sort().values
        shared = ordered[1:][ordered[1:] == ordered[:-1]]
        if len(shared):
            owners = self.parts.owners[self.parts.order == shared[0]].tolist()
            raise DataError(
                f"{asked}; sample {int(shared[0])} of {self.name} is listed twice, for clients "
                f"{owners[0]} and "
                f"{owners[1]}. It could be trained on and held back. Give every sample to one "
                "client, and once."
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
                f"{self.name} hold back "
                "none. data.validation = 0.1 in a file, data.with_validation(0.1) in Python, holds "
                "back a tenth of "
                "every client's training samples."
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

    def held(self, client: int, num_classes: int) -> Tensor:
        """Return the classes of which a client has samples.

        Args:
            client: Number of the client.
            num_classes: Length of the result.

        Returns:
            (class,) True where the client has samples of the class.

        Raises:
            DataError: Targets are not classes.
        """
        if not self.has_classes:
            raise DataError(
                f"{self.name} was asked which classes client {client} holds; it has "
                f"{self._targets_told()}. Masked "
                "losses and class rows need one class for each target, as whole numbers."
            )
        targets = self.targets[self.parts[client].to(self.targets.device)]
        mask = torch.zeros(num_classes, dtype=torch.bool, device=targets.device)
        # Targets at or above num_classes, such as 255, are ignored. The task has checked that
        # no others are out of range.
        present = targets[(targets >= 0) & (targets < num_classes)]
        return mask.index_fill_(0, present, True)

    def flaw(self, client: int) -> str:
        """Return a reason why no model can learn from a client's samples. Empty: there is none.

        It is called after the training of the client has failed.
        """
        rows = self.parts[client].to(self.targets.device)
        if bad := int((~self.inputs[rows].isfinite()).reshape(len(rows), -1).any(1).sum()):
            return f"{bad} of its {len(rows)} samples hold values that are not finite"
        counted = bool((self.targets[rows] != IGNORED).any())
        return "" if counted else f"It has no target that counts: all are {IGNORED}"


# --- checks -------------------------------------------------------------------------------------


def _read(given: Samples, name: str, what: str) -> tuple[Array, Array]:
    """Return (inputs, targets). A torch Dataset is read into arrays."""
    return arrays_of(given, f"{name}: the {what} set") if isinstance(given, Dataset) else given


def _without_names(
    train: tuple[Array, Array],
    test: tuple[Array, Array] | None,
    class_names: tuple[str, ...],
    name: str,
) -> tuple[tuple[Array, Array], tuple[Array, Array] | None, tuple[str, ...]]:
    """Replace targets that are names by numbers.

    Args:
        train: (inputs, targets) of the training set.
        test: The same for the test set. None: there is none.
        class_names: Names in the order of their numbers. Empty: the names in the targets, sorted.
        name: Name of the data for messages.

    Returns:
        Both sets, and the names of the classes.

    Raises:
        DataError: A target is not in `class_names`.
    """
    sets = [train] if test is None else [train, test]
    if not all(
        isinstance(pair, (tuple, list)) and len(pair) == 2 and _are_names(pair[1]) for pair in sets
    ):
        return train, test, class_names
    codes, names = coded([np.asarray(targets).astype(str) for _, targets in sets])
    if class_names:
        if unknown := [label for label in names if label not in class_names]:
            raise DataError(
                f"{name}: there is a target {unknown[0]!r}; classes are {', '.join(class_names)}."
            )
        numbers = np.asarray([class_names.index(label) for label in names])
        codes, names = [numbers[code] for code in codes], tuple(class_names)
    pairs = [(inputs, code) for (inputs, _), code in zip(sets, codes, strict=True)]
    return pairs[0], None if test is None else pairs[1], names


def _are_names(targets: Any) -> bool:
    """Return True if targets are text: an array, a list or a column of a table."""
    if isinstance(targets, Tensor):
        return False
    try:
        array = np.asarray(targets)
    except ValueError:  # They have different lengths. `_targets` reports it.
        return False
    return array.dtype.kind == "U" or _called(array)


def _pair(given: tuple[Array, Array], name: str, what: str) -> tuple[Tensor, Tensor]:
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        raise DataError(
            f"{name}: the {what} set is a {type(given).__name__}; (inputs, targets) belong there, "
            f"and of each {_ONE}."
        )
    inputs = _inputs(given[0], name)
    targets = _targets(given[1], f"{name}: the {what} targets")
    return inputs, _without_column(targets, inputs)


def _without_column(targets: Tensor, inputs: Tensor) -> Tensor:
    """Return classes of shape (sample, 1) as (sample,), because columns of tables have that shape.

    With inputs of shape (sample, 1) the targets stay, because these may be sequences of one token
    with one class each.
    """
    is_column = targets.dtype == torch.int64 and targets.shape[1:] == (1,)
    return targets.squeeze(1) if is_column and inputs.shape[1:] != (1,) else targets


def _inputs(given: Array, name: str) -> Tensor:
    if isinstance(given, np.ndarray) and given.dtype.kind not in "buif":
        raise DataError(
            f"{name}: inputs are {given.dtype}; bytes, real numbers or whole numbers fit."
        )
    if isinstance(given, np.ndarray) and given.dtype.kind == "u" and given.dtype != np.uint8:
        given = given.astype(np.int64)  # torch supports few operations on other unsigned types.
    # Several inputs per sample are refused here, because torch might stack them.
    if isinstance(given, tuple) and any(isinstance(array, (Tensor, np.ndarray)) for array in given):
        raise DataError(f"{name}: {len(given)} inputs a sample were given; {_ONE}. {_JOIN}")
    try:
        if isinstance(given, list) and any(isinstance(array, np.ndarray) for array in given):
            given = np.asarray(given)  # torch is slow with lists of arrays, and warns.
        inputs = torch.as_tensor(given).detach()  # Samples need no gradients.
    except (TypeError, ValueError, RuntimeError) as error:
        remedy = f" {_JOIN}" if isinstance(given, list) else ""
        raise DataError(
            f"{name}: inputs are a {type(given).__name__}; {_ONE} ({error}).{remedy}"
        ) from error
    is_integer = not inputs.is_floating_point() and inputs.dtype != torch.uint8
    return inputs.long() if is_integer else inputs


def _targets(given: Array, what: str) -> Tensor:
    """Return classes as int64, rows of labels as bool, and real numbers as float32 or float64."""
    try:
        given = given.numpy(force=True) if isinstance(given, Tensor) else np.asarray(given)
    except ValueError as error:
        raise DataError(
            f"{what} are a {type(given).__name__} of different lengths; {_ONE}. {_JOIN}"
        ) from error
    if given.dtype.kind == "f":
        floats = given if given.dtype == np.float64 else given.astype(np.float32)
        real = torch.as_tensor(floats)
        if num_bad := int((~real.isfinite()).sum()):
            raise DataError(
                f"{what}: {num_bad} of {real.numel()} are not finite; leave out these samples, or "
                "fill them in."
            )
        return real
    if given.dtype.kind == "b" and given.ndim == 2:
        return torch.as_tensor(given)
    return _numbers(
        given, what, "classes are whole numbers (int64), and targets of a regression real numbers"
    )


def _num_classes(name: str, targets: Tensor, test_targets: Tensor, announced: int) -> int:
    """Return the number of classes. 0: targets are not classes.

    It is the announced number, or else one more than the largest target.

    Args:
        name: Name of the data for messages.
        targets: Targets of the training set.
        test_targets: Targets of the test set.
        announced: Number of classes that the user gave. 0: none was given.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool:
        if announced:
            raise DataError(
                f"{name}: {announced} classes were announced; targets are {targets.dtype}. Give "
                "classes as whole "
                "numbers from 0 on."
            )
        return 0
    top = int(max(targets.max(), test_targets.max()))
    if top < 0:
        raise DataError(
            f"{name}: no target counts, because all are {IGNORED}. Give at least one class from 0 "
            "on."
        )
    if 0 < announced <= top:
        raise DataError(f"{name}: there is a target {top}; {announced} classes were announced.")
    if max(announced, top + 1) > MAX_CLASSES:
        raise DataError(
            f"{name}: a target is {top}, which would make {max(announced, top + 1):,} classes; at "
            "most "
            f"{MAX_CLASSES:,} fit. Number the classes from 0 on without gaps, or give their names."
        )
    return announced or top + 1


def _numbers(given: Array, what: str, fit: str) -> Tensor:
    given = given.numpy(force=True) if isinstance(given, Tensor) else np.asarray(given)
    if given.dtype.kind not in "bui":
        raise DataError(f"{what} are {given.dtype}; {fit}.")
    return torch.as_tensor(given.astype(np.int64))


def _codes(
    train: Array | Sequence[str] | None, test: Array | Sequence[str] | None, what: str
) -> tuple[Tensor | None, Tensor | None, tuple[str, ...]]:
    """Return clients or domains of both sets as numbers, and their names if names were given."""
    present = [labels for labels in (train, test) if labels is not None]
    plain = [
        labels.numpy(force=True) if isinstance(labels, Tensor) else np.asarray(labels)
        for labels in present
    ]
    plain = [labels.astype(str) if _called(labels) else labels for labels in plain]
    names: tuple[str, ...] = ()
    if plain and all(labels.dtype.kind == "U" for labels in plain):
        plain, names = coded(plain)
    codes = [_numbers(labels, what, "whole numbers from 0 on fit, or names") for labels in plain]
    return None if train is None else codes[0], None if test is None else codes[-1], names


def _called(codes: np.ndarray) -> bool:
    """Return True if these are names. Columns of tables hold names as objects."""
    if not codes.size:
        return False
    return codes.dtype.kind == "S" or (
        codes.dtype.kind == "O" and all(isinstance(label, str) for label in codes.flat)
    )


def coded(named: Sequence[np.ndarray]) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Number the names in several arrays.

    Args:
        named: Arrays of names, of any shapes.

    Returns:
        Arrays of numbers in the same shapes, and the names in the order of their numbers.
    """
    names, codes = np.unique(
        np.concatenate([array.reshape(-1) for array in named]), return_inverse=True
    )
    pieces = np.split(codes, np.cumsum([array.size for array in named])[:-1])
    return [piece.reshape(array.shape) for piece, array in zip(pieces, named, strict=True)], tuple(
        map(str, names)
    )


def _check(
    name: str, what: str, inputs: Tensor, targets: Tensor, along: dict[str, Tensor | None]
) -> None:
    if not (inputs.dim() and targets.dim()):
        raise DataError(
            f"{name}: the {what} set has a single number for inputs or targets; {_ONE}."
        )
    if len(inputs) != len(targets):
        raise DataError(
            f"{name}: the {what} set has {len(inputs)} inputs and {len(targets)} targets; they "
            "must pair up."
        )
    if not len(inputs):
        raise DataError(f"{name}: the {what} set is empty; it needs at least one sample.")
    are_classes = targets.dtype == torch.int64
    if (
        are_classes
        and int(low := targets.min()) < 0
        and bool((targets[targets < 0] != IGNORED).any())
    ):
        raise DataError(
            f"{name}: a {what} target is {int(low)}; classes count from 0, and {IGNORED} is for "
            "padding."
        )
    for noun, codes in along.items():
        if codes is not None and (codes.dim() != 1 or len(codes) != len(inputs)):
            raise DataError(
                f"{name}: the {what} set has {len(inputs)} samples and {tuple(codes.shape)} {noun}."
            )
        if codes is not None and int(codes.min()) < 0:
            raise DataError(f"{name}: one of the {noun} is {int(codes.min())}; they count from 0.")


def _check_parts(parts: Parts, count: int, what: str) -> None:
    outside = ((parts.order < 0) | (parts.order >= count)).nonzero()
    if len(outside):
        first = int(outside[0])
        client = int(torch.searchsorted(parts.offsets, first, right=True)) - 1
        raise DataError(
            f"client {client} holds sample {int(parts.order[first])}; the {what} set has {count}."
        )


def _warn_of_repeats(parts: Parts, count: int, name: str) -> None:
    """Warn if training samples are listed more than once, for one client or for several."""
    times = torch.bincount(parts.order, minlength=count)
    repeated = (times > 1).nonzero().flatten()
    if not len(repeated):
        return
    owners = parts.owners[parts.order == repeated[0]].tolist()
    _log.warning(
        "%d of the %d training samples of %s are listed more than once, and are trained on as "
        "often. Sample %d is "
        "listed for clients %s.",
        len(repeated),
        count,
        name,
        int(repeated[0]),
        ", ".join(map(str, owners)),
    )


def _warn_of_nan(test_inputs: Tensor, name: str) -> None:
    """Warn if test samples hold NaN or infinite values, because models predict them wrongly."""
    if not test_inputs.is_floating_point():
        return
    is_finite = test_inputs.isfinite().reshape(len(test_inputs), -1).all(1)
    if not bool(is_finite.all()):
        _log.warning(
            "%d of the %d test samples of %s hold values that are not finite (NaN or infinite). "
            "Predictions for them "
            "count as wrong. Leave out these samples, or fill in the values.",
            int((~is_finite).sum()),
            len(test_inputs),
            name,
        )


def held_out(
    count: int, groups: Tensor | None, name: str, what: str = "samples"
) -> tuple[Tensor, Tensor]:
    """Choose a fifth of the samples for testing and log a warning about it.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample, of each of which a fifth is chosen. None:
            a fifth of all samples is chosen.
        name: Name of the data for messages.
        what: Noun for the samples in messages.

    Returns:
        Positions of the other samples, and of those that are held out.

    Raises:
        DataError: There are too few samples.
    """
    remaining, tests = fifth(count, groups)
    if not len(tests):
        whose = "" if groups is None else " of every client or domain"
        raise DataError(
            f"{name} has no test part, and {count} {what} are too few to hold out a fifth{whose}."
        )
    _log.warning(
        "%s has no test part: %d of its %d %s are held out for testing.",
        name,
        len(tests),
        count,
        what,
    )
    return remaining, tests


def fifth(count: int, groups: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Split samples at random into four fifths and one fifth.

    Args:
        count: Number of samples.
        groups: (sample,) Client or domain of each sample. Each of these is split by itself, so that
            every client keeps samples. None: all samples are split together.

    Returns:
        Positions of four fifths of the samples, and of one fifth.
    """
    order = noise.order(noise.key(0, 14), count)
    if groups is None:
        return order[count // 5 :], order[: count // 5]
    order = order[torch.argsort(groups[order], stable=True)]
    sizes = torch.bincount(groups)
    first = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    is_held_out = torch.arange(count) - first < (sizes // 5).repeat_interleave(sizes)
    return order[~is_held_out], order[is_held_out]
