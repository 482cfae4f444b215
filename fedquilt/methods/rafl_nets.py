"""The nets of RaFL's union: the knowledge net, the private nets, and checks of them."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from fedquilt.family.cut import prefix
from fedquilt.family.family import Family
from fedquilt.family.tracing.trace import trace
from fedquilt.family.variants import members_of
from fedquilt.round.federation import World
from fedquilt.tasks import Task
from fedquilt.terms import (
    WHOLE,
    Arch,
    Budget,
    Submodel,
)

_log = logging.getLogger(__name__)


def knowledge_net(family: Family) -> Arch:
    """Return the knowledge net of a union, which is its first net."""
    return family.at(WHOLE).whole


def private_net(family: Family, name: str) -> Submodel:
    """Return a private net of a union by its name, at full width."""
    return prefix(family.at(name).whole)


@lru_cache(maxsize=16)
def private_nets(family: Family) -> tuple[str, ...]:
    """Return the names of a union's private nets, in descending order of multiply-adds."""
    names = [variant for variant in family.variants if variant != WHOLE]
    return tuple(sorted(names, key=lambda name: -macs_of(family, name)))


def needs_divergences(task: Task) -> None:
    """Refuse a task that does not define the distance between a net's outputs and a teacher's.

    Raises:
        ConfigError: The task does not define `divergences`.
    """
    if type(task).divergences is Task.divergences:
        nothing = torch.zeros(1, 1)
        task.divergences(nothing, nothing, nothing)  # Raises an error that says what is missing.


def warn_of_fixed_weights(world: World) -> None:
    """Warn if a private net has the same weights for every seed.

    Devices could not draw such weights from the seed, so that they would have to download them.
    """
    family = world.family
    weights, reseeded_weights = (family.init(seed) for seed in (world.seed, world.seed + 1))
    for name in private_nets(family):
        matrix_names = [
            key for key in family.member(family.at(name).whole).trainable if weights[key].dim() > 1
        ]
        if matrix_names and all(
            torch.equal(weights[key], reseeded_weights[key]) for key in matrix_names
        ):
            _log.warning(
                "the private net %r has the same weights for every seed, so that devices cannot "
                "draw them. transfer = True charges a device for downloading them; a union of "
                "functions that make the nets draws new ones.",
                name,
            )
            return


def macs_of(family: Family, name: str) -> int:
    """Return the multiply-adds of a union's net by its name, for a forward pass of one sample."""
    return family.member(family.at(name).whole).macs


def private_name(submodel: Submodel) -> str:
    """Return the name of the private net of a pair, or of a private net by itself."""
    return members_of(submodel.arch.variant)[-1]


def cut_out(family: Family, share: float) -> Family:
    """Trace a net that has a share of another family's channels, and return its family.

    Its initial weights depend on the seed, as those of the other family do.

    Args:
        family: Family that the net is cut from.
        share: Share of every axis, in (0, 1].
    """
    arch = family.fit(Budget(share=share))
    return trace(
        lambda: family.module(arch, family.init(torch.initial_seed())), family.example_inputs
    )
