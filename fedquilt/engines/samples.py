"""Evaluations of networks on samples at known positions, for engines that hold the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedquilt.axes import Index
from fedquilt.data import FederatedData
from fedquilt.family.norms import NormPolicy
from fedquilt.round.eval_jobs import EvalSpec
from fedquilt.round.scores import Domain, Score
from fedquilt.round.training.attacks import PGD
from fedquilt.tasks import Task
from fedquilt.terms import Submodels, Weights


@dataclass(frozen=True)
class EvalSamples:
    """Evaluation of a network on samples at given positions.

    The logits of several networks are averaged.
    """

    label: str  # Name of the evaluation in results.
    nets: Submodels  # Networks whose logits are averaged.
    weights: Weights  # Weights of the networks, already cut, by scope and name.
    # Positions of samples in the test set, or in the training set (also for validation), on the
    # CPU.
    samples: Tensor
    # (class,) False where the client lacks the class. None: all classes count.
    class_mask: Tensor | None = None
    absent: float = -torch.inf  # Logit of the classes that a client lacks.
    robustness: float = 0.0  # Robustness of dual norms, from 0 (clean) to 1 (attacked).
    attack: PGD | None = None  # Attack on the samples. None: clean samples.
    training: bool = False  # True: positions refer to the training set.

    def stored_mask(self, task: Task) -> Tensor:
        """Return a mask (sample,) that is True for samples whose outputs must be stored.

        Metrics that are not computed from sums need these outputs.
        """
        mask = torch.zeros(len(self.samples), dtype=torch.bool)
        mask[task.kept_positions(len(mask))] = True
        return mask

    def spec(self, norm: NormPolicy) -> EvalSpec:
        """Return the forward pass, which is equal for evaluations that run the same kernels.

        It has the architectures of the networks, without weights, positions or samples.

        Args:
            norm: Treatment of norms, which gives the mode of evaluation passes.
        """
        nets = tuple(replace(net, index=Index()) for net in self.nets)
        return EvalSpec(
            nets,
            replace(norm.evaluation_pass, robustness=self.robustness),
            self.attack,
            self.training,
        )


@dataclass(frozen=True)
class Piece:
    """Evaluation, or the part of it whose samples have one domain."""

    evaluation: EvalSamples  # Evaluation of the piece's samples.
    evaluation_index: int  # Position of the full evaluation in the list.
    domain: int | None = None  # Domain of the samples. None: all domains.
    counts: bool = True  # True: the piece counts in the score of the full evaluation.


def split_by_domain(
    evaluations: Sequence[EvalSamples], data: FederatedData, depends_on_batch: bool, batch_size: int
) -> list[Piece]:
    """Split evaluations by domain without evaluating a sample twice.

    The score of an evaluation is the sum over its pieces. This would be wrong if a prediction
    depends on the other samples of its batch and batches mix domains. The full evaluation is then
    not split, and its domains are evaluated in addition.

    Args:
        evaluations: Evaluations to split.
        data: Samples, with the domains of test samples.
        depends_on_batch: True if a prediction depends on the other samples of its batch.
        batch_size: Samples in a batch.

    Returns:
        Pieces of all evaluations, sorted by domain. Those of all domains come first.
    """
    all_pieces: list[Piece] = []
    for position, evaluation in enumerate(evaluations):
        all_pieces += _cut(position, evaluation, data, depends_on_batch, batch_size)
    # Sort by domain. On a GPU, evaluations of one net run one after another, and those of unequal
    # nets overlap.
    all_pieces.sort(key=lambda piece: -1 if piece.domain is None else piece.domain)
    return all_pieces


def sum_scores(
    evaluations: Sequence[EvalSamples],
    pieces: Sequence[Piece],
    scores: Sequence[Score],
    data: FederatedData,
) -> list[Score]:
    """Return the score of every evaluation, with the scores of its domains.

    Args:
        evaluations: Evaluations, as `split_by_domain` received them. The result has their order.
        pieces: Pieces of the evaluations, as `split_by_domain` returned them.
        scores: Score of every piece.
        data: Samples, with the names of domains.
    """
    totals = [Score(evaluation.label) for evaluation in evaluations]
    by_domain: list[dict[Domain, Score]] = [{} for _ in evaluations]
    for piece, score in zip(pieces, scores, strict=True):
        if piece.counts:
            totals[piece.evaluation_index] = totals[piece.evaluation_index] + score
        if piece.domain is not None:
            by_domain[piece.evaluation_index][piece.domain, _name(data, piece.domain)] = score
    return [
        replace(score, domains=domain_scores)
        for score, domain_scores in zip(totals, by_domain, strict=True)
    ]


def _name(data: FederatedData, domain: int) -> str:
    """Return the name of a domain, or its number if it has none."""
    return data.domain_names[domain] if domain < len(data.domain_names) else str(domain)


def _cut(
    evaluation_index: int,
    evaluation: EvalSamples,
    data: FederatedData,
    depends_on_batch: bool,
    batch_size: int,
) -> Iterator[Piece]:
    """Yield the pieces of one evaluation.

    An evaluation on training samples, or of data without domains, is one piece. A domain with a
    single sample is left out if predictions depend on the batch.

    Args:
        evaluation_index: Position of the evaluation in the list.
        evaluation: Evaluation to split.
        data: Samples, with the domains of test samples.
        depends_on_batch: True if a prediction depends on the other samples of its batch.
        batch_size: Samples in a batch.
    """
    if data.test_domains is None or evaluation.training:
        yield Piece(evaluation, evaluation_index)
        return
    codes = data.test_domains[evaluation.samples]
    domains = torch.bincount(codes).nonzero().flatten().tolist()
    if len(domains) == 1:
        yield Piece(evaluation, evaluation_index, domains[0])
        return
    adds_up = not depends_on_batch or _are_apart(codes, batch_size)
    if not adds_up:
        yield Piece(evaluation, evaluation_index)
    for domain in domains:
        rows = evaluation.samples[codes == domain]
        if len(rows) > 1 or not depends_on_batch:  # A single sample has no statistics.
            yield Piece(replace(evaluation, samples=rows), evaluation_index, domain, adds_up)


def _are_apart(codes: Tensor, batch_size: int) -> bool:
    """Return True if evaluating each domain alone gives the same batches as all domains at once.

    For that, domains must follow each other, and all but the last must fill whole batches. The last
    one needs two samples or more, because a single sample is not evaluated alone.

    Args:
        codes: Domain of each sample, in the order of evaluation, (sample,).
        batch_size: Samples in a full batch.
    """
    runs, lengths = torch.unique_consecutive(codes, return_counts=True)
    is_contiguous = len(runs) == len(runs.unique())
    fills_batches = bool((lengths[:-1] % batch_size == 0).all())
    return is_contiguous and fills_batches and bool((lengths[-1:] > 1).all())
