"""The papers' fleets, number by number, and fleets of real devices."""

from __future__ import annotations

from collections import Counter

import pytest

import fedquilt as fq
from fedquilt import fleets
from fedquilt.errors import ConfigError
from fedquilt.fleets.budgets import Budgets
from fedquilt.fleets.presets import FLEETS


def dealt(budgets: Budgets, num_clients: int, seed: int = 0) -> list[fq.Budget]:
    kinds, which = budgets.assign(num_clients, seed)
    assert len(which) == num_clients
    return [kinds[place] for place in which]


def shares(budgets: Budgets, num_clients: int, seed: int = 0) -> list[float]:
    return [budget.share for budget in dealt(budgets, num_clients, seed)]


@pytest.mark.parametrize(
    "name", [name for name in FLEETS if name not in ("csv", "by_net", "given")]
)
@pytest.mark.parametrize("num_clients", [1, 3, 100])
def test_every_preset_assigns_budgets_to_any_number_of_clients_repeatably(name, num_clients):
    preset = FLEETS[name]()
    assert dealt(preset, num_clients, 3) == dealt(preset, num_clients, 3)
    fleet = fq.Fleet.of(preset, num_clients, 1, seed=3)
    assert sum(fleet.counts.values()) == num_clients
    assert preset == FLEETS[name]()  # values, as settings are


def test_listed_budgets_are_assigned_cyclically_or_in_portions():
    kinds = (fq.Budget(macs=9), fq.Budget(share=0.5))
    assert [budget.macs for budget in dealt(fleets.Given(kinds), 4)] == [9, None, 9, None]
    assert [budget.macs for budget in dealt(fleets.Given(kinds, (0.75, 0.25)), 4)] == [
        9,
        9,
        9,
        None,
    ]
    with pytest.raises(ConfigError, match="has 2 budgets and 1 portions"):
        fleets.Given(kinds, (1.0,))


# --- FedRolex -----------------------------------------------------------------------------------


def test_fedrolex_uniform_has_a_fifth_of_each_share():
    assert Counter(shares(fleets.Uniform(), 100)) == {
        1: 20,
        1 / 2: 20,
        1 / 4: 20,
        1 / 8: 20,
        1 / 16: 20,
    }


def test_fedrolex_figure_7_income():
    assert Counter(shares(fleets.Income(), 100)) == {
        1.0: 6,
        0.5: 10,
        0.25: 11,
        0.125: 18,
        0.0625: 55,
    }
    assert Counter(shares(fleets.Income(), 1000)) == {
        1.0: 60,
        0.5: 100,
        0.25: 110,
        0.125: 180,
        0.0625: 550,
    }


@pytest.mark.parametrize("rho", [0.0, 0.1, 0.3, 0.5, 0.9, 1.0])
def test_fedrolex_figure_3_two_levels(rho):
    """rho = 1: all clients have the largest model; rho = 0: all have the smallest, 1/16."""
    drawn = Counter(shares(fleets.TwoLevel(rho), 100))
    assert drawn[1.0] == round(100 * rho)
    assert drawn[1 / 16] == 100 - round(100 * rho)
    assert len(fq.Fleet.of(fleets.TwoLevel(rho), 100).kinds) == (1 if rho in (0, 1) else 2)


# --- Split-Mix ----------------------------------------------------------------------------------


@pytest.mark.parametrize("num_clients", [4, 10, 30, 50, 100])
def test_splitmix_quarters_follow_the_formula(num_clients):
    """R_k = (1/2)^floor(4k/K), k from 0; the other way round by default: the first clients, and
    domains, are poor.
    """
    formula = [0.5 ** (4 * k // num_clients) for k in range(num_clients)]
    assert shares(fleets.Quarters(ascending=False), num_clients) == formula
    poor_first = shares(fleets.Quarters(), num_clients)
    assert poor_first == sorted(poor_first)
    assert poor_first == [1 / 8 * 2 ** (4 * k // num_clients) for k in range(num_clients)]


def test_splitmix_quarters_are_the_default_groups_of_figure_11():
    assert shares(fleets.Quarters(), 50) == shares(fleets.Groups("8-4-2-1"), 50)


@pytest.mark.parametrize(
    ("divisors", "expected"),
    [
        ("8-4-2-1", (1 / 8, 1 / 4, 1 / 2, 1)),
        ("8-1-1-1", (1 / 8, 1, 1, 1)),
        ("8-2-1-1", (1 / 8, 1 / 2, 1, 1)),
        ("8-2-2-1", (1 / 8, 1 / 2, 1 / 2, 1)),
        ("8-4-4-1", (1 / 8, 1 / 4, 1 / 4, 1)),
        ("8-4-8/3-2", (1 / 8, 1 / 4, 3 / 8, 1 / 2)),
        ("4-2-4/3-1", (1 / 4, 1 / 2, 3 / 4, 1)),
    ],
)
def test_splitmix_figure_11_groups(divisors, expected):
    assert shares(fleets.Groups(divisors), 8) == [share for share in expected for _ in range(2)]


def test_splitmix_figure_11_steps():
    assert shares(fleets.Step(), 8) == shares(fleets.Groups("4-2-4/3-1"), 8)
    assert shares(fleets.Step(0.125), 8) == shares(fleets.Groups("8-4-8/3-2"), 8)


def test_splitmix_log_normal_in_eight_bins():
    """The Digits setting, 50 clients: what the released code's `ln0.5_0.4` gives, ascending."""
    drawn = shares(fleets.LogNormal(), 50)
    counts = {0.125: 8, 0.25: 14, 0.375: 11, 0.5: 7, 0.625: 4, 0.75: 3, 0.875: 1, 1.0: 2}
    assert Counter(drawn) == counts
    assert drawn == sorted(drawn)


def test_splitmix_log_normal_concentrates_around_0_45():
    """Appendix A.5: in fine bins, the mean of the capacities (cut off at 1) is 0.45."""
    fine = shares(fleets.LogNormal(bins=1000), 20_000)
    assert sum(fine) / len(fine) == pytest.approx(0.45, abs=0.01)


# --- FedResCuE and RaFL -------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [(0.25, 0.5, 0.75, 1.0), (0.2, 0.35, 0.5, 0.75, 1.0)])
def test_fedrescue_clients_draw_their_share_from_the_cluster(cluster):
    drawn = Counter(shares(fleets.Clusters(cluster), 2000))
    assert set(drawn) == set(cluster)
    # four standard deviations of 19
    assert all(abs(count - 2000 / len(cluster)) < 80 for count in drawn.values())
    assert shares(fleets.Clusters(cluster), 20, seed=3) != shares(
        fleets.Clusters(cluster), 20, seed=5
    )
    assert fleets.Clusters().shares == (0.25, 0.5, 0.75, 1.0)


@pytest.mark.parametrize("mean", [48.01e6, 79.70e6, 13.57e6, 15.49e6])
def test_rafl_limits_have_the_mean_of_table_3_and_one_model_for_all_uses_75_percent(mean):
    limits = [budget.macs for budget in dealt(fleets.FlopLimited(mean), 100)]
    assert sum(limits) / len(limits) == pytest.approx(mean)
    assert min(limits) / mean == pytest.approx(0.75)
    assert fleets.FlopLimited().mean == 79.70e6


def test_flop_limits_give_members_within_them(residual):
    whole = residual.cost(residual.whole).macs
    fleet = fq.Fleet.of(fleets.FlopLimited(whole / 2), 10)
    for budget in fleet.kinds:
        assert residual.cost(residual.fit(budget)).macs <= budget.macs
    assert len({residual.fit(budget) for budget in fleet.kinds}) > 1


# --- real devices -------------------------------------------------------------------------------


def from_csv(folder, text: str) -> fleets.FromCsv:
    file = folder / "devices.csv"
    file.write_text(text)
    return fleets.FromCsv(str(file))


def test_devices_are_read_with_their_units(tmp_path):
    devices = from_csv(
        tmp_path,
        "name, count, share, macs, params, memory\n"
        "phone, 3, , 76M, , 2GB\n"
        "watch, 2, 0.25, , , 512 MiB\n"
        "board, 1, , , 1.5e6, 3.5gb\n"
        "server, 1, 1, 2G, 11M, 64000000000\n",
    )
    phone, watch = fq.Budget(macs=76e6, memory=2e9), fq.Budget(share=0.25, memory=512 * 2**20)
    board = fq.Budget(params=1.5e6, memory=3.5e9)
    server = fq.Budget(share=1, macs=2e9, params=11e6, memory=64e9)
    assert dealt(devices, 7) == [phone] * 3 + [watch] * 2 + [board, server]
    assert devices.num_devices == 7
    assert Counter(dealt(devices, 70)) == {phone: 30, watch: 20, board: 10, server: 10}


def test_a_device_without_a_count_is_one(tmp_path):
    assert dealt(from_csv(tmp_path, "\ufeffshare\n1\n0.5\n\n"), 2) == [
        fq.Budget(share=1),
        fq.Budget(share=0.5),
    ]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "name,share,link_speed\na,1,5\n",
            "column 'link_speed' is not known; the settings' table link.clock",
        ),
        ("name,share,bandwidth\na,1,5\n", "settings' table link.clock"),
        (
            "name,share,colour\na,1,red\n",
            r"column 'colour' is not known\. Columns of such a file: name, count, share, ",
        ),
        ("share,share\n1,1\n", "column 'share' is there twice"),
        (
            "name,share\nwatch,2\n",
            r"line 2 \(watch\): a share of 2.0 was asked for; shares lie in \(0, 1\]",
        ),
        ("name,share\nwatch,\n", r"line 2 \(watch\): a budget needs at least one of share="),
        ("name,count\nwatch,2\n", "a budget needs at least one of share="),
        (
            "name,memory\na,1GB\nwatch,two\n",
            r"line 3 \(watch\): memory = 'two' was found; write it like 2GB",
        ),
        ("name,memory\na,1.2.3GB\n", "memory = '1.2.3GB' was found"),
        ("macs\n76MB\n", "macs = '76MB' was found; write it like 76M"),
        ("share\n1k\n", "share = '1k' was found; write it like 0.25"),
        ("share,count\n1,2.5\n", "a count of '2.5' was found; it is a whole number"),
        ("share,count\n1,0\n", "a portion above 0"),
        ("share\n", "a header and no rows"),
    ],
)
def test_a_broken_table_of_devices_is_refused_with_its_line(tmp_path, text, found):
    with pytest.raises(ConfigError, match=found):
        from_csv(tmp_path, text).assign(10)


# --- settings that cannot be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (
            lambda: fleets.Uniform((1.0, 2.0)),
            r"shares = 2.0 was asked for; it must lie in \(0, 1\]",
        ),
        (lambda: fleets.Clusters((0.0,)), "shares = 0.0"),
        (lambda: fleets.TwoLevel(rho=1.2), "rho = 1.2"),
        (
            lambda: fleets.Income((0.5, 0.5)),
            "was given 2 portions; it needs one for each of its shares",
        ),
        (
            lambda: fleets.Groups("8-x"),
            "groups '8-x' were asked for; write what each group's share divides",
        ),
        (lambda: fleets.Groups("8-0"), "groups '8-0'"),
        (lambda: fleets.Groups("1/2"), "Each must be 1 or above"),
        (lambda: fleets.Groups(""), "groups ''"),
        (lambda: fleets.Groups("1e999999999"), "groups '1e999999999'"),
        (lambda: fleets.LogNormal(bins=10**15), "bins = "),
        (lambda: fleets.LogNormal(sigma=1e-9, scale=0.01), "leave no capacity above 1/8"),
        (
            lambda: fleets.Step(0.25, 5),
            "5 groups in steps of 0.25 were asked for; the last would have a share of 1.25",
        ),
        (
            lambda: fq.Fleet.of({1.0: 0.2, 0.5: 0.8}, 4),
            "Fleet.of was given the portions .* Fleet.mixed takes portions",
        ),
        (
            lambda: fq.Fleet.mixed({1.0: "a"}, 4),
            "a portion of 'a' of the clients was asked for 1.0",
        ),
        (lambda: fleets.LogNormal(sigma=0), "sigma = 0"),
        (lambda: fleets.FlopLimited(spread=1.0), "spread = 1.0"),
    ],
)
def test_impossible_fleets_are_refused(make, found):
    with pytest.raises(ConfigError, match=found):
        make()
