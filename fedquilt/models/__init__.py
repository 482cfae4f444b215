"""Models by name, as plain PyTorch modules.

`MODELS["resnet18"].factory(num_classes=100)` returns an `nn.Module` like any that a user writes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedquilt.models.cnn import AlexNet, ConvNet, DigitsCNN, ProgFedCNN, digits_cnn, digits_cnn_norm
from fedquilt.models.densenet import DenseNet, densenet40_12, densenet100_12, densenet121
from fedquilt.models.mlp import MLP
from fedquilt.models.mobilenet import (
    MobileNet,
    mobilenet_v2,
    mobilenet_v3_large,
    mobilenet_v3_small,
)
from fedquilt.models.resnet import (
    PreResNet,
    ResNet,
    WideResNet,
    preresnet18,
    rescue_resnet,
    resnet18,
    resnet34,
    resnet50,
    resnet152,
    tiny_resnet,
)
from fedquilt.models.transformer import TransformerLM, ViT
from fedquilt.models.unet import UNet, unet2d, unet3d
from fedquilt.models.vgg import VGG, vgg11, vgg16, vgg19

__all__ = [
    "MLP",
    "MODELS",
    "VGG",
    "AlexNet",
    "ConvNet",
    "DenseNet",
    "DigitsCNN",
    "MobileNet",
    "ModelSpec",
    "PreResNet",
    "ProgFedCNN",
    "ResNet",
    "TransformerLM",
    "UNet",
    "ViT",
    "WideResNet",
    "densenet40_12",
    "densenet100_12",
    "densenet121",
    "digits_cnn",
    "digits_cnn_norm",
    "mobilenet_v2",
    "mobilenet_v3_large",
    "mobilenet_v3_small",
    "preresnet18",
    "rescue_resnet",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet152",
    "tiny_resnet",
    "unet2d",
    "unet3d",
    "vgg11",
    "vgg16",
    "vgg19",
]


@dataclass(frozen=True)
class ModelSpec:
    """A model that can be requested by name.

    It says how to make the model, which inputs the model takes by default, and which paper it is
    from.
    """

    factory: Callable[..., nn.Module]  # Makes the model. Its keyword arguments are settings
    input_shape: tuple[int, ...]  # Shape of one sample, without the batch dimension
    paper: str  # Paper that introduced the model, and papers that use it
    # Number of tokens, if inputs are integers from 0 to one less. None: inputs are real numbers.
    integer_vocab: int | None = None
    # Layers that the paper never cuts. Pass them to `fedquilt.trace` as `fixed`.
    fixed: tuple[str, ...] = ()

    def takes(self, sample: Tensor) -> bool:
        """Return True if the model was made for samples of this kind.

        Kinds are images, rows of numbers and tokens. The number of dimensions counts, and whether
        the values are real numbers or integers. Sizes may differ. `sample` has no batch dimension.
        """
        takes_real_numbers = self.integer_vocab is None
        same_dims = sample.dim() == len(self.input_shape)
        return same_dims and sample.is_floating_point() == takes_real_numbers

    def example(self, batch: int = 2) -> Tensor:
        """Return an input to trace with, of shape (batch, *input_shape).

        It has random numbers, or random tokens below `integer_vocab`. They are the same in every
        call. torch's global random state is left as it is.
        """
        generator, shape = torch.Generator().manual_seed(0), (batch, *self.input_shape)
        if self.integer_vocab is not None:
            return torch.randint(self.integer_vocab, shape, generator=generator)
        return torch.randn(shape, generator=generator)


_CIFAR = (3, 32, 32)

MODELS: dict[str, ModelSpec] = {
    "tiny_resnet": ModelSpec(tiny_resnet, (1, 8, 8), "the demo's"),
    "mlp": ModelSpec(MLP, (784,), "McMahan et al. 2017, 2NN"),
    "convnet": ModelSpec(ConvNet, (1, 28, 28), "Reddi et al. 2021; ProgFed, EMNIST"),
    "progfed_cnn": ModelSpec(ProgFedCNN, _CIFAR, "ProgFed, CIFAR-10"),
    "digits_cnn": ModelSpec(digits_cnn, (3, 28, 28), "FedResCuE, Table 16"),
    "digits_cnn_norm": ModelSpec(digits_cnn_norm, (3, 28, 28), "Split-Mix, Table 2"),
    "alexnet": ModelSpec(AlexNet, (3, 224, 224), "Split-Mix, Table 3"),
    "vgg11": ModelSpec(vgg11, _CIFAR, "Simonyan & Zisserman 2015; RaFL"),
    "vgg16": ModelSpec(vgg16, _CIFAR, "Simonyan & Zisserman 2015; ProgFed, RaFL"),
    "vgg19": ModelSpec(vgg19, _CIFAR, "Simonyan & Zisserman 2015; ProgFed"),
    "resnet18": ModelSpec(resnet18, _CIFAR, "He et al. 2016; ProgFed, RaFL"),
    "resnet34": ModelSpec(resnet34, _CIFAR, "He et al. 2016"),
    "resnet50": ModelSpec(resnet50, _CIFAR, "He et al. 2016"),
    "resnet152": ModelSpec(resnet152, _CIFAR, "He et al. 2016; ProgFed"),
    "rescue_resnet": ModelSpec(rescue_resnet, _CIFAR, "FedResCuE, Table 15"),
    "wide_resnet": ModelSpec(
        WideResNet, _CIFAR, "Zagoruyko & Komodakis 2016; FedResCuE, CIFAR-100"
    ),
    "preresnet18": ModelSpec(preresnet18, _CIFAR, "He et al. 2016; HeteroFL, FedRolex, Split-Mix"),
    "mobilenet_v2": ModelSpec(mobilenet_v2, _CIFAR, "Sandler et al. 2018; RaFL"),
    "mobilenet_v3_small": ModelSpec(mobilenet_v3_small, _CIFAR, "Howard et al. 2019; RaFL"),
    "mobilenet_v3_large": ModelSpec(mobilenet_v3_large, _CIFAR, "Howard et al. 2019; RaFL"),
    "densenet": ModelSpec(densenet40_12, _CIFAR, "Huang et al. 2017"),
    "vit": ModelSpec(ViT, _CIFAR, "Dosovitskiy et al. 2021"),
    "transformer_lm": ModelSpec(  # FedRolex varies only the hidden nodes of the attention heads
        TransformerLM,
        (20,),
        "FedRolex, Stack Overflow",
        integer_vocab=10_000,
        fixed=("token", *(f"blocks.{block}.perceptron.0" for block in range(3))),
    ),
    "unet2d": ModelSpec(unet2d, (1, 32, 32), "Ronneberger et al. 2015"),
    "unet3d": ModelSpec(unet3d, (4, 16, 16, 16), "Çiçek et al. 2016; ProgFed, BraTS"),
}
