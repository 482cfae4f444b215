"""`fedquilt serve`: the processes of a server, and the run that they train."""

from __future__ import annotations

import ipaddress
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from fedquilt.config.toml import read_toml
from fedquilt.deployment.gate import Gate, OpenGate
from fedquilt.deployment.keys import (
    KeyFolder,
    check_certificate,
    check_installed,
    hosts_of,
    public_key_text,
)
from fedquilt.deployment.roster import ROSTER, Roster
from fedquilt.deployment.round_rules import RoundRules
from fedquilt.deployment.server import (
    REQUEST,
    SETTINGS,
    STATUS,
    WORKPLACE,
    ServeRequest,
    Status,
    write_request,
)
from fedquilt.deployment.superlink import SuperLink, SuperLinkAwayError
from fedquilt.engines.flower.evaluation import SamplesName
from fedquilt.errors import ConfigError
from fedquilt.names import said
from fedquilt.round import Record
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import holds_a_run, read_records
from fedquilt.storage.files import make_folder

LOOK_SECONDS = 0.5  # Time between two looks at the run
APP_SECONDS = 180.0  # Time until a ServerApp that was submitted reports
SUBMIT_SECONDS = 300.0  # Time in which a ServerApp is submitted to a SuperLink that is away
MAX_STARTS = 20  # ServerApps that are started for one call of serve
MIN_FREE_BYTES = 64 << 20  # Space on disk, below which a run that could not be saved waits
STORAGE_ERRORS = ("RecordError", "OSError")  # Errors of files that could not be written


def is_loopback(host: str) -> bool:
    """Return True if a host is this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Address:
    """Address that devices connect to, and the certificate of the server."""

    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    keys: KeyFolder | None = None  # None: plain HTTP
    superlink: str | None = None  # Address of a SuperLink on this machine. None: one is started

    def check(self) -> None:
        """Refuse plain HTTP beyond loopback, keys that are missing or expired, and far SuperLinks.

        The address of a SuperLink must have a port, and be on this machine.

        Raises:
            ConfigError: It says what would work.
        """
        if not 0 <= self.port < 65536:
            raise ConfigError(
                f"--port {self.port} was asked for; 1 to 65535 would work, or 0 for any free one."
            )
        if self.keys is None:
            if not is_loopback(self.host):
                raise ConfigError(
                    f"--host {self.host} was asked for without --keys; plain HTTP is for this "
                    "machine alone. `fedquilt keys` makes certificates, and --keys names them."
                )
        else:
            check_certificate(self.keys.ca)
            check_certificate(self.keys.server)
            if not self.keys.device_public_keys:
                raise ConfigError(
                    f"--keys {self.keys.path} was asked for; it has no keys of devices "
                    "(device-1.pub, …). `fedquilt keys` makes them."
                )
        if self.superlink is not None:
            host, _, port = self.superlink.rpartition(":")
            if not is_loopback(host) or not port.isdecimal():
                raise ConfigError(
                    f"--superlink {self.superlink} was asked for; an address of this machine such "
                    "as 127.0.0.1:8000 would work, because the run is trained beside it."
                )

    @property
    def hosts(self) -> list[str]:
        """Return the names by which devices may call the server."""
        return [self.host] if self.keys is None else hosts_of(self.keys.server)

    @property
    def public_keys(self) -> tuple[str, ...]:
        """Return the public keys of devices, in the order of clients."""
        if self.keys is None:
            return ()
        return tuple(public_key_text(path.read_bytes()) for path in self.keys.device_public_keys)


def begin(
    folder: Path,
    experiment: Experiment | None,
    num_clients: int | None,
    address: Address,
    rules: RoundRules,
    samples: SamplesName | None = None,
) -> tuple[Experiment, ServeRequest]:
    """Write the request of a new run, or return that of a run which is resumed.

    Args:
        folder: Folder of the run.
        experiment: Settings. None: those in the folder.
        num_clients: Devices to wait for. None: one for each key, or the fleet's number.
        address: Where devices connect.
        rules: When rounds begin, close and count.
        samples: Samples of the server that evaluation uses. None: those of the run that is resumed,
            or all.

    Raises:
        ConfigError: The folder has another run, or the numbers do not fit.
    """
    check_installed()
    address.check()
    if num_clients is not None and num_clients < 1:
        raise ConfigError(
            f"--clients {num_clients} was asked for; whole numbers from 1 on would work."
        )
    if (folder / WORKPLACE / REQUEST).exists():
        stored = ServeRequest.load(folder)
        settings = folder / WORKPLACE / SETTINGS
        known = Experiment.of(read_toml(settings), file=str(settings))
        if experiment is not None and experiment.to_toml() != known.to_toml():
            raise ConfigError(
                f"--out {folder} was asked for; it has a deployment with other settings. The same "
                "settings or none resume it; another folder begins a new one."
            )
        if num_clients not in (None, stored.num_clients):
            raise ConfigError(
                f"--clients {num_clients} was asked for; the run in {folder} has "
                f"{stored.num_clients} clients. Without --clients it is resumed."
            )
        request = replace(
            stored,
            rules=rules.check(stored.num_clients),
            keys=address.public_keys or stored.keys,
            samples=samples or stored.samples,
        )
        request.save(folder)
        return known, request
    if holds_a_run(folder):
        raise ConfigError(
            f"--out {folder} was asked for; a run is there that was not deployed. Another folder "
            "would work."
        )
    if experiment is None:
        raise ConfigError(
            f"serve was asked for without settings; there is no deployment in {folder} to resume. "
            "A file of settings would work: fedquilt serve CONFIG.toml --out DIR."
        )
    keys = address.public_keys
    count = num_clients or len(keys) or experiment.fleet.clients
    if not count:
        raise ConfigError("serve was asked for without --clients; it says how many to wait for.")
    if keys and count > len(keys):
        raise ConfigError(
            f"--clients {count} was asked for; there are {len(keys)} keys of devices. "
            f"`fedquilt keys {address.keys.path if address.keys else ''} --devices {count}` adds "
            "keys."
        )
    used = samples or "both"
    request = ServeRequest(ServeRequest.new_id(), count, rules.check(count), keys, used)
    write_request(folder, experiment, request)
    return experiment, request


def strike_off(folder: Path, clients: Sequence[int]) -> None:
    """Mark devices of a run that are not asked any more, and cannot introduce themselves again.

    Args:
        folder: Folder of the run, which is not being served.
        clients: Numbers of their clients.

    Raises:
        ConfigError: A client is unknown, or nobody would be left.
    """
    roster = Roster.load(folder / ROSTER)
    for client in clients:
        roster.strike_off(client)
    if clients and all(entry.is_struck_off for entry in roster):
        raise ConfigError(
            f"--strike-off {' '.join(map(str, clients))} was asked for; nobody would be left of "
            f"the {len(roster)} clients. A new run in another folder would work."
        )
    if clients:
        roster.save(folder / ROSTER)


@dataclass
class Service:
    """A server that devices can reach, and the run that it trains."""

    folder: Path
    link: SuperLink
    gate: OpenGate
    keys: KeyFolder | None = None  # Keys of devices. None: devices have none
    registered: set[Path] = field(default_factory=set)  # Public keys that the SuperLink knows
    starts: int = 0  # ServerApps that were started

    def start_app(self, say: Callable[[str], None]) -> None:
        """Start a ServerApp for the run. If the SuperLink is away, wait until it is back.

        Args:
            say: Prints a line.

        Raises:
            ConfigError: The SuperLink refused the app, or was away for `SUBMIT_SECONDS`.
        """
        (self.folder / WORKPLACE / STATUS).unlink(missing_ok=True)
        end = time.monotonic() + SUBMIT_SECONDS
        is_away = False
        while True:
            self.mend(say)
            try:
                self.link.submit(self.folder)
            except SuperLinkAwayError:
                if time.monotonic() > end:
                    raise
                if not is_away:
                    say("The SuperLink does not answer. The ServerApp is started once it does.")
                is_away = True
                time.sleep(LOOK_SECONDS)
            else:
                break
        if is_away:
            say("The SuperLink answers again. The ServerApp was started.")
        self.starts += 1

    def mend(self, say: Callable[[str], None]) -> None:
        """Start processes of Flower again that have ended, and report them.

        Args:
            say: Prints a line.
        """
        for name in self.link.mend():
            say(f"{name} had ended and was started again.")
        for public_key in [] if self.keys is None else self.keys.device_public_keys:
            is_written = public_key.stat().st_size > 0
            if public_key not in self.registered and is_written:
                self._register(public_key, say)

    def _register(self, public_key: Path, say: Callable[[str], None]) -> None:
        """Register the key of a device that was made since the start, so that it can join.

        A SuperLink that does not answer is asked again later. A key that it refuses is left out.

        Args:
            public_key: File with the public key.
            say: Prints a line.
        """
        try:
            key = public_key_text(public_key.read_bytes())
            self.link.register(public_key)
        except SuperLinkAwayError:
            return
        except (ConfigError, OSError, ValueError) as error:
            say(f"{public_key.name} cannot be used: {said(error)}")
        else:
            request = ServeRequest.load(self.folder)
            replace(request, keys=tuple(dict.fromkeys([*request.keys, key]))).save(self.folder)
            say(f"{public_key.name} is a new key. Its device can join.")
        self.registered.add(public_key)

    def follow(
        self, say: Callable[[str], None], training: Callable[[int], Callable[[Record], None]]
    ) -> None:
        """Wait until the run is finished. What ends in between is started again.

        Args:
            say: Prints a line.
            training: Called once when the training begins, with the number of finished rounds. It
                returns what is called with the record of every further round.

        Raises:
            ConfigError: The ServerApp failed for a reason that another start would not remove.
        """
        num_seen = self._show(lambda _: None, 0)
        self.start_app(say)
        began, shown = time.monotonic(), ""
        watch: Callable[[Record], None] | None = None
        while True:
            self.mend(say)
            status = Status.load(self.folder)
            if (
                status
                and status.state in ("waiting", "training")
                and status.text not in ("", shown)
            ):
                shown = status.text
                say(shown)
            if status and status.state in ("training", "finished"):
                if watch is None:
                    watch = training(num_seen)
                num_seen = self._show(watch, num_seen)
            if status and status.state == "finished":
                return
            is_failed = status is not None and status.state == "failed"
            may_be_full = status is not None and status.kind in STORAGE_ERRORS
            is_full = is_failed and may_be_full and self._wait_for_space(say)
            if status and is_failed and not is_full:
                raise ConfigError(f"the run in {self.folder} failed ({status.kind}): {status.text}")
            is_gone = status is not None and not _is_alive(status.process)
            is_late = status is None and time.monotonic() - began > APP_SECONDS
            if is_gone or is_late or is_full:
                self._wait_for_space(say)
                if self.starts >= MAX_STARTS:
                    raise ConfigError(
                        f"the ServerApp ended {self.starts} times; its log is "
                        f"{self.link.executor.log}."
                    )
                say("The ServerApp had ended. It is started again and resumes the run.")
                self.start_app(say)
                began = time.monotonic()
            time.sleep(LOOK_SECONDS)

    def _wait_for_space(self, say: Callable[[str], None]) -> bool:
        """Wait while the disk of the run is full. Return True if it was.

        A ServerApp that cannot save a round fails. Started again, it resumes from the round before.

        Args:
            say: Prints a line.
        """
        is_full = False
        while free_bytes(self.folder) < MIN_FREE_BYTES:
            if not is_full:
                say(
                    f"The disk of {self.folder} is full. The run continues from the last round "
                    f"once {MIN_FREE_BYTES >> 20} MiB are free."
                )
            is_full = True
            time.sleep(LOOK_SECONDS)
        if is_full:
            say(f"The disk of {self.folder} has space again.")
        return is_full

    def _show(self, watch: Callable[[Record], None], num_seen: int) -> int:
        """Show the rounds that are new, and return the number of the last round."""
        if not (self.folder / "rounds.jsonl").exists():
            return num_seen
        records = read_records(self.folder)
        for record in records:
            if record.round > num_seen:
                watch(record)
        return records[-1].round if records else num_seen


def free_bytes(folder: Path) -> int:
    """Return the space that is left on the disk of a folder."""
    return shutil.disk_usage(folder).free


def _is_alive(process: int) -> bool:
    """Return True if a process exists and has not ended."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except ProcessLookupError:
        return False
    except OSError:  # It belongs to somebody else, or the system has no /proc.
        return True
    return state != "Z"


@contextmanager
def opened(folder: Path, address: Address) -> Iterator[Service]:
    """Start a SuperLink, register the keys of devices, and open the gate.

    Args:
        folder: Folder of the run.
        address: Where devices connect.
    """
    home = folder / WORKPLACE / "flower"
    make_folder(home)
    home.chmod(0o700)
    keys = address.keys
    if address.superlink is None:
        link = SuperLink(home, keys)
    else:
        link = SuperLink(home, keys, int(address.superlink.rpartition(":")[2]), is_external=True)
    certificate = None if keys is None else (keys.server, keys.server_key)
    gate = Gate(link.url, None if keys is None else keys.ca)
    # The port is taken first, because a port in use is the most common mistake.
    front = OpenGate(gate, address.host, address.port, certificate)
    try:
        with link:
            if address.superlink is not None and not link.is_up:
                raise ConfigError(
                    f"--superlink {address.superlink} was asked for; it does not answer. A "
                    "SuperLink has to run there on the server, or `fedquilt serve` starts one "
                    "without --superlink."
                )
            public_keys = [] if keys is None else keys.device_public_keys
            for public_key in public_keys:
                link.register(public_key)
            with front:
                yield Service(folder, link, front, keys, {*public_keys})
    finally:
        front.close()


def places(address: Address, port: int) -> Sequence[str]:
    """Return the addresses that devices may join, as host:port."""
    hosts = address.hosts
    if address.keys is not None and is_loopback(address.host):
        hosts = [host for host in hosts if is_loopback(host)]
    return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]
