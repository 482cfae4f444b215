"""The commands `fedquilt supernet train`, `show`, `measure` and `import`.

A further command of the group is a dataclass with `__call__`, and an entry of `SUPERNET_COMMANDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fedquilt.cli.options import Flag, Precision, Real, Target, Text, Whole
from fedquilt.cli.output import output
from fedquilt.cli.search import SearchRequest, progress_bars, validation_on
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from fedquilt.supernet import Space, SupernetData, SupernetTraining
    from fedquilt.supernet.training import Watch

_quiet = {"help_behavior_hint": ""}
SpaceName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE", **_quiet)]
SpaceOrFile = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="SPACE|FILE", **_quiet)]
SupernetFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE", **_quiet)]
WeightsFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="WEIGHTS", **_quiet)]
DataName = Annotated[str, tyro.conf.arg(metavar="NAME|FILE", **_quiet)]
LabelSource = Annotated[
    Literal["rotations", "own"],
    tyro.conf.arg(metavar="rotations|own", **_quiet),
]


@dataclass(frozen=True)
class TrainRequest:
    """Train a supernet: the largest net first, then all smaller ones by progressive shrinking.

    Labels are rotations of the public images, or of the training images where there are no public
    ones. A checkpoint FILE.training is kept until the training is done.
    """

    space: SpaceName  # search space: resnet50, mobilenetv3, mobilenetv2, tiny, or file.py:Class
    data: DataName  # images: a name of `fedquilt list data`, a file or a folder
    out: Target  # file for the trained supernet
    labels: LabelSource = "rotations"  # labels to learn: rotations, or the data's own classes
    epochs: Whole = None  # epochs of the largest net, 20 if not given
    phase_epochs: Whole = None  # epochs of each shrinking phase, 10 if not given; 0 shrinks nothing
    batch_size: Whole = None  # samples per step, 256 if not given; a rotated image is four of them
    lr: Real = None  # learning rate of the largest net at the start, 0.05 if not given
    phase_lr: Real = None  # learning rate of a shrinking phase at its start, 0.02 if not given
    crop: Whole = None  # pixels by which images are shifted at random, 0 if not given
    flip: Flag = False  # mirror half of the images at random
    device: Text = None  # device to train on, such as cpu or cuda
    precision: Precision = None  # precision of products, fp32 if not given
    seed: Whole = None  # random seed, 0 if not given
    resume: Flag = False  # continue a training that was interrupted, from FILE.training
    force: Flag = False  # overwrite an existing file
    json: Flag = False  # print a summary as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Train or resume the supernet, and print its summary."""
        from fedquilt.cli.show import print_json, say

        with output(self.json) as (console, stdout):
            from fedquilt.supernet import train_supernet
            from fedquilt.supernet.training import CHECKPOINT

            self._check_out()
            settings = self._settings()
            space, data = self._space_and_data()
            say(console, f"{space.name}: {len(data.images):,} images, labels are {self.labels}")
            with _progress(console) as watch:
                try:
                    supernet = train_supernet(
                        space,
                        data,
                        settings,
                        out=self.out,
                        resume=self.resume,
                        device=self.device or "cpu",
                        watch=watch,
                    )
                except KeyboardInterrupt as error:
                    checkpoint = f"{self.out}{CHECKPOINT}"
                    error.add_note(f"The same command with --resume continues from {checkpoint}.")
                    raise
            summary = {"file": str(self.out), **summary_of(supernet.space)}
            if self.json:
                print_json(summary, stdout)
            else:
                say(console, f"{self.out} has the trained supernet")
                _show_summary(console, summary)

    def _check_out(self) -> None:
        from fedquilt.supernet.training import CHECKPOINT

        unfinished = Path(f"{self.out}{CHECKPOINT}").exists()
        if self.out.exists() and not self.force and not (self.resume and unfinished):
            raise ConfigError(
                f"{self.out} is there already; give another --out, or --force to replace it.",
            )
        if unfinished and not self.resume and not self.force:
            raise ConfigError(
                f"{self.out}{CHECKPOINT} is an unfinished training. --resume continues it, --force "
                "deletes it and starts anew.",
            )

    def _settings(self) -> SupernetTraining:
        from fedquilt.hardware.precision import unfit
        from fedquilt.supernet import SupernetTraining

        names = (
            "epochs",
            "phase_epochs",
            "batch_size",
            "lr",
            "phase_lr",
            "crop",
            "precision",
            "seed",
        )
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options = {name: value for name, value in options.items() if value is not None}
        precision = options.get("precision", "fp32")
        if precision not in ("fp32", "tf32", "bf16"):
            raise ConfigError(
                f"--precision {precision} was asked for; fp32, tf32 or bf16 would work.",
            )
        if problem := unfit(precision, self.device or "cpu"):
            raise ConfigError(f"--precision {problem}")
        return SupernetTraining(flip=self.flip, **options)

    def _space_and_data(self) -> tuple[Space, SupernetData]:
        from dataclasses import replace

        from fedquilt.data.sources import source
        from fedquilt.supernet import SupernetData, space_by_name

        space = space_by_name(self.space)
        data = SupernetData.of_pool(source(self.data)(), self.labels)
        channels, size = data.images.shape[1:3]
        return replace(space, in_channels=channels, image_size=size), data


@dataclass(frozen=True)
class ShowRequest:
    """Show the choices of a search space or of a supernet file, and the range of its nets.

    `--names` lists the weights of the largest net, as `supernet import` expects them.
    """

    what: SpaceOrFile  # search space: resnet50, mobilenetv3, mobilenetv2, tiny, or a supernet file
    space: Text = None  # search space of a file, as file.py:Class, if it is not built in
    names: Flag = False  # list names and shapes of the largest net's weights
    json: Flag = False  # print an object as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Print size and choices of the space, or with `--names` its weights and their shapes."""
        from fedquilt.cli.show import print_json, say, show_table

        with output(self.json) as (console, stdout):
            space = self._space()
            if self.names:
                shapes = _weight_shapes(space)
                if self.json:
                    print_json(shapes, stdout)
                    return
                rows = {name: {"shape": _sides(shape)} for name, shape in shapes.items()}
                show_table(console, "weight", rows)
                return
            summary = summary_of(space)
            if self.json:
                print_json(summary, stdout)
                return
            _show_summary(console, summary)
            say(console, "")
            show_table(console, "choice", _choice_rows(space))

    def _space(self) -> Space:
        from fedquilt.supernet import SPACES, load_supernet, space_by_name

        if self.what not in SPACES and Path(self.what).is_file():
            expected = type(space_by_name(self.space)) if self.space else None
            return load_supernet(self.what, expected).space
        if self.space:
            raise ConfigError(f"--space {self.space} goes with a supernet file; found {self.what}.")
        return space_by_name(self.what)


@dataclass(frozen=True)
class ImportRequest:
    """Make a supernet file from weights of the largest net, for example public ImageNet weights.

    Names and shapes must be those that `supernet show SPACE --names` lists. Other members share
    these weights untrained: the kernels of smaller members are plain crops.
    """

    space: SpaceName  # search space: resnet50, mobilenetv3, mobilenetv2, tiny, or file.py:Class
    weights: WeightsFile  # .safetensors file, or a state dict as .pt or .pth
    out: Target  # file for the supernet
    force: Flag = False  # overwrite an existing file
    json: Flag = False  # print a summary as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Read weights, sort channels by importance, write the supernet, and print its summary.

        Raises:
            ConfigError: The file exists, and `--force` is not given.
        """
        from fedquilt.cli.show import print_json, say

        with output(self.json) as (console, stdout):
            from fedquilt.supernet import import_weights, save_supernet, space_by_name

            if self.out.exists() and not self.force:
                raise ConfigError(
                    f"{self.out} is there already; give another --out, or --force to replace it.",
                )
            supernet = import_weights(space_by_name(self.space), self.weights)
            supernet.sort_channels()
            save_supernet(supernet, self.out, imported=self.weights.name)
            summary = {"file": str(self.out), **summary_of(supernet.space)}
            if self.json:
                print_json(summary, stdout)
            else:
                say(console, f"{self.out} has the supernet; its channels are sorted by importance")
                _show_summary(console, summary)


@dataclass(frozen=True)
class MeasureRequest:
    """Measure the accuracy of members of a supernet file, from the smallest to the largest.

    Members get norm statistics of their own. Give images that the supernet was not trained on: a
    fifth of them, at most 2,000, are for the accuracy, and others for the statistics.
    """

    file: SupernetFile  # supernet file
    data: DataName  # images: a name of `fedquilt list data`, a file or a folder
    space: Text = None  # search space of the file, as file.py:Class, if it is not built in
    labels: LabelSource = "rotations"  # labels that the supernet was trained to predict
    members: Whole = None  # members that are measured, 32 if not given
    device: Text = None  # device to measure on, such as cpu or cuda
    seed: Whole = None  # random seed of the members, 0 if not given
    json: Flag = False  # print the accuracies as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Measure the members, and print their accuracies."""
        from fedquilt.cli.show import print_json, show_table

        with output(self.json) as (console, stdout):
            result = self._result(console)
            if self.json:
                print_json(result, stdout)
                return
            rows = {
                f"{number}": {
                    "multiply-adds": f"{member['macs']:,}",
                    "parameters": f"{member['params']:,}",
                    "accuracy": f"{member['accuracy']:.1%}",
                }
                for number, member in enumerate(result["measured"], start=1)
            }
            show_table(console, "member", rows)

    def _result(self, console: Console) -> dict[str, Any]:
        from fedquilt.hardware.device import device_of
        from fedquilt.supernet import load_supernet, space_by_name
        from fedquilt.supernet.scoring import accuracy_by_size, measured_members

        count = 32 if self.members is None else self.members
        if count < 2:
            raise ConfigError(
                f"--members {count} was asked for; the smallest and the largest are measured: 2 or "
                "more."
            )
        device = device_of(self.device or "cpu")
        expected = type(space_by_name(self.space)) if self.space else None
        supernet = load_supernet(self.file, expected, str(device)).eval()
        validation = validation_on(self.data, self.labels, supernet, str(self.file)).to(device)
        with progress_bars(console) as report:
            measured = measured_members(
                supernet,
                validation,
                count,
                self.seed or 0,
                lambda done, total: report("measure members", done, total),
            )
        return {
            "file": Path(self.file).name,
            "space": supernet.space.name,
            "data": Path(self.data).name,
            "labelled_by": self.labels,
            "samples": len(validation.images),
            "accuracy_by_size": accuracy_by_size(measured),
            "measured": [
                {
                    "macs": member.costs.macs,
                    "params": member.costs.params,
                    "accuracy": member.accuracy,
                    "config": member.config.to_json(),
                }
                for member in measured
            ],
        }


SUPERNET_COMMANDS: dict[str, Callable[..., Any]] = {
    "train": TrainRequest,
    "search": SearchRequest,
    "show": ShowRequest,
    "measure": MeasureRequest,
    "import": ImportRequest,
}


@dataclass(frozen=True)
class SupernetRequest:
    """Train, show, measure or import supernets: nets of many sizes that share their weights."""

    def __call__(self) -> None:
        """Refuse the command, because it needs a second word."""
        raise ConfigError(f"supernet needs a command: {', '.join(SUPERNET_COMMANDS)}.")


def summary_of(space: Space) -> dict[str, Any]:
    """Return a space's name, image shape, classes, choices and number of nets, for JSON output.

    Multiply-adds and parameters are those of the smallest and of the largest net.
    """
    smallest, largest = space.cost(space.smallest), space.cost(space.largest)
    return {
        "space": space.name,
        "images": [space.in_channels, space.image_size, space.image_size],
        "classes": space.num_classes,
        "choices": {choice.name: list(choice.options) for choice in space.choices},
        "nets": space.num_configs,
        "macs": [smallest.macs, largest.macs],
        "params": [smallest.params, largest.params],
    }


def _show_summary(console: Console, summary: dict[str, Any]) -> None:
    from fedquilt.cli.show import say
    from fedquilt.units import amount

    def between(bounds: list[int]) -> str:
        return " to ".join(map(amount, bounds))

    say(
        console,
        f"space {summary['space']}: images {_sides(summary['images'])}, {summary['classes']} "
        f"classes, {summary['nets']:,} nets",
    )
    say(
        console,
        f"multiply-adds {between(summary['macs'])}, parameters {between(summary['params'])}",
    )


def _sides(shape: list[int]) -> str:
    return " × ".join(map(str, shape)) or "one number"


def _choice_rows(space: Space) -> dict[str, dict[str, Any]]:
    """Return a table row for each stage and kind of choice: its options, by block or by stage.

    Kinds without options are left out.
    """
    rows = {}
    for number, stage in enumerate(space.stages, start=1):
        for kind in ("depths", "expansions", "kernels", "widths"):
            options = getattr(stage, kind)
            if options:
                rows[f"stage {number} {kind}"] = {
                    "options": ", ".join(map(str, options)),
                    "per": "block" if kind in ("expansions", "kernels") else "stage",
                }
    return rows


def _weight_shapes(space: Space) -> dict[str, list[int]]:
    import torch

    with torch.device("meta"):
        net = space.member(space.largest)
    return {name: list(tensor.shape) for name, tensor in net.state_dict().items()}


@contextmanager
def _progress(console: Console) -> Iterator[Watch]:
    """Show a bar on a terminal, and a line for every epoch elsewhere.

    It yields a function that is called with the progress of the training.
    """
    from fedquilt.cli.progress import counted_bars
    from fedquilt.cli.show import say
    from fedquilt.supernet import SupernetProgress

    def figures(progress: SupernetProgress) -> str:
        return f"loss {progress.loss:.3f}, training accuracy {progress.accuracy:.1%}"

    if not console.is_terminal:

        def by_line(progress: SupernetProgress) -> None:
            say(
                console,
                f"epoch {progress.done}/{progress.total} {progress.phase}: {figures(progress)}",
            )

        yield by_line
        return

    with counted_bars(console, "{task.fields[figures]}") as bars:
        task = bars.add_task("epochs", total=None, figures="")

        def watch(progress: SupernetProgress) -> None:
            bars.update(
                task,
                description=progress.phase,
                completed=progress.done,
                total=progress.total,
                figures=figures(progress),
            )

        yield watch
