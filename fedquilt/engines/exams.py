"""Tests of networks on samples at known positions, as engines that hold the samples run them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.data import FederatedData
from fedquilt.family.norms import NormPolicy
from fedquilt.round.attack import PGD
from fedquilt.round.serve import Domain, Kind, Score
from fedquilt.tasks import Task
from fedquilt.terms import Mix, Weights


@dataclass(frozen=True)
class Exam:
    """A network, or several whose logits are averaged, to be tested on samples at these positions."""

    label: str
    nets: Mix
    weights: Weights  # Already cut, by scope and name.
    samples: Tensor  # Positions in the test set, or in the training set (also for validation), on the CPU.
    held: Tensor | None = (
        None  # (class,) False where the client lacks the class. None: all classes count.
    )
    absent: float = -torch.inf  # Logit of the classes that a client lacks.
    robustness: float = 0.0  # Of dual norms.
    attack: PGD | None = None  # On the samples.
    training: bool = False  # The positions are in the training set.

    def kept(self, task: Task) -> Tensor:
        """Return (sample,) True for the samples whose outputs metrics need that are not made of sums."""
        chosen = torch.zeros(len(self.samples), dtype=torch.bool)
        chosen[task.kept_positions(len(chosen))] = True
        return chosen

    def kind(self, norm: NormPolicy) -> Kind:
        """Return what is run, which is equal for exams that run the same kernels."""
        nets = tuple(replace(net, index=Index()) for net in self.nets)
        return Kind(
            nets,
            replace(norm.evaluation_pass, robustness=self.robustness),
            self.attack,
            self.training,
        )


@dataclass(frozen=True)
class Piece:
    """An exam, or the part of it that has one domain."""

    exam: Exam
    of: int  # Position of the exam in the list.
    domain: int | None = None  # None: all domains.
    counts: bool = True  # It counts in the score of the whole.


def pieces(
    exams: Sequence[Exam], data: FederatedData, depends_on_batch: bool, batch_size: int
) -> list[Piece]:
    """Split exams by domain without testing a sample twice. The score of an exam is the sum of its pieces.

    Where a prediction depends on the rest of its batch, and batches of the whole would mix domains, pieces would give
    another score. There the whole is tested as without domains, and its domains besides.
    """
    found = [
        piece
        for place, exam in enumerate(exams)
        for piece in _cut(place, exam, data, depends_on_batch, batch_size)
    ]
    # Domain by domain: on a GPU a net's exams follow each other, and those of unequal nets overlap.
    found.sort(key=lambda piece: -1 if piece.domain is None else piece.domain)
    return found


def summed(
    exams: Sequence[Exam], found: Sequence[Piece], scores: Sequence[Score], data: FederatedData
) -> list[Score]:
    """Return the score of every exam, with the scores of its domains."""
    whole = [Score(exam.label) for exam in exams]
    by_domain: list[dict[Domain, Score]] = [{} for _ in exams]
    for piece, score in zip(found, scores, strict=True):
        if piece.counts:
            whole[piece.of] = whole[piece.of] + score
        if piece.domain is not None:
            by_domain[piece.of][piece.domain, _name(data, piece.domain)] = score
    return [replace(score, domains=own) for score, own in zip(whole, by_domain, strict=True)]


def _name(data: FederatedData, domain: int) -> str:
    return data.domain_names[domain] if domain < len(data.domain_names) else str(domain)


def _cut(
    place: int, exam: Exam, data: FederatedData, depends_on_batch: bool, batch_size: int
) -> Iterator[Piece]:
    if data.test_domains is None or exam.training:
        yield Piece(exam, place)
        return
    codes = data.test_domains[exam.samples]
    found = torch.bincount(codes).nonzero().flatten().tolist()
    if len(found) == 1:
        yield Piece(exam, place, found[0])
        return
    adds_up = not depends_on_batch or _are_apart(codes, batch_size)
    if not adds_up:
        yield Piece(exam, place)
    for domain in found:
        rows = exam.samples[codes == domain]
        if len(rows) > 1 or not depends_on_batch:  # A single sample has no statistics.
            yield Piece(replace(exam, samples=rows), place, domain, adds_up)


def _are_apart(codes: Tensor, batch_size: int) -> bool:
    """Return True if batches have one domain each: domain after domain, all but the last in whole batches."""
    runs, lengths = torch.unique_consecutive(codes, return_counts=True)
    once = len(runs) == len(runs.unique())
    whole = bool((lengths[:-1] % batch_size == 0).all())
    return once and whole and bool((lengths[-1:] > 1).all())
