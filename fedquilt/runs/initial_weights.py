"""Initial weights of a model from a safetensors file or from the folder of a run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fedquilt.errors import ConfigError, RecordError
from fedquilt.names import nearest
from fedquilt.runs.saved_state import load_state
from fedquilt.storage.tensor_files import TensorFile, check_finite


def load_weights(module: nn.Module, file: str, max_bytes: int = 0, allow_nan: bool = False) -> None:
    """Load the weights of a safetensors file or a run's folder into a module.

    Norm statistics that are missing in the file keep the values of the module.

    Args:
        module: Module whose weights are overwritten.
        file: Path of the file, or of the folder of a run. A folder gives the server's weights after
            the last round.
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
                f"{name} is {tuple(value.shape)} in the file and {tuple(tensors[name].shape)} in "
                "the model"
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
    """Return the tensors of a safetensors file, or the newest server weights in a run's folder.

    Args:
        file: Path of the file or folder.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory. No effect for
            folders.

    Returns:
        Tensors by name, on the CPU.
    """
    if Path(file).is_dir():
        return dict(load_state(file).weights)
    with TensorFile.open(file, max_bytes) as opened:
        return opened.tensors(torch.device("cpu"), sealed=opened.is_sealed)


def _unfit_dtype(value: Tensor, dtype: torch.dtype) -> str:
    """Return the reason why a tensor cannot be converted to a dtype. Empty: it can.

    Rounding is allowed. Overflow, complex numbers, and real numbers for integers are not.

    Args:
        value: Tensor of the file.
        dtype: Dtype of the same weight in the model.
    """
    if value.dtype == dtype:
        return ""
    if value.is_complex() or (value.is_floating_point() and not dtype.is_floating_point):
        return (
            f"is {value.dtype} in the file and {dtype} in the model; real numbers are needed for "
            "real numbers."
        )
    back = value.to(dtype)
    if dtype.is_floating_point:
        is_representable = bool(back.double().isfinite().all()) or not bool(
            value.double().isfinite().all()
        )
    else:
        is_representable = bool((back.to(torch.int64) == value.to(torch.int64)).all())
    if not is_representable:
        return f"has values in the file, {value.dtype}, that overflow in the model, {dtype}."
    return ""
