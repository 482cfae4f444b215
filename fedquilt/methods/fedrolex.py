"""FedRolex: rolling sub-model extraction (Alam et al., NeurIPS 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from typing_extensions import override

from fedquilt.checks import within
from fedquilt.family.cut import windows
from fedquilt.family.family import Rounding
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLE_12, TABLES_10_AND_11, released_settings
from fedquilt.round.federation import World
from fedquilt.round.fold import Weighting
from fedquilt.round.method import Method, Presets
from fedquilt.round.training.local import LocalTraining
from fedquilt.terms import Arch, Budget, Client, Job, Server, Submodel, Submodels


@dataclass(frozen=True)
class FedRolex(Method):
    """Clients train a window of channels that moves each round, so that all weights are trained.

    `plan` is the paper's rolling index set. Local training and overlap averaging are HeteroFL's.
    The server's model is larger than any client's if all clients have shares below 1.

    The presets `released-settings` (a few classes per client) and `released-settings-iid` have the
    local training, the rounding and the direction of the authors' code, and the merge of the paper
    (equation 10). Two parts of that code are not reproduced:

    1. It merges norms and the output layer by counts that grow inside its loop over clients. If a
       position p has u(p) earlier updates, the m-th holder of p in a round has weight u(p) + m. The
       result thus depends on the order of the clients. Its option `--weighting updates` uses these
       counts in convolutions too.
    2. Its option `--overlap` draws a random permutation for each layer, so that residual sums are
       misaligned. The window moves after each client instead of each round.
    """

    local: LocalTraining = PARTIAL
    weighting: Weighting = "uniform"
    # Channels that the window moves each round. 0 gives HeteroFL, -1 is the released direction.
    shift: int = 1
    offset: int = 0  # First channel of the first window. Figure 1 has 2 for its small client.
    # Overlap r in [0, 1] of appendix A.4: the window moves by 1 + floor(share·(1 − r)·K) channels.
    # None: it moves by `shift`.
    overlap: float | None = None
    rounding: Rounding = "floor"  # Rounding of a share of an axis to a whole number of channels.
    paper = "Alam et al. 2022"
    presets: ClassVar[Presets] = {
        "paper": TABLE_8["fedrolex-cifar10-high"],
        **TABLE_8,
        **TABLES_10_AND_11,
        **TABLE_12,
        **released_settings(shift=-1),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.overlap is not None:
            within(self, overlap="[0, 1]")

    @override
    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = self.fit(client.budget, world, self.rounding)
        return [self._window(member, client.budget, server.round, world)]

    def _window(self, member: Arch, budget: Budget, round: int, world: World) -> Submodel:
        """Return the window of a round (equation 4).

        On an axis of K channels it starts at (offset + round · step) mod K, and wraps around. An
        axis of groups moves more slowly than the axes inside of its groups.

        Args:
            member: Architecture of the client, which has the width of the window on every axis.
            budget: Budget of the client. Its share decides the step if `overlap` is set.
            round: Round, from 0.
            world: World, whose family has the full sizes of the axes.
        """
        axes = world.family.layout.axes
        sizes = world.family.layout.sizes
        starts = {}
        for axis, width in member.widths:
            start = self.offset + round * self._step(
                self._share(budget) or width / sizes[axis], sizes[axis]
            )
            # An axis of groups moves only after the channels inside the groups have wrapped around.
            # Else some pairs of group and channel would never be trained together.
            turn = max((sizes[name] for name in axes[axis].inner), default=1)
            starts[axis] = start // turn
        return windows(member, starts, sizes)

    @staticmethod
    def _share(budget: Budget) -> float | None:
        """Return the share of a budget if it has no bound on cost or memory, else None."""
        return budget.share if budget.macs is budget.params is budget.memory is None else None

    def _step(self, share: float, size: int) -> int:
        """Return the number of channels by which the window moves each round.

        It is `shift`, unless an `overlap` of successive windows is set.

        Args:
            share: Share of the channels that the window has, in (0, 1].
            size: Number of all channels of the axis.
        """
        if self.overlap is None:
            return self.shift
        return 1 + math.floor(round(share * (1 - self.overlap) * size, 9))  # 0.29 * 100 == 28.999…

    @override
    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    @override
    def deploy(self, server: Server, budget: Budget, world: World) -> Submodels:
        """Return the window within a budget at the position of the last completed round.

        Before the first round it is the window of that round.

        Args:
            server: State of the server.
            budget: Budget of the device.
            world: Family, task and random seed.
        """
        member = world.family.fit(budget, self.rounding)
        return (self._window(member, budget, max(0, server.round - 1), world),)


# --- coverage: appendix A.1 ---------------------------------------------------------------------


def rounds_to_cover_rolling(indices: int, times: int = 1) -> int:
    """Return the rounds after which a rolling index has visited every index `times` times.

    Args:
        indices: Number of indices. One is visited per round.
        times: Visits that every index needs.
    """
    return indices * times


def rounds_to_cover_random(indices: int, times: int = 1) -> float:
    """Return the expected rounds until random draws have visited every index `times` times.

    Lemmas 1 and 2 give I · ∫ (1 − (1 − S_m(t)·e^−t)^I) dt, where S_m are the first m terms of the
    series of e^t. S_m(t)·e^−t = Γ(m, t)/Γ(m) is the probability that an index has been visited
    fewer than m times.

    Args:
        indices: Number of indices, I. One is drawn per round.
        times: Visits that every index needs, m.
    """
    end = times + 12 * math.sqrt(times) + 2 * math.log(indices) + 60
    t = torch.linspace(0.0, end, 400_001, dtype=torch.float64)
    rare = torch.special.gammaincc(torch.tensor(float(times), dtype=torch.float64), t)
    missed = -torch.expm1(indices * torch.log1p(-rare.clamp(max=1.0 - 2.0**-53)))
    ends = missed[0] + missed[-1]
    odd = missed[1:-1:2].sum()
    even = missed[2:-1:2].sum()
    return float(indices * (ends + 4 * odd + 2 * even) * (t[1] - t[0]) / 3)  # Simpson's rule
