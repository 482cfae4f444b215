"""From names and files to the parts of a run: `heterofl`, `tiny_resnet`, `mine.py:factory`.

The dataclasses are the configuration; there is no second schema. TOML and `--set` will be read here, by their fields.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.names import known

T = TypeVar("T")


def is_file(name: str) -> bool:
    """Whether a name means `file.py:factory`."""
    return ".py:" in name or name.endswith(".py")


def find(table: Mapping[str, T], name: str, what: str) -> T | Any:
    """What a name stands for: an entry of the table, or the factory in a file of the user's own."""
    return _from_file(name, what) if is_file(name) else known(table, name, what)


def make(name: str, factory: Callable[..., Any], kind: type[T], offers: Mapping[str, Any]) -> T:
    """Call a factory with those of the offered options that it takes; what it makes must be of a kind."""
    try:
        takes = inspect.signature(factory).parameters
        made = factory(**{option: value for option, value in offers.items() if option in takes})
    except FedquiltError:
        raise
    except Exception as error:
        raise ConfigError(f"{name} was called and failed: {_said(error)}") from error
    if not isinstance(made, kind):
        raise ConfigError(f"{name} was called for a {kind.__name__}; it returned {_a(type(made).__name__)}.")
    return made


def _from_file(name: str, what: str) -> Any:
    path, _, factory = name.rpartition(":") if ".py:" in name else (name, ":", "")
    if not factory:
        raise ConfigError(f"the {what} {name!r} names a file and nothing in it. Write {path}:factory.")
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"the {what} {name!r} was asked for; there is no file {path} in {Path.cwd()}.")
    module = _read(file)
    if callable(found := getattr(module, factory, None)):
        return found
    own = {key: value for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__}
    return known(own, factory, f"factory in {path}")


@cache  # two parts of a run may be in one file
def _read(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"fedquilt_own_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    sys.path.insert(0, str(file.parent.resolve()))  # the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} could not be read: {_said(error)}") from error
    finally:
        sys.path.pop(0)
    return module


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "AEIOUaeiou" else f"a {noun}"


# --- what can be set --------------------------------------------------------------------------------------------


def options(kind: Callable[..., Any]) -> dict[str, dict[str, Any]]:
    """What a dataclass or a factory takes, as `list --json` shows it: `options` (types) and `defaults` by name."""
    if is_dataclass(kind):
        described = {field.name: (field.type, field.default) for field in fields(kind)}
    else:
        parameters = inspect.signature(kind).parameters.values()
        described = {p.name: (p.annotation, MISSING if p.default is p.empty else p.default) for p in parameters}
    return {
        "options": {name: str(kind) for name, (kind, _) in described.items()},
        "defaults": {name: plain(value, kind) for name, (kind, value) in described.items() if value is not MISSING},
    }


def plain(value: Any, kind: Any = None) -> Any:
    """A setting as JSON has it; a value whose field takes several kinds says which it is."""
    if is_dataclass(value):
        name = {"name": type(value).__name__.lower()} if "|" in str(kind) else {}
        return name | {field.name: plain(getattr(value, field.name), field.type) for field in fields(value)}
    return list(value) if isinstance(value, tuple) else value
