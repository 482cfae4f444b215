"""The command `fedquilt supernet search`, and `fedquilt probe --space`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fedquilt.cli.main import main
from fedquilt.supernet import Config, Supernet, TinySpace, save_supernet

RANDOM = ["--strategy", "random"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, 1), dtype=np.uint8)
    np.savez("few.npz", x_train=images, y_train=np.arange(20) % 5)
    Path("devices.csv").write_text("name,count,macs\nwatch,3,100k\nphone,5,200k\n")
    return tmp_path


def test_a_member_is_found_and_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supernet", "search", "tiny", "--macs", "2e5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (member,) = found["members"].values()
    assert 1.8e5 <= member["macs"] <= 2e5
    assert TinySpace().cost(Config.from_json(member["config"])) == (
        member["macs"],
        member["params"],
    )
    assert found["utilization"] == pytest.approx(member["macs"] / 2e5)
    assert (found["score"], found["strategy"]) == ("multiply-adds", "evolution")
    assert main(["supernet", "search", "tiny", "--macs", "2e5", *RANDOM]) == 0
    assert "utilisation: 9" in capsys.readouterr().out


def test_a_fleet_gets_few_members(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["supernet", "search", "tiny", "--fleet", "devices.csv", "--json", *RANDOM]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [member["devices"] for member in found["members"].values()] == [3, 5]
    assert found["utilization"] > 0.9 > found["common"]
    assert (
        main(["supernet", "search", "tiny", "--fleet", "devices.csv", "--members", "1", *RANDOM])
        == 0
    )
    said = capsys.readouterr().out
    assert "devices" in said
    assert "with one common member" in said


def test_members_of_a_file_are_ranked_by_accuracy(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_supernet(Supernet(TinySpace(num_classes=4)), "net.safetensors")
    command = [
        "supernet",
        "search",
        "net.safetensors",
        "--data",
        "few.npz",
        "--macs",
        "2e5",
        "--measured",
        "8",
    ]
    assert main([*command, "--classes", "7", "--json", *RANDOM]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["score"] == "predicted accuracy"
    assert main([*command, *RANDOM]) == 0
    said = capsys.readouterr().out
    assert "measure members: 8" in said
    assert "predicted accuracy" in said
    # random draws use no score, so that there is nothing to verify
    assert "measured accuracy" not in said
    assert main([*command, "--labels", "own"]) == 2
    assert "5 classes; it was trained for 4" in capsys.readouterr().err


def test_the_chosen_member_of_a_file_was_measured(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_supernet(Supernet(TinySpace(num_classes=4)), "net.safetensors")
    command = [
        "supernet",
        "search",
        "net.safetensors",
        "--data",
        "few.npz",
        "--macs",
        "2e5",
        "--measured",
        "8",
    ]
    exhaustive = [*command, "--strategy", "exhaustive"]
    assert main([*exhaustive, "--verified", "3", "--json"]) == 0
    (member,) = json.loads(capsys.readouterr().out)["members"].values()
    assert 0 <= member["accuracy"] <= 1
    assert main([*exhaustive, "--verified", "3"]) == 0
    assert "measured accuracy" in capsys.readouterr().out
    assert main([*exhaustive, "--verified", "0", "--json"]) == 0
    (member,) = json.loads(capsys.readouterr().out)["members"].values()
    assert "accuracy" not in member


def test_blocks_are_timed_and_limit_a_search(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--space", "tiny", "--out", "table.json"]) == 0
    assert "15 blocks" in capsys.readouterr().out
    table = json.loads(Path("table.json").read_text())
    assert (table["space"], table["unit"]) == ("tiny", "milliseconds")
    most = 10 * sum(table["milliseconds"].values())
    limit = ["--milliseconds", str(most), "--table", "table.json"]
    assert main(["supernet", "search", "tiny", *limit, "--json", *RANDOM]) == 0
    (member,) = json.loads(capsys.readouterr().out)["members"].values()
    assert member["milliseconds"] <= most
    assert main(["probe", "--space", "tiny", "--out", "table.json"]) == 2
    assert "table.json is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["supernet", "search", "tiny"], "needs at least one of macs="),
        (
            ["supernet", "search", "tiny", "--macs", "10"],
            "the smallest member has 53.3k multiply-adds",
        ),
        (["supernet", "search", "tini", "--macs", "1e5"], "Did you mean 'tiny'?"),
        (
            ["supernet", "search", "tiny", "--macs", "1e5", "--space", "tiny"],
            "goes with a supernet file",
        ),
        (
            ["supernet", "search", "tiny", "--fleet", "devices.csv", "--macs", "1e5"],
            "limits of a fleet are in its file",
        ),
        (["supernet", "search", "tiny", "--macs", "1e5", "--members", "3"], "it needs --fleet"),
        (["supernet", "search", "tiny", "--milliseconds", "5"], "without --table"),
        (
            ["supernet", "search", "tiny", "--milliseconds", "5", "--table", "no.json"],
            "cannot be read",
        ),
        (["probe", "--out", "table.json"], "go with --space"),
        (["probe", "--space", "tiny", "--model", "mlp"], "only --data and --device fit"),
    ],
)
def test_error_messages_name_what_would_work(
    words: list[str], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert message in capsys.readouterr().err
