"""First contact: a server describes its model and samples, and a device introduces itself.

Both are JSON. `ServerFacts` accompanies every message, so that a device that was restarted needs
nothing but the message. A device applies the normalisation of the server, because one that is
measured on its own samples would differ.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedquilt.checks import whole
from fedquilt.config.resolve import resolved
from fedquilt.config.writing import write
from fedquilt.data import FederatedData, Pool
from fedquilt.data.scale import Scale
from fedquilt.deployment.device_family import constant_digests, device_family
from fedquilt.deployment.roster import MAX_SIZE, check_name, read_budget
from fedquilt.deployment.terms import permitted
from fedquilt.errors import ConfigError, FormatError
from fedquilt.family import Family, Layout
from fedquilt.family.layout import MAX_AXIS_SIZE
from fedquilt.runs.model_settings import Model, offered
from fedquilt.storage.tensor_files import bounded_json
from fedquilt.tasks import Task
from fedquilt.terms import Budget

VERSION = 1
MAX_DEPTH = 16  # Nested brackets
MAX_CLASSES = 1 << 20
MAX_LAYOUT_BYTES = 4 << 20
MAX_REASON = 500  # Characters of a device's reason


@dataclass(frozen=True)
class ModelTerms:
    """The model or models that a server trains."""

    model: Model | tuple[Model, ...]


@dataclass(frozen=True)
class ServerFacts:
    """Facts about the server's model and samples that a device has to know."""

    run: str  # Identity of the run
    model: Any  # Settings of the model or of several models, as plain values
    shape: tuple[int, ...]  # Shape of a stored sample
    dtype: str  # Type of stored samples, such as "uint8"
    classes: int  # Number of classes. 0: targets are no classes
    # Normalisation as nested lists (mean, standard deviation). None: stored values are used
    scale: tuple[Any, Any] | None = None
    # Numbers of outputs and sizes for options of models that the settings leave out
    offers: Mapping[str, int] = field(default_factory=dict)
    layout: str = ""  # The layout of the model as JSON, before a method adapts it
    # Hashes of the model's constants, which devices compute, by name
    constants: Mapping[str, str] = field(default_factory=dict)
    # Hash of the public samples, if clients use them. Empty: devices need no public samples
    public: str = ""

    @staticmethod
    def of(
        run: str,
        models: Sequence[Model],
        data: Pool,
        family: Family,
        task: Task | None = None,
        clients_need_public: bool = False,
    ) -> ServerFacts:
        """Return what devices have to know about data and models.

        Args:
            run: Identity of the run.
            models: Models of the server.
            data: Samples of the server, as they are stored.
            family: The traced models.
            task: Task that was asked for. None: it is inferred from the targets of the data.
            clients_need_public: True if the method lets clients use the public samples.
        """
        terms = ModelTerms(tuple(models) if len(models) > 1 else models[0])
        scale = None
        if data.scale is not None:
            scale = data.scale.mean.tolist(), data.scale.std.tolist()
        dtype = str(data.inputs.dtype).removeprefix("torch.")
        shape = tuple(data.inputs.shape[1:])
        layout = replace(family.layout, notes=())
        return ServerFacts(
            run,
            write(terms)["model"],
            shape,
            dtype,
            data.num_classes,
            scale,
            offered(data, task),
            layout.to_json(),
            constant_digests(family),
            _digest(data.public) if clients_need_public else "",
        )

    def to_bytes(self) -> bytes:
        """Return the description as JSON."""
        plain = {
            "version": VERSION,
            "run": self.run,
            "model": self.model,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "classes": self.classes,
            "scale": None if self.scale is None else list(self.scale),
            "offers": dict(self.offers),
            "layout": _packed(self.layout),
            "constants": dict(self.constants),
            "public": self.public,
        }
        return json.dumps(plain).encode()

    @staticmethod
    def read(text: bytes) -> ServerFacts:
        """Read a description.

        Raises:
            FormatError: It is none, or one of another version.
        """
        plain = bounded_json(text, MAX_DEPTH)
        keys = {"version", "run", "model", "shape", "dtype", "classes", "scale"}
        keys |= {"offers", "layout", "constants", "public"}
        if not isinstance(plain, dict) or plain.keys() != keys or plain["version"] != VERSION:
            raise FormatError(f"the server's description is none of version {VERSION}")
        if not isinstance(plain["run"], str) or not isinstance(plain["dtype"], str):
            raise FormatError("the server's description has no run or no type of samples")
        if not isinstance(plain["public"], str):
            raise FormatError("the server's description has no hash of public samples")
        shape = plain["shape"]
        if not isinstance(shape, list) or not all(whole(size, 1) for size in shape):
            raise FormatError("the server's description has no shape of samples")
        if not whole(plain["classes"]) or plain["classes"] > MAX_CLASSES:
            raise FormatError("the server's description has no number of classes")
        scale = plain["scale"]
        if scale is not None and (not isinstance(scale, list) or len(scale) != 2):
            raise FormatError("the server's description has no normalisation")
        offers, constants = plain["offers"], plain["constants"]
        if not isinstance(offers, dict) or not all(
            whole(size) and size <= MAX_AXIS_SIZE for size in offers.values()
        ):
            raise FormatError("the server's description has no sizes of the model")
        if not isinstance(constants, dict) or not all(
            isinstance(digest, str) for digest in constants.values()
        ):
            raise FormatError("the server's description has no hashes of constants")
        return ServerFacts(
            plain["run"],
            plain["model"],
            tuple(shape),
            plain["dtype"],
            plain["classes"],
            None if scale is None else (scale[0], scale[1]),
            offers,
            _unpacked(plain["layout"]),
            constants,
            plain["public"],
        )

    def fitted(self, data: FederatedData) -> FederatedData:
        """Return a device's samples with the server's number of classes and normalisation.

        Public samples that the clients of the method do not use are left out.

        Raises:
            ConfigError: Samples have another shape, type or more classes, or public samples that
                clients use are missing or differ from the server's.
        """
        dtype = str(data.inputs.dtype).removeprefix("torch.")
        if (tuple(data.inputs.shape[1:]), dtype) != (self.shape, self.dtype):
            raise ConfigError(
                f"the server has samples of shape {self.shape} and type {self.dtype}; {data.name} "
                f"on the device has {tuple(data.inputs.shape[1:])} and {dtype}. Samples of the "
                "server's kind would work on the device."
            )
        if data.num_classes > self.classes:
            raise ConfigError(
                f"the server has {self.classes} classes; {data.name} on the device has "
                f"{data.num_classes}. The server's classes would work on the device."
            )
        if self.public and _digest(data.public) != self.public:
            found = "none" if data.public is None else f"{len(data.public)} other ones"
            raise ConfigError(
                "the server's method lets clients learn from its public samples; "
                f"{data.name} on the device has {found}. The array `public` of the server's data "
                "would work in the device's file."
            )
        scale = None
        if self.scale is not None:
            try:
                mean, std = (torch.tensor(values) for values in self.scale)
            except (TypeError, ValueError, RuntimeError) as error:
                raise FormatError("the server's description has no normalisation") from error
            scale = Scale(mean, std)
        public = data.public if self.public else None
        return replace(data, num_classes=self.classes, scale=scale, public=public)

    def family(
        self, data: FederatedData, model: str | None = None, allowed: Collection[str] = ()
    ) -> Family:
        """Build the server's model with the code that the device has, without values of weights.

        Args:
            data: The device's samples, as `fitted` returns them.
            model: Model that the device's owner named, which may refer to a file. It replaces the
                server's name. None: the server's name is used.
            allowed: References to code, such as "mine.py:net", that a server may name.

        Raises:
            ConfigError: The server names code that the owner did not allow, or a model that the
                device does not have or has differently.
        """
        plain = self.model if model is None else _renamed(self.model, model)
        plain = permitted(plain, (*allowed, *(() if model is None else (model,))))
        terms = resolved(ModelTerms, {"model": plain}, {}, "the server's description")
        models = terms.model if isinstance(terms.model, tuple) else (terms.model,)
        refuse_searched(models)
        layout = Layout.from_json(self.layout)
        return device_family(models, layout, self.offers, data.example, self.constants)


def refuse_searched(models: Sequence[Model]) -> None:
    """Refuse nets that are searched for a fleet, by a ConfigError."""
    if any(model.is_searched for model in models):
        raise ConfigError(
            "searched nets were asked for, which the server finds for its fleet; devices cannot "
            "build such nets. Models by name would work: --model A B."
        )


def _digest(public: Tensor | None) -> str:
    """Return a hash of public samples as they are stored, or an empty text if there are none."""
    if public is None:
        return ""
    content = hashlib.sha256(f"{tuple(public.shape)} {public.dtype}".encode())
    content.update(public.contiguous().cpu().view(torch.uint8).numpy().data)
    return content.hexdigest()


def _packed(layout: str) -> str:
    """Return a layout as compressed text. That of ResNet-18 has 1.3 kB instead of 9."""
    return base64.b64encode(zlib.compress(layout.encode())).decode()


def _unpacked(text: Any) -> str:
    """Return the layout that `_packed` compressed, or refuse other texts by a FormatError."""
    try:
        unpacking = zlib.decompressobj()
        layout = unpacking.decompress(base64.b64decode(text, validate=True), MAX_LAYOUT_BYTES)
        if not unpacking.eof:
            raise FormatError(f"the server's layout has more than {MAX_LAYOUT_BYTES:,} bytes")
        return layout.decode()
    except (TypeError, ValueError, zlib.error) as error:
        raise FormatError("the server's description has no layout") from error


def _renamed(model: Any, name: str) -> Any:
    """Return the settings of one model with another name. The options stay."""
    if isinstance(model, Mapping):
        return {**model, "name": name}
    if isinstance(model, str):
        return name
    raise ConfigError(
        f"--model {name} was asked for on the device; the server has several models, whose names "
        "the device takes from the server."
    )


@dataclass(frozen=True)
class Enrolment:
    """Introduction of a device. It is all that a server learns before the first round."""

    name: str
    budget: Budget | None  # None: the device cannot take part
    size: int = 0  # Training samples
    failed: str = field(default="")  # Why the device cannot take part. Empty: it can

    def to_bytes(self) -> bytes:
        """Return the introduction as JSON."""
        plain = {
            "version": VERSION,
            "name": self.name,
            "budget": None if self.budget is None else self.budget.bounds,
            "size": self.size,
            "failed": self.failed[:MAX_REASON],
        }
        return json.dumps(plain).encode()

    @staticmethod
    def read(text: bytes) -> Enrolment:
        """Read an introduction.

        Raises:
            FormatError: It is none, or one of another version.
        """
        plain = bounded_json(text, MAX_DEPTH)
        keys = {"version", "name", "budget", "size", "failed"}
        if not isinstance(plain, dict) or plain.keys() != keys or plain["version"] != VERSION:
            raise FormatError(f"it is no enrolment of version {VERSION}")
        name, failed, size = plain["name"], plain["failed"], plain["size"]
        if not isinstance(name, str) or not isinstance(failed, str):
            raise FormatError("its name or its reason is no text")
        check_name(name)
        if failed:
            return Enrolment(name, None, 0, failed[:MAX_REASON])
        if not isinstance(plain["budget"], dict) or not whole(size, 1) or size > MAX_SIZE:
            raise FormatError("it has no budget or no number of samples")
        return Enrolment(name, read_budget(plain["budget"]), size)
