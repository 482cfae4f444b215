"""Settings of models: a model by its name, several models as a union, and searched nets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Literal

from torch import nn
from typing_extensions import override

from fedquilt.config.choice import Choice
from fedquilt.data import Pool
from fedquilt.errors import ConfigError, TraceError
from fedquilt.family import Family
from fedquilt.family.cost import TrainingStep
from fedquilt.family.dual import conditioned, dual
from fedquilt.family.tracing.trace import trace
from fedquilt.family.union import union
from fedquilt.hardware.precision import Precision
from fedquilt.methods import Method
from fedquilt.models import MODELS, ModelSpec
from fedquilt.names import find
from fedquilt.round import Fleet
from fedquilt.runs.demo import DEMO
from fedquilt.runs.initial_weights import load_weights
from fedquilt.tasks import Task

# Name of the model whose nets are searched for the fleet (`fedquilt.supernet`)
SEARCHED = "searched"


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

    noun: ClassVar[str] = "model"
    offers: ClassVar[frozenset[str]] = frozenset(
        {"num_classes", "num_outputs", "in_features", "in_channels", "image_size", "max_length"}
    )

    def __post_init__(self) -> None:
        if self.dual and self.conditioned:
            raise ConfigError(
                f"{self.name} was asked for with dual and with conditioned norms; one of them fits."
            )

    @classmethod
    @override
    def find(cls, name: str) -> Callable[..., Any]:
        if name == SEARCHED:
            from fedquilt.supernet.model import SearchedModel

            return SearchedModel
        entry = find(MODELS, name, cls.noun)
        return entry.factory if isinstance(entry, ModelSpec) else entry

    @property
    def is_searched(self) -> bool:
        """Return True for the model `searched`, whose nets depend on the limits of the fleet."""
        return self.name == SEARCHED

    @property
    def fixed(self) -> tuple[str, ...]:
        """Return the layers that the model's paper never cuts. Empty for a user's own model."""
        return MODELS[self.name].fixed if self.name in MODELS else ()

    @staticmethod
    def usual(data: Pool) -> Model:
        """Return the default model for data.

        It is the demo's model for images, and a perceptron for rows of numbers. For data that
        neither takes, it is the demo's model.
        """
        names = (DEMO["model"]["name"], "mlp")
        return Model(
            next((name for name in names if MODELS[name].takes(data.example[0])), names[0])
        )

    @property
    def trace_arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of `fedquilt.trace` for this model."""
        options = self.tracing or TraceOptions(fixed=self.fixed)
        return {
            "fixed": options.fixed,
            "parts": options.parts or None,
            "heads": options.heads,
            "class_dim": options.class_dim,
        }

    def module(self, offers: Mapping[str, int], init: str = "", max_bytes: int = 0) -> nn.Module:
        """Make the module, with the norms that were asked for.

        Args:
            offers: Numbers of outputs and sizes that the settings leave out (`offered`).
            init: Initial weights, as `load_weights` takes them. Empty: they are drawn from the
                seed.
            max_bytes: Bytes that the weights may take in memory. 0: half of the free memory.
        """
        net = self.make(nn.Module, offers)
        if self.dual:
            net = dual(net)
        elif self.conditioned:
            net = conditioned(net)
        if init:
            load_weights(net, init, max_bytes)
        return net

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
        module = partial(self.module, offered(data, task), init, max_bytes)
        options = self.trace_arguments
        try:
            return trace(module, data.example, **options)
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
                f"{spec_of_model.input_shape}, and {data.name} has {kind} of shape "
                f"{tuple(sample.shape)}. Made for these: {fitting}; or a module of yours, "
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
            "loaded. Leave init out, or trace each model in Python: fq.union({name: "
            "fq.trace(module, example), …})."
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
        """Return the terms that a method sets.

        Args:
            method: Method of the run, whose local training decides the memory of a step.
            precision: Precision of training.
        """
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
            "weights, and no supernet was given. --supernet FILE names one, or model.supernet in a "
            "file; `fedquilt supernet train` makes one."
        )
    account: Literal["pair", "private"] = "pair" if terms.bounds_pair else "private"
    nets = settings.search(
        data, fleet.counts, seed, terms.step, account=account, private_weights=terms.private_weights
    )
    return nets.family(data.example)


def net_names(models: Sequence[Model]) -> dict[str, Model]:
    """Return models by the name of their net in a union, in the same order.

    It is `Model.net_name`, the name of the model, or the name of the function in a file. If several
    models have the same name, all of them get a number from 1 on, as in `vgg11_1`.
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
