"""Norm statistics are inputs and outputs of a net, also for norms of the user's own classes."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, vmap

from fedquilt.errors import TrainingError
from fedquilt.family import Net, Pass
from tests.unit.family.pure import KEY, TRAIN, NormReLU, images, pure


def test_batch_statistics_equal_torchs_in_training_and_change_nothing():
    norm = nn.BatchNorm2d(3)
    net, state = pure(norm)
    expected = F.batch_norm(images(), None, None, training=True)
    for mode in (Pass(train=True), Pass(train=False)):
        found, seen = net(state, images(), mode)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
        assert not seen
    assert torch.equal(norm.running_mean, torch.zeros(3, dtype=torch.float64))


def test_stored_statistics_are_torchs_in_evaluation():
    net, state = pure(nn.BatchNorm2d(3))
    state |= {
        "running_mean": torch.tensor([1.0, 2, 3]).double(),
        "running_var": torch.tensor([4.0, 9, 16]).double(),
    }
    found, seen = net(state, images(), Pass(statistics="stored"))
    by_hand = (images() - torch.tensor([1.0, 2, 3]).reshape(1, 3, 1, 1)) / (
        torch.tensor([4.0, 9, 16]).double().reshape(1, 3, 1, 1) + 1e-5
    ).sqrt()
    torch.testing.assert_close(found, by_hand, rtol=0, atol=1e-12)
    assert not seen


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.BatchNorm1d, (5, 3)),
        (nn.BatchNorm2d, (5, 3, 2, 4)),
        (nn.BatchNorm3d, (5, 3, 2, 2, 2)),
        (partial(nn.InstanceNorm2d, affine=True, track_running_stats=True), (5, 3, 2, 4)),
    ],
)
def test_tracked_statistics_are_torchs(kind, shape):
    theirs = kind(3, momentum=0.3).double()
    net, state = pure(kind(3, momentum=0.3))
    for seed in range(3):
        inputs = torch.randn(
            shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        expected = theirs.train()(inputs)
        found, seen = net(state, inputs, Pass(train=True, statistics="track"))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
        assert seen.keys() == {"running_mean", "running_var"}
        state |= seen
    torch.testing.assert_close(state["running_mean"], theirs.running_mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(state["running_var"], theirs.running_var, rtol=0, atol=1e-14)
    stored = net(state, inputs, Pass(statistics="stored"))[0]
    torch.testing.assert_close(stored, theirs.eval()(inputs), rtol=0, atol=1e-13)


def test_measured_statistics_averaged_are_torchs_cumulative_ones():
    theirs = nn.BatchNorm2d(3, momentum=None).double().train()
    net, state = pure(nn.BatchNorm2d(3))
    measured = []
    for seed in range(4):
        theirs(images(seed=seed))
        measured.append(net(state, images(seed=seed), Pass(statistics="measure"))[1])
    for name in ("running_mean", "running_var"):
        mean = torch.stack([one[name] for one in measured]).mean(0)
        torch.testing.assert_close(mean, getattr(theirs, name), rtol=0, atol=1e-14)


def test_a_norm_without_momentum_is_refused_with_a_remedy():
    """torch's momentum=None averages cumulatively, which needs a count that a federation does not
    carry.
    """
    net, state = pure(nn.BatchNorm2d(3, momentum=None))
    assert net(state, images(), TRAIN)[0].shape == images().shape
    with pytest.raises(TrainingError, match="momentum"):
        net(state, images(), Pass(train=True, statistics="track"))


def test_statistics_of_one_pass_do_not_leak_into_the_next():
    net, state = pure(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm2d(3)))
    _, seen = net(state, images(), Pass(statistics="measure"))
    assert set(seen) == {f"{layer}.running_{kind}" for layer in "01" for kind in ("mean", "var")}
    assert net(state, images(), TRAIN)[1] == {}


def test_a_stack_of_clients_has_statistics_of_its_own():
    net, state = pure(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)))
    stacked = {
        name: torch.stack([value, 2 * value])
        for name, value in state.items()
        if value.is_floating_point()
    }
    inputs = torch.stack([images(seed=1), images(seed=2)])
    mode = Pass(train=True, statistics="track")
    outputs, seen = vmap(lambda w, x: net(w, x, mode))(stacked, inputs)
    for client in range(2):
        alone = net({name: value[client] for name, value in stacked.items()}, inputs[client], mode)
        torch.testing.assert_close(outputs[client], alone[0], rtol=0, atol=1e-13)
        for name in seen:
            torch.testing.assert_close(seen[name][client], alone[1][name], rtol=0, atol=1e-13)


def test_statistics_carry_no_gradient():
    net, state = pure(nn.Sequential(nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)))

    def loss(weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        out, seen = net(
            {**state, "0.weight": weight}, images(), Pass(train=True, statistics="track")
        )
        return out.square().sum(), seen

    _, seen = grad(loss, has_aux=True)(state["0.weight"])
    assert not any(value.requires_grad for value in seen.values())


class CopiedNormReLU(nn.BatchNorm2d):
    """The same, with the code of torch's forward written out, as timm's BatchNormAct2d has it."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.num_batches_tracked.add_(1)
        statistics = self.running_mean.to(x.dtype), self.running_var.to(x.dtype)
        x = F.batch_norm(
            x, *statistics, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return F.relu(x)


class InstanceNormReLU(nn.InstanceNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return torch.relu(super().forward(input=input))


class BorrowedNorm(nn.Module):
    """A module that calls the functional norm with the statistics of a layer it holds."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        bn, statistics = self.bn, (self.bn.running_mean, self.bn.running_var)
        x = F.batch_norm(x, *statistics, bn.weight, bn.bias, self.training, bn.momentum, bn.eps)
        return torch.relu(x)


class NamedNorm(nn.Module):
    """A norm that is called by keyword."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.bn(input=x))


OWN_NORMS = {
    "super": NormReLU,
    "copied": CopiedNormReLU,
    "instance": lambda channels: InstanceNormReLU(channels, affine=True, track_running_stats=True),
    "borrowed": BorrowedNorm,
    "keyword": NamedNorm,
}


def own_norm(name: str) -> tuple[nn.Module, Net, dict[str, Tensor]]:
    """A module with a norm of its own, its net, and weights and statistics that differ from those
    at the start.
    """
    module = OWN_NORMS[name](3).double()
    with torch.no_grad():
        for place, value in enumerate((*module.parameters(), *module.buffers())):
            if value.is_floating_point():
                value.copy_(torch.tensor([0.5, 1.0, 1.5]) + place / 10)
    net, state = pure(copy.deepcopy(module))
    return module, net, state


@pytest.mark.parametrize("name", OWN_NORMS)
def test_a_custom_norm_computes_the_same_in_training(name):
    module, net, state = own_norm(name)
    before = {key: value.clone() for key, value in state.items()}
    expected = module.train()(images())
    for statistics in ("batch", "track"):
        found, seen = net(state, images(), Pass(train=True, statistics=statistics))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert len(seen) == 2
    for key, value in seen.items():  # those that torch has after one batch
        torch.testing.assert_close(value, module.get_buffer(key), rtol=0, atol=1e-12)
    assert all(torch.equal(value, before[key]) for key, value in state.items())


@pytest.mark.parametrize("name", OWN_NORMS)
def test_a_custom_norm_computes_the_same_in_evaluation(name):
    module, net, state = own_norm(name)
    by_batch = copy.deepcopy(module).train()(images())
    found, seen = net(state, images(), Pass(statistics="stored"))
    torch.testing.assert_close(found, module.eval()(images()), rtol=0, atol=1e-12)
    assert not seen
    torch.testing.assert_close(
        net(state, images(), Pass(statistics="batch"))[0], by_batch, rtol=0, atol=1e-12
    )
    found, seen = net(state, images(), Pass(statistics="measure"))
    torch.testing.assert_close(found, by_batch, rtol=0, atol=1e-12)
    over = (2, 3) if name == "instance" else (0, 2, 3)
    mean, var = (each.reshape(-1, 3).mean(0) for each in (images().mean(over), images().var(over)))
    torch.testing.assert_close(list(seen.values()), [mean, var], rtol=0, atol=1e-12)


@pytest.mark.parametrize("statistics", ["batch", "track"])
@pytest.mark.parametrize("name", OWN_NORMS)
def test_custom_norms_in_a_stack_compute_what_each_computes_alone(name, statistics):
    _, net, state = own_norm(name)
    weights = {key: value for key, value in state.items() if value.is_floating_point()}
    if statistics == "batch":  # a policy that stores none sends none
        weights = {key: value for key, value in weights.items() if "running" not in key}
        net.module.to("meta")
    mode = Pass(train=True, statistics=statistics)

    def slope(weights: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        def loss(moving: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
            outputs, seen = net(moving, x, mode, KEY)
            return (outputs**2).sum(), seen

        return grad(loss, has_aux=True)(weights)

    batches = torch.stack([images(seed=1), images(seed=2)])
    several = {key: torch.stack([value, 2 * value]) for key, value in weights.items()}
    stacked = vmap(slope)(several, batches)
    for place in range(2):
        alone = slope({key: value[place] for key, value in several.items()}, batches[place])
        for one, other in zip(alone, stacked, strict=True):
            torch.testing.assert_close(
                one, {k: v[place] for k, v in other.items()}, rtol=0, atol=1e-10
            )


def test_a_norm_that_is_called_twice_tracks_both_calls():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.bn(3 * self.bn(x) + 1)

    module = Twice().double()
    net, state = pure(copy.deepcopy(module))
    module.train()(images())
    seen = net(state, images(), Pass(train=True, statistics="track"))[1]
    torch.testing.assert_close(seen["bn.running_mean"], module.bn.running_mean, rtol=0, atol=1e-12)
    measured = net(state, images(), Pass(statistics="measure"))[1]
    torch.testing.assert_close(
        measured["bn.running_mean"], (images().mean((0, 2, 3)) + 1) / 2, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("kind", ["layer", "module"])
def test_a_frozen_norm_needs_statistics_and_keeps_them(kind):
    class Frozen(nn.BatchNorm2d):
        def train(self, mode: bool = True) -> Frozen:
            return super().train(False)

    class Around(nn.Sequential):
        def train(self, mode: bool = True) -> Around:
            super().train(mode)
            self[0].eval()
            return self

    module = nn.Sequential(Frozen(3)) if kind == "layer" else Around(nn.BatchNorm2d(3))
    net, state = pure(module)
    found, seen = net(state, images(), Pass(train=True, statistics="track"))
    torch.testing.assert_close(found, images() / (1 + 1e-5) ** 0.5, rtol=0, atol=1e-12)
    assert not seen
    net.module.to("meta")
    weights = {name: state[name] for name in ("0.weight", "0.bias")}
    with pytest.raises(TrainingError, match=r"'0' is frozen.*Use 'tracked' or 'per_client'"):
        net(weights, images(), TRAIN)


def test_a_norm_that_normalizes_by_hand_is_refused():
    class ByHand(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return (x - x.mean((0, 2, 3), keepdim=True)) / x.std((0, 2, 3), keepdim=True)

    net, state = pure(nn.Sequential(ByHand(3)))
    with pytest.raises(TrainingError, match=r"'0' is a ByHand.*Let it call super\(\).forward"):
        net(state, images(), TRAIN)
