"""A supernet: one set of weights that all members of a space share.

The shared weights are those of the largest net. A member has the first blocks of each stage and the
first channels of each layer. A smaller depthwise kernel is the centre of the next larger one, times
a learned matrix that starts as the identity (Cai et al., ICLR 2020, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedquilt.hardware.generators import random_state
from fedquilt.supernet.blocks import BlockSpec
from fedquilt.supernet.space import HEAD, Config, Space, nested

ChannelKind = Literal["expansion", "width"]
MAX_CACHED_SKELETONS = 4_096  # Distinct blocks that are cached as modules without data.


class Supernet(nn.Module):
    """The shared weights of a space, which can run as any of its members.

    `net` is the largest member, a plain module with the names that `fedquilt supernet show --names`
    prints. `transforms` are the learned matrices between kernel sizes.

    Args:
        space: The space. `space.num_classes` is the number of classes of the pre-training task.
        seed: Random seed of the initial weights.
    """

    def __init__(self, space: Space, seed: int = 0) -> None:
        super().__init__()
        self.space = space
        with random_state(seed):
            self.net = space.member(space.largest)
        self.transforms = nn.ParameterDict()
        self._kernels = self._kernel_ladders()  # kernel sizes by weight, largest first
        for name, kernels in self._kernels.items():
            for kernel in kernels[1:]:
                self.transforms[_transform_key(name, kernel)] = nn.Parameter(torch.eye(kernel**2))

    def forward(self, x: Tensor, config: Config | None = None) -> Tensor:
        """Run a batch through the member of a configuration.

        In training mode, norms use the statistics of the batch, and only the largest net updates
        its running statistics. In evaluation mode a smaller member uses the first of the largest
        net's statistics, which are not its own: evaluate `member(config)` after `recalibrate`
        instead.

        Args:
            x: (sample, channel, height, width) Images.
            config: The member to run. None: the largest.

        Returns:
            (sample, class) Logits.
        """
        config = self.space.largest if config is None else self.space.canonical(config)
        if config == self.space.largest:
            logits: Tensor = self.net(x)
            return logits
        return self.run(x, config)

    def run(self, x: Tensor, config: Config) -> Tensor:
        """Run a member as `forward` does, but never change running statistics.

        Args:
            x: (sample, channel, height, width) Images.
            config: The member, in canonical form.

        Returns:
            (sample, class) Logits.
        """
        shared = self._shared()
        for name, block in self.space.blocks(config).items():
            skeleton = _skeleton(block, self.training)
            x = functional_call(
                skeleton,
                self._block_tensors(shared, name, block, self.training),
                (x,),
            )
        return x

    def weights(self, config: Config) -> dict[str, Tensor]:
        """Return the weights and norm statistics of a member by name.

        They are differentiable functions of the shared weights. Where a slice is enough, they are
        views that share memory with the supernet.
        """
        shared = self._shared()
        weights = {}
        for name, block in self.space.blocks(self.space.canonical(config)).items():
            tensors = self._block_tensors(shared, name, block, training=False)
            weights.update({f"{name}.{key}": tensor for key, tensor in tensors.items()})
        return weights

    def member(self, config: Config, num_classes: int | None = None, seed: int = 0) -> nn.Module:
        """Return a member as a plain module with weights of its own.

        Norm statistics are cut like weights and are not the member's own: call `recalibrate`.

        Args:
            config: Configuration of the member.
            num_classes: Number of classes of the member. None or the number of the pre-training
                task keeps the trained classifier. Any other number draws a new one.
            seed: Random seed of a new classifier.
        """
        config = self.space.canonical(config)
        space = self.space
        weights = {name: tensor.detach().clone() for name, tensor in self.weights(config).items()}
        if num_classes is not None and num_classes != space.num_classes:
            space = space.with_classes(num_classes)
            weights.update(_fresh_classifier(space, config, weights, seed))
        with torch.device("meta"):
            member = nested({name: block.build() for name, block in space.blocks(config).items()})
        member.load_state_dict(weights, assign=True)
        return member.train(self.training)

    @torch.no_grad()
    def sort_channels(self, kinds: Collection[str] = ("expansion", "width")) -> None:
        """Reorder channels by importance, so that a narrow member keeps the most important ones.

        Importance is the L1 norm of the weights that read or write a channel. The largest member
        computes the same function as before, up to rounding. Smaller members change.

        Args:
            kinds: Channels to reorder: "expansion" are those inside of blocks, "width" are those
                between blocks.
        """
        tensors = dict(self.net.state_dict(keep_vars=True))
        for group in _channel_groups(self.space.blocks(self.space.largest)):
            if group.kind not in kinds or not group.axes:
                continue
            weights = [(tensors[name], dim) for name, dim in group.axes]
            importance = sum(_l1_norm(tensor, dim) for tensor, dim in weights if tensor.dim() > 1)
            order = torch.argsort(cast(Tensor, importance), descending=True, stable=True)
            for tensor, dim in weights:
                tensor.copy_(tensor.index_select(dim, order))

    def _kernel_ladders(self) -> dict[str, list[int]]:
        """Return the kernel sizes of each weight that has several, the largest first.

        Keys are names of weights in `net`.
        """
        largest = self.space.largest
        choices = [choice for choice in self.space.choices if choice.kind == "kernels"]
        ladders: dict[str, set[int]] = {}
        for step in range(max((len(choice.options) for choice in choices), default=0)):
            options = [choice.options[min(step, len(choice.options) - 1)] for choice in choices]
            config = Config(
                largest.depths,
                largest.expansions,
                tuple(map(int, options)),
                largest.widths,
            )
            for name, block in self.space.blocks(config).items():
                for layer in block.layers:
                    if f"{layer.name}.weight" == block.elastic_kernel:
                        ladders.setdefault(f"{name}.{block.elastic_kernel}", set()).add(
                            layer.kernel,
                        )
        ladders = {name: kernels for name, kernels in ladders.items() if len(kernels) > 1}
        return {name: sorted(kernels, reverse=True) for name, kernels in ladders.items()}

    def _shared(self) -> dict[str, Tensor]:
        return self.net.state_dict(keep_vars=True)

    def _block_tensors(
        self,
        shared: Mapping[str, Tensor],
        name: str,
        block: BlockSpec,
        training: bool,
    ) -> dict[str, Tensor]:
        """Return the tensors of one block of a member, by their names in the block.

        They are the first channels of the shared tensors. An elastic kernel is cropped.

        Args:
            shared: Tensors of the largest net by name.
            name: Name of the block in the net.
            block: Description of the block in the member.
            training: True leaves out running statistics.
        """
        tensors = {}
        for key, shape in _shapes(block, training).items():
            tensor = shared[f"{name}.{key}"]
            if key == block.elastic_kernel:
                tensor = self._cropped(f"{name}.{key}", tensor[: shape[0]], shape[-1])
            else:
                for dim, length in enumerate(shape[:2]):
                    tensor = tensor.narrow(dim, 0, length)
            tensors[key] = tensor
        return tensors

    def _cropped(self, name: str, kernels: Tensor, size: int) -> Tensor:
        """Crop kernels step by step, each time with the learned matrix of that step.

        Kernels of the wanted size are returned as they are.

        Args:
            name: Name of the weight.
            kernels: (channel, 1, height, width) Kernels of the largest size.
            size: Height and width to crop to.
        """
        for smaller in self._kernels.get(name, [])[1:]:
            if kernels.shape[-1] <= size:
                break
            kernels = center(kernels, smaller)
            flat = kernels.flatten(2) @ self.transforms[_transform_key(name, smaller)].T
            kernels = flat.unflatten(2, (smaller, smaller))
        return kernels


def center(kernels: Tensor, size: int) -> Tensor:
    """Return the centre of square kernels, as a view.

    Args:
        kernels: (out channel, in channel, height, width) Kernels.
        size: Height and width of the centre. It has the parity of the kernels' size.
    """
    margin = (kernels.shape[-1] - size) // 2
    return kernels[:, :, margin : margin + size, margin : margin + size]


@torch.no_grad()
def recalibrate(
    member: nn.Module,
    samples: Tensor | Iterable[Tensor],
    batch_size: int = 256,
) -> nn.Module:
    """Measure the norm statistics of a member on samples, and return the member.

    Statistics are the plain mean over the batches. Weights do not change.

    A batch of one tensor takes every n-th sample, because samples are often sorted: rotated images
    are, by their rotation. Batches of one rotation would have variances that are too small, and
    members of a trained supernet then lose some ten percent of accuracy
    (`test_batches_of_sorted_samples_are_mixed`).

    Args:
        member: A net with batch norms, for example from `Supernet.member`.
        samples: (sample, channel, height, width) Images, or batches of them.
        batch_size: Samples per batch, at most, if `samples` is one tensor. A batch of one sample is
            left out.
    """
    norms = [module for module in member.modules() if isinstance(module, nn.BatchNorm2d)]
    momenta = [norm.momentum for norm in norms]
    was_training = member.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    member.train()
    try:
        for batch in _mixed(samples, batch_size) if isinstance(samples, Tensor) else samples:
            if len(batch) > 1:
                member(batch)
    finally:
        member.train(was_training)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return member


def _mixed(samples: Tensor, batch_size: int) -> list[Tensor]:
    """Split samples into batches of nearly equal size, of at most `batch_size` samples.

    Batch i of n takes every n-th sample from i on, so that it has samples from everywhere.
    """
    count = math.ceil(len(samples) / batch_size)
    return [samples[first::count] for first in range(count)]


# --- blocks without data ------------------------------------------------------------------------


@lru_cache(MAX_CACHED_SKELETONS)
def _skeleton(block: BlockSpec, training: bool) -> nn.Module:
    """Build a block without data, which is run with tensors of the supernet.

    In training its norms have no running statistics, so that a sampled member changes no buffer.
    Results are cached and must not be changed.

    Args:
        block: Description of the block.
        training: True: the module is in training mode. False: in evaluation mode.
    """
    with torch.device("meta"):
        module = block.build()
    if training:
        for norm in module.modules():
            if isinstance(norm, nn.BatchNorm2d):
                norm.track_running_stats = False
                norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    return module.train(training)


@lru_cache(MAX_CACHED_SKELETONS)
def _shapes(block: BlockSpec, training: bool) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in _skeleton(block, training).state_dict().items()}


def _transform_key(name: str, kernel: int) -> str:
    """Return the name of the matrix that leads to a kernel size, as a key of `transforms`.

    Slashes replace dots, which are not allowed in the names of parameters.

    Args:
        name: Name of the weight in `net`.
        kernel: Kernel size after the step.
    """
    return f"{name.removesuffix('.weight').replace('.', '/')}/{kernel}"


def _fresh_classifier(
    space: Space,
    config: Config,
    weights: Mapping[str, Tensor],
    seed: int,
) -> dict[str, Tensor]:
    """Draw a new weight and bias of the output layer, and return them by name.

    Args:
        space: Space with the new number of classes.
        config: Configuration of the member.
        weights: Tensors of the member, which give device and type.
        seed: Random seed.
    """
    head = space.blocks(config)[HEAD]
    classifier = next(layer for layer in head.layers if layer.writes == "class")
    name = f"{HEAD}.{classifier.name}"
    trained_weight = weights[f"{name}.weight"]
    with random_state(seed):
        linear = nn.Linear(classifier.in_channels, classifier.out_channels)
    linear = linear.to(trained_weight.device, trained_weight.dtype)
    return {f"{name}.{key}": tensor for key, tensor in linear.state_dict().items()}


# --- groups of channels -------------------------------------------------------------------------


class _ChannelGroup:
    """Axes of tensors that carry the same channels, and must be reordered together."""

    def __init__(self, kind: ChannelKind | None) -> None:
        self.kind = kind  # None: channels of the images or classes, which keep their order
        self.axes: list[tuple[str, int]] = []  # (tensor, dimension)


def _channel_groups(blocks: Mapping[str, BlockSpec]) -> list[_ChannelGroup]:
    """Return groups of tensor axes that carry the same channels.

    A residual sum or a layer connects the axes of a group. Groups inside of blocks have the kind
    "expansion", and those between blocks have the kind "width". Channels of images and classes have
    no kind.

    Args:
        blocks: Blocks of a net by name, in the order of the forward pass.
    """
    stream = _ChannelGroup(None)
    groups = [stream]
    for name, block in blocks.items():
        local = {"in": stream, "class": _ChannelGroup(None)}
        local["out"] = stream if block.keeps_channels else _ChannelGroup("width")
        for layer in block.layers:
            for axis in layer.axes():
                group = local.setdefault(axis.group, _ChannelGroup("expansion"))
                group.axes.append((f"{name}.{axis.tensor}", axis.dim))
        groups += [group for group in local.values() if group is not stream]
        stream = local["out"]
    return groups


def _l1_norm(tensor: Tensor, dim: int) -> Tensor:
    """Return the L1 norm of each slice along a dimension, (length of the dimension,)."""
    return tensor.detach().abs().movedim(dim, 0).flatten(1).sum(1)
