"""SYN-like digits: synthetic numbers after the recipe of Ganin and Lempitsky (ICML 2015).

The published set was drawn with Windows fonts. Numbers of one to three digits vary in position,
orientation, background colour, stroke colour and blur. The paper says that the degrees of variation
were chosen by hand, and does not list them. The ranges and fonts here are our own choice, so that
these images are like SYN and are not SYN. docs/data.md lists every random quantity.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedquilt import noise
from fedquilt.data.prepare.download import Watch
from fedquilt.errors import ConfigError, DataError
from fedquilt.errors.extras import how_to_install

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFont import FreeTypeFont

SIDE = 28  # Pixels of a finished image.
ZOOM = 3  # Images are drawn larger by this factor and made smaller at the end, which smooths edges.
CANVAS = SIDE * ZOOM
# Ranges of the random quantities, both ends included. Lengths are in pixels of the canvas.
NUM_DIGITS = (1, 3)
FONT_SIZE = (42, 90)
TENTHS_OF_DEGREES = (-250, 250)
SHIFT = (-9, 9)
BLUR_TENTHS = (0, 45)  # Radius of the Gaussian blur in tenths of a pixel.
MIN_CONTRAST = 150  # Sum of |stroke − background| over channels; below it both are drawn again.
DEJAVU = (
    "DejaVuSans.ttf",
    "DejaVuSans-Bold.ttf",
    "DejaVuSans-BoldOblique.ttf",
    "DejaVuSans-Oblique.ttf",
    "DejaVuSansMono.ttf",
    "DejaVuSansMono-Bold.ttf",
    "DejaVuSansMono-BoldOblique.ttf",
    "DejaVuSansMono-Oblique.ttf",
    "DejaVuSerif.ttf",
    "DejaVuSerif-Bold.ttf",
    "DejaVuSerif-BoldItalic.ttf",
    "DejaVuSerif-Italic.ttf",
)
_REPORT_EVERY = 100  # Images between two reports of progress.


def synthesised(
    count: int, split: str, seed: int, fonts: Path | None, watch: Watch
) -> tuple[np.ndarray, np.ndarray]:
    """Draw images (count, 28, 28, 3) as bytes, and return them with their digits.

    All digits occur equally often. The same arguments, fonts and version of Pillow give the same
    bytes.

    Args:
        count: Number of images.
        split: "train" or "test". Their random numbers differ.
        seed: Random seed.
        fonts: Folder with .ttf and .otf files. None: DejaVu, which matplotlib has, and Pillow's
            font.
        watch: Called with the progress.
    """
    need_pillow("syn")
    typefaces = _typefaces(fonts)
    digits = np.arange(count, dtype=np.uint8) % 10
    images = np.empty((count, SIDE, SIDE, 3), np.uint8)
    for number, digit in enumerate(digits.tolist()):
        draws = DigitDraws(noise.key(seed, noise.Stream.SYNTHETIC_DIGITS, split == "test", number))
        images[number] = np.asarray(_image(digit, draws, typefaces))
        if number % _REPORT_EVERY == 0:
            watch(f"syn {split}", number, count)
    return images, digits


def syn(
    per_domain: dict[str, int], seed: int, fonts: Path | None, watch: Watch
) -> dict[str, np.ndarray]:
    """Return arrays of SYN-like digits: `x_` and `y_`, each followed by the name of the split.

    Args:
        per_domain: Number of images by split, "train" and "test".
        seed: Random seed.
        fonts: Folder of fonts. None: those of matplotlib and Pillow.
        watch: Called with the progress.
    """
    arrays: dict[str, np.ndarray] = {}
    for split, count in per_domain.items():
        arrays[f"x_{split}"], arrays[f"y_{split}"] = synthesised(count, split, seed, fonts, watch)
    return arrays


@dataclass
class DigitDraws:
    """Random integers for one image: hashes of its key, which are the same on every machine."""

    key: int  # Key of the image.
    count: int = 0  # Numbers that were drawn so far.

    def between(self, low: int, high: int) -> int:
        """Draw the image's next random number, from `low` to `high`, both included."""
        self.count += 1
        return low + noise.key(self.key, self.count) % (high - low + 1)

    def color(self) -> tuple[int, int, int]:
        """Draw a random colour as red, green and blue, each from 0 to 255."""
        return self.between(0, 255), self.between(0, 255), self.between(0, 255)


def need_pillow(name: str) -> None:
    """Raise a ConfigError that says how to install Pillow, if it is missing.

    Args:
        name: Name of the data that needs it, for the message.
    """
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"{name} needs Pillow, which is not installed: {how_to_install('images')}."
        ) from error


def _image(digit: int, draws: DigitDraws, typefaces: tuple[Path | None, ...]) -> Image:
    """Draw one image of 28 × 28 pixels in colour, with `digit` in the centre.

    It may have further digits beside it. The order of random draws is part of the recipe.

    Args:
        digit: The labelled digit.
        draws: Random numbers of this image.
        typefaces: Fonts to choose from. None means the font inside Pillow.
    """
    from PIL import Image, ImageFilter

    number = [draws.between(0, 9) for _ in range(draws.between(*NUM_DIGITS))]
    labeled = draws.between(0, len(number) - 1)
    number[labeled] = digit
    text = "".join(map(str, number))
    font = _font(typefaces[draws.between(0, len(typefaces) - 1)], draws.between(*FONT_SIZE))
    angle = draws.between(*TENTHS_OF_DEGREES) / 10
    shift = (draws.between(*SHIFT), draws.between(*SHIFT))
    background, stroke = _colors(draws)
    radius = draws.between(*BLUR_TENTHS) / 10

    mask = _written(text, labeled, font)
    mask = mask.rotate(angle, Image.Resampling.BILINEAR, translate=shift)
    size = (CANVAS, CANVAS)
    picture = Image.composite(
        Image.new("RGB", size, stroke), Image.new("RGB", size, background), mask
    )
    return picture.filter(ImageFilter.GaussianBlur(radius)).reduce(ZOOM)


def _colors(draws: DigitDraws) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Draw the colours of background and stroke, again until they have enough contrast."""
    while True:
        background = draws.color()
        stroke = draws.color()
        contrast = sum(
            abs(value - other_value) for value, other_value in zip(background, stroke, strict=True)
        )
        if contrast >= MIN_CONTRAST:
            return background, stroke


def _written(text: str, labeled: int, font: FreeTypeFont) -> Image:
    """Return white text on black as a grey image, cropped to the square canvas.

    Args:
        text: Digits to write.
        labeled: Index in `text` of the digit that is centred.
        font: Font of the text.
    """
    from PIL import Image, ImageDraw

    left, top, right, bottom = font.getbbox(text[labeled])
    offset = font.getlength(text[:labeled])
    corner = (round((CANVAS - left - right) / 2 - offset), round((CANVAS - top - bottom) / 2))
    mask = Image.new("L", (CANVAS, CANVAS), 0)
    ImageDraw.Draw(mask).text(corner, text, fill=255, font=font)
    return mask


# --- fonts --------------------------------------------------------------------------------------


def _typefaces(folder: Path | None) -> tuple[Path | None, ...]:
    """Return the font files of a folder, sorted by name, after checking that they have digits.

    Args:
        folder: Folder with .ttf and .otf files. None: DejaVu's fonts, and Pillow's own font,
            which is None in the result.

    Raises:
        ConfigError: The folder or its fonts are missing.
    """
    if folder is None:
        return (*_dejavu(), None)
    if not folder.is_dir():
        raise ConfigError(f"--fonts {folder} was asked for; there is no such folder.")
    fonts = [file for file in folder.iterdir() if file.suffix.lower() in (".ttf", ".otf")]
    if not fonts:
        raise ConfigError(f"--fonts {folder} was asked for; there are no .ttf or .otf files in it.")
    fonts.sort(key=lambda file: file.name)
    for file in fonts:
        _check_digits(file)
    return tuple(fonts)


def _dejavu() -> list[Path]:
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(
            "SYN-like digits are drawn with the fonts that matplotlib brings, which is not "
            f"installed: {how_to_install('plot')}. A folder of fonts that --fonts names would do, "
            "too."
        ) from error
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    files = [folder / name for name in DEJAVU]
    if missing := [file for file in files if not file.is_file()]:
        raise DataError(
            f"{missing[0]} is needed for SYN-like digits; this matplotlib does not have it. Use "
            "--fonts."
        )
    return files


@cache
def _font(file: Path | None, size: int) -> FreeTypeFont:
    """Load a font with basic layout, which does not depend on text libraries of the machine.

    Args:
        file: Font file. None: the font inside Pillow.
        size: Size in pixels.
    """
    from PIL import ImageFont

    if file is not None:
        return ImageFont.truetype(file, size, layout_engine=ImageFont.Layout.BASIC)
    font = ImageFont.load_default(size)
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise ConfigError("this Pillow cannot draw text: it was built without FreeType.")
    assert isinstance(font.path, BytesIO)
    return ImageFont.truetype(
        BytesIO(font.path.getvalue()), size, layout_engine=ImageFont.Layout.BASIC
    )


def _check_digits(file: Path) -> None:
    """Raise a DataError if two digits look the same in a font, as in a font without digits."""
    try:
        font = _font(file, FONT_SIZE[0])
        shapes = {bytes(np.asarray(_written(digit, 0, font))) for digit in "0123456789"}
    except OSError as error:
        raise DataError(f"{file} cannot be read as a font: {error}.") from error
    if len(shapes) < 10:
        raise DataError(
            f"{file} has no shapes for the ten digits; move it out of the folder of fonts."
        )
