"""Text for next-word prediction, worked out by hand."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from fedquilt.data import Natural, source
from fedquilt.data.sources.text import Texts, Tokens, frequent, predict_words
from fedquilt.errors import ConfigError, DataError

PAD, OOV, BOS, EOS, A, B = range(6)
_ = -100


def test_every_position_predicts_the_next():
    train, test = Texts(["a b a", "a c"], None), Texts(["b"], None)
    pool = predict_words(train, test, "two", Tokens(2, length=5))
    assert pool.class_names == ("<pad>", "<oov>", "<bos>", "<eos>", "a", "b")
    assert pool.num_classes == 6
    assert pool.inputs.tolist() == [[BOS, A, B, A, PAD], [BOS, A, OOV, PAD, PAD]]
    assert pool.targets.tolist() == [[A, B, A, EOS, _], [A, OOV, EOS, _, _]]
    assert pool.test_inputs.tolist() == [[BOS, B, PAD, PAD, PAD]]
    assert pool.test_targets.tolist() == [[B, EOS, _, _, _]]


def test_long_texts_are_split_or_truncated():
    train, test = Texts(["a b a b"], ["x"]), Texts(["a"], ["x"])
    split = predict_words(train, test, "long", Tokens(2, length=2))
    assert split.inputs.tolist() == [[BOS, A], [B, A], [B, PAD]]
    assert split.targets.tolist() == [[A, B], [A, B], [EOS, _]]
    assert split.clients.tolist() == [0, 0, 0]
    whole = predict_words(train, test, "long", Tokens(2, length=2, long="truncate"))
    assert (whole.inputs.tolist(), whole.targets.tolist()) == ([[BOS, A]], [[A, B]])


def test_special_targets_may_be_left_out_of_the_count():
    texts = Texts(["a b c"], None)
    pool = predict_words(texts, texts, "plain", Tokens(2, length=4, count_special=False))
    assert pool.inputs.tolist() == [[BOS, A, B, OOV]]
    assert pool.targets.tolist() == pool.test_targets.tolist() == [[A, B, _, _]]


def test_the_vocabulary_is_that_of_the_training_part_by_frequency_then_alphabet():
    assert frequent([["b", "a", "c"], ["c"]], 2) == ["c", "a"]
    pool = predict_words(Texts(["b b a"], None), Texts(["z z z z"], None), "v", Tokens(9))
    assert pool.class_names[4:] == ("b", "a")


def test_words_keep_their_apostrophes_and_marks_are_words():
    texts = Texts(["O'erflows the Measure: don't!"], None)
    assert predict_words(texts, texts, "w", Tokens(lower=False)).class_names[4:] == (
        "!",
        ":",
        "Measure",
        "O'erflows",
        "don't",
        "the",
    )
    assert "measure" in predict_words(texts, texts, "w").class_names


PLAY = {
    "ROMEO": [f"love {n}" for n in range(10)],
    "JULIET": [f"night {n}" for n in range(5)],
    "PAGE": ["away"],
}


def as_dict(path):
    path = path / "play.json"
    path.write_text(json.dumps(PLAY))
    return path


def as_list(path):
    path = path / "play.json"
    path.write_text(
        json.dumps([{"client": who, "text": line} for who, lines in PLAY.items() for line in lines])
    )
    return path


def as_npz(path):
    path = path / "play.npz"
    texts = ["".join(f"{line}\n" for line in lines).encode() for lines in PLAY.values()]
    starts = np.cumsum([0, *map(len, texts)])[:-1]
    np.savez(
        path,
        text=np.frombuffer(b"".join(texts), np.uint8),
        start=starts,
        users=np.array(list(PLAY)),
    )
    return path


@pytest.mark.parametrize("form", [as_dict, as_list, as_npz])
def test_roles_are_clients_and_a_fifth_of_each_roles_texts_is_held_out(tmp_path, form):
    pool = source(str(form(tmp_path)))(length=4)
    data = pool.partition(partition=Natural())  # in the order of their names
    assert data.parts.sizes.tolist() == [4, 1, 8]
    assert data.test_parts.sizes.tolist() == [1, 0, 2]
    love, night = pool.class_names.index("love"), pool.class_names.index("night")
    assert set(data.inputs[data.parts[2], 1].tolist()) == {love}
    assert set(data.test_inputs[data.test_parts[0], 1].tolist()) == {night}


def test_whole_texts_are_held_out_not_pieces_of_them(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("\n\n".join(" ".join(f"w{line}" for _ in range(20)) for line in range(10)))
    pool = source(str(path))(length=5)
    assert pool.clients is None
    words = [set(x[(x > EOS)].tolist()) for x in (pool.inputs, pool.test_inputs)]
    assert len(words[0]) == 8  # the words of held-out texts are not in the vocabulary
    assert words[1] == set()
    assert len(pool.inputs) == 8 * 5  # 21 predictions a text


def test_clients_hold_the_words_they_say():
    texts = Texts(["a", "b"], ["x", "y"])
    data = predict_words(texts, texts, "t").partition(partition=Natural())
    assert data.classes_present(0, 6).nonzero().flatten().tolist() == [EOS, A]
    assert data.classes_present(1, 6).nonzero().flatten().tolist() == [EOS, B]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "{", "cannot be read as text"),
        ("a.json", '{"x": 3}', "is neither"),
        ("a.json", '{"x": [1]}', "is neither"),
        ("a.json", '[{"text": "no client"}]', "is neither"),
        ("a.json", "[]", "has no text in it"),
        ("a.txt", " \n \n", "has no text in it"),
        ("a.txt", b"\xff\xfe\xfa", "cannot be read as text"),
        ("a.txt", "one\ntwo", "2 texts are too few to hold out a fifth"),
    ],
)
def test_other_files_than_text_are_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        source(str(path))()


def test_impossible_options_are_refused():
    with pytest.raises(ConfigError, match="length = 0 was asked for"):
        predict_words(Texts(["a"], None), Texts(["a"], None), "t", Tokens(length=0))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_language_model_learns_it(engine):
    import fedquilt as fq
    from fedquilt.models import TransformerLM

    lines = Texts(["up down up down up down"] * 30, [str(n % 3) for n in range(30)])
    data = predict_words(
        lines, Texts(lines.lines[:3], lines.users[:3]), "swing", Tokens(length=8)
    ).partition(partition=Natural())

    def net() -> torch.nn.Module:
        return TransformerLM(
            data.num_classes, width=16, depth=1, heads=2, head_dim=8, hidden=32, dropout=0.0
        )

    family = fq.trace(net, data.example)
    method = fq.methods.FedAvg(local=fq.LocalTraining(fq.optimizers.Adam(0.01), batch_size=5))
    run = fq.run(method, family, data, fq.Fleet.of([1.0], 3, 3), engine, rounds=10)
    assert run.accuracy["1.0"] == 1.0  # of the seven positions; the padded one does not count
