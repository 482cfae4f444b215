"""Folders of images with one mask each, which has the class of every pixel or voxel.

Pictures are read by Pillow (extra: `images`), NIfTI volumes by nibabel (extra: `medical`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

import numpy as np

from fedquilt.checks import File, whole
from fedquilt.data.convert import IGNORED
from fedquilt.data.origin import remembered
from fedquilt.data.pool import Pool
from fedquilt.data.sources import nifti, padding
from fedquilt.data.sources.images import SUFFIXES, image_size, open_image
from fedquilt.data.sources.padding import NormalizeEach, shape_text
from fedquilt.errors import ConfigError, DataError
from fedquilt.storage.tensor_files import memory_limit, too_large

# Folders of images and masks. The second layout is the Medical Segmentation Decathlon's.
LAYOUTS = (("images", "masks"), ("imagesTr", "labelsTr"))
LOSSY = (".jpeg", ".jpg")  # They change values, so that a mask would have other classes.
MASK_MODES = ("1", "L", "P", "I", "I;16")  # Pillow's modes with one number a pixel.
DEEP_MODES = ("I", "I;16", "F")  # Pillow's modes with more than 8 bits a pixel.
MASK_BYTES = 8  # Bytes of a class, which is int64
TOP_LABEL = 254  # Largest class in a file. 255 is usually white, or marks ignored pixels.
Files = tuple[Path, Path]  # An image and its mask.


@dataclass(frozen=True)
class Pair:
    """An image and its mask."""

    image: np.ndarray  # (channel, *size) Bytes or float32
    mask: np.ndarray  # (*size) Whole numbers
    orientation: str = ""  # Directions of a volume's axes. Empty for pictures.


Reader = Callable[[Path, Path], Pair]


@remembered
def masks(  # noqa: PLR0913  # The parameters are settings of the source.
    path: File,  # Path of the folder.
    size: int = 0,  # Pixels per side to which pictures are resized. 0: they keep their size.
    gray: bool = False,  # Read pictures with one channel.
    labels: tuple[int, ...] = (),  # Value of each class in masks. Empty: 0, 1, 2, ….
    ignored: int | None = None,  # Value in masks that does not count. None: there is none.
    domains: bool = False,  # Images and masks are in folders of domains.
    canonical: bool = False,  # Turn NIfTI volumes so that their axes are RAS.
    multiple_of: int = 1,  # Pad sides to a multiple, 16 for a U-Net of depth 4. 1: no effect.
    normalize: NormalizeEach = "auto",  # How stored values are scaled: docs/data.md has a table.
    mean: tuple[float, ...] = (),  # Mean of each channel, white is 1. Empty: by normalize.
    std: tuple[float, ...] = (),  # Standard deviation of each channel, together with mean.
    public: float = 0.0,  # Share of the training samples that all clients have. 0: none.
    max_bytes: int = 0,  # Bytes that all samples may take in memory. 0: half of the free memory.
) -> Pool:
    """Read a folder of images or volumes with masks, such as images/a.png and masks/a.png.

    Volumes are .nii or .nii.gz files. With a test part the folders are train/images, train/masks,
    test/images and test/masks. Without it a fifth is held out for testing. Samples of different
    sizes are padded with zeros at the end, where masks are −100.

    Args:
        path: Path of the folder.
        size: Pixels per side to which pictures are resized. 0: they keep their size. Volumes must
            have 0.
        gray: True: read pictures with one channel. False: with three. Volumes must have False.
        labels: Value of each class in masks, in the order of the classes. Empty: the values are the
            classes 0, 1, 2, ….
        ignored: Value in masks that counts in no loss and no metric. None: there is none.
        domains: True: images and masks are in folders of domains. False: there are no domains.
        canonical: True: turn NIfTI volumes so that their axes run right, front, up (RAS). False:
            keep their axes. Pictures must have False.
        multiple_of: Number to whose multiples sides are padded, in pixels or voxels, such as 16 for
            a U-Net of depth 4. 1: no effect.
        normalize: Scaling of stored values. "auto": bytes by the mean and standard deviation of
            each channel, real numbers not at all. "channel": both by channel. "none": bytes become
            0 to 1, and real numbers stay. "sample": every sample by its own channels. For volumes,
            "auto" is "sample" unless `mean` is set.
        mean: Mean of each channel, where white is 1. Empty: measured if `normalize` needs it.
        std: Standard deviation of each channel, together with `mean`. Empty: as for `mean`.
        public: Share of the training samples, in [0, 1), that become public. All clients have them,
            without targets. 0: none.
        max_bytes: Bytes that all samples may take in memory. 0: half of the free memory.
    """
    root = Path(path)
    _check_labels(labels, ignored)
    parts = [_paired(images, marked, domains) for images, marked in mask_folders(root)]
    files = list(chain.from_iterable(parts))
    read, is_volume = _reader(files[0][0], size, gray, canonical)
    if not is_volume:
        _check_pictures(root, files, size, gray, max_bytes)
    limit = memory_limit(max_bytes)
    pairs: list[Pair] = []
    num_bytes = 0
    for names in files:
        pairs.append(_numbered(read(*names), labels, ignored, names[1]))
        num_bytes += pairs[-1].image.nbytes + pairs[-1].mask.nbytes
        if num_bytes > limit:
            raise DataError(
                f"{root} is not read: its samples up to {names[0]}, {len(pairs)} of {len(files)}, "
                f"take {num_bytes:,} bytes in memory, and {limit:,} are allowed. --max-bytes "
                "(max_bytes=… in Python) allows more."
            )
    _check_alike(files, pairs)

    if is_volume and normalize == "auto" and not mean:
        normalize = "sample"  # Scanners have no common unit of intensity.
    sides = padding.common_sides([pair.mask.shape for pair in pairs], multiple_of, root.name)
    count = len(parts[0])
    train = _stacked(pairs[:count], sides, normalize == "sample")
    test = _stacked(pairs[count:], sides, normalize == "sample") if len(parts) > 1 else None
    padding.check_foreground(root.name, [train[1]] if test is None else [train[1], test[1]])

    domain_names = [image.parent.name for image, _ in files]
    pool = Pool.of(
        train,
        test,
        domains=domain_names[:count] if domains else None,
        test_domains=domain_names[count:] if domains and test is not None else None,
        name=root.name,
        num_classes=len(labels),
    )
    scale = padding.scale_of_counted(pool, normalize, mean, std)
    return replace(pool, scale=scale).with_public(public)


def is_mask_folder(root: Path) -> bool:
    """Return True if `root` or `root/train` has a folder of images beside a folder of masks."""
    return any(_layout_in(folder) is not None for folder in (root, root / "train"))


def mask_folders(root: Path) -> list[tuple[Path, Path]]:
    """Return (folder of images, folder of masks) for training and, if it exists, for testing.

    They are in `root/train` and `root/test`, or in `root` itself if there is no `root/train`.

    Raises:
        DataError: One of these folders does not have both images and masks.
    """
    candidates = [root / "train", root / "test"] if (root / "train").is_dir() else [root]
    folders: list[tuple[Path, Path]] = []
    for folder in filter(Path.is_dir, candidates):
        pair = _layout_in(folder)
        if pair is None:
            names = sorted(child.name for child in folder.iterdir() if child.is_dir())
            raise DataError(
                f"images with masks were asked for in {folder}; it has these folders: "
                f"{', '.join(names) or 'none'}. images/ and masks/ fit, or imagesTr/ and "
                "labelsTr/, also inside of train/ and test/."
            )
        folders.append(pair)
    return folders


def _layout_in(place: Path) -> tuple[Path, Path] | None:
    """Return the folders of images and of masks in `place`, or None if it does not have both."""
    for images, marked in LAYOUTS:
        if (place / images).is_dir() and (place / marked).is_dir():
            return place / images, place / marked
    return None


# --- files --------------------------------------------------------------------------------------


def _paired(images: Path, marked: Path, domains: bool) -> list[Files]:
    """Return the files of every image and its mask, in the order of the images' names.

    Args:
        images: Folder of images, with folders inside.
        marked: Folder of masks, which have the names of their images up to the ending.
        domains: True: refuse images that are in no folder of a domain.

    Raises:
        DataError: There are no images, or an image or a mask has no partner.
    """
    named_images = _by_stem(images)
    named_masks = _by_stem(marked)
    if not named_images:
        endings = ", ".join((*SUFFIXES, *nifti.SUFFIXES))
        raise DataError(
            f"{images} has no images ({endings}) in it; {images}/one.png with {marked}/one.png "
            "would fit."
        )
    if missing := [file for stem, file in named_images.items() if stem not in named_masks]:
        raise DataError(
            f"{len(missing)} of {len(named_images)} images in {images} have no mask, such as "
            f"{missing[0].name}; {marked / missing[0].relative_to(images)} would fit. Names must "
            "be the same up to the ending."
        )
    if spare := [file for stem, file in named_masks.items() if stem not in named_images]:
        raise DataError(
            f"{len(spare)} of {len(named_masks)} masks in {marked} have no image, such as "
            f"{spare[0].name}. Remove them, or add {images / spare[0].relative_to(marked)} and "
            "the others."
        )
    for stem, file in named_images.items():
        if domains and "/" not in stem:
            raise DataError(
                f"{file} is in no folder named after a domain; {images}/DOMAIN/{file.name} would "
                "fit."
            )
    return [(file, named_masks[stem]) for stem, file in named_images.items()]


def _by_stem(folder: Path) -> dict[str, Path]:
    """Return images and volumes in a folder and below, by relative path without the ending.

    Hidden and other files are left out. Two files with the same stem raise a DataError.
    """
    by_stem: dict[str, Path] = {}
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        endings = [end for end in (*nifti.SUFFIXES, *SUFFIXES) if name.lower().endswith(end)]
        if not endings or file.name.startswith("."):
            continue
        stem = name[: -len(endings[0])]
        if stem in by_stem:
            raise DataError(
                f"{by_stem[stem]} and {file} have the same name up to the ending; remove one of "
                "them."
            )
        by_stem[stem] = file
    return by_stem


def _check_pictures(root: Path, files: list[Files], size: int, gray: bool, max_bytes: int) -> None:
    """Raise a DataError if pictures and their masks would take too much memory.

    Sizes are read from headers, so that no pixels are loaded.

    Args:
        root: Folder of the data, for the message.
        files: Image and mask of each sample.
        size: Pixels per side to which pictures are resized. 0: they keep their size.
        gray: True: pictures have one channel. False: three.
        max_bytes: Bytes that they may take. 0: half of the free memory.
    """
    total = 0
    for image_file, _ in files:
        if not _is_volume(image_file):
            width, height = (size, size) if size else image_size(image_file)
            total += width * height * ((1 if gray else 3) + MASK_BYTES)
    if problem := too_large(total, max_bytes):
        raise DataError(f"{root} has {len(files):,} pictures with masks and is not read: {problem}")


def _is_volume(file: Path) -> bool:
    return file.name.lower().endswith(nifti.SUFFIXES)


def _reader(first: Path, size: int, gray: bool, canonical: bool) -> tuple[Reader, bool]:
    """Return the function that reads an image and its mask, and True if they are volumes.

    Args:
        first: First image, whose ending tells volumes from pictures.
        size: Pixels per side to which pictures are resized. 0: they keep their size.
        gray: True: read pictures with one channel.
        canonical: True: turn volumes so that their axes are RAS.

    Raises:
        ConfigError: A setting of pictures was given for volumes, or the reverse.
    """
    if _is_volume(first):
        if size or gray:
            raise ConfigError(
                f"size and gray are for pictures; {first.name} is a volume. Leave them out."
            )
        return partial(_read_volume, canonical=canonical), True
    if not whole(size):
        raise ConfigError(
            f"size = {size} was asked for; a whole number of pixels fits, or 0 to keep sizes."
        )
    if canonical:
        raise ConfigError(
            f"canonical is for NIfTI volumes; {first.name} is a picture. Leave it out."
        )
    return partial(_read_picture, size=size, gray=gray), False


def _read_picture(image_file: Path, mask_file: Path, size: int, gray: bool) -> Pair:
    """Read a picture as bytes (channel, height, width), and its mask as int64 (height, width).

    Args:
        image_file: File of the picture.
        mask_file: File of the mask, with one number a pixel.
        size: Pixels per side. A resized mask takes the nearest value. 0: sizes stay.
        gray: True: one channel. False: three.

    Raises:
        DataError: A file is a volume, the mask is a JPEG or in colour, the picture has more than 8
            bits a channel, or sizes differ.
    """
    for file in (image_file, mask_file):
        if _is_volume(file):
            raise DataError(f"{file} is a volume among pictures; a folder has one kind of files.")
    if mask_file.suffix.lower() in LOSSY:
        raise DataError(
            f"{mask_file} is a JPEG, which does not keep values exactly. Save masks as .png with "
            "one number a pixel."
        )
    opened = open_image(image_file)
    if opened.mode in DEEP_MODES:
        raise DataError(
            f"{image_file} has more than 8 bits a channel (mode {opened.mode}), which would be cut "
            "off. Volumes (.nii.gz) and arrays (.npz) keep all of them."
        )
    picture = opened.convert("L" if gray else "RGB")
    mask = open_image(mask_file)
    if mask.mode not in MASK_MODES:
        raise DataError(
            f"{mask_file} has colours (mode {mask.mode}); a mask has one number a pixel, its "
            "class. Pictures with a palette, black and white, 8, 16 or 32 bits of grey fit."
        )
    if mask.size != picture.size:
        raise DataError(
            f"{mask_file} has {mask.height}×{mask.width} pixels and its image {image_file} "
            f"{picture.height}×{picture.width}; they must be alike."
        )
    if size:
        from PIL.Image import Resampling

        picture = picture.resize((size, size), Resampling.BILINEAR)
        mask = mask.resize((size, size), Resampling.NEAREST)
    pixels = np.asarray(picture).reshape(picture.height, picture.width, -1)
    return Pair(np.moveaxis(pixels, -1, 0), np.asarray(mask).astype(np.int64))


def _read_volume(image_file: Path, mask_file: Path, canonical: bool) -> Pair:
    """Read a volume as float32 (channel, *size), and its mask as int64 (*size).

    Args:
        image_file: NIfTI file of the volume.
        mask_file: NIfTI file of the mask.
        canonical: True: turn both so that their axes are RAS.

    Raises:
        DataError: A file is a picture, size or orientation differ, or the mask has several
            channels or values that are not whole.
    """
    for file in (image_file, mask_file):
        if not _is_volume(file):
            raise DataError(f"{file} is a picture among volumes; a folder has one kind of files.")
    volume = nifti.read_volume(image_file, canonical)
    marked = nifti.read_volume(mask_file, canonical)
    size = volume.values.shape[1:]
    if len(marked.values) > 1:
        raise DataError(
            f"{mask_file} has {len(marked.values)} channels; a mask has one number a voxel, its "
            "class."
        )
    mask = marked.values[0]
    if mask.shape != size:
        raise DataError(
            f"{mask_file} has {shape_text(mask.shape)} voxels and its image {image_file} "
            f"{shape_text(size)}; they must be alike."
        )
    if marked.orientation != volume.orientation:
        raise DataError(
            f"{mask_file} has axes in the order {marked.orientation} and its image {image_file} "
            f"in the order {volume.orientation}. canonical = true brings all volumes into one."
        )
    if (mask != np.rint(mask)).any():
        value = mask[mask != np.rint(mask)].flat[0]
        raise DataError(
            f"{mask_file} has the value {value:g}; a mask has whole numbers, the classes of its "
            "voxels."
        )
    return Pair(_as_float32(volume.values, image_file), mask.astype(np.int64), volume.orientation)


def _as_float32(values: np.ndarray, file: Path) -> np.ndarray:
    """Return intensities as float32. Values beyond its range are a DataError that names `file`."""
    largest = float(np.abs(values.astype(np.float64)).max())
    if largest > float(np.finfo(np.float32).max):
        raise DataError(f"{file} has values of up to {largest:.3g}, too large for float32.")
    return values.astype(np.float32)


# --- values -------------------------------------------------------------------------------------


def _check_labels(labels: tuple[int, ...], ignored: int | None) -> None:
    """Raise a ConfigError if a value of masks is in `labels` twice, or is in it and ignored too."""
    if len(set(labels)) < len(labels):
        raise ConfigError(f"labels = {list(labels)} was asked for; name each value once.")
    if ignored in labels:
        raise ConfigError(
            f"labels = {list(labels)} and ignored = {ignored} were asked for; a value is one of "
            "the two."
        )


def _numbered(pair: Pair, labels: tuple[int, ...], ignored: int | None, file: Path) -> Pair:
    """Return a pair whose mask has classes, and −100 in place of the ignored value.

    Args:
        pair: Image and mask with the values of the file.
        labels: Value of each class: the mask gets k where the file has `labels[k]`. Empty: values
            are classes already.
        ignored: Value of voxels that do not count. None: there is none.
        file: File of the mask, for the message.

    Raises:
        DataError: The mask has a value that is no class.
    """
    values = np.unique(pair.mask)
    class_values = values[values != ignored]
    if labels:
        fits = np.isin(class_values, labels)
        rule = f"labels = {list(labels)} were asked for"
    else:
        fits = ((class_values >= 0) & (class_values <= TOP_LABEL)) | (class_values == IGNORED)
        rule = f"classes are numbered from 0 to {TOP_LABEL}"
    if not fits.all():
        shown = ", ".join(map(str, values[:8].tolist())) + (", …" if len(values) > 8 else "")
        bad_value = class_values[~fits][-1]
        raise DataError(
            f"{file} has the values {shown}; {rule}. labels = [{shown}] would make them the "
            f"classes 0, 1, … in this order, and ignored = {bad_value} would leave {bad_value} out "
            "of loss and metrics."
        )
    mask = np.full_like(pair.mask, IGNORED) if labels else pair.mask.copy()
    for number, value in enumerate(labels):
        mask[pair.mask == value] = number
    if ignored is not None:
        mask[pair.mask == ignored] = IGNORED
    return replace(pair, mask=mask)


def _check_alike(files: list[Files], pairs: list[Pair]) -> None:
    """Refuse images whose number of channels or orientation differs from the first image's.

    Args:
        files: Image and mask file of each sample, for messages.
        pairs: Image and mask of each sample, in the same order.
    """
    first = pairs[0]
    for (file, _), pair in zip(files, pairs, strict=True):
        if len(pair.image) != len(first.image):
            raise DataError(
                f"{file} has {len(pair.image)} channels and {files[0][0]} {len(first.image)}; they "
                "must be alike."
            )
        if pair.orientation != first.orientation:
            raise DataError(
                f"{file} has axes in the order {pair.orientation} and {files[0][0]} in the order "
                f"{first.orientation}. canonical = true brings all volumes into one."
            )


def _stacked(
    pairs: list[Pair],
    sides: tuple[int, ...],
    standardize: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs (sample, channel, *sides) and targets (sample, *sides) of image-mask pairs.

    Padding at the end of every side is 0 in inputs and −100 in targets.

    Args:
        pairs: Image and mask of each sample.
        sides: Sides of the result, none shorter than a sample's.
        standardize: True: standardise every channel of every image before padding.
    """
    images = [pair.image for pair in pairs]
    if standardize:
        images = [padding.standardized(image) for image in images]
    inputs = padding.stacked(images, sides, 0, images[0].dtype)
    return inputs, padding.padded_masks([pair.mask for pair in pairs], sides)
