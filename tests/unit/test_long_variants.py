"""The list of long variants names tests that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long_variants import LONG_VARIANTS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("entry", LONG_VARIANTS)
def test_an_entry_names_a_test(entry: str) -> None:
    file, _, name = entry.partition("::")
    assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text()
