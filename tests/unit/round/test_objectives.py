"""Objectives state what they cost, and a wrapper from a user's file costs what it wraps."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import pytest
import torch
from torch.func import grad
from torch.utils.flop_counter import FlopCounterMode

import fedquilt as fq
from fedquilt.config.reading import read
from fedquilt.config.toml import assign
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.family.net import Pass
from fedquilt.methods import FedAvg, HeteroFL
from fedquilt.round.federation import World
from fedquilt.round.training.adversarial import Adversarial
from fedquilt.round.training.attacks import PGD, AdversarialTraining
from fedquilt.round.training.distillation import Distilled
from fedquilt.round.training.filters import PartWeights
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import (
    RECEIVED,
    MaskedCrossEntropy,
    Objective,
    Passes,
    Proximal,
    Summed,
    TaskLoss,
    Wrapping,
    apart,
)
from fedquilt.round.training.view import View
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.terms import Job
from tests.conftest import assert_same

SAMPLES = 5
ATTACK = AdversarialTraining(attack=PGD(steps=7, low=-9, high=9))


@dataclass(frozen=True)
class Doubled(Wrapping):
    """A wrapper that states nothing of its own."""

    def __call__(self, view: View) -> torch.Tensor:
        return 2 * self.objective(view)


@dataclass(frozen=True)
class Mirrored(Wrapping):
    """A wrapper that runs what it wraps on the batch and on its negative, and states that."""

    def passes(self, member):
        return tuple(one.repeated(2) for one in self.objective.passes(member))

    def __call__(self, view: View) -> torch.Tensor:
        return self.objective(view) + self.objective(view.through(0.0, inputs=-view.inputs))


OBJECTIVES: dict[str, Objective] = {
    "cross-entropy": TaskLoss(),
    "nested": TaskLoss(0.5),
    "masked": MaskedCrossEntropy(),
    "proximal": Proximal(TaskLoss(), 0.1),
    "summed": Summed((TaskLoss(), TaskLoss(0.5), Distilled(0.5))),
    "adversarial": Adversarial(TaskLoss(), ATTACK),
    "attacked alone": Adversarial(TaskLoss(), replace(ATTACK, weight=1.0)),
    "nested adversarial": Adversarial(MaskedCrossEntropy("client", 0.5), ATTACK, TaskLoss(0.5)),
    "summed adversarial": Summed((Adversarial(TaskLoss(), ATTACK), TaskLoss(), TaskLoss(0.5))),
    "wrapped": Doubled(TaskLoss()),
    "wrapped adversarial": Doubled(Adversarial(TaskLoss(), ATTACK)),
    "wrapper attacked": Adversarial(Doubled(TaskLoss()), ATTACK),
    "mirrored": Mirrored(TaskLoss()),
    "mirrored adversarial": Mirrored(Adversarial(TaskLoss(), ATTACK)),
}


class NoModules(nullcontext):
    """Count without hooks on modules, because these fail in the gradients of an attack."""

    parents = frozenset({"Global"})


@pytest.mark.parametrize("name", OBJECTIVES)
def test_stated_passes_are_those_that_torch_counts(name, perceptron):
    """Equality, less one product: going back to the weights, torch leaves out the gradient of the
    samples.

    A backward pass is stated as two forward passes, one for the gradients of the weights and one
    for those of every layer's input. The first layer's input is the batch, whose gradient is only
    computed in the steps of an attack. FlopCounterMode counts a multiply-add as two operations.
    """
    objective, member = OBJECTIVES[name], perceptron.member(perceptron.whole)
    generator = torch.Generator().manual_seed(0)
    weights = perceptron.init(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    targets, held = torch.arange(SAMPLES) % 3, torch.ones(3, dtype=torch.bool)
    taught = torch.randn(SAMPLES, 3, generator=generator)

    def loss(weights):
        return objective(
            View(
                member, weights, inputs, targets, held, weights, Pass(True), torch.tensor(0), taught
            )
        )

    counter = FlopCounterMode(display=False)
    counter.mod_tracker = NoModules()
    with counter:
        grad(loss)(weights)
    stated = objective.passes(member)
    first_layer = sum(one.backward * 4 * one.net.arch.sizes["first"] for one in stated)
    assert counter.get_total_flops() == 2 * SAMPLES * (
        sum(one.macs for one in stated) - first_layer
    )


def test_a_wrapped_attack_takes_twenty_passes(perceptron):
    """Seven steps there and back, and a gradient of clean and of attacked samples, as without the
    wrapper.
    """
    whole = perceptron.member(perceptron.whole)
    for objective in (OBJECTIVES["adversarial"], OBJECTIVES["wrapped adversarial"]):
        learner = Learner((Phase(objective),), LocalTraining(), 0.1)
        assert learner.macs(whole, [1]) == 20 * whole.macs
        assert learner.training_step(whole, "fp32").passes == 2
        assert learner.changes_samples(whole)
    plain = Learner((Phase(OBJECTIVES["wrapped"]),), LocalTraining(), 0.1)
    assert plain.macs(whole, [1]) == 3 * whole.macs
    assert not plain.changes_samples(whole)


def test_objectives_of_a_sum_share_runs_on_the_batch(perceptron):
    whole = perceptron.member(perceptron.whole)
    half = whole.nested(0.5)
    assert OBJECTIVES["summed"].passes(whole) == (Passes(whole), Passes(half))
    twice = Summed((Adversarial(TaskLoss(), ATTACK),) * 2)
    # every attack is searched anew
    assert sum(one.macs for one in twice.passes(whole)) == 2 * 20 * whole.macs


def test_copies_of_the_weights_that_are_read_count_once(perceptron):
    whole = perceptron.member(perceptron.whole)
    once = Proximal(TaskLoss(), 0.1)
    for objective in (
        once,
        Doubled(once),
        Proximal(once, 0.2),
        Adversarial(once, ATTACK),
        Summed((once, once)),
    ):
        assert objective.copies == {RECEIVED}
        assert (
            Learner((Phase(objective),), LocalTraining(), 0.1).training_step(whole, "fp32").slots
            == 2
        )
    assert Proximal(TaskLoss(), 0.0).copies == frozenset()


def test_terms_that_run_the_same_nets_stay_together(perceptron):
    whole = perceptron.member(perceptron.whole)
    summed = OBJECTIVES["summed"]
    assert apart(summed, whole) == (TaskLoss(), Summed((TaskLoss(0.5), Distilled(0.5))))
    assert apart(Summed((summed, TaskLoss())), whole)[0] == Summed((TaskLoss(), TaskLoss()))
    assert apart(Doubled(summed), whole) == (Doubled(summed),)


# --- a wrapper in a user's file -----------------------------------------------------------------

MINE = """
from dataclasses import dataclass

import torch

from fedquilt.round.training.objectives import RECEIVED, Wrapping


@dataclass(frozen=True)
class Tempered(Wrapping):
    power: float = 2.0  # Power of the loss

    def __call__(self, view):
        return self.objective(view) ** self.power


@dataclass(frozen=True)
class Anchored(Wrapping):
    weight: float = 0.1  # Weight of the penalty

    @property
    def copies(self):
        return self.objective.copies | {RECEIVED}

    def __call__(self, view):
        drift = [view.weights[name] - view.received[name] for name in view.member.trainable]
        far = sum(difference.abs().sum() for difference in drift)
        return self.objective(view) + self.weight * far


class NotFrozen:
    pass
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)


def local_from(plain) -> LocalTraining:
    problems: list = []
    local = read(LocalTraining, plain, "local", problems)
    if problems:
        raise ConfigError("; ".join(f"{one.path}: {one.text}" for one in problems))
    assert read(LocalTraining, write(local), "local", problems) == local
    return local


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("attacked", [False, True], ids=["plain", "attacked"])
def test_a_wrapper_from_a_file_costs_what_it_wraps(
    attacked, engine, mine, perceptron, make_data, play
):
    plain = {
        "batch_size": 4,
        "adversarial": {"attack": {"steps": 2, "low": -9.0, "high": 9.0}} if attacked else "none",
    }
    data = make_data(perceptron, (8, 6, 6))
    runs = {}
    for name in ("none", "mine.py:Tempered", "mine.py:Anchored"):
        local = local_from({**plain, "objective": name})
        runs[name] = play(HeteroFL(local=local), perceptron, data, (1.0, 0.5), engine=engine)
        if engine != "sequential":
            assert_same(play(HeteroFL(local=local), perceptron, data, (1.0, 0.5)), runs[name])
        step = FedAvg(local=local).training_step(World(perceptron))
        assert (step.passes, step.slots) == (2 if attacked else 1, 2 if "Anchored" in name else 1)
    alone = runs.pop("none")
    for run in runs.values():
        costs = [(record.macs, record.bytes_down, record.bytes_up) for record in run.records]
        assert costs == [
            (record.macs, record.bytes_down, record.bytes_up) for record in alone.records
        ]
        assert not torch.equal(
            run.server.weights["first.weight"], alone.server.weights["first.weight"]
        )


def test_a_wrapper_is_chosen_in_a_file_with_its_options(mine):
    settings = assign(
        demo("fedavg"), ["method", "local", "objective"], {"name": "mine.py:Tempered", "power": 1.5}
    )
    local = Experiment.of(settings).method.local
    objective = local.build_objective()
    assert type(objective).__name__ == "Tempered"
    assert (objective.power, objective.objective) == (1.5, TaskLoss())
    assert local.build_objective(0.5).objective == TaskLoss(0.5)
    proximal = local_from({"objective": {"name": "proximal", "mu": 0.2}})
    assert proximal.build_objective() == Proximal(TaskLoss(), 0.2)


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("proximate", "there is no objective named 'proximate'. Did you mean 'proximal'?"),
        ({"name": "mine.py:Tempered", "pwoer": 1.0}, "Did you mean 'power'?"),
        ({"name": "mine.py:Tempered", "objective": "proximal"}, "has no such key"),
        (
            "mine.py:NotFrozen",
            "was asked for as an objective; it is another kind of class. One derived from Wrapping "
            "fits.",
        ),
    ],
)
def test_a_wrapper_that_does_not_fit_is_refused(objective, message, mine):
    with pytest.raises(ConfigError, match=r"local\.objective") as caught:
        local_from({"objective": objective})
    assert message in str(caught.value)


def test_the_loss_is_put_into_the_innermost_wrapper():
    nested = LocalTraining(masked="batch", objective=Doubled(Mirrored(Proximal(mu=0.5))))
    assert nested.build_objective() == Doubled(Mirrored(Proximal(MaskedCrossEntropy("batch"), 0.5)))
    assert nested.build_objective(0.5).copies == {RECEIVED}


def test_a_wrapper_is_found_by_its_name_in_python(mine):
    # FedProx's, and not one without effect
    assert LocalTraining(objective="proximal").objective == Proximal(mu=0.01)
    assert local_from({"objective": "proximal"}).objective == Proximal(mu=0.01)
    assert type(LocalTraining(objective="mine.py:Tempered").objective).__name__ == "Tempered"


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ("proximate", "no objective named 'proximate'. Did you mean 'proximal'"),
        (
            Proximal,
            "the class Proximal was asked for; an instance of a class derived from Wrapping fits",
        ),
        (
            TaskLoss(),
            r"TaskLoss\(share=None\) was asked for; an instance of a class derived from Wrapping "
            r"fits",
        ),
        (
            Doubled(MaskedCrossEntropy()),
            "Doubled was asked for around MaskedCrossEntropy.* local training puts the loss",
        ),
        ("mine.py:NotFrozen", "was asked for; an instance of a class derived from Wrapping fits"),
    ],
    ids=["unknown", "class", "plain", "filled", "file"],
)
def test_objectives_that_are_no_wrapper_are_refused_in_python(objective, message, mine):
    with pytest.raises(ConfigError, match=f"LocalTraining: objective = .*{message}"):
        LocalTraining(objective=objective)


def test_a_proximal_weight_below_zero_is_refused():
    with pytest.raises(
        ConfigError, match=r"Proximal: mu = -1 was asked for; it must lie in \[0, inf\)"
    ):
        Proximal(mu=-1)


# --- objectives that do not do what they state, before the first round --------------------------


@dataclass(frozen=True)
class Faulty(Wrapping):
    """A wrapper with one of several mistakes."""

    mistake: str = ""

    def nets(self, member):
        return [member] if self.mistake == "list" else self.objective.nets(member)

    def __call__(self, view: View) -> torch.Tensor:
        loss = self.objective(view)
        if self.mistake == "raises":
            raise KeyError("no such weight")
        if self.mistake == "draws":
            return loss * (1 + 0 * torch.rand(()))
        if self.mistake == "net":
            return loss + view.logits(view.member.nested(0.5)).mean()
        wrong = {
            "vector": loss.expand(2),
            "none": None,
            "float": float(loss.detach()),
            "integer": loss.long(),
            "list": loss,
        }
        return wrong[self.mistake]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (
            "vector",
            r"returned torch.float64 of shape \(2,\). A tensor with one real number works, of "
            r"shape \(\)",
        ),
        ("none", "returned NoneType None. A tensor with one real number works"),
        ("float", r"returned float 1\.\d+. A tensor with one real number works, .* `.item\(\)`"),
        ("integer", r"returned torch.int64 of shape \(\). A tensor with one real number works"),
        (
            "net",
            r"ran the nested net of share 0.5; its `nets` names the client's own net. "
            r".*`member.nested\(0.5\)`",
        ),
        ("list", r"its `nets` returned \[Member.* A tuple of members works, such as \(member,\)"),
        ("raises", "failed on two samples: KeyError: 'no such weight'"),
    ],
)
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_faulty_objective_is_refused_before_the_first_round(
    engine, mistake, message, perceptron, make_data
):
    method = HeteroFL(local=LocalTraining(objective=Faulty(mistake=mistake)))
    data, fleet = make_data(perceptron, (6, 6)), fq.Fleet.of((1.0, 0.5), 2, 2)
    asked = r"HeteroFL trains by the objective Faulty\(TaskLoss\)"
    with pytest.raises(ConfigError, match=f"(?s){asked}.*{message}"):
        fq.prepare(method, perceptron, data, fleet, engine, precision="fp64")


def test_an_objective_is_tried_once_for_each_member_and_draws_nothing(
    perceptron, make_data, monkeypatch
):
    tried = []
    original = Faulty.__call__
    monkeypatch.setattr(
        Faulty, "__call__", lambda *args: tried.append(args[1].member) or original(*args)
    )
    data, fleet = (
        make_data(perceptron, (2,) * 30),
        fq.Fleet.of([1.0, 0.5, *(0.5 + n / 1000 for n in range(1, 20))], 30),
    )
    before = torch.get_rng_state()
    fq.prepare(
        HeteroFL(local=LocalTraining(objective=Faulty(mistake="draws"))), perceptron, data, fleet
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert len(tried) == len({member.arch for member in tried}) == 2


def test_a_phase_without_an_objective_is_refused(perceptron, make_data):
    class Bare(HeteroFL):
        def learner(self, job: Job, world: World) -> Learner:
            return replace(
                super().learner(job, world), phases=(Phase(lambda view: view.loss(view.logits())),)
            )

    with pytest.raises(
        ConfigError, match="Bare trains by the objective function, which is no Objective"
    ):
        fq.prepare(Bare(), perceptron, make_data(perceptron, (6,)), fq.Fleet.of((1.0,), 1))


# --- downloads and uploads ----------------------------------------------------------------------


@dataclass(frozen=True)
class HeadOnly(HeteroFL):
    """Clients download all weights, and upload the output layer alone."""

    def learner(self, job: Job, world: World) -> Learner:
        learner = super().learner(job, world)
        return replace(learner, send=PartWeights(("head",)), receive=PartWeights((), other=True))


@pytest.mark.parametrize("link", ["perfect", "lq4", "lossy-mild"])
def test_downloads_and_uploads_have_separate_filters(link, make_data, play, perceptron):
    family = fq.trace(perceptron._factory, perceptron.example_inputs, parts={"head": ["last"]})
    member = family.member(family.whole)
    head = sum(member.family.parameters[name].numel() for name in ("last.weight", "last.bias"))
    method = HeadOnly(local=LocalTraining(batch_size=4))
    data = make_data(family, (8, 6, 6))
    truth = play(method, family, data, link=fq.Link.preset(link))
    for engine in ("sequential", "vectorized"):
        run = play(method, family, data, engine=engine, link=fq.Link.preset(link))
        assert_same(truth, run)
        assert torch.equal(
            run.server.weights["first.weight"], family.init(0)["first.weight"].double()
        )
        assert not torch.equal(
            run.server.weights["last.weight"], family.init(0)["last.weight"].double()
        )
        if link == "perfect":
            down, up = run.records[0].bytes_down, run.records[0].bytes_up
            assert (down, up) == (3 * 8 * member.count, 3 * 8 * head)


def test_a_client_downloads_what_it_uploads_by_default(residual):
    member = residual.member(residual.whole)
    plain = Learner((Phase(),), LocalTraining(), 0.1, send=PartWeights(("norm",)))
    assert plain.received(member) == plain.sent(member)
    other = replace(plain, receive=PartWeights(("norm",), other=True))
    assert set(other.received(member)) == set(member.trainable) - set(plain.sent(member))
    assert other.sent(member) == plain.sent(member)
    tracked = replace(
        plain, local=LocalTraining(norm="per_client"), receive=PartWeights((), other=True)
    )
    assert not set(member.statistics) & set(tracked.received(member))
