"""Unions: names, axes, weights and costs of several architectures in one family, and errors."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.axes import write
from fedquilt.errors import SubmodelError, TraceError
from fedquilt.family.build import blueprint
from fedquilt.family.layout import Layout
from fedquilt.family.net import Pass
from fedquilt.family.nets import Nets
from fedquilt.family.variants import joined
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Objective, Passes
from fedquilt.round.training.view import View
from tests.conftest import Perceptron

EXAMPLE = torch.zeros(2, 4)
PAIR = joined("whole", "deep")
STEP = fq.methods.api.TrainingStep(batch_size=8, slots=0)


class Deep(nn.Module):
    """Three linear layers with a norm: 4 inputs, 5 and 7 hidden, 3 classes."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 7)
        self.last = nn.Linear(7, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.norm(self.first(x))))))


@pytest.fixture
def deep() -> fq.Family:
    return fq.trace(Deep, EXAMPLE)


@pytest.fixture
def both(perceptron: fq.Family, deep: fq.Family) -> fq.Family:
    return fq.union({"flat": perceptron, "deep": deep})


# --- names, axes and members --------------------------------------------------------------------


def test_weights_and_axes_have_the_name_of_their_net_except_the_class_axis(both, perceptron, deep):
    assert both.axes["flat.first.weight"] == "flat.first 4"
    assert both.axes["deep.last.weight"] == "class deep.second"
    assert len(both.axes) == len(perceptron.axes) + len(deep.axes)
    assert both.num_classes == 3
    assert both.variants == ("whole", "deep")
    assert both.layout.weights("whole") == tuple(f"flat.{name}" for name in perceptron.layout.dims)
    assert both.layout.weights(PAIR) == tuple(both.layout.dims)


def test_parts_are_merged_and_every_net_is_one(both):
    assert both.parts["norm"] == tuple(
        f"deep.norm.{name}" for name in ("weight", "bias", "running_mean", "running_var")
    )
    assert both.parts["deep"] == both.layout.weights("deep")
    assert both.parts["flat"] == both.layout.weights("whole")


def test_a_member_has_the_axes_of_its_own_nets(both):
    assert both.whole.sizes == {"flat.first": 6}
    assert both.fit(fq.Budget(share=0.5), variant="deep").sizes == {
        "deep.first": 2,
        "deep.second": 3,
    }
    assert both.at(PAIR).whole.sizes == {"flat.first": 6, "deep.first": 5, "deep.second": 7}


def test_the_first_net_can_be_chosen_by_its_name(both):
    assert both.at("flat") is both.at("whole")
    assert both.at(joined("flat", "deep")) is both.at(PAIR)
    assert both.member(both.at("deep").whole).at("flat").arch == both.whole


def test_a_variant_that_is_no_net_is_refused(both):
    with pytest.raises(
        SubmodelError,
        match="the variant 'wide' was asked for; the model was traced with 'whole', 'deep'",
    ):
        both.at("wide")


def test_the_layout_survives_json_and_one_net_has_the_layout_that_was_traced(
    both, perceptron, deep
):
    again = Layout.from_json(both.layout.to_json())
    assert again == both.layout
    assert again.fingerprint == both.layout.fingerprint
    assert both.layout.restricted("deep") == deep.layout
    assert both.layout.restricted("whole") == perceptron.layout
    swapped = fq.union({"deep": deep, "flat": perceptron})
    assert swapped.layout.fingerprint != both.layout.fingerprint


def test_attributes_and_ties_belong_to_their_net(language, perceptron):
    """Attention has sizes as attributes, and a language model ties its embedding to its outputs."""
    layout = fq.union({"one": language}).layout
    assert layout.restricted("whole") == language.layout
    assert set(layout.attributes) == {f"one.{path}" for path in language.layout.attributes}
    assert set(layout.ties) == {f"one.{name}" for name in language.layout.ties}
    assert {write((size,)) for size in layout.attributes.values()} <= {
        f"one.{axis}" for axis in language.layout.axes
    }


# --- weights and modules ------------------------------------------------------------------------


def test_the_first_net_starts_from_the_seed_and_other_nets_from_streams_of_their_own(
    perceptron, deep
):
    union = fq.union({"flat": perceptron, "a": deep, "b": fq.trace(Deep, EXAMPLE)})
    weights = union.init(3)
    for name, value in perceptron.init(3).items():
        assert torch.equal(weights[f"flat.{name}"], value)
    assert not torch.equal(weights["a.first.weight"], weights["b.first.weight"])
    pair = fq.union({"other": fq.trace(Perceptron, EXAMPLE), "a": fq.trace(Deep, EXAMPLE)})
    # whatever the other nets draw
    assert torch.equal(pair.init(3)["a.first.weight"], weights["a.first.weight"])
    assert not torch.equal(union.init(4)["a.first.weight"], weights["a.first.weight"])


def test_a_traced_module_keeps_its_weights_for_every_seed(perceptron):
    module = Deep()
    union = fq.union({"flat": perceptron, "deep": fq.trace(module, EXAMPLE)})
    for seed in (0, 5):
        assert torch.equal(union.init(seed)["deep.last.weight"], module.last.weight)
    seeded = union.seeded(5)
    assert torch.equal(seeded.init(0)["flat.first.weight"], union.init(5)["flat.first.weight"])


@pytest.mark.parametrize(("variant", "kind"), [("whole", Perceptron), ("deep", Deep)])
def test_a_member_is_the_users_module_with_the_names_of_the_user(variant, kind, both):
    module = both.module(both.fit(fq.Budget(share=0.5), variant=variant))
    assert type(module) is kind
    assert module.state_dict().keys() == kind().state_dict().keys()
    whole = both.module(both.at(variant).whole)
    whole.load_state_dict(kind().state_dict())


def test_a_cut_net_of_a_union_equals_the_cut_net_alone(both, deep):
    union, state = both, both.init(0)
    alone = {
        name.removeprefix("deep."): value
        for name, value in state.items()
        if name.startswith("deep.")
    }
    inputs = torch.randn(4, 4)
    for share in (1.0, 0.5):
        budget = fq.Budget(share=share)
        ours = union.module(union.fit(budget, variant="deep"), state).eval()
        theirs = deep.module(deep.fit(budget), alone).eval()
        assert torch.equal(ours(inputs), theirs(inputs))


def test_a_net_is_compared_with_its_module_in_every_variant(both):
    modes = [Pass(train=True, statistics="track"), Pass(statistics="stored")]
    for variant in ("whole", "deep", PAIR, joined("deep", "whole")):
        both.member(both.at(variant).whole).check_net(modes)


def test_building_one_net_copies_no_other(both, monkeypatch):
    copied: list[str] = []

    def watched(module, make):
        copied.extend(name for name, _ in module.named_children())
        return blueprint(module, make)

    monkeypatch.setattr("fedquilt.family.build.blueprint", watched)
    both.member(both.fit(fq.Budget(share=0.4), variant="deep")).net  # noqa: B018  # it is built when it is asked for
    both.module(both.whole)
    assert copied == ["deep", "flat"]


def test_copies_of_a_union_choose_independently():
    nets = Nets({"flat": Perceptron(), "deep": Deep()})
    other = copy.deepcopy(nets)
    other.choose("deep")
    assert type(nets.extract()) is Perceptron
    assert type(other.extract()) is Deep


# --- costs --------------------------------------------------------------------------------------


def test_a_pair_costs_what_both_nets_cost(both):
    first, second, pair = (
        both.cost(both.at(variant).whole, STEP) for variant in ("whole", "deep", PAIR)
    )
    assert first.macs == 4 * 6 + 6 * 3
    assert second.macs == 4 * 5 + 5 * 7 + 7 * 3
    for name in ("macs", "params", "bytes", "memory"):
        assert getattr(pair, name) == getattr(first, name) + getattr(second, name)
    # they run one after the other
    assert pair.activations == max(first.activations, second.activations)
    member = both.member(both.at(PAIR).whole)
    parts = [both.member(both.at(variant).whole) for variant in ("whole", "deep")]
    assert member.activations(8) == sum(part.activations(8) for part in parts)


def test_a_device_that_trains_a_pair_holds_both(both):
    pair = both.at(PAIR).whole
    macs = both.cost(pair).macs
    memory = both.cost(pair, STEP).memory
    assert both.excess([pair], fq.Budget(macs=macs)) == ()
    assert both.excess([pair], fq.Budget(macs=macs - 1)) == (
        f"macs: {macs - 1} allowed, {macs} needed",
    )
    assert both.excess([pair], fq.Budget(memory=memory), STEP) == ()
    assert len(both.excess([pair], fq.Budget(memory=memory - 1), STEP)) == 1
    assert both.excess([pair], fq.Budget(share=1.0)) == ()
    assert both.excess([both.at("deep").whole], fq.Budget(share=0.5)) != ()
    assert both.excess([both.fit(fq.Budget(share=0.5), variant="deep")], fq.Budget(share=0.5)) == ()


def test_a_budget_is_fitted_by_one_net_or_by_a_pair(both):
    budget = fq.Budget(macs=70)
    assert both.cost(both.fit(budget)).macs == 42
    assert both.cost(both.fit(budget, variant="deep")).macs <= 70
    pair = both.fit(budget, variant=PAIR)
    assert both.cost(pair).macs <= 70
    assert both.width(pair) < 1


class Both(Objective):
    """Losses of both nets of a pair."""

    def nets(self, member):
        return (member.at("whole"), member.at("deep"))

    def __call__(self, view: View) -> Tensor:
        return sum(view.loss(view.logits(net)) for net in self.nets(view.member))


def test_a_step_of_both_nets_counts_each_once(both):
    member = both.member(both.at(PAIR).whole)
    step = Learner((Phase(Both()),), fq.LocalTraining(batch_size=8), 0.1).training_step(
        member, "fp32"
    )
    assert step.passes == 1
    assert sum(one.macs for one in Both().passes(member)) == 3 * member.macs
    # the net of a pair runs the first alone
    assert Passes(member).macs == 3 * both.member(both.whole).macs


def test_gradients_of_a_pair_are_those_of_separate_nets(both):
    member = both.member(both.at(PAIR).whole)
    weights = {
        name: value.double().requires_grad_()
        for name, value in both.init(0).items()
        if name in member.trainable
    }
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    held, key = torch.ones(3, dtype=torch.bool), torch.tensor(0)
    view = View(member, weights, inputs, targets, held, weights, Pass(train=True), key)
    Both()(view).backward()
    for variant, lead in (("whole", "flat."), ("deep", "deep.")):
        module = both.module(both.at(variant).whole).double().train()
        own = {
            name.removeprefix(lead): value
            for name, value in weights.items()
            if name.startswith(lead)
        }
        module.load_state_dict({**module.state_dict(), **own})
        nn.functional.cross_entropy(module(inputs), targets).backward()
        for name, weight in module.named_parameters():
            torch.testing.assert_close(weights[lead + name].grad, weight.grad, rtol=0, atol=1e-12)


def test_a_pair_may_train_one_net_alone(both):
    member = both.member(both.at(PAIR, ("deep",)).whole)
    assert all(name.startswith("deep.") for name in member.trainable)
    assert all(name.startswith("flat.") for name in member.frozen)
    assert member.trained_macs == both.member(both.at("deep").whole).macs


# --- what is refused ----------------------------------------------------------------------------


def test_an_empty_union_is_refused():
    with pytest.raises(
        TraceError, match="a union of no nets was asked for; one or more traced models"
    ):
        fq.union({})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a/b", "letters, digits"),
        ("a+b", "letters, digits"),
        ("a.b", "letters, digits"),
        ("", "letters, digits"),
        ("whole", "the name of the first net as a variant"),
        ("half", "nn.Module has an attribute of that name. half_net would work"),
        ("norm", "a part of a model has that name already"),
    ],
)
def test_names_that_cannot_be_used_are_refused(name, message, perceptron, deep):
    with pytest.raises(
        TraceError, match=f"a net named '{name.replace('+', '[+]')}' was asked for; .*{message}"
    ):
        fq.union({"first": deep, name: perceptron})


def test_two_families_with_one_name_are_refused(perceptron, deep):
    with pytest.raises(
        TraceError, match=r"a net named 'a' was asked for 2 times; .* such as a_1 and a_2"
    ):
        fq.union([("a", perceptron), ("a", deep)])


def test_nets_that_do_not_fit_each_other_are_refused(perceptron, deep):
    cases = {
        "has outputs of shape .3,., and 'b' has .4,.": fq.trace(lambda: Deep(classes=4), EXAMPLE),
        "has inputs of shape .4,. .*, and 'b' has .5,.": fq.trace(
            lambda: nn.Linear(5, 3), torch.zeros(2, 5)
        ),
        "'b' is a union itself": fq.union({"x": deep}),
        "'b' is a model with the variants whole, stage1": fq.trace(
            fq.with_stages(Deep(), ["norm", "second"]), EXAMPLE
        ),
        "'a' and 'b' have weights in common": perceptron,
    }
    for message, other in cases.items():
        with pytest.raises(TraceError, match=message):
            fq.union({"a": perceptron, "b": other})
    with pytest.raises(TraceError, match="'b' is a Deep; a traced model would work"):
        fq.union({"a": perceptron, "b": Deep()})


def test_stages_of_a_union_are_refused(both):
    for stages in (None, 2):
        with pytest.raises(TraceError, match="stages of a union of 'flat', 'deep' were asked for"):
            both.staged(stages)


def test_a_net_of_a_union_with_hidden_state_is_refused(perceptron):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.layer(x) * self.count

    union = fq.union({"flat": perceptron, "counting": fq.trace(Counting, EXAMPLE)})
    with pytest.raises(TraceError, match="Counting returns another output for the same batch"):
        union.check_stateless()
