"""Runs on devices in one process, and the same runs on the sequential engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import pytest
import torch

import fedquilt as fq
from fedquilt.deployment.device import Device
from fedquilt.deployment.device_family import emptied
from fedquilt.deployment.in_process import Faults, InProcess, own_data
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.round.method import Method
from fedquilt.terms import ClientState

RUN_ID = "run1"


def devices_of(family: fq.Family, data: fq.FederatedData, folder: Any = None) -> dict[int, Device]:
    """Return a device for every client, with that client's samples alone."""
    return {
        client: Device(
            own_data(data, client),
            emptied(family),
            None if folder is None else folder / str(client),
        )
        for client in range(data.num_clients)
    }


def deployed(
    truth: fq.Run,
    family: fq.Family,
    data: fq.FederatedData,
    courier: InProcess | None = None,
    faults: Faults | None = None,
    **options: Any,
) -> Flower:
    """Return an engine that trains the federation of a run on devices in one process."""
    courier = courier or InProcess(devices_of(family, data), faults)
    return Flower(
        data,
        precision=truth.world.precision,
        courier=courier,
        run_id=RUN_ID,
        terms=Terms.of,
        **options,
    )


def device_states(
    courier: InProcess, run: fq.Run, forgot: Collection[int] = ()
) -> dict[tuple[int, str], ClientState]:
    """Return the state of every device after its last round that counted.

    Devices in `forgot` are left out if they do not have it.
    """
    states = {}
    for (client, _), memory in run.server.memory.items():
        versions = courier.devices[client]._states_of(RUN_ID)
        last = max(
            state.round for (owner, _), state in run.server.memory.items() if owner == client
        )
        version = versions.load(last)
        if version is None and client in forgot:
            continue
        assert version is not None, (client, memory.round, versions.rounds)
        states |= {(client, scope): state for scope, state in version.states.items()}
    return states


def assert_same_states(
    truth: Mapping[tuple[int, str], ClientState],
    found: Mapping[tuple[int, str], ClientState],
    atol: float = 1e-9,
) -> None:
    """Compare the states of clients, by client and scope."""
    assert truth.keys() == found.keys()
    for key, state in truth.items():
        other = found[key]
        assert (state.submodel, state.steps, state.round) == (
            other.submodel,
            other.steps,
            other.round,
        )
        for mine, theirs in (
            (state.weights, other.weights),
            (state.slots, other.slots),
            (state.extras, other.extras),
        ):
            torch.testing.assert_close(dict(mine), dict(theirs), rtol=0, atol=atol)


def assert_same_training(truth: fq.Run, other: fq.Run, atol: float = 1e-9) -> None:
    """Compare the server's state and the training figures of all rounds."""
    for name in ("weights", "slots", "extras"):
        mine, theirs = getattr(truth.server, name), getattr(other.server, name)
        torch.testing.assert_close(dict(mine), dict(theirs), rtol=0, atol=atol)
    for mine, theirs in zip(truth.records, other.records, strict=True):
        assert (mine.bytes_down, mine.bytes_up, mine.bytes_first, mine.macs) == (
            theirs.bytes_down,
            theirs.bytes_up,
            theirs.bytes_first,
            theirs.macs,
        )
        assert mine.loss == pytest.approx(theirs.loss, abs=atol)


def trained_both_ways(
    method: Method, family: fq.Family, data: fq.FederatedData, play: Any, **options: Any
) -> tuple[fq.Run, fq.Run, InProcess]:
    """Return a run on the sequential engine, the same run on devices, and their courier."""
    truth = play(method, family, data, engine="sequential", **options)
    engine = deployed(truth, family, data)
    other = play(method, family, data, engine=engine, **options)
    assert isinstance(engine.courier, InProcess)
    return truth, other, engine.courier
