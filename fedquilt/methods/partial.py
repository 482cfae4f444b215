"""What the partial-training papers share: how clients train, and the settings in which FedRolex compared them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedquilt.family.norms import BatchStatistics, MeasuredOnAll
from fedquilt.methods.method import Presets
from fedquilt.round.training.local import Local
from fedquilt.round.training.optimizers import SGD, Adam
from fedquilt.round.training.schedules import Steps

# Static norms and a scaler (FedRolex, section 4). The loss over the client's own classes is HeteroFL's. FedRolex's
# paper does not mention it, but its released code has it.
PARTIAL = Local(norm=MeasuredOnAll(), scaler=True, masked="client")

_CIFAR10 = replace(PARTIAL, optimiser=SGD(lr=2e-4, momentum=0.9, decay=5e-4), batch_size=10, crop=4)
_CIFAR100 = replace(_CIFAR10, optimiser=replace(_CIFAR10.optimiser, lr=1e-4), batch_size=24)
_STACK_OVERFLOW = replace(_CIFAR10, batch_size=24, crop=0)


def _at(local: Local, *milestones: int) -> dict[str, Any]:
    """Clients count alike (equation 10), and a tenth of the learning rate is left after each milestone."""
    return {"local": replace(local, schedule=Steps(milestones, 0.1)), "weighting": "uniform"}


# The code released with FedRolex, as its README starts it on CIFAR-10. Clients run in processes that read config.yml:
# Adam and batches of 128, without static norms. The scheduler steps before the first round, so that the rate falls one
# round earlier than `--schedule 1200` says, or `--schedule 800 1200` on iid data.
_RELEASED = replace(
    PARTIAL,
    optimiser=Adam(lr=2e-4, decay=5e-4, clip=1.0),
    batch_size=128,
    norm=BatchStatistics(),
    crop=4,
    flip=True,
)


def released_settings(**own: Any) -> Presets:
    """Return the local settings of FedRolex's released code, with those that a method has besides."""
    return {
        name: {
            "local": replace(_RELEASED, schedule=Steps(milestones, 0.25)),
            "rounding": "ceil",
            **own,
        }
        for name, milestones in (
            ("released-settings", (1199,)),
            ("released-settings-iid", (799, 1199)),
        )
    }


# FedRolex, Tables 8 and 13: "high" is two labels a client and "low" five; CIFAR-100's are alike. Rounds and fleets are
# no part of a method: fedquilt/papers/fedrolex has whole experiments.
TABLE_8: Presets = {
    "fedrolex-cifar10-high": _at(_CIFAR10, 800, 1500),
    "fedrolex-cifar10-low": _at(_CIFAR10, 800, 1250),
    "fedrolex-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-stackoverflow": _at(_STACK_OVERFLOW, 600, 800),
}

# FedRolex, Tables 10 and 11: Figure 3, where a part ρ of the clients is large and the others are
# small. High and low heterogeneity are alike. "mid" is ρ from 0.3 to 0.7, "ends" are the others.
# The captions say "between 0.0 and 0.5" and "between 0.5 and 1.0" in increments of 0.1, but there is
# no column for 0.5, whose neighbours are alike. Stack Overflow has rows for both heterogeneities,
# although its own users are the clients.
TABLES_10_AND_11: Presets = {
    "fedrolex-figure3-cifar10-mid": _at(_CIFAR10, 700, 1200),
    "fedrolex-figure3-cifar10-ends": _at(_CIFAR10, 500, 1000),
    "fedrolex-figure3-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-figure3-stackoverflow": _at(_STACK_OVERFLOW, 800),
}

# FedRolex, Table 12: Figure 4, where the server's model is γ times what any client holds, for every
# γ alike. Stack Overflow has rows for both heterogeneities here too.
TABLE_12: Presets = {
    "fedrolex-figure4-cifar10": _at(_CIFAR10, 800, 1200),
    "fedrolex-figure4-cifar100": _at(_CIFAR100, 800, 1200),
    "fedrolex-figure4-stackoverflow": _at(_STACK_OVERFLOW, 800),
}

# FedRolex, Table 9: the same for one common model, by the same names.
TABLE_9: Presets = {
    "fedrolex-cifar10-high": _at(_CIFAR10, 500, 1000),
    "fedrolex-cifar10-low": _at(_CIFAR10, 500, 1000),
    "fedrolex-cifar100": _at(_CIFAR100, 1000, 1500),
    "fedrolex-stackoverflow": _at(_STACK_OVERFLOW, 300),
}
