"""The apps of Flower users: settings, nodes without keys, and what nodes reply."""

from __future__ import annotations

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.common.config import flatten_dict
from flwr.supercore.task_identity import TaskIdentity

from fedquilt.deployment import simulated
from fedquilt.deployment.enrolment import Enrolment, ServerFacts
from fedquilt.deployment.envelope import pack, unpack
from fedquilt.deployment.flower import AppSettings, _reply, client_app, server_app
from fedquilt.deployment.keys import KeyFolder, make_keys, public_key_text
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import ServeRequest
from fedquilt.deployment.simulated import KeyedGrid, partition_key, state_partition
from fedquilt.errors import ConfigError
from fedquilt.round.wire import Message

APP = Path(__file__).parents[3] / "examples" / "flower_app"


@pytest.fixture(autouse=True)
def identity(monkeypatch) -> None:
    for name in ("_task_id", "_run_id", "_node_id"):  # Flower sets them in an app.
        monkeypatch.setattr(TaskIdentity, name, 1)


@pytest.fixture
def config(tmp_path) -> dict[str, Any]:
    """Return the run-config of the example, as Flower hands it to the apps."""
    text = (APP / "pyproject.toml").read_text()
    plain = flatten_dict(tomllib.loads(text)["tool"]["flwr"]["app"]["config"])
    return {**plain, "out": str(tmp_path / "run")}


def context(config: dict[str, Any], **node: Any) -> Context:
    named = {key.replace("_", "-"): value for key, value in node.items()}
    return Context(1, 7, named, RecordDict(), config)


def introduced(config: dict[str, Any], **node: Any) -> Enrolment:
    """Return the introduction of a node to a server that has the example's settings."""
    experiment = AppSettings.read(config).experiment
    data, _ = experiment.data.federate(3, 0)
    family = experiment.models[0].trace(data)
    about = ServerFacts.of("run1", experiment.models, data, family).to_bytes()
    message = FlowerMessage(pack(Message(b"{}"), about), 7, "query")
    reply = _reply(message, context(config, **node), None)
    return Enrolment.read(unpack(reply.content)[0].note)


def test_the_example_has_settings_of_a_run_and_lists_as_text(config):
    settings = AppSettings.read(config)
    assert settings.num_clients == 3
    fleet = settings.experiment.fleet.fleet(3)
    assert [fleet.budget(client, 0, 0).share for client in range(3)] == [1.0, 0.5, 0.25]
    assert settings.rules == RoundRules(deadline=600.0, least=1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"out": "runs/here"}, "an absolute path"),
        ({"deadline": -1}, "a number above 0"),
        ({"least": float("inf")}, "a number above 0"),
        ({"least": 4}, "the app's config: least 4 was asked for; there are 3 clients"),
        ({"enough": 9}, "the app's config: enough 9"),
        ({"method.shft": 1}, "shft"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(config, changes, reason):
    with pytest.raises(ConfigError, match=reason):
        AppSettings.read({**config, **changes})


def test_a_run_without_a_number_of_clients_is_refused(config):
    del config["fleet.clients"]
    with pytest.raises(ConfigError, match="number of nodes to wait for"):
        AppSettings.read(config)


def test_a_folder_is_begun_once_and_resumed_with_the_same_settings(config):
    settings = AppSettings.read(config)
    settings.begin()
    first = ServeRequest.load(settings.out)
    AppSettings.read({**config, "deadline": 5.0}).begin()
    again = ServeRequest.load(settings.out)
    assert (again.run_id, again.rules.deadline) == (first.run_id, 5.0)
    with pytest.raises(ConfigError, match="other settings"):
        AppSettings.read({**config, "rounds": 9}).begin()


def test_a_node_has_the_samples_and_budget_of_its_partition(config):
    enrolment = introduced(config, partition_id=1, num_partitions=3)
    assert enrolment.budget is not None
    assert (enrolment.name, enrolment.budget.share) == ("partition 1", 0.5)
    data, _ = AppSettings.read(config).experiment.data.federate(3, 0)
    assert enrolment.size == data.size(1)


def test_the_owner_of_a_node_names_samples_and_budget(config, tmp_path):
    generator = np.random.default_rng(0)
    inputs, targets = generator.integers(0, 17, (9, 1, 8, 8)), np.arange(9)
    data, _ = AppSettings.read(config).experiment.data.federate(3, 0)
    inputs = inputs.astype(data.inputs.numpy().dtype).reshape(9, *data.inputs.shape[1:])
    file = tmp_path / "mine.npz"
    np.savez(file, x_train=inputs, y_train=targets, x_test=inputs[:1], y_test=targets[:1])
    enrolment = introduced(config, data=str(file), budget="share=0.25", name="mine")
    assert enrolment.failed == ""
    assert enrolment.budget is not None
    assert (enrolment.name, enrolment.size, enrolment.budget.share) == ("mine", 9, 0.25)


@pytest.mark.parametrize(
    ("node", "reason"),
    [
        ({}, "has no partition-id"),
        ({"partition_id": 3, "num_partitions": 3}, "integers would work"),
        ({"dta": "mine.npz"}, "has dta; known are"),
        ({"data": "absent.npz", "budget": "share=0.5"}, "absent.npz"),
    ],
)
def test_a_node_that_cannot_take_part_says_why(config, node, reason):
    assert reason in introduced(config, **node).failed


def test_apps_are_those_of_flower():
    from flwr.clientapp import ClientApp
    from flwr.serverapp import ServerApp

    assert isinstance(server_app(), ServerApp)
    assert isinstance(client_app(), ClientApp)


class SimulatedNodes:
    """Grid whose nodes have random bytes in place of keys, as in Flower's simulation."""

    def __init__(self, partitions: list[int], keys: list[bytes]) -> None:
        self.partitions, self.keys = partitions, keys
        self.queries = 0

    def get_nodes(self) -> list[Any]:
        return [
            SimpleNamespace(node_id=number, public_key=key, status="online")
            for number, key in enumerate(self.keys)
        ]

    def send_and_receive(self, messages: list[FlowerMessage], timeout: float) -> list[Any]:
        replies = []
        for message in messages:
            self.queries += 1
            number = message.metadata.dst_node_id
            assert message.metadata.message_type == f"query.{simulated.QUERY}"
            node = context({}, partition_id=self.partitions[number], num_partitions=9)
            content = state_partition(message, node).content
            metadata = SimpleNamespace(src_node_id=number)
            replies.append(
                SimpleNamespace(metadata=metadata, has_error=lambda: False, content=content)
            )
        return replies


def test_simulated_nodes_get_the_key_of_their_partition_and_are_asked_once(tmp_path):
    make_keys(tmp_path, 1)
    real = KeyFolder(tmp_path).device_public_keys[0].read_bytes()
    nodes = SimulatedNodes([5, 2, 0, 2], [b"\x01" * 32, b"\x02" * 32, real, b"\x03" * 32])
    grid = KeyedGrid(nodes)  # type: ignore[arg-type]
    keys = {node.node_id: node.public_key for node in grid.get_nodes()}
    # Node 3 states the partition of node 1, and is left out. Node 2 has a key of its own.
    assert keys == {0: partition_key(5), 1: partition_key(2), 2: real}
    queries = nodes.queries
    del nodes.keys[3]
    grid.get_nodes()
    assert nodes.queries == queries
    assert public_key_text(partition_key(5)).startswith("ecdsa-sha2-nistp384 ")
