"""Tasks from the command line: what is found, shown, written and refused."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.cli.main import main
from fedquilt.runs.demo import demo
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.load import load_run
from fedquilt.runs.model_settings import Model
from fedquilt.tasks import METRICS, TASKS, MultiLabel, Regression

QUICK = ["--rounds", "2", "--clients", "4", "--cohort", "2", "--epochs", "1"]


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def told(capsys: pytest.CaptureFixture[str], *args: str) -> Any:
    assert main([*args, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(list(args)) == 2
    return capsys.readouterr().err


def test_tables_are_headed_by_the_main_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--data", "diabetes", *QUICK, "--target", "9"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("settings: demo of diabetes")
    assert "rmse  1: " in lines[2]
    head = next(line for line in lines if line.startswith("share"))
    assert head.split()[:5] == ["share", "rmse", "to", "rmse", "9"]
    assert "%" not in "".join(lines[1:])
    assert main(["compare", "fedavg", "heterofl", "--data", "diabetes", *QUICK]) == 0
    assert "rmse (lower is better), seed 0\n" in capsys.readouterr().out


def test_json_has_every_figure_and_names_the_main_one(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "run", "--data", "digits-labels", *QUICK)
    assert (found["task"], found["main"], found["higher_is_better"], found["percent"]) == (
        "multilabel",
        "f1",
        True,
        True,
    )
    assert found["accuracy"] == {}
    assert set(found["metrics"]) == {*MultiLabel.usual_metrics, "local_f1"}


def test_the_task_is_written_and_read_again(capsys: pytest.CaptureFixture[str]) -> None:
    task = [
        "--task",
        "regression",
        "--set",
        "task.loss=huber",
        "--set",
        'task.metrics=["mae", "r2"]',
    ]
    first = told(capsys, "run", "--data", "diabetes", *task, *QUICK, "--out", "a")
    config = tomllib.loads(Path("a/config.toml").read_text())
    assert config["task"]["loss"] == "huber"
    assert config["model"]["name"] == "mlp"
    assert Experiment.of(config).task == Regression("huber", metrics=("mae", "r2"))
    again = told(capsys, "run", "a/config.toml")
    assert again["metrics"] == first["metrics"]
    assert again["main"] == "mae"
    resumed = told(capsys, "run", "--resume", "a", "--rounds", "3", "--target", "5")
    assert resumed["reached"]["1.0"]["round"] == 1
    plain = told(capsys, "run", "--data", "diabetes", *QUICK, "--out", "b")
    assert plain["main"] == "rmse"
    # as it was found
    assert tomllib.loads(Path("b/config.toml").read_text())["task"]["name"] == "regression"


def test_a_resumed_run_keeps_its_own_task(capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "run", "--data", "diabetes", *QUICK, "--out", "a")
    text = Path("a/config.toml").read_text()
    Path("a/config.toml").write_text(text.replace('loss = "mse"', 'loss = "mae"'))
    assert "task.loss: mse there, mae here" in refused(
        capsys, "run", "--resume", "a", "--rounds", "3"
    )


@pytest.mark.parametrize("data", ["diabetes", "digits-labels"])
def test_a_run_is_reopened_without_its_data(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The checkpoint describes the targets, so that the model and the task are the same."""
    x = np.random.default_rng(0).normal(size=(40, 10)).astype(np.float32)
    y = x[:, :2].sum(1) if data == "diabetes" else x[:, :3] > 0
    np.savez("own.npz", x_train=x[:30], y_train=y[:30], x_test=x[30:], y_test=y[30:])
    found = told(capsys, "run", "--data", "own.npz", "--method", "fedavg", *QUICK, "--out", "a")
    assert found["model"] == "mlp"  # the usual one for rows of numbers
    Path("own.npz").unlink()
    run = load_run("a")
    assert run.absent
    assert run.world.task == {"diabetes": Regression(), "digits-labels": MultiLabel()}[data]
    assert run.world.family.num_outputs == (1 if data == "diabetes" else 3)
    assert run.summary["metrics"] == found["metrics"]
    assert main(["export", "a", "--out", "model.safetensors"]) == 0


def test_clients_have_the_main_figure(capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "run", "--data", "diabetes", *QUICK, "--out", "a")
    assert main(["clients", "a"]) == 0
    assert "rmse, own size" in capsys.readouterr().out
    found = told(capsys, "clients", "a")
    assert found["main"] == "rmse"
    assert found["spread"]["main_whole_model"]["mean"] > 0
    assert found["clients"][0]["accuracy_own_size"] is None


def test_tasks_and_metrics_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tasks = told(capsys, "list", "tasks")
    assert list(tasks) == list(TASKS)
    assert tasks["regression"]["main"] == "rmse"
    assert tasks["regression"]["options"]["loss"] == "'mse' | 'mae' | 'huber'"
    metrics = told(capsys, "list", "metrics")
    assert list(metrics) == list(METRICS)
    assert (metrics["rmse"]["better"], metrics["f1"]["for"]) == ("lower", "classes, labels")
    assert all(entry["summary"] for entry in (*tasks.values(), *metrics.values()))


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--task", "regresion"], "Did you mean 'regression'"),
        (["--task", "classification"], "Classification was asked for; targets are torch.float32"),
        (["--task", "multilabel"], "MultiLabel was asked for on diabetes; a target is"),
        (["--task", "regression", "--set", "task.loss=mze"], "Did you mean 'mse'"),
        (["--task", "regression", "--set", "task.metrics=['rsme']"], "Did you mean 'rmse'"),
        (["--task", "regression", "--set", "task.metrics=['f1']"], "it reads classes or labels"),
        (["--task", "regression", "--set", "task.smoothing=0.1"], "regression has no such key"),
        (["--task", "missing.py:Task"], "missing.py"),
        (
            ["--set", "method.local.masked=batch"],
            "Regression has no classes. local.masked = '' fits.",
        ),
        (["--labels", "2"], "Labels partitions by class; a target of diabetes has shape ()"),
        (["--model", "tiny_resnet"], "Made for these: mlp"),
        (["--target", "nan"], "a finite number fits"),
    ],
)
def test_tasks_that_do_not_fit_are_refused_before_the_first_round(
    args: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, "run", "--data", "diabetes", *QUICK, *args, "--out", "a")
    assert not Path("a/rounds.jsonl").exists()


def test_a_share_is_no_percentage(capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, "run", "--data", "digits-labels", *QUICK, "--target", "60")
    assert "a target of 60 was asked for; f1 is in (0, 1]" in error


def test_rows_of_numbers_have_a_perceptron_and_images_the_demos_model() -> None:
    assert [Experiment.of(demo(data=data)).model.name for data in ("digits", "diabetes")] == [
        "tiny_resnet",
        "mlp",
    ]
    settings = demo(data="diabetes")
    del settings["model"]
    experiment = Experiment.of(settings)
    assert experiment.model is None
    assert experiment.ground().model == Model("mlp")
