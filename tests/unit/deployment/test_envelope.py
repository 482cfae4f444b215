"""Messages as records of Flower."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedquilt.deployment.envelope import CHUNK_BYTES, chunks, pack, unpack
from fedquilt.errors import FormatError
from fedquilt.round.wire import Message


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1])
def test_pieces_have_at_most_one_mebibyte_and_join_to_the_same_bytes(size):
    data = np.random.default_rng(size).bytes(size)
    pieces = list(chunks(data))
    assert all(len(piece) <= CHUNK_BYTES for piece in pieces)
    assert len(pieces) == max(1, -(-size // CHUNK_BYTES))
    assert b"".join(pieces) == data


def test_a_message_survives_packing():
    message = Message(b'{"a": 1}', (b"x" * (CHUNK_BYTES + 7), b"", b"y"))
    found, about = unpack(pack(message, b"{}"))
    assert (found, about) == (message, b"{}")


def test_all_bytes_are_in_arrays_and_equal_files_have_equal_objects():
    file = b"z" * (2 * CHUNK_BYTES)
    one, other = pack(Message(b"1", (file,))), pack(Message(b"22", (file,)))
    assert all(isinstance(record, ArrayRecord) for record in one.values())
    assert one["file-0"].object_id == other["file-0"].object_id
    assert one["note"].object_id != other["note"].object_id


def array(data: bytes, **changes: object) -> Array:
    fields = {"dtype": "uint8", "shape": (len(data),), "stype": "fedquilt.bytes", "data": data}
    return Array(**{**fields, **changes})


def damaged() -> list[RecordDict]:
    """Return records that are no message."""
    good = {"about": ArrayRecord({"0": array(b"")}), "note": ArrayRecord({"0": array(b"{}")})}
    pickled = pickle.dumps({"a": 1})
    return [
        RecordDict({}),
        RecordDict({"note": good["note"]}),
        RecordDict({**good, "file-1": good["note"]}),
        RecordDict({**good, "other": good["note"]}),
        RecordDict({**good, "note": ConfigRecord({"0": pickled})}),
        RecordDict({**good, "note": ArrayRecord({})}),
        RecordDict({**good, "note": ArrayRecord({"1": array(b"{}")})}),
        RecordDict({**good, "note": ArrayRecord({"0": Array(np.zeros(3, np.uint8))})}),
        RecordDict({**good, "note": ArrayRecord({"0": array(pickled, stype="pickle")})}),
        RecordDict({**good, "note": ArrayRecord({"0": array(b"x" * (CHUNK_BYTES + 1))})}),
        RecordDict({**good, **{f"file-{number}": good["note"] for number in range(65)}}),
        RecordDict({**good, "about": ArrayRecord({str(n): array(b"x" * 2**19) for n in range(3)})}),
    ]


@pytest.mark.parametrize("records", damaged())
def test_records_that_are_no_message_are_refused(records):
    with pytest.raises(FormatError):
        unpack(records)
