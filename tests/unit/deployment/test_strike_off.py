"""Devices that are struck off a run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("flwr")
from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.registrar import Registrar
from fedquilt.deployment.roster import ROSTER, Roster
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import ServeRequest, Status, enrol, write_request
from fedquilt.deployment.serving import strike_off
from fedquilt.errors import ConfigError
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Budget

KEYS = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(3)]


class Courier:
    """Devices that introduce themselves at once."""

    def __init__(self, enrolments: dict[str, Enrolment]) -> None:
        self.enrolments = enrolments

    def sessions(self) -> dict[str, str]:
        """Return the same session for every key."""
        return dict.fromkeys(self.enrolments, "first")

    def enrol(self, keys: Sequence[str]) -> dict[str, Enrolment]:
        """Return what devices say."""
        return {key: self.enrolments[key] for key in keys}


@pytest.fixture
def begun(tmp_path):
    """Return the folder of a run with three devices, and what these say."""
    devices = {
        key: Enrolment(f"device {number}", Budget(share=0.5), 20) for number, key in enumerate(KEYS)
    }
    request = ServeRequest("run1", 3, RoundRules(60.0), keys=tuple(KEYS))
    write_request(tmp_path, Experiment.of({"method": "fedavg", "data": "digits"}), request)
    enrol(tmp_path, Registrar(Courier(devices)), Roster(), request)
    return tmp_path, devices, request


def test_a_device_that_was_struck_off_is_refused_when_it_returns(begun):
    folder, devices, request = begun
    strike_off(folder, [1])
    roster = Roster.load(folder / ROSTER)
    assert [entry.is_struck_off for entry in roster] == [False, True, False]
    enrol(folder, Registrar(Courier(devices)), roster, request)
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
