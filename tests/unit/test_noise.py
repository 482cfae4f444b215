"""Counter-based noise: the same key draws the same, everywhere."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap

from fedquilt import noise

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


def test_orders_differ_by_key_and_every_place_is_as_likely():
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


def test_every_choice_is_as_likely():
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
