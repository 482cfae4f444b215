"""Settings of data and its partition."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedquilt.cli.options import Options
from fedquilt.data import Domains, Iid, Labels, Natural, Partition
from fedquilt.errors import ConfigError, DataError
from fedquilt.runs.data_settings import Source
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from tests.unit.runs.experiments import refused, small


def test_data_has_a_memory_limit(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x_train=np.zeros((10, 100)), y_train=np.arange(10) % 2)
    size = 8 * 10 * 101
    named = {"name": str(tmp_path / "x.npz"), "partition": "iid"}
    options = Options(data=named["name"], max_bytes=size - 1)
    settings, asked = options.layers({"method": "fedavg"})
    assert (settings["data"]["max_bytes"], asked["data.max_bytes"]) == (size - 1, "--max-bytes")
    with pytest.raises(
        DataError, match=rf"takes {size:,} bytes in memory, and max_bytes allows {size - 1:,}"
    ):
        Experiment.of({"method": "fedavg", "data": {**named, "max_bytes": size - 1}}).data.federate(
            2, 0
        )
    assert partitioned(
        Experiment.of({"method": "fedavg", "data": {**named, "max_bytes": size}}).data, 2
    ) == (2, Iid())
    assert "max_bytes" in refused(data={**named, "max_bytes": -1})


def partitioned(source: Source, clients: int | None = None) -> tuple[int, Partition | None]:
    data, partition = source.federate(clients, 0)
    return data.num_clients, partition


def test_data_is_partitioned_as_asked(own: Path) -> None:
    assert partitioned(small().data, 6) == (6, Iid())
    assert partitioned(Source("mine.py:pool")) == (20, Iid())
    assert partitioned(Source("mine.py:partitioned")) == (6, None)
    asked = small(data={"name": "mine.py:pool", "samples": 30, "partition": "labels"}).data
    assert asked == Source("mine.py:pool", {"samples": 30}, Labels())
    with pytest.raises(
        ConfigError, match=r"mine\.py:partitioned returned data that is partitioned already"
    ):
        Source("mine.py:partitioned", partition=Iid()).federate(None, 0)


def test_data_that_names_its_clients_is_partitioned_by_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ours.py").write_text(
        "import torch\nfrom fedquilt.data import Pool\n"
        "def pool():\n    x, y = torch.zeros(12, 4), torch.arange(12) % 2\n"
        "    return Pool.of((x, y), (x, y), clients=torch.arange(12) // 4, domains=y)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert partitioned(Source("ours.py:pool")) == (3, Natural())
    assert partitioned(Source("ours.py:pool", partition=Natural()), 2) == (2, Natural())
    asked = Experiment.of({**demo(), "data": {"name": "ours.py:pool", "partition": "domains"}})
    assert partitioned(asked.data) == (2, Domains())
