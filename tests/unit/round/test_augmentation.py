"""Crops, flips and intensities of images and volumes, and of their masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.round.training.augmentation import Intensity, augment, augmented, moved
from fedquilt.round.training.local import LocalTraining
from fedquilt.tasks import Classification, Regression, Segmentation

KEYS = torch.tensor([noise.key(1), noise.key(2)])
SIZES = {"image": (5, 4), "volume": (3, 5, 4)}


def marked(size: tuple[int, ...], count: int = 12) -> tuple[Tensor, Tensor]:
    """Return inputs (sample, 1, *size) whose values are their masks (sample, *size), no two of them
    alike.
    """
    masks = 1 + torch.arange(count * torch.Size(size).numel()).reshape(count, *size)
    return masks.unsqueeze(1).double(), masks


def naive(
    volume: Tensor, starts: list[int], crop: int, mirrored: list[int], padding: float
) -> Tensor:
    """Move one sample (*size), voxel by voxel."""
    result = torch.full_like(volume, padding)
    size = volume.shape
    for place in torch.ones(size).nonzero().tolist():
        read = list(place)
        for axis in mirrored:
            read[axis] = size[axis] - 1 - read[axis]
        read = [at + start - crop for at, start in zip(read, starts, strict=True)]
        if all(0 <= at < side for at, side in zip(read, size, strict=True)):
            result[tuple(place)] = volume[tuple(read)]
    return result


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize(
    ("crop", "flip", "axes"), [(2, False, ()), (0, True, (0, -1)), (1, True, (1, 0)), (1, True, ())]
)
def test_volumes_and_masks_are_moved_voxel_by_voxel(kind, crop, flip, axes):
    inputs, masks = marked(SIZES[kind])
    dims, count = len(SIZES[kind]), len(masks)
    local = LocalTraining(crop=crop, flip=flip, flip_axes=axes)
    found, found_masks = augmented(inputs, masks, local, KEYS[0], Segmentation())

    shifts = noise.uniform(noise.fold_in(KEYS[0], -1), (dims, count), torch.float32)
    chosen = [axis % dims for axis in axes or (-1,)] if flip else []
    flips = noise.uniform(noise.fold_in(KEYS[0], -2), (len(chosen), count), torch.float32)
    for sample in range(count):
        starts = [int(shift * (2 * crop + 1)) for shift in shifts[:, sample]]
        mirrored = [
            axis for axis, drawn in zip(chosen, flips[:, sample], strict=True) if drawn < 0.5
        ]
        assert torch.equal(found[sample, 0], naive(inputs[sample, 0], starts, crop, mirrored, 0.0))
        assert torch.equal(found_masks[sample], naive(masks[sample], starts, crop, mirrored, -100))


@pytest.mark.parametrize("kind", SIZES)
def test_a_moved_sample_has_a_moved_mask(kind):
    """Each value of the input is that of its mask; what came in at an edge is 0 there and ignored
    in the mask.
    """
    inputs, masks = marked(SIZES[kind], 40)
    every = tuple(range(len(SIZES[kind])))
    local = LocalTraining(crop=1, flip=True, flip_axes=every)
    for task in (Segmentation(ignore=-7), Classification(ignore=-7)):
        found, moved_masks = augmented(inputs, masks, local, KEYS[0], task)
        inside = moved_masks != -7
        assert torch.equal(found[:, 0].long(), moved_masks.where(inside, 0))
        assert moved_masks.dtype == torch.int64
        assert not inside.all()
        assert not torch.equal(found, inputs)
    stacked = vmap(lambda key: augmented(inputs, masks, local, key, Segmentation()))(KEYS)
    for place, key in enumerate(KEYS):
        alone = augmented(inputs, masks, local, key, Segmentation())
        assert all(
            torch.equal(one[place], other) for one, other in zip(stacked, alone, strict=True)
        )


def test_axes_are_flipped_independently():
    inputs, _ = marked((2, 2, 2), 400)
    found = moved(inputs, LocalTraining(flip=True, flip_axes=(0, 1, 2)), KEYS[0])
    first = found[:, 0, 0, 0, 0] - inputs[:, 0, 0, 0, 0]
    counts = torch.bincount(first.long(), minlength=8)  # where the corner came from, one of eight
    assert (counts > 20).all()


def test_the_last_axis_is_flipped_if_none_is_named():
    inputs, _ = marked((3, 4))
    plain = moved(inputs, LocalTraining(flip=True), KEYS[0])
    assert torch.equal(plain, moved(inputs, LocalTraining(flip=True, flip_axes=[-1]), KEYS[0]))
    assert torch.equal(plain, moved(inputs, LocalTraining(flip=True, flip_axes=(1,)), KEYS[0]))


def test_intensities_change_each_sample_by_a_factor_and_an_offset():
    inputs = (
        torch.stack([torch.zeros(500, 1, 2, 2), torch.ones(500, 1, 2, 2)], 1).flatten(1, 2).double()
    )
    masks = torch.randint(2, (500, 2, 2))
    local = LocalTraining(intensity=Intensity(scale=0.2, offset=0.5))
    found, same = augmented(inputs, masks, local, KEYS[0], Segmentation())
    assert same is masks or torch.equal(same, masks)
    offsets, factors = found[:, 0], found[:, 1] - found[:, 0]
    for values, low, high in ((offsets, -0.5, 0.5), (factors, 0.8, 1.2)):
        assert torch.allclose(values, values[:, :1, :1].expand_as(values))
        assert low <= float(values.min()) < low + 0.05 * (high - low)
        assert high >= float(values.max()) > high - 0.05 * (high - low)
    stacked = vmap(lambda key: augment(inputs, local, key))(KEYS)
    assert torch.equal(stacked[0], found)
    assert not torch.equal(stacked[1], found)


def test_noise_has_the_standard_deviation_that_was_asked_for():
    inputs = torch.full((20, 1, 10, 10, 10), 3.0, dtype=torch.float64)
    found = augment(inputs, LocalTraining(intensity=Intensity(noise=0.1)), KEYS[0])
    assert float(found.mean()) == pytest.approx(3, abs=0.005)
    assert float(found.std()) == pytest.approx(0.1, rel=0.03)
    assert torch.equal(augment(inputs, LocalTraining(intensity=Intensity()), KEYS[0]), inputs)


@pytest.mark.parametrize(
    ("local", "shape", "message"),
    [
        (
            LocalTraining(flip=True, flip_axes=(2,)),
            (1, 4, 4),
            r"flip_axes = \[2\] .* images have 2 axes, .* 0 to 1 would fit",
        ),
        (
            LocalTraining(flip=True, flip_axes=(-1, 1)),
            (1, 4, 4),
            "one of them is named twice. Name each once",
        ),
        (
            LocalTraining(crop=3),
            (1, 8, 3, 8),
            "crop = 3 was asked for; images are 8×3×8, .* Up to 2 fits",
        ),
        (LocalTraining(flip=True), (4,), r"a sample has shape \(4,\)"),
    ],
)
def test_settings_that_do_not_fit_the_samples_are_refused(local, shape, message):
    with pytest.raises(ConfigError, match=message):
        augment(torch.zeros(2, *shape), local, KEYS[0])


def test_intensities_are_of_real_numbers():
    with pytest.raises(ConfigError, match=r"inputs are torch\.int64, and real numbers would fit"):
        augment(
            torch.zeros(2, 5, dtype=torch.int64),
            LocalTraining(intensity=Intensity(scale=0.1)),
            KEYS[0],
        )


def test_masks_of_another_size_than_the_inputs_cannot_be_cropped():
    inputs, masks = torch.zeros(2, 1, 8, 8), torch.zeros(2, 4, 4, dtype=torch.int64)
    with pytest.raises(ConfigError, match="inputs have the size 8×8 and their masks 4×4"):
        augmented(inputs, masks, LocalTraining(crop=1), KEYS[0], Segmentation())
    augmented(inputs, masks, LocalTraining(flip=True), KEYS[0], Segmentation())
    # whose targets stay as they are
    augmented(inputs, masks.float(), LocalTraining(crop=1), KEYS[0], Regression())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"flip_axes": (0,)}, r"flip_axes = \[0\] was asked for without flip = true"),
        ({"crop": -1}, "crop = -1 was asked for"),
        (
            {"intensity": {"scale": 0.1}},
            r"intensity = .* was asked for; fq.methods.api.Intensity\(scale=0.1\) would work",
        ),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LocalTraining(**options)
    with pytest.raises(ConfigError, match=r"scale = 2.0 was asked for; it must lie in \[0, 1\]"):
        Intensity(scale=2.0)
