"""Training cohorts on one GPU: recorded units against a good eager loop, both measured in this run.

    python bench/gpu.py [--only a,b,c,d,e] [--precision tf32,bf16]

The baseline is one client after another with module and fused SGD built once, data on the device
and the same precision. Needs torch and numpy alone. Medians, warm; milliseconds beside every ratio,
and the share of the rate at which this card multiplies large matrices.

(a) ten and fifty clients of five shares  (b) forty nets of share 1/8, as Split-Mix makes them  (c)
a learner of two phases, the second on a nested half  (d) the language model  (e) whole FedRolex
rounds with evaluation
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from measure import batch_norms, median
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.engines.vectorized.groups import replay_time
from fedquilt.hardware.precision import Precision
from fedquilt.methods import FedRolex, HeteroFL, Method
from fedquilt.round.federation import World
from fedquilt.round.merge import Mean
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.objectives import TaskLoss
from fedquilt.round.training.optimizers import SGD
from fedquilt.round.training.regions import Between
from fedquilt.runs.prepare import placed
from fedquilt.terms import Client, Job, Payload, Submodel, Update

SHARES = (1.0, 1 / 2, 1 / 4, 1 / 8, 1 / 16)
IMAGES, BATCH = 500, 10
EXAM = 250  # samples tested at once
OPTIMIZER = SGD(lr=0.02, momentum=0.9, weight_decay=5e-4)
LOCAL = LocalTraining(optimizer=OPTIMIZER, batch_size=BATCH)
DEVICE = torch.device("cuda")
MEMORY = 60 << 30


@dataclass(frozen=True)
class TwoPhases(Method):
    """First the outer half of the channels learns in the whole net, then the inner half in the
    nested net.
    """

    def learner(self, job: Job, world: World) -> Learner:
        outer = Phase(TaskLoss(), Between(0.5, 1.0))
        inner = Phase(TaskLoss(0.5), Between(0.0, 0.5))
        return replace(super().learner(job, world), phases=(outer, inner))


@dataclass
class Case:
    """A cohort, and what its baseline does for one client and batch."""

    name: str
    family: fq.Family
    data: fq.FederatedData
    shares: Sequence[float]
    method: Method
    phases: int = 1


# --- data ---------------------------------------------------------------------------------------


def images(clients: int, test: int = 1000) -> fq.FederatedData:
    """Random CIFAR-like images, two labels a client."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(clients * IMAGES, 3, 32, 32, generator=generator)
    y = (
        torch.arange(clients).repeat_interleave(IMAGES)
        + torch.randint(0, 2, (len(x),), generator=generator)
    ) % 10
    return fq.FederatedData.of(
        (x, y), (x[:test], y[:test]), list(torch.arange(len(x)).split(IMAGES))
    )


def words(clients: int, length: int = 20) -> fq.FederatedData:
    """Random next-word samples."""
    text = torch.randint(
        0, 10_000, (clients * IMAGES, length + 1), generator=torch.Generator().manual_seed(0)
    )
    x, y = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    return fq.FederatedData.of((x, y), (x[:100], y[:100]), list(torch.arange(len(x)).split(IMAGES)))


# --- the baseline -------------------------------------------------------------------------------


class Eager:
    """One client after another, everything that can be built once built once."""

    def __init__(self, case: Case, precision: Precision) -> None:
        tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        torch.backends.cudnn.benchmark = True
        self.case, self.precision, family = case, precision, case.family
        self.data = case.data.to(DEVICE, torch.float32)
        arches = [family.fit(fq.Budget(share=share)) for share in case.shares]
        self.nets = [batch_norms(family.module(arch)).to(DEVICE).train() for arch in arches]
        settings = {
            "lr": OPTIMIZER.lr,
            "momentum": OPTIMIZER.momentum,
            "weight_decay": OPTIMIZER.weight_decay,
        }
        self.optimizers = [
            torch.optim.SGD(net.parameters(), fused=True, **settings) for net in self.nets
        ]
        if case.phases == 2:
            self.inner = [family.member(arch).nested(0.5) for arch in arches]
            self.halves = [
                batch_norms(family.module(inner)).to(DEVICE).train() for inner in self.inner
            ]
            self.insides = [self._inside(arch) for arch in arches]
            self.outsides = [[1 - mask for mask in inside] for inside in self.insides]

    def _inside(self, arch: fq.terms.Arch) -> list[Tensor]:
        """1 where a weight belongs to the nested half."""
        masks = Between(0.0, 0.5)
        return [
            masks.mask(self.case.family.member(arch), name).to(DEVICE).float()
            for name in self.case.family.trainable
        ]

    def step(self) -> None:
        for client in range(len(self.nets)):
            rows = torch.arange(client * IMAGES, client * IMAGES + BATCH, device=DEVICE)
            self.learn(client, rows)

    def learn(self, client: int, rows: Tensor) -> None:
        """One batch of one client."""
        net, optimizer = self.nets[client], self.optimizers[client]
        x, y = self.data.samples(rows), self.data.targets[rows]
        if self.case.phases == 1:
            self._descend(lambda: net(x), y, optimizer)
            return
        own, inside, outside = list(net.parameters()), self.insides[client], self.outsides[client]
        before = torch._foreach_mul([weight.detach() for weight in own], inside)
        self._descend(lambda: net(x), y, optimizer)
        _put_back(own, outside, before)
        before = torch._foreach_mul([weight.detach() for weight in own], outside)
        self._descend(lambda: self._half(client, x), y, optimizer)
        _put_back(own, inside, before)

    def _half(self, client: int, x: Tensor) -> Tensor:
        family, own = self.case.family, dict(self.nets[client].named_parameters())
        held = fq.family.cut.prefix(family.fit(fq.Budget(share=self.case.shares[client]))).index
        weights = family.cutter.narrow(
            {name: own[name] for name in family.trainable}, held, self.inner[client].index
        )
        logits: Tensor = torch.func.functional_call(self.halves[client], weights, (x,))
        return logits

    def _descend(self, logits: Callable[[], Tensor], y: Tensor, optimizer: torch.optim.SGD) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16"):
            out = logits()
            loss = F.cross_entropy(out.movedim(self.case.family.layout.class_dim, 1), y)
        loss.backward()
        optimizer.step()


@torch.no_grad()
def _put_back(own: list[nn.Parameter], free: list[Tensor], before: Sequence[Tensor]) -> None:
    """Weights are what they were where they were not free to move. (Their momentum is not put back:
    less work.)
    """
    torch._foreach_mul_(own, free)
    torch._foreach_add_(own, before)


# --- ours ---------------------------------------------------------------------------------------


def ours(case: Case, precision: Precision) -> tuple[float, float]:
    """Milliseconds of one recorded step of the whole cohort, and of a step's part of a whole
    round's training.
    """
    engine = Vectorized(case.data, DEVICE, precision, memory=MEMORY)
    world = World(case.family, precision=precision)
    federation, server = (
        fq.methods.api.Federation(world, case.method),
        placed(case.method.init(world), DEVICE),
    )
    clients = [Client(id, fq.Budget(share=share), IMAGES) for id, share in enumerate(case.shares)]
    jobs = [Job(client, case.method.plan(server, client, world)[0], 0) for client in clients]

    def round() -> None:
        engine.train(federation, server, jobs, case.method.fold(server, world))

    began = time.perf_counter()
    round()
    print(f"    first round {time.perf_counter() - began:.1f} s", flush=True)
    whole = median(round, 5) / (IMAGES // BATCH)
    units = [unit for units in engine.groups.idle.values() for unit in units]
    used = [unit for unit in units if getattr(unit, "_stack", None) is not None]
    for unit in used:
        unit.chunk_step.zero_()
    layouts = ", ".join(f"{unit.shape.count} {unit.shape.layout}" for unit in used)
    print(f"    units: {layouts}; {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB", flush=True)
    return 1e3 * replay_time(used, 40), whole


def compare(case: Case, precision: Precision, rate: float) -> None:
    base = median(Eager(case, precision).step, 10)
    step, whole = ours(case, precision)
    macs = sum(
        case.family.cost(case.family.fit(fq.Budget(share=share))).macs for share in case.shares
    )
    # forward, and twice that backward; two operations a multiply-add
    rates = 6 * macs * BATCH / (step * 1e-3)
    print(
        f"({case.name}) {len(case.shares)} clients, {precision}: eager {base:.1f} ms, recorded "
        f"step {step:.2f} ms "
        f"({base / step:.1f} times), in a whole round's training {whole:.2f} ms "
        f"({base / whole:.1f} times)"
        + (f"; {100 * rates / rate:.1f} % of the matmul rate" if case.phases == 1 else ""),
        flush=True,
    )
    torch.cuda.empty_cache()


def matmul_rate(precision: Precision) -> float:
    """Operations a second of a large product in this precision."""
    torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    size, dtype = 8192, torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(size, size, device=DEVICE, dtype=dtype) for _ in range(2))
    rate = 2 * size**3 / (1e-3 * median(lambda: a @ b, 10))
    print(f"    {precision} products of {size}: {rate / 1e12:.0f} TFLOP/s", flush=True)
    return rate


# --- whole rounds -------------------------------------------------------------------------------


class EagerRounds(Eager):
    """Whole rounds as a careful eager loop plays them: cut and merge by slices, modules and
    optimizers reused.
    """

    def __init__(self, case: Case, precision: Precision) -> None:
        super().__init__(case, precision)
        case.family.cutter.flat = False
        self.world = World(case.family)
        self.server = placed(case.method.init(self.world), DEVICE)

    def round(self) -> None:
        family, method = self.case.family, self.case.method
        fold = Mean(family.cutter).begin(self.server)
        clients = [
            Client(id, fq.Budget(share=share), IMAGES) for id, share in enumerate(self.case.shares)
        ]
        for place, client in enumerate(clients):
            submodel = method.plan(self.server, client, self.world)[0]
            net, own = self.nets[place], dict(self.nets[place].named_parameters())
            cut = family.cutter.gather(self.server.weights, submodel, family.trainable)
            with torch.no_grad():
                torch._foreach_copy_([own[name] for name in cut], list(cut.values()))
            self.optimizers[place].state.clear()
            order = torch.randperm(IMAGES, device=DEVICE) + client.id * IMAGES
            for rows in order.split(BATCH):
                self.learn(place, rows)
            sent = {name: own[name].detach() for name in family.trainable}
            fold.add(Update(Job(client, submodel, 0), (Payload(submodel, sent),), IMAGES // BATCH))
            net.train()
        self.server = replace(
            self.server, round=self.server.round + 1, weights=fold.finish(self.server)[0]
        )

    def evaluate(self) -> None:
        """The test set at every share; before that, if the policy says so, norms measured over the
        training data.
        """
        with (
            torch.no_grad(),
            torch.autocast("cuda", torch.bfloat16, enabled=self.precision == "bf16"),
        ):
            for share in dict.fromkeys(self.case.shares):
                budget = fq.Budget(share=share)
                self._test(*self.case.method.deploy(self.server, budget, self.world))

    def _test(self, submodel: Submodel) -> None:
        net = self.case.family.module(submodel, self.server.weights).to(DEVICE).train()
        if self.case.method.local.norm.measures:
            for layer in net.modules():
                if isinstance(layer, nn.BatchNorm2d):
                    layer.momentum = None
                    layer.reset_running_stats()
            for rows in torch.arange(len(self.data.targets), device=DEVICE).split(EXAM):
                net(self.data.samples(rows))
            net.eval()
        else:
            batch_norms(net)
        hits = torch.zeros((), device=DEVICE)
        for rows in torch.arange(len(self.data.test_targets), device=DEVICE).split(EXAM):
            hits += (
                net(self.data.test_samples(rows)).argmax(1) == self.data.test_targets[rows]
            ).sum()


def whole_rounds(case: Case, precision: Precision, rounds: int = 20, every: int = 10) -> None:
    """(e) cut, send, train, stitch, and every tenth round calibrate and test all five sizes."""
    data = images(100, 10_000)
    eager = EagerRounds(replace(case, data=data), precision)
    base, eager_test = median(eager.round, 3, warm=1), median(eager.evaluate, 3, warm=1)
    case.family.cutter.flat = None
    fleet = fq.Fleet.of(SHARES, 100, 10)
    how = fq.Evaluation(every, EXAM)
    run = fq.prepare(
        case.method, case.family, data, fleet, device="cuda", precision=precision, evaluation=how
    )
    run.engine.memory = MEMORY
    began = time.perf_counter()
    run.train(every)
    torch.cuda.synchronize()
    first = time.perf_counter() - began
    run.train(3 * every + rounds)
    # Medians: now and then a cohort has more clients of a share than any before, and another unit
    # is recorded.
    plain = 1e3 * statistics.median(
        r.seconds for r in run.records[-rounds:] if not r.grades.accuracy
    )
    tested = (
        1e3 * statistics.median(r.seconds for r in run.records[-rounds:] if r.grades.accuracy)
        - plain
    )
    against, whole = base + eager_test / every, plain + tested / every
    norms = "static norms" if case.method.local.norm.measures else "test-batch norms"
    print(
        f"(e) rounds, {precision}, {norms}: eager {base:.0f} ms and {eager_test:.0f} ms an "
        f"evaluation, {against:.0f} ms a round in all; ours {plain:.0f} ms "
        f"and {tested:.0f} ms an evaluation, {whole:.0f} ms a round in all "
        f"({against / whole:.1f} times); first {every} rounds {first:.0f} s; 2,500 rounds "
        f"{2.5 * whole / 60:.1f} min",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="a,b,c,d,e", help="also a10, a50, e-batch, e-post")
    parser.add_argument("--precision", default="tf32,bf16")
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU; torch finds no CUDA here.")
    logging.basicConfig(level=logging.INFO, format="    %(message)s")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python "
        f"{platform.python_version()}"
    )
    resnet = fq.trace(fq.models.MODELS["preresnet18"].factory, torch.zeros(2, 3, 32, 32))
    language = fq.trace(
        partial(fq.models.MODELS["transformer_lm"].factory, max_length=20),
        torch.zeros(2, 20, dtype=torch.int64),
    )
    mixed = [share for share in SHARES for _ in range(2)]
    hetero = HeteroFL(local=LOCAL)
    cases = {
        "a10": lambda: Case("a", resnet, images(10), mixed, hetero),
        "a50": lambda: Case("a", resnet, images(50), mixed * 5, hetero),
        "b": lambda: Case("b", resnet, images(40), [1 / 8] * 40, hetero),
        "c": lambda: Case("c", resnet, images(10), [1.0] * 10, TwoPhases(local=LOCAL), phases=2),
        "d": lambda: Case("d", language, words(10), mixed, hetero),
    }
    wanted = asked.only.split(",")
    for precision in asked.precision.split(","):
        rate = matmul_rate(precision)
        for name, case in cases.items():
            if name in wanted or name[0] in wanted:
                compare(case(), precision, rate)
        for norm in ("batch", "post"):
            if "e" in wanted or f"e-{norm}" in wanted:
                method = FedRolex(local=replace(LOCAL, norm=norm))
                whole_rounds(Case("e", resnet, images(1), mixed, method), precision)


if __name__ == "__main__":
    main()
