"""Registries of the classes that settings select by name, entered into the tables of `config`."""

from __future__ import annotations

from fedquilt.config.tables import TABLES, Table
from fedquilt.data import PARTITIONS, Partition
from fedquilt.family.norms import NORM_POLICIES, NormPolicy
from fedquilt.fleets.budgets import Budgets
from fedquilt.fleets.presets import FLEETS
from fedquilt.methods import METHODS, Method
from fedquilt.round.link import CODECS, LOSSES, USUAL_CODEC, BaseCodec, Loss
from fedquilt.round.training.objectives import OBJECTIVES, Wrapping
from fedquilt.runs.tracking import TRACKERS, Tracking
from fedquilt.tasks import TASKS, Task

TABLES |= {
    Method: Table("method", METHODS),
    Budgets: Table("fleet", FLEETS),
    Partition: Table("partition", PARTITIONS),
    Loss: Table("loss", LOSSES),
    BaseCodec: Table("codec", CODECS, USUAL_CODEC),
    Wrapping: Table("objective", OBJECTIVES),
    Task: Table("task", TASKS),
    Tracking: Table("tracker", TRACKERS),
    NormPolicy: Table("norm policy", NORM_POLICIES, short=True),
}
