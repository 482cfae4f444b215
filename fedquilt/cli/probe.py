"""The command `fedquilt probe`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from fedquilt.cli.options import (
    File,
    Flag,
    Precision,
    Text,
)
from fedquilt.cli.output import output
from fedquilt.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.runs.probe import Probe


@dataclass(frozen=True)
class ProbeRequest:
    """Measure the memory and training speed of this device, and propose a budget for it."""

    # model: a name of `fedquilt list models`, or file.py:factory; the demo's if not given
    model: Text = None
    # data whose samples the model gets, as for `run`; if not given, samples in the shape of its
    # paper's, or the demo's data
    data: Text = None
    device: Text = None  # device to measure, such as cpu or cuda
    precision: Precision = None  # precision of training, as for `run`
    # time the blocks of a search space instead: a name, file.py:Class, or a supernet file
    space: Text = None
    # for --space: file for the times, which `fedquilt supernet search --table` reads
    out: File = None
    force: Flag = False  # for --space: overwrite an existing file
    json: Flag = False  # print the measurements as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Measure the device, or with `--space` time the blocks of a search space, and print it.

        Raises:
            ConfigError: `--out` or `--force` is given without `--space`.
        """
        from fedquilt.cli.results import show_probe
        from fedquilt.cli.show import print_json

        if self.space is None and (self.out is not None or self.force):
            raise ConfigError("probe was asked for with --out or --force; these go with --space.")
        with output(self.json) as (console, stdout):
            if self.space is not None:
                self._time_blocks(self.space, console, stdout)
                return
            result = self.measure()
            if self.json:
                print_json(result.to_dict(), stdout)
            else:
                show_probe(console, result)

    def _time_blocks(self, space: str, console: Console, stdout: TextIO) -> None:
        """Time the blocks of a search space on this device, and print the table or its range.

        With `--out` the table is written to that file too.

        Args:
            space: Name of a space, `file.py:Class`, or a supernet file.
            console: Console for progress and text.
            stdout: Stream for JSON.

        Raises:
            ConfigError: An option of the other measurement is given, or the file exists.
        """
        from fedquilt.cli.search import probed_blocks
        from fedquilt.cli.show import print_json, say

        if self.model is not None or self.precision is not None:
            raise ConfigError(
                "probe --space was asked for with --model or --precision; only --data and --device "
                "fit."
            )
        if self.out is not None and Path(self.out).exists() and not self.force:
            raise ConfigError(
                f"{self.out} is there already; give another --out, or --force to replace it."
            )
        table = probed_blocks(space, self.data, self.device or "cpu", console)
        if self.out is not None:
            table.save(self.out)
        if self.json:
            print_json(table.to_dict(), stdout)
            return
        times = table.milliseconds.values()
        say(
            console,
            f"{table.space} on {table.machine} ({table.device}, {table.threads} threads): "
            f"{len(times)} blocks, {min(times):.3g} to {max(times):.3g} ms for one sample",
        )
        if self.out is not None:
            say(
                console,
                f"{self.out} has the times; fedquilt supernet search {space} --milliseconds MS "
                f"--table {self.out}",
            )

    def measure(self) -> Probe:
        """Trace the model as a run would, train it briefly, and return the measurements.

        Without `--model` or `--data` those of the demo are used.
        """
        from fedquilt.config.resolve import resolved
        from fedquilt.data import Pool
        from fedquilt.family.tracing.trace import trace
        from fedquilt.hardware.device import device_of
        from fedquilt.models import MODELS
        from fedquilt.runs.data_settings import Source
        from fedquilt.runs.demo import DEMO
        from fedquilt.runs.machine import Machine
        from fedquilt.runs.model_settings import Model
        from fedquilt.runs.probe import probe

        flags = {"device": self.device, "precision": self.precision}
        settings = {key: value for key, value in flags.items() if value is not None}
        machine = resolved(Machine, settings, {key: f"--{key}" for key in settings})
        device_of(machine.device)
        name = self.model or DEMO["model"]["name"]
        if name in MODELS and self.data is None:
            spec = MODELS[name]
            family = trace(spec.factory, spec.example(), fixed=spec.fixed)
        else:
            data = Source(self.data or DEMO["data"]["name"]).make(Pool)
            family = (Model(self.model) if self.model else Model.usual(data)).trace(data)
        return probe(family, machine.device, precision=machine.precision)
