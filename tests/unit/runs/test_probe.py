"""The memory and the training speed of a machine.

Times differ between machines, so that no test asserts one.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import BudgetError, ConfigError
from fedquilt.hardware.process import free_memory
from fedquilt.runs.probe import Target, described, probe

BRIEF = 0.02  # seconds


@pytest.mark.parametrize("family", ["perceptron", "residual", "language"], indirect=True)
def test_a_proposed_budget_follows_from_the_measurements(family):
    target = Target(samples=100, epoch_seconds=1e6, memory=0.25, batch_size=4)
    found = probe(family, target=target, seconds=BRIEF)
    assert found.samples_per_second > 0
    assert found.macs_per_second == pytest.approx(found.samples_per_second * found.measured.macs)
    assert found.budget.macs == pytest.approx(found.macs_per_second * 1e6 / 100)
    assert found.budget.memory == found.memory * 0.25
    # with so much time, memory and a tiny model, the whole of it
    assert found.member.share == 1
    assert found.member.params == family.count(family.whole)
    assert found.member.macs == family.cost(family.whole).macs
    assert 1 <= found.cores <= os.cpu_count()


@pytest.mark.parametrize("share", [0.01, 1 / 4, 0.3, 1 / 2, 0.99, 1.0])
def test_a_member_is_named_by_a_share_that_gives_it(residual, share):
    member = residual.fit(fq.Budget(share=share))
    named = described(residual, member)
    assert residual.fit(fq.Budget(share=named.share)) == member
    # axes of 4 and 8 channels
    assert named.share == {0.01: 1 / 8, 0.3: 1 / 4, 0.99: 7 / 8}.get(share, share)
    assert (named.params, named.macs) == (residual.count(member), residual.cost(member).macs)


def test_a_probe_as_plain_values(perceptron):
    plain = json.loads(json.dumps(probe(perceptron, seconds=BRIEF).to_dict()))
    assert set(plain) == {
        "device", "precision", "cores", "memory", "target", "measured", "samples_per_second",
        "macs_per_second", "budget", "member",
    }  # fmt: skip
    assert set(plain["budget"]) == {"macs", "memory"}
    assert set(plain["member"]) == set(plain["measured"]) == {"share", "params", "macs", "memory"}
    assert plain["target"] == {
        "samples": 500,
        "epoch_seconds": 60.0,
        "memory": 0.5,
        "batch_size": 32,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_probe_trains_in_the_precision_asked_for(residual, precision):
    found = probe(residual, seconds=BRIEF, precision=precision)
    assert found.precision == precision
    # of training in that precision
    assert found.budget.memory == found.memory * found.target.memory
    assert (
        found.member.memory
        == residual.cost(residual.whole, fq.methods.api.TrainingStep(32, 1, precision)).memory
    )


def test_a_probe_changes_neither_the_global_random_state_nor_the_model(perceptron):
    state, weights = torch.random.get_rng_state(), perceptron.init(0)
    probe(perceptron, seconds=BRIEF)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.testing.assert_close(perceptron.init(0), weights, rtol=0, atol=0)


def test_the_error_of_an_impossible_target_has_the_speed_of_the_machine(perceptron):
    with pytest.raises(
        BudgetError,
        match=r"500 samples in 1e-12 s were asked .* multiply-adds a second. no member fits",
    ):
        probe(perceptron, target=Target(epoch_seconds=1e-12), seconds=BRIEF)


@pytest.mark.parametrize(
    "wrong", [{"samples": 0}, {"epoch_seconds": 0}, {"memory": 1.5}, {"batch_size": 0}]
)
def test_impossible_targets_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} = "):
        Target(**wrong)


# --- memory -------------------------------------------------------------------------------------


def machine(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


MEMINFO = "MemTotal:       24000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 20_000_000 * 1024),
        (
            {"sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"},
            20_000_000 * 1024,
        ),
        ({"sys/fs/cgroup/memory.max": "3000\n", "sys/fs/cgroup/memory.current": "1000\n"}, 2000),
        (
            {
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "3500\n",
            },
            0,
        ),
    ],
)
def test_free_memory_is_the_machines_within_the_containers_limit(tmp_path, limits, expected):
    machine(tmp_path, {"proc/meminfo": MEMINFO, **limits})
    assert free_memory(root=tmp_path) == expected


def test_this_machine_has_memory():
    assert free_memory() > 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_refused():
    with pytest.raises(ConfigError, match="cuda was to be measured; torch sees no GPU here"):
        free_memory("cuda")


@pytest.mark.gpu
def test_a_gpus_memory_is_its_own(perceptron):
    _, total = torch.cuda.mem_get_info()
    assert 0 < free_memory("cuda") <= total
    assert probe(perceptron, "cuda", seconds=BRIEF).memory <= total
