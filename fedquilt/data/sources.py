"""Data that ships inside a dependency, so that the first run needs no network."""

from __future__ import annotations

import torch

from fedquilt import noise
from fedquilt.data.federated import FederatedData
from fedquilt.data.partition import iid, shards


def digits(num_clients: int = 20, labels: int = 0, seed: int = 0) -> FederatedData:
    """scikit-learn's 1,797 handwritten digits, 8×8: a fifth for testing; `labels` classes a client, 0 for iid."""
    from sklearn.datasets import load_digits

    raw = load_digits()
    x = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(raw.target)
    order = noise.order(noise.key(seed, 14), len(x))
    test, train = order[: len(x) // 5], order[len(x) // 5 :]
    if labels:
        parts, test_parts = shards(y[train], y[test], num_clients, labels, seed)
    else:
        parts, test_parts = iid(y[train], num_clients, seed), iid(y[test], num_clients, seed)
    return FederatedData.of((x[train], y[train]), (x[test], y[test]), parts, test_parts, name="digits")
