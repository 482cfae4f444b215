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


def test_the_table_has_a_curve_of_one_run_and_a_point_of_each_other(example, file, capsys):
    common = [
        str(file),
        "--rounds",
        "1",
        "--clients",
        "4",
        "--fraction",
        "1",
        "--tests",
        "24",
        "--model",
        "tiny_resnet",
    ]
    chosen = ["--lambdas", "0", "1", "--weights", "0.5"]
    example.main([*common, *chosen, "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["method"], row["share"], row["lambda"]) for row in rows] == [
        ("Split-Mix + DAT", 1.0, 0.0),
        ("Split-Mix + DAT", 1.0, 1.0),
        ("FedAvg + OAT", 1.0, 0.0),
        ("FedAvg + OAT", 1.0, 1.0),
        ("FedAvg + AT, λn 0.5", 1.0, None),
    ]
    assert all(0 <= row[kind] <= 1 for row in rows for kind in ("standard", "robust"))
    example.main([*common, "--figure", "widths", "--lambdas", "0", "1", "--weights"])
    table = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[1:3] for line in table[2:]] == [
        [share, robustness] for share in ("1", "0.5", "0.25", "0.125") for robustness in ("0", "1")
    ]


def test_it_compares_what_the_paper_does(example):
    full = list(example.entrants("full", 400, example.WEIGHTS))
    assert [entrant.method.base for entrant in full[:1]] == [1.0]
    weights = [entrant.method.local.adversarial.weight for entrant in full]
    assert weights == [0.5, example.OAT, 0, 0.1, 0.2, 0.3, 0.5, 1]
    widths = list(example.entrants("widths", 400, (0.5,)))
    assert (widths[0].method.base, widths[1].method.share) == (0.125, 0.125)
    assert [entrant.norms for entrant in widths] == ["dual", "single"]
