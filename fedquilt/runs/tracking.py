"""Logging of a run to TensorBoard, Weights & Biases or MLflow, besides its own folder.

A `Tracking` has settings, and opening it returns a `Tracker`, which logs every round. A tracker
that cannot be opened is an error before the first round. If one fails later, a warning is logged
once and the run continues without it, because `rounds.jsonl` has all numbers as well.
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

from typing_extensions import override

from fedquilt.errors import ConfigError, FedquiltError, RecordError
from fedquilt.errors.extras import how_to_install
from fedquilt.names import said
from fedquilt.storage.files import why, write
from fedquilt.terms import Budget

if TYPE_CHECKING:
    from fedquilt.round import Record
    from fedquilt.runs.run import Run

_log = logging.getLogger("fedquilt")

Scalar = bool | int | float | str


@dataclass(frozen=True)
class About:
    """Description of a run for a tracker that is opened."""

    id: str  # Identifier, which stays the same when the run is resumed
    name: str  # Name of the run in the tracker
    config: Mapping[str, Scalar]  # All settings by dotted path
    done: int  # Completed rounds. Later ones may have been logged before, and are logged again
    measures: tuple[str, ...]  # Names of metrics that are compared between runs
    folder: Path | None = None  # Folder of the run. None: it has none


class Tracker(Protocol):
    """A tracker that is open for one run."""

    def log(self, record: Record) -> None:
        """Log the record of a round."""

    def finish(self, summary: Mapping[str, Any], is_complete: bool) -> None:
        """End the tracking of a run.

        Args:
            summary: Summary of the run.
            is_complete: True if the run completed all rounds. False if it was stopped before.
        """


@dataclass(frozen=True)
class Tracking(ABC):
    """Settings of a tracker. Subclasses define how it is opened."""

    package: ClassVar[str] = ""  # Package that the tracker imports
    extra: ClassVar[str] = ""  # Extra of fedquilt that installs the package

    def check(self) -> None:
        """Refuse a tracker whose package is not installed, before any expensive step."""
        if self.package and importlib.util.find_spec(self.package) is None:
            raise ConfigError(
                f"tracking with {type(self).__name__} was asked for; it needs the package "
                f"{self.package}, which is not installed: {how_to_install(self.extra)}."
            )

    @abstractmethod
    def open(self, about: About) -> Tracker:
        """Start to track a run, or continue after it was resumed.

        Args:
            about: Description of the run. Its id stays the same when the run is resumed.
        """


def scalars(record: Record) -> dict[str, float]:
    """Return the finite numbers of a record by name, such as `loss` and `accuracy/0.5`.

    The number of the round, missing values, and tables such as `attendance` are left out.
    """
    plain = record.to_dict()
    plain.pop("accuracy", None)  # It is one of the metrics.
    plain.pop("main", None)
    plain.pop("late_clients", None)  # `late` is their number.
    grades = plain.pop("metrics", {})
    plain |= {
        f"{name}/{label}": value
        for name, values in grades.items()
        for label, value in values.items()
    }
    del plain["round"]
    return {
        name: value
        for name, value in plain.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def flat(settings: Mapping[str, Any], path: str = "") -> dict[str, Scalar]:
    """Return nested settings as one table by dotted path. Lists are converted to JSON text.

    Args:
        settings: Nested settings.
        path: Prefix of all paths, with its dot at the end. Empty: there is none.
    """
    by_path: dict[str, Scalar] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            by_path |= flat(value, f"{path}{key}.")
        else:
            by_path[path + key] = value if isinstance(value, Scalar) else json.dumps(value)
    return by_path


# --- trackers -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TensorBoard(Tracking):
    """Event files, for `tensorboard --logdir`."""

    # Folder in which the run gets a folder of its own. Empty: tensorboard/ in the run's folder, or
    # in the working directory
    dir: str = ""

    package: ClassVar[str] = "tensorboard"
    extra: ClassVar[str] = "tensorboard"

    @override
    def open(self, about: About) -> Tracker:
        board: Any = importlib.import_module("torch.utils.tensorboard")  # It has no types.
        log_folder = Path(self.dir or "tensorboard") / about.name
        if about.folder and not self.dir:
            log_folder = about.folder / "tensorboard"
        # Readers drop rounds after this one that were logged before the run was resumed.
        writer = board.SummaryWriter(str(log_folder), purge_step=about.done + 1)
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
        self.writer.flush()  # A killed run has logged all its rounds.

    def finish(self, summary: Mapping[str, Any], is_complete: bool) -> None:
        self.writer.close()


@dataclass(frozen=True)
class WandB(Tracking):
    """Weights & Biases: its site, a private server, or files for a later `wandb sync`."""

    project: str = "fedquilt"  # Name of the W&B project
    entity: str = ""  # User or team that owns the run. Empty: that of the login
    # "online": send to a server. "offline": write files for a later `wandb sync`
    mode: Literal["online", "offline"] = "online"
    # Folder that wandb/ is created in. Empty: the run's folder, or the working directory
    dir: str = ""

    package: ClassVar[str] = "wandb"
    extra: ClassVar[str] = "wandb"

    @override
    def open(self, about: About) -> Tracker:
        import wandb

        run = wandb.init(
            project=self.project,
            entity=self.entity or None,
            mode=self.mode,
            # Without it, wandb would use the folder of its first run in this process.
            dir=self.dir or about.folder or Path.cwd(),
            id=about.id,
            name=about.name,
            config=dict(about.config),
            resume="allow",
            reinit="create_new",  # Other runs of this process may be open.
            settings=wandb.Settings(console="off"),
        )
        return _WandB(run, run.step)


@dataclass
class _WandB:
    run: Any
    first: int  # First round to log, because W&B accepts no step twice

    def log(self, record: Record) -> None:
        if record.round >= self.first:
            self.run.log(scalars(record), step=record.round, commit=True)

    def finish(self, summary: Mapping[str, Any], is_complete: bool) -> None:
        self.run.summary.update(
            {f"total/{name}": summary[name] for name in ("seconds", "bytes_down", "bytes_up")}
        )
        self.run.finish(exit_code=0 if is_complete else 1)


@dataclass(frozen=True)
class MLflow(Tracking):
    """MLflow: a server, or a database file."""

    # Address such as http://host:5000. Empty: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db
    uri: str = ""
    experiment: str = "fedquilt"  # Name of the MLflow experiment

    package: ClassVar[str] = "mlflow"
    extra: ClassVar[str] = "mlflow"

    @override
    def open(self, about: About) -> Tracker:
        # Without these, a server that is down delays a round for many minutes before it fails.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        client = MlflowClient(
            self.uri or os.environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        )
        existing = client.get_experiment_by_name(self.experiment)
        experiment = (
            existing.experiment_id if existing else client.create_experiment(self.experiment)
        )
        earlier_runs = client.search_runs([experiment], f"tags.`fedquilt.id` = '{about.id}'")
        if earlier_runs:
            run = earlier_runs[0]
        else:
            tags = {"fedquilt.id": about.id}
            run = client.create_run(experiment, run_name=about.name, tags=tags)
        id = run.info.run_id
        client.update_run(id, status="RUNNING")
        params = [
            Param(name, str(value))
            for name, value in about.config.items()
            if name not in run.data.params
        ]
        for start in range(0, len(params), _BATCH):  # Existing parameters cannot be changed.
            client.log_batch(id, params=params[start : start + _BATCH])
        logged_rounds = {
            name: max(point.step for point in client.get_metric_history(id, name))
            for name in run.data.metrics
        }
        return _MLflow(client, id, logged_rounds)


_BATCH = 100  # Largest number of parameters that MLflow accepts per call


@dataclass
class _MLflow:
    client: Any
    id: str
    logged_rounds: Mapping[str, int] = field(default_factory=dict)  # Last logged round by metric

    def log(self, record: Record) -> None:
        from mlflow.entities import Metric

        milliseconds, step = int(time.time() * 1000), record.round
        # Names of metrics contain names of domains, and MLflow allows few characters in them.
        plain = {re.sub(r"[^\w./: -]", "_", name): value for name, value in scalars(record).items()}
        new = {
            name: value for name, value in plain.items() if step > self.logged_rounds.get(name, 0)
        }
        self.client.log_batch(
            self.id,
            metrics=[Metric(name, value, milliseconds, step) for name, value in new.items()],
        )

    def finish(self, summary: Mapping[str, Any], is_complete: bool) -> None:
        self.client.set_terminated(self.id, status="FINISHED" if is_complete else "KILLED")


TRACKERS: dict[str, type[Tracking]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}


# --- during a run -------------------------------------------------------------------------------


@contextmanager
def tracked(
    trackings: Sequence[Tracking], run: Run, config: Mapping[str, Any], folder: Path | None = None
) -> Iterator[Callable[[Record], None]]:
    """Open trackers for a run, and yield a function to call with the record of every round.

    Call it before the round is saved. A run that is killed in between repeats the round and logs it
    again.

    Args:
        trackings: Settings of the trackers.
        run: The run.
        config: Settings of the run that trackers show.
        folder: Folder of the run. None: it has none.
    """
    opened: list[tuple[str, Tracker]] = []
    is_complete = False
    try:
        description = _about(run, config, folder) if trackings else None
        for tracking in trackings:
            assert description is not None
            tracking.check()
            try:
                opened.append((type(tracking).__name__, tracking.open(description)))
            except FedquiltError:
                raise
            except Exception as error:
                raise ConfigError(
                    f"tracking with {type(tracking).__name__} was asked for; it could not be "
                    f"opened. {said(error)}"
                ) from error
        yield lambda record: _call_each(
            opened, f"in round {record.round}", lambda tracker: tracker.log(record)
        )
        is_complete = True
    finally:
        _call_each(opened, "at the end", lambda tracker: tracker.finish(run.summary, is_complete))


def _call_each(
    opened: list[tuple[str, Tracker]], moment: str, call: Callable[[Tracker], None]
) -> None:
    """Call a function with every open tracker.

    A tracker that raises an exception is removed from `opened`, and a warning is logged.

    Args:
        opened: Trackers with the names of their classes. It is changed.
        moment: Moment of the call, for the warning.
        call: Function that logs or finishes.
    """
    for name, tracker in list(opened):
        try:
            call(tracker)
        except Exception as error:
            opened.remove((name, tracker))
            _log.warning(
                "Tracking with %s failed %s, and the run continues without it. %s",
                name,
                moment,
                said(error),
            )


def _about(run: Run, config: Mapping[str, Any], folder: Path | None) -> About:
    """Return the description of a run that trackers are opened with.

    Args:
        run: The run.
        config: Nested settings of the run that trackers show.
        folder: Folder of the run. None: it has none.
    """
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
    """Return the identifier of a run for trackers, which its folder stores in tracking.json.

    If the file does not exist, a random identifier is drawn and written. Without a folder, every
    call draws another one.

    Args:
        folder: Folder of the run. None: it has none.

    Raises:
        RecordError: The file cannot be read or written.
    """
    file = folder / "tracking.json" if folder else None
    if file and file.exists():
        try:
            return str(json.loads(file.read_text())["id"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RecordError(
                f"{file} has the identifier for trackers; it cannot be read: {said(error)}."
            ) from error
    id = uuid.uuid4().hex[:8]
    if file:
        try:
            write(file, [(json.dumps({"id": id}) + "\n").encode()])
        except OSError as error:
            raise RecordError(f"{file} could not be written: {why(error)}.") from error
    return id
