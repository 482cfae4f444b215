"""Arrays in .npz files: sizes are read from headers, and broken arrays are reported by name."""

from __future__ import annotations

import io
import struct
import zipfile
from pathlib import Path

import nibabel
import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from fedquilt.data import images, npz, source, text
from fedquilt.data.sources import masks
from fedquilt.data.sources.arrays import array_names, read_arrays
from fedquilt.data.sources.images import open_image
from fedquilt.errors import DataError


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


def header(text: str, version: int = 1) -> bytes:
    """An .npy file with any header."""
    encoded = text.encode("latin1")
    length = struct.pack("<H" if version == 1 else "<I", len(encoded))
    return b"\x93NUMPY" + bytes([version, 0]) + length + encoded


def zipped(path: Path, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_arrays_are_read_as_numpy_reads_them(tmp_path):
    arrays = {
        "numbers": np.arange(6, dtype=np.float32).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6).reshape(2, 3)),
        "big": np.arange(3, dtype=">i4"),
        "flags": np.array([True, False]),
        "names": np.array(["one", "three"]),
        "bytes": np.array([b"one"]),
        "empty": np.zeros((0, 4), np.int16),
        "nothing": np.array([""]),
        "scalar": np.array(3.5),
    }
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "x.npz", **arrays)
        assert array_names(tmp_path / "x.npz") == list(arrays)
        for name, array in read_arrays(tmp_path / "x.npz").items():
            np.testing.assert_array_equal(array, arrays[name])
            assert array.dtype == arrays[name].dtype.newbyteorder("=")
            assert array.flags.writeable


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "header is damaged"),
        (b"no array at all", "header is damaged"),
        (b"\x93NUMPY\x03\x00" + npy(np.ones(2))[8:], r"version \(3, 0\)"),
        (
            header("{'descr': '<f8', 'fortran_order': False, 'shape': (10**9,)}"),
            "header is damaged",
        ),
        (
            header("{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000,)}"),
            r"8,000,000,000 bytes, and it has 0",
        ),
        (header("{'descr': '<f8', 'fortran_order': False, 'shape': (-1,)}"), "is no shape"),
        (
            header("{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1%s)}" % ("0" * 30)),
            "is no shape",
        ),
        (header("{'descr': '|O', 'fortran_order': False, 'shape': (0,)}"), "nothing is unpickled"),
        (
            header("{'descr': '<M8[D]', 'fortran_order': False, 'shape': (0,)}"),
            "numbers and text are read",
        ),
        (
            header("{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (0,)}"),
            "numbers and text are read",
        ),
        (
            header("{'descr': 'nonsense', 'fortran_order': False, 'shape': (0,)}"),
            "header is damaged",
        ),
        (header("{'descr': '<f8', 'fortran_order': 3, 'shape': (0,)}"), "header is damaged"),
        (header("__import__('os').getcwd()"), "header is damaged"),
        (header("'''"), "header is damaged"),  # tokenize.TokenError
        (header("("), "header is damaged"),
        (header("  x\n y"), "header is damaged"),  # IndentationError
        (header("{[]: 1}"), "header is damaged"),  # TypeError
        (header("-" * 9_000 + "1"), "header is damaged"),  # RecursionError or MemoryError
        (header("(" * 9_000), "header is damaged"),
        (header(" " * 20_000), "header is damaged"),
        (header("{}", version=2)[:-1], "header is damaged"),
        (npy(np.ones(3))[:-1], "24 bytes, and it has 23"),
        (npy(np.ones(3)) + b"x", "24 bytes, and it has 25"),
    ],
)
def test_broken_arrays_are_named(tmp_path, content, message):
    path = zipped(tmp_path / "x.npz", y_train=npy(np.zeros(3)), x_train=content)
    with pytest.raises(
        DataError, match=rf"x\.npz: the array 'x_train' cannot be read: .*{message}"
    ):
        npz(str(path))


def changed(path: Path, place: int, content: bytes) -> Path:
    data = bytearray(path.read_bytes())
    data[place : place + len(content)] = content
    path.write_bytes(data)
    return path


def places(path: Path) -> tuple[int, int, int]:
    """Return where the first local header, the directory and the end of a zip file begin."""
    data = path.read_bytes()
    return data.index(b"PK\3\4"), data.index(b"PK\1\2"), data.index(b"PK\5\6")


@pytest.mark.parametrize(
    ("record", "offset", "content", "message"),
    [
        (1, 6, bytes([200]), "zip file version 20.0"),  # NotImplementedError
        (1, 8, b"\1", "the array 'x_train' cannot be read: .*encrypted"),  # RuntimeError
        (1, 10, b"\x63", "the array 'x_train' cannot be read, because of its compression 99"),
        (1, 10, b"\0", "the array 'x_train' cannot be read"),
        (1, 16, b"\0\0\0\0", "the array 'x_train' cannot be read: Bad CRC-32"),
        (1, 28, b"\xff\xff", "cannot be read as an .npz file"),
        (0, 0, b"PK\0\0", "the array 'x_train' cannot be read: Bad magic number"),
        (0, 60, b"\xff\xff\xff\xff", "the array 'x_train' cannot be read: Error -3"),  # zlib.error
        (2, 10, b"\5", "2 arrays were found and 5 are listed"),
    ],
)
def test_broken_zip_files_are_refused(tmp_path, record, offset, content, message):
    path = zipped(tmp_path / "x.npz", x_train=npy(np.arange(99.0)), y_train=npy(np.zeros(99)))
    changed(path, places(path)[record] + offset, content)
    with pytest.raises(DataError, match=message):
        source(str(path))()


def test_a_name_beside_an_array_that_is_not_utf_8_is_refused(tmp_path):
    path = zipped(tmp_path / "x.npz", x_train=npy(np.arange(9.0)), y_train=npy(np.zeros(9)))
    first = places(path)[0]
    changed(path, first + 6, b"\x00\x08")  # The flag of names in UTF-8.
    changed(path, first + 30, b"\xff")
    with pytest.raises(
        DataError, match="the array 'x_train' cannot be read: 'utf-8' codec can't decode"
    ):
        source(str(path))()


def test_arrays_cannot_be_hidden_or_doubled(tmp_path):
    path = zipped(tmp_path / "x.npz", x_train=npy(np.zeros(2)), y_train=npy(np.zeros(2)))
    begin = places(path)[1]
    swallowed = path.read_bytes().index(b"PK\1\2", begin + 1)
    length = places(path)[2] - swallowed
    # the rest of the directory as a comment of its first file
    changed(path, begin + 32, length.to_bytes(2, "little"))
    with pytest.raises(DataError, match="1 arrays were found and 2 are listed"):
        npz(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy(np.zeros(2)))
        with pytest.warns(UserWarning, match="Duplicate"):
            archive.writestr("x.npy", npy(np.ones(2)))
    with pytest.raises(DataError, match="the array 'x' cannot be read, because it is there twice"):
        npz(str(path))
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x", npy(np.zeros(2)))
    with pytest.raises(
        DataError,
        match=r"the array 'x' cannot be read: its name in the file does not end with \.npy",
    ):
        npz(str(path))


def test_a_small_file_that_unpacks_to_a_large_one_is_refused_first(tmp_path, monkeypatch):
    np.savez_compressed(
        tmp_path / "x.npz", x_train=np.zeros((1000, 1000)), y_train=np.arange(1000) % 2
    )
    size = 8 * 1000 * 1001
    assert (tmp_path / "x.npz").stat().st_size < 20_000
    monkeypatch.setattr("fedquilt.hardware.process.free_memory", lambda: 2 * size - 2)
    with pytest.raises(
        DataError,
        match=rf"takes {size:,} bytes in memory, and half of the free memory is .*"
        rf"--max-bytes {size} ",
    ):
        npz(str(tmp_path / "x.npz"))
    assert npz(str(tmp_path / "x.npz"), max_bytes=size).num_classes == 2


def test_a_label_that_is_none_is_refused(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=np.zeros((10, 2)), y_train=np.r_[np.arange(9), 10**9])
    with pytest.raises(DataError, match=r"x: a target is 1000000000, .* at most 1,048,576 fit"):
        npz(str(tmp_path / "x.npz"))


# --- images and text ----------------------------------------------------------------------------


def picture(path: Path, size: tuple[int, int] = (4, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size).save(path)
    return path


def test_images_are_measured_by_their_headers(tmp_path, monkeypatch):
    for number in range(5):
        picture(tmp_path / "ant" / f"{number}.png")
        picture(tmp_path / "bee" / f"{number}.png")
    with pytest.raises(
        DataError,
        match=r"10 images of 4×4 pixels and is not read: it takes 480 bytes.*--max-bytes 480 ",
    ):
        images(str(tmp_path), max_bytes=479)
    assert len(images(str(tmp_path), max_bytes=480).targets) == 8
    large = picture(tmp_path / "bee" / "3.png", (40, 40))
    monkeypatch.setattr(PngImageFile, "load", lambda self: pytest.fail("pixels were read"))
    with pytest.raises(
        DataError, match=r"3\.png has 40×40 pixels and is not read: it takes 6,400 bytes"
    ):
        open_image(large, max_bytes=6_399)


def test_errors_of_pillow_are_reported(tmp_path, monkeypatch):
    file = picture(tmp_path / "x.png", (50, 50))
    whole = file.read_bytes()
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1_000)
    with pytest.raises(
        DataError, match=r"x\.png cannot be read as an image: Image size \(2500 pixels\) exceeds"
    ):
        open_image(file)  # DecompressionBombError
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2_000)
    assert open_image(file).size == (50, 50)  # no more than a DecompressionBombWarning
    monkeypatch.undo()
    file.write_bytes(b"no image")
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image: cannot identify"):
        open_image(file)
    file.write_bytes(whole[:60])
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image"):
        open_image(file)
    noise = np.random.default_rng(0).integers(0, 256, (200, 200, 3), dtype=np.uint8)
    Image.fromarray(noise).save(file)
    place = file.read_bytes().rindex(b"IDAT")
    changed(file, place, b"\1\2\3\4")
    # SyntaxError
    with pytest.raises(DataError, match=r"x\.png cannot be read as an image: broken PNG file"):
        open_image(file)


def test_masks_are_measured_too(tmp_path):
    for number in range(5):
        picture(tmp_path / "images" / f"{number}.png")
        (tmp_path / "masks").mkdir(exist_ok=True)
        Image.fromarray(np.eye(4, dtype=np.uint8)).save(tmp_path / "masks" / f"{number}.png")
    size = 5 * 16 * (3 + 8)
    with pytest.raises(
        DataError, match=rf"5 pictures with masks and is not read: it takes {size} bytes"
    ):
        masks(str(tmp_path), max_bytes=size - 1)
    assert masks(str(tmp_path), max_bytes=size).num_classes == 2


def test_volumes_are_counted_while_they_are_read(tmp_path):
    for folder in ("images", "masks"):
        (tmp_path / folder).mkdir()
        for number in range(5):
            values = np.arange(8, dtype=np.uint8).reshape(2, 2, 2) % 2
            nibabel.Nifti1Image(values, np.eye(4)).to_filename(
                tmp_path / folder / f"{number}.nii.gz"
            )
    with pytest.raises(
        DataError, match=r"its samples up to .*2\.nii\.gz, 3 of 5, take 288 bytes.*--max-bytes"
    ):
        masks(str(tmp_path), max_bytes=200)
    assert masks(str(tmp_path), max_bytes=480).num_classes == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"one\ntwo \xff three", "line 2 is not UTF-8, because of the byte 0xff at 8"),
        ("x.json", b'{"ann": ["\xff"]}', "line 1 is not UTF-8"),
        ("x.json", b"[" * 100_000, "its JSON nests too deeply"),
        ("x.json", b'{"ann": [', "it is no JSON: Expecting value: line 1 column 10"),
        ("x.json", b'{"ann": [%s]}' % (b"9" * 5000), "it is no JSON: Exceeds the limit"),
        ("x.json", b'{"ann": ["one", 2]}', "entry 1 is no text"),
        ("x.txt", b" \n \n", "has no text in it"),
    ],
)
def test_broken_text_is_reported_with_its_position(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        text(str(tmp_path / name))


def test_text_larger_than_allowed_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("to be or not\n" * 10)
    with pytest.raises(DataError, match="it takes 130 bytes in memory, and max_bytes allows 100"):
        text(str(tmp_path / "x.txt"), max_bytes=100)
    assert len(text(str(tmp_path / "x.txt"), max_bytes=130).targets) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"start": None}, "has no start. Found: text"),
        ({"text": np.zeros(4)}, "the array 'text' is float64"),
        ({"text": np.zeros((2, 2), np.uint8)}, r"the array 'text' is uint8 of shape \(2, 2\)"),
        ({"start": np.array([0.0])}, "the array 'start' is float64"),
        ({"start": np.array([0, 99])}, "the text of user 0 goes from byte 0 to 99"),
        ({"start": np.array([4, 2])}, "the text of user 0 goes from byte 4 to 2"),
        ({"start": np.array([-3, 2])}, "the text of user 0 goes from byte -3 to 2"),
        ({"users": np.array(["ann"])}, r"the array 'users' is <U3 of shape \(1,\); 2 names fit"),
        ({"users": np.array([1, 2])}, "the array 'users' is int64"),
        ({"text": np.array([97, 98, 97, 255, 97], np.uint8)}, "line 1 of user '1' is not UTF-8"),
    ],
)
def test_broken_arrays_of_text_are_reported_with_their_user(tmp_path, change, message):
    arrays = {"text": np.frombuffer(b"one\ntwo\n", np.uint8), "start": np.array([0, 3]), **change}
    np.savez(
        tmp_path / "x.npz", **{name: array for name, array in arrays.items() if array is not None}
    )
    with pytest.raises(DataError, match=rf"x\.npz.*{message}"):
        text(str(tmp_path / "x.npz"))
