"""Requests to evaluate nets on a device's own samples, and replies that hold sums only.

Devices test nets, or measure norm statistics. They send sums and counts, from which the server
computes means over all devices, and never outputs of single samples. State on a device is read and
not changed, so that a request can be repeated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

import torch
from torch import Tensor

from fedquilt.errors import ConfigError, FormatError
from fedquilt.round.eval_jobs import SampleSet, WeightsFrom
from fedquilt.round.federation import World
from fedquilt.round.training.attacks import PGD
from fedquilt.round.wire import Message
from fedquilt.round.wire_notes import (
    MAX_REASON,
    VERSION,
    client_note,
    is_number,
    read_client,
    text_in,
    whole_in,
)
from fedquilt.storage.files import Blob
from fedquilt.storage.tensor_files import TensorEntry, TensorFile
from fedquilt.terms import Client, Submodel, Submodels, Weights

MAX_TASKS = 1024  # Most tests and measurements in one request
MAX_NETS = 64  # Most nets whose logits are averaged
MAX_SAMPLES = 1 << 40  # Most samples or batches that a reply may state
MAX_ATTACK_STEPS = 10_000
CPU = torch.device("cpu")


@dataclass(frozen=True)
class EvalTask:
    """One test of nets on a device, or one measurement of a net's norm statistics."""

    nets: Submodels  # Nets whose logits are averaged. One net if statistics are measured
    file: int  # Number of the request's file that has the weights
    calibrates: bool = False  # True: norm statistics are measured. False: the nets are tested
    source: WeightsFrom = "server"  # Where the weights come from
    has_initial: bool = False  # True: the file has initial weights, which the device lacks
    own_classes: bool = False  # True: only the classes that the device holds count
    absent: float = -math.inf  # Logit of the classes that the device lacks
    robustness: float = 0.0  # Mixing weight of dual norms, from 0 (clean) to 1 (robust)
    attack: PGD | None = None  # Attack on the samples. None: they stay unchanged
    on: SampleSet = "test"  # Samples of the device
    limit: int | None = None  # Most samples. None: all

    def to_dict(self) -> dict[str, Any]:
        """Return the task as values that JSON can hold."""
        return {
            "nets": [net.to_dict() for net in self.nets],
            "file": self.file,
            "calibrates": self.calibrates,
            "source": self.source,
            "has_initial": self.has_initial,
            "own_classes": self.own_classes,
            "absent": None if math.isinf(self.absent) else self.absent,
            "robustness": self.robustness,
            "attack": None if self.attack is None else asdict(self.attack),
            "on": self.on,
            "limit": self.limit,
        }

    @staticmethod
    def from_dict(plain: Any) -> EvalTask:
        """Return the task that `to_dict` wrote.

        Raises:
            FormatError: A value is missing, or has another type or range.
        """
        keys = {task_field.name for task_field in fields(EvalTask)}
        if not isinstance(plain, dict) or plain.keys() != keys:
            raise FormatError(f"a task is no table of {', '.join(sorted(keys))}")
        nets = plain["nets"]
        if not isinstance(nets, list) or not 1 <= len(nets) <= MAX_NETS:
            raise FormatError(f"a task has no list of 1 to {MAX_NETS} nets")
        for key in ("calibrates", "has_initial", "own_classes"):
            if not isinstance(plain[key], bool):
                raise FormatError(f"the {key} of a task is neither true nor false")
        if plain["source"] not in get_args(WeightsFrom) or plain["on"] not in get_args(SampleSet):
            raise FormatError("a task names unknown weights or unknown samples")
        absent, robustness = plain["absent"], plain["robustness"]
        if not (absent is None or is_number(absent)) or not is_number(robustness):
            raise FormatError("the absent logit or the robustness of a task is no number")
        if plain["calibrates"] and len(nets) > 1:
            raise FormatError("norm statistics of several nets at once were asked for")
        return EvalTask(
            tuple(Submodel.from_dict(net) for net in nets),
            whole_in(plain, "file"),
            plain["calibrates"],
            plain["source"],
            plain["has_initial"],
            plain["own_classes"],
            -math.inf if absent is None else float(absent),
            float(robustness),
            _read_attack(plain["attack"]),
            plain["on"],
            None if plain["limit"] is None else whole_in(plain, "limit"),
        )


def _read_attack(plain: Any) -> PGD | None:
    """Return an attack from plain values. Others than an attack's raise a FormatError."""
    if plain is None:
        return None
    keys = {attack_field.name for attack_field in fields(PGD)}
    if not isinstance(plain, dict) or plain.keys() != keys:
        raise FormatError(f"an attack is no table of {', '.join(sorted(keys))}")
    numbers = [value for key, value in plain.items() if key != "start"]
    if not isinstance(plain["start"], bool) or not all(map(is_number, numbers)):
        raise FormatError("an attack has values that are no numbers")
    if whole_in(plain, "steps") > MAX_ATTACK_STEPS:
        raise FormatError(f"an attack has more than {MAX_ATTACK_STEPS:,} steps")
    try:
        return PGD(**plain)
    except ConfigError as error:
        raise FormatError(f"an attack cannot be read: {error}") from error


@dataclass(frozen=True)
class EvalRequest:
    """Order of the server to evaluate nets. Weights are in the files of its message."""

    run: str  # Identity of the run, which is the same after a resume
    round: int  # Rounds of the state that is evaluated
    client: Client
    tasks: tuple[EvalTask, ...]
    settings: Mapping[str, Any]  # Method, link and task as plain values
    seed: int  # Random seed of the run
    precision: str  # Precision of the run, such as "fp32"
    fingerprint: str  # Of the layout
    num_clients: int  # Clients of the fleet
    batch_size: int  # Samples that are run together
    base: int = -1  # Last round of this client that counted, from 0. -1: none
    deadline: float = math.inf  # Seconds that the device has

    def message(self, files: tuple[bytes, ...]) -> Message:
        """Return the request as bytes.

        Args:
            files: Weights (`weights_file`), which tasks refer to by number.
        """
        plain = {
            "kind": "evaluation request",
            "version": VERSION,
            "run": self.run,
            "round": self.round,
            "client": client_note(self.client),
            "tasks": [task.to_dict() for task in self.tasks],
            "settings": dict(self.settings),
            "seed": self.seed,
            "precision": self.precision,
            "fingerprint": self.fingerprint,
            "num_clients": self.num_clients,
            "batch_size": self.batch_size,
            "base": self.base,
            "deadline": None if math.isinf(self.deadline) else self.deadline,
        }
        return Message.of(plain, files)

    @staticmethod
    def read(message: Message) -> EvalRequest:
        """Read the note of a message.

        Raises:
            FormatError: It is no request to evaluate, or one of another version.
        """
        plain = message.read("evaluation request")
        tasks = plain.get("tasks")
        if not isinstance(tasks, list) or not 1 <= len(tasks) <= MAX_TASKS:
            raise FormatError(f"it has no list of 1 to {MAX_TASKS} tasks")
        deadline = plain.get("deadline")
        if deadline is not None and not is_number(deadline):
            raise FormatError("its deadline is no number")
        if not isinstance(plain.get("settings"), dict):
            raise FormatError("its settings are no table")
        request = EvalRequest(
            run=text_in(plain, "run"),
            round=whole_in(plain, "round"),
            client=read_client(plain.get("client")),
            tasks=tuple(EvalTask.from_dict(task) for task in tasks),
            settings=plain["settings"],
            seed=whole_in(plain, "seed", least=-(2**63)),
            precision=text_in(plain, "precision"),
            fingerprint=text_in(plain, "fingerprint"),
            num_clients=whole_in(plain, "num_clients"),
            batch_size=whole_in(plain, "batch_size", least=1),
            base=whole_in(plain, "base", least=-1),
            deadline=math.inf if deadline is None else float(deadline),
        )
        if max(task.file for task in request.tasks) >= len(message.files):
            raise FormatError(f"a task names a file that the {len(message.files)} files lack")
        return request


@dataclass(frozen=True)
class EvalReply:
    """Report of a device on a request to evaluate. It has counts, and sums in one file."""

    run: str
    round: int
    base: int  # The base of the request
    request: str  # Digest of the request
    # Samples of each test, and batches of each measurement. 0: there are no sums of the task
    counts: tuple[int, ...] = ()
    failed: str = ""  # Reason why there are no sums. Empty: there are

    def message(self, sums: Sequence[Weights] = ()) -> Message:
        """Return the reply as bytes.

        Args:
            sums: Sums of each task by name: those of a metric, or of norm statistics.
        """
        plain = {
            "kind": "evaluation reply",
            "version": VERSION,
            "run": self.run,
            "round": self.round,
            "base": self.base,
            "request": self.request,
            "counts": list(self.counts),
            "failed": self.failed[:MAX_REASON],
        }
        if self.failed:
            return Message.of(plain)
        tensors = {
            f"{number}/{name}": value
            for number, task_sums in enumerate(sums)
            for name, value in task_sums.items()
        }
        return Message.of(plain, (_file(tensors),))

    @staticmethod
    def read(message: Message) -> EvalReply:
        """Read the note of a message.

        Raises:
            FormatError: It is no reply to a request to evaluate, or one of another version.
        """
        plain = message.read("evaluation reply")
        counts = plain.get("counts")
        if not isinstance(counts, list) or len(counts) > MAX_TASKS:
            raise FormatError(f"it has no list of at most {MAX_TASKS} counts")
        if not all(type(count) is int and 0 <= count <= MAX_SAMPLES for count in counts):
            raise FormatError(f"its counts are no whole numbers from 0 to {MAX_SAMPLES:,}")
        failed = text_in(plain, "failed")
        if len(failed) > MAX_REASON:
            raise FormatError(f"its reason has more than {MAX_REASON} characters")
        return EvalReply(
            text_in(plain, "run"),
            whole_in(plain, "round"),
            whole_in(plain, "base", least=-1),
            text_in(plain, "request"),
            tuple(counts),
            failed,
        )


# --- tensors ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ExpectedTensor:
    """A tensor that a file must or may have."""

    shape: tuple[int, ...]
    dtype: torch.dtype | None  # None: any type, as that of a constant
    is_optional: bool = False


@dataclass(frozen=True)
class TaskWeights:
    """Weights of one task, as they are in a file of a request."""

    weights: Weights  # Weights of the server, by scope and name
    # Weights before the first round, by scope and name. Empty: the device needs none, or has them
    initial: Weights = field(default_factory=dict)


def _file(tensors: Weights) -> bytes:
    return b"".join(Blob.of(tensors, None).chunks())


def weights_file(weights: TaskWeights) -> bytes:
    """Return the weights of a task as the bytes of a safetensors file."""
    tensors = {f"weights/{name}": value for name, value in weights.weights.items()}
    tensors |= {f"initial/{name}": value for name, value in weights.initial.items()}
    return _file(tensors)


def net_tensors(
    world: World, net: Submodel, names: Sequence[str], optional: Sequence[str] = ()
) -> dict[str, ExpectedTensor]:
    """Return the tensors that the weights of a net have, by scope and name.

    Args:
        world: Family and precision.
        net: Sub-model, whose positions give the shapes.
        names: Names of its weights without scope.
        optional: Those of `names` that a file may lack.
    """
    family = world.family
    layout = family.layout
    kept = {axis: len(positions) for axis, positions in net.index.items()}
    sizes = layout.sizes | net.arch.sizes | kept
    real = {*family.trainable, *family.statistics}  # Constants may be integers.
    return {
        net.scope + name: ExpectedTensor(
            tuple(layout.shape(name, sizes)),
            world.dtype if name in real else None,
            name in optional,
        )
        for name in names
    }


def read_weights(
    data: bytes,
    weights: Mapping[str, ExpectedTensor],
    initial: Mapping[str, ExpectedTensor],
    title: str,
) -> TaskWeights:
    """Read the weights of a task. The header is compared before any tensor is allocated.

    Args:
        data: A safetensors file.
        weights: Weights of the server that it must have, by scope and name.
        initial: Initial weights that it must have, by scope and name.
        title: Name of the file for messages.

    Raises:
        RecordError: A name, type, shape or length is not that of the task.
    """
    expected = {f"weights/{name}": tensor for name, tensor in weights.items()}
    expected |= {f"initial/{name}": tensor for name, tensor in initial.items()}
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "initial": {}}
    for path, value in _read(data, expected, title).items():
        group, _, name = path.partition("/")
        groups[group][name] = value
    return TaskWeights(groups["weights"], groups["initial"])


def read_sums(
    data: bytes,
    counts: Sequence[int],
    expected: Sequence[Mapping[str, ExpectedTensor]],
    title: str,
) -> list[dict[str, Tensor]]:
    """Read the sums of all tasks. The header is compared before any tensor is allocated.

    Args:
        data: A safetensors file.
        counts: Counts of the tasks. A task with a count of 0 must have no sums.
        expected: Sums of each task, by name.
        title: Name of the file for messages.

    Raises:
        RecordError: A name, type, shape or length is not that of a task, or a value is not finite.
    """
    wanted = {
        f"{number}/{name}": tensor
        for number, (count, tensors) in enumerate(zip(counts, expected, strict=True))
        for name, tensor in tensors.items()
        if count
    }
    sums: list[dict[str, Tensor]] = [{} for _ in counts]
    for path, value in _read(data, wanted, title).items():
        if not bool(value.isfinite().all()):
            raise FormatError(f"{title} has values of {path!r} that are not finite.")
        number, _, name = path.partition("/")
        sums[int(number)][name] = value
    return sums


def _read(data: bytes, expected: Mapping[str, ExpectedTensor], title: str) -> dict[str, Tensor]:
    """Return the tensors of a file by path, if its header is as expected."""
    file = TensorFile.of(data, title)
    if problem := _difference(file.entries, expected):
        raise FormatError(f"{title} does not fit its task: {problem}.")
    return file.tensors(CPU)


def _difference(found: Mapping[str, TensorEntry], expected: Mapping[str, ExpectedTensor]) -> str:
    """Describe the first difference between a header and what a task says. Empty: none."""
    if unknown := sorted(found.keys() - expected.keys()):
        return f"it has {unknown[0]!r}, which the task does not have"
    missing = [path for path, tensor in expected.items() if not tensor.is_optional]
    if missing := sorted({*missing} - found.keys()):
        return f"it lacks {missing[0]!r}"
    for path, entry in found.items():
        tensor = expected[path]
        dtype = tensor.dtype or entry.dtype
        if (entry.dtype, entry.shape) != (dtype, tensor.shape):
            return (
                f"{path!r} is {entry.dtype} {list(entry.shape)}; {dtype} {list(tensor.shape)} "
                "would fit"
            )
    return ""
