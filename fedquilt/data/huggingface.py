"""Data of the Hugging Face hub, through `datasets`, and the partitioners of flwr-datasets. Extra: fedquilt[hub].

`datasets` reads local files by the same way: `hub("csv", files="mine.csv")`, `hub("imagefolder", folder="pictures")`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedquilt.data.federated import Normalise, Pool, Scale, coded
from fedquilt.data.parts import Parts
from fedquilt.data.pictures import image_errors, stacked
from fedquilt.data.words import Texts, predict_words
from fedquilt.errors import ConfigError, DataError
from fedquilt.names import known

if TYPE_CHECKING:
    from datasets import Dataset


def hub(
    path: str,
    config: str = "",
    train: str = "train",
    test: str = "test",
    inputs: str = "",
    targets: str = "",
    clients: str = "",
    domains: str = "",
    files: str = "",
    test_files: str = "",
    folder: str = "",
    size: int = 0,
    normalise: Normalise = "auto",
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    vocabulary: int = 10_000,
    length: int = 20,
    public: float = 0.0,
) -> Pool:
    """A data set of the hub by its owner/name, or a loader of `datasets` (csv, json, parquet, imagefolder …) on files.

    `config`, `train` and `test` name its configuration and splits; without a test split a fifth is held out. `inputs`,
    `targets`, `clients` and `domains` name columns. Left open, inputs are the column of images, else the text, else all
    columns of numbers; targets the column of class labels. Text without targets is next-word prediction. A column of
    real numbers that is named as `targets` is for regression.
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
                f"{path}: {columns.inputs[0]} is text and {targets} was asked for as its target; text is for next-word "
                "prediction here. Turn it into tokens, and hand the arrays to fedquilt.data.Pool.of."
            )
        texts = [Texts(list(map(str, s[columns.inputs[0]])), _users(s, clients)) for s in splits]
        second = texts[1] if len(texts) > 1 else None
        return predict_words(texts[0], second, name, vocabulary, length).with_public(public)
    loaded = [columns.arrays(one, size) for one in splits]
    own, home = (_codes(splits, column) for column in (clients, domains))
    target = columns.targets
    labels, classes = _labels(splits, target)
    return Pool.of(
        (loaded[0], labels[0]),
        (loaded[1], labels[1]) if len(splits) > 1 else None,
        clients=own[0][0] if own else None,
        test_clients=own[0][1] if own and len(splits) > 1 else None,
        domains=home[0][0] if home else None,
        test_domains=home[0][1] if home and len(splits) > 1 else None,
        name=name,
        num_classes=len(classes),
        class_names=classes,
        domain_names=home[1] if home else (),
        scale=Scale.of(torch.as_tensor(loaded[0]), normalise, mean, std),
    ).with_public(public)


def _load(
    path: str, config: str, files: str, test_files: str, folder: str
) -> Mapping[str, Dataset]:
    datasets = _package("datasets")
    given = {"train": files} | ({"test": test_files} if test_files else {}) if files else None
    try:
        found = datasets.load_dataset(
            path, config or None, data_files=given, data_dir=folder or None
        )
    except Exception as error:  # whatever the network, the hub, a file or its format came up with
        raise DataError(
            f"{path} could not be loaded by datasets.load_dataset: {_said(error)}"
        ) from error
    return dict(found)


class _Columns:
    """Which columns are what, as asked for or as their features say."""

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
                f"{path} does not say which column the {missing} are; name one of {', '.join(features)}."
            )

    def arrays(self, rows: Dataset, size: int) -> np.ndarray:
        """The inputs: (sample, channel, height, width) bytes of images, or the columns of numbers side by side."""
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
        """Return images, which `datasets` decodes when they are asked for."""
        column = rows[self.inputs[0]]
        names = [f"image {place} of {self.path}" for place in range(len(rows))]
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
    """Numbers for what a column calls by names, the same in every split."""
    if not column:
        return None
    return coded([np.asarray(rows[column][:]) for rows in splits])


def _labels(splits: list[Dataset], column: str) -> tuple[list[np.ndarray], tuple[str, ...]]:
    """Classes as numbers, with their names where the column has any."""
    from datasets import ClassLabel

    kind = splits[0].features[column]
    if isinstance(kind, ClassLabel):
        return [np.asarray(rows[column][:]) for rows in splits], tuple(kind.names)
    values = [np.asarray(rows[column][:]) for rows in splits]
    if values[0].dtype.kind in "US":
        found = _codes(splits, column)
        assert found is not None
        return found
    return values, ()


# --- Flower's partitioners --------------------------------------------------------------------------------------


def deal_by_flower(
    partitioner: str, options: Mapping[str, Any], pool: Pool, num_clients: int | None, seed: int
) -> Parts:
    """The rows a partitioner of flwr-datasets gives to each of its partitions."""
    datasets, flower = _package("datasets"), _package("flwr_datasets").partitioner
    kinds = {
        name: kind
        for name in flower.__all__
        if not inspect.isabstract(kind := getattr(flower, name))
        and not name.startswith("Vertical")  # deals columns
    }
    kind = known(kinds, partitioner, "partitioner of flwr-datasets")
    columns = {
        "label": pool.targets if pool.has_classes and pool.targets.dim() == 1 else None,
        "client": pool.clients,
        "domain": pool.domains,
    }
    there = {name: column.numpy() for name, column in columns.items() if column is not None}
    rows = datasets.Dataset.from_dict({**there, "row": np.arange(len(pool.targets))})
    takes = inspect.signature(kind).parameters
    offers: dict[str, Any] = {"num_partitions": num_clients, "partition_by": "label", "seed": seed}
    if "num_partitions" in takes and num_clients is None and "num_partitions" not in options:
        raise DataError(
            f"{partitioner} deals {pool.name} to a number of clients; none was asked for."
        )
    try:
        dealer = kind(
            **{key: value for key, value in offers.items() if key in takes} | dict(options)
        )
        dealer.dataset = rows
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", FutureWarning
            )  # between pyarrow and datasets, about sorting
            parts = Parts.of(
                [dealer.load_partition(one)["row"][:] for one in range(dealer.num_partitions)]
            )
    except Exception as error:
        raise DataError(
            f"{partitioner} of flwr-datasets could not deal {pool.name}: {_said(error)}"
        ) from error
    if num_clients is not None and len(parts) != num_clients:
        raise DataError(
            f"{num_clients} clients were asked for; {partitioner} dealt {pool.name} to {len(parts)}."
        )
    if len(empty := (parts.sizes == 0).nonzero()):
        raise DataError(
            f"{partitioner} of flwr-datasets left client {int(empty[0])} without samples of {pool.name}."
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
            f"this needs {name}, which is not installed: pip install 'fedquilt[hub]'."
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
