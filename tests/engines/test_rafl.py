"""RaFL on every engine and over links: float64, two rounds, 1e-9; and every payload of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest

import fedquilt as fq
from fedquilt.engines import Vectorized
from fedquilt.methods import RaFL
from fedquilt.round.link import Arrival, Link, Transmission
from fedquilt.round.training.server import ServerTraining
from fedquilt.terms import Payload
from tests.conftest import assert_same
from tests.pairs import limits, normed_pairs, plain_pairs, trained_pairs

RAGGED = (7, 4, 9, 5, 8, 4)  # With batches of 4: tails of 3, 0, 1, 1, 0 and 0
NUM_PUBLIC = 13
LOCAL = fq.LocalTraining(
    batch_size=4, optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3)
)
FEW_STEPS = ServerTraining(fq.optimizers.SGD(lr=0.05), batch_size=5, steps=6, check_every=3)
METHODS = {
    "a": RaFL(local=LOCAL),
    "b": RaFL(local=LOCAL, distil=True, server_training=FEW_STEPS),
    "c": RaFL(local=LOCAL, transfer=True),
    "in turn": RaFL(local=LOCAL, order="in_turn"),
    "released": RaFL.preset("released", local=LOCAL, distil=True, server_training=FEW_STEPS),
    "kept momentum": RaFL(local=replace(LOCAL, keep_optimizer=True)),
    "private limit": RaFL(local=LOCAL, limit="private"),
    "private alone": RaFL(local=LOCAL, keep_knowledge=False),
}
LINKS = {
    "perfect": fq.Link(),
    "lossy-mild": fq.Link.preset("lossy-mild"),
    "four bits": fq.Link(codec=fq.links.Codec(bits=4, feedback=True)),
    "both": fq.Link(
        fq.links.ColumnLoss(0.1, 0.3),
        fq.links.Codec(bits=4, feedback=True, down=True),
        fq.links.Clock(),
    ),
}
SLOW = [
    pytest.param(
        name, link, marks=() if link == "perfect" or name in ("a", "c") else pytest.mark.slow
    )
    for name in METHODS
    for link in LINKS
]
ENGINES = {
    "vectorized": lambda data: "vectorized",
    **{
        f"recorded-{layout}": lambda data, layout=layout: Vectorized(
            data, precision="fp64", record=True, layout=layout
        )
        for layout in ("alone", "grouped", "stack")
    },
    "ray": lambda data: "ray",
}


def played(
    name: str, family: fq.Family, engine, make_data, play, link: Link = LINKS["perfect"]
) -> fq.Run:
    """Return two rounds of all settings with limits that change from round to round."""
    data = make_data(family, RAGGED, labels=2, public=NUM_PUBLIC)
    chosen = engine(data) if callable(engine) else engine
    fleet = fq.Fleet.of(limits(family), 6, 5, dynamic=True)
    return play(METHODS[name], family, data, fleet=fleet, engine=chosen, link=link)


@pytest.mark.parametrize(("name", "link"), SLOW)
def test_two_rounds_are_the_same_on_sequential_and_vectorized(name, link, make_data, play):
    runs = [
        played(name, plain_pairs(), engine, make_data, play, LINKS[link])
        for engine in ("sequential", "vectorized")
    ]
    assert_same(*runs)
    assert [record.bytes_first for record in runs[0].records] == [
        record.bytes_first for record in runs[1].records
    ]


@pytest.mark.parametrize(
    "engine",
    [
        pytest.param(name, marks=() if name == "vectorized" else pytest.mark.slow)
        for name in ENGINES
    ],
)
@pytest.mark.parametrize(
    "name",
    [
        "a",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("b", "c", "in turn", "released")),
    ],
)
def test_nets_with_norms_are_the_same_on_every_engine(name, engine, make_data, play):
    family = normed_pairs()
    assert_same(
        played(name, family, "sequential", make_data, play),
        played(name, family, ENGINES[engine], make_data, play),
    )


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["tracked", "post"])
@pytest.mark.parametrize("name", ["a", "b", "in turn"])
def test_norm_policies_give_the_same_numbers_on_every_engine(norm, name, make_data, play):
    family, method = normed_pairs(), METHODS[name].with_local(norm=norm)
    data = make_data(family, RAGGED, labels=2, public=NUM_PUBLIC)
    fleet = fq.Fleet.of(limits(family), 6, 5, dynamic=True)
    assert_same(
        *(
            play(method, family, data, fleet=fleet, engine=engine)
            for engine in ("sequential", "vectorized")
        )
    )


# --- every payload ------------------------------------------------------------------------------


@dataclass
class Listed:
    """Names of the weights in every payload of a run: (round, client, names), by direction."""

    down: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)
    up: list[tuple[int, int, frozenset[str]]] = field(default_factory=list)


@contextmanager
def listing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listed]:
    """Record the names of weights that clients receive, before the link, and that they send."""
    from fedquilt.engines.simulation import Simulation

    found = Listed()
    payload, up = Simulation.payload, Link.up

    def handed(self, server, job, learner) -> Payload:
        sent = payload(self, server, job, learner)
        assert not sent.slots
        assert not sent.extras or self._is_public
        if not self._is_public:
            found.down.append((job.round, job.client.id, frozenset((*sent.weights, *sent.first))))
        return sent

    def returned(self, sent: Payload, trip: Transmission, *rest) -> Arrival:
        assert not sent.slots
        assert not sent.extras
        found.up.append(
            (trip.job.round, trip.job.client.id, frozenset((*sent.weights, *sent.first)))
        )
        return up(self, sent, trip, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Simulation, "payload", handed)
        patch.setattr(Link, "up", returned)
        yield found


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("link", ["perfect", "both"])
@pytest.mark.parametrize("name", ["a", "b", "in turn"])
def test_no_payload_has_a_private_weight(name, link, engine, make_data, play, monkeypatch):
    """Settings (a) and (b): devices draw their private nets themselves."""
    with listing(monkeypatch) as found:
        run = played(name, plain_pairs(), engine, make_data, play, LINKS[link])
    own = [entry for entry in found.up if entry[0] < run.server.round]
    assert len(found.down) == 10
    assert len(own) >= 10
    knowledge = frozenset(run.server.weights)
    assert {names for _, _, names in (*found.down, *found.up)} == {knowledge}
    assert all(record.bytes_first == 0 for record in run.records)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("link", ["perfect", "both"])
def test_private_weights_are_only_in_the_first_download_of_each_client(
    link, engine, make_data, play, monkeypatch
):
    """Setting (c) with constant limits. Over a link that loses and codes, the first download is
    complete.
    """
    family = trained_pairs()
    data = make_data(family, RAGGED)
    fleet = fq.Fleet.of(limits(family), 6, 4)
    with listing(monkeypatch) as found:
        run = play(
            METHODS["c"], family, data, fleet=fleet, engine=engine, rounds=4, link=LINKS[link]
        )
    knowledge = frozenset(run.server.weights)
    assert {names for _, _, names in found.up} == {knowledge}
    seen: set[int] = set()
    for _, client, names in sorted(found.down, key=lambda entry: entry[0]):
        private = frozenset(family.layout.weights(("small", "big")[client % 2]))
        assert names == (knowledge if client in seen else knowledge | private)
        seen.add(client)
    first = sum(8 * family.count(family.at(("small", "big")[client % 2]).whole) for client in seen)
    assert sum(record.bytes_first for record in run.records) == first


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("link", LINKS)
def test_ray_gives_the_numbers_of_the_other_engines(name, link, make_data, play):
    """Bytes are those of `sequential`, whose payloads have been listed."""
    runs = [
        played(name, plain_pairs(), engine, make_data, play, LINKS[link])
        for engine in ("sequential", "ray")
    ]
    assert_same(*runs)
    assert [record.bytes_first for record in runs[0].records] == [
        record.bytes_first for record in runs[1].records
    ]
