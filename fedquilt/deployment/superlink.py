"""A SuperLink on loopback, with the processes and settings that belong to it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from fedquilt.deployment.keys import KeyFolder
from fedquilt.deployment.processes import (
    CONTROL_SECONDS,
    Process,
    environment,
    free_port,
    new_secret,
    program,
    wait_until_listening,
)
from fedquilt.errors import ConfigError
from fedquilt.storage.files import write_text

CONNECTION = "fedquilt"  # Name of the SuperLink in Flower's settings
REGISTERED = "registered.json"  # Public keys that the SuperLink's database has
MAX_FAILED_STARTS = 10  # Of a SuperLink that had ended, in a row
_AWAY = "SuperLink is unavailable"  # What `flwr` prints if it reaches no SuperLink


class SuperLinkAwayError(ConfigError):
    """A SuperLink has ended, or does not answer yet. The same call may succeed later."""


@dataclass
class SuperLink:
    """A SuperLink and the process that starts its ServerApps.

    Args:
        home: Folder for its database, logs and settings.
        keys: Certificates and device keys. None: plain HTTP, and every key is accepted.
        port: Port on loopback.
        is_external: True: somebody else has started it, and nothing is started or stopped here.
    """

    home: Path
    keys: KeyFolder | None = None
    port: int = field(default_factory=free_port)
    is_external: bool = False

    def __post_init__(self) -> None:
        env = environment(self.home)
        secret = str(new_secret(self.home / "secret"))
        tls, trust = ["--insecure"], ["--insecure"]
        if self.keys is not None:
            tls = ["--ssl-certfile", str(self.keys.server)]
            tls += ["--ssl-keyfile", str(self.keys.server_key)]
            tls += ["--ssl-ca-certfile", str(self.keys.ca), "--enable-supernode-auth"]
            trust = ["--root-certificates", str(self.keys.ca)]
        command = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--database", str(self.home / "superlink.db"), "--isolation", "process"]
        command += ["--superexec-auth-secret-file", secret, *tls]
        self.link = Process("the SuperLink", command, env, self.home / "superlink.log")
        command = [program("flower-superexec"), "--superexec-auth-secret-file", secret, *trust]
        command += ["--runtime-api-address", f"127.0.0.1:{self.port}"]
        command += ["--parent-pid", str(os.getpid())]
        self.executor = Process("the SuperExec", command, env, self.home / "superexec.log")
        self._stack = ExitStack()
        self._failed_starts = 0  # In a row

    @property
    def url(self) -> str:
        """Return the base URL of the SuperLink."""
        return f"{'http' if self.keys is None else 'https'}://127.0.0.1:{self.port}"

    def __enter__(self) -> SuperLink:
        self._write_connection()
        if self.is_external:
            return self
        try:
            self._stack.callback(self.link.stop)
            self.link.start()
            wait_until_listening(self.link, self.port)
            self._stack.callback(self.executor.stop)
            self.executor.start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def mend(self) -> list[str]:
        """Start processes again that have ended, and return their names.

        Raises:
            ConfigError: The SuperLink could not be started `MAX_FAILED_STARTS` times in a row.
        """
        mended: list[str] = []
        if self.is_external:
            return mended
        if not self.link.is_running:
            self.link.start()
            try:
                wait_until_listening(self.link, self.port)
            except ConfigError:
                self._failed_starts += 1
                if self._failed_starts >= MAX_FAILED_STARTS:
                    raise
                return mended
            self._failed_starts = 0
            mended.append(self.link.name)
        if not self.executor.is_running:
            self.executor.start()
            mended.append(self.executor.name)
        return mended

    def register(self, public_key: Path) -> None:
        """Let a device in. A key that is registered already is left alone.

        Args:
            public_key: File with the public key. Its name without the suffix names the device.

        Raises:
            ConfigError: The SuperLink refused it.
        """
        text = " ".join(public_key.read_text().split()[:2])
        file = self.home / REGISTERED
        registered: list[str] = json.loads(file.read_text()) if file.exists() else []
        if text in registered:
            return
        asked = f"the key {public_key} was to be registered"
        self._control(asked, "already", "supernode", "register", str(public_key), CONNECTION)
        write_text(file, json.dumps([*registered, text], indent=1) + "\n")

    def submit(self, folder: Path) -> None:
        """Start the ServerApp that trains the run in a folder.

        Raises:
            SuperLinkAwayError: The SuperLink has ended, or does not answer.
            ConfigError: The SuperLink refused it.
        """
        app = Path(__file__).parent / "flower_app"
        override = f"folder={json.dumps(str(folder.resolve()))}"
        asked = f"the app in {app} was to be started"
        self._control(asked, "", "run", str(app), CONNECTION, "-c", override)

    @property
    def is_up(self) -> bool:
        """Return True if the SuperLink runs and accepts connections."""
        if not self.is_external and not self.link.is_running:
            return False
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False

    def _control(self, asked: str, accepted: str, *arguments: str) -> None:
        """Run a command of `flwr`, and refuse what the SuperLink did not do.

        Args:
            asked: What was asked for, for errors.
            accepted: Word in the output of a command that failed, with which all is well. Empty:
                none.
            *arguments: Arguments of the command.

        Raises:
            SuperLinkAwayError: The SuperLink has ended, or does not answer.
            ConfigError: The SuperLink refused it.
        """
        try:
            done = self.flwr(*arguments)
        except subprocess.TimeoutExpired as error:
            raise SuperLinkAwayError(
                f"{asked}; the SuperLink did not answer within {CONTROL_SECONDS:.0f} s. Its log is "
                f"{self.link.log}."
            ) from error
        if done.returncode == 0 or (accepted and accepted in done.stdout + done.stderr):
            return
        words = _words(done)
        if _AWAY in words or not self.is_up:
            raise SuperLinkAwayError(f"{asked}; the SuperLink does not answer: {words}")
        raise ConfigError(f"{asked}; the SuperLink refused it: {words}")

    def flwr(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command `flwr` with the settings of this SuperLink.

        Args:
            *arguments: Arguments of the command.
        """
        return subprocess.run(
            [program("flwr"), *arguments],
            env={**environment(self.home), "COLUMNS": "200"},
            capture_output=True,
            text=True,
            timeout=CONTROL_SECONDS,
            check=False,
        )

    def _write_connection(self) -> None:
        """Write Flower's settings, which name the SuperLink."""
        lines = [
            "[superlink]",
            f'default = "{CONNECTION}"',
            f"[superlink.{CONNECTION}]",
            f'address = "127.0.0.1:{self.port}"',
        ]
        if self.keys is None:
            lines.append("insecure = true")
        else:
            lines.append(f"root-certificates = {json.dumps(str(self.keys.ca.resolve()))}")
        write_text(self.home / "config.toml", "\n".join(lines) + "\n")


def _words(done: subprocess.CompletedProcess[str]) -> str:
    """Return what a command printed, as one short line."""
    return " ".join((done.stderr + done.stdout).split())[-400:]
