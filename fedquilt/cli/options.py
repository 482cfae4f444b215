"""Options that commands share: flags are shortcuts for settings, and `--set` sets any other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import tyro

from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from fedquilt.config.toml import Settings
    from fedquilt.runs.experiment import Experiment

# The comment behind a field is its help. These types hide "default: None", because the comment
# names the default.
_quiet = {"help_behavior_hint": ""}
Text = Annotated[str | None, tyro.conf.arg(metavar="NAME", **_quiet)]
Whole = Annotated[int | None, tyro.conf.arg(metavar="INT", **_quiet)]
Real = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", **_quiet)]
Shares = Annotated[
    tuple[float, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FLOAT", **_quiet)
]
Number = Annotated[int | float | None, tyro.conf.arg(metavar="INT|FLOAT", **_quiet)]
Place = Annotated[Path | None, tyro.conf.arg(metavar="DIR", **_quiet)]
File = Annotated[str | None, tyro.conf.arg(metavar="FILE", **_quiet)]
Precision = Annotated[str | None, tyro.conf.arg(metavar="fp32|tf32|bf16|fp64", **_quiet)]
By = Annotated[Literal["class", "domain"], tyro.conf.arg(metavar="class|domain", **_quiet)]
Flag = Annotated[bool, tyro.conf.arg(**_quiet)]
Assignments = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(name="set", metavar="A.B=V", **_quiet)
]
Names = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME", **_quiet)
]
Seeds = Annotated[tuple[int, ...], tyro.conf.arg(metavar="INT…", **_quiet)]
Models = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", **_quiet)]
Grid = Annotated[
    tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="A.B=V,V…", **_quiet)
]
Rows = Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME…", **_quiet)]
PaperTable = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PAPER/TABLE", **_quiet)]
Scale = Annotated[str, tyro.conf.arg(metavar="smoke|short|full", **_quiet)]
TableFormat = Annotated[
    Literal["text", "markdown", "latex", "csv", "json"],
    tyro.conf.arg(metavar="text|markdown|latex|csv|json", **_quiet),
]
Config = Annotated[
    str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[CONFIG.toml]", **_quiet)
]
Methods = Annotated[
    tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="METHOD…", **_quiet)
]
MethodName = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD", **_quiet)]
Folder = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", **_quiet)]
Format = Annotated[
    Literal["", "onnx", "pt2", "safetensors"],
    tyro.conf.arg(metavar="onnx|pt2|safetensors", **_quiet),
]
Norms = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="batch|tracked|per_client|post|post-own|post-public|per_client-all", **_quiet
    ),
]
Params = Annotated[
    float | None, tyro.conf.arg(metavar="FLOAT", aliases=("--max-params",), **_quiet)
]
Macs = Annotated[float | None, tyro.conf.arg(metavar="FLOAT", aliases=("--max-macs",), **_quiet)]
Round = Annotated[str | None, tyro.conf.arg(metavar="INT|best", **_quiet)]
Target = Annotated[Path, tyro.conf.arg(metavar="FILE", **_quiet)]
What = Annotated[
    str, tyro.conf.Positional, tyro.conf.arg(metavar="[methods|models|data|…]", **_quiet)
]
Name = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]", **_quiet)]
# Flags are shortcuts for settings: `--lr 0.3` is `--set method.local.optimizer.lr=0.3`.
FLAGS = {
    "method": "method.name",
    "model": "model.name",
    "data": "data.name",
    "task": "task.name",
    "engine": "engine.name",
    "device": "engine.device",
    "precision": "engine.precision",
    "rounds": "rounds",
    "seed": "seed",
    "init": "init",
    "clients": "fleet.clients",
    "cohort": "fleet.cohort",
    "labels": "data.partition",
    "max_bytes": "data.max_bytes",
    "lr": "method.local.optimizer.lr",
    "batch_size": "method.local.batch_size",
    "epochs": "method.local.epochs",
    "track": "trackers",
    "link": "link.name",
    "supernet": "model.supernet",
}


def refuse_repeated(kind: Callable[..., Any], args: Sequence[str]) -> None:
    """Refuse a flag that is given twice, because the parser would use the last value only.

    Args:
        kind: Dataclass of a command. Fields that append and switches may be repeated.
        args: Arguments behind the name of the command.
    """
    names = _given_once(kind)
    values: dict[str, str] = {}
    problems = []
    for index, text in enumerate(args):
        flag, equals, value = text.partition("=")
        name, remedy = names.get(flag.replace("_", "-"), ("", ""))
        if not name:
            continue
        if not equals:
            value = args[index + 1] if index + 1 < len(args) else ""
        if name in values:
            problems.append(f"{name} was given as {values[name]} and again as {value}; {remedy}.")
        values[name] = value
    if problems:
        raise ConfigError("\n  ".join(problems))


def refuse_spaces_in_grid(args: Sequence[str]) -> None:
    """Refuse `--grid lr=0.1, 0.2`, for which the parser's error would only say that 0.2 is unknown.

    Args:
        args: Arguments behind the name of the command.
    """
    for flag, text, *following in zip(args, args[1:], args[2:], strict=False):
        if flag == "--grid" and text.endswith(","):
            raise ConfigError(
                f"--grid {text} {following[0]} was asked for; write values without spaces: "
                f"{text}{following[0]}."
            )


def _given_once(kind: Callable[..., Any]) -> dict[str, tuple[str, str]]:
    """Return the flags that may be given once, with their aliases, by the text of the flag.

    Each has the name that its aliases share, and a text on what to do instead of repeating it.

    Args:
        kind: Dataclass of a command.
    """
    names: dict[str, tuple[str, str]] = {}
    for field, hint in get_type_hints(kind, include_extras=True).items():
        value_type, *marks = get_args(hint)
        if (
            value_type is bool
            or tyro.conf.UseAppendAction in marks
            or tyro.conf.Positional in marks
        ):
            continue
        renamed = [mark.name for mark in marks if getattr(mark, "name", None)]
        flag = f"--{(renamed or [field])[0].replace('_', '-')}"
        aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
        is_list = get_origin(value_type) is tuple
        remedy = f"give all values at once, as in {flag} A B" if is_list else "it takes one value"
        names |= dict.fromkeys([flag, *aliases], (flag, remedy))
    return names


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Options for the data and its partition among clients."""

    # data: a name of `fedquilt list data`, a file or folder, hub:owner/name, or file.py:factory
    data: Text = None
    # number of clients; if not given as many as the data has of its own, else 20
    clients: Whole = None
    labels: Whole = None  # number of classes that each client holds
    # limit on the memory of data files and weights in bytes; half of the free memory if not given
    max_bytes: Whole = None
    seed: Whole = None  # random seed; if not given, that of the settings file, else 0
    assign: Assignments = ()  # any setting by its path, such as method.shift=2; may be given again

    def layers(self, base: Settings, method: str | None = None) -> tuple[Settings, dict[str, str]]:
        """Return settings in which the flags and `--set` replace those of `base`.

        Args:
            base: Settings below the flags. It is not changed.
            method: Name of the method. None: that of `base`.

        Returns:
            The settings, and the flag that set each path, such as "model.name".

        Raises:
            ConfigError: A `--set` cannot be parsed, or contradicts a flag.
        """
        from fedquilt.config.toml import parse_assignment
        from fedquilt.runs.overlay import assign_all

        values = {flag: getattr(self, flag, None) for flag in FLAGS} | {"method": method}
        sources: dict[str, str] = {}
        layers: list[tuple[list[str], Any]] = []
        problems = []
        for flag, value in values.items():
            if value is None or value == ():
                continue
            path = FLAGS[flag]
            if flag == "labels":
                value = {"name": flag, flag: value}
            elif flag == "model" and len(value) == 1:
                (value,) = value
            elif flag == "model":
                path, value = "model", list(value)
            layers.append((path.split("."), value))
            sources[path] = f"--{flag.replace('_', '-')}"
        flags = dict(sources)
        for text in self.assign:
            try:
                keys, value = parse_assignment(text)
            except ConfigError as error:
                problems.append(str(error))
                continue
            path = ".".join(keys)
            for flag_path, flag in flags.items():
                if f"{flag_path}.".startswith(f"{path}.") or path == f"{flag_path}.name":
                    problems.append(
                        f"--set {text} was asked for together with {flag}, which sets "
                        f"{flag_path}. One of them fits."
                    )
            layers.append((keys, value))
            sources[path] = "--set"
        if problems:
            raise ConfigError("\n  ".join(problems))
        return assign_all(base, layers), sources


@dataclass(frozen=True, kw_only=True)
class Options(DataOptions):
    """Options that `run` and `compare` have in common."""

    # model: a name of `fedquilt list models`, or file.py:factory; several are nets of one
    # federation
    model: Models = ()
    # task: a name of `fedquilt list tasks`, or file.py:Class; if not given, by targets and model
    task: Text = None
    engine: Text = None  # engine that trains the clients: a name of `fedquilt list engines`
    rounds: Whole = None  # number of rounds
    cohort: Number = None  # clients that take part in a round: a number, or below 1 a share of all
    device: Text = None  # device to train on, such as cpu, cuda or cuda:1
    # precision of matrix products on the device; with fp64 everything is computed in it
    precision: Precision = None
    # losses and compression of the transfers: a name of `fedquilt list links`
    link: Text = None
    lr: Real = None  # learning rate of local training
    batch_size: Whole = None  # batch size of local training
    epochs: Whole = None  # epochs of local training per round
    init: File = None  # weights to start from: a safetensors file, or a run's folder
    # supernet file: nets are searched for the fleet, and start from its weights (RaFL)
    supernet: File = None
    out: Place = None  # write the run's records and checkpoints into this folder
    # tracker that receives the run's numbers: tensorboard, wandb or mlflow; may be given again
    track: Names = ()
    # value of the task's main figure, such as an accuracy of 0.6: also show the cost of reaching it
    target: Real = None
    # resume the run in this folder; only --rounds, --target, --trust and --json go with it
    resume: Place = None
    # run the code that a run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print the result as JSON on standard output, and nothing else there

    def experiment(self, config: str | None, method: str | None) -> Experiment:
        """Return the experiment with the settings of a file, and the flags over them.

        Args:
            config: Path of a file. None: the demo's settings or the defaults.
            method: Name of the method. None: the file's, or the demo's.
        """
        from fedquilt.runs.experiment import Experiment

        settings, sources = self.settings(config, method)
        return Experiment.of(settings, sources, config or "")

    def settings(
        self, config: str | None, method: str | None, together: Sequence[str] = ()
    ) -> tuple[Settings, dict[str, str]]:
        """Return the settings of a file with the flags over them, and the flag that set each path.

        Args:
            config: Path of a file. None: the demo's settings or the defaults.
            method: Name of the method. None: the file's, or the demo's.
            together: Names of methods that it is compared with on the same data.
        """
        from fedquilt.runs.demo import DEMO, defaults, demo
        from fedquilt.runs.settings_file import read_settings

        name = method or DEMO["method"]["name"]
        if config:
            base = read_settings(config, self.trust)
        elif data := self._demo_data():
            base = demo(name, bool(self._preset()), data, together)
        elif self._names_model_or_data():
            base = defaults(name, self._names_model(), len(self.model))
        else:
            base = demo(name, bool(self._preset()), together=together)
        return self.layers(self._with_supernet(base, method), method)

    def _with_supernet(self, base: Settings, method: str | None) -> Settings:
        """Return settings with the model that --supernet needs, and with RaFL's setting (c).

        The latter is for methods that train pairs of nets. Without --supernet nothing changes.

        Args:
            base: Settings of the file, the demo or the defaults.
            method: Name of the method. None: that of `base`.

        Raises:
            ConfigError: --model is given too.
        """
        from fedquilt.runs.demo import trains_pairs
        from fedquilt.runs.model_settings import SEARCHED
        from fedquilt.runs.overlay import assign_all

        if self.supernet is None:
            return base
        if self.model:
            raise ConfigError(
                f"--supernet {self.supernet} was asked for together with --model "
                f"{' '.join(self.model)}; nets that start from a supernet are searched in its "
                "space. One of them fits."
            )
        layers: list[tuple[list[str], Any]] = [(["model", "name"], SEARCHED)]
        name = (
            method or base["method"].get("name", "")
            if isinstance(base["method"], dict)
            else base["method"]
        )
        if trains_pairs(name):
            layers.append((["method", "transfer"], True))
        return assign_all(base, layers)

    def source(self, config: str | None, method: str | None) -> str:
        """Return a text on the source of the settings, for a run's first line.

        It is the path of the file, or names the demo, the method's preset or its defaults.

        Args:
            config: Path of a file. None: there is none.
            method: Name of the method. None: the demo's.
        """
        from fedquilt.runs.demo import DEMO, is_made_by_function

        if config:
            return config
        name, preset = method or DEMO["method"]["name"], self._preset()
        method_source = f"{name}'s preset {preset}" if preset else f"{name}'s defaults"
        data = self._demo_data()
        if self._names_model_or_data() and not data:
            return method_source
        demo = f"demo of {data}" if data else "demo"
        return f"{demo}, {method_source}" if preset or is_made_by_function(name) else demo

    def _names_model_or_data(self) -> bool:
        """Return True if a flag or `--set` names the model or the data.

        The demo's federation is then not used, because it belongs to the demo's model and data.
        """
        paths = {text.partition("=")[0].strip() for text in self.assign}
        return bool(self.model or self.data or paths & {"model", "model.name", "data", "data.name"})

    def _demo_data(self) -> str:
        """Return the name of the data set given by --data, if it is bundled and has its own demo.

        The result is empty if it has none, or if a model is named too. It is also empty for the
        data of the demo without arguments, because naming it asks for the method's defaults.
        """
        from fedquilt.runs.demo import DEMO, DEMOS

        has_demo = self.data in DEMOS and self.data != DEMO["data"]["name"]
        return self.data if self.data and has_demo and not self._names_model() else ""

    def _names_model(self) -> bool:
        """Return True if a flag names the model, or `--set` one of its options.

        If not, the data decides the model.
        """
        paths = [text.partition("=")[0].strip() for text in self.assign]
        return bool(self.model) or any(path.split(".")[0] == "model" for path in paths)

    def _preset(self) -> str:
        """Return the preset that `--set method.preset=…` asks for, or an empty string."""
        preset = ""
        for text in self.assign:
            path, _, value = text.partition("=")
            if path.strip() == "method.preset":
                preset = value.strip(" \"'")
        return preset

    def check_target(self) -> None:
        """Refuse a target that is not a number, before anything is loaded.

        The range of the task's main figure is checked later, when the task is known.
        """
        from fedquilt.runs.milestones import check_target

        if self.target is not None:
            check_target(self.target)

    def check_resume(self, *others: str) -> None:
        """Refuse flags beside --resume, because a resumed run has its own settings.

        Args:
            others: Fields of a command that are accepted with --resume, besides those of all
                commands.
        """
        beside = [
            f"--{'set' if option.name == 'assign' else option.name.replace('_', '-')}"
            for option in fields(self)
            if option.name not in ("resume", "rounds", "target", "json", "methods", *others)
            and getattr(self, option.name) != option.default
        ]
        if beside:
            fitting = ", ".join(f"--{name.replace('_', '-')}" for name in ("target", *others))
            raise ConfigError(
                f"--resume {self.resume} was asked for together with {', '.join(beside)}; a run "
                f"keeps its own settings, and only --rounds (to train longer), {fitting} "
                "and --json go with it."
            )
