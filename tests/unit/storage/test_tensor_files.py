"""The strict reader of safetensors files: contradictory files are refused before memory is
allocated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedquilt.errors import ConfigError, RecordError
from fedquilt.runs.checkpoint import Checkpoints, Manifest
from fedquilt.runs.client_states import ClientStates
from fedquilt.runs.initial_weights import load_weights
from fedquilt.storage.files import Blob, write
from fedquilt.storage.tensor_files import DTYPES, TensorFile, check_finite, too_large
from fedquilt.terms import Server

CPU = torch.device("cpu")


def blob(blob: Blob) -> bytes:
    return b"".join(bytes(chunk) for chunk in blob.chunks())


def file_of(header: Any, data: bytes = bytes(8)) -> bytes:
    """Return a file with any header, as JSON or as bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def read(data: bytes) -> dict[str, torch.Tensor]:
    return TensorFile.of(data, "x.safetensors").tensors(CPU)


def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path):
    tensors = {
        name: torch.arange(48, dtype=torch.uint8).remainder(2).view(dtype).reshape(2, -1)
        for name, dtype in DTYPES.items()
    }
    tensors |= {"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 5), "last": torch.ones(3)}
    again = read(blob(Blob.of(tensors, {})))
    assert list(again) == list(tensors)
    for name, value in tensors.items():
        assert (again[name].dtype, again[name].shape) == (value.dtype, value.shape)
        assert torch.equal(
            again[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)
        )
    save_file(
        {"b": torch.ones(2), "a": torch.zeros(3)}, tmp_path / "x.safetensors", {"by": "others"}
    )
    with TensorFile.open(tmp_path / "x.safetensors") as file:
        assert file.tensors(CPU)["b"].tolist() == [1, 1]
        assert file.header.metadata == {"by": "others"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "header should have 0 bytes, and the file has 0"),
        (b"1234567", "the file has 7 in all"),
        (b"\xff" * 16, "header should have 18,446,744,073,709,551,615 bytes, and the file has 16"),
        (file_of(b""), "no JSON"),
        (file_of(b"{"), "no JSON"),
        (file_of(b"\xff"), "byte 0 is not UTF-8"),
        (file_of(b"[" * 100_000), "nests deeper than 3"),
        (file_of(b'{"a":' * 100_000), "nests deeper than 3"),
        (file_of(b'{"a": ' + b"9" * 5000 + b"}"), "no JSON"),
        (file_of(5), "its header is a int"),
        (file_of([]), "its header is a list"),
        (file_of({"__metadata__": 3, "a": entry()}), "metadata is no JSON object of strings"),
        (
            file_of({"__metadata__": {"a": 3}, "a": entry()}),
            "metadata is no JSON object of strings",
        ),
        (
            file_of(b'{"a": %s, "a": %s}' % ((json.dumps(entry()).encode(),) * 2)),
            "the key 'a' occurs twice",
        ),
        (file_of({"": entry()}), "'' is no name"),
        (file_of({"a\x00": entry()}), "is no name"),
        (file_of({"a" * 1025: entry()}), "is no name"),
        (file_of({"a": 3}), "the entry of a does not have"),
        (file_of({"a": {"dtype": "F32", "shape": [2]}}), "the entry of a does not have"),
        (file_of({"a": {**entry(), "more": 1}}), "the entry of a does not have"),
        (file_of({"a": entry(dtype="F33")}), "a has the dtype 'F33'"),
        (file_of({"a": entry(dtype=[])}), "a has the dtype"),
        (file_of({"a": entry(shape=2)}), "a has no shape"),
        (file_of({"a": entry(shape=[2.0])}), "a has no shape"),
        (file_of({"a": entry(shape=[True, 2])}), "a has no shape"),
        (file_of({"a": entry(shape=[-1, -2])}), "a has no shape"),
        (file_of({"a": entry(shape=[1] * 65 + [2])}), "a has no shape"),
        (file_of({"a": entry(shape=[2**63])}), "a has no shape"),
        (file_of({"a": entry(shape=[2**62, 2**62])}), "have another size"),
        (file_of({"a": entry(shape=[10**9])}), "have another size"),
        (file_of({"a": entry(offsets=[0, 0])}), "have another size"),
        (file_of({"a": entry(offsets=[8, 0])}), "a has no data_offsets"),
        (file_of({"a": entry(offsets=[0])}), "a has no data_offsets"),
        (file_of({"a": entry(offsets=[-8, 0])}), "a has no data_offsets"),
        (file_of({"a": entry(offsets=[8, 16])}), "leaves a gap"),
        (file_of({"a": entry(), "b": entry()}), "overlaps the tensor before"),
        (file_of({"a": entry(), "b": entry([1], [4, 8])}), "overlaps the tensor before"),
        (file_of({"a": entry()}, bytes(7)), "need 8 bytes of data, and the file has 7"),
        (file_of({"a": entry()}, bytes(9)), "need 8 bytes of data, and the file has 9"),
        (file_of({}), "need 0 bytes of data, and the file has 8"),
        (file_of({"a": entry([8], dtype="BOOL")}, b"\2" * 8), "bytes other than 0 and 1"),
    ],
)
def test_files_that_contradict_themselves_are_refused(data, message):
    with pytest.raises(
        RecordError, match=r"^x\.safetensors cannot be read as safetensors: .*" + message
    ):
        read(data)


def test_nothing_is_allocated_for_a_refused_file(monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda *args, **more: pytest.fail("memory was allocated"))
    for header in ({"a": entry([2**40], [0, 2**42])}, {"a": entry(), "b": entry([2**60], [8, 8])}):
        with pytest.raises(RecordError):
            read(file_of(header))


def test_a_sealed_file_notices_every_changed_byte():
    whole = blob(
        Blob.sealed({"a": torch.arange(3.0), "b": torch.ones(1)}, {"said": [1, {"x": 2.5}]})
    )
    intact = TensorFile.of(whole, "x").tensors(CPU, sealed=True)
    assert intact["a"].tolist() == [0, 1, 2]
    assert TensorFile.of(whole, "x").note == {"said": [1, {"x": 2.5}]}
    accepted = 0
    for place in range(len(whole)):
        for bit in (1, 64):
            damaged = bytearray(whole)
            damaged[place] ^= bit
            try:
                again = TensorFile.of(damaged, "x").tensors(CPU, sealed=True)
            except RecordError:
                continue
            accepted += 1  # a space of the padding that became a line break, for example
            assert {name: value.tolist() for name, value in again.items()} == {
                "a": [0, 1, 2],
                "b": [1],
            }
    assert accepted < 10
    with pytest.raises(RecordError, match="its checksum differs"):
        TensorFile.of(blob(Blob.of({"a": torch.ones(1)}, {})), "x").tensors(CPU, sealed=True)


def test_paths_that_are_not_files_are_refused(tmp_path):
    for path, message in (
        (tmp_path, "no regular file"),
        (tmp_path / "no", "No such file"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(RecordError, match=message), TensorFile.open(path):
            pass


def test_a_file_larger_than_allowed_is_refused(tmp_path, monkeypatch):
    save_file({"a": torch.zeros(100)}, tmp_path / "x.safetensors")
    size = (tmp_path / "x.safetensors").stat().st_size
    with (
        pytest.raises(
            RecordError,
            match=rf"takes {size} bytes in memory, and max_bytes allows 99.*--max-bytes {size} ",
        ),
        TensorFile.open(tmp_path / "x.safetensors", max_bytes=99),
    ):
        pass
    with TensorFile.open(tmp_path / "x.safetensors", max_bytes=size) as file:
        assert len(file.tensors(CPU)["a"]) == 100
    monkeypatch.setattr("fedquilt.hardware.process.free_memory", lambda: 2_000)
    assert too_large(1_000) == ""
    assert "half of the free memory is 1,000" in too_large(1_001)


def test_values_that_are_not_finite_are_refused():
    check_finite({"a": torch.ones(2), "b": torch.tensor([1])}, "x")
    for dtype in (torch.float32, torch.float16, torch.float8_e5m2, torch.complex64):
        with pytest.raises(
            RecordError, match=r"x: 1 of 2 values of a are NaN or infinite.*allow_nan=True"
        ):
            check_finite({"a": torch.tensor([1.0, torch.nan]).to(dtype)}, "x")


# --- initial weights ----------------------------------------------------------------------------


def test_initial_weights_are_finite_real_and_do_not_overflow(tmp_path: Path) -> None:
    file = str(tmp_path / "x.safetensors")
    bias = torch.zeros(1)

    def begin(weight: torch.Tensor, **options: Any) -> nn.Linear:
        save_file({"weight": weight, "bias": bias}, file)
        module = nn.Linear(2, 1)
        load_weights(module, file, **options)
        return module

    assert begin(torch.tensor([[1.0, 2.0]], dtype=torch.float64)).weight.tolist() == [[1, 2]]
    assert begin(torch.tensor([[1, 2]])).weight.tolist() == [[1, 2]]
    with pytest.raises(ConfigError, match=r"init = .*1 of 2 values of weight are NaN or infinite"):
        begin(torch.tensor([[1.0, torch.nan]]))
    assert begin(torch.tensor([[1.0, torch.inf]]), allow_nan=True).weight.tolist() == [
        [1, torch.inf]
    ]
    with pytest.raises(
        ConfigError, match=r"weight has values in the file, torch.float64, that overflow"
    ):
        begin(torch.tensor([[1.0, 1e300]], dtype=torch.float64))
    with pytest.raises(
        ConfigError, match=r"weight is torch.complex64 in the file and torch.float32 in the model"
    ):
        begin(torch.ones(1, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError, match=r"takes .* bytes in memory, and max_bytes allows 10"):
        begin(torch.ones(1, 2), max_bytes=10)
    Path(file).write_bytes(
        file_of({"weight": entry([1, 2], [0, 0]), "bias": entry([1], [0, 4])}, bytes(4))
    )
    with pytest.raises(ConfigError, match="have another size"):
        load_weights(nn.Linear(2, 1), file)


# --- checkpoints --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "note", "message"),
    [
        ({"weights/a": torch.ones(2)}, [], "its note lists no slots"),
        ({"weights/a": torch.ones(2)}, {"slots": 3}, "its note lists no slots"),
        (
            {"slots/momentum/a": torch.ones(2)},
            {"slots": []},
            "'slots/momentum/a', which is no weight, slot or extra",
        ),
        ({"a": torch.ones(2)}, {"slots": []}, "which is no weight, slot or extra"),
    ],
)
def test_an_odd_checkpoint_with_the_right_checksum_is_damaged(tmp_path, tensors, note, message):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(Server(1, {"a": torch.zeros(2)}, ClientStates(), {}, {}), {})
    written = write(tmp_path / "00000002.safetensors", Blob.of(tensors, note).chunks())
    write(tmp_path / "00000002.json", [Manifest(2, written, (), {}).to_json().encode()])
    server, manifest = Checkpoints(tmp_path).load(ClientStates(), CPU)
    assert (server.round, manifest.round, server.weights["a"].tolist()) == (1, 1, [0, 0])
    (tmp_path / "00000001.json").unlink()
    with pytest.raises(RecordError, match=message):
        Checkpoints(tmp_path).load(ClientStates(), CPU)
