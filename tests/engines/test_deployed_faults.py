"""Deployments on loopback: every fault once, every method once, and a stranger who sends 300 MB.

They are long, because Flower takes a minute to notice that a process was killed. What they measure
several times is on the page of performance (`bench/faults.py`).
"""

from __future__ import annotations

import contextlib
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from deployments import Deployment, Plan

import fedquilt.deployment
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.processes import environment, program
from fedquilt.deployment.superlink import CONNECTION
from fedquilt.methods import METHODS
from fedquilt.runs.load import load_run

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


def test_three_machines_train_over_links_that_lose_and_delay():
    result = faults.lossy_network(print)
    if result.skipped:
        pytest.skip(result.skipped)
    assert not result.errors


def test_a_run_under_random_kills_equals_its_replay():
    assert faults.run_random(50, 0, print).all_back


@pytest.mark.parametrize("name", METHODS)
def test_a_method_gives_the_numbers_of_sequential(name, tmp_path):
    plan = replace(PLANS.get(name, Plan()), method=name)
    with Deployment(tmp_path, plan) as deployment:
        deployment.start().finish()
        deployment.end()
        deployment.check()


def test_a_device_with_a_new_key_joins_a_run_that_has_begun(tmp_path):
    make_keys(tmp_path / "keys", 2)
    with Deployment(tmp_path, Plan(rounds=20)) as deployment:
        deployment.serve()
        deployment.join(0)
        deployment.join(1)
        deployment.wait_for_round(1)
        make_keys(tmp_path / "keys", 3)
        deployment.wait(
            lambda: "device-3.pub is a new key" in deployment.said("serve"), "the key is registered"
        )
        deployment.join(2)
        deployment.wait(
            lambda: "device 2 joined as client 2" in deployment.said("serve"), "device 2 has joined"
        )
        deployment.finish()
        deployment.end()
        deployment.check()
        records = deployment.records
    assert records[0].attendance is not None
    assert records[0].attendance.asked == (0, 1)
    assert records[-1].attendance is not None
    assert 2 in records[-1].attendance.replied
    (arrival,) = [a for record in records if record.attendance for a in record.attendance.arrivals]
    assert (arrival.client, arrival.is_new, arrival.size) == (2, True, 30)
    assert load_run(deployment.out).fleet.num_clients == 3


FOREIGN = """
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()


@client.train()
def train(message, context):
    Path("{folder}/ran").write_text("the device ran it")
    return Message(RecordDict(), reply_to=message)


@server.main()
def main(grid, context):
    messages = [Message(RecordDict(), node, "train") for node in grid.get_node_ids()]
    replies = grid.send_and_receive(messages, timeout=120)
    errors = [reply.error.reason if reply.has_error() else "" for reply in replies]
    Path("{folder}/errors").write_text("\\n".join(errors))
"""


def test_an_app_of_somebody_else_does_not_run_on_a_device(tmp_path):
    """Whoever controls the SuperLink can submit apps. A joined device runs none of them."""
    app = tmp_path / "foreign"
    app.mkdir()
    (app / "fedquilt_app.py").write_text(FOREIGN.format(folder=tmp_path))
    own = Path(fedquilt.deployment.__file__).parent / "flower_app"
    (app / "pyproject.toml").write_text((own / "pyproject.toml").read_text())
    with Deployment(tmp_path, Plan(shares=(1.0, 0.5))) as deployment:
        deployment.serve()
        deployment.join(0)  # The run waits for the second device.
        deployment.wait(lambda: "1 of 2 devices" in deployment.said("serve"), "device 0 is there")
        home = deployment.out / "deployment" / "flower"
        done = subprocess.run(
            [program("flwr"), "run", str(app), CONNECTION],
            env=environment(home),
            capture_output=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done
        errors = tmp_path / "errors"
        deployment.wait(errors.exists, "the foreign ServerApp has its replies")
        assert "not a note and files" in errors.read_text(), errors.read_text()
        assert not (tmp_path / "ran").exists()
        assert deployment.processes["join-0"].is_running


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
