"""All settings of a federation, as `config.toml` holds them and command-line flags change them.

Settings are nested plain tables. They are merged in this order: a file, the demo or the defaults,
then flags, then `--set a.b=v`. The result is read once into dataclasses. It is written beside the
results with all defaults filled in, and that file alone repeats the run. Paths are relative to the
working directory of the command.
"""

from __future__ import annotations

import copy
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from fedquilt.checks import File, missing, outside, refuse, within
from fedquilt.config.settings import TABLES, Choice, Problem, Table, label, read, variants, write
from fedquilt.data import PARTITIONS, Domains, FederatedData, Natural, Partition, Pool, source
from fedquilt.data.parts import Parts
from fedquilt.engines import ENGINES
from fedquilt.engines.options import CHUNKS, EngineOptions
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import ConfigError, FedquiltError, RecordError, TraceError
from fedquilt.errors.faults import enough_memory
from fedquilt.family import Family
from fedquilt.family.cost import TrainingStep
from fedquilt.family.dual import conditioned, dual
from fedquilt.family.family import trace
from fedquilt.family.norms import NORM_POLICIES, NormPolicy
from fedquilt.family.union import union
from fedquilt.fleets.budgets import FLEETS, Budgets, ByNet
from fedquilt.fleets.fleet import Devices
from fedquilt.hardware.device import device_of
from fedquilt.hardware.precision import DTYPES, Precision, unfit
from fedquilt.hardware.process import keep_pages
from fedquilt.methods import METHODS, Method
from fedquilt.models import MODELS, ModelSpec
from fedquilt.names import find, is_reference, nearest
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.link import CODECS, LOSSES, USUAL_CODEC, BaseCodec, Link, Loss
from fedquilt.round.training.objectives import OBJECTIVES, Wrapping
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import LIMIT
from fedquilt.runs.folder import check_folder, check_plain, load_state, newest, reopen
from fedquilt.runs.run import Run, prepare
from fedquilt.runs.tracking import TRACKERS, Tracking
from fedquilt.runs.trust import check_code, is_beside_records, is_recorded
from fedquilt.storage.tensor_files import TensorFile, check_finite
from fedquilt.tasks import TASKS, Task

Settings = dict[str, Any]
T = TypeVar("T")

# Multiply-adds per sample below which a model is trained on one thread. For such models threads
# gain nothing, and on a busy machine waiting for each other costs more than the work.
SMALL = 1_000_000
AUTO = "auto"
# Name of the model whose nets are searched for the fleet (`fedquilt.supernet`)
SEARCHED = "searched"
CLIENTS = 20  # Number of clients if neither the settings nor the data define it

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


# --- the parts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceOptions:
    """Options of `fedquilt.trace`."""

    fixed: tuple[str, ...] = ()  # Layers or axes that are never cut
    parts: dict[str, tuple[str, ...]] = field(default_factory=dict)  # Groups of weights by name
    # How attention is cut: inside of heads, or by whole heads
    heads: Literal["inside", "whole"] = "inside"
    # Dimension of the output that has the classes. None: it is detected
    class_dim: int | None = None


@dataclass(frozen=True)
class Model(Choice):
    """A model by its name, with the options that it is built with."""

    # Give the model two norms in place of each, for clean and for adversarial samples. Robust
    # Split-Mix needs this
    dual: bool = False
    # Condition the norms on a robustness. Several adversarial weights need this
    conditioned: bool = False
    # Options of tracing. None: only the layers that the model's paper never cuts are fixed
    tracing: TraceOptions | None = None
    # Name of the net if there are several models. None: the name of the model
    net_name: str | None = None

    what: ClassVar[str] = "model"
    offers: ClassVar[frozenset[str]] = frozenset(
        {"num_classes", "num_outputs", "in_features", "in_channels", "image_size", "max_length"}
    )

    def __post_init__(self) -> None:
        if self.dual and self.conditioned:
            raise ConfigError(
                f"{self.name} was asked for with dual and with conditioned norms; one of them fits."
            )

    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        if name == SEARCHED:
            from fedquilt.supernet.model import SearchedModel

            return SearchedModel
        entry = find(MODELS, name, cls.what)
        return entry.factory if isinstance(entry, ModelSpec) else entry

    @property
    def is_searched(self) -> bool:
        """Return True if its nets depend on the limits of the fleet."""
        return self.name == SEARCHED

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the layers that the model's paper never cuts."""
        return MODELS[self.name].fixed if self.name in MODELS else ()

    @staticmethod
    def usual(data: Pool) -> Model:
        """Return the default model for data.

        It is the demo's model for images, and a perceptron for rows of numbers.
        """
        names = (DEMO["model"]["name"], "mlp")
        return Model(
            next((name for name in names if MODELS[name].takes(data.example[0])), names[0])
        )

    def trace(
        self, data: Pool, init: str = "", task: Task | None = None, max_bytes: int = 0
    ) -> Family:
        """Trace the model for data.

        Numbers of outputs and sizes that the settings leave out are those of the data.

        Args:
            data: Samples that the model is for.
            init: Initial weights, as `load_weights` takes them. Empty: they are drawn from the
                seed.
            task: Task that was asked for. None: it is inferred from the targets of the data.
            max_bytes: Bytes that the weights may take in memory. 0: half of the free memory.
        """
        offers = offered(data, task)

        def module() -> nn.Module:
            net = self.make(nn.Module, offers)
            if self.dual:
                net = dual(net)
            elif self.conditioned:
                net = conditioned(net)
            if init:
                load_weights(net, init, max_bytes)
            return net

        options = self.tracing or TraceOptions(fixed=self.fixed)
        try:
            return trace(
                module,
                data.example,
                fixed=options.fixed,
                parts=options.parts or None,
                heads=options.heads,
                class_dim=options.class_dim,
            )
        except TraceError as error:
            spec_of_model, sample = MODELS.get(self.name), data.example[0]
            if spec_of_model is None or spec_of_model.takes(sample):
                raise
            fitting = (
                ", ".join(name for name, spec in MODELS.items() if spec.takes(sample))
                or "none of those by name"
            )
            kind = "numbers" if sample.is_floating_point() else "tokens"
            raise ConfigError(
                f"the model {self.name!r} was asked for; it is for samples such as "
                f"{spec_of_model.input_shape}, and {data.name} "
                f"has {kind} of shape {tuple(sample.shape)}. Made for these: {fitting}; or a "
                "module of yours, "
                "file.py:factory."
            ) from error


def traced(
    models: Sequence[Model],
    data: Pool,
    init: str = "",
    task: Task | None = None,
    max_bytes: int = 0,
) -> Family:
    """Trace a model for data, or several models as a union whose nets have the models' names.

    Args:
        models: One or more models. Models with the same name are numbered from 1.
        data: Samples that they are for.
        init: Initial weights, for a single model only. Empty: they are drawn from the seed.
        task: Task that was asked for. None: it is inferred from the targets of the data.
        max_bytes: Bytes that the weights may take in memory. 0: half of the free memory.
    """
    if len(models) == 1:
        return models[0].trace(data, init, task, max_bytes)
    if init:
        raise ConfigError(
            f"init = {init!r} was asked for with {len(models)} models; weights of one model can be "
            "loaded. Leave init "
            "out, or trace each model in Python: fq.union({name: fq.trace(module, example), …})."
        )
    return union({name: model.trace(data, "", task) for name, model in net_names(models).items()})


@dataclass(frozen=True)
class SearchTerms:
    """Properties of a method and a precision that the search of nets depends on."""

    step: TrainingStep  # Local training step, whose memory may be limited
    bounds_pair: bool  # True if a device's limits bound its knowledge net and private net together
    needs_supernet: bool  # True if some nets start from the weights of a supernet
    private_weights: bool  # True if private nets start from the weights of a supernet too

    @staticmethod
    def of(method: Method, precision: Precision) -> SearchTerms:
        """Return the terms that a method sets."""
        local = method.local
        return SearchTerms(
            TrainingStep(local.batch_size, len(local.optimizer.slots), precision),
            bounds_pair=method.trains_pairs and not method.ignores_budgets,
            needs_supernet=method.needs_supernet,
            private_weights=method.starts_pretrained,
        )


def searched(
    model: Model, data: Pool, fleet: Fleet, method: Method, seed: int, precision: Precision
) -> Family:
    """Search the nets of a fleet, and return them as a union.

    Args:
        model: The model `searched` with its settings.
        data: Samples that the nets are for.
        fleet: Devices, whose limits decide the nets.
        method: Method of the run. It decides which nets the limits bound, and which nets start
            from a supernet's weights.
        seed: Seed of the search.
        precision: Precision of training, on which memory depends.
    """
    from fedquilt.supernet.model import SearchedModel

    if model.dual or model.conditioned:
        raise ConfigError(
            "dual or conditioned norms were asked for with searched nets, which have plain norms."
        )
    settings = model.make(SearchedModel)
    terms = SearchTerms.of(method, precision)
    if terms.needs_supernet and not settings.supernet:
        raise ConfigError(
            f"{type(method).__name__} was asked for with nets that start from a supernet's "
            "weights, and no supernet "
            "was given. --supernet FILE names one, or model.supernet in a file; `fedquilt supernet "
            "train` makes one."
        )
    account: Literal["pair", "private"] = "pair" if terms.bounds_pair else "private"
    nets = settings.search(
        data, fleet.counts, seed, terms.step, account=account, private_weights=terms.private_weights
    )
    return nets.family(data.example)


def net_names(models: Sequence[Model]) -> dict[str, Model]:
    """Return models by the name of their net in a union.

    It is `Model.net_name`, the name of the model, or the name of the function in a file.
    """
    default_names = [
        re.sub(r"[^A-Za-z0-9_-]", "_", model.name.rpartition(":")[2].rpartition(".")[2])
        for model in models
    ]
    names = [model.net_name or name for model, name in zip(models, default_names, strict=True)]
    num_seen = dict.fromkeys(names, 0)
    by_net_name = {}
    for name, model in zip(names, models, strict=True):
        num_seen[name] += 1
        by_net_name[f"{name}_{num_seen[name]}" if names.count(name) > 1 else name] = model
    return by_net_name


@dataclass(frozen=True)
class Source(Choice):
    """Data by the name of a data set, file or folder, with its options and its partition."""

    # How samples are divided among clients. None: by the clients that the data names, else evenly
    partition: Partition | None = None
    partition_seed: int | None = None  # Random seed of the partition. None: that of the run
    # Share of every client's training samples that is held back for validation. 0: none
    validation: float = 0.0
    # Bytes that files of data or initial weights may take in memory. 0: half of the free memory
    max_bytes: int = 0

    what: ClassVar[str] = "data set"
    offers: ClassVar[frozenset[str]] = frozenset({"max_bytes"})

    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        factory: Callable[..., Any] = (
            find({}, name, cls.what) if is_reference(name) else source(name)
        )
        return factory

    def __post_init__(self) -> None:
        within(self, validation="[0, 1)", max_bytes="[0, inf)")
        if self.partition_seed is not None:
            within(self, partition_seed="[0, 9223372036854775807]")

    def federate(
        self, num_clients: int | None, seed: int
    ) -> tuple[FederatedData, Partition | None]:
        """Load the data and partition it among clients.

        Validation samples are held back afterwards, from the part of each client.

        Args:
            num_clients: Number of clients. None: that of the data, or `CLIENTS`.
            seed: Random seed of the partition, unless `partition_seed` is set.

        Returns:
            The data, and its partition. The partition is None if a user's function has already made
            it.
        """
        data, partition = self._dealt(num_clients, seed)
        return data.with_validation(self.validation), partition

    def _dealt(self, num_clients: int | None, seed: int) -> tuple[FederatedData, Partition | None]:
        pool = self.make(Pool, {"max_bytes": self.max_bytes})
        if isinstance(pool, FederatedData):
            if self.partition is not None:
                raise ConfigError(
                    f"data.partition = {label(type(self.partition))!r} was asked for; {self.name} "
                    "returned data that "
                    "is dealt already. Return a Pool to have it dealt."
                )
            return pool, None
        partition = self.partition or pool.usual
        # These partitions define the number of clients.
        has_own_clients = isinstance(partition, (Natural, Domains))
        seed = seed if self.partition_seed is None else self.partition_seed
        return pool.partition(
            num_clients or (None if has_own_clients else CLIENTS), partition, seed
        ), partition


def offered(data: Pool, task: Task | None = None) -> dict[str, int]:
    """Return the options of a model that the data determines.

    The number of outputs has two names, `num_outputs` and `num_classes`, because a model does not
    have to know what its outputs mean. A factory takes whichever name its signature has.

    Args:
        data: Samples that the model is for.
        task: Task that was asked for. None: it is inferred from the targets of the data.
    """
    outputs = task.num_outputs(data.targets, data.num_classes) if task else data.num_outputs
    names = {"num_classes": outputs, "num_outputs": outputs}
    shape = data.example.shape[1:]
    if not data.example.is_floating_point():  # tokens: (length,)
        return {**names, "max_length": shape[0]} if shape else names
    images = {"in_channels": shape[0], "image_size": shape[-1]} if len(shape) > 1 else {}
    return {**names, "in_features": math.prod(shape), **images}


def load_weights(module: nn.Module, file: str, max_bytes: int = 0, allow_nan: bool = False) -> None:
    """Load the weights of a safetensors file or a run's folder into a module.

    Norm statistics may be missing.

    Args:
        module: Module whose weights are overwritten.
        file: Path of the file, or of the folder of a run.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory.
        allow_nan: Accept values that are NaN or infinite.

    Raises:
        ConfigError: The file cannot be read, or its tensors do not fit the module.
    """
    try:
        weights = _read_weights(file, max_bytes)
        if not allow_nan:
            check_finite(weights, file)
    except RecordError as error:
        raise ConfigError(f"init = {file!r} was asked for: {error}") from error
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    tensors = {**buffers, **dict(module.named_parameters(remove_duplicate=False))}
    problems = [f"{name} is not in the file" for name in parameters if name not in weights]
    for name, value in weights.items():
        if name not in tensors:
            problems.append(f"{name} is not in the model.{nearest(name, tensors)}")
        elif tensors[name].shape != value.shape:
            problems.append(
                f"{name} is {tuple(value.shape)} in the file and {tuple(tensors[name].shape)} "
                "in the model"
            )
        elif problem := _unfit_dtype(value, tensors[name].dtype):
            problems.append(f"{name} {problem}")
    if problems:
        listed = "\n  ".join(
            [*problems[:5], *([f"… and {len(problems) - 5} more"] if len(problems) > 5 else [])]
        )
        raise ConfigError(
            f"init = {file!r} was asked for; it does not fit {type(module).__name__}:\n  {listed}"
        )
    module.load_state_dict(weights, strict=False)


def _read_weights(file: str, max_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or the server's weights of a run."""
    if Path(file).is_dir():
        return dict(load_state(file).weights)
    with TensorFile.open(file, max_bytes) as opened:
        return opened.tensors(torch.device("cpu"), sealed=opened.is_sealed)


def _unfit_dtype(value: Tensor, dtype: torch.dtype) -> str:
    """Return why values of a file cannot be converted to a dtype. Empty: they can."""
    if value.dtype == dtype:
        return ""
    if value.is_complex() or (value.is_floating_point() and not dtype.is_floating_point):
        return (
            f"is {value.dtype} in the file and {dtype} in the model; real numbers are needed "
            "for real numbers."
        )
    back = value.to(dtype)
    if dtype.is_floating_point:
        is_held = bool(back.double().isfinite().all()) or not bool(value.double().isfinite().all())
    else:
        is_held = bool((back.to(torch.int64) == value.to(torch.int64)).all())
    return (
        ""
        if is_held
        else f"has values in the file, {value.dtype}, that overflow in the model, {dtype}."
    )


@dataclass(frozen=True)
class Machine:
    """Options of the engine, the device and the precision."""

    # Name of the engine. "auto": the fastest one on this machine, found by short trials
    name: str = "vectorized"
    device: str = "cpu"  # Device that clients are trained on, as torch names it
    # Precision of training. tf32 and bf16 apply to products, and weights and sums stay fp32
    precision: Precision = "fp32"
    # Bytes that clients trained at the same time may take. 0: 256 MiB, or half of a GPU's free
    # memory
    memory: int = 0
    # Bytes of client states that are kept in memory. Further states are kept on disk
    client_state_memory: int = LIMIT
    deterministic: bool = False  # Make repeated runs on CUDA bit-identical, which is slower
    threads: int = 0  # CPU threads. 0: one for small models, else torch's default
    # Worker processes of `ray`, each with `threads` threads. 0: one per GPU, or as many as fit the
    # CPUs
    workers: int = 0
    # Address of a Ray cluster. Empty: that of RAY_ADDRESS, else a local one is started for the run
    address: str = ""
    # Chunks into which `ray` divides the jobs of a round. The last digits of results depend on this
    # number, and not on the number of workers
    chunks: int = CHUNKS

    def __post_init__(self) -> None:
        problems = outside(
            self,
            memory="[0, inf)",
            client_state_memory="[0, inf)",
            threads="[0, 1024]",
            workers="[0, inf)",
            chunks="[1, inf)",
        )
        if self.name not in (*ENGINES, AUTO):
            engine_names = (*ENGINES, AUTO)
            problems["name"] = (
                f"{self.name!r} was asked for; there is no such engine."
                f"{nearest(self.name, engine_names)}"
            )
        if why := unfit(self.precision, self.device):
            problems["precision"] = why
        refuse(self, problems)

    def create(self, data: FederatedData) -> Simulation:
        """Return the engine that is named, with those of these options that it takes."""
        options = EngineOptions(
            device_of(self.device),
            self.precision,
            self.memory,
            self.workers,
            self.address,
            self.chunks,
        )
        return ENGINES[self.name].create(data, options)


@dataclass(frozen=True)
class Ground:
    """Partitioned data, model and devices, on which methods are compared."""

    data: FederatedData
    family: Family
    fleet: Fleet
    partition: Partition | None  # Partition of the data. None: a user's function made it
    model: Model | tuple[Model, ...]  # Model that was asked for, or the default one for the data
    # Engines of earlier runs, whose captured CUDA graphs are used again
    engines: dict[tuple[Machine, int], Simulation] = field(default_factory=dict, compare=False)


# --- the whole ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """All settings of a federation."""

    method: Method
    data: Source
    # A model, or a list of models for several architectures. None: tiny_resnet for images, mlp for
    # rows of numbers
    model: Model | tuple[Model, ...] | None = None
    # Task by its name, or file.py:Class. None: inferred from the targets and the model's output
    task: Task | None = None
    fleet: Devices = Devices()
    engine: Machine = Machine()
    link: Link = Link()
    evaluation: Evaluation | None = None  # When and how to evaluate. None: about ten times a run
    rounds: int = 20
    seed: int = 0
    # Safetensors file or folder of a run with initial weights. Empty: they are drawn from the seed
    init: File = ""
    checkpoint: Checkpointing = Checkpointing()
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
                f"{SEARCHED!r} was asked for with {conflict}; it is a union by itself, and stands "
                "alone."
            )
        refuse(self, problems)

    @property
    def models(self) -> tuple[Model, ...]:
        """Return the models that were asked for. Empty: the data decides."""
        return self.model if isinstance(self.model, tuple) else (self.model,) if self.model else ()

    @enough_memory("loading the data and the model")
    def ground(self, dealt: tuple[FederatedData, Partition | None] | None = None) -> Ground:
        """Load and partition the data, trace the model, and create the fleet.

        Args:
            dealt: Data and its partition, if they are loaded already. None: they are loaded.
        """
        device = device_of(self.engine.device)
        if self.engine.name != AUTO:
            ENGINES[self.engine.name].check()
        for tracker in self.trackers:
            tracker.check()
        data, partition = dealt or self.data.federate(self.fleet.clients, self.seed)
        model = self.model or Model.usual(data)
        family, fleet = self._family_and_fleet(data)
        # Moved once, because the engines of all compared methods share it.
        data_on_device = data.to(device, DTYPES[self.engine.precision])
        return Ground(data_on_device, family, fleet, partition, model)

    def _family_and_fleet(self, data: FederatedData) -> tuple[Family, Fleet]:
        """Trace the models and create the fleet.

        Searched nets depend on the fleet. For other models, budgets may depend on the model.
        """
        models = self.models or (Model.usual(data),)
        if models[0].is_searched:
            fleet = self.fleet.fleet(data.num_clients, self.seed)
            precision = self.engine.precision
            return searched(models[0], data, fleet, self.method, self.seed, precision), fleet
        family = traced(models, data, self.init, self.task, self.data.max_bytes)
        return family, self.fleet.fleet(data.num_clients, self.seed, family)

    def prepare(self, ground: Ground | None = None) -> Run:
        """Return a run that has not begun.

        Args:
            ground: Data, model and devices of another experiment. None: they are loaded.
        """
        ground = ground or self.ground()
        keep_pages()
        if self.engine.name == AUTO:
            from fedquilt.runs.auto import quickest

            return replace(self, engine=quickest(self, ground)).prepare(ground)
        is_small = ground.family.member(ground.family.whole).macs < SMALL
        torch.set_num_threads(self.engine.threads or (1 if is_small else torch.get_num_threads()))
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
        """Return the experiment with every setting that it left open set to that of a prepared run.

        On another machine it gives the same run.

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
            fleet=replace(self.fleet, clients=run.fleet.num_clients),
            engine=replace(
                self.engine,
                name=next(name for name, kind in ENGINES.items() if kind is type(run.engine)),
                threads=torch.get_num_threads(),
                memory=int(run.engine.settings.get("memory", self.engine.memory)),
            ),
            evaluation=run.evaluation,
        )

    @property
    def names(self) -> dict[str, str]:
        """Return the names of method, model, data and engine, for a summary."""
        kind = type(self.method)
        try:
            method = label(kind)
        except ConfigError:  # Files cannot name the class, but it can be run.
            method = kind.__name__
        return {
            "method": method,
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
        settings: Settings, asked: Mapping[str, str] | None = None, file: str = ""
    ) -> Experiment:
        """Read settings, or raise one error that lists all problems.

        Args:
            settings: Nested plain tables.
            asked: Command-line flag by the path that it set, for messages. None: there are no
                flags.
            file: File of the settings, for messages. Empty: there is none.

        Raises:
            ConfigError: Some settings are wrong.
        """
        return resolved(Experiment, settings, asked or {}, file)


def load_run(path: str | Path, device: str = "cpu", trust: bool = False) -> Run:
    """Return the run in a folder in its last state, to deploy from.

    It is rebuilt from `config.toml`, and nothing is trained. If its data is not available,
    everything that needs no data still works. `Run.absent` then has the reason.

    Args:
        path: Folder of the run.
        device: Device for the weights, as torch names it.
        trust: True: run code that the folder names (`file.py:NAME`), and add it to the user's list.
            False: refuse code that is not in the list, before any of it is imported.
    """
    config, request = Path(path) / "config.toml", f"the run in {path} was asked for"
    if not config.is_file():
        raise ConfigError(
            f"{request}; "
            f"{'there is no run in it' if Path(path).is_dir() else 'there is no such folder'}."
        )
    check_folder(Path(path))
    settings = read_settings(config, trust, recorded=True, asked=request)
    newest_state = newest(path, device)
    if isinstance(init := settings.get("init"), str) and missing(init):
        settings["init"] = ""  # The checkpoint has the trained weights.
    experiment, absent = _without_data(settings, config)
    # Deployment does not need the device, the cluster and the trackers of training.
    machine = replace(
        experiment.engine,
        name="vectorized",
        device=device,
        precision="fp64" if experiment.engine.precision == "fp64" else "fp32",
        deterministic=False,
    )
    experiment = replace(experiment, engine=machine, trackers=())
    partitioned: tuple[FederatedData, Partition | None] | None = None
    try:
        partitioned = (
            None if absent else experiment.data.federate(experiment.fleet.clients, experiment.seed)
        )
    except FedquiltError as error:
        absent = str(error)
    if partitioned is None:
        if "sample" not in newest_state[1].about:  # Earlier versions did not write it.
            raise ConfigError(f"{request}; its data cannot be had: {absent}")
        clients = experiment.fleet.clients or CLIENTS
        partitioned = (
            _stand_in(newest_state[1].about["sample"], clients, experiment.data.name),
            None,
        )
    run = experiment.prepare(experiment.ground(partitioned))
    run.absent = absent
    return reopen(path, run, newest_state)


def _without_data(settings: Settings, config: Path) -> tuple[Experiment, str]:
    """Return the experiment in a file, and why it has no data.

    The reason is empty if all settings are valid. Problems other than those of the data are raised.
    """
    try:
        return Experiment.of(settings, file=str(config)), ""
    except ConfigError as error:
        data_settings = settings.get("data", {})
        try:
            experiment = Experiment.of({**settings, "data": "digits"}, file=str(config))
        except ConfigError:
            raise error from None
        name = (
            data_settings.get("name", "data")
            if isinstance(data_settings, Mapping)
            else str(data_settings)
        )
        return experiment, f"{name}: {error}"


def _stand_in(sample: Mapping[str, Any], num_clients: int, name: str) -> FederatedData:
    """Return data of the same shape without content: one sample of zeros for all clients."""
    inputs = torch.zeros((2, *sample["shape"]), dtype=getattr(torch, sample["dtype"]))
    # Earlier versions had classes alone: one for each sample, or for each token.
    default_format = {
        "shape": [] if inputs.is_floating_point() else sample["shape"],
        "dtype": "int64",
    }
    target_format = sample.get("targets", default_format)
    # The last class, because masks of class 0 alone would have no foreground.
    last = max(sample["classes"] - 1, 0)
    targets = torch.full(
        (2, *target_format["shape"]), last, dtype=getattr(torch, target_format["dtype"])
    )
    # It is not known if the data had public samples. Nothing is computed with these.
    pool = Pool.of(
        (inputs, targets),
        (inputs, targets),
        num_classes=sample["classes"],
        name=name,
        public=inputs,
    )
    all_alike = Parts.split(
        torch.zeros(num_clients, dtype=torch.int64), torch.ones(num_clients, dtype=torch.int64)
    )
    return replace(pool.dealt(all_alike), validation_parts=all_alike)


def resolved(kind: type[T], settings: Settings, asked: Mapping[str, str], file: str = "") -> T:
    """Return an instance of a dataclass from settings, or raise one error with all problems.

    Args:
        kind: The dataclass.
        settings: Nested plain tables.
        asked: Command-line flag by the path that it set, for messages.
        file: File of the settings, for messages. Empty: there is none.
    """
    problems: list[Problem] = []
    instance: T = read(kind, settings, "", problems)
    if problems:
        lines = [f"{path or 'settings'}{_asker(path, asked)}: {text}" for path, text in problems]
        location = f" in {file}" if file else ""
        count = "a problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError("\n  ".join([f"{count}{location}:", *lines]))
    return instance


def _asker(path: str, asked: Mapping[str, str]) -> str:
    """Return the flag that set a path, a table above it, or a value below it."""
    for set_path, flag in asked.items():
        if f"{path}.".startswith(f"{set_path}.") or f"{set_path}.".startswith(f"{path}."):
            return f" ({flag})"
    return ""


# --- settings as plain tables -------------------------------------------------------------------

# Settings of a run without arguments. A third of the clients can hold the whole model, a third half
# of it and a third a quarter. For other data or models, `defaults` has the settings.
DEMO: Settings = {
    "method": {"name": "heterofl"},
    "model": {"name": "tiny_resnet"},
    "data": {"name": "digits"},
    "fleet": {"cohort": 0.5, "budgets": {"name": "uniform", "shares": [1.0, 0.5, 0.25]}},
    "rounds": 20,
}
# Share of the demo's training samples that becomes public, without labels, if a method needs it
DEMO_PUBLIC = 0.2
# Local training with which the demo learns in twenty rounds with any method
LEARNING: Settings = {"optimizer": {"lr": 0.1}, "batch_size": 16, "epochs": 2}
# Bundled data with settings of its own: its model, and local training that works with any method.
# A perceptron has no norms that would undo the scaler. With a scaler, real-valued outputs of narrow
# nets would have another scale in training than in use. Gradients of squared errors are steep, so
# that they are clipped.
DEMOS: dict[str, tuple[str, Settings]] = {
    DEMO["data"]["name"]: (DEMO["model"]["name"], LEARNING),
    "digits-labels": (DEMO["model"]["name"], LEARNING),
    "diabetes": (
        "mlp",
        {"optimizer": {"lr": 0.05, "clip": 1.0}, "batch_size": 16, "epochs": 2, "scaler": False},
    ),
}


def demo(
    method: str = DEMO["method"]["name"],
    preset: bool = False,
    data: str = DEMO["data"]["name"],
    together: Sequence[str] = (),
) -> Settings:
    """Return the demo's settings for a method.

    A preset, or a function in a file, defines itself how clients train. If the method or one that
    it is compared with needs public samples, a fifth of the training samples becomes public,
    without labels.

    Args:
        method: Name of the method.
        preset: True if a preset of the method was asked for.
        data: A key of `DEMOS`.
        together: Names of methods that it is compared with on the same data.
    """
    model, learning = DEMOS[data]
    kind = _method_class(method)
    local = (
        {}
        if preset or is_made_by_function(method)
        else {"local": learning, **(kind.demo if kind else {})}
    )
    public = (
        {"public": DEMO_PUBLIC} if any(needs_public(name) for name in (method, *together)) else {}
    )
    named = {
        "method": {"name": method} | local,
        "model": {"name": model},
        "data": {"name": data} | public,
    }
    federation = kind.demo_federation if kind else {}
    return copy.deepcopy({**DEMO, **named, **federation})


def needs_public(method: str) -> bool:
    """Return True if a method by its name needs public samples with its default settings."""
    kind = _method_class(method)
    try:
        return kind is not None and kind().needs_public
    except Exception:  # A user's class may need arguments. `Experiment.of` reports the error.
        return False


def trains_pairs(method: str) -> bool:
    """Return True if clients of a method, by its name, train two nets of a union."""
    kind = _method_class(method)
    return kind is not None and kind.trains_pairs


def _method_class(name: str) -> type[Method] | None:
    """Return a method's class by name or as `file.py:Class`. None: a function, or unknown."""
    try:
        entry = find(METHODS, name, "method")
    except ConfigError:  # `Experiment.of` reports the error.
        return None
    return entry if isinstance(entry, type) and issubclass(entry, Method) else None


def defaults(
    method: str = DEMO["method"]["name"], names_model: bool = True, num_models: int = 1
) -> Settings:
    """Return settings that name method, model and data only, so that all else has its defaults.

    The default fleet is named too, so that `--set fleet.budgets.shares=[1.0]` changes its shares.

    Args:
        method: Name of the method.
        names_model: True: the demo's model is named. False: no model is, so that the data decides.
        num_models: Number of models that are asked for. If there are several, the fleet has equally
            many clients for each, and the demo's data has public samples if the method needs them.
    """
    named = {
        part: copy.deepcopy(DEMO[part])
        for part in (("model", "data") if names_model else ("data",))
    }
    budgets = Devices().budgets if num_models < 2 else ByNet()
    if num_models > 1 and needs_public(method):
        named["data"]["public"] = DEMO_PUBLIC
    table: Settings = {"name": label(type(budgets))}
    if num_models > 1 and trains_pairs(method):
        table["pairs"] = True
    return {"method": {"name": method}, **named, "fleet": {"budgets": table}}


def is_made_by_function(method: str) -> bool:
    """Return True if a method's name is that of a function, which defines all settings."""
    try:
        return is_reference(method) and not isinstance(find(METHODS, method, "method"), type)
    except ConfigError:  # `Experiment.of` reports the error.
        return False


def choose(settings: Settings, path: Sequence[str], name: Any) -> Settings:
    """Change the name in a table in-place, such as that of a method, an optimizer or the data.

    Keys that all variants have are kept, and options of the previous variant are removed. A preset
    is kept too, so that `read` refuses it if the new method has none of that name.

    Args:
        settings: Settings to change.
        path: Keys of the table.
        name: New name.
    """
    if not path:  # Settings as a whole have no name, so that reading them refuses it.
        return assign(settings, ["name"], name)
    current: Any = settings
    for key in path:
        current = current.get(key, {}) if isinstance(current, Mapping) else {}
    table = (
        {"name": current}
        if isinstance(current, str)
        else dict(current)
        if isinstance(current, Mapping)
        else {}
    )
    alternatives = variants(Experiment, path)
    if alternatives and table.get("name", alternatives.usual) != name:
        table = {
            key: value
            for key, value in table.items()
            if key in alternatives.common or key == "preset"
        }
    return assign(settings, path, {**table, "name": name})


def overlay(base: Settings, over: Settings) -> Settings:
    """Return settings with others merged into them. Neither argument is changed.

    Tables are merged. If a name changes, `choose` decides which options of the base are kept. A
    string in place of a table is the name of a table without other keys.

    Args:
        base: Settings below.
        over: Settings on top, which may have a part of the keys only.
    """
    settings = copy.deepcopy(base)
    _lay(settings, [], over)
    return settings


def _lay(settings: Settings, path: list[str], over: Mapping[str, Any]) -> None:
    # Names come first, because they decide which other keys are allowed.
    if path and "name" in over:
        choose(settings, path, over["name"])
    for key, value in over.items():
        inner_path = [*path, key]
        if isinstance(value, Mapping):
            _lay(settings, inner_path, value)
        elif isinstance(value, str) and value != "none" and variants(Experiment, inner_path):
            choose(settings, inner_path, value)
        elif key != "name" or not path:
            assign(settings, inner_path, value)


def read_toml(file: str | Path) -> Settings:
    """Return the settings in a TOML file."""
    try:
        return parse_toml(Path(file).read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} was asked for; it cannot be read: {error.strerror or error}."
        ) from error


def read_settings(
    file: str | Path, trust: bool = False, recorded: bool | None = None, asked: str = ""
) -> Settings:
    """Return the settings in a TOML file.

    Settings of a run or a study are refused if they name code that is not trusted.

    Args:
        file: Path of a TOML file.
        trust: True: add the code that it names to the user's list. False: refuse code that is not
            in the list.
        recorded: True: the file belongs to a run or a study. None: this is decided by the files
            beside it.
        asked: Request, for messages. Empty: the file was asked for.

    Raises:
        ConfigError: The file cannot be read, names code that is not in the list, or belongs to a
            run of a script whose settings could not be written.
    """
    if recorded or is_beside_records(file):
        check_plain(Path(file))
    settings = read_toml(file)
    if "python" in settings:
        raise ConfigError(
            f"{asked or f'{file} was asked for'}; {_only_in_python(settings['python'], Path(file))}"
        )
    if recorded or (recorded is None and is_recorded(file)):
        check_code({str(file): settings}, trust)
    return settings


def _only_in_python(table: Any, file: Path) -> str:
    """Return why the run of a script cannot be opened by its folder, and what would work.

    Args:
        table: Table `python` of its settings. Its key `missing` has the reasons, unless an earlier
            version wrote it.
        file: Path of the settings.
    """
    missing = table.get("missing", ()) if isinstance(table, Mapping) else ()
    reasons = (
        [reason for reason in missing if isinstance(reason, str)]
        if isinstance(missing, list)
        else []
    )
    if reasons:
        why = "\n  ".join(
            ["it was begun by a script, and settings could not be written for all of it:", *reasons]
        )
        remedy = (
            "\nA new run of the script would have settings with these changes. This one goes "
            "on in Python"
        )
    else:
        why = (
            "it was begun by a script, with a version of fedquilt that wrote no settings for "
            "scripts."
        )
        remedy = " It goes on in Python"
    return (
        f"{why}{remedy}, with the same arguments: fedquilt.run(…, out={str(file.parent)!r}, "
        "resume=True), whose result "
        "has deploy, export and per_client."
    )


def parse_toml(text: bytes, file: str) -> Settings:
    """Return the settings in the text of a TOML file.

    Args:
        text: Content of the file.
        file: Path of the file, for messages.

    Raises:
        ConfigError: The text is not TOML. The message has the line and the column.
    """
    try:
        return tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{file} nests too deeply to be read.") from error
    except ValueError as error:  # TOMLDecodeError, or an integer of more than 4,300 digits
        message, _, position = str(error).partition(" (at ")
        lines = text.decode().split("\n")
        end = [len(lines), len(lines[-1]) + 1]  # tomllib gives no numbers at the end.
        line, column = map(int, re.findall(r"\d+", position)) if "line" in position else end
        location = f"{file}:{line}:{column}" if position else file
        raise ConfigError(f"{location}: this is not TOML: {message.removesuffix('.')}.") from error


def assign(settings: Settings, path: Sequence[str], value: Any) -> Settings:
    """Set a value at a path in-place. A string on the way becomes a table with that name.

    Args:
        settings: Settings to change.
        path: Keys of the setting.
        value: New value, which is copied.

    Raises:
        ConfigError: A key on the way is a list of several tables.
    """
    *above, last = path
    table = settings
    for key in above:
        current = table.get(key, {})
        if isinstance(current, list) and len(current) > 1:
            raise ConfigError(
                f"{'.'.join(path)} was asked for; {key} is a list of {len(current)} there, "
                "of which each has settings of "
                f"its own. A file says which is meant: a table [[{key}]] for each, with its name "
                "and its settings."
            )
        table[key] = (
            {"name": current}
            if isinstance(current, str)
            else dict(current)
            if isinstance(current, Mapping)
            else {}
        )
        table = table[key]
    table[last] = copy.deepcopy(value)
    return settings


def assign_all(settings: Settings, assignments: Iterable[tuple[Sequence[str], Any]]) -> Settings:
    """Set values at paths in-place. Names are set first, because they decide about other keys.

    Args:
        settings: Settings to change.
        assignments: Keys of each setting, and its value.
    """
    for keys, value in sorted(assignments, key=lambda assignment: assignment[0][-1] != "name"):
        if keys[-1] == "name":
            choose(settings, keys[:-1], value)
        else:
            assign(settings, keys, value)
    return settings


def parse_assignment(text: str) -> tuple[list[str], Any]:
    """Return path and value of `a.b=v`. The value is TOML, and bare words are text."""
    key, equals, value = text.partition("=")
    path = parse_path(key) if equals else []
    if not path:
        raise ConfigError(f"--set {text} was asked for; write it as --set method.shift=2.")
    try:
        table = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return path, value.strip()
    return path, table["value"] if list(table) == ["value"] else value.strip()


def parse_grid(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the path and the values of `a.b=v,v`. Each v is a TOML value, and bare words are text.

    Values that are lists themselves are written as TOML lists: `a.b=[1.0],[1.0,0.5]`.
    """
    key, equals, values = text.partition("=")
    path = key.strip()
    if not equals or not parse_path(path) or not values.strip():
        raise ConfigError(
            f"--grid {text} was asked for; write it as --grid method.local.optimizer.lr=0.01,0.1."
        )
    try:
        parsed = tomllib.loads(f"values = [{values}]")["values"]
    except (ValueError, RecursionError):
        parsed = [value.strip() for value in values.split(",")]
    return path, tuple(parsed)


def parse_path(key: str) -> list[str]:
    """Return the keys of a dotted key, which may be quoted: fleet.budgets."0.5".

    The result is empty if the text is not a dotted key.
    """
    try:
        table: Any = tomllib.loads(f"{key} = 0")
    except (ValueError, RecursionError):
        return []
    path = []
    while isinstance(table, dict):
        if len(table) != 1:
            return []
        ((name, table),) = table.items()
        path.append(name)
    return path
