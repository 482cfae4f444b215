"""Requests of `keys`, `serve` and `join` that cannot be carried out: one sentence, status 2."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr")
from fedquilt.cli.main import main
from fedquilt.deployment.keys import make_keys

SETTINGS = """
method = "fedavg"
model = "tiny_resnet"
data = "a.npz"
fleet = { clients = 2, cohort = 2 }
rounds = 1
"""
JOIN = ["join", "--superlink", "127.0.0.1:{port}", "--data", "a.npz", "--budget", "share=0.5"]
SECURE = [*JOIN, "--ca", "keys/ca.crt"]
SERVE = ["serve", "c.toml", "--out", "out"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory) -> Path:
    """Return a folder with settings, samples and keys of two devices."""
    folder: Path = tmp_path_factory.mktemp("requests")
    generator = np.random.default_rng(0)
    inputs = generator.integers(0, 256, (25, 1, 8, 8)).astype(np.uint8)
    targets = np.arange(25) % 5
    tests = {"x_test": inputs[20:], "y_test": targets[20:]}
    np.savez(folder / "a.npz", x_train=inputs[:20], y_train=targets[:20], **tests)
    np.savez(folder / "empty.npz", x_train=inputs[:0], y_train=targets[:0], **tests)
    (folder / "bad.npz").write_bytes(b"no archive")
    (folder / "c.toml").write_text(SETTINGS)
    make_keys(folder / "keys", 2)
    (folder / "open").write_bytes((folder / "keys" / "device-1").read_bytes())
    (folder / "open").chmod(0o644)
    (folder / "other").write_bytes(b"no key")
    (folder / "other").chmod(0o600)
    return folder


@pytest.fixture
def port(workplace, monkeypatch) -> Iterator[int]:
    """Return a port that is in use, in the folder of `workplace`."""
    monkeypatch.chdir(workplace)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["keys", "new", "--devices", "0"], "1 to 10,000 would work"),
        (["keys", "new", "--devices", "1", "--host", "a b"], "an address would work"),
        (["serve", "--out", "out"], "A file of settings would work"),
        (["serve", "none.toml", "--out", "out"], "No such file"),
        ([*SERVE, "--host", "0.0.0.0"], "plain HTTP is for this machine alone"),
        ([*SERVE, "--keys", "none"], "No such file"),
        ([*SERVE, "--keys", "keys", "--clients", "5"], "there are 2 keys of devices"),
        ([*SERVE, "--clients", "0"], "whole numbers from 1 on"),
        ([*SERVE, "--least", "0"], "so that 1 to 2 would work"),
        ([*SERVE, "--least", "7"], "there are 2 clients"),
        ([*SERVE, "--deadline", "nan"], "1 s to a week would work"),
        ([*SERVE, "--enough", "3"], "so that 1 to 2 would work, or 0 to wait for all"),
        ([*SERVE, "--least", "2", "--enough", "1"], "counts with at least 2 replies"),
        ([*SERVE, "--max-rms", "0"], "--max-rms 0 was asked for; numbers above 0"),
        ([*SERVE, "--max-rms-ratio", "1"], "--max-rms-ratio 1 was asked for; numbers above 1"),
        ([*SERVE, "--port", "99999"], "1 to 65535 would work"),
        ([*SERVE, "--port", "{port}"], "Another port"),
        ([*SERVE, "--superlink", "127.0.0.1:1"], "it does not answer"),
        ([*SERVE, "--superlink", "example.org:8000"], "an address of this machine"),
        ([*SERVE, "--strike-off", "3"], "the roster has 0 clients"),
        (JOIN[:5], "one of --budget and --probe"),
        ([*JOIN, "--probe"], "one of --budget and --probe"),
        ([*JOIN[:-1], "shar=0.5"], "share=0.5 would work"),
        ([*JOIN[:-1], "share=0"], "a number above 0"),
        (["join", "--superlink", "x", *JOIN[3:]], "host:port would work"),
        (["join", "--superlink", "127.0.0.1:1", *JOIN[3:]], "it does not answer"),
        (["join", "--superlink", "example.org:9092", *JOIN[3:]], "plain HTTP is for this machine"),
        ([*JOIN[:4], "none.npz", *JOIN[5:]], "no such file or folder"),
        ([*JOIN[:4], "empty.npz", *JOIN[5:]], "at least one sample"),
        ([*JOIN[:4], "bad.npz", *JOIN[5:]], "cannot be read as an .npz file"),
        (SECURE, "--ca and --key belong together"),
        ([*SECURE, "--key", "none"], "No such file"),
        ([*SECURE, "--key", "other"], "`fedquilt keys` makes such keys"),
        ([*SECURE, "--key", "open"], "others can read it"),
        ([*JOIN, "--ca", "keys/device-1", "--key", "keys/device-1"], "no certificate in PEM"),
        ([*JOIN, "--name", "a\nb"], "printable characters"),
        ([*JOIN, "--device", "gpu9"], "this machine has"),
        ([*JOIN, "--allow", "mine"], "mine.py:Mine would work"),
        ([*JOIN, "--allow", "none.py:Mine"], "there is no file"),
    ],
)
def test_requests_that_cannot_be_carried_out(arguments, reason, port, capsys):
    words = [word.replace("{port}", str(port)) for word in arguments]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert reason in said
    assert "Traceback" not in said
    assert not Path("out/config.toml").exists()
