"""Plots of the samples of each client."""

from __future__ import annotations

import pytest
import torch

from fedquilt.data import FederatedData, Pool, digits
from fedquilt.data.plot import blocks, counts, figure
from fedquilt.data.sources.text import Texts, Tokens, predict_words
from fedquilt.errors import ConfigError, DataError


def small() -> FederatedData:
    x, y = torch.zeros(7, 1), torch.tensor([0, 0, 1, 2, 2, 2, 2])
    pool = Pool.of(
        (x, y),
        (x, y),
        domains=torch.tensor([0, 0, 0, 0, 1, 1, 1]),
        domain_names=("day", "night"),
        name="few",
    )
    return pool.with_parts([[0, 1, 2], [3, 4, 5, 6]])


def test_counts_are_those_of_each_client():
    assert counts(small()).tolist() == [[2, 1, 0], [0, 0, 4]]
    assert counts(small(), "domain").tolist() == [[3, 0], [1, 3]]
    assert counts(small(), clients=1).tolist() == [[2, 1, 0]]


def test_blocks_are_as_tall_as_shares():
    """Client 0 has two thirds and one third, client 1 everything in one class: 6, 3 and 8 eighths,
    rounded up.
    """
    lines = blocks(small()).splitlines()
    assert lines[0] == "few: 2 clients, 7 samples, 3 classes (0, 1, 2)"
    assert lines[1] == "0  3  ▆▃   " + "█" * 18
    assert lines[2] == "1  4    █  " + "█" * 24
    assert "(day, night)" in blocks(small(), "domain")


def test_many_clients_are_summed_up():
    drawn = blocks(digits().partition(300), clients=5).splitlines()
    assert len(drawn) == 7
    assert drawn[-1] == "… and 295 more; samples a client: 4 to 5, median 5"


def test_many_classes_are_joined_and_padding_is_not_drawn():
    texts = Texts([" ".join(f"w{n}" for n in range(200))], None)
    data = predict_words(texts, texts, "words", Tokens(length=400)).partition(1)
    assert int(counts(data).sum()) == 201  # the words and <eos>, not the padding
    assert "204 classes, 4 a column" in blocks(data)


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_figures_are_written_and_the_same_again(tmp_path, suffix):
    start = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}[suffix]
    path = figure(small(), tmp_path / "new" / f"one{suffix}", "domain")
    assert path.read_bytes().startswith(start)
    if suffix == ".svg":
        assert "night" in path.read_text() or "<!-- night -->" in path.read_text()
    if suffix == ".png":
        assert path.read_bytes() == figure(small(), tmp_path / "two.png", "domain").read_bytes()


def test_many_groups_become_a_heat_map(tmp_path):
    x = torch.zeros(60, 1)
    data = Pool.of((x, torch.arange(60) % 30), (x, torch.arange(60) % 30)).partition(4)
    assert "share of the client" in figure(data, tmp_path / "a.svg").read_text()


def test_data_that_cannot_be_plotted_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"'a\.gif' was asked for; a name that ends in \.png, \.svg or \.pdf"
    ):
        figure(small(), tmp_path / "a.gif")
    with pytest.raises(DataError, match="digits does not have the domain of each sample"):
        blocks(digits().partition(2), "domain")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        figure(small(), tmp_path / "file" / "a.png")


def test_real_numbers_are_not_drawn_by_class():
    x, y = torch.zeros(4, 1), torch.linspace(0, 1, 4)
    data = Pool.of((x, y), (x, y), domains=torch.tensor([0, 0, 1, 1])).with_parts([[0, 1], [2, 3]])
    with pytest.raises(DataError, match="asked for by class; its targets are not classes"):
        blocks(data)
    assert counts(data, "domain").tolist() == [[2, 0], [0, 2]]
