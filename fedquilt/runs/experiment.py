"""`Experiment`: all settings of a federation, as `config.toml` holds them.

Settings are nested plain tables. They are merged in this order: a file, the demo or the defaults,
then flags, then `--set a.b=v`. The result is read once into dataclasses. It is written beside the
results with all defaults filled in, and that file alone repeats the run. Paths are relative to the
working directory of the command.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

import fedquilt.runs.registries  # noqa: F401  # Classes that settings select by name
from fedquilt.checks import File, outside, refuse
from fedquilt.config.resolve import resolved
from fedquilt.config.schema import label
from fedquilt.config.toml import Settings
from fedquilt.config.writing import write
from fedquilt.data import FederatedData, Partition
from fedquilt.engines import ENGINES
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import ConfigError
from fedquilt.errors.faults import enough_memory
from fedquilt.family import Family
from fedquilt.fleets.fleet import Devices
from fedquilt.hardware.device import device_of
from fedquilt.hardware.precision import DTYPES
from fedquilt.hardware.process import keep_pages
from fedquilt.methods import Method
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.link import Link
from fedquilt.round.optional_steps import OptionalSteps
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.data_settings import Source
from fedquilt.runs.machine import AUTO, Machine
from fedquilt.runs.model_settings import SEARCHED, Model, searched, traced
from fedquilt.runs.prepare import prepare
from fedquilt.runs.run import Run
from fedquilt.runs.tracking import Tracking
from fedquilt.tasks import Task

# Multiply-adds per sample below which a model is trained on one thread. For such models threads
# gain nothing, and on a busy machine waiting for each other costs more than the work.
MAX_SINGLE_THREAD_MACS = 1_000_000


@dataclass(frozen=True)
class Ground:
    """Partitioned data, model and devices, on which methods are compared."""

    data: FederatedData  # Samples of all clients, on the device of the engine
    family: Family  # Model that was traced
    fleet: Fleet  # Devices and their budgets
    partition: Partition | None  # Partition of the data. None: a user's function made it
    model: Model | tuple[Model, ...]  # Model that was asked for, or the default one for the data
    # Engines of earlier runs by their settings and seed. Their captured CUDA graphs are used again
    engines: dict[tuple[Machine, int], Simulation] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Experiment:
    """All settings of a federation.

    `Experiment.of` reads them from plain tables, such as those of a TOML file, and reports all
    problems at once. `prepare` builds the run, and `to_toml` writes the settings with all defaults.

    Example:
        >>> import fedquilt as fq
        >>> settings = {"method": "heterofl", "data": "digits", "fleet": {"clients": 4}}
        >>> experiment = fq.Experiment.of(settings)
        >>> type(experiment.method).__name__, experiment.fleet.clients, experiment.engine.device
        ('HeteroFL', 4, 'cpu')
        >>> try:
        ...     fq.Experiment.of({**settings, "sed": 1})
        ... except fq.FedquiltError as error:
        ...     print(str(error).partition(" Known")[0])
        a problem:
          sed: a configuration has no such key. Did you mean 'seed'?
    """

    method: Method  # Method of federated learning by its name, or file.py:Class
    data: Source  # Data set, file or folder by its name, or file.py:function
    # A model, or a list of models for several architectures. None: tiny_resnet for images, mlp for
    # rows of numbers
    model: Model | tuple[Model, ...] | None = None
    # Task by its name, or file.py:Class. None: inferred from the targets and the model's output
    task: Task | None = None
    fleet: Devices = Devices()  # Number of clients, their budgets and their availability
    engine: Machine = Machine()  # Engine, device and precision
    link: Link = Link()  # Link between server and clients. The default loses nothing
    evaluation: Evaluation | None = None  # When and how to evaluate. None: about ten times a run
    rounds: int = 20  # Total number of rounds
    seed: int = 0  # Random seed of initial weights, partition, cohorts and batches
    # Safetensors file or folder of a run with initial weights. Empty: they are drawn from the seed
    init: File = ""
    checkpoint: Checkpointing = Checkpointing()  # How often a checkpoint is saved
    trackers: tuple[Tracking, ...] = ()  # Trackers that log the records, besides the run's folder

    def __post_init__(self) -> None:
        problems = outside(self, rounds="[1, inf)", seed="[0, 9223372036854775807]")
        if self.model == ():
            problems["model"] = (
                "an empty list was asked for; one model or more would work, such as ['convnet', "
                "'vgg11']."
            )
        elif any(model.is_searched for model in self.models) and (
            len(self.models) > 1 or self.init
        ):
            conflict = "init" if len(self.models) == 1 else "other models"
            problems["model"] = (
                f"{SEARCHED!r} was asked for with {conflict}; it is a union by itself, and "
                "cannot be combined with them."
            )
        refuse(self, problems)

    @property
    def models(self) -> tuple[Model, ...]:
        """Return the models that were asked for. Empty: the data decides."""
        if isinstance(self.model, tuple):
            return self.model
        return (self.model,) if self.model else ()

    @enough_memory("loading the data and the model")
    def ground(
        self,
        partitioned: tuple[FederatedData, Partition | None] | None = None,
        family: Family | None = None,
    ) -> Ground:
        """Load and partition the data, trace the model, and create the fleet.

        Args:
            partitioned: Data and its partition, if they are loaded already. None: they are loaded.
            family: The traced model, as `trace` returns it. None: the model is traced.

        Raises:
            FedquiltError: The data cannot be loaded, the model cannot be traced, or a package is
                missing.
        """
        device = device_of(self.engine.device)
        if self.engine.name != AUTO:
            ENGINES[self.engine.name].check()
        for tracker in self.trackers:
            tracker.check()
        data, partition = partitioned or self.data.federate(self.fleet.total, self.seed)
        model = self.model or Model.usual(data)
        family, fleet = self._family_and_fleet(data, family)
        # Moved once, because the engines of all compared methods share it.
        data_on_device = data.to(device, DTYPES[self.engine.precision])
        return Ground(data_on_device, family, fleet, partition, model)

    def trace(self, data: FederatedData) -> Family:
        """Trace the models for data. Searched nets, which depend on the fleet, cannot be traced."""
        models = self.models or (Model.usual(data),)
        return traced(models, data, self.init, self.task, self.data.max_bytes)

    def _family_and_fleet(self, data: FederatedData, family: Family | None) -> tuple[Family, Fleet]:
        """Trace the models and create the fleet.

        Searched nets depend on the fleet, which is created first for them. For other models,
        budgets may depend on the model.

        Args:
            data: Partitioned data, which has the sizes of inputs and the number of clients.
            family: The traced model. None: it is traced.
        """
        models = self.models or (Model.usual(data),)
        if models[0].is_searched:
            fleet = self.fleet.fleet(data.num_clients, self.seed)
            precision = self.engine.precision
            return searched(models[0], data, fleet, self.method, self.seed, precision), fleet
        family = family or self.trace(data)
        return family, self.fleet.fleet(data.num_clients, self.seed, family)

    def prepare(self, ground: Ground | None = None) -> Run:
        """Build the run without training it.

        Threads and deterministic algorithms of torch are set for the whole process.

        Args:
            ground: Data, model and devices of another experiment, so that they are loaded once.
                None: they are loaded.

        Returns:
            The run before its first round. Its `settings` repeat it on another machine.
        """
        ground = ground or self.ground()
        keep_pages()
        if self.engine.name == AUTO:
            from fedquilt.runs.auto import quickest

            return replace(self, engine=quickest(self, ground)).prepare(ground)
        is_small = ground.family.member(ground.family.whole).macs < MAX_SINGLE_THREAD_MACS
        default_threads = 1 if is_small else torch.get_num_threads()
        torch.set_num_threads(self.engine.threads or default_threads)
        if self.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS needs it.
            torch.use_deterministic_algorithms(True)
        # About ten evaluations per run, because each measures norm statistics, which costs as much
        # as a round.
        evaluation = self.evaluation or Evaluation(every=math.ceil(self.rounds / 10))
        run = prepare(
            self.method.settled(self.rounds),
            ground.family,
            ground.data,
            ground.fleet,
            ground.engines.get((self.engine, self.seed)) or self.engine.create(ground.data),
            self.seed,
            evaluation=evaluation,
            client_state_memory=self.engine.client_state_memory,
            link=self.link,
            task=self.task,
        )
        ground.engines[self.engine, self.seed] = run.engine
        run.settled_for = self.rounds
        run.settings = self.settled(run, ground)
        return run

    def settled(self, run: Run, ground: Ground) -> Experiment:
        """Return the experiment with the settings that it left open filled in from a prepared run.

        It gives the same run on another machine.

        Args:
            run: Run that was prepared from this experiment.
            ground: Data, model and devices of the run.
        """
        return replace(
            self,
            method=run.method,
            model=ground.model,
            task=run.world.task,
            data=replace(self.data, partition=ground.partition),
            fleet=replace(self.fleet, clients=run.fleet.at(0).num_clients),
            engine=replace(
                self.engine,
                name=next(name for name, kind in ENGINES.items() if kind is type(run.engine)),
                threads=torch.get_num_threads(),
                memory=int(run.engine.settings.get("memory", self.engine.memory)),
            ),
            evaluation=run.evaluation,
        )

    @property
    def title(self) -> str:
        """Return the name of the method, and the one of the method that it trains with."""
        method: OptionalSteps | None = self.method
        names = []
        while method is not None:
            names.append(_method_name(method))
            method = method.inner_method
        return " over ".join(names)

    @property
    def names(self) -> dict[str, str]:
        """Return the names of method, model, data and engine, for a summary."""
        return {
            "method": _method_name(self.method),
            "model": " + ".join(model.name for model in self.models) or AUTO,
            "data": self.data.name,
            "engine": self.engine.name,
        }

    def to_toml(self) -> str:
        """Return the text of a file that `Experiment.of(tomllib.loads(text))` reads back."""
        import tomli_w

        return tomli_w.dumps(write(self))

    @staticmethod
    def of(
        settings: Settings, flags: Mapping[str, str] | None = None, file: str = ""
    ) -> Experiment:
        """Read an experiment from settings, or raise one error that lists all problems.

        Args:
            settings: Nested plain tables, such as `tomllib.load` returns them. Keys are the fields
                of this class.
            flags: Command-line flag by the path that it set, for messages. None: there are no
                flags.
            file: File of the settings, for messages. Empty: there is none.

        Raises:
            ConfigError: Some settings are wrong. The message has the path of each.
        """
        return resolved(Experiment, settings, flags or {}, file)


def _method_name(method: OptionalSteps) -> str:
    """Return the name by which settings choose a method."""
    kind = type(method)
    try:
        return label(kind)
    except ConfigError:  # Files cannot name the class, but it can be run.
        return kind.__name__
