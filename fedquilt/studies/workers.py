"""Runs of a study in processes of their own.

The parent writes one line of JSON, the planned run and its folder, to the standard input of a
worker. The worker writes lines of JSON, one per record, to its standard output. Standard input
stays open as long as the parent lives. When it closes, the worker saves its state and ends, so that
no process outlives a parent that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fedquilt import errors
from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.round import Record
from fedquilt.studies.entries import PlannedRun
from fedquilt.studies.execute import Display, Grounds, Watch, finished, perform
from fedquilt.studies.result import Result

STOP_SECONDS = 60.0  # Time in which a stopped worker may save its state before it is killed.
MAX_ERROR_LINES = 50  # Last lines of a worker's standard error that are kept.


def execute_in_processes(runs: Sequence[PlannedRun], folder: Path, jobs: int, watch: Watch) -> None:
    """Run all planned runs in processes.

    After a failure no further run begins, and runs that are under way are finished.

    Args:
        runs: Planned runs, none of which is finished.
        folder: Folder of the study.
        jobs: Number of processes at the same time.
        watch: Receives the progress, from several threads.

    Raises:
        FedquiltError: A worker failed. Its error is raised again, with the run that it belongs to.
    """
    workers = _Workers(folder, watch)
    futures: list[Future[None]] = []
    with ThreadPoolExecutor(jobs) as pool:
        try:
            futures += [pool.submit(workers.run, planned) for planned in runs]
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future not in done:
                    future.cancel()
            wait([future for future in futures if not future.cancelled()])
        except BaseException:
            workers.stop()
            raise
    for future in futures:
        if not future.cancelled():
            future.result()


class _Workers:
    """Worker processes that are running."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder = folder
        self._watch = watch
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, planned: PlannedRun) -> None:
        """Start a worker process for one run, pass its records on, and wait until it ends.

        The result is read from the run's folder and passed to the watch. After `stop` nothing is
        started, and the failure of a stopped worker is ignored.

        Raises:
            FedquiltError: The worker failed.
            TrainingError: The worker ended without a summary.
        """
        path = self._folder / planned.folder
        request = json.dumps({"planned": asdict(planned), "path": str(path)})
        with self._lock:
            if self._is_stopped:
                return
            process = subprocess.Popen(
                [sys.executable, "-m", "fedquilt.studies.workers"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                env=_environment(),
                # ctrl-C reaches the parent alone, which stops its workers in order.
                start_new_session=True,
            )
            self._running.add(process)
        conversation = _Conversation(process, planned, self._watch)
        try:
            conversation.hold(request)
        finally:
            with self._lock:
                self._running.discard(process)
        if self._is_stopped:
            return
        conversation.check()
        result = finished(planned, path)
        if result is None:
            raise TrainingError(f"{planned.title}: its process ended without a summary in {path}.")
        self._watch.end(planned, result)

    def stop(self) -> None:
        """Ask all workers to save their states and to end. No further worker begins.

        Workers that have not ended after `STOP_SECONDS` are killed.
        """
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(STOP_SECONDS)
            # KeyboardInterrupt: ctrl-C was pressed again. Do not wait any longer.
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                process.kill()


def _environment() -> dict[str, str]:
    """Return the environment of a worker: that of this process, with this package in PYTHONPATH.

    Unless the user set OMP_WAIT_POLICY, waiting threads do not spin, because processes share cores.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    defaults = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**defaults, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


class _Conversation:
    """Parent's side of a worker, which sends the request, passes records on and keeps errors."""

    def __init__(self, process: subprocess.Popen[str], planned: PlannedRun, watch: Watch) -> None:
        self._process = process
        self._planned = planned
        self._watch = watch
        self._after: Callable[[Record], None] = lambda record: None
        self._error: dict[str, Any] | None = None
        self._lines: deque[str] = deque(maxlen=MAX_ERROR_LINES)  # Of standard error.
        # Output is kept apart from standard error, because two pipes have no common order.
        self._printed: deque[str] = deque(maxlen=MAX_ERROR_LINES)

    def hold(self, request: str) -> None:
        """Send the request, and read the output of the worker until it ends.

        Records are passed to the watch, and errors are kept for `check`. If a record cannot be
        passed on, standard input closes on the way out, which ends the worker.

        Args:
            request: The planned run and its folder as one line of JSON.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=self._lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        try:
            with suppress(BrokenPipeError):  # The worker has ended. Its status is checked later.
                process.stdin.write(request + "\n")
                process.stdin.flush()
            for line in process.stdout:
                self._take(line)
        finally:
            with suppress(BrokenPipeError):  # The buffer holds unsent text.
                process.stdin.close()
            process.stdout.close()
            process.wait()
            reader.join()
            process.stderr.close()

    def _take(self, line: str) -> None:
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        # Text may be printed before the worker redirects its output.
        if not isinstance(message, dict):
            self._printed.append(line)
        elif "display" in message:
            self._after = self._watch.begin(self._planned, Display(**message["display"]))
        elif "error" in message:
            self._error = message["error"]
        elif "record" in message:
            self._after(Record.from_dict(message["record"]))

    def check(self) -> None:
        """Raise an error if the worker, which has ended, failed. It names the run.

        An error that the worker sent is raised again with its type and notes. Else a signal or an
        exit status other than 0 is a `TrainingError`.
        """
        status = self._process.returncode
        title = self._planned.title
        if self._error is not None:
            kind: type[FedquiltError] = getattr(errors, self._error["kind"], TrainingError)
            failure = kind(f"{title}: {self._error['text']}")
            for note in self._error["notes"]:
                failure.add_note(note)
            raise failure
        if status < 0:
            name = signal.Signals(-status).name
            raise TrainingError(
                f"{title}: its process was ended by {name}. Too little memory is the usual "
                "reason; fewer jobs need less. The same command again continues the study."
            )
        if status:
            lines = "".join(self._lines or self._printed).strip().splitlines() or [
                "it wrote nothing to standard error"
            ]
            raise TrainingError(f"{title}: its process ended with status {status}: {lines[-1]}")


class _Messenger:
    """A `Watch` that passes progress on to the parent, as lines of JSON."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        self._send(display=asdict(display))
        return lambda record: self._send(record=record.to_dict())

    def end(self, planned: PlannedRun, result: Result) -> None:
        """Send nothing, because the parent sees the end of this process."""

    def fail(self, error: FedquiltError) -> None:
        """Send the error that ends this process, so that the parent can raise it again.

        The name of its class, its text and its notes are sent.
        """
        notes = list(getattr(error, "__notes__", ()))
        self._send(error={"kind": type(error).__name__, "text": str(error), "notes": notes})

    def _send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out)


def main() -> int:
    """Execute the planned run in the first line of standard input, and return the exit status.

    0: the run is finished. 1: a `FedquiltError` was sent to the parent. 130: the run was
    interrupted.
    """
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # A user's module may print.
    # SIGTERM stops the process like ctrl-C, with a checkpoint.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    messenger = _Messenger(out)
    try:
        request = json.loads(sys.stdin.readline())
        threading.Thread(target=_stop_with_parent, args=(sys.stdin.fileno(),), daemon=True).start()
        perform(PlannedRun(**request["planned"]), Path(request["path"]), Grounds(), messenger)
    except FedquiltError as error:
        messenger.fail(error)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def _stop_with_parent(stdin: int) -> None:
    """Interrupt this process when standard input closes, because then its parent is gone.

    The descriptor is read and not the file object, because a waiting thread would hold the lock of
    the file object when the interpreter ends. A user's code may catch the interruption. The process
    then ends after `STOP_SECONDS` without a new checkpoint. Earlier checkpoints stay whole.

    Args:
        stdin: Descriptor of standard input.
    """
    while os.read(stdin, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(STOP_SECONDS)
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
