"""Helpers of the tests on folders of runs."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from fedquilt.methods import FedBN
from fedquilt.runs import checkpoint
from fedquilt.runs.checkpoint import Checkpointing

EVERY = Checkpointing(rounds=1)


@dataclass(frozen=True)
class Keeping(FedBN):
    """FedBN whose clients also keep their momentum."""

    def learner(self, job, world):
        return replace(super().learner(job, world), keep_slots=True)


def lines(out: Path) -> list[dict]:
    """Return the rounds that are written, without their checksums."""
    plain = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "check"} for record in plain]


def timeless(record: dict) -> dict:
    return {key: value for key, value in record.items() if key != "seconds"}


class Stop(Exception):  # noqa: N818
    """An error that fedquilt does not know."""


def stop_after(round: int, kind: type[BaseException] = Stop):
    def watch(record):
        if record.round == round:
            raise kind

    return watch


def harm(out: Path, place: int, old: bytes = b'"loss": ', new: bytes = b'"loss": 9') -> None:
    """Change a line of rounds.jsonl."""
    text = (out / "rounds.jsonl").read_bytes().splitlines(keepends=True)
    text[place] = text[place].replace(old, new, 1)
    (out / "rounds.jsonl").write_bytes(b"".join(text))


def alter_manifest(file: Path, **about: object) -> None:
    """Change entries about the run in a manifest, and correct its checksum."""
    plain = json.loads(file.read_text())
    del plain["sha256"]
    plain["about"] |= about
    file.write_text(json.dumps({**plain, "sha256": checkpoint._digest(plain)}))
