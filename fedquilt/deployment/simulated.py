"""Nodes of Flower's simulation, which have no keys.

Flower's simulation gives every node random bytes in place of a public key, and others after each
start. A fedquilt run recognises its clients by their keys. So each node is asked for its partition
once, and gets a key that follows from the number of the partition. The key is no secret, because
all simulated nodes are on one machine.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from fedquilt.checks import whole
from fedquilt.deployment.keys import public_key_text

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.app import Message as FlowerMessage
    from flwr.serverapp import Grid

_log = logging.getLogger(__name__)
PARTITION = "partition-id"  # Key of Flower's node-config
NUM_PARTITIONS = "num-partitions"
QUERY = "partition"  # Name of the query to which a node replies with its partition
PARTITION_SECONDS = 120.0  # Time for the reply. Ray may have to start first.
MAX_PARTITIONS = 1 << 20


@dataclass(frozen=True)
class KeyedNode:
    """A node that is online, with a key that can be read."""

    node_id: int
    public_key: bytes
    status: str
    last_activated_at: str = ""  # When it connected last. Empty: it always was


@dataclass
class KeyedGrid:
    """Flower's grid, in which simulated nodes have keys.

    Args:
        grid: Flower's grid, as a ServerApp gets it.
    """

    grid: Grid
    _keys: dict[int, bytes] = field(default_factory=dict, repr=False)  # By node
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def get_nodes(self) -> list[KeyedNode]:
        """Return all nodes that have a key or have stated their partition."""
        nodes = list(self.grid.get_nodes())
        with self._lock:
            self._learn(nodes)
            keys = dict(self._keys)
        return [
            KeyedNode(
                node.node_id,
                keys[node.node_id],
                node.status,
                getattr(node, "last_activated_at", ""),
            )
            for node in nodes
            if node.node_id in keys
        ]

    def push_messages(self, messages: Iterable[FlowerMessage]) -> Iterable[str]:
        """Send messages, and return their ids."""
        ids: Iterable[str] = self.grid.push_messages(messages)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[FlowerMessage]:
        """Return the replies to messages that have arrived, by the ids of the messages."""
        replies: Iterable[FlowerMessage] = self.grid.pull_messages(message_ids)
        return replies

    def _learn(self, nodes: Sequence[Any]) -> None:
        """Find the keys of nodes that are new."""
        keyless = []
        for node in nodes:
            if node.node_id in self._keys:
                continue
            if _is_readable(node.public_key):
                self._keys[node.node_id] = node.public_key
            else:
                keyless.append(node.node_id)
        if not keyless:
            return
        for node_id, partition in self._partitions(keyless).items():
            key = partition_key(partition)
            if key in self._keys.values():
                _log.warning("Two nodes state the partition %d. One is left out.", partition)
            else:
                self._keys[node_id] = key

    def _partitions(self, node_ids: Sequence[int]) -> dict[int, int]:
        """Ask nodes for their partitions, and return those that are stated."""
        from flwr.app import Message as FlowerMessage
        from flwr.app import RecordDict

        kind = f"query.{QUERY}"
        messages = [FlowerMessage(RecordDict(), node_id, kind) for node_id in node_ids]
        partitions = {}
        for reply in self.grid.send_and_receive(messages, timeout=PARTITION_SECONDS):
            if reply.has_error():
                continue
            record = reply.content.config_records.get(QUERY, {})
            partition = record.get(PARTITION)
            if whole(partition) and partition < MAX_PARTITIONS:
                partitions[reply.metadata.src_node_id] = partition
        return partitions


def state_partition(message: FlowerMessage, context: Context) -> FlowerMessage:
    """Reply to the query of a `KeyedGrid` with the partition of a node.

    Args:
        message: The query.
        context: Context of the node. Its node-config has the partition.
    """
    from flwr.app import ConfigRecord, RecordDict
    from flwr.app import Message as FlowerMessage

    partition = context.node_config.get(PARTITION)
    values = {PARTITION: partition} if whole(partition) else {}
    return FlowerMessage(RecordDict({QUERY: ConfigRecord(values)}), reply_to=message)


@lru_cache(maxsize=4096)
def partition_key(partition: int) -> bytes:
    """Return the public key of a simulated node, in the OpenSSH format.

    Args:
        partition: Number of its partition, from 0.
    """
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    digest = hashlib.sha256(f"fedquilt partition {partition}".encode()).digest()
    private_key = ec.derive_private_key(int.from_bytes(digest, "big"), ec.SECP384R1())
    public_key: bytes = private_key.public_key().public_bytes(
        Encoding.OpenSSH, PublicFormat.OpenSSH
    )
    return public_key


def _is_readable(key: bytes) -> bool:
    """Return True if bytes are a public key."""
    try:
        public_key_text(key)
    except ValueError:
        return False
    return True
