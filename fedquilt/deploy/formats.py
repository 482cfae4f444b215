"""File formats of exported models: ONNX, torch's .pt2 and safetensors."""

from __future__ import annotations

import io
import json
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedquilt.deploy.deploy import (
    Deployed,
)
from fedquilt.deploy.load import net_prefix, restored
from fedquilt.deploy.model_file import (
    Note,
)
from fedquilt.errors import ConfigError, ExportError
from fedquilt.errors.extras import how_to_install
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.variants import Variants
from fedquilt.names import said
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorFile

# A model as a function of a batch.
Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class WrittenModel:
    """A module that is being written to a file, with its origin, an example input and a note."""

    module: nn.Module  # Module in evaluation mode, on the CPU.
    deployment: Deployed  # Nets that the module consists of, with their family.
    example: Tensor  # (2, …) Input with which the module is exported.
    note: Note  # Description that is stored in the file.


class Format(ABC):
    """A file format: how a model is written, and how it is read back for the comparison."""

    @classmethod  # noqa: B027  # Most formats need no further package.
    def check(cls) -> None:
        """Raise a ConfigError if packages of the format are missing, before any expensive step."""

    @abstractmethod
    def write(self, model: WrittenModel) -> bytes:
        """Return the content of the file. Nothing is written to disk."""

    @abstractmethod
    def read(self, data: bytes, model: WrittenModel) -> Forward:
        """Return the model in the content of a file, as a function of a batch.

        Args:
            data: Content of the file.
            model: The model that was written, for formats that need its code.
        """


@dataclass(frozen=True)
class Onnx(Format):
    """ONNX, for ONNX Runtime and other runtimes. The batch size is free."""

    @classmethod
    @override
    def check(cls) -> None:
        missing = []
        for name in ("onnx", "onnxruntime", "onnxscript"):
            try:
                __import__(name)
            except ImportError:
                missing.append(name)
        if missing:
            raise ConfigError(
                f"the format 'onnx' was asked for; it needs {', '.join(missing)}, which cannot be "
                f"imported here: {how_to_install('export')}. pt2 and safetensors need nothing "
                "more."
            )

    @override
    def write(self, model: WrittenModel) -> bytes:
        program = _program(model)
        try:
            with _quiet():
                exported: Any = torch.onnx.export(
                    program,
                    dynamo=True,
                    input_names=["input"],
                    output_names=["logits"],
                    verbose=False,
                )
                proto = exported.model_proto
                _name_batch(proto.graph)
                for node in proto.graph.node:
                    del node.metadata_props[:]  # Names that only the exporter uses
                proto.metadata_props.add(key="fedquilt", value=_note_json(model.note))
                data: bytes = proto.SerializeToString()
        except Exception as error:
            first_line = said(error).strip().split("\n")[0]
            raise ExportError(
                f"{model.note['model']} cannot be written as ONNX: {first_line}"
            ) from error
        return data

    @override
    def read(self, data: bytes, model: WrittenModel) -> Forward:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        (name,) = (session_input.name for session_input in session.get_inputs())
        return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def _name_batch(graph: Any) -> None:
    """Rename the free batch size to `batch` in an ONNX graph, in-place.

    Exporters give it a numbered name.
    """
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if symbol and symbol in dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "batch")


@dataclass(frozen=True)
class Pt2(Format):
    """torch's exported program, which torch.export.load reads without the module's code.

    The batch size is free.
    """

    @override
    def write(self, model: WrittenModel) -> bytes:
        buffer, program = io.BytesIO(), _program(model)
        with _quiet():
            torch.export.save(
                program, buffer, extra_files={"fedquilt.json": _note_json(model.note)}
            )
        return buffer.getvalue()

    @override
    def read(self, data: bytes, model: WrittenModel) -> Forward:
        with _quiet():
            program: Forward = torch.export.load(io.BytesIO(data)).module()
        return program


def _recordable(module: nn.Module) -> nn.Module:
    """Return a module in a form that torch.export can record.

    Modules with variants are converted, also inside of an ensemble. Other modules are returned
    unchanged.
    """
    if isinstance(module, Ensemble):
        return Ensemble(_recordable(net) for net in module.nets).eval()
    return module.exportable() if isinstance(module, Variants) else module


def _program(model: WrittenModel) -> Any:
    """Export a module with torch.export for batches of any size, without stack traces.

    Raises:
        ExportError: torch cannot export the module.
    """
    module = _recordable(model.module)
    # The example has two samples, because torch treats a size of 1 as a constant.
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    shapes[model.example] = {0: torch.export.Dim("batch")}
    try:
        with _quiet():
            program = torch.export.export(module, (model.example,), dynamic_shapes=shapes)
    except Exception as error:
        first_line = said(error).strip().split("\n")[0]
        raise ExportError(
            f"{model.note['model']} cannot be recorded by torch.export for batches of any size: "
            f"{first_line} safetensors takes every module."
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # It has code and paths of this machine.
    return program


@dataclass(frozen=True)
class Safetensors(Format):
    """Weights by name with a note, for `fedquilt.load_model` and the module's code."""

    @override
    def write(self, model: WrittenModel) -> bytes:
        nets = model.module.nets if isinstance(model.module, Ensemble) else [model.module]
        names, tensors = model.deployment.family.layout.dims, dict[str, Tensor]()
        for position, net in enumerate(nets):
            prefix, state = net_prefix(position, len(model.deployment.nets)), net.state_dict()
            tensors |= {prefix + name: state[name] for name in names if name in state}
        return b"".join(Blob.sealed(tensors, model.note).chunks())

    @override
    def read(self, data: bytes, model: WrittenModel) -> Forward:
        file = TensorFile.of(data, "the file")
        tensors = file.tensors(torch.device("cpu"), sealed=True)
        return restored(tensors, file.note, model.deployment.family).requires_grad_(False)


def _note_json(note: Note) -> str:
    """Return a note as JSON, without the entry "layout", which only fedquilt reads."""
    return json.dumps({key: value for key, value in note.items() if key != "layout"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Python warnings, and what torch's ONNX exporter logs, in the block.

    These messages are about internals and missing packages. Errors are still logged.
    """
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


FORMATS: dict[str, type[Format]] = {"onnx": Onnx, "pt2": Pt2, "safetensors": Safetensors}
