"""docs/fleets.md: settings and files are read, Python runs, and the table is complete."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import fedquilt.runs.experiment  # noqa: F401  it knows the tables of names
from fedquilt.config.reading import read
from fedquilt.config.tables import Problem
from fedquilt.fleets.availability import Trace
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.from_csv import FromCsv
from fedquilt.fleets.presets import FLEETS

PAGE = (Path(__file__).parents[2] / "docs" / "fleets.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_settings_make_a_fleet(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("day.csv").write_text("client,start,end\n1,0,12\n")
    problems: list[Problem] = []
    devices: Devices = read(Devices, tomllib.loads(block)["fleet"], "fleet", problems)
    assert not problems
    fleet = devices.fleet(100)
    assert fleet.num_clients == (devices.total or 100)
    assert len(fleet.draw_cohort(0, 0)) <= fleet.cohort


def test_files_are_read(tmp_path: Path) -> None:
    devices, trace = blocks("csv")
    (tmp_path / "devices.csv").write_text(devices)
    kinds, which = FromCsv(str(tmp_path / "devices.csv")).assign(100)
    assert [(which == place).sum() for place in range(len(kinds))] == [60, 30, 10]
    assert (kinds[0].memory, kinds[0].macs, kinds[1].memory, kinds[2].share) == (
        2e9,
        76e6,
        512 * 2**20,
        1,
    )
    (tmp_path / "trace.csv").write_text(trace)
    presence = Trace(str(tmp_path / "trace.csv")).presence(10, 0)
    assert [presence.count(round) for round in (0, 12, 24, 36, 60, 10**6)] == [1, 2, 1, 0, 1, 1]


def test_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile("\n".join(blocks("python")), "fleets.md", "exec"), {})
    assert "MemberSummary(share=" in capsys.readouterr().out


def test_every_preset_is_on_the_page() -> None:
    listed = re.findall(r"^\| `(\w+)` \| `(\w+)\(", PAGE, re.MULTILINE)
    assert listed == [(name, kind.__name__) for name, kind in FLEETS.items()]
