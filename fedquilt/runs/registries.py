"""Registries of the classes that settings select by name, entered into the tables of `config`."""

from __future__ import annotations

from fedquilt.config.tables import TABLES, SettingsTable
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
    Method: SettingsTable("method", METHODS),
    Budgets: SettingsTable("fleet", FLEETS),
    Partition: SettingsTable("partition", PARTITIONS),
    Loss: SettingsTable("loss", LOSSES),
    BaseCodec: SettingsTable("codec", CODECS, USUAL_CODEC),
    Wrapping: SettingsTable("objective", OBJECTIVES),
    Task: SettingsTable("task", TASKS),
    Tracking: SettingsTable("tracker", TRACKERS),
    NormPolicy: SettingsTable("norm policy", NORM_POLICIES, short=True),
}
