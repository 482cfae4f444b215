"""A Ray cluster that another process started, reached by its address and its token."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedquilt as fq

pytestmark = pytest.mark.slow  # A cluster of processes is started: `make test-all`


@dataclass(frozen=True)
class Head:
    """Head node that another process started: its address, and the token to use it."""

    address: str
    environment: Mapping[str, str]

    def fedquilt(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """A command in a process of its own, which has a connection of its own."""
        quick = [
            "--rounds",
            "2",
            "--clients",
            "4",
            "--cohort",
            "3",
            "--epochs",
            "1",
            "--precision",
            "fp64",
        ]
        return subprocess.run(
            [sys.executable, "-m", "fedquilt", "run", *quick, *words],
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """Start a head node with a token, as a user would. Its folder is short, because socket paths
    are limited.
    """
    pytest.importorskip("ray")
    with (
        socket.socket() as free,
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder,
    ):
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ours = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        environment = {**ours, **token, "HOME": folder, "RAY_USAGE_STATS_ENABLED": "0"}
        words = {
            "--port": port, "--node-ip-address": "127.0.0.1", "--temp-dir": folder, "--num-cpus": 2,
            "--include-dashboard": "false", "--min-worker-port": 0, "--max-worker-port": 0,
        }  # fmt: skip
        node = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"),
                "start",
                "--head",
                "--block",
                *map(str, sum(words.items(), ())),
            ],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _await_listener(port)
            yield Head(f"127.0.0.1:{port}", environment)
        finally:
            node.terminate()  # it ends what it started
            try:
                node.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(node.pid, signal.SIGKILL)


def _await_listener(port: int) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            assert time.monotonic() < until, "the head node did not come up"
            time.sleep(0.2)


def test_a_cluster_by_its_address_gives_the_weights_of_the_sequential_engine(head, tmp_path):
    there = head.fedquilt(
        "--engine",
        "ray",
        "--set",
        f"engine.address={head.address}",
        "--out",
        str(tmp_path / "there"),
    )
    here = head.fedquilt("--engine", "sequential", "--out", str(tmp_path / "here"))
    assert (there.returncode, here.returncode) == (0, 0), there.stderr + here.stderr
    one, other = (fq.load_state(tmp_path / name).weights for name in ("there", "here"))
    torch.testing.assert_close(dict(one), dict(other), rtol=0, atol=1e-9)


def test_the_variable_ray_address_names_a_cluster(head, tmp_path):
    found = head.fedquilt(
        "--engine", "ray", "--out", str(tmp_path / "run"), RAY_ADDRESS=head.address
    )
    assert found.returncode == 0, found.stderr
    assert fq.load_state(tmp_path / "run").round == 2


@pytest.mark.parametrize("token", ["", "ab" * 32])
def test_a_missing_token_is_named_in_the_error(head, token):
    found = head.fedquilt(
        "--engine", "ray", "--set", f"engine.address={head.address}", RAY_AUTH_TOKEN=token
    )
    assert found.returncode == 2
    *_, last = found.stderr.strip().splitlines()
    assert last.startswith(f"ConfigError: no Ray cluster could be reached at '{head.address}'")
    assert last.endswith(
        "If it asks for a token, RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH must have it."
    )
