"""Method, link and task as plain values, from which a device rebuilds them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedquilt.config.resolve import resolved
from fedquilt.config.writing import write
from fedquilt.methods import Method
from fedquilt.round.federation import Federation
from fedquilt.round.link import PERFECT, Link
from fedquilt.tasks import Classification, Task


@dataclass(frozen=True)
class Terms:
    """Method, link and task of a federation, which a request carries as settings."""

    method: Method
    link: Link = PERFECT
    task: Task = Classification()

    @staticmethod
    def of(federation: Federation) -> dict[str, Any]:
        """Return the plain values of a federation's method, link and task."""
        terms = Terms(federation.method, federation.link, federation.world.task)
        plain: dict[str, Any] = write(terms)
        return plain

    @staticmethod
    def read(plain: Mapping[str, Any]) -> Terms:
        """Return method, link and task from plain values.

        Raises:
            ConfigError: It lists all problems of the values.
        """
        return resolved(Terms, dict(plain), {}, "the request")
