"""The commands `fedquilt keys`, `serve` and `join`: a federation of real devices."""

from __future__ import annotations

import shlex
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fedquilt.cli.options import Config, File, Flag, Place, Real, Text, Whole
from fedquilt.cli.output import output
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from fedquilt.deployment.serving import Service
    from fedquilt.round import Record
    from fedquilt.runs.experiment import Experiment
    from fedquilt.terms import Budget

_quiet = {"help_behavior_hint": ""}
KeysPlace = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR", **_quiet)]
Count = Annotated[int, tyro.conf.arg(metavar="INT", **_quiet)]
Hosts = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME", **_quiet)
]
Code = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FILE.py:NAME", **_quiet)
]
Clients = Annotated[
    tuple[int, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="CLIENT", **_quiet)
]
OutPlace = Annotated[Path, tyro.conf.arg(metavar="DIR", **_quiet)]
Needed = Annotated[str, tyro.conf.arg(metavar="NAME", **_quiet)]
SuperLinkAddress = Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT", **_quiet)]
ServerAddress = Annotated[str, tyro.conf.arg(name="superlink", metavar="HOST:PORT", **_quiet)]
BudgetText = Annotated[str | None, tyro.conf.arg(metavar="share=0.5", **_quiet)]
IsolationName = Annotated[
    Literal["process", "subprocess"], tyro.conf.arg(metavar="process|subprocess", **_quiet)
]
SamplesOption = Annotated[
    Literal["both", "test", "calibration", "none"] | None,
    tyro.conf.arg(metavar="both|test|calibration|none", **_quiet),
]
# Options of `serve` with the names of `RoundRules`.
RULES = ("deadline", "least", "enough", "max_rms", "max_rms_ratio")


@dataclass(frozen=True)
class KeysRequest:
    """Make keys for a deployment: a CA, a server certificate, and a key for each device.

    Existing files are kept, so that more devices can be added later. Each device gets its own key
    and ca.crt. Private files (ca.key, server.key, device-N) can be read by their owner alone.
    """

    folder: KeysPlace  # folder for the keys
    devices: Count  # number of devices in all
    # name or address of the server besides localhost and 127.0.0.1; may be given again
    host: Hosts = ()
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Make the keys, and print their paths and when certificates expire."""
        from fedquilt.cli.show import print_json, say
        from fedquilt.deployment.keys import KeyFolder, hosts_of, make_keys

        with output(self.json) as (console, stdout):
            made = make_keys(self.folder, self.devices, self.host)
            keys = KeyFolder(self.folder)
            if self.json:
                plain = {
                    "written": [str(path) for path in made.written],
                    "hosts": hosts_of(keys.server),
                    "ca_expires": made.ca_expires.isoformat(),
                    "server_expires": made.server_expires.isoformat(),
                }
                print_json(plain, stdout)
                return
            for path in made.written:
                say(console, str(path))
            say(console, f"{len(made.written)} files were written, and none was overwritten")
            say(
                console,
                f"the server certificate is valid for {', '.join(hosts_of(keys.server))} and "
                f"expires on {made.server_expires:%Y-%m-%d}; the CA expires on "
                f"{made.ca_expires:%Y-%m-%d}",
            )


@dataclass(frozen=True)
class ServeCommand:
    """Train one model on real devices, which connect with `fedquilt join`.

    Flower carries the messages. Its SuperLink listens on this machine alone; devices connect to a
    gate with TLS. The same command resumes a run that was stopped. The folder of the run is read by
    `fedquilt clients`, `fedquilt export` and fedquilt.load_run.
    """

    # file of settings, as for `run`; its data is the server's; may be left out to resume
    config: Config = None
    out: OutPlace = Path("deployed")  # folder of the run
    host: Text = None  # address to listen on; 127.0.0.1 if not given
    port: Whole = None  # port to listen on; any free one if not given
    keys: Place = None  # folder of `fedquilt keys`; if not given plain HTTP, on this machine alone
    # devices to wait for; if not given one for each key, else the settings' number of clients
    clients: Whole = None
    # SuperLink on this machine that is used instead of starting one, with its own SuperExec
    superlink: SuperLinkAddress = None
    deadline: Real = None  # seconds that devices have in a round; 600 if not given
    # devices that have to be online before a round begins, and to reply in it; 1 if not given
    least: Whole = None
    enough: Whole = None  # valid replies after which a round closes; if not given it waits for all
    # largest root mean square of the change of a weight; replies above it are refused
    max_rms: Real = None
    # replies are refused whose change is larger than this multiple of the round's median
    max_rms_ratio: Real = None
    # client of a run that is resumed, whose device is not asked any more; may be given again
    strike_off: Clients = ()
    # samples of the server's data that are used: test samples for evaluation, training samples for
    # the calibration of norms; devices use their own for the rest; both if not given
    samples: SamplesOption = None
    # run the code that a run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print the result as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Serve until the run is finished, and print its result."""
        from fedquilt.cli.progress import Shown, progress
        from fedquilt.cli.results import show_result
        from fedquilt.cli.show import print_json, say

        with output(self.json) as (console, stdout):
            from fedquilt.deployment.keys import KeyFolder
            from fedquilt.deployment.round_rules import RoundRules
            from fedquilt.deployment.server import WORKPLACE
            from fedquilt.deployment.serving import Address, begin, opened, places, strike_off
            from fedquilt.runs.experiment import Experiment
            from fedquilt.runs.settings_file import read_settings
            from fedquilt.runs.summary_file import read_summary

            experiment = None
            if self.config is not None:
                settings = read_settings(self.config, self.trust)
                experiment = Experiment.of(settings, file=self.config)
            elif (config := self.out / "config.toml").exists():
                read_settings(config, self.trust, recorded=True)  # It may name foreign code.
            keys = None if self.keys is None else KeyFolder(self.keys)
            address = Address(self.host or "127.0.0.1", self.port or 0, keys, self.superlink)
            given = {name: getattr(self, name) for name in RULES}
            rules = RoundRules(**{name: rule for name, rule in given.items() if rule is not None})
            experiment, request = begin(
                self.out, experiment, self.clients, address, rules, self.samples
            )
            strike_off(self.out, self.strike_off)
            with opened(self.out, address) as service:
                names = experiment.names
                say(
                    console,
                    f"{names['method']} on {names['data']}: {names['model']} for "
                    f"{request.num_clients} devices, {experiment.rounds} rounds",
                )
                listed = " or ".join(places(address, service.gate.port))
                say(console, f"devices join with: fedquilt join --superlink {listed} --data …")
                say(console, f"logs are in {self.out / WORKPLACE / 'flower'}")
                with progress(console, experiment.rounds) as start:

                    def training(done: int) -> Callable[[Record], None]:
                        return start(done, Shown(percent=self._is_rate()))

                    self._follow(service, console, training)
            summary = read_summary(self.out)
            assert summary is not None
            if self.json:
                print_json(summary, stdout)
            else:
                show_result(console, summary)

    def _follow(
        self,
        service: Service,
        console: Console,
        training: Callable[[int], Callable[[Record], None]],
    ) -> None:
        from fedquilt.cli.run_loop import Interrupted
        from fedquilt.cli.show import say

        try:
            service.follow(lambda text: say(console, text), training)
        except KeyboardInterrupt as error:
            command = ["fedquilt", "serve", "--out", str(self.out)]
            if self.keys is not None:
                command += ["--keys", str(self.keys)]
            raise Interrupted(f"Continue with: {shlex.join(command)}") from error

    def _is_rate(self) -> bool:
        """Return True if the main figure of the run is shown in percent."""
        from fedquilt.config.toml import read_toml
        from fedquilt.runs.experiment import Experiment

        experiment: Experiment = Experiment.of(read_toml(self.out / "config.toml"))
        return experiment.task is None or experiment.task.main.is_rate


@dataclass(frozen=True)
class JoinCommand:
    """Take part in a federation with the samples of this device, until ctrl-C.

    It prints everything that will be sent to the server. Samples stay on the device. The server's
    owner provides the address, ca.crt and the device's key (`fedquilt keys`).
    """

    address: ServerAddress  # address of the server, host:port
    data: Needed  # samples of this device: a file or folder, or a name of `fedquilt list data`
    # model that this device has code for, such as mine.py:net; if not given, the server's by name
    model: Text = None
    budget: BudgetText = None  # what this device can train: share=0.5, or memory=2MB,macs=28M
    probe: Flag = False  # measure this device for some seconds, and use the budget that fits
    key: File = None  # private key of this device (device-N)
    ca: File = None  # CA certificate of the server (ca.crt)
    state: Place = None  # folder for the state between rounds; fedquilt-device if not given
    name: Text = None  # name of this device for the server; that of the machine if not given
    device: Text = None  # device to train on, such as cpu or cuda; cpu if not given
    threads: Whole = None  # CPU threads; 1 if not given
    # code of yours that the server's settings may name, such as mine.py:Mine; may be given again
    allow: Code = ()
    # process: one worker for all rounds. subprocess: a process for each message, which is slower
    isolation: IsolationName = "process"

    def __call__(self) -> None:
        """Check everything, print what will be sent, and take part until ctrl-C."""
        from fedquilt.cli.show import console_for, say
        from fedquilt.deployment.host import DeviceSettings
        from fedquilt.deployment.joining import (
            ServerEndpoint,
            allowed_code,
            checked_settings,
            join,
        )
        from fedquilt.deployment.keys import check_installed
        from fedquilt.hardware.device import device_of

        console = console_for()
        check_installed()
        device_of(self.device or "cpu")
        budget = self._budget()
        settings = DeviceSettings(
            self.name or socket.gethostname() or "device",
            self._data(),
            budget,
            (self.state or Path("fedquilt-device")).resolve(),
            self.model,
            self.device or "cpu",
            1 if self.threads is None else self.threads,
            tuple(map(allowed_code, self.allow)),
        )
        _, lines = checked_settings(settings)
        ca = None if self.ca is None else Path(self.ca).resolve()
        key = None if self.key is None else Path(self.key).resolve()
        server = ServerEndpoint(self.address, ca, key)
        server.check()
        for line in lines:
            say(console, line)
        if warning := server.clock_warning():
            say(console, warning)
        join(settings, server, lambda text: say(console, text), self.isolation)

    def _data(self) -> str:
        """Return the data, as an absolute path if it is one."""
        return str(Path(self.data).resolve()) if Path(self.data).exists() else self.data

    def _budget(self) -> Budget:
        """Return the budget that was asked for or measured."""
        from fedquilt.deployment.joining import parse_budget

        if (self.budget is None) != self.probe:
            raise ConfigError(
                "join needs one of --budget and --probe: --budget share=0.5 states what this "
                "device can train, and --probe measures it."
            )
        if self.budget is not None:
            return parse_budget(self.budget)
        from fedquilt.data import Pool
        from fedquilt.runs.data_settings import Source
        from fedquilt.runs.model_settings import Model
        from fedquilt.runs.probe import probe

        pool = Source(self._data()).make(Pool)
        model = Model(self.model) if self.model else Model.usual(pool)
        return probe(model.trace(pool), self.device or "cpu").budget
