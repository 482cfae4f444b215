"""The position-wise mean against a loop over positions, and server optimizers against their
formulas.
"""

from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedquilt.axes import Index, Positions, size_of
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg, SplitMix
from fedquilt.round.fold import Merged, client_weight
from fedquilt.round.merge import Mean
from fedquilt.round.server_optimizers import Plain, ServerAdam, ServerMomentum, ServerYogi
from fedquilt.terms import Arch, Budget, Client, Job, Payload, Server, Submodel, Update
from tests.unit.family import cuts

WEIGHTINGS = ("uniform", "data", "model", "updates", "both")
few = settings(max_examples=50, deadline=None)


def update(
    submodel: Submodel,
    seed: int,
    size: int = 1,
    steps: int = 1,
    names=cuts.ONE_NET,
    effective_steps=1.0,
) -> Update:
    """A client that sends random weights at a sub-model's positions."""
    whole = cuts.state(seed, submodel.scope)
    sent = Payload(
        submodel, {n: w.clone() for n, w in cuts.cutter().gather(whole, submodel, names).items()}
    )
    return Update(
        Job(Client(seed, Budget(share=1.0), size), submodel, 0), (sent,), steps, effective_steps
    )


def server(*scopes: str) -> Server:
    weights: dict[str, Tensor] = {}
    for place, scope in enumerate(scopes or ("",)):
        weights |= cuts.state(100 + place, scope)
    return Server(0, weights)


def mean(
    updates: list[Update], old: Server, weighting="uniform", flat=None, **options
) -> dict[str, Tensor]:
    fold = Mean(cuts.cutter(flat), weighting, **options).begin(old)
    for one in updates:
        fold.add(one)
    return dict(fold.finish(old)[0])


def kernels(one: Update) -> int:
    sizes = cuts.SIZES | one.job.submodel.arch.sizes
    return sum(size_of(dims[0], sizes) for dims in cuts.DIMS.values() if len(dims) > 1)


def naive_mean(updates: list[Update], old: Server, weighting: str) -> dict[str, Tensor]:
    """Equation 10, one position after the other."""
    result = {name: weight.clone() for name, weight in old.weights.items()}
    for full in result:
        for at in np.ndindex(*result[full].shape):
            total = share = 0.0
            for one in updates:
                p = {
                    "uniform": 1,
                    "data": one.job.client.size,
                    "model": kernels(one),
                    "updates": one.steps,
                    "both": kernels(one) * one.steps,
                }[weighting]
                for payload in one.sent:
                    name = full.removeprefix(payload.submodel.scope)
                    if payload.submodel.scope + name != full or name not in payload.weights:
                        continue
                    places = [
                        list(cuts.positions_of(dim, payload.submodel.index, cuts.SIZES))
                        for dim in cuts.DIMS[name]
                    ]
                    if all(p in held for p, held in zip(at, places, strict=True)):
                        here = tuple(held.index(p) for p, held in zip(at, places, strict=True))
                        total += p * float(payload.weights[name][here])
                        share += p
            if share:
                result[full][at] = total / share
    return result


@st.composite
def cohorts(draw: st.DrawFn) -> list[Update]:
    """Up to four clients: their own cuts, scopes, sizes, steps; some send only some weights or some
    class rows.
    """
    updates = []
    for seed in range(draw(st.integers(1, 4))):
        submodel = draw(cuts.submodels(scopes=("", "base1/")))
        # class rows (HeteroFL's masking), or what a broken link let through
        if draw(st.booleans()):
            classes = Positions.chosen(sorted(draw(st.sets(st.integers(0, 4), min_size=1))))
            submodel = replace(submodel, index=Index({**submodel.index, "class": classes}))
        names = tuple(n for n in cuts.ONE_NET if n == "square" or draw(st.booleans()))
        updates.append(
            update(submodel, seed, draw(st.integers(1, 9)), draw(st.integers(1, 5)), names)
        )
    return updates


@contextmanager
def max_shared_size(entries: int):
    """Merge larger weights than this one by one on a CPU: with 10 entries, four of the six weights
    here.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedquilt.round.merge.MAX_SHARED_SIZE", entries)
        yield


@few
@given(
    cohorts(),
    st.sampled_from(WEIGHTINGS),
    st.booleans(),
    st.booleans(),
    st.sampled_from((0, 10, 1000)),
)
def test_mean_is_equation_10_position_by_position(updates, weighting, flat, class_is_cut, entries):
    # as in a real family: classes are no width, and rows of them are cut one weight at a time
    if not class_is_cut:
        for place, one in enumerate(updates):
            arch = Arch(
                tuple(
                    (axis, width) for axis, width in one.job.submodel.arch.widths if axis != "class"
                )
            )
            sent = tuple(replace(p, submodel=replace(p.submodel, arch=arch)) for p in one.sent)
            updates[place] = replace(one, sent=sent)
    old = server("", "base1/")
    with max_shared_size(entries):
        found = mean(updates, old, weighting, flat)
    expected = naive_mean(updates, old, weighting)
    assert found.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


@few
@given(cohorts(), st.sampled_from(WEIGHTINGS))
def test_untouched_positions_keep_their_value_bit_for_bit(updates, weighting):
    old = server("", "base1/")
    found = mean(updates, old, weighting)
    for full, weight in old.weights.items():
        touched = torch.zeros_like(weight, dtype=torch.bool)
        for payload in (p for one in updates for p in one.sent):
            name = full.removeprefix(payload.submodel.scope)
            if payload.submodel.scope + name == full and name in payload.weights:
                touched |= cuts.mask(name, payload.submodel.index)
        assert torch.equal(found[full][~touched], weight[~touched])


@few
@given(cohorts(), st.integers(0, 4), st.sampled_from(WEIGHTINGS))
def test_joining_partial_folds_is_one_fold(updates, where, weighting):
    old = server("", "base1/")
    folds = [Mean(cuts.cutter(), weighting).begin(old) for _ in range(3)]
    for one in updates[:where]:
        folds[0].add(one)
    for one in updates[where:]:
        folds[1].add(one)
    folds[2].join(folds[0])
    folds[2].join(folds[1])
    joined = folds[2].finish(old)[0]
    torch.testing.assert_close(dict(joined), mean(updates, old, weighting), rtol=1e-12, atol=1e-12)


@few
@given(
    cuts.submodels(),
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.sampled_from(WEIGHTINGS),
    st.booleans(),
)
def test_adding_a_stack_is_adding_each(submodel, sizes, weighting, paced):
    old = server()
    updates = [
        update(submodel, seed, size, steps=size, effective_steps=1.0 + size)
        for seed, size in enumerate(sizes)
    ]
    stacked = {n: torch.stack([one.sent[0].weights[n] for one in updates]) for n in cuts.ONE_NET}
    fold = Mean(cuts.cutter(), weighting, paced=paced).begin(old)
    fold.add_stack(updates, [stacked])
    expected = mean(updates, old, weighting, paced=paced)
    torch.testing.assert_close(dict(fold.finish(old)[0]), expected, rtol=1e-12, atol=1e-12)


def test_a_paced_mean_is_fednovas_formula():
    old, whole = server(), Submodel(Arch(()))
    updates = [
        update(whole, seed, size, effective_steps=effective_steps)
        for seed, size, effective_steps in ((0, 1, 2.0), (1, 3, 5.0))
    ]
    found = mean(updates, old, "data", paced=True)
    w, w0, w1 = (
        s["square"] for s in (old.weights, updates[0].sent[0].weights, updates[1].sent[0].weights)
    )
    effective = (1 * 2.0 + 3 * 5.0) / 4  # the data-weighted mean of a_i
    expected = w + effective * (1 / 4 * (w0 - w) / 2.0 + 3 / 4 * (w1 - w) / 5.0)
    torch.testing.assert_close(found["square"], expected, rtol=1e-12, atol=1e-12)


@few
@given(cohorts(), st.sampled_from(WEIGHTINGS))
def test_a_paced_mean_of_equal_step_counts_is_the_mean(updates, weighting):
    old = server("", "base1/")
    paced = [replace(one, effective_steps=3.0) for one in updates]
    torch.testing.assert_close(
        mean(paced, old, weighting, paced=True),
        mean(updates, old, weighting),
        rtol=1e-12,
        atol=1e-12,
    )


def test_one_client_that_holds_a_position_decides_it_alone():
    old = server()
    low = Submodel(Arch((("a", 2),)), Index({"a": Positions.prefix(2)}))
    high = Submodel(Arch((("a", 2),)), Index({"a": Positions.window(1, 2, 4)}))
    updates = [update(low, 0), update(high, 1)]
    found, (one, two) = mean(updates, old)["square"], (u.sent[0].weights["square"] for u in updates)
    assert found[0, 0] == one[0, 0]
    assert found[2, 2] == two[1, 1]
    assert float(found[1, 1]) == pytest.approx(float(one[1, 1] + two[0, 0]) / 2, abs=1e-15)
    assert torch.equal(found[3], old.weights["square"][3])  # nobody's


def test_a_round_without_clients_leaves_the_server_unchanged():
    old = server()
    weights, slots, *_ = Mean(cuts.cutter()).begin(old).finish(old)
    assert all(weights[name] is old.weights[name] for name in old.weights)
    assert not slots


def test_client_weights_of_appendix_a3():
    submodel = Submodel(Arch((("a", 2),)), Index({"a": Positions.prefix(2)}))
    one = update(submodel, 0, size=7, steps=3, names=("square", "cat", "bias"))
    own = kernels(one)
    weights = [client_weight(one, weighting, cuts.cutter()) for weighting in WEIGHTINGS]
    assert weights == [1, 7, own, 3, own * 3]
    # What of it arrives, or which class rows are sent, does not make a model smaller.
    less = replace(one, sent=(replace(one.sent[0], weights={}),))
    assert client_weight(less, "model", cuts.cutter()) == own


@pytest.mark.parametrize(
    "options", [{"paced": True}, {"optimizer": ServerMomentum(0.5)}, {"optimizer": ServerAdam()}]
)
def test_norm_statistics_are_averaged_under_every_server_optimizer(options):
    """A momentum step can take a variance below zero; a mean cannot."""
    old, whole = server(), Submodel(Arch(()))
    updates = [
        replace(update(whole, seed, steps=seed), effective_steps=float(seed)) for seed in (1, 9)
    ]
    name = "square"
    expected = (updates[0].sent[0].weights[name] + updates[1].sent[0].weights[name]) / 2
    assert torch.allclose(mean(updates, old, plain=frozenset({name}), **options)[name], expected)
    assert not torch.allclose(mean(updates, old, **options)[name], expected)


def test_a_mean_holds_no_reference_to_updates():
    old = server()
    fold = Mean(cuts.cutter()).begin(old)
    one = update(Submodel(Arch(())), 0)
    watched = [
        weakref.ref(one),
        weakref.ref(one.sent[0]),
        *map(weakref.ref, one.sent[0].weights.values()),
    ]
    fold.add(one)
    del one
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_finishing_does_not_write_to_the_server_or_the_updates():
    old = server()
    before = {name: weight.clone() for name, weight in old.weights.items()}
    one = update(Submodel(Arch(())), 0)
    sent = {name: weight.clone() for name, weight in one.sent[0].weights.items()}
    mean([one], old)
    assert all(torch.equal(old.weights[name], before[name]) for name in before)
    assert all(torch.equal(one.sent[0].weights[name], sent[name]) for name in sent)


@few
@given(cohorts(), st.integers(0, 4), st.booleans())
def test_folds_that_sum_in_one_vector_and_weight_by_weight_join(updates, where, flat):
    """A worker on a GPU sums in one vector, a driver on a CPU weight by weight."""
    old = server("", "base1/")
    mine, theirs = (Mean(cuts.cutter(own)).begin(old) for own in (flat, not flat))
    with max_shared_size(10):
        for one in updates[:where]:
            mine.add(one)
        for one in updates[where:]:
            theirs.add(one)
        mine.join(theirs)
    torch.testing.assert_close(
        dict(mine.finish(old)[0]), mean(updates, old), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize(("flat", "vectors"), [(False, 5), (True, 1)])
def test_large_weights_are_merged_alone_on_a_cpu(flat, vectors):
    """Memory that a merge allocates is small enough for glibc to reuse it."""
    with max_shared_size(10):
        merged = mean([update(Submodel(Arch(())), 0)], server(), flat=flat)
    storages = {weight.untyped_storage().data_ptr() for weight in merged.values()}
    assert len(storages) == vectors  # four large weights, and the small ones in one vector


@pytest.mark.parametrize("options", [{}, {"paced": True}, {"optimizer": ServerMomentum()}])
@pytest.mark.parametrize("flat", [False, True])
def test_finishing_twice_gives_the_same(flat, options):
    old = server()
    fold = Mean(cuts.cutter(flat), **options).begin(old)
    for seed, width in enumerate((4, 2)):
        fold.add(
            update(
                Submodel(Arch((("a", width),)), Index({"a": Positions.prefix(width)})),
                seed,
                effective_steps=2.0,
            )
        )
    first, second = fold.finish(old)[0], fold.finish(old)[0]
    assert all(torch.equal(first[name], second[name]) for name in old.weights)


@pytest.mark.parametrize("flat", [False, True])
def test_clients_that_count_nothing_leave_the_weights_as_they_were(flat):
    old = server()
    found = mean([update(Submodel(Arch(())), 0, size=0)], old, "data", flat)
    assert all(torch.equal(found[name], old.weights[name]) for name in old.weights)


# --- server optimizers --------------------------------------------------------------------------


def three_rounds(optimizer) -> tuple[list[Tensor], list[Tensor], Server]:
    """Merge three rounds, and return the first square weight before and after each of them.

    The means that the optimizer was given, and the last state, are returned too.
    """
    now, weights, means = server(), [], []
    for round in range(3):
        weights.append(now.weights["square"])
        one = update(Submodel(Arch(())), round)
        means.append(one.sent[0].weights["square"])
        fold = Mean(cuts.cutter(), optimizer=optimizer).begin(now)
        fold.add(one)
        new, slots, *_ = fold.finish(now)
        now = Server(round + 1, new, slots=slots)
    return [*weights, now.weights["square"]], means, now


# --- folds of others ----------------------------------------------------------------------------


def _without_a_weight(server):
    return Merged({name: value for name, value in server.weights.items() if name != "first.bias"})


@pytest.mark.parametrize(
    ("finish", "found"),
    [
        (lambda server: {}, "a dict in round 1"),
        (lambda server: None, "a NoneType in round 1"),
        (lambda server: ({},), "weights without 'first.weight' in round 1"),
        (lambda server: Merged([]), "a list in place of weights"),
        (_without_a_weight, "weights without 'first.bias'"),
        (
            lambda server: Merged({**server.weights, "more": torch.ones(1)}),
            "the weight 'more', which the server does",
        ),
        (lambda server: Merged({**server.weights, "first.bias": 0}), "a int as 'first.bias'"),
        (
            lambda server: Merged(
                {**server.weights, "first.bias": server.weights["first.bias"][:1]}
            ),
            r"'first.bias' as torch.float64 \[1\] in place of torch.float64 \[6\]",
        ),
    ],
)
def test_a_fold_that_gives_another_state_is_refused(finish, found, perceptron, make_data, play):
    class Own(FedAvg):
        def fold(self, server, world):
            fold = super().fold(server, world)
            fold.finish = finish
            return fold

    with pytest.raises(
        ConfigError, match=f"the fold of Own returned {found}.*finish must return Merged"
    ):
        play(Own(), perceptron, make_data(perceptron, (6,)))


@pytest.mark.parametrize("fold", [None, object()])
def test_results_that_are_no_fold_are_refused(fold, perceptron, make_data, play):
    class Own(FedAvg):
        def fold(self, server, world):
            return fold

    with pytest.raises(
        ConfigError,
        match=r"Own.fold returned .* in round 1; a fold has add, add_stack, join, finish",
    ):
        play(Own(), perceptron, make_data(perceptron, (6,)))


def test_plain_takes_the_mean():
    weights, means, now = three_rounds(Plain())
    assert all(
        torch.allclose(w, m, rtol=0, atol=1e-15) for w, m in zip(weights[1:], means, strict=True)
    )
    assert not now.slots


def test_server_momentum_is_fedavgm():
    weights, means, now = three_rounds(ServerMomentum(lr=0.5, momentum=0.8))
    velocity = torch.zeros_like(weights[0])
    for old, mean, new in zip(weights, means, weights[1:], strict=False):
        velocity = 0.8 * velocity + (mean - old)
        torch.testing.assert_close(new, old + 0.5 * velocity, rtol=0, atol=1e-14)
    torch.testing.assert_close(now.slots["momentum"]["square"], velocity, rtol=0, atol=1e-14)


def test_server_momentum_with_neutral_values_is_the_mean():
    weights, means, _ = three_rounds(ServerMomentum(lr=1.0, momentum=0.0))
    for mean, new in zip(means, weights[1:], strict=True):
        torch.testing.assert_close(new, mean, rtol=0, atol=1e-14)


def test_server_adam_is_fedadam_without_bias_correction():
    weights, means, _ = three_rounds(ServerAdam(lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3))
    m = v = torch.zeros_like(weights[0])
    for old, mean, new in zip(weights, means, weights[1:], strict=False):
        change = mean - old
        m, v = 0.9 * m + 0.1 * change, 0.99 * v + 0.01 * change**2
        torch.testing.assert_close(new, old + 0.1 * m / (v.sqrt() + 1e-3), rtol=0, atol=1e-14)


def test_server_yogi_is_fedyogi():
    """Reddi et al. 2021, algorithm 2: v ← v − (1 − β2) Δ² sign(v − Δ²)."""
    weights, means, _ = three_rounds(ServerYogi(lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3))
    m = v = torch.zeros_like(weights[0])
    for old, mean, new in zip(weights, means, weights[1:], strict=False):
        change = mean - old
        m = 0.9 * m + 0.1 * change
        v = torch.where(v > change**2, v - 0.01 * change**2, v + 0.01 * change**2)
        torch.testing.assert_close(new, old + 0.1 * m / (v.sqrt() + 1e-3), rtol=0, atol=1e-14)


def test_yogis_mean_square_falls_slower_than_adams():
    """By hand: v = 1 and Δ = 0.1 give 1 − 0.01 · 0.01 for Yogi, and 0.99 + 0.01 · 0.01 for Adam."""
    slots = {
        "mean": torch.zeros(1, dtype=torch.float64),
        "square": torch.ones(1, dtype=torch.float64),
    }
    change = torch.tensor([0.1], dtype=torch.float64)
    assert ServerYogi().step(change, slots)[1]["square"].item() == pytest.approx(0.9999, abs=1e-15)
    assert ServerAdam().step(change, slots)[1]["square"].item() == pytest.approx(0.9901, abs=1e-15)


@pytest.mark.parametrize("optimizer", [ServerMomentum(), ServerAdam(), ServerYogi()])
def test_untouched_positions_keep_weights_and_slots_under_server_optimizers(optimizer):
    submodel = Submodel(Arch((("a", 2),)), Index({"a": Positions.window(3, 2, 4)}))
    _, _, now = three_rounds(optimizer)
    fold = Mean(cuts.cutter(), optimizer=optimizer).begin(now)
    fold.add(update(submodel, 9))
    weights, slots, *_ = fold.finish(now)
    kept = ~cuts.mask("square", submodel.index)
    assert torch.equal(weights["square"][kept], now.weights["square"][kept])
    for slot in optimizer.slots:
        assert torch.equal(slots[slot]["square"][kept], now.slots[slot]["square"][kept])
        assert not torch.equal(slots[slot]["square"], now.slots[slot]["square"])


def test_a_server_optimizer_has_slots_for_every_scope(perceptron, make_data, play):
    method = SplitMix(base=0.5, server_optimizer=ServerMomentum(0.5))
    run = play(method, perceptron, make_data(perceptron, (6, 6)), engine="sequential")
    assert set(run.server.slots["momentum"]) == set(run.server.weights)
