"""The command `fedquilt check`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedquilt.cli.options import (
    Assignments,
    DataOptions,
    Flag,
    MethodName,
)
from fedquilt.cli.output import output
from fedquilt.errors import (
    ConfigError,
)

if TYPE_CHECKING:
    from fedquilt.methods import Method


@dataclass(frozen=True)
class CheckRequest:
    """Check a method as its author would: budgets, engines, links, resume, determinism and export.

    The method is trained on a small federation for some seconds. The exit status is 1 if a check
    failed.
    """

    method: MethodName  # method: a name of `fedquilt list methods`, or file.py:factory
    # a setting of the method by its path, such as method.shift=2; may be given again
    assign: Assignments = ()
    json: Flag = False  # print the findings as JSON on standard output, and nothing else there

    def __call__(self) -> int:
        """Check the method, print the findings, and return 1 if a check failed, else 0."""
        from fedquilt.cli.progress import check_progress
        from fedquilt.cli.results import show_findings
        from fedquilt.cli.show import print_json

        with output(self.json) as (console, stdout):
            import torch

            from fedquilt.conformance.checks import CHECKS
            from fedquilt.conformance.method import check_method

            method = self.chosen()
            torch.set_num_threads(1)  # The net is too small for several threads.
            with check_progress(console, len(CHECKS)) as watch:
                findings = check_method(method, watch=watch)
            has_failed = any(finding.status == "failed" for finding in findings)
            if self.json:
                checks = [finding.to_dict() for finding in findings]
                print_json(
                    {"method": self.method, "passed": not has_failed, "checks": checks}, stdout
                )
            else:
                show_findings(console, self.method, findings)
        return int(has_failed)

    def chosen(self) -> Method:
        """Return the method with its own defaults and the settings of `--set`.

        Raises:
            ConfigError: `--set` names a setting that is not the method's.
        """
        from fedquilt.config.toml import parse_assignment
        from fedquilt.runs.demo import defaults
        from fedquilt.runs.experiment import Experiment

        foreign = [text for text in self.assign if parse_assignment(text)[0][0] != "method"]
        if foreign:
            raise ConfigError(
                f"check {self.method} --set {foreign[0]} was asked for; methods are checked on a "
                "federation of their own, and only settings of the method fit, such as --set "
                "method.local.norm=tracked."
            )
        settings, sources = DataOptions(assign=self.assign).layers(defaults(self.method))
        return Experiment.of(settings, sources).method
