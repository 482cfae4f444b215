"""Gather and scatter against plain indexing, for windows that wrap, prefixes and random sets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.axes import Index, Positions
from fedquilt.family.cut import WHOLE, prefix, scattered, windows
from fedquilt.family.rows import add_at, count_trained, is_blocky, kept_rows, put_at, take
from fedquilt.tensors import Flat
from fedquilt.terms import Arch
from tests.unit.family import cuts

few = settings(max_examples=50, deadline=None)
ARCH = Arch((("a", 2), ("b", 2)))
NAMES = cuts.ONE_NET


# --- which positions ----------------------------------------------------------------------------


def test_prefix_keeps_the_first_channels():
    assert {axis: list(p) for axis, p in prefix(ARCH).index.items()} == {"a": [0, 1], "b": [0, 1]}


def test_windows_start_at_the_requested_position_and_wrap():
    cut = windows(ARCH, {"a": 3, "b": 1}, cuts.SIZES)
    assert {axis: list(p) for axis, p in cut.index.items()} == {"a": [3, 0], "b": [1, 2]}
    assert cut.arch == ARCH


def test_scattered_is_a_sorted_random_set_of_its_own_for_every_axis():
    sizes = {"a": 40, "b": 40}
    arch = Arch((("a", 20), ("b", 20)))
    cut = scattered(arch, sizes, key=1)
    for positions in cut.index.values():
        assert len(positions) == len(set(positions)) == 20
        assert list(positions) == sorted(positions)
        assert positions.stop <= 40
    assert cut.index["a"] != cut.index["b"]
    assert cut == scattered(arch, sizes, key=1)
    assert cut != scattered(arch, sizes, key=2)


# --- one weight ---------------------------------------------------------------------------------


@few
@given(cuts.submodels(), st.sampled_from(NAMES))
def test_take_add_and_put_are_plain_indexing(submodel, name):
    index = submodel.index
    whole = cuts.state(1)[name]
    cut = kept_rows(cuts.DIMS[name], index, cuts.SIZES)
    part = take(whole, cut)
    assert torch.equal(part, cuts.pick(whole, name, index))

    # The same elements, found by a boolean mask over the whole: every kept position exactly once.
    kept = cuts.mask(name, index)
    assert int(kept.sum()) == part.numel()
    assert sorted(part.flatten().tolist()) == sorted(whole[kept].tolist())

    added = whole.clone()
    add_at(added, cut, part, scale=2.0)
    assert torch.equal(added, torch.where(kept, whole + 2 * whole, whole))
    counted = torch.zeros_like(whole)
    add_at(counted, cut, 3.0, scale=0.5)
    assert torch.equal(counted, 1.5 * kept)
    other = torch.full_like(whole, 9.0)
    put_at(other, cut, part)
    assert torch.equal(other, torch.where(kept, whole, 9.0))


def test_cuts_with_many_runs_are_indexed_and_give_the_same_numbers():
    whole = torch.arange(400.0).reshape(20, 20)
    even = Positions.chosen(range(0, 20, 2))
    cut = (even, even)
    assert not is_blocky(cut)
    assert torch.equal(take(whole, cut), whole[::2, ::2])
    added, put = whole.clone(), torch.zeros_like(whole)
    add_at(added, cut, torch.ones(10, 10), scale=3.0)
    assert torch.equal((added - whole)[::2, ::2], torch.full((10, 10), 3.0))
    assert float((added - whole).sum()) == 300
    put_at(put, cut, whole[::2, ::2])
    assert torch.equal(put[::2, ::2], whole[::2, ::2])
    assert float(put.sum()) == float(whole[::2, ::2].sum())
    add_at(put, cut, 1.0)
    assert float(put.sum()) == float(whole[::2, ::2].sum()) + 100


def test_take_skips_leading_dimensions_and_is_a_view_of_neighbours():
    whole = torch.arange(24.0).reshape(2, 3, 4)
    cut = (Positions.prefix(2), None)
    assert torch.equal(take(whole, cut, lead=1), whole[:, :2])
    assert take(whole, cut, lead=1).data_ptr() == whole.data_ptr()


def test_a_weight_that_keeps_everything_has_no_rows():
    assert kept_rows(cuts.DIMS["square"], Index(), cuts.SIZES) == (None, None)
    whole = torch.ones(4, 4)
    add_at(whole, (None, None), torch.ones(4, 4))
    assert torch.equal(whole, torch.full((4, 4), 2.0))


# --- whole states -------------------------------------------------------------------------------


@few
@given(cuts.submodels(scopes=("", "base1/")))
def test_gather_then_scatter_restores(submodel):
    cutter, scope = cuts.cutter(), submodel.scope
    whole = cuts.state(2, scope)
    parts = cutter.gather(whole, submodel, NAMES)
    for name in NAMES:
        damaged = torch.where(cuts.mask(name, submodel.index), torch.nan, whole[scope + name])
        put_at(damaged, cutter.rows(name, submodel.index), parts[name])
        assert torch.equal(damaged, whole[scope + name])


@few
@given(cuts.submodels(), st.data())
def test_narrow_is_cutting_the_whole(submodel, data):
    cutter, whole, held = cuts.cutter(), cuts.state(3), submodel.index
    wanted = {}
    for axis in cuts.SIZES:
        mine = list(held[axis] if axis in held else range(cuts.SIZES[axis]))
        wanted[axis] = Positions.chosen(
            data.draw(st.permutations(mine))[: data.draw(st.integers(1, len(mine)))]
        )
    parts = cutter.gather(whole, submodel, NAMES)
    narrowed = cutter.narrow(parts, held, Index(wanted))
    stacked = cutter.narrow(
        {n: torch.stack([p, 2 * p]) for n, p in parts.items()}, held, Index(wanted), lead=1
    )
    for name in NAMES:
        assert torch.equal(narrowed[name], cuts.pick(whole[name], name, wanted))
        assert torch.equal(stacked[name][1], 2 * narrowed[name])


def test_gradients_flow_through_narrow():
    cutter = cuts.cutter()
    weight = torch.zeros(4, 4, requires_grad=True)
    index = Index({"a": Positions.chosen([3, 1])})
    cutter.narrow({"square": weight}, Index(), index)["square"].sum().backward()
    assert torch.equal(weight.grad, cuts.mask("square", index).float())


@few
@given(cuts.submodels(), cuts.submodels())
def test_overlay_writes_only_positions_that_both_have(base, top):
    cutter, lower, upper = cuts.cutter(), cuts.state(4), cuts.state(5)
    below, above = (cutter.gather(w, s, NAMES) for w, s in ((lower, base), (upper, top)))
    copies = {name: value.clone() for name, value in below.items()}
    result = cutter.overlay(below, base.index, above, top.index)
    for name in NAMES:
        # element by element
        merged = torch.where(cuts.mask(name, top.index), upper[name], lower[name])
        assert torch.equal(result[name], cuts.pick(merged, name, base.index)), name
        assert torch.equal(below[name], copies[name])  # the base is not written to


def test_overlay_of_nothing_in_common_is_the_base():
    cutter, lower, upper = cuts.cutter(), cuts.state(4), cuts.state(5)
    one = windows(Arch((("a", 2),)), {"a": 0}, cuts.SIZES)
    other = windows(Arch((("a", 2),)), {"a": 2}, cuts.SIZES)
    names = ("square",)
    result = cutter.overlay(
        cutter.gather(lower, one, names), one.index, cutter.gather(upper, other, names), other.index
    )
    assert torch.equal(result["square"], lower["square"][:2, :2])


@few
@given(cuts.submodels(), cuts.submodels())
def test_common_is_the_intersection_in_the_order_of_the_first(one, other):
    cutter = cuts.cutter()
    shared = cutter.common(one.index, other.index)
    for axis, size in cuts.SIZES.items():
        mine, theirs = (list(s.index.get(axis, range(size))) for s in (one, other))
        assert list(shared.get(axis, range(size))) == [p for p in mine if p in theirs]


def test_the_cutter_drops_old_cuts_and_computes_them_again():
    cutter = cuts.cutter(memory=2)
    found = [cutter.rows("bias", Index({"class": Positions.prefix(n)})) for n in (1, 2, 3, 4, 1)]
    assert [len(kept) for (kept,) in found] == [1, 2, 3, 4, 1]
    assert len(cutter._rows) <= 2


def test_scalars_are_never_cut():
    cutter, whole = cuts.cutter(), cuts.state(6)
    assert cutter.rows("scale", prefix(ARCH).index) == ()
    assert cutter.gather(whole, prefix(ARCH), ["scale"])["scale"] == whole["scale"]


@pytest.mark.parametrize("size", [1, 7])
def test_a_full_window_is_the_whole_axis_in_order_so_that_equal_members_stack(size):
    arch = Arch((("a", size),))
    assert windows(arch, {"a": 3}, {"a": size}).index == prefix(arch).index


# --- who held what ------------------------------------------------------------------------------


@pytest.mark.parametrize("few_runs", [1, 8])
def test_counts_have_length_one_where_no_cut_narrows(monkeypatch, few_runs):
    monkeypatch.setattr("fedquilt.family.rows.MAX_SLICES", few_runs)  # by index, and by slices
    shape = (4, 5, 3)
    first, second = (Positions.prefix(2), None, None), (Positions.chosen([0, 3]), None, None)
    counts = count_trained(
        shape, [(first, 1.0), (second, 2.0)], 0.5, torch.zeros(0, dtype=torch.float64)
    )
    assert counts.shape == (4, 1, 1)
    assert counts.dtype == torch.float64
    assert counts.flatten().tolist() == [3.5, 1.5, 0.5, 2.5]


@few
@given(st.lists(cuts.submodels(), min_size=1, max_size=4), st.booleans())
def test_a_tally_counts_every_position_and_whether_all_were_trained(submodels, flat):
    whole = cuts.state(1)
    for names in (NAMES, ("square",)):
        like = Flat.of({name: whole[name] for name in names})
        held = [(one, WHOLE, names, 1.0 + place) for place, one in enumerate(submodels)]
        tally = cuts.cutter(flat).tally(like, held)
        expected = {
            name: sum(value * cuts.mask(name, one.index).double() for one, _, _, value in held)
            for name in names
        }
        vector = Flat.of(expected).vector
        assert torch.equal(
            torch.as_tensor(tally.values, dtype=torch.float64).expand_as(vector), vector
        )
        assert not tally.complete or bool((vector > 0).all())
        if any(all(cuts.mask(name, one.index).all() for name in names) for one in submodels):
            assert tally.complete


# --- all weights at once, as on a GPU -----------------------------------------------------------


@few
@given(cuts.submodels(scopes=("", "base1/")), cuts.submodels())
def test_flat_and_sliced_cuts_are_the_same_to_the_bit(submodel, other):
    flat, sliced = cuts.cutter(flat=True), cuts.cutter(flat=False)
    for one in (submodel, other, submodel):  # the second time from memory
        whole = cuts.state(1, one.scope)
        found, expected = flat.gather(whole, one, NAMES), sliced.gather(whole, one, NAMES)
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], expected[name]) for name in NAMES)
        sums = [
            Flat.of({name: torch.ones_like(whole[one.scope + name]) for name in NAMES})
            for _ in range(2)
        ]
        for cutter, own in zip((flat, sliced), sums, strict=True):
            cutter.add(own, one, expected, scale=0.5)
        assert torch.equal(sums[0].vector, sums[1].vector)


def test_caches_of_positions_and_maps_are_bounded(monkeypatch):
    monkeypatch.setattr("fedquilt.family.cut.MAX_CACHED_CUTS", 2)
    monkeypatch.setattr("fedquilt.family.cut.MAX_MAP_BYTES", 1)
    cutter, whole = cuts.cutter(flat=True), cuts.state(1)
    for start in range(4):
        for width in (1, 2, 3):
            one = windows(Arch((("a", width),)), {"a": start}, cuts.SIZES)
            assert torch.equal(
                cutter.gather(whole, one, NAMES)["square"],
                cuts.pick(whole["square"], "square", one.index),
            )
    assert len(cutter._offsets) <= 2
    assert len(cutter._maps) == 1
