"""Tracing: axes and their names, groups, heads, attributes, and errors of untraceable modules."""

from __future__ import annotations

import copy
import functools
import gc
import math
import random
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import fedquilt as fq
from fedquilt.axes import parse, write
from fedquilt.errors import TraceError
from fedquilt.family.layout import Layout
from fedquilt.family.tracing.tracer import trace_layout


def dims_of(layout: Layout) -> dict[str, str]:
    return {name: write(dims) for name, dims in layout.dims.items()}


def images(batch: int = 2, channels: int = 3, size: int = 8) -> tuple[Tensor, ...]:
    return (torch.zeros(batch, channels, size, size),)


class Small(nn.Module):
    """Two convolutions, a residual sum and a flattened classifier input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.conv2, self.conv3 = nn.Conv2d(8, 6, 3, padding=1), nn.Conv2d(6, 8, 3, padding=1)
        self.fc = nn.Linear(8 * 16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv1(x)))
        x = x + self.conv3(F.relu_(self.conv2(x)))
        return self.fc(F.max_pool2d(x, 2).flatten(1))


class Attention(nn.Module):
    """Hand-written attention with its sizes in attributes."""

    def __init__(self, width: int = 12, heads: int = 3, head_dim: int = 5) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, head_dim
        self.q, self.k, self.v = (nn.Linear(width, heads * head_dim) for _ in range(3))
        self.o = nn.Linear(heads * head_dim, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (
            p(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
            for p in (self.q, self.k, self.v)
        )
        weights = (q @ k.transpose(-2, -1) / math.sqrt(self.head_dim)).softmax(-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, self.heads * self.head_dim))


class Loose(Attention):
    """The size of a head is whatever the projections leave for it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Tokens(nn.Module):
    def __init__(self, tied: bool = True, attention: type[Attention] = Attention) -> None:
        super().__init__()
        self.embed, self.attn, self.norm = nn.Embedding(11, 12), attention(), nn.LayerNorm(12)
        self.position = nn.Parameter(torch.zeros(9, 12))
        self.head = nn.Linear(12, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position[: x.shape[1]]
        return self.head(self.norm(x + self.attn(x)))


TOKENS = (torch.zeros(2, 6, dtype=torch.long),)


# --- names and dimensions -----------------------------------------------------------------------


def test_axes_are_named_after_the_first_layer_that_makes_them() -> None:
    layout = trace_layout(Small(), images())
    assert dims_of(layout) == {
        "conv1.weight": "conv1 3 3 3",
        "conv1.bias": "conv1",
        "bn.weight": "conv1",
        "bn.bias": "conv1",
        "conv2.weight": "conv2 conv1 3 3",
        "conv2.bias": "conv2",
        "conv3.weight": "conv1 conv2 3 3",
        "conv3.bias": "conv1",
        "fc.weight": "class (conv1 16)",
        "fc.bias": "class",
        "bn.running_mean": "conv1",
        "bn.running_var": "conv1",
    }
    assert {name: (axis.size, axis.fixed) for name, axis in layout.axes.items()} == {
        "conv1": (8, False),
        "conv2": (6, False),
        "class": (5, True),
    }
    assert layout.parts["norm"] == ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    assert layout.class_dim == 1
    assert layout.notes == ()


def test_names_can_be_read_back() -> None:
    layout = trace_layout(
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5)), (torch.zeros(2, 3),)
    )
    assert dims_of(layout)["2.weight"] == "class layer.0"  # a bare 0 would be a size
    assert all(parse(write(dims)) == dims for dims in layout.dims.values())
    assert Layout.from_json(layout.to_json()) == layout


@pytest.mark.parametrize("batch", [1, 3, 6, 8, 32])
@pytest.mark.parametrize("kind", [Small, Tokens])
def test_axes_do_not_depend_on_the_batch(kind: type[nn.Module], batch: int) -> None:
    one, two = (
        (images(n) if kind is Small else (TOKENS[0][:1].expand(n, -1),)) for n in (2, batch)
    )
    assert trace_layout(kind(), one).fingerprint == trace_layout(kind(), two).fingerprint


def test_a_fingerprint_depends_on_axes_and_not_on_lines_in_files() -> None:
    layout = trace_layout(Small(), images())
    noted = replace(layout, notes=("because of cumsum in the module itself (net.py:9)",))
    wider = replace(
        layout, axes={name: replace(axis, least=2) for name, axis in layout.axes.items()}
    )
    assert noted.fingerprint == layout.fingerprint != wider.fingerprint


def test_a_tied_embedding_has_the_classes_as_its_rows() -> None:
    layout = trace_layout(Tokens(), TOKENS)
    assert dims_of(layout)["embed.weight"] == "class embed"
    assert layout.ties == {"head.weight": "embed.weight"}
    assert "head.weight" not in layout.dims
    assert layout.class_dim == 2
    untied = dims_of(trace_layout(Tokens(tied=False), TOKENS))
    assert (untied["embed.weight"], untied["head.weight"]) == ("11 embed", "class embed")


def test_a_table_of_positions_is_never_cut_along_its_length() -> None:
    assert dims_of(trace_layout(Tokens(), TOKENS))["position"] == "9 embed"


def test_the_classes_may_be_in_any_dimension() -> None:
    segment = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 1))
    assert trace_layout(segment, images()).class_dim == 1
    last = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4))
    assert dims_of(trace_layout(last, images(), class_dim=-1))["1.weight"] == "class layer.0"
    assert trace_layout(last, images(), class_dim=-1).class_dim == 3
    with pytest.raises(TraceError, match="class_dim=4"):
        trace_layout(last, images(), class_dim=4)


# --- heads, groups, coupling --------------------------------------------------------------------


def test_attention_is_cut_inside_each_head_and_queries_with_keys() -> None:
    dims = dims_of(trace_layout(Tokens(attention=Loose), TOKENS))
    assert dims["attn.q.weight"] == dims["attn.k.weight"] == "(attn.q.heads attn.q.dim) embed"
    assert dims["attn.v.weight"] == "(attn.q.heads attn.v.dim) embed"
    assert dims["attn.o.weight"] == "embed (attn.q.heads attn.v.dim)"


def test_sizes_in_attributes_are_found_and_tie_what_they_measure() -> None:
    layout = trace_layout(Tokens(), TOKENS)
    # One attribute measures queries, keys and values, so that they are as many in each member.
    assert write((layout.attributes["attn.head_dim"],)) == "attn.q.dim"
    assert dims_of(layout)["attn.v.weight"] == "(attn.q.heads attn.q.dim) embed"


def test_whole_heads_can_be_cut_instead() -> None:
    inside = trace_layout(Tokens(), TOKENS)
    whole = trace_layout(Tokens(), TOKENS, heads="whole")
    assert (inside.axes["attn.q.heads"].fixed, inside.axes["attn.q.dim"].fixed) == (True, False)
    assert (whole.axes["attn.q.heads"].fixed, whole.axes["attn.q.dim"].fixed) == (False, True)
    assert write((whole.attributes["attn.heads"],)) == "attn.q.heads"


def test_groups_know_what_is_inside_them() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1),
        nn.GroupNorm(4, 8),
        nn.Conv2d(8, 12, 1, groups=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    )
    net(*images())
    layout = trace_layout(net, images())
    assert (
        dims_of(layout)["2.weight"]
        == "(layer.0.groups layer.2.inside) (layer.0.groups.2 layer.0.inside) 1 1"
    )
    assert layout.axes["layer.0.groups"].inner == ("layer.0.inside", "layer.2.inside")
    assert layout.axes[
        "layer.0.groups.2"
    ].fixed  # between two kinds of groups: only the ends are cut
    assert write((layout.attributes["1.num_groups"],)) == "(layer.0.groups layer.0.groups.2)"


def test_depthwise_channels_are_one_axis() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=8), nn.Conv2d(8, 5, 1))
    layout = trace_layout(net, images())
    assert dims_of(layout)["1.weight"] == "layer.0 1 3 3"
    assert layout.axes["layer.0"].inner == ()


class Joined(nn.Module):
    """A group norm over a concatenation: within groups of four if the parts divide, else across
    them.
    """

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b, self.norm = (
            nn.Conv2d(3, a, 1),
            nn.Conv2d(3, b, 1),
            nn.GroupNorm((a + b) // 4, a + b),
        )
        self.out = nn.Conv2d(a + b, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.cat([self.a(x), self.b(x)], 1)))


def test_group_norm_over_a_concatenation() -> None:
    inside = dims_of(trace_layout(Joined(8, 4), images()))
    assert inside["norm.weight"] == "((a.groups + 1) a.inside)"
    assert inside["b.weight"] == "a.inside 3 1 1"
    straddling = dims_of(trace_layout(Joined(6, 10), images()))
    assert straddling["a.weight"] == "6 3 1 1"  # sound: groups that straddle are not cut


def test_coupled_axes_are_those_whose_channels_see_each_other() -> None:
    def coupled(layer: nn.Module) -> bool:
        net = nn.Sequential(nn.Linear(3, 8), layer, nn.Linear(8, 5))
        return trace_layout(net, (torch.zeros(2, 3),)).axes["layer.0"].coupled

    assert [coupled(m) for m in (nn.LayerNorm(8), nn.RMSNorm(8), nn.Softmax(1))] == [True] * 3
    assert [coupled(m) for m in (nn.BatchNorm1d(8), nn.ReLU(), nn.PReLU(8))] == [False] * 3
    layout = trace_layout(Tokens(), TOKENS)
    assert layout.axes["attn.q.dim"].coupled  # the scale is a root of its size


# --- what the user says -------------------------------------------------------------------------


def test_fixed_takes_axes_layers_and_weights() -> None:
    for name in ("conv2", "conv2.weight"):
        axes = trace_layout(Small(), images(), fixed=[name]).axes
        assert (axes["conv2"].fixed, axes["conv1"].fixed) == (True, False)
    assert all(
        axis.fixed for axis in trace_layout(Tokens(), TOKENS, fixed=["attn", "embed"]).axes.values()
    )
    with pytest.raises(
        TraceError, match=r"'cnv2' names no axis, layer or weight. Nearest: 'conv2'"
    ):
        trace_layout(Small(), images(), fixed=["cnv2"])


def test_parts_take_layers_and_weights() -> None:
    layout = trace_layout(
        Tokens(), TOKENS, parts={"head": ["head"], "rest": ["attn.q", "position"]}
    )
    assert layout.parts == {
        "norm": ("norm.weight", "norm.bias"),
        "head": ("embed.weight",),
        "rest": ("attn.q.weight", "attn.q.bias", "position"),
    }
    with pytest.raises(TraceError, match=r"parts\['body'\] names 'atn'"):
        trace_layout(Tokens(), TOKENS, parts={"body": ["atn"]})


def test_unused_weights_are_kept_and_noted() -> None:
    net = Small()
    net.extra = nn.Linear(3, 3)
    layout = trace_layout(net, images())
    assert dims_of(layout)["extra.weight"] == "3 3"
    assert "extra.weight, extra.bias" in layout.notes[0]


class Spectrum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1), nn.Conv2d(6, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.fft.fft(self.a(x), dim=1).real))


def test_an_unknown_operation_pins_what_it_touches_and_is_noted() -> None:
    layout = trace_layout(Spectrum(), images())
    assert dims_of(layout)["b.weight"] == "b 8 1 1"
    note, whole = layout.notes
    assert "_fft_r2c in the module itself" in note
    assert "test_trace.py:" in note
    assert "the outputs of a (because of _fft_r2c in the module itself (" in whole


class Patches(nn.Module):
    """Overlapping patches of a series, counted from the end as PatchTST does."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim
        self.stem, self.embed, self.head = nn.Conv1d(3, 8, 1), nn.Linear(4, 6), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.stem(x).unfold(self.dim, 4, 2)
        return self.head(self.embed(patches).mean((1, 2)))


def test_unfold_counts_dimensions_from_either_end() -> None:
    inputs = (torch.zeros(2, 3, 12),)
    layout = trace_layout(Patches(-1), inputs)
    assert dims_of(layout)["stem.weight"] == "stem 3 1"
    assert layout == trace_layout(Patches(2), inputs)


# --- what cannot be traced ----------------------------------------------------------------------


class Literal(Small):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.conv3(self.conv2(self.conv1(x))), 2)
        return self.fc(x.view(-1, 128))


def test_a_size_written_into_forward_is_named_with_its_remedy() -> None:
    remedy = (
        r"view in the module itself \(.*test_trace.py:\d+\).*use x.flatten\(1\).*fixed=\['conv3'\]"
    )
    with pytest.raises(TraceError, match=remedy):
        trace_layout(Literal(), images())
    layout = trace_layout(Literal(), images(), fixed=["conv3"])
    assert [axis.name for axis in layout.axes.values() if not axis.fixed] == ["conv1", "conv2"]


class Mixed(nn.Module):
    """Runs at any width, but a narrow member would mix its heads, because `-1` adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).view(x.shape[0], -1, 4)
        return self.b((y @ y.transpose(1, 2)).softmax(-1).matmul(y).flatten(1))


def test_a_member_that_runs_may_still_be_wrong() -> None:
    with pytest.raises(TraceError, match=r"its axes say .*fixed=\['a.dim'\]"):
        trace_layout(Mixed(), (torch.zeros(2, 6),))
    assert trace_layout(Mixed(), (torch.zeros(2, 6),), heads="whole").axes["a.outer"].size == 4


class Branching(Small):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x if x.mean() > 0 else x)


class Listing(Small):
    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)}


def test_reading_data_in_python_is_reported() -> None:
    with pytest.raises(
        TraceError, match=r"Branching reads a tensor's values in Python .*test_trace.py:\d+"
    ):
        trace_layout(Branching(), images())


class Wide(nn.Linear):
    def __init__(self, hidden, bias=True):
        super().__init__(4, hidden, bias)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (
            Wide,
            r"Wide was given to be traced, which needs the argument hidden\..* lambda: "
            r"Wide\(hidden=…\)",
        ),
        (5, "int 5 was given to be traced; a module is needed"),
        (lambda: 5, "returned a int; an nn.Module is needed"),
    ],
)
def test_objects_that_make_no_module_are_refused(factory, message):
    with pytest.raises(TraceError, match=message):
        fq.trace(factory, torch.zeros(2, 4))


def test_several_outputs_are_refused() -> None:
    with pytest.raises(TraceError, match="Listing returns a dict"):
        trace_layout(Listing(), images())


def test_inputs_that_do_not_fit_are_reported() -> None:
    with pytest.raises(TraceError, match=r"does not run .*layer 'conv1'"):
        trace_layout(Small(), images(channels=4))


class Masked(nn.Module):
    """torch looks into the mask to see whether it is causal: a constant, so members do the same."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            layer = nn.TransformerEncoderLayer(12, 3, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
        self.embed, self.head = nn.Embedding(7, 12), nn.Linear(12, 7)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x), mask=self.mask))


def test_python_may_read_constants() -> None:
    layout = trace_layout(Masked(), TOKENS)
    assert dims_of(layout)["embed.weight"] == "7 (embed.heads embed.dim)"
    assert "reads a constant in layer 'encoder'" in layout.notes[0]


# --- manners ------------------------------------------------------------------------------------


def test_the_module_does_not_change() -> None:
    net = Tokens().train()
    net.norm.eval()
    seen: list[Any] = []
    handle = net.attn.register_forward_pre_hook(lambda *_: None)
    before, numbers = (
        copy.deepcopy(net.state_dict()),
        {k: v for k, v in vars(net.attn).items() if type(v) is int},
    )
    state = torch.random.get_rng_state()
    trace_layout(net, TOKENS)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert (net.training, net.norm.training, net.attn.training) == (True, False, True)
    assert all(torch.equal(before[name], weight) for name, weight in net.state_dict().items())
    assert {k: v for k, v in vars(net.attn).items() if type(v) is int} == numbers
    assert list(net.attn._forward_pre_hooks) == [handle.id]
    assert not net.attn._forward_hooks
    assert net.head.weight is net.embed.weight
    assert seen == []


def test_tracing_needs_no_data() -> None:
    with torch.device("meta"):
        net, example = Small(), images()
    assert trace_layout(net, example) == trace_layout(Small(), images())


def test_tracing_twice_gives_the_same_layout() -> None:
    assert trace_layout(Tokens(), TOKENS).to_json() == trace_layout(Tokens(), TOKENS).to_json()


@functools.lru_cache
def positions(length: int, width: int) -> Tensor:
    return torch.arange(length)[:, None] / torch.arange(1, width + 1)


class Tables:
    """A user's object that is no module, so that copies of the module share it."""

    cached: dict[int, tuple[Tensor, ...]] = {}  # noqa: RUF012
    latest: Tensor | None = None
    seen: list[Tensor] = []  # noqa: RUF012


class Cached(nn.Module):
    """Keeps tables in three kinds of caches, and its results in a list and a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.inner, self.head = nn.Embedding(7, 8), nn.Linear(8, 6), nn.Linear(6, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) + positions(*self.embed(x).shape[1:])
        y = self.inner(y)
        width = y.shape[2]
        if width not in Tables.cached:
            Tables.cached[width] = (torch.linspace(0.5, 1.5, width), torch.ones(width))
        if Tables.latest is None or len(Tables.latest) != width:
            Tables.latest = torch.full((width,), 0.1)
        Tables.seen.append(y)
        Tables.cached[0] = (y, y)
        return self.head(y * Tables.cached[width][1] + Tables.latest)


def test_caches_of_a_forward_have_data_after_tracing() -> None:
    """A cache that outlives the module holds no tensor without data, and none that autograd
    refuses.
    """
    # those of an earlier torch.export
    before = [held for held in gc.get_objects() if type(held) is FakeTensor]
    layout = trace_layout(Cached(), TOKENS)
    assert dims_of(layout)["inner.weight"] == "6 8"  # tables in a cache are constants
    net = Cached()
    net(TOKENS[0]).sum().backward()
    assert net.inner.weight.grad is not None
    table = positions(6, 8)
    assert torch.equal(table[3], torch.tensor([3 / n for n in range(1, 9)]))
    assert Tables.latest is not None
    kept = [table, Tables.latest, *Tables.cached[6], *Tables.seen]
    assert not any(isinstance(tensor, FakeTensor) or tensor.is_inference() for tensor in kept)
    after = [held for held in gc.get_objects() if type(held) is FakeTensor]
    assert {id(held) for held in after} <= {id(held) for held in before}


class Remembered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        Tables.latest = self.fc(x)
        return Tables.latest


def test_results_that_outlive_the_module_are_refused() -> None:
    with pytest.raises(
        TraceError, match=r"keeps what it computes .*linear in layer 'fc' .*test_trace.py:\d+"
    ):
        trace_layout(Remembered(), (torch.zeros(2, 6),))
    Tables.latest = None


def test_an_error_may_be_its_own_cause() -> None:
    class Raises(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            error = ValueError("never")
            raise error from error

    with pytest.raises(TraceError, match="never"):
        trace_layout(Raises(6, 5), (torch.zeros(2, 6),))


# --- against Torch-Pruning ----------------------------------------------------------------------


class Concatenated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 6, 1)
        self.norm, self.c, self.fc = nn.BatchNorm2d(14), nn.Conv2d(14, 7, 1), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.norm(torch.cat([x, self.b(x)], 1))
        return self.fc(self.c(x).mean((2, 3)))


@pytest.mark.parametrize("kind", [Small, Concatenated])
def test_channel_groups_agree_with_torch_pruning(kind: type[nn.Module]) -> None:
    pruning = pytest.importorskip("torch_pruning")
    net = kind().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = pruning.DependencyGraph().build_dependency(net, images()[0])
    layout = trace_layout(net, images())
    names = {layer: name for name, layer in net.named_modules()}
    for axis in layout.axes.values():
        if axis.fixed:
            continue
        root = net.get_submodule(axis.name)
        group = graph.get_pruning_group(root, pruning.prune_conv_out_channels, idxs=[0])
        theirs = set()
        for dependency, _ in group:
            layer = dependency.target.module
            if layer in names:
                inputs = "in_channels" in dependency.handler.__name__ and not isinstance(
                    layer, nn.BatchNorm2d
                )
                theirs.add((names[layer], int(inputs)))
        ours = {
            (name.removesuffix(".weight"), dim)
            for name, dims in layout.dims.items()
            for dim, expr in enumerate(dims)
            if name.endswith(".weight")
            and axis.name in write((expr,)).replace("(", " ").replace(")", " ").split()
        }
        assert theirs == ours


# --- what only training computes, and what the output does not need -----------------------------


class TwoHeads(nn.Module):
    """A second head that is trained along (`aux`), and one whose output nobody takes (`spare`)."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.head, self.aux, self.spare = (nn.Linear(8, 5) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x).relu()
        self.spare(x).softmax(-1)
        return self.head(x) + self.aux(x) if self.training else self.head(x)


def test_everything_that_runs_is_cut_together() -> None:
    """In evaluation or in training, needed for the output or not: a member has to run it."""
    layout = trace_layout(TwoHeads(), (torch.zeros(2, 6),))
    dims = dims_of(layout)
    assert dims["head.weight"] == dims["aux.weight"] == "class body"
    assert dims["spare.weight"] == "spare body"
    assert not layout.notes


class Augmented(nn.Module):
    """Skips layers and masks positions at random, in training."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw
        self.body, self.mask = nn.Linear(6, 8), nn.Parameter(torch.zeros(8))
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.training:
            x[torch.tensor(np.random.rand(*x.shape[:2]) < 0.5)] = self.mask
        for layer in self.layers:
            if not self.training or self.draw() < 0.5:
                x = x + layer(x)
        return self.head(x)


@pytest.mark.parametrize(
    "draw", [random.random, lambda: torch.rand(1).item(), lambda: torch.rand(())]
)
def test_random_choices_in_training_are_followed(draw: Any) -> None:
    module = Augmented(draw)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    layout = trace_layout(module, (torch.zeros(2, 3, 6),), class_dim=2)
    assert dims_of(layout)["mask"] == "body"
    assert not layout.notes
    assert (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        torch.get_rng_state().tolist(),
    ) == states


def test_training_that_cannot_be_followed_is_noted() -> None:
    layout = trace_layout(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)), (torch.zeros(1, 6),)
    )
    (note,) = layout.notes
    assert note.startswith("followed in evaluation only, since in training (layer '1', ")
    assert "Expected more than 1 value per channel" in note


# --- sizes that Python compares -----------------------------------------------------------------


class ResidualWhereItFits(nn.Module):
    """Adds the input where it has as many channels, which a cut may bring about or undo."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 12)])
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = x + y if x.shape == y.shape else y
        return self.head(x)


def test_members_that_would_take_another_branch_are_refused_with_a_remedy() -> None:
    inputs = (torch.zeros(2, 4),)
    with pytest.raises(TraceError, match="takes another branch") as caught:
        trace_layout(ResidualWhereItFits(), inputs)
    assert "take the decision in __init__" in str(caught.value)
    # As wide as the input only by a cut: no share that the check tries by itself would show it.
    assert "fixed=['layers.2', 'layers.0']" in str(caught.value)
    layout = trace_layout(ResidualWhereItFits(), inputs, fixed=["layers.2", "layers.0"])
    assert all(axis.fixed for axis in layout.axes.values())


class ResidualByLayer(ResidualWhereItFits):
    """Asks the layers instead of the tensors."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if layer.in_features == layer.out_features else layer(x)
        return self.head(x)


class ResidualByPlan(ResidualWhereItFits):
    """The remedy: decided once."""

    def __init__(self) -> None:
        super().__init__()
        self.fits = [layer.in_features == layer.out_features for layer in self.layers]

    def forward(self, x: Tensor) -> Tensor:
        for layer, fits in zip(self.layers, self.fits, strict=True):
            x = x + layer(x) if fits else layer(x)
        return self.head(x)


def test_sizes_of_layers_are_compared_as_those_of_tensors() -> None:
    with pytest.raises(TraceError, match="takes another branch"):
        trace_layout(ResidualByLayer(), (torch.zeros(2, 4),))
    layout = trace_layout(ResidualByPlan(), (torch.zeros(2, 4),))
    assert [name for name, axis in layout.axes.items() if not axis.fixed] == [
        "layers.0",
        "layers.2",
    ]


class Pooling(nn.Module):
    """As Hiera's blocks: two widths in attributes, one of which is only compared."""

    def __init__(self, width: int, wider: int) -> None:
        super().__init__()
        self.width, self.wider = width, wider
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, wider)
        if width != wider:
            self.proj = nn.Linear(width, wider)

    def forward(self, x: Tensor) -> Tensor:
        skipped = x
        x = self.norm(x)
        if self.width != self.wider:
            skipped = self.proj(x).view(x.shape[0], -1, self.wider)
        return skipped + self.qkv(x).reshape(x.shape[0], -1, self.wider)


def test_an_attribute_that_follows_no_axis_is_compared_as_the_constant_it_is() -> None:
    """At 24 of 48 channels the first block would find its widths equal; no other width shows it."""
    inputs = (torch.zeros(2, 5, 24),)
    net = nn.Sequential(Pooling(24, 48), Pooling(48, 48), nn.Linear(48, 7))
    with pytest.raises(TraceError, match=r"takes another branch .*test_trace.py:\d+") as caught:
        trace_layout(net, inputs, class_dim=2)
    assert "fixed=['0.proj']" in str(caught.value)
    layout = trace_layout(net, inputs, class_dim=2, fixed=["0.proj"])
    assert all(axis.fixed for axis in layout.axes.values())


class Switching(nn.Module):
    """Takes another branch at one width, with the same operations on the same shapes."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.width, self.limit = what, 8, 6  # 6 of 8 at a share of 3/4
        self.body, self.other, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        one, two = self.body(x), self.other(x).view(-1, self.width)
        differs = self.width != self.limit
        if self.what == "factor":
            return self.head(one + two * (2 if differs else 3))
        if self.what == "tensor":
            return self.head(torch.relu(one if differs else two) + two)
        weight = self.body.weight if differs else self.other.weight
        return self.head(one + two + F.linear(x, weight))


@pytest.mark.parametrize("what", ["factor", "tensor", "weight"])
def test_another_branch_with_equal_shapes_is_refused(what: str) -> None:
    net, inputs = Switching(what), (torch.zeros(2, 6),)
    with pytest.raises(
        TraceError, match=r"takes another branch .*test_trace.py:\d+.*fixed=\['body'\]"
    ):
        trace_layout(net, inputs)
    net.limit = 9  # no member is that wide
    assert not trace_layout(net, inputs).axes["body"].fixed


# --- axes of which one channel is too few -------------------------------------------------------


class Standardized(nn.Conv2d):
    """A convolution with weights of mean 0 and variance 1, as in BiT, which needs two inputs."""

    def __init__(self, *sizes: int, by_hand: bool) -> None:
        super().__init__(*sizes)
        self.by_hand = by_hand

    def forward(self, x: Tensor) -> Tensor:
        if self.by_hand:
            centered = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            return F.conv2d(x, centered / self.weight.std((1, 2, 3), keepdim=True), self.bias)
        rows = self.weight.reshape(1, self.out_channels, -1)
        return F.conv2d(
            x, F.batch_norm(rows, None, None, training=True).reshape_as(self.weight), self.bias
        )


class Squeezed(nn.Module):
    """Drops the dimensions of one position, and with them a single channel."""

    def forward(self, x: Tensor) -> Tensor:
        return x.squeeze()


def narrow_nets() -> dict[str, nn.Module]:
    pool = nn.AdaptiveAvgPool2d(1)
    return {
        "batch_norm": nn.Sequential(
            nn.Conv2d(3, 8, 1), Standardized(8, 5, 1, by_hand=False), pool, nn.Flatten()
        ),
        "std": nn.Sequential(
            nn.Conv2d(3, 8, 1), Standardized(8, 5, 1, by_hand=True), pool, nn.Flatten()
        ),
        "squeeze": nn.Sequential(nn.Conv2d(3, 8, 1), pool, Squeezed(), nn.Linear(8, 5)),
    }


@pytest.mark.parametrize("call", ["batch_norm", "std", "squeeze"])
def test_an_axis_that_needs_two_channels_keeps_two(call: str) -> None:
    layout = trace_layout(narrow_nets()[call], images())
    assert (layout.axes["layer.0"].fixed, layout.axes["layer.0"].least) == (False, 2)
    (note,) = layout.notes
    assert note.startswith(
        f"members have at least 2 channels of layer.0: with one, {call} in layer "
    )
    assert "test_trace.py:" in note
    assert Layout.from_json(layout.to_json()) == layout
    assert trace_layout(Small(), images()).axes["conv1"].least == 1


class Halved(nn.Module):
    """Needs an even number of channels, so that two are enough and three are not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return self.head(x.view(2, -1) if x.shape[1] % 2 else x)


def test_a_width_of_two_that_works_by_being_even_is_no_least_width() -> None:
    with pytest.raises(TraceError, match=r"fixed=\['body'\]"):
        trace_layout(Halved(), (torch.zeros(2, 6),))


# --- modules that are no plain networks ---------------------------------------------------------


class Pair(TwoHeads):
    def forward(self, x: Tensor) -> Any:
        x = self.body(x)
        return (self.head(x), self.aux(x)) if self.training else self.head(x)


def test_several_outputs_in_training_are_refused() -> None:
    with pytest.raises(TraceError, match="Pair returns a tuple in training, not one tensor"):
        trace_layout(Pair(), (torch.zeros(2, 6),))


def test_wrapped_and_compiled_modules_are_refused_by_name() -> None:
    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 5))
    with pytest.raises(
        TraceError, match=r"is a DataParallel: trace the network inside it, its `.module`"
    ):
        trace_layout(nn.DataParallel(net), (torch.zeros(2, 6),))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(net)
    with pytest.raises(
        TraceError, match=r"compiled by torch\.jit.* Trace the module it was compiled from"
    ):
        trace_layout(scripted, (torch.zeros(2, 6),))


class ToNumpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(np.tanh(self.fc(x).numpy()))


def test_data_that_leaves_torch_is_reported() -> None:
    with pytest.raises(
        TraceError, match=r"ToNumpy reads a tensor's values in Python \(.*test_trace\.py:\d+\)"
    ):
        trace_layout(ToNumpy(), (torch.zeros(2, 6),))


class Accumulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.fc1(x).cumsum(1))


def test_channels_whose_order_matters_stay_whole_and_are_noted() -> None:
    """A rolling window that wraps keeps channels in another order."""
    layout = trace_layout(Accumulated(), (torch.zeros(2, 6),))
    assert dims_of(layout)["fc1.weight"] == "8 6"
    (note,) = layout.notes
    assert note.startswith(
        "no axis reaches the outputs of fc1 (because of cumsum in the module itself ("
    )
    assert re.search(r"test_trace.py:\d+\)\): every member has all of them", note)


class Coordinates(nn.Module):
    """As Swin's second version: a layer turns (y, x) coordinates in a table into a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.rand(9, 2))
        self.bias = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 4))
        self.body, self.head = nn.Linear(6, 4), nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x) + self.bias(self.table).mean(0))


def test_inputs_that_no_layer_produces_stay_whole_and_are_noted() -> None:
    layout = trace_layout(Coordinates(), (torch.zeros(2, 6),))
    assert dims_of(layout)["table"] == "9 2"
    assert dims_of(layout)["bias.0.weight"] == "bias.0 2"
    assert dims_of(layout)["bias.2.weight"] == "body bias.0"
    assert "no layer produces the 2 channels that table carries: never cut" in layout.notes
