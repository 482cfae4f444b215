"""Accuracy of supernets and their members on images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedquilt.supernet.elastic import Supernet, recalibrate
from fedquilt.supernet.space import Config


@torch.no_grad()
def accuracy(net: nn.Module, images: Tensor, labels: Tensor, batch_size: int = 512) -> float:
    """Return the share of images that a net classifies correctly, in [0, 1].

    Args:
        net: A net in evaluation mode.
        images: (sample, channel, height, width) Images, on the device of the net.
        labels: (sample,) Classes.
        batch_size: Images per batch.
    """
    correct = 0
    parts = zip(torch.split(images, batch_size), torch.split(labels, batch_size), strict=True)
    for part, part_labels in parts:
        correct += int((net(part).argmax(1) == part_labels).sum())
    return correct / len(images)


def member_accuracy(
    supernet: Supernet,
    config: Config,
    calibration: Tensor,
    images: Tensor,
    labels: Tensor,
) -> float:
    """Take a member from a supernet, measure its norm statistics and return its accuracy.

    Args:
        supernet: A trained supernet.
        config: Configuration of the member.
        calibration: (sample, channel, height, width) Training images for the norm statistics.
        images: (sample, channel, height, width) Test images.
        labels: (sample,) Classes of the test images, those of the pre-training task.
    """
    member = recalibrate(supernet.member(config), calibration).eval()
    return accuracy(member, images, labels)
