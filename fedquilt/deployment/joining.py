"""`fedquilt join`: what is checked before a device joins, and what it will send."""

from __future__ import annotations

import datetime
import email.utils
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.keys import check_certificate, check_device_key, check_installed
from fedquilt.deployment.problems import ProblemLog
from fedquilt.deployment.roster import check_name
from fedquilt.deployment.serving import is_loopback
from fedquilt.deployment.supernode import WATCH_SECONDS, Isolation, SuperNode
from fedquilt.errors import BudgetError, ConfigError, FormatError
from fedquilt.names import is_file, is_reference, split_file
from fedquilt.terms import Budget

CONNECT_SECONDS = 10.0
MAX_AHEAD, MAX_BEHIND = 5.0, 300.0  # Seconds that Flower allows a device's clock to be off
REFUSED_SECONDS = 120.0  # Time for which a key that is not accepted is tried again


def parse_budget(text: str) -> Budget:
    """Return a budget from a text such as `share=0.5` or `memory=2MB,macs=28M`.

    Names are share, macs, params and memory. Units are those of `Budget`: MB is 10^6 bytes, MiB
    2^20.

    Raises:
        ConfigError: The text is no budget.
    """
    bounds: dict[str, float | str] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not value or name not in ("share", "macs", "params", "memory"):
            raise ConfigError(
                f"--budget {text} was asked for; share=0.5 would work, or macs, params and memory "
                "with units: memory=2MB,macs=28M."
            )
        bounds[name] = value
    try:
        share = float(bounds.pop("share")) if "share" in bounds else None
        return Budget(share, **bounds)
    except (ValueError, BudgetError) as error:
        raise ConfigError(f"--budget {text} was asked for: {error}") from error


def allowed_code(reference: str) -> str:
    """Return a reference to code that `--allow` names, with an absolute path if it is a file.

    The code is not imported before a server's settings name it.

    Raises:
        ConfigError: It is no reference, or there is no such file.
    """
    request = f"--allow {reference} was asked for"
    if not is_reference(reference):
        raise ConfigError(f"{request}; mine.py:Mine would work, or package.module:Mine.")
    if not is_file(reference):
        return reference
    path, name = split_file(reference)
    if not name:
        raise ConfigError(f"{request}; the name of a class or function is needed: {path}:Mine.")
    if not Path(path).is_file():
        raise ConfigError(f"{request}; there is no file {path} on this device.")
    return f"{Path(path).resolve()}:{name}"


@dataclass(frozen=True)
class ServerEndpoint:
    """The server that a device joins."""

    address: str  # host:port
    ca: Path | None = None  # CA certificate. None: plain HTTP, for loopback only
    key: Path | None = None  # Private key of the device

    @property
    def host(self) -> str:
        """Return the host of the address."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Return the port of the address."""
        return int(self.address.rpartition(":")[2])

    def check(self) -> None:
        """Refuse an address, certificate or key that cannot work, and a server that is not there.

        Raises:
            ConfigError: It says what was found and what would work.
        """
        host, _, port = self.address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(
                f"--superlink {self.address} was asked for; host:port would work, such as "
                "server.example.org:9092."
            )
        if (self.ca is None) != (self.key is None):
            raise ConfigError("--ca and --key belong together; one of them was given.")
        if self.ca is None and not is_loopback(self.host):
            raise ConfigError(
                f"--superlink {self.address} was asked for without --ca and --key; plain HTTP is "
                "for this machine alone. The server's owner has both files (`fedquilt keys`)."
            )
        if self.ca is not None and self.key is not None:
            check_certificate(self.ca)
            check_device_key(self.key)
        self._connect()

    def _connect(self) -> None:
        """Connect to the server once, and compare certificates."""
        request = f"--superlink {self.address} was asked for"
        try:
            with socket.create_connection((self.host, self.port), CONNECT_SECONDS) as plain:
                if self.ca is None:
                    return
                context = ssl.create_default_context(cafile=str(self.ca))
                with context.wrap_socket(plain, server_hostname=self.host):
                    return
        except ssl.SSLCertVerificationError as error:
            raise ConfigError(
                f"{request}; its certificate is not accepted: {error.verify_message}. The address "
                "must be one that the server's certificate has, and --ca the server's CA."
            ) from error
        except ssl.SSLError as error:
            raise ConfigError(
                f"{request}; it does not speak TLS ({error.reason}). The server may run without "
                "--keys, or something else listens there."
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{request}; it does not answer: {error.strerror or error}. `fedquilt serve` has "
                "to run there, and the port has to be reachable."
            ) from error

    def clock_warning(self) -> str:
        """Return a warning if the clock here differs from the server's. Empty: it does not."""
        import httpx

        scheme = "http" if self.ca is None else "https"
        verify: ssl.SSLContext | bool = False
        if self.ca is not None:
            verify = ssl.create_default_context(cafile=str(self.ca))
        try:
            url = f"{scheme}://{self.address}/"
            stated = httpx.get(url, verify=verify, trust_env=False).headers["date"]
            there = email.utils.parsedate_to_datetime(stated)
        except (httpx.HTTPError, KeyError, ValueError):
            return ""
        seconds = (datetime.datetime.now(datetime.UTC) - there).total_seconds()
        if -MAX_BEHIND < seconds < MAX_AHEAD:
            return ""
        word = "ahead of" if seconds > 0 else "behind"
        return (
            f"The clock here is {abs(seconds):.0f} s {word} the server's. Flower refuses devices "
            f"that are more than {MAX_AHEAD:.0f} s ahead or {MAX_BEHIND:.0f} s behind."
        )


def checked_settings(settings: DeviceSettings) -> tuple[DeviceHost, list[str]]:
    """Load the samples of a device, and return lines with everything that it will send.

    Args:
        settings: What the owner decided.

    Raises:
        ConfigError: The name, the data or the budget cannot be used.
    """
    try:
        check_name(settings.name)
    except FormatError as error:
        raise ConfigError(f"--name {settings.name!r} was asked for; {error}.") from error
    host = DeviceHost(settings)
    size = host.data.size(0)
    if size < 1:
        raise ConfigError(f"--data {settings.data} was asked for; it has no training samples.")
    lines = [
        "This device sends to the server:",
        f"  once: the name {settings.name!r}, its public key, the budget {settings.budget}, the "
        f"number of training samples ({size})",
        "  in every round that it takes part in: the trained weights of its part of the model, "
        "the mean training loss, the numbers of steps and batches, the classes that occur in its "
        "samples",
        "  in an evaluation: the number of test samples, sums of losses and correct predictions "
        "over them, and sums of norm statistics over its training samples",
        "  if it fails: the reason, as one sentence that may have names and shapes of weights",
        "Samples stay on this device. The server can read all that is sent.",
    ]
    return host, lines


def join(
    settings: DeviceSettings,
    server: ServerEndpoint,
    say: Callable[[str], None],
    isolation: Isolation,
) -> None:
    """Take part in a federation until the process is interrupted.

    Args:
        settings: What the owner decided.
        server: The server, which was checked.
        say: Prints a line.
        isolation: "process": one long-lived worker. "subprocess": a process for each message.

    Raises:
        ConfigError: The server refuses the key, or the device cannot take part with its model,
            samples or budget.
    """
    check_installed()
    node = SuperNode(settings, server.address, server.ca, server.key, isolation)
    refused_since: float | None = None
    is_active = False
    problems = ProblemLog(settings.name, settings.state)
    with node:
        while True:
            node.watch()
            line, problem = problems.changed()
            if problem is not None and problem.is_final:
                raise ConfigError(
                    f"{settings.name} cannot take part in the federation of {server.address}: "
                    f"{problem.text}"
                )
            if line:
                say(line)
            now = time.monotonic()
            if node.is_active != is_active:
                is_active = node.is_active
                state = "takes part in the federation of" if is_active else "has lost"
                say(f"{settings.name} {state} {server.address}.")
            if is_active:
                refused_since = None
            elif node.is_refused and refused_since is None:
                refused_since = now
                say(
                    "The server does not accept the key. A device that was killed counts as online "
                    f"for a minute, so it is tried again for {REFUSED_SECONDS:.0f} s."
                )
            if refused_since is not None and now - refused_since > REFUSED_SECONDS:
                raise ConfigError(
                    f"--key {server.key} was asked for; the server at {server.address} does not "
                    "accept it. It has to be registered there (`fedquilt keys` and `fedquilt serve "
                    "--keys`), and no other device may use it."
                )
            time.sleep(WATCH_SECONDS)
