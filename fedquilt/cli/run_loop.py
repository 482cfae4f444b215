"""The life of a run on the command line: begin or resume it, train, and report its end."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedquilt.errors import ConfigError, RecordError
from fedquilt.runs.summaries import in_percent, main_of, prefers_higher

if TYPE_CHECKING:
    from fedquilt.cli.progress import Begin
    from fedquilt.runs.experiment import Experiment
    from fedquilt.runs.folder import Folder
    from fedquilt.runs.run import Run


MAX_SHOWN_SHARES = 8
# Keys of a summary that are shown.
_SHOWN = (
    "rounds",
    "members",
    "metrics",
    "method",
    "seconds",
    "bytes_down",
    "bytes_up",
)


class Interrupted(KeyboardInterrupt):
    """Interruption of a run.

    Its message has the number of finished rounds, and the command that resumes the run.
    """


@dataclass(frozen=True)
class RunLoop:
    """A run that is ready to begin or resume, or the summary of a finished run."""

    experiment: Experiment  # All settings.
    run: Run | None = None  # Run to train. None: the run is finished.
    folder: Folder | None = None  # Folder that the run writes to. None: nothing is kept.
    finished: dict[str, Any] | None = None  # Summary of a finished run. None: it is not finished.
    rounds: Path | None = None  # Folder with the rounds of a finished run.
    damage: tuple[str, ...] = ()  # Problems of the files of a finished run.
    source: str = ""  # Source of the settings: a file, the demo or defaults.

    @property
    def first_lines(self) -> list[str]:
        """Return the lines that a run prints first: its settings, then method, data and model."""
        assert self.run is not None
        values = values_of(self.experiment, self.run, self.experiment.seed)
        title = title_of(self.experiment.title, self.experiment, self.run)
        return [*settings_lines([("", self.source, values)]), title]

    def start(self, begin: Begin) -> None:
        """Train to the end. Records are on disk as soon as a round is over, if there is a folder.

        Args:
            begin: Starts the display of progress.

        Raises:
            Interrupted: The user pressed ctrl-C. The message says how to resume.
        """
        from fedquilt.cli.progress import Shown
        from fedquilt.config.writing import write
        from fedquilt.round.labels import labels_by_share
        from fedquilt.runs.loop import complete

        run, folder = self.run, self.folder
        assert run is not None
        labels = labels_by_share(run.method, run.fleet.kinds, run.world, run.evaluation.shares)

        def status(round: int) -> str:
            return run.method.status(round, run.world) if round < self.experiment.rounds else ""

        percent = run.world.task.main.is_rate
        shown = Shown(labels, percent, status, run.method.figure_names)
        try:
            complete(
                run,
                self.experiment.rounds,
                folder=folder,
                trackers=self.experiment.trackers,
                settings=write(self.experiment),
                watch=begin(run.server.round, shown),
                names=self.experiment.names,
            )
        except KeyboardInterrupt as error:
            raise Interrupted(self._hint()) from error

    def _hint(self) -> str:
        assert self.run is not None
        far = (
            f"The run was stopped after round {self.run.server.round} of {self.experiment.rounds}."
        )
        if self.folder is None:
            return f"{far} Nothing of it is kept; with --out DIR it could be resumed."
        return (
            f"{far} Continue with: "
            f"{shlex.join(['fedquilt', 'run', '--resume', str(self.folder.path)])}"
        )

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json, read from a finished run or made from this one."""
        if self.run is None:
            assert self.finished is not None
            return self.finished
        return self.run.summary | self.experiment.names

    def check_target(self, target: float | None) -> None:
        """Raise a ConfigError if the task's main figure cannot reach a target.

        This is so if it is not finite, or not in (0, 1] for a rate such as accuracy.

        Args:
            target: Value of the main figure. None is accepted.
        """
        from fedquilt.runs.milestones import check_target

        if target is None:
            return
        if self.run:
            main = self.run.world.task.main
            check_target(target, main.name, main.is_rate)
        else:
            check_target(target, main_of(self.summary), in_percent(self.summary))

    def summary_with(self, target: float | None) -> dict[str, Any]:
        """Return the summary, with the round in which each share reached a target.

        It has the keys "target" and "reached" in addition. A share that did not reach it has None.

        Args:
            target: Value of the main figure. None: nothing is added.
        """
        if target is None:
            return self.summary
        from fedquilt.runs.folder_files import read_records
        from fedquilt.runs.milestones import milestones

        records = self.run.records if self.run else read_records(self.rounds) if self.rounds else []
        by_share = milestones(records, target, main_of(self.summary), prefers_higher(self.summary))
        reached = {share: milestone and asdict(milestone) for share, milestone in by_share.items()}
        return {**self.summary, "target": target, "reached": reached}


def begun(experiment: Experiment, source: str, out: Path | None, stack: ExitStack) -> RunLoop:
    """Prepare a new run, and make its folder. Nothing is trained yet.

    Args:
        experiment: All settings.
        source: Source of the settings, for the first line: a file, the demo or defaults.
        out: Folder of the run. None: nothing is kept.
        stack: Closes the folder.

    Raises:
        ConfigError: The folder holds a run.
    """
    from fedquilt.runs.folder import Folder

    refuse_taken(out)
    ground = experiment.ground()
    run = experiment.prepare(ground)
    settled = experiment.settled(run, ground)
    if out is None:
        return RunLoop(settled, run, source=source)
    folder = stack.enter_context(Folder.create(out, settled.to_toml(), settled.checkpoint))
    return RunLoop(settled, run, folder, source=source)


def values_of(experiment: Experiment, run: Run, seed: int | None) -> str:
    """Return the settings that matter most, as the first line of a run shows them.

    Args:
        experiment: All settings.
        run: The prepared run.
        seed: Random seed. None: there are several, which another line shows.
    """
    from fedquilt.config.schema import label
    from fedquilt.round.training.optimizers import SGD
    from fedquilt.round.training.schedules import Constant
    from fedquilt.terms import Budget

    local, fleet, rounds = run.method.local, run.fleet, experiment.rounds
    optimizer = "" if isinstance(local.optimizer, SGD) else f"{label(type(local.optimizer))}, "
    schedules = [] if isinstance(local.schedule, Constant) else [label(type(local.schedule))]
    schedules += [] if local.within_round.is_constant else [f"within a round {local.within_round}"]
    schedule = f" ({'; '.join(schedules)})" if schedules else ""
    shares = [
        f"{budget.share:g}"
        for budget in fleet.kinds
        if budget.share and budget == Budget(share=budget.share)
    ]
    if len(shares) < len(fleet.kinds) or len(shares) > MAX_SHOWN_SHARES:
        budgets = f"{len(fleet.kinds)} kinds of budgets"
    else:
        budgets = f"share{'s'[: len(shares) != 1]} {', '.join(shares)}"
    seed_text = "" if seed is None else f", seed {seed}"
    return (
        f"{optimizer}lr {local.optimizer.lr:g}{schedule}, {local.epochs} "
        f"epoch{'s'[: local.epochs != 1]}, batch {local.batch_size}, {fleet.cohort} of "
        f"{fleet.num_clients} clients, {budgets}, {rounds} round{'s'[: rounds != 1]}{seed_text}"
    )


def title_of(methods: str, experiment: Experiment, run: Run) -> str:
    """Return a line with the methods, data, model, clients, engine and link.

    Args:
        methods: Names of the methods.
        experiment: All settings of one of them.
        run: The prepared run of that one.
    """
    from fedquilt.engines import ENGINES
    from fedquilt.names import registered
    from fedquilt.round.link import PERFECT

    names, fleet = experiment.names, run.fleet
    model = names["model"] if experiment.model else run.summary["model"]
    link_text = f"; {run.link}" if run.link != PERFECT else ""
    return (
        f"{methods} on {names['data']}: {model} for {fleet.num_clients} clients, {fleet.cohort} a "
        f"round, {registered(ENGINES, run.engine)} on {experiment.engine.device}{link_text}"
    )


def settings_lines(runs: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return lines on the settings of runs, one for each group of runs with equal settings.

    Names of runs are left out if all runs have equal settings.

    Args:
        runs: Name, source of the settings, and most important settings of each run.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for name, source, values in runs:
        groups.setdefault(values, []).append((name, source))
    lines = []
    for values, group in groups.items():
        whose = f" of {', '.join(name for name, _ in group)}" if len(groups) > 1 else ""
        sources = ", ".join(dict.fromkeys(source for _, source in group))
        lines.append(f"settings{whose}: {sources} ({values})")
    return lines


def refuse_taken(out: Path | None) -> None:
    """Raise a ConfigError if a folder holds a run, before anything is loaded. None is accepted."""
    from fedquilt.runs.folder_files import holds_a_run

    if out and holds_a_run(out):
        raise ConfigError(
            f"--out {out} was asked for; a run is there already. --resume it, or name another "
            "folder."
        )


def resumed(path: Path, rounds: int | None, stack: ExitStack, trust: bool = False) -> RunLoop:
    """Return a run that resumes from its last checkpoint, or the summary of a finished run.

    A run is finished if it has the rounds that are asked for. With more rounds, the number is
    written into the folder's config.toml.

    Args:
        path: Folder of the run.
        rounds: Number of rounds in all. None: that of its settings.
        stack: Closes the folder.
        trust: True: run code that the folder names. False: refuse code that is not in the list.
    """
    from fedquilt.runs.damage import damage_of
    from fedquilt.runs.experiment import Experiment
    from fedquilt.runs.folder import Folder
    from fedquilt.runs.folder_files import check_folder
    from fedquilt.runs.settings_file import read_settings
    from fedquilt.storage.files import write_text

    check_folder(path)
    config = path / "config.toml"
    if not config.exists():
        reason = "there is no run in it" if path.is_dir() else "there is no such folder"
        raise ConfigError(f"--resume {path} was asked for; {reason}.")
    settings = read_settings(config, trust, recorded=True, asked=f"--resume {path} was asked for")
    experiment = Experiment.of(settings, file=str(config))
    if rounds is not None:
        experiment = replace(experiment, rounds=rounds)
    finished = _summary_of(path)
    if finished and experiment.rounds <= finished["rounds"]:
        if rounds is not None and rounds < finished["rounds"]:  # Training cannot be undone.
            state = (
                f"the run in {path} has {finished['rounds']} behind it, and this is what they "
                "came to."
            )
            print(f"--rounds {rounds} was asked for; {state}", file=sys.stderr)
        return RunLoop(experiment, finished=finished, rounds=path, damage=tuple(damage_of(path)))
    folder = stack.enter_context(Folder.resume(path, experiment.checkpoint))
    run = experiment.prepare()
    if (done := folder.load(run)) > experiment.rounds:
        raise ConfigError(
            f"--rounds {rounds} was asked for; the run in {path} has {done} behind it."
        )
    if rounds is not None:
        write_text(config, experiment.to_toml())
    return RunLoop(experiment, run, folder, source=str(config))


def _summary_of(path: Path) -> dict[str, Any] | None:
    """Return the summary in a run's folder. None: the run is not finished.

    Raises:
        RecordError: The summary is damaged, or lacks a number that is shown.
    """
    from fedquilt.runs.summary_file import read_summary

    summary = read_summary(path)
    missing = [key for key in _SHOWN if summary is not None and key not in summary]
    if missing:
        raise RecordError(
            f"{path / 'summary.json'} is damaged: it has no {missing[0]}. Delete it to finish the "
            "run again."
        )
    return summary
