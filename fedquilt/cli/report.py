"""The command `fedquilt report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from fedquilt.cli.options import File, Flag, Text
from fedquilt.cli.output import output
from fedquilt.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

Folders = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="DIR…")]
ReportFormat = Annotated[
    Literal["html", "png", "svg", "pdf"],
    tyro.conf.arg(metavar="html|png|svg|pdf", help_behavior_hint=""),
]
DEFAULT_FILE = "report.html"


@dataclass(frozen=True)
class ReportRequest:
    """Write a page about a run, several runs or a study, that opens without a network.

    It has curves, the positions of the model that each round trained, the clients, their
    participation and the costs. Several runs are compared. With --format its charts are written
    as image files instead.
    """

    # folders of runs (--out of `fedquilt run`), or of a study (--out of `fedquilt compare`)
    folders: Folders
    # file to write, report.html if not given; with an image format the folder of the files
    out: File = None
    format: ReportFormat = "html"  # html is one page, the others are one file for each chart
    metric: Text = None  # metric to show; the task's main one if not given
    force: Flag = False  # overwrite an existing file
    # run code that the folders name, and add it to your list of trusted code
    trust: Flag = False
    json: Flag = False  # print what was written as JSON on standard output, and nothing else there

    def __call__(self) -> None:
        """Read the folders, write the page or the charts, and print what was written."""
        from fedquilt.cli.show import print_json, say

        with output(self.json) as (console, stdout):
            out = self._target()
            written = self._write(out, console)
            size = sum(path.stat().st_size for path in written)
            if self.json:
                files = [str(path) for path in written]
                print_json({"format": self.format, "files": files, "bytes": size}, stdout)
                return
            for path in written:
                say(console, str(path))
            say(console, f"{len(written)} file{'s'[: len(written) != 1]}, {size:,} bytes")

    def _target(self) -> Path:
        """Return the file or folder to write, after a check that nothing is overwritten."""
        if self.format == "html":
            out = Path(self.out or DEFAULT_FILE)
            if out.is_dir():
                raise ConfigError(
                    f"--out {out} was asked for; it is a folder. Name a file, such as "
                    f"{out / DEFAULT_FILE}."
                )
            if out.exists() and not self.force:
                raise ConfigError(
                    f"{out} is there already; give another --out, or --force to replace it."
                )
            return out
        if self.out is None:
            raise ConfigError(
                f"--format {self.format} was asked for without a folder; name one with --out DIR."
            )
        out = Path(self.out)
        if out.exists() and not out.is_dir():
            raise ConfigError(
                f"--out {out} was asked for with --format {self.format}; it is a file. Name a "
                "folder."
            )
        if out.is_dir() and any(out.glob(f"*.{self.format}")) and not self.force:
            raise ConfigError(
                f"{out} has {self.format} files already; give another --out, or --force to "
                "replace files of the same names."
            )
        return out

    def _write(self, out: Path, console: Console) -> list[Path]:
        """Write the page or the charts, and return the files.

        Args:
            out: File or folder to write.
            console: Console for the progress.
        """
        from fedquilt.report.collect import collect
        from fedquilt.report.document import content_of, document, sections_of
        from fedquilt.report.files import save_charts
        from fedquilt.storage.files import why, write_text

        with console.status("Reading records") as status:
            collection = collect(self.folders, self.metric or "")
            status.update(f"Drawing {len(collection.runs)} runs")
            sections = sections_of(collection, self.trust)
            status.update(f"Writing {out}")
            if self.format != "html":
                return save_charts(sections, out, self.format)
            page = document(content_of(collection, sections))
            try:
                out.parent.mkdir(parents=True, exist_ok=True)
                write_text(out, page)
            except OSError as error:
                raise ConfigError(f"{out} was to be written; {why(error)}.") from error
            return [out]
