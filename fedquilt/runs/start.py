"""`fedquilt.run`: train one federation from Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fedquilt.data import FederatedData
from fedquilt.engines.simulation import Simulation
from fedquilt.family import Family
from fedquilt.hardware.precision import Precision
from fedquilt.methods import Method
from fedquilt.round import Evaluation, Fleet, Record
from fedquilt.round.link import PERFECT, Link
from fedquilt.runs.arguments import check_argument, whole_number
from fedquilt.runs.checkpoint import Checkpointing
from fedquilt.runs.client_states import DEFAULT_LIMIT
from fedquilt.runs.description import run_settings
from fedquilt.runs.fingerprint import fingerprint
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import holds_a_run, rounds_planned
from fedquilt.runs.loop import complete
from fedquilt.runs.prepare import prepare
from fedquilt.runs.recipe import config_text
from fedquilt.runs.run import Run
from fedquilt.runs.tracking import Tracking
from fedquilt.tasks import Task


def run(
    method: Method,
    family: Family,
    data: FederatedData,
    fleet: Fleet,
    engine: str | Simulation = "vectorized",
    rounds: int = 10,
    seed: int = 0,
    device: str = "cpu",
    precision: Precision = "fp32",
    evaluation: Evaluation | None = None,
    watch: Callable[[Record], None] | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    checkpoint: Checkpointing = Checkpointing(),
    client_state_memory: int = DEFAULT_LIMIT,
    trackers: Sequence[Tracking] = (),
    link: Link = PERFECT,
    task: Task | str | None = None,
) -> Run:
    """Train a family on a fleet's data, and return the finished run.

    The command line can open the folder `out` if all parts can be made again by their names
    (docs/runs.md). An error that is raised in a round has the run, with its last good state, as
    `error.run`.

    Args:
        method: Method of federated learning, with its settings.
        family: Model, as `fq.trace` returns it.
        data: Samples of the clients.
        fleet: Clients and their budgets.
        engine: Name of an engine, or an engine, such as that of another run.
        rounds: Total number of rounds.
        seed: Random seed of the run.
        device: Device that clients are trained on, as torch names it.
        precision: Precision of training.
        evaluation: When and how to evaluate. None: the defaults of `Evaluation`.
        watch: Function that is called with the record of every round. None: none is.
        out: Folder that the run is recorded in. None: it is not recorded.
        resume: Continue from the checkpoint in `out`. No effect if the folder has no run.
        checkpoint: Settings of when to save a checkpoint.
        client_state_memory: Bytes of client states kept in memory. Further states are kept on disk.
        trackers: Trackers that log the records: TensorBoard, Weights & Biases, MLflow
            (`tracking.py`).
        link: Link between server and clients, such as `fq.Link.preset("lossy-mild")`. The default
            loses nothing.
        task: Loss and metrics, such as `fq.tasks.Regression(loss="huber")`, or a name of `fedquilt
            list tasks`. None: it is inferred from the targets and the model's output.
    """
    rounds = whole_number("rounds", rounds)
    for tracker in trackers:
        tracker.check()
    check_argument("run", method, Method, "fq.methods.FedAvg()")
    is_resumed = resume and out is not None and holds_a_run(Path(out))
    settled_for = rounds_planned(Path(out), rounds) if out and is_resumed else rounds
    method = method.settled(settled_for)
    prepared = prepare(
        method,
        family,
        data,
        fleet,
        engine,
        seed,
        device,
        precision,
        evaluation,
        client_state_memory,
        link,
        task,
    )
    prepared.settled_for = settled_for
    try:
        with ExitStack() as stack:
            folder = None
            if out is not None:
                folder = stack.enter_context(
                    Folder.resume(out, checkpoint)
                    if is_resumed
                    else Folder.create(
                        out, config_text(prepared, rounds, checkpoint, trackers), checkpoint
                    )
                )
                if is_resumed:
                    folder.load(prepared)
                    folder.extend(rounds)
            complete(
                prepared,
                rounds,
                folder=folder,
                path=Path(out) if out else None,
                trackers=trackers,
                settings=_tracked_settings(prepared, rounds) if trackers else {},
                watch=watch,
            )
        return prepared
    except Exception as error:
        error.run = prepared  # type: ignore[attr-defined]  # The trained state is not lost.
        raise


def _tracked_settings(run: Run, rounds: int) -> dict[str, Any]:
    """Return a description of a run from Python, with all settings of its method."""
    method = {name: value for name, value in fingerprint(run).items() if name.startswith("method.")}
    return {**run_settings(run, rounds), **method}
