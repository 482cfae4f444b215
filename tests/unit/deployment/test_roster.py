"""The roster of a deployment."""

from __future__ import annotations

import json
import pickle

import pytest

from fedquilt.deployment.roster import Roster
from fedquilt.errors import ConfigError, FormatError, RecordError
from fedquilt.fleets.fleet import Devices
from fedquilt.terms import Budget

KEYS = [f"ecdsa-sha2-nistp384 AAAA{letter}" for letter in "abc"]


def roster_of_three() -> Roster:
    roster = Roster()
    for number, key in enumerate(KEYS):
        roster.enrol(key, f"device {number}", Budget(share=1 / 2**number), 10 + number)
    return roster


def test_a_roster_survives_writing_and_reading(tmp_path):
    roster = roster_of_three()
    roster.save(tmp_path / "roster.json")
    assert Roster.load(tmp_path / "roster.json").entries == roster.entries
    assert [entry.client for entry in roster] == [0, 1, 2]


def test_a_missing_file_is_an_empty_roster(tmp_path):
    assert len(Roster.load(tmp_path / "roster.json")) == 0


def test_a_device_that_returns_keeps_its_number():
    roster = roster_of_three()
    since = roster.entries[1].since
    entry = roster.enrol(KEYS[1], "renamed", Budget(macs=1000), 99)
    assert (entry.client, entry.name, entry.size, entry.since) == (1, "renamed", 99, since)
    assert entry.budget == Budget(macs=1000)
    assert len(roster) == 3


def test_a_device_that_was_struck_off_cannot_return_and_its_number_is_not_used_again(tmp_path):
    roster = roster_of_three()
    roster.strike_off(2)
    roster.save(tmp_path / "roster.json")
    roster = Roster.load(tmp_path / "roster.json")
    with pytest.raises(ConfigError, match="was struck off"):
        roster.enrol(KEYS[2], "back", Budget(share=1), 5)
    new = roster.enrol("ecdsa-sha2-nistp384 AAAAd", "new", Budget(share=1), 5)
    assert new.client == 3
    with pytest.raises(ConfigError, match="client 9"):
        roster.strike_off(9)


def test_the_fleet_of_every_round_follows_from_the_roster():
    roster = roster_of_three()
    roster.enrol(KEYS[1], "device 1", Budget(share=0.25), 11, round=2)
    roster.enrol("ecdsa-sha2-nistp384 AAAAd", "new", Budget(macs=1000), 7, round=4)
    roster.enrol(KEYS[0], "device 0", Budget(share=1.0), 99, round=4)
    roster.enrol(KEYS[1], "device 1", Budget(share=0.5), 12, round=4)
    roster.enrol(KEYS[1], "device 1", Budget(share=0.75), 12, round=4)  # Before round 5 counted

    settings = roster.devices(Devices(cohort=1.0))
    fleet = settings.fleet(4)
    assert (settings.clients, settings.total, fleet.joined) == (3, 4, (4,))
    assert [fleet.budget(1, round, 0).share for round in (0, 1, 2, 3, 4, 9)] == [
        *(0.5, 0.5, 0.25, 0.25, 0.75, 0.75)
    ]
    assert fleet.budget(3, 4, 0) == Budget(macs=1000)
    assert [len(fleet.draw_cohort(round, 0)) for round in (0, 3, 4)] == [3, 3, 4]
    arrivals = roster.arrivals()
    assert [(a.client, a.size, a.is_new) for a in arrivals[2]] == [(1, 11, False)]
    assert [(a.client, a.size, a.is_new) for a in arrivals[4]] == [
        (0, 99, False),
        (1, 12, False),
        (3, 7, True),
    ]


def test_clients_are_numbered_in_the_order_in_which_they_join():
    roster = roster_of_three()
    roster.enrol("ecdsa-sha2-nistp384 AAAAd", "fourth", Budget(share=1.0), 5, round=6)
    # A damaged checkpoint has set the run back to round 3.
    fifth = roster.enrol("ecdsa-sha2-nistp384 AAAAe", "fifth", Budget(share=1.0), 5, round=3)
    fourth = roster.enrol("ecdsa-sha2-nistp384 AAAAd", "fourth", Budget(share=0.5), 5, round=3)
    assert (fourth.first_round, fifth.first_round) == (6, 6)
    assert roster.devices(Devices()).fleet(5).joined == (6, 6)


def changed(**values: object) -> bytes:
    plain = {"version": 2, "devices": [entry.to_dict() for entry in roster_of_three()]}
    plain["devices"][0] |= values
    return json.dumps(plain).encode()


def with_facts(**values: object) -> bytes:
    return changed(history=[{"round": 0, "budget": {"share": 1.0}, "size": 5} | values])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{" * 10_000,
        pickle.dumps({"version": 2, "devices": []}),
        b'{"version": 3, "devices": []}',
        b'{"version": 2, "devices": {}}',
        b'{"version": 2, "devices": [], "more": 1}',
        b'{"version": 2, "version": 2, "devices": []}',
        changed(client=1),
        changed(client=-1),
        changed(client=True),
        changed(client="0"),
        changed(key=KEYS[1]),
        changed(key="ssh-rsa AAAA"),
        changed(key="ecdsa-sha2-nistp384 " + "A" * 1000),
        changed(name=""),
        changed(name="two\nlines"),
        changed(name="x" * 101),
        changed(since=1),
        changed(history=[]),
        changed(history={}),
        changed(history=[1]),
        changed(history=[{"round": 0, "budget": {"share": 1.0}, "size": 5}] * 2),
        with_facts(size=0),
        with_facts(size=2**60),
        with_facts(size=1.5),
        with_facts(round=-1),
        with_facts(round=2**60),
        with_facts(round="0"),
        with_facts(more=1),
        with_facts(budget=1),
        with_facts(budget={}),
        with_facts(budget={"share": 2}),
        with_facts(budget={"share": float("nan")}),
        with_facts(budget={"share": "1"}),
        with_facts(budget={"speed": 1}),
        changed(more=1),
    ],
)
def test_files_that_are_no_roster_are_refused(text, tmp_path):
    with pytest.raises(FormatError):
        Roster.read(text)
    (tmp_path / "roster.json").write_bytes(text)
    with pytest.raises(RecordError, match=r"roster\.json cannot be read"):
        Roster.load(tmp_path / "roster.json")


def test_a_link_in_place_of_the_file_is_not_followed(tmp_path):
    roster_of_three().save(tmp_path / "other.json")
    (tmp_path / "roster.json").symlink_to(tmp_path / "other.json")
    with pytest.raises(RecordError, match="symbolic link"):
        Roster.load(tmp_path / "roster.json")
