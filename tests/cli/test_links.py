"""Links of `fedquilt run`: by name, changed, with a deadline, and as they are listed."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fedquilt as fq
from fedquilt.cli.main import main
from tests.cli.commands import SUMMARY, TINY, json_of


def test_a_run_uses_a_link_by_name(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        link: json_of(
            capsys, "run", *TINY, "--link", link, "--rounds", "2", "--out", f"runs/{link}"
        )
        for link in ("perfect", "lossy-mild", "mobile")
    }
    assert (
        found["lossy-mild"]["bytes_up"]
        < found["perfect"]["bytes_up"]
        == found["mobile"]["bytes_up"]
    )
    assert set(found["lossy-mild"]) == SUMMARY
    assert set(found["mobile"]) == SUMMARY | {"link_seconds"}
    record = json.loads(Path("runs/mobile/rounds.jsonl").read_text().splitlines()[0])
    assert record["link_seconds"] > 0
    written = tomllib.loads(Path("runs/lossy-mild/config.toml").read_text())["link"]
    assert written == {"loss": {"name": "columns", "granularity": 0.125, "rate": 0.1, "upto": 0.2}}
    longer = json_of(capsys, "run", "--resume", "runs/lossy-mild", "--rounds", "3")
    assert longer["rounds"] == 3
    assert main(["run", *TINY, "--link", "lossy"]) == 2
    assert (
        "link.name (--link): 'lossy' was found; link has no preset of that name."
        in capsys.readouterr().err
    )


def test_a_link_by_name_can_be_changed_and_is_shown(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *TINY, "--rounds", "1", "--link", "lq8", "--set", "link.clock.up=1e6"]) == 0
    shown = capsys.readouterr().out
    assert "on cpu; 8 bits a value; 20 Mbit/s down, 1 Mbit/s up" in shown
    assert "s over the link" in shown.splitlines()[-1]


def test_a_deadline_is_set_shown_and_listed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = [
        "--link",
        "mobile",
        "--set",
        "link.clock.up=[1e6, 1e3, 1e6]",
        "--set",
        "link.clock.deadline=1",
    ]
    assert main(["run", *TINY, "--rounds", "1", *slow, "--clients", "3", "--out", "late"]) == 0
    shown = capsys.readouterr().out
    assert "updates dropped after 1 s" in shown
    assert shown.splitlines()[-1].endswith("1.0 s over the link, 1 late update dropped")
    record = json.loads(Path("late/rounds.jsonl").read_text())
    assert (record["late"], record["late_clients"]) == (1, [1])
    assert json.loads(Path("late/summary.json").read_text())["late"] == 1
    assert main(["clients", "late"]) == 0
    assert "rounds late" in capsys.readouterr().out
    assert [one["late"] for one in json_of(capsys, "clients", "late")["clients"]] == [0, 1, 0]

    assert main(["list", "links", "mobile"]) == 0
    (row,) = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("clock.deadline")
    ]
    assert "Seconds of simulated time after which updates are dropped" in row
    assert main(["run", *TINY, *slow[:-1], "link.clock.deadline=0"]) == 2
    assert (
        "link.clock.deadline (--set): 0.0 was asked for; it must lie in (0, inf)"
        in capsys.readouterr().err
    )


def test_a_link_by_name_replaces_that_of_a_file(own: Path) -> None:
    from fedquilt.cli.run import RunRequest

    Path("base.toml").write_text("\n".join(BASE))

    def link(*assign: str, **flags: str) -> fq.Link:
        return (
            RunRequest(config="base.toml", assign=assign, **flags)
            .experiment("base.toml", None)
            .link
        )

    own_link = fq.Link(loss=fq.links.ColumnLoss(0.3), codec=fq.links.Codec(4))
    assert link() == own_link
    assert link(link="lq8") == fq.Link(codec=fq.links.Codec(8))
    assert link("link.loss.name=wireless", link="lq8") == fq.Link(
        fq.links.Wireless(), fq.links.Codec(8)
    )
    assert link("link.loss.name=wireless") == replace(own_link, loss=fq.links.Wireless())
    assert link("link.codec.keep=0.5") == replace(own_link, codec=fq.links.Codec(4, 0.5))
    assert link("link.name=sp10") == fq.Link(codec=fq.links.Codec(keep=0.1))


BASE = [
    'method = "fedavg"',
    'model = "mine.py:net"',
    'data = "mine.py:data"',
    'link = { loss = { name = "columns", rate = 0.3 }, codec = { bits = 4 } }',
]


def test_links_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json_of(capsys, "list", "links")
    assert listed["lossy-strong"]["settings"] == {
        "loss": {"name": "columns", "granularity": 0.125, "rate": 0.2, "upto": 0.3}
    }
    assert main(["list", "links", "lq8"]) == 0
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines() if line}
    assert {"loss.rate", "loss.bandwidth", "codec.keep", "clock.latency"} <= set(rows)
