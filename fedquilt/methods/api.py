"""Everything that an author of a method imports, in one place.

    from fedquilt.methods.api import Method, Server, Client, World, prefix

A method in a file of your own imports from here and from `fedquilt` itself, and from nothing below.
The names in `__all__` and the arguments of the calls in docs/add-a-method.md are stable: a change
to one of them is announced in the changelog, and the old name raises an error that states the new
one. Names that begin with an underscore, and modules below `fedquilt.round`, `fedquilt.family` and
`fedquilt.engines`, may move without notice.

The names are grouped by the order in which a round uses them:

- Inputs of a method: `World`, `Server`, `Client`, `Job`, `Budget`, `ClientState`, and the
  `Family` with its `Member`s.
- Sub-models that clients train (`plan`) or run (`deploy`): `Submodel`, and `prefix`, `windows`,
  `scattered` and `highest`, which create one. `WHOLE`, `joined` and `members_of` name variants of
  a model, and `union` joins several traced models.
- Local training (`learner`): `Learner`, `Phase`, `LocalTraining`, objectives, regions, filters,
  optimizers, schedules and norm policies.
- State that a client keeps or sends beside the weights: `MethodState`, `Trained`, `Left`, and
  passes over samples.
- Merging of uploads (`fold`): `Fold`, `Mean`, `RunningSum`, `Stateful`, `Update`, `Payload` and
  server optimizers.
- Server training on public samples (`learn`): `Teachers`, `teaching`, `ServerTraining`,
  objectives from a teacher, and `Prototypes`, nets of several sizes in one state.
- Random numbers (`noise`), checks of settings (`within`, `one_of`), and the errors that a method
  raises.
"""

import typing as _typing

from fedquilt import noise
from fedquilt.axes import Index, Positions
from fedquilt.checks import one_of, refuse, within
from fedquilt.errors import BudgetError, ConfigError, FedquiltError, SubmodelError, TrainingError
from fedquilt.errors.renamed import API_NAMES as _EARLIER_NAMES
from fedquilt.family.cost import Cost, TrainingStep
from fedquilt.family.cut import Cutter, highest, prefix, scattered, windows
from fedquilt.family.family import Family, Rounding
from fedquilt.family.member import Member
from fedquilt.family.norms import (
    AllLocal,
    BatchStatistics,
    KeptByClient,
    MeasuredByClient,
    MeasuredOnAll,
    MeasuredOnPublic,
    NormPolicy,
    Tracked,
)
from fedquilt.family.scores import channel_scores
from fedquilt.family.tracing.trace import trace
from fedquilt.family.union import union
from fedquilt.family.variants import joined, members_of
from fedquilt.hardware.precision import Precision
from fedquilt.methods.prototypes import Prototypes
from fedquilt.round.engine import Gradients
from fedquilt.round.federation import Federation, World
from fedquilt.round.fold import Fold, Merged, Weighting, client_weight
from fedquilt.round.merge import ExtrasMean, Mean, RunningSum, Stateful, as_weights
from fedquilt.round.method import Method, Presets, narrower, whatever_the_budget
from fedquilt.round.server_optimizers import (
    Plain,
    ServerAdam,
    ServerMomentum,
    ServerOptimizer,
    ServerStep,
    ServerYogi,
)
from fedquilt.round.students import teaching
from fedquilt.round.teachers import EACH, OUTPUTS, Combined, Teachers
from fedquilt.round.training.adversarial import Adversarial
from fedquilt.round.training.attacks import PGD, AdversarialTraining
from fedquilt.round.training.augmentation import Intensity
from fedquilt.round.training.distillation import Distilled, FromTeacher, Imitation, SoftLabels
from fedquilt.round.training.filters import All, Filter, Nothing, PartWeights, VariantWeights
from fedquilt.round.training.learner import Freeze, Learner, Phase, nets_of
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.mutual import Distance, Mutual
from fedquilt.round.training.objectives import (
    RECEIVED,
    MaskedCrossEntropy,
    Objective,
    Passes,
    Proximal,
    Summed,
    TaskLoss,
    Wrapping,
)
from fedquilt.round.training.optimizers import SGD, Adam, AdamW
from fedquilt.round.training.passes import (
    ClientPass,
    GradientPass,
    LogitsPass,
    LossPass,
    StatisticsPass,
)
from fedquilt.round.training.public import POSITIONS, ROUND, drawn_positions, num_drawn
from fedquilt.round.training.regions import Between, Everywhere, Part, Region, WithinVariant
from fedquilt.round.training.schedules import Constant, Cosine, Steps, WithinRound
from fedquilt.round.training.server import TEACHER, ServerTraining, Teaching, TrainServer
from fedquilt.round.training.state import Left, MethodState, Trained
from fedquilt.round.training.view import View
from fedquilt.tasks import Task
from fedquilt.terms import (
    WHOLE,
    Arch,
    Budget,
    Client,
    ClientState,
    Extras,
    Job,
    Payload,
    Server,
    Slots,
    Submodel,
    Submodels,
    Update,
    Weights,
)

# Type checkers do not see this function. For them, every name would exist.
if not _typing.TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in _EARLIER_NAMES:
            # Python would replace an AttributeError by an ImportError without the new name.
            raise ImportError(
                f"there is no fedquilt.methods.api.{name}. It is "
                f"fedquilt.methods.api.{_EARLIER_NAMES[name]} now."
            )
        raise AttributeError(f"module 'fedquilt.methods.api' has no attribute {name!r}")


__all__ = [
    "EACH",
    "OUTPUTS",
    "PGD",
    "POSITIONS",
    "RECEIVED",
    "ROUND",
    "SGD",
    "TEACHER",
    "WHOLE",
    "Adam",
    "AdamW",
    "Adversarial",
    "AdversarialTraining",
    "All",
    "AllLocal",
    "Arch",
    "BatchStatistics",
    "Between",
    "Budget",
    "BudgetError",
    "Client",
    "ClientPass",
    "ClientState",
    "Combined",
    "ConfigError",
    "Constant",
    "Cosine",
    "Cost",
    "Cutter",
    "Distance",
    "Distilled",
    "Everywhere",
    "Extras",
    "ExtrasMean",
    "Family",
    "Federation",
    "FedquiltError",
    "Filter",
    "Fold",
    "Freeze",
    "FromTeacher",
    "GradientPass",
    "Gradients",
    "Imitation",
    "Index",
    "Intensity",
    "Job",
    "KeptByClient",
    "Learner",
    "Left",
    "LocalTraining",
    "LogitsPass",
    "LossPass",
    "MaskedCrossEntropy",
    "Mean",
    "MeasuredByClient",
    "MeasuredOnAll",
    "MeasuredOnPublic",
    "Member",
    "Merged",
    "Method",
    "MethodState",
    "Mutual",
    "NormPolicy",
    "Nothing",
    "Objective",
    "Part",
    "PartWeights",
    "Passes",
    "Payload",
    "Phase",
    "Plain",
    "Positions",
    "Precision",
    "Presets",
    "Prototypes",
    "Proximal",
    "Region",
    "Rounding",
    "RunningSum",
    "Server",
    "ServerAdam",
    "ServerMomentum",
    "ServerOptimizer",
    "ServerStep",
    "ServerTraining",
    "ServerYogi",
    "Slots",
    "SoftLabels",
    "Stateful",
    "StatisticsPass",
    "Steps",
    "Submodel",
    "SubmodelError",
    "Submodels",
    "Summed",
    "Task",
    "TaskLoss",
    "Teachers",
    "Teaching",
    "Tracked",
    "TrainServer",
    "Trained",
    "TrainingError",
    "TrainingStep",
    "Update",
    "VariantWeights",
    "View",
    "Weighting",
    "Weights",
    "WithinRound",
    "WithinVariant",
    "World",
    "Wrapping",
    "as_weights",
    "channel_scores",
    "client_weight",
    "drawn_positions",
    "highest",
    "joined",
    "members_of",
    "narrower",
    "nets_of",
    "noise",
    "num_drawn",
    "one_of",
    "prefix",
    "refuse",
    "scattered",
    "teaching",
    "trace",
    "union",
    "whatever_the_budget",
    "windows",
    "within",
]
