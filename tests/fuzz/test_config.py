"""Two thousand broken configurations: each is read, or refused in words; none ends in a stack
trace.

Mutations come from a seed, so that a failure can be repeated: its number is in the message.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fedquilt.config.toml import assign, parse_assignment, parse_toml
from fedquilt.errors import FedquiltError
from fedquilt.runs.experiment import Experiment

COUNT = 2_000
PREPARED = 40  # of those that can be read, so many are put together whole

OWN = """
import torch
from torch import nn
from fedquilt.data import Pool

def pool(samples: int = 60, classes: int = 3) -> Pool:
    x, y = torch.arange(samples * 4.0).reshape(samples, 4) / 240, torch.arange(samples) % classes
    return Pool.of((x, y), (x, y), clients=torch.arange(samples) // 6, domains=y)

def net(num_classes: int, hidden: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
"""

BASE = """
rounds = 3
seed = 1
init = ""

[method]
name = "fedrolex"
preset = "paper"
shift = 2
overlap = 0.5
weighting = "data"
server_optimizer = { name = "server_adam", lr = 0.1 }

[method.local]
epochs = 2
batch_size = 4
norm = "tracked"
scaler = true
crop = 0
schedule = { name = "steps", milestones = [1, 2], factor = 0.5 }

[method.local.optimizer]
name = "adam"
lr = 1e-3
clip = 1.0

[model]
name = "own.py:net"
hidden = 8

[data]
name = "own.py:pool"
samples = 48
partition = { name = "dirichlet", alpha = 5.0, min_size = 2 }

[fleet]
clients = 6
cohort = 0.5
budgets = { "1.0" = 0.25, "0.5" = 0.75 }
dynamic = true
availability = { name = "diurnal", period = 12, awake = 11 }

[engine]
name = "sequential"
precision = "fp64"
memory = 1_000_000

[link]
name = "lossy-mild"
loss = { name = "columns", rate = [0.1, 0.2], upto = 0.5, granularity = 0.25 }
codec = { bits = 4, keep = 0.5, feedback = true, down = true }

[link.clock]
down = [1e6, 2e6]
latency = 0.1
compute = 1e9

[evaluation]
every = 2
per_client = false

[checkpoint]
rounds = 2
seconds = 0.5
""".strip().splitlines()

VALUES = [  # two spaces apart
    *re.split(
        r"\s{2,}",
        """
        -1  0  1  2  3  7  0.5  0.25  1.0  0.1  -0.0  nan  -inf  1e400  1e-320  0x7f
        99999999999999999999999  9223372036854775807  -9223372036854775808  true  false
        "x"  ""  "none"  "\\u0000"  1979-05-27  07:32:00  []  [1, "a", [2]]  [[[[[[]]]]]]
        {}  { name = "sgd" }  { name = 3 }  { name = "two_level", rho = 2 }
        "own.py:nothing"  "own.py"  "absent.py:x"  "natural"  "labels"  "income"
        "csv"  "fedavg"  "a/b.npz"  "hub:"
        """.strip(),
    ),
    f'"{"long" * 500}"',
    "9" * 5000,
    "[" * 3000,
]


def mutated(number: int) -> bytes:
    """The base with one to three things wrong."""
    dice = random.Random(number)
    lines = list(BASE)
    for _ in range(dice.randint(1, 2)):
        place = dice.randrange(len(lines))
        match dice.choices(range(6), (8, 3, 2, 1, 2, 1))[0]:
            case 0:  # another value
                place = dice.choice([at for at, line in enumerate(lines) if "=" in line])
                lines[place] = f"{lines[place].partition('=')[0]}= {dice.choice(VALUES)}"
            case 1:  # another key
                key, equals, value = lines[place].partition(" =")
                at = dice.randrange(len(key) + 1)
                character = dice.choice(string.printable)
                rest = key[at + dice.randrange(2) :]
                lines[place] = f"{key[:at]}{character}{rest}{equals}{value}"
            case 2:  # a line less
                lines[place] = ""
            case 3:  # a line moved or doubled
                lines.insert(place, lines[dice.randrange(len(lines))])
            case 4:  # other bytes
                text = "\n".join(lines).encode(errors="surrogateescape")
                at = dice.randrange(len(text))
                text = (
                    text[:at] + dice.randbytes(dice.randrange(3)) + text[at + dice.randrange(4) :]
                )
                lines = text.decode(errors="surrogateescape").split("\n")
            case 5:  # a key from elsewhere
                lines[place] += f"\n{dice.choice(lines)}"
    return "\n".join(lines).encode(errors="surrogateescape")


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)


def test_the_base_is_whole(whole: None) -> None:
    experiment = Experiment.of(parse_toml("\n".join(BASE).encode(), "base.toml"))
    assert experiment.prepare().train(3).server.round == 3
    assert Experiment.of(parse_toml(experiment.to_toml().encode(), "again.toml")) == experiment


def test_mutations_are_read_or_refused_in_words(whole: None) -> None:
    refused, read, prepared = 0, 0, 0
    for number in range(COUNT):
        text = mutated(number)
        try:
            experiment = Experiment.of(parse_toml(text, "fuzz.toml"))
            read += 1
            data, _ = experiment.data.federate(experiment.fleet.clients, experiment.seed)
            experiment.fleet.fleet(data.num_clients, experiment.seed)
            if prepared < PREPARED:
                experiment.prepare()
                prepared += 1
        except FedquiltError as error:
            refused += bool(str(error))
        except Exception as error:
            pytest.fail(f"mutation {number} ended in {error!r}:\n{text.decode(errors='replace')}")
    assert prepared == PREPARED
    # both happen often, or the mutations test nothing
    assert read > COUNT / 20
    assert refused > COUNT / 2


def test_assignments_are_read_or_refused_in_words(whole: None) -> None:
    read = 0
    for number in range(500):
        dice = random.Random(number)
        key, _, value = dice.choice([line for line in BASE if "=" in line]).partition(" = ")
        text = f"method.{key}={dice.choice([value, *VALUES])}"
        at = dice.randrange(len(text))
        text = text[:at] + dice.choice(["", *string.printable]) + text[at + dice.randrange(2) :]
        try:
            path, found = parse_assignment(text)
            read += 1
            Experiment.of(assign(parse_toml("\n".join(BASE).encode(), "base.toml"), path, found))
        except FedquiltError:
            pass
        except Exception as error:
            pytest.fail(f"--set {text!r} ended in {error!r}")
    assert read > 300
