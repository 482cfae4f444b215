"""A run's numbers in TensorBoard, Weights & Biases or MLflow, beside its own folder.

A `Tracking` is settings; opened, it is a `Tracker`, told of every round. What cannot be opened is an error before the
first round; what fails later is told once, and the run goes on without it: three days of training are worth more than
their curves, which `rounds.jsonl` has anyway.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import math
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from fedquilt.errors import ConfigError, FedquiltError, RecordError
from fedquilt.files import why, write
from fedquilt.names import said
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.experiment import Run
    from fedquilt.round import Record

_log = logging.getLogger("fedquilt")

Scalar = bool | int | float | str


@dataclass(frozen=True)
class About:
    """What a tracker is told of a run when it opens."""

    id: str  # the same whenever the run goes on
    name: str
    config: Mapping[str, Scalar]  # everything set, by its path
    done: int  # rounds behind it; those after it may have been told before, and will be again
    measures: tuple[str, ...]  # names of what is worth comparing between runs
    folder: Path | None = None  # the run's own


class Tracker(Protocol):
    def log(self, record: Record) -> None:
        """A round is over."""

    def finish(self, summary: Mapping[str, Any], whole: bool) -> None:
        """The run is over: played to its end, or stopped before."""


@dataclass(frozen=True)
class Tracking(ABC):
    """Where a run is tracked: settings, of which a subclass says how to open them."""

    package: ClassVar[str] = ""  # what it imports
    extra: ClassVar[str] = ""  # of fedquilt, that installs it

    def check(self) -> None:
        """Whether its package is there; asked before anything heavy."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"tracking with {type(self).__name__} was asked for; it needs the package {self.package}, which is not "
                f"installed: pip install 'fedquilt[{self.extra}]'."
            )

    @abstractmethod
    def open(self, about: About) -> Tracker:
        """Begin to track a run, or go on where it stood."""


def scalars(record: Record) -> dict[str, float]:
    """A record as numbers by name: `loss`, `bytes_up`, `accuracy/0.5` …; what is no number is left out."""
    plain = record.to_dict()
    plain.pop("accuracy", None)  # the metrics have it
    plain.pop("main", None)
    grades = plain.pop("metrics", {})
    plain |= {
        f"{name}/{label}": value
        for name, values in grades.items()
        for label, value in values.items()
    }
    del plain["round"]
    return {
        name: value for name, value in plain.items() if value is not None and math.isfinite(value)
    }


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Scalar]:
    """Nested settings by their paths; lists as text."""
    found: dict[str, Scalar] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{path}{key}.")
        else:
            found[path + key] = value if isinstance(value, Scalar) else json.dumps(value)
    return found


# --- three of them ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorBoard(Tracking):
    """Event files, for `tensorboard --logdir`."""

    dir: str = ""  # a folder, in which the run has one of its own; "": tensorboard/ in the run's folder, or here

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    def open(self, about: About) -> Tracker:
        board: Any = importlib.import_module("torch.utils.tensorboard")  # without types
        own = Path(self.dir or "tensorboard") / about.name
        if about.folder and not self.dir:
            own = about.folder / "tensorboard"
        # Readers forget what was told of later rounds before the run went on from here.
        writer = board.SummaryWriter(str(own), purge_step=about.done + 1)
        for summary in board.summary.hparams(
            dict(about.config), dict.fromkeys(about.measures, 0.0)
        ):
            writer.file_writer.add_summary(summary)
        return _TensorBoard(writer)


@dataclass
class _TensorBoard:
    writer: Any

    def log(self, record: Record) -> None:
        for name, value in scalars(record).items():
            self.writer.add_scalar(name, value, record.round)
        self.writer.flush()  # a killed run has told all it had

    def finish(self, summary: Mapping[str, Any], whole: bool) -> None:
        self.writer.close()


@dataclass(frozen=True)
class WandB(Tracking):
    """Weights & Biases: its site or a server of one's own, or files for `wandb sync` later."""

    project: str = "fedquilt"
    entity: str = ""  # a user or a team; "": that of the login
    mode: Literal["online", "offline"] = "online"
    dir: str = ""  # where its folder wandb/ is; "": in the run's folder, or here

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    def open(self, about: About) -> Tracker:
        import wandb

        run = wandb.init(
            project=self.project,
            entity=self.entity or None,
            mode=self.mode,
            dir=self.dir
            or about.folder
            or Path.cwd(),  # left open, it is where wandb was first used
            id=about.id,
            name=about.name,
            config=dict(about.config),
            resume="allow",
            reinit="create_new",  # beside others: `compare`, or a run of the caller's
            settings=wandb.Settings(console="off"),
        )
        return _WandB(run, run.step)


@dataclass
class _WandB:
    run: Any
    first: int  # online it knows how far it was told: steps may not be told twice

    def log(self, record: Record) -> None:
        if record.round >= self.first:
            self.run.log(scalars(record), step=record.round, commit=True)

    def finish(self, summary: Mapping[str, Any], whole: bool) -> None:
        self.run.summary.update(
            {f"total/{name}": summary[name] for name in ("seconds", "bytes_down", "bytes_up")}
        )
        self.run.finish(exit_code=0 if whole else 1)


@dataclass(frozen=True)
class MLflow(Tracking):
    """An MLflow server, or a database file."""

    uri: str = ""  # such as http://host:5000; "": MLFLOW_TRACKING_URI, else sqlite:///mlflow.db
    experiment: str = "fedquilt"

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    def open(self, about: About) -> Tracker:
        # Else a server that is gone holds a round up for many minutes before that is an error.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(
            self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        )
        known = client.get_experiment_by_name(self.experiment)
        experiment = known.experiment_id if known else client.create_experiment(self.experiment)
        found = client.search_runs([experiment], f"tags.`fedquilt.id` = '{about.id}'")
        run = (
            found[0]
            if found
            else client.create_run(experiment, run_name=about.name, tags={"fedquilt.id": about.id})
        )
        id = run.info.run_id
        client.update_run(id, status="RUNNING")
        params = [
            Param(name, str(value))
            for name, value in about.config.items()
            if name not in run.data.params
        ]
        for start in range(0, len(params), _BATCH):  # what is there already may not change
            client.log_batch(id, params=params[start : start + _BATCH])
        told = {
            name: max(one.step for one in client.get_metric_history(id, name))
            for name in run.data.metrics
        }
        return _MLflow(client, id, told)


_BATCH = 100  # parameters that MLflow takes at a time


@dataclass
class _MLflow:
    client: Any
    id: str
    told: Mapping[str, int] = field(default_factory=dict)  # up to which round, by name

    def log(self, record: Record) -> None:
        from mlflow.entities import Metric

        now, step = int(time.time() * 1000), record.round
        # Domains are called what they like, and are part of a metric's name, of which MLflow takes few characters.
        plain = {re.sub(r"[^\w./: -]", "_", name): value for name, value in scalars(record).items()}
        new = {name: value for name, value in plain.items() if step > self.told.get(name, 0)}
        self.client.log_batch(
            self.id, metrics=[Metric(name, value, now, step) for name, value in new.items()]
        )

    def finish(self, summary: Mapping[str, Any], whole: bool) -> None:
        self.client.set_terminated(self.id, status="FINISHED" if whole else "KILLED")


TRACKERS: dict[str, type[Tracking]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


# --- while a run goes on ----------------------------------------------------------------------------------------


@contextmanager
def tracked(
    trackings: Sequence[Tracking], run: Run, config: Mapping[str, Any], folder: Path | None = None
) -> Iterator[Callable[[Record], None]]:
    """Open all of them for a run, and give what to call after every round.

    Call it before the round is saved: a run that is killed in between plays the round again, and tells it again.
    """
    opened: list[tuple[str, Tracker]] = []
    whole = False
    try:
        about = _about(run, config, folder) if trackings else None
        for one in trackings:
            assert about is not None
            one.check()
            try:
                opened.append((type(one).__name__, one.open(about)))
            except FedquiltError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"tracking with {type(one).__name__} was asked for; it could not be opened. {said(error)}"
                ) from error
        yield lambda record: _each(opened, f"in round {record.round}", lambda one: one.log(record))
        whole = True
    finally:
        _each(opened, "at the end", lambda one: one.finish(run.summary, whole))


def _each(opened: list[tuple[str, Tracker]], when: str, do: Callable[[Tracker], None]) -> None:
    for name, one in list(opened):
        try:
            do(one)
        except Exception as error:
            opened.remove((name, one))
            _log.warning(
                "Tracking with %s failed %s, and the run goes on without it. %s",
                name,
                when,
                said(error),
            )


def _about(run: Run, config: Mapping[str, Any], folder: Path | None) -> About:
    from fedquilt.round.labels import share_label, tested_budgets

    budgets = tested_budgets(run.method, run.fleet.kinds) or (Budget(share=1.0),)
    id, shares = _id(folder), [share_label(run.method, budget, run.world) for budget in budgets]
    measures = ("loss", *(f"{run.world.task.main.name}/{share}" for share in shares))
    return About(
        id,
        f"{run.summary['method'].lower()}-{id}",
        flat(config),
        run.server.round,
        measures,
        folder,
    )


def _id(folder: Path | None) -> str:
    """What the run is known by elsewhere; its folder remembers it."""
    file = folder / "tracking.json" if folder else None
    if file and file.exists():
        try:
            return str(json.loads(file.read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{file} says what the run is tracked as; it cannot be read: {said(error)}."
            ) from error
    id = uuid.uuid4().hex[:8]
    if file:
        try:
            write(file, [(json.dumps({"id": id}) + "\n").encode()])
        except OSError as error:
            raise RecordError(f"{file} could not be written: {why(error)}.") from error
    return id
