"""Use of a codec by a link: coding changes of tensors, and testing a codec before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.errors import ConfigError
from fedquilt.hardware.device import to_device_async
from fedquilt.names import said
from fedquilt.round.link.codec import BaseCodec, ChangeSpec, Keys
from fedquilt.tensors import Flat
from fedquilt.terms import Weights

if TYPE_CHECKING:
    from fedquilt.round.federation import World

CPU = torch.device("cpu")
NOTHING: Weights = MappingProxyType({})
MAX_TRIAL_VALUES = 1 << 14
_FIRST, _SECOND = 0, 1  # Parts of the keys of a trial.


class CodecError(ValueError):
    """A result that the contract of a codec does not allow.

    The caller turns it into a ConfigError or TrainingError, which name who asked.
    """


def change_of(tensors: Weights, reference: Weights = NOTHING, residual: Weights = NOTHING) -> Flat:
    """Return the change of named tensors as one vector: tensors − reference + residual.

    Args:
        tensors: Tensors to send, all of one floating-point dtype and on one device.
        reference: Tensors that both sides have, by the same names. The change is the difference
            from them. A tensor that is absent counts as zero.
        residual: Error of earlier coding, which is added to the change. A tensor that is absent
            adds nothing.
    """
    sent = Flat.of(tensors)
    change = sent.vector - Flat.of(_or_zero(tensors, reference)).vector
    if residual:
        change += Flat.of(_or_zero(tensors, residual)).vector
    return sent.same(change)


def with_change(
    shapes: Mapping[str, torch.Size], change: Tensor, reference: Weights = NOTHING
) -> dict[str, Tensor]:
    """Return named tensors after a change, in views of one vector.

    Args:
        shapes: Shape of every tensor by its name, in the order of the vector.
        change: (value,) Change of all values.
        reference: Tensors before the change. A tensor that is absent counts as zero.
    """
    start = Flat.of(
        {
            name: reference[name] if name in reference else change.new_zeros(shape)
            for name, shape in shapes.items()
        }
    )
    return start.same(start.vector + change).parts


def _or_zero(tensors: Weights, values: Weights) -> dict[str, Tensor]:
    """Return `values` for the names of `tensors`, in their order.

    A name that `values` lacks gets zeros in the shape of its tensor. Other names are left out.
    """
    filled = dict(values)
    for name in tensors.keys() - values.keys():
        filled[name] = torch.zeros_like(tensors[name])
    return {name: filled[name] for name in tensors}


def encoded(codec: BaseCodec, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
    """Return the codec's message (byte,) for a change, after a check of its type and shape.

    Args:
        codec: Codec of the link.
        change: (value,) The change to encode.
        spec: Description of the change.
        keys: Random keys of the message.

    Raises:
        CodecError: The message is not a vector of bytes on the right device.
    """
    message = codec.encode(change, spec, keys)
    source = f"{type(codec).__name__}.encode"
    remedy = f"a one-dimensional tensor of uint8 on {spec.device} would work"
    _check_tensor(source, message, torch.uint8, spec.device, remedy)
    if message.dim() != 1:
        raise CodecError(f"{source} returned the shape {tuple(message.shape)}; {remedy}.")
    return message


def decoded(codec: BaseCodec, message: Tensor, spec: ChangeSpec) -> Tensor:
    """Return the change (value,) that a message describes, after a check of its type and shape.

    Args:
        codec: Codec of the link.
        message: (byte,) The message.
        spec: Description of the change.

    Raises:
        CodecError: The decoded change has another type, device or length than `spec` says.
    """
    change = codec.decode(message, spec)
    source = f"{type(codec).__name__}.decode"
    remedy = f"a tensor of {spec.dtype} with the shape ({spec.count},) on {spec.device} would work"
    _check_tensor(source, change, spec.dtype, spec.device, remedy)
    if change.shape != (spec.count,):
        raise CodecError(f"{source} returned the shape {tuple(change.shape)}; {remedy}.")
    return change


def _check_tensor(
    source: str,
    value: object,
    dtype: torch.dtype,
    device: torch.device,
    remedy: str,
) -> None:
    """Raise CodecError if a value is not a tensor of this dtype on this device.

    Args:
        source: Name of the codec's function that returned the value, for the message.
        value: Value to check. A user's codec may return anything.
        dtype: Type that it must have.
        device: Device that it must be on.
        remedy: Advice at the end of the message.
    """
    if not isinstance(value, Tensor):
        kind = type(value).__name__
        raise CodecError(f"{source} returned an object of class {kind}; {remedy}.")
    if value.dtype != dtype or value.device != device:
        kind_text = f"{value.dtype} on {value.device}"
        raise CodecError(f"{source} returned a tensor of {kind_text}; {remedy}.")


# --- before a run -------------------------------------------------------------------------------


class _Trial(NamedTuple):
    """A change that a codec is tried on."""

    name: str  # Description of the change, for messages.
    change: Tensor  # (value,)
    spec: ChangeSpec  # Shapes, type and device of the change.
    keys: Keys  # Random keys of the message.


def check_codec(codec: BaseCodec, world: World, lossy: bool, device: torch.device = CPU) -> None:
    """Try a codec on known changes, and refuse one that does not decode what it encoded.

    The changes have names and shapes of the model's weights. One is random. One is zero, as that
    of a client whose training moved nothing. Over a link with a loss, half of a third one arrives.

    Args:
        codec: Codec of a link.
        world: Family and dtype of the run.
        lossy: True if the link may lose values.
        device: Where the changes are.

    Raises:
        ConfigError: The codec fails, breaks its contract, or has state.
    """
    for name in ("neutral", "feedback", "down", "has_fixed_length"):
        value = getattr(codec, name)
        if not isinstance(value, bool):
            raise ConfigError(
                f"Link: codec = {codec} was asked for; its {name} is {value!r}. True or False "
                f"would work, as in a field {name}: bool = False."
            )
    if codec.neutral:
        return

    trials = _trials(world, lossy, device)
    messages = []
    changes = []
    for trial in trials:
        with _blaming(codec, trial):
            messages.append(_encoded_on_trial(codec, trial))
            changes.append(_decoded_on_trial(codec, messages[-1], trial.spec))

    if codec.has_fixed_length:
        _check_fixed_length(codec, trials[0], len(messages[0]))

    # All changes are encoded again before one is decoded. A codec that keeps its last change in
    # memory, instead of in the message, then decodes another one.
    for trial, message in zip(trials, messages, strict=True):
        with _blaming(codec, trial):
            if not torch.equal(encoded(codec, *trial[1:]), message):
                raise CodecError(
                    "encode returned other bytes for the same change and keys; bytes that depend "
                    "on its arguments alone would work, with random numbers from fedquilt.noise."
                )
    for trial, message, change in zip(trials, messages, changes, strict=True):
        with _blaming(codec, trial):
            if not torch.equal(decoded(codec, message, trial.spec), change):
                raise CodecError(
                    "decode returned other values for the same message; values that depend on its "
                    "arguments alone would work."
                )


def _check_fixed_length(codec: BaseCodec, trial: _Trial, length: int) -> None:
    """Refuse a codec with `has_fixed_length` whose message for zeros has another length.

    Args:
        codec: Codec that says so.
        trial: Change whose spec and keys are used with zeros.
        length: Bytes of the message for the trial's own change.

    Raises:
        ConfigError: The lengths differ, or the codec fails on zeros.
    """
    with _blaming(codec, trial):
        zeros = torch.zeros_like(trial.change)
        zeros_length = len(encoded(codec, zeros, trial.spec, trial.keys))
        if zeros_length != length:
            raise CodecError(
                f"its has_fixed_length is True, and the message has {length} bytes where that of a "
                f"change of zero has {zeros_length}; has_fixed_length = False would work."
            )


def _trials(world: World, lossy: bool, device: torch.device) -> list[_Trial]:
    """Return changes to try a codec on: a random one, zeros, and a lossy one if `lossy`.

    Half of the values of the lossy one arrive. All have the shapes of small weights of the model.

    Args:
        world: Family and dtype of the run.
        lossy: True if the link may lose values.
        device: Where the changes are.
    """
    shapes = _trial_shapes(world)
    count = sum(shape.numel() for shape in shapes.values())
    key = to_device_async(device, torch.tensor(noise.key(noise.Stream.CODEC_CHANGE, _FIRST)))
    change = 0.01 * noise.normal(key, (count,), world.dtype)
    # The spec takes the tensor's device, which has an index (cuda:0). The run's may have none.
    spec = ChangeSpec(shapes, change.dtype, change.device)
    keys = [
        (
            noise.key(noise.Stream.CODEC_TRIAL, number, _FIRST),
            noise.key(noise.Stream.CODEC_TRIAL, number, _SECOND),
        )
        for number in (1, 2, 3)
    ]

    trials = [
        _Trial("a random change", change, spec, keys[0]),
        _Trial("a change of zero", torch.zeros_like(change), spec, keys[1]),
    ]
    if lossy:
        half = replace(spec, arrives=torch.arange(count, device=change.device) % 2 == 0)
        trials.append(_Trial("a random change of which half arrives", change, half, keys[2]))
    return trials


def _trial_shapes(world: World) -> Mapping[str, torch.Size]:
    """Return the shapes of the model's smallest trainable weights by name, at least of one.

    Together they have at most MAX_TRIAL_VALUES values, unless the smallest has more. They are in
    the order of the model.
    """
    layout = world.family.layout
    names = world.family.trainable
    shapes = {name: torch.Size(layout.shape(name, layout.sizes)) for name in names}
    selected: set[str] = set()
    count = 0
    for name in sorted(shapes, key=lambda name: shapes[name].numel()):
        count += shapes[name].numel()
        if selected and count > MAX_TRIAL_VALUES:
            break
        selected.add(name)
    return {name: shape for name, shape in shapes.items() if name in selected}


def _encoded_on_trial(codec: BaseCodec, trial: _Trial) -> Tensor:
    """Return a copy of the codec's message for a trial's change.

    Raises:
        CodecError: The codec modified the change, or its message is not a vector of bytes.
    """
    original = trial.change.clone()
    message = encoded(codec, trial.change, trial.spec, trial.keys)
    if not torch.equal(trial.change, original):
        raise CodecError("encode modified the change in place; change.clone() would work.")
    return message.clone()


def _decoded_on_trial(codec: BaseCodec, message: Tensor, spec: ChangeSpec) -> Tensor:
    """Return a copy of the change (value,) that the codec decodes from a message.

    Args:
        codec: Codec on trial.
        message: (byte,) Result of its `encode`.
        spec: Description of the change.

    Raises:
        CodecError: The codec modified the message, or returned values that are not finite, or not
            zero where none arrives.
    """
    original = message.clone()
    change = decoded(codec, message, spec)
    if not torch.equal(message, original):
        raise CodecError("decode modified the message in place; message.clone() would work.")
    infinite = int((~change.isfinite()).sum())
    if infinite:
        infinite_text = f"{infinite} values that are not finite"
        raise CodecError(f"decode returned {infinite_text}; finite values would work.")
    lost = 0 if spec.arrives is None else int(change[~spec.arrives].count_nonzero())
    if lost:
        raise CodecError(
            f"decode returned {lost} values at positions that did not arrive; zero would work "
            "there. spec.arrives is True at the positions that arrive."
        )
    return change.clone()


@contextmanager
def _blaming(codec: BaseCodec, trial: _Trial) -> Iterator[None]:
    """Raise any error inside as a ConfigError that names codec and trial.

    Args:
        codec: Codec on trial.
        trial: Change that it is tried on.
    """
    try:
        yield
    except Exception as error:
        reason = str(error) if isinstance(error, CodecError) else said(error)
        raise ConfigError(
            f"Link: codec = {codec} was asked for; it was tried on {trial.name} "
            f"({trial.spec.count} values of {trial.spec.dtype}) and refused: {reason}"
        ) from error
