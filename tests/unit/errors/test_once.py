"""Warnings that many members cause are logged once."""

from __future__ import annotations

import logging

from fedquilt.errors.once import Once


def test_reasons_that_differ_in_sizes_only_are_logged_once(caplog):
    once = Once(logging.getLogger("fedquilt.test"))
    for size in (4, 8, 16):
        once.warning(f"no rule for [{size}, 3]", "set apart: %s", f"no rule for [{size}, 3]")
    once.warning("another", "set apart: %s", "another")
    once.warning("another", "set apart: %s", "another", kind="evaluation")
    assert caplog.messages == [
        "set apart: no rule for [4, 3]",
        "set apart: another",
        "set apart: another",
    ]
    once.forget()
    once.warning("another", "set apart: %s", "another")
    assert len(caplog.messages) == 4
