"""Small files in the layouts in which data sets are published, and a local server that has them."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from fedquilt.data.prepare import DATA_SETS, DataSet

PER_CLASS = {"train": 3, "test": 2}
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits_of(split: str) -> np.ndarray:
    """Return as many labels of every digit, in no particular order."""
    labels = np.repeat(np.arange(10, dtype=np.uint8), PER_CLASS[split])
    return np.random.default_rng(1).permutation(labels)


def pixels(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def tar_gz(members: Mapping[str, bytes], links: Mapping[str, str] | None = None) -> bytes:
    """Return an archive of files, and of symbolic links where they are given."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE
            member.linkname = target
            archive.addfile(member)
    return buffer.getvalue()


def idx_gz(array: np.ndarray) -> bytes:
    code = 0x08 if array.dtype == np.uint8 else 0x0C
    head = bytes((0, 0, code, array.ndim)) + np.array(array.shape, ">i4").tobytes()
    plain = array.tobytes() if code == 0x08 else array.astype(">i4").tobytes()
    return gzip.compress(head + plain)


# --- data sets ----------------------------------------------------------------------------------


def cifar10_members() -> dict[str, bytes]:
    """Return five training batches of two images, a test batch of three, and the other members
    there are.
    """
    folder = "cifar-10-batches-bin"
    members = {
        f"{folder}/batches.meta.txt": ("\n".join(CLASSES) + "\n\n").encode(),
        f"{folder}/readme.html": b"<html>",
    }
    for number in range(1, 6):
        records = pixels(number, 2, 3073)
        records[:, 0] = (number, number + 1)
        members[f"{folder}/data_batch_{number}.bin"] = records.tobytes()
    test = pixels(6, 3, 3073)
    test[:, 0] = (9, 0, 5)
    members[f"{folder}/test_batch.bin"] = test.tobytes()
    return members


def cifar100_members() -> dict[str, bytes]:
    members = {
        "cifar-100-binary/fine_label_names.txt": "\n".join(
            f"class_{one}" for one in range(100)
        ).encode()
    }
    for split, labels in (("train", (0, 42, 99)), ("test", (7, 98))):
        records = pixels(len(labels), len(labels), 3074)
        records[:, 0] = 19
        records[:, 1] = labels
        members[f"cifar-100-binary/{split}.bin"] = records.tobytes()
    return members


def mnist_files() -> dict[str, bytes]:
    files = {}
    for split, lead in (("train", "train"), ("test", "t10k")):
        labels = digits_of(split)
        files[f"{lead}-images-idx3-ubyte.gz"] = idx_gz(pixels(len(labels), len(labels), 28, 28))
        files[f"{lead}-labels-idx1-ubyte.gz"] = idx_gz(labels)
    return files


def qmnist_labels(split: str) -> np.ndarray:
    """Return extended labels: class, series, writer, …; the test part is longer than MNIST's."""
    digits = digits_of(split)
    labels = np.zeros((len(digits) + (5 if split == "test" else 0), 8), np.int32)
    labels[: len(digits), 0] = digits
    labels[:, 2] = 2100 + np.arange(len(labels)) // 4
    return labels


def svhn_file(split: str) -> bytes:
    from scipy.io import savemat

    digits = digits_of(split)
    buffer = io.BytesIO()
    labels = np.where(digits == 0, 10, digits).astype(np.uint8)[:, None]
    savemat(buffer, {"X": np.moveaxis(svhn_images(split), 0, -1), "y": labels}, do_compression=True)
    return buffer.getvalue()


def svhn_images(split: str) -> np.ndarray:
    """Return images of one colour each, which resizing does not change."""
    colors = pixels(50, len(digits_of(split)), 1, 1, 3)
    return np.ascontiguousarray(np.broadcast_to(colors, (len(colors), 32, 32, 3)))


def usps_file(split: str) -> bytes:
    """Return a text in which every image is of one grey: bytes of 20 times the digit, on a scale
    from −1 to 1.
    """
    lines = []
    for digit in digits_of(split).tolist():
        gray = 20 * digit / 127.5 - 1
        entries = " ".join(f"{position}:{gray:.6f}" for position in range(1, 257))
        lines.append(f"{digit + 1} {entries}")
    return bz2.compress(("\n".join(lines) + "\n").encode())


def mnistm_members() -> dict[str, bytes]:
    """Return PNG files and their lists, which come last."""
    from PIL import Image

    members = {}
    lists = {}
    for split in ("train", "test"):
        names = []
        for place, digit in enumerate(digits_of(split).tolist()):
            buffer = io.BytesIO()
            Image.fromarray(mnistm_image(place)).save(buffer, "PNG")
            members[f"mnist_m/mnist_m_{split}/{place:08}.png"] = buffer.getvalue()
            names.append(f"{place:08}.png {digit}")
        lists[f"mnist_m/mnist_m_{split}_labels.txt"] = "\n".join(names).encode()
    return members | lists


def mnistm_image(place: int) -> np.ndarray:
    return pixels(place, 28, 28, 3)


def published_files() -> dict[str, bytes]:
    """Return every file that is published for a data set, by its name."""
    files = {
        "cifar-10-binary.tar.gz": tar_gz(cifar10_members()),
        "cifar-100-binary.tar.gz": tar_gz(cifar100_members()),
        **mnist_files(),
        "mnist_m.tar.gz": tar_gz(mnistm_members()),
        "usps.bz2": usps_file("train"),
        "usps.t.bz2": usps_file("test"),
    }
    for split in ("train", "test"):
        files[f"qmnist-{split}-labels-idx2-int.gz"] = idx_gz(qmnist_labels(split))
        files[f"{split}_32x32.mat"] = svhn_file(split)
    return files


# --- a server -----------------------------------------------------------------------------------


@dataclass
class Host:
    """A web server on this machine, with files by their names and the requests it has had."""

    files: dict[str, bytes]
    url: str = ""
    requests: list[str] = field(default_factory=list)
    # Sizes that are announced and are not true.
    announced: dict[str, int] = field(default_factory=dict)
    redirected: dict[str, str] = field(default_factory=dict)

    def publish(self, monkeypatch: pytest.MonkeyPatch, name: str, **changed: object) -> DataSet:
        """Let a data set know the sums of the files here, as if they were published, with some
        values changed.
        """
        data_set = DATA_SETS[name]
        files = []
        for one in data_set.files:
            data = self.files[one.name]
            md5 = hashlib.md5(data, usedforsecurity=False).hexdigest()
            urls = (f"{self.url}/{one.name}",)
            files.append(replace(one, md5=md5, urls=urls, max_bytes=len(data), **changed))
        found = replace(data_set, files=tuple(files))
        monkeypatch.setitem(DATA_SETS, name, found)
        return found


@contextmanager
def hosted(files: dict[str, bytes]) -> Iterator[Host]:
    """Serve files from a thread at a free port of this machine until the block ends."""
    host = Host(dict(files))

    class Handler(BaseHTTPRequestHandler):
        timeout = 5

        def do_GET(self) -> None:
            name = self.path.removeprefix("/")
            host.requests.append(name)
            if name in host.redirected:
                self.send_response(302)
                self.send_header("Location", host.redirected[name])
                self.end_headers()
                return
            if name not in host.files:
                self.send_error(404)
                return
            data = host.files[name]
            self.send_response(200)
            length = host.announced.get(name, len(data))
            if length >= 0:  # A negative one is not announced at all.
                self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
    )
    thread.start()
    host.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield host
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
