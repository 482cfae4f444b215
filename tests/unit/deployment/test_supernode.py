"""Processes of a device that has joined: what is started again, and when."""

from __future__ import annotations

import os
import sys
import time

import pytest

from fedquilt.deployment import supernode
from fedquilt.deployment.host import DeviceSettings
from fedquilt.deployment.processes import Process
from fedquilt.deployment.supernode import MessageLog, SuperNode, num_sleeps
from fedquilt.terms import Budget

pytest.importorskip("flwr")
LISTENS = "import socket, threading, time; s = socket.create_server(('127.0.0.1', {port}));"
# Flower's loop ends if a TLS handshake is not answered. Its process then waits for its threads.
PRINTS = " print('\\x1b[92mINFO \\x1b[0m: Sending'); {print} threading.Event().wait()"
STUCK = LISTENS + PRINTS.replace("{print}", "print('\\x1b[91mERROR \\x1b[0m: _ssl.c:989\\nmore');")
UPLOADS = LISTENS + PRINTS.replace("{print}", "")
POLLS = LISTENS + "\nwhile True: time.sleep(0.05)"


def watched(tmp_path, monkeypatch, code: str, seconds: float) -> SuperNode:
    """Watch a SuperNode that is replaced by some code, for so long."""
    monkeypatch.setattr(supernode, "STUCK_SECONDS", 1.0)
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.2)
    settings = DeviceSettings("phone", "unused", Budget(share=0.5), tmp_path)
    node = SuperNode(settings, "127.0.0.1:1", isolation="subprocess")
    command = [sys.executable, "-u", "-c", code.format(port=node.port)]
    node.node = Process("the SuperNode", command, dict(os.environ), tmp_path / "node.log")
    node.processes = [node.node]
    end = time.monotonic() + seconds
    with node:
        while time.monotonic() < end and node.node.starts < 2:
            node.watch()
            time.sleep(0.05)
    return node


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="the system has no /proc")
def test_a_supernode_that_does_nothing_is_started_again(tmp_path, monkeypatch, caplog):
    node = watched(tmp_path, monkeypatch, STUCK, seconds=20)
    assert node.node.starts == 2
    assert "the SuperNode has done nothing for 1 s after an error" in caplog.text


@pytest.mark.parametrize("code", [POLLS, UPLOADS])
def test_a_supernode_that_polls_or_uploads_is_left_alone(code, tmp_path, monkeypatch):
    assert watched(tmp_path, monkeypatch, code, seconds=3).node.starts == 1


@pytest.mark.parametrize(("replies", "starts"), [(0, 2), (1, 1)])
def test_a_supernode_is_started_again_if_its_worker_ended_without_a_reply(
    replies, starts, tmp_path, monkeypatch
):
    """flwr waits for the reply to a message for ever, even if the message's task has ended."""
    prints = "print('Received successfully');" + "print('Sending: train message');" * replies
    code = LISTENS + prints + " threading.Event().wait()"
    monkeypatch.setattr(supernode, "RESTART_SECONDS", 0.2)
    settings = DeviceSettings("phone", "unused", Budget(share=0.5), tmp_path)
    node = SuperNode(settings, "127.0.0.1:1")
    home, words = dict(os.environ), [sys.executable, "-u", "-c"]
    listens = [*words, code.format(port=node.port)]
    node.node = Process("the SuperNode", listens, home, node.node.log)
    ended = f"import time, pathlib; file = pathlib.Path({str(tmp_path / 'ended')!r});"
    ends = ended + " seconds = 60 if file.exists() else 1; file.touch(); time.sleep(seconds)"
    node.worker = Process("the worker", [*words, ends], home, tmp_path / "worker.log")
    node.processes = [node.node, node.worker]
    end = time.monotonic() + 20
    with node:
        while time.monotonic() < end and (node.worker.starts < 2 or node.node.starts < starts):
            node.watch()
            time.sleep(0.05)
        assert node.worker.starts == 2
        assert node.node.starts == starts


def test_a_process_that_does_not_exist_has_no_number_of_sleeps():
    assert num_sleeps(2**31 - 1) is None


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ("", False),
        ("R", False),  # It trains.
        ("RS", False),
        ("RSR", False),
        ("RRS", True),  # The reply to the first message was sent, and that to the second was kept.
        ("RRSRS", True),
        ("RRSS", False),
        ("RSRRSS", False),
    ],
)
def test_a_reply_that_was_kept_is_found_in_the_log(events, expected, tmp_path):
    words = {
        "R": "Receiving: train message\nReceived successfully\n",
        "S": "Sending: train message\nSent successfully\n",
        "N": "Starting Flower SuperNode\n",
    }
    path = tmp_path / "supernode.log"
    log = MessageLog(path)
    log.read()  # There is none yet.
    for event in "RRSN" + events:
        with path.open("a") as file:
            file.write(words[event])
        log.read()
    assert log.has_kept_a_reply == expected
    assert log.lacks_a_reply == (events.count("R") > events.count("S"))
    path.write_text(words["N"])  # A log that became too large is begun anew.
    log.read()
    assert not log.has_kept_a_reply
