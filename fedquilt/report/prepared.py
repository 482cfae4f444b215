"""A run that is prepared from its settings again, without training, to compute its plans."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from fedquilt.checks import missing
from fedquilt.errors import ConfigError, FedquiltError
from fedquilt.report.collect import RunFolder
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.folder_files import rounds_planned
from fedquilt.runs.load import load_run
from fedquilt.runs.machine import Machine
from fedquilt.runs.run import Run
from fedquilt.runs.settings_file import read_settings
from fedquilt.studies.execute import torch_settings_restored

MAX_PREPARED = 8  # Runs that are kept in memory, so that a live page prepares its run once


def prepare_again(folder: RunFolder, trust: bool = False) -> Run:
    """Return the run of a folder before its first round, or as its checkpoint has it.

    A checkpoint is read only if the data of the run is not available.

    Args:
        folder: Folder of the run.
        trust: True: run code that its settings name, and add it to the user's list.

    Raises:
        FedquiltError: The settings cannot be read or name code that is not trusted, or the data and
            all checkpoints are missing.
    """
    if not folder.config:
        raise ConfigError("its settings are not known, because config.toml cannot be read.")
    return _prepared(folder.path.resolve(), folder.config, trust)


@lru_cache(maxsize=MAX_PREPARED)
def _prepared(path: Path, config: str, trust: bool) -> Run:
    """Return the prepared run. `config` is the text of its settings, and a key of the cache."""
    settings = read_settings(
        path / "config.toml", trust, recorded=True, asked=f"a report of {path} was asked for"
    )
    if isinstance(init := settings.get("init"), str) and missing(init):
        settings["init"] = ""  # Plans do not depend on weights.
    with torch_settings_restored():
        try:
            experiment = Experiment.of(settings, file=str(path / "config.toml"))
            rounds = rounds_planned(path, experiment.rounds)
            machine = Machine(name="vectorized", precision=experiment.engine.precision)
            return replace(experiment, engine=machine, trackers=(), rounds=rounds).prepare()
        except FedquiltError as error:
            if not (path / "checkpoint").is_dir():
                raise
            try:
                return load_run(path, trust=trust)  # It needs no data.
            except FedquiltError:
                raise error from None
