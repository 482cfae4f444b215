"""One list of arrays per client is a common mistake. The error says how to join them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedquilt.data import FederatedData, Pool
from fedquilt.errors import DataError

X = np.zeros((7, 4), np.float32)
Y = np.arange(7) % 3
PARTS = [range(4), range(4, 7)]
REMEDY = r"join the arrays of all clients \(numpy\.concatenate\), and list each client's rows in"


@pytest.mark.parametrize(
    "train",
    [
        ([X[:4], X[4:]], [Y[:4], Y[4:]]),
        ((X[:4], X[4:]), (Y[:4], Y[4:])),
        ([X[:4], X[4:]], [list(Y[:4]), list(Y[4:])]),
        ([torch.tensor(X[:4]), torch.tensor(X[4:])], [torch.tensor(Y[:4]), torch.tensor(Y[4:])]),
        (X, [Y[:4], Y[4:]]),
        [(X[:4], Y[:4]), (X[4:], Y[4:])],
    ],
    ids=["lists", "tuples", "lists of numbers", "tensors", "targets only", "pairs"],
)
def test_arrays_of_clients_are_refused_with_a_remedy(train):
    with pytest.raises(DataError, match=REMEDY):
        FederatedData.of(train, (X, Y), PARTS)
    with pytest.raises(DataError, match=REMEDY):
        Pool.of(train, (X, Y))


def test_a_list_with_one_array_per_sample_is_accepted():
    pool = Pool.of((list(X), list(Y)), (X, Y))
    assert pool.inputs.shape == (7, 4)
    assert pool.targets.tolist() == Y.tolist()
