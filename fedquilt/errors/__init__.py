"""Exceptions of fedquilt, which form one tree.

Each message states what was asked, what was found, what would work, and who asked.

FedquiltError
├── TraceError        a module whose axes cannot be found or cut
├── SubmodelError     a plan that is no list of sub-models, or positions that do not fit the family
├── BudgetError       a budget that no member fits, or a plan or net that exceeds a budget
├── DataError         data of the wrong shape, or a client without any
├── TrainingError     local training failed: names client, round and stage
│   └── DivergenceError   a loss, a weight or a method's state that is no longer finite
├── RecordError       files of a run that could not be written or read back
│   └── FormatError       contents of a file that contradict its format; readers add the file name
├── NotEnoughMemoryError  memory could not be allocated, outside of a client's training
├── ExportError       a model that cannot be written in a format, or has other outputs there
└── ConfigError       a request that cannot be carried out: unknown names, impossible values
"""

from collections.abc import Mapping
from typing import Any


class FedquiltError(Exception):
    """Base class of all errors that fedquilt raises on purpose.

    When a round of `fedquilt.run` raised it, `run` is the run, with the last good state.
    """

    run: Any = None


class TraceError(FedquiltError):
    """Error for a module whose axes cannot be found or cut."""


class SubmodelError(FedquiltError):
    """Error for a plan that is no list of sub-models, or for positions that do not fit the family.

    The positions may be those of a plan or of a payload.
    """


class BudgetError(FedquiltError):
    """Error for a budget that no member fits, or that a plan or a deployed net exceeds."""


class DataError(FedquiltError):
    """Error for data of the wrong shape, or for a client without any."""


class TrainingError(FedquiltError):
    """Error of local training. The message names client, round and stage."""


class DivergenceError(TrainingError):
    """Error for a loss, a weight or a method's state that is no longer finite.

    The samples themselves are finite.
    """


class RecordError(FedquiltError):
    """Error for files of a run that could not be written or read back.

    Files that were saved before are intact.
    """


class FormatError(RecordError):
    """Error for contents of a file that contradict its format.

    The message continues a sentence that begins with "cannot be read: ".
    """


class NotEnoughMemoryError(FedquiltError):
    """Error for memory that could not be allocated.

    In a client's training, a TrainingError is raised instead, because it names the client.
    """


class ExportError(FedquiltError):
    """Error for a model that cannot be written in a format, or that has other outputs there.

    No file was written.
    """


class ConfigError(FedquiltError):
    """Error for a request that cannot be carried out.

    Args:
        message: Text of the error.
        fields: Problem of each field of a dataclass, if fields are the cause.
    """

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


def first_line(error: Exception) -> str:
    """Return the first sentence of an error's message, up to a line break.

    Without a message it is the name of the error's class.
    """
    lines = str(error).split(". ")[0].splitlines()
    return lines[0] if lines else type(error).__name__
