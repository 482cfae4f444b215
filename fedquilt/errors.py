"""One tree of exceptions. Each message says what was asked, what was found, what would fit, and who asked.

FedquiltError
├── TraceError        a module whose axes cannot be found or cut
├── SubmodelError     a plan that is no list of sub-models, or positions that do not fit the family
├── BudgetError       a budget no member fits, or a plan or net that exceeds one
├── DataError         data of the wrong shape, or a client without any
├── TrainingError     local training failed: names client, round and stage
│   └── DivergenceError   a loss, a weight or a method's state that is no longer finite
├── RecordError       what a run leaves on disk could not be written, or not be read back
│   └── FormatError       contents of a file that contradict its format; readers add the name of the file
├── NotEnoughMemoryError  memory could not be allocated, outside of a client's training
├── ExportError       a model that cannot be written in a format, or answers otherwise there
└── ConfigError       a request that cannot be carried out: unknown names, impossible values
"""

from collections.abc import Mapping
from typing import Any


class FedquiltError(Exception):
    """The root: catch this to catch everything fedquilt raises on purpose.

    When a round of `fedquilt.run` raised it, `run` is the run, with the last good state.
    """

    run: Any = None


class TraceError(FedquiltError):
    """A module whose axes cannot be found or cut."""


class SubmodelError(FedquiltError):
    """A plan that is no list of sub-models, or a plan or payload whose positions do not fit the family."""


class BudgetError(FedquiltError):
    """A budget that no member of the family fits, or that a plan or a deployed net exceeds."""


class DataError(FedquiltError):
    """Data of the wrong shape, or a client without any."""


class TrainingError(FedquiltError):
    """Local training failed; the message names client, round and stage."""


class DivergenceError(TrainingError):
    """A loss, a weight or the state of a method is no longer finite, although the samples are."""


class RecordError(FedquiltError):
    """What a run leaves on disk could not be written, or not be read back; what was saved before is intact."""


class FormatError(RecordError):
    """Contents of a file contradict its format. The message goes on after "cannot be read: "."""


class NotEnoughMemoryError(FedquiltError):
    """Memory could not be allocated. In a client's training it is a TrainingError, which names the client."""


class ExportError(FedquiltError):
    """A model that cannot be written in a format, or answers otherwise there; nothing was written."""


class ConfigError(FedquiltError):
    """A request that cannot be carried out. Where fields of a dataclass are to blame, `fields` says of each why."""

    def __init__(self, message: str, fields: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.fields = dict(fields or {})


def first_line(error: Exception) -> str:
    """The first sentence of what an error says, or its kind where it says nothing."""
    told = str(error).split(". ")[0].splitlines()
    return told[0] if told else type(error).__name__
