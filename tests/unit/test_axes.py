"""Named axes: text, positions, and how a cut carries through expressions."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from fedquilt.axes import (
    Expr,
    Index,
    Positions,
    Product,
    Sum,
    axes_in,
    parse,
    positions_of,
    size_of,
    write,
)

SIZES = {"a": 5, "b": 3, "c": 2, "layer.0-d": 1}
few = settings(max_examples=60, deadline=None)


def compounds(inner: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    parts = st.lists(inner, min_size=2, max_size=3).map(tuple)
    return st.one_of(parts.map(Sum), parts.map(Product))


atoms: st.SearchStrategy[Expr] = st.one_of(st.sampled_from(sorted(SIZES)), st.integers(1, 3))
exprs = st.recursive(atoms, compounds, max_leaves=5)


@st.composite
def cuts(draw: st.DrawFn) -> Index:
    """For some of the axes a window that may wrap, a prefix, or any order of any subset."""
    index = {}
    for axis, size in SIZES.items():
        match draw(st.sampled_from(["whole", "prefix", "window", "set"])):
            case "prefix":
                index[axis] = Positions.prefix(draw(st.integers(1, size)))
            case "window":
                index[axis] = Positions.window(
                    draw(st.integers(0, 9)), draw(st.integers(1, size)), size
                )
            case "set":
                order = draw(st.permutations(range(size)))
                index[axis] = Positions.chosen(order[: draw(st.integers(1, size))])
    return Index(index)


# --- text ---------------------------------------------------------------------------------------


@few
@given(st.lists(exprs, max_size=4).map(tuple))
def test_parse_reads_back_what_write_wrote(dims):
    assert parse(write(dims)) == dims


@pytest.mark.parametrize(
    ("text", "dims"),
    [
        ("c2 c1 3 3", ("c2", "c1", 3, 3)),
        ("class (c2 49)", ("class", Product(("c2", 49)))),
        ("(a + b) 3 3", (Sum(("a", "b")), 3, 3)),
        ("(heads d) c", (Product(("heads", "d")), "c")),
        ("(a 2 + (b + c) 4)", (Sum((Product(("a", 2)), Product((Sum(("b", "c")), 4)))),)),
        ("(a)", ("a",)),
        ("", ()),
    ],
)
def test_parse_reads_einops_like_text(text, dims):
    assert parse(text) == dims


@pytest.mark.parametrize("text", ["(a b", "a + b", "a) b", "(a + b"])
def test_parse_refuses_unbalanced_text(text):
    with pytest.raises(ValueError, match=r"unbalanced|unexpected"):
        parse(text)


def test_sizes_and_axes_of_an_expression():
    (expr,) = parse("(a 2 + (b + c) 4)")
    assert size_of(expr, SIZES) == 5 * 2 + (3 + 2) * 4
    assert list(axes_in(expr)) == ["a", "b", "c"]


# --- positions ----------------------------------------------------------------------------------


@few
@given(st.integers(-20, 20), st.integers(1, 9), st.integers(1, 8))
def test_a_window_is_equation_4(start, count, size):
    window = Positions.window(start, count, size)
    if count >= size:  # the whole axis, in its own order
        assert list(window) == list(range(size))
    else:
        assert list(window) == [(start + i) % size for i in range(count)]
    assert len(window.runs) <= 2
    assert len(window) == len(list(window)) == len(window.tensor)
    assert window.tensor.tolist() == list(window)


def test_a_window_wraps_into_two_runs():
    assert Positions.window(3, 4, 5).runs == ((3, 5), (0, 2))
    assert Positions.window(8, 4, 5) == Positions.window(3, 4, 5)
    assert Positions.window(1, 4, 5).runs == ((1, 5),)
    assert Positions.window(3, 4, 5).stop == 5


def test_chosen_positions_keep_their_order_and_merge_neighbours():
    assert Positions.chosen([2, 3, 4, 0, 1, 6]).runs == ((2, 5), (0, 2), (6, 7))
    assert Positions.chosen([]).runs == ()
    assert (
        len(Positions.chosen([]))
        == Positions.chosen([]).stop
        == len(Positions.chosen([]).tensor)
        == 0
    )


def test_positions_first_used_inside_of_a_gradient_can_be_used_afterwards():
    positions = Positions.chosen(range(0, 40, 2))
    grad(lambda x: x[positions.tensor].sum())(torch.ones(40))
    assert not torch._C._functorch.is_functorch_wrapped_tensor(positions.tensor)


def test_only_the_whole_axis_in_order_covers_it():
    assert Positions.prefix(3).covers(3)
    assert not Positions.prefix(2).covers(3)
    assert not Positions.chosen([1, 2, 0]).covers(3)


@st.composite
def nested_positions(draw: st.DrawFn) -> tuple[Positions, Positions]:
    """Positions, and places among them."""
    size = draw(st.integers(1, 9))
    outer = Positions.chosen(draw(st.permutations(range(size)))[: draw(st.integers(1, size))])
    inner = Positions.chosen(
        draw(st.permutations(range(len(outer))))[: draw(st.integers(1, len(outer)))]
    )
    return outer, inner


@few
@given(nested_positions())
def test_take_and_places_are_inverse(pair):
    outer, inner = pair
    taken = outer.take(inner)
    assert list(taken) == [list(outer)[place] for place in inner]
    assert outer.places(taken) == inner


@few
@given(nested_positions(), st.sets(st.integers(0, 9)))
def test_keep_is_the_intersection_in_this_order(pair, wanted):
    outer, inner = pair
    kept = outer.keep(wanted)
    assert list(kept) == [p for p in outer if p in wanted]
    taken = outer.take(inner)
    assert sorted(outer.keep(taken)) == sorted(taken)
    assert list(taken.keep(outer)) == list(taken)


def test_equal_indices_are_found_as_keys_in_any_order():
    one = Index({"a": Positions.prefix(2), "b": Positions.prefix(1)})
    other = Index([("b", Positions.prefix(1)), ("a", Positions.prefix(2))])
    assert one == other
    assert {one: "found"}[other] == "found"
    assert one != Index({"a": Positions.prefix(2)})


# --- through expressions ------------------------------------------------------------------------


def naive(expr: Expr, index: Index) -> np.ndarray:
    """Positions by numbering every element of the full dimension and really cutting it."""
    match expr:
        case int():
            return np.arange(expr)
        case str():
            return np.array(list(index[expr])) if expr in index else np.arange(SIZES[expr])
        case Sum(terms):
            offsets = np.cumsum([0] + [size_of(term, SIZES) for term in terms])
            return np.concatenate(
                [naive(t, index) + o for t, o in zip(terms, offsets, strict=False)]
            )
        case Product(factors):
            full = np.arange(size_of(expr, SIZES)).reshape([size_of(f, SIZES) for f in factors])
            return full[np.ix_(*(naive(f, index) for f in factors))].reshape(-1)
    raise TypeError(expr)


@few
@given(exprs, cuts())
def test_positions_of_an_expression_are_those_of_really_cutting(expr, index):
    found = positions_of(expr, index, SIZES)
    assert list(found) == naive(expr, index).tolist()


def test_a_cut_inside_heads_keeps_every_head():
    index = Index({"d": Positions.prefix(2)})
    (expr,) = parse("(heads d)")
    assert list(positions_of(expr, index, {"heads": 3, "d": 4})) == [0, 1, 4, 5, 8, 9]


def test_a_cut_of_a_concatenation_takes_from_both_branches():
    index = Index({"a": Positions.prefix(1), "b": Positions.chosen([2, 0])})
    (expr,) = parse("(a + b)")
    assert list(positions_of(expr, index, SIZES)) == [0, 7, 5]


def test_a_cut_is_a_key_in_other_processes_too():
    """Hashes of text differ from process to process, so that a cut must not bring its own."""
    index = Index({"a": Positions.prefix(2), "b": Positions.window(2, 2, 3)})
    hash(index)
    len(index["a"])
    code = (
        "import sys, pickle; from fedquilt.axes import Index, Positions;"
        "there = pickle.loads(sys.stdin.buffer.read());"
        "here = Index({'a': Positions.prefix(2), 'b': Positions.window(2, 2, 3)});"
        "assert {here: 1}[there] == 1 and vars(there['a']).keys() == {'runs'}"
    )
    subprocess.run([sys.executable, "-c", code], input=pickle.dumps(index), check=True)
