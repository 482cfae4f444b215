"""A run's folder: what it was, what happened in each round, how it ended, and the state it can go on from.

DIR/
├── config.toml     what was asked for
├── rounds.jsonl    one object a round, written as soon as it is over (`roundlog.py`)
├── summary.json    how it ended; there once it has
├── checkpoint/     the state of the server (`checkpoint.py`)
└── lock            who writes here
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
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from types import NoneType, TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from fedquilt.checkpoint import Checkpointing, Checkpoints, Manifest
from fedquilt.devices import device_of
from fedquilt.errors import ConfigError, RecordError
from fedquilt.files import TEMPORARY, make_folder, refuse_special, sync_folder, why, write
from fedquilt.memory import Memories
from fedquilt.round import Record
from fedquilt.round.labels import labels_by_share
from fedquilt.round.serve import members_by_share
from fedquilt.roundlog import Gap, RoundLog, encoded, gaps, parse, rounds_text
from fedquilt.tasks import TASKS, Classification, NextToken
from fedquilt.terms import Server
from fedquilt.trust import remember_code
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.experiment import Run

_log = logging.getLogger("fedquilt")
MAX_THREADS = 1024  # that a checkpoint may ask for
MAX_SAMPLE_VALUES = 1 << 28  # values of a sample that a checkpoint may ask for
MAX_LISTED = 5  # problems of a file that an error lists
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
_COSTS = (
    "seconds",
    "bytes_down",
    "bytes_up",
    "link_seconds",
)  # numbers of a summary, each of which may be missing


class Folder:
    """A run's folder and the right to write there. Leaving it saves the state, however the run went."""

    def __init__(self, path: Path, checkpointing: Checkpointing) -> None:
        """Use `create` or `resume`."""
        self.path = path
        self.checkpointing = checkpointing
        self._file = path / "rounds.jsonl"
        self._checkpoints = Checkpoints(path / "checkpoint", checkpointing.keep)
        self._run: Run | None = None
        self._identity: dict[str, Any] = {}  # of the run, once there is one
        self._rounds = 0  # in rounds.jsonl
        self._length = 0  # of it, in bytes
        self._check = ""  # checksum of its last line
        self._saved, self._cost = (
            time.monotonic(),
            0.0,
        )  # when the last checkpoint was made, and how long it took
        check_folder(path)
        self._lock = _lock(path)

    @classmethod
    def create(
        cls, path: str | Path, config: str, checkpointing: Checkpointing = Checkpointing()
    ) -> Self:
        """A folder for a new run; `config` is the text of config.toml. One that holds a run is refused."""
        path = Path(path)
        with _writable(f"the folder {path} was asked for"):
            make_folder(path)
            folder = cls(path, checkpointing)
            try:
                if holds_a_run(path):
                    raise ConfigError(
                        f"the folder {path} was asked for; a run is there already. Resume it, or name another."
                    )
                write(path / "config.toml", [config.encode()])
                folder._begin_log()
                remember_code([tomllib.loads(config)])  # This user started the run.
            except BaseException:
                folder.close()
                raise
        return folder

    @classmethod
    def resume(cls, path: str | Path, checkpointing: Checkpointing = Checkpointing()) -> Self:
        """The folder of a run that is to go on; `config` has what it was asked for."""
        path = Path(path)
        if not (path / "config.toml").is_file():
            found = "there is no run in it" if path.is_dir() else "there is no such folder"
            raise ConfigError(f"the run in {path} was to go on; {found}.")
        with _writable(f"the run in {path} was to go on"):
            return cls(path, checkpointing)

    @property
    def config(self) -> str:
        """The text of config.toml."""
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
        """Let others write here."""
        os.close(self._lock)

    # --- while it runs -----------------------------------------------------------------------------------------

    def load(self, run: Run) -> int:
        """Put the newest intact checkpoint into a run that was prepared alike; returns the rounds behind it."""

        def check(manifest: Manifest, server: Server) -> str:
            damage = _wrong_about(manifest.about)
            if damage:
                return f"{manifest.name} is not what was written: {damage}"
            _compare(manifest.about["run"], _leaves_of(run), f"the run in {self.path} was to go on")
            return _wrong_settings(manifest.about["engine"], run.engine.settings) or _wrong_weights(
                server, run.server
            )

        found = self._checkpoints.load(_memories(run), run.engine.device, check)
        log = RoundLog()
        if found is None:
            if self._file.exists() and self._file.stat().st_size:
                raise RecordError(
                    f"{self._file} has rounds, but there is no checkpoint to go on from."
                )
            self._begin_log()
        else:
            server, manifest = found
            _restore(manifest.about, run)
            run.server = server
            log = self._mended_log(manifest)
            self._warn_of_other_settings(manifest)
        run.records[:] = log.records
        self._rounds, self._length, self._check = len(log.lines), len(log.content), log.check
        return run.server.round

    def _begin_log(self) -> None:
        """Make rounds.jsonl, which a kill may have prevented."""
        try:
            self._file.touch()
            sync_folder(self.path)
        except OSError as error:
            raise RecordError(f"{self._file} cannot be written to: {why(error)}.") from error

    def _warn_of_other_settings(self, manifest: Manifest) -> None:
        """Warn if config.toml is not the one of the checkpoint. What the weights depend on is compared elsewhere."""
        if manifest.about.get("config") not in (None, _settings_checksum(self.path)):
            _log.warning(
                "%s is not the one that the checkpoint was written with: it was edited, or it is damaged. What the "
                "weights depend on is the same.",
                self.path / "config.toml",
            )

    def _mended_log(self, manifest: Manifest) -> RoundLog:
        """Cut rounds.jsonl back to a checkpoint, and take damaged lines out of it.

        What was there is kept as `rounds.jsonl.damaged` if lines are taken out.
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
        """What to call after every round of a run: it writes the record, and the state when that is due."""
        self._run, self._identity = run, identity(run)
        _memories(run).spill_in = self.path
        if self._checkpoints.newest is None:
            self._save()  # an unwritable disk shows now, and from here on it is known what the run is

        def after(record: Record) -> None:
            self._append()
            rounds = run.server.round - (self._checkpoints.newest or 0)
            if self.checkpointing.due(rounds, time.monotonic() - self._saved, self._cost):
                self._save()

        return after

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Save the last state, and how the run ended."""
        self._save()
        try:
            text = summary_text(summary, (self.path / "config.toml").read_bytes(), self._check)
            write(self.path / "summary.json", [text.encode()])
        except OSError as error:
            raise RecordError(
                f"{self.path}/summary.json could not be written: {why(error)}."
            ) from error

    def _append(self) -> None:
        """Write the records that are not yet in rounds.jsonl."""
        assert self._run is not None
        for record in self._run.records[self._rounds :]:
            line, check = encoded(record, self._check)
            try:
                (self.path / "summary.json").unlink(
                    missing_ok=True
                )  # of a run that goes on beyond its end
                with self._file.open("r+b") as file:
                    file.truncate(self._length)  # half a line, if a disk was full
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
            self._append()
            _sync(self._file)
            about = {
                "fedquilt": __version__,
                "records": self._length,
                "check": self._check,
                "config": _settings_checksum(self.path),
                "run": self._identity,
                "sample": _sample(run),
                **_choices(run),
            }
            self._checkpoints.save(run.server, about)
            self._saved = time.monotonic()
            self._cost = self._saved - began


def holds_a_run(path: Path) -> bool:
    """Return True if a folder has something in it that a new run would destroy."""
    check_folder(path)
    rounds = path / "rounds.jsonl"
    begun = rounds.is_file() and rounds.stat().st_size > 0
    return begun or (path / "summary.json").exists() or Checkpoints(path / "checkpoint").exist


def check_folder(path: Path) -> None:
    """Refuse a run's folder in which a symbolic link or a special file is where the run reads or writes.

    Raises:
        RecordError: As above. The folder itself may be a link, and need not exist.
    """
    inside = path / "checkpoint"
    names = [path / f"{name}{end}" for name in _FILES for end in ("", TEMPORARY)]
    try:
        refuse_special(inside)
        for file in (*names, *(inside.iterdir() if inside.is_dir() else ())):
            refuse_special(file)
    except FileExistsError as error:
        raise RecordError(
            f"the folder {path} was asked for; {why(error)}. Only plain files are used, so that nothing outside of the "
            "folder is read or changed."
        ) from error


def summary_text(summary: Mapping[str, Any], config: bytes, log: str = "") -> str:
    """Return the text of summary.json, with checksums of the summary, and of the settings and log that it belongs to.

    Args:
        summary: A run in one object.
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
    """Return a checksum of config.toml without the number of rounds, which may grow. None: it cannot be read."""
    try:
        settings = tomllib.loads((path / "config.toml").read_text())
    except (OSError, ValueError, RecursionError):
        return None
    settings.pop("rounds", None)
    return _checksum(json.dumps(settings, sort_keys=True, default=str).encode())


def _sorted_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def read_summary(path: Path) -> dict[str, Any] | None:
    """Return the summary of the run in a folder, without its checksums. None: the run is not finished.

    Raises:
        RecordError: The file cannot be read, or is not what a run wrote.
    """
    found = _read_summary(path)
    return found and found[0]


def _read_summary(path: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the summary of the run in a folder, and its checksums. Those of earlier versions have none."""
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
        wrong = _wrong_in(summary, checks)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {str(error)[:200]}. {_REMEDY}") from error
    if wrong:
        raise RecordError(f"{file} is damaged: {wrong[:200]}. {_REMEDY}")
    return summary, checks


def _wrong_in(summary: Any, checks: Any) -> str:
    """Return what a run would not have written into its summary; empty if nothing is wrong."""
    if not isinstance(summary, dict) or not isinstance(checks, dict):
        return "it holds no object, or its checksums are none"
    if checks and checks.get("summary.json") != _checksum(_sorted_json(summary)):
        return "its checksum differs"
    if any(isinstance(value, dict) and "summary.json" in value for value in summary.values()):
        return "its checksums are not under the key check"
    rounds = summary.get("rounds", 0)
    if type(rounds) is not int:
        return f"rounds = {rounds!r} was found; a whole number fits"
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


def _wrong_figures(summary: Mapping[str, Any], labels: Mapping[str, str]) -> str:
    """Return what is wrong with the metrics of a summary; empty if nothing is wrong."""
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
    """Return what is wrong with the members of a summary; empty if nothing is wrong."""
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
    """Return what is wrong with the files of a finished run, each in words. Empty: nothing is.

    Args:
        path: Folder of the run, whose summary.json is intact.
    """
    found = _read_summary(path)
    assert found is not None, "the run is finished"
    summary, checks = found
    damage = []
    if "config.toml" in checks and checks["config.toml"] != _checksum(
        (path / "config.toml").read_bytes()
    ):
        damage.append("config.toml: it is not the one that the run had when it ended")
    checkpoints = Checkpoints(path / "checkpoint")
    damage += [f"checkpoint {one}" for one in checkpoints.damage]
    damage += [f"checkpoint/{name}: no checkpoint lists it" for name in checkpoints.unlisted]
    if not (path / "checkpoint" / f"{summary['rounds']:08}.json").exists():
        damage.append(f"checkpoint {summary['rounds']:08}: it is gone")
    return damage + _damage_of_log(path, summary, checks.get("rounds.jsonl"))


def _damage_of_log(path: Path, summary: Mapping[str, Any], check: str | None) -> list[str]:
    """Return what is wrong with rounds.jsonl of a finished run.

    Args:
        path: Folder of the run.
        summary: Its summary. Rounds that it calls missing are no damage.
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
    """Return the rounds that the run in a folder was begun with, or `usual` if its config.toml does not say."""
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
            f"the rounds of {path} were asked for; {Path(path) / 'rounds.jsonl'} is not what was written: "
            f"{'; '.join(log.damage[:MAX_LISTED])}."
        )
    return log.records


def _read_log(path: str | Path) -> RoundLog:
    """Return the log in a run's folder, of which lines may be damaged."""
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
            "%s is damaged: %s missing from it. The weights are those of the checkpoint, which is intact. "
            "Sums over rounds leave the missing ones out.",
            file,
            _are(missing),
        )


def load(path: str | Path, device: str = "cpu") -> Server:
    """The newest intact state in a run's folder: weights, slots and memories by name, without the run."""
    return newest(path, device)[0]


def newest(path: str | Path, device: str = "cpu") -> tuple[Server, Manifest]:
    """The newest intact state in a run's folder, and what was written down about it."""
    where = device_of(device)
    check_folder(Path(path))

    def check(manifest: Manifest, server: Server) -> str:
        damage = _wrong_about(manifest.about)
        return f"{manifest.name} is not what was written: {damage}" if damage else ""

    found = Checkpoints(Path(path) / "checkpoint").load(Memories(device=where), where, check)
    if found is None:
        raise RecordError(f"the weights in {path} were asked for; there is no checkpoint there.")
    return found


def reopen(path: str | Path, run: Run, found: tuple[Server, Manifest]) -> Run:
    """Put a state into a run that was prepared alike, where it is not to go on: nothing is locked or written.

    Engine, device and fleet may be others; without data, the data is not compared.
    """
    server, manifest = found
    parts = (
        ("method", "model", "constants") if run.absent else ("method", "model", "constants", "data")
    )

    def is_compared(name: str) -> bool:
        return re.split(r"[.\[]", name)[0] in parts

    saved = {name: value for name, value in manifest.about["run"].items() if is_compared(name)}
    own = [leaf for leaf in _leaves_of(run) if is_compared(leaf.name)]
    _compare(saved, own, f"the run in {path} was asked for")
    run.server = server
    log = _until(_read_log(path), manifest)
    _warn_of_missing_rounds(Path(path) / "rounds.jsonl", log, server.round)
    run.records[:] = log.records
    return run


@contextmanager
def undisturbed() -> Iterator[None]:
    """Hold ctrl-C and a request to terminate back until the block is over: a round counts as a whole or not at all."""
    came: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if (
        threading.current_thread() is not threading.main_thread() or None in before.values()
    ):  # not ours to hold
        yield
        return
    for number in before:
        signal.signal(number, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a folder for writing while the block runs. The folder is made if it is not there.

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
    """A lock that the system releases however the process ends; holds its pid for those who come second."""
    import fcntl

    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
        os.close(handle)
        raise ConfigError(
            f"the folder {path} was asked for; the run of process {owner or 'unknown'} is writing there. "
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


def _memories(run: Run) -> Memories:
    assert isinstance(run.server.memory, Memories)
    return run.server.memory


# --- what a run is ----------------------------------------------------------------------------------------------

_ENOUGH = (
    64 << 20
)  # bytes of a tensor that are looked at: all of a small one, evenly spaced rows of a large one
_FEW = 16  # values of a sequence that are worth a line each


class _Leaf(NamedTuple):
    """A plain value that must not change when a run goes on."""

    name: str  # Dotted
    value: Any
    is_default: bool = False  # It belongs to a field that has its default value


def identity(run: Run) -> dict[str, Any]:
    """What must not change when a run goes on, as dotted names and plain values."""
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
    """Return an entry for the samples that a run is evaluated on; none for the test set, as in earlier versions."""
    return {} if run.evaluation.on == "test" else {"evaluated_on": run.evaluation.on}


def _leaves(name: str, value: Any, is_default: bool = False) -> Iterator[_Leaf]:
    """Yield a value as plain values that are the same in another process; arrays and the like by a digest.

    Args:
        name: Name of the value.
        value: A plain value, or one that is made of such values.
        is_default: True if the value is the default of a field.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        yield _Leaf(name, value, is_default)
    elif isinstance(value, (Tensor, np.ndarray)):
        yield _Leaf(
            name, f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {_digest(value)}"
        )
    elif isinstance(found := getattr(value, "fingerprint", None), str):
        yield _Leaf(name, found, is_default)
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
            leaf for place, inner in enumerate(value) for leaf in _leaves(f"{name}[{place}]", inner)
        ]
        if len(value) > _FEW:
            text = json.dumps([(leaf.name, leaf.value) for leaf in leaves])
            digest = hashlib.sha256(text.encode()).hexdigest()[:16]
            leaves = [_Leaf(name, f"{len(value)} values {digest}")]
        yield from leaves
    elif isinstance(value, (torch.dtype, torch.device, np.generic)):
        yield _Leaf(name, str(value), is_default)
    else:  # of a function or an object nothing is known that would last
        yield _Leaf(name, getattr(value, "__qualname__", type(value).__qualname__), is_default)


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
    """Refuse to go on with something else, and say what.

    A checkpoint of an earlier version has no entry for a field that was added since. The run was as it is with the
    field's default, at which a new field has no effect.

    Args:
        saved: Entries of a checkpoint by name.
        leaves: Entries of the run that is to go on.
        asked: Request, for the message.
    """
    own = {leaf.name: leaf.value for leaf in leaves}
    added = {leaf.name for leaf in leaves if leaf.is_default and leaf.name not in saved}
    # what was compared is what JSON made of it: compare likewise
    names = [
        name
        for name in {**saved, **own}
        if name not in added and saved.get(name) != json.loads(json.dumps(own.get(name)))
    ]
    if names:
        missing = "nothing of the kind"
        lines = [
            f"{name}: {saved.get(name, missing)} there, {own.get(name, missing)} here"
            for name in names
        ]
        raise ConfigError(
            f"{asked}, but it is another one. These differ:\n  "
            + "\n  ".join(lines)
            + "\n  Ask for what it was, or name another folder."
        )


def _sample(run: Run) -> dict[str, Any]:
    """What the model must know of the data to be made again where that cannot be had."""
    example = run.world.family.example_inputs[0]
    shape, kind = list(example.shape[1:]), str(example.dtype).removeprefix("torch.")
    task, targets, classes = run.world.task, run.data.targets, run.data.num_classes
    if task.has_classes and classes:
        classes = task.num_outputs(targets, classes)  # A label that is ignored is no class.
    like = {"shape": list(targets.shape[1:]), "dtype": str(targets.dtype).removeprefix("torch.")}
    return {"shape": shape, "dtype": kind, "classes": classes, "targets": like}


def _choices(run: Run) -> dict[str, Any]:
    """What the last bits of a result depend on besides; threads and the engine's own settings are restored."""
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
    here = _choices(run)["here"]
    for name, value in choices["here"].items():
        if here.get(name) != value:
            _log.warning(
                "The run was begun with %s %s and goes on with %s: last digits may differ from an uninterrupted one.",
                name,
                value,
                here.get(name),
            )


def _wrong_about(about: Mapping[str, Any]) -> str:
    """Return what a run would not have written about a checkpoint; empty if nothing is wrong."""
    for name in ("run", "engine", "here"):
        values = about.get(name)
        if not isinstance(values, dict) or not all(
            value is None or _is_plain(value) for value in values.values()
        ):
            return f"about.{name} is no table of plain values"
    threads = about.get("threads")
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        return f"about.threads = {str(threads)[:40]}, and 1 to {MAX_THREADS} fit"
    check = about.get("check", "")
    if not isinstance(check, str) or not isinstance(about.get("config", ""), (str, NoneType)):
        return "about.check or about.config is no text"
    return _wrong_sample(about["sample"]) if "sample" in about else ""


def _wrong_sample(sample: Any) -> str:
    """Return what is wrong with the shape and classes of a sample in a checkpoint; empty if nothing is wrong."""
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
    """Return what is wrong with the engine's settings of a checkpoint; empty if nothing is wrong.

    Args:
        settings: Settings of the checkpoint.
        own: Settings of the engine. No others can be set, and their types stay.
    """
    for name, value in settings.items():
        if name not in own:
            return f"the engine has no setting {name[:40]!r}; its settings are {', '.join(own) or 'none'}"
        is_whole = type(value) is int and type(own[name]) is int
        if type(value) is not type(own[name]) or (
            is_whole and not min(own[name], 1) <= value < 1 << 63
        ):
            return f"the engine's {name} is {str(value)[:40]!r}"
    return ""


def _wrong_weights(found: Server, own: Server) -> str:
    """Return a weight that a checkpoint lacks, has too many, or has in another shape; empty if all fit."""
    for name in {**own.weights, **found.weights}:
        have, need = found.weights.get(name), own.weights.get(name)
        if have is None or need is None:
            return f"the weight {name[:80]!r} is {'missing' if have is None else 'not one of the model'}"
        if (have.shape, have.dtype) != (need.shape, need.dtype):
            return (
                f"{name} is {have.dtype} {list(have.shape)} and not {need.dtype} {list(need.shape)}"
            )
    return ""


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))


def portrait(run: Run, rounds: int) -> dict[str, Any]:
    """A run that was put together in Python, in plain values."""
    world, known = run.world, identity(run)
    return {
        "rounds": rounds,
        "seed": world.seed,
        "engine": type(run.engine).__name__.lower(),
        "device": str(run.engine.device),
        "precision": world.precision,
        "link": str(run.link),
        "method": repr(run.method),
        "task": repr(world.task),
        "fleet": f"{run.fleet.num_clients} clients, {run.fleet.sample} a round",
        "data": run.data.name,
        **_evaluated_on(run),
        "model": world.family.title,
        "fingerprint": hashlib.sha256(json.dumps(known).encode()).hexdigest()[:16],
        "fedquilt": __version__,
    }


def describe(run: Run, rounds: int) -> str:
    """The text of config.toml for a run that was put together in Python: it says what ran, and cannot repeat it."""
    lines = [
        f"{name} = {json.dumps(value, ensure_ascii=False)}"
        for name, value in portrait(run, rounds).items()
    ]
    return "# A run from Python; its script repeats it.\n[python]\n" + "\n".join(lines) + "\n"


def summarise(run: Run) -> dict[str, Any]:
    """A run in one object, as summary.json has it."""
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
    over = [record.link_seconds for record in run.records if record.link_seconds is not None]
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
        **({"link_seconds": sum(over)} if over else {}),
        **_of_server(run),
        **({"bytes_first": first} if first else {}),
        **run.method.account(run.fleet.counts, run.world),
        "accuracy": last.accuracy,
        "metrics": last.metrics,
        "task": registered(TASKS, task),
        "main": task.main.name,
        "higher_is_better": task.main.higher_is_better,
        "percent": task.main.is_rate,
        "members": {
            share: {"params": sum(net.count for net in own), "macs": sum(net.macs for net in own)}
            for share, own in nets.items()
        },
        **({"labels": labels} if labels else {}),
        "devices": {
            share: [budget.bounds for budget in budgets] for share, budgets in run.devices.items()
        },
        "note": run.note,
        "fedquilt": __version__,
    }


def _of_server(run: Run) -> dict[str, Any]:
    """Return what the server's own training took, if it learns."""
    learnt = [record for record in run.records if record.server_seconds is not None]
    if not learnt:
        return {}
    return {
        "server_seconds": sum(record.server_seconds or 0.0 for record in learnt),
        "server_macs": sum(record.server_macs for record in learnt),
        "server_steps": sum(record.server_steps for record in learnt),
    }


def registered(table: Mapping[str, type], value: object) -> str:
    """The name that asks for such a value, or its class."""
    return next((name for name, kind in table.items() if kind is type(value)), type(value).__name__)
