"""Stored results: runs that pages report, small and without weights.

results/PAPER/NAME-seed0/
├── config.toml        every setting; `fedquilt run config.toml` repeats the run if it has its data
├── rounds.jsonl.gz    one record per round; left out if nothing was trained
└── summary.json       the last round, the best round, the command, the date and versions
"""

from __future__ import annotations

import gzip
import json
import platform
import re
import time
import tomllib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fedquilt.errors import ConfigError, RecordError
from fedquilt.round import Record
from fedquilt.runs.summary_file import read_summary
from fedquilt.storage.files import why, write
from fedquilt.studies.result import Result
from fedquilt.version import __version__

MAX_BYTES = 100_000  # Limit on the size of all files of one stored result.
_ROUNDS = "rounds.jsonl.gz"
_SHORTENED = ("seconds", "loss")  # Numbers of a record that are stored with six digits.


def store(result: Result, run_folder: Path, target: Path, about: Mapping[str, Any]) -> None:
    """Write the folder of a stored result.

    Args:
        result: A finished run.
        run_folder: Folder of the run, whose `config.toml` is copied without the folders of its
            files.
        target: Folder to write. One that holds a run with the same settings is left as it is.
        about: Entries of "about" in `summary.json`, such as the command, the table and its row.

    Raises:
        ConfigError: The folder holds another run, or the result is larger than `MAX_BYTES`.
        RecordError: A file could not be read or written.
    """
    config = _portable(_read(run_folder / "config.toml"))
    if (target / "summary.json").exists():
        if _read(target / "config.toml") != config:
            raise ConfigError(
                f"{target} was to be written; it holds a run with other settings. Move it first."
            )
        return
    files = {"config.toml": config}
    if result.records:
        lines = "".join(json.dumps(_short(record)) + "\n" for record in result.records)
        files[_ROUNDS] = gzip.compress(lines.encode(), mtime=0)
    about = {**about, "device": _device(config)}
    files["summary.json"] = _summary(result, about)  # The last one: a folder that has it is whole.
    size = sum(map(len, files.values()))
    if size > MAX_BYTES:
        raise ConfigError(
            f"{target} was to be written; it would take {size:,} bytes, and at most {MAX_BYTES:,} "
            "are stored. Evaluate less often."
        )
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write(target / name, [content])
    except OSError as error:
        raise RecordError(f"{target} could not be written: {why(error)}.") from error


def _portable(config: bytes) -> bytes:
    """Return the content of a `config.toml` with data and supernet files named without folders.

    Folders differ between machines, so that settings would not compare as equal.
    """
    config = re.sub(rb'(?m)^(name = ")[^"\n]*/([^"/\n]+\.npz")$', rb"\1\2", config)
    return re.sub(rb'(?m)^(supernet = ")[^"\n]*/([^"/\n]+")$', rb"\1\2", config)


def _device(config: bytes) -> str:
    """Return the device in a run's settings, and the name of such hardware on this machine.

    Examples are `cuda, NVIDIA H200` and `cpu, x86_64`.

    Args:
        config: Content of the run's config.toml.
    """
    device = tomllib.loads(config.decode()).get("engine", {}).get("device", "cpu")
    if device.startswith("cuda") and torch.cuda.is_available():
        return f"{device}, {torch.cuda.get_device_name(device)}"
    return f"{device}, {platform.processor() or platform.machine()}"


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {why(error)}.") from error


def _summary(result: Result, about: Mapping[str, Any]) -> bytes:
    versions = {
        "fedquilt": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    data = Path(str(result.summary.get("data", ""))).name
    summary = {
        **result.summary,
        "data": data,
        "about": {**about, "date": time.strftime("%Y-%m-%d"), "versions": versions},
    }
    if result.best is not None:
        number, grades = result.best
        summary["best"] = {"round": number, "accuracy": grades.accuracy, "metrics": grades.metrics}
    return (json.dumps(summary, indent=1, ensure_ascii=False) + "\n").encode()


def _short(record: Record) -> dict[str, Any]:
    plain = record.to_dict()
    for name in _SHORTENED:
        if plain[name] is not None:
            plain[name] = float(f"{plain[name]:.6g}")
    return plain


def read_stored(folder: Path) -> Result:
    """Return the result in a folder that `store` wrote.

    Its entry is the method of the summary, or the folder's name. Records are empty if nothing was
    trained.

    Raises:
        RecordError: A file is missing or damaged.
    """
    summary = read_summary(folder)
    if summary is None:
        raise RecordError(f"the stored result in {folder} was asked for; it has no summary.json.")
    file = folder / _ROUNDS
    records: list[Record] = []
    if file.exists():
        try:
            lines = gzip.decompress(file.read_bytes()).splitlines()
            records = [Record.from_dict(json.loads(line)) for line in lines]
        except (
            OSError,
            EOFError,
            zlib.error,
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
        ) as error:
            raise RecordError(f"{file} is damaged: {error}.") from error
    return Result(
        summary.get("method", folder.name), summary.get("seed", 0), summary, tuple(records)
    )


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings of a stored result, as its `config.toml` has them.

    Raises:
        RecordError: The file cannot be read.
    """
    file = folder / "config.toml"
    try:
        return tomllib.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{file} cannot be read: {error}.") from error


def stored_name(*parts: str) -> str:
    """Return the name of a stored result: parts in lower case, joined by hyphens.

    Empty parts are left out. Other characters than a to z, digits and dots become hyphens, so that
    a shell needs no quotes.
    """
    return "-".join(re.sub(r"[^a-z0-9.]+", "-", part.lower()).strip("-.") for part in parts if part)
