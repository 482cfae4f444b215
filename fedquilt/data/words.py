"""Text for next-word prediction: words, a vocabulary of the frequent ones, and windows of fixed length.

As in the Stack Overflow task of Reddi et al. (2021), which FedRolex uses: <bos> w1 … wn <eos>, every position predicts
the next one. Padding counts nowhere. Predicting <oov> and <eos> right counts as right, as FedRolex has it; with
`count_special = False` such targets are ignored, and accuracy is over words of the vocabulary alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedquilt.checks import File
from fedquilt.data.arrays import read_arrays
from fedquilt.data.federated import IGNORED, Pool, held_out
from fedquilt.errors import ConfigError, DataError
from fedquilt.tensor_files import too_large

PAD, OOV, BOS, EOS = range(4)
SPECIAL = ("<pad>", "<oov>", "<bos>", "<eos>")
_WORD = re.compile(
    r"\w+(?:['’]\w+)*|[^\w\s]"
)  # words, with what an apostrophe joins, and marks one by one

Cut = Literal["split", "truncate"]


class Texts(NamedTuple):
    """Texts, and whose each is where that is known."""

    lines: list[str]
    users: list[str] | None


def text(
    path: File,
    vocabulary: int = 10_000,
    length: int = 20,
    long: Cut = "split",
    lower: bool = True,
    count_special: bool = True,
    max_bytes: int = 0,  # Bytes that the file may take in memory. 0: half of the free memory.
) -> Pool:
    """Next-word prediction on a .txt, .json or .npz file; a fifth of every user's texts is held out for testing.

    `vocabulary` words and four special tokens are the classes. A text longer than `length` is split into several
    samples, or truncated.
    """
    texts = _read(Path(path), max_bytes)
    return predict_words(
        texts, None, Path(path).stem, vocabulary, length, long, lower, count_special
    )


def predict_words(
    train: Texts,
    test: Texts | None,
    name: str,
    vocabulary: int = 10_000,
    length: int = 20,
    long: Cut = "split",
    lower: bool = True,
    count_special: bool = True,
) -> Pool:
    """Next-word prediction from texts in memory."""
    for option, value in (("vocabulary", vocabulary), ("length", length)):
        if value < 1:
            raise ConfigError(f"{option} = {value} was asked for; it must be at least 1.")
    names = {user for texts in (train, test) if texts and texts.users for user in texts.users}
    users = {user: code for code, user in enumerate(sorted(names))}
    codes = (
        None
        if train.users is None
        else torch.tensor([users[user] for user in train.users], dtype=torch.int64)
    )
    lines, tests, test_codes = train.lines, [] if test is None else test.lines, None
    if test is None:
        # Whole texts are held out, not windows: the rest of a held-out text would be in the training set.
        kept, held = held_out(len(lines), codes, name, "texts")
        lines, tests = [lines[at] for at in kept.tolist()], [lines[at] for at in held.tolist()]
        codes, test_codes = (None, None) if codes is None else (codes[kept], codes[held])
    elif test.users is not None and codes is not None:
        test_codes = torch.tensor([users[user] for user in test.users], dtype=torch.int64)
    words, test_words = ([_words(line, lower) for line in some] for some in (lines, tests))
    known = frequent(words, vocabulary)
    places = {word: len(SPECIAL) + place for place, word in enumerate(known)}
    (x, y, of), (tx, ty, test_of) = (
        _windows(some, places, length, long) for some in (words, test_words)
    )
    if not count_special:
        for targets in (y, ty):
            targets[(targets == OOV) | (targets == EOS)] = IGNORED
    return Pool.of(
        (x, y),
        (tx, ty),
        clients=None if codes is None else codes[of],
        test_clients=None if test_codes is None else test_codes[test_of],
        name=name,
        num_classes=len(SPECIAL) + len(known),
        class_names=(*SPECIAL, *known),
    )


def frequent(texts: Sequence[Sequence[str]], count: int) -> list[str]:
    """The most frequent words; among equals the first in the alphabet."""
    counts = Counter(chain.from_iterable(texts))
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def _words(line: str, lower: bool) -> list[str]:
    return _WORD.findall(line.lower() if lower else line)


def _windows(
    texts: Sequence[Sequence[str]], places: dict[str, int], length: int, long: Cut
) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, the text each comes from). Inputs are padded with <pad>, targets with what never counts."""
    tokens = [[BOS, *(places.get(word, OOV) for word in words), EOS] for words in texts]
    starts = [range(0, len(row) - 1, length) if long == "split" else range(1) for row in tokens]
    count = sum(map(len, starts))
    inputs, targets = np.full((count, length), PAD), np.full((count, length), IGNORED)
    of, place = np.empty(count, np.int64), 0
    for text_, (row, begins) in enumerate(zip(tokens, starts, strict=True)):
        for start in begins:
            window = row[start : start + length + 1]
            inputs[place, : len(window) - 1] = window[:-1]
            targets[place, : len(window) - 1] = window[1:]
            of[place] = text_
            place += 1
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(of)


# --- files ------------------------------------------------------------------------------------------------------


def _read(path: Path, max_bytes: int) -> Texts:
    if path.suffix == ".npz":
        texts = _from_npz(path, read_arrays(path, max_bytes))
    elif path.suffix == ".json":
        texts = _from_json(path, _json(path, _content(path, max_bytes)))
    else:
        lines = _decoded(path, _content(path, max_bytes)).splitlines()
        texts = Texts([line for line in lines if line.strip()], None)
    if not texts.lines:
        raise DataError(f"{path} has no text in it.")
    return texts


def _content(path: Path, max_bytes: int) -> bytes:
    try:
        if problem := too_large(path.stat().st_size, max_bytes):
            raise DataError(f"{path} is not read: {problem}")
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read as text: {error.strerror or error}.") from error


def _decoded(path: Path, content: bytes, place: str = "") -> str:
    """Return bytes as text, or say which line is none; `place` names a part of a file."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{path} cannot be read as text: line {line}{place} is not UTF-8, because of the byte "
            f"{content[error.start]:#x} at {error.start:,}. Save the file as UTF-8."
        ) from error


def _json(path: Path, content: bytes) -> Any:
    try:
        return json.loads(_decoded(path, content))
    except RecursionError as error:
        raise DataError(f"{path} cannot be read as text: its JSON nests too deeply.") from error
    except (
        ValueError
    ) as error:  # JSONDecodeError, with line and column, or a number of more than 4,300 digits
        raise DataError(f"{path} cannot be read as text: it is no JSON: {error}.") from error


def _from_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> Texts:
    """Read `text`, UTF-8 bytes with one text a line, user after user, and `start`, where each user's begin."""
    if missing := [key for key in ("text", "start") if key not in arrays]:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}. Found: {', '.join(arrays) or 'nothing'}."
        )
    text_, start = arrays["text"], arrays["start"]
    if text_.dtype != np.uint8 or text_.ndim != 1:
        raise DataError(
            f"{path}: the array 'text' is {text_.dtype} of shape {text_.shape}; bytes (uint8) in a row fit."
        )
    if start.dtype.kind not in "ui" or start.ndim != 1:
        raise DataError(
            f"{path}: the array 'start' is {start.dtype} of shape {start.shape}; whole numbers in a row fit."
        )
    ends = [*start.tolist()[1:], len(text_)]
    for user, (first, last) in enumerate(zip(start.tolist(), ends, strict=True)):
        if not 0 <= first <= last <= len(text_):
            raise DataError(
                f"{path}: the text of user {user} goes from byte {first} to {last} by the array 'start'; it must lie "
                f"in the {len(text_):,} bytes of 'text', one user after another."
            )
    names = arrays.get("users", np.arange(len(start)).astype(str))
    if names.dtype.kind != "U" or names.shape != start.shape:
        raise DataError(
            f"{path}: the array 'users' is {names.dtype} of shape {names.shape}; {len(start)} names fit."
        )

    lines: list[str] = []
    users: list[str] = []
    for name, first, last in zip(names.tolist(), start.tolist(), ends, strict=True):
        decoded = _decoded(path, text_[first:last].tobytes(), f" of user {name!r}")
        own = [line for line in decoded.splitlines() if line.strip()]
        lines += own
        users += [name] * len(own)
    return Texts(lines, users)


def _from_json(path: Path, found: Any) -> Texts:
    """Read {user: [text, …]}, or [{"client": user, "text": text}, …]."""
    if isinstance(found, dict) and all(isinstance(own, list) for own in found.values()):
        pairs = [(user, one) for user, own in found.items() for one in own]
    elif isinstance(found, list) and all(
        isinstance(one, dict) and {"client", "text"} <= one.keys() for one in found
    ):
        pairs = [(str(one["client"]), one["text"]) for one in found]
    else:
        pairs = [("", None)]
    wrong = [place for place, (_, one) in enumerate(pairs) if not isinstance(one, str)]
    if wrong:
        raise DataError(
            f'{path} is neither {{user: [text, …]}} nor [{{"client": user, "text": text}}, …]: entry {wrong[0]} is no '
            "text."
        )
    pairs = [(user, one) for user, one in pairs if one.strip()]
    return Texts([one for _, one in pairs], [user for user, _ in pairs])
