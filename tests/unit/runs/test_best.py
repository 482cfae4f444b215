"""The best round on validation samples: how it is found, what is kept of it, and how it is
deployed.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.cli.main import main
from fedquilt.data import Parts
from fedquilt.deploy.export import export_sizes
from fedquilt.errors import ConfigError, RecordError
from fedquilt.methods import FedBN, HeteroFL
from fedquilt.round import Record
from fedquilt.round.fold import Fold, Merged
from fedquilt.runs.best import mean_figure
from fedquilt.runs.checkpoint import _digest
from fedquilt.runs.damage import damage_of
from fedquilt.runs.folder_files import read_records
from fedquilt.runs.load import load_run
from fedquilt.storage.tensor_files import TensorFile
from fedquilt.terms import Server
from tests.conftest import assert_same_grades, with_local
from tests.unit.runs.test_validation import OWN

SCRIPT = (1, 0, 2, 0, 1)  # the class that the server's model predicts after each round
BEST = 2
EVERY = fq.Evaluation()
SELDOM = fq.Checkpointing(seconds=0)  # none but at the beginning, at the end, and of the best round


@dataclass
class ScriptedFold:
    """A fold that ignores the clients' updates: the model predicts one class, and its bias is the
    round.
    """

    mean: Fold
    predicted: int

    def add(self, update: Any) -> None:
        self.mean.add(update)

    def add_stack(self, updates: Any, stacked: Any) -> None:
        self.mean.add_stack(updates, stacked)

    def join(self, other: Any) -> None:
        self.mean.join(other.mean)

    def finish(self, server: Server) -> Merged:
        weights = {
            name: torch.zeros_like(value)
            for name, value in self.mean.finish(server).weights.items()
        }
        weights["2.bias"][self.predicted] = 10.0 + server.round + 1
        return Merged(weights)


@dataclass(frozen=True)
class Scripted(HeteroFL):
    """HeteroFL with a server's model that is known in every round."""

    script: tuple[int, ...] = SCRIPT

    def fold(self, server: Server, world: fq.methods.api.World) -> Fold:
        return ScriptedFold(super().fold(server, world), self.script[server.round])


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.fixture(scope="module")
def family() -> fq.Family:
    return fq.trace(net, torch.zeros(2, 3))


def make_data() -> fq.FederatedData:
    """Return two clients that hold back four samples of class 0 and two of class 1.

    The test set has class 2 only.
    """
    x, y = torch.randn(20, 3, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 3
    y[[0, 1, 10, 11]], y[[2, 12]] = 0, 1
    test = x[:5] + 1, torch.full((5,), 2)
    data = fq.FederatedData.of((x, y), test, [range(3, 10), range(13, 20)])
    parts = Parts.of([torch.tensor([0, 1, 2]), torch.tensor([10, 11, 12])])
    return replace(data, validation_parts=parts)


def played(
    family: fq.Family, rounds: int = 5, method: Any = Scripted(), data: Any = None, **options: Any
) -> fq.Run:
    options.setdefault("evaluation", EVERY)
    fleet = fq.Fleet.of((1.0, 0.5), 2, 2)
    method = with_local(method, batch_size=4, epochs=1)
    return fq.run(
        method, family, make_data() if data is None else data, fleet, rounds=rounds, **options
    )


def round_of(module: nn.Module) -> int:
    """Return the round whose weights a scripted model has."""
    return round(float(module(torch.zeros(1, 3)).detach().max())) - 10


# --- which round --------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("on", ["test", "validation"])
def test_the_best_round_is_the_earliest_with_the_best_figure_on_validation_samples(
    on, engine, family
):
    """On the test set, which has class 2 only, round 3 would be the best.

    The last of equally good rounds is 4.
    """
    run = played(family, engine=engine, evaluation=fq.Evaluation(on=on))
    assert (run.best.round, run.best.value) == (BEST, pytest.approx(4 / 6))
    assert run.best.figures == {"1.0": pytest.approx(4 / 6), "0.5": pytest.approx(4 / 6)}
    assert run.summary["best"] == run.best.to_dict()
    if on == "test":
        assert [record.grades.accuracy["1.0"] for record in run.records] == [0, 0, 1, 0, 0]
        figures = [record.grades.validation["0.5"] for record in run.records]
        assert figures == pytest.approx([2 / 6, 4 / 6, 0, 4 / 6, 2 / 6])
    else:
        assert not any(record.grades.validation for record in run.records)


def test_rounds_that_are_not_evaluated_are_not_the_best(family):
    run = played(family, evaluation=fq.Evaluation(every=3))
    assert (run.best.round, run.best.value) == (5, pytest.approx(2 / 6))  # 3 and 5 were evaluated


def test_the_lowest_value_is_the_best_of_a_loss(family):
    """Predictions are 11, 12, … minus the targets, whose mean is 12.

    A learning rate of 1 would be too large.
    """
    single = fq.trace(
        lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), torch.zeros(2, 3)
    )
    data = make_data()
    data = replace(
        data,
        targets=torch.full((20, 1), 12.5),
        test_targets=torch.full((5, 1), 99.0),
        num_classes=0,
    )
    run = played(single, 4, Scripted(script=(0, 0, 0, 0)), data, task="regression")
    assert not run.world.task.main.higher_is_better
    # and so is round 3
    assert (run.best.round, run.best.value) == (
        2,
        pytest.approx(0.5, abs=1e-5),
    )


def test_the_mean_is_over_the_shares_that_devices_have():
    assert mean_figure({"1.0": 0.0, "0.5": 0.5, "0.25": 1.0}, {"0.5", "0.25"}) == 0.75
    assert mean_figure({"1.0": 0.25}, {"0.5"}) == 0.25  # a method that serves one net to all


def test_results_on_clients_are_validated_on_their_own_samples(family):
    """Each client has its own share, so that every figure is that of one client."""
    data = replace(
        make_data(), validation_parts=Parts.of([torch.tensor([0, 1]), torch.tensor([2, 12])])
    )
    run = played(family, 2, FedBN(), data)
    expected = []
    for client, rows in enumerate(([0, 1], [2, 12])):
        outputs = run.deploy(client=client)(data.inputs[rows])
        expected.append(float((outputs.argmax(1) == data.targets[rows]).double().mean()))
    assert run.records[-1].grades.validation == pytest.approx(
        {"1.0": expected[0], "0.5": expected[1]}
    )
    assert run.records[-1].grades.validation != run.records[-1].grades.accuracy


def test_records_have_the_validation_figures_and_are_read_back(family, tmp_path):
    run = played(family, 2, out=tmp_path / "run")
    line = json.loads((tmp_path / "run" / "rounds.jsonl").read_text().splitlines()[1])
    assert line["validation"] == pytest.approx({"1.0": 4 / 6, "0.5": 4 / 6})
    (read,) = (record for record in read_records(tmp_path / "run") if record.round == 2)
    assert read.grades == run.records[1].grades
    assert "validation" not in played(family, 1, evaluation=fq.Evaluation(best=False)).history[0]
    assert Record.from_dict(run.history[1]).grades.validation == run.records[1].grades.validation


# --- what is deployed ---------------------------------------------------------------------------


@pytest.mark.parametrize("kept", ["held", "on disk"])
def test_every_way_to_deploy_takes_the_best_round(kept, family, tmp_path):
    run = played(family, out=tmp_path / "run" if kept == "on disk" else None)
    assert (run.best.server is None) == (kept == "on disk")
    assert round_of(run.deploy()) == 5
    for share in (1.0, 0.5):
        assert round_of(run.deploy(share=share, round="best")) == BEST
    assert run.deploy(fq.Budget(share=0.5), round="best")[0].out_features == 2
    assert round_of(run.customizable((1.0, 0.5), round="best").set(0.5)) == BEST
    written = run.export(tmp_path / "best.safetensors", share=0.5, round="best")
    assert (written.round, written.share) == (BEST, 0.5)
    assert round_of(fq.load_model(tmp_path / "best.safetensors", net)) == BEST
    with TensorFile.open(tmp_path / "best.safetensors") as file:
        assert file.note["rounds"] == BEST
    several = export_sizes(run.at("best"), tmp_path / "all.safetensors", (1.0, 0.5))
    assert [one.round for one in several] == [BEST, BEST]
    assert round_of(fq.load_model(tmp_path / "all.safetensors", net)) == BEST
    before = run.at("best")
    assert (before.server.round, len(before.records), before.best) == (BEST, BEST, run.best)
    assert (run.server.round, len(run.records)) == (5, 5)
    assert run.at(5) is run


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


@pytest.mark.parametrize("kept", ["held", "on disk"])
def test_a_client_gets_its_state_of_the_best_round(kept, tmp_path):
    """FedBN's result is kept by clients, whose states change in the rounds after the best one.

    Samples are relabelled, so that training makes validation worse and the first round is the best.
    """
    family, data = fq.trace(normed, torch.zeros(2, 3)), make_data()
    targets = torch.full_like(data.targets, 2)
    targets[data.validation_parts.order] = 1
    data = replace(data, targets=targets)
    run = played(family, 4, FedBN(), data, out=tmp_path / "run" if kept == "on disk" else None)
    assert run.best.round < 4
    shorter = played(family, run.best.round, FedBN(), data)
    mine, theirs = run.deploy(client=1, round="best"), shorter.deploy(client=1)
    torch.testing.assert_close(mine.state_dict(), theirs.state_dict(), rtol=0, atol=0)
    assert not torch.equal(mine[1].running_mean, run.deploy(client=1)[1].running_mean)


def test_client_states_on_disk_are_not_kept_and_raise_an_error_only_when_needed(tmp_path, caplog):
    run = played(fq.trace(normed, torch.zeros(2, 3)), 1, FedBN())
    memory = run.server.memory
    assert dict(memory.snapshot()) == dict(memory)
    memory.limit = 1
    assert memory[0, ""] is not None  # which leaves no room for the other client's
    state = replace(run.server, memory=memory.snapshot())
    run.best = replace(run.best, server=state)
    run.train(2)
    run.best = replace(run.best, round=1, server=state)
    assert run.at("best").server.round == 1
    with pytest.raises(RecordError, match=r"client states of an earlier round.*not kept.*out=DIR"):
        run.deploy(client=0, round="best")
    run.save(tmp_path / "run")
    assert (
        "The state of round 1, the best one, is not saved: client states of an earlier"
        in caplog.text
    )
    assert "best" not in json.loads((tmp_path / "run" / "summary.json").read_text())


def test_a_round_with_a_checkpoint_can_be_deployed(family, tmp_path):
    run = played(family, out=tmp_path / "run", checkpoint=fq.Checkpointing(rounds=1, keep=3))
    assert [round_of(run.deploy(round=number)) for number in (2, 3, 4, 5)] == [2, 3, 4, 5]
    with pytest.raises(
        ConfigError,
        match=r"the state after round 1 was asked for.*rounds 2, 3, 4, 5 can be deployed",
    ):
        run.deploy(round=1)


# --- what is kept -------------------------------------------------------------------------------


def checkpoints(out: Path) -> list[int]:
    return sorted(int(path.stem) for path in (out / "checkpoint").glob("*.json"))


def test_one_state_more_is_kept_however_often_the_best_changes(family, tmp_path):
    """Accuracy grows three times: 0, a third and two thirds."""
    out = tmp_path / "run"
    seen = []
    script = (2, 1, 0, 2, 2, 2, 2)
    played(
        family,
        7,
        Scripted(script=script),
        out=out,
        checkpoint=fq.Checkpointing(rounds=1),
        watch=lambda record: seen.append(checkpoints(out)),
    )
    assert seen == [[0, 1], [1, 2], [2, 3], [3, 4], [3, 4, 5], [3, 5, 6], [3, 6, 7]]


@pytest.mark.parametrize("stopped", [1, 2, 3, 4])
def test_a_resumed_run_ends_with_the_same_best_round(stopped, family, tmp_path):
    """The folder is copied after a round, as a kill would leave it, and the copy is resumed."""
    out, copy = tmp_path / "run", tmp_path / "copy"

    def watch(record: Record) -> None:
        if record.round == stopped:
            shutil.copytree(out, copy)

    whole = played(family, out=out, watch=watch, checkpoint=SELDOM)
    again = played(family, out=copy, resume=True, checkpoint=SELDOM)
    assert again.best.to_dict() == whole.best.to_dict()
    assert round_of(again.deploy(round="best")) == BEST
    for mine, theirs in zip(whole.records, again.records, strict=True):
        assert_same_grades(mine, theirs, 0)
        assert mine.grades.validation == theirs.grades.validation
    assert checkpoints(copy) == checkpoints(out) == [2, 5]
    finished = played(family, out=out, resume=True)
    assert finished.best.to_dict() == whole.best.to_dict()
    assert round_of(finished.deploy(round="best")) == BEST


def test_a_run_without_a_folder_is_saved_with_its_best_round(family, tmp_path):
    run = played(family)
    for name in ("one", "two"):
        run.save(tmp_path / name)
        again = played(family, out=tmp_path / name, resume=True)
        assert again.best.to_dict() == run.best.to_dict()
        assert round_of(again.deploy(round="best")) == BEST
    assert run.best.server is not None
    again.save(tmp_path / "three")  # whose best state is in another folder
    third = played(family, out=tmp_path / "three", resume=True)
    shutil.rmtree(tmp_path / "two")
    assert round_of(third.deploy(round="best")) == BEST
    assert fq.load_state(tmp_path / "three").round == 5


def test_further_training_without_the_folder_keeps_a_better_round_in_memory(family, tmp_path):
    run = played(family, 1, out=tmp_path / "run").train(3)
    assert (run.best.round, run.best.folder) == (BEST, None)
    assert round_of(run.deploy(round="best")) == BEST


def test_a_damaged_best_state_is_named(family, tmp_path):
    run = played(family, out=tmp_path / "run")
    file = tmp_path / "run" / "checkpoint" / f"{BEST:08}.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(
        RecordError,
        match=r"the state after round 2 was asked for; its checkpoint is damaged: .*00000002",
    ):
        run.deploy(round="best")
    assert round_of(run.deploy()) == 5
    file.with_suffix(".json").unlink()
    assert "checkpoint 00000002: it is gone" in damage_of(tmp_path / "run")


@pytest.mark.parametrize(
    "best",
    [
        7,
        {"round": 9, "value": 0.5, "figures": {}},
        {"round": "2", "value": 0.5, "figures": {}},
        {"round": 2, "value": None, "figures": {}},
        {"round": 2, "value": 0.5, "figures": {"1.0": "x"}},
    ],
    ids=["number", "later", "text", "none", "figures"],
)
def test_a_manifest_with_a_best_round_that_no_run_wrote_is_damaged(best, family, tmp_path):
    out = tmp_path / "run"
    played(family, out=out)
    file = out / "checkpoint" / "00000005.json"
    plain = json.loads(file.read_text())
    plain.pop("sha256")
    plain["about"]["best"] = best
    file.write_text(json.dumps({**plain, "sha256": _digest(plain)}))
    again = played(family, 2, out=out, resume=True)
    assert again.server.round == 2  # the checkpoint before


# --- what cannot be had -------------------------------------------------------------------------


def test_missing_states_are_reported_with_those_that_exist(family, tmp_path):
    plain = played(family, data=replace(make_data(), validation_parts=None))
    with pytest.raises(
        ConfigError,
        match=r'round="best" was asked for, that of the best accuracy on validation samples; '
        r"clients of data hold back none\. data\.with_validation\(0\.1\) in Python.*Without them "
        r"round 5 can be deployed",
    ):
        plain.deploy(round="best")
    with pytest.raises(
        ConfigError, match=r"after round 3 was asked for; it was not kept\. round 5 can.*out=DIR"
    ):
        plain.deploy(round=3)
    with pytest.raises(ConfigError, match="round 'worst' was asked for; 'best' fits, or round 5"):
        plain.deploy(round="worst")
    for odd in (-1, True, 2.5):
        with pytest.raises(ConfigError, match=r"round = .* was asked for; whole numbers"):
            plain.deploy(round=odd)
    with pytest.raises(ConfigError, match=r"evaluation\.best is off"):
        played(family, 1, evaluation=fq.Evaluation(best=False)).deploy(round="best")
    with pytest.raises(
        ConfigError, match=r"no round has been tested on them yet.*round 0 can be deployed"
    ):
        played(family, 0).deploy(round="best")


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


TRAINED = [
    "--method",
    "fedavg",
    "--model",
    "mine.py:net",
    "--data",
    "mine.py:pool",
    "--clients",
    "6",
    "--rounds",
    "4",
]


def test_the_command_writes_the_best_round_and_names_it(own, capsys):
    asked = [
        "--set",
        "data.validation=0.3",
        "--set",
        "evaluation.every=1",
        "--set",
        "checkpoint.rounds=1",
    ]
    assert main(["run", *TRAINED, *asked, "--lr", "30", "--out", "run", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]["round"]
    assert (
        main(
            [
                "export",
                "run",
                "--share",
                "0.5",
                "--round",
                "best",
                "--out",
                "a.safetensors",
                "--json",
            ]
        )
        == 0
    )
    told = json.loads(capsys.readouterr().out)
    assert (told["round"], told["checkpoint"]) == (best, f"checkpoint/{best:08}.json")
    run = load_run("run")
    mine, written = run.deploy(share=0.5, round="best"), fq.load_model("a.safetensors", mine_net)
    torch.testing.assert_close(mine.state_dict(), written.state_dict(), rtol=0, atol=0)
    assert main(["export", "run", "--round", "best", "--out", "b.safetensors"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        f"run after round {best} (the best on validation samples, checkpoint/{best:08}.json)"
        in printed
    )
    assert main(["export", "run", "--round", "3", "--out", "c.safetensors", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["round"] == 3
    assert main(["export", "run", "--round", "99", "--out", "d.safetensors"]) == 2
    assert "the state after round 99 was asked for" in capsys.readouterr().err
    assert not Path("d.safetensors").exists()


def mine_net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def test_the_command_reports_missing_validation_samples(own, capsys):
    assert main(["run", *TRAINED, "--out", "run"]) == 0
    assert main(["export", "run", "--round", "best", "--out", "a.safetensors"]) == 2
    assert "data.validation = 0.1 in a file" in " ".join(capsys.readouterr().err.split())
