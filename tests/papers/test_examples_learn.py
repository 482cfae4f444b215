"""Every file in examples/ is trained for a few rounds, and its loss is looked at.

Data are drawn, of the same shapes as the papers' sets. Where the environment variable FEDQUILT_DATA
names a folder with digits5.npz or cifar10.npz, files that want them are trained on the real samples
too: `FEDQUILT_DATA=data pytest -m slow tests/papers/test_examples_learn.py`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedquilt.cli import COMMANDS
from fedquilt.experiment import Run
from fedquilt.models import MODELS, ModelSpec, PreResNet
from tests.conftest import load_example

EXAMPLES = Path(__file__).parents[2] / "examples"
DOMAINS = ("mnist", "svhn", "usps", "syn", "mnistm")


# --- data -------------------------------------------------------------------------------------------------------


def draw_images(path: Path, side: int, classes: int, per_class: int, domains: Sequence[str] = ("",)) -> None:
    """Write color images of `side` × `side` pixels: a faint pattern per class and domain in noise.

    It is faint because a clear one is learnt at learning rates at which real images diverge.
    """
    generator = np.random.default_rng(0)
    scale = -(-side // 7)
    patterns = generator.integers(256, size=(classes, 7, 7, 3)).repeat(scale, 1).repeat(scale, 2)
    arrays: dict[str, Any] = {"domains": list(domains)} if len(domains) > 1 else {}
    for part, count in (("train", per_class), ("test", 2)):
        labels = np.tile(np.arange(classes), count * len(domains))
        homes = np.arange(len(labels)) * len(domains) // len(labels)
        clean = patterns[(labels + homes) % classes, :side, :side]
        noise = generator.integers(256, size=clean.shape)
        arrays |= {f"x_{part}": ((clean + 7 * noise) // 8).astype(np.uint8), f"y_{part}": labels}
        if len(domains) > 1:
            arrays[f"domain_{part}"] = homes
    np.savez(path, **arrays)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all data sets that the examples name."""
    folder = tmp_path_factory.mktemp("drawn")
    draw_images(folder / "digits5.npz", 28, 10, 8, DOMAINS)
    draw_images(folder / "cifar10.npz", 32, 10, 20)
    return folder


# --- losses -----------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Run]:
    """All runs that are trained, in the order in which they begin, each for a few rounds at most."""
    found: list[Run] = []
    train = Run.train

    def watched(self: Run, rounds: int, *args: Any, **options: Any) -> Run:
        found.append(self)
        return train(self, min(rounds, MAX_ROUNDS), *args, **options)

    monkeypatch.setattr(Run, "train", watched)
    return found


@pytest.fixture
def narrow_nets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a small net in place of those that the examples name, which the slow tests train."""
    narrow = ModelSpec(partial(PreResNet, (1, 1), widths=(8, 16)), (3, 32, 32), "a test's")
    for model in ("digits_cnn", "digits_cnn_norm", "preresnet18", "rescue_resnet"):
        monkeypatch.setitem(MODELS, model, narrow)


def losses_of(run: Run, rounds: int) -> list[float]:
    """Return the loss of every round, which must be finite and must not explode."""
    losses = [record.loss for record in run.records if record.loss is not None]
    assert len(losses) == rounds, f"only rounds with these losses were played: {losses}"
    assert all(math.isfinite(loss) for loss in losses), losses
    assert max(losses) < 2 * losses[0], losses
    return losses


# --- files ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """How an experiment file is made quick."""

    data: str = ""  # File that takes the place of the hub's data set. "" is the file that is named.
    clients: int | None = 10
    more: tuple[str, ...] = ()


FILES = {
    # A fifth of the drawn images would be 4 per client, which say nothing about those of another client.
    "fedrescue/cifar10-clusters": Cut("cifar10.npz", more=("data.partition.fraction=1",)),
    "fedrescue/cifar10-lossy": Cut("cifar10.npz"),
    "fedrescue/digits": Cut(),
}


def train(name: str, folder: Path, rounds: int) -> Run:
    """Train an experiment file for a few rounds of two clients, and test once."""
    cut = FILES[name]
    assign = ("evaluation.every=0", "evaluation.local=false", *cut.more)
    flags: dict[str, Any] = {"data": str(folder / cut.data)} if cut.data else {}
    request = COMMANDS["run"](rounds=rounds, clients=cut.clients, cohort=2, assign=assign, **flags)
    return request.experiment(str(EXAMPLES / f"{name}.toml"), None).prepare().train(rounds)


def test_every_file_is_run() -> None:
    paths = EXAMPLES.rglob("*.toml")
    assert {path.relative_to(EXAMPLES).with_suffix("").as_posix() for path in paths} == set(FILES)


@pytest.mark.usefixtures("narrow_nets")
@pytest.mark.parametrize("name", FILES)
def test_files_learn(name: str, drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drawn)
    losses_of(train(name, drawn, 2), 2)


# --- scripts ----------------------------------------------------------------------------------------------------

QUICK = "--rounds 2 --every 0 --out runs.jsonl"
SCRIPTS = {
    "clipped": "",
    "own_model": "",
    "fedrescue_case_study": "digits5.npz --images 20 --seeds 1 --ways progressive --epochs 2",
    "fedrescue_tables": f"digits5.npz --table digits --methods FedResCuE --lr 0.03 {QUICK}",
    "tasks": "--rounds 2",
}
HELPERS = {"reproducing"}  # imported by the scripts; they train nothing
LONGER: set[str] = set()  # 5 to 20 s
MAX_ROUNDS = 3  # of scripts that have no option for it


def test_every_script_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SCRIPTS, *HELPERS}


@pytest.mark.usefixtures("narrow_nets")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow) if name in LONGER else name for name in SCRIPTS],
)
def test_scripts_learn(
    name: str, drawn: Path, tmp_path: Path, runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in drawn.iterdir():
        (tmp_path / file.name).symlink_to(file)
    monkeypatch.chdir(tmp_path)
    words = SCRIPTS[name].split()
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
    load_example(name).main()
    assert runs
    for run in runs:
        if name == "clipped":  # Two clients send garbage, which HeteroFL averages as it is.
            assert len(run.records) == MAX_ROUNDS
        else:
            losses_of(run, 2 if words else MAX_ROUNDS)


# --- nets as written, and real data -----------------------------------------------------------------------------

REAL = {"fedrescue/digits": "digits5.npz"}


def real(file: str) -> Path:
    """A folder that has a real data set, or skip."""
    folder = Path(os.environ.get("FEDQUILT_DATA", ""))
    if "FEDQUILT_DATA" not in os.environ or not (folder / file).is_file():
        pytest.skip(f"FEDQUILT_DATA names no folder with {file}")
    return folder.resolve()


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_files_learn_with_the_nets_they_name(name: str, drawn: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(drawn)
    losses_of(train(name, drawn, 4), 4)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "file"), REAL.items())
def test_files_learn_on_real_data(name: str, file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FedResCuE on Digits gave no number in round 8 at the learning rate of its Table 17."""
    folder = real(file)
    monkeypatch.chdir(folder)
    losses = losses_of(train(name, folder, 10), 10)
    assert min(losses[-3:]) < losses[0]
