"""Devices that introduce themselves while a run goes on."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest

from fedquilt.deployment.enrolment import Enrolment
from fedquilt.deployment.registrar import Registrar
from fedquilt.deployment.roster import Roster
from fedquilt.terms import Budget

KEYS = [f"ecdsa-sha2-nistp384 AAAA{number}" for number in range(3)]


class Courier:
    """Devices that are online, each with a session and what it says. None: it does not reply."""

    def __init__(self) -> None:
        self.online: dict[str, str] = {}
        self.words: dict[str, Enrolment | None] = {
            key: Enrolment(f"device {number}", Budget(share=0.5), 20)
            for number, key in enumerate(KEYS)
        }
        self.asked: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def sessions(self) -> dict[str, str]:
        """Return the sessions of devices that are online."""
        return dict(self.online)

    def enrol(self, keys: Sequence[str]) -> dict[str, Enrolment]:
        """Return what devices say, once the gate is open."""
        self.asked += keys
        self.gate.wait(10)
        said = {key: self.words[key] for key in keys}
        return {key: words for key, words in said.items() if words is not None}


@pytest.fixture
def courier() -> Courier:
    courier = Courier()
    courier.online = {KEYS[0]: "a", KEYS[1]: "a"}
    return courier


def roster_of(registrar: Registrar) -> Roster:
    roster = Roster()
    for key, enrolment in registrar.introduced.items():
        assert enrolment.budget is not None
        roster.enrol(key, enrolment.name, enrolment.budget, enrolment.size)
    return roster


def test_devices_are_asked_once_in_each_session(courier):
    registrar = Registrar(courier)
    registrar.look()
    registrar.look()
    assert sorted(courier.asked) == KEYS[:2]
    assert registrar.changes(roster_of(registrar)) == {}
    courier.online[KEYS[1]] = "b"  # It was away.
    registrar.look()
    assert sorted(courier.asked) == [KEYS[0], KEYS[1], KEYS[1]]


def test_new_devices_and_new_facts_are_changes(courier):
    registrar = Registrar(courier)
    registrar.look()
    roster = roster_of(registrar)
    courier.online = {KEYS[0]: "b", KEYS[2]: "a"}
    courier.words[KEYS[0]] = Enrolment("device 0", Budget(share=0.25), 20)
    registrar.look()
    assert set(registrar.changes(roster)) == {KEYS[0], KEYS[2]}


def test_keys_that_are_not_allowed_are_not_asked(courier):
    Registrar(courier, lambda: [KEYS[1]]).look()
    assert courier.asked == [KEYS[1]]


def test_a_device_that_fails_is_asked_again_in_the_same_session(courier):
    registrar = Registrar(courier)
    registrar.look()
    roster = roster_of(registrar)
    courier.words[KEYS[0]] = Enrolment("device 0", Budget(share=0.5), 33)
    registrar.look()
    assert registrar.changes(roster) == {}
    registrar.ask_again(KEYS[0])
    registrar.look()
    assert set(registrar.changes(roster)) == {KEYS[0]}


def test_devices_that_cannot_take_part_and_those_struck_off_are_refused(courier):
    registrar = Registrar(courier)
    registrar.look()
    roster = roster_of(registrar)
    roster.strike_off(roster.entries[1].client)
    courier.online[KEYS[2]] = "a"
    courier.words[KEYS[2]] = Enrolment("device 2", None, failed="no samples")
    registrar.look()
    assert registrar.changes(roster) == {}
    struck = roster.entries[1]
    assert registrar.refused == {
        KEYS[2]: "device 2 cannot take part: no samples",
        struck.key: f"{struck.name} was struck off",
    }


def test_a_device_without_a_reply_delays_one_look_and_is_heard_later(courier):
    registrar = Registrar(courier)
    registrar.look()
    roster = roster_of(registrar)
    courier.online[KEYS[2]] = "a"
    courier.gate.clear()
    registrar.look(0.05)
    assert registrar.changes(roster) == {}
    courier.gate.set()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(5)
    assert set(registrar.changes(roster)) == {KEYS[2]}


def test_a_device_that_says_nothing_is_asked_again(courier):
    words = courier.words[KEYS[0]]
    courier.words[KEYS[0]] = None
    registrar = Registrar(courier)
    registrar.look()
    assert set(registrar.introduced) == {KEYS[1]}
    assert words is not None
    courier.words[KEYS[0]] = replace(words, size=5)
    registrar.look()
    for _ in range(100):
        if KEYS[0] in registrar.introduced:
            break
        threading.Event().wait(0.01)
    assert registrar.introduced[KEYS[0]].size == 5
