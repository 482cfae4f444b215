"""The entry `about` of a checkpoint: format of a sample, threads, engine settings and machine.

It is written with a checkpoint, checked when the checkpoint is read, and restored when the run is
resumed.
"""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping
from types import NoneType
from typing import TYPE_CHECKING, Any

import torch

from fedquilt.runs.best import problem_in_best
from fedquilt.runs.checkpoint import MAX_ROUND, Manifest
from fedquilt.terms import Server

if TYPE_CHECKING:
    from fedquilt.runs.run import Run

_log = logging.getLogger("fedquilt")

MAX_THREADS = 1024  # Largest number of threads that a checkpoint may set
MAX_SAMPLE_VALUES = 1 << 28  # Largest number of values per sample in a checkpoint


def sample_format(run: Run) -> dict[str, Any]:
    """Return shapes and dtypes of the data, with which the model is rebuilt without the data.

    Returns:
        `shape` and `dtype` are those of one input without its batch dimension. `classes` is the
        number of classes, without one that is ignored. `targets` is a table with `shape` and
        `dtype` of one target. Dtypes are names such as "float32".
    """
    example = run.world.family.example_inputs[0]
    shape, kind = list(example.shape[1:]), str(example.dtype).removeprefix("torch.")
    task, targets, classes = run.world.task, run.data.targets, run.data.num_classes
    if task.has_classes and classes:
        classes = task.num_outputs(targets, classes)  # A label that is ignored is no class.
    target_format = {
        "shape": list(targets.shape[1:]),
        "dtype": str(targets.dtype).removeprefix("torch."),
    }
    return {"shape": shape, "dtype": kind, "classes": classes, "targets": target_format}


def run_environment(run: Run) -> dict[str, Any]:
    """Return threads, engine settings and machine, on which the last bits of a result depend.

    Threads and the settings of the engine are restored when a run is resumed. Entries under `here`,
    such as versions and processor, are only compared with the machine that resumes it.
    """
    engine = run.engine
    cuda = engine.device.type == "cuda"
    return {
        "threads": torch.get_num_threads(),
        "engine": dict(engine.settings),
        "here": {
            "torch": torch.__version__,
            "processor": torch.cuda.get_device_name(engine.device)
            if cuda
            else torch.backends.cpu.get_cpu_capability(),
            "machine": platform.machine(),
            "matmul precision": torch.get_float32_matmul_precision(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
        },
    }


def restore_environment(saved: Mapping[str, Any], run: Run) -> None:
    """Set threads and engine settings to those of a checkpoint, and warn of another machine.

    Args:
        saved: Entries of the checkpoint, as `run_environment` returned them.
        run: The run that is resumed. Its engine is replaced.
    """
    torch.set_num_threads(saved["threads"])
    run.engine = run.engine.with_settings(saved["engine"])
    environment = run_environment(run)["here"]
    for name, value in saved["here"].items():
        if environment.get(name) != value:
            _log.warning(
                "The run was begun with %s %s and continues with %s: last digits may differ from "
                "those of an uninterrupted run.",
                name,
                value,
                environment.get(name),
            )


def problem_in_about(manifest: Manifest) -> str:
    """Return a description of the first error in the entry `about` of a manifest. Empty: no error.

    Types and ranges are checked, because a manifest with a right checksum may still be forged.
    Entries that earlier versions did not write may be missing.
    """
    entries = manifest.about
    for name in ("run", "engine", "here"):
        values = entries.get(name)
        if not isinstance(values, dict) or not all(
            value is None or _is_plain(value) for value in values.values()
        ):
            return f"about.{name} is no table of plain values"
    threads = entries.get("threads")
    if type(threads) is not int or not 1 <= threads <= MAX_THREADS:
        return f"about.threads = {str(threads)[:40]}, and 1 to {MAX_THREADS} fit"
    check = entries.get("check", "")
    if not isinstance(check, str) or not isinstance(entries.get("config", ""), (str, NoneType)):
        return "about.check or about.config is no text"
    settled_for = entries.get("settled_for")
    if settled_for is not None and not is_round(settled_for):
        return f"about.settled_for is {str(settled_for)[:40]}"
    if "best" in entries and (problem := problem_in_best(entries["best"], manifest.round)):
        return problem
    return _problem_in_sample(entries["sample"]) if "sample" in entries else ""


def _problem_in_sample(sample: Any) -> str:
    """Return the first error in a checkpoint's entry `sample` (`sample_format`). Empty: no error.

    Sizes that would take too much memory are errors too.
    """
    targets = (
        sample.get("targets", {"shape": [], "dtype": "int64"}) if isinstance(sample, dict) else None
    )
    if not isinstance(sample, dict) or not isinstance(targets, dict):
        return "about.sample is no table"
    for values in (sample, targets):
        shape = values.get("shape")
        if not isinstance(shape, list) or not all(
            type(size) is int and size >= 0 for size in shape
        ):
            return f"about.sample has the shape {str(shape)[:40]}"
        if math.prod(shape) > MAX_SAMPLE_VALUES:
            return f"about.sample has more than {MAX_SAMPLE_VALUES:,} values"
        kind = values.get("dtype")
        if not isinstance(kind, str) or not isinstance(getattr(torch, kind, None), torch.dtype):
            return f"about.sample has the type {str(kind)[:40]}"
    classes = sample.get("classes")
    if type(classes) is not int or classes < 0:
        return f"about.sample has {str(classes)[:40]} classes"
    return ""


def problem_in_settings(settings: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return an error in the engine's settings of a checkpoint. Empty: there is none.

    Args:
        settings: Settings of the checkpoint.
        current: Settings of the engine, which define the allowed names and types.
    """
    for name, value in settings.items():
        if name not in current:
            return (
                f"the engine has no setting {name[:40]!r}; its settings are "
                f"{', '.join(current) or 'none'}"
            )
        is_valid = type(value) is type(current[name])
        if is_valid and type(value) is int:
            is_valid = min(current[name], 1) <= value < 1 << 63
        if not is_valid:
            return f"the engine's {name} is {str(value)[:40]!r}"
    return ""


def problem_in_weights(checkpoint: Server, current: Server) -> str:
    """Return an error on a weight that is missing, unexpected or misshapen. Empty: there is none.

    Args:
        checkpoint: State that was read.
        current: State of the prepared run, which has the expected names and shapes.
    """
    for name in {**current.weights, **checkpoint.weights}:
        saved, expected = checkpoint.weights.get(name), current.weights.get(name)
        if saved is None:
            return f"the weight {name[:80]!r} is missing"
        if expected is None:
            return f"the weight {name[:80]!r} is not one of the model"
        if (saved.shape, saved.dtype) != (expected.shape, expected.dtype):
            return (
                f"{name} is {saved.dtype} {list(saved.shape)} and not {expected.dtype} "
                f"{list(expected.shape)}"
            )
    return ""


def is_round(value: object) -> bool:
    """Return True if a value can be the number of a round: an integer from 0 to `MAX_ROUND`."""
    return type(value) is int and 0 <= value <= MAX_ROUND


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str))
