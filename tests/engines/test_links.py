"""Every method over links that lose and code: every engine agrees in float64 to 1e-9."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.family.cut import prefix
from fedquilt.methods import METHODS, FedRolex, HeteroFL, SplitMix
from fedquilt.round.link import Transmission
from fedquilt.round.merge import Mean
from fedquilt.round.training.regions import Between
from tests.conftest import LOCAL, QUICK_METHODS, assert_same, with_local

OTHERS = sorted(set(LOCAL) - {"sequential"})
RAGGED = (7, 4, 9, 5, 8, 4)
SHARES = (1.0, 0.5, 0.25)
SHARP = fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
LOSSY = fq.links.ColumnLoss((0.1, 0.3), 0.4)

LINKS = {
    "lossy": fq.Link(loss=LOSSY),
    "lq4+sp50": fq.Link(codec=fq.links.Codec(bits=4, keep=0.5)),
    "everything": fq.Link(
        loss=LOSSY,
        codec=fq.links.Codec(bits=8, keep=0.5, feedback=True, down=True),
        clock=fq.links.Clock(),
    ),
}


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("name", QUICK_METHODS)
def test_every_method_over_every_link_gives_the_same_numbers(name, link, residual, play, make_data):
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data, fleet = (
        make_data(residual, RAGGED, labels=2),
        fq.Fleet.of(SHARES, 6, cohort=5, dynamic=True),
    )
    truth, *others = (
        play(method, residual, data, fleet=fleet, engine=engine, link=LINKS[link])
        for engine in ("sequential", *OTHERS)
    )
    for other in others:
        assert_same(truth, other)
        assert [r.link_seconds for r in other.records] == [r.link_seconds for r in truth.records]


ROTATED = fq.links.Codec(bits=4, keep=0.5, feedback=True, down=True, rotate=True)


@pytest.mark.parametrize(
    "link",
    [fq.Link(codec=fq.links.Codec(8, rotate=True)), fq.Link(loss=LOSSY, codec=ROTATED)],
    ids=["lq8", "everything"],
)
@pytest.mark.parametrize("name", ["fedrolex", "scaffold"])
def test_rotated_changes_are_the_same_on_every_engine(name, link, residual, play, make_data):
    method = with_local(METHODS[name](), batch_size=4, optimizer=SHARP)
    data = make_data(residual, RAGGED, labels=2)
    truth, *others = (
        play(method, residual, data, SHARES, engine=engine, link=link)
        for engine in ("sequential", *OTHERS)
    )
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("norm", ["tracked", "per_client", "post-own", "per_client-all"])
@pytest.mark.parametrize(
    "method",
    [HeteroFL(), FedRolex(shift=2), METHODS["sheterofl"].preset("released"), SplitMix(base=0.25)],
    ids=lambda method: type(method).__name__,
)
def test_statistics_and_several_payloads_give_the_same_numbers_over_every_link(
    method, norm, residual, play, make_data
):
    """Statistics are sent uncoded. Parts of what arrived may count more than once."""
    method, data = (
        with_local(method, batch_size=4, norm=norm),
        make_data(residual, RAGGED, labels=2),
    )
    truth, *others = (
        play(method, residual, data, SHARES, engine=engine, link=LINKS["everything"], rounds=3)
        for engine in ("sequential", *OTHERS)
    )
    for other in others:
        assert_same(truth, other)


def test_token_models_give_the_same_numbers_over_every_link(language, play, make_data):
    data, method = make_data(language, RAGGED, labels=3), with_local(FedRolex(), batch_size=4)
    truth, *others = (
        play(method, language, data, SHARES, engine=engine, link=LINKS["everything"], rounds=3)
        for engine in ("sequential", *OTHERS)
    )
    for other in others:
        assert_same(truth, other)


class TwoBranches(nn.Module):
    """Two branches whose channels are concatenated, and a classifier of all pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(1, 4, 3, 2), nn.Conv2d(1, 8, 3, 2)
        self.last, self.out = nn.Conv2d(12, 8, 1), nn.Linear(8 * 4, 4)

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.one(x), self.other(x)], 1)
        return self.out(torch.relu(self.last(torch.relu(both))).flatten(1))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("kind", ["heads", "branches"])
def test_base_nets_of_compound_axes_give_the_same_numbers_over_every_link(
    kind, link, language, play, make_data
):
    """If a dimension has several axes, positions count within the net of a scope, not the whole
    model.
    """
    family = language if kind == "heads" else fq.trace(TwoBranches, torch.zeros(2, 1, 6, 6))
    data, method = (
        make_data(family, RAGGED),
        with_local(METHODS["splitmix"](base=0.5), batch_size=4),
    )
    truth, *others = (
        play(method, family, data, (1.0, 0.5), engine=engine, link=LINKS[link], rounds=3)
        for engine in ("sequential", *OTHERS)
    )
    for other in others:
        assert_same(truth, other)
        assert other.per_client() == truth.per_client()


def test_a_part_of_a_base_net_arrives_at_its_positions(language):
    """The first columns of the scope's member are its nested net. Other columns stay unchanged."""
    family = language
    member = family.fit(fq.Budget(share=0.5))
    own = family.cutter.gather(family.init(1), prefix(member), family.trainable)
    base = fq.methods.api.Submodel(member, scope="base0/")
    part = family.part(base, 0.25)
    link = fq.Link(loss=fq.links.ColumnLoss(0.5, granularity=0.25))
    world, client = fq.methods.api.World(family), fq.methods.api.Client(0, fq.Budget(share=0.5), 4)
    jobs = [fq.methods.api.Job(client, base, round) for round in range(20)]
    arrivals = [
        link.up(fq.methods.api.Payload(base, own), Transmission(world, job, up=True))
        for job in jobs
    ]
    job, arrived = next(
        (j, a.payload)
        for j, a in zip(jobs, arrivals, strict=True)
        if a.payload and a.payload.submodel == part
    )
    expected = family.cutter.narrow(
        own, prefix(member).index, family.member(member).nested(0.25).index
    )
    torch.testing.assert_close(dict(arrived.weights), expected, rtol=0, atol=0)
    server = fq.methods.api.Server(
        0, {f"base0/{name}": torch.zeros_like(value) for name, value in own.items()}
    )
    fold = Mean(family.cutter).begin(server)
    fold.add(fq.methods.api.Update(job, (arrived,), 1))
    merged = fold.finish(server)[0]
    for name, value in own.items():
        there = Between(0, 0.25).mask(family.member(member), name)
        torch.testing.assert_close(
            merged[f"base0/{name}"], torch.where(there, value, 0.0), rtol=0, atol=0
        )


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize(
    "link",
    [
        fq.Link(loss=fq.links.ColumnLoss(0.0)),
        fq.Link(loss=fq.links.ColumnLoss((0.0, 0.0), 0.0)),
        fq.Link(codec=fq.links.Codec(bits=32, keep=1.0, feedback=True, down=True)),
        fq.Link(clock=fq.links.Clock()),
    ],
    ids=["error rate 0", "error rates 0 to 0", "32 bits, 100 %", "clock"],
)
@pytest.mark.parametrize("name", ["fedbn", "fedrolex", "local"])
def test_links_at_their_neutral_values_are_perfect_bit_for_bit(
    name, link, engine, residual, play, make_data
):
    method, data = with_local(METHODS[name](), batch_size=4), make_data(residual, RAGGED, labels=2)
    perfect, other = (
        play(method, residual, data, SHARES, engine=engine, link=one) for one in (fq.Link(), link)
    )
    assert_same(perfect, other, atol=0)


def test_away_from_their_neutral_values_links_change_something(residual, play, make_data):
    data, method = make_data(residual, RAGGED), with_local(HeteroFL(), batch_size=4)
    perfect = play(method, residual, data, SHARES)
    for link in LINKS.values():
        other = play(method, residual, data, SHARES, link=link)
        assert any(
            not torch.equal(other.server.weights[n], w) for n, w in perfect.server.weights.items()
        )
        assert other.records[0].bytes_up < perfect.records[0].bytes_up


def test_a_perfect_link_does_not_split_stacks(residual, play, make_data, monkeypatch):
    """Updates that arrive unchanged are summed before they are added to the fold."""
    from fedquilt.round.merge import Mean

    monkeypatch.setattr(Mean, "add", lambda *_: pytest.fail("a client was added by itself"))
    play(HeteroFL(), residual, make_data(residual, RAGGED), SHARES, engine="vectorized")


# --- engines that are shared --------------------------------------------------------------------


@pytest.mark.parametrize("engine", LOCAL)
def test_runs_that_share_an_engine_keep_their_links(engine, residual, make_data):
    data, method = make_data(residual, RAGGED), with_local(HeteroFL(), batch_size=4)

    def begin(engine, link):
        fleet = fq.Fleet.of(SHARES, 6, 6)
        return fq.prepare(method, residual, data, fleet, engine, precision="fp64", link=link)

    lossy = begin(engine, LINKS["lossy"])
    perfect = begin(lossy.engine, fq.Link())
    for rounds in (1, 2):
        lossy.train(rounds)
        perfect.train(rounds)
    for run in (lossy, perfect):
        assert_same(run, begin(engine, run.link).train(2), atol=0)


def test_nets_that_cannot_be_stacked_use_the_same_link(residual, make_data, play, monkeypatch):
    def refused(*_args):
        raise RuntimeError("Batching rule not implemented for aten::something. We could not")

    data, method = make_data(residual, RAGGED), with_local(HeteroFL(), batch_size=4)
    truth = play(method, residual, data, SHARES, link=LINKS["everything"])
    for module in ("stacked_step", "group_step"):
        monkeypatch.setattr(f"fedquilt.engines.vectorized.{module}.gradients", refused)
    fleet, how = fq.Fleet.of(SHARES, 6, 6), fq.Evaluation(every=0)
    run = fq.prepare(method, residual, data, fleet, precision="fp64", evaluation=how)
    run.engine.layout = "stack"
    run.train(1)  # over a perfect one
    again = fq.prepare(
        method, residual, data, fleet, run.engine, evaluation=how, link=LINKS["everything"]
    ).train(2)
    assert_same(truth, again)
