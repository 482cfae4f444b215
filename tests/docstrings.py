"""Findings about the docstrings of the package, for tests/unit/test_docstrings.py.

`python tests/docstrings.py [PREFIX]` prints the findings of all modules that begin with the prefix,
for example `fedquilt.family`.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import fedquilt as fq

PACKAGE = Path(fq.__file__).parent
# Namespaces below `fedquilt`.
NAMESPACES = (
    "attacks",
    "data",
    "errors",
    "fleets",
    "links",
    "methods",
    "methods.api",
    "models",
    "optimizers",
    "schedules",
    "tasks",
)
# Entry points whose docstring has an example, as paths from `fedquilt`.
ENTRY_POINTS = (
    "trace",
    "run",
    "Run.deploy",
    "Run.export",
    "Family.fit",
    "Fleet",
    "data.Pool",
    "methods.Method",
    "Link",
    "Budget",
)
# A docstring begins with a verb or a noun phrase, and with none of these words.
FORBIDDEN_OPENING = re.compile(
    r"""(what|who|whose|whom|which|whether|how|where|when|why|of|those|these|this|that|as|if|so|than
    |else|otherwise|because|although|while|until|on|in|at|by|with|within|without|from|for|to|into
    |and|or|but|not|it|they|its|their|there|here)\b(?!-)""",
    re.IGNORECASE | re.VERBOSE,
)
MAX_IN_PROSE = 2  # Parameters of a function that its prose may explain, instead of a list.
SECTION = re.compile(r"^(Args|Arguments|Attributes|Parameters):\s*$")
ENTRY = re.compile(r"^(\s*)(`?\*{0,2}\w+`?(?:,\s*`?\*{0,2}\w+`?)*)\s*(?:\([^)]*\))?:\s+\S")
MARKERS = re.compile(r"^#\s*(noqa|type:|pragma|fmt:|mypy:|pyright:)")


class Finding(NamedTuple):
    """One problem with a docstring, and the module that it is in."""

    module: str
    owner: str  # Function or class, as a path inside the module.
    problem: str

    def __str__(self) -> str:
        return f"{self.module}.{self.owner}: {self.problem}".replace(".: ", ": ")


def public_names(module: ModuleType) -> list[str]:
    """Return the names of `__all__`. Without it, return the public names a module defines."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def public_objects() -> list[Any]:
    """Return the public classes and functions, and the bases of the classes, each once."""
    modules = [fq, *(attrgetter(path)(fq) for path in NAMESPACES)]
    objects: dict[tuple[str, str], Any] = {}
    for module in modules:
        for name in public_names(module):
            for value in _with_bases(getattr(module, name)):
                objects.setdefault((value.__module__, value.__qualname__), value)
    return [objects[key] for key in sorted(objects)]


def _with_bases(value: Any) -> list[Any]:
    if inspect.isclass(value):
        return [base for base in value.__mro__ if _is_own(base)]
    function = _plain(value)
    return [function] if function is not None and _is_own(function) else []


def _plain(value: Any) -> FunctionType | None:
    """Return the function inside a class method, a cached function or another wrapper, if any."""
    value = getattr(value, "__func__", value)
    value = inspect.unwrap(value) if callable(value) else value
    return value if inspect.isfunction(value) else None


def _is_own(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module == "fedquilt" or module.startswith("fedquilt.")


def parameter_findings(objects: Iterable[Any]) -> Iterator[Finding]:
    """Yield the parameters and fields that nothing explains."""
    for value in objects:
        if not inspect.isclass(value):
            yield from _function_findings(value, value.__qualname__, (), value.__doc__)
            continue
        yield from _field_findings(value)
        for name, attribute in vars(value).items():
            function = _plain(attribute)
            if function is None or isinstance(attribute, property) or not _is_written(function):
                continue
            if name == "__init__" or name == "__call__":
                # Cleaned one by one: a joined text would keep the indentation of the first.
                documents = (value.__doc__, function.__doc__)
                text = "\n\n".join(inspect.cleandoc(document or "") for document in documents)
            elif name.startswith("_"):
                continue
            else:
                text = function.__doc__ or ""
            yield from _function_findings(
                function, f"{value.__qualname__}.{name}", _known(value, name), text
            )


def _is_written(function: FunctionType) -> bool:
    """Return True if a function is in our source, not generated by `dataclass` or `Protocol`."""
    return _is_own(function) and Path(function.__code__.co_filename).is_file()


def _known(owner: type, name: str) -> Iterable[str] | None:
    """Return the parameters that a base class or protocol has in a method of the same name.

    None means that a package of others defines the method, which then explains it.
    """
    known: set[str] = set()
    for base in (*owner.__mro__[1:], *_protocols_of(owner)):
        attribute = vars(base).get(name)
        if attribute is None or base is object:
            continue
        if not _is_own(base):
            return None if name != "__init__" else known
        function = _plain(attribute)
        if function is not None:
            known |= set(inspect.signature(function).parameters)
        if name == "__init__" and dataclasses.is_dataclass(base):
            known |= {field.name for field in dataclasses.fields(base)}
    return known


def _protocols_of(owner: type) -> list[type]:
    """Return the protocols of a class's own package that it implements without inheriting."""
    package = ".".join(owner.__module__.split(".")[:2])
    return [
        protocol
        for protocol in _protocols()
        if f"{protocol.__module__}.".startswith(f"{package}.")
        and protocol is not owner
        and all(hasattr(owner, name) for name in _methods_of(protocol))
    ]


@cache
def _protocols() -> list[type]:
    modules = {importlib.import_module(value.__module__) for value in public_objects()}
    return [
        value
        for module in sorted(modules, key=lambda module: module.__name__)
        for value in vars(module).values()
        if getattr(value, "_is_protocol", False) and _is_own(value)
    ]


def _methods_of(protocol: type) -> list[str]:
    return [
        name
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and (name == "__call__" or not name.startswith("_"))
    ]


def _function_findings(
    function: FunctionType, owner: str, known: Iterable[str] | None, text: str | None
) -> Iterator[Finding]:
    if known is None:
        return
    names = [
        name
        for name in inspect.signature(function).parameters
        if name not in ("self", "cls") and not name.startswith("_")
    ]
    text = inspect.cleandoc(text or "")
    entries = entries_of(text)
    missing = [name for name in names if name not in entries and name not in known]
    if len(names) <= MAX_IN_PROSE:
        missing = [name for name in missing if not names_in_prose(name, text)]
    if missing:
        yield Finding(function.__module__, owner, f"does not explain {', '.join(missing)}")


def _field_findings(owner: type) -> Iterator[Finding]:
    names = own_fields(owner)
    entries = entries_of(inspect.cleandoc(owner.__doc__ or ""))
    commented = commented_fields(owner) if names else set()
    missing = [name for name in names if name not in entries and name not in commented]
    if missing:
        yield Finding(
            owner.__module__, owner.__qualname__, f"does not explain the field {', '.join(missing)}"
        )


def own_fields(owner: type) -> list[str]:
    """Return the public fields of a dataclass or named tuple that no base class has."""
    if dataclasses.is_dataclass(owner):
        settable = {field.name for field in dataclasses.fields(owner) if field.init}
    else:
        settable = set(getattr(owner, "_fields", ()))
    inherited = {
        name
        for base in owner.__mro__[1:]
        if _is_own(base)
        for name in inspect.get_annotations(base)
    }
    return [
        name
        for name in inspect.get_annotations(owner)
        if name in settable and name not in inherited and not name.startswith("_")
    ]


def entries_of(text: str) -> set[str]:
    """Return the names that the `Args:` and `Attributes:` lists of a docstring explain."""
    names: set[str] = set()
    inside = False
    indent: int | None = None
    for line in text.splitlines():
        if SECTION.match(line.strip()) and not line.startswith(" "):
            inside, indent = True, None
        elif line.strip() and not line.startswith(" "):
            inside = False
        elif inside and (entry := ENTRY.match(line)):
            indent = len(entry[1]) if indent is None else indent
            if len(entry[1]) == indent:
                names |= {name.strip(" `*") for name in entry[2].split(",")}
    return names


def names_in_prose(name: str, text: str) -> bool:
    """Return True if a text has the name of a parameter, as it is or with spaces."""
    words = re.escape(name).replace("_", "[_ ]")
    return re.search(rf"\b{words}\b", text, re.IGNORECASE) is not None


def commented_fields(owner: type) -> set[str]:
    """Return the annotated names of a class that a comment or a string below explains."""
    file = inspect.getsourcefile(owner)
    assert file
    tree, comments, lines = _parsed(Path(file))
    node = _class_node(tree, owner.__qualname__)
    commented: set[str] = set()
    for number, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        span = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        above = statement.lineno - 1
        is_above = above in comments and lines[above - 1].lstrip().startswith("#")
        below = node.body[number + 1] if number + 1 < len(node.body) else None
        is_below = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if is_above or is_below or any(line in comments for line in span):
            commented.add(statement.target.id)
    return commented


@cache
def _parsed(file: Path) -> tuple[ast.Module, frozenset[int], list[str]]:
    """Return the tree of a file, the numbers of the lines with a comment, and its lines."""
    with tokenize.open(file) as stream:
        source = stream.read()
    tokens = tokenize.generate_tokens(iter(source.splitlines(keepends=True)).__next__)
    comments = frozenset(
        token.start[0]
        for token in tokens
        if token.type == tokenize.COMMENT and not MARKERS.match(token.string)
    )
    return ast.parse(source), comments, source.splitlines()


def _class_node(tree: ast.Module, path: str) -> ast.ClassDef:
    body: list[ast.stmt] = tree.body
    node: ast.AST = tree
    for name in path.replace("<locals>.", "").split("."):
        (node,) = (
            child
            for child in body
            if isinstance(child, ast.ClassDef | ast.FunctionDef) and child.name == name
        )
        body = node.body
    assert isinstance(node, ast.ClassDef)
    return node


Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(package: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (module, owner, docstring) for each docstring below a folder."""
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        for owner, text in _docstrings_of(ast.parse(file.read_text()), ""):
            yield module, owner, text


def _docstrings_of(node: ast.AST, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Documented) and (text := ast.get_docstring(node)) is not None:
        yield path, text
    for child in ast.iter_child_nodes(node):
        name = getattr(child, "name", None) if isinstance(child, Documented) else None
        yield from _docstrings_of(child, f"{path}.{name}".lstrip(".") if name else path)


def opening_findings(package: Path) -> Iterator[Finding]:
    """Yield the docstrings that open with a question word or another word of that kind."""
    for module, owner, text in docstrings(package):
        if not text.strip() or FORBIDDEN_OPENING.match(text.strip()):
            yield Finding(module, owner, f"opens with {' '.join(text.split()[:4])!r}")


def entry_point(path: str) -> Callable[..., Any]:
    """Return the object at a path from `fedquilt`, for example `Run.deploy`."""
    value: Callable[..., Any] = attrgetter(path)(fq)
    return value


def example_findings() -> Iterator[Finding]:
    """Yield the entry points whose docstring has no example."""
    for path in ENTRY_POINTS:
        value = entry_point(path)
        if ">>>" not in (value.__doc__ or ""):
            yield Finding(value.__module__, value.__qualname__, "has no example (>>>)")


def examples_by_module(package: Path) -> dict[str, int]:
    """Return the number of examples in the docstrings of each module that has any."""
    numbers: Counter[str] = Counter()
    for module, _, text in docstrings(package):
        numbers[module] += len(re.findall(r"^ *>>> ", text, re.MULTILINE))
    return {module: number for module, number in sorted(numbers.items()) if number}


def all_findings() -> list[Finding]:
    """Return all findings, sorted by module."""
    findings = [
        *parameter_findings(public_objects()),
        *opening_findings(PACKAGE),
        *example_findings(),
    ]
    return sorted(findings)


if __name__ == "__main__":
    prefix = sys.argv[1] if len(sys.argv) > 1 else "fedquilt"
    selected = [finding for finding in all_findings() if finding.module.startswith(prefix)]
    print(*selected, f"{len(selected)} findings", sep="\n")
