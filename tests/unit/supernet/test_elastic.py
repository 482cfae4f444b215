"""Shared weights: members are the nets that they claim to be."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.supernet import Config, Space, Supernet, TinySpace, recalibrate
from fedquilt.supernet.elastic import center
from fedquilt.supernet.mobilenet import InvertedSpace
from fedquilt.supernet.space import StageOptions
from tests.unit.supernet.spaces import REAL, SMALL


def scrambled(space: Space, seed: int = 0) -> Supernet:
    """A supernet in float64 whose weights, statistics and transforms are all random."""
    supernet = Supernet(space).double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in supernet.state_dict().items():
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=draw, dtype=tensor.dtype)
                tensor.add_(0.2 * (noise if "running_var" in name else noise - 0.5))
    return supernet


def images(space: Space, count: int = 3) -> Tensor:
    draw = torch.Generator().manual_seed(9)
    return torch.randn(
        count, space.in_channels, space.image_size, space.image_size, generator=draw
    ).double()


def standalone(supernet: Supernet, config: Config) -> nn.Module:
    """The net of a configuration, given its share of the weights by rules that are written out
    here.
    """
    net = supernet.space.member(config).double()
    shared = supernet.net.state_dict()
    state = {}
    for name, own in net.state_dict().items():
        tensor = shared[name]
        if tensor.dim() == 4 and own.shape[-1] < tensor.shape[-1]:
            tensor = tensor[: len(own)]
            while tensor.shape[-1] > own.shape[-1]:
                tensor = tensor[:, :, 1:-1, 1:-1]
                size = tensor.shape[-1]
                matrix = supernet.transforms[
                    f"{name.removesuffix('.weight').replace('.', '/')}/{size}"
                ]
                columns = [torch.mv(matrix, kernel.reshape(-1)) for kernel in tensor]
                tensor = torch.stack(columns).reshape(-1, 1, size, size)
        elif tensor.dim() > 1:
            tensor = tensor[: own.shape[0], : own.shape[1]]
        elif tensor.dim() == 1:
            tensor = tensor[: len(own)]
        state[name] = tensor
    net.load_state_dict(state)
    return net


def check_members(space: Space, count: int) -> None:
    supernet, x = scrambled(space), images(space)
    draw = torch.Generator().manual_seed(4)
    for config in [space.smallest, *(space.sample(draw) for _ in range(count))]:
        expected = standalone(supernet, config)
        supernet.eval()
        with torch.no_grad():
            torch.testing.assert_close(supernet(x, config), expected.eval()(x), rtol=0, atol=1e-6)
            torch.testing.assert_close(supernet.member(config)(x), expected(x), rtol=0, atol=1e-6)
            supernet.train()
            torch.testing.assert_close(supernet(x, config), expected.train()(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", SMALL)
def test_members_equal_standalone_nets(name):
    check_members(SMALL[name], 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_fifty_small_members_equal_standalone_nets(name):
    check_members(SMALL[name], 50)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
def test_fifty_members_equal_standalone_nets(name):
    check_members(REAL[name], 50)


def test_identity_transforms_are_plain_crops():
    space = SMALL["mobilenetv3"]
    supernet = Supernet(space)
    largest = space.largest
    for size in (3, 5):
        config = Config(largest.depths, largest.expansions, (size,) * len(largest.kernels))
        member = supernet.member(config).state_dict()
        for name, tensor in supernet.net.state_dict().items():
            if "stage" in name and name.endswith("filter.conv.weight"):
                assert torch.equal(member[name], center(tensor, size))
                assert member[name].shape[-1] == size


def test_a_member_has_weights_of_its_own():
    supernet = Supernet(TinySpace())
    before = {name: value.clone() for name, value in supernet.state_dict().items()}
    member = supernet.member(supernet.space.smallest)
    with torch.no_grad():
        for parameter in member.parameters():
            parameter.zero_()
    recalibrate(member, images(supernet.space, 8).float())
    assert all(torch.equal(value, before[name]) for name, value in supernet.state_dict().items())


def test_training_a_member_changes_no_statistics():
    """Only the largest net has running statistics; a sampled member uses those of its batch."""
    supernet = scrambled(TinySpace()).train()
    before = {name: value.clone() for name, value in supernet.named_buffers()}
    supernet(images(supernet.space), supernet.space.smallest)
    assert all(torch.equal(value, before[name]) for name, value in supernet.named_buffers())
    supernet(images(supernet.space))
    assert any(not torch.equal(value, before[name]) for name, value in supernet.named_buffers())


def test_gradients_reach_only_weights_of_the_member():
    supernet = scrambled(TinySpace()).train()
    config = Config((1, 1), (2, 2, 2, 2), (3, 3, 3, 3))
    supernet(images(supernet.space), config).sum().backward()
    weight = supernet.net.get_parameter("stage1.0.body.expand.conv.weight")
    assert weight.grad is not None
    assert weight.grad[16:].abs().sum() == 0 < weight.grad[:16].abs().sum()
    assert supernet.net.get_parameter("stage1.1.body.expand.conv.weight").grad is None
    assert supernet.transforms["stage1/0/body/filter/conv/3"].grad is not None


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        *((name, ("expansion", "width")) for name in SMALL),
        ("tiny", ("expansion",)),
        ("tiny", ("width",)),
    ],
)
def test_sorting_channels_changes_no_output_of_the_largest_member(name, kinds):
    supernet, x = scrambled(SMALL[name]).eval(), images(SMALL[name])
    weights = {name: value.clone() for name, value in supernet.net.state_dict().items()}
    with torch.no_grad():
        before = supernet(x)
        supernet.sort_channels(kinds)
        torch.testing.assert_close(supernet(x), before, rtol=1e-9, atol=1e-9)
    moved = [
        name
        for name, value in supernet.net.state_dict().items()
        if not torch.equal(value, weights[name])
    ]
    assert moved


def test_sorted_channels_descend_in_importance():
    supernet = scrambled(TinySpace())
    supernet.sort_channels()
    block = supernet.net.get_submodule("stage2.0.body")
    readers = block.get_parameter("project.conv.weight").abs().sum((0, 2, 3))
    writers = block.get_parameter("expand.conv.weight").abs().sum((1, 2, 3))
    own = block.get_parameter("filter.conv.weight").abs().sum((1, 2, 3))
    importance = readers + writers + own
    assert torch.equal(importance, importance.sort(descending=True).values)


def test_recalibrated_statistics_are_the_mean_over_batches():
    norm = nn.Sequential(nn.BatchNorm2d(1))
    samples = torch.arange(8.0).reshape(8, 1, 1, 1)
    recalibrate(norm, samples, batch_size=4)
    assert norm[0].running_mean.item() == 3.5
    assert norm[0].running_var.item() == pytest.approx(20 / 3)  # of 0, 2, 4, 6, and of 1, 3, 5, 7
    assert norm[0].momentum == 0.1
    assert torch.equal(samples, torch.arange(8.0).reshape(8, 1, 1, 1))


def test_batches_of_sorted_samples_are_mixed():
    norm = nn.Sequential(nn.BatchNorm2d(1))
    sorted_samples = torch.tensor([0.0] * 50 + [1.0] * 50).reshape(100, 1, 1, 1)
    # batches of equal values would have a variance of 0
    recalibrate(norm, sorted_samples, batch_size=30)
    assert norm[0].running_mean.item() == pytest.approx(0.5)
    # unbiased, of 12 or 13 each
    assert norm[0].running_var.item() == pytest.approx(0.26, abs=0.001)


def test_another_number_of_classes_draws_the_classifier_anew():
    supernet = Supernet(TinySpace(num_classes=4))
    config = supernet.space.smallest
    kept, new = supernet.member(config), supernet.member(config, num_classes=10)
    same = supernet.member(config, num_classes=10)
    other = supernet.member(config, num_classes=10, seed=1)
    for name, value in new.state_dict().items():
        if "classifier" in name:
            assert len(value) == 10
            assert torch.equal(value, same.state_dict()[name])
            assert not torch.equal(value, other.state_dict()[name])
        else:
            assert torch.equal(value, kept.state_dict()[name])
    assert torch.equal(kept.head.classifier.weight, supernet.net.head.classifier.weight)


def test_kernels_shrink_step_by_step():
    """The 3×3 kernel is cut from the transformed 5×5 one, and not from the 7×7 one."""

    @dataclass(frozen=True)
    class Kernels(TinySpace):
        options = (StageOptions((1,), (2,), (3, 5, 7)),) * 2

    supernet = scrambled(Kernels())
    with torch.no_grad():
        supernet.transforms["stage1/0/body/filter/conv/5"].zero_()
    config = Config((1, 1), (2, 2), (3, 7))
    assert (
        supernet.member(config).get_parameter("stage1.0.body.filter.conv.weight").abs().sum() == 0
    )
    assert issubclass(Kernels, InvertedSpace)


def test_a_member_is_traced_and_trained():
    supernet = Supernet(TinySpace(num_classes=4))
    digits = fq.data.digits()
    pool = fq.data.Pool.of(
        (digits.inputs[:64], digits.targets[:64]), (digits.inputs[64:96], digits.targets[64:96])
    )
    data = pool.partition(2)
    config = supernet.space.smallest
    family = fq.trace(lambda: supernet.member(config, num_classes=10), data.example)
    counted = family.cost(family.whole)
    assert (counted.macs, counted.params) == TinySpace().cost(config)
    run = fq.run(fq.methods.FedAvg(), family, data, fq.Fleet.of([1.0], num_clients=2), rounds=1)
    assert len(run.records) == 1
