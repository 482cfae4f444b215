"""The gate in front of a SuperLink: it lets devices through, and nothing else.

A SuperLink serves all its APIs on one port. Its Control API has no password, so that whoever
reaches it can run code on every device, and it reads bodies of any size before it checks keys. So
it listens on loopback only, and devices connect to the gate. The gate speaks TLS, passes
`POST /v1/fleet/NAME` with a body of bounded size, and limits the bytes of each node.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
import threading
import time
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError
from fedquilt.storage.files import why

if TYPE_CHECKING:
    import httpx
    from starlette.requests import Request
    from starlette.responses import Response

MAX_BODY_BYTES = 8 << 20  # Largest body of a request
MAX_BUFFERED_BYTES = 256 << 20  # Bodies of all requests that are being read
MAX_NODE_BYTES = 1 << 30  # Bytes of a node within `WINDOW_SECONDS`, in both directions
WINDOW_SECONDS = 60.0
MAX_NODES = 10_000  # Nodes whose bytes are counted. The one that was silent longest is dropped.
BODY_SECONDS = 180.0  # Time for the body of one request
UPSTREAM_SECONDS = 120.0  # Time for the SuperLink's response
START_SECONDS = 20.0  # Time until the gate listens
_FLEET_PATH = re.compile(r"/v1/fleet/[a-z][a-z0-9-]{0,63}")
_KEY_HEADER = "flwr-public-key"
_HOP_HEADERS = frozenset(  # Headers that belong to one connection
    b"connection host keep-alive te trailer transfer-encoding upgrade content-length".split()
)


@dataclass
class Traffic:
    """Bytes of one node."""

    total: int = 0  # Since the gate was opened
    recent: deque[tuple[float, int]] = field(default_factory=deque)  # (time, bytes) in the window
    in_window: int = 0

    def add(self, count: int, now: float) -> None:
        """Count bytes, and forget those before the window."""
        self.total += count
        self.recent.append((now, count))
        self.in_window += count
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget bytes before the window."""
        while self.recent and self.recent[0][0] < now - WINDOW_SECONDS:
            self.in_window -= self.recent.popleft()[1]


class Gate:
    """ASGI application that passes the Fleet API of a SuperLink.

    Args:
        upstream: Base URL of the SuperLink, such as https://127.0.0.1:9000.
        ca: CA certificate with which the SuperLink's certificate is checked. None: plain HTTP.
        max_body: Largest body in bytes.
        max_node_bytes: Most bytes of a node within `WINDOW_SECONDS`.
    """

    def __init__(
        self,
        upstream: str,
        ca: Path | None = None,
        max_body: int = MAX_BODY_BYTES,
        max_node_bytes: int = MAX_NODE_BYTES,
    ) -> None:
        self._upstream, self._ca = upstream, ca
        self.max_body, self.max_node_bytes = max_body, max_node_bytes
        # Bytes by (address, public key). A stranger who states a foreign key has another address.
        self.traffic: OrderedDict[tuple[str, str], Traffic] = OrderedDict()
        self.refused = 0  # Requests that were not passed on
        self._buffered = 0
        self._client: httpx.AsyncClient | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, or one event of the server's life."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        from starlette.requests import ClientDisconnect, Request

        try:
            response = await self._respond(Request(scope, receive))
        except ClientDisconnect:
            return
        await response(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        """Open and close the connections to the SuperLink."""
        import httpx

        await receive()
        verify: ssl.SSLContext | bool = False
        if self._ca is not None:
            verify = ssl.create_default_context(cafile=str(self._ca))
        self._client = httpx.AsyncClient(
            base_url=self._upstream, verify=verify, timeout=UPSTREAM_SECONDS, trust_env=False
        )
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _respond(self, request: Request) -> Response:
        """Return the SuperLink's response, or a refusal."""
        import httpx
        from starlette.responses import Response

        path = request.scope["path"]
        if request.method != "POST" or not _FLEET_PATH.fullmatch(path):
            return self._refuse(404)
        now = time.monotonic()
        traffic = self._traffic(request)
        traffic.expire(now)
        if traffic.in_window > self.max_node_bytes:
            return self._refuse(429)
        length = request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > self.max_body:
            return self._refuse(413)
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                status = await self._read(request, body)
            if status:
                return self._refuse(status)
            traffic.add(len(body), now)
            headers = [pair for pair in request.headers.raw if pair[0].lower() not in _HOP_HEADERS]
            assert self._client is not None
            answer = await self._client.post(path, content=bytes(body), headers=headers)
        except TimeoutError:
            return self._refuse(408)
        except httpx.HTTPError:
            return self._refuse(502)
        finally:
            self._buffered -= len(body)
        traffic.add(len(answer.content), time.monotonic())
        response = Response(answer.content, answer.status_code)
        kept = [
            pair
            for pair in answer.headers.raw
            if pair[0].lower() not in _HOP_HEADERS | {b"content-encoding"}
        ]
        response.raw_headers = [*response.raw_headers, *kept]
        return response

    async def _read(self, request: Request, body: bytearray) -> int:
        """Read a body. Return 0, or the status with which it is refused."""
        async for chunk in request.stream():
            if len(body) + len(chunk) > self.max_body:
                return 413
            if self._buffered + len(chunk) > MAX_BUFFERED_BYTES:
                return 503
            body += chunk
            self._buffered += len(chunk)
        return 0

    def _traffic(self, request: Request) -> Traffic:
        address = request.client.host if request.client else ""
        node = address, request.headers.get(_KEY_HEADER, "")[:600]
        if node not in self.traffic and len(self.traffic) >= MAX_NODES:
            self.traffic.popitem(last=False)
        traffic = self.traffic.setdefault(node, Traffic())
        self.traffic.move_to_end(node)
        return traffic

    def _refuse(self, status: int) -> Response:
        from starlette.responses import Response

        self.refused += 1
        return Response(status_code=status, headers={"connection": "close"})


class OpenGate:
    """A gate that listens in a thread of this process.

    Args:
        gate: What is served.
        host: Address to listen on.
        port: Port to listen on. 0: any free one.
        certificate: Certificate of the server and its private key. None: plain HTTP.
    """

    def __init__(
        self,
        gate: Gate,
        host: str = "127.0.0.1",
        port: int = 0,
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        import uvicorn

        self.gate, self.host = gate, host
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        files = {}
        if certificate is not None:
            files = {"ssl_certfile": str(certificate[0]), "ssl_keyfile": str(certificate[1])}
        config = uvicorn.Config(
            gate,
            log_level="error",
            loop="asyncio",
            http="h11",
            ws="none",
            access_log=False,
            server_header=False,
            limit_concurrency=1000,
            timeout_graceful_shutdown=3,
            h11_max_incomplete_event_size=64 << 10,
            **files,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="gate", daemon=True
        )

    def __enter__(self) -> OpenGate:
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                self.close()
                raise ConfigError(
                    f"a gate on {self.host}:{self.port} was asked for; it did not start. Its "
                    "certificate or its key may be damaged."
                )
            time.sleep(0.02)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening, and wait until the thread has ended."""
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(10)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket.

    Raises:
        ConfigError: The port is in use, or the address is not one of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(512)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(
            f"--host {host} --port {port} was asked for; the server cannot listen there: "
            f"{why(error)}. Another port or an address of this machine would work."
        ) from error
    return listener
