"""The bounded cache. Vectors of weights are tested with the cuts that use them."""

import pytest
import torch

from fedquilt.tensors import BoundedCache


def test_a_cached_result_is_computed_once():
    cache, calls = BoundedCache(2), []
    for _ in range(3):
        assert cache.get("a", lambda: calls.append("a") or 7) == 7
    assert calls == ["a"]


def test_results_of_none_are_cached():
    cache, calls = BoundedCache(2), []
    for _ in range(2):
        assert cache.get("a", lambda: calls.append("a")) is None
    assert calls == ["a"]


def test_the_oldest_result_is_dropped_whether_or_not_it_was_looked_up():
    cache, calls = BoundedCache(2), []
    for key in "abacabb":
        cache.get(key, lambda key=key: calls.append(key) or key)
    # "c" drops "a" although it was just looked up, and "a" then drops "b".
    assert calls == ["a", "b", "c", "a", "b"]
    assert len(cache) == 2


def test_a_full_cache_makes_room_before_it_computes():
    cache, lengths = BoundedCache(2), []
    for key in range(4):
        cache.get(key, lambda: lengths.append(len(cache)))
    assert lengths == [0, 1, 1, 1]


def test_sizes_are_added_up_and_the_newest_result_is_kept_even_if_it_is_too_large():
    cache = BoundedCache(100, lambda tensor: tensor.nbytes)
    for key, count in enumerate((40, 40, 40)):
        cache.get(key, lambda count=count: torch.zeros(count, dtype=torch.bool))
    assert len(cache) == 2
    cache.get("large", lambda: torch.zeros(500, dtype=torch.bool))
    assert len(cache) == 1
    cache.get("small", lambda: torch.zeros(60, dtype=torch.bool))
    cache.get("other", lambda: torch.zeros(40, dtype=torch.bool))
    assert len(cache) == 2  # "large" is gone, and its size with it.


def test_a_cleared_cache_is_empty_and_has_all_its_room():
    cache = BoundedCache(3)
    for key in range(3):
        cache.get(key, int)
    cache.clear()
    assert len(cache) == 0
    for key in range(3):
        cache.get(key, int)
    assert len(cache) == 3


def test_a_result_that_cannot_be_computed_is_not_cached():
    cache = BoundedCache(1)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: 1 // 0)
    assert cache.get("a", lambda: 1) == 1
