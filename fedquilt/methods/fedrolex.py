"""FedRolex: rolling sub-model extraction (Alam et al., NeurIPS 2022)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedquilt.checks import within
from fedquilt.family.cut import windows
from fedquilt.family.family import Rounding
from fedquilt.methods.method import Method, Presets
from fedquilt.methods.partial import PARTIAL, TABLE_8, TABLE_12, TABLES_10_AND_11, released_settings
from fedquilt.round.federation import World
from fedquilt.round.merge import Weighting
from fedquilt.round.training.local import Local
from fedquilt.terms import Arch, Budget, Client, Job, Mix, Server, Submodel


@dataclass(frozen=True)
class FedRolex(Method):
    """Clients train a window of channels that moves on each round, so that every weight gets its turn.

    `plan` is the paper's rolling index set; local training and overlap averaging are HeteroFL's. The server's model may
    be larger than any client's: give the clients shares below 1.

    The presets `released-settings` (a few classes a client) and `released-settings-iid` have the local training, the
    rounding and the direction of the authors' code, and the merge of the paper (equation 10). Two things of that code
    are not reproduced. (1) It merges norms and the output layer by counts that grow inside its loop over clients: with
    u(p) earlier updates of a position p, the m-th holder of p in a round counts u(p) + m, so that the result depends on
    the order of the clients. Its `--weighting updates` are these counts in convolutions, too. (2) `--overlap` draws a
    random permutation a layer, so that residual sums are misaligned, and moves on once a client.
    """

    local: Local = PARTIAL
    weighting: Weighting = "uniform"
    shift: int = 1  # channels the window moves each round; 0 gives HeteroFL, -1 the released code's direction
    offset: int = 0  # where the first window starts; Figure 1 draws its small client's at 2
    overlap: float | None = (
        None  # appendix A.4's r in [0, 1]: steps of 1 + floor(share·(1 − r)·K); None: `shift`
    )
    rounding: Rounding = "floor"  # of a share of an axis, to whole channels
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

    def plan(self, server: Server, client: Client, world: World) -> list[Submodel]:
        member = self.fit(client.budget, world, self.rounding)
        return [self._window(member, client.budget, server.round, world)]

    def _window(self, member: Arch, budget: Budget, round: int, world: World) -> Submodel:
        """Equation 4: on an axis of K channels the window starts at (offset + round · step) mod K and wraps."""
        axes, sizes, starts = world.family.layout.axes, world.family.layout.sizes, {}
        for axis, width in member.widths:
            at = self.offset + round * self._step(
                self._share(budget) or width / sizes[axis], sizes[axis]
            )
            # Groups move on when the channels inside them have come round, or some pairs would never meet.
            turn = max((sizes[name] for name in axes[axis].inner), default=1)
            starts[axis] = at // turn
        return windows(member, starts, sizes)

    @staticmethod
    def _share(budget: Budget) -> float | None:
        """The paper's share, where it is all that bounds the member."""
        return budget.share if budget.macs is budget.params is budget.memory is None else None

    def _step(self, share: float, size: int) -> int:
        if self.overlap is None:
            return self.shift
        return 1 + math.floor(round(share * (1 - self.overlap) * size, 9))  # 0.29 * 100 is 28.999…

    def divisor(self, job: Job, world: World) -> float:
        return self.trainable_share(job.client.budget, world, self.rounding)

    def deploy(self, server: Server, budget: Budget, world: World) -> Mix:
        """The window that was trained last."""
        member = world.family.fit(budget, self.rounding)
        return (self._window(member, budget, max(0, server.round - 1), world),)


# --- coverage: appendix A.1 -------------------------------------------------------------------------------------


def rounds_to_cover_rolling(indices: int, times: int = 1) -> int:
    """Rounds until a rolling choice of one index a round has met each of them `times` times."""
    return indices * times


def rounds_to_cover_random(indices: int, times: int = 1) -> float:
    """Lemmas 1 and 2: expected rounds until a random choice has met each of `indices` at least `times` times.

    I · ∫ (1 − (1 − S_m(t)·e^−t)^I) dt, with S_m the first m terms of e^t: S_m(t)·e^−t is Γ(m, t)/Γ(m), the chance that
    an index has been met fewer than m times.
    """
    end = times + 12 * math.sqrt(times) + 2 * math.log(indices) + 60
    t = torch.linspace(0.0, end, 400_001, dtype=torch.float64)
    rare = torch.special.gammaincc(torch.tensor(float(times), dtype=torch.float64), t)
    missed = -torch.expm1(indices * torch.log1p(-rare.clamp(max=1.0 - 2.0**-53)))
    ends, odd, even = missed[0] + missed[-1], missed[1:-1:2].sum(), missed[2:-1:2].sum()
    return float(indices * (ends + 4 * odd + 2 * even) * (t[1] - t[0]) / 3)  # Simpson's rule
