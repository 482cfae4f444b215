"""Sources: digits, .npz files, and the names a user may give."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import (
    DATA,
    Domains,
    Labels,
    Natural,
    diabetes,
    digits,
    digits_labels,
    npz,
    source,
)
from fedquilt.errors import ConfigError, DataError

RNG = np.random.default_rng(0)


def save(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def pictures(count: int = 20, shape: tuple[int, ...] = (5, 5, 3)) -> np.ndarray:
    return RNG.integers(0, 256, (count, *shape), dtype=np.uint8)


@pytest.mark.parametrize("labels", [0, 2])
def test_digits(labels):
    data = digits().partition(20, Labels(labels)) if labels else digits().partition(20)
    assert DATA["digits"] is source("digits") is digits
    assert len(data.test_targets) == 1797 // 5
    assert len(data.targets) + len(data.test_targets) == 1797
    assert data.inputs.shape[1:] == (1, 8, 8)
    assert 0 <= float(data.inputs.min()) <= float(data.inputs.max()) <= 1
    assert data.num_clients == len(data.test_parts) == 20
    held = [int(data.classes_present(client, 10).sum()) for client in range(20)]
    assert set(held) == {2} if labels else min(held) >= 8


def test_a_fifth_of_the_digits_may_be_public():
    pool = digits(public=0.2)
    assert pool.public.shape == (288, 1, 8, 8)
    assert len(pool.targets) == 1438 - 288
    assert digits().public is None


def test_digits_have_labels():
    pool, plain = digits_labels(), digits()
    assert DATA["digits-labels"] is source("digits-labels") is digits_labels
    assert pool.class_names == ("even", "prime", "at least 5")
    assert (pool.num_classes, pool.num_outputs, pool.targets.dtype) == (0, 3, torch.bool)
    assert torch.equal(pool.inputs, plain.inputs)
    rows = [pool.targets[plain.targets == digit].unique(dim=0).tolist() for digit in range(10)]
    assert rows == [
        [[even, prime, large]]
        for even, prime, large in [
            (True, False, False),
            (False, False, False),
            (True, True, False),
            (False, True, False),
            (True, False, False),
            (False, True, True),
            (True, False, True),
            (False, True, True),
            (True, False, True),
            (False, False, True),
        ]
    ]
    assert digits_labels(public=0.2).public.shape == (288, 1, 8, 8)


def test_diabetes_is_a_regression_in_units_of_the_training_set():
    pool = diabetes()
    assert DATA["diabetes"] is source("diabetes") is diabetes
    assert (len(pool.targets), len(pool.test_targets)) == (354, 88)
    assert (pool.inputs.shape[1:], pool.inputs.dtype, pool.targets.dtype) == (
        (10,),
        torch.float32,
        torch.float32,
    )
    assert (pool.num_classes, pool.num_outputs) == (0, 1)
    for values in (pool.inputs, pool.targets[:, None]):
        torch.testing.assert_close(values.mean(0), torch.zeros(values.shape[1]), rtol=0, atol=1e-6)
        torch.testing.assert_close(values.std(0, correction=0), torch.ones(values.shape[1]))
    assert 0.7 < float(pool.test_targets.std()) < 1.3
    assert diabetes(public=0.5).public.shape == (177, 10)
    with pytest.raises(
        DataError,
        match=r"Labels partitions by class; a target of diabetes has shape \(\) and is float32",
    ):
        pool.partition(4, Labels(2))


def test_real_targets_and_rows_of_labels_in_a_file(tmp_path):
    x, y = np.zeros((10, 2), np.float32), np.linspace(0, 1, 10)
    assert npz(save(tmp_path / "real.npz", x_train=x, y_train=y)).targets.dtype == torch.float64
    assert (
        npz(save(tmp_path / "labels.npz", x_train=x, y_train=np.ones((10, 3), bool))).num_outputs
        == 3
    )


# --- arrays -------------------------------------------------------------------------------------


def test_arrays_with_users_and_domains(tmp_path):
    x, tx = pictures(), pictures(6)
    path = save(
        tmp_path / "mine.npz",
        x_train=x,
        y_train=np.arange(20, dtype=np.uint8) % 3,
        x_test=tx,
        y_test=np.arange(6) % 3,
        client_train=np.repeat(np.array([7, 3, 900, 5], np.uint16), 5),
        client_test=np.array([3, 3, 5, 1, 1, 1], np.uint16),
        domain_train=np.arange(20) % 2,
        domain_test=np.arange(6) % 2,
        domains=np.array(["day", "night"]),
        classes=np.array(["ant", "bee", "cat"]),
    )
    pool = source(path)()
    assert pool.name == "mine"
    assert pool.inputs.dtype == torch.uint8
    assert torch.equal(pool.inputs, torch.tensor(x).permute(0, 3, 1, 2))  # channels were last
    assert torch.equal(pool.test_inputs, torch.tensor(tx).permute(0, 3, 1, 2))
    assert (pool.class_names, pool.domain_names) == (("ant", "bee", "cat"), ("day", "night"))
    natural = pool.partition(partition=Natural())
    assert [part.tolist() for part in natural.parts] == [
        [5, 6, 7, 8, 9],
        [15, 16, 17, 18, 19],
        [0, 1, 2, 3, 4],
        [10, 11, 12, 13, 14],
    ]
    assert [part.tolist() for part in natural.test_parts] == [[0, 1], [2], [], []]
    assert pool.partition(4, Domains()).parts.sizes.tolist() == [5, 5, 5, 5]


def test_some_domains_of_a_file(tmp_path):
    x, tx = pictures(30), pictures(12)
    arrays = {
        "x_train": x,
        "y_train": np.arange(30) // 3 % 5,
        "x_test": tx,
        "y_test": np.arange(12) // 3 % 4,
    }
    homes = {
        "domain_train": np.arange(30) % 3,
        "domain_test": np.arange(12) % 3,
        "client_train": np.arange(30) // 10,
    }
    names = {"domains": np.array(["day", "dusk", "night"])}
    path = save(tmp_path / "mine.npz", **arrays, **homes, **names)
    whole = npz(path)
    pool = npz(path, domains=("night", "day"))
    kept, test_kept = np.arange(30) % 3 != 1, np.arange(12) % 3 != 1
    assert pool.domain_names == ("night", "day")
    assert pool.domains.tolist() == [1, 0] * 10
    assert pool.test_domains.tolist() == [1, 0] * 4
    assert torch.equal(pool.inputs, whole.inputs[torch.tensor(kept)])
    assert torch.equal(pool.test_inputs, whole.test_inputs[torch.tensor(test_kept)])
    assert torch.equal(pool.targets, whole.targets[torch.tensor(kept)])
    assert torch.equal(pool.clients, whole.clients[torch.tensor(kept)])
    seen = pool.samples(torch.arange(20))
    # and not those left out
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    by_name = save(
        tmp_path / "named.npz", **arrays, domain_train=names["domains"][homes["domain_train"]]
    )
    with pytest.raises(DataError, match="test samples of named have no domains"):
        npz(by_name, domains=("night",))
    with pytest.raises(
        DataError, match=r"domain 'noon' was asked for; mine has these by name: day, dusk, night\."
    ):
        npz(path, domains=("night", "noon"))
    with pytest.raises(DataError, match="name each of them once"):
        npz(path, domains=("night", "night"))
    with pytest.raises(DataError, match="domains day were asked for; mine is partitioned already"):
        whole.partition(3).with_domains(["day"])
    bare = save(tmp_path / "bare.npz", **arrays)
    with pytest.raises(
        DataError, match="domains day were asked for; samples of bare have no domains"
    ):
        npz(bare, domains=("day",))


def test_ids_and_classes_may_be_names(tmp_path):
    path = save(
        tmp_path / "named.npz",
        x_train=RNG.normal(size=(10, 4)),
        y_train=np.array(["no", "yes"] * 5),
        client_train=np.array(["ann"] * 5 + ["bob"] * 5),
    )
    pool = npz(path)
    assert (pool.class_names, pool.num_classes) == (("no", "yes"), 2)
    assert len(pool.test_targets) == 2
    assert pool.partition(partition=Natural()).parts.sizes.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("shape", "dtype", "channels", "seen"),
    [
        ((28, 28), np.uint8, "auto", (1, 28, 28)),
        ((32, 32, 3), np.uint8, "auto", (3, 32, 32)),
        ((3, 32, 32), np.uint8, "auto", (3, 32, 32)),
        ((32, 32, 2), np.float32, "auto", (32, 32, 2)),
        ((32, 32, 2), np.float32, "last", (2, 32, 32)),
        ((3, 8, 3), np.float32, "auto", (3, 8, 3)),
        ((8, 8, 3), np.float32, "first", (8, 8, 3)),
        ((7,), np.float32, "auto", (7,)),
        ((9, 4), np.float32, "auto", (9, 4)),
    ],
)
def test_channels_come_first(tmp_path, shape, dtype, channels, seen):
    path = save(
        tmp_path / "x.npz", x_train=np.zeros((10, *shape), dtype), y_train=np.arange(10) % 2
    )
    assert npz(path, channels=channels).inputs.shape[1:] == seen


def test_images_are_normalised_by_their_training_part(tmp_path):
    path = save(
        tmp_path / "x.npz",
        x_train=pictures(),
        y_train=np.arange(20),
        x_test=pictures(),
        y_test=np.arange(20),
    )
    pool = npz(path)
    seen = pool.samples(torch.arange(20))
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-5)
    raw = npz(path, normalize="none").samples(torch.arange(20))
    assert torch.equal(raw, pool.inputs.float() / 255)
    given = npz(path, mean=(0.5,), std=(0.25,)).samples(torch.arange(20))
    torch.testing.assert_close(given, (raw - 0.5) / 0.25)


def test_public_arrays_in_the_file_are_handed_over(tmp_path):
    path = save(
        tmp_path / "x.npz", x_train=pictures(), y_train=np.arange(20) % 2, public=pictures(7)
    )
    assert npz(path).public.shape == (7, 3, 5, 5)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "has no x_train and no y_train. Found: x"),
        ({"x_train": np.zeros((3, 2))}, "has no y_train"),
        (
            {"x_train": np.zeros((9, 2)), "y_train": np.zeros(9, int), "x_test": np.zeros((1, 2))},
            "one of x_test and y_t",
        ),
        (
            {"x_train": np.zeros((9, 2)), "y_train": np.full(9, np.nan)},
            "training targets: 9 of 9 are not finite",
        ),
        (
            {"x_train": np.zeros((9, 2)), "y_train": np.zeros(9, int), "client_test": np.zeros(9)},
            "client_test but no cl",
        ),
        (
            {
                "x_train": np.zeros((9, 2)),
                "y_train": np.zeros(9, int),
                "client_train": np.zeros(8, int),
            },
            "9 samples and",
        ),
    ],
)
def test_files_that_lack_something_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        npz(save(tmp_path / "x.npz", **arrays))


def test_files_are_never_unpickled(tmp_path):
    path = save(tmp_path / "x.npz", x_train=np.array([{}]), y_train=np.zeros(1, int))
    with pytest.raises(
        DataError, match=r"x\.npz: the array 'x_train' cannot be read: .* nothing is unpickled"
    ):
        npz(path)


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 broken"])
def test_broken_files_are_refused(tmp_path, content):
    path = tmp_path / "x.npz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"x\.npz cannot be read as an \.npz file"):
        source(str(path))()


# --- names --------------------------------------------------------------------------------------


def test_unknown_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no data set named 'digit'\. Did you mean 'digits'"):
        source("digit")
    with pytest.raises(
        DataError, match=r"'nowhere\.npz' was asked for; there is no such file or folder in"
    ):
        source("nowhere.npz")
    (tmp_path / "table.xlsx").touch()
    with pytest.raises(
        DataError, match=r"'table\.xlsx' was asked for; \.npz, \.txt, \.json, a folder"
    ):
        source("table.xlsx")


def test_names_find_their_source(tmp_path):
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.json").touch()
    save(tmp_path / "a.npz", x_train=np.zeros(1))
    save(tmp_path / "words.npz", text=np.zeros(1), start=np.zeros(1))
    found = {
        name: source(str(tmp_path / name)).func.__name__
        for name in ("a.txt", "a.json", "a.npz", "words.npz", "")
    }
    assert found == {
        "a.txt": "text",
        "a.json": "text",
        "a.npz": "npz",
        "words.npz": "text",
        "": "images",
    }
    hub = source("hub:owner/name")
    assert (hub.func.__name__, hub.args) == ("hub", ("owner/name",))
