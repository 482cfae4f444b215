"""ProgFed (Wang et al., ICML 2022): blocks E_1..E_S, heads G_1..G_S, and the parameters that
growing saves.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.family.stages import StageSize, stage_sizes
from fedquilt.models import MODELS, ResNet, ViT, resnet18, unet3d
from fedquilt.models.transformer import TransformerLM
from fedquilt.terms import WHOLE

SMALL: dict[str, tuple[nn.Module, Tensor]] = {
    "cnn": (MODELS["progfed_cnn"].factory(), torch.randn(2, 3, 32, 32)),
    "resnet": (resnet18(widths=(4, 8, 8, 8), norm="group"), torch.randn(2, 3, 16, 16)),
    "vit": (
        ViT(width=12, depth=3, heads=2, head_dim=4, hidden=8, image_size=8),
        torch.randn(2, 3, 8, 8),
    ),
    "transformer": (
        TransformerLM(11, max_length=6, width=8, heads=2, head_dim=4, hidden=8, tied=True),
        torch.randint(11, (2, 5)),
    ),
}


def staged(name: str) -> tuple[Any, nn.Module, Tensor]:
    """Return a small net in stages, the net, and inputs."""
    net, inputs = SMALL[name]
    grown: Any = fq.with_stages(net.eval()).resolve((inputs,))
    return grown, net, inputs


@pytest.mark.parametrize("name", SMALL)
def test_equation_1_the_last_stage_computes_the_module(name: str) -> None:
    grown, net, inputs = staged(name)
    grown.choose(WHOLE)
    assert torch.equal(grown(inputs), net(inputs))
    grown.choose("stage1")
    assert grown(inputs).shape == net(inputs).shape
    assert not torch.equal(grown(inputs), net(inputs))


@pytest.mark.parametrize("name", ["cnn", "resnet"])
def test_equation_2_a_stage_is_its_head_after_its_blocks_in_convolutional_nets(name: str) -> None:
    grown, net, x = staged(name)
    for s in (1, 2, 3):
        features = x
        for block in net.stages[:s]:  # type: ignore[union-attr,index]
            features = block(features)
        linear = grown.stage_heads[f"stage{s}"].linear
        by_hand = features.mean((2, 3)) @ linear.weight.T + linear.bias
        grown.choose(f"stage{s}")
        assert torch.allclose(grown(x), by_hand, atol=1e-6)


def test_equation_2_a_stage_is_its_head_after_its_blocks_in_a_vit() -> None:
    grown, net, x = staged("vit")
    assert isinstance(net, ViT)
    patches = net.embed(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(x), -1, -1), patches], 1) + net.position
    for s in (1, 2):
        tokens = net.blocks[s - 1](tokens)
        linear = grown.stage_heads[f"stage{s}"].linear
        grown.choose(f"stage{s}")
        assert torch.allclose(grown(x), linear(tokens.mean(1)), atol=1e-6)


def test_equation_2_a_stage_is_its_head_after_its_blocks_in_a_transformer() -> None:
    grown, net, words = staged("transformer")
    assert isinstance(net, TransformerLM)
    features = net.token(words) + net.position[:5]
    for s in (1, 2):
        features = net.blocks[s - 1](features)
        linear = grown.stage_heads[f"stage{s}"].linear
        grown.choose(f"stage{s}")
        assert torch.allclose(grown(words), linear(features), atol=1e-6)


def test_equation_2_holds_for_a_residual_stage_that_is_cut_to_a_quarter() -> None:
    """A stage at share 1/4 has the first quarter of every axis, also of the shortcuts."""
    net = ResNet("basic", (1, 1, 1), widths=(8, 16, 16), norm="none")
    x = torch.randn(2, 3, 16, 16)
    family = fq.trace(fq.with_stages(net), x)
    made = family.module(family.at("stage2").fit(fq.Budget(share=0.25))).eval()
    state = family.init()

    small = ResNet("basic", (1, 1, 1), widths=(2, 4, 4), norm="none").eval()
    with torch.no_grad():
        for name, weight in small.named_parameters():
            if name.startswith("stages."):
                weight.copy_(state[name][tuple(slice(size) for size in weight.shape)])
    features = small.stages[1](small.stages[0](x)).mean((2, 3))
    head = "stage_heads.stage2.linear"
    by_hand = features @ state[f"{head}.weight"][:, :4].T + state[f"{head}.bias"]
    assert torch.allclose(made(x), by_hand, atol=1e-5)


# --- parameters, counted ------------------------------------------------------------------------


def saved(sizes: list[StageSize], rounds: int, per_stage: int, heads: bool = True) -> float:
    """Return the percentage of the bytes that growing saves, in a run of `rounds` with `per_stage`
    for each stage.
    """
    *early, _ = sizes
    total = sum(size.block for size in sizes) + sizes[-1].head
    sent = total * (rounds - per_stage * len(early))
    blocks = 0
    for size in early:
        blocks += size.block
        sent += (blocks + size.head * heads) * per_stage
    return 100 * (1 - sent / (total * rounds))


def sizes_of(name: str, growth: str | None = None, **options: Any) -> list[StageSize]:
    with torch.device("meta"):
        net = MODELS[name].factory(**options)
    return stage_sizes(net, (MODELS[name].example(),), growth)


def test_the_cifar_10_cnn_saves_29_percent() -> None:
    sizes = sizes_of("progfed_cnn")
    assert [size.block for size in sizes] == [896, 18_496, 36_928, 65_600]
    assert sum(size.block for size in sizes) + sizes[-1].head == 122_570
    assert saved(sizes, 2000, 250) == pytest.approx(29.52, abs=0.005)
    assert saved(sizes, 2000, 250, heads=False) == pytest.approx(29.69, abs=0.005)


def test_the_emnist_cnn_saves_33_percent() -> None:
    sizes = sizes_of("convnet")
    assert [size.block for size in sizes] == [320, 18_496, 1_179_776]
    assert sum(size.block for size in sizes) + sizes[-1].head == 1_206_590
    assert saved(sizes, 1500, 250) == pytest.approx(32.99, abs=0.005)
    assert saved(sizes, 1500, 250, heads=False) == pytest.approx(33.07, abs=0.005)


def test_a_resnet_18_with_group_norm_saves_33_percent() -> None:
    sizes = sizes_of("resnet18", norm="group", num_classes=100)
    assert [size.block for size in sizes] == [149_824, 525_568, 2_099_712, 8_393_728]
    assert sum(size.block for size in sizes) + sizes[-1].head == 11_220_132
    # Warm-up rounds are inside of the budget and send everything here.
    assert saved(sizes, 3000, 375) == pytest.approx(33.44, abs=0.005)


def test_a_u_net_saves_67_percent_symmetrically_and_3_asymmetrically() -> None:
    symmetric = sizes_of("unet3d", "symmetric")
    asymmetric = sizes_of("unet3d", "asymmetric")
    total = sum(weight.numel() for weight in unet3d().parameters())
    assert sum(size.block for size in symmetric) == total
    assert sum(size.block for size in asymmetric) + asymmetric[-1].head == total
    assert asymmetric[0].block / total == pytest.approx(0.908, abs=0.0005)
    assert saved(symmetric, 100, 25) == pytest.approx(66.95, abs=0.005)
    assert saved(asymmetric, 100, 25) == pytest.approx(2.97, abs=0.005)
