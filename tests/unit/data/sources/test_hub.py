"""The hub's own loaders on local files, without a network."""

from __future__ import annotations

import csv
import gc
import json

import numpy as np
import pytest
import torch
from PIL import Image

from fedquilt.data import Domains, Natural, hub, source
from fedquilt.errors import ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")


@pytest.fixture(autouse=True)
def _offline(tmp_path, monkeypatch):
    """Nothing is fetched, and nothing is left in the user's cache."""
    import datasets

    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


@pytest.fixture(autouse=True, scope="module")
def _collected():
    """`datasets` leaves csv files to the garbage collector, which warns. Do it here, where warnings
    are ignored.
    """
    yield
    gc.collect()


def table(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


ROWS = [{"height": n / 10, "width": n, "who": f"u{n % 3}", "kind": "ab"[n % 2]} for n in range(20)]


def test_columns_of_numbers_are_features(tmp_path):
    train, test = table(tmp_path / "train.csv", ROWS), table(tmp_path / "test.csv", ROWS[:6])
    pool = hub("csv", files=train, test_files=test, targets="kind", clients="who")
    assert pool.inputs.tolist() == pytest.approx(np.array([[n / 10, n] for n in range(20)]))
    assert pool.inputs.dtype == torch.float32
    assert pool.class_names == ("a", "b")
    assert pool.targets.tolist() == [0, 1] * 10
    data = pool.partition(partition=Natural())
    assert data.parts[1].tolist() == [1, 4, 7, 10, 13, 16, 19]
    assert data.test_parts[1].tolist() == [1, 4]


def test_columns_may_be_chosen_and_without_a_test_split_a_fifth_is_held_out(tmp_path):
    pool = hub(
        "csv", files=table(tmp_path / "a.csv", ROWS), inputs="width", targets="kind", domains="who"
    )
    # of 7, 7 and 6 rows a domain, one each
    assert (len(pool.inputs), len(pool.test_inputs)) == (
        17,
        3,
    )
    assert pool.inputs.shape[1:] == (1,)
    assert pool.domain_names == ("u0", "u1", "u2")
    assert pool.partition(partition=Domains()).num_clients == 3


def test_arrays_in_parquet(tmp_path):
    from datasets import Dataset

    grid = np.arange(60).reshape(10, 2, 3)
    Dataset.from_dict({"x": grid.tolist(), "y": [0, 1] * 5}).to_parquet(tmp_path / "a.parquet")
    pool = hub("parquet", files=str(tmp_path / "a.parquet"), inputs="x", targets="y")
    both = torch.cat([pool.inputs, pool.test_inputs])
    assert sorted(both.flatten().tolist()) == list(range(60))
    assert both.shape == (10, 2, 3)


def test_folders_of_images(tmp_path):
    for label, red in (("cat", 10), ("dog", 20)):
        for place in range(5):
            path = tmp_path / "pictures" / label / f"{place}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (4, 6), (red, 0, place)).save(path)
    pool = hub("imagefolder", folder=str(tmp_path / "pictures"), normalize="none")
    assert pool.class_names == ("cat", "dog")
    assert pool.inputs.shape == (8, 3, 6, 4)
    assert torch.equal(pool.inputs[:, 0, 0, 0] == 20, pool.targets == 1)
    assert hub("imagefolder", folder=str(tmp_path / "pictures"), size=8).inputs.shape == (
        8,
        3,
        8,
        8,
    )
    for label in ("cat", "dog"):
        broken = tmp_path / "broken" / label / "0.png"
        broken.parent.mkdir(parents=True)
        broken.write_bytes(b"no image")
    with pytest.raises(
        DataError, match="an image of imagefolder cannot be read as an image: cannot identify"
    ):
        hub("imagefolder", folder=str(tmp_path / "broken"))


def test_a_folder_on_disk_is_asked_for_like_a_name_of_the_hub(tmp_path):
    """`hub:PATH` goes the way of `hub:owner/name`: a repository's files, found by their names."""
    (tmp_path / "mine" / "data").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:4])):
        (tmp_path / "mine" / "data" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pool = source(f"hub:{tmp_path / 'mine'}")(targets="kind", clients="who")
    assert pool.name == "mine"
    assert (len(pool.targets), len(pool.test_targets)) == (20, 4)


def test_text_is_for_next_word_prediction(tmp_path):
    rows = [{"who": f"u{n % 2}", "said": f"hello number {n}"} for n in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    pool = hub("json", files=str(path), inputs="said", clients="who", length=6)
    assert pool.inputs.shape == (16, 6)
    assert "hello" in pool.class_names
    assert pool.partition(partition=Natural()).parts.sizes.tolist() == [8, 8]
    with pytest.raises(DataError, match="said is text and who was asked for as its target"):
        hub("json", files=str(path), inputs="said", targets="who")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": "sort"}, "csv has no column 'sort'. Found: height, width, who, kind"),
        ({"inputs": "height, depth", "targets": "kind"}, "has no column 'depth'"),
        (
            {"inputs": "height"},
            "does not say which column the targets are; name one of height, width",
        ),
        ({"train": "validation", "targets": "kind"}, "has no split 'validation'. Found: train"),
    ],
)
def test_columns_and_splits_that_are_not_there_are_refused(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        hub("csv", files=table(tmp_path / "a.csv", ROWS), **options)


def test_errors_of_loading_are_reported_in_one_line(tmp_path):
    with pytest.raises(
        DataError, match=r"csv could not be loaded by datasets\.load_dataset: FileNotFoundError"
    ):
        hub("csv", files=str(tmp_path / "nowhere.csv"))
    with pytest.raises(DataError, match=r"no/such could not be loaded"):
        source("hub:no/such")()


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r"needs datasets, which is not installed: pip install -e '\.\[hub\]'"
    ):
        hub("csv", files="a.csv")
