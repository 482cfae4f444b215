"""Costs of a deployment on this machine: seconds, bytes, memory, and polls.

    pip install -e '.[cli,flower]'
    python bench/deployment_costs.py [--only rounds,bytes,devices,server,polls]

Together all parts take about 17 minutes on two idle cores. Deployments have TLS
and node keys, and a link in which bytes are counted between each device and the gate.

    rounds   seconds of a round of three devices: one batch each (trivial) and two seconds of
             training (real), with a long-lived worker and with a process for each message
    bytes    bytes at the socket against those of the payload, with a perfect and a coded link
    devices  peak memory of a device's worker at shares 1 and 1/16, above that of an idle one
    server   peak memory of the server against the size of the cohort, with devices in another
             process
    polls    signed polls per second that one SuperLink answers, directly and through the gate
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from deployments import Deployment, Plan
from measure import machine

import fedquilt as fq
from fedquilt.deployment.device import Device
from fedquilt.deployment.device_family import emptied
from fedquilt.deployment.gate import Gate, OpenGate
from fedquilt.deployment.in_process import own_data
from fedquilt.deployment.keys import KeyFolder, make_keys
from fedquilt.deployment.superlink import SuperLink
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.courier import CourierReply
from fedquilt.engines.flower.engine import Flower
from fedquilt.methods import HeteroFL
from fedquilt.models.resnet import ResNet
from fedquilt.round.wire import Message

ROUNDS = 5  # The first is not counted, because devices then build their model.
MEBIBYTE = 2**20
TRIVIAL = Plan(rounds=ROUNDS)
REAL = Plan(rounds=ROUNDS, epochs=150)
SHARES = (1.0, 1 / 2, 1 / 4)
LARGE = 'name = "tiny_resnet"\nwidths = [136, 272]'  # 11 MB in fp64
CODED = "[link]\ncodec = { bits = 4, feedback = true, down = true }"
HUGE = 'name = "tiny_resnet"\nwidths = [256, 512]'  # 40 MB in fp64
COHORTS = (4, 16, 64)
POLL_SECONDS = 8.0
POLL_THREADS = 4
Row = Sequence[object]


def table(header: Row, rows: Sequence[Row]) -> None:
    """Print a table in Markdown. Columns of numbers are on the right."""
    print(f"\n| {' | '.join(map(str, header))} |")
    print(f"|---|{'---:|' * (len(header) - 1)}")
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |")
    sys.stdout.flush()


def peak_memory(process: int) -> int:
    """Return the largest resident memory that a process ever had, in bytes."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise LookupError(f"the system does not state the memory of process {process}")


# --- rounds and bytes -----------------------------------------------------------------------------


def rounds() -> None:
    """Print the seconds of a round."""
    rows = []
    for name, plan in (("trivial", TRIVIAL), ("real", REAL)):
        seconds = {}
        for isolation in ("process", "subprocess"):
            with tempfile.TemporaryDirectory() as folder:
                deployment = Deployment(Path(folder), plan, isolation=isolation)
                with deployment:
                    deployment.start().finish()
                    deployment.end()
                    later = deployment.records[1:]
                    truth = deployment.check()
            seconds[isolation] = statistics.median(record.seconds for record in later)
        alone = statistics.median(record.seconds for record in truth.records[1:])
        worker, each = seconds["process"], seconds["subprocess"]
        rows.append(
            (name, f"{alone:.2f}", f"{worker:.1f}", f"{each:.1f}", f"{each / worker:.1f} times")
        )
    table(("seconds of a round", "sequential", "worker", "process a message", "ratio"), rows)


def measured_bytes() -> None:
    """Print the bytes at the socket and of the payload, by round and device.

    Messages of evaluation are left out, because they are no payload of a round.
    """
    rows = []
    for name, method, more in (
        ("FedRolex", "fedrolex", ""),
        ("HeteroFL, 4 bits both ways", "heterofl", CODED),
        ("FedRolex, 4 bits both ways", "fedrolex", CODED),
    ):
        plan = Plan(rounds=ROUNDS, method=method, models=(LARGE,), more=more)
        with tempfile.TemporaryDirectory() as folder:
            deployment = Deployment(Path(folder), plan, has_links=True)
            with deployment:
                deployment.start()
                # The first rounds have initial weights and the first contact.
                deployment.wait_for_round(2)
                before = _sent(deployment)
                deployment.finish()
                after = _sent(deployment)
                deployment.end()
                later = deployment.records[2:]
        messages = len(later) * len(SHARES)
        reports = [record.grades.report for record in later if record.grades.report]
        for way in ("down", "up"):
            payload = sum(getattr(record, f"bytes_{way}") for record in later)
            messaged = sum(getattr(record.attendance, f"wire_{way}") for record in later)
            evaluation = sum(getattr(report.attendance, f"wire_{way}") for report in reports)
            socket = after[way] - before[way] - evaluation
            extra = (socket - 1.05 * payload) / messages
            cells = [f"{count / messages / 1e3:,.1f}" for count in (payload, messaged, socket)]
            rows.append((f"{name}, {way}", *cells, f"{extra / 1e3:,.1f}"))
    header = ("kB per message", "payload", "message", "socket", "socket beyond 1.05 × payload")
    table(header, rows)


def _sent(deployment: Deployment) -> dict[str, int]:
    return {
        way: sum(link.bytes[way] for link in deployment.links.values()) for way in ("up", "down")
    }


# --- memory ---------------------------------------------------------------------------------------


def devices() -> None:
    """Print the peak memory of workers whose devices train members of very different sizes."""
    shares = (1.0, 1 / 16)
    plan = Plan(rounds=3, shares=shares, models=(HUGE,))
    with tempfile.TemporaryDirectory() as folder:
        deployment = Deployment(Path(folder), plan)
        with deployment:
            deployment.serve()
            deployment.join(0)  # The server waits for both.
            deployment.wait(
                lambda: "1 of 2 devices are ready" in deployment.said("serve"), "one is ready"
            )
            idle = deployment.pid("worker", 0)
            assert idle is not None
            idle_bytes = peak_memory(idle)
            deployment.join(1)
            deployment.wait_for_round(2)
            workers = [deployment.pid("worker", client) for client in range(2)]
            peaks = [peak_memory(worker) for worker in workers if worker is not None]
            app = deployment.pid("serverapp")
            server_bytes = 0 if app is None else peak_memory(app)
            deployment.finish()
        family = deployment.experiment.prepare().world.family
    rows = []
    for share, peak in zip(shares, peaks, strict=True):
        weights = 8 * family.member(family.fit(fq.Budget(share=share))).count
        rows.append(
            (
                f"share {share:g}",
                f"{weights / MEBIBYTE:.1f}",
                f"{peak / MEBIBYTE:.0f}",
                f"{(peak - idle_bytes) / MEBIBYTE:.0f}",
                f"{(peak - idle_bytes) / weights:.1f} times",
            )
        )
    header = ("MiB of a device", "weights in fp64", "peak", "above an idle worker", "/ weights")
    table(header, rows)
    print(f"An idle worker has {idle_bytes / MEBIBYTE:.0f} MiB, the ServerApp had at most "
          f"{server_bytes / MEBIBYTE:.0f} MiB.")  # fmt: skip


@dataclass
class Elsewhere:
    """Courier to devices in another process, so that this one has the server's memory alone."""

    pipe: Connection
    clients: int

    def online(self) -> Sequence[int]:
        """Return all clients."""
        return range(self.clients)

    def exchange(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Yield the reply of each device, one after another."""
        for client, request in requests.items():
            self.pipe.send((client, request))
            yield CourierReply(client, self.pipe.recv())

    def evaluate(self, requests: Mapping[int, Message], deadline: float) -> Iterator[CourierReply]:
        """Yield nothing, because nothing is evaluated."""
        yield from ()


def federation(clients: int) -> tuple[fq.Family, fq.FederatedData]:
    """Return a model of 10 MB in fp32, and ten samples for each client."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(10 * clients, 1, 8, 8, generator=generator)
    targets = torch.arange(10 * clients) % 5
    data = fq.data.Pool.of((inputs, targets), (inputs[:5], targets[:5])).partition(clients)
    model = ResNet("basic", (1, 1), 5, 1, widths=(180, 360))
    return fq.trace(model, inputs[:2]), data


def be_devices(pipe: Connection, clients: int) -> None:
    """Answer requests for all clients, one after another, until the pipe is closed."""
    torch.set_num_threads(1)
    family, data = federation(clients)
    empty = emptied(family)
    built: dict[int, Device] = {}
    while True:
        try:
            client, request = pipe.recv()
        except EOFError:
            return
        if client not in built:
            built[client] = Device(own_data(data, client), empty, None)
        pipe.send(built[client].answer(request))


def server_of(clients: int) -> None:
    """Train two rounds with a cohort of all clients, and print the growth of the peak memory."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    near, far = context.Pipe()
    process = context.Process(target=be_devices, args=(far, clients), daemon=True)
    process.start()
    far.close()
    family, data = federation(clients)
    courier = Elsewhere(near, clients)
    engine = Flower(data, courier=courier, run_id="costs", terms=Terms.of)
    settings: dict[str, Any] = {"evaluation": fq.Evaluation(every=0)}
    fleet = fq.Fleet.of((1.0,), clients, clients)
    run = fq.prepare(HeteroFL(), family, data, fleet, engine, **settings)
    before = peak_memory(os.getpid())
    run.train(2)
    grown = peak_memory(os.getpid()) - before
    weights = 4 * family.member(family.whole).count
    assert all(
        len(record.attendance.replied) == clients for record in run.records if record.attendance
    )
    print(f"{grown} {weights}")
    near.close()
    process.join(20)


def server() -> None:
    """Print the server's peak memory against the cohort."""
    rows = []
    for clients in COHORTS:
        words = [sys.executable, __file__, "--server-of", str(clients)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        grown, weights = map(int, done.stdout.split()[-2:])
        replies = clients * weights
        rows.append(
            (
                f"cohort of {clients}",
                f"{replies / MEBIBYTE:.0f}",
                f"{grown / MEBIBYTE:.0f}",
                f"{grown / replies:.2f}",
            )
        )
    table(("MiB of the server", "all replies", "peak above the prepared run", "ratio"), rows)


# --- polls ----------------------------------------------------------------------------------------


def polls() -> None:
    """Print how many signed polls per second a SuperLink answers."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_keys(folder / "keys", POLL_THREADS)
        keys = KeyFolder(folder / "keys")
        link = SuperLink(folder / "home", keys)
        with link:
            for public_key in keys.device_public_keys:
                link.register(public_key)
            gate = OpenGate(Gate(link.url, keys.ca), certificate=(keys.server, keys.server_key))
            with gate:
                assert link.link.process is not None
                process = link.link.process.pid
                ways = {"directly": link.port, "through the gate": gate.port}
                found = {way: _polls_of(keys, port, process) for way, port in ways.items()}
    rows = [(way, *(f"{number:.0f}" for number in numbers)) for way, numbers in found.items()]
    header = (f"polls of {POLL_THREADS} devices", "per second", "per second of the SuperLink's CPU")
    table(header, rows)
    capacity = 3 * max(numbers[1] for numbers in found.values())
    print(f"An idle device polls every 3 s: {capacity:.0f} devices take all of a core.")


def _cpu_seconds(process: int) -> float:
    """Return the CPU seconds that a process has used."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def _polls_of(keys: KeyFolder, port: int, process: int) -> tuple[float, float]:
    """Return the polls per second of several nodes at once, by the wall and by the SuperLink's CPU.

    Args:
        keys: Keys of the nodes.
        port: Port that they poll.
        process: The SuperLink.
    """
    counts = [0] * POLL_THREADS
    before = _cpu_seconds(process)
    end = time.monotonic() + POLL_SECONDS
    threads = [
        threading.Thread(target=_poll, args=(keys, number, port, end, counts))
        for number in range(POLL_THREADS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(counts), counts
    return sum(counts) / POLL_SECONDS, sum(counts) / (_cpu_seconds(process) - before)


def _poll(keys: KeyFolder, number: int, port: int, end: float, counts: list[int]) -> None:
    """Poll as a SuperNode does, with a signature for each request."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key
    from flwr.proto.fleet_pb2 import (
        ActivateNodeRequest,
        DeactivateNodeRequest,
        PullMessagesRequest,
    )
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private: Any = load_ssh_private_key(keys.device_key(number + 1).read_bytes(), None)
    version = RuntimeVersionHttpInterceptor(component_name="SuperNode")
    signing = NodeAuthHttpInterceptor(private, private.public_key())
    with FleetHttpClient.from_server_address(
        f"localhost:{port}", False, str(keys.ca), interceptors=[version, signing]
    ) as client:
        node = Node(
            node_id=client.ActivateNode(
                ActivateNodeRequest(
                    public_key=public_key_to_bytes(private.public_key()), heartbeat_interval=30
                )
            ).node_id
        )
        while time.monotonic() < end:
            client.PullMessages(PullMessagesRequest(node=node))
            counts[number] += 1
        client.DeactivateNode(DeactivateNodeRequest(node_id=node.node_id))


PARTS = {
    "rounds": rounds,
    "bytes": measured_bytes,
    "devices": devices,
    "server": server,
    "polls": polls,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(PARTS), help="parts, by commas")
    parser.add_argument("--server-of", type=int, default=0, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.server_of:
        server_of(asked.server_of)
        return
    print(machine())
    for name in asked.only.split(","):
        began = time.monotonic()
        PARTS[name]()
        print(f"({name}: {time.monotonic() - began:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
