"""A device's own net: stored when it is tested, and exported from the state folder of the device.

Weights that clients share come from the server, and norms or private nets are on the device. The
device has all of them at once when its own net is tested. It then writes them beside its state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedquilt.deploy.deploy import Deployed, has_statistics
from fedquilt.deploy.export import Exported, check_place, chosen, export_nets
from fedquilt.deploy.formats import FORMATS
from fedquilt.deploy.trained import TrainedRun
from fedquilt.deployment.device_evaluation import data_of_client, precision_of
from fedquilt.deployment.enrolment import ServerFacts
from fedquilt.deployment.host import SERVER_FACTS, SETTINGS, DeviceHost, DeviceSettings
from fedquilt.deployment.states import OWN_NET
from fedquilt.deployment.terms import Terms
from fedquilt.engines.sequential import Sequential
from fedquilt.errors import ConfigError, FormatError, RecordError
from fedquilt.family.union import alone
from fedquilt.fleets.fleet import Fleet
from fedquilt.round.evaluate import Evaluation
from fedquilt.round.federation import Federation, World
from fedquilt.storage.files import why
from fedquilt.storage.tensor_files import NO_LIMIT, TensorFile
from fedquilt.terms import Server, Submodel, Submodels


@dataclass(frozen=True)
class OwnNet:
    """The nets that a device tested last as its own, with their weights and their origin."""

    nets: Submodels
    states: tuple[dict[str, Tensor], ...]  # Weights of each net, by name
    round: int  # Rounds of the run until then
    client: int  # Number of the client
    settings: Mapping[str, Any]  # Method, link and task as plain values
    seed: int
    precision: str
    batch_size: int  # Norm statistics are means over batches of this size

    @staticmethod
    def load(path: Path) -> OwnNet:
        """Read the nets that a device stored.

        Raises:
            RecordError: The file is damaged.
        """
        with TensorFile.open(path, NO_LIMIT) as file:
            note = file.note
            tensors = file.tensors(torch.device("cpu"), sealed=True)
        try:
            nets = tuple(Submodel.from_dict(net) for net in note["nets"])
            states = tuple(
                {
                    name.removeprefix(f"{number}/"): value
                    for name, value in tensors.items()
                    if name.startswith(f"{number}/")
                }
                for number in range(len(nets))
            )
            return OwnNet(
                nets,
                states,
                note["round"],
                note["client"],
                note["settings"],
                note["seed"],
                note["precision"],
                note["batch_size"],
            )
        except (KeyError, TypeError, FormatError) as error:
            raise RecordError(f"{path} has no net of a device: {error}") from error


def is_state_folder(path: Path) -> bool:
    """Return True if a folder is the state folder of a device (`fedquilt join --state`)."""
    return (path / SETTINGS).is_file()


def export_own(folder: Path, file: Path, format: str = "", force: bool = False) -> Exported:
    """Write the net that a device tested last as its own, after comparing it with torch.

    Norms use the statistics that the device has. If it has none, they are measured on its samples.

    Args:
        folder: State folder of the device.
        file: File to write.
        format: One of `FORMATS`. Empty: the ending of the file's name.
        force: Overwrite an existing file.

    Raises:
        ConfigError: The device has tested no net of its own, or its model or samples have changed.
    """
    check_place(file, force)
    kind = chosen(file, format)
    FORMATS[kind].check()
    settings = DeviceSettings.load(folder / SETTINGS)
    path = folder / SERVER_FACTS
    try:
        about = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the net of the device in {folder} was asked for; {path} cannot be read: "
            f"{why(error)}. It is written when the device tests a net of its own, in a run whose "
            "method leaves results on clients. `fedquilt export RUN` on the server writes others."
        ) from error
    stored = OwnNet.load(settings.state / "rounds" / ServerFacts.read(about).run / OWN_NET)
    device = DeviceHost(settings).device(about)
    terms = Terms.read(stored.settings, device.allowed)
    family = terms.method.adapt(device.family)
    for net in stored.nets:
        family.check(net, "the device")
    precision = precision_of(stored.precision)
    engine = Sequential(data_of_client(device.data, stored.client), device.device, precision)
    world = World(family, stored.seed, precision, engine.data.public_samples, terms.task)
    federation = Federation(world, terms.method, terms.link)
    fleet = Fleet.of([settings.budget], stored.client + 1)
    run = TrainedRun(federation, fleet, engine, Evaluation(), Server(stored.round, {}))
    norms = terms.method.local.norm.deployed()
    states = list(stored.states)
    if not all(
        has_statistics(family.member(net), state)
        for net, state in zip(stored.nets, states, strict=True)
    ):
        pairs = list(zip(stored.nets, states, strict=True))
        statistics = engine.calibrate(federation, pairs, stored.batch_size, stored.client)
        states = [{**state, **own} for state, own in zip(states, statistics, strict=True)]
    deployment = Deployed(*alone(family, stored.nets, states), norms)
    return export_nets(run, file, kind, deployment, settings.budget, stored.client)
