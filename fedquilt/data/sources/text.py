"""Text for next-word prediction: words, a vocabulary of frequent words, and windows.

This is the Stack Overflow task of Reddi et al. (2021), which FedRolex uses. A text is <bos> w1 … wn
<eos>, and every position predicts the next token. Padding does not count. As in FedRolex, correct
predictions of <oov> and <eos> count as correct. With `count_special = False` such targets are
ignored, and accuracy is over words of the vocabulary alone.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedquilt.checks import File
from fedquilt.data.convert import IGNORED
from fedquilt.data.holdout import held_out
from fedquilt.data.origin import remembered
from fedquilt.data.pool import Pool
from fedquilt.data.sources.arrays import read_arrays
from fedquilt.errors import ConfigError, DataError
from fedquilt.storage.tensor_files import too_large

PAD, OOV, BOS, EOS = range(4)
SPECIAL = ("<pad>", "<oov>", "<bos>", "<eos>")
# Words, including parts joined by an apostrophe, and punctuation marks one by one.
_WORD = re.compile(r"\w+(?:['’]\w+)*|[^\w\s]")
Cut = Literal["split", "truncate"]


class Texts(NamedTuple):
    """Texts, and the user of each. `users` is None if the users are unknown."""

    lines: list[str]
    users: list[str] | None


@dataclass(frozen=True)
class Tokens:
    """Settings by which texts become samples of tokens."""

    vocabulary: int = 10_000  # Number of words in the vocabulary. Four special tokens are added.
    length: int = 20  # Tokens per sample.
    long: Cut = "split"  # "split" longer texts into several samples, or "truncate" them.
    lower: bool = True  # Convert text to lower case.
    count_special: bool = True  # True: <oov> and <eos> count as targets.

    def __post_init__(self) -> None:
        for option, value in (("vocabulary", self.vocabulary), ("length", self.length)):
            if value < 1:
                raise ConfigError(f"{option} = {value} was asked for; it must be at least 1.")


@remembered
def text(
    path: File,  # Path of the .txt, .json or .npz file.
    vocabulary: int = 10_000,  # Number of words in the vocabulary. Four special tokens are added.
    length: int = 20,  # Tokens per sample.
    long: Cut = "split",  # Split longer texts into several samples, or truncate them.
    lower: bool = True,  # Convert text to lower case.
    count_special: bool = True,  # Let <oov> and <eos> count as targets.
    max_bytes: int = 0,  # Bytes that the file may take in memory. 0: half of the free memory.
) -> Pool:
    """Read a .txt, .json or .npz file for next-word prediction.

    A fifth of every user's texts is held out for testing, or of all texts without users. The
    classes are the words of the vocabulary and four special tokens.

    Args:
        path: Path of the .txt, .json or .npz file.
        vocabulary: Number of words in the vocabulary. Four special tokens are added.
        length: Tokens per sample. Shorter texts are padded.
        long: "split": longer texts become several samples. "truncate": they are cut off.
        lower: True: convert text to lower case. False: no effect.
        count_special: True: <oov> and <eos> count as targets. False: they are ignored.
        max_bytes: Bytes that the file may take in memory. 0: half of the free memory.
    """
    texts = _read(Path(path), max_bytes)
    tokens = Tokens(vocabulary, length, long, lower, count_special)
    return predict_words(texts, None, Path(path).stem, tokens)


def predict_words(train: Texts, test: Texts | None, name: str, tokens: Tokens = Tokens()) -> Pool:
    """Return a pool for next-word prediction from texts in memory. Users become clients.

    The vocabulary is the most frequent words of the training texts alone.

    Args:
        train: Training texts.
        test: Test texts. None: a fifth of every user's training texts is held out.
        name: Name of the data for messages.
        tokens: Settings by which texts become samples.
    """
    names = {user for texts in (train, test) if texts and texts.users for user in texts.users}
    users = {user: code for code, user in enumerate(sorted(names))}
    codes = test_codes = None  # (text,) User of each text, as a number.
    if train.users is not None:
        codes = torch.tensor([users[user] for user in train.users], dtype=torch.int64)
    if test is None:
        # Whole texts are held out and not windows, because other windows of the same text would
        # be in the training set.
        training_rows, test_rows = held_out(len(train.lines), codes, name, "texts")
        lines = [train.lines[row] for row in training_rows.tolist()]
        test_lines = [train.lines[row] for row in test_rows.tolist()]
        if codes is not None:
            codes, test_codes = codes[training_rows], codes[test_rows]
    else:
        lines, test_lines = train.lines, test.lines
        if test.users is not None and codes is not None:
            test_codes = torch.tensor([users[user] for user in test.users], dtype=torch.int64)

    words = [_words(line, tokens.lower) for line in lines]
    test_words = [_words(line, tokens.lower) for line in test_lines]
    frequent_words = frequent(words, tokens.vocabulary)
    codes_by_word = {word: len(SPECIAL) + rank for rank, word in enumerate(frequent_words)}
    inputs, targets, texts = _windows(words, codes_by_word, tokens)
    test_inputs, test_targets, test_texts = _windows(test_words, codes_by_word, tokens)
    return Pool.of(
        (inputs, targets),
        (test_inputs, test_targets),
        clients=None if codes is None else codes[texts],
        test_clients=None if test_codes is None else test_codes[test_texts],
        name=name,
        num_classes=len(SPECIAL) + len(frequent_words),
        class_names=(*SPECIAL, *frequent_words),
    )


def frequent(texts: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return the `count` most frequent words in all texts together, the most frequent first.

    Words of equal frequency are in alphabetical order. Each text is a list of words.
    """
    counts = Counter(chain.from_iterable(texts))
    return sorted(counts, key=lambda word: (-counts[word], word))[:count]


def _words(line: str, lower: bool) -> list[str]:
    return _WORD.findall(line.lower() if lower else line)


def _windows(
    texts: Sequence[Sequence[str]], codes_by_word: dict[str, int], tokens: Tokens
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut texts into windows of equal length. Targets are the inputs shifted by one token.

    Every text gets <bos> before and <eos> behind it. Words outside of the vocabulary are <oov>.

    Args:
        texts: Words of each text.
        codes_by_word: Token of each word in the vocabulary.
        tokens: Length of a window, and what happens to longer texts.

    Returns:
        Inputs (window, length) padded with <pad>, targets (window, length) padded with −100, and
        the index of the text that each window comes from.
    """
    length, is_split = tokens.length, tokens.long == "split"
    rows = [[BOS, *(codes_by_word.get(word, OOV) for word in words), EOS] for words in texts]
    starts = [range(0, len(row) - 1, length) if is_split else range(1) for row in rows]
    count = sum(map(len, starts))
    inputs, targets = np.full((count, length), PAD), np.full((count, length), IGNORED)
    text_rows, window_index = np.empty(count, np.int64), 0
    for text_index, (row, begins) in enumerate(zip(rows, starts, strict=True)):
        for start in begins:
            window = row[start : start + length + 1]
            inputs[window_index, : len(window) - 1] = window[:-1]
            targets[window_index, : len(window) - 1] = window[1:]
            text_rows[window_index] = text_index
            window_index += 1
    if not tokens.count_special:
        targets[(targets == OOV) | (targets == EOS)] = IGNORED
    return torch.from_numpy(inputs), torch.from_numpy(targets), torch.from_numpy(text_rows)


# --- files --------------------------------------------------------------------------------------


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
    """Decode UTF-8 bytes, or raise an error that names the line.

    Args:
        path: File, for the message.
        content: Bytes to decode.
        place: Part of the file, for the message. Empty: the file has no parts.
    """
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
    # ValueError: a JSONDecodeError with line and column, or a number of more than 4,300 digits.
    except ValueError as error:
        raise DataError(f"{path} cannot be read as text: it is no JSON: {error}.") from error


def _from_npz(path: Path, arrays: Mapping[str, np.ndarray]) -> Texts:
    """Read texts from the arrays `text`, `start` and, if present, `users`.

    `text` has UTF-8 bytes with one text per line, user after user. `start` has the index of each
    user's first byte. `users` has the name of each user, which is a number without it. Empty lines
    are left out.
    """
    if missing := [key for key in ("text", "start") if key not in arrays]:
        raise DataError(
            f"{path} has no {' and no '.join(missing)}. Found: {', '.join(arrays) or 'nothing'}."
        )
    text_, start = arrays["text"], arrays["start"]
    if text_.dtype != np.uint8 or text_.ndim != 1:
        raise DataError(
            f"{path}: the array 'text' is {text_.dtype} of shape {text_.shape}; bytes (uint8) in a "
            "row fit."
        )
    if start.dtype.kind not in "ui" or start.ndim != 1:
        raise DataError(
            f"{path}: the array 'start' is {start.dtype} of shape {start.shape}; whole numbers in "
            "a row fit."
        )
    ends = [*start.tolist()[1:], len(text_)]
    for user, (first, last) in enumerate(zip(start.tolist(), ends, strict=True)):
        if not 0 <= first <= last <= len(text_):
            raise DataError(
                f"{path}: the text of user {user} goes from byte {first} to {last} by the array "
                f"'start'; it must lie in the {len(text_):,} bytes of 'text', one user after "
                "another."
            )
    names = arrays.get("users", np.arange(len(start)).astype(str))
    if names.dtype.kind != "U" or names.shape != start.shape:
        raise DataError(
            f"{path}: the array 'users' is {names.dtype} of shape {names.shape}; {len(start)} "
            "names fit."
        )

    lines: list[str] = []
    users: list[str] = []
    for name, first, last in zip(names.tolist(), start.tolist(), ends, strict=True):
        decoded = _decoded(path, text_[first:last].tobytes(), f" of user {name!r}")
        user_lines = [line for line in decoded.splitlines() if line.strip()]
        lines += user_lines
        users += [name] * len(user_lines)
    return Texts(lines, users)


def _from_json(path: Path, found: Any) -> Texts:
    """Return the texts and users of a parsed JSON file. Empty texts are left out.

    The file has {user: [text, …]}, or [{"client": user, "text": text}, …].

    Args:
        path: The file, for messages.
        found: Its parsed contents.

    Raises:
        DataError: The contents have another form.
    """
    if isinstance(found, dict) and all(
        isinstance(user_texts, list) for user_texts in found.values()
    ):
        pairs = [(user, entry) for user, user_texts in found.items() for entry in user_texts]
    elif isinstance(found, list) and all(
        isinstance(entry, dict) and {"client", "text"} <= entry.keys() for entry in found
    ):
        pairs = [(str(entry["client"]), entry["text"]) for entry in found]
    else:
        pairs = [("", None)]
    bad_entries = [index for index, (_, entry) in enumerate(pairs) if not isinstance(entry, str)]
    if bad_entries:
        raise DataError(
            f'{path} is neither {{user: [text, …]}} nor [{{"client": user, "text": text}}, …]: '
            f"entry {bad_entries[0]} is no text."
        )
    pairs = [(user, entry) for user, entry in pairs if entry.strip()]
    return Texts([entry for _, entry in pairs], [user for user, _ in pairs])
