"""A small run from the command line, ways to damage its folder, and hostile manifests with the
right checksum.
"""

from __future__ import annotations

import json
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.runs.checkpoint import _digest
from fedquilt.runs.folder_files import read_records

BEGUN = 3  # rounds of the folders that are damaged
TOTAL = 5  # rounds of the run that a resumed one is compared with
RUN = [
    *(
        "run",
        "--json",
        "--method",
        "fedavg",
        "--data",
        "diabetes",
        "--model",
        "mlp",
        "--clients",
        "4",
        "--cohort",
        "2",
    ),
    *(
        "--set",
        "checkpoint.rounds=1",
        "--set",
        "engine.threads=1",
        "--set",
        "method.local.keep_optimizer=true",
    ),
    # so that the best round is kept, too
    *(
        "--set",
        "evaluation.every=1",
        "--set",
        "data.validation=0.2",
    ),
]


def train(out: Path, rounds: int, seed: int = 0) -> None:
    assert main([*RUN, "--rounds", str(rounds), "--seed", str(seed), "--out", str(out)]) == 0


@contextmanager
def warnings_of_fedquilt() -> Iterator[list[str]]:
    """Collect what is logged in the block."""
    messages: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    collector = Collector()
    logger = logging.getLogger("fedquilt")
    logger.addHandler(collector)
    try:
        yield messages
    finally:
        logger.removeHandler(collector)


# --- damage -------------------------------------------------------------------------------------


def _truncate(file: Path, draw: random.Random, other: Path) -> None:
    os.truncate(file, draw.randrange(file.stat().st_size))


def _flip(file: Path, draw: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    file.write_bytes(content)


def _flip_many(file: Path, draw: random.Random, other: Path) -> None:
    for _ in range(draw.randint(2, 30)):
        _flip(file, draw, other)


def _zero(file: Path, draw: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    first = draw.randrange(len(content))
    last = min(len(content), first + draw.randint(1, 200))
    content[first:last] = bytes(last - first)
    file.write_bytes(content)


def _append(file: Path, draw: random.Random, other: Path) -> None:
    with file.open("ab") as handle:
        handle.write(draw.randbytes(draw.randint(1, 100)))


def _change_digit(file: Path, draw: random.Random, other: Path) -> None:
    content = bytearray(file.read_bytes())
    places = [place for place, byte in enumerate(content) if byte in b"0123456789"]
    place = draw.choice(places or range(len(content)))
    content[place] = draw.choice([byte for byte in b"0123456789" if byte != content[place]])
    file.write_bytes(content)


def _swap_lines(file: Path, draw: random.Random, other: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    draw.shuffle(lines)
    file.write_bytes(b"".join(lines))


def _empty(file: Path, draw: random.Random, other: Path) -> None:
    file.write_bytes(b"")


def _delete(file: Path, draw: random.Random, other: Path) -> None:
    file.unlink()


def _replace_by_folder(file: Path, draw: random.Random, other: Path) -> None:
    file.unlink()
    file.mkdir()


def _replace_by_link(file: Path, draw: random.Random, other: Path) -> None:
    file.unlink()
    file.symlink_to(other / "config.toml")


def _replace_by_fifo(file: Path, draw: random.Random, other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _take_from_another_run(file: Path, draw: random.Random, other: Path) -> None:
    there = (
        other / "checkpoint" / file.name if file.parent.name == "checkpoint" else other / file.name
    )
    shutil.copy(there, file)


Harm = Callable[[Path, random.Random, Path], None]
HARMS: tuple[Harm, ...] = (
    *(
        _truncate,
        _flip,
        _flip,
        _flip_many,
        _zero,
        _append,
        _change_digit,
        _change_digit,
        _swap_lines,
    ),
    *(
        _empty,
        _delete,
        _replace_by_folder,
        _replace_by_link,
        _replace_by_fifo,
        _take_from_another_run,
    ),
)


def damage(folder: Path, draw: random.Random, other: Path) -> str:
    """Damage one file of a run's folder, and return what was done.

    Args:
        folder: Folder of the run.
        draw: Random numbers.
        other: Folder of another run of the same length.
    """
    names = ["config.toml", "rounds.jsonl", "summary.json"]
    names += [f"checkpoint/{path.name}" for path in sorted((folder / "checkpoint").iterdir())]
    name = draw.choice(names)
    harm = draw.choice(HARMS)
    harm(folder / name, draw, other)
    return f"{harm.__name__.strip('_')} {name}"


# --- hostile manifests --------------------------------------------------------------------------


def _nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


LARGE = 10**30
ODD: tuple[Any, ...] = (
    None,
    "x",
    -1,
    LARGE,
    1.5,
    True,
    [],
    {},
    [1],
    {"a": 1},
    "../../outside.safetensors",
)
VALUES: Mapping[str, tuple[Any, ...]] = {
    "round": ODD,
    "server": ODD,
    "server.name": (
        *ODD,
        "/etc/passwd",
        "..",
        ".",
        "",
        "lock",
        "00000003.json",
        "a\x00b",
        "checkpoint/00000003.safetensors",
    ),
    "server.size": ODD,
    "server.sha256": ODD,
    # An empty list is a value that runs without memories write.
    "memory": (
        *(value for value in ODD if value != []),
        [None],
        [[]],
        [{"name": "../x", "size": 0, "sha256": ""}],
    ),
    "about": (*ODD, _nested(400)),
    "about.run": ODD,
    "about.engine": (
        *ODD,
        *(
            {"train": "x"},
            {"memory": "x"},
            {"memory": -5},
            {"memory": LARGE},
            {"memory": [1]},
            {"data": 1},
        ),
        *({"__class__": "x"}, {"_federation": "x"}, {"device": "cuda"}),
    ),
    "about.threads": ODD,
    "about.here": ODD,
    "about.check": ODD,
    "about.sample": (
        *ODD,
        {"shape": [LARGE], "dtype": "float32", "classes": 0},
        {"shape": [1], "dtype": "load"},
    ),
    "format": ODD,
}


def hostile_manifests(manifest: Mapping[str, Any]) -> list[tuple[str, bytes]]:
    """Return manifests with one odd value each and the right checksum, and content that is no
    manifest at all.
    """
    found = [
        ("100,000 brackets", 100_000 * b"["),
        ("100,000 objects", 100_000 * b'{"a":'),
        ("no object", b"[]"),
        ("not UTF-8", b"\xff\xfe"),
        ("a number of 10,000 digits", b"1" * 10_000),
    ]
    for path, values in VALUES.items():
        for value in values:
            plain = json.loads(json.dumps(manifest))
            inner = plain
            *parents, name = path.split(".")
            for parent in parents:
                inner = inner[parent]
            if inner.get(name) == value:
                continue
            inner[name] = value
            found.append((f"{path} = {str(value)[:40]}", signed(plain)))
        *parents, name = path.split(".")
        plain = json.loads(json.dumps(manifest))
        inner = plain
        for parent in parents:
            inner = inner[parent]
        del inner[name]
        found.append((f"no {path}", signed(plain)))
    return found


def signed(plain: dict[str, Any]) -> bytes:
    """Return a manifest as text with the checksum of its content."""
    plain.pop("sha256", None)
    return json.dumps({**plain, "sha256": _digest(plain)}).encode()


# --- kills --------------------------------------------------------------------------------------


def killed_at(operation: int, folder: Path, command: list[str]) -> int | None:
    """Run a command in a process that is killed just before one of its operations on files below a
    folder.

    Args:
        operation: Number of the operation, from 0.
        folder: Absolute path of the folder.
        command: Arguments of `fedquilt`.

    Returns:
        The exit status. None: the process was killed.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _run_until(operation, str(folder), command)
    _, status = os.waitpid(pid, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _run_until(operation: int, folder: str, command: list[str]) -> None:
    left = operation

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal left
        if event in ("open", "os.mkdir", "os.remove", "os.rename", "os.truncate") and folder in str(
            args[0]
        ):
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 70
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2):
            os.dup2(nothing, stream)
        sys.addaudithook(hook)
        torch.set_num_threads(1)
        status = main(command)
    finally:
        os._exit(status)


# --- comparison ---------------------------------------------------------------------------------


def state_of(folder: Path) -> list[Any]:
    """Return the weights and memories of a run as plain values that can be compared bit for bit."""
    server = fq.load_state(folder)
    memories = [
        (key, memory.steps, _values(memory.weights)) for key, memory in server.memory.items()
    ]
    slots = [(name, _values(values)) for name, values in server.slots.items()]
    return [server.round, _values(server.weights), slots, memories]


def best_of(folder: Path) -> list[Any]:
    """Return the best round of a run on validation samples, with its weights."""
    run = fq.load_run(folder)
    assert run.best is not None
    return [run.best.to_dict(), _values(run.at("best").server.weights)]


def _values(tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, bytes]]:
    return [(name, value.contiguous().numpy().tobytes()) for name, value in tensors.items()]


def rounds_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rounds of a run without the times that no two runs share."""
    times = ("seconds", "server_seconds")
    plain = [record.to_dict() for record in read_records(folder)]
    return [{key: value for key, value in record.items() if key not in times} for record in plain]
