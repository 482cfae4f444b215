"""The folder of a run: its settings, the record of each round, a summary, and its checkpoints.

DIR/
├── config.toml     settings of the run
├── rounds.jsonl    one JSON object per round, written when the round ends (`round_log.py`)
├── summary.json    results of the run, written when it ends
├── checkpoint/     newest states, and the best one on validation samples (`checkpoint.py`)
└── lock            id of the process that writes here
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import re
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedquilt.errors import ConfigError, RecordError
from fedquilt.hardware.device import device_of
from fedquilt.names import registered
from fedquilt.round import Record
from fedquilt.round.evaluate import members_by_share
from fedquilt.round.labels import labels_by_share
from fedquilt.runs.best import Best, wrong_best
from fedquilt.runs.checkpoint import MAX_ROUND, Checkpointing, Checkpoints, Manifest
from fedquilt.runs.client_states import ClientStates, copied
from fedquilt.runs.round_log import Gap, RoundLog, encoded, gaps, parse, rounds_text
from fedquilt.runs.trust import remember_code
from fedquilt.storage.files import TEMPORARY, make_folder, refuse_special, sync_folder, why, write
from fedquilt.tasks import TASKS, Classification, NextToken
from fedquilt.terms import Server
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.runs.run import Run

_log = logging.getLogger("fedquilt")
MAX_THREADS = 1024  # Largest number of threads that a checkpoint may set
MAX_SAMPLE_VALUES = 1 << 28  # Largest number of values per sample in a checkpoint
MAX_LISTED = 5  # Largest number of problems that an error lists
_FILES = (
    "config.toml",
    "rounds.jsonl",
    "rounds.jsonl.damaged",
    "summary.json",
    "tracking.json",
    "lock",
    "study.toml",
)
_REMEDY = "Delete it to finish the run again."
# Numbers in a summary, each of which may be missing
_COSTS = ("seconds", "bytes_down", "bytes_up", "link_seconds", "late")


class Folder:
    """The folder of a run, locked for writing. Leaving the context always saves the state."""

    def __init__(self, path: Path, checkpoint: Checkpointing) -> None:
        """Open and lock a folder. Use `create` or `resume` instead."""
        self.path = path
        self.checkpoint = checkpoint
        self._file = path / "rounds.jsonl"
        self._checkpoints = Checkpoints(path / "checkpoint", checkpoint.keep)
        self._run: Run | None = None
        self._identity: dict[str, Any] = {}  # Fingerprint of the run
        self._rounds = 0  # Number of lines in rounds.jsonl
        self._length = 0  # Bytes of rounds.jsonl
        self._check = ""  # Checksum of the last line of rounds.jsonl
        # Time of the last checkpoint, and the seconds that it took
        self._saved, self._cost = time.monotonic(), 0.0
        check_folder(path)
        self._lock = _lock(path)

    @classmethod
    def create(
        cls, path: str | Path, config: str, checkpoint: Checkpointing = Checkpointing()
    ) -> Self:
        """Create a folder for a new run.

        Args:
            path: Path of the folder.
            config: Text of config.toml.
            checkpoint: Settings of when to save a checkpoint.

        Raises:
            ConfigError: The folder already has a run, or cannot be written to.
        """
        path = Path(path)
        with _writable(f"the folder {path} was asked for"):
            make_folder(path)
            folder = cls(path, checkpoint)
            try:
                if holds_a_run(path):
                    raise ConfigError(
                        f"the folder {path} was asked for; a run is there already. Resume it, or "
                        "name another."
                    )
                write(path / "config.toml", [config.encode()])
                folder._begin_log()
                remember_code([tomllib.loads(config)])  # This user started the run.
            except BaseException:
                folder.close()
                raise
        return folder

    @classmethod
    def resume(cls, path: str | Path, checkpoint: Checkpointing = Checkpointing()) -> Self:
        """Open the folder of a run that is to be resumed. `config` has its settings."""
        path = Path(path)
        if not (path / "config.toml").is_file():
            finding = "there is no run in it" if path.is_dir() else "there is no such folder"
            raise ConfigError(f"the run in {path} was to go on; {finding}.")
        with _writable(f"the run in {path} was to go on"):
            return cls(path, checkpoint)

    @property
    def config(self) -> str:
        """Return the text of config.toml."""
        return (self.path / "config.toml").read_text()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._save()
        except RecordError as second:
            if error is None:
                raise
            if str(second) != str(error):
                error.add_note(f"And then {second}")
        finally:
            self.close()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    # --- while it runs ---------------------------------------------------------------------------

    def load(self, run: Run) -> int:
        """Load the newest intact checkpoint into a run that was prepared with the same settings.

        Returns:
            Number of rounds that the run has completed.
        """

        def check(manifest: Manifest, server: Server) -> str:
            damage = _wrong_about(manifest)
            if damage:
                return f"{manifest.name} is not what was written: {damage}"
            _compare(manifest.about["run"], _leaves_of(run), f"the run in {self.path} was to go on")
            return _wrong_settings(manifest.about["engine"], run.engine.settings) or _wrong_weights(
                server, run.server
            )

        newest_state = self._checkpoints.load(_memories(run), run.engine.device, check)
        log = RoundLog()
        if newest_state is None:
            if self._file.exists() and self._file.stat().st_size:
                raise RecordError(
                    f"{self._file} has rounds, but there is no checkpoint to go on from."
                )
            self._begin_log()
        else:
            server, manifest = newest_state
            _restore(manifest.about, run)
            run.server = server
            run.settled_for = manifest.about.get("settled_for", run.settled_for)
            log = self._mended_log(manifest)
            self._warn_of_other_settings(manifest)
            run.best = Best.from_dict(manifest.about.get("best"), self.path)
        run.records[:] = log.records
        self._rounds, self._length, self._check = len(log.lines), len(log.content), log.check
        return run.server.round

    def extend(self, rounds: int) -> None:
        """Write a larger number of rounds into config.toml, which the command line reads.

        Runs of scripts whose settings could not be written are not changed.
        """
        text = self.config
        try:
            settings = tomllib.loads(text)
        except (ValueError, RecursionError):  # It is damaged, which another warning reports.
            return
        planned = settings.get("rounds")
        if type(planned) is not int or planned >= rounds:
            return
        longer = re.sub(r"^rounds\b.*$", f"rounds = {rounds}", text, count=1, flags=re.MULTILINE)
        if not _holds(longer, {**settings, "rounds": rounds}):
            _log.warning(
                "%s still has rounds = %d: it was edited.", self.path / "config.toml", planned
            )
            return
        try:
            write(self.path / "config.toml", [longer.encode()])
        except OSError as error:
            raise RecordError(
                f"{self.path}/config.toml could not be written: {why(error)}."
            ) from error

    def _begin_log(self) -> None:
        """Create rounds.jsonl, if a killed process has not done so."""
        try:
            self._file.touch()
            sync_folder(self.path)
        except OSError as error:
            raise RecordError(f"{self._file} cannot be written to: {why(error)}.") from error

    def _warn_of_other_settings(self, manifest: Manifest) -> None:
        """Warn if config.toml has changed since the checkpoint.

        Settings that the weights depend on are compared elsewhere.
        """
        if manifest.about.get("config") not in (None, _settings_checksum(self.path)):
            _log.warning(
                "%s is not the one that the checkpoint was written with: it was edited, or it is "
                "damaged. What the "
                "weights depend on is the same.",
                self.path / "config.toml",
            )

    def _mended_log(self, manifest: Manifest) -> RoundLog:
        """Cut rounds.jsonl back to a checkpoint, and remove damaged lines.

        If lines are removed, the original file is kept as `rounds.jsonl.damaged`.
        """
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise RecordError(f"{self._file} cannot be read: {why(error)}.") from error
        log = _until(parse(content), manifest)
        _warn_of_missing_rounds(self._file, log, manifest.round)
        try:
            if content.startswith(log.content):
                with self._file.open("ab") as file:
                    file.truncate(len(log.content))
            else:
                write(self._file.with_name(f"{self._file.name}.damaged"), [content])
                write(self._file, [log.content])
        except OSError as error:
            raise RecordError(f"{self._file} cannot be written to: {why(error)}.") from error
        return log

    def watch(self, run: Run) -> Callable[[Record], None]:
        """Return a function to call after every round of a run.

        It writes the record of the round, and a checkpoint if one is due.
        """
        self._run, self._identity = run, fingerprint(run)
        run.folder = self.path
        _memories(run).spill_in = self.path
        if self._checkpoints.newest is None:
            # An unwritable disk is reported now, and the checkpoint identifies the run.
            self._save()

        def after(record: Record) -> None:
            self._append(run.server)
            rounds = run.server.round - (self._checkpoints.newest or 0)
            is_best = run.best is not None and run.best.round == run.server.round
            if is_best or self.checkpoint.due(rounds, time.monotonic() - self._saved, self._cost):
                self._save()

        return after

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Save the last state and the summary."""
        self._save()
        try:
            text = summary_text(summary, (self.path / "config.toml").read_bytes(), self._check)
            write(self.path / "summary.json", [text.encode()])
        except OSError as error:
            raise RecordError(
                f"{self.path}/summary.json could not be written: {why(error)}."
            ) from error

    def _append(self, server: Server) -> None:
        """Write the records up to a state that are not in rounds.jsonl yet."""
        assert self._run is not None
        for record in self._run.records[self._rounds :]:
            if record.round > server.round:
                break
            line, check = encoded(record, self._check)
            try:
                # A run that is extended has an outdated summary.
                (self.path / "summary.json").unlink(missing_ok=True)
                with self._file.open("r+b") as file:
                    file.truncate(self._length)  # Remove an incomplete line, as from a full disk.
                    file.seek(self._length)
                    file.write(line)
            except OSError as error:
                raise RecordError(
                    f"round {record.round} could not be written to {self._file}: {why(error)}."
                ) from error
            self._rounds += 1
            self._length += len(line)
            self._check = check

    def _save(self) -> None:
        run = self._run
        if run is None or run.server.round == self._checkpoints.newest:
            return
        with undisturbed():
            began = time.monotonic()
            self._bring_best(run)
            self._checkpoint(run, run.server)
            if run.best is not None:
                run.best = replace(run.best, server=None, folder=self.path)
            self._saved = time.monotonic()
            self._cost = self._saved - began

    def _bring_best(self, run: Run) -> None:
        """Write the checkpoint of the best round, if this folder does not have it.

        A run without a folder has that state in memory. A run that is saved a second time has it in
        another folder.
        """
        best = run.best
        if best is None or best.folder == self.path or best.round == run.server.round:
            return
        try:
            state = run.at("best").server
            memory = copied(state.memory, run.engine.device)
        except (RecordError, ConfigError) as error:
            _log.warning("The state of round %d, the best one, is not saved: %s", best.round, error)
            run.best = None
        else:
            self._checkpoint(run, replace(state, memory=memory))

    def _checkpoint(self, run: Run, server: Server) -> None:
        """Write the records up to a state, and then a checkpoint of the state."""
        self._append(server)
        _sync(self._file)
        description = {
            "fedquilt": __version__,
            "records": self._length,
            "check": self._check,
            "config": _settings_checksum(self.path),
            "run": self._identity,
            "sample": _sample(run),
            "settled_for": run.settled_for,
            **_choices(run),
            **({"best": run.best.to_dict()} if run.best else {}),
        }
        self._checkpoints.save(server, description)


def holds_a_run(path: Path) -> bool:
    """Return True if a folder has files that a new run would overwrite."""
    check_folder(path)
    rounds = path / "rounds.jsonl"
    begun = rounds.is_file() and rounds.stat().st_size > 0
    return begun or (path / "summary.json").exists() or Checkpoints(path / "checkpoint").exist


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


def summary_text(summary: Mapping[str, Any], config: bytes, log: str = "") -> str:
    """Return the text of summary.json, with checksums of the summary, the settings and the log.

    Args:
        summary: Summary of the run.
        config: Content of config.toml.
        log: Checksum of the last line of rounds.jsonl. Empty: there is no line.
    """
    checks = {
        "config.toml": _checksum(config),
        "rounds.jsonl": log,
        "summary.json": _checksum(_sorted_json(summary)),
    }
    return json.dumps({**summary, "check": checks}, indent=2) + "\n"


def _settings_checksum(path: Path) -> str | None:
    """Return a checksum of config.toml without `rounds`, which may grow. None: unreadable."""
    try:
        settings = tomllib.loads((path / "config.toml").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    settings.pop("rounds", None)
    return _checksum(json.dumps(settings, sort_keys=True, default=str).encode())


def _holds(text: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a text is TOML that has exactly these settings."""
    try:
        return tomllib.loads(text) == settings
    except ValueError:
        return False


def _sorted_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of the run in a folder, without its checksums.

    Returns:
        None if the run is not finished.

    Raises:
        RecordError: The file cannot be read, or is damaged.
    """
    contents = _read_summary(path)
    return contents and contents[0]


def _read_summary(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the summary of a run and its checksums, which earlier versions did not write."""
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
        problem = _wrong_in(summary, checks)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {str(error)[:200]}. {_REMEDY}") from error
    if problem:
        raise RecordError(f"{file} is damaged: {problem[:200]}. {_REMEDY}")
    return summary, checks


def _wrong_in(summary: Any, checks: Any) -> str:
    """Return an error in the content of a summary. Empty: there is none."""
    if not isinstance(summary, dict) or not isinstance(checks, dict):
        return "it holds no object, or its checksums are none"
    if checks and checks.get("summary.json") != _checksum(_sorted_json(summary)):
        return "its checksum differs"
    if any(isinstance(value, dict) and "summary.json" in value for value in summary.values()):
        return "its checksums are not under the key check"
    rounds = summary.get("rounds", 0)
    if type(rounds) is not int or rounds < 0:
        return f"rounds = {rounds!r} was found; a whole number fits"
    if problem := _wrong_best_round(summary.get("best", {"round": rounds}), rounds):
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
    return _wrong_figures(summary, labels) or _wrong_members(summary.get("members", {}), labels)


def _wrong_best_round(best: Any, rounds: int) -> str:
    """Return an error in the best round of a summary. Empty: there is none."""
    round = best.get("round") if isinstance(best, dict) else None
    if type(round) is int and 0 <= round <= rounds:
        return ""
    return f"best = {best!r} was found; a table with a round up to {rounds} fits"


def _wrong_figures(summary: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return an error in the metrics of a summary. Empty: there is none."""
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


def _wrong_members(members: Any, labels: Mapping[str, str]) -> str:
    """Return an error in the members of a summary. Empty: there is none."""
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
    """Return True if the key of a figure is a number, or has a label."""
    if text in labels:
        return True
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def damage_of(path: Path) -> list[str]:
    """Return descriptions of all damage to the files of a finished run. Empty: there is none.

    Args:
        path: Folder of the run, whose summary.json is intact.
    """
    contents = _read_summary(path)
    assert contents is not None, "the run is finished"
    summary, checks = contents
    damage = []
    if "config.toml" in checks and checks["config.toml"] != _checksum(
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
        log = _read_log(path)
    except RecordError as error:
        return [str(error)]
    damage = [f"rounds.jsonl: {line}" for line in log.damage]
    if check not in (None, log.check):
        damage.append("rounds.jsonl: its last line is not the one that the run wrote last")
    missing = log.missing(summary["rounds"])
    is_known = [list(gap) for gap in missing] == summary.get("missing_rounds", [])
    return damage if is_known else [*damage, f"rounds.jsonl: {_are(missing)} missing"]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def rounds_planned(path: Path, usual: int) -> int:
    """Return the number of rounds that the run in a folder was begun with.

    Checkpoints have this number. Those of earlier versions do not, and then it is read from
    config.toml, where it may have grown.

    Args:
        path: Folder of the run.
        usual: Number that is returned if the folder does not have it.
    """
    rounds = Checkpoints(path / "checkpoint").newest_about.get("settled_for")
    if isinstance(rounds, int) and _is_round(rounds):
        return rounds
    try:
        settings = tomllib.loads((path / "config.toml").read_text())
    except (OSError, ValueError):
        return usual
    rounds = settings.get("python", settings).get("rounds", usual)
    return rounds if isinstance(rounds, int) else usual


def read(path: str | Path) -> list[Record]:
    """Return the records of all rounds in a run's folder.

    Raises:
        RecordError: rounds.jsonl cannot be read, or lines of it are damaged.
    """
    log = _read_log(path)
    if log.damage:
        raise RecordError(
            f"the rounds of {path} were asked for; {Path(path) / 'rounds.jsonl'} is not what was "
            "written: "
            f"{'; '.join(log.damage[:MAX_LISTED])}."
        )
    return log.records


def _read_log(path: str | Path) -> RoundLog:
    """Return the log in a run's folder. Some of its lines may be damaged."""
    file = Path(path) / "rounds.jsonl"
    check_folder(Path(path))
    try:
        return parse(file.read_bytes())
    except OSError as error:
        raise RecordError(
            f"the rounds of {path} were asked for; {file} cannot be read: {why(error)}."
        ) from error


def _until(log: RoundLog, manifest: Manifest) -> RoundLog:
    """Return the log up to a checkpoint."""
    return log.until(manifest.round, manifest.about.get("check"))


def _are(missing: Sequence[Gap]) -> str:
    text = rounds_text(missing)
    return f"{text} {'are' if text.startswith('rounds') else 'is'}"


def _warn_of_missing_rounds(file: Path, log: RoundLog, rounds: int) -> None:
    if missing := log.missing(rounds):
        _log.warning(
            "%s is damaged: %s missing from it. The weights are those of the checkpoint, which is "
            "intact. "
            "Sums over rounds leave the missing ones out.",
            file,
            _are(missing),
        )


def load_state(path: str | Path, device: str = "cpu") -> Server:
    """Return the newest intact state in a run's folder, without the run.

    The state has weights, slots and client states by name.
    """
    return newest(path, device)[0]


def newest(path: str | Path, device: str = "cpu") -> tuple[Server, Manifest]:
    """Return the newest intact state in a run's folder, and its manifest."""
    torch_device = device_of(device)
    check_folder(Path(path))

    def check(manifest: Manifest, server: Server) -> str:
        damage = _wrong_about(manifest)
        return f"{manifest.name} is not what was written: {damage}" if damage else ""

    newest_state = Checkpoints(Path(path) / "checkpoint").load(
        ClientStates(device=torch_device), torch_device, check
    )
    if newest_state is None:
        raise RecordError(f"the weights in {path} were asked for; there is no checkpoint there.")
    return newest_state


def reopen(path: str | Path, run: Run, found: tuple[Server, Manifest]) -> Run:
    """Put a state into a run that was prepared with the same settings, without resuming it.

    Nothing is locked or written. Engine, device and fleet may differ. If the run has no data, the
    data is not compared.

    Args:
        path: Folder of the run.
        run: A prepared run.
        found: State and manifest, as `newest` returns them.
    """
    server, manifest = found
    _compare_what_is_deployed(manifest, run, f"the run in {path} was asked for")
    run.server = server
    run.folder = Path(path)
    run.best = Best.from_dict(manifest.about.get("best"), run.folder)
    log = _until(_read_log(path), manifest)
    _warn_of_missing_rounds(Path(path) / "rounds.jsonl", log, server.round)
    run.records[:] = log.records
    return run


def saved_rounds(path: Path) -> list[int]:
    """Return the rounds whose state is in a run's folder."""
    return Checkpoints(path / "checkpoint").rounds


def state_after(path: Path, round: int, run: Run) -> Server:
    """Return the state after a round from a checkpoint in the folder of a run.

    Args:
        path: Folder of the run.
        round: Number of the round.
        run: The run, whose settings must be those of the checkpoint.

    Raises:
        RecordError: There is no such checkpoint, or it is damaged.
        ConfigError: It is the state of another run.
    """
    check_folder(path)
    device = run.engine.device
    server, manifest = Checkpoints(path / "checkpoint").load_round(
        round, ClientStates(device=device), device
    )
    if damage := _wrong_about(manifest) or _wrong_weights(server, run.server):
        raise RecordError(
            f"the state after round {round} was asked for; its checkpoint in {path} is damaged: "
            f"{damage}."
        )
    _compare_what_is_deployed(
        manifest, run, f"the state after round {round} in {path} was asked for"
    )
    return server


def _compare_what_is_deployed(manifest: Manifest, run: Run, asked: str) -> None:
    """Refuse a state of another method, model or data. Missing data is not compared."""
    parts = (
        ("method", "model", "constants") if run.absent else ("method", "model", "constants", "data")
    )

    def is_compared(name: str) -> bool:
        return re.split(r"[.\[]", name)[0] in parts

    saved = {name: value for name, value in manifest.about["run"].items() if is_compared(name)}
    run_leaves = [leaf for leaf in _leaves_of(run) if is_compared(leaf.name)]
    _compare(saved, run_leaves, asked)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Delay ctrl-C and SIGTERM until the block ends.

    A round is therefore recorded either completely or not at all.
    """
    received: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Only the main thread can set handlers, and those that Python did not set cannot be restored.
    if threading.current_thread() is not threading.main_thread() or None in handlers.values():
        yield
        return
    for number in handlers:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            signal.raise_signal(received[0])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for writing while the block runs. The folder is created if necessary.

    Raises:
        ConfigError: Another process has the lock, or the folder cannot be written to.
    """
    with _writable(f"the folder {path} was asked for"):
        make_folder(path)
        check_folder(path)
        handle = _lock(path)
    try:
        yield
    finally:
        os.close(handle)


@contextmanager
def _writable(asked: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{asked}; it cannot be written to: {why(error)}.") from error


def _lock(path: Path) -> int:
    """Lock a folder and write the process id into the lock file, for messages of other processes.

    The system releases the lock when the process ends, for whatever reason.
    """
    import fcntl

    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"the folder {path} was asked for; the run of process {owner or 'unknown'} is writing "
            "there. "
            "Wait for it to end, or name another."
        ) from error
    except OSError:
        os.close(handle)
        raise
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _sync(path: Path) -> None:
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def _memories(run: Run) -> ClientStates:
    assert isinstance(run.server.memory, ClientStates)
    return run.server.memory


# --- what a run is ------------------------------------------------------------------------------

_ENOUGH = 64 << 20  # Bytes of a tensor that are hashed. Of larger ones, evenly spaced rows are.
_FEW = 16  # Largest length of a sequence whose values are compared one by one


class _Leaf(NamedTuple):
    """A plain value that must not change when a run is resumed."""

    name: str  # Dotted name
    value: Any
    is_default: bool = False  # True if it belongs to a field that has its default value


def fingerprint(run: Run) -> dict[str, Any]:
    """Return the values that must not change when a run is resumed, by dotted name."""
    return {leaf.name: leaf.value for leaf in _leaves_of(run)}


def _leaves_of(run: Run) -> list[_Leaf]:
    """Return the leaves of all parts of a run that must not change."""
    world = run.world
    parts = {
        "method": run.method,
        "model": world.family.layout,
        "initial": [*world.family.init(world.seed).values()],
        "constants": world.family.constants,
        "data": run.data,
        "fleet": run.fleet,
        "engine": type(run.engine).__name__,
        "link": run.link,
        "seed": world.seed,
        "device": run.engine.device.type,
        "precision": world.precision,
        # Runs of earlier versions had these tasks, and nothing about them in their checkpoints.
        **({} if world.task in (Classification(), NextToken()) else {"task": world.task}),
        **_evaluated_on(run),
    }
    return [leaf for name, value in parts.items() for leaf in _leaves(name, value)]


def _evaluated_on(run: Run) -> dict[str, str]:
    """Return an entry for the samples of the evaluation. Earlier versions had none for tests."""
    return {} if run.evaluation.on == "test" else {"evaluated_on": run.evaluation.on}


def _leaves(name: str, value: Any, is_default: bool = False) -> Iterator[_Leaf]:
    """Yield a value as plain values that are the same in another process. Arrays are hashed.

    Args:
        name: Name of the value.
        value: A plain value, or one that consists of such values.
        is_default: True if the value is the default of a field.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        yield _Leaf(name, value, is_default)
    elif isinstance(value, (Tensor, np.ndarray)):
        yield _Leaf(
            name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_digest(value)}"
        )
    elif isinstance(digest_of_value := getattr(value, "fingerprint", None), str):
        yield _Leaf(name, digest_of_value, is_default)
    elif is_dataclass(value) and not isinstance(value, type):
        yield _Leaf(name, type(value).__name__, is_default)
        for field in fields(value):
            inner = getattr(value, field.name)
            yield from _leaves(f"{name}.{field.name}", inner, _has_default(field, inner))
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    elif isinstance(value, (tuple, list)):
        leaves = [
            leaf
            for position, inner in enumerate(value)
            for leaf in _leaves(f"{name}[{position}]", inner)
        ]
        if len(value) > _FEW:
            text = json.dumps([(leaf.name, leaf.value) for leaf in leaves])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            leaves = [_Leaf(name, f"{len(value)} values {digest}")]
        yield from leaves
    elif isinstance(value, (torch.dtype, torch.device, np.generic)):
        yield _Leaf(name, str(value), is_default)
    else:  # Only the name of a function or another object is the same in another process.
        yield _Leaf(name, getattr(value, "__qualname__", type(value).__qualname__), is_default)


def is_same(one: Any, other: Any) -> bool:
    """Return True if a resumed run may have one value in place of another."""
    first, second = (
        {leaf.name: leaf.value for leaf in _leaves("", value)} for value in (one, other)
    )
    return first == second


def _has_default(field: Field[Any], value: Any) -> bool:
    """Return True if a field has its default value."""
    usual = field.default
    return (
        usual is not MISSING
        and type(value) is type(usual)
        and not isinstance(value, Tensor)
        and value == usual
    )


def _digest(array: Tensor | np.ndarray) -> str:
    rows = array[:: -(-array.nbytes // _ENOUGH)] if array.ndim and array.nbytes else array
    if isinstance(rows, Tensor):
        rows = rows.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]


def _compare(saved: Mapping[str, Any], leaves: Sequence[_Leaf], asked: str) -> None:
    """Refuse to resume with other settings, and list the differences.

    A checkpoint of an earlier version has no entry for a field that was added since. Such a field
    may have its default, at which it has no effect.

    Args:
        saved: Entries of a checkpoint by name.
        leaves: Entries of the run that is to be resumed.
        asked: Request, for the message.
    """
    current = {leaf.name: leaf.value for leaf in leaves}
    added = {leaf.name for leaf in leaves if leaf.is_default and leaf.name not in saved}
    # Saved entries went through JSON, so that current ones are converted in the same way.
    names = [
        name
        for name in {**saved, **current}
        if name not in added and saved.get(name) != json.loads(json.dumps(current.get(name)))
    ]
    if names:
        missing = "nothing of the kind"
        lines = [
            f"{name}: {saved.get(name, missing)} there, {current.get(name, missing)} here"
            for name in names
        ]
        raise ConfigError(
            f"{asked}, but it is another one. These differ:\n  "
            + "\n  ".join(lines)
            + "\n  Ask for what it was, or name another folder."
        )


def _sample(run: Run) -> dict[str, Any]:
    """Return shapes and dtypes of the data, with which the model is rebuilt without the data."""
    example = run.world.family.example_inputs[0]
    shape, kind = list(example.shape[1:]), str(example.dtype).removeprefix("torch.")
    task, targets, classes = run.world.task, run.data.targets, run.data.num_classes
    if task.has_classes and classes:
        classes = task.num_outputs(targets, classes)  # A label that is ignored is no class.
    target_format = {
        "shape": list(targets.shape[1:]),
        "dtype": str(targets.dtype).removeprefix("torch."),
    }
    return {"shape": shape, "dtype": kind, "classes": classes, "targets": target_format}


def _choices(run: Run) -> dict[str, Any]:
    """Return everything else that the last bits of a result depend on.

    Threads and the settings of the engine are restored when a run is resumed.
    """
    engine = run.engine
    cuda = engine.device.type == "cuda"
    return {
        "threads": torch.get_num_threads(),
        "engine": dict(engine.settings),
        "here": {
            "torch": torch.__version__,
            "processor": torch.cuda.get_device_name(engine.device)
            if cuda
            else torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
    }


def _restore(choices: Mapping[str, Any], run: Run) -> None:
    torch.set_num_threads(choices["threads"])
    run.engine = run.engine.with_settings(choices["engine"])
    environment = _choices(run)["here"]
    for name, value in choices["here"].items():
        if environment.get(name) != value:
            _log.warning(
                "The run was begun with %s %s and goes on with %s: last digits may differ from an "
                "uninterrupted one.",
                name,
                value,
                environment.get(name),
            )


def _wrong_about(manifest: Manifest) -> str:
    """Return an error in `about` of a manifest. Empty: there is none."""
    entries = manifest.about
    for name in ("run", "engine", "here"):
        values = entries.get(name)
        if not isinstance(values, dict) or not all(
            value is None or _is_plain(value) for value in values.values()
        ):
            return f"about.{name} is no table of plain values"
    threads = entries.get("threads")
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        return f"about.threads = {str(threads)[:40]}, and 1 to {MAX_THREADS} fit"
    check = entries.get("check", "")
    if not isinstance(check, str) or not isinstance(entries.get("config", ""), (str, NoneType)):
        return "about.check or about.config is no text"
    settled_for = entries.get("settled_for")
    if settled_for is not None and not _is_round(settled_for):
        return f"about.settled_for is {str(settled_for)[:40]}"
    if "best" in entries and (problem := wrong_best(entries["best"], manifest.round)):
        return problem
    return _wrong_sample(entries["sample"]) if "sample" in entries else ""


def _wrong_sample(sample: Any) -> str:
    """Return an error in the shapes and classes of a checkpoint's sample. Empty: none."""
    targets = (
        sample.get("targets", {"shape": [], "dtype": "int64"}) if isinstance(sample, dict) else None
    )
    if not isinstance(sample, dict) or not isinstance(targets, dict):
        return "about.sample is no table"
    for values in (sample, targets):
        shape = values.get("shape")
        if not isinstance(shape, list) or not all(
            type(size) is int and size >= 0 for size in shape
        ):
            return f"about.sample has the shape {str(shape)[:40]}"
        if math.prod(shape) > MAX_SAMPLE_VALUES:
            return f"about.sample has more than {MAX_SAMPLE_VALUES:,} values"
        kind = values.get("dtype")
        if not isinstance(kind, str) or not isinstance(getattr(torch, kind, None), torch.dtype):
            return f"about.sample has the type {str(kind)[:40]}"
    classes = sample.get("classes")
    return (
        ""
        if type(classes) is int and classes >= 0
        else f"about.sample has {str(classes)[:40]} classes"
    )


def _wrong_settings(settings: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Return an error in the engine's settings of a checkpoint. Empty: there is none.

    Args:
        settings: Settings of the checkpoint.
        own: Settings of the engine, which define the allowed names and types.
    """
    for name, value in settings.items():
        if name not in own:
            return (
                f"the engine has no setting {name[:40]!r}; its settings are "
                f"{', '.join(own) or 'none'}"
            )
        is_whole = type(value) is int and type(own[name]) is int
        if type(value) is not type(own[name]) or (
            is_whole and not min(own[name], 1) <= value < 1 << 63
        ):
            return f"the engine's {name} is {str(value)[:40]!r}"
    return ""


def _wrong_weights(found: Server, own: Server) -> str:
    """Return a weight of a checkpoint that is missing, unexpected or misshapen. Empty: none."""
    for name in {**own.weights, **found.weights}:
        saved, expected = found.weights.get(name), own.weights.get(name)
        if saved is None or expected is None:
            return (
                f"the weight {name[:80]!r} is "
                f"{'missing' if saved is None else 'not one of the model'}"
            )
        if (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
            return (
                f"{name} is {saved.dtype} {list(saved.shape)} "
                f"and not {expected.dtype} {list(expected.shape)}"
            )
    return ""


def _is_round(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_ROUND


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def run_settings(run: Run, rounds: int) -> dict[str, Any]:
    """Return a description of a run from Python, as plain values."""
    world, identity = run.world, fingerprint(run)
    return {
        "rounds": rounds,
        "seed": world.seed,
        "engine": type(run.engine).__name__.lower(),
        "device": str(run.engine.device),
        "precision": world.precision,
        "link": str(run.link),
        "method": repr(run.method),
        "task": repr(world.task),
        "fleet": f"{run.fleet.num_clients} clients, {run.fleet.cohort} a round",
        "data": run.data.name,
        **_evaluated_on(run),
        "model": world.family.title,
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
        "fedquilt": __version__,
    }


def describe(run: Run, rounds: int, missing: Sequence[str]) -> str:
    """Return the text of config.toml for a run of a script whose settings cannot be written.

    It describes the run, but cannot repeat it.

    Args:
        run: The run.
        rounds: Total number of rounds.
        missing: Reasons why some parts have no settings.
    """
    table = {**run_settings(run, rounds), "missing": list(missing)}
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in table.items()]
    return "# A run from Python; its script repeats it.\n[python]\n" + "\n".join(lines) + "\n"


def summarize(run: Run) -> dict[str, Any]:
    """Return the summary of a run, as summary.json has it."""
    from fedquilt.engines import ENGINES
    from fedquilt.methods import METHODS

    family = run.world.family
    members = members_by_share(
        run.method, run.server, run.fleet.kinds, run.world, run.evaluation.shares
    )
    labels = labels_by_share(run.method, run.fleet.kinds, run.world, run.evaluation.shares)
    nets = {share: [family.member(net) for net in mix] for share, mix in members.items()}
    last, task = run.grades, run.world.task
    first = sum(record.bytes_first for record in run.records)
    link_seconds = [
        record.link_seconds for record in run.records if record.link_seconds is not None
    ]
    late = [len(record.late) for record in run.records if record.late is not None]
    missing = gaps(run.records, run.server.round)
    return {
        "method": registered(METHODS, run.method),
        "model": family.title,
        "data": run.data.name,
        **_evaluated_on(run),
        "engine": registered(ENGINES, run.engine),
        "precision": run.world.precision,
        "seed": run.world.seed,
        "rounds": run.server.round,
        **({"missing_rounds": missing} if missing else {}),
        "seconds": sum(record.seconds for record in run.records),
        "bytes_down": sum(record.bytes_down for record in run.records),
        "bytes_up": sum(record.bytes_up for record in run.records),
        **({"link_seconds": sum(link_seconds)} if link_seconds else {}),
        **({"late": sum(late)} if late else {}),
        **_of_server(run),
        **({"bytes_first": first} if first else {}),
        **run.method.account(run.fleet.counts, run.world),
        "accuracy": last.accuracy,
        "metrics": last.metrics,
        **({"best": run.best.to_dict()} if run.best else {}),
        "task": registered(TASKS, task),
        "main": task.main.name,
        "higher_is_better": task.main.higher_is_better,
        "percent": task.main.is_rate,
        "members": {
            share: {
                "params": sum(net.count for net in members_of_share),
                "macs": sum(net.macs for net in members_of_share),
            }
            for share, members_of_share in nets.items()
        },
        **({"labels": labels} if labels else {}),
        "devices": {
            share: [budget.bounds for budget in budgets] for share, budgets in run.devices.items()
        },
        "note": run.note,
        "fedquilt": __version__,
    }


def _of_server(run: Run) -> dict[str, Any]:
    """Return the cost of the server's own training. Empty: the server does not train."""
    learnt = [record for record in run.records if record.server_seconds is not None]
    if not learnt:
        return {}
    return {
        "server_seconds": sum(record.server_seconds or 0.0 for record in learnt),
        "server_macs": sum(record.server_macs for record in learnt),
        "server_steps": sum(record.server_steps for record in learnt),
    }
