"""Earlier names of the package, and errors that state the present ones.

Examples are `import fedquilt.loop` and `from fedquilt import load`. Earlier names of settings are
in `fedquilt.names`. docs/what-changed.md lists all of them for users.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

# Names that are imported from a package, both below `fedquilt`.
NAMES = {
    "Columns": "links.ColumnLoss",
    "CustomisableModel": "CustomizableModel",
    "Local": "LocalTraining",
    "engines.Vectorised": "engines.Vectorized",
    "keep_pages": "hardware.process.keep_pages",
    "load": "load_state",
    "round.Played": "round.RoundResult",
    "round.play": "round.run_round",
    **{name: f"family.dual.{name}" for name in ("ConditionedNorm", "DualNorm")},
    **{name: f"schedules.{name}" for name in ("Constant", "Cosine", "Steps", "WithinRound")},
    **{name: f"optimizers.{name}" for name in ("SGD", "Adam", "AdamW")},
    **{name: f"links.{name}" for name in ("Clock", "Codec", "Wireless")},
    **{name: f"attacks.{name}" for name in ("PGD", "AdversarialTraining")},
    **{name: f"methods.api.{name}" for name in ("Arch", "Client", "Federation", "Job", "Payload")},
    **{name: f"methods.api.{name}" for name in ("Server", "Submodel", "Update", "World")},
    **{name: f"methods.api.{name}" for name in ("Intensity", "TrainingStep")},
}
# Names of `fedquilt.methods.api`.
API_NAMES = {
    "Local": "LocalTraining",
    "Memory": "ClientState",
    "Mix": "Submodels",
    "Parts": "PartWeights",
    "ServerOptimiser": "ServerOptimizer",
    "Sum": "RunningSum",
}
# Modules, below `fedquilt`. Some of the earlier names are those of packages now.
MODULES = {
    "alignment": "runs.alignment",
    "checkpoint": "runs.checkpoint",
    "cli.playing": "cli.run_loop",
    "clientwise": "runs.per_client",
    "config": "runs.experiment",
    "conformance": "conformance.method",
    "customise": "deploy.customizable",
    "data.arrays": "data.sources.arrays",
    "data.generated": "data.sources.generated",
    "data.huggingface": "data.sources.hub",
    "data.masks": "data.sources.masks",
    "data.nifti": "data.sources.nifti",
    "data.padding": "data.sources.padding",
    "data.partition": "data.partitions",
    "data.pictures": "data.sources.images",
    "data.prepare.catalogue": "data.prepare.catalog",
    "data.words": "data.sources.text",
    "deploy": "deploy.deploy",
    "devices": "hardware.device",
    "engines.examiner": "engines.vectorized.evaluator",
    "engines.exams": "engines.samples",
    "engines.lines": "engines.vectorized.lines",
    "engines.parcel": "engines.ray.parcel",
    "engines.ray": "engines.ray.engine",
    "engines.sweep": "engines.vectorized.captured",
    "engines.units": "engines.vectorized.groups",
    "engines.vectorised": "engines.vectorized.engine",
    "experiment": "runs.run",
    "export": "deploy.export",
    "family.atoms": "family.tracing.atoms",
    "family.cutpoints": "family.tracing.cutpoints",
    "family.laid": "family.grouped",
    "family.record": "family.tracing.record",
    "family.rules": "family.tracing.rules",
    "family.sizes": "family.tracing.sizes",
    "family.tracer": "family.tracing.tracer",
    "faults": "errors.faults",
    "files": "storage.files",
    "fleets": "fleets.budgets",
    "generators": "hardware.generators",
    "loop": "runs.loop",
    "memory": "runs.client_states",
    "methods.local": "methods.local_only",
    "methods.method": "round.method",
    "methods.students": "round.students",
    "milestones": "runs.milestones",
    "portable": "deploy.model_file",
    "precision": "hardware.precision",
    "probe": "runs.probe",
    "records": "runs.folder",
    "round.attack": "round.training.attacks",
    "round.availability": "fleets.availability",
    "round.clients": "fleets.fleet",
    "round.link.dealt": "round.link.per_client",
    "round.link.trip": "round.link.transmission",
    "round.serve": "round.evaluate",
    "roundlog": "runs.round_log",
    "settings": "config.reading",
    "summaries": "runs.summaries",
    "tensor_files": "storage.tensor_files",
    "tracking": "runs.tracking",
    "trial": "runs.auto",
    "trust": "runs.trust",
}


class RenamedFinder(MetaPathFinder):
    """Finder of modules that finds nothing. It refuses earlier names, and states the present ones.

    Python asks finders in turn, and this one last, so that it is asked only about names that do not
    exist. For `from package import name` Python first looks for the name in the package, and then
    for a module of that name.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> None:
        """Return None, which means that another finder is asked.

        Args:
            fullname: Dotted name of the module that is imported.
            path: Folders of its package. They have no effect.
            target: Module that is loaded again. It has no effect.

        Raises:
            ModuleNotFoundError: The name is an earlier one, or that of something in a module whose
                name is a package now.
        """
        package, _, name = fullname.partition(".")
        if package != "fedquilt":
            return
        parent, _, inner = name.rpartition(".")
        present = NAMES.get(name) or MODULES.get(name)
        if present:
            raise ModuleNotFoundError(f"there is no {fullname}. It is fedquilt.{present} now.")
        if parent in MODULES:
            raise ModuleNotFoundError(
                f"fedquilt.{parent} has no {inner!r}. The module that was fedquilt.{parent} before "
                f"is fedquilt.{MODULES[parent]} now."
            )


def install() -> None:
    """Let imports of earlier names state the present ones. A second call has no effect."""
    if not any(isinstance(finder, RenamedFinder) for finder in sys.meta_path):
        sys.meta_path.append(RenamedFinder())
