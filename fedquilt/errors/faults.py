"""Messages for errors that fedquilt did not raise itself.

They report a lack of memory, and the line of the user's code that failed. This module does not
import torch, because the command line imports torch only after it has validated a request.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedquilt.errors import NotEnoughMemoryError, TrainingError
from fedquilt.units import size

MEMORY_HELP = (
    "Less is needed with a smaller batch (method.local.batch_size), fewer clients at once "
    "(engine.memory), a smaller model or smaller shares. Another device may have more."
)
_ALLOCATION_FAILED = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
)
# Messages of oneDNN, which runs convolutions on a CPU, if it gets no memory. Longer ones mean
# something else.
_ONEDNN_FAILED = (
    "could not create a primitive",
    "could not execute a primitive",
    "could not create a memory object",
)
# Messages of the loader of shared libraries, and of CPython if an extension such as torch fails
# without a reason. All were seen in runs whose address space was a few MB too small.
_LOADING_FAILED = ("failed to map segment from shared object", "cannot allocate memory")
_REASON_LOST = ("error return without exception set", "returned null without setting an exception")
_ASKED_BYTES = re.compile(r"you tried to allocate (\d+) bytes")  # Text of torch's error on a CPU
# Code in these folders is not the user's.
_LIBRARIES = tuple(
    dict.fromkeys(
        os.path.join(os.path.realpath(folder), "")
        for folder in (
            os.path.dirname(os.path.dirname(__file__)),  # Folder of this package
            *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        )
    )
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error means that memory could not be allocated, on the CPU or on a GPU."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    if isinstance(error, (ImportError, SystemError)):
        texts = _LOADING_FAILED if isinstance(error, ImportError) else _REASON_LOST
        return any(text in str(error).lower() for text in texts)
    if not isinstance(error, RuntimeError):
        return False
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    message = str(error).lower()
    return (
        is_torch
        or message.strip() in _ONEDNN_FAILED
        or any(text in message for text in _ALLOCATION_FAILED)
    )


def memory_cause(error: BaseException) -> BaseException | None:
    """Return the allocation failure behind an error, which may be the error itself.

    The chain of causes is searched. None: memory was not the cause.
    """
    return next((cause for cause in _chain(error) if is_out_of_memory(cause)), None)


def memory_text(error: BaseException) -> str:
    """Return sentences on a failed allocation and a remedy, with its size if the error names it."""
    message = str(error).strip().split("\n")[0].strip(" .")
    if match := _ASKED_BYTES.search(message):
        message = f"An allocation of {size(int(match[1]))} failed"
    return f"{message[:1].upper()}{message[1:]}. {MEMORY_HELP}" if message else MEMORY_HELP


@contextmanager
def enough_memory(stage: str) -> Iterator[None]:
    """Raise an allocation failure inside as a NotEnoughMemoryError that names stage and remedy.

    Args:
        stage: Description of the code inside, such as "tracing the model".
    """
    try:
        yield
    except (NotEnoughMemoryError, TrainingError):  # Their messages already have this and more
        raise
    except Exception as error:
        if cause := memory_cause(error):
            raise NotEnoughMemoryError(
                f"there was not enough memory while {stage}. {memory_text(cause)}"
            ) from error
        raise


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error came through.

    An example is `mine.py:12, in net`. The text is empty if there is none. Code of libraries and of
    fedquilt is not the user's.
    """
    for cause in _chain(error):
        frames = [
            frame
            for frame in traceback.extract_tb(cause.__traceback__)
            if _is_users(frame.filename)
        ]
        if frames:
            file = Path(frames[-1].filename)
            shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            return f"{shown}:{frames[-1].lineno}, in {frames[-1].name}"
    return ""


def _is_users(file: str) -> bool:
    """Return True if a file is neither part of fedquilt nor of a library."""
    return not file.startswith("<") and not os.path.realpath(file).startswith(_LIBRARIES)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, then the error that caused it, and so on.

    The cause is that of `raise … from`, or the exception that was being handled.
    """
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
