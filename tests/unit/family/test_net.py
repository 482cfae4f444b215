"""A member as a pure function: norm statistics are values, noise is keyed, nothing hidden moves."""

from __future__ import annotations

import copy
import re
import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.utils.parametrizations import weight_norm

import fedquilt as fq
from fedquilt import noise
from fedquilt.errors import TrainingError
from fedquilt.family import Net, Pass
from fedquilt.family.net import is_stock
from fedquilt.family.randomness import SeededRandomness
from fedquilt.family.scaled import Scaled

KEY = torch.tensor(noise.key(1))
TRAIN = Pass(train=True)


def images(count: int = 6, seed: int = 0) -> Tensor:
    return torch.randn(
        count, 3, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def pure(module: nn.Module, scaled: Scaled = Scaled()) -> tuple[Net, dict[str, Tensor]]:
    """A net of a module in float64, and its weights and statistics."""
    module = module.double()
    state = {
        n: v.detach().clone() for n, v in (*module.named_parameters(), *module.named_buffers())
    }
    return Net(module, {}, scaled), state


# --- norm statistics ----------------------------------------------------------------------------


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


# --- norms of the user's own --------------------------------------------------------------------


class NormReLU(nn.BatchNorm2d):
    """A norm and an activation in one layer, by the forward of its base class."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


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


# --- the scaler ---------------------------------------------------------------------------------


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


# --- noise --------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_is_keyed_unbiased_and_the_same_in_a_stack(p):
    net, _ = pure(nn.Dropout(p))
    ones = torch.ones(100_000, dtype=torch.float64)
    found, _ = net({}, ones, TRAIN, KEY)
    assert torch.equal(found, net({}, ones, TRAIN, KEY)[0])
    assert not torch.equal(found, net({}, ones, TRAIN, KEY + 1)[0])
    values = found.unique().tolist()
    assert values == [0, pytest.approx(1 / (1 - p))]
    assert float(found.mean()) == pytest.approx(1, abs=5 * (p / (1 - p) / 1e5) ** 0.5)
    stacked = vmap(lambda x, key: net({}, x, TRAIN, key)[0])(
        torch.stack([ones, ones]), torch.stack([KEY, KEY + 1])
    )
    assert torch.equal(stacked[0], found)
    assert torch.equal(stacked[1], net({}, ones, TRAIN, KEY + 1)[0])


def test_dropout_has_no_effect_outside_of_training():
    net, _ = pure(nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5)))
    assert torch.equal(net({}, images())[0], images())


def test_two_layers_draw_different_noise():
    net, _ = pure(nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.5)))
    once, _ = pure(nn.Dropout(0.5))
    ones = torch.ones(1000, dtype=torch.float64)
    twice = net({}, ones, TRAIN, KEY)[0]
    assert 150 < int((twice != 0).sum()) < 350  # a quarter; the same mask twice would leave half
    assert set(torch.unique(once({}, ones, TRAIN, KEY)[0]).tolist()) == {0, 2}


def test_dropout_of_channels_drops_whole_channels():
    net, _ = pure(nn.Dropout2d(0.5))
    found = net({}, torch.ones(8, 10, 3, 3, dtype=torch.float64), TRAIN, KEY)[0]
    per_channel = found.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert set(found.unique().tolist()) == {0, 2}


def test_dropout_extremes():
    ones = torch.ones(5, dtype=torch.float64)
    assert torch.equal(pure(nn.Dropout(0.0))[0]({}, ones, TRAIN, KEY)[0], ones)
    assert torch.equal(pure(nn.Dropout(1.0))[0]({}, ones, TRAIN, KEY)[0], 0 * ones)


class Draws(nn.Module):
    """Calls one of torch's random functions in its forward."""

    def __init__(self, draw) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x)


@pytest.mark.parametrize(
    ("draw", "mean"),
    [
        (lambda x: x * torch.rand(x.shape), 0.5),
        (lambda x: x * torch.rand(*x.shape), 0.5),
        (lambda x: x * torch.rand_like(x), 0.5),
        (lambda x: x + torch.randn_like(x), 1.0),
        (lambda x: x + torch.randn(x.shape), 1.0),
        (lambda x: torch.bernoulli(0.3 * x), 0.3),
        (lambda x: torch.empty_like(x).bernoulli_(0.7), 0.7),
        (lambda x: _in_place(x, 0.7), 0.7),
    ],
)
def test_random_functions_are_keyed(draw, mean):
    net, _ = pure(Draws(draw))
    ones = torch.ones(20_000, dtype=torch.float64)
    state = torch.random.get_rng_state()
    found = net({}, ones, TRAIN, KEY)[0]
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(found, net({}, ones, TRAIN, KEY)[0])
    assert not torch.equal(found, net({}, ones, TRAIN, KEY + 1)[0])
    assert float(found.double().mean()) == pytest.approx(mean, abs=0.03)
    stacked = vmap(lambda x, key: net({}, x, TRAIN, key)[0])(
        torch.stack([ones, ones]), torch.stack([KEY + 1, KEY])
    )
    assert torch.equal(stacked[1], found)


def _in_place(x: Tensor, p: float) -> Tensor:
    """As a user writes it who does not use what an in-place function returns."""
    mask = torch.ones_like(x)
    mask.bernoulli_(p)
    return mask


def test_noise_of_a_stack_in_a_shared_buffer_is_noticed():
    """Drawing into a fresh buffer is fine if its result is used; the buffer itself would be one
    client's for all.
    """
    keys, x = torch.stack([KEY, KEY + 1]), torch.ones(2, 50, dtype=torch.float64)
    result, _ = pure(Draws(lambda x: x * torch.empty(50).bernoulli_(0.5)))
    buffer, _ = pure(Draws(lambda x: x * _in_place(torch.ones(50), 0.5)))
    stacked = [
        vmap(lambda x, key, net=net: net({}, x, TRAIN, key)[0])(x, keys) for net in (result, buffer)
    ]
    alone = torch.stack([result({}, x[0], TRAIN, key)[0] for key in keys])
    assert torch.equal(stacked[0], alone)
    assert not stacked[1].isfinite().any()


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: x[torch.randperm(len(x))], "torch.randperm"),
        # draws inside of torch, where nobody can follow
        (lambda x: F.gumbel_softmax(x, 0), "F.gumbel_softmax"),
        (lambda x: F.fractional_max_pool2d(x.expand(1, 1, 3, 3), 2, 2), "F.fractional_max_pool2d"),
        (torch.poisson, "torch.poisson"),
        (lambda x: torch.empty_like(x).log_normal_(), "Tensor.log_normal_"),
    ],
)
def test_noise_that_cannot_be_keyed_is_refused_by_name(draw, name):
    net, _ = pure(Draws(draw))
    with pytest.raises(TrainingError, match=re.escape(name)):
        net({}, torch.ones(3), TRAIN, KEY)


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


def test_noise_outside_of_training_is_refused():
    net, _ = pure(Draws(lambda x: x * torch.rand_like(x)))
    with pytest.raises(TrainingError, match="outside of training"):
        net({}, torch.ones(3))


@pytest.mark.parametrize(
    ("causal", "mask"), [(False, None), (True, None), (False, "bool"), (False, "float")]
)
def test_explicit_attention_equals_torchs(causal, mask):
    q, k, v = (
        torch.randn(2, 3, 5, 4, generator=torch.Generator().manual_seed(i)).double()
        for i in range(3)
    )
    kept = torch.rand(5, 5, generator=torch.Generator().manual_seed(9)) < 0.7
    kept |= torch.eye(5, dtype=torch.bool)
    given = {None: None, "bool": kept, "float": torch.where(kept, 0.5, -1e9).double()}[mask]
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=causal)
    with SeededRandomness(None):
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=given, is_causal=causal)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_grouped_queries_share_keys_as_torchs_do():
    q = torch.randn(2, 4, 5, 3).double()
    k, v = torch.randn(2, 2, 2, 5, 3).double()
    expected = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    with SeededRandomness(None):
        found = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


class Encoder(nn.Module):
    """torch's own transformer layer, and its attention, with dropout, behind an embedding."""

    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.embed(x))
        mixed, _ = self.attention(x, x, x, need_weights=False)
        return self.head((x + mixed).mean(1))


def test_torchs_attention_is_unchanged_in_evaluation():
    model = Encoder().double().eval()
    inputs = torch.randn(3, 5, 3, dtype=torch.float64)
    expected = model(inputs).detach()
    net, state = pure(model)
    torch.testing.assert_close(net(state, inputs)[0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_torchs_attention_with_dropout_trains_without_warnings(engine, play, make_data):
    family = fq.trace(Encoder, torch.zeros(2, 5, 3))
    method = fq.methods.FedRolex(local=fq.LocalTraining(batch_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs = [
            play(method, family, make_data(family, (5, 6, 4)), (1.0, 0.5), engine=name)
            for name in ("sequential", engine)
        ]
    for name, weight in runs[0].server.weights.items():
        torch.testing.assert_close(weight, runs[1].server.weights[name], rtol=0, atol=1e-9)
    assert runs[0].records[-1].loss > 0


class Recurrent(nn.Module):
    """One of torch's recurrent layers, all that it gives in one tensor."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool = False, **options) -> None:
        super().__init__()
        self.cell, self.packed = kind(3, 4, **options), packed

    def forward(self, x: Tensor) -> Tensor:
        steps = x.shape[1 if self.cell.batch_first else 0]
        lengths = torch.full([x.numel() // steps // 3], steps)
        outputs, state = self.cell(
            nn.utils.rnn.pack_padded_sequence(x, lengths, self.cell.batch_first)
            if self.packed
            else x
        )
        given = (
            outputs.data if self.packed else outputs,
            *(state if isinstance(state, tuple) else (state,)),
        )
        return torch.cat([value.flatten() for value in given])


# nothing is dropped, or all: the two that torch does not draw for
@pytest.mark.parametrize("p", [1e-12, 1.0])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.LSTM, {}),
        (nn.LSTM, {"proj_size": 2, "bidirectional": True, "bias": False, "batch_first": True}),
        (nn.GRU, {"bidirectional": True, "batch_first": True}),
        (nn.RNN, {"bias": False}),
        (nn.RNN, {"nonlinearity": "relu", "bidirectional": True}),
    ],
)
def test_recurrent_layers_with_dropout_between_them_are_torchs(kind, options, p):
    theirs = Recurrent(kind, num_layers=3, dropout=round(p), **options).double().train()
    net, _ = pure(Recurrent(kind, num_layers=3, dropout=p, **options))
    state, x = dict(theirs.named_parameters()), images().flatten(2).transpose(1, 2)
    torch.testing.assert_close(net(state, x, TRAIN, KEY)[0], theirs(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_keyed(kind):
    net, state = pure(Recurrent(kind, num_layers=2, dropout=0.5))
    before, x = torch.random.get_rng_state(), images().flatten(2).transpose(1, 2)
    found, again, other = (net(state, x, TRAIN, key)[0] for key in (KEY, KEY, KEY + 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(found, again)
    assert not torch.equal(found, other)
    assert torch.equal(net(state, x)[0], net.module.eval()(x))


def test_dropout_between_recurrent_layers_on_packed_sequences_is_refused():
    net, state = pure(Recurrent(nn.LSTM, packed=True, num_layers=2, dropout=0.5))
    x = images().flatten(2).transpose(1, 2)
    with pytest.raises(
        TrainingError, match=r"torch\.lstm on packed sequences, with dropout between layers"
    ):
        net(state, x, TRAIN, KEY)
    assert net(state, x)[0].isfinite().all()
    single, state = pure(Recurrent(nn.LSTM, packed=True))
    assert single(state, x, TRAIN, KEY)[0].isfinite().all()


# --- operations in place ------------------------------------------------------------------------


class Rewrites(nn.Module):
    """Begins with an operation on what it is given, perhaps in place."""

    def __init__(self, begin) -> None:
        super().__init__()
        self.begin, self.head = begin, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.begin(x))


def _centred(x: Tensor) -> Tensor:
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
        (_centred, lambda x: x - x.mean(1, keepdim=True)),
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
