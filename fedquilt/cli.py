"""The command line: `fedquilt run` and `fedquilt list`.

Exit status: 0 done, 1 the run failed, 2 the request was wrong, 130 interrupted. Nothing here imports torch
before a request has been understood.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fedquilt.config import find, is_file, make, options
from fedquilt.errors import ConfigError, FedquiltError, SubmodelError, TrainingError
from fedquilt.names import known
from fedquilt.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.experiment import Run
    from fedquilt.methods import Method
    from fedquilt.round import Record
    from fedquilt.terms import Arch

SHARES = (1.0, 1 / 2, 1 / 4)  # what the clients can hold, in turn
CLIENTS, LR, BATCH_SIZE, EPOCHS = 20, 0.1, 16, 2  # what makes the demo learn in twenty rounds
# Below so many multiply-adds a sample threads gain nothing, and waiting for each other on a busy machine they lose all.
SMALL = 1_000_000

# The comment behind a field is its help; these show no "default: None" where the comment says more.
Whole = Annotated[int | None, tyro.conf.arg(metavar="INT", help_behavior_hint="")]
Real = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", help_behavior_hint="")]
Folder = Annotated[Path | None, tyro.conf.arg(metavar="DIR", help_behavior_hint="")]
Flag = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
What = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="methods|models|data|engines", help_behavior_hint="")]


@dataclass(frozen=True)
class RunRequest:
    """Train one model on clients of which a third can hold all of it, a third a half and a third a quarter.

    Without options: HeteroFL on scikit-learn's digits, 20 clients, 20 rounds.
    """

    method: str = "heterofl"  # a name of `fedquilt list methods`, or file.py:factory
    model: str = "tiny_resnet"  # a name of `fedquilt list models`, or file.py:factory
    data: str = "digits"  # a name of `fedquilt list data`, or file.py:factory that returns a FederatedData
    engine: str = "vectorised"  # a name of `fedquilt list engines`
    rounds: int = 20
    clients: Whole = None  # 20 if not given, or as many as a file's data is dealt to
    cohort: Whole = None  # clients that take part in a round; half of them if not given
    labels: int = 0  # classes a client holds; 0 deals the data evenly
    seed: int = 0
    device: str = "cpu"
    precision: Literal["fp32", "fp64"] = "fp32"
    lr: Real = None  # local learning rate; 0.1 if not given, or a file's method's own
    batch_size: Whole = None  # local batch size; 16 if not given, or a file's method's own
    epochs: Whole = None  # local epochs a round; 2 if not given, or a file's method's own
    json: Flag = False  # print the summary as JSON on standard output, and nothing else there
    out: Folder = None  # write summary.json and rounds.jsonl into this folder

    def __call__(self) -> None:
        self.check()
        console = _console(self.json)
        # A user's module may print; with --json that is not for standard output.
        with redirect_stdout(sys.stderr if self.json else sys.stdout):
            run = self.prepare(console)
            began = time.perf_counter()
            with _folder(self.out) as write, _progress(console, self.rounds) as show:

                def watch(record: Record) -> None:
                    write(record)
                    show(record)

                run.train(self.rounds, watch)
            summary = self.summary(run, time.perf_counter() - began)
        if self.out:
            (self.out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
        if self.json:
            print(json.dumps(summary, indent=2))
        else:
            _show_result(console, run, summary)

    def check(self) -> None:
        """Everything that cannot be, at once and before anything heavy starts."""
        least = {"rounds": 1, "clients": 1, "cohort": 1, "labels": 0, "seed": 0, "batch_size": 1, "epochs": 1}
        wrong = [
            f"--{name.replace('_', '-')} {value} was asked for; it must be at least {bound}."
            for name, bound in least.items()
            if (value := getattr(self, name)) is not None and value < bound
        ]
        if self.lr is not None and not 0 < self.lr < math.inf:
            wrong.append(f"--lr {self.lr} was asked for; it must be above 0.")
        if self.out and _holds_a_run(self.out):
            wrong.append(f"--out {self.out} was asked for; a run is there already. Name another folder.")
        if wrong:
            raise ConfigError("\n  ".join(wrong))

    def prepare(self, console: Console) -> Run:
        """Find the parts by their names and put them together."""
        import torch

        import fedquilt as fq
        from fedquilt.data import DATA
        from fedquilt.engines import ENGINES
        from fedquilt.models import MODELS, ModelSpec

        method = self.make_method()
        known(ENGINES, self.engine, "engine")
        found = find(MODELS, self.model, "model")
        factory, fixed = (found.factory, found.fixed) if isinstance(found, ModelSpec) else (found, ())
        source = find(DATA, self.data, "data set")
        device = _device(self.device)
        dealt = {"num_clients": self.clients or CLIENTS, "labels": self.labels, "seed": self.seed}
        data = make(self.data, source, fq.FederatedData, dealt)
        clients = self.clients or data.num_clients
        fleet = fq.Fleet.of(SHARES, clients, self.cohort or max(1, clients // 2))
        offers = {"num_classes": data.num_classes}
        if data.inputs.dim() > 2:  # (sample, channel, height, width)
            offers |= {"in_channels": data.inputs.shape[1], "image_size": data.inputs.shape[-1]}
        _say(
            console,
            f"{self.method} on {self.data}: {self.model} for {clients} clients, {fleet.sample} a round, "
            f"{self.engine} on {device}",
        )
        family = fq.trace(lambda: make(self.model, factory, torch.nn.Module, offers), data.inputs[:2], fixed=fixed)
        if family.cost(family.whole).macs < SMALL:
            torch.set_num_threads(1)
        dtype = {"fp32": torch.float32, "fp64": torch.float64}[self.precision]
        # About ten looks on the way: norms are calibrated anew for each, which costs as much as a round.
        looks = fq.Evaluation(every=math.ceil(self.rounds / 10))
        return fq.prepare(method, family, data, fleet, self.engine, self.seed, device, dtype, looks)

    def make_method(self) -> Method:
        """The method with the local training asked for; where nothing was, the demo's, or a file's method's own."""
        from fedquilt.methods import METHODS, Method

        method = make(self.method, find(METHODS, self.method, "method"), Method, {})
        own = is_file(self.method)
        lr = self.lr or (None if own else LR)
        batch_size, epochs = self.batch_size or (None if own else BATCH_SIZE), self.epochs or (None if own else EPOCHS)
        local = method.local
        return replace(
            method,
            local=replace(
                local,
                optimiser=replace(local.optimiser, lr=lr or local.optimiser.lr),
                batch_size=batch_size or local.batch_size,
                epochs=epochs or local.epochs,
            ),
        )

    def summary(self, run: Run, seconds: float) -> dict[str, Any]:
        """The run in one object, as summary.json has it."""
        last = run.records[-1].grades
        return {
            "method": self.method,
            "model": self.model,
            "data": self.data,
            "engine": self.engine,
            "seed": self.seed,
            "rounds": run.server.round,
            "seconds": seconds,
            "bytes_down": sum(record.bytes_down for record in run.records),
            "bytes_up": sum(record.bytes_up for record in run.records),
            "accuracy": last.accuracy,
            "metrics": last.metrics,
            "fedquilt": __version__,
        }


@dataclass(frozen=True)
class ListRequest:
    """Show the methods, models, data sets and engines one can ask for by name."""

    what: What = "all"  # all of them if not given
    json: Flag = False  # print an object keyed by name

    def __call__(self) -> None:
        chosen = _LISTS if self.what == "all" else {self.what: known(_LISTS, self.what, "list")}
        found = {name: entries() for name, entries in chosen.items()}
        if self.json:
            print(json.dumps(found if self.what == "all" else found[self.what], indent=2))
            return
        console = _console()
        for place, (name, entries) in enumerate(found.items()):
            if place:
                _say(console, "")
            _show_table(console, name, entries)


# --- what there is ----------------------------------------------------------------------------------------------


def _methods() -> dict[str, Any]:
    from fedquilt.methods import METHODS

    return {
        name: {"paper": kind.paper, "summary": _first_line(kind), **options(kind), "presets": list(kind.presets)}
        for name, kind in METHODS.items()
    }


def _models() -> dict[str, Any]:
    import torch

    from fedquilt.models import MODELS

    listed = {}
    for name, spec in MODELS.items():
        with torch.device("meta"):  # counted, not allocated
            parameters = sum(weight.numel() for weight in spec.factory().parameters())
        listed[name] = {"paper": spec.paper, "input_shape": list(spec.input_shape), "parameters": parameters}
    return listed


def _data() -> dict[str, Any]:
    from fedquilt.data import DATA

    return {name: {"summary": _first_line(source), **options(source)} for name, source in DATA.items()}


def _engines() -> dict[str, Any]:
    from fedquilt.engines import ENGINES

    return {name: {"summary": _first_line(kind)} for name, kind in ENGINES.items()}


def _first_line(thing: object) -> str:
    return (thing.__doc__ or "").strip().split("\n")[0]


_LISTS: dict[str, Callable[[], dict[str, Any]]] = {
    "methods": _methods,
    "models": _models,
    "data": _data,
    "engines": _engines,
}


# --- what is shown ----------------------------------------------------------------------------------------------


def _console(aside: bool = False) -> Console:
    """Standard output, or, when that is for JSON alone, standard error if someone is looking."""
    from rich.console import Console

    return Console(stderr=aside, quiet=aside and not sys.stderr.isatty(), highlight=False)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


@contextmanager
def _progress(console: Console, rounds: int) -> Iterator[Callable[[Record], None]]:
    """A bar with rate and time left on a terminal, else a line for every evaluated round."""
    if not console.is_terminal:
        yield lambda record: _say(console, _line(record, rounds)) if record.grades.accuracy else None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("round"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task, began = progress.add_task("", total=rounds, rate="", accuracy=""), time.perf_counter()

        def show(record: Record) -> None:
            rate = record.round / (time.perf_counter() - began)
            progress.update(task, advance=1, rate=f"{rate:.1f} rounds/s")
            if record.grades.accuracy:
                progress.update(task, accuracy=_accuracies(record))

        yield show


def _line(record: Record, rounds: int) -> str:
    return f"round {record.round:>{len(str(rounds))}}/{rounds}  loss {record.loss:.3f}  {_accuracies(record)}"


def _accuracies(record: Record) -> str:
    return "  ".join(f"{float(share):g}: {accuracy:.1%}" for share, accuracy in record.grades.accuracy.items())


def _show_result(console: Console, run: Run, summary: dict[str, Any]) -> None:
    rows = {}
    for label, arch in _members(run).items():
        cost = run.engine.world.family.cost(arch)
        accuracy = f"{summary['accuracy'].get(label, math.nan):.1%}"
        rows[f"{float(label):g}"] = {"accuracy": accuracy, "parameters": cost.params, "MACs a sample": cost.macs}
    _show_table(console, "share", rows)
    down, up, seconds, rounds = (summary[key] for key in ("bytes_down", "bytes_up", "seconds", "rounds"))
    _say(
        console, f"{rounds} round{'s'[: rounds > 1]} in {seconds:.1f} s; {_size(down)} to the clients, {_size(up)} back"
    )


def _members(run: Run) -> dict[str, Arch]:
    """The network a device of each budget ends up with, by the label of its accuracy."""
    from fedquilt.round.serve import share_label
    from fedquilt.terms import Client

    method, server, world = run.method, run.server, run.engine.world
    members = {}
    for budget in run.fleet.kinds:
        if method.personal:
            submodel = method.plan(server, Client(0, budget), world)[0]
        else:
            submodel = method.deploy(server, budget, world)
        members[share_label(budget, world)] = submodel.arch
    return members


def _show_table(console: Console, name: str, entries: dict[str, dict[str, Any]]) -> None:
    """Rows keyed by name, framed on a terminal, else aligned by spaces. Options are left to JSON: they fit no line."""
    columns = [key for key, value in next(iter(entries.values())).items() if not isinstance(value, (dict, list))]
    rows = [[key, *(_cell(entry[column]) for column in columns)] for key, entry in entries.items()]
    right = [False, *(all(_cell(entry[c])[:1].isdecimal() for entry in entries.values()) for c in columns)]
    if console.is_terminal:
        from rich import box
        from rich.table import Table

        table = Table(box=box.ROUNDED)
        for title, number in zip((name, *columns), right, strict=True):
            table.add_column(title, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        return
    rows.insert(0, [name, *columns])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = zip(row, widths, right, strict=True)
        _say(console, "  ".join(c.rjust(w) if number else c.ljust(w) for c, w, number in cells).rstrip())


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _size(count: float) -> str:
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 1000 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}"


# --- where things go --------------------------------------------------------------------------------------------


@contextmanager
def _folder(out: Path | None) -> Iterator[Callable[[Record], None]]:
    """A run's folder; rounds are on disk as soon as they are over."""
    if out is None:
        yield lambda record: None
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = (out / "rounds.jsonl").open("w")
    except OSError as error:
        raise ConfigError(f"--out {out} was asked for; it cannot be written to: {error.strerror}.") from error
    with file:
        yield lambda record: print(json.dumps(record.to_dict()), file=file, flush=True)


def _holds_a_run(out: Path) -> bool:
    rounds = out / "rounds.jsonl"
    return rounds.is_file() and rounds.stat().st_size > 0


def _device(name: str) -> str:
    import torch

    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        here = "cpu and cuda" if torch.cuda.is_available() else "cpu"
        said = str(error).split("\n")[0]
        raise ConfigError(f"--device {name} was asked for; this machine has {here}. torch says: {said}") from error
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point of the `fedquilt` script."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args == ["--version"]:
        print(f"fedquilt {__version__}")
        return 0
    command = (
        Annotated[RunRequest, tyro.conf.subcommand("run", prefix_name=False)]
        | Annotated[ListRequest, tyro.conf.subcommand("list", prefix_name=False)]
    )
    request: Callable[[], None] = tyro.cli(
        command,
        prog="fedquilt",
        description="Federated learning on unequal devices: each trains the piece of one model that fits it.",
        args=args,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
    try:
        request()
    except FedquiltError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1 if isinstance(error, (TrainingError, SubmodelError)) else 2
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output has seen enough; leave nothing for the last flush to trip over
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
