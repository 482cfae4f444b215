"""The stages of ProgFed: their names and lengths, a round's stage, and a loss over two stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from fedquilt.errors import ConfigError
from fedquilt.family.family import Family
from fedquilt.family.member import Member
from fedquilt.round.training.objectives import Passes, Wrapping
from fedquilt.round.training.view import View
from fedquilt.terms import WHOLE


class Moment(NamedTuple):
    """Position of a round in the growth of the model."""

    stage: int  # Number of the stage, from 1. The paper's s.
    warm: bool  # True in a warm-up round, in which only the new block and its head are trained.
    round: int  # Round that is passed to the learning-rate schedule.


def num_stages(family: Family) -> int:
    """Return the number of stages of a family including the whole model, the paper's S."""
    return 1 + sum(variant.startswith("stage") for variant in family.variants)


def stage_name(stage: int, last: int) -> str:
    """Return the name of a stage's variant, `stage1` for the first. The last is the whole model.

    Args:
        stage: Number of the stage, from 1.
        last: Number of stages.
    """
    return WHOLE if stage == last else f"stage{stage}"


@lru_cache(maxsize=256)
def stage_lengths(
    num_stages: int,
    rounds: int,
    stage_rounds: int | tuple[int, ...],
    warmup: int,
    extra_warmup: bool,
) -> tuple[int, ...]:
    """Return the rounds of every stage with its warm-up, T_1..T_S. Their sum is T.

    Args:
        num_stages: Number of stages S, of which the last is the whole model.
        rounds: Number of rounds T of the run.
        stage_rounds: Rounds T_s of every stage but the last, or of each stage. 0: T/2S.
        warmup: Warm-up rounds of every stage but the first. 0: none.
        extra_warmup: Warm-up rounds are added to T_s. False: they are the first rounds of a stage.

    Raises:
        ConfigError: No round is left for the whole model, or a warm-up is as long as its stage.
    """
    if num_stages == 1:
        return (rounds,)
    if not rounds:
        raise ConfigError(
            "ProgFed was prepared without a number of rounds, on which the length of its stages "
            "depends. method.settled(rounds) gives it; fq.run and the command line do that."
        )
    added = warmup * (num_stages - 1) if extra_warmup else 0
    total = rounds - added
    if isinstance(stage_rounds, tuple) and len(stage_rounds) not in (num_stages - 1, num_stages):
        raise ConfigError(
            f"ProgFed was asked for with stage_rounds = {list(stage_rounds)}, rounds of "
            f"{len(stage_rounds)} stages; the model has {num_stages}. A number for each would "
            "work, or for each but the last, which takes the rest."
        )
    each = stage_rounds or max(1, total // (2 * num_stages))
    growing = each[: num_stages - 1] if isinstance(each, tuple) else (each,) * (num_stages - 1)
    last_rounds = total - sum(growing)
    if (
        isinstance(stage_rounds, tuple)
        and len(stage_rounds) == num_stages
        and stage_rounds[-1] != last_rounds
    ):
        raise ConfigError(
            f"ProgFed was asked for with stage_rounds = {list(stage_rounds)}, which are "
            f"{sum(stage_rounds)} rounds; the run has {total}. Rounds of all stages but the last "
            "would work, which takes the rest."
        )
    lengths = (*growing, last_rounds)
    if min(lengths) < 1:
        raise ConfigError(
            f"ProgFed was asked for with {rounds} rounds, of which {sum(growing) + added} are for "
            f"the first {num_stages - 1} of {num_stages} stages{' and warm-up' if added else ''}; "
            "at least one is needed for each stage and for the whole model. More rounds, smaller "
            f"stage_rounds or fewer stages{' or a shorter warmup' if added else ''} would work."
        )
    if extra_warmup:
        return (lengths[0], *(length + warmup for length in lengths[1:]))
    shortest = min(lengths[1:])
    if shortest <= warmup:
        raise ConfigError(
            f"ProgFed was asked for with warmup = {warmup}, and a stage has {shortest} rounds; in "
            "a warm-up only the new block moves, so that it has to end before its stage. Up to "
            f"{shortest - 1} would work, or extra_warmup, which adds rounds to the stages."
        )
    return lengths


@dataclass(frozen=True)
class OfVariants(Wrapping):
    """Sum of another objective's losses over several variants of the client's net."""

    variants: tuple[str, ...] = (WHOLE,)  # Variants that are run, each once.

    def _nets(self, member: Member) -> list[Member]:
        return [member.at(variant) for variant in self.variants]

    @override
    def nets(self, member: Member) -> tuple[Member, ...]:
        nets = (
            net for variant_net in self._nets(member) for net in self.objective.nets(variant_net)
        )
        return tuple(dict.fromkeys(nets))

    @override
    def passes(self, member: Member) -> tuple[Passes, ...]:
        return tuple(
            net_pass
            for variant_net in self._nets(member)
            for net_pass in self.objective.passes(variant_net)
        )

    @override
    def __call__(self, view: View) -> Tensor:
        losses: list[Tensor] = []
        for net in self._nets(view.member):
            variant_view = replace(view, member=net, norm_statistics={})
            losses.append(self.objective(variant_view))
            view.norm_statistics |= {
                name: value
                for name, value in variant_view.norm_statistics.items()
                if name in view.member.statistics
            }
        return torch.stack(losses).sum()
