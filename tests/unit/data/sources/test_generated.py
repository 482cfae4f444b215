"""Generated images: made from a seed, equal on every machine, with classes that can be learnt."""

from __future__ import annotations

import hashlib

import pytest
import torch

from fedquilt.config.resolve import resolved
from fedquilt.data import DATA, Domains, Pool, source
from fedquilt.data.sources import generated
from fedquilt.errors import ConfigError
from fedquilt.runs.data_settings import Source


def test_images_of_a_seed_are_always_the_same():
    pool = generated(shape=(3, 8, 8), train=40, test=20, domains=("day", "night"))
    digest = hashlib.sha256(
        pool.inputs.numpy().tobytes() + pool.test_inputs.numpy().tobytes()
    ).hexdigest()
    assert digest == "e73781403aba652119ae9a837cad142f9209d597ddf17bb116480d2170b639be"
    assert not torch.equal(generated(seed=1).inputs, generated().inputs)


def test_classes_are_balanced_and_near_their_prototypes():
    pool = generated(classes=5, shape=(1, 12, 10), train=100, test=50)
    assert DATA["generated"] is source("generated") is generated
    assert (pool.inputs.dtype, pool.inputs.shape) == (torch.uint8, (100, 1, 12, 10))
    assert (pool.num_classes, pool.domains, pool.public) == (5, None, None)
    assert torch.bincount(pool.targets).tolist() == [20] * 5
    assert torch.bincount(pool.test_targets).tolist() == [10] * 5
    means = torch.stack([pool.inputs[pool.targets == label].double().mean(0) for label in range(5)])
    distances = (pool.test_inputs.double()[:, None] - means).flatten(2).norm(dim=2)
    assert float((distances.argmin(1) == pool.test_targets).double().mean()) > 0.95


def test_domains_shift_colours_and_do_not_depend_on_each_other():
    pool = generated(shape=(3, 8, 8), train=80, test=40, domains=("mnist", "svhn"))
    assert pool.domain_names == ("mnist", "svhn")
    for label in range(10):
        homes = pool.domains[pool.targets == label]
        assert torch.bincount(homes).tolist() == [4, 4]
    colors = [pool.inputs[pool.domains == home].double().mean((0, 2, 3)) for home in (0, 1)]
    assert float((colors[0] - colors[1]).abs().max()) > 20
    alone = generated(shape=(3, 8, 8), train=80, test=40, domains=("svhn",))
    svhn = pool.inputs[pool.domains == 1]
    assert torch.equal(alone.inputs[pool.domains == 1], svhn)


def test_options_are_those_of_array_files():
    pool = generated(shape=(3, 8, 8), mean=(0.5,), std=(0.5,), public=0.25)
    assert pool.public.shape == (100, 3, 8, 8)
    assert len(pool.targets) == 300
    torch.testing.assert_close(pool.samples(torch.arange(2)), pool.inputs[:2] / 255 * 2 - 1)
    seen = generated(shape=(3, 8, 8)).samples(torch.arange(400))
    torch.testing.assert_close(seen.mean((0, 2, 3)), torch.zeros(3), rtol=0, atol=1e-4)
    assert float(generated(normalize="none").samples(torch.arange(9)).max()) <= 1


def test_settings_ask_for_it():
    table = {"name": "generated", "shape": [3, 8, 8], "train": 200, "domains": ["mnist", "svhn"]}
    found = resolved(Source, table | {"partition": {"name": "domains"}}, {})
    assert found.make(Pool).inputs.shape == (200, 3, 8, 8)
    data, partition = found.federate(4, 0)
    assert partition == Domains()
    assert [int(data.domains[part[0]]) for part in data.parts] == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"classes": 0}, r"\{'classes': 0\} was asked for; each must be at least 1"),
        ({"shape": (8, 8)}, r"shape \(8, 8\) were asked for; channels, height and width fit"),
        ({"shape": (3, 0, 8)}, r"shape \(3, 0, 8\)"),
        ({"domains": ("a", "a")}, "each name may be given once"),
    ],
)
def test_impossible_requests_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        generated(**options)
