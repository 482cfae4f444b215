"""Inference time from a table of timed blocks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedquilt.errors import ConfigError
from fedquilt.supernet import SPACES
from fedquilt.supernet.genome import Genome
from fedquilt.supernet.latency import LatencyTable, distinct_blocks, key, measure_blocks
from fedquilt.supernet.limits import Limits
from fedquilt.supernet.meter import Meter
from fedquilt.supernet.search import Search, SearchOptions

TINY = SPACES["tiny"]()


def table_by_params() -> LatencyTable:
    """Return a table in which a block takes as many microseconds as it has parameters."""
    times = {key(block): block.cost.params / 1000 for block in distinct_blocks(TINY)}
    return LatencyTable("tiny", times, "none", "cpu", 1, "2024-01-01T00:00:00+00:00")


def test_the_blocks_of_all_members_are_found() -> None:
    genome = Genome(TINY)
    expected = {block for genes in genome for block in TINY.blocks(genome.config(genes)).values()}
    assert set(distinct_blocks(TINY)) == expected


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv3", "mobilenetv2"])
def test_regular_configurations_have_the_blocks_of_random_ones(name: str) -> None:
    space = SPACES[name]()
    found = set(distinct_blocks(space, seed=0))
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        assert set(space.blocks(space.sample(generator)).values()) <= found


def test_the_time_of_a_member_is_the_sum_over_its_blocks() -> None:
    table = table_by_params()
    assert table.latency(TINY, TINY.largest) == pytest.approx(TINY.cost(TINY.largest).params / 1000)


def test_a_limit_in_milliseconds_is_kept() -> None:
    meter = Meter(TINY, table=table_by_params())
    found = Search(meter, options=SearchOptions(population=8, generations=2)).best(
        Limits(milliseconds=5.0)
    )
    assert found.costs.params <= 5000
    assert found.costs.milliseconds == pytest.approx(found.costs.params / 1000)


def test_a_limit_in_milliseconds_needs_a_table() -> None:
    with pytest.raises(ConfigError, match=r"fedquilt probe --space tiny"):
        Search(Meter(TINY)).best(Limits(milliseconds=5.0))


def test_measured_tables_are_saved_and_read(tmp_path: Path) -> None:
    counts: list[tuple[int, int]] = []
    table = measure_blocks(
        TINY, seconds=0.0, watch=lambda done, total: counts.append((done, total))
    )
    assert counts[-1] == (len(table.milliseconds), len(table.milliseconds))
    assert all(time > 0 for time in table.milliseconds.values())
    table.save(tmp_path / "table.json")
    assert LatencyTable.load(tmp_path / "table.json") == table
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["unit"] == "milliseconds"
    assert {"machine", "date", "device", "threads"} <= set(content)


def test_a_block_that_was_not_measured_is_named() -> None:
    other = replace(TINY, num_classes=7)
    with pytest.raises(
        ConfigError, match=r"no block HeadSpec\(.*out_channels=7.*same image size and classes"
    ):
        table_by_params().latency(other, other.largest)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "no table"),
        ('{"format": 1}', "no table"),
    ],
)
def test_damaged_tables_are_refused(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        LatencyTable.load(tmp_path / "table.json")


def test_tables_of_another_version_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    table_by_params().save(path)
    path.write_text(path.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ConfigError, match="another version"):
        LatencyTable.load(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        LatencyTable.load(tmp_path / "none.json")
