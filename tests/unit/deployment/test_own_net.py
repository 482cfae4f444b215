"""A device's own net, exported from its state folder."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.cli.export import ExportRequest
from fedquilt.deployment.enrolment import ServerFacts
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.in_process import InProcess
from fedquilt.deployment.own_net import export_own, is_state_folder
from fedquilt.deployment.terms import Terms
from fedquilt.engines.flower.engine import Flower
from fedquilt.engines.flower.evaluation import ServerSamples
from fedquilt.errors import ConfigError
from fedquilt.methods import FedAvg, FedBN, LocalOnly
from fedquilt.runs.model_settings import Model, offered, traced

LOCAL = {"batch_size": 5, "optimizer": fq.optimizers.SGD(lr=0.1)}


@dataclass
class Joined:
    """A device as a courier sees it: it gets messages together with the server's description."""

    host: DeviceHost
    about: bytes

    def answer(self, message):
        return self.host.answer(self.about, message)

    def evaluate(self, message):
        return self.host.evaluate(self.about, message)


@pytest.fixture
def data(tmp_path) -> fq.FederatedData:
    """Return the samples of two devices, which are also in a file for each device."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, 8, 8, generator=generator)
    targets = torch.arange(40) % 4
    for client in range(2):
        rows, tests = slice(20 * client, 20 * (client + 1)), slice(4 * client, 4 * (client + 1))
        arrays = {"x_train": inputs[rows], "y_train": targets[rows]}
        arrays |= {"x_test": inputs[tests], "y_test": targets[tests]}
        np.savez(tmp_path / f"{client}.npz", **{key: v.numpy() for key, v in arrays.items()})
    parts = [range(20), range(20, 40)]
    tests = [range(4), range(4, 8)]
    return fq.FederatedData.of(
        (inputs, targets), (inputs[:8], targets[:8]), parts, test_parts=tests
    )


def federated(method, data, tmp_path):
    """Return a sequential run, and train the same on two devices with state folders."""
    model = Model("tiny_resnet")
    family, fleet = traced([model], data), fq.Fleet.of([1.0], 2, 2)
    settings = {"precision": "fp64", "evaluation": fq.Evaluation(every=0, batch_size=4)}
    truth = fq.run(method, family, data, fleet, "sequential", rounds=2, **settings)
    about = ServerFacts.of("run1", [model], data, family).to_bytes()
    hosts = {}
    for client in range(2):
        file = str(tmp_path / f"{client}.npz")
        device = DeviceSettings("phone", file, fq.Budget(share=1.0), tmp_path / f"state-{client}")
        device.save()
        hosts[client] = Joined(DeviceHost(device), about)
    engine = Flower(
        data,
        precision="fp64",
        courier=InProcess(hosts),
        run_id="run1",
        terms=Terms.of,
        server_samples=ServerSamples(test=False, calibration=False),
    )
    other = fq.run(method, family, data, fleet, engine, rounds=2, **settings)
    return truth, other


@pytest.mark.parametrize("kind", [FedBN, LocalOnly])
def test_the_exported_net_is_the_clients_own_of_the_sequential_run(kind, data, tmp_path):
    method = kind().with_local(**LOCAL)
    truth, other = federated(method, data, tmp_path)
    assert other.accuracy == pytest.approx(truth.accuracy, abs=1e-9)
    file = tmp_path / "own.safetensors"
    exported = export_own(tmp_path / "state-1", file)
    assert (exported.round, exported.share) == (2, 1.0)
    found = fq.load_model(file, lambda: Model("tiny_resnet").make(nn.Module, offered(data)))
    norms = None if truth.method.local.norm.stores else "post-own"
    expected = truth.deploy(share=1.0, client=1, norms=norms)
    inputs = data.test_samples(torch.arange(8)).double()
    torch.testing.assert_close(found(inputs.float()), expected(inputs).float(), rtol=0, atol=1e-5)
    first = truth.deploy(share=1.0, client=0, norms=norms)(inputs).float()
    assert not torch.allclose(found(inputs.float()), first, atol=1e-3)


def test_the_command_exports_from_a_state_folder(data, tmp_path, capsys):
    federated(FedBN().with_local(**LOCAL), data, tmp_path)
    state = tmp_path / "state-0"
    assert is_state_folder(state)
    ExportRequest(state, tmp_path / "own.pt2")()
    assert (tmp_path / "own.pt2").stat().st_size > 1000
    assert "the device's own net" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--share was asked for with .* the state folder"):
        ExportRequest(state, tmp_path / "half.pt2", share=(0.5,))()
    with pytest.raises(ConfigError, match="it is there already"):
        ExportRequest(state, tmp_path / "own.pt2")()


def test_a_device_without_a_net_of_its_own_says_so(data, tmp_path):
    federated(FedAvg().with_local(**LOCAL), data, tmp_path)
    with pytest.raises(ConfigError, match="when the device tests a net of its own"):
        export_own(tmp_path / "state-0", tmp_path / "own.safetensors")


def test_the_server_does_not_export_what_is_on_a_device(data, tmp_path):
    _, run = federated(FedBN().with_local(**LOCAL), data, tmp_path)
    with pytest.raises(ConfigError, match="its weights are on its device"):
        run.deploy(client=0)
