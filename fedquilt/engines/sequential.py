"""Reference engine, which trains one client after another without optimizations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.engines.samples import EvalSamples
from fedquilt.engines.simulation import Simulation
from fedquilt.round.budgets import learner_of
from fedquilt.round.client import (
    AfterRound,
    Start,
    finish,
    receive,
    remember,
    send,
    update_of,
    upload_of,
)
from fedquilt.round.client_checks import blamed, check_left, check_state
from fedquilt.round.client_state import kept_state, memory_of, steps_behind
from fedquilt.round.engine import Outcome
from fedquilt.round.eval_jobs import EvalSpec
from fedquilt.round.fold import Fold
from fedquilt.round.norm_statistics import mean_statistics
from fedquilt.round.scores import Score
from fedquilt.round.training.augmentation import augmented
from fedquilt.round.training.batches import batched
from fedquilt.round.training.learner import Learner
from fedquilt.round.training.optimizers import OptimizerState, State
from fedquilt.round.training.passes import ClientPass
from fedquilt.round.training.state import Received
from fedquilt.round.training.step import (
    Batch,
    StepSettings,
    clipped,
    gradient,
    move,
    run_pass,
    teach,
)
from fedquilt.terms import Job, Server, Weights


@dataclass
class Sequential(Simulation):
    """Engine that trains one client at a time.

    Every other engine must give the same numbers.
    """

    def _train(self, server: Server, jobs: Sequence[Job], fold: Fold, outcome: Outcome) -> None:
        """Train one client after another: receive, train, send, remember.

        Args:
            server: State that the clients start from.
            jobs: Clients with their sub-models.
            fold: Fold to which the update of each client is added.
            outcome: Outcome to which costs, losses and client states are added.
        """
        family, federation = self.world.family, self.federation
        for job in jobs:
            member, memory = family.member(job.submodel), memory_of(server, job)
            learner = learner_of(self.method, job, self.world)
            payload = self.payload(server, job, learner)
            start = receive(federation, job, learner, payload, memory, self.initial)
            if learner.lesson:
                start = self._take_lesson(job, learner.lesson, start)

            batches = self.batches(job, learner, start.extras)
            with self.computing():
                passes = self.run_passes(job, learner, learner.before, start.state, start.received)
                state, slots, losses = self.train_client(job, learner, start, batches)
                passes |= self.run_passes(job, learner, learner.after, state, start.received)
                method_state = finish(job, learner, start, state, len(batches), passes)
            self.check_finite(job, losses, [state[name] for name in learner.moved(member)])
            if learner.state:
                check_left(job, learner, member, method_state)
                check_state(job, method_state.tensors)

            sent_weights = {name: state[name] for name in learner.sent(member)}
            upload_submodel = learner.upload(
                member, job.submodel, self.classes_present(job.client.id)
            )
            narrowed = family.cutter.narrow(
                sent_weights, job.submodel.positions, upload_submodel.positions
            )
            upload = upload_of(federation, job, learner, upload_submodel, narrowed, method_state)
            delivery = send(federation, job, upload, start.known, memory, self.initial)

            steps = steps_behind(memory, learner, len(batches))
            own_state = kept_state(
                federation, learner, start.state_slots, start.extras, method_state
            )
            new_memory = remember(
                federation,
                job,
                learner,
                AfterRound(state, slots, steps, delivery.slots, own_state),
                memory,
                self.initial,
            )
            if new_memory:
                outcome.memory[job.client.id, job.submodel.scope] = new_memory

            macs = self.macs(job.client.id, learner, member, list(map(len, batches)))
            outcome.charge(job.client.id, start.bytes, delivery.bytes, macs, start.first_bytes)
            outcome.losses.append(float(losses.mean()))
            outcome.stacks += 1
            fold.add(update_of(job, learner, delivery.sent, steps, len(batches)))

    def _take_lesson(self, job: Job, lesson: Learner, start: Start) -> Start:
        """Train a client on public samples before it trains on its own.

        The optimizer begins without slots, and its slots are dropped afterwards.

        Args:
            job: Client, round and sub-model.
            lesson: Settings of the training on public samples.
            start: Weights, slots and extras that the client received.

        Returns:
            The start of the training on its own samples, which differs in the weights only.
        """
        public = self.on_public(self.world)
        public.begin(self.federation)
        public.extra_shapes = self.extra_shapes
        with self.computing():
            batches = public.batches(job, lesson, start.extras)
            state, _, _ = public.train_client(job, lesson, replace(start, slots=None), batches)
        return replace(start, state=state)

    def train_client(
        self, job: Job, learner: Learner, start: Start, batches: Sequence[Tensor]
    ) -> tuple[State, OptimizerState, Tensor]:
        """Train one client on its batches.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            start: Weights, slots and extras that the client starts from.
            batches: Positions of the samples of every batch.

        Returns:
            Its weights, its optimizer slots, and the losses (step,).
        """
        member = self.world.family.member(job.submodel)
        state, received = start.state, start.received
        slots = learner.start_slots(state, member) if start.slots is None else start.slots
        class_mask, losses = self.classes_present(job.client.id).to(self.device), []
        table = self.teacher_rows(learner, start.extras).table if learner.teacher else None
        with blamed(job, "training"):
            for step, rows in enumerate(batches):
                self.before_batch(job, step, len(batches))
                batch = self._batch(job, learner, rows, class_mask, step)
                if table is not None:
                    batch = replace(batch, taught=table[rows.to(self.device)])
                if learner.taught:
                    batch = replace(
                        batch,
                        taught=teach(learner.teaching_net(member), learner.local, state, batch),
                    )
                rate = learner.rate(step, len(batches))
                for number, phase in enumerate(learner.phases_at(step)):
                    grads, (loss, buffers) = gradient(
                        learner, member, phase.objective, state, received, batch
                    )
                    grads = clipped(grads, learner.local.optimizer.clip)
                    masks = learner.masks(member, phase, self.device)
                    count = start.steps + learner.moves(step) + number
                    state, slots = move(
                        learner, phase, state, slots, grads, masks, StepSettings(count, rate)
                    )
                    state = {**state, **buffers}
                losses.append(loss)
        return state, slots, torch.stack(losses) if losses else torch.zeros(0)

    def before_batch(self, job: Job, step: int, num_batches: int) -> None:
        """Do nothing before each training batch. Subclasses may raise an error to stop a client.

        Args:
            job: Client, round and sub-model.
            step: Number of the batch, from 0.
            num_batches: Batches of the client in this round.
        """

    def run_passes(
        self,
        job: Job,
        learner: Learner,
        passes: Sequence[ClientPass],
        state: State,
        received: Received,
    ) -> dict[str, State]:
        """Run passes that are not training steps for one client.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            passes: Passes to run.
            state: Current weights and buffers of the client. They do not change.
            received: Weights and slots that the client received.

        Returns:
            Result of each pass, merged over its batches, by the name of the pass.
        """
        member = self.world.family.member(job.submodel)
        results = {}
        for client_pass in passes:
            rows = self.pass_batches(job, learner, client_pass)
            with blamed(job, f"running its pass {client_pass.name!r}"):
                parts = [
                    run_pass(
                        learner,
                        member,
                        client_pass,
                        state,
                        received,
                        self._pass_batch(job, learner, client_pass, batch_rows, number),
                    )
                    for number, batch_rows in enumerate(rows)
                ]
                results[client_pass.name] = client_pass.merged(
                    parts, [len(batch_rows) for batch_rows in rows]
                )
        return results

    def _pass_batch(
        self, job: Job, learner: Learner, client_pass: ClientPass, rows: Tensor, number: int
    ) -> Batch:
        """Return one batch of a pass.

        Args:
            job: Client, round and sub-model.
            learner: Local training.
            client_pass: Pass to run.
            rows: Positions of the batch's samples, (sample,).
            number: Number of the batch in the pass, for its random key.
        """
        inputs, targets = self.pass_samples(client_pass, rows.to(self.device))
        pass_key = torch.tensor(self.pass_key(job, learner, client_pass), device=self.device)
        key = noise.fold_in(pass_key, number)
        share = torch.tensor(learner.share, dtype=self.world.dtype, device=self.device)
        return Batch(
            inputs, targets, self.classes_present(job.client.id).to(self.device), key, share
        )

    def _batch(
        self, job: Job, learner: Learner, rows: Tensor, class_mask: Tensor, step: int
    ) -> Batch:
        """Return the augmented batch of one training step.

        Args:
            job: Client, round and sub-model.
            learner: Local training, which names the augmentation.
            rows: Positions of the batch's samples, (sample,).
            class_mask: True where the client has samples of a class, (class,).
            step: Step within the round.
        """
        rows = rows.to(self.device)
        key = noise.fold_in(torch.tensor(self.keys(job)[1], device=self.device), step)
        inputs, targets = self.data.samples(rows), self.data.targets[rows]
        inputs, targets = augmented(inputs, targets, learner.local, key, learner.task)
        share = torch.tensor(learner.share, dtype=self.world.dtype, device=self.device)
        return Batch(inputs, targets, class_mask, key, share)

    def _evaluate(self, evaluations: Sequence[EvalSamples], batch_size: int) -> list[Score]:
        task, scores = self.world.task, []
        for evaluation in evaluations:
            spec, score = evaluation.spec(self.method.local.norm), Score(evaluation.label)
            batches = batched(evaluation.samples.to(self.device), batch_size)
            for rows, mask in zip(
                batches, batched(evaluation.stored_mask(task), batch_size), strict=True
            ):
                with torch.no_grad():
                    inputs, targets = self.samples(spec, rows)
                    attack_start = spec.drawn(self.world.seed, rows, inputs)
                    logits = spec.logits(
                        self.world, evaluation.weights, inputs, targets, attack_start
                    )
                    sums = task.sums(logits, targets, evaluation.class_mask, evaluation.absent)
                batch_score = Score(
                    evaluation.label, {name: value.cpu() for name, value in sums.items()}
                )
                if task.collected:
                    batch_score = replace(
                        batch_score, outputs=logits.cpu()[mask], targets=targets.cpu()[mask]
                    )
                score = score + batch_score
            scores.append(score)
        return scores

    def _calibrate(
        self, nets: Sequence[tuple[EvalSpec, Weights]], batches: list[Tensor]
    ) -> list[dict[str, Tensor]]:
        statistics = []
        for spec, weights in nets:
            measured = []
            for rows in batches:
                with torch.no_grad():
                    inputs, targets = self.samples(spec, rows)
                    attack_start = spec.drawn(self.world.seed, rows, inputs)
                    measured.append(
                        spec.statistics(self.world, weights, inputs, targets, attack_start)
                    )
            statistics.append(mean_statistics(measured, len(measured)))
        return statistics
