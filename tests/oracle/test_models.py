"""The oracle: a cut member computes what the whole model computes with the cut channels zeroed, and
trains.

Every consumer of a cut channel ignores it, so zeroing every weight outside the kept positions must
give the member's outputs. Where a norm or an attention scale looks at the number of channels
(`coupled` axes, head sizes) zeroing is not cutting; those axes are left whole here, the member with
all axes cut must still train, and the hand-written references for them are in tests/unit/family.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.axes import axes_in
from fedquilt.family import Family
from fedquilt.family.cut import prefix, scattered, windows
from fedquilt.family.rows import put_at
from fedquilt.models import MODELS
from fedquilt.terms import Arch, Submodel

QUICK = [(1 / 16, "static"), (1 / 2, "rolling"), (1 / 4, "random")]
FULL = [
    (share, kind)
    for share in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)
    for kind in ("static", "rolling", "random")
]
# Sizes at which a model is still itself but a forward pass is quick.
SMALL = {"alexnet": (3, 64, 64), "unet3d": (1, 16, 16, 16), "unet2d": (1, 16, 16)}
NARROW = {"alexnet": {"hidden": 256}}  # Two of its layers have 54 of its 57 million weights.
LARGE = {"resnet152", "resnet50", "vgg16", "vgg19", "resnet34", "unet3d"}


@functools.cache
def family_of(name: str) -> Family:
    spec = MODELS[name]
    example = spec.example(batch=2)
    if name in SMALL:
        in_channels = example.shape[1]
        example = torch.zeros(2, in_channels, *SMALL[name][1:])
    return fq.trace(functools.partial(spec.factory, **NARROW.get(name, {})), example)


def cut(family: Family, arch: Arch, kind: str) -> Submodel:
    sizes = family.layout.sizes
    if kind == "static":
        return prefix(arch)
    if kind == "rolling":  # so far on that windows of any width wrap
        return windows(
            arch, {axis: sizes[axis] - (width + 1) // 2 for axis, width in arch.widths}, sizes
        )
    return scattered(arch, sizes, key=7)


def exact(family: Family, arch: Arch) -> Arch:
    """The member with whole width on every axis where zeroing is not cutting."""
    return Arch(
        tuple(
            (a, family.layout.axes[a].size if family.layout.axes[a].coupled else w)
            for a, w in arch.widths
        )
    )


def randomized(family: Family) -> dict[str, Tensor]:
    """Initial weights with norms that do something: fresh ones are all zeros and ones."""
    generator = torch.Generator().manual_seed(3)
    state = family.init(1)
    for name in family.parts.get("norm", ()):
        state[name] = 0.5 + torch.rand(state[name].shape, generator=generator)
    return state


def zeroed(family: Family, state: dict[str, Tensor], submodel: Submodel) -> nn.Module:
    """The whole model with every weight outside the kept positions set to zero."""
    masked = {}
    for name, value in state.items():
        masked[name] = torch.zeros_like(value)
        kept = family.cutter.gather(state, submodel, [name])[name]
        put_at(masked[name], family.cutter.rows(name, submodel.index), kept)
        # a variance of zero would blow up rounding; the zeroed scale hides the channel
        if name in family.statistics:
            masked[name] = value
    return family.module(family.whole, masked).eval()


def data_for(family: Family, batch: int = 2) -> tuple[Tensor, Tensor]:
    example = family.example_inputs[0]
    generator = torch.Generator().manual_seed(5)
    if example.is_floating_point():
        inputs = torch.randn((batch, *example.shape[1:]), generator=generator)
    else:
        inputs = torch.randint(
            0, family.num_classes, (batch, *example.shape[1:]), generator=generator
        )
    logits = (
        family.module(family.fit(fq.Budget(share=1 / 16)))
        .eval()(inputs)
        .movedim(family.layout.class_dim, 1)
    )
    shape = (logits.shape[0], *logits.shape[2:])
    return inputs, torch.randint(0, family.num_classes, shape, generator=generator)


def check(family: Family, share: float, kind: str) -> None:
    state = randomized(family)
    inputs, targets = data_for(family)
    arch = family.fit(fq.Budget(share=share))
    same = exact(family, arch)
    submodel = cut(family, same, kind)
    member = family.module(submodel, state).eval()
    with torch.no_grad():
        got, want = member(inputs), zeroed(family, state, submodel)(inputs)
    torch.testing.assert_close(
        got, want, rtol=1e-3, atol=1e-4 * float(want.abs().max().clamp(min=1e-3))
    )
    trains(family.module(cut(family, arch, kind), state), inputs, targets, family)


def trains(member: nn.Module, inputs: Tensor, targets: Tensor, family: Family) -> None:
    """One step of SGD on the member with all axes cut: finite, and it moves."""
    member.train()
    before = [p.detach().clone() for p in member.parameters()]
    torch.manual_seed(0)
    loss = F.cross_entropy(member(inputs).movedim(family.layout.class_dim, 1), targets)
    loss.backward()
    torch.optim.SGD(member.parameters(), lr=0.1).step()
    assert bool(torch.isfinite(loss))
    assert all(bool(p.isfinite().all()) for p in member.parameters())
    assert any(not torch.equal(p, old) for p, old in zip(member.parameters(), before, strict=True))


MOBILE = ("mobilenet_v3_small", "mobilenet_v3_large")  # mobilenet_v2 has most of their layers


@pytest.mark.parametrize(("share", "kind"), QUICK)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in MOBILE else name
        for name in MODELS
        if name not in LARGE
    ],
)
def test_a_cut_model_is_the_whole_one_with_channels_zeroed(
    name: str, share: float, kind: str
) -> None:
    check(family_of(name), share, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "kind"), FULL)
@pytest.mark.parametrize("name", list(MODELS))
def test_every_model_at_every_share(name: str, share: float, kind: str) -> None:
    check(family_of(name), share, kind)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in LARGE])
def test_every_model_has_axes_to_cut(name: str) -> None:
    """The oracle must not pass because all axes were left whole."""
    family = family_of(name)
    free = [axis for axis in family.layout.axes.values() if not axis.fixed]
    assert free
    smallest = family.count(family.fit(fq.Budget(share=1 / 16)))
    assert smallest < family.count(family.whole) / 4
    carried = {
        axis
        for name in family.trainable
        for dim in family.layout.dims[name]
        for axis in axes_in(dim)
    }
    assert {axis.name for axis in free} <= carried


# --- random nets --------------------------------------------------------------------------------


def layer(word: str, width: int) -> nn.Module:
    match word:
        case "conv":
            return nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()
            )
        case "residual":
            return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        case "concat":
            return nn.Sequential(nn.Conv2d(width, 4, 1), nn.ReLU())
        case "depthwise":
            return nn.Conv2d(width, width, 3, padding=1, groups=width)
        case "grouped":
            return nn.Conv2d(width, width, 1, groups=2)
        case "gate":
            return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(width, width, 1), nn.Sigmoid())
        case _:
            return nn.ConvTranspose2d(width, width, 3, padding=1)


class RandomNet(nn.Module):
    """A feed-forward net from a list of words: plain, residual, concatenated, depthwise, grouped,
    gated, transposed.
    """

    def __init__(self, words: list[str], width: int) -> None:
        super().__init__()
        self.words = words
        self.stem = nn.Conv2d(2, width, 3, padding=1)
        self.layers = nn.ModuleList()
        for word in words:
            self.layers.append(layer(word, width))
            width += 4 if word == "concat" else 0
        self.fc = nn.Linear(width * 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for word, layer in zip(self.words, self.layers, strict=True):
            if word == "residual":
                x = x + layer(x)
            elif word == "concat":
                x = torch.cat([x, layer(x)], 1)
            elif word == "gate":
                x = x * layer(x)
            else:
                x = layer(x)
        out: Tensor = self.fc(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


WORDS = ["conv", "residual", "concat", "depthwise", "grouped", "gate", "transposed"]


@given(
    words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=4),
    width=st.sampled_from([4, 6, 8]),
    share=st.sampled_from([1 / 16, 1 / 4, 1 / 2, 0.6, 1.0]),
    kind=st.sampled_from(["static", "rolling", "random"]),
)
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_nets(words: list[str], width: int, share: float, kind: str) -> None:
    family = fq.trace(lambda: RandomNet(words, width), torch.zeros(2, 2, 6, 6))
    check(family, share, kind)
