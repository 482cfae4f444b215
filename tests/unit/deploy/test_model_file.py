"""Model files from outside: incomplete files, and files that are too large, are refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.errors import ConfigError, FedquiltError, RecordError
from fedquilt.methods import HeteroFL, SplitMix
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorFile
from tests.unit.deploy.test_export import HALF, net

Change = Callable[[dict[str, Tensor], dict[str, Any]], object]


class Model:
    """A model file as values that a test changes and writes again, with the right checksum."""

    def __init__(self, file: Path) -> None:
        with TensorFile.open(file) as opened:
            self.note = opened.note
            self.tensors = opened.tensors(torch.device("cpu"), sealed=True)
        self.file = file.with_name("changed.safetensors")

    def changed(self, change: Change) -> Path:
        note, tensors = copy.deepcopy(self.note), dict(self.tensors)
        change(tensors, note)
        self.file.write_bytes(
            b"".join(bytes(chunk) for chunk in Blob.sealed(tensors, note).chunks())
        )
        return self.file


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(net, torch.zeros(2, 1, 4, 4))


@pytest.fixture
def model(family, play, make_data, tmp_path) -> Model:
    run = play(HeteroFL(), family, make_data(family, (9, 8)), rounds=1)
    run.export(tmp_path / "model.safetensors", HALF)
    return Model(tmp_path / "model.safetensors")


@pytest.fixture
def sizes(family, play, make_data, tmp_path) -> Model:
    run = play(SplitMix(base=0.25), family, make_data(family, (9, 8)), rounds=1)
    run.customizable((1, 0.5)).save(tmp_path / "sizes.safetensors")
    return Model(tmp_path / "sizes.safetensors")


def layout(change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the layout in a note."""

    def within(tensors: dict[str, Tensor], note: dict[str, Any]) -> None:
        raw = json.loads(note["layout"])
        change(raw)
        note["layout"] = json.dumps(raw)

    return within


def test_the_weights_are_there_and_finite(model):
    with pytest.raises(
        RecordError, match=r"changed.safetensors was asked for; net 0 has no 4\.bias\."
    ):
        fq.load_model(model.changed(lambda tensors, note: tensors.pop("4.bias")), net)
    with pytest.raises(RecordError, match=r"net 0 has no 1\.running_mean"):
        fq.load_model(model.changed(lambda tensors, note: tensors.pop("1.running_mean")), net)
    with pytest.raises(RecordError, match=r"net 0 has the unexpected tensor more"):
        fq.load_model(model.changed(lambda tensors, note: tensors.update(more=torch.ones(1))), net)
    with pytest.raises(RecordError, match=r"4\.bias of net 0 is \(5,\) instead of \(4,\)"):
        fq.load_model(
            model.changed(lambda tensors, note: tensors.update({"4.bias": torch.ones(5)})), net
        )
    for dtype in (torch.int64, torch.complex64, torch.bool):
        with pytest.raises(RecordError, match=r"4\.bias of net 0 is .* instead of torch.float32"):
            fq.load_model(
                model.changed(lambda t, note, d=dtype: t.update({"4.bias": torch.ones(4).to(d)})),
                net,
            )
    nan = model.changed(
        lambda tensors, note: tensors.update({"4.bias": torch.full((4,), torch.nan)})
    )
    with pytest.raises(
        RecordError, match=r"4 of 4 values of 4\.bias are NaN or infinite.*allow_nan=True"
    ):
        fq.load_model(nan, net)
    assert fq.load_model(nan, net, allow_nan=True)[4].bias.isnan().all()


def test_weights_without_bytes_are_refused(model):
    data = model.changed(lambda tensors, note: None).read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin])
    entries = {
        name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"
    }
    name, last = max(entries.items(), key=lambda pair: pair[1])
    header[name]["data_offsets"] = [last[0], last[0]]
    text = json.dumps(header).encode()
    model.file.write_bytes(len(text).to_bytes(8, "little") + text + data[begin : begin + last[0]])
    with pytest.raises(RecordError, match=rf"{name} is F32 of shape .* have another size"):
        fq.load_model(model.file, net)


NOTES: list[tuple[Change, str]] = [
    (lambda t, n: n.pop("format"), "its format is None"),
    (lambda t, n: n.update(format=["model"]), "its format is"),
    (lambda t, n: n.update(layout=3), "layout of its note is no text"),
    (lambda t, n: n.pop("norms"), "norms of its note is no text"),
    (lambda t, n: n.pop("model"), "model of its note is no text"),
    (lambda t, n: n.pop("input_shape"), "input_shape of its note"),
    (
        lambda t, n: n.update(input_shape=[10**9]),
        r"sample of shape \[1000000000\] has more than 268,435,456 values",
    ),
    (lambda t, n: n.update(input_shape=[2**20, 2**20]), "has more than 268,435,456"),
    (lambda t, n: n.update(input_shape=[-1]), "input_shape of its note"),
    (lambda t, n: n.update(input_shape="1"), "input_shape of its note"),
    (lambda t, n: n.update(input_dtype="load"), "input_dtype of its note is none of"),
    (lambda t, n: n.update(input_dtype=None), "input_dtype of its note is none of"),
    (lambda t, n: n.update(robustness="x"), "robustness of its note"),
    (lambda t, n: n.update(nets=[]), "nets of its note are no list of 1 to 1,024"),
    (lambda t, n: n.update(nets=[{}]), "a sub-model has no widths"),
    (lambda t, n: n.update(nets=[3]), "a sub-model has no widths"),
    (lambda t, n: n.update(nets=n["nets"] * 1025), "nets of its note are no list of 1 to 1,024"),
    (lambda t, n: n["nets"][0].update(widths=3), "the widths of a sub-model"),
    (lambda t, n: n["nets"][0].update(widths=[["layer.0", -4]]), "the widths of a sub-model"),
    (lambda t, n: n["nets"][0].update(widths=[]), "net 0 has the widths of no axis"),
    (
        lambda t, n: n["nets"][0].update(widths=[["layer.0", 9]]),
        "net 0 has the width 9 on 'layer.0'",
    ),
    (lambda t, n: n["nets"][0].update(widths=[["layer.0", 4]] * 2), "net 0 has the widths of"),
    (lambda t, n: n["nets"][0].update(kind="stage9"), "net 0: the variant 'stage9'"),
    (lambda t, n: n["nets"][0].update(kind=[]), "the kind or the scope"),
    (lambda t, n: n["nets"][0].update(trains=[3]), "the parts that a sub-model trains"),
    (
        lambda t, n: n["nets"][0].update(index={"layer.0": [[0, 10**15]]}),
        "net 0 has 1000000000000000 positions",
    ),
    (
        lambda t, n: n["nets"][0].update(index={"layer.0": [[6, 10]]}),
        "with position 9 on axis 'layer.0'",
    ),
    (
        lambda t, n: n["nets"][0].update(index={"layer.0": [[0, 2], [0, 2]]}),
        "4 channels with position 0 2 times",
    ),
    (lambda t, n: n["nets"][0].update(index={"layer.0": [[3, 0]]}), "the index of a sub-model"),
    (lambda t, n: n["nets"][0].update(index={"nowhere": [[0, 4]]}), "axis 'nowhere'"),
    (lambda t, n: n.update(layout="x"), "no JSON"),
    (lambda t, n: n.update(layout="[" * 100_000), "nests deeper than 4"),
    (lambda t, n: n.update(layout="{}"), "the layout does not have"),
    (layout(lambda raw: raw.update(more=1)), "the layout does not have"),
    (layout(lambda raw: raw.update(axes={})), "axes of the layout"),
    (layout(lambda raw: raw.update(axes=[3])), "an axis of the layout has no name"),
    (layout(lambda raw: raw["axes"][0].update(size=0)), "no size from 1"),
    (layout(lambda raw: raw["axes"][0].update(size=2**40)), "no size from 1"),
    (layout(lambda raw: raw["axes"][0].update(fixed="x")), "of another type"),
    (layout(lambda raw: raw["axes"][0].update(inner=["x"])), "inner axis 'x'"),
    (
        layout(lambda raw: raw["axes"][0].update(name="x")),
        "has the axis 'layer.0', which the layout does not list",
    ),
    (layout(lambda raw: raw.update(dims=[])), "dims of the layout"),
    (layout(lambda raw: raw["dims"].update({"0.weight": "(a"})), "unbalanced"),
    (layout(lambda raw: raw["dims"].update({"0.weight": "(" * 101})), "more than 100 parentheses"),
    (layout(lambda raw: raw["dims"].update({"0.weight": "9" * 5000})), "cannot be read"),
    (layout(lambda raw: raw.update(attributes={"0.padding": "1 1"})), "0.padding has 2 dimensions"),
    (layout(lambda raw: raw.update(ties={"a": "b"})), "the weight 'b', which it does not list"),
    (
        layout(lambda raw: raw.update(parts={"norm": ["b"]})),
        "the weight 'b', which it does not list",
    ),
    (layout(lambda raw: raw.update(parts={"norm": "b"})), "parts of the layout"),
    (layout(lambda raw: raw.update(variants={"a": 3})), "variants of the layout"),
    (layout(lambda raw: raw.update(notes=[3])), "notes of the layout"),
    (layout(lambda raw: raw.update(class_dim="x")), "class_dim of the layout"),
]


def test_notes_that_contradict_themselves_are_refused(model):
    for change, message in NOTES:
        with pytest.raises(RecordError, match=message):
            fq.load_model(model.changed(change), net)


def test_layouts_of_other_modules_are_refused(model):
    for path in ("forward", "0.weight", "0.padding", "7.out_features", "0.kernel_size.5"):
        with pytest.raises(ConfigError, match=rf"{path} is 8 there and"):
            fq.load_model(
                model.changed(
                    layout(lambda raw, path=path: raw.update(attributes={path: "layer.0"}))
                ),
                net,
            )
    with pytest.raises(ConfigError, match=r"9\.bias is tied to 4\.bias there and is nothing here"):
        fq.load_model(model.changed(layout(lambda raw: raw.update(ties={"9.bias": "4.bias"}))), net)


def test_models_of_several_sizes_are_checked_too(sizes):
    changes: list[tuple[Change, str]] = [
        (lambda t, n: n.pop("mixes"), "mixes of its note"),
        (
            lambda t, n: n.update(mixes=[[1, [99]]]),
            "the share 1 of its note has nets that are not there",
        ),
        (lambda t, n: n.update(mixes=[3]), "a mix of its note"),
        (lambda t, n: n.update(share=0.3), "share of its note is none"),
        (lambda t, n: n.update(stocks=[]), "stocks of its note"),
        (lambda t, n: n["nets"][0].update(stock=77), "a net of its note has no stock"),
        (lambda t, n: t.pop("stocks.0.4.bias"), r"stock 0 has no 4\.bias"),
        (
            lambda t, n: t.update({"stocks.99.4.bias": torch.ones(4)}),
            r"unexpected tensor stocks\.99\.4\.bias",
        ),
        (
            lambda t, n: t.update({"statistics.0.4.bias": torch.ones(4)}),
            r"net 0 has the unexpected tensor 4\.bias",
        ),
        (lambda t, n: t.pop("statistics.0.1.running_var"), r"net 0 has no 1\.running_var"),
    ]
    assert fq.load_model(sizes.changed(lambda tensors, note: None), net).shares == (1.0, 0.5)
    for change, message in changes:
        with pytest.raises(RecordError, match=message):
            fq.load_model(sizes.changed(change), net)


def test_a_file_is_refused_for_its_size(model):
    file = model.changed(lambda tensors, note: None)
    with pytest.raises(RecordError, match=r"max_bytes allows 10\. --max-bytes \d+ "):
        fq.load_model(file, net, max_bytes=10)
    large = model.changed(lambda tensors, note: note.update(input_shape=[2**20]))
    with pytest.raises(
        RecordError, match=r"two samples of shape \[1048576\] are needed: it takes 8,388,608 bytes"
    ):
        fq.load_model(large, net, max_bytes=100_000)


def test_a_changed_byte_is_noticed(model):
    whole = model.changed(lambda tensors, note: None).read_bytes()
    for place in (-1, -100, 200, 2000):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        model.file.write_bytes(damaged)
        with pytest.raises(FedquiltError):
            fq.load_model(model.file, net)
