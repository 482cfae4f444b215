"""Method, link and task as plain values, from which a device rebuilds them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import fedquilt.runs.registries  # noqa: F401  # Classes that settings select by name
from fedquilt.config.resolve import resolved
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.methods import Method
from fedquilt.names import is_reference
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
        """Return a federation's method, link and task as nested plain values, for `read`."""
        terms = Terms(federation.method, federation.link, federation.world.task)
        plain: dict[str, Any] = write(terms)
        return plain

    @staticmethod
    def read(plain: Mapping[str, Any], allowed: Collection[str] = ()) -> Terms:
        """Return method, link and task from plain values.

        Args:
            plain: Settings of a request.
            allowed: References to code, such as "mine.py:Mine", that the device's owner has named.
                Others are refused before they are imported.

        Raises:
            ConfigError: The values name other code, or have problems, which it lists.
        """
        if unknown := sorted({*references(plain)} - {*allowed}):
            raise ConfigError(
                f"the request names the code {unknown[0]!r}; the owner of this device has named "
                f"{', '.join(map(repr, allowed)) or 'no code'}. Code that a server names runs only "
                "if the owner has named the same."
            )
        return resolved(Terms, dict(plain), {}, "the request")


def references(plain: Any) -> Iterator[str]:
    """Yield all texts in nested plain values that refer to code, such as "mine.py:Mine".

    Values of tables are searched, and their keys are not.
    """
    if isinstance(plain, str):
        if is_reference(plain):
            yield plain
    elif isinstance(plain, Mapping):
        for value in plain.values():
            yield from references(value)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from references(value)
