"""What a framework costs: the same rounds of FedAvg in Flower's simulation and Apple's pfl, and in
fedquilt.

    pip install -e '.[bench]'
    python bench/flower.py [--clients 20] [--rounds 5] [--cores 2]

`trivial` clients take one step of a linear layer: what is left is the framework. `real` ones train
a small PreResNet for ten steps. Every framework has the clients, batches and initial weights of
fedquilt's `vectorized`, and as many cores: Flower as workers of one thread, the others as threads.
After each of its rounds comes one of fedquilt's, so that other work on the machine disturbs both;
how far the weights are apart in the end says that the work was the same. Medians of warm rounds;
what came before the first is `start`. A framework that is not installed is left out. Nothing leaves
the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import published
import torch
import torch.nn.functional as F
from measure import images, machine
from torch import Tensor, nn

import fedquilt as fq
from fedquilt import noise
from fedquilt.methods import FedAvg
from fedquilt.models import PreResNet
from fedquilt.round.training.batches import itinerary
from fedquilt.round.training.local import LocalTraining
from fedquilt.round.training.optimizers import SGD

LR = 0.02
APART = 5e-3  # float32 drifts over rounds; clients that fail show as more


class Linear(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 10))


@dataclass(frozen=True)
class Work:
    """What every client does in a round."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    samples: int  # a client
    batch: int

    @property
    def local(self) -> LocalTraining:
        return LocalTraining(optimizer=SGD(lr=LR, momentum=0.0), batch_size=self.batch)

    def net(self) -> nn.Module:
        """A plain module; its norms keep no statistics, as fedquilt's do not."""
        return published.build(lambda share: self.make(), 1.0)

    def batches(self, client: int, round: int) -> list[Tensor]:
        """A client's own samples, batch by batch, in the order the engines draw."""
        return itinerary(self.samples, self.local, noise.key(1, 0, client, round))


WORKS = (
    Work("trivial", Linear, (1, 8, 8), samples=8, batch=8),
    Work(
        "real",
        partial(PreResNet, (1, 1, 1), 10, 3, widths=(16, 32, 64)),
        (3, 16, 16),
        samples=100,
        batch=10,
    ),
)


def fit(work: Work, clients: int, client: int, round: int, net: nn.Module) -> None:
    """A client's local training, as one writes it by hand."""
    pool, labels = images(clients * work.samples, *work.shape)
    own = slice(client * work.samples, (client + 1) * work.samples)
    inputs, targets = pool[own] / 255, labels[own]
    optimizer = torch.optim.SGD(net.parameters(), LR)
    net.train()
    for rows in work.batches(client, round):
        optimizer.zero_grad()
        F.cross_entropy(net(inputs[rows]), targets[rows]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


class Turns:
    """Takes the time of a framework's rounds, and after each plays one of fedquilt's."""

    def __init__(self, work: Work, clients: int) -> None:
        inputs, targets = images(clients * work.samples, *work.shape)
        pool = inputs / 255, targets
        parts = list(torch.split(torch.arange(clients * work.samples), work.samples))
        data = fq.FederatedData.of(pool, pool, parts)
        family, fleet = fq.trace(work.make, data.example), fq.Fleet.of([1.0], clients, clients)
        self.run = fq.prepare(
            FedAvg(local=work.local), family, data, fleet, evaluation=fq.Evaluation(every=0)
        )
        self.theirs: list[float] = []
        self.ours: list[float] = []
        self._began = time.perf_counter()

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.run.server.weights.items()}

    def done(self) -> None:
        """A round of the framework is over."""
        self.theirs.append(time.perf_counter() - self._began)
        # one more is announced than is played: none is the last
        run, rounds = (
            self.run,
            self.run.server.round + 2,
        )
        played = fq.round.run_round(
            run.federation, run.server, run.fleet, run.engine, rounds, run.evaluation
        )
        run.server = played.server
        self.ours.append(played.record.seconds)
        self._began = time.perf_counter()

    def tell(self, work: Work, framework: str, weights: Mapping[str, Tensor]) -> None:
        theirs, ours = (statistics.median(taken[1:]) for taken in (self.theirs, self.ours))
        gap = max(
            float((value - weights[name]).abs().max())
            for name, value in self.run.server.weights.items()
        )
        if not gap < APART:
            raise RuntimeError(
                f"{framework} did not do the same work: its weights are {gap:.0e} from fedquilt's."
            )
        print(
            f"{work.name:<9}{framework:<9}{1e3 * theirs:>10.1f} ms{1e3 * ours:>10.1f} "
            f"ms{theirs / ours:>8.1f} times"
            f"{self.theirs[0] - theirs:>9.1f} s{gap:>11.0e}",
            flush=True,
        )


def in_flower(work: Work, clients: int, rounds: int, cores: int) -> None:
    """Flower's own FedAvg and simulation engine, a client a message."""
    home = tempfile.TemporaryDirectory()
    os.environ |= {
        "FLWR_HOME": home.name,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    import ray
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    client_app, server_app = ClientApp(), ServerApp()
    turns = Turns(work, clients)
    last: dict[str, Tensor] = {}

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        net = work.net()
        received, config = (
            message.content.array_records["arrays"],
            message.content.config_records["config"],
        )
        net.load_state_dict(received.to_torch_state_dict())
        client, round = context.node_config["partition-id"], config["server-round"]
        assert isinstance(client, int)
        assert isinstance(round, int)
        fit(work, clients, client, round - 1, net)  # Flower counts from 1
        learnt, size = ArrayRecord(net.state_dict()), MetricRecord({"num-examples": work.samples})
        return Message(content=RecordDict({"arrays": learnt, "metrics": size}), reply_to=message)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        def after(round: int, arrays: ArrayRecord) -> None:
            if round:
                turns.done()
                last.update(arrays.to_torch_state_dict())

        strategy = FlowerFedAvg(
            fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients
        )
        strategy.start(grid, ArrayRecord(turns.weights), num_rounds=rounds + 1, evaluate_fn=after)

    # not somebody's cluster that happens to be there
    own = {
        "address": "local",
        "_node_ip_address": "127.0.0.1",
    }
    backend: Any = {
        "init_args": {**own, "num_cpus": cores, "include_dashboard": False, "log_to_driver": False},
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    try:
        run_simulation(server_app, client_app, clients, backend_config=backend)
    finally:
        ray.shutdown()
        home.cleanup()
    turns.tell(work, "Flower", last)


def in_pfl(work: Work, clients: int, rounds: int, cores: int) -> None:
    """Run pfl's FederatedAveraging in its simulated backend: clients in turn, in this process."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    turns = Turns(work, clients)
    net: Any = work.net()
    net.load_state_dict(turns.weights)
    net.loss = lambda inputs, targets, **_: F.cross_entropy(net(inputs), targets)
    net.metrics = lambda inputs, targets, **_: {}
    inputs, targets = turns.run.data.inputs, turns.run.data.targets

    def own(client: int) -> Dataset:
        order = torch.cat(work.batches(client, turns.run.server.round)) + client * work.samples
        return Dataset(raw_data=[inputs[order], targets[order]])

    class Lap(TrainingProcessCallback):  # type: ignore[misc]
        def after_central_iteration(self, *args: object, **named: object) -> tuple[bool, Metrics]:
            turns.done()
            return False, Metrics()

    everyone = iter(list(range(clients)) * (rounds + 2))
    data = FederatedDataset(own, partial(next, everyone))
    net.train()
    model = PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0))
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=rounds + 1,
            evaluation_frequency=rounds + 2,
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=LR, local_batch_size=work.batch),
        NNEvalHyperParams(local_batch_size=work.samples),
        callbacks=[Lap()],
        send_metrics_to_platform=False,
    )
    turns.tell(work, "pfl", net.state_dict())


FRAMEWORKS = {"flwr": in_flower, "pfl": in_pfl}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=20, help="all of them in every round")
    parser.add_argument("--rounds", type=int, default=5, help="after the first")
    parser.add_argument("--cores", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.cores)
    print(
        f"{asked.clients} clients; a round{'':<3}framework     fedquilt{'':>15}start   weights "
        "apart"
    )
    for package, play in FRAMEWORKS.items():
        if importlib.util.find_spec(package) is None or (
            package == "flwr" and importlib.util.find_spec("ray") is None
        ):
            print(f"{package} is not installed: left out (pip install -e '.[bench]')")
            continue
        for work in WORKS:
            play(work, asked.clients, asked.rounds, asked.cores)
    print(machine())


if __name__ == "__main__":
    main()
