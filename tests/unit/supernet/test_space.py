"""Search spaces: configurations, drawing, and counting without building."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedquilt.errors import ConfigError
from fedquilt.family.cost import TrainingStep, measure
from fedquilt.supernet import (
    SPACES,
    Config,
    ResNet50Space,
    Space,
    TinySpace,
    check_space,
    space_by_name,
)
from tests.unit.supernet.spaces import REAL, SMALL


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def on_meta(space: Space, config: Config) -> tuple[torch.nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return space.member(config), torch.empty(
            2, space.in_channels, space.image_size, space.image_size
        )


def check_counts(space: Space, config: Config) -> None:
    member, x = on_meta(space, config)
    cost = space.cost(config)
    assert sum(parameter.numel() for parameter in member.parameters()) == cost.params
    with FlopCounterMode(display=False) as flops:
        member(x)
    assert flops.get_total_flops() == 2 * len(x) * cost.macs


@pytest.mark.parametrize("name", SPACES)
def test_counts_are_those_of_the_built_net(name):
    space = SPACES[name]()
    check_counts(space, space.sample(generator(6)))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_counts_of_random_nets_are_those_of_the_built_nets(name):
    space = SPACES[name]()
    draw = generator(7)
    for config in (space.largest, space.smallest, *(space.sample(draw) for _ in range(50))):
        check_counts(space, config)


def test_macs_and_memory_agree_with_the_count_of_families():
    check_memory(TinySpace())


@pytest.mark.slow
@pytest.mark.parametrize("name", SPACES)
def test_macs_and_memory_of_every_space_agree_with_the_count_of_families(name):
    check_memory(SPACES[name]())


def check_memory(space: Space) -> None:
    config = space.sample(generator(3))
    member, x = on_meta(space, config)
    count = measure(member, (x,), 8, {})
    assert count.macs == space.cost(config).macs
    step = TrainingStep(batch_size=8)
    assert space.training_memory(config, step) == step.memory(
        4 * space.cost(config).params, [count.saved]
    )


def test_counts_by_hand():
    """The smallest tiny net: stem 1→8, blocks 8→16→8 and 8→16→16, last 16→32, ten classes."""
    space = TinySpace()
    stem = 8 * 9 + 16
    first = (8 * 16 + 32) + (16 * 9 + 32) + (16 * 8 + 16)
    second = (8 * 16 + 32) + (16 * 9 + 32) + (16 * 16 + 32)
    tail = (16 * 32 + 64) + (32 * 10 + 10)
    assert space.cost(space.smallest).params == stem + first + second + tail
    macs = (
        64 * (8 * 9 + 8 * 16 + 16 * 9 + 16 * 8)
        + 64 * 8 * 16
        + 16 * (16 * 9 + 16 * 16 + 16 * 32)
        + 320
    )
    assert space.cost(space.smallest).macs == macs


@pytest.mark.parametrize(
    ("name", "targets"), [("resnet50", (28, 40, 48, 56, 79.7)), ("mobilenetv3", (8, 13, 16))]
)
def test_spaces_have_members_of_the_sizes_in_the_paper(name, targets):
    """RaFL's limits and knowledge nets, in millions of multiply-adds, with ImageNet's strides on
    32×32 images.
    """
    space = SPACES[name]()
    draw = generator()
    configs = [space.smallest, space.largest, *(space.sample(draw) for _ in range(100))]
    configs += [
        space.mutate(config, draw, 0.3)
        for config in (space.smallest, space.largest)
        for _ in range(100)
    ]
    macs = [space.cost(config).macs / 1e6 for config in configs]
    for target in targets:
        assert min(abs(found / target - 1) for found in macs) < 0.04


def test_resnet50_is_a_member():
    space = ResNet50Space(num_classes=1000)
    config = space.unflat([3, 4, 6, 3, *[0.25] * 18, *[1.0] * 4])
    assert space.cost(config).params == 25_557_032


def test_fresh_bottlenecks_begin_as_their_shortcuts():
    block = SMALL["resnet50"].member(SMALL["resnet50"].largest).get_submodule("stage1.1").eval()
    inputs = torch.rand(2, block.body.reduce.conv.in_channels, 4, 4)
    torch.testing.assert_close(block(inputs), inputs)


def test_tiny_is_enumerated():
    space = TinySpace()
    configs = {
        space.unflat(values) for values in product(*(choice.options for choice in space.choices))
    }
    assert len(configs) == space.num_configs == 400


@pytest.mark.parametrize("name", SMALL)
def test_drawn_configurations_are_canonical(name):
    space = SMALL[name]
    draw = generator(1)
    a, b = space.sample(draw), space.sample(draw)
    drawn = [
        a,
        b,
        space.cross(a, b, draw),
        space.mutate(a, draw, 0.5),
        space.largest,
        space.smallest,
    ]
    for config in drawn:
        assert space.canonical(config) == config
        assert hash(Config.from_json(json.loads(json.dumps(config.to_json())))) == hash(config)
        assert len(space.encode(config)) == len(space.choices)
        assert all(0 <= value <= 1 for value in space.encode(config))
    assert space.mutate(a, draw, 0.0) == a
    assert space.cross(a, a, draw) == a
    assert [space.sample(generator(5)) for _ in range(2)] == [space.sample(generator(5))] * 2


def test_choices_of_missing_blocks_do_not_matter():
    space = TinySpace()
    one = Config((1, 2), (4, 2, 4, 4), (5, 3, 5, 5))
    other = Config((1, 2), (4, 4, 4, 4), (5, 5, 5, 5))
    assert space.canonical(one) == space.canonical(other)
    assert space.encode(one)[3] == 0  # the expansion of the second block of the first stage


def test_a_mutated_depth_draws_the_new_block():
    """A block that the parent does not have is drawn, instead of always getting its smallest
    option.
    """
    space, draw = TinySpace(), generator()
    grown = {space.mutate(space.smallest, draw, 0.5) for _ in range(100)}
    second = {config.expansions[1] for config in grown if config.depths[0] == 2}
    assert second == {2, 4}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config((3, 1), (2,) * 4, (3,) * 4), "depths.0 is 3, which is none of 1, 2"),
        (Config((1, 1), (2,) * 3, (3,) * 4), "expansions has 3 values and 4 are needed"),
        (Config((1, 1), (2,) * 4, (3, 3, 3, 9)), "kernels.3 is 9, which is none of 3, 5"),
    ],
)
def test_a_configuration_outside_of_the_space_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        TinySpace().member(config)


@pytest.mark.parametrize(
    "value", [None, [1], {"depth": [1]}, {"depths": "12"}, {"depths": [True]}, {"depths": [None]}]
)
def test_json_that_is_no_configuration_is_refused(value):
    with pytest.raises(ConfigError, match="configuration"):
        Config.from_json(value)


@pytest.mark.parametrize("name", SMALL)
def test_built_in_spaces_keep_the_contract(name):
    check_space(SMALL[name], num_samples=3)


def test_a_space_whose_members_cannot_share_weights_is_refused():
    @dataclass(frozen=True)
    class Swapped(TinySpace):
        def blocks(self, config):
            blocks = super().blocks(config)
            if config.depths[0] == 1:
                blocks["stem"] = replace(blocks["stem"], kernel=5)
            return blocks

    with pytest.raises(ConfigError, match=r"stem\.conv\.weight is .* in the largest"):
        check_space(Swapped())


def test_unknown_spaces_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'mobilenetv3'"):
        space_by_name("mobilnetv3")
    assert {space_by_name(name).name for name in REAL} == set(REAL)
