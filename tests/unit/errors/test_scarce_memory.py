"""Lack of memory that appears as another problem: unloadable libraries, and lost errors."""

from __future__ import annotations

import pytest

from fedquilt.errors import NotEnoughMemoryError
from fedquilt.errors.faults import enough_memory, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        ImportError("_lsprof.cpython-311.so: failed to map segment from shared object"),
        ImportError("libgomp.so.1: cannot allocate memory in static TLS block"),
        SystemError("error return without exception set"),
        SystemError("<built-in function f> returned NULL without setting an exception"),
    ],
    ids=["segment", "tls", "error return", "null"],
)
def test_disguised_failures_of_allocations_are_recognised(error: Exception) -> None:
    """With an address space that is a few MB too small, all of these were seen."""
    assert is_out_of_memory(error)
    with pytest.raises(NotEnoughMemoryError), enough_memory("tracing the model"):
        raise error


@pytest.mark.parametrize(
    "error", [ImportError("No module named 'x'"), SystemError("bad argument to internal function")]
)
def test_other_errors_of_these_kinds_stay_as_they_are(error: Exception) -> None:
    assert not is_out_of_memory(error)
