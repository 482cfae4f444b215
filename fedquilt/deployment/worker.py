"""The long-lived worker of a device: it takes the tasks of a SuperNode one after another.

As shipped, a SuperNode starts a process for every message, which imports torch each time and runs
the app that the server sent. This worker imports torch once, and never runs code of a server. It
uses internals of flwr, which are all imported in `_internals`. A test lists them. Without them,
`fedquilt join --isolation subprocess` works.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fedquilt.deployment.envelope import pack, unpack
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.errors import FedquiltError
from fedquilt.names import said

_log = logging.getLogger(__name__)
IDLE_SECONDS = 0.3  # Time between two questions for a task
MAX_TASKS = 8  # Tasks that are pulled at the same time
LOST_SECONDS = 5.0  # Time before a SuperNode that does not answer is asked again
# Internals of flwr that the worker needs, by module.
INTERNALS = {
    "flwr.proto.runtime_pb2": ("AcquireTaskRequest",),
    "flwr.supercore.constant": ("TaskType",),
    "flwr.supercore.heartbeat": ("HeartbeatSender", "make_task_heartbeat_fn_http"),
    "flwr.supercore.interceptors": (
        "RuntimeTokenHttpInterceptor",
        "RuntimeVersionHttpInterceptor",
        "SuperExecAuthHttpInterceptor",
    ),
    "flwr.supercore.retry": ("make_simple_http_retry_invoker",),
    "flwr.supercore.runtime": ("RuntimeHttpClient",),
    "flwr.supernode.runtime.run_clientapp": (
        "pull_task_input",
        "push_message",
        "push_task_output",
    ),
    "flwr.common.constant": ("SubStatus",),
}


def _internals() -> Any:
    """Import the internals of flwr."""
    from importlib import import_module

    found: dict[str, Any] = {}
    for module, names in INTERNALS.items():
        imported = import_module(module)
        found |= {name: getattr(imported, name) for name in names}
    return SimpleNamespace(**found)


class DeviceWorker:
    """Takes tasks of a SuperNode on this machine, and answers them with a device.

    Args:
        address: Address of the SuperNode's runtime, such as 127.0.0.1:9001.
        host: Replies to messages.
        secret: Secret that the SuperNode shares with its workers.
    """

    def __init__(self, address: str, host: DeviceHost, secret: bytes) -> None:
        self._flwr = _internals()
        self._address, self._host = address, host
        self._training = threading.Lock()
        self._slots = threading.Semaphore(MAX_TASKS)
        self._tasks = self._client(
            self._flwr.SuperExecAuthHttpInterceptor(
                master_secret=secret,
                protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"}),
            )
        )

    def _client(self, interceptor: Any) -> Any:
        version = self._flwr.RuntimeVersionHttpInterceptor(component_name="flwr-clientapp")
        return self._flwr.RuntimeHttpClient.from_server_address(
            server_address=self._address,
            insecure=True,  # The runtime listens on loopback.
            root_certificates=None,
            interceptors=[version, interceptor],
            retry_invoker=self._flwr.make_simple_http_retry_invoker(),
        )

    def serve(self) -> None:
        """Take tasks until the process ends."""
        is_lost = False
        while True:
            try:
                has_worked = self.take()
            except Exception as error:  # The SuperNode may be restarted at any time.
                if not is_lost:
                    _log.warning("The SuperNode does not answer: %s", error)
                is_lost = True
                time.sleep(LOST_SECONDS)
                continue
            if is_lost:
                _log.warning("The SuperNode answers again.")
            is_lost = False
            if not has_worked:
                time.sleep(IDLE_SECONDS)

    def take(self) -> bool:
        """Take one task if there is one, and return True if there was. It is worked on later."""
        request = self._flwr.AcquireTaskRequest(
            supported_task_types=[self._flwr.TaskType.CLIENT_APP]
        )
        acquired = self._tasks.AcquireTask(request)
        if not (acquired.HasField("task") and acquired.token):
            return False
        self._slots.acquire()
        threading.Thread(
            target=self._work, args=(acquired.token,), name="task", daemon=True
        ).start()
        return True

    def _work(self, token: str) -> None:
        """Work on a task in a thread of its own.

        The message of a task may never become complete, because the server has died while it was
        sent. flwr then waits for minutes, in which other tasks have to continue. Training itself is
        one task at a time.

        A SuperNode waits for the reply to a message, and does not notice that its task has failed.
        So a task without a reply is not reported as failed. Without heartbeats its SuperNode gives
        it up after a minute, and replies that the app does not respond.
        """
        client = self._client(self._flwr.RuntimeTokenHttpInterceptor(token))
        heartbeat = self._flwr.HeartbeatSender(self._flwr.make_task_heartbeat_fn_http(client))
        try:
            heartbeat.start()
            message, context, _, _ = self._flwr.pull_task_input(client)
            with self._training:
                reply = reply_to(message, self._host)
            self._flwr.push_message(client, reply, context)
            self._flwr.push_task_output(
                client=client,
                context=context,
                sub_status=self._flwr.SubStatus.COMPLETED,
                details="",
            )
        except Exception as error:  # The SuperNode may be gone, or the run may have ended.
            _log.warning("A task was given up: %s", said(error))
        finally:
            with suppress(RuntimeError):
                heartbeat.stop()
            client.close()
            self._slots.release()


def reply_to(message: Any, host: DeviceHost) -> Any:
    """Return Flower's reply to a message of Flower.

    Args:
        message: A message of type `query`, to which a device introduces itself, `train` or
            `evaluate`.
        host: Replies to messages.
    """
    from flwr.app import Error
    from flwr.app import Message as FlowerMessage

    try:
        content, about = unpack(message.content)
    except FedquiltError as error:
        return FlowerMessage(Error(code=2, reason=str(error)), reply_to=message)
    kind = message.metadata.message_type
    if kind == "query":
        reply = host.enrol(about)
    elif kind == "train":
        reply = host.answer(about, content)
    elif kind == "evaluate":
        reply = host.evaluate(about, content)
    else:
        unknown = Error(code=2, reason=f"a device does not know {kind[:40]!r}")
        return FlowerMessage(unknown, reply_to=message)
    return FlowerMessage(pack(reply), reply_to=message)


def main(argv: Sequence[str]) -> None:
    """Run a worker: `python -m fedquilt.deployment.worker ADDRESS SETTINGS SECRET`.

    Args:
        argv: Address of the SuperNode's runtime, file of the device's settings, file of the secret.
    """
    address, settings, secret = argv
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    # flwr interrupts a worker whose task has expired, such as one that was paused. It then ends at
    # once, because a thread that trains cannot be unwound.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    host = DeviceHost(DeviceSettings.load(Path(settings)))
    DeviceWorker(address, host, Path(secret).read_bytes()).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
