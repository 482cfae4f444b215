"""Modules in stages: how they run, how they are copied and taken apart, and what is wrong with a
request for them.
"""

from __future__ import annotations

import copy
import doctest
import pickle
import sys
from collections.abc import Callable
from typing import Any, cast

import cloudpickle
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import fedquilt as fq
from fedquilt.errors import ConfigError, ExportError, TraceError
from fedquilt.family.heads import fit_head
from fedquilt.family.stage_ends import growths_of
from fedquilt.family.staged import Grown
from fedquilt.family.stages import stage_sizes
from fedquilt.models import MODELS, UNet
from fedquilt.terms import WHOLE

ROW = torch.randn(3, 6)


class Net(nn.Module):
    """Three layers with code between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.norm = nn.BatchNorm1d(5)
        self.b = nn.Linear(5, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(torch.relu(self.a(x)))
        logits: Tensor = self.out(torch.relu(self.b(x)))
        return logits


class Declares(Net):
    stage_ends = ("norm", "b")


def grown(module: nn.Module, inputs: Tensor, stages: Any = None) -> Any:
    """Return the module in stages, in evaluation."""
    resolved = fq.with_stages(module, stages).resolve((inputs,))
    assert isinstance(resolved, nn.Module)
    assert isinstance(resolved, Grown)
    return resolved.eval()


def test_the_example_of_with_stages_runs() -> None:
    finder = doctest.DocTestFinder(recurse=False)
    (example,) = finder.find(
        fq.with_stages, "with_stages", module=sys.modules[fq.with_stages.__module__], globs={}
    )
    assert doctest.DocTestRunner().run(example).failed == 0


# --- what runs ----------------------------------------------------------------------------------


def test_a_stage_runs_the_first_blocks_and_its_head() -> None:
    net = grown(Declares(), ROW)
    assert net.variants == ("stage1",)
    net.choose("stage1")
    by_hand = net.stage_heads["stage1"](net.norm(torch.relu(net.a(ROW))))
    assert torch.equal(net(ROW), by_hand)


def test_the_users_module_does_not_change() -> None:
    net = Net()
    before = (type(net), list(net.state_dict()), dict(vars(net)))
    made = grown(net, ROW, ["a", "b"])
    assert (type(net), list(net.state_dict()), dict(vars(net))) == before
    assert made.a.weight is net.a.weight
    assert not made.a._forward_hooks


def test_a_module_that_runs_all_its_children_in_turn_does_not_run_heads() -> None:
    net = nn.Sequential(
        nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)
    ).eval()
    made = grown(net, ROW, 2)
    assert torch.equal(made(ROW), net(ROW))
    made.choose("stage1")
    assert torch.equal(made(ROW), made.stage_heads["stage1"](net[:2](ROW)))
    assert list(made._modules) == ["0", "1", "2", "3", "4", "stage_heads"]


def test_a_stage_ends_after_the_hooks_of_its_last_module() -> None:
    """The scaler divides the outputs of layers by a hook that is registered later."""
    net = grown(Net(), ROW, ["a", "b"])
    net.choose("stage1")
    net.a.register_forward_hook(lambda layer, inputs, output: output * 2)
    assert torch.allclose(
        net(ROW), net.stage_heads["stage1"](2 * F.linear(ROW, net.a.weight, net.a.bias))
    )


def test_stages_do_not_change_the_initial_weights_of_the_module() -> None:
    factory = cast(Callable[[], nn.Module], fq.with_stages(Net, 2).resolve((ROW,)))
    torch.manual_seed(5)
    made = factory()
    torch.manual_seed(5)
    plain = Net().state_dict()
    assert all(torch.equal(made.state_dict()[name], value) for name, value in plain.items())
    torch.manual_seed(6)
    other = factory()
    heads = [net.get_submodule("stage_heads.stage1.linear").weight for net in (made, other)]
    assert not torch.equal(*heads)


def test_heads_are_like_the_weights_of_the_module() -> None:
    made = grown(Net().double(), ROW.double(), 2)
    made.choose("stage1")
    assert made(ROW.double()).dtype == torch.float64


def test_gradients_of_many_clients_go_through_a_stage() -> None:
    net = grown(Net(), ROW, ["a", "b"])
    net.choose("stage1")
    weights = {
        name: torch.stack([weight.detach(), 2 * weight.detach()])
        for name, weight in net.named_parameters()
    }

    def loss(own: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(net, own, (x,))
        return outputs.square().sum()

    found = vmap(grad(loss), in_dims=(0, None))(weights, ROW)
    moved = {name for name, gradient in found.items() if gradient.abs().sum() > 0}
    assert moved == {
        "a.weight",
        "a.bias",
        "stage_heads.stage1.linear.weight",
        "stage_heads.stage1.linear.bias",
    }
    for client in range(2):
        own = {name: weight[client] for name, weight in weights.items()}
        alone = grad(loss)(own, ROW)
        assert all(torch.allclose(found[name][client], alone[name], atol=1e-5) for name in alone)


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: cloudpickle.loads(cloudpickle.dumps(net)),
    ],
    ids=["deepcopy", "pickle", "cloudpickle"],
)
def test_copies_run_the_same_stage_and_choose_for_themselves(copied: Callable[[Any], Any]) -> None:
    net = grown(Net(), ROW, ["a", "b"])
    net.choose("stage1")
    other = copied(net)
    assert type(other) is type(net)
    assert torch.equal(other(ROW), net(ROW))
    other.choose(WHOLE)
    with torch.no_grad():
        other.a.weight.zero_()
    assert other(ROW).shape == (3, 3)
    assert not torch.equal(other(ROW), net(ROW))
    assert net.a.weight.abs().sum() > 0


def test_a_class_made_inside_a_function_is_sent_by_cloudpickle() -> None:
    class LocalTraining(Net):
        pass

    factory = cloudpickle.loads(cloudpickle.dumps(fq.with_stages(LocalTraining, 2).resolve((ROW,))))
    net = cloudpickle.loads(cloudpickle.dumps(factory())).eval()
    net.choose("stage1")
    assert net(ROW).shape == (3, 3)


# --- taken apart --------------------------------------------------------------------------------


def test_the_extracted_whole_model_is_the_users() -> None:
    net = Net().eval()
    extracted = grown(net, ROW, 2).extract()
    assert type(extracted) is Net
    assert list(extracted.state_dict()) == list(net.state_dict())
    assert vars(extracted).keys() == vars(net).keys()
    assert torch.equal(extracted(ROW), net(ROW))


def test_an_extracted_stage_has_its_own_weights_alone_and_keeps_their_names() -> None:
    made = grown(Declares(), ROW)
    made.choose("stage1")
    expected = made(ROW)
    extracted = made.extract()
    names = ["a.weight", "a.bias", "norm.weight", "norm.bias"]
    heads = ["stage_heads.stage1.linear.weight", "stage_heads.stage1.linear.bias"]
    buffers = ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert [name for name, _ in extracted.named_parameters()] == [*names, *heads]
    assert [name for name, _ in extracted.named_buffers()] == buffers
    assert torch.equal(extracted(ROW), expected)


def test_a_chain_of_modules_can_be_exported() -> None:
    made = grown(MODELS["progfed_cnn"].factory(), MODELS["progfed_cnn"].example())
    made.choose("stage2")
    x = MODELS["progfed_cnn"].example(3)
    expected = made(x)
    chain = made.extract().exportable()
    assert type(chain) is nn.Sequential
    assert sum(weight.numel() for weight in chain.parameters()) == 896 + 18_496 + 650
    assert torch.allclose(torch.export.export(chain, (x,)).module()(x), expected, atol=1e-6)


def test_a_stage_with_code_between_modules_cannot_be_exported() -> None:
    made = grown(Declares(), ROW)
    made.choose("stage1")
    with pytest.raises(
        ExportError, match=r"runs relu in the module itself .* between 'a' and 'norm'"
    ):
        made.exportable()
    made.choose(WHOLE)
    assert made.exportable() is made


def test_a_stage_that_a_module_runs_itself_can_be_exported() -> None:
    made = grown(UNet(2, width=4, depth=2, groups=2), torch.randn(2, 1, 8, 8))
    made.choose("stage1")
    x = torch.randn(2, 1, 8, 8)
    expected = made(x)
    extracted = made.extract()
    assert extracted.exportable() is extracted
    assert {
        name.split(".")[0] + name.split(".")[1] for name, _ in extracted.named_parameters()
    } == {"encoder0", "encoder1", "decoder0", "headweight", "headbias"}
    assert torch.allclose(torch.export.export(extracted, (x,)).module()(x), expected, atol=1e-6)


# --- parts and declarations ---------------------------------------------------------------------


def test_every_weight_belongs_to_one_block_or_head() -> None:
    family = fq.trace(fq.with_stages(Declares()), ROW)
    assert family.parts["stage1"] == (
        "a.weight",
        "a.bias",
        "norm.weight",
        "norm.bias",
        *_statistics("norm"),
    )
    assert family.parts["stage2"] == ("b.weight", "b.bias")
    assert family.parts["head1"] == (
        "stage_heads.stage1.linear.weight",
        "stage_heads.stage1.linear.bias",
    )
    assert family.parts["head2"] == ("out.weight", "out.bias")


def _statistics(norm: str) -> tuple[str, str]:
    return f"{norm}.running_mean", f"{norm}.running_var"


class Tied(nn.Module):
    """The output layer has the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6, bias=False)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.middle(self.first(x)))
        return logits


def test_a_tied_weight_belongs_to_the_first_block_that_uses_it() -> None:
    sizes = stage_sizes(Tied(), (ROW,), ("first", "middle"))
    assert [(size.block, size.head) for size in sizes] == [(36, 42), (42, 0)]
    made = grown(Tied(), ROW, ["first", "middle"])
    made.choose("stage1")
    assert made.extract()(ROW).shape == (3, 6)


def test_models_declare_their_stages() -> None:
    with torch.device("meta"):
        declared = {name: growths_of(spec.factory()) for name, spec in MODELS.items()}
    assert all(declared.values())
    assert declared["vit"] == {"": ("blocks.1", "blocks.3", "blocks.5")}
    assert declared["transformer_lm"] == {"": ("blocks.0", "blocks.1", "blocks.2")}
    assert declared["mlp"] == {"": ("stages.1", "stages.2")}
    decoders = ("decoder.3", "decoder.2", "decoder.1", "decoder.0")
    assert declared["unet3d"] == {"symmetric": 4, "asymmetric": decoders}


def test_a_transformer_of_two_blocks_has_two_stages() -> None:
    assert growths_of(MODELS["vit"].factory(depth=2)) == {"": ("blocks.0", "blocks.1")}
    assert growths_of(MODELS["vit"].factory(depth=4)) == {"": ("blocks.1", "blocks.2", "blocks.3")}


@pytest.mark.parametrize("dims", [2, 3])
def test_the_stages_of_a_u_net_are_shallower_u_nets(dims: int) -> None:
    x = torch.randn(2, 1, *(8,) * dims)
    net = UNet(dims, width=4, depth=3, groups=2).eval()
    made = grown(net, x)
    for depth in (1, 2):
        shallow = UNet(dims, width=4, depth=depth, groups=2).eval()
        missing = shallow.load_state_dict(net.state_dict(), strict=False)
        assert not missing.missing_keys
        made.choose(f"stage{depth}")
        assert torch.equal(made(x), shallow(x))
    made.choose(WHOLE)
    assert torch.equal(made(x), net(x))


@pytest.mark.parametrize("dims", [2, 3])
def test_asymmetric_stages_of_a_u_net_have_the_size_of_the_input(dims: int) -> None:
    x = torch.randn(2, 1, *(8,) * dims)
    made = grown(UNet(dims, width=4, depth=3, groups=2), x, "asymmetric")
    for name in made.variants:
        made.choose(name)
        assert made(x).shape == (2, 2, *(8,) * dims)
        larger = torch.randn(1, 1, *(16,) * dims)
        assert made(larger).shape == (1, 2, *(16,) * dims)
    made.choose("stage1")
    levels = [made.encoder[0](x)]
    for encode in made.encoder[1:]:
        levels.append(encode(made.pool(levels[-1])))
    innermost = made.stage_heads["stage1"].conv(made.decoder[2](levels[3], levels[2]))
    assert torch.equal(made(x), F.interpolate(innermost, scale_factor=4))


@pytest.mark.parametrize("dims", [2, 3])
def test_gradients_of_many_clients_go_through_an_upsampling_head(dims: int) -> None:
    x = torch.randn(2, 2, 1, *(4,) * dims)  # (client, batch, channel, …)
    made = grown(UNet(dims, width=2, depth=2, groups=2), x[0], "asymmetric")
    made.choose("stage1")
    weights = {name: weight.detach() for name, weight in made.named_parameters()}

    def loss(own: dict[str, Tensor], batch: Tensor) -> Tensor:
        outputs: Tensor = functional_call(made, own, (batch,))
        return outputs.square().sum()

    together = vmap(grad(loss), in_dims=(None, 0))(weights, x)
    for client in range(2):
        alone = grad(loss)(weights, x[client])
        assert all(torch.allclose(together[name][client], alone[name], atol=1e-4) for name in alone)
    assert together["decoder.0.up.weight"].abs().sum() == 0


class Sequences(nn.Module):
    """Logits (batch, length, class) for each step of (batch, length, feature)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(torch.relu(self.second(torch.relu(self.first(x)))))
        return logits


def test_heads_have_the_classes_in_the_dimension_that_is_named() -> None:
    x = torch.randn(2, 7, 6)
    made: Any = fq.with_stages(Sequences(), 2).resolve((x,), class_dim=2)
    made.choose("stage1")
    assert made(x).shape == (2, 7, 3)
    with pytest.raises(TraceError, match="none can be made"):  # 7 steps are taken for 7 classes
        fq.with_stages(Sequences(), 2).resolve((x,))


def test_a_family_is_traced_and_read_with_the_class_dimension_that_is_named(tmp_path) -> None:
    x = torch.randn(2, 7, 6)
    family = fq.trace(fq.with_stages(Sequences(), 2), x, class_dim=2)
    assert family.at("stage1").layout.class_dim == 2
    family.save(tmp_path / "family.json")
    again = fq.Family.load(tmp_path / "family.json", fq.with_stages(Sequences(), 2), x)
    for variant in ("stage1", WHOLE):
        assert again.module(again.at(variant).whole)(x).shape == (2, 7, 3)


def test_parts_have_all_weights_once_and_nothing_else() -> None:
    family = fq.trace(fq.with_stages(Net(), ["a", "b"]), ROW)
    names = [name for part, own in family.parts.items() if part != "norm" for name in own]
    assert sorted(names) == sorted(family.layout.dims)


def test_a_view_with_one_seeds_weights_has_members_of_its_own_family() -> None:
    family = fq.trace(fq.with_stages(Net, ["a", "b"]), ROW)
    view = family.at("stage1", ("head1",)).seeded(3)
    assert (view.variant, view.trains) == ("stage1", ("head1",))
    member = view.member(view.whole)
    assert member.family is view.at(WHOLE)
    assert member.family is not family
    assert torch.equal(member.family.init(0)["a.weight"], family.init(3)["a.weight"])


def test_stages_of_a_family_that_was_read_cannot_be_changed(tmp_path) -> None:
    source = fq.with_stages(Net(), ["a", "b"])
    fq.trace(source, ROW).save(tmp_path / "family.json")
    family = fq.Family.load(tmp_path / "family.json", source, ROW)
    assert family.staged() is family
    with pytest.raises(
        TraceError, match="it has the variants whole, stage1, and cannot be traced again here"
    ):
        family.staged(("norm", "b"))


# --- heads --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("features", "channel_dim", "output", "class_dim", "layers"),
    [
        ((2, 8), 1, (2, 5), 1, ["linear"]),
        ((2, 8, 6), 1, (2, 5), 1, ["pool", "flatten", "linear"]),
        ((2, 8, 6, 6), 1, (2, 5), 1, ["pool", "flatten", "linear"]),
        ((2, 8, 6, 6, 6), 1, (2, 5), 1, ["pool", "flatten", "linear"]),
        ((2, 7, 8), 2, (2, 5), 1, ["mean", "linear"]),
        ((2, 6, 6, 8), 3, (2, 5), 1, ["mean", "linear"]),
        ((2, 7, 8), 2, (2, 7, 5), 2, ["linear"]),
        ((2, 8, 7), 1, (2, 5, 7), 1, ["conv"]),
        ((2, 8, 4, 4), 1, (2, 5, 8, 16), 1, ["conv", "upsample"]),
        ((2, 8, 3, 3), 1, (2, 5, 8, 8), 1, ["conv", "upsample"]),
        ((2, 8, 2, 2, 2), 1, (2, 5, 8, 8, 8), 1, ["conv", "upsample"]),
    ],
)
def test_heads_give_the_models_output(
    features: tuple[int, ...],
    channel_dim: int,
    output: tuple[int, ...],
    class_dim: int,
    layers: list[str],
) -> None:
    head = fit_head(features, channel_dim, output, class_dim, "layer 'x'").make()
    assert list(head._modules) == layers
    x = torch.randn(features)
    assert head(x).shape == output
    if len(output) == 2:
        positions = tuple(dim for dim in range(1, len(features)) if dim != channel_dim)
        mean = x.mean(positions) if positions else x
        linear = cast(nn.Linear, head.linear)
        assert torch.allclose(head(x), mean @ linear.weight.T + linear.bias, atol=1e-5)


@pytest.mark.parametrize(
    ("features", "channel_dim", "output", "class_dim"),
    [((2, 8), 1, (2, 5, 4, 4), 1), ((2, 7, 8), 2, (2, 9, 5), 2), ((2, 8), 1, (2,), 0)],
)
def test_a_head_that_cannot_be_made_is_refused(
    features: tuple[int, ...], channel_dim: int, output: tuple[int, ...], class_dim: int
) -> None:
    with pytest.raises(TraceError, match=r"none can be made\. Heads give"):
        fit_head(features, channel_dim, output, class_dim, "layer 'x'")


# --- requests that cannot be met ----------------------------------------------------------------


class Skips(nn.Module):
    """A U-Net in small: the outputs of both encoders are read at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(6, 4)
        self.two = nn.Linear(4, 4)
        self.three = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)
        self.act = nn.ReLU()
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        one = self.act(self.one(x))
        two = self.act(self.two(one))
        logits: Tensor = self.out(torch.cat([one, two, self.three(two)], 1))
        return logits


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["a", "bb"], "there is no such module. Did you mean 'b'"),
        (["b", "a"], r"forward runs 'a' before 'b'. This order works: \['a', 'b'\]"),
        (["a", "a"], "forward runs 'a' once"),
        (4, "4 stages of Net were asked for; they can end with norm, b alone, so at most 2"),
        (None, "it declares none .`stage_ends`.. Give a number"),
        ("b", "the growth 'b' of Net was asked for; it declares none"),
    ],
)
def test_stages_that_a_module_does_not_have_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        fq.with_stages(Net(), stages).resolve((ROW,))


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (["one", "unused"], "forward does not run that module. Stages can end with one"),
        (["act", "out"], "forward runs that module 2 times"),
        (["two", "out"], "1 earlier result: that of relu in layer 'act'"),
        (
            ["three", "out"],
            "2 earlier results: that of relu in layer 'act' .*; that of relu in layer 'act'",
        ),
        (2, "they can end with one alone"),
    ],
)
def test_stages_that_skips_cross_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        fq.with_stages(Skips(), stages).resolve((ROW,))


def test_nested_stages_are_refused() -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(6, 4), nn.ReLU()), nn.Linear(4, 4), nn.Linear(4, 3))
    with pytest.raises(TraceError, match=r"'0\.0' is nested in '0'\. Name modules"):
        fq.with_stages(net, ["0.0", "0", "1"]).resolve((ROW,))


@pytest.mark.parametrize("stages", [0, -1, True, [], [1, 2], ["a"], 2.5, {"a"}])
def test_requests_that_are_no_stages_are_refused(stages: Any) -> None:
    with pytest.raises(ConfigError, match="would work"):
        fq.with_stages(Net(), stages)


def test_a_growth_that_is_not_declared_is_refused() -> None:
    with pytest.raises(
        TraceError, match=r"'symetric' of UNet was asked for\. Did you mean 'symmetric'"
    ):
        fq.with_stages(UNet(2, width=4, depth=2), "symetric").resolve((torch.randn(1, 1, 8, 8),))
    with pytest.raises(TraceError, match="it declares one growth that has no name"):
        fq.with_stages(Declares(), "norm").resolve((ROW,))


def test_stages_that_a_module_claims_to_run_itself_need_a_method() -> None:
    net = Net()
    net.stage_ends = 3  # type: ignore[assignment]
    with pytest.raises(TraceError, match="has no method forward_stage"):
        fq.with_stages(net).resolve((ROW,))


class Runs(Net):
    """A module that runs two stages itself. The first has another output than the module."""

    stage_ends = 2

    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        return self(x) if stage > 1 else self.a(x)


def test_stages_that_a_module_runs_itself_must_have_its_output() -> None:
    message = (
        r"Runs declares 2 stages .*; forward_stage\(1, …\) returns .* \(3, 5\)\. .*, \(3, "
        r"3\), would work"
    )
    with pytest.raises(TraceError, match=message):
        fq.with_stages(Runs()).resolve((ROW,))


class Fails(Runs):
    def forward_stage(self, stage: int, x: Tensor) -> Tensor:
        raise IndexError("no such stage")


def test_a_stage_that_does_not_run_is_refused() -> None:
    with pytest.raises(TraceError, match=r"Fails does not run on tensors .*: no such stage"):
        fq.with_stages(Fails()).resolve((ROW,))


def test_a_family_takes_stages_as_a_list() -> None:
    family = fq.trace(Net, ROW)
    assert family.staged(["a", "b"]) is family.staged(("a", "b"))
    assert family.staged(["a", "b"]).variants == (WHOLE, "stage1")


def test_a_name_that_stages_need_must_be_free() -> None:
    net = Net()
    net.extract = nn.Linear(1, 1)
    with pytest.raises(TraceError, match="an attribute 'extract' already"):
        fq.with_stages(net, 2).resolve((ROW,))
    with pytest.raises(ConfigError, match="has stages already"):
        fq.with_stages(cast(Any, fq.with_stages(Net(), 2)), 2)


class Recurrent(nn.Module):
    """It has no module that returns one tensor but the last."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 4, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.cells(x)
        logits: Tensor = self.out(hidden[:, -1])
        return logits


@pytest.mark.parametrize(
    ("module", "inputs"), [(Net(), ROW), (Recurrent(), ROW[:, None])], ids=["net", "recurrent"]
)
def test_one_stage_is_the_module_itself(module: nn.Module, inputs: Tensor) -> None:
    made = grown(module.eval(), inputs, 1)
    assert made.variants == ()
    assert list(made.state_dict()) == list(module.state_dict())
    assert torch.equal(made(inputs), module(inputs))
    family = fq.trace(fq.with_stages(module, 1), inputs)
    assert set(family.parts["stage1"]) == set(family.layout.dims)


def test_a_module_without_any_cut_is_refused() -> None:
    with pytest.raises(TraceError, match="no stage can end in it"):
        fq.with_stages(Recurrent(), 2).resolve((ROW[:, None],))
    with pytest.raises(TraceError, match="that module does not return one tensor"):
        fq.with_stages(Recurrent(), ["cells", "out"]).resolve((ROW[:, None],))
