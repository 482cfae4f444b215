from __future__ import annotations

import pytest

from fedquilt.display import Overview, Readable, shortened

TABLE = Overview(
    "two <rows>", ("name", "count"), [("a", "5"), ("long & wide", "1,200")], ("a note",)
)


def test_text_aligns_columns_and_numbers_to_the_right():
    assert TABLE.text.splitlines() == [
        "two <rows>",
        "name         count",
        "a                5",
        "long & wide  1,200",
        "a note",
    ]


def test_html_escapes_all_text():
    hostile = "<script>alert(1)</script>\"'"
    html = Overview(hostile, (hostile,), [(hostile,)], (hostile,)).html
    assert "<script" not in html
    assert html.count("&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;") == 4
    assert "<td" in TABLE.html
    assert "long &amp; wide" in TABLE.html


def test_characters_that_control_a_terminal_are_replaced():
    overview = Overview("clear \x1b[2J", (), [("a\nb",)])
    assert overview.text == "clear �[2J\na�b"
    assert "\x1b" not in overview.html


def test_a_table_without_rows_has_no_head():
    assert Overview("alone", ("head",)).text == "alone"
    assert "table" not in Overview("alone", ("head",)).html
    assert Overview("", (), [("a", "b")]).text == "a  b"


def test_the_rest_of_a_long_table_is_counted():
    rows = [(str(number),) for number in range(1500)]
    shown, notes = shortened(rows, "axes", most=3)
    assert (shown, notes) == (rows[:3], ["… and 1,497 more axes"])
    assert shortened(rows[:3], "axes", most=3) == (rows[:3], [])


def test_a_readable_object_is_printed_as_its_overview():
    class Thing(Readable):
        def _overview(self) -> Overview:
            return TABLE

    assert repr(Thing()) == "Thing(two <rows>)"
    assert str(Thing()) == TABLE.text
    assert Thing()._repr_html_() == TABLE.html
    with pytest.raises(NotImplementedError, match="Readable has no overview"):
        str(Readable())
