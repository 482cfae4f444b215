"""Damage to the files of a finished run, found by their checksums."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedquilt.errors import RecordError
from fedquilt.runs.checkpoint import Checkpoints
from fedquilt.runs.folder_files import checksum, missing_rounds_text, read_log
from fedquilt.runs.summary_file import read_checked_summary


def damage_of(path: Path) -> list[str]:
    """Return descriptions of all damage to the files of a finished run. Empty: there is none.

    Args:
        path: Folder of the run, whose summary.json is intact.
    """
    contents = read_checked_summary(path)
    assert contents is not None, "the run is finished"
    summary, checks = contents
    damage = []
    if "config.toml" in checks and checks["config.toml"] != checksum(
        (path / "config.toml").read_bytes()
    ):
        damage.append("config.toml: it is not the one that the run had when it ended")
    checkpoints = Checkpoints(path / "checkpoint")
    damage += [f"checkpoint {description}" for description in checkpoints.damage]
    damage += [f"checkpoint/{name}: no checkpoint lists it" for name in checkpoints.unlisted]
    required_rounds = dict.fromkeys(
        [summary["rounds"], summary.get("best", {}).get("round", summary["rounds"])]
    )
    damage += [
        f"checkpoint {round:08}: it is gone"
        for round in required_rounds
        if round not in checkpoints.rounds
    ]
    return damage + _damage_of_log(path, summary, checks.get("rounds.jsonl"))


def _damage_of_log(path: Path, summary: Mapping[str, Any], check: str | None) -> list[str]:
    """Return descriptions of the damage to rounds.jsonl of a finished run.

    Args:
        path: Folder of the run.
        summary: Summary of the run. Rounds that it lists as missing are no damage.
        check: Checksum of the last line. None: it is not known.
    """
    try:
        log = read_log(path)
    except RecordError as error:
        return [str(error)]
    damage = [f"rounds.jsonl: {line}" for line in log.damage]
    if check not in (None, log.check):
        damage.append("rounds.jsonl: its last line is not the one that the run wrote last")
    missing = log.missing(summary["rounds"])
    is_known = [list(gap) for gap in missing] == summary.get("missing_rounds", [])
    return (
        damage if is_known else [*damage, f"rounds.jsonl: {missing_rounds_text(missing)} missing"]
    )
