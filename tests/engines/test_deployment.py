"""A deployment on loopback, as users start it: TLS, node keys, a gate, and three devices.

The commands run as processes of their own. They are bounded in time, and stopped by their id.
"""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from deployments import Deployment, Plan

import fedquilt as fq
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.processes import Process, environment, free_port, program
from fedquilt.deployment.roster import Roster
from fedquilt.runs.load import load_run

pytest.importorskip("flwr")


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    """Return a deployment that is not started, with keys of a stranger beside its own."""
    plan = Plan(rounds=3)
    with Deployment(tmp_path_factory.mktemp("deployment"), plan) as deployment:
        make_keys(deployment.folder / "foreign", 1)
        yield deployment


def check_what_the_gate_refuses(folder: Path, port: int) -> None:
    """Try what only the server's owner may do, through the address that devices have."""
    import httpx

    keys = KeyFolder(folder / "keys")
    context = ssl.create_default_context(cafile=str(keys.ca))
    url = f"https://localhost:{port}"
    with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
            assert client.post(path).status_code == client.get(path).status_code == 404
        large = client.post("/v1/fleet/push-object", content=b"x" * ((8 << 20) + 1))
        assert large.status_code == 413
        unsigned = client.post("/v1/fleet/pull-messages", content=b"cos\nsystem\n(S'id'\ntR.")
        assert 400 <= unsigned.status_code < 500

    home = folder / "stranger"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "gate"\n[superlink.gate]\n'
        f'address = "localhost:{port}"\nroot-certificates = "{keys.ca}"\n'
    )
    app = Path(fq.__file__).parent / "deployment" / "flower_app"
    public = KeyFolder(folder / "foreign").device_public_keys[0]
    for words in (["run", str(app), "gate"], ["supernode", "register", str(public), "gate"]):
        done = subprocess.run(
            [program("flwr"), *words],
            env=environment(home),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0, words


def stranger(deployment: Deployment) -> Process:
    """Return a SuperNode whose key nobody registered."""
    folder = deployment.folder
    words = [program("flower-supernode"), "--superlink", f"localhost:{deployment.port}"]
    words += ["--host", "127.0.0.1", "--port", str(free_port()), "--isolation", "process"]
    words += ["--root-certificates", str(KeyFolder(folder / "keys").ca)]
    words += ["--auth-supernode-private-key", str(KeyFolder(folder / "foreign").device_key(1))]
    return Process("stranger", words, environment(folder / "home"), folder / "stranger.txt")


def test_fedrolex_on_three_devices_equals_the_sequential_engine(deployment):
    serve = deployment.serve()
    check_what_the_gate_refuses(deployment.folder, deployment.port)
    foreign = deployment.begin(stranger(deployment))
    devices = [deployment.join(client) for client in range(3)]
    deployment.finish()
    assert all(device.is_running for device in devices)
    assert not foreign.is_running
    deployment.end()
    assert serve.status == 0
    assert deployment.leftovers == []

    truth = deployment.experiment.prepare()
    truth.train(3)
    out = deployment.out
    run = load_run(out)
    torch.testing.assert_close(
        dict(run.server.weights), dict(truth.server.weights), rtol=0, atol=1e-9
    )
    for mine, theirs in zip(truth.records, run.records, strict=True):
        assert (mine.bytes_down, mine.bytes_up, mine.macs) == (
            theirs.bytes_down,
            theirs.bytes_up,
            theirs.macs,
        )
        assert mine.loss == pytest.approx(theirs.loss, abs=1e-9)
        assert theirs.attendance is not None
        assert theirs.attendance.asked == (0, 1, 2)
        assert theirs.attendance.absent == ()

    roster = Roster.load(out / "roster.json")
    assert [entry.budget.share for entry in roster] == list(deployment.plan.shares)
    assert [entry.name for entry in roster] == ["device 0", "device 1", "device 2"]
    assert [entry.size for entry in roster] == [30, 30, 30]
    said = deployment.said("join-0")
    assert "This device sends to the server" in said
    assert "the number of training samples (30)" in said
    assert re.search(r"round 3/3 +loss", deployment.said("serve"))
    model = deployment.folder / "m.safetensors"
    for words in (["clients", out], ["export", out, "--out", model]):
        done = deployment.begin(deployment.command(words[0], *words))
        deployment.wait(lambda done=done: not done.is_running, f"{words[0]} has ended")
        assert done.status == 0, done.tail


def test_a_finished_deployment_is_not_begun_again_with_other_settings(deployment, tmp_path):
    if not deployment.out.exists():
        pytest.skip("the deployment above did not run")
    text = (deployment.folder / "config.toml").read_text().replace("rounds = 3", "rounds = 4")
    (tmp_path / "other.toml").write_text(text)
    keys = deployment.folder / "keys"
    arguments = ("serve", tmp_path / "other.toml", "--out", deployment.out, "--keys", keys)
    again = deployment.begin(deployment.command("again", *arguments))
    deployment.wait(lambda: not again.is_running, "the second server has ended")
    assert again.status == 2
    assert "has a deployment with other settings" in again.tail
