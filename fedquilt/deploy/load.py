"""Loading of models from the safetensors files of `Run.export` and `CustomizableModel.save`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch import nn

from fedquilt.deploy.customizable import CustomizableModel
from fedquilt.deploy.deploy import (
    assembled,
)
from fedquilt.deploy.model_file import (
    Note,
    check_names,
    check_submodel,
    check_weights,
    family_of,
    read,
    under,
)
from fedquilt.errors import FormatError, RecordError
from fedquilt.family import Family
from fedquilt.family.variants import VariantSource
from fedquilt.terms import Submodel, Weights


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
        return restored(tensors, note, family)
    except FormatError as error:
        raise RecordError(f"the model in {file} was asked for; {error}.") from error


def net_prefix(position: int, count: int) -> str:
    """Return the prefix of a net's weight names in a file, such as "nets.0.".

    Args:
        position: Position of the net.
        count: Number of nets in the file. With 1 the prefix is empty.
    """
    return f"nets.{position}." if count > 1 else ""


def restored(tensors: Weights, note: Note, family: Family) -> nn.Module:
    """Return the module that a file describes, in evaluation mode.

    It is a `CustomizableModel` if the file has several shares, else a plain module.

    Args:
        tensors: All tensors of the file, by name.
        note: The file's note, checked.
        family: Family that the nets were cut from.

    Raises:
        FormatError: Nets or tensors do not fit the family, or each other.
    """
    if note["format"] == "customizable":
        return CustomizableModel.restored(family, tensors, note)
    nets = tuple(Submodel.from_dict(net) for net in note["nets"])
    prefixes = [net_prefix(position, len(nets)) for position in range(len(nets))]
    states = tuple(under(prefix, tensors) for prefix in prefixes)
    for position, (net, state) in enumerate(zip(nets, states, strict=True)):
        check_submodel(family, net, f"net {position}")
        check_weights(family, net, state, f"net {position}")
    names = [
        prefix + name for prefix, state in zip(prefixes, states, strict=True) for name in state
    ]
    check_names(tensors, (), names, "the file")
    return assembled(family, nets, states, note["robustness"])
