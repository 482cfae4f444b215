"""Validation samples: what each client holds back, and data that is evaluated on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedquilt as fq
from fedquilt.data import Natural, Parts, Pool
from fedquilt.errors import ConfigError, DataError

X = torch.arange(20.0).reshape(20, 1)
Y = torch.arange(20) % 3
TEST = torch.full((4, 1), -1.0), torch.tensor([0, 1, 2, 0])
SIZES = (10, 5, 2, 1, 2)
PARTS = [part.tolist() for part in torch.arange(20).split(list(SIZES))]


def dealt(parts=PARTS, **known) -> fq.FederatedData:
    return Pool.of((X, Y), TEST, **known).with_parts(parts, [[0], [1], [2], [3], []][: len(parts)])


def lists(parts: Parts) -> list[list[int]]:
    return [part.tolist() for part in parts]


# --- who holds back what ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "counts"),
    [
        (0.2, [2, 1, 1, 0, 1]),
        (0.01, [1, 1, 1, 0, 1]),
        (0.5, [5, 2, 1, 0, 1]),
        (0.99, [9, 4, 1, 0, 1]),
    ],
)
def test_every_client_holds_back_its_share_and_keeps_one_sample(share, counts):
    data = dealt().with_validation(share)
    assert data.validation_parts.sizes.tolist() == counts
    assert data.parts.sizes.tolist() == [
        size - count for size, count in zip(SIZES, counts, strict=True)
    ]
    assert [data.size(client) for client in range(5)] == data.parts.sizes.tolist()
    for client, part in enumerate(PARTS):
        training, validation = lists(data.parts)[client], lists(data.validation_parts)[client]
        assert sorted(training + validation) == part


def test_a_share_of_zero_changes_nothing():
    data = dealt()
    assert data.with_validation(0) is data
    assert data.validation_parts is None


def test_the_draw_is_the_same_for_the_same_data_and_does_not_depend_on_later_clients():
    one, other = dealt().with_validation(0.3), dealt().with_validation(0.3)
    assert lists(one.validation_parts) == lists(other.validation_parts)
    first = dealt().among(2).with_validation(0.3)
    assert lists(first.validation_parts) == lists(one.validation_parts)[:2]
    assert lists(first.parts) == lists(one.among(2).parts)
    assert lists(first.validation_parts) == lists(one.among(2).validation_parts)


def test_the_draw_is_random_within_a_client():
    """A client's classes often come one after another, so that its first or last samples would not
    do.
    """
    data = Pool.of((torch.zeros(200, 1), torch.zeros(200, dtype=torch.int64)), TEST).partition(2)
    ordered = data.with_parts([range(100), range(100, 200)]).with_validation(0.5)
    low = [sum(1 for row in part if row % 100 < 50) for part in lists(ordered.validation_parts)]
    assert all(15 < count < 35 for count in low)
    assert lists(ordered.validation_parts)[0] != [
        row - 100 for row in lists(ordered.validation_parts)[1]
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.floats(0.001, 0.999))
def test_nothing_is_lost_and_nothing_is_in_both(sizes, share):
    count = sum(sizes)
    pool = Pool.of((torch.zeros(count, 1), torch.zeros(count, dtype=torch.int64)), TEST)
    data = pool.with_parts(torch.arange(count).split(sizes))
    if max(sizes) == 1:
        with pytest.raises(DataError, match="has a single sample"):
            data.with_validation(share)
        return
    split = data.with_validation(share)
    together = torch.cat([split.parts.order, split.validation_parts.order])
    assert together.sort().values.tolist() == list(range(count))
    assert int(split.parts.sizes.min()) >= 1
    assert torch.equal(split.validation_parts.sizes > 0, data.parts.sizes > 1)


@pytest.mark.parametrize("share", [-0.1, 1.0, 1.5, float("nan")])
def test_shares_outside_of_the_interval_are_refused(share):
    with pytest.raises(ConfigError, match=r"validation = .* was asked for; .* in \[0, 1\)"):
        dealt().with_validation(share)


def test_data_that_cannot_be_split_is_refused():
    with pytest.raises(DataError, match="every client of data has a single sample"):
        dealt([[0], [1]]).with_validation(0.5)
    with pytest.raises(DataError, match="hold back 5 samples already"):
        dealt().with_validation(0.2).with_validation(0.2)
    with pytest.raises(DataError, match="sample 1 of data is listed twice, for clients 0 and 1"):
        dealt([[0, 1], [1, 2]]).with_validation(0.5)


def test_a_fraction_of_samples_is_drawn_as_before():
    """`Parts.thinned` and the validation split share their draw."""
    parts = Parts.of(PARTS)
    drawn, others = parts.divided(torch.tensor([3, 0, 2, 1, 1]), key=5)
    assert [len(part) for part in drawn] == [3, 0, 2, 1, 1]
    assert [sorted(a + b) for a, b in zip(lists(drawn), lists(others), strict=True)] == PARTS
    assert lists(parts.thinned(0.3, 5, 3))[0] == lists(drawn)[0]


def test_repr_has_the_number_of_validation_samples():
    told = repr(dealt().with_validation(0.2))
    assert told.endswith(
        "partitioned among 5 clients, which hold back 5 training samples for validation)"
    )
    assert "validation" not in repr(dealt())


# --- data that is evaluated on it ---------------------------------------------------------------


def test_the_pooled_samples_take_the_place_of_the_test_set():
    split = dealt().with_validation(0.2)
    data = split.on_validation()
    held = sorted(split.validation_parts.order.tolist())
    assert data.test_inputs.flatten().tolist() == held  # a sample's value is its position
    assert data.test_targets.tolist() == [row % 3 for row in held]
    for client, rows in enumerate(lists(split.validation_parts)):
        assert data.test_inputs[data.test_parts[client]].flatten().tolist() == rows
    assert len(data.test_parts[3]) == 0
    assert not (data.test_inputs == -1).any()  # nothing of the test set is left
    assert data.parts is split.parts
    assert data.inputs is split.inputs
    assert split.test_inputs is not data.test_inputs  # the data it was made of stays as it is
    assert split.on_validation() is data  # computed once, so that an engine knows it again


def test_without_samples_there_is_nothing_to_evaluate_on():
    with pytest.raises(
        ConfigError, match=r"clients of data hold back none\. data\.validation = 0\.1 in a file"
    ):
        dealt().on_validation()


def test_positions_are_those_of_clients_whose_samples_are_out_of_order():
    data = dealt([[9, 3, 17, 5], [2, 19, 0]]).with_validation(0.5)
    on = data.on_validation()
    for client in range(2):
        assert (
            on.test_inputs[on.test_parts[client]].flatten().tolist()
            == data.validation_parts[client].tolist()
        )


def test_clients_domains_and_public_samples_are_kept():
    owners = torch.tensor([0] * 8 + [1] * 12)
    homes = ["north"] * 10 + ["south"] * 10
    pool = Pool.of(
        (X, Y), TEST, clients=owners, domains=homes, test_domains=["south"] * 4, public=X[:3]
    )
    split = pool.partition(partition=Natural()).with_validation(0.25)
    data = split.on_validation()
    rows = data.test_inputs.flatten().long()
    assert split.validation_parts.sizes.tolist() == [2, 3]
    assert torch.equal(data.test_clients, owners[rows])
    assert [data.domain_names[code] for code in data.test_domains] == [homes[row] for row in rows]
    assert data.public is split.public is pool.public
    plain = replace(split, domains=None, clients=None).on_validation()
    assert plain.test_domains is None
    assert plain.test_clients is None


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.arange(60).reshape(12, 5), torch.arange(60).reshape(12, 5) % 7),  # tokens
        (torch.arange(12.0).reshape(12, 1), torch.linspace(0, 1, 12)),  # regression
        (torch.arange(12.0).reshape(12, 1), torch.eye(3).repeat(4, 1).bool()),  # labels
        (torch.arange(12, dtype=torch.uint8).reshape(12, 1, 1, 1), torch.arange(12) % 3),  # images
    ],
)
def test_tokens_real_targets_labels_and_bytes_are_split_in_the_same_way(inputs, targets):
    data = Pool.of((inputs, targets), (inputs[:2], targets[:2])).partition(3).with_validation(0.25)
    assert data.validation_parts.sizes.tolist() == [1, 1, 1]
    rows = data.validation_parts.order.sort().values
    moved = data.on_validation().to(torch.device("cpu"), torch.float64)
    assert torch.equal(moved.test_inputs, inputs[rows].to(moved.test_inputs.dtype))
    assert torch.equal(moved.test_targets, targets[rows].to(moved.test_targets.dtype))
    assert moved.validation_parts is data.validation_parts
