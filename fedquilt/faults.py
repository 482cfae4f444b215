"""What is said of errors that fedquilt did not raise itself: a lack of memory, and the line of the user's own code.

Nothing here imports torch, because the command line does without it until a request has been understood.
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
    "Less is needed with a smaller batch (method.local.batch_size), fewer clients at once (engine.memory), a smaller "
    "model or smaller shares. Another device may have more."
)
_ALLOCATION_FAILED = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "bad allocation",
)
_ASKED_BYTES = re.compile(r"you tried to allocate (\d+) bytes")  # as torch says it for a CPU
# Code in these folders is not the user's.
_LIBRARIES = tuple(
    dict.fromkeys(
        os.path.join(os.path.realpath(folder), "")
        for folder in (
            os.path.dirname(__file__),
            *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        )
    )
)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error says that memory could not be allocated, on the CPU or on a GPU."""
    if isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    ):
        return True
    if not isinstance(error, RuntimeError):
        return False
    is_torch = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return is_torch or any(text in str(error).lower() for text in _ALLOCATION_FAILED)


def memory_cause(error: BaseException) -> BaseException | None:
    """Return the lack of memory behind an error, which may be the error itself. None: there was enough."""
    return next((one for one in _chain(error) if is_out_of_memory(one)), None)


def memory_text(error: BaseException) -> str:
    """Return how much could not be allocated, as far as the error says it, and what would help."""
    told = str(error).strip().split("\n")[0].strip(" .")
    if asked := _ASKED_BYTES.search(told):
        told = f"An allocation of {size(int(asked[1]))} failed"
    return f"{told}. {MEMORY_HELP}" if told else MEMORY_HELP


@contextmanager
def enough_memory(stage: str) -> Iterator[None]:
    """Raise a lack of memory inside as a NotEnoughMemoryError that says what was done, and what would help.

    Args:
        stage: What is done inside, such as "tracing the model".
    """
    try:
        yield
    except (NotEnoughMemoryError, TrainingError):  # which say it already, and more
        raise
    except Exception as error:
        if cause := memory_cause(error):
            raise NotEnoughMemoryError(
                f"there was not enough memory while {stage}. {memory_text(cause)}"
            ) from error
        raise


def user_line(error: BaseException) -> str:
    """Return the innermost line of the user's own code that an error came through: `mine.py:12, in net`.

    It is an empty string if there is none. Code of libraries and of fedquilt is not the user's.
    """
    for one in _chain(error):
        frames = [
            frame for frame in traceback.extract_tb(one.__traceback__) if _is_users(frame.filename)
        ]
        if frames:
            file = Path(frames[-1].filename)
            shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            return f"{shown}:{frames[-1].lineno}, in {frames[-1].name}"
    return ""


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not os.path.realpath(file).startswith(_LIBRARIES)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
