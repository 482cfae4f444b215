"""The command `fedquilt clients`."""

from __future__ import annotations

from dataclasses import dataclass

from fedquilt.cli.options import (
    Flag,
    Folder,
)
from fedquilt.cli.output import output
from fedquilt.errors import (
    ConfigError,
)


@dataclass(frozen=True)
class ClientsRequest:
    """Print the costs and results of the clients of a run.

    Costs are those of a round. Results are the main figure (such as accuracy) on each client's own
    test samples, for a model of its own size and for the whole model. The part of the model that
    each domain has trained is printed too.
    """

    run: Folder  # folder of the run: --out of `fedquilt run`
    # run the code that the run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print every client as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Load the run, and print costs and results of its clients."""
        from fedquilt.cli.results import show_clients
        from fedquilt.cli.show import print_json

        with output(self.json) as (console, stdout):
            from fedquilt.runs.load import load_run

            run = load_run(self.run, trust=self.trust)
            if run.absent:
                raise ConfigError(
                    f"the clients of {self.run} were asked for; their data cannot be had: "
                    f"{run.absent}"
                )
            per_client = run.per_client()
            if self.json:
                print_json(per_client.to_dict(), stdout)
            else:
                show_clients(console, per_client)
