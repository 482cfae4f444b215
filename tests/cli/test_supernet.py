"""The commands `fedquilt supernet train`, `show`, `measure` and `import`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedquilt.cli.main import main
from fedquilt.studies.stored import read_stored
from fedquilt.studies.values import TableValue
from fedquilt.supernet import Supernet, TinySpace, load_supernet, save_supernet
from fedquilt.supernet.training import CHECKPOINT

QUICK = ["--epochs", "1", "--phase-epochs", "1", "--batch-size", "16"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ten small images, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    images = draw.integers(0, 256, (10, 8, 8, 1), dtype=np.uint8)
    np.savez("few.npz", x_train=images, y_train=np.arange(10) % 5)
    return tmp_path


def train(*more: str) -> int:
    return main(
        [
            "supernet",
            "train",
            "tiny",
            "--data",
            "few.npz",
            "--out",
            "net.safetensors",
            *QUICK,
            *more,
        ]
    )


def test_a_supernet_is_trained_shown_and_not_written_over(folder, capsys):
    assert train() == 0
    said = capsys.readouterr().out
    assert "epoch 4/4 expansions (2 options): loss" in said
    assert "net.safetensors has the trained supernet" in said
    assert load_supernet("net.safetensors").space == TinySpace(num_classes=4)
    assert train() == 2
    assert "net.safetensors is there already" in capsys.readouterr().err
    assert main(["supernet", "show", "net.safetensors", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["space"], shown["classes"], shown["nets"]) == ("tiny", 4, 400)
    assert shown["macs"] == [53120, 276608]


def test_the_datas_labels_and_json(folder, capsys):
    # phase epochs given twice
    assert train("--labels", "own", "--phase-epochs", "0", "--json") == 2
    capsys.readouterr()
    args = ["--epochs", "1", "--phase-epochs", "0", "--labels", "own", "--json"]
    assert (
        main(["supernet", "train", "tiny", "--data", "few.npz", "--out", "a.safetensors", *args])
        == 0
    )
    assert json.loads(capsys.readouterr().out)["classes"] == 5


def test_an_interrupted_training_is_resumed(folder, capsys, monkeypatch):
    assert train("--seed", "1") == 0
    whole = Path("net.safetensors").read_bytes()
    Path("net.safetensors").unlink()

    import fedquilt.supernet.training as training

    with monkeypatch.context() as patch:
        patch.setattr(training._Trainer, "_begin", interrupted_after(training._Trainer._begin, 2))
        assert train("--seed", "1") == 130
    said = capsys.readouterr().err
    assert f"The same command with --resume continues from net.safetensors{CHECKPOINT}." in said
    assert not Path("net.safetensors").exists()
    assert train("--seed", "1") == 2
    assert "--resume continues it, --force" in capsys.readouterr().err
    assert train("--seed", "1", "--resume") == 0
    assert Path("net.safetensors").read_bytes() == whole


def interrupted_after(begin, count):
    """Return `begin`, which is interrupted when it is called for the phase with this number."""

    def interrupted(self, phase):
        if self.phase == count:
            raise KeyboardInterrupt
        begin(self, phase)

    return interrupted


def test_spaces_are_shown(capsys):
    assert main(["supernet", "show", "resnet50"]) == 0
    said = capsys.readouterr().out
    assert "space resnet50: images 3 × 32 × 32, 10 classes, 136,606,377,609 nets" in said
    assert "multiply-adds 18.8M to 148M, parameters 5.22M to 46.1M" in said
    assert "stage 3 depths" in said
    assert main(["supernet", "show", "tiny", "--names", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert names["stage1.0.body.filter.conv.weight"] == [32, 1, 5, 5]
    assert main(["supernet", "show", "tiny", "--names"]) == 0
    assert "stem.conv.weight" in capsys.readouterr().out


def test_members_of_a_file_are_measured(folder, capsys):
    save_supernet(Supernet(TinySpace(num_classes=4)), "net.safetensors")
    command = ["supernet", "measure", "net.safetensors", "--data", "few.npz", "--members", "5"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["space"], found["data"], found["samples"]) == (
        "net.safetensors",
        "tiny",
        "few.npz",
        4,
    )
    macs = [member["macs"] for member in found["measured"]]
    assert len(macs) == 5
    assert macs == sorted(macs)
    assert (macs[0], macs[-1]) == (53120, 276608)
    accuracies = [member["accuracy"] for member in found["measured"]]
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)
    ends = [found["accuracy_by_size"][name] for name in ("smallest", "largest")]
    assert ends == [accuracies[0], accuracies[-1]]
    Path("stored").mkdir()
    Path("stored/summary.json").write_text(json.dumps(found))
    smallest = TableValue.parse("accuracy_by_size smallest %")
    assert smallest.of(read_stored(Path("stored"))) == accuracies[0]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "measure members: 5" in said
    assert "276,608" in said
    assert main([*command, "--labels", "own"]) == 2
    assert "5 classes; it was trained for 4" in capsys.readouterr().err
    assert main([*command[:-1], "1"]) == 2
    assert "--members 1 was asked for" in capsys.readouterr().err
    np.savez("large.npz", x_train=np.zeros((20, 9, 9, 1), np.uint8), y_train=np.arange(20) % 4)
    assert main(["supernet", "measure", "net.safetensors", "--data", "large.npz"]) == 2
    assert "images of shape (1, 9, 9); they take (1, 8, 8)" in capsys.readouterr().err


def test_weights_are_imported(folder, capsys):
    space = TinySpace(num_classes=6)
    save_file(space.member(space.largest).state_dict(), "weights.safetensors")
    assert (
        main(
            [
                "supernet",
                "import",
                "tiny",
                "weights.safetensors",
                "--out",
                "net.safetensors",
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["classes"] == 6
    supernet = load_supernet("net.safetensors")
    assert supernet.space.num_classes == 6
    save_file({"a": torch.zeros(1)}, "weights.safetensors")
    assert (
        main(["supernet", "import", "tiny", "weights.safetensors", "--out", "b.safetensors"]) == 1
    )
    assert "does not have the weights of the largest net of tiny" in capsys.readouterr().err
    assert not Path("b.safetensors").exists()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["show", "tinny"], "there is no search space named 'tinny'. Did you mean 'tiny'?"),
        (["train", "tiny", "--data", "none.npz", "--out", "a"], "there is no such file or folder"),
        (
            ["train", "tiny", "--data", "few.npz", "--out", "a", "--epochs", "0"],
            "epochs = 0 was asked for",
        ),
        (
            ["train", "tiny", "--data", "few.npz", "--out", "a", "--precision", "fp64"],
            "fp32, tf32 or bf16",
        ),
        (
            ["train", "tiny", "--data", "few.npz", "--out", "a", "--device", "tpu9"],
            "device 'tpu9' was asked for",
        ),
        (["train", "tiny", "--data", "diabetes", "--out", "a"], "at least two square images"),
    ],
)
def test_error_messages_name_what_would_work(folder, capsys, args, said):
    assert main(["supernet", *args]) == 2
    assert said in capsys.readouterr().err
    assert not Path("a").exists()


def test_a_damaged_file_is_refused(folder, capsys):
    save_supernet(Supernet(TinySpace()), "net.safetensors")
    data = Path("net.safetensors").read_bytes()
    Path("net.safetensors").write_bytes(data[:-1])
    assert main(["supernet", "show", "net.safetensors"]) == 1
    assert (
        "net.safetensors cannot be read as safetensors: its tensors need" in capsys.readouterr().err
    )


def test_a_space_in_a_file_is_trained(folder, capsys):
    Path("mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fedquilt.supernet import StageOptions, TinySpace\n\n\n"
        "@dataclass(frozen=True)\n"
        "class Mine(TinySpace):\n"
        "    name = 'mine'\n"
        "    options = (StageOptions((1,), (2, 3), (3,)),) * 2\n"
    )
    args = ["--data", "few.npz", "--out", "net.safetensors", "--epochs", "1"]
    assert main(["supernet", "train", "mine.py:Mine", *args, "--phase-epochs", "1"]) == 0
    assert main(["supernet", "show", "mine.py:Mine"]) == 0
    assert "4 nets" in capsys.readouterr().out
    assert main(["supernet", "show", "net.safetensors"]) == 1
    assert "is of the space 'mine', which is not built in" in capsys.readouterr().err
    assert main(["supernet", "show", "net.safetensors", "--space", "mine.py:Mine"]) == 0
    assert main(["supernet", "show", "net.safetensors", "--space", "tiny"]) == 1
    assert "is of the space 'mine'; 'tiny' was asked for" in capsys.readouterr().err
    assert main(["supernet", "show", "tiny", "--space", "mine.py:Mine"]) == 2
