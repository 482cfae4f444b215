"""Settings in a TOML file, refused if they belong to a run and name code that is not trusted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.config.toml import Settings, read_toml
from fedquilt.errors import ConfigError
from fedquilt.runs.folder_files import check_plain
from fedquilt.runs.trust import check_code, is_beside_records, is_recorded


def read_settings(
    file: str | Path, trust: bool = False, recorded: bool | None = None, asked: str = ""
) -> Settings:
    """Return the settings in a TOML file.

    Settings of a run or a study are refused if they name code that is not trusted.

    Args:
        file: Path of a TOML file.
        trust: True: add the code that it names to the user's list. False: refuse code that is not
            in the list.
        recorded: True: the file belongs to a run or a study. None: this is decided by the files
            beside it.
        asked: Request, for messages. Empty: the file was asked for.

    Raises:
        ConfigError: The file cannot be read, names code that is not in the list, or belongs to a
            run of a script whose settings could not be written.
    """
    if recorded or is_beside_records(file):
        check_plain(Path(file))
    settings = read_toml(file)
    if "python" in settings:
        raise ConfigError(
            f"{asked or f'{file} was asked for'}; {_only_in_python(settings['python'], Path(file))}"
        )
    if recorded or (recorded is None and is_recorded(file)):
        check_code({str(file): settings}, trust)
    return settings


def _only_in_python(table: Any, file: Path) -> str:
    """Return why the run of a script cannot be opened by its folder, and what would work.

    Args:
        table: Table `python` of its settings. Its key `missing` has the reasons, unless an earlier
            version wrote it.
        file: Path of the settings.
    """
    missing = table.get("missing", ()) if isinstance(table, Mapping) else ()
    reasons = []
    if isinstance(missing, list):
        reasons = [reason for reason in missing if isinstance(reason, str)]
    if reasons:
        why = "\n  ".join(
            ["it was begun by a script, and settings could not be written for all of it:", *reasons]
        )
        remedy = (
            "\nA new run of the script would have settings with these changes. It can be "
            "resumed in Python"
        )
    else:
        why = (
            "it was begun by a script, with a version of fedquilt that wrote no settings for "
            "scripts."
        )
        remedy = " It can be resumed in Python"
    return (
        f"{why}{remedy}, with the same arguments: fedquilt.run(…, out={str(file.parent)!r}, "
        "resume=True), whose result has deploy, export and per_client."
    )
