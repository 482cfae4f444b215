"""Tiny models of transformers with random weights: both engines give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import FedRolex, SplitMix
from tests.conftest import assert_same, with_local

pytestmark = pytest.mark.slow

TOKENS = torch.arange(12).view(2, 6) % 11
IMAGES = torch.linspace(-1, 1, 2 * 3 * 16 * 16).view(2, 3, 16, 16)
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
}


class Logits(nn.Module):
    """Wrapper of a model of transformers with one tensor as input and one as output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x).logits
        return logits


def gpt2(t: Any) -> nn.Module:
    sizes = {"n_positions": 8, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return t.GPT2LMHeadModel(
        t.GPT2Config(**sizes, vocab_size=11, bos_token_id=0, eos_token_id=0, use_cache=False)
    )


def llama(t: Any) -> nn.Module:
    return t.LlamaForCausalLM(
        t.LlamaConfig(
            **SIZES,
            vocab_size=11,
            num_key_value_heads=1,
            max_position_embeddings=8,
            use_cache=False,
        )
    )


def bert(t: Any) -> nn.Module:
    return t.BertForMaskedLM(t.BertConfig(**SIZES, vocab_size=11, max_position_embeddings=8))


def vit(t: Any) -> nn.Module:
    return t.ViTForImageClassification(
        t.ViTConfig(**SIZES, image_size=16, patch_size=8, num_labels=5)
    )


def swin(t: Any) -> nn.Module:
    config = t.SwinConfig(
        image_size=16,
        patch_size=2,
        embed_dim=8,
        depths=[2, 1],
        num_heads=[1, 2],
        window_size=4,
        num_labels=5,
    )
    return t.SwinForImageClassification(config)


def convnext(t: Any) -> nn.Module:
    config = t.ConvNextConfig(
        patch_size=2, hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, num_labels=5
    )
    return t.ConvNextForImageClassification(config)


MODELS: dict[str, tuple[Callable[[Any], nn.Module], Tensor]] = {
    "gpt2": (gpt2, TOKENS),
    "llama": (llama, TOKENS),
    "bert": (bert, TOKENS),
    "vit": (vit, IMAGES),
    "swin": (swin, IMAGES),
    "convnext": (convnext, IMAGES),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=MODELS)
def family(request: pytest.FixtureRequest, transformers: Any) -> fq.Family:
    make, example = MODELS[request.param]
    return fq.trace(lambda: Logits(make(transformers)), example)


def test_members_are_smaller(family: fq.Family) -> None:
    whole, half = (family.count(family.fit(fq.Budget(share=share))) for share in (1, 0.5))
    assert half < 0.6 * whole


@pytest.mark.parametrize(
    ("method", "members"), [(FedRolex(), 2), (SplitMix(), 1)], ids=["fedrolex", "splitmix"]
)
def test_both_engines_give_the_same_numbers(method, members, family, play, make_data):
    data = make_data(family, (5, 4, 6), tests=6)
    method = with_local(method, batch_size=4)
    sequential, vectorized = (
        play(method, family, data, engine=engine, shares=(1.0, 0.5))
        for engine in ("sequential", "vectorized")
    )
    # One stack for each member: the models are computed for many clients at once.
    assert {record.stacks for record in vectorized.records} == {members}
    assert_same(sequential, vectorized)
