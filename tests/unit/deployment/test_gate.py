"""The gate in front of a SuperLink, through real TLS on loopback."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

import pytest

pytest.importorskip("flwr")
import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedquilt.deployment.gate import Gate, OpenGate
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.errors import ConfigError

SEEN: list[tuple[str, str, int]] = []  # Method, path and bytes of requests that were passed


async def respond(request: Request) -> Response:
    body = await request.body()
    SEEN.append((request.method, request.url.path, len(body)))
    echo = {"x-echo": request.headers.get("flwr-timestamp", "")}
    return Response(body[::-1], status_code=200, headers=echo)


def superlink() -> Starlette:
    """Return an application that accepts every request, as a SuperLink without a gate does."""
    return Starlette(routes=[Route("/{rest:path}", respond, methods=["GET", "POST", "PUT"])])


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> KeyFolder:
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, 1)
    return KeyFolder(folder)


@contextlib.contextmanager
def opened(keys: KeyFolder, **options: int) -> Iterator[tuple[OpenGate, httpx.Client]]:
    """Open a gate with TLS in front of an application with TLS, and a client that trusts the CA."""
    certificate = keys.server, keys.server_key
    SEEN.clear()
    with OpenGate(superlink(), certificate=certificate) as behind:  # type: ignore[arg-type]
        gate = Gate(f"https://127.0.0.1:{behind.port}", keys.ca, **options)
        with OpenGate(gate, certificate=certificate) as front:
            context = ssl.create_default_context(cafile=str(keys.ca))
            url = f"https://localhost:{front.port}"
            with httpx.Client(verify=context, base_url=url, trust_env=False) as client:
                yield front, client


def test_the_fleet_api_is_passed_with_its_headers(keys):
    with opened(keys) as (front, client):
        answer = client.post(
            "/v1/fleet/pull-messages",
            content=b"abc",
            headers={"flwr-timestamp": "now", "flwr-public-key": "K"},
        )
        assert (answer.status_code, answer.content) == (200, b"cba")
        assert answer.headers["x-echo"] == "now"
        assert SEEN == [("POST", "/v1/fleet/pull-messages", 3)]
        traffic = front.gate.traffic["127.0.0.1", "K"]
        assert traffic.total == 6


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/openapi.json",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet",
        "/v1/fleet/",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "/v1/fleet/a/b",
        "//v1/fleet/pull-messages",
        "/V1/FLEET/pull-messages",
        "/v1/fleet/pull-messages%00",
        "/v1/fleet/pull-messages%0a",
    ],
)
def test_every_other_path_gets_404(keys, path):
    with opened(keys) as (_, client):
        request = client.build_request("POST", "/", content=b"x")
        request.url = request.url.copy_with(raw_path=path.encode())
        assert client.send(request).status_code == 404
        assert SEEN == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH"])
def test_every_other_method_gets_404(keys, method):
    with opened(keys) as (_, client):
        assert client.request(method, "/v1/fleet/pull-messages").status_code == 404
        assert SEEN == []


def test_large_bodies_get_413_whether_or_not_their_length_is_stated(keys):
    with opened(keys, max_body=1000) as (front, client):
        assert client.post("/v1/fleet/push-object", content=b"x" * 1000).status_code == 200
        assert client.post("/v1/fleet/push-object", content=b"x" * 1001).status_code == 413
        pieces = (b"x" * 100 for _ in range(100))
        with contextlib.suppress(httpx.WriteError, httpx.RemoteProtocolError):
            assert client.post("/v1/fleet/push-object", content=pieces).status_code == 413
        assert [size for _, _, size in SEEN] == [1000]
        assert front.gate._buffered == 0
        assert front.gate.refused == 2


def test_the_bytes_of_a_node_are_bounded(keys):
    with opened(keys, max_node_bytes=5000) as (_, client):
        one, other = {"flwr-public-key": "1"}, {"flwr-public-key": "2"}
        statuses = [
            client.post("/v1/fleet/push-object", content=b"x" * 1000, headers=one).status_code
            for _ in range(4)
        ]
        assert statuses == [200, 200, 200, 429]
        answer = client.post("/v1/fleet/push-object", content=b"x", headers=other)
        assert answer.status_code == 200


def test_plain_http_and_foreign_certificates_are_refused(keys, tmp_path):
    with opened(keys) as (front, _):
        with pytest.raises(httpx.HTTPError):
            httpx.post(f"http://127.0.0.1:{front.port}/v1/fleet/x", trust_env=False)
        make_keys(tmp_path, 1)
        context = ssl.create_default_context(cafile=str(KeyFolder(tmp_path).ca))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.post(
                f"https://127.0.0.1:{front.port}/v1/fleet/x", verify=context, trust_env=False
            )
        assert SEEN == []


def test_a_superlink_that_is_gone_gives_502(keys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    gate = Gate(f"http://127.0.0.1:{port}")
    with OpenGate(gate) as front:
        url = f"http://127.0.0.1:{front.port}/v1/fleet/pull-messages"
        assert httpx.post(url, trust_env=False).status_code == 502


def test_a_port_in_use_is_reported():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port} was asked for; .*Another port"):
            OpenGate(Gate("http://127.0.0.1:1"), port=port)
