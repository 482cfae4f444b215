"""Exceptions with which a check ends."""

from __future__ import annotations

from fedquilt.errors import FedquiltError
from fedquilt.names import said


class CheckError(Exception):
    """The method fails a check."""


class NotApplicableError(Exception):
    """A check does not apply to the method."""


def message_of(error: BaseException) -> str:
    """Return the message of an error. It also names the type of errors that are not fedquilt's."""
    return str(error) if isinstance(error, FedquiltError) else said(error)
