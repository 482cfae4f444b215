"""The script `fedquilt`: arguments, errors and exit status. `COMMANDS` lists all commands.

Exit status: 0 success, 1 a run or a check failed, 2 the request was wrong, 130 interrupted. Nothing
here imports torch before the arguments are parsed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tyro

# OpenMP threads that wait in a spinning loop take the cores from other processes, and then from
# each other. Beside another run, a run of one second took a minute. The variable is read when
# torch is imported, which happens later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fedquilt.cli.check import CheckRequest
from fedquilt.cli.clients import ClientsRequest
from fedquilt.cli.compare import CompareRequest
from fedquilt.cli.data import DataRequest
from fedquilt.cli.deployment import JoinCommand, KeysRequest, ServeCommand
from fedquilt.cli.export import ExportRequest
from fedquilt.cli.list import ListRequest
from fedquilt.cli.options import (
    refuse_repeated,
    refuse_spaces_in_grid,
)
from fedquilt.cli.probe import ProbeRequest
from fedquilt.cli.report import ReportRequest
from fedquilt.cli.reproduce import ReproduceRequest
from fedquilt.cli.run import RunRequest
from fedquilt.cli.supernet import SUPERNET_COMMANDS, SupernetRequest
from fedquilt.cli.watch import WatchRequest
from fedquilt.errors import (
    ConfigError,
    ExportError,
    FedquiltError,
    NotEnoughMemoryError,
    RecordError,
    SubmodelError,
    TrainingError,
)
from fedquilt.errors.faults import is_out_of_memory, memory_text, user_line
from fedquilt.version import __version__

COMMANDS: dict[str, Callable[..., Any]] = {
    "run": RunRequest,
    "compare": CompareRequest,
    "reproduce": ReproduceRequest,
    "report": ReportRequest,
    "export": ExportRequest,
    "watch": WatchRequest,
    "clients": ClientsRequest,
    "list": ListRequest,
    "data": DataRequest,
    "probe": ProbeRequest,
    "check": CheckRequest,
    "keys": KeysRequest,
    "serve": ServeCommand,
    "join": JoinCommand,
    "supernet": SupernetRequest,
}
# Commands of two words, such as `supernet train`.
GROUPS: dict[str, dict[str, Callable[..., Any]]] = {"supernet": SUPERNET_COMMANDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fedquilt` script, and return its exit status.

    It is 0 after success, 1 after a failure, 2 after a wrong request, and 130 after ctrl-C.

    Args:
        argv: Arguments without the name of the program. None: those of the process.
    """
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("FEDQUILT_DEBUG", "0") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if args == ["--version"]:
        print(f"fedquilt {__version__}")
        return 0
    commands, prog = COMMANDS, "fedquilt"
    description = (
        "Federated learning on unequal devices: each trains the piece of one model that fits it. "
    )
    description += "With --debug, any command shows the whole trace of an error."
    if args and args[0] in GROUPS:
        group = args.pop(0)
        commands = GROUPS[group]
        prog = f"fedquilt {group}"
        description = _first_line(COMMANDS[group])
    if args and args[0] in commands:
        try:
            refuse_repeated(commands[args[0]], args[1:])
            refuse_spaces_in_grid(args[1:])
        except ConfigError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
    request: Callable[[], int | None] = tyro.extras.subcommand_cli_from_dict(
        commands,
        prog=prog,
        description=description,
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with _terminated_like_interrupted():
            return request() or 0
    except KeyboardInterrupt as error:
        print(
            "\n".join([f"Interrupted. {error}".strip(), *getattr(error, "__notes__", ())]),
            file=sys.stderr,
        )
        return 130
    except BrokenPipeError:
        # The reader of our output has closed it. Redirect it, so that the last flush does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        status = _explain(error)
        if status is None and not debug:
            raise
        return status or 1


def _explain(error: Exception) -> int | None:
    """Print an error to standard error without its trace, and return the exit status.

    The status is 2 for a wrong request, and 1 for a failure during work. If the user's own code
    raised the error, its line is printed too. None: the error comes neither from fedquilt nor from
    the user's code, and nothing was printed.
    """
    notes = getattr(error, "__notes__", ())
    line = user_line(error)
    if isinstance(error, FedquiltError):
        message = f"{type(error).__name__}: {error}"
        failed = (TrainingError, SubmodelError, RecordError, ExportError, NotEnoughMemoryError)
        status = 1 if isinstance(error, failed) else 2
    elif is_out_of_memory(error):
        message = f"NotEnoughMemoryError: there was not enough memory. {memory_text(error)}"
        status = 1
    elif isinstance(error, OSError) and error.filename is not None:  # A file that the user named.
        message, status = f"{error.filename} cannot be used: {error.strerror}.", 2
    elif line:
        message, status = f"{type(error).__name__}: {error}", 1
    else:
        return None
    hints = []
    if line and line not in message:
        hints.append(f"It was raised in {line}.")
    if line:
        hints.append("--debug shows the whole trace.")
    print("\n".join([message, *notes, *hints]), file=sys.stderr)
    return status


def _first_line(command: Callable[..., Any]) -> str:
    return (command.__doc__ or "").splitlines()[0]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as ctrl-C in the block, so that a run leaves a checkpoint.

    Schedulers end jobs by SIGTERM. Outside of the main thread it has no effect.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    previous = signal.signal(
        signal.SIGTERM, handler if callable(handler) else signal.default_int_handler
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
