"""fedquilt trains one model together on devices that cannot all hold it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedquilt.errors import FedquiltError, renamed
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt import data, errors, fleets, methods, models, tasks
    from fedquilt.data import FederatedData
    from fedquilt.deploy.customizable import CustomizableModel
    from fedquilt.deploy.load import load_model
    from fedquilt.family.dual import conditioned, dual, set_robustness
    from fedquilt.family.family import Family
    from fedquilt.family.stages import with_stages
    from fedquilt.family.tracing.trace import trace
    from fedquilt.family.union import union
    from fedquilt.round import Evaluation, Fleet
    from fedquilt.round import link as links
    from fedquilt.round.link import Link
    from fedquilt.round.training import attacks, optimizers, schedules
    from fedquilt.round.training.local import LocalTraining
    from fedquilt.runs.checkpoint import Checkpointing
    from fedquilt.runs.experiment import Experiment
    from fedquilt.runs.load import load_run
    from fedquilt.runs.prepare import prepare
    from fedquilt.runs.run import Run
    from fedquilt.runs.saved_state import load_state
    from fedquilt.runs.start import run
    from fedquilt.studies.study import Study, study
    from fedquilt.terms import Budget

# Names are imported when they are used first, so that `fedquilt --help` does not wait for torch.
_NAMES = {
    "fedquilt.data": ("FederatedData",),
    "fedquilt.deploy.customizable": ("CustomizableModel",),
    "fedquilt.deploy.load": ("load_model",),
    "fedquilt.family.dual": ("conditioned", "dual", "set_robustness"),
    "fedquilt.family.family": ("Family",),
    "fedquilt.family.stages": ("with_stages",),
    "fedquilt.family.tracing.trace": ("trace",),
    "fedquilt.family.union": ("union",),
    "fedquilt.round": ("Evaluation", "Fleet"),
    "fedquilt.round.link": ("Link",),
    "fedquilt.round.training.local": ("LocalTraining",),
    "fedquilt.runs.checkpoint": ("Checkpointing",),
    "fedquilt.runs.experiment": ("Experiment",),
    "fedquilt.runs.load": ("load_run",),
    "fedquilt.runs.prepare": ("prepare",),
    "fedquilt.runs.run": ("Run",),
    "fedquilt.runs.saved_state": ("load_state",),
    "fedquilt.runs.start": ("run",),
    "fedquilt.studies.study": ("Study", "study"),
    "fedquilt.terms": ("Budget",),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}
_NAMESPACES = {
    "attacks": "fedquilt.round.training.attacks",
    "data": "fedquilt.data",
    "errors": "fedquilt.errors",
    "fleets": "fedquilt.fleets",
    "links": "fedquilt.round.link",
    "methods": "fedquilt.methods",
    "models": "fedquilt.models",
    "optimizers": "fedquilt.round.training.optimizers",
    "schedules": "fedquilt.round.training.schedules",
    "tasks": "fedquilt.tasks",
}

# Imports of earlier names state the present ones.
renamed.install()


# Type checkers do not see this function. For them, `fq.NAME` would exist for every name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name in _NAMESPACES:
            return import_module(_NAMESPACES[name])
        if name in _MODULE_OF:
            value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
            return value
        hint = f". It is fedquilt.{renamed.NAMES[name]} now." if name in renamed.NAMES else ""
        raise AttributeError(f"module 'fedquilt' has no attribute {name!r}{hint}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Budget",
    "Checkpointing",
    "CustomizableModel",
    "Evaluation",
    "Experiment",
    "Family",
    "FederatedData",
    "FedquiltError",
    "Fleet",
    "Link",
    "LocalTraining",
    "Run",
    "Study",
    "__version__",
    "attacks",
    "conditioned",
    "data",
    "dual",
    "errors",
    "fleets",
    "links",
    "load_model",
    "load_run",
    "load_state",
    "methods",
    "models",
    "optimizers",
    "prepare",
    "run",
    "schedules",
    "set_robustness",
    "study",
    "tasks",
    "trace",
    "union",
    "with_stages",
]
