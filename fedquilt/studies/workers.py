"""Runs of a study in processes of their own.

The parent writes one line of JSON, the planned run and its folder, to the standard input of a
worker. The worker writes lines of JSON, one per record, to its standard output. Standard input stays open
as long as the parent lives: when it closes, the worker saves its state and ends, so that no
process outlives a parent that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from fedquilt.errors import FedquiltError, TrainingError
from fedquilt.round import Record
from fedquilt.studies.execute import Display, Grounds, Watch, finished, perform
from fedquilt.studies.plan import PlannedRun
from fedquilt.studies.result import Result

_STOP_SECONDS = 60.0  # A worker that was told to stop saves its state; after this time it is killed.


def execute_in_processes(runs: Sequence[PlannedRun], folder: Path, jobs: int, watch: Watch) -> None:
    """Run all, `jobs` at a time. After a failure no further run begins, and those that run are finished.

    Raises:
        TrainingError: A worker failed. The message has what it wrote to standard error.
    """
    workers = _Workers(folder, watch)
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(workers.run, planned) for planned in runs]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in futures:
                if future not in done:
                    future.cancel()
            wait([future for future in futures if not future.cancelled()])
        except BaseException:
            for future in futures:
                future.cancel()
            workers.stop()
            raise
    for future in futures:
        if not future.cancelled():
            future.result()


class _Workers:
    """The processes that run at the moment."""

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder = folder
        self._watch = watch
        self._running: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()
        self._is_stopped = False

    def run(self, planned: PlannedRun) -> None:
        """Run one worker to its end."""
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
                text=True,
                env=_environment(),
                start_new_session=True,  # ctrl-C reaches the parent alone, which stops its workers in order.
            )
            self._running.add(process)
        try:
            errors = _serve(process, request, planned, self._watch)
        finally:
            with self._lock:
                self._running.discard(process)
        if self._is_stopped:
            return
        if process.returncode:
            lines = errors.strip().splitlines() or [f"it ended with status {process.returncode}"]
            raise TrainingError(f"{planned.title}: {lines[-1]}")
        result = finished(planned, path)
        if result is None:
            raise TrainingError(f"{planned.title}: its process ended without a summary in {path}.")
        self._watch.end(planned, result)

    def stop(self) -> None:
        """Ask all workers to save their states and to end."""
        with self._lock:
            self._is_stopped = True
            running = list(self._running)
        for process in running:
            process.terminate()
        for process in running:
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _environment() -> dict[str, str]:
    """Return the environment of a worker, in which this package can be imported.

    Threads of several processes wait without spinning, because they share the cores.
    """
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    usual = {"OMP_WAIT_POLICY": "PASSIVE"}
    return {**usual, **os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _serve(process: subprocess.Popen[str], request: str, planned: PlannedRun, watch: Watch) -> str:
    """Send a worker its request, pass its records on, and return what it wrote to standard error."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    reader.start()
    with process.stdin, process.stdout, process.stderr:
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            after: Callable[[Record], None] = lambda record: None  # noqa: E731
            for line in process.stdout:
                message = json.loads(line)
                if "display" in message:
                    after = watch.begin(planned, Display(**message["display"]))
                else:
                    after(Record.from_dict(message["record"]))
        except BrokenPipeError:  # It ended at once; its status says so.
            pass
        process.wait()
        reader.join()
    return "".join(errors)


class _Messenger:
    """A `Watch` that passes progress on to the parent, as lines of JSON."""

    def __init__(self, out: IO[str]) -> None:
        self._out = out

    def begin(self, planned: PlannedRun, display: Display) -> Callable[[Record], None]:
        self._send(display=asdict(display))
        return lambda record: self._send(record=record.to_dict())

    def end(self, planned: PlannedRun, result: Result) -> None:
        """The end of this process says it."""

    def _send(self, **message: Any) -> None:
        print(json.dumps(message), file=self._out)


def main() -> int:
    """Run what the first line of standard input asks for."""
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # A user's module may print.
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Stop as for ctrl-C: with a checkpoint.
    request = json.loads(sys.stdin.readline())
    planned = PlannedRun(**request["planned"])
    threading.Thread(target=_stop_with_parent, args=(sys.stdin,), daemon=True).start()

    try:
        perform(planned, Path(request["path"]), Grounds(), _Messenger(out))
    except FedquiltError as error:
        print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def _stop_with_parent(stdin: IO[str]) -> None:
    """Interrupt this process when standard input closes, because then its parent is gone.

    The descriptor is read and not the file object, whose lock a thread that waits would hold
    when the interpreter ends.
    """
    while os.read(stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())
