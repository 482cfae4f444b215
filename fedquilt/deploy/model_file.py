"""Files of trained models: which nets they hold, their inputs, and how a module is rebuilt."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fedquilt.axes import size_of
from fedquilt.checks import whole
from fedquilt.errors import ConfigError, FormatError, RecordError, SubmodelError
from fedquilt.family import Family
from fedquilt.family.build import number_at
from fedquilt.family.layout import Layout
from fedquilt.family.variants import Variants, VariantSource
from fedquilt.hardware.device import device_of
from fedquilt.storage.tensor_files import DTYPES, TensorFile, check_finite, too_large
from fedquilt.terms import WHOLE, Submodel, Weights
from fedquilt.version import __version__

if TYPE_CHECKING:
    from fedquilt.deploy.trained import TrainedRun

Note = dict[str, Any]
MAX_INPUT_VALUES = 2**28  # Largest number of values in one sample of a model from a file
MAX_NETS = 1_024  # Largest number of nets in a file
_INPUT_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}


def about(run: TrainedRun, family: Family, nets: Sequence[Submodel]) -> Note:
    """Return the note about a model in a file. It has the layout, so that loading needs no tracing.

    The layout of a whole model has no temporary heads, because the deployed module has none.

    Args:
        run: Run that trained the model.
        family: Family of the nets: that of the run, or of one net of a union.
        nets: Nets that the file holds.
    """
    from fedquilt.methods import METHODS
    from fedquilt.names import registered

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


def read(
    file: str | Path, device: str = "cpu", allow_nan: bool = False, max_bytes: int = 0
) -> tuple[dict[str, Tensor], Note]:
    """Return the tensors of a model's file, and its note, both checked.

    Args:
        file: A safetensors file of `Run.export` or `CustomizableModel.save`.
        device: Device of the tensors.
        allow_nan: Accept values that are NaN or infinite.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory.

    Raises:
        RecordError: The file cannot be read, is damaged, or contradicts itself.
    """
    torch_device = device_of(device)
    try:
        with TensorFile.open(file, max_bytes) as opened:
            note = opened.note
            if not isinstance(note, dict) or not {"layout", "nets"} <= note.keys():
                raise FormatError(
                    "its notes do not say which nets it holds. `fedquilt export --format "
                    "safetensors` writes such files; checkpoints of a run are read by "
                    "fedquilt.load"
                )
            check_note(note)
            if problem := too_large(_example_bytes(note), max_bytes):
                raise FormatError(
                    f"two samples of shape {note['input_shape']} are needed: "
                    f"{problem.removesuffix('.')}"
                )
            tensors = opened.tensors(torch_device, sealed=True)
    except FormatError as error:
        raise RecordError(f"the model in {file} was asked for; {error}.") from error
    except RecordError as error:
        raise RecordError(f"the model in {file} was asked for; {error}") from error
    if not allow_nan:
        check_finite(tensors, str(file))
    return tensors, note


def check_note(note: Note) -> None:
    """Refuse the note of a model if it contradicts itself.

    Positions are checked later, against the family.

    Raises:
        FormatError: Something is missing, has another type, or is too large.
    """
    if note.get("format") not in ("model", "customizable"):
        raise FormatError(
            f"its format is {note.get('format')!r}; 'model' and 'customizable' are known"
        )
    for key in ("layout", "model", "norms"):
        if not isinstance(note.get(key), str):
            raise FormatError(f"{key} of its note is no text")
    shape = note.get("input_shape")
    if not isinstance(shape, list) or not all(whole(side, 1) for side in shape):
        raise FormatError("input_shape of its note is no list of whole numbers above 0")
    if math.prod(shape) > MAX_INPUT_VALUES:
        raise FormatError(f"a sample of shape {shape} has more than {MAX_INPUT_VALUES:,} values")
    # The value may be a list, which has no hash, so that it is not looked up in the dictionary.
    if note.get("input_dtype") not in list(_INPUT_DTYPES):
        raise FormatError(f"input_dtype of its note is none of {', '.join(_INPUT_DTYPES)}")
    if note.get("robustness") is not None and not _is_number(note["robustness"]):
        raise FormatError("robustness of its note is no number")
    _check_list(note, "nets")
    if note["format"] == "customizable":
        _check_plan(note)


def _check_list(note: Note, key: str) -> None:
    nets = note.get(key)
    if not isinstance(nets, list) or not 1 <= len(nets) <= MAX_NETS:
        raise FormatError(f"{key} of its note are no list of 1 to {MAX_NETS:,} sub-models")
    for net in nets:
        Submodel.from_dict(net)  # It raises FormatError for a malformed sub-model.


def _check_plan(note: Note) -> None:
    """Raise a FormatError if shares, nets and stocks in a note do not fit each other.

    The note is that of a customizable model.
    """
    _check_list(note, "stocks")
    count = len(note["nets"])
    if not all(
        whole(net.get("stock")) and net["stock"] < len(note["stocks"]) for net in note["nets"]
    ):
        raise FormatError("a net of its note has no stock")
    nets_by_share = note.get("mixes")
    if not isinstance(nets_by_share, list) or not 1 <= len(nets_by_share) <= MAX_NETS:
        raise FormatError(f"mixes of its note are no list of 1 to {MAX_NETS:,} shares")
    for mix in nets_by_share:
        if (
            not isinstance(mix, list)
            or len(mix) != 2
            or not _is_number(mix[0])
            or not isinstance(mix[1], list)
        ):
            raise FormatError("a mix of its note is no share with a list of nets")
        if not 1 <= len(mix[1]) <= count or not all(whole(net) and net < count for net in mix[1]):
            raise FormatError(f"the share {mix[0]:g} of its note has nets that are not there")
    if not _is_number(note.get("share")) or note["share"] not in [mix[0] for mix in nets_by_share]:
        raise FormatError("share of its note is none of its mixes")


def _is_number(value: object) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and -math.inf < value < math.inf
    )


def _example_bytes(note: Note) -> int:
    return 2 * math.prod(note["input_shape"]) * _INPUT_DTYPES[note["input_dtype"]].itemsize


def family_of(
    note: Mapping[str, Any],
    factory: nn.Module | Callable[[], nn.Module] | VariantSource,
    file: str | Path,
) -> Family:
    """Return the family that a file's nets were cut from, made of the user's module.

    The layout is read from the note, so that nothing is traced.

    Args:
        note: The file's note, checked.
        factory: Function that makes the whole module, or the module. Files hold no code.
        file: Path of the file, for messages.

    Raises:
        RecordError: The layout is damaged.
        ConfigError: The module differs from the layout.
    """
    try:
        layout = Layout.from_json(note["layout"])
    except FormatError as error:
        raise RecordError(f"the model in {file} was asked for; {error}.") from error
    example = torch.zeros((2, *note["input_shape"]), dtype=_INPUT_DTYPES[note["input_dtype"]])
    source = (
        factory.resolve((example,), layout.class_dim)
        if isinstance(factory, VariantSource)
        else factory
    )
    module = source if isinstance(source, nn.Module) else source()
    # The file may have the whole model, without temporary heads.
    if isinstance(module, Variants) and not layout.variants:
        module.choose(WHOLE)
        module = module.extract()
    differences = _differences(module, layout)
    if differences:
        listed = "\n  ".join(
            [
                *differences[:5],
                *([f"… and {len(differences) - 5} more"] if len(differences) > 5 else []),
            ]
        )
        raise ConfigError(
            f"the model in {file} was cut from a {note['model']}; the factory made another "
            f"{type(module).__name__}. "
            f"These differ:\n  {listed}\n  Give what makes the whole module that was trained"
            f"{', with its stages (fq.with_stages)' if layout.variants else ''}."
        )
    return Family(module, layout, (example,), lambda: module)


def _differences(module: nn.Module, layout: Layout) -> list[str]:
    """Return a sentence for each weight, tie and number in which a module differs from a layout.

    The list is empty if they agree. Parameters that the layout does not have are differences,
    buffers are not.
    """
    present = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    aliases = {
        *dict(module.named_parameters(remove_duplicate=False)),
        *dict(module.named_buffers(remove_duplicate=False)),
    }
    shapes = {name: layout.shape(name, layout.sizes) for name in layout.dims}
    differences = [
        f"{name} is {shape} there and "
        f"{tuple(present[name].shape) if name in present else 'nothing'} here"
        for name, shape in shapes.items()
        if name not in present or tuple(present[name].shape) != shape
    ]
    differences += [
        f"{name} is here and not there"
        for name in dict(module.named_parameters())
        if name not in shapes
    ]
    differences += [
        f"{alias} is tied to {name} there and is nothing here"
        for alias, name in layout.ties.items()
        if alias not in aliases
    ]
    for path, expr in layout.attributes.items():
        number, size = number_at(module, path), size_of(expr, layout.sizes)
        if number is None or (isinstance(number, int) and number != size):
            differences.append(
                f"{path} is {size} there and {'nothing' if number is None else number} here"
            )
    return differences


def check_submodel(family: Family, net: Submodel, title: str) -> None:
    """Refuse a net of a file that the family does not have.

    Args:
        family: Family that the net was cut from.
        net: A sub-model of a file.
        title: Name of the net for messages.

    Raises:
        FormatError: Its variant, widths or positions are not the family's.
    """
    try:
        axes = family.layout.axes_at(net.arch.variant)
        family.layout.weights(net.arch.variant)
    except SubmodelError as error:
        raise FormatError(f"{title}: {str(error).removesuffix('.')}") from error
    widths = net.arch.sizes
    free = {name for name, axis in axes.items() if not axis.fixed}
    if not free <= widths.keys() <= axes.keys() or len(widths) != len(net.arch.widths):
        raise FormatError(
            f"{title} has the widths of {', '.join(widths) or 'no axis'}; the model has "
            f"{', '.join(axes)}"
        )
    for axis, width in widths.items():
        if not 1 <= width <= axes[axis].size:
            raise FormatError(
                f"{title} has the width {width} on {axis!r}, which has {axes[axis].size} channels"
            )
    for axis, positions in net.index.items():
        # `Family.check` would list all these positions one by one.
        if axis in axes and len(positions) > axes[axis].size:
            raise FormatError(
                f"{title} has {len(positions)} positions on {axis!r}, which has {axes[axis].size} "
                "channels"
            )
    try:
        family.check(net, title)
    except SubmodelError as error:
        raise FormatError(str(error).removesuffix(".")) from error


def check_weights(
    family: Family, net: Submodel, weights: Weights, title: str, is_whole: bool = True
) -> None:
    """Refuse tensors of a file that do not fit a net.

    Args:
        family: Family that the net was cut from.
        net: A sub-model that was checked.
        weights: Its tensors by name. Either all statistics of norms are included, or none.
        title: Name of the net for messages.
        is_whole: True: all weights are required. False: `weights` has statistics only.

    Raises:
        FormatError: Names, shapes or dtypes do not fit.
    """
    module = family.built(family.member(net))
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    names = [name for name in family.layout.weights(net.arch.variant) if name in tensors]
    statistics = [name for name in names if name in family.statistics]
    needed: list[str] = []
    if is_whole:
        # Buffers that are not persistent are in no file.
        stored = {*dict(module.named_parameters()), *module.state_dict()}
        needed += [name for name in names if name in stored and name not in statistics]
    if any(name in weights for name in statistics):
        needed += statistics
    check_names(weights, needed, names if is_whole else statistics, title)
    for name, value in weights.items():
        expected = tensors[name]
        if value.shape != expected.shape:
            raise FormatError(
                f"{name} of {title} is {tuple(value.shape)} instead of {tuple(expected.shape)}"
            )
        if value.dtype != expected.dtype and not (
            value.is_floating_point() and expected.is_floating_point()
        ):
            raise FormatError(f"{name} of {title} is {value.dtype} instead of {expected.dtype}")


def check_names(
    names: Iterable[str], needed: Iterable[str], allowed: Iterable[str], title: str
) -> None:
    """Refuse names that are missing or unexpected.

    Args:
        names: Names of tensors in a file.
        needed: Names that are required.
        allowed: Names that may be there, including the required ones.
        title: Name of the owner of the tensors, for messages.

    Raises:
        FormatError: A name is missing or unexpected.
    """
    names, allowed = set(names), set(allowed)
    if missing := [name for name in needed if name not in names]:
        raise FormatError(f"{title} has no {missing[0]}{_and_more(missing)}")
    if unexpected := sorted(names - allowed):
        raise FormatError(
            f"{title} has the unexpected tensor {unexpected[0]}{_and_more(unexpected)}"
        )


def _and_more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def under(prefix: str, tensors: Weights) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, with that prefix removed."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }
