"""Random numbers of a net depend on its key alone: dropout, attention, recurrent layers."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

import fedquilt as fq
from fedquilt.errors import TrainingError
from fedquilt.family.randomness import SeededRandomness
from tests.unit.family.pure import KEY, TRAIN, images, pure


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
    # The fused kernel of a plain nn.RNN rounds its last bit differently on some processors.
    torch.testing.assert_close(net(state, x)[0], net.module.eval()(x), rtol=0, atol=1e-12)


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
