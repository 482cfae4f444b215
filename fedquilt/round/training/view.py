"""One batch of one client as an objective sees it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fedquilt.family.net import Pass
from fedquilt.round.training.optimizers import State
from fedquilt.tasks import Classification, Task
from fedquilt.terms import Slots, Weights

if TYPE_CHECKING:
    from fedquilt.family.member import Member


@dataclass
class View:
    """One batch of one client as an objective sees it."""

    member: Member  # The client's own net.
    weights: State  # Its weights, by name.
    inputs: Tensor  # (sample, …).
    targets: Tensor  # (sample, …).
    classes_present: Tensor  # (class,) True where the client has samples of the class.
    received: Weights  # Weights that the round started from.
    mode: Pass  # How nets run.
    key: Tensor  # Random key of the step.
    # Logits of the client's net before this batch. None unless the learner sets `taught`.
    taught: Tensor | None = None
    logits_by_net: dict[Member, Tensor] = field(
        default_factory=dict
    )  # Logits of nets that have been run.
    norm_statistics: State = field(
        default_factory=dict
    )  # Norm statistics of the widest net that was run.
    condition: Tensor | None = None  # (sample,) Robustness of each sample. None: that of the mode.
    importance: Tensor | None = None  # (sample,) Factor of each sample's loss. None: 1.
    share: float | Tensor = 1.0  # Share of the client's net, which the scaler divides by.
    # Slots of the method, both received ones and the client's own.
    slots: Slots = field(default_factory=dict)
    task: Task = Classification()  # Task whose loss objectives use.

    def logits(self, net: Member | None = None) -> Tensor:
        """Run a net on the batch, or return its logits if it has already run on it.

        So objectives of a sum that use the same net share the run. Running the client's own net
        also stores its norm statistics in `norm_statistics`.

        Args:
            net: The client's own net, or one nested in it. None: the client's own.

        Returns:
            The logits (sample, class, …).
        """
        net = self.member if net is None else net
        if net not in self.logits_by_net:
            self.logits_by_net[net] = self._run(net).movedim(net.class_dim, 1)
        return self.logits_by_net[net]

    def through(self, robustness: float, **changes: Any) -> View:
        """Return a copy of the view with another robustness of norms, in which no net has run yet.

        Args:
            robustness: Mixing weight of dual norms, from 0 (clean) to 1 (robust).
            **changes: Other fields of the view by name, such as `inputs`.
        """
        return replace(
            self,
            mode=replace(self.mode, robustness=robustness),
            logits_by_net={},
            norm_statistics={},
            **changes,
        )

    def _run(self, net: Member) -> Tensor:
        if net == self.member or (
            net.share is None and set(net.arch.widths) <= set(self.member.arch.widths)
        ):
            # This is the client's own net, another variant of it, or one net of a pair. If several
            # nets run the same norm, the statistics of the last run are kept.
            logits, statistics = net.net(
                self.weights, self.inputs, self.mode, self.key, self.condition, self.share
            )
            self.norm_statistics |= {
                name: value for name, value in statistics.items() if name in self.member.statistics
            }
            return logits
        narrowed = self.member.narrowed(self.weights, net)
        share = 1.0 if net.share is None else net.share
        return net.net(narrowed, self.inputs, self.mode, self.key, self.condition, share)[0]

    def loss(self, outputs: Tensor) -> Tensor:
        """Return the task's mean loss of `outputs` (sample, class, …) on the targets of the batch.

        Samples are weighted by `importance`, if it is set.
        """
        return self.task.mean_loss(outputs, self.targets, self.importance)
