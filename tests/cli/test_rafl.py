"""RaFL on the command line: searched nets, supernet files, limits and private nets."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from safetensors.torch import load_file

from fedquilt.cli.main import main
from fedquilt.supernet import Supernet, TinySpace, save_supernet

SHORT = ["--clients", "6", "--cohort", "3", "--epochs", "1"]
RAFL = ["run", "--method", "rafl", *SHORT]
KEPT = {
    "private_accuracy",
    "local_private_accuracy",
    "client_knowledge_accuracy",
    "local_client_knowledge_accuracy",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small untrained supernet, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    save_supernet(Supernet(TinySpace(num_classes=4)), "tiny.safetensors")
    return tmp_path


def summary(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    assert main([*words, "--json"]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def test_the_demo_shows_private_nets_and_the_use_of_limits(capsys):
    assert main([*RAFL, "--rounds", "1"]) == 0
    said = capsys.readouterr().out
    assert "rafl on digits: searched for 6 clients, 3 a round" in said
    assert "private accuracy" in said
    assert "360k MACs" in said
    assert "of the limits' multiply-adds are used by the clients' own nets" in said
    assert "exceed their limits" not in said


def test_limits_may_be_those_of_the_private_net(capsys):
    pair = summary(capsys, *RAFL, "--rounds", "1")
    private = summary(capsys, *RAFL, "--rounds", "1", "--set", "method.limit=private")
    assert pair["over_limit"] == 0 < private["over_limit"]
    assert pair["utilisation"] < private["utilisation"]
    assert set(private["metrics"]) >= KEPT
    assert private["accuracy"].keys() == {"1.0"}


def test_the_server_learns_from_public_samples(capsys):
    public = ["--set", "method.distil=true", "--set", "method.server_training.steps=2"]
    assert main([*RAFL, "--rounds", "1", *public]) == 2
    assert "--set data.public=0.2" in capsys.readouterr().err
    assert (
        summary(capsys, *RAFL, "--rounds", "1", *public, "--set", "data.public=0.2")["method"]
        == "rafl"
    )


def test_nets_start_from_a_supernet_and_private_nets_are_downloaded_once(folder, capsys):
    plain = summary(capsys, *RAFL, "--rounds", "1")
    found = summary(
        capsys, *RAFL, "--rounds", "1", "--supernet", "tiny.safetensors", "--out", "run"
    )
    settings = tomllib.loads(Path("run/config.toml").read_text())
    assert (settings["model"]["name"], settings["method"]["transfer"]) == ("searched", True)
    assert settings["model"]["supernet"].endswith("tiny.safetensors")
    assert found["bytes_up"] == plain["bytes_up"]
    assert found["bytes_down"] > plain["bytes_down"]


def test_a_searched_run_is_resumed(capsys):
    whole = summary(capsys, *RAFL, "--rounds", "2", "--out", "whole")
    assert main([*RAFL, "--rounds", "1", "--out", "part"]) == 0
    capsys.readouterr()
    resumed = summary(capsys, "run", "--resume", "part", "--rounds", "2")
    assert resumed["metrics"] == whole["metrics"]
    assert resumed["bytes_down"] == whole["bytes_down"]


def test_one_clients_private_net_is_exported(capsys):
    assert main([*RAFL, "--rounds", "1", "--out", "run"]) == 0
    sizes = {}
    for client in (3, 5):  # Their limits are 120,000 and 360,000 multiply-adds.
        assert (
            main(["export", "run", "--client", str(client), "--out", f"{client}.safetensors"]) == 0
        )
        sizes[client] = sum(
            weight.numel() for weight in load_file(f"{client}.safetensors").values()
        )
    assert sizes[3] < sizes[5]


def test_the_first_of_several_models_is_the_knowledge_net(capsys):
    found = summary(capsys, *RAFL, "--rounds", "1", "--model", "mlp", "tiny_resnet")
    assert found["model"] == "mlp + tiny_resnet"
    assert set(found["metrics"]) >= KEPT


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "method.transfer=true"], "and no supernet was given. --supernet FILE names one"),
        (["--supernet", "tiny.safetensors", "--model", "mlp"], "together with --model mlp"),
        (["--model", "searched", "mlp"], "'searched' was asked for with other models"),
        (["--supernet", "none.safetensors"], "'none.safetensors'"),
        (["--model", "mlp"], "it needs a knowledge net and at least one"),
    ],
)
def test_runs_that_are_not_possible_give_one_clear_error(words, said, capsys):
    assert main([*RAFL, "--rounds", "1", *words]) == 2
    assert said in capsys.readouterr().err
