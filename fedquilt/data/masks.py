"""Folders of images with a mask each, which has the class of every pixel or voxel.

Pictures are read by Pillow (extra: fedquilt[images]), NIfTI volumes by nibabel (extra: fedquilt[medical]).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from fedquilt.checks import File, whole
from fedquilt.data import nifti, padding
from fedquilt.data.federated import IGNORED, Pool
from fedquilt.data.padding import NormaliseEach, told
from fedquilt.data.pictures import SUFFIXES, open_image
from fedquilt.errors import ConfigError, DataError

LAYOUTS = (("images", "masks"), ("imagesTr", "labelsTr"))  # The second is the Medical Segmentation Decathlon's.
LOSSY = (".jpeg", ".jpg")  # They change values, so that a mask would have classes that nobody marked.
TOP_LABEL = 254  # Largest class in a file. 255 is usually white, or marks what does not count.


@dataclass(frozen=True)
class Pair:
    """An image and its mask."""

    image: np.ndarray  # (channel, *size) Bytes or float32
    mask: np.ndarray  # (*size) Whole numbers
    orientation: str = ""  # Directions of a volume's axes. Empty for pictures.


Reader = Callable[[Path, Path], Pair]


def masks(
    path: File,  # The folder.
    size: int = 0,  # Pixels a side to which pictures and masks are resized. 0: they keep their size.
    grey: bool = False,  # Read pictures with one channel.
    labels: tuple[int, ...] = (),  # Values in masks, in the order of their classes. Empty: values are the classes.
    ignored: int | None = None,  # Value in masks that counts neither in the loss nor in metrics. None: there is none.
    domains: bool = False,  # Images and masks are in folders named after domains.
    canonical: bool = False,  # Bring the axes of NIfTI volumes into the order RAS. False: as they are stored.
    multiple_of: int = 1,  # Pad sides up to a multiple of this number, 16 for a U-Net of depth 4. 1: as far as needed.
    normalise: NormaliseEach = "auto",  # How stored values become what a model sees: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalise.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    public: float = 0.0,  # Share of the training samples that everyone has. 0: none.
) -> Pool:
    """A folder of images and a folder of masks: images/a.png and masks/a.png, or volumes in .nii.gz.

    With a test part the folders are train/images, train/masks, test/images and test/masks. Without it a fifth is held
    out. Samples of different sizes are padded with zeros at the end, where masks are −100.
    """
    root = Path(path)
    _check_labels(labels, ignored)
    files = [_paired(images, marked, domains) for images, marked in mask_folders(root)]
    read, is_volume = _reader(files[0][0][0], size, grey, canonical)
    pairs = [[_numbered(read(*names), labels, ignored, names[1]) for names in part] for part in files]
    _check_alike([names for part in files for names in part], [pair for part in pairs for pair in part])

    if is_volume and normalise == "auto" and not mean:
        normalise = "sample"  # because intensities of scanners have no unit in common
    sides = padding.common_sides([pair.mask.shape for part in pairs for pair in part], multiple_of, root.name)
    arrays = [_stacked(part, sides, normalise == "sample") for part in pairs]
    padding.check_foreground(root.name, [targets for _, targets in arrays])

    homes = [[images.parent.name for images, _ in part] for part in files]
    pool = Pool.of(
        arrays[0],
        arrays[1] if len(arrays) > 1 else None,
        domains=homes[0] if domains else None,
        test_domains=homes[1] if domains and len(homes) > 1 else None,
        name=root.name,
        num_classes=len(labels),
    )
    return replace(pool, scale=padding.scale_of_counted(pool, normalise, mean, std)).with_public(public)


def is_mask_folder(root: Path) -> bool:
    """Return True if a folder has images beside masks, in its training part or in itself."""
    places = (root, root / "train")
    return any(
        (place / images).is_dir() and (place / marked).is_dir() for place in places for images, marked in LAYOUTS
    )


def mask_folders(root: Path) -> list[tuple[Path, Path]]:
    """Return the folders of images and of masks, for training and, if it is there, for testing.

    Raises:
        DataError: There are none.
    """
    places = [root / "train", root / "test"] if (root / "train").is_dir() else [root]
    found: list[tuple[Path, Path]] = []
    for place in places:
        pairs = [(place / images, place / marked) for images, marked in LAYOUTS]
        complete = [(images, marked) for images, marked in pairs if images.is_dir() and marked.is_dir()]
        if not complete and place.is_dir():
            names = sorted(child.name for child in place.iterdir() if child.is_dir())
            raise DataError(
                f"images with masks were asked for in {place}; it has these folders: {', '.join(names) or 'none'}. "
                f"images/ and masks/ fit, or imagesTr/ and labelsTr/, also inside of train/ and test/."
            )
        found += complete[:1]
    return found


# --- files ------------------------------------------------------------------------------------------------------


def _paired(images: Path, marked: Path, domains: bool) -> list[tuple[Path, Path]]:
    """Return every image with its mask, in the order of their names."""
    named_images, named_masks = _by_stem(images), _by_stem(marked)
    endings = ", ".join((*SUFFIXES, *nifti.SUFFIXES))
    if not named_images:
        raise DataError(f"{images} has no images ({endings}) in it; {images}/one.png with {marked}/one.png would fit.")
    if missing := [file for stem, file in named_images.items() if stem not in named_masks]:
        wanted = marked / missing[0].relative_to(images)
        raise DataError(
            f"{len(missing)} of {len(named_images)} images in {images} have no mask, such as {missing[0].name}; "
            f"{wanted} would fit. Names must be the same up to the ending."
        )
    if spare := [file for stem, file in named_masks.items() if stem not in named_images]:
        wanted = images / spare[0].relative_to(marked)
        raise DataError(
            f"{len(spare)} of {len(named_masks)} masks in {marked} have no image, such as {spare[0].name}. Remove "
            f"them, or add {wanted} and the others."
        )
    for stem, file in named_images.items():
        if domains and "/" not in stem:
            raise DataError(f"{file} is in no folder named after a domain; {images}/DOMAIN/{file.name} would fit.")
    return [(file, named_masks[stem]) for stem, file in named_images.items()]


def _by_stem(folder: Path) -> dict[str, Path]:
    """Return images and volumes in a folder by their names without ending; hidden files are left out."""
    found: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        ending = next((end for end in (*nifti.SUFFIXES, *SUFFIXES) if name.lower().endswith(end)), "")
        if not ending or file.name.startswith("."):
            continue
        stem = name[: -len(ending)]
        if stem in found:
            raise DataError(f"{found[stem]} and {file} have the same name up to the ending; remove one of them.")
        found[stem] = file
    return found


def _is_volume(file: Path) -> bool:
    return file.name.lower().endswith(nifti.SUFFIXES)


def _reader(first: Path, size: int, grey: bool, canonical: bool) -> tuple[Reader, bool]:
    """Return what reads an image and its mask, and True if they are volumes."""
    if _is_volume(first):
        if size or grey:
            raise ConfigError(f"size and grey are for pictures; {first.name} is a volume. Leave them out.")
        return partial(_read_volume, canonical=canonical), True
    if not whole(size):
        raise ConfigError(f"size = {size} was asked for; a whole number of pixels fits, or 0 to keep sizes.")
    if canonical:
        raise ConfigError(f"canonical is for NIfTI volumes; {first.name} is a picture. Leave it out.")
    return partial(_read_picture, size=size, grey=grey), False


def _read_picture(image_file: Path, mask_file: Path, size: int, grey: bool) -> Pair:
    """Read a picture and its mask; resized, the mask takes the nearest value."""
    for file in (image_file, mask_file):
        if _is_volume(file):
            raise DataError(f"{file} is a volume among pictures; a folder has one kind of files.")
    if mask_file.suffix.lower() in LOSSY:
        raise DataError(
            f"{mask_file} is a JPEG, which does not keep values exactly. Save masks as .png with one number a pixel."
        )
    with open_image(image_file) as opened:
        picture = opened.convert("L" if grey else "RGB")
    from PIL.Image import Resampling

    marked = open_image(mask_file)
    if marked.mode not in ("1", "L", "P", "I", "I;16"):
        raise DataError(
            f"{mask_file} has colours (mode {marked.mode}); a mask has one number a pixel, its class. Pictures with a "
            "palette, black and white, 8, 16 or 32 bits of grey fit."
        )
    if marked.size != picture.size:
        raise DataError(
            f"{mask_file} has {marked.height}×{marked.width} pixels and its image {image_file} "
            f"{picture.height}×{picture.width}; they must be alike."
        )
    if size:
        picture = picture.resize((size, size), Resampling.BILINEAR)
        marked = marked.resize((size, size), Resampling.NEAREST)
    pixels = np.asarray(picture).reshape(picture.height, picture.width, -1)
    return Pair(np.moveaxis(pixels, -1, 0), np.asarray(marked).astype(np.int64))


def _read_volume(image_file: Path, mask_file: Path, canonical: bool) -> Pair:
    """Read a volume and its mask."""
    for file in (image_file, mask_file):
        if not _is_volume(file):
            raise DataError(f"{file} is a picture among volumes; a folder has one kind of files.")
    volume, marked = (nifti.read_volume(file, canonical) for file in (image_file, mask_file))
    if len(marked.values) > 1:
        raise DataError(f"{mask_file} has {len(marked.values)} channels; a mask has one number a voxel, its class.")
    mask = marked.values[0]
    if mask.shape != volume.values.shape[1:]:
        raise DataError(
            f"{mask_file} has {told(mask.shape)} voxels and its image {image_file} {told(volume.values.shape[1:])}; "
            "they must be alike."
        )
    if marked.orientation != volume.orientation:
        raise DataError(
            f"{mask_file} has axes in the order {marked.orientation} and its image {image_file} in the order "
            f"{volume.orientation}. canonical = true brings all volumes into one."
        )
    with np.errstate(over="ignore"):
        image = volume.values.astype(np.float32)
    if not np.isfinite(image).all():
        raise DataError(f"{image_file} has values of up to {np.abs(volume.values).max():.3g}, too large for float32.")
    if (mask != np.rint(mask)).any():
        value = mask[mask != np.rint(mask)].flat[0]
        raise DataError(f"{mask_file} has the value {value:g}; a mask has whole numbers, the classes of its voxels.")
    return Pair(image, mask.astype(np.int64), volume.orientation)


# --- values -----------------------------------------------------------------------------------------------------


def _check_labels(labels: tuple[int, ...], ignored: int | None) -> None:
    """Refuse labels that give a value two classes."""
    if len(set(labels)) < len(labels):
        raise ConfigError(f"labels = {list(labels)} was asked for; name each value once.")
    if ignored in labels:
        raise ConfigError(f"labels = {list(labels)} and ignored = {ignored} were asked for; a value is one of the two.")


def _numbered(pair: Pair, labels: tuple[int, ...], ignored: int | None, file: Path) -> Pair:
    """Return the pair with classes in its mask, and −100 where the value to ignore was."""
    values = np.unique(pair.mask)
    kept = values[values != ignored]
    wrong = kept[~np.isin(kept, labels)] if labels else kept[(kept > TOP_LABEL) | ((kept < 0) & (kept != IGNORED))]
    if len(wrong):
        shown = ", ".join(map(str, values[:8].tolist())) + (", …" if len(values) > 8 else "")
        asked = f"labels = {list(labels)} were asked for" if labels else f"classes are numbered from 0 to {TOP_LABEL}"
        raise DataError(
            f"{file} has the values {shown}; {asked}. labels = [{shown}] would make them the classes 0, 1, … in this "
            f"order, and ignored = {wrong[-1]} would leave {wrong[-1]} out of loss and metrics."
        )
    mask = pair.mask
    if labels:
        order = np.argsort(labels)
        found = np.searchsorted(labels, mask, sorter=order).clip(max=len(labels) - 1)
        mask = order[found]
    if ignored is not None:
        mask = np.where(pair.mask == ignored, IGNORED, mask)
    return replace(pair, mask=mask)


def _check_alike(files: list[tuple[Path, Path]], pairs: list[Pair]) -> None:
    """Refuse samples with another number of channels or another orientation than the first."""
    first = pairs[0]
    for (file, _), pair in zip(files, pairs, strict=True):
        if len(pair.image) != len(first.image):
            raise DataError(
                f"{file} has {len(pair.image)} channels and {files[0][0]} {len(first.image)}; they must be alike."
            )
        if pair.orientation != first.orientation:
            raise DataError(
                f"{file} has axes in the order {pair.orientation} and {files[0][0]} in the order {first.orientation}. "
                "canonical = true brings all volumes into one."
            )


def _stacked(pairs: list[Pair], sides: tuple[int, ...], standardise: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (sample, channel, *sides) and targets (sample, *sides)."""
    images = [padding.standardised(pair.image) if standardise else pair.image for pair in pairs]
    inputs = padding.stacked(images, sides, 0, images[0].dtype)
    return inputs, padding.padded_masks([pair.mask for pair in pairs], sides)
