"""Find classes and functions: by name in a table, as `file.py:NAME`, or as `package.module:NAME`.

The error for an unknown name has the nearest known one.
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
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.metadata import packages_distributions
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, TypeVar

from fedquilt.errors import ConfigError
from fedquilt.faults import user_line

T = TypeVar("T")


def find(table: Mapping[str, T], name: str, what: str) -> T | Any:
    """Return the entry of the table, or the class or function in a file or a module, that a name refers to.

    Args:
        table: Entries by name.
        name: Name of an entry, `file.py:NAME` or `package.module:NAME`.
        what: Kind of the entries in one word or two, for messages.
    """
    if is_file(name):
        return _from_file(name, what)
    if is_in_module(name):
        return _from_module(name, what)
    return known(table, name, what)


def known(table: Mapping[str, T], name: str, what: str) -> T:
    """Return the entry of a table. The error for an unknown name lists the known ones."""
    if name in table:
        return table[name]
    raise ConfigError(f"there is no {what} named {name!r}.{nearest(name, table)}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: the nearest known name, and all known names."""
    names = list(names)
    close = difflib.get_close_matches(name, names, n=1)
    separator = "; " if any("," in one for one in names) else ", "
    return (
        f" Did you mean {close[0]!r}?" if close else ""
    ) + f" Known: {separator.join(names) or 'none'}."


def said(error: BaseException) -> str:
    """Return the message of an error with its class and the user's line that it came through, if there is one.

    It reads `ValueError: on purpose (mine.py:12, in net)`.
    """
    line = user_line(error)
    return f"{type(error).__name__}: {error}{f' ({line})' if line else ''}"


# --- files of the user's own ------------------------------------------------------------------------------------


def is_file(name: str) -> bool:
    """Return True if a name means `file.py:NAME`, a class or function in a file."""
    return ".py:" in name or name.endswith(".py")


def split_file(name: str) -> tuple[str, str]:
    """Return the path and the NAME of `file.py:NAME`. Without a name it is an empty string."""
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, ":", "")
    return path, attribute


def is_in_module(name: str) -> bool:
    """Return True if a name means `package.module:NAME`, as entry points are written."""
    return not is_file(name) and _IN_MODULE.fullmatch(name) is not None


def is_reference(name: str) -> bool:
    """Return True if a name means a class or function in a file or a module, and not in a table."""
    return is_file(name) or is_in_module(name)


# At least one dot is needed before the colon, because `hub:mnist` is a data set and no module.
_IN_MODULE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+:[^\W\d]\w*(\.[^\W\d]\w*)*")


def name_of(kind: type) -> str:
    """Return a name that `find` resolves to a class that is in no table.

    It is `package.module:Class` for classes of installed packages, else `file.py:Class`.
    """
    try:
        file = Path(inspect.getfile(kind))
    except (TypeError, OSError) as error:  # made in an interactive session
        raise ConfigError(
            f"{kind.__qualname__} is in no file, so that no name stands for it."
        ) from error
    if "<locals>" in kind.__qualname__:
        raise ConfigError(
            f"{kind.__qualname__} in {file} is made inside a function, so that no name stands for it."
        )
    if _is_installed(kind.__module__):
        return f"{kind.__module__}:{kind.__qualname__}"
    return f"{file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}:{kind.__qualname__}"


def _is_installed(module: str) -> bool:
    """Return True if a module belongs to an installed package, so that every process can import it."""
    package, dot, _ = module.partition(".")
    return bool(dot) and (package == __package__ or package in _packages())


@cache  # It reads the metadata of all distributions.
def _packages() -> Mapping[str, list[str]]:
    return packages_distributions()


def module_files(module: str) -> list[Path | None]:
    """Return the files that importing a module runs, packages above it first. Nothing is imported.

    None stands for a module without a file, and for one that cannot be found inside a package that can. The list is
    empty if nothing has the first name, because nothing would be imported then.
    """
    first, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(first)
    except (
        ImportError,
        ValueError,
    ):  # ValueError: a module that was not imported as others are, such as __main__
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
    """Return the file of a module that is imported already, or that a spec describes."""
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


_OWN: list[ModuleType] = []


def _from_file(name: str, what: str) -> Any:
    path, attribute = split_file(name)
    if not attribute:
        raise ConfigError(
            f"the {what} {name!r} names a file and nothing in it. Write {path}:NAME, with the name of a class or "
            "function."
        )
    try:
        there = Path(path).is_file()
    except (OSError, ValueError):  # a name too long for a file, or with a NUL in it
        there = False
    if not there:
        raise ConfigError(
            f"the {what} {name!r} was asked for; there is no file {path!r} in {Path.cwd()}."
        )
    module = _read(Path(path).resolve())
    if callable(found := getattr(module, attribute, None)):
        return found
    own = {
        key: value
        for key, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
    }
    return known(own, attribute, f"class or function in {path}")


def _from_module(name: str, what: str) -> Any:
    path, _, attribute = name.partition(":")
    asked = f"the {what} {name!r} was asked for"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{asked}; there is no module {error.name!r}. Is its package installed?"
        ) from error
    except Exception as error:
        raise ConfigError(f"{asked}; importing {path} failed: {said(error)}") from error
    target: Any = module
    for part in attribute.split("."):
        target = getattr(target, part, None)
    if callable(target):
        return target
    names = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == path]
    raise ConfigError(f"{asked}; {path} has no such class or function.{nearest(attribute, names)}")


class _SourceLoader(SourceFileLoader):
    """Loader that always compiles the source.

    Bytecode in `__pycache__` may be that of other source. Code would run then that `fedquilt.trust` did not compare.
    """

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        code: CodeType = self.source_to_code(self.get_data(path), path)
        return code


@cache  # two parts of a run may be in one file
def _read(file: Path) -> ModuleType:
    # Files of one name in two folders are two modules: dataclasses and type hints look their module up by name.
    name = f"{file.stem}_{zlib.crc32(bytes(file)):08x}"
    spec = importlib.util.spec_from_file_location(name, file, loader=_SourceLoader(name, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours, as a script may
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"{file} could not be read: {said(error)}") from error
    finally:
        sys.path.pop(0)
    _OWN.append(module)
    return module
