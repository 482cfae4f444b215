"""Modules of all kinds, also those that vmap cannot stack: every engine agrees to 1e-9."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.methods import (
    METHODS,
    HeteroFL,
    LocalOnly,
)
from tests.conftest import (
    LOCAL,
    assert_same,
    with_local,
)
from tests.engines.test_parity import RAGGED, SHARES, both


class Simple(nn.Module):
    """A convolution, something between, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.between(torch.relu(self.conv(x))).mean((2, 3)))

    def between(self, x: Tensor) -> Tensor:
        return x


class BatchNormed(Simple):
    """A norm that stores no statistics, so that evaluation uses those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(8, track_running_stats=False)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class Pinned(Simple):
    """A layer that is neither cut nor trained."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 1, 3, padding=1).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.stem(x))


class AcrossChannels(Simple):
    """A net that averages over channels. Side by side it would average over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(36, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.conv(x)).mean(1).flatten(1))


class Dropping(Simple):
    """Dropout that is so weak that nets side by side and stacked may agree by accident."""

    def between(self, x: Tensor) -> Tensor:
        return x * (torch.rand(len(x), 1, 1, 1) >= 0.03) if self.training else x


class Masking(Simple):
    """A net with a masked assignment, which vmap cannot stack."""

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        x[x > 0.3] = 0.3
        return x


class Summing(Simple):
    """A net that adds in-place to a new tensor, which is not stacked."""

    def between(self, x: Tensor) -> Tensor:
        total = torch.zeros(x.shape, dtype=x.dtype)
        total += x
        return total


class Deciding(Simple):
    """A net that branches on values in training, which tracing does not allow."""

    def between(self, x: Tensor) -> Tensor:
        return 2 * x if self.training and x.mean() > 0.3 else x


@pytest.mark.parametrize("layout", ["auto", "stack"])
@pytest.mark.parametrize("norm", ["post", "per_client"])
@pytest.mark.parametrize(
    "kind",
    [Simple, BatchNormed, Pinned, AcrossChannels, Dropping, Masking, Summing, Deciding],
    ids=lambda k: k.__name__,
)
def test_modules_of_all_kinds_give_the_same_numbers(kind, norm, layout, make_data, play):
    family = fq.trace(kind, torch.zeros(2, 1, 6, 6), fixed=["stem"] if kind is Pinned else ())
    method, data, how = (
        with_local(HeteroFL(), batch_size=4, norm=norm),
        make_data(family, RAGGED),
        fq.Evaluation(batch_size=3),
    )
    truth = play(method, family, data, SHARES, evaluation=how)
    run = fq.prepare(
        method, family, data, fq.Fleet.of(SHARES, 6, 6), precision="fp64", evaluation=how
    )
    run.engine.layout = layout
    assert_same(truth, run.train(2))


@pytest.mark.parametrize("weight", [0.5, 1.0])
@pytest.mark.parametrize("name", ["fedavg", "sheterofl"])
def test_attacks_on_modules_with_constants_give_the_same_numbers(name, weight, make_data, play):
    """Constants of a module are the same inside of nested gradients, whichever gradient used them
    first.
    """
    family = fq.trace(Pinned, torch.zeros(2, 1, 6, 6), fixed=["stem"])
    data = make_data(family, RAGGED)
    data = replace(data, inputs=data.inputs.sigmoid(), test_inputs=data.test_inputs.sigmoid())
    adversarial = fq.attacks.AdversarialTraining(
        weight, fq.attacks.PGD(eps=0.1, steps=2, step_size=0.05)
    )
    method = with_local(METHODS[name](), batch_size=4, adversarial=adversarial)
    truth, others = both(play, method, family, data, shares=(1.0, 0.5))
    for other in others:
        assert_same(truth, other)


class Rows(nn.Module):
    """A norm over one value for each channel and sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def test_one_test_sample_is_enough_for_stored_statistics(make_data, play):
    family = fq.trace(Rows, torch.zeros(2, 4))
    # parts of 2, 1, 1, 1
    method, data = (
        with_local(HeteroFL(), batch_size=4),
        make_data(family, (6, 6, 6, 6), tests=5),
    )
    truth, others = both(play, method, family, data, evaluation=fq.Evaluation(per_client=True))
    for other in others:
        assert_same(truth, other)


@pytest.mark.parametrize("engine", LOCAL)
def test_one_sample_is_too_few_for_a_norm_that_trains_on_it(engine, make_data, play):
    family = fq.trace(Rows, torch.zeros(2, 4))
    with pytest.raises(
        fq.errors.TrainingError, match=r"more than one value a channel.*min_size=2.*GroupNorm"
    ):
        play(with_local(HeteroFL(), batch_size=1), family, make_data(family, (4, 4)), engine=engine)


# --- nets that vmap cannot stack -----------------------------------------------------------------


class Recurrent(nn.Module):
    """A net with torch's recurrent layers, which have no batching rule if only some inputs are
    stacked.
    """

    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.cell, self.out = kind(3, 8, batch_first=True, **options), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cell(x)[0][:, -1])


@pytest.mark.parametrize(
    "method", [HeteroFL(), LocalOnly()], ids=lambda method: type(method).__name__
)
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "dropout": 0.5}], ids=["one layer", "dropout"]
)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_nets_give_the_same_numbers(kind, options, method, play, make_data):
    family = fq.trace(lambda: Recurrent(kind, **options), torch.zeros(2, 5, 3))
    truth, others = both(
        play, with_local(method, batch_size=4), family, make_data(family, RAGGED), shares=SHARES
    )
    for other in others:
        assert_same(truth, other)
        assert other.accuracy == truth.accuracy


class Bag(nn.Module):
    """A net whose sums of embeddings torch stacks client by client."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(11, 8), nn.Linear(8, 11)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x)).unsqueeze(1).expand(-1, x.shape[1], -1)


def test_operations_that_torch_stacks_client_by_client_are_stacked_without_a_warning(
    play, make_data, caplog
):
    """In tests, warnings are errors. A member that fails in a stack would be trained one by one."""
    family = fq.trace(Bag, torch.zeros(2, 5, dtype=torch.int64), class_dim=-1)
    truth, others = both(
        play, with_local(HeteroFL(), batch_size=4), family, make_data(family, RAGGED), shares=SHARES
    )
    for other in others:
        assert_same(truth, other)
        assert not other.engine.unstackable
    assert not caplog.records


@pytest.mark.parametrize("layout", ["auto", "stack"])
def test_nets_that_cannot_be_stacked_are_trained_one_after_another(
    layout, residual, make_data, play, caplog, monkeypatch
):
    def refused(*_args):
        raise RuntimeError("Batching rule not implemented for aten::something. We could not")

    for module in ("stacked_step", "group_step"):
        monkeypatch.setattr(f"fedquilt.engines.vectorized.{module}.gradients", refused)
    data, method = make_data(residual, RAGGED), with_local(HeteroFL(), batch_size=4)
    truth = play(method, residual, data, shares=SHARES)
    fleet = fq.Fleet.of(SHARES, data.num_clients, data.num_clients)
    run = fq.prepare(
        method, residual, data, fleet, precision="fp64", evaluation=fq.Evaluation(every=0)
    )
    run.engine.layout = layout
    assert_same(truth, run.train(2))
    assert run.records[-1].bytes_down == truth.records[-1].bytes_down
    warning = (
        "clients with equal nets are trained one after another: Batching rule not implemented "
        "for aten::something"
    )
    assert [line.message for line in caplog.records] == [warning]  # once for all members and rounds
    caplog.clear()
    other = make_data(
        residual, RAGGED[::-1]
    )  # the engine that trains them one by one has the new data, too
    again = fq.prepare(
        method, residual, other, fleet, run.engine, evaluation=fq.Evaluation(every=0)
    ).train(2)
    # the warning is repeated, because this is another run
    assert [line.message for line in caplog.records] == [warning]
    assert_same(play(method, residual, other, shares=SHARES), again)
