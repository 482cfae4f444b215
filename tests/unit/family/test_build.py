"""Members of many small modules, compared with the full network in which cut channels are zero.

Norms of the full network get a mask, because zeros would change their statistics.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils.parametrizations import weight_norm

from fedquilt.axes import Index, Positions
from fedquilt.family.build import build
from fedquilt.family.layout import Layout
from fedquilt.family.tracing.tracer import trace_layout

# --- the modules ---------------------------------------------------------------------------------


def conv(i: int, o: int, k: int = 3, **options: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(i, o, k, padding=k // 2, **options), nn.BatchNorm2d(o), nn.ReLU(inplace=True)
    )


def classify(channels: int, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16)
        self.body = nn.ModuleList(
            nn.Sequential(conv(16, 12), nn.Conv2d(12, 16, 3, padding=1)) for _ in range(2)
        )
        self.down = nn.Conv2d(16, 20, 1, stride=2)
        self.wide = conv(16, 20, stride=2)
        self.head = classify(20)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for body in self.body:
            x += body(x)
        return self.head(self.wide(x) + self.down(x))


class PreActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(8)
        self.act = nn.PReLU(8)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv1(x)
        x = x + self.conv2(F.relu(self.bn1(x)))
        return self.fc(self.act(self.bn2(x)).mean((2, 3)))


class Dense(nn.Module):
    """Concatenation, as in DenseNet, the input among it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(n), nn.Conv2d(n, 6, 3, padding=1)) for n in (3, 9, 15)
        )
        self.norm = nn.BatchNorm2d(21)
        self.pool = nn.AvgPool2d(2)
        self.fc = nn.Linear(21 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.relu(layer(x))], 1)
        return self.fc(torch.flatten(self.pool(self.norm(x)), 1))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.enc2 = nn.Sequential(nn.Conv2d(8, 12, 3, padding=1), nn.GroupNorm(2, 12), nn.SiLU())
        self.up = nn.ConvTranspose2d(12, 8, 2, stride=2)
        self.dec = nn.Sequential(nn.Conv2d(16, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.SiLU())
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enc1(x)
        b = self.enc2(F.max_pool2d(a, 2))
        return self.out(self.dec(torch.cat([a, self.up(b)], 1)))


class TwoNorms(nn.Module):
    """Norms with 2 and with 4 groups on one residual stream, which refine its axis."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 1)
        self.a = nn.Sequential(nn.GroupNorm(2, 24), nn.Conv2d(24, 24, 1))
        self.b = nn.Sequential(nn.GroupNorm(4, 24), nn.Conv2d(24, 24, 1))
        self.head = classify(24)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.a(x)
        return self.head(x + self.b(x))


class SqueezeExcite(nn.Module):
    def __init__(self, n: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(n, n // 4), nn.Linear(n // 4, n)

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.shape
        gate = torch.sigmoid(self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1).view(b, c)))))
        return x * gate.view(b, c, 1, 1).expand_as(x)


class MobileNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 8, stride=2)
        self.expand = conv(8, 24, 1)
        self.depth = nn.Sequential(
            nn.Conv2d(24, 24, 3, padding=1, groups=24, bias=False), nn.Hardswish()
        )
        self.gate = SqueezeExcite(24)
        self.project = nn.Conv2d(24, 8, 1)
        self.twice = nn.Conv2d(8, 16, 3, groups=8)  # depth-wise with two outputs a channel
        self.head = classify(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.twice(x + self.project(self.gate(self.depth(self.expand(x))))))


class ShuffleUnit(nn.Module):
    """Half of the channels pass, half are convolved; then the halves are shuffled."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            conv(n // 2, n // 2, 1), nn.Conv2d(n // 2, n // 2, 3, padding=1, groups=n // 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=1)
        x = torch.cat([a, self.branch(b)], 1)
        n, c, h, w = x.shape
        return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 16)
        self.units = nn.Sequential(ShuffleUnit(16), ShuffleUnit(16))
        self.grouped = nn.Sequential(
            nn.Conv2d(16, 12, 1, groups=2), nn.ChannelShuffle(2), nn.Conv2d(12, 12, 1, groups=2)
        )
        self.head = classify(12)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.grouped(self.units(self.stem(x))))


class ResNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.body = nn.Sequential(conv(16, 24, 1), conv(24, 32, groups=4), nn.Conv2d(32, 16, 1))
        self.up = nn.ConvTranspose2d(16, 8, 3, groups=4)
        self.head = classify(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.up(x + self.body(x)))


class ViT(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 4, hidden: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 4, stride=4)
        self.token = nn.Parameter(torch.randn(1, 1, dim))
        self.position = nn.Parameter(torch.randn(1, 5, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                dim, heads, hidden, batch_first=True, norm_first=True, activation="gelu"
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class FusedAttention(nn.Module):
    """Attention as in timm: one projection, sizes read off the stream, a scale computed in
    __init__.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.scale = heads, (dim // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = (
            self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4)
        )
        attention = ((q * self.scale) @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((attention @ v).transpose(1, 2).reshape(B, N, C))


class Fused(nn.Module):
    def __init__(self, dim: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(6, dim)
        self.norm, self.attn = nn.LayerNorm(dim), FusedAttention(dim, heads)
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.head((x + self.attn(self.norm(x))).amax(1))


class SplitAttention(nn.Module):
    """Hand-written attention with separate projections and sizes kept in attributes; keys have
    fewer heads.
    """

    def __init__(self, dim: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q = nn.Linear(dim, heads * head_dim, bias=False)
        self.k = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.v = nn.Linear(dim, kv_heads * head_dim, bias=False)
        self.o = nn.Linear(heads * head_dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q = self.q(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k, v = (
            p(x).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2) for p in (self.k, self.v)
        )
        q, k = self.rotate(q), self.rotate(k)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, n, self.heads * self.head_dim))

    def rotate(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a - b, b + a], -1)


class Llama(nn.Module):
    def __init__(
        self, dim: int = 16, heads: int = 4, kv_heads: int = 2, head_dim: int = 6, hidden: int = 20
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, dim)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = SplitAttention(dim, heads, kv_heads, head_dim)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden), nn.Linear(hidden, dim)
        self.head = nn.Linear(dim, 11)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attn(self.norm1(x))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return self.head(x + self.down(F.silu(gate) * up))


class Causal(nn.Module):
    """nanoGPT's attention: `split` by an attribute, C of the stream, a mask in a buffer."""

    def __init__(self, dim: int, heads: int, length: int) -> None:
        super().__init__()
        self.n_embd, self.n_head = dim, heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.register_buffer(
            "mask",
            torch.tril(torch.ones(length, length)).view(1, 1, length, length),
            persistent=False,
        )

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        assert self.n_embd == C
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        k = k.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        q = q.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        v = v.view(B, T, self.n_head, C // self.n_head).transpose(1, 2)
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = F.softmax(att.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf")), dim=-1)
        return self.c_proj((att @ v).transpose(1, 2).contiguous().view(B, T, C))


class GPT(nn.Module):
    def __init__(self, dim: int = 16, heads: int = 2, hidden: int = 24) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(13, dim), nn.Embedding(10, dim)
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim, bias=False)
        self.attn = Causal(dim, heads, 10)
        self.mlp = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))
        self.lm_head = nn.Linear(dim, 13, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.wte(x) + self.wpe(torch.arange(x.size(1)))
        x = x + self.attn(self.ln_1(x))
        return self.lm_head(x + self.mlp(self.ln_2(x)))


class CrossAttention(nn.Module):
    """nn.MultiheadAttention with other sizes for keys and values, and two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(4, 10)
        self.attn = nn.MultiheadAttention(16, 2, kdim=10, vdim=10, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        y = self.b(y)
        x, _ = self.attn(self.a(x), y, y)
        return self.head(x.mean(1))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv3d(1, 6, 3, stride=2, padding=1)
        self.norm = nn.InstanceNorm3d(6, affine=True)
        self.bare = nn.InstanceNorm3d(6)
        self.up = nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.out = nn.Conv3d(5, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bare(F.leaky_relu(self.norm(self.down(x))))
        return self.out(torch.cat([x, F.pad(self.up(y), (0, 0))], 1))


class Mixer(nn.Module):
    """Transposed tokens: the tokens' own layer has axes, the number of tokens has none."""

    def __init__(self, dim: int = 12) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, dim, 2, stride=2)
        self.norm = nn.LayerNorm(dim)
        self.tokens = nn.Sequential(nn.Linear(16, 10), nn.GELU(), nn.Linear(10, 16))
        self.channels = nn.Sequential(nn.Conv1d(dim, 20, 1), nn.ReLU(), nn.Conv1d(20, dim, 1))
        self.head = nn.Linear(dim, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2)
        x = x + self.tokens(self.norm(x.transpose(1, 2)).transpose(1, 2))
        x = x + self.channels(x)
        return self.head(x.mean(2))


class Experts(nn.Module):
    """A soft mixture of experts kept in stacked parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 10)
        self.gate = nn.Linear(10, 3)
        self.w1, self.w2 = nn.Parameter(torch.randn(3, 10, 8)), nn.Parameter(torch.randn(3, 8, 10))
        self.head = nn.Linear(10, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        mix = self.gate(x).softmax(-1)
        y = torch.einsum("eth,ehd->etd", torch.einsum("td,edh->eth", x, self.w1).relu(), self.w2)
        return self.head(x + torch.einsum("te,etd->td", mix, y))


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = conv(3, 8)
        self.up = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.PixelShuffle(2))
        self.side = nn.Sequential(nn.Conv2d(8, 6, 1), nn.Upsample(scale_factor=2, mode="bilinear"))
        self.back = nn.Sequential(nn.PixelUnshuffle(2), nn.Conv2d(24, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.back(self.up(x) * self.side(x))


class Audio(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv1d(1, 8, 5, stride=2), nn.BatchNorm1d(8), nn.ELU(), nn.MaxPool1d(2)
        )
        self.glu = nn.Sequential(nn.Conv1d(8, 12, 3), nn.GLU(dim=1))
        self.rnn = nn.GRU(6, 7, batch_first=True, bidirectional=True)
        self.fc = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.rnn(self.glu(self.conv(x)).transpose(1, 2))
        return self.fc(x[:, -1])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.lstm = nn.LSTM(6, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.embed(x))[0])


class WeightNormed(nn.Module):
    """Parametrised weights: what is cut are the originals."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv2d(3, 8, 3))
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.conv(x).amax((2, 3)))


class Padded(nn.Module):
    """A shortcut without weights: pooled, and padded with zero channels (ResNet's option A)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = conv(3, 8), conv(8, 12, stride=2)
        self.head = classify(12)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(self.wide(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2)))


class Configured(nn.Module):
    """Sizes in attributes of several kinds: an int, a list, a configuration."""

    def __init__(self) -> None:
        super().__init__()
        from types import SimpleNamespace

        self.cfg = SimpleNamespace(width=12)
        self.parts = [5, 7]
        self.fc1, self.fc2, self.fc3 = nn.Linear(6, 12), nn.Linear(5, 4), nn.Linear(7, 4)
        self.bare = nn.LayerNorm(4, elementwise_affine=False)
        self.unflatten, self.fc4 = nn.Unflatten(1, (4, 1)), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = torch.split(self.fc1(x).view(-1, self.cfg.width), self.parts, dim=1)
        return self.fc4(self.unflatten(self.bare(self.fc2(a) + self.fc3(b))).flatten(1))


class Written(nn.Module):
    """Writes through views and in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 8)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a(x), self.b(x)
        y = x.new_zeros(x.shape[0], a.shape[1] + b.shape[1])
        y[:, : a.shape[1]] = a
        y[:, a.shape[1] :] = b.relu_()
        return self.fc(y)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.fc, self.unused = nn.EmbeddingBag(9, 8), nn.Linear(8, 5), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.bag(x).tanh())


class Pairs(nn.Module):
    """Products and distances of two branches."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(6, 10)
        self.both = nn.Bilinear(8, 10, 12)
        self.centers = nn.Parameter(torch.randn(5, 12))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.both(self.a(x), self.b(x)).tanh(), self.centers)


class Maxout(nn.Module):
    """The larger one of two neighbours, the number of pairs read off the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 24), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x)
        return self.fc2(x.view(x.shape[0], x.shape[1] // 2, 2).max(2)[0])


class Projected(nn.Module):
    """torch tells an LSTM's projection by its being smaller than the hidden state, so the hidden
    state stays.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(6, 12, proj_size=7, batch_first=True), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.lstm(x)[0][:, -1])


class Settings:
    """A configuration of the user's own class."""

    def __init__(self) -> None:
        self.head_dim = 4


class Dictionaries(nn.Module):
    """Sizes kept in a dictionary and in an object of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg, self.settings = {"heads": 2, "width": 8}, Settings()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc1(x).view(-1, self.cfg["heads"], self.settings.head_dim)
        return self.fc2(x.relu().view(-1, self.cfg["width"]))


def images(channels: int = 3, size: int = 8, dims: int = 2) -> tuple[Tensor, ...]:
    return (torch.randn(2, channels, *[size] * dims, dtype=torch.float64),)


def vectors(*shape: int) -> tuple[Tensor, ...]:
    return (torch.randn(*shape, dtype=torch.float64),)


def tokens(words: int) -> tuple[Tensor, ...]:
    return (torch.randint(words, (2, 6)),)


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    "mlp": (
        lambda: nn.Sequential(nn.Linear(6, 9), nn.Sigmoid(), nn.Linear(9, 7), nn.Linear(7, 5)),
        lambda: vectors(3, 6),
    ),
    "residual": (Residual, images),
    "preactivation": (PreActivation, images),
    "dense": (Dense, images),
    "unet": (UNet, lambda: images(1)),
    "two_norms": (TwoNorms, images),
    "mobilenet": (MobileNet, images),
    "shufflenet": (ShuffleNet, images),
    "resnext": (ResNeXt, images),
    "vit": (ViT, images),
    "fused": (Fused, lambda: vectors(2, 4, 6)),
    "llama": (Llama, lambda: tokens(11)),
    "gpt": (GPT, lambda: tokens(13)),
    "cross": (CrossAttention, lambda: (*vectors(2, 3, 6), *vectors(2, 5, 4))),
    "volume": (Volume, lambda: images(1, 4, 3)),
    "mixer": (Mixer, images),
    "experts": (Experts, lambda: vectors(4, 6)),
    "superresolution": (SuperResolution, lambda: images(3, 4)),
    "audio": (Audio, lambda: images(1, 24, 1)),
    "recurrent": (Recurrent, lambda: tokens(9)),
    "weight_norm": (WeightNormed, images),
    "padded": (Padded, images),
    "configured": (Configured, lambda: vectors(3, 6)),
    "written": (Written, lambda: vectors(3, 6)),
    "bag": (Bag, lambda: tokens(9)),
    "pairs": (Pairs, lambda: vectors(3, 6)),
    "maxout": (Maxout, lambda: vectors(3, 6)),
    "projected": (Projected, lambda: vectors(2, 4, 6)),
    "dictionaries": (Dictionaries, lambda: vectors(3, 6)),
}


@cache
def traced(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Layout]:
    torch.manual_seed(0)
    make, inputs = MODULES[name]
    module, given = make().double().eval(), inputs()
    for weight in (*module.parameters(), *module.buffers()):
        if weight.is_floating_point():
            with torch.no_grad():  # statistics and biases too: zeros and ones would hide mistakes
                weight.copy_(
                    torch.rand_like(weight) + 0.1
                    if weight.ndim == 1
                    else torch.randn_like(weight) * 0.4
                )
    if name == "gpt":
        module.attn.mask.copy_(torch.tril(torch.ones(10, 10)))
    return module, given, trace_layout(module, given)


# --- the oracle ---------------------------------------------------------------------------------


def choose(layout: Layout, share: float, seed: int = 0) -> Index:
    """Random positions in random order on every axis that may be cut."""
    generator = torch.Generator().manual_seed(seed)
    free = [axis for axis in layout.axes.values() if not axis.fixed]
    return Index(
        (
            axis.name,
            Positions.chosen(
                torch.randperm(axis.size, generator=generator)[
                    : max(1, int(share * axis.size))
                ].tolist()
            ),
        )
        for axis in free
    )


def widths_of(layout: Layout, index: Index) -> dict[str, int]:
    return layout.sizes | {axis: len(kept) for axis, kept in index.items()}


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: w.detach() for name, w in (*module.named_parameters(), *module.named_buffers())}


def gather(module: nn.Module, layout: Layout, index: Index) -> dict[str, Tensor]:
    """A member's weights."""
    found = {}
    for name, weight in weights_of(module).items():
        if name in layout.dims:
            for dim, kept in enumerate(layout.positions(name, index)):
                weight = weight.index_select(dim, kept.tensor)
            found[name] = weight
    return found


def zeroed(module: nn.Module, layout: Layout, index: Index) -> dict[str, Tensor]:
    """The full weights with all that a cut drops set to zero."""
    found = {}
    for name, weight in weights_of(module).items():
        if name in layout.dims:
            for dim, kept in enumerate(layout.positions(name, index)):
                gate = (
                    torch.zeros(weight.shape[dim]).index_fill(0, kept.tensor, 1.0).to(weight.dtype)
                )
                weight = weight * gate.view(-1, *[1] * (weight.ndim - 1 - dim))
            found[name] = weight
    return found


class MaskedNorm(nn.Module):
    """The hand-written reference: a norm of the full model that sees only the channels a cut
    keeps.
    """

    def __init__(self, norm: Any, kept: Tensor) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, getattr(norm, "bias", None)
        self.norm_kind, self.eps, self.kept = type(norm), norm.eps, kept
        self.groups = getattr(norm, "num_groups", 1)

    def forward(self, x: Tensor) -> Tensor:
        last = self.norm_kind is not nn.GroupNorm
        x = x if last else x.movedim(1, -1)
        gate = torch.zeros(x.shape[-1], dtype=x.dtype).index_fill(0, self.kept, 1.0)
        y = torch.zeros_like(x)
        for channels in torch.arange(x.shape[-1]).chunk(self.groups):
            mine = channels[gate[channels] > 0]
            if len(mine):
                seen = x[..., mine]
                over = (-1,) if last else tuple(range(1, x.ndim))
                mean = 0 if self.norm_kind is nn.RMSNorm else seen.mean(over, keepdim=True)
                eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
                y[..., mine] = (seen - mean) / (
                    (seen - mean).square().mean(over, keepdim=True) + eps
                ).sqrt()
        y = y * self.weight + (0 if self.bias is None else self.bias)
        return y if last else y.movedim(-1, 1)


def reference(name: str, index: Index) -> Tensor:
    """The full model's output when channels outside of `index` do not exist."""
    module, inputs, layout = traced(name)
    weights = zeroed(module, layout, index)
    full = copy.deepcopy(module)
    for path, layer in list(full.named_modules()):
        if isinstance(layer, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)) and layer.weight is not None:
            (kept,) = layout.positions(f"{path}.weight", index)
            parent, _, key = path.rpartition(".")
            setattr(full.get_submodule(parent), key, MaskedNorm(layer, kept.tensor))
    # Attention divides by the root of the head's size, which a cut makes smaller.
    for weight, rows, axis in QUERIES.get(name, ()):
        factor = math.sqrt(layout.axes[axis].size / len(index[axis]))
        weights[weight][:rows] *= factor
    if name == "experts":  # a soft-max gives to zero as well; an expert that is gone gets nothing
        gone = torch.ones(3, dtype=torch.bool).index_fill(0, index["gate"].tensor, False)
        weights["gate.bias"][gone] = -1e9
    # torch's fused encoder layer goes around the norms we put in
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            output: Tensor = functional_call(full, weights, inputs)
            return output
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


QUERIES = {
    "vit": [
        (f"blocks.{i}.self_attn.in_proj_{w}", 24, "patch.dim")
        for i in range(2)
        for w in ("weight", "bias")
    ],
    "fused": [(f"attn.qkv.{w}", 24, "embed.dim") for w in ("weight", "bias")],
    "llama": [("attn.q.weight", 24, "attn.q.dim")],
    "gpt": [(f"attn.c_attn.{w}", 16, "wte.dim") for w in ("weight", "bias")],
    "cross": [("attn.q_proj_weight", 16, "a.dim"), ("attn.in_proj_bias", 16, "a.dim")],
}
# norms without weights, and over a weight's inputs: compared with their makers
INEXACT = {"configured", "weight_norm"}


@pytest.mark.parametrize("share", [1 / 16, 0.25, 0.5, 0.6, 1.0])
@pytest.mark.parametrize("name", sorted(set(MODULES) - INEXACT))
def test_a_member_is_the_full_model_with_the_cut_channels_gone(name: str, share: float) -> None:
    module, inputs, layout = traced(name)
    index = choose(layout, share)
    member = build(module, layout, widths_of(layout, index))
    with torch.no_grad():
        got = functional_call(member, gather(module, layout, index), inputs)
    torch.testing.assert_close(got, reference(name, index), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["vit", "fused", "llama", "gpt", "cross"])
def test_whole_heads_can_be_cut(name: str) -> None:
    module, inputs, _ = traced(name)
    layout = trace_layout(module, inputs, heads="whole")
    heads = {axis.name: 1 for axis in layout.axes.values() if not axis.fixed}
    member = build(module, layout, layout.sizes | heads)
    index = Index({name: Positions.chosen([0]) for name in heads})
    weights = gather(module, layout, index)
    for layer in member.modules():
        for held in ("heads", "num_heads", "n_head"):
            assert getattr(layer, held, 1) in (1, 2)  # grouped queries: two for the one key head
    with torch.no_grad():
        assert functional_call(member, weights, inputs).shape == module(*inputs).shape


MAKERS: dict[str, Callable[..., nn.Module]] = {
    "vit": lambda s: ViT(s["patch.heads"] * s["patch.dim"], 4, s["blocks.0.linear1"]),
    "fused": lambda s: Fused(s["embed.heads"] * s["embed.dim"], 3),
    "llama": lambda s: Llama(s["embed"], 4, 2, 2 * s["attn.q.dim"], s["gate_up"]),
    "gpt": lambda s: GPT(s["wte.heads"] * s["wte.dim"], 2, s["mlp.0"]),
    "mixer": lambda s: Mixer(s["patch"]),
}


@pytest.mark.parametrize("name", sorted(MAKERS))
def test_a_member_equals_a_module_that_its_class_makes_with_smaller_sizes(name: str) -> None:
    module, inputs, layout = traced(name)
    index = choose(layout, 0.5)
    if name == "mixer":
        index = Index({"patch": index["patch"]})
    weights = gather(module, layout, index)
    made = MAKERS[name](widths_of(layout, index)).double().eval()
    member = build(module, layout, widths_of(layout, index))
    assert {n: w.shape for n, w in made.state_dict().items()} == {
        n: w.shape for n, w in member.state_dict().items()
    }
    assert str(made) == str(member)
    with torch.no_grad():
        torch.testing.assert_close(
            functional_call(member, weights, inputs), functional_call(made, weights, inputs)
        )


@pytest.mark.parametrize("name", sorted(MODULES))
def test_the_whole_member_is_the_module(name: str) -> None:
    module, inputs, layout = traced(name)
    member = build(module, layout, layout.sizes)
    assert str(member) == str(module)
    assert all(weight.is_meta for weight in (*member.parameters(), *member.buffers()))
    kept = {n: w for n, w in weights_of(module).items() if n in layout.dims}
    with torch.no_grad():
        torch.testing.assert_close(functional_call(member, kept, inputs), module(*inputs))


def test_members_take_weights_by_assignment_and_train() -> None:
    module, inputs, layout = traced("mobilenet")
    index = choose(layout, 0.5)
    member = build(module, layout, widths_of(layout, index))
    counters = {n: b for n, b in module.named_buffers() if n not in layout.dims}
    member.load_state_dict(gather(module, layout, index) | counters, assign=True)
    member.train()(*inputs).sum().backward()
    assert all(weight.grad is not None for weight in member.parameters())


def test_ties_modes_hooks_and_dtypes_survive() -> None:
    module = GPT().half().train()
    module.ln_1.eval()
    module.wpe.weight.requires_grad_(False)
    module.attn.register_forward_pre_hook(lambda *_: None)
    layout = trace_layout(module, tokens(13))
    state = torch.random.get_rng_state()
    member: Any = build(module, layout, layout.sizes | {"wte.dim": 3, "mlp.0": 5})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert member.lm_head.weight is member.wte.weight
    assert member.wte.weight.shape == (13, 6)
    assert (member.training, member.ln_1.training) == (True, False)
    assert (member.wpe.weight.requires_grad, member.wte.weight.requires_grad) == (False, True)
    assert member.wte.weight.dtype is torch.float16
    assert len(member.attn._forward_pre_hooks) == 1
    assert (member.attn.n_embd, module.attn.n_embd) == (6, 16)
    assert module.wte.weight.shape == (13, 16)


def test_layers_know_their_sizes() -> None:
    module, _, layout = traced("resnext")
    member: Any = build(module, layout, layout.sizes | {"body.0.0.groups": 2, "body.0.0.inside": 3})
    grouped = member.body[1][0]
    assert (grouped.groups, grouped.in_channels, grouped.out_channels) == (2, 6, 16)
    assert member.body[0][1].num_features == 6
    assert member.up.out_channels == 8


def test_an_attention_scale_follows_its_head() -> None:
    module, _, layout = traced("fused")
    member: Any = build(module, layout, layout.sizes | {"embed.dim": 4})
    assert member.attn.scale == pytest.approx(0.5)
    assert module.attn.scale == pytest.approx(8**-0.5)
