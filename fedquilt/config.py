"""A whole federation as values: what `config.toml` holds and the flags of the command line change.

Settings are nested plain tables. They are laid over one another (a file, the demo or the defaults, then flags, then
`--set a.b=v`), read once into the dataclasses they name, and written back, resolved, beside the results: that file
alone repeats the run. Paths in them are relative to where the command is given.
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

import fedquilt as fq
from fedquilt.checkpoint import Checkpointing
from fedquilt.checks import File, missing, outside, refuse, within
from fedquilt.data import PARTITIONS, Domains, FederatedData, Natural, Partition, Pool, source
from fedquilt.data.parts import Parts
from fedquilt.devices import device_of, keep_pages
from fedquilt.engines import ENGINES
from fedquilt.engines.options import CHUNKS, EngineOptions
from fedquilt.engines.simulation import Simulation
from fedquilt.errors import ConfigError, FedquiltError, RecordError, TraceError
from fedquilt.experiment import Run
from fedquilt.family import Family
from fedquilt.family.cost import TrainingStep
from fedquilt.family.norms import NORM_POLICIES, NormPolicy
from fedquilt.faults import enough_memory
from fedquilt.fleets import FLEETS, Budgets, ByNet
from fedquilt.memory import LIMIT
from fedquilt.methods import METHODS, Method
from fedquilt.models import MODELS, ModelSpec
from fedquilt.names import find, is_reference, nearest
from fedquilt.precision import DTYPES, Precision, unfit
from fedquilt.records import check_folder, load, newest, reopen
from fedquilt.round import Evaluation, Fleet
from fedquilt.round.clients import Devices
from fedquilt.round.link import CODECS, LOSSES, USUAL_CODEC, BaseCodec, Link, Loss
from fedquilt.round.training.objectives import OBJECTIVES, Wrapping
from fedquilt.settings import TABLES, Choice, Problem, Table, label, read, variants, write
from fedquilt.tasks import TASKS, Task
from fedquilt.tensor_files import TensorFile, check_finite
from fedquilt.tracking import TRACKERS, Tracking
from fedquilt.trust import check_code, is_recorded

Settings = dict[str, Any]
T = TypeVar("T")

# Below so many multiply-adds a sample threads gain nothing, and waiting for each other on a busy machine they lose all.
SMALL = 1_000_000
AUTO = "auto"
SEARCHED = (
    "searched"  # Name of the model whose nets are searched for the fleet (`fedquilt.supernet`)
)
CLIENTS = 20  # where neither the settings nor the data say how many

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


# --- the parts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model(Choice):
    """A model by its name, and the options it is made with."""

    dual: bool = (
        False  # its norms in pairs, for clean and for noised samples: what robust Split-Mix needs
    )
    conditioned: bool = (
        False  # its norms conditioned on a robustness: what several adversarial weights need
    )

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
        found = find(MODELS, name, cls.what)
        return found.factory if isinstance(found, ModelSpec) else found

    @property
    def is_searched(self) -> bool:
        """Return True if its nets depend on the limits of the fleet."""
        return self.name == SEARCHED

    @property
    def fixed(self) -> tuple[str, ...]:
        """The layers its paper leaves whole."""
        return MODELS[self.name].fixed if self.name in MODELS else ()

    @staticmethod
    def usual(data: Pool) -> Model:
        """Return the model for data where nobody named one: the demo's for images, a perceptron for rows of numbers."""
        names = (DEMO["model"]["name"], "mlp")
        return Model(
            next((name for name in names if MODELS[name].takes(data.example[0])), names[0])
        )

    def trace(
        self, data: Pool, init: str = "", task: Task | None = None, max_bytes: int = 0
    ) -> Family:
        """Trace the model for data. Numbers of outputs and sizes that nobody set are those of the data.

        Args:
            data: Samples that the model is for.
            init: Weights to start from, as `load_weights` takes them. Empty: those of the seed.
            task: Task that was asked for. None: what the data says of its targets.
            max_bytes: Bytes that the weights may take in memory. 0: half of the free memory.
        """
        offers = offered(data, task)

        def module() -> nn.Module:
            made = self.make(nn.Module, offers)
            if self.dual:
                made = fq.dual(made)
            elif self.conditioned:
                made = fq.conditioned(made)
            if init:
                load_weights(made, init, max_bytes)
            return made

        try:
            return fq.trace(module, data.example, fixed=self.fixed)
        except TraceError as error:
            own, sample = MODELS.get(self.name), data.example[0]
            if own is None or own.takes(sample):
                raise
            fitting = (
                ", ".join(name for name, spec in MODELS.items() if spec.takes(sample))
                or "none of those by name"
            )
            kind = "numbers" if sample.is_floating_point() else "tokens"
            raise ConfigError(
                f"the model {self.name!r} was asked for; it is for samples such as {own.input_shape}, and {data.name} "
                f"has {kind} of shape {tuple(sample.shape)}. Made for these: {fitting}; or a module of yours, "
                "file.py:factory."
            ) from error


def traced(
    models: Sequence[Model],
    data: Pool,
    init: str = "",
    task: Task | None = None,
    max_bytes: int = 0,
) -> Family:
    """Trace a model for data, or several as a union whose nets have the models' names.

    Args:
        models: One or more models. Models with the same name are numbered from 1.
        data: Samples that they are for.
        init: Weights to start from. Several models start from those of the seed.
        task: Task that was asked for. None: what the data says of its targets.
        max_bytes: Bytes that the weights may take in memory. 0: half of the free memory.
    """
    if len(models) == 1:
        return models[0].trace(data, init, task, max_bytes)
    if init:
        raise ConfigError(
            f"init = {init!r} was asked for with {len(models)} models; weights of one model can be loaded. Leave init "
            "out, or trace each model in Python: fq.union({name: fq.trace(module, example), …})."
        )
    return fq.union(
        {name: model.trace(data, "", task) for name, model in _net_names(models).items()}
    )


@dataclass(frozen=True)
class SearchTerms:
    """What searched nets depend on besides the data, the fleet and the settings of the search."""

    step: TrainingStep  # local training step, whose memory may be limited
    bounds_pair: bool  # a device's limits bound the knowledge net and its private net together
    needs_supernet: bool  # some nets start from the weights of a supernet
    private_weights: bool  # private nets do so too

    @staticmethod
    def of(method: Method, precision: Precision) -> SearchTerms:
        """Return the terms that a method sets."""
        local = method.local
        return SearchTerms(
            TrainingStep(local.batch_size, len(local.optimiser.slots), precision),
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
        method: Method of the run. It decides what limits bound, and which nets start from a supernet's weights.
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
            f"{type(method).__name__} was asked for with nets that start from a supernet's weights, and no supernet "
            "was given. --supernet FILE names one, or model.supernet in a file; `fedquilt supernet train` makes one."
        )
    account: Literal["pair", "private"] = "pair" if terms.bounds_pair else "private"
    nets = settings.search(
        data, fleet.counts, seed, terms.step, account=account, private_weights=terms.private_weights
    )
    return nets.family(data.example)


def _net_names(models: Sequence[Model]) -> dict[str, Model]:
    """Return models by the name of their net in a union: the model's, or that of the function in a file."""
    names = [
        re.sub(r"[^A-Za-z0-9_-]", "_", model.name.rpartition(":")[2].rpartition(".")[2])
        for model in models
    ]
    places = dict.fromkeys(names, 0)
    found = {}
    for name, model in zip(names, models, strict=True):
        places[name] += 1
        found[f"{name}_{places[name]}" if names.count(name) > 1 else name] = model
    return found


@dataclass(frozen=True)
class Source(Choice):
    """Data by its name (or a file's or folder's), the options it is loaded with, and how it is dealt to clients."""

    partition: Partition | None = None  # None: to the clients the data itself names, else evenly
    validation: float = (
        0.0  # Share of every client's training samples that is held back for validation. 0: none
    )
    max_bytes: int = 0  # Bytes that files of data or of initial weights may take in memory. 0: half of what is free

    what: ClassVar[str] = "data set"
    offers: ClassVar[frozenset[str]] = frozenset({"max_bytes"})

    @classmethod
    def find(cls, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = find({}, name, cls.what) if is_reference(name) else source(name)
        return found

    def __post_init__(self) -> None:
        within(self, validation="[0, 1)", max_bytes="[0, inf)")

    def deal(self, num_clients: int | None, seed: int) -> tuple[FederatedData, Partition | None]:
        """Load the data and deal it to clients, and say how; None: a file of the user's own has dealt it already.

        Validation samples are held back afterwards, of what each client was dealt.
        """
        data, partition = self._dealt(num_clients, seed)
        return data.with_validation(self.validation), partition

    def _dealt(self, num_clients: int | None, seed: int) -> tuple[FederatedData, Partition | None]:
        found = self.make(Pool, {"max_bytes": self.max_bytes})
        if isinstance(found, FederatedData):
            if self.partition is not None:
                raise ConfigError(
                    f"data.partition = {label(type(self.partition))!r} was asked for; {self.name} returned data that "
                    "is dealt already. Return a Pool to have it dealt."
                )
            return found, None
        partition = self.partition or found.usual
        own = isinstance(partition, (Natural, Domains))  # these know how many clients there are
        return found.deal(num_clients or (None if own else CLIENTS), partition, seed), partition


def offered(data: Pool, task: Task | None = None) -> dict[str, int]:
    """Return the options of a model that the data settles.

    The number of outputs has two names, `num_outputs` and `num_classes`, because a model does not
    have to know what its outputs mean. A factory takes whichever name it has.

    Args:
        data: Samples that the model is for.
        task: Task that was asked for. None: what the data says of its targets.
    """
    outputs = task.num_outputs(data.targets, data.num_classes) if task else data.num_outputs
    names = {"num_classes": outputs, "num_outputs": outputs}
    shape = data.example.shape[1:]
    if not data.example.is_floating_point():  # tokens: (length,)
        return {**names, "max_length": shape[0]} if shape else names
    images = {"in_channels": shape[0], "image_size": shape[-1]} if len(shape) > 1 else {}
    return {**names, "in_features": math.prod(shape), **images}


def load_weights(module: nn.Module, file: str, max_bytes: int = 0, allow_nan: bool = False) -> None:
    """Put the weights of a safetensors file or a run's folder into a module. Norm statistics may be missing.

    Args:
        module: The module, whose weights are written over.
        file: The file, or the folder of a run.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory.
        allow_nan: Accept values that are NaN or infinite.

    Raises:
        ConfigError: The file cannot be read, or its tensors are not those of the module.
    """
    try:
        found = _read_weights(file, max_bytes)
        if not allow_nan:
            check_finite(found, file)
    except RecordError as error:
        raise ConfigError(f"init = {file!r} was asked for: {error}") from error
    needed, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    held = {**buffers, **dict(module.named_parameters(remove_duplicate=False))}
    wrong = [f"{name} is not in the file" for name in needed if name not in found]
    for name, value in found.items():
        if name not in held:
            wrong.append(f"{name} is not in the model.{nearest(name, held)}")
        elif held[name].shape != value.shape:
            wrong.append(
                f"{name} is {tuple(value.shape)} in the file and {tuple(held[name].shape)} in the model"
            )
        elif problem := _unfit_dtype(value, held[name].dtype):
            wrong.append(f"{name} {problem}")
    if wrong:
        told = "\n  ".join(
            [*wrong[:5], *([f"… and {len(wrong) - 5} more"] if len(wrong) > 5 else [])]
        )
        raise ConfigError(
            f"init = {file!r} was asked for; it does not fit {type(module).__name__}:\n  {told}"
        )
    module.load_state_dict(found, strict=False)


def _read_weights(file: str, max_bytes: int) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, or the server's weights of a run."""
    if Path(file).is_dir():
        return dict(load(file).weights)
    with TensorFile.open(file, max_bytes) as opened:
        return opened.tensors(torch.device("cpu"), sealed=opened.is_sealed)


def _unfit_dtype(value: Tensor, dtype: torch.dtype) -> str:
    """Return why values of a file cannot become those of a module, or nothing."""
    if value.dtype == dtype:
        return ""
    if value.is_complex() or (value.is_floating_point() and not dtype.is_floating_point):
        return f"is {value.dtype} in the file and {dtype} in the model; real numbers are needed for real numbers."
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
    """Options that decide where and how clients are trained."""

    name: str = "vectorised"  # of an engine; "auto": the fastest way on this machine, found by a short trial
    device: str = "cpu"  # as torch names it
    precision: Precision = "fp32"  # tf32 and bf16 are of products; weights and sums stay fp32
    memory: int = 0  # bytes that clients trained at the same time may take; 0: 256 MiB, or half of what a GPU has free
    memories: int = LIMIT  # bytes of what clients remember that are held; what is more lies on disk
    deterministic: bool = False  # on CUDA: bit-identical repetitions, slower
    threads: int = 0  # 0: one for small models, else what torch takes
    workers: int = (
        0  # of `ray`, with so many threads each; 0: as many as there are GPUs, or CPUs for
    )
    address: str = ""  # of a Ray cluster; "": that of RAY_ADDRESS, else one of this machine's, started for the run
    chunks: int = CHUNKS  # that `ray` cuts a round's jobs into: last digits depend on it, and not on the workers

    def __post_init__(self) -> None:
        wrong = outside(
            self,
            memory="[0, inf)",
            memories="[0, inf)",
            threads="[0, 1024]",
            workers="[0, inf)",
            chunks="[1, inf)",
        )
        if self.name not in (*ENGINES, AUTO):
            known = (*ENGINES, AUTO)
            wrong["name"] = (
                f"{self.name!r} was asked for; there is no such engine.{nearest(self.name, known)}"
            )
        if why := unfit(self.precision, self.device):
            wrong["precision"] = why
        refuse(self, wrong)

    def create(self, data: FederatedData) -> Simulation:
        """Return the engine that is named, with those of these options that it has."""
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
    """What methods are compared on: the data as it is dealt, the model, and the devices."""

    data: FederatedData
    family: Family
    fleet: Fleet
    partition: Partition | None  # by which the data was dealt; None: it came so
    model: Model | tuple[Model, ...]  # as asked for, or the usual one for the data
    # What one method's run has recorded on a GPU serves the next.
    engines: dict[tuple[Machine, int], Simulation] = field(default_factory=dict, compare=False)


# --- the whole --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """A whole federation as values."""

    method: Method
    data: Source
    # A model, or a list of models for several architectures. None: tiny_resnet for images, mlp for rows of numbers
    model: Model | tuple[Model, ...] | None = None
    task: Task | None = (
        None  # Task by its name, or file.py:Class. None: found from the targets and the model's output
    )
    fleet: Devices = Devices()
    engine: Machine = Machine()
    link: Link = Link()
    evaluation: Evaluation | None = None  # None: about ten times a run
    rounds: int = 20
    seed: int = 0
    init: File = (
        ""  # a safetensors file or a run's folder: weights to start from, instead of the seed's
    )
    checkpoint: Checkpointing = Checkpointing()
    tracking: tuple[Tracking, ...] = ()  # where its numbers go besides its folder

    def __post_init__(self) -> None:
        wrong = outside(self, rounds="[1, inf)", seed="[0, 9223372036854775807]")
        if self.model == ():
            wrong["model"] = (
                "an empty list was asked for; one model or more would work, such as ['convnet', 'vgg11']."
            )
        elif any(model.is_searched for model in self.models) and (
            len(self.models) > 1 or self.init
        ):
            other = "init" if len(self.models) == 1 else "other models"
            wrong["model"] = (
                f"{SEARCHED!r} was asked for with {other}; it is a union by itself, and stands alone."
            )
        refuse(self, wrong)

    @property
    def models(self) -> tuple[Model, ...]:
        """Return the models that were asked for; () if the data decides."""
        return self.model if isinstance(self.model, tuple) else (self.model,) if self.model else ()

    @enough_memory("loading the data and the model")
    def ground(self, dealt: tuple[FederatedData, Partition | None] | None = None) -> Ground:
        """Load and deal the data, if that is not done yet; trace the model, count the devices."""
        device = device_of(self.engine.device)
        if self.engine.name != AUTO:
            ENGINES[self.engine.name].check()
        for tracking in self.tracking:
            tracking.check()
        data, partition = dealt or self.data.deal(self.fleet.clients, self.seed)
        model = self.model or Model.usual(data)
        family, fleet = self._family_and_fleet(data)
        # Moved once: the engines of all methods that are compared share it.
        here = data.to(device, DTYPES[self.engine.precision])
        return Ground(here, family, fleet, partition, model)

    def _family_and_fleet(self, data: FederatedData) -> tuple[Family, Fleet]:
        """Trace the models and count the devices. Searched nets depend on the devices, other budgets on the model."""
        models = self.models or (Model.usual(data),)
        if models[0].is_searched:
            fleet = self.fleet.fleet(data.num_clients, self.seed)
            precision = self.engine.precision
            return searched(models[0], data, fleet, self.method, self.seed, precision), fleet
        family = traced(models, data, self.init, self.task, self.data.max_bytes)
        return family, self.fleet.fleet(data.num_clients, self.seed, family)

    def prepare(self, ground: Ground | None = None) -> Run:
        """A run that has not begun; with `ground`, on what another experiment has laid."""
        ground = ground or self.ground()
        keep_pages()
        if self.engine.name == AUTO:
            from fedquilt.trial import quickest

            return replace(self, engine=quickest(self, ground)).prepare(ground)
        small = ground.family.member(ground.family.whole).macs < SMALL
        torch.set_num_threads(self.engine.threads or (1 if small else torch.get_num_threads()))
        if self.engine.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else cuBLAS refuses to be
            torch.use_deterministic_algorithms(True)
        # About ten looks on the way: norms are calibrated anew for each, which costs as much as a round.
        looks = self.evaluation or Evaluation(every=math.ceil(self.rounds / 10))
        run = fq.prepare(
            self.method.settled(self.rounds),
            ground.family,
            ground.data,
            ground.fleet,
            ground.engines.get((self.engine, self.seed)) or self.engine.create(ground.data),
            self.seed,
            evaluation=looks,
            memory_limit=self.engine.memories,
            link=self.link,
            task=self.task,
        )
        ground.engines[self.engine, self.seed] = run.engine
        run.settled_for = self.rounds
        return run

    def settled(self, run: Run, ground: Ground) -> Experiment:
        """The experiment with what it left open as a prepared run has it, so that it is the same on another machine."""
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
        """What the parts are called, as a summary has it."""
        kind = type(self.method)
        try:
            method = label(kind)
        except ConfigError:  # no file can ask for it again, but it can be run
            method = kind.__name__
        return {
            "method": method,
            "model": " + ".join(model.name for model in self.models) or AUTO,
            "data": self.data.name,
            "engine": self.engine.name,
        }

    def to_toml(self) -> str:
        """The experiment as a file's text; `Experiment.of(tomllib.loads(text))` is equal to it."""
        import tomli_w

        return tomli_w.dumps(write(self))

    @staticmethod
    def of(
        settings: Settings, asked: Mapping[str, str] | None = None, file: str = ""
    ) -> Experiment:
        """Read settings, or raise one error with all that is wrong. `asked` says which flag set a path."""
        return resolved(Experiment, settings, asked or {}, file)


def load_run(path: str | Path, device: str = "cpu", trust: bool = False) -> Run:
    """Return the run in a folder as it is, to deploy from. Its `config.toml` makes it again, and nothing is trained.

    Where its data cannot be had, what needs none can still be done; `Run.absent` says why it cannot.

    Args:
        path: Folder of the run.
        device: Device for the weights, as torch names it.
        trust: True: run code that the folder names (`file.py:NAME`), and add it to the user's list. False: refuse
            code that is not in the list, before any of it is imported.
    """
    config, asked = Path(path) / "config.toml", f"the run in {path} was asked for"
    if not config.is_file():
        raise ConfigError(
            f"{asked}; {'there is no run in it' if Path(path).is_dir() else 'there is no such folder'}."
        )
    check_folder(Path(path))
    settings = read_settings(config, trust, recorded=True)
    if "python" in settings:
        raise ConfigError(
            f"{asked}; it was put together by a script, which alone has its model: there, "
            f"fedquilt.run(…, out={str(path)!r}, resume=True) has it again, with deploy, export and customisable."
        )
    found = newest(path, device)
    if isinstance(init := settings.get("init"), str) and missing(init):
        settings["init"] = ""  # what was learnt since is in the checkpoint
    experiment, absent = _without_data(settings, config)
    # What training needed, a device, a cluster, trackers, is not needed any more.
    machine = replace(
        experiment.engine,
        name="vectorised",
        device=device,
        precision="fp64" if experiment.engine.precision == "fp64" else "fp32",
        deterministic=False,
    )
    experiment = replace(experiment, engine=machine, tracking=())
    dealt: tuple[FederatedData, Partition | None] | None = None
    try:
        dealt = None if absent else experiment.data.deal(experiment.fleet.clients, experiment.seed)
    except FedquiltError as error:
        absent = str(error)
    if dealt is None:
        if "sample" not in found[1].about:  # written by an earlier version
            raise ConfigError(f"{asked}; its data cannot be had: {absent}")
        clients = experiment.fleet.clients or CLIENTS
        dealt = _stand_in(found[1].about["sample"], clients, experiment.data.name), None
    run = experiment.prepare(experiment.ground(dealt))
    run.absent = absent
    return reopen(path, run, found)


def _without_data(settings: Settings, config: Path) -> tuple[Experiment, str]:
    """The experiment in a file, and why it is without data, where that alone is what is wrong with it."""
    try:
        return Experiment.of(settings, file=str(config)), ""
    except ConfigError as error:
        named = settings.get("data", {})
        try:
            experiment = Experiment.of({**settings, "data": "digits"}, file=str(config))
        except ConfigError:
            raise error from None
        name = named.get("name", "data") if isinstance(named, Mapping) else str(named)
        return experiment, f"{name}: {error}"


def _stand_in(sample: Mapping[str, Any], num_clients: int, name: str) -> FederatedData:
    """Return data of the same shape without anything in it: one sample that all clients hold, and public ones."""
    inputs = torch.zeros((2, *sample["shape"]), dtype=getattr(torch, sample["dtype"]))
    # Earlier versions had classes alone: one for each sample, or for each token.
    usual = {"shape": [] if inputs.is_floating_point() else sample["shape"], "dtype": "int64"}
    like = sample.get("targets", usual)
    # The last class, because masks of class 0 alone would have no foreground.
    last = max(sample["classes"] - 1, 0)
    targets = torch.full((2, *like["shape"]), last, dtype=getattr(torch, like["dtype"]))
    # Whether the data had public samples is not known. Nothing is computed with these.
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
    """Settings as what they describe, or one error with all that is wrong and who asked for it."""
    problems: list[Problem] = []
    found: T = read(kind, settings, "", problems)
    if problems:
        told = [f"{path or 'settings'}{_asker(path, asked)}: {text}" for path, text in problems]
        where = f" in {file}" if file else ""
        count = "a problem" if len(told) == 1 else f"{len(told)} problems"
        raise ConfigError("\n  ".join([f"{count}{where}:", *told]))
    return found


def _asker(path: str, asked: Mapping[str, str]) -> str:
    """The flag that set a path, a table above it, or something in it."""
    for one, flag in asked.items():
        if f"{path}.".startswith(f"{one}.") or f"{one}.".startswith(f"{path}."):
            return f" ({flag})"
    return ""


# --- settings as plain tables -----------------------------------------------------------------------------------

# The run without arguments: a third of the clients can hold all of the model, a third a half and a third a quarter. Its
# federation belongs to its data and model: with others, `defaults` has the settings.
DEMO: Settings = {
    "method": {"name": "heterofl"},
    "model": {"name": "tiny_resnet"},
    "data": {"name": "digits"},
    "fleet": {"sample": 0.5, "budgets": {"name": "uniform", "shares": [1.0, 0.5, 0.25]}},
    "rounds": 20,
}
DEMO_PUBLIC = 0.2  # Share of the demo's training samples that becomes public, without labels, if a method needs it
# What makes it learn in twenty rounds, whatever the method.
LEARNING: Settings = {"optimiser": {"lr": 0.1}, "batch_size": 16, "epochs": 2}
# Bundled data that has settings of its own: its model, and what makes that learn, whatever the method. A perceptron has
# no norms that would undo the scaler, with which real-valued outputs of narrow nets would have another scale in
# training than in use. Squared errors have steep gradients, which clipping bounds.
DEMOS: dict[str, tuple[str, Settings]] = {
    DEMO["data"]["name"]: (DEMO["model"]["name"], LEARNING),
    "digits-labels": (DEMO["model"]["name"], LEARNING),
    "diabetes": (
        "mlp",
        {"optimiser": {"lr": 0.05, "clip": 1.0}, "batch_size": 16, "epochs": 2, "scaler": False},
    ),
}


def demo(
    method: str = DEMO["method"]["name"],
    preset: bool = False,
    data: str = DEMO["data"]["name"],
    together: Sequence[str] = (),
) -> Settings:
    """Return the demo's settings for a method. A preset, or a function in a file, says itself how clients train.

    A fifth of the training samples becomes public, without labels, if the method or one that it is compared with needs
    public samples.

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
        {"public": DEMO_PUBLIC} if any(needs_public(one) for one in (method, *together)) else {}
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
    except (
        Exception
    ):  # A class of the user's own may need arguments. `Experiment.of` reports what is wrong.
        return False


def trains_pairs(method: str) -> bool:
    """Return True if clients of a method, by its name, train two nets of a union."""
    kind = _method_class(method)
    return kind is not None and kind.trains_pairs


def _method_class(name: str) -> type[Method] | None:
    """Return a method's class by its name or as `file.py:Class`. None: it is a function, or unknown."""
    try:
        found = find(METHODS, name, "method")
    except ConfigError:  # `Experiment.of` reports it
        return None
    return found if isinstance(found, type) and issubclass(found, Method) else None


def defaults(
    method: str = DEMO["method"]["name"], names_model: bool = True, num_models: int = 1
) -> Settings:
    """Return settings that leave all but the names of method, model and data to the defaults of each.

    The default fleet is named too, so that `--set fleet.budgets.shares=[1.0]` changes its shares.

    Args:
        method: Name of the method.
        names_model: True: the demo's model is named. False: no model is, so that the data decides it.
        num_models: How many models are asked for. Several have a fleet with as many clients for each of them, and
            the demo's data then has public samples if the method needs them.
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
    """Return True if a method's name is that of a function, which returns it with settings of its own."""
    try:
        return is_reference(method) and not isinstance(find(METHODS, method, "method"), type)
    except ConfigError:  # `Experiment.of` reports it
        return False


def choose(settings: Settings, path: Sequence[str], name: Any) -> Settings:
    """Name another method, optimiser, data …, in place: what all of them have stays, another's own options do not.

    A preset stays too, so that `read` refuses it if the other method has none of that name.
    """
    held: Any = settings
    for key in path:
        held = held.get(key, {}) if isinstance(held, Mapping) else {}
    table = (
        {"name": held} if isinstance(held, str) else dict(held) if isinstance(held, Mapping) else {}
    )
    there = variants(Experiment, path)
    if there and table.get("name", there.usual) != name:
        table = {
            key: value for key, value in table.items() if key in there.common or key == "preset"
        }
    return assign(settings, path, {**table, "name": name})


def overlay(base: Settings, over: Settings) -> Settings:
    """Return settings with others laid over them; neither is changed.

    Tables are merged. Where a name changes, `choose` decides which options of the table below stay.
    A name alone stands for a table with nothing else.

    Args:
        base: Settings below.
        over: Settings on top, which may name a part of the keys only.
    """
    settings = copy.deepcopy(base)
    _lay(settings, [], over)
    return settings


def _lay(settings: Settings, path: list[str], over: Mapping[str, Any]) -> None:
    # Names come first: they decide which other keys there are.
    if path and "name" in over:
        choose(settings, path, over["name"])
    for key, value in over.items():
        place = [*path, key]
        if isinstance(value, Mapping):
            _lay(settings, place, value)
        elif isinstance(value, str) and value != "none" and variants(Experiment, place):
            choose(settings, place, value)
        elif key != "name" or not path:
            assign(settings, place, value)


def read_toml(file: str | Path) -> Settings:
    """The settings in a file."""
    try:
        return parse_toml(Path(file).read_bytes(), str(file))
    except OSError as error:
        raise ConfigError(
            f"{file} was asked for; it cannot be read: {error.strerror or error}."
        ) from error


def read_settings(file: str | Path, trust: bool = False, recorded: bool | None = None) -> Settings:
    """Return the settings in a file, unless it is a run's or a study's and names code that is not trusted.

    Args:
        file: Path of a TOML file.
        trust: True: add the code that it names to the user's list. False: refuse code that is not in the list.
        recorded: True: the file is a run's or a study's. None: that is found from the files beside it.

    Raises:
        ConfigError: The file cannot be read, or names code that is not in the list.
    """
    settings = read_toml(file)
    if recorded or (recorded is None and is_recorded(file)):
        check_code({str(file): settings}, trust)
    return settings


def parse_toml(text: bytes, file: str) -> Settings:
    """The settings in a file's text, or an error with the line and column that are wrong."""
    try:
        return tomllib.loads(text.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file} is not text in UTF-8: byte {error.start} is {error.object[error.start]:#x}."
        ) from error
    except RecursionError as error:
        raise ConfigError(f"{file} nests too deeply to be read.") from error
    except ValueError as error:  # TOMLDecodeError, or a number of more than 4,300 digits
        told, _, place = str(error).partition(" (at ")
        lines = text.decode().split("\n")
        end = [len(lines), len(lines[-1]) + 1]  # tomllib gives the end of the document no numbers
        line, column = map(int, re.findall(r"\d+", place)) if "line" in place else end
        where = f"{file}:{line}:{column}" if place else file
        raise ConfigError(f"{where}: this is not TOML: {told.removesuffix('.')}.") from error


def assign(settings: Settings, path: Sequence[str], value: Any) -> Settings:
    """Set a value at a path, in place; a name that stands for a table becomes one when a key of it is set."""
    *above, last = path
    table = settings
    for key in above:
        held = table.get(key, {})
        if isinstance(held, list) and len(held) > 1:
            raise ConfigError(
                f"{'.'.join(path)} was asked for; {key} is a list of {len(held)} there, of which each has settings of "
                f"its own. A file says which is meant: a table [[{key}]] for each, with its name and its settings."
            )
        table[key] = (
            {"name": held}
            if isinstance(held, str)
            else dict(held)
            if isinstance(held, Mapping)
            else {}
        )
        table = table[key]
    table[last] = copy.deepcopy(value)
    return settings


def assign_all(settings: Settings, assignments: Iterable[tuple[Sequence[str], Any]]) -> Settings:
    """Set values at paths, in place. Names come first because they decide which other keys there are.

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
    """`a.b=v` as a path and a value: v is a TOML value, and bare words are text."""
    key, equals, value = text.partition("=")
    path = parse_path(key) if equals else []
    if not path:
        raise ConfigError(f"--set {text} was asked for; write it as --set method.shift=2.")
    try:
        found = tomllib.loads(f"value = {value}")
    except (ValueError, RecursionError):
        return path, value.strip()
    return path, found["value"] if list(found) == ["value"] else value.strip()


def parse_grid(text: str) -> tuple[str, tuple[Any, ...]]:
    """Return the path and the values of `a.b=v,v`. Each v is a TOML value, and bare words are text.

    Values that are lists themselves are written as TOML lists: `a.b=[1.0],[1.0,0.5]`.
    """
    key, equals, values = text.partition("=")
    path = key.strip()
    if not equals or not parse_path(path) or not values.strip():
        raise ConfigError(
            f"--grid {text} was asked for; write it as --grid method.local.optimiser.lr=0.01,0.1."
        )
    try:
        found = tomllib.loads(f"values = [{values}]")["values"]
    except (ValueError, RecursionError):
        found = [value.strip() for value in values.split(",")]
    return path, tuple(found)


def parse_path(key: str) -> list[str]:
    """Return the keys of a dotted key, which may be quoted: fleet.budgets."0.5". Empty: it is not one."""
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
