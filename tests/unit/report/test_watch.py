"""The server of a live page: what it shows, when it tells its readers, and what it refuses."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytest.importorskip("uvicorn")

from fedquilt.cli.main import main
from fedquilt.errors import ConfigError
from fedquilt.report import collect, follow, watch
from fedquilt.report.watch import LiveServer, wait_for_run
from tests.unit.report.live import GrowingLog, Reader, content, get, rounds_shown

WATCHERS = 200


def addresses(page: str) -> list[str]:
    """Return all addresses that the elements of a page name."""
    found = []

    class Parser(HTMLParser):
        def handle_starttag(self, tag, attrs):
            found.extend(value for name, value in attrs if name in ("src", "href", "action"))

    Parser().feed(page)
    return found


@pytest.fixture
def log(tmp_path: Path) -> GrowingLog:
    return GrowingLog(tmp_path / "run")


@pytest.fixture
def server(log: GrowingLog) -> Iterator[LiveServer]:
    with LiveServer([log.folder]) as server:
        yield server


@pytest.fixture
def reader(server: LiveServer) -> Iterator[Reader]:
    reader = Reader(server.port)
    assert reader.next() == {"id": "1", "data": "changed"}
    yield reader
    reader.close()


def test_the_first_page_is_whole_and_loads_nothing_from_elsewhere(log, server):
    status, headers, body = get(server.port)
    page = body.decode()
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert f"<td>{log.folder}</td>" in page
    assert 'new EventSource("events"' in page
    assert set(addresses(page)) <= set(re.findall(r'"(#[\w-]+)"', page))
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "http" not in policy
    assert (headers["cache-control"], headers["referrer-policy"]) == ("no-store", "no-referrer")
    assert server.url == f"http://127.0.0.1:{server.port}/"
    assert rounds_shown(server.port) == 2


def test_a_round_that_is_written_is_shown_after_one_event(log, server, reader):
    log.append()
    assert reader.next() == {"id": "2", "data": "changed"}
    assert rounds_shown(server.port) == 3
    data = content(server.port)["charts"]["data"]
    points = [row for rows in data.values() for row in rows if "share" in row and "value" in row]
    assert {row["round"] for row in points} == {1, 2, 3}


def test_a_killed_and_resumed_run_goes_on_with_the_same_page(log, server, reader):
    log.half()
    reader.next()
    assert rounds_shown(server.port) == 2
    assert "line 3: it was not written to its end" in content(server.port)["body"]

    log.resume(1)  # The checkpoint was of round 1.
    reader.next()
    assert rounds_shown(server.port) == 1
    assert "not written to its end" not in content(server.port)["body"]

    log.append()
    reader.next()
    assert rounds_shown(server.port) == 2

    log.replace(1)
    reader.next()
    assert rounds_shown(server.port) == 1


def test_a_file_of_equal_size_that_replaces_the_log_is_noticed(log):
    before = follow.file_states([log.folder])
    other = log.file.with_name("other")
    other.write_bytes(log.file.read_bytes())
    stat = log.file.stat()
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(log.file)
    assert follow.file_states([log.folder]) != before


def test_files_that_cannot_be_shown_leave_the_page_and_tell_its_readers(log, server, reader):
    hidden = log.folder.with_name("hidden")
    log.folder.rename(hidden)
    event = reader.next()
    assert event["event"] == "problem"
    assert "there is no such folder" in event["data"]
    assert rounds_shown(server.port) == 2
    hidden.rename(log.folder)
    log.append()
    while "event" in (event := reader.next()):
        pass
    assert rounds_shown(server.port) == 3


def test_an_unexpected_error_does_not_end_the_thread(log, server, reader, monkeypatch, caplog):
    def fail(*args: object, **options: object) -> None:
        raise ValueError("two\n\ndata: lines")

    monkeypatch.setattr(follow, "content", fail)
    log.append()
    assert reader.next() == {"event": "problem", "data": "two data: lines"}
    assert "the report of" in caplog.text
    monkeypatch.undo()
    while "event" in reader.next():  # It is tried again, although no file changes.
        pass
    assert rounds_shown(server.port) == 3


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/events", "/content.json", "/other"])
def test_only_get_is_allowed(server, method, path):
    status, headers, _ = get(server.port, path, method)
    assert (status, headers["allow"]) == (405, "GET")


@pytest.mark.parametrize("path", ["/rounds.jsonl", "/../config.toml", "/%2e%2e/config.toml", "//"])
def test_no_other_path_is_served(server, path):
    assert get(server.port, path)[0] == 404


def test_foreign_host_names_are_refused_on_loopback(server):
    port = server.port
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil"):
        for path in ("/", "/events", "/content.json"):
            assert get(port, path, host=host)[0] == 403, host
    for host in (f"localhost:{port}", f"LOCALHOST:{port}", f"127.0.0.1:{port}", f"[::1]:{port}"):
        assert get(port, host=host)[0] == 200, host


def test_other_addresses_need_the_token(log, monkeypatch):
    # The test does not open a port to the network.
    monkeypatch.setattr(watch, "is_loopback", lambda host: False)
    with LiveServer([log.folder]) as server:
        assert len(server.token) >= 32
        assert server.url == f"http://127.0.0.1:{server.port}/?token={server.token}"
        for query in ("", "?token=", "?token=x", f"?token={server.token[:-1]}", "?token=%C3%A9"):
            for path in ("/", "/events", "/content.json"):
                assert get(server.port, path + query)[0] == 403, query
        assert get(server.port, f"/?token={server.token}", host="any.example")[0] == 200
        assert get(server.port, f"/?token={server.token}", "POST")[0] == 405
        reader = Reader(server.port, f"/events?token={server.token}")
        assert reader.next()["id"] == "1"
        reader.close()
        with LiveServer([log.folder]) as other:
            assert other.token != server.token


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.0.7", False),
        ("localhost.example", False),
    ],
)
def test_addresses_of_loopback(host, expected):
    assert watch.is_loopback(host) is expected


def test_many_watchers_read_the_log_once(log, monkeypatch):
    reads: list[Path] = []
    read_log = collect.read_log

    def counted(path: Path):
        reads.append(path)
        return read_log(path)

    monkeypatch.setattr(collect, "read_log", counted)
    with LiveServer([log.folder]) as server:
        assert len(reads) == 1
        readers = [Reader(server.port) for _ in range(WATCHERS)]
        assert all(reader.next()["id"] == "1" for reader in readers)
        log.append()
        assert all(reader.next()["id"] == "2" for reader in readers)
        assert all(rounds_shown(server.port) == 3 for _ in readers)
        assert len(reads) == 2
        for reader in readers:
            reader.close()


def test_a_reader_that_does_not_read_gets_one_event_for_many_changes(log, server, reader):
    slow = Reader(server.port)
    for version in range(2, 5):
        log.append()
        assert reader.next()["id"] == str(version)
    # Its socket holds what was sent. The server keeps one flag for it, whatever has changed.
    assert len(server.page._signals) == 2
    assert slow.next()["id"] == "1"
    slow.close()


def test_too_many_watchers_are_refused(server, reader, monkeypatch):
    monkeypatch.setattr(watch, "MAX_WATCHERS", 1)
    assert get(server.port, "/events")[0] == 503
    assert get(server.port)[0] == 200


def test_the_end_closes_all_streams_and_threads(log):
    before = set(threading.enumerate())
    with LiveServer([log.folder]) as server:
        readers = [Reader(server.port) for _ in range(3)]
        assert all(reader.next() for reader in readers)
        began = time.monotonic()
    assert time.monotonic() - began < 2  # It does not wait until streams are cancelled.
    assert all(reader.ends() for reader in readers)
    for reader in readers:
        reader.close()
    assert set(threading.enumerate()) <= before


def test_nothing_is_written_to_the_folder(log, server, reader):
    log.append()
    reader.next()
    get(server.port)
    assert sorted(path.name for path in log.folder.iterdir()) == ["rounds.jsonl"]


# --- the command --------------------------------------------------------------------------------


def test_a_folder_without_a_run_is_refused(tmp_path, capsys):
    assert main(["watch", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"ConfigError: a report of {tmp_path} was asked for")
    assert error.count("\n") == 1


def test_a_port_in_use_is_refused(log, capsys):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert main(["watch", str(log.folder), "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port} was asked for" in error
    assert "Address already in use" in error
    assert main(["watch", str(log.folder), "--port", "70000"]) == 2
    assert "--port 0 takes any free one" in capsys.readouterr().err


def test_missing_packages_are_named(log, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(ConfigError, match=r"Starlette and uvicorn.*watch"):
        LiveServer([log.folder])


def test_a_run_that_has_not_begun_is_waited_for(tmp_path):
    folder = tmp_path / "later"
    timer = threading.Timer(0.5, GrowingLog, (folder,))
    timer.start()
    wait_for_run([folder], 20)
    timer.join()
    assert follow.has_run(folder)
    began = time.monotonic()
    wait_for_run([tmp_path / "never"], 0.3)
    assert 0.3 <= time.monotonic() - began < 5


def test_the_command_serves_until_it_is_interrupted(log):
    process = subprocess.Popen(
        [sys.executable, "-m", "fedquilt", "watch", str(log.folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = process.stdout.readline()
        port = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/ shows .*\.\n", line)
        assert port, line + process.stderr.read()
        reader = Reader(int(port[1]))
        reader.next()
        log.append()
        reader.next()
        assert rounds_shown(int(port[1])) == 3
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
        reader.close()
        assert (process.returncode, errors) == (0, "")
        assert output.endswith("Stopped.\n")
    finally:
        process.kill()
        process.wait()
