"""The newest content of a report, read again by one thread whenever files have changed."""

from __future__ import annotations

import gzip
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from altair.utils.schemapi import debug_mode

from fedquilt.errors import FedquiltError
from fedquilt.report.document import Content, content, document
from fedquilt.studies.plan import STUDY_FILE

POLL_SECONDS = 0.1  # Time between two looks at the files
# Reading takes at most a fifth of a processor's time, because the run may need the same one.
REST_FACTOR = 4.0
MAX_REST_SECONDS = 10.0  # Longest time between two looks, however long reading takes
RETRY_SECONDS = 1.0  # Time until a report that could not be read is read again, if no file changes
MAX_RETRY_SECONDS = 60.0
RUN_FILES = ("config.toml", "rounds.jsonl", "rounds.jsonl.gz", "summary.json")

_log = logging.getLogger(__name__)

FileState = tuple[str, int, int, int]  # Path, inode, size and time of the last change


@dataclass(frozen=True)
class Snapshot:
    """The content of a report at one time, as a server sends it."""

    version: int  # Number of the content, from 1
    content: Content

    @cached_property
    def page(self) -> bytes:
        """Return the whole HTML page, compressed by gzip."""
        return _compressed(document(self.content, live=True))

    @cached_property
    def json(self) -> bytes:
        """Return the content as JSON, compressed by gzip."""
        return _compressed(self.content.to_json())


class Follower:
    """A thread that reads the report of some folders again after their files have changed.

    The folders are read by this thread alone, however many readers the page has. Nothing is written
    to them.

    Args:
        folders: Folders of runs, or the folder of a study.
        metric: Name of the metric to show. Empty: the main one.
        trust: True: run code that settings in the folders name, and add it to the user's list.
        changed: Function that the thread calls after each new snapshot or problem. It must return
            quickly.

    Raises:
        ConfigError: A folder has no run, the runs cannot be compared, or no run has the metric.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        metric: str = "",
        trust: bool = False,
        changed: Callable[[], None] = lambda: None,
    ) -> None:
        self._folders = [Path(folder) for folder in folders]
        self._metric, self._trust, self.changed = metric, trust, changed
        self._stopped = threading.Event()
        self._state = file_states(self._folders)
        self.snapshot = self._read(1)  # Errors of the request are raised at once.
        # Processor seconds of the last look. The first reading prepares the run, and is left out.
        self._cost = 0.0
        self.problem = ""  # Why the newest files cannot be shown. Empty: they are shown.
        self._retry_at, self._retry_seconds = 0.0, RETRY_SECONDS
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, and wait until it has ended."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _read(self, version: int) -> Snapshot:
        # Altair compares each part of a chart with its schema, which takes most of the time. The
        # first content is compared, and later ones have charts of the same kinds.
        with debug_mode(version == 1):
            shown = content(self._folders, metric=self._metric, trust=self._trust)
        snapshot = Snapshot(version, shown)
        _ = snapshot.page, snapshot.json  # Compressed here, and not by the thread of the server.
        return snapshot

    def _follow(self) -> None:
        while not self._stopped.wait(
            min(max(POLL_SECONDS, REST_FACTOR * self._cost), MAX_REST_SECONDS)
        ):
            # Seconds of the processor and not of the wall, which are longer beside a busy run.
            began = time.thread_time()
            self._look(time.monotonic())
            self._cost = time.thread_time() - began

    def _look(self, now: float) -> None:
        """Read the report if a file has changed, or if it is time to try again.

        Args:
            now: Time of this look, in seconds.
        """
        # The states are taken before the files are read, so that no later change is missed.
        state = file_states(self._folders)
        if state == self._state and not (self.problem and now >= self._retry_at):
            return
        self._retry_seconds = RETRY_SECONDS if state != self._state else 2 * self._retry_seconds
        self._state = state
        try:
            self.snapshot = self._read(self.snapshot.version + 1)
            self.problem = ""
        except Exception as error:  # The thread continues, and its readers see the reason.
            if not isinstance(error, (FedquiltError, OSError)):
                _log.exception("the report of %s failed", ", ".join(map(str, self._folders)))
            self.problem = str(error) or type(error).__name__
            self._retry_at = now + min(self._retry_seconds, MAX_RETRY_SECONDS)
        self.changed()


def file_states(folders: Sequence[Path]) -> list[FileState]:
    """Return the states of all files of runs and studies in some folders.

    A file that is replaced has another inode. One that is extended or cut has another size.
    """
    states = []
    for folder in folders:
        for file in _files(folder):
            try:
                found = file.stat()
            except OSError:
                continue
            states.append((str(file), found.st_ino, found.st_size, found.st_mtime_ns))
    return states


def has_run(folder: Path) -> bool:
    """Return True if a folder has a file of a run or of a study."""
    return any((folder / name).is_file() for name in (*RUN_FILES, STUDY_FILE))


def _files(folder: Path) -> Iterator[Path]:
    """Yield the paths of files that a report reads. They need not exist.

    Runs of a study are one or two levels below its folder.
    """
    yield from (folder / name for name in (*RUN_FILES, STUDY_FILE))
    if not (folder / STUDY_FILE).is_file():
        return
    for pattern in ("*/config.toml", "*/*/config.toml", "*/*/*/config.toml"):
        for config in sorted(folder.glob(pattern)):
            yield from (config.parent / name for name in RUN_FILES)


def _compressed(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=4)
