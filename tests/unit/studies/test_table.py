"""One small table in every format."""

from __future__ import annotations

import csv
import io
import json
import re

import pytest

from fedquilt.errors import ConfigError
from fedquilt.studies.table import Cell, Table, render

TABLE = Table(
    "accuracy, mean ± deviation",
    ["method", "0.5", "back"],
    [
        ["fed_avg", Cell("61.2 ± 0.8%", is_best=True), "4.02 MB"],
        ["a, b & c #1", "9.1 ± 0.8%", Cell()],
    ],
    ["fed_avg is marked.", "Nothing else."],
)


def test_text_is_aligned_and_marks_the_best():
    assert TABLE.text.splitlines() == [
        "accuracy, mean ± deviation",
        "method               0.5       back",
        "fed_avg      61.2 ± 0.8% *  4.02 MB",
        "a, b & c #1   9.1 ± 0.8%          –",
        "fed_avg is marked.",
        "Nothing else.",
    ]


def test_words_are_aligned_to_the_left():
    table = Table("", ["n", "kind"], [["12", "x"], ["3", "long"]])
    assert table.text == "n   kind\n12  x\n3   long"


def test_markdown_has_the_best_in_bold_type():
    assert TABLE.markdown.splitlines() == [
        "**accuracy, mean ± deviation**",
        "",
        "| method | 0.5 | back |",
        "| --- | ---: | ---: |",
        r"| fed\_avg | **61.2 ± 0.8%** | 4.02 MB |",
        "| a, b & c #1 | 9.1 ± 0.8% | – |",
        "",
        r"fed\_avg is marked.",
        "",
        "Nothing else.",
    ]
    assert Table("", ["a|b"], [["x*y*"]]).markdown.splitlines()[::2] == [r"| a\|b |", r"| x\*y\* |"]


def test_latex_escapes_special_characters():
    assert TABLE.latex.splitlines() == [
        r"\begin{table}",
        r"\centering",
        r"\caption{accuracy, mean $\pm$ deviation}",
        r"\begin{tabular}{lrr}",
        r"\hline",
        r"method & 0.5 & back \\",
        r"\hline",
        r"fed\_avg & \textbf{61.2 $\pm$ 0.8\%} & 4.02 MB \\",
        r"a, b \& c \#1 & 9.1 $\pm$ 0.8\% & -- \\",
        r"\hline",
        r"\end{tabular}",
        r"\par\smallskip fed\_avg is marked.",
        r"\par\smallskip Nothing else.",
        r"\end{table}",
    ]


def test_latex_has_no_special_character_left():
    """A row that begins with a bracket would be an argument of the line break before it."""
    wild = "[x]*{a}$^~\\_%&#±×–−·<|>γλρ"
    row = Table("", ["n"], [[wild]]).latex.splitlines()[6].removesuffix(r" \\")
    assert row.isascii()
    assert row.startswith("{[}")
    bare = re.sub(r"\\[a-z]+\{\}|\\[{}$&#%_]|\$[^$]*\$|\{[][*]\}", "", row)
    assert bare == "xa--"


def test_latex_has_a_minus_sign_before_a_number_and_hyphens_elsewhere():
    line = Table("", ["row", "difference"], [["Split-Mix, k-1", "-59.3"]]).latex.splitlines()[6]
    assert line == r"Split-Mix, k-1 & $-$59.3 \\"


def test_csv_is_read_back_as_it_was():
    head, *rows = csv.reader(io.StringIO(TABLE.csv))
    assert head == ["method", "0.5", "back"]
    assert rows == [["fed_avg", "61.2 ± 0.8% *", "4.02 MB"], ["a, b & c #1", "9.1 ± 0.8%", "–"]]


def test_plain_values_are_json():
    assert json.loads(json.dumps(TABLE.plain)) == {
        "title": "accuracy, mean ± deviation",
        "head": ["method", "0.5", "back"],
        "rows": [["fed_avg", "61.2 ± 0.8%", "4.02 MB"], ["a, b & c #1", "9.1 ± 0.8%", "–"]],
        "best": [[0, 1]],
        "notes": ["fed_avg is marked.", "Nothing else."],
    }


@pytest.mark.parametrize("format", ["text", "markdown", "latex", "csv"])
def test_several_tables_and_empty_ones(format):
    empty = Table("", ["a", "b"], [])
    assert render([TABLE, empty], format) == f"{TABLE.render(format)}\n\n{empty.render(format)}"


def test_an_unknown_format_is_refused():
    with pytest.raises(
        ConfigError, match=r"the format 'latx' was asked for\. Did you mean 'latex'"
    ):
        TABLE.render("latx")
