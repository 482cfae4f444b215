"""Find classes and functions: by name in a table, as `file.py:NAME`, or as `package.module:NAME`.

The error for an unknown name suggests the nearest known one.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import packages_distributions
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from fedquilt.errors import ConfigError
from fedquilt.errors.faults import user_line

T = TypeVar("T")


def find(table: Mapping[str, T], name: str, noun: str) -> T | Any:
    """Return the object that a name refers to, in a table, a file or a module.

    A file or module is imported, so that its code runs.

    Args:
        table: Entries by name.
        name: Name of an entry, `file.py:NAME` or `package.module:NAME`.
        noun: Word for an entry in messages, such as "method".

    Raises:
        ConfigError: There is no such entry, file, module or object, or importing it fails.
    """
    if is_file(name):
        return _from_file(name, noun)
    if is_in_module(name):
        return _from_module(name, noun)
    return known(table, name, noun)


def known(table: Mapping[str, T], name: str, noun: str) -> T:
    """Return the entry of a table.

    Args:
        table: Entries by name.
        name: Name of an entry.
        noun: Word for an entry in messages, such as "method".

    Raises:
        ConfigError: The name is unknown. The message lists the known names.
    """
    if name in table:
        return table[name]
    raise ConfigError(f"there is no {noun} named {name!r}.{nearest(name, table)}")


def registered(table: Mapping[str, type], value: object) -> str:
    """Return the name by which a table lists the class of a value.

    Base classes do not count. If the table does not list the class, its `__name__` is returned.
    """
    return next((name for name, kind in table.items() if kind is type(value)), type(value).__name__)


# Old names of settings, engines and norm policies, with their present names.
RENAMED = {
    "available": "availability",
    "checkpointing": "checkpoint",
    "decay": "weight_decay",
    "grey": "gray",
    "local": "per_client",
    "local-all": "per_client-all",
    "memories": "client_state_memory",
    "memory_limit": "client_state_memory",
    "normalise": "normalize",
    "optimiser": "optimizer",
    "sample": "cohort",
    "server": "server_optimizer",
    "size": "step_size",
    "tracking": "trackers",
    "vectorised": "vectorized",
}


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error message about an unknown name.

    It has the new name or the nearest one, and all known names.

    Args:
        name: Name that is not known.
        names: Known names. A name of `RENAMED` counts only if its new name is among them.
    """
    names = list(names)
    if RENAMED.get(name) in names:
        return f" It is called {RENAMED[name]!r} now. Known: {', '.join(names)}."
    close = difflib.get_close_matches(name, names, n=1)
    separator = "; " if any("," in known_name for known_name in names) else ", "
    return (
        f" Did you mean {close[0]!r}?" if close else ""
    ) + f" Known: {separator.join(names) or 'none'}."


def said(error: BaseException) -> str:
    """Return an error's class and message, and the line of the user's code that it came through.

    An example is `ValueError: on purpose (mine.py:12, in net)`.
    """
    line = user_line(error)
    return f"{type(error).__name__}: {error}{f' ({line})' if line else ''}"


# --- files of the user's own --------------------------------------------------------------------


def is_file(name: str) -> bool:
    """Return True if a name means `file.py:NAME`, or `file.py` without a NAME.

    The file need not exist.
    """
    return ".py:" in name or name.endswith(".py")


def split_file(name: str) -> tuple[str, str]:
    """Return the path and the NAME of `file.py:NAME`. NAME is empty if it is missing."""
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, ":", "")
    return path, attribute


def is_in_module(name: str) -> bool:
    """Return True if a name means `package.module:NAME`, as entry points are written."""
    return not is_file(name) and _IN_MODULE.fullmatch(name) is not None


def is_reference(name: str) -> bool:
    """Return True if a name refers to code: `file.py`, `file.py:NAME` or `package.module:NAME`.

    Other names are keys of a table of known names, such as `fedavg`, or data such as `hub:mnist`.
    """
    return is_file(name) or is_in_module(name)


# At least one dot is needed before the colon, because `hub:mnist` is a data set, not a module.
_IN_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+:[^\W\d]\w*(\.[^\W\d]\w*)*")


def name_of(code: Callable[..., Any]) -> str:
    """Return a name that `find` resolves to a class or function that is in no table.

    It is `package.module:NAME` for code of installed packages, else `file.py:NAME`. A function may
    have a decorator that uses `functools.wraps`.

    Raises:
        ConfigError: The object is in no file, has no name, is defined inside a function, or another
            object has its name.
    """
    name: str = getattr(code, "__qualname__", "")
    if not name:
        raise ConfigError(
            f"an object of the class {type(code).__name__} has no name by which it can be found."
        )
    module = sys.modules.get(code.__module__)
    path = getattr(module, "__file__", None)
    if path is None:  # made in an interactive session
        raise ConfigError(
            f"{name} is in no file, so that it cannot be found by a name. Put it into one."
        )
    file = Path(path)
    if "<lambda>" in name:
        raise ConfigError(
            f"the lambda in {_place(code, file)} has no name. Write it as a function at the top "
            "level of the file, or as functools.partial of one."
        )
    if "<locals>" in name:
        raise ConfigError(
            f"{name} in {file} is made inside a function, so that it cannot be found by a name. "
            "Put it at the top level of the file."
        )
    if inspect.unwrap(_attribute(module, name)) != inspect.unwrap(code):
        raise ConfigError(f"{name} is no longer the name of this object in {file}.")
    if _is_installed(code.__module__):
        return f"{code.__module__}:{name}"
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{name}"


def _place(code: Any, file: Path) -> str:
    """Return the name of a function's file, and the line it starts at if known, for a message."""
    compiled = getattr(code, "__code__", None)
    return f"{file.name}, line {compiled.co_firstlineno}" if compiled else file.name


def _attribute(target: Any, name: str) -> Any:
    """Return the object of a dotted name in a module or class, or None if there is none."""
    for part in name.split("."):
        target = getattr(target, part, None)
    return target


def _is_installed(module: str) -> bool:
    """Return True if a module is in an installed package, which every process can import.

    `module` is a dotted name. It is False for a module that is not inside a package.
    """
    package, dot, _ = module.partition(".")
    return bool(dot) and (package == __package__ or package in _packages())


@cache  # It reads the metadata of all distributions.
def _packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def module_files(module: str) -> list[Path | None]:
    """Return the files that importing a module runs, parent packages first. Nothing is imported.

    An entry is None for a module without a file, or one that is missing in its package. The list is
    empty if the top-level package is missing, because nothing would be imported then.
    """
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (ImportError, ValueError):  # ValueError: a module without a spec, such as __main__
        spec = None
    if spec is None and first not in sys.modules:
        return []
    name, files = first, [_file_of(first, spec)]
    for part in inner:
        name = f"{name}.{part}"
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(name, list(folders)) if folders else None
        files.append(_file_of(name, spec))
    return files


def _file_of(name: str, spec: ModuleSpec | None) -> Path | None:
    """Return the file of a module, or None if it has none. Nothing is imported.

    Args:
        name: Dotted name of the module. If it is imported already, that module's file counts.
        spec: Result of searching for the module. None: it was not found.
    """
    if name in sys.modules:
        origin = getattr(sys.modules[name], "__file__", None)
    else:
        origin = spec.origin if spec and spec.has_location else None
    return Path(origin) if origin else None


def own_modules() -> list[ModuleType]:
    """Return the modules of users' files, and those that they imported from the same folders.

    Other processes cannot import them by name.
    """
    folders = {os.path.dirname(str(module.__file__)) for module in _OWN}
    modules = list(sys.modules.values()) if folders else []
    return [
        module
        for module in modules
        if os.path.dirname(getattr(module, "__file__", None) or "") in folders
    ]


_OWN: list[ModuleType] = []  # Modules of users' files that were imported


def _from_file(name: str, noun: str) -> Any:
    """Return the class or function that `file.py:NAME` refers to. The file is imported.

    Args:
        name: Path from the current folder, and NAME, which may have dots.
        noun: Word for the object in messages, such as "method".

    Raises:
        ConfigError: NAME or the file is missing, the file fails, or it has no such object.
    """
    path, attribute = split_file(name)
    if not attribute:
        raise ConfigError(
            f"the {noun} {name!r} names a file and nothing in it. Write {path}:NAME, with the name "
            "of a class or function."
        )
    try:
        exists = Path(path).is_file()
    except (OSError, ValueError):  # The name is too long, or has a NUL in it.
        exists = False
    if not exists:
        raise ConfigError(
            f"the {noun} {name!r} was asked for; there is no file {path!r} in {Path.cwd()}."
        )
    module = _read(Path(path).resolve())
    if callable(target := _attribute(module, attribute)):
        return target
    definitions = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    return known(definitions, attribute, f"class or function in {path}")


def _from_module(name: str, noun: str) -> Any:
    """Return the class or function that `package.module:NAME` refers to. The module is imported.

    Args:
        name: Dotted name of the module, and NAME, which may have dots.
        noun: Word for the object in messages, such as "method".

    Raises:
        ConfigError: The module is missing or fails, or it has no such object.
    """
    path, _, attribute = name.partition(":")
    request = f"the {noun} {name!r} was asked for"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{request}; there is no module {error.name!r}. Is its package installed?"
        ) from error
    except Exception as error:
        raise ConfigError(f"{request}; importing {path} failed: {said(error)}") from error
    if callable(target := _attribute(module, attribute)):
        return target
    names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == path]
    raise ConfigError(
        f"{request}; {path} has no such class or function.{nearest(attribute, names)}"
    )


class _SourceLoader(SourceFileLoader):
    """Loader that always compiles the source.

    Bytecode in `__pycache__` may come from other source. It would run without having been compared
    by `fedquilt.runs.trust`.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


@cache  # Two parts of a run may be in one file.
def _read(file: Path) -> ModuleType:
    """Import a file by its absolute path, and return its module. A file is imported once.

    While it is imported, its folder is first on the search path. The module is added to
    `sys.modules` under a name of its own, and to `_OWN`.

    Raises:
        ConfigError: The code of the file fails.
    """
    # Files with the same name in two folders need different module names, because dataclasses and
    # type hints look up their module by name.
    name = f"{file.stem}_{zlib.crc32(bytes(file)):08x}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_SourceLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))  # The file may import its neighbours.
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} could not be read: {said(error)}") from error
    finally:
        sys.path.pop(0)
    _OWN.append(module)
    return module
