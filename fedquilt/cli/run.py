"""The command `fedquilt run`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass

from fedquilt.cli.options import (
    Config,
    Options,
    Text,
)
from fedquilt.cli.output import output
from fedquilt.cli.run_loop import begun, resumed


@dataclass(frozen=True)
class RunRequest(Options):
    """Train one model on clients that cannot all hold it.

    Without a file and options this is a demo: HeteroFL on scikit-learn's digits, 20 rounds with 20
    clients. A third of the clients can hold the whole model, a third one half and a third one
    quarter. With --model or --data the defaults of the method, the fleet and the run apply instead
    of the demo's.
    """

    # file of settings; if not given the demo's, or with --model or --data the method's defaults
    config: Config = None
    method: Text = None  # method: a name of `fedquilt list methods`, or file.py:factory

    def __call__(self) -> int:
        """Begin or resume the run, train it to the end, and print its result.

        The exit status is 1 if the folder of a finished run is damaged, else 0.
        """
        from fedquilt.cli.progress import progress
        from fedquilt.cli.results import show_result
        from fedquilt.cli.show import print_json, say

        self.check_target()
        with output(self.json) as (console, stdout), ExitStack() as stack:
            if self.resume:
                self.check_resume("trust")
                loop = resumed(self.resume, self.rounds, stack, self.trust)
            else:
                experiment = self.experiment(self.config, self.method)
                loop = begun(experiment, self.source(self.config, self.method), self.out, stack)
            loop.check_target(self.target)
            if loop.run:
                say(console, "\n".join(loop.first_lines))
                with progress(console, loop.experiment.rounds) as begin:
                    loop.start(begin)
            summary = loop.summary_with(self.target)
            if self.json:
                print_json(summary, stdout)
            else:
                show_result(console, summary)
            if loop.damage:
                listed = "\n  ".join(loop.damage)
                state = f"the run in {loop.rounds} is finished and its summary is intact"
                print(
                    f"RecordError: {state}, but other files are damaged:\n  {listed}",
                    file=sys.stderr,
                )
        return int(bool(loop.damage))
