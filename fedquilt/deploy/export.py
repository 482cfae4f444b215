"""Export to ONNX, torch's .pt2 and safetensors. Every file is read back and compared."""

from __future__ import annotations

import io
import json
import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedquilt import noise
from fedquilt.data.parts import Array
from fedquilt.deploy.customizable import CustomizableModel, customizable
from fedquilt.deploy.deploy import (
    Deployed,
    WeightSource,
    assembled,
    deployed,
    norms_of,
    total_cost,
    total_share,
)
from fedquilt.deploy.model_file import (
    Note,
    about,
    check_names,
    check_submodel,
    check_weights,
    family_of,
    read,
    under,
)
from fedquilt.errors import ConfigError, ExportError, FormatError, RecordError
from fedquilt.errors.extras import how_to_install
from fedquilt.family import Family
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.norms import NormPolicy
from fedquilt.family.union import alone
from fedquilt.family.variants import Variants, VariantSource
from fedquilt.names import known, said
from fedquilt.storage.files import Blob, why, write
from fedquilt.storage.tensor_files import TensorFile
from fedquilt.terms import Budget, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.deploy.trained import Trained

# Largest difference between outputs of two runtimes, which sum in different orders. If outputs are
# larger than 1, it is relative to the largest one.
TOLERANCE = 1e-4
# Batch sizes at which outputs are compared. The module is exported with the first one.
BATCHES = (2, 1, 7, 32)
Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """An exported file, its cost, and the largest difference between its outputs and torch's."""

    format: str
    file: str
    bytes: int
    params: int
    macs: int
    memory: int  # Bytes for inference on one sample: float32 weights and the largest activations
    share: float
    max_difference: float
    nets: int  # Number of nets whose logits are averaged
    norms: str  # Name of the norm policy
    # Inputs of the comparison: test or validation samples, or random samples if there is no data
    compared: str
    robustness: float | None  # Robustness λ of dual or conditioned norms. None: there are none
    robustness_by_default: bool  # True if no robustness was asked for and 0 (clean) was used
    round: int  # Round of the run whose weights are in the file

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Written:
    """A module that is being written to a file, with its origin, an example input and a note."""

    module: nn.Module
    found: Deployed
    example: Tensor
    note: Note


def export(
    run: Trained,
    file: str | Path,
    budget: Budget,
    format: str = "",
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
    robustness: float | None = None,
    force: bool = False,
) -> Exported:
    """Write the model for a budget, after its file gave the same outputs as torch.

    Args:
        run: A run, or what is left of it for deployment.
        file: File to write.
        budget: Budget of the device.
        format: One of `FORMATS`. Empty: the ending of the file's name.
        client: Client whose own result is deployed. None: the server's.
        norms: Norm policy or its name, as in `Run.deploy`. None: the policy of training, or `post`.
        samples: Inputs on which norm statistics are measured instead of training samples.
        robustness: Robustness of dual norms, from 0 (clean) to 1. None: 0 if there are such norms.
        force: Overwrite an existing file.

    Raises:
        ConfigError: The format is unknown, or the file exists.
        ExportError: The format cannot express the model, or outputs differ.
    """
    path = Path(file)
    check_place(path, force)
    kind = chosen(path, format)
    writer = FORMATS[kind]()
    writer.check()
    deployment = deployed(run, budget, client, norms, samples)
    by_default = robustness is None and deployment.family.adjustable
    robustness = 0.0 if by_default else robustness
    module = deployment.module(robustness).cpu().requires_grad_(False)
    if any(weight.dtype == torch.float64 for weight in module.parameters()):
        module = module.float()  # other runtimes have few kernels for more
    batches, compared = _samples(
        run, [size for size in BATCHES if size > 1 or deployment.norms.stores]
    )
    note = {
        **about(run, deployment.family, deployment.nets),
        "format": "model",
        "budget": budget.bounds,
        "share": rounded(deployment.share),
        "client": client,
        "norms": deployment.norms.name,
        "robustness": robustness,
        "nets": [net.to_dict() for net in deployment.nets],
    }
    model = Written(module, deployment, batches[0], note)
    data = writer.write(model)
    difference = _difference(module, writer.read(data, model), batches, kind)
    cost = deployment.cost
    return Exported(
        kind,
        str(path),
        _written(path, data),
        cost.params,
        cost.macs,
        cost.inference,
        note["share"],
        difference,
        len(deployment.nets),
        deployment.norms.name,
        compared,
        robustness,
        by_default,
        run.server.round,
    )


def export_sizes(
    run: Trained,
    file: str | Path,
    shares: Sequence[float],
    format: str = "",
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
    robustness: float | None = None,
    force: bool = False,
) -> list[Exported]:
    """Write the models for several shares into one file, after comparing outputs with torch.

    `load_model` returns the same as `Run.customizable`, with the first share set.

    Args:
        run: A run, or what is left of it for deployment.
        file: File to write.
        shares: Shares of the model in (0, 1].
        format: One of `FORMATS`. Empty: the ending of the file's name.
        client: Client whose own result is deployed. None: the server's.
        norms: Norm policy or its name, as in `Run.deploy`. None: the policy of training, or `post`.
        samples: Inputs on which norm statistics are measured instead of training samples.
        robustness: Robustness of dual norms, from 0 (clean) to 1. None: 0 if there are such norms.
        force: Overwrite an existing file.

    Raises:
        ConfigError: The format is unknown, or the file exists.
        ExportError: The format cannot express the model, or outputs differ.
    """
    path = Path(file)
    check_place(path, force)
    kind = chosen(path, format)
    if kind != "safetensors":
        raise ConfigError(
            f"shares of {', '.join(f'{share:g}' for share in shares)} in one file were asked for, "
            f"as {kind}; only "
            "safetensors can hold several. Others hold one share each."
        )
    model = customizable(run, shares, client, norms, samples).cpu()
    family, _, _ = alone(
        run.world.family, WeightSource(run, client).nets(Budget(share=model.shares[0]))
    )
    by_default = robustness is None and family.adjustable
    robustness = 0.0 if by_default else robustness
    model.set(robustness=robustness)
    if any(weight.dtype == torch.float64 for weight in model.parameters()):
        model = model.float()
    batches, compared = _samples(
        run, [size for size in BATCHES if size > 1 or norms_of(run, norms, client).stores]
    )
    data = b"".join(model.blob().chunks())
    written = TensorFile.of(data, str(path))
    restored = CustomizableModel.restored(
        family, written.tensors(torch.device("cpu"), sealed=True), written.note
    )
    differences = {
        share: _difference(model.set(share), restored.set(share), batches, kind)
        for share in model.shares
    }
    size, results = _written(path, data), []
    for share, difference in differences.items():
        nets = model.plan.mix(share)
        cost = total_cost(family, nets)
        share_kept = rounded(total_share(family, nets))
        about_size = (cost.params, cost.macs, cost.inference, share_kept, difference, len(nets))
        settings = (model.norms, compared, robustness, by_default, run.server.round)
        results.append(Exported(kind, str(path), size, *about_size, *settings))
    return results


def rounded(share: float) -> float:
    """Round a share to the digits that files and tables have."""
    return round(share, 4)


def _written(path: Path, data: bytes) -> int:
    """Write the content of a file, and return its size in bytes."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path, [data]).size
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def load_model(
    file: str | Path,
    factory: nn.Module | Callable[[], nn.Module] | VariantSource,
    device: str = "cpu",
    allow_nan: bool = False,
    max_bytes: int = 0,
) -> nn.Module:
    """Return the model in a safetensors file of `Run.export` or `CustomizableModel.save`.

    The file may come from anyone: no code in it is run, and what it says of itself is checked
    before memory is allocated. docs/deploy.md lists the checks.

    Args:
        file: The file.
        factory: Makes the whole module that was trained, or is that module.
        device: Device of the weights.
        allow_nan: Accept weights that are NaN or infinite.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory.

    Raises:
        RecordError: The file is damaged, contradicts itself, or lacks weights.
        ConfigError: `factory` makes another module than the one that was trained.
    """
    tensors, note = read(file, device, allow_nan, max_bytes)
    family = family_of(note, factory, file)
    try:
        return _restored(tensors, note, family)
    except FormatError as error:
        raise RecordError(f"the model in {file} was asked for; {error}.") from error


def chosen(path: Path, format: str) -> str:
    """Return the format that was asked for, or that the file's name ends with."""
    if format:
        known(FORMATS, format, "format")
        return format
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(
            f"a model in {path} was asked for; its name does not say in which format. Let it end "
            "with "
            f".{', .'.join(FORMATS)}, or name one: --format onnx."
        )
    return kind


def check_place(path: Path, force: bool) -> None:
    """Refuse a file that exists or cannot be written, before any expensive step."""
    if path.is_dir():
        raise ConfigError(f"a model in {path} was asked for; that is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"a model in {path} was asked for; what is there is no file.")
    if path.exists() and not force:
        raise ConfigError(
            f"a model in {path} was asked for; it is there already. --force writes over it (in "
            "Python: force=True)."
        )
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise ConfigError(f"a model in {path} was asked for; {folder} cannot be written to.")


def _samples(run: Trained, sizes: Sequence[int]) -> tuple[list[Tensor], str]:
    """Return batches of these sizes that both runtimes are compared on, and what they are."""
    data, count = run.data, sum(sizes)
    if not run.absent and len(data.test_targets):
        rows = torch.arange(count) % len(data.test_targets)
        inputs, description = (
            data.test_samples(rows.to(run.engine.device)),
            f"{run.evaluation.on} samples",
        )
    else:
        inputs, description = _noise(run.world.family, count), "random samples"
    inputs = inputs.cpu().float() if inputs.is_floating_point() else inputs.cpu()
    return list(inputs.split_with_sizes(list(sizes))), description


def _noise(family: Family, count: int) -> Tensor:
    example, key = family.example_inputs[0], torch.tensor(noise.key(51))
    shape = (count, *example.shape[1:])
    if example.is_floating_point():
        return noise.normal(key, shape, torch.float32)
    classes = family.layout.axes["class"].size if "class" in family.layout.axes else 2
    return (noise.uniform(key, shape, torch.float32) * classes).to(example.dtype)


def _difference(module: nn.Module, answer: Answer, batches: Sequence[Tensor], kind: str) -> float:
    """Return the largest difference between two outputs for the same batch.

    Raises:
        ExportError: The exported model fails, or a difference is larger than rounding explains.
    """
    largest = 0.0
    for batch in batches:
        outputs = module(batch.clone())  # The first operation may be in-place.
        try:
            exported_outputs = answer(batch.clone())
        except Exception as error:
            raise ExportError(
                f"the model as {kind} failed on a batch of {len(batch)}: {said(error)}. Nothing "
                "was written."
            ) from error
        if outputs.shape != exported_outputs.shape:
            raise ExportError(
                f"the model as {kind} answers a batch of {len(batch)} with "
                f"{tuple(exported_outputs.shape)}, and torch with {tuple(outputs.shape)}. "
                "Nothing was written."
            )
        difference = float((outputs - exported_outputs).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(outputs.abs().max())):
            raise ExportError(
                f"the model as {kind} answers a batch of {len(batch)} otherwise than torch, by "
                f"{difference:.2g} where answers are up to {float(outputs.abs().max()):.2g}; "
                f"{TOLERANCE:g} of that would be rounding. Nothing was written."
            )
        largest = max(largest, difference)
    return largest


# --- formats ------------------------------------------------------------------------------------


class Format(ABC):
    """A file format: how a model is written, and how it is read back for the comparison."""

    @classmethod  # noqa: B027  # Most formats need no further package.
    def check(cls) -> None:
        """Refuse a format whose packages are not installed, before any expensive step."""

    @abstractmethod
    def write(self, model: Written) -> bytes: ...

    @abstractmethod
    def read(self, data: bytes, model: Written) -> Answer: ...


@dataclass(frozen=True)
class Onnx(Format):
    """ONNX, for ONNX Runtime and other runtimes. The batch size is free."""

    @classmethod
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
                "imported here: "
                f"{how_to_install('export')}. pt2 and safetensors need nothing more."
            )

    def write(self, model: Written) -> bytes:
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
                proto.metadata_props.add(key="fedquilt", value=_told(model.note))
                data: bytes = proto.SerializeToString()
        except Exception as error:
            first_line = said(error).strip().split("\n")[0]
            raise ExportError(
                f"{model.note['model']} cannot be written as ONNX: {first_line}"
            ) from error
        return data

    def read(self, data: bytes, model: Written) -> Answer:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        (name,) = (session_input.name for session_input in session.get_inputs())
        return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def _name_batch(graph: Any) -> None:
    """Rename the symbol of the free batch size to `batch`, because exporters number symbols."""
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

    def write(self, model: Written) -> bytes:
        buffer, program = io.BytesIO(), _program(model)
        with _quiet():
            torch.export.save(program, buffer, extra_files={"fedquilt.json": _told(model.note)})
        return buffer.getvalue()

    def read(self, data: bytes, model: Written) -> Answer:
        with _quiet():
            program: Answer = torch.export.load(io.BytesIO(data)).module()
        return program


def _recordable(module: nn.Module) -> nn.Module:
    """Return a module, or an ensemble of modules, in a form that torch.export can record."""
    if isinstance(module, Ensemble):
        return Ensemble(_recordable(net) for net in module.nets).eval()
    return module.exportable() if isinstance(module, Variants) else module


def _program(model: Written) -> Any:
    """Export a module for batches of any size."""
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
            f"{first_line} "
            "safetensors takes every module."
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # It has code and paths of this machine.
    return program


@dataclass(frozen=True)
class Safetensors(Format):
    """Weights by name with a note, for `fedquilt.load_model` and the module's code."""

    def write(self, model: Written) -> bytes:
        nets = model.module.nets if isinstance(model.module, Ensemble) else [model.module]
        names, tensors = model.found.family.layout.dims, dict[str, Tensor]()
        for position, net in enumerate(nets):
            prefix, state = _lead(position, len(model.found.nets)), net.state_dict()
            tensors |= {prefix + name: state[name] for name in names if name in state}
        return b"".join(Blob.sealed(tensors, model.note).chunks())

    def read(self, data: bytes, model: Written) -> Answer:
        file = TensorFile.of(data, "the file")
        tensors = file.tensors(torch.device("cpu"), sealed=True)
        return _restored(tensors, file.note, model.found.family).requires_grad_(False)


def _lead(place: int, count: int) -> str:
    """Return the prefix of a net's weight names. It is empty if there is only one net."""
    return f"nets.{place}." if count > 1 else ""


def _restored(tensors: Weights, note: Note, family: Family) -> nn.Module:
    if note["format"] == "customizable":
        return CustomizableModel.restored(family, tensors, note)
    nets = tuple(Submodel.from_dict(net) for net in note["nets"])
    prefixes = [_lead(position, len(nets)) for position in range(len(nets))]
    states = tuple(under(prefix, tensors) for prefix in prefixes)
    for position, (net, state) in enumerate(zip(nets, states, strict=True)):
        check_submodel(family, net, f"net {position}")
        check_weights(family, net, state, f"net {position}")
    names = [
        prefix + name for prefix, state in zip(prefixes, states, strict=True) for name in state
    ]
    check_names(tensors, (), names, "the file")
    return assembled(family, nets, states, note["robustness"])


def _told(note: Note) -> str:
    """Return a note as JSON, without the layout, which only fedquilt reads."""
    return json.dumps({key: value for key, value in note.items() if key != "layout"})


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings of torch's exporters about their internals and missing packages."""
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
