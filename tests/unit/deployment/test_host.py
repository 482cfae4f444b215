"""The device's side of a deployment: what it sends, and what it refuses."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.data.scale import Scale
from fedquilt.deployment.enrolment import Enrolment, ServerFacts
from fedquilt.deployment.host import DeviceHost, DeviceSettings
from fedquilt.deployment.in_process import own_data
from fedquilt.errors import ConfigError, FormatError
from fedquilt.round.wire import Message, Reply, Request
from fedquilt.runs.model_settings import Model
from fedquilt.terms import Arch, Budget, Client, Submodel

PICKLE = pickle.dumps({"a": 1})


@pytest.fixture
def data() -> fq.FederatedData:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(40, 1, 8, 8, generator=generator)
    targets = torch.arange(40) % 4
    return fq.data.Pool.of((inputs, targets), (inputs[:8], targets[:8])).partition(2)


@pytest.fixture
def host(data, tmp_path) -> DeviceHost:
    settings = DeviceSettings("phone", "unused", Budget(share=0.5), tmp_path)
    return DeviceHost(settings, own_data(data, 0))


def about_of(data: fq.FederatedData, **model: object) -> ServerFacts:
    settings = Model(**{"name": "tiny_resnet", **model})
    return ServerFacts.of("run1", [settings], data, settings.trace(data))


def request(settings: dict[str, object], budget: Budget = Budget(share=0.5)) -> Message:
    client = Client(0, budget, 20, 0)
    return Request(
        run="run1",
        round=0,
        client=client,
        submodels=(Submodel(Arch(())),),
        settings=settings,
        seed=0,
        precision="fp32",
        fingerprint="x",
        num_clients=2,
        columns=(None,),
        initial=(None,),
    ).message((b"",))


def failure(host: DeviceHost, about: ServerFacts, message: Message) -> str:
    return Reply.read(host.answer(about.to_bytes(), message)).failed


def test_descriptions_survive_writing_and_reading(data):
    about = about_of(data)
    assert ServerFacts.read(about.to_bytes()) == about


def test_a_device_introduces_itself_with_name_budget_and_size_alone(host, data):
    message = host.enrol(about_of(data).to_bytes())
    assert message.files == ()
    assert json.loads(message.note).keys() == {"version", "name", "budget", "size", "failed"}
    assert Enrolment.read(message.note) == Enrolment("phone", Budget(share=0.5), 20)


def test_a_device_takes_classes_and_normalisation_of_the_server(host, data):
    scale = Scale(torch.full((1, 1, 1), 0.1), torch.full((1, 1, 1), 2.0))
    about = about_of(replace(data, scale=scale, num_classes=7))
    fitted = about.fitted(host.data)
    assert fitted.num_classes == 7
    assert torch.equal(fitted.scale.mean, scale.mean)
    assert torch.equal(fitted.scale.std, scale.std)


def test_public_samples_that_clients_use_must_be_the_servers(data, tmp_path):
    public = data.inputs[:5].clone()
    shared = replace(data, public=public)
    model = Model("tiny_resnet")
    facts = ServerFacts.of("run1", [model], shared, model.trace(data), clients_need_public=True)
    assert torch.equal(facts.fitted(own_data(shared, 0)).public, public)
    reasons = {
        "has none": data,
        "has 5 other ones": replace(data, public=public + 1),
        "has 4 other ones": replace(data, public=public[:4]),
    }
    for reason, samples in reasons.items():
        settings = DeviceSettings("phone", "unused", Budget(share=0.5), tmp_path)
        host = DeviceHost(settings, own_data(samples, 0))
        assert reason in Enrolment.read(host.enrol(facts.to_bytes()).note).failed


def test_public_samples_that_clients_do_not_use_stay_on_the_server(data):
    shared = replace(data, public=data.inputs[:5])
    facts = about_of(shared)
    assert facts.public == ""
    assert facts.fitted(own_data(data, 0)).public is None
    assert facts.fitted(own_data(shared, 0)).public is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"shape": (3, 8, 8)}, "samples of shape"),
        ({"dtype": "uint8"}, "type uint8"),
        ({"classes": 2}, "the server has 2 classes"),
        ({"model": {"name": "no_such_model"}}, "no_such_model"),
        ({"model": {"name": "os.path:join"}}, "names the code"),
        ({"model": {"name": "evil.py:net"}}, "names the code"),
        ({"model": {"name": "tiny_resnet", "options": "evil.py:net"}}, "names the code"),
        ({"model": 7}, "model"),
        ({"scale": ("x", "y")}, "normalisation"),
    ],
)
def test_a_model_or_samples_that_do_not_fit_are_a_reason_and_no_crash(host, data, changes, reason):
    about = replace(about_of(data), **changes)
    enrolment = Enrolment.read(host.enrol(about.to_bytes()).note)
    assert enrolment.budget is None
    assert reason in enrolment.failed


def test_code_in_a_servers_settings_is_refused_before_it_is_imported(host, data, tmp_path):
    file = tmp_path / "evil.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    about = about_of(data)
    for settings in (
        {"method": {"name": f"{file}:Evil"}},
        {"method": {"name": "fedavg", "local": {"optimizer": f"{file}:Evil"}}},
        {"method": {"name": "fedavg"}, "link": [{"codec": "os.path:join"}]},
        {f"{file}:Evil": {}},
    ):
        assert "the server names the code" in failure(host, about, request(settings))
    assert not (tmp_path / "ran").exists()


def test_a_request_beyond_the_owners_budget_is_refused(host, data):
    message = request({"method": {"name": "fedavg"}}, Budget(share=1))
    assert "its owner allows" in failure(host, about_of(data), message)


def test_a_pickle_on_every_path_is_refused(host, data, tmp_path):
    about = about_of(data)
    for message in (Message(PICKLE), Message(PICKLE, (PICKLE,)), Message(b"{}", (PICKLE,))):
        assert failure(host, about, message)
    good = request({"method": {"name": "fedavg"}})
    assert Reply.read(host.answer(PICKLE, good)).failed
    assert Enrolment.read(host.enrol(PICKLE).note).failed
    for read in (ServerFacts.read, Enrolment.read):
        with pytest.raises(FormatError):
            read(PICKLE)
    (tmp_path / "device.json").write_bytes(PICKLE)
    with pytest.raises(ConfigError):
        DeviceSettings.load(tmp_path / "device.json")


def test_settings_of_a_device_survive_writing_and_reading(tmp_path):
    settings = DeviceSettings("phone", "a.npz", Budget(memory=2e6), tmp_path, "mine.py:net")
    assert DeviceSettings.load(settings.save()) == settings


@pytest.mark.parametrize(
    "changes",
    [
        {"size": 0},
        {"size": 1.5},
        {"size": 2**50},
        {"budget": None},
        {"budget": {"share": 3}},
        {"name": "a\nb"},
        {"version": 2},
        {"more": 1},
    ],
)
def test_introductions_with_other_values_are_refused(changes):
    plain = json.loads(Enrolment("phone", Budget(share=0.5), 20).to_bytes())
    with pytest.raises(FormatError):
        Enrolment.read(json.dumps({**plain, **changes}).encode())
