"""The numbers that a module keeps in its attributes, and in configurations that they hold."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

_MACHINERY = set(vars(nn.Module()))  # Attributes of every module, such as hooks


def attributes(module: nn.Module) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield every number that a module keeps in attributes of its layers and their configurations.

    Yields:
        (path, container, key, value). The value is an int, a float, or a tuple or list of ints.
        Setting `container[key]` changes the attribute.
    """
    visited: set[int] = set()
    for layer_path, layer in module.named_modules():
        for name, attribute in list(vars(layer).items()):
            if name not in _MACHINERY:
                path = f"{layer_path}.{name}" if layer_path else name
                yield from _numbers(path, vars(layer), name, attribute, visited)


def _numbers(
    path: str, holder: Any, key: Any, value: Any, visited: set[int]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield the numbers in one attribute, and in configurations that it holds.

    The tuples are those of `attributes`.

    Args:
        path: Path of the attribute.
        holder: Container that has the value under `key`.
        key: Key or name of the attribute.
        value: Value of the attribute.
        visited: Ids of configurations whose numbers were yielded. New ones are added.
    """
    is_sizes = type(value) in (tuple, list) and all(type(item) is int for item in value)
    if is_sizes or type(value) in (int, float):
        yield path, holder, key, value
        return
    settings = _settings(value)
    if settings is not None and id(value) not in visited:
        visited.add(id(value))  # Layers may share it. Its first path counts.
        for name, item in list(settings.items()):
            yield from _numbers(f"{path}.{name}", settings, name, item, visited)


def _settings(value: Any) -> dict[str, Any] | None:
    """Return the entries of a configuration, or None if an object is none.

    A configuration is a dictionary with names as keys, or an object that only holds attributes. The
    result is the dictionary itself, so that writing into it changes the configuration.
    """
    if type(value) is dict:
        has_names = all(isinstance(key, str) and key.isidentifier() for key in value)
        return value if has_names else None
    if isinstance(value, (nn.Module, Tensor, type, types.ModuleType)) or callable(value):
        return None
    return vars(value) if hasattr(value, "__dict__") else None
