"""Split-Mix, algorithm 1, line 9: base nets are sorted by their accuracy on validation data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import fedquilt as fq
from fedquilt.errors import ConfigError
from fedquilt.methods import SplitMix
from fedquilt.terms import Budget
from tests.conftest import LOCAL, with_local

SORTED = SplitMix(base=0.5, sort=True)


def predicts(run: fq.Run, label: int, scope: str) -> dict[str, torch.Tensor]:
    """Return the weights of a base net that predicts one class for every sample."""
    own = {
        name: torch.zeros_like(value)
        for name, value in run.server.weights.items()
        if name.startswith(scope)
    }
    own[f"{scope}last.bias"][label] = 1.0
    return own


def hands_out(run: fq.Run) -> int:
    """Return the class that the first base net in the order predicts, where each net predicts one
    class.
    """
    net = run.deploy(Budget(share=0.5))
    return int(net(run.data.inputs[:1]).argmax(1))


@pytest.fixture
def split(perceptron, make_data) -> fq.FederatedData:
    """Return data whose training samples have class 0, validation samples class 1 and test samples
    class 2.
    """
    data = make_data(perceptron, (6, 5, 7)).with_validation(0.4)
    targets = torch.zeros_like(data.targets)
    targets[data.validation_parts.order] = 1
    return replace(data, targets=targets, test_targets=torch.full_like(data.test_targets, 2))


def prepared(data, family, engine, **how) -> fq.Run:
    """Return a run whose first base net knows the training samples alone, and the second the
    validation samples.
    """
    evaluation = fq.Evaluation(per_client=False, **how)
    run = fq.prepare(
        SORTED,
        family,
        data,
        fq.Fleet.of((0.5,), 3),
        engine,
        precision="fp64",
        evaluation=evaluation,
    )
    weights = predicts(run, 0, "base0/") | predicts(run, 1, "base1/")
    run.server = replace(run.server, weights=weights)
    return run


@pytest.mark.parametrize("engine", LOCAL)
def test_line_9_sorts_by_validation_samples(engine, perceptron, split):
    assert hands_out(prepared(split, perceptron, engine)) == 1
    assert hands_out(prepared(split, perceptron, engine, on="validation")) == 1
    without = replace(split, validation_parts=None)  # clients train on the same samples as before
    assert hands_out(prepared(without, perceptron, engine)) == 0


def test_the_net_that_validation_samples_prefer_is_the_one_evaluated(perceptron, split):
    """A device of share 1/2 gets the first net, which is right for all validation and for no test
    samples.
    """
    method = SORTED.with_local(optimizer=fq.optimizers.SGD(lr=1e-9), batch_size=4, scaler=False)
    for on, expected in (("validation", 1.0), ("test", 0.0)):
        run = prepared(split, perceptron, "sequential", on=on)
        run.federation = replace(run.federation, method=method)
        assert run.train(1).accuracy["0.5"] == expected


@pytest.mark.parametrize("norm", ["per_client", "per_client-all", "post-own"])
def test_an_order_is_refused_if_every_client_has_its_own_nets(norm):
    with pytest.raises(
        ConfigError,
        match=rf"SplitMix: sort = True was asked for with local\.norm = '{norm}'.*'post'",
    ):
        with_local(SORTED, norm=norm)
    assert with_local(replace(SORTED, sort=False), norm=norm).personal
