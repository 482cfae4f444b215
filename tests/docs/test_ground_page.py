"""docs/ground.md: its commands name tables and rows that exist, and its numbers are theirs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from fedquilt.studies.papers import papers, parsed_preset, tables_named
from fedquilt.studies.reproduce import chosen_rows

PAGE = (Path(__file__).parents[2] / "docs" / "ground.md").read_text()
ROWS = re.findall(r"^\| `(ground/[\w-]+)` \| (.*) \|$", PAGE, re.MULTILINE)


def test_commands_name_tables_and_rows_that_exist() -> None:
    commands = re.findall(r"^fedquilt .*", PAGE, re.MULTILINE)
    assert len(commands) >= 5
    for line in commands:
        words = shlex.split(line, comments=True)
        name = words[3] if words[1] == "list" else words[2]
        assert tables_named(name)
        if "--rows" in words:
            texts = words[words.index("--rows") + 1 : words.index("--seeds")]
            assert len(chosen_rows(parsed_preset(name), texts)) >= len(texts)


def test_all_tables_are_listed() -> None:
    assert {name for name, _ in ROWS} == set(papers()["ground"])


@pytest.mark.parametrize(("name", "cells"), ROWS)
def test_clients_model_and_bytes_are_those_of_the_table(name: str, cells: str) -> None:
    table = parsed_preset(name)
    settings = dict(table.rows_at("full"))["HeteroFL"]
    _, clients, model, sent = (cell.strip() for cell in cells.split("|"))
    assert clients == f"{settings['fleet']['clients']}, {settings['fleet']['cohort']}"
    chosen = settings["model"] if isinstance(settings["model"], str) else settings["model"]["name"]
    assert model.replace("-", "").strip("`").lower() == chosen
    assert any(column.title == f"×1, within {sent}" for column in table.columns)


def test_the_page_says_that_nothing_was_measured() -> None:
    assert "has been run yet" in PAGE
    assert not list((Path(__file__).parents[2] / "results").glob("ground/*"))
