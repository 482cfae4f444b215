"""The truth: one client after another, nothing clever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.engines.engine import Engine, Outcome
from fedquilt.round.merge import Fold
from fedquilt.round.serve import Exam, Kind, Score, mean_statistics, right
from fedquilt.round.training.batches import augment, batched
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.step import Batch, clipped, gradient, move, teach
from fedquilt.terms import Job, Payload, Server, Update, Weights

if TYPE_CHECKING:
    from fedquilt.methods.method import Method


@dataclass
class Sequential(Engine):
    """Trains one client at a time; every other engine must give its numbers."""

    def _train(self, method: Method, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        for job in jobs:
            learner = method.learner(job, self.world)
            fold.add(self._train_one(server, job, learner, outcome))
            outcome.stacks += 1

    def _train_one(self, server: Server, job: Job, learner: Learner, outcome: Outcome) -> Update:
        family, arch = self.world.family, job.submodel.arch
        start = self.start(server, job, learner)
        state, received = start.state, start.state
        slots = learner.start_slots(state, family) if start.slots is None else start.slots
        held, losses, batches = self.held(job.client.id).to(self.world.device), [], self.batches(job, learner)
        with self.blame(job, "training"):
            for step, rows in enumerate(batches):
                batch = self._batch(job, learner, rows, held, step)
                if learner.taught:
                    batch = replace(batch, taught=teach(family, arch, learner.local, state, batch))
                for place, phase in enumerate(learner.phases_at(step)):
                    grads, (loss, seen) = gradient(learner, family, arch, phase.objective, state, received, batch)
                    grads = clipped(grads, learner.local.optimiser.clip)
                    masks = learner.masks(family, arch, phase, self.world.device)
                    count = start.steps + learner.moves(step) + place
                    state, slots = move(learner, phase, state, slots, grads, masks, count)
                    state = {**state, **seen}
                losses.append(loss)
        self.check_finite(job, torch.stack(losses), [state[name] for name in learner.moved(family)])
        outcome.losses.append(float(torch.stack(losses).mean()))
        own = {name: state[name] for name in learner.sent(family)}
        wanted = learner.upload(family, job.submodel, held)
        payload = Payload(wanted, family.cutter.narrow(own, job.submodel.held, wanted.held))
        delivery = self.deliver(server, job, payload, start.known)
        macs = learner.macs(family, arch, list(map(len, batches)))
        outcome.charge(job.client.id, start.bytes, delivery.bytes, macs)
        steps = self.steps(server, job, learner, len(batches))
        memory = self.remember(server, job, learner, state, slots, steps, delivery.slots)
        if memory:
            outcome.memory[job.client.id, job.submodel.scope] = memory
        return self.update(job, learner, delivery.sent, steps, len(batches))

    def _batch(self, job: Job, learner: Learner, rows: Tensor, held: Tensor, step: int) -> Batch:
        rows = rows.to(self.world.device)
        key = noise.fold_in(torch.tensor(self.keys(job)[1], device=self.world.device), step)
        inputs = augment(self.data.samples(rows), learner.local, key)
        share = torch.tensor(learner.share, dtype=self.world.dtype, device=self.world.device)
        return Batch(inputs, self.data.targets[rows], held, key, share)

    def _evaluate(self, method: Method, exams: Sequence[Exam], batch_size: int) -> list[Score]:
        family, data, scores = self.world.family, self.data, []
        for exam in exams:
            kind, samples = exam.kind(method.local.norm), self.exam_samples(exam)
            total = torch.zeros(2, dtype=torch.int64, device=self.world.device)
            for rows in batched(samples, batch_size):
                with torch.no_grad():
                    inputs, targets = data.test_samples(rows), data.test_targets[rows]
                    drawn = kind.drawn(self.world.seed, rows, inputs)
                    logits = kind.logits(family, exam.weights, inputs, targets, drawn)
                    total += right(logits, targets, exam.held, exam.absent)
            scores.append(Score(exam.label, *map(int, total)))
        return scores

    def _calibrate(self, nets: Sequence[tuple[Kind, Weights]], batches: list[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for kind, weights in nets:
            measured = []
            for rows in batches:
                with torch.no_grad():
                    inputs = self.data.samples(rows)
                    drawn = kind.drawn(self.world.seed, rows, inputs)
                    measured.append(kind.statistics(self.world.family, weights, inputs, self.data.targets[rows], drawn))
            found.append(mean_statistics(measured, len(measured)))
        return found
