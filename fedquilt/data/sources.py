"""Data sources: arrays in a file, scikit-learn's bundled sets, and the others by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedquilt.checks import File
from fedquilt.data import padding
from fedquilt.data.arrays import array_names, read_arrays
from fedquilt.data.federated import Pool, Scale, coded, fifth
from fedquilt.data.generated import generated
from fedquilt.data.huggingface import hub
from fedquilt.data.masks import is_mask_folder, masks
from fedquilt.data.padding import NormaliseEach, Part
from fedquilt.data.pictures import images
from fedquilt.data.words import text
from fedquilt.errors import DataError
from fedquilt.names import known

Channels = Literal["auto", "first", "last", "none"]
Layout = Literal["first", "last", "none"]

_OF_SAMPLES = (
    "x",
    "y",
    "client",
    "domain",
    "shapes",
)  # Arrays of a file with a row for every sample.


def digits(public: float = 0.0) -> Pool:
    """scikit-learn's 1,797 handwritten digits, 8×8 and from 0 to 1: a fifth for testing. They need no network."""
    x, y = _digits()
    train, test = fifth(len(x))
    return Pool.of((x[train], y[train]), (x[test], y[test]), name="digits").with_public(public)


def digits_labels(public: float = 0.0) -> Pool:
    """scikit-learn's digits with three labels each instead of a class: even, prime, at least 5 (multi-label)."""
    x, digit = _digits()
    prime = torch.isin(digit, torch.tensor([2, 3, 5, 7]))
    y = torch.stack([digit % 2 == 0, prime, digit >= 5], dim=1)
    train, test = fifth(len(x))
    names = ("even", "prime", "at least 5")
    pool = Pool.of(
        (x[train], y[train]), (x[test], y[test]), name="digits-labels", class_names=names
    )
    return pool.with_public(public)


def diabetes(public: float = 0.0) -> Pool:
    """scikit-learn's 442 diabetes patients, ten measurements each: how far the illness is a year later (regression).

    A fifth is for testing. Inputs and targets are standardised by the mean and the standard deviation of the training
    samples, so that an RMSE of 1 is that of always predicting the mean. One unit is 76.2 of the original target.
    """
    from sklearn.datasets import load_diabetes

    raw = load_diabetes(scaled=False)
    x, y = torch.tensor(raw.data), torch.tensor(raw.target)
    train, test = fifth(len(x))
    x = (x - x[train].mean(0)) / x[train].std(0, correction=0)
    y = (y - y[train].mean()) / y[train].std(correction=0)
    x, y = x.float(), y.float()
    return Pool.of((x[train], y[train]), (x[test], y[test]), name="diabetes").with_public(public)


def _digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits as images (sample, 1, 8, 8) from 0 to 1, and which digit each is."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    return torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(raw.target)


def npz(
    path: File,  # The file.
    normalise: NormaliseEach = "auto",  # How stored values are scaled: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalise.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    channels: Channels = "auto",  # Where files have channels.
    domains: tuple[
        str, ...
    ] = (),  # Names of the domains to keep, numbered in this order. Empty: all.
    public: float = 0.0,  # Share of the training samples that everyone has. 0: none.
    multiple_of: int = 1,  # Pad samples with masks to sides that are multiples of it. 1: no effect.
    max_bytes: int = 0,  # Bytes that the arrays may take in memory. 0: half of the free memory.
) -> Pool:
    """Arrays in an .npz file: `x_train`, `y_train`, and what else there is of `x_test`, `y_test`, `client_train` …

    Without a test part they may be `x` and `y`. Targets in the shape of images or volumes are
    masks. `shapes_train` has the true shapes of samples that were padded.
    """
    arrays = _in_parts(read_arrays(path, max_bytes))
    if missing := [key for key in ("x_train", "y_train") if key not in arrays]:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}. Found: {', '.join(arrays) or 'nothing'}."
        )
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has one of x_test and y_test; both are needed, or none.")
    name = Path(path).stem
    samples = _prepared(_Samples.of(arrays, channels), multiple_of, normalise == "sample", name)
    train, *tests = samples.parts
    own, test_own, _ = _named(arrays, "client_train", "client_test", renumber=True)
    home, test_home, places = _named(arrays, "domain_train", "domain_test")
    pool = Pool.of(
        (train.inputs, train.targets),
        (tests[0].inputs, tests[0].targets) if tests else None,
        clients=own,
        test_clients=test_own if tests else None,
        domains=home,
        test_domains=test_home if tests else None,
        public=samples.public,
        name=name,
        class_names=_strings(arrays, "classes") or samples.classes,
        domain_names=_strings(arrays, "domains") or places,
    )
    if domains:
        pool = pool.with_domains(domains)
    if train.has_masks or normalise == "sample":
        scale = padding.scale_of_counted(pool, normalise, mean, std)
    else:
        scale = Scale.of(
            pool.inputs if domains else torch.as_tensor(train.inputs), normalise, mean, std
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


def source(spec: str) -> Callable[..., Pool]:
    """What a name stands for: one of `DATA`, a file or folder, or hub:owner/name. Call it with options for the pool."""
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
        f"the data {spec!r} was asked for; .npz, .txt, .json, a folder of images and hub:owner/name fit."
    )


# --- arrays -----------------------------------------------------------------------------------------------------


def _in_parts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays under the names of a training part, where a file with `x` and `y` has no parts."""
    if any(name.endswith("_train") for name in arrays) or not {"x", "y"} <= arrays.keys():
        return arrays
    return {
        f"{name}_train" if name in _OF_SAMPLES else name: array for name, array in arrays.items()
    }


@dataclass(frozen=True)
class _Samples:
    """Samples of a file, with their channels second."""

    parts: tuple[Part, ...]  # The training part and, if there is one, the test part.
    public: np.ndarray | None  # (sample, channel, …)
    classes: tuple[str, ...]  # Names of classes, if targets are names.

    @staticmethod
    def of(arrays: Mapping[str, np.ndarray], channels: Channels) -> _Samples:
        targets, test_targets, classes = _named(arrays, "y_train", "y_test")
        assert targets is not None
        layout = _layout(arrays["x_train"], channels, targets)
        train = Part(_images(arrays["x_train"], layout), targets, arrays.get("shapes_train"))
        parts: tuple[Part, ...] = (train,)
        if test_targets is not None:
            test_layout = _layout(arrays["x_test"], channels, test_targets)
            test_inputs = _images(arrays["x_test"], test_layout)
            parts = (train, Part(test_inputs, test_targets, arrays.get("shapes_test")))
        public = None
        if "public" in arrays:
            public_layout = _public_layout(arrays["public"], channels, arrays["x_train"], layout)
            public = _images(arrays["public"], public_layout)
        return _Samples(parts, public, classes)


def _prepared(samples: _Samples, multiple_of: int, standardise: bool, name: str) -> _Samples:
    """Return samples that are padded where they have masks, and standardised if that was asked for.

    Args:
        samples: Samples as the file has them.
        multiple_of: Sides of samples with masks are padded to a multiple of this number.
        standardise: Standardise every sample by itself.
        name: Name of the data set for messages.

    Raises:
        DataError: Padding or true shapes were asked for, and there are no masks.
    """
    train = samples.parts[0]
    public = samples.public
    if train.has_masks:
        inputs = [part.inputs for part in samples.parts] + ([] if public is None else [public])
        sides = padding.common_sides([array.shape[2:] for array in inputs], multiple_of, name)
        parts = tuple(part.padded(sides, standardise, name) for part in samples.parts)
        padding.check_foreground(name, [part.targets for part in parts])
        if public is not None:
            padding.check_values(public, name)
            public = padding.stacked_inputs(list(public), sides, standardise)
        return replace(samples, parts=parts, public=public)

    if multiple_of != 1 or any(part.shapes is not None for part in samples.parts):
        raise DataError(
            f"multiple_of or true shapes were asked for with {name}; they need masks, one whole "
            f"number for every pixel or voxel. It has inputs of shape {train.inputs.shape} and "
            f"targets of shape {train.targets.shape} and type {train.targets.dtype}."
        )
    if not standardise:
        return samples
    parts = tuple(
        replace(part, inputs=padding.each_standardised(part.inputs, name)) for part in samples.parts
    )
    if public is not None:
        public = padding.each_standardised(public, name)
    return replace(samples, parts=parts, public=public)


def _layout(array: np.ndarray, channels: Channels, targets: np.ndarray | None = None) -> Layout:
    """Return where inputs have their channels: by what was asked for, by masks, or by the shape.

    Args:
        array: (sample, …)
        channels: Place that was asked for. "auto": it is found.
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
    array: np.ndarray, channels: Channels, train: np.ndarray, layout: Layout
) -> Layout:
    """Return where public inputs have their channels.

    Args:
        array: (sample, …) Public inputs.
        channels: Place that was asked for. "auto": it is found.
        train: (sample, …) Training inputs, which may be alike.
        layout: Place of the channels in training inputs.
    """
    is_alike = array.shape[1:] == train.shape[1:] or (layout == "none" and array.ndim == train.ndim)
    return layout if is_alike else _layout(array, channels)


def _images(array: np.ndarray, layout: Layout) -> np.ndarray:
    """Return inputs with their channels second: (sample, channel, …)."""
    if layout == "none":
        return array[:, None]
    return np.ascontiguousarray(np.moveaxis(array, -1, 1)) if layout == "last" else array


def _named(
    arrays: Mapping[str, np.ndarray], train: str, test: str, renumber: bool = False
) -> tuple[np.ndarray | None, np.ndarray | None, tuple[str, ...]]:
    """Numbers for what two arrays call by names; ids that are numbers may have gaps and are renumbered on request."""
    if train not in arrays:
        if test in arrays:
            raise DataError(
                f"there is {test} but no {train}; the names of test samples alone say nothing."
            )
        return None, None, ()
    one, other = arrays[train], arrays.get(test)
    if one.dtype.kind != "U" and not renumber:
        return one, other, ()
    codes, names = coded([one] if other is None else [one, other])
    return codes[0], None if other is None else codes[1], () if renumber else names


def _strings(arrays: Mapping[str, np.ndarray], key: str) -> tuple[str, ...]:
    return tuple(map(str, arrays[key])) if key in arrays else ()
