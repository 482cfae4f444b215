"""The folder of a run, as a running process writes it.

DIR/
├── config.toml     settings of the run
├── rounds.jsonl    one JSON object per round, written when the round ends (`round_log.py`)
├── summary.json    results of the run, written when it ends (`summary_file.py`)
├── checkpoint/     newest states, and the best one on validation samples (`checkpoint.py`)
└── lock            id of the process that writes here (`lock.py`)

`folder_files.py` and `saved_state.py` read a folder without locking it.
"""

from __future__ import annotations

import logging
import os
import re
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from fedquilt.errors import ConfigError, RecordError
from fedquilt.round import Record
from fedquilt.runs.about import (
    problem_in_about,
    problem_in_settings,
    problem_in_weights,
    restore_environment,
    run_environment,
    sample_format,
)
from fedquilt.runs.best import Best
from fedquilt.runs.checkpoint import Checkpointing, Checkpoints, Manifest
from fedquilt.runs.client_states import ClientStates, copied
from fedquilt.runs.fingerprint import check_same_run, fingerprint, leaves_of
from fedquilt.runs.folder_files import (
    check_folder,
    holds_a_run,
    log_until,
    settings_checksum,
    warn_of_missing_rounds,
)
from fedquilt.runs.lock import lock_folder, writable
from fedquilt.runs.round_log import RoundLog, encoded, parse
from fedquilt.runs.signals import undisturbed
from fedquilt.runs.summary_file import summary_text
from fedquilt.runs.trust import remember_code
from fedquilt.storage.files import make_folder, sync_folder, why, write
from fedquilt.terms import Server
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.runs.run import Run

_log = logging.getLogger("fedquilt")


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
        self._lock = lock_folder(path)

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
        with writable(f"the folder {path} was asked for"):
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
        """Open and lock the folder of a run that is to be resumed. `config` then has its settings.

        Nothing is loaded yet, which `load` does.

        Args:
            path: Path of the folder.
            checkpoint: Settings of when to save a checkpoint.

        Raises:
            ConfigError: There is no run, another process has the lock, or the folder cannot be
                written to.
        """
        path = Path(path)
        if not (path / "config.toml").is_file():
            finding = "there is no run in it" if path.is_dir() else "there is no such folder"
            raise ConfigError(f"the run in {path} was to be resumed; {finding}.")
        with writable(f"the run in {path} was to be resumed"):
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
        self._lock.release()

    # --- while it runs ---------------------------------------------------------------------------

    def load(self, run: Run) -> int:
        """Load the newest intact checkpoint into a run that was prepared with the same settings.

        State, records, best round, threads and engine settings of the run are replaced.
        `rounds.jsonl` is cut back to the checkpoint. A run without a checkpoint begins at round 0.

        Args:
            run: The prepared run, which is changed in-place.

        Returns:
            Number of rounds that the run has completed.

        Raises:
            ConfigError: The checkpoint is of a run with other settings.
            RecordError: No checkpoint is intact, or there are rounds without any checkpoint.
        """

        def check(manifest: Manifest, server: Server) -> str:
            damage = problem_in_about(manifest)
            if damage:
                return f"{manifest.name} is not what was written: {damage}"
            check_same_run(
                manifest.about["run"], leaves_of(run), f"the run in {self.path} was to be resumed"
            )
            return problem_in_settings(
                manifest.about["engine"], run.engine.settings
            ) or problem_in_weights(server, run.server)

        newest_state = self._checkpoints.load(_client_states(run), run.engine.device, check)
        log = RoundLog()
        if newest_state is None:
            if self._file.exists() and self._file.stat().st_size:
                raise RecordError(
                    f"{self._file} has rounds, but there is no checkpoint to resume from."
                )
            self._begin_log()
        else:
            server, manifest = newest_state
            restore_environment(manifest.about, run)
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

        A smaller number has no effect. Runs of scripts whose settings could not be written are not
        changed. If the file was edited so that the number is not found, a warning is logged.

        Args:
            rounds: Total number of rounds.
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
        self.rewrite(longer)

    def rewrite(self, config: str) -> None:
        """Replace config.toml by settings of the same run with another fleet.

        Args:
            config: Text of config.toml.
        """
        if config == self.config:
            return
        try:
            write(self.path / "config.toml", [config.encode()])
        except OSError as error:
            raise RecordError(
                f"{self.path}/config.toml could not be written: {why(error)}."
            ) from error

    def _begin_log(self) -> None:
        """Create an empty rounds.jsonl. A file that a killed process left stays as it is."""
        try:
            self._file.touch()
            sync_folder(self.path)
        except OSError as error:
            raise RecordError(f"{self._file} cannot be written to: {why(error)}.") from error

    def _warn_of_other_settings(self, manifest: Manifest) -> None:
        """Warn if config.toml has changed since the checkpoint.

        Settings that the weights depend on are compared elsewhere.
        """
        if manifest.about.get("config") not in (None, settings_checksum(self.path)):
            _log.warning(
                "%s is not the one that the checkpoint was written with: it was edited, or it is "
                "damaged. What the weights depend on is the same.",
                self.path / "config.toml",
            )

    def _mended_log(self, manifest: Manifest) -> RoundLog:
        """Cut rounds.jsonl back to a checkpoint, and remove damaged lines.

        If lines other than the last ones are removed, the original is kept as
        `rounds.jsonl.damaged`. A warning lists rounds that are missing.

        Args:
            manifest: Manifest of the checkpoint that the run is resumed from.

        Returns:
            The lines that the file has now.
        """
        try:
            content = self._file.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as error:
            raise RecordError(f"{self._file} cannot be read: {why(error)}.") from error
        log = log_until(parse(content), manifest)
        warn_of_missing_rounds(self._file, log, manifest.round)
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

        It writes the record of the round, and a checkpoint if one is due or the round is the best.
        A run without any checkpoint is saved here at once. The run's client states spill into this
        folder.

        Args:
            run: Run that the folder belongs to from now on.
        """
        self._run, self._identity = run, fingerprint(run)
        run.folder = self.path
        _client_states(run).spill_in = self.path
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
        """Save the last state, and write the summary with checksums to summary.json."""
        self._save()
        try:
            text = summary_text(summary, (self.path / "config.toml").read_bytes(), self._check)
            write(self.path / "summary.json", [text.encode()])
        except OSError as error:
            raise RecordError(
                f"{self.path}/summary.json could not be written: {why(error)}."
            ) from error

    def _append(self, server: Server) -> None:
        """Write the run's records that are not in rounds.jsonl yet, up to a state's round.

        An outdated summary.json is removed.

        Args:
            server: State whose round is the last one that is written.
        """
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
        """Save a checkpoint of the run, unless its last round has one or no run is watched.

        The checkpoint of the best round is written too, if this folder does not have it. Signals
        are delayed until the end.
        """
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
        """Write the records up to a state, and then a checkpoint of the state.

        Args:
            run: Run whose settings and environment the manifest describes.
            server: State to save: the run's current one, or that of its best round.
        """
        self._append(server)
        _sync(self._file)
        description = {
            "fedquilt": __version__,
            "records": self._length,
            "check": self._check,
            "config": settings_checksum(self.path),
            "run": self._identity,
            "sample": sample_format(run),
            "settled_for": run.settled_for,
            **run_environment(run),
            **({"best": run.best.to_dict()} if run.best else {}),
        }
        self._checkpoints.save(server, description)


def _holds(text: str, settings: Mapping[str, Any]) -> bool:
    """Return True if a text is TOML that has exactly these settings."""
    try:
        return tomllib.loads(text) == settings
    except ValueError:
        return False


def _sync(path: Path) -> None:
    try:
        with path.open("rb") as file:
            os.fsync(file.fileno())
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def _client_states(run: Run) -> ClientStates:
    assert isinstance(run.server.memory, ClientStates)
    return run.server.memory
