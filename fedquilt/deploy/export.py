"""Export of models to files. Every file is read back and compared with torch before it is kept."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

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
from fedquilt.terms import Budget, Submodels

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun
    from fedquilt.family import Family

M = TypeVar("M", bound=nn.Module)


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
    target = _Target(run, path, kind, deployment.family, deployment.norms, robustness)
    module = _in_float32(deployment.module(target.robustness).cpu()).requires_grad_(False)
    batches, compared = target.comparison_batches()
    note = {
        **about(run, deployment.family, deployment.nets),
        "format": "model",
        "budget": budget.bounds,
        "share": rounded(deployment.share),
        "client": client,
        "norms": deployment.norms.name,
        "robustness": target.robustness,
        "nets": [net.to_dict() for net in deployment.nets],
    }
    model = WrittenModel(module, deployment, batches[0], note)
    data = writer.write(model)
    difference = largest_difference(module, writer.read(data, model), batches, kind)
    return target.write(data, compared, [(deployment.nets, difference)])[0]


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
    target = _Target(run, path, kind, family, norms_of(run, norms, client), robustness)
    model = _in_float32(model.set(robustness=target.robustness))
    batches, compared = target.comparison_batches()
    data = b"".join(model.blob().chunks())
    written = TensorFile.of(data, str(path))
    restored = CustomizableModel.restored(
        family, written.tensors(torch.device("cpu"), sealed=True), written.note
    )
    differences = [
        largest_difference(model.set(share), restored.set(share), batches, kind)
        for share in model.shares
    ]
    nets = [model.plan.nets_at(share) for share in model.shares]
    return target.write(data, compared, list(zip(nets, differences, strict=True)))


@dataclass(frozen=True)
class _Target:
    """The file that an export writes, and what its models have in common."""

    run: TrainedRun
    path: Path  # File to write.
    format: str  # Name of the format.
    family: Family  # Family of the exported nets.
    norms: NormPolicy  # Norm policy of the exported nets.
    requested_robustness: float | None  # Robustness that was asked for. None: none was.

    @property
    def robustness(self) -> float | None:
        """Return the robustness λ that is exported. None: there are no dual norms."""
        return 0.0 if self.robustness_by_default else self.requested_robustness

    @property
    def robustness_by_default(self) -> bool:
        """Return True if norms have a robustness and none was asked for."""
        return self.requested_robustness is None and self.family.adjustable

    def comparison_batches(self) -> tuple[list[Tensor], str]:
        """Return batches of inputs on which outputs are compared, and where they are from.

        Norms that use the statistics of the batch need more than one sample.
        """
        return comparison_batches(
            self.run, [size for size in BATCHES if size > 1 or self.norms.stores]
        )

    def write(
        self, data: bytes, compared: str, models: Sequence[tuple[Submodels, float]]
    ) -> list[Exported]:
        """Write the file, and return an entry for each of its models.

        Args:
            data: Content of the file.
            compared: Inputs on which outputs were compared.
            models: Nets of each model, and its largest difference from torch.

        Raises:
            RecordError: The file cannot be written.
        """
        num_bytes = _written(self.path, data)
        costs = [total_cost(self.family, nets) for nets, _ in models]
        return [
            Exported(
                format=self.format,
                file=str(self.path),
                bytes=num_bytes,
                params=cost.params,
                macs=cost.macs,
                memory=cost.inference,
                share=rounded(total_share(self.family, nets)),
                max_difference=difference,
                nets=len(nets),
                norms=self.norms.name,
                compared=compared,
                robustness=self.robustness,
                robustness_by_default=self.robustness_by_default,
                round=self.run.server.round,
            )
            for (nets, difference), cost in zip(models, costs, strict=True)
        ]


def _in_float32(module: M) -> M:
    """Return a module without float64 weights, for which other runtimes have few kernels."""
    if any(weight.dtype == torch.float64 for weight in module.parameters()):
        return module.float()
    return module


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
