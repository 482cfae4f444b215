"""The public surface: few names, all of them importable, and every name of the pages among them."""

from __future__ import annotations

import re
from pathlib import Path

import fedquilt as fq

ROOT = Path(__file__).parents[2]
MAX_NAMES = 45
NAMESPACES = ("attacks", "links", "optimizers", "schedules")


def test_there_are_few_names_and_all_can_be_imported():
    assert len(fq.__all__) <= MAX_NAMES
    assert sorted(fq.__all__) == sorted(dir(fq))
    for name in fq.__all__:
        assert getattr(fq, name) is not None


def test_namespaces_have_what_their_names_say():
    assert {"SGD", "Adam", "AdamW"} <= set(dir(fq.optimizers))
    assert {"Constant", "Cosine", "Steps", "WithinRound"} <= set(dir(fq.schedules))
    assert {"ColumnLoss", "Wireless", "Codec", "Clock"} <= set(dir(fq.links))
    assert {"PGD", "AdversarialTraining"} <= set(dir(fq.attacks))
    assert set(NAMESPACES) <= set(fq.__all__)


def test_every_name_that_pages_use_is_there():
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        if page.name == "what-changed.md":
            continue
        for chain in re.findall(r"\bfq((?:\.\w+)+)", page.read_text()):
            value: object = fq
            for name in chain.split(".")[1:3]:
                if (
                    not hasattr(value, "__path__")
                    and value is not fq
                    and not hasattr(value, "__file__")
                ):
                    break
                value = getattr(value, name)
