"""States of a run that are read from the checkpoints in its folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from fedquilt.errors import RecordError
from fedquilt.hardware.device import device_of
from fedquilt.runs.about import problem_in_about, problem_in_weights
from fedquilt.runs.best import Best
from fedquilt.runs.checkpoint import Checkpoints, Manifest
from fedquilt.runs.client_states import ClientStates
from fedquilt.runs.fingerprint import ROSTER, check_same_run, is_of_partition, leaves_of
from fedquilt.runs.folder_files import check_folder, log_until, read_log, warn_of_missing_rounds
from fedquilt.terms import Server

if TYPE_CHECKING:
    from fedquilt.runs.run import Run


def load_state(path: str | Path, device: str = "cpu") -> Server:
    """Return the newest intact state of the server in a run's folder, without the run.

    Neither the data nor the model is needed. `load_run` rebuilds the whole run instead.

    Args:
        path: Folder of the run.
        device: Device for the tensors, as torch names it.

    Returns:
        The state after a round: `weights` by name, `slots` and `extras` of the method, and client
        states (`memory`), which are read from disk when they are looked up.

    Raises:
        RecordError: There is no checkpoint, or none is intact.
    """
    return load_newest(path, device)[0]


def load_newest(path: str | Path, device: str = "cpu") -> tuple[Server, Manifest]:
    """Return the newest intact state in a run's folder, and its manifest.

    Args:
        path: Folder of the run.
        device: Device for the tensors, as torch names it.

    Raises:
        RecordError: There is no checkpoint, or none is intact.
    """
    torch_device = device_of(device)
    check_folder(Path(path))

    def check(manifest: Manifest, server: Server) -> str:
        damage = problem_in_about(manifest)
        return f"{manifest.name} is not what was written: {damage}" if damage else ""

    newest_state = Checkpoints(Path(path) / "checkpoint").load(
        ClientStates(device=torch_device), torch_device, check
    )
    if newest_state is None:
        raise RecordError(f"the weights in {path} were asked for; there is no checkpoint there.")
    return newest_state


def reopen(path: str | Path, run: Run, saved: tuple[Server, Manifest]) -> Run:
    """Put a state into a run that was prepared with the same settings, without resuming it.

    Nothing is locked or written. Engine, device and fleet may differ. If the run has no data, the
    data is not compared.

    Args:
        path: Folder of the run.
        run: A prepared run. Its state, records, folder and best round are replaced.
        saved: State and manifest, as `load_newest` returns them.

    Returns:
        The same run.

    Raises:
        ConfigError: The state is one of another run.
    """
    server, manifest = saved
    _check_deployable(manifest, run, f"the run in {path} was asked for")
    run.server = server
    run.folder = Path(path)
    run.best = Best.from_dict(manifest.about.get("best"), run.folder)
    log = log_until(read_log(path), manifest)
    warn_of_missing_rounds(Path(path) / "rounds.jsonl", log, server.round)
    run.records[:] = log.records
    return run


def state_after(path: Path, round: int, run: Run) -> Server:
    """Return the state after a round from a checkpoint in the folder of a run.

    Args:
        path: Folder of the run.
        round: Number of the round.
        run: The run, whose settings must be those of the checkpoint.

    Raises:
        RecordError: There is no such checkpoint, or it is damaged.
        ConfigError: It is the state of another run.
    """
    check_folder(path)
    device = run.engine.device
    server, manifest = Checkpoints(path / "checkpoint").load_round(
        round, ClientStates(device=device), device
    )
    if damage := problem_in_about(manifest) or problem_in_weights(server, run.server):
        raise RecordError(
            f"the state after round {round} was asked for; its checkpoint in {path} is damaged: "
            f"{damage}."
        )
    _check_deployable(manifest, run, f"the state after round {round} in {path} was asked for")
    return server


def _check_deployable(manifest: Manifest, run: Run, request: str) -> None:
    """Refuse a state of another method, model or data. Missing data is not compared.

    Neither is the partition of data whose clients were those of a roster.

    Args:
        manifest: Manifest of the state's checkpoint.
        run: Run that the state is put into.
        request: Beginning of the message.

    Raises:
        ConfigError: Some settings differ. The message lists them.
    """
    parts = ["method", "model", "constants"]
    if not run.absent:
        parts.append("data")
    has_roster = manifest.about["run"].get("fleet") == ROSTER

    def is_compared(name: str) -> bool:
        is_state = has_roster and is_of_partition(name)
        return re.split(r"[.\[]", name)[0] in parts and not is_state

    saved = {name: value for name, value in manifest.about["run"].items() if is_compared(name)}
    run_leaves = [leaf for leaf in leaves_of(run) if is_compared(leaf.name)]
    check_same_run(saved, run_leaves, request)
