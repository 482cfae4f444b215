"""The file `summary.json`: its text with checksums, and a reader that checks every value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.errors import RecordError
from fedquilt.runs.folder_files import check_folder, checksum

_REMEDY = "Delete it to finish the run again."
# Numbers in a summary, each of which may be missing
_COSTS = ("seconds", "bytes_down", "bytes_up", "link_seconds", "late")


def summary_text(summary: Mapping[str, Any], config: bytes, log: str = "") -> str:
    """Return the text of summary.json, with checksums of the summary, the settings and the log.

    Args:
        summary: Summary of the run.
        config: Content of config.toml.
        log: Checksum of the last line of rounds.jsonl. Empty: there is no line.
    """
    checks = {
        "config.toml": checksum(config),
        "rounds.jsonl": log,
        "summary.json": checksum(_sorted_json(summary)),
    }
    return json.dumps({**summary, "check": checks}, indent=2) + "\n"


def _sorted_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of the run in a folder, without its checksums.

    Returns:
        None if the run is not finished.

    Raises:
        RecordError: The file cannot be read, or is damaged.
    """
    contents = read_checked_summary(path)
    return contents and contents[0]


def read_checked_summary(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the summary of the run in a folder, and its checksums by file name.

    The checksums are empty if an earlier version wrote the file. Only that of the summary itself is
    compared here.

    Returns:
        None if there is no summary.json, because the run is not finished.

    Raises:
        RecordError: The file cannot be read, or is damaged.
    """
    file = path / "summary.json"
    check_folder(path)
    try:
        text = file.read_text()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{file} cannot be read: {error}.") from error
    try:
        summary = json.loads(text)
        checks = summary.pop("check", {}) if isinstance(summary, dict) else {}
        problem = _problem_in(summary, checks)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {str(error)[:200]}. {_REMEDY}") from error
    if problem:
        raise RecordError(f"{file} is damaged: {problem[:200]}. {_REMEDY}")
    return summary, checks


def _problem_in(summary: Any, checks: Any) -> str:
    """Return the first error in the content of a summary. Empty: there is none.

    Args:
        summary: Content of summary.json without its checksums.
        checks: Checksums by file name. Empty: an earlier version wrote none.
    """
    if not isinstance(summary, dict) or not isinstance(checks, dict):
        return "it holds no object, or its checksums are none"
    if checks and checks.get("summary.json") != checksum(_sorted_json(summary)):
        return "its checksum differs"
    if any(isinstance(value, dict) and "summary.json" in value for value in summary.values()):
        return "its checksums are not under the key check"
    rounds = summary.get("rounds", 0)
    if type(rounds) is not int or rounds < 0:
        return f"rounds = {rounds!r} was found; a whole number fits"
    if problem := _problem_in_best_round(summary.get("best", {"round": rounds}), rounds):
        return problem
    labels = summary.get("labels", {})
    if not isinstance(labels, dict) or not all(isinstance(label, str) for label in labels.values()):
        return f"labels = {labels!r} was found; a name for each share fits"
    texts = [key for key in ("method", "main", "note") if not isinstance(summary.get(key, ""), str)]
    if texts:
        return f"{texts[0]} = {summary[texts[0]]!r} was found; a text fits"
    costs = [key for key in _COSTS if key in summary and not _is_number(summary[key])]
    if costs:
        return f"{costs[0]} = {summary[costs[0]]!r} was found; a number fits"
    return _problem_in_figures(summary, labels) or _problem_in_members(
        summary.get("members", {}), labels
    )


def _problem_in_best_round(best: Any, rounds: int) -> str:
    """Return an error in the best round of a summary. Empty: there is none.

    Args:
        best: Entry of the summary, which must be a table with a `round`.
        rounds: Number of completed rounds, the largest valid value.
    """
    round = best.get("round") if isinstance(best, dict) else None
    if type(round) is int and 0 <= round <= rounds:
        return ""
    return f"best = {best!r} was found; a table with a round up to {rounds} fits"


def _problem_in_figures(summary: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return the first problem in the metrics of a summary. Empty: there is none.

    `metrics` must be a table with a table for every metric. Such a table, and also `accuracy`, must
    have a number for every share. A share must be a number, or a key of `labels`.

    Args:
        summary: Content of a summary.json.
        labels: Names of shares in tables, by share as text.
    """
    metrics = summary.get("metrics", {})
    if not isinstance(metrics, dict):
        return f"metrics = {metrics!r} was found; a table fits"
    for name, figures in (*metrics.items(), ("accuracy", summary.get("accuracy", {}))):
        if not isinstance(figures, dict) or not all(
            _is_number(figure) for figure in figures.values()
        ):
            return f"{name} = {figures!r} was found; a number for each share fits"
        if not all(_is_share(share, labels) for share in figures):
            return f"{name} = {figures!r} was found; shares are numbers"
    return ""


def _problem_in_members(members: Any, labels: Mapping[str, str]) -> str:
    """Return the first error in the members of a summary. Empty: there is none.

    Args:
        members: Entry of the summary: a table with `params` and `macs` for every share.
        labels: Names of shares in tables, by share as text.
    """
    if not isinstance(members, dict):
        return f"members = {members!r} was found; a table fits"
    for share, member in members.items():
        costs = (
            [member.get(key) for key in ("params", "macs")] if isinstance(member, dict) else [None]
        )
        if not all(_is_number(cost) for cost in costs) or not _is_share(share, labels):
            return f"members.{share} = {member!r} was found; params and macs of a share fit"
    return ""


def _is_share(text: str, labels: Mapping[str, str]) -> bool:
    """Return True if the key of a figure is a finite number as text, or a key of `labels`."""
    if text in labels:
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
