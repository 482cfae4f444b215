"""A link between a device and the server that can be cut, silenced and limited in rate."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

PIECE_BYTES = 16 << 10  # Bytes that are passed on at once
TICK_SECONDS = 0.2  # Time after which a waiting thread looks whether the link has changed


class Proxy:
    """Passes TCP connections on to a port of this machine, and counts their bytes.

    Args:
        port: Port that connections are passed on to.
        delay: Seconds by which each piece is delayed.
    """

    def __init__(self, port: int, delay: float = 0.0) -> None:
        self.target, self.delay = port, delay
        self.rates: dict[str, float] = {}  # Bytes per second, by direction. Without: no limit
        self.bytes = {"up": 0, "down": 0}  # Bytes at the socket since the start
        self._free_at = {"up": 0.0, "down": 0.0}  # When the limited link is free again
        self._lock = threading.Lock()
        self._is_open = threading.Event()
        self._is_open.set()
        self._is_closed = False
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def cut(self) -> None:
        """End all connections, and accept no new ones until `restore`."""
        self._is_open.clear()
        self._drop()

    def silence(self) -> None:
        """Pass nothing on until `restore`. Connections stay, as on a link without signal."""
        self._is_open.clear()

    def restore(self) -> None:
        """Pass connections on again."""
        self._is_open.set()

    def close(self) -> None:
        """End the proxy."""
        self._is_closed = True
        self._listener.close()
        self._drop()
        self._is_open.set()

    def _drop(self) -> None:
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for end in sockets:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if not self._is_open.is_set():
                near.close()
                continue
            try:
                far = socket.create_connection(("127.0.0.1", self.target), 10)
            except OSError:  # The server is away.
                near.close()
                continue
            far.settimeout(None)
            with self._lock:
                self._sockets |= {near, far}
            for source, target, way in ((near, far, "up"), (far, near, "down")):
                words = source, target, way
                threading.Thread(target=self._pass, args=words, daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket, way: str) -> None:
        """Pass bytes on in one direction until an end closes."""
        try:
            while piece := source.recv(PIECE_BYTES):
                self._wait(way, len(piece))
                target.sendall(piece)
                with self._lock:
                    self.bytes[way] += len(piece)
        except OSError:
            pass
        finally:
            for end in (source, target):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                with self._lock:
                    self._sockets.discard(end)
            source.close()

    def _wait(self, way: str, count: int) -> None:
        """Wait until a piece may be passed on."""
        pause = self.delay
        if rate := self.rates.get(way):
            with self._lock:
                now = time.monotonic()
                self._free_at[way] = max(now, self._free_at[way]) + count / rate
                pause += self._free_at[way] - now
        if pause > 0:
            time.sleep(pause)
        while not self._is_open.wait(TICK_SECONDS):
            if self._is_closed:
                raise OSError("the proxy was closed")
