"""A deployment on loopback, as users start it: TLS, node keys, a gate, and three devices.

The commands run as processes of their own. They are bounded in time, and stopped by their id.
"""

from __future__ import annotations

import contextlib
import re
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import fedquilt as fq
from fedquilt.config.toml import read_toml
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.processes import Process, environment, free_port, program
from fedquilt.deployment.roster import Roster
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.load import load_run

pytest.importorskip("flwr")
SHARES = (1.0, 0.5, 0.25)
SECONDS = 180.0  # A deployment takes 45 s on two idle cores.
SETTINGS = """
rounds = 3
[method]
name = "fedrolex"
local = {{ batch_size = 10 }}
[model]
name = "tiny_resnet"
[data]
name = "{data}"
partition = "iid"
[fleet]
cohort = 1.0
clients = 3
budgets = {{ name = "uniform", shares = [1.0, 0.5, 0.25] }}
[engine]
name = "sequential"
precision = "fp64"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """Return a folder with settings, keys, the server's samples and those of three devices."""
    folder = tmp_path_factory.mktemp("deployment")
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (120, 1, 8, 8)).astype(np.uint8)
    targets = generator.integers(0, 5, 120)
    save = {"x_test": inputs[90:], "y_test": targets[90:]}
    np.savez(folder / "server.npz", x_train=inputs[:90], y_train=targets[:90], **save)
    (folder / "config.toml").write_text(SETTINGS.format(data=folder / "server.npz"))
    data, _ = experiment_of(folder).data.federate(3, 0)
    for client, rows in enumerate(data.parts):
        part = {"x_train": data.inputs[rows].numpy(), "y_train": data.targets[rows].numpy()}
        np.savez(folder / f"device-{client}.npz", **part, **save)
    make_keys(folder / "keys", 3)
    make_keys(folder / "foreign", 1)
    return folder


def experiment_of(folder: Path) -> Experiment:
    return Experiment.of(read_toml(folder / "config.toml"))


def command(folder: Path, name: str, *arguments: object) -> Process:
    """Return a process of the command line."""
    words = [sys.executable, "-m", "fedquilt", *map(str, arguments)]
    return Process(name, words, environment(folder / "home"), folder / f"{name}.txt")


@contextlib.contextmanager
def started(process: Process) -> Iterator[Process]:
    process.start()
    try:
        yield process
    finally:
        process.stop()


def wait_for(condition: Callable[[], object], process: Process, seconds: float = SECONDS) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert process.is_running or condition(), process.tail
        assert time.monotonic() < end, process.tail
        time.sleep(0.2)


def joined(place: Path, client: int, port: int) -> Process:
    keys = KeyFolder(place / "keys")
    return command(
        place,
        f"join-{client}",
        *("join", "--superlink", f"localhost:{port}", "--data", place / f"device-{client}.npz"),
        *("--budget", f"share={SHARES[client]}", "--state", place / f"state-{client}"),
        *("--key", keys.device_key(client + 1), "--ca", keys.ca, "--name", f"device {client}"),
    )


def check_what_the_gate_refuses(place: Path, port: int) -> None:
    """Try what only the server's owner may do, through the address that devices have."""
    import httpx

    keys = KeyFolder(place / "keys")
    context = ssl.create_default_context(cafile=str(keys.ca))
    url = f"https://localhost:{port}"
    with httpx.Client(base_url=url, verify=context, trust_env=False) as client:
        for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/"):
            assert client.post(path).status_code == client.get(path).status_code == 404
        large = client.post("/v1/fleet/push-object", content=b"x" * ((8 << 20) + 1))
        assert large.status_code == 413
        unsigned = client.post("/v1/fleet/pull-messages", content=b"cos\nsystem\n(S'id'\ntR.")
        assert 400 <= unsigned.status_code < 500

    home = place / "stranger"
    home.mkdir(exist_ok=True)
    (home / "config.toml").write_text(
        '[superlink]\ndefault = "gate"\n[superlink.gate]\n'
        f'address = "localhost:{port}"\nroot-certificates = "{keys.ca}"\n'
    )
    app = Path(fq.__file__).parent / "deployment" / "flower_app"
    public = KeyFolder(place / "foreign").device_public_keys[0]
    for words in (["run", str(app), "gate"], ["supernode", "register", str(public), "gate"]):
        done = subprocess.run(
            [program("flwr"), *words],
            env=environment(home),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0, words


@contextlib.contextmanager
def stranger(place: Path, port: int) -> Iterator[Process]:
    """Start a SuperNode whose key nobody registered."""
    keys, foreign = KeyFolder(place / "keys"), KeyFolder(place / "foreign")
    words = [program("flower-supernode"), "--superlink", f"localhost:{port}"]
    words += ["--host", "127.0.0.1", "--port", str(free_port()), "--isolation", "process"]
    words += ["--root-certificates", str(keys.ca)]
    words += ["--auth-supernode-private-key", str(foreign.device_key(1))]
    log = place / "stranger.txt"
    with started(Process("stranger", words, environment(place / "home"), log)) as process:
        yield process


def test_fedrolex_on_three_devices_equals_the_sequential_engine(place):
    out = place / "run"
    port = free_port()
    serve = command(
        place,
        "serve",
        "serve",
        place / "config.toml",
        "--out",
        out,
        *("--keys", place / "keys", "--port", port, "--deadline", 120),
    )
    with started(serve), contextlib.ExitStack() as stack:
        wait_for(lambda: "devices join with" in serve.tail, serve)
        check_what_the_gate_refuses(place, port)
        foreign = stack.enter_context(stranger(place, port))
        devices = [stack.enter_context(started(joined(place, n, port))) for n in range(3)]
        wait_for(lambda: not serve.is_running, serve)
        assert serve.status == 0, serve.tail
        assert all(device.is_running for device in devices)
        assert not foreign.is_running

    truth = experiment_of(place).prepare()
    truth.train(3)
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
    assert [entry.budget.share for entry in roster] == list(SHARES)
    assert [entry.name for entry in roster] == ["device 0", "device 1", "device 2"]
    assert [entry.size for entry in roster] == [30, 30, 30]
    said = (place / "join-0.txt").read_text()
    assert "This device sends to the server" in said
    assert "the number of training samples (30)" in said
    assert re.search(r"round 3/3 +loss", (place / "serve.txt").read_text())
    for words in (["clients", out], ["export", out, "--out", place / "m.safetensors"]):
        done = command(place, words[0], *words)
        with started(done):
            wait_for(lambda done=done: not done.is_running, done)
            assert done.status == 0, done.tail


def test_a_finished_deployment_is_not_begun_again_with_other_settings(place, tmp_path):
    out = place / "run"
    if not out.exists():
        pytest.skip("the deployment above did not run")
    text = (place / "config.toml").read_text().replace("rounds = 3", "rounds = 4")
    (tmp_path / "other.toml").write_text(text)
    arguments = ("serve", tmp_path / "other.toml", "--out", out, "--keys", place / "keys")
    with started(command(place, "again", *arguments)) as again:
        wait_for(lambda: not again.is_running, again)
        assert again.status == 2
        assert "has a deployment with other settings" in again.tail
