"""Requests to devices and their replies, as bytes.

A message is a JSON note and one safetensors file for each job. Nothing is pickled. Tensors are
apart from the note, because the note belongs to one client, and the file of a cut is the same for
all clients that train the same positions.

A file is read in two steps. First its header is compared with what the job says: names, types and
shapes. Memory is allocated only if they are equal. A reply states no positions. They follow from
the job, the classes that the client has, and the number of columns that arrived.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fedquilt.checks import whole
from fedquilt.errors import FormatError
from fedquilt.round.link import Link, Outline, Packet, Transmission
from fedquilt.round.link.coding import NOTHING
from fedquilt.round.link.packing import WEIGHTS
from fedquilt.round.wire_notes import (
    MAX_REASON,
    VERSION,
    checksum,
    client_note,
    is_number,
    is_shape,
    read_client,
    read_note,
    sealed_note,
    submodel_in,
    text_in,
    whole_in,
)
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorEntry, TensorFile
from fedquilt.terms import Client, Payload, Submodel, Weights

MAX_JOBS = 64  # Most jobs of one client in a round
MAX_EXTRA_VALUES = 1 << 28  # Most values of an extra that is decoded


@dataclass(frozen=True)
class Message:
    """A request or reply as bytes."""

    note: bytes  # JSON. Its last key has a checksum of the whole message
    files: tuple[bytes, ...] = ()  # safetensors, one for each job

    @staticmethod
    def of(plain: Mapping[str, Any], files: tuple[bytes, ...] = ()) -> Message:
        """Return a message with a checksum.

        Args:
            plain: Values of the note.
            files: Tensors of each job.
        """
        return Message(sealed_note(plain, files), files)

    def read(self, kind: str) -> dict[str, Any]:
        """Return the values of the note.

        Raises:
            FormatError: The message is damaged, or is none of this kind or version.
        """
        return read_note(self.note, self.files, kind)

    @property
    def digest(self) -> str:
        """Return the SHA-256 of the whole message."""
        return checksum(self.note, self.files)

    @property
    def bytes(self) -> int:
        """Return the number of bytes of the note and all files."""
        return len(self.note) + sum(map(len, self.files))


@dataclass(frozen=True)
class Request:
    """Order of the server to train jobs. Tensors are in the files of its message."""

    run: str  # Identity of the run, which is the same after a resume
    round: int  # Counted from 0
    client: Client
    submodels: tuple[Submodel, ...]  # One for each job
    settings: Mapping[str, Any]  # Method, link and task as plain values
    seed: int  # Random seed of the run
    precision: str  # Precision of the run, such as "fp32"
    fingerprint: str  # Of the layout
    num_clients: int  # Clients of the fleet
    base: int = -1  # Last round of this client that counted, from 0. -1: none
    deadline: float = math.inf  # Seconds that the device has
    # Columns of each job's download that arrive. None: all. 0: nothing arrives
    columns: tuple[int | None, ...] = ()
    # Positions of the initial weights in each job's file. None: the file has none
    initial: tuple[Submodel | None, ...] = ()
    # Shapes of the server's extras, by name
    extra_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    layout: str = ""  # The layout as JSON, at first contact. Empty: the device has it
    sample: Mapping[str, Any] = field(default_factory=dict)  # Shape, classes and scale of a sample

    def message(self, files: tuple[bytes, ...]) -> Message:
        """Return the request as bytes.

        Args:
            files: Tensors of each job (`packet_file`).
        """
        plain = {
            "kind": "request",
            "version": VERSION,
            "run": self.run,
            "round": self.round,
            "client": client_note(self.client),
            "jobs": [
                {
                    "submodel": submodel.to_dict(),
                    "columns": columns,
                    "initial": None if initial is None else initial.to_dict(),
                }
                for submodel, columns, initial in zip(
                    self.submodels, self.columns, self.initial, strict=True
                )
            ],
            "settings": dict(self.settings),
            "seed": self.seed,
            "precision": self.precision,
            "fingerprint": self.fingerprint,
            "num_clients": self.num_clients,
            "base": self.base,
            "deadline": None if math.isinf(self.deadline) else self.deadline,
            "extra_shapes": {name: list(shape) for name, shape in self.extra_shapes.items()},
            "layout": self.layout,
            "sample": dict(self.sample),
        }
        return Message.of(plain, files)

    @staticmethod
    def read(message: Message) -> Request:
        """Read the note of a message.

        Raises:
            FormatError: It is no request, or one of another version.
        """
        plain = message.read("request")
        jobs = plain.get("jobs")
        if not isinstance(jobs, list) or not 1 <= len(jobs) <= MAX_JOBS:
            raise FormatError(f"it has no list of 1 to {MAX_JOBS} jobs")
        deadline = plain.get("deadline")
        if deadline is not None and not is_number(deadline):
            raise FormatError("its deadline is no number")
        shapes = plain.get("extra_shapes")
        if not isinstance(shapes, dict) or not all(is_shape(shape) for shape in shapes.values()):
            raise FormatError("its extra_shapes are no table of shapes")
        if not isinstance(plain.get("settings"), dict) or not isinstance(plain.get("sample"), dict):
            raise FormatError("its settings or its sample are no table")
        return Request(
            run=text_in(plain, "run"),
            round=whole_in(plain, "round"),
            client=read_client(plain.get("client")),
            submodels=tuple(submodel_in(job, "submodel") for job in jobs),
            settings=plain["settings"],
            seed=whole_in(plain, "seed", least=-(2**63)),
            precision=text_in(plain, "precision"),
            fingerprint=text_in(plain, "fingerprint"),
            num_clients=whole_in(plain, "num_clients"),
            base=whole_in(plain, "base", least=-1),
            deadline=math.inf if deadline is None else float(deadline),
            columns=tuple(_columns(job) for job in jobs),
            initial=tuple(
                None if job.get("initial") is None else submodel_in(job, "initial") for job in jobs
            ),
            extra_shapes={name: tuple(shape) for name, shape in shapes.items()},
            layout=text_in(plain, "layout"),
            sample=plain["sample"],
        )


@dataclass(frozen=True)
class JobResult:
    """Numbers that a device reports for one job, besides the tensors."""

    columns: int | None  # Columns of the upload that arrive. None: all. 0: nothing arrives
    steps: int  # Optimizer steps of the client in all rounds if it counts them, else in this round
    batches: int  # Batches of this round
    loss: float  # Mean training loss
    extra_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """Report of a device on a request. It states no positions."""

    run: str
    round: int  # Counted from 0
    base: int  # The base of the request
    request: str  # Digest of the request
    results: tuple[JobResult, ...] = ()  # One for each job
    size: int = 0  # Training samples of the device
    classes: tuple[int, ...] | None = None  # Classes of its samples. None: targets are no classes
    failed: str = ""  # Reason why there are no results. Empty: there are
    anew: bool = False  # True: the state of the base is lost, and the device has to start anew

    def message(self, files: tuple[bytes, ...] = ()) -> Message:
        """Return the reply as bytes.

        Args:
            files: Tensors of each job (`packet_file`). Empty: the device failed.
        """
        plain = {
            "kind": "reply",
            "version": VERSION,
            "run": self.run,
            "round": self.round,
            "base": self.base,
            "request": self.request,
            "size": self.size,
            "classes": None if self.classes is None else list(self.classes),
            "failed": self.failed[:MAX_REASON],
            "anew": self.anew,
            "results": [
                {
                    "columns": result.columns,
                    "steps": result.steps,
                    "batches": result.batches,
                    "loss": result.loss,
                    "extra_shapes": {
                        name: list(shape) for name, shape in result.extra_shapes.items()
                    },
                }
                for result in self.results
            ],
        }
        return Message.of(plain, files)

    @staticmethod
    def read(message: Message) -> Reply:
        """Read the note of a message.

        Raises:
            FormatError: It is no reply, or one of another version.
        """
        plain = message.read("reply")
        results = plain.get("results")
        if not isinstance(results, list) or len(results) > MAX_JOBS:
            raise FormatError(f"it has no list of at most {MAX_JOBS} results")
        classes = plain.get("classes")
        if classes is not None and (not is_shape(classes) or classes != sorted(set(classes))):
            raise FormatError("its classes are no ascending list of whole numbers")
        failed = text_in(plain, "failed")
        if len(failed) > MAX_REASON:
            raise FormatError(f"its reason has more than {MAX_REASON} characters")
        if not isinstance(plain.get("anew"), bool):
            raise FormatError("its anew is neither true nor false")
        return Reply(
            run=text_in(plain, "run"),
            round=whole_in(plain, "round"),
            base=whole_in(plain, "base", least=-1),
            request=text_in(plain, "request"),
            results=tuple(_read_result(result) for result in results),
            size=whole_in(plain, "size"),
            classes=None if classes is None else tuple(classes),
            failed=failed,
            anew=plain["anew"],
        )


# --- tensors ------------------------------------------------------------------------------------


def packet_file(
    packet: Packet | None, first: Weights = NOTHING, initial: Weights = NOTHING
) -> bytes:
    """Return the tensors of one job as the bytes of a safetensors file.

    The name of a tensor begins with its kind: `first/`, `initial/`, `weights/`, `slots/`, `extras/`
    or `messages/`.

    Args:
        packet: Content that travels over the link. None: all of it got lost.
        first: Weights that a client gets once, such as its private net. Links do not lose them.
        initial: Weights before the first round. A client starts from them where weights are not
            sent or get lost, and codecs code changes of them. Empty: the client needs none, or has
            them.
    """
    tensors = {f"first/{name}": value for name, value in first.items()}
    tensors |= {f"initial/{name}": value for name, value in initial.items()}
    if packet is not None:
        plain = packet.plain
        tensors |= {f"weights/{name}": value for name, value in plain.weights.items()}
        for slot, values in plain.slots.items():
            tensors |= {f"slots/{slot}/{name}": value for name, value in values.items()}
        tensors |= {f"extras/{name}": value for name, value in plain.extras.items()}
        tensors |= {f"messages/{key}": value for key, value in packet.messages.items()}
    return b"".join(Blob.of(tensors, None).chunks())


@dataclass(frozen=True)
class Expected:
    """Contents that a file must have, as its job determines them."""

    outline: Outline  # Names and positions of what was sent
    reach: Submodel | None  # Positions that arrive. None: nothing does
    transmission: Transmission
    link: Link
    known: frozenset[str] = frozenset()  # Weights that a codec codes as changes
    first: tuple[str, ...] = ()  # Weights that the client gets once
    # Positions and names of initial weights. None: the file has none
    initial: tuple[Submodel, tuple[str, ...]] | None = None
    # Types of weights and extras that differ from the type of weights, such as counters
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    @property
    def coded_weights(self) -> frozenset[str]:
        """Return the names of the weights that are in a message of the codec."""
        codec = self.link.codec_of(self.transmission)
        return self.known & {*self.outline.weights} if codec else frozenset()

    @property
    def is_coded(self) -> bool:
        """Return True if the file has messages of the codec."""
        outline = self.outline
        has_state = bool(outline.slots or outline.coded_extras)
        return bool(self.coded_weights) or (
            has_state and self.link.codec_of(self.transmission) is not None
        )


@dataclass(frozen=True)
class ReceivedFile:
    """The tensors of one job, as they were read from its file."""

    packet: Packet | None  # What the link delivered. None: nothing
    first: dict[str, Tensor]  # Weights that the client gets once
    initial: dict[str, Tensor]  # Weights before the first round


def read_packet(data: bytes, expected: Expected, title: str) -> ReceivedFile:
    """Read the tensors of one job.

    The header is compared with the job before any tensor is allocated.

    Args:
        data: A safetensors file.
        expected: What the job says about it.
        title: Name of the file for messages.

    Raises:
        RecordError: A name, type, shape or length is not that of the job.
    """
    file = TensorFile.of(data, title)
    problem = _difference(file.entries, _expected_entries(expected), expected.outline.extras)
    if problem:
        raise FormatError(f"{title} does not fit its job: {problem}.")
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in _GROUPS}
    for path, value in file.tensors(expected.outline.device).items():
        group, _, name = path.partition("/")
        groups[group][name] = value
    packet = None
    if expected.reach is not None:
        packet = _packet(expected, expected.reach, groups)
    return ReceivedFile(packet, groups["first"], groups["initial"])


_GROUPS = ("first", "initial", "weights", "slots", "extras", "messages")


def _packet(
    expected: Expected, reach: Submodel, groups: Mapping[str, Mapping[str, Tensor]]
) -> Packet:
    """Return the packet that named tensors of a file make up, at the positions `reach`.

    Tensors are ordered as in the outline. `groups` has them by kind (`_GROUPS`) and then by name.
    """
    outline = expected.outline
    slots: dict[str, dict[str, Tensor]] = {}
    if not expected.is_coded:
        slots = {
            slot: {name: groups["slots"][f"{slot}/{name}"] for name in names}
            for slot, names in outline.slots.items()
        }
    weights, extras = (
        {name: groups[group][name] for name in names if name in groups[group]}
        for group, names in (("weights", outline.weights), ("extras", tuple(outline.extras)))
    )
    plain = Payload(reach, weights, slots, extras, outline.coded_extras)
    return Packet(plain, groups["messages"])


def _expected_entries(expected: Expected) -> dict[str, TensorEntry | None]:
    """Return type and shape of every tensor that a file must have, by its path.

    None stands for a coded message: a vector of bytes of any length.
    """
    outline, world, reach = expected.outline, expected.transmission.world, expected.reach

    def entry(name: str, shape: Sequence[int]) -> TensorEntry:
        return TensorEntry(expected.dtypes.get(name, outline.dtype), tuple(shape), 0, 0)

    def entries(kind: str, at: Submodel, names: tuple[str, ...]) -> dict[str, TensorEntry | None]:
        shapes = replace(outline, submodel=at).shapes(names, world)
        return {f"{kind}/{name}": entry(name, shape) for name, shape in shapes.items()}

    table = entries("first", outline.submodel, expected.first)
    if expected.initial is not None:
        table |= entries("initial", *expected.initial)
    if reach is None:
        return table

    coded = expected.coded_weights
    table |= entries("weights", reach, tuple(n for n in outline.weights if n not in coded))
    if coded:
        table[f"messages/{WEIGHTS}"] = None
    if expected.is_coded:
        table |= {f"messages/{kind}/{name}": None for _, kind, name, _ in outline.coded_state()}
    else:
        for slot, names in outline.slots.items():
            table |= entries(f"slots/{slot}", reach, names)
    for name, shape in outline.extras.items():
        if not (expected.is_coded and name in outline.coded_extras):
            table[f"extras/{name}"] = entry(name, shape)
    return table


def _difference(
    header: Mapping[str, TensorEntry],
    expected: Mapping[str, TensorEntry | None],
    extras: Mapping[str, Sequence[int]],
) -> str:
    """Describe the first difference between a reply's header and the tensors that its job expects.

    The text is empty if there is none. Extras, by name and shape, must not exceed MAX_EXTRA_VALUES.
    """
    if unknown := sorted(header.keys() - expected.keys()):
        return f"it has {unknown[0]!r}, which the job does not have"
    if missing := sorted(expected.keys() - header.keys()):
        return f"it lacks {missing[0]!r}"
    for path, entry in header.items():
        expected_entry = expected[path]
        if expected_entry is None:
            if entry.dtype != torch.uint8 or len(entry.shape) != 1:
                return f"{path!r} is no message: a vector of bytes would fit"
        elif (entry.dtype, entry.shape) != (expected_entry.dtype, expected_entry.shape):
            return (
                f"{path!r} is {entry.dtype} {list(entry.shape)}; {expected_entry.dtype} "
                f"{list(expected_entry.shape)} would fit"
            )
    too_large = [name for name, shape in extras.items() if math.prod(shape) > MAX_EXTRA_VALUES]
    return f"the extra {too_large[0]!r} has too many values" if too_large else ""


def _read_result(plain: Any) -> JobResult:
    if not isinstance(plain, dict) or not is_number(plain.get("loss")):
        raise FormatError("a result has no loss")
    shapes = plain.get("extra_shapes")
    if not isinstance(shapes, dict) or not all(is_shape(shape) for shape in shapes.values()):
        raise FormatError("the extra_shapes of a result are no table of shapes")
    return JobResult(
        _columns(plain),
        whole_in(plain, "steps"),
        whole_in(plain, "batches"),
        float(plain["loss"]),
        {name: tuple(shape) for name, shape in shapes.items()},
    )


def _columns(plain: Mapping[str, Any]) -> int | None:
    columns = plain.get("columns")
    if columns is not None and not whole(columns):
        raise FormatError("the columns of a job are no whole number")
    return columns
