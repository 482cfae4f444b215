"""Flower's ServerApp and ClientApp of a deployment.

The ServerApp trains the run in a folder that `fedquilt serve` has prepared. The ClientApp is used
by `--isolation subprocess` only: it replies as the worker does, in a process for each message.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.server import train
from fedquilt.deployment.worker import reply_to

FOLDER = Path(__file__).parent / "flower_app"  # The app's folder, for `flwr run`


def _serve(grid: Any, context: Any) -> None:
    train(Path(str(context.run_config["folder"])), grid)


def _enrol(message: Any, context: Any) -> Any:
    return reply_to(message, _host(str(context.node_config["settings"])))


def _train(message: Any, context: Any) -> Any:
    return reply_to(message, _host(str(context.node_config["settings"])))


def _evaluate(message: Any, context: Any) -> Any:
    return reply_to(message, _host(str(context.node_config["settings"])))


@lru_cache(maxsize=1)
def _host(settings: str) -> DeviceHost:
    """Return the device of this process.

    Args:
        settings: File of its settings, which `fedquilt join` puts into Flower's node-config.
    """
    return DeviceHost(DeviceSettings.load(Path(settings)))


server = ServerApp()
server.main()(_serve)
client = ClientApp()
client.query()(_enrol)
client.train()(_train)
client.evaluate()(_evaluate)
