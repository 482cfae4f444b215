"""Small files in published layouts, on a local server, become the right arrays."""

from __future__ import annotations

import gzip
import hashlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import Domains, Natural, npz
from fedquilt.data.prepare import DATA_SETS, Published, Recipe, download, missing_message, prepare
from fedquilt.data.prepare.digits import DOMAINS
from fedquilt.data.prepare.download import Downloads
from fedquilt.errors import ConfigError, DataError
from tests.unit.data import published
from tests.unit.data.published import CLASSES, Host, digits_of, hosted, pixels, tar_gz

SMALL = Recipe(per_domain=20)
everything = cache(published.published_files)


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with hosted(everything()) as found:
        yield found


def loaded(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


# --- the right arrays ---------------------------------------------------------------------------


def test_cifar10_from_its_binary_batches(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar10")
    (found,) = prepare(["cifar10"], tmp_path)
    arrays = loaded(tmp_path / "cifar10.npz")
    assert {name: array.shape for name, array in arrays.items()} == found.shapes
    assert arrays["x_train"].shape == (10, 3, 32, 32)
    assert arrays["y_train"].tolist() == [1, 2, 2, 3, 3, 4, 4, 5, 5, 6]
    assert arrays["y_test"].tolist() == [9, 0, 5]
    assert tuple(arrays["classes"]) == CLASSES
    third = pixels(3, 2, 3073)[1, 1:].reshape(3, 32, 32)
    assert np.array_equal(arrays["x_train"][5], third)
    assert npz(str(tmp_path / "cifar10.npz")).inputs.shape == (10, 3, 32, 32)


def test_cifar100_has_its_fine_classes(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar100")
    prepare(["cifar100"], tmp_path)
    arrays = loaded(tmp_path / "cifar100.npz")
    assert arrays["y_train"].tolist() == [0, 42, 99]
    assert arrays["y_test"].tolist() == [7, 98]
    assert arrays["classes"][42] == "class_42"
    assert np.array_equal(arrays["x_test"][1], pixels(2, 2, 3074)[1, 2:].reshape(3, 32, 32))


def test_mnist_with_its_writers(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "mnist_writers")
    prepare(["mnist_writers"], tmp_path)
    arrays = loaded(tmp_path / "mnist_writers.npz")
    for split, count in (("train", 30), ("test", 20)):
        assert np.array_equal(arrays[f"x_{split}"], pixels(count, count, 28, 28))
        assert np.array_equal(arrays[f"y_{split}"], digits_of(split))
        assert np.array_equal(arrays[f"client_{split}"], 2100 + np.arange(count) // 4)
    assert npz(str(tmp_path / "mnist_writers.npz")).partition(partition=Natural()).num_clients == 8


def test_digits5_is_balanced_in_every_domain(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "digits5")
    prepare(["digits5"], tmp_path, recipe=SMALL)
    arrays = loaded(tmp_path / "digits5.npz")
    assert tuple(arrays["domains"]) == DOMAINS == ("mnist", "svhn", "usps", "syn", "mnistm")
    for split, count in (("train", 20), ("test", 10)):
        images, digits, homes = (arrays[f"{lead}_{split}"] for lead in ("x", "y", "domain"))
        assert (images.shape, images.dtype) == ((5 * count, 28, 28, 3), np.uint8)
        for home in range(5):
            assert np.bincount(digits[homes == home]).tolist() == [count // 10] * 10
    data = npz(str(tmp_path / "digits5.npz"), domains=("usps", "mnistm")).partition(2, Domains())
    assert data.domain_names == ("usps", "mnistm")


def test_images_of_digits5_are_those_of_their_sources(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "digits5")
    prepare(["digits5"], tmp_path, recipe=SMALL)
    arrays = loaded(tmp_path / "digits5.npz")

    def part(domain: str) -> tuple[np.ndarray, np.ndarray]:
        rows = arrays["domain_train"] == DOMAINS.index(domain)
        return arrays["x_train"][rows], arrays["y_train"][rows]

    labels = digits_of("train")
    sources = {
        "mnist": np.repeat(pixels(30, 30, 28, 28)[..., None], 3, axis=3),
        "svhn": published.svhn_images("train")[:, :28, :28],
        "mnistm": np.stack([published.mnistm_image(place) for place in range(30)]),
    }
    for domain, source in sources.items():
        by_bytes = {
            image.tobytes(): int(label) for image, label in zip(source, labels, strict=True)
        }
        images, digits = part(domain)
        assert len({image.tobytes() for image in images}) == 20
        assert [by_bytes[image.tobytes()] for image in images] == digits.tolist()
    images, digits = part("usps")
    for image, digit in zip(images, digits, strict=True):
        assert np.array_equal(np.unique(image), [20 * int(digit)])


def test_another_seed_chooses_other_images(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "digits5")
    seeds = [
        prepare(["digits5"], tmp_path / str(place), recipe=replace(SMALL, seed=seed))
        for place, seed in enumerate((0, 0, 1))
    ]
    sums = [found.sha256 for (found,) in seeds]
    assert sums[0] == sums[1] != sums[2]


# --- downloads ----------------------------------------------------------------------------------


def test_a_second_call_downloads_nothing(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar10")
    (first,) = prepare(["cifar10"], tmp_path)
    assert host.requests == ["cifar-10-binary.tar.gz"]
    assert first.files[0].origin == f"{host.url}/cifar-10-binary.tar.gz"
    (second,) = prepare(["cifar10"], tmp_path, force=True)
    assert len(host.requests) == 1
    assert second.files[0].origin == ""
    assert first.sha256 == second.sha256
    assert sorted(path.name for path in (tmp_path / "downloads").iterdir()) == [
        "cifar-10-binary.tar.gz"
    ]


def test_files_of_two_data_sets_are_downloaded_once(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "mnist_writers")
    host.publish(monkeypatch, "digits5")
    prepare(["mnist_writers", "digits5"], tmp_path, recipe=SMALL)
    assert len(host.requests) == len(set(host.requests)) == 11


def test_an_existing_file_is_kept_without_force(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar10")
    path = tmp_path / "cifar10.npz"
    path.write_text("mine")
    with pytest.raises(
        ConfigError,
        match=r"cifar10\.npz was asked for; it is there already\. --force writes over it",
    ):
        prepare(["cifar10"], tmp_path)
    assert path.read_text() == "mine"
    assert not host.requests
    prepare(["cifar10"], tmp_path, force=True)
    assert "x_train" in loaded(path)


def test_a_folder_or_another_host_may_have_the_files(host, tmp_path, monkeypatch):
    data_set = host.publish(monkeypatch, "cifar10")
    elsewhere = replace(data_set.files[0], urls=("http://127.0.0.1:9/none.tar.gz",))
    monkeypatch.setitem(DATA_SETS, "cifar10", replace(data_set, files=(elsewhere,)))
    folder = tmp_path / "copies"
    folder.mkdir()
    (folder / elsewhere.name).write_bytes(host.files[elsewhere.name])
    sums = set()
    for place, origin in enumerate((str(folder), folder.as_uri(), host.url, f"{host.url}/")):
        (found,) = prepare(["cifar10"], tmp_path / str(place), origin=origin)
        sums.add(found.sha256)
    assert len(sums) == 1
    assert not (tmp_path / "0" / "downloads").exists()
    with pytest.raises(
        DataError, match=r"none/cifar-10-binary\.tar\.gz is needed; it cannot be read: No such file"
    ):
        prepare(["cifar10"], tmp_path, origin=str(tmp_path / "none"))


def test_the_next_place_is_tried(host, tmp_path, monkeypatch):
    data_set = host.publish(monkeypatch, "cifar10")
    file = data_set.files[0]
    monkeypatch.setitem(
        DATA_SETS,
        "cifar10",
        replace(data_set, files=(replace(file, urls=(f"{host.url}/gone", *file.urls)),)),
    )
    (found,) = prepare(["cifar10"], tmp_path)
    assert host.requests == ["gone", "cifar-10-binary.tar.gz"]
    assert found.files[0].origin == file.urls[0]


def test_a_file_without_a_published_checksum_is_reported(host, tmp_path, monkeypatch):
    data_set = host.publish(monkeypatch, "cifar10")
    monkeypatch.setitem(
        DATA_SETS, "cifar10", replace(data_set, files=(replace(data_set.files[0], md5=""),))
    )
    (found,) = prepare(["cifar10"], tmp_path)
    assert not found.files[0].is_checked
    assert found.files[0].sha256 == hashlib.sha256(host.files["cifar-10-binary.tar.gz"]).hexdigest()
    assert found.to_dict()["files"][0]["checked"] is False


def nothing_was_kept(folder: Path) -> bool:
    return not [path for path in folder.rglob("*") if path.is_file()]


def test_a_wrong_sum(host, tmp_path, monkeypatch):
    file = host.publish(monkeypatch, "cifar10").files[0]
    data = bytearray(host.files[file.name])
    data[100] ^= 1
    host.files[file.name] = bytes(data)
    wrong = hashlib.md5(data, usedforsecurity=False).hexdigest()
    with pytest.raises(
        DataError, match=f"has the MD5 sum {wrong}; the published file has {file.md5}"
    ):
        prepare(["cifar10"], tmp_path)
    assert nothing_was_kept(tmp_path)
    own = tmp_path / "downloads" / file.name
    own.write_bytes(data)
    with pytest.raises(DataError, match=rf"{file.name} has the MD5 sum {wrong}; .* Move it away"):
        prepare(["cifar10"], tmp_path)
    assert own.read_bytes() == data  # what is there stays
    with pytest.raises(DataError, match=r"Replace it by the published file, or leave --from out"):
        prepare(["cifar10"], tmp_path, origin=str(own.parent))
    own.unlink()
    with pytest.raises(
        DataError, match=rf"is needed; it cannot be read: .* It is published at http.*{file.name}\."
    ):
        prepare(["cifar10"], tmp_path, origin=str(own.parent))


def test_a_file_that_is_not_there(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar10")
    del host.files["cifar-10-binary.tar.gz"]
    with pytest.raises(
        DataError, match=r"cifar-10-binary\.tar\.gz could not be downloaded: .*HTTP status 404"
    ):
        prepare(["cifar10"], tmp_path)
    assert nothing_was_kept(tmp_path)


@pytest.mark.parametrize(
    ("announced", "said"),
    [
        (1_000_000, "announces 1,000,000 bytes; the published file has at most"),
        (50, "has the MD5 sum"),  # what follows is not read
    ],
)
def test_an_announced_size_that_is_not_true(announced, said, host, tmp_path, monkeypatch):
    file = host.publish(monkeypatch, "cifar10").files[0]
    host.announced[file.name] = announced
    with pytest.raises(DataError, match=said):
        prepare(["cifar10"], tmp_path)
    assert nothing_was_kept(tmp_path)


def test_a_download_that_breaks_off(host, tmp_path, monkeypatch):
    file = host.publish(monkeypatch, "cifar10").files[0]
    host.announced[file.name] = file.max_bytes
    host.files[file.name] = host.files[file.name][:500]
    with pytest.raises(
        DataError, match=rf"broke off after 500 of {file.max_bytes:,} bytes\. Try again"
    ):
        prepare(["cifar10"], tmp_path)
    assert nothing_was_kept(tmp_path)


def test_a_download_that_announces_no_size(host, tmp_path, monkeypatch):
    file = host.publish(monkeypatch, "cifar10").files[0]
    host.announced[file.name] = -1
    (found,) = prepare(["cifar10"], tmp_path)
    assert found.files[0].bytes == file.max_bytes


def test_more_than_the_published_file_has(host, tmp_path, monkeypatch):
    file = host.publish(monkeypatch, "cifar10").files[0]
    host.announced[file.name] = -1
    host.files[file.name] += bytes(1000)
    with pytest.raises(DataError, match=f"sends more than {file.max_bytes:,} bytes"):
        prepare(["cifar10"], tmp_path)
    assert nothing_was_kept(tmp_path)


def test_a_host_that_falls_silent(tmp_path, monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 10\r\n\r\nabc")
                done.wait(5)

        done = threading.Event()
        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/one"
        with pytest.raises(DataError, match="broke off: timed out"):
            Downloads(tmp_path).fetch(Published("one", (url,), 10, 10))
        done.set()
        thread.join(5)
    assert nothing_was_kept(tmp_path)


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://127.0.0.1/one"])
def test_redirections_lead_to_no_local_file(target, host, tmp_path):
    host.redirected["one"] = target
    with pytest.raises(DataError, match="one could not be downloaded"):
        Downloads(tmp_path).fetch(Published("one", (f"{host.url}/one",), 1000, 1000))
    host.redirected["two"] = f"{host.url}/usps.bz2"
    found = Downloads(tmp_path).fetch(Published("two", (f"{host.url}/two",), 10**6, 10**6))
    assert found.path.read_bytes() == host.files["usps.bz2"]


def test_other_protocols_are_refused(tmp_path):
    with pytest.raises(
        DataError, match=r"ftp://127\.0\.0\.1/one was asked for; only http, https, file are read"
    ):
        Downloads(tmp_path, "ftp://127.0.0.1").fetch(Published("one", (), 10, 10))


# --- files that are not laid out as published ---------------------------------------------------

FOLDER = "cifar-10-batches-bin"


def without(name: str) -> dict[str, bytes]:
    return {key: data for key, data in published.cifar10_members().items() if key != name}


@pytest.mark.parametrize(
    ("archive", "said"),
    [
        (
            lambda: tar_gz(without(f"{FOLDER}/test_batch.bin")),
            f"has no member {FOLDER}/test_batch.bin",
        ),
        (
            lambda: tar_gz(
                without(f"{FOLDER}/test_batch.bin"), {f"{FOLDER}/test_batch.bin": "/etc/passwd"}
            ),
            f"unexpected member: {FOLDER}/test_batch.bin is no plain file",
        ),
        (
            lambda: tar_gz(
                published.cifar10_members() | {f"./{FOLDER}/test_batch.bin": bytes(3073)}
            ),
            f"unexpected member: {FOLDER}/test_batch.bin is there twice",
        ),
        (
            lambda: tar_gz({"../evil": b"1", **published.cifar10_members()}),
            "'../evil', whose path leads out",
        ),
        (
            lambda: tar_gz({"/tmp/evil": b"1", **published.cifar10_members()}),
            "'/tmp/evil', whose path leads out",
        ),
        (
            lambda: tar_gz(published.cifar10_members() | {f"{FOLDER}/test_batch.bin": bytes(3072)}),
            "test_batch.bin has 3,072 bytes, which are no whole records of 3,073",
        ),
        (
            lambda: tar_gz(
                published.cifar10_members() | {f"{FOLDER}/test_batch.bin": b"\x0a" + bytes(3072)}
            ),
            "has a label 10 of 10 classes",
        ),
        (lambda: tar_gz(published.cifar10_members())[:-2000], "is damaged"),
        (lambda: b"no archive", "is damaged"),
        (
            lambda: tar_gz(published.cifar10_members() | {"large": bytes(10**6)}),
            "unpacks to more than 100,000 bytes",
        ),
    ],
)
def test_archives_that_are_not_as_published(archive, said, host, tmp_path, monkeypatch):
    host.files["cifar-10-binary.tar.gz"] = archive()
    host.publish(monkeypatch, "cifar10", max_unpacked=100_000)
    with pytest.raises(DataError, match=said):
        prepare(["cifar10"], tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [
        "cifar-10-binary.tar.gz"
    ]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            gzip.compress(b"\0\0\x08\x01" + bytes(8)),
            "no IDX file of 3 dimensions: it begins with 00000801",
        ),
        (
            gzip.compress(b"\0\0\x08\x03" + np.array([2, 28, 28], ">i4").tobytes() + bytes(100)),
            r"array of \(2, 28, 28\)",
        ),
        (gzip.compress(bytes(10**6)), "unpacks to more than 50,000 bytes"),
        (gzip.compress(pixels(0, 30, 28, 28).tobytes())[:-9], "is damaged"),
        (published.idx_gz(pixels(0, 4, 28, 28)), "30 labels"),
    ],
    # The bytes have the time of their compression in them.
    ids=[
        "dimensions",
        "shape",
        "large",
        "cut",
        "count",
    ],
)
def test_idx_files_that_are_not_as_published(data, said, host, tmp_path, monkeypatch):
    host.files["train-images-idx3-ubyte.gz"] = data
    host.publish(monkeypatch, "mnist_writers", max_unpacked=50_000)
    with pytest.raises(DataError, match=said):
        prepare(["mnist_writers"], tmp_path)


def test_writers_belong_to_the_images(host, tmp_path, monkeypatch):
    labels = published.qmnist_labels("train")
    labels[:, 0] = (labels[:, 0] + 1) % 10
    host.files["qmnist-train-labels-idx2-int.gz"] = published.idx_gz(labels)
    host.publish(monkeypatch, "mnist_writers")
    with pytest.raises(DataError, match="30 of QMNIST's train labels differ from MNIST's"):
        prepare(["mnist_writers"], tmp_path)


def mat(**arrays: np.ndarray) -> bytes:
    import io

    from scipy.io import savemat

    buffer = io.BytesIO()
    savemat(buffer, arrays)
    return buffer.getvalue()


def libsvm(text: str) -> bytes:
    import bz2

    return bz2.compress(text.encode())


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("train_32x32.mat", b"no MATLAB", "is no MATLAB file with X and y"),
        ("train_32x32.mat", mat(X=pixels(0, 32, 32, 3, 4)), "is no MATLAB file with X and y"),
        ("train_32x32.mat", mat(X=pixels(0, 32, 32, 3, 4), y=np.ones((3, 1))), "and 3 labels"),
        ("usps.bz2", libsvm("one 1:0.5"), "line 1: invalid literal"),
        ("usps.bz2", libsvm("1 257:0.5"), "line 1: index 256"),
        ("usps.bz2", libsvm("1 1:7"), "pixels outside −1 to 1"),
        ("usps.bz2", libsvm("1 1:nan"), "pixels outside −1 to 1"),
        ("usps.bz2", libsvm("11 1:0.5"), "labels outside 1 to 10"),
        (
            "usps.bz2",
            libsvm("1 1:0.5"),
            "2 images of the digit 0 were asked for; USPS's train part has 1",
        ),
        ("usps.bz2", b"BZh9 no", "is damaged"),
        (
            "mnist_m.tar.gz",
            tar_gz({"mnist_m/other": b""}),
            "has no member mnist_m/mnist_m_train_labels.txt",
        ),
        (
            "mnist_m.tar.gz",
            tar_gz({"mnist_m/mnist_m_train_labels.txt": b"a b c"}),
            "has the line 'a b c'",
        ),
    ],
)
def test_digits_that_are_not_as_published(name, data, said, host, tmp_path, monkeypatch):
    host.files[name] = data
    host.publish(monkeypatch, "digits5")
    with pytest.raises(DataError, match=said):
        prepare(["digits5"], tmp_path, recipe=SMALL)


@pytest.mark.parametrize(
    ("png", "said"),
    [
        (b"no image", "00000000.png is no PNG image"),
        (None, r"has no member mnist_m/mnist_m_train/00000000\.png"),
    ],
)
def test_images_that_are_not_as_published(png, said, host, tmp_path, monkeypatch):
    members = published.mnistm_members()
    listing = "\n".join(f"00000000.png {digit}" for digit in range(10) for _ in range(2))
    members["mnist_m/mnist_m_train_labels.txt"] = listing.encode()
    del members["mnist_m/mnist_m_train/00000000.png"]
    if png:
        members["mnist_m/mnist_m_train/00000000.png"] = png
    host.files["mnist_m.tar.gz"] = tar_gz(members)
    host.publish(monkeypatch, "digits5")
    with pytest.raises(DataError, match=said):
        prepare(["digits5"], tmp_path, recipe=SMALL)


# --- what is asked for --------------------------------------------------------------------------


def test_invalid_requests_are_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"no data set to prepare named 'cifar'\. Did you mean 'cifar10'\?"
    ):
        prepare(["cifar"], tmp_path)
    with pytest.raises(ConfigError, match="prepare syn syn was asked for; name each data set once"):
        prepare(["syn", "syn"], tmp_path)
    with pytest.raises(ConfigError, match="prepare nothing was asked for"):
        prepare([], tmp_path)
    with pytest.raises(ConfigError, match="30 images per domain were asked for; a multiple of 20"):
        prepare(["syn"], tmp_path, recipe=Recipe(per_domain=30))
    assert nothing_was_kept(tmp_path)


def test_every_data_set_has_a_description():
    for name, data_set in DATA_SETS.items():
        assert data_set.name == name
        assert data_set.title
        assert data_set.source
        assert data_set.terms
        for file in data_set.files:
            assert len(bytes.fromhex(file.md5)) == 16
            assert all(url.startswith("http") for url in file.urls)
            assert file.max_bytes > 0
    names = [file.name for data_set in DATA_SETS.values() for file in data_set.files]
    assert len({file for data_set in DATA_SETS.values() for file in data_set.files}) == len(
        set(names)
    )


def test_the_error_for_missing_data_says_how_to_prepare_it():
    said = missing_message("cifar10", "somewhere")
    assert said.startswith(
        "somewhere/cifar10.npz is needed; there is no such file. It holds CIFAR-10"
    )
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in said
    assert "`fedquilt data prepare cifar10 --out somewhere` prepares it" in said
    assert "not the published SYN" in missing_message("digits5")
    assert "cannot make it. It can make cifar10, cifar100" in missing_message("shakespeare")


def test_arrays_of_a_prepared_file_need_no_pickle(host, tmp_path, monkeypatch):
    host.publish(monkeypatch, "cifar10")
    prepare(["cifar10"], tmp_path)
    pool = npz(str(tmp_path / "cifar10.npz"))
    assert (pool.num_classes, pool.class_names) == (10, CLASSES)
    assert pool.inputs.dtype == torch.uint8
