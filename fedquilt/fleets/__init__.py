"""Devices and their budgets, the clients of a round, and the availability of clients."""

from __future__ import annotations

from fedquilt.fleets.budgets import Budgets
from fedquilt.fleets.changes import Change
from fedquilt.fleets.from_csv import FromCsv
from fedquilt.fleets.presets import (
    FIVE_SHARES,
    FLEETS,
    ByNet,
    Clusters,
    FlopLimited,
    Given,
    Groups,
    Income,
    LogNormal,
    Quarters,
    Step,
    TwoLevel,
    Uniform,
    net_budgets,
)

__all__ = [
    "FIVE_SHARES",
    "FLEETS",
    "Budgets",
    "ByNet",
    "Change",
    "Clusters",
    "FlopLimited",
    "FromCsv",
    "Given",
    "Groups",
    "Income",
    "LogNormal",
    "Quarters",
    "Step",
    "TwoLevel",
    "Uniform",
    "net_budgets",
]
