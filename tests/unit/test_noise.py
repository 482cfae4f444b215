"""Counter-based noise: the same key draws the same, everywhere."""

from __future__ import annotations

import ast
import pickle
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

import fedquilt
from fedquilt import noise
from fedquilt.noise import Stream

WORD = 1 << 64


def splitmix64(state: int) -> int:
    """The published finaliser (Steele et al. 2014) on unsigned whole numbers."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) % WORD
    return state ^ (state >> 31)


def signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def test_bits_are_the_published_splitmix64_stream():
    # The first outputs of the reference implementation for seed 1234567.
    reference = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [word % WORD for word in noise.bits(torch.tensor(1234567), 4).tolist()] == reference


@settings(max_examples=60, deadline=None)
@given(st.integers(-(1 << 63), (1 << 63) - 1))
def test_mix_is_splitmix64_on_signed_words(word):
    assert int(noise.mix(torch.tensor(word))) == signed(splitmix64(word % WORD))


def test_keys_are_fixed_for_good():
    assert noise.key() == 0
    assert noise.key(0) == signed(0xE220A8397B1DCDAF)  # splitmix64's first word for seed 0
    assert noise.key(1, 2, 3) == 7702586659592502839
    assert noise.order(noise.key(5), 8).tolist() == [7, 3, 6, 2, 0, 5, 1, 4]
    drawn = noise.uniform(torch.tensor(noise.key(5)), (3,), torch.float64)
    assert drawn.tolist() == [0.9798413515090942, 0.1058688759803772, 0.8638631105422974]


def test_the_order_of_a_keys_parts_matters():
    assert (
        len({noise.key(1, 2), noise.key(2, 1), noise.key(1), noise.key(1, 2, 0), noise.key(12)})
        == 5
    )


def test_keys_of_neighbouring_rounds_clients_and_seeds_do_not_meet():
    keys = {
        noise.key(seed, client, round)
        for seed in range(8)
        for client in range(16)
        for round in range(16)
    }
    assert len(keys) == 8 * 16 * 16


def test_fold_in_is_the_last_step_of_key():
    assert int(noise.fold_in(torch.tensor(noise.key(1, 2)), 3)) == noise.key(1, 2, 3)
    assert int(noise.fold_in(torch.tensor(noise.key(1)), -2)) == noise.key(1, -2)


def test_uniform_is_uniform():
    drawn = noise.uniform(torch.tensor(noise.key(3)), (200_000,), torch.float64)
    assert float(drawn.min()) >= 0
    assert float(drawn.max()) < 1
    assert float(drawn.mean()) == pytest.approx(1 / 2, abs=0.003)  # 4.6 standard errors
    assert float(drawn.var()) == pytest.approx(1 / 12, abs=0.001)
    counts = torch.histc(drawn, 10, 0, 1)
    # chi² of 9 degrees: 30 is its 0.9996 quantile
    assert float(((counts - 20_000) ** 2 / 20_000).sum()) < 30
    assert abs(float(torch.corrcoef(torch.stack([drawn[:-1], drawn[1:]]))[0, 1])) < 0.01


def test_normal_is_normal():
    drawn = noise.normal(torch.tensor(noise.key(4)), (200_000,), torch.float64)
    assert float(drawn.mean()) == pytest.approx(0, abs=0.01)
    assert float(drawn.var()) == pytest.approx(1, abs=0.02)
    assert float((drawn.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.005)
    assert bool(drawn.isfinite().all())


def test_float32_and_float64_draw_the_same():
    key = torch.tensor(noise.key(6))
    low, high = (noise.uniform(key, (50, 20), dtype) for dtype in (torch.float32, torch.float64))
    assert low.dtype == torch.float32
    assert torch.equal(low.double(), high)


def test_shapes_only_reshape_one_stream():
    key = torch.tensor(noise.key(6))
    flat = noise.uniform(key, (12,), torch.float64)
    assert torch.equal(noise.uniform(key, (3, 4), torch.float64), flat.reshape(3, 4))
    assert torch.equal(noise.uniform(key, (5,), torch.float64), flat[:5])
    assert noise.uniform(key, (), torch.float64) == flat[0]
    assert noise.uniform(key, (0, 3), torch.float64).shape == (0, 3)


def test_a_stack_of_clients_draws_what_each_would_alone():
    keys = torch.tensor([noise.key(client) for client in range(4)])
    stacked = vmap(lambda key: noise.uniform(noise.fold_in(key, 7), (3, 2), torch.float64))(keys)
    alone = [noise.uniform(noise.fold_in(key, 7), (3, 2), torch.float64) for key in keys]
    assert torch.equal(stacked, torch.stack(alone))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 300))
def test_order_is_a_permutation(seed, count):
    order = noise.order(noise.key(seed), count)
    assert sorted(order.tolist()) == list(range(count))


def test_orders_differ_by_key_and_every_position_is_equally_likely():
    assert noise.order(noise.key(1), 50).tolist() != noise.order(noise.key(2), 50).tolist()
    firsts = torch.tensor([int(noise.order(noise.key(seed), 5)[0]) for seed in range(2000)])
    counts = torch.bincount(firsts, minlength=5)
    assert float(((counts - 400) ** 2 / 400).sum()) < 20  # chi² of 4 degrees


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 40), st.integers(0, 40))
def test_chosen_numbers_are_different_ascending_and_below(seed, count, more):
    chosen = noise.choose(noise.key(seed), count, count + more)
    assert chosen == sorted(set(chosen))
    assert len(chosen) == count
    assert all(0 <= number < count + more for number in chosen)


def test_every_choice_is_equally_likely():
    drawn = Counter(tuple(noise.choose(noise.key(seed), 2, 4)) for seed in range(3000))
    assert len(drawn) == 6
    assert sum((count - 500) ** 2 / 500 for count in drawn.values()) < 22  # chi² of 5 degrees


@pytest.mark.parametrize("alpha", [0.05, 0.5, 1.0, 7.0])
def test_dirichlet_shares_have_the_distribution(alpha):
    """The share of one of three is Beta(α, 2α), by the test of Kolmogorov and Smirnov."""
    from scipy.stats import beta, kstest

    draws = torch.stack(
        [noise.dirichlet(torch.tensor(noise.key(5, draw)), 3, alpha) for draw in range(2000)]
    )
    torch.testing.assert_close(draws.sum(1), torch.ones(2000, dtype=torch.float64))
    for place in range(3):
        assert kstest(draws[:, place].numpy(), beta(alpha, 2 * alpha).cdf).pvalue > 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_draws_the_same_numbers_rounded(dtype):
    word = torch.tensor(noise.key(5))
    fine, coarse = (
        noise.uniform(word, (100_000,), torch.float32),
        noise.uniform(word, (100_000,), dtype),
    )
    assert coarse.dtype == dtype
    assert float(coarse.max()) < 1
    assert (coarse.float() - fine).abs().max() < 2 * torch.finfo(dtype).eps
    assert noise.normal(word, (100_000,), dtype).isfinite().all()


# --- streams --------------------------------------------------------------------------------------

PACKAGE = Path(fedquilt.__file__).parent
KEY_FUNCTIONS = ("key", "fold_in")
NUMBERS = {
    "TRIAL_BATCH": 0,
    "TRIAL_CLASSES": 1,
    "FAITHFULNESS": 61,
    "EXPORTED_EXAMPLE": 51,
    "CODEC_CHANGE": 46,
    "CODEC_TRIAL": 46,
    "SAMPLE_ORDER": 11,
    "CLIENT_CLASSES": 12,
    "GROUP_ORDER": 13,
    "TEST_SPLIT": 14,
    "PUBLIC_SPLIT": 15,
    "THINNING": 16,
    "VALIDATION_SPLIT": 17,
    "GENERATED_IMAGES": 17,
    "DIRICHLET_CLIENTS": 41,
    "QUANTITIES": 42,
    "USERS": 43,
    "DIRICHLET_ORDER": 46,
    "DIRICHLET_CLASSES": 47,
    "GENERATED_VOLUMES": 49,
    "DIGITS_FIVE": 62,
    "SYNTHETIC_DIGITS": 63,
    "DYNAMIC_BUDGET": 21,
    "COHORT": 22,
    "TESTED_CLIENTS": 23,
    "ASSIGNED_SHARES": 24,
    "AWAKE_HOURS": 25,
    "BATCH_ORDER": 1,
    "STEP_NOISE": 2,
    "POOLED_ORDER": 3,
    "PASS_ORDER": 4,
    "POOLED_GRADIENT": 5,
    "PUBLIC_DRAW": 51,
    "SERVER_SPLIT": 48,
    "CROP": -1,
    "FLIP": -2,
    "ATTACK_START": -3,
    "SAMPLE_WEIGHT": -4,
    "INTENSITY": -5,
    "INTENSITY_NOISE": -6,
    "LINK": 41,
    "WIRELESS_DISTANCE": 42,
    "ROTATION_SIGNS": 47,
    "TEST_ATTACK": 47,
    "FEDERATED_DROPOUT": 31,
    "NESTED_WIDTHS": 41,
    "SPLITMIX_CYCLE": 43,
    "SPLITMIX_BASES": 44,
    "SPLITMIX_INITIAL": 45,
    "PROGFED_STAGE": 48,
    "PROTOTYPE_INITIAL": 49,
    "FEDET_INITIAL": 50,
    "UNION_INITIAL": 62,
    "SUPERNET_ORDER": 1,
    "SUPERNET_CONFIG": 2,
    "SUPERNET_AUGMENTATION": 3,
}


def module_trees() -> Iterator[tuple[str, ast.Module]]:
    """Yield the name and the syntax tree of every module of the package but `noise`."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if file != PACKAGE / "noise.py":
            yield str(file.relative_to(PACKAGE)), ast.parse(file.read_text())


def noise_names(tree: ast.Module) -> set[str]:
    """Return the names by which a module knows `fedquilt.noise`."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        alias.asname or alias.name
        for node in imports
        for alias in node.names
        if (node.module, alias.name) == ("fedquilt", "noise")
    }


def key_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls of `noise.key` and `noise.fold_in` in a module."""
    names = noise_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=function)):
                if name in names and function in KEY_FUNCTIONS:
                    yield node


def whole_constants(tree: ast.Module) -> set[str]:
    """Return the names of a module that are a literal whole number."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    return {
        target.id
        for node in assigned
        for target in node.targets
        if isinstance(target, ast.Name) and is_whole(node.value)
    }


def is_whole(node: ast.expr) -> bool:
    """Return True for a literal whole number, with or without a sign."""
    if isinstance(node, ast.UnaryOp):
        return is_whole(node.operand)
    return isinstance(node, ast.Constant) and type(node.value) is int


def stream_of(node: ast.expr) -> Stream | None:
    """Return the stream that an argument names: `noise.Stream.COHORT` or `Stream.COHORT`."""
    text = ast.unparse(node)
    return Stream[text.rpartition(".")[2]] if "Stream." in text else None


def test_no_call_has_a_bare_number_as_a_part_of_its_key():
    bare = [
        f"{module}:{call.lineno}: {ast.unparse(call)}"
        for module, tree in module_trees()
        for call in key_calls(tree)
        if any(is_whole(part) for part in call.args)
        or any(
            isinstance(part, ast.Name) and part.id in whole_constants(tree) for part in call.args
        )
    ]
    assert bare == []


def test_keys_have_the_parts_that_their_stream_names():
    wrong = []
    for module, tree in module_trees():
        for call in key_calls(tree):
            (stream,) = [stream_of(part) for part in call.args if stream_of(part)] or (None,)
            if stream is None or any(isinstance(part, ast.Starred) for part in call.args):
                continue
            parts = [part for part in stream.parts if part != "..."]
            position = [bool(stream_of(part)) for part in call.args].index(True)
            fits = len(call.args) == len(parts) or (
                stream.parts[-1] == "..." and len(call.args) >= len(parts)
            )
            if not fits or position != parts.index("stream"):
                wrong.append(f"{module}:{call.lineno}: {ast.unparse(call)}")
    assert wrong == []


def test_every_stream_is_used():
    sources = "".join(ast.unparse(tree) for _, tree in module_trees())
    unused = [stream.name for stream in Stream if f"Stream.{stream.name}" not in sources]
    assert unused == []


def test_streams_whose_keys_could_be_equal_have_different_numbers():
    def shape(stream: Stream) -> tuple[object, ...]:
        first = stream.parts[0] if stream.parts[0] in ("step", "message") else ""
        return int(stream), stream.parts.index("stream"), first

    by_shape: dict[tuple[object, ...], list[Stream]] = {}
    for stream in Stream:
        by_shape.setdefault(shape(stream), []).append(stream)
    for streams in by_shape.values():
        lengths = [len(stream.parts) for stream in streams if stream.parts[-1] != "..."]
        assert len(set(lengths)) == len(lengths), streams
        # Keys of open length are longer than all others with the same number.
        open_ended = [len(stream.parts) for stream in streams if stream.parts[-1] == "..."]
        assert len(open_ended) <= 1, streams
        assert all(length < open_ended[0] for length in lengths if open_ended), streams


def test_streams_with_equal_numbers_are_not_the_same_member():
    assert Stream.LINK is not Stream.NESTED_WIDTHS
    assert int(Stream.LINK) == int(Stream.NESTED_WIDTHS) == 41
    assert Stream.SERVER_SPLIT is not Stream.PROGFED_STAGE


def test_a_stream_counts_as_its_number_in_a_key():
    assert noise.key(7, Stream.COHORT, 3) == noise.key(7, 22, 3)
    words = torch.tensor(noise.key(1))
    assert int(noise.fold_in(words, Stream.CROP)) == int(noise.fold_in(words, -1))


def test_numbers_of_streams_are_fixed_for_good():
    # Stored runs continue with the same random numbers. A new stream gets a new line here.
    assert {stream.name: int(stream) for stream in Stream} == NUMBERS
    assert max(Stream) < 1000  # Larger numbers are free for methods of others.


def test_a_stream_is_the_same_after_pickling():
    assert pickle.loads(pickle.dumps(Stream.NESTED_WIDTHS)) is Stream.NESTED_WIDTHS
