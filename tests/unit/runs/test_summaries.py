"""Numbers of a summary as tables show them."""

from __future__ import annotations

import pytest

from fedquilt.runs.summaries import (
    domains_of,
    figure_text,
    figures_of,
    figures_row,
    in_percent,
    kept_nets_of,
    main_of,
    members_of,
    milestone_text,
    share_label,
    target_text,
    utilization_text,
)

SUMMARY = {
    "main": "rmse",
    "percent": False,
    "accuracy": {},
    "metrics": {"rmse": {"1.0": 2.0}, "rmse/north": {"1.0": 3.0}, "r2": {"1.0": 0.5}},
    "labels": {"0.5": "3M"},
    "members": {"1.0": {"params": 10, "macs": 20}, "0.5": {"params": 3, "macs": 6}},
}


def test_a_summary_names_the_main_metric():
    assert (main_of(SUMMARY), in_percent(SUMMARY)) == ("rmse", False)
    assert (main_of({}), in_percent({})) == ("accuracy", True)


def test_figures_by_share_and_by_domain():
    assert figures_of(SUMMARY) == {"1.0": 2.0}
    assert figures_of(SUMMARY, "r2") == {"1.0": 0.5}
    assert figures_of(SUMMARY, "accuracy") == {}
    assert figures_of({"accuracy": {"1.0": 0.5}, "metrics": {}}) == {"1.0": 0.5}
    assert domains_of(SUMMARY) == {"north": {"1.0": 3.0}}
    assert domains_of(SUMMARY, "r2") == {}


def test_shares_have_the_methods_name_or_their_number():
    assert [share_label(share, {"0.5": "3M"}) for share in ("1.0", "0.5", "0.25")] == [
        "1",
        "3M",
        "0.25",
    ]
    assert members_of(SUMMARY) == {
        "1": {"parameters": 10, "MACs a sample": 20},
        "3M": {"parameters": 3, "MACs a sample": 6},
    }


PAIRS = {
    "main": "accuracy",
    "percent": True,
    "metrics": {
        "accuracy": {"1.0": 0.5},
        "local_accuracy": {"1.0": 0.4},
        "private_accuracy": {"57408.0": 0.25, "147840.0": 0.375},
        "local_private_accuracy": {"147840.0": 0.125},
    },
    "labels": {"57408.0": "120k MACs", "147840.0": "240k MACs"},
}


def test_nets_that_clients_keep_have_a_row_for_each_limit():
    """Metrics at the shares of the server's model are not among them. All rows have the same
    columns.
    """
    assert kept_nets_of(PAIRS) == {
        "120k MACs": {"private accuracy": "25.0%", "local private accuracy": "–"},
        "240k MACs": {"private accuracy": "37.5%", "local private accuracy": "12.5%"},
    }
    assert kept_nets_of({**PAIRS, "metrics": {"accuracy": {"1.0": 0.5}}}) == {}
    assert kept_nets_of({}) == {}


def test_the_use_of_limits_as_text():
    used = {"utilisation": 0.713}
    assert utilization_text({}) == ""
    assert (
        utilization_text(used)
        == "71.3% of the limits' multiply-adds are used by the clients' own nets"
    )
    common = {**used, "common_utilisation": 0.245}
    assert utilization_text(common).endswith(
        "own nets, 24.5% if all had the largest net that fits every device"
    )
    assert utilization_text({**common, "over_limit": 0}) == utilization_text(common)
    assert utilization_text({**common, "over_limit": 14}).endswith(
        "every device; 14 devices exceed their limits"
    )


def test_figures_as_text():
    assert figure_text(0.61249, percent=True) == "61.2%"
    assert figure_text(1234.567, percent=False) == "1235"
    assert figure_text(None, percent=True) == "–"
    assert figures_row({"1.0": 0.5}, ["1.0", "0.5"], {}, True) == {"1": "50.0%", "0.5": "–"}
    assert target_text(0.6, "accuracy", percent=True) == "60%"
    assert target_text(0.25, "rmse", percent=False) == "rmse 0.25"


@pytest.mark.parametrize(
    ("milestone", "text"),
    [
        (None, "–"),
        (
            {"round": 1, "bytes": 1500, "seconds": 0.25, "link_seconds": None},
            "1 round, 1.5 kB, 0.2 s",
        ),
        (
            {"round": 2, "bytes": 7, "seconds": 1.0, "link_seconds": 1234.0},
            "2 rounds, 7 B, 1,234.0 s over the link",
        ),
    ],
)
def test_milestones_as_text(milestone, text):
    assert milestone_text(milestone) == text
