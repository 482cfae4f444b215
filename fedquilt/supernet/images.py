"""Images on which a supernet is pre-trained, with labels or rotated."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedquilt.data import Pool
from fedquilt.errors import DataError
from fedquilt.supernet.space import Space

Labels = Literal["rotations", "own"]
NUM_ROTATIONS = 4


def rotations(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images rotated by 0, 90, 180 and 270 degrees, with the rotation as label 0, 1, 2 or 3.

    Args:
        images: (sample, channel, height, width) Square images.

    Returns:
        (4 · sample, channel, height, width) images, all of one rotation after the other, and
        (4 · sample,) labels.
    """
    turned = torch.cat([torch.rot90(images, turn, (2, 3)) for turn in range(NUM_ROTATIONS)])
    labels = torch.arange(NUM_ROTATIONS, device=images.device).repeat_interleave(len(images))
    return turned, labels


@dataclass(frozen=True, eq=False)
class SupernetData:
    """Images for pre-training, with labels or without."""

    images: Tensor  # (sample, channel, height, width) Scaled images, as the nets get them.
    labels: Tensor | None = None  # (sample,) Classes from 0 on. None: rotations are the labels.
    num_classes: int = NUM_ROTATIONS  # Number of classes.

    def __post_init__(self) -> None:
        images = self.images
        if images.dim() != 4 or images.shape[2] != images.shape[3] or len(images) < 2:
            raise DataError(
                "A supernet is trained on at least two square images (sample, channel, size, "
                f"size); found samples of shape {tuple(images.shape)}.",
            )
        if not images.is_floating_point():
            raise DataError(
                f"A supernet is trained on real numbers; found images of {images.dtype}.",
            )
        if self.labels is not None and self.labels.shape != images.shape[:1]:
            raise DataError(
                f"{len(images)} images have labels of shape {tuple(self.labels.shape)}.",
            )

    @classmethod
    def of_pool(cls, pool: Pool, labels: Labels = "rotations") -> SupernetData:
        """Take images from a pool, scaled as for a run.

        Args:
            pool: A pool of images.
            labels: "rotations" takes the public images, or the training images if there are none.
                "own" takes the training images with their classes.

        Raises:
            DataError: The pool has no images, or no classes although `labels` is "own".
        """
        if labels == "own" and not pool.num_classes:
            raise DataError(
                f"{pool.name} has no classes to train on; labels = rotations would work.",
            )
        is_public = labels == "rotations" and pool.public is not None
        stored = pool.public if is_public and pool.public is not None else pool.inputs
        images = stored.float() if pool.scale is None else pool.scale(stored)
        if labels == "rotations":
            return cls(images)
        return cls(images, pool.targets, pool.num_classes)

    @property
    def fingerprint(self) -> str:
        """Return a SHA-256 checksum of images and labels, in hexadecimal digits."""
        digest = hashlib.sha256(self.images.cpu().contiguous().numpy().tobytes())
        if self.labels is not None:
            digest.update(self.labels.cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    def to(self, device: torch.device) -> SupernetData:
        """Return a copy whose images and labels are on a device."""
        labels = None if self.labels is None else self.labels.to(device)
        return SupernetData(self.images.to(device), labels, self.num_classes)

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the images and labels of a batch.

        Without labels, every image is rotated by 0, 90, 180 and 270 degrees, and the rotation is
        its label. There are then four samples for each row, all of one rotation after the other.

        Args:
            rows: (sample,) Positions of the images.
        """
        rows = rows.to(self.images.device)
        if self.labels is None:
            return rotations(self.images[rows])
        return self.images[rows], self.labels[rows]

    def fit(self, space: Space) -> Space:
        """Return a copy of the space that has the number of classes of the data.

        Raises:
            DataError: The shape of the images is not that of the space.
        """
        expected_shape = (space.in_channels, space.image_size, space.image_size)
        image_shape = tuple(self.images.shape[1:])
        if image_shape != expected_shape:
            raise DataError(
                f"The space {space.name} takes images of shape {expected_shape}; found "
                f"{image_shape}. Set image_size and in_channels of the space to those of the data.",
            )
        return space.with_classes(self.num_classes)
