"""Odd content of tuned.json is an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedquilt.errors import RecordError
from fedquilt.studies.study import _read_choice


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"chosen": []}', '{"chosen": "x"}', '{"chosen": null}', 100_000 * "["]
)
def test_odd_choices_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "tuned.json"
    file.write_text(text)
    with pytest.raises(RecordError, match=r"tuned\.json is damaged"):
        _read_choice(file)
