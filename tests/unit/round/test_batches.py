"""Batches of a client: order, sizes, crops and flips."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.round.training.augmentation import augment
from fedquilt.round.training.batches import batched, itinerary
from fedquilt.round.training.local import LocalTraining


@pytest.mark.parametrize(
    ("size", "last_batch", "sizes"),
    [
        (8, "keep", [4, 4]),
        (10, "keep", [4, 4, 2]),
        (10, "drop", [4, 4]),
        (10, "merge", [4, 6]),
        (9, "keep", [4, 5]),  # a tail of one joins: batch norm cannot train on it
        (9, "drop", [4, 4]),
        (9, "merge", [4, 5]),
        (5, "keep", [5]),
        (3, "keep", [3]),
        (3, "drop", [3]),  # the only batch is never dropped
        (3, "merge", [3]),
        (1, "keep", [1]),
        (0, "keep", []),
    ],
)
def test_batches(size, last_batch, sizes):
    found = batched(torch.arange(size), 4, last_batch)
    assert [len(batch) for batch in found] == sizes
    assert torch.equal(torch.cat([torch.arange(0), *found]), torch.arange(sum(sizes)))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 3))
def test_an_epoch_meets_every_sample_once(size, batch_size, epochs):
    local = LocalTraining(batch_size=batch_size, epochs=epochs)
    batches = itinerary(size, local, key=5)
    met = torch.cat(batches)
    assert len(met) == size * epochs
    for epoch in range(epochs):
        assert sorted(met[epoch * size : (epoch + 1) * size].tolist()) == list(range(size))
    assert all(len(batch) > 1 for batch in batches) or size == 1 or batch_size == 1
    assert [b.tolist() for b in batches] == [b.tolist() for b in itinerary(size, local, key=5)]


def test_epochs_and_clients_have_different_orders():
    local = LocalTraining(batch_size=50, epochs=2)
    first, second = itinerary(50, local, key=1)
    assert first.tolist() != second.tolist()
    assert first.tolist() != itinerary(50, local, key=2)[0].tolist()


def naive_augment(inputs: Tensor, pad: int, flip: bool, key: Tensor) -> Tensor:
    """One image after the other."""
    count, _, height, width = inputs.shape
    result = inputs.clone()
    shifts = noise.uniform(noise.fold_in(key, -1), (2, count), torch.float32)
    flips = noise.uniform(noise.fold_in(key, -2), (count,), torch.float32)
    for image in range(count):
        if pad:
            padded = F.pad(inputs[image], (pad, pad, pad, pad))
            top, left = (int(shift * (2 * pad + 1)) for shift in shifts[:, image])
            result[image] = padded[:, top : top + height, left : left + width]
        if flip and flips[image] < 0.5:
            result[image] = result[image].flip(-1)
    return result


@pytest.mark.parametrize(("crop", "flip"), [(2, False), (0, True), (4, True), (0, False)])
def test_augmentation_is_that_of_one_image_after_the_other(crop, flip):
    inputs = torch.randn(40, 2, 5, 7, generator=torch.Generator().manual_seed(0))
    local, keys = LocalTraining(crop=crop, flip=flip), torch.tensor([noise.key(1), noise.key(2)])
    expected = [naive_augment(inputs, crop, flip, key) for key in keys]
    assert torch.equal(augment(inputs, local, keys[0]), expected[0])
    stacked = vmap(lambda key: augment(inputs, local, key))(keys)
    assert torch.equal(stacked, torch.stack(expected))
    if crop or flip:
        assert not torch.equal(expected[0], expected[1])
    else:
        assert torch.equal(expected[0], inputs)


@pytest.mark.parametrize("local", [LocalTraining(crop=1), LocalTraining(flip=True)])
def test_only_images_are_augmented(local):
    """A flipped sentence would be trained on without a word."""
    with pytest.raises(ConfigError, match=r"they are for images .* a sample has shape \(5,\)"):
        augment(torch.zeros(2, 5, dtype=torch.int64), local, torch.tensor(noise.key(0)))


def test_crops_that_may_contain_only_padding_are_refused():
    key, images = torch.tensor(noise.key(0)), torch.ones(50, 1, 6, 4)
    assert augment(images, LocalTraining(crop=3), key).flatten(1).any(1).all()
    with pytest.raises(
        ConfigError, match=r"crop = 4 was asked for; images are 6×4, .* Up to 3 fits\."
    ):
        augment(images, LocalTraining(crop=4), key)


def test_every_shift_of_a_crop_is_drawn():
    marked = torch.zeros(400, 1, 5, 5)
    marked[:, 0, 2, 2] = 1
    cropped = augment(marked, LocalTraining(crop=2), torch.tensor(noise.key(0)))
    assert (cropped.sum(0) > 0).all()
    assert float(cropped.sum()) == 400
