"""A run's folder whose log grows, and readers of a live page, for the tests on it."""

from __future__ import annotations

import gzip
import http.client
import json
import re
import socket
from pathlib import Path
from typing import Any

from fedquilt.round import Grades, Record
from fedquilt.runs.round_log import encoded

TIMEOUT_SECONDS = 30.0


class GrowingLog:
    """The log of a run that goes on in another process.

    Args:
        folder: Folder of the run, which is made.
        rounds: Number of rounds that it has at first.
    """

    def __init__(self, folder: Path, rounds: int = 2) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.file = folder, folder / "rounds.jsonl"
        self.checks = [""]
        self.file.write_bytes(b"")
        for _ in range(rounds):
            self.append()

    def line(self, number: int) -> bytes:
        """Return the line of a round, and remember its checksum."""
        figures = {"accuracy": {"1.0": 0.1 * number % 1, "0.5": 0.05 * number % 1}}
        grades = Grades("accuracy", figures)
        record = Record(number, 0.5, 2, 1000, 900, 5000, 1 / number, grades=grades)
        text, check = encoded(record, self.checks[number - 1])
        self.checks[number:] = [check]
        return text

    def append(self) -> None:
        """Write the next round to the end of the file."""
        with self.file.open("ab") as file:
            file.write(self.line(len(self.checks)))

    def half(self) -> None:
        """Write half of the next line, as a run that is killed does."""
        text = self.line(len(self.checks))
        self.checks.pop()
        with self.file.open("ab") as file:
            file.write(text[: len(text) // 2])

    def resume(self, rounds: int) -> None:
        """Cut the file to the rounds of a checkpoint, in-place as a resumed run does."""
        lines = self.file.read_bytes().split(b"\n")[:rounds]
        self.checks = self.checks[: rounds + 1]
        with self.file.open("r+b") as file:
            file.truncate(sum(len(line) + 1 for line in lines))

    def replace(self, rounds: int) -> None:
        """Replace the file by another one that has some of its rounds."""
        lines = self.file.read_bytes().split(b"\n")[:rounds]
        self.checks = self.checks[: rounds + 1]
        other = self.file.with_name("other")
        other.write_bytes(b"".join(line + b"\n" for line in lines))
        other.replace(self.file)


def get(
    port: int, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        names = {name.lower(): value for name, value in response.getheaders()}
        return response.status, names, response.read()
    finally:
        connection.close()


def content(port: int) -> dict[str, Any]:
    """Return the content of a live page."""
    status, headers, body = get(port, "/content.json", **{"accept-encoding": "gzip"})
    assert (status, headers["content-encoding"]) == (200, "gzip")
    found: dict[str, Any] = json.loads(gzip.decompress(body))
    return found


def rounds_shown(port: int) -> int:
    """Return the number of rounds in the table at the head of a live page."""
    row = re.search(r"<tbody><tr><td>[^<]*</td><td>\d+</td><td>(\d+)</td>", content(port)["body"])
    assert row
    return int(row[1])


class Reader:
    """A stream of events.

    Args:
        port: Port of the live page.
        path: Path of the stream.
    """

    def __init__(self, port: int, path: str = "/events") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_SECONDS)
        request = f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"
        self._socket.sendall(request.encode())
        self._file = self._socket.makefile("rb")

    def next(self) -> dict[str, str]:
        """Return the fields of the next event. Comments are skipped."""
        fields: dict[str, str] = {}
        while True:
            line = self._file.readline().decode()
            assert line, "the stream has ended"
            if fields and not line.strip():
                return fields
            name, colon, value = line.strip().partition(": ")
            if colon and name in ("id", "event", "data"):
                fields[name] = value

    def ends(self) -> bool:
        """Return True if the server closes the stream."""
        try:
            while self._file.readline():
                pass
        except ConnectionResetError:
            pass
        return True

    def close(self) -> None:
        self._file.close()
        self._socket.close()
