"""Parameter counts against the papers; every model runs, purely, under functional_call and vmap."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedquilt import models
from fedquilt.models import MODELS
from fedquilt.models.blocks import Staged
from fedquilt.models.transformer import Attention

# Small versions and inputs of the models that are wide or deep by default: what runs is the same
# code.
OPTIONS: dict[str, dict[str, object]] = {
    "alexnet": {"hidden": 64},
    "resnet50": {"widths": (8, 16, 32, 64)},
    "resnet152": {"widths": (4, 8, 16, 32)},
    "vgg11": {"hidden": 64},
    "vgg16": {"hidden": 64},
    "vgg19": {"hidden": 64},
}
INPUTS = {"alexnet": (3, 64, 64), "transformer_lm": (6,)}
OUTPUTS = {
    "convnet": (2, 62),
    "transformer_lm": (2, 6, 10_000),
    "unet2d": (2, 2, 32, 32),
    "unet3d": (2, 5, 16, 16, 16),
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name].factory(**OPTIONS.get(name, {}))


def example(name: str) -> Tensor:
    x = MODELS[name].example(batch=2)
    for dim, size in enumerate(INPUTS.get(name, ()), start=1):
        x = x.narrow(dim, 0, size)
    return x


def count(factory: Callable[..., nn.Module], **options: object) -> int:
    with torch.device("meta"):
        return sum(weight.numel() for weight in factory(**options).parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("mlp", 199_210),  # McMahan et al., section 3: the MNIST 2NN
        ("convnet", 1_206_590),  # 320 + 18,496 + 1,179,776 + 7,998
        ("progfed_cnn", 122_570),  # ProgFed, appendix B
        ("digits_cnn", 14_214_090),  # FedResCuE, Table 16
        ("digits_cnn_norm", 14_219_210),  # Split-Mix, Table 2: two norms more, 2 · (2,048 + 512)
        ("alexnet", 57_063_498),  # Split-Mix, Table 1: 57.1M
        ("rescue_resnet", 8_036_426),  # FedResCuE, appendix A.6.1
        ("preresnet18", 11_172_170),  # FedRolex, Table 7: 11.1722M
        ("wide_resnet", 2_748_890),  # WRN-16-4: 2.7M (Zagoruyko & Komodakis)
        ("densenet", 176_122),  # DenseNet-BC, 40 layers, growth 12
    ],
)
def test_parameters_as_in_the_papers(name: str, parameters: int) -> None:
    assert count(MODELS[name].factory) == parameters


def test_preresnet_costs_of_fedrolex_table_7() -> None:
    counts = [
        count(models.preresnet18, widths=[width // ratio for width in (64, 128, 256, 512)])
        for ratio in (1, 2, 4, 8, 16)
    ]
    assert counts[0] == 11_172_170  # "homogeneous (largest)": 11.1722M
    assert counts[-1] == 44_510  # "homogeneous (smallest)": 0.04451M
    assert sum(counts) / 5 == 2_978_118  # "FedRolex": 2.9781232M, five parameters more


@pytest.mark.parametrize(
    ("factory", "parameters"),
    [
        (partial(models.resnet18, stem="imagenet"), 11_689_512),
        (partial(models.resnet34, stem="imagenet"), 21_797_672),
        (partial(models.resnet50, stem="imagenet"), 25_557_032),
        (partial(models.resnet152, stem="imagenet"), 60_192_808),
        (partial(models.resnet18, stem="imagenet", norm="group"), 11_689_512),
        (partial(models.vgg11, norm="none", pool=7), 132_863_336),
        (partial(models.vgg16, norm="none", pool=7), 138_357_544),
        (partial(models.vgg16, norm="batch", pool=7), 138_365_992),
        (partial(models.vgg19, norm="none", pool=7), 143_667_240),
        (partial(models.mobilenet_v2, stem="imagenet"), 3_504_872),
        (partial(models.mobilenet_v3_small, stem="imagenet"), 2_542_856),
        (partial(models.mobilenet_v3_large, stem="imagenet"), 5_483_032),
        (models.densenet121, 7_978_856),
        (
            partial(
                models.ViT, image_size=224, patch=16, width=768, depth=12, heads=12, hidden=3072
            ),
            86_567_656,
        ),
    ],
)
def test_parameters_of_the_imagenet_models_as_in_torchvision(
    factory: Callable[..., nn.Module], parameters: int
) -> None:
    assert count(factory, num_classes=1000) == parameters


@pytest.mark.parametrize(
    ("options", "parameters"), [({}, 36_536_884), ({"num_classes": 10}, 36_479_194)]
)
def test_wide_resnet_28_10(options: dict[str, object], parameters: int) -> None:
    assert (
        count(models.WideResNet, **{"depth": 28, "widen": 10, "num_classes": 100, **options})
        == parameters
    )


def test_a_preresnet_may_start_with_an_output_bias_of_zero() -> None:
    """HeteroFL's, FedRolex's and Split-Mix's codes zero it; all else is drawn as before."""
    states = []
    for options in ({}, {"zero_output_bias": True}):
        torch.manual_seed(0)
        states.append(models.PreResNet((1, 1), 4, 1, widths=(4, 8), **options).state_dict())
    drawn, zeroed = states
    assert not zeroed["head.linear.bias"].any()
    assert drawn["head.linear.bias"].all()
    assert all(
        torch.equal(drawn[name], zeroed[name]) for name in drawn if name != "head.linear.bias"
    )
    assert not models.preresnet18(zero_output_bias=True).head.linear.bias.any()


def test_densenet_bc_100_12() -> None:
    assert count(models.densenet100_12) == 769_162


def test_layers_of_fedrescue_table_15() -> None:
    """The table's convolutions in its order, and its feature maps for the 28×28 crops it was
    printed with.
    """
    net = models.rescue_resnet()
    shapes: list[tuple[int, ...]] = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    net.eval()(torch.zeros(1, 3, 28, 28))
    sizes = [conv.weight.numel() for conv in net.modules() if isinstance(conv, nn.Conv2d)]
    block = [(64, 7, 7), (64, 7, 7), (256, 7, 7), (256, 7, 7)]
    assert shapes[:5] == [(64, 14, 14), *block]
    assert shapes[-1] == (2048, 1, 1)
    assert sizes[:5] == [9_408, 4_096, 36_864, 16_384, 16_384]
    assert sizes[-1] == 2_097_152


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_purely(name: str) -> None:
    net, x = build(name), example(name)
    before = x.clone()
    out = net(x)
    assert out.shape == OUTPUTS.get(name, (2, 10))
    assert out.isfinite().all()
    assert torch.equal(x, before)
    net.eval()
    assert torch.equal(functional_call(net, dict(net.state_dict()), (x,)), net(x))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_runs_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        net = MODELS[name].factory()
    assert net(MODELS[name].example(batch=3).to("meta")).shape[0] == 3


@pytest.mark.parametrize(
    "name", ["tiny_resnet", "convnet", "preresnet18", "mobilenet_v3_small", "vit", "unet2d"]
)
def test_a_stack_of_clients_trains_as_each_alone(name: str) -> None:
    small: dict[str, dict[str, object]] = {
        "preresnet18": {"widths": (4, 4, 8, 8)},
        "vit": {"depth": 1},
    }
    nets = [MODELS[name].factory(**small.get(name, {})).double() for _ in range(2)]
    for net in nets:
        for module in net.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
    weights, buffers = stack_module_state(nets)
    x = torch.stack([MODELS[name].example(batch=4), MODELS[name].example(batch=4).neg()]).double()
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused attention has no batching rule
        together = vmap(lambda w, b, inputs: functional_call(nets[0], (w, b), (inputs,)))(
            weights, buffers, x
        )
    alone = torch.stack([net(inputs) for net, inputs in zip(nets, x, strict=True)])
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)


def test_the_language_model_is_causal() -> None:
    net, x = models.TransformerLM(num_classes=50).eval(), torch.arange(8)[None]
    changed = x.clone()
    changed[0, 5] = 49
    assert torch.equal(net(x)[:, :5], net(changed)[:, :5])
    assert not torch.allclose(net(x)[:, 5:], net(changed)[:, 5:])


def test_tied_embeddings_are_one_weight() -> None:
    net = models.TransformerLM(num_classes=50, tied=True)
    assert net.head.weight is net.token.weight
    assert count(models.TransformerLM) - count(models.TransformerLM, tied=True) == 10_000 * 128
    assert functional_call(
        net, dict(net.named_parameters()), (torch.zeros(1, 3, dtype=torch.long),)
    ).shape == (1, 3, 50)


def test_an_attention_head_can_be_cut_inside() -> None:
    """Projections narrowed to d' of every head's d rows run unchanged: nothing in forward holds the
    head's size.
    """
    net = models.TransformerLM(num_classes=50, heads=2, head_dim=4, depth=1).eval()
    (attention,) = (module for module in net.modules() if isinstance(module, Attention))
    for projection in (attention.query, attention.key, attention.value):
        projection.weight.data = projection.weight.data.view(2, 4, -1)[:, :3].flatten(0, 1)
        projection.bias.data = projection.bias.data.view(2, 4)[:, :3].flatten()
    attention.out.weight.data = attention.out.weight.data.view(-1, 2, 4)[:, :, :3].flatten(1)
    assert net(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 50)


@pytest.mark.parametrize(
    ("name", "stages"), [("convnet", 3), ("progfed_cnn", 4), ("vgg16", 4), ("resnet18", 4)]
)
def test_stages_are_progfeds(name: str, stages: int) -> None:
    with torch.device("meta"):
        net = MODELS[name].factory()
    assert isinstance(net, Staged)
    assert len(net.stages) == stages


@pytest.mark.parametrize("up", ["transpose", "upsample"])
@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("factory", [models.unet2d, models.unet3d])
def test_a_shallow_unet_is_part_of_a_deep_one(
    factory: Callable[..., nn.Module], norm: str, up: str
) -> None:
    with torch.device("meta"):
        shallow, deep = (factory(depth=depth, norm=norm, up=up).state_dict() for depth in (2, 3))
    assert all(deep[name].shape == weight.shape for name, weight in shallow.items())
    assert len(shallow) < len(deep)


@pytest.mark.parametrize(
    "name", ["resnet18", "wide_resnet", "mobilenet_v2", "densenet", "vgg11", "alexnet"]
)
def test_group_norm_and_no_norm_are_options(name: str) -> None:
    for norm, has_norms in (("group", True), ("none", False)):
        with torch.device("meta"):
            modules = list(MODELS[name].factory(norm=norm).modules())
        assert any(isinstance(module, nn.GroupNorm) for module in modules) == has_norms
        assert not any(isinstance(module, nn.BatchNorm2d) for module in modules)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(ValueError, match="batch, group or none"):
        models.resnet18(norm="layer")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="6n \\+ 4"):
        models.WideResNet(depth=20)


def test_examples_leave_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    assert torch.equal(MODELS["vit"].example(), MODELS["vit"].example())
    assert torch.equal(torch.get_rng_state(), before)
