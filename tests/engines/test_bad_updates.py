"""Updates that do not follow from their job: the fold of every engine refuses all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.axes import Index, Positions
from fedquilt.engines.ray import worker
from fedquilt.engines.ray.parcel import pack, shared_objects
from fedquilt.methods import DSFL, HeteroFL, Scaffold
from fedquilt.round.budgets import planned
from fedquilt.round.fold import Fold
from fedquilt.round.update_checks import checked_fold
from fedquilt.terms import Job, Payload, Submodel, Update
from tests.conftest import with_local
from tests.deployed import deployed

Change = Callable[[Update], Update]
ENGINES = ("sequential", "vectorized", "ray", "flower")
SHARES = (1.0, 0.5)


@dataclass
class Recording(Fold):
    """A fold that stores what engines add to it, as (updates, stacked weights or None)."""

    checked: Any
    calls: list[tuple[list[Update], Any]] = field(default_factory=list)

    @property
    def fold(self):
        return self.checked.fold

    def add(self, update):
        self.calls.append(([update], None))
        self.checked.add(update)

    def add_stack(self, updates, stacked):
        self.calls.append((list(updates), list(stacked)))
        self.checked.add_stack(updates, stacked)

    def join(self, other):
        self.checked.join(other)

    def finish(self, server):
        return self.checked.finish(server)


def scenario(name: str, family, make_data) -> fq.Run:
    """Return a run before its first round, with two members and clients of two classes each."""
    sgd = fq.optimizers.SGD(lr=0.1)
    link = fq.Link()
    method = with_local(Scaffold(), batch_size=4, optimizer=sgd)
    if name == "columns":
        link = fq.Link(loss=fq.links.ColumnLoss(0.3, 0.5))
        method = with_local(HeteroFL(), batch_size=4, optimizer=sgd)
    elif name == "extras":
        method = with_local(DSFL(), batch_size=4, optimizer=sgd)
    data = make_data(family, (7, 4, 9, 5), labels=2)
    return fq.prepare(
        method, family, data, fq.Fleet.of(SHARES, 4, 4), "sequential", link=link, precision="fp64"
    )


def jobs_of(run: fq.Run) -> list[Job]:
    cohort = [
        run.fleet.client(client, 0, 0, run.engine.size(client), client) for client in range(4)
    ]
    return [
        Job(client, submodel, 0)
        for client in cohort
        for submodel in planned(run.method, run.server, client, run.world)
    ]


def recorded(engine: str, run: fq.Run, monkeypatch) -> list[tuple[list[Update], Any]]:
    """Return what an engine adds to the fold in the first round."""
    federation, server, jobs = run.federation, run.server, jobs_of(run)
    fold = Recording(checked_fold(federation, server, jobs))
    if engine == "ray":
        pytest.importorskip("ray")
        monkeypatch.setattr(worker, "checked_fold", lambda *_: fold)
        monkeypatch.setattr(worker, "_get", lambda parcel: parcel)
        shared = shared_objects(federation)
        world = replace(run.world, family=run.world.family.seeded(run.world.seed))
        sendable = replace(federation, world=world, received=federation.initial)
        parcels = [
            pack((run.engine.data, "fp64", {}), {}),
            pack(sendable, {}),
            pack(replace(server, memory={}), shared),
        ]
        chunk = pack((jobs, {}), shared)
        result = worker.Worker(1, False).train(*([parcel] for parcel in parcels), chunk, "cpu")
        assert not isinstance(result, (str, fq.errors.FedquiltError)), result
        return fold.calls
    data = run.engine.data
    if engine == "vectorized":
        trainer: Any = fq.engines.Vectorized(data, precision="fp64")
    elif engine == "flower":
        trainer = deployed(run, run.world.family, data)
    else:
        trainer = run.engine
    outcome = trainer.train(federation, server, jobs, fold)
    assert not outcome.missing
    return fold.calls


def replayed(run: fq.Run, calls: Sequence[tuple[list[Update], Any]], change: Change) -> None:
    """Fold the calls of an engine again, with the first update of the first call changed."""
    fold = checked_fold(run.federation, run.server, jobs_of(run))
    for number, (updates, stacked) in enumerate(calls):
        if number == 0:
            updates = [change(updates[0]), *updates[1:]]
            stacked = None if stacked is None else restacked(updates, stacked)
        if stacked is None:
            fold.add(updates[0])
        else:
            fold.add_stack(updates, stacked)
    fold.finish(run.server)


def restacked(updates: list[Update], stacked: Any) -> Any:
    """Stack the weights of updates again, as far as their shapes allow it."""
    try:
        return [
            {
                name: torch.stack([update.sent[0].weights[name] for update in updates])
                for name in updates[0].sent[0].weights
            }
        ]
    except (RuntimeError, TypeError, KeyError, AttributeError, IndexError):
        return stacked


# --- changes --------------------------------------------------------------------------------------


def payload_change(change: Callable[[Payload], Any]) -> Change:
    return lambda update: replace(update, sent=(change(update.sent[0]),))


def weights_change(change: Callable[[dict[str, Any]], Any]) -> Change:
    return payload_change(lambda payload: replace(payload, weights=change(dict(payload.weights))))


def weight(name: str, change: Callable[[Any], Any]) -> Change:
    return weights_change(lambda weights: {**weights, name: change(weights[name])})


def submodel_change(change: Callable[[Submodel], Submodel]) -> Change:
    return payload_change(lambda payload: replace(payload, submodel=change(payload.submodel)))


def axis(name: str, positions: Positions) -> Change:
    return submodel_change(
        lambda submodel: replace(submodel, index=Index({**submodel.index, name: positions}))
    )


def slots_change(change: Callable[[dict[str, Any]], Any]) -> Change:
    return payload_change(
        lambda payload: replace(
            payload, slots=change({slot: dict(values) for slot, values in payload.slots.items()})
        )
    )


def extras_change(change: Callable[[dict[str, Any]], Any]) -> Change:
    return payload_change(lambda payload: replace(payload, extras=change(dict(payload.extras))))


def job_change(**changes: Any) -> Change:
    return lambda update: replace(update, job=replace(update.job, **changes))


def client_change(**changes: Any) -> Change:
    def change(update: Update) -> Update:
        client = replace(update.job.client, **changes)
        return replace(update, job=replace(update.job, client=client))

    return change


def spoiled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor.view(-1)[-1] = value
        return tensor

    return change


FIRST, LAST, BIAS = "first.weight", "last.weight", "first.bias"
HIDDEN = "first.out"  # Axis of the hidden channels
NAMES = {
    "a weight is missing": weights_change(lambda w: {k: v for k, v in w.items() if k != FIRST}),
    "the last weight is missing": weights_change(
        lambda w: {k: v for k, v in w.items() if k != LAST}
    ),
    "a foreign name": weights_change(lambda w: {**w, "foreign": w[FIRST]}),
    "a name with a scope": weights_change(lambda w: {**w, f"net/{FIRST}": w[FIRST]}),
    "a renamed weight": weights_change(
        lambda w: {("x" if k == BIAS else k): v for k, v in w.items()}
    ),
    "a number as name": weights_change(lambda w: {**w, 3: w[FIRST]}),
    "no weights": weights_change(lambda w: {}),
    "a list of weights": weights_change(lambda w: list(w.values())),
    "None as weights": weights_change(lambda w: None),
    "None as a weight": weight(FIRST, lambda v: None),
    "a list as a weight": weight(FIRST, lambda v: v.tolist()),
    "an array as a weight": weight(FIRST, lambda v: v.numpy()),
    "a number as a weight": weight(BIAS, lambda v: 1.0),
}
SHAPES = {
    "a further dimension": weight(FIRST, lambda v: v[None]),
    "a trailing dimension": weight(BIAS, lambda v: v[:, None]),
    "a row less": weight(FIRST, lambda v: v[1:]),
    "a column less": weight(FIRST, lambda v: v[:, 1:]),
    "a row more": weight(FIRST, lambda v: torch.cat([v, v[:1]])),
    "transposed": weight(FIRST, lambda v: v.T),
    "flat": weight(FIRST, lambda v: v.flatten()),
    "a scalar": weight(BIAS, lambda v: v.sum()),
    "empty": weight(BIAS, lambda v: v[:0]),
    "one to broadcast": weight(FIRST, lambda v: v[:1]),
    "all ones to broadcast": weight(FIRST, lambda v: v[:1, :1]),
    "twice as wide": weight(LAST, lambda v: torch.cat([v, v], 1)),
}
DTYPES = {
    f"a weight of {dtype}": weight(FIRST, lambda v, dtype=dtype: v.to(dtype))
    for dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.uint8,
        torch.complex128,
    )
}
VALUES = {
    f"{value} in {name}": weight(name, spoiled(value))
    for name in (FIRST, LAST)
    for value in (math.nan, math.inf, -math.inf)
}
POSITIONS = {
    "other positions": axis(HIDDEN, Positions.window(1, 5, 6)),
    "a shifted window": axis(HIDDEN, Positions.window(3, 6, 7)),
    "a position twice": axis(HIDDEN, Positions(((0, 5), (0, 1)))),
    "a reversed order": axis(HIDDEN, Positions.chosen(range(5, -1, -1))),
    "a position beyond": axis(HIDDEN, Positions(((1, 7),))),
    "a far position": axis(HIDDEN, Positions(((10**9, 10**9 + 6),))),
    "a negative position": axis(HIDDEN, Positions(((-1, 5),))),
    "an unknown axis": axis("nowhere", Positions.prefix(2)),
    "no positions": axis(HIDDEN, Positions(())),
    "another scope": submodel_change(lambda s: replace(s, scope="net/")),
    "another member": submodel_change(
        lambda s: replace(s, arch=replace(s.arch, widths=((HIDDEN, 2),)))
    ),
    "another variant": submodel_change(lambda s: replace(s, arch=replace(s.arch, variant="deep"))),
}
ROWS = {
    "no class rows": axis("class", Positions(())),
    "class rows in descending order": axis("class", Positions.chosen([1, 0])),
    "a class row twice": axis("class", Positions(((0, 1), (0, 1)))),
    "a class row beyond": axis("class", Positions(((0, 1), (3, 4)))),
    "a far class row": axis("class", Positions(((0, 1), (10**9, 10**9 + 1)))),
    "many class rows": axis("class", Positions(((0, 10**12),))),
    "a negative class row": axis("class", Positions(((-1, 1),))),
    "more class rows than the weights": axis("class", Positions.prefix(3)),
    "fewer class rows than the weights": axis("class", Positions.prefix(1)),
}
NUMBERS = {
    **{
        f"steps {value!r}": lambda update, value=value: replace(update, steps=value)
        for value in (-1, 0, 1, 10**9, 2.0, True, None, "2", math.nan)
    },
    **{
        f"times {value!r}": lambda update, value=value: replace(update, times=value)
        for value in (0, 2, -1, 1.0, True, None, 10**18)
    },
    **{
        f"effective steps {value!r}": lambda update, value=value: replace(
            update, effective_steps=value
        )
        for value in (0.0, -1.0, 2.0, math.nan, math.inf, None, 1e-300)
    },
}
JOBS = {
    "another client": client_change(id=3),
    "an unknown client": client_change(id=10**6),
    "another budget": client_change(budget=fq.Budget(share=0.25)),
    "no samples": client_change(size=0),
    "more samples": client_change(size=10**6),
    "negative samples": client_change(size=-7),
    "another turn": client_change(turn=9),
    "another round": job_change(round=1),
    "a round before": job_change(round=-1),
}
SENT = {
    "two payloads": lambda update: replace(update, sent=update.sent * 2),
    "a list of payloads": lambda update: replace(update, sent=list(update.sent)),
    "a dictionary as payload": lambda update: replace(update, sent=({},)),
    "None as payload": lambda update: replace(update, sent=(None,)),
    "None as payloads": lambda update: replace(update, sent=None),
}
SLOTS = {
    "no slots": slots_change(lambda s: {}),
    "an unknown slot": slots_change(lambda s: {**s, "momentum": s["control"]}),
    "a slot without a weight": slots_change(
        lambda s: {"control": {k: v for k, v in s["control"].items() if k != BIAS}}
    ),
    "a slot with a foreign name": slots_change(
        lambda s: {"control": {**s["control"], "x": s["control"][BIAS]}}
    ),
    "a slot of another shape": slots_change(
        lambda s: {"control": {**s["control"], BIAS: s["control"][BIAS][1:]}}
    ),
    "a slot of another type": slots_change(
        lambda s: {"control": {**s["control"], BIAS: s["control"][BIAS].float()}}
    ),
    "a slot that is not finite": slots_change(
        lambda s: {"control": {**s["control"], BIAS: spoiled(math.nan)(s["control"][BIAS])}}
    ),
    "a list as a slot": slots_change(lambda s: {"control": list(s["control"].values())}),
    "an unknown extra": extras_change(lambda e: {**e, "more": torch.zeros(2)}),
}
COLUMNS = {
    "other columns": axis(HIDDEN, Positions.window(1, 2, 6)),
    "columns in another order": submodel_change(
        lambda s: replace(
            s,
            index=Index(
                {**s.index, HIDDEN: Positions.chosen([*s.index.get(HIDDEN, range(6))][::-1])}
            ),
        )
    ),
    "more columns than sent": submodel_change(
        lambda s: replace(s, arch=replace(s.arch, widths=((HIDDEN, 60),)))
    ),
}
EXTRAS = {
    "an extra that is not finite": extras_change(
        lambda e: {name: spoiled(math.inf)(value) for name, value in e.items()}
    ),
    "an extra that is a list": extras_change(lambda e: {name: [1.0] for name in e}),
    "an extra of another name": extras_change(lambda e: {f"{name}s": v for name, v in e.items()}),
}
BAD = {
    "stateful": NAMES | SHAPES | DTYPES | VALUES | POSITIONS | NUMBERS | JOBS | SENT | SLOTS | ROWS,
    "columns": COLUMNS,
    "extras": EXTRAS,
}


def test_the_table_is_long():
    assert sum(map(len, BAD.values())) >= 100


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("engine", ENGINES)
def test_every_bad_update_is_refused(engine, name, perceptron, make_data, monkeypatch):
    run = scenario(name, perceptron, make_data)
    calls = recorded(engine, run, monkeypatch)
    calls.sort(key=lambda call: not call[0][0].sent)  # A payload that arrived comes first.
    assert sum(len(updates) for updates, _ in calls) == 4
    replayed(run, calls, lambda update: update)  # Good updates pass.
    refusals = {}
    for title, change in BAD[name].items():
        try:
            replayed(run, calls, change)
        except (fq.errors.TrainingError, fq.errors.DivergenceError) as error:
            refusals[title] = str(error)
    assert refusals.keys() == BAD[name].keys()
    assert all("client" in text for text in refusals.values())


@pytest.mark.parametrize("engine", ENGINES)
def test_an_update_is_folded_once(engine, perceptron, make_data, monkeypatch):
    run = scenario("stateful", perceptron, make_data)
    calls = recorded(engine, run, monkeypatch)
    with pytest.raises(fq.errors.TrainingError, match="sent a second update for its job"):
        replayed(run, [*calls, calls[0]], lambda update: update)


def test_a_stack_of_nothing_or_of_unlike_updates_is_refused(perceptron, make_data, monkeypatch):
    run = scenario("stateful", perceptron, make_data)
    calls = recorded("vectorized", run, monkeypatch)
    stacks = [call for call in calls if call[1] is not None]
    fold = checked_fold(run.federation, run.server, jobs_of(run))
    with pytest.raises(fq.errors.TrainingError, match="a stack without updates"):
        fold.add_stack([], [{}])
    (first, weights), (second, _) = stacks[:2]
    for updates, stacked in (
        ([*first, *second], weights),
        (first, []),
        (first, [*weights, *weights]),
        (first, [{name: value[:, :1] for name, value in weights[0].items()}]),
        (first, [{name: torch.cat([value, value]) for name, value in weights[0].items()}]),
    ):
        with pytest.raises(fq.errors.TrainingError, match="reached the fold with"):
            fold.add_stack(updates, stacked)


def test_the_server_keeps_its_state_after_a_refusal(perceptron, make_data, monkeypatch):
    """A method whose learner sends a wrong factor fails its round, and changes nothing."""

    class Lying(HeteroFL):
        times = iter(range(1, 100))

        def learner(self, job, world):
            return replace(super().learner(job, world), times=next(self.times))

    data = make_data(perceptron, (7, 4), labels=2)
    run = fq.prepare(Lying(), perceptron, data, fq.Fleet.of((1.0,), 2, 2), "sequential")
    before = {name: value.clone() for name, value in run.server.weights.items()}
    with pytest.raises(fq.errors.TrainingError, match=r"client \d .* sent the factor"):
        run.train(1)
    torch.testing.assert_close(dict(run.server.weights), before, rtol=0, atol=0)
    assert run.server.round == 0
