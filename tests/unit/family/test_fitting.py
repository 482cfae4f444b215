"""Searches within limits count few members, and recurrent layers are counted on few time steps."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.family import fitting
from fedquilt.family import member as members
from fedquilt.family.cost import Count, inference_activations, measure
from fedquilt.family.fitting import Need, last_within
from fedquilt.family.recurrent import RecurrentCall


class Steps(nn.Module):
    """A recurrent layer between two linear ones, whose outputs are changed in-place."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.first, self.last = nn.Linear(5, layer.input_size), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        time_first = not self.layer.batch_first
        outputs, _ = self.layer(x.transpose(0, 1) if time_first else x)
        return self.last(outputs.tanh_().mean(0 if time_first else 1))


class Sensor(nn.Module):
    """Convolutions, both kinds of norms, and a bidirectional GRU of two layers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv1d(3, width, 3, padding=1), nn.BatchNorm1d(width)
        self.conv2, self.norm2 = nn.Conv1d(width, width, 3, padding=1), nn.GroupNorm(4, width)
        self.gru = nn.GRU(
            width, width, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = torch.relu(self.norm2(self.conv2(x)))
        _, hidden = self.gru(x.transpose(1, 2))
        return self.head(torch.cat((hidden[-2], hidden[-1]), 1))


class Wide(nn.Module):
    """One axis of 512 channels, whose multiply-adds grow with their square."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = (
            nn.Linear(8, 512),
            nn.Linear(512, 512),
            nn.Linear(512, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.last(torch.relu(x + self.second(x)))


@pytest.fixture
def counted(monkeypatch):
    """Return a list that grows by one for every member that is counted, in training or for
    inference.
    """
    found = []

    def noted(function):
        def call(*args):
            found.append(args[0])
            return function(*args)

        return call

    monkeypatch.setattr(members, "measure", noted(measure))
    monkeypatch.setattr(members, "inference_activations", noted(inference_activations))
    return found


LAYERS = [
    *(
        {"kind": kind, "batch_first": first}
        for kind, first in product((nn.GRU, nn.LSTM, nn.RNN), (False, True))
    ),
    {"kind": nn.GRU, "num_layers": 2, "dropout": 0.3, "bidirectional": True, "batch_first": True},
    {"kind": nn.LSTM, "num_layers": 2, "bidirectional": True, "proj_size": 4},
    {"kind": nn.RNN, "nonlinearity": "relu", "bias": False},
]


@pytest.mark.parametrize(
    "options", LAYERS, ids=lambda options: f"{options['kind'].__name__}{len(options)}"
)
def test_a_recurrent_layer_costs_what_all_its_time_steps_cost(options, monkeypatch):
    rest = {name: value for name, value in options.items() if name != "kind"}
    module, inputs = Steps(options["kind"](6, 7, **rest)), (torch.zeros(2, 6, 5),)

    def cost() -> tuple[Count, int]:
        return measure(module, inputs, 3, {}), inference_activations(module, inputs, {})

    found = cost()
    monkeypatch.setattr(RecurrentCall, "of", staticmethod(lambda *_: None))  # every step is run
    assert found == cost()


def test_frozen_recurrent_layers_save_nothing(monkeypatch):
    module, inputs = Steps(nn.GRU(6, 7)), (torch.zeros(2, 6, 5),)
    module.first.requires_grad_(False)
    module.layer.requires_grad_(False)
    found = measure(module, inputs, 2, {})
    monkeypatch.setattr(RecurrentCall, "of", staticmethod(lambda *_: None))
    assert found == measure(module, inputs, 2, {})
    assert found.trained_macs < found.macs


def test_operations_of_a_count_do_not_grow_with_the_time_steps():
    """A count of 400 time steps takes as many operations as one of 8.

    `torch.gru` itself would run all steps.
    """
    steps = []

    class Watched(nn.GRU):
        def forward(self, x: Tensor, hx: Tensor | None = None) -> tuple[Tensor, Tensor]:
            steps.append(x.shape[0])
            return super().forward(x, hx)

    ran: list[int] = []
    original = RecurrentCall.run

    def run(call: RecurrentCall, num_steps: int) -> tuple[Tensor, ...]:
        ran.append(num_steps)
        return original(call, num_steps)

    module = Steps(Watched(6, 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentCall, "run", run)
        few, many = (measure(module, (torch.zeros(2, count, 5),), 2, {}) for count in (8, 400))
    assert steps == [8, 400]
    assert ran == [2, 3, 2, 3]
    assert (many.saved - few.saved) % (400 - 8) == 0


def test_packed_sequences_are_run_as_they_are():
    call = RecurrentCall.of(
        torch.gru,
        (torch.zeros(9, 2), torch.tensor([3, 3, 3]), torch.zeros(1, 3, 2), [], *range(5)),
        {},
    )
    assert call is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "step", [fq.methods.api.TrainingStep(batch_size=4), None], ids=["training", "inference"]
)
def test_thirty_limits_count_each_member_once(step, counted):
    """The members found are those of an exhaustive search, and limits share what was counted."""
    family = fq.trace(Sensor, torch.zeros(2, 3, 4))
    shares = sorted(family.fitter.steps)
    archs = [family.fit(fq.Budget(share=share)) for share in shares]
    whole = family.cost(family.whole)
    most = family.cost(family.whole, step).memory if step else whole.inference
    limits = [most * (0.35 + 0.7 * place / 29) for place in range(30)]
    counted.clear()
    fitted = [family.fit(fq.Budget(memory=limit), step=step) for limit in limits]
    assert len(counted) < len(shares)  # without the whole model, which was counted before
    counted.clear()
    assert [family.fit(fq.Budget(memory=limit + 1e-6), step=step) for limit in limits] == fitted
    assert not counted
    needs = [
        family.cost(arch, step).memory if step else family.cost(arch).inference for arch in archs
    ]
    assert needs == sorted(needs)
    exhaustive = [
        max(place for place, need in enumerate(needs) if need <= limit) for limit in limits
    ]
    assert fitted == [archs[place] for place in exhaustive]


@pytest.mark.parametrize("bound", ["macs", "memory"])
def test_a_search_counts_few_of_512_members(bound, counted):
    """Bisection would count nine members for each of the limits."""
    family = fq.trace(Wide, torch.zeros(2, 8))
    step = fq.methods.api.TrainingStep() if bound == "memory" else None
    whole = getattr(family.cost(family.whole), bound)
    counted.clear()
    for place, part in enumerate((0.31, 0.5, 0.77)):
        before = len(counted)
        width = family.fit(fq.Budget(**{bound: part * whole}), step=step).sizes["first"]
        assert 0 < len(counted) - before <= (4 if place == 0 else 3)
        assert 0.25 * 512 < width < 512


@pytest.mark.parametrize("power", [0.1, 1, 3, 20])
def test_the_search_is_right_where_its_line_is_wrong(power):
    """The search counts at most twice as many members as bisection, whatever the result."""
    count = 300
    needs = [int(1e6 * ((place + 1) / count) ** power) for place in range(count)]
    for limit in (
        needs[0] - 1,
        *needs[:5],
        *needs[::37],
        needs[150] + 1,
        *needs[-5:],
        needs[-1] + 1,
    ):
        asked = set()

        def needed(place: int) -> int:
            asked.add(place)  # noqa: B023
            return needs[place]

        need = Need(lambda place: place, needed, exact=lambda place: 0, gauge=lambda place: place)
        expected = sum(one <= limit for one in needs) - 1
        assert last_within(need, limit, count) == expected
        assert len(asked) <= 2 + 2 * 9


def test_results_for_many_budgets_are_kept_up_to_a_bound(monkeypatch):
    monkeypatch.setattr(fitting, "MAX_CACHED_FITS", 8)
    family = fq.trace(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.zeros(2, 4)
    )
    smallest = family.count(family.fit(fq.Budget(share=1 / 6)))
    fitted = [family.fit(fq.Budget(params=smallest + place)) for place in range(30)]
    assert len(family.fitter._shares) == 8
    assert family.fit(fq.Budget(params=smallest)) == fitted[0]  # one that was dropped
