"""The presets named after released codes: two rounds against the authors' formulas, written out in
plain torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import FedDropout, FedRolex, HeteroFL, SHeteroFL
from fedquilt.terms import Job, Server

SHARES = (1.0, 0.3, 0.5)
SIZES = (6, 4, 5)  # samples
ROUNDS = 2


class Net(nn.Module):
    """Two convolutions, each behind it a norm, and an output layer; of 10 and 6 channels a share of
    0.3 is no whole.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(1, 10, 3), nn.BatchNorm2d(10)
        self.conv2, self.norm2 = nn.Conv2d(10, 6, 3), nn.BatchNorm2d(6)
        self.out = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        return self.out(torch.relu(self.norm2(self.conv2(x))).mean((2, 3)))


Cut = tuple[Tensor, Tensor]  # positions on the two axes
Weights = dict[str, Tensor]


def places(weights: Weights, cut: Cut) -> dict[str, tuple[Tensor, ...]]:
    """Return the positions of a sub-model's entries in each weight of the whole."""
    first, second = cut
    own = {
        "conv1": (first, None),
        "norm1": (first,),
        "conv2": (second, first),
        "norm2": (second,),
        "out": (None, second),
    }
    found = {}
    for name, weight in weights.items():
        wanted = own[name.partition(".")[0]][: weight.dim()]
        rows = [
            kept if kept is not None else torch.arange(size)
            for kept, size in zip(wanted, weight.shape, strict=False)
        ]
        found[name] = torch.meshgrid(*rows, indexing="ij")
    return found


def logits(w: Weights, x: Tensor, rate: float) -> Tensor:
    """A scaler after every hidden layer, and the batch's own statistics."""

    def normed(x: Tensor, name: str) -> Tensor:
        return torch.relu(F.batch_norm(x, None, None, w[f"{name}.weight"], w[f"{name}.bias"], True))

    x = normed(F.conv2d(x, w["conv1.weight"], w["conv1.bias"]) / rate, "norm1")
    x = normed(F.conv2d(x, w["conv2.weight"], w["conv2.bias"]) / rate, "norm2")
    return F.linear(x.mean((2, 3)), w["out.weight"], w["out.bias"])


def masked(logits: Tensor, classes: Tensor) -> Tensor:
    """The logits of all other classes set to 0."""
    return logits * torch.zeros(logits.shape[1], dtype=logits.dtype).index_fill(
        0, classes.unique(), 1.0
    )


@dataclass
class Rounds:
    """Start, result and client inputs of two rounds of fedquilt."""

    run: fq.Run
    start: Weights

    def __iter__(self) -> Iterator[tuple[int, int, float, list[tuple[Tensor, Tensor]]]]:
        """Round, client, share and the client's batches."""
        engine = self.run.engine
        for round in range(ROUNDS):
            for id, share in enumerate(SHARES):
                client = self.run.fleet.client(id, round, 0, SIZES[id])
                server = Server(round, {})
                job = Job(client, self.run.method.plan(server, client, engine.world)[0], round)
                learner = self.run.method.learner(job, engine.world)
                batches = [
                    engine._batch(job, learner, rows, engine.classes_present(id), step)
                    for step, rows in enumerate(engine.batches(job, learner))
                ]
                yield round, id, share, [(batch.inputs, batch.targets) for batch in batches]


@pytest.fixture
def rounds(make_data, play):
    def played(method: fq.Method) -> Rounds:
        family = fq.trace(Net, torch.zeros(2, 1, 6, 6))
        run = play(method, family, make_data(family, SIZES, labels=2), SHARES, rounds=ROUNDS)
        start = {
            name: value.double()
            for name, value in family.init(0).items()
            if name in family.trainable
        }
        return Rounds(run, start)

    return played


def prefixes(share: float, round: int) -> Cut:
    """HeteroFL's code: the first ceil(share · K)."""
    return torch.arange(math.ceil(share * 10)), torch.arange(math.ceil(share * 6))


def rolling(share: float, round: int) -> Cut:
    """FedRolex's code: torch.roll by the round, so that the window moves backwards, then the first
    ceil(share · K).
    """
    return tuple(torch.arange(size).roll(round)[: math.ceil(share * size)] for size in (10, 6))


def merged(old: Weights, sums: Weights, counts: Weights) -> Weights:
    return {
        name: torch.where(counts[name] > 0, sums[name] / counts[name], weight)
        for name, weight in old.items()
    }


def zeros(weights: Weights) -> Weights:
    return {name: torch.zeros_like(weight) for name, weight in weights.items()}


def trained(w: Weights, batches, loss, optimizer, clip: float) -> Weights:
    """One step a batch: backward, clip the norm of the whole gradient, step."""
    own = {name: weight.clone().requires_grad_() for name, weight in w.items()}
    optimizer = optimizer(list(own.values()))
    for x, y in batches:
        optimizer.zero_grad()
        loss(own, x, y).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(own.values(), clip)
        optimizer.step()
    return {name: weight.detach() for name, weight in own.items()}


def sgd(weights, lr: float = 0.1):
    return torch.optim.SGD(weights, lr=lr, momentum=0.9, weight_decay=5e-4)


def adam(weights):
    return torch.optim.Adam(weights, lr=2e-4, weight_decay=5e-4)


def drawn(method: FedDropout, rounds: Rounds):
    """Return the positions that fedquilt drew. The released code draws layer by layer instead."""
    first, second = (rounds.run.world.family.layout.dims[f"conv{n}.weight"][0] for n in (1, 2))

    def cut(share: float, round: int) -> Cut:
        client = rounds.run.fleet.client(SHARES.index(share), round, 0, 1)
        index = method.plan(Server(round, {}), client, rounds.run.world)[0].index
        return index[first].tensor, index[second].tensor

    return cut


@pytest.mark.parametrize(
    ("method", "optimizer", "epochs"),
    [
        (HeteroFL.preset("released"), sgd, 5),
        (HeteroFL.preset("released-iid"), sgd, 5),
        (FedRolex.preset("released-settings"), adam, 1),
        (FedDropout.preset("released-settings"), adam, 1),
    ],
    ids=["heterofl", "heterofl-iid", "fedrolex", "feddropout"],
)
def test_partial_training_and_its_merge(method, optimizer, epochs, rounds):
    """Scaler, masked loss, clip at 1; the mean over holders, in output rows over clients that have
    the label.
    """
    played = rounds(method)
    chosen = {HeteroFL: prefixes, FedRolex: rolling}
    cut = chosen[type(method)] if type(method) in chosen else drawn(method, played)
    w, sums, counts = played.start, zeros(played.start), zeros(played.start)
    for round, id, share, batches in played:
        assert len(batches) == epochs
        at = places(w, cut(share, round))
        labels = torch.cat([y for _, y in batches]).unique()

        def loss(own: Weights, x: Tensor, y: Tensor, share=share, labels=labels) -> Tensor:
            return F.cross_entropy(masked(logits(own, x, share), labels), y)

        own = trained(
            {name: weight[at[name]] for name, weight in w.items()}, batches, loss, optimizer, 1.0
        )
        for name, weight in own.items():
            rows = (
                tuple(own_rows[labels] for own_rows in at[name])
                if name.startswith("out")
                else at[name]
            )
            sums[name][rows] += weight[labels] if name.startswith("out") else weight
            counts[name][rows] += 1
        if id == len(SHARES) - 1:
            w, sums, counts = merged(w, sums, counts), zeros(w), zeros(w)
    assert any(not torch.equal(weight, played.start[name]) for name, weight in w.items())
    for name, weight in w.items():
        torch.testing.assert_close(played.run.server.weights[name], weight, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["released", "cifar10-released"])
def test_slimmable_training_and_its_merge(name, rounds):
    """Summed losses of all affordable widths; the widest net counts data × widths wherever it has a
    position.
    """
    method = SHeteroFL.preset(name, widths=(1.0, 0.5, 0.3))
    played = rounds(method)
    w, sums, counts = played.start, zeros(played.start), zeros(played.start)

    def floor(share: float) -> Cut:
        return torch.arange(int(share * 10)), torch.arange(max(1, int(share * 6)))

    for round, id, share, batches in played:
        widths = [width for width in method.widths if width <= share]
        assert len(batches) == {"released": 1, "cifar10-released": 5}[name]

        def loss(own: Weights, x: Tensor, y: Tensor, widths=widths) -> Tensor:
            found = torch.zeros((), dtype=torch.float64)
            for width in widths:
                inner = {n: weight[places(own, floor(width))[n]] for n, weight in own.items()}
                out = logits(inner, x, width)
                found = found + F.cross_entropy(
                    masked(out, y) if name == "cifar10-released" else out, y
                )
            return found

        at = places(w, floor(share))
        falling = 0.05 * (1 + math.cos(math.pi * round / 300))
        optimizer = partial(sgd, lr=falling if name == "released" else 0.1)
        own = trained({n: weight[at[n]] for n, weight in w.items()}, batches, loss, optimizer, 0.0)
        for n, weight in own.items():
            sums[n][at[n]] += SIZES[id] * len(widths) * weight
            counts[n][at[n]] += SIZES[id] * len(widths)
        if id == len(SHARES) - 1:
            w, sums, counts = merged(w, sums, counts), zeros(w), zeros(w)
    for n, weight in w.items():
        torch.testing.assert_close(played.run.server.weights[n], weight, rtol=0, atol=1e-12)


def scheduled(method: fq.Method, *rounds: int) -> list[float]:
    return [method.lr(round) / method.lr(0) for round in rounds]


def test_schedules_crops_and_norms_are_the_released_ones():
    assert scheduled(HeteroFL.preset("released"), 299, 300, 500) == pytest.approx([1, 0.1, 0.01])
    assert scheduled(HeteroFL.preset("released-iid"), 149, 150, 250) == pytest.approx(
        [1, 0.1, 0.01]
    )
    # rounds count from 0, and the scheduler steps once before the first
    for kind in (
        FedRolex,
        FedDropout,
    ):
        assert scheduled(kind.preset("released-settings"), 1198, 1199) == pytest.approx([1, 0.25])
        assert scheduled(kind.preset("released-settings-iid"), 798, 799, 1199) == pytest.approx(
            [1, 0.25, 0.0625]
        )
    assert scheduled(SHeteroFL.preset("released"), 150, 300) == pytest.approx([0.5, 0])
    assert scheduled(SHeteroFL.preset("cifar10-released"), 149, 150, 250) == pytest.approx(
        [1, 0.1, 0.01]
    )
    cropped = [
        HeteroFL.preset("released"),
        FedRolex.preset("released-settings"),
        FedDropout.preset("released-settings"),
        SHeteroFL.preset("cifar10-released"),
    ]
    assert {(method.local.crop, method.local.flip) for method in cropped} == {(4, True)}
    assert [method.local.norm.name for method in cropped] == ["post", "batch", "batch", "batch"]
    assert [method.local.batch_size for method in cropped] == [10, 128, 128, 128]


def test_presets_that_are_not_the_released_merge_are_not_called_released():
    for kind in (FedRolex, FedDropout):
        with pytest.raises(
            ConfigError, match=r"has no preset 'released'; known: .*released-settings"
        ):
            kind.preset("released")
