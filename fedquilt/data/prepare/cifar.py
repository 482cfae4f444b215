"""CIFAR in its binary form: records of labels and 3 × 32 × 32 bytes. Nothing is unpickled."""

from __future__ import annotations

import numpy as np

from fedquilt.data.prepare.download import Fetched
from fedquilt.data.prepare.packed import named_members
from fedquilt.errors import DataError

Arrays = dict[str, np.ndarray]
IMAGE_SHAPE = (3, 32, 32)


def cifar10(archive: Fetched) -> Arrays:
    """Read CIFAR-10's .tar.gz file, and return arrays by name: images, labels and class names.

    It has five training batches and one test batch. A label byte precedes each image.
    """
    folder = "cifar-10-batches-bin"
    batches = tuple(f"{folder}/data_batch_{number}.bin" for number in range(1, 6))
    return _read(
        archive, batches, f"{folder}/test_batch.bin", f"{folder}/batches.meta.txt", num_labels=1
    )


def cifar100(archive: Fetched) -> Arrays:
    """Read CIFAR-100's .tar.gz file with its 100 fine classes, and return arrays by name.

    A record has the coarse class before the fine one. The coarse class is not used.
    """
    folder = "cifar-100-binary"
    names = f"{folder}/fine_label_names.txt"
    return _read(archive, (f"{folder}/train.bin",), f"{folder}/test.bin", names, num_labels=2)


def _read(
    archive: Fetched, train: tuple[str, ...], test: str, names: str, num_labels: int
) -> Arrays:
    """Return the arrays of an archive: `x_train`, `y_train`, `x_test`, `y_test` and `classes`.

    Args:
        archive: The .tar.gz file.
        train: Members with training records, in the order in which they are joined.
        test: Member with test records.
        names: Member with a line for the name of each class.
        num_labels: Label bytes of a record, the last of which is the class.

    Raises:
        DataError: A member is missing or damaged, or a label has no name.
    """
    contents = named_members(archive, (*train, test, names))
    classes = contents[names].decode().split()
    arrays: Arrays = {"classes": np.array(classes)}
    for split, parts in (("train", train), ("test", (test,))):
        records = np.concatenate(
            [_records(archive, part, contents[part], num_labels) for part in parts]
        )
        arrays[f"x_{split}"] = records[:, num_labels:].reshape(-1, *IMAGE_SHAPE)
        labels = records[:, num_labels - 1]
        if len(labels) and labels.max() >= len(classes):
            raise DataError(f"{archive.path} has a label {labels.max()} of {len(classes)} classes.")
        arrays[f"y_{split}"] = labels.copy()
    return arrays


def _records(archive: Fetched, name: str, data: bytes, num_labels: int) -> np.ndarray:
    size = num_labels + int(np.prod(IMAGE_SHAPE))
    if not data or len(data) % size:
        raise DataError(
            f"{archive.path}: {name} has {len(data):,} bytes, which are no whole records of "
            f"{size:,}."
        )
    return np.frombuffer(data, np.uint8).reshape(-1, size)
