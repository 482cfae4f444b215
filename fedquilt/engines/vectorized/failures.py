"""Errors of stacked clients.

Some errors occur only because clients are stacked. Their clients are then trained one by one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fedquilt.engines.vectorized.stack import Stack
from fedquilt.errors import FedquiltError, first_line
from fedquilt.errors.faults import is_out_of_memory
from fedquilt.round.client_checks import blamed
from fedquilt.terms import Arch


class UnstackableError(FedquiltError):
    """Error for a member with an operation that vmap cannot stack."""

    def __init__(self, arch: Arch, cause: Exception) -> None:
        super().__init__(first_line(cause))
        self.arch = arch


def fails_alone(error: Exception) -> bool:
    """Return True if an error of a stack would or should also occur with one client at a time.

    A module that draws its own random numbers would run one by one, but differently in every run.
    Nobody would notice, so its error is raised.
    """
    return (
        isinstance(error, FedquiltError)
        or is_out_of_memory(error)
        or "vmap: called random" in str(error)
    )


@contextmanager
def together(stack: Stack, clients: Sequence[int], stage: str) -> Iterator[None]:
    """Run a block for several stacked clients, and convert its errors.

    An error that would also occur with one client is raised with the name of the first client. Any
    other error tells the caller to train the clients one by one.

    Args:
        stack: Clients that train together.
        clients: Positions in the stack of the clients that run inside.
        stage: What they do, for messages.

    Raises:
        UnstackableError: Only the stack has failed.
    """
    try:
        yield
    except Exception as error:
        if len(clients) == 1 or fails_alone(error):
            with blamed(stack.jobs[clients[0]], stage):
                raise
        raise UnstackableError(stack.arch, error) from error
