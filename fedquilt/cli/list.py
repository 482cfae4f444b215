"""The command `fedquilt list`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedquilt.cli.options import (
    By,
    DataOptions,
    File,
    Flag,
    Name,
    What,
)
from fedquilt.errors import (
    ConfigError,
)


@dataclass(frozen=True)
class ListRequest(DataOptions):
    """List everything that can be chosen by name. With NAME, list the options of one entry.

    `list data --plot` plots the samples of each client, for the data and partition that are named.
    """

    # list to show: methods, models, data, partitions, tasks, metrics, fleets, links …; all if not
    # given
    what: What = "all"
    name: Name = ""  # name of one entry, whose options are listed
    config: File = None  # for --plot: file of settings; the demo's if not given
    plot: Flag = False  # plot how many samples of each class or domain every client holds
    by: By = "class"  # for --plot: count samples by class or by domain
    # for --plot: write a figure to this file, such as clients.png or clients.svg, instead of text
    out: File = None
    # for --plot: run code that the settings of a run's folder name, and add it to your list of
    # trusted code
    trust: Flag = False
    json: Flag = False  # print a JSON object keyed by name

    def __call__(self) -> None:
        """Print the lists, or the plot of each client's samples with `--plot`.

        Raises:
            ConfigError: An option of the plot was given without `--plot`.
        """
        from fedquilt.cli import listing
        from fedquilt.cli.show import console_for, print_json, say, show_table

        if self.plot:
            self._plot()
            return
        if self != replace(ListRequest(), what=self.what, name=self.name, json=self.json):
            raise ConfigError(
                "list was asked for with options for a plot of the data; add --plot to have one."
            )
        kinds = listing.LISTS if self.what == "all" else [self.what]
        lists = {kind: listing.entries(kind, self.name, with_stages=self.json) for kind in kinds}
        if self.json:
            print_json(lists if self.what == "all" else lists[self.what])
            return
        console = console_for()
        for index, (kind, rows_by_name) in enumerate(lists.items()):
            if index:
                say(console, "")
            show_table(console, kind, rows_by_name)
            if self.name:
                for title, rows in listing.details(kind, self.name).items():
                    say(console, "")
                    show_table(console, title, rows)

    def _plot(self) -> None:
        from fedquilt.cli.show import console_for, print_json, say
        from fedquilt.data.plot import blocks, counts, figure
        from fedquilt.runs.demo import demo
        from fedquilt.runs.experiment import Experiment
        from fedquilt.runs.settings_file import read_settings

        if self.what != "data":
            raise ConfigError(
                f"list {self.what} --plot was asked for; list data --plot draws who holds what."
            )
        settings, sources = self.layers(
            read_settings(self.config, self.trust) if self.config else demo()
        )
        experiment = Experiment.of(settings, sources, self.config or "")
        data, _ = experiment.data.federate(experiment.fleet.total, experiment.seed)
        if self.out:
            figure(data, self.out, self.by)
        if self.json:
            print_json({"data": data.name, "by": self.by, "counts": counts(data, self.by).tolist()})
        else:
            say(
                console_for(),
                f"{self.out} shows who holds what" if self.out else blocks(data, self.by),
            )
