"""Handling of ctrl-C on the command line while modules are imported.

Extension modules, such as those of torch, clear errors that attribute look-ups raise. If a
KeyboardInterrupt is among them, the command would continue. Other modules turn it into an error of
their own. A command that is still importing has nothing to save, so that it is ended at once.
Everywhere else, ctrl-C raises a KeyboardInterrupt as usual.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

STATUS = 130  # Exit status after ctrl-C, the same as in shells
_IMPORTING = "<frozen importlib._bootstrap>"  # File name of the code that imports modules


def end_imports() -> None:
    """Install a handler that lets ctrl-C end the process while modules are imported.

    If ctrl-C is ignored or has another handler, nothing changes.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """End the process if modules are being imported, else raise a KeyboardInterrupt.

    Args:
        number: Number of the signal.
        frame: Stack frame that was interrupted.
    """
    if not _is_importing(frame):
        signal.default_int_handler(number, frame)
    sys.stdout.flush()
    os.write(sys.stderr.fileno(), b"Interrupted.\n")
    os._exit(STATUS)


def _is_importing(frame: FrameType | None) -> bool:
    """Return True if a stack frame or one of its callers is importing a module."""
    while frame is not None:
        if frame.f_code.co_filename == _IMPORTING:
            return True
        frame = frame.f_back
    return False
