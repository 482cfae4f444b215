"""Pools and federated data: refused arrays, samples as models get them, and parts of clients."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import fedquilt as fq
from fedquilt.data import Labels, Natural, Parts, Pool, Scale
from fedquilt.errors import ConfigError, DataError

X, Y = torch.zeros(6, 4), torch.tensor([0, 1, 2, 0, 1, 2])
PARTS = [[0, 1, 2], [3, 4, 5]]
CPU = torch.device("cpu")


class Ragged(Dataset):
    """Two samples of unequal shape."""

    def __init__(self, as_list: bool = False) -> None:
        self.as_list = as_list

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: int):
        values = [0.0] * (place + 1)
        return (values if self.as_list else torch.tensor(values)), place


class Counted(IterableDataset):
    """Three samples with classes as plain numbers, and without a length."""

    def __iter__(self):
        return ((np.full(4, place, np.float32), place) for place in range(3))


def of(train=(X, Y), test=(X, Y), parts=PARTS, test_parts=None) -> fq.FederatedData:
    return fq.FederatedData.of(train, test, parts, test_parts)


# --- parts --------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 99), max_size=6), max_size=8))
def test_parts_are_the_lists_they_were_made_of(lists):
    parts = Parts.of(lists)
    assert len(parts) == len(lists)
    assert [part.tolist() for part in parts] == lists
    assert [parts[client].tolist() for client in range(len(lists))] == lists
    assert [part.tolist() for part in parts[1:3]] == lists[1:3]
    assert parts.sizes.tolist() == list(map(len, lists))
    assert parts.owners.tolist() == [client for client, part in enumerate(lists) for _ in part]
    if lists:
        assert parts[-1].tolist() == lists[-1]
    for outside in (len(lists), -len(lists) - 1):
        with pytest.raises(IndexError):
            parts[outside]


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_a_mask_of_all_samples_selects_those_of_the_client(kind):
    data = of(
        parts=[kind(Y.numpy() < 2), kind(Y.numpy() == 2)], test_parts=[kind(Y.numpy() == 1), []]
    )
    assert [part.tolist() for part in data.parts] == [[0, 1, 3, 4], [2, 5]]
    assert [part.tolist() for part in data.test_parts] == [[1, 4], []]


def test_parts_from_owners_keep_the_order_and_leave_out_samples_without_owner():
    parts = Parts.owned(torch.tensor([1, -1, 0, 1, 3]), 4)
    assert [part.tolist() for part in parts] == [[2], [0, 3], [], [4]]
    listed = Parts.owned(torch.tensor([1, 0]), 2, order=torch.tensor([7, 9]))
    assert [part.tolist() for part in listed] == [[9], [7]]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.floats(0.01, 1), st.integers(0, 9))
def test_thinning_keeps_a_fraction_of_each_client_and_at_least_one(sizes, fraction, key):
    parts = Parts.split(torch.arange(sum(sizes)) * 2, torch.tensor(sizes))
    thin = parts.thinned(fraction, key)
    for before, after in zip(parts, thin, strict=True):
        assert set(after.tolist()) <= set(before.tolist())
        assert after.tolist() == sorted(set(after.tolist()))  # in the order they had, none twice
        assert len(after) == max(1, round(float(len(before) * torch.tensor(fraction))))


def test_thinning_draws_at_random():
    parts = Parts.split(torch.arange(100), torch.tensor([50, 50]))
    draws = [[part.tolist() for part in parts.thinned(0.2, key)] for key in (0, 0, 1)]
    assert draws[0] == draws[1] != draws[2]
    assert draws[0][0] != list(range(10))


# --- what is taken, what is refused -------------------------------------------------------------


def test_arrays_and_lists_become_tensors():
    data = of(
        (X.numpy(), Y.numpy().astype(np.int32)),
        (X, Y),
        [np.array([0, 1]), [2, 3, 4, 5]],
        [[0], [1, 2]],
    )
    assert data.targets.dtype == torch.int64
    assert (data.num_clients, data.num_classes) == (2, 3)
    assert [data.size(client) for client in range(2)] == [2, 4]
    assert [part.tolist() for part in data.test_parts] == [[0], [1, 2]]


def test_repr_is_one_line():
    pool = Pool.of((X, Y), (X, Y), name="small")
    assert repr(pool) == "Pool(small: 6 training and 6 test samples of (4,), 3 classes)"
    federated = (
        "FederatedData(small: 6 training and 6 test samples of (4,), 3 classes; partitioned among "
        "2 clients)"
    )
    assert repr(pool.partition(2)) == federated
    homes = {"domains": Y, "test_domains": Y}
    assert "3 classes, 3 domains)" in repr(Pool.of((X, Y), (X, Y), **homes))
    assert "3 classes, domains a, b, c)" in repr(
        Pool.of((X, Y), (X, Y), **homes, domain_names=("a", "b", "c"))
    )


def test_real_numbers_and_labels_are_targets_too():
    numbers = np.arange(12, dtype=np.float16).reshape(6, 2) - 3
    real = Pool.of((X, numbers), (X, numbers), name="real")
    assert real.targets.dtype == torch.float32
    assert (real.has_classes, real.num_classes, real.num_outputs) == (False, 0, 2)
    assert repr(real) == "Pool(real: 6 training and 6 test samples of (4,), real targets of (2,))"
    assert real.to(CPU, torch.float64).test_targets.dtype == torch.float64
    one = Pool.of((X, numbers[:, 0]), (X, numbers[:, 0]))
    assert (one.num_outputs, one.partition(2).flaw(0)) == (1, "")
    assert "a real target each" in repr(one)

    labels = Pool.of((X, numbers > 0), (X, numbers > 0), public=X)
    assert (labels.targets.dtype, labels.num_classes, labels.num_outputs) == (torch.bool, 0, 2)
    assert "2 labels" in repr(labels)
    assert labels.to(CPU, torch.float64).targets.dtype == torch.bool
    assert labels.partition(2).flaw(1) == ""
    classes = Pool.of((X, Y > 0), (X, Y > 0))  # one of two classes each, not a row of labels
    assert (classes.num_classes, classes.targets.dtype) == (2, torch.int64)
    assert Pool.of((X, Y), (X, Y)).num_outputs == 3


def test_a_column_of_classes_is_one_class_for_each_sample():
    pool = Pool.of((X, Y[:, None]), (X, Y[:, None].numpy()))
    assert torch.equal(pool.targets, Y)
    assert torch.equal(pool.test_targets, Y)
    # one column of a regression
    assert Pool.of((X, Y[:, None] / 2), (X, Y[:, None] / 2)).targets.shape == (
        6,
        1,
    )
    tokens = Y[:, None]
    # sequences of one token
    assert Pool.of((tokens, tokens), (tokens, tokens)).targets.shape == (
        6,
        1,
    )


@pytest.mark.parametrize("kind", [np.array, list, lambda names: np.array(names, object)])
def test_classes_may_have_names_and_are_numbered_in_sorted_order(kind):
    names = ["dog", "cat", "emu", "dog", "cat", "emu"]
    pool = Pool.of((X, kind(names)), (X, kind(names[::-1])))
    assert pool.targets.tolist() == [1, 0, 2, 1, 0, 2]
    assert pool.test_targets.tolist() == [2, 0, 1, 2, 0, 1]
    assert (pool.class_names, pool.num_classes) == (("cat", "dog", "emu"), 3)
    # a class of the test set alone
    assert Pool.of((X, kind(names)), (X[:1], kind(["fox"]))).num_classes == 4

    ordered = Pool.of((X, kind(names)), (X, kind(names)), class_names=("emu", "dog", "cat"))
    assert ordered.targets.tolist() == [1, 2, 0, 1, 2, 0]
    with pytest.raises(DataError, match="there is a target 'emu'; classes are cat, dog"):
        Pool.of((X, kind(names)), (X, kind(names)), class_names=("cat", "dog"))


def test_datasets_of_torch_are_read_once_into_arrays():
    pool = Pool.of(TensorDataset(X + Y[:, None], Y), Counted())
    assert torch.equal(pool.inputs, X + Y[:, None])
    assert torch.equal(pool.targets, Y)
    assert pool.test_inputs.shape == (3, 4)
    assert pool.test_targets.tolist() == [0, 1, 2]
    assert of(train=TensorDataset(X, Y)).num_clients == 2


def test_classes_of_data_without_classes_are_an_error():
    real = Pool.of((X, Y / 2), (X, Y / 2), name="real").partition(2)
    with pytest.raises(
        DataError, match=r"which classes client 1 holds; it has a real target each.*need one class"
    ):
        real.classes_present(1, 3)
    with pytest.raises(DataError, match=r"3 classes were announced; targets are torch\.float32"):
        Pool.of((X, Y / 2), (X, Y / 2), num_classes=3)


def test_classes_of_a_client_ignore_padding():
    data = of((X, torch.tensor([0, 2, -100, 1, 1, 1])))
    assert data.classes_present(0, 3).tolist() == [True, False, True]
    assert data.classes_present(1, 4).tolist() == [False, True, False, False]


def test_classes_of_sequences_are_all_their_tokens():
    tokens = torch.tensor([[0, 1], [1, 1], [3, -100]])
    data = of((tokens, tokens), (tokens, tokens), [[0, 1], [2]])
    assert data.classes_present(0, 4).tolist() == [True, True, False, False]
    assert data.classes_present(1, 4).tolist() == [False, False, False, True]


def test_samples_take_the_dtype_and_tokens_stay_whole():
    assert of().to(CPU, torch.float64).inputs.dtype == torch.float64
    tokens = torch.zeros(6, 4, dtype=torch.int32)
    moved = of((tokens, Y), (tokens, Y)).to(CPU, torch.float64)
    assert moved.inputs.dtype == moved.test_inputs.dtype == torch.int64


def test_clients_and_domains_may_have_names():
    one, other = ["b", "a", "b", "a", "c", "c"], ["a", "a", "d", "c", "c", "c"]
    pool = Pool.of(
        (X, Y), (X, Y), clients=one, test_clients=other, domains=other, test_domains=np.array(one)
    )
    assert (pool.clients.tolist(), pool.test_clients.tolist()) == (
        [1, 0, 1, 0, 2, 2],
        [0, 0, 3, 2, 2, 2],
    )
    assert (pool.domain_names, pool.domains.tolist()) == (("a", "b", "c", "d"), [0, 0, 3, 2, 2, 2])
    assert Pool.of((X, Y), (X, Y), domains=one, domain_names=("x", "y", "z")).domain_names == (
        "x",
        "y",
        "z",
    )


def test_samples_need_no_gradients():
    inputs = X.clone().requires_grad_()
    pool = Pool.of((inputs, Y), (inputs, Y), public=inputs)
    assert not any(one.requires_grad for one in (pool.inputs, pool.test_inputs, pool.public))
    assert inputs.requires_grad  # the caller's own is as it was


def test_ids_may_be_of_any_whole_kind():
    pool = Pool.of(
        (X.numpy(), Y.numpy().astype(np.uint8)), (X, Y), clients=np.arange(6, dtype=np.uint16)
    )
    assert pool.clients.tolist() == [0, 1, 2, 3, 4, 5]
    assert (
        Pool.of((np.ones((6, 4), np.uint16), Y), (np.ones((6, 4), np.uint16), Y)).inputs.dtype
        == torch.int64
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"train": (X, Y[:5])}, "the training set has 6 inputs and 5 targets"),
        ({"test": (X[:5], Y)}, "the test set has 5 inputs and 6 targets"),
        (
            {"train": ((X, X), Y)},
            "2 inputs a sample were given; one array or tensor of all samples is wanted",
        ),
        (
            {"train": ((X.numpy(), X.numpy()), Y)},
            "2 inputs a sample were given; one array or tensor",
        ),
        (
            {"train": (TensorDataset(X), Y)},
            "inputs are a TensorDataset; one array or tensor of all samples is wanted",
        ),
        (
            {"test": ({"image": X}, Y)},
            "inputs are a dict; one array or tensor of all samples is wanted",
        ),
        (
            {"train": TensorDataset(X)},
            r"the training set: sample 0 is a tuple; a pair \(input, target\) is needed",
        ),
        (
            {"test": Ragged()},
            r"first input has shape \(1,\) and that of sample 1 \(2,\); .*crop, pad or resize",
        ),
        (
            {"test": Ragged(as_list=True)},
            r"the input of sample 0 is a list; a tensor or an array is needed",
        ),
        ({"test": {"x": X, "y": Y}}, r"the test set is a dict; \(inputs, targets\) belong there"),
        (
            {"train": (1.0, 0)},
            "the training set has a single number for inputs or targets; one array or tensor",
        ),
        (
            {"train": (X, Y.double())},
            r"training targets are torch\.float64 and test targets torch\.int64; they must",
        ),
        (
            {"test": (X, Y.float())},
            r"training targets are torch\.int64 and test targets torch\.float32",
        ),
        (
            {"train": (X, np.array(["a"] * 6))},
            "training targets are <U1; classes are whole numbers .* real numbers",
        ),
        ({"train": (X, Y / 0)}, "training targets: 6 of 6 are not finite; leave out these samples"),
        (
            {"train": (np.array([["a"] * 4] * 6), Y)},
            "inputs are <U1; bytes, real numbers or whole numbers fit",
        ),
        (
            {"test": (torch.zeros(6, 5), Y)},
            r"training samples have shape \(4,\).* and test samples \(5,\)",
        ),
        (
            {"test": (X.to(torch.uint8), Y)},
            r"training inputs are torch\.float32 and test inputs torch\.uint8",
        ),
        (
            {"train": (X, Y - 1)},
            "a training target is -1; classes count from 0, and -100 is for padding",
        ),
        ({"parts": [[0, 1], []]}, "client 1 has no data"),
        ({"parts": [[0, 6]]}, "client 0 holds sample 6; the training set has 6"),
        ({"parts": [[0], [2, -1]]}, "client 1 holds sample -1; the training set has 6"),
        ({"test_parts": [[0], [1, 9]]}, "client 1 holds sample 9; the test set has 6"),
        ({"test_parts": [[0]]}, "there are 2 clients but test parts for 1"),
        ({"train": (X[:0], Y[:0])}, "the training set is empty"),
        ({"test": (X[:0], Y[:0])}, "the test set is empty"),
        ({"parts": []}, "no client"),
        (
            {"parts": {0: [1, 2], 1: [3]}},
            "parts are a dict; a list of positions a client is wanted",
        ),
        ({"parts": None}, "parts are a NoneType; a list of positions a client is wanted"),
        (
            {"parts": np.arange(6) % 2},
            r"the part of client 0 is 0; .* Pool\.of\(train, test, clients=owners\)\.partition",
        ),
        ({"parts": torch.arange(6) % 2}, "the part of client 0 is 0; a list of positions a client"),
        (
            {"parts": [[0], [0.7, 1.9]]},
            "the part of client 1 is of float64; positions are whole numbers",
        ),
        ({"parts": [Y[:5] < 2]}, "the mask of client 0 has 5 entries; there are 6 samples"),
        (
            {"test_parts": [[0], Y[:5] < 2]},
            "the mask of client 1 has 5 entries; there are 6 samples",
        ),
        (
            {"test": None},
            r"parts were given and no test set\. .*Pool\.of\(train, clients=owners\)\.partition",
        ),
    ],
)
def test_wrong_data_is_refused_with_a_reason(wrong, message):
    with pytest.raises(DataError, match=message):
        of(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            {"clients": torch.zeros(5, dtype=torch.int64)},
            r"the training set has 6 samples and \(5,\) clients",
        ),
        ({"domains": torch.zeros(6)}, "domains are float32"),
        ({"clients": [0.5] * 6}, "clients are float64; whole numbers from 0 on fit, or names"),
        (
            {"clients": ["a"] * 6, "test_clients": Y},
            "clients are <U1; whole numbers from 0 on fit, or names",
        ),
        ({"domains": torch.full((6,), -1)}, "one of the domains is -1; they count from 0"),
        ({"num_classes": 2}, "there is a target 2; 2 classes were announced"),
    ],
)
def test_clients_and_domains_are_checked_too(wrong, message):
    with pytest.raises(DataError, match=message):
        Pool.of((X, Y), (X, Y), **wrong)


# --- without a test part ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "clients"),
    [([[0, 1, 2], [2, 3]], "0, 1"), ([[0, 1], [2, 2]], "1, 1")],
    ids=["overlap", "duplicate"],
)
def test_samples_that_are_listed_twice_are_pointed_out(parts, clients, caplog):
    samples = (np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1]))
    fq.FederatedData.of(samples, samples, parts, name="mine")
    assert "1 of the 4 training samples of mine are listed more than once" in caplog.text
    assert f"Sample 2 is listed for clients {clients}." in caplog.text


def test_parts_without_repeats_give_no_warning(caplog):
    samples = (np.zeros((4, 3), np.float32), np.array([0, 1, 0, 1]))
    fq.FederatedData.of(samples, samples, [[0, 2], [3]])
    assert not caplog.text


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_test_samples_that_are_not_finite_are_pointed_out(value, caplog):
    train, test = np.zeros((4, 3), np.float32), np.zeros((4, 3), np.float32)
    test[[1, 3], 0] = value
    Pool.of((train, np.array([0, 1, 0, 1])), (test, np.array([0, 1, 0, 1])), name="mine")
    assert "2 of the 4 test samples of mine hold values that are not finite" in caplog.text


def test_without_a_test_part_a_fifth_is_held_out_with_a_warning(caplog):
    with caplog.at_level(logging.WARNING):
        pool = Pool.of((torch.arange(20.0)[:, None], torch.arange(20)), name="mine", num_classes=20)
    assert "mine has no test part: 4 of its 20 samples are held out for testing." in caplog.text
    assert len(pool.test_targets) == 4
    assert sorted(torch.cat([pool.targets, pool.test_targets]).tolist()) == list(range(20))
    assert torch.equal(pool.test_inputs[:, 0].long(), pool.test_targets)  # pairs stay together


def test_every_client_gives_a_fifth():
    clients = torch.tensor([0] * 10 + [2] * 5 + [1] * 4)
    pool = Pool.of((torch.arange(19.0)[:, None], torch.arange(19)), clients=clients)
    assert torch.bincount(pool.test_clients).tolist() == [2, 0, 1]
    assert torch.bincount(pool.clients).tolist() == [8, 4, 4]
    assert torch.equal(clients[pool.targets], pool.clients)  # targets are the positions they had
    data = pool.partition(partition=Natural())
    assert [len(part) for part in data.test_parts] == [2, 0, 1]


def test_too_little_to_hold_out_is_refused():
    with pytest.raises(DataError, match="4 samples are too few to hold out a fifth"):
        Pool.of((X[:4], Y[:4]))


# --- what models see ----------------------------------------------------------------------------


def bytes_pool(**options) -> Pool:
    pictures = torch.arange(2 * 3 * 4, dtype=torch.uint8).reshape(4, 3, 1, 2) * 10
    return Pool.of((pictures, Y[:4]), (pictures, Y[:4]), scale=Scale.of(pictures, **options))


def test_bytes_stay_bytes_and_are_seen_as_numbers_of_the_dtype_asked_for():
    pool = bytes_pool(normalize="none")
    moved = pool.to(CPU, torch.float64)
    assert moved.inputs.dtype == torch.uint8
    rows = torch.tensor([[1, 2], [3, 0]])
    assert torch.equal(moved.samples(rows), pool.inputs[rows].double() / 255)
    assert torch.equal(moved.test_samples(rows[0]), pool.inputs[rows[0]].double() / 255)
    assert pool.example.dtype == torch.float32
    assert pool.example.shape == (2, 3, 1, 2)


def test_bytes_without_a_scale_are_seen_from_0_to_1():
    pictures = torch.full((6, 1, 2, 2), 255, dtype=torch.uint8)
    assert of((pictures, Y), (pictures, Y)).example.unique().tolist() == [1.0]


def test_channels_are_normalised_by_their_mean_and_deviation():
    pool = bytes_pool().to(CPU, torch.float64)
    seen = pool.samples(torch.arange(4))
    torch.testing.assert_close(
        seen.mean((0, 2, 3)), torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        seen.std((0, 2, 3), correction=0), torch.ones(3, dtype=torch.float64), rtol=1e-6, atol=0
    )


def test_channels_are_normalised_by_given_numbers_in_units_of_white():
    seen = bytes_pool(mean=(0.5, 0.0, 0.1), std=(0.5,)).example
    raw = bytes_pool(normalize="none").example
    torch.testing.assert_close(seen, (raw - torch.tensor([0.5, 0, 0.1]).reshape(3, 1, 1)) / 0.5)


def test_real_numbers_are_normalised_on_request_only():
    numbers = torch.tensor([[1.0, 5.0], [3.0, 5.0]])
    assert Scale.of(numbers) is None
    seen = Scale.of(numbers, "channel")(numbers)
    assert seen.tolist() == [[-1, 0], [1, 0]]  # a feature that never changes is not divided by zero


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mean": (0.5,)}, "mean and std go together"),
        (
            {"mean": (0.5, 0.5), "std": (1.0,)},
            "2 means and 1 stds were given; a sample has 3 channels",
        ),
        ({"mean": (0.5,), "std": (0.0,)}, "every one must be above 0"),
    ],
)
def test_impossible_normalisations_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        bytes_pool(**options)


def test_tokens_are_not_normalised():
    with pytest.raises(ConfigError, match=r"normalize was asked for inputs of torch\.int64"):
        Scale.of(torch.zeros(2, 3, dtype=torch.int64), "channel")


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_engines_train_on_bytes_as_on_the_scaled_numbers(residual, play, engine):
    generator = torch.Generator().manual_seed(3)
    pictures = torch.randint(256, (40, 1, 6, 6), generator=generator, dtype=torch.uint8)
    targets = torch.randint(4, (40,), generator=generator)
    # "post" norms run calibration, crops and flips the augmentation
    local = fq.LocalTraining(norm="post", crop=1, flip=True, batch_size=4)
    scale = Scale.of(pictures)
    bytes_ = Pool.of((pictures, targets), (pictures, targets), scale=scale).partition(3)
    seen = scale.to(CPU, torch.float64)(pictures)
    numbers = Pool.of((seen, targets), (seen, targets)).partition(3)
    runs = [
        play(fq.methods.HeteroFL(local=local), residual, data, (1.0, 0.5), engine)
        for data in (bytes_, numbers)
    ]
    torch.testing.assert_close(
        dict(runs[0].server.weights), dict(runs[1].server.weights), rtol=0, atol=1e-12
    )
    assert runs[0].accuracy == runs[1].accuracy


# --- public data --------------------------------------------------------------------------------


def test_public_samples_are_taken_from_the_clients():
    pool = Pool.of(
        (torch.arange(20.0)[:, None], torch.arange(20)), (X[:, :1], Y), clients=torch.arange(20)
    )
    shared = pool.with_public(0.2)
    assert shared.public.shape == (4, 1)
    assert sorted(shared.public[:, 0].tolist() + shared.inputs[:, 0].tolist()) == list(range(20))
    assert torch.equal(shared.inputs[:, 0].long(), shared.targets)
    assert torch.equal(shared.clients, shared.targets)
    assert shared.partition(4).to(CPU, torch.float64).public.dtype == torch.float64
    assert pool.with_public(0.0) is pool
    with pytest.raises(ConfigError, match=r"public = 1\.0 was asked for"):
        pool.with_public(1.0)


def test_partitioned_data_can_be_partitioned_again():
    data = Pool.of((X, Y), (X, Y)).partition(2)
    again = data.partition(3, Labels(1))
    assert (data.num_clients, again.num_clients) == (2, 3)
    assert torch.equal(again.inputs, data.inputs)


@pytest.mark.parametrize("kind", [object, "S1", str])
def test_clients_are_called_by_names_of_any_kind(kind):
    owners = np.array(list("abab"), dtype=kind)
    data = fq.data.Pool.of(
        (np.zeros((4, 2), np.float32), np.arange(4) % 2), TEST, clients=owners
    ).partition()
    assert [part.tolist() for part in data.parts] == [[0, 2], [1, 3]]


def test_rows_may_be_a_tuple_of_lists():
    pool = fq.data.Pool.of((tuple([float(row), 1.0] for row in range(4)), [0, 1, 0, 1]), TEST)
    assert pool.inputs.shape == (4, 2)


TEST = (np.zeros((2, 2), np.float32), np.arange(2))
