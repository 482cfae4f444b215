"""The command `fedquilt export`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedquilt.cli.options import (
    Flag,
    Folder,
    Format,
    Macs,
    Norms,
    Params,
    Real,
    Round,
    Shares,
    Target,
    Whole,
)
from fedquilt.cli.output import output
from fedquilt.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console

    from fedquilt.terms import Budget


@dataclass(frozen=True)
class ExportRequest:
    """Export the model of a run for a device of some size, as ONNX, .pt2 or safetensors.

    The file is read back and its outputs on test samples are compared with torch's before it gets
    its name. Without a limit the whole model is exported. With several shares the file is a
    safetensors file of all of them, from which fedquilt.load_model makes a module that can change
    its size.
    """

    # folder of the run: --out of `fedquilt run`; on a device its state folder: --state of `join`
    run: Folder
    out: Target  # file to write; the end of its name may give the format
    share: Shares = ()  # share of every layer's channels, in (0, 1]; may be given again
    params: Params = None  # limit on parameters
    macs: Macs = None  # limit on multiply-adds per sample
    # limit on bytes of inference on one sample: float32 weights and activations
    memory: Real = None
    client: Whole = None  # client whose model is written, if each has its own (fedbn, local, rafl)
    # statistics of norm layers; post measures them over the training data; if not given, those of
    # the run
    norms: Norms = None
    # weight of the noised net in dual norms: 0 is the clean net, 1 the noised one
    robustness: Real = None
    # round whose weights are written; best: the best on validation samples; the last one if not
    # given
    round: Round = None
    format: Format = ""  # format of the file; if not given, by the end of its name
    force: Flag = False  # overwrite an existing file
    # run the code that the run's folder names, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Load the run, write its model, and print what was written."""
        from fedquilt.cli.results import show_export
        from fedquilt.cli.show import print_json, say

        with output(self.json) as (console, stdout):
            from fedquilt.deploy.export import check_place, chosen, export_sizes
            from fedquilt.deploy.formats import FORMATS
            from fedquilt.deployment.own_net import is_state_folder
            from fedquilt.runs.load import load_run

            if is_state_folder(self.run):
                self._export_own(console, stdout)
                return
            budgets = self._budgets()
            check_place(self.out, self.force)
            kind = chosen(self.out, self.format)
            FORMATS[kind].check()
            run = load_run(self.run, trust=self.trust)
            if self.round is not None:
                run = run.at(int(self.round) if self.round.isdecimal() else self.round)
            whose = "" if self.client is None else f", client {self.client}'s"
            sizes = ", ".join(map(str, budgets))
            choice = "the best on validation samples, " if self.round == "best" else ""
            source = (
                f"{self.run} after round {run.server.round} "
                f"({choice}checkpoint/{run.server.round:08}.json)"
            )
            say(console, f"{source}: a model of {sizes}{whose} as {kind}")
            options: dict[str, Any] = {
                "client": self.client,
                "norms": self.norms,
                "robustness": self.robustness,
            }
            options |= {"format": kind, "force": self.force}
            several = len(budgets) > 1
            exported = (
                export_sizes(run, self.out, self.share, **options)
                if several
                else [run.export(self.out, budgets[0], **options)]
            )
            if self.json:
                listed = [
                    {**model.to_dict(), "checkpoint": f"checkpoint/{model.round:08}.json"}
                    for model in exported
                ]
                print_json(listed if several else listed[0], stdout)
            else:
                show_export(console, exported)

    def _export_own(self, console: Console, stdout: TextIO) -> None:
        """Write the net of a device from its state folder, and print what was written.

        Args:
            console: Where people read.
            stdout: Where programs read JSON.
        """
        from dataclasses import fields

        from fedquilt.cli.results import show_export
        from fedquilt.cli.show import print_json, say
        from fedquilt.deployment.own_net import export_own

        allowed = {"run", "out", "format", "force", "json"}
        beside = [
            f"--{option.name}"
            for option in fields(self)
            if option.name not in allowed and getattr(self, option.name) != option.default
        ]
        if beside:
            raise ConfigError(
                f"{', '.join(beside)} was asked for with {self.run}, the state folder of a device; "
                "it has one net, with the size and the norms of the device. --format, --force and "
                "--json go with it."
            )
        exported = export_own(self.run, self.out, self.format, self.force)
        say(console, f"{self.run} after round {exported.round}: the device's own net")
        if self.json:
            print_json(exported.to_dict(), stdout)
        else:
            show_export(console, [exported])

    def _budgets(self) -> list[Budget]:
        from fedquilt.terms import Budget

        bounds = {"params": self.params, "macs": self.macs, "memory": self.memory}
        bounded = any(value is not None for value in bounds.values())
        if bounded and len(self.share) > 1:
            raise ConfigError(
                "several shares and a bound were asked for; a file of several sizes takes shares "
                "alone."
            )
        shares = self.share or ((None,) if bounded else (1.0,))
        return [Budget(share=share, **bounds) for share in shares]
