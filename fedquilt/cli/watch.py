"""The command `fedquilt watch`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Annotated

import tyro

from fedquilt.cli.options import Flag, Text
from fedquilt.cli.output import output
from fedquilt.cli.report import Folders

Host = Annotated[str, tyro.conf.arg(metavar="ADDRESS", help_behavior_hint="")]
Port = Annotated[int, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Seconds = Annotated[float, tyro.conf.arg(metavar="SECONDS", help_behavior_hint="")]


@dataclass(frozen=True)
class WatchRequest:
    """Serve the page of `fedquilt report` during a run, and show new rounds as they end.

    The page is read-only, and only this machine reaches it unless --host is given. Ctrl-C stops the
    server. The run does not notice it.
    """

    # folders of runs (--out of `fedquilt run` or `fedquilt serve`), or of a study
    folders: Folders
    port: Port = 0  # port to listen on; 0 takes a free one
    # address to listen on; with another one than 127.0.0.1 the printed address has a token, which
    # every request needs
    host: Host = "127.0.0.1"
    wait: Seconds = 0.0  # longest time to wait for a run that has not begun, in seconds
    metric: Text = None  # metric to show; the task's main one if not given
    # run code that the folders name, and add it to your list of trusted code
    trust: Flag = False

    def __call__(self) -> None:
        """Serve the page until ctrl-C.

        Raises:
            ConfigError: A folder has no run, the port is in use, or packages are missing.
        """
        from fedquilt.cli.show import say
        from fedquilt.report.watch import LiveServer, wait_for_run

        with output(False) as (console, _):
            import torch

            torch.set_num_threads(1)  # The run may need the other processors.
            try:
                wait_for_run(self.folders, self.wait)
                with LiveServer(
                    self.folders, self.host, self.port, self.metric or "", self.trust
                ) as server:
                    say(console, f"{server.url} shows {', '.join(map(str, self.folders))}.")
                    if server.token:
                        say(
                            console,
                            "Whoever has this address can read the page. It is sent without "
                            "encryption.",
                        )
                    say(console, "Ctrl-C stops the server.")
                    console.file.flush()
                    threading.Event().wait()
            except KeyboardInterrupt:
                say(console, "Stopped.")
