"""fedquilt trains one model together on devices that cannot all hold it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedquilt.errors import FedquiltError
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt import data, errors, fleets, methods, models, tasks
    from fedquilt.checkpoint import Checkpointing
    from fedquilt.config import Experiment, load_run
    from fedquilt.customise import CustomisableModel
    from fedquilt.data import FederatedData
    from fedquilt.devices import keep_pages
    from fedquilt.experiment import Run, prepare, run
    from fedquilt.export import load_model
    from fedquilt.family.cost import TrainingStep
    from fedquilt.family.dual import ConditionedNorm, DualNorm, conditioned, dual, set_robustness
    from fedquilt.family.family import Family, trace
    from fedquilt.family.stages import with_stages
    from fedquilt.family.union import union
    from fedquilt.records import load
    from fedquilt.round import Evaluation, Fleet
    from fedquilt.round.attack import PGD, AdversarialTraining
    from fedquilt.round.federation import Federation, World
    from fedquilt.round.link import Clock, Codec, Columns, Link, Wireless
    from fedquilt.round.training.augmentation import Intensity
    from fedquilt.round.training.local import Local
    from fedquilt.round.training.optimizers import SGD, Adam, AdamW
    from fedquilt.round.training.schedules import Constant, Cosine, Steps
    from fedquilt.studies.study import Study, study
    from fedquilt.terms import Arch, Budget, Client, Job, Payload, Server, Submodel, Update

# Names are imported when they are asked for: `fedquilt --help` and a typo need not wait for torch.
_HOMES = {
    "fedquilt.checkpoint": ("Checkpointing",),
    "fedquilt.config": ("Experiment", "load_run"),
    "fedquilt.customise": ("CustomisableModel",),
    "fedquilt.data": ("FederatedData",),
    "fedquilt.devices": ("keep_pages",),
    "fedquilt.experiment": ("Run", "prepare", "run"),
    "fedquilt.export": ("load_model",),
    "fedquilt.family.cost": ("TrainingStep",),
    "fedquilt.family.dual": (
        "ConditionedNorm",
        "DualNorm",
        "conditioned",
        "dual",
        "set_robustness",
    ),
    "fedquilt.family.family": ("Family", "trace"),
    "fedquilt.family.stages": ("with_stages",),
    "fedquilt.family.union": ("union",),
    "fedquilt.records": ("load",),
    "fedquilt.round": ("Evaluation", "Fleet"),
    "fedquilt.round.attack": ("PGD", "AdversarialTraining"),
    "fedquilt.round.federation": ("Federation", "World"),
    "fedquilt.round.link": ("Clock", "Codec", "Columns", "Link", "Wireless"),
    "fedquilt.round.training.augmentation": ("Intensity",),
    "fedquilt.round.training.local": ("Local",),
    "fedquilt.round.training.optimizers": ("SGD", "Adam", "AdamW"),
    "fedquilt.round.training.schedules": ("Constant", "Cosine", "Steps"),
    "fedquilt.studies.study": ("Study", "study"),
    "fedquilt.terms": (
        "Arch",
        "Budget",
        "Client",
        "Job",
        "Payload",
        "Server",
        "Submodel",
        "Update",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("data", "errors", "fleets", "methods", "models", "tasks")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"fedquilt.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'fedquilt' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(_HOME[name]), name)
    return found


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "PGD",
    "SGD",
    "Adam",
    "AdamW",
    "AdversarialTraining",
    "Arch",
    "Budget",
    "Checkpointing",
    "Client",
    "Clock",
    "Codec",
    "Columns",
    "ConditionedNorm",
    "Constant",
    "Cosine",
    "CustomisableModel",
    "DualNorm",
    "Evaluation",
    "Experiment",
    "Family",
    "FederatedData",
    "Federation",
    "FedquiltError",
    "Fleet",
    "Intensity",
    "Job",
    "Link",
    "Local",
    "Payload",
    "Run",
    "Server",
    "Steps",
    "Study",
    "Submodel",
    "TrainingStep",
    "Update",
    "Wireless",
    "World",
    "__version__",
    "conditioned",
    "data",
    "dual",
    "errors",
    "fleets",
    "keep_pages",
    "load",
    "load_model",
    "load_run",
    "methods",
    "models",
    "prepare",
    "run",
    "set_robustness",
    "study",
    "tasks",
    "trace",
    "union",
    "with_stages",
]
