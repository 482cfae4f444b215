"""Devices that are struck off a run, or return with other samples."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("flwr")
from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.roster import ROSTER, Roster
from fedquilt.deployment.server import ServeRequest, Status, changed, enrol, write_request
from fedquilt.deployment.serving import strike_off
from fedquilt.errors import ConfigError
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Budget

KEYS = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(3)]


class Courier:
    """Devices that introduce themselves at once."""

    def __init__(self, roster: Roster, enrolments: dict[str, Enrolment]) -> None:
        self.roster, self.enrolments = roster, enrolments

    def nodes(self) -> dict[str, int]:
        """Return the node of every key."""
        return {key: number for number, key in enumerate(self.enrolments)}

    def enrol(self, keys: list[str]) -> dict[str, Enrolment]:
        """Return what devices say."""
        return {key: self.enrolments[key] for key in keys}


@pytest.fixture
def begun(tmp_path):
    """Return the folder of a run with three devices, and what these say."""
    devices = {
        key: Enrolment(f"device {number}", Budget(share=0.5), 20) for number, key in enumerate(KEYS)
    }
    request = ServeRequest("run1", 3, 60.0, keys=tuple(KEYS))
    write_request(tmp_path, Experiment.of({"method": "fedavg", "data": "digits"}), request)
    enrol(tmp_path, Courier(Roster(), devices), request)  # type: ignore[arg-type]
    return tmp_path, devices, request


def test_a_device_that_was_struck_off_is_refused_when_it_returns(begun):
    folder, devices, request = begun
    strike_off(folder, [1])
    roster = Roster.load(folder / ROSTER)
    assert [entry.is_struck_off for entry in roster] == [False, True, False]
    enrol(folder, Courier(roster, devices), request)  # type: ignore[arg-type]
    status = Status.load(folder)
    assert status is not None
    assert status.text == "2 of 3 devices are ready. device 1 was struck off"
    assert [entry.is_struck_off for entry in Roster.load(folder / ROSTER)] == [False, True, False]


@pytest.mark.parametrize(
    ("clients", "reason"),
    [([3], "the roster has 3 clients"), ([0, 1, 2], "nobody would be left of the 3 clients")],
)
def test_clients_that_cannot_be_struck_off_are_refused(clients, reason, begun):
    with pytest.raises(ConfigError, match=reason):
        strike_off(begun[0], clients)
    assert not any(entry.is_struck_off for entry in Roster.load(begun[0] / ROSTER))


def test_a_device_that_returns_with_other_samples_costs_nobody_else(begun):
    folder, devices, request = begun
    devices[KEYS[2]] = replace(devices[KEYS[2]], size=21)
    enrol(folder, Courier(Roster.load(folder / ROSTER), devices), request)  # type: ignore[arg-type]
    status = Status.load(folder)
    assert status is not None
    assert status.text.startswith("2 of 3 devices are ready. client 2 (device 2) has returned")
    assert Roster.load(folder / ROSTER).entries[2].size == 20
    assert changed(Roster.load(folder / ROSTER).entries[0], devices[KEYS[0]]) == ""
