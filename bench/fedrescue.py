"""FedResCuE: a cohort's local epoch, recorded part by part, against one client after another, in
one run.

    python bench/fedrescue.py [--device cuda] [--precision tf32,bf16] [--methods fedrescue,fjord]

Five whole ResNets of Table 15 and five of four shares, S = 4, batches of 32, as in Table 17. The
baseline is eager: module, nested modules, masks and fused SGD built once for each client, data on
the device and the same precision; for every batch the teacher's pass, then a pass and a step for
every drawn net, frozen weights put back (their momentum is not: less work), then the whole net's.
Medians, warm.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from measure import batch_norms, cohort, median, versus
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines.vectorized.engine import Vectorized
from fedquilt.family.cut import prefix
from fedquilt.hardware.precision import Precision
from fedquilt.methods import FedResCuE, FjORD
from fedquilt.methods.nested import Nested
from fedquilt.round.federation import World
from fedquilt.round.training.distillation import Distilled
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.regions import Between, Everywhere
from fedquilt.runs.prepare import placed
from fedquilt.terms import Arch, Client, Job

COHORTS = {"five whole nets": (1.0,) * 5, "five of four shares": (1.0, 0.75, 0.5, 0.5, 0.25)}
METHODS: dict[str, Nested] = {"fedrescue": FedResCuE(), "fjord": FjORD()}
BATCH = 32


class Eager:
    """One client, everything that can be built once built once."""

    def __init__(
        self, family: fq.Family, arch: Arch, learner: Learner, precision: Precision, device: str
    ) -> None:
        self.family, self.arch, self.learner, self.precision, self.device = (
            family,
            arch,
            learner,
            precision,
            device,
        )
        self.net = batch_norms(family.module(arch)).to(device).train()
        sgd = learner.local.optimizer
        assert isinstance(sgd, fq.optimizers.SGD)
        settings = {
            "lr": sgd.lr,
            "momentum": sgd.momentum,
            "weight_decay": sgd.weight_decay,
            "nesterov": sgd.nesterov,
        }
        self.optimizer = torch.optim.SGD(self.net.parameters(), fused=True, **settings)
        self.nested: dict[float, nn.Module] = {}
        self.masks: dict[Between, list[Tensor]] = {}

    def learn(self, x: Tensor, y: Tensor, step: int) -> None:
        """One batch."""
        taught = None
        if self.learner.taught:
            with torch.no_grad(), self._rough():
                taught = self.net(x)
        for phase in self.learner.phases_at(step):
            self._phase(phase, x, y, taught)

    def _phase(self, phase: Phase, x: Tensor, y: Tensor, taught: Tensor | None) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        member = self.family.member(self.arch)
        known: dict[float | None, Tensor] = {}
        loss = x.new_zeros(())
        with self._rough():
            for part in phase.objective.terms:
                share = part.nets(member)[0].share
                if share not in known:
                    known[share] = self.net(x) if share is None else self._narrow(share, x)
                if isinstance(part, Distilled):
                    assert taught is not None
                    loss = loss + F.kl_div(
                        known[share].log_softmax(1),
                        taught.log_softmax(1),
                        reduction="batchmean",
                        log_target=True,
                    )
                else:
                    loss = loss + F.cross_entropy(known[share], y)
        loss.backward()
        own = list(self.net.parameters())
        if isinstance(phase.moves, Everywhere):
            self.optimizer.step()
            return
        assert isinstance(phase.moves, Between)
        free = self._mask(phase.moves)
        before = [weight.detach().clone() for weight in own]
        self.optimizer.step()
        with torch.no_grad():
            kept = torch._foreach_lerp(before, [weight.detach() for weight in own], free)
            torch._foreach_copy_(own, list(kept))

    def _narrow(self, share: float, x: Tensor) -> Tensor:
        inner = self.family.member(self.arch).nested(share)
        if share not in self.nested:
            self.nested[share] = batch_norms(self.family.module(inner)).to(self.device).train()
        own = dict(self.net.named_parameters())
        weights = {name: own[name] for name in self.family.trainable}
        cut = self.family.cutter.narrow(weights, prefix(self.arch).index, inner.index)
        logits: Tensor = torch.func.functional_call(self.nested[share], cut, (x,))
        return logits

    def _mask(self, moves: Between) -> list[Tensor]:
        if moves not in self.masks:
            names = [name for name, _ in self.net.named_parameters()]
            masks = [moves.mask(self.family.member(self.arch), name) for name in names]
            self.masks[moves] = [
                torch.as_tensor(mask, device=self.device).float() for mask in masks
            ]
        return self.masks[moves]

    def _rough(self) -> torch.autocast:
        return torch.autocast(self.device, torch.bfloat16, enabled=self.precision == "bf16")


def compare(
    method: Nested,
    shares: Sequence[float],
    family: fq.Family,
    images: int,
    precision: Precision,
    device: str,
    times: int,
) -> tuple[float, float]:
    """Milliseconds of a cohort's local epoch: one client after another, and ours."""
    data = cohort(len(shares), images)
    world = World(family, precision=precision)
    engine = Vectorized(data, torch.device(device), precision)
    federation, server = (
        fq.methods.api.Federation(world, method),
        placed(method.init(world), engine.device),
    )
    clients = [Client(id, fq.Budget(share=share), images) for id, share in enumerate(shares)]
    jobs = [Job(client, method.plan(server, client, world)[0], 0) for client in clients]
    learners = [method.learner(job, world) for job in jobs]
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    torch.backends.cudnn.benchmark = True
    here = engine.data
    eager = [
        Eager(family, job.submodel.arch, own, precision, device)
        for job, own in zip(jobs, learners, strict=True)
    ]

    def one_by_one() -> None:
        for client, own in enumerate(eager):
            for step in range(images // BATCH):
                rows = torch.arange(
                    client * images + step * BATCH, client * images + (step + 1) * BATCH
                )
                own.learn(here.samples(rows.to(device)), here.targets[rows.to(device)], step)

    base = median(one_by_one, times, 1)
    began = time.perf_counter()
    engine.train(federation, server, jobs, method.fold(server, world))
    print(f"    first epoch {time.perf_counter() - began:.1f} s", flush=True)
    ours = median(
        lambda: engine.train(federation, server, jobs, method.fold(server, world)), times, 1
    )
    return base, ours


def main() -> None:
    # of an epoch; a fifth of CIFAR-10 gives 16
    asked, precisions = versus(methods="fedrescue", batches=15)
    family = fq.trace(fq.models.MODELS["rescue_resnet"].factory, torch.zeros(2, 3, 32, 32))
    for precision in precisions:
        for name in asked.methods.split(","):
            for what, shares in COHORTS.items():
                images = asked.batches * BATCH
                base, ours = compare(
                    METHODS[name], shares, family, images, precision, asked.device, asked.times
                )
                each = [
                    f"{taken:.0f} ms, {taken / asked.batches:.1f} a batch" for taken in (base, ours)
                ]
                print(
                    f"{name}, {what}, {precision}: one client after another {each[0]}; ours "
                    f"{each[1]}",
                    end=": ",
                )
                print(f"{base / ours:.1f} times", flush=True)


if __name__ == "__main__":
    main()
