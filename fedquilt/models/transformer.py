"""Transformers whose attention can be cut inside each head: ViT and a small language model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from fedquilt.models.blocks import Layer


class Attention(nn.Module):
    """Multi-head self-attention. `forward` reads the size of a head from the projections' outputs.

    A member with narrower projections therefore has the same number of heads, each of them smaller.

    Args:
        width: Channels of the input and the output.
        heads: Number of heads.
        head_dim: Channels of each head.
        causal: True: a position sees only itself and earlier ones.
    """

    def __init__(self, width: int, heads: int, head_dim: int, causal: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(width, heads * head_dim)
        self.key = nn.Linear(width, heads * head_dim)
        self.value = nn.Linear(width, heads * head_dim)
        self.out = nn.Linear(heads * head_dim, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (batch, head, length, d)
            for project in (self.query, self.key, self.value)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(-3, -2).flatten(-2))
        return out


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a transformer block."""

    width: int  # Channels of the input and the output
    heads: int  # Number of attention heads
    head_dim: int  # Channels of each head
    hidden: int  # Hidden units of the perceptron


class TransformerBlock(nn.Module):
    """Attention and a two-layer perceptron, each with a skip connection.

    Args:
        sizes: Sizes of attention and perceptron.
        causal: True: a position sees only itself and earlier ones.
        pre_norm: True: norms come before attention and perceptron. False: after the sums.
        act: Function that makes the activation of the perceptron.
        dropout: Probability of dropout. 0 has no effect.
    """

    def __init__(
        self, sizes: BlockSizes, *, causal: bool, pre_norm: bool, act: Layer, dropout: float
    ) -> None:
        super().__init__()
        self.pre_norm = pre_norm
        self.attention = nn.Sequential(
            Attention(sizes.width, sizes.heads, sizes.head_dim, causal), nn.Dropout(dropout)
        )
        self.perceptron = nn.Sequential(
            nn.Linear(sizes.width, sizes.hidden),
            act(),
            nn.Dropout(dropout),
            nn.Linear(sizes.hidden, sizes.width),
            nn.Dropout(dropout),
        )
        self.norm1 = nn.LayerNorm(sizes.width)
        self.norm2 = nn.LayerNorm(sizes.width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.pre_norm:
            x = x + self.attention(self.norm1(x))
            x = x + self.perceptron(self.norm2(x))
        else:
            x = self.norm1(x + self.attention(x))
            x = self.norm2(x + self.perceptron(x))
        return x


def block_ends(depth: int, stages: int = 3) -> list[str]:
    """Return the names of the blocks that end the stages, such as "blocks.1", in order.

    Stages are as equal in length as possible. The last one ends with the last block.

    Args:
        depth: Number of blocks.
        stages: Number of stages. A model with fewer blocks has a stage for each block.
    """
    count = min(stages, depth)
    return [f"blocks.{(stage * depth + count - 1) // count - 1}" for stage in range(1, count + 1)]


class ViT(nn.Module):
    """Vision transformer with a class token and learnt positions (Dosovitskiy et al. 2021).

    Args:
        num_classes: Number of classes.
        in_channels: Channels of the images.
        image_size: Side of the images in pixels.
        patch: Side of a patch in pixels.
        width: Channels of every token.
        depth: Number of blocks.
        heads: Number of attention heads.
        head_dim: Channels of each head.
        hidden: Hidden units of the perceptrons.
        dropout: Probability of dropout. 0 has no effect.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        *,
        image_size: int = 32,
        patch: int = 4,
        width: int = 192,
        depth: int = 6,
        heads: int = 3,
        head_dim: int = 64,
        hidden: int = 768,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(in_channels, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(
            torch.empty(1, 1 + (image_size // patch) ** 2, width).normal_(std=0.02)
        )
        self.dropout = nn.Dropout(dropout)
        sizes = BlockSizes(width, heads, head_dim, hidden)
        make_block = partial(
            TransformerBlock, sizes, causal=False, pre_norm=True, act=nn.GELU, dropout=dropout
        )
        self.blocks = nn.Sequential(*(make_block() for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        patches = self.embed(x).flatten(2).transpose(1, 2)  # (batch, patch, width)
        tokens = torch.cat([self.token.expand(x.shape[0], -1, -1), patches], 1)
        features = self.norm(self.blocks(self.dropout(tokens + self.position)))
        logits: Tensor = self.head(features[:, 0])
        return logits

    @property
    def stage_ends(self) -> list[str]:
        """Return the names of the blocks that end the stages, of which there are at most three."""
        return block_ends(len(self.blocks))


class TransformerLM(nn.Module):
    """A language model with next-token logits (batch, length, word).

    It is the model of FedRolex's Stack Overflow experiment (section 4). It follows Vaswani et al.
    (2017), with norms after the sums and ReLU. Positions are learnt, so that they can be cut.

    Args:
        num_classes: Number of words.
        max_length: Largest number of tokens of a sample.
        width: Channels of every token.
        depth: Number of blocks.
        heads: Number of attention heads.
        head_dim: Channels of each head.
        hidden: Hidden units of the perceptrons.
        dropout: Probability of dropout. 0 has no effect.
        tied: True: the output layer has the weights of the embedding.
    """

    def __init__(  # noqa: PLR0913  The keyword arguments are the model's settings.
        self,
        num_classes: int = 10_000,
        *,
        max_length: int = 64,
        width: int = 128,
        depth: int = 3,
        heads: int = 8,
        head_dim: int = 12,
        hidden: int = 2048,
        dropout: float = 0.1,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(num_classes, width)
        self.position = nn.Parameter(torch.empty(max_length, width).normal_(std=0.02))
        self.dropout = nn.Dropout(dropout)
        sizes = BlockSizes(width, heads, head_dim, hidden)
        make_block = partial(
            TransformerBlock, sizes, causal=True, pre_norm=False, act=nn.ReLU, dropout=dropout
        )
        self.blocks = nn.Sequential(*(make_block() for _ in range(depth)))
        self.head = nn.Linear(width, num_classes)
        nn.init.normal_(self.token.weight, std=0.02)  # small enough to be the output layer as well
        if tied:
            self.head.weight = self.token.weight

    @override
    def forward(self, x: Tensor) -> Tensor:
        features = self.token(x) + self.position[: x.shape[-1]]
        logits: Tensor = self.head(self.blocks(self.dropout(features)))
        return logits

    @property
    def stage_ends(self) -> list[str]:
        """Return the names of the blocks that end the stages, of which there are at most three."""
        return block_ends(len(self.blocks))
