"""Data sources: arrays in a file, data bundled with scikit-learn, and a table of all by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedquilt.checks import File
from fedquilt.data.convert import coded
from fedquilt.data.holdout import fifth
from fedquilt.data.origin import remembered
from fedquilt.data.pool import Pool
from fedquilt.data.scale import Scale
from fedquilt.data.sources import padding
from fedquilt.data.sources.arrays import array_names, read_arrays
from fedquilt.data.sources.generated import generated
from fedquilt.data.sources.hub import hub
from fedquilt.data.sources.images import images
from fedquilt.data.sources.masks import is_mask_folder, masks
from fedquilt.data.sources.padding import NormalizeEach, PaddedPart
from fedquilt.data.sources.text import text
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install
from fedquilt.names import find, is_reference, known

Channels = Literal["auto", "first", "last", "none"]
ChannelDim = Literal["first", "last", "none"]
# Names of arrays that have one row for each sample.
_OF_SAMPLES = (
    "x",
    "y",
    "client",
    "domain",
    "shapes",
)


@remembered
def digits(
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
) -> Pool:
    """Load scikit-learn's 1,797 handwritten digits, 8 × 8 pixels from 0 to 1, without a download.

    A fifth of the images is for testing. The share `public` of the training images, in [0, 1),
    becomes public. All clients have them, without targets. With 0 there are none.
    """
    x, y = _digits()
    train, test = fifth(len(x))
    return Pool.of((x[train], y[train]), (x[test], y[test]), name="digits").with_public(public)


@remembered
def digits_labels(
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
) -> Pool:
    """Load scikit-learn's digits for a multi-label task.

    The labels are: even, prime, at least 5. The share `public` of the training images, in [0, 1),
    becomes public. All clients have them, without targets. With 0 there are none.
    """
    x, digit = _digits()
    prime = torch.isin(digit, torch.tensor([2, 3, 5, 7]))
    y = torch.stack([digit % 2 == 0, prime, digit >= 5], dim=1)
    train, test = fifth(len(x))
    names = ("even", "prime", "at least 5")
    pool = Pool.of(
        (x[train], y[train]), (x[test], y[test]), name="digits-labels", class_names=names
    )
    return pool.with_public(public)


@remembered
def diabetes(
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
) -> Pool:
    """Load scikit-learn's 442 diabetes patients for regression, with ten measurements each.

    The target is the progression of the disease after a year. A fifth of the patients is for
    testing. Inputs and targets are standardised by the mean and the standard deviation of the
    training samples, so that always predicting the mean gives an RMSE of 1. One unit is 76.2 of the
    original target. The share `public` of the training samples, in [0, 1), becomes public. All
    clients have them, without targets. With 0 there are none.
    """
    raw = _sklearn_datasets("diabetes").load_diabetes(scaled=False)
    x, y = torch.tensor(raw.data), torch.tensor(raw.target)
    train, test = fifth(len(x))
    x = (x - x[train].mean(0)) / x[train].std(0, correction=0)
    y = (y - y[train].mean()) / y[train].std(correction=0)
    x, y = x.float(), y.float()
    return Pool.of((x[train], y[train]), (x[test], y[test]), name="diabetes").with_public(public)


def _digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as images (sample, 1, 8, 8) from 0 to 1, and their classes."""
    raw = _sklearn_datasets("digits").load_digits()
    return torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)


def _sklearn_datasets(name: str) -> ModuleType:
    """Import `sklearn.datasets`, or raise an error that says how to install it.

    Args:
        name: Name of the data that needs it, for the message.
    """
    try:
        return importlib.import_module("sklearn.datasets")
    except ImportError as error:
        raise ConfigError(
            f"the data {name!r} was asked for; it comes with scikit-learn, which is not installed: "
            f"{how_to_install('cli')}."
        ) from error


@remembered
def npz(  # noqa: PLR0913  # The parameters are settings of the source.
    path: File,  # Path of the .npz file.
    normalize: NormalizeEach = "auto",  # How stored values are scaled: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalize.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    channels: Channels = "auto",  # Position of the channels in arrays. auto: found by the shape.
    # Names of the domains to keep, numbered in this order. Empty: all.
    domains: tuple[str, ...] = (),
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
    multiple_of: int = 1,  # Pad samples with masks to sides that are multiples of it. 1: no effect.
    max_bytes: int = 0,  # Bytes that the arrays may take in memory. 0: half of the free memory.
) -> Pool:
    """Read arrays from an .npz file: `x_train`, `y_train`, and optional ones such as `x_test`.

    docs/data.md lists all arrays. In a file without a test part they may be called `x` and `y`.
    Targets in the shape of images or volumes are masks. `shapes_train` has the original shapes of
    samples that were padded.

    Args:
        path: Path of the .npz file.
        normalize: Scaling of stored values. "auto": bytes by the mean and standard deviation of
            each channel, real numbers not at all. "channel": both by channel. "none": bytes become
            0 to 1, and real numbers stay. "sample": every sample by its own channels.
        mean: Mean of each channel, where white is 1. Empty: measured if `normalize` needs it.
        std: Standard deviation of each channel, together with `mean`. Empty: as for `mean`.
        channels: Position of the channels in `x_train` and `x_test`: "first" (sample, channel, …),
            "last" (sample, …, channel) or "none". "auto": found by the shape of inputs and masks.
        domains: Names of the domains to keep, numbered in this order. Empty: all.
        public: Share of the training samples, in [0, 1), that become public. All clients have them,
            without targets. 0: none.
        multiple_of: Number to whose multiples the sides of samples with masks are padded, in pixels
            or voxels. 1: no effect, and the only value for samples without masks.
        max_bytes: Bytes that the arrays may take in memory. 0: half of the free memory.
    """
    arrays = _in_parts(read_arrays(path, max_bytes))
    if missing := [key for key in ("x_train", "y_train") if key not in arrays]:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}. Found: {', '.join(arrays) or 'nothing'}. "
            "Inputs x and targets y would work, or x_train and y_train. Samples without targets "
            "are the array `public` beside them."
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has one of x_test and y_test; both are needed, or none.")
    name = Path(path).stem
    samples = _prepared(_Samples.of(arrays, channels), multiple_of, normalize == "sample", name)
    train, *tests = samples.parts
    owners, test_owners, _ = _named(arrays, "client_train", "client_test", renumber=True)
    homes, test_homes, found_names = _named(arrays, "domain_train", "domain_test")
    pool = Pool.of(
        (train.inputs, train.targets),
        (tests[0].inputs, tests[0].targets) if tests else None,
        clients=owners,
        test_clients=test_owners if tests else None,
        domains=homes,
        test_domains=test_homes if tests else None,
        public=samples.public,
        name=name,
        class_names=_strings(arrays, "classes") or samples.classes,
        domain_names=_strings(arrays, "domains") or found_names,
    )
    if domains:
        pool = pool.with_domains(domains)
    if train.has_masks or normalize == "sample":
        scale = padding.scale_of_counted(pool, normalize, mean, std)
    else:
        scale = Scale.of(
            pool.inputs if domains else torch.as_tensor(train.inputs), normalize, mean, std
        )
    return replace(pool, scale=scale).with_public(public)


DATA: dict[str, Callable[..., Pool]] = {
    "digits": digits,
    "digits-labels": digits_labels,
    "diabetes": diabetes,
    "generated": generated,
    "npz": npz,
    "images": images,
    "masks": masks,
    "text": text,
    "hub": hub,
}


def source(spec: str | Callable[..., Pool]) -> Callable[..., Pool]:
    """Return the function that makes the pool of a data set. Nothing is read yet.

    Call the function with the options of the data. The pool remembers how it was made, so that the
    folder of a run can say so. The pool of your own function remembers it too if the function is
    decorated with `@fq.data.source`.

    Args:
        spec: A name of `DATA`, a file or folder, hub:owner/name, `file.py:NAME` or
            `package.module:NAME`. Or a function that returns a pool.
    """
    if not isinstance(spec, str):
        return remembered(spec)
    if is_reference(spec):
        return remembered(find({}, spec, "data set"))
    if spec.startswith("hub:"):
        return partial(hub, spec.removeprefix("hub:"))
    path = Path(spec)
    if spec in DATA or not (path.suffix or "/" in spec or path.exists()):
        return known(DATA, spec, "data set")
    if not path.exists():
        raise DataError(
            f"the data {spec!r} was asked for; there is no such file or folder in {Path.cwd()}."
        )
    if path.is_dir():
        return partial(masks if is_mask_folder(path) else images, spec)
    if path.suffix == ".npz":
        return partial(text if "text" in array_names(spec) else npz, spec)
    if path.suffix in (".txt", ".json"):
        return partial(text, spec)
    raise DataError(
        f"the data {spec!r} was asked for; .npz, .txt, .json, a folder of images and "
        "hub:owner/name fit."
    )


# --- arrays -------------------------------------------------------------------------------------


def _in_parts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Rename `x`, `y` and the like to `x_train`, `y_train`, … in a file without a training part.

    Other arrays keep their names. With an array that ends in `_train`, or without `x` and `y`,
    nothing is renamed.
    """
    if any(name.endswith("_train") for name in arrays) or not {"x", "y"} <= arrays.keys():
        return arrays
    return {
        f"{name}_train" if name in _OF_SAMPLES else name: array for name, array in arrays.items()
    }


@dataclass(frozen=True)
class _Samples:
    """Samples of a file, with channels in the second dimension."""

    parts: tuple[PaddedPart, ...]  # The training part and, if there is one, the test part.
    public: np.ndarray | None  # (sample, channel, …)
    classes: tuple[str, ...]  # Names of classes, if targets are names.

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], channels: Channels) -> _Samples:
        targets, test_targets, classes = _named(arrays, "y_train", "y_test")
        assert targets is not None
        layout = _layout(arrays["x_train"], channels, targets)
        train = PaddedPart(_images(arrays["x_train"], layout), targets, arrays.get("shapes_train"))
        parts: tuple[PaddedPart, ...] = (train,)
        if test_targets is not None:
            test_layout = _layout(arrays["x_test"], channels, test_targets)
            test_inputs = _images(arrays["x_test"], test_layout)
            parts = (train, PaddedPart(test_inputs, test_targets, arrays.get("shapes_test")))
        public = None
        if "public" in arrays:
            public_layout = _public_layout(arrays["public"], channels, arrays["x_train"], layout)
            public = _images(arrays["public"], public_layout)
        return _Samples(parts, public, classes)


def _prepared(samples: _Samples, multiple_of: int, standardize: bool, name: str) -> _Samples:
    """Pad samples that have masks to common sides, and standardise samples on request.

    Public inputs are treated in the same way.

    Args:
        samples: Samples as they are in the file.
        multiple_of: Sides of samples with masks are padded to a multiple of this number.
        standardize: True: standardise every channel of every sample by itself.
        name: Name of the data set for messages.

    Raises:
        DataError: Padding or original shapes were requested, and there are no masks.
    """
    train = samples.parts[0]
    public = samples.public
    if train.has_masks:
        inputs = [part.inputs for part in samples.parts] + ([] if public is None else [public])
        sides = padding.common_sides([array.shape[2:] for array in inputs], multiple_of, name)
        parts = tuple(part.padded(sides, standardize, name) for part in samples.parts)
        padding.check_foreground(name, [part.targets for part in parts])
        if public is not None:
            padding.check_values(public, name)
            public = padding.stacked_inputs(list(public), sides, standardize)
        return replace(samples, parts=parts, public=public)

    if multiple_of != 1 or any(part.shapes is not None for part in samples.parts):
        raise DataError(
            f"multiple_of or true shapes were asked for with {name}; they need masks, one whole "
            f"number for every pixel or voxel. It has inputs of shape {train.inputs.shape} and "
            f"targets of shape {train.targets.shape} and type {train.targets.dtype}."
        )
    if not standardize:
        return samples
    parts = tuple(
        replace(part, inputs=padding.each_standardized(part.inputs, name)) for part in samples.parts
    )
    if public is not None:
        public = padding.each_standardized(public, name)
    return replace(samples, parts=parts, public=public)


def _layout(array: np.ndarray, channels: Channels, targets: np.ndarray | None = None) -> ChannelDim:
    """Return the position of the channels in inputs: "first", "last" or "none".

    Bytes with three dimensions are grey images, so that they are always "none".

    Args:
        array: (sample, …) Inputs.
        channels: Position that the user asked for. "auto": it is found by masks, or by the shape.
        targets: (sample, …) Targets of the inputs. Masks have the size of an input without its
            channels. None: unknown.
    """
    if array.dtype == np.uint8 and array.ndim == 3:
        return "none"
    if channels != "auto":
        return channels
    if targets is not None and targets.dtype.kind in "bui" and targets.ndim >= 3:
        size = targets.shape[1:]
        fits_last = array.shape[1:-1] == size
        fits_first = array.shape[2:] == size
        if array.shape[1:] == size:
            return "none"
        if fits_last != fits_first:
            return "last" if fits_last else "first"
    is_last = array.ndim >= 4 and array.shape[-1] in (1, 3, 4) and array.shape[1] not in (1, 3, 4)
    return "last" if is_last else "first"


def _public_layout(
    array: np.ndarray, channels: Channels, train: np.ndarray, layout: ChannelDim
) -> ChannelDim:
    """Return the position of the channels in public inputs: "first", "last" or "none".

    It is that of the training inputs if shapes agree. If not, it is found from the array alone.

    Args:
        array: (sample, …) Public inputs.
        channels: Position that the user asked for. "auto": it is found.
        train: (sample, …) Training inputs, which may have the same shape.
        layout: Position of the channels in training inputs.
    """
    is_alike = array.shape[1:] == train.shape[1:] or (layout == "none" and array.ndim == train.ndim)
    return layout if is_alike else _layout(array, channels)


def _images(array: np.ndarray, layout: ChannelDim) -> np.ndarray:
    """Return inputs with their channels in the second dimension: (sample, channel, …).

    With the layout "none" a single channel is added, and with "first" the array stays.
    """
    if layout == "none":
        return array[:, None]
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if layout == "last" else array


def _named(
    arrays: Mapping[str, np.ndarray], train: str, test: str, renumber: bool = False
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
    """Return the client, or the domain, of each sample of a file as a number.

    Names are numbered in sorted order over both sets.

    Args:
        arrays: Arrays by name.
        train: Name of the array of the training set.
        test: Name of the array of the test set.
        renumber: True: ids that are numbers are renumbered too, because they may have gaps.

    Returns:
        Numbers of the training set and of the test set, each None without its array. Then the
        names by number, which are empty for ids that are numbers and with `renumber`.

    Raises:
        DataError: There is an array of the test set alone.
    """
    if train not in arrays:
        if test in arrays:
            raise DataError(
                f"there is {test} but no {train}; the names of test samples alone say nothing."
            )
        return None, None, ()
    train_names, test_names = arrays[train], arrays.get(test)
    if train_names.dtype.kind != "U" and not renumber:
        return train_names, test_names, ()
    codes, names = coded([train_names] if test_names is None else [train_names, test_names])
    return codes[0], None if test_names is None else codes[1], () if renumber else names


def _strings(arrays: Mapping[str, np.ndarray], key: str) -> tuple[str, ...]:
    return tuple(map(str, arrays[key])) if key in arrays else ()
