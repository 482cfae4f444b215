"""`check_method`: run all checks of a method, and return a finding for each."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fedquilt.conformance.case import Case
from fedquilt.conformance.checks import CHECKS
from fedquilt.conformance.failures import CheckError, NotApplicableError, message_of
from fedquilt.methods import Method

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    check: str  # Name of the check, a key of `CHECKS`
    status: Status  # Result. "skipped": the check does not apply to the method
    detail: str  # Sentence on the result, or the reason of a failure
    seconds: float  # Time that the check took

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as `fedquilt check --json` prints them."""
        return asdict(self)


def check_method(
    method: Method,
    checks: Sequence[str] = tuple(CHECKS),
    watch: Callable[[str], None] | None = None,
) -> list[Finding]:
    """Check a method on a small federation. It takes some seconds on one core.

    Clients train for one epoch with batches of 4 (`Method.shortened`), whatever the method's own
    local settings say, so that the checks are quick. Everything else is as the method has it.

    Args:
        method: An instance, with the settings that are to be checked.
        checks: Names of `CHECKS`.
        watch: Called with the name of every check before it begins.

    Returns:
        A finding for each check, in their order.
    """
    case = Case(method.shortened())
    findings = []
    with _quiet():
        for name in checks:
            if watch:
                watch(name)
            began = time.perf_counter()
            status, detail = _run_check(CHECKS[name], case)
            findings.append(Finding(name, status, detail, time.perf_counter() - began))
    return findings


def _run_check(check: Callable[[Case], str], case: Case) -> tuple[Status, str]:
    """Run a check, and return its status and a sentence on it. It never raises an Exception.

    Whatever a method raises counts as a failure, because it may be anybody's code.

    Args:
        check: A value of `CHECKS`.
        case: The small federation with the method.
    """
    try:
        return "passed", check(case)
    except NotApplicableError as reason:
        return "skipped", str(reason)
    except CheckError as reason:
        return "failed", str(reason)
    except Exception as error:
        return "failed", message_of(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress fedquilt's warnings inside the block. They are about the small federation only."""
    logger = logging.getLogger("fedquilt")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
