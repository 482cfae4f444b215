"""Deployments on loopback: every fault once, every method once, and a stranger who sends 300 MB.

They are long, because Flower takes a minute to notice that a process was killed. What they measure
several times is on the page of performance (`bench/faults.py`).
"""

from __future__ import annotations

import contextlib
import ssl
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Deployment, Plan

from fedquilt.deployment.keys import KeyFolder
from fedquilt.methods import METHODS

pytest.importorskip("flwr")
faults = pytest.importorskip("faults")
pytestmark = pytest.mark.slow
STEPS = "server_training = { steps = 5 }"
# Methods that need more than one whole model: public samples, or a pair of nets.
PLANS = {
    "feddf": Plan(settings=f"prototypes = [1.0, 0.5, 0.25]\n{STEPS}", public=24),
    "dsfl": Plan(settings=f"prototypes = [1.0, 0.5, 0.25]\n{STEPS}", public=24),
    "fedet": Plan(settings=f"prototypes = [0.5, 0.25]\n{STEPS}", public=24),
    "rafl": Plan(shares=(1.0, 1.0, 1.0), models=('name = "mlp"', 'name = "tiny_resnet"')),
}
MAX_POLLUTED_BYTES = 60 << 20  # Growth of a SuperLink while 300 MB are sent through the gate


def test_every_fault_is_over_and_the_model_equals_its_replay():
    results = faults.live(list(faults.FAULTS), 1, 60, print)
    for name, result in results.items():
        assert result.skipped or (len(result.lost) == 1 and not result.errors), name


def test_ten_megabytes_arrive_over_a_slow_link():
    assert faults.slow_link(print).lost == [0]


def test_a_run_under_random_kills_equals_its_replay():
    assert faults.run_random(50, 0, print).all_back


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_numbers_of_sequential(name, tmp_path):
    plan = replace(PLANS.get(name, Plan()), method=name)
    with Deployment(tmp_path, plan) as deployment:
        deployment.start().finish()
        deployment.end()
        deployment.check()


def resident(process: int) -> int:
    """Return the resident memory of a process in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no memory of {process}")


def test_strangers_cannot_fill_the_servers_memory(tmp_path):
    import httpx

    with Deployment(tmp_path, Plan(rounds=2, shares=(1.0,))) as deployment:
        deployment.serve()
        keys = KeyFolder(tmp_path / "keys")
        link = deployment.pid("superlink")
        assert link is not None
        context = ssl.create_default_context(cafile=str(keys.ca))
        url = f"https://localhost:{deployment.port}"
        client = httpx.Client(base_url=url, verify=context, trust_env=False, timeout=60)
        client.headers["content-type"] = "application/protobuf"
        with client:
            deployment.wait(lambda: "are ready" in deployment.said("serve"), "the ServerApp runs")
            before = resident(link)
            pieces = (bytes(1 << 20) for _ in range(300))  # Its length is not stated.
            for content in (bytes(300 << 20), pieces):
                # The gate may close the connection before all was sent.
                with contextlib.suppress(httpx.TransportError):
                    assert client.post("/v1/fleet/push-object", content=content).status_code == 413
        assert resident(link) - before < MAX_POLLUTED_BYTES
