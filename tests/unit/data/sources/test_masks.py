"""Folders of images with masks, as pictures and as NIfTI volumes."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
import torch
from PIL import Image

from fedquilt.data import Dirichlet, Domains, Iid, Labels, source
from fedquilt.data.sources import masks
from fedquilt.data.sources import nifti as nifti_module
from fedquilt.data.sources.nifti import read_volume
from fedquilt.errors import ConfigError, DataError

RAS = np.diag([1.0, 1.0, 1.0, 1.0])
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def picture(folder: Path, name: str, values: np.ndarray, mask: np.ndarray, mode: str = "L") -> None:
    for kind, array in (("images", values), ("masks", mask)):
        (folder / kind / name).parent.mkdir(parents=True, exist_ok=True)
        drawn = Image.fromarray(array)
        (drawn if kind == "images" else drawn.convert(mode)).save(folder / kind / name)


def pictures(folder: Path, count: int = 5, size: tuple[int, int] = (4, 6)) -> None:
    for number in range(count):
        values = np.full((*size, 3), number, np.uint8)
        picture(folder, f"{number}.png", values, np.full(size, number % 3, np.uint8))


def volume(file: Path, values: np.ndarray, affine: np.ndarray = RAS) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    nibabel.save(nibabel.Nifti1Image(values, affine), file)


def volumes(
    folder: Path, sizes: list[tuple[int, int, int]], names: tuple[str, str] = ("images", "masks")
) -> None:
    rng = np.random.default_rng(0)
    for number, size in enumerate(sizes):
        volume(
            folder / names[0] / f"{number}.nii.gz",
            rng.normal(100 * number, 5, size).astype(np.float32),
        )
        volume(folder / names[1] / f"{number}.nii.gz", rng.integers(0, 3, size).astype(np.uint8))


# --- pictures -----------------------------------------------------------------------------------


def test_an_image_has_the_mask_of_its_name(tmp_path):
    pictures(tmp_path / "train", 6)
    pictures(tmp_path / "test", 2)
    pool = source(str(tmp_path))(normalize="none")
    assert source(str(tmp_path)).func is masks
    assert (pool.inputs.shape, pool.inputs.dtype) == ((6, 3, 4, 6), torch.uint8)
    assert (pool.targets.shape, pool.targets.dtype) == ((6, 4, 6), torch.int64)
    assert torch.equal(pool.targets, (pool.inputs[:, 0] % 3).long())
    assert torch.equal(pool.test_targets, (pool.test_inputs[:, 0] % 3).long())
    assert (pool.num_classes, pool.has_masks) == (3, True)
    assert repr(pool).endswith("6 training and 2 test samples of (3, 4, 6), masks with 3 classes)")


def test_without_a_test_part_a_fifth_is_held_out(tmp_path):
    pictures(tmp_path, 10)
    pool = masks(str(tmp_path), gray=True)
    assert (len(pool.targets), len(pool.test_targets)) == (8, 2)
    both = torch.cat([pool.inputs, pool.test_inputs])[:, 0]
    assert torch.equal(torch.cat([pool.targets, pool.test_targets]), (both % 3).long())


def test_images_of_other_sizes_are_padded_and_padding_does_not_count(tmp_path):
    pictures(tmp_path / "train", 5, (3, 5))
    picture(
        tmp_path / "train", "large.png", np.ones((4, 2, 3), np.uint8), np.ones((4, 2), np.uint8)
    )
    pictures(tmp_path / "test", 1, (2, 2))
    pool = masks(str(tmp_path), multiple_of=4, normalize="none")
    assert pool.inputs.shape == (6, 3, 4, 8)
    small = pool.targets[2]
    assert (small[:3, :5] == 2).all()
    assert (small[3:] == -100).all()
    assert (small[:, 5:] == -100).all()
    assert (pool.inputs[2, :, :3, :5] == 2).all()
    assert int(pool.inputs[2].sum()) == 3 * 15 * 2
    assert int((pool.targets[5] == 1).sum()) == 8
    assert int((pool.test_targets != -100).sum()) == 4


def test_padding_has_no_part_in_mean_and_standard_deviation(tmp_path):
    rng = np.random.default_rng(0)
    sizes = [(2, 3), (4, 4), (3, 1), (4, 2)]
    seen = []
    for place, size in enumerate(sizes):
        values = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        seen.append(values.reshape(-1, 3))
        picture(tmp_path / "train", f"{place}.png", values, np.ones(size, np.uint8))
    pictures(tmp_path / "test", 2)
    pool = masks(str(tmp_path))
    every = np.concatenate(seen).astype(float)
    torch.testing.assert_close(
        pool.scale.mean.flatten().double().numpy(), every.mean(0), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        pool.scale.std.flatten().double().numpy(), every.std(0), rtol=1e-6, atol=0
    )


def test_values_are_numbered_and_ignored_as_asked(tmp_path):
    mask = np.array([[0, 255], [128, 255]], np.uint8)
    for place in range(5):
        picture(tmp_path, f"{place}.png", np.zeros((2, 2, 3), np.uint8), mask)
    assert masks(str(tmp_path), labels=(255, 0, 128)).targets[0].tolist() == [[1, 0], [2, 0]]
    pool = masks(str(tmp_path), labels=(0, 128), ignored=255)
    assert pool.targets[0].tolist() == [[0, -100], [1, -100]]
    assert masks(str(tmp_path), labels=(0, 128, 7), ignored=255).num_classes == 3
    assert masks(str(tmp_path), ignored=255).num_classes == 129
    with pytest.raises(
        DataError,
        match=r"0\.png has the values 0, 128, 255; classes are numbered from 0 to 254\. labe",
    ):
        masks(str(tmp_path))
    with pytest.raises(
        DataError, match=r"labels = \[0, 255\] were asked for.*ignored = 128 would leave 128 out"
    ):
        masks(str(tmp_path), labels=(0, 255))
    with pytest.raises(ConfigError, match="name each value once"):
        masks(str(tmp_path), labels=(0, 0))
    with pytest.raises(ConfigError, match="a value is one of the two"):
        masks(str(tmp_path), labels=(0, 255), ignored=255)


@pytest.mark.parametrize("mode", ["1", "L", "I;16"])
def test_masks_of_one_number_a_pixel_are_read(tmp_path, mode):
    mask = np.array([[0, 255], [255, 0]], np.uint8)
    for place in range(5):
        picture(tmp_path, f"{place}.png", np.zeros((2, 2, 3), np.uint8), mask, mode)
    pool = masks(str(tmp_path)) if mode == "1" else masks(str(tmp_path), labels=(0, 255))
    assert pool.targets[0].tolist() == [[0, 1], [1, 0]]
    values = () if mode == "1" else (0, 255)
    assert masks(str(tmp_path), labels=values, size=4).targets[0, 0].tolist() == [0, 0, 1, 1]


def test_an_index_into_a_palette_is_a_class(tmp_path):
    for place in range(5):
        picture(tmp_path, f"{place}.png", np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.uint8))
        drawn = Image.fromarray(np.array([[2, 0], [1, 1]], np.uint8), "P")
        drawn.putpalette([200, 0, 0, 0, 200, 0, 0, 0, 200])
        drawn.save(tmp_path / "masks" / f"{place}.png")
    assert masks(str(tmp_path)).targets[0].tolist() == [[2, 0], [1, 1]]


def test_a_resized_mask_has_no_new_classes(tmp_path):
    mask = np.repeat(np.array([[0, 2]], np.uint8), 4, 0).repeat(2, 1)
    for place in range(5):
        picture(tmp_path, f"{place}.png", np.zeros((4, 4, 3), np.uint8), mask)
    pool = masks(str(tmp_path), size=6, gray=True)
    assert pool.inputs.shape[1:] == (1, 6, 6)
    assert pool.targets[0, 0].tolist() == [0, 0, 0, 2, 2, 2]
    with pytest.raises(ConfigError, match="size = -1 was asked for; a whole number of pixels fits"):
        masks(str(tmp_path), size=-1)


def test_folders_may_be_domains(tmp_path):
    for home in ("north", "south"):
        for place in range(5):
            values = np.full((2, 2, 3), len(home) + place, np.uint8)
            picture(tmp_path, f"{home}/{place}.png", values, np.ones((2, 2), np.uint8))
    data = masks(str(tmp_path), domains=True).partition(partition=Domains())
    assert data.domain_names == ("north", "south")
    assert data.parts.sizes.tolist() == [4, 4]
    pictures(tmp_path, 1)
    with pytest.raises(
        DataError, match=r"0\.png is in no folder named after a domain; .*DOMAIN/0\.png would fit"
    ):
        masks(str(tmp_path), domains=True)


def test_masks_are_partitioned_without_classes(tmp_path):
    pictures(tmp_path, 10)
    pool = masks(str(tmp_path))
    assert isinstance(pool.usual, Iid)
    assert pool.partition(4).parts.sizes.tolist() == [2, 2, 2, 2]
    for partition in (Dirichlet(), Labels()):
        with pytest.raises(
            DataError,
            match=r"partitions by class; .*shape \(4, 6\).*one class for each sample.*Iid, Quant",
        ):
            pool.partition(4, partition)


def test_every_sample_may_be_standardised_by_itself(tmp_path):
    rng = np.random.default_rng(0)
    for place in range(5):
        size = (3 + place, 4)
        picture(
            tmp_path,
            f"{place}.png",
            rng.integers(0, 256, (*size, 3), dtype=np.uint8),
            np.ones(size, np.uint8),
        )
    pool = masks(str(tmp_path), normalize="sample")
    assert (pool.inputs.dtype, pool.scale) == (torch.float32, None)
    for image, mask in zip(pool.inputs, pool.targets, strict=True):
        inside = image[:, mask != -100]
        torch.testing.assert_close(inside.mean(1), torch.zeros(3), rtol=0, atol=1e-6)
        torch.testing.assert_close(inside.std(1, correction=0), torch.ones(3))
        assert not image[:, mask == -100].any()
    with pytest.raises(
        ConfigError, match=r'normalize = "sample" was asked for.*Leave out one of the two'
    ):
        masks(str(tmp_path), normalize="sample", mean=(0.5,), std=(0.5,))


def test_folders_that_do_not_pair_up_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"it has these folders: none\. images/ and masks/ fit"):
        masks(str(tmp_path))
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    with pytest.raises(
        DataError, match=r"images has no images \(\.bmp.*\.nii\.gz\).*masks/one\.png would fit"
    ):
        masks(str(tmp_path))
    pictures(tmp_path, 6)
    (tmp_path / "masks" / "3.png").rename(tmp_path / "masks" / "three.png")
    with pytest.raises(
        DataError,
        match=r"1 of 6 images in .* have no mask, such as 3\.png; .*masks/3\.png would fit",
    ):
        masks(str(tmp_path))
    (tmp_path / "images" / "3.png").unlink()
    with pytest.raises(
        DataError,
        match=r"1 of 6 masks in .* have no image, such as three\.png\. Remove them, or add",
    ):
        masks(str(tmp_path))
    (tmp_path / "masks" / "three.png").unlink()
    (tmp_path / "images" / "._0.png").write_bytes(b"left by another system")
    (tmp_path / "images" / "notes.txt").touch()
    assert len(masks(str(tmp_path), public=0.25).targets) == 3
    Image.new("RGB", (6, 4)).save(tmp_path / "images" / "0.bmp")
    with pytest.raises(DataError, match=r"0\.bmp and .*0\.png have the same name up to the ending"):
        masks(str(tmp_path))


def test_masks_that_do_not_fit_are_refused(tmp_path):
    pictures(tmp_path)
    target = tmp_path / "masks" / "2.png"
    Image.new("L", (6, 5)).save(target)
    with pytest.raises(
        DataError, match=r"masks/2\.png has 5×6 pixels and its image .*images/2\.png 4×6"
    ):
        masks(str(tmp_path))
    Image.new("RGB", (6, 4)).save(target)
    with pytest.raises(
        DataError, match=r"masks/2\.png has colours \(mode RGB\); a mask has one number a pixel"
    ):
        masks(str(tmp_path))
    target.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"masks/2\.png cannot be read as an image"):
        masks(str(tmp_path))
    target.unlink()
    Image.new("L", (6, 4)).save(tmp_path / "masks" / "2.jpg")
    with pytest.raises(
        DataError,
        match=r"2\.jpg is a JPEG, which does not keep values exactly\. Save masks as \.png",
    ):
        masks(str(tmp_path))


def test_images_of_more_than_eight_bits_are_refused(tmp_path):
    pictures(tmp_path)
    Image.fromarray(np.full((4, 6), 1000, np.uint16)).save(tmp_path / "images" / "1.png")
    with pytest.raises(
        DataError,
        match=r"1\.png has more than 8 bits a channel \(mode I;16\), which would be cut off",
    ):
        masks(str(tmp_path))


def test_masks_without_foreground_are_refused(tmp_path):
    for place in range(5):
        picture(tmp_path, f"{place}.png", np.zeros((2, 2, 3), np.uint8), np.zeros((2, 2), np.uint8))
    with pytest.raises(DataError, match="no mask has foreground; no value is above 0"):
        masks(str(tmp_path))


# --- volumes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("images", "masks"), ("imagesTr", "labelsTr")])
def test_volumes_are_padded_to_one_shape_and_standardised(tmp_path, names):
    sizes = [(3, 4, 5), (4, 3, 5), (2, 2, 2), (4, 4, 4), (3, 3, 3), (1, 2, 3)]
    volumes(tmp_path, sizes, names)
    (tmp_path / names[0] / "._0.nii.gz").write_bytes(b"left by another system")
    pool = source(str(tmp_path))(multiple_of=4)
    assert (pool.inputs.shape[1:], pool.targets.shape[1:]) == ((1, 4, 4, 8), (4, 4, 8))
    assert (pool.inputs.dtype, pool.num_classes, pool.scale) == (torch.float32, 3, None)
    counts = [int((mask != -100).sum()) for mask in torch.cat([pool.targets, pool.test_targets])]
    assert sorted(counts) == sorted(int(np.prod(size)) for size in sizes)
    for image, mask in zip(pool.inputs, pool.targets, strict=True):
        inside = image[0, mask != -100]
        assert abs(float(inside.mean())) < 1e-5
        assert float(inside.std(correction=0)) == pytest.approx(1, abs=1e-5)
    raw = masks(str(tmp_path), normalize="none")
    assert raw.inputs.shape[2:] == (4, 4, 5)
    assert float(raw.inputs.max()) > 400


def test_a_volume_is_read_as_it_is_stored(tmp_path):
    values = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    volume(tmp_path / "a.nii.gz", values, LPS)
    stored = read_volume(tmp_path / "a.nii.gz")
    assert stored.orientation == "LPS"
    assert np.array_equal(stored.values, values[None])
    turned = read_volume(tmp_path / "a.nii.gz", canonical=True)
    assert turned.orientation == "RAS"
    assert np.array_equal(turned.values, values[None, ::-1, ::-1])


def test_modalities_are_channels_and_scaling_is_applied(tmp_path):
    values = np.arange(48, dtype=np.int16).reshape(2, 3, 4, 2)
    image = nibabel.Nifti2Image(values, RAS)
    image.header.set_slope_inter(0.5, 10)
    nibabel.save(image, tmp_path / "a.nii")
    found = read_volume(tmp_path / "a.nii").values
    assert found.shape == (2, 2, 3, 4)
    np.testing.assert_allclose(
        np.moveaxis(found, 0, -1), nibabel.load(tmp_path / "a.nii").get_fdata()
    )


def test_volumes_in_two_orientations_are_refused_unless_canonical(tmp_path):
    volumes(tmp_path, [(2, 3, 4)] * 5)
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    volume(tmp_path / "images" / "1.nii.gz", values, LPS)
    with pytest.raises(
        DataError, match=r"masks/1\.nii\.gz has axes in the order RAS and .* LPS\. canonical = true"
    ):
        masks(str(tmp_path))
    volume(tmp_path / "masks" / "1.nii.gz", (values > 11).astype(np.uint8), LPS)
    with pytest.raises(
        DataError,
        match=r"images/1\.nii\.gz has axes in the order LPS and .*0\.nii\.gz in the order RAS",
    ):
        masks(str(tmp_path))
    pool = masks(str(tmp_path), canonical=True, normalize="none")
    every = torch.cat([pool.inputs, pool.test_inputs]), torch.cat([pool.targets, pool.test_targets])
    row = int((every[0][:, 0, 1, 2, 0] == 0).nonzero()[0])
    assert torch.equal(every[1][row], (every[0][row, 0] > 11).long())


def test_volumes_that_do_not_fit_are_refused(tmp_path):
    volumes(tmp_path, [(2, 3, 4)] * 5)
    image, mask = tmp_path / "images" / "2.nii.gz", tmp_path / "masks" / "2.nii.gz"
    values = np.zeros((2, 3, 4), np.float32)
    volume(mask, np.zeros((2, 3, 5), np.uint8))
    with pytest.raises(
        DataError, match=r"masks/2\.nii\.gz has 2×3×5 voxels and its image .* 2×3×4"
    ):
        masks(str(tmp_path))
    volume(mask, np.zeros((2, 3, 4, 2), np.uint8))
    with pytest.raises(
        DataError, match=r"masks/2\.nii\.gz has 2 channels; a mask has one number a voxel"
    ):
        masks(str(tmp_path))
    volume(mask, values + 0.5)
    with pytest.raises(
        DataError, match=r"masks/2\.nii\.gz has the value 0\.5; a mask has whole numbers"
    ):
        masks(str(tmp_path))
    volume(mask, values - 1)
    with pytest.raises(
        DataError, match=r"masks/2\.nii\.gz has the values -1; classes are numbered from 0"
    ):
        masks(str(tmp_path))
    volume(mask, values + 1)  # whole numbers that are stored as real ones
    volume(image, np.zeros((2, 3, 4, 2), np.float32))
    with pytest.raises(
        DataError, match=r"images/2\.nii\.gz has 2 channels and .*0\.nii\.gz 1; they must be alike"
    ):
        masks(str(tmp_path))
    values[0, 0, 0] = np.nan
    volume(image, values)
    with pytest.raises(DataError, match=r"images/2\.nii\.gz has 1 values that are not finite"):
        masks(str(tmp_path))
    volume(image, np.full((2, 3, 4), 1e300))
    with pytest.raises(
        DataError, match=r"2\.nii\.gz has values of up to 1e\+300, too large for float32"
    ):
        masks(str(tmp_path))
    volume(image, np.zeros((2, 3, 4), np.complex64))
    with pytest.raises(
        DataError, match=r"2\.nii\.gz has values of complex64; whole and real numbers can be read"
    ):
        masks(str(tmp_path))
    image.unlink()
    Image.new("RGB", (6, 4)).save(tmp_path / "images" / "2.png")
    with pytest.raises(
        DataError, match=r"2\.png is a picture among volumes; a folder has one kind of files"
    ):
        masks(str(tmp_path))
    for option in ({"size": 4}, {"gray": True}):
        with pytest.raises(
            ConfigError, match=r"size and gray are for pictures; 0\.nii\.gz is a volume"
        ):
            masks(str(tmp_path), **option)


def test_canonical_is_for_volumes(tmp_path):
    pictures(tmp_path)
    with pytest.raises(ConfigError, match=r"canonical is for NIfTI volumes; 0\.png is a picture"):
        masks(str(tmp_path), canonical=True)


def test_a_header_cannot_ask_for_memory(tmp_path, monkeypatch):
    content = bytearray(nibabel.Nifti1Image(np.zeros((2, 3, 4), np.uint8), RAS).to_bytes())
    content[42:48] = np.array([30_000] * 3, "<i2").tobytes()
    (tmp_path / "a.nii.gz").write_bytes(gzip.compress(bytes(content)))
    with pytest.raises(
        DataError,
        match=r"its header says \(30000, 30000, 30000\) values of 1 bytes, and the file has 3",
    ):
        read_volume(tmp_path / "a.nii.gz")
    volume(tmp_path / "b.nii.gz", np.zeros((20, 20, 20), np.uint8))
    monkeypatch.setattr(nifti_module, "MAX_BYTES", 2**10)
    with pytest.raises(
        DataError, match=r"b\.nii\.gz has more than .* GiB; volumes of at most that size are read"
    ):
        read_volume(tmp_path / "b.nii.gz")


@pytest.mark.parametrize("shape", [(4, 5), (2, 2, 2, 2, 2)])
def test_other_numbers_of_dimensions_are_refused(tmp_path, shape):
    volume(tmp_path / "a.nii", np.zeros(shape, np.uint8))
    with pytest.raises(
        DataError,
        match=r"a\.nii has an array of shape .*; \(x, y, z\) fits, or \(x, y, z, channel\)",
    ):
        read_volume(tmp_path / "a.nii")


@pytest.mark.parametrize(
    "content", [b"", b"nothing", gzip.compress(b"nothing"), gzip.compress(b"0" * 999)[:-9]]
)
def test_files_that_are_no_volumes_are_refused(tmp_path, content):
    (tmp_path / "a.nii.gz").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.nii\.gz cannot be read as a NIfTI volume"):
        read_volume(tmp_path / "a.nii.gz")


def test_a_missing_nibabel_is_named_with_its_command(tmp_path, monkeypatch):
    volumes(tmp_path, [(2, 2, 2)] * 5)
    monkeypatch.setitem(sys.modules, "nibabel.nifti1", None)
    with pytest.raises(
        ConfigError, match=r"need nibabel, which is not installed: pip install -e '\.\[medical\]'"
    ):
        masks(str(tmp_path))
