"""Layers of docs/architecture.md, for all imports, also type-only and deferred; sizes of files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fedquilt"
PAGE = (ROOT / "docs" / "architecture.md").read_text()
MAX_TOP_MODULES = 8
MAX_LINES = 550  # of a file
MAX_CHARACTERS = 100  # of a line


def documented_layers() -> list[set[str]]:
    """Return the layers of the page, the lowest first, each as the names of its packages."""
    block = re.search(r"```layers\n(.*?)```", PAGE, re.DOTALL)
    assert block, "docs/architecture.md has no block of layers"
    lines = [line.split("#")[0] for line in block[1].splitlines()]
    return [set(re.split(r"[,|\s]+", line.strip())) for line in lines if line.strip()]


def separated() -> set[frozenset[str]]:
    """Return the pairs of packages of one layer of which neither imports the other."""
    block = re.search(r"```layers\n(.*?)```", PAGE, re.DOTALL)
    assert block
    pairs = re.findall(r"(\w+) \| (\w+)", block[1])
    return {frozenset(pair) for pair in pairs}


def module_name(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in PACKAGE.rglob("*.py")}


def imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports anywhere in its source."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module} has a relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found & MODULES.keys()


def top(module: str) -> str:
    """Return the package that a module belongs to: `family` for `fedquilt.family.cut`."""
    return module.split(".")[1] if "." in module else "__init__"


def test_no_module_imports_from_a_higher_layer():
    layers = documented_layers()
    rank = {name: number for number, layer in enumerate(layers) for name in layer}
    unknown = {top(module) for module in MODULES} - rank.keys()
    assert not unknown, f"the page has no layer for {unknown}"
    upward = [
        f"{module} imports {other}"
        for module in sorted(MODULES)
        for other in sorted(imports(module))
        if rank[top(other)] > rank[top(module)]
    ]
    assert upward == []


def test_packages_of_one_layer_that_are_kept_apart_do_not_import_each_other():
    apart = separated()
    assert frozenset(("methods", "engines")) in apart
    joined = [
        f"{module} imports {other}"
        for module in sorted(MODULES)
        for other in sorted(imports(module))
        if frozenset((top(module), top(other))) in apart
    ]
    assert joined == []


def test_no_packages_import_each_other_in_a_circle():
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        needs.setdefault(top(module), set()).update(top(other) for other in imports(module))
    while leaves := {
        name for name, others in needs.items() if not (others - {name}) & needs.keys()
    }:
        needs = {name: others for name, others in needs.items() if name not in leaves}
    assert needs == {}


def test_few_modules_are_at_the_top_of_the_package():
    modules = {file.stem for file in PACKAGE.glob("*.py")} - {"__init__", "__main__"}
    assert len(modules) <= MAX_TOP_MODULES, sorted(modules)


def test_no_file_is_long():
    lengths = {module: len(file.read_text().splitlines()) for module, file in MODULES.items()}
    assert {module: number for module, number in lengths.items() if number > MAX_LINES} == {}


def test_no_line_is_long():
    """Ruff leaves out lines that end with an address, and files that its settings exclude."""
    long = [
        f"{module}:{number}"
        for module, file in MODULES.items()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if len(line) > MAX_CHARACTERS
    ]
    assert long == []
