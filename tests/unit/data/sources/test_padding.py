"""Masks and padded volumes in .npz files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from fedquilt.data import Dirichlet, Pool, npz
from fedquilt.data.sources import padding
from fedquilt.errors import ConfigError, DataError

RNG = np.random.default_rng(0)


def save(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def marked(*shape: int) -> np.ndarray:
    return RNG.integers(0, 3, shape).astype(np.uint8)


def test_a_volume_without_channels_gets_one(tmp_path):
    x = RNG.integers(0, 64, (10, 4, 6, 5), dtype=np.uint8)
    pool = npz(save(tmp_path / "volumes.npz", x=x, y=marked(10, 4, 6, 5)), normalize="none")
    assert (pool.inputs.shape, pool.targets.shape) == ((8, 1, 4, 6, 5), (8, 4, 6, 5))
    assert (pool.inputs.dtype, pool.num_classes, pool.has_masks) == (torch.uint8, 3, True)
    assert torch.equal(pool.samples(torch.arange(8)), pool.inputs.float() / 255)
    with pytest.raises(
        DataError, match=r"Dirichlet partitions by class; a target of volumes has shape \(4, 6, 5\)"
    ):
        pool.partition(4, Dirichlet())


@pytest.mark.parametrize(
    ("shape", "channels", "seen"),
    [
        ((4, 6, 5), "auto", (1, 4, 6, 5)),
        ((2, 4, 6, 5), "auto", (2, 4, 6, 5)),
        ((4, 6, 5, 2), "auto", (2, 4, 6, 5)),
        ((4, 6, 5, 4), "last", (4, 4, 6, 5)),
    ],
)
def test_masks_say_where_channels_are(tmp_path, shape, channels, seen):
    path = save(
        tmp_path / "x.npz",
        x=np.zeros((10, *shape)),
        y=marked(10, 4, 6, 5),
        public=np.ones((2, *shape)),
    )
    pool = npz(path, channels=channels)
    assert pool.inputs.shape[1:] == pool.public.shape[1:] == seen


def test_volumes_without_masks_may_be_declared_to_have_no_channels(tmp_path):
    path = save(
        tmp_path / "x.npz",
        x=np.zeros((10, 4, 6, 5), np.uint8),
        y=np.arange(10) % 2,
        public=np.zeros((3, 4, 6, 5)),
    )
    assert npz(path, channels="none").inputs.shape == (8, 1, 4, 6, 5)
    assert npz(path, channels="none").public.shape == (3, 1, 4, 6, 5)
    assert npz(path).inputs.shape == (8, 4, 6, 5)


def test_nothing_counts_outside_of_a_true_shape(tmp_path):
    shapes = np.array([[2, 3], [4, 1], [1, 1], [4, 5], [3, 3]], np.uint8)
    x, y = np.full((5, 4, 5), 9, np.uint8), np.ones((5, 4, 5), np.uint8)
    arrays = {"x_train": x, "y_train": y, "shapes_train": shapes, "x_test": x[:2], "y_test": y[:2]}
    pool = npz(save(tmp_path / "x.npz", **arrays), multiple_of=4, normalize="none")
    assert pool.inputs.shape == (5, 1, 4, 8)
    for image, mask, (height, width) in zip(
        pool.inputs, pool.targets, shapes.tolist(), strict=True
    ):
        assert (mask[:height, :width] == 1).all()
        assert int((mask == -100).sum()) == 32 - height * width
        assert torch.equal(image[0] == 9, mask == 1)
    assert int((pool.test_targets == 1).sum()) == 2 * 20  # no shapes were given for the test part
    assert npz(save(tmp_path / "x.npz", **arrays)).inputs.shape == (5, 1, 4, 5)


def test_statistics_are_those_of_the_true_part(tmp_path):
    shapes = np.array([[1, 2], [2, 2], [2, 1], [1, 1], [2, 2]])
    x = RNG.integers(1, 256, (5, 3, 3), dtype=np.uint8)
    pool = npz(
        save(
            tmp_path / "x.npz",
            x_train=x,
            y_train=marked(5, 3, 3) + 1,
            shapes_train=shapes,
            x_test=x,
            y_test=marked(5, 3, 3),
        )
    )
    inside = np.concatenate(
        [image[:h, :w].flatten() for image, (h, w) in zip(x, shapes.tolist(), strict=True)]
    )
    assert float(pool.scale.mean) == pytest.approx(inside.mean(), rel=1e-6)
    assert float(pool.scale.std) == pytest.approx(inside.std(), rel=1e-6)


def test_statistics_of_large_samples_are_summed_in_small_chunks(monkeypatch):
    inputs = torch.tensor(RNG.normal(3, 2, (6, 2, 5)))
    whole = padding.Scale.of(inputs, "channel")
    monkeypatch.setattr("fedquilt.data.scale._CHUNK_VALUES", 20)
    torch.testing.assert_close(padding.Scale.of(inputs, "channel").std, whole.std)
    torch.testing.assert_close(
        whole.mean.flatten().double(), inputs.mean((0, 2)), rtol=1e-6, atol=0
    )


def test_whole_numbers_other_than_bytes_are_intensities_where_there_are_masks(tmp_path):
    x = RNG.integers(-1000, 2000, (10, 4, 4, 4)).astype(np.int16)
    path = save(tmp_path / "x.npz", x=x, y=marked(10, 4, 4, 4), public=x[:3])
    pool = npz(path)
    assert (pool.inputs.dtype, pool.scale) == (torch.float32, None)
    assert torch.equal(pool.public[:, 0], torch.tensor(x[:3]).float())
    each = npz(path, normalize="sample")
    values = torch.tensor(x[:3]).float().reshape(3, -1)
    wanted = (values - values.mean(1, keepdim=True)) / values.std(1, keepdim=True, correction=0)
    torch.testing.assert_close(each.public.reshape(3, -1), wanted)


def test_samples_without_masks_are_standardised_too(tmp_path):
    x = RNG.integers(0, 256, (10, 5, 5, 3), dtype=np.uint8)
    path = save(tmp_path / "x.npz", x_train=x, y_train=np.arange(10) % 2, public=x[:2])
    pool = npz(path, normalize="sample")
    assert (pool.inputs.dtype, pool.scale, pool.public.dtype) == (
        torch.float32,
        None,
        torch.float32,
    )
    torch.testing.assert_close(pool.inputs.mean((2, 3)), torch.zeros(8, 3), rtol=0, atol=1e-6)
    with pytest.raises(ConfigError, match="Leave out one of the two"):
        npz(path, normalize="sample", mean=(0.5,), std=(0.5,))
    assert not padding.standardized(np.full((1, 2), 7, np.uint8)).any()  # a constant channel


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (
            np.ones((4, 2), int),
            r"true shapes are int64 of shape \(4, 2\); 5 samples of 3×3 need .* shape \(5, 2\)",
        ),
        (
            np.ones((5, 3), int),
            r"of shape \(5, 3\); 5 samples of 3×3 need whole numbers of shape \(5, 2\)",
        ),
        (np.ones((5, 2)), "true shapes are float64"),
        (
            np.array([[1, 1]] * 4 + [[3, 4]]),
            "sample 4 has the true shape 3×4; it must be at least 1 and at most 3×3",
        ),
        (np.array([[1, 0]] * 5), "sample 0 has the true shape 1×0"),
    ],
)
def test_true_shapes_that_do_not_fit_are_refused(tmp_path, shapes, message):
    with pytest.raises(DataError, match=message):
        npz(
            save(
                tmp_path / "x.npz",
                x=np.zeros((5, 3, 3), np.uint8),
                y=np.ones((5, 3, 3), int),
                shapes=shapes,
            )
        )


def test_padding_needs_masks(tmp_path):
    path = save(tmp_path / "x.npz", x=np.zeros((5, 3, 3), np.uint8), y=np.arange(5))
    with pytest.raises(
        DataError,
        match=r"multiple_of or true shapes were asked for .*they need masks.*shape \(5,\)",
    ):
        npz(path, multiple_of=4)
    real = save(
        tmp_path / "y.npz",
        x=np.zeros((5, 3, 3), np.uint8),
        y=np.zeros((5, 3, 3)),
        shapes=np.ones((5, 2), int),
    )
    with pytest.raises(DataError, match=r"one whole number for every pixel or voxel.*type float64"):
        npz(real)
    dense = save(tmp_path / "z.npz", x=np.zeros((5, 3, 3), np.uint8), y=np.ones((5, 3, 3), int))
    with pytest.raises(
        ConfigError, match="multiple_of = 0 was asked for z; a whole number of 1 or more fits"
    ):
        npz(dense, multiple_of=0)
    with pytest.raises(
        DataError, match=r"z: samples would be padded to 65536×65536 values; at most 268,435,456"
    ):
        npz(dense, multiple_of=2**16)


def test_masks_of_the_test_part_must_fit_too(tmp_path):
    x, y = np.zeros((5, 3, 3), np.uint8), np.ones((5, 3, 3), int)
    with pytest.raises(
        DataError, match=r"inputs have shape \(2, 1, 3, 3\) and masks \(2, 3, 2\) of int64"
    ):
        npz(save(tmp_path / "x.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2, :, :2]))


def test_masks_in_which_nothing_counts_are_refused(tmp_path):
    x = np.zeros((5, 3, 3), np.uint8)
    with pytest.raises(DataError, match="no mask has foreground; no value is above 0"):
        npz(save(tmp_path / "x.npz", x=x, y=np.zeros((5, 3, 3), int)))
    with pytest.raises(DataError, match="no target counts, because all are -100"):
        Pool.of((x[:, None], np.full((5, 3, 3), -100)), (x[:, None], np.full((5, 3, 3), -100)))


def test_the_classes_of_a_client_are_those_in_its_masks():
    x, y = torch.zeros(4, 1, 2, 2), torch.zeros(4, 2, 2, dtype=torch.int64)
    y[1, 0, 0], y[3, 1, 1], y[2] = 2, 1, -100
    data = Pool.of((x, y), (x, y)).with_parts([[0, 1], [2, 3]])
    assert data.num_classes == 3
    assert [data.classes_present(client, 3).tolist() for client in (0, 1)] == [
        [True, False, True],
        [True, True, False],
    ]
    assert Pool.of((x, y), (x, y)).has_masks
    assert not Pool.of((x[:, :, 0], y[:, 0]), (x[:, :, 0], y[:, 0])).has_masks  # sequences


def test_inputs_without_numbers_are_refused(tmp_path):
    y = np.ones((5, 3, 3), int)
    with pytest.raises(DataError, match="x: inputs are <U1; bytes, real or whole numbers fit"):
        npz(save(tmp_path / "x.npz", x=np.full((5, 3, 3), "a"), y=y))
    with pytest.raises(
        DataError, match=r"x: inputs have shape \(0, 1, 3, 3\); there must be some values"
    ):
        npz(save(tmp_path / "x.npz", x=np.zeros((0, 3, 3)), y=y[:0]))
    with pytest.raises(
        DataError, match=r"x: inputs have shape \(0, 1, 3, 3\); there must be some values"
    ):
        npz(save(tmp_path / "x.npz", x=np.zeros((5, 3, 3)), y=y, public=np.zeros((0, 3, 3))))
    with pytest.raises(
        DataError,
        match=r'"sample" was asked for; samples of x have shape \(3,\)\. It needs several',
    ):
        npz(save(tmp_path / "x.npz", x=np.zeros((5, 3)), y=np.arange(5)), normalize="sample")
    arrays = {
        "x_train": np.zeros((5, 3, 3)),
        "y_train": y,
        "x_test": np.zeros((5, 1, 3, 3, 3)),
        "y_test": y,
    }
    with pytest.raises(DataError, match="x: some samples are images and others volumes"):
        npz(save(tmp_path / "x.npz", **arrays))
