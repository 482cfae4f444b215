"""A whole HeteroFL round on the CPU: `vectorized` against the released codes' way (published.py),
in one run.

    python bench/rounds.py                                       a PreResNet-18 of quarter width,
    100 images a client python bench/rounds.py --width 64 --images 500 --tests 10000 --rounds 1
    the paper's size: half an hour

100 clients of two classes each, 10 a round, two of every share 1 … 1/16, one epoch in batches of
10, SGD with momentum, decay and clipping, masked loss, scaler, static norms. An evaluation measures
the norms of the whole net over all training images, and tests it on every client's part and on all
test images. The two take turns round by round, on the same clients and batches.

`published` evaluates every round, in batches of 10 and 50, as released; `fedquilt` as often as it
is told, in its own batches of 50. Printed are the ratios for the same work on both sides, every
round or seldom, and for each as it is used.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial

import published
import torch
from measure import NUM_CLASSES, SHARES, Clock, machine
from torch import nn

import fedquilt as fq
from fedquilt.hardware.process import keep_pages
from fedquilt.methods import HeteroFL
from fedquilt.models import PreResNet
from fedquilt.round.deployed import ready
from fedquilt.round.eval_jobs import EvalJob
from fedquilt.round.evaluate import evaluate
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold
from fedquilt.round.training.optimizers import SGD
from fedquilt.terms import Job, Server

CLIENTS, COHORT, BATCH = 100, 10, 10
CALIBRATED, TESTED = 10, 50  # published batches of an evaluation
OPTIMIZER = SGD(lr=0.02, momentum=0.9, weight_decay=5e-4, clip=published.CLIP)
STAGES = ("training", "merge", "calibration", "evaluation")


def data(images: int, tests: int) -> fq.FederatedData:
    """Noise in the shape of CIFAR-10, two classes a client, a part of the test set each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(CLIENTS * images + tests, 3, 32, 32, generator=generator)
    y = torch.randint(2, (len(x),), generator=generator)
    parts, test_parts = (
        torch.split(torch.arange(CLIENTS * images), images),
        torch.arange(tests).tensor_split(CLIENTS),
    )
    for client in range(CLIENTS):
        y[parts[client]] += client % (NUM_CLASSES - 1)
        y[CLIENTS * images + test_parts[client]] += client % (NUM_CLASSES - 1)
    train, test = (x[:-tests], y[:-tests]), (x[-tests:], y[-tests:])
    return fq.FederatedData.of(train, test, list(parts), list(test_parts))


def net(width: int, share: float = 1.0) -> nn.Module:
    return PreResNet(widths=[max(1, math.floor(share * width * 2**stage)) for stage in range(4)])


class Neighbors(fq.Fleet):
    """The next ten clients in every round. Shares are assigned in turn, so it is two of each."""

    def draw_cohort(
        self, round: int, seed: int, online: Sequence[int] | None = None, attempt: int = 0
    ) -> list[int]:
        first = COHORT * round % CLIENTS
        return list(range(first, first + COHORT))


def timed(clock: Clock) -> HeteroFL:
    """HeteroFL as in its paper, with the time of its merge taken."""

    class Timed(HeteroFL):
        def fold(self, server: Server, world: World) -> Fold:
            fold = super().fold(server, world)
            for verb in ("add", "add_stack", "finish"):
                setattr(fold, verb, clock("merge")(getattr(fold, verb)))
            return fold

    return Timed(local=replace(HeteroFL().local, optimizer=OPTIMIZER, batch_size=BATCH))


class Ours:
    """fedquilt: `play` as it is; an evaluation asks for the whole net alone, as the published one
    does.
    """

    name = "fedquilt"

    def __init__(self, width: int, data: fq.FederatedData) -> None:
        self.clock = Clock()
        family = fq.trace(partial(net, width), data.example)
        plain = fq.Fleet.of(SHARES, CLIENTS, COHORT)
        fleet = Neighbors(**{field.name: getattr(plain, field.name) for field in fields(plain)})
        self.run = fq.prepare(
            timed(self.clock), family, data, fleet, evaluation=fq.Evaluation(every=0)
        )

    def train(self) -> None:
        run = self.run
        with self.clock("training"):
            # One more is announced than is played: the last would be evaluated.
            rounds = run.server.round + 2
            run.server = fq.round.run_round(
                run.federation, run.server, run.fleet, run.engine, rounds, run.evaluation
            ).server

    def evaluate(self) -> float:
        run, batch_size = self.run, self.run.evaluation.batch_size
        (whole,) = run.method.deploy(run.server, fq.Budget(share=1.0), run.world)
        with self.clock("calibration"):
            weights = ready(run.federation, run.server, [whole], run.engine, batch_size)[whole]
        with self.clock("evaluation"):
            eval_job = EvalJob("1.0", (whole,), weights)
            own = [replace(eval_job, client=id, own_classes=True) for id in range(CLIENTS)]
            return run.engine.evaluate(run.federation, [eval_job, *own], batch_size)[0].main(
                run.world.task
            )

    def evaluate_all(self) -> None:
        """Evaluate as users do: every share, each with norm statistics of its own."""
        run = self.run
        with self.clock("five shares"):
            evaluate(run.federation, run.server, run.fleet, run.engine, run.evaluation)


class Theirs:
    """The released codes' way, on the clients and batches of another run's rounds."""

    name = "published"

    def __init__(self, width: int, run: fq.Run) -> None:
        self.clock, self.run, self.make = Clock(), run, partial(net, width)
        self.weights = {name: value.clone() for name, value in run.server.weights.items()}
        self.pooled = run.data.inputs[run.engine.pooled]
        self.round = 0

    def train(self) -> None:
        run, engine = self.run, self.run.engine
        cohort = [
            run.fleet.client(id, self.round, 0, engine.data.size(id))
            for id in run.fleet.draw_cohort(self.round, 0)
        ]
        settings = {
            "lr": OPTIMIZER.lr,
            "momentum": OPTIMIZER.momentum,
            "weight_decay": OPTIMIZER.weight_decay,
        }
        states, indices, held = [], [], [engine.classes_present(client.id) for client in cohort]
        with self.clock("training"):
            for client, own in zip(cohort, held, strict=True):
                job = Job(client, run.method.plan(run.server, client, engine.world)[0], self.round)
                batches = engine.batches(job, run.method.learner(job, engine.world))
                local = published.build(self.make, client.budget.share or 1.0)
                indices.append(published.split(local))
                start = published.distribute(self.weights, indices[-1])
                inputs, targets = engine.data.inputs, engine.data.targets
                states.append(
                    published.train(local, start, batches, inputs, targets, own, **settings)
                )
        with self.clock("merge"):
            published.combine(self.weights, states, indices, held)
        self.round += 1

    def evaluate(self) -> float:
        data = self.run.data
        inputs, targets = data.test_inputs, data.test_targets
        assert data.test_parts is not None
        with self.clock("calibration"):
            whole = published.calibrate(self.make, self.weights, self.pooled, CALIBRATED)
        with self.clock("evaluation"):
            for client in range(CLIENTS):
                own = data.test_parts[client]
                published.evaluate(
                    whole,
                    inputs[own],
                    targets[own],
                    TESTED,
                    self.run.engine.classes_present(client),
                )
            return published.evaluate(whole, inputs, targets, TESTED) / len(targets)


def main() -> None:
    keep_pages()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--width", type=int, default=16, help="channels of the first stage; 64 is PreResNet-18"
    )
    parser.add_argument("--images", type=int, default=100, help="a client")
    parser.add_argument("--tests", type=int, default=2_000, help="test images")
    parser.add_argument(
        "--rounds", type=int, default=2, help="that are timed, after one that is not"
    )
    parser.add_argument(
        "--every", type=int, default=10, help="rounds between evaluations, of fedquilt"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        help="one is disturbed least by other work, and waits for none",
    )
    parser.add_argument(
        "--all-shares", action="store_true", help="also time an evaluation of all five sizes"
    )
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    ours = Ours(asked.width, data(asked.images, asked.tests))
    theirs = Theirs(asked.width, ours.run)
    for one in (theirs, ours):  # once for what is done once
        one.train()
        one.clock.reset()
    for played in range(1, asked.rounds + 1):
        for one in (theirs, ours):
            one.train()
            print(
                f"{one.name}: accuracy {one.evaluate():.4f}; {played} rounds so far: {one.clock}",
                flush=True,
            )
    if asked.all_shares:
        ours.evaluate_all()
    gap = max(
        float((ours.run.server.weights[name] - value).abs().max())
        for name, value in theirs.weights.items()
    )
    print(f"weights differ by at most {gap:.1e} after {theirs.round} rounds in float32")
    tell(asked, theirs.clock, ours.clock)


def tell(asked: argparse.Namespace, theirs: Clock, ours: Clock) -> None:
    """Seconds a round, stage by stage, and the ratios."""
    print(
        f"PreResNet-18, {asked.width} channels first; {CLIENTS} clients of {asked.images} images, "
        f"{COHORT} a round; "
        f"{asked.tests} test images; means of {asked.rounds} rounds"
    )
    heads = ("published", "of CPU", "fedquilt", "of CPU", "times", "of CPU")
    print(f"{'seconds a round':<28}" + "".join(f"{head:>10}" for head in heads))

    def row(name: str, *seconds: float) -> None:
        slow, slow_cpu, fast, fast_cpu = (value / asked.rounds for value in seconds)
        print(
            f"{name:<28}{slow:>10.2f}{slow_cpu:>10.2f}{fast:>10.2f}{fast_cpu:>10.2f}"
            f"{slow / fast:>10.2f}{slow_cpu / fast_cpu:>10.2f}"
        )

    for stage in STAGES:
        row(stage, theirs.wall[stage], theirs.cpu[stage], ours.wall[stage], ours.cpu[stage])

    def whole(seconds: dict[str, float], every: int) -> float:
        return sum(seconds[stage] / (1 if stage in STAGES[:2] else every) for stage in STAGES)

    def compared(name: str, published: int, fedquilt: int) -> None:
        both = ((theirs, published), (ours, fedquilt))
        row(
            name,
            *(
                whole(seconds, every)
                for clock, every in both
                for seconds in (clock.wall, clock.cpu)
            ),
        )

    compared("evaluated every round", 1, 1)
    compared(f"evaluated every {asked.every} rounds", asked.every, asked.every)
    compared(f"every round | every {asked.every}", 1, asked.every)
    if "five shares" in ours.wall:
        print(f"fedquilt's own evaluation, of all five sizes: {ours.wall['five shares']:.2f} s")
    print(machine())


if __name__ == "__main__":
    main()
