"""The command line of fedquilt: `COMMANDS` lists all commands.

Exit status: 0 success, 1 a run or a check failed, 2 the request was wrong, 130 interrupted. Nothing
here imports torch before the arguments are parsed.
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

# OpenMP threads that wait in a spinning loop take the cores from other processes, and then from
# each other. Beside another run, a run of one second took a minute. The variable is read when
# torch is imported, which happens later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from fedquilt.cli.compare import CompareRequest
from fedquilt.cli.data import DataRequest
from fedquilt.cli.deployment import JoinCommand, KeysRequest, ServeCommand
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
    Round,
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
from fedquilt.errors.faults import is_out_of_memory, memory_text, user_line
from fedquilt.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.methods import Method
    from fedquilt.runs.probe import Probe
    from fedquilt.terms import Budget


@dataclass(frozen=True)
class RunRequest(Options):
    """Train one model on clients that cannot all hold it.

    Without a file and options this is a demo: HeteroFL on scikit-learn's digits, 20 rounds with 20
    clients. A third of the clients can hold the whole model, a third one half and a third one
    quarter. With --model or --data the defaults of the method, the fleet and the run apply instead
    of the demo's.
    """

    # file of settings; if not given the demo's, or with --model or --data the method's defaults
    config: Config = None
    method: Text = None  # method: a name of `fedquilt list methods`, or file.py:factory

    def __call__(self) -> int:
        from fedquilt.cli.show import print_json, progress, say, show_result

        self.check_target()
        with output(self.json) as (console, stdout), ExitStack() as stack:
            if self.resume:
                self.check_resume("trust")
                loop = resumed(self.resume, self.rounds, stack, self.trust)
            else:
                experiment = self.experiment(self.config, self.method)
                loop = begun(experiment, self.source(self.config, self.method), self.out, stack)
            loop.check_target(self.target)
            if loop.run:
                say(console, "\n".join(loop.first_lines))
                with progress(console, loop.experiment.rounds) as begin:
                    loop.start(begin)
            summary = loop.summary_with(self.target)
            if self.json:
                print_json(summary, stdout)
            else:
                show_result(console, summary)
            if loop.damage:
                listed = "\n  ".join(loop.damage)
                state = f"the run in {loop.rounds} is finished and its summary is intact"
                print(
                    f"RecordError: {state}, but other files are damaged:\n  {listed}",
                    file=sys.stderr,
                )
        return int(bool(loop.damage))


@dataclass(frozen=True)
class ListRequest(DataOptions):
    """List everything that can be chosen by name. With NAME, list the options of one entry.

    `list data --plot` plots the samples of each client, for the data and partition that are named.
    """

    # list to show: methods, models, data, partitions, tasks, metrics, fleets, links …; all if not
    # given
    what: What = "all"
    name: Name = ""  # name of one entry, whose options are listed
    config: File = None  # for --plot: file of settings; the demo's if not given
    plot: Flag = False  # plot how many samples of each class or domain every client holds
    by: By = "class"  # for --plot: count samples by class or by domain
    # for --plot: write a figure to this file, such as clients.png or clients.svg, instead of text
    out: File = None
    # for --plot: run code that the settings of a run's folder name, and add it to your list of
    # trusted code
    trust: Flag = False
    json: Flag = False  # print a JSON object keyed by name

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
        lists = {kind: listing.entries(kind, self.name, with_stages=self.json) for kind in kinds}
        if self.json:
            print_json(lists if self.what == "all" else lists[self.what])
            return
        console = console_for()
        for index, (kind, rows_by_name) in enumerate(lists.items()):
            if index:
                say(console, "")
            show_table(console, kind, rows_by_name)
            if self.name:
                for title, rows in listing.details(kind, self.name).items():
                    say(console, "")
                    show_table(console, title, rows)

    def _plot(self) -> None:
        from fedquilt.cli.show import console_for, print_json, say
        from fedquilt.data.plot import blocks, counts, figure
        from fedquilt.runs.experiment import Experiment, demo, read_settings

        if self.what != "data":
            raise ConfigError(
                f"list {self.what} --plot was asked for; list data --plot draws who holds what."
            )
        settings, sources = self.layers(
            read_settings(self.config, self.trust) if self.config else demo()
        )
        experiment = Experiment.of(settings, sources, self.config or "")
        data, _ = experiment.data.federate(experiment.fleet.clients, experiment.seed)
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
        from fedquilt.cli.show import print_json, show_probe

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
        """Time the blocks of a search space, and write or print the table."""
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
            f"{len(times)} blocks, "
            f"{min(times):.3g} to {max(times):.3g} ms for one sample",
        )
        if self.out is not None:
            say(
                console,
                f"{self.out} has the times; fedquilt supernet search {space} --milliseconds MS "
                f"--table {self.out}",
            )

    def measure(self) -> Probe:
        """Trace the model as a run would, train it for a moment, and return the measurements."""
        from fedquilt.data import Pool
        from fedquilt.family.family import trace
        from fedquilt.hardware.device import device_of
        from fedquilt.models import MODELS
        from fedquilt.runs.experiment import DEMO, Machine, Model, Source, resolved
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


@dataclass(frozen=True)
class CheckRequest:
    """Check a method as its author would: budgets, engines, links, resume, determinism and export.

    The method is trained on a small federation for some seconds. The exit status is 1 if a check
    failed.
    """

    method: MethodName  # method: a name of `fedquilt list methods`, or file.py:factory
    # a setting of the method by its path, such as method.shift=2; may be given again
    assign: Assignments = ()
    json: Flag = False  # print the findings as JSON on standard output, and nothing else there

    def __call__(self) -> int:
        from fedquilt.cli.show import check_progress, print_json, show_findings

        with output(self.json) as (console, stdout):
            import torch

            from fedquilt.conformance.method import CHECKS, check_method

            method = self.chosen()
            torch.set_num_threads(1)  # The net is too small for several threads.
            with check_progress(console, len(CHECKS)) as watch:
                findings = check_method(method, watch=watch)
            has_failed = any(finding.status == "failed" for finding in findings)
            if self.json:
                checks = [finding.to_dict() for finding in findings]
                print_json(
                    {"method": self.method, "passed": not has_failed, "checks": checks}, stdout
                )
            else:
                show_findings(console, self.method, findings)
        return int(has_failed)

    def chosen(self) -> Method:
        """Return the method with its own defaults and the settings that were asked for."""
        from fedquilt.runs.experiment import Experiment, defaults, parse_assignment

        foreign = [text for text in self.assign if parse_assignment(text)[0][0] != "method"]
        if foreign:
            raise ConfigError(
                f"check {self.method} --set {foreign[0]} was asked for; methods are checked on a "
                "federation of their "
                "own, and only settings of the method fit, such as --set method.local.norm=tracked."
            )
        settings, sources = DataOptions(assign=self.assign).layers(defaults(self.method))
        return Experiment.of(settings, sources).method


@dataclass(frozen=True)
class ExportRequest:
    """Export the model of a run for a device of some size, as ONNX, .pt2 or safetensors.

    The file is read back and its outputs on test samples are compared with torch's before it gets
    its name. Without a limit the whole model is exported. With several shares the file is a
    safetensors file of all of them, from which fedquilt.load_model makes a module that can change
    its size.
    """

    run: Folder  # folder of the run: --out of `fedquilt run`
    out: Target  # file to write; the end of its name may give the format
    share: Shares = ()  # share of every layer's channels, in (0, 1]; may be given again
    params: Params = None  # limit on parameters
    macs: Macs = None  # limit on multiply-adds per sample
    # limit on bytes of inference on one sample: float32 weights and activations
    memory: Real = None
    client: Whole = None  # client whose model is written, if each has its own (fedbn, local, rafl)
    # statistics of norm layers; post measures them over the training data; if not given, those of
    # the run
    norms: Norms = None
    # weight of the noised net in dual norms: 0 is the clean net, 1 the noised one
    robustness: Real = None
    # round whose weights are written; best: the best on validation samples; the last one if not
    # given
    round: Round = None
    format: Format = ""  # format of the file; if not given, by the end of its name
    force: Flag = False  # overwrite an existing file
    # run the code that the run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        from fedquilt.cli.show import print_json, say, show_export

        with output(self.json) as (console, stdout):
            from fedquilt.deploy.export import FORMATS, check_place, chosen, export_sizes
            from fedquilt.runs.experiment import load_run

            budgets = self._budgets()
            check_place(self.out, self.force)
            kind = chosen(self.out, self.format)
            FORMATS[kind].check()
            run = load_run(self.run, trust=self.trust)
            if self.round is not None:
                run = run.at(int(self.round) if self.round.isdecimal() else self.round)
            whose = "" if self.client is None else f", client {self.client}'s"
            sizes = ", ".join(map(str, budgets))
            choice = "the best on validation samples, " if self.round == "best" else ""
            source = (
                f"{self.run} after round {run.server.round} "
                f"({choice}checkpoint/{run.server.round:08}.json)"
            )
            say(console, f"{source}: a model of {sizes}{whose} as {kind}")
            options: dict[str, Any] = {
                "client": self.client,
                "norms": self.norms,
                "robustness": self.robustness,
            }
            options |= {"format": kind, "force": self.force}
            several = len(budgets) > 1
            exported = (
                export_sizes(run, self.out, self.share, **options)
                if several
                else [run.export(self.out, budgets[0], **options)]
            )
            if self.json:
                listed = [
                    {**model.to_dict(), "checkpoint": f"checkpoint/{model.round:08}.json"}
                    for model in exported
                ]
                print_json(listed if several else listed[0], stdout)
            else:
                show_export(console, exported)

    def _budgets(self) -> list[Budget]:
        from fedquilt.terms import Budget

        bounds = {"params": self.params, "macs": self.macs, "memory": self.memory}
        bounded = any(value is not None for value in bounds.values())
        if bounded and len(self.share) > 1:
            raise ConfigError(
                "several shares and a bound were asked for; a file of several sizes takes shares "
                "alone."
            )
        shares = self.share or ((None,) if bounded else (1.0,))
        return [Budget(share=share, **bounds) for share in shares]


@dataclass(frozen=True)
class ClientsRequest:
    """Print the costs and results of the clients of a run.

    Costs are those of a round. Results are the main figure (such as accuracy) on each client's own
    test samples, for a model of its own size and for the whole model. The part of the model that
    each domain has trained is printed too.
    """

    run: Folder  # folder of the run: --out of `fedquilt run`
    # run the code that the run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print every client as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        from fedquilt.cli.show import print_json, show_clients

        with output(self.json) as (console, stdout):
            from fedquilt.runs.experiment import load_run

            run = load_run(self.run, trust=self.trust)
            if run.absent:
                raise ConfigError(
                    f"the clients of {self.run} were asked for; their data cannot be had: "
                    f"{run.absent}"
                )
            per_client = run.per_client()
            if self.json:
                print_json(per_client.to_dict(), stdout)
            else:
                show_clients(console, per_client)


# --- the script ---------------------------------------------------------------------------------

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
    "keys": KeysRequest,
    "serve": ServeCommand,
    "join": JoinCommand,
    "supernet": SupernetRequest,
}
# Commands of two words, such as `supernet train`.
GROUPS: dict[str, dict[str, Callable[..., Any]]] = {"supernet": SUPERNET_COMMANDS}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fedquilt` script, and return its exit status.

    Args:
        argv: Arguments without the name of the program. None: those of the process.
    """
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
    except BrokenPipeError:
        # The reader of our output has closed it. Redirect it, so that the last flush does not fail.
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
    """Print an error and return the exit status.

    If the user's own code raised it, its line is printed too. None: the error comes neither from
    fedquilt nor from the user's code, and nothing was printed.
    """
    notes = getattr(error, "__notes__", ())
    line = user_line(error)
    if isinstance(error, FedquiltError):
        message = f"{type(error).__name__}: {error}"
        failed = (TrainingError, SubmodelError, RecordError, ExportError, NotEnoughMemoryError)
        status = 1 if isinstance(error, failed) else 2
    elif is_out_of_memory(error):
        message, status = (
            f"NotEnoughMemoryError: there was not enough memory. {memory_text(error)}",
            1,
        )
    elif isinstance(error, OSError) and error.filename is not None:  # A file that the user named.
        message, status = f"{error.filename} cannot be used: {error.strerror}.", 2
    elif line:
        message, status = f"{type(error).__name__}: {error}", 1
    else:
        return None
    hints = []
    if line:
        hints = [
            *([] if line in message else [f"It was raised in {line}."]),
            "--debug shows the whole trace.",
        ]
    print("\n".join([message, *notes, *hints]), file=sys.stderr)
    return status


def _first_line(command: Callable[..., Any]) -> str:
    return (command.__doc__ or "").splitlines()[0]


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Treat SIGTERM as ctrl-C in the block, so that a run leaves a checkpoint.

    Schedulers end jobs by SIGTERM.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    previous = signal.signal(
        signal.SIGTERM, handler if callable(handler) else signal.default_int_handler
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
