"""Trained models as files: which nets they are, what they eat, and how a module becomes them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedquilt.devices import device_of
from fedquilt.errors import ConfigError, RecordError
from fedquilt.family import Family
from fedquilt.family.layout import Layout
from fedquilt.family.variants import Variants, VariantSource
from fedquilt.files import parse, why
from fedquilt.terms import WHOLE, Submodel, Weights
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.experiment import Run

Note = dict[str, Any]


def about(run: Run, family: Family, nets: Sequence[Submodel]) -> Note:
    """Return what a file says of a model, with the layout, so that no one needs to trace it again.

    The layout of a whole model is without temporary heads, because the module that is deployed has none.

    Args:
        run: The run that trained it.
        family: Family of the nets: that of the run, or of one net of a union.
        nets: The nets that the file holds.
    """
    from fedquilt.methods import METHODS
    from fedquilt.records import registered

    example = family.example_inputs[0]
    is_whole = all(net.arch.variant == WHOLE for net in nets)
    layout = family.layout.restricted(WHOLE) if is_whole else family.layout
    return {
        "fedquilt": __version__,
        "method": registered(METHODS, run.method),
        "model": family.title,
        "data": run.data.name,
        "rounds": run.server.round,
        "input_shape": list(example.shape[1:]),
        "input_dtype": str(example.dtype).removeprefix("torch."),
        "num_classes": family.layout.axes["class"].size if "class" in family.layout.axes else None,
        "layout": layout.to_json(),
    }


def read(file: str | Path, device: str = "cpu") -> tuple[dict[str, Tensor], Note]:
    """The tensors of a model's file, and what it says of itself."""
    where = device_of(device)
    try:
        tensors, note = parse(bytearray(Path(file).read_bytes()), where)
    except OSError as error:
        raise RecordError(f"the model in {file} was asked for; it cannot be read: {why(error)}.") from error
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RecordError(
            f"the model in {file} was asked for; that is no safetensors file which fedquilt wrote: {error}."
        ) from error
    if not isinstance(note, dict) or not {"layout", "nets"} <= note.keys():
        raise RecordError(
            f"the model in {file} was asked for; its notes do not say which nets it holds. `fedquilt export --format "
            "safetensors` writes such files; checkpoints of a run are read by fedquilt.load."
        )
    return tensors, note


def family_of(
    note: Mapping[str, Any], factory: nn.Module | Callable[[], nn.Module] | VariantSource, file: str | Path
) -> Family:
    """The family a file's nets were cut from; `factory` makes the whole module, whose code is in no file."""
    layout = Layout.from_json(note["layout"])
    example = torch.zeros((2, *note["input_shape"]), dtype=getattr(torch, note["input_dtype"]))
    made = factory.resolve((example,), layout.class_dim) if isinstance(factory, VariantSource) else factory
    module = made if isinstance(made, nn.Module) else made()
    if isinstance(module, Variants) and not layout.variants:  # The file has the whole model, without temporary heads.
        module.choose(WHOLE)
        module = module.extract()
    held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    shapes = {name: layout.shape(name, layout.sizes) for name in layout.dims}
    wrong = [
        f"{name} is {shape} there and {tuple(held[name].shape) if name in held else 'nothing'} here"
        for name, shape in shapes.items()
        if name not in held or tuple(held[name].shape) != shape
    ]
    wrong += [f"{name} is here and not there" for name in dict(module.named_parameters()) if name not in shapes]
    if wrong:
        told = "\n  ".join([*wrong[:5], *([f"… and {len(wrong) - 5} more"] if len(wrong) > 5 else [])])
        raise ConfigError(
            f"the model in {file} was cut from a {note['model']}; the factory made another {type(module).__name__}. "
            f"These differ:\n  {told}\n  Give what makes the whole module that was trained"
            f"{', with its stages (fq.with_stages)' if layout.variants else ''}."
        )
    return Family(module, layout, (example,), lambda: module)


def under(lead: str, tensors: Weights) -> dict[str, Tensor]:
    """Those whose names begin so, without that beginning."""
    return {name.removeprefix(lead): value for name, value in tensors.items() if name.startswith(lead)}
