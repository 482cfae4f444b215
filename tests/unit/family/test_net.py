"""A member as a pure function: it replaces what it must, and changes no inputs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm

import fedquilt as fq
from fedquilt.family import Net, Pass
from fedquilt.family.net import is_stock
from fedquilt.family.scaled import Scaled
from tests.unit.family.pure import KEY, NormReLU, images, pure


def test_custom_pooling_keeps_its_forward():
    class Both(nn.AdaptiveAvgPool2d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), F.adaptive_max_pool2d(x, self.output_size)], 1)

    net, state = pure(Both(1))
    expected = torch.cat([images().mean((2, 3)), images().amax((2, 3))], 1)
    torch.testing.assert_close(net(state, images())[0].flatten(1), expected, rtol=0, atol=1e-14)


def test_a_class_that_adds_only_a_constructor_counts_as_torchs():
    class Wide(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(3, eps=0.1)

    patched = nn.BatchNorm2d(3)
    patched.forward = lambda x: x
    layers = (nn.BatchNorm2d(3), Wide(), NormReLU(3), patched, nn.Linear(1, 1))
    assert [is_stock(layer) for layer in layers] == [True, True, False, False, True]


def test_a_parametrized_layer_keeps_its_kind():
    layers = [weight_norm(layer) for layer in (nn.Linear(2, 3), NormReLU(3, affine=True))]
    assert [is_stock(layer) for layer in layers] == [True, False]


def test_the_scaler_divides_layers_by_the_share_in_training():
    net, state = pure(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Linear(2, 5)), Scaled(frozenset({"0"})))
    plain = functional_call(
        net.module[0], {"weight": state["0.weight"], "bias": state["0.bias"]}, (images(),)
    )
    net.module[1].forward = lambda x: x  # look behind the convolution
    for mode, factor in (
        (Pass(train=True, scaler=True), 4.0),
        (Pass(train=False, scaler=True), 1.0),
        (Pass(train=True, scaler=False), 1.0),
    ):
        torch.testing.assert_close(
            net(state, images(), mode, share=0.25)[0], factor * plain, rtol=0, atol=1e-12
        )


def test_a_net_keeps_no_tensor_of_a_gradient():
    """What is made inside of one is of no use afterwards, and inside of another it fails."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.last = nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.stem(x))

    family = fq.trace(Fixed, torch.zeros(2, 2), fixed=["stem"])
    weights = {name: value.double() for name, value in family.init().items()}
    grad(lambda own: family.member(family.whole).net(own, torch.ones(2, 2).double())[0].sum())(
        weights
    )
    (moved,) = family.member(family.whole).net._moved.values()
    assert set(moved) == {"stem.weight", "stem.bias"}
    assert not any(
        torch._C._functorch.is_functorch_wrapped_tensor(value) for value in moved.values()
    )


class Rewrites(nn.Module):
    """Begins with an operation on what it is given, perhaps in place."""

    def __init__(self, begin) -> None:
        super().__init__()
        self.begin, self.head = begin, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.begin(x))


def _centered(x: Tensor) -> Tensor:
    x -= x.mean(1, keepdim=True)
    return x


def _blanked(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch has no stacked clamp_
@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("stacked_first", [True, False])
@pytest.mark.parametrize(
    ("begin", "apart"),
    [
        (nn.ReLU(inplace=True), torch.relu),
        (_centered, lambda x: x - x.mean(1, keepdim=True)),
        (_blanked, lambda x: x * (torch.arange(4) > 0)),
        (lambda x: x.clamp_(0, 1), lambda x: x.clamp(0, 1)),
        (lambda x: x.flatten(1).mul_(2), lambda x: 2 * x),
    ],
)
def test_a_net_that_begins_in_place_does_not_change_its_inputs(begin, apart, stacked_first, train):
    (net, state), (truth, _) = pure(Rewrites(begin)), pure(Rewrites(apart))
    inputs, given = images()[:, 0, :, 0].repeat(2, 1, 1), images()[:, 0, :, 0].repeat(2, 1, 1)

    def loss(net: Net, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return net(weights, x, Pass(train=train), KEY)[0].square().sum()

    def ways(net: Net, x: Tensor) -> list:
        one, both = partial(loss, net, state), vmap(partial(loss, net), (None, 0))
        first = [both(state, x)] if stacked_first else []
        slopes = [
            grad(partial(loss, net))(state, x[0])["head.weight"],
            grad(one)(x[0]),
            vmap(grad(one))(x),
        ]
        return [*first, one(x[0]), *slopes, both(state, x)]

    for found, expected in zip(ways(net, given), ways(truth, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert torch.equal(given, inputs)
    assert (net._reading, truth._reading) == (set(), {train})  # who only reads is given no copy
