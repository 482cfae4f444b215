"""Split-Mix's Figure 7, the example itself on a few drawn images."""

from __future__ import annotations

import json

import pytest

from tests.conftest import load_example, save_images


@pytest.fixture(scope="module")
def example():
    return load_example("splitmix_robust")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return save_images(tmp_path_factory.mktemp("digits") / "digits.npz", 64, 4)


def test_the_table_has_a_curve_of_one_run_and_a_point_of_each_other(example, file, capsys, tmp_path):
    common = (
        f"{file} --rounds 1 --clients 4 --fraction 1 --tests 24 --model tiny_resnet --out {tmp_path / 'runs.jsonl'}"
    )

    def rows(asked):
        example.main(f"{common} {asked}".split())
        table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[2:]]

    full = rows("--lambdas 0 1 --weights 0.5")
    assert [row[:3] for row in full] == [
        ["Split-Mix + DAT", "1", "0"],
        ["Split-Mix + DAT", "1", "1"],
        ["FedAvg + OAT", "1", "0"],
        ["FedAvg + OAT", "1", "1"],
        ["FedAvg + AT, λn 0.5", "1", ""],
    ]
    assert all(0 <= float(score) <= 100 for row in full for score in row[3:])
    widths = rows("--figure widths --lambdas 0 1 --weights")
    assert [row[1:3] for row in widths] == [
        [share, robustness] for share in ("1", "0.5", "0.25", "0.125") for robustness in ("0", "1")
    ]
    written = (tmp_path / "runs.jsonl").read_text()
    assert rows("--lambdas 0 1 --weights 0.5") == full
    assert (tmp_path / "runs.jsonl").read_text() == written
    assert len(written.splitlines()) == 4


def test_it_compares_what_the_paper_does(example):
    full = list(example.entrants("full", 400, example.WEIGHTS))
    assert [entrant.method.base for entrant in full[:1]] == [1.0]
    weights = [entrant.method.local.adversarial.weight for entrant in full]
    assert weights == [0.5, example.OAT, 0, 0.1, 0.2, 0.3, 0.5, 1]
    widths = list(example.entrants("widths", 400, (0.5,)))
    assert (widths[0].method.base, widths[1].method.share) == (0.125, 0.125)
    assert [entrant.norms for entrant in widths] == ["dual", "single"]


def test_norms_are_tracked_unless_asked(example):
    for figure in ("full", "widths"):
        assert {one.method.local.norm.name for one in example.entrants(figure, 400, (0, 0.5))} == {"tracked"}
        assert {one.method.local.norm.name for one in example.entrants(figure, 400, (0, 0.5), "post")} == {"post"}


def test_parts_are_chosen_by_name_with_or_without_their_weight(example, file, capsys, tmp_path):
    common = f"{file} --rounds 1 --clients 4 --fraction 1 --tests 24 --model tiny_resnet".split()

    def played(out, *asked):
        example.main([*common, "--out", str(tmp_path / out), *asked])
        return [json.loads(line)["method"] for line in (tmp_path / out).read_text().splitlines()]

    weights = ("--weights", "0", "0.5")
    one, two = "FedAvg + AT, λn 0", "FedAvg + AT, λn 0.5"
    assert played("both.jsonl", *weights, "--methods", "FedAvg + AT") == [one, two]
    assert played("one.jsonl", *weights, "--methods", two) == [two]
    with pytest.raises(SystemExit):
        played("none.jsonl", *weights, "--methods", "FedAvg+AT")
    assert "full has ['Split-Mix + DAT', 'FedAvg + OAT'" in capsys.readouterr().err
