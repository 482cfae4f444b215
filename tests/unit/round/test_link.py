"""Links: columns and what of them arrives, clocks, and what is refused."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.axes import Index, Positions
from fedquilt.errors import ConfigError
from fedquilt.family.cut import prefix
from fedquilt.round.federation import World
from fedquilt.round.link import LINKS, Transmission
from fedquilt.terms import Arch, Submodel
from tests.conftest import _traced
from tests.unit.family import cuts


def trip_of(family, client=0, round=0, up=True, submodel=None, seed=0) -> Transmission:
    job = fq.methods.api.Job(
        fq.methods.api.Client(client, fq.Budget(share=1.0), 1),
        submodel or prefix(family.whole),
        round,
    )
    return Transmission(World(family, seed), job, up=up)


# --- columns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "count"),
    [(0.125, 1), (0.25, 2), (0.35, 3), (0.375, 3), (0.5, 4), (0.75, 6), (1.0, 8)],
)
def test_a_member_has_a_column_for_every_eighth_of_the_whole_width(share, count):
    """A column is 0.125 of the *global* width (FedResCuE, A.3.4). The last may be narrower."""
    wide = fq.trace(
        lambda: torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Linear(64, 3)),
        torch.zeros(2, 4),
    )
    assert fq.links.ColumnLoss().count(wide.member(wide.fit(fq.Budget(share=share)))) == count
    assert fq.links.ColumnLoss(granularity=0.25).count(
        wide.member(wide.fit(fq.Budget(share=share)))
    ) == -(-count // 2)


@pytest.mark.parametrize("rate", [0.1, 0.3, 0.7])
def test_what_arrives_has_the_truncated_geometric_distribution(rate, perceptron):
    """Pr{n columns} = (1 − e)^n·e for n < N, and (1 − e)^N for all of them; chi-square over 4,000
    draws.
    """
    draws, count, loss = 4000, 8, fq.links.ColumnLoss(rate)
    seen = Counter(
        loss.arrived(trip_of(perceptron, client, round), count)
        for client in range(40)
        for round in range(100)
    )
    expected = [draws * (1 - rate) ** n * rate for n in range(count)] + [
        draws * (1 - rate) ** count
    ]
    chi = sum((seen[n] - want) ** 2 / want for n, want in enumerate(expected) if want > 5)
    assert sum(seen.values()) == draws
    assert chi < 27.9  # 99.95 % of chi-square with 8 degrees of freedom


@pytest.mark.parametrize(
    ("loss", "lost"),
    [
        (fq.links.ColumnLoss(0.05), 0.201),
        (fq.links.ColumnLoss(0.1, 0.2), 0.485),
        (fq.links.ColumnLoss(0.2, 0.3), 0.662),
        (fq.links.ColumnLoss(0.3), 0.725),
    ],
    ids=str,
)
def test_a_failed_column_ends_the_transmission_so_that_more_is_lost_than_the_rate(
    loss, lost, perceptron
):
    """The lost share of eight columns is 1 − ((1 − e) + … + (1 − e)^8) / 8, for a mean rate e."""
    rate = (loss.rate + (loss.upto or loss.rate)) / 2
    assert 1 - sum((1 - rate) ** n for n in range(1, 9)) / 8 == pytest.approx(lost, abs=1e-3)
    arrived = [
        loss.arrived(trip_of(perceptron, client, round), 8)
        for client in range(40)
        for round in range(100)
    ]
    assert 1 - sum(arrived) / 8 / len(arrived) == pytest.approx(lost, abs=0.015)  # 2.5 deviations


def test_rates_are_drawn_for_every_column(perceptron):
    """er uniform in [0, 1]: a column then fails half of the time, and columns independently of each
    other.
    """
    loss, draws = fq.links.ColumnLoss(0.0, 1.0), 4000
    seen = Counter(loss.arrived(trip_of(perceptron, round=round), 3) for round in range(draws))
    for count, part in enumerate((1 / 2, 1 / 4, 1 / 8, 1 / 8)):
        assert abs(seen[count] - part * draws) < 4 * (draws * part * (1 - part)) ** 0.5


def test_rates_may_be_the_clients_own(perceptron):
    loss = fq.links.ColumnLoss((0.0, 1.0, 0.5))
    assert [loss.rates(client, 0)[0] for client in range(6)] == [0.0, 1.0, 0.5, 0.0, 1.0, 0.5]
    assert {loss.arrived(trip_of(perceptron, 3, round), 8) for round in range(50)} == {8}
    assert {loss.arrived(trip_of(perceptron, 4, round), 8) for round in range(50)} == {0}


def test_draws_depend_on_everything_they_should(perceptron):
    """Seed, client, round, direction and scope."""
    whole, loss = prefix(perceptron.whole), fq.links.ColumnLoss(0.3)
    scoped = Submodel(whole.arch, whole.index, "base1/")

    def story(**changes):
        return [
            loss.arrived(trip_of(perceptron, **{"round": round, **changes}), 8)
            for round in range(40)
        ]

    stories = [
        story(),
        story(client=1),
        story(up=False),
        story(submodel=scoped),
        story(seed=1),
        [loss.arrived(trip_of(perceptron, round=round + 40), 8) for round in range(40)],
    ]
    assert len({tuple(one) for one in stories}) == len(stories)
    assert story() == stories[0]


@settings(deadline=None)
@given(st.data())
def test_the_first_columns_are_the_first_channels_in_the_submodels_own_order(data):
    """Prefixes, windows that wrap, random sets and class rows alike."""
    family = _traced("residual")
    sizes = family.layout.sizes
    index = {axis: data.draw(cuts.positions(sizes[axis])) for axis, _ in family.whole.widths}
    arch = Arch(tuple((axis, len(index[axis])) for axis, _ in family.whole.widths))
    rows = {"class": data.draw(cuts.positions(sizes["class"]))} if data.draw(st.booleans()) else {}
    submodel = Submodel(arch, Index({**index, **rows}))
    weights = family.cutter.gather(family.init(0), submodel, family.trainable)
    loss = fq.links.ColumnLoss(0.5)
    count, number = loss.count(family.member(arch)), data.draw(st.integers(0, 10**6))
    trip = trip_of(family, round=number, submodel=submodel)
    arrived = loss.arrived(trip, count)
    arrival = fq.Link(loss=loss).up(fq.methods.api.Payload(submodel, weights), trip)
    if not arrived:
        assert arrival.payload is None
        assert arrival.bytes == 0
        return
    reached = arrival.payload.submodel
    for axis, kept in submodel.index.items():
        first = list(kept)[: len(reached.index[axis])]
        assert list(reached.index[axis]) == first
        if axis == "class":
            assert reached.index[axis] == kept
        else:
            most = max(1, int(arrived * 0.125 * sizes[axis]))
            assert len(first) == (len(kept) if arrived == count else min(len(kept), most))
    picked = family.cutter.gather(family.init(0), reached, family.trainable)
    assert arrival.bytes == sum(value.nbytes for value in picked.values())
    # weights without a width come with the first column
    assert arrival.payload.weights.keys() == picked.keys()
    for name, value in picked.items():
        assert torch.equal(arrival.payload.weights[name], value)


def test_an_axis_that_is_not_named_is_whole(residual):
    part = residual.part(Submodel(residual.whole), 0.5)
    assert part.index == residual.member(residual.whole).nested(0.5).index
    window = Submodel(residual.whole, Index({"class": Positions.prefix(2)}))
    assert residual.part(window, 0.5).index["class"] == Positions.prefix(2)


# --- clocks -------------------------------------------------------------------------------------


def test_a_round_takes_as_long_as_its_slowest_client(perceptron, make_data, play):
    """Down, compute and up, by hand: 51 parameters of 8 bytes (fp64), 5 and 7 samples."""
    clock = fq.links.Clock(down=(1e3, 2e3), up=5e2, latency=0.25, compute=(1e3, 5e2))
    data, method = make_data(perceptron, (5, 7)), fq.methods.FedAvg()
    run = play(method, perceptron, data, link=fq.Link(clock=clock), rounds=1)
    bits, macs = 8 * 8 * 51, 3 * (4 * 6 + 6 * 3)
    first = 0.5 + bits / 1e3 + bits / 5e2 + 5 * macs / 1e3
    second = 0.5 + bits / 2e3 + bits / 5e2 + 7 * macs / 5e2
    assert run.records[0].link_seconds == pytest.approx(max(first, second))
    assert (
        run.history[0]["link_seconds"] == run.summary["link_seconds"] == run.records[0].link_seconds
    )
    # charged twice
    double = play(fq.methods.FedNova(), perceptron, data, link=fq.Link(clock=clock), rounds=1)
    assert double.records[0].link_seconds > run.records[0].link_seconds


def test_without_a_clock_records_have_no_time(perceptron, make_data, play):
    run = play(fq.methods.FedAvg(), perceptron, make_data(perceptron, (5,)), rounds=1)
    assert "link_seconds" not in run.history[0]
    assert "link_seconds" not in run.summary
    assert type(run.records[0]).from_dict(run.history[0]).link_seconds is None


@pytest.mark.parametrize(
    ("clock", "text"),
    [
        (fq.links.Clock(), "20 Mbit/s down, 10 Mbit/s up, 0.05 s each way"),
        (fq.links.Clock(1e9, 1.5e5), "1 Gbit/s down, 150 kbit/s up, 0.05 s each way"),
        (
            fq.links.Clock((50e6, 5e5), 300.0, 0.0),
            "50 Mbit/s, 500 kbit/s down, 300 bit/s up, 0 s each way",
        ),
    ],
)
def test_the_text_of_a_clock_has_units(clock, text):
    assert str(clock) == text


def test_a_round_without_clients_takes_no_time():
    assert fq.links.Clock().slowest({}) == 0.0


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fq.links.ColumnLoss(1.5),
            r"ColumnLoss: rate = 1\.5 was asked for; it must lie in \[0, 1\]",
        ),
        (lambda: fq.links.ColumnLoss((0.1, -1.0)), r"rate = -1\.0 was asked for"),
        (
            lambda: fq.links.ColumnLoss(()),
            r"rate = an empty list was asked for; one number for all",
        ),
        (
            lambda: fq.links.ColumnLoss(0.3, 0.2),
            r"upto = 0\.2 .* at least the rate, 0\.3,.*Set upto too, or upto to none",
        ),
        (lambda: fq.links.ColumnLoss((0.1, 0.3), 0.2), r"at least the rate, 0\.3"),
        (
            lambda: fq.links.ColumnLoss(granularity=0.0),
            r"granularity = 0\.0 was asked for; it must lie in \[0\.001, 1\]",
        ),
        (
            lambda: fq.links.Clock(down=0.0),
            r"Clock: down = 0\.0 was asked for; it must lie in \[1, 1e15\]",
        ),
        (lambda: fq.links.Clock(up=()), r"up = an empty list"),
        (lambda: fq.links.Clock(latency=-1.0), r"latency = -1\.0"),
        (lambda: fq.links.Wireless(power=0.0), r"Wireless: power = 0\.0 was asked for"),
        (lambda: fq.links.Wireless(distances=(10.0, 0.0)), r"distances = 0\.0 was asked for"),
        (
            lambda: fq.links.Wireless(fading="fog"),
            r"fading = 'fog' was asked for; it may be 'rayleigh', 'constant'",
        ),
        (
            lambda: fq.Link(loss=0.1),
            r"Link: loss = 0\.1 was asked for; fq\.links\.ColumnLoss\(0\.1\) or "
            r"fq\.links\.Wireless\(\) would "
            r"fit",
        ),
        (
            lambda: fq.Link(codec=8),
            r"Link: codec = 8 was asked for; fq\.links\.Codec\(bits=8\) would fit, None for none",
        ),
        (
            lambda: fq.Link(codec="lq8"),
            r"codec = 'lq8' was asked for; .* by its name, such as fq\.Link\.preset",
        ),
        (
            lambda: fq.Link(clock=1e6),
            r"Link: clock = 1000000\.0 was asked for; fq\.links\.Clock\(down=20e6, up=10e6\)",
        ),
        (lambda: fq.Link(loss=fq.links.ColumnLoss), r"loss = <class .*ColumnLoss'> was asked for"),
        (
            lambda: fq.Link.preset("lossy"),
            r"there is no link named 'lossy'.*Did you mean 'lossy-mild'",
        ),
    ],
)
def test_impossible_links_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("link", "message"),
    [
        (
            fq.Link(loss=fq.links.ColumnLoss((0.1,) * 4)),
            r"ColumnLoss: rate has 4 values for 6 clients; one for all, one a client",
        ),
        (fq.Link(loss=fq.links.ColumnLoss((0.1,) * 12)), r"rate has 12 values for 6 clients"),
        (
            fq.Link(loss=fq.links.Wireless(distances=(1.0,) * 5)),
            r"Wireless: distances has 5 values for 6 clients",
        ),
        (
            fq.Link(clock=fq.links.Clock(compute=(1.0,) * 4)),
            r"Clock: compute has 4 values for 6 clients",
        ),
        (
            "lossy-mild",
            r"run was given str 'lossy-mild' where a Link belongs, such as fq\.Link\.preset",
        ),
    ],
)
def test_lists_whose_length_does_not_divide_the_clients_are_refused_before_the_run(
    link, message, perceptron, make_data
):
    data, fleet = make_data(perceptron, (4,) * 6), fq.Fleet.of((1.0,), 6, 2)
    with pytest.raises(ConfigError, match=message):
        fq.prepare(fq.methods.FedAvg(), perceptron, data, fleet, link=link)


def test_shorter_lists_are_repeated(perceptron, make_data):
    data, fleet = make_data(perceptron, (4,) * 6), fq.Fleet.of((1.0,), 6, 2)
    for count in (1, 2, 3, 6):
        fq.prepare(
            fq.methods.FedAvg(),
            perceptron,
            data,
            fleet,
            link=fq.Link(loss=fq.links.ColumnLoss((0.1,) * count)),
        )


def test_the_text_of_a_link_describes_it():
    assert str(fq.Link()) == "nothing is lost or coded"
    assert str(fq.Link(fq.links.ColumnLoss((0.1, 0.2)), fq.links.Codec(8, 0.25, True))) == (
        "columns that fail, and end the transmission, at a rate of 0.1, 0.2; "
        "8 bits a value for 0.25 of the values, errors fed back"
    )
    assert len({str(link) for link in LINKS.values()}) == len(LINKS)


def test_a_run_is_continued_only_over_its_link(perceptron, make_data, tmp_path):
    parts = (
        fq.methods.FedAvg(),
        perceptron,
        make_data(perceptron, (4, 4)),
        fq.Fleet.of((1.0,), 2, 2),
    )
    fq.run(*parts, rounds=1, out=tmp_path / "run", link=fq.Link.preset("lossy-mild"))
    with pytest.raises(ConfigError, match=r"link\.loss\.rate: 0\.1 there, 0\.2 here"):
        fq.run(
            *parts, rounds=2, out=tmp_path / "run", resume=True, link=fq.Link.preset("lossy-strong")
        )
    fq.run(*parts, rounds=2, out=tmp_path / "run", resume=True, link=fq.Link.preset("lossy-mild"))


def test_lists_are_assigned_to_clients_as_tuples_are():
    assert fq.links.ColumnLoss([0.1, 0.2]) == fq.links.ColumnLoss((0.1, 0.2))
    assert hash(fq.links.Clock(down=[1e6, 2e6], latency=[0.1, 0.2])) == hash(
        fq.links.Clock(down=(1e6, 2e6), latency=(0.1, 0.2))
    )
    assert hash(fq.links.Wireless(distances=[100.0, 400.0])) == hash(
        fq.links.Wireless(distances=(100.0, 400.0))
    )
    with pytest.raises(ConfigError, match="an empty list"):
        fq.links.ColumnLoss([])
