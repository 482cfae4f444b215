"""Sphinx extension for the public surface of fedquilt.

- `.. public-names:: fedquilt.links` documents the public names of a namespace. An object that has
  several public names is documented under the first one, and the other pages link to it.
- Comments of dataclass fields, which the command line prints, become parameters of the class.
- Single backticks in docstrings link to a public name. A name that begins with `fedquilt.` or `fq.`
  and does not exist is a warning, and so is a type in a signature that does not exist.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.napoleon import Config, GoogleDocstring
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective, SphinxRole

import fedquilt
from fedquilt.config.listing import comments

logger = logging.getLogger(__name__)

# Namespaces in the order in which a name of an object is preferred.
NAMESPACES = (
    "fedquilt",
    "fedquilt.errors",
    "fedquilt.optimizers",
    "fedquilt.schedules",
    "fedquilt.links",
    "fedquilt.attacks",
    "fedquilt.data",
    "fedquilt.fleets",
    "fedquilt.tasks",
    "fedquilt.models",
    "fedquilt.methods",
    "fedquilt.methods.api",
)
DOTTED = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*")
HEADING = re.compile(r"[A-Z][A-Za-z ]*:")  # Of a list: Args:, Returns:, Raises:
GOOGLE = Config()
MAX_VALUE = 200  # Characters of a constant's value that are shown.
MAX_DEFAULT = 40  # Characters of a default that are shown, if it is an object.


class PublicNames(SphinxDirective):
    """Documents the public names of a namespace: classes, functions and constants."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return the nodes of all names of the namespace."""
        namespace = self.arguments[0]
        blocks, elsewhere = [], []
        for path in public_paths(namespace):
            home = homes().get(_key(find(path)), path)
            if home == path:
                blocks.append(_documentation(path))
            else:
                elsewhere.append(home)
        blocks.sort()
        text = "\n".join(block for _, block in blocks)
        if elsewhere:
            links = ", ".join(f":py:obj:`{home}`" for home in elsewhere)
            text += f"\n.. rubric:: Documented on other pages\n\n{links}\n"
        return self.parse_text_to_nodes(text)


def _documentation(path: str) -> tuple[int, str]:
    """Return the position of a kind of object on its page, and the text of its documentation."""
    value = find(path)
    if inspect.isclass(value):
        return 0, f".. autoclass:: {path}\n   :members:\n"
    if inspect.isroutine(value):
        return 1, f".. autofunction:: {path}\n"
    return 2, f".. py:data:: {path}\n\n   {_described(value)}\n"


def _described(value: Any) -> str:
    """Return the value of a constant in short."""
    if isinstance(value, dict):
        return "Known names: " + ", ".join(f"``{name}``" for name in value)
    shown = str(value) if _is_hint(value) else repr(value)
    shown = shown if len(shown) <= MAX_VALUE else f"{shown[:MAX_VALUE]}…"
    return f"Alias of ``{shown}``" if _is_hint(value) else f"Value: ``{shown}``"


def _is_hint(value: Any) -> bool:
    return type(value).__module__ in ("types", "typing", "collections.abc")


@cache
def public_paths(namespace: str) -> tuple[str, ...]:
    """Return the paths of a namespace's public names, without those of other namespaces."""
    module = find(namespace)
    if hasattr(module, "__all__"):
        names = list(module.__all__)
    else:
        names = [name for name, value in vars(module).items() if _is_defined(name, value, module)]
    paths: list[str] = []
    for name in names:
        path = f"{namespace}.{name}"
        if path in NAMESPACES or name == "__version__":
            continue
        value = getattr(module, name)
        paths += public_paths(path) if inspect.ismodule(value) else [path]
    return tuple(paths)


def _is_defined(name: str, value: Any, module: ModuleType) -> bool:
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


@cache
def homes() -> dict[Any, str]:
    """Return the path under which each class and function is documented, by the object's key."""
    paths: dict[Any, str] = {}
    for namespace in NAMESPACES:
        for path in public_paths(namespace):
            value = find(path)
            if inspect.isclass(value) or inspect.isroutine(value):
                paths.setdefault(_key(value), path)
    return paths


def _key(value: Any) -> Any:
    return getattr(value, "__module__", None), getattr(value, "__qualname__", id(value))


@cache
def documented_by_name() -> dict[str, str]:
    """Return the path of each documented object by its last name, where that is unique."""
    paths: dict[str, list[str]] = {}
    for path in homes().values():
        paths.setdefault(path.split(".")[-1], []).append(path)
    return {name: candidates[0] for name, candidates in paths.items() if len(candidates) == 1}


def find(path: str) -> Any:
    """Return the object at a path that begins with `fedquilt` or another importable module.

    Raises:
        LookupError: Nothing has this path.
    """
    first, *names = path.split(".")
    try:
        value = fedquilt if first in ("fedquilt", "fq") else importlib.import_module(first)
        done = value.__name__
        for name in names:
            if inspect.ismodule(value) and not hasattr(value, name):
                value = importlib.import_module(f"{done}.{name}")
            elif inspect.isclass(value) and name in _fields(value):
                return getattr(value, name, None)
            else:
                value = getattr(value, name)
            done = value.__name__ if inspect.ismodule(value) else f"{done}.{name}"
    except (AttributeError, ImportError) as error:
        raise LookupError(path) from error
    return value


def _fields(owner: type) -> set[str]:
    return {name for base in owner.__mro__ for name in inspect.get_annotations(base)}


class NameRole(SphinxRole):
    """Code that links to the public name it consists of, if it does."""

    def run(self) -> tuple[list[nodes.Node], list[nodes.system_message]]:
        """Return the nodes of the code."""
        code = nodes.literal(self.rawtext, self.text, classes=["code"])
        path = self.text.removesuffix("()")
        target = documented_path(path) if DOTTED.fullmatch(path) else None
        if target is None:
            self._check(path)
            return [code], []
        reference = addnodes.pending_xref(
            "", code, refdomain="py", reftype="obj", reftarget=target, refdoc=self.env.docname
        )
        return [reference], []

    def _check(self, text: str) -> None:
        """Warn about a path from `fedquilt` at the beginning of a text that does not exist."""
        match = DOTTED.match(text)
        if match is None or not match[0].startswith(("fedquilt.", "fq.")):
            return
        try:
            find(match[0])
        except LookupError:
            logger.warning("there is no %s", match[0], location=self.get_location(), type="name")


def documented_path(path: str) -> str | None:
    """Return the path under which the object of a name is documented, None if it is not."""
    first, *names = path.split(".")
    if first in ("fedquilt", "fq"):
        try:
            return homes().get(_key(find(path)))
        except LookupError:
            return None
    owner = documented_by_name().get(first)
    if owner is None or not names:
        return owner
    target = ".".join((owner, *names))
    try:
        return target if inspect.isroutine(find(target)) else None
    except LookupError:
        return None


def on_missing_reference(
    app: Sphinx, env: BuildEnvironment, node: addnodes.pending_xref, content: nodes.TextElement
) -> nodes.Node | None:
    """Resolve references that Sphinx has no target for.

    Types may exist without being documented, such as those of torch. Signatures have bare names for
    types that are imported for type checkers only.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    home = documented_by_name().get(target)
    if home is not None:
        return env.domains["py"].resolve_xref(
            env, node["refdoc"], app.builder, "obj", home, node, content
        )
    try:
        find(target)
    except LookupError:
        return content if target.split(".")[0] in names_in_source() else None
    return content


def accept_folders(app: Sphinx, document: nodes.document) -> None:
    """Replace links of pages to folders, of which a site has none, by their text."""
    for node in list(document.findall(addnodes.pending_xref)):
        folder = Path(str(document["source"])).parent / node["reftarget"]
        if node["reftype"] == "myst" and folder.is_dir():
            node.replace_self(node.children)


@cache
def names_in_source() -> frozenset[str]:
    """Return the names that any module of the package imports or defines."""
    names: set[str] = set()
    for file in Path(fedquilt.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names |= {alias.asname or alias.name for alias in node.names}
            elif isinstance(node, ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(names)


def clean_signature(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, signature: str | None, returns: str
) -> tuple[str, str] | None:
    """Replace defaults such as `<factory>`, which are no Python, and arguments of long defaults."""
    if not signature:
        return None
    return shortened(re.sub(r"= ?<[^<>]*>", "= ...", signature)), returns


def shortened(signature: str) -> str:
    """Replace the arguments of objects that are long defaults by an ellipsis."""
    short, rest = "", signature
    while match := re.search(r"= ?[A-Z]\w*\(", rest):
        end = _closing(rest, match.end())
        arguments = rest[match.end() : end]
        short += rest[: match.end()] + (arguments if len(arguments) <= MAX_DEFAULT else "...")
        rest = rest[end:]
    return short + rest


def _closing(text: str, start: int) -> int:
    """Return the position of the bracket that closes the one before `start`."""
    depth = 1
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position
    return len(text)


class Docstring(GoogleDocstring):
    """A docstring whose list of returned values has no types. Signatures have them."""

    def _consume_returns_section(
        self, preprocess_types: bool = False
    ) -> list[tuple[str, str, list[str]]]:
        lines = self._dedent(self._consume_to_next_section())
        return [("", "", lines)] if lines else []


def convert_docstring(
    app: Sphinx, kind: str, name: str, value: Any, options: Any, lines: list[str]
) -> None:
    """Convert a docstring to reStructuredText, with the comments of fields as parameters.

    A property is converted like a method, because a colon in its first sentence separates no type.
    """
    if kind == "class" and is_dataclass(value):
        lines[:] = ["Args:" if line == "Attributes:" else line for line in lines]
        lines += commented_fields(value, "\n".join(lines))
    kind = "method" if kind == "property" else kind
    converted = Docstring(escaped(lines), GOOGLE, app, kind, name, value, options)
    lines[:] = converted.lines()


def commented_fields(owner: type, text: str) -> list[str]:
    """Return a list of the fields that a comment explains, and the docstring does not."""
    known = comments(owner)
    names = [field.name for field in fields(owner) if field.init and field.name in known]
    entries = [
        f"    {name}: {known[name]}"
        for name in names
        if not name.startswith("_") and not re.search(rf"^ +{name}(?: \(.*?\))?: ", text, re.M)
    ]
    return ["", "Args:", *entries, ""] if entries else []


def escaped(lines: list[str]) -> list[str]:
    """Escape characters that mean something in reStructuredText, but not in our docstrings.

    Indented lines are code if the line before them ends with a colon and is no heading of a list.
    """
    result: list[str] = []
    code_indent = 0  # Least indentation of the current code. 0: no code.
    is_example = False
    for number, line in enumerate(lines):
        indent = len(line) - len(line.lstrip())
        if not line.strip():
            is_example = False
        elif line.lstrip().startswith(">>>"):
            is_example, code_indent = True, 0
        elif indent < code_indent:
            code_indent = 0
        if code_indent or is_example or not line.strip():
            result.append(line)
            continue
        begins_code = (
            line.endswith(":")
            and not HEADING.fullmatch(line)
            and _is_code(lines[number + 1 :], indent)
        )
        result.append(_escaped_line(line) + (":" if begins_code else ""))
        if begins_code:
            code_indent = indent + 1
    return result


def _is_code(following: list[str], indent: int) -> bool:
    """Return True if the lines are blank and then indented further than a paragraph."""
    text = next((line for line in following if line.strip()), "")
    is_apart = bool(following) and not following[0].strip()
    return is_apart and len(text) - len(text.lstrip()) > indent and ">>>" not in text


def _escaped_line(line: str) -> str:
    """Escape a line of prose outside of backticks. `**` stays, and `*args` at the beginning."""
    parts = re.split(r"(`[^`]*`?|^\s*\*{1,2}\w+:)", line)
    parts[::2] = [
        re.sub(r"(?<!\*)\*(?!\*)|\||(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]
    ]
    return "".join(parts)


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive, the role and the handlers."""
    app.add_directive("public-names", PublicNames)
    app.add_role("name", NameRole())
    app.add_lexer("layers", TextLexer)
    app.connect("missing-reference", on_missing_reference)
    app.connect("doctree-read", accept_folders)
    app.connect("autodoc-process-signature", clean_signature)
    app.connect("autodoc-process-docstring", convert_docstring)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
