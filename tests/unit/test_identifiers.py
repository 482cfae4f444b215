"""Identifiers of the package: one class for each name, and PyTorch's spelling."""

from __future__ import annotations

import ast
import re
import tokenize
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fedquilt"
FILES = sorted(PACKAGE.rglob("*.py"))

# Stems of British spellings. `cancelled` is not among them, because futures of Python have it.
BRITISH = re.compile(
    r"colour|grey|centre|neighbour|behaviour|favour|labell|modell|catalogue|licence|analys(e|ing)"
    r"|(custom|general|initial|local|maxim|minim|normal|optim|organ|penal|quant|random|recogn"
    r"|regular|serial|special|standard|summar|synchron|token|util|vector|visual)is(e|ing|ation|able)",
    re.IGNORECASE,
)


def identifiers(file: Path) -> set[str]:
    """Return the names in the code of a file, without comments and texts."""
    with file.open(encoding="utf-8") as lines:
        tokens = list(tokenize.generate_tokens(lines.readline))
    return {token.string for token in tokens if token.type == tokenize.NAME}


def test_no_two_classes_share_a_name():
    modules = defaultdict(list)
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                modules[node.name].append(str(file.relative_to(PACKAGE)))
    assert {name: files for name, files in modules.items() if len(files) > 1} == {}


def test_identifiers_are_spelt_as_in_pytorch():
    british = {
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in FILES
        for name in [file.stem, *identifiers(file)]
        if BRITISH.search(name)
    }
    assert british == set()


def test_british_spellings_are_found():
    assert BRITISH.search("CustomisableModel")
    assert BRITISH.search("_optimiser")
    assert not BRITISH.search("optimizer")
    assert not BRITISH.search("is_noise")
