"""Files of a run's folder, read without a lock: records, number of rounds, checksums."""

from __future__ import annotations

import hashlib
import json
import logging
import tomllib
from collections.abc import Sequence
from pathlib import Path

from fedquilt.errors import RecordError
from fedquilt.round import Record
from fedquilt.runs.about import is_round
from fedquilt.runs.checkpoint import Checkpoints, Manifest
from fedquilt.runs.round_log import Gap, RoundLog, parse, rounds_text
from fedquilt.storage.files import TEMPORARY, refuse_special, why

_log = logging.getLogger("fedquilt")

MAX_LISTED = 5  # Largest number of problems that an error lists
# Files of runs and studies, which must not be links or special files
_FILES = (
    "config.toml",
    "rounds.jsonl",
    "rounds.jsonl.damaged",
    "summary.json",
    "tracking.json",
    "lock",
    "study.toml",
)


def holds_a_run(path: Path) -> bool:
    """Return True if a folder has records, a summary or checkpoints that a run would overwrite.

    A folder that has only settings or an empty log counts as free.
    """
    check_folder(path)
    rounds = path / "rounds.jsonl"
    begun = rounds.is_file() and rounds.stat().st_size > 0
    return begun or (path / "summary.json").exists() or Checkpoints(path / "checkpoint").exist


def lacking_samples(path: Path) -> str:
    """Return the reason why a run's data must not be measured on, or an empty text.

    The server of a deployment may have samples only to describe those of devices. `fedquilt serve`
    wrote that to the folder.
    """
    file = path / "deployment" / "request.json"
    if not file.is_file():
        return ""
    check_plain(file, path)
    try:
        samples = json.loads(file.read_bytes())["samples"]
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    if samples in ("both", "calibration"):
        return ""
    return f"the server of this deployment uses no training samples (--samples {samples})."


def check_folder(path: Path) -> None:
    """Refuse a run's folder in which a symbolic link or a special file replaces one of its files.

    Raises:
        RecordError: There is such a file. The folder itself may be a link, and need not exist.
    """
    checkpoints = path / "checkpoint"
    names = [path / f"{name}{end}" for name in _FILES for end in ("", TEMPORARY)]
    check_plain(checkpoints, path)
    for file in (*names, *(checkpoints.iterdir() if checkpoints.is_dir() else ())):
        check_plain(file, path)


def check_plain(file: Path, folder: Path | None = None) -> None:
    """Refuse a file of a run's folder that is a symbolic link or a special file.

    Args:
        file: Path of the file, which need not exist.
        folder: Folder of the run, for the message. None: the one that the file is in.

    Raises:
        RecordError: It is such a file.
    """
    try:
        refuse_special(file)
    except FileExistsError as error:
        raise RecordError(
            f"the folder {folder or file.parent} was asked for; {why(error)}. Only plain files are "
            "used, so that nothing outside of the folder is read or changed."
        ) from error


def settings_checksum(path: Path) -> str | None:
    """Return a checksum of the settings in config.toml, without `rounds`, which may grow.

    Comments and layout do not count. The result is None if the file cannot be read.

    Args:
        path: Folder of the run.
    """
    try:
        settings = tomllib.loads((path / "config.toml").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    settings.pop("rounds", None)
    return checksum(json.dumps(settings, sort_keys=True, default=str).encode())


def checksum(content: bytes) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a file's content."""
    return hashlib.sha256(content).hexdigest()[:16]


def rounds_planned(path: Path, usual: int) -> int:
    """Return the number of rounds that the run in a folder was begun with.

    Checkpoints have this number. Those of earlier versions do not, and then it is read from
    config.toml, where it may have grown.

    Args:
        path: Folder of the run.
        usual: Number that is returned if the folder does not have it.
    """
    rounds = Checkpoints(path / "checkpoint").newest_about.get("settled_for")
    if isinstance(rounds, int) and is_round(rounds):
        return rounds
    try:
        settings = tomllib.loads((path / "config.toml").read_text())
    except (OSError, ValueError):
        return usual
    rounds = settings.get("python", settings).get("rounds", usual)
    return rounds if isinstance(rounds, int) else usual


def read_records(path: str | Path) -> list[Record]:
    """Return the records of all rounds in a run's folder, in the order of the file.

    Raises:
        RecordError: rounds.jsonl cannot be read, or lines of it are damaged.
    """
    log = read_log(path)
    if log.damage:
        raise RecordError(
            f"the rounds of {path} were asked for; {Path(path) / 'rounds.jsonl'} is not what was "
            f"written: {'; '.join(log.damage[:MAX_LISTED])}."
        )
    return log.records


def read_log(path: str | Path) -> RoundLog:
    """Return the log in a run's folder, with descriptions of lines that are damaged.

    Raises:
        RecordError: rounds.jsonl cannot be read at all.
    """
    file = Path(path) / "rounds.jsonl"
    check_folder(Path(path))
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise RecordError(
            f"the rounds of {path} were asked for; {file} cannot be read: {why(error)}."
        ) from error


def log_until(log: RoundLog, manifest: Manifest) -> RoundLog:
    """Return the intact lines of a log up to a checkpoint.

    The result is empty if the last of them is not the line that the checkpoint was written with.

    Args:
        log: Log of a run's folder.
        manifest: Manifest of the checkpoint.
    """
    return log.until(manifest.round, manifest.about.get("check"))


def missing_rounds_text(missing: Sequence[Gap]) -> str:
    """Return the beginning of a sentence on missing rounds, such as "rounds 4 to 6 are"."""
    text = rounds_text(missing)
    return f"{text} {'are' if text.startswith('rounds') else 'is'}"


def warn_of_missing_rounds(file: Path, log: RoundLog, rounds: int) -> None:
    """Warn if a log lacks rounds that a checkpoint has.

    Args:
        file: File of the log, for the message.
        log: Intact lines of the file.
        rounds: Round of the checkpoint.
    """
    if missing := log.missing(rounds):
        _log.warning(
            "%s is damaged: %s missing from it. The weights are those of the checkpoint, which is "
            "intact. Sums over rounds leave the missing ones out.",
            file,
            missing_rounds_text(missing),
        )


def saved_rounds(path: Path) -> list[int]:
    """Return the rounds whose checkpoint is in a run's folder, in ascending order.

    Their files are not examined, so that some may be damaged.
    """
    return Checkpoints(path / "checkpoint").rounds
