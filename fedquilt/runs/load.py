"""`fedquilt.load_run`: rebuild a run from its folder, to deploy from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fedquilt.checks import missing
from fedquilt.config.toml import Settings
from fedquilt.data import FederatedData, Partition, Pool
from fedquilt.data.parts import Parts
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.runs.data_settings import DEFAULT_CLIENTS
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import check_folder, lacking_samples
from fedquilt.runs.run import Run
from fedquilt.runs.saved_state import load_newest, reopen
from fedquilt.runs.settings_file import read_settings


def load_run(path: str | Path, device: str = "cpu", trust: bool = False) -> Run:
    """Return the run in a folder in its last state, to evaluate, deploy or export it.

    The run is rebuilt from `config.toml` and its newest intact checkpoint, and nothing is trained.
    If its data is not available, everything that needs no data still works, and `Run.absent` has
    the reason. `fedquilt.run(…, resume=True)` continues training instead.

    Args:
        path: Folder of the run, as `fedquilt run --out` or `fq.run(…, out=…)` wrote it.
        device: Device for the weights, as torch names it. It may differ from that of training.
        trust: True: run code that the folder names (`file.py:NAME`), and add it to the user's list.
            False: refuse code that is not in the list, before any of it is imported. No effect if
            the folder names no code.

    Returns:
        The run after its last completed round.

    Raises:
        ConfigError: There is no run, its code is not trusted, or its settings cannot be read.
        RecordError: No checkpoint is intact.
    """
    config, request = Path(path) / "config.toml", f"the run in {path} was asked for"
    if not config.is_file():
        finding = "there is no run in it" if Path(path).is_dir() else "there is no such folder"
        raise ConfigError(f"{request}; {finding}.")
    check_folder(Path(path))
    settings = read_settings(config, trust, recorded=True, asked=request)
    server, manifest = load_newest(path, device)
    if isinstance(init := settings.get("init"), str) and missing(init):
        settings["init"] = ""  # The checkpoint has the trained weights.
    experiment, absent = _without_data(settings, config)
    # Deployment does not need the device, the cluster and the trackers of training.
    machine = replace(
        experiment.engine,
        name="vectorized",
        device=device,
        precision="fp64" if experiment.engine.precision == "fp64" else "fp32",
        deterministic=False,
    )
    experiment = replace(experiment, engine=machine, trackers=())
    partitioned: tuple[FederatedData, Partition | None] | None = None
    if not absent:
        try:
            partitioned = experiment.data.federate(experiment.fleet.total, experiment.seed)
        except FedquiltError as error:
            absent = str(error)
        else:
            absent = lacking_samples(Path(path))
    if partitioned is None:
        if "sample" not in manifest.about:  # Earlier versions did not write it.
            raise ConfigError(f"{request}; its data is not available: {absent}")
        num_clients = experiment.fleet.total or DEFAULT_CLIENTS
        stand_in = _stand_in(manifest.about["sample"], num_clients, experiment.data.name)
        partitioned = stand_in, None
    run = experiment.prepare(experiment.ground(partitioned))
    run.absent = absent
    return reopen(path, run, (server, manifest))


def _without_data(settings: Settings, config: Path) -> tuple[Experiment, str]:
    """Return the experiment in a file, and the reason why its data is not available.

    The reason is empty if all settings are valid. If only the data settings have problems, the
    experiment has the data `digits` in their place. All other problems are raised.

    Args:
        settings: Settings of the file.
        config: Path of the file, for messages.

    Raises:
        ConfigError: Settings other than those of the data have problems.
    """
    try:
        return Experiment.of(settings, file=str(config)), ""
    except ConfigError as error:
        data_settings = settings.get("data", {})
        try:
            experiment = Experiment.of({**settings, "data": "digits"}, file=str(config))
        except ConfigError:
            raise error from None
        name = str(data_settings)
        if isinstance(data_settings, Mapping):
            name = data_settings.get("name", "data")
        return experiment, f"{name}: {error}"


def _stand_in(sample: Mapping[str, Any], num_clients: int, name: str) -> FederatedData:
    """Return data of the same shape without content: one sample of zeros for all clients.

    Args:
        sample: Format of a sample, as a checkpoint has it (`about.sample_format`).
        num_clients: Number of clients.
        name: Name of the data that is not available.
    """
    # Inputs and targets: (2, *shape of a sample)
    inputs = torch.zeros((2, *sample["shape"]), dtype=getattr(torch, sample["dtype"]))
    # Earlier versions had classes alone: one for each sample, or for each token.
    default_format = {
        "shape": [] if inputs.is_floating_point() else sample["shape"],
        "dtype": "int64",
    }
    target_format = sample.get("targets", default_format)
    # The last class, because masks of class 0 alone would have no foreground.
    last = max(sample["classes"] - 1, 0)
    targets = torch.full(
        (2, *target_format["shape"]), last, dtype=getattr(torch, target_format["dtype"])
    )
    # It is not known if the data had public samples. Nothing is computed with these.
    pool = Pool.of(
        (inputs, targets),
        (inputs, targets),
        num_classes=sample["classes"],
        name=name,
        public=inputs,
    )
    all_alike = Parts.split(
        torch.zeros(num_clients, dtype=torch.int64), torch.ones(num_clients, dtype=torch.int64)
    )
    return replace(pool.with_parts(all_alike), validation_parts=all_alike)
