"""Fleets, budgets and cohorts."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.fleets.availability import Diurnal, Trace
from fedquilt.fleets.fleet import Devices
from fedquilt.fleets.presets import FIVE_SHARES, Income


def shares(fleet: fq.Fleet) -> list[float]:
    return [fleet.budget(client, 0, 0).share for client in range(fleet.num_clients)]


def test_shares_are_assigned_cyclically():
    fleet = fq.Fleet.of((1.0, 0.5, 0.25), 7, 2)
    assert shares(fleet) == [1, 0.5, 0.25, 1, 0.5, 0.25, 1]
    assert fleet.num_clients == 7
    assert [budget.share for budget in fleet.kinds] == [1, 0.5, 0.25]
    assert FIVE_SHARES == (1, 0.5, 0.25, 0.125, 0.0625)


def test_budgets_are_assigned_as_shares_are():
    small, large = fq.Budget(params=1e6), fq.Budget(memory=2e9, share=0.5)
    fleet = fq.Fleet.of([large, small, 1.0], 4, 1)
    assert fleet.kinds == (large, small, fq.Budget(share=1.0))
    assert fleet.counts == {large: 2, small: 1, fq.Budget(share=1.0): 1}


@pytest.mark.parametrize("portions", [{1.0: 1.0, 0.5: 1.0}, {1.0: 0.3, 0.5: 0.3}])
def test_portions_that_do_not_sum_to_1_are_pointed_out(portions, caplog):
    fleet = fq.Fleet.mixed(portions, 10)
    assert (
        f"portions of the fleet's budgets sum to {sum(portions.values()):g}, not to 1."
        in caplog.text
    )
    assert sorted(fleet.counts.values()) == [5, 5]


@pytest.mark.parametrize("portions", [{1.0: 0.3, 0.5: 0.7}, dict.fromkeys((1.0, 0.5, 0.25), 1 / 3)])
def test_portions_that_sum_to_1_give_no_warning(portions, caplog):
    fq.Fleet.mixed(portions, 10)
    fq.Fleet.of(Income(), 10)
    assert not caplog.text


def test_kinds_are_used_budgets_in_order_of_appearance():
    assert [b.share for b in fq.Fleet.mixed({1.0: 0, 0.5: 0.3, 0.25: 0.7}, 10).kinds] == [0.5, 0.25]
    twice = fq.Fleet.of([0.5, 1.0, 0.5], 6, 1)
    assert [b.share for b in twice.kinds] == [0.5, 1.0]
    assert shares(twice) == [0.5, 1, 0.5] * 2
    assert [b.share for b in fq.Fleet.of(FIVE_SHARES, 2, 1).kinds] == [1, 0.5]


def test_a_fleet_is_compact():
    """A byte count, not a guess: four bytes a client, whatever its budget."""
    fleet = fq.Fleet.of(FIVE_SHARES, 342_477, 200)
    assert fleet.which.nbytes == 4 * 342_477
    assert len(fleet.kinds) == 5
    assert not any(
        isinstance(value, (list, tuple)) and len(value) > 5 for value in vars(fleet).values()
    )


def test_the_cohort_is_a_tenth_by_default():
    assert fq.Fleet.of((1.0,), 100).cohort == 10
    assert fq.Fleet.of((1.0,), 3).cohort == 1
    assert fq.Fleet.of((1.0,), 100, 7).cohort == 7


@pytest.mark.parametrize(
    ("sample", "size"), [(0.05, 5), (0.2, 20), (0.001, 1), (1.0, 100), (1, 1), (100, 100)]
)
def test_a_cohort_is_a_number_or_a_part(sample, size):
    assert fq.Fleet.of((1.0,), 100, sample).cohort == size
    assert fq.Fleet.mixed({1.0: 1}, 100, sample).cohort == size


@pytest.mark.parametrize("sample", [0.0, -0.1, 1.5, 10.0, float("nan")])
def test_a_part_that_is_none_is_refused(sample):
    with pytest.raises(
        ConfigError, match=r"a cohort of .* was asked for; write a number of clients, or a part"
    ):
        fq.Fleet.of((1.0,), 100, sample)


def test_proportions_need_not_sum_to_one_and_serve_every_client():
    fleet = fq.Fleet.mixed({1.0: 1, 0.5: 2}, 9)
    assert shares(fleet) == [1.0] * 3 + [0.5] * 6
    assert fq.Fleet.mixed({1.0: 1 / 3, 0.5: 1 / 3, 0.25: 1 / 3}, 10).num_clients == 10


@pytest.mark.parametrize(
    "portions", [{}, {1.0: 0.0}, {1.0: 1e308, 0.5: 1e308}, {1.0: -1, 0.5: 2}, {1.0: float("nan")}]
)
def test_proportions_of_nothing_are_refused(portions):
    with pytest.raises(ConfigError, match="portion"):
        fq.Fleet.mixed(portions, 10)


def test_no_shares_are_refused():
    with pytest.raises(ConfigError, match="at least one share or budget"):
        fq.Fleet.of((), 10)


@pytest.mark.parametrize("shares", [0.5, ["a"], [None], fq.Budget(share=0.5)])
def test_shares_are_a_list_of_numbers_or_budgets(shares):
    with pytest.raises(
        ConfigError,
        match=r"a fleet of .* was asked for; a list of shares in \(0, 1\] or of budgets",
    ):
        fq.Fleet.of(shares, 12)
    assert fq.Fleet.of(np.array([1, 0.5]), 4).counts == fq.Fleet.of((1, 0.5), 4).counts


@pytest.mark.parametrize("sample", [0, -1, 4])
def test_a_cohort_the_fleet_does_not_have_is_refused(sample):
    with pytest.raises(ConfigError, match=f"a cohort of {sample} was asked for; the fleet has 3"):
        fq.Fleet.of((1.0,), 3, sample)
    with pytest.raises(ConfigError, match="cohort"):
        fq.Fleet.mixed({1.0: 1.0}, 3, sample)


def test_cohorts_are_distinct_sorted_and_change_with_round_and_seed():
    fleet = fq.Fleet.of((1.0,), 30, 10)
    cohorts = [fleet.draw_cohort(round, seed) for round, seed in ((0, 0), (1, 0), (0, 1))]
    for cohort in cohorts:
        assert cohort == sorted(set(cohort))
        assert len(cohort) == 10
    assert len(set(map(tuple, cohorts))) == 3
    assert fleet.draw_cohort(0, 0) == cohorts[0]


def test_every_client_is_as_likely_to_take_part():
    fleet = fq.Fleet.of((1.0,), 10, 3)
    met = Counter(id for round in range(1000) for id in fleet.draw_cohort(round, 0))
    assert all(abs(count - 300) < 60 for count in met.values())  # four standard deviations of 14.5
    assert len(met) == 10


def test_dynamic_budgets_are_redrawn_every_round_and_fixed_ones_are_not():
    fleet = fq.Fleet.of((1.0, 0.5), 4, 2, dynamic=True)
    drawn = Counter(fleet.budget(1, round, 0).share for round in range(200))
    assert set(drawn) == {1.0, 0.5}
    assert abs(drawn[1.0] - 100) < 30
    assert fleet.budget(1, 3, 0) == fleet.budget(1, 3, 0)
    fixed = fq.Fleet.of((1.0, 0.5), 4, 2)
    assert {fixed.budget(1, round, 0).share for round in range(20)} == {0.5}


def test_dynamic_budgets_keep_the_fleets_proportions():
    """HeteroFL's dynamic setting draws rates by their proportions, each client anew each round."""
    fleet = fq.Fleet.mixed({1.0: 0.1, 0.5: 0.9}, 100, 10, dynamic=True)
    drawn = Counter(
        fleet.budget(client, round, 0).share for client in range(100) for round in range(10)
    )
    assert abs(drawn[1.0] - 100) < 40  # four standard deviations of 9.5
    assert fleet.budget(0, 0, 0) == fleet.budget(0, 0, 0)
    assert {fleet.budget(0, round, 0).share for round in range(60)} == {1.0, 0.5}


def test_a_client_knows_its_budget_and_how_much_data_it_has():
    client = fq.Fleet.of((1.0, 0.5), 4, 2).client(3, round=0, seed=0, size=17)
    assert client == fq.methods.api.Client(3, fq.Budget(share=0.5), 17)


# --- who is there -------------------------------------------------------------------------------


def trace(folder, text: str, period: int = 0) -> Trace:
    file = folder / "trace.csv"
    file.write_text(text)
    return Trace(str(file), period)


def test_only_available_clients_take_part_and_all_of_them_if_they_are_few(tmp_path):
    stays = trace(tmp_path, "client,start,end\n3,0,2\n5,1,4\n7,1,4\n")
    fleet = fq.Fleet.of((1.0,), 10, 2, availability=stays)
    assert fleet.draw_cohort(0, 0) == [3]
    assert set(fleet.draw_cohort(1, 0)) < {3, 5, 7}
    assert fleet.draw_cohort(2, 0) == fleet.draw_cohort(3, 0) == [5, 7]
    assert {tuple(fleet.draw_cohort(1, seed)) for seed in range(40)} == {(3, 5), (3, 7), (5, 7)}


def test_a_round_without_clients_has_an_empty_cohort_and_a_finished_trace_is_an_error(tmp_path):
    fleet = fq.Fleet.of(
        (1.0,), 10, 2, availability=trace(tmp_path, "client,start,end\n3,1,2\n4,5,6\n")
    )
    assert [fleet.draw_cohort(round, 0) for round in range(6)] == [[], [3], [], [], [], [4]]
    fleet.check(6)
    with pytest.raises(
        ConfigError,
        match=r"7 rounds were asked for; in .*trace.csv no client is available after 6 of them",
    ):
        fleet.check(7)
    fq.Fleet.of((1.0,), 10, 2).check(10**9)


def test_a_stay_without_an_end_lasts_and_a_period_repeats(tmp_path):
    lasting = fq.Fleet.of(
        (1.0,), 10, 2, availability=trace(tmp_path, "client,start,end\n3,1,\n4,0,2\n")
    )
    assert [lasting.draw_cohort(round, 0) for round in (0, 1, 2, 10**9)] == [[4], [3, 4], [3], [3]]
    lasting.check(10**9)
    daily = fq.Fleet.of(
        (1.0,), 10, 2, availability=trace(tmp_path, "client,start\n3,1\n", period=3)
    )
    assert [daily.draw_cohort(round, 0) for round in range(6)] == [[], [3], [3], [], [3], [3]]
    daily.check(10**9)


def test_stays_that_overlap_count_a_client_once(tmp_path):
    fleet = fq.Fleet.of(
        (1.0,),
        10,
        5,
        availability=trace(tmp_path, "client,start,end\n2,0,5\n2,3,8\n2,8,9\n2,1,2\n1,4,5\n"),
    )
    assert [fleet.draw_cohort(round, 0) for round in (0, 3, 4, 7, 8)] == [
        [2],
        [2],
        [1, 2],
        [2],
        [2],
    ]
    assert fleet.presence.count(4) == 2


def test_fingerprints_differ_if_other_clients_are_available(tmp_path):
    def found(text, period=0):
        return trace(tmp_path, "client,start,end\n" + text, period).presence(10, 0).fingerprint

    stays = "3,1,2\n4,0,2\n"
    others = (stays, "4,1,2\n3,0,2\n", "3,1,3\n4,0,2\n", "3,1,2\n4,0,\n", "3,1,2\n")
    assert len({*map(found, others), found(stays, 2), found(stays, 3)}) == 7
    assert found(stays) == found("4,0,2\n3,1,2\n")
    patterns = [Diurnal().presence(10, seed).fingerprint for seed in (0, 0, 1)]
    assert patterns[0] == patterns[1] != patterns[2]


def test_cohorts_of_earlier_releases_are_drawn():
    presence = Diurnal(24, 8, 0.5).presence(1000, 0)
    assert presence.draw(3, 8, 12345) == [185, 278, 573, 654, 733, 844, 914, 979]


def test_all_clients_of_a_trace_that_are_available_are_drawn(tmp_path):
    """Compare with the clients of each round found by a loop over all stays."""
    fleet = fq.Fleet.of((1.0,), 40, 40, availability=trace(tmp_path, stays := _random_stays()))
    rows = [tuple(map(int, row.split(","))) for row in stays.splitlines()[1:]]
    for round in range(max(end for _, _, end in rows)):
        there = sorted({client for client, start, end in rows if start <= round < end})
        assert fleet.draw_cohort(round, 0) == there
        assert fleet.presence.count(round) == len(there)


def _random_stays() -> str:
    from fedquilt import noise

    rows = ["client,start,end"]
    for row in range(150):
        client, start, length = (
            noise.key(5, row, site) % size for site, size in enumerate((40, 60, 9))
        )
        rows.append(f"{client},{start},{start + length + 1}")
    return "\n".join(rows)


def test_all_available_clients_are_equally_likely_to_take_part(tmp_path):
    rows = "".join(f"{client},{client % 3},9\n" for client in range(10))
    fleet = fq.Fleet.of((1.0,), 10, 3, availability=trace(tmp_path, "client,start,end\n" + rows))
    met = Counter(id for seed in range(1000) for id in fleet.draw_cohort(8, seed))
    assert len(met) == 10
    assert all(abs(count - 300) < 60 for count in met.values())


def test_in_a_daily_pattern_all_clients_are_available_equally_long():
    fleet = fq.Fleet.of((1.0,), 300, 300, availability=Diurnal(period=24, awake=8), seed=1)
    awake = Counter()
    for round in range(24):
        cohort = fleet.draw_cohort(round, 0)
        assert cohort == fleet.draw_cohort(round + 24, 0)
        assert abs(len(cohort) - 100) < 40  # all around the world: always about a third
        awake.update(cohort)
    assert set(awake.values()) == {8}
    assert len(awake) == 300


def test_days_that_begin_together_leave_rounds_without_clients():
    fleet = fq.Fleet.of((1.0,), 10, 3, availability=Diurnal(period=4, awake=2, spread=0))
    assert [len(fleet.draw_cohort(round, 0)) for round in range(8)] == [3, 3, 0, 0, 3, 3, 0, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("client,start,end\n12,0,1\n", r"line 2: there is no client 12; the fleet has 10"),
        (
            "client,start,end\n1,5,5\n",
            r"line 2: a stay from 5 to 5 was found; it ends after it starts",
        ),
        ("client,start,end\n1,x,5\n", r"line 2: start = 'x' was found; it is a whole number"),
        ("client,start,end\n1,-1,5\n", "start = '-1' was found"),
        ("client,start,end\n1,0,99999999999999999999\n", "end = '9+' was found"),
        ("client,end\n1,5\n", "column 'start' is missing"),
        ("client,start,end,weight\n1,0,5,2\n", "column 'weight' is not known"),
        ("client,start,end\n1,0\n", "line 2: it does not have 3 values"),
        ("client,start,end\n1,0,1,1\n", "line 2: it does not have 3 values"),
        ("client,start,end\n", "a header and no rows"),
        ("", "column 'client' is missing"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(tmp_path, text, found):
    with pytest.raises(ConfigError, match=found):
        fq.Fleet.of((1.0,), 10, 2, availability=trace(tmp_path, text))


def test_a_trace_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"from 'nowhere.csv'; it could not be read"):
        fq.Fleet.of((1.0,), 10, 2, availability=Trace("nowhere.csv"))
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="could not be read"):
        fq.Fleet.of((1.0,), 10, 2, availability=Trace(str(tmp_path / "binary.csv")))


def test_stays_beyond_the_period_and_empty_patterns_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="is within the period of 3"):
        fq.Fleet.of(
            (1.0,), 10, 2, availability=trace(tmp_path, "client,start,end\n1,2,4\n", period=3)
        )
    for wrong in ({"awake": 0}, {"awake": 25}, {"spread": 1.5}, {"period": 0}):
        with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = "):
            Diurnal(**wrong)


# --- settings -----------------------------------------------------------------------------------


def test_devices_are_a_fleet_as_settings():
    fleet = Devices(clients=100, cohort=10, budgets={"1.0": 0.2, "0.5": 0.4, "0.25": 0.4}).fleet(
        500
    )
    assert Counter(shares(fleet)) == {1.0: 20, 0.5: 40, 0.25: 40}
    assert fleet.cohort == 10
    assert not fleet.dynamic
    by_preset = Devices(budgets=Income(), dynamic=True).fleet(200)
    assert (by_preset.num_clients, by_preset.cohort, by_preset.dynamic) == (200, 20, True)
    assert Devices().fleet(5).counts == {fq.Budget(share=share): 1 for share in FIVE_SHARES}


def test_more_devices_than_parts_of_the_data_are_refused():
    with pytest.raises(
        ConfigError, match="10 clients were asked for; the data is partitioned among 5"
    ):
        Devices(clients=10).fleet(5)


def test_devices_may_be_there_by_a_trace_or_a_pattern(tmp_path):
    file = trace(tmp_path, "client,start,end\n3,0,\n").file
    assert Devices(cohort=2, availability=file).fleet(10).draw_cohort(0, 0) == [3]
    assert Devices(cohort=2, availability=Trace(file)).fleet(10).draw_cohort(0, 0) == [3]
    named, given = (
        Devices(cohort=50, availability="diurnal"),
        Devices(cohort=50, availability=Diurnal(24, 8)),
    )
    assert named.fleet(50, seed=3).draw_cohort(7, 0) == given.fleet(50, seed=3).draw_cohort(7, 0)
    with pytest.raises(ConfigError, match="named 'diurnall'"):
        Devices(availability="diurnall").fleet(10)


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ({"clients": 0}, r"clients = 0 was asked for; it must lie in \[1, inf\)"),
        ({"cohort": 0}, r"cohort = 0 .* \[1, inf\)"),
        ({"cohort": 1.5}, r"cohort = 1.5 .* \(0, 1\]"),
        ({"budgets": {"1.5": 1.0}}, r"a share of '1.5' were asked for; shares lie in \(0, 1\]"),
        ({"budgets": {"half": 1.0}}, "a share of 'half' were asked for"),
    ],
)
def test_settings_that_cannot_be_are_refused_as_they_are_made(wrong, found):
    with pytest.raises(ConfigError, match=found):
        Devices(**wrong)


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0, -0.5, float("nan")])
def test_a_share_of_nothing_is_refused(share):
    with pytest.raises(BudgetError, match="must be a number above 0"):
        fq.Budget(share=share)


def test_a_share_above_one_is_refused():
    with pytest.raises(BudgetError, match=r"1\.5 was asked for; shares lie in \(0, 1\]"):
        fq.Budget(share=1.5)


def test_an_empty_budget_is_refused_and_a_full_one_reads_well():
    with pytest.raises(BudgetError, match="at least one of share="):
        fq.Budget()
    assert str(fq.Budget(share=0.5, params=1e6)) == "share 0.5 params 1e+06"


@pytest.mark.parametrize("count", [0, 2.5, "3", True])
def test_a_fleet_has_a_whole_number_of_clients(count):
    for made in (lambda: fq.Fleet.of((1.0,), count), lambda: fq.Fleet.mixed({1.0: 1.0}, count)):
        with pytest.raises(ConfigError, match=f"a fleet of {count!r} clients was asked for"):
            made()


def test_the_number_of_earlier_clients_counts_those_that_were_drawn(tmp_path):
    """Split-Mix's algorithm 2: the cycle that all share goes on by one a client."""
    file = tmp_path / "one-a-round.csv"
    file.write_text(
        "client,start,end\n" + "\n".join(f"{round % 8},{round},{round + 1}" for round in range(24))
    )
    fleet = fq.Fleet.of((0.125,), 8, 8, availability=Trace(str(file), 24))
    turns = [
        fleet.client(id, round, 0, 4, place).turn
        for round in range(48)
        for place, id in enumerate(fleet.draw_cohort(round, 0))
    ]
    assert turns == list(range(48))
    everybody = fq.Fleet.of((0.125,), 8, 3)
    assert [
        everybody.client(0, round, 0, 4, place).turn for round in (0, 2) for place in (0, 2)
    ] == [0, 2, 6, 8]
