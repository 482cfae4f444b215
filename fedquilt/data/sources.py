"""Data sources: arrays in a file, scikit-learn's bundled sets, and the others by their names."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedquilt.checks import File
from fedquilt.data import padding
from fedquilt.data.federated import Pool, Scale, coded, fifth
from fedquilt.data.generated import generated
from fedquilt.data.huggingface import hub
from fedquilt.data.masks import is_mask_folder, masks
from fedquilt.data.padding import NormaliseEach
from fedquilt.data.pictures import images
from fedquilt.data.words import text
from fedquilt.errors import DataError
from fedquilt.names import known

Channels = Literal["auto", "first", "last", "none"]
Layout = Literal["first", "last", "none"]

_OF_SAMPLES = ("x", "y", "client", "domain", "shapes")  # Arrays of a file with a row for every sample.


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
    pool = Pool.of((x[train], y[train]), (x[test], y[test]), name="digits-labels", class_names=names)
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
    normalise: NormaliseEach = "auto",  # How stored values become what a model sees: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalise.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    channels: Channels = "auto",  # Where files have channels.
    multiple_of: int = 1,  # Pad sides of samples with masks up to a multiple of this number. 1: as they are.
    domains: tuple[str, ...] = (),  # Names of the domains to keep, numbered in this order. Empty: all.
    public: float = 0.0,  # Share of the training samples that everyone has. 0: none.
) -> Pool:
    """Arrays in an .npz file: `x_train`, `y_train`, and what else there is of `x_test`, `y_test`, `client_train` …

    Without a test part they may be `x` and `y`. Targets in the shape of images or volumes are masks, which may have
    `shapes_train` (or `shapes`), the true shapes of padded samples.
    """
    arrays = _in_parts(_arrays(path))
    if missing := [key for key in ("x_train", "y_train") if key not in arrays]:
        raise DataError(f"{path} has no {' and no '.join(missing)}. Found: {', '.join(arrays) or 'nothing'}.")
    if ("x_test" in arrays) != ("y_test" in arrays):
        raise DataError(f"{path} has one of x_test and y_test; both are needed, or none.")
    tested = "x_test" in arrays
    parts = ("train", "test") if tested else ("train",)
    layouts = [_layout(arrays[f"x_{part}"], channels, arrays[f"y_{part}"]) for part in parts]
    inputs = [_images(arrays[f"x_{part}"], layout) for part, layout in zip(parts, layouts, strict=True)]
    public_inputs = None
    if "public" in arrays:
        layout = _public_layout(arrays["public"], channels, arrays["x_train"], layouts[0])
        public_inputs = _images(arrays["public"], layout)
    train_targets, test_targets, classes = _named(arrays, "y_train", "y_test")
    assert train_targets is not None
    targets = [train_targets] if test_targets is None else [train_targets, test_targets]

    marked = padding.are_masks(inputs[0], targets[0])
    sizes = [arrays.get(f"shapes_{part}") for part in parts]
    if marked:
        inputs, targets, public_inputs = padding.padded(
            inputs, targets, sizes, public_inputs, multiple_of, normalise == "sample", Path(path).stem
        )
    elif multiple_of != 1 or any(size is not None for size in sizes):
        raise DataError(
            f"multiple_of or true shapes were asked for with {path}; they need masks, one whole number for every pixel "
            f"or voxel. It has inputs of shape {arrays['x_train'].shape} and targets of shape "
            f"{arrays['y_train'].shape} and type {arrays['y_train'].dtype}."
        )
    elif normalise == "sample":
        inputs = [padding.each_standardised(values) for values in inputs]
        public_inputs = None if public_inputs is None else padding.each_standardised(public_inputs)

    own, test_own, _ = _named(arrays, "client_train", "client_test", renumber=True)
    home, test_home, places = _named(arrays, "domain_train", "domain_test")
    pool = Pool.of(
        (inputs[0], targets[0]),
        (inputs[1], targets[1]) if tested else None,
        clients=own,
        test_clients=test_own if tested else None,
        domains=home,
        test_domains=test_home if tested else None,
        public=public_inputs,
        name=Path(path).stem,
        class_names=_strings(arrays, "classes") or classes,
        domain_names=_strings(arrays, "domains") or places,
    )
    if domains:
        pool = pool.with_domains(domains)
    if marked or normalise == "sample":
        scale = padding.scale_of_counted(pool, normalise, mean, std)
    else:
        scale = Scale.of(pool.inputs if domains else torch.as_tensor(inputs[0]), normalise, mean, std)
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
        raise DataError(f"the data {spec!r} was asked for; there is no such file or folder in {Path.cwd()}.")
    if path.is_dir():
        return partial(masks if is_mask_folder(path) else images, spec)
    if path.suffix == ".npz":
        return partial(text if "text" in _keys(spec) else npz, spec)
    if path.suffix in (".txt", ".json"):
        return partial(text, spec)
    raise DataError(f"the data {spec!r} was asked for; .npz, .txt, .json, a folder of images and hub:owner/name fit.")


# --- arrays -----------------------------------------------------------------------------------------------------


def _keys(path: str) -> list[str]:
    """The names of a file's arrays, without reading them."""
    try:
        with zipfile.ZipFile(path) as archive:
            return [name.removesuffix(".npy") for name in archive.namelist()]
    except (OSError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error


def _arrays(path: str) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as file:
            return {key: file[key] for key in file}
    except (OSError, ValueError, AttributeError, TypeError, zipfile.BadZipFile, EOFError) as error:
        raise DataError(f"{path} cannot be read as an .npz file: {error}.") from error


def _in_parts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays under the names of a training part, where a file with `x` and `y` has no parts."""
    if any(name.endswith("_train") for name in arrays) or not {"x", "y"} <= arrays.keys():
        return arrays
    return {f"{name}_train" if name in _OF_SAMPLES else name: array for name, array in arrays.items()}


def _layout(array: np.ndarray, channels: Channels, targets: np.ndarray | None = None) -> Layout:
    """Return where inputs have their channels: by what was asked for, by masks, or by the shape.

    Args:
        array: (sample, …)
        channels: Place that was asked for. "auto": it is found.
        targets: (sample, …) Targets of the inputs. Masks have the size of an input without its channels. None: unknown.
    """
    if array.dtype == np.uint8 and array.ndim == 3:
        return "none"
    if channels != "auto":
        return channels
    if targets is not None and targets.dtype.kind in "bui" and targets.ndim >= 3:
        size, fits = targets.shape[1:], (array.shape[1:-1], array.shape[2:])
        if array.shape[1:] == size:
            return "none"
        if size in fits and fits[0] != fits[1]:
            return "last" if size == fits[0] else "first"
    is_last = array.ndim >= 4 and array.shape[-1] in (1, 3, 4) and array.shape[1] not in (1, 3, 4)
    return "last" if is_last else "first"


def _public_layout(array: np.ndarray, channels: Channels, train: np.ndarray, layout: Layout) -> Layout:
    """Return where public inputs have their channels: as training inputs do if they are alike, else by their shape."""
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
            raise DataError(f"there is {test} but no {train}; the names of test samples alone say nothing.")
        return None, None, ()
    one, other = arrays[train], arrays.get(test)
    if one.dtype.kind != "U" and not renumber:
        return one, other, ()
    codes, names = coded([one] if other is None else [one, other])
    return codes[0], None if other is None else codes[1], () if renumber else names


def _strings(arrays: Mapping[str, np.ndarray], key: str) -> tuple[str, ...]:
    return tuple(map(str, arrays[key])) if key in arrays else ()
