"""`Run`: a federation and its state, to train, evaluate, deploy, export and save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from typing_extensions import override

from fedquilt.data.parts import Array
from fedquilt.deploy.customizable import CustomizableModel, customizable
from fedquilt.deploy.deploy import deployed
from fedquilt.deploy.trained import TrainedRun
from fedquilt.display import Overview, Readable
from fedquilt.errors import ConfigError
from fedquilt.errors.faults import enough_memory
from fedquilt.family import Family
from fedquilt.family.norms import NormPolicy
from fedquilt.round import Grades, Record, RoundResult, run_round
from fedquilt.round.budgets import too_small
from fedquilt.round.labels import budgets_by_share
from fedquilt.runs.arguments import budget_of, whole_number
from fedquilt.runs.best import Best, mean_figure, validation_figures
from fedquilt.runs.client_states import ClientStates, NotKept, copied
from fedquilt.runs.description import summarize
from fedquilt.runs.folder import Folder
from fedquilt.runs.folder_files import saved_rounds
from fedquilt.runs.milestones import Milestone, check_target, reached
from fedquilt.runs.overview import labels_of_run, overview_of
from fedquilt.runs.per_client import PerClient, per_client
from fedquilt.runs.plot import run_chart
from fedquilt.runs.saved_state import state_after
from fedquilt.runs.signals import undisturbed
from fedquilt.terms import Budget, Server

if TYPE_CHECKING:
    import altair

    from fedquilt.data.origin import Origin
    from fedquilt.deploy.export import Exported
    from fedquilt.runs.experiment import Experiment

_log = logging.getLogger("fedquilt.runs")


@dataclass(frozen=True)
class RunOrigin:
    """The model and the data as they were passed to a run, so that settings can be written."""

    family: Family  # Family before the method adapted it
    data: Origin | None  # Description of how the data was made. None: it is not known


@dataclass(repr=False)
class Run(Readable, TrainedRun):
    """A federation and its state after the last completed round.

    `fedquilt.run`, `fedquilt.prepare` and `fedquilt.load_run` return it. It can be trained further,
    evaluated (`accuracy`, `metrics`, `records`), deployed, exported and saved. Attributes that
    deployment needs are those of `TrainedRun`.

    Attributes:
        records: Records of all completed rounds, in order.
        settled_for: Number of rounds that the method was settled for, which values such as
            ProgFed's stages depend on. None: the method was not settled.
        origin: Model and data as they were passed. None: they are not known.
        settings: Settings that the run was prepared from. None: it was started in Python.
        best: Best round so far on validation samples. None: no round was evaluated on any.
        folder: Folder that has its checkpoints. None: there is none.

    Example:
        >>> import torch
        >>> import fedquilt as fq
        >>> samples = torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 2
        >>> data = fq.data.Pool.of(samples, test=samples).partition(4)
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
        >>> family, fleet = fq.trace(net, data.example), fq.Fleet.of([1.0, 0.5], num_clients=4)
        >>> run = fq.prepare(fq.methods.FedRolex(), family, data, fleet)
        >>> run.server.round
        0
        >>> run.train(2).server.round  # Two rounds in all
        2
        >>> [budget.share for budget in run.devices["0.5"]]
        [0.5]
        >>> run.deploy(share=0.5)(samples[0]).shape
        torch.Size([24, 2])
    """

    records: list[Record] = field(default_factory=list)
    settled_for: int | None = None
    origin: RunOrigin | None = None
    settings: Experiment | None = None
    best: Best | None = None
    folder: Path | None = None

    def __post_init__(self) -> None:
        self._has_warned = False  # True once devices that cannot hold the net were reported

    @override
    def _overview(self) -> Overview:
        return overview_of(self)

    @property
    def history(self) -> list[dict[str, Any]]:
        """Return the records of all rounds so far, as plain values."""
        return [record.to_dict() for record in self.records]

    @property
    def accuracy(self) -> dict[str, float]:
        """Return accuracy in the last evaluation, by share.

        It is empty if the task has no accuracy, or nothing was evaluated yet.
        """
        return self.grades.accuracy

    @property
    def devices(self) -> dict[str, tuple[Budget, ...]]:
        """Return the budgets of the fleet by the keys of `accuracy` and `metrics`.

        A key is the share of the model that a budget allows, so that several budgets may have the
        same key. Methods that serve one net to all devices, such as FedAvg, are evaluated at fewer
        keys.
        """
        return budgets_by_share(self.method, self.fleet.kinds, self.world)

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """Return every metric in the last evaluation, by name and then by share."""
        return self.grades.metrics

    @property
    def grades(self) -> Grades:
        """Return the last evaluation. It is empty if no round was evaluated yet."""
        return next(
            (record.grades for record in reversed(self.records) if record.grades.main), Grades()
        )

    @property
    def summary(self) -> dict[str, Any]:
        """Return the summary of the run so far, as `summary.json` has it."""
        return summarize(self)

    @cached_property
    def _too_small(self) -> str:
        """Return a sentence on how many devices cannot hold the net. Empty: all can.

        Every distinct budget takes a plan, and every client may have its own budget. It is
        therefore computed only when it is needed, and not to prepare, reopen or export a run.
        """
        count = too_small(self.method, self.server, self.fleet, self.engine, self.world)
        if not count:
            return ""
        return f"{count} of {self.fleet.num_clients} devices cannot hold the net that they train"

    @property
    def note(self) -> str:
        """Return remarks that readers of the results need.

        These are the method's note, the number of devices that are too small, and the kind of
        samples if they are not test samples.
        """
        remarks = [self.method.note, self._too_small]
        if self.evaluation.on != "test":
            remarks.append(f"evaluated on {self.evaluation.on} samples")
        return "; ".join(remark for remark in remarks if remark)

    def reached(self, target: float, share: float = 1.0, metric: str = "") -> Milestone | None:
        """Return when a metric of a share first reached a target, and the cost until then.

        Args:
            target: Value of the metric, such as 0.6 for an accuracy of 60 %. Better values reach it
                too.
            share: Share of the model in (0, 1] that was evaluated.
            metric: Name of a metric of the records, such as `accuracy/svhn`. Empty: the task's main
                one.

        Returns:
            First evaluated round that reached the target, with its costs. None: no round has.
        """
        task = self.world.task
        name = metric or task.main.name
        check_target(target, name, task.metric_of(name).is_rate)
        return reached(self.records, target, share, name, task.metric_of(name).higher_is_better)

    def train(self, rounds: int, watch: Callable[[Record], None] | None = None) -> Run:
        """Train until the run has completed a number of rounds.

        If a round fails, or ctrl-C stops it, the state is that of the last completed round.

        Args:
            rounds: Total number of rounds, including those that are completed already. No effect if
                the run has as many.
            watch: Function that is called with the record of every round. None: no function is
                called.

        Returns:
            This run.

        Raises:
            ConfigError: The run was loaded without its data.
            TrainingError: Local training of a client failed.
        """
        if self.absent:
            raise ConfigError(
                f"a run was to be trained to round {rounds}; its data is not available: "
                f"{self.absent}"
            )
        rounds = whole_number("rounds", rounds)
        self.fleet.check(rounds)
        if self.server.round < rounds and not self._has_warned and self._too_small:
            self._has_warned = True
            _log.warning("%s ignores budgets: %s.", type(self.method).__name__, self._too_small)
        while self.server.round < rounds:
            with enough_memory(f"training round {self.server.round + 1}"):
                result = run_round(
                    self.federation, self.server, self.fleet, self.engine, rounds, self.evaluation
                )
            with undisturbed():
                # Client states are updated in-place after the round has succeeded, because the cost
                # of a copy would grow with the population.
                self.server.memory.update(result.memory)
                self.server = result.server
                self.records.append(result.record)
                self._warn_if_all_late(result)
                self._keep_if_best(result.record)
                if watch:
                    watch(result.record)
        return self

    def _warn_if_all_late(self, result: RoundResult) -> None:
        """Log a warning the first time that every client of a round missed the deadline.

        Args:
            result: Result of the round that has just ended, whose record is the last one.
        """
        if not _is_all_late(result.record) or any(map(_is_all_late, self.records[:-1])):
            return
        _log.warning(
            "all %d clients of round %d missed the deadline of %g s, so that the model stays as it "
            "was. The fastest takes at least %.3g s; a later deadline (link.clock.deadline) would "
            "let it take part. Later rounds of this kind are recorded without a warning.",
            len(result.late),
            result.record.round,
            self.link.deadline,
            min(result.late.values()),
        )

    def _keep_if_best(self, record: Record) -> None:
        """Keep the state of the round that has just ended if it is the best so far.

        Rounds that were not evaluated on validation samples are ignored.
        """
        figures = validation_figures(record.grades, self.evaluation)
        if not figures:
            return
        value = mean_figure(figures, self._fleet_shares)
        sign = 1.0 if self.world.task.main.higher_is_better else -1.0
        if self.best is None or sign * value > sign * self.best.value:
            memory = self.server.memory
            assert isinstance(memory, ClientStates)
            # A folder that watches the run writes the state to disk and drops this one.
            state = replace(self.server, memory=memory.snapshot())
            self.best = Best(record.round, value, figures, state)

    @cached_property
    def _fleet_shares(self) -> frozenset[str]:
        return frozenset(self.devices)

    def at(self, round: int | str) -> Run:
        """Return the run as it was after a round, to deploy from.

        This run does not change. For the last round it is returned itself.

        Args:
            round: Number of a round whose state is available: the last one, the best one, and those
                that have a checkpoint in the run's folder. "best": the round with the best main
                figure on validation samples.

        Raises:
            ConfigError: There is no such state. The message lists the available rounds.
            RecordError: Its checkpoint is damaged.
        """
        number = self._number_of(round)
        if number == self.server.round:
            return self
        best = self.best if self.best and self.best.round <= number else None
        records = [record for record in self.records if record.round <= number]
        return replace(self, server=self._state_after(number), records=records, best=best)

    def _number_of(self, round: int | str) -> int:
        """Return the number of a round that was asked for by its number or as "best".

        Raises:
            ConfigError: It is no number, or there is no best round. The message says why.
        """
        if round != "best":
            if isinstance(round, str):
                raise ConfigError(
                    f"the state of round {round!r} was asked for; 'best' fits, or "
                    f"{self._rounds_there}."
                )
            return whole_number("round", round)
        if self.best is not None:
            return self.best.round
        main = self.world.task.main
        request = f'round="best" was asked for, that of the best {main.name} on validation samples'
        if not self.engine.has_validation:
            raise ConfigError(
                f"{request}; clients of {self.data.name} hold back none. data.with_validation(0.1) "
                "in Python, data.validation = 0.1 in a file, holds back a tenth of every client's "
                f"training samples before a run. Without them {self._rounds_there} can be deployed."
            )
        reason = (
            "no round has been tested on them yet"
            if self.evaluation.best
            else "evaluation.best is off"
        )
        raise ConfigError(
            f"{request}; {reason}, so that no state was kept. {self._rounds_there} can be deployed."
        )

    @property
    def _rounds_there(self) -> str:
        """List the rounds whose state is available, in words such as "rounds 2, 5, 6"."""
        saved = saved_rounds(self.folder) if self.folder else []
        best = [self.best.round] if self.best else []
        rounds = sorted({self.server.round, *saved, *best})
        return f"{'round' if len(rounds) == 1 else 'rounds'} {', '.join(map(str, rounds))}"

    def _state_after(self, round: int) -> Server:
        """Return the server's state after an earlier round, from memory or from a checkpoint.

        Raises:
            ConfigError: The state was not kept.
        """
        best = self.best
        if best is not None and best.round == round and best.server is not None:
            memory = best.server.memory
            states = memory if isinstance(memory, NotKept) else copied(memory, self.engine.device)
            return replace(best.server, memory=states)
        folder = best.folder if best is not None and best.round == round else self.folder
        if folder is None or round not in saved_rounds(folder):
            hint = "" if self.folder else " A run with a folder (out=DIR) keeps checkpoints."
            raise ConfigError(
                f"the state after round {round} was asked for; it was not kept. "
                f"{self._rounds_there} can be deployed.{hint}"
            )
        return state_after(folder, round, self)

    def plot(self, metric: str = "") -> altair.LayerChart:
        """Return an Altair chart of a metric over rounds, with one line for each share.

        Notebooks show it. `chart.save("run.html")` writes it, and `chart.save("run.svg")` too if
        vl-convert-python is installed. The extra `report` has both packages.

        Args:
            metric: Name of a metric of the records, such as `accuracy/svhn`. Empty: the task's main
                one.

        Raises:
            ConfigError: Altair is not installed, no round was evaluated, or none recorded the
                metric.
        """
        task = self.world.task
        name = metric or task.main.name
        title = overview_of(self).title
        is_rate = task.metric_of(name).is_rate
        return run_chart(self.records, name, labels_of_run(self), title, is_rate)

    def per_client(self, clients: Sequence[int] | None = None) -> PerClient:
        """Return costs and results of clients, and the share of parameters trained by each domain.

        Args:
            clients: Numbers of clients. None: all of them, which is slow for a large fleet.
        """
        return per_client(self, clients)

    def save(self, path: str | Path) -> None:
        """Write the run into a new folder: settings, records, summary and the last state.

        `fedquilt.load_run` opens the folder, `fedquilt.load_state` reads the weights alone, and
        `fedquilt.run(…, out=path, resume=True)` continues the run. The best state on validation
        samples is written, too. Further training of this run is not written.

        Args:
            path: Folder, which is created if necessary. It must have no run.

        Raises:
            ConfigError: The folder already has a run, or cannot be written to.
            RecordError: Writing failed, for example because the disk is full.
        """
        from fedquilt.runs.recipe import config_text  # It imports this module.

        # A resumed run settles its method for this number again, however many rounds were trained.
        rounds = self.server.round if self.settled_for is None else self.settled_for
        with Folder.create(path, config_text(self, rounds)) as folder:
            copy = replace(self)  # This run continues without the folder.
            folder.watch(copy)
            folder.finish(copy.summary)

    def deploy(
        self,
        budget: Budget | None = None,
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
        robustness: float | None = None,
        share: float | None = None,
        round: int | Literal["best"] | None = None,
    ) -> nn.Module:
        """Return a plain `nn.Module` within a budget, with trained weights and norm statistics.

        The module is in evaluation mode.

        Args:
            budget: Budget of the device, which the module does not exceed. None: the whole model,
                or `share` of it.
            client: Number of the client whose own result is deployed. None: the server's result.
            norms: Norm policy, or its name, which decides what the norms normalize by. `batch`: the
                batch. `tracked`: statistics tracked in training. `per_client` and `per_client-all`:
                those that the client kept. `post`: measured over the training samples of all
                clients, or of `client`. `post-own`: measured over the samples of `client`.
                `post-public`: measured over the public samples. None: those that training stored,
                or `post`. Affine weights are always those that were trained.
            samples: Inputs (sample, …) on which statistics are measured instead. No effect if the
                policy does not measure. None: the samples that the policy names.
            robustness: Robustness of dual norms, from 0 (clean) to 1. `fq.set_robustness` changes
                it later. None: 0. No effect for models without dual or conditioned norms.
            share: Share of the model in (0, 1], in place of `budget`. None: `budget` decides.
            round: Round whose weights are deployed, as `at` takes it. "best": the best one on
                validation samples. None: the last one.

        Returns:
            A module with the smaller layers and their weights, on the run's device.

        Raises:
            BudgetError: No sub-model fits the budget.
            ConfigError: The state, the client or the samples that were asked for are not available.

        Example:
            >>> import torch
            >>> import fedquilt as fq
            >>> samples = torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 2
            >>> data = fq.data.Pool.of(samples, test=samples).partition(2)
            >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
            >>> family = fq.trace(torch.nn.Sequential(*layers), data.example)
            >>> fleet = fq.Fleet.of([1.0, 0.5], num_clients=2)
            >>> run = fq.run(fq.methods.HeteroFL(), family, data, fleet, rounds=1)
            >>> run.deploy(share=0.5)
            Sequential(
              (0): Linear(in_features=4, out_features=4, bias=True)
              (1): ReLU()
              (2): Linear(in_features=4, out_features=2, bias=True)
            )
        """
        device_budget = budget_of("deploy", budget, share)
        run = self if round is None else self.at(round)
        return deployed(run, device_budget, client, norms, samples).module(robustness)

    def export(
        self,
        file: str | Path,
        budget: Budget | None = None,
        *,
        share: float | None = None,
        round: int | Literal["best"] | None = None,
        **how: Any,
    ) -> Exported:
        """Write the result of `deploy` as ONNX, .pt2 or safetensors, after comparing it with torch.

        Args:
            file: File that is written. Its ending is the format, unless `format` names one.
            budget: Budget of the device. None: the whole model, or `share` of it.
            share: Share of the model in (0, 1], in place of `budget`. None: `budget` decides.
            round: Round whose state is written, or "best", as in `deploy`. None: the last one.
            **how: Options of `fedquilt.deploy.export.export`, such as `client` and `norms`.

        Raises:
            ExportError: The format cannot hold the model, or the file has other outputs.

        Example:
            >>> import torch
            >>> import fedquilt as fq
            >>> samples = torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 2
            >>> data = fq.data.Pool.of(samples, test=samples).partition(2)
            >>> layers = torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)
            >>> family = fq.trace(torch.nn.Sequential(*layers), data.example)
            >>> fleet = fq.Fleet.of([1.0, 0.5], num_clients=2)
            >>> run = fq.run(fq.methods.HeteroFL(), family, data, fleet, rounds=1)
            >>> exported = run.export("half.safetensors", share=0.5)
            >>> exported.format, exported.share, exported.params
            ('safetensors', 0.5, 30)
        """
        from fedquilt.deploy.export import export

        run = self if round is None else self.at(round)
        return export(run, file, budget_of("export", budget, share), **how)

    def customizable(
        self,
        shares: Iterable[float] = (1.0, 0.5, 0.25, 0.125),
        client: int | None = None,
        norms: NormPolicy | str | None = None,
        samples: Array | None = None,
        round: int | Literal["best"] | None = None,
    ) -> CustomizableModel:
        """Return one module for several shares that holds the weights once.

        `model.set(share=0.5)` switches the share while the model is in use.

        Args:
            shares: Shares of the model in (0, 1]. The first one is set.
            client: Number of the client whose own result is deployed. None: the server's result.
            norms: Norm policy or its name, as in `deploy`.
            samples: Inputs on which norm statistics are measured, as in `deploy`.
            round: Round whose weights are deployed, or "best", as in `deploy`. None: the last one.
        """
        return customizable(
            self if round is None else self.at(round), shares, client, norms, samples
        )


def _is_all_late(record: Record) -> bool:
    """Return True if some clients missed the deadline and none took part."""
    return bool(record.late) and record.loss is None
