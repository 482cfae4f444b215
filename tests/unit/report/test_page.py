"""Pages of broken and hostile folders: all of it is text, and nothing else breaks."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser

import pytest

from fedquilt.errors import ConfigError
from fedquilt.report import content, page
from fedquilt.report.collect import collect, read_run
from fedquilt.round import Grades
from fedquilt.round.engine import Attendance
from tests.unit.report.conftest import record, write_run, write_summary

HOSTILE = "<script>alert(1)</script>\"'&<!--"


class Tags(HTMLParser):
    """Collects the tags, texts and attributes of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.scripts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        if self.lasttag == "script":
            self.scripts.append(data)


def test_hostile_names_are_text(tmp_path):
    refusal = Attendance((0,), {}, {}, {0: HOSTILE}, wire_down=1, wire_up=1)
    grades = Grades(HOSTILE, {HOSTILE: {"1.0": 0.5}, "<b>": {"1.0": 1.0}})
    config = f"note = '''{HOSTILE}'''\nrounds = 1\n"
    folder = write_run(tmp_path / "run", [record(1, grades=grades, attendance=refusal)], config)
    write_summary(
        folder, method=HOSTILE, main=HOSTILE, metrics=grades.metrics, rounds=1, data=HOSTILE
    )
    text = page([folder])
    clean = page([write_run(tmp_path / "clean", [record(1, {"1.0": 0.5})], "rounds = 1\n")])
    assert Tags(text).tags.count("script") == Tags(clean).tags.count("script")
    assert "b" not in Tags(text).tags
    assert "alert(1)</script>" not in text
    assert text.count("&lt;script&gt;alert(1)") >= 3  # metric, method, reason
    assert not [name for name, _ in Tags(text).attributes if name.startswith("on")]
    charts = re.search(r'id="charts">(.*?)</script>', text, re.DOTALL)[1]
    assert "<" not in charts
    assert "<script>alert(1)</script>" in str(json.loads(charts))


def test_numbers_that_cannot_be_drawn_are_left_out(tmp_path):
    logged = [
        record(1, {"1.0": math.nan}),
        record(2, {"1.0": 0.5}, bytes_up=10**400, loss=math.inf),
        record(3, {"1.0": 1e308}),
    ]
    folder = write_run(tmp_path / "run", logged, "rounds = 3\n")
    shown = content([folder])
    assert "2 figures that are no finite numbers are left out" in shown.body
    json.loads(shown.to_json(), parse_constant=pytest.fail)


def test_a_half_written_line_and_unknown_fields_are_reported(tmp_path):
    folder = write_run(
        tmp_path / "run",
        [record(1, {"1.0": 0.5}), record(2, {"1.0": 0.6})],
        "rounds = 2\n",
        end=b'{"round": 3, "surp',
    )
    run = read_run(folder)
    assert [item.round for item in run.records] == [1, 2]
    assert run.problems[-1].startswith("rounds.jsonl, line 3: it was not written to its end")
    assert "line 3" in content([folder]).body
    (folder / "rounds.jsonl").write_text(
        json.dumps({**record(1).to_dict(), "<b>new</b>": 1}) + "\n"
    )
    assert "&lt;b&gt;new&lt;/b&gt;" in content([folder]).body


def test_missing_files_are_reported_and_the_rest_is_shown(tmp_path):
    folder = write_run(tmp_path / "run", [record(1, {"1.0": 0.5})])
    body = content([folder]).body
    assert "config.toml is missing" in body
    assert "There is no quilt: its settings are not known" in body
    (folder / "rounds.jsonl").unlink()
    write_summary(folder, rounds=1, metrics={"accuracy": {"1.0": 0.5}}, main="accuracy")
    body = content([folder]).body
    assert "rounds.jsonl is missing" in body
    assert "There are no records." in body
    (folder / "summary.json").write_text("{")
    (folder / "config.toml").write_text("rounds = 1\n")
    assert "summary.json is damaged" in content([folder]).body


def test_a_run_that_has_not_finished_is_shown(tmp_path):
    config = "rounds = 9\nseed = 3\n[method]\nname = 'fedrolex'\n[data]\nname = 'digits'\n"
    folder = write_run(tmp_path / "run", [record(1), record(2, {"1.0": 0.6})], config)
    (run,) = collect([folder]).runs
    assert (run.result.entry, run.result.seed, run.result.metric()) == (
        "fedrolex",
        3,
        {"1.0": 0.6},
    )
    assert not run.finished
    assert "not finished" in content([folder]).body


def test_many_points_are_thinned_and_the_page_says_so(tmp_path):
    logged = [record(round, {"1.0": 0.5}) for round in range(1, 1201)]
    shown = content([write_run(tmp_path / "run", logged, "rounds = 1200\n")])
    assert "500 of 1,200 points are drawn" in shown.body
    assert max(len(rows) for rows in shown.charts["data"].values()) <= 1000


def test_a_live_page_may_ask_its_own_server_alone(tmp_path):
    folder = write_run(tmp_path / "run", [record(1, {"1.0": 0.5})], "rounds = 1\n")
    still, live = page([folder]), page([folder], live=True)
    assert "connect-src 'none'" in still
    assert "EventSource(" not in still.replace("new EventSource(this", "")
    assert "connect-src 'self'" in live
    assert 'new EventSource("events"' in live


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no such folder"):
        collect([tmp_path / "none"])
    with pytest.raises(ConfigError, match=r"there is no run in it\. Name the folder"):
        collect([tmp_path])
    write_run(tmp_path / "below", [record(1)], "rounds = 1\n")
    with pytest.raises(ConfigError, match="in folders below it: below"):
        collect([tmp_path])
    with pytest.raises(ConfigError, match="without a folder"):
        collect([])


def test_runs_that_cannot_be_compared_are_listed(tmp_path):
    for name in ("digits", "cifar10"):
        folder = write_run(tmp_path / name, [record(1, {"1.0": 0.5})], "rounds = 1\n")
        write_summary(folder, method=name, data=name, rounds=1, metrics={"accuracy": {"1.0": 0.5}})
    with pytest.raises(ConfigError, match=r"data digits: digits\s+data cifar10: cifar10"):
        collect([tmp_path / "digits", tmp_path / "cifar10"])


def test_a_metric_that_nobody_recorded_is_refused(tmp_path):
    folder = write_run(tmp_path / "run", [record(1, {"1.0": 0.5})], "rounds = 1\n")
    with pytest.raises(ConfigError, match=r"'acuracy' was asked for; no run has recorded it.*accu"):
        collect([folder], "acuracy")


def test_runs_with_one_method_and_seed_get_names_of_their_own(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, [record(1, {"1.0": 0.5})], "rounds = 1\n")
    collection = collect([tmp_path / "one", tmp_path / "two"])
    assert len({run.result.entry for run in collection.runs}) == 2
    assert collection.tables
