"""Tensors coded against known ones, and codecs that are refused before the first round."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.round.federation import World
from fedquilt.round.link import BaseCodec, Transmission
from fedquilt.round.link.codec import ChangeSpec, Codec
from fedquilt.round.link.coding import (
    MAX_TRIAL_VALUES,
    _trial_shapes,
    change_of,
    check_codec,
    decoded,
    encoded,
    with_change,
)


@dataclass(frozen=True)
class Plain(BaseCodec):
    """All values that arrive, unchanged."""

    def encode(self, change, spec, keys):
        values = change if spec.arrives is None else change[spec.arrives]
        return values.clone().view(torch.uint8)

    def decode(self, message, spec):
        values = message.clone().view(spec.dtype)
        if spec.arrives is None:
            return values
        return values.new_zeros(spec.count).masked_scatter_(spec.arrives, values)


@dataclass(frozen=True)
class Halved(Plain):
    """Half of every value arrives, so that what is lost is known."""

    feedback: bool = True

    def encode(self, change, spec, keys):
        return super().encode(change / 2, spec, keys)


# --- coding named tensors -----------------------------------------------------------------------


def tensors() -> dict[str, torch.Tensor]:
    return {"a": torch.tensor([[1.0, 2.0], [3.0, 4.0]]), "b": torch.tensor([8.0])}


@dataclass(frozen=True)
class Coded:
    """Tensors as they arrive, the length of their message, and the error of coding."""

    tensors: dict[str, torch.Tensor]
    bytes: int
    error: dict[str, torch.Tensor]


def code(codec, values, known=None, residual=None, arrives=None) -> Coded:
    known = known or {}
    change = change_of(values, known, residual or {})
    mask = None
    if arrives is not None:
        mask = torch.cat([arrives[name].reshape(-1) for name in values])
    spec = ChangeSpec(change.shapes, change.vector.dtype, change.vector.device, mask)
    message = encoded(codec, change.vector, spec, (1, 2))
    received = decoded(codec, message, spec)
    error = change.same(change.vector - received).parts
    return Coded(with_change(change.shapes, received, known), message.nbytes, error)


def test_unknown_tensors_are_coded_against_zero():
    coded = code(Halved(), tensors(), known={"a": torch.ones(2, 2)})
    # 1, and half of the change from it.
    assert coded.tensors["a"].tolist() == [[1.0, 1.5], [2.0, 2.5]]
    assert coded.tensors["b"].tolist() == [4.0]
    assert coded.bytes == 5 * 4
    assert coded.error["a"].tolist() == [[0.0, 0.5], [1.0, 1.5]]
    assert coded.error["b"].tolist() == [4.0]


def test_a_residual_is_added_to_the_change():
    coded = code(Halved(), tensors(), residual={"b": torch.tensor([2.0])})
    assert coded.tensors["b"].tolist() == [5.0]  # half of 8 + 2
    assert coded.error["b"].tolist() == [5.0]
    assert coded.tensors["a"].tolist() == [[0.5, 1.0], [1.5, 2.0]]


def test_the_receiver_keeps_its_values_if_nothing_arrives():
    arrives = {"a": torch.tensor([[True, False], [True, False]]), "b": torch.tensor([False])}
    known = {"a": torch.full((2, 2), 7.0)}
    coded = code(Plain(), tensors(), known, arrives=arrives)
    assert coded.tensors["a"].tolist() == [[1.0, 7.0], [3.0, 7.0]]
    assert coded.tensors["b"].tolist() == [0.0]
    assert coded.bytes == 2 * 4


def test_every_message_of_a_transmission_has_different_keys(perceptron):
    from fedquilt.family.cut import prefix

    job = fq.methods.api.Job(
        fq.methods.api.Client(0, fq.Budget(share=1.0), 1), prefix(perceptron.whole), 0
    )
    trip = Transmission(World(perceptron), job, up=True)
    assert trip.codec_keys() == (trip.key(2), trip.key(3))  # as in all runs so far
    assert len({*trip.codec_keys(0), *trip.codec_keys(1), *trip.codec_keys(2), trip.key(1)}) == 7


# --- codecs that break their contract -----------------------------------------------------------


@dataclass(frozen=True)
class Floats(Plain):
    def encode(self, change, spec, keys):
        return change.clone()


@dataclass(frozen=True)
class Bytes(Plain):
    def encode(self, change, spec, keys):
        return bytes(super().encode(change, spec, keys).tolist())


@dataclass(frozen=True)
class Square(Plain):
    def encode(self, change, spec, keys):
        return super().encode(change, spec, keys)[None]


@dataclass(frozen=True)
class Elsewhere(Plain):
    def decode(self, message, spec):
        return super().decode(message, spec).to("meta")


@dataclass(frozen=True)
class Short(Plain):
    def decode(self, message, spec):
        return super().decode(message, spec)[:-1]


@dataclass(frozen=True)
class Rounded(Plain):
    def decode(self, message, spec):
        return super().decode(message, spec).half()


@dataclass(frozen=True)
class Scaled(Plain):
    """Divides by the largest value, which is zero if nothing changed."""

    def decode(self, message, spec):
        change = super().decode(message, spec)
        return change / change.abs().max()


@dataclass(frozen=True)
class Everything(Plain):
    """Codes values that do not arrive."""

    def encode(self, change, spec, keys):
        return change.clone().view(torch.uint8)

    def decode(self, message, spec):
        return message.clone().view(spec.dtype)


@dataclass(frozen=True)
class InPlace(Plain):
    def encode(self, change, spec, keys):
        return super().encode(change.mul_(0.5), spec, keys)


@dataclass(frozen=True)
class Overwriting(Plain):
    def decode(self, message, spec):
        change = super().decode(message, spec)
        message.zero_()
        return change


@dataclass(frozen=True)
class Unseeded(Plain):
    def encode(self, change, spec, keys):
        return super().encode(change + torch.rand_like(change), spec, keys)


@dataclass(frozen=True)
class Remembering(Plain):
    """Decodes whatever was encoded last."""

    last: list[torch.Tensor] = field(default_factory=list, repr=False)

    def encode(self, change, spec, keys):
        self.last[:] = [change]
        return torch.zeros(1, dtype=torch.uint8)

    def decode(self, message, spec):
        return self.last[0] if spec.arrives is None else self.last[0] * spec.arrives


@dataclass(frozen=True)
class Failing(Plain):
    def decode(self, message, spec):
        raise ValueError("on purpose")


@dataclass(frozen=True)
class Word(Plain):
    feedback: str = "yes"


BYTES = r"a one-dimensional tensor of uint8 on cpu would work"
CHANGE = r"a tensor of torch\.float32 with the shape \(51,\) on cpu would work"
REFUSED = {
    Floats: rf"Floats\.encode returned a tensor of torch\.float32 on cpu; {BYTES}",
    Bytes: rf"Bytes\.encode returned an object of class bytes; {BYTES}",
    Square: rf"Square\.encode returned the shape \(1, 204\); {BYTES}",
    Elsewhere: rf"Elsewhere\.decode returned a tensor of torch\.float32 on meta; {CHANGE}",
    Short: rf"Short\.decode returned the shape \(50,\); {CHANGE}",
    Rounded: rf"Rounded\.decode returned a tensor of torch\.float16 on cpu; {CHANGE}",
    Scaled: r"a change of zero \(51 .* decode returned 51 values that are not finite; finite",
    Everything: r"half arrives .* 25 values at positions that did not arrive; zero would work",
    InPlace: r"encode modified the change in place; change\.clone\(\) would work",
    Overwriting: r"decode modified the message in place; message\.clone\(\) would work",
    Unseeded: r"encode returned other bytes for the same change and keys; .* fedquilt\.noise",
    Remembering: r"decode returned other values for the same message; values that depend on",
    Failing: r"a random change \(51 values of torch\.float32\) and refused: ValueError: on purpose",
    Word: r"was asked for; its feedback is 'yes'\. True or False would work",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_codec_that_breaks_its_contract_is_refused_before_a_run(kind, perceptron, make_data):
    data, fleet = make_data(perceptron, (4, 4)), fq.Fleet.of((1.0,), 2, 2)
    link = fq.Link(fq.links.ColumnLoss(0.5), kind())
    with pytest.raises(ConfigError, match=rf"^Link: codec = {kind.__name__}\(.*{REFUSED[kind]}"):
        fq.prepare(fq.methods.FedAvg(), perceptron, data, fleet, link=link)


def test_a_codec_that_cannot_code_a_part_fits_a_link_that_loses_nothing(perceptron):
    check_codec(Everything(), World(perceptron), lossy=False)


LOSSY = [Plain(), Halved(), Codec(2), Codec(8, 0.01), Codec(keep=0.5, feedback=True), Codec()]


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("codec", LOSSY, ids=str)
def test_codecs_that_lose_something_are_not_refused(
    codec, precision, perceptron, residual, language
):
    for family in (perceptron, residual, language):
        check_codec(codec, World(family, precision=precision), lossy=True)


def test_the_trial_is_small(residual):
    weights = residual.init(0)
    whole = {name: weights[name].shape for name in residual.trainable}
    assert _trial_shapes(World(residual)) == whole
    net = torch.nn.Sequential(torch.nn.Linear(200, 100), torch.nn.Linear(100, 3))
    shapes = _trial_shapes(World(fq.trace(net, torch.zeros(2, 200))))
    assert list(shapes) == ["0.bias", "1.weight", "1.bias"]
    assert sum(shape.numel() for shape in shapes.values()) <= MAX_TRIAL_VALUES


@dataclass(frozen=True)
class Tired(Plain):
    """Keeps its contract for changes as small as those of the trial."""

    def decode(self, message, spec):
        change = super().decode(message, spec)
        return change[1:] if change.abs().max() > 0.1 else change


def test_a_codec_that_fails_later_is_refused_with_client_and_round(perceptron, make_data):
    data, fleet = make_data(perceptron, (4,)), fq.Fleet.of((1.0,), 1, 1)
    method = fq.methods.FedAvg(
        local=fq.LocalTraining(batch_size=4, optimizer=fq.optimizers.SGD(lr=100.0))
    )
    found = r"CodecError: Tired\.decode returned the shape \(50,\); a tensor of torch\.float32 with"
    message = rf"client 0 \(budget share 1\) failed in round 1 while sending: {found}"
    with pytest.raises(TrainingError, match=message):
        fq.run(method, perceptron, data, fleet, rounds=1, link=fq.Link(codec=Tired()))
