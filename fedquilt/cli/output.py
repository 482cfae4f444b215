"""Standard output of a command: text for people, or JSON and tables for other programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


@contextmanager
def output(for_programs: bool) -> Iterator[tuple[Console, TextIO]]:
    """Yield the console for text, and the stream for results that other programs read.

    Args:
        for_programs: True: standard output is for one result alone. Text, and the output of a
            user's module, goes to standard error.
    """
    from fedquilt.cli.show import console_for

    stdout = sys.stdout
    with redirect_stdout(sys.stderr if for_programs else stdout):
        yield console_for(for_programs), stdout
