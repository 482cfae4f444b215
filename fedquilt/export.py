"""Deployed models as files for other runtimes: ONNX, torch's .pt2 and safetensors, each read back and compared."""

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
from fedquilt.customise import CustomisableModel
from fedquilt.data.parts import Array
from fedquilt.deploy import Deployed, Shelf, assembled, deployed, norms_of, total_cost, total_share
from fedquilt.errors import ConfigError, ExportError, FormatError, RecordError
from fedquilt.family import Family
from fedquilt.family.ensemble import Ensemble
from fedquilt.family.norms import NormPolicy
from fedquilt.family.union import alone
from fedquilt.family.variants import Variants, VariantSource
from fedquilt.files import Blob, why, write
from fedquilt.names import known, said
from fedquilt.portable import (
    Note,
    about,
    check_names,
    check_submodel,
    check_weights,
    family_of,
    read,
    under,
)
from fedquilt.tensor_files import TensorFile
from fedquilt.terms import Budget, Submodel, Weights

if TYPE_CHECKING:
    from fedquilt.experiment import Run

TOLERANCE = 1e-4  # of an answer, or of the largest one where that is above 1: another runtime sums in another order
BATCHES = (
    2,
    1,
    7,
    32,
)  # in which what was written is compared; the first is what it is recorded with
Answer = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Exported:
    """What was written, and how far its answers are from torch's."""

    format: str
    file: str
    bytes: int
    params: int
    macs: int
    memory: int  # bytes to run it on one sample: float32 weights and the largest activations
    share: float
    max_difference: float
    nets: int  # whose logits are averaged
    norms: str  # name of the norm policy
    compared: (
        str  # what it was fed for that: test or validation samples, or noise where there is no data
    )
    robustness: float | None  # λ of dual or conditioned norms; None: there are none
    robustness_by_default: bool  # nobody asked for one, and 0, the clean net, was taken

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Written:
    """A module on its way into a file."""

    module: nn.Module
    found: Deployed
    example: Tensor
    note: Note


def export(
    run: Run,
    file: str | Path,
    budget: Budget,
    format: str = "",
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
    robustness: float | None = None,
    force: bool = False,
) -> Exported:
    """Write the model for a budget, after it was read back and gave the same answers; see `Run.deploy` for the rest.

    `format` is onnx, pt2 or safetensors; if none is given, what the file's name ends with.
    """
    path = Path(file)
    check_place(path, force)
    kind = chosen(path, format)
    writer = FORMATS[kind]()
    writer.check()
    found = deployed(run, budget, client, norms, samples)
    by_default = robustness is None and found.family.adjustable
    robustness = 0.0 if by_default else robustness
    module = found.module(robustness).cpu().requires_grad_(False)
    if any(weight.dtype == torch.float64 for weight in module.parameters()):
        module = module.float()  # other runtimes have few kernels for more
    batches, compared = _samples(run, [size for size in BATCHES if size > 1 or found.norms.stores])
    note = {
        **about(run, found.family, found.nets),
        "format": "model",
        "budget": budget.bounds,
        "share": round(found.share, 4),
        "client": client,
        "norms": found.norms.name,
        "robustness": robustness,
        "nets": [net.to_dict() for net in found.nets],
    }
    model = Written(module, found, batches[0], note)
    data = writer.write(model)
    difference = _difference(module, writer.read(data, model), batches, kind)
    cost = found.cost
    return Exported(
        kind,
        str(path),
        _written(path, data),
        cost.params,
        cost.macs,
        cost.inference,
        note["share"],
        difference,
        len(found.nets),
        found.norms.name,
        compared,
        robustness,
        by_default,
    )


def export_sizes(
    run: Run,
    file: str | Path,
    shares: Sequence[float],
    format: str = "",
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
    robustness: float | None = None,
    force: bool = False,
) -> list[Exported]:
    """Write `Run.customisable`, the models for several shares in one file, after they were read back and compared.

    `load_model` gives it back, set to the first share.
    """
    path = Path(file)
    check_place(path, force)
    kind = chosen(path, format)
    if kind != "safetensors":
        raise ConfigError(
            f"shares of {', '.join(f'{share:g}' for share in shares)} in one file were asked for, as {kind}; only "
            "safetensors can hold several. Others hold one share each."
        )
    model = run.customisable(shares, client, norms, samples).cpu()
    family, _, _ = alone(run.world.family, Shelf(run, client).nets(Budget(share=model.shares[0])))
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
    again = CustomisableModel.restored(
        family, written.tensors(torch.device("cpu"), sealed=True), written.note
    )
    most = {
        share: _difference(model.set(share), again.set(share), batches, kind)
        for share in model.shares
    }
    size, found = _written(path, data), []
    for share, difference in most.items():
        nets = model.plan.mix(share)
        cost = total_cost(family, nets)
        share_kept = round(total_share(family, nets), 4)
        about_size = (cost.params, cost.macs, cost.inference, share_kept, difference, len(nets))
        found.append(
            Exported(
                kind, str(path), size, *about_size, model.norms, compared, robustness, by_default
            )
        )
    return found


def _written(path: Path, data: bytes) -> int:
    """Put it in its place; how many bytes it is."""
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
    """Return the model in a safetensors file of `Run.export` or `CustomisableModel.save`.

    The file may come from anyone: no code in it is run, and what it says of itself is checked before memory is
    allocated. docs/deploy.md lists the checks.

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
    """The format that was asked for, or that a file's name ends with."""
    if format:
        known(FORMATS, format, "format")
        return format
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(
            f"a model in {path} was asked for; its name does not say in which format. Let it end with "
            f".{', .'.join(FORMATS)}, or name one: --format onnx."
        )
    return kind


def check_place(path: Path, force: bool) -> None:
    """Before anything heavy: what is there is not written over."""
    if path.is_dir():
        raise ConfigError(f"a model in {path} was asked for; that is a folder. Name a file in it.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"a model in {path} was asked for; what is there is no file.")
    if path.exists() and not force:
        raise ConfigError(
            f"a model in {path} was asked for; it is there already. --force writes over it."
        )
    folder = next(one for one in path.absolute().parents if one.exists())
    if not os.access(folder, os.W_OK) or not folder.is_dir():
        raise ConfigError(f"a model in {path} was asked for; {folder} cannot be written to.")


def _samples(run: Run, sizes: Sequence[int]) -> tuple[list[Tensor], str]:
    """Batches of these sizes that the model is fed in both runtimes."""
    data, count = run.data, sum(sizes)
    if not run.absent and len(data.test_targets):
        rows = torch.arange(count) % len(data.test_targets)
        inputs, told = data.test_samples(rows.to(run.engine.device)), f"{run.evaluation.on} samples"
    else:
        inputs, told = _noise(run.world.family, count), "random samples"
    inputs = inputs.cpu().float() if inputs.is_floating_point() else inputs.cpu()
    return list(inputs.split_with_sizes(list(sizes))), told


def _noise(family: Family, count: int) -> Tensor:
    example, key = family.example_inputs[0], torch.tensor(noise.key(51))
    shape = (count, *example.shape[1:])
    if example.is_floating_point():
        return noise.normal(key, shape, torch.float32)
    classes = family.layout.axes["class"].size if "class" in family.layout.axes else 2
    return (noise.uniform(key, shape, torch.float32) * classes).to(example.dtype)


def _difference(module: nn.Module, answer: Answer, batches: Sequence[Tensor], kind: str) -> float:
    """The largest difference of two answers to the same batch, refused if it is more than rounding."""
    most = 0.0
    for batch in batches:
        ours = module(batch.clone())  # whose first operation may be in place
        try:
            theirs = answer(batch.clone())
        except Exception as error:
            raise ExportError(
                f"the model as {kind} failed on a batch of {len(batch)}: {said(error)}. Nothing was written."
            ) from error
        if ours.shape != theirs.shape:
            raise ExportError(
                f"the model as {kind} answers a batch of {len(batch)} with {tuple(theirs.shape)}, and torch with "
                f"{tuple(ours.shape)}. Nothing was written."
            )
        difference = float((ours - theirs).abs().max())
        if not difference <= TOLERANCE * max(1.0, float(ours.abs().max())):
            raise ExportError(
                f"the model as {kind} answers a batch of {len(batch)} otherwise than torch, by {difference:.2g} where "
                f"answers are up to {float(ours.abs().max()):.2g}; {TOLERANCE:g} of that would be rounding. "
                "Nothing was written."
            )
        most = max(most, difference)
    return most


# --- formats ----------------------------------------------------------------------------------------------------


class Format(ABC):
    """A kind of file: how a model is written, and how others read it."""

    @classmethod  # noqa: B027  # most need nothing
    def check(cls) -> None:
        """Whether what it needs is installed; asked before anything heavy."""

    @abstractmethod
    def write(self, model: Written) -> bytes: ...

    @abstractmethod
    def read(self, data: bytes, model: Written) -> Answer: ...


@dataclass(frozen=True)
class Onnx(Format):
    """ONNX, for ONNX Runtime and whatever else reads it; a batch of any size."""

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
                f"the format 'onnx' was asked for; it needs {', '.join(missing)}, which cannot be imported here: "
                "pip install 'fedquilt[export]'. pt2 and safetensors need nothing more."
            )

    def write(self, model: Written) -> bytes:
        program = _program(model)
        try:
            with _quiet():
                found: Any = torch.onnx.export(
                    program,
                    dynamo=True,
                    input_names=["input"],
                    output_names=["logits"],
                    verbose=False,
                )
                proto = found.model_proto
                _name_batch(proto.graph)
                for node in proto.graph.node:
                    del node.metadata_props[:]  # names of the exporter's own
                proto.metadata_props.add(key="fedquilt", value=_told(model.note))
                data: bytes = proto.SerializeToString()
        except Exception as error:
            told = said(error).strip().split("\n")[0]
            raise ExportError(f"{model.note['model']} cannot be written as ONNX: {told}") from error
        return data

    def read(self, data: bytes, model: Written) -> Answer:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        (name,) = (one.name for one in session.get_inputs())
        return lambda batch: torch.from_numpy(session.run(None, {name: batch.numpy()})[0])


def _name_batch(graph: Any) -> None:
    """Call the size that is open what it is, where the exporter counts symbols."""
    symbol = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if symbol and symbol in dim.dim_param:
                dim.dim_param = dim.dim_param.replace(symbol, "batch")


@dataclass(frozen=True)
class Pt2(Format):
    """torch's exported program, for torch.export.load without the module's code; a batch of any size."""

    def write(self, model: Written) -> bytes:
        buffer, program = io.BytesIO(), _program(model)
        with _quiet():
            torch.export.save(program, buffer, extra_files={"fedquilt.json": _told(model.note)})
        return buffer.getvalue()

    def read(self, data: bytes, model: Written) -> Answer:
        with _quiet():
            found: Answer = torch.export.load(io.BytesIO(data)).module()
        return found


def _recordable(module: nn.Module) -> nn.Module:
    """Return a module, or each of several whose logits are averaged, as torch.export can record it."""
    if isinstance(module, Ensemble):
        return Ensemble(_recordable(net) for net in module.nets).eval()
    return module.exportable() if isinstance(module, Variants) else module


def _program(model: Written) -> Any:
    """The module's calls for a batch of any size."""
    module = _recordable(model.module)
    # Recorded with two samples: torch takes a size of one for a constant.
    shapes: Any = torch.export.ShapesCollection()  # type: ignore[no-untyped-call]
    shapes[model.example] = {0: torch.export.Dim("batch")}
    try:
        with _quiet():
            program = torch.export.export(module, (model.example,), dynamic_shapes=shapes)
    except Exception as error:
        told = said(error).strip().split("\n")[0]
        raise ExportError(
            f"{model.note['model']} cannot be recorded by torch.export for batches of any size: {told} "
            "safetensors takes every module."
        ) from error
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # lines of code, with the folders they were in
    return program


@dataclass(frozen=True)
class Safetensors(Format):
    """Weights by name and what they are, for fedquilt.load_model with the module's code."""

    def write(self, model: Written) -> bytes:
        nets = model.module.nets if isinstance(model.module, Ensemble) else [model.module]
        names, tensors = model.found.family.layout.dims, dict[str, Tensor]()
        for place, net in enumerate(nets):
            lead, held = _lead(place, len(model.found.nets)), net.state_dict()
            tensors |= {lead + name: held[name] for name in names if name in held}
        return b"".join(Blob.sealed(tensors, model.note).chunks())

    def read(self, data: bytes, model: Written) -> Answer:
        file = TensorFile.of(data, "the file")
        tensors = file.tensors(torch.device("cpu"), sealed=True)
        return _restored(tensors, file.note, model.found.family).requires_grad_(False)


def _lead(place: int, count: int) -> str:
    """What the names of a net's weights begin with: nothing, where there is one."""
    return f"nets.{place}." if count > 1 else ""


def _restored(tensors: Weights, note: Note, family: Family) -> nn.Module:
    if note["format"] == "customisable":
        return CustomisableModel.restored(family, tensors, note)
    nets = tuple(Submodel.from_dict(net) for net in note["nets"])
    leads = [_lead(place, len(nets)) for place in range(len(nets))]
    states = tuple(under(lead, tensors) for lead in leads)
    for place, (net, state) in enumerate(zip(nets, states, strict=True)):
        check_submodel(family, net, f"net {place}")
        check_weights(family, net, state, f"net {place}")
    names = [lead + name for lead, state in zip(leads, states, strict=True) for name in state]
    check_names(tensors, (), names, "the file")
    return assembled(family, nets, states, note["robustness"])


def _told(note: Note) -> str:
    """What a file says of itself, without what only fedquilt would read again."""
    return json.dumps({key: value for key, value in note.items() if key != "layout"})


@contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporters warn of their own inner workings and of packages that nobody asked for."""
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
