"""The numbers that a module keeps in its attributes, and in configurations that they hold."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_MACHINERY = set(vars(nn.Module()))  # Attributes of every module, such as hooks


def attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield every number that a module keeps, as (path, container, key in it, value)."""
    seen: set[int] = set()
    for path, layer in module.named_modules():
        for name, attribute in list(vars(layer).items()):
            if name not in _MACHINERY:
                yield from _numbers(
                    f"{path}.{name}" if path else name, vars(layer), name, attribute, seen
                )


def _numbers(
    path: str, holder: Any, key: Any, held: Any, seen: set[int]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the numbers in one attribute, and in configurations that it holds."""
    sizes = type(held) in (tuple, list) and all(type(item) is int for item in held)
    if sizes or type(held) in (int, float):
        yield path, holder, key, held
        return
    settings = _settings(held)
    if settings is not None and id(held) not in seen:
        seen.add(id(held))  # Layers may share it. Its first path counts.
        for name, item in list(settings.items()):
            yield from _numbers(f"{path}.{name}", settings, name, item, seen)


def _settings(held: Any) -> dict[str, Any] | None:
    """Return the entries of a configuration, or None if an object is none.

    A configuration is a dictionary with names as keys, or an object that only holds attributes.
    """
    if type(held) is dict:
        return held if all(isinstance(key, str) and key.isidentifier() for key in held) else None
    passive = not isinstance(held, (nn.Module, Tensor, type, types.ModuleType)) and not callable(
        held
    )
    return vars(held) if passive and hasattr(held, "__dict__") else None
