"""`fedquilt supernet search`, and tables of timed blocks for `fedquilt probe --space`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fedquilt.cli.options import File, Flag, Macs, Params, Real, Text, Whole
from fedquilt.cli.output import output
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.supernet import Space, Supernet
    from fedquilt.supernet.latency import LatencyTable
    from fedquilt.supernet.limits import Limits
    from fedquilt.supernet.scoring import MeasuredAccuracy, Validation
    from fedquilt.supernet.search import Found, Score, Search

_quiet = {"help_behavior_hint": ""}
SpaceOrFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE|FILE", **_quiet)]
StrategyName = Annotated[
    Literal["evolution", "random", "exhaustive"],
    tyro.conf.arg(metavar="evolution|random|exhaustive", **_quiet),
]
LabelSource = Annotated[
    Literal["rotations", "own"], tyro.conf.arg(metavar="rotations|own", **_quiet)
]

# Arguments: name of a step, how much of it is done, and how much there is.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class SearchRequest:
    """Search the best member of a search space or a supernet file within limits.

    With --fleet, a few members are searched for a fleet of devices. Members of a supernet file are
    scored by a predictor of their accuracy on the images of --data. Those with the highest scores
    are measured before one is chosen. Without weights or images, the member with the most
    multiply-adds counts as the best.
    """

    # search space: resnet50, mobilenetv3, mobilenetv2, tiny, file.py:Class, or a supernet file
    what: SpaceOrFile
    space: Text = None  # search space of a file, as file.py:Class, if it is not built in
    macs: Macs = None  # limit on multiply-adds per sample
    params: Params = None  # limit on parameters
    memory: Real = None  # limit on bytes of a training step
    milliseconds: Real = None  # limit on the inference time of one sample; needs --table
    table: File = None  # times of blocks, written by `fedquilt probe --space SPACE --out FILE`
    fleet: File = None  # CSV file of devices with limits, as the fleet `csv` reads it
    members: Whole = None  # limit on different members for a fleet; 8 if not given
    # images that members are measured on and that set their size: a data set, file or folder
    data: Text = None
    # labels that a supernet file was trained to predict: rotations, or its data's classes
    labels: LabelSource = "rotations"
    measured: Whole = None  # members that are measured to fit the predictor, 128 if not given
    # members that are measured at each limit before one is chosen, 8 if not given; 0 for none
    verified: Whole = None
    # number of classes of members; that of the data, the space or the file if not given
    classes: Whole = None
    batch_size: Whole = None  # samples of a training step whose memory is limited, 32 if not given
    strategy: StrategyName = "evolution"  # search strategy
    # for random: share of the limit by which a member may stay below it, 0.05 if not given
    tolerance: Real = None
    seed: Whole = None  # random seed, 0 if not given
    json: Flag = False  # print the members as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Search the best member, or one for every size of a fleet, and print the result."""
        from fedquilt.cli.show import print_json

        with output(self.json) as (console, stdout):
            self._check()
            space, supernet = asked_space(self.what, self.space, self.data, self.classes)
            with progress_bars(console) as report:
                search = self._search(space, supernet, report)
                result = (
                    self._for_fleet(search, report) if self.fleet else self._for_one(search, report)
                )
            if self.json:
                print_json(result, stdout)
            else:
                _show(console, result)

    def _check(self) -> None:
        bounds = ("macs", "params", "memory")
        if self.fleet and any(getattr(self, name) is not None for name in bounds):
            raise ConfigError(
                "--fleet was asked for with a limit; the limits of a fleet are in its file."
            )
        if not self.fleet and self.members is not None:
            raise ConfigError(
                "--members was asked for; it needs --fleet, because one device has one member."
            )
        if self.milliseconds is not None and not self.table:
            raise ConfigError(
                "--milliseconds was asked for without --table; `fedquilt probe --space SPACE --out "
                "FILE` measures one."
            )

    def _search(self, space: Space, supernet: Supernet | None, report: Report) -> Search:
        from fedquilt.family.cost import TrainingStep
        from fedquilt.supernet.latency import LatencyTable
        from fedquilt.supernet.meter import Meter
        from fedquilt.supernet.search import Search, SearchOptions

        table = LatencyTable.load(self.table) if self.table else None
        step = TrainingStep() if self.batch_size is None else TrainingStep(self.batch_size)
        flags: dict[str, Any] = {
            "tolerance": self.tolerance,
            "verified": self.verified,
            "seed": self.seed,
        }
        options = SearchOptions(
            self.strategy, **{name: value for name, value in flags.items() if value is not None}
        )
        search = Search(Meter(space, step, table), options=options)
        if supernet is None or self.data is None:
            return search
        accuracy = self._accuracy(supernet)
        return Search(search.meter, self._score(search, accuracy, report), options, accuracy)

    def _accuracy(self, supernet: Supernet) -> MeasuredAccuracy:
        from fedquilt.supernet.scoring import MeasuredAccuracy

        assert self.data is not None
        return MeasuredAccuracy(
            supernet, validation_on(self.data, self.labels, supernet, self.what)
        )

    def _score(self, search: Search, accuracy: MeasuredAccuracy, report: Report) -> Score:
        from fedquilt.supernet.scoring import NUM_MEASURED, fit_score

        return fit_score(
            search,
            accuracy,
            self.measured or NUM_MEASURED,
            self.seed or 0,
            lambda done, total: report("measure members", done, total),
        )

    def _for_one(self, search: Search, report: Report) -> dict[str, Any]:
        from fedquilt.supernet.limits import Limits

        limits = Limits(self.macs, self.params, self.memory, self.milliseconds)
        best = search.best(limits, lambda done, total: report("search", done, total))
        member = {best.name: member_entry(best)}
        capacity = limits.macs or search.capacity(limits)
        return _head(search) | {"members": member, "utilization": best.costs.macs / capacity}

    def _for_fleet(self, search: Search, report: Report) -> dict[str, Any]:
        from fedquilt.supernet.nets import named
        from fedquilt.supernet.service import SearchService

        fleet = self._fleet()
        service = (
            SearchService(search) if self.members is None else SearchService(search, self.members)
        )
        chosen_members = service.prepare(fleet, lambda done, total: report("search", done, total))
        devices = dict.fromkeys((choice.config for choice in chosen_members), 0)
        for limits, count in fleet.items():
            devices[service.query(limits).config] += count
        entries = {
            name: member_entry(choice) | {"devices": devices[choice.config]}
            for name, choice in named(chosen_members).items()
        }
        used = service.utilization(fleet)
        return _head(search) | {
            "members": entries,
            "utilization": used.share,
            "common": used.common,
        }

    def _fleet(self) -> dict[Limits, int]:
        from fedquilt.fleets.from_csv import FromCsv
        from fedquilt.supernet.limits import Limits

        assert self.fleet is not None
        counts: dict[Limits, int] = {}
        for budget, count in FromCsv(self.fleet).counts.items():
            limits = Limits.of(budget, self.milliseconds)
            counts[limits] = counts.get(limits, 0) + count
        return counts


def validation_on(
    name: str, labels: Literal["rotations", "own"], supernet: Supernet, file: str
) -> Validation:
    """Return the images on which members of a supernet are measured, and those for its norms.

    The last fifth of the images is for measuring, and the others are for norm statistics.

    Args:
        name: Name of a data set, or path of a file or folder.
        labels: Labels that the supernet was trained to predict: rotations of images, or their own.
        supernet: The supernet.
        file: File of the supernet, for the error.

    Raises:
        ConfigError: The number of classes or the shape of the images differs from the supernet's.
    """
    from fedquilt.data.sources import source
    from fedquilt.supernet import SupernetData
    from fedquilt.supernet.scoring import Validation

    data = SupernetData.of_pool(source(name)(), labels)
    if data.num_classes != supernet.space.num_classes:
        raise ConfigError(
            f"members of {file} were to be measured on {name} with labels {labels}, which are "
            f"{data.num_classes} classes; it was trained for {supernet.space.num_classes}. The "
            "labels that it was trained with would work."
        )
    space = supernet.space
    shape, expected = (
        tuple(data.images.shape[1:]),
        (space.in_channels, space.image_size, space.image_size),
    )
    if shape != expected:
        raise ConfigError(
            f"members of {file} were to be measured on {name}, which has images of shape {shape}; "
            f"they take {expected}."
        )
    return Validation.of(data)


def asked_space(
    name: str, space_of_file: str | None, data: str | None, classes: int | None
) -> tuple[Space, Supernet | None]:
    """Return the search space that a command names, and the supernet if it names a file.

    The image size of a supernet file cannot be changed. The supernet is None for a space.

    Args:
        name: Name of a space, `file.py:Class`, or a supernet file.
        space_of_file: Space of a file, as `file.py:Class`, if it is not built in.
        data: Data that sets image size and classes of members. None: those of the space or file.
        classes: Number of classes of members. None: that of the data, the space or the file.
    """
    from fedquilt.data.sources import source
    from fedquilt.supernet import SPACES, load_supernet, space_by_name

    supernet = None
    if name not in SPACES and Path(name).is_file():
        supernet = load_supernet(
            name, type(space_by_name(space_of_file)) if space_of_file else None
        )
    elif space_of_file:
        raise ConfigError(f"--space {space_of_file} goes with a supernet file; found {name}.")
    space = supernet.space if supernet else space_by_name(name)
    if data is not None:
        pool = source(data)()
        channels, size = pool.example.shape[1:3]
        if supernet is None:
            space = replace(space, in_channels=channels, image_size=size)
        space = space.with_classes(pool.num_classes or space.num_classes)
    return (space.with_classes(classes) if classes is not None else space), supernet


def probed_blocks(name: str, data: str | None, device: str, console: Console) -> LatencyTable:
    """Time the blocks of a space on a device of this machine, and return the table of times.

    Args:
        name: Name of a space, `file.py:Class`, or a supernet file.
        data: Data that sets image size and classes of members. None: those of the space or file.
        device: Device as torch names it.
        console: Console for progress.
    """
    from fedquilt.supernet.latency import measure_blocks

    space, _ = asked_space(name, None, data, None)
    with progress_bars(console) as report:
        return measure_blocks(
            space, device, watch=lambda done, total: report("time blocks", done, total)
        )


def member_entry(member: Found) -> dict[str, Any]:
    """Return a found member as a JSON object: costs, score, limits and configuration.

    It has the accuracy too, if that was measured. Costs that are unknown are left out.
    """
    costs = {name: value for name, value in vars(member.costs).items() if value is not None}
    measured = {} if member.accuracy is None else {"accuracy": member.accuracy}
    return (
        costs
        | measured
        | {"score": member.score, "limits": member.limits.given, "config": member.config.to_json()}
    )


def _head(search: Search) -> dict[str, Any]:
    score = "multiply-adds" if search.has_proxy else "predicted accuracy"
    return {"space": search.space.name, "strategy": search.options.strategy, "score": score}


def _show(console: Console, result: dict[str, Any]) -> None:
    from fedquilt.cli.show import say, show_table

    is_accuracy = result["score"] == "predicted accuracy"
    rows = {name: _row(entry, is_accuracy) for name, entry in result["members"].items()}
    show_table(console, "member", rows)
    for name, entry in result["members"].items():
        choices = "; ".join(
            f"{kind} {' '.join(map(str, values))}"
            for kind, values in entry["config"].items()
            if values
        )
        say(console, f"{name}: {choices}")
    common = f", {result['common']:.1%} with one common member" if "common" in result else ""
    say(console, f"utilisation: {result['utilization']:.1%} of the limits' multiply-adds{common}")
    if not is_accuracy and result["strategy"] != "random":
        say(
            console,
            "members were ranked by multiply-adds; a supernet file and --data rank them by "
            "accuracy",
        )


def _row(entry: dict[str, Any], is_accuracy: bool) -> dict[str, Any]:
    from fedquilt.units import size

    row = {
        "multiply-adds": entry["macs"],
        "parameters": entry["params"],
        "memory to train": size(entry["memory"]),
    }
    if "milliseconds" in entry:
        row["ms"] = f"{entry['milliseconds']:.3g}"
    if is_accuracy:
        row["predicted accuracy"] = f"{entry['score']:.1%}"
    if "accuracy" in entry:
        row["measured accuracy"] = f"{entry['accuracy']:.1%}"
    if "macs" in entry["limits"]:
        row["of its limit"] = f"{entry['macs'] / entry['limits']['macs']:.1%}"
    return row | ({"devices": entry["devices"]} if "devices" in entry else {})


@contextmanager
def progress_bars(console: Console) -> Iterator[Report]:
    """Show a bar for each step on a terminal, and one line for each step elsewhere.

    It yields a function that is called with the step's name, how much is done, and how much there
    is.
    """
    from fedquilt.cli.progress import counted_bars
    from fedquilt.cli.show import say

    if not console.is_terminal:
        begun: set[str] = set()

        def by_line(step: str, done: int, total: int) -> None:
            if step not in begun:
                begun.add(step)
                say(console, f"{step}: {total}")

        yield by_line
        return

    with counted_bars(console, transient=True) as bars:
        tasks = {}

        def report(step: str, done: int, total: int) -> None:
            if step not in tasks:
                tasks[step] = bars.add_task(step)
            bars.update(tasks[step], completed=done, total=total)

        yield report
