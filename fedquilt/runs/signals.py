"""Signals that arrive while a round is being recorded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
