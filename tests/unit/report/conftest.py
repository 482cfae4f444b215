"""Folders of runs that are written record by record, and never trained."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fedquilt.round import Grades, Record
from fedquilt.runs.round_log import encoded

WriteRun = Callable[..., Path]


def record(round: int, figures: dict[str, float] | None = None, **more: Any) -> Record:
    """Return a record of a round with two clients, with accuracy by share if it was evaluated."""
    grades = Grades("accuracy", {"accuracy": figures}) if figures else Grades()
    usual: dict[str, Any] = {
        "seconds": 0.5,
        "clients": 2,
        "bytes_down": 100,
        "bytes_up": 50,
        "macs": 1000,
        "loss": 1.0,
        "grades": grades,
    }
    return Record(round=round, **{**usual, **more})


def write_run(folder: Path, records: Iterable[Record], config: str = "", end: bytes = b"") -> Path:
    """Write a folder with a log, and with settings unless they are empty."""
    folder.mkdir(parents=True, exist_ok=True)
    content, check = b"", ""
    for item in records:
        line, check = encoded(item, check)
        content += line
    (folder / "rounds.jsonl").write_bytes(content + end)
    if config:
        (folder / "config.toml").write_text(config)
    return folder


def write_summary(folder: Path, **values: Any) -> None:
    """Write a summary without checksums, as early versions did."""
    usual = {"method": "fedavg", "seed": 0, "data": "digits", "task": "classification"}
    (folder / "summary.json").write_text(json.dumps({**usual, **values}))


@pytest.fixture(autouse=True)
def _needs_charts() -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
