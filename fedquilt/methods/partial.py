"""Common settings of partial-training papers: local training, and FedRolex's comparison."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedquilt.family.norms import BatchStatistics, MeasuredOnAll
from fedquilt.round.method import Presets
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD, Adam
from fedquilt.round.training.schedules import Steps

# Static norms and a scaler (FedRolex, section 4). The loss over the client's own classes is
# HeteroFL's. FedRolex's paper does not mention it, but its released code has it.
PARTIAL = LocalTraining(norm=MeasuredOnAll(), scaler=True, masked="client")

_CIFAR10 = replace(
    PARTIAL, optimizer=SGD(lr=2e-4, momentum=0.9, weight_decay=5e-4), batch_size=10, crop=4
)
_CIFAR100 = replace(_CIFAR10, optimizer=replace(_CIFAR10.optimizer, lr=1e-4), batch_size=24)
_STACK_OVERFLOW = replace(_CIFAR10, batch_size=24, crop=0)


def _at(local: LocalTraining, *milestones: int) -> dict[str, Any]:
    """Return a preset with uniform weights (equation 10) and a stepped learning rate.

    Args:
        local: Local training, whose schedule is replaced.
        milestones: Rounds at which the learning rate is divided by 10.
    """
    return {"local": replace(local, schedule=Steps(milestones, 0.1)), "weighting": "uniform"}


# The code released with FedRolex, as its README starts it on CIFAR-10. Clients run in processes
# that read config.yml: Adam and batches of 128, without static norms. The scheduler steps before
# the first round, so that the rate falls one round earlier than `--schedule 1200` says, or
# `--schedule 800 1200` on iid data.
_RELEASED = replace(
    PARTIAL,
    optimizer=Adam(lr=2e-4, weight_decay=5e-4, clip=1.0),
    batch_size=128,
    norm=BatchStatistics(),
    crop=4,
    flip=True,
)


def released_settings(**settings: Any) -> Presets:
    """Return presets with the local settings and the rounding of FedRolex's released code.

    They are `released-settings` and `released-settings-iid`, which differ in the schedule.

    Args:
        settings: Further settings of the method, which are added to each preset.
    """
    return {
        name: {
            "local": replace(_RELEASED, schedule=Steps(milestones, 0.25)),
            "rounding": "ceil",
            **settings,
        }
        for name, milestones in (
            ("released-settings", (1199,)),
            ("released-settings-iid", (799, 1199)),
        )
    }


# FedRolex, Tables 8 and 13. "high" is two labels per client and "low" is five. The settings of both
# are equal on CIFAR-100. Rounds and fleets are not part of a method: fedquilt/papers/fedrolex has
# complete experiments.
TABLE_8: Presets = {
    "fedrolex-cifar10-high": _at(_CIFAR10, 800, 1500),
    "fedrolex-cifar10-low": _at(_CIFAR10, 800, 1250),
    "fedrolex-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-stackoverflow": _at(_STACK_OVERFLOW, 600, 800),
}

# FedRolex, Tables 10 and 11, for Figure 3: a part ρ of the clients is large and the others are
# small. High and low heterogeneity have the same settings. "mid" is ρ from 0.3 to 0.7, "ends" is
# every other ρ. The captions say "between 0.0 and 0.5" and "between 0.5 and 1.0" in increments of
# 0.1, but there is no column for 0.5. The columns beside it are equal. Stack Overflow has rows for
# both heterogeneities, although its own users are the clients.
TABLES_10_AND_11: Presets = {
    "fedrolex-figure3-cifar10-mid": _at(_CIFAR10, 700, 1200),
    "fedrolex-figure3-cifar10-ends": _at(_CIFAR10, 500, 1000),
    "fedrolex-figure3-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-figure3-stackoverflow": _at(_STACK_OVERFLOW, 800),
}

# FedRolex, Table 12, for Figure 4: the server's model is γ times as large as any client's. The
# settings are the same for every γ. Stack Overflow has rows for both heterogeneities here too.
TABLE_12: Presets = {
    "fedrolex-figure4-cifar10": _at(_CIFAR10, 800, 1200),
    "fedrolex-figure4-cifar100": _at(_CIFAR100, 800, 1200),
    "fedrolex-figure4-stackoverflow": _at(_STACK_OVERFLOW, 800),
}

# FedRolex, Table 9: settings for one model that all clients train, with the names of Table 8.
TABLE_9: Presets = {
    "fedrolex-cifar10-high": _at(_CIFAR10, 500, 1000),
    "fedrolex-cifar10-low": _at(_CIFAR10, 500, 1000),
    "fedrolex-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-stackoverflow": _at(_STACK_OVERFLOW, 300),
}
