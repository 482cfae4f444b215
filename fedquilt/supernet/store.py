"""Supernets on disk, as safetensors files with a checksum.

A file has the tensors, and a header in JSON with format, version, the space with its fields, and a
checksum of everything. Truncated or damaged files are refused. Training checkpoints have the same
format with another `kind`.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from dataclasses import asdict
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, RecordError
from fedquilt.storage.files import Blob, why, write
from fedquilt.storage.tensor_files import TensorFile, check_finite
from fedquilt.supernet.elastic import Supernet
from fedquilt.supernet.space import HEAD, Space
from fedquilt.supernet.spaces import SPACES

FORMAT = "fedquilt-supernet"
VERSION = 1


def save_supernet(supernet: Supernet, path: str | Path, **about: Any) -> None:
    """Write a supernet to a file atomically.

    Args:
        supernet: Supernet to write.
        path: Path of the file. An existing file is replaced.
        about: Further values for the header, such as the settings of the training. JSON must be
            able to represent them.

    Raises:
        RecordError: The file could not be written.
    """
    write_tensors(Path(path), "supernet", supernet.space, supernet.state_dict(), about)


def load_supernet(
    path: str | Path,
    space: Space | type[Space] | None = None,
    device: str = "cpu",
) -> Supernet:
    """Read a supernet from a file, and return it in evaluation mode.

    Args:
        path: A file that `save_supernet` or `fedquilt supernet train` wrote.
        space: Expected space, or its class. It is required for a space that is not built in. A
            class takes its fields from the file. Only the number of classes may differ, because the
            file has that of the pre-training task. None: a built-in space.
        device: Device of the weights.

    Raises:
        RecordError: The file is truncated, damaged, of another kind, version or space.
    """
    path = Path(path)
    note, tensors = read_tensors(path, "supernet")
    file_space = space_of(note["space"], path, space)
    supernet = Supernet(file_space)
    _load(supernet, tensors, path)
    return supernet.to(device).eval()


def read_about(path: str | Path) -> dict[str, Any]:
    """Return the header of a supernet file: its format, its space, and how it was trained.

    The whole file is read to test its checksum. A damaged file is a `RecordError`.
    """
    note, _ = read_tensors(Path(path), "supernet")
    return note


def import_weights(space: Space, path: str | Path) -> Supernet:
    """Create a supernet from weights of the largest net, such as public ImageNet weights.

    The names are those of `space.member(space.largest)`. `fedquilt supernet show SPACE --names`
    prints them. All are required, except `num_batches_tracked`. The shape of the classifier gives
    the number of classes. Kernel transforms start as the identity.

    Args:
        space: Space to whose largest net the weights belong.
        path: A .safetensors file, or a state dict that `torch.save` wrote as .pt or .pth. Pickled
            objects other than tensors are refused.

    Raises:
        RecordError: The file cannot be read, or names or shapes are not those of the largest net.
    """
    path = Path(path)
    weights = _read_weights(path)
    classifier = f"{HEAD}.classifier.weight"
    if classifier in weights and weights[classifier].dim() == 2:
        space = space.with_classes(len(weights[classifier]))
    supernet = Supernet(space)
    state = supernet.net.state_dict()
    optional = {name for name in state if name.endswith("num_batches_tracked")}
    problems = _mismatches(state, weights, optional)
    if problems:
        raise RecordError(
            f"{path} does not have the weights of the largest net of {space.name}: "
            f"{'; '.join(problems)}. `fedquilt supernet show {space.name} --names` lists the "
            "names.",
        )
    supernet.net.load_state_dict(state | weights)
    return supernet.eval()


def _read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a .safetensors, .pt or .pth file by name, on the CPU.

    Raises:
        RecordError: The file cannot be read, has another suffix, or has numbers that are not
            finite.
    """
    if path.suffix == ".safetensors":
        with TensorFile.open(path) as file:
            weights = file.tensors(torch.device("cpu"), sealed=file.is_sealed)
    elif path.suffix in (".pt", ".pth"):
        weights = _read_pickled(path)
    else:
        raise RecordError(
            f"{path} was given as weights; a .safetensors, .pt or .pth file would work."
        )
    check_finite(weights, str(path))
    return weights


def _read_pickled(path: Path) -> dict[str, Tensor]:
    """Read a state dict that `torch.save` wrote, on the CPU.

    Raises:
        RecordError: The file cannot be read, or has objects other than tensors by name.
    """
    try:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise RecordError(f"{path} cannot be read: {why(error)}.") from error
    except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError) as error:
        # UnpicklingError: objects other than tensors. RuntimeError: torch's reader of zip files.
        raise RecordError(
            f"{path} cannot be read as weights: {type(error).__name__}: {error}"
        ) from error
    if not _is_state_dict(weights):
        raise RecordError(f"{path} has no state dict: tensors by name are needed.")
    return dict(weights)


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(entry, Tensor) for entry in value.values())


# --- the format ---------------------------------------------------------------------------------


def write_tensors(
    path: Path,
    kind: str,
    space: Space,
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
) -> None:
    """Write tensors with a header that describes them, atomically. Missing folders are created.

    Args:
        path: Path of the file. An existing file is replaced.
        kind: "supernet", or "training" for a checkpoint.
        space: Space of the supernet.
        tensors: Tensors by name.
        about: Further values for the header. JSON must be able to represent them.

    Raises:
        RecordError: The file could not be written.
    """
    note = {"format": FORMAT, "version": VERSION, "kind": kind, "space": space_note(space), **about}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, Blob.sealed(tensors, note).chunks())
    except OSError as error:
        raise RecordError(f"{path} could not be written: {why(error)}.") from error


def read_tensors(path: Path, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a file that `write_tensors` wrote, and return its header and its tensors.

    The tensors are on the CPU.

    Args:
        path: Path of the file.
        kind: Expected kind: "supernet", or "training" for a checkpoint.

    Raises:
        RecordError: The file is truncated, damaged, of another version, or of another kind.
    """
    with TensorFile.open(path) as file:
        note = file.note
        if not isinstance(note, dict) or not {"format", "version", "kind", "space"} <= note.keys():
            raise RecordError(
                f"{path} is no supernet file. `fedquilt supernet train` and `import` write such "
                "files.",
            )
        file_format, version = note["format"], note["version"]
        if file_format != FORMAT or version != VERSION:
            raise RecordError(
                f"{path} is a file of format {file_format!r}, version {version!r}; this fedquilt "
                f"reads {FORMAT!r}, version {VERSION}. Train or import the supernet again.",
            )
        tensors = file.tensors(torch.device("cpu"), sealed=True)
    if note["kind"] != kind:
        is_checkpoint = note["kind"] == "training"
        remedy = "continue it with --resume" if is_checkpoint else "give its checkpoint"
        raise RecordError(
            f"{path} is a file of kind {note['kind']!r} instead of {kind!r}; {remedy}.",
        )
    space = note["space"]
    if (
        not isinstance(space, dict)
        or not isinstance(space.get("name"), str)
        or not isinstance(space.get("fields"), dict)
    ):
        raise RecordError(
            f"{path} does not say which space it is of: a name and fields are needed."
        )
    return note, tensors


def space_note(space: Space) -> dict[str, Any]:
    """Return a table with the `name` and `fields` of a space, as values that JSON can represent."""
    return {"name": space.name, "fields": json.loads(json.dumps(asdict(space)))}


def space_of(note: Mapping[str, Any], path: Path, expected: Space | type[Space] | None) -> Space:
    """Return the space of a file, with the number of classes that the file has.

    Args:
        note: Name and fields of the space in the file.
        path: Path of the file, for error messages.
        expected: Expected space, or its class. None: any built-in space.

    Raises:
        RecordError: The file has another space, or one that is not built in while `expected` is
            None.
    """
    name, fields = note["name"], note["fields"]
    if expected is None:
        if name not in SPACES:
            raise RecordError(
                f"{path} is of the space {name!r}, which is not built in. Give its class as an "
                f"argument, or --space file.py:Class. Built in: {', '.join(SPACES)}.",
            )
        expected = SPACES[name]
    if isinstance(expected, Space):
        space = expected.with_classes(fields.get("num_classes", expected.num_classes))
    else:
        space = _filled(expected, fields, path)
    _check_same(space_note(space), note, path)
    return space


def _filled(kind: type[Space], fields: Mapping[str, Any], path: Path) -> Space:
    """Create a space with the fields of a file.

    Fields that the class does not have are ignored here. `_check_same` reports them later.

    Args:
        kind: Class of the space.
        fields: Fields in the file.
        path: Path of the file, for the message.

    Raises:
        RecordError: The class refuses the fields.
    """
    names = {field.name for field in dataclass_fields(kind)}
    known_fields = {key: _as_tuple(value) for key, value in fields.items() if key in names}
    try:
        return kind(**known_fields)
    except (TypeError, ValueError) as error:
        raise RecordError(f"{path} does not fit the space {kind.name!r}: {error}.") from error


def _check_same(requested: Mapping[str, Any], stored: Mapping[str, Any], path: Path) -> None:
    """Refuse a file whose space differs from the requested one.

    Args:
        requested: Name and fields of the requested space.
        stored: Name and fields of the space in the file.
        path: Path of the file, for the message.

    Raises:
        RecordError: They differ. The message shows the fields that do.
    """
    if requested == stored:
        return
    keys = {**requested["fields"], **stored["fields"]}
    differing = [key for key in keys if requested["fields"].get(key) != stored["fields"].get(key)]

    def described(space: Mapping[str, Any]) -> str:
        fields = [f"{key} = {space['fields'][key]}" for key in differing if key in space["fields"]]
        return f"{space['name']!r}" + (f" with {', '.join(fields)}" if fields else "")

    raise RecordError(
        f"{path} is of the space {described(stored)}; {described(requested)} was asked for. "
        "Give the file's own space, or train a supernet of yours.",
    )


def _as_tuple(value: Any) -> Any:
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def _load(supernet: Supernet, tensors: Mapping[str, Tensor], path: Path) -> None:
    problems = _mismatches(supernet.state_dict(), tensors)
    if problems:
        raise RecordError(
            f"{path} does not fit its space {supernet.space.name!r}: {'; '.join(problems)}.",
        )
    supernet.load_state_dict(dict(tensors))


def _mismatches(
    needed: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    optional: frozenset[str] | set[str] = frozenset(),
) -> list[str]:
    """Return texts on missing names, unexpected names and differing shapes. Empty: all fit.

    The first three of each are shown.

    Args:
        needed: Tensors of the model by name, whose shapes are needed.
        tensors: Tensors of the file by name.
        optional: Names that may be missing.
    """
    missing = [name for name in needed if name not in tensors and name not in optional]
    unexpected = [name for name in tensors if name not in needed]
    shapes = [
        f"{name} has shape {tuple(tensors[name].shape)} instead of {tuple(needed_tensor.shape)}"
        for name, needed_tensor in needed.items()
        if name in tensors and tensors[name].shape != needed_tensor.shape
    ]
    problems = []
    if missing:
        problems.append(f"{len(missing)} names are missing ({_first(missing)})")
    if unexpected:
        problems.append(f"{len(unexpected)} names are unexpected ({_first(unexpected)})")
    return problems + shapes[:3]


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def space_by_name(name: str) -> Space:
    """Return a space with its default fields.

    Args:
        name: A name of `SPACES`, or `file.py:Class` for a space of your own.

    Raises:
        ConfigError: There is no such space, or the class is no space.
    """
    from fedquilt.names import find

    kind = find(SPACES, name, "search space")
    space = kind() if callable(kind) else kind
    if not isinstance(space, Space):
        raise ConfigError(
            f"The space {name} was asked for; {kind!r} makes no fedquilt.supernet.Space.",
        )
    return space
