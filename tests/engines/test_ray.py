"""Every method on the workers of a Ray cluster against the sequential engine; workers that die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fedquilt as fq
from fedquilt.engines.ray.connection import Cluster, check_reachable
from fedquilt.engines.ray.engine import Ray, cut
from fedquilt.engines.ray.pool import WorkerPool
from fedquilt.errors import ConfigError, TrainingError
from fedquilt.methods import METHODS, FedAvg, FedRolex, HeteroFL, SplitMix
from fedquilt.names import find
from fedquilt.round.federation import World
from fedquilt.round.fold import Fold
from fedquilt.round.merge import Mean
from fedquilt.round.training.learner import Learner, Phase
from fedquilt.round.training.objectives import Wrapping
from fedquilt.round.training.view import View
from fedquilt.terms import Job, Server
from tests.conftest import CUTTING, assert_same, with_local
from tests.engines.test_growth import FOUR_BITS, INNER, grown
from tests.engines.test_links import LINKS
from tests.growing import growing

RAGGED = (7, 4, 9, 5, 8, 4)  # with batches of 4: tails of 3, 0, 1 (joined), 1 (joined), 0, 0
SHARES = (1.0, 0.5, 0.25)
TWO = Cluster(workers=2)
CPU = torch.device("cpu")

pytestmark = pytest.mark.slow  # a cluster of processes beside the tests' own: `make test-all`


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Return two workers on this machine. Engines that ask for equal workers share them."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        yield WorkerPool.of(TWO, CPU, 1)
        ray.shutdown()


@pytest.fixture
def start(pool, make_data):
    def start(method, family, engine="ray", cluster=TWO, precision="fp64", link=fq.Link(), **fleet):
        data = make_data(family, RAGGED, labels=2)
        devices = fq.Fleet.of(SHARES, 6, **{"cohort": 6, **fleet})
        how = fq.Evaluation(per_client=True, batch_size=10)
        method = with_local(
            method,
            batch_size=4,
            optimizer=fq.optimizers.SGD(lr=0.1, momentum=0.9, weight_decay=1e-3),
        ).settled(2)
        if engine == "ray":
            engine = Ray(data, precision=precision, cluster=cluster)
        return fq.prepare(
            method, family, data, devices, engine, precision=precision, evaluation=how, link=link
        )

    return start


def assert_identical(one: fq.Run, other: fq.Run) -> None:
    assert_same(one, other, atol=0)


def test_an_engine_can_be_used_with_other_data_and_another_seed(residual, start, make_data):
    """Workers cache data and federation, which must be replaced by the new ones."""
    run = start(HeteroFL(), residual).train(1)
    other, fleet = make_data(residual, RAGGED[::-1], labels=2), run.fleet
    runs = [
        fq.prepare(
            run.method,
            residual,
            other,
            fleet,
            engine,
            3,
            precision="fp64",
            evaluation=run.evaluation,
        ).train(2)
        for engine in (run.engine, "sequential")
    ]
    assert_same(*runs)


@pytest.mark.parametrize("name", CUTTING)
def test_every_method_gives_the_numbers_of_the_sequential_engine(name, residual, start):
    truth, other = (
        start(METHODS[name](), residual, engine, cohort=5, dynamic=True).train(2)
        for engine in ("sequential", "ray")
    )
    assert_same(truth, other)


@pytest.mark.parametrize("name", CUTTING)
def test_every_method_gives_the_numbers_of_the_sequential_engine_over_a_link(name, residual, start):
    """Workers use the run's link and return its client states. Two runs with different links share
    a pool.
    """
    for link in (LINKS["everything"], LINKS["lossy"]):
        truth, other = (
            start(METHODS[name](), residual, engine, link=link, cohort=5, dynamic=True).train(2)
            for engine in ("sequential", "ray")
        )
        assert_same(truth, other)
        assert [r.link_seconds for r in truth.records] == [r.link_seconds for r in other.records]


@pytest.mark.parametrize("name", ["splitmix", "scaffold"])
def test_late_clients_are_those_of_the_sequential_engine(name, residual, start):
    clock = fq.links.Clock(down=(2e5, 1e5, 3e5), up=1e5, latency=0.01, compute=(1e6, 5e5))
    seconds = (
        start(METHODS[name](), residual, "sequential", link=fq.Link(clock=clock))
        .train(1)
        .records[0]
        .link_seconds
    )
    link = fq.Link(clock=replace(clock, deadline=seconds / 2))
    truth, other = (
        start(METHODS[name](), residual, engine, link=link).train(2)
        for engine in ("sequential", "ray")
    )
    assert 0 < len(truth.records[0].late) < 6
    assert_same(truth, other)


@pytest.mark.parametrize("name", INNER)
def test_progfed_over_each_method_gives_the_numbers_of_the_sequential_engine(name, start):
    """Six rounds across two growths, each with a warm-up."""
    truth, other = (
        start(grown(name).settled(6), growing(), engine, cohort=5, dynamic=True).train(6)
        for engine in ("sequential", "ray")
    )
    assert_same(truth, other)


@pytest.mark.parametrize(
    "link", [fq.Link.preset("lossy-mild"), FOUR_BITS], ids=["lossy-mild", "four bits"]
)
@pytest.mark.parametrize("name", ["fedavg", "fedrolex"])
def test_progfed_over_a_link_gives_the_numbers_of_the_sequential_engine(name, link, start):
    truth, other = (
        start(grown(name).settled(6), growing(), engine, link=link).train(6)
        for engine in ("sequential", "ray")
    )
    assert_same(truth, other)


@pytest.mark.parametrize("norm", ["post-own", "per_client-all"])
@pytest.mark.parametrize(
    "method", [FedRolex(shift=2), SplitMix(base=0.25)], ids=lambda method: type(method).__name__
)
def test_norms_of_each_client_give_the_numbers_of_the_sequential_engine(
    method, norm, residual, start
):
    method = with_local(method, norm=norm)
    truth, other = (
        start(method, residual, engine, link=LINKS["lossy"], cohort=5, dynamic=True).train(3)
        for engine in ("sequential", "ray")
    )
    assert_same(truth, other)


@pytest.mark.parametrize("on", ["test", "validation"])
def test_base_nets_sorted_by_validation_give_the_numbers_of_the_sequential_engine(
    on, residual, pool, make_data
):
    data = make_data(residual, RAGGED, labels=2).with_validation(0.3)
    method = with_local(SplitMix(base=0.25, sort=True), batch_size=4, norm="post")
    how = fq.Evaluation(batch_size=10, on=on)
    engines = ("sequential", Ray(data, precision="fp64", cluster=TWO))
    truth, other = (
        fq.run(
            method,
            residual,
            data,
            fq.Fleet.of(SHARES, 6),
            engine,
            2,
            precision="fp64",
            evaluation=how,
        )
        for engine in engines
    )
    assert_same(truth, other)


def test_clients_are_weighted_by_the_steps_of_all_rounds_on_workers_too(residual, start):
    """In three rounds, the steps of earlier rounds are sent to a client's worker and back."""
    method = FedRolex(weighting="updates")
    truth, other = (
        start(method, residual, engine, cohort=4).train(3) for engine in ("sequential", "ray")
    )
    assert_same(truth, other)
    assert len({memory.steps for memory in truth.server.memory.values()}) > 1


def test_a_schedule_within_the_round_gives_the_numbers_of_the_sequential_engine(residual, start):
    """Clients of a chunk have 3 or 6 steps, and each follows the schedule of its own steps."""
    within_round = fq.schedules.WithinRound(warmup_share=0.4, shape="cosine", final=0.1)
    method = FedRolex().with_local(epochs=3, within_round=within_round)
    truth, other = (start(method, residual, engine).train(2) for engine in ("sequential", "ray"))
    assert_same(truth, other)


def test_dropout_and_kept_momentum_give_the_numbers_of_the_sequential_engine(language, start):
    truth, other = (start(Keeping(), language, engine).train(3) for engine in ("sequential", "ray"))
    assert any(memory.slots for memory in other.server.memory.values())
    assert_same(truth, other)


@dataclass(frozen=True)
class Keeping(HeteroFL):
    """Clients keep their momentum."""

    def learner(self, job: Job, world: World) -> Learner:
        return replace(super().learner(job, world), keep_slots=True)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_one_worker_gives_the_bits_of_two(precision, residual, start):
    one, two = (
        start(FedRolex(), residual, cluster=Cluster(workers=n), precision=precision).train(2)
        for n in (1, 2)
    )
    assert_identical(one, two)


@dataclass(frozen=True)
class Watching(FedAvg):
    """A method whose error states the precision in which clients are trained."""

    def learner(self, job: Job, world: World) -> Learner:
        return replace(
            super().learner(job, world), phases=(Phase(Refusing(self.local.build_objective())),)
        )


@dataclass(frozen=True)
class Refusing(Wrapping):
    def __call__(self, view: View) -> Tensor:
        if len(view.targets) == 2:  # the trial before a run, which is not in a worker
            return self.objective(view)
        weights = next(iter(view.weights.values()))
        raise ConfigError(
            f"autocast is {torch.is_autocast_enabled('cpu')}, weights are {weights.dtype}"
        )


@pytest.mark.parametrize(
    ("precision", "found"), [("bf16", "True, .*32"), ("fp32", "False, .*32"), ("fp64", "F.*64")]
)
def test_workers_train_in_the_precision_asked_for(precision, found, residual, start):
    with pytest.raises(ConfigError, match=f"autocast is {found}"):
        start(Watching(), residual, precision=precision).train(1)


def test_chunks_are_neighbours_in_order():
    assert [list(chunk) for chunk in cut(range(7), 3)] == [[0, 1], [2, 3], [4, 5, 6]]
    assert [list(chunk) for chunk in cut(range(2), 8)] == [[0], [1]]
    assert cut([], 8) == []


def test_only_sums_are_sent_back(residual, start, pool, monkeypatch):
    """Neither the server's weights nor the family are sent with a partial fold."""
    run = start(HeteroFL(), residual)
    seen = []
    real = pool.results
    monkeypatch.setattr(pool, "results", lambda calls: (seen.append(a) or a for a in real(calls)))
    run.train(1)
    whole = sum(weight.nbytes for weight in run.server.weights.values())
    assert len(seen) == 6
    assert all(sum(array.nbytes for array in parcel.tensors) <= whole for parcel in seen)
    assert all(len(parcel.pickled) < 20_000 for parcel in seen)


# --- workers that die ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Deadly(HeteroFL):
    """A method that kills the process that trains client 3, the first time or every time."""

    trace: str = ""  # a file that says it has happened
    driver: int = 0

    def learner(self, job: Job, world: World) -> Learner:
        if (
            job.client.id == 3
            and os.getpid() != self.driver
            and not (self.trace and Path(self.trace).exists())
        ):
            if self.trace:
                Path(self.trace).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().learner(job, world)


def test_a_worker_killed_in_a_round_changes_nothing(residual, start, tmp_path, caplog):
    trace = tmp_path / "killed"
    plain = start(HeteroFL(), residual).train(2)
    other = start(Deadly(trace=str(trace), driver=os.getpid()), residual).train(2)
    assert trace.exists()
    assert "clients 3 in round 1 died; another worker trains them again" in caplog.text
    assert_identical(plain, other)


def test_a_client_that_kills_every_worker_is_named_and_nothing_is_lost(residual, start):
    run = start(Deadly(driver=os.getpid()), residual)
    before = dict(run.server.weights)
    with pytest.raises(
        TrainingError, match=r"trained clients 3 in round 1 died, and so did 2 others"
    ):
        run.train(1)
    assert run.server.round == 0
    assert all(torch.equal(weight, before[name]) for name, weight in run.server.weights.items())


def test_workers_killed_between_rounds_are_replaced(residual, start, pool):
    ray = pytest.importorskip("ray")
    plain, other = start(HeteroFL(), residual).train(2), start(HeteroFL(), residual).train(1)
    for worker in pool._idle:
        ray.kill(worker)
    assert_identical(plain, other.train(2))


# --- errors -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Failing(FedAvg):
    """A method that fails for client 4."""

    def learner(self, job: Job, world: World) -> Learner:
        if job.client.id == 4:
            raise ValueError("on purpose")
        return super().learner(job, world)


def test_divergence_in_a_worker_is_reported_as_on_one_machine(residual, start):
    messages = []
    for engine in ("vectorized", "ray"):
        run = start(HeteroFL(), residual, engine)
        method = with_local(run.method, optimizer=fq.optimizers.SGD(lr=1e300))
        run.federation = replace(run.federation, method=method)
        with pytest.raises(TrainingError, match=r"client \d .* in round 1, step \d") as caught:
            run.train(1)
        messages.append(str(caught.value).split(" in round")[1])
    assert messages[0] == messages[1]


def test_a_failing_method_names_the_clients_and_the_round(residual, start):
    run = start(Failing(), residual)
    with pytest.raises(
        TrainingError,
        match=r"trained clients 4 in round 1 failed: ValueError: on purpose \(.*\) \(in process",
    ):
        run.train(1)
    run.federation = start(FedAvg(), residual).federation  # the pool is as good as before
    assert run.train(1).server.round == 1


class Silent(Mean):
    """A mean that raises an error if it is joined."""

    def join(self, other):
        raise NotImplementedError("every update is needed at once")


class Alone(Fold):
    """A fold without a `join` of its own."""


@dataclass(frozen=True)
class Unjoined(FedAvg):
    kind: type = Silent

    def fold(self, server: Server, world: World) -> Fold:
        return self.kind(world.family.cutter) if self.kind is Silent else self.kind()


@pytest.mark.parametrize(
    ("kind", "why"), [(Silent, "every update is needed at once"), (Alone, "it has no join")]
)
def test_a_fold_that_cannot_be_joined_is_refused_before_the_round(kind, why, residual, start):
    with pytest.raises(
        ConfigError, match=rf"Unjoined .* fold {kind.__name__} cannot .*{why}.*'vectorized'"
    ):
        start(Unjoined(kind=kind), residual).train(1)


# --- what travels -------------------------------------------------------------------------------

OWN_METHOD = """
from dataclasses import dataclass
from fedquilt.methods import HeteroFL
from beside import scale

@dataclass(frozen=True)
class Slow(HeteroFL):
    factor: float = 0.5

    def lr(self, round):
        return scale(super().lr(round), self.factor)
"""


def test_a_method_in_a_users_file_is_sent_with_the_files_beside_it(residual, start, tmp_path):
    (tmp_path / "beside.py").write_text("def scale(value, factor):\n    return value * factor\n")
    (tmp_path / "own.py").write_text(OWN_METHOD)
    method = find({}, f"{tmp_path / 'own.py'}:Slow", "method")()
    truth, other = (start(method, residual, engine).train(2) for engine in ("sequential", "ray"))
    assert_same(truth, other)


def test_a_resumed_run_equals_one_that_was_not_interrupted(residual, start, tmp_path):
    whole, part = start(HeteroFL(), residual).train(2), start(HeteroFL(), residual).train(1)
    part.save(tmp_path / "run")
    again = fq.run(
        part.method, residual, part.data, part.fleet, "ray", 2, precision="fp64",
        evaluation=part.evaluation, out=tmp_path / "run", resume=True,
    )  # fmt: skip
    assert_identical(whole, again)


# --- without a cluster --------------------------------------------------------------------------


def test_without_ray_the_error_says_what_to_install(residual, make_data, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'ray' was asked for.*pip install -e '\.\[ray\]'"):
        fq.prepare(FedAvg(), residual, make_data(residual, (4,)), fq.Fleet.of((1.0,), 1, 1), "ray")


def test_an_unreachable_address_is_reported_at_once():
    with pytest.raises(
        ConfigError, match=r"no Ray cluster could be reached at '127\.0\.0\.1:1': ConnectionRefused"
    ):
        check_reachable("127.0.0.1:1")
    check_reachable("auto")


def test_importing_and_listing_engines_does_not_import_ray():
    code = (
        "import sys; from fedquilt.cli.listing import entries; entries('engines'); assert 'ray' "
        "not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_running_cluster_is_used_and_left_running(tmp_path):
    """A subprocess has its own connection to Ray, and starts the cluster itself."""
    pytest.importorskip("ray")
    code = """
        import gc, ray, torch, fedquilt as fq
        from torch import nn
        ray.init(address="local", num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1")
        torch.set_num_threads(1)
        train = torch.randn(8, 4), torch.arange(8) % 3
        test = torch.randn(4, 4), torch.arange(4) % 3
        data = fq.FederatedData.of(train, test, [range(4), range(4, 8)])
        family = fq.trace(nn.Linear(4, 3), data.example)
        run = fq.run(fq.methods.FedAvg(), family, data, fq.Fleet.of((1.0,), 2, 2), "ray", 1)
        assert run.engine._pool.size == 2
        del run
        gc.collect()
        assert ray.is_initialized()
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=tmp_path, timeout=120
    )
