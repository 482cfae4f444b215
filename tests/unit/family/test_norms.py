"""Norm policies: what each of them states, how it is chosen, and what a client's result is under
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.cli.options import Norms
from fedquilt.config.reading import read
from fedquilt.config.tables import Problem
from fedquilt.config.writing import write
from fedquilt.errors import ConfigError
from fedquilt.family.norms import (
    NORM_POLICIES,
    AllLocal,
    BatchStatistics,
    KeptByClient,
    MeasuredOnAll,
    NormPolicy,
    Tracked,
)
from fedquilt.methods import FedAvg, FedBN, FedRolex, HeteroFL, SplitMix
from fedquilt.runs.experiment import Experiment
from fedquilt.runs.fingerprint import fingerprint
from tests.conftest import LOCAL, _residual_net, assert_same, with_local

PERSONAL = ["per_client", "post-own", "per_client-all"]
PAGE = (Path(__file__).parents[3] / "docs" / "internals" / "norms.md").read_text()
QUARTER = {"base": 0.25}


# --- what a policy states -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "states"),
    {
        "batch": [],
        "tracked": ["tracks", "has_server_statistics", "stores"],
        "per_client": ["tracks", "keeps_statistics", "personal", "stores"],
        "post": ["measures", "stores"],
        "post-own": ["measures", "personal", "stores"],
        "post-public": ["measures", "needs_public", "stores"],
        "per_client-all": ["tracks", "keeps_statistics", "personal", "stores"],
    }.items(),
)
def test_properties_of_each_policy(name, states):
    policy = NORM_POLICIES[name]()
    asked = [
        "tracks",
        "measures",
        "needs_public",
        "has_server_statistics",
        "keeps_statistics",
        "personal",
        "stores",
    ]
    assert [one for one in asked if getattr(policy, one)] == [one for one in asked if one in states]
    assert policy.training_pass().statistics == ("track" if policy.tracks else "batch")
    assert policy.name == policy.fingerprint == name
    assert policy.deployed() == (policy if policy.stores else MeasuredOnAll())


def test_the_page_and_the_flag_name_every_policy():
    table = PAGE
    rows = dict(re.findall(r"^\| `([\w-]+)` \| `(\w+)` \|", table, re.MULTILINE))
    assert rows == {name: kind.__name__ for name, kind in NORM_POLICIES.items()}
    assert next(
        mark for mark in Norms.__metadata__ if hasattr(mark, "metavar")
    ).metavar == "|".join(NORM_POLICIES)


def test_weights_that_stay_on_a_client(residual, language):
    statistics, norms = set(residual.statistics), set(residual.parts["norm"])
    assert statistics < norms
    assert all(
        NORM_POLICIES[name]().kept(residual) == set()
        for name in ("batch", "tracked", "post", "post-own", "post-public")
    )
    assert KeptByClient().kept(residual) == statistics
    assert AllLocal().kept(residual) == Tracked("local").kept(residual) == norms
    assert BatchStatistics("local").kept(residual) == norms - statistics
    # layer norms have weights and no statistics
    assert AllLocal().kept(language) == set(language.parts["norm"])
    assert KeptByClient().kept(language) == set()


@pytest.mark.parametrize("name", NORM_POLICIES)
def test_fedbn_keeps_all_of_a_norm_under_every_policy(name, residual):
    policy = NORM_POLICIES[name]().localized()
    assert policy.personal
    affine = set(residual.parts["norm"]) - set(residual.statistics)
    assert policy.kept(residual) >= affine
    assert policy.keeps_statistics == policy.tracks
    assert policy.measures == NORM_POLICIES[name]().measures
    assert FedBN(local=fq.LocalTraining(norm=name)).local.norm == policy
    assert policy.localized() == policy


# --- how it is chosen ---------------------------------------------------------------------------


def test_names_and_policies_are_the_same_setting():
    named, made = fq.LocalTraining(norm="post"), fq.LocalTraining(norm=MeasuredOnAll())
    assert named.norm == MeasuredOnAll() != MeasuredOnAll("local")
    assert named == made
    assert hash(named) == hash(made)
    assert replace(named, norm="tracked").norm == Tracked()
    assert fq.LocalTraining().norm == BatchStatistics()


@dataclass(frozen=True)
class Wrong(NormPolicy):
    owner = "nobody"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: fq.LocalTraining(norm="pots"),
            "norm = 'pots' was asked for; it may be 'batch', 'tracked', 'per_client', 'post'",
        ),
        (lambda: fq.LocalTraining(norm=None), "norm = None was asked for; it may be 'batch'"),
        (
            lambda: fq.LocalTraining(norm=Tracked),
            "norm = <class .*Tracked'> was asked for; it may be 'batch'",
        ),
        (lambda: fq.LocalTraining(norm="absent.py:Norms"), "there is no file 'absent.py'"),
        (
            lambda: Tracked(affine="mine"),
            "affine = 'mine' was asked for; it may be 'shared', 'local'",
        ),
        (Wrong, "owner = 'nobody' was asked for; it may be 'server', 'client'"),
    ],
)
def test_objects_that_are_no_policies_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_policy_in_a_file_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("broken.py").write_text(
        "def failing():\n    raise ValueError('on purpose')\n\ndef other():\n    return 3\n"
    )
    with pytest.raises(
        ConfigError,
        match=r"norm = 'broken\.py:failing' was called .* failed: ValueError: on purpose",
    ):
        fq.LocalTraining(norm="broken.py:failing")
    with pytest.raises(
        ConfigError, match=r"norm = 'broken\.py:other' was asked for; it may be 'batch'"
    ):
        fq.LocalTraining(norm="broken.py:other")


@pytest.mark.parametrize("name", NORM_POLICIES)
def test_files_have_only_the_name_of_a_policy(name):
    local = fq.LocalTraining(norm=name)
    assert write(local)["norm"] == name
    problems: list[Problem] = []
    assert read(fq.LocalTraining, write(local), "", problems) == local
    turned = replace(
        local, norm=replace(local.norm, affine="shared" if name == "per_client-all" else "local")
    )
    assert write(turned)["norm"] == {"name": name, "affine": turned.norm.affine}
    assert read(fq.LocalTraining, write(turned), "", problems) == turned
    assert problems == []


def test_an_unknown_name_in_a_file_is_reported_with_the_nearest():
    with pytest.raises(ConfigError) as caught:
        Experiment.of({"method": {"name": "fedavg", "local": {"norm": "post-won", "epochs": 0}}})
    message = str(caught.value)
    assert (
        "method.local.norm.name: there is no norm policy named 'post-won'. Did you mean 'post-own'?"
        in message
    )
    assert "method.local.epochs: 0 was asked for" in message


def test_a_policy_in_a_file(residual, play, make_data, tmp_path, monkeypatch):
    """The one of docs/internals/norms.md: clients keep affine weights, and measure statistics."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "mine.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    method = {"name": "heterofl", "local": {"norm": "mine.py:OwnNorms"}}
    experiment = Experiment.of({"method": method, "model": "tiny_resnet", "data": "digits"})
    policy = experiment.method.local.norm
    assert (policy.name, policy.affine, policy.measures, policy.personal) == (
        "OwnNorms",
        "local",
        True,
        True,
    )
    assert write(experiment)["method"]["local"]["norm"] == "mine.py:OwnNorms"
    assert Experiment.of(write(experiment)) == experiment
    assert fq.LocalTraining(norm="mine.py:OwnNorms").norm == policy
    run = play(
        with_local(experiment.method, batch_size=4), residual, make_data(residual, (6, 6)), rounds=1
    )
    kept = {name for memory in run.server.memory.values() for name in memory.weights}
    assert kept == set(residual.parts["norm"]) - set(residual.statistics)
    assert run.export("own.safetensors", fq.Budget(share=0.25), client=1).norms == "OwnNorms"
    model = run.deploy(fq.Budget(share=0.25), client=1, norms="mine.py:OwnNorms")
    monkeypatch.chdir("/")  # whoever loads the model needs no file of the policy
    again = fq.load_model(tmp_path / "own.safetensors", _residual_net)
    inputs = torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(again(inputs), model.float()(inputs), rtol=0, atol=1e-5)
    assert fingerprint(run)["method.local.norm"] == "OwnNorms"


# --- what a client has --------------------------------------------------------------------------


def by_hand(model: nn.Module, samples: torch.Tensor, batch_size: int) -> nn.Module:
    """Measure statistics with torch: cumulative means over batches of a module in training mode."""
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.reset_running_stats()
            layer.momentum = None
    with torch.no_grad():
        for batch in samples.split(batch_size):
            model.train()(batch)
    return model.eval()


@pytest.mark.parametrize("parts", [True, False], ids=["own tests", "common tests"])
@pytest.mark.parametrize("engine", LOCAL)
def test_clients_measure_the_servers_weights_on_their_own_samples(
    engine, parts, residual, play, make_data
):
    """Accuracy is the mean over clients, each on its own test part, or on all tests where there are
    no parts.
    """
    data = make_data(residual, (8, 8, 12))
    data = data if parts else replace(data, test_parts=None)
    method = with_local(FedAvg(), batch_size=4, norm="post-own")
    run = play(
        method, residual, data, engine=engine, evaluation=fq.Evaluation(every=0, batch_size=4)
    )
    assert run.method.personal
    assert not run.server.memory  # nothing is kept
    accuracies = []
    for client, rows in enumerate(run.engine.data.parts):
        model = run.deploy(fq.Budget(share=1.0), client=client)
        weights = dict(model.named_parameters())
        assert all(
            torch.equal(weights[name], run.server.weights[name]) for name in residual.trainable
        )
        tests = data.test_parts[client] if parts else torch.arange(len(data.test_targets))
        logits = model(data.test_inputs[tests]).detach()
        own = by_hand(model, data.inputs[rows], 4)
        torch.testing.assert_close(logits, own(data.test_inputs[tests]).detach(), rtol=0, atol=1e-9)
        accuracies.append(float((logits.argmax(1) == data.test_targets[tests]).double().mean()))
    assert run.accuracy == {"1.0": pytest.approx(sum(accuracies) / 3, abs=1e-12)}


def test_a_client_with_all_samples_measures_what_the_server_would(residual, play, make_data):
    how = fq.Evaluation(every=0, batch_size=24)
    one, other = (
        play(
            with_local(HeteroFL(), batch_size=4, norm=norm),
            residual,
            make_data(residual, (9,)),
            evaluation=how,
        )
        for norm in ("post", "post-own")
    )
    torch.testing.assert_close(dict(one.server.weights), dict(other.server.weights), rtol=0, atol=0)
    common, own = one.deploy(fq.Budget(share=1.0)), other.deploy(fq.Budget(share=1.0), client=0)
    torch.testing.assert_close(common.state_dict(), own.state_dict(), rtol=0, atol=1e-9)
    assert one.accuracy == other.accuracy


@pytest.mark.parametrize("engine", LOCAL)
def test_public_samples_take_the_place_of_the_clients(engine, residual, play, make_data):
    data = make_data(residual, (6, 6), public=0)
    method = with_local(HeteroFL(), batch_size=4, norm="post-public")
    how = fq.Evaluation(every=0, batch_size=4)
    public = (
        torch.randn(12, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        + 1
    )
    run = play(method, residual, replace(data, public=public), (1.0, 0.5), engine, evaluation=how)
    for share in (1.0, 0.5):
        model = run.deploy(fq.Budget(share=share))
        logits = model(data.test_inputs).detach()
        hits = (logits.argmax(1) == data.test_targets).double().mean()
        assert run.accuracy[str(share)] == pytest.approx(float(hits), abs=1e-12)
        torch.testing.assert_close(
            logits, by_hand(model, public, 4)(data.test_inputs).detach(), rtol=0, atol=1e-9
        )
    message = (
        "the norm policy 'post-public' was asked for, .* on public samples; the data has none. "
        "data.public = 0.1"
    )
    with pytest.raises(ConfigError, match=message):
        play(method, residual, data, engine=engine)
    with pytest.raises(ConfigError, match=message):
        play(with_local(method, norm="post"), residual, data).deploy(
            fq.Budget(share=0.5), norms="post-public"
        )


def test_one_public_sample_has_no_statistics(residual, play, make_data):
    data = replace(make_data(residual, (6, 6)), public=torch.randn(1, 1, 6, 6, dtype=torch.float64))
    method = with_local(HeteroFL(), batch_size=4, norm="post-public")
    message = (
        "'post-public' was asked for, .*; the data has one, and two or more are needed. "
        "data.public = 0.1"
    )
    with pytest.raises(ConfigError, match=message):
        fq.prepare(method, residual, data, fq.Fleet.of((1.0,), 2, 2), precision="fp64")
    run = play(with_local(method, norm="post"), residual, data, rounds=1)
    with pytest.raises(ConfigError, match=message):
        run.deploy(fq.Budget(share=0.5), norms="post-public")


@pytest.mark.parametrize("family", ["residual", "language"], indirect=True)
def test_fedbn_is_fedavg_with_local_norms(family, play, make_data):
    data = make_data(family, (6, 5, 7))
    methods = [
        with_local(FedBN(), batch_size=4),
        with_local(FedAvg(), batch_size=4, norm="per_client-all"),
    ]
    assert_same(*(play(method, family, data, rounds=3) for method in methods), atol=0)


@pytest.mark.parametrize("engine", LOCAL)
@pytest.mark.parametrize(
    "method",
    [HeteroFL(), FedRolex(shift=0), SplitMix(base=0.5)],
    ids=lambda method: type(method).__name__,
)
def test_the_norms_of_a_single_client_are_as_if_averaged(method, engine, residual, play, make_data):
    """Over three rounds of one client, what it kept and what it sent are the net that tracked norms
    give.
    """
    data = make_data(residual, (9,))
    runs = [
        play(with_local(method, batch_size=4, norm=norm), residual, data, (0.5,), engine, rounds=3)
        for norm in ("per_client-all", "tracked")
    ]
    own, tracked = (
        run.method.client_submodels(run.server, run.fleet.client(0, 2, 0, 9), run.world)
        for run in runs
    )
    assert own == tracked
    one, other = (
        runs[0].deploy(fq.Budget(share=0.5), client=0),
        runs[1].deploy(fq.Budget(share=0.5)),
    )
    torch.testing.assert_close(one.state_dict(), other.state_dict(), rtol=0, atol=1e-9)
    norms = set(residual.parts["norm"])
    assert all(set(memory.weights) == norms for memory in runs[0].server.memory.values())
    fresh = runs[0].method.init(runs[0].world).weights
    for name, weight in runs[0].server.weights.items():
        assert torch.equal(weight, fresh[name]) or name[name.rfind("/") + 1 :] not in norms


@pytest.mark.parametrize("norm", PERSONAL)
@pytest.mark.parametrize(
    "method",
    [HeteroFL(), FedRolex(shift=2), SplitMix(**QUARTER)],
    ids=lambda method: type(method).__name__,
)
def test_a_client_gets_the_net_that_was_evaluated(
    method, norm, residual, play, make_data, tmp_path
):
    data = make_data(residual, (8, 8, 8))
    method = with_local(method, batch_size=4, norm=norm, masked="")
    run = play(
        method, residual, data, (1.0, 0.5, 0.25), evaluation=fq.Evaluation(every=0, batch_size=8)
    )
    for client, share in enumerate((1.0, 0.5, 0.25)):
        budget = fq.Budget(share=share)
        model, part = run.deploy(budget, client=client), data.test_parts[client]
        hits = (model(data.test_inputs[part]).argmax(1) == data.test_targets[part]).double().mean()
        assert run.accuracy[str(share)] == pytest.approx(float(hits), abs=1e-12)
    file = tmp_path / "model.safetensors"
    found = run.export(file, budget, client=2)
    assert found.norms == norm
    inputs = data.test_inputs.float()
    again = fq.load_model(file, _residual_net)
    torch.testing.assert_close(again(inputs), model.float()(inputs), rtol=0, atol=1e-5)
    sizes = run.customizable((0.25,), client=2)
    torch.testing.assert_close(
        sizes(data.test_inputs), model.double()(data.test_inputs), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(
    ("norm", "asked", "message"),
    [
        (
            "post",
            {"norms": "post-own"},
            "norms='post-own' was asked for, which measures .* Say whose: client=0",
        ),
        (
            "post",
            {"norms": "per_client-all", "client": 0},
            "norms='per_client-all' was asked for.*this one's are 'post'",
        ),
        (
            "post-own",
            {"norms": "per_client", "client": 0},
            "norms='per_client' was asked for.*this one's are 'post-own'",
        ),
        (
            "post-own",
            {"norms": "tracked", "client": 0},
            "'tracked' was asked for; HeteroFL trained with norm = 'post-own'",
        ),
        ("post-own", {}, "HeteroFL leaves its result on the clients"),
        (
            "per_client-all",
            {"norms": "own", "client": 0},
            "norms='own' was asked for; it may be 'batch', 'tracked'",
        ),
    ],
)
def test_norms_that_a_run_does_not_have_are_refused(
    norm, asked, message, residual, play, make_data
):
    run = play(
        with_local(HeteroFL(), batch_size=4, norm=norm),
        residual,
        make_data(residual, (6, 6)),
        rounds=1,
    )
    with pytest.raises(ConfigError, match=message):
        run.deploy(fq.Budget(share=0.5), **asked)
