"""A family's members: what fits a budget, what it costs, and its weights."""

from __future__ import annotations

import copy
import math
import random
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import BudgetError, TraceError
from fedquilt.family.cut import prefix
from fedquilt.methods import FedAvg
from tests.conftest import LOCAL

WHOLE = 4 * 6 + 6 + 6 * 3 + 3  # the perceptron's parameters


def hidden(family: fq.Family, **budget: float) -> int:
    return family.fit(fq.Budget(**budget)).sizes["first"]


# --- budgets ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "kept"), [(1, 6), (0.99, 5), (0.5, 3), (1 / 3, 2), (2 / 3, 4), (0.1, 1), (1e-9, 1)]
)
def test_a_share_is_rounded_down_on_every_axis_and_keeps_at_least_one_channel(
    share, kept, perceptron
):
    assert hidden(perceptron, share=share) == kept


def test_shares_that_floating_point_puts_just_below_a_channel_keep_it():
    family = fq.trace(lambda: _Wide(100), torch.zeros(2, 2))
    assert 0.29 * 100 < 29
    for percent in range(1, 101):
        assert family.fit(fq.Budget(share=percent / 100)).sizes["first"] == percent
        assert family.fit(fq.Budget(share=percent / 100), "ceil").sizes["first"] == percent


class _Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(2, width)
        self.last = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


class _Squeezing(_Wide):
    """Fails with one hidden channel, whose dimension it drops."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)).squeeze())


def test_no_member_is_narrower_than_the_least_width():
    family = fq.trace(lambda: _Squeezing(8), torch.zeros(2, 2))
    assert [family.fit(fq.Budget(share=share)).sizes["first"] for share in (1, 0.5, 0.25, 0.1)] == [
        8,
        4,
        2,
        2,
    ]
    least = family.fit(fq.Budget(share=0.1))
    assert family.module(least)(torch.zeros(3, 2)).shape == (3, 2)
    assert family.member(family.whole).nested(0.1).arch == least
    assert not family.excess([least] * 3, fq.Budget(share=0.25))  # as narrow as nets can be
    assert family.excess([family.fit(fq.Budget(share=0.5))], fq.Budget(share=0.25))
    assert family.fit(fq.Budget(params=family.count(least))) == least
    with pytest.raises(BudgetError, match=f"the smallest has {family.count(least)} parameters"):
        family.fit(fq.Budget(params=family.count(least) - 1))


def test_costs_are_counted_under_autocast_too(perceptron):
    """Engines that train in bf16 ask for them there; autocast keeps the weights it has cast."""
    half = perceptron.fit(fq.Budget(share=0.5))
    family = fq.Family(
        perceptron._module, perceptron.layout, perceptron.example_inputs, perceptron._factory
    )
    with torch.autocast("cpu", torch.bfloat16):
        assert family.cost(half).params == perceptron.count(half)


def test_ceil_keeps_more(perceptron):
    assert perceptron.fit(fq.Budget(share=0.4), "ceil").sizes["first"] == 3


@pytest.mark.parametrize("kept", range(1, 7))
def test_the_largest_member_within_a_parameter_budget(kept, perceptron):
    exactly = 4 * kept + kept + kept * 3 + 3
    assert hidden(perceptron, params=exactly) == kept
    assert hidden(perceptron, params=exactly + 7) == kept  # eight more for the next
    if kept > 1:
        assert hidden(perceptron, params=exactly - 1) == kept - 1


@pytest.mark.parametrize("kept", range(1, 7))
def test_the_largest_member_within_a_multiply_add_budget(kept, perceptron):
    assert hidden(perceptron, macs=7 * kept) == kept
    if kept > 1:
        assert hidden(perceptron, macs=7 * kept - 1) == kept - 1


def test_the_largest_member_within_a_memory_budget(residual):
    for share in (0.25, 0.5, 1.0):
        member = residual.fit(fq.Budget(share=share))
        step, memory = fq.methods.api.TrainingStep(), residual.cost(member).memory
        assert residual.fit(fq.Budget(memory=memory), step=step) == member
        if share > 0.25:
            assert (
                residual.cost(residual.fit(fq.Budget(memory=memory - 1), step=step)).memory < memory
            )


def test_several_limits_hold_together(perceptron):
    assert hidden(perceptron, share=0.5, params=1e9) == 3
    assert hidden(perceptron, share=1.0, params=20) == 2
    assert hidden(perceptron, params=1e9, macs=14) == 2


def test_a_budget_that_no_member_fits_is_refused_with_the_costs_of_the_smallest(perceptron):
    with pytest.raises(
        BudgetError, match=r"no member fits the budget params 5: the smallest has 11 parameters, 7 "
    ):
        perceptron.fit(fq.Budget(params=5))
    with pytest.raises(BudgetError, match="macs 1"):
        perceptron.fit(fq.Budget(macs=1))
    for step, needs in (
        (None, "runs in 64 bytes"),
        (fq.methods.api.TrainingStep(8, 0), "trains in 248 bytes with batches of 8"),
    ):
        with pytest.raises(
            BudgetError, match=f"memory 9: the smallest has 11 parameters, .* {needs}"
        ):
            perceptron.fit(fq.Budget(memory=9), step=step)


@pytest.mark.parametrize("groups", [4, 2])
def test_a_search_reaches_one_channel_of_one_group(groups):
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.GroupNorm(groups, 8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    family = fq.trace(nn.Sequential(*layers), torch.zeros(2, 3, 4, 4))
    for channels in range(1, 5):
        member = family.fit(fq.Budget(share=channels / 8))
        assert family.fit(fq.Budget(params=family.count(member))) == member


def test_a_search_counts_few_members(residual):
    family = fq.trace(copy.deepcopy(residual._module), residual.example_inputs)
    step = fq.methods.api.TrainingStep(nested=tuple(k / 20 for k in range(1, 20)), most=2)
    family.fit(fq.Budget(memory=family.cost(family.whole, step).memory // 2), step=step)
    assert sum(len(member._known.counts) for member in family._members.values()) <= 12


def test_nested_members_are_shares_of_the_whole_model(perceptron):
    half = perceptron.fit(fq.Budget(share=0.5))
    nested = perceptron.member(half).nested(1 / 3)
    assert nested.arch.sizes["first"] == 2
    assert list(nested.index["first"]) == [0, 1]
    assert perceptron.member(half).nested(1.0).arch == half


# --- costs --------------------------------------------------------------------------------------


def test_costs_by_hand(perceptron):
    cost = perceptron.cost(perceptron.whole, fq.methods.api.TrainingStep(batch_size=8, slots=1))
    assert cost.params == WHOLE
    assert cost.macs == 4 * 6 + 6 * 3
    assert cost.bytes == 4 * WHOLE
    # Weights, gradients and one slot; saved: the batch's inputs and its hidden activations, once.
    assert cost.memory == 3 * 4 * WHOLE + 4 * 8 * (4 + 6)
    assert (
        perceptron.cost(perceptron.whole, fq.methods.api.TrainingStep(8, slots=2)).memory
        - cost.memory
        == 4 * WHOLE
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_costs_are_in_float32_whatever_the_module_has(dtype, perceptron):
    module = copy.deepcopy(perceptron._module).to(dtype)
    family = fq.trace(module, perceptron.example_inputs[0].to(dtype))
    assert family.cost(family.whole) == perceptron.cost(perceptron.whole)


def test_inference_needs_weights_and_the_largest_activations_of_one_sample(perceptron):
    cost = perceptron.cost(perceptron.whole)
    assert cost.activations == 4 * (6 + 6)  # what the activation function reads and writes
    assert cost.inference == 4 * WHOLE + 4 * (6 + 6)


def test_a_residual_is_needed_until_it_is_added():
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(x + torch.relu(self.inner(x)))

    family = fq.trace(Residual, torch.zeros(2, 8))
    assert family.cost(family.whole).activations == 4 * (8 + 8 + 8)


def test_memory_follows_precision_passes_and_nested_nets(perceptron):
    def memory(**changes) -> int:
        return perceptron.cost(
            perceptron.whole, fq.methods.api.TrainingStep(8, 0, **changes)
        ).memory

    weights, saved = 4 * WHOLE, 4 * 8 * (4 + 6)
    assert memory() == 2 * weights + saved
    assert memory(precision="tf32") == memory()
    assert memory(precision="fp64") == 2 * memory()
    assert memory(precision="bf16") == 2 * weights + (saved + weights) // 2  # and weights in bf16
    assert memory(passes=2) == 2 * weights + 2 * saved
    half, third = 4 * 8 * (4 + 3), 4 * 8 * (4 + 2)
    assert memory(nested=(1 / 3, 0.5)) == 2 * weights + saved + half + third
    assert memory(nested=(1 / 3, 0.5), most=1) == 2 * weights + saved + half
    assert memory(nested=(1.0,)) == memory()  # no narrower than the member, and not run


def test_costs_are_a_samples_whatever_the_batch(residual):
    one, many = (
        residual.cost(residual.whole, fq.methods.api.TrainingStep(batch)) for batch in (2, 64)
    )
    assert (one.macs, one.params, one.bytes) == (many.macs, many.params, many.bytes)
    assert many.memory > one.memory


@pytest.mark.parametrize(
    "between",
    [
        lambda net, x: net.norm(x),
        lambda net, x: x + torch.zeros(len(x), 1),
        lambda net, x: 2 * x if net.training and x.max() > 0 else x,
    ],
    ids=["needs two samples", "names no device", "looks at its data"],
)
def test_costs_of_forwards_that_use_more_than_shapes(between):
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(between(self, self.first(x)))

    family = fq.trace(Odd, torch.zeros(2, 4))
    one, many = (family.cost(family.whole, fq.methods.api.TrainingStep(batch)) for batch in (1, 64))
    assert one.macs == many.macs == 4 * 6 + 6 * 3
    assert one.memory < many.memory


class Reader(nn.Module):
    """A layer between two others that reads constants in Python, as language models read their
    masks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("longest", torch.tensor(4))

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])
        if positions.max().item() >= self.longest.item():
            raise ValueError("too long")
        return self.last(torch.relu(self.first(x)))


def test_costs_of_forwards_that_read_constants_in_python():
    family = fq.trace(Reader, torch.zeros(2, 4))
    assert family.cost(family.whole).macs == 4 * 6 + 6 * 3
    half = family.cost(family.fit(fq.Budget(share=0.5)), fq.methods.api.TrainingStep(batch_size=8))
    assert half.macs == 4 * 3 + 3 * 3
    # saved of a sample: its inputs, and what ReLU gave
    assert half.memory == 3 * half.bytes + 4 * 8 * (4 + 3)


def test_costs_of_layers_that_a_draw_would_skip_count_them():
    class Skips(Reader):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            if self.training and torch.rand(1).item() < 2:
                return self.last(hidden)
            return self.last(hidden @ self.first.weight @ self.first.weight.T)

    family = fq.trace(Skips, torch.zeros(2, 4))
    assert family.cost(family.whole).macs == 3 * 4 * 6 + 6 * 3


def test_costs_grow_with_the_share(residual):
    costs = [
        residual.cost(residual.fit(fq.Budget(share=share))) for share in (0.25, 0.5, 0.75, 1.0)
    ]
    for kind in ("macs", "params", "bytes", "memory"):
        values = [getattr(cost, kind) for cost in costs]
        assert values == sorted(set(values))


def test_count_is_the_modules_own(residual, language):
    for family in (residual, language):
        for share in (1.0, 0.5, 0.25):
            member = family.fit(fq.Budget(share=share))
            module = family.module(member)
            assert family.count(member) == sum(p.numel() for p in module.parameters())
            assert family.cost(member).params == family.count(member)


# --- weights ------------------------------------------------------------------------------------


def test_a_factory_is_called_for_every_seed_and_torchs_generator_is_restored(perceptron):
    before = torch.random.get_rng_state()
    one, again, other = (perceptron.init(seed) for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(one[name], again[name]) for name in one)
    assert not torch.equal(one["first.weight"], other["first.weight"])


def test_a_module_brings_its_own_weights():
    module = _Wide(3)
    family = fq.trace(module, torch.zeros(2, 2))
    for seed in (0, 1):
        assert torch.equal(family.init(seed)["first.weight"], module.first.weight)
    family.init()["first.weight"].fill_(9)
    assert not (module.first.weight == 9).any()


def test_a_member_owns_a_copy_of_the_weights_at_its_positions(perceptron):
    state = perceptron.init(3)
    half = perceptron.module(perceptron.fit(fq.Budget(share=0.5)), state)
    assert torch.equal(half.first.weight, state["first.weight"][:3])
    assert torch.equal(half.last.weight, state["last.weight"][:, :3])
    with torch.no_grad():
        half.first.weight.fill_(9)
    assert not (state["first.weight"] == 9).any()
    assert half.first.out_features == half.last.in_features == 3


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_member_as_module_and_as_function_are_the_same(share, residual):
    arch = residual.fit(fq.Budget(share=share))
    state = residual.init(3)
    inputs = torch.randn(3, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    module = residual.module(arch, state).eval()
    cut = residual.cutter.gather(state, prefix(arch), tuple(state))
    outputs, _ = residual.member(arch).net(cut, inputs, fq.family.Pass(statistics="stored"))
    torch.testing.assert_close(outputs, module(inputs).detach())


def test_nets_and_costs_are_made_once(residual):
    arch = residual.fit(fq.Budget(share=0.5))
    assert residual.member(arch).net is residual.member(arch).net
    assert residual.cost(arch) is residual.cost(arch)


def test_a_family_lists_its_weights_by_what_they_are_for(residual):
    norms = {name for name in residual.layout.dims if "running" in name}
    assert set(residual.statistics) == norms
    assert set(residual.trainable) == {
        name for name, _ in residual.module(residual.whole).named_parameters()
    }
    assert residual.carried == ()
    assert residual.num_classes == 4
    assert residual.axes["head.linear.weight"].startswith("class ")


def test_frozen_weights_are_cut_and_not_trained(play, make_data):
    class Frozen(_Wide):
        def __init__(self) -> None:
            super().__init__(6)
            self.first.weight.requires_grad_(False)

    family = fq.trace(Frozen, torch.zeros(2, 2))
    assert family.carried == ("first.weight",)
    for engine in LOCAL:
        run = play(
            fq.methods.FedRolex(local=fq.LocalTraining()),
            family,
            make_data(family, (4, 4)),
            (0.5,),
            engine,
        )
        assert torch.equal(
            run.server.weights["first.weight"], family.init(0)["first.weight"].double()
        )
        assert not torch.equal(
            run.server.weights["first.bias"], family.init(0)["first.bias"].double()
        )
        deployed = run.deploy(fq.Budget(share=0.5))
        # the last round's window
        assert torch.equal(deployed.first.weight, run.server.weights["first.weight"][1:4])
        assert not deployed.first.weight.requires_grad


def test_weights_that_are_never_cut_are_deployed_as_precise_as_the_others(play, make_data):
    class Frozen(_Wide):
        def __init__(self) -> None:
            super().__init__(6)
            self.first.requires_grad_(False)

    family = fq.trace(Frozen, torch.zeros(2, 2), fixed=["first"])
    assert family.carried == ()
    run = play(fq.methods.FedAvg(), family, make_data(family, (4, 4)))
    model = run.deploy(fq.Budget(share=1.0))
    assert {value.dtype for value in model.parameters()} == {torch.float64}
    assert model(torch.zeros(2, 2, dtype=torch.float64)).shape == (2, family.num_classes)


def test_constants_are_the_same_in_every_process(tmp_path):
    """A run that continues in another process has the same constants."""

    class Frozen(_Wide):
        def __init__(self) -> None:
            super().__init__(6)
            self.first.requires_grad_(False)

    constants = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.random.get_rng_state()
        family = fq.trace(Frozen, torch.zeros(2, 2), fixed=["first"])
        family.save(tmp_path / "family.json")
        loaded = fq.Family.load(tmp_path / "family.json", Frozen, family.example_inputs)
        assert torch.equal(torch.random.get_rng_state(), before)
        constants += [one.module(one.whole).first.weight for one in (family, loaded)]
    assert all(torch.equal(one, constants[0]) for one in constants)


def test_a_saved_family_trains_without_tracing(tmp_path, residual, play, make_data):
    path = tmp_path / "family.json"
    residual.save(path)
    loaded = fq.Family.load(path, residual._factory, residual.example_inputs)
    assert loaded.layout == residual.layout
    assert loaded.layout.fingerprint == residual.layout.fingerprint
    data = make_data(residual, (4, 5))
    one, other = (
        play(fq.methods.HeteroFL(), family, data, (1.0, 0.5)) for family in (residual, loaded)
    )
    assert all(torch.equal(w, other.server.weights[name]) for name, w in one.server.weights.items())


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize(
    ("groups", "channels"), [(4, 12), (8, 16), (2, 24), (6, 36), (12, 12), (1, 9)]
)
def test_narrow_members_of_groups_are_within_wider_ones(groups, channels, rounding):
    """Or a column that arrives would take others away, and what is frozen would move."""
    net = nn.Sequential(
        nn.Conv2d(1, channels, 1),
        nn.GroupNorm(groups, channels),
        nn.Flatten(),
        nn.Linear(channels, 3),
    )
    family = fq.trace(net, torch.zeros(2, 1, 1, 1))
    members = [family.fit(fq.Budget(share=share / 40), rounding).sizes for share in range(1, 41)]
    for narrow, wide in pairwise(members):
        assert all(narrow[axis] <= wide[axis] for axis in narrow)
    kept = [math.prod(member.values()) for member in members]
    assert kept[-1] == channels
    assert rounding == "ceil" or all(
        have <= max(1, channels * (at + 1) // 40) for at, have in enumerate(kept)
    )


@pytest.mark.parametrize("rounding", ["floor", "ceil"])
@pytest.mark.parametrize(
    ("groups", "sizes"), [(4, (2, 8)), (2, (4, 12)), (3, (5, 7)), (8, (1, 3)), (8, (2, 4))]
)
def test_narrow_members_of_groups_with_more_outputs_than_inputs_are_within_wider_ones(
    groups, sizes, rounding
):
    into, out = (groups * size for size in sizes)
    net = nn.Sequential(
        nn.Conv2d(1, into, 1),
        nn.Conv2d(into, out, 1, groups=groups),
        nn.Flatten(),
        nn.Linear(out, 3),
    )
    family = fq.trace(net, torch.zeros(2, 1, 1, 1))
    members = [family.fit(fq.Budget(share=share / 60), rounding).sizes for share in range(1, 61)]
    for narrow, wide in pairwise(members):
        assert all(narrow[axis] <= wide[axis] for axis in narrow)


def test_members_of_groups_divide():
    """Group norm has fewer groups, or fewer channels in each."""

    class Grouped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(1, 12, 3)
            self.norm = nn.GroupNorm(4, 12)
            self.last = nn.Linear(12, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.norm(self.conv(x))).mean((2, 3)))

    family = fq.trace(Grouped, torch.zeros(2, 1, 5, 5))
    for share in (1.0, 2 / 3, 0.5, 1 / 3, 0.25, 1 / 12):
        module = family.module(family.fit(fq.Budget(share=share)))
        channels = module.conv.out_channels
        assert channels % module.norm.num_groups == 0
        assert channels <= max(1, math.floor(12 * share + 1e-9))
        assert module(torch.zeros(2, 1, 5, 5)).shape == (2, 3)


class Twice(nn.Module):
    """One convolution under two names, and a normed one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.utils.parametrizations.weight_norm(nn.Conv2d(1, 8, 3, padding=1))
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.again = self.first
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.again(self.first(self.stem(x)).relu()).relu().mean((2, 3)))


def test_shared_and_normed_layers_make_nets_and_modules():
    inputs = torch.randn(2, 1, 5, 5)
    family = fq.trace(Twice, inputs)
    member = family.fit(fq.Budget(share=0.5))
    module = family.module(member)
    assert module.again is module.first
    state = family.init()
    weights = family.cutter.gather(state, prefix(member), family.trainable)
    logits, _ = family.member(member).net(weights, inputs)
    torch.testing.assert_close(logits, module(inputs))


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.two(x)], 1)


def test_a_model_without_a_class_axis_is_reported():
    family = fq.trace(TwoOutputs, torch.zeros(2, 3))
    with pytest.raises(TraceError, match=r"TwoOutputs has no class axis.*class_dim="):
        _ = family.num_classes


def test_integers_for_a_model_of_real_numbers_are_refused_with_a_remedy():
    family = fq.trace(lambda: nn.Linear(3, 2), torch.ones(2, 3, dtype=torch.int64))
    message = (
        r"Linear does not run on the example of shape \(2, 3\), int64: RuntimeError: "
        r".*inputs\.astype\('float32'\)"
    )
    with pytest.raises(TraceError, match=message):
        _ = family.output_shape


# --- nets that remember -------------------------------------------------------------------------


class Counting(nn.Module):
    """A module that counts its forward passes. Its output may depend on the count."""

    def __init__(self, slope: float, buffer: bool) -> None:
        super().__init__()
        self.first, self.last, self.slope, self.asked = nn.Linear(4, 6), nn.Linear(6, 3), slope, 0
        if buffer:
            del self.asked
            self.register_buffer("asked", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.asked = self.asked + 1
        return self.last(torch.relu(self.first(x))) + self.slope * self.asked


def spectral() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 6)), nn.ReLU(), nn.Linear(6, 3)
    )


class Averaging(nn.Module):
    """A running mean of every channel by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.last(torch.relu(x - self.mean))


class Depths(nn.Module):
    """A module that skips its second layer at random, by Python's or NumPy's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training and random.random() + np.random.rand() < 1:
            x = x + self.second(x)
        return self.last(x)


def test_random_choices_of_python_are_no_hidden_state():
    family = fq.trace(Depths, torch.rand(2, 4))
    before = random.getstate()
    for _ in range(5):
        family.__dict__.pop("_remembers", None)
        family.check_stateless()
    assert random.getstate() == before


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Averaging, "it writes into mean"),
        (spectral, "it writes into 0.parametrizations.weight.0._"),
        (lambda: Counting(0.1, True), "it writes into asked"),
        (lambda: Counting(0.1, False), "it keeps something outside of its weights"),
    ],
)
def test_a_net_whose_output_depends_on_hidden_state_is_refused(make, what, make_data):
    family = fq.trace(make, torch.rand(2, 4))
    with pytest.raises(
        TraceError, match=f"returns another output for the same batch the second time: {what}"
    ):
        fq.prepare(FedAvg(), family, make_data(family, (6, 6)), fq.Fleet.of((1.0,), 2, 2))


def test_hidden_state_without_influence_is_lost_with_a_warning(make_data, caplog):
    family = fq.trace(lambda: Counting(0.0, True), torch.rand(2, 4))
    fq.prepare(FedAvg(), family, make_data(family, (6, 6)), fq.Fleet.of((1.0,), 2, 2))
    assert "Counting: what its forward writes into asked is not kept." in caplog.text


def test_nets_with_dropout_or_tracked_norms_are_stateless(residual, language):
    for family in (residual, language):  # batch norm, dropout
        family.check_stateless()


@pytest.mark.parametrize(
    ("model", "example", "shape"),
    [
        (nn.Linear(4, 3), torch.zeros(2, 4), (2, 3)),
        # one output is no axis, because it cannot be cut
        (nn.Linear(4, 1), torch.zeros(2, 4), (2, 1)),
        # classes come last, and are moved
        (nn.Embedding(7, 5), torch.zeros(2, 6, dtype=torch.int64), (2, 5, 6)),
    ],
)
def test_the_shape_of_the_output_has_classes_in_dimension_1(model, example, shape):
    family = fq.trace(model, example)
    assert (family.output_shape, family.num_outputs) == (shape, shape[1])


def test_an_output_without_a_dimension_for_classes_has_no_shape():
    family = fq.trace(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), torch.zeros(2, 4))
    with pytest.raises(
        TraceError, match=r"an output of shape \(2,\); \(sample, outputs\) is needed"
    ):
        _ = family.output_shape
