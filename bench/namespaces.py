"""Network namespaces for the devices of a deployment, with loss and delay where the kernel can.

Each device gets a namespace of its own and a link to a bridge, on which the server listens. `tc
netem` loses and delays packets of each link. This needs root, `ip` and `tc` (Debian: iproute2), and
a kernel with the module sch_netem.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

SUBNET = "10.213.37"  # Addresses of the bridge (.1) and of the devices (.2, .3, …)


class NotPermittedError(Exception):
    """This machine has no namespaces, or its kernel cannot lose packets."""


@dataclass
class Namespaces:
    """A bridge and one network namespace for each device, which end with the context.

    Args:
        count: Number of devices.
        netem: Arguments of `tc qdisc … netem`, such as ("loss", "3%", "delay", "50ms"). Empty: the
            links lose and delay nothing.
    """

    count: int
    netem: Sequence[str] = ()
    _undo: list[list[str]] = field(default_factory=list)

    @property
    def _name(self) -> str:
        return f"fq{os.getpid() % 100_000}"

    @property
    def server(self) -> str:
        """Return the address on which the server has to listen."""
        return f"{SUBNET}.1"

    def prefix(self, device: int) -> tuple[str, ...]:
        """Return what starts a command in the namespace of a device."""
        return ("ip", "netns", "exec", f"{self._name}n{device}")

    def __enter__(self) -> Namespaces:
        if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
            raise NotPermittedError("namespaces need root, ip and tc (Debian: iproute2)")
        try:
            self._make()
        except NotPermittedError:
            self.__exit__()
            raise
        return self

    def _make(self) -> None:
        bridge = f"{self._name}b"
        self._run("ip", "link", "add", bridge, "type", "bridge")
        self._undo.append(["ip", "link", "del", bridge])
        self._run("ip", "addr", "add", f"{self.server}/24", "dev", bridge)
        self._run("ip", "link", "set", bridge, "up")
        for device in range(self.count):
            space, inside = f"{self._name}n{device}", self.prefix(device)
            near, far = f"{self._name}h{device}", f"{self._name}d{device}"
            self._run("ip", "netns", "add", space)
            self._undo.append(["ip", "netns", "del", space])
            self._run("ip", "link", "add", near, "type", "veth", "peer", "name", far)
            self._undo.append(["ip", "link", "del", near])
            self._run("ip", "link", "set", near, "master", bridge, "up")
            self._run("ip", "link", "set", far, "netns", space)
            self._run(*inside, "ip", "addr", "add", f"{SUBNET}.{2 + device}/24", "dev", far)
            self._run(*inside, "ip", "link", "set", far, "up")
            self._run(*inside, "ip", "link", "set", "lo", "up")
            if self.netem:
                words = ("qdisc", "add", "dev")
                self._run("tc", *words, near, "root", "netem", *self.netem)
                self._run(*inside, "tc", *words, far, "root", "netem", *self.netem)

    def __exit__(self, *error: object) -> None:
        for command in reversed(self._undo):
            subprocess.run(command, capture_output=True, check=False)
        self._undo.clear()

    def _run(self, *command: str) -> None:
        """Run a command, or say why this machine cannot have namespaces."""
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPermittedError(f"{' '.join(command)}: {done.stderr.strip()}")
