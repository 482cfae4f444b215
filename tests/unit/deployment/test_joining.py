"""What `fedquilt serve` and `join` refuse before anything is started."""

from __future__ import annotations

import socket

import pytest

pytest.importorskip("flwr")
from fedquilt.deployment.gate import Gate, OpenGate
from fedquilt.deployment.joining import ServerEndpoint, parse_budget
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.serving import Address, begin, is_loopback
from fedquilt.deployment.worker import INTERNALS, _internals
from fedquilt.errors import ConfigError
from fedquilt.terms import Budget


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("share=0.5", Budget(share=0.5)),
        ("memory=2MB, macs=28M", Budget(memory=2e6, macs=28e6)),
        ("params=1000", Budget(params=1000)),
    ],
)
def test_budgets_are_read(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "0.5", "share", "share=", "share=2", "speed=1", "share=x"])
def test_texts_that_are_no_budget_are_refused(text):
    with pytest.raises(ConfigError, match="--budget"):
        parse_budget(text)


def test_loopback_is_recognised():
    assert all(map(is_loopback, ["localhost", "127.0.0.1", "127.9.9.9", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "example.org", ""]))


def test_plain_http_is_for_loopback_alone():
    with pytest.raises(ConfigError, match="plain HTTP is for this machine alone"):
        Address("0.0.0.0").check()
    with pytest.raises(ConfigError, match="plain HTTP is for this machine alone"):
        ServerEndpoint("example.org:9092").check()


@pytest.mark.parametrize("address", ["", "localhost", ":9092", "localhost:0", "localhost:99999"])
def test_addresses_without_host_or_port_are_refused(address):
    with pytest.raises(ConfigError, match="host:port would work"):
        ServerEndpoint(address).check()


def test_a_server_that_does_not_answer_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="it does not answer"):
        ServerEndpoint(f"127.0.0.1:{port}").check()


def test_certificates_are_compared_when_a_device_joins(tmp_path):
    make_keys(tmp_path / "a", 1)
    make_keys(tmp_path / "b", 1)
    keys, other = KeyFolder(tmp_path / "a"), KeyFolder(tmp_path / "b")
    gate = Gate("http://127.0.0.1:1")
    with OpenGate(gate, certificate=(keys.server, keys.server_key)) as front:
        device = keys.device_key(1)
        ServerEndpoint(f"localhost:{front.port}", keys.ca, device).check()
        assert ServerEndpoint(f"localhost:{front.port}", keys.ca, device).clock_warning() == ""
        with pytest.raises(ConfigError, match="its certificate is not accepted"):
            ServerEndpoint(f"localhost:{front.port}", other.ca, device).check()
        # 127.0.0.2 is the same machine, and a name that the certificate does not have.
        with pytest.raises(ConfigError, match=r"does not answer|IP address mismatch"):
            ServerEndpoint(f"127.0.0.2:{front.port}", keys.ca, device).check()
    with (
        OpenGate(gate) as plain,
        pytest.raises(ConfigError, match="it does not speak TLS"),
    ):
        ServerEndpoint(f"localhost:{plain.port}", keys.ca, device).check()


def test_a_folder_without_a_run_cannot_be_resumed(tmp_path):
    with pytest.raises(ConfigError, match="no deployment in"):
        begin(tmp_path, None, 3, Address(), 60, 1)


def test_keys_without_devices_are_refused(tmp_path):
    make_keys(tmp_path, 1)
    for path in KeyFolder(tmp_path).device_public_keys:
        path.unlink()
    with pytest.raises(ConfigError, match="it has no keys of devices"):
        Address(keys=KeyFolder(tmp_path)).check()


def test_the_worker_uses_these_internals_of_flwr_and_no_others():
    names = sorted(name for group in INTERNALS.values() for name in group)
    assert sorted(vars(_internals())) == names
    assert names == [
        "AcquireTaskRequest",
        "HeartbeatSender",
        "RuntimeHttpClient",
        "RuntimeTokenHttpInterceptor",
        "RuntimeVersionHttpInterceptor",
        "SubStatus",
        "SuperExecAuthHttpInterceptor",
        "TaskType",
        "make_simple_http_retry_invoker",
        "make_task_heartbeat_fn_http",
        "pull_task_input",
        "push_message",
        "push_task_output",
    ]
