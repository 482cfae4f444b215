"""How a link uses a codec: tensors are coded against what both sides know, and a codec is tried before a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from fedquilt import noise
from fedquilt.devices import onto
from fedquilt.errors import ConfigError
from fedquilt.names import said
from fedquilt.round.flat import Flat
from fedquilt.round.link.codec import BaseCodec, ChangeSpec, Keys
from fedquilt.terms import Weights, World

NOTHING: Weights = MappingProxyType({})
MAX_TRIAL_VALUES = 1 << 14
_SITE = 46  # keeps the random numbers of a trial apart from all others


class CodecError(ValueError):
    """Something a codec returned that its contract does not allow. Whoever called it adds who asked."""


@dataclass(frozen=True)
class Coded:
    """Result of coding and decoding named tensors."""

    tensors: dict[str, Tensor]  # as the receiver has them; where a value did not arrive, what it knew
    bytes: int  # length of the message
    error: dict[str, Tensor] | None  # what coding lost of tensors and residual; None without error feedback


def code(
    codec: BaseCodec,
    tensors: Weights,
    keys: Keys,
    known: Weights = NOTHING,
    residual: Weights = NOTHING,
    arrives: Weights | None = None,
) -> Coded:
    """Code named tensors as one message, and decode it.

    Args:
        codec: Codec of the link.
        tensors: Tensors to send, all of one floating-point dtype and on one device.
        keys: Random keys of this message. `Trip.codec_keys` has them.
        known: Tensors that both sides have, by the same names. What is coded is the change from them. A tensor that is
            absent is coded against zero.
        residual: What coding lost before, added to the change. A tensor that is absent adds nothing.
        arrives: Boolean tensors of the same names and shapes, True at the values that arrive. None if all do.

    Returns:
        The tensors as the receiver has them, the bytes of the message, and what coding lost if it is fed back.

    Raises:
        CodecError: The codec returned something that its contract does not allow.
    """
    sent = Flat.of(tensors)
    before = Flat.of({name: known[name] if name in known else torch.zeros_like(tensors[name]) for name in tensors})
    change = sent.vector - before.vector
    if residual:
        owed = {name: residual[name] if name in residual else torch.zeros_like(tensors[name]) for name in tensors}
        change += Flat.of(owed).vector

    mask = None
    if arrives is not None:
        mask = Flat.of({name: arrives[name] for name in tensors}).vector
    spec = ChangeSpec(sent.shapes, change.dtype, change.device, mask)
    message = encoded(codec, change, spec, keys)
    received = decoded(codec, message, spec)

    error = sent.same(change - received).parts if codec.feedback else None
    return Coded(sent.same(before.vector + received).parts, message.nbytes, error)


def encoded(codec: BaseCodec, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
    """Return the codec's message, or raise CodecError if it is not a vector of bytes on the right device."""
    message = codec.encode(change, spec, keys)
    wanted = f"a one-dimensional tensor of uint8 on {spec.device} would work"
    _check_tensor(f"{type(codec).__name__}.encode", message, torch.uint8, spec.device, wanted)
    if message.dim() != 1:
        raise CodecError(f"{type(codec).__name__}.encode returned the shape {tuple(message.shape)}; {wanted}.")
    return message


def decoded(codec: BaseCodec, message: Tensor, spec: ChangeSpec) -> Tensor:
    """Return the change in a message, or raise CodecError if its shape, dtype or device is wrong."""
    change = codec.decode(message, spec)
    wanted = f"a tensor of {spec.dtype} with the shape ({spec.count},) on {spec.device} would work"
    _check_tensor(f"{type(codec).__name__}.decode", change, spec.dtype, spec.device, wanted)
    if change.shape != (spec.count,):
        raise CodecError(f"{type(codec).__name__}.decode returned the shape {tuple(change.shape)}; {wanted}.")
    return change


def _check_tensor(source: str, value: object, dtype: torch.dtype, device: torch.device, wanted: str) -> None:
    """Raise CodecError if a codec returned something other than a tensor of this dtype on this device."""
    if not isinstance(value, Tensor):
        raise CodecError(f"{source} returned an object of class {type(value).__name__}; {wanted}.")
    if value.dtype != dtype or value.device != device:
        raise CodecError(f"{source} returned a tensor of {value.dtype} on {value.device}; {wanted}.")


# --- before a run -------------------------------------------------------------------------------------------------


def check_codec(codec: BaseCodec, world: World, lossy: bool) -> None:
    """Try a codec on known changes, and refuse one that does not decode what it encoded.

    The changes have names and shapes of the model's weights. One is random, one is zero as of a client that learnt
    nothing, and over a link with a loss only a half of one arrives.

    Args:
        codec: Codec of a link.
        world: Family, dtype and device of the run.
        lossy: True if the link may lose values.

    Raises:
        ConfigError: The codec fails, returns something that its contract does not allow, or has state.
    """
    for name in ("neutral", "feedback", "down"):
        value = getattr(codec, name)
        if not isinstance(value, bool):
            raise ConfigError(
                f"Link: codec = {codec} was asked for; its {name} is {value!r}, and must be True or False."
            )
    if codec.neutral:
        return

    trials = _trials(world, lossy)
    messages = {}
    changes = {}
    for what, (change, spec, keys) in trials.items():
        with _blaming(codec, what, spec):
            messages[what] = _encoded_on_trial(codec, change, spec, keys)
            changes[what] = _decoded_on_trial(codec, messages[what], spec)

    # The other way round, so that a codec that remembers its last change is found out.
    for what, (change, spec, keys) in reversed(trials.items()):
        with _blaming(codec, what, spec):
            if not torch.equal(encoded(codec, change, spec, keys), messages[what]):
                raise CodecError(
                    "encode returned other bytes for the same change and keys; a message that depends on its "
                    "arguments alone would work, with random numbers from fedquilt.noise and the keys."
                )
            if not torch.equal(decoded(codec, messages[what], spec), changes[what]):
                raise CodecError(
                    "decode returned other values for the same message; values that depend on its arguments alone "
                    "would work."
                )


def _trials(world: World, lossy: bool) -> dict[str, tuple[Tensor, ChangeSpec, Keys]]:
    """Return changes to try a codec on, by what they are."""
    shapes = _trial_shapes(world)
    count = sum(shape.numel() for shape in shapes.values())
    key = onto(world.device, torch.tensor(noise.key(_SITE, 1)))
    change = 0.01 * noise.normal(key, (count,), world.dtype)
    whole = ChangeSpec(shapes, change.dtype, change.device)  # a tensor's device has its number, the world's may not
    trials = {
        "a random change": (change, whole, (noise.key(_SITE, 2), noise.key(_SITE, 3))),
        "a change of zero": (torch.zeros_like(change), whole, (noise.key(_SITE, 4), noise.key(_SITE, 5))),
    }
    if lossy:
        half = torch.arange(count, device=change.device) % 2 == 0
        part = replace(whole, arrives=half)
        trials["a random change of which a half arrives"] = change, part, (noise.key(_SITE, 6), noise.key(_SITE, 7))
    return trials


def _trial_shapes(world: World) -> Mapping[str, torch.Size]:
    """Return names and shapes of the model's smallest trainable weights, at least of one."""
    family = world.family
    sizes = family.layout.sizes
    shapes = {name: torch.Size(family.layout.shape(name, sizes)) for name in family.trainable}
    chosen: set[str] = set()
    count = 0
    for name in sorted(shapes, key=lambda name: shapes[name].numel()):
        count += shapes[name].numel()
        if chosen and count > MAX_TRIAL_VALUES:
            break
        chosen.add(name)
    return {name: shape for name, shape in shapes.items() if name in chosen}


def _encoded_on_trial(codec: BaseCodec, change: Tensor, spec: ChangeSpec, keys: Keys) -> Tensor:
    """Return the message, or raise CodecError if the change was modified."""
    before = change.clone()
    message = encoded(codec, change, spec, keys)
    if not torch.equal(change, before):
        raise CodecError("encode modified the change in place; a copy of it (change.clone()) would work.")
    return message.clone()


def _decoded_on_trial(codec: BaseCodec, message: Tensor, spec: ChangeSpec) -> Tensor:
    """Return the decoded change, or raise CodecError if its values break the contract or the message was modified."""
    before = message.clone()
    change = decoded(codec, message, spec)
    if not torch.equal(message, before):
        raise CodecError("decode modified the message in place; a copy of it (message.clone()) would work.")
    if not bool(change.isfinite().all()):
        wrong = int((~change.isfinite()).sum())
        raise CodecError(f"decode returned {wrong} values that are not finite; finite values would work.")
    if spec.arrives is not None and bool(change[~spec.arrives].any()):
        wrong = int(change[~spec.arrives].count_nonzero())
        raise CodecError(
            f"decode returned {wrong} values at positions that did not arrive; zero would work there, because the "
            "link charges for what arrives only. The positions that arrive are in spec.arrives."
        )
    return change.clone()


@contextmanager
def _blaming(codec: BaseCodec, what: str, spec: ChangeSpec) -> Iterator[None]:
    """Turn any error of a trial into one that names the codec and the change."""
    try:
        yield
    except Exception as error:
        told = str(error) if isinstance(error, CodecError) else said(error)
        raise ConfigError(
            f"Link: codec = {codec} was asked for; it was tried on {what} of {spec.count} values of {spec.dtype} "
            f"and refused: {told}"
        ) from error
