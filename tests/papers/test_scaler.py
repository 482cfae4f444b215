"""The scaler (HeteroFL, section 3; Split-Mix, A.3): hidden outputs divided by the client's share,
in training only.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.family import Pass
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg, FedRolex, FjORD, HeteroFL, SHeteroFL, SplitMix
from fedquilt.models import TransformerLM
from fedquilt.round.federation import World
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import Batch, gradient
from fedquilt.terms import Client, Job
from tests.conftest import assert_same, with_local
from tests.engines.test_client_groups import LAYOUTS, played

TRAIN = Pass(train=True, scaler=True)


class Digits(nn.Module):
    """Split-Mix's Digits CNN in small: convolution, two hidden linear layers with norms, output
    layer.
    """

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3, padding=1)
        self.fc1, self.norm1 = nn.Linear(width, 8), nn.BatchNorm1d(8)
        self.fc2, self.norm2 = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.conv(x)).mean((2, 3))
        x = torch.relu(self.norm1(self.fc1(x)))
        return self.out(torch.relu(self.norm2(self.fc2(x))))


class Attended(nn.Module):
    """nn.MultiheadAttention, which applies its projections without calling a layer."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Linear(3, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.out = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.out(self.attention(x, x, x, need_weights=False)[0].mean(1))


class Transposed(nn.Module):
    """A hidden layer with its weight as (inputs, outputs), as GPT-2 has it, and an LSTM."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.hidden = Conv1D(3, width)
        self.lstm = nn.LSTM(width, 6, batch_first=True)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(self.hidden(x))[0].mean(1))


class Conv1D(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def cut(
    family: fq.Family, share: float, rounding: str = "floor"
) -> tuple[fq.methods.api.Arch, dict[str, Tensor]]:
    """The member of a share, and its weights in float64."""
    arch = family.fit(fq.Budget(share=share), rounding)
    whole = {name: value.double() for name, value in family.init(3).items()}
    return arch, family.cutter.gather(whole, prefix(arch), tuple(whole))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def normed(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    return F.batch_norm(x, None, None, w[f"{name}.weight"], w[f"{name}.bias"], True)


def test_convolutions_and_hidden_linear_layers_are_divided_by_the_share_and_not_by_what_was_kept():
    """A share of 1/4 keeps 3 of 10 channels if rounded up. HeteroFL's code divides by 1/4."""
    family, x, share = fq.trace(Digits, torch.zeros(2, 1, 4, 4)), drawn(6, 1, 4, 4), 0.25
    arch, w = cut(family, share, "ceil")
    assert w["conv.weight"].shape[0] == 3
    h = torch.relu(F.conv2d(x, w["conv.weight"], w["conv.bias"], padding=1) / share).mean((2, 3))
    h = torch.relu(normed(F.linear(h, w["fc1.weight"], w["fc1.bias"]) / share, w, "norm1"))
    h = torch.relu(normed(F.linear(h, w["fc2.weight"], w["fc2.bias"]) / share, w, "norm2"))
    expected = F.linear(h, w["out.weight"], w["out.bias"])
    found = family.member(arch).net(w, x, TRAIN, share=share)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    for mode in (Pass(train=False, scaler=True), Pass(train=True)):
        assert not torch.allclose(family.member(arch).net(w, x, mode, share=share)[0], expected)


def attention(h: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """Two heads, side by side in the last dimension."""
    parts = []
    for q, k, v in zip(query.chunk(2, -1), key.chunk(2, -1), value.chunk(2, -1), strict=True):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(
                torch.ones(h.shape[1], h.shape[1]).triu(1).bool(), -math.inf
            )
        parts.append(scores.softmax(-1) @ v)
    return torch.cat(parts, -1)


@pytest.mark.parametrize("tied", [False, True])
def test_in_a_transformer_embedding_projections_and_perceptron_are_divided(tied):
    """A tied embedding is divided in its hidden use only, because the output layer gives logits."""
    options = {
        "max_length": 5,
        "width": 8,
        "depth": 1,
        "heads": 2,
        "head_dim": 4,
        "hidden": 12,
        "dropout": 0.0,
    }
    tokens, share = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(2)), 0.5
    family = fq.trace(lambda: TransformerLM(11, **options, tied=tied), tokens)
    arch, w = cut(family, share)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w[f"{name}.bias"])

    def layer_norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"])

    h, block = F.embedding(tokens, w["token.weight"]) / share + w["position"], "blocks.0"
    own = [linear(h, f"{block}.attention.0.{name}") / share for name in ("query", "key", "value")]
    h = layer_norm(
        h + linear(attention(h, *own, True), f"{block}.attention.0.out") / share, f"{block}.norm1"
    )
    inner = torch.relu(linear(h, f"{block}.perceptron.0") / share)
    h = layer_norm(h + linear(inner, f"{block}.perceptron.3") / share, f"{block}.norm2")
    expected = F.linear(h, w["token.weight" if tied else "head.weight"], w["head.bias"])
    found = family.member(arch).net(w, tokens, TRAIN, share=share)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_projections_that_no_layer_applies_are_divided_through_their_weights():
    family, x, share = fq.trace(Attended, torch.zeros(2, 5, 3)), drawn(4, 5, 3), 0.5
    arch, w = cut(family, share)
    h = F.linear(x, w["embed.weight"], w["embed.bias"]) / share
    packed = F.linear(h, w["attention.in_proj_weight"], w["attention.in_proj_bias"]) / share
    mixed = attention(h, *packed.chunk(3, -1), False)
    mixed = F.linear(mixed, w["attention.out_proj.weight"], w["attention.out_proj.bias"]) / share
    expected = F.linear(mixed.mean(1), w["out.weight"], w["out.bias"])
    found = family.member(arch).net(w, x, TRAIN, share=share)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_layer_of_unknown_class_is_divided_and_a_recurrent_one_is_not():
    family, x, share = fq.trace(Transposed, torch.zeros(2, 5, 3)), drawn(4, 5, 3), 0.5
    arch, w = cut(family, share)
    assert w["hidden.weight"].shape == (3, 4)
    lstm = nn.LSTM(4, 3, batch_first=True).double()
    lstm.load_state_dict(
        {name.removeprefix("lstm."): v for name, v in w.items() if name.startswith("lstm.")}
    )
    outputs = lstm((x @ w["hidden.weight"] + w["hidden.bias"]) / share)[0]
    expected = F.linear(outputs.mean(1), w["out.weight"], w["out.bias"])
    found = family.member(arch).net(w, x, TRAIN, share=share)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_layers_that_are_kept_whole_are_not_divided():
    family = fq.trace(Digits, torch.zeros(2, 1, 4, 4), fixed=["fc1"])
    scaled = family.member(family.fit(fq.Budget(share=0.5)))._scaled
    assert scaled.layers == {"conv", "fc2"}
    assert family.member(family.whole)._scaled.layers == set()


def test_in_a_preresnet_the_share_is_what_every_convolution_kept(residual):
    """Both readings agree if share · K is whole. Six convolutions are cut, and nothing else."""
    arch = residual.fit(fq.Budget(share=0.25))
    cut_to = {name: shape[0] for name, shape in _shapes(residual, arch).items() if len(shape) == 4}
    whole = {name: shape[0] for name, shape in _shapes(residual, residual.whole).items()}
    assert {kept / whole[name] for name, kept in cut_to.items()} == {0.25}
    assert {f"{name}.weight" for name in residual.member(arch)._scaled.layers} == set(cut_to)


def _shapes(family: fq.Family, arch: fq.methods.api.Arch) -> dict[str, tuple[int, ...]]:
    return {
        name: family.layout.shape(name, family.layout.sizes | arch.sizes)
        for name in family.layout.dims
    }


# --- which share --------------------------------------------------------------------------------


def share_of(method, family, budget: fq.Budget) -> float:
    world, client = World(family), Client(0, budget, 4)
    job = Job(client, method.plan(method.init(world), client, world)[0], 0)
    return method.learner(job, world).share


def test_the_share_is_the_clients_or_that_of_the_net_all_clients_train(residual):
    for method in (
        HeteroFL(),
        FedRolex(),
        with_local(SHeteroFL(), scaler=True),
        with_local(FjORD(), scaler=True),
    ):
        assert share_of(method, residual, fq.Budget(share=0.3)) == 0.3
    assert share_of(SplitMix(base=0.25), residual, fq.Budget(share=0.5)) == 0.25
    assert (
        share_of(with_local(FedAvg(share=0.5), scaler=True), residual, fq.Budget(share=1.0)) == 0.5
    )
    params = fq.Budget(params=residual.count(residual.fit(fq.Budget(share=0.5))))
    assert share_of(HeteroFL(), residual, params) == residual.share(params) == 0.5
    rounded_up = HeteroFL(rounding="ceil")
    assert share_of(rounded_up, residual, params) == residual.share(params, "ceil")


def test_a_nested_net_is_divided_by_its_own_share():
    family, x = fq.trace(Digits, torch.zeros(2, 1, 4, 4)), drawn(6, 1, 4, 4)
    world, client = World(family), Client(0, fq.Budget(share=1.0), 6)
    method = with_local(SHeteroFL(widths=(0.5,)), scaler=True)
    job = Job(client, method.plan(method.init(world), client, world)[0], 0)
    learner, (_, w) = method.learner(job, world), cut(family, 1.0)
    targets, held = torch.tensor([0, 1, 2, 0, 1, 2]), torch.ones(3, dtype=torch.bool)
    batch = Batch(x, targets, held, torch.tensor(0), torch.tensor(learner.share))
    _, (loss, _) = gradient(
        learner, family.member(family.whole), learner.phases[0].objective, w, Received(w), batch
    )
    half, narrow = cut(family, 0.5)
    logits = (
        family.member(family.whole).net(w, x, Pass(train=True))[0],
        family.member(half).net(narrow, x, TRAIN, share=0.5)[0],
    )
    assert float(loss) == pytest.approx(
        float(sum(F.cross_entropy(one, targets) for one in logits)), abs=1e-12
    )


# --- stacks -------------------------------------------------------------------------------------

UNEQUAL = (0.5, 0.55, 0.6)  # of 4, 6 and 8 channels all keep 2, 3 and 4: one member, three shares


def test_clients_of_one_member_are_one_stack_whatever_their_shares(residual, play, make_data):
    data = make_data(residual, (7, 4, 9), labels=2)
    run = play(HeteroFL(), residual, data, UNEQUAL, engine="vectorized")
    assert len({residual.fit(fq.Budget(share=share)) for share in UNEQUAL}) == 1
    assert [record.stacks for record in run.records] == [1, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "least"), [("residual", 1e-8), ("perceptron", 1e-3)], indirect=["family"]
)
def test_unequal_shares_of_one_member_give_the_same_numbers_in_every_layout(
    family, least, layout, play, make_data
):
    data, method = make_data(family, (7, 4, 9), labels=2), with_local(HeteroFL(), batch_size=4)
    truth, alike = (
        play(method, family, data, shares).server.weights for shares in (UNEQUAL, (0.5,))
    )
    # The share does matter: little where norms follow, which take all of it back but for their eps.
    assert max(float((weight - alike[name]).abs().max()) for name, weight in truth.items()) > least
    found = played(method, family, data, layout, shares=UNEQUAL)
    torch.testing.assert_close(dict(found.server.weights), dict(truth), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "method", [SHeteroFL(widths=(0.25,)), FjORD(samples=1, smallest=0.25, granularity=0.25)]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_methods_that_run_nested_nets_do_too(method, layout, perceptron, play, make_data):
    data, method = (
        make_data(perceptron, (7, 4, 9), labels=2),
        with_local(method, batch_size=4, scaler=True),
    )
    truth = play(method, perceptron, data, UNEQUAL)
    assert_same(truth, played(method, perceptron, data, layout, shares=UNEQUAL))


def test_a_group_captured_for_other_shares_is_reused(perceptron, play, make_data, monkeypatch):
    """On a GPU a recorded step reads the shares from a buffer; nothing is recorded anew."""
    made = []
    monkeypatch.setattr(
        "fedquilt.engines.vectorized.group_store.ClientGroup",
        lambda *args, own=fq.engines.vectorized.group_store.ClientGroup: (
            made.append(args) or own(*args)
        ),
    )
    data, method = make_data(perceptron, (4, 4, 4), labels=2), with_local(HeteroFL(), batch_size=4)
    fleet = fq.Fleet.of(UNEQUAL, 3, 1)
    truth = play(method, perceptron, data, fleet=fleet, rounds=4)
    run = fq.prepare(
        method,
        perceptron,
        data,
        fleet,
        "vectorized",
        precision="fp64",
        evaluation=fq.Evaluation(every=0),
    )
    assert isinstance(run.engine, Vectorized)
    run.engine.record = True
    assert_same(truth, run.train(4))
    assert len(made) == 1
