"""Data of the Hugging Face hub through `datasets`, and partitioners of flwr-datasets.

Both need the extra `hub`. `datasets` also reads local files: `hub("csv", files="mine.csv")`,
`hub("imagefolder", folder="pictures")`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedquilt.data.convert import coded
from fedquilt.data.origin import remembered
from fedquilt.data.parts import Parts
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Normalize, Scale
from fedquilt.data.sources.images import image_errors, stacked
from fedquilt.data.sources.text import Texts, Tokens, predict_words
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install
from fedquilt.names import known

if TYPE_CHECKING:
    from datasets import Dataset


@remembered
def hub(  # noqa: PLR0913  # The parameters are settings of the source.
    path: str,  # owner/name on the hub, or a loader of `datasets`: csv, json, parquet, imagefolder.
    config: str = "",  # Configuration of the data set. Empty: its default.
    train: str = "train",  # Split for training.
    test: str = "test",  # Split for testing. A fifth is held out if there is no such split.
    # Columns of inputs, separated by commas. Empty: images, else text, else all numbers.
    inputs: str = "",
    targets: str = "",  # Column of targets. Empty: the column of class labels.
    clients: str = "",  # Column that names the client of each sample. Empty: none.
    domains: str = "",  # Column that names the domain of each sample. Empty: none.
    files: str = "",  # Training file of a loader. Empty: none.
    test_files: str = "",  # Test file of a loader. Empty: none.
    folder: str = "",  # Folder of a loader. Empty: none.
    size: int = 0,  # Pixels per side to resize images to. 0: all must have the same size.
    normalize: Normalize = "auto",  # How stored values are scaled: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalize.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    vocabulary: int = 10_000,  # Number of words in the vocabulary of text.
    length: int = 20,  # Tokens per sample of text.
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
) -> Pool:
    """Load a data set of the Hugging Face hub, or local files through a loader of `datasets`.

    Text without targets is for next-word prediction. A column of real numbers that is named as
    `targets` is for regression.

    Args:
        path: owner/name on the hub, or a loader of `datasets`, such as csv, json, parquet or
            imagefolder.
        config: Configuration of the data set. Empty: its default.
        train: Name of the split for training.
        test: Name of the split for testing. A fifth of the training samples is held out if there is
            no such split.
        inputs: Columns of inputs, separated by commas. Empty: images, else text, else all numbers.
        targets: Column of targets. Empty: the column of class labels.
        clients: Column that names the client of each sample. Empty: none.
        domains: Column that names the domain of each sample. Empty: none. No effect on text.
        files: Training file of a loader. Empty: none.
        test_files: Test file of a loader, together with `files`. Empty: none.
        folder: Folder of a loader. Empty: none.
        size: Pixels per side to which images are resized. 0: they must all have the same size.
        normalize: Scaling of stored values. "auto": bytes by the mean and standard deviation of
            each channel, real numbers not at all. "channel": both by channel. "none": bytes become
            0 to 1, and real numbers stay.
        mean: Mean of each channel, where white is 1. Empty: measured if `normalize` needs it.
        std: Standard deviation of each channel, together with `mean`. Empty: as for `mean`.
        vocabulary: Number of words in the vocabulary of text. No effect on other inputs.
        length: Tokens per sample of text. No effect on other inputs.
        public: Share of the training samples, in [0, 1), that become public. All clients have them,
            without targets. 0: none.
    """
    sets = _load(path, config, files, test_files, folder)
    if train not in sets:
        raise DataError(f"{path} has no split {train!r}. Found: {', '.join(sets)}.")
    splits = [sets[train], *([sets[test]] if test in sets and test != train else [])]
    columns = _Columns(path, splits[0], inputs, targets, clients, domains)
    name = path.rpartition("/")[2]
    if columns.is_text:
        if targets:
            raise DataError(
                f"{path}: {columns.inputs[0]} is text and {targets} was asked for as its target; "
                "text is for next-word prediction here. Turn it into tokens, and hand the arrays "
                "to fedquilt.data.Pool.of."
            )
        texts = [Texts(list(map(str, s[columns.inputs[0]])), _users(s, clients)) for s in splits]
        second = texts[1] if len(texts) > 1 else None
        tokens = Tokens(vocabulary, length)
        return predict_words(texts[0], second, name, tokens).with_public(public)
    loaded = [columns.arrays(rows, size) for rows in splits]
    client_codes, domain_codes = (_codes(splits, column) for column in (clients, domains))
    target = columns.targets
    labels, classes = _labels(splits, target)
    return Pool.of(
        (loaded[0], labels[0]),
        (loaded[1], labels[1]) if len(splits) > 1 else None,
        clients=client_codes[0][0] if client_codes else None,
        test_clients=client_codes[0][1] if client_codes and len(splits) > 1 else None,
        domains=domain_codes[0][0] if domain_codes else None,
        test_domains=domain_codes[0][1] if domain_codes and len(splits) > 1 else None,
        name=name,
        num_classes=len(classes),
        class_names=classes,
        domain_names=domain_codes[1] if domain_codes else (),
        scale=Scale.of(torch.as_tensor(loaded[0]), normalize, mean, std),
    ).with_public(public)


def _load(
    path: str, config: str, files: str, test_files: str, folder: str
) -> Mapping[str, Dataset]:
    datasets = _package("datasets")
    data_files = {"train": files} | ({"test": test_files} if test_files else {}) if files else None
    try:
        loaded = datasets.load_dataset(
            path, config or None, data_files=data_files, data_dir=folder or None
        )
    except Exception as error:  # Any error of the network, the hub or a file.
        raise DataError(
            f"{path} could not be loaded by datasets.load_dataset: {_said(error)}"
        ) from error
    return dict(loaded)


class _Columns:
    """Roles of columns, as named by the user or as their features suggest."""

    def __init__(
        self, path: str, rows: Dataset, inputs: str, targets: str, clients: str, domains: str
    ) -> None:
        from datasets import ClassLabel, Image, Value

        features = rows.features
        self.path = path
        for column in filter(None, (*_listed(inputs), targets, clients, domains)):
            if column not in features:
                raise DataError(f"{path} has no column {column!r}. Found: {', '.join(features)}.")
        spoken_for = {clients, domains, targets}
        pictures = [name for name, kind in features.items() if isinstance(kind, Image)]
        strings = [
            name
            for name, kind in features.items()
            if isinstance(kind, Value) and "string" in kind.dtype
        ]
        labels = [name for name, kind in features.items() if isinstance(kind, ClassLabel)]
        numbers = [name for name in features if name not in {*pictures, *strings, *labels}]

        def free(names: list[str]) -> list[str]:
            return [name for name in names if name not in spoken_for]

        if not targets and len(free(labels)) == 1:
            targets = free(labels)[0]
            spoken_for.add(targets)
        self.inputs = (
            _listed(inputs)
            or free(pictures)[:1]
            or (free(strings)[:1] if not targets else [])
            or free(numbers)
        )
        self.is_picture = set(self.inputs) <= set(pictures)
        self.is_text = bool(self.inputs) and set(self.inputs) <= set(strings)
        self.targets = targets
        if not self.inputs or (not targets and not self.is_text):
            missing = "targets" if self.inputs else "inputs"
            raise DataError(
                f"{path} does not say which column the {missing} are; name one of "
                f"{', '.join(features)}."
            )

    def arrays(self, rows: Dataset, size: int) -> np.ndarray:
        """Return the inputs of all samples of a split.

        Images are bytes (sample, channel, height, width). Several columns of numbers are stacked as
        (sample, column).

        Args:
            rows: The split.
            size: Pixels per side to which images are resized. 0: they must all have the same size.

        Raises:
            DataError: Rows differ in length, or are not numbers.
        """
        if self.is_picture:
            return self._pictures(rows, size)
        try:
            columns = [np.asarray(rows.with_format("numpy")[name][:]) for name in self.inputs]
            if any(column.dtype == object for column in columns):
                raise ValueError("its rows differ in length")
            array = (
                columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, 1)
            )
        except (ValueError, TypeError) as error:
            raise DataError(
                f"{self.path}: {', '.join(self.inputs)} cannot be one array: {error}."
            ) from error
        return array.astype(np.float32) if array.dtype.kind == "f" else array

    def _pictures(self, rows: Dataset, size: int) -> np.ndarray:
        """Return the images of a split as bytes (sample, channel, height, width).

        They are decoded one at a time. All have one channel if the first image is grey, else three.

        Args:
            rows: The split.
            size: Pixels per side to which images are resized. 0: they must all have the same size.
        """
        column = rows[self.inputs[0]]
        names = [f"image {index} of {self.path}" for index in range(len(rows))]
        with image_errors(f"an image of {self.path}"):
            first = column[0]
            shape = (size, size) if size else (first.height, first.width)
            return stacked(
                column, names, shape, first.mode in ("1", "L", "I", "I;16", "F"), bool(size)
            )


def _listed(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def _users(rows: Dataset, column: str) -> list[str] | None:
    return [str(user) for user in rows[column]] if column else None


def _codes(splits: list[Dataset], column: str) -> tuple[list[np.ndarray], tuple[str, ...]] | None:
    """Number the values of a column, consistently over all splits.

    The result is None if `column` is empty, because no column was named.

    Args:
        splits: Training split and, if it exists, test split.
        column: Name of the column.

    Returns:
        An array of numbers for each split, and the sorted values in the order of their numbers.
    """
    if not column:
        return None
    return coded([np.asarray(rows[column][:]) for rows in splits])


def _labels(splits: list[Dataset], column: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Return the targets of each split, and the names of the classes by number.

    Class labels and text become numbers. Other values stay, and the names are empty then.

    Args:
        splits: Training split and, if it exists, test split.
        column: Name of the column of targets.
    """
    from datasets import ClassLabel

    kind = splits[0].features[column]
    if isinstance(kind, ClassLabel):
        return [np.asarray(rows[column][:]) for rows in splits], tuple(kind.names)
    values = [np.asarray(rows[column][:]) for rows in splits]
    if values[0].dtype.kind in "US":
        codes_and_names = _codes(splits, column)
        assert codes_and_names is not None
        return codes_and_names
    return values, ()


# --- Flower's partitioners ----------------------------------------------------------------------


def deal_by_flower(
    partitioner: str, options: Mapping[str, Any], pool: Pool, num_clients: int | None, seed: int
) -> Parts:
    """Divide the training samples of a pool by a partitioner of flwr-datasets.

    The partitioner sees the columns "label", "client" and "domain", as far as the pool has them.

    Args:
        partitioner: Name of its class.
        options: Arguments of the class. They take precedence over the number of clients and seed.
        pool: Samples to divide.
        num_clients: Number of clients. None: as many partitions as the partitioner makes.
        seed: Random seed, if the class takes one.

    Returns:
        Positions of the samples in each partition.

    Raises:
        DataError: The partitioner fails, makes another number of partitions, or an empty one.
    """
    datasets, flower = _package("datasets"), _package("flwr_datasets").partitioner
    kinds = {
        name: kind
        for name in flower.__all__
        if not inspect.isabstract(kind := getattr(flower, name))
        and not name.startswith("Vertical")  # These divide columns.
    }
    kind = known(kinds, partitioner, "partitioner of flwr-datasets")
    columns = {
        "label": pool.targets if pool.has_classes and pool.targets.dim() == 1 else None,
        "client": pool.clients,
        "domain": pool.domains,
    }
    present = {name: column.numpy() for name, column in columns.items() if column is not None}
    rows = datasets.Dataset.from_dict({**present, "row": np.arange(len(pool.targets))})
    takes = inspect.signature(kind).parameters
    offers: dict[str, Any] = {"num_partitions": num_clients, "partition_by": "label", "seed": seed}
    if "num_partitions" in takes and num_clients is None and "num_partitions" not in options:
        raise DataError(
            f"{partitioner} partitions {pool.name} among a number of clients; none was asked for."
        )
    try:
        dealer = kind(
            **{key: value for key, value in offers.items() if key in takes} | dict(options)
        )
        dealer.dataset = rows
        with warnings.catch_warnings():
            # `datasets` calls a deprecated sorting function of pyarrow.
            warnings.simplefilter("ignore", FutureWarning)
            parts = Parts.of(
                [dealer.load_partition(number)["row"][:] for number in range(dealer.num_partitions)]
            )
    except Exception as error:
        raise DataError(
            f"{partitioner} of flwr-datasets could not partition {pool.name}: {_said(error)}"
        ) from error
    if num_clients is not None and len(parts) != num_clients:
        raise DataError(
            f"{num_clients} clients were asked for; {partitioner} partitioned {pool.name} among "
            f"{len(parts)}."
        )
    if len(empty := (parts.sizes == 0).nonzero()):
        raise DataError(
            f"{partitioner} of flwr-datasets left client {int(empty[0])} without samples of "
            f"{pool.name}."
        )
    return parts


def _package(name: str) -> Any:
    from importlib import import_module

    try:
        if name == "flwr_datasets":
            import_module("flwr_datasets.partitioner")
        return import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"this needs {name}, which is not installed: {how_to_install('hub')}."
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
