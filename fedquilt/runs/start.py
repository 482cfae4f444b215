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


def run(  # noqa: PLR0913
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
    """Train a model on the data of a fleet, and return the finished run.

    Each round samples clients and sends every one a sub-model that fits its budget. The clients
    train on their own samples, and the server merges what they send back. `prepare` builds the same
    run without training it.

    With `out`, settings, records and checkpoints are written to a folder, from which the run can be
    resumed after a crash. The command line can open the folder, too, if files can name all parts of
    the run (docs/runs.md).

    Args:
        method: Method of federated learning with its settings, such as `fq.methods.HeteroFL()`.
        family: Model whose sub-models are trained, as `fq.trace` returns it.
        data: Samples, partitioned among at least as many clients as the fleet has.
        fleet: Clients, their budgets, and how many of them are sampled in a round.
        engine: Name of an engine (`fedquilt list engines`), or an engine object. The engine of
            another run on the same family and samples keeps its captured CUDA graphs.
        rounds: Number of rounds that the run has at the end. A resumed run trains the missing ones.
        seed: Random seed of initial weights, cohorts and batches, from 0 to 2**63 - 1.
        device: Device that clients are trained on, as torch names it. No effect if `engine` is an
            object.
        precision: Precision of training: `fp32`, `fp64`, `tf32` or `bf16`. No effect if `engine` is
            an object.
        evaluation: When and how to evaluate. None: the defaults of `Evaluation`.
        watch: Function that is called with the `Record` of every round when it has ended. None:
            no function is called.
        out: Folder that the run is written to. It may exist, but must have no run unless `resume`
            is True. None: nothing is written.
        resume: True: continue from the newest checkpoint in `out`. No effect if there is none.
        checkpoint: How often a checkpoint is saved. No effect without `out`.
        client_state_memory: Bytes of client states that are kept in memory. Further states are kept
            on disk. No effect for methods whose clients keep no state.
        trackers: Trackers that log the records as well: `TensorBoard`, `WandB` or `MLflow` of
            `fedquilt.runs.tracking`. Empty: none.
        link: Link between server and clients, such as `fq.Link.preset("lossy-mild")`. The default
            loses nothing, encodes nothing and takes no time.
        task: Loss and metrics, such as `fq.tasks.Regression(loss="huber")`, or a name of `fedquilt
            list tasks`. None: the task is inferred from the targets and the model's output.

    Returns:
        The run after its last round, to evaluate, deploy, export or train further.

    Raises:
        ConfigError: Some arguments do not fit together, or `out` already has a run.
        BudgetError: No sub-model fits the budget of some client.
        TrainingError: Local training of a client failed. Every error of a round has the run with
            its last completed round as `error.run`.

    Example:
        Half of the clients train the whole net, and the other half trains half of its channels.

        >>> import torch
        >>> import fedquilt as fq
        >>> samples = torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 2
        >>> data = fq.data.Pool.of(samples, test=samples).partition(4)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> family = fq.trace(net, data.example)
        >>> fleet = fq.Fleet.of([1.0, 0.5], num_clients=4, cohort=2)
        >>> run = fq.run(fq.methods.HeteroFL(), family, data, fleet, rounds=3)
        >>> [record.round for record in run.records]
        [1, 2, 3]
        >>> sorted(run.accuracy)  # Keys are the shares of the model that were evaluated.
        ['0.5', '1.0']
        >>> run.deploy(share=0.5)
        Sequential(
          (0): Linear(in_features=4, out_features=4, bias=True)
          (1): ReLU()
          (2): Linear(in_features=4, out_features=2, bias=True)
        )
    """
    rounds = whole_number("rounds", rounds)
    for tracker in trackers:
        tracker.check()
    check_argument("run", method, Method, "fq.methods.FedAvg()")
    is_resumed = resume and out is not None and holds_a_run(Path(out))
    settled_for = rounds
    if out is not None and is_resumed:
        settled_for = rounds_planned(Path(out), rounds)
    prepared = prepare(
        method.settled(settled_for),
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
            folder: Folder | None = None
            if out is not None and is_resumed:
                folder = stack.enter_context(Folder.resume(out, checkpoint))
                folder.load(prepared)
                folder.extend(rounds)
            elif out is not None:
                config = config_text(prepared, rounds, checkpoint, trackers)
                folder = stack.enter_context(Folder.create(out, config, checkpoint))
            complete(
                prepared,
                rounds,
                folder=folder,
                trackers=trackers,
                settings=_tracked_settings(prepared, rounds) if trackers else {},
                watch=watch,
            )
        return prepared
    except Exception as error:
        error.run = prepared  # type: ignore[attr-defined]  # The trained state is not lost.
        raise


def _tracked_settings(run: Run, rounds: int) -> dict[str, Any]:
    """Return a description of a run from Python for trackers, with all settings of its method.

    Args:
        run: The run.
        rounds: Total number of rounds.
    """
    method = {name: value for name, value in fingerprint(run).items() if name.startswith("method.")}
    return {**run_settings(run, rounds), **method}
