"""Export of models to files. Every file is read back and compared with torch before it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedquilt.data.parts import Array
from fedquilt.deploy.comparison import BATCHES, comparison_batches, largest_difference
from fedquilt.deploy.customizable import CustomizableModel, customizable
from fedquilt.deploy.deploy import (
    Deployed,
    WeightSource,
    deployed,
    norms_of,
    total_cost,
    total_share,
)
from fedquilt.deploy.formats import FORMATS, WrittenModel
from fedquilt.deploy.model_file import (
    about,
)
from fedquilt.errors import ConfigError, RecordError
from fedquilt.family.norms import NormPolicy
from fedquilt.family.union import alone
from fedquilt.names import known
from fedquilt.storage.files import why, write
from fedquilt.storage.tensor_files import TensorFile
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun


@dataclass(frozen=True)
class Exported:
    """An exported file, its cost, and the largest difference between its outputs and torch's."""

    format: str  # Name of the format: onnx, pt2 or safetensors.
    file: str  # Path of the file.
    bytes: int  # Size of the file.
    params: int  # Number of parameters of all nets together.
    macs: int  # Multiply-adds of one sample.
    memory: int  # Bytes for inference on one sample: float32 weights and the largest activations
    share: float  # Share of the model's channels, added up over the nets.
    max_difference: float  # Largest difference between the outputs of the file and of torch.
    nets: int  # Number of nets whose logits are averaged
    norms: str  # Name of the norm policy
    # Inputs of the comparison: test or validation samples, or random samples if there is no data
    compared: str
    robustness: float | None  # Robustness λ of dual or conditioned norms. None: there are none
    robustness_by_default: bool  # True if no robustness was asked for and 0 (clean) was used
    round: int  # Round of the run whose weights are in the file

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, for JSON output."""
        return asdict(self)


def export(  # noqa: PLR0913  # Options of `Run.export`
    run: TrainedRun,
    file: str | Path,
    budget: Budget,
    format: str = "",
    client: int | None = None,
    norms: NormPolicy | str | None = None,
    samples: Array | None = None,
    robustness: float | None = None,
    force: bool = False,
) -> Exported:
    """Write the model for a budget to a file, if its content gives the same outputs as torch.

    The content is read back and compared before the file is written.

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
    FORMATS[kind].check()
    deployment = deployed(run, budget, client, norms, samples)
    return export_nets(run, path, kind, deployment, budget, client, robustness)


def export_nets(
    run: TrainedRun,
    path: Path,
    kind: str,
    deployment: Deployed,
    budget: Budget,
    client: int | None = None,
    robustness: float | None = None,
) -> Exported:
    """Write nets with their weights to a file, if its content gives the same outputs as torch.

    Args:
        run: A run, or what is left of it for deployment.
        path: File to write.
        kind: Format, one of `FORMATS`.
        deployment: The nets.
        budget: Budget of the device.
        client: Client whose own result it is. None: the server's.
        robustness: Robustness of dual norms, from 0 (clean) to 1. None: 0 if there are such norms.

    Raises:
        ExportError: The format cannot express the model, or outputs differ.
    """
    writer = FORMATS[kind]()
    by_default = robustness is None and deployment.family.adjustable
    robustness = 0.0 if by_default else robustness
    module = deployment.module(robustness).cpu().requires_grad_(False)
    if any(weight.dtype == torch.float64 for weight in module.parameters()):
        module = module.float()  # other runtimes have few kernels for more
    batches, compared = comparison_batches(
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
    model = WrittenModel(module, deployment, batches[0], note)
    data = writer.write(model)
    difference = largest_difference(module, writer.read(data, model), batches, kind)
    cost = deployment.cost
    return Exported(
        format=kind,
        file=str(path),
        bytes=_written(path, data),
        params=cost.params,
        macs=cost.macs,
        memory=cost.inference,
        share=note["share"],
        max_difference=difference,
        nets=len(deployment.nets),
        norms=deployment.norms.name,
        compared=compared,
        robustness=robustness,
        robustness_by_default=by_default,
        round=run.server.round,
    )


def export_sizes(  # noqa: PLR0913  # Options of `Run.export`
    run: TrainedRun,
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

    Only the format "safetensors" fits. `load_model` returns the same as `Run.customizable`, with
    the first share set.

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

    Returns:
        An entry for each share, in their order. All name the same file and its size.

    Raises:
        ConfigError: The format is unknown or another one, or the file exists.
        ExportError: The format cannot express the model, or outputs differ.
    """
    path = Path(file)
    check_place(path, force)
    kind = chosen(path, format)
    if kind != "safetensors":
        raise ConfigError(
            f"shares of {', '.join(f'{share:g}' for share in shares)} in one file were asked for, "
            f"as {kind}; only safetensors can hold several. Others hold one share each."
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
    batches, compared = comparison_batches(
        run, [size for size in BATCHES if size > 1 or norms_of(run, norms, client).stores]
    )
    data = b"".join(model.blob().chunks())
    written = TensorFile.of(data, str(path))
    restored = CustomizableModel.restored(
        family, written.tensors(torch.device("cpu"), sealed=True), written.note
    )
    differences = {
        share: largest_difference(model.set(share), restored.set(share), batches, kind)
        for share in model.shares
    }
    num_bytes = _written(path, data)
    results = []
    for share, difference in differences.items():
        nets = model.plan.nets_at(share)
        cost = total_cost(family, nets)
        exported = Exported(
            format=kind,
            file=str(path),
            bytes=num_bytes,
            params=cost.params,
            macs=cost.macs,
            memory=cost.inference,
            share=rounded(total_share(family, nets)),
            max_difference=difference,
            nets=len(nets),
            norms=model.norms,
            compared=compared,
            robustness=robustness,
            robustness_by_default=by_default,
            round=run.server.round,
        )
        results.append(exported)
    return results


def rounded(share: float) -> float:
    """Round a share to four digits, as files and tables have it."""
    return round(share, 4)


def _written(path: Path, data: bytes) -> int:
    """Write `data` to a file whose folders are made if missing. Return its size in bytes.

    Raises:
        RecordError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(path, [data]).size
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def chosen(path: Path, format: str) -> str:
    """Return the name of the format to write: `format`, or the ending of the file's name.

    Args:
        path: File to write.
        format: One of `FORMATS`. Empty: the ending decides.

    Raises:
        ConfigError: The format is unknown, or the ending is that of no format.
    """
    if format:
        known(FORMATS, format, "format")
        return format
    kind = path.suffix.removeprefix(".")
    if kind not in FORMATS:
        raise ConfigError(
            f"a model in {path} was asked for; its name does not say in which format. Let it end "
            f"with .{', .'.join(FORMATS)}, or name one: --format onnx."
        )
    return kind


def check_place(path: Path, force: bool) -> None:
    """Raise a ConfigError if a file cannot be written, before any expensive step.

    Args:
        path: File to write.
        force: True: an existing file may be overwritten. False: it is refused.
    """
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
