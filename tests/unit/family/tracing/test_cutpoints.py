"""Cut points of modules, compared with those found by hand, and stages proposed from them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedquilt.family.stages import make_plan
from fedquilt.family.tracing.cutpoints import find_cuts
from fedquilt.family.tracing.run import RecordedRun
from fedquilt.family.tracing.tracer import trace_runs
from fedquilt.models import MODELS, DenseNet


def recorded(module: nn.Module, *inputs: Tensor) -> RecordedRun:
    return trace_runs(module, inputs, "inside", None).runs[0]


def cut_names(module: nn.Module, *inputs: Tensor) -> list[str]:
    return [cut.name for cut in find_cuts(recorded(module, *inputs))]


IMAGE = torch.randn(2, 3, 16, 16)
ROW = torch.randn(2, 6)


class CodeBetween(nn.Module):
    """Activations and poolings are functions, called between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 8, 3, padding=1)
        self.out = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.first(x)), 2)
        x = F.relu(self.second(x)).mean((2, 3))
        logits: Tensor = self.out(x)
        return logits


class TiedWeights(nn.Module):
    """The last layer multiplies with the first one's weight, and a weight is read throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 4)
        self.middle = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.encode(x) * self.scale)
        hidden = self.middle(hidden) * self.scale
        return F.linear(hidden, self.encode.weight.T)


class Dense(nn.Module):
    """Every layer reads the concatenation of all before it, up to `join`."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(10, 4)
        self.join = nn.Linear(14, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        x = torch.cat([x, self.a(x)], 1)
        x = torch.cat([x, self.b(x)], 1)
        logits: Tensor = self.out(torch.relu(self.join(x)))
        return logits


class TwoBranches(nn.Module):
    """Two branches of the input meet in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 4)
        self.left = nn.Linear(4, 4)
        self.right = nn.Linear(4, 4)
        self.merge = nn.Linear(4, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        x = self.left(x) + self.right(x)
        logits: Tensor = self.out(self.merge(x))
        return logits


class ReadsInputAgain(nn.Module):
    """The input itself is read again later, which is no intermediate value; its square is one."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.c = nn.Linear(6, 6)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x) + x)
        square = x * x
        logits: Tensor = self.out(self.c(y) + square)
        return logits


class WritesThroughViews(nn.Module):
    """The output of `a` is written into a table of zeros through a view; `b` does not see it, the
    end does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 4)
        self.b = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        table = torch.zeros(2, 4)
        hidden = self.a(x)
        table[:, :2] = hidden[:, :2]
        logits: Tensor = self.out(self.act(self.b(hidden)) + table)
        return logits


@pytest.mark.parametrize(
    ("module", "inputs", "names"),
    [
        (CodeBetween(), IMAGE, ["first", "second"]),
        (TiedWeights(), ROW, ["encode", "middle"]),
        (Dense(), ROW, ["join"]),
        (TwoBranches(), ROW, ["stem", "merge"]),
        (ReadsInputAgain(), ROW, ["a", "b"]),
        (WritesThroughViews(), ROW, ["a"]),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_cut_points_are_those_found_by_hand(
    module: nn.Module, inputs: Tensor, names: list[str]
) -> None:
    assert cut_names(module, inputs) == names


def test_a_module_that_runs_twice_ends_no_stage() -> None:
    act = nn.ReLU()
    net = nn.Sequential(nn.Linear(6, 4), act, nn.Linear(4, 4), act, nn.Linear(4, 3))
    assert cut_names(net, ROW) == ["0", "2"]


def test_the_outermost_of_several_names_is_taken() -> None:
    net = nn.Sequential(nn.Sequential(nn.Sequential(nn.Linear(6, 4))), nn.Linear(4, 3))
    assert cut_names(net, ROW) == ["0"]


@pytest.mark.parametrize("name", ["unet2d", "unet3d"])
def test_there_is_no_cut_between_a_u_nets_first_skip_and_last_join(name: str) -> None:
    spec = MODELS[name]
    cuts = cut_names(spec.factory(width=4, groups=2, depth=2), spec.example())
    assert {cut.split(".")[0] + "." + cut.split(".")[1] for cut in cuts} == {
        "encoder.0",
        "decoder.0",
    }
    assert not [cut for cut in cuts if cut.startswith("decoder.0.up")]


def proposed(module: nn.Module, inputs: Tensor, count: int) -> list[str]:
    plan = make_plan(module, (inputs,), count)
    return [*(stage.end for stage in plan.stages), plan.last_end]


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("progfed_cnn", 4),
        ("convnet", 3),
        ("vgg11", 4),
        ("vgg16", 4),
        ("resnet18", 4),
        ("rescue_resnet", 4),
        ("preresnet18", 4),
        ("wide_resnet", 3),
        ("mobilenet_v2", 4),
        pytest.param("mobilenet_v3_small", 4, marks=pytest.mark.slow),
        pytest.param("resnet152", 4, marks=pytest.mark.slow),
        ("transformer_lm", 3),
    ],
)
def test_the_declared_stages_are_proposed(name: str, count: int) -> None:
    spec = MODELS[name]
    with torch.device("meta"):
        module = spec.factory()
    assert proposed(module, spec.example(), count) == list(module.stage_ends)


def test_stages_of_a_vit_and_a_densenet_are_proposed() -> None:
    with torch.device("meta"):
        vit = MODELS["vit"].factory()
        densenet = DenseNet((2, 2, 2))
    assert proposed(vit, MODELS["vit"].example(), 3) == ["blocks.1", "blocks.3", "norm"]
    # A transition ends with its pooling; the declared stages begin with it.
    assert proposed(densenet, MODELS["densenet"].example(), 3) == [
        "stages.1.1",
        "stages.2.1",
        "stages.2.3",
    ]


def test_stages_without_a_resolution_have_equal_shares_of_multiply_adds() -> None:
    wide = [nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 12), nn.Linear(12, 12)]
    net = nn.Sequential(*wide, nn.Linear(12, 3))
    # Multiply-adds 36, 36, 36, 72, 144: of two stages the first has the first four, of three 108 |
    # 72 | 144.
    assert proposed(net, ROW, 2) == ["3", "4"]
    assert proposed(net, ROW, 3) == ["2", "3", "4"]


def test_a_flat_list_of_layers_is_cut_behind_poolings_and_before_strides() -> None:
    conv = partial(nn.Conv2d, kernel_size=3, padding=1)
    layers = [
        conv(3, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        conv(4, 4),
        nn.ReLU(),
        conv(4, 4, stride=2),
        nn.ReLU(),
    ]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
    assert proposed(net, IMAGE, 3) == ["2", "4", "6"]
