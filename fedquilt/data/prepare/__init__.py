"""Public data sets as .npz files: download published files, compare checksums, write arrays.

The readers are tested on small local files in the published layouts. They have not been run against
the public hosts.
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedquilt.data.prepare.catalog import DATA_SETS, DataSet, Recipe
from fedquilt.data.prepare.download import Downloads, Fetched, Published, Watch
from fedquilt.errors import ConfigError
from fedquilt.names import known
from fedquilt.storage.files import write

__all__ = [
    "DATA_SETS",
    "DataSet",
    "Prepared",
    "Published",
    "Recipe",
    "missing_message",
    "prepare",
]

FOLDER = Path("data")  # Folder of the files unless another one is named.
DOWNLOADS = "downloads"  # Folder of downloaded files, inside that of the files.


@dataclass(frozen=True)
class Prepared:
    """File that was written, and the published files that it was made from."""

    data_set: DataSet  # Data set that was prepared.
    path: Path  # Path of the .npz file.
    bytes: int  # Size of the file.
    sha256: str  # Checksum of the file.
    shapes: Mapping[str, tuple[int, ...]]  # Shapes of its arrays by name.
    files: tuple[Fetched, ...]  # Published files that it was made from.

    def to_dict(self) -> dict[str, Any]:
        """Return paths, sizes, checksums, shapes, title, source and terms as plain JSON values."""
        return {
            "file": str(self.path),
            "bytes": self.bytes,
            "sha256": self.sha256,
            "arrays": {name: list(shape) for name, shape in self.shapes.items()},
            "title": self.data_set.title,
            "source": self.data_set.source,
            "terms": self.data_set.terms,
            "files": [
                {
                    "file": str(file.path),
                    "downloaded_from": file.origin or None,
                    "bytes": file.bytes,
                    "sha256": file.sha256,
                    "checked": file.is_checked,
                }
                for file in self.files
            ],
        }


def prepare(
    names: Sequence[str],
    out: Path = FOLDER,
    origin: str = "",
    force: bool = False,
    recipe: Recipe | None = None,
    watch: Watch | None = None,
) -> list[Prepared]:
    """Download published data, and write each data set as `out/NAME.npz`.

    A file is written completely or not at all.

    Args:
        names: Names of `DATA_SETS`.
        out: Folder for the files. Downloads are kept in its folder `downloads`.
        origin: Folder or URL with the published files by their names. Empty: the public hosts.
        force: True: existing files are overwritten.
        recipe: Number of images, random seed and fonts. None: the defaults.
        watch: Called with the name of a step, how much of it is done, and how much there is (0:
            unknown). None: progress is not reported.

    Returns:
        An entry for each file, in the order of `names`.

    Raises:
        ConfigError: A name is unknown or repeated, or a file exists already.
        DataError: A file cannot be obtained, has a wrong checksum, or has another layout than
            published.
    """
    data_sets = [known(DATA_SETS, name, "data set to prepare") for name in names]
    if not data_sets or len(set(names)) < len(names):
        listed = " ".join(names) or "nothing"
        raise ConfigError(
            f"prepare {listed} was asked for; name each data set once. Known: "
            f"{', '.join(DATA_SETS)}."
        )
    paths = [out / f"{data_set.name}.npz" for data_set in data_sets]
    for path in paths:
        if path.exists() and not force:
            raise ConfigError(f"{path} was asked for; it is there already. --force writes over it.")
    report = watch or (lambda step, done, total: None)
    downloads = Downloads(out / DOWNLOADS, origin, report)
    return [
        _prepared(data_set, path, downloads, recipe or Recipe(), report)
        for data_set, path in zip(data_sets, paths, strict=True)
    ]


def _prepared(
    data_set: DataSet, path: Path, downloads: Downloads, recipe: Recipe, watch: Watch
) -> Prepared:
    files = {file.name: downloads.fetch(file) for file in data_set.files}
    watch(f"making {path.name}", 0, 0)
    arrays = data_set.make(files, recipe, watch)
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = write(path, [buffer.getbuffer()])
    shapes = {name: array.shape for name, array in arrays.items()}
    return Prepared(data_set, path, written.size, written.sha256, shapes, tuple(files.values()))


def missing_message(name: str, folder: str | Path = FOLDER) -> str:
    """Return the message for a missing data file: its content, its source, and how to prepare it.

    A name that is not in `DATA_SETS` gets a shorter message.

    Args:
        name: Name of the data set, and of the file without .npz.
        folder: Folder in which it was looked for.
    """
    file = Path(folder) / f"{name}.npz"
    if name not in DATA_SETS:
        return (
            f"{file} is needed; there is no such file, and `fedquilt data prepare` cannot make "
            f"it. It can make {', '.join(DATA_SETS)}."
        )
    data_set = DATA_SETS[name]
    command = shlex.join(["fedquilt", "data", "prepare", name, "--out", str(folder)])
    return (
        f"{file} is needed; there is no such file. It holds {data_set.title}. Source: "
        f"{data_set.source}. `{command}` prepares it."
    )
