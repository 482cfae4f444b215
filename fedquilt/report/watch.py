"""A server for the page of a report while its runs are in progress.

The page asks for its content again after each server-sent event. The server accepts GET alone, and
only reads the folders. It listens on loopback without a password. There it checks the header
`Host`, so that a foreign page cannot read it under a name that leads to 127.0.0.1 (DNS rebinding).
On every other address it needs a token.
"""

from __future__ import annotations

import asyncio
import gzip
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError
from fedquilt.errors.extras import how_to_install
from fedquilt.report.follow import Follower, has_run
from fedquilt.storage.files import why

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
MAX_WATCHERS = 1000  # Open streams of events. Further ones are refused.
KEEP_ALIVE_SECONDS = 15.0  # Time between two comments in a stream, by which lost readers are found
START_SECONDS = 20.0  # Time until the server listens
WAIT_STEP_SECONDS = 0.2  # Time between two looks for a run that has not begun
TOKEN_BYTES = 24
_HEADERS = {
    # The same rules as in the page, and no frame of another site.
    "content-security-policy": (
        "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
        "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",  # The address may have the token.
    "x-content-type-options": "nosniff",
}


class LivePage:
    """ASGI application that serves a report and tells its readers about changes.

    Args:
        follower: Thread that reads the report.
        hosts: Names in the header `Host` that are accepted. (): all, because a token is required.
        token: Text that requests must have as the parameter `token`. Empty: none is required.
    """

    def __init__(self, follower: Follower, hosts: Sequence[str] = (), token: str = "") -> None:
        self._follower, self._hosts, self._token = follower, frozenset(hosts), token
        self._loop: asyncio.AbstractEventLoop | None = None
        # One event waits for each reader at most. It says that there is something new, and the
        # reader then asks for the newest content, so that none has to be kept.
        self._signals: set[asyncio.Event] = set()
        self._closing = False

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one request, or one event of the server's life."""
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        from starlette.requests import Request

        await self._respond(Request(scope, receive))(scope, receive, send)

    async def _live(self, receive: Any, send: Any) -> None:
        await receive()
        self._loop = asyncio.get_running_loop()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await send({"type": "lifespan.shutdown.complete"})

    def notify(self) -> None:
        """Tell all readers that the content has changed. Any thread may call it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._signal_all)

    def close(self) -> None:
        """End all streams, so that the server can stop."""
        self._closing = True
        self.notify()

    def _signal_all(self) -> None:
        for signal in self._signals:
            signal.set()

    def _respond(self, request: Request) -> Response:
        """Return the response to a request. Requests that are not allowed are refused."""
        if request.method != "GET":
            return _text(405, "only GET is allowed", {"allow": "GET"})
        if self._hosts and request.headers.get("host", "").lower() not in self._hosts:
            return _text(403, "this host name is not one of the server's")
        given = request.query_params.get("token", "")
        if self._token and not hmac.compare_digest(given.encode(), self._token.encode()):
            return _text(403, "the address needs the token that `fedquilt watch` has printed")
        snapshot = self._follower.snapshot
        match request.scope["path"]:
            case "/":
                return _gzipped(request, snapshot.page, "text/html; charset=utf-8")
            case "/content.json":
                return _gzipped(request, snapshot.json, "application/json")
            case "/events":
                return self._stream()
        return _text(404, "there is no such page")

    def _stream(self) -> Response:
        from starlette.responses import StreamingResponse

        if len(self._signals) >= MAX_WATCHERS:
            return _text(503, f"{MAX_WATCHERS} readers are connected already")
        return StreamingResponse(self._events(), headers=_HEADERS, media_type="text/event-stream")

    async def _events(self) -> AsyncIterator[str]:
        """Yield an event for the content as it is, and one after each change of it.

        The first one is needed because the page may be older than the stream.
        """
        signal = asyncio.Event()
        self._signals.add(signal)
        try:
            signal.set()
            while not self._closing:
                try:
                    async with asyncio.timeout(KEEP_ALIVE_SECONDS):
                        await signal.wait()
                except TimeoutError:
                    yield ": still here\n\n"
                    continue
                signal.clear()
                if self._closing:
                    return
                yield self._event()
        finally:
            self._signals.discard(signal)

    def _event(self) -> str:
        """Return the event for the newest content, or for the problem with it."""
        problem = " ".join(self._follower.problem.split())
        if problem:
            return f"event: problem\ndata: {problem}\n\n"
        return f"id: {self._follower.snapshot.version}\ndata: changed\n\n"


class LiveServer:
    """A report that is served on a port until the block ends.

    Args:
        folders: Folders of runs, or the folder of a study.
        host: Address to listen on. A token is required unless it is loopback.
        port: Port to listen on. 0: any free one.
        metric: Name of the metric to show. Empty: the main one.
        trust: True: run code that settings in the folders name, and add it to the user's list.

    Raises:
        ConfigError: A folder has no run, the port is in use, or the server's packages are missing.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        host: str = LOOPBACK,
        port: int = 0,
        metric: str = "",
        trust: bool = False,
    ) -> None:
        uvicorn = _uvicorn()
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self.token = "" if is_loopback(host) else secrets.token_urlsafe(TOKEN_BYTES)
        try:
            self.follower = Follower(folders, metric, trust)
        except BaseException:
            self._socket.close()
            raise
        self._host = host
        hosts = () if self.token else _own_names(self.port)
        self.page = LivePage(self.follower, hosts, self.token)
        self.follower.changed = self.page.notify
        config = uvicorn.Config(
            self.page,
            log_level="error",
            loop="asyncio",
            http="h11",
            ws="none",
            access_log=False,  # Addresses have the token.
            server_header=False,
            limit_concurrency=MAX_WATCHERS + 200,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [self._socket]}, name="watch", daemon=True
        )

    @property
    def url(self) -> str:
        """Return the address of the page, with the token if one is required."""
        host = self._host
        if host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        elif ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.port}/" + (f"?token={self.token}" if self.token else "")

    def __enter__(self) -> LiveServer:
        self._thread.start()
        end = time.monotonic() + START_SECONDS
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > end:
                self.close()
                raise ConfigError(
                    f"a page on {self._host}:{self.port} was asked for; the server did not start."
                )
            time.sleep(0.01)
        self.follower.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading and listening, and wait until both threads have ended."""
        self.follower.close()
        self.page.close()
        self._server.should_exit = True
        if self._thread.ident is not None:
            self._thread.join(10)
        self._socket.close()


def wait_for_run(folders: Sequence[Path], seconds: float) -> None:
    """Wait until each folder has a file of a run or a study, or until the time is over.

    Args:
        folders: Folders, which need not exist.
        seconds: Longest time to wait. 0 has no effect.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(map(has_run, folders)):
        time.sleep(WAIT_STEP_SECONDS)


def is_loopback(host: str) -> bool:
    """Return True if an address or name is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _own_names(port: int) -> list[str]:
    """Return the values of the header `Host` that a browser sends to loopback."""
    names = ["localhost", LOOPBACK, "[::1]"]
    return [f"{name}:{port}" for name in names] + (names if port == 80 else [])


def _uvicorn() -> Any:
    """Return the module `uvicorn`.

    Raises:
        ConfigError: It or Starlette is not installed.
    """
    try:
        import starlette  # noqa: F401  # It comes with the same extra.
        import uvicorn
    except ImportError as error:
        raise ConfigError(
            "a live page needs Starlette and uvicorn, of which one is not installed: "
            f"{how_to_install('watch')}."
        ) from error
    return uvicorn


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
        except (OSError, OverflowError):
            listener.close()
            raise
    except (OSError, OverflowError) as error:
        reason = why(error) if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"a page on {host}:{port} was asked for; the port cannot be used: {reason}. Another "
            "one may be free, and --port 0 takes any free one."
        ) from error
    return listener


def _text(status: int, text: str, headers: dict[str, str] | None = None) -> Response:
    from starlette.responses import PlainTextResponse

    return PlainTextResponse(f"{text}\n", status, {**_HEADERS, **(headers or {})})


def _gzipped(request: Request, body: bytes, media_type: str) -> Response:
    """Return a compressed body, or the same uncompressed for a client that cannot read it.

    Args:
        request: The request.
        body: Content, compressed by gzip.
        media_type: Type of the content.
    """
    from starlette.responses import Response

    headers = {**_HEADERS, "vary": "accept-encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
    else:
        body = gzip.decompress(body)
    return Response(body, headers=headers, media_type=media_type)
