"""The command line: `fedquilt run`, `compare`, `reproduce`, `export`, `clients`, `list`, `data`, `probe`, `check` and
the group `supernet`.

Exit status: 0 done, 1 the run or a check failed, 2 the request was wrong, 130 interrupted. Nothing
here imports torch before a request has been understood.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import tyro

# Threads that wait for each other by spinning starve whoever else works on the machine, and then themselves: a run of a
# second took a minute beside another one. It is read when torch is loaded, which happens later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fedquilt.cli.compare import CompareRequest
from fedquilt.cli.data import DataRequest
from fedquilt.cli.options import (
    Assignments,
    By,
    Config,
    DataOptions,
    File,
    Flag,
    Folder,
    Format,
    Macs,
    MethodName,
    Name,
    Norms,
    Options,
    Params,
    Precision,
    Real,
    Shares,
    Target,
    Text,
    What,
    Whole,
    refuse_repeated,
    refuse_spaces_in_grid,
)
from fedquilt.cli.output import output
from fedquilt.cli.playing import begun, resumed
from fedquilt.cli.reproduce import ReproduceRequest
from fedquilt.cli.supernet import SUPERNET_COMMANDS, SupernetRequest
from fedquilt.errors import (
    ConfigError,
    ExportError,
    FedquiltError,
    NotEnoughMemoryError,
    RecordError,
    SubmodelError,
    TrainingError,
)
from fedquilt.faults import is_out_of_memory, memory_text, user_line
from fedquilt.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.methods import Method
    from fedquilt.probe import Probe
    from fedquilt.terms import Budget


@dataclass(frozen=True)
class RunRequest(Options):
    """Train one model on clients that cannot all hold it.

    Without a file and options: HeteroFL on scikit-learn's digits, 20 rounds with 20 clients, of which a third can hold
    all of the model, a third a half and a third a quarter. With --model or --data the defaults of the method, the fleet
    and the run apply instead of these.
    """

    config: Config = (
        None  # settings; if not given the demo's, or with --model or --data the method's defaults
    )
    method: Text = None  # a name of `fedquilt list methods`, or file.py:factory

    def __call__(self) -> int:
        from fedquilt.cli.show import print_json, progress, say, show_result

        self.check_target()
        with output(self.json) as (console, stdout), ExitStack() as stack:
            if self.resume:
                self.check_resume("trust")
                playing = resumed(self.resume, self.rounds, stack, self.trust)
            else:
                experiment = self.experiment(self.config, self.method)
                playing = begun(experiment, self.source(self.config, self.method), self.out, stack)
            playing.check_target(self.target)
            if playing.run:
                say(console, "\n".join(playing.first_lines))
                with progress(console, playing.experiment.rounds) as begin:
                    playing.play(begin)
            summary = playing.summary_with(self.target)
            if self.json:
                print_json(summary, stdout)
            else:
                show_result(console, summary)
            if playing.damage:
                listed = "\n  ".join(playing.damage)
                where = f"the run in {playing.rounds} is finished and its summary is intact"
                print(
                    f"RecordError: {where}, but other files are damaged:\n  {listed}",
                    file=sys.stderr,
                )
        return int(bool(playing.damage))


@dataclass(frozen=True)
class ListRequest(DataOptions):
    """Show what one can ask for by name; with NAME, the options of one of them and what they mean.

    `list data --plot` draws who holds what, for the data and partition asked for.
    """

    what: What = "all"  # methods, models, data, partitions, tasks, metrics, fleets, links …; all if not given
    name: Name = ""  # one of them
    config: File = None  # for --plot: settings; the demo's if not given
    plot: Flag = False  # draw who holds what
    by: By = "class"  # for --plot: what is counted
    out: File = None  # for --plot: a file such as clients.png or clients.svg, instead of text
    trust: Flag = False  # for --plot: run the code that --config names if it is a run's, and add it to your list
    json: Flag = False  # print an object keyed by name

    def __call__(self) -> None:
        from fedquilt.cli import listing
        from fedquilt.cli.show import console_for, print_json, say, show_table

        if self.plot:
            self._plot()
            return
        if self != replace(ListRequest(), what=self.what, name=self.name, json=self.json):
            raise ConfigError(
                "list was asked for with options for a plot of the data; add --plot to have one."
            )
        kinds = listing.LISTS if self.what == "all" else [self.what]
        found = {what: listing.entries(what, self.name, with_stages=self.json) for what in kinds}
        if self.json:
            print_json(found if self.what == "all" else found[self.what])
            return
        console = console_for()
        for place, (what, all_of_it) in enumerate(found.items()):
            if place:
                say(console, "")
            show_table(console, what, all_of_it)
            if self.name:
                for title, rows in listing.details(what, self.name).items():
                    say(console, "")
                    show_table(console, title, rows)

    def _plot(self) -> None:
        from fedquilt.cli.show import console_for, print_json, say
        from fedquilt.config import Experiment, demo, read_settings
        from fedquilt.data.plot import blocks, counts, figure

        if self.what != "data":
            raise ConfigError(
                f"list {self.what} --plot was asked for; list data --plot draws who holds what."
            )
        settings, asked = self.layers(
            read_settings(self.config, self.trust) if self.config else demo()
        )
        experiment = Experiment.of(settings, asked, self.config or "")
        data, _ = experiment.data.deal(experiment.fleet.clients, experiment.seed)
        if self.out:
            figure(data, self.out, self.by)
        if self.json:
            print_json({"data": data.name, "by": self.by, "counts": counts(data, self.by).tolist()})
        else:
            say(
                console_for(),
                f"{self.out} shows who holds what" if self.out else blocks(data, self.by),
            )


@dataclass(frozen=True)
class ProbeRequest:
    """Measure what this device can hold and how fast it trains, and propose a budget for it."""

    model: Text = (
        None  # a name of `fedquilt list models`, or file.py:factory; the demo's if not given
    )
    data: Text = None  # whose samples it is fed, as for `run`; if not given, those its paper has, or the demo's
    device: Text = None  # such as cpu or cuda
    precision: Precision = None  # to train in, as for `run`
    space: Text = (
        None  # time the blocks of a search space instead: a name, file.py:Class, or a supernet file
    )
    out: File = (
        None  # for --space: file for the times, which `fedquilt supernet search --table` reads
    )
    force: Flag = False  # for --space: write over a file that is there
    json: Flag = False  # print the measurements as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        from fedquilt.cli.show import print_json, show_probe

        if self.space is None and (self.out is not None or self.force):
            raise ConfigError("probe was asked for with --out or --force; these go with --space.")
        with output(self.json) as (console, stdout):
            if self.space is not None:
                self._time_blocks(self.space, console, stdout)
                return
            found = self.measure()
            if self.json:
                print_json(found.to_dict(), stdout)
            else:
                show_probe(console, found)

    def _time_blocks(self, space: str, console: Console, stdout: TextIO) -> None:
        """Time the blocks of a search space, and write or print the table."""
        from fedquilt.cli.search import probed_blocks
        from fedquilt.cli.show import print_json, say

        if self.model is not None or self.precision is not None:
            raise ConfigError(
                "probe --space was asked for with --model or --precision; only --data and --device fit."
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
            f"{table.space} on {table.machine} ({table.device}, {table.threads} threads): {len(times)} blocks, "
            f"{min(times):.3g} to {max(times):.3g} ms for one sample",
        )
        if self.out is not None:
            say(
                console,
                f"{self.out} has the times; fedquilt supernet search {space} --milliseconds MS --table {self.out}",
            )

    def measure(self) -> Probe:
        """Trace the model as a run would have it, and train it."""
        import fedquilt as fq
        from fedquilt.config import DEMO, Machine, Model, Source, resolved
        from fedquilt.data import Pool
        from fedquilt.devices import device_of
        from fedquilt.models import MODELS
        from fedquilt.probe import probe

        asked = {"device": self.device, "precision": self.precision}
        given = {key: value for key, value in asked.items() if value is not None}
        machine = resolved(Machine, given, {key: f"--{key}" for key in given})
        device_of(machine.device)
        name = self.model or DEMO["model"]["name"]
        if name in MODELS and self.data is None:
            spec = MODELS[name]
            family = fq.trace(spec.factory, spec.example(), fixed=spec.fixed)
        else:
            data = Source(self.data or DEMO["data"]["name"]).make(Pool)
            family = (Model(self.model) if self.model else Model.usual(data)).trace(data)
        return probe(family, machine.device, precision=machine.precision)


@dataclass(frozen=True)
class CheckRequest:
    """Check a method as its author would: budgets, engines, links, resume, determinism and export.

    It is trained on a small federation for some seconds. The exit status is 1 if a check failed.
    """

    method: MethodName  # a name of `fedquilt list methods`, or file.py:factory
    assign: Assignments = ()  # a setting of the method by its path, such as method.shift=2; may be given again
    json: Flag = False  # print the findings as JSON on standard output, and nothing else there

    def __call__(self) -> int:
        from fedquilt.cli.show import check_progress, print_json, show_findings

        with output(self.json) as (console, stdout):
            import torch

            from fedquilt.conformance import CHECKS, check_method

            method = self.chosen()
            torch.set_num_threads(1)  # For so small a net threads would only wait for each other.
            with check_progress(console, len(CHECKS)) as watch:
                findings = check_method(method, watch=watch)
            has_failed = any(one.status == "failed" for one in findings)
            if self.json:
                checks = [one.to_dict() for one in findings]
                print_json(
                    {"method": self.method, "passed": not has_failed, "checks": checks}, stdout
                )
            else:
                show_findings(console, self.method, findings)
        return int(has_failed)

    def chosen(self) -> Method:
        """Return the method with its own defaults and the settings that were asked for."""
        from fedquilt.config import Experiment, defaults, parse_assignment

        others = [text for text in self.assign if parse_assignment(text)[0][0] != "method"]
        if others:
            raise ConfigError(
                f"check {self.method} --set {others[0]} was asked for; methods are checked on a federation of their "
                "own, and only settings of the method fit, such as --set method.local.norm=tracked."
            )
        settings, asked = DataOptions(assign=self.assign).layers(defaults(self.method))
        return Experiment.of(settings, asked).method


@dataclass(frozen=True)
class ExportRequest:
    """Write the trained model of a run for a device of some size, as ONNX, torch's .pt2 or safetensors.

    What was written is read back, fed samples of the test set and compared with torch before it is put in its place.
    Without a bound it is the whole model. With several shares it is a safetensors file of all of them, which
    fedquilt.load_model makes a module that changes its size in use.
    """

    run: Folder  # its folder: --out of `fedquilt run`
    out: Target  # the file; its name may say the format
    share: Shares = ()  # of every layer's channels, in (0, 1]; may be given again
    params: Params = None  # parameters, at most
    macs: Macs = None  # multiply-adds a sample, at most
    memory: Real = None  # bytes to run it on one sample, at most: float32 weights and activations
    client: Whole = None  # whose, where each has its own (fedbn, local, rafl)
    norms: Norms = None  # what norms normalise by: post measures over the training data; if not given, what the run has
    robustness: Real = None  # of dual norms: 0 is the clean net, 1 the noised one
    format: Format = ""  # if not given, what the file's name ends with
    force: Flag = False  # write over a file that is there
    trust: Flag = (
        False  # run the code that the run's folder names, and add it to your list of trusted code
    )
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        from fedquilt.cli.show import print_json, say, show_export

        with output(self.json) as (console, stdout):
            from fedquilt.config import load_run
            from fedquilt.export import FORMATS, check_place, chosen, export_sizes

            budgets = self._budgets()
            check_place(self.out, self.force)
            kind = chosen(self.out, self.format)
            FORMATS[kind].check()
            run = load_run(self.run, trust=self.trust)
            whose = "" if self.client is None else f", client {self.client}'s"
            told = ", ".join(map(str, budgets))
            source = (
                f"{self.run} after round {run.server.round} (checkpoint/{run.server.round:08}.json)"
            )
            say(console, f"{source}: a model of {told}{whose} as {kind}")
            asked: dict[str, Any] = {
                "client": self.client,
                "norms": self.norms,
                "robustness": self.robustness,
            }
            asked |= {"format": kind, "force": self.force}
            several = len(budgets) > 1
            found = (
                export_sizes(run, self.out, self.share, **asked)
                if several
                else [run.export(self.out, budgets[0], **asked)]
            )
            if self.json:
                used = {
                    "round": run.server.round,
                    "checkpoint": f"checkpoint/{run.server.round:08}.json",
                }
                listed = [{**one.to_dict(), **used} for one in found]
                print_json(listed if several else listed[0], stdout)
            else:
                show_export(console, found)

    def _budgets(self) -> list[Budget]:
        from fedquilt.terms import Budget

        bounds = {"params": self.params, "macs": self.macs, "memory": self.memory}
        bounded = any(value is not None for value in bounds.values())
        if bounded and len(self.share) > 1:
            raise ConfigError(
                "several shares and a bound were asked for; a file of several sizes takes shares alone."
            )
        shares = self.share or ((None,) if bounded else (1.0,))
        return [Budget(share=share, **bounds) for share in shares]


@dataclass(frozen=True)
class ClientsRequest:
    """Print what the clients of a run spent and got: costs of a round, main figure (accuracy …) on each one's own test
    samples, of a model of its own size and of the whole one, and how much of the model every domain has trained.
    """

    run: Folder  # its folder: --out of `fedquilt run`
    trust: Flag = (
        False  # run the code that the run's folder names, and add it to your list of trusted code
    )
    json: Flag = False  # print every client as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        from fedquilt.cli.show import print_json, show_clients

        with output(self.json) as (console, stdout):
            from fedquilt.config import load_run

            run = load_run(self.run, trust=self.trust)
            if run.absent:
                raise ConfigError(
                    f"the clients of {self.run} were asked for; their data cannot be had: {run.absent}"
                )
            found = run.clientwise()
            if self.json:
                print_json(found.to_dict(), stdout)
            else:
                show_clients(console, found)


# --- the script -------------------------------------------------------------------------------------------------

COMMANDS: dict[str, Callable[..., Any]] = {
    "run": RunRequest,
    "compare": CompareRequest,
    "reproduce": ReproduceRequest,
    "export": ExportRequest,
    "clients": ClientsRequest,
    "list": ListRequest,
    "data": DataRequest,
    "probe": ProbeRequest,
    "check": CheckRequest,
    "supernet": SupernetRequest,
}
GROUPS: dict[str, dict[str, Callable[..., Any]]] = {
    "supernet": SUPERNET_COMMANDS
}  # commands of two words


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `fedquilt` script."""
    args = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in args or os.environ.get("FEDQUILT_DEBUG", "0") not in ("", "0")
    args = [arg for arg in args if arg != "--debug"]
    if args == ["--version"]:
        print(f"fedquilt {__version__}")
        return 0
    commands, prog = COMMANDS, "fedquilt"
    description = (
        "Federated learning on unequal devices: each trains the piece of one model that fits it. "
    )
    description += "With --debug, any command shows the whole trace of an error."
    if args and args[0] in GROUPS:
        group = args.pop(0)
        commands, prog, description = (
            GROUPS[group],
            f"fedquilt {group}",
            _first_line(COMMANDS[group]),
        )
    if args and args[0] in commands:
        try:
            refuse_repeated(commands[args[0]], args[1:])
            refuse_spaces_in_grid(args[1:])
        except ConfigError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return 2
    request: Callable[[], int | None] = tyro.extras.subcommand_cli_from_dict(
        commands,
        prog=prog,
        description=description,
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        with _terminated_like_interrupted():
            return request() or 0
    except KeyboardInterrupt as error:
        print(
            "\n".join([f"Interrupted. {error}".strip(), *getattr(error, "__notes__", ())]),
            file=sys.stderr,
        )
        return 130
    except (
        BrokenPipeError
    ):  # whoever read our output has seen enough; leave nothing for the last flush to trip over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            traceback.print_exception(error)
        status = _explain(error)
        if status is None and not debug:
            raise
        return status or 1


def _explain(error: Exception) -> int | None:
    """Print what an error says and where the user's own code raised it, and return the exit status.

    None: it is neither fedquilt's nor of the user's code, and nothing was printed.
    """
    notes = getattr(error, "__notes__", ())
    line = user_line(error)
    if isinstance(error, FedquiltError):
        told = f"{type(error).__name__}: {error}"
        failed = (TrainingError, SubmodelError, RecordError, ExportError, NotEnoughMemoryError)
        status = 1 if isinstance(error, failed) else 2
    elif is_out_of_memory(error):
        told, status = f"NotEnoughMemoryError: there was not enough memory. {memory_text(error)}", 1
    elif isinstance(error, OSError) and error.filename is not None:  # a file that somebody named
        told, status = f"{error.filename} cannot be used: {error.strerror}.", 2
    elif line:
        told, status = f"{type(error).__name__}: {error}", 1
    else:
        return None
    where = []
    if line:
        where = [
            *([] if line in told else [f"It was raised in {line}."]),
            "--debug shows the whole trace.",
        ]
    print("\n".join([told, *notes, *where]), file=sys.stderr)
    return status


def _first_line(command: Callable[..., Any]) -> str:
    return (command.__doc__ or "").splitlines()[0]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM, by which schedulers end jobs, is ctrl-C: it is held back where that is, and leaves a checkpoint too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
