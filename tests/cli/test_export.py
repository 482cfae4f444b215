"""`fedquilt export`: from a run's folder to a file, and messages if that is not possible."""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from pathlib import Path

import pytest
import torch

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.errors import ConfigError, RecordError
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.load import load_run
from tests.cli.commands import QUICK, json_of
from tests.cli.conftest import OWN
from tests.unit.deploy.test_export import ONNX


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three methods each, on data of a file that one can take away."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        Path("mine.py").write_text(OWN)
        torch.manual_seed(0)
        inputs = torch.randn(60, 1, 8, 8).numpy()
        import numpy as np

        np.savez(
            "own.npz",
            x_train=inputs,
            y_train=np.arange(60) % 3,
            x_test=inputs,
            y_test=np.arange(60) % 3,
        )
        for method in ("heterofl", "splitmix", "local", "fedavg"):
            more = ["--set", "method.local.norm=tracked"] if method == "fedavg" else []
            assert (
                main(
                    ["run", "--method", method, "--data", "own.npz", "--out", method, *QUICK, *more]
                )
                == 0
            )
    return folder


@pytest.fixture
def here(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(runs, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


@pytest.mark.parametrize("format", [ONNX, "pt2", "safetensors"])
def test_a_run_becomes_a_file(format, here, capsys):
    found = json_of(
        capsys, "export", "splitmix", "--share", "0.25", "--format", format, "--out", "model"
    )
    assert set(found) >= {"format", "file", "bytes", "params", "macs", "share", "max_difference"}
    assert (found["format"], found["file"], found["share"]) == (format, "model", 0.25)
    assert found["bytes"] == Path("model").stat().st_size
    assert found["max_difference"] < 1e-4
    assert (
        main(["export", "splitmix", "--share", "0.25", "--format", format, "--out", "model"]) == 2
    )
    assert "model was asked for; it is there already. --force" in capsys.readouterr().err
    assert main(["export", "splitmix", "--format", format, "--out", "model", "--force"]) == 0
    printed = capsys.readouterr().out
    assert "splitmix after round 1 (checkpoint/00000001.json): a model of share 1 as" in printed
    assert "memory to run" in printed
    assert (
        "8 nets whose logits are averaged; norms: post; read back, its outputs for test samples "
        "differ" in printed
    )


def test_budgets_and_clients(here, capsys):
    half = json_of(capsys, "export", "heterofl", "--share", "0.5", "--out", "half.pt2")
    bounds = {
        "params": ("--params", "--max-params"),
        "macs": ("--macs", "--max-macs"),
        "memory": ("--memory",),
    }
    for bound, flags in bounds.items():
        for flag in flags:
            most = str(half[bound])
            found = json_of(
                capsys, "export", "heterofl", flag, most, "--out", f"{flag[2:]}.safetensors"
            )
            assert found[bound] == half[bound]
    assert main(["export", "local", "--out", "own.pt2"]) == 2
    assert "LocalOnly leaves its result on the clients" in capsys.readouterr().err
    # of a wider net than it could hold it has trained nothing
    for client, share in (
        ("0", 1.0),
        ("1", 0.5),
    ):
        assert (
            json_of(
                capsys, "export", "local", "--client", client, "--out", f"{client}.safetensors"
            )["share"]
            == share
        )
    assert main(["export", "heterofl", "--params", "3", "--out", "own.pt2"]) == 2
    assert "no member fits the budget params 3" in capsys.readouterr().err


def test_an_export_names_the_checkpoint_that_it_used(here, capsys):
    """The newest one is damaged, so that it is the one before."""
    manifest = Path("heterofl/checkpoint/00000001.json")
    assert (
        json_of(capsys, "export", "heterofl", "--out", "a.safetensors")["checkpoint"]
        == f"checkpoint/{manifest.name}"
    )
    manifest.write_text(100_000 * "[")
    found = json_of(capsys, "export", "heterofl", "--out", "b.safetensors")
    assert (found["round"], found["checkpoint"]) == (0, "checkpoint/00000000.json")


@pytest.mark.parametrize("method", ["heterofl", pytest.param("splitmix", marks=pytest.mark.slow)])
def test_several_shares_are_one_file(method, here, capsys):
    shares = ["--share", "1", "--share", "0.5", "--share", "0.25"]
    assert main(["export", method, *shares, "--out", "all.safetensors"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"{method} after round 1 (checkpoint/00000001.json): a model of share 1, share 0.5, share "
        "0.25 as safetensors" in printed
    )
    assert ("up to 8 nets whose logits are averaged" in printed) == (method == "splitmix")
    found = json_of(capsys, "export", method, *shares, "--out", "all.safetensors", "--force")
    assert [one["share"] for one in found] == [1.0, 0.5, 0.25]
    assert {one["bytes"] for one in found} == {Path("all.safetensors").stat().st_size}
    run = load_run(method)
    model = fq.load_model("all.safetensors", lambda: run.world.family._module)
    inputs = run.data.test_samples(range(8))
    assert model.share == 1.0
    for one in found:
        alone = json_of(
            capsys,
            "export",
            method,
            "--share",
            str(one["share"]),
            "--out",
            "one.safetensors",
            "--force",
        )
        assert (one["params"], one["macs"], one["nets"]) == (
            alone["params"],
            alone["macs"],
            alone["nets"],
        )
        other = fq.load_model("one.safetensors", lambda: run.world.family._module)
        torch.testing.assert_close(model.set(one["share"])(inputs), other(inputs))


def test_the_file_has_the_accuracy_that_the_run_reported(here, capsys):
    json_of(capsys, "export", "heterofl", "--share", "0.5", "--out", "half.safetensors")
    run = load_run("heterofl")
    data = run.data
    model = fq.load_model("half.safetensors", lambda: run.world.family._module)
    hits = (model(data.test_inputs).argmax(1) == data.test_targets).float().mean()
    assert json.loads(Path("heterofl/summary.json").read_text())["accuracy"][
        "0.5"
    ] == pytest.approx(float(hits))
    assert run.records == read_records("heterofl")


def test_robustness_is_printed_also_if_none_was_requested(here, capsys):
    json_of(
        capsys, "run", "--method", "heterofl", "--set", "model.dual=true", "--out", "dual", *QUICK
    )
    for flags, said in (
        (
            [],
            "norms: post, robustness 0 (the clean net, as none was asked for: --robustness); read "
            "back",
        ),
        (["--robustness", "0.8"], "norms: post, robustness 0.8; read back"),
    ):
        assert (
            main(["export", "dual", "--share", "0.5", "--out", "d.safetensors", "--force", *flags])
            == 0
        )
        assert said in capsys.readouterr().out
    found = json_of(capsys, "export", "dual", "--share", "0.5", "--out", "d.safetensors", "--force")
    assert (found["robustness"], found["robustness_by_default"]) == (0.0, True)


def test_without_its_data_a_run_loses_only_what_needs_data(here, capsys):
    before = json_of(capsys, "export", "fedavg", "--share", "0.5", "--out", "one.safetensors")
    Path("own.npz").unlink()
    assert main(["export", "heterofl", "--share", "0.5", "--out", "half.pt2"]) == 2
    printed = capsys.readouterr().err
    assert "measures the norms' statistics over the training data, which cannot be had: " in printed
    assert "own.npz" in printed
    assert "--norms batch" in printed
    batch = json_of(
        capsys, "export", "heterofl", "--share", "0.5", "--norms", "batch", "--out", "half.pt2"
    )
    assert (batch["norms"], batch["compared"]) == ("batch", "random samples")
    # it tracked statistics
    after = json_of(capsys, "export", "fedavg", "--share", "0.5", "--out", "two.safetensors")
    assert (after["norms"], after["params"]) == ("tracked", before["params"])
    with pytest.raises(
        ConfigError, match=r"trained to round 4; its data is not available: .*own\.npz"
    ):
        load_run("fedavg").train(4)
    model, again = (
        fq.load_model(f"{name}.safetensors", lambda: whole(here)) for name in ("one", "two")
    )
    torch.testing.assert_close(model.state_dict(), again.state_dict())


def test_a_run_with_norms_of_public_samples_outlives_its_data(here, capsys):
    public = ["--set", "method.local.norm=post-public", "--set", "data.public=0.2"]
    json_of(
        capsys,
        "run",
        "--method",
        "heterofl",
        "--data",
        "own.npz",
        "--out",
        "public",
        *QUICK,
        *public,
    )
    Path("own.npz").unlink()
    run = load_run("public")
    assert run.server.round == 1
    with pytest.raises(
        ConfigError, match=r"norms='post-public' measures .* which cannot be had: .*own\.npz"
    ):
        run.deploy(fq.Budget(share=0.5))
    samples = torch.randn(4, 1, 8, 8)
    assert run.deploy(fq.Budget(share=0.5), samples=samples)(samples).shape == (4, 3)


def whole(here: Path) -> torch.nn.Module:
    return load_run(here / "heterofl").world.family._module


def test_other_data_than_the_runs_is_noticed(here, capsys):
    import numpy as np

    held = dict(np.load("own.npz"))
    np.savez("own.npz", **{**held, "x_train": held["x_train"] + 1})
    assert main(["export", "heterofl", "--share", "0.5", "--out", "half.pt2"]) == 2
    assert (
        "the run in heterofl was asked for, but it is another one. These differ:\n  data.inputs"
        in (capsys.readouterr().err)
    )


SCALED = """
import os
import torch
from torch import nn

class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_buffer("scale", torch.tensor(float(os.environ["SCALE"])))

    def forward(self, x):
        return super().forward(x * self.scale)
"""


def test_other_constants_than_the_runs_are_noticed(here, capsys, monkeypatch):
    """They are in no checkpoint: with others the model would answer otherwise than was reported."""
    Path("scaled.py").write_text(SCALED)
    monkeypatch.setenv("SCALE", "1")
    json_of(
        capsys, "run", "--data", "own.npz", "--model", "scaled.py:Net", "--out", "scaled", *QUICK
    )
    assert load_run("scaled").server.round == 1
    monkeypatch.setenv("SCALE", "-1")
    differ = (
        "the run in scaled was asked for, but it is another one. These differ:\n  constants.scale"
    )
    for command in (["export", "scaled", "--out", "a.safetensors"], ["clients", "scaled"]):
        assert main(command) == 2
        assert differ in capsys.readouterr().err
    Path("own.npz").unlink()  # the model has them without data, too
    assert main(["export", "scaled", "--norms", "batch", "--out", "a.safetensors"]) == 2
    assert differ in capsys.readouterr().err


def test_a_run_on_another_machine_is_exported_here(here, capsys):
    """Its device, its engine and its weights to start from are not needed any more."""
    config = Path("heterofl/config.toml")
    text = (
        config.read_text()
        .replace('device = "cpu"', 'device = "cuda"')
        .replace('init = ""', 'init = "gone"')
    )
    config.write_text(text.replace('name = "vectorized"', 'name = "ray"'))
    settings = tomllib.loads(config.read_text())
    assert (settings["engine"]["name"], settings["engine"]["device"], settings["init"]) == (
        "ray",
        "cuda",
        "gone",
    )
    assert (
        json_of(capsys, "export", "heterofl", "--share", "0.5", "--out", "half.pt2")["share"] == 0.5
    )


def test_mistakes(here, capsys, perceptron, make_data):
    wrong = {
        "there is no such folder": ["export", "nowhere", "--out", "a.pt2"],
        "there is no run in it": ["export", ".", "--out", "a.pt2"],
        "shares lie in (0, 1]": ["export", "heterofl", "--share", "2", "--out", "a.pt2"],
        "does not say in which format": ["export", "heterofl", "--out", "a"],
        "'tracked' was asked for; HeteroFL trained": [
            "export",
            "heterofl",
            "--norms",
            "tracked",
            "--out",
            "a.pt2",
        ],
        "only safetensors can hold several": [
            "export",
            "heterofl",
            "--share",
            "1",
            "--share",
            "0.5",
            "--out",
            "a.pt2",
        ],
        "takes shares alone": [
            "export",
            "heterofl",
            *("--share", "1", "--share", ".5"),
            "--macs",
            "9",
            "--out",
            "a.pt2",
        ],
        "it was begun by a script, and settings could not be written for all of it:\n  data: "
        "it is not known": [
            *("export", "script", "--out", "a.pt2"),
        ],
    }
    fq.run(
        fq.methods.FedAvg(),
        perceptron,
        make_data(perceptron, (4, 4)),
        fq.Fleet.of((1.0,), 2),
        rounds=1,
        out="script",
    )
    for text, line in wrong.items():
        assert main(line) == 2, line
        assert text in capsys.readouterr().err
    shutil.rmtree("heterofl/checkpoint")
    assert main(["export", "heterofl", "--out", "a.pt2"]) == 1
    assert "there is no checkpoint there" in capsys.readouterr().err


def test_devices_and_pipes_are_left_alone(here, capsys):
    os.mkfifo("pipe")
    assert main(["export", "heterofl", "--out", "pipe", "--format", "pt2", "--force"]) == 2
    assert "a model in pipe was asked for; what is there is no file" in capsys.readouterr().err
    with pytest.raises(
        RecordError, match=r"could not be written to pipe: the path is not a plain file"
    ):
        load_run("heterofl").customizable((1, 0.5)).save("pipe")
    assert Path("pipe").is_fifo()


def test_costs_and_results_of_clients_are_printed(here, capsys):
    assert main(["clients", "splitmix", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"clients", "spread", "trained", "main"} == found.keys()
    assert all(client["params"] > 0 for client in found["clients"])
    assert main(["clients", "heterofl"]) == 0
    out = capsys.readouterr().out
    assert "MACs a batch" in out
    assert "accuracy, own size  accuracy, whole model" in out.splitlines()[0]
    assert "of the parameters were trained by a client" in out
    Path("own.npz").unlink()
    assert main(["clients", "heterofl"]) == 2
    assert "their data cannot be had" in capsys.readouterr().err
