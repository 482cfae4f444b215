"""Partitions: every client has samples, none is assigned twice, and a seed repeats the parts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.data import (
    PARTITIONS,
    Dirichlet,
    Domains,
    Flwr,
    Iid,
    Labels,
    Natural,
    Partition,
    Pool,
    Quantity,
)
from fedquilt.errors import ConfigError, DataError


def pool_of(
    count: int = 120, tests: int = 60, classes: int = 4, domains: int = 3, users: int = 10
) -> Pool:
    """Samples whose class, domain and user are known from their position, and independent of each
    other.
    """
    rows, test_rows = torch.arange(count), torch.arange(tests)
    return Pool.of(
        (rows[:, None].float(), rows % classes),
        (test_rows[:, None].float(), test_rows % classes),
        clients=rows // 3 % users,
        test_clients=test_rows // 3 % users,
        domains=rows // 5 % domains,
        test_domains=test_rows // 5 % domains,
        domain_names=("north", "south", "east")[:domains],
    )


WAYS: list[Partition] = [
    Iid(),
    Dirichlet(2.0),
    Dirichlet(2.0, equal=True),
    Labels(2),
    Quantity(),
    Quantity("dirichlet", alpha=0.7, min_size=2),
    Natural(),
    Domains(),
    Iid(fraction=0.3),
    Domains(fraction=0.1),
]


@settings(max_examples=15, deadline=None)
@given(clients=st.integers(3, 10), seed=st.integers(0, 50))
@pytest.mark.parametrize("way", WAYS, ids=repr)
def test_every_client_has_samples_and_no_sample_is_assigned_twice(way, clients, seed):
    pool = pool_of()
    data = pool.partition(clients, way, seed)
    assert data.num_clients == len(data.test_parts) == clients
    assert int(data.parts.sizes.min()) >= 1
    for parts, count in ((data.parts, 120), (data.test_parts, 60)):
        dealt = parts.order.tolist()
        assert len(dealt) == len(set(dealt))
        assert set(dealt) <= set(range(count))
    again = pool.partition(clients, way, seed)
    assert torch.equal(again.parts.order, data.parts.order)
    assert torch.equal(again.parts.offsets, data.parts.offsets)
    assert torch.equal(again.test_parts.order, data.test_parts.order)


@pytest.mark.parametrize(
    "way", [Iid(), Dirichlet(2.0), Labels(4), Quantity(), Natural(), Domains()], ids=repr
)
def test_every_sample_is_assigned(way):
    data = pool_of().partition(10, way)
    assert sorted(data.parts.order.tolist()) == list(range(120))
    assert sorted(data.test_parts.order.tolist()) == list(range(60))


@pytest.mark.parametrize(
    "way", [Iid(), Dirichlet(2.0), Labels(2), Quantity(), Domains(), Iid(fraction=0.3)], ids=repr
)
def test_another_seed_gives_another_partition(way):
    deals = [pool_of().partition(5, way, seed).parts[0].tolist() for seed in (0, 1)]
    assert deals[0] != deals[1]


@pytest.mark.parametrize("way", [Iid(), Dirichlet(), Labels(), Quantity()], ids=repr)
def test_a_number_of_clients_is_asked_for(way):
    with pytest.raises(DataError, match="among a number of clients; none was asked for"):
        pool_of().partition(None, way)
    with pytest.raises(
        DataError,
        match="121 clients were asked for; data has 120 samples, which can serve that many",
    ):
        pool_of().partition(121, way)
    with pytest.raises(DataError, match="0 clients were asked for"):
        pool_of().partition(0, way)


@pytest.mark.parametrize("way", [0, 4, "iid", Iid])
def test_other_objects_than_partitions_are_refused(way):
    with pytest.raises(
        DataError,
        match=r"data was to be partitioned by .*; a partition fits, such as pool\.partition\(20",
    ):
        pool_of().partition(4, way)


@pytest.mark.parametrize("count", [2.5, "3", True])
def test_clients_are_counted_in_whole_numbers(count):
    with pytest.raises(
        DataError,
        match=f"{count!r} clients were asked for; data can be partitioned among a whole number",
    ):
        pool_of().partition(count, Iid())
    assert pool_of().partition(np.int64(3), Iid()).num_clients == 3


def test_fractions_are_checked_when_they_are_set():
    with pytest.raises(
        ConfigError, match=r"Iid: fraction = 0 was asked for; it must lie in \(0, 1\]"
    ):
        Iid(fraction=0)
    with pytest.raises(ConfigError, match=r"Dirichlet: alpha = -1 was asked for"):
        Dirichlet(-1)


def test_the_table_has_all_of_them_by_their_names():
    assert {name: kind.__name__.lower() for name, kind in PARTITIONS.items()} == {
        name: name for name in PARTITIONS
    }


# --- iid ----------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.data())
def test_iid_assigns_equal_shares(count, data):
    clients = data.draw(st.integers(1, count))
    sizes = pool_of(count).partition(clients, Iid()).parts.sizes
    assert int(sizes.max() - sizes.min()) <= 1
    assert int(sizes.sum()) == count


def test_iid_mixes():
    assert pool_of().partition(3, Iid()).parts[0].tolist() != list(range(40))


def test_of_few_test_samples_some_clients_have_none():
    data = pool_of(tests=4).partition(10, Iid())
    assert data.test_parts.sizes.tolist() == [1, 1, 1, 1, 0, 0, 0, 0, 0, 0]


# --- labels -------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 10), st.integers(2, 5), st.data())
def test_labels_are_as_many_as_asked_in_training_and_test(clients, classes, data):
    labels = data.draw(st.integers(1, classes))
    pool = pool_of(60 * classes, 30 * classes, classes)
    dealt = pool.partition(clients, Labels(labels), seed=1)
    for part, test_part in zip(dealt.parts, dealt.test_parts, strict=True):
        own = set(pool.targets[part].tolist())
        assert len(own) == labels
        assert set(pool.test_targets[test_part].tolist()) == own
    owned = set(pool.targets[dealt.parts.order].tolist())
    everyone = [place for place, label in enumerate(pool.targets.tolist()) if label in owned]
    assert sorted(dealt.parts.order.tolist()) == everyone  # all of a held class


def test_labels_are_assigned_evenly():
    data = pool_of(1000, classes=10).partition(10, Labels(2))
    holders = torch.stack([data.classes_present(client, 10) for client in range(10)]).sum(0)
    assert holders.tolist() == [2] * 10


def test_labels_use_only_classes_that_occur():
    """As in EMNIST's letters, which count from 1."""
    targets = torch.arange(40) % 4 + 1
    data = Pool.of((torch.zeros(40, 1), targets), (torch.zeros(40, 1), targets)).partition(
        4, Labels(2)
    )
    assert {int(data.classes_present(client, 5).sum()) for client in range(4)} == {2}


def test_impossible_labels_are_refused():
    with pytest.raises(DataError, match="6 labels a client were asked for; data has 5 classes"):
        pool_of(10, 10, 5).partition(2, Labels(6))
    with pytest.raises(
        DataError, match=r"class \d has 2 samples for 3 clients that hold it. Fewer clients"
    ):
        pool_of(10, 10, 5).partition(3, Labels(5))


@pytest.mark.parametrize("way", [Labels(), Dirichlet()], ids=repr)
def test_sequences_cannot_be_partitioned_by_class(way):
    tokens = torch.zeros(9, 5, dtype=torch.int64)
    pool = Pool.of((tokens, tokens), (tokens, tokens))
    with pytest.raises(
        DataError, match=r"partitions by class; a target of data has shape \(5,\) .* Iid, Quantity"
    ):
        pool.partition(2, way)
    assert pool.partition(2, Quantity()).num_clients == pool.partition(2).num_clients == 2


@pytest.mark.parametrize("way", [Labels(), Dirichlet()], ids=repr)
@pytest.mark.parametrize(
    "targets", [torch.linspace(0, 1, 9), torch.eye(9) > 0], ids=["real", "labels"]
)
def test_only_classes_can_be_partitioned_by_class(way, targets):
    rows = torch.arange(9)
    x = rows[:, None].float()
    pool = Pool.of(
        (x, targets), (x, targets), clients=rows % 3, test_clients=rows % 3, domains=rows % 2
    )
    with pytest.raises(
        DataError, match=r"It needs one class for each sample, as a whole number\. Iid, Quantity"
    ):
        pool.partition(2, way)
    for other in (Iid(), Quantity(), Natural(), Domains()):
        assert pool.partition(2, other).num_clients == 2


# --- Dirichlet ----------------------------------------------------------------------------------


def mixtures(way: Partition, clients: int = 50) -> torch.Tensor:
    """(class, client) how a class is shared out."""
    data = pool_of(20_000, 2000).partition(clients, way)
    held = torch.stack(
        [torch.bincount(data.targets[part], minlength=4) for part in data.parts], 1
    ).double()
    return held / held.sum(1, keepdim=True)


def test_shares_of_a_class_have_the_variance_of_a_dirichlet_draw():
    """Var p = (1/K)(1 − 1/K)/(Kα + 1), here over 4 classes and 50 clients."""
    for alpha in (0.3, 2.0):
        expected = (1 / 50) * (1 - 1 / 50) / (50 * alpha + 1)
        assert float(mixtures(Dirichlet(alpha)).var(correction=0)) == pytest.approx(
            expected, rel=0.35
        )


def test_a_large_alpha_is_nearly_iid():
    assert float((mixtures(Dirichlet(1e5)) - 1 / 50).abs().max()) < 2e-3


def test_test_samples_are_shared_out_like_training_samples():
    data = pool_of(4000, 4000).partition(8, Dirichlet(0.4))
    for label in range(4):
        train, test = (
            torch.tensor([int((targets[part] == label).sum()) for part in parts])
            for targets, parts in ((data.targets, data.parts), (data.test_targets, data.test_parts))
        )
        assert int((train - test).abs().max()) <= 1


def test_draws_are_repeated_until_every_client_has_enough():
    assert int(pool_of(400).partition(10, Dirichlet(0.5, 10)).parts.sizes.min()) >= 10
    smallest = [
        int(pool_of(60).partition(12, Dirichlet(0.5), seed).parts.sizes.min()) for seed in range(20)
    ]
    assert min(smallest) == 2  # so that every client can train batch norm
    with pytest.raises(
        DataError, match=r"the poorest had \d+ at best. A larger alpha, fewer clients or a smaller"
    ):
        pool_of(400).partition(20, Dirichlet(0.05, 19))


def test_equal_clients_draw_their_own_classes():
    """All samples are dealt once, and proportions of a client vary as a Dirichlet draw over 4
    classes.
    """
    pool, clients = pool_of(20_000, 2000), 50
    data = pool.partition(clients, Dirichlet(0.5, equal=True))
    assert data.parts.sizes.tolist() == [400] * clients
    assert sorted(data.parts.order.tolist()) == list(range(20_000))
    held = (
        torch.stack([torch.bincount(data.targets[part], minlength=4) for part in data.parts]) / 400
    )
    # What the last clients take depends on what is left, which makes them a little more alike.
    assert float(held.var(correction=0)) == pytest.approx(0.25 * 0.75 / (4 * 0.5 + 1), rel=0.25)
    assert float((Dirichlet(1e5, equal=True).split(pool, clients)[0].sizes - 400).abs().max()) == 0


def test_equal_clients_take_other_classes_when_one_runs_out():
    targets = torch.tensor([0] * 8 + [1] * 2)
    pool = Pool.of((torch.zeros(10, 1), targets), (torch.zeros(2, 1), torch.tensor([0, 1])))
    data = pool.partition(3, Dirichlet(0.01, equal=True))
    assert data.parts.sizes.tolist() == [3, 3, 3]
    assert len(set(data.parts.order.tolist())) == 9


# --- quantity -----------------------------------------------------------------------------------


def test_sizes_are_lognormal():
    sizes = pool_of(300_000, 10).partition(2000, Quantity(sigma=0.8)).parts.sizes.double()
    assert float(sizes.log().std()) == pytest.approx(0.8, rel=0.05)


def test_sizes_without_spread_are_equal():
    assert pool_of(100).partition(10, Quantity(sigma=0.0)).parts.sizes.tolist() == [10] * 10


def test_every_client_gets_the_smallest_size():
    sizes = pool_of(200).partition(20, Quantity("dirichlet", alpha=0.1, min_size=6)).parts.sizes
    assert int(sizes.min()) >= 6
    assert int(sizes.sum()) == 200
    with pytest.raises(
        DataError, match=r"20 clients with at least 11 samples each .* min_size = 10 would fit"
    ):
        pool_of(200).partition(20, Quantity(min_size=11))


def test_test_parts_are_as_unequal():
    data = pool_of(600, 600).partition(6, Quantity())
    assert int((data.parts.sizes - data.test_parts.sizes).abs().max()) <= 1


# --- natural ------------------------------------------------------------------------------------


def test_natural_clients_are_the_users_of_the_data():
    pool = pool_of()
    data = pool.partition(partition=Natural())
    assert data.num_clients == 10
    for user in range(10):
        assert data.parts[user].tolist() == (pool.clients == user).nonzero().flatten().tolist()
        assert (
            data.test_parts[user].tolist()
            == (pool.test_clients == user).nonzero().flatten().tolist()
        )


def test_fewer_natural_clients_are_a_draw_by_seed():
    pool = pool_of()
    deals = [pool.partition(4, Natural(), seed) for seed in range(6)]
    users = [
        {tuple(pool.clients[part].unique().tolist()) for part in partition.parts}
        for partition in deals
    ]
    assert all(len(some) == 4 and all(len(user) == 1 for user in some) for some in users)
    assert len({frozenset(some) for some in users}) > 1


def test_users_with_too_little_are_left_out():
    clients = torch.tensor([0] * 5 + [1] * 2 + [4] * 3)
    pool = Pool.of(
        (torch.zeros(10, 1), torch.zeros(10, dtype=torch.int64)),
        (torch.zeros(2, 1), torch.tensor([0, 0])),
        clients=clients,
        test_clients=torch.tensor([1, 7]),
    )
    data = pool.partition(partition=Natural(min_size=3))
    assert data.parts.sizes.tolist() == [5, 3]
    assert data.test_parts is None  # the test set has other users
    with pytest.raises(
        DataError, match="3 clients were asked for; data has 2 users with at least 3 samples"
    ):
        pool.partition(3, Natural(min_size=3))
    with pytest.raises(DataError, match="all clients were asked for; data has 0 users"):
        pool.partition(None, Natural(min_size=6))


def test_without_a_partition_samples_go_to_the_clients_they_are_of():
    assert pool_of().usual == Natural()
    whole, some = pool_of().partition(), pool_of().partition(4, seed=2)
    assert [part.tolist() for part in whole.parts] == [
        p.tolist() for p in pool_of().partition(None, Natural()).parts
    ]
    assert [part.tolist() for part in some.parts] == [
        p.tolist() for p in pool_of().partition(4, Natural(), 2).parts
    ]
    nobodys = replace(pool_of(), clients=None, test_clients=None)
    assert nobodys.usual == Iid()
    assert [part.tolist() for part in nobodys.partition(3).parts] == [
        p.tolist() for p in nobodys.partition(3, Iid()).parts
    ]


@pytest.mark.parametrize(("way", "key"), [(Natural(), "client_train"), (Domains(), "domain_train")])
def test_data_without_clients_or_domains_cannot_be_partitioned_by_them(way, key):
    pool = Pool.of((torch.zeros(4, 1), torch.arange(4)), (torch.zeros(4, 1), torch.arange(4)))
    with pytest.raises(DataError, match=f"data does not have .* `{key}`; Iid, Dirichlet"):
        pool.partition(2, way)


# --- domains ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clients", "homes"), [(6, [0, 0, 1, 1, 2, 2]), (4, [0, 0, 1, 2]), (None, [0, 1, 2])]
)
def test_whole_domains_go_to_neighbouring_clients(clients, homes):
    pool = pool_of()
    data = pool.partition(clients, Domains())
    assert [pool.domains[part].unique().tolist() for part in data.parts] == [
        [home] for home in homes
    ]
    assert [pool.test_domains[part].unique().tolist() for part in data.test_parts] == [
        [home] for home in homes
    ]


def test_a_fraction_is_taken_of_every_domain():
    """FedResCuE takes 5 % of each domain for two clients."""
    data = pool_of(1200, 60).partition(6, Domains(fraction=0.05))
    assert torch.bincount(data.domains[data.parts.order]).tolist() == [20, 20, 20]
    assert len(data.test_parts.order) == 60  # the test set stays whole


def test_the_largest_size_is_kept_for_pools_of_any_size():
    """5 % of a set is another number of images for every set; FedResCuE's is 371 a domain."""
    for count in (600, 1200):
        data = pool_of(count, 60).partition(6, Domains(max_size=15))
        assert [len(part) for part in data.parts] == [15] * 6
        assert len(data.test_parts.order) == 60
    assert [len(part) for part in pool_of(60, 6).partition(6, Domains(max_size=15)).parts] == [
        10
    ] * 6
    assert [
        len(part) for part in pool_of(600, 6).partition(6, Domains(fraction=0.1, max_size=15)).parts
    ] == [10] * 6
    with pytest.raises(ConfigError, match=r"Domains: max_size = 0 was asked for"):
        Domains(max_size=0)


def test_impossible_domains_are_refused():
    with pytest.raises(
        DataError, match="2 clients were asked for; the 3 domains of data need one each"
    ):
        pool_of().partition(2, Domains())
    with pytest.raises(DataError, match="domain 'south' has 5 samples for 6 clients"):
        pool_of(17).partition(17, Domains())


# --- Flower's partitioners ----------------------------------------------------------------------


# pyarrow to datasets, about sorting
@pytest.mark.filterwarnings("ignore:Specifying null_placement")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("IidPartitioner", {}),
        ("DirichletPartitioner", {"alpha": 0.5, "min_partition_size": 2}),
        (
            "PathologicalPartitioner",
            {"num_classes_per_partition": 2, "class_assignment_mode": "deterministic"},
        ),
        ("ShardPartitioner", {"num_shards_per_partition": 2}),
        ("InnerDirichletPartitioner", {"partition_sizes": [24] * 5, "alpha": 0.5}),
        ("NaturalIdPartitioner", {"partition_by": "client"}),
        ("GroupedNaturalIdPartitioner", {"partition_by": "client", "group_size": 2}),
        ("SizePartitioner", {"partition_sizes": [60, 30, 15, 10, 5]}),
    ],
)
def test_partitions_of_flower_are_those_of_flower_itself(name, options):
    from datasets import Dataset
    from flwr_datasets import partitioner as flower

    pool = pool_of()
    clients = 10 if name == "NaturalIdPartitioner" else 5
    data = pool.partition(clients, Flwr(name, options), seed=3)
    kind = getattr(flower, name)
    own = {"num_partitions": clients, "partition_by": "label", "seed": 3, **options}
    takes = kind.__init__.__code__.co_varnames
    theirs = kind(**{key: value for key, value in own.items() if key in takes})
    theirs.dataset = Dataset.from_dict(
        {"label": pool.targets.numpy(), "client": pool.clients.numpy(), "at": np.arange(120)}
    )
    assert [part.tolist() for part in data.parts] == [
        theirs.load_partition(one)["at"][:] for one in range(clients)
    ]
    assert len(data.test_parts) == clients


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        (Flwr("DirichletPartitoner"), ConfigError, "Did you mean 'DirichletPartitioner'"),
        (Flwr("VerticalEvenPartitioner"), ConfigError, "no partitioner of flwr-datasets named"),
        (Flwr("DirichletPartitioner"), DataError, "could not partition data: TypeError.*alpha"),
        (
            Flwr("SizePartitioner", {"partition_sizes": [60, 60]}),
            DataError,
            "3 clients were asked for; .* among 2",
        ),
        (
            Flwr("DirichletPartitioner", {"alpha": [1e-4, 9.0, 9.0], "min_partition_size": 0}),
            DataError,
            r"left client 0 without samples",
        ),
    ],
)
def test_partitions_that_flower_cannot_make_are_refused(way, error, message):
    with pytest.raises(error, match=message):
        pool_of().partition(3, way)


# --- scale --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [Iid(), Quantity(), Natural(), Domains()], ids=repr)
def test_the_cost_of_a_partition_depends_on_samples_and_not_on_clients(way):
    """Stack Overflow's 342,477 clients, three samples each: about a second; a tensor a client would
    take ten.
    """
    clients = 342_477
    rows = torch.arange(3 * clients)
    pool = Pool.of(
        (rows[:, None], rows % 10),
        (rows[:9, None], rows[:9] % 10),
        clients=rows // 3,
        domains=rows % 5,
    )
    start = time.process_time()
    data = pool.partition(clients, way)
    assert time.process_time() - start < 20
    assert data.num_clients == clients
    assert data.parts.order.numel() == 3 * clients
    assert data.size(clients - 1) >= 1


def test_a_partition_that_does_not_say_how_to_divide_is_refused():
    class Silent(Partition):
        """A partition without `split`."""

    with pytest.raises(DataError, match=r"by Silent; it does not say how\. A method `split`"):
        Silent().split(pool_of(), 3)
