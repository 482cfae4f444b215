"""Small families that are traced in a moment, and data for them, which many tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedquilt as fq
from fedquilt.engines import ENGINES
from fedquilt.methods import METHODS, Method, ProgFed, RaFL, Scaffold
from fedquilt.methods.prototypes import Prototypes
from fedquilt.models import PreResNet, TransformerLM
from fedquilt.round import Record
from fedquilt.round.client import Start, receive
from fedquilt.round.client_state import memory_of
from fedquilt.round.training.server import ServerTraining
from tests.long_variants import LONG_VARIANTS

torch.set_num_threads(1)
# begun in the background; some tests press ctrl-C
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests, and the processes that they start, have a list of trusted code of their own.
_CONFIG_FOLDER = tempfile.TemporaryDirectory(prefix="fedquilt-tests-")
os.environ["XDG_CONFIG_HOME"] = _CONFIG_FOLDER.name

# What every engine must do is asked of these for everything there is; `ray` needs a cluster and has
# test_ray.py.
LOCAL = {name: kind for name, kind in ENGINES.items() if name != "ray"}


# Container objects that are allocated between two searches for reference cycles; Python's own
# number is 700. A process of the suite holds a million objects that stay: tests, modules, torch.
# Each full search visits all of them for 0.3 s.
GC_THRESHOLD = 10_000


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Search for no garbage while tests are collected, since all that is made then stays, and later
    less often.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.set_threshold(GC_THRESHOLD)


@pytest.hookimpl(tryfirst=True)  # Before tests are chosen by their marks.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(LONG_VARIANTS):
            item.add_marker(pytest.mark.slow)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="write the records in tests/golden anew"
    )


class Perceptron(nn.Module):
    """Two linear layers: 4 inputs, 6 hidden, 3 classes; 45 parameters."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.last = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def _residual_net() -> nn.Module:
    """A PreResNet of two blocks: residual sums, batch norm, a shortcut convolution."""
    return PreResNet((1, 1), 4, 1, widths=(4, 8))


def _language_model() -> nn.Module:
    return TransformerLM(
        11, max_length=5, width=8, depth=1, heads=2, head_dim=4, hidden=12, dropout=0.1
    )


@cache
def _traced(name: str) -> fq.Family:
    match name:
        case "perceptron":
            return fq.trace(Perceptron, torch.zeros(2, 4))
        case "residual":
            return fq.trace(_residual_net, torch.zeros(2, 1, 6, 6))
        case "language":
            return fq.trace(_language_model, torch.zeros(2, 5, dtype=torch.int64))
    raise KeyError(name)


@pytest.fixture
def perceptron() -> fq.Family:
    return _traced("perceptron")


@pytest.fixture
def residual() -> fq.Family:
    return _traced("residual")


@pytest.fixture
def language() -> fq.Family:
    return _traced("language")


@pytest.fixture
def family(request: pytest.FixtureRequest) -> fq.Family:
    """For indirect parametrisation: `@pytest.mark.parametrize("family", ["residual"],
    indirect=True)`.
    """
    return _traced(request.param)


def save_images(path: Path, count: int, homes: int, **more: Any) -> Path:
    """A file of drawn images of 8×8 pixels, four classes and some domains, so many for training and
    for tests.
    """
    draw, arrays = np.random.default_rng(0), dict(more)
    for part in ("train", "test"):
        arrays |= {f"x_{part}": draw.integers(256, size=(count, 8, 8, 3), dtype=np.uint8)}
        arrays |= {
            f"y_{part}": draw.integers(4, size=count),
            f"domain_{part}": np.arange(count) % homes,
        }
    np.savez(path, **arrays)
    return path


MakeData = Callable[..., fq.FederatedData]


@pytest.fixture
def make_data() -> MakeData:
    return _make_data


def _make_data(
    family: fq.Family, sizes: Sequence[int], labels: int = 0, tests: int = 24, public: int = 10
) -> fq.FederatedData:
    """Random samples in the family's input shape; with `labels`, client i holds classes i, i+1, …
    only.
    """
    generator = torch.Generator().manual_seed(7)
    example, classes = family.example_inputs[0], family.num_classes
    count = sum(sizes)

    def pool(n: int) -> tuple[Tensor, Tensor]:
        if example.is_floating_point():
            inputs = torch.randn(n, *example.shape[1:], generator=generator, dtype=torch.float64)
            return inputs, torch.randint(
                classes, (n, *family.output_shape[2:]), generator=generator
            )
        tokens = torch.randint(classes, (n, example.shape[1] + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]

    inputs, targets = pool(count)
    parts = list(torch.arange(count).split(list(sizes)))
    if labels:
        for client, part in enumerate(parts):
            targets[part] = (client + targets[part] % labels) % classes
    test_parts = list(torch.tensor_split(torch.arange(tests), len(sizes)))
    data = fq.FederatedData.of((inputs, targets), pool(tests), parts, test_parts)
    return replace(data, public=pool(public)[0]) if public else data


Play = Callable[..., fq.Run]


@pytest.fixture
def play() -> Play:
    return _play


def _play(
    method: Method,
    family: fq.Family,
    data: fq.FederatedData,
    shares: Sequence[float] = (1.0,),
    engine: str = "sequential",
    rounds: int = 2,
    **options: Any,
) -> fq.Run:
    """Two rounds of all clients, dealt the shares in turn; in float64 and evaluated only at the end
    unless asked.
    """
    fleet = options.pop("fleet", None) or fq.Fleet.of(shares, data.num_clients, data.num_clients)
    options.setdefault("evaluation", fq.Evaluation(every=0))
    options.setdefault("precision", "fp64")
    return fq.run(method, family, data, fleet, engine, rounds, **options)


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name bytes after their argument: packed files have the time in them, and names must not
    change with it.
    """
    return argname if isinstance(val, bytes) else None


def shortened(words: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Give some flags of a command line other values. None may be given twice."""
    names, kept = flags[::2], list(words)
    for name in set(names) & set(kept) - {"--set"}:
        place = kept.index(name)
        del kept[place : place + 2]
    return [*kept, *flags]


def with_local(method: Method, **changes: Any) -> Method:
    """Return the method with other local settings, and few steps of a server that learns.

    SCAFFOLD gets SGD without momentum and clipping.
    """
    optimizer = changes.get("optimizer")
    method = few_server_steps(method)
    inner = method.over if isinstance(method, ProgFed) else method
    if isinstance(inner, Scaffold) and optimizer is not None:
        changes["optimizer"] = fq.optimizers.SGD(
            optimizer.lr, momentum=0.0, weight_decay=optimizer.weight_decay
        )
    return method.with_local(**changes)


# Relatives of FedResCuE, which share its learner and its nested nets, and of FedAvg with a server
# optimizer, for which FedYogi runs. Their variants run in `make test-all`.
RELATIVES = ("fedseq", "fedrush", "fedslim", "fjord", "fedavgm", "fedadam")
# Methods that cut one model. The others need a union, and have tests of their own: RaFL.
CUTTING = {name: kind for name, kind in METHODS.items() if not kind.trains_pairs}
QUICK_METHODS = [
    pytest.param(name, marks=pytest.mark.slow if name in RELATIVES else ()) for name in CUTTING
]


def few_server_steps(method: Method) -> Method:
    """Return the method with four steps of a server that learns in each round."""
    if not isinstance(method, (Prototypes, RaFL)):
        return method
    few = ServerTraining(fq.optimizers.SGD(lr=0.05), batch_size=4, steps=4, check_every=2)
    return replace(method, server_training=few)


def start_of(run: fq.Run, job: fq.methods.api.Job) -> Start:
    """What a job's client starts from, over the link of the run."""
    learner, cutter = run.method.learner(job, run.world), run.world.family.cutter
    payload = fq.methods.api.Payload(
        job.submodel,
        cutter.gather(
            run.server.weights,
            job.submodel,
            learner.received(run.world.family.member(job.submodel)),
        ),
    )
    initial = run.federation.initial_on(run.engine.device)
    return receive(run.federation, job, learner, payload, memory_of(run.server, job), initial)


def assert_same(one: fq.Run, other: fq.Run, atol: float = 1e-9) -> None:
    """Both runs stand at the same weights and memories, and told the same story on the way."""
    assert_same_state(one, other, atol)
    for mine, theirs in zip(one.records, other.records, strict=True):
        assert (mine.bytes_down, mine.bytes_up, mine.macs) == (
            theirs.bytes_down,
            theirs.bytes_up,
            theirs.macs,
        )
        assert mine.late == theirs.late
        assert mine.loss == pytest.approx(theirs.loss, abs=atol)
        assert_same_grades(mine, theirs, atol)


def assert_same_state(one: fq.Run, other: fq.Run, atol: float = 1e-9) -> None:
    """Both runs have the same server state and the same memories of clients."""
    torch.testing.assert_close(
        dict(one.server.weights), dict(other.server.weights), rtol=0, atol=atol
    )
    torch.testing.assert_close(dict(one.server.slots), dict(other.server.slots), rtol=0, atol=atol)
    torch.testing.assert_close(
        dict(one.server.extras), dict(other.server.extras), rtol=0, atol=atol
    )
    assert one.server.memory.keys() == other.server.memory.keys()
    for key, memory in one.server.memory.items():
        theirs = other.server.memory[key]
        assert memory.submodel == theirs.submodel
        assert memory.steps == theirs.steps
        torch.testing.assert_close(dict(memory.weights), dict(theirs.weights), rtol=0, atol=atol)
        torch.testing.assert_close(dict(memory.slots), dict(theirs.slots), rtol=0, atol=atol)
        torch.testing.assert_close(dict(memory.extras), dict(theirs.extras), rtol=0, atol=atol)


def assert_same_grades(one: Record, other: Record, atol: float = 1e-9) -> None:
    """Two rounds were evaluated alike: predictions are counted, and all else is a sum of real
    numbers.
    """
    assert one.grades.main == other.grades.main
    assert one.grades.accuracy == other.grades.accuracy
    assert one.grades.metrics.keys() == other.grades.metrics.keys()
    for metric, values in one.grades.metrics.items():
        assert values == pytest.approx(other.grades.metrics[metric], abs=atol), metric


def load_example(name: str) -> ModuleType:
    """Return a script of examples/ as a module."""
    return load_script(f"examples/{name}.py")


def load_script(path: str) -> ModuleType:
    """Return a script of the repository as a module."""
    file = Path(__file__).parents[1] / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    # where dataclasses look for it
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
