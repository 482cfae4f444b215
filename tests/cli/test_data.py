"""`fedquilt data prepare`: published files on a local server become .npz files, with messages."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fedquilt.cli.data import DataRequest, _progress
from fedquilt.cli.main import main
from fedquilt.data.prepare import DATA_SETS
from fedquilt.studies.papers import data_folder, missing_data
from tests.unit.data.published import Host, cifar10_members, hosted, tar_gz


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Host]:
    """A server that has CIFAR-10, whose published sum is that of the small file there."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("FEDQUILT_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    with hosted({"cifar-10-binary.tar.gz": tar_gz(cifar10_members())}) as found:
        found.publish(monkeypatch, "cifar10")
        yield found


def test_a_data_set_is_prepared_and_used(host, tmp_path, capsys):
    assert main(["data", "prepare", "cifar10", "--from", host.url]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("cifar-10-binary.tar.gz (")
    assert printed[0].endswith(f" from {host.url.removeprefix('http://')}")
    assert printed[2].split() == ["data", "file", "training", "test", "shape", "size"]
    assert printed[3].split()[:4] == ["cifar10", "data/cifar10.npz", "10", "3"]
    assert "Terms: no licence is stated; cite Krizhevsky (2009)." in printed[4]
    with np.load(tmp_path / "data" / "cifar10.npz", allow_pickle=False) as file:
        assert set(file) == {"x_train", "y_train", "x_test", "y_test", "classes"}
    assert (tmp_path / "data" / "downloads" / "cifar-10-binary.tar.gz").is_file()

    assert main(["data", "prepare", "cifar10", "--from", host.url]) == 2
    assert "data/cifar10.npz was asked for; it is there already. --force" in capsys.readouterr().err
    assert main(["data", "prepare", "cifar10", "--from", host.url, "--force"]) == 0
    assert host.requests == ["cifar-10-binary.tar.gz"]


def test_json_has_sums_and_sources(host, tmp_path, capsys):
    assert (
        main(["data", "prepare", "cifar10", "syn", "--per-domain", "20", "--out", "here", "--json"])
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["cifar10", "syn"]
    cifar10 = found["cifar10"]
    assert cifar10["file"] == "here/cifar10.npz"
    assert cifar10["bytes"] == (tmp_path / "here" / "cifar10.npz").stat().st_size
    assert cifar10["arrays"]["x_train"] == [10, 3, 32, 32]
    assert cifar10["files"][0]["checked"] is True
    assert cifar10["files"][0]["downloaded_from"] == f"{host.url}/cifar-10-binary.tar.gz"
    assert found["syn"]["arrays"]["x_test"] == [10, 28, 28, 3]
    assert "not the published SYN" in found["syn"]["title"]


def test_a_file_that_cannot_be_checked_is_named_with_its_sum(host, capsys, monkeypatch):
    data_set = DATA_SETS["cifar10"]
    monkeypatch.setitem(
        DATA_SETS, "cifar10", replace(data_set, files=(replace(data_set.files[0], md5=""),))
    )
    assert main(["data", "prepare", "cifar10"]) == 0
    printed = capsys.readouterr().out
    assert (
        "cifar-10-binary.tar.gz could not be checked, as no sum is published. Its SHA-256 is"
        in printed
    )


def test_files_go_where_tables_look_for_them(host, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDQUILT_DATA", "elsewhere")
    error = str(missing_data("cifar10", data_folder(), "fedrolex/table3"))
    assert error.startswith(
        "fedrolex/table3 was asked for: elsewhere/cifar10.npz is needed; there is no such file."
    )
    assert "Source: Alex Krizhevsky, https://www.cs.toronto.edu/~kriz/cifar.html" in error
    command = re.search(r"`fedquilt (.*?)`", error)
    assert command
    assert main(command[1].split()) == 0
    assert (tmp_path / "elsewhere" / "cifar10.npz").is_file()
    assert main(["data", "prepare", "cifar10"]) == 2
    assert "elsewhere/cifar10.npz was asked for; it is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["prepare", "cifar"],
            "there is no data set to prepare named 'cifar'. Did you mean 'cifar10'?",
        ),
        (["prepare"], "name each data set once"),
        (["prepair", "cifar10"], "data prepair was asked for; `fedquilt data prepare NAME…` fits."),
        (
            ["prepare", "cifar10", "--from", "none"],
            "none/cifar-10-binary.tar.gz is needed; it cannot be read",
        ),
        (
            ["prepare", "cifar10", "--from", "a", "--from", "b"],
            "--from was given as a and again as b",
        ),
        (["prepare", "cifar10", "--from", "ftp://a"], "only http, https, file are read"),
        (["prepare", "syn", "--per-domain", "7"], "7 images per domain were asked for"),
        (
            ["prepare", "syn", "--fonts", "none"],
            "--fonts none was asked for; there is no such folder",
        ),
    ],
)
def test_invalid_requests_are_refused(words, said, host, tmp_path, capsys):
    assert main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error
    assert not list(tmp_path.rglob("*.npz"))


def test_a_host_without_the_file(host, capsys):
    host.files.clear()
    assert main(["data", "prepare", "cifar10"]) == 2
    assert "HTTP status 404" in capsys.readouterr().err


def test_the_help_lists_all_names():
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit):
        main(["data", "prepare", "--help"])
    words = " ".join(printed.getvalue().split())
    for name in DATA_SETS:
        assert name in words
        assert name in (DataRequest.__doc__ or "")
    assert "--from DIR|URL" in words


def test_a_bar_on_a_terminal():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with _progress(console) as watch:
        watch("one (10 B) from somewhere", 0, 10)
        watch("one (10 B) from somewhere", 10, 10)
        watch("making one.npz", 0, 0)
    shown = console.file.getvalue()
    assert "one (10 B) from somewhere" in shown
    assert "100%" in shown
