"""The user's list of trusted code. Other code that a run's folder names is not run.

`config.toml` and `study.toml` may name code: `file.py:NAME` or `package.module:NAME`. Opening the
folder imports that code, so that a folder from somebody else could run anything. Code is therefore
imported only if the list has its path and the SHA-256 of its file. Starting a run adds its code to
the list, and so does `--trust`.

The list has one line for each NAME, in the format of `sha256sum`. The name is part of the line.
Without it a folder could call anything that a trusted file imports, such as `subprocess.run`, with
arguments of its own.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import is_file, is_in_module, module_files, split_file
from fedquilt.storage.files import why, write

_log = logging.getLogger(__name__)

_LINE = re.compile(r"([0-9a-f]{64})  (/.+)")
_HEADER = (
    "# Code that fedquilt runs when the folder of a run names it: SHA-256 of the file, path and "
    "name.\n"
)
# Files and folders of runs and studies. A TOML file beside one of them is theirs.
_RECORDS = (
    "rounds.jsonl",
    "rounds.jsonl.gz",
    "summary.json",
    "checkpoint",
    "study.toml",
    "compare.json",
    "lock",
)
# SHA-256 by label of code that this process trusts. It is used if the list cannot be written.
_accepted: dict[str, str] = {}


@dataclass(frozen=True)
class Code:
    """A file of code, and the name in it that settings ask for."""

    path: Path | None  # Absolute path. None: the module has no file, or it cannot be found.
    # Class or function. Empty for a package above a module, which is imported with it.
    name: str
    reference: str  # Text in the settings, for messages.

    @property
    def label(self) -> str:
        """Return `path:name` as a line of the list has it. Without a name it is the path alone."""
        return f"{self.path}:{self.name}" if self.name else str(self.path)

    @property
    def sha256(self) -> str:
        """Return the SHA-256 of the file in hexadecimal digits. The file is read on every call."""
        assert self.path is not None
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def trusted_file() -> Path:
    """Return the path of the user's list.

    It is `fedquilt/trusted` in XDG_CONFIG_HOME, or in `~/.config`.
    """
    folder = os.environ.get("XDG_CONFIG_HOME", "")
    # A relative path is ignored, as the XDG specification requires, because it would depend on the
    # working directory.
    return (
        (Path(folder) if os.path.isabs(folder) else Path.home() / ".config")
        / "fedquilt"
        / "trusted"
    )


def is_recorded(file: str | Path) -> bool:
    """Return True if a TOML file is in the folder of a run or a study.

    Somebody else may have written such a file. If the file is a link, the folder of its target
    counts as well.
    """
    return is_beside_records(file) or is_beside_records(os.path.realpath(file))


def is_beside_records(file: str | Path) -> bool:
    """Return True if the folder that has a file also has files of a run or a study.

    Links are not followed, and the file itself need not exist.
    """
    folder = Path(os.path.abspath(file)).parent
    return any(os.path.lexists(folder / name) for name in _RECORDS)


def check_code(settings: Mapping[str, Mapping[str, Any]], trust: bool = False) -> None:
    """Refuse settings that name code which is not in the user's list. Nothing is imported.

    Args:
        settings: Settings by the file that they come from.
        trust: True: add the code to the list instead.

    Raises:
        ConfigError: Some code is not in the list or has changed since, or the list cannot be read.
    """
    by_file = {file: named_code(plain) for file, plain in settings.items()}
    codes = [code for file_codes in by_file.values() for code in file_codes]
    if not codes:
        return
    if trust:
        remember_code(settings.values())
    trusted = {**_read(), **_accepted}
    problems = {code.label + code.reference: _problem(code, trusted) for code in codes}
    messages = [problem for problem in problems.values() if problem]
    if not messages:
        return
    files = ", ".join(
        file
        for file, file_codes in by_file.items()
        if any(problems[code.label + code.reference] for code in file_codes)
    )
    raise ConfigError(
        "\n  ".join(
            [f"{files} names code that you have not trusted. Nothing of it was run:", *messages]
        )
        + "\nRead these files. If you trust them, add --trust (in Python: trust=True), which lists "
        f"them in {trusted_file()}."
    )


def check_study_code(folder: str | Path, trust: bool = False) -> None:
    """Refuse the folder of a study if it, or a run in it, names code that is not trusted.

    Args:
        folder: Folder of the study, which need not exist.
        trust: True: add the code to the list instead.
    """
    folder = Path(folder)
    settings_by_file = {}
    for file in (folder / "study.toml", *sorted(folder.rglob("config.toml"))):
        if not file.is_file():  # Reading a FIFO would wait forever.
            continue
        try:
            settings_by_file[str(file)] = tomllib.loads(file.read_text())
        # A damaged file cannot name code. Its readers report the damage.
        except (OSError, ValueError, RecursionError):
            continue
    check_code(settings_by_file, trust)


def remember_code(settings: Iterable[Mapping[str, Any]]) -> None:
    """Add the code that settings name to the user's list, because this user starts a run with it.

    If the list cannot be written, a warning is logged and the run continues.

    Args:
        settings: Tables of settings.
    """
    new: dict[str, str] = {}
    for code in (code for plain in settings for code in named_code(plain)):
        try:
            if code.path is not None and "\n" not in code.label:
                new[code.label] = code.sha256
        except OSError:  # It cannot be read. `check_code` reports that if the code is needed.
            continue
    try:
        if not new or new.items() <= _read().items():
            return
        with _locked():
            _write({**_read(), **new})
    except (OSError, FedquiltError) as error:
        _accepted.update(new)
        reason = why(error) if isinstance(error, OSError) else str(error)
        _log.warning(
            "%s could not be written: %s. Commands that open this run later will need --trust.",
            trusted_file(),
            reason,
        )


def named_code(plain: Any) -> list[Code]:
    """Return all code that plain settings name, at any depth, each once. Nothing is imported.

    References to files that do not exist are left out. A module without a file has no path.

    Args:
        plain: Settings, or a part of them.
    """
    return list(dict.fromkeys(code for text in _texts(plain) for code in _code_of(text)))


def _texts(plain: Any) -> Iterator[str]:
    """Yield all texts in plain settings, at any depth."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, Mapping):
        for value in plain.values():
            yield from _texts(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from _texts(value)


def _code_of(reference: str) -> Iterator[Code]:
    """Yield the files that importing a reference would run. Nothing is imported.

    Args:
        reference: Text such as `file.py:NAME` or `package.module:NAME`. For a module, the packages
            above it come first. Any other text yields nothing.
    """
    if is_file(reference):
        path, name = split_file(reference)
        try:
            file = Path(path).resolve()
            is_there = file.is_file()
        # The name is too long, has a NUL, or leads to a cycle of links.
        except (OSError, ValueError, RuntimeError):
            return
        if is_there:
            yield Code(file, name, reference)
    elif is_in_module(reference):
        module, _, name = reference.partition(":")
        files = module_files(module)
        for position, module_file in enumerate(files):
            is_last = position == len(files) - 1
            if module_file is not None or is_last:
                yield Code(
                    module_file and module_file.resolve(), name if is_last else "", reference
                )


def _problem(code: Code, trusted: Mapping[str, str]) -> str:
    """Return the reason why code is not trusted. Empty: it is.

    Args:
        code: File and name. The file is read, to compare its checksum.
        trusted: SHA-256 by label of all trusted code.
    """
    if code.path is None:
        return (
            f"{code.reference}: this module has no file that could be compared. Name code in a "
            "file instead."
        )
    try:
        sha256 = code.sha256
    except OSError as error:
        return f"{code.label}: it cannot be read: {why(error)}."
    if code.label not in trusted:
        return f"{code.label} is not in your list."
    return (
        "" if trusted[code.label] == sha256 else f"{code.label} has changed since you trusted it."
    )


# --- the list -----------------------------------------------------------------------------------


def _read() -> dict[str, str]:
    """Return the SHA-256 of every label in the user's list. It is empty if there is no list.

    Damaged lines are ignored with a warning.

    Raises:
        ConfigError: The list cannot be read.
    """
    file = trusted_file()
    try:
        lines = os.fsdecode(file.read_bytes()).split("\n")
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(
            f"{file}, the list of code that you trust, cannot be read: {why(error)}."
        ) from error
    sha256_by_label = {}
    damaged = []
    for number, line in enumerate(lines, 1):
        if match := _LINE.fullmatch(line):
            sha256_by_label[match[2]] = match[1]
        elif line.strip() and not line.startswith("#"):
            damaged.append(number)
    if damaged:
        _log.warning(
            "%s, the list of code that you trust, is damaged in line %s. What was listed there "
            "counts as not trusted.",
            file,
            ", ".join(map(str, damaged[:5])),
        )
    return sha256_by_label


def _write(trusted: Mapping[str, str]) -> None:
    lines = "".join(f"{sha256}  {label}\n" for label, sha256 in sorted(trusted.items()))
    write(trusted_file(), [os.fsencode(_HEADER + lines)])


@contextmanager
def _locked() -> Iterator[None]:
    """Lock the list against other processes while the block runs.

    Without the lock, runs that start at the same time would lose each other's lines.
    """
    folder = trusted_file().parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with FileLock(folder / "trusted.lock", mode=0o600):
        yield
