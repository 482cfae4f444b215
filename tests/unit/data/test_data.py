"""Federated data: what is refused, and how a pool is dealt."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.data import DATA, digits, iid, shards
from fedquilt.errors import DataError

X, Y = torch.zeros(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
PARTS = [[0, 1, 2], [3, 4, 5]]


def of(train=(X, Y), test=(X, Y), parts=PARTS, test_parts=None) -> fq.FederatedData:
    return fq.FederatedData.of(train, test, parts, test_parts)


def test_arrays_and_lists_become_tensors():
    data = of((X.numpy(), Y.numpy().astype(np.int32)), (X, Y), [np.array([0, 1]), [2, 3, 4, 5]], [[0], [1, 2]])
    assert data.targets.dtype == torch.int64
    assert (data.num_clients, data.num_classes) == (2, 3)
    assert [data.size(client) for client in range(2)] == [2, 4]
    assert [part.tolist() for part in data.test_parts] == [[0], [1, 2]]


def test_held_classes_ignore_padding():
    data = of((X, torch.tensor([0, 2, -100, 1, 1, 1])))
    assert data.held(0, 3).tolist() == [True, False, True]
    assert data.held(1, 4).tolist() == [False, True, False, False]


def test_held_classes_of_sequences_are_all_their_tokens():
    tokens = torch.tensor([[0, 1], [1, 1], [3, -100]])
    data = of((tokens, tokens), (tokens, tokens), [[0, 1], [2]])
    assert data.held(0, 4).tolist() == [True, True, False, False]
    assert data.held(1, 4).tolist() == [False, False, False, True]


def test_samples_take_the_dtype_and_tokens_stay_whole():
    assert of().to(torch.device("cpu"), torch.float64).inputs.dtype == torch.float64
    tokens = torch.zeros(6, 4, dtype=torch.int64)
    moved = of((tokens, Y), (tokens, Y)).to(torch.device("cpu"), torch.float64)
    assert moved.inputs.dtype == moved.test_inputs.dtype == torch.int64


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train": (X, Y[:5])}, "the training set has 6 inputs and 5 targets"),
        ({"test": (X[:5], Y)}, "the test set has 5 inputs and 6 targets"),
        ({"train": (X, Y.double())}, r"training targets are torch\.float64; classes are whole numbers"),
        ({"test": (X, Y.float())}, r"test targets are torch\.float32"),
        ({"test": (torch.zeros(6, 5), Y)}, r"training inputs have shape \(4,\) and test inputs \(5,\)"),
        ({"parts": [[0, 1], []]}, "client 1 has no data"),
        ({"parts": [[0, 6]]}, "client 0 holds sample 6; the training set has 6"),
        ({"parts": [[0], [2, -1]]}, "client 1 holds sample -1; the training set has 6"),
        ({"test_parts": [[0]]}, "there are 2 clients but test parts for 1"),
        ({"train": (X[:0], Y[:0])}, "the training set is empty"),
        ({"test": (X[:0], Y[:0])}, "the test set is empty"),
        ({"parts": []}, "no client"),
    ],
)
def test_wrong_data_is_refused_with_what_is_wrong(wrong, message):
    with pytest.raises(DataError, match=message):
        of(**wrong)


# --- partitions -------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 5))
def test_iid_deals_every_sample_once_in_equal_shares(count, clients, seed):
    if clients > count:
        with pytest.raises(DataError, match=f"{clients} clients were asked for"):
            iid(torch.zeros(count), clients, seed)
        return
    parts = iid(torch.zeros(count), clients, seed)
    assert sorted(torch.cat(parts).tolist()) == list(range(count))
    sizes = list(map(len, parts))
    assert max(sizes) - min(sizes) <= 1


def test_iid_mixes_by_seed():
    deals = [[part.tolist() for part in iid(torch.zeros(30), 3, seed)] for seed in (0, 0, 1)]
    assert deals[0] == deals[1] != deals[2]
    assert deals[0][0] != list(range(10))


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(2, 5), st.data())
def test_shards_give_each_client_its_number_of_labels_in_training_and_test(clients, classes, data):
    labels = data.draw(st.integers(1, classes))
    targets = torch.arange(60 * classes) % classes
    parts, test_parts = shards(targets, targets[: 30 * classes], clients, labels, seed=1)
    assert len(parts) == len(test_parts) == clients
    for part, test_part in zip(parts, test_parts, strict=True):
        own = set(targets[part].tolist())
        assert len(own) == labels
        assert set(targets[test_part].tolist()) == own
    dealt = torch.cat(parts).tolist()
    assert len(dealt) == len(set(dealt))  # no sample twice
    owned = {label for part in parts for label in targets[part].tolist()}
    assert sorted(dealt) == [s for s, label in enumerate(targets.tolist()) if label in owned]  # and all of a held class


def test_labels_are_dealt_evenly():
    targets = torch.arange(1000) % 10
    parts, _ = shards(targets, targets, 10, 2)
    holders = [sum(label in targets[part] for part in parts) for label in range(10)]
    assert holders == [2] * 10


def test_impossible_shards_are_refused():
    targets = torch.arange(10) % 5
    with pytest.raises(DataError, match="6 labels a client were asked for; there are 5 classes"):
        shards(targets, targets, 2, 6)
    with pytest.raises(DataError, match=r"class \d has 2 samples for 3 clients"):
        shards(targets, targets, 3, 5)


# --- what ships -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", [0, 2])
def test_digits(labels):
    data = digits(20, labels)
    assert DATA["digits"] is digits
    assert len(data.test_targets) == 1797 // 5
    assert len(data.targets) + len(data.test_targets) == 1797
    assert data.inputs.shape[1:] == (1, 8, 8)
    assert 0 <= float(data.inputs.min()) <= float(data.inputs.max()) <= 1
    assert data.num_clients == len(data.test_parts) == 20
    held = [int(data.held(client, 10).sum()) for client in range(20)]
    assert set(held) == {2} if labels else min(held) >= 8
