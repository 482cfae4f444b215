"""FedResCuE's case study (appendix A.1), the example itself on a few drawn images."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import fedquilt as fq
from fedquilt.data import npz
from fedquilt.family.cut import prefix
from tests.conftest import load_example, save_images


@pytest.fixture(scope="module")
def case():
    return load_example("fedrescue_case_study")


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """Three domains of 8×8 pixels, the two asked for in another order than they are learnt."""
    path = tmp_path_factory.mktemp("digits") / "digits.npz"
    return save_images(path, 90, 3, domains=np.array(["syn", "svhn", "mnist"]))


@pytest.fixture(scope="module")
def pool(case, file):
    return case.two_domains(npz(file, **case.SCALE))


def test_the_first_domain_is_the_first_clients(case, pool, file):
    family = fq.trace(nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Linear(6, 4)), pool.example)
    run = case.study(case.Columns(), family, pool, 20, seed=1)
    whole = npz(file, **case.SCALE)
    for client, home in enumerate((2, 0)):  # mnist, syn
        part = run.data.parts[client]
        assert len(part) == 20
        theirs = whole.inputs[whole.domains == home]
        assert all(bool((theirs == run.data.inputs[row]).flatten(1).all(1).any()) for row in part)
    assert [float(run.fleet.budget(client, 0, 1).share) for client in (0, 1)] == [0.5, 1.0]


@pytest.mark.parametrize("progressive", [True, False])
def test_what_the_half_has_learnt_stays_bit_for_bit_or_is_written_over(progressive, case, pool):
    """With momentum and weight decay, which would move a weight whose gradient is masked."""
    family = fq.trace(lambda: fq.models.PreResNet((1, 1), 4, 3, widths=(4, 8)), pool.example)
    local = replace(case.LOCAL, optimiser=fq.SGD(lr=0.05, momentum=0.9, nesterov=True, decay=1e-2), epochs=2)
    run = case.study(case.Columns(local=local, progressive=progressive), family, pool, 24, seed=3)
    half = prefix(family.fit(fq.Budget(share=0.5)))

    def cut():
        return family.cutter.gather(run.server.weights, half, family.trainable)

    fresh = cut()
    first = {name: weight.clone() for name, weight in run.train(1).server.weights.items()}
    learnt = cut()
    assert all(not torch.equal(fresh[name], learnt[name]) for name in learnt)
    run.train(2)
    same = {name: torch.equal(weight, cut()[name]) for name, weight in learnt.items()}
    assert all(same.values()) if progressive else not any(same.values())
    outside = [name for name in family.trainable if run.server.weights[name].shape != learnt[name].shape]
    assert outside
    assert all(not torch.equal(first[name], run.server.weights[name]) for name in outside)
    assert [record.clients for record in run.records] == [2, 2]
    assert [record.loss is not None for record in run.records] == [True, True]
    assert len(case.accuracies(run)) == 3


def test_the_example_runs_as_it_is_called(case, file, capsys):
    """As a table beside the paper's numbers, and as JSON."""
    options = ["--images", "16", "--seeds", "1", "3", "--epochs", "1", "--model", "tiny_resnet"]
    case.main([str(file), *options])
    head, _, one, other = capsys.readouterr().out.splitlines()
    assert head == "| images | | x1 on mnist | x1 on syn | x0.5 on mnist |"
    assert one.startswith("| 16 | progressive | ")
    assert other.startswith("| 16 | overwriting | ")
    case.main([str(file), *options, "--ways", "progressive", "--momentum", "0.9", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert told["seeds"] == [1, 3]
    [row] = told["rows"]
    assert (row["images"], row["way"]) == (16, "progressive")
    assert [len(found) for found in row["accuracy"]] == [3, 3]
    assert case.table([{**row, "images": 743}]).count("(") == 3  # the paper's


def test_the_net_is_the_papers(case):
    spec = fq.models.MODELS["digits_cnn"]
    assert sum(weight.numel() for weight in spec.factory().parameters()) == 14_214_090  # Table 16
